// LayerNorm (Ba, Kiros, Hinton 2016): out = (x - mean) * rstd * weight + bias for each row of C channels.
//
// Forward: 2 values of Storage move for each of N*C (4 with the residual: a, b, sum, out), about 8 FLOPs:
// memory-bound. A warp takes a row and needs no barrier. The mean comes first and the variance from the
// differences to it: a large common offset cancels exactly where E[x^2] - E[x]^2 would lose every digit. For
// that each lane keeps its part of the row in shared memory, so that memory is read once.
//
// Backward, with g = dout * weight and n = (x - mean) * rstd (means over the row's channels):
//   dx += rstd * (g - mean(g) - n * mean(g * n)),   dweight += sum over rows of dout * n,   dbias += of dout.
// 4 values move for each of N*C (dout, x, dx twice), about 16 FLOPs. A block takes a chunk of rows: first a
// warp a row, for the row's two means; then a thread a few channels, down the rows, with its sums for dweight
// and dbias in registers (it reads dout and x again, from the caches). A second kernel adds the chunks in
// order.
#include <algorithm>

#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/shared.cuh"
#include "kernels/kernels.h"

namespace {

constexpr float epsilon = 1e-5f;
constexpr unsigned forward_warps = 8;               // at most
constexpr size_t forward_shared_bytes = 48 * 1024;  // what every GPU gives without asking

// sum = a + b in Storage where `residual`; then out, mean and rstd of sum. Else of a, and b and sum are null.
// `stride`: entries of shared memory a row, or 0 if rows are too long for it and are read from memory again.
template <typename Storage, bool vectors, bool residual>
__global__ void __launch_bounds__(forward_warps * 32)
    layernorm_forward_kernel(Storage* sum, Storage* __restrict__ out, float* __restrict__ mean,
                             float* __restrict__ rstd, const Storage* a, const Storage* b,
                             const Storage* __restrict__ weight, const Storage* __restrict__ bias, size_t N,
                             size_t C, size_t stride) {
    constexpr unsigned size = pack_size<Storage>;
    const unsigned warps = blockDim.x / warpSize, warp = threadIdx.x / warpSize;
    const size_t first = threadIdx.x % warpSize * size, step = warpSize * size;
    const size_t row = size_t{blockIdx.x} * warps + warp;
    if (row >= N) return;

    const Storage* again = (residual ? sum : a) + row * C;
    Storage* kept = nullptr;
    if (stride != 0) again = kept = shared<Storage>(warps * stride) + warp * stride;

    float total = 0.0f;
    for (size_t c = first; c < C; c += step) {
        Pack<float, size> x = load_pack<vectors, size>(a + row * C + c, C - c);
        if constexpr (residual) {
            const Pack<float, size> other = load_pack<vectors, size>(b + row * C + c, C - c);
            for (unsigned i = 0; i < size; i++) {
                // The rounded sum is what the backward will see, so it is what is normalised.
                x.element[i] = load_float(store<Storage>(x.element[i] + other.element[i]));
            }
            store_pack<vectors>(sum + row * C + c, x, C - c);
        }
        if (kept != nullptr) store_pack<vectors>(kept + c, x, C - c);
        for (unsigned i = 0; i < size; i++) total += x.element[i];
    }
    const float row_mean = warp_sum(total) / static_cast<float>(C);

    float squares = 0.0f;
    for (size_t c = first; c < C; c += step) {
        const Pack<float, size> x = load_pack<vectors, size>(again + c, C - c, row_mean);
        for (unsigned i = 0; i < size; i++) {
            const float difference = x.element[i] - row_mean;
            squares = fmaf(difference, difference, squares);
        }
    }
    const float variance = warp_sum(squares) / static_cast<float>(C);
    const float row_rstd = 1.0f / sqrtf(variance + epsilon);
    if (threadIdx.x % warpSize == 0) {
        mean[row] = row_mean;
        rstd[row] = row_rstd;
    }

    for (size_t c = first; c < C; c += step) {
        Pack<float, size> x = load_pack<vectors, size>(again + c, C - c);
        const Pack<float, size> w = load_pack<vectors, size>(weight + c, C - c);
        const Pack<float, size> b_ = load_pack<vectors, size>(bias + c, C - c);
        for (unsigned i = 0; i < size; i++) {
            x.element[i] = fmaf((x.element[i] - row_mean) * row_rstd, w.element[i], b_.element[i]);
        }
        store_pack<vectors>(out + row * C + c, x, C - c);
    }
}

template <bool residual, typename Storage>
void launch_forward(Storage* sum, Storage* out, float* mean, float* rstd, const Storage* a, const Storage* b,
                    const Storage* weight, const Storage* bias, size_t N, size_t C, Stream* stream) {
    constexpr size_t size = pack_size<Storage>;
    const bool vectors = C % size == 0 && aligned_to_16(sum, out, a, b, weight, bias);
    size_t stride = ceil_div(C, size) * size;
    size_t warps = std::min<size_t>(forward_warps, forward_shared_bytes / (stride * sizeof(Storage)));
    if (warps == 0) {
        warps = forward_warps;
        stride = 0;
    }
    launch(vectors ? layernorm_forward_kernel<Storage, true, residual>
                   : layernorm_forward_kernel<Storage, false, residual>,
           grid_size(ceil_div(N, warps)), static_cast<unsigned>(warps * 32),
           shared_bytes<Storage>(warps * stride), stream, sum, out, mean, rstd, a, b, weight, bias, N, C,
           stride);
}

// ---------------------------------------------------------------------------------------------------
// Backward

constexpr unsigned chunk_rows = 16;
constexpr unsigned backward_threads = 512;  // at most

// partial (chunks, 2C): each chunk's dweight, then its dbias. Two blocks fit a multiprocessor with 64
// registers a thread, of which the rare rows without vectors need more.
template <typename Storage, bool vectors>
__global__ void __launch_bounds__(backward_threads, vectors ? 2 : 1)
    layernorm_backward_kernel(Storage* __restrict__ dx, float* __restrict__ partial,
                              const Storage* __restrict__ dout, const Storage* __restrict__ x,
                              const float* __restrict__ mean, const float* __restrict__ rstd,
                              const Storage* __restrict__ weight, size_t N, size_t C) {
    constexpr unsigned size = pack_size<Storage>;
    const size_t first_row = size_t{blockIdx.x} * chunk_rows;
    const unsigned rows = static_cast<unsigned>(min(size_t{chunk_rows}, N - first_row));
    float2* row_means = shared<float2>(chunk_rows);  // mean(g), mean(g * n)

    const unsigned lane = threadIdx.x % warpSize;
    for (unsigned r = threadIdx.x / warpSize; r < rows; r += blockDim.x / warpSize) {
        const size_t row = first_row + r;
        const float row_mean = mean[row], row_rstd = rstd[row];
        float sum_g = 0.0f, sum_gn = 0.0f;
        for (size_t c = lane * size; c < C; c += warpSize * size) {
            const Pack<float, size> d = load_pack<vectors, size>(dout + row * C + c, C - c);
            const Pack<float, size> v = load_pack<vectors, size>(x + row * C + c, C - c);
            const Pack<float, size> w = load_pack<vectors, size>(weight + c, C - c);
            for (unsigned i = 0; i < size; i++) {
                const float g = d.element[i] * w.element[i];
                sum_g += g;
                sum_gn = fmaf(g, (v.element[i] - row_mean) * row_rstd, sum_gn);
            }
        }
        sum_g = warp_sum(sum_g);
        sum_gn = warp_sum(sum_gn);
        const float count = static_cast<float>(C);
        if (lane == 0) row_means[r] = make_float2(sum_g / count, sum_gn / count);
    }
    __syncthreads();

    float* const partial_dweight = partial + size_t{blockIdx.x} * 2 * C;
    float* const partial_dbias = partial_dweight + C;
    for (size_t c = size_t{threadIdx.x} * size; c < C; c += size_t{blockDim.x} * size) {
        const Pack<float, size> w = load_pack<vectors, size>(weight + c, C - c);
        Pack<float, size> sum_weight = {}, sum_bias = {};
#pragma unroll 1  // by four, it takes too many registers for two blocks
        for (unsigned r = 0; r < rows; r++) {
            const size_t row = first_row + r, at = row * C + c;
            const float row_mean = mean[row], row_rstd = rstd[row];
            const float2 means = row_means[r];
            const Pack<float, size> d = load_pack<vectors, size>(dout + at, C - c);
            const Pack<float, size> v = load_pack<vectors, size>(x + at, C - c);
            Pack<float, size> change = load_pack<vectors, size>(dx + at, C - c);
            for (unsigned i = 0; i < size; i++) {
                const float n = (v.element[i] - row_mean) * row_rstd;
                sum_weight.element[i] = fmaf(d.element[i], n, sum_weight.element[i]);
                sum_bias.element[i] += d.element[i];
                const float centered = fmaf(-n, means.y, fmaf(d.element[i], w.element[i], -means.x));
                change.element[i] = fmaf(centered, row_rstd, change.element[i]);
            }
            store_pack<vectors>(dx + at, change, C - c);
        }
        store_pack<vectors>(partial_dweight + c, sum_weight, C - c);
        store_pack<vectors>(partial_dbias + c, sum_bias, C - c);
    }
}

// Adds the chunks to dweight and dbias. A lane takes a column of partial, the block's warps a stretch of
// chunks each; both the stretch and then the warps are summed in order.
__global__ void __launch_bounds__(1024)
    add_chunks_kernel(float* __restrict__ dweight, float* __restrict__ dbias,
                      const float* __restrict__ partial, size_t chunks, size_t C) {
    const unsigned lane = threadIdx.x % warpSize, warp = threadIdx.x / warpSize;
    const unsigned warps = blockDim.x / warpSize;
    float* sums = shared<float>(blockDim.x);
    const size_t column = size_t{blockIdx.x} * warpSize + lane;
    const size_t each = (chunks + warps - 1) / warps, end = min(chunks, (warp + 1) * each);
    float total = 0.0f;
    if (column < 2 * C) {
#pragma unroll 8
        for (size_t chunk = warp * each; chunk < end; chunk++) total += partial[chunk * 2 * C + column];
    }
    sums[threadIdx.x] = total;
    __syncthreads();
    if (warp != 0 || column >= 2 * C) return;
    for (unsigned other = 1; other < warps; other++) total += sums[other * warpSize + lane];
    (column < C ? dweight[column] : dbias[column - C]) += total;
}

}  // namespace

