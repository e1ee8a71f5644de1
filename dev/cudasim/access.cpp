// Every load and store of a kernel is checked here.
//
// GCC's AddressSanitizer puts a test before each access. Compiled with
//     -fsanitize=address --param asan-instrumentation-with-call-threshold=0
// it calls __asan_load4(address) and the like instead, and this file defines those functions. So each access
// is seen, and beyond what ASan finds (out of bounds, after free) these are found:
//   misaligned    vectors of 8 and 16 bytes, as the hardware demands
//   never written a load of a byte that nothing stored, of any type; or of cp.async's data before its wait
//   races         two threads touch the same 2 bytes, one of them stores, and no barrier stands between; or
//                 two operations of streams do, and nothing orders them: see order.cpp
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
// warp, a __syncwarp) came between them, or they are of different operations that are ordered. Shuffles and
// votes order no memory accesses (CUDA C++ Programming Guide, "Warp Shuffle Functions").
// Kept for each word: its last writer and its last reader, or that several have read it.

// Who touched a word, when; a Touch packs it into 64 bits. Epochs wrap; that can only hide a race.
struct Access {
    uint32_t run;     // of the block; 29 bits
    unsigned halves;  // which 2 bytes of the word; 2 bits: neighbours may write one each
    // The thread; or, where several have read since the last barrier, several + warp, or several_warps.
    unsigned who;                      // 11 bits
    unsigned block_epoch, warp_epoch;  // 12 and 10 bits

    static constexpr unsigned several = 1024, several_warps = several + 1024 / warp_size;
    static constexpr int run_shift = 35;

    unsigned warp() const { return who < several ? who / warp_size : who - several; }
    uint64_t packed() const {
        return uint64_t{run} << run_shift | uint64_t{halves} << 33 | uint64_t{who} << 22 |
               uint64_t{block_epoch} << 10 | warp_epoch;
    }
    static Access unpack(uint64_t x) {
        return {static_cast<uint32_t>(x >> run_shift), static_cast<unsigned>(x >> 33 & 3),
                static_cast<unsigned>(x >> 22 & 0x7ff), static_cast<unsigned>(x >> 10 & 0xfff),
                static_cast<unsigned>(x & 0x3ff)};
    }
};
static_assert(max_runs == uint32_t{1} << (64 - Access::run_shift));

// One access, as it is compared with what a word remembers.
struct Observer {
    Access now;
    uint64_t packed;
    uint32_t first_run;       // of its operation
    bool blocks_are_ordered;  // of its operation: its blocks have shared memory of their own, or fences
    uint64_t from, to;        // packed accesses outside of [from, to) have nothing to do with this one

    // By a thread of a kernel.
    Observer(const Thread& thread, const void* address, unsigned halves)
        : now{thread.block->run, halves, thread.number, thread.block->epoch & 0xfff,
              thread.block->warps[thread.warp()].epoch & 0x3ff},
          packed(now.packed()),
          first_run(thread.block->launch->first_run) {
        const bool shared = is_shared_memory(address);
        blocks_are_ordered = shared || thread.block->launch->fenced.load(std::memory_order_relaxed);
        from = pack_run(!shared && !unordered_operations().empty() ? unordered_operations()[0].first_run
                        : blocks_are_ordered                       ? now.run
                                                                   : first_run);
        to = blocks_are_ordered ? pack_run(now.run + 1) : ~uint64_t{0};
    }

    // By another operation.
    explicit Observer(unsigned halves)
        : now{current_run(), halves, 0, 0, 0},
          packed(now.packed()),
          first_run(now.run),
          blocks_are_ordered(true) {
        from = pack_run(unordered_operations().empty() ? now.run : unordered_operations()[0].first_run);
        to = ~uint64_t{0};
    }

    static uint64_t pack_run(uint32_t run) { return uint64_t{run} << Access::run_shift; }

    bool conflicts_with(uint64_t earlier) const {
        return earlier >= from && earlier < to && earlier != packed && !ordered(Access::unpack(earlier));
    }

    bool ordered(const Access& earlier) const {
        if ((earlier.halves & now.halves) == 0) return true;
        if (earlier.run < first_run) return find_unordered(earlier.run) == nullptr;
        if (earlier.run != now.run) return blocks_are_ordered;
        if (earlier.block_epoch != now.block_epoch || earlier.who == now.who) return true;
        return earlier.warp() == now.warp() && earlier.warp_epoch != now.warp_epoch;
    }
};

[[noreturn]] void report_race(const void* address, uint64_t packed, bool wrote, bool writes) {
    const Access earlier = Access::unpack(packed);
    const char *verb = writes ? "writes" : "reads", *past_verb = wrote ? "wrote" : "read";
    if (const Ran* other = find_unordered(earlier.run)) {
        const std::string name =
            other->kernel == nullptr ? other->name : "kernel " + kernel_name(other->kernel);
        fault("race between streams: %s what %s %s, and no event or wait orders them: %s", verb, name.c_str(),
              past_verb, describe_address(address).c_str());
    }
    const uint32_t block = earlier.run - running()->block->launch->first_run;
    char who[80];
    if (earlier.who < Access::several) {
        snprintf(who, sizeof(who), "thread number %u of block number %u", earlier.who, block);
    } else {
        snprintf(who, sizeof(who), "several threads of block number %u", block);
    }
    fault("race: %s what %s %s with no barrier between: %s", verb, who, past_verb,
          describe_address(address).c_str());
}

