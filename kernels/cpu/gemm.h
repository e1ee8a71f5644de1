// Matrix products on the CPU: C = A B for every transposition, with whatever an op does to C fused in.
//
// The scheme is Goto's (Goto, van de Geijn 2008, "Anatomy of high-performance matrix multiplication"). All
// threads together pack a part of B that fits L3 into panels of `panel_columns` columns. C is cut into tiles;
// a thread takes a tile, packs its rows of A into panels of `panel_rows` rows, `k_block` deep, which fit L2,
// and runs the micro-kernel over every pair of panels, while the panel of B stays in L1. Packing walks A and
// B by strides, which gives all transpositions, and converts to fp32, so one micro-kernel serves every
// storage type.
//
// Bits: an element of C is the sum, in order, of its blocks of k, and a block is one chain of multiply-adds
// in the order of k. Panels at an edge are padded with zeros and run the same code. So the result depends on
// neither the number of threads nor the tiling, the batch or the other rows and columns of the matrix.
//
// Of a product that is known to be symmetric, Part::lower alone can be computed: pairs of panels that lie
// wholly above the diagonal are left out, which leaves 1/2 of the work and a few percent.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstddef>

#include "kernels/cpu/stream.h"
#include "kernels/cpu/vectors.h"
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

// Which elements of C are computed; lower: those on and below the diagonal, and some that share a panel with
// them.
enum class Part { whole, lower };

namespace gemm_detail {

constexpr size_t panel_rows = tile_rows;
constexpr size_t panel_columns = 2 * vector_floats;
constexpr size_t tile_floats = panel_rows * panel_columns;
constexpr size_t k_block = 256;  // a panel of B, this deep, is half of a 32 KiB L1 (AVX2)

struct Range {
    size_t begin, end;
    size_t size() const { return end - begin; }
};

// How a product is cut. None of it changes the bits.
struct Plan {
    size_t m, n, k;
    size_t row_panels, column_panels;
    size_t group_panels, group_k, group_batch;  // how much of B is packed at a time
    size_t row_tiles, column_tiles;             // tiles of one matrix's C in a group, down and across
    Part part;
    // Floats of scratch: a group of B; a block of A for each thread; and the sums of tiles. A thread needs
    // those of the tile it is at; where k is cut into groups, all of them are carried from one to the next.
    bool carry;
    size_t packed_b, packed_a, sums;  // all of B; A and the sums of one tile

    size_t floats(size_t threads) const {
        return packed_b + threads * packed_a + (carry ? row_tiles * column_tiles : threads) * sums;
    }

    // The first row panel that has elements of the part in a column panel, and the end of the column panels
    // that a row panel has elements in.
    size_t first_row_panel(size_t column_panel) const {
        return part == Part::whole ? 0 : column_panel * panel_columns / panel_rows;
    }
    size_t column_panels_end(size_t row_panel) const {
        return part == Part::whole ? column_panels : ceil_div((row_panel + 1) * panel_rows, panel_columns);
    }
};
// The plan that packs most at a time within `room` floats of scratch, or the smallest where none does.
Plan make_plan(size_t m, size_t n, size_t k, size_t batch, size_t threads, Part part, size_t room);

// The part of B that is packed: panels of columns, matrices of the batch, a range of k.
struct Group {
    Range panels, matrices, depth;

