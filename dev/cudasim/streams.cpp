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

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "memory.h"

namespace cudasim {

struct Operation {
    const char* name;
    std::function<void()> work;
    bool lands_late;
    std::vector<Attendance> meetings;               // those that have yet to take place
    std::vector<std::shared_ptr<Operation>> after;  // empty once it has run
    bool done = false;
    bool needed = false;  // by what a host thread waits for
    size_t stream = 0;    // its number
    Clock clock = {};     // what comes before it, and itself
    std::chrono::steady_clock::time_point time;
};
using OperationRef = std::shared_ptr<Operation>;

// What a graph queues again at each of its launches.
struct GraphNode {
    const char* name;
    std::function<void()> work;
};

}  // namespace cudasim

using cudasim::OperationRef;

struct CUgraph_st {
    int device;
    std::vector<cudasim::GraphNode> nodes;
};
struct CUgraphExec_st : CUgraph_st {};

struct CUstream_st {
    size_t number;
    int device;
    bool blocking;  // ordered with the legacy default stream
    uint32_t pushed = 0;
    std::deque<OperationRef> queue = {};
    OperationRef last = nullptr;
    std::unique_ptr<CUgraph_st> capture = nullptr;  // what it was given since the capture began
};

struct CUevent_st {
    OperationRef recorded;
    bool timing;
};

