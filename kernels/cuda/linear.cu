// Linear layers and the head's logits: three matrix products by cuBLASLt (matmul.cuh), and what surrounds
// them: bias and tanh-GELU, GELU's derivative, the bias's gradient.
//
// By default the products are plain ones and the rest are kernels of ours. The output is filled with the bias
// and the product added to it (beta = 1), so that bias and product are added in fp32 and rounded once; GELU
// and its derivative take a pass of their own. That is 4 bytes moved for each 16-bit output, and 4 more with
// GELU, against 2*C FLOPs of the product. In return it works at every size and alignment, and GELU is the
// same function in both directions. With stream->fused_epilogues, cuBLASLt does these on the product's way to
// memory, at the sizes it can; which is faster depends on shape and GPU, as its kernels with epilogues are
// not always its fast ones. Its GELU is not ours to the bit, so then gelu_forward does not repeat it exactly.
//
// The bias's gradient is always ours: cuBLASLt would overwrite instead of add, in the type of its output.
// An element's sum goes over rows in an order that depends on the sizes alone.
#include <algorithm>

#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/shared.cuh"
#include "kernels/kernels.h"

namespace {

// ---------------------------------------------------------------------------------------------------
// GELU: x/2 (1 + tanh(u)) = x / (1 + e^y) with u = sqrt(2/pi) (x + 0.044715 x^3), y = -2u; this form loses
// nothing for negative x. y = x (gelu_y1 + gelu_y3 x^2):

constexpr float gelu_y1 = -1.5957691216057308f;
constexpr float gelu_y3 = -0.07135481627260025f;

// From |x| = 10 on GELU is 0 or x to 1e-36, and e^y overflows soon after. NaN stays.
__device__ __forceinline__ float bound(float x) { return x < -10.0f ? -10.0f : x > 10.0f ? 10.0f : x; }

__device__ __forceinline__ float gelu_exp(float bounded) {
    return expf(bounded * fmaf(gelu_y3, bounded * bounded, gelu_y1));
}

__device__ __forceinline__ float gelu(float x) {
    const float numerator = x < -10.0f ? -10.0f : x;
    return numerator / __fadd_rn(1.0f, gelu_exp(bound(x)));
}

// s (1 - x (1-s) y') with s = 1/(1 + e^y), 1-s = e^y s.
__device__ __forceinline__ float gelu_derivative(float x_) {
    const float x = bound(x_);
    const float e = gelu_exp(x);
    const float s = 1.0f / (1.0f + e);
    const float dy = fmaf(3.0f * gelu_y3, x * x, gelu_y1);
    return s * fmaf(-(x * dy), e * s, 1.0f);
}

// ---------------------------------------------------------------------------------------------------
// out(i,:) = bias. out (N,OC).
//
// A thread keeps a pack of the bias in registers and walks down a few rows.

constexpr unsigned fill_threads = 128, rows_a_thread = 8;

template <typename Storage, bool vectors>
__global__ void __launch_bounds__(fill_threads)
    fill_rows_kernel(Storage* __restrict__ out, const Storage* __restrict__ bias, size_t N, size_t OC,
                     unsigned column_blocks) {
    constexpr unsigned size = pack_size<Storage>;
    const size_t column = (size_t{blockIdx.x % column_blocks} * fill_threads + threadIdx.x) * size;
    if (column >= OC) return;
    const Pack<float, size> values = load_pack<vectors, size>(bias + column, OC - column);
    const size_t first = size_t{blockIdx.x / column_blocks} * rows_a_thread;
    for (size_t row = first; row < first + rows_a_thread && row < N; row++)
        store_pack<vectors>(out + row * OC + column, values, OC - column);
}

template <typename Storage>
void fill_rows(Storage* out, const Storage* bias, size_t N, size_t OC, Stream* stream) {
    constexpr unsigned size = pack_size<Storage>;
    const bool vectors = OC % size == 0 && aligned_to_16(out, bias);
    const size_t column_blocks = ceil_div(OC, fill_threads * size);
    launch(vectors ? fill_rows_kernel<Storage, true> : fill_rows_kernel<Storage, false>,
           grid_size(column_blocks * ceil_div(N, rows_a_thread)), fill_threads, 0, stream, out, bias, N, OC,
           grid_size(column_blocks));
}

// ---------------------------------------------------------------------------------------------------
// out = gelu(x). All (n).

template <typename Storage>
__global__ void __launch_bounds__(elementwise_threads)
    gelu_forward_kernel(Storage* __restrict__ out, const Storage* __restrict__ x, size_t n, bool vectors) {
    for_my_entries(n, vectors, [&](size_t i, auto entries) {
        constexpr unsigned size = decltype(entries)::value;
        Pack<float, size> values = load_pack<true, size>(x + i);
        for (unsigned j = 0; j < size; j++) values.element[j] = gelu(values.element[j]);
        store_pack<true>(out + i, values);
    });
}

// ---------------------------------------------------------------------------------------------------
// dx *= gelu'(pre_gelu). All (n).

template <typename Storage>
__global__ void __launch_bounds__(elementwise_threads)
    gelu_backward_kernel(Storage* __restrict__ dx, const Storage* __restrict__ pre_gelu, size_t n,
                         bool vectors) {
    for_my_entries(n, vectors, [&](size_t i, auto entries) {
        constexpr unsigned size = decltype(entries)::value;
        Pack<float, size> gradient = load_pack<true, size>(dx + i);
        const Pack<float, size> x = load_pack<true, size>(pre_gelu + i);
        for (unsigned j = 0; j < size; j++) gradient.element[j] *= gelu_derivative(x.element[j]);
        store_pack<true>(dx + i, gradient);
    });
}

template <typename Storage>
void multiply_by_gelu_derivative(Storage* dx, const Storage* pre_gelu, size_t n, Stream* stream) {
    launch(gelu_backward_kernel<Storage>, grid_size(elementwise_blocks(n)), elementwise_threads, 0, stream,
           dx, pre_gelu, n, aligned_to_16(dx, pre_gelu));
}

// ---------------------------------------------------------------------------------------------------
// Column sums of x (rows,columns), in fp32: out(chunk,:) = sum of the chunk's rows, or += where there is one
// chunk.
//
// A block takes 32 packs of columns; its 8 warps take every 8th row, and their sums are added in order. Run
// twice it sums a whole matrix: first by chunks, so that many blocks have work, then the chunks.

constexpr unsigned sum_lanes = 32, sum_warps = 8;

template <typename Element, bool vectors, bool accumulate>
__global__ void __launch_bounds__(sum_lanes* sum_warps)
    column_sums_kernel(float* __restrict__ out, const Element* __restrict__ x, size_t rows, size_t columns,
                       size_t chunk_rows) {
    constexpr unsigned size = pack_size<Element>;
    static_assert(size <= sum_warps);
    const unsigned lane = threadIdx.x % sum_lanes, warp = threadIdx.x / sum_lanes;
    float* const sums = shared<float>(sum_warps * size * sum_lanes);  // (warp, entry of the pack, lane)
    const size_t column = (size_t{blockIdx.x} * sum_lanes + lane) * size;
    const size_t begin = blockIdx.y * chunk_rows, end = min(begin + chunk_rows, rows);

    Pack<float, size> sum = {};
    if (column < columns) {
#pragma unroll 4
        for (size_t row = begin + warp; row < end; row += sum_warps) {  // loads of several rows at once
            const auto pack = load_pack<vectors, size>(x + row * columns + column, columns - column);
            for (unsigned i = 0; i < size; i++) sum.element[i] += pack.element[i];
        }
    }
    for (unsigned i = 0; i < size; i++) sums[(warp * size + i) * sum_lanes + lane] = sum.element[i];
    __syncthreads();

    // Warp i finishes entry i of every pack.
    if (warp >= size || column + warp >= columns) return;
    float total = 0.0f;
    for (unsigned w = 0; w < sum_warps; w++) total += sums[(w * size + warp) * sum_lanes + lane];
    float* const to = out + blockIdx.y * columns + column + warp;
    *to = accumulate ? *to + total : total;
}

template <bool accumulate, typename Element>
void column_sums(float* out, const Element* x, size_t rows, size_t columns, size_t chunk_rows,
                 Stream* stream) {
    constexpr unsigned size = pack_size<Element>;
    const bool vectors = columns % size == 0 && aligned_to_16(x);
    const dim3 grid(grid_size(ceil_div(columns, sum_lanes * size)), grid_size(ceil_div(rows, chunk_rows)));
    launch(vectors ? column_sums_kernel<Element, true, accumulate>
                   : column_sums_kernel<Element, false, accumulate>,
           grid, sum_lanes * sum_warps, shared_bytes<float>(sum_warps * size * sum_lanes), stream, out, x,
           rows, columns, chunk_rows);
}

// out(j) += sum over i of x(i,j).
template <typename Storage>
void add_column_sums(float* out, const Storage* x, size_t rows, size_t columns, Stream* stream) {
    constexpr size_t least_rows = 256, most_chunks = 128;  // at 768 columns or more this fills any GPU
    const size_t chunk_rows = std::max(least_rows, ceil_div(rows, most_chunks));
    const size_t chunks = ceil_div(rows, chunk_rows);
    if (chunks == 1) {
        column_sums<true>(out, x, rows, columns, rows, stream);
    } else {
        float* const partial = static_cast<float*>(device_scratch(stream, chunks * columns * sizeof(float)));
        column_sums<false>(partial, x, rows, columns, chunk_rows, stream);
        column_sums<true>(out, partial, chunks, columns, chunks, stream);
    }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------
// The ops

template <typename Storage>
void linear_forward(Storage* out, Storage* pre_gelu, const Storage* x, const Storage* weight,
                    const Storage* bias, size_t N, size_t C, size_t OC, Stream* stream) {
    check_sizes("linear_forward", {N, C, OC});
    if (out == nullptr || x == nullptr || weight == nullptr) fail("linear_forward: out, x or weight is null");

    Storage* const y = pre_gelu == nullptr ? out : pre_gelu;
    Matmul<Storage, Storage> product = {
        .d = y, .a = x, .b = weight, .transpose_b = true, .m = N, .n = OC, .k = C};
    if (stream->fused_epilogues && bias != nullptr && OC % 8 == 0 && aligned_to_16(bias, pre_gelu)) {
        product.d = out;
        product.epilogue = pre_gelu == nullptr ? Epilogue::bias : Epilogue::bias_gelu;
        product.bias = bias;
        product.aux = pre_gelu;
        matmul(product, stream);
        return;
    }
    if (bias != nullptr) {
        fill_rows(y, bias, N, OC, stream);
        product.beta = 1;
    }
    matmul(product, stream);
    if (pre_gelu != nullptr) gelu_forward(out, pre_gelu, N * OC, stream);
}

template <typename Storage>
void gelu_forward(Storage* out, const Storage* x, size_t n, Stream* stream) {
    check_sizes("gelu_forward", {n});
    launch(gelu_forward_kernel<Storage>, grid_size(elementwise_blocks(n)), elementwise_threads, 0, stream,
           out, x, n, aligned_to_16(out, x));
}

template <typename Storage>
void linear_backward(Storage* dx, float* dweight, float* dbias, const Storage* dout, const Storage* x,
                     const Storage* weight, const Storage* pre_gelu, size_t N, size_t C, size_t OC,
                     Stream* stream) {
    check_sizes("linear_backward", {N, C, OC});
    if (dweight == nullptr || dout == nullptr || x == nullptr || weight == nullptr)
        fail("linear_backward: dweight, dout, x or weight is null");

    if (dbias != nullptr) add_column_sums(dbias, dout, N, OC, stream);
    matmul<Storage, float>(
        {.d = dweight, .a = dout, .b = x, .transpose_a = true, .m = OC, .n = C, .k = N, .beta = 1}, stream);
    if (dx == nullptr) return;
    Matmul<Storage, Storage> product = {.d = dx, .a = dout, .b = weight, .m = N, .n = C, .k = OC};
    const bool fused = stream->fused_epilogues && C % 8 == 0 && aligned_to_16(pre_gelu);
    if (pre_gelu != nullptr && fused) {
        product.epilogue = Epilogue::gelu_derivative;
        product.aux = const_cast<Storage*>(pre_gelu);  // which this epilogue reads
    }
    matmul(product, stream);
    if (pre_gelu != nullptr && !fused) multiply_by_gelu_derivative(dx, pre_gelu, N * C, stream);
}

template <typename Storage>
void logits_forward(float* logits, const Storage* x, const Storage* weight, size_t N, size_t C, size_t Vp,
                    Stream* stream) {
    check_sizes("logits_forward", {N, C, Vp});
    if (logits == nullptr || x == nullptr || weight == nullptr) fail("logits_forward: a pointer is null");
    matmul<Storage, float>({.d = logits, .a = x, .b = weight, .transpose_b = true, .m = N, .n = Vp, .k = C},
                           stream);
}

#define INSTANTIATE(Storage)                                                                                 \
    template void linear_forward(Storage*, Storage*, const Storage*, const Storage*, const Storage*, size_t, \
                                 size_t, size_t, Stream*);                                                   \
    template void gelu_forward(Storage*, const Storage*, size_t, Stream*);                                   \
    template void linear_backward(Storage*, float*, float*, const Storage*, const Storage*, const Storage*,  \
                                  const Storage*, size_t, size_t, size_t, Stream*);                          \
    template void logits_forward(float*, const Storage*, const Storage*, size_t, size_t, size_t, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
