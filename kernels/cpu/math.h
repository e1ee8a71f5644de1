// exp, tanh and GELU as straight-line code, so that a loop under `#pragma omp simd` becomes vector code:
// no table, no branch, no library call.
//
// exp(x) = 2^n e^r with n = round(x / ln 2), |r| <= ln(2)/2, and expm1(r) = r + r^2 q(r) where q is the
// polynomial of degree 5 that interpolates (expm1(r) - r)/r^2 in the Chebyshev nodes of that interval
// (relative error 3e-10). ln 2 is subtracted in two parts (Cody, Waite 1980), the first short enough for
// n * ln2_high to be exact. The error is below 2 ulp, in the subnormals too; NaN gives NaN.
//
// Every addition below has one product at most, so that contraction to FMA can happen in one way only: a
// vector loop, its scalar tail and another caller all get the same bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace math_detail {

// x = n ln 2 + r. `scale_low * scale_high` = 2^n: in two factors because 2^n itself may leave fp32's range
// where the product with a mantissa does not.
struct ExpParts {
    float expm1_r, scale_low, scale_high;
};

// |x| must be below 2^22 ln 2, or NaN.
inline ExpParts exp_parts(float x) {
    const float round_shift = 0x1.8p23f;  // adding it leaves round(...) in the low bits of the mantissa
    const float shifted = x * 0x1.715476p0f + round_shift;
    const float n = shifted - round_shift;
    const float r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
    float q = 0x1.a152aap-13f;
    q = q * r + 0x1.6d769ap-10f;
    q = q * r + 0x1.1110c6p-7f;
    q = q * r + 0x1.5554acp-5f;
    q = q * r + 0x1.555556p-3f;
    q = q * r + 0.5f;
    const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(round_shift);
    const int32_t half = exponent >> 1;
    return {(r * r) * q + r, std::bit_cast<float>(static_cast<uint32_t>(half + 127) << 23),
            std::bit_cast<float>(static_cast<uint32_t>(exponent - half + 127) << 23)};
}

// -limit and limit bound x; NaN stays NaN because it compares false.
inline float clamp(float x, float limit) {
    const float above = x < -limit ? -limit : x;
    return above > limit ? limit : above;
}

// sqrt(2/pi), the factor in the tanh form of GELU, and twice it.
constexpr float sqrt_2_over_pi = 0.79788456080286536f;

}  // namespace math_detail

// e^x: infinity above 88.72, subnormals from -87.34 down to -103.97, then 0.
inline float fast_exp(float x) {
    const math_detail::ExpParts e = math_detail::exp_parts(math_detail::clamp(x, 105.0f));
    return (e.expm1_r + 1.0f) * e.scale_low * e.scale_high;
}

// tanh(x) = m / (m + 2) with m = e^2|x| - 1, which loses nothing near 0; 1 in fp32 from |x| = 9.02 on.
inline float fast_tanh(float x) {
    const float magnitude = math_detail::clamp(std::fabs(x), 10.0f);
    const math_detail::ExpParts e = math_detail::exp_parts(2.0f * magnitude);
    const float scale = e.scale_low * e.scale_high;
    const float m = e.expm1_r * scale + (scale - 1.0f);
    return std::copysign(m / (m + 2.0f), x);
}

// tanh-GELU (arXiv:1606.08415): x/2 (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3).
// The second form keeps its relative accuracy for negative x. Below -12 the result is 0 in fp32.
inline float gelu(float x) {
    const float bounded = x < -12.0f ? -12.0f : x;
    const float inner = bounded * (0.044715f * (bounded * bounded) + 1.0f);
    return bounded / (fast_exp(-2.0f * math_detail::sqrt_2_over_pi * inner) + 1.0f);
}

// d gelu/dx = s (1 + x (1-s) 2u') with s = 1/(1 + e^-2u) and 1-s = e^-2u s. Outside [-10, 10] it is 0 or 1
// in fp32 (to 1e-36), and inside everything is finite.
inline float gelu_derivative(float x) {
    const float bounded = math_detail::clamp(x, 10.0f);
    const float square = bounded * bounded;
    const float inner = bounded * (0.044715f * square + 1.0f);
    const float e = fast_exp(-2.0f * math_detail::sqrt_2_over_pi * inner);
    const float s = 1.0f / (e + 1.0f);
    const float slope = 2.0f * math_detail::sqrt_2_over_pi * (3.0f * 0.044715f * square + 1.0f);
    return s * ((bounded * slope) * (e * s) + 1.0f);
}
