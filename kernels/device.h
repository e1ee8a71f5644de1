// Memory and execution order, the same for every backend.
//
// A Stream is a queue of work: ops given the same stream run one after the other. On the CPU a stream is a
// set of threads with their scratch memory, and every op has finished when its call returns; on a GPU it is
// a CUDA stream. Each op of kernels.h takes the stream it runs on as its last argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

struct Stream;  // defined by the backend

struct DeviceConfig {
    int index = 0;    // which GPU; ignored on the CPU
    int threads = 0;  // CPU threads of this stream; 0 = this process's share of the cores it may use
    int sharers = 1;  // processes like this one on the machine
    // Of a GPU: fp32 products may round their inputs to TF32; bias and GELU within cuBLASLt's products, where
    // the sizes allow it, instead of by kernels of ours.
    bool tf32 = false, fused_epilogues = false;
};

// Opens a stream on the device. Fails if there is no such device or thread count, and where a CPU is asked
// for what only GPUs have.
Stream* stream_create(const DeviceConfig& config);
void stream_destroy(Stream* stream);

// Waits until everything queued on the stream has finished.
void stream_synchronize(Stream* stream);

// One line for people: "CPU, 2 threads, AVX-512" or the GPU's name.
std::string device_name(const Stream* stream);

// Whether 16-bit products are many times as fast as fp32 ones here: on a GPU, not on a CPU.
bool device_has_fast_fp16(const Stream* stream);

// Whether fp32 products from now on round their inputs to TF32, as DeviceConfig::tf32 says at first. Returns
// what held before. A CPU has no TF32, and fails where it is switched on.
bool device_set_tf32(Stream* stream, bool on);

// CPU threads of the stream; 1 on a GPU.
int device_threads(const Stream* stream);

// Bytes allocated on the device now, the ops' own scratch included, and the most there ever were.
size_t device_allocated_bytes(const Stream* stream);
size_t device_peak_bytes(const Stream* stream);
// The ops' scratch alone: what the largest op so far needed. It never shrinks.
size_t device_scratch_bytes(const Stream* stream);

// Memory of the device, aligned to 256 bytes at least; contents are unspecified. Fails with the size
// asked for if it is not there. A size of 0 gives a null pointer.
void* device_malloc(size_t bytes, Stream* stream);
void device_free(void* memory, Stream* stream);

// Ordered with the stream's ops. Host memory may be reused when the call returns.
void device_memset_zero(void* memory, size_t bytes, Stream* stream);
void copy_on_device(void* to, const void* from, size_t bytes, Stream* stream);  // device to device
void copy_to_device(void* device, const void* host, size_t bytes, Stream* stream);
// Returns when the data has arrived.
void copy_to_host(void* host, const void* device, size_t bytes, Stream* stream);

// A point in a stream's queue, for other streams of the same device to wait for. On the CPU, where every op
// has finished when it returns, there is nothing to wait for.
struct Event;
Event* event_create();
void event_destroy(Event* event);
// The point after everything queued on the stream so far.
void event_record(Event* event, Stream* stream);
// What is queued on the stream from now on waits for the point that was recorded last.
void stream_wait(Stream* stream, Event* event);

// Ops that are queued again and again, as those of an optimizer's step. A GPU records them as a CUDA graph,
// which one call launches: a step of many small kernels waits no longer for the host to start each.
struct Replay;
Replay* replay_create();
void replay_destroy(Replay* replay);

// Queues on the stream what `queue` queues there. On a GPU the first call with a key runs `queue`, whose ops
// may take scratch memory then; the second records it, and those that follow launch the record without
// calling it. So `queue` must do nothing else, may neither wait nor allocate nor copy from or to the host,
// and all that its ops get by value, pointers and numbers, must be the same for the same key. What changes,
// they read from memory.
void replay(Replay* replay, const std::vector<uintptr_t>& key, const std::function<void()>& queue,
            Stream* stream);
