// Batched matrix products, as Newton-Schulz needs them; see gemm.h for how they are computed.
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/loops.h"
#include "kernels/kernels.h"

template <typename Storage>
void gemm_batched(Storage* d, const Storage* a, const Storage* b, const Storage* c, bool transpose_a,
                  bool transpose_b, size_t m, size_t n, size_t k, float alpha, float beta, size_t batch,
                  Stream* stream) {
    check_sizes("gemm_batched", {m, n, k, batch});
    if (d == nullptr || a == nullptr || b == nullptr) fail("gemm_batched: d, a or b is null");
    if (c == nullptr && beta != 0.0f)
        fail("gemm_batched: c is null and beta is %g", static_cast<double>(beta));
    if (c == d) fail("gemm_batched: c may not be d");

    const Matrix<Storage> op_a = transpose_a ? transposed(a, k, m) : row_major(a, m, k);
    const Matrix<Storage> op_b = transpose_b ? transposed(b, n, k) : row_major(b, k, n);
    const auto at = [&](size_t l, size_t i, size_t j) { return (l * m + i) * n + j; };
    if (beta == 0.0f) {  // c is not read: it may be null, or hold NaNs
        gemm(
            op_a, op_b, m, n, k, batch,
            [&](size_t l, size_t i, size_t j, const float* sums, size_t count) {
                Storage* const out = d + at(l, i, j);
#pragma omp simd
                for (size_t x = 0; x < count; x++) out[x] = from_float<Storage>(alpha * sums[x]);
            },
            stream);
    } else {
        gemm(
            op_a, op_b, m, n, k, batch,
            [&](size_t l, size_t i, size_t j, const float* sums, size_t count) {
                Storage* const out = d + at(l, i, j);
                const Storage* const add = c + at(l, i, j);
#pragma omp simd
                for (size_t x = 0; x < count; x++)
                    out[x] = from_float<Storage>(alpha * sums[x] + beta * to_float(add[x]));
            },
            stream);
    }
}

template void gemm_batched(float*, const float*, const float*, const float*, bool, bool, size_t, size_t,
                           size_t, float, float, size_t, Stream*);
template void gemm_batched(bf16_t*, const bf16_t*, const bf16_t*, const bf16_t*, bool, bool, size_t, size_t,
                           size_t, float, float, size_t, Stream*);
template void gemm_batched(fp16_t*, const fp16_t*, const fp16_t*, const fp16_t*, bool, bool, size_t, size_t,
                           size_t, float, float, size_t, Stream*);
