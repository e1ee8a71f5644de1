// AdamW (Loshchilov, Hutter 2019) with PyTorch's semantics: decoupled weight decay, epsilon added after the
// bias correction. One pass; 28 bytes move for each fp32 parameter (20 with averages in bf16),
// which is what it costs.
//
// The averages are written a + (1 - beta) (b - a): one product for each addition, so that the compiler can
// form an FMA in one way only, in vector code and in tails alike.
#include <cmath>
#include <type_traits>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/rounding.h"
#include "kernels/kernels.h"

template <typename Storage, typename State>
void adamw_update(Storage* param, float* master, State* m, State* v, const float* grad, size_t n,
                  const AdamWStep& step, const StateRounding& rounding, Stream* stream) {
    check_sizes("adamw_update", {n});
    if (master == nullptr && !std::is_same_v<Storage, float>)
        fail("adamw_update: 16-bit parameters need a master");

    const float one_minus_beta1 = 1.0f - step.beta1;
    const float one_minus_beta2 = 1.0f - step.beta2;
    const float decay = static_cast<float>(1.0 - static_cast<double>(step.lr) * step.weight_decay);
    const float step_size = step.lr / step.bias_correction1;
    const float v_scale = 1.0f / std::sqrt(step.bias_correction2);
    const float eps = step.eps;
    const float grad_scale = step.grad_scale;
    const bool cautious = step.cautious;

    const auto update = [=](size_t begin, size_t end, const auto& word) {
#pragma omp simd
        for (size_t i = begin; i < end; i++) {
            const float g = grad[i] * grad_scale;
            const float old_m = to_float(m[i]), old_v = to_float(v[i]);
            const float new_m = old_m + one_minus_beta1 * (g - old_m);
            const float new_v = old_v + one_minus_beta2 * (g * g - old_v);
            const float change = step_size * new_m / (std::sqrt(new_v) * v_scale + eps);
            const float old_p = master != nullptr ? master[i] : to_float(param[i]);
            const float kept = cautious && new_m * old_p < 0.0f ? 1.0f : decay;
            const float p = old_p * kept - change;
            m[i] = from_float_stochastic<State>(new_m, word(i) & 0xffffu);
            v[i] = from_float_stochastic<State>(new_v, word(i) >> 16);
            if (master != nullptr) master[i] = p;
            param[i] = from_float<Storage>(p);
        }
    };
    for_chunks(stream, n, parallel_grain,
               [=](size_t begin, size_t end) { for_rounding_runs<State>(rounding, begin, end, update); });
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
