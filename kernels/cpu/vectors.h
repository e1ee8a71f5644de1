// Vector registers of the target as GCC's and clang's vector types: one source for SSE, AVX2, AVX-512 and
// NEON.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

// A register tile is tile_rows rows of two vectors of sums. Six rows make 12 accumulators: enough to hide the
// latency of two FMA units, and with two vectors of the right operand and one number of the left they just
// fit 16 registers. AVX-512 has 32: eight rows, which divide the usual sizes, read the right operand less
// often.
#if defined(__AVX512F__)
constexpr size_t vector_floats = 16;
constexpr size_t tile_rows = 8;
#elif defined(__AVX__)
constexpr size_t vector_floats = 8;
constexpr size_t tile_rows = 6;
#else
constexpr size_t vector_floats = 4;
constexpr size_t tile_rows = 6;
#endif

typedef float Vector __attribute__((vector_size(vector_floats * sizeof(float))));

inline Vector load(const float* from) {
    Vector vector;
    memcpy(&vector, from, sizeof(vector));
    return vector;
}

inline void store(float* to, Vector vector) { memcpy(to, &vector, sizeof(vector)); }

typedef float Eight __attribute__((vector_size(8 * sizeof(float))));

// Transposes the 8 x 8 numbers of x, in three rounds of exchanges between pairs of rows.
inline void transpose(Eight (&x)[8]) {
    const auto exchange = [&](auto distance, const auto& low, const auto& high) {
#pragma GCC unroll 8
        for (size_t i = 0; i < 8; i++) {
            if ((i & distance) != 0) continue;
            const Eight a = x[i], b = x[i + distance];
            x[i] = low(a, b), x[i + distance] = high(a, b);
        }
    };
    exchange(
        std::integral_constant<size_t, 4>{},
        [](Eight a, Eight b) { return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11); },
        [](Eight a, Eight b) { return __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15); });
    exchange(
        std::integral_constant<size_t, 2>{},
        [](Eight a, Eight b) { return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13); },
        [](Eight a, Eight b) { return __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15); });
    exchange(
        std::integral_constant<size_t, 1>{},
        [](Eight a, Eight b) { return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14); },
        [](Eight a, Eight b) { return __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15); });
}

// to(j,i) = from(i,j) for j < 8 and i < rows <= 8; `from` and `to` are given by the distance of their rows.
template <size_t rows>
inline void transpose_block(float* __restrict__ to, size_t to_stride, const float* __restrict__ from,
                            size_t from_stride) {
    Eight block[8] = {};
#pragma GCC unroll 8
    for (size_t i = 0; i < rows; i++) memcpy(&block[i], from + i * from_stride, sizeof(Eight));
    transpose(block);
#pragma GCC unroll 8
    for (size_t j = 0; j < 8; j++) memcpy(to + j * to_stride, &block[j], rows * sizeof(float));
}
