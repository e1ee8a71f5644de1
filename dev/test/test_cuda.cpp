// What the CUDA backend promises beyond the contract of the ops: which of an op's kernels ran, where there is
// a fast and a general one. test_kernels judges the results of both.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>

#include "dev/test/buffers.h"
#include "dev/test/muon_parts.h"
#include "dev/test/reference.h"
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

// ---------------------------------------------------------------------------------------------------
// gemm_symmetric

// alpha op(a) op(b)^T + beta c + gamma I on and below the diagonal, mirrored. So a and b need not commute
// here: what is above the diagonal comes from below it.
Vector symmetric_reference(const Vector& a, const Vector& b, const Vector& c, bool transpose, size_t m,
                           size_t k, double alpha, double beta, double gamma) {
    Vector d = reference::matmul(a, b, transpose, !transpose, m, m, k);
    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j <= i; j++) {
            const double x =
                alpha * d[i * m + j] + (beta == 0 ? 0 : beta * c[i * m + j]) + (i == j ? gamma : 0);
            d[i * m + j] = d[j * m + i] = x;
        }
    }
    return d;
}

// Which kernel multiplies matrices that start `offset` entries into their memory; its result is judged.
template <typename Storage>
std::string symmetric_kernel(size_t m, size_t k, bool transpose, double alpha, double beta, double gamma,
                             size_t offset = 0) {
    SCOPED_TRACE(testing::Message() << "m " << m << " k " << k << " transpose " << transpose << " beta "
                                    << beta << " offset " << offset);
    const auto a = normal<Storage>(m * k + offset, 1),
               b = normal<Storage>(m * k + offset, 2, 1 / std::sqrt(static_cast<double>(k)));
    auto c = normal<Storage>(m * m + offset, 3);
    std::string ran;
    const Outputs outputs = run_op([&](Stream* stream) {
        Buffer<Storage> d(unwritten<Storage>(m * m + offset), stream), c_(c, stream);
        gemm_symmetric<Storage>(d + offset, Buffer(a, stream) + offset, Buffer(b, stream) + offset,
                                beta != 0 ? c_ + offset : nullptr, transpose, m, k, static_cast<float>(alpha),
                                static_cast<float>(beta), static_cast<float>(gamma), 1, stream);
        ran = stream->symmetric_kernel;
        return Outputs{d.values()};
    });
    const auto matrix = [offset](const auto& x) {
        const Vector all = doubles(x);
        return Vector(all.begin() + static_cast<ptrdiff_t>(offset), all.end());
    };
    expect_close<Storage>(
        "d", matrix(outputs[0]),
        symmetric_reference(matrix(a), matrix(b), matrix(c), transpose, m, k, alpha, beta, gamma), k);
    return ran;
}

// Sides of a few entries, of a tile and one more or less, of several tiles; depths around a step's and the
// pipeline's.
TYPED_TEST(Cuda, SymmetricProductsMoveVectorsWhereTheyCan) {
    const bool fp32 = sizeof(TypeParam) == 4;
    for (const bool transpose : {false, true}) {
        for (const auto& [m, k] : {std::tuple<size_t, size_t>{8, 8}, {128, 32}, {136, 40}, {264, 104}}) {
            EXPECT_EQ((symmetric_kernel<TypeParam>(m, k, transpose, 1, 0, 0)), fp32 ? "cublas" : "vectors");
            EXPECT_EQ((symmetric_kernel<TypeParam>(m, k, transpose, 2.5, -1.5, 3.5)),
                      fp32 ? "cublas" : "vectors");
        }
        for (const auto& [m, k] :
             {std::tuple<size_t, size_t>{1, 1}, {7, 8}, {72, 33}, {127, 97}, {129, 31}, {257, 65}}) {
            EXPECT_EQ((symmetric_kernel<TypeParam>(m, k, transpose, 1, 0, 0.5)), fp32 ? "cublas" : "entries");
            EXPECT_EQ((symmetric_kernel<TypeParam>(m, k, transpose, -0.5, 2, 0)),
                      fp32 ? "cublas" : "entries");
        }
        EXPECT_EQ((symmetric_kernel<TypeParam>(136, 40, transpose, 1, 1, 1, 1)), fp32 ? "cublas" : "entries")
            << "not aligned to 16 bytes";
    }
}

// Whether 16 bytes or an entry moves at a time changes no bit.
template <typename Storage>
struct Cuda16 : testing::Test {};
using HalfTypes = testing::Types<bf16_t, fp16_t>;
TYPED_TEST_SUITE(Cuda16, HalfTypes);
TYPED_TEST(Cuda16, SymmetricProductsHaveOneOrderOfSums) {
    using Storage = TypeParam;
    const size_t m = 136, k = 72;
    const auto x = normal<Storage>(m * k, 1), c = normal<Storage>(m * m, 2);
    const StreamPointer stream = open_stream();
    Buffer<Storage> a(x, stream.get()), aligned_c(c, stream.get());
    std::vector<Storage> shifted_c(1, from_float<Storage>(0));
    shifted_c.insert(shifted_c.end(), c.begin(), c.end());
    Buffer<Storage> unaligned_c(shifted_c, stream.get()), d(unwritten<Storage>(m * m), stream.get());
    const auto product = [&](const Storage* add) {
        gemm_symmetric<Storage>(d, a, a, add, false, m, k, 0.5f, 0.25f, 1.0f, 1, stream.get());
        return Outputs{d.values()};
    };
    expect_same_bits(product(aligned_c), product(unaligned_c + 1), "an unaligned c");
}

