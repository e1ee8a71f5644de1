// Device memory: allocations between guards, and for each byte whether it was ever written.
//
// Device and shared memory lie in one reserved range of addresses, so that "is this device memory" is one
// comparison, and what is known about byte i stands at place i of a second range. Both ranges are reserved,
// not allocated: pages come into being when touched. Addresses are never given out twice: a pointer that is
// used after cudaFree always hits poison.
#include "memory.h"

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>

namespace cudasim {

// No pointer lies in it until it is opened, before main.
Region region = {reinterpret_cast<char*>(uintptr_t{1} << 63), nullptr, nullptr};

bool is_device_memory(const void* address) { return in_region(address); }

namespace {

constexpr size_t page = 4096, guard = 256, alignment = 256;

struct Allocation {
    size_t bytes;
    int device;
    bool live;
};

struct Heap {
    std::mutex mutex;
    std::map<uintptr_t, Allocation> allocations;             // device memory, by its start; freed ones too
    std::map<uintptr_t, size_t> pinned;                      // live pinned host memory
    size_t end = shared_span + guard, usable = shared_span;  // offsets: next free byte, end of usable pages
    std::map<int, size_t> in_use;                            // bytes, of each device
    std::vector<size_t> free_slots;                          // of shared memory, whose OS threads have ended
    size_t slots = 0;
};
Heap& heap() {
    static Heap instance;
    return instance;
}

template <typename Element>
Element* reserve(size_t bytes, int access = PROT_READ | PROT_WRITE) {
    void* range = mmap(nullptr, bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) fault("cannot reserve %zu GiB of addresses: is `ulimit -v` set?", bytes >> 30);
    madvise(range, bytes, MADV_DONTDUMP);
    return static_cast<Element*>(range);
}

// Makes part of the region usable, and poisons it. Beyond it an access is a segmentation fault.
void open_pages(char* memory, size_t bytes) {
    if (mprotect(memory, bytes, PROT_READ | PROT_WRITE) != 0) fault("out of the host's memory");
    make_unreachable(memory, bytes);
}

// Forgets the contents of whole pages, giving their memory back.
void drop_pages(void* memory, size_t bytes) {
    const uintptr_t first = round_up(reinterpret_cast<uintptr_t>(memory), page);
    const uintptr_t last = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

// What never-written memory holds: a NaN for every floating-point type, as an index far out of range. Only
// what no check sees (see access.cpp) ever meets it.
void fill_fresh(void* memory, size_t bytes) {
    constexpr unsigned char pattern[2] = {0xf7, 0x7f};
    if (bytes == 0) return;
    char* to = static_cast<char*>(memory);
    size_t done = std::min<size_t>(bytes, 2);
    memcpy(to, pattern, done);
    for (; done < bytes; done += std::min(done, bytes - done))
        memcpy(to + done, to, std::min(done, bytes - done));
}

// The allocation that holds `address` or ends at most a guard before it; end() if there is none.
std::map<uintptr_t, Allocation>::const_iterator nearest(const void* address) {
    const Heap& h = heap();
    auto after = h.allocations.upper_bound(reinterpret_cast<uintptr_t>(address));
    return after == h.allocations.begin() ? h.allocations.end() : std::prev(after);
}

}  // namespace

namespace {

// Before main: no pointer is device memory until then.
const bool opened = [] {
    region.state = reserve<State>(region_bytes);
    region.touches = reserve<Touch>(region_bytes / word * sizeof(Touch));
    region.base = reserve<char>(region_bytes, PROT_NONE);
    return true;
}();

}  // namespace

void make_unreachable(void* memory, size_t bytes) { __asan_poison_memory_region(memory, bytes); }

void make_fresh(void* memory, size_t bytes) {
    __asan_unpoison_memory_region(memory, bytes);
    fill_fresh(memory, bytes);
    memset(region.state + region_offset(memory), static_cast<int>(State::fresh), bytes);
}

void set_state(void* memory, size_t bytes, State state) {
    memset(region.state + region_offset(memory), static_cast<int>(state), bytes);
}

void copy_state(void* to, const void* from, size_t bytes) {
    memmove(region.state + region_offset(to), region.state + region_offset(from), bytes);
}

void forget_touches() { drop_pages(region.touches, region_bytes / word * sizeof(Touch)); }

void check_range(const void* memory, size_t bytes, const char* name) {
    if (bytes == 0) return;
    if (!is_device_memory(memory)) fault("%s: %p is not device memory", name, memory);
    void* bad = __asan_region_is_poisoned(const_cast<void*>(memory), bytes);
    if (bad != nullptr) {
        const size_t offset = static_cast<size_t>(static_cast<char*>(bad) - static_cast<const char*>(memory));
        fault("%s: out of bounds from byte %zu of %zu: %s", name, offset, bytes,
              describe_address(bad).c_str());
    }
}

void guard_gap(void* device, size_t bytes) {
    check_range(device, bytes, "guard_gap");
    make_unreachable(device, bytes);
}

void will_read(const void* device, size_t bytes, const char* name) {
    check_range(device, bytes, name);
    if (bytes == 0) return;
    const State* state = region.state + region_offset(device);
    const State* bad = std::find_if(state, state + bytes, [](State s) { return s != State::written; });
    if (bad != state + bytes) {
        fault("%s: reads memory that was never written, from byte %zu of %zu: %s", name,
              static_cast<size_t>(bad - state), bytes,
              describe_address(static_cast<const char*>(device) + (bad - state)).c_str());
    }
    record_access(device, bytes, false);
}

void will_write(void* device, size_t bytes, const char* name) {
    check_range(device, bytes, name);
    if (bytes == 0) return;
    set_state(device, bytes, State::written);
    record_access(device, bytes, true);
}

// ---------------------------------------------------------------------------------------------------
// Shared memory: one arena an OS thread, since it runs one block at a time

namespace {

struct Piece {
    const void* after;
    char* start;
    size_t bytes;
    size_t end_on_gpu;  // offset of its end where there are no guards
};

struct SharedArena {
    char* base = nullptr;
    std::vector<Piece> pieces;  // of the running block
    size_t limit = 0;           // what the launch gave

