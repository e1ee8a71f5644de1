// Batched matrix products, as Newton-Schulz needs them. How matmul.cuh chooses an algorithm makes the bits of
// a matrix independent of its batch.
#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul.cuh"
#include "kernels/kernels.h"

namespace {

// Adds gamma to the diagonals and mirrors what is below them. One thread an entry.
template <typename Storage>
__global__ void __launch_bounds__(256) mirror_kernel(Storage* d, size_t m, float gamma, size_t entries) {
    const size_t entry = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (entry >= entries) return;
    Storage* matrix = d + entry / (m * m) * m * m;
    const size_t i = entry / m % m, j = entry % m;
    if (i == j) matrix[i * m + j] = from_float<Storage>(to_float(matrix[i * m + j]) + gamma);
    if (i > j) matrix[j * m + i] = matrix[i * m + j];
}

}  // namespace

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

// The whole product, then its lower half mirrored.
template <typename Storage>
void gemm_symmetric(Storage* d, const Storage* a, const Storage* b, const Storage* c, bool transpose,
                    size_t m, size_t k, float alpha, float beta, float gamma, size_t batch, Stream* stream) {
    check_sizes("gemm_symmetric", {m, k, batch});
    if (d == nullptr || a == nullptr || b == nullptr) fail("gemm_symmetric: d, a or b is null");
    if (c == nullptr && beta != 0.0f)
        fail("gemm_symmetric: c is null and beta is %g", static_cast<double>(beta));
    if (d == a || d == b || d == c) fail("gemm_symmetric: d may not be a, b or c");
    gemm_batched(d, a, b, c, transpose, !transpose, m, m, k, alpha, beta, batch, stream);
    const size_t entries = batch * m * m;
    launch(mirror_kernel<Storage>, grid_size(ceil_div(entries, size_t{256})), 256u, 0, stream, d, m, gamma,
           entries);
}

template void gemm_batched(float*, const float*, const float*, const float*, bool, bool, size_t, size_t,
                           size_t, float, float, size_t, Stream*);
template void gemm_batched(bf16_t*, const bf16_t*, const bf16_t*, const bf16_t*, bool, bool, size_t, size_t,
                           size_t, float, float, size_t, Stream*);
template void gemm_batched(fp16_t*, const fp16_t*, const fp16_t*, const fp16_t*, bool, bool, size_t, size_t,
                           size_t, float, float, size_t, Stream*);
template void gemm_symmetric(float*, const float*, const float*, const float*, bool, size_t, size_t, float,
                             float, float, size_t, Stream*);
template void gemm_symmetric(bf16_t*, const bf16_t*, const bf16_t*, const bf16_t*, bool, size_t, size_t,
                             float, float, float, size_t, Stream*);
template void gemm_symmetric(fp16_t*, const fp16_t*, const fp16_t*, const fp16_t*, bool, size_t, size_t,
                             float, float, float, size_t, Stream*);
