// Streams: queues of operations, which run only when somebody waits, in the oddest order that CUDA allows.
//
// Every operation knows those it must come after: the one before it in its stream, the events its stream was
// told to wait for, and what the legacy default stream orders. Nothing else orders two operations, and when
// the host waits for one, the seed decides:
//   seed % 3 == 0   only what it depends on runs, so that everything else happens as late as can be;
//   seed % 3 == 1   operations run as soon as they are queued, if all before them have;
//   seed % 3 == 2   runnable operations of all streams run in random order until it has run.
// Copies between device and pinned host memory, and what a stand-in asks for (collectives), always run as
// late as can be. While a copy to pinned memory is on its way, its target is poisoned: reading it is a fault.
#include <sanitizer/asan_interface.h>

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>

#include "memory.h"

namespace {

struct Operation {
    const char* name;
    std::function<void()> work;
    bool lands_late;
    std::vector<std::shared_ptr<Operation>> after;  // empty once it has run
    bool done = false;
    bool needed = false;  // by what the host waits for
    std::chrono::steady_clock::time_point time;
};
using OperationRef = std::shared_ptr<Operation>;

}  // namespace

struct CUstream_st {
    bool blocking;  // ordered with the legacy default stream
    std::deque<OperationRef> queue;
    OperationRef last;
};

struct CUevent_st {
    OperationRef recorded;
    bool timing;
};

