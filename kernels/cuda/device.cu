// Memory and streams on a GPU; see kernels/device.h.
//
// Copies go through pinned host memory in pieces. From ordinary memory CUDA would first wait for everything
// queued before; so instead the host copies a piece to pinned memory and goes on, and the GPU fetches it when
// its turn comes.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#include "kernels/cuda/launch.cuh"
#include "kernels/device.h"
#include "kernels/error.h"

namespace {

// Fails with a line that says what to do if there is no GPU, or none that these kernels run on.
void choose_device(int index) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaErrorInsufficientDriver) {
        int driver = 0, runtime = 0;
        cudaDriverGetVersion(&driver);
        cudaRuntimeGetVersion(&runtime);
        if (driver != 0) {
            fail(
                "the NVIDIA driver is for CUDA %d.%d, this program for %d.%d: update the driver, build with "
                "an older CUDA toolkit, or use the CPU (`make cpu`)",
                driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
        }
    }
    // Without any driver CUDA reports an insufficient one too.
    if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
        (error == cudaSuccess && count == 0))
        fail(
            "no NVIDIA GPU or driver was found, and this program was built for one; `make cpu` builds it for "
            "the CPU");
    CUDA_CHECK(error);
    if (index < 0 || index >= count) fail("GPU %d: this machine has GPUs 0 to %d", index, count - 1);

    CUDA_CHECK(cudaSetDevice(index));
    int major = 0, minor = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index));
    if (major < 8)
        fail(
            "GPU %d has compute capability %d.%d, and 8.0 (A100, RTX 30) is the least; `make cpu` builds "
            "for the CPU",
            index, major, minor);
}

void* allocate(size_t bytes, Stream* stream) {
    if (bytes == 0) return nullptr;
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, bytes);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // so that the next call does not report this error again
        size_t free_bytes = 0, total_bytes = 0;
        CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
        fail(
            "out of GPU memory: %.1f MiB asked for, %.1f of %.1f MiB are free; try a smaller --batch-size or "
            "model",
            bytes / 1048576.0, free_bytes / 1048576.0, total_bytes / 1048576.0);
    }
    CUDA_CHECK(error);
    stream->allocated += bytes;
    stream->peak = std::max(stream->peak, stream->allocated);
    return memory;
}

void release(void* memory, size_t bytes, Stream* stream) {
    CUDA_CHECK(cudaFree(memory));
    stream->allocated -= bytes;
}

// The next piece of pinned memory in turn, once the copy that last used it has finished.
Staging& next_staging(Stream* stream) {
    Staging& staging = stream->staging[stream->next_staging++ % stream->staging.size()];
    CUDA_CHECK(cudaEventSynchronize(staging.done));
    return staging;
}

}  // namespace

Stream* stream_create(const DeviceConfig& config) {
    if (config.threads < 0 || config.threads > 4096)
        fail("--threads %d: must be 0 (all cores) to 4096", config.threads);
    choose_device(config.index);
    Stream* stream = new Stream{};
    stream->device = config.index;
    stream->tf32 = config.tf32;
    stream->fused_epilogues = config.fused_epilogues;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream->stream, cudaStreamNonBlocking));
    for (Staging& staging : stream->staging) {
        CUDA_CHECK(cudaMallocHost(reinterpret_cast<void**>(&staging.memory), Staging::bytes));
        CUDA_CHECK(cudaEventCreateWithFlags(&staging.done, cudaEventDisableTiming));
    }
    if (cublasLtCreate(&stream->lt) != CUBLAS_STATUS_SUCCESS)
        fail("cuBLASLt does not start on GPU %d", config.index);
    return stream;
}

void stream_destroy(Stream* stream) {
    if (stream == nullptr) return;
    cudaStreamSynchronize(stream->stream);  // an error here has been reported, or will be by the next call
    stream->matmul_plans.reset();
    cublasLtDestroy(stream->lt);
    for (Staging& staging : stream->staging) {
        cudaEventDestroy(staging.done);
        cudaFreeHost(staging.memory);
    }
    cudaFree(stream->scratch);
    cudaStreamDestroy(stream->stream);
    delete stream;
}

void stream_synchronize(Stream* stream) { CUDA_CHECK(cudaStreamSynchronize(stream->stream)); }

std::string device_name(const Stream* stream) {
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, stream->device));
    char text[400];
    snprintf(text, sizeof(text), "%s, sm_%d%d, %.0f GiB", properties.name, properties.major, properties.minor,
             properties.totalGlobalMem / 1073741824.0);
    return text;
}

bool device_has_fast_fp16(const Stream*) { return true; }

bool device_set_tf32(Stream* stream, bool on) { return std::exchange(stream->tf32, on); }

int device_threads(const Stream*) { return 1; }

size_t device_allocated_bytes(const Stream* stream) { return stream->allocated; }
size_t device_peak_bytes(const Stream* stream) { return stream->peak; }
size_t device_scratch_bytes(const Stream* stream) { return stream->scratch_bytes; }

void* device_malloc(size_t bytes, Stream* stream) {
    void* memory = allocate(bytes, stream);
    if (memory != nullptr) stream->allocations[memory] = bytes;
    return memory;
}

