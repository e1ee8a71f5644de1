// Batched matrix products, as Newton-Schulz needs them. How matmul.cuh chooses an algorithm makes the bits of
// a matrix independent of its batch.
#include "kernels/cuda/checks.h"
#include "kernels/cuda/matmul.cuh"
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
    matmul<Storage, Storage>({.d = d,
                              .a = a,
                              .b = b,
                              .c = beta == 0.0f ? nullptr : c,
                              .transpose_a = transpose_a,
                              .transpose_b = transpose_b,
                              .m = m,
                              .n = n,
                              .k = k,
                              .batch = batch,
                              .alpha = alpha,
                              .beta = beta},
                             stream);
}

template void gemm_batched(float*, const float*, const float*, const float*, bool, bool, size_t, size_t,
                           size_t, float, float, size_t, Stream*);
template void gemm_batched(bf16_t*, const bf16_t*, const bf16_t*, const bf16_t*, bool, bool, size_t, size_t,
                           size_t, float, float, size_t, Stream*);
template void gemm_batched(fp16_t*, const fp16_t*, const fp16_t*, const fp16_t*, bool, bool, size_t, size_t,
                           size_t, float, float, size_t, Stream*);
