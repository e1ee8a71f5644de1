// Every load and store of a kernel is checked here.
//
// GCC's AddressSanitizer puts a test before each access. Compiled with
//     -fsanitize=address --param asan-instrumentation-with-call-threshold=0
// it calls __asan_load4(address) and the like instead, and this file defines those functions. So each access
// is seen, and beyond what ASan finds (out of bounds, after free) these are found:
//   misaligned    vectors of 8 and 16 bytes, as the hardware demands
//   never written a load of a byte that nothing stored, of any type; or of cp.async's data before its wait
//   races         two threads touch the same 2 bytes, one of them stores, and no barrier stands between
//   host code     that reaches into device memory
// Not seen: local variables (the compiler's warnings see those), races on single bytes, and what a function
// compiled without these options does. Where GCC sees a load and a store to one address in one basic block
// (x += 1), it tests the load alone: such stores are found by looking whether a loaded value has changed.
//
// This file itself is compiled without ASan, or it would call itself.
#ifdef __SANITIZE_ADDRESS__
#error "compile dev/cudasim without -fsanitize: it is the instrument"
#endif

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "memory.h"

extern "C" {
void __asan_get_shadow_mapping(size_t* scale, size_t* offset);
void __asan_report_load_n(const void* address, size_t bytes);
void __asan_report_store_n(const void* address, size_t bytes);
}

namespace cudasim {
namespace {

// ---------------------------------------------------------------------------------------------------
// Races. Two accesses are ordered if they are of the same thread, or a barrier of their block (or, within a
// warp, a __syncwarp) came between them, or they are of different launches: those are ordered by streams.
// Shuffles and votes order no memory accesses (CUDA C++ Programming Guide, "Warp Shuffle Functions").
// Kept for each word: its last writer and its last reader, or that several have read it.

// Who touched a word, when: what Touch packs into 64 bits. Counters wrap; that can only hide a race.
struct Access {
    uint32_t run;     // of the block; 29 bits
    unsigned halves;  // which 2 bytes of the word; 2 bits: neighbours may write one each
    // The thread; or, where several have read since the last barrier, several + warp, or several_warps.
    unsigned who;                      // 11 bits
    unsigned block_epoch, warp_epoch;  // 12 and 10 bits

    static constexpr unsigned several = 1024, several_warps = several + 1024 / warp_size;

