// The CPU's data plane: a TCP connection between every two ranks. An exchange is one loop that moves whatever
// any connection takes or brings, in both directions at once, so that no order of sizes can block it. Each
// message has a head of 8 bytes: its size, which must be what the receiver expects.
#include "dist/transport.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <random>
#include <sstream>

#include "dist/meeting.h"
#include "dist/sockets.h"
#include "kernels/error.h"

struct Transport {
    Comm* comm;
    std::vector<int> sockets;  // by rank; -1 for this one
};

namespace {

constexpr double connect_seconds = 60;  // between ranks that are up already
constexpr size_t head_bytes = sizeof(uint64_t);

// Ranks of one machine need nothing but its loopback.
std::string reachable(const std::string& address) { return is_loopback(address) ? "127.0.0.1" : address; }

int open_listener(const Comm* comm) {
    bool one_machine = true;
    for (int rank = 0; rank < comm_ranks(comm); rank++)
        one_machine = one_machine && (rank == comm_rank(comm) || is_loopback(comm_address(comm, rank)));
    return listen_at(one_machine ? "127.0.0.1" : "", 0);
}

// The port of every rank's listener, and a number that only this run knows: first in a text, from rank 0.
std::string exchange_ports(Comm* comm, int port) {
    std::string text;
    std::random_device random;
    const uint64_t run = uint64_t{random()} << 32 | random();
    for (const std::string& one : comm_gather(comm, std::to_string(port))) text += one + " ";
    text = std::to_string(run) + " " + text;
    comm_broadcast(comm, text);
    return text;
}

// The messages to or from one rank, and how far they have got.
struct Flow {
    int peer = 0, socket = -1;
    bool sending = false;
    std::vector<const Transfer*> transfers;
    size_t current = 0;
    size_t moved = 0;   // bytes of the current one, its head included
    uint64_t head = 0;  // of the current one

    bool complete() const { return current == transfers.size(); }
};

// Moves what the socket takes or has brought of the current message. 0 where it would have to wait, -1 where
// the peer is gone.
ssize_t move_some(Flow& flow) {
    const Transfer& transfer = *flow.transfers[flow.current];
    if (flow.sending) flow.head = transfer.bytes;
    iovec parts[2] = {{&flow.head, head_bytes}, {transfer.memory, transfer.bytes}};
    const size_t in_head = std::min(flow.moved, head_bytes);
    parts[0].iov_base = reinterpret_cast<char*>(&flow.head) + in_head;
    parts[0].iov_len -= in_head;
    const size_t in_body = flow.moved - in_head;
    parts[1].iov_base = static_cast<char*>(transfer.memory) + in_body;
    parts[1].iov_len -= in_body;
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const ssize_t n = flow.sending ? sendmsg(flow.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL)
                                   : recvmsg(flow.socket, &message, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
    return n > 0 ? n : -1;
}

void check_size(Comm* comm, const Flow& flow) {
    const size_t expected = flow.transfers[flow.current]->bytes;
    if (flow.sending || flow.moved < head_bytes || flow.head == expected) return;
    comm_abort(comm, "rank " + std::to_string(flow.peer) + " sends " + std::to_string(flow.head) +
                         " bytes where " + std::to_string(expected) + " are expected");
}

// Moves what can be moved without waiting.
void advance(Comm* comm, Flow& flow) {
    while (!flow.complete()) {
        const ssize_t n = move_some(flow);
        if (n < 0) comm_lost(comm, flow.peer);
        if (n == 0) return;
        flow.moved += static_cast<size_t>(n);
        check_size(comm, flow);
        if (flow.moved < head_bytes + flow.transfers[flow.current]->bytes) return;
        flow.current++;
        flow.moved = 0;
    }
}

// One flow a peer that has any of the transfers.
void add_flows(const Transport* transport, const std::vector<Transfer>& transfers, bool sending,
               std::vector<Flow>& flows) {
    const size_t first = flows.size();
    for (const Transfer& transfer : transfers) {
        size_t i = first;
        while (i < flows.size() && flows[i].peer != transfer.peer) i++;
        if (i == flows.size()) {
            Flow& flow = flows.emplace_back();
            flow.peer = transfer.peer;
            flow.socket = transport->sockets[static_cast<size_t>(transfer.peer)];
            flow.sending = sending;
        }
        flows[i].transfers.push_back(&transfer);
    }
}

}  // namespace

Transport* transport_open(Comm* comm, Stream*) {
    Door door = {open_listener(comm)};
    std::istringstream ports(exchange_ports(comm, listening_port(door.listener)));
    Hello hello;
    hello.channel = Channel::data, hello.rank = comm_rank(comm), hello.ranks = comm_ranks(comm);
    ports >> hello.run;
    Transport* transport = new Transport{comm, std::vector<int>(static_cast<size_t>(hello.ranks), -1)};
    // Each connects to those before it, and is connected to by those after it.
    for (int rank = 0, port = 0; rank < hello.rank; rank++) {
        ports >> port;
        const int socket =
            connect_to(reachable(comm_address(comm, rank)), port, monotonic_seconds() + connect_seconds);
        if (!send_all(socket, &hello, sizeof(hello))) comm_lost(comm, rank);
        transport->sockets[static_cast<size_t>(rank)] = socket;
    }
    int missing = hello.ranks - hello.rank - 1;
    const auto arrived = [&](const Hello& other, int socket) {
        if (other.run != hello.run || other.channel != Channel::data || other.rank <= hello.rank ||
            other.rank >= hello.ranks) {
            close(socket);
            return false;
        }
        transport->sockets[static_cast<size_t>(other.rank)] = socket;
        return --missing == 0;
    };
    // One that dies before it is here ends this process by itself.
    if (missing > 0) accept_hellos(door, INFINITY, arrived);
    close_door(door);
    return transport;
}

void transport_close(Transport* transport) {
    for (const int socket : transport->sockets) {
        if (socket >= 0) close(socket);
    }
    delete transport;
}

void transport_exchange(Transport* transport, const std::vector<Transfer>& sends,
                        const std::vector<Transfer>& receives, Stream*) {
    std::vector<Flow> flows;
    add_flows(transport, sends, true, flows);
    add_flows(transport, receives, false, flows);
    for (Flow& flow : flows) advance(transport->comm, flow);
    for (;;) {
        std::vector<pollfd> wait;
        std::vector<Flow*> waiting;
        for (Flow& flow : flows) {
            if (flow.complete()) continue;
            wait.push_back({flow.socket, static_cast<short>(flow.sending ? POLLOUT : POLLIN), 0});
            waiting.push_back(&flow);
        }
        if (wait.empty()) return;
        poll_until(wait, INFINITY);
        for (size_t i = 0; i < wait.size(); i++) {
            if (wait[i].revents != 0) advance(transport->comm, *waiting[i]);
        }
    }
}
