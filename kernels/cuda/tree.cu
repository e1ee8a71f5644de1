// Sums over the leaves and ranks of a step, and the rounding that a leaf takes. One addition or none for each
// number that moves: memory-bound. A thread takes 4 neighbours of all parts and keeps the tree's open nodes
// in registers.
#include "kernels/tree.h"

#include "kernels/cuda/checks.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/kernels.h"

namespace {

template <typename Storage>
__global__ void __launch_bounds__(elementwise_threads)
    cast_kernel(Storage* __restrict__ to, const float* __restrict__ from, size_t n, bool vectors) {
    for_my_entries(n, vectors, [&](size_t i, auto width) {
        constexpr unsigned size = decltype(width)::value;
        store_pack<true>(to + i, load_pack<true, size>(from + i));
    });
}

template <typename Storage>
__global__ void __launch_bounds__(elementwise_threads)
    round_through_kernel(float* __restrict__ x, size_t n, bool vectors) {
    for_my_entries(n, vectors, [&](size_t i, auto width) {
        constexpr unsigned size = decltype(width)::value;
        Pack<float, size> values = load_pack<true, size>(x + i);
        for (float& value : values.element) value = load_float(store<Storage>(value));
        store_pack<true>(x + i, values);
    });
}

// out may be a or b.
__global__ void __launch_bounds__(elementwise_threads)
    add_kernel(float* out, const float* a, const float* b, size_t n, bool vectors) {
    for_my_entries(n, vectors, [&](size_t i, auto width) {
        constexpr unsigned size = decltype(width)::value;
        Pack<float, size> sums = load_pack<true, size>(a + i);
        const Pack<float, size> others = load_pack<true, size>(b + i);
        for (unsigned j = 0; j < size; j++) sums.element[j] += others.element[j];
        store_pack<true>(out + i, sums);
    });
}

template <typename Storage>
__global__ void __launch_bounds__(elementwise_threads)
    tree_sum_kernel(float* __restrict__ out, const Storage* __restrict__ parts, unsigned count, size_t stride,
                    size_t n, bool vectors) {
    for_my_entries(n, vectors, [&](size_t i, auto width) {
        constexpr unsigned size = decltype(width)::value;
        const auto part = [&](unsigned p) { return load_pack<true, size>(parts + p * stride + i); };
        store_pack<true>(out + i, tree_fold<Pack<float, size>>(count, part));
    });
}

}  // namespace

template <typename Storage>
void cast(Storage* to, const float* from, size_t n, Stream* stream) {
    check_sizes("cast", {n});
    launch(cast_kernel<Storage>, grid_size(elementwise_blocks(n)), elementwise_threads, 0, stream, to, from,
           n, aligned_to_16(to, from));
}

template <typename Storage>
void round_through(float* x, size_t n, Stream* stream) {
    check_sizes("round_through", {n});
    launch(round_through_kernel<Storage>, grid_size(elementwise_blocks(n)), elementwise_threads, 0, stream, x,
           n, aligned_to_16(x));
}

void add(float* out, const float* a, const float* b, size_t n, Stream* stream) {
    check_sizes("add", {n});
    launch(add_kernel, grid_size(elementwise_blocks(n)), elementwise_threads, 0, stream, out, a, b, n,
           aligned_to_16(out, a, b));
}

template <typename Storage>
void tree_sum(float* out, const Storage* parts, size_t count, size_t stride, size_t n, Stream* stream) {
    check_sizes("tree_sum", {count, n});
    if (count > tree_max_parts) fail("tree_sum: %zu parts; at most %u", count, tree_max_parts);
    const bool vectors = aligned_to_16(out, parts) && stride % pack_size<Storage> == 0;
    launch(tree_sum_kernel<Storage>, grid_size(elementwise_blocks(n)), elementwise_threads, 0, stream, out,
           parts, static_cast<unsigned>(count), stride, n, vectors);
}

#define INSTANTIATE(Storage)                                       \
    template void cast(Storage*, const float*, size_t, Stream*);   \
    template void round_through<Storage>(float*, size_t, Stream*); \
    template void tree_sum(float*, const Storage*, size_t, size_t, size_t, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
