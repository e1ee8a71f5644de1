// The op suite: every op of kernels/kernels.h against the textbook references in double of reference.h, its
// gradient also against central differences, at sizes that are multiples of nothing. Each op runs twice on
// one thread and again on two and three and must give the same bits (run_op); every buffer stands between
// guards, and what an op overwrites starts as NaN (Buffer, unwritten).
//
// The suite knows no backend. A storage type joins it with its name in StorageTypes.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <type_traits>

#include "dev/test/buffers.h"
#include "dev/test/muon_parts.h"
#include "dev/test/reference.h"
#include "kernels/kernels.h"
#include "kernels/random.h"

namespace {

using StorageTypes = testing::Types<float, bf16_t, fp16_t>;

template <typename Storage>
struct Kernels : testing::Test {};
TYPED_TEST_SUITE(Kernels, StorageTypes);

template <size_t count>
using Shapes = std::vector<std::array<size_t, count>>;

// Fan-in scaling keeps products of order 1.
double fan_in(size_t C) { return 1 / std::sqrt(static_cast<double>(C)); }

const float infinity = std::numeric_limits<float>::infinity();
const float nan_value = std::numeric_limits<float>::quiet_NaN();

// ---------------------------------------------------------------------------------------------------
// kernels/dtype.h: every 16-bit pattern, against arithmetic in double

// The value of a pattern of a 16-bit IEEE-like format, from the definition: sign, exponent, fraction.
template <typename Storage>
double decode(uint16_t bits) {
    constexpr int fraction_bits = Format<Storage>::precision - 1;
    const int exponent_field = (bits & 0x7fff) >> fraction_bits;
    const int fraction = bits & ((1 << fraction_bits) - 1);
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent_field > Format<Storage>::max_exponent * 2) {
        return fraction != 0 ? static_cast<double>(nan_value) : sign * static_cast<double>(infinity);
    }
    const int normal_bit = exponent_field > 0 ? 1 << fraction_bits : 0;
    const int exponent =
        exponent_field > 0 ? exponent_field - Format<Storage>::max_exponent : Format<Storage>::min_exponent;
    return sign * std::ldexp(fraction + normal_bit, exponent - fraction_bits);
}

// x rounded to the format, to nearest with ties to even: scaled so that one unit in the last place is 1.
template <typename Storage>
double round_to(double x) {
    if (!std::isfinite(x) || x == 0) return x;
    const int exponent = std::max(std::ilogb(x), Format<Storage>::min_exponent);
    const int last_place = exponent - Format<Storage>::precision + 1;
    const double result = std::ldexp(std::nearbyint(std::ldexp(x, -last_place)), last_place);
    const bool overflow = std::abs(result) >= std::ldexp(1.0, Format<Storage>::max_exponent + 1);
    return overflow ? std::copysign(static_cast<double>(infinity), x) : result;
}

template <typename Storage>
void check_conversions() {
    for (uint32_t pattern = 0; pattern <= 0xffff; ++pattern) {
        const Storage stored{static_cast<uint16_t>(pattern)};
        const double expected = decode<Storage>(stored.bits);
        if (std::isnan(expected)) {
            ASSERT_TRUE(std::isnan(to_float(stored))) << pattern;
            ASSERT_TRUE(std::isnan(to_float(from_float<Storage>(to_float(stored))))) << pattern;
        } else {
            ASSERT_EQ(to_float(stored), expected) << pattern;
            ASSERT_EQ(std::signbit(to_float(stored)), std::signbit(expected)) << pattern;
            ASSERT_EQ(from_float<Storage>(to_float(stored)).bits, stored.bits) << pattern;
        }
    }
    // Floats with every upper half, and lower halves at and beside the ties of both formats.
    for (uint32_t upper = 0; upper <= 0xffff; ++upper) {
        for (const uint32_t lower : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x3001u,
                                     0x7fffu, 0x8000u, 0x8001u, 0xb000u, 0xf000u, 0xffffu}) {
            const float x = std::bit_cast<float>(upper << 16 | lower);
            const double actual = decode<Storage>(from_float<Storage>(x).bits);
            const double expected = round_to<Storage>(x);
            ASSERT_TRUE(actual == expected || (std::isnan(actual) && std::isnan(expected)))
                << x << ": " << actual;
            ASSERT_TRUE(std::isnan(x) || std::signbit(actual) == std::signbit(x)) << x;
        }
    }
}

TEST(Dtype, Bf16ConvertsEveryPattern) { check_conversions<bf16_t>(); }
TEST(Dtype, Fp16ConvertsEveryPattern) { check_conversions<fp16_t>(); }

// Published corner values: IEEE 754-2019 table 3.5 for binary16; bfloat16 is the upper half of binary32.
TEST(Dtype, CornerValues) {
    EXPECT_EQ(to_float(fp16_t{0x7bff}), 65504.0f);
    EXPECT_EQ(to_float(fp16_t{0x0001}), std::ldexp(1.0f, -24));
    EXPECT_EQ(to_float(fp16_t{0x3c00}), 1.0f);
    EXPECT_EQ(from_float<fp16_t>(65519.0f).bits, 0x7bff);
    EXPECT_EQ(from_float<fp16_t>(65520.0f).bits, 0x7c00);
    EXPECT_EQ(to_float(bf16_t{0x3f80}), 1.0f);
    EXPECT_EQ(from_float<bf16_t>(3.14159265f).bits, 0x4049);
    EXPECT_EQ(from_float<bf16_t>(std::numeric_limits<float>::max()).bits, 0x7f80);
    EXPECT_EQ(dtype_size(dtype_of<float>()), sizeof(float));
    EXPECT_EQ(dtype_size(dtype_of<bf16_t>()), sizeof(bf16_t));
    EXPECT_EQ(dtype_size(dtype_of<fp16_t>()), sizeof(fp16_t));
}

// ---------------------------------------------------------------------------------------------------
// kernels/device.h

TEST(Device, MemoryIsAlignedCopiedAndZeroed) {
    const StreamPointer stream = open_stream();
    for (const size_t bytes : {size_t{1}, size_t{257}, size_t{5} << 20}) {
        char* memory = static_cast<char*>(device_malloc(bytes, stream.get()));
        EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 256, 0u);
        const std::vector<char> sent(bytes, 'x');
        std::vector<char> received(bytes);
        copy_to_device(memory, sent.data(), bytes, stream.get());
        copy_to_host(received.data(), memory, bytes, stream.get());
        EXPECT_EQ(received, sent);
        device_memset_zero(memory, bytes, stream.get());
        copy_to_host(received.data(), memory, bytes, stream.get());
        EXPECT_EQ(received, std::vector<char>(bytes));
        device_free(memory, stream.get());
    }
    EXPECT_EQ(device_malloc(0, stream.get()), nullptr);
    EXPECT_THROW(device_malloc(SIZE_MAX, stream.get()), Error);
}

TEST(Device, StreamKnowsItsThreads) {
    for (const int threads : {1, 2, 3}) {
        const StreamPointer stream = open_stream(threads);
        const bool is_cpu = device_name(stream.get()).starts_with("CPU");
        EXPECT_EQ(device_threads(stream.get()), is_cpu ? threads : 1);
        stream_synchronize(stream.get());
    }
    EXPECT_GE(device_threads(open_stream(0).get()), 1);
    expect_refused("--threads", [] { open_stream(-1); });
}

// ---------------------------------------------------------------------------------------------------
// Embedding

template <typename Storage>
void check_embedding(size_t B, size_t T, size_t C, size_t V) {
    SCOPED_TRACE(testing::Message() << "B " << B << " T " << T << " C " << C << " V " << V);
    const auto tokens = integers(B * T, 1, V);
    const auto wte = normal<Storage>(V * C, 2), wpe = normal<Storage>((T + 2) * C, 3);
    const auto dout = normal<Storage>(B * T * C, 4);
    const auto dwte = normal<float>(V * C, 5), dwpe = normal<float>((T + 2) * C, 6);
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Storage> out(unwritten<Storage>(B * T * C), stream);
        Buffer<float> dwte_sum(dwte, stream), dwpe_sum(dwpe, stream);
        embedding_forward<Storage>(out, Buffer(tokens, stream), Buffer(wte, stream), Buffer(wpe, stream), B,
                                   T, C, stream);
        embedding_backward<Storage>(dwte_sum, dwpe_sum, Buffer(dout, stream), Buffer(tokens, stream), B, T, C,
                                    stream);
        return Outputs{out.values(), dwte_sum.values(), dwpe_sum.values()};
    });
    const Vector out = reference::embedding_forward(tokens, doubles(wte), doubles(wpe), B, T, C);
    expect_close<Storage>("out", outputs[0], out, 1);

    // The order of the sums is promised, so fp32 additions in that order give the same bits.
    auto dwte_expected = dwte, dwpe_expected = dwpe;
    for (size_t i = 0; i < B * T; ++i) {
        for (size_t c = 0; c < C; ++c) {
            dwte_expected[static_cast<size_t>(tokens[i]) * C + c] += to_float(dout[i * C + c]);
            dwpe_expected[i % T * C + c] += to_float(dout[i * C + c]);
        }
    }
    expect_same_bits({outputs[1], outputs[2]}, {doubles(dwte_expected), doubles(dwpe_expected)}, "reference");
}

TYPED_TEST(Kernels, Embedding) {
    for (const auto& [B, T, C, V] : Shapes<4>{{1, 1, 1, 1},
                                              {3, 2, 5, 2},
                                              {2, 17, 8, 3},
                                              {1, 31, 24, 255},
                                              {5, 33, 40, 7},
                                              {7, 63, 129, 65},
                                              {3, 1391, 5, 7},  // rows beyond one sorted piece of a GPU
                                              {2, 65, 776, 257}}) {
        check_embedding<TypeParam>(B, T, C, V);
    }
}

TYPED_TEST(Kernels, EmbeddingGradientIsNumeric) {
    using Storage = TypeParam;
    const size_t B = 3, T = 4, C = 5, V = 6;
    const auto tokens = integers(B * T, 1, V);
    const auto wte = normal<Storage>(V * C, 2), wpe = normal<Storage>(T * C, 3),
               dout = normal<Storage>(B * T * C, 4);
    const StreamPointer stream = open_stream();
    Buffer<float> dwte(std::vector<float>(V * C), stream.get()),
        dwpe(std::vector<float>(T * C), stream.get());
    embedding_backward<Storage>(dwte, dwpe, Buffer(dout, stream.get()), Buffer(tokens, stream.get()), B, T, C,
                                stream.get());
    const auto loss = [&](const Vector& wte_, const Vector& wpe_) {
        return reference::dot(doubles(dout), reference::embedding_forward(tokens, wte_, wpe_, B, T, C));
    };
    const Vector wte_ = doubles(wte), wpe_ = doubles(wpe);
    expect_close<float>("dwte", dwte.values(),
                        reference::numeric_gradient([&](const Vector& x) { return loss(x, wpe_); }, wte_),
                        B * T);
    expect_close<float>("dwpe", dwpe.values(),
                        reference::numeric_gradient([&](const Vector& x) { return loss(wte_, x); }, wpe_), B);
}

// ---------------------------------------------------------------------------------------------------
// LayerNorm

// Every N with every C, one shape with many rows, and rows so long that a GPU's shared memory holds few or
// none.
Shapes<2> layernorm_shapes() {
    Shapes<2> shapes = {{1037, 9}, {5, 4099}, {2, 24601}};
    for (const size_t N : {1, 3, 7, 33, 65, 130}) {
        for (const size_t C : {1, 5, 8, 24, 40, 129, 264, 776}) shapes.push_back({N, C});
    }
    return shapes;
}

template <typename Storage>
void check_layernorm_forward(size_t N, size_t C, double mean) {
    SCOPED_TRACE(testing::Message() << "N " << N << " C " << C << " mean " << mean);
    const auto x = normal<Storage>(N * C, 1, 1, mean);
    const auto weight = normal<Storage>(C, 2), bias = normal<Storage>(C, 3);
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Storage> out(unwritten<Storage>(N * C), stream);
        Buffer<float> means(unwritten<float>(N), stream), rstds(unwritten<float>(N), stream);
        layernorm_forward<Storage>(out, means, rstds, Buffer(x, stream), Buffer(weight, stream),
                                   Buffer(bias, stream), N, C, stream);
        return Outputs{out.values(), means.values(), rstds.values()};
    });
    const auto expected = reference::layernorm_forward(doubles(x), doubles(weight), doubles(bias), N, C);
    // fp32 holds the mean, and with it x - mean, to within the mean times the roundoff.
    const double slack = 1 + std::abs(mean);
    expect_close<Storage>("out", outputs[0], expected.out, C, slack);
    expect_close<float>("mean", outputs[1], expected.mean, C);
    expect_close<float>("rstd", outputs[2], expected.rstd, C, slack);
}

TYPED_TEST(Kernels, LayerNormForward) {
    for (const auto& [N, C] : layernorm_shapes()) check_layernorm_forward<TypeParam>(N, C, 2);
}

// A mean of squares minus a squared mean would lose every digit here.
TYPED_TEST(Kernels, LayerNormForwardWithLargeMean) { check_layernorm_forward<TypeParam>(7, 129, 1000); }

TYPED_TEST(Kernels, LayerNormOfConstantRowIsBias) {
    using Storage = TypeParam;
    const size_t C = 40;
    const auto x = rounded<Storage>(Vector(C, 3.0)), weight = normal<Storage>(C, 2),
               bias = normal<Storage>(C, 3);
    const StreamPointer stream = open_stream();
    Buffer<Storage> out(unwritten<Storage>(C), stream.get());
    Buffer<float> mean(unwritten<float>(1), stream.get()), rstd(unwritten<float>(1), stream.get());
    layernorm_forward<Storage>(out, mean, rstd, Buffer(x, stream.get()), Buffer(weight, stream.get()),
                               Buffer(bias, stream.get()), 1, C, stream.get());
    for (size_t c = 0; c < C; ++c) EXPECT_NEAR(out.values()[c], to_double(bias[c]), 1e-3);
    EXPECT_NEAR(rstd.values()[0], 1 / std::sqrt(1e-5), 1e-3);
}

