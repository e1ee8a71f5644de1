// exp, tanh and GELU as straight-line code, so that a loop under `#pragma omp simd` becomes vector code:
// no table, no branch, no library call.
//
// exp(x) = 2^n e^r with n = round(x / ln 2), |r| <= ln(2)/2, and e^r - 1 = r + r^2 q(r) where the polynomial
// q of degree 5 interpolates (e^r - 1 - r)/r^2 in the Chebyshev nodes of that interval (relative error
// 3e-10). ln 2 is subtracted in two parts (Cody, Waite 1980), the first short enough for n times it to be
// exact. NaN gives NaN everywhere.
//
// The errors stated below are the largest over all floats, with and without FMA, in units of the last place
// of the exact result (ulp); dev/test/test_math holds them.
//
// Every addition below has one product at most, so that contraction to FMA can happen in one way only: a
// vector loop, its scalar tail and another caller all get the same bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace math_detail {

// e^x = (1 + expm1_r) 2^n.
struct ExpParts {
    float expm1_r;
    int32_t n;
};

// |x| must be below 2^22 ln 2.
inline ExpParts exp_parts(float x) {
    const float round_shift = 0x1.8p23f;  // adding it leaves the rounded sum in the low bits of the mantissa
    const float shifted = x * 0x1.715476p0f + round_shift;
    const float n = shifted - round_shift;
    const float r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
    float q = 0x1.a152aap-13f;
    q = q * r + 0x1.6d769ap-10f;
    q = q * r + 0x1.1110c6p-7f;
    q = q * r + 0x1.5554acp-5f;
    q = q * r + 0x1.555556p-3f;
    q = q * r + 0.5f;
    return {(r * r) * q + r, std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(round_shift)};
}

// 2^n for n in [-126, 127].
inline float power_of_two(int32_t n) { return std::bit_cast<float>(static_cast<uint32_t>(n + 127) << 23); }

// x with its magnitude limited; one comparison, as two in a row confuse GCC's vectoriser.
inline float clamp_magnitude(float x, float limit) {
    const float magnitude = std::fabs(x);
    return std::copysign(magnitude > limit ? limit : magnitude, x);
}

// tanh-GELU is x / (1 + e^y) with y = -2 sqrt(2/pi) (x + 0.044715 x^3); the coefficients of x and x^3:
constexpr float gelu_y1 = -1.5957691216057308f;
constexpr float gelu_y3 = -0.07135481627260025f;

// e^y for |x| <= 10: |y| <= 87.4, in range.
inline float gelu_exp(float x) {
    const ExpParts e = exp_parts(x * (gelu_y3 * (x * x) + gelu_y1));
    return (e.expm1_r + 1.0f) * power_of_two(e.n);
}

}  // namespace math_detail

// e^x to 0.99 ulp: infinity above 88.72, subnormals from -87.34 down to -103.97, then 0.
inline float fast_exp(float x) {
    const math_detail::ExpParts e = math_detail::exp_parts(math_detail::clamp_magnitude(x, 105.0f));
    const int32_t half = e.n >> 1;  // 2^n itself may be out of range where the result is not
    return (e.expm1_r + 1.0f) * math_detail::power_of_two(half) * math_detail::power_of_two(e.n - half);
}

// tanh(x) = m / (m + 2) with m = e^2|x| - 1, which loses nothing near 0: to 2.43 ulp; 1 from |x| = 9.02 on.
inline float fast_tanh(float x) {
    const float magnitude = std::fabs(x);
    const math_detail::ExpParts e = math_detail::exp_parts(2.0f * (magnitude > 10.0f ? 10.0f : magnitude));
    const float scale = math_detail::power_of_two(e.n);
    const float m = e.expm1_r * scale + (scale - 1.0f);
    return std::copysign(m / (m + 2.0f), x);
}

// tanh-GELU (arXiv:1606.08415): x/2 (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3).
// The second form loses nothing for negative x: to 2.6 ulp from -1 on. From there down to -10 the rounding of
// u counts, 1 + 2.2 x^2 ulp at most; below, the result stays at -1.2e-37.
inline float gelu(float x) {
    const float bounded = math_detail::clamp_magnitude(x, 10.0f);
    const float numerator = x < -10.0f ? -10.0f : x;
    return numerator / (math_detail::gelu_exp(bounded) + 1.0f);
}

// d gelu/dx = s (1 + x (1-s) 2u') with s = 1/(1 + e^-2u) and 1-s = e^-2u s. For x >= 0 to 3.6 ulp; for
// negative x to 9e-8 absolute, as there is a root at -0.75; from -2 down to -10 also to 1 + 2.2 x^2 ulp;
// below, it stays at -2.8e-36.
inline float gelu_derivative(float x) {
    const float bounded = math_detail::clamp_magnitude(x, 10.0f);
    const float e = math_detail::gelu_exp(bounded);
    const float s = 1.0f / (e + 1.0f);
    const float minus_2du = 3.0f * math_detail::gelu_y3 * (bounded * bounded) + math_detail::gelu_y1;
    return s * (1.0f - (bounded * minus_2du) * (e * s));
}
