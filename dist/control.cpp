// Signs of life and news of failure; see control.h.
//
// A message is its kind, the length of its text and the text. Nothing here waits for a connection to take or
// bring data, so that a rank that is stopped cannot stop the others' thread.
#include "dist/control.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>

#include "dist/sockets.h"
#include "kernels/error.h"

namespace {

constexpr double interval_seconds = 1;       // between signs of life, or a quarter of a shorter timeout
constexpr double grace_seconds = 0.3;        // for a reason, once a rank is gone without one
constexpr double later_grace_seconds = 1.5;  // where another rank is to report it: launchers kill all at once
constexpr double tell_seconds = 1;           // in which the others hear that the run has failed
constexpr double answer_seconds = 3;         // for rank 0 to report this rank's failure
constexpr unsigned report_seconds = 5;       // for stderr to take the line

enum class Kind : uint8_t { alive, finished, failure };

constexpr size_t head_bytes = 5;

std::string message(Kind kind, const std::string& text = "") {
    const uint32_t length = static_cast<uint32_t>(text.size());
    std::string bytes(head_bytes, static_cast<char>(kind));
    memcpy(&bytes[1], &length, sizeof(length));
    return bytes + text;
}

void flush(Link& link) {
    while (!link.unsent.empty() && !link.closed) {
        const ssize_t n =
            send(link.socket, link.unsent.data(), link.unsent.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return;  // full, or gone, which reading tells
        link.unsent.erase(0, static_cast<size_t>(n));
    }
}

void send_to_all(Control& control, const std::string& bytes) {
    for (Link& link : control.links) {
        link.unsent += bytes;
        flush(link);
    }
}

// Reads what has come; false where the connection has ended.
bool read_available(Link& link) {
    char buffer[4096];
    for (;;) {
        const ssize_t n = recv(link.socket, buffer, sizeof(buffer), MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
        if (n <= 0) return false;
        link.silent = 0;
        link.received.append(buffer, static_cast<size_t>(n));
    }
}

// Takes the first whole message off what has come.
bool next_message(Link& link, Kind& kind, std::string& text) {
    uint32_t length = 0;
    if (link.received.size() < head_bytes) return false;
    memcpy(&length, &link.received[1], sizeof(length));
    if (link.received.size() < head_bytes + length) return false;
    kind = static_cast<Kind>(link.received[0]);
    text = link.received.substr(head_bytes, length);
    link.received.erase(0, head_bytes + length);
    return true;
}

// Waits until something comes or the time is over; counts silence in this thread's own time, at most an
// interval a turn: a run that was stopped as a whole and goes on has lost nobody.
void wait_for_links(Control& control, double interval) {
    std::vector<pollfd> wait = {{control.wake, POLLIN, 0}};
    for (const Link& link : control.links) {
        const short events = static_cast<short>(POLLIN | (link.unsent.empty() ? 0 : POLLOUT));
        if (!link.closed) wait.push_back({link.socket, events, 0});
    }
    const double before = monotonic_seconds();
    poll_until(wait, before + interval);
    const double waited = std::min(monotonic_seconds() - before, interval);
    for (Link& link : control.links) link.silent += waited;
    uint64_t ignored;
    if (wait[0].revents != 0) [[maybe_unused]]
        const ssize_t n = read(control.wake, &ignored, sizeof(ignored));
}

// Prints the line, or ends the process where that takes too long: the others must still hear of the failure.
void report(const Control& control, const std::string& line) {
    alarm(report_seconds);
    control.report(line);
    alarm(0);
}

// Rank 0: tells the user, then all ranks, and ends when they have heard it.
[[noreturn]] void end_all(Control& control, const std::string& line) {
    report(control, line);
    send_to_all(control, message(Kind::failure));
    const double deadline = monotonic_seconds() + tell_seconds;
    while (monotonic_seconds() < deadline) {
        bool all_closed = true;
        for (Link& link : control.links) {
            flush(link);
            if (!link.closed && !read_available(link)) link.closed = true;
            all_closed = all_closed && link.closed;
        }
        if (all_closed) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    _exit(1);
}

std::string why_rank_failed(const Control& control, int rank, const std::string& why) {
    return rank == 0 ? why : control.names[static_cast<size_t>(rank)] + ": " + why;
}

void lose(Control& control, const Link& link, const std::string& how) {
    if (!control.lost.empty()) return;
    control.lost = control.names[static_cast<size_t>(link.rank)] + " " + how;
    control.lost_since = monotonic_seconds();
}

// What one connection has brought.
void read_link(Control& control, Link& link) {
    if (link.closed) return;
    const bool open = read_available(link);
    Kind kind;
    for (std::string text; next_message(link, kind, text);) {
        if (kind == Kind::finished) link.finished = true;
        if (kind != Kind::failure) continue;
        if (control.rank != 0) _exit(1);  // rank 0 has told the user
        end_all(control, why_rank_failed(control, link.rank, text));
    }
    if (open) return;
    link.closed = true;
    if (!link.finished) lose(control, link, "is gone: it was killed, or ended without a word");
}

void judge_silence(Control& control) {
    const double timeout = control.timeout;
    for (const Link& link : control.links) {
        if (link.closed || link.finished || link.silent < timeout) continue;
        char how[96];
        snprintf(how, sizeof(how), "has given no sign of life for %g s (--timeout)", timeout);
        lose(control, link, how);
    }
}

// A rank is gone without a word: ends this one, after a moment in which a better reason may come.
void end_if_lost(Control& control) {
    if (control.lost.empty()) return;
    const double since = monotonic_seconds() - control.lost_since;
    if (control.rank == 0) {
        if (since >= grace_seconds) end_all(control, control.lost);
    } else if (control.rank == 1) {
        if (since < grace_seconds) return;
        if (!control.supervised) report(control, control.lost);
        _exit(1);
    } else if (since >= later_grace_seconds) {
        _exit(1);
    }
}

// The main thread gives up: rank 0 tells all, others tell rank 0, whose answer ends them.
void end_if_failing(Control& control, bool& told, double& told_at) {
    if (!control.failing) return;
    const std::lock_guard lock(control.mutex);
    if (control.rank == 0) end_all(control, control.failure);
    if (!told) {
        send_to_all(control, message(Kind::failure, control.failure));
        told = true;
        told_at = monotonic_seconds();
    } else if (monotonic_seconds() - told_at > answer_seconds) {
        report(control, why_rank_failed(control, control.rank, control.failure));
        _exit(1);
    }
}

// Rank 0 is the last to say that it has finished, when all others have. Returns whether this rank may end.
bool finish(Control& control, bool& said) {
    if (!control.leaving) return false;
    const bool others = std::all_of(control.links.begin(), control.links.end(),
                                    [](const Link& link) { return link.finished; });
    if (!said && (control.rank != 0 || others)) {
        send_to_all(control, message(Kind::finished));
        said = true;
    }
    return said && others && std::all_of(control.links.begin(), control.links.end(), [](const Link& link) {
               return link.closed || link.unsent.empty();
           });
}

void run_control(Control& control) {
    bool told = false, said_finished = false;
    double told_at = 0, said_alive = 0;
    for (;;) {
        const double interval = std::min(interval_seconds, control.timeout / 4);
        const bool pending = !control.lost.empty() || told;
        wait_for_links(control, pending ? grace_seconds / 4 : interval);
        for (Link& link : control.links) flush(link);
        for (Link& link : control.links) read_link(control, link);
        if (finish(control, said_finished)) return;
        if (monotonic_seconds() - said_alive >= interval * 0.9) {
            for (Link& link : control.links) {
                if (link.unsent.empty()) link.unsent = message(Kind::alive);
                flush(link);
            }
            said_alive = monotonic_seconds();
        }
        judge_silence(control);
        end_if_failing(control, told, told_at);
        end_if_lost(control);
    }
}

void wake(Control& control) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(control.wake, &one, sizeof(one));
}

// The process ends from the other thread.
[[noreturn]] void wait_for_the_end() {
    for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
}

}  // namespace

void control_start(Control& control, const RankEnvironment& environment, const Meeting& meeting,
                   double timeout_seconds, void (*report)(const std::string& line)) {
    control.rank = environment.rank;
    control.supervised = environment.supervised;
    control.report = report;
    control.timeout = timeout_seconds;
    const int nodes = *std::max_element(meeting.nodes.begin(), meeting.nodes.end()) + 1;
    for (size_t rank = 0; rank < meeting.nodes.size(); rank++) {
        const std::string name = "rank " + std::to_string(rank);
        control.names.push_back(nodes > 1 ? name + " (" + meeting.hosts[rank] + ")" : name);
        if (meeting.signals[rank] < 0) continue;
        Link& link = control.links.emplace_back();
        link.rank = static_cast<int>(rank), link.socket = meeting.signals[rank];
    }
    control.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (control.wake < 0) fail("cannot open an eventfd: %s", strerror(errno));
    // Signals are for the main thread.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    control.thread = std::thread(run_control, std::ref(control));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void control_finish(Control& control) {
    control.leaving = true;
    wake(control);
    control.thread.join();
    for (const Link& link : control.links) close(link.socket);
    close(control.wake);
}

void control_fail(Control& control, const std::string& why) {
    {
        const std::lock_guard lock(control.mutex);
        if (!control.failing) control.failure = why;
        control.failing = true;
    }
    wake(control);
    wait_for_the_end();
}

void control_await_news(Control& control, const std::string& why) {
    // The thread takes a silent rank for dead after the timeout and acts within seconds.
    std::this_thread::sleep_for(std::chrono::duration<double>(control.timeout + answer_seconds));
    control_fail(control, why);
}