template <typename Storage>
void check_residual_layernorm(size_t N, size_t C) {
    SCOPED_TRACE(testing::Message() << "N " << N << " C " << C);
    const auto a = normal<Storage>(N * C, 1, 1, 2), b = normal<Storage>(N * C, 2);
    const auto weight = normal<Storage>(C, 3), bias = normal<Storage>(C, 4);
    enum class Sum { apart, in_a, in_b };
    const auto run = [&](Stream* stream, Sum where) {
        Buffer<Storage> apart(unwritten<Storage>(N * C), stream), a_(a, stream), b_(b, stream);
        Buffer<Storage> out(unwritten<Storage>(N * C), stream);
        Buffer<float> mean(unwritten<float>(N), stream), rstd(unwritten<float>(N), stream);
        Buffer<Storage>& sum = where == Sum::apart ? apart : where == Sum::in_a ? a_ : b_;
        residual_layernorm_forward<Storage>(sum, out, mean, rstd, a_, b_, Buffer(weight, stream),
                                            Buffer(bias, stream), N, C, stream);
        return Outputs{sum.values(), out.values(), mean.values(), rstd.values()};
    };
    const Outputs outputs = run_op([&](Stream* stream) { return run(stream, Sum::apart); });
    Vector sum = doubles(a);
    for (size_t i = 0; i < N * C; ++i) sum[i] += to_double(b[i]);
    expect_close<Storage>("sum", outputs[0], sum, 1);
    // What is normalised is the sum as it is stored: the backward sees no other.
    const auto expected = reference::layernorm_forward(outputs[0], doubles(weight), doubles(bias), N, C);
    expect_close<Storage>("out", outputs[1], expected.out, C);
    expect_close<float>("mean", outputs[2], expected.mean, C);
    expect_close<float>("rstd", outputs[3], expected.rstd, C);

    const StreamPointer stream = open_stream(2);
    expect_same_bits(run(stream.get(), Sum::in_a), outputs, "sum in a");
    expect_same_bits(run(stream.get(), Sum::in_b), outputs, "sum in b");
    Buffer<Storage> out(unwritten<Storage>(N * C), stream.get());
    Buffer<float> mean(unwritten<float>(N), stream.get()), rstd(unwritten<float>(N), stream.get());
    Buffer<Storage> stored_sum(rounded<Storage>(outputs[0]), stream.get());
    layernorm_forward<Storage>(out, mean, rstd, stored_sum, Buffer(weight, stream.get()),
                               Buffer(bias, stream.get()), N, C, stream.get());
    expect_same_bits({out.values(), mean.values(), rstd.values()}, {outputs[1], outputs[2], outputs[3]},
                     "LayerNorm of the stored sum");
}

TYPED_TEST(Kernels, ResidualLayerNormForward) {
    for (const auto& [N, C] : layernorm_shapes()) check_residual_layernorm<TypeParam>(N, C);
}

struct Statistics {
    std::vector<float> mean, rstd;
};

// The op is given the statistics that the forward kept, in fp32.
template <typename Storage>
Statistics statistics(const std::vector<Storage>& x, size_t N, size_t C) {
    const auto forward = reference::layernorm_forward(doubles(x), Vector(C, 1.0), Vector(C, 0.0), N, C);
    return {rounded<float>(forward.mean), rounded<float>(forward.rstd)};
}

template <typename Storage>
void check_layernorm_backward(size_t N, size_t C) {
    SCOPED_TRACE(testing::Message() << "N " << N << " C " << C);
    const auto x = normal<Storage>(N * C, 1, 1, 0.3), dout = normal<Storage>(N * C, 2),
               dx = normal<Storage>(N * C, 3);
    const auto weight = normal<Storage>(C, 4);
    const auto dweight = normal<float>(C, 5), dbias = normal<float>(C, 6);
    const auto kept = statistics(x, N, C);
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Storage> dx_sum(dx, stream);
        Buffer<float> dweight_sum(dweight, stream), dbias_sum(dbias, stream);
        layernorm_backward<Storage>(dx_sum, dweight_sum, dbias_sum, Buffer(dout, stream), Buffer(x, stream),
                                    Buffer(kept.mean, stream), Buffer(kept.rstd, stream),
                                    Buffer(weight, stream), N, C, stream);
        return Outputs{dx_sum.values(), dweight_sum.values(), dbias_sum.values()};
    });
    auto expected = reference::layernorm_backward(doubles(dout), doubles(x), doubles(weight), N, C);
    for (size_t i = 0; i < N * C; ++i) expected.dx[i] += to_double(dx[i]);
    for (size_t c = 0; c < C; ++c) {
        expected.dweight[c] += dweight[c];
        expected.dbias[c] += dbias[c];
    }
    // A row without spread, as every row of one channel, has a large rstd, and rounding errors grow with it.
    const double slack = std::max(1.0f, *std::max_element(kept.rstd.begin(), kept.rstd.end()));
    expect_close<Storage>("dx", outputs[0], expected.dx, C, slack);
    expect_close<float>("dweight", outputs[1], expected.dweight, N);
    expect_close<float>("dbias", outputs[2], expected.dbias, N);
}

TYPED_TEST(Kernels, LayerNormBackward) {
    for (const auto& [N, C] : layernorm_shapes()) check_layernorm_backward<TypeParam>(N, C);
}

TYPED_TEST(Kernels, LayerNormGradientIsNumeric) {
    using Storage = TypeParam;
    const size_t N = 3, C = 7;
    const auto x = normal<Storage>(N * C, 1), dout = normal<Storage>(N * C, 2);
    const auto weight = normal<Storage>(C, 3), bias = normal<Storage>(C, 4);
    const auto kept = statistics(x, N, C);
    const StreamPointer stream = open_stream();
    Buffer<Storage> dx(std::vector<Storage>(N * C), stream.get());
    Buffer<float> dweight(std::vector<float>(C), stream.get()), dbias(std::vector<float>(C), stream.get());
    layernorm_backward<Storage>(dx, dweight, dbias, Buffer(dout, stream.get()), Buffer(x, stream.get()),
                                Buffer(kept.mean, stream.get()), Buffer(kept.rstd, stream.get()),
                                Buffer(weight, stream.get()), N, C, stream.get());
    const auto loss = [&](const Vector& x_, const Vector& weight_, const Vector& bias_) {
        return reference::dot(doubles(dout), reference::layernorm_forward(x_, weight_, bias_, N, C).out);
    };
    const Vector x_ = doubles(x), weight_ = doubles(weight), bias_ = doubles(bias);
    const auto numeric = reference::numeric_gradient;
    expect_close<Storage>("dx", dx.values(),
                          numeric([&](const Vector& p) { return loss(p, weight_, bias_); }, x_), C);
    expect_close<float>("dweight", dweight.values(),
                        numeric([&](const Vector& p) { return loss(x_, p, bias_); }, weight_), N);
    expect_close<float>("dbias", dbias.values(),
                        numeric([&](const Vector& p) { return loss(x_, weight_, p); }, bias_), N);
}

// ---------------------------------------------------------------------------------------------------
// Linear layers

// Every N with every C, each C with many OC; and each dimension once above the cache blocks of a packed GEMM
// (hundreds of rows and of terms, thousands of columns).
Shapes<3> linear_shapes() {
    Shapes<3> shapes = {{1037, 40, 24}, {7, 5, 3101}, {3, 3101, 8}, {130, 776, 776}, {300, 8, 5}};
    const std::vector<size_t> channels = {1, 5, 8, 24, 40, 129, 264, 776};
    size_t next = 0;
    for (const size_t N : {1, 3, 7, 33, 65, 130}) {
        for (const size_t C : channels) shapes.push_back({N, C, channels[next++ * 5 / 8 % channels.size()]});
    }
    return shapes;
}

template <typename Storage>
void check_linear_forward(size_t N, size_t C, size_t OC, bool with_bias, bool with_gelu) {
    SCOPED_TRACE(testing::Message() << "N " << N << " C " << C << " OC " << OC << " bias " << with_bias
                                    << " gelu " << with_gelu);
    const auto x = normal<Storage>(N * C, 1), weight = normal<Storage>(OC * C, 2, fan_in(C));
    const auto bias = normal<Storage>(OC, 3);
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Storage> out(unwritten<Storage>(N * OC), stream), pre_gelu(unwritten<Storage>(N * OC), stream);
        Buffer<Storage> bias_(bias, stream);
        linear_forward<Storage>(out, with_gelu ? pre_gelu.data() : nullptr, Buffer(x, stream),
                                Buffer(weight, stream), with_bias ? bias_.data() : nullptr, N, C, OC, stream);
        return Outputs{out.values(), pre_gelu.values()};
    });
    const Vector y = reference::linear_forward(doubles(x), doubles(weight),
                                               with_bias ? doubles(bias) : Vector(OC, 0.0), N, C, OC);
    if (with_gelu) expect_close<Storage>("pre_gelu", outputs[1], y, C);
    expect_close<Storage>("out", outputs[0], with_gelu ? reference::map(reference::gelu, y) : y, C);
}

TYPED_TEST(Kernels, LinearForward) {
    for (const auto& [N, C, OC] : linear_shapes()) check_linear_forward<TypeParam>(N, C, OC, true, false);
    check_linear_forward<TypeParam>(33, 129, 65, false, false);
}

TYPED_TEST(Kernels, LinearForwardWithGelu) {
    for (const auto& [N, C, OC] : linear_shapes()) check_linear_forward<TypeParam>(N, C, OC, true, true);
    check_linear_forward<TypeParam>(33, 129, 65, false, true);
}

// A row's bits do not depend on which other rows the call has: generating one token at a time agrees with
// evaluating the whole text.
TYPED_TEST(Kernels, LinearForwardRowsAreIndependent) {
    using Storage = TypeParam;
    const size_t N = 130;
    const StreamPointer stream = open_stream(2);
    for (const auto& [C, OC] : Shapes<2>{{5, 7}, {129, 65}, {776, 257}}) {
        const auto x = normal<Storage>(N * C, 1), weight = normal<Storage>(OC * C, 2, fan_in(C));
        const auto bias = normal<Storage>(OC, 3);
        Buffer<Storage> x_(x, stream.get()), weight_(weight, stream.get()), bias_(bias, stream.get());
        Buffer<Storage> out(unwritten<Storage>(N * OC), stream.get()),
            row_out(unwritten<Storage>(N * OC), stream.get());
        Buffer<Storage> pre_gelu(unwritten<Storage>(N * OC), stream.get());
        Buffer<Storage> row_pre_gelu(unwritten<Storage>(N * OC), stream.get());
        linear_forward<Storage>(out, pre_gelu, x_, weight_, bias_, N, C, OC, stream.get());
        for (size_t first = 0, rows; first < N; first += rows) {
            rows = first < 16 ? 1 : std::min(N - first, size_t{3} * first / 16);
            linear_forward<Storage>(row_out + first * OC, row_pre_gelu + first * OC, x_ + first * C, weight_,
                                    bias_, rows, C, OC, stream.get());
        }
        expect_same_bits({row_out.values(), row_pre_gelu.values()}, {out.values(), pre_gelu.values()},
                         "rows apart");
    }
}

template <typename Storage>
void check_linear_backward(size_t N, size_t C, size_t OC, bool with_dx, bool with_dbias, bool with_gelu) {
    SCOPED_TRACE(testing::Message() << "N " << N << " C " << C << " OC " << OC << " dx " << with_dx
                                    << " dbias " << with_dbias << " gelu " << with_gelu);
    const auto pre_gelu = normal<Storage>(N * C, 1), dout = normal<Storage>(N * OC, 2);
    const auto x =
        with_gelu ? rounded<Storage>(reference::map(reference::gelu, doubles(pre_gelu))) : pre_gelu;
    const auto weight = normal<Storage>(OC * C, 3, fan_in(OC));
    const auto dweight = normal<float>(OC * C, 7), dbias = normal<float>(OC, 8);
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Storage> dx(unwritten<Storage>(N * C), stream), pre_gelu_(pre_gelu, stream);
        Buffer<float> dweight_sum(dweight, stream), dbias_sum(dbias, stream);
        linear_backward<Storage>(with_dx ? dx.data() : nullptr, dweight_sum,
                                 with_dbias ? dbias_sum.data() : nullptr, Buffer(dout, stream),
                                 Buffer(x, stream), Buffer(weight, stream),
                                 with_gelu ? pre_gelu_.data() : nullptr, N, C, OC, stream);
        return Outputs{dx.values(), dweight_sum.values(), dbias_sum.values()};
    });
    if (with_dx) {
        Vector dx = reference::matmul(doubles(dout), doubles(weight), false, false, N, C, OC);
        for (size_t i = 0; with_gelu && i < N * C; ++i)
            dx[i] *= reference::gelu_gradient(to_double(pre_gelu[i]));
        expect_close<Storage>("dx", outputs[0], dx, OC);
    }
    Vector dweight_expected = reference::matmul(doubles(dout), doubles(x), true, false, OC, C, N);
    for (size_t i = 0; i < OC * C; ++i) dweight_expected[i] += dweight[i];
    expect_close<float>("dweight", outputs[1], dweight_expected, N);
    if (with_dbias) {
        Vector dbias_expected = reference::column_sums(doubles(dout), N, OC);
        for (size_t o = 0; o < OC; ++o) dbias_expected[o] += dbias[o];
        expect_close<float>("dbias", outputs[2], dbias_expected, N);
    }
}

TYPED_TEST(Kernels, LinearBackward) {
    for (const auto& [N, C, OC] : linear_shapes())
        check_linear_backward<TypeParam>(N, C, OC, true, true, false);
    check_linear_backward<TypeParam>(33, 40, 65, false, true, false);
    check_linear_backward<TypeParam>(33, 40, 65, true, false, false);
    check_linear_backward<TypeParam>(33, 40, 65, false, false, false);
}

// Forward and backward at a size at which no operand fits a cache: a packed GEMM works in groups then.
TYPED_TEST(Kernels, LinearLargerThanAnyCache) {
    const size_t OC = on_simulator(open_stream().get()) ? 1201 : 12007;
    check_linear_forward<TypeParam>(3, 776, OC, true, false);
    check_linear_backward<TypeParam>(3, 776, OC, true, true, false);
}

TYPED_TEST(Kernels, LinearBackwardWithGelu) {
    for (const auto& [N, C, OC] : linear_shapes())
        check_linear_backward<TypeParam>(N, C, OC, true, true, true);
    check_linear_backward<TypeParam>(33, 40, 65, true, false, true);
}

