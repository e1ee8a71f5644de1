// NCCL between host threads of one process.
//
// The n-th collective that each rank of a communicator calls is one and the same; a rank's n-th send to a
// peer meets the peer's n-th receive from it. Each is a Meeting of streams (cudasim.h): it happens as late as
// can be, and only when all streams have come to it. What ranks must agree on is compared as soon as two of
// them have called: where NCCL would hang or overwrite memory, there is a fault.
//
// Reductions take the ranks in order, and round to the type after each: NCCL's own order depends on its
// choice of algorithm, so nothing may depend on it.
#include "nccl.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <map>
#include <mutex>

#include "internal.h"
#include "kernels/dtype.h"

using namespace cudasim;

namespace {

enum class Kind { all_reduce, reduce_scatter, all_gather, broadcast, send, receive };
constexpr const char* kind_names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                      "ncclBroadcast", "ncclSend",          "ncclRecv"};

struct Type {
    const char* name;
    size_t bytes;
};
constexpr Type types[] = {{"int8", 1},   {"uint8", 1},   {"int32", 4},   {"uint32", 4},  {"int64", 8},
                          {"uint64", 8}, {"float16", 2}, {"float32", 4}, {"float64", 8}, {"bfloat16", 2}};
constexpr const char* op_names[] = {"sum", "product", "maximum", "minimum"};

struct Call {
    Kind kind;
    const void* send;
    void* receive;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int peer;  // or the root
    ncclComm_t comm;
    cudaStream_t stream;

    const char* name() const { return kind_names[static_cast<size_t>(kind)]; }
    size_t bytes() const { return count * types[type].bytes; }
};

// A collective, or a send and its receive, on its way: what each rank has called so far.
struct Exchange {
    std::shared_ptr<Meeting> meeting;
    std::vector<Call> calls;  // by part of the meeting
    size_t called = 0;
};

struct World {
    int ranks;
    std::vector<int> devices;  // of each rank; -1 until it has joined
    int joined = 0;
    bool aborted = false;  // by some rank
    std::map<size_t, std::shared_ptr<Exchange>>
        collectives;  // by number; those that some rank has yet to call
    std::map<std::pair<int, int>, std::deque<std::shared_ptr<Exchange>>> sends,
        receives;  // (from, to): half done
};

struct Worlds {
    std::mutex mutex;  // taken before that of the streams
    std::condition_variable joined;
    std::map<uint64_t, std::shared_ptr<World>> by_id;
    uint64_t ids = 0;
};
Worlds& worlds() {
    static Worlds instance;
    return instance;
}

// The calls of this host thread between ncclGroupStart and ncclGroupEnd.
struct Group {
    int depth = 0;
    std::vector<Call> calls;
};
thread_local Group group;

}  // namespace

struct ncclComm {
    std::shared_ptr<World> world;
    int rank;
    size_t collectives = 0;           // called so far
    std::vector<Attendance> pending;  // may not have taken place yet
};

