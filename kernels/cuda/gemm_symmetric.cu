// Batched products that are known to be symmetric, as Newton-Schulz forms them:
//   d = alpha op(a) op(b)^T + beta c + gamma I,   op(x) = x or x^T,   for the tiles on and below the
//   diagonal,
// each stored twice: as it is, and mirrored. In 16 bits on tensor cores with fp32 sums; fp32 goes through
// cuBLASLt, and a second kernel mirrors.
//
// A block of 4 warps owns a tile of 128 x 128 and walks the depth in steps of 32, which cp.async brings in
// three buffers: two are on their way while one is used. Why this shape:
//   - A warp's 64 x 64 takes 32 products of mma from 8 ldmatrix. A step of 16 reads 16 KiB of shared memory
//   and
//     writes 8, 192 cycles at 128 bytes each; its products need 256 on an A100 (1024 multiply-adds a cycle
//     and multiprocessor). Warps of 64 x 32 would read 24 KiB: the 256 cycles too.
//   - 128 sums in registers and 48 KiB: two blocks fit every architecture from sm_80 (sm_86, 89 and 120 have
//     100 KiB), so that one computes while the other waits or stores. Depth 64 needs 96 KiB and would not.
//   - 128 FLOPs a byte from memory or L2: a tile reads 4 * 128 * k bytes for 2 * 128^2 * k FLOPs.
// On Hopper mma does not reach the peak, which takes wgmma (Luo et al. 2025, arXiv:2501.12084).
//
// A matrix of t = m / 128 rows of tiles takes t (t + 1) / 2 of t^2 blocks. In a tile of the diagonal the
// warp that lies above it does nothing. What is multiplied is 54 % of the full product for m = 768, 53 % for
// 1024, 52.5 % for 1280 and 56 % for 1600 (12.5 rows of tiles, of which 13 are computed): 8, 6, 5 and 12 %
// more than the (m + 1) / 2 m that a triangle needs.
//
// Tiles in shared memory are swizzled: see chunk_of. Nothing depends on the batch, so neither do the bits.
#include <cstring>
#include <type_traits>

#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/shared.cuh"
#include "kernels/kernels.h"

