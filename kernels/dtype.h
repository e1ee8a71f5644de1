// Storage types. Tensors are stored in one of these; arithmetic is always done in fp32 (or fp64 where a
// comment says so). The 16-bit types are our own, so that every build has the same ones.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

// bfloat16: the upper half of an fp32.
struct bf16_t {
    uint16_t bits;
};

// IEEE 754 binary16.
struct fp16_t {
    uint16_t bits;
};

enum class Dtype { fp32, bf16, fp16 };

template <typename Storage>
constexpr Dtype dtype_of();
template <>
constexpr Dtype dtype_of<float>() {
    return Dtype::fp32;
}
template <>
constexpr Dtype dtype_of<bf16_t>() {
    return Dtype::bf16;
}
template <>
constexpr Dtype dtype_of<fp16_t>() {
    return Dtype::fp16;
}

constexpr const char* dtype_name(Dtype dtype) {
    return dtype == Dtype::fp32 ? "fp32" : dtype == Dtype::bf16 ? "bf16" : "fp16";
}

constexpr size_t dtype_size(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

// The conversions are straight-line code, selecting where they would branch, so that loops over them become
// vector code. A NaN keeps its sign and upper fraction and becomes quiet, as in the F16C instructions.

inline float to_float(float x) { return x; }

inline float to_float(bf16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(fp16_t x) {
    const uint32_t sign = (x.bits & 0x8000u) << 16;
    const uint32_t magnitude = x.bits & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + (112u << 23);  // rebias 15 -> 127
    // Infinity and NaN: the fp32 exponent is all ones too.
    const uint32_t special = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0u);
    // Zero and subnormals: a multiple of 2^-24, exact in fp32.
    const float tiny = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    const uint32_t finite = magnitude < 0x0400u ? std::bit_cast<uint32_t>(tiny) : normal;
    return std::bit_cast<float>(sign | (magnitude >= 0x7c00u ? special : finite));
}

// Rounds to nearest, ties to even; overflow gives infinity; a NaN stays a (quiet) NaN.
template <typename Storage>
Storage from_float(float x);

template <>
inline float from_float<float>(float x) {
    return x;
}

template <>
inline bf16_t from_float<bf16_t>(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return {static_cast<uint16_t>((nan ? bits | 0x400000u : rounded) >> 16)};
}

template <>
inline fp16_t from_float<fp16_t>(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 one fp32 addition does the subnormal's rounding: ulp(0.5) = 2^-24.
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t nan = (magnitude >> 13 & 0x3ffu) | 0x7e00u;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const uint32_t unbounded = magnitude > 0x7f800000u ? nan : 0x7c00u;
    return {static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? unbounded : finite))};  // from 65520 on
}

// Stochastic rounding (Gupta et al. 2015, arXiv:1502.02551): x becomes one of its two neighbours in State,
// the nearer one the more often, so that the mean over many draws is x. `random` holds 16 uniform bits: they
// are added below bf16's last place, and what then stands there is cut off. What bf16 holds exactly stays as
// it is, infinity too; a finite x stays finite; a NaN stays a (quiet) NaN. To float nothing is rounded.
template <typename State>
constexpr State from_float_stochastic(float x, uint32_t random);

template <>
constexpr float from_float_stochastic<float>(float x, uint32_t) {
    return x;
}

template <>
constexpr bf16_t from_float_stochastic<bf16_t>(float x, uint32_t random) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sum = magnitude + random;
    const uint32_t finite = sum < 0x7f800000u ? sum : 0x7f7fffffu;
    const uint32_t nan_or_infinity = magnitude > 0x7f800000u ? magnitude | 0x400000u : magnitude;
    const uint32_t rounded = magnitude < 0x7f800000u ? finite : nan_or_infinity;
    return {static_cast<uint16_t>(((bits & 0x80000000u) | rounded) >> 16)};
}