namespace {

// ---------------------------------------------------------------------------------------------------
// What is exchanged

template <typename Element>
Element combine(Element a, Element b, ncclRedOp_t op) {
    switch (op) {
        case ncclSum:
            return static_cast<Element>(a + b);
        case ncclProd:
            return static_cast<Element>(a * b);
        case ncclMax:
            return b > a ? b : a;
        case ncclMin:
            return b < a ? b : a;
    }
    fault("no such reduction: %d", op);
}
bf16_t combine(bf16_t a, bf16_t b, ncclRedOp_t op) {
    return from_float<bf16_t>(combine(to_float(a), to_float(b), op));
}
fp16_t combine(fp16_t a, fp16_t b, ncclRedOp_t op) {
    return from_float<fp16_t>(combine(to_float(a), to_float(b), op));
}

template <typename Element>
void reduce_as(std::vector<char>& result, const std::vector<Call>& calls) {
    Element* sums = reinterpret_cast<Element*>(result.data());
    const size_t n = result.size() / sizeof(Element);
    memcpy(sums, calls[0].send, result.size());
    for (size_t rank = 1; rank < calls.size(); ++rank) {
        const Element* terms = static_cast<const Element*>(calls[rank].send);
        for (size_t i = 0; i < n; ++i) sums[i] = combine(sums[i], terms[i], calls[0].op);
    }
}

void reduce(std::vector<char>& result, const std::vector<Call>& calls) {
    switch (calls[0].type) {
        case ncclInt8:
            return reduce_as<int8_t>(result, calls);
        case ncclUint8:
            return reduce_as<uint8_t>(result, calls);
        case ncclInt32:
            return reduce_as<int32_t>(result, calls);
        case ncclUint32:
            return reduce_as<uint32_t>(result, calls);
        case ncclInt64:
            return reduce_as<int64_t>(result, calls);
        case ncclUint64:
            return reduce_as<uint64_t>(result, calls);
        case ncclFloat16:
            return reduce_as<fp16_t>(result, calls);
        case ncclFloat32:
            return reduce_as<float>(result, calls);
        case ncclFloat64:
            return reduce_as<double>(result, calls);
        case ncclBfloat16:
            return reduce_as<bf16_t>(result, calls);
    }
}

// Bytes that a rank reads and writes.
size_t read_bytes(const Call& call, size_t ranks) {
    if (call.kind == Kind::receive || (call.kind == Kind::broadcast && call.comm->rank != call.peer))
        return 0;
    return call.bytes() * (call.kind == Kind::reduce_scatter ? ranks : 1);
}
size_t written_bytes(const Call& call, size_t ranks) {
    if (call.kind == Kind::send) return 0;
    return call.bytes() * (call.kind == Kind::all_gather ? ranks : 1);
}

// Everything is read before anything is written: send and receive may be the same memory.
void carry_out(const std::vector<Call>& calls) {
    const Kind kind = calls[0].kind;
    const size_t bytes = calls[0].bytes(), ranks = calls.size();
    std::vector<char> result;
    const auto append = [&](const Call& call) {
        const char* from = static_cast<const char*>(call.send);
        result.insert(result.end(), from, from + bytes);
    };
    if (kind == Kind::all_reduce || kind == Kind::reduce_scatter) {
        result.resize(read_bytes(calls[0], ranks));
        reduce(result, calls);
    } else if (kind == Kind::all_gather) {
        for (const Call& call : calls) append(call);
    } else {
        append(calls[kind == Kind::broadcast ? static_cast<size_t>(calls[0].peer) : 0]);
    }
    for (size_t rank = 0; rank < ranks; ++rank) {
        const size_t first = kind == Kind::reduce_scatter ? rank * bytes : 0;
        const size_t size = written_bytes(calls[rank], ranks);
        if (size != 0) memcpy(calls[rank].receive, result.data() + first, size);
    }
}

// ---------------------------------------------------------------------------------------------------
// Who meets whom

std::string describe(const Call& call) {
    const bool reduces = call.kind == Kind::all_reduce || call.kind == Kind::reduce_scatter;
    const std::string what =
        std::string(call.name()) + " of " + std::to_string(call.count) + " " + types[call.type].name;
    if (reduces) return what + ", " + op_names[call.op];
    if (call.kind == Kind::broadcast) return what + " from rank " + std::to_string(call.peer);
    return what;
}

std::shared_ptr<Exchange> new_exchange(const char* name, const std::vector<std::string>& who) {
    auto result = std::make_shared<Exchange>();
    result->meeting = std::make_shared<Meeting>();
    result->meeting->name = name;
    for (const std::string& part : who) result->meeting->parts.push_back({part});
    result->calls.resize(who.size());
    return result;
}

std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

// Enters a call as a part of the exchange. True if it was the last one missing.
bool add_call(Exchange& exchange, size_t part, const Call& call) {
    exchange.calls[part] = call;
    Meeting::Part& own = exchange.meeting->parts[part];
    own.reads = call.send, own.read_bytes = read_bytes(call, exchange.calls.size());
    own.writes = call.receive, own.written_bytes = written_bytes(call, exchange.calls.size());
    if (++exchange.called == exchange.calls.size()) {
        exchange.meeting->act = [calls = exchange.calls] { carry_out(calls); };
    }
    std::erase_if(call.comm->pending, [](const Attendance& a) { return a.meeting->took_place.load(); });
    call.comm->pending.push_back({exchange.meeting, part});
    return exchange.called == exchange.calls.size();
}

[[noreturn]] void disagree(const Call& a, const Call& b) {
    fault("ranks disagree: rank %d calls %s, rank %d %s", a.comm->rank, describe(a).c_str(), b.comm->rank,
          describe(b).c_str());
}

void join_collective(const Call& call) {
    World& world = *call.comm->world;
    const size_t number = call.comm->collectives++, rank = static_cast<size_t>(call.comm->rank);
    std::shared_ptr<Exchange>& shared = world.collectives[number];
    if (shared == nullptr) {
        std::vector<std::string> who;
        for (int i = 0; i < world.ranks; ++i) who.push_back(rank_name(i));
        shared = new_exchange(call.name(), who);
    }
    for (const Call& other : shared->calls) {
        if (other.comm == nullptr) continue;  // not called yet
        const bool alike = other.kind == call.kind && other.count == call.count && other.type == call.type &&
                           other.op == call.op && other.peer == call.peer;
        if (!alike) disagree(call, other);
    }
    if (add_call(*shared, rank, call)) world.collectives.erase(number);
}

void join_transfer(const Call& call) {
    World& world = *call.comm->world;
    const bool sends = call.kind == Kind::send;
    const int from = sends ? call.comm->rank : call.peer, to = sends ? call.peer : call.comm->rank;
    auto& mine = (sends ? world.sends : world.receives)[{from, to}];
    auto& others = (sends ? world.receives : world.sends)[{from, to}];
    if (others.empty()) {
        const std::vector<std::string> who{rank_name(from) + " (ncclSend)", rank_name(to) + " (ncclRecv)"};
        mine.push_back(new_exchange("ncclSend/ncclRecv", who));
        add_call(*mine.back(), sends ? 0 : 1, call);
        return;
    }
    Exchange& shared = *others.front();
    const Call& other = shared.calls[sends ? 1 : 0];
    if (other.count != call.count || other.type != call.type) disagree(call, other);
    add_call(shared, sends ? 0 : 1, call);
    others.pop_front();
}

// Queues what the group has called: one operation for each communicator.
void queue_group() {
    const std::vector<Call> calls = std::exchange(group.calls, {});
    const std::lock_guard lock(worlds().mutex);
    for (size_t i = 0; i < calls.size(); ++i) {
        ncclComm& comm = *calls[i].comm;
        const auto is_first = [&](const Call& call) { return call.comm == &comm; };
        if (std::find_if(calls.begin(), calls.end(), is_first) != calls.begin() + static_cast<ptrdiff_t>(i)) {
            continue;  // queued with an earlier call
        }
        std::vector<Attendance> attendances;
        for (const Call& call : calls) {
            if (call.comm != &comm) continue;
            if (call.stream != calls[i].stream)
                fault("%s: a group on two streams is not simulated", call.name());
            const bool transfer = call.kind == Kind::send || call.kind == Kind::receive;
            (transfer ? join_transfer : join_collective)(call);
            attendances.push_back(comm.pending.back());
        }
        enqueue_meetings(calls[i].stream, attendances.size() == 1 ? calls[i].name() : "a group of NCCL calls",
                         attendances);
    }
}

// NCCL says only "invalid argument"; here a line says which.
ncclResult_t refuse(ncclResult_t result, const char* name, const char* what, int value) {
    fprintf(stderr, "cudasim: %s: %s %d\n", name, what, value);
    return result;
}

// Send and receive may be the same memory, in the way that NCCL calls in place, but may not overlap
// otherwise.
bool overlaps_wrongly(const Call& call) {
    const char *send = static_cast<const char*>(call.send), *receive = static_cast<const char*>(call.receive);
    const size_t ranks = static_cast<size_t>(call.comm->world->ranks);
    const size_t own = static_cast<size_t>(call.comm->rank) * call.bytes();
    if (send == nullptr || receive == nullptr) return false;
    if (call.kind == Kind::broadcast && call.comm->rank != call.peer) return false;  // does not send
    const bool scatters = call.kind == Kind::reduce_scatter, gathers = call.kind == Kind::all_gather;
    if (receive + (gathers ? own : 0) == send + (scatters ? own : 0)) return false;
    return send < receive + call.bytes() * (gathers ? ranks : 1) &&
           receive < send + call.bytes() * (scatters ? ranks : 1);
}

ncclResult_t add_to_group(const Call& call) {
    if (call.comm == nullptr) return ncclInvalidArgument;
    const int ranks = call.comm->world->ranks;
    if (call.type < ncclInt8 || call.type > ncclBfloat16)
        return refuse(ncclInvalidArgument, call.name(), "no such type:", call.type);
    if (call.op < ncclSum || call.op > ncclMin)
        return refuse(ncclInvalidArgument, call.name(), "no such reduction:", call.op);
    if (call.peer < 0 || call.peer >= ranks)
        return refuse(ncclInvalidArgument, call.name(), "no such rank:", call.peer);
    if (overlaps_wrongly(call)) fault("%s: send and receive memory overlap", call.name());
    {
        const std::lock_guard lock(worlds().mutex);
        if (call.comm->world->aborted) return ncclRemoteError;
    }
    group.calls.push_back(call);
    if (group.depth == 0) queue_group();
    return ncclSuccess;
}

}  // namespace

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return add_to_group({Kind::all_reduce, send, receive, count, type, op, 0, comm, stream});
}
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t receive_count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return add_to_group({Kind::reduce_scatter, send, receive, receive_count, type, op, 0, comm, stream});
}
ncclResult_t ncclAllGather(const void* send, void* receive, size_t send_count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    return add_to_group({Kind::all_gather, send, receive, send_count, type, ncclSum, 0, comm, stream});
}
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return add_to_group({Kind::broadcast, send, receive, count, type, ncclSum, root, comm, stream});
}
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return add_to_group({Kind::send, send, nullptr, count, type, ncclSum, peer, comm, stream});
}
ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return add_to_group({Kind::receive, nullptr, receive, count, type, ncclSum, peer, comm, stream});
}

