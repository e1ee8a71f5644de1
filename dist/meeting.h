// How ranks find each other at the start. Rank 0 listens; every other rank opens two connections to it, one a
// channel, and introduces itself on each. When all are there, rank 0 welcomes them with what each needs to
// know of the others. Where they do not fit together, rank 0 says so and ends all of them. Who does not speak
// our language (a port scanner, a browser) is put off and holds nobody up.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dist/environment.h"

// What a connection is for. `data` ones are between any two ranks (transport_tcp.cpp).
enum class Channel : int32_t { values, signals, data };

// The first message on every connection.
struct Hello {
    char magic[8] = {'m', 'u', 'G', 'P', 'T', 'r', '0', '1'};  // with the version of what is said here
    Channel channel;
    int32_t rank, ranks;
    int32_t node;        // as in RankEnvironment
    uint64_t run;        // the same number in one run, another in others
    char host[64] = {};  // the machine's name
};

// A connection whose Hello has not come whole.
struct Newcomer {
    int socket;
    double deadline;
    size_t received = 0;
    Hello hello = {};
};

// Where connections come in.
struct Door {
    int listener;
    std::vector<Newcomer> newcomers = {};
};

// Accepts connections and reads who they are from, any number at once, until the deadline or until `arrived`
// has returned true, which it returns. `arrived` is told of each whose first message is a Hello, and owns the
// socket from then on. Those that have not said it yet wait in the door for the next call.
bool accept_hellos(Door& door, double deadline, const std::function<bool(const Hello&, int)>& arrived);
// Closes the listener and the connections of those that wait.
void close_door(Door& door);

struct Meeting {
    // By rank; -1 where there is none. Rank 0 is connected to all, each other rank to rank 0.
    std::vector<int> values, signals;
    std::vector<int> nodes;              // of each rank: 0, 1, ... in the order in which ranks name them
    std::vector<std::string> hosts;      // of each rank: its machine's name
    std::vector<std::string> addresses;  // of each rank: where it can be connected to from here
};

// Meets the other ranks. Fails where this rank finds no rank 0 within the timeout, or cannot listen. Where
// ranks have met and do not fit together, or not all are there in time, `report` is called with the line
// (on rank 0) and the processes of all of them end with status 1.
Meeting meet(const RankEnvironment& environment, double timeout_seconds,
             void (*report)(const std::string& line));
