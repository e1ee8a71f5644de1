// The instructions of kernels/cuda/ptx.cuh on whatever runs them, a GPU or the simulator, against the tables
// of the PTX ISA (dev/cudasim/ptx_tables.h): which lane holds which element. What the kernels assume about
// mma, ldmatrix, cp.async and ex2 is checked here apart from the kernels.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "dev/cudasim/ptx_tables.h"
#include "dev/test/buffers.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/shared.cuh"

namespace {

constexpr unsigned lanes = 32;

// Small integers, so that every product and sum is exact in every type.
int value_at(size_t row, size_t col, int step) {
    return static_cast<int>(row * 31 + col * 7) * step % 13 - 6;
}

// Puts a 16-bit value where element i of a lane is: half i % 2 of register i / 2.
template <typename Storage>
void put(std::vector<uint32_t>& registers, size_t per_lane, size_t lane, size_t element, int value) {
    const uint32_t bits = from_float<Storage>(static_cast<float>(value)).bits;
    registers[lane * per_lane + element / 2] |= bits << (16 * (element % 2));
}

template <typename Storage>
__global__ void mma_kernel(float* out, const uint32_t* a, const uint32_t* b, const float* c) {
    float acc[4];
    uint32_t fragment[4];
    for (unsigned i = 0; i < 4; i++) {
        acc[i] = c[threadIdx.x * 4 + i];
        fragment[i] = a[threadIdx.x * 4 + i];
    }
    mma_m16n8k16<Storage>(acc, fragment, b[threadIdx.x * 2], b[threadIdx.x * 2 + 1]);
    for (unsigned i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = acc[i];
}

template <typename Storage>
void check_mma() {
    const StreamPointer stream = open_stream();
    std::vector<uint32_t> a(lanes * 4), b(lanes * 2);
    std::vector<float> c(lanes * 4);
    for (size_t k = 0; k < 16; k++) {
        for (size_t i = 0; i < 16; i++)
            put<Storage>(a, 4, cudasim::mma_a_lane[i][k], cudasim::mma_a_element[i][k], value_at(i, k, 5));
        for (size_t j = 0; j < 8; j++)
            put<Storage>(b, 2, cudasim::mma_b_lane[k][j], cudasim::mma_b_element[k][j], value_at(k, j, 3));
    }
    for (size_t i = 0; i < 16; i++) {
        for (size_t j = 0; j < 8; j++)
            c[cudasim::mma_c_lane[i][j] * 4 + cudasim::mma_c_element[i][j]] =
                1000.0f + static_cast<float>(i * j);
    }
    Buffer<float> out(unwritten<float>(lanes * 4), stream.get());
    launch(mma_kernel<Storage>, 1, lanes, 0, stream.get(), out, Buffer(a, stream.get()),
           Buffer(b, stream.get()), Buffer(c, stream.get()));
    const std::vector<float> result = out.read();
    for (size_t i = 0; i < 16; i++) {
        for (size_t j = 0; j < 8; j++) {
            int expected = 1000 + static_cast<int>(i * j);
            for (size_t k = 0; k < 16; k++) expected += value_at(i, k, 5) * value_at(k, j, 3);
            EXPECT_EQ(result[cudasim::mma_c_lane[i][j] * 4 + cudasim::mma_c_element[i][j]],
                      static_cast<float>(expected))
                << i << "," << j;
        }
    }
}

TEST(Instructions, MmaBf16) { check_mma<bf16_t>(); }
TEST(Instructions, MmaFp16) { check_mma<fp16_t>(); }

// Four 8x8 matrices side by side in memory: matrix i is rows 8i .. 8i+7 of `in`.
__global__ void ldmatrix_kernel(uint32_t* out, const uint16_t* in, bool transposed) {
    uint16_t* staged = shared<uint16_t>(32 * 8);
    for (unsigned i = 0; i < 8; i++) staged[threadIdx.x * 8 + i] = in[threadIdx.x * 8 + i];
    __syncwarp();
    uint32_t d[4];
    if (transposed) {
        ldmatrix_x4_trans(d, staged + threadIdx.x * 8);
    } else {
        ldmatrix_x4(d, staged + threadIdx.x * 8);
    }
    for (unsigned i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = d[i];
}

void check_ldmatrix(bool transposed) {
    const StreamPointer stream = open_stream();
    std::vector<uint16_t> in(32 * 8);
    for (size_t i = 0; i < in.size(); i++) in[i] = static_cast<uint16_t>(1000 + i);
    Buffer<uint32_t> out(std::vector<uint32_t>(lanes * 4), stream.get());
    launch(ldmatrix_kernel, 1, lanes, shared_bytes<uint16_t>(32 * 8), stream.get(), out,
           Buffer(in, stream.get()), transposed);
    const std::vector<uint32_t> result = out.read();
    for (size_t matrix = 0; matrix < 4; matrix++) {
        for (size_t row = 0; row < 8; row++) {
            for (size_t col = 0; col < 8; col++) {
                const size_t r = transposed ? col : row, c = transposed ? row : col;
                const uint32_t both = result[cudasim::ldmatrix_lane[r][c] * 4 + matrix];
                EXPECT_EQ(both >> (16 * cudasim::ldmatrix_element[r][c]) & 0xffff,
                          in[(matrix * 8 + row) * 8 + col])
                    << "matrix " << matrix << ", " << row << "," << col;
            }
        }
    }
}

TEST(Instructions, Ldmatrix) { check_ldmatrix(false); }
TEST(Instructions, LdmatrixTransposed) { check_ldmatrix(true); }

// Every third lane's copy is not valid and must bring zeros; the second group is waited for last.
__global__ void cp_async_kernel(uint4* out, const uint4* in) {
    uint4* staged = shared<uint4>(2 * lanes);
    cp_async_16(staged + threadIdx.x, in + threadIdx.x, threadIdx.x % 3 != 0);
    cp_async_commit();
    cp_async_16(staged + lanes + threadIdx.x, in + lanes + threadIdx.x);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    out[threadIdx.x] = staged[lanes - 1 - threadIdx.x];
    cp_async_wait<0>();
    __syncthreads();
    out[lanes + threadIdx.x] = staged[2 * lanes - 1 - threadIdx.x];
}

TEST(Instructions, CpAsync) {
    const StreamPointer stream = open_stream();
    std::vector<uint32_t> in(2 * lanes * 4);
    for (size_t i = 0; i < in.size(); i++) in[i] = static_cast<uint32_t>(7 + i);
    Buffer<uint32_t> out(std::vector<uint32_t>(in.size()), stream.get()), source(in, stream.get());
    launch(cp_async_kernel, 1, lanes, shared_bytes<uint4>(2 * lanes), stream.get(),
           reinterpret_cast<uint4*>(static_cast<uint32_t*>(out)),
           reinterpret_cast<const uint4*>(static_cast<uint32_t*>(source)));
    const std::vector<uint32_t> result = out.read();
    for (size_t i = 0; i < 2 * lanes; i++) {
        const size_t from = i < lanes ? lanes - 1 - i : 3 * lanes - 1 - i;
        for (size_t j = 0; j < 4; j++) {
            const bool valid = from >= lanes || from % 3 != 0;
            EXPECT_EQ(result[i * 4 + j], valid ? in[from * 4 + j] : 0u) << i << "," << j;
        }
    }
}

__global__ void exp2_kernel(float* out, const float* in, unsigned n) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = exp2_approximate(in[i]);
}

TEST(Instructions, Exp2) {
    const StreamPointer stream = open_stream();
    std::vector<float> in = {-INFINITY, -200, -127, 0, INFINITY, NAN};
    for (float x = -126; x < 3; x += 0.317f) in.push_back(x);
    const unsigned n = static_cast<unsigned>(in.size());
    Buffer<float> out(unwritten<float>(n), stream.get());
    launch(exp2_kernel, static_cast<unsigned>(ceil_div(n, lanes)), lanes, 0, stream.get(), out,
           Buffer(in, stream.get()), n);
    const std::vector<float> result = out.read();
    const std::vector<float> exact = {0, 0, 0, 1, INFINITY};
    for (size_t i = 0; i < exact.size(); i++) EXPECT_EQ(result[i], exact[i]) << in[i];
    EXPECT_TRUE(std::isnan(result[5]));
    for (size_t i = 6; i < n; i++) {
        const double expected = std::exp2(static_cast<double>(in[i]));
        EXPECT_NEAR(result[i], expected, 0x1p-22 * expected) << in[i];
    }
}

}  // namespace
