// The simulator, tested on kernels with planted faults: each fault that it promises to see is planted here,
// and the line that names it is demanded. Beside each stands the same kernel done right, which must run in
// silence. What simulated instructions compute is judged against the formulas of the PTX ISA and the CUDA C++
// Programming Guide.
#include <gtest/gtest.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "dev/cudasim/ptx_tables.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/shared.cuh"
#include "kernels/dtype.h"

namespace {

constexpr unsigned whole_warp = 0xffffffffu;

template <typename... Parameters, typename... Arguments>
cudaError_t start_on(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                     size_t shared_memory, Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_memory;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, static_cast<std::decay_t<Parameters>>(arguments)...);
}

// Runs a kernel to its end.
template <typename... Parameters, typename... Arguments>
void run(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_memory, Arguments... arguments) {
    ASSERT_EQ(start_on(nullptr, kernel, grid, block, shared_memory, arguments...), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

template <typename Element>
Element* device_array(size_t n) {
    Element* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, n * sizeof(Element)), cudaSuccess);
    return memory;
}

template <typename Element>
Element* to_device(const std::vector<Element>& host) {
    Element* memory = device_array<Element>(host.size());
    cudaMemcpy(memory, host.data(), host.size() * sizeof(Element), cudaMemcpyHostToDevice);
    return memory;
}

template <typename Element>
std::vector<Element> to_host(const Element* device, size_t n) {
    std::vector<Element> host(n);
    cudaMemcpy(host.data(), device, n * sizeof(Element), cudaMemcpyDeviceToHost);
    return host;
}

std::vector<float> ramp(size_t n) {
    std::vector<float> result(n);
    std::iota(result.begin(), result.end(), 1.0f);
    return result;
}

// Each death test runs in a process of its own, which starts from main: forking a process with OpenMP threads
// would leave the child without them.
class CudaSim : public testing::Test {
protected:
    void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
    void TearDown() override {
        cudaDeviceSynchronize();
        const char* seed = getenv("CUDASIM_SEED");
        cudasim::set_seed(seed == nullptr ? 0 : strtoull(seed, nullptr, 10));
    }
};
using CudaSimDeathTest = CudaSim;

// ---------------------------------------------------------------------------------------------------
// Threads, blocks, barriers

__global__ void indices_kernel(uint4* out) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const unsigned i = block * (blockDim.x * blockDim.y * blockDim.z) + thread;
    out[i] = make_uint4(blockIdx.x, threadIdx.x, threadIdx.y, threadIdx.z);
}

TEST_F(CudaSim, EveryThreadOfTheGridRunsOnceUnderItsOwnIndices) {
    const dim3 grid(3, 2, 2), block(5, 4, 3);
    uint4* out = device_array<uint4>(12 * 60);
    run(indices_kernel, grid, block, 0, out);
    const std::vector<uint4> result = to_host(out, 12 * 60);
    for (unsigned i = 0; i < result.size(); ++i) {
        EXPECT_EQ(result[i].x, i / 60 % 3);
        EXPECT_EQ(result[i].y, i % 5);
        EXPECT_EQ(result[i].z, i % 60 / 5 % 4);
        EXPECT_EQ(result[i].w, i % 60 / 20);
    }
    cudaFree(out);
}

// Writes, waits, then reads what another thread wrote. `barrier` false: the barrier is missing.
__global__ void reverse_kernel(float* out, const float* in, bool barrier) {
    float* staged = shared<float>(blockDim.x);
    staged[threadIdx.x] = 0.0f;
    __syncthreads();
    staged[threadIdx.x] = in[threadIdx.x];
    if (barrier) __syncthreads();
    out[threadIdx.x] = staged[blockDim.x - 1 - threadIdx.x];
}

TEST_F(CudaSim, BarrierOrdersSharedMemory) {
    const std::vector<float> in = ramp(100);
    float *x = to_device(in), *y = device_array<float>(100);
    for (uint64_t seed = 0; seed < 6; ++seed) {
        cudasim::set_seed(seed);
        run(reverse_kernel, 1, 100, shared_bytes<float>(100), y, x, true);
        const std::vector<float> out = to_host(y, 100);
        for (size_t i = 0; i < 100; ++i) EXPECT_EQ(out[i], in[99 - i]);
    }
    cudaFree(x), cudaFree(y);
}

TEST_F(CudaSimDeathTest, MissingBarrierIsARace) {
    float *x = to_device(ramp(100)), *y = device_array<float>(100);
    EXPECT_DEATH(
        run(reverse_kernel, 1, 100, shared_bytes<float>(100), y, x, false),
        "kernel .*reverse_kernel, block \\(0,0,0\\), thread \\([0-9]+,0,0\\): race: .*shared array of 400");
}

// Some threads never reach a barrier that others wait at: they end, or wait elsewhere.
__global__ void early_exit_kernel() {
    if (threadIdx.x == 7) return;
    __syncthreads();
}
__global__ void two_barriers_kernel() {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}
__global__ void barrier_against_shuffle_kernel() {
    if (threadIdx.x == 0) {
        __syncthreads();
    } else {
        __shfl_xor_sync(whole_warp, 1.0f, 1);
    }
}
__global__ void one_barrier_too_many_kernel() {
    __syncthreads();
    if (threadIdx.x < 32) __syncthreads();
}

TEST_F(CudaSimDeathTest, DivergentBarriers) {
    EXPECT_DEATH(
        run(early_exit_kernel, 2, 64, 0),
        "early_exit_kernel, block \\([01],0,0\\), thread .*test_cudasim.cpp:[0-9]+: divergent or missing "
        "barrier: __syncthreads waits for ever: thread \\(7,0,0\\) has ended");
    EXPECT_DEATH(run(two_barriers_kernel, 1, 64, 0), "divergent barriers: thread .* waits at __syncthreads");
    EXPECT_DEATH(run(barrier_against_shuffle_kernel, 1, 32, 0), "waits for ever: thread .* waits at __s");
    EXPECT_DEATH(run(one_barrier_too_many_kernel, 1, 64, 0), "waits for ever: thread .* has ended");
}

