// Newton-Schulz iteration: the coefficient sets with their guards, and the iteration itself in its variants.
// See newton_schulz.h.
#include "optim/newton_schulz.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "kernels/error.h"
#include "kernels/kernels.h"

// ---------------------------------------------------------------------------------------------------
// Coefficients

namespace {

constexpr NewtonSchulzStep keller = {3.4445, -4.7750, 2.0315};
constexpr NewtonSchulzStep you[] = {{4.0848, -6.8946, 2.9270},
                                    {3.9505, -6.3029, 2.6377},
                                    {3.7418, -5.5913, 2.3037},
                                    {2.8769, -3.1427, 1.2046},
                                    {2.8366, -3.0525, 1.2012}};
constexpr NewtonSchulzStep cubic5[] = {{3.3656576, -3.3420992, 0},
                                       {2.5744352, -1.4957376, 0},
                                       {2.5368962, -1.4312570, 0},
                                       {2.4418906, -1.2764040, 0},
                                       {2.2230472, -0.9630650, 0}};

// Further steps only multiply directions of size 1e-7, which are rounding, by another 1.8 to 3.4 each.
constexpr int most_steps = 10;
constexpr size_t most_custom_steps = 12;

struct CoefficientSet {
    const char* name;
    int fewest, most;  // steps
    const char* reason;
    NewtonSchulzSteps (*make)(int steps, bool gram);
};

const CoefficientSet coefficient_sets[] = {
    {"keller", 3, most_steps, "with fewer, singular values of 0.01 stay below 0.12",
     [](int steps, bool) { return NewtonSchulzSteps(static_cast<size_t>(steps), keller); }},
    {"you", 5, 5, "a sixth step would shrink updates to an eighth",
     [](int, bool) { return NewtonSchulzSteps(std::begin(you), std::end(you)); }},
    {"polar-express", 5, most_steps, "its first steps overshoot, as far as 1.9, and count on the later ones",
     [](int steps, bool gram) {
         return gram ? polar_express_gram(steps) : polar_express(1e-3, steps, 0.02, 0.02);
     }},
    {"cubic5", 5, 5, "a sixth step would turn directions round",
     [](int, bool) { return NewtonSchulzSteps(std::begin(cubic5), std::end(cubic5)); }},
};

}  // namespace

NewtonSchulzSteps newton_schulz_set(const std::string& name, int steps, NewtonSchulzVariant variant) {
    const auto set = std::find_if(std::begin(coefficient_sets), std::end(coefficient_sets),
                                  [&](const CoefficientSet& s) { return name == s.name; });
    if (set == std::end(coefficient_sets)) {
        std::string names;
        for (const CoefficientSet& s : coefficient_sets) names += s.name + std::string(", ");
        fail("--muon-ns %s: must be one of %scustom", name.c_str(), names.c_str());
    }
    if (set->fewest == set->most && steps < set->most)
        fail("--muon-ns-steps %d: %s has exactly %d, which build on each other", steps, set->name, set->most);
    if (set->fewest == set->most && steps > set->most)
        fail("--muon-ns-steps %d: %s has exactly %d; %s", steps, set->name, set->most, set->reason);
    if (steps < set->fewest)
        fail("--muon-ns-steps %d: %s needs %d or more; %s", steps, set->name, set->fewest, set->reason);
    if (steps > set->most)
        fail("--muon-ns-steps %d: at most %d; more only amplify rounding errors", steps, set->most);
    const NewtonSchulzSteps result = set->make(steps, variant == NewtonSchulzVariant::gram);
    newton_schulz_check(name, result);
    return result;
}

