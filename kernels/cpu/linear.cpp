// Linear layers and the head's logits: three matrix products (gemm.h) with bias and tanh-GELU fused into
// them, so that a layer's output is written once and never read again by its own op.
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/math.h"
#include "kernels/kernels.h"

namespace {

// out(j) += sum over i of x(i,j), x (rows,columns). Sums of a fixed number of rows are added in order, so the
// bits do not depend on the threads.
template <typename Storage>
void add_column_sums(float* out, const Storage* x, size_t rows, size_t columns, Stream* stream) {
    constexpr size_t chunk_rows = 64;
    const size_t chunks = ceil_div(rows, chunk_rows);
    float* const partial = static_cast<float*>(shared_scratch(stream, chunks * columns * sizeof(float)));
    for_chunks(stream, rows, chunk_rows, [&](size_t begin, size_t end) {
        float* const sums = partial + begin / chunk_rows * columns;
        std::fill_n(sums, columns, 0.0f);
        for (size_t i = begin; i < end; i++) {
            const Storage* const row = x + i * columns;
#pragma omp simd
            for (size_t j = 0; j < columns; j++) sums[j] += to_float(row[j]);
        }
    });
    for_chunks(stream, columns, 64, [&](size_t begin, size_t end) {
        for (size_t chunk = 0; chunk < chunks; chunk++) {
            const float* const sums = partial + chunk * columns;
#pragma omp simd
            for (size_t j = begin; j < end; j++) out[j] += sums[j];
        }
    });
}

}  // namespace

template <typename Storage>
void linear_forward(Storage* out, Storage* pre_gelu, const Storage* x, const Storage* weight,
                    const Storage* bias, size_t N, size_t C, size_t OC, Stream* stream) {
    check_sizes("linear_forward", {N, C, OC});
    if (out == nullptr || x == nullptr || weight == nullptr) fail("linear_forward: out, x or weight is null");
    const auto add_bias = [=](float y, size_t j) { return bias == nullptr ? y : y + to_float(bias[j]); };

    if (pre_gelu == nullptr) {
        gemm(
            row_major(x, N, C), transposed(weight, OC, C), N, OC, C, 1,
            [=](size_t, size_t i, size_t j, const float* y, size_t count) {
                Storage* const to = out + i * OC + j;
#pragma omp simd
                for (size_t c = 0; c < count; c++) to[c] = from_float<Storage>(add_bias(y[c], j + c));
            },
            stream);
    } else {
        gemm(
            row_major(x, N, C), transposed(weight, OC, C), N, OC, C, 1,
            [=](size_t, size_t i, size_t j, const float* y, size_t count) {
                Storage* const to = out + i * OC + j;
                Storage* const to_pre = pre_gelu + i * OC + j;
#pragma omp simd
                for (size_t c = 0; c < count; c++) {
                    to_pre[c] = from_float<Storage>(add_bias(y[c], j + c));
                    to[c] = from_float<Storage>(gelu(to_float(to_pre[c])));
                }
            },
            stream);
    }
}

template <typename Storage>
void gelu_forward(Storage* out, const Storage* x, size_t n, Stream* stream) {
    check_sizes("gelu_forward", {n});
    for_chunks(stream, n, parallel_grain, [=](size_t begin, size_t end) {
#pragma omp simd
        for (size_t i = begin; i < end; i++) out[i] = from_float<Storage>(gelu(to_float(x[i])));
    });
}

template <typename Storage>
void linear_backward(Storage* dx, float* dweight, float* dbias, const Storage* dout, const Storage* x,
                     const Storage* weight, const Storage* pre_gelu, size_t N, size_t C, size_t OC,
                     Stream* stream) {
    check_sizes("linear_backward", {N, C, OC});
    if (dweight == nullptr || dout == nullptr || x == nullptr || weight == nullptr)
        fail("linear_backward: dweight, dout, x or weight is null");

    if (dbias != nullptr) add_column_sums(dbias, dout, N, OC, stream);
    gemm(
        transposed(dout, N, OC), row_major(x, N, C), OC, C, N, 1,
        [=](size_t, size_t i, size_t j, const float* sums, size_t count) {
            float* const to = dweight + i * C + j;
#pragma omp simd
            for (size_t c = 0; c < count; c++) to[c] += sums[c];
        },
        stream);
    if (dx == nullptr) return;
    gemm(
        row_major(dout, N, OC), row_major(weight, OC, C), N, C, OC, 1,
        [=](size_t, size_t i, size_t j, const float* sums, size_t count) {
            Storage* const to = dx + i * C + j;
            if (pre_gelu == nullptr) {
#pragma omp simd
                for (size_t c = 0; c < count; c++) to[c] = from_float<Storage>(sums[c]);
            } else {
                const Storage* const pre = pre_gelu + i * C + j;
#pragma omp simd
                for (size_t c = 0; c < count; c++)
                    to[c] = from_float<Storage>(sums[c] * gelu_derivative(to_float(pre[c])));
            }
        },
        stream);
}

template <typename Storage>
void logits_forward(float* logits, const Storage* x, const Storage* weight, size_t N, size_t C, size_t Vp,
                    Stream* stream) {
    check_sizes("logits_forward", {N, C, Vp});
    if (logits == nullptr || x == nullptr || weight == nullptr) fail("logits_forward: a pointer is null");
    gemm(
        row_major(x, N, C), transposed(weight, Vp, C), N, Vp, C, 1,
        [=](size_t, size_t i, size_t j, const float* sums, size_t count) {
            std::copy_n(sums, count, logits + i * Vp + j);
        },
        stream);
}

#define INSTANTIATE(Storage)                                                                                 \
    template void linear_forward(Storage*, Storage*, const Storage*, const Storage*, const Storage*, size_t, \
                                 size_t, size_t, Stream*);                                                   \
    template void gelu_forward(Storage*, const Storage*, size_t, Stream*);                                   \
    template void linear_backward(Storage*, float*, float*, const Storage*, const Storage*, const Storage*,  \
                                  const Storage*, size_t, size_t, size_t, Stream*);                          \
    template void logits_forward(float*, const Storage*, const Storage*, size_t, size_t, size_t, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
#undef INSTANTIATE