namespace cudasim {
namespace {

struct Queues {
    std::mutex mutex;                 // held while an operation runs, too
    std::condition_variable changed;  // something was queued, or has run
    uint64_t changes = 0;
    std::vector<CUstream_st*> legacy;  // cudaStream_t 0 of each device
    std::vector<CUstream_st*> streams;
    size_t streams_made = 0, pushed = 0;
    Clock host_clock;  // what the host has waited for
    Random random{0};
    uint64_t random_seed = ~uint64_t{0};
};
Queues& queues() {
    static Queues& instance = *new Queues;  // never destroyed: other threads may still hold streams at exit
    return instance;
}

using Lock = std::unique_lock<std::mutex>;
Lock lock() { return Lock(queues().mutex); }

thread_local bool runs_operation = false;
thread_local CUstream_st* captured_stream = nullptr;  // of this host thread

CUstream_st* make_stream(int device, bool blocking) {
    Queues& q = queues();
    return q.streams.emplace_back(new CUstream_st{q.streams_made++, device, blocking});
}

CUstream_st& legacy_stream(int device) {
    Queues& q = queues();
    while (q.legacy.size() <= static_cast<size_t>(device)) {
        q.legacy.push_back(make_stream(static_cast<int>(q.legacy.size()), true));
    }
    return *q.legacy[static_cast<size_t>(device)];
}

CUstream_st& stream_of(cudaStream_t stream) {
    if (stream == nullptr) return legacy_stream(current_device());
    for (CUstream_st* known : queues().streams) {
        if (known == stream) return *stream;
    }
    fault("not a stream, or destroyed: %p", static_cast<void*>(stream));
}

void note_change() {
    ++queues().changes;
    queues().changed.notify_all();
}

bool runnable(const Operation& operation) {
    for (const OperationRef& before : operation.after) {
        if (!before->done) return false;
    }
    return true;
}

// All are there.
bool complete(const Meeting& meeting) {
    if (meeting.abandoned) return false;
    for (const Meeting::Part& part : meeting.parts) {
        if (part.operation == nullptr || part.stream->queue.front() != part.operation) return false;
        if (!runnable(*part.operation)) return false;
    }
    return true;
}

bool can_proceed(const Operation& operation) {
    if (!runnable(operation)) return false;
    return operation.meetings.empty() ||
           std::ranges::any_of(operation.meetings, [](const Attendance& a) { return complete(*a.meeting); });
}

void take_place(Meeting& meeting) {
    for (const Meeting::Part& part : meeting.parts) {
        begin_operation(meeting.name, part.operation->stream, part.operation->clock);
        will_read(part.reads, part.read_bytes, meeting.name);
        will_write(part.writes, part.written_bytes, meeting.name);
    }
    meeting.act();
    meeting.took_place = true;
    for (Meeting::Part& part : meeting.parts) {
        std::erase_if(part.operation->meetings,
                      [&](const Attendance& a) { return a.meeting.get() == &meeting; });
    }
}

// Goes on with the first operation of the stream, which can: to its end, unless meetings are left.
void run_first(CUstream_st& stream) {
    const OperationRef operation = stream.queue.front();
    runs_operation = true;
    for (const Attendance& a : std::vector<Attendance>(operation->meetings)) {
        if (complete(*a.meeting)) take_place(*a.meeting);
    }
    if (operation->meetings.empty()) {
        stream.queue.pop_front();
        if (operation->work) {
            begin_operation(operation->name, operation->stream, operation->clock);
            operation->work();
        }
        operation->time = std::chrono::steady_clock::now();
        operation->done = true;
        operation->work = nullptr;
        operation->after.clear();
    }
    runs_operation = false;
    note_change();
}

void mark_needed(const OperationRef& target) {
    std::vector<Operation*> todo{target.get()};
    while (!todo.empty()) {
        Operation& operation = *todo.back();
        todo.pop_back();
        if (operation.needed || operation.done) continue;
        operation.needed = true;
        for (const OperationRef& before : operation.after) todo.push_back(before.get());
        for (const Attendance& a : operation.meetings) {
            for (const Meeting::Part& other : a.meeting->parts) {
                if (other.operation != nullptr) todo.push_back(other.operation.get());
            }
        }
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
        if ((first.needed || (!only_needed && !first.lands_late)) && can_proceed(first)) {
            candidates.push_back(stream);
        }
    }
    if (candidates.empty()) return false;
    run_first(*candidates[q.random.below(candidates.size())]);
    return true;
}

[[noreturn]] void report_missing(const Meeting& meeting) {
    for (const Meeting::Part& part : meeting.parts) {
        const char* what = meeting.abandoned           ? "somebody has left it"
                           : part.operation == nullptr ? "has not called it"
                                                       : "has called it, but its stream does not come to it";
        if (part.operation == nullptr || part.stream->queue.front() != part.operation) {
            fault("%s waits for ever: %s %s", meeting.name, part.who.c_str(), what);
        }
    }
    fault("%s waits for ever", meeting.name);
}

// Nothing can run, unless other host threads bring what is missing.
void wait_for_host_threads(Lock& lock) {
    Queues& q = queues();
    const Meeting* missed = nullptr;
    for (const CUstream_st* stream : q.streams) {
        if (stream->queue.empty()) continue;
        const Operation& first = *stream->queue.front();
        if (first.needed && !first.meetings.empty() && runnable(first))
            missed = first.meetings[0].meeting.get();
    }
    if (missed == nullptr) fault("a stream waits for itself");
    const uint64_t before = q.changes;
    const bool changed = q.changed.wait_for(lock, std::chrono::duration<double>(timeout()),
                                            [&] { return q.changes != before; });
    if (!changed) report_missing(*missed);
}

void run_until(Lock& lock, const OperationRef& target) {
    if (target == nullptr) return;
    if (running() != nullptr) fault("a CUDA call that waits, inside of a kernel");
    mark_needed(target);
    while (!target->done) {
        if (!run_one(mode() == Mode::late)) wait_for_host_threads(lock);
    }
    merge(queues().host_clock, target->clock);
}

// What comes before all that is queued now and later need not be remembered.
void forget_old_operations() {
    const Queues& q = queues();
    Clock before_all = q.host_clock;
    for (const CUstream_st* stream : q.streams) {
        for (const OperationRef& operation : stream->queue) {
            for (size_t i = 0; i < before_all.size(); ++i) {
                before_all[i] =
                    std::min(before_all[i], i < operation->clock.size() ? operation->clock[i] : 0);
            }
        }
    }
    forget_before(before_all);
}

OperationRef push(cudaStream_t handle, const char* name, bool lands_late, std::function<void()> work,
                  const OperationRef& also_after = nullptr) {
    CUstream_st& stream = stream_of(handle);
    if (stream.capture != nullptr) {
        // Of what runs late or has no work, copies of host memory, collectives and events, none is simulated.
        if (lands_late || work == nullptr) fault("%s in the capture of a stream", name);
        stream.capture->nodes.push_back({name, std::move(work)});
        return nullptr;
    }
    auto operation = std::make_shared<Operation>();
    operation->name = name;
    operation->work = std::move(work);
    operation->lands_late = lands_late;
    Queues& q = queues();
    if (++q.pushed % 1024 == 0) forget_old_operations();
    operation->stream = stream.number;
    operation->clock = q.host_clock;
    const auto comes_after = [&](const OperationRef& before) {
        if (before == nullptr) return;
        merge(operation->clock, before->clock);
        if (!before->done) operation->after.push_back(before);
    };
    comes_after(stream.last);
    comes_after(also_after);
    const CUstream_st& legacy = legacy_stream(stream.device);
    if (&stream == &legacy) {
        for (const CUstream_st* other : q.streams) {
            if (other->blocking && other->device == stream.device) comes_after(other->last);
        }
    } else if (stream.blocking) {
        comes_after(legacy.last);
    }
    if (operation->clock.size() <= stream.number) operation->clock.resize(stream.number + 1);
    operation->clock[stream.number] = ++stream.pushed;
    stream.queue.push_back(operation);
    stream.last = operation;
    if (mode() == Mode::eager && !lands_late) {
        while (!stream.queue.empty() && runnable(*stream.queue.front()) &&
               !stream.queue.front()->lands_late) {
            run_first(stream);
        }
    }
    note_change();
    return operation;
}

// The whole 8-byte granules of a range: what can be poisoned.
template <typename Act>
void whole_granules(void* memory, size_t bytes, Act act) {
    const uintptr_t start = round_up(reinterpret_cast<uintptr_t>(memory), 8);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / 8 * 8;
    if (start < end) act(reinterpret_cast<void*>(start), end - start);
}

}  // namespace

bool operation_running() { return runs_operation; }

void demand_no_capture(const char* call) {
    if (captured_stream != nullptr) fault("%s while this thread captures a stream", call);
}

// CUDA refuses, with cudaErrorInvalidResourceHandle: a thread has not called cudaSetDevice.
static void demand_current_device(CUstream_st* stream, const char* name) {
    const int device = stream_of(stream).device;
    if (device == current_device()) return;
    fault("%s on a stream of device %d while device %d is current", name, device, current_device());
}

void enqueue(CUstream_st* stream, const char* name, bool lands_late, std::function<void()> work) {
    const Lock guard = lock();
    demand_current_device(stream, name);
    push(stream, name, lands_late, std::move(work));
}

void enqueue_meetings(CUstream_st* stream, const char* name, const std::vector<Attendance>& attendances) {
    const Lock guard = lock();
    demand_current_device(stream, name);
    const OperationRef operation = push(stream, name, true, nullptr);
    operation->meetings = attendances;
    bool awaited = false;
    for (const auto& [meeting, part] : attendances) {
        meeting->parts[part].stream = &stream_of(stream);
        meeting->parts[part].operation = operation;
        for (const Meeting::Part& other : meeting->parts) {
            awaited = awaited || (other.operation != nullptr && other.operation->needed);
        }
    }
    if (awaited) mark_needed(operation);
}

void leave(const Attendance& attendance) {
    const Lock guard = lock();
    attendance.meeting->abandoned = true;
    std::erase_if(attendance.meeting->parts[attendance.part].operation->meetings,
                  [&](const Attendance& a) { return a.meeting == attendance.meeting; });
    note_change();
}

void run_everything() {
    Lock guard = lock();
    std::vector<OperationRef> last;
    for (const CUstream_st* stream : queues().streams) {
        if (stream->device == current_device()) last.push_back(stream->last);
    }
    for (const OperationRef& operation : last) run_until(guard, operation);
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
static cudaError_t copy(Lock& lock, void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                        cudaStream_t stream) {
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
            record_access(from, bytes, false);
            will_write(to, bytes, name);
            copy_state(to, from, bytes);  // what was never written stays so
            memmove(to, from, bytes);
        });
    } else if (to_device && !is_pinned_memory(from)) {
        demand_no_capture(name);
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
        demand_no_capture(name);
        const bool pinned = is_pinned_memory(to);
        if (pinned) whole_granules(to, bytes, __asan_poison_memory_region);
        const OperationRef arrival = push(stream, name, true, [=] {
            if (pinned) whole_granules(to, bytes, __asan_unpoison_memory_region);
            if (from_device) will_read(from, bytes, name);
            memcpy(to, from, bytes);
        });
        if (!pinned) run_until(lock, arrival);
    }
    return cudaSuccess;
}

