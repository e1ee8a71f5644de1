// Averages of the optimizers in packs, with the random bits that round them: StateRounding in
// kernels/kernels.h. The four entries of a thread share one counter, so that Philox's hundred or so integer
// instructions are spent once for all of them.
#pragma once

#include <type_traits>

#include "kernels/cuda/pack.cuh"
#include "kernels/kernels.h"
#include "kernels/random.h"

// Whether the packs of a call start where the four words of a counter do.
template <typename State>
__host__ __device__ bool counters_fit_packs(const StateRounding& rounding) {
    return std::is_same_v<State, float> || rounding.first % elementwise_pack == 0;
}

// The words of entries i to i + size; none, where State is float. size is elementwise_pack, where
// counters_fit_packs, or 1.
template <typename State, unsigned size>
__device__ __forceinline__ Pack<uint32_t, size> rounding_words(const StateRounding& rounding, size_t i) {
    static_assert(elementwise_pack == 4);
    Pack<uint32_t, size> words = {};
    if constexpr (!std::is_same_v<State, float>) {
        const size_t entry = rounding.first + i;
        const auto bits = random_bits(rounding.seed, RandomStream::rounding, rounding.step, entry / 4);
        if constexpr (size == 4) {
            for (unsigned j = 0; j < size; j++) words.element[j] = bits[j];
        } else {
            const uint32_t even = entry & 2 ? bits[2] : bits[0], odd = entry & 2 ? bits[3] : bits[1];
            words.element[0] = entry & 1 ? odd : even;
        }
    }
    return words;
}

// x(0..size) = values, rounded with 16 bits of each word, those from `shift` on.
template <typename State, unsigned size>
__device__ __forceinline__ void store_state(State* x, const Pack<float, size>& values,
                                            const Pack<uint32_t, size>& words, unsigned shift) {
    Pack<State, size> pack;
    for (unsigned j = 0; j < size; j++) {
        pack.element[j] =
            from_float_stochastic<State>(values.element[j], words.element[j] >> shift & 0xffffu);
    }
    *reinterpret_cast<Pack<State, size>*>(x) = pack;
}
