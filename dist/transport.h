// The data plane: messages between any two ranks, in device memory. One implementation is linked:
// transport_tcp.cpp for the CPU, transport_nccl.cpp for GPUs, transport_none.cpp where NCCL is not installed.
//
// A transport reports nothing by itself: a peer that is gone is comm_lost, a mistake is comm_abort.
#pragma once

#include <vector>

#include "dist/comm.h"

struct Transport;

// Connects all ranks with each other. All call it together, with two or more ranks; it may use the host
// values of comm.h to do so.
Transport* transport_open(Comm* comm, Stream* stream);
// Of a rank that has finished; messages of others to each other are not disturbed.
void transport_close(Transport* transport);

// See comm_exchange. Every peer is another rank. Transfers of no bytes are sent too.
void transport_exchange(Transport* transport, const std::vector<Transfer>& sends,
                        const std::vector<Transfer>& receives, Stream* stream);

// Where a transport can connect to a rank: a numeric address, or a name.
const std::string& comm_address(const Comm* comm, int rank);

// For a rank whose connection to `peer` has broken: the peer has died, most likely, and the news, with the
// reason, is on its way. Waits for it to end this process; where none comes, ends all ranks by itself.
[[noreturn]] void comm_lost(Comm* comm, int peer);
