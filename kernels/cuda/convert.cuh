// fp32 from and to the storage types in device code, by the hardware's conversions: the same values as
// kernels/dtype.h (round to nearest, ties to even), except that every NaN becomes one and the same NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/dtype.h"

__device__ __forceinline__ float load_float(float x) { return x; }
__device__ __forceinline__ float load_float(bf16_t x) {
    return __bfloat162float(__ushort_as_bfloat16(x.bits));
}
__device__ __forceinline__ float load_float(fp16_t x) { return __half2float(__ushort_as_half(x.bits)); }

template <typename Storage>
__device__ Storage store(float x);

template <>
__device__ __forceinline__ float store<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ bf16_t store<bf16_t>(float x) {
    return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
template <>
__device__ __forceinline__ fp16_t store<fp16_t>(float x) {
    return {__half_as_ushort(__float2half_rn(x))};
}
