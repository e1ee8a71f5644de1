// Ranks: the meeting, host values through rank 0, and what goes to the data plane; see comm.h.
#include "dist/comm.h"

#include <unistd.h>

#include <cmath>
#include <memory>
#include <numeric>

#include "dist/control.h"
#include "dist/meeting.h"
#include "dist/sockets.h"
#include "dist/transport.h"
#include "kernels/error.h"

struct Comm {
    RankEnvironment environment;
    int rank = 0, ranks = 1;
    Meeting meeting;
    Control control;
    Transport* transport = nullptr;
    BytesSent sent;
    double seconds = 0;
};

namespace {

// Adds the time until its end to the communicator's.
struct Timer {
    Comm* comm;
    double start = monotonic_seconds();

    ~Timer() { comm->seconds += monotonic_seconds() - start; }
};

// Calls that all ranks make together must be the same on all.
enum class Call : uint32_t { sum, broadcast, gather };
constexpr const char* call_names[] = {"comm_sum", "comm_broadcast", "comm_gather"};

struct ValuesHead {
    Call call;
    uint32_t zero = 0;
    uint64_t bytes;
};

void count(Comm* comm, Traffic traffic, int peer, uint64_t bytes) {
    const std::vector<int>& nodes = comm->meeting.nodes;
    const bool within = nodes[static_cast<size_t>(peer)] == nodes[static_cast<size_t>(comm->rank)];
    (within ? comm->sent.within_node : comm->sent.between_nodes)[static_cast<size_t>(traffic)] += bytes;
}

void send_values(Comm* comm, int peer, Call call, const void* bytes, size_t n) {
    const int socket = comm->meeting.values[static_cast<size_t>(peer)];
    const ValuesHead head = {.call = call, .bytes = n};
    if (!send_all(socket, &head, sizeof(head)) || !send_all(socket, bytes, n)) comm_lost(comm, peer);
    count(comm, Traffic::values, peer, n);
}

// Receives the head of a message of this very call; returns the bytes that follow.
size_t receive_head(Comm* comm, int peer, Call call) {
    ValuesHead head;
    if (!receive_all(comm->meeting.values[static_cast<size_t>(peer)], &head, sizeof(head), INFINITY))
        comm_lost(comm, peer);
    if (head.call != call) {
        comm_abort(comm, std::string("ranks do not do the same: this one is in ") +
                             call_names[static_cast<size_t>(call)] + ", rank " + std::to_string(peer) +
                             " in " + call_names[static_cast<size_t>(head.call) % std::size(call_names)]);
    }
    return head.bytes;
}

void receive_values(Comm* comm, int peer, void* bytes, size_t n) {
    if (!receive_all(comm->meeting.values[static_cast<size_t>(peer)], bytes, n, INFINITY))
        comm_lost(comm, peer);
}

std::string receive_text(Comm* comm, int peer, Call call) {
    std::string text(receive_head(comm, peer, call), '\0');
    receive_values(comm, peer, text.data(), text.size());
    return text;
}

void receive_sums(Comm* comm, int peer, double* values, size_t n) {
    const size_t bytes = receive_head(comm, peer, Call::sum);
    if (bytes != n * sizeof(double)) {
        comm_abort(comm, "ranks do not do the same: this one sums " + std::to_string(n) + " values, rank " +
                             std::to_string(peer) + " " + std::to_string(bytes / sizeof(double)));
    }
    receive_values(comm, peer, values, bytes);
}

}  // namespace

uint64_t BytesSent::total() const {
    return std::accumulate(std::begin(within_node), std::end(within_node), uint64_t{0}) +
           std::accumulate(std::begin(between_nodes), std::end(between_nodes), uint64_t{0});
}

BytesSent BytesSent::operator-(const BytesSent& earlier) const {
    BytesSent difference;
    for (size_t kind = 0; kind < std::size(within_node); kind++) {
        difference.within_node[kind] = within_node[kind] - earlier.within_node[kind];
        difference.between_nodes[kind] = between_nodes[kind] - earlier.between_nodes[kind];
    }
    return difference;
}

