// NorMuon's normalisation of neurons (arXiv:2510.05491), the contract's muon_normalize_neurons.
//   u = a neuron's mean square;  v += (1 - beta2) (u - v);  o = o / sqrt(max(v, 1e-10)), scaled back to o's
//   norm
// A neuron is a row of a tall matrix, a column of a wide one. Three kernels: the squares of each neuron, one
// block a row, or one thread a column (neighbours read neighbours); one block that updates v and finds the
// factors; and the scaling. 3 sizeof(Update) bytes and 4 FLOPs an entry: memory-bound. Sums are fp64 and in
// an order that the sizes alone fix.
#include "kernels/cuda/checks.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/shared.cuh"
#include "kernels/kernels.h"

namespace {

constexpr unsigned neuron_threads = 256;

template <typename Update>
__global__ void __launch_bounds__(neuron_threads)
    row_squares_kernel(double* __restrict__ squares, const Update* __restrict__ o, size_t cols) {
    const Update* row = o + blockIdx.x * cols;
    double total = 0.0;
    for (size_t j = threadIdx.x; j < cols; j += blockDim.x) {
        const double x = load_float(row[j]);
        total += x * x;
    }
    total = block_sum(total, shared<double>(max_warps));
    if (threadIdx.x == 0) squares[blockIdx.x] = total;
}

template <typename Update>
__global__ void __launch_bounds__(neuron_threads)
    column_squares_kernel(double* __restrict__ squares, const Update* __restrict__ o, size_t rows,
                          size_t cols) {
    const size_t j = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (j >= cols) return;
    double total = 0.0;
    for (size_t i = 0; i < rows; i++) {
        const double x = load_float(o[i * cols + j]);
        total += x * x;
    }
    squares[j] = total;
}

// One block. squares becomes the factors of the neurons, the rescaling among them.
__global__ void __launch_bounds__(neuron_threads)
    factors_kernel(double* squares, float* v, const MuonStep* __restrict__ step, size_t neurons,
                   size_t entries, double pull) {
    if (step->skip != 0) return;
    double before = 0.0, after = 0.0;
    for (size_t j = threadIdx.x; j < neurons; j += blockDim.x) {
        const double square = squares[j], old_v = v[j];
        v[j] = static_cast<float>(old_v + pull * (square / static_cast<double>(entries) - old_v));
        const double factor = 1.0 / sqrt(fmax(static_cast<double>(v[j]), 1e-10));
        before += square;
        after += square * factor * factor;
        squares[j] = factor;
    }
    before = block_sum(before, shared<double>(max_warps));
    after = block_sum(after, shared<double>(max_warps));
    const double rescale = after > 0.0 ? sqrt(before / after) : 0.0;
    for (size_t j = threadIdx.x; j < neurons; j += blockDim.x) squares[j] *= rescale;
}

template <typename Update>
__global__ void __launch_bounds__(neuron_threads)
    scale_neurons_kernel(Update* o, const double* __restrict__ factors, const MuonStep* __restrict__ step,
                         size_t n, size_t cols, bool tall) {
    if (step->skip != 0) return;
    const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const double factor = factors[tall ? i / cols : i % cols];
    o[i] = store<Update>(static_cast<float>(load_float(o[i]) * factor));
}

}  // namespace

template <typename Update>
void muon_normalize_neurons(Update* o, float* v, const MuonStep* step, size_t rows, size_t cols, float beta2,
                            Stream* stream) {
    check_sizes("muon_normalize_neurons", {rows, cols});
    const bool tall = rows >= cols;
    const size_t neurons = tall ? rows : cols, entries = tall ? cols : rows;
    double* squares = static_cast<double*>(device_scratch(stream, neurons * sizeof(double)));
    const size_t sums = shared_bytes<double>(max_warps);
    const auto blocks = [](size_t n) { return grid_size(ceil_div(n, size_t{neuron_threads})); };
    if (tall) {
        launch(row_squares_kernel<Update>, grid_size(rows), block_size(cols, neuron_threads), sums, stream,
               squares, o, cols);
    } else {
        launch(column_squares_kernel<Update>, blocks(cols), neuron_threads, 0, stream, squares, o, rows,
               cols);
    }
    launch(factors_kernel, 1u, block_size(neurons, neuron_threads), sums, stream, squares, v, step, neurons,
           entries, 1.0 - static_cast<double>(beta2));
    launch(scale_neurons_kernel<Update>, blocks(rows * cols), neuron_threads, 0, stream, o, squares, step,
           rows * cols, cols, tall);
}

template void muon_normalize_neurons(float*, float*, const MuonStep*, size_t, size_t, float, Stream*);
template void muon_normalize_neurons(bf16_t*, float*, const MuonStep*, size_t, size_t, float, Stream*);
template void muon_normalize_neurons(fp16_t*, float*, const MuonStep*, size_t, size_t, float, Stream*);