NewtonSchulzSteps newton_schulz_custom(const std::string& coefficients, int steps) {
    const auto refuse = [&](const char* rule) {
        fail("--muon-ns-coefficients '%s': %s", coefficients.c_str(), rule);
    };
    NewtonSchulzSteps result;
    const char* at = coefficients.c_str();
    const auto number = [&](char end_mark) {
        char* end = nullptr;
        const double value = strtod(at, &end);
        const bool last = end_mark == ';' && *end == '\0';
        if (end == at || !std::isfinite(value) || (*end != end_mark && !last))
            refuse("must be a,b,c or a,b,c;a,b,c;..., three numbers a step");
        at = last ? nullptr : end + 1;
        return value;
    };
    while (at != nullptr) {
        const double a = number(','), b = number(','), c = number(';');
        result.push_back({a, b, c});
    }
    if (steps < 1 || static_cast<size_t>(steps) > most_custom_steps)
        fail("--muon-ns-steps %d: must be 1 to %zu", steps, most_custom_steps);
    if (result.size() == 1) result.assign(static_cast<size_t>(steps), result[0]);
    if (result.size() != static_cast<size_t>(steps)) {
        fail("--muon-ns-steps %d: --muon-ns-coefficients has %zu triples, one a step", steps, result.size());
    }
    newton_schulz_check("custom --muon-ns-coefficients " + coefficients, result);
    return result;
}

