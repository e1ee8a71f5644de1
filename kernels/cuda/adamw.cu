// AdamW (Loshchilov, Hutter 2019) with PyTorch's semantics: decoupled weight decay, epsilon added after the
// bias correction.
//   g = grad * grad_scale;   m += (1 - beta1) (g - m);   v += (1 - beta2) (g^2 - v)
//   p = p (1 - lr wd) - lr/bias_correction1 * m / (sqrt(v / bias_correction2) + eps)
// Bytes for each parameter: 28 in fp32 (p, m, v read and written, grad read), 30 with a 16-bit parameter and
// its master, 8 fewer with averages in bf16; about 15 FLOPs: memory-bound. A thread takes 4 neighbours: each
// access of a warp is 512 bytes on end.
#include <cmath>
#include <type_traits>

#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/rounding.cuh"
#include "kernels/kernels.h"

namespace {

// What is the same for every parameter.
struct Factors {
    float one_minus_beta1, one_minus_beta2, decay, step_size, v_scale, eps, grad_scale;
    bool cautious;
};

template <typename Storage, typename State>
__global__ void __launch_bounds__(elementwise_threads)
    adamw_kernel(Storage* param, float* master, State* m, State* v, const float* __restrict__ grad, size_t n,
                 Factors f, StateRounding rounding, bool vectors) {
    for_my_entries(n, vectors, [&](size_t i, auto width) {
        constexpr unsigned size = decltype(width)::value;
        const Pack<float, size> g = load_pack<true, size>(grad + i);
        Pack<float, size> m_ = load_pack<true, size>(m + i), v_ = load_pack<true, size>(v + i);
        Pack<float, size> p =
            master != nullptr ? load_pack<true, size>(master + i) : load_pack<true, size>(param + i);
        for (unsigned j = 0; j < size; j++) {
            const float gradient = __fmul_rn(g.element[j], f.grad_scale);
            m_.element[j] = fmaf(f.one_minus_beta1, gradient - m_.element[j], m_.element[j]);
            v_.element[j] = fmaf(f.one_minus_beta2, fmaf(gradient, gradient, -v_.element[j]), v_.element[j]);
            const float change = f.step_size * m_.element[j] / fmaf(sqrtf(v_.element[j]), f.v_scale, f.eps);
            const bool grows = f.cautious && m_.element[j] * p.element[j] < 0.0f;
            p.element[j] = fmaf(p.element[j], grows ? 1.0f : f.decay, -change);
        }
        const Pack<uint32_t, size> words = rounding_words<State, size>(rounding, i);
        store_state(m + i, m_, words, 0);
        store_state(v + i, v_, words, 16);
        if (master != nullptr) store_pack<true>(master + i, p);
        store_pack<true>(param + i, p);
    });
}

}  // namespace

template <typename Storage, typename State>
void adamw_update(Storage* param, float* master, State* m, State* v, const float* grad, size_t n,
                  const AdamWStep& step, const StateRounding& rounding, Stream* stream) {
    check_sizes("adamw_update", {n});
    if (master == nullptr && !std::is_same_v<Storage, float>)
        fail("adamw_update: 16-bit parameters need a master");
    const Factors factors = {
        .one_minus_beta1 = 1.0f - step.beta1,
        .one_minus_beta2 = 1.0f - step.beta2,
        .decay = static_cast<float>(1.0 - static_cast<double>(step.lr) * step.weight_decay),
        .step_size = step.lr / step.bias_correction1,
        .v_scale = 1.0f / std::sqrt(step.bias_correction2),
        .eps = step.eps,
        .grad_scale = step.grad_scale,
        .cautious = step.cautious,
    };
    const bool vectors = aligned_to_16(param, master, m, v, grad) && counters_fit_packs<State>(rounding);
    launch(adamw_kernel<Storage, State>, grid_size(elementwise_blocks(n)), elementwise_threads, 0, stream,
           param, master, m, v, grad, n, factors, rounding, vectors);
}

#define INSTANTIATE(Storage, State)                                                                      \
    template void adamw_update(Storage*, float*, State*, State*, const float*, size_t, const AdamWStep&, \
                               const StateRounding&, Stream*);
INSTANTIATE(float, float)
INSTANTIATE(float, bf16_t)
INSTANTIATE(bf16_t, float)
INSTANTIATE(bf16_t, bf16_t)
INSTANTIATE(fp16_t, float)
INSTANTIATE(fp16_t, bf16_t)
