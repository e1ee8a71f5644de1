// Launching kernels: the limits of the architecture, and CUDA's error codes and words.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "memory.h"

namespace cudasim {
namespace {

constexpr size_t shared_without_asking = 48 * 1024;  // bytes a block

// A kernel and its threads a block: what CUDASIM_LAUNCHES lists.
using LaunchShape = std::pair<const void*, unsigned>;

struct Kernels {
    std::mutex mutex;
    std::map<const void*, size_t> shared_limits;  // where set_attribute has changed them
    uint64_t launches = 0;
    FILE* list = nullptr;  // where the program's end writes `launched`
    struct Launched {
        size_t shared_bytes = 0;  // the largest dynamic shared memory
        uint64_t count = 0;
    };
    std::map<LaunchShape, Launched> launched;

    Kernels() {
        const char* const path = getenv("CUDASIM_LAUNCHES");
        if (path == nullptr || *path == '\0') return;
        list = fopen(path, "w");
        if (list == nullptr) fault("CUDASIM_LAUNCHES=%s: %s", path, strerror(errno));
    }
    ~Kernels() {
        if (list == nullptr) return;
        for (const auto& [shape, all] : launched) {
            fprintf(list, "%s\t%u\t%zu\t%llu\n", kernel_name(shape.first).c_str(), shape.second,
                    all.shared_bytes, static_cast<unsigned long long>(all.count));
        }
        fclose(list);
    }
};
Kernels& kernels() {
    static Kernels instance;
    return instance;
}

thread_local cudaError_t last_error = cudaSuccess;  // each host thread has its own

// CUDA says only "invalid configuration argument"; here a line says which.
cudaError_t refuse(cudaError_t error, const void* kernel, const char* what, size_t value, size_t limit) {
    fprintf(stderr, "cudasim: launch of kernel %s: %zu %s; sm_%d allows %zu\n", kernel_name(kernel).c_str(),
            value, what, arch().capability, limit);
    last_error = error;
    return error;
}

}  // namespace

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> thread_body,
                   const std::vector<const void*>& pointers) {
    if (running() != nullptr) fault("a kernel launches kernel %s", kernel_name(kernel).c_str());
    if (device_count() == 0) return cudaErrorNoDevice;
    Kernels& k = kernels();
    const std::lock_guard lock(k.mutex);
    const dim3 grid = config.gridDim, block = config.blockDim;
    const auto found = k.shared_limits.find(kernel);
    const size_t shared_limit = found == k.shared_limits.end() ? shared_without_asking : found->second;
    struct {
        const char* what;
        size_t value, limit;
    } const limits[] = {
        {"threads in x", block.x, 1024},     {"threads in y", block.y, 1024},
        {"threads in z", block.z, 64},       {"threads a block", size_t{block.x} * block.y * block.z, 1024},
        {"blocks in x", grid.x, 0x7fffffff}, {"blocks in y", grid.y, 65535},
        {"blocks in z", grid.z, 65535},
    };
    for (const auto& [what, value, limit] : limits) {
        if (value == 0 || value > limit)
            return refuse(cudaErrorInvalidConfiguration, kernel, what, value, limit);
    }
    if (config.dynamicSmemBytes > shared_limit) {
        return refuse(cudaErrorInvalidValue, kernel,
                      "bytes of shared memory (more than 48 KiB needs cudaFuncSetAttribute)",
                      config.dynamicSmemBytes, shared_limit);
    }
    if (config.numAttrs != 0) return cudaErrorNotSupported;
    if (size_t{grid.x} * grid.y * grid.z >= max_runs) fault("a grid too large to simulate");
    for (const void* pointer : pointers) {
        if (pointer != nullptr && !is_device_memory(pointer) && !is_pinned_memory(pointer)) {
            fault("launch of kernel %s: an argument points to host memory: %p", kernel_name(kernel).c_str(),
                  pointer);
        }
    }
    if (k.list != nullptr) {
        Kernels::Launched& all = k.launched[{kernel, block.x * block.y * block.z}];
        all.shared_bytes = std::max(all.shared_bytes, config.dynamicSmemBytes);
        ++all.count;
    }
    auto work = std::make_shared<Launch>();
    work->kernel = kernel;
    work->grid = grid;
    work->block = block;
    work->shared_bytes = config.dynamicSmemBytes;
    work->thread_body = std::move(thread_body);
    work->number = ++k.launches;
    enqueue(config.stream, "kernel", false, [work] { run_kernel(*work); });
    return cudaSuccess;
}

cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || static_cast<size_t>(value) > arch().shared_per_block) {
        return refuse(cudaErrorInvalidValue, kernel, "bytes of shared memory", static_cast<size_t>(value),
                      arch().shared_per_block);
    }
    const std::lock_guard lock(kernels().mutex);
    kernels().shared_limits[kernel] = static_cast<size_t>(value);
    return cudaSuccess;
}

// By threads and shared memory; how many registers nvcc would use is not known here.
cudaError_t occupancy(int* blocks, const void*, int block_threads, size_t shared_bytes) {
    *blocks = 0;
    if (block_threads <= 0 || block_threads > 1024) return cudaErrorInvalidValue;
    if (shared_bytes > arch().shared_per_block) return cudaSuccess;
    const int warps = static_cast<int>(ceil_div(static_cast<size_t>(block_threads), warp_size));
    const int by_threads = arch().threads_per_multiprocessor / (warps * static_cast<int>(warp_size));
    const int by_shared = static_cast<int>(arch().shared_per_multiprocessor / (shared_bytes + 1024));
    *blocks = std::min({by_threads, by_shared, arch().blocks_per_multiprocessor});
    return cudaSuccess;
}

}  // namespace cudasim

cudaError_t cudaPeekAtLastError() { return cudasim::last_error; }
cudaError_t cudaGetLastError() { return std::exchange(cudasim::last_error, cudaSuccess); }

namespace {

struct ErrorText {
    cudaError_t error;
    const char *name, *text;
};
constexpr ErrorText error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
};

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
    for (const ErrorText& known : error_texts) {
        if (known.error == error) return known.name;
    }
    return "cudaErrorUnknown";
}

const char* cudaGetErrorString(cudaError_t error) {
    for (const ErrorText& known : error_texts) {
        if (known.error == error) return known.text;
    }
    return "unknown error";
}
