// Whole runs of numbers from storage to fp32, for packing, where the conversion is much of the work. Other
// ops convert number by number: to_float and from_float (kernels/dtype.h) become vector code within their
// loops. fp16 takes a dozen instructions there; F16C has one for it, with the same bits for every number and
// NaN.
#pragma once

#include <cstddef>
#include <type_traits>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "kernels/dtype.h"

// to(0..n) = from(0..n)
template <typename Storage>
inline void to_floats(float* __restrict__ to, const Storage* __restrict__ from, size_t n) {
    size_t i = 0;
#ifdef __F16C__
    if constexpr (std::is_same_v<Storage, fp16_t>) {
        for (; i + 8 <= n; i += 8) {
            const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
        }
    }
#endif
    for (; i < n; i++) to[i] = to_float(from[i]);
}

// The numbers from(0..n) in fp32: themselves where they are, else in the buffer.
inline const float* as_floats(float*, const float* from, size_t) { return from; }
template <typename Storage>
inline const float* as_floats(float* buffer, const Storage* from, size_t n) {
    to_floats(buffer, from, n);
    return buffer;
}
