// How the ops walk memory: elementwise loops in chunks over the threads, and sums whose order the source
// fixes. Nothing here depends on how many threads there are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <limits>

#include "kernels/cpu/stream.h"
#include "kernels/error.h"

// Elements below which a parallel region costs more than it saves, and the chunk an elementwise op hands out.
constexpr size_t parallel_grain = 16384;

// Calls body(begin, end) for consecutive chunks of [0, n); the chunks are the same for any thread count.
template <typename Body>
void for_chunks(const Stream* stream, size_t n, size_t chunk, const Body& body) {
    const size_t chunks = ceil_div(n, chunk);
#pragma omp parallel for num_threads(stream->threads) schedule(static) if (chunks > 1)
    for (size_t c = 0; c < chunks; c++) body(c * chunk, std::min(n, (c + 1) * chunk));
}

// Calls body(row) for each row of an op on (rows, cols). body must touch its own row only.
template <typename Body>
void for_rows(const Stream* stream, size_t rows, size_t cols, const Body& body) {
#pragma omp parallel for num_threads(stream->threads) schedule(static) if (rows * cols > parallel_grain)
    for (size_t row = 0; row < rows; row++) body(row);
}

// Combines term(0..n) in `lanes` lanes, term i in lane i mod lanes, then the lanes pairwise. The lanes are
// vector registers; spelled out, because the compiler may not reorder a float sum by itself. Always inlined:
// left as a function of its own, clang makes scalar code of it.
template <size_t lanes, typename Number, typename Combine, typename Term>
[[gnu::always_inline]] inline Number reduce_lanes(size_t n, Number identity, const Combine& combine,
                                                  const Term& term) {
    Number lane[lanes];
    std::fill_n(lane, lanes, identity);
    size_t first = 0;
    for (; first + lanes <= n; first += lanes) {
#pragma omp simd
        for (size_t i = 0; i < lanes; i++) lane[i] = combine(lane[i], term(first + i));
    }
    for (size_t i = 0; first + i < n; i++) lane[i] = combine(lane[i], term(first + i));
    for (size_t half = lanes / 2; half > 0; half /= 2) {
        for (size_t i = 0; i < half; i++) lane[i] = combine(lane[i], lane[i + half]);
    }
    return lane[0];
}

template <typename Number, size_t lanes = 32, typename Term>
[[gnu::always_inline]] inline Number lane_sum(size_t n, const Term& term) {
    return reduce_lanes<lanes>(
        n, Number{0}, [](Number a, Number b) { return a + b; }, term);
}

// The largest of x(0..n); NaNs are passed over.
template <size_t lanes = 32>
[[gnu::always_inline]] inline float lane_max(const float* x, size_t n) {
    const auto larger = [](float a, float b) { return b > a ? b : a; };
    return reduce_lanes<lanes>(n, -std::numeric_limits<float>::infinity(), larger,
                               [&](size_t i) { return x[i]; });
}

// Every op refuses sizes of zero, by its name.
inline void check_sizes(const char* op, std::initializer_list<size_t> sizes) {
    for (size_t size : sizes) {
        if (size == 0) fail("%s: a size is zero", op);
    }
}