// Waits for one stream.
static void synchronize(Lock& lock, cudaStream_t stream) {
    const CUstream_st& waited = stream_of(stream);
    std::vector<OperationRef> last{waited.last};
    // The legacy stream's last operation may be older than work of the streams that it is ordered with.
    for (const CUstream_st* other : queues().streams) {
        if (stream == nullptr && other->blocking && other->device == waited.device)
            last.push_back(other->last);
    }
    for (const OperationRef& operation : last) run_until(lock, operation);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    Lock guard = lock();
    return copy(guard, to, from, bytes, kind, stream);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    demand_no_capture("cudaMemcpy");
    Lock guard = lock();
    const cudaError_t error = copy(guard, to, from, bytes, kind, nullptr);
    if (error == cudaSuccess) synchronize(guard, nullptr);
    return error;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
    const Lock guard = lock();
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
    const Lock guard = lock();
    *stream = nullptr;
    if (device_count() == 0) return cudaErrorNoDevice;
    *stream = make_stream(current_device(), flags != cudaStreamNonBlocking);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    demand_no_capture("cudaStreamDestroy");
    Lock guard = lock();
    run_until(guard, stream_of(stream).last);
    std::erase(queues().streams, stream);
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    demand_no_capture("cudaStreamSynchronize");
    Lock guard = lock();
    synchronize(guard, stream);
    return cudaSuccess;
}

