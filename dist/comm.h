// What the ranks of a data-parallel run say to each other. A rank is a process with its own device; rank 0
// leads. There are two planes:
//
//   control  TCP connections of every rank to rank 0: the meeting at the start (meeting.h), small host
//            values, signs of life, and the news that a rank has failed, which ends them all (control.h)
//   data     gradients and weights between any two ranks, in device memory: NCCL on GPUs, TCP on the CPU
//            (transport.h, one implementation linked)
//
// A rank that fails, dies or stops answering ends every rank with status 1, whatever it was waiting for, and
// one line on stderr says which and why. With one rank nothing is connected and every call here is trivial.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "dist/environment.h"
#include "kernels/device.h"

struct Comm;

// What is sent, for the byte counters.
enum class Traffic { gradients, weights, values };

// Bytes that this rank has sent, by what they were and whether the receiver is on its node. Control values
// count with their payload; heartbeats and the meeting do not.
struct BytesSent {
    uint64_t within_node[3] = {}, between_nodes[3] = {};  // by Traffic

    uint64_t total() const;
    BytesSent operator-(const BytesSent& earlier) const;
};

// One message: `bytes` of device memory to or from another rank.
struct Transfer {
    int peer;
    void* memory;
    size_t bytes;
};

// Meets the other ranks: returns when all of them are connected. A rank that is not heard of, or says
// nothing, for `timeout_seconds` is taken for dead. Fails on an address that cannot be reached or a port that
// is in use, naming both. Where ranks have met and disagree on their number, two claim the same rank, or some
// do not come, the processes of all of them end as by comm_abort.
//
// `report` prints the line of a run that has failed, at most once and before any process ends because of it;
// another thread may call it. The line is of the user's error or an internal one, as Error's what().
Comm* comm_connect(const RankEnvironment& environment, double timeout_seconds,
                   void (*report)(const std::string& line));

// Ends the connections of a rank that has finished. Returns when all have called it; one that fails until
// then still ends them all.
void comm_disconnect(Comm* comm);

// From here on a rank that gives no sign of life for so long is dead. A long step is not: heartbeats come
// from a thread of their own.
void comm_set_timeout(Comm* comm, double seconds);

const RankEnvironment& comm_environment(const Comm* comm);
int comm_rank(const Comm* comm);
int comm_ranks(const Comm* comm);
// The node of each rank, 0, 1, ...: ranks with equal numbers share a machine.
const std::vector<int>& comm_nodes(const Comm* comm);

// Tells every rank why this one ends, and ends them all: rank 0 reports "rank 3: message" (without "rank 0: "
// for rank 0's own). Where rank 0 is gone, rank 1 reports that, unless the launcher does. Does not return.
[[noreturn]] void comm_abort(Comm* comm, const std::string& message);

// Host values. Every rank must call the same function in the same order.
//
// values[i] <- the sum of all ranks' values[i], added in the order of the ranks: the same bits everywhere.
// One rank's value and zeros elsewhere arrive unchanged, NaN and infinity included (-0 as 0).
void comm_sum(Comm* comm, double* values, size_t n);
// text <- rank 0's.
void comm_broadcast(Comm* comm, std::string& text);
// On rank 0: the text of every rank, by rank. Elsewhere: empty.
std::vector<std::string> comm_gather(Comm* comm, const std::string& text);

// Opens the data plane for device memory of this stream's device. Every rank must call it.
void comm_open_transport(Comm* comm, Stream* stream);

// Sends and receives together, as one operation on the stream: messages between two ranks meet in the order
// in which each lists them, and must have equal sizes. No transfer names the rank itself. On the CPU all have
// arrived on return; on a GPU they are ordered with the stream's ops.
void comm_exchange(Comm* comm, Traffic traffic, const std::vector<Transfer>& sends,
                   const std::vector<Transfer>& receives, Stream* stream);

BytesSent comm_bytes_sent(const Comm* comm);
// Seconds that this rank's main thread has spent in host values and exchanges, waiting for others included.
// On a GPU an exchange is only queued in them.
double comm_seconds(const Comm* comm);
