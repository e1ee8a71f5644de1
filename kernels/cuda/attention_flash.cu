// Flash attention on tensor cores, for 16-bit types and heads of 64 and 128 channels (Dao 2023,
// arXiv:2307.08691); attention_general.cu has the formulas. Sums are fp32; p and ds are rounded to Storage
// for the products that take them. Causal, so half of T^2 counts: forward 2 products of T^2 HS FLOPs a head.
//
// A block of 4 warps owns a tile of queries (of keys, for dk and dv) in shared memory and walks tiles of the
// others, which cp.async brings in two buffers: the next one is on its way while this one is used. A warp
// owns 16 or 32 rows, and everything that belongs to a row lies in its registers: scores leave the tensor
// cores in the layout in which p and ds enter them again. So one barrier a tile is all the threads need.
//
// The backward has one kernel for dq, which walks keys, and one for dk and dv, which walks queries. Both
// compute p and dp: 3 + 4 products where a single kernel needs 5. But that one would add to dq from many
// blocks: by atomics in any order, or by T/64 partial sums of dq in fp32 in memory, or with each block
// waiting for the one before. 1.4 times the FLOPs buy a fixed order, no wait and no memory.
//
// A tile's 16-byte chunks are swizzled: chunk c of row r lies at c ^ (r % 8), so that the 8 rows that
// ldmatrix reads at a time, or a warp writes, lie in different banks.
#include <cmath>
#include <cstring>

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/shared.cuh"

namespace {

constexpr unsigned warps = 4;
constexpr unsigned threads = warps * 32;
constexpr unsigned chunk_size = 8;  // entries of 16 bytes
constexpr float log2_e = 1.44269504088896340736f;
constexpr float ln_2 = 0.69314718055994530942f;

// How many blocks of 16 rows a warp owns, and the rows of the tiles that are walked. Two blocks of rows use
// what is loaded for the second operand twice; larger ones, or longer tiles, do not fit the 255 registers of
// a thread. A thread block takes 48 KiB of shared memory (HS 64) or 64 KiB (HS 128): on sm_86, 89 and 120 it
// may have 99 KiB.
template <unsigned HS>
struct ForwardTiles {
    static constexpr unsigned blocks = 2, walked = HS == 64 ? 64 : 32;
    static constexpr bool keep_q = HS == 64;  // in registers
};
template <unsigned HS>
struct BackwardTiles {
    static constexpr unsigned blocks = HS == 64 ? 2 : 1, walked = 32;
};
template <typename Tiles>
constexpr unsigned rows_of_warp = 16 * Tiles::blocks;
template <typename Tiles>
constexpr unsigned rows_of_block = warps* rows_of_warp<Tiles>;

// Accumulators of a product: 16 * blocks rows by n columns, a warp's. Entry e of [block][i] is in row
// 16 * block + lane / 4 + 8 * (e / 2) and column 8 * i + 2 * (lane % 4) + e % 2.
template <unsigned blocks, unsigned n>
struct Product {
    float at[blocks][n / 8][4] = {};
};
__device__ __forceinline__ unsigned my_lane() { return threadIdx.x % 32; }
__device__ __forceinline__ unsigned my_row(unsigned block, unsigned e) {
    return 16 * block + my_lane() / 4 + e / 2 * 8;
}
__device__ __forceinline__ unsigned my_column(unsigned i, unsigned e) {
    return 8 * i + my_lane() % 4 * 2 + e % 2;
}

// ---------------------------------------------------------------------------------------------------
// Tiles in shared memory: rows of HS entries

template <unsigned HS, typename Storage>
__device__ __forceinline__ Storage* chunk_of(Storage* tile, unsigned row, unsigned chunk) {
    return tile + row * HS + (chunk ^ row % 8) * chunk_size;
}

// Starts to copy tokens first .. first + rows; those from T on are zero. `source` is the head's token 0.
template <unsigned HS, unsigned rows, typename Storage>
__device__ __forceinline__ void start_load(Storage* tile, const Storage* source, size_t stride,
                                           unsigned first, unsigned T) {
    constexpr unsigned chunks = HS / chunk_size, rows_at_once = threads / chunks;
    const unsigned my_row = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
    const size_t mine = my_row * stride + chunk * chunk_size;
#pragma unroll
    for (unsigned i = 0; i < rows; i += rows_at_once) {
        const bool valid = first + i + my_row < T;
        const size_t from = valid ? (first + i) * stride + mine : 0;
        cp_async_16(chunk_of<HS>(tile, i + my_row, chunk), source + from, valid);
    }
}

// Two floats in a register, the first in the lower half.
__device__ __forceinline__ uint32_t packed(float low, float high, bf16_t) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
}
__device__ __forceinline__ uint32_t packed(float low, float high, fp16_t) {
    const __half2 pair = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
}