    unsigned warp() const { return who < several ? who / warp_size : who - several; }
    uint64_t packed() const {
        return uint64_t{run} << 35 | uint64_t{halves} << 33 | uint64_t{who} << 22 |
               uint64_t{block_epoch} << 10 | warp_epoch;
    }
    static Access unpack(uint64_t x) {
        return {static_cast<uint32_t>(x >> 35), static_cast<unsigned>(x >> 33 & 3),
                static_cast<unsigned>(x >> 22 & 0x7ff), static_cast<unsigned>(x >> 10 & 0xfff),
                static_cast<unsigned>(x & 0x3ff)};
    }
};
constexpr uint32_t run_mask = (1u << 29) - 1;

Access access_by(const Thread& thread, unsigned halves) {
    return {thread.block->run & run_mask, halves, thread.number, thread.block->epoch & 0xfff,
            thread.block->warps[thread.warp()].epoch & 0x3ff};
}

bool ordered(const Access& earlier, const Access& now, const Thread& thread, bool shared_memory) {
    if ((earlier.halves & now.halves) == 0) return true;
    if (earlier.run != now.run) {
        const Launch& launch = *thread.block->launch;
        // Shared memory of an earlier block is another's memory; an earlier launch has finished.
        return shared_memory || launch.fenced || earlier.run < (launch.first_run & run_mask);
    }
    if (earlier.block_epoch != now.block_epoch || earlier.who == now.who) return true;
    return earlier.warp() == now.warp() && earlier.warp_epoch != now.warp_epoch;
}

[[noreturn]] void report_race(const void* address, const Access& earlier, bool wrote, bool writes,
                              const Thread& thread) {
    char who[80];
    const uint32_t block = earlier.run - (thread.block->launch->first_run & run_mask);
    if (earlier.who < Access::several) {
        snprintf(who, sizeof(who), "thread number %u of block number %u", earlier.who, block);
    } else {
        snprintf(who, sizeof(who), "several threads of block number %u", block);
    }
    fault("race: %s what %s %s with no barrier between: %s", writes ? "writes" : "reads", who,
          wrote ? "wrote" : "read", describe_address(address).c_str());
}

void record_word(Touch& touch, const void* address, const Access& now, bool write, const Thread& thread,
                 bool shared_memory) {
    const uint64_t packed = now.packed();
    const uint64_t writer = touch.writer.load(std::memory_order_relaxed);
    const uint64_t reader = touch.reader.load(std::memory_order_relaxed);
    const auto conflicts = [&](uint64_t earlier) {
        return earlier != 0 && earlier != packed &&
               !ordered(Access::unpack(earlier), now, thread, shared_memory);
    };
    if (conflicts(writer)) report_race(address, Access::unpack(writer), true, write, thread);
    if (write) {
        if (conflicts(reader)) report_race(address, Access::unpack(reader), false, true, thread);
        touch.writer.store(packed, std::memory_order_relaxed);
    } else if (conflicts(reader)) {
        const Access earlier = Access::unpack(reader);
        Access both = now;
        both.halves |= earlier.halves;
        both.who = earlier.run == now.run && earlier.warp() == now.warp() ? Access::several + now.warp()
                                                                          : Access::several_warps;
        touch.reader.store(both.packed(), std::memory_order_relaxed);
    } else {
        touch.reader.store(packed, std::memory_order_relaxed);
    }
}

void record(const void* address, size_t bytes, bool write, const Thread& thread) {
    if (bytes < 2) return;
    const bool shared_memory = is_shared_memory(address);
    const size_t offset = region_offset(address);
    Touch* touch = region.touches + offset / word;
    if (bytes == 2) {
        const Access now = access_by(thread, offset % word == 0 ? 1 : 2);
        return record_word(*touch, address, now, write, thread, shared_memory);
    }
    const Access now = access_by(thread, 3);
    for (Touch* end = touch + bytes / word; touch != end; ++touch) {
        record_word(*touch, address, now, write, thread, shared_memory);
    }
}

// ---------------------------------------------------------------------------------------------------
// Stores that no check sees

// What the running thread has loaded since it began to run.
struct RecentLoad {
    const void* address = nullptr;
    size_t bytes = 0;
    uint64_t value[2] = {};
};
constexpr size_t recent_loads = 16;
struct RecentLoads {
    RecentLoad ring[recent_loads] = {};
    size_t count = 0;
};
constinit thread_local RecentLoads recent;

// A plain loop over 8 and 4 bytes: memcpy would be ASan's.
void read_value(uint64_t value[2], const void* address, size_t bytes) {
    value[1] = 0;
    if (bytes == 4) {
        value[0] = *static_cast<const uint32_t*>(address);
    } else if (bytes == 2) {
        value[0] = *static_cast<const uint16_t*>(address);
    } else {
        value[0] = static_cast<const uint64_t*>(address)[0];
        if (bytes == 16) value[1] = static_cast<const uint64_t*>(address)[1];
    }
}

void look_again(const RecentLoad& load) {
    uint64_t value[2];
    read_value(value, load.address, load.bytes);
    if (value[0] != load.value[0] || value[1] != load.value[1])
        record(load.address, load.bytes, true, *running());
}

void remember(const void* address, size_t bytes) {
    RecentLoad& load = recent.ring[recent.count % recent_loads];
    if (recent.count++ >= recent_loads) look_again(load);
    load.address = address;
    load.bytes = bytes;
    read_value(load.value, address, bytes);
}

// ---------------------------------------------------------------------------------------------------
// One access

// Set at the first access, which may come before this file's initialisers.
constinit size_t shadow_offset = 0;

// Whether ASan's shadow forbids the byte: https://github.com/google/sanitizers/wiki/AddressSanitizerAlgorithm
bool poisoned(uintptr_t address) {
    if (shadow_offset == 0) [[unlikely]] {
        size_t scale = 0;
        __asan_get_shadow_mapping(&scale, &shadow_offset);
    }
    const int8_t shadow = *reinterpret_cast<const int8_t*>((address >> 3) + shadow_offset);
    return shadow != 0 && static_cast<int8_t>(address & 7) >= shadow;
}

[[noreturn]] void report_never_written(const void* address, size_t bytes, State state) {
    if (state == State::in_flight) {
        fault("reads what cp.async has not brought yet (no wait, or no barrier after it): %s",
              describe_address(address).c_str());
    }
    fault("reads %zu bytes that were never written: %s", bytes, describe_address(address).c_str());
}

// Sets or tests the state of each byte.
void mark_written(State* state, size_t bytes) {
    static_assert(static_cast<int>(State::written) == 1);
    constexpr uint64_t all = 0x0101010101010101u;
    switch (bytes) {
        case 2:
            *reinterpret_cast<uint16_t*>(state) = static_cast<uint16_t>(all);
            break;
        case 4:
            *reinterpret_cast<uint32_t*>(state) = static_cast<uint32_t>(all);
            break;
        case 8:
            *reinterpret_cast<uint64_t*>(state) = all;
            break;
        default:
            std::fill(state, state + bytes, State::written);
    }
}

void demand_written(const State* state, const void* address, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) {
        if (state[i] != State::written) report_never_written(address, bytes, state[i]);
    }
}

inline __attribute__((always_inline)) void check_device_access(const void* address, size_t bytes,
                                                               bool write) {
    const Thread* thread = running();
    const char* verb = write ? "writes" : "reads";
    if (thread == nullptr) {
        if (operation_running())
            return;  // a stand-in of a library, which has called will_read and will_write
        fault("host code %s device memory: %s", verb, describe_address(address).c_str());
    }
    const bool hardware_size = bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16;
    if (hardware_size && reinterpret_cast<uintptr_t>(address) % bytes != 0) {
        fault("misaligned: %s %zu bytes at %s", verb, bytes, describe_address(address).c_str());
    }
    State* state = region.state + region_offset(address);
    if (write) {
        mark_written(state, bytes);
    } else {
        demand_written(state, address, bytes);
        if (hardware_size) remember(address, bytes);
    }
    record(address, bytes, write, *thread);
}

template <size_t bytes, bool write>
inline void check(const void* address) {
    const uintptr_t a = reinterpret_cast<uintptr_t>(address);
    const bool device = in_region(address);
    if (poisoned(a) || poisoned(a + bytes - 1)) [[unlikely]] {
        if (device) {
            fault("out of bounds: %s %zu bytes at %s", write ? "writes" : "reads", bytes,
                  describe_address(address).c_str());
        }
        (write ? __asan_report_store_n : __asan_report_load_n)(address, bytes);
    }
    if (device) check_device_access(address, bytes, write);
}

// Any size: copies of whole structs.
void check_any(const void* address, size_t bytes, bool write) {
    if (in_region(address)) {
        check_access(address, bytes, write);
    } else if (__asan_region_is_poisoned(const_cast<void*>(address), bytes) != nullptr) {
        (write ? __asan_report_store_n : __asan_report_load_n)(address, bytes);
    }
}

}  // namespace