namespace cudasim {
namespace {

struct Queues {
    std::recursive_mutex mutex;
    CUstream_st legacy{true, {}, nullptr};  // cudaStream_t 0
    std::vector<CUstream_st*> streams{&legacy};
    Random random{0};
    uint64_t random_seed = ~uint64_t{0};
    bool operation_running = false;
};
Queues& queues() {
    static Queues& instance = *new Queues;  // never destroyed: other threads may still hold streams at exit
    return instance;
}

CUstream_st& stream_of(cudaStream_t stream) {
    Queues& q = queues();
    if (stream == nullptr) return q.legacy;
    for (CUstream_st* known : q.streams) {
        if (known == stream) return *stream;
    }
    fault("not a stream, or destroyed: %p", static_cast<void*>(stream));
}

bool runnable(const Operation& operation) {
    for (const OperationRef& before : operation.after) {
        if (!before->done) return false;
    }
    return true;
}

// Runs the first operation of the stream.
void run_first(CUstream_st& stream) {
    Queues& q = queues();
    const OperationRef operation = stream.queue.front();
    stream.queue.pop_front();
    q.operation_running = true;
    if (operation->work) operation->work();
    q.operation_running = false;
    operation->time = std::chrono::steady_clock::now();
    operation->done = true;
    operation->work = nullptr;
    operation->after.clear();
}

void mark_needed(const OperationRef& target, bool needed) {
    std::vector<Operation*> todo{target.get()};
    while (!todo.empty()) {
        Operation& operation = *todo.back();
        todo.pop_back();
        if (operation.needed == needed || operation.done) continue;
        operation.needed = needed;
        for (const OperationRef& before : operation.after) todo.push_back(before.get());
    }
}

enum class Mode { late, eager, random };
Mode mode() { return static_cast<Mode>(seed() % 3); }

// Runs one operation that may run now, if there is one. Only needed ones, if so asked.
bool run_one(bool only_needed) {
    Queues& q = queues();
    if (q.random_seed != seed()) q.random.state = q.random_seed = seed();
    std::vector<CUstream_st*> candidates;
    for (CUstream_st* stream : q.streams) {
        if (stream->queue.empty()) continue;
        const Operation& first = *stream->queue.front();
        if (first.needed || (!only_needed && !first.lands_late)) {
            if (runnable(first)) candidates.push_back(stream);
        }
    }
    if (candidates.empty()) return false;
    run_first(*candidates[q.random.below(candidates.size())]);
    return true;
}

void run_until(const OperationRef& target) {
    if (target == nullptr || target->done) return;
    if (running() != nullptr) fault("a CUDA call that waits, inside of a kernel");
    mark_needed(target, true);
    while (!target->done) {
        if (!run_one(mode() == Mode::late)) fault("a stream waits for itself");
    }
}

OperationRef push(cudaStream_t handle, const char* name, bool lands_late, std::function<void()> work,
                  const OperationRef& also_after = nullptr) {
    Queues& q = queues();
    CUstream_st& stream = stream_of(handle);
    auto operation = std::make_shared<Operation>();
    operation->name = name;
    operation->work = std::move(work);
    operation->lands_late = lands_late;
    const auto comes_after = [&](const OperationRef& before) {
        if (before != nullptr && !before->done) operation->after.push_back(before);
    };
    comes_after(stream.last);
    comes_after(also_after);
    if (&stream == &q.legacy) {
        for (const CUstream_st* other : q.streams) {
            if (other->blocking && other != &stream) comes_after(other->last);
        }
    } else if (stream.blocking) {
        comes_after(q.legacy.last);
    }
    stream.queue.push_back(operation);
    stream.last = operation;
    if (mode() == Mode::eager && !lands_late) {
        while (!stream.queue.empty() && runnable(*stream.queue.front()) &&
               !stream.queue.front()->lands_late) {
            run_first(stream);
        }
    }
    return operation;
}

std::unique_lock<std::recursive_mutex> lock() { return std::unique_lock(queues().mutex); }

// The whole 8-byte granules of a range: what can be poisoned.
template <typename Act>
void whole_granules(void* memory, size_t bytes, Act act) {
    const uintptr_t start = round_up(reinterpret_cast<uintptr_t>(memory), 8);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / 8 * 8;
    if (start < end) act(reinterpret_cast<void*>(start), end - start);
}

}  // namespace

bool operation_running() { return queues().operation_running; }

void enqueue(CUstream_st* stream, const char* name, bool lands_late, std::function<void()> work) {
    const auto guard = lock();
    push(stream, name, lands_late, std::move(work));
}

void run_everything() {
    const auto guard = lock();
    for (const CUstream_st* stream : std::vector<CUstream_st*>(queues().streams)) run_until(stream->last);
}

bool same_over_seeds(int seeds, const std::function<std::vector<char>()>& f) {
    const uint64_t before = seed();
    std::vector<char> first;
    bool same = true;
    for (int i = 0; i < seeds; ++i) {
        run_everything();
        set_seed(static_cast<uint64_t>(i));
        std::vector<char> result = f();
        if (i == 0)
            first = std::move(result);
        else
            same = same && result == first;
    }
    run_everything();
    set_seed(before);
    return same;
}

std::vector<char> bytes_of(const void* device, size_t bytes) {
    run_everything();
    std::vector<char> result(bytes);
    will_read(device, bytes, "bytes_of");
    if (bytes != 0) memcpy(result.data(), device, bytes);
    return result;
}

}  // namespace cudasim

using namespace cudasim;

// ---------------------------------------------------------------------------------------------------
// Copies

