// Normal numbers by the hundred million, as a model's first weights need them: straight-line code that
// becomes vector code, where the C library's log and cos take one number at a time.
#include "kernels/random.h"

#include <algorithm>
#include <bit>

namespace {

// An integer below 2^52 as a double, exactly, without a conversion that only AVX-512 has for vectors.
inline double to_double(uint64_t n) { return std::bit_cast<double>(0x4330000000000000u | n) - 0x1p52; }

// log(x) for a normal x > 0: x = 2^e m with m in [1/sqrt 2, sqrt 2), and log m = 2 artanh(s) = 2 (s + s^3/3 +
// ...) with s = (m - 1)/(m + 1), |s| <= 0.172. What follows s^19 is below 4e-18 of it.
inline double log_of(double x) {
    constexpr uint64_t root_half = 0x3FE6A09E667F3BCD, bias = 1024;
    const uint64_t bits = std::bit_cast<uint64_t>(x);
    const uint64_t biased_e = (bits - root_half + (bias << 52)) >> 52;
    const double e = to_double(biased_e) - double{bias};
    const double m = std::bit_cast<double>(bits - ((biased_e - bias) << 52));
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double sum = 1.0 / 19;
    sum = sum * z + 1.0 / 17;
    sum = sum * z + 1.0 / 15;
    sum = sum * z + 1.0 / 13;
    sum = sum * z + 1.0 / 11;
    sum = sum * z + 1.0 / 9;
    sum = sum * z + 1.0 / 7;
    sum = sum * z + 1.0 / 5;
    sum = sum * z + 1.0 / 3;
    const double log_m = (2.0 * s * z) * sum + 2.0 * s;
    return e * 0.6931471805599453 + log_m;
}

// cos(2 pi u) for u in [0, 1] is sin(x) with x = 2 pi (|u - 1/2| - 1/4), |x| <= pi/2; by Taylor's series to
// x^21.
inline double cos_of_turn(double u) {
    const double x = 2.0 * M_PI * (std::fabs(u - 0.5) - 0.25), z = x * x;
    double sum = 1.0 / 51090942171709440000.0;
    sum = sum * z - 1.0 / 121645100408832000.0;
    sum = sum * z + 1.0 / 355687428096000.0;
    sum = sum * z - 1.0 / 1307674368000.0;
    sum = sum * z + 1.0 / 6227020800.0;
    sum = sum * z - 1.0 / 39916800.0;
    sum = sum * z + 1.0 / 362880.0;
    sum = sum * z - 1.0 / 5040.0;
    sum = sum * z + 1.0 / 120.0;
    sum = sum * z - 1.0 / 6.0;
    return (x * z) * sum + x;
}

}  // namespace

void random_normals(float* out, size_t count, double std, uint64_t seed, RandomStream stream,
                    uint32_t substream, uint64_t first) {
    constexpr size_t lanes = 64;
    for (size_t done = 0; done < count; done += lanes) {
        uint32_t word0[lanes], word1[lanes], word2[lanes], word3[lanes];
        for (size_t i = 0; i < lanes; i++) {
            const uint64_t index = first + done + i;
            word0[i] = static_cast<uint32_t>(index), word1[i] = static_cast<uint32_t>(index >> 32);
            word2[i] = substream, word3[i] = static_cast<uint32_t>(stream);
        }
        std::array<uint32_t, 2> key = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
        for (int round = 0; round < 10; round++) {
#pragma omp simd
            for (size_t i = 0; i < lanes; i++) philox_round(word0[i], word1[i], word2[i], word3[i], key);
            key = philox_next_key(key);
        }
        float normals[lanes];
#pragma omp simd
        for (size_t i = 0; i < lanes; i++) {
            const double u1 = (to_double(word0[i]) + 0.5) * 0x1p-32;
            const double u2 = (to_double(word1[i]) + 0.5) * 0x1p-32;
            normals[i] = static_cast<float>(std * (std::sqrt(-2.0 * log_of(u1)) * cos_of_turn(u2)));
        }
        std::copy_n(normals, std::min(lanes, count - done), out + done);
    }
}
