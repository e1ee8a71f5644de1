// The range of addresses that holds device and shared memory, and what is known about each byte of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "internal.h"

namespace cudasim {

enum class State : uint8_t {
    fresh,      // never written
    written,    //
    in_flight,  // the target of a cp.async that nothing has waited for
};

// Who last wrote and last read a word of 4 bytes, packed; 0: nobody. See access.cpp.
struct Touch {
    std::atomic<uint64_t> writer, reader;
};
constexpr size_t word = 4;

constexpr size_t region_bytes = size_t{1} << 39;
constexpr size_t shared_arena_bytes = size_t{1} << 20;     // one OS thread's; at most 227 KiB and guards
constexpr size_t shared_span = 1024 * shared_arena_bytes;  // shared memory lies below, device memory above

struct Region {
    char* base;
    State* state;    // one a byte
    Touch* touches;  // one a word
};
extern Region region;

inline size_t region_offset(const void* address) {
    return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(region.base);
}
inline bool is_shared_memory(const void* address) { return region_offset(address) < shared_span; }
inline bool in_region(const void* address) { return region_offset(address) < region_bytes; }

void make_unreachable(void* memory, size_t bytes);  // poisons it; whole 8 bytes
void make_fresh(void* memory, size_t bytes);        // lifts the poison; never written
void set_state(void* memory, size_t bytes, State state);
void copy_state(void* to, const void* from, size_t bytes);

// Forgets who touched what.
void forget_touches();

// Faults unless the range lies within one device allocation.
void check_range(const void* memory, size_t bytes, const char* name);

// Starts the shared memory of a block that was launched with `limit` bytes on this OS thread.
void begin_shared_memory(size_t limit);

}  // namespace cudasim