// A program that polls must see its work done some day: each question runs an operation.
static cudaError_t query(const OperationRef& operation) {
    if (operation == nullptr) return cudaSuccess;
    if (!operation->done) {
        mark_needed(operation);
        run_one(mode() == Mode::late);
    }
    if (!operation->done) return cudaErrorNotReady;
    merge(queues().host_clock, operation->clock);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    demand_no_capture("cudaStreamQuery");
    const Lock guard = lock();
    return query(stream_of(stream).last);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    const Lock guard = lock();
    push(stream, "cudaStreamWaitEvent", false, nullptr, event->recorded);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    const Lock guard = lock();
    push(stream, "cudaLaunchHostFunc", true, [=] { function(data); });
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    demand_no_capture("cudaDeviceSynchronize");
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
    const Lock guard = lock();
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const Lock guard = lock();
    event->recorded = push(stream, "cudaEventRecord", false, nullptr);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    demand_no_capture("cudaEventSynchronize");
    Lock guard = lock();
    run_until(guard, event->recorded);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    demand_no_capture("cudaEventQuery");
    const Lock guard = lock();
    return query(event->recorded);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    const Lock guard = lock();
    if (!start->timing || !end->timing || !start->recorded || !end->recorded)
        return cudaErrorInvalidResourceHandle;
    if (!start->recorded->done || !end->recorded->done) return cudaErrorNotReady;
    const auto elapsed = end->recorded->time - start->recorded->time;
    *milliseconds = std::chrono::duration<float, std::milli>(elapsed).count();
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------
// Graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    demand_no_capture("cudaStreamBeginCapture");
    const Lock guard = lock();
    if (stream == nullptr) return cudaErrorStreamCaptureUnsupported;  // the legacy default stream
    CUstream_st& captured = stream_of(stream);
    if (captured.capture != nullptr) fault("cudaStreamBeginCapture: another thread captures this stream");
    captured.capture.reset(new CUgraph_st{captured.device, {}});
    captured_stream = &captured;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    const Lock guard = lock();
    *graph = nullptr;
    if (captured_stream == nullptr || captured_stream != stream)
        fault("cudaStreamEndCapture: this thread does not capture this stream");
    *graph = captured_stream->capture.release();
    captured_stream = nullptr;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    *exec = new CUgraphExec_st{*graph};
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    const Lock guard = lock();
    demand_current_device(stream, "cudaGraphLaunch");
    if (stream_of(stream).device != exec->device) fault("cudaGraphLaunch on another device");
    if (stream_of(stream).capture != nullptr) fault("cudaGraphLaunch in the capture of a stream");
    for (const GraphNode& node : exec->nodes) push(stream, node.name, false, node.work);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}

// Launches of it that are queued go on.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete exec;
    return cudaSuccess;
}
