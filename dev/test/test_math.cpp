// exp, tanh, GELU and its derivative (kernels/cpu/math.h) against their definitions in double: every sign and
// exponent, thousands of fractions of each, subnormals, infinities and NaNs among them, and each number close
// to where a result overflows, underflows or is cut off. The bounds are those that the header states; all
// 2^32 floats were measured once.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/math.h"

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// One float in 1021, a prime: as many as fit a test; and the 2001 floats around each of some numbers.
std::vector<float> inputs(std::initializer_list<float> edges) {
    std::vector<float> x;
    for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 1021)
        x.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
    for (const float edge : edges) {
        const uint32_t middle = std::bit_cast<uint32_t>(edge);
        for (uint32_t bits = middle - 1000; bits != middle + 1001; bits++)
            x.push_back(std::bit_cast<float>(bits));
    }
    return x;
}

// The distance of the floats around y; of subnormals the smallest one.
double unit(double y) { return std::ldexp(1.0, std::max(y == 0 ? -126 : std::ilogb(y), -126) - 23); }

// Asks for |f(x) - expected(x)| <= allowed(x, expected(x)), an error close to it somewhere, and the same bits
// from vector code and one by one.
template <typename Function, typename Expected, typename Allowed>
void check(const Function& f, const Expected& expected, const Allowed& allowed,
           std::initializer_list<float> edges) {
    const std::vector<float> x = inputs(edges);
    std::vector<float> y(x.size());
#pragma omp simd
    for (size_t i = 0; i < x.size(); i++) y[i] = f(x[i]);
    double worst = 0;  // error as a part of what is allowed
    float worst_x = 0;
    for (size_t i = 0; i < x.size(); i++) {
        const volatile float alone = x[i];  // which no vector holds
        const float y_alone = f(alone);
        if (std::isnan(x[i])) {
            ASSERT_TRUE(std::isnan(y[i]) && std::isnan(y_alone)) << std::bit_cast<uint32_t>(x[i]);
            continue;
        }
        ASSERT_EQ(std::bit_cast<uint32_t>(y[i]), std::bit_cast<uint32_t>(y_alone)) << x[i];
        const double y_expected = expected(static_cast<double>(x[i]));
        if (std::isinf(static_cast<float>(y_expected)) || !std::isfinite(y[i])) {
            ASSERT_EQ(y[i], static_cast<float>(y_expected)) << x[i];
            continue;
        }
        const double part = std::abs(static_cast<double>(y[i]) - y_expected) / allowed(x[i], y_expected);
        if (part > worst) worst = part, worst_x = x[i];
    }
    EXPECT_LE(worst, 1) << "of the error that the header allows, at " << worst_x;
    EXPECT_GT(worst, 0.8) << "the header allows more than there is";
}

// e^y with y = -2 sqrt(2/pi) (x + 0.044715 x^3), of which the definition of GELU is made; and y'.
double gelu_y(double x) { return -2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }
double gelu_dy(double x) { return -2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x); }

// In the tail the rounding of e^y's argument counts, which grows with it.
double tail_units(float x) { return 1 + 2.2 * x * x; }

}  // namespace

TEST(Math, Exp) {
    check([](float x) { return fast_exp(x); }, [](double x) { return std::exp(x); },
          [](float, double y) { return 0.99 * unit(y); },
          {88.72284f, -87.33655f, -103.97208f, 105.0f, -105.0f, 0x1p-126f, -0x1p-126f});
    EXPECT_EQ(fast_exp(infinity), infinity);
    EXPECT_EQ(fast_exp(-infinity), 0.0f);
    EXPECT_EQ(fast_exp(0.0f), 1.0f);
}

TEST(Math, Tanh) {
    check([](float x) { return fast_tanh(x); }, [](double x) { return std::tanh(x); },
          [](float, double y) { return 2.43 * unit(y); }, {9.02f, -9.02f, 10.0f, 0x1p-126f, -0x1p-126f});
    EXPECT_EQ(fast_tanh(infinity), 1.0f);
    EXPECT_EQ(fast_tanh(-infinity), -1.0f);
    EXPECT_TRUE(std::signbit(fast_tanh(-0.0f)));
}

TEST(Math, Gelu) {
    const auto expected = [](double x) { return std::isinf(x) && x < 0 ? 0 : x / (1 + std::exp(gelu_y(x))); };
    const auto allowed = [](float x, double y) {
        return x < -10 ? 1.21e-37 : (x < -1 ? tail_units(x) : 2.6) * unit(y);
    };
    check([](float x) { return gelu(x); }, expected, allowed, {10.0f, -10.0f, -1.0f, 0x1p-126f, -0x1p-126f});
    EXPECT_EQ(gelu(infinity), infinity);
}

TEST(Math, GeluDerivative) {
    const auto expected = [](double x) {
        const double e = std::exp(gelu_y(x)), s = 1 / (1 + e);
        return s == 0 || s == 1 ? s : s * (1 - x * gelu_dy(x) * (e * s));
    };
    const auto allowed = [](float x, double y) {
        if (x < -10) return 2.8e-36;
        return x < -2 ? tail_units(x) * unit(y) : x < 0 ? 9e-8 : 3.6 * unit(y);
    };
    check([](float x) { return gelu_derivative(x); }, expected, allowed,
          {10.0f, -10.0f, -2.0f, -0.75246143f, 0x1p-126f, -0x1p-126f});
    EXPECT_EQ(gelu_derivative(infinity), 1.0f);
}