    // Where in the packed part the panel of matrix l lies, from step s of k on.
    size_t offset(size_t l, size_t panel, size_t s) const {
        const size_t index = (l - matrices.begin) * panels.size() + (panel - panels.begin);
        return (index * depth.size() + (s - depth.begin)) * panel_columns;
    }
};

// Packs the group; every thread of the team calls it, and it is done when it returns.
template <typename Storage>
void pack_group(float* packed_b, const Matrix<Storage>& b, const Group& group, const Plan& plan);

// Packs row panels of matrix l, depth.size() deep, one after the other.
template <typename Storage>
void pack_rows(float* packed_a, const Matrix<Storage>& a, size_t l, Range panels, Range depth,
               const Plan& plan);

// tile = sums + a b for packed panels a and b of the given depth. tile and sums are row-major (panel_rows,
// panel_columns) and may be the same; sums may be null, meaning 0. `ahead` is a packed panel like b; it is
// brought into L2 meanwhile.
void multiply_panels(float* tile, const float* sums, const float* a, const float* b, const float* ahead,
                     size_t depth);

// Gives the finished sums of a pair of panels to the epilogue, row by row.
template <typename Epilogue>
void hand_over(const float* tile, size_t l, size_t row_panel, size_t column_panel, const Plan& plan,
               const Epilogue& epilogue) {
    const size_t i = row_panel * panel_rows, j = column_panel * panel_columns;
    for (size_t r = 0; r < std::min(panel_rows, plan.m - i); r++, tile += panel_columns) {
        // Spelled out for a full row: where the count is a constant, the epilogue is vector code with no
        // tail.
        if (j + panel_columns <= plan.n) {
            epilogue(l, i + r, j, tile, panel_columns);
        } else {
            epilogue(l, i + r, j, tile, plan.n - j);
        }
    }
}

// Multiplies a tile, panels `rows` by `columns`, over the group's part of k. `sums` holds the tile's partial
// sums between calls.
template <typename Storage, typename Epilogue>
void multiply_tile(float* sums, float* packed_a, const Matrix<Storage>& a, const float* packed_b, size_t l,
                   Range rows, Range columns, const Group& group, const Plan& plan,
                   const Epilogue& epilogue) {
    columns.end = std::min(columns.end, plan.column_panels_end(rows.end - 1));
    if (columns.begin >= columns.end) return;
    for (size_t s = group.depth.begin; s < group.depth.end; s += k_block) {
        const size_t depth = std::min(k_block, group.depth.end - s);
        pack_rows(packed_a, a, l, rows, {s, s + depth}, plan);
        for (size_t column = columns.begin; column < columns.end; column++) {
            const float* const b_panel = packed_b + group.offset(l, column, s);
            const size_t next_column = std::min(column + 1, columns.end - 1);
            const size_t first_row = std::max(rows.begin, plan.first_row_panel(column));
            float* sum =
                sums + ((column - columns.begin) * rows.size() + first_row - rows.begin) * tile_floats;
            for (size_t row = first_row; row < rows.end; row++, sum += tile_floats) {
                const float* const a_panel = packed_a + (row - rows.begin) * depth * panel_rows;
                const float* const ahead =
                    row == first_row ? packed_b + group.offset(l, next_column, s) : b_panel;
                const float* const before = s == 0 ? nullptr : sum;
                if (s + depth < plan.k) {
                    multiply_panels(sum, before, a_panel, b_panel, ahead, depth);
                } else {
                    alignas(64) float tile[tile_floats];
                    multiply_panels(tile, before, a_panel, b_panel, ahead, depth);
                    hand_over(tile, l, row, column, plan, epilogue);
                }
            }
        }
    }
}

}  // namespace gemm_detail

// The product C (m,n) of a (m,k) and b (k,n) for each of `batch` matrices, handed over in pieces of a row:
// epilogue(l, i, j, sums, count) gets C(i, j..j+count) of matrix l in sums(0..count), each element once.
// It is called by several threads at once, in any order. Of Part::lower, pieces above the diagonal may come
// or not. `room`: floats of scratch to do with where possible.
template <typename Storage, typename Epilogue>
void gemm(const Matrix<Storage>& a, const Matrix<Storage>& b, size_t m, size_t n, size_t k, size_t batch,
          const Epilogue& epilogue, Stream* stream, Part part = Part::whole, size_t room = SIZE_MAX) {
    using namespace gemm_detail;
    const size_t threads = static_cast<size_t>(stream->threads);
    const Plan plan = make_plan(m, n, k, batch, threads, part, room);
    float* const packed_b = static_cast<float*>(shared_scratch(stream, plan.floats(threads) * sizeof(float)));
    float* const packed_a = packed_b + plan.packed_b;
    float* const sums = packed_a + threads * plan.packed_a;

    // Piece i of [0,count) in pieces of nearly equal size.
    const auto piece = [](size_t count, size_t pieces, size_t i) {
        return Range{count * i / pieces, count * (i + 1) / pieces};
    };
    const auto multiply_group = [&](const Group& group) {
#pragma omp for collapse(3) schedule(dynamic) nowait
        for (size_t l = group.matrices.begin; l < group.matrices.end; l++) {
            for (size_t down = 0; down < plan.row_tiles; down++) {
                for (size_t across = 0; across < plan.column_tiles; across++) {
                    const size_t thread = static_cast<size_t>(omp_get_thread_num());
                    const size_t place = plan.carry ? down * plan.column_tiles + across : thread;
                    // From the bottom up: of the lower part, the longest rows first.
                    const Range rows = piece(plan.row_panels, plan.row_tiles, plan.row_tiles - 1 - down);
                    const Range columns = piece(group.panels.size(), plan.column_tiles, across);
                    multiply_tile(sums + place * plan.sums, packed_a + thread * plan.packed_a, a, packed_b, l,
                                  rows,
                                  {group.panels.begin + columns.begin, group.panels.begin + columns.end},
                                  group, plan, epilogue);
                }
            }
        }
    };
#pragma omp parallel num_threads(stream->threads)
    for (size_t panel = 0; panel < plan.column_panels; panel += plan.group_panels) {
        for (size_t l = 0; l < batch; l += plan.group_batch) {
            for (size_t s = 0; s < k; s += plan.group_k) {
                const Group group = {{panel, std::min(plan.column_panels, panel + plan.group_panels)},
                                     {l, std::min(batch, l + plan.group_batch)},
                                     {s, std::min(k, s + plan.group_k)}};
                if (panel + l + s > 0) {  // some thread may still be reading the group before this one
#pragma omp barrier
                }
                pack_group(packed_b, b, group, plan);
                multiply_group(group);
            }
        }
    }
}