__global__ void votes_kernel(int* out) {
    const int i = static_cast<int>(threadIdx.x);
    out[i] = __syncthreads_count(i % 3 == 0);
    out[64 + i] = __syncthreads_or(i == 5) + 2 * __syncthreads_and(i < 60);
    out[128 + i] = static_cast<int>(__ballot_sync(whole_warp, i % 2 == 0));
    out[192 + i] = __any_sync(whole_warp, i == 33) + 2 * __all_sync(whole_warp, i < 50);
}

TEST_F(CudaSim, Votes) {
    int* out = device_array<int>(256);
    run(votes_kernel, 1, 64, 0, out);
    const std::vector<int> result = to_host(out, 256);
    for (size_t i = 0; i < 64; ++i) {
        EXPECT_EQ(result[i], 22);
        EXPECT_EQ(result[64 + i], 1);
        EXPECT_EQ(result[128 + i], 0x55555555);
        EXPECT_EQ(result[192 + i], i < 32 ? 2 : 1);
    }
    cudaFree(out);
}

// ---------------------------------------------------------------------------------------------------
// Warps

__global__ void shuffles_kernel(int* out) {
    const int lane = static_cast<int>(threadIdx.x);
    out[lane] = __shfl_xor_sync(whole_warp, lane, 5);
    out[32 + lane] = __shfl_down_sync(whole_warp, lane, 3);
    out[64 + lane] = __shfl_up_sync(whole_warp, lane, 3, 8);
    out[96 + lane] = __shfl_sync(whole_warp, lane, 2, 16);
    out[128 + lane] = static_cast<int>(__shfl_xor_sync(whole_warp, lane + 0.5, 1) * 2.0);
    if (lane < 8) out[160 + lane] = __shfl_xor_sync(0xffu, lane, 7);
}

TEST_F(CudaSim, Shuffles) {
    int* out = device_array<int>(168);
    run(shuffles_kernel, 1, 32, 0, out);
    const std::vector<int> result = to_host(out, 168);
    for (int i = 0; i < 32; ++i) {
        const size_t lane = static_cast<size_t>(i);
        EXPECT_EQ(result[lane], i ^ 5);
        EXPECT_EQ(result[32 + lane], i + 3 < 32 ? i + 3 : i);
        EXPECT_EQ(result[64 + lane], i % 8 >= 3 ? i - 3 : i);
        EXPECT_EQ(result[96 + lane], i / 16 * 16 + 2);
        EXPECT_EQ(result[128 + lane], 2 * (i ^ 1) + 1);
    }
    for (int i = 0; i < 8; ++i) EXPECT_EQ(result[160 + static_cast<size_t>(i)], 7 - i);
    cudaFree(out);
}

__global__ void absent_lane_kernel(int which) {
    const int lane = static_cast<int>(threadIdx.x);
    if (which == 0 && lane == 9) return;
    if (which == 1 && lane < 16) __shfl_xor_sync(0xffffu, lane, 16);  // reads lanes 16 to 31
    if (which == 2 && lane >= 8) __ballot_sync(0xffu, lane);          // not in its own mask
    __shfl_xor_sync(whole_warp, lane, 1);
}

TEST_F(CudaSimDeathTest, AbsentLanes) {
    EXPECT_DEATH(run(absent_lane_kernel, 1, 32, 0, 0),
                 "absent lane: __shfl_xor_sync waits for ever: thread \\(9,0,0\\) has ended");
    EXPECT_DEATH(run(absent_lane_kernel, 1, 32, 0, 1), "absent_lane_kernel.*mask 0xffff lacks");
    EXPECT_DEATH(run(absent_lane_kernel, 1, 32, 0, 2), "mask 0xff lacks the lane itself");
    EXPECT_DEATH(run(absent_lane_kernel, 1, 48, 0, 3), "absent lane: .* in a warp of 16 threads");
}

// Lanes hand data to each other through shared memory: __syncwarp orders that, a shuffle does not.
__global__ void warp_exchange_kernel(int* out, bool sync) {
    int* staged = shared<int>(32);
    staged[threadIdx.x] = 0;
    __syncwarp();
    staged[threadIdx.x] = static_cast<int>(threadIdx.x);
    if (sync) {
        __syncwarp();
    } else {
        __shfl_xor_sync(whole_warp, 0, 1);
    }
    out[threadIdx.x] = staged[threadIdx.x ^ 1u];
}

TEST_F(CudaSim, SyncwarpOrdersSharedMemory) {
    int* out = device_array<int>(32);
    run(warp_exchange_kernel, 1, 32, shared_bytes<int>(32), out, true);
    EXPECT_EQ(to_host(out, 32)[4], 5);
    cudaFree(out);
}

TEST_F(CudaSimDeathTest, ShuffleDoesNotOrderSharedMemory) {
    int* out = device_array<int>(32);
    EXPECT_DEATH(run(warp_exchange_kernel, 1, 32, shared_bytes<int>(32), out, false), "race: reads what");
}

// ---------------------------------------------------------------------------------------------------
// Memory: bounds, never-written reads, alignment

template <typename Element>
__global__ void copy_kernel(Element* out, const Element* in, size_t n) {
    const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i];
}

TEST_F(CudaSimDeathTest, OutOfBounds) {
    float *x = to_device(ramp(100)), *y = device_array<float>(100), *longer = to_device(ramp(200));
    run(copy_kernel<float>, 4, 32, 0, y, x, size_t{100});
    EXPECT_DEATH(
        run(copy_kernel<float>, 4, 32, 0, y, x, size_t{101}),
        "copy_kernel.*block \\(3,0,0\\), thread \\(4,0,0\\): out of bounds: .* bytes past the end of a "
        "device allocation of 400 bytes");
    EXPECT_DEATH(run(copy_kernel<float>, 4, 32, 0, y, longer, size_t{101}), "out of bounds: writes 4 bytes");
    EXPECT_DEATH(run(copy_kernel<float>, 1, 1, 0, y, x - 1, size_t{1}), "out of bounds: reads 4 bytes");
    EXPECT_DEATH(cudaMemset(y, 0, 401), "cudaMemset: out of bounds from byte 400 of 401");
    EXPECT_DEATH(
        {
            cudaFree(x);
            run(copy_kernel<float>, 1, 32, 0, y, x, size_t{32});
        },
        "out of bounds: reads .* of a freed device allocation");
    EXPECT_DEATH((cudaFree(x), cudaMemset(x, 0, 4)),
                 "cudaMemset: out of bounds .* of a freed device allocation");
    cudaFree(x), cudaFree(y), cudaFree(longer);
}