void device_free(void* memory, Stream* stream) {
    if (memory == nullptr) return;
    const auto found = stream->allocations.find(memory);
    if (found == stream->allocations.end()) fail("device_free: not memory of this stream");
    release(memory, found->second, stream);
    stream->allocations.erase(found);
}

void* device_scratch(Stream* stream, size_t bytes) {
    if (bytes > stream->scratch_bytes) {
        release(stream->scratch, stream->scratch_bytes, stream);  // waits for the ops that use it
        stream->scratch = nullptr;
        stream->scratch_bytes = 0;
        stream->scratch = allocate(bytes, stream);
        stream->scratch_bytes = bytes;
        stream->scratch_moves++;
    }
    return stream->scratch;
}

void device_memset_zero(void* memory, size_t bytes, Stream* stream) {
    if (bytes != 0) CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream->stream));
}

void copy_on_device(void* to, const void* from, size_t bytes, Stream* stream) {
    if (bytes == 0) return;
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream->stream));
}

void copy_to_device(void* device, const void* host, size_t bytes, Stream* stream) {
    for (size_t done = 0; done < bytes;) {
        const size_t count = std::min(Staging::bytes, bytes - done);
        Staging& staging = next_staging(stream);
        memcpy(staging.memory, static_cast<const char*>(host) + done, count);
        CUDA_CHECK(cudaMemcpyAsync(static_cast<char*>(device) + done, staging.memory, count,
                                   cudaMemcpyHostToDevice, stream->stream));
        CUDA_CHECK(cudaEventRecord(staging.done, stream->stream));
        done += count;
    }
}

// The GPU sends pieces ahead while the host empties those that have arrived.
void copy_to_host(void* host, const void* device, size_t bytes, Stream* stream) {
    const size_t ahead = stream->staging.size() * Staging::bytes, first = stream->next_staging;
    size_t sent = 0;
    for (size_t done = 0; done < bytes;) {
        while (sent < bytes && sent < done + ahead) {
            const size_t count = std::min(Staging::bytes, bytes - sent);
            Staging& staging = next_staging(stream);
            CUDA_CHECK(cudaMemcpyAsync(staging.memory, static_cast<const char*>(device) + sent, count,
                                       cudaMemcpyDeviceToHost, stream->stream));
            CUDA_CHECK(cudaEventRecord(staging.done, stream->stream));
            sent += count;
        }
        const size_t count = std::min(Staging::bytes, bytes - done);
        Staging& staging = stream->staging[(first + done / Staging::bytes) % stream->staging.size()];
        CUDA_CHECK(cudaEventSynchronize(staging.done));
        memcpy(static_cast<char*>(host) + done, staging.memory, count);
        done += count;
    }
}

struct Event {
    cudaEvent_t event = nullptr;
};

Event* event_create() {
    Event* event = new Event;
    CUDA_CHECK(cudaEventCreateWithFlags(&event->event, cudaEventDisableTiming));
    return event;
}

void event_destroy(Event* event) {
    if (event != nullptr) cudaEventDestroy(event->event);
    delete event;
}

void event_record(Event* event, Stream* stream) { CUDA_CHECK(cudaEventRecord(event->event, stream->stream)); }

void stream_wait(Stream* stream, Event* event) {
    CUDA_CHECK(cudaStreamWaitEvent(stream->stream, event->event, 0));
}

struct Replay {
    std::vector<uintptr_t> key;  // of the last call
    uint64_t scratch_moves = 0;  // after it
    cudaGraphExec_t exec = nullptr;

    Replay() = default;
    Replay(const Replay&) = delete;
    Replay& operator=(const Replay&) = delete;
    ~Replay() { forget(); }
    void forget() {
        if (exec != nullptr) cudaGraphExecDestroy(exec);
        exec = nullptr;
    }
};

Replay* replay_create() { return new Replay; }
void replay_destroy(Replay* replay) { delete replay; }

namespace {

struct DestroyGraph {
    void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
};
using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, DestroyGraph>;

// The stream can be used again whether `queue` fails or not.
cudaGraphExec_t record(const std::function<void()>& queue, Stream* stream) {
    CUDA_CHECK(cudaStreamBeginCapture(stream->stream, cudaStreamCaptureModeThreadLocal));
    cudaGraph_t captured = nullptr;
    try {
        queue();
    } catch (...) {
        cudaStreamEndCapture(stream->stream, &captured);
        const Graph graph(captured);
        throw;
    }
    CUDA_CHECK(cudaStreamEndCapture(stream->stream, &captured));
    const Graph graph(captured);
    cudaGraphExec_t exec = nullptr;
    CUDA_CHECK(cudaGraphInstantiate(&exec, graph.get(), 0));
    return exec;
}

}  // namespace

void replay(Replay* replay, const std::vector<uintptr_t>& key, const std::function<void()>& queue,
            Stream* stream) {
    if (replay->key != key || replay->scratch_moves != stream->scratch_moves) {
        replay->forget();
        queue();
        replay->key = key;
        replay->scratch_moves = stream->scratch_moves;
        return;
    }
    if (replay->exec == nullptr) replay->exec = record(queue, stream);
    CUDA_CHECK(cudaGraphLaunch(replay->exec, stream->stream));
}
