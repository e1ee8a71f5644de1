// LayerNorm (Ba, Kiros, Hinton 2016): out = (x - mean) * rstd * weight + bias for each row of C channels.
//
// The mean comes first and the variance from the differences to it: a large common offset cancels exactly
// where E[x^2] - E[x]^2 would lose every digit. A row stays in L1 between its passes, so memory is read once.
//
// Backward, with g = dout * weight and n = (x - mean) * rstd (means over the row's channels):
//   dx += rstd * (g - mean(g) - n * mean(g * n)),   dweight += sum over rows of dout * n,   dbias += of dout.
// The sums over rows are taken in chunks of a fixed number of rows, then over the chunks in order.
#include <cmath>

#include "kernels/cpu/loops.h"
#include "kernels/kernels.h"

namespace {

constexpr float epsilon = 1e-5f;
constexpr size_t chunk_rows = 64;

template <typename Storage>
void normalize_row(Storage* out, float* mean_out, float* rstd_out, const Storage* x, const Storage* weight,
                   const Storage* bias, size_t C) {
    const float count = static_cast<float>(C);
    const float mean = lane_sum<float>(C, [&](size_t c) { return to_float(x[c]); }) / count;
    const float variance = lane_sum<float>(C,
                                           [&](size_t c) {
                                               const float difference = to_float(x[c]) - mean;
                                               return difference * difference;
                                           }) /
                           count;
    const float rstd = 1.0f / std::sqrt(variance + epsilon);
#pragma omp simd
    for (size_t c = 0; c < C; c++) {
        const float normalized = (to_float(x[c]) - mean) * rstd;
        out[c] = from_float<Storage>(normalized * to_float(weight[c]) + to_float(bias[c]));
    }
    *mean_out = mean;
    *rstd_out = rstd;
}

// dx of one row is updated; its share of dweight and dbias is added to the chunk's partial sums.
template <typename Storage>
void row_backward(Storage* dx, float* dweight, float* dbias, const Storage* dout, const Storage* x,
                  float mean, float rstd, const Storage* weight, size_t C) {
    const auto g = [&](size_t c) { return to_float(dout[c]) * to_float(weight[c]); };
    const auto normalized = [&](size_t c) { return (to_float(x[c]) - mean) * rstd; };
    const float count = static_cast<float>(C);
    const float mean_g = lane_sum<float>(C, g) / count;
    const float mean_gn = lane_sum<float>(C, [&](size_t c) { return g(c) * normalized(c); }) / count;
#pragma omp simd
    for (size_t c = 0; c < C; c++) {
        const float n = normalized(c);
        dweight[c] += to_float(dout[c]) * n;
        dbias[c] += to_float(dout[c]);
        const float centered = (g(c) - mean_g) - n * mean_gn;
        dx[c] = from_float<Storage>(to_float(dx[c]) + centered * rstd);
    }
}

}  // namespace

template <typename Storage>
void layernorm_forward(Storage* out, float* mean, float* rstd, const Storage* x, const Storage* weight,
                       const Storage* bias, size_t N, size_t C, Stream* stream) {
    check_sizes("layernorm_forward", {N, C});
    for_rows(stream, N, C, [&](size_t row) {
        normalize_row(out + row * C, mean + row, rstd + row, x + row * C, weight, bias, C);
    });
}

template <typename Storage>
void residual_layernorm_forward(Storage* sum, Storage* out, float* mean, float* rstd, const Storage* a,
                                const Storage* b, const Storage* weight, const Storage* bias, size_t N,
                                size_t C, Stream* stream) {
    check_sizes("residual_layernorm_forward", {N, C});
    for_rows(stream, N, C, [&](size_t row) {
        Storage* sum_row = sum + row * C;
#pragma omp simd
        for (size_t c = 0; c < C; c++) {
            sum_row[c] = from_float<Storage>(to_float(a[row * C + c]) + to_float(b[row * C + c]));
        }
        // The rounded sum is what the backward will see, so it is what is normalised.
        normalize_row(out + row * C, mean + row, rstd + row, sum_row, weight, bias, C);
    });
}

template <typename Storage>
void layernorm_backward(Storage* dx, float* dweight, float* dbias, const Storage* dout, const Storage* x,
                        const float* mean, const float* rstd, const Storage* weight, size_t N, size_t C,
                        Stream* stream) {
    check_sizes("layernorm_backward", {N, C});
    const size_t chunks = ceil_div(N, chunk_rows);
    float* partial = static_cast<float*>(shared_scratch(stream, chunks * 2 * C * sizeof(float)));
    for_rows(stream, chunks, chunk_rows * C, [&](size_t chunk) {
        float* partial_dweight = partial + chunk * 2 * C;
        float* partial_dbias = partial_dweight + C;
        std::fill_n(partial_dweight, 2 * C, 0.0f);
        const size_t end = std::min(N, (chunk + 1) * chunk_rows);
        for (size_t row = chunk * chunk_rows; row < end; row++) {
            row_backward(dx + row * C, partial_dweight, partial_dbias, dout + row * C, x + row * C, mean[row],
                         rstd[row], weight, C);
        }
    });
    for_chunks(stream, C, 64, [&](size_t begin, size_t end) {
        for (size_t chunk = 0; chunk < chunks; chunk++) {
            const float* partial_dweight = partial + chunk * 2 * C;
            const float* partial_dbias = partial_dweight + C;
#pragma omp simd
            for (size_t c = begin; c < end; c++) {
                dweight[c] += partial_dweight[c];
                dbias[c] += partial_dbias[c];
            }
        }
    });
}

#define INSTANTIATE(Storage)                                                                                 \
    template void layernorm_forward(Storage*, float*, float*, const Storage*, const Storage*,                \
                                    const Storage*, size_t, size_t, Stream*);                                \
    template void residual_layernorm_forward(Storage*, Storage*, float*, float*, const Storage*,             \
                                             const Storage*, const Storage*, const Storage*, size_t, size_t, \
                                             Stream*);                                                       \
    template void layernorm_backward(Storage*, float*, float*, const Storage*, const Storage*, const float*, \
                                     const float*, const Storage*, size_t, size_t, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
#undef INSTANTIATE
