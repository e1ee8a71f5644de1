// Batched matrix products, as Newton-Schulz needs them; see gemm.h for how they are computed.
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/stream.h"
#include "kernels/kernels.h"

namespace {

// Only the optimizer multiplies batches. It makes do with the scratch memory that the model's own products
// have taken, so that a run with Muon needs no more of it than one with AdamW; a stream that has none yet
// takes it.
size_t room(const Stream* stream) {
    return stream->shared.bytes > 0 ? stream->shared.bytes / sizeof(float) : SIZE_MAX;
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
            stream, Part::whole, room(stream));
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
            stream, Part::whole, room(stream));
    }
}

// Each element on and below the diagonal is written twice, in its own place and mirrored.
template <typename Storage>
void gemm_symmetric(Storage* d, const Storage* a, const Storage* b, const Storage* c, bool transpose,
                    size_t m, size_t k, float alpha, float beta, float gamma, size_t batch, Stream* stream) {
    check_sizes("gemm_symmetric", {m, k, batch});
    if (d == nullptr || a == nullptr || b == nullptr) fail("gemm_symmetric: d, a or b is null");
    if (c == nullptr && beta != 0.0f)
        fail("gemm_symmetric: c is null and beta is %g", static_cast<double>(beta));
    if (d == a || d == b || d == c) fail("gemm_symmetric: d may not be a, b or c");

    const auto store = [&](size_t l, size_t i, size_t j, const float* sums, size_t count) {
        Storage* const matrix = d + l * m * m;
        const Storage* const add = beta == 0.0f ? nullptr : c + (l * m + i) * m + j;
        float values[gemm_detail::panel_columns];
#pragma omp simd
        for (size_t x = 0; x < count; x++)
            values[x] = alpha * sums[x] + (add == nullptr ? 0.0f : beta * to_float(add[x]));
        if (j + count == i + 1) values[count - 1] += gamma;
        for (size_t x = 0; x < count; x++) {
            const Storage value = from_float<Storage>(values[x]);
            matrix[i * m + j + x] = value;
            matrix[(j + x) * m + i] = value;
        }
    };
    const Matrix<Storage> op_a = transpose ? transposed(a, k, m) : row_major(a, m, k);
    const Matrix<Storage> op_b = transpose ? row_major(b, k, m) : transposed(b, m, k);
    gemm(
        op_a, op_b, m, m, k, batch,
        [&](size_t l, size_t i, size_t j, const float* sums, size_t count) {
            if (j + count <= i + 1) {
                store(l, i, j, sums, count);
            } else if (j <= i) {
                store(l, i, j, sums, i + 1 - j);
            }
        },
        stream, Part::lower, room(stream));
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