TYPED_TEST(Cuda, SymmetricProductsAreBatchIndependent) {
    using Storage = TypeParam;
    const StreamPointer stream = open_stream();
    Stream* const s = stream.get();
    for (const auto& [side, depth] : {std::tuple<size_t, size_t>{136, 72}, {33, 40}}) {
        const size_t m = side, k = depth, most = 12;
        Buffer<Storage> a(normal<Storage>(most * m * k, 1), s), b(normal<Storage>(most * m * k, 2), s),
            c(normal<Storage>(most * m * m, 3), s);
        for (const bool transpose : {false, true}) {
            const auto in_batches_of = [&](size_t count) {
                Buffer<Storage> d(unwritten<Storage>(most * m * m), s);
                for (size_t i = 0; i < most; i += count) {
                    gemm_symmetric<Storage>(d + i * m * m, a + i * m * k, b + i * m * k, c + i * m * m,
                                            transpose, m, k, 0.7f, -0.3f, 0.1f, count, s);
                }
                return Outputs{d.values()};
            };
            const Outputs one_by_one = in_batches_of(1);
            for (const size_t count : {3, 12})
                expect_same_bits(in_batches_of(count), one_by_one, std::to_string(count) + " at a time");
            for (size_t i = 0; i < most * m * m; i++) {
                const size_t row = i / m % m, column = i % m;
                ASSERT_EQ(one_by_one[0][i], one_by_one[0][i - row * m - column + column * m + row]);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------
// replay

// Parameters that an op moves by lr times their gradient: lr in device memory or, for AdamW, by value.
struct Replayed {
    StreamPointer stream = open_stream();
    Stream* s = stream.get();
    Buffer<float> params{normal<float>(300, 1), s}, m{std::vector<float>(300), s},
        v{std::vector<float>(300), s};
    Buffer<float> update{normal<float>(300, 2), s};
    OnDevice<MuonBlock> block{{MuonBlock{}}, s};
    OnDevice<MuonStep> step{{MuonStep{}}, s};
    std::unique_ptr<Replay, void (*)(Replay*)> replay{replay_create(), replay_destroy};
    int queued = 0;  // calls of what replay was given

    void set(float lr) {
        const MuonBlock values = {nullptr, 0, 0, lr, 1};
        copy_to_device(block, &values, sizeof(values), s);
    }
    void queue() {
        queued++;
        muon_epilogue<float, float>(params, nullptr, update, block, step, 1, 300, 1, s);
    }
    void run(uintptr_t key) {
        ::replay(
            replay.get(), {key}, [&] { queue(); }, s);
    }
};

TEST(Replay, RunsThenRecordsThenLaunches) {
    Replayed direct, replayed;
    const auto run = [&](uintptr_t key, float lr) {
        direct.set(lr), replayed.set(lr);
        direct.queue(), replayed.run(key);
        expect_same_bits({replayed.params.values()}, {direct.params.values()},
                         "step " + std::to_string(direct.queued));
    };
    for (const float lr : {0.5f, 0.3f, 0.2f, 0.1f}) run(1, lr);
    EXPECT_EQ(replayed.queued, 2);
    for (const float lr : {0.5f, 0.3f, 0.2f, 0.1f}) run(2, lr);
    EXPECT_EQ(replayed.queued, 4);
    // An op that needs more scratch memory moves it, and a record may know where it was.
    device_scratch(replayed.s, device_scratch_bytes(replayed.s) + 1000);
    for (const float lr : {0.5f, 0.3f, 0.2f}) run(2, lr);
    EXPECT_EQ(replayed.queued, 6);
}

// The test above can fail: a number that an op gets by value is that of the recording.
TEST(Replay, NumbersByValueAreRecorded) {
    Replayed r, expected;
    for (const float lr : {0.5f, 0.25f, 0.125f, 0.0625f}) {
        const auto step = [&](Replayed& to, float of) {
            const AdamWStep by_value = {.lr = of,
                                        .beta1 = 0.9f,
                                        .beta2 = 0.9f,
                                        .eps = 1e-8f,
                                        .weight_decay = 0,
                                        .bias_correction1 = 1,
                                        .bias_correction2 = 1,
                                        .grad_scale = 1};
            adamw_update<float, float>(to.params, nullptr, to.m, to.v, to.update, 300, by_value, {}, to.s);
        };
        replay(
            r.replay.get(), {1}, [&] { step(r, lr); }, r.s);
        step(expected, std::max(lr, 0.25f));  // the second call's, which was recorded
    }
    expect_same_bits({r.params.values()}, {expected.params.values()}, "recorded");
}

TEST(Replay, ComesBackFromAnError) {
    Replayed r;
    r.set(0.5f);
    r.run(1);
    expect_refused("muon_epilogue", [&] {
        replay(
            r.replay.get(), {1},
            [&] { muon_epilogue<float, float>(r.params, nullptr, r.update, r.block, r.step, 1, 0, 1, r.s); },
            r.s);
    });
    for (int i = 0; i < 3; i++) r.run(1);
    EXPECT_EQ(r.queued, 2);
}

}  // namespace