Comm* comm_connect(const RankEnvironment& environment, double timeout_seconds,
                   void (*report)(const std::string& line)) {
    auto comm = std::make_unique<Comm>();
    comm->environment = environment;
    comm->rank = environment.rank;
    comm->ranks = environment.ranks;
    comm->control.report = report;
    if (comm->ranks == 1) {
        comm->meeting.nodes = {0};
        return comm.release();
    }
    comm->meeting = meet(environment, timeout_seconds, report);
    control_start(comm->control, environment, comm->meeting, timeout_seconds, report);
    return comm.release();
}

void comm_disconnect(Comm* comm) {
    if (comm->transport != nullptr) transport_close(comm->transport);
    if (comm->ranks > 1) control_finish(comm->control);
    for (const int socket : comm->meeting.values) {
        if (socket >= 0) close(socket);
    }
    delete comm;
}

void comm_set_timeout(Comm* comm, double seconds) { comm->control.timeout = seconds; }

const RankEnvironment& comm_environment(const Comm* comm) { return comm->environment; }
int comm_rank(const Comm* comm) { return comm->rank; }
int comm_ranks(const Comm* comm) { return comm->ranks; }
const std::vector<int>& comm_nodes(const Comm* comm) { return comm->meeting.nodes; }

void comm_abort(Comm* comm, const std::string& message) {
    if (comm->ranks > 1) control_fail(comm->control, message);
    comm->control.report(message);
    _exit(1);
}

void comm_sum(Comm* comm, double* values, size_t n) {
    const Timer timer{comm};
    if (comm->rank != 0) {
        send_values(comm, 0, Call::sum, values, n * sizeof(double));
        receive_sums(comm, 0, values, n);
        return;
    }
    std::vector<double> terms(n);
    for (int peer = 1; peer < comm->ranks; peer++) {
        receive_sums(comm, peer, terms.data(), n);
        for (size_t i = 0; i < n; i++) values[i] += terms[i];
    }
    for (int peer = 1; peer < comm->ranks; peer++)
        send_values(comm, peer, Call::sum, values, n * sizeof(double));
}

void comm_broadcast(Comm* comm, std::string& text) {
    const Timer timer{comm};
    if (comm->rank != 0) {
        text = receive_text(comm, 0, Call::broadcast);
        return;
    }
    for (int peer = 1; peer < comm->ranks; peer++)
        send_values(comm, peer, Call::broadcast, text.data(), text.size());
}

std::vector<std::string> comm_gather(Comm* comm, const std::string& text) {
    const Timer timer{comm};
    if (comm->rank != 0) {
        send_values(comm, 0, Call::gather, text.data(), text.size());
        return {};
    }
    std::vector<std::string> texts = {text};
    for (int peer = 1; peer < comm->ranks; peer++) texts.push_back(receive_text(comm, peer, Call::gather));
    return texts;
}

void comm_open_transport(Comm* comm, Stream* stream) {
    if (comm->ranks > 1) comm->transport = transport_open(comm, stream);
}

void comm_exchange(Comm* comm, Traffic traffic, const std::vector<Transfer>& sends,
                   const std::vector<Transfer>& receives, Stream* stream) {
    for (const std::vector<Transfer>* transfers : {&sends, &receives}) {
        for (const Transfer& transfer : *transfers) {
            if (transfer.peer < 0 || transfer.peer >= comm->ranks || transfer.peer == comm->rank)
                fail("comm_exchange: rank %d of %d has no peer %d", comm->rank, comm->ranks, transfer.peer);
        }
    }
    if (sends.empty() && receives.empty()) return;
    const Timer timer{comm};
    if (comm->transport == nullptr) fail("comm_exchange: comm_open_transport comes first");
    for (const Transfer& send : sends) count(comm, traffic, send.peer, send.bytes);
    transport_exchange(comm->transport, sends, receives, stream);
}

BytesSent comm_bytes_sent(const Comm* comm) { return comm->sent; }
double comm_seconds(const Comm* comm) { return comm->seconds; }

const std::string& comm_address(const Comm* comm, int rank) {
    return comm->meeting.addresses[static_cast<size_t>(rank)];
}

void comm_lost(Comm* comm, int peer) {
    control_await_news(comm->control, "the connection to rank " + std::to_string(peer) + " has broken");
}