TYPED_TEST(Kernels, LinearGradientIsNumeric) {
    using Storage = TypeParam;
    const size_t N = 3, C = 5, OC = 7;
    for (const bool with_gelu : {false, true}) {
        SCOPED_TRACE(testing::Message() << "gelu " << with_gelu);
        const auto input = normal<Storage>(N * C, 1), dout = normal<Storage>(N * OC, 2);
        const auto weight = normal<Storage>(OC * C, 3), bias = normal<Storage>(OC, 4);
        const auto x = with_gelu ? rounded<Storage>(reference::map(reference::gelu, doubles(input))) : input;
        const StreamPointer stream = open_stream();
        Buffer<Storage> dx(unwritten<Storage>(N * C), stream.get()), pre_gelu(input, stream.get());
        Buffer<float> dweight(std::vector<float>(OC * C), stream.get()),
            dbias(std::vector<float>(OC), stream.get());
        linear_backward<Storage>(dx, dweight, dbias, Buffer(dout, stream.get()), Buffer(x, stream.get()),
                                 Buffer(weight, stream.get()), with_gelu ? pre_gelu.data() : nullptr, N, C,
                                 OC, stream.get());
        const auto loss = [&](const Vector& input_, const Vector& weight_, const Vector& bias_) {
            const Vector x_ = with_gelu ? reference::map(reference::gelu, input_) : input_;
            return reference::dot(doubles(dout), reference::linear_forward(x_, weight_, bias_, N, C, OC));
        };
        const Vector input_ = doubles(input), weight_ = doubles(weight), bias_ = doubles(bias);
        const auto numeric = reference::numeric_gradient;
        expect_close<Storage>("dx", dx.values(),
                              numeric([&](const Vector& p) { return loss(p, weight_, bias_); }, input_), OC);
        // x is rounded where it stands for a GELU, and with it dweight.
        expect_close<Storage>("dweight", dweight.values(),
                              numeric([&](const Vector& p) { return loss(input_, p, bias_); }, weight_), N);
        expect_close<float>("dbias", dbias.values(),
                            numeric([&](const Vector& p) { return loss(input_, weight_, p); }, bias_), N);
    }
}

// GELU and its gradient, alone: a linear layer whose weight is the identity. n values in rows of C, so that
// they pass through a vector's lanes and through the tail.
template <typename Storage>
std::pair<Vector, Vector> gelu_and_gradient(const std::vector<Storage>& x, size_t C) {
    const size_t N = x.size() / C;
    Vector identity(C * C, 0.0);
    for (size_t c = 0; c < C; ++c) identity[c * C + c] = 1;
    const auto weight = rounded<Storage>(identity), ones = rounded<Storage>(Vector(N * C, 1.0));
    const StreamPointer stream = open_stream();
    Buffer<Storage> out(unwritten<Storage>(N * C), stream.get()),
        pre_gelu(unwritten<Storage>(N * C), stream.get());
    Buffer<Storage> dx(unwritten<Storage>(N * C), stream.get());
    Buffer<float> dweight(std::vector<float>(C * C), stream.get());
    linear_forward<Storage>(out, pre_gelu, Buffer(x, stream.get()), Buffer(weight, stream.get()), nullptr, N,
                            C, C, stream.get());
    linear_backward<Storage>(dx, dweight, nullptr, Buffer(ones, stream.get()), out,
                             Buffer(weight, stream.get()), pre_gelu, N, C, C, stream.get());
    EXPECT_EQ(pre_gelu.values(), doubles(x));
    return {out.values(), dx.values()};
}

// GELU by itself gives the bits that it gives as part of a linear layer: in vectors, in tails, and with
// buffers that are not aligned to vectors.
TYPED_TEST(Kernels, GeluForwardIsTheLinearLayers) {
    using Storage = TypeParam;
    const auto one = rounded<Storage>({1.0});
    for (const auto& [n, offset] : Shapes<2>{{1, 0}, {7, 0}, {64, 0}, {1001, 1}, {40000, 0}}) {
        SCOPED_TRACE(testing::Message() << "n " << n << " offset " << offset);
        const auto x = normal<Storage>(n + offset, 1, 3);
        const Outputs outputs = run_op([&](Stream* stream) {
            Buffer<Storage> out(unwritten<Storage>(n + offset), stream), x_(x, stream);
            gelu_forward<Storage>(out + offset, x_ + offset, n, stream);
            Vector values = out.values();
            values.erase(values.begin(), values.begin() + offset);
            return Outputs{values};
        });
        const std::vector<Storage> entries(x.begin() + offset, x.end());
        expect_close<Storage>("out", outputs[0], reference::map(reference::gelu, doubles(entries)), 1);
        const StreamPointer stream = open_stream();
        Buffer<Storage> out(unwritten<Storage>(n), stream.get()),
            pre_gelu(unwritten<Storage>(n), stream.get());
        linear_forward<Storage>(out, pre_gelu, Buffer(entries, stream.get()), Buffer(one, stream.get()),
                                nullptr, n, 1, 1, stream.get());
        expect_same_bits({out.values()}, outputs, "as part of a linear layer");
    }
}

TYPED_TEST(Kernels, GeluAtPublishedValues) {
    using Storage = TypeParam;
    const Vector x = {-100, -10, -3, -1, 0, 1, 3, 10, 100};
    const Vector value = {-0.0, -0.0, -0.0036374, -0.1588080, 0, 0.8411920, 2.9963626, 10, 100};
    const Vector gradient = {0, 0, -0.0115842, -0.0829641, 0.5, 1.0829641, 1.0115842, 1, 1};
    const size_t n = x.size();
    Vector rotated(n * n);  // every value in every column
    for (size_t i = 0; i < n * n; ++i) rotated[i] = x[(i + i / n) % n];
    for (const size_t C : {size_t{1}, n}) {
        const auto [out, dx] = gelu_and_gradient(rounded<Storage>(rotated), C);
        for (size_t i = 0; i < n * n; ++i) {
            const size_t k = (i + i / n) % n;
            const double roundoff = std::is_same_v<Storage, float> ? 0 : unit_roundoff<Storage>();
            EXPECT_NEAR(out[i], value[k], 1e-6 + roundoff * std::abs(value[k])) << "gelu(" << x[k] << ")";
            EXPECT_NEAR(dx[i], gradient[k], 1e-6 + roundoff * std::abs(gradient[k]))
                << "gelu'(" << x[k] << ")";
        }
    }
}

TYPED_TEST(Kernels, GeluEverywhere) {
    using Storage = TypeParam;
    Vector x;
    for (double v = -14; v <= 14; v += 1.0 / 257) x.push_back(v);
    for (double exponent = -30; exponent <= 1; exponent += 0.1) {
        x.push_back(std::exp2(exponent));
        x.push_back(-std::exp2(exponent));
    }
    const double huge = std::ldexp(1.0, Format<Storage>::max_exponent - 1);  // its square and cube overflow
    for (const double v : {huge, -huge, std::sqrt(huge), -std::sqrt(huge)}) x.push_back(v);
    const auto stored = rounded<Storage>(x);
    const auto [out, dx] = gelu_and_gradient(stored, 1);
    const double roundoff = unit_roundoff<Storage>();
    const double smallest = std::ldexp(1.0, Format<Storage>::min_exponent - Format<Storage>::precision + 1);
    for (size_t i = 0; i < x.size(); ++i) {
        const double v = to_double(stored[i]), value = reference::gelu(v),
                     gradient = reference::gelu_gradient(v);
        ASSERT_NEAR(out[i], value, 4 * roundoff * (std::abs(value) + std::min(std::abs(v), 1.0)) + smallest)
            << v;
        ASSERT_NEAR(dx[i], gradient, 8 * roundoff) << v;
    }
}

// ---------------------------------------------------------------------------------------------------
// Attention

// scale is that of q and k: the scores of unit vectors are of order 1; at 6, one token takes all.
template <typename Storage>
void check_attention(size_t B, size_t T, size_t C, size_t NH, double scale = 1) {
    SCOPED_TRACE(testing::Message() << "B " << B << " T " << T << " C " << C << " NH " << NH << " scale "
                                    << scale);
    const auto qkv = normal<Storage>(B * T * 3 * C, 1, scale), dout = normal<Storage>(B * T * C, 2);
    const auto forward = reference::attention_forward(doubles(qkv), B, T, C, NH);
    const auto kept_out = rounded<Storage>(forward.out);
    const auto kept_lse = rounded<float>(forward.lse);
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Storage> out(unwritten<Storage>(B * T * C), stream),
            dqkv(unwritten<Storage>(B * T * 3 * C), stream);
        Buffer<float> lse(unwritten<float>(B * NH * T), stream);
        attention_forward<Storage>(out, lse, Buffer(qkv, stream), B, T, C, NH, stream);
        attention_backward<Storage>(dqkv, Buffer(dout, stream), Buffer(kept_out, stream),
                                    Buffer(kept_lse, stream), Buffer(qkv, stream), B, T, C, NH, stream);
        return Outputs{out.values(), lse.values(), dqkv.values()};
    });
    // fp32 holds a score to within its size times the roundoff, and exp turns that into a relative error.
    const double slack = std::max(1.0, scale * scale);
    expect_close<Storage>("out", outputs[0], forward.out, T + C / NH, slack);
    expect_close<float>("lse", outputs[1], forward.lse, T + C / NH, slack);
    // Each element of dq and dk has passed through sums over the head, over T and over the head again.
    expect_close<Storage>("dqkv", outputs[2],
                          reference::attention_backward(doubles(dout), doubles(qkv), B, T, C, NH), T + C / NH,
                          2 * slack);
}

// Lengths below, at and above the tiles of each backend; several rows and heads at one of them.
TYPED_TEST(Kernels, Attention) {
    for (const size_t T : {31, 65}) {
        for (const size_t HS : {1, 5, 13, 64, 128}) check_attention<TypeParam>(1, T, HS, 1);
    }
    for (const size_t HS : {1, 5, 12, 16, 32, 64, 80, 128}) check_attention<TypeParam>(2, 17, 3 * HS, 3);
    for (const size_t T : {1, 64, 128, 200}) {
        for (const size_t HS : {16, 32, 64, 80, 128}) check_attention<TypeParam>(1, T, HS, 1);
    }
    check_attention<TypeParam>(1, 33, 256, 1);
    check_attention<TypeParam>(7, 33, 64, 64);
}

TYPED_TEST(Kernels, AttentionWithLargeScores) {
    for (const size_t HS : {32, 64, 128}) check_attention<TypeParam>(1, 100, HS, 1, 6);
}

// Row t is a function of tokens 0..t alone: changing the later ones leaves its bits.
TYPED_TEST(Kernels, AttentionIsCausal) {
    using Storage = TypeParam;
    const StreamPointer stream = open_stream(2);
    const size_t T = 100, NH = 2;
    for (const size_t HS : {16, 64, 128}) {
        const size_t C = NH * HS;
        const auto run = [&](const std::vector<Storage>& qkv) {
            Buffer<Storage> out(unwritten<Storage>(T * C), stream.get());
            Buffer<float> lse(unwritten<float>(NH * T), stream.get());
            attention_forward<Storage>(out, lse, Buffer(qkv, stream.get()), 1, T, C, NH, stream.get());
            return Outputs{out.values(), lse.values()};
        };
        const auto qkv = normal<Storage>(T * 3 * C, 1);
        const Outputs whole = run(qkv);
        for (const size_t kept : {size_t{1}, size_t{31}, size_t{32}, size_t{64}, size_t{99}}) {
            SCOPED_TRACE(testing::Message() << "tokens kept " << kept);
            auto changed = normal<Storage>(T * 3 * C, 2, 5);
            std::copy_n(qkv.begin(), kept * 3 * C, changed.begin());
            Outputs some = run(changed);
            for (size_t h = 0; h < NH; ++h) {
                std::copy_n(whole[1].begin() + h * T + kept, T - kept, some[1].begin() + h * T + kept);
            }
            std::copy(whole[0].begin() + kept * C, whole[0].end(), some[0].begin() + kept * C);
            expect_same_bits(some, whole, "earlier rows");
        }
    }
}

TYPED_TEST(Kernels, AttentionGradientIsNumeric) {
    using Storage = TypeParam;
    const size_t B = 2, T = 5, NH = 2;
    for (const size_t HS : {3, 64}) {
        const size_t C = NH * HS;
        const auto qkv = normal<Storage>(B * T * 3 * C, 1), dout = normal<Storage>(B * T * C, 2);
        const auto forward = reference::attention_forward(doubles(qkv), B, T, C, NH);
        const StreamPointer stream = open_stream();
        Buffer<Storage> dqkv(unwritten<Storage>(B * T * 3 * C), stream.get());
        attention_backward<Storage>(dqkv, Buffer(dout, stream.get()),
                                    Buffer(rounded<Storage>(forward.out), stream.get()),
                                    Buffer(rounded<float>(forward.lse), stream.get()),
                                    Buffer(qkv, stream.get()), B, T, C, NH, stream.get());
        const auto loss = [&](const Vector& p) {
            return reference::dot(doubles(dout), reference::attention_forward(p, B, T, C, NH).out);
        };
        expect_close<Storage>("dqkv", dqkv.values(), reference::numeric_gradient(loss, doubles(qkv)),
                              T + C / NH);
    }
}

// ---------------------------------------------------------------------------------------------------
// Head and loss

size_t padded(size_t V) { return (V + 127) / 128 * 128; }

template <typename Storage>
void check_logits(size_t N, size_t C, size_t V) {
    const size_t Vp = padded(V);
    SCOPED_TRACE(testing::Message() << "N " << N << " C " << C << " Vp " << Vp);
    const auto x = normal<Storage>(N * C, 1), weight = normal<Storage>(Vp * C, 2, fan_in(C));
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<float> logits(unwritten<float>(N * Vp), stream);
        logits_forward<Storage>(logits, Buffer(x, stream), Buffer(weight, stream), N, C, Vp, stream);
        return Outputs{logits.values()};
    });
    expect_close<float>("logits", outputs[0],
                        reference::matmul(doubles(x), doubles(weight), false, true, N, Vp, C), C);
}

TYPED_TEST(Kernels, Logits) {
    check_logits<TypeParam>(1, 1, 1);
    check_logits<TypeParam>(7, 5, 129);
    check_logits<TypeParam>(33, 129, 255);
    check_logits<TypeParam>(130, 776, 63);
    check_logits<TypeParam>(3, 24, 50257);
}

// The padding holds NaN here: whatever stands there must not be read into the loss or the gradient.
std::vector<float> with_padding(const std::vector<float>& logits, size_t N, size_t V, size_t Vp) {
    auto result = std::vector<float>(N * Vp, nan_value);
    for (size_t i = 0; i < N; ++i) std::copy_n(logits.begin() + i * V, V, result.begin() + i * Vp);
    return result;
}

template <typename Storage>
Outputs run_cross_entropy(const std::vector<float>& logits, const std::vector<int>& targets, float dloss,
                          size_t N, size_t V, size_t Vp) {
    const auto run = [&](Stream* stream, bool with_gradient) {
        Buffer<float> losses(unwritten<float>(N), stream);
        Buffer<Storage> dlogits(unwritten<Storage>(N * Vp), stream);
        cross_entropy<Storage>(losses, with_gradient ? dlogits.data() : nullptr, Buffer(logits, stream),
                               Buffer(targets, stream), dloss, N, V, Vp, stream);
        return Outputs{losses.values(), dlogits.values()};
    };
    const Outputs outputs = run_op([&](Stream* stream) { return run(stream, true); });
    const StreamPointer stream = open_stream(2);
    expect_same_bits({run(stream.get(), false)[0]}, {outputs[0]}, "loss without gradient");
    if constexpr (std::is_same_v<Storage, float>) {
        Buffer<float> losses(unwritten<float>(N), stream.get()), in_place(logits, stream.get());
        cross_entropy<float>(losses, in_place, in_place, Buffer(targets, stream.get()), dloss, N, V, Vp,
                             stream.get());
        expect_same_bits({losses.values(), in_place.values()}, outputs, "in place");
    }
    return outputs;
}