template <typename Storage>
void layernorm_forward(Storage* out, float* mean, float* rstd, const Storage* x, const Storage* weight,
                       const Storage* bias, size_t N, size_t C, Stream* stream) {
    check_sizes("layernorm_forward", {N, C});
    launch_forward<false, Storage>(nullptr, out, mean, rstd, x, nullptr, weight, bias, N, C, stream);
}

template <typename Storage>
void residual_layernorm_forward(Storage* sum, Storage* out, float* mean, float* rstd, const Storage* a,
                                const Storage* b, const Storage* weight, const Storage* bias, size_t N,
                                size_t C, Stream* stream) {
    check_sizes("residual_layernorm_forward", {N, C});
    launch_forward<true>(sum, out, mean, rstd, a, b, weight, bias, N, C, stream);
}

template <typename Storage>
void layernorm_backward(Storage* dx, float* dweight, float* dbias, const Storage* dout, const Storage* x,
                        const float* mean, const float* rstd, const Storage* weight, size_t N, size_t C,
                        Stream* stream) {
    check_sizes("layernorm_backward", {N, C});
    constexpr size_t size = pack_size<Storage>;
    const bool vectors = C % size == 0 && aligned_to_16(dx, dout, x, weight);
    const size_t chunks = ceil_div(N, chunk_rows);
    float* partial = static_cast<float*>(device_scratch(stream, chunks * 2 * C * sizeof(float)));
    launch(vectors ? layernorm_backward_kernel<Storage, true> : layernorm_backward_kernel<Storage, false>,
           grid_size(chunks), block_size(ceil_div(C, size), backward_threads),
           shared_bytes<float2>(chunk_rows), stream, dx, partial, dout, x, mean, rstd, weight, N, C);
    const unsigned threads = block_size(chunks * 32, 1024);
    launch(add_chunks_kernel, grid_size(ceil_div(2 * C, 32)), threads, shared_bytes<float>(threads), stream,
           dweight, dbias, partial, chunks, C);
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
