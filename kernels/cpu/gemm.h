// Matrix products on the CPU: C = A B for every transposition, with whatever an op does to C fused in.
//
// The scheme is Goto's (Goto, van de Geijn 2008, "Anatomy of high-performance matrix multiplication"). All
// threads pack B, once, into panels of `panel_columns` columns. C is cut into tiles; a thread takes a tile,
// packs its rows of A into panels of `panel_rows` rows, `k_block` deep (they stay in L2), and runs the
// micro-kernel over every pair of panels (a panel of B stays in L1). Packing walks A and B by strides, which
// gives all transpositions, and converts to fp32, so that one micro-kernel serves every storage type.
//
// Bits: an element of C is the sum, in order, of its blocks of k, and a block is one chain of multiply-adds
// in the order of k. Panels at an edge are padded with zeros and run the same code. So the result depends on
// neither the number of threads nor the tiling, the batch or the other rows and columns of the matrix.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstddef>

#include "kernels/cpu/stream.h"
#include "kernels/dtype.h"

// A batch of matrices: element (i,j) of matrix l is data[l*batch_stride + i*row_stride + j*column_stride].
// Packing is fast where row_stride or column_stride is 1.
template <typename Storage>
struct Matrix {
    const Storage* data;
    size_t row_stride, column_stride, batch_stride;

    const Storage* at(size_t l, size_t i, size_t j) const {
        return data + l * batch_stride + i * row_stride + j * column_stride;
    }
};

template <typename Storage>
Matrix<Storage> row_major(const Storage* data, size_t rows, size_t columns) {
    return {data, columns, 1, rows * columns};
}

// The transpose, (columns,rows), of a row-major (rows,columns) matrix.
template <typename Storage>
Matrix<Storage> transposed(const Storage* data, size_t rows, size_t columns) {
    return {data, 1, columns, rows * columns};
}

namespace gemm_detail {

// A vector register of the target. Six rows of two vectors are 12 accumulators: enough to hide the latency
// of two FMA units, and with two vectors of B and one number of A they just fit 16 registers.
#if defined(__AVX512F__)
constexpr size_t vector_floats = 16;
#elif defined(__AVX__)
constexpr size_t vector_floats = 8;
#else
constexpr size_t vector_floats = 4;
#endif
constexpr size_t panel_rows = 6;
constexpr size_t panel_columns = 2 * vector_floats;
constexpr size_t tile_floats = panel_rows * panel_columns;
constexpr size_t k_block = 256;     // a panel of B, this deep, is half of a 32 KiB L1 (AVX2)
constexpr size_t pack_panels = 4;   // of B, packed together: 256 contiguous bytes of a row (AVX2)

struct Range {
    size_t begin, end;
    size_t size() const { return end - begin; }
};

// Piece i of [0,n) cut into `pieces` of nearly equal size.
constexpr Range piece(size_t n, size_t pieces, size_t i) { return {n * i / pieces, n * (i + 1) / pieces}; }

// How a product is cut. None of it changes the bits.
struct Plan {
    size_t group_panels, group_k, group_batch;  // what is packed of B at a time: panels, rows, matrices
    size_t row_tiles, column_tiles;             // tiles of one matrix's C in a group, down and across
};
Plan make_plan(size_t m, size_t n, size_t k, size_t batch, size_t threads);

// Packs `count` lanes of the given depth: lane i at step s is source[i*lane_stride + s*step_stride] and goes
// to packed[(i/width)*panel_stride + s*width + i%width]. Missing lanes of the last panel become 0.
template <size_t width, typename Storage>
void pack(float* packed, size_t panel_stride, const Storage* source, size_t lane_stride, size_t step_stride,
          size_t count, size_t depth);

// tile = sums + a b for packed panels a and b of the given depth. tile and sums are row-major (panel_rows,
// panel_columns) and may be the same; sums may be null, meaning 0. `ahead` is a packed panel like b: it is
// brought near meanwhile.
void multiply_panels(float* tile, const float* sums, const float* a, const float* b, const float* ahead,
                     size_t depth);

}  // namespace gemm_detail

