// The parts of the matrix product that do not depend on what an op does with it; see gemm.h.
#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/convert.h"

namespace gemm_detail {

namespace {

// Sizes by measurement on AVX2 with 32 KiB of L1, 512 KiB of L2 and 32 MiB of L3; they matter by a few
// percent.
// Rows of A, k_block deep: 96 KiB, or 256 KiB where AVX-512 comes with an L2 of at least 1 MiB.
constexpr size_t max_tile_panels = vector_floats == 16 ? 32 : 16;
constexpr size_t max_group_columns = 3072;
constexpr size_t max_group_floats = size_t{1} << 20,
                 min_group_floats = 1 << 12;  // of packed B: 4 MiB, 16 KiB
constexpr size_t pack_panels = 4;             // of B, packed together: reads 256 bytes of each row (AVX2)

constexpr size_t max_pack_lanes = std::max(max_tile_panels * panel_rows, pack_panels* panel_columns);
constexpr size_t buffer_stride = k_block + 16;  // rows a power of two apart would share few sets of L1

// Packs a full panel whose lanes are runs of memory, `lane_stride` apart: in blocks that are transposed in
// registers, and the last few steps number by number.
template <size_t width>
inline void pack_lanes(float* __restrict__ to, const float* __restrict__ from, size_t lane_stride,
                       size_t depth) {
    constexpr size_t rest = width % 8, full = width - rest;
    size_t s = 0;
    for (; s + 8 <= depth; s += 8) {
        for (size_t i = 0; i < full; i += 8)
            transpose_block<8>(to + s * width + i, width, from + i * lane_stride + s, lane_stride);
        if constexpr (rest != 0)
            transpose_block<rest>(to + s * width + full, width, from + full * lane_stride + s, lane_stride);
    }
    for (; s < depth; s++) {
        for (size_t i = 0; i < width; i++) to[s * width + i] = from[i * lane_stride + s];
    }
}

// One step of a panel whose lanes are neighbours in memory; lanes that are not there become 0.
template <size_t width>
inline void copy_lanes(float* __restrict__ to, const float* __restrict__ from, size_t lanes) {
    if (lanes < width) {
        std::fill(std::copy_n(from, lanes, to), to + width, 0.0f);
    } else {  // in registers: as one copy, gcc calls memmove
        constexpr size_t rest = width % 8;
#pragma GCC unroll 4
        for (size_t i = 0; i + 8 <= width; i += 8) {
            Eight lane;
            memcpy(&lane, from + i, sizeof(lane));
            memcpy(to + i, &lane, sizeof(lane));
        }
        for (size_t i = width - rest; i < width; i++) to[i] = from[i];
    }
}

// Packs a panel: lane i at step s is from[i*lane_stride + s*step_stride] and goes to to[s*width + i]; lanes
// that are not there become 0. Without __restrict__ the compiler must move one number at a time.
template <size_t width, typename Storage>
inline void pack_panel(float* __restrict__ to, const Storage* __restrict__ from, size_t lane_stride,
                       size_t step_stride, size_t lanes, size_t depth) {
    if (lanes < width) {
        std::fill_n(to, depth * width, 0.0f);
        for (size_t s = 0; s < depth; s++) {
            for (size_t i = 0; i < lanes; i++)
                to[s * width + i] = to_float(from[i * lane_stride + s * step_stride]);
        }
    } else {
        for (size_t s = 0; s < depth; s++) {
            for (size_t i = 0; i < width; i++)
                to[s * width + i] = to_float(from[i * lane_stride + s * step_stride]);
        }
    }
}

// Packs `count` lanes, no more than max_pack_lanes, into panels that start panel_stride apart. 16-bit numbers
// become fp32 by whole runs of memory, before they are rearranged.
template <size_t width, typename Storage>
void pack_panels_of(float* packed, size_t panel_stride, const Storage* source, size_t lane_stride,
                    size_t step_stride, size_t count, size_t depth) {
    const size_t panels = ceil_div(count, width);
    if (lane_stride == 1) {  // memory runs across the panels: one step of all of them, then the next
        for (size_t s = 0; s < depth; s++) {
            float buffer[max_pack_lanes];
            const float* const lanes = as_floats(buffer, source + s * step_stride, count);
            for (size_t p = 0; p < panels; p++)
                copy_lanes<width>(packed + p * panel_stride + s * width, lanes + p * width,
                                  count - p * width);
        }
    } else {
        for (size_t p = 0; p < panels; p++) {
            // step_stride is 1: of a matrix's two strides one is
            const Storage* const first = source + p * width * lane_stride;
            float* const panel = packed + p * panel_stride;
            const size_t lanes = std::min(width, count - p * width);
            const auto pack = [&](const float* from, size_t stride) {
                if (lanes == width) {
                    pack_lanes<width>(panel, from, stride, depth);
                } else {
                    pack_panel<width>(panel, from, stride, 1, lanes, depth);
                }
            };
            if constexpr (std::is_same_v<Storage, float>) {
                pack(first, lane_stride);
            } else {
                float buffer[width * buffer_stride];
                for (size_t i = 0; i < lanes; i++)
                    to_floats(buffer + i * buffer_stride, first + i * lane_stride, depth);
                pack(buffer, buffer_stride);
            }
        }
    }
}

}  // namespace

namespace {

// A plan that packs group_floats of B at a time, or as many more as one k_block of all its columns takes.
Plan make_plan_of(size_t m, size_t n, size_t k, size_t batch, size_t threads, Part part,
                  size_t group_floats) {
    Plan plan{};
    plan.m = m, plan.n = n, plan.k = k, plan.part = part;
    plan.row_panels = ceil_div(m, panel_rows);
    plan.column_panels = ceil_div(n, panel_columns);

    // A B that is too large for one group is cut across its columns, and A is packed again for each piece;
    // or, if it is so narrow that this would cost more, across k, and the sums go to memory and back.
    const size_t columns =
        k <= 2 * n ? std::clamp(max_group_floats / k, panel_columns, max_group_columns) : max_group_columns;
    plan.group_panels = ceil_div(plan.column_panels, ceil_div(n, columns));
    const size_t group_row = plan.group_panels * panel_columns;
    plan.group_k = std::min(k, std::max(size_t{1}, group_floats / group_row / k_block) * k_block);
    plan.group_batch = plan.group_k < k ? 1 : std::clamp(group_floats / (group_row * k), size_t{1}, batch);

    // Large tiles reuse each panel of B most; a multiple of the threads lets equal cores end together.
    const size_t most_rows = ceil_div(plan.row_panels, max_tile_panels);
    plan.row_tiles = std::min(plan.row_panels, ceil_div(most_rows, threads) * threads);
    // Cutting columns packs A again for each piece, so it is done only where threads would have no tile.
    plan.column_tiles = std::min(plan.group_panels, ceil_div(threads, plan.row_tiles * plan.group_batch));

    const size_t tile_panels = ceil_div(plan.row_panels, plan.row_tiles);
    plan.carry = plan.group_k < k;
    plan.packed_b = plan.group_batch * plan.group_k * group_row;
    plan.packed_a = tile_panels * k_block * panel_rows;
    plan.sums = tile_panels * ceil_div(plan.group_panels, plan.column_tiles) * tile_floats;
    return plan;
}

}  // namespace

Plan make_plan(size_t m, size_t n, size_t k, size_t batch, size_t threads, Part part, size_t room) {
    size_t group_floats = max_group_floats;
    for (;; group_floats /= 2) {
        const Plan plan = make_plan_of(m, n, k, batch, threads, part, group_floats);
        if (plan.floats(threads) <= room || group_floats <= min_group_floats) return plan;
    }
}

template <typename Storage>
void pack_group(float* packed_b, const Matrix<Storage>& b, const Group& group, const Plan& plan) {
#pragma omp for collapse(3) schedule(static)
    for (size_t l = group.matrices.begin; l < group.matrices.end; l++) {
        for (size_t panel = group.panels.begin; panel < group.panels.end; panel += pack_panels) {
            for (size_t s = group.depth.begin; s < group.depth.end; s += k_block) {
                const size_t j = panel * panel_columns;
                const size_t j_end = std::min(panel + pack_panels, group.panels.end) * panel_columns;
                pack_panels_of<panel_columns>(packed_b + group.offset(l, panel, s),
                                              group.depth.size() * panel_columns, b.at(l, s, j),
                                              b.column_stride, b.row_stride, std::min(plan.n, j_end) - j,
                                              std::min(k_block, group.depth.end - s));
            }
        }
    }
}

template <typename Storage>
void pack_rows(float* packed_a, const Matrix<Storage>& a, size_t l, Range panels, Range depth,
               const Plan& plan) {
    const size_t i = panels.begin * panel_rows;
    pack_panels_of<panel_rows>(packed_a, depth.size() * panel_rows, a.at(l, i, depth.begin), a.row_stride,
                               a.column_stride, std::min(plan.m, panels.end * panel_rows) - i, depth.size());
}

#define INSTANTIATE(Storage)                                                             \
    template void pack_group(float*, const Matrix<Storage>&, const Group&, const Plan&); \
    template void pack_rows(float*, const Matrix<Storage>&, size_t, Range, Range, const Plan&);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
#undef INSTANTIATE

// The loops over the accumulators must be unrolled by name: otherwise gcc keeps them in memory, at a third of
// the speed. The loop over k is not unrolled: gcc then moves registers about, and loses a tenth.
void multiply_panels(float* tile, const float* sums, const float* a, const float* b, const float* ahead,
                     size_t depth) {
    Vector left[panel_rows], right[panel_rows];
#pragma GCC unroll 16
    for (size_t i = 0; i < panel_rows; i++) left[i] = right[i] = Vector{};
    for (size_t s = 0; s < depth; s++, a += panel_rows, b += panel_columns, ahead += panel_columns) {
        __builtin_prefetch(ahead, 0, 2);
        const Vector b_left = load(b), b_right = load(b + vector_floats);
#pragma GCC unroll 16
        for (size_t i = 0; i < panel_rows; i++) left[i] += a[i] * b_left, right[i] += a[i] * b_right;
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < panel_rows; i++) {
        const size_t at = i * panel_columns;
        if (sums != nullptr) left[i] += load(sums + at), right[i] += load(sums + at + vector_floats);
        store(tile + at, left[i]);
        store(tile + at + vector_floats, right[i]);
    }
}

}  // namespace gemm_detail
