// Sums of a whole tensor in fp64. 4 bytes are read for each entry, for one addition (and one product):
// memory-bound.
//
// sum adds neighbours level by level, (0+1), (2+3), ...; an odd one out moves up as it is. A block of 1024
// entries is a whole subtree, so one kernel is run on the entries, then on the blocks' sums, and so on.
// Places beyond the end hold -0, which changes nothing: the result is that of the CPU, bit for bit.
//
// sum_of_squares has a block for each row, so that a row's sum is the same wherever the row is; then one
// thread adds the rows in order, which is what lets the rows lie on different ranks. Each addition waits for
// the one before: a few nanoseconds a row.
#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/shared.cuh"
#include "kernels/kernels.h"

namespace {

constexpr unsigned tree_threads = 256;
constexpr unsigned tree_leaves = 4 * tree_threads;  // of a block

template <typename Number>
__global__ void __launch_bounds__(tree_threads)
    sum_subtrees_kernel(double* __restrict__ sums, const Number* __restrict__ x, size_t n) {
    const size_t first = (size_t{blockIdx.x} * tree_threads + threadIdx.x) * 4;
    const auto leaf = [&](size_t i) { return i < n ? static_cast<double>(x[i]) : -0.0; };
    const double four = (leaf(first) + leaf(first + 1)) + (leaf(first + 2) + leaf(first + 3));
    const double total = block_sum(four, shared<double>(max_warps));
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

template <typename Number>
void sum_subtrees(double* sums, const Number* x, size_t n, Stream* stream) {
    launch(sum_subtrees_kernel<Number>, grid_size(ceil_div(n, tree_leaves)), tree_threads,
           shared_bytes<double>(max_warps), stream, sums, x, n);
}

// ---------------------------------------------------------------------------------------------------

constexpr unsigned row_threads = 256;  // at most

__global__ void __launch_bounds__(row_threads)
    row_squares_kernel(double* __restrict__ row_sums, const float* __restrict__ x, size_t cols) {
    const size_t row = blockIdx.x;
    const double total = block_sum_of_squares(x + row * cols, cols, shared<double>(max_warps));
    if (threadIdx.x == 0) row_sums[row] = total;
}

constexpr unsigned tile_size = 2048;

// *out = x(0) + x(1) + ... one after the other, by one thread; the others bring the numbers near.
__global__ void __launch_bounds__(row_threads)
    sum_in_order_kernel(double* __restrict__ out, const double* __restrict__ x, size_t n) {
    double* tile = shared<double>(tile_size);
    double total = 0.0;
    for (size_t first = 0; first < n; first += tile_size) {
        const unsigned count = static_cast<unsigned>(min(size_t{tile_size}, n - first));
        for (unsigned i = threadIdx.x; i < count; i += blockDim.x) tile[i] = x[first + i];
        __syncthreads();
        if (threadIdx.x == 0) {
            for (unsigned i = 0; i < count; i++) total += tile[i];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) *out = total;
}

}  // namespace

void sum(double* out, const float* x, size_t n, Stream* stream) {
    check_sizes("sum", {n});
    const size_t subtrees = ceil_div(n, tree_leaves);
    double* sums = static_cast<double*>(
        device_scratch(stream, (subtrees + ceil_div(subtrees, tree_leaves)) * sizeof(double)));
    double* next = sums + subtrees;  // the two are used in turn
    sum_subtrees(subtrees == 1 ? out : sums, x, n, stream);
    for (size_t count = subtrees; count > 1; count = ceil_div(count, tree_leaves)) {
        sum_subtrees(count <= tree_leaves ? out : next, sums, count, stream);
        std::swap(sums, next);
    }
}

void sum_of_squares(double* out, const float* x, size_t rows, size_t cols, Stream* stream) {
    check_sizes("sum_of_squares", {rows, cols});
    double* row_sums = static_cast<double*>(device_scratch(stream, rows * sizeof(double)));
    launch(row_squares_kernel, grid_size(rows), block_size(ceil_div(cols, 4), row_threads),
           shared_bytes<double>(max_warps), stream, row_sums, x, cols);
    launch(sum_in_order_kernel, 1, row_threads, shared_bytes<double>(tile_size), stream, out, row_sums, rows);
}