namespace {

constexpr unsigned tile = 128, warp_tile = 64;
constexpr unsigned depth = 32, stages = 3;
constexpr unsigned threads = 128, warps = threads / 32;
constexpr unsigned chunk_size = 8;          // entries of 16 bytes
constexpr unsigned operand = tile * depth;  // entries of an operand's tile
constexpr unsigned memory = stages * 2 * operand;
static_assert(memory >= tile * tile, "the result's tile takes the place of the operands'");

struct Shape {
    unsigned m, k;
    unsigned tiles;  // of a matrix: on and below the diagonal
    float alpha, beta, gamma;
};

// The index-th place on or below the diagonal, row by row: (0,0), (1,0), (1,1), (2,0), ... Exact, in at most
// as many turns as there are rows, m / 128.
struct Place {
    unsigned row, column;
};
__device__ __forceinline__ Place lower_triangle(unsigned index) {
    unsigned row = 0;
    while (index > row) index -= ++row;
    return {row, index};
}

__device__ __forceinline__ unsigned my_lane() { return threadIdx.x % 32; }
__device__ __forceinline__ unsigned my_warp() { return threadIdx.x / 32; }

// ---------------------------------------------------------------------------------------------------
// Tiles in shared memory and their chunks. With `vectors`, matrices are aligned to 16 bytes and their sides
// multiples of 8; without, entries move one by one.

// Chunks are swizzled so that no two of 8 accesses at a time meet in a bank: those of ldmatrix, 8 rows of one
// chunk; and those of store_mirrored, rows 2 q, 2 q + 1 (mod 8) of 4 groups of 8. Rows of 64 bytes lie two to
// a cycle of the banks.
template <unsigned columns, typename Storage>
__device__ __forceinline__ Storage* chunk_of(Storage* entries, unsigned row, unsigned chunk) {
    const unsigned swizzle = columns == depth ? row / 2 % 4 : (row ^ row / 8 * 2) % 8;
    return entries + row * columns + (chunk ^ swizzle) * chunk_size;
}

// Starts to copy 8 entries from x(row,column) on; zeros beyond the matrix, which is (rows,columns).
template <bool vectors, typename Storage>
__device__ __forceinline__ void start_chunk(Storage* to, const Storage* x, unsigned rows, unsigned columns,
                                            unsigned row, unsigned column) {
    const bool inside = row < rows && column < columns;
    const Storage* from = inside ? x + size_t{row} * columns + column : x;
    if constexpr (vectors) {
        cp_async_16(to, from, inside);
    } else {
        Pack<Storage, chunk_size> pack = {};
        for (unsigned i = 0; i < chunk_size; i++) {
            if (inside && column + i < columns) pack.element[i] = from[i];
        }
        *reinterpret_cast<Pack<Storage, chunk_size>*>(to) = pack;
    }
}

// The reverse: x(row, column ..) = pack, as far as that is inside of x, which is (m,m).
template <bool vectors, typename Storage>
__device__ __forceinline__ void store_chunk(Storage* x, const Pack<Storage, chunk_size>& pack, unsigned m,
                                            unsigned row, unsigned column) {
    if (row >= m || column >= m) return;
    Storage* to = x + size_t{row} * m + column;
    if constexpr (vectors) {
        *reinterpret_cast<Pack<Storage, chunk_size>*>(to) = pack;
    } else {
        for (unsigned i = 0; i < chunk_size && column + i < m; i++) to[i] = pack.element[i];
    }
}

// Starts to copy the (tile_rows,tile_columns) entries from x(first_row,first_column) on.
template <unsigned tile_rows, unsigned tile_columns, bool vectors, typename Storage>
__device__ __forceinline__ void start_tile(Storage* to, const Storage* x, unsigned rows, unsigned columns,
                                           unsigned first_row, unsigned first_column) {
    constexpr unsigned chunks = tile_columns / chunk_size, rows_at_once = threads / chunks;
    const unsigned my_row = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
#pragma unroll
    for (unsigned row = my_row; row < tile_rows; row += rows_at_once) {
        start_chunk<vectors>(chunk_of<tile_columns>(to, row, chunk), x, rows, columns, first_row + row,
                             first_column + chunk * chunk_size);
    }
}

// An operand's tile: rows first .. first + 127 of op(x), depth k .. k + 31.
template <bool transpose, bool vectors, typename Storage>
__device__ __forceinline__ void start_operand(Storage* to, const Storage* x, const Shape& shape,
                                              unsigned first, unsigned k) {
    if constexpr (transpose) {
        start_tile<depth, tile, vectors>(to, x, shape.k, shape.m, k, first);
    } else {
        start_tile<tile, depth, vectors>(to, x, shape.m, shape.k, first, k);
    }
}

// ---------------------------------------------------------------------------------------------------
// The product

// mma's operand from 16 rows and 16 of the depth of a tile: four 8x8 matrices, which the left operand counts
// by rows first, the right one, for two mma, by depth first.
enum class Side { left, right };
template <Side side, bool transpose, typename Storage>
__device__ __forceinline__ void load_fragment(uint32_t* fragment, Storage* entries, unsigned row,
                                              unsigned k) {
    const unsigned matrix = my_lane() / 8, line = my_lane() % 8;
    const unsigned row_half = side == Side::left ? matrix % 2 : matrix / 2;
    const unsigned depth_half = side == Side::left ? matrix / 2 : matrix % 2;
    if constexpr (transpose) {
        ldmatrix_x4_trans(fragment, chunk_of<tile>(entries, k + 8 * depth_half + line, row / 8 + row_half));
    } else {
        ldmatrix_x4(fragment, chunk_of<depth>(entries, row + 8 * row_half + line, k / 8 + depth_half));
    }
}

// A warp's sums. Entry e of [i][j] is in row 16 i + lane / 4 + 8 (e / 2), column 8 j + 2 (lane % 4) + e % 2.
struct Sums {
    float at[warp_tile / 16][warp_tile / 8][4] = {};
};

// sums += left(row .. row + 63, :) right(column .. column + 63, :)^T
template <bool transpose, typename Storage>
__device__ __forceinline__ void add_products(Sums& sums, Storage* left_tile, Storage* right_tile,
                                             unsigned row, unsigned column) {
#pragma unroll
    for (unsigned k = 0; k < depth; k += 16) {
        uint32_t left[warp_tile / 16][4];
#pragma unroll
        for (unsigned i = 0; i < warp_tile / 16; i++)
            load_fragment<Side::left, transpose>(left[i], left_tile, row + 16 * i, k);
#pragma unroll
        for (unsigned j = 0; j < warp_tile / 8; j += 2) {
            uint32_t right[4];
            load_fragment<Side::right, transpose>(right, right_tile, column + 8 * j, k);
#pragma unroll
            for (unsigned i = 0; i < warp_tile / 16; i++) {
                mma_m16n8k16<Storage>(sums.at[i][j], left[i], right[0], right[1]);
                mma_m16n8k16<Storage>(sums.at[i][j + 1], left[i], right[2], right[3]);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------
// The result

// Writes the warp's part of the result to the tile, over c, which lies there where beta is not 0. Of a tile
// on the diagonal, what is on and below it, mirrored.
template <typename Storage>
__device__ __forceinline__ void finish(Storage* result, const Sums& sums, const Shape& shape, bool diagonal,
                                       unsigned first_row, unsigned first_column) {
#pragma unroll
    for (unsigned i = 0; i < warp_tile / 16; i++) {
#pragma unroll
        for (unsigned j = 0; j < warp_tile / 8; j++) {
#pragma unroll
            for (unsigned e = 0; e < 4; e += 2) {
                const unsigned row = first_row + 16 * i + my_lane() / 4 + e / 2 * 8;
                const unsigned column = first_column + 8 * j + my_lane() % 4 * 2;
                Storage* to = chunk_of<tile>(result, row, column / 8) + column % 8;
                const auto value = [&](unsigned x) {
                    float sum = __fmul_rn(shape.alpha, sums.at[i][j][e + x]);
                    if (shape.beta != 0.0f) sum = fmaf(shape.beta, load_float(to[x]), sum);
                    return store<Storage>(diagonal && row == column + x ? __fadd_rn(sum, shape.gamma) : sum);
                };
                if (!diagonal) {
                    *reinterpret_cast<Pack<Storage, 2>*>(to) = {value(0), value(1)};
                    continue;
                }
                for (unsigned x = 0; x < 2 && column + x <= row; x++)
                    *(chunk_of<tile>(result, column + x, row / 8) + row % 8) = to[x] = value(x);
            }
        }
    }
}

// d(row .. row + 127, column .. column + 127) = the tile; by 16 lanes a row.
template <bool vectors, typename Storage>
__device__ __forceinline__ void store_tile(Storage* d, Storage* result, unsigned m, unsigned row,
                                           unsigned column) {
    constexpr unsigned chunks = tile / chunk_size;
    const unsigned chunk = threadIdx.x % chunks;
    for (unsigned i = threadIdx.x / chunks; i < tile; i += threads / chunks) {
        const auto pack =
            *reinterpret_cast<const Pack<Storage, chunk_size>*>(chunk_of<tile>(result, i, chunk));
        store_chunk<vectors>(d, pack, m, row + i, column + chunk * chunk_size);
    }
}

// d(row .. row + 127, column .. column + 127) = the tile transposed. ldmatrix gives a lane rows 2 s, 2 s + 1
// of four 8x8 matrices in column lane / 4, where s = lane % 4. As matrix q takes rows 2 q and 2 q + 1 of four
// groups of 8, its rows 2 s and 2 s + 1 are of group s; the four together are that group: 16 bytes of a
// row of d, and 64 from each 4 lanes.
template <bool vectors, typename Storage>
__device__ __forceinline__ void store_mirrored(Storage* d, Storage* result, unsigned m, unsigned row,
                                               unsigned column) {
    static_assert(tile == 32 * warps, "a warp takes 32 rows of the tile");
    const unsigned first = my_warp() * 32, matrix = my_lane() / 8, line = my_lane() % 8;
    for (unsigned chunk = 0; chunk < tile / chunk_size; chunk++) {
        uint32_t group[4];
        ldmatrix_x4_trans(group, chunk_of<tile>(result, first + line / 2 * 8 + 2 * matrix + line % 2, chunk));
        Pack<Storage, chunk_size> pack;
        memcpy(&pack, group, sizeof(pack));
        store_chunk<vectors>(d, pack, m, row + chunk * chunk_size + my_lane() / 4,
                             column + first + my_lane() % 4 * chunk_size);
    }
}

template <typename Storage, bool transpose, bool vectors>
__global__ void __launch_bounds__(threads, 2)
    symmetric_kernel(Storage* __restrict__ d, const Storage* a, const Storage* b, const Storage* c,
                     Shape shape) {
    Storage* buffers = shared<Storage>(memory);
    const unsigned matrix = blockIdx.x / shape.tiles;
    const Place place = lower_triangle(blockIdx.x % shape.tiles);
    const unsigned row = place.row * tile, column = place.column * tile;
    const bool diagonal = row == column;
    a += size_t{matrix} * shape.m * shape.k;
    b += size_t{matrix} * shape.m * shape.k;
    d += size_t{matrix} * shape.m * shape.m;

    const unsigned steps = (shape.k + depth - 1) / depth;
    const auto start_step = [&](unsigned step) {
        if (step < steps) {
            Storage* to = buffers + step % stages * 2 * operand;
            start_operand<transpose, vectors>(to, a, shape, row, step * depth);
            start_operand<transpose, vectors>(to + operand, b, shape, column, step * depth);
        }
        cp_async_commit();  // an empty group, too, so that each step is one
    };
    for (unsigned step = 0; step < stages - 1; step++) start_step(step);

    const unsigned warp_row = my_warp() / 2 * warp_tile, warp_column = my_warp() % 2 * warp_tile;
    const bool idle = diagonal && warp_row < warp_column;
    Sums sums;
    for (unsigned step = 0; step < steps; step++) {
        cp_async_wait<stages - 2>();
        __syncthreads();  // this step is there, and the buffer of the one before is no longer read
        start_step(step + stages - 1);
        Storage* from = buffers + step % stages * 2 * operand;
        if (!idle) add_products<transpose>(sums, from, from + operand, warp_row, warp_column);
    }
    __syncthreads();  // the buffers are no longer read: the result takes their place
    if (shape.beta != 0.0f) {
        start_tile<tile, tile, vectors>(buffers, c + size_t{matrix} * shape.m * shape.m, shape.m, shape.m,
                                        row, column);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
    }
    if (!idle) finish(buffers, sums, shape, diagonal, warp_row, warp_column);
    __syncthreads();
    store_tile<vectors>(d, buffers, shape.m, row, column);
    if (!diagonal) store_mirrored<vectors>(d, buffers, shape.m, column, row);
}

template <typename Storage>
void product_on_tensor_cores(Storage* d, const Storage* a, const Storage* b, const Storage* c, bool transpose,
                             size_t batch, const Shape& shape, Stream* stream) {
    const bool vectors = shape.m % chunk_size == 0 && shape.k % chunk_size == 0 && aligned_to_16(d, a, b) &&
                         (shape.beta == 0.0f || aligned_to_16(c));
    const auto kernel =
        vectors ? transpose ? symmetric_kernel<Storage, true, true> : symmetric_kernel<Storage, false, true>
        : transpose ? symmetric_kernel<Storage, true, false>
                    : symmetric_kernel<Storage, false, false>;
    launch(kernel, grid_size(batch * shape.tiles), threads, shared_bytes<Storage>(memory), stream, d, a, b, c,
           shape);
    stream->symmetric_kernel = vectors ? "vectors" : "entries";
}

// ---------------------------------------------------------------------------------------------------
// fp32, after cuBLASLt's product

constexpr unsigned mirror_tile = 32, mirror_rows = 8;

// x(i,j) = x(j,i) for i < j, and x(i,i) += gamma. A block copies one tile on or below the diagonal.
__global__ void __launch_bounds__(mirror_tile* mirror_rows)
    mirror_kernel(float* x, unsigned m, unsigned tiles, float gamma) {
    constexpr unsigned pitch = mirror_tile + 1;  // so that a column, too, lies in 32 banks
    float* lower = shared<float>(mirror_tile * pitch);
    const Place place = lower_triangle(blockIdx.x % tiles);
    const unsigned row = place.row * mirror_tile, column = place.column * mirror_tile;
    const unsigned lane = threadIdx.x % mirror_tile, first = threadIdx.x / mirror_tile;
    x += size_t{blockIdx.x / tiles} * m * m;
    for (unsigned i = first; i < mirror_tile && row + i < m; i += mirror_rows) {
        if (column + lane < m) lower[i * pitch + lane] = x[size_t{row + i} * m + column + lane];
    }
    __syncthreads();
    for (unsigned i = first; i < mirror_tile && column + i < m; i += mirror_rows) {
        if (row + lane >= m || row + lane < column + i) continue;
        const float value = lower[lane * pitch + i];
        x[size_t{column + i} * m + row + lane] = row + lane == column + i ? value + gamma : value;
    }
}

void product_by_cublas(float* d, const float* a, const float* b, const float* c, bool transpose, size_t batch,
                       const Shape& shape, Stream* stream) {
    const unsigned m = shape.m;
    matmul<float, float>({.d = d,
                          .a = a,
                          .b = b,
                          .c = shape.beta == 0.0f ? nullptr : c,
                          .transpose_a = transpose,
                          .transpose_b = !transpose,
                          .m = m,
                          .n = m,
                          .k = shape.k,
                          .batch = batch,
                          .alpha = shape.alpha,
                          .beta = shape.beta},
                         stream);
    launch(mirror_kernel, grid_size(batch * shape.tiles), mirror_tile * mirror_rows,
           shared_bytes<float>(mirror_tile * (mirror_tile + 1)), stream, d, m, shape.tiles, shape.gamma);
    stream->symmetric_kernel = "cublas";
}

}  // namespace

template <typename Storage>
void gemm_symmetric(Storage* d, const Storage* a, const Storage* b, const Storage* c, bool transpose,
                    size_t m, size_t k, float alpha, float beta, float gamma, size_t batch, Stream* stream) {
    check_sizes("gemm_symmetric", {m, k, batch});
    if (d == nullptr || a == nullptr || b == nullptr) fail("gemm_symmetric: d, a or b is null");
    if (c == nullptr && beta != 0.0f)
        fail("gemm_symmetric: c is null and beta is %g", static_cast<double>(beta));
    if (d == a || d == b || d == c) fail("gemm_symmetric: d may not be an input");
    constexpr bool fp32 = std::is_same_v<Storage, float>;
    const size_t rows_of_tiles = ceil_div(m, fp32 ? mirror_tile : tile);
    const Shape shape = {.m = grid_size(m),
                         .k = grid_size(k),
                         .tiles = grid_size(rows_of_tiles * (rows_of_tiles + 1) / 2),
                         .alpha = alpha,
                         .beta = beta,
                         .gamma = gamma};
    if constexpr (fp32) {
        product_by_cublas(d, a, b, c, transpose, batch, shape, stream);
    } else {
        product_on_tensor_cores(d, a, b, c, transpose, batch, shape, stream);
    }
}

#define INSTANTIATE(Storage)                                                                             \
    template void gemm_symmetric(Storage*, const Storage*, const Storage*, const Storage*, bool, size_t, \
                                 size_t, float, float, float, size_t, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
