// What a Stream is on a GPU; shared by the files of this backend only.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "kernels/device.h"

struct MatmulPlans;  // matmul.cu: what is known about each product that was asked for

// Pinned host memory through which copies go: the GPU reads and writes it by itself, while the host goes on.
struct Staging {
    static constexpr size_t bytes = size_t{1} << 20;
    char* memory = nullptr;
    cudaEvent_t done = nullptr;  // of the last copy from or to it
};

struct Stream {
    int device;
    cudaStream_t stream;

    cublasLtHandle_t lt;
    std::shared_ptr<MatmulPlans> matmul_plans;   // made by the first product
    bool tf32 = false, fused_epilogues = false;  // see DeviceConfig

    void* scratch = nullptr;  // for one op at a time: partial sums, sorted tokens, cuBLASLt's workspace
    size_t scratch_bytes = 0;
    uint64_t scratch_moves = 0;  // how often it has grown: a recorded op knows only where it was

    // What ran last, for the tests.
    const char* attention_kernel = nullptr;  // "flash" or "general"
    const char* symmetric_kernel = nullptr;  // "vectors" or "entries", on tensor cores; "cublas"

    std::array<Staging, 4> staging;  // used in turn
    size_t next_staging = 0;

    std::unordered_map<void*, size_t> allocations;  // what device_malloc gave out
    size_t allocated = 0, peak = 0;                 // bytes
};

// At least `bytes` of device memory for the op or product that asks, until the next one asks: they run one
// after the other on a stream. It only grows, and growing waits for the device: that happens in the first
// step alone. Aligned to 256 bytes; contents are unspecified.
void* device_scratch(Stream* stream, size_t bytes);
