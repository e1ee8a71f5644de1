// Muon's parts beside Newton-Schulz (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), each
// for all blocks of one shape.
//   prologue:  m += (1 - mu) (g - m), g = grad * grad_scale;  direction = nesterov ? m + (1 - mu) (g - m) :
//   m;
//              x = direction / (safety * Frobenius norm)
//   epilogue:  p = p decay - lr scale update
// All are memory-bound, a few FLOPs an entry: 20 + sizeof(Storage) and 12 bytes in fp32; the prologue 4 fewer
// where the momentum is in bf16.
//
// The prologue is two kernels, as a norm is known only when all of its matrix has been seen. Blocks take
// chunks, which are counted from the matrix's own start, so that its bits do not depend on the batch it is
// in: the first kernel averages, and sums the squares of its chunk; in the second each adds up all chunks of
// its matrix, a hundred or so, and scales its own. All of it in fp64: the squares of 1e-30 and 1e30 are in
// range there, and so is the scale, which fp32 may not hold.
#include <type_traits>

#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/rounding.cuh"
#include "kernels/cuda/shared.cuh"
#include "kernels/kernels.h"

namespace {

constexpr unsigned chunk_size = 16384;
constexpr unsigned chunk_threads = 256;

// Thread block i takes chunk i % chunks of matrix i / chunks: `count` entries from `begin` on.
struct Chunk {
    unsigned matrix;
    size_t begin, count;
};
__device__ __forceinline__ Chunk my_chunk(size_t n, unsigned chunks) {
    const size_t begin = size_t{blockIdx.x % chunks} * chunk_size;
    return {blockIdx.x / chunks, begin, min(size_t{chunk_size}, n - begin)};
}

// Calls body(i, size) for entries i, i+1, ..., i+size-1 of the chunk, where decltype(size)::value is that of
// a pack, with `vectors`, or 1. A thread's entries are the same and in the same order either way.
template <typename Body>
__device__ __forceinline__ void for_my_entries_of(const Chunk& chunk, bool vectors, const Body& body) {
    constexpr unsigned size = elementwise_pack;
    const size_t end = chunk.begin + chunk.count;
    for (size_t i = chunk.begin + threadIdx.x * size; i < end; i += chunk_threads * size) {
        if (vectors && i + size <= end) {
            body(i, std::integral_constant<unsigned, size>());
        } else {
            for (size_t j = i; j < i + size && j < end; j++) body(j, std::integral_constant<unsigned, 1>());
        }
    }
}

template <typename State>
__global__ void __launch_bounds__(chunk_threads)
    average_kernel(double* __restrict__ squares, float* __restrict__ direction,
                   const float* __restrict__ grads, const MuonBlock* __restrict__ blocks,
                   const MuonStep* __restrict__ step, size_t n, unsigned chunks, bool nesterov,
                   uint64_t seed) {
    if (step->skip != 0) return;
    const Chunk chunk = my_chunk(n, chunks);
    const MuonBlock block = blocks[chunk.matrix];
    const StateRounding rounding = {seed, step->rounding_step, block.offset};
    const float pull = 1.0f - step->mu, grad_scale = step->grad_scale;
    State* momentum = static_cast<State*>(block.momentum);
    const float* grad = grads + block.offset;
    direction += chunk.matrix * n;
    const bool vectors = aligned_to_16(direction, momentum, grad) && counters_fit_packs<State>(rounding);
    double total = 0.0;
    for_my_entries_of(chunk, vectors, [&](size_t i, auto width) {
        constexpr unsigned size = decltype(width)::value;
        const Pack<float, size> g = load_pack<true, size>(grad + i);
        Pack<float, size> m = load_pack<true, size>(momentum + i), d;
        for (unsigned j = 0; j < size; j++) {
            const float gradient = __fmul_rn(g.element[j], grad_scale);
            m.element[j] = fmaf(pull, gradient - m.element[j], m.element[j]);
            d.element[j] = nesterov ? fmaf(pull, gradient - m.element[j], m.element[j]) : m.element[j];
            const double value = d.element[j];
            total = fma(value, value, total);
        }
        store_state(momentum + i, m, rounding_words<State, size>(rounding, i), 0);
        store_pack<true>(direction + i, d);
    });
    total = block_sum(total, shared<double>(max_warps));
    if (threadIdx.x == 0) squares[blockIdx.x] = total;
}

// x may be direction.
template <typename Storage>
__global__ void __launch_bounds__(chunk_threads)
    normalize_kernel(Storage* x, int* __restrict__ degenerate, const float* direction,
                     const double* __restrict__ squares, const MuonStep* __restrict__ step, size_t n,
                     unsigned chunks, float safety) {
    const Chunk chunk = my_chunk(n, chunks);
    double total = 0.0;
    const bool skip = step->skip != 0;  // then there are neither squares nor directions
    for (unsigned i = threadIdx.x; i < chunks && !skip; i += chunk_threads)
        total += squares[chunk.matrix * size_t{chunks} + i];
    total = block_sum(total, shared<double>(max_warps));
    const bool zero = !(total > 0.0 && total < INFINITY);  // NaN too
    if (chunk.begin == 0 && threadIdx.x == 0) degenerate[chunk.matrix] = zero && !skip;
    const double scale = 1.0 / (static_cast<double>(safety) * sqrt(total));

    x += chunk.matrix * n;
    direction += chunk.matrix * n;
    for_my_entries_of(chunk, aligned_to_16(x, direction), [&](size_t i, auto width) {
        constexpr unsigned size = decltype(width)::value;
        Pack<float, size> pack = {};
        if (!zero) pack = load_pack<true, size>(direction + i);
        for (unsigned j = 0; j < size && !zero; j++)
            pack.element[j] = static_cast<float>(pack.element[j] * scale);
        store_pack<true>(x + i, pack);
    });
}

template <typename Storage, typename Update>
__global__ void __launch_bounds__(chunk_threads)
    update_kernel(Storage* params, float* masters, const Update* __restrict__ updates,
                  const MuonBlock* __restrict__ blocks, const MuonStep* __restrict__ step, size_t n,
                  unsigned chunks, float scale) {
    if (step->skip != 0) return;
    const Chunk chunk = my_chunk(n, chunks);
    const MuonBlock block = blocks[chunk.matrix];
    const float step_size = block.lr * scale, decay = block.decay;
    const bool cautious = step->cautious != 0;
    Storage* param = params + block.offset;
    float* master = masters == nullptr ? nullptr : masters + block.master_offset;
    const Update* update = updates + chunk.matrix * n;
    for_my_entries_of(chunk, aligned_to_16(param, master, update), [&](size_t i, auto width) {
        constexpr unsigned size = decltype(width)::value;
        const Pack<float, size> u = load_pack<true, size>(update + i);
        Pack<float, size> p =
            master != nullptr ? load_pack<true, size>(master + i) : load_pack<true, size>(param + i);
        for (unsigned j = 0; j < size; j++) {
            const bool grows = cautious && u.element[j] * p.element[j] < 0.0f;
            p.element[j] = fmaf(p.element[j], grows ? 1.0f : decay, -(step_size * u.element[j]));
        }
        if (master != nullptr) store_pack<true>(master + i, p);
        store_pack<true>(param + i, p);
    });
}

}  // namespace

