// Causal attention: which kernels run, and what both kinds need in the backward first, for each query and
// head,
//   delta = dout . out = the sum over keys of p dp,
// the second term of the softmax's gradient (Dao et al. 2022, appendix B.2). 2 values of Storage move for
// each of B*T*C, 2 FLOPs: memory-bound. 8 neighbouring lanes take a head of a row: 16 bytes each where a head
// has 64 channels of 16 bits.
#include "kernels/cuda/attention.cuh"

#include <climits>
#include <cmath>

#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/kernels.h"

namespace {

constexpr unsigned delta_lanes = 8, delta_threads = 256;

// softmax_rows, lse (B,NH,T); out, dout (B,T,C).
template <typename Storage, bool vectors>
__global__ void __launch_bounds__(delta_threads)
    softmax_rows_kernel(SoftmaxRow* __restrict__ softmax_rows, const float* __restrict__ lse,
                        const Storage* __restrict__ dout, const Storage* __restrict__ out,
                        AttentionShape shape) {
    constexpr unsigned size = pack_size<Storage>;
    const size_t heads = shape.B * shape.T * shape.NH;
    const size_t wanted = (size_t{blockIdx.x} * delta_threads + threadIdx.x) / delta_lanes;
    const size_t head = min(wanted, heads - 1);  // the last ones go along: every lane takes part in the sum
    float total = 0.0f;
    for (size_t c = threadIdx.x % delta_lanes * size; c < shape.HS; c += delta_lanes * size) {
        const size_t at = head * shape.HS + c;
        const Pack<float, size> x = load_pack<vectors, size>(dout + at, shape.HS - c);
        const Pack<float, size> y = load_pack<vectors, size>(out + at, shape.HS - c);
        for (unsigned i = 0; i < size; i++) total = fmaf(x.element[i], y.element[i], total);
    }
    for (unsigned distance = 1; distance < delta_lanes; distance *= 2) {
        total += __shfl_xor_sync(all_lanes, total, static_cast<int>(distance));
    }
    if (wanted >= heads || threadIdx.x % delta_lanes != 0) return;
    const size_t h = head % shape.NH, t = head / shape.NH % shape.T, b = head / shape.NH / shape.T;
    const size_t row = (b * shape.NH + h) * shape.T + t;
    softmax_rows[row] = {lse[row], total};
}

AttentionShape checked_shape(const char* op, size_t B, size_t T, size_t C, size_t NH) {
    check_sizes(op, {B, T, C, NH});
    if (C % NH != 0) fail("%s: C %zu is not a multiple of NH %zu", op, C, NH);
    return {B, T, C, NH, C / NH, 1.0f / std::sqrt(static_cast<float>(C / NH))};
}

bool flash_takes(const AttentionShape& shape, bool aligned) {
    return aligned && (shape.HS == 64 || shape.HS == 128) && shape.T <= INT_MAX;
}

}  // namespace

template <typename Storage>
void attention_forward(Storage* out, float* lse, const Storage* qkv, size_t B, size_t T, size_t C, size_t NH,
                       Stream* stream) {
    const AttentionShape shape = checked_shape("attention_forward", B, T, C, NH);
    if constexpr (sizeof(Storage) == 2) {
        if (flash_takes(shape, aligned_to_16(out, qkv)))
            return attention_flash_forward(out, lse, qkv, shape, stream);
    }
    attention_general_forward(out, lse, qkv, shape, stream);
}

template <typename Storage>
void attention_backward(Storage* dqkv, const Storage* dout, const Storage* out, const float* lse,
                        const Storage* qkv, size_t B, size_t T, size_t C, size_t NH, Stream* stream) {
    const AttentionShape shape = checked_shape("attention_backward", B, T, C, NH);
    SoftmaxRow* softmax_rows =
        static_cast<SoftmaxRow*>(device_scratch(stream, B * NH * T * sizeof(SoftmaxRow)));
    const bool vectors = shape.HS % pack_size<Storage> == 0 && aligned_to_16(dout, out);
    launch(vectors ? softmax_rows_kernel<Storage, true> : softmax_rows_kernel<Storage, false>,
           grid_size(ceil_div(B * NH * T, delta_threads / delta_lanes)), delta_threads, 0, stream,
           softmax_rows, lse, dout, out, shape);
    if constexpr (sizeof(Storage) == 2) {
        if (flash_takes(shape, aligned_to_16(dqkv, dout, qkv)))
            return attention_flash_backward(dqkv, dout, softmax_rows, qkv, shape, stream);
    }
    attention_general_backward(dqkv, dout, softmax_rows, qkv, shape, stream);
}

#define INSTANTIATE(Storage)                                                                                 \
    template void attention_forward(Storage*, float*, const Storage*, size_t, size_t, size_t, size_t,        \
                                    Stream*);                                                                \
    template void attention_backward(Storage*, const Storage*, const Storage*, const float*, const Storage*, \
                                     size_t, size_t, size_t, size_t, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