// target(first + row, :) = factor(block, e) * x for the warp's rows that exist, by way of the warp's own rows
// of a tile that only it still uses: memory gets 16 bytes a thread.
template <unsigned HS, unsigned blocks, typename Storage, typename Factor>
__device__ __forceinline__ void store_rows(Storage* target, size_t stride, Storage* own_rows,
                                           const Product<blocks, HS>& x, unsigned first, unsigned T,
                                           const Factor& factor) {
    __syncwarp();  // the rows are no longer read
#pragma unroll
    for (unsigned block = 0; block < blocks; block++) {
#pragma unroll
        for (unsigned i = 0; i < HS / 8; i++) {
#pragma unroll
            for (unsigned e = 0; e < 4; e += 2) {
                Storage* to = chunk_of<HS>(own_rows, my_row(block, e), i) + my_column(0, 0);
                const float f = factor(block, e / 2);
                *reinterpret_cast<uint32_t*>(to) =
                    packed(f * x.at[block][i][e], f * x.at[block][i][e + 1], Storage());
            }
        }
    }
    __syncwarp();
    constexpr unsigned chunks = HS / chunk_size;
#pragma unroll
    for (unsigned i = 0; i < 16 * blocks * chunks / 32; i++) {
        const unsigned row = i * (32 / chunks) + my_lane() / chunks, chunk = my_lane() % chunks;
        if (first + row >= T) break;
        using Chunk = Pack<Storage, chunk_size>;
        *reinterpret_cast<Chunk*>(target + size_t{first + row} * stride + chunk * chunk_size) =
            *reinterpret_cast<const Chunk*>(chunk_of<HS>(own_rows, row, chunk));
    }
}

// ---------------------------------------------------------------------------------------------------
// Products of a warp

// The left operand of mma, for 16 * blocks rows: channels 16 k .. 16 k + 15 of the warp's own rows.
template <unsigned blocks>
struct Left {
    uint32_t at[blocks][4];
};
template <unsigned HS, unsigned blocks, typename Storage>
__device__ __forceinline__ void load_left(Left<blocks>& left, Storage* own_rows, unsigned k) {
#pragma unroll
    for (unsigned block = 0; block < blocks; block++) {
        ldmatrix_x4(left.at[block],
                    chunk_of<HS>(own_rows, 16 * block + my_lane() % 16, 2 * k + my_lane() / 16));
    }
}

// products(i,j) += left(i, 16 channels) . rows(j, channels 16 k .. 16 k + 15)
template <unsigned HS, unsigned blocks, unsigned n, typename Storage>
__device__ __forceinline__ void add_dot_products(Product<blocks, n>& products, const Left<blocks>& left,
                                                 Storage* rows, unsigned k) {
#pragma unroll
    for (unsigned j = 0; j < n; j += 16) {
        uint32_t right[4];  // rows j .. j + 7 in the first two, j + 8 .. j + 15 in the others
        ldmatrix_x4(right,
                    chunk_of<HS>(rows, j + my_lane() / 16 * 8 + my_lane() % 8, 2 * k + my_lane() / 8 % 2));
#pragma unroll
        for (unsigned block = 0; block < blocks; block++) {
            mma_m16n8k16<Storage>(products.at[block][j / 8], left.at[block], right[0], right[1]);
            mma_m16n8k16<Storage>(products.at[block][j / 8 + 1], left.at[block], right[2], right[3]);
        }
    }
}

