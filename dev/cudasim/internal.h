// What the files of the simulator share with each other, and with nobody else.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda_runtime.h"

namespace cudasim {

constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
constexpr size_t round_up(size_t a, size_t b) { return ceil_div(a, b) * b; }

// SplitMix64 (Steele, Lea, Flood 2014): every order that the simulator shuffles comes from one of these.
struct Random {
    uint64_t state;

    uint64_t next() {
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    size_t below(size_t n) { return static_cast<size_t>((next() >> 32) * n >> 32); }  // n < 2^32
};

template <typename Element>
void shuffle_order(std::vector<Element>& order, Random& random) {
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
}

// ---------------------------------------------------------------------------------------------------
// settings.cpp

struct Arch {
    int capability;  // 90 for sm_90
    const char* name;
    int multiprocessors, threads_per_multiprocessor, blocks_per_multiprocessor;
    size_t shared_per_multiprocessor, shared_per_block;  // bytes; the second with cudaFuncSetAttribute
};
const Arch& arch();
uint64_t seed();
int device_count();
int current_device();   // of this host thread
size_t memory_limit();  // bytes of device memory, each device's
double timeout();       // seconds

// ---------------------------------------------------------------------------------------------------
// scheduler.cpp

// A kernel that was queued, once or by a graph again and again: everything about it that does not differ
// between its blocks.
struct Launch {
    const void* kernel;
    dim3 grid, block;
    size_t shared_bytes;
    std::function<void()> thread_body;  // what each thread runs
    uint64_t number = 0;                // counts launches: part of the seed of their orders
    uint32_t first_run = 0;             // block i has run number first_run + i
    std::atomic<bool> fenced = false;   // some thread called __threadfence
    std::atomic<bool> has_atomics = false;
    std::mutex atomics_mutex;
    std::set<const void*> atomics = {};  // addresses of atomic operations so far
};

// Runs all blocks; returns when the last one has finished.
void run_kernel(Launch& launch);

// Who touched memory is kept by run numbers, one for each block of each kernel and for each other operation.
// They have so many bits: when they are used up, all is forgotten.
constexpr uint32_t max_runs = uint32_t{1} << 29;

// One block on its way through an OS thread, and a warp of it: the clocks that order memory accesses.
struct Warp {
    unsigned epoch = 0;    // __syncwarps passed
    unsigned waiting = 0;  // lanes that wait in a warp-wide operation, whichever
};
struct Block {
    Launch* launch = nullptr;
    uint32_t run = 0;    // see Launch::first_run
    unsigned epoch = 0;  // barriers passed
    unsigned threads = 0, finished = 0, at_barrier = 0;
    std::vector<Warp> warps;
};

struct AsyncCopy {
    void* shared;
    const void* global;
    unsigned source_bytes;
};

// What the thread is waiting for: the block's barrier (no act) or a warp-wide operation.
struct Wait {
    const char* name = nullptr;  // null: not waiting
    unsigned mask = 0;
    void* operands = nullptr;
    WarpAct act = nullptr;
    bool orders_memory = false;
    Where where;
};

struct Fiber;

struct Thread {
    uint3 index;
    Block* block = nullptr;
    unsigned number = 0;     // in the block
    Fiber* fiber = nullptr;  // which one it runs on; null before it starts and after it ends
    bool finished = false;
    Wait wait;
    std::vector<std::vector<AsyncCopy>> async_groups;  // cp.async: oldest first, the last one still open

    unsigned warp() const { return number / warp_size; }
    unsigned lane() const { return number % warp_size; }
};

// The running CUDA thread of this OS thread; null in host code.
inline constinit thread_local Thread* running_thread = nullptr;
inline Thread* running() { return running_thread; }

// ---------------------------------------------------------------------------------------------------
// order.cpp; called with the lock of streams.cpp

// Of each stream, by its number, how many of its operations come before something.
using Clock = std::vector<uint32_t>;
void merge(Clock& into, const Clock& from);

// An operation that ran; it has the run numbers from first_run on.
struct Ran {
    uint32_t first_run, end_run;
    uint32_t index;  // in its stream, from 1
    const char* name;
    const void* kernel;  // null if it is none
};

// From now on `name` runs, with the clock[stream]-th operation of the stream; it has one run number.
void begin_operation(const char* name, size_t stream, const Clock& clock);
uint32_t current_run();

// More run numbers for the running operation, a kernel; the first of them.
uint32_t take_runs(uint32_t count, const void* kernel);

// Forgets what comes before everything that will ever run.
void forget_before(const Clock& clock);

// What ran before, but is not ordered with the running operation: the oldest first; and the one with that run
// number, if it is one of these.
const std::vector<Ran>& unordered_operations();
const Ran* find_unordered(uint32_t run);

// ---------------------------------------------------------------------------------------------------
// memory.cpp

// Host memory from cudaMallocHost; one past its end counts.
bool is_pinned_memory(const void* address);

// A sentence on where an address lies: "12 bytes past the end of a device allocation of 4096 bytes".
std::string describe_address(const void* address);

// ---------------------------------------------------------------------------------------------------
// access.cpp

// Checks an access of the running thread as if its kernel had made it, and records it.
void check_access(const void* address, size_t bytes, bool write);

// Records an access by an operation that is no kernel.
void record_access(const void* address, size_t bytes, bool write);

// Finds stores by the running thread that no check saw. Called before another thread runs.
void note_hidden_stores();

// ---------------------------------------------------------------------------------------------------
// streams.cpp

// Waits for everything that is queued on the current device.
void run_everything();

// True while this host thread runs an operation of a stream: otherwise it may not touch device memory.
bool operation_running();

// Faults if this host thread captures a stream: the call waits for the device or may, and CUDA refuses it.
void demand_no_capture(const char* call);

// ---------------------------------------------------------------------------------------------------
// report.cpp

std::string kernel_name(const void* kernel);

}  // namespace cudasim
