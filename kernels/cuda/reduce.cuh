// Sums over the threads of a warp and of a block, always in the same order, and with the result in every
// thread. A block is a whole number of warps.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/cuda/pack.cuh"

constexpr unsigned all_lanes = 0xffffffffu;
constexpr unsigned max_warps = 32;

// Neighbours first, then pairs of them, and so on: a binary tree over the lanes in their order. Both partners
// of a step add the same two numbers, so every lane ends with the same bits.
template <typename Number, typename Combine>
__device__ __forceinline__ Number warp_reduce(Number x, const Combine& combine) {
    for (int distance = 1; distance < warpSize; distance *= 2) {
        x = combine(x, __shfl_xor_sync(all_lanes, x, distance));
    }
    return x;
}

// The same over the warps of the block. `partial` is shared memory for max_warps numbers, which is free again
// when the function returns.
template <typename Number, typename Combine>
__device__ __forceinline__ Number block_reduce(Number x, Number identity, Number* partial,
                                               const Combine& combine) {
    const unsigned warp = threadIdx.x / warpSize, lane = threadIdx.x % warpSize;
    x = warp_reduce(x, combine);
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    x = warp_reduce(lane < blockDim.x / warpSize ? partial[lane] : identity, combine);
    __syncthreads();
    return x;
}

template <typename Number>
__device__ __forceinline__ Number warp_sum(Number x) {
    return warp_reduce(x, [](Number a, Number b) { return a + b; });
}

// -0 is what changes no sum: adding +0 would turn a sum of -0 into +0.
template <typename Number>
__device__ __forceinline__ Number block_sum(Number x, Number* partial) {
    return block_reduce(x, Number(-0.0), partial, [](Number a, Number b) { return a + b; });
}

// NaNs are passed over.
__device__ __forceinline__ float block_max(float x, float* partial) {
    return block_reduce(x, -INFINITY, partial, [](float a, float b) { return fmaxf(a, b); });
}

// The sum over the block of the squares of x(0..n). The square of an fp32 is exact in fp64 and lies between
// 1e-90 and 1e77: nothing can over- or underflow. The order depends on n and the block's size alone, not on
// how x is aligned.
__device__ __forceinline__ double block_sum_of_squares(const float* x, size_t n, double* partial) {
    constexpr unsigned size = pack_size<float>;
    const bool vectors = aligned_to_16(x);
    double total = 0.0;
    for (size_t i = size_t{threadIdx.x} * size; i < n; i += size_t{blockDim.x} * size) {
        const Pack<float, size> pack =
            vectors && i + size <= n ? load_pack<true, size>(x + i) : load_pack<false, size>(x + i, n - i);
        for (unsigned j = 0; j < size; j++) {
            const double value = pack.element[j];
            total = fma(value, value, total);
        }
    }
    return block_sum(total, partial);
}