// products(i,j) += own_rows(i,:) . rows(j,:)
template <unsigned HS, unsigned blocks, unsigned n, typename Storage>
__device__ __forceinline__ void add_dot_products(Product<blocks, n>& products, Storage* own_rows,
                                                 Storage* rows) {
#pragma unroll 2
    for (unsigned k = 0; k < HS / 16; k++) {
        Left<blocks> left;
        load_left<HS>(left, own_rows, k);
        add_dot_products<HS>(products, left, rows, k);
    }
}

// sums(i,:) += sum over j of weights(i,j) * rows(j,:), weights rounded to Storage.
template <unsigned HS, unsigned blocks, unsigned n, typename Storage>
__device__ __forceinline__ void add_weighted_rows(Product<blocks, HS>& sums,
                                                  const Product<blocks, n>& weights, Storage* rows) {
#pragma unroll
    for (unsigned j = 0; j < n; j += 16) {
        Left<blocks>
            left;  // mma's accumulators, two blocks of 8 columns, have the layout of its left operand
#pragma unroll
        for (unsigned block = 0; block < blocks; block++) {
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                const float* pair = &weights.at[block][j / 8 + i / 2][i % 2 * 2];
                left.at[block][i] = packed(pair[0], pair[1], Storage());
            }
        }
#pragma unroll
        for (unsigned c = 0; c < HS; c += 16) {
            uint32_t right[4];  // channels c .. c + 7 in the first two, c + 8 .. c + 15 in the others
            ldmatrix_x4_trans(right, chunk_of<HS>(rows, j + my_lane() % 16, c / 8 + my_lane() / 16));
#pragma unroll
            for (unsigned block = 0; block < blocks; block++) {
                mma_m16n8k16<Storage>(sums.at[block][c / 8], left.at[block], right[0], right[1]);
                mma_m16n8k16<Storage>(sums.at[block][c / 8 + 1], left.at[block], right[2], right[3]);
            }
        }
    }
}

// Over the 4 lanes that share a row.
template <typename Combine>
__device__ __forceinline__ float row_reduce(float x, const Combine& combine) {
    x = combine(x, __shfl_xor_sync(all_lanes, x, 1));
    return combine(x, __shfl_xor_sync(all_lanes, x, 2));
}

// What a block works on. Grid: heads times tiles; the tiles with the longest walk come first.
struct Work {
    unsigned b, h, first;
};
template <typename Tiles>
__device__ __forceinline__ Work my_work(const AttentionShape& shape, bool last_first) {
    const unsigned heads = static_cast<unsigned>(shape.B * shape.NH), NH = static_cast<unsigned>(shape.NH);
    const unsigned head = blockIdx.x % heads, tile = blockIdx.x / heads, tiles = gridDim.x / heads;
    return {head / NH, head % NH, (last_first ? tiles - 1 - tile : tile) * rows_of_block<Tiles>};
}

// Token 0 of the block's head. `part`: q, k or v, or what else lies beside it in a row of `stride` entries.
template <typename Storage>
__device__ __forceinline__ Storage* head_of(Storage* tensor, size_t stride, size_t part, const Work& work,
                                            const AttentionShape& shape) {
    return tensor + work.b * shape.T * stride + part * shape.C + work.h * shape.HS;
}

// ---------------------------------------------------------------------------------------------------
// Forward

// One tile's scores become p = 2^(scale2 s - reference), where reference is the largest scale2 s of the row
// so far; total and output are brought to the new reference. The exponent is one fused multiply-add: scale2 =
// scale log2(e).
template <unsigned HS, unsigned blocks, unsigned n>
__device__ __forceinline__ void softmax(Product<blocks, n>& p, Product<blocks, HS>& output,
                                        float (&reference)[blocks][2], float (&total)[blocks][2],
                                        float scale2) {
#pragma unroll
    for (unsigned block = 0; block < blocks; block++) {
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            float top = -INFINITY;
#pragma unroll
            for (unsigned i = 0; i < n / 8; i++) {
                top = fmaxf(top, fmaxf(p.at[block][i][2 * half], p.at[block][i][2 * half + 1]));
            }
            top = row_reduce(top, [](float x, float y) { return fmaxf(x, y); });
            const float before = reference[block][half], now = fmaxf(before, scale2 * top);
            const float correction = exp2_approximate(before - now);
            reference[block][half] = now;
            float sum = 0.0f;
#pragma unroll
            for (unsigned i = 0; i < n / 8; i++) {
#pragma unroll
                for (unsigned e = 2 * half; e < 2 * half + 2; e++) {
                    p.at[block][i][e] = exp2_approximate(fmaf(scale2, p.at[block][i][e], -now));
                    sum += p.at[block][i][e];
                }
            }
            total[block][half] = fmaf(total[block][half], correction, sum);
#pragma unroll
            for (unsigned i = 0; i < HS / 8; i++) {
                output.at[block][i][2 * half] *= correction;
                output.at[block][i][2 * half + 1] *= correction;
            }
        }
    }
}

