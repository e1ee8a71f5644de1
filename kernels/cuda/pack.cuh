// Memory in 16-byte accesses. A GPU moves at full speed only when each thread asks for 16 bytes at a time, as
// one instruction on an aligned address: a pack. Arithmetic sees packs of floats, whatever the storage type.
//
// Where an address is not aligned, or fewer entries are left than a pack holds, the same functions go entry
// by entry; which thread gets which entries does not change, and so no sum does.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/convert.cuh"

template <typename Element, unsigned size>
struct alignas(sizeof(Element) * size) Pack {
    Element element[size];
};

// Entries of one 16-byte access.
template <typename Storage>
constexpr unsigned pack_size = 16 / sizeof(Storage);

// Whether all of these may be read in packs.
template <typename... Elements>
__host__ __device__ bool aligned_to_16(const Elements*... pointers) {
    return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// x(0..size) as floats. With `vectors`, x is aligned and has that many entries; without, those from `count`
// on are `fill` and are not read.
template <bool vectors, unsigned size, typename Storage>
__device__ __forceinline__ Pack<float, size> load_pack(const Storage* x, [[maybe_unused]] size_t count = size,
                                                       [[maybe_unused]] float fill = 0.0f) {
    Pack<float, size> result;
    if constexpr (vectors) {
        constexpr unsigned step = size < pack_size<Storage> ? size : pack_size<Storage>;
        for (unsigned first = 0; first < size; first += step) {
            const auto pack = *reinterpret_cast<const Pack<Storage, step>*>(x + first);
            for (unsigned i = 0; i < step; i++) result.element[first + i] = load_float(pack.element[i]);
        }
    } else {
        for (unsigned i = 0; i < size; i++) result.element[i] = i < count ? load_float(x[i]) : fill;
    }
    return result;
}

// The reverse: x(0..size), or x(0..min(size, count)), = values, rounded to Storage.
template <bool vectors, unsigned size, typename Storage>
__device__ __forceinline__ void store_pack(Storage* x, const Pack<float, size>& values,
                                           [[maybe_unused]] size_t count = size) {
    if constexpr (vectors) {
        constexpr unsigned step = size < pack_size<Storage> ? size : pack_size<Storage>;
        for (unsigned first = 0; first < size; first += step) {
            Pack<Storage, step> pack;
            for (unsigned i = 0; i < step; i++) pack.element[i] = store<Storage>(values.element[first + i]);
            *reinterpret_cast<Pack<Storage, step>*>(x + first) = pack;
        }
    } else {
        for (unsigned i = 0; i < size; i++) {
            if (i < count) x[i] = store<Storage>(values.element[i]);
        }
    }
}

template <unsigned size>
__device__ __forceinline__ Pack<float, size> operator+(const Pack<float, size>& a,
                                                       const Pack<float, size>& b) {
    Pack<float, size> sum;
    for (unsigned i = 0; i < size; i++) sum.element[i] = a.element[i] + b.element[i];
    return sum;
}

// ---------------------------------------------------------------------------------------------------
// Elementwise kernels: a thread takes 4 neighbours, so that a warp reads 512 bytes of fp32 without a gap

constexpr unsigned elementwise_threads = 256;
constexpr unsigned elementwise_pack = 4;

// Blocks of an elementwise kernel on n entries.
constexpr size_t elementwise_blocks(size_t n) {
    constexpr size_t of_a_block = size_t{elementwise_threads} * elementwise_pack;
    return (n + of_a_block - 1) / of_a_block;
}

// Calls body(i, size) for entries i, i+1, ..., i+size-1, where decltype(size)::value is 4; or four times with
// 1, at the end of n and without `vectors`. Loads and stores of the body are then load_pack<true, size>.
template <typename Body>
__device__ __forceinline__ void for_my_entries(size_t n, bool vectors, const Body& body) {
    constexpr unsigned size = elementwise_pack;
    const size_t first = (size_t{blockIdx.x} * blockDim.x + threadIdx.x) * size;
    if (vectors && first + size <= n) {
        body(first, std::integral_constant<unsigned, size>());
    } else {
        for (size_t i = first; i < first + size && i < n; i++) body(i, std::integral_constant<unsigned, 1>());
    }
}