// What is freed is there again; nothing of a thread that ran kernels stays behind. What a program itself
// forgets to free, streams and events, LeakSanitizer reports at the end.
TEST_F(CudaSim, MemoryComesBack) {
    size_t before = 0, after = 0, total = 0;
    cudaMemGetInfo(&before, &total);
    for (int i = 0; i < 1100; ++i) {  // more threads than there are places for shared memory
        std::thread([] {
            float *x = to_device(ramp(8)), *y = device_array<float>(8);
            run(reverse_kernel, 1, 8, shared_bytes<float>(8), y, x, true);
            EXPECT_EQ(to_host(y, 8)[0], 8.0f);
            cudaFree(x), cudaFree(y);
        }).join();
    }
    cudaMemGetInfo(&after, &total);
    EXPECT_EQ(before, after);
}

// Two tensors in one allocation: whoever carves them from it guards the gap, to the next multiple of 256
// bytes.
TEST_F(CudaSimDeathTest, OverrunBetweenTensorsOfAnArena) {
    float* arena = device_array<float>(256);
    cudaMemset(arena, 0, 1024);
    cudaDeviceSynchronize();
    float* second = arena + 128;
    cudasim::guard_gap(arena + 101, 27 * sizeof(float));
    run(copy_kernel<float>, 4, 32, 0, second, arena, size_t{101});
    EXPECT_DEATH(run(copy_kernel<float>, 4, 32, 0, second, arena, size_t{102}),
                 "out of bounds: reads 4 bytes at byte 404 of a device allocation");
    EXPECT_DEATH(run(copy_kernel<float>, 4, 32, 0, arena, second, size_t{102}),
                 "out of bounds: writes 4 bytes");
    EXPECT_DEATH(cudaMemset(arena, 0, 512), "cudaMemset: out of bounds from byte 404 of 512");
    cudaFree(arena);
}

__global__ void shared_kernel(float* out, size_t first, size_t index) {
    float* a = shared<float>(first);
    float* b = shared<float>(32, a + first);
    b[threadIdx.x] = 1.0f;
    if (threadIdx.x == 0) a[index] = 2.0f;
    __syncthreads();
    if (threadIdx.x == 0) *out = a[index] + b[31];
}
__global__ void unlike_shared_kernel() { shared<float>(threadIdx.x < 4 ? 8 : 16); }

TEST_F(CudaSimDeathTest, SharedMemory) {
    float* out = device_array<float>(1);
    const size_t bytes = shared_bytes<float>(10) + shared_bytes<float>(32);
    run(shared_kernel, 1, 32, bytes, out, size_t{10}, size_t{9});
    const auto with = [&](size_t given, size_t index) {
        run(shared_kernel, 1, 32, given, out, size_t{10}, index);
    };
    EXPECT_DEATH(with(bytes, 10),
                 "out of bounds: writes 4 bytes at 0 bytes past the end of a shared array of 40");
    EXPECT_DEATH(with(bytes - 4, 0), "uses 176 bytes of shared memory where the launch gave 172");
    EXPECT_DEATH(run(unlike_shared_kernel, 1, 32, 64),
                 "asks for .* bytes of shared memory where another thread");
}

__global__ void read_shared_kernel(float* out) {
    float* a = shared<float>(32);
    if (threadIdx.x != 3) a[threadIdx.x] = 0.0f;
    __syncthreads();
    out[threadIdx.x] = a[threadIdx.x];
}

TEST_F(CudaSimDeathTest, NeverWrittenMemory) {
    float *fresh = device_array<float>(64), *out = device_array<float>(64);
    run(copy_kernel<float>, 1, 32, 0, fresh, to_device(ramp(32)), size_t{32});
    run(copy_kernel<float>, 1, 32, 0, out, fresh, size_t{32});
    EXPECT_DEATH(
        run(copy_kernel<float>, 1, 33, 0, out, fresh, size_t{33}),
        "thread \\(32,0,0\\): reads 4 bytes that were never written: byte 128 of a device allocation");
    int* tokens = device_array<int>(8);
    EXPECT_DEATH(run(copy_kernel<int>, 1, 8, 0, tokens + 4, tokens, size_t{4}),
                 "reads 4 bytes that were never");
    uint16_t* halves = device_array<uint16_t>(8);
    EXPECT_DEATH(run(copy_kernel<uint16_t>, 1, 8, 0, halves + 4, halves, size_t{4}),
                 "reads 2 bytes that were nev");
    unsigned char* bytes = device_array<unsigned char>(8);
    EXPECT_DEATH(run(copy_kernel<unsigned char>, 1, 8, 0, bytes + 4, bytes, size_t{4}),
                 "reads 1 bytes that were");
    EXPECT_DEATH(run(copy_kernel<float4>, 1, 9, 0, reinterpret_cast<float4*>(out),
                     reinterpret_cast<const float4*>(fresh), size_t{9}),
                 "never written: byte 128");
    EXPECT_DEATH(run(read_shared_kernel, 1, 32, shared_bytes<float>(32), out),
                 "thread \\(3,0,0\\): .* never written: byte 12 of a shared array");
    EXPECT_DEATH(to_host(fresh, 64), "cudaMemcpy: reads memory that was never written, from byte 128 of 256");
    // A copy on the device does not make it written.
    cudaMemcpy(out, fresh, 256, cudaMemcpyDeviceToDevice);
    EXPECT_DEATH(to_host(out, 64), "never written, from byte 128 of 256");
}

TEST_F(CudaSimDeathTest, MisalignedVectors) {
    float *x = to_device(ramp(64)), *y = device_array<float>(64);
    const auto copy = [&](size_t shift) {
        run(copy_kernel<float4>, 1, 8, 0, reinterpret_cast<float4*>(y),
            reinterpret_cast<const float4*>(x + shift), size_t{8});
    };
    copy(4);
    EXPECT_DEATH(copy(1), "copy_kernel.*UndefinedBehaviorSanitizer found an error(.|\n)*misaligned address");
}

__global__ void local_overrun_kernel(int* out, int index) {
    int local[4] = {1, 2, 3, 4};
    int* volatile hidden = local;  // or the compiler would see it
    out[0] = hidden[index];
}

