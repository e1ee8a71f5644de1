// Muon's parts beside Newton-Schulz (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
//   momentum:  m += (1 - mu) (g - m), g = grad * grad_scale;  direction = nesterov ? m + (1 - mu) (g - m) : m
//   normalise: x = direction / (safety * Frobenius norm), for each matrix of a batch
//   update:    p = p (1 - lr wd) - lr scale update
// All are memory-bound: 16, 8 + sizeof(Storage) and 12 bytes an entry in fp32, a few FLOPs each; the
// momentum takes 12 where it is kept in bf16.
//
// A norm is found in three kernels: blocks sum the squares of chunks, which are counted from the matrix's own
// start, so that its bits do not depend on the batch it is in; one block a matrix adds its chunks; and then
// the entries are scaled. All of it in fp64: the squares of 1e-30 and 1e30 are in range there, and so is the
// scale, which fp32 may not hold.
#include <type_traits>

#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/rounding.cuh"
#include "kernels/cuda/shared.cuh"
#include "kernels/kernels.h"

namespace {

template <typename State>
__global__ void __launch_bounds__(elementwise_threads)
    momentum_kernel(float* direction, State* momentum, const float* __restrict__ grad, size_t n, float pull,
                    bool nesterov, float grad_scale, StateRounding rounding, bool vectors) {
    for_my_entries(n, vectors, [&](size_t i, auto width) {
        constexpr unsigned size = decltype(width)::value;
        const Pack<float, size> g = load_pack<true, size>(grad + i);
        Pack<float, size> m = load_pack<true, size>(momentum + i), d;
        for (unsigned j = 0; j < size; j++) {
            const float gradient = g.element[j] * grad_scale;
            m.element[j] = fmaf(pull, gradient - m.element[j], m.element[j]);
            d.element[j] = nesterov ? fmaf(pull, gradient - m.element[j], m.element[j]) : m.element[j];
        }
        store_state(momentum + i, m, rounding_words<State, size>(rounding, i), 0);
        store_pack<true>(direction + i, d);
    });
}

template <typename Storage, typename Update>
__global__ void __launch_bounds__(elementwise_threads)
    update_kernel(Storage* param, float* master, const Update* __restrict__ update, size_t n, float step_size,
                  float decay, bool vectors) {
    for_my_entries(n, vectors, [&](size_t i, auto width) {
        constexpr unsigned size = decltype(width)::value;
        const Pack<float, size> u = load_pack<true, size>(update + i);
        Pack<float, size> p =
            master != nullptr ? load_pack<true, size>(master + i) : load_pack<true, size>(param + i);
        for (unsigned j = 0; j < size; j++) {
            p.element[j] = fmaf(p.element[j], decay, -(step_size * u.element[j]));
        }
        if (master != nullptr) store_pack<true>(master + i, p);
        store_pack<true>(param + i, p);
    });
}

// ---------------------------------------------------------------------------------------------------
// Normalisation

constexpr unsigned chunk_size = 16384;
constexpr unsigned chunk_threads = 256;

// Block i takes chunk i % chunks of matrix i / chunks.
struct Chunk {
    size_t first, count;
};
__device__ __forceinline__ Chunk my_chunk(size_t n, unsigned chunks) {
    const size_t begin = size_t{blockIdx.x % chunks} * chunk_size;
    return {blockIdx.x / chunks * n + begin, min(size_t{chunk_size}, n - begin)};
}

__global__ void __launch_bounds__(chunk_threads)
    chunk_squares_kernel(double* __restrict__ squares, const float* __restrict__ direction, size_t n,
                         unsigned chunks) {
    const Chunk chunk = my_chunk(n, chunks);
    const double total =
        block_sum_of_squares(direction + chunk.first, chunk.count, shared<double>(max_warps));
    if (threadIdx.x == 0) squares[blockIdx.x] = total;
}

// One block a matrix.
__global__ void __launch_bounds__(chunk_threads)
    scale_kernel(double* __restrict__ scales, int* __restrict__ degenerate,
                 const double* __restrict__ squares, unsigned chunks, float safety) {
    const double* mine = squares + size_t{blockIdx.x} * chunks;
    double total = 0.0;
    for (unsigned i = threadIdx.x; i < chunks; i += blockDim.x) total += mine[i];
    total = block_sum(total, shared<double>(max_warps));
    if (threadIdx.x != 0) return;
    degenerate[blockIdx.x] = !(total > 0.0 && total < INFINITY);  // NaN too
    scales[blockIdx.x] = 1.0 / (static_cast<double>(safety) * sqrt(total));
}

// x may be direction.
template <typename Storage>
__global__ void __launch_bounds__(chunk_threads)
    normalize_kernel(Storage* x, const float* direction, const double* __restrict__ scales,
                     const int* __restrict__ degenerate, size_t n, unsigned chunks) {
    constexpr unsigned size = elementwise_pack;
    const Chunk chunk = my_chunk(n, chunks);
    const unsigned matrix = blockIdx.x / chunks;
    const bool zero = degenerate[matrix] != 0;
    const double scale = scales[matrix];
    const auto normalized = [&](float value) { return zero ? 0.0f : static_cast<float>(value * scale); };

    Storage* to = x + chunk.first;
    const float* from = direction + chunk.first;
    const bool vectors = aligned_to_16(to, from);  // a matrix of an odd number of entries moves the next one
    for (size_t i = size_t{threadIdx.x} * size; i < chunk.count; i += size_t{chunk_threads} * size) {
        if (vectors && i + size <= chunk.count) {
            Pack<float, size> pack = load_pack<true, size>(from + i);
            for (unsigned j = 0; j < size; j++) pack.element[j] = normalized(pack.element[j]);
            store_pack<true>(to + i, pack);
        } else {
            Pack<float, size> pack = load_pack<false, size>(from + i, chunk.count - i);
            for (unsigned j = 0; j < size; j++) pack.element[j] = normalized(pack.element[j]);
            store_pack<false>(to + i, pack, chunk.count - i);
        }
    }
}

}  // namespace