template <typename Storage, unsigned HS>
__global__ void __launch_bounds__(threads)
    attention_flash_forward_kernel(Storage* __restrict__ out, float* __restrict__ lse,
                                   const Storage* __restrict__ qkv, AttentionShape shape) {
    using Tiles = ForwardTiles<HS>;
    constexpr unsigned blocks = Tiles::blocks, keys = Tiles::walked, rows = rows_of_block<Tiles>;
    Storage* q_tile = shared<Storage>(rows * HS);
    Storage* k_tiles = shared<Storage>(2 * keys * HS, q_tile + rows * HS);
    Storage* v_tiles = shared<Storage>(2 * keys * HS, k_tiles + 2 * keys * HS);

    const Work work = my_work<Tiles>(shape, true);
    const size_t stride = 3 * shape.C;
    const unsigned T = static_cast<unsigned>(shape.T);
    const Storage* k = head_of(qkv, stride, 1, work, shape);
    const Storage* v = head_of(qkv, stride, 2, work, shape);
    const unsigned warp_row = threadIdx.x / 32 * rows_of_warp<Tiles>;
    const unsigned my_first = work.first + warp_row;  // query
    Storage* q = q_tile + warp_row * HS;

    const auto start_tile = [&](unsigned tile) {
        const unsigned buffer = tile % 2 * keys * HS;
        start_load<HS, keys>(k_tiles + buffer, k, stride, tile * keys, T);
        start_load<HS, keys>(v_tiles + buffer, v, stride, tile * keys, T);
        cp_async_commit();
    };
    start_load<HS, rows>(q_tile, head_of(qkv, stride, 0, work, shape), stride, work.first, T);
    start_tile(0);

    Product<blocks, HS> output;
    float reference[blocks][2], total[blocks][2] = {};
    for (auto& pair : reference) pair[0] = pair[1] = -INFINITY;
    Left<blocks> kept_q[Tiles::keep_q ? HS / 16 : 1];
    const float scale2 = shape.scale * log2_e;
    const unsigned tiles = (min(T, work.first + rows) + keys - 1) / keys;
    for (unsigned tile = 0; tile < tiles; tile++) {
        cp_async_wait<0>();
        __syncthreads();  // this tile is there, and the one before is no longer read
        if (tile + 1 < tiles) start_tile(tile + 1);
        const unsigned first_key = tile * keys;
        if (first_key >= my_first + rows_of_warp<Tiles>) continue;  // all in the future of the warp's queries
        Storage* k_tile = k_tiles + tile % 2 * keys * HS;
        Storage* v_tile = v_tiles + tile % 2 * keys * HS;

        Product<blocks, keys> p;
#pragma unroll
        for (unsigned i = 0; i < HS / 16; i++) {
            Left<blocks>& left = kept_q[Tiles::keep_q ? i : 0];
            if (!Tiles::keep_q || tile == 0) load_left<HS>(left, q, i);
            add_dot_products<HS>(p, left, k_tile, i);
        }
        if (first_key + keys - 1 > my_first) {  // the diagonal
#pragma unroll
            for (unsigned block = 0; block < blocks; block++) {
#pragma unroll
                for (unsigned i = 0; i < keys / 8; i++) {
#pragma unroll
                    for (unsigned e = 0; e < 4; e++) {
                        if (first_key + my_column(i, e) > my_first + my_row(block, e))
                            p.at[block][i][e] = -INFINITY;
                    }
                }
            }
        }
        softmax<HS>(p, output, reference, total, scale2);
        add_weighted_rows<HS>(output, p, v_tile);
    }

#pragma unroll
    for (unsigned block = 0; block < blocks; block++) {
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            const float sum = row_reduce(total[block][half], [](float x, float y) { return x + y; });
            const unsigned t = my_first + my_row(block, 2 * half);
            if (my_lane() % 4 == 0 && t < T) {
                lse[(work.b * shape.NH + work.h) * T + t] = (reference[block][half] + log2f(sum)) * ln_2;
            }
            total[block][half] = 1.0f / sum;
        }
    }
    store_rows(head_of(out, shape.C, 0, work, shape), shape.C, q, output, my_first, T,
               [&](unsigned block, unsigned half) { return total[block][half]; });
}

