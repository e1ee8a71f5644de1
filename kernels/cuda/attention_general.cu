// Causal attention for every type and head size, in fp32 on the ordinary cores; see attention_flash.cu for
// the fast one. With s = q k^T / sqrt(HS), a tile of 64 queries by 64 keys at a time, up to the diagonal:
//   forward    m' = max(m, s of the row); p = exp(s - m'); total and output, times exp(m - m'), get p and p v
//   backward   p = exp(s - lse); dp = dout v^T; ds = p (dp - delta);
//              dq += ds k / sqrt(HS);  dk += ds^T q / sqrt(HS);  dv += p^T dout
// (Milakov, Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135, appendix B.)
//
// A block owns 64 queries (for out and dq) or 64 keys (for dk and dv) and walks the others, so that every sum
// stays in one thread, in a fixed order. It owns 64 channels of the result too: a larger head has several
// blocks, each of which computes the scores again. Per tile and 64 channels of the head: 1 product for the
// scores and 1 for dp, and 1 for each result, of 2 * 64^3 FLOPs each on 2 * 64^2 loaded values.
#include <cmath>

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/shared.cuh"

namespace {

constexpr unsigned side = 64;               // tokens and channels of a tile
constexpr unsigned tile_stride = side + 4;  // the gap spreads a column over the banks
constexpr unsigned own = 4;                 // a thread has 4 x 4 entries of a 64 x 64 product
constexpr unsigned row_threads = side / own;
constexpr unsigned threads = row_threads * row_threads;
constexpr unsigned tile_floats = side * tile_stride;

// A thread's entries of a product: rows my_row() + 0..3, columns my_column() + 0..3.
using Product = float[own][own];
__device__ __forceinline__ unsigned my_row() { return threadIdx.x / row_threads * own; }
__device__ __forceinline__ unsigned my_column() { return threadIdx.x % row_threads * own; }

// Up to 64 tokens of one head of q, k, v or dout; `count` of them exist, the others count as zero.
template <typename Storage>
struct Rows {
    const Storage* data;
    size_t stride;
    unsigned count;
};

// What a block works on: its head, the first of its tokens and its channels of the result.
struct Work {
    size_t b, h, first, channel;
    unsigned channels;
};

// Grid: (64 tokens of a head, 64 channels of its result). Those with the longest walk come first.
__device__ __forceinline__ Work my_work(const AttentionShape& shape, bool last_first) {
    const size_t heads = shape.B * shape.NH, tiles = (shape.T + side - 1) / side;
    const size_t head = blockIdx.x % heads, tile = blockIdx.x / heads, channel = size_t{blockIdx.y} * side;
    return {head / shape.NH, head % shape.NH, (last_first ? tiles - 1 - tile : tile) * side, channel,
            static_cast<unsigned>(min(size_t{side}, shape.HS - channel))};
}

// 64 tokens from `first` on. `part`: q, k or v, or what else lies beside it in a row of `stride` entries.
template <typename Storage>
__device__ __forceinline__ Rows<Storage> rows_of(const Storage* tensor, size_t stride, size_t part,
                                                 const Work& work, size_t first,
                                                 const AttentionShape& shape) {
    return {tensor + (work.b * shape.T + first) * stride + part * shape.C + work.h * shape.HS, stride,
            static_cast<unsigned>(min(size_t{side}, shape.T - first))};
}

// tile(row,i) = rows(row, channel + i) for i < 64, zero from `channels` on.
template <bool vectors, typename Storage>
__device__ __forceinline__ void load_rows(float* tile, const Rows<Storage>& rows, size_t channel,
                                          unsigned channels) {
    const unsigned i = my_column();
    for (unsigned row = threadIdx.x / row_threads; row < side; row += row_threads) {
        Pack<float, own> pack = {};
        if (row < rows.count && i < channels)
            pack = load_pack<vectors, own>(rows.data + row * rows.stride + channel + i, channels - i);
        store_pack<true>(tile + row * tile_stride + i, pack);
    }
}

// tile(i,row) = rows(row, channel + i) for i < channels. Neighbouring threads take neighbouring rows, whose
// entries lie in different banks.
template <bool vectors, typename Storage>
__device__ __forceinline__ void load_columns(float* tile, const Rows<Storage>& rows, size_t channel,
                                             unsigned channels) {
    const unsigned row = threadIdx.x % side;
    for (unsigned i = threadIdx.x / side * own; i < channels; i += threads / side * own) {
        Pack<float, own> pack = {};
        if (row < rows.count)
            pack = load_pack<vectors, own>(rows.data + row * rows.stride + channel + i, channels - i);
        for (unsigned j = 0; j < own; j++) tile[(i + j) * tile_stride + row] = pack.element[j];
    }
}

// sums(i,j) += sum over k < depth of a(k,i) * b(k,j)
__device__ __forceinline__ void multiply(Product& sums, const float* a, const float* b, unsigned depth) {
#pragma unroll 4
    for (unsigned k = 0; k < depth; k++) {
        const Pack<float, own> left = load_pack<true, own>(a + k * tile_stride + my_row());
        const Pack<float, own> right = load_pack<true, own>(b + k * tile_stride + my_column());
        for (unsigned i = 0; i < own; i++) {
            for (unsigned j = 0; j < own; j++)
                sums[i][j] = fmaf(left.element[i], right.element[j], sums[i][j]);
        }
    }
}

// products(i,j) += a(i,:) . b(j,:) over all channels of the head.
template <bool vectors, typename Storage>
__device__ __forceinline__ void add_dot_products(Product& products, const Rows<Storage>& a,
                                                 const Rows<Storage>& b, size_t HS, float* tile_a,
                                                 float* tile_b) {
    for (size_t channel = 0; channel < HS; channel += side) {
        const unsigned channels = static_cast<unsigned>(min(size_t{side}, HS - channel));
        __syncthreads();  // the tiles are no longer read
        load_columns<vectors>(tile_a, a, channel, channels);
        load_columns<vectors>(tile_b, b, channel, channels);
        __syncthreads();
        multiply(products, tile_a, tile_b, channels);
    }
}

// sums(i,c) += sum over j of weights(i,j) * rows(j,c) for the block's channels c.
template <bool vectors, typename Storage>
__device__ __forceinline__ void add_weighted_rows(Product& sums, const Product& weights,
                                                  const Rows<Storage>& rows, const Work& work, float* tile_a,
                                                  float* tile_b) {
    __syncthreads();  // the tiles are no longer read
    for (unsigned j = 0; j < own; j++) {
        Pack<float, own> column;
        for (unsigned i = 0; i < own; i++) column.element[i] = weights[i][j];
        store_pack<true>(tile_a + (my_column() + j) * tile_stride + my_row(), column);
    }
    load_rows<vectors>(tile_b, rows, work.channel, work.channels);
    __syncthreads();
    multiply(sums, tile_a, tile_b, rows.count);
}

// rows(i,c) = factor(i) * sums(i,c) for the block's tokens and channels. rows: as rows_of gave them.
template <bool vectors, typename Storage, typename Factor>
__device__ __forceinline__ void store_rows(Storage* tensor, size_t stride, size_t part, const Product& sums,
                                           const Work& work, const AttentionShape& shape,
                                           const Factor& factor) {
    const Rows<Storage> rows = rows_of<Storage>(tensor, stride, part, work, work.first, shape);
    const unsigned c = my_column();
    if (c >= work.channels) return;
    for (unsigned i = 0; i < own; i++) {
        if (my_row() + i >= rows.count) return;
        Pack<float, own> pack;
        for (unsigned j = 0; j < own; j++) pack.element[j] = factor(i) * sums[i][j];
        const size_t place = static_cast<size_t>(rows.data - tensor) + (my_row() + i) * stride;
        store_pack<vectors>(tensor + place + work.channel + c, pack, work.channels - c);
    }
}

// Over the threads that share a row of a product.
template <typename Combine>
__device__ __forceinline__ float row_reduce(float x, const Combine& combine) {
    for (unsigned distance = 1; distance < row_threads; distance *= 2) {
        x = combine(x, __shfl_xor_sync(all_lanes, x, static_cast<int>(distance)));
    }
    return x;
}

// ---------------------------------------------------------------------------------------------------
// Forward

template <typename Storage, bool vectors>
__global__ void __launch_bounds__(threads)
    attention_general_forward_kernel(Storage* __restrict__ out, float* __restrict__ lse,
                                     const Storage* __restrict__ qkv, AttentionShape shape) {
    float* tile_a = shared<float>(tile_floats);
    float* tile_b = shared<float>(tile_floats, tile_a + tile_floats);
    const Work work = my_work(shape, true);
    const size_t stride = 3 * shape.C;
    const auto queries = rows_of(qkv, stride, 0, work, work.first, shape);

    Product output = {};
    float maximum[own], total[own] = {};
    for (float& m : maximum) m = -INFINITY;
    for (size_t first = 0; first <= work.first; first += side) {
        Product p = {};
        add_dot_products<vectors>(p, queries, rows_of(qkv, stride, 1, work, first, shape), shape.HS, tile_a,
                                  tile_b);
        for (unsigned i = 0; i < own; i++) {
            const float before = maximum[i];
            for (unsigned j = 0; j < own; j++) {
                const bool seen = first + my_column() + j <= work.first + my_row() + i;
                p[i][j] = seen ? p[i][j] * shape.scale : -INFINITY;
                maximum[i] = fmaxf(maximum[i], p[i][j]);
            }
            maximum[i] = row_reduce(maximum[i], [](float x, float y) { return fmaxf(x, y); });
            const float correction = expf(before - maximum[i]);
            total[i] *= correction;
            for (unsigned j = 0; j < own; j++) {
                p[i][j] = expf(p[i][j] - maximum[i]);
                total[i] += p[i][j];
                output[i][j] *= correction;
            }
        }
        add_weighted_rows<vectors>(output, p, rows_of(qkv, stride, 2, work, first, shape), work, tile_a,
                                   tile_b);
    }

    for (float& t : total) t = row_reduce(t, [](float x, float y) { return x + y; });
    store_rows<vectors>(out, shape.C, 0, output, work, shape, [&](unsigned i) { return 1.0f / total[i]; });
    if (work.channel != 0 || my_column() != 0) return;
    for (unsigned i = 0; i < own; i++) {
        const size_t t = work.first + my_row() + i;
        if (t < shape.T) lse[(work.b * shape.NH + work.h) * shape.T + t] = maximum[i] + logf(total[i]);
    }
}

// ---------------------------------------------------------------------------------------------------
// Backward

// A query past the end has p = exp(-infinity) = 0.
__device__ __forceinline__ SoftmaxRow load_row(const SoftmaxRow* softmax_rows, size_t t, const Work& work,
                                               const AttentionShape& shape) {
    if (t >= shape.T) return {INFINITY, 0.0f};
    return softmax_rows[(work.b * shape.NH + work.h) * shape.T + t];
}

template <typename Storage, bool vectors>
__global__ void __launch_bounds__(threads)
    attention_general_dq_kernel(Storage* __restrict__ dqkv, const Storage* __restrict__ dout,
                                const SoftmaxRow* __restrict__ softmax_rows, const Storage* __restrict__ qkv,
                                AttentionShape shape) {
    float* tile_a = shared<float>(tile_floats);
    float* tile_b = shared<float>(tile_floats, tile_a + tile_floats);
    const Work work = my_work(shape, true);
    const size_t stride = 3 * shape.C;
    const auto queries = rows_of(qkv, stride, 0, work, work.first, shape);
    const auto douts = rows_of(dout, shape.C, 0, work, work.first, shape);
    SoftmaxRow query[own];
    for (unsigned i = 0; i < own; i++)
        query[i] = load_row(softmax_rows, work.first + my_row() + i, work, shape);

    Product dq = {};
    for (size_t first = 0; first <= work.first; first += side) {
        const auto keys = rows_of(qkv, stride, 1, work, first, shape);
        Product s = {}, ds = {};
        add_dot_products<vectors>(s, queries, keys, shape.HS, tile_a, tile_b);
        add_dot_products<vectors>(ds, douts, rows_of(qkv, stride, 2, work, first, shape), shape.HS, tile_a,
                                  tile_b);
        for (unsigned i = 0; i < own; i++) {
            for (unsigned j = 0; j < own; j++) {
                const bool seen = first + my_column() + j <= work.first + my_row() + i;
                const float p = seen ? expf(s[i][j] * shape.scale - query[i].lse) : 0.0f;
                ds[i][j] = p * (ds[i][j] - query[i].delta);
            }
        }
        add_weighted_rows<vectors>(dq, ds, keys, work, tile_a, tile_b);
    }
    store_rows<vectors>(dqkv, stride, 0, dq, work, shape, [&](unsigned) { return shape.scale; });
}

template <typename Storage, bool vectors>
__global__ void __launch_bounds__(threads)
    attention_general_dkv_kernel(Storage* __restrict__ dqkv, const Storage* __restrict__ dout,
                                 const SoftmaxRow* __restrict__ softmax_rows, const Storage* __restrict__ qkv,
                                 AttentionShape shape) {
    float* tile_a = shared<float>(tile_floats);
    float* tile_b = shared<float>(tile_floats, tile_a + tile_floats);
    const Work work = my_work(shape, false);
    const size_t stride = 3 * shape.C;
    const auto keys = rows_of(qkv, stride, 1, work, work.first, shape);
    const auto values = rows_of(qkv, stride, 2, work, work.first, shape);

    Product dk = {}, dv = {};
    for (size_t first = work.first; first < shape.T; first += side) {
        const auto queries = rows_of(qkv, stride, 0, work, first, shape);
        const auto douts = rows_of(dout, shape.C, 0, work, first, shape);
        Product p = {}, ds = {};  // both transposed: a row is a key
        add_dot_products<vectors>(p, keys, queries, shape.HS, tile_a, tile_b);
        add_dot_products<vectors>(ds, values, douts, shape.HS, tile_a, tile_b);
        for (unsigned j = 0; j < own; j++) {
            const size_t t = first + my_column() + j;
            const SoftmaxRow query = load_row(softmax_rows, t, work, shape);
            for (unsigned i = 0; i < own; i++) {
                const bool seen = work.first + my_row() + i <= t;
                p[i][j] = seen ? expf(p[i][j] * shape.scale - query.lse) : 0.0f;
                ds[i][j] = p[i][j] * (ds[i][j] - query.delta);
            }
        }
        add_weighted_rows<vectors>(dv, p, douts, work, tile_a, tile_b);
        add_weighted_rows<vectors>(dk, ds, queries, work, tile_a, tile_b);
    }
    store_rows<vectors>(dqkv, stride, 1, dk, work, shape, [&](unsigned) { return shape.scale; });
    store_rows<vectors>(dqkv, stride, 2, dv, work, shape, [](unsigned) { return 1.0f; });
}

dim3 grid(const AttentionShape& shape) {
    return {grid_size(shape.B * shape.NH * ceil_div(shape.T, side)),
            static_cast<unsigned>(ceil_div(shape.HS, side))};
}

constexpr size_t two_tiles = 2 * shared_bytes<float>(tile_floats);

}  // namespace