// The product C (m,n) of a (m,k) and b (k,n) for each of `batch` matrices, handed over in pieces of a row:
// epilogue(l, i, j, sums, count) gets C(i, j..j+count) of matrix l in sums(0..count), each element once.
// It is called by several threads at once, in any order.
template <typename Storage, typename Epilogue>
void gemm(const Matrix<Storage>& a, const Matrix<Storage>& b, size_t m, size_t n, size_t k, size_t batch,
          const Epilogue& epilogue, Stream* stream) {
    using namespace gemm_detail;
    const size_t threads = static_cast<size_t>(stream->threads);
    const Plan plan = make_plan(m, n, k, batch, threads);
    const size_t row_panels = ceil_div(m, panel_rows), column_panels = ceil_div(n, panel_columns);

    // Scratch: a group of B; a block of A for each thread; and the sums of tiles. A thread needs those of
    // the tile it is at; where k is cut into groups, all of them are carried from one group to the next.
    const bool carry = plan.group_k < k;
    const size_t tile_rows = ceil_div(row_panels, plan.row_tiles) + 1;
    const size_t tile_columns = ceil_div(plan.group_panels, plan.column_tiles) + 1;
    const size_t packed_b_floats = plan.group_batch * plan.group_panels * plan.group_k * panel_columns;
    const size_t packed_a_floats = tile_rows * k_block * panel_rows;
    const size_t sums_floats = tile_rows * tile_columns * tile_floats;
    const size_t sums_count = carry ? plan.row_tiles * plan.column_tiles : threads;
    float* const packed_b = static_cast<float*>(shared_scratch(
        stream, (packed_b_floats + threads * packed_a_floats + sums_count * sums_floats) * sizeof(float)));
    float* const packed_a_of_threads = packed_b + packed_b_floats;
    float* const sums_of_tiles = packed_a_of_threads + threads * packed_a_floats;

    struct Group {
        Range panels, matrices, depth;
    };
    const auto packed_panel = [&](const Group& group, size_t l, size_t panel, size_t step) {
        const size_t index = (l - group.matrices.begin) * group.panels.size() + panel - group.panels.begin;
        return packed_b + (index * group.depth.size() + step - group.depth.begin) * panel_columns;
    };
    const auto multiply_tile = [&](const Group& group, size_t l, Range rows, Range columns, float* sums) {
        float* const packed_a = packed_a_of_threads + static_cast<size_t>(omp_get_thread_num()) * packed_a_floats;
        const size_t i = rows.begin * panel_rows;
        for (size_t step = group.depth.begin; step < group.depth.end; step += k_block) {
            const size_t depth = std::min(k_block, group.depth.end - step);
            pack<panel_rows>(packed_a, depth * panel_rows, a.at(l, i, step), a.row_stride, a.column_stride,
                             std::min(rows.size() * panel_rows, m - i), depth);
            float* sum = sums;
            for (size_t column = columns.begin; column < columns.end; column++) {
                const float* const b_panel = packed_panel(group, l, column, step);
                const bool last = column + 1 == columns.end;
                const float* const next_panel = last ? b_panel : packed_panel(group, l, column + 1, step);
                for (size_t row = rows.begin; row < rows.end; row++, sum += tile_floats) {
                    const float* const a_panel = packed_a + (row - rows.begin) * depth * panel_rows;
                    const float* const ahead = row == rows.begin ? next_panel : b_panel;
                    const float* const before = step == 0 ? nullptr : sum;
                    if (step + depth < k) {
                        multiply_panels(sum, before, a_panel, b_panel, ahead, depth);
                        continue;
                    }
                    alignas(64) float tile[tile_floats];
                    multiply_panels(tile, before, a_panel, b_panel, ahead, depth);
                    const size_t j = column * panel_columns;
                    for (size_t r = 0; r < std::min(panel_rows, m - row * panel_rows); r++) {
                        const float* const piece_of_row = tile + r * panel_columns;
                        if (j + panel_columns <= n) {  // a constant count makes vector code without a tail
                            epilogue(l, row * panel_rows + r, j, piece_of_row, panel_columns);
                        } else {
                            epilogue(l, row * panel_rows + r, j, piece_of_row, n - j);
                        }
                    }
                }
            }
        }
    };

#pragma omp parallel num_threads(stream->threads)
    for (size_t panel = 0; panel < column_panels; panel += plan.group_panels) {
        for (size_t matrix = 0; matrix < batch; matrix += plan.group_batch) {
            for (size_t step = 0; step < k; step += plan.group_k) {
                const Group group = {{panel, std::min(column_panels, panel + plan.group_panels)},
                                     {matrix, std::min(batch, matrix + plan.group_batch)},
                                     {step, std::min(k, step + plan.group_k)}};
                // The packed group before this one is still being read.
                if (panel + matrix + step > 0) {
#pragma omp barrier
                }
#pragma omp for collapse(3) schedule(static)
                for (size_t l = group.matrices.begin; l < group.matrices.end; l++) {
                    for (size_t p = group.panels.begin; p < group.panels.end; p += pack_panels) {
                        for (size_t s = group.depth.begin; s < group.depth.end; s += k_block) {
                            const size_t j = p * panel_columns;
                            const size_t end = std::min(n, std::min(p + pack_panels, group.panels.end) * panel_columns);
                            pack<panel_columns>(packed_panel(group, l, p, s), group.depth.size() * panel_columns,
                                                b.at(l, s, j), b.column_stride, b.row_stride, end - j,
                                                std::min(k_block, group.depth.end - s));
                        }
                    }
                }
#pragma omp for collapse(3) schedule(dynamic) nowait
                for (size_t l = group.matrices.begin; l < group.matrices.end; l++) {
                    for (size_t down = 0; down < plan.row_tiles; down++) {
                        for (size_t across = 0; across < plan.column_tiles; across++) {
                            const size_t owner = carry ? down * plan.column_tiles + across
                                                       : static_cast<size_t>(omp_get_thread_num());
                            const Range columns = piece(group.panels.size(), plan.column_tiles, across);
                            multiply_tile(group, l, piece(row_panels, plan.row_tiles, down),
                                          {panel + columns.begin, panel + columns.end},
                                          sums_of_tiles + owner * sums_floats);
                        }
                    }
                }
            }
        }
    }
}
