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

inline float to_float(float x) { return x; }

inline float to_float(bf16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(fp16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
    const uint32_t magnitude = x.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) {  // infinity and NaN: the fp32 exponent is all ones too
        return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    }
    if (magnitude < 0x0400u) {  // zero and subnormals: a multiple of 2^-24, exact in fp32
        const float value = static_cast<float>(magnitude) * 0x1p-24f;
        return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
    }
    return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));  // rebias 15 -> 127
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
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline fp16_t from_float<fp16_t>(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // >= 65520
    if (magnitude < 0x38800000u) {  // below 2^-14: let one fp32 addition do the subnormal's rounding
        const float shifted = std::bit_cast<float>(magnitude) + 0.5f;  // ulp(0.5) = 2^-24
        return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
    }
    const uint32_t rounded = magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u);
    return {static_cast<uint16_t>(sign | (rounded >> 13))};
}