// "cudaMemcpyAsync API synchronization behavior" of the Runtime API: pageable host memory is read before the
// call returns, and written before it returns; pinned memory is read and written when the copy runs.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    const auto guard = lock();
    if (device_count() == 0) return cudaErrorNoDevice;
    if (bytes == 0) return cudaSuccess;
    const bool to_device = is_device_memory(to), from_device = is_device_memory(from);
    const bool says_to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool says_from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (says_to_device != to_device || says_from_device != from_device)) {
        fault("cudaMemcpy: from %s to %s memory, unlike its kind", from_device ? "device" : "host",
              to_device ? "device" : "host");
    }
    constexpr const char* name = "cudaMemcpy";
    if (to_device) check_range(to, bytes, name);
    if (from_device) check_range(from, bytes, name);
    if (to_device && from_device) {
        push(stream, name, false, [=] {
            will_write(to, bytes, name);
            copy_state(to, from, bytes);  // what was never written stays so
            memmove(to, from, bytes);
        });
    } else if (to_device && !is_pinned_memory(from)) {
        const char* start = static_cast<const char*>(from);
        push(stream, name, false, [=, staged = std::vector<char>(start, start + bytes)] {
            will_write(to, bytes, name);
            memcpy(to, staged.data(), bytes);
        });
    } else if (to_device) {
        push(stream, name, true, [=] {
            will_write(to, bytes, name);
            memcpy(to, from, bytes);
        });
    } else {
        const bool pinned = is_pinned_memory(to);
        if (pinned) whole_granules(to, bytes, __asan_poison_memory_region);
        const OperationRef copy = push(stream, name, true, [=] {
            if (pinned) whole_granules(to, bytes, __asan_unpoison_memory_region);
            if (from_device) will_read(from, bytes, name);
            memcpy(to, from, bytes);
        });
        if (!pinned) run_until(copy);
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    const auto guard = lock();
    const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    return error != cudaSuccess ? error : cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
    const auto guard = lock();
    if (device_count() == 0) return cudaErrorNoDevice;
    if (bytes == 0) return cudaSuccess;
    check_range(memory, bytes, "cudaMemset");
    push(stream, "cudaMemset", false, [=] {
        will_write(memory, bytes, "cudaMemset");
        memset(memory, value, bytes);
    });
    return cudaSuccess;
}

cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
    return cudaMemsetAsync(memory, value, bytes, nullptr);
}

// ---------------------------------------------------------------------------------------------------
// Streams

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    const auto guard = lock();
    *stream = nullptr;
    if (device_count() == 0) return cudaErrorNoDevice;
    *stream = queues().streams.emplace_back(new CUstream_st{flags != cudaStreamNonBlocking, {}, nullptr});
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const auto guard = lock();
    run_until(stream_of(stream).last);
    std::erase(queues().streams, stream);
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const auto guard = lock();
    CUstream_st& waited = stream_of(stream);
    run_until(waited.last);
    // The legacy stream's last operation may be older than work of the streams that it is ordered with.
    if (stream == nullptr) {
        for (const CUstream_st* other : std::vector<CUstream_st*>(queues().streams)) {
            if (other->blocking) run_until(other->last);
        }
    }
    return cudaSuccess;
}

// A program that polls must see its work done some day: each question runs an operation.
static cudaError_t query(const OperationRef& operation) {
    if (operation == nullptr || operation->done) return cudaSuccess;
    mark_needed(operation, true);
    run_one(mode() == Mode::late);
    return operation->done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    const auto guard = lock();
    return query(stream_of(stream).last);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    const auto guard = lock();
    push(stream, "cudaStreamWaitEvent", false, nullptr, event->recorded);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    const auto guard = lock();
    push(stream, "cudaLaunchHostFunc", true, [=] { function(data); });
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    if (device_count() == 0) return cudaErrorNoDevice;
    run_everything();
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------
// Events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    *event = nullptr;
    if (device_count() == 0) return cudaErrorNoDevice;
    *event = new CUevent_st{nullptr, (flags & cudaEventDisableTiming) == 0};
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    const auto guard = lock();
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const auto guard = lock();
    event->recorded = push(stream, "cudaEventRecord", false, nullptr);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    const auto guard = lock();
    run_until(event->recorded);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    const auto guard = lock();
    return query(event->recorded);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    const auto guard = lock();
    if (!start->timing || !end->timing || !start->recorded || !end->recorded)
        return cudaErrorInvalidResourceHandle;
    if (!start->recorded->done || !end->recorded->done) return cudaErrorNotReady;
    const auto elapsed = end->recorded->time - start->recorded->time;
    *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count();
    return cudaSuccess;
}
