// Linear layers with bias and GELU inside cuBLASLt's products, a choice of the CUDA backend that the op suite
// does not know; judged by the same references in double.
#include <gtest/gtest.h>

#include "dev/test/buffers.h"
#include "dev/test/reference.h"
#include "kernels/cuda/stream.h"
#include "kernels/kernels.h"

namespace {

template <typename Storage>
struct FusedLinear : testing::Test {};
using StorageTypes = testing::Types<float, bf16_t, fp16_t>;
TYPED_TEST_SUITE(FusedLinear, StorageTypes);

// Fused where the output's rows are a multiple of 8 long and bias and pre_gelu are aligned to 16 bytes; the
// op's own kernels at the other sizes.
constexpr size_t sizes[][3] = {{33, 40, 64}, {7, 129, 8}, {3, 24, 65}, {130, 65, 24}};

StreamPointer open_fused_stream() {
    StreamPointer stream = open_stream();
    stream->fused_epilogues = true;
    return stream;
}

// Which way was taken. A GPU's cuBLASLt does not say what it was asked for.
void expect_asked_for([[maybe_unused]] cublasLtEpilogue_t epilogue,
                      [[maybe_unused]] cublasComputeType_t compute = CUBLAS_COMPUTE_32F) {
#ifdef MUGPT_CUDASIM
    EXPECT_EQ(cudasim::last_product().epilogue, epilogue);
    EXPECT_EQ(cudasim::last_product().compute, compute);
#endif
}

// With `offset`, bias and pre_gelu start that many entries after an aligned address.
template <typename Storage>
void check_forward(size_t N, size_t C, size_t OC, bool with_gelu, size_t offset = 0) {
    SCOPED_TRACE(testing::Message() << "N " << N << " C " << C << " OC " << OC << " gelu " << with_gelu);
    const StreamPointer stream = open_fused_stream();
    Stream* const s = stream.get();
    const auto x = normal<Storage>(N * C, 1), weight = normal<Storage>(OC * C, 2, 1 / std::sqrt(C));
    const auto bias = normal<Storage>(OC + offset, 3);
    Buffer<Storage> bias_(bias, s), out(unwritten<Storage>(N * OC), s);
    Buffer<Storage> pre_gelu(unwritten<Storage>(N * OC + offset), s);
    linear_forward<Storage>(out, with_gelu ? pre_gelu + offset : nullptr, Buffer(x, s), Buffer(weight, s),
                            bias_ + offset, N, C, OC, s);
    expect_asked_for(OC % 8 != 0 || offset != 0 ? CUBLASLT_EPILOGUE_DEFAULT
                     : with_gelu                ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS
                                                : CUBLASLT_EPILOGUE_BIAS);
    const std::vector<Storage> added(bias.begin() + static_cast<ptrdiff_t>(offset), bias.end());
    Vector y = reference::linear_forward(doubles(x), doubles(weight), doubles(added), N, C, OC);
    if (with_gelu) {
        Vector kept = pre_gelu.values();
        kept.erase(kept.begin(), kept.begin() + static_cast<ptrdiff_t>(offset));
        expect_close<Storage>("pre_gelu", kept, y, C);
        y = reference::map(reference::gelu, y);
    }
    expect_close<Storage>("out", out.values(), y, C);
}

template <typename Storage>
void check_backward(size_t N, size_t C, size_t OC) {
    SCOPED_TRACE(testing::Message() << "N " << N << " C " << C << " OC " << OC);
    const StreamPointer stream = open_fused_stream();
    Stream* const s = stream.get();
    const auto pre_gelu = normal<Storage>(N * C, 1), dout = normal<Storage>(N * OC, 2);
    const auto weight = normal<Storage>(OC * C, 3, 1 / std::sqrt(OC));
    Buffer<Storage> dx(unwritten<Storage>(N * C), s);
    Buffer<float> dweight(std::vector<float>(OC * C), s);
    linear_backward<Storage>(dx, dweight, nullptr, Buffer(dout, s), Buffer(pre_gelu, s), Buffer(weight, s),
                             Buffer(pre_gelu, s), N, C, OC, s);
    expect_asked_for(C % 8 == 0 ? CUBLASLT_EPILOGUE_DGELU : CUBLASLT_EPILOGUE_DEFAULT);
    Vector expected = reference::matmul(doubles(dout), doubles(weight), false, false, N, C, OC);
    for (size_t i = 0; i < N * C; ++i) expected[i] *= reference::gelu_gradient(to_double(pre_gelu[i]));
    expect_close<Storage>("dx", dx.values(), expected, OC);
}

TYPED_TEST(FusedLinear, Forward) {
    for (const auto& [N, C, OC] : sizes) {
        check_forward<TypeParam>(N, C, OC, false);
        check_forward<TypeParam>(N, C, OC, true);
    }
}

TYPED_TEST(FusedLinear, UnalignedForward) {
    check_forward<TypeParam>(33, 40, 64, false, 1);
    check_forward<TypeParam>(33, 40, 64, true, 1);
}

TYPED_TEST(FusedLinear, BackwardThroughGelu) {
    for (const auto& [N, C, OC] : sizes) check_backward<TypeParam>(N, OC, C);
}

// With tf32 the inputs are rounded to 11 significant bits, no less, and without it they are not: the error is
// larger than fp32's would be. All sizes are multiples of 8, for which a GPU has tensor-core products.
TEST(Tf32, RoundsInputsAndNoMore) {
    const size_t N = 32, C = 128, OC = 64;
    const StreamPointer stream = open_stream();
    Stream* const s = stream.get();
    const auto x = normal<float>(N * C, 1), weight = normal<float>(OC * C, 2, 1 / std::sqrt(C));
    const Vector expected = reference::linear_forward(doubles(x), doubles(weight), Vector(OC, 0.0), N, C, OC);
    for (const bool tf32 : {false, true}) {
        s->tf32 = tf32;
        Buffer<float> out(unwritten<float>(N * OC), s);
        linear_forward<float>(out, nullptr, Buffer(x, s), Buffer(weight, s), nullptr, N, C, OC, s);
        expect_asked_for(CUBLASLT_EPILOGUE_DEFAULT, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F);
        const double fp32 = tolerance<float>(C);
        expect_close<float>("out", out.values(), expected, C, tf32 ? 0x1p-10 / fp32 : 1);
        Vector error = out.values();
        for (size_t i = 0; i < error.size(); ++i) error[i] -= expected[i];
        const double relative = std::sqrt(reference::dot(error, error) / reference::dot(expected, expected));
        EXPECT_EQ(relative > fp32, tf32) << relative;
    }
}

}  // namespace
