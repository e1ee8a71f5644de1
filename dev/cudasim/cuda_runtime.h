// Stand-in for NVIDIA's <cuda_runtime.h>: what kernels/cuda uses of CUDA, in standard C++, so that the same
// sources compile with g++ -x c++ and run on the simulator. Names, argument orders, error codes and
// semantics follow the CUDA Runtime API and the CUDA C++ Programming Guide; only what is used is here.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cudasim.h"

// ---------------------------------------------------------------------------------------------------
// The language

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)  // a promise to the compiler; the limit of the launch itself is checked

// threadIdx, blockIdx, blockDim and gridDim are variables: cudasim.h.
constexpr int warpSize = 32;

// A product or sum that no compiler makes part of an FMA: the empty asm may change it, for all that g++
// knows.
inline float __fmul_rn(float a, float b) {
    float product = a * b;
    asm("" : "+m"(product));
    return product;
}
inline float __fadd_rn(float a, float b) {
    asm("" : "+m"(a), "+m"(b));
    return a + b;
}

// ---------------------------------------------------------------------------------------------------
// Vector types: an access moves the whole vector, whose address must be a multiple of its alignment

#define CUDASIM_VECTOR2(name, element, alignment) \
    struct alignas(alignment) name {              \
        element x, y;                             \
    };                                            \
    constexpr name make_##name(element x, element y) { return {x, y}; }
#define CUDASIM_VECTOR4(name, element, alignment) \
    struct alignas(alignment) name {              \
        element x, y, z, w;                       \
    };                                            \
    constexpr name make_##name(element x, element y, element z, element w) { return {x, y, z, w}; }

CUDASIM_VECTOR2(float2, float, 8)
CUDASIM_VECTOR2(double2, double, 16)
CUDASIM_VECTOR2(int2, int, 8)
CUDASIM_VECTOR2(uint2, unsigned, 8)
CUDASIM_VECTOR4(float4, float, 16)
CUDASIM_VECTOR4(int4, int, 16)
CUDASIM_VECTOR4(uint4, unsigned, 16)
CUDASIM_VECTOR4(ushort4, unsigned short, 8)
CUDASIM_VECTOR4(uchar4, unsigned char, 4)

#undef CUDASIM_VECTOR2
#undef CUDASIM_VECTOR4

// ---------------------------------------------------------------------------------------------------
// Barriers, shuffles and votes. The last argument is the caller's line, for reports.

inline void __syncthreads(cudasim::Where where = cudasim::Where::current()) { cudasim::barrier(where); }
inline int __syncthreads_count(int predicate, cudasim::Where where = cudasim::Where::current()) {
    return static_cast<int>(cudasim::block_count(predicate != 0, where));
}
inline int __syncthreads_or(int predicate, cudasim::Where where = cudasim::Where::current()) {
    return cudasim::block_count(predicate != 0, where) != 0;
}
inline int __syncthreads_and(int predicate, cudasim::Where where = cudasim::Where::current()) {
    return cudasim::block_count(predicate == 0, where) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, cudasim::Where where = cudasim::Where::current()) {
    static constexpr auto nothing = [](void* const*, unsigned) {};
    cudasim::warp_collective("__syncwarp", mask, nullptr, nothing, where, true);
}
inline void __threadfence() { cudasim::fence(); }
inline void __threadfence_block() {}

namespace cudasim {

// Shuffles move 4 or 8 bytes; `width` (a power of two) splits the warp into independent groups.
template <typename Value>
[[gnu::always_inline]] inline Value shuffle_value(const char* name, unsigned mask, Value value,
                                                  unsigned source, Where where) {
    static_assert(sizeof(Value) == 4 || sizeof(Value) == 8, "shuffles move 4 or 8 bytes");
    using Bits = std::conditional_t<sizeof(Value) == 4, uint32_t, uint64_t>;
    return std::bit_cast<Value>(
        static_cast<Bits>(shuffle(name, mask, std::bit_cast<Bits>(value), source, where)));
}

}  // namespace cudasim

