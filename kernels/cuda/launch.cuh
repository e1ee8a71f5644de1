// How every kernel is launched, and how every CUDA call is checked. Ordinary C++ without <<<>>>, so that g++
// compiles it for the simulator as it stands.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>
#include <utility>

#include "kernels/cuda/stream.h"
#include "kernels/error.h"

constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

// What to do about an error, where its usual cause is known; else an empty string.
inline const char* cuda_hint(cudaError_t error) {
    switch (error) {
        case cudaErrorMemoryAllocation:
            return "; try a smaller --batch-size or model";
        case cudaErrorNoDevice:
            return "; `make cpu` builds the program for this machine's CPU";
        case cudaErrorInsufficientDriver:
            return "; the driver is older than the CUDA toolkit: update it";
        case cudaErrorNoKernelImageForDevice:
            return "; rebuild on this machine, or with ARCHS=all";
        default:
            return "";
    }
}

// Fails with CUDA's own words, the call and its place.
inline void cuda_check(cudaError_t error, const char* call, const char* file, int line) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // so that the next call does not report this error again
    fail("%s:%d: %s: %s%s", file, line, call, cudaGetErrorString(error), cuda_hint(error));
}
#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)

// kernel(args...) on grid x block threads, each block with shared_bytes of dynamic shared memory, queued on
// the stream. Arguments convert to the kernel's parameters as in a function call.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, Stream* stream,
            Arguments&&... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream->stream;
    // Without asking for it, a block gets 48 KiB at most.
    if (shared_bytes > 48 * 1024) {
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared_bytes)));
    }
    CUDA_CHECK(cudaLaunchKernelEx(
        &config, kernel, static_cast<std::decay_t<Parameters>>(std::forward<Arguments>(arguments))...));
}
