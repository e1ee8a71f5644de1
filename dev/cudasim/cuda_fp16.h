// Stand-in for NVIDIA's <cuda_fp16.h>: the type and the conversions that kernels/cuda uses. Conversions round
// to nearest, ties to even; a NaN becomes the canonical NaN 0x7fff (PTX ISA, "cvt").
#pragma once

#include <cstdint>

#include "cuda_runtime.h"
#include "kernels/dtype.h"

struct alignas(2) __half {
    uint16_t bits;
};
struct alignas(4) __half2 {
    __half x, y;
};

inline __half __float2half_rn(float a) { return {a != a ? uint16_t{0x7fff} : from_float<fp16_t>(a).bits}; }
inline float __half2float(__half a) { return to_float(fp16_t{a.bits}); }
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
inline float2 __half22float2(__half2 a) { return {__half2float(a.x), __half2float(a.y)}; }

inline unsigned short __half_as_ushort(__half a) { return a.bits; }
inline __half __ushort_as_half(unsigned short a) { return {a}; }