[[gnu::always_inline]] inline void record_word(Touch& touch, const void* address, const Observer& observer,
                                               bool write) {
    const uint64_t writer = touch.writer.load(std::memory_order_relaxed);
    const uint64_t reader = touch.reader.load(std::memory_order_relaxed);
    if (observer.conflicts_with(writer)) report_race(address, writer, true, write);
    if (write) {
        if (observer.conflicts_with(reader)) report_race(address, reader, false, true);
        touch.writer.store(observer.packed, std::memory_order_relaxed);
    } else if (observer.conflicts_with(reader) && reader >= Observer::pack_run(observer.first_run)) {
        // No fault: two readers of one kernel.
        const Access earlier = Access::unpack(reader);
        Access both = observer.now;
        const bool one_warp = earlier.run == both.run && earlier.warp() == both.warp();
        both.halves |= earlier.halves;
        both.who = one_warp ? Access::several + earlier.warp() : Access::several_warps;
        touch.reader.store(both.packed(), std::memory_order_relaxed);
    } else {
        touch.reader.store(observer.packed, std::memory_order_relaxed);
    }
}

void record(const void* address, size_t bytes, bool write, const Thread& thread) {
    const size_t offset = region_offset(address);
    Touch* touch = region.touches + offset / word;
    if (bytes == 2) {
        record_word(*touch, address, Observer(thread, address, offset % word == 0 ? 1 : 2), write);
    } else if (bytes >= word) {
        const Observer observer(thread, address, 3);
        for (Touch* end = touch + bytes / word; touch != end; ++touch) {
            record_word(*touch, address, observer, write);
        }
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

bool is_atomic(const void* address, Launch& launch) {
    if (!launch.has_atomics) return false;
    const std::lock_guard lock(launch.atomics_mutex);
    return launch.atomics.contains(address);
}

void look_again(const RecentLoad& load) {
    uint64_t value[2];
    read_value(value, load.address, load.bytes);
    if (value[0] == load.value[0] && value[1] == load.value[1]) return;
    // Atomic operations of other blocks may have changed it.
    if (is_atomic(load.address, *running()->block->launch)) return;
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

// Whether ASan's shadow forbids the access: one shadow byte tells of 8 bytes how many may be touched, 0 for
// all (https://github.com/google/sanitizers/wiki/AddressSanitizerAlgorithm).
template <size_t bytes>
[[gnu::always_inline]] inline bool poisoned(uintptr_t address) {
    if (shadow_offset == 0) [[unlikely]] {
        size_t scale = 0;
        __asan_get_shadow_mapping(&scale, &shadow_offset);
    }
    const int8_t* shadow = reinterpret_cast<const int8_t*>((address >> 3) + shadow_offset);
    if constexpr (bytes >= 8) {
        // An unaligned access of 8 bytes and more reaches into the next granule.
        const uintptr_t last = address + bytes - 1;
        const int8_t end = *reinterpret_cast<const int8_t*>((last >> 3) + shadow_offset);
        return shadow[0] != 0 || (bytes == 16 && shadow[1] != 0) ||
               (end != 0 && static_cast<int8_t>(last & 7) >= end);
    } else {
        return shadow[0] != 0 && static_cast<int8_t>((address & 7) + bytes - 1) >= shadow[0];
    }
}

[[noreturn]] void report_never_written(const void* address, size_t bytes, State state) {
    if (state == State::in_flight) {
        fault("reads what cp.async has not brought yet (no wait, or no barrier after it): %s",
              describe_address(address).c_str());
    }
    fault("reads %zu bytes that were never written: %s", bytes, describe_address(address).c_str());
}

// The state of the bytes of an access, 8 at a time where it is that long.
static_assert(static_cast<int>(State::written) == 1);
constexpr uint64_t all_written = 0x0101010101010101u;

void mark_written(State* state, size_t bytes) {
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8) memcpy(state + i, &all_written, 8);
    if (i + 4 <= bytes) memcpy(state + i, &all_written, 4), i += 4;
    for (; i < bytes; ++i) state[i] = State::written;
}

void demand_written(const State* state, const void* address, size_t bytes) {
    size_t i = 0;
    uint64_t eight = all_written;
    for (; i + 8 <= bytes && eight == all_written; i += 8) memcpy(&eight, state + i, 8);
    if (eight != all_written) i -= 8;
    for (; i < bytes; ++i) {
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
    if (poisoned<bytes>(a)) [[unlikely]] {
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
    if (running() == nullptr) fault("an atomic operation outside of a kernel");
    if (__asan_region_is_poisoned(const_cast<void*>(address), bytes) != nullptr) {
        fault("out of bounds: atomic operation at %s", describe_address(address).c_str());
    }
    if (in_region(address)) demand_written(region.state + region_offset(address), address, bytes);
    note_hidden_stores();  // what changes from here on may be the work of atomic operations
    Launch& launch = *running()->block->launch;
    const std::lock_guard lock(launch.atomics_mutex);
    launch.atomics.insert(address);
    launch.has_atomics = true;
}

void note_hidden_stores() {
    const size_t kept = std::min(recent.count, recent_loads);
    for (size_t i = 0; i < kept; ++i) look_again(recent.ring[i]);
    recent.count = 0;
}

// Whole halves of words; stray bytes at the ends are not recorded.
void record_access(const void* address, size_t bytes, bool write) {
    if (!operation_running()) return;
    constexpr size_t half = word / 2;
    const size_t first = round_up(region_offset(address), half),
                 end = (region_offset(address) + bytes) / half * half;
    const Observer lower(1), upper(2), both(3);
    for (size_t at = first; at < end;) {
        const bool whole = at % word == 0 && at + word <= end;
        const Observer& observer = whole ? both : at % word == 0 ? lower : upper;
        record_word(region.touches[at / word], region.base + at, observer, write);
        at += whole ? word : half;
    }
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
