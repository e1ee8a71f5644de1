// The simulated device: its architecture's limits, and the settings from the environment.
//
// Limits: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
#include <cstdio>
#include <cstdlib>

#include "internal.h"

namespace cudasim {
namespace {

constexpr size_t KiB = 1024;
constexpr Arch architectures[] = {
    // capability, name, SMs, threads and blocks an SM, shared memory an SM and a block
    {80, "simulated sm_80 (A100)", 108, 2048, 32, 164 * KiB, 163 * KiB},
    {86, "simulated sm_86 (RTX 3090)", 82, 1536, 16, 100 * KiB, 99 * KiB},
    {89, "simulated sm_89 (RTX 4090)", 128, 1536, 24, 100 * KiB, 99 * KiB},
    {90, "simulated sm_90 (H100)", 132, 2048, 32, 228 * KiB, 227 * KiB},
    {100, "simulated sm_100 (B200)", 148, 2048, 32, 228 * KiB, 227 * KiB},
    {120, "simulated sm_120 (RTX 5090)", 170, 1536, 24, 100 * KiB, 99 * KiB},
};

uint64_t from_environment(const char* name, uint64_t fallback) {
    const char* text = getenv(name);
    if (text == nullptr || *text == '\0') return fallback;
    char* end = nullptr;
    const uint64_t value = strtoull(text, &end, 10);
    if (*end != '\0') fault("%s=%s is not a number", name, text);
    return value;
}

const Arch& find_arch(uint64_t capability) {
    for (const Arch& candidate : architectures) {
        if (static_cast<uint64_t>(candidate.capability) == capability) return candidate;
    }
    fault("CUDASIM_ARCH=%llu: choose 80, 86, 89, 90, 100 or 120",
          static_cast<unsigned long long>(capability));
}

struct Settings {
    const Arch* arch = &find_arch(from_environment("CUDASIM_ARCH", 90));
    uint64_t seed = from_environment("CUDASIM_SEED", 0);
    int devices = static_cast<int>(from_environment("CUDASIM_DEVICES", 1));
    size_t memory = from_environment("CUDASIM_MEMORY", 8192) * KiB * KiB;
    double timeout = static_cast<double>(from_environment("CUDASIM_TIMEOUT", 60));
};

Settings& settings() {
    static Settings instance;
    return instance;
}

}  // namespace

const Arch& arch() { return *settings().arch; }
uint64_t seed() { return settings().seed; }
int device_count() { return settings().devices; }
size_t memory_limit() { return settings().memory; }
double timeout() { return settings().timeout; }
void set_timeout(double seconds) { settings().timeout = seconds; }
void set_seed(uint64_t value) { settings().seed = value; }
void set_arch(int capability) { settings().arch = &find_arch(static_cast<uint64_t>(capability)); }

}  // namespace cudasim

using cudasim::arch;

cudaError_t cudaGetDeviceCount(int* count) {
    *count = cudasim::device_count();
    return *count == 0 ? cudaErrorNoDevice : cudaSuccess;
}

// Devices have streams of their own, and each its share of memory; that one cannot reach into another's is
// not simulated.
static thread_local int chosen_device = 0;

int cudasim::current_device() { return chosen_device; }

cudaError_t cudaSetDevice(int device) {
    if (cudasim::device_count() == 0) return cudaErrorNoDevice;
    if (device < 0 || device >= cudasim::device_count()) return cudaErrorInvalidDevice;
    chosen_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = chosen_device;
    return cudasim::device_count() == 0 ? cudaErrorNoDevice : cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device < 0 || device >= cudasim::device_count()) return cudaErrorInvalidDevice;
    *properties = {};
    snprintf(properties->name, sizeof(properties->name), "%s", arch().name);
    properties->totalGlobalMem = cudasim::memory_limit();
    properties->sharedMemPerBlock = 48 * 1024;
    properties->sharedMemPerBlockOptin = arch().shared_per_block;
    properties->sharedMemPerMultiprocessor = arch().shared_per_multiprocessor;
    properties->reservedSharedMemPerBlock = 1024;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = cudasim::warp_size;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 0x7fffffff;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->major = arch().capability / 10;
    properties->minor = arch().capability % 10;
    properties->multiProcessorCount = arch().multiprocessors;
    properties->maxThreadsPerMultiProcessor = arch().threads_per_multiprocessor;
    properties->maxBlocksPerMultiProcessor = arch().blocks_per_multiprocessor;
    properties->l2CacheSize = 32 << 20;
    properties->concurrentKernels = properties->unifiedAddressing = 1;
    properties->asyncEngineCount = 2;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp properties;
    const cudaError_t error = cudaGetDeviceProperties(&properties, device);
    if (error != cudaSuccess) return error;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock:
            *value = properties.maxThreadsPerBlock;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            *value = static_cast<int>(properties.sharedMemPerBlock);
            break;
        case cudaDevAttrWarpSize:
            *value = properties.warpSize;
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = properties.multiProcessorCount;
            break;
        case cudaDevAttrMaxThreadsPerMultiProcessor:
            *value = properties.maxThreadsPerMultiProcessor;
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = properties.major;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = properties.minor;
            break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = static_cast<int>(properties.sharedMemPerMultiprocessor);
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = static_cast<int>(properties.sharedMemPerBlockOptin);
            break;
        default:
            return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

// As a driver for CUDA 13.0 reports them.
cudaError_t cudaDriverGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