// ---------------------------------------------------------------------------------------------------
// Backward

// lse in powers of 2. A query past the end has p = 2^-infinity = 0.
__device__ __forceinline__ SoftmaxRow load_row(const SoftmaxRow* softmax_rows, unsigned t, unsigned T) {
    if (t >= T) return {INFINITY, 0.0f};
    const SoftmaxRow row = softmax_rows[t];
    return {row.lse * log2_e, row.delta};
}

template <typename Storage, unsigned HS>
__global__ void __launch_bounds__(threads)
    attention_flash_dq_kernel(Storage* __restrict__ dqkv, const Storage* __restrict__ dout,
                              const SoftmaxRow* __restrict__ softmax_rows, const Storage* __restrict__ qkv,
                              AttentionShape shape) {
    using Tiles = BackwardTiles<HS>;
    constexpr unsigned blocks = Tiles::blocks, keys = Tiles::walked, rows = rows_of_block<Tiles>;
    Storage* q_tile = shared<Storage>(rows * HS);
    Storage* dout_tile = shared<Storage>(rows * HS, q_tile + rows * HS);
    Storage* k_tiles = shared<Storage>(2 * keys * HS, dout_tile + rows * HS);
    Storage* v_tiles = shared<Storage>(2 * keys * HS, k_tiles + 2 * keys * HS);

    const Work work = my_work<Tiles>(shape, true);
    const size_t stride = 3 * shape.C;
    const unsigned T = static_cast<unsigned>(shape.T);
    const Storage* k = head_of(qkv, stride, 1, work, shape);
    const Storage* v = head_of(qkv, stride, 2, work, shape);
    const unsigned warp_row = threadIdx.x / 32 * rows_of_warp<Tiles>;
    const unsigned my_first = work.first + warp_row;  // query

    const auto start_tile = [&](unsigned tile) {
        const unsigned buffer = tile % 2 * keys * HS;
        start_load<HS, keys>(k_tiles + buffer, k, stride, tile * keys, T);
        start_load<HS, keys>(v_tiles + buffer, v, stride, tile * keys, T);
        cp_async_commit();
    };
    start_load<HS, rows>(q_tile, head_of(qkv, stride, 0, work, shape), stride, work.first, T);
    start_load<HS, rows>(dout_tile, head_of(dout, shape.C, 0, work, shape), shape.C, work.first, T);
    start_tile(0);

    softmax_rows += (work.b * shape.NH + work.h) * T;
    SoftmaxRow query[blocks][2];
#pragma unroll
    for (unsigned block = 0; block < blocks; block++) {
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            query[block][half] = load_row(softmax_rows, my_first + my_row(block, 2 * half), T);
        }
    }
    Product<blocks, HS> dq;
    const float scale2 = shape.scale * log2_e;
    const unsigned tiles = (min(T, work.first + rows) + keys - 1) / keys;
    for (unsigned tile = 0; tile < tiles; tile++) {
        cp_async_wait<0>();
        __syncthreads();  // this tile is there, and the one before is no longer read
        if (tile + 1 < tiles) start_tile(tile + 1);
        const unsigned first_key = tile * keys;
        if (first_key >= my_first + rows_of_warp<Tiles>) continue;  // all in the future of the warp's queries
        Storage* k_tile = k_tiles + tile % 2 * keys * HS;

        Product<blocks, keys> p, ds;
        add_dot_products<HS>(p, q_tile + warp_row * HS, k_tile);
        add_dot_products<HS>(ds, dout_tile + warp_row * HS, v_tiles + tile % 2 * keys * HS);
#pragma unroll
        for (unsigned block = 0; block < blocks; block++) {
#pragma unroll
            for (unsigned i = 0; i < keys / 8; i++) {
#pragma unroll
                for (unsigned e = 0; e < 4; e++) {
                    const bool seen = first_key + my_column(i, e) <= my_first + my_row(block, e);
                    const SoftmaxRow& mine = query[block][e / 2];
                    const float x = exp2_approximate(fmaf(scale2, p.at[block][i][e], -mine.lse));
                    ds.at[block][i][e] = (seen ? x : 0.0f) * (ds.at[block][i][e] - mine.delta);
                }
            }
        }
        add_weighted_rows<HS>(dq, ds, k_tile);
    }
    store_rows(head_of(dqkv, stride, 0, work, shape), stride, q_tile + warp_row * HS, dq, my_first, T,
               [&](unsigned, unsigned) { return shape.scale; });
}