template <typename Storage>
void check_cross_entropy(size_t N, size_t V, double scale, float dloss = 1) {
    SCOPED_TRACE(testing::Message() << "N " << N << " V " << V << " scale " << scale);
    const size_t Vp = padded(V);
    const auto logits = with_padding(normal<float>(N * V, 1, scale), N, V, Vp);
    auto targets = integers(N, 2, V);
    targets[0] = static_cast<int>(V) - 1;  // the last real column, next to the padding
    const Outputs outputs = run_cross_entropy<Storage>(logits, targets, dloss, N, V, Vp);
    const double slack = std::max(1.0, scale);
    expect_close<float>("losses", outputs[0],
                        reference::cross_entropy_forward(doubles(logits), targets, N, V, Vp), 1, slack);
    const Vector expected = reference::cross_entropy_backward(doubles(logits), targets, dloss, N, V, Vp);
    expect_close<Storage>("dlogits", outputs[1], expected, 1, slack);
    for (size_t i = 0; i < N; ++i) {
        double row_sum = 0;
        for (size_t v = 0; v < V; ++v) row_sum += outputs[1][i * Vp + v];
        EXPECT_NEAR(row_sum, 0, 40 * unit_roundoff<Storage>() * dloss);
        for (size_t v = V; v < Vp; ++v) ASSERT_EQ(outputs[1][i * Vp + v], 0) << "padded column " << v;
    }
}

TYPED_TEST(Kernels, CrossEntropy) {
    for (const size_t V : {1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 257, 8003, 50257, 50304}) {
        check_cross_entropy<TypeParam>(3, V, 2);
    }
    check_cross_entropy<TypeParam>(130, 65, 2, 0.37f / 130);
    check_cross_entropy<TypeParam>(33, 257, 30);
}

// Rows that start at no aligned address, so that no kernel may read them as vectors.
TYPED_TEST(Kernels, CrossEntropyOfUnpaddedRows) {
    using Storage = TypeParam;
    const size_t N = 5, V = 131;
    const auto logits = normal<float>(N * V, 1, 3);
    const auto targets = integers(N, 2, V);
    const Outputs outputs = run_cross_entropy<Storage>(logits, targets, 0.5, N, V, V);
    const Vector losses = reference::cross_entropy_forward(doubles(logits), targets, N, V, V);
    const Vector dlogits = reference::cross_entropy_backward(doubles(logits), targets, 0.5, N, V, V);
    expect_close<float>("losses", outputs[0], losses, V);
    expect_close<Storage>("dlogits", outputs[1], dlogits, V);
}

// A softmax that forgets to subtract the maximum, or a log of a rounded probability, fails here.
TYPED_TEST(Kernels, CrossEntropyAtExtremes) {
    using Storage = TypeParam;
    const size_t N = 4, V = 257, Vp = padded(V);
    auto logits = normal<float>(N * V, 1, 0.5, -95);
    logits[1 * V + 7] = 95;  // row 1: the target
    logits[2 * V + 7] = 95;  // row 2: another token
    for (size_t v = 0; v < V; ++v)
        logits[3 * V + v] = v == 5 ? 0 : -infinity;  // row 3: only token 5 is possible
    const std::vector<int> targets = {256, 7, 8, 5};
    const auto rows = with_padding(logits, N, V, Vp);
    const Outputs outputs = run_cross_entropy<Storage>(rows, targets, 1, N, V, Vp);
    const Vector losses = reference::cross_entropy_forward(doubles(rows), targets, N, V, Vp);
    for (size_t i = 0; i < N; ++i)
        EXPECT_NEAR(outputs[0][i], losses[i], 1e-5 * std::max(1.0, losses[i])) << i;
    const Vector dlogits = reference::cross_entropy_backward(doubles(rows), targets, 1, N, V, Vp);
    for (size_t i = 0; i < N * Vp; ++i) {
        ASSERT_NEAR(outputs[1][i], dlogits[i], 1e-5 * std::abs(dlogits[i]) + unit_roundoff<Storage>()) << i;
    }
}

TYPED_TEST(Kernels, CrossEntropyGradientIsNumeric) {
    using Storage = TypeParam;
    const size_t N = 3, V = 9, Vp = padded(V);
    const auto values = normal<float>(N * V, 1, 2);
    const std::vector<int> targets = {0, 8, 4};
    const StreamPointer stream = open_stream();
    Buffer<float> losses(unwritten<float>(N), stream.get());
    Buffer<Storage> dlogits(unwritten<Storage>(N * Vp), stream.get());
    cross_entropy<Storage>(losses, dlogits, Buffer(with_padding(values, N, V, Vp), stream.get()),
                           Buffer(targets, stream.get()), 0.7f, N, V, Vp, stream.get());
    const auto loss = [&](const Vector& logits) {
        return 0.7f *
               reference::dot(Vector(N, 1.0), reference::cross_entropy_forward(logits, targets, N, V, V));
    };
    const Vector actual = dlogits.values(), numeric = reference::numeric_gradient(loss, doubles(values));
    Vector expected(N * Vp, 0.0);
    for (size_t i = 0; i < N * V; ++i) expected[i / V * Vp + i % V] = numeric[i];
    expect_close<Storage>("dlogits", actual, expected, V);
}

// ---------------------------------------------------------------------------------------------------
// NaN and infinity must stay visible: skipped steps and the finite check rely on it

TYPED_TEST(Kernels, NanIsNotSwallowed) {
    using Storage = TypeParam;
    const size_t T = 9, C = 40, V = 257, Vp = padded(V), bad = 4;
    const StreamPointer stream = open_stream();
    const auto expect_only_bad_row = [&](const char* op, const Vector& out, size_t cols,
                                         bool later_rows_too = false) {
        for (size_t i = 0; i < out.size(); ++i) {
            const bool expected = i / cols == bad || (later_rows_too && i / cols > bad);
            ASSERT_EQ(std::isnan(out[i]), expected) << op << " row " << i / cols << " column " << i % cols;
        }
    };
    auto x = normal<Storage>(T * C, 1);
    x[bad * C + 7] = from_float<Storage>(nan_value);
    const auto weight = normal<Storage>(3 * C * C, 2), ones = rounded<Storage>(Vector(3 * C, 1.0));
    Buffer<Storage> out(unwritten<Storage>(T * C), stream.get()),
        pre_gelu(unwritten<Storage>(T * C), stream.get());
    Buffer<float> mean(unwritten<float>(T), stream.get()), rstd(unwritten<float>(T), stream.get());

    linear_forward<Storage>(out, pre_gelu, Buffer(x, stream.get()), Buffer(weight, stream.get()),
                            Buffer(ones, stream.get()), T, C, C, stream.get());
    expect_only_bad_row("linear_forward", out.values(), C);
    layernorm_forward<Storage>(out, mean, rstd, Buffer(x, stream.get()), Buffer(ones, stream.get()),
                               Buffer(ones, stream.get()), T, C, stream.get());
    expect_only_bad_row("layernorm_forward", out.values(), C);

    auto qkv = normal<Storage>(T * 3 * C, 3);
    Buffer<float> lse(unwritten<float>(T), stream.get());
    qkv[bad * 3 * C + 7] = from_float<Storage>(nan_value);  // in q: its own row
    attention_forward<Storage>(out, lse, Buffer(qkv, stream.get()), 1, T, C, 1, stream.get());
    expect_only_bad_row("attention_forward, q", out.values(), C);
    qkv[bad * 3 * C + 7] = from_float<Storage>(1);
    qkv[bad * 3 * C + C + 7] = from_float<Storage>(nan_value);  // in k: every row that sees it
    attention_forward<Storage>(out, lse, Buffer(qkv, stream.get()), 1, T, C, 1, stream.get());
    expect_only_bad_row("attention_forward, k", out.values(), C, true);

    auto logits = normal<float>(T * V, 4);
    logits[bad * V + 7] = nan_value;
    Buffer<float> losses(unwritten<float>(T), stream.get());
    Buffer<Storage> dlogits(unwritten<Storage>(T * Vp), stream.get());
    cross_entropy<Storage>(losses, dlogits, Buffer(with_padding(logits, T, V, Vp), stream.get()),
                           Buffer(integers(T, 5, V), stream.get()), 1, T, V, Vp, stream.get());
    expect_only_bad_row("cross_entropy", losses.values(), 1);
    EXPECT_TRUE(std::isnan(dlogits.values()[bad * Vp]));
}

// ---------------------------------------------------------------------------------------------------
// Reductions

// Neighbours added level by level; an odd one out moves up as it is.
double tree_sum(Vector x) {
    while (x.size() > 1) {
        Vector sums;
        for (size_t i = 0; i < x.size(); i += 2) sums.push_back(i + 1 < x.size() ? x[i] + x[i + 1] : x[i]);
        x = sums;
    }
    return x[0];
}

TEST(Reductions, Sum) {
    for (const size_t n : {1, 2, 3, 7, 33, 65, 130, 1037, 8003, 1100003}) {
        const auto x = normal<float>(n, 1, 1, 0.5);
        const Outputs outputs = run_op([&](Stream* stream) {
            Buffer<double> out(unwritten<double>(1), stream);
            sum(out, Buffer(x, stream), n, stream);
            return Outputs{out.values()};
        });
        long double expected = 0, magnitude = 0;
        for (const float value : x) {
            expected += value;
            magnitude += std::abs(value);
        }
        EXPECT_NEAR(outputs[0][0], static_cast<double>(expected), 1e-14 * static_cast<double>(magnitude))
            << n;
        EXPECT_EQ(outputs[0][0], tree_sum(doubles(x))) << n;
    }
}

double sum_of_squares_of(const std::vector<float>& x, size_t rows, size_t cols) {
    return run_op([&](Stream* stream) {
        Buffer<double> out(unwritten<double>(1), stream);
        sum_of_squares(out, Buffer(x, stream), rows, cols, stream);
        return Outputs{out.values()};
    })[0][0];
}

TEST(Reductions, SumOfSquares) {
    for (const auto& [rows, cols] :
         Shapes<2>{{1, 1}, {3, 7}, {33, 1}, {1, 130}, {65, 129}, {7, 8003}, {1037, 776}}) {
        const auto x = normal<float>(rows * cols, 1);
        long double expected = 0;
        for (const float value : x) expected += static_cast<long double>(value) * value;
        EXPECT_NEAR(sum_of_squares_of(x, rows, cols), static_cast<double>(expected),
                    1e-13 * static_cast<double>(expected));
    }
}

// Rows are summed one by one and then in order, so that the rows may lie on different ranks.
TEST(Reductions, SumOfSquaresGoesRowByRow) {
    const size_t rows = 65, cols = 129;
    const StreamPointer stream = open_stream(2);
    Buffer<double> out(unwritten<double>(1), stream.get());
    // Another order often gives the same bits, but not ten times.
    for (unsigned seed = 1; seed <= 10; ++seed) {
        const auto x = normal<float>(rows * cols, seed);
        double expected = 0;
        for (size_t i = 0; i < rows; ++i) {
            const std::vector<float> row(x.begin() + i * cols, x.begin() + (i + 1) * cols);
            sum_of_squares(out, Buffer(row, stream.get()), 1, cols, stream.get());
            expected += out.values()[0];
        }
        EXPECT_EQ(sum_of_squares_of(x, rows, cols), expected) << seed;
    }
}

TEST(Reductions, SumOfSquaresAtExtremes) {
    const size_t rows = 3, cols = 43;
    for (const float scale : {1e-30f, 1e30f}) {
        const double square = static_cast<double>(scale) * scale;
        EXPECT_NEAR(sum_of_squares_of(std::vector<float>(rows * cols, scale), rows, cols) / square,
                    rows * cols, 1e-9);
    }
    auto mixed = normal<float>(rows * cols, 1);
    mixed[100] = 1e30f;
    EXPECT_NEAR(sum_of_squares_of(mixed, rows, cols) / (1e30f * 1e30), 1, 1e-6);
    for (const float bad : {infinity, -infinity, nan_value}) {
        for (const size_t where : {size_t{0}, size_t{77}, rows * cols - 1}) {
            auto x = normal<float>(rows * cols, 1);
            x[where] = bad;
            EXPECT_FALSE(std::isfinite(sum_of_squares_of(x, rows, cols))) << bad << " at " << where;
        }
    }
    EXPECT_EQ(sum_of_squares_of(std::vector<float>(rows * cols), rows, cols), 0);
}

// ---------------------------------------------------------------------------------------------------
// Sums over leaves and ranks

// Neighbours level by level, an odd one out as it is, each sum rounded to fp32.
std::vector<float> sum_of_parts(std::vector<std::vector<float>> parts) {
    while (parts.size() > 1) {
        std::vector<std::vector<float>> level;
        for (size_t p = 0; p + 1 < parts.size(); p += 2) {
            level.push_back(parts[p]);
            for (size_t i = 0; i < parts[p].size(); ++i) level.back()[i] += parts[p + 1][i];
        }
        if (parts.size() % 2 == 1) level.push_back(parts.back());
        parts = level;
    }
    return parts[0];
}

TYPED_TEST(Kernels, TreeSum) {
    using Storage = TypeParam;
    for (const size_t count : {1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 33}) {
        for (const auto& [n, stride] : Shapes<2>{{1, 1}, {7, 8}, {130, 136}, {1031, 1040}, {64, 67}}) {
            const auto memory = normal<Storage>(count * stride, 1);
            std::vector<std::vector<float>> parts(count);
            for (size_t p = 0; p < count; ++p) {
                for (size_t i = 0; i < n; ++i) parts[p].push_back(to_float(memory[p * stride + i]));
            }
            const Outputs outputs = run_op([&](Stream* stream) {
                Buffer<float> out(unwritten<float>(n), stream);
                tree_sum<Storage>(out, Buffer(memory, stream), count, stride, n, stream);
                return Outputs{out.values()};
            });
            expect_same_bits(outputs, {doubles(sum_of_parts(parts))}, std::to_string(count) + " parts");
        }
    }
}

TYPED_TEST(Kernels, Casts) {
    using Storage = TypeParam;
    for (const size_t n : {1, 5, 64, 1031}) {
        auto x = normal<float>(n, 1);
        x[n / 2] = infinity;
        x[n / 3] = 65520;  // infinity in fp16
        x[n - 1] = -0.0f;
        std::vector<Storage> stored(n);
        std::transform(x.begin(), x.end(), stored.begin(), from_float<Storage>);
        const Outputs outputs = run_op([&](Stream* stream) {
            Buffer<Storage> to(unwritten<Storage>(n), stream);
            Buffer<float> through(x, stream);
            cast<Storage>(to, Buffer(x, stream), n, stream);
            round_through<Storage>(through, n, stream);
            return Outputs{to.values(), through.values()};
        });
        expect_same_bits(outputs, {doubles(stored), doubles(stored)}, "cast");
    }
}

