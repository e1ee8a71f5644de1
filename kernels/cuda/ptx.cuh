// The machine instructions that CUDA C++ has no function for, as inline PTX: tensor-core products, loads of
// their operands from shared memory, copies to shared memory that run in the background, and a fast 2^x.
// sm_80 and later. Fragment layouts: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"
// and "ldmatrix"; the simulator has them as tables (dev/cudasim/ptx_tables.h).
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/dtype.h"

// acc (16,8) += a (16,16) * b (16,8), by the whole warp. Each lane holds 4 of acc, 8 of a as 4 registers and
// 4 of b as 2. Storage is bf16_t or fp16_t; sums are fp32.
template <typename Storage>
__device__ __forceinline__ void mma_m16n8k16(float* acc, const uint32_t* a, uint32_t b0, uint32_t b1) {
    constexpr bool is_bf16 = std::is_same_v<Storage, bf16_t>;
    static_assert(is_bf16 || std::is_same_v<Storage, fp16_t>, "mma takes 16-bit operands");
#ifdef MUGPT_CUDASIM
    cudasim::mma_m16n8k16(acc, a, b0, b1, is_bf16 ? cudasim::HalfType::bf16 : cudasim::HalfType::fp16);
#else
    if constexpr (is_bf16) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
#endif
}

// Loads four 8x8 matrices of 16-bit elements from shared memory, by the whole warp. Lanes 8i .. 8i+7 give the
// addresses of the rows of matrix i, 16 bytes each and so aligned; every lane gets two elements of each
// matrix: of row lane/4, columns 2*(lane%4) and the next one.
__device__ __forceinline__ void ldmatrix_x4(uint32_t* d, const void* row) {
#ifdef MUGPT_CUDASIM
    cudasim::ldmatrix_x4(d, row, false);
#else
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
#endif
}

// The same with each matrix transposed on its way: rows 2*(lane%4) and the next one, column lane/4.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t* d, const void* row) {
#ifdef MUGPT_CUDASIM
    cudasim::ldmatrix_x4(d, row, true);
#else
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
#endif
}

// Starts copying 16 bytes from global to shared memory, both aligned to 16. With `valid` false nothing is
// read and 16 zero bytes are written: the rows beyond the end of a tensor. The data is there for this thread
// after cp_async_wait, for others after a barrier that follows it.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true) {
#ifdef MUGPT_CUDASIM
    cudasim::cp_async_16(shared, global, valid ? 16 : 0);
#else
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
                 : "memory");
#endif
}

// Closes a group: the copies that this thread has started since the last one.
__device__ __forceinline__ void cp_async_commit() {
#ifdef MUGPT_CUDASIM
    cudasim::cp_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `pending` of this thread's newest groups are still on their way.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
#ifdef MUGPT_CUDASIM
    cudasim::cp_async_wait(pending);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// 2^x with a relative error below 2^-22 (PTX ISA, "ex2"); what is below 2^-126 becomes 0.
__device__ __forceinline__ float exp2_approximate(float x) {
#ifdef MUGPT_CUDASIM
    const float y = std::exp2(x);
    return y < 0x1p-126f ? 0.0f : y;
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}
