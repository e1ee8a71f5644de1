// Stand-in for NVIDIA's <cuda_bf16.h>: the type and the conversions that kernels/cuda uses. Conversions round
// to nearest, ties to even; a NaN becomes the canonical NaN 0x7fff (PTX ISA, "cvt").
#pragma once

#include <cstdint>

#include "cuda_runtime.h"
#include "kernels/dtype.h"

struct alignas(2) __nv_bfloat16 {
    uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __float2bfloat16_rn(float a) {
    return {a != a ? uint16_t{0x7fff} : from_float<bf16_t>(a).bits};
}
inline float __bfloat162float(__nv_bfloat16 a) { return to_float(bf16_t{a.bits}); }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
    return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {__bfloat162float(a.x), __bfloat162float(a.y)}; }

inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) { return a.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short a) { return {a}; }