TEST(Reductions, Add) {
    for (const size_t n : {1, 5, 64, 1031}) {
        const auto a = normal<float>(n, 1), b = normal<float>(n, 2);
        std::vector<float> expected(n);
        std::transform(a.begin(), a.end(), b.begin(), expected.begin(), std::plus<float>());
        const Outputs outputs = run_op([&](Stream* stream) {
            Buffer<float> out(unwritten<float>(n), stream), left(a, stream), right(b, stream);
            add(out, left, right, n, stream);
            add(left, left, right, n, stream);
            return Outputs{out.values(), left.values()};
        });
        expect_same_bits(outputs, {doubles(expected), doubles(expected)}, "add");
    }
}

// ---------------------------------------------------------------------------------------------------
// AdamW

AdamWStep adamw_step(const reference::AdamW& config, int t, double grad_scale = 1) {
    const auto single = [](double x) { return static_cast<float>(x); };
    return {.lr = single(config.lr),
            .beta1 = single(config.beta1),
            .beta2 = single(config.beta2),
            .eps = single(config.eps),
            .weight_decay = single(config.weight_decay),
            .bias_correction1 = single(1 - std::pow(config.beta1, t)),
            .bias_correction2 = single(1 - std::pow(config.beta2, t)),
            .grad_scale = single(grad_scale),
            .cautious = config.cautious};
}

// The random word of entry i of a call.
uint32_t rounding_word(const StateRounding& rounding, size_t i) {
    const size_t entry = rounding.first + i;
    return random_bits(rounding.seed, RandomStream::rounding, rounding.step, entry / 4)[entry % 4];
}

// The averages are `exact`, rounded with 16 bits of each entry's word. fp32 may be off by `slack`, and the
// decision with it where it is a close one: seldom.
void expect_stochastic(const char* name, const Vector& actual, const Vector& exact, const Vector& slack,
                       const StateRounding& rounding, unsigned shift) {
    size_t close = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
        const unsigned random = rounding_word(rounding, i) >> shift & 0xffffu;
        const double low = reference::stochastic_bf16(exact[i] - slack[i], random);
        const double high = reference::stochastic_bf16(exact[i] + slack[i], random);
        ASSERT_TRUE(low <= actual[i] && actual[i] <= high)
            << name << "[" << i << "] is " << actual[i] << " of " << exact[i] << ", not " << low << " to "
            << high;
        close += low != high;
    }
    EXPECT_LE(close, 3 + exact.size() / 500) << name;
}

// How far fp32 may be off in average + pull (x - average): half a unit for each rounding of its parts.
double average_slack(double average, double pull, double x) {
    return 0x1p-23 * (std::abs(average) + 4 * pull * std::abs(x));
}

// Steps with bf16 averages, each judged by itself: from the averages that the one before it has left.
template <typename Storage>
void check_adamw_bf16(size_t n, size_t first) {
    SCOPED_TRACE(testing::Message() << "n " << n << " first " << first);
    const reference::AdamW config{
        .lr = 0.01, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8, .weight_decay = 0.1};
    const double grad_scale = 0.3f;
    const auto start = normal<float>(n, 1, 0.02);
    const auto rounding = [&](int t) {
        return StateRounding{1ull << 40 | 5, static_cast<uint32_t>(t), first};
    };
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Storage> param(rounded<Storage>(doubles(start)), stream);
        Buffer<float> master(start, stream);
        Buffer<bf16_t> m(std::vector<bf16_t>(n), stream), v(std::vector<bf16_t>(n), stream);
        Outputs after_each_step;
        for (int t = 1; t <= 3; ++t) {
            adamw_update<Storage, bf16_t>(param, master, m, v, Buffer(normal<float>(n, 10 + t, 2), stream), n,
                                          adamw_step(config, t, grad_scale), rounding(t), stream);
            for (const Vector& x : {master.values(), m.values(), v.values()}) after_each_step.push_back(x);
        }
        return after_each_step;
    });
    Vector p = doubles(start), m(n), v(n), m_slack(n), v_slack(n);
    for (int t = 1; t <= 3; ++t) {
        Vector grad = doubles(normal<float>(n, 10 + t, 2));
        for (size_t i = 0; i < n; ++i) {
            grad[i] *= grad_scale;
            m_slack[i] = average_slack(m[i], 1 - config.beta1, grad[i]);
            v_slack[i] = average_slack(v[i], 1 - config.beta2, grad[i] * grad[i]);
        }
        reference::adamw_update(p, m, v, grad, config, t);
        const Vector* const after = &outputs[static_cast<size_t>(3 * (t - 1))];
        expect_close<float>("master", after[0], p, 1);
        expect_stochastic("m", after[1], m, m_slack, rounding(t), 0);
        expect_stochastic("v", after[2], v, v_slack, rounding(t), 16);
        p = after[0], m = after[1], v = after[2];
    }
}

TYPED_TEST(Kernels, AdamWWithBf16Averages) {
    for (const size_t n : {1, 3, 7, 33, 130, 50257}) check_adamw_bf16<TypeParam>(n, 64);
    for (const size_t first : {size_t{1}, size_t{7}, (size_t{1} << 35) + 2})
        check_adamw_bf16<TypeParam>(601, first);
}

// Several steps in Storage with a master copy, or in float without; each judged against the reference.
template <typename Storage>
void check_adamw(size_t n, bool with_master, bool cautious = false) {
    SCOPED_TRACE(testing::Message() << "n " << n << " master " << with_master << " cautious " << cautious);
    // A large decay where it is to be seen which entries have it.
    const reference::AdamW config{.lr = 0.01,
                                  .beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .eps = 1e-8,
                                  .weight_decay = cautious ? 5.0 : 0.1,
                                  .cautious = cautious};
    const double grad_scale = 0.3;
    const int steps = 5;
    const auto start = normal<float>(n, 1, 0.02);
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Storage> param(rounded<Storage>(doubles(start)), stream);
        Buffer<float> master(start, stream), m(std::vector<float>(n), stream),
            v(std::vector<float>(n), stream);
        for (int t = 1; t <= steps; ++t) {
            adamw_update<Storage, float>(param, with_master ? master.data() : nullptr, m, v,
                                         Buffer(normal<float>(n, 10 + t, 2), stream), n,
                                         adamw_step(config, t, grad_scale), {}, stream);
        }
        return Outputs{param.values(), master.values(), m.values(), v.values()};
    });
    Vector p = doubles(start), m(n), v(n);
    for (int t = 1; t <= steps; ++t) {
        Vector grad = doubles(normal<float>(n, 10 + t, 2));
        for (double& g : grad) g *= grad_scale;
        reference::adamw_update(p, m, v, grad, config, t);
    }
    expect_close<Storage>("param", outputs[0], p, steps);
    expect_close<float>("m", outputs[2], m, steps);
    expect_close<float>("v", outputs[3], v, steps);
    if (with_master) {
        expect_close<float>("master", outputs[1], p, steps);
        for (size_t i = 0; i < n; ++i) {
            const Storage expected = from_float<Storage>(static_cast<float>(outputs[1][i]));
            ASSERT_EQ(outputs[0][i], to_double(expected)) << "param is not the rounded master";
        }
    }
}

TYPED_TEST(Kernels, AdamW) {
    for (const size_t n : {1, 3, 7, 33, 65, 130, 50257}) {
        check_adamw<TypeParam>(n, true);
        check_adamw<TypeParam>(n, true, true);
        if constexpr (std::is_same_v<TypeParam, float>) check_adamw<float>(n, false);
    }
}

// n copies of one parameter after `steps` steps with a constant gradient.
Vector adamw_of_constant(float start, float grad, const reference::AdamW& config, int steps) {
    const size_t n = 13;
    const StreamPointer stream = open_stream();
    Buffer<float> p(std::vector<float>(n, start), stream.get());
    Buffer<float> m(std::vector<float>(n), stream.get()), v(std::vector<float>(n), stream.get());
    for (int t = 1; t <= steps; ++t) {
        adamw_update<float, float>(p, nullptr, m, v, Buffer(std::vector<float>(n, grad), stream.get()), n,
                                   adamw_step(config, t), {}, stream.get());
    }
    return p.values();
}

// eps is added after the bias correction: before it, a gradient of 1e-8 moves p by 3e-5 or 2e-4 instead.
TEST(AdamW, EpsilonIsAddedAfterBiasCorrection) {
    for (const double beta2 : {0.999, 0.95}) {
        const reference::AdamW config{
            .lr = 1e-3, .beta1 = 0.9, .beta2 = beta2, .eps = 1e-8, .weight_decay = 0};
        for (const double p : adamw_of_constant(1, 1e-8f, config, 1))
            EXPECT_NEAR(1 - p, 5.000e-4, 1e-7) << beta2;
    }
}

TEST(AdamW, ZeroGradientDecaysOnly) {
    reference::AdamW config{.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0};
    for (const double p : adamw_of_constant(1.7f, 0, config, 3)) EXPECT_EQ(p, 1.7f);
    config.lr = 1e-2;
    config.weight_decay = 0.1;
    for (const double p : adamw_of_constant(1.7f, 0, config, 1))
        EXPECT_NEAR(p, 1.7f * (1 - 1e-3), 1.7 * 0x1p-23);
}

TEST(AdamW, ConstantGradientMovesByLr) {
    const reference::AdamW config{.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0};
    for (const double p : adamw_of_constant(1, 1, config, 10)) EXPECT_NEAR(p, 1 - 10 * 1e-3, 1e-6);
}

// A constant gradient whose changes to v are below half of bf16's last place: to nearest, v stands still when
// 0.001 (g^2 - v) is less than 2^-9 v, at a third of g^2. Stochastically it arrives, up to noise: a step's
// rounding is off by half a unit at most, 2^-8 of v, and 0.999 forgets it in a thousand steps.
TEST(AdamW, Bf16AveragesDoNotStandStill) {
    const size_t n = 64;
    const int steps = 2000;
    const float grad = 0.001f, g2 = grad * grad;
    const reference::AdamW config{.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0};
    const StreamPointer stream = open_stream();
    Buffer<float> p(std::vector<float>(n), stream.get()), grads(std::vector<float>(n, grad), stream.get());
    Buffer<bf16_t> m(std::vector<bf16_t>(n), stream.get()), v(std::vector<bf16_t>(n), stream.get());
    bf16_t to_nearest{0};
    for (int t = 1; t <= steps; ++t) {
        adamw_update<float, bf16_t>(p, nullptr, m, v, grads, n, adamw_step(config, t),
                                    {1, static_cast<uint32_t>(t), 0}, stream.get());
        const float old = to_float(to_nearest);
        to_nearest = from_float<bf16_t>(old + 0.001f * (g2 - old));
    }
    EXPECT_LT(to_float(to_nearest), 0.4f * g2);
    double mean_m = 0, mean_v = 0;
    for (const double x : m.values()) mean_m += x / n;
    for (const double x : v.values()) mean_v += x / n;
    // Variances add up to unit^2/4 / (1 - beta^2) at most.
    const double sigma_m = 0x1p-8 * grad / std::sqrt((1 - 0.9 * 0.9) * n);
    const double sigma_v = 0x1p-8 * g2 / std::sqrt((1 - 0.999 * 0.999) * n);
    EXPECT_NEAR(mean_m, grad, 5 * sigma_m);
    EXPECT_NEAR(mean_v, g2 * (1 - std::pow(0.999, steps)), 5 * sigma_v);
}

// ---------------------------------------------------------------------------------------------------
// Muon

TEST(Muon, Momentum) {
    const double mu = 0.95, grad_scale = 0.3;
    for (const size_t n : {1, 3, 7, 33, 65, 130, 50257}) {
        for (const bool nesterov : {false, true}) {
            SCOPED_TRACE(testing::Message() << "n " << n << " nesterov " << nesterov);
            const auto start = normal<float>(n, 1);
            const Outputs outputs = run_op([&](Stream* stream) {
                Buffer<float> direction(unwritten<float>(n), stream), momentum(start, stream);
                for (unsigned t = 0; t < 3; ++t) {
                    muon_momentum<float>(direction, momentum, Buffer(normal<float>(n, 10 + t, 5), stream), n,
                                         static_cast<float>(mu), nesterov, static_cast<float>(grad_scale), {},
                                         stream);
                }
                return Outputs{direction.values(), momentum.values()};
            });
            Vector momentum = doubles(start), direction;
            for (unsigned t = 0; t < 3; ++t) {
                Vector grad = doubles(normal<float>(n, 10 + t, 5));
                for (double& g : grad) g *= grad_scale;
                direction = reference::muon_momentum(momentum, grad, static_cast<float>(mu), nesterov);
            }
            expect_close<float>("direction", outputs[0], direction, 3);
            expect_close<float>("momentum", outputs[1], momentum, 3);
        }
    }
}

TEST(Muon, Bf16Momentum) {
    const double mu = 0.95f;
    for (const auto& [n, first] : Shapes<2>{{1, 0}, {3, 64}, {33, 5}, {601, 64}, {601, 2}, {50257, 128}}) {
        for (const bool nesterov : {false, true}) {
            SCOPED_TRACE(testing::Message() << "n " << n << " first " << first << " nesterov " << nesterov);
            const auto start = normal<bf16_t>(n, 1);
            const auto gradient = normal<float>(n, 2, 5);
            const StateRounding rounding{77, 9, first};
            const Outputs outputs = run_op([&, size = n](Stream* stream) {
                Buffer<float> direction(unwritten<float>(size), stream);
                Buffer<bf16_t> momentum(start, stream);
                muon_momentum<bf16_t>(direction, momentum, Buffer(gradient, stream), size,
                                      static_cast<float>(mu), nesterov, 1, rounding, stream);
                return Outputs{direction.values(), momentum.values()};
            });
            const Vector grad = doubles(gradient);
            Vector momentum = doubles(start), slack(n);
            for (size_t i = 0; i < n; ++i) slack[i] = average_slack(momentum[i], 1 - mu, grad[i]);
            const Vector direction = reference::muon_momentum(momentum, grad, mu, nesterov);
            expect_close<float>("direction", outputs[0], direction, 1);
            expect_stochastic("momentum", outputs[1], momentum, slack, rounding, 0);
        }
    }
}

// x rounded by an op: with mu 0, the momentum is the gradient.
Vector stochastically_rounded(const std::vector<float>& x, const StateRounding& rounding) {
    const StreamPointer stream = open_stream();
    Buffer<float> direction(unwritten<float>(x.size()), stream.get());
    Buffer<bf16_t> momentum(std::vector<bf16_t>(x.size()), stream.get());
    muon_momentum<bf16_t>(direction, momentum, Buffer(x, stream.get()), x.size(), 0, false, 1, rounding,
                          stream.get());
    return momentum.values();
}