TEST_F(CudaSimDeathTest, LocalArrayOverrun) {
    int* out = device_array<int>(1);
    run(local_overrun_kernel, 1, 1, 0, out, 3);
    EXPECT_DEATH(run(local_overrun_kernel, 1, 1, 0, out, 4),
                 "local_overrun_kernel, block .*AddressSanitizer found an error(.|\n)*stack-buffer-overflow");
}

TEST_F(CudaSimDeathTest, HostAndDeviceMemoryAreApart) {
    float* x = to_device(ramp(32));
    std::vector<float> host(32);
    EXPECT_DEATH(host[0] = x[0], "host: host code reads device memory");
    EXPECT_DEATH(run(copy_kernel<float>, 1, 32, 0, x, host.data(), size_t{32}), "points to host memory");
    EXPECT_DEATH(cudaMemcpy(host.data(), x, 128, cudaMemcpyHostToDevice), "unlike its kind");
    EXPECT_DEATH(cudaFree(x + 1), "not the start of a device allocation");
    EXPECT_DEATH((cudaFree(x), cudaFree(x)), "was freed before");
    EXPECT_DEATH(cudaFreeHost(host.data()), "not pinned memory");
}

// ---------------------------------------------------------------------------------------------------
// Races

__global__ void accumulate_kernel(float* sums, const float* x, unsigned stride) {
    sums[threadIdx.x + blockIdx.x * stride] += x[threadIdx.x];
}
__global__ void all_to_one_kernel(float* sum) { *sum += 1.0f; }

TEST_F(CudaSimDeathTest, RacesInGlobalMemory) {
    float *x = to_device(ramp(64)), *sums = to_device(ramp(64));
    run(accumulate_kernel, 2, 32, 0, sums, x, 32);
    EXPECT_DEATH(run(accumulate_kernel, 2, 32, 0, sums, x, 0), "race: .* of block number [01] (wrote|read)");
    EXPECT_DEATH(run(all_to_one_kernel, 1, 32, 0, sums), "all_to_one_kernel.*race: ");
}

// Neighbours may write the two halves of a word.
TEST_F(CudaSim, NeighboursWriteHalvesOfAWord) {
    uint16_t *x = to_device(std::vector<uint16_t>(64, 7)), *y = device_array<uint16_t>(64);
    run(copy_kernel<uint16_t>, 2, 32, 0, y, x, size_t{64});
    EXPECT_EQ(to_host(y, 64)[63], 7);
    cudaFree(x), cudaFree(y);
}

// An order that atomics allow to vary: no race in the sense above, but the result depends on the order.
__global__ void order_kernel(unsigned* order, unsigned* ticket) { order[atomicAdd(ticket, 1)] = threadIdx.x; }

TEST_F(CudaSim, ResultsThatDependOnTheOrderAreSeenOverSeeds) {
    unsigned *order = device_array<unsigned>(64), *ticket = device_array<unsigned>(1);
    const auto ordered = [&](unsigned threads) {
        return cudasim::same_over_seeds(5, [&] {
            cudaMemset(ticket, 0, sizeof(unsigned));
            run(order_kernel, 1, threads, 0, order, ticket);
            return cudasim::bytes_of(order, threads * sizeof(unsigned));
        });
    };
    EXPECT_FALSE(ordered(64));
    EXPECT_TRUE(ordered(1));
    cudaFree(order), cudaFree(ticket);
}

// The block that draws the last ticket adds up what all have written: that needs a fence.
__global__ void last_block_kernel(float* sum, float* parts, unsigned* ticket, bool fence) {
    parts[blockIdx.x] = static_cast<float>(blockIdx.x);
    if (fence) __threadfence();
    if (atomicAdd(ticket, 1) < gridDim.x - 1) return;
    *sum = 0.0f;
    for (unsigned i = 0; i < gridDim.x; ++i) *sum += parts[i];
}

TEST_F(CudaSimDeathTest, BlocksHandDataOnAfterAFence) {
    float *sum = device_array<float>(1), *parts = device_array<float>(8);
    unsigned* ticket = to_device(std::vector<unsigned>{0});
    run(last_block_kernel, 8, 1, 0, sum, parts, ticket, true);
    EXPECT_EQ(to_host(sum, 1)[0], 28.0f);
    cudaMemset(ticket, 0, sizeof(unsigned));
    EXPECT_DEATH(run(last_block_kernel, 8, 1, 0, sum, parts, ticket, false),
                 "last_block_kernel.*race: reads what thread number 0 of block number . wrote");
    cudaFree(sum), cudaFree(parts), cudaFree(ticket);
}

// A plain look at a counter is not taken for a part of the atomic operation on it that follows.
__global__ void count_kernel(unsigned* counter, unsigned limit) {
    if (*counter < limit) atomicAdd(counter, 1);
}

TEST_F(CudaSim, AtomicOperationsAreNoRaces) {
    unsigned* counter = to_device(std::vector<unsigned>{0});
    run(count_kernel, 3, 64, 0, counter, 1000u);
    EXPECT_EQ(to_host(counter, 1)[0], 192u);
    cudaFree(counter);
}

// ---------------------------------------------------------------------------------------------------
// Launches

__global__ void nothing_kernel() {}

// The list is of a whole program, written as it ends.
TEST_F(CudaSimDeathTest, LaunchesAreListed) {
    const std::string path = testing::TempDir() + "cudasim_launches";
    setenv("CUDASIM_LAUNCHES", path.c_str(), 1);
    EXPECT_EXIT(
        {
            for (const size_t shared_memory : {16, 48, 32}) run(nothing_kernel, 3, 64, shared_memory);
            run(nothing_kernel, 1, dim3(8, 4), 0);
            float* x = to_device(ramp(100));
            run(copy_kernel<float>, 4, 32, 0, device_array<float>(100), x, size_t{100});
            exit(0);
        },
        testing::ExitedWithCode(0), "");
    setenv("CUDASIM_LAUNCHES", "/nowhere/launches", 1);
    EXPECT_DEATH(run(nothing_kernel, 1, 1, 0), "CUDASIM_LAUNCHES=/nowhere/launches: No such file");
    unsetenv("CUDASIM_LAUNCHES");

    std::ifstream list(path);
    std::vector<std::string> lines;
    for (std::string line; std::getline(list, line);) lines.push_back(line);
    std::ranges::sort(lines);
    EXPECT_EQ(lines, (std::vector<std::string>{"copy_kernel<float>\t32\t0\t1", "nothing_kernel\t32\t0\t1",
                                               "nothing_kernel\t64\t48\t3"}));
}

