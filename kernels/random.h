// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011). A number is a pure function of (seed, stream, index): there is no state to save,
// and the same number comes out on every rank, thread and restart. What is constexpr here is for kernels too.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

// The streams that draw numbers; each has its own sequence for the same seed.
enum class RandomStream : uint32_t { initialization = 1, shuffle = 2, sampling = 3, rounding = 4 };

// The key of the next round.
constexpr std::array<uint32_t, 2> philox_next_key(std::array<uint32_t, 2> key) {
    return {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
}

// One round of Philox on the words of a 128-bit counter.
constexpr void philox_round(uint32_t& word0, uint32_t& word1, uint32_t& word2, uint32_t& word3,
                            std::array<uint32_t, 2> key) {
    const uint64_t product0 = uint64_t{0xD2511F53} * word0;
    const uint64_t product1 = uint64_t{0xCD9E8D57} * word2;
    word0 = static_cast<uint32_t>(product1 >> 32) ^ word1 ^ key[0];
    word1 = static_cast<uint32_t>(product1);
    word2 = static_cast<uint32_t>(product0 >> 32) ^ word3 ^ key[1];
    word3 = static_cast<uint32_t>(product0);
}

// Ten rounds with a 64-bit key.
constexpr std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
    for (int round = 0; round < 10; round++) {
        philox_round(counter[0], counter[1], counter[2], counter[3], key);
        key = philox_next_key(key);
    }
    return counter;
}

// 128 random bits for (seed, stream, substream, index); substream is a tensor's number, an epoch, ...
constexpr std::array<uint32_t, 4> random_bits(uint64_t seed, RandomStream stream, uint32_t substream,
                                              uint64_t index) {
    return philox({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), substream,
                   static_cast<uint32_t>(stream)},
                  {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
}

// Uniform in (0, 1), 52 bits: neither end can come out.
inline double random_uniform(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t index) {
    const auto bits = random_bits(seed, stream, substream, index);
    const uint64_t mantissa = (uint64_t{bits[0]} << 32 | bits[1]) >> 12;
    return (static_cast<double>(mantissa) + 0.5) * 0x1p-52;
}

// Standard normal, by the cosine half of Box and Muller (1958).
inline double random_normal(uint64_t seed, RandomStream stream, uint32_t substream, uint64_t index) {
    const auto bits = random_bits(seed, stream, substream, index);
    const double u1 = (bits[0] + 0.5) * 0x1p-32;
    const double u2 = (bits[1] + 0.5) * 0x1p-32;
    return std::sqrt(-2.0 * std::log(u1)) * std::cos(2.0 * M_PI * u2);
}

// out(i) = std * random_normal(..., first + i) for i < count, rounded to fp32; many at a time, to 1e-15
// before it.
void random_normals(float* out, size_t count, double std, uint64_t seed, RandomStream stream,
                    uint32_t substream, uint64_t first);
