// How every kernel gets shared memory: from the dynamic part alone, whose size the launch gives.
//
//   float* sums = shared<float>(32);                    // the first array
//   int* best = shared<int>(32, sums + 32);             // the next one starts where the one before ends
//
// One way of asking for it leaves the simulator one place to put guards around each array.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

// Bytes that a launch must give for an array of n, padding included: sum these over the kernel's arrays.
template <typename Element>
constexpr size_t shared_bytes(size_t n) {
    return (n * sizeof(Element) + 15) / 16 * 16;
}

// An array of n elements, aligned to 16 bytes. `after` is the end of the array before it (its pointer plus
// its n), null for the first. Contents are unspecified. Every thread of the block gets the same array.
template <typename Element>
__device__ Element* shared([[maybe_unused]] size_t n, const void* after = nullptr) {
#ifdef MUGPT_CUDASIM
    return static_cast<Element*>(cudasim::shared_memory(n * sizeof(Element), 16, after));
#else
    extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
    // Offsets within shared memory, so that the compiler keeps knowing which memory this is.
    const size_t offset =
        after == nullptr ? 0 : static_cast<const unsigned char*>(after) - dynamic_shared_memory;
    return reinterpret_cast<Element*>(dynamic_shared_memory + (offset + 15) / 16 * 16);
#endif
}