TEST(StochasticRounding, IsUnbiased) {
    const size_t n = 1 << 14;
    for (const double part : {0.02, 0.3, 0.5, 0.9}) {
        for (const double number : {1.0, -1.0, 1.5e-20, 7e30}) {
            const double unit = std::ldexp(1.0, std::ilogb(number) - 7);
            const double below = std::trunc(number / unit) * unit;
            const float x = static_cast<float>(below + std::copysign(part * unit, number));
            double mean_error = 0;
            for (const double y : stochastically_rounded(std::vector<float>(n, x), {3, 4, 0})) {
                ASSERT_TRUE(y == below || y == below + std::copysign(unit, number)) << y << " of " << x;
                mean_error += (y - x) / unit / n;
            }
            EXPECT_LT(std::abs(mean_error), 5 * std::sqrt(part * (1 - part) / n)) << x;
        }
    }
}

// What bf16 holds stays, the numbers at the end of its range too; what is above them does not become
// infinite.
TEST(StochasticRounding, KeepsExactAndExtremeNumbers) {
    const uint32_t stride = on_simulator(open_stream().get()) ? 7 : 1;
    std::vector<float> x;
    for (uint32_t pattern = 0; pattern <= 0xffff; pattern += stride)
        x.push_back(to_float(bf16_t{static_cast<uint16_t>(pattern)}));
    x.insert(x.end(), {infinity, -infinity, nan_value, -nan_value});
    // Every bit of this NaN's fraction is set: a carry would make it -0.
    x.push_back(std::bit_cast<float>(0x7fffffffu));
    x.push_back(std::bit_cast<float>(0xffffffffu));
    const Vector y = stochastically_rounded(x, {1, 2, 64});
    for (size_t i = 0; i < x.size(); ++i)
        ASSERT_TRUE(y[i] == x[i] || (std::isnan(x[i]) && std::isnan(y[i]))) << y[i] << " of " << x[i];

    const float most = std::numeric_limits<float>::max();
    for (const float sign : {1.0f, -1.0f}) {
        for (const double z : stochastically_rounded(std::vector<float>(1000, sign * most), {1, 2, 0}))
            ASSERT_EQ(z, sign * to_float(bf16_t{0x7f7f}));
    }
}

TEST(StochasticRounding, FromFloat) {
    for (uint32_t upper = 0; upper <= 0xffff; ++upper) {
        for (const uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0xffffu}) {
            const float x = std::bit_cast<float>(upper << 16 | lower);
            for (const uint32_t random : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0xffffu}) {
                const float y = to_float(from_float_stochastic<bf16_t>(x, random));
                const double expected = reference::stochastic_bf16(x, random);
                ASSERT_TRUE(y == expected || (std::isnan(y) && std::isnan(x))) << y << " of " << x;
                ASSERT_EQ(std::signbit(y), std::signbit(x)) << x;
            }
        }
    }
}

// Known answers of Philox4x32-10 from its authors' library, Random123 (tests/kat_vectors).
TEST(StochasticRounding, PhiloxGivesKnownAnswers) {
    using Words = std::array<uint32_t, 4>;
    EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
    const uint32_t ones = 0xffffffff;
    EXPECT_EQ(philox({ones, ones, ones, ones}, {ones, ones}),
              (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
    EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
              (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// The numbers of a run are those that the textbook's formula with the C library's log and cos gives one by
// one, at any place and of any length; 1e-15 before rounding is another fp32 once in some ten million.
TEST(Random, NormalsInARunAreThoseOneByOne) {
    size_t different = 0, count = 0;
    for (uint64_t first : {uint64_t{0}, uint64_t{4999}, (uint64_t{1} << 32) - 100}) {
        for (size_t length : {1, 63, 64, 65, 200001}) {
            std::vector<float> run(length + 1, -7.0f);
            random_normals(run.data(), length, 0.02, 42, RandomStream::initialization, 5, first);
            EXPECT_EQ(run[length], -7.0f);
            for (size_t i = 0; i < length; i++, count++) {
                const double expected = 0.02 * random_normal(42, RandomStream::initialization, 5, first + i);
                ASSERT_NEAR(run[i], expected, std::fabs(expected) * 0x1p-24 + 1e-17) << first << " + " << i;
                different += run[i] != static_cast<float>(expected);
            }
        }
    }
    EXPECT_LE(different, 1u) << "of " << count;
}

// x and the flags.
template <typename Storage>
Outputs run_normalize(const std::vector<float>& direction, size_t batch, size_t n, float safety) {
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Storage> x(unwritten<Storage>(batch * n), stream);
        Buffer<int> degenerate(unwritten<int>(batch), stream);
        muon_normalize<Storage>(x, degenerate, Buffer(direction, stream), batch, n, safety, stream);
        return Outputs{x.values(), degenerate.values()};
    });
    if constexpr (std::is_same_v<Storage, float>) {
        const StreamPointer stream = open_stream(2);
        Buffer<float> in_place(direction, stream.get());
        Buffer<int> degenerate(unwritten<int>(batch), stream.get());
        muon_normalize<float>(in_place, degenerate, in_place, batch, n, safety, stream.get());
        expect_same_bits({in_place.values(), degenerate.values()}, outputs, "in place");
    }
    return outputs;
}

TYPED_TEST(Kernels, MuonNormalize) {
    const float safety = 1.02f;
    for (const size_t n : {1, 3, 7, 65, 130, 8003, 50257}) {
        for (const double scale : {1.0, 1e-30, 1e30}) {
            SCOPED_TRACE(testing::Message() << "n " << n << " scale " << scale);
            const size_t batch = 3;
            const auto direction = normal<float>(batch * n, 1, scale);
            const Outputs outputs = run_normalize<TypeParam>(direction, batch, n, safety);
            Vector expected = doubles(direction);
            for (size_t i = 0; i < batch; ++i) {
                double square = 0;
                for (size_t j = 0; j < n; ++j) square += expected[i * n + j] * expected[i * n + j];
                for (size_t j = 0; j < n; ++j) expected[i * n + j] /= safety * std::sqrt(square);
            }
            expect_close<TypeParam>("x", outputs[0], expected, 1);
            EXPECT_EQ(outputs[1], Vector(batch, 0.0));
        }
    }
}

// The six matrices of a batch: ordinary, zero, with a NaN, ordinary, with an infinity, one entry of 1e-30.
TYPED_TEST(Kernels, MuonNormalizeOfDegenerateMatrices) {
    using Storage = TypeParam;
    const size_t batch = 6, n = 67;
    auto direction = normal<float>(batch * n, 1);
    std::fill_n(direction.begin() + 1 * n, n, 0.0f);
    direction[2 * n + 66] = nan_value;
    direction[4 * n + 13] = -infinity;
    std::fill_n(direction.begin() + 5 * n, n, 0.0f);
    direction[5 * n + 13] = -1e-30f;
    const Outputs outputs = run_normalize<Storage>(direction, batch, n, 1);
    EXPECT_EQ(outputs[1], (Vector{0, 1, 1, 0, 1, 0}));
    for (size_t i = 0; i < n; ++i) {
        for (const size_t matrix : {1, 2, 4}) ASSERT_EQ(outputs[0][matrix * n + i], 0) << matrix;
        ASSERT_EQ(outputs[0][5 * n + i], i == 13 ? -1 : 0);
    }
    for (const size_t matrix : {0, 3}) {
        const std::vector<float> alone(direction.begin() + matrix * n, direction.begin() + (matrix + 1) * n);
        const Vector x(outputs[0].begin() + matrix * n, outputs[0].begin() + (matrix + 1) * n);
        expect_same_bits({x}, {run_normalize<Storage>(alone, 1, n, 1)[0]}, "beside degenerate ones");
    }
}

// Runs `op` on matrices first..first+count of 12, in groups of 1, 3 and 12; the bits may not change.
void expect_batch_independent(const std::function<void(size_t first, size_t count)>& op,
                              const std::function<Outputs()>& read) {
    op(0, 12);
    const Outputs expected = read();
    for (const size_t count : {1, 3}) {
        for (size_t first = 0; first < 12; first += count) op(first, count);
        expect_same_bits(read(), expected, "batches of " + std::to_string(count));
    }
}

TYPED_TEST(Kernels, MuonNormalizeIsBatchIndependent) {
    using Storage = TypeParam;
    const size_t n = 50257;
    const StreamPointer stream = open_stream(3);
    Buffer<float> direction(normal<float>(12 * n, 1), stream.get());
    Buffer<Storage> x(unwritten<Storage>(12 * n), stream.get());
    Buffer<int> degenerate(unwritten<int>(12), stream.get());
    expect_batch_independent(
        [&](size_t first, size_t count) {
            muon_normalize<Storage>(x + first * n, degenerate + first, direction + first * n, count, n, 1.02f,
                                    stream.get());
        },
        [&] {
            return Outputs{x.values(), degenerate.values()};
        });
}

template <typename Storage, typename Update>
void check_muon_update(size_t n, bool with_master, bool cautious = false) {
    SCOPED_TRACE(testing::Message() << "n " << n << " master " << with_master << " cautious " << cautious);
    const double lr = 0.02, scale = 0.2 * std::sqrt(776.0), weight_decay = cautious ? 5.0 : 0.1;
    const auto start = normal<float>(n, 1, 0.02);
    const auto update = normal<Update>(n, 2, 0.05);
    const auto single = [](double x) { return static_cast<float>(x); };
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Storage> param(rounded<Storage>(doubles(start)), stream);
        Buffer<float> master(start, stream);
        muon_update<Storage, Update>(param, with_master ? master.data() : nullptr, Buffer(update, stream), n,
                                     single(lr), single(scale), single(weight_decay), cautious, stream);
        return Outputs{param.values(), master.values()};
    });
    Vector expected = doubles(start);
    for (size_t i = 0; i < n; ++i) {
        const bool decays = !cautious || expected[i] * to_double(update[i]) >= 0;
        expected[i] -= (decays ? lr * weight_decay * expected[i] : 0) + lr * scale * to_double(update[i]);
    }
    expect_close<Storage>("param", outputs[0], expected, 1);
    if (with_master) {
        expect_close<float>("master", outputs[1], expected, 1);
        for (size_t i = 0; i < n; ++i) {
            const Storage rounded_master = from_float<Storage>(static_cast<float>(outputs[1][i]));
            ASSERT_EQ(outputs[0][i], to_double(rounded_master)) << "param is not the rounded master";
        }
    }
}

TYPED_TEST(Kernels, MuonUpdate) {
    for (const size_t n : {1, 3, 7, 33, 65, 130, 50257}) {
        check_muon_update<TypeParam, float>(n, true);
        check_muon_update<TypeParam, fp16_t>(n, true);
        check_muon_update<TypeParam, bf16_t>(n, true);
        check_muon_update<TypeParam, float>(n, true, true);
        if constexpr (std::is_same_v<TypeParam, float>) check_muon_update<float, float>(n, false);
    }
}

// Blocks that lie anywhere, in any order, with gaps between them: each gets the bits that it gets alone, and
// nothing else is touched. A skipped step changes nothing, and its directions are zero.
template <typename Storage, typename State>
void check_muon_blocks(size_t n) {
    SCOPED_TRACE(testing::Message() << "n " << n << " state of " << sizeof(State) << " bytes");
    const std::vector<size_t> offsets = {2 * n + 200, 64, n + 128}, master_offsets = {0, 2 * n + 128, n + 64};
    const size_t batch = offsets.size(), entries = 3 * n + 300;
    const auto start = normal<float>(entries, 1, 0.02), gradient = normal<float>(entries, 2);
    const auto momenta = normal<State>(batch * n, 3);
    const std::vector<float> rates = {0.02f, 0.01f, 0.04f}, decays = {0.99f, 1.0f, 0.95f};
    const MuonStep moving = {.mu = 0.9f, .grad_scale = 0.3f, .rounding_step = 5, .skip = 0};
    const auto run = [&](const std::vector<std::vector<size_t>>& calls, const MuonStep& of_step) {
        return run_op([&](Stream* stream) {
            Buffer<Storage> params(rounded<Storage>(doubles(start)), stream),
                x(unwritten<Storage>(batch * n), stream);
            Buffer<float> master(start, stream), grads(gradient, stream);
            Buffer<State> momentum(momenta, stream);
            Buffer<int> degenerate(unwritten<int>(batch), stream);
            const OnDevice<MuonStep> step({of_step}, stream);
            std::vector<float> zeros(batch * n);
            const OnDevice<float> direction(zeros, stream), updates(normal<float>(batch * n, 4), stream);
            for (const std::vector<size_t>& call : calls) {
                std::vector<MuonBlock> places;
                for (const size_t i : call)
                    places.push_back({momentum + i * n, offsets[i], master_offsets[i], rates[i], decays[i]});
                const OnDevice<MuonBlock> blocks(places, stream);
                const size_t first = call.front();
                muon_prologue<State>(x + first * n, degenerate + first, direction + first * n, grads, blocks,
                                     step, call.size(), n, true, 1, 7, stream);
                muon_epilogue<Storage, float>(params, master, updates + first * n, blocks, step, call.size(),
                                              n, 1.7f, stream);
            }
            return Outputs{params.values(), master.values(), momentum.values(), x.values(),
                           degenerate.values()};
        });
    };
    const Outputs together = run({{0, 1, 2}}, moving);
    expect_same_bits(run({{0}, {1}, {2}}, moving), together, "one by one");
    expect_same_bits(run({{0}, {1, 2}}, moving), together, "one and two");

    Vector expected = doubles(start);
    for (size_t b = 0; b < batch; ++b) {
        const auto update = normal<float>(batch * n, 4);
        for (size_t i = 0; i < n; ++i) {
            double& p = expected[master_offsets[b] + i];
            p = p * decays[b] - static_cast<double>(rates[b]) * 1.7f * update[b * n + i];
            const Storage param = from_float<Storage>(static_cast<float>(together[1][master_offsets[b] + i]));
            ASSERT_EQ(together[0][offsets[b] + i], to_double(param)) << "param is not the rounded master";
        }
    }
    expect_close<float>("master", together[1], expected, 1);

    MuonStep still = moving;
    still.skip = 1;
    const Outputs skipped = run({{0, 1, 2}}, still);
    expect_same_bits(skipped,
                     {doubles(rounded<Storage>(doubles(start))), doubles(start), doubles(momenta),
                      Vector(batch * n, 0.0), Vector(batch, 0.0)},
                     "skipped");
}

TYPED_TEST(Kernels, MuonBlocks) {
    for (const size_t n : {1, 67, 136, 16384 + 40}) {
        check_muon_blocks<TypeParam, float>(n);
        check_muon_blocks<TypeParam, bf16_t>(n);
    }
}