TEST_F(CudaSim, LaunchLimits) {
    EXPECT_EQ(start_on(nullptr, nothing_kernel, 1, 1024, 0), cudaSuccess);
    EXPECT_EQ(start_on(nullptr, nothing_kernel, 1, 1025, 0), cudaErrorInvalidConfiguration);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_EQ(start_on(nullptr, nothing_kernel, 1, dim3(16, 16, 5), 0), cudaErrorInvalidConfiguration);
    EXPECT_EQ(start_on(nullptr, nothing_kernel, 1, dim3(1, 1, 65), 0), cudaErrorInvalidConfiguration);
    EXPECT_EQ(start_on(nullptr, nothing_kernel, dim3(1, 65536), 1, 0), cudaErrorInvalidConfiguration);
    EXPECT_EQ(start_on(nullptr, nothing_kernel, 0, 1, 0), cudaErrorInvalidConfiguration);

    const cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    EXPECT_EQ(start_on(nullptr, nothing_kernel, 1, 32, 48 * 1024), cudaSuccess);
    EXPECT_EQ(start_on(nullptr, nothing_kernel, 1, 32, 48 * 1024 + 1), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFuncSetAttribute(nothing_kernel, most, 227 * 1024), cudaSuccess);
    EXPECT_EQ(start_on(nullptr, nothing_kernel, 1, 32, 227 * 1024), cudaSuccess);
    EXPECT_EQ(cudaFuncSetAttribute(nothing_kernel, most, 227 * 1024 + 1), cudaErrorInvalidValue);
    cudasim::set_arch(86);
    EXPECT_EQ(cudaFuncSetAttribute(nothing_kernel, most, 100 * 1024), cudaErrorInvalidValue);
    cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, 0);
    EXPECT_EQ(properties.major * 10 + properties.minor, 86);
    EXPECT_EQ(properties.sharedMemPerBlockOptin, 99u * 1024);
    cudasim::set_arch(90);
    cudaGetLastError();
    int blocks = 0;
    EXPECT_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, nothing_kernel, 256, 0), cudaSuccess);
    EXPECT_EQ(blocks, 8);
    EXPECT_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, nothing_kernel, 64, 100 * 1024),
              cudaSuccess);
    EXPECT_EQ(blocks, 2);
}

TEST_F(CudaSim, OutOfMemory) {
    void* memory = nullptr;
    size_t free_bytes = 0, total = 0;
    ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&memory, free_bytes + 1), cudaErrorMemoryAllocation);
    EXPECT_EQ(memory, nullptr);
    EXPECT_STREQ(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
}

TEST_F(CudaSimDeathTest, NoDevice) {
    EXPECT_EXIT(
        {
            setenv("CUDASIM_DEVICES", "0", 1);
            int count = -1;
            const cudaError_t error = cudaGetDeviceCount(&count);
            fprintf(stderr, "%d: %s\n", count, cudaGetErrorString(error));
            _exit(error);
        },
        testing::ExitedWithCode(cudaErrorNoDevice), "0: no CUDA-capable device is detected");
}

// ---------------------------------------------------------------------------------------------------
// mma, ldmatrix, cp.async

// "Matrix Fragments for mma.m16n8k16 with floating point type" and "ldmatrix", the ISA's formulas: groupID =
// lane >> 2, threadID_in_group = lane % 4. The tables are its figures.
TEST_F(CudaSim, TablesOfThePtxIsaAgreeWithItsFormulas) {
    for (int lane = 0; lane < 32; ++lane) {
        const int group = lane >> 2, in_group = lane % 4;
        for (int i = 0; i < 8; ++i) {
            const int row = (i >= 0 && i < 2) || (i >= 4 && i < 6) ? group : group + 8;
            const int col = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
            EXPECT_EQ(cudasim::mma_a_lane[row][col], lane);
            EXPECT_EQ(cudasim::mma_a_element[row][col], i);
        }
        for (int i = 0; i < 4; ++i) {
            const int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
            EXPECT_EQ(cudasim::mma_b_lane[row][group], lane);
            EXPECT_EQ(cudasim::mma_b_element[row][group], i);
        }
        for (int i = 0; i < 4; ++i) {
            const int row = i < 2 ? group : group + 8, col = in_group * 2 + (i & 1);
            EXPECT_EQ(cudasim::mma_c_lane[row][col], lane);
            EXPECT_EQ(cudasim::mma_c_element[row][col], i);
        }
        for (int i = 0; i < 2; ++i) {
            EXPECT_EQ(cudasim::ldmatrix_lane[group][in_group * 2 + i], lane);
            EXPECT_EQ(cudasim::ldmatrix_element[group][in_group * 2 + i], i);
        }
    }
}