ncclResult_t ncclGroupStart() {
    ++group.depth;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
    if (group.depth == 0) return ncclInvalidUsage;
    if (--group.depth == 0) queue_group();
    return ncclSuccess;
}

// ---------------------------------------------------------------------------------------------------
// Communicators

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    const std::lock_guard lock(worlds().mutex);
    const uint64_t number = ++worlds().ids;
    *id = {};
    memcpy(id->internal, &number, sizeof(number));
    return ncclSuccess;
}

// Waits for all ranks.
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
    constexpr const char* name = "ncclCommInitRank";
    *comm = nullptr;
    if (device_count() == 0) return ncclUnhandledCudaError;
    if (group.depth != 0) fault("%s within a group is not simulated", name);
    if (ranks < 1) return refuse(ncclInvalidArgument, name, "ranks:", ranks);
    if (rank < 0 || rank >= ranks) return refuse(ncclInvalidArgument, name, "no such rank:", rank);
    Worlds& w = worlds();
    std::unique_lock lock(w.mutex);
    uint64_t number;
    memcpy(&number, id.internal, sizeof(number));
    if (number == 0 || number > w.ids) {
        fprintf(stderr, "cudasim: %s: an id that ncclGetUniqueId did not give\n", name);
        return ncclInvalidArgument;
    }
    std::shared_ptr<World>& entry = w.by_id[number];
    if (entry == nullptr) {
        entry = std::make_shared<World>();
        entry->ranks = ranks;
        entry->devices.assign(static_cast<size_t>(ranks), -1);
    }
    const std::shared_ptr<World> world = entry;
    if (world->ranks != ranks) fault("ranks disagree: %s for %d ranks and for %d", name, ranks, world->ranks);
    for (int other = 0; other < ranks; ++other) {
        const int device = world->devices[static_cast<size_t>(other)];
        if (device != -1 && other == rank) fault("%s: rank %d has called it before", name, rank);
        if (device == current_device()) fault("%s: ranks %d and %d on device %d", name, other, rank, device);
    }
    world->devices[static_cast<size_t>(rank)] = current_device();
    ++world->joined;
    w.joined.notify_all();
    const auto all_there = [&] { return world->joined == ranks; };
    if (!w.joined.wait_for(lock, std::chrono::duration<double>(timeout()), all_there)) {
        const auto missing = std::find(world->devices.begin(), world->devices.end(), -1);
        fault("%s waits for ever: rank %d has not called it", name,
              static_cast<int>(missing - world->devices.begin()));
    }
    w.by_id.erase(number);
    *comm = new ncclComm{world, rank, 0, {}};
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (comm == nullptr) return ncclSuccess;
    for (const Attendance& a : comm->pending) {
        if (!a.meeting->took_place) {
            fault("ncclCommDestroy: %s is still on its way: wait for its stream first", a.meeting->name);
        }
    }
    delete comm;
    return ncclSuccess;
}

// What is on its way ends without effect for this rank; the others learn of it from ncclCommGetAsyncError.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (comm == nullptr) return ncclSuccess;
    {
        const std::lock_guard lock(worlds().mutex);
        comm->world->aborted = true;
        for (const Attendance& a : comm->pending) {
            if (!a.meeting->took_place) leave(a);
        }
    }
    delete comm;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    if (comm == nullptr) return ncclInvalidArgument;
    const std::lock_guard lock(worlds().mutex);
    *error = comm->world->aborted ? ncclRemoteError : ncclSuccess;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess:
            return "no error";
        case ncclUnhandledCudaError:
            return "unhandled cuda error";
        case ncclSystemError:
            return "unhandled system error";
        case ncclInternalError:
            return "internal error";
        case ncclInvalidArgument:
            return "invalid argument";
        case ncclInvalidUsage:
            return "invalid usage";
        case ncclRemoteError:
            return "remote process exited or there was a network error";
        case ncclInProgress:
            return "NCCL operation in progress";
    }
    return "unknown result code";
}