template <typename Update>
void check_normalize_neurons(size_t rows, size_t cols) {
    SCOPED_TRACE(testing::Message() << rows << "x" << cols);
    const size_t neurons = std::max(rows, cols);
    const auto o = normal<Update>(rows * cols, 1, 0.05);
    auto v = normal<float>(neurons, 2, 0.01);
    for (float& x : v) x = std::abs(x);
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Update> o_(o, stream);
        Buffer<float> v_(v, stream);
        muon_normalize_neurons<Update>(o_, v_, OnDevice<MuonStep>({MuonStep{}}, stream), rows, cols, 0.9f,
                                       stream);
        return Outputs{o_.values(), v_.values()};
    });
    Vector expected_o = doubles(o), expected_v = doubles(v);
    reference::normalize_neurons(expected_o, expected_v, rows, cols, 0.9f);
    expect_close<Update>("o", outputs[0], expected_o, 1);
    expect_close<float>("v", outputs[1], expected_v, 1);
}

TYPED_TEST(Kernels, MuonNormalizeNeurons) {
    for (const auto& [rows, cols] :
         Shapes<2>{{1, 1}, {1, 40}, {40, 1}, {33, 33}, {65, 130}, {130, 65}, {7, 776}, {600, 9}})
        check_normalize_neurons<TypeParam>(rows, cols);
    // Zeros stay zeros, and a neuron of zeros among others too.
    using Update = TypeParam;
    const StreamPointer stream = open_stream();
    for (const size_t filled_rows : {0, 4}) {
        std::vector<Update> o(5 * 3);
        std::fill_n(o.begin(), filled_rows * 3, from_float<Update>(0.25f));
        Buffer<Update> o_(o, stream.get());
        Buffer<float> v(std::vector<float>(5), stream.get());
        const OnDevice<MuonStep> step({MuonStep{}}, stream.get());
        muon_normalize_neurons<Update>(o_, v, step, 5, 3, 0.9f, stream.get());
        EXPECT_EQ(o_.values(), doubles(o)) << filled_rows;
    }
}

// An update's bits may not depend on where in the call its element stands: ranks own different ranges.
TYPED_TEST(Kernels, UpdatesAreElementwise) {
    using Storage = TypeParam;
    const size_t n = 133;
    const StreamPointer stream = open_stream(2);
    const auto start = normal<float>(n, 1, 0.02);
    const reference::AdamW config{.lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    const auto run = [&]<typename State>(size_t piece, State) {
        Buffer<Storage> param(rounded<Storage>(doubles(start)), stream.get());
        Buffer<float> master(start, stream.get()), direction(unwritten<float>(n), stream.get());
        Buffer<float> grad(normal<float>(n, 3), stream.get());
        Buffer<State> m(normal<State>(n, 2), stream.get()), v(rounded<State>(Vector(n, 0.7)), stream.get());
        Buffer<State> momentum(normal<State>(n, 4), stream.get());
        for (size_t first = 0; first < n; first += piece) {
            const size_t count = std::min(piece, n - first);
            const StateRounding rounding{8, 2, first};
            adamw_update<Storage>(param + first, master + first, m + first, v + first, grad + first, count,
                                  adamw_step(config, 2, 0.3), rounding, stream.get());
            muon_momentum(direction + first, momentum + first, grad + first, count, 0.95f, true, 0.3f,
                          rounding, stream.get());
            muon_update<Storage, float>(param + first, master + first, direction + first, count, 0.02f, 1.7f,
                                        0.1f, true, stream.get());
        }
        return Outputs{param.values(), master.values(),   m.values(),
                       v.values(),     momentum.values(), direction.values()};
    };
    const auto check = [&](auto state) {
        const Outputs whole = run(n, state);
        for (const size_t piece : {1, 3, 8, 17})
            expect_same_bits(run(piece, state), whole, "pieces of " + std::to_string(piece));
    };
    check(float{});
    check(bf16_t{});
}

template <typename Storage>
void check_gemm(size_t m, size_t n, size_t k, bool transpose_a, bool transpose_b, double alpha, double beta) {
    SCOPED_TRACE(testing::Message() << "m " << m << " n " << n << " k " << k << " transposes " << transpose_a
                                    << transpose_b << " alpha " << alpha << " beta " << beta);
    const size_t batch = 2;
    const auto a = normal<Storage>(batch * m * k, 1), b = normal<Storage>(batch * k * n, 2, fan_in(k));
    const auto c = normal<Storage>(batch * m * n, 3);
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Storage> d(unwritten<Storage>(batch * m * n), stream), c_(c, stream);
        gemm_batched<Storage>(d, Buffer(a, stream), Buffer(b, stream), beta != 0 ? c_.data() : nullptr,
                              transpose_a, transpose_b, m, n, k, static_cast<float>(alpha),
                              static_cast<float>(beta), batch, stream);
        return Outputs{d.values()};
    });
    Vector expected;
    for (size_t i = 0; i < batch; ++i) {
        const std::vector<Storage> a_i(a.begin() + i * m * k, a.begin() + (i + 1) * m * k);
        const std::vector<Storage> b_i(b.begin() + i * k * n, b.begin() + (i + 1) * k * n);
        const Vector product =
            reference::matmul(doubles(a_i), doubles(b_i), transpose_a, transpose_b, m, n, k);
        for (size_t j = 0; j < m * n; ++j)
            expected.push_back(alpha * product[j] + beta * to_double(c[i * m * n + j]));
    }
    expect_close<Storage>("d", outputs[0], expected, k);
}

TYPED_TEST(Kernels, GemmBatched) {
    for (const auto& [m, n, k] : Shapes<3>{{1, 1, 1},
                                           {3, 5, 7},
                                           {7, 1, 9},
                                           {1, 33, 8},
                                           {65, 40, 33},
                                           {33, 130, 65},
                                           {130, 65, 129},
                                           {129, 264, 776},
                                           {264, 7, 40}}) {
        for (const bool transpose_a : {false, true}) {
            for (const bool transpose_b : {false, true}) {
                check_gemm<TypeParam>(m, n, k, transpose_a, transpose_b, 1, 0);
                check_gemm<TypeParam>(m, n, k, transpose_a, transpose_b, -4.775, 3.4445);
            }
        }
    }
}

TYPED_TEST(Kernels, GemmIsBatchIndependent) {
    using Storage = TypeParam;
    const StreamPointer stream = open_stream(3);
    for (const auto& [m, n, k] : Shapes<3>{{33, 65, 40}, {130, 129, 264}, {7, 8, 776}, {7, 1100, 776}}) {
        for (const bool transpose_b : {false, true}) {
            Buffer<Storage> a(normal<Storage>(12 * m * k, 1), stream.get()),
                b(normal<Storage>(12 * k * n, 2), stream.get());
            Buffer<Storage> c(normal<Storage>(12 * m * n, 3), stream.get()),
                d(unwritten<Storage>(12 * m * n), stream.get());
            const size_t M = m, N = n, K = k;
            expect_batch_independent(
                [&, M, N, K](size_t first, size_t count) {
                    gemm_batched<Storage>(d + first * M * N, a + first * M * K, b + first * K * N,
                                          c + first * M * N, false, transpose_b, M, N, K, 0.7f, -0.3f, count,
                                          stream.get());
                },
                [&] { return Outputs{d.values()}; });
        }
    }
}

// Newton-Schulz multiplies a matrix with its own transpose: both operands are one buffer. Equal terms in the
// same order make the product symmetric to the last bit.
TYPED_TEST(Kernels, GemmWithItsOwnTranspose) {
    using Storage = TypeParam;
    const size_t batch = 3, m = 65, k = 129;
    const auto x = normal<Storage>(batch * m * k, 1, fan_in(k));
    for (const bool transpose_a : {false, true}) {
        const Outputs outputs = run_op([&](Stream* stream) {
            Buffer<Storage> x_(x, stream), d(unwritten<Storage>(batch * m * m), stream);
            gemm_batched<Storage>(d, x_, x_, nullptr, transpose_a, !transpose_a, m, m, k, 1, 0, batch,
                                  stream);
            return Outputs{d.values()};
        });
        for (size_t i = 0; i < batch; ++i) {
            const Vector x_i =
                doubles(std::vector<Storage>(x.begin() + i * m * k, x.begin() + (i + 1) * m * k));
            const Vector d_i(outputs[0].begin() + i * m * m, outputs[0].begin() + (i + 1) * m * m);
            expect_close<Storage>("d", d_i, reference::matmul(x_i, x_i, transpose_a, !transpose_a, m, m, k),
                                  k);
            for (size_t j = 0; j < m * m; ++j) ASSERT_EQ(d_i[j], d_i[j % m * m + j / m]);
        }
    }
}

// Symmetric products of a pair: x x^T, or, of `square` and symmetric x, of x and x^2 in double, which
// commute. What comes out is symmetric to the last bit.
template <typename Storage>
void check_gemm_symmetric(size_t m, size_t k, bool transpose, bool commuting, double alpha, double beta,
                          double gamma) {
    SCOPED_TRACE(testing::Message() << "m " << m << " k " << k << " transpose " << transpose << " commuting "
                                    << commuting << " " << alpha << " " << beta << " " << gamma);
    const size_t batch = 2;
    auto a = normal<Storage>(batch * m * k, 1, fan_in(k)), c = normal<Storage>(batch * m * m, 3);
    const auto symmetrise = [&](std::vector<Storage>& x) {
        for (size_t i = 0; i < batch * m * m; ++i) {
            const size_t row = i / m % m, column = i % m;
            if (row < column) x[i] = x[i - row * m - column + column * m + row];
        }
    };
    symmetrise(c);
    auto b = a;
    if (commuting) {
        symmetrise(a);
        b.clear();
        for (size_t i = 0; i < batch; ++i) {
            const Vector x =
                doubles(std::vector<Storage>(a.begin() + i * m * m, a.begin() + (i + 1) * m * m));
            const auto square = rounded<Storage>(reference::matmul(x, x, false, false, m, m, m));
            b.insert(b.end(), square.begin(), square.end());
        }
        symmetrise(b);
    }
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Storage> d(unwritten<Storage>(batch * m * m), stream), c_(c, stream), a_(a, stream);
        const Buffer<Storage> b_(b, stream);
        gemm_symmetric<Storage>(d, a_, commuting ? b_.data() : a_.data(), beta != 0 ? c_.data() : nullptr,
                                transpose, m, k, static_cast<float>(alpha), static_cast<float>(beta),
                                static_cast<float>(gamma), batch, stream);
        return Outputs{d.values()};
    });
    Vector expected;
    for (size_t i = 0; i < batch; ++i) {
        const auto matrix = [&](const std::vector<Storage>& x) {
            return doubles(std::vector<Storage>(x.begin() + i * m * k, x.begin() + (i + 1) * m * k));
        };
        const Vector product = reference::matmul(matrix(a), matrix(b), transpose, !transpose, m, m, k);
        for (size_t j = 0; j < m * m; ++j) {
            expected.push_back(alpha * product[j] + beta * to_double(c[i * m * m + j]) +
                               (j / m == j % m ? gamma : 0));
            ASSERT_EQ(outputs[0][i * m * m + j], outputs[0][i * m * m + j % m * m + j / m]) << i << " " << j;
        }
    }
    // Commuting pairs were rounded, after which they commute to within a unit in the last place alone.
    expect_close<Storage>("d", outputs[0], expected, k, commuting ? 2 : 1);
}

TYPED_TEST(Kernels, GemmSymmetric) {
    for (const auto& [m, k] : Shapes<2>{{1, 1},
                                        {2, 3},
                                        {5, 40},
                                        {7, 1},
                                        {16, 33},
                                        {33, 65},
                                        {65, 40},
                                        {97, 130},
                                        {130, 65},
                                        {129, 776},
                                        {264, 40}}) {
        for (const bool transpose : {false, true}) {
            check_gemm_symmetric<TypeParam>(m, k, transpose, false, 1, 0, 0);
            check_gemm_symmetric<TypeParam>(m, k, transpose, false, -4.775, 3.4445, 0.7);
        }
    }
    for (const size_t m : {1, 9, 64, 130}) {
        for (const bool transpose : {false, true}) {
            check_gemm_symmetric<TypeParam>(m, m, transpose, true, 1, 0, 0);
            check_gemm_symmetric<TypeParam>(m, m, transpose, true, 2.0315, -4.775, 3.4445);
        }
    }
}

TYPED_TEST(Kernels, GemmSymmetricIsBatchIndependent) {
    using Storage = TypeParam;
    const StreamPointer stream = open_stream(3);
    for (const auto& [m, k] : Shapes<2>{{33, 65}, {64, 64}, {130, 264}, {8, 776}}) {
        for (const bool transpose : {false, true}) {
            Buffer<Storage> a(normal<Storage>(12 * m * k, 1), stream.get()),
                c(std::vector<Storage>(12 * m * m, from_float<Storage>(0.3f)), stream.get()),
                d(unwritten<Storage>(12 * m * m), stream.get());
            const size_t M = m, K = k;
            expect_batch_independent(
                [&, M, K](size_t first, size_t count) {
                    gemm_symmetric<Storage>(d + first * M * M, a + first * M * K, a + first * M * K,
                                            c + first * M * M, transpose, M, K, 0.7f, -0.3f, 0.1f, count,
                                            stream.get());
                },
                [&] { return Outputs{d.values()}; });
        }
    }
}

// ---------------------------------------------------------------------------------------------------
// A 16-bit result is the fp32 result on the same inputs, rounded once

template <typename Storage>
struct Rounding : testing::Test {};
using RoundingTypes = testing::Types<bf16_t, fp16_t>;
TYPED_TEST_SUITE(Rounding, RoundingTypes);

// Normally distributed numbers that Storage holds exactly.
template <typename Storage>
Vector exact_normal(size_t n, unsigned seed, double scale = 1) {
    return doubles(normal<Storage>(n, seed, scale));
}

// For ops without sums, and with sums over what is fp32 in both.
template <typename Storage>
void expect_rounded(const char* name, const Vector& actual, const Vector& fp32) {
    expect_same_bits({actual}, {doubles(rounded<Storage>(fp32))}, name);
}

// Where a sum of `length` terms may run in another order than in fp32: half a unit in the last place away,
// and the two sums' own errors. A truncated or twice rounded result is up to a whole unit away.
template <typename Storage>
void expect_rounded_sum(const char* name, const Vector& actual, const Vector& fp32, size_t length) {
    ASSERT_EQ(actual.size(), fp32.size());
    const double rms = std::sqrt(reference::dot(fp32, fp32) / static_cast<double>(fp32.size()));
    for (size_t i = 0; i < fp32.size(); ++i) {
        const int exponent = fp32[i] == 0 ? 0 : std::ilogb(fp32[i]);
        const double half_unit =
            std::ldexp(1.0, std::max(exponent, Format<Storage>::min_exponent) - Format<Storage>::precision);
        const double limit = half_unit + 6 * tolerance<float>(length) * (rms + std::abs(fp32[i]));
        ASSERT_LE(std::abs(actual[i] - fp32[i]), limit) << name << "[" << i << "] of " << fp32[i];
    }
}