SingularValueRange newton_schulz_range(const NewtonSchulzSteps& steps, double lowest) {
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

void newton_schulz_check(const std::string& name, const NewtonSchulzSteps& steps) {
    const SingularValueRange range = newton_schulz_range(steps, 0.01);
    if (!(range.low >= 0.35 && range.high <= 1.3)) {
        fail("--muon-ns %s: %zu steps take singular values of 0.01 to 1 into %.3g to %.3g, not near 1",
             name.c_str(), steps.size(), range.low, range.high);
    }
    const SingularValueRange small = newton_schulz_range(steps, 1e-4);
    if (!(small.low > 0.0 && small.high <= 1.3)) {
        fail("--muon-ns %s: %zu steps take singular values of 0.0001 to 0.01 into %.3g to %.3g", name.c_str(),
             steps.size(), small.low, small.high);
    }
}

// ---------------------------------------------------------------------------------------------------
// Restarts of the Gram variant

namespace {

bool is_restart(const std::vector<size_t>& restarts, size_t step) {
    return std::find(restarts.begin(), restarts.end(), step) != restarts.end();
}

// The positions 1 to 31 that are set in the mask.
std::vector<size_t> positions_of(unsigned mask) {
    std::vector<size_t> positions;
    for (size_t i = 1; i < 32; i++) {
        if (mask >> i & 1u) positions.push_back(i);
    }
    return positions;
}

}  // namespace

double gram_condition(const NewtonSchulzSteps& steps, const std::vector<size_t>& restarts) {
    constexpr size_t points = 2000;
    constexpr double shift = 4e-4;  // of an eigenvalue of X X^T, by rounding
    std::vector<double> x(points), r(points), q(points);
    for (size_t i = 0; i < points; i++)
        x[i] = std::pow(10.0, -10.0 * static_cast<double>(i) / static_cast<double>(points - 1));
    double worst = 0.0;
    for (size_t t = 0; t < steps.size(); t++) {
        double least = INFINITY, most = 0.0;
        for (size_t i = 0; i < points; i++) {
            if (t == 0 || is_restart(restarts, t)) {
                x[i] *= t == 0 ? 1.0 : q[i];
                r[i] = x[i] * x[i] - shift;
                q[i] = 1.0;
            }
            const double factor = steps[t].a + r[i] * (steps[t].b + r[i] * steps[t].c);
            q[i] *= factor;
            r[i] *= factor * factor;
            least = std::min(least, std::abs(q[i]));
            most = std::max(most, std::abs(q[i]));
            if (std::isnan(q[i])) return INFINITY;
        }
        worst = std::max(worst, most / least);
    }
    return worst;
}

std::vector<size_t> newton_schulz_restarts(const NewtonSchulzSteps& steps, size_t fewest_restarts) {
    constexpr double stable = 300.0;
    double best = INFINITY;
    for (size_t count = fewest_restarts; count < steps.size(); count++) {
        std::vector<size_t> chosen;
        for (unsigned mask = 0; mask < 1u << steps.size(); mask += 2) {  // bit 0: the start is no restart
            if (static_cast<size_t>(std::popcount(mask)) != count) continue;
            const double condition = gram_condition(steps, positions_of(mask));
            if (condition < best) best = condition, chosen = positions_of(mask);
        }
        if (best <= stable) return chosen;
    }
    fail("--muon-ns-variant gram: these coefficients are not stable with any restarts: condition number %g",
         best);
}

NewtonSchulz newton_schulz_plan(const NewtonSchulzSteps& steps, NewtonSchulzVariant variant,
                                size_t fewest_restarts) {
    NewtonSchulz method{steps, variant, {}};
    if (variant == NewtonSchulzVariant::gram)
        method.restarts = newton_schulz_restarts(steps, fewest_restarts);
    return method;
}

// ---------------------------------------------------------------------------------------------------
// The iteration

namespace {

bool by_gram(const NewtonSchulz& method, size_t rows, size_t cols) {
    return method.variant == NewtonSchulzVariant::gram && rows != cols;
}

// A batch of matrices, and which side is the shorter one.
struct Shape {
    size_t batch, rows, cols;

    bool tall() const { return rows > cols; }
    size_t side() const { return std::min(rows, cols); }
    size_t longer() const { return std::max(rows, cols); }
    size_t matrices() const { return batch * rows * cols; }
    size_t squares() const { return batch * side() * side(); }
};

// gram = X X^T, or X^T X of a tall X.
template <typename Element>
void form_gram(Element* gram, const Element* x, const Shape& s, bool symmetric, Stream* stream) {
    if (symmetric) {
        gemm_symmetric<Element>(gram, x, x, nullptr, s.tall(), s.side(), s.longer(), 1.0f, 0.0f, 0.0f,
                                s.batch, stream);
    } else {
        gemm_batched<Element>(gram, x, x, nullptr, s.tall(), !s.tall(), s.side(), s.side(), s.longer(), 1.0f,
                              0.0f, s.batch, stream);
    }
}

// next = alpha factor X + beta X for a symmetric factor; of a tall X the factor is on its right.
template <typename Element>
void apply_factor(Element* next, const Element* factor, const Element* x, const Shape& s, float alpha,
                  float beta, Stream* stream) {
    gemm_batched<Element>(next, s.tall() ? x : factor, s.tall() ? factor : x, beta == 0.0f ? nullptr : x,
                          false, false, s.rows, s.cols, s.side(), alpha, beta, s.batch, stream);
}

// The variants dense and symmetric.
template <typename Element>
Element* iterate_whole(Element* x, Element* workspace, const Shape& s, const NewtonSchulz& method,
                       Stream* stream) {
    const bool symmetric = method.variant != NewtonSchulzVariant::dense;
    Element* next = workspace;
    Element* const gram = next + s.matrices();
    Element* const polynomial = gram + s.squares();
    for (const NewtonSchulzStep& step : method.steps) {
        const float a = static_cast<float>(step.a);
        const float b = static_cast<float>(step.b);
        const float c = static_cast<float>(step.c);
        form_gram(gram, x, s, symmetric, stream);
        if (step.c == 0.0) {  // next = a X + b gram X
            apply_factor(next, gram, x, s, b, a, stream);
        } else {  // polynomial = b gram + c gram^2;  next = a X + polynomial X
            if (symmetric) {
                gemm_symmetric(polynomial, gram, gram, gram, false, s.side(), s.side(), c, b, 0.0f, s.batch,
                               stream);
            } else {
                gemm_batched(polynomial, gram, gram, gram, false, false, s.side(), s.side(), s.side(), c, b,
                             s.batch, stream);
            }
            apply_factor(next, polynomial, x, s, 1.0f, a, stream);
        }
        std::swap(x, next);
    }
    return x;
}

// A step multiplies X by T = a I + b R + c R^2, where R = X X^T, and so R by T^2. Instead of X, R and the
// product Q of the T's are kept. T = a I + scale F is not formed: F = b R + c R^2 and scale = 1, or, of a
// cubic, F = R and scale = b. All are polynomials in R: they are symmetric and commute.
template <typename Element>
Element* iterate_gram(Element* x, Element* workspace, const Shape& s, const NewtonSchulz& method,
                      Stream* stream) {
    Element* next = workspace;
    Element* r = next + s.matrices();
    Element* polynomial = r + s.squares();
    Element* q = polynomial + s.squares();
    Element* spare = q + s.squares();
    const auto multiply = [&](Element* d, const Element* p1, const Element* p2, const Element* c,
                              double alpha, double beta) {
        gemm_symmetric(d, p1, p2, c, false, s.side(), s.side(), static_cast<float>(alpha),
                       static_cast<float>(beta), 0.0f, s.batch, stream);
    };
    for (size_t i = 0; i < method.steps.size(); i++) {
        const auto [a, b, c] = method.steps[i];
        const bool first = i == 0 || is_restart(method.restarts, i);
        const bool last = i + 1 == method.steps.size() || is_restart(method.restarts, i + 1);
        if (first) form_gram(r, x, s, true, stream);
        const bool cubic = c == 0.0;
        if (!cubic) multiply(polynomial, r, r, r, c, b);
        Element* const factor = cubic ? r : polynomial;
        const double scale = cubic ? b : 1.0;
        if (first) {
            // q = a I + scale factor, by way of a product that is a few columns deep and counts 0 times.
            gemm_symmetric<Element>(q, factor, factor, factor, false, s.side(), std::min<size_t>(s.side(), 8),
                                    0.0f, static_cast<float>(scale), static_cast<float>(a), s.batch, stream);
        } else {
            multiply(spare, q, factor, q, scale, a);
            std::swap(q, spare);
        }
        if (last) {
            apply_factor(next, q, x, s, 1.0f, 0.0f, stream);
            std::swap(x, next);
        } else if (cubic) {
            multiply(spare, r, r, r, scale, a);
            multiply(polynomial, spare, r, spare, scale, a);
            std::swap(r, polynomial);
        } else {
            multiply(spare, r, factor, r, scale, a);
            multiply(r, spare, factor, spare, scale, a);
        }
    }
    return x;
}

}  // namespace

double newton_schulz_flops(const NewtonSchulz& method, size_t rows, size_t cols) {
    const double m = static_cast<double>(std::min(rows, cols)), n = static_cast<double>(std::max(rows, cols));
    const double gram = m * m * n, square = m * m * m, apply = 2.0 * m * m * n;
    const bool dense = method.variant == NewtonSchulzVariant::dense;
    double flops = 0.0;
    for (size_t i = 0; i < method.steps.size(); i++) {
        const double polynomial = method.steps[i].c == 0.0 ? 0.0 : square;
        if (!by_gram(method, rows, cols)) {
            flops += (dense ? 2.0 : 1.0) * (gram + polynomial) + apply;
            continue;
        }
        const bool first = i == 0 || is_restart(method.restarts, i);
        const bool last = i + 1 == method.steps.size() || is_restart(method.restarts, i + 1);
        flops += polynomial + (first ? gram : square) + (last ? apply : 2.0 * square);
    }
    return flops;
}

size_t newton_schulz_workspace(const NewtonSchulz& method, size_t batch, size_t rows, size_t cols) {
    const size_t side = std::min(rows, cols), squares = by_gram(method, rows, cols) ? 4 : 2;
    return batch * (rows * cols + squares * side * side);
}

template <typename Element>
Element* newton_schulz(Element* x, Element* workspace, size_t batch, size_t rows, size_t cols,
                       const NewtonSchulz& method, Stream* stream) {
    const auto iterate = by_gram(method, rows, cols) ? iterate_gram<Element> : iterate_whole<Element>;
    return iterate(x, workspace, Shape{batch, rows, cols}, method, stream);
}

template float* newton_schulz(float*, float*, size_t, size_t, size_t, const NewtonSchulz&, Stream*);
template fp16_t* newton_schulz(fp16_t*, fp16_t*, size_t, size_t, size_t, const NewtonSchulz&, Stream*);
template bf16_t* newton_schulz(bf16_t*, bf16_t*, size_t, size_t, size_t, const NewtonSchulz&, Stream*);
