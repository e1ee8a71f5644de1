// Causal self-attention with online softmax (Milakov, Gimelshein 2018; Dao et al. 2022), one head at a time.
//
// A head's q, k and v are packed into fp32 buffers of the thread and walked in blocks of 96 queries by 96
// keys, up to the diagonal only. For a block, with s = q k^T / sqrt(HS):
//   forward    m' = max(m, s of the row); p = exp(s - m'); total and output, times exp(m - m'), get p and p v
//   backward   p = exp(s - lse); dp = dout v^T; ds = p (dp - D), where D = dout . out of the query;
//              dq += ds k;  dk += ds^T q;  dv += p^T dout
// Forward is 2 T^2 HS flop a head, backward 5. No more than a block of scores exists at a time.
//
// Every product is made of register tiles (vectors.h); 96 is a multiple of both sides of each. A product's
// left operand is read by strides and its right one by rows of a multiple of 16, so only k (backward: and v)
// is needed transposed. Padding is zero.
//
// The bits of a query's output depend on its own row and the keys before it: not on T, nor on other heads.
#include <omp.h>

#include <cmath>
#include <limits>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/vectors.h"
#include "kernels/kernels.h"

namespace {

constexpr size_t block = 96;
constexpr size_t granule = 16;  // rows of scores and of packed buffers have a multiple of it
static_assert(block % tile_rows == 0 && block % granule == 0 && granule % vector_floats == 0);
constexpr float infinity = std::numeric_limits<float>::infinity();

constexpr size_t round_up(size_t n, size_t multiple) { return ceil_div(n, multiple) * multiple; }

// Where one head's tensors start (its first channel, at t = 0) and how far apart their tokens are.
struct Shape {
    size_t T, HS;
    size_t width;         // HS rounded up to a multiple of 16: a row of a packed buffer
    size_t blocks;        // of 96 tokens; the last may have fewer
    size_t block_floats;  // 96 packed rows
    size_t stride;        // of out and dout between tokens: C
    size_t qkv_stride;    // of qkv and dqkv: 3C; k starts C after q, v C after k
    float scale;          // 1/sqrt(HS)

