// Softmax cross-entropy: loss = log(sum_v exp(x_v)) - x_target, its gradient p_v - [v = target].
//
// The row's maximum is subtracted first, so no logit is too large; and the loss is formed from
// x_target - maximum, so logits of 1e4 cost no digits. Three passes over a row that stays in L2 (a row of
// GPT-2 is 200 kB); exp is computed again rather than kept, which would need a row of fp32 scratch.
#include <cmath>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/math.h"
#include "kernels/kernels.h"

namespace {

// In pieces added in fp64: fp32 lanes over a whole vocabulary would lose a digit.
double sum_of_exp(const float* x, float maximum, size_t n) {
    constexpr size_t piece = 1024;
    double total = 0.0;
    for (size_t begin = 0; begin < n; begin += piece) {
        total += lane_sum<float>(std::min(piece, n - begin),
                                 [&](size_t i) { return fast_exp(x[begin + i] - maximum); });
    }
    return total;
}

}  // namespace

template <typename Storage>
void cross_entropy(float* losses, Storage* dlogits, const float* logits, const int* targets, float dloss,
                   size_t N, size_t V, size_t Vp, Stream* stream) {
    check_sizes("cross_entropy", {N, V});
    if (V > Vp) fail("cross_entropy: V %zu is above Vp %zu", V, Vp);
    for_rows(stream, N, V, [&](size_t row) {
        const float* x = logits + row * Vp;
        const size_t target = static_cast<size_t>(targets[row]);
        const float maximum = lane_max(x, V);
        const double total = sum_of_exp(x, maximum, V);
        const double loss = std::log(total) - (static_cast<double>(x[target]) - maximum);
        losses[row] = static_cast<float>(loss);
        if (dlogits == nullptr) return;

        Storage* dx = dlogits + row * Vp;
        const float scale = static_cast<float>(dloss / total);
#pragma omp simd
        for (size_t v = 0; v < V; v++) dx[v] = from_float<Storage>(fast_exp(x[v] - maximum) * scale);
        // p - 1 at the target is e^-loss - 1, which does not cancel when p is close to 1.
        dx[target] = from_float<Storage>(static_cast<float>(std::expm1(-loss) * dloss));
        std::fill(dx + V, dx + Vp, from_float<Storage>(0.0f));
    });
}

template void cross_entropy(float*, float*, const float*, const int*, float, size_t, size_t, size_t, Stream*);
template void cross_entropy(float*, bf16_t*, const float*, const int*, float, size_t, size_t, size_t,
                            Stream*);
template void cross_entropy(float*, fp16_t*, const float*, const int*, float, size_t, size_t, size_t,
                            Stream*);