// out (16,8) = a (16,16) * b (8,16)^T + 1, with a and b brought by cp.async and ldmatrix. Matrices of 8x8 in
// the order of mma's registers: a's four are rows 0-7 and 8-15, for columns 0-7, then 8-15.
enum class Fault { none, no_wait, no_barrier, misaligned };
template <typename Storage>
__global__ void mma_kernel(float* out, const Storage* a, const Storage* b, Fault fault) {
    Storage* staged_a = shared<Storage>(16 * 16);
    Storage* staged_b = shared<Storage>(16 * 8, staged_a + 16 * 16);
    const unsigned lane = threadIdx.x;
    cp_async_16(staged_a + 8 * lane, a + 8 * lane);
    if (lane < 16) cp_async_16(staged_b + 8 * lane, b + 8 * lane);
    cp_async_commit();
    if (fault != Fault::no_wait) cp_async_wait<0>();
    if (fault != Fault::no_barrier) __syncwarp();

    uint32_t fragment_a[4], fragment_b[4];
    const Storage* row_a = staged_a + (lane % 16) * 16 + lane / 16 * 8;
    ldmatrix_x4(fragment_a, fault == Fault::misaligned ? row_a + 1 : row_a);
    ldmatrix_x4(fragment_b, staged_b + (lane % 8) * 16 + lane / 8 % 2 * 8);  // b's rows are columns of b^T
    float acc[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    mma_m16n8k16<Storage>(acc, fragment_a, fragment_b[0], fragment_b[1]);
    const unsigned row = lane / 4, col = lane % 4 * 2;
    out[row * 8 + col] = acc[0];
    out[row * 8 + col + 1] = acc[1];
    out[(row + 8) * 8 + col] = acc[2];
    out[(row + 8) * 8 + col + 1] = acc[3];
}

template <typename Storage>
std::vector<Storage> small_integers(size_t n, int step) {
    std::vector<Storage> result;
    for (size_t i = 0; i < n; ++i) {
        result.push_back(from_float<Storage>(static_cast<float>(static_cast<int>(i) * step % 17 - 8)));
    }
    return result;
}

template <typename Storage>
void expect_mma_is_a_product() {
    const std::vector<Storage> a = small_integers<Storage>(256, 5), b = small_integers<Storage>(128, 7);
    float* out = device_array<float>(128);
    run(mma_kernel<Storage>, 1, 32, 1024, out, to_device(a), to_device(b), Fault::none);
    const std::vector<float> result = to_host(out, 128);
    for (size_t i = 0; i < 16; ++i) {
        for (size_t j = 0; j < 8; ++j) {
            float expected = 1.0f;  // integers: every sum is exact
            for (size_t k = 0; k < 16; ++k) expected += to_float(a[i * 16 + k]) * to_float(b[j * 16 + k]);
            EXPECT_EQ(result[i * 8 + j], expected) << i << "," << j;
        }
    }
}

TEST_F(CudaSim, MmaIsAProduct) {
    expect_mma_is_a_product<bf16_t>();
    expect_mma_is_a_product<fp16_t>();
}

TEST_F(CudaSimDeathTest, AsyncCopies) {
    const bf16_t *a = to_device(small_integers<bf16_t>(256, 5)),
                 *b = to_device(small_integers<bf16_t>(128, 7));
    float* out = device_array<float>(128);
    const auto with = [&](Fault fault) { run(mma_kernel<bf16_t>, 1, 32, 1024, out, a, b, fault); };
    EXPECT_DEATH(with(Fault::no_wait), "mma_kernel.*reads what cp.async has not brought yet");
    EXPECT_DEATH(with(Fault::no_barrier), "mma_kernel.*(race: reads what|never written)");
    EXPECT_DEATH(with(Fault::misaligned), "misaligned: reads 16 bytes at byte [0-9]+ of a shared array");
}

// Stages of a pipeline: wait_group<1> brings all but the newest group; false zeroes the target.
__global__ void pipeline_kernel(uint4* out, const uint4* in, bool wait_for_all) {
    uint4* staged = shared<uint4>(3);
    cp_async_16(staged, in);
    cp_async_commit();
    cp_async_16(staged + 1, in, false);
    cp_async_commit();
    cp_async_16(staged + 2, in + 1);
    cp_async_commit();
    cp_async_wait<1>();
    out[0] = staged[0];
    out[1] = staged[1];
    if (wait_for_all) cp_async_wait<0>();
    out[2] = staged[2];
}

TEST_F(CudaSimDeathTest, AsyncCopyGroups) {
    const uint4* in = to_device(std::vector<uint4>{{1, 2, 3, 4}, {5, 6, 7, 8}});
    uint4* out = device_array<uint4>(3);
    run(pipeline_kernel, 1, 1, 48, out, in, true);
    const std::vector<uint4> result = to_host(out, 3);
    EXPECT_EQ(result[0].w, 4u);
    EXPECT_EQ(result[1].w, 0u);
    EXPECT_EQ(result[2].w, 8u);
    EXPECT_DEATH(run(pipeline_kernel, 1, 1, 48, out, in, false),
                 "not brought yet.*byte 32 of a shared array");
}

// ---------------------------------------------------------------------------------------------------
// Streams: a step on one stream makes what a step on another uses; `wait` false forgets the event

struct TwoStreams {
    cudaStream_t first, second;
    cudaEvent_t event;
    TwoStreams() {
        cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking);
        cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking);
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    }
    ~TwoStreams() {
        cudaStreamDestroy(first), cudaStreamDestroy(second);
        cudaEventDestroy(event);
    }
    void second_waits_for_first(bool wait) {
        if (!wait) return;
        cudaEventRecord(event, first);
        cudaStreamWaitEvent(second, event, 0);
    }
};

enum class Maker { kernel, copy, collective };

// A step on one stream writes 1..64 over older values; a step on another reads them.
std::vector<float> pass_between_streams(Maker maker, bool wait) {
    TwoStreams s;
    float *x = to_device(std::vector<float>(64, -1.0f)), *y = device_array<float>(64),
          *z = to_device(ramp(64));
    float* pinned = nullptr;
    cudaMallocHost(&pinned, 64 * sizeof(float));
    memcpy(pinned, ramp(64).data(), 64 * sizeof(float));
    if (maker == Maker::kernel) start_on(s.first, copy_kernel<float>, 2, 32, 0, x, z, 64);
    if (maker == Maker::copy) cudaMemcpyAsync(x, pinned, 64 * sizeof(float), cudaMemcpyHostToDevice, s.first);
    if (maker == Maker::collective) {
        cudasim::enqueue(s.first, "ncclAllReduce", true, [=] {
            cudasim::will_write(x, 64 * sizeof(float), "ncclAllReduce");
            memcpy(x, ramp(64).data(), 64 * sizeof(float));
        });
    }
    s.second_waits_for_first(wait);
    start_on(s.second, copy_kernel<float>, 2, 32, 0, y, x, 64);
    cudaStreamSynchronize(s.second);
    const std::vector<float> result = to_host(y, 64);
    cudaDeviceSynchronize();
    cudaFree(x), cudaFree(y), cudaFree(z), cudaFreeHost(pinned);
    return result;
}

// In whichever order the two ran.
TEST_F(CudaSimDeathTest, ForgottenEventWaits) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed);
        cudasim::set_seed(seed);
        const auto expect_race = [](Maker maker, const std::string& name) {
            EXPECT_EQ(pass_between_streams(maker, true), ramp(64));
            EXPECT_DEATH(
                pass_between_streams(maker, false),
                "race between streams: (reads what " + name +
                    " wrote|writes what kernel copy_kernel<float> read), and no event or wait orders");
        };
        expect_race(Maker::kernel, "kernel copy_kernel<float>");
        expect_race(Maker::copy, "cudaMemcpy");
        expect_race(Maker::collective, "ncclAllReduce");
    }
}

