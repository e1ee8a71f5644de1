// Sums over the leaves and ranks of a step, and the rounding that a leaf takes. All of them are memory-bound.
#include "kernels/tree.h"

#include "kernels/cpu/loops.h"
#include "kernels/kernels.h"

namespace {

// Neighbours that are summed together: a few vector registers.
constexpr size_t lanes = 16;

struct Lanes {
    float x[lanes];
};

inline Lanes operator+(const Lanes& a, const Lanes& b) {
    Lanes sum;
    for (size_t i = 0; i < lanes; i++) sum.x[i] = a.x[i] + b.x[i];
    return sum;
}

}  // namespace

template <typename Storage>
void cast(Storage* to, const float* from, size_t n, Stream* stream) {
    check_sizes("cast", {n});
    for_chunks(stream, n, parallel_grain, [=](size_t begin, size_t end) {
#pragma omp simd
        for (size_t i = begin; i < end; i++) to[i] = from_float<Storage>(from[i]);
    });
}

template <typename Storage>
void round_through(float* x, size_t n, Stream* stream) {
    check_sizes("round_through", {n});
    for_chunks(stream, n, parallel_grain, [=](size_t begin, size_t end) {
#pragma omp simd
        for (size_t i = begin; i < end; i++) x[i] = to_float(from_float<Storage>(x[i]));
    });
}

void add(float* out, const float* a, const float* b, size_t n, Stream* stream) {
    check_sizes("add", {n});
    for_chunks(stream, n, parallel_grain, [=](size_t begin, size_t end) {
#pragma omp simd
        for (size_t i = begin; i < end; i++) out[i] = a[i] + b[i];
    });
}

template <typename Storage>
void tree_sum(float* out, const Storage* parts, size_t count, size_t stride, size_t n, Stream* stream) {
    check_sizes("tree_sum", {count, n});
    if (count > tree_max_parts) fail("tree_sum: %zu parts; at most %u", count, tree_max_parts);
    for_chunks(stream, n, parallel_grain, [=](size_t begin, size_t end) {
        for (size_t first = begin; first < end; first += lanes) {
            const size_t size = std::min(lanes, end - first);
            const Lanes sum = tree_fold<Lanes>(static_cast<unsigned>(count), [&](unsigned p) {
                Lanes part{};
                const Storage* from = parts + p * stride + first;
                for (size_t i = 0; i < size; i++) part.x[i] = to_float(from[i]);
                return part;
            });
            std::copy_n(sum.x, size, out + first);
        }
    });
}

#define INSTANTIATE(Storage)                                       \
    template void cast(Storage*, const float*, size_t, Stream*);   \
    template void round_through<Storage>(float*, size_t, Stream*); \
    template void tree_sum(float*, const Storage*, size_t, size_t, size_t, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