template <typename State, typename Storage>
void muon_prologue(Storage* x, int* degenerate, float* direction, const float* grads, const MuonBlock* blocks,
                   const MuonStep* step, size_t batch, size_t n, bool nesterov, float safety, uint64_t seed,
                   Stream* stream) {
    check_sizes("muon_prologue", {batch, n});
    const unsigned chunks = grid_size(ceil_div(n, chunk_size));  // of each matrix
    const unsigned grid = grid_size(batch * chunks);
    double* squares = static_cast<double*>(device_scratch(stream, grid * sizeof(double)));
    const size_t sums = shared_bytes<double>(max_warps);
    launch(average_kernel<State>, grid, chunk_threads, sums, stream, squares, direction, grads, blocks, step,
           n, chunks, nesterov, seed);
    launch(normalize_kernel<Storage>, grid, chunk_threads, sums, stream, x, degenerate, direction, squares,
           step, n, chunks, safety);
}

template <typename Storage, typename Update>
void muon_epilogue(Storage* params, float* master, const Update* updates, const MuonBlock* blocks,
                   const MuonStep* step, size_t batch, size_t n, float scale, Stream* stream) {
    check_sizes("muon_epilogue", {batch, n});
    if (master == nullptr && !std::is_same_v<Storage, float>)
        fail("muon_epilogue: 16-bit parameters need a master");
    const unsigned chunks = grid_size(ceil_div(n, chunk_size));
    launch(update_kernel<Storage, Update>, grid_size(batch * chunks), chunk_threads, 0, stream, params,
           master, updates, blocks, step, n, chunks, scale);
}

#define INSTANTIATE_PROLOGUE(State, Storage)                                                   \
    template void muon_prologue<State>(Storage*, int*, float*, const float*, const MuonBlock*, \
                                       const MuonStep*, size_t, size_t, bool, float, uint64_t, Stream*);
#define INSTANTIATE(Storage)                                                                                \
    INSTANTIATE_PROLOGUE(float, Storage)                                                                    \
    INSTANTIATE_PROLOGUE(bf16_t, Storage)                                                                   \
    template void muon_epilogue(Storage*, float*, const float*, const MuonBlock*, const MuonStep*, size_t,  \
                                size_t, float, Stream*);                                                    \
    template void muon_epilogue(Storage*, float*, const fp16_t*, const MuonBlock*, const MuonStep*, size_t, \
                                size_t, float, Stream*);                                                    \
    template void muon_epilogue(Storage*, float*, const bf16_t*, const MuonBlock*, const MuonStep*, size_t, \
                                size_t, float, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
