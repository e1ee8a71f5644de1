// AdamW (Loshchilov, Hutter 2019) with PyTorch's semantics: decoupled weight decay, epsilon added after the
// bias correction. One pass; 28 bytes move for each fp32 parameter, which is what it costs.
//
// The averages are written a + (1 - beta) (b - a): one product for each addition, so that the compiler can
// form an FMA in one way only, in vector code and in tails alike.
#include <cmath>
#include <type_traits>

#include "kernels/cpu/loops.h"
#include "kernels/kernels.h"

template <typename Storage>
void adamw_update(Storage* param, float* master, float* m, float* v, const float* grad, size_t n,
                  const AdamWStep& step, Stream* stream) {
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

    for_chunks(stream, n, parallel_grain, [=](size_t begin, size_t end) {
#pragma omp simd
        for (size_t i = begin; i < end; i++) {
            const float g = grad[i] * grad_scale;
            m[i] += one_minus_beta1 * (g - m[i]);
            v[i] += one_minus_beta2 * (g * g - v[i]);
            const float change = step_size * m[i] / (std::sqrt(v[i]) * v_scale + eps);
            const float p = (master != nullptr ? master[i] : to_float(param[i])) * decay - change;
            if (master != nullptr) master[i] = p;
            param[i] = from_float<Storage>(p);
        }
    });
}

template void adamw_update(float*, float*, float*, float*, const float*, size_t, const AdamWStep&, Stream*);
template void adamw_update(bf16_t*, float*, float*, float*, const float*, size_t, const AdamWStep&, Stream*);
template void adamw_update(fp16_t*, float*, float*, float*, const float*, size_t, const AdamWStep&, Stream*);