// A copy to the host reads what a kernel on another stream writes next.
TEST_F(CudaSimDeathTest, MemoryBelongsToTheCopyUntilItsEvent) {
    const auto copy_and_reuse = [](bool wait) {
        TwoStreams s;
        float *x = to_device(ramp(64)), *y = to_device(std::vector<float>(64, 7.0f)), *pinned = nullptr;
        cudaMallocHost(&pinned, 64 * sizeof(float));
        cudaMemcpyAsync(pinned, x, 64 * sizeof(float), cudaMemcpyDeviceToHost, s.first);
        s.second_waits_for_first(wait);
        start_on(s.second, copy_kernel<float>, 2, 32, 0, x, y, 64);
        cudaStreamSynchronize(s.second);
        cudaStreamSynchronize(s.first);
        EXPECT_EQ(pinned[63], 64.0f);
        cudaFree(x), cudaFree(y), cudaFreeHost(pinned);
    };
    copy_and_reuse(true);
    EXPECT_DEATH(
        copy_and_reuse(false),
        "race between streams: (reads what kernel copy_kernel<float> wrote|writes what cudaMemcpy read)");
}

// Order by the host, by one stream, by a chain of events: no race. Nor are two readers, or two halves of
// words.
TEST_F(CudaSim, OrderedOperationsAreNoRaces) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
        cudasim::set_seed(seed);
        TwoStreams s, t;
        float *x = to_device(ramp(64)), *y = to_device(ramp(64));
        start_on(s.first, copy_kernel<float>, 2, 32, 0, y, x, 64);
        cudaStreamSynchronize(s.first);
        start_on(s.second, copy_kernel<float>, 2, 32, 0, x, y, 64);
        cudaEventRecord(s.event, s.second);
        while (cudaEventQuery(s.event) != cudaSuccess) {
        }
        start_on(t.first, copy_kernel<float>, 2, 32, 0, y, x, 64);
        t.second_waits_for_first(true);
        cudaEventRecord(s.event, t.second);
        cudaStreamWaitEvent(s.first, s.event);
        start_on(s.first, copy_kernel<float>, 2, 32, 0, x, y, 64);
        start_on(t.second, copy_kernel<float>, 1, 32, 0, device_array<float>(32), y, 32);
        cudaMemsetAsync(x, 0, 100, s.first);
        cudaDeviceSynchronize();
        uint16_t *halves = device_array<uint16_t>(3), *source = to_device(std::vector<uint16_t>{1, 2, 3});
        start_on(s.first, copy_kernel<uint16_t>, 1, 1, 0, halves, source, 1);
        cudaMemcpyAsync(halves + 1, source + 1, 4, cudaMemcpyDeviceToDevice, s.second);
        cudaDeviceSynchronize();
        EXPECT_EQ(to_host(halves, 3), (std::vector<uint16_t>{1, 2, 3}));
        cudaFree(x), cudaFree(y), cudaFree(halves), cudaFree(source);
    }
}

// Which of two streams is first is open, except to what must wait.
TEST_F(CudaSim, StreamsRunInEitherOrder) {
    const auto order = [](uint64_t seed, bool wait) {
        cudasim::set_seed(seed);
        TwoStreams s;
        std::string text;
        const auto append = [&text](cudaStream_t stream, char c) {
            cudasim::enqueue(stream, "append", false, [&text, c] { text += c; });
        };
        append(s.first, 'a');
        s.second_waits_for_first(wait);
        append(s.second, 'b');
        cudaStreamSynchronize(s.second);
        cudaDeviceSynchronize();
        return text;
    };
    int b_first = 0;
    for (uint64_t seed = 0; seed < 9; ++seed) {
        EXPECT_EQ(order(seed, true), "ab");
        b_first += order(seed, false) == "ba";
    }
    EXPECT_GE(b_first, 3);  // always where all is as late as can be
    EXPECT_LE(b_first, 6);  // never where all is as soon as can be
}

// Into memory that is still fresh, a forgotten wait is a read of never-written memory.
TEST_F(CudaSimDeathTest, ForgottenEventWaitOnFreshMemory) {
    const auto forget = [] {
        cudasim::set_seed(0);  // under seed 1, operations run in the order of the calls
        TwoStreams s;
        float *x = device_array<float>(64), *y = device_array<float>(64), *z = to_device(ramp(64));
        start_on(s.first, copy_kernel<float>, 2, 32, 0, x, z, 64);
        start_on(s.second, copy_kernel<float>, 2, 32, 0, y, x, 64);
        cudaStreamSynchronize(s.second);
    };
    EXPECT_DEATH(forget(), "copy_kernel.*never written");
}

TEST_F(CudaSimDeathTest, PinnedMemoryBelongsToTheCopyUntilItsWait) {
    const auto read_back = [](bool wait) {
        float *x = to_device(ramp(64)), *pinned = nullptr;
        cudaMallocHost(&pinned, 64 * sizeof(float));
        cudaStream_t stream;
        cudaStreamCreate(&stream);
        cudaMemcpyAsync(pinned, x, 64 * sizeof(float), cudaMemcpyDeviceToHost, stream);
        if (wait) cudaStreamSynchronize(stream);
        const float last = *const_cast<volatile float*>(pinned + 63);
        cudaStreamDestroy(stream);
        cudaFree(x), cudaFreeHost(pinned);
        return last;
    };
    EXPECT_EQ(read_back(true), 64.0f);
    EXPECT_DEATH(read_back(false), "AddressSanitizer found an error(.|\n)*use-after-poison");
}

// A source in pinned memory is read when the copy runs; one in pageable memory before the call returns.
TEST_F(CudaSim, HostCopiesReadPinnedMemoryLate) {
    float *x = device_array<float>(1), *pinned = nullptr;
    cudaMallocHost(&pinned, sizeof(float));
    float pageable = 1.0f;
    *pinned = 1.0f;
    cudaMemcpyAsync(x, &pageable, sizeof(float), cudaMemcpyHostToDevice, nullptr);
    pageable = 2.0f;
    EXPECT_EQ(to_host(x, 1)[0], 1.0f);
    cudaMemcpyAsync(x, pinned, sizeof(float), cudaMemcpyHostToDevice, nullptr);
    *pinned = 2.0f;
    EXPECT_EQ(to_host(x, 1)[0], 2.0f);
    cudaFree(x), cudaFreeHost(pinned);
}