    size_t block_tokens(size_t index) const { return std::min(block, T - index * block); }
};

Shape head_shape(const char* op, size_t B, size_t T, size_t C, size_t NH) {
    check_sizes(op, {B, T, C, NH});
    if (C % NH != 0) fail("%s: C %zu is not a multiple of NH %zu", op, C, NH);
    const size_t HS = C / NH, width = round_up(HS, granule);
    return {
        T, HS, width, ceil_div(T, block), block * width, C, 3 * C, 1.0f / std::sqrt(static_cast<float>(HS))};
}

// ---------------------------------------------------------------------------------------------------
// Packing

// rows(i,:) = factor * source(i,:HS) for `count` tokens; zero up to `width`, and up to a whole block.
template <typename Storage>
void pack_rows(float* rows, const Storage* source, size_t stride, size_t count, const Shape& shape,
               float factor) {
    for (size_t i = 0; i < count; i++) {
        float* row = rows + i * shape.width;
        to_floats(row, source + i * stride, shape.HS);
#pragma omp simd
        for (size_t h = 0; h < shape.HS; h++) row[h] *= factor;
        for (size_t h = shape.HS; h < shape.width; h++) row[h] = 0.0f;
    }
    std::fill(rows + count * shape.width, rows + round_up(count, block) * shape.width, 0.0f);
}

// target(i,:HS) = factor * rows(i,:HS) for `count` tokens.
template <typename Storage>
void unpack_rows(Storage* target, size_t stride, const float* rows, size_t count, const Shape& shape,
                 float factor) {
    for (size_t i = 0; i < count; i++) {
#pragma omp simd
        for (size_t h = 0; h < shape.HS; h++) {
            target[i * stride + h] = from_float<Storage>(factor * rows[i * shape.width + h]);
        }
    }
}

// columns(h,i) = rows(i,h) for one block.
void transpose_rows(float* columns, const float* rows, size_t width) {
    for (size_t i = 0; i < block; i += 8) {
        for (size_t h = 0; h < width; h += 8)
            transpose_block<8>(columns + h * block + i, block, rows + i * width + h, width);
    }
}

// ---------------------------------------------------------------------------------------------------
// Products

// Element (row, k) is data[row * row_stride + k * k_stride].
struct LeftOperand {
    const float* data;
    size_t row_stride, k_stride;
};

// c(tile_rows, vectors) = a b, or c + a b, where columns are counted in vectors. b (depth, vectors); ldb and
// ldc: from row to row. The loops over the sums must be unrolled by name: otherwise gcc keeps them in memory.
template <size_t vectors>
void multiply_tile(float* c, size_t ldc, bool accumulate, LeftOperand a, const float* b, size_t ldb,
                   size_t depth) {
    Vector sums[vectors][tile_rows];
#pragma GCC unroll 2
    for (size_t v = 0; v < vectors; v++) {
#pragma GCC unroll 8
        for (size_t i = 0; i < tile_rows; i++) sums[v][i] = Vector{};
    }
    for (size_t k = 0; k < depth; k++, a.data += a.k_stride, b += ldb) {
#pragma GCC unroll 8
        for (size_t i = 0; i < tile_rows; i++) {
            const float left = a.data[i * a.row_stride];
#pragma GCC unroll 2
            for (size_t v = 0; v < vectors; v++) sums[v][i] += left * load(b + v * vector_floats);
        }
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < tile_rows; i++, c += ldc) {
#pragma GCC unroll 2
        for (size_t v = 0; v < vectors; v++) {
            float* const to = c + v * vector_floats;
            store(to, accumulate ? load(to) + sums[v][i] : sums[v][i]);
        }
    }
}

// The same for a row of tiles: c (tile_rows,columns), b (depth,columns), columns a multiple of 16.
void multiply(float* c, size_t ldc, bool accumulate, LeftOperand a, const float* b, size_t ldb,
              size_t columns, size_t depth) {
    size_t column = 0;
    for (; column + 2 * vector_floats <= columns; column += 2 * vector_floats)
        multiply_tile<2>(c + column, ldc, accumulate, a, b + column, ldb, depth);
    for (; column < columns; column += vector_floats)
        multiply_tile<1>(c + column, ldc, accumulate, a, b + column, ldb, depth);
}

// How many scores of a row tile are needed: a block, or on the diagonal no more than its last row looks back
// on, in whole tiles.
size_t scores_width(bool diagonal, size_t first_row) {
    return diagonal ? round_up(first_row + tile_rows, granule) : block;
}

// On the diagonal a row sees the keys up to itself; a score of -inf gives p = 0.
void mask_future(float* scores, size_t row, size_t columns) {
    std::fill(scores + row + 1, scores + columns, -infinity);
}

// ---------------------------------------------------------------------------------------------------
// Forward

// Turns a tile's rows of scores into p = exp(s - m') with the row's new running maximum m', and adds them to
// the running totals; correction = exp(m - m'). Each step is done for all rows before the next one, because
// the steps of a single row wait for each other.
void softmax_rows(float* scores, size_t columns, float* maximum, float* total, float* correction) {
    for (size_t i = 0; i < tile_rows; i++) {
        const float before = maximum[i];
        maximum[i] = std::max(before, lane_max<granule>(scores + i * block, columns));
        correction[i] = fast_exp(before - maximum[i]);
    }
    for (size_t i = 0; i < tile_rows; i++) {
        float* row = scores + i * block;
        const float row_maximum = maximum[i];
#pragma omp simd
        for (size_t c = 0; c < columns; c++) row[c] = fast_exp(row[c] - row_maximum);
    }
    for (size_t i = 0; i < tile_rows; i++) {
        const float* row = scores + i * block;
        const float sum = lane_sum<float, granule>(columns, [&](size_t c) { return row[c]; });
        total[i] = total[i] * correction[i] + sum;
    }
}

size_t forward_scratch_bytes(const Shape& shape) {
    return ((2 * shape.blocks + 2) * shape.block_floats + tile_rows * block) * sizeof(float);
}

// One head: out and lse of every `step`-th block of queries, from `first` on.
template <typename Storage>
void head_forward(Storage* out, float* lse, const Storage* qkv, const Shape& shape, size_t first, size_t step,
                  float* scratch) {
    const size_t width = shape.width, stride = shape.qkv_stride;
    const Storage *k_source = qkv + shape.stride, *v_source = k_source + shape.stride;
    float* k_columns = scratch;                                // all blocks of keys, each transposed
    float* v = k_columns + shape.blocks * shape.block_floats;  // all rows
    float* q = v + shape.blocks * shape.block_floats;          // one block of queries
    float* output = q + shape.block_floats;                    // theirs, not yet divided by `total`
    float* scores = output + shape.block_floats;               // one row tile
    for (size_t index = 0; index < shape.blocks; index++) {
        pack_rows(q, k_source + index * block * stride, stride, shape.block_tokens(index), shape, 1.0f);
        transpose_rows(k_columns + index * shape.block_floats, q, width);
    }
    pack_rows(v, v_source, stride, shape.T, shape, 1.0f);

    for (size_t query_block = first; query_block < shape.blocks; query_block += step) {
        const size_t t = query_block * block, queries = shape.block_tokens(query_block);
        pack_rows(q, qkv + t * stride, stride, queries, shape, shape.scale);
        float maximum[block], total[block] = {}, correction[tile_rows];
        std::fill_n(maximum, block, -infinity);

        for (size_t key_block = 0; key_block <= query_block; key_block++) {
            const bool diagonal = key_block == query_block;
            const float* block_k_columns = k_columns + key_block * shape.block_floats;
            const float* block_v = v + key_block * shape.block_floats;
            for (size_t row = 0; row < queries; row += tile_rows) {
                const size_t columns = scores_width(diagonal, row);
                multiply(scores, block, false, {q + row * width, width, 1}, block_k_columns, block, columns,
                         shape.HS);
                for (size_t i = 0; diagonal && i < tile_rows; i++) {
                    mask_future(scores + i * block, row + i, columns);
                }
                softmax_rows(scores, columns, maximum + row, total + row, correction);

                float* tile_output = output + row * width;
                for (size_t i = 0; key_block > 0 && i < tile_rows; i++) {
#pragma omp simd
                    for (size_t h = 0; h < width; h++) tile_output[i * width + h] *= correction[i];
                }
                const size_t keys = diagonal ? row + tile_rows : block;
                multiply(tile_output, width, key_block > 0, {scores, block, 1}, block_v, width, width, keys);
            }
        }
        for (size_t i = 0; i < queries; i++) {
            unpack_rows(out + (t + i) * shape.stride, shape.stride, output + i * width, 1, shape,
                        1.0f / total[i]);
            lse[t + i] = maximum[i] + std::log(total[i]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------
// Backward

size_t backward_scratch_bytes(const Shape& shape) {
    return ((3 * shape.blocks + 5) * shape.block_floats + 2 * block * block + shape.T) * sizeof(float);
}

// One head. Blocks of keys outside, so that dk and dv are finished one block after the other, in order of the
// queries; dq of all queries grows in order of the keys.
template <typename Storage>
void head_backward(Storage* dqkv, const Storage* dout, const Storage* out, const float* lse,
                   const Storage* qkv, const Shape& shape, float* scratch) {
    const size_t width = shape.width, stride = shape.qkv_stride;
    const size_t all = shape.blocks * shape.block_floats, one = shape.block_floats;
    float *q = scratch, *d_output = q + all, *dq = d_output + all;            // all queries
    float *k = dq + all, *k_columns = k + one, *v_columns = k_columns + one;  // one block of keys
    float *dk = v_columns + one, *dv = dk + one;                              // theirs
    float *p = dv + one, *ds = p + block * block;  // one block of queries by keys; ds holds dp first
    float* D = ds + block * block;                 // all queries

    pack_rows(q, qkv, stride, shape.T, shape, shape.scale);
    pack_rows(d_output, dout, shape.stride, shape.T, shape, 1.0f);
    for (size_t t = 0; t < shape.T; t++) {
        const Storage *dout_row = dout + t * shape.stride, *out_row = out + t * shape.stride;
        D[t] = lane_sum<float, granule>(
            shape.HS, [&](size_t h) { return to_float(dout_row[h]) * to_float(out_row[h]); });
    }

    for (size_t key_block = 0; key_block < shape.blocks; key_block++) {
        const size_t keys = shape.block_tokens(key_block);
        const Storage* k_source = qkv + key_block * block * stride + shape.stride;
        pack_rows(dv, k_source + shape.stride, stride, keys, shape, 1.0f);  // v; dv itself is not in use yet
        transpose_rows(v_columns, dv, width);
        pack_rows(k, k_source, stride, keys, shape, 1.0f);
        transpose_rows(k_columns, k, width);

        for (size_t query_block = key_block; query_block < shape.blocks; query_block++) {
            const bool diagonal = key_block == query_block;
            const size_t t = query_block * block, queries = shape.block_tokens(query_block);
            for (size_t row = 0; row < queries; row += tile_rows) {
                const size_t columns = scores_width(diagonal, row);
                const size_t offset = (t + row) * width;
                multiply(p + row * block, block, false, {q + offset, width, 1}, k_columns, block, columns,
                         shape.HS);
                multiply(ds + row * block, block, false, {d_output + offset, width, 1}, v_columns, block,
                         columns, shape.HS);
                for (size_t i = row; i < std::min(row + tile_rows, queries); i++) {
                    float *p_row = p + i * block, *ds_row = ds + i * block;
                    const float row_lse = lse[t + i], row_D = D[t + i];
                    if (diagonal) mask_future(p_row, i, columns);
#pragma omp simd
                    for (size_t c = 0; c < columns; c++) {
                        p_row[c] = fast_exp(p_row[c] - row_lse);
                        ds_row[c] = p_row[c] * (ds_row[c] - row_D);
                    }
                }
                const size_t depth = diagonal ? row + tile_rows : block;
                multiply(dq + offset, width, key_block > 0, {ds + row * block, block, 1}, k, width, width,
                         depth);
            }
            for (size_t row = 0; row < keys; row += tile_rows) {
                const size_t start = diagonal ? row : 0;  // the first query that sees one of these keys
                const size_t offset = (t + start) * width, depth = queries - start;
                multiply(dk + row * width, width, !diagonal, {ds + start * block + row, 1, block}, q + offset,
                         width, width, depth);
                multiply(dv + row * width, width, !diagonal, {p + start * block + row, 1, block},
                         d_output + offset, width, width, depth);
            }
        }
        Storage* dk_target = dqkv + key_block * block * stride + shape.stride;
        unpack_rows(dk_target, stride, dk, keys, shape, 1.0f);
        unpack_rows(dk_target + shape.stride, stride, dv, keys, shape, 1.0f);
    }
    unpack_rows(dqkv, stride, dq, shape.T, shape, shape.scale);
}

// Calls body(item, scratch) for each item on some thread. Scratch is taken beforehand, because running out of
// memory must not throw out of a parallel region.
template <typename Body>
void for_items(Stream* stream, size_t items, size_t flops, size_t scratch_bytes, const Body& body) {
    for (int thread = 0; thread < stream->threads; thread++) thread_scratch(stream, thread, scratch_bytes);
#pragma omp parallel for num_threads(stream->threads) schedule(dynamic) if (flops > 16 * parallel_grain)
    for (size_t item = 0; item < items; item++) {
        body(item, static_cast<float*>(thread_scratch(stream, omp_get_thread_num(), scratch_bytes)));
    }
}

}  // namespace

template <typename Storage>
void attention_forward(Storage* out, float* lse, const Storage* qkv, size_t B, size_t T, size_t C, size_t NH,
                       Stream* stream) {
    const Shape shape = head_shape("attention_forward", B, T, C, NH);
    // With fewer heads than threads, a head's blocks of queries are dealt out to several items.
    const size_t parts = std::min(shape.blocks, ceil_div(static_cast<size_t>(stream->threads), B * NH));
    const auto body = [&](size_t item, float* scratch) {
        const size_t head = item / parts, t = head / NH * T, channel = head % NH * shape.HS;
        head_forward(out + t * C + channel, lse + head * T, qkv + t * 3 * C + channel, shape, item % parts,
                     parts, scratch);
    };
    for_items(stream, B * NH * parts, 2 * B * T * T * C, forward_scratch_bytes(shape), body);
}

template <typename Storage>
void attention_backward(Storage* dqkv, const Storage* dout, const Storage* out, const float* lse,
                        const Storage* qkv, size_t B, size_t T, size_t C, size_t NH, Stream* stream) {
    const Shape shape = head_shape("attention_backward", B, T, C, NH);
    const auto body = [&](size_t head, float* scratch) {
        const size_t t = head / NH * T, channel = head % NH * shape.HS;
        const size_t at = t * C + channel, qkv_at = t * 3 * C + channel;
        head_backward(dqkv + qkv_at, dout + at, out + at, lse + head * T, qkv + qkv_at, shape, scratch);
    };
    for_items(stream, B * NH, 5 * B * T * T * C, backward_scratch_bytes(shape), body);
}

#define INSTANTIATE(Storage)                                                                                 \
    template void attention_forward(Storage*, float*, const Storage*, size_t, size_t, size_t, size_t,        \
                                    Stream*);                                                                \
    template void attention_backward(Storage*, const Storage*, const Storage*, const float*, const Storage*, \
                                     size_t, size_t, size_t, size_t, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
#undef INSTANTIATE
