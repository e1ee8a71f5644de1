// Signs of life and news of failure: a thread of every rank that keeps a connection to rank 0 (on rank 0: to
// all others), says now and then that this rank lives, listens whether the others do, and ends the process
// where one has failed. It does so whatever the main thread computes or waits for.
//
// Only rank 0 learns of failures at first hand, except its own end. So the first failure that it hears of is
// the one that is told, once, and to all; ranks that fail at the same time add nothing.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "dist/environment.h"
#include "dist/meeting.h"

// One connection of this thread.
struct Link {
    int rank = 0, socket = -1;
    std::string received;   // the beginning of a message
    std::string unsent;     // what the connection did not take yet
    double silent = 0;      // seconds since anything came
    bool finished = false;  // the rank has said that it has nothing more to do
    bool closed = false;
};

struct Control {
    int rank = 0;
    bool supervised = false;
    std::vector<std::string> names;  // of ranks, for people: "rank 3 (node042)"
    void (*report)(const std::string& line) = nullptr;
    std::atomic<double> timeout{60};
    std::vector<Link> links;  // the thread's own, as is what follows
    std::string lost;         // who is gone without a word; told after a grace, unless a reason comes first
    double lost_since = 0;
    std::thread thread;
    int wake = -1;  // an eventfd: the main thread wants something
    std::mutex mutex;
    std::string failure;  // why the main thread gives up
    std::atomic<bool> failing{false}, leaving{false};
};

// Starts the thread, on the connections of a meeting.
void control_start(Control& control, const RankEnvironment& environment, const Meeting& meeting,
                   double timeout_seconds, void (*report)(const std::string& line));

// Ends it, and returns when all ranks have called this: until then they may still fail together.
void control_finish(Control& control);

// Ends all ranks because of `why`, which rank 0 reports.
[[noreturn]] void control_fail(Control& control, const std::string& why);

// For a rank that has lost its connection to another one: the thread will know why in a moment and end the
// process. Where it knows of nothing, ends all ranks because of `why`.
[[noreturn]] void control_await_news(Control& control, const std::string& why);