    void open();
    void clear();
    ~SharedArena();
};
thread_local SharedArena shared_arena;

void SharedArena::open() {
    Heap& h = heap();
    const std::lock_guard lock(h.mutex);
    if (h.free_slots.empty()) h.free_slots.push_back(h.slots++);
    const size_t slot = h.free_slots.back();
    h.free_slots.pop_back();
    if ((slot + 1) * shared_arena_bytes > shared_span) fault("more than %zu OS threads run blocks", slot);
    base = region.base + slot * shared_arena_bytes;
    open_pages(base, shared_arena_bytes);
}

void SharedArena::clear() {
    for (const Piece& piece : pieces) make_unreachable(piece.start, round_up(piece.bytes, 8));
    pieces.clear();
}

SharedArena::~SharedArena() {
    if (base == nullptr) return;
    clear();
    const std::lock_guard lock(heap().mutex);
    heap().free_slots.push_back(region_offset(base) / shared_arena_bytes);
}

}  // namespace

void begin_shared_memory(size_t limit) {
    if (shared_arena.base == nullptr) shared_arena.open();
    shared_arena.clear();
    shared_arena.limit = limit;
}

void* shared_memory(size_t bytes, size_t align, const void* after) {
    SharedArena& arena = shared_arena;
    const Piece* before = nullptr;
    for (const Piece& piece : arena.pieces) {
        if (piece.after == after) {
            if (piece.bytes == bytes) return piece.start;
            fault("asks for %zu bytes of shared memory where another thread asked for %zu", bytes,
                  piece.bytes);
        }
        if (piece.start + piece.bytes == after) before = &piece;
    }
    if (after != nullptr && before == nullptr) fault("shared memory after something that is not its end");
    const size_t offset = before == nullptr ? 0 : round_up(before->end_on_gpu, align);
    if (offset + bytes > arena.limit) {
        fault("uses %zu bytes of shared memory where the launch gave %zu", offset + bytes, arena.limit);
    }
    char* start =
        before == nullptr
            ? arena.base + guard
            : arena.base +
                  round_up(static_cast<size_t>(before->start - arena.base) + before->bytes + guard, align);
    make_fresh(start, bytes);
    arena.pieces.push_back({after, start, bytes, offset + bytes});
    return start;
}

// ---------------------------------------------------------------------------------------------------
// Reports

std::string describe_address(const void* address) {
    const char* place = static_cast<const char*>(address);
    char text[160];
    if (!is_device_memory(address)) {
        snprintf(text, sizeof(text), "%p, which is not device memory", address);
        return text;
    }
    const char* kind = "device allocation";
    size_t offset = region_bytes, bytes = 0;
    bool live = true;
    if (is_shared_memory(address)) {
        kind = "shared array";
        for (const Piece& piece : shared_arena.pieces) {
            const size_t from_start = static_cast<size_t>(place - piece.start);  // huge if before it
            if (from_start < offset) offset = from_start, bytes = piece.bytes;
        }
    } else {
        const std::lock_guard lock(heap().mutex);
        const auto found = nearest(address);
        if (found != heap().allocations.end()) {
            offset = static_cast<size_t>(reinterpret_cast<uintptr_t>(address) - found->first);
            bytes = found->second.bytes;
            live = found->second.live;
        }
    }
    if (offset == region_bytes) {
        snprintf(text, sizeof(text), "%p, before every %s", address, kind);
    } else if (offset >= bytes) {
        snprintf(text, sizeof(text), "%zu bytes past the end of a %s of %zu bytes", offset - bytes, kind,
                 bytes);
    } else {
        snprintf(text, sizeof(text), "byte %zu of a %s%s of %zu bytes", offset, live ? "" : "freed ", kind,
                 bytes);
    }
    return text;
}

bool is_pinned_memory(const void* address) {
    const std::lock_guard lock(heap().mutex);
    const auto& pinned = heap().pinned;
    const auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(address));
    if (after == pinned.begin()) return false;
    const auto& [start, bytes] = *std::prev(after);
    return reinterpret_cast<uintptr_t>(address) <= start + bytes;
}

}  // namespace cudasim