template <typename Storage>
void attention_general_forward(Storage* out, float* lse, const Storage* qkv, const AttentionShape& shape,
                               Stream* stream) {
    const bool vectors = shape.HS % own == 0 && aligned_to_16(out, qkv);
    launch(vectors ? attention_general_forward_kernel<Storage, true>
                   : attention_general_forward_kernel<Storage, false>,
           grid(shape), threads, two_tiles, stream, out, lse, qkv, shape);
    stream->attention_kernel = "general";
}

template <typename Storage>
void attention_general_backward(Storage* dqkv, const Storage* dout, const SoftmaxRow* softmax_rows,
                                const Storage* qkv, const AttentionShape& shape, Stream* stream) {
    const bool vectors = shape.HS % own == 0 && aligned_to_16(dqkv, dout, qkv);
    launch(vectors ? attention_general_dq_kernel<Storage, true> : attention_general_dq_kernel<Storage, false>,
           grid(shape), threads, two_tiles, stream, dqkv, dout, softmax_rows, qkv, shape);
    launch(
        vectors ? attention_general_dkv_kernel<Storage, true> : attention_general_dkv_kernel<Storage, false>,
        grid(shape), threads, two_tiles, stream, dqkv, dout, softmax_rows, qkv, shape);
    stream->attention_kernel = "general";
}

#define INSTANTIATE(Storage)                                                                              \
    template void attention_general_forward(Storage*, float*, const Storage*, const AttentionShape&,      \
                                            Stream*);                                                     \
    template void attention_general_backward(Storage*, const Storage*, const SoftmaxRow*, const Storage*, \
                                             const AttentionShape&, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
