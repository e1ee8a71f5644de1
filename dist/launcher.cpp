// Ranks as processes of this machine; see launcher.h.
//
// They are in process groups of their own, so that a terminal's Ctrl-C reaches this process alone, which
// passes it on: a rank that got it twice would take it for impatience and end without saving.
#include "dist/launcher.h"

#include <errno.h>  // program_invocation_name
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "dist/sockets.h"
#include "kernels/error.h"

namespace {

constexpr double grace_seconds = 5;  // to end, once another rank has failed
constexpr int stop_signals[] = {SIGINT, SIGTERM, SIGHUP};

struct Child {
    pid_t pid;
    bool ended = false;
    bool killed_by_us = false;
    int status = 0;  // as of waitpid

    bool failed() const { return ended && status != 0; }
};

struct Launch {
    std::vector<Child> children;  // by rank
    int first_failure = -1;       // the rank that failed first
    double kill_at = INFINITY;
    bool stopping = false;  // a stop signal was passed on
};

// torchrun's variables and our own two.
void set_environment(int rank, int ranks, int listener) {
    const auto set = [](const char* name, int value) { setenv(name, std::to_string(value).c_str(), 1); };
    set("RANK", rank);
    set("WORLD_SIZE", ranks);
    set("LOCAL_RANK", rank);
    set("LOCAL_WORLD_SIZE", ranks);
    set("GROUP_RANK", 0);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    set("MASTER_PORT", listening_port(listener));
    unsetenv("TORCHELASTIC_USE_AGENT_STORE");
    unsetenv("TORCHELASTIC_RUN_ID");
    set("MUGPT_SUPERVISED", 1);
    if (rank == 0) set("MUGPT_LISTEN_FD", listener);
}

// A child's part: becomes a rank.
[[noreturn]] void become_rank(int rank, int ranks, int listener, pid_t parent, const sigset_t& signals,
                              const std::vector<std::string>& arguments) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);  // it died before that held
    setpgid(0, 0);
    // Not in a terminal's foreground, yet rank 0 writes to it.
    signal(SIGTTOU, SIG_IGN);
    signal(SIGTTIN, SIG_IGN);
    sigprocmask(SIG_SETMASK, &signals, nullptr);
    set_environment(rank, ranks, listener);
    if (rank == 0) {
        fcntl(listener, F_SETFD, 0);
    } else {
        const int null = open("/dev/null", O_RDWR);
        dup2(null, STDIN_FILENO);
        dup2(null, STDOUT_FILENO);
        close(null);
    }
    std::vector<std::string> texts = {program_invocation_name};
    texts.insert(texts.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& text : texts) argv.push_back(text.data());
    argv.push_back(nullptr);
    execv("/proc/self/exe", argv.data());
    fprintf(stderr, "rank %d: cannot start: %s\n", rank, strerror(errno));
    _exit(1);
}

void signal_ranks(const Launch& launch, int number) {
    for (const Child& child : launch.children) {
        if (!child.ended) kill(child.pid, number);
    }
}

// Takes note of those that have ended. Returns whether all have.
bool reap(Launch& launch) {
    for (size_t rank = 0; rank < launch.children.size(); rank++) {
        Child& child = launch.children[rank];
        if (child.ended || waitpid(child.pid, &child.status, WNOHANG) != child.pid) continue;
        child.ended = true;
        if (child.status == 0 || launch.first_failure >= 0) continue;
        launch.first_failure = static_cast<int>(rank);
        launch.kill_at = monotonic_seconds() + grace_seconds;
    }
    return std::all_of(launch.children.begin(), launch.children.end(),
                       [](const Child& c) { return c.ended; });
}

void kill_the_rest(Launch& launch) {
    if (monotonic_seconds() < launch.kill_at) return;
    for (Child& child : launch.children) child.killed_by_us = child.killed_by_us || !child.ended;
    signal_ranks(launch, SIGKILL);
    launch.kill_at = INFINITY;
}

// Waits for all ranks to end and passes signals on.
void supervise(Launch& launch, const sigset_t& signals) {
    while (!reap(launch)) {
        // A look now and then is for the time limit; SIGCHLD comes at once.
        const timespec moment = {0, 200'000'000};
        const int number = sigtimedwait(&signals, nullptr, &moment);
        kill_the_rest(launch);
        if (number == SIGTSTP) {
            signal_ranks(launch, SIGSTOP);
            raise(SIGSTOP);
            signal_ranks(launch, SIGCONT);
        } else if (number > 0 && number != SIGCHLD) {
            signal_ranks(launch, number);
            launch.stopping = true;
        }
    }
}

std::string end_of(int rank, const Child& child) {
    const std::string name = "rank " + std::to_string(rank);
    if (!WIFSIGNALED(child.status))
        return name + " ended with status " + std::to_string(WEXITSTATUS(child.status));
    const int number = WTERMSIG(child.status);
    return name + " was killed by signal " + std::to_string(number) + " (" + strsignal(number) + ")";
}

// The status of the run; says why it failed where no rank has: rank 0 does so before it fails by itself.
int conclude(const Launch& launch, void (*report)(const std::string&)) {
    if (launch.first_failure < 0) return 0;
    const Child& first = launch.children[static_cast<size_t>(launch.first_failure)];
    const int number = WIFSIGNALED(first.status) ? WTERMSIG(first.status) : 0;
    const auto stops = std::end(stop_signals);
    if (launch.stopping && std::find(std::begin(stop_signals), stops, number) != stops) return 128 + number;
    const Child& leader = launch.children[0];
    if (leader.killed_by_us) {
        report(end_of(launch.first_failure, first) + "; rank 0 did not end by itself and was killed");
    } else if (leader.status == 0) {
        report(end_of(launch.first_failure, first) + " after rank 0 had finished");
    } else if (WIFSIGNALED(leader.status)) {
        report(end_of(0, leader));
    }
    return 1;
}

}  // namespace

int launch_ranks(int ranks, const std::vector<std::string>& arguments,
                 int (*)(const RankEnvironment&, const std::vector<std::string>&),
                 void (*report)(const std::string& line)) {
    const int listener = listen_at("127.0.0.1", 0);
    sigset_t signals, before;
    sigemptyset(&signals);
    for (const int number : stop_signals) sigaddset(&signals, number);
    sigaddset(&signals, SIGTSTP);
    sigaddset(&signals, SIGCHLD);
    signal(SIGCHLD, SIG_DFL);  // where it was ignored, ends of children would be lost
    sigprocmask(SIG_BLOCK, &signals, &before);
    Launch launch;
    const pid_t parent = getpid();
    for (int rank = 0; rank < ranks; rank++) {
        const pid_t pid = fork();
        if (pid == 0) become_rank(rank, ranks, listener, parent, before, arguments);
        if (pid < 0) fail("--ranks %d: cannot start rank %d: %s", ranks, rank, strerror(errno));
        launch.children.push_back({pid});
    }
    close(listener);
    supervise(launch, signals);
    sigprocmask(SIG_SETMASK, &before, nullptr);
    return conclude(launch, report);
}