void check_access(const void* address, size_t bytes, bool write) {
    if (__asan_region_is_poisoned(const_cast<void*>(address), bytes) != nullptr) {
        fault("out of bounds: %s %zu bytes at %s", write ? "writes" : "reads", bytes,
              describe_address(address).c_str());
    }
    if (in_region(address)) check_device_access(address, bytes, write);
}

void check_atomic(const void* address, size_t bytes) {
    if (__asan_region_is_poisoned(const_cast<void*>(address), bytes) != nullptr) {
        fault("out of bounds: atomic operation at %s", describe_address(address).c_str());
    }
    if (in_region(address)) demand_written(region.state + region_offset(address), address, bytes);
    note_hidden_stores();  // or what this operation changes would be taken for a plain store
}

void note_hidden_stores() {
    const size_t kept = std::min(recent.count, recent_loads);
    for (size_t i = 0; i < kept; ++i) look_again(recent.ring[i]);
    recent.count = 0;
}

}  // namespace cudasim

// These take the place of ASan's own, which a program may do: the library is linked dynamically.
extern "C" {
using cudasim::check;
void __asan_load1(const void* address) { check<1, false>(address); }
void __asan_load2(const void* address) { check<2, false>(address); }
void __asan_load4(const void* address) { check<4, false>(address); }
void __asan_load8(const void* address) { check<8, false>(address); }
void __asan_load16(const void* address) { check<16, false>(address); }
void __asan_store1(const void* address) { check<1, true>(address); }
void __asan_store2(const void* address) { check<2, true>(address); }
void __asan_store4(const void* address) { check<4, true>(address); }
void __asan_store8(const void* address) { check<8, true>(address); }
void __asan_store16(const void* address) { check<16, true>(address); }
void __asan_loadN(const void* address, size_t bytes) { cudasim::check_any(address, bytes, false); }
void __asan_storeN(const void* address, size_t bytes) { cudasim::check_any(address, bytes, true); }
}