template <typename Storage, unsigned HS>
__global__ void __launch_bounds__(threads)
    attention_flash_dkv_kernel(Storage* __restrict__ dqkv, const Storage* __restrict__ dout,
                               const SoftmaxRow* __restrict__ softmax_rows, const Storage* __restrict__ qkv,
                               AttentionShape shape) {
    using Tiles = BackwardTiles<HS>;
    constexpr unsigned blocks = Tiles::blocks, queries = Tiles::walked, rows = rows_of_block<Tiles>;
    Storage* k_tile = shared<Storage>(rows * HS);
    Storage* v_tile = shared<Storage>(rows * HS, k_tile + rows * HS);
    Storage* q_tiles = shared<Storage>(2 * queries * HS, v_tile + rows * HS);
    Storage* dout_tiles = shared<Storage>(2 * queries * HS, q_tiles + 2 * queries * HS);

    const Work work = my_work<Tiles>(shape, false);
    const size_t stride = 3 * shape.C;
    const unsigned T = static_cast<unsigned>(shape.T);
    const Storage* q = head_of(qkv, stride, 0, work, shape);
    const Storage* head_dout = head_of(dout, shape.C, 0, work, shape);
    const unsigned warp_row = threadIdx.x / 32 * rows_of_warp<Tiles>;
    const unsigned my_first = work.first + warp_row;  // key

    const auto start_tile = [&](unsigned tile) {
        const unsigned buffer = tile % 2 * queries * HS;
        start_load<HS, queries>(q_tiles + buffer, q, stride, tile * queries, T);
        start_load<HS, queries>(dout_tiles + buffer, head_dout, shape.C, tile * queries, T);
        cp_async_commit();
    };
    const unsigned first_tile = work.first / queries, tiles = (T + queries - 1) / queries;
    start_load<HS, rows>(k_tile, head_of(qkv, stride, 1, work, shape), stride, work.first, T);
    start_load<HS, rows>(v_tile, head_of(qkv, stride, 2, work, shape), stride, work.first, T);
    start_tile(first_tile);

    softmax_rows += (work.b * shape.NH + work.h) * T;
    Product<blocks, HS> dk, dv;
    const float scale2 = shape.scale * log2_e;
    for (unsigned tile = first_tile; tile < tiles; tile++) {
        cp_async_wait<0>();
        __syncthreads();  // this tile is there, and the one before is no longer read
        if (tile + 1 < tiles) start_tile(tile + 1);
        const unsigned first_query = tile * queries;
        if (first_query + queries <= my_first) continue;  // none sees the warp's keys
        Storage* q_tile = q_tiles + tile % 2 * queries * HS;
        Storage* dout_tile = dout_tiles + tile % 2 * queries * HS;

        Product<blocks, queries> p, ds;  // both transposed: a row is a key
        SoftmaxRow query[queries / 8][2];
#pragma unroll
        for (unsigned i = 0; i < queries / 8; i++) {
#pragma unroll
            for (unsigned parity = 0; parity < 2; parity++) {
                query[i][parity] = load_row(softmax_rows, first_query + my_column(i, parity), T);
#pragma unroll
                for (unsigned block = 0; block < blocks; block++) {
                    ds.at[block][i][parity] = ds.at[block][i][parity + 2] = -query[i][parity].delta;
                }
            }
        }
        add_dot_products<HS>(p, k_tile + warp_row * HS, q_tile);
        add_dot_products<HS>(ds, v_tile + warp_row * HS, dout_tile);  // dp - delta
#pragma unroll
        for (unsigned block = 0; block < blocks; block++) {
#pragma unroll
            for (unsigned i = 0; i < queries / 8; i++) {
#pragma unroll
                for (unsigned e = 0; e < 4; e++) {
                    const bool seen = my_first + my_row(block, e) <= first_query + my_column(i, e);
                    const float x = exp2_approximate(fmaf(scale2, p.at[block][i][e], -query[i][e % 2].lse));
                    p.at[block][i][e] = seen ? x : 0.0f;
                    ds.at[block][i][e] *= p.at[block][i][e];
                }
            }
        }
        add_weighted_rows<HS>(dv, p, dout_tile);
        add_weighted_rows<HS>(dk, ds, q_tile);
    }
    store_rows(head_of(dqkv, stride, 1, work, shape), stride, k_tile + warp_row * HS, dk, my_first, T,
               [&](unsigned, unsigned) { return shape.scale; });
    store_rows(head_of(dqkv, stride, 2, work, shape), stride, v_tile + warp_row * HS, dv, my_first, T,
               [](unsigned, unsigned) { return 1.0f; });
}