template <typename State>
void muon_momentum(float* direction, State* momentum, const float* grad, size_t n, float mu, bool nesterov,
                   float grad_scale, const StateRounding& rounding, Stream* stream) {
    check_sizes("muon_momentum", {n});
    const bool vectors = aligned_to_16(direction, momentum, grad) && counters_fit_packs<State>(rounding);
    launch(momentum_kernel<State>, grid_size(elementwise_blocks(n)), elementwise_threads, 0, stream,
           direction, momentum, grad, n, 1.0f - mu, nesterov, grad_scale, rounding, vectors);
}

template <typename Storage>
void muon_normalize(Storage* x, int* degenerate, const float* direction, size_t batch, size_t n, float safety,
                    Stream* stream) {
    check_sizes("muon_normalize", {batch, n});
    const unsigned chunks = grid_size(ceil_div(n, chunk_size));  // of each matrix
    const unsigned blocks = grid_size(batch * chunks);
    double* scales = static_cast<double*>(device_scratch(stream, (batch + blocks) * sizeof(double)));
    double* squares = scales + batch;
    const size_t sums = shared_bytes<double>(max_warps);
    launch(chunk_squares_kernel, blocks, chunk_threads, sums, stream, squares, direction, n, chunks);
    launch(scale_kernel, grid_size(batch), block_size(chunks, chunk_threads), sums, stream, scales,
           degenerate, squares, chunks, safety);
    launch(normalize_kernel<Storage>, blocks, chunk_threads, 0, stream, x, direction, scales, degenerate, n,
           chunks);
}

template <typename Storage, typename Update>
void muon_update(Storage* param, float* master, const Update* update, size_t n, float lr, float scale,
                 float weight_decay, Stream* stream) {
    check_sizes("muon_update", {n});
    if (master == nullptr && !std::is_same_v<Storage, float>)
        fail("muon_update: 16-bit parameters need a master");
    const float decay = static_cast<float>(1.0 - static_cast<double>(lr) * weight_decay);
    launch(update_kernel<Storage, Update>, grid_size(elementwise_blocks(n)), elementwise_threads, 0, stream,
           param, master, update, n, lr * scale, decay, aligned_to_16(param, master, update));
}

#define INSTANTIATE(Storage)                                                                         \
    template void muon_normalize(Storage*, int*, const float*, size_t, size_t, float, Stream*);      \
    template void muon_update(Storage*, float*, const float*, size_t, float, float, float, Stream*); \
    template void muon_update(Storage*, float*, const fp16_t*, size_t, float, float, float, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
template void muon_momentum(float*, float*, const float*, size_t, float, bool, float, const StateRounding&,
                            Stream*);
template void muon_momentum(float*, bf16_t*, const float*, size_t, float, bool, float, const StateRounding&,
                            Stream*);
