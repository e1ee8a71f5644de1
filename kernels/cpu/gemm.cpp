// The parts of the matrix product that do not depend on what an op does with it; see gemm.h.
#include "kernels/cpu/gemm.h"

#include <cstring>

namespace gemm_detail {

namespace {

constexpr size_t max_tile_panels = 16;                 // 96 rows of A, k_block deep: 96 KiB of L2
constexpr size_t max_group_columns = 3072;
constexpr size_t max_packed_floats = size_t{1} << 20;

// GCC's and clang's vectors: the same source for SSE, AVX2, AVX-512 and NEON.
typedef float Vector __attribute__((vector_size(vector_floats * sizeof(float))));

inline Vector load(const float* from) {
    Vector vector;
    memcpy(&vector, from, sizeof(vector));
    return vector;
}

inline void store(float* to, Vector vector) { memcpy(to, &vector, sizeof(vector)); }

// Packs one panel. Without __restrict__ the compiler must move one number at a time.
template <size_t width, typename Storage>
inline void pack_panel(float* __restrict__ to, const Storage* __restrict__ from, size_t lane_stride,
                       size_t step_stride, size_t lanes, size_t depth) {
    if (lanes >= width) {
        for (size_t s = 0; s < depth; s++) {
            for (size_t i = 0; i < width; i++) to[s * width + i] = to_float(from[i * lane_stride + s * step_stride]);
        }
    } else {
        std::fill_n(to, depth * width, 0.0f);
        for (size_t s = 0; s < depth; s++) {
            for (size_t i = 0; i < lanes; i++) to[s * width + i] = to_float(from[i * lane_stride + s * step_stride]);
        }
    }
}

}  // namespace

Plan make_plan(size_t m, size_t n, size_t k, size_t batch, size_t threads) {
    const size_t row_panels = ceil_div(m, panel_rows), column_panels = ceil_div(n, panel_columns);
    Plan plan;
    plan.group_panels = ceil_div(column_panels, ceil_div(n, max_group_columns));
    const size_t packed_row = plan.group_panels * panel_columns;
    plan.group_k = std::min(k, max_packed_floats / packed_row / k_block * k_block);
    plan.group_batch = plan.group_k < k ? 1 : std::clamp(max_packed_floats / (packed_row * k), size_t{1}, batch);

    // As large as fits, and a multiple of the threads, so that equal cores end together.
    plan.row_tiles = std::min(row_panels, ceil_div(ceil_div(row_panels, max_tile_panels), threads) * threads);
    // Cutting columns packs A again for each piece, so it is done only to keep every thread busy.
    const size_t tiles = plan.row_tiles * plan.group_batch;
    plan.column_tiles = std::min(plan.group_panels, ceil_div(threads, tiles));
    return plan;
}

template <size_t width, typename Storage>
void pack(float* packed, size_t panel_stride, const Storage* source, size_t lane_stride, size_t step_stride,
          size_t count, size_t depth) {
    const size_t panels = ceil_div(count, width);
    if (lane_stride == 1) {  // lanes lie side by side in memory: a step of all panels, then the next step
        for (size_t s = 0; s < depth; s++) {
            for (size_t p = 0; p < panels; p++)
                pack_panel<width>(packed + p * panel_stride + s * width, source + p * width + s * step_stride, 1, 0,
                                  count - p * width, 1);
        }
    } else {
        for (size_t p = 0; p < panels; p++)
            pack_panel<width>(packed + p * panel_stride, source + p * width * lane_stride, lane_stride, step_stride,
                              count - p * width, depth);
    }
}

template void pack<panel_rows>(float*, size_t, const float*, size_t, size_t, size_t, size_t);
template void pack<panel_columns>(float*, size_t, const float*, size_t, size_t, size_t, size_t);

// The accumulators are named: as an array, gcc keeps them in memory at a third of the speed. Neither is the
// loop unrolled: gcc then moves registers about, and loses a tenth.
void multiply_panels(float* tile, const float* sums, const float* a, const float* b, const float* ahead, size_t depth) {
    Vector c00{}, c01{}, c10{}, c11{}, c20{}, c21{}, c30{}, c31{}, c40{}, c41{}, c50{}, c51{};
    for (size_t s = 0; s < depth; s++, a += panel_rows, b += panel_columns, ahead += panel_columns) {
        __builtin_prefetch(ahead, 0, 2);
        const Vector b0 = load(b), b1 = load(b + vector_floats);
        c00 += a[0] * b0, c01 += a[0] * b1;
        c10 += a[1] * b0, c11 += a[1] * b1;
        c20 += a[2] * b0, c21 += a[2] * b1;
        c30 += a[3] * b0, c31 += a[3] * b1;
        c40 += a[4] * b0, c41 += a[4] * b1;
        c50 += a[5] * b0, c51 += a[5] * b1;
    }
    const auto finish = [&](size_t row, Vector left, Vector right) {
        const size_t at = row * panel_columns;
        if (sums != nullptr) left += load(sums + at), right += load(sums + at + vector_floats);
        store(tile + at, left);
        store(tile + at + vector_floats, right);
    };
    finish(0, c00, c01);
    finish(1, c10, c11);
    finish(2, c20, c21);
    finish(3, c30, c31);
    finish(4, c40, c41);
    finish(5, c50, c51);
}

}  // namespace gemm_detail
