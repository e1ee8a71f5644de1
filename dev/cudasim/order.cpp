// Which operations of streams are ordered, and which only happened to run one after the other.
//
// Two operations are ordered if one must wait for the other: in one stream, by an event, by the legacy
// default stream, or because the host waited for the first before it queued the second. This is kept as
// vector clocks (Fidge 1988, Mattern 1989): an operation's clock says of each stream how many of its
// operations come before. So a race between streams is found in whichever order they happened to run.
//
// What host threads tell each other is not seen: a wait by one counts for all of them.
#include <algorithm>
#include <deque>

#include "memory.h"

namespace cudasim {

void merge(Clock& into, const Clock& from) {
    if (into.size() < from.size()) into.resize(from.size());
    for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

namespace {

// Of each stream, what ran; the oldest first. What comes before everything yet to run is forgotten.
std::vector<std::deque<Ran>> history;

// Of the operation that runs now: what ran before it but is not ordered with it, the oldest first.
std::vector<Ran> unordered;
size_t current_stream = 0;
uint32_t next_run = 1;

uint32_t of(const Clock& clock, size_t stream) { return stream < clock.size() ? clock[stream] : 0; }

}  // namespace

void begin_operation(const char* name, size_t stream, const Clock& clock) {
    if (history.size() <= stream) history.resize(stream + 1);
    unordered.clear();
    for (size_t other = 0; other < history.size(); ++other) {
        const std::deque<Ran>& ran = history[other];
        for (size_t i = ran.size(); i > 0 && ran[i - 1].index > of(clock, other); --i) {
            unordered.push_back(ran[i - 1]);
        }
    }
    std::ranges::sort(unordered, {}, &Ran::first_run);
    history[stream].push_back({next_run, next_run, clock[stream], name, nullptr});
    current_stream = stream;
    take_runs(1, nullptr);
}

uint32_t take_runs(uint32_t count, const void* kernel) {
    Ran& now = history[current_stream].back();
    if (next_run + count > max_runs) {
        forget_touches();
        unordered.clear();
        const Ran kept = now;
        for (std::deque<Ran>& ran : history) ran.clear();
        history[current_stream].push_back(kept);
        next_run = history[current_stream].back().first_run = 1;
        return take_runs(count, kernel);
    }
    now.kernel = kernel;
    now.end_run = next_run + count;
    return std::exchange(next_run, now.end_run);
}

uint32_t current_run() { return history[current_stream].back().first_run; }

void forget_before(const Clock& clock) {
    for (size_t stream = 0; stream < history.size(); ++stream) {
        std::deque<Ran>& ran = history[stream];
        while (!ran.empty() && ran.front().index <= of(clock, stream)) ran.pop_front();
    }
}

const std::vector<Ran>& unordered_operations() { return unordered; }

const Ran* find_unordered(uint32_t run) {
    const auto after = std::ranges::upper_bound(unordered, run, {}, &Ran::first_run);
    if (after == unordered.begin() || run >= std::prev(after)->end_run) return nullptr;
    return &*std::prev(after);
}

}  // namespace cudasim
