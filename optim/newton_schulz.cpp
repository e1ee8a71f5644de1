// Newton-Schulz iteration: the coefficient sets with their guards, and the iteration itself, three
// batched matrix products a step. See newton_schulz.h.
#include "optim/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/error.h"
#include "kernels/kernels.h"

std::vector<NewtonSchulzStep> newton_schulz_set(const std::string& name, int steps) {
    struct Set {
        const char* name;
        int fewest;
        const char* reason;
    };
    const Set sets[] = {
        {"keller", 3, "with fewer, singular values of 0.01 stay below 0.12"},
        {"polar-express", 5, "its first steps overshoot, as far as 1.9, and count on the later ones"},
    };
    // Each further step only multiplies directions of size 1e-7, which are rounding, by another 1.8 to 3.4.
    constexpr int most = 10;

    const Set* set =
        std::find_if(std::begin(sets), std::end(sets), [&](const Set& s) { return name == s.name; });
    if (set == std::end(sets)) fail("--muon-ns %s: must be keller or polar-express", name.c_str());
    if (steps < set->fewest) {
        fail("--muon-ns-steps %d: %s needs %d or more; %s", steps, set->name, set->fewest, set->reason);
    }
    if (steps > most) {
        fail("--muon-ns-steps %d: at most %d; more only amplify rounding errors", steps, most);
    }

    std::vector<NewtonSchulzStep> result;
    if (name == "keller") {
        result.assign(static_cast<size_t>(steps), {3.4445, -4.7750, 2.0315});
    } else {
        result = polar_express(1e-3, steps, 0.02, 0.02);
    }
    newton_schulz_check(name, result);
    return result;
}

SingularValueRange newton_schulz_range(const std::vector<NewtonSchulzStep>& steps, double lowest) {
    // Spaced in the logarithm, because the slope at 0 is steep; dense, because peaks near 1 are narrow.
    constexpr int points = 20000;
    SingularValueRange range{INFINITY, -INFINITY};
    for (int i = 0; i <= points; i++) {
        double s = std::pow(lowest, static_cast<double>(i) / points);
        for (const NewtonSchulzStep& step : steps) s = step.value(s);
        range = {std::min(range.low, s), std::max(range.high, s)};
    }
    return range;
}

void newton_schulz_check(const std::string& name, const std::vector<NewtonSchulzStep>& steps) {
    const SingularValueRange range = newton_schulz_range(steps, 0.01);
    if (range.low < 0.35 || range.high > 1.3) {
        fail("--muon-ns %s: %zu steps take singular values of 0.01 to 1 into %.2f to %.2f, not near 1",
             name.c_str(), steps.size(), range.low, range.high);
    }
}

size_t newton_schulz_workspace(size_t batch, size_t rows, size_t cols) {
    const size_t side = std::min(rows, cols);
    return batch * (rows * cols + 2 * side * side);
}

template <typename Element>
Element* newton_schulz(Element* x, Element* workspace, size_t batch, size_t rows, size_t cols,
                       const std::vector<NewtonSchulzStep>& steps, Stream* stream) {
    const bool tall = rows > cols;
    const size_t side = std::min(rows, cols);
    Element* next = workspace;
    Element* gram = next + batch * rows * cols;
    Element* polynomial = gram + batch * side * side;
    for (const NewtonSchulzStep& step : steps) {
        const float a = static_cast<float>(step.a);
        const float b = static_cast<float>(step.b);
        const float c = static_cast<float>(step.c);
        // gram = X X^T;  polynomial = b gram + c gram^2;  next = a X + polynomial X.  Tall: gram = X^T X and
        // X polynomial, the same function of X.
        gemm_batched<Element>(gram, x, x, nullptr, tall, !tall, side, side, std::max(rows, cols), 1.0f, 0.0f,
                              batch, stream);
        gemm_batched(polynomial, gram, gram, gram, false, false, side, side, side, c, b, batch, stream);
        gemm_batched(next, tall ? x : polynomial, tall ? polynomial : x, x, false, false, rows, cols, side,
                     1.0f, a, batch, stream);
        std::swap(x, next);
    }
    return x;
}

template float* newton_schulz(float*, float*, size_t, size_t, size_t, const std::vector<NewtonSchulzStep>&,
                              Stream*);
template fp16_t* newton_schulz(fp16_t*, fp16_t*, size_t, size_t, size_t, const std::vector<NewtonSchulzStep>&,
                               Stream*);
