// Memory and streams on the CPU; see kernels/device.h. Every op has finished when it returns.
#include "kernels/device.h"

#include <omp.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/stream.h"
#include "kernels/error.h"

namespace {

// Large blocks start on a 2 MiB page border, and the kernel is asked for huge pages: packing walks across
// rows that are pages apart, and each small page would be looked up.
constexpr size_t huge_page = size_t{2} << 20;

constexpr size_t megabyte = size_t{1} << 20;  // what a thread zeroes or copies at a time

void* allocate(size_t bytes) {
    if (bytes == 0) return nullptr;
    const size_t alignment = bytes >= huge_page ? huge_page : 256;
    void* memory = nullptr;
    if (bytes > SIZE_MAX - huge_page || posix_memalign(&memory, alignment, bytes) != 0) {
        fail("out of memory: %.1f MiB asked for; try a smaller --batch-size or model", bytes / 1048576.0);
    }
    if (bytes >= huge_page) madvise(memory, bytes / huge_page * huge_page, MADV_HUGEPAGE);
    return memory;
}

void count(Stream* stream, size_t bytes) {
    const size_t now = stream->allocated += bytes;
    size_t peak = stream->peak;
    while (peak < now && !stream->peak.compare_exchange_weak(peak, now)) {
    }
}

void grow(Stream* stream, Scratch& scratch, size_t bytes) {
    if (bytes <= scratch.bytes) return;
    free(scratch.memory);
    stream->allocated -= scratch.bytes;
    scratch = {};
    scratch.memory = allocate(bytes);
    scratch.bytes = bytes;
    count(stream, bytes);
}

// The cores this process may run on, so that a container's or taskset's limit is kept.
int available_cores() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
    return static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace

Stream* stream_create(const DeviceConfig& config) {
    if (config.threads < 0 || config.threads > 4096)
        fail("--threads %d: must be 0 (all cores) to 4096", config.threads);
    if (config.tf32) fail("--tf32: is for GPUs; this is the CPU's program");
    if (config.fused_epilogues) fail("--fused-epilogues: is for GPUs; this is the CPU's program");
    // OMP_NUM_THREADS is OpenMP's own way to say it. Processes that a launcher has bound to cores of their
    // own share nothing.
    const int cores = available_cores();
    const bool bound = cores < static_cast<int>(std::thread::hardware_concurrency());
    const int threads = config.threads > 0                     ? config.threads
                        : getenv("OMP_NUM_THREADS") != nullptr ? omp_get_max_threads()
                        : bound                                ? cores
                                                               : std::max(1, cores / config.sharers);
    Stream* stream = new Stream{};
    stream->threads = threads;
    stream->per_thread.resize(static_cast<size_t>(threads));
    return stream;
}

void stream_destroy(Stream* stream) {
    if (stream == nullptr) return;
    free(stream->shared.memory);
    for (Scratch& scratch : stream->per_thread) free(scratch.memory);
    delete stream;
}

void stream_synchronize(Stream*) {}

std::string device_name(const Stream* stream) {
#if defined(__AVX512F__)
    const char* vectors = "AVX-512";
#elif defined(__AVX2__) && defined(__FMA__)
    const char* vectors = "AVX2";
#elif defined(__ARM_NEON)
    const char* vectors = "NEON";
#else
    const char* vectors = "portable vectors";
#endif
    char text[64];
    snprintf(text, sizeof(text), "CPU, %d thread%s, %s", stream->threads, stream->threads == 1 ? "" : "s",
             vectors);
    return text;
}

bool device_has_fast_fp16(const Stream*) { return false; }

bool device_set_tf32(Stream*, bool on) {
    if (on) fail("--muon-ns-dtype tf32: is for GPUs; this is the CPU's program");
    return false;
}

int device_threads(const Stream* stream) { return stream->threads; }

size_t device_allocated_bytes(const Stream* stream) { return stream->allocated; }
size_t device_peak_bytes(const Stream* stream) { return stream->peak; }

size_t device_scratch_bytes(const Stream* stream) {
    size_t bytes = stream->shared.bytes;
    for (const Scratch& scratch : stream->per_thread) bytes += scratch.bytes;
    return bytes;
}

void* device_malloc(size_t bytes, Stream* stream) {
    void* memory = allocate(bytes);
    if (memory != nullptr) stream->allocations[memory] = bytes;
    count(stream, bytes);
    return memory;
}

void device_free(void* memory, Stream* stream) {
    if (memory == nullptr) return;
    const auto found = stream->allocations.find(memory);
    if (found == stream->allocations.end()) fail("device_free: not memory of this stream");
    stream->allocated -= found->second;
    stream->allocations.erase(found);
    free(memory);
}

void device_memset_zero(void* memory, size_t bytes, Stream* stream) {
    for_chunks(stream, bytes, megabyte,
               [&](size_t begin, size_t end) { memset(static_cast<char*>(memory) + begin, 0, end - begin); });
}
void copy_on_device(void* to, const void* from, size_t bytes, Stream* stream) {
    for_chunks(stream, bytes, megabyte, [&](size_t begin, size_t end) {
        memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, end - begin);
    });
}
void copy_to_device(void* device, const void* host, size_t bytes, Stream*) {
    if (bytes != 0) memcpy(device, host, bytes);
}
void copy_to_host(void* host, const void* device, size_t bytes, Stream*) {
    if (bytes != 0) memcpy(host, device, bytes);
}

struct Event {};
Event* event_create() { return new Event; }
void event_destroy(Event* event) { delete event; }
void event_record(Event*, Stream*) {}
void stream_wait(Stream*, Event*) {}

struct Replay {};
Replay* replay_create() { return new Replay; }
void replay_destroy(Replay* replay) { delete replay; }
void replay(Replay*, const std::vector<uintptr_t>&, const std::function<void()>& queue, Stream*) { queue(); }

void* shared_scratch(Stream* stream, size_t bytes) {
    grow(stream, stream->shared, bytes);
    return stream->shared.memory;
}

void* thread_scratch(Stream* stream, int thread, size_t bytes) {
    Scratch& scratch = stream->per_thread[static_cast<size_t>(thread)];
    grow(stream, scratch, bytes);
    return scratch.memory;
}