// ---------------------------------------------------------------------------------------------------
// The CUDA calls

using cudasim::heap;

cudaError_t cudaMalloc(void** memory, size_t bytes) {
    using namespace cudasim;
    *memory = nullptr;
    demand_no_capture("cudaMalloc");
    if (device_count() == 0) return cudaErrorNoDevice;
    if (bytes == 0) return cudaSuccess;
    Heap& h = heap();
    const std::lock_guard lock(h.mutex);
    size_t& in_use = h.in_use[current_device()];
    if (bytes > memory_limit() - in_use) return cudaErrorMemoryAllocation;
    const size_t start = h.end, end = round_up(start + bytes + guard, alignment);
    if (end > region_bytes) fault("cudaMalloc: the simulator has used up its addresses");
    if (end > h.usable) {
        // Poison ahead, so that what follows the last allocation is out of bounds too.
        const size_t usable = std::min(region_bytes, round_up(end, size_t{1} << 20) + (size_t{1} << 20));
        open_pages(region.base + h.usable, usable - h.usable);
        h.usable = usable;
    }
    *memory = region.base + start;
    make_fresh(*memory, bytes);
    h.allocations[reinterpret_cast<uintptr_t>(*memory)] = {bytes, current_device(), true};
    in_use += bytes;
    h.end = end;
    return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
    using namespace cudasim;
    if (memory == nullptr) return cudaSuccess;
    demand_no_capture("cudaFree");
    run_everything();  // cudaFree waits for the device
    Heap& h = heap();
    const std::lock_guard lock(h.mutex);
    const auto found = h.allocations.find(reinterpret_cast<uintptr_t>(memory));
    if (found == h.allocations.end()) fault("cudaFree: %p is not the start of a device allocation", memory);
    if (!found->second.live) fault("cudaFree: %p was freed before", memory);
    found->second.live = false;
    const size_t bytes = found->second.bytes, offset = region_offset(memory);
    h.in_use[found->second.device] -= bytes;
    make_unreachable(memory, round_up(bytes, 8));
    drop_pages(memory, bytes);
    drop_pages(region.state + offset, bytes);
    drop_pages(region.touches + offset / word, bytes / word * sizeof(Touch));
    return cudaSuccess;
}

// The host's own allocator: ASan watches it. Pinned memory differs only in what copies may do late.
cudaError_t cudaMallocHost(void** memory, size_t bytes) {
    *memory = nullptr;
    cudasim::demand_no_capture("cudaMallocHost");
    if (cudasim::device_count() == 0) return cudaErrorNoDevice;
    if (bytes == 0) return cudaSuccess;
    *memory = malloc(bytes);
    if (*memory == nullptr) return cudaErrorMemoryAllocation;
    cudasim::fill_fresh(*memory, bytes);
    const std::lock_guard lock(heap().mutex);
    heap().pinned[reinterpret_cast<uintptr_t>(*memory)] = bytes;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
    if (memory == nullptr) return cudaSuccess;
    cudasim::demand_no_capture("cudaFreeHost");
    cudasim::run_everything();
    {
        const std::lock_guard lock(heap().mutex);
        if (heap().pinned.erase(reinterpret_cast<uintptr_t>(memory)) == 0) {
            cudasim::fault("cudaFreeHost: %p is not pinned memory", memory);
        }
    }
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    if (cudasim::device_count() == 0) return cudaErrorNoDevice;
    const std::lock_guard lock(heap().mutex);
    *total_bytes = cudasim::memory_limit();
    *free_bytes = *total_bytes - heap().in_use[cudasim::current_device()];
    return cudaSuccess;
}