template <typename Value>
[[gnu::always_inline]] inline Value __shfl_sync(unsigned mask, Value value, int source, int width = warpSize,
                                                cudasim::Where where = cudasim::Where::current()) {
    const unsigned w = static_cast<unsigned>(width), first = cudasim::lane() & ~(w - 1);
    return cudasim::shuffle_value("__shfl_sync", mask, value,
                                  first + (static_cast<unsigned>(source) & (w - 1)), where);
}
template <typename Value>
[[gnu::always_inline]] inline Value __shfl_xor_sync(unsigned mask, Value value, int lane_mask,
                                                    int width = warpSize,
                                                    cudasim::Where where = cudasim::Where::current()) {
    const unsigned w = static_cast<unsigned>(width), me = cudasim::lane();
    const unsigned other = me ^ static_cast<unsigned>(lane_mask);
    // A source in an earlier group is read; one in a later group gives the lane's own value.
    const unsigned source = other < (me & ~(w - 1)) + w ? other : me;
    return cudasim::shuffle_value("__shfl_xor_sync", mask, value, source, where);
}
template <typename Value>
[[gnu::always_inline]] inline Value __shfl_down_sync(unsigned mask, Value value, unsigned delta,
                                                     int width = warpSize,
                                                     cudasim::Where where = cudasim::Where::current()) {
    const unsigned w = static_cast<unsigned>(width), me = cudasim::lane();
    const unsigned source = (me & (w - 1)) + delta < w ? me + delta : me;
    return cudasim::shuffle_value("__shfl_down_sync", mask, value, source, where);
}
template <typename Value>
[[gnu::always_inline]] inline Value __shfl_up_sync(unsigned mask, Value value, unsigned delta,
                                                   int width = warpSize,
                                                   cudasim::Where where = cudasim::Where::current()) {
    const unsigned w = static_cast<unsigned>(width), me = cudasim::lane();
    const unsigned source = (me & (w - 1)) >= delta ? me - delta : me;
    return cudasim::shuffle_value("__shfl_up_sync", mask, value, source, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              cudasim::Where where = cudasim::Where::current()) {
    return cudasim::ballot("__ballot_sync", mask, predicate != 0, where);
}
inline int __any_sync(unsigned mask, int predicate, cudasim::Where where = cudasim::Where::current()) {
    return cudasim::ballot("__any_sync", mask, predicate != 0, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, cudasim::Where where = cudasim::Where::current()) {
    return cudasim::ballot("__all_sync", mask, predicate == 0, where) == 0;
}

// ---------------------------------------------------------------------------------------------------
// Arithmetic that <cmath> lacks

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline size_t min(size_t a, size_t b) { return a < b ? a : b; }
inline size_t max(size_t a, size_t b) { return a > b ? a : b; }

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}

// Integers only: a float sum by atomics has no fixed order.
#define CUDASIM_ATOMIC          \
    template <typename Integer> \
    __attribute__((no_sanitize("address"), noinline))
CUDASIM_ATOMIC Integer atomicAdd(Integer* address, std::type_identity_t<Integer> value) {
    static_assert(std::is_integral_v<Integer>, "no float atomics: every sum has a fixed order");
    cudasim::check_atomic(address, sizeof(Integer));
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
CUDASIM_ATOMIC Integer atomicMax(Integer* address, std::type_identity_t<Integer> value) {
    cudasim::check_atomic(address, sizeof(Integer));
    Integer old = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (old < value &&
           !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}
CUDASIM_ATOMIC Integer atomicExch(Integer* address, std::type_identity_t<Integer> value) {
    cudasim::check_atomic(address, sizeof(Integer));
    return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
CUDASIM_ATOMIC Integer atomicCAS(Integer* address, std::type_identity_t<Integer> expected,
                                 std::type_identity_t<Integer> value) {
    cudasim::check_atomic(address, sizeof(Integer));
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
#undef CUDASIM_ATOMIC

// ---------------------------------------------------------------------------------------------------
// Errors

enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidPitchValue = 12,
    cudaErrorInvalidMemcpyDirection = 21,
    cudaErrorInsufficientDriver = 35,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchOutOfResources = 701,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorUnknown = 999,
};
using cudaError_t = cudaError;

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();  // and resets it
cudaError_t cudaPeekAtLastError();

// ---------------------------------------------------------------------------------------------------
// Devices

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
    size_t reservedSharedMemPerBlock;
    int regsPerBlock, regsPerMultiprocessor, warpSize, maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
    int major, minor, multiProcessorCount, maxThreadsPerMultiProcessor, maxBlocksPerMultiProcessor;
    int l2CacheSize, concurrentKernels, asyncEngineCount, unifiedAddressing, ECCEnabled;
};

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);

// ---------------------------------------------------------------------------------------------------
// Memory

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4,
};

using cudaStream_t = CUstream_st*;

cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMallocHost(void** memory, size_t bytes);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void* memory, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream = nullptr);

template <typename Element>
cudaError_t cudaMalloc(Element** memory, size_t bytes) {
    return cudaMalloc(reinterpret_cast<void**>(memory), bytes);
}
template <typename Element>
cudaError_t cudaMallocHost(Element** memory, size_t bytes) {
    return cudaMallocHost(reinterpret_cast<void**>(memory), bytes);
}

// ---------------------------------------------------------------------------------------------------
// Streams and events

struct CUevent_st;
using cudaEvent_t = CUevent_st*;

constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);

using cudaHostFn_t = void (*)(void* data);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data);

cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

// ---------------------------------------------------------------------------------------------------
// Graphs: what one stream was given between Begin and EndCapture, in that order

struct CUgraph_st;
struct CUgraphExec_st;
using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = CUgraphExec_st*;

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2,
};

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

// ---------------------------------------------------------------------------------------------------
// Kernels

struct cudaLaunchAttribute;  // none is simulated
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};

namespace cudasim {

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> thread_body,
                   const std::vector<const void*>& pointers);
cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t occupancy(int* blocks, const void* kernel, int block_threads, size_t shared_bytes);

template <typename... Parameters>
const void* address_of(void (*kernel)(Parameters...)) {
    return reinterpret_cast<const void*>(kernel);
}

}  // namespace cudasim

// Queues the kernel: arguments are copied now, as CUDA does; each thread gets its own copy when it runs.
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
    std::vector<const void*> pointers;
    std::tuple<std::decay_t<Parameters>...> values(std::forward<Arguments>(arguments)...);
    std::apply(
        [&](const auto&... value) {
            [[maybe_unused]] const auto note = [&](const auto& v) {
                if constexpr (std::is_pointer_v<std::decay_t<decltype(v)>>) pointers.push_back(v);
            };
            (note(value), ...);
        },
        values);
    return cudasim::launch(
        *config, cudasim::address_of(kernel),
        [kernel, values = std::move(values)] { std::apply(kernel, values); }, pointers);
}

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
    return cudasim::set_attribute(cudasim::address_of(kernel), attribute, value);
}

template <typename... Parameters>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(Parameters...),
                                                          int block_threads, size_t shared_bytes) {
    return cudasim::occupancy(blocks, cudasim::address_of(kernel), block_threads, shared_bytes);
}