template <typename Tiles>
unsigned grid(const AttentionShape& shape) {
    return grid_size(shape.B * shape.NH * ceil_div(shape.T, rows_of_block<Tiles>));
}

template <typename Storage, unsigned HS>
void forward(Storage* out, float* lse, const Storage* qkv, const AttentionShape& shape, Stream* stream) {
    using Tiles = ForwardTiles<HS>;
    constexpr size_t bytes =
        shared_bytes<Storage>(rows_of_block<Tiles> * HS) + 2 * shared_bytes<Storage>(2 * Tiles::walked * HS);
    launch(attention_flash_forward_kernel<Storage, HS>, grid<Tiles>(shape), threads, bytes, stream, out, lse,
           qkv, shape);
}

template <typename Storage, unsigned HS>
void backward(Storage* dqkv, const Storage* dout, const SoftmaxRow* softmax_rows, const Storage* qkv,
              const AttentionShape& shape, Stream* stream) {
    using Tiles = BackwardTiles<HS>;
    constexpr size_t bytes = 2 * shared_bytes<Storage>(rows_of_block<Tiles> * HS) +
                             2 * shared_bytes<Storage>(2 * Tiles::walked * HS);
    launch(attention_flash_dq_kernel<Storage, HS>, grid<Tiles>(shape), threads, bytes, stream, dqkv, dout,
           softmax_rows, qkv, shape);
    launch(attention_flash_dkv_kernel<Storage, HS>, grid<Tiles>(shape), threads, bytes, stream, dqkv, dout,
           softmax_rows, qkv, shape);
}

}  // namespace

template <typename Storage>
void attention_flash_forward(Storage* out, float* lse, const Storage* qkv, const AttentionShape& shape,
                             Stream* stream) {
    (shape.HS == 64 ? forward<Storage, 64> : forward<Storage, 128>)(out, lse, qkv, shape, stream);
    stream->attention_kernel = "flash";
}

template <typename Storage>
void attention_flash_backward(Storage* dqkv, const Storage* dout, const SoftmaxRow* softmax_rows,
                              const Storage* qkv, const AttentionShape& shape, Stream* stream) {
    (shape.HS == 64 ? backward<Storage, 64> : backward<Storage, 128>)(dqkv, dout, softmax_rows, qkv, shape,
                                                                      stream);
    stream->attention_kernel = "flash";
}

#define INSTANTIATE(Storage)                                                                                 \
    template void attention_flash_forward(Storage*, float*, const Storage*, const AttentionShape&, Stream*); \
    template void attention_flash_backward(Storage*, const Storage*, const SoftmaxRow*, const Storage*,      \
                                           const AttentionShape&, Stream*);
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
