// What the CUDA backend promises beyond the contract of the ops: which of an op's kernels ran, where there is
// a fast and a general one. test_kernels judges the results of both.
#include <gtest/gtest.h>

#include <string>

#include "dev/test/buffers.h"
#include "kernels/cuda/stream.h"
#include "kernels/kernels.h"

namespace {

template <typename Storage>
struct Cuda : testing::Test {};
using StorageTypes = testing::Types<float, bf16_t, fp16_t>;
TYPED_TEST_SUITE(Cuda, StorageTypes);

// Runs forward and backward on tensors that start `offset` entries into their memory, and says which kernels
// each was.
template <typename Storage>
std::string attention_kernels(size_t HS, size_t offset = 0) {
    const size_t B = 1, T = 3, NH = 2, C = NH * HS;
    const StreamPointer stream = open_stream();
    Buffer<Storage> out(normal<Storage>(B * T * C + offset, 1), stream.get());
    Buffer<Storage> qkv(normal<Storage>(B * T * 3 * C + offset, 2), stream.get());
    Buffer<Storage> dqkv(unwritten<Storage>(B * T * 3 * C + offset), stream.get());
    Buffer<float> lse(unwritten<float>(B * NH * T), stream.get());
    attention_forward<Storage>(out + offset, lse, qkv + offset, B, T, C, NH, stream.get());
    const std::string forward = stream->attention_kernel;
    attention_backward<Storage>(dqkv + offset, out + offset, out + offset, lse, qkv + offset, B, T, C, NH,
                                stream.get());
    return forward + ", " + stream->attention_kernel;
}

TYPED_TEST(Cuda, AttentionIsFlashWhereItCanBe) {
    const std::string flash = sizeof(TypeParam) == 2 ? "flash, flash" : "general, general";
    for (const size_t HS : {64, 128}) EXPECT_EQ(attention_kernels<TypeParam>(HS), flash) << HS;
    for (const size_t HS : {1, 16, 32, 63, 80, 256}) {
        EXPECT_EQ(attention_kernels<TypeParam>(HS), "general, general") << HS;
    }
    EXPECT_EQ(attention_kernels<TypeParam>(64, 1), "general, general") << "not aligned to 16 bytes";
}

}  // namespace
