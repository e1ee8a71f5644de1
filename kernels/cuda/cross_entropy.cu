// Softmax cross-entropy: loss = log(sum_v exp(x_v)) - x_target, its gradient (p_v - [v = target]) * dloss.
//
// Bytes for each logit: 4 read from memory, 4 again from the L2 cache (a row of GPT-2 is 200 kB), and
// sizeof(Storage) written; two exponentials: memory-bound. A block takes a row. One pass finds the maximum
// and the sum together (Milakov, Gimelshein 2018, arXiv:1805.02867): a thread that meets a larger logit
// rescales what it has. The second pass writes the gradient, over the logits if asked.
//
// The threads' sums are added in fp64, and one thread finishes the loss in it: where p is almost 1, log(sum)
// and the target's gradient e^-loss - 1 keep their digits.
#include <cfloat>

#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/shared.cuh"
#include "kernels/kernels.h"

namespace {

constexpr unsigned row_threads = 1024;  // at most

// Logits v, v+1, ... of a row; those from V on do not exist, and e to the power of -infinity is 0.
template <bool vectors, unsigned size>
__device__ __forceinline__ Pack<float, size> load_logits(const float* x, size_t v, size_t V) {
    if (vectors && v + size <= V) return load_pack<true, size>(x + v);
    return load_pack<false, size>(x + v, v < V ? V - v : 0, -INFINITY);
}

template <typename Storage, bool vectors>
__global__ void __launch_bounds__(row_threads)
    cross_entropy_kernel(float* __restrict__ losses, Storage* dlogits, const float* logits,
                         const int* __restrict__ targets, float dloss, size_t V, size_t Vp) {
    constexpr unsigned size = 4;
    const size_t row = blockIdx.x, target = static_cast<size_t>(targets[row]);
    const size_t first = size_t{threadIdx.x} * size, step = size_t{blockDim.x} * size;
    const float* x = logits + row * Vp;
    double* partial = shared<double>(max_warps);
    float* target_gradient = shared<float>(1, partial + max_warps);

    float maximum = -FLT_MAX, total = 0.0f;  // not -infinity, whose difference to itself is NaN
    for (size_t v = first; v < V; v += step) {
        const Pack<float, size> pack = load_logits<vectors, size>(x, v, V);
        float larger = maximum;
        for (unsigned i = 0; i < size; i++) larger = fmaxf(larger, pack.element[i]);
        if (larger > maximum) {
            total *= expf(maximum - larger);
            maximum = larger;
        }
        for (unsigned i = 0; i < size; i++) total += expf(pack.element[i] - maximum);
    }
    const float row_maximum = block_max(maximum, reinterpret_cast<float*>(partial));
    const double row_total = block_sum(static_cast<double>(total) * expf(maximum - row_maximum), partial);

    if (threadIdx.x == 0) {
        const double loss = log(row_total) - (static_cast<double>(x[target]) - row_maximum);
        losses[row] = static_cast<float>(loss);
        *target_gradient = static_cast<float>(expm1(-loss) * dloss);
    }
    if (dlogits == nullptr) return;
    __syncthreads();

    Storage* dx = dlogits + row * Vp;
    const float scale = static_cast<float>(dloss / row_total);
    for (size_t v = first; v < Vp; v += step) {
        Pack<float, size> pack = load_logits<vectors, size>(x, v, V);
        for (unsigned i = 0; i < size; i++) {
            const float p = v + i < V ? expf(pack.element[i] - row_maximum) * scale : 0.0f;
            pack.element[i] = v + i == target ? *target_gradient : p;
        }
        store_pack<vectors>(dx + v, pack, Vp - v);
    }
}

}  // namespace

template <typename Storage>
void cross_entropy(float* losses, Storage* dlogits, const float* logits, const int* targets, float dloss,
                   size_t N, size_t V, size_t Vp, Stream* stream) {
    check_sizes("cross_entropy", {N, V});
    if (V > Vp) fail("cross_entropy: V %zu is above Vp %zu", V, Vp);
    const bool vectors = Vp % 4 == 0 && aligned_to_16(logits, dlogits);
    launch(vectors ? cross_entropy_kernel<Storage, true> : cross_entropy_kernel<Storage, false>, grid_size(N),
           block_size(ceil_div(V, 4), row_threads), shared_bytes<double>(max_warps) + shared_bytes<float>(1),
           stream, losses, dlogits, logits, targets, dloss, V, Vp);
}

#define INSTANTIATE(Storage)                                                                               \
    template void cross_entropy(float*, Storage*, const float*, const int*, float, size_t, size_t, size_t, \
                                Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