TEST_F(CudaSim, TheDefaultStreamWaitsForBlockingStreams) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
        cudasim::set_seed(seed);
        cudaStream_t stream;
        cudaStreamCreate(&stream);
        float *x = device_array<float>(64), *y = device_array<float>(64), *z = to_device(ramp(64));
        start_on(stream, copy_kernel<float>, 2, 32, 0, x, z, 64);
        start_on(nullptr, copy_kernel<float>, 2, 32, 0, y, x, 64);
        start_on(stream, copy_kernel<float>, 2, 32, 0, x, y, 64);
        cudaStreamSynchronize(stream);
        EXPECT_EQ(to_host(x, 64)[63], 64.0f);
        cudaStreamDestroy(stream);
        cudaFree(x), cudaFree(y), cudaFree(z);
    }
}

TEST_F(CudaSim, EventsAndPolling) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
        cudasim::set_seed(seed);
        cudaStream_t stream;
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        cudaEvent_t start, end;
        cudaEventCreate(&start), cudaEventCreate(&end);
        EXPECT_EQ(cudaEventQuery(start), cudaSuccess);  // never recorded
        cudaEventRecord(start, stream);
        start_on(stream, nothing_kernel, 100, 256, 0);
        int called = 0;
        cudaLaunchHostFunc(
            stream, [](void* data) { ++*static_cast<int*>(data); }, &called);
        cudaEventRecord(end, stream);
        while (cudaEventQuery(end) == cudaErrorNotReady) {
        }
        EXPECT_EQ(called, 1);
        EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
        float milliseconds = -1.0f;
        EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaSuccess);
        EXPECT_GE(milliseconds, 0.0f);
        cudaEventDestroy(start), cudaEventDestroy(end), cudaStreamDestroy(stream);
    }
}

// ---------------------------------------------------------------------------------------------------
// Graphs

void add_kernel(float* x, const float* increment, float constant, size_t n) {
    const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < n) x[i] += *increment + constant;
}

struct CapturingStream {
    cudaStream_t stream;
    CapturingStream() {
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    }
    cudaGraphExec_t end() {
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
        return exec;
    }
};

// A capture runs nothing. Each launch runs all of it, in order with the stream's other work: with the
// arguments of the capture, and what memory holds by then.
TEST_F(CudaSim, GraphsRunWhatWasCaptured) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
        cudasim::set_seed(seed);
        float *x = to_device(ramp(64)), *y = to_device(ramp(64)), *increment = to_device(ramp(1));
        CapturingStream s;
        float constant = 10;
        start_on(s.stream, add_kernel, 2, 32, 0, x, increment, constant, 64);
        cudaMemcpyAsync(y, x, 32 * sizeof(float), cudaMemcpyDeviceToDevice, s.stream);
        cudaMemsetAsync(y + 32, 0, 32 * sizeof(float), s.stream);
        constant = 1000;
        cudaGraphExec_t exec = s.end();
        cudaStreamSynchronize(s.stream);
        EXPECT_EQ(to_host(y, 64), ramp(64));

        EXPECT_EQ(cudaGraphLaunch(exec, s.stream), cudaSuccess);
        const float two = 2;
        cudaMemcpyAsync(increment, &two, sizeof(float), cudaMemcpyHostToDevice, s.stream);
        EXPECT_EQ(cudaGraphLaunch(exec, s.stream), cudaSuccess);
        EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
        cudaStreamSynchronize(s.stream);
        EXPECT_EQ(to_host(x, 1)[0], 1 + (1 + 10) + (2 + 10));
        EXPECT_EQ(to_host(y, 64)[31], 32 + (1 + 10) + (2 + 10));
        EXPECT_EQ(to_host(y, 64)[32], 0);
        cudaStreamDestroy(s.stream);
        cudaFree(x), cudaFree(y), cudaFree(increment);
    }
    EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal),
              cudaErrorStreamCaptureUnsupported);
}

// What waits, allocates or belongs to the host has no place in a capture.
TEST_F(CudaSimDeathTest, CapturesHoldWorkOfTheDeviceAlone) {
    float *x = to_device(ramp(64)), *pinned = nullptr;
    cudaMallocHost(&pinned, 64);
    cudaEvent_t event;
    cudaEventCreate(&event);
    const auto expect_fault = [](const char* call, const std::function<void(cudaStream_t)>& act) {
        EXPECT_DEATH(
            act(CapturingStream().stream),
            std::string("cudasim: .*") + call + "( while this thread captures| in the capture of a stream)");
    };
    void* memory = nullptr;
    expect_fault("cudaMalloc", [&](cudaStream_t) { cudaMalloc(&memory, 64); });
    expect_fault("cudaFree", [&](cudaStream_t) { cudaFree(x); });
    expect_fault("cudaMallocHost", [&](cudaStream_t) { cudaMallocHost(&memory, 64); });
    expect_fault("cudaStreamSynchronize", [](cudaStream_t stream) { cudaStreamSynchronize(stream); });
    expect_fault("cudaDeviceSynchronize", [](cudaStream_t) { cudaDeviceSynchronize(); });
    expect_fault("cudaEventSynchronize", [&](cudaStream_t) { cudaEventSynchronize(event); });
    expect_fault("cudaEventRecord", [&](cudaStream_t stream) { cudaEventRecord(event, stream); });
    expect_fault("cudaMemcpy", [&](cudaStream_t) { to_host(x, 1); });
    expect_fault("cudaMemcpy", [&](cudaStream_t stream) {
        cudaMemcpyAsync(pinned, x, 64, cudaMemcpyDeviceToHost, stream);
    });
    expect_fault("cudaMemcpy", [&](cudaStream_t stream) {
        cudaMemcpyAsync(x, pinned, 64, cudaMemcpyHostToDevice, stream);
    });
    expect_fault("ncclAllReduce",
                 [](cudaStream_t stream) { cudasim::enqueue(stream, "ncclAllReduce", true, [] {}); });
    cudaEventDestroy(event), cudaFreeHost(pinned), cudaFree(x);
}

}  // namespace
