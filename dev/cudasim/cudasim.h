// CUDA's execution model on the host: the simulator's own interface, for cuda_runtime.h, the other
// stand-ins and the tests. Kernels never see it: they include <cuda_runtime.h> and kernels/cuda/*.cuh.
//
//   grid    blocks run in a shuffled order, one at a time on each OpenMP thread      scheduler.cpp
//   block   each of its threads is a fiber; a barrier opens when all have arrived    scheduler.cpp
//   warp    32 threads; a shuffle, vote or mma acts when the lanes of its mask have  scheduler.cpp
//   memory  every load and store of a kernel is checked                              memory.cpp
//   stream  a queue of operations, run as late and in as odd an order as CUDA allows streams.cpp
//           and whether that order is one that the program made sure of             order.cpp
//
// A fault is one line on stderr that names the kernel, block and thread, a stack trace, and abort():
// under gdb the program stops on the faulty line of the kernel.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// Set by the scheduler whenever it switches from one CUDA thread to another.
inline constinit thread_local uint3 threadIdx{}, blockIdx{};
inline constinit thread_local dim3 blockDim{}, gridDim{};

struct CUstream_st;  // what a cudaStream_t points to

namespace cudasim {

using Where = std::source_location;

constexpr unsigned warp_size = 32;

// ---------------------------------------------------------------------------------------------------
// The running CUDA thread

// Waits for every thread of the block.
void barrier(Where where);

// A warp-wide operation. Each lane named in `mask` calls it with its own operands and the same `act`; when
// the last one arrives, `act` gets the operands of all lanes (null for those outside the mask) and writes
// each lane's result. `name` is for reports. `orders_memory`: what lanes wrote before is seen after.
using WarpAct = void (*)(void* const operands[warp_size], unsigned mask);
void warp_collective(const char* name, unsigned mask, void* operands, WarpAct act, Where where,
                     bool orders_memory = false);

// Results of the shuffle (value of lane `source`) and of the votes; see cuda_runtime.h.
uint64_t shuffle(const char* name, unsigned mask, uint64_t value, unsigned source, Where where);
unsigned ballot(const char* name, unsigned mask, bool predicate, Where where);
unsigned block_count(bool predicate, Where where);
unsigned lane();

// Shared memory for kernels/cuda/shared.cuh: `bytes` from the block's dynamic shared memory, the same piece
// for every thread that asks alike. `after` is the end of the piece before, null for the first.
void* shared_memory(size_t bytes, size_t alignment, const void* after);

// __threadfence: from here on this launch may hand data from block to block.
void fence();

// Atomic operations are no races, and checked here; the compiler's check would take them for plain ones.
void check_atomic(const void* address, size_t bytes);

// The rest of warp-level PTX (kernels/cuda/ptx.cuh), from the tables of ptx_tables.h.
enum class HalfType { bf16, fp16 };
void mma_m16n8k16(float* acc, const uint32_t* a, uint32_t b0, uint32_t b1, HalfType type,
                  Where where = Where::current());
void ldmatrix_x4(uint32_t* d, const void* row, bool transposed, Where where = Where::current());
void cp_async_16(void* shared, const void* global, unsigned source_bytes);
void cp_async_commit();
void cp_async_wait(unsigned groups_that_may_be_pending);

// ---------------------------------------------------------------------------------------------------
// Faults

// Prints "cudasim: kernel K, block (x,y,z), thread (x,y,z), FILE:LINE: MESSAGE" and aborts.
[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fault_at(Where where, const char* format, ...) __attribute__((format(printf, 2, 3)));

// ---------------------------------------------------------------------------------------------------
// For the stand-ins of libraries (cuBLASLt, NCCL): work on a stream, on checked memory

// Queues `work`, named in reports. `lands_late`: hold it back until something waits for it, as for a copy
// to the host or a collective.
void enqueue(CUstream_st* stream, const char* name, bool lands_late, std::function<void()> work);

// What several streams do together, as a collective of NCCL: `act` runs once, as late as can be, when each
// part has been queued and is at the head of its stream. Parts come from different host threads; who waits
// for one that does not come within the timeout gets a fault that names it.
struct Operation;
struct Meeting {
    const char* name;
    std::function<void()> act;
    struct Part {
        std::string who;  // for reports: "rank 3"
        // The device memory that `act` reads and writes for it; checked before `act` runs.
        const void* reads = nullptr;
        void* writes = nullptr;
        size_t read_bytes = 0, written_bytes = 0;
        CUstream_st* stream = nullptr;
        std::shared_ptr<Operation> operation = nullptr;  // null until it is queued
    };
    std::vector<Part> parts;
    std::atomic<bool> took_place = false;
    bool abandoned = false;  // somebody has left: it never takes place
};

// A part in a meeting, by its place in Meeting::parts.
struct Attendance {
    std::shared_ptr<Meeting> meeting;
    size_t part;
};

// Queues one operation that takes part in all of these, in whichever order they come about.
void enqueue_meetings(CUstream_st* stream, const char* name, const std::vector<Attendance>& attendances);

// Gives up a part that was queued: its operation ends without it.
void leave(const Attendance& attendance);

// What work does to device memory: faults if the range is not all of one allocation, or is read before it
// was written. Call both before touching the memory.
void will_read(const void* device, size_t bytes, const char* name);
void will_write(void* device, size_t bytes, const char* name);

// Forbids a part of an allocation from here on: the gap behind a tensor in an arena. The gap may begin at any
// byte, and must end at a multiple of 8. In programs that do not know of the simulator, AddressSanitizer's
// ASAN_POISON_MEMORY_REGION does the same, and there for host memory too.
void guard_gap(void* device, size_t bytes);

bool is_device_memory(const void* address);

// ---------------------------------------------------------------------------------------------------
// Settings, before the first CUDA call. From the environment: CUDASIM_SEED (0), CUDASIM_ARCH (90),
// CUDASIM_DEVICES (1), CUDASIM_MEMORY in MiB (8192), CUDASIM_TIMEOUT in seconds (60), OMP_NUM_THREADS for
// blocks at a time. CUDASIM_LAUNCHES=FILE lists there, as the program ends, each kernel with the threads of
// its blocks, the largest dynamic shared memory and how often it was launched, once where a graph captured
// it; dev/bench/ptxas_report reads it.

// Order of blocks, threads and streams from here on.
void set_seed(uint64_t seed);

// 80, 86, 89, 90, 100 or 120: shared memory, multiprocessors and other limits.
void set_arch(int compute_capability);

// How long a wait for other host threads may last in which nothing happens.
void set_timeout(double seconds);

// Runs `f` under the seeds 0..seeds-1, each time from an idle device; true if the bytes that it returns are
// always the same. Restores the seed.
bool same_over_seeds(int seeds, const std::function<std::vector<char>()>& f);

// Copies the bytes of device memory, for `f` above.
std::vector<char> bytes_of(const void* device, size_t bytes);

}  // namespace cudasim
