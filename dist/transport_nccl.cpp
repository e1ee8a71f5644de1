// The data plane between GPUs: NCCL's sends and receives, all of an exchange in one group, queued on the
// stream like an op. They move bytes and add nothing: the order of every sum is ours (data_parallel.h).
// NCCL's own meeting is through rank 0, whose id the others are told over the control plane.
#include <nccl.h>

#include <cstring>

#include "dist/transport.h"
#include "kernels/cuda/stream.h"
#include "kernels/error.h"

struct Transport {
    Comm* comm;
    ncclComm_t nccl = nullptr;
};

namespace {

void check(ncclResult_t result, const char* call) {
    if (result != ncclSuccess)
        fail("NCCL: %s: %s (NCCL_DEBUG=WARN tells more)", call, ncclGetErrorString(result));
}

// One number to and from everyone: NCCL takes the memory that connections need at their first use, and so
// takes it now.
void rehearse(Transport* transport, Stream* stream) {
    const int ranks = comm_ranks(transport->comm), rank = comm_rank(transport->comm);
    const size_t bytes = sizeof(float);
    char* memory = static_cast<char*>(device_malloc(2 * bytes * static_cast<size_t>(ranks), stream));
    device_memset_zero(memory, 2 * bytes * static_cast<size_t>(ranks), stream);
    std::vector<Transfer> sends, receives;
    for (int peer = 0; peer < ranks; peer++) {
        char* place = memory + 2 * bytes * static_cast<size_t>(peer);
        if (peer == rank) continue;
        sends.push_back({peer, place, bytes});
        receives.push_back({peer, place + bytes, bytes});
    }
    transport_exchange(transport, sends, receives, stream);
    stream_synchronize(stream);
    device_free(memory, stream);
}

}  // namespace

Transport* transport_open(Comm* comm, Stream* stream) {
    ncclUniqueId id = {};
    if (comm_rank(comm) == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    std::string text(reinterpret_cast<const char*>(&id), sizeof(id));
    comm_broadcast(comm, text);
    memcpy(&id, text.data(), sizeof(id));
    Transport* transport = new Transport{comm};
    check(ncclCommInitRank(&transport->nccl, comm_ranks(comm), id, comm_rank(comm)), "ncclCommInitRank");
    rehearse(transport, stream);
    return transport;
}

void transport_close(Transport* transport) {
    ncclCommDestroy(transport->nccl);
    delete transport;
}

void transport_exchange(Transport* transport, const std::vector<Transfer>& sends,
                        const std::vector<Transfer>& receives, Stream* stream) {
    const cudaStream_t queue = stream->stream;
    const auto require = [&](ncclResult_t result, const char* call) {
        // What NCCL says of a peer that has died is less than what the control plane knows in a moment.
        if (result == ncclRemoteError || result == ncclSystemError)
            comm_lost(transport->comm, (sends.empty() ? receives : sends)[0].peer);
        check(result, call);
    };
    require(ncclGroupStart(), "ncclGroupStart");
    for (const Transfer& t : sends)
        require(ncclSend(t.memory, t.bytes, ncclUint8, t.peer, transport->nccl, queue), "ncclSend");
    for (const Transfer& t : receives)
        require(ncclRecv(t.memory, t.bytes, ncclUint8, t.peer, transport->nccl, queue), "ncclRecv");
    require(ncclGroupEnd(), "ncclGroupEnd");
}