TYPED_TEST(Rounding, Elementwise) {
    using Storage = TypeParam;
    const size_t N = 7, C = 129, V = 257, Vp = padded(V), n = N * C;
    const Vector a = exact_normal<Storage>(V * C, 1), b = exact_normal<Storage>(N * C, 2);
    const Vector start = exact_normal<Storage>(n, 3, 0.02);
    const auto grad = normal<float>(n, 4), logits = with_padding(normal<float>(N * V, 5, 3), N, V, Vp);
    const auto tokens = integers(N, 6, V);
    const AdamWStep step = adamw_step({0.01, 0.9, 0.95, 1e-8, 0.1}, 1);
    const StreamPointer stream = open_stream();
    Stream* const s = stream.get();
    const auto run = [&]<typename T>(T) {
        Buffer<T> a_(rounded<T>(a), s), b_(rounded<T>(b), s), ones(rounded<T>(Vector(C, 1.0)), s);
        Buffer<T> embedded(unwritten<T>(n), s), sum(unwritten<T>(n), s), out(unwritten<T>(n), s);
        Buffer<T> dlogits(unwritten<T>(N * Vp), s), x(unwritten<T>(n), s);
        Buffer<T> adamw(rounded<T>(start), s), muon(rounded<T>(start), s);
        Buffer<float> mean(unwritten<float>(N), s), rstd(unwritten<float>(N), s),
            losses(unwritten<float>(N), s);
        Buffer<float> adamw_master(rounded<float>(start), s), muon_master(rounded<float>(start), s);
        Buffer<float> m(std::vector<float>(n), s), v(std::vector<float>(n), s), grad_(grad, s);
        Buffer<int> degenerate(unwritten<int>(1), s), tokens_(tokens, s);
        embedding_forward<T>(embedded, tokens_, a_, b_, 1, N, C, s);
        residual_layernorm_forward<T>(sum, out, mean, rstd, a_, b_, ones, ones, N, C, s);
        cross_entropy<T>(losses, dlogits, Buffer(logits, s), tokens_, 0.37f, N, V, Vp, s);
        muon_normalize<T>(x, degenerate, grad_, 1, n, 1.02f, s);
        adamw_update<T, float>(adamw, adamw_master, m, v, grad_, n, step, {}, s);
        muon_update<T, float>(muon, muon_master, grad_, n, 0.02f, 1.7f, 0.1f, false, s);
        return Outputs{embedded.values(), sum.values(),   dlogits.values(),
                       x.values(),        adamw.values(), muon.values()};
    };
    const Outputs actual = run(Storage{}), fp32 = run(float{});
    const char* const names[] = {"embedding", "residual sum", "dlogits", "normalized", "adamw", "muon"};
    for (size_t i = 0; i < actual.size(); ++i) expect_rounded<Storage>(names[i], actual[i], fp32[i]);
}

TYPED_TEST(Rounding, LayerNorm) {
    using Storage = TypeParam;
    const size_t N = 33, C = 129;
    const Vector x = exact_normal<Storage>(N * C, 1), weight = exact_normal<Storage>(C, 2);
    const Vector dout = exact_normal<Storage>(N * C, 3), dx = exact_normal<Storage>(N * C, 4);
    const Statistics kept = statistics(rounded<float>(x), N, C);
    const StreamPointer stream = open_stream();
    Stream* const s = stream.get();
    const auto run = [&]<typename T>(T) {
        Buffer<T> x_(rounded<T>(x), s), weight_(rounded<T>(weight), s), out(unwritten<T>(N * C), s);
        Buffer<T> dx_(rounded<T>(dx), s);
        Buffer<float> mean(unwritten<float>(N), s), rstd(unwritten<float>(N), s);
        Buffer<float> dweight(std::vector<float>(C), s), dbias(std::vector<float>(C), s);
        layernorm_forward<T>(out, mean, rstd, x_, weight_, weight_, N, C, s);
        layernorm_backward<T>(dx_, dweight, dbias, Buffer(rounded<T>(dout), s), x_, Buffer(kept.mean, s),
                              Buffer(kept.rstd, s), weight_, N, C, s);
        return Outputs{out.values(), dx_.values()};
    };
    const Outputs actual = run(Storage{}), fp32 = run(float{});
    expect_rounded_sum<Storage>("out", actual[0], fp32[0], C);
    expect_rounded_sum<Storage>("dx", actual[1], fp32[1], C);
}

TYPED_TEST(Rounding, Products) {
    using Storage = TypeParam;
    const size_t N = 33, C = 129, OC = 65;
    const Vector x = exact_normal<Storage>(N * C, 1), weight = exact_normal<Storage>(OC * C, 2, fan_in(C));
    const Vector bias = exact_normal<Storage>(OC, 3), dout = exact_normal<Storage>(N * OC, 4);
    const StreamPointer stream = open_stream();
    Stream* const s = stream.get();
    const auto run = [&]<typename T>(T) {
        Buffer<T> x_(rounded<T>(x), s), weight_(rounded<T>(weight), s), bias_(rounded<T>(bias), s);
        Buffer<T> dout_(rounded<T>(dout), s), out(unwritten<T>(N * OC), s), dx(unwritten<T>(N * C), s);
        Buffer<T> d(unwritten<T>(N * OC), s);
        Buffer<float> dweight(std::vector<float>(OC * C), s);
        linear_forward<T>(out, nullptr, x_, weight_, bias_, N, C, OC, s);
        linear_backward<T>(dx, dweight, nullptr, dout_, x_, weight_, nullptr, N, C, OC, s);
        gemm_batched<T>(d, x_, weight_, dout_, false, true, N, OC, C, -4.775f, 3.4445f, 1, s);
        return Outputs{out.values(), dx.values(), d.values()};
    };
    const Outputs actual = run(Storage{}), fp32 = run(float{});
    expect_rounded_sum<Storage>("out", actual[0], fp32[0], C);
    expect_rounded_sum<Storage>("dx", actual[1], fp32[1], OC);
    expect_rounded_sum<Storage>("d", actual[2], fp32[2], C);
}

// A product converts its operands on the way in, in ways of its own: times 1, each number is itself. The
// first product reads memory across the rows of what it packs, the second along them.
TYPED_TEST(Rounding, ProductsReadEveryPattern) {
    using Storage = TypeParam;
    const size_t n = 1 << 16, C = 128;
    std::vector<Storage> patterns(n), finite(n), identity(C * C);
    for (size_t i = 0; i < n; ++i) {
        patterns[i].bits = static_cast<uint16_t>(i);
        finite[i] = std::isfinite(to_float(patterns[i])) ? patterns[i] : Storage{};
    }
    for (size_t c = 0; c < C; ++c) identity[c * C + c] = from_float<Storage>(1.0f);
    const StreamPointer stream = open_stream();
    Stream* const s = stream.get();
    Buffer<float> logits(unwritten<float>(n), s);
    logits_forward<Storage>(logits, Buffer(std::vector{from_float<Storage>(1.0f)}, s), Buffer(patterns, s), 1,
                            1, n, s);
    const Vector read = logits.values();
    for (size_t i = 0; i < n; ++i) {
        const double expected = to_float(patterns[i]);
        ASSERT_TRUE(read[i] == expected || (std::isnan(read[i]) && std::isnan(expected))) << i;
    }
    logits_forward<Storage>(logits, Buffer(finite, s), Buffer(identity, s), n / C, C, C, s);
    EXPECT_TRUE(logits.values() == doubles(finite));
}

// ---------------------------------------------------------------------------------------------------
// What an op refuses. The buffers are larger than any of these calls would touch.

TYPED_TEST(Kernels, ZeroSizesAreRefused) {
    using Storage = TypeParam;
    const StreamPointer stream = open_stream();
    Stream* s = stream.get();
    Buffer<Storage> p(rounded<Storage>(Vector(4096, 1.0)), s), q(rounded<Storage>(Vector(4096, 1.0)), s);
    Buffer<float> f(std::vector<float>(4096, 1.0f), s), g(std::vector<float>(4096, 1.0f), s);
    Buffer<int> ids(std::vector<int>(4096, 0), s);
    Buffer<double> total(std::vector<double>(1), s);
    const AdamWStep step = adamw_step({0.01, 0.9, 0.95, 1e-8, 0}, 1);
    for (const size_t which : {0, 1, 2}) {  // each size is 0 in its turn, the others are 2
        const size_t a = which == 0 ? 0 : 2, b = which == 1 ? 0 : 2, c = which == 2 ? 0 : 2;
        expect_refused("embedding_forward", [&] { embedding_forward<Storage>(p, ids, q, q, a, b, c, s); });
        expect_refused("embedding_backward", [&] { embedding_backward<Storage>(f, g, q, ids, a, b, c, s); });
        expect_refused("linear_forward", [&] { linear_forward<Storage>(p, nullptr, q, q, q, a, b, c, s); });
        expect_refused("linear_backward",
                       [&] { linear_backward<Storage>(p, f, g, q, q, q, nullptr, a, b, c, s); });
        expect_refused("attention_forward", [&] { attention_forward<Storage>(p, f, q, a, b, c, 1, s); });
        expect_refused("attention_backward",
                       [&] { attention_backward<Storage>(p, q, q, f, q, a, b, c, 1, s); });
        expect_refused("gemm_batched",
                       [&] { gemm_batched<Storage>(p, q, q, nullptr, false, false, a, b, c, 1, 0, 1, s); });
        expect_refused("logits_forward", [&] { logits_forward<Storage>(f, q, q, a, b, 64 * c, s); });
        expect_refused("cross_entropy", [&] { cross_entropy<Storage>(f, p, g, ids, 1, a, b, 64 * c, s); });
    }
    for (const size_t which : {0, 1}) {
        const size_t a = which == 0 ? 0 : 2, b = which == 1 ? 0 : 2;
        expect_refused("layernorm_forward", [&] { layernorm_forward<Storage>(p, f, g, q, q, q, a, b, s); });
        expect_refused("residual_layernorm_forward",
                       [&] { residual_layernorm_forward<Storage>(p, p, f, g, q, q, q, q, a, b, s); });
        expect_refused("layernorm_backward",
                       [&] { layernorm_backward<Storage>(p, f, g, q, q, f, g, q, a, b, s); });
        expect_refused("sum_of_squares", [&] { sum_of_squares(total, f, a, b, s); });
        expect_refused("gemm_symmetric",
                       [&] { gemm_symmetric<Storage>(p, q, q, nullptr, false, a, b, 1, 0, 0, 1, s); });
        expect_refused("muon_prologue", [&] { muon_normalize<Storage>(p, ids, f, a, b, 1, s); });
    }
    expect_refused("sum", [&] { sum(total, f, 0, s); });
    expect_refused("cast", [&] { cast<Storage>(p, f, 0, s); });
    expect_refused("round_through", [&] { round_through<Storage>(f, 0, s); });
    expect_refused("add", [&] { add(f, f, g, 0, s); });
    expect_refused("tree_sum", [&] { tree_sum<Storage>(f, q, 0, 8, 8, s); });
    expect_refused("tree_sum", [&] { tree_sum<Storage>(f, q, 2, 8, 0, s); });
    expect_refused("tree_sum", [&] { tree_sum<Storage>(f, q, 2048, 1, 1, s); });
    expect_refused("gemm_batched",
                   [&] { gemm_batched<Storage>(p, q, q, nullptr, false, false, 2, 2, 2, 1, 0, 0, s); });
    expect_refused("gemm_symmetric",
                   [&] { gemm_symmetric<Storage>(p, q, q, nullptr, false, 2, 2, 1, 0, 0, 0, s); });
    expect_refused("adamw_update", [&] { adamw_update<Storage, float>(p, f, f, f, g, 0, step, {}, s); });
    expect_refused("muon_normalize_neurons", [&] {
        muon_normalize_neurons<Storage>(p, f, OnDevice<MuonStep>({MuonStep{}}, s), 0, 2, 0.9f, s);
    });
    expect_refused("muon_prologue", [&] { muon_momentum<float>(f, f, g, 0, 0.95f, true, 1, {}, s); });
    expect_refused("muon_epilogue", [&] { muon_update<Storage, float>(p, f, g, 0, 0.1f, 1, 0, false, s); });
}

TYPED_TEST(Kernels, WrongArgumentsAreRefused) {
    using Storage = TypeParam;
    const StreamPointer stream = open_stream();
    Stream* s = stream.get();
    Buffer<Storage> p(rounded<Storage>(Vector(4096, 1.0)), s), q(rounded<Storage>(Vector(4096, 1.0)), s);
    Buffer<float> f(std::vector<float>(4096, 1.0f), s), g(std::vector<float>(4096, 1.0f), s);
    Buffer<int> ids(std::vector<int>(4096, 0), s);
    for (const size_t NH : {0, 3, 128}) {  // no head; 64 is no multiple of 3; more heads than channels
        expect_refused("attention_forward", [&] { attention_forward<Storage>(p, f, q, 1, 2, 64, NH, s); });
        expect_refused("attention_backward",
                       [&] { attention_backward<Storage>(p, q, q, f, q, 1, 2, 64, NH, s); });
    }
    expect_refused("cross_entropy", [&] { cross_entropy<Storage>(f, p, g, ids, 1, 2, 129, 128, s); });
    // beta without c; d in place of c.
    expect_refused("gemm_batched",
                   [&] { gemm_batched<Storage>(p, q, q, nullptr, false, false, 2, 2, 2, 1, 1, 1, s); });
    expect_refused("gemm_batched",
                   [&] { gemm_batched<Storage>(p, q, q, p, false, false, 2, 2, 2, 1, 1, 1, s); });
    expect_refused("gemm_symmetric",
                   [&] { gemm_symmetric<Storage>(p, q, q, nullptr, false, 2, 2, 1, 1, 0, 1, s); });
    expect_refused("gemm_symmetric",
                   [&] { gemm_symmetric<Storage>(p, q, p, nullptr, false, 2, 2, 1, 0, 0, 1, s); });
    expect_refused("gemm_symmetric",
                   [&] { gemm_symmetric<Storage>(p, q, q, p, false, 2, 2, 1, 1, 0, 1, s); });
    if constexpr (!std::is_same_v<Storage, float>) {  // a 16-bit parameter needs its master copy
        const AdamWStep step = adamw_step({0.01, 0.9, 0.95, 1e-8, 0}, 1);
        expect_refused("adamw_update",
                       [&] { adamw_update<Storage, float>(p, nullptr, f, f, g, 8, step, {}, s); });
        expect_refused("muon_epilogue",
                       [&] { muon_update<Storage, float>(p, nullptr, g, 8, 0.1f, 1, 0, false, s); });
    }
}

}  // namespace
