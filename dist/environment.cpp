// Reads launchers' variables; see environment.h.
#include "dist/environment.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>

#include "kernels/error.h"

namespace {

constexpr long max_ranks = 1 << 16;
constexpr long max_port = 65535;

// A variable that is set to nothing counts as not set.
std::string variable(const char* name) {
    const char* value = getenv(name);
    return value == nullptr ? "" : value;
}
bool is_set(const char* name) { return !variable(name).empty(); }

// The value of a variable that must be there, because `because` is, from `least` to `most`.
int number(const char* name, long least, long most, const char* because) {
    const std::string text = variable(name);
    if (text.empty()) fail("%s: not set, though %s=%s is", name, because, variable(because).c_str());
    char* end = nullptr;
    errno = 0;
    const long value = strtol(text.c_str(), &end, 10);
    if (*end != '\0' || errno != 0 || value < least || value > most)
        fail("%s=%s: must be a number from %ld to %ld", name, text.c_str(), least, most);
    return static_cast<int>(value);
}

// FNV-1a (http://www.isthe.com/chongo/tech/comp/fnv/).
uint32_t hash(const std::string& text) {
    uint32_t value = 2166136261u;
    for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 16777619u;
    return value;
}

// A port that all ranks of a job find by themselves, and other jobs and users rarely. Below the range that
// Linux hands out by itself (32768 to 60999).
int port_of_job(const std::string& job) {
    return 20000 + static_cast<int>(hash(job + " of user " + std::to_string(getuid())) % 10000);
}

// "node[003-007,9],x" -> "node003".
std::string first_host(const std::string& list) {
    const size_t end = list.find_first_of(",[");
    if (end == std::string::npos || list[end] == ',') return list.substr(0, end);
    const size_t close = list.find(']', end);
    const std::string number = list.substr(end + 1, list.find_first_of("-,]", end + 1) - end - 1);
    if (close == std::string::npos || number.empty()) fail("%s: not a list of Slurm's nodes", list.c_str());
    return list.substr(0, end) + number + list.substr(close + 1, list.find(',', close) - close - 1);
}

// How many tasks a node has, from Slurm's "2(x3),1": three nodes with two and one with one.
int tasks_of_node(const char* name, int node) {
    const std::string text = variable(name);
    const char* at = text.c_str();
    for (long nodes = 0;;) {
        char* end = nullptr;
        const long tasks = strtol(at, &end, 10);
        long repeats = 1;
        if (end[0] == '(' && end[1] == 'x') {
            repeats = strtol(end + 2, &end, 10);
            if (*end++ != ')') break;
        }
        if (tasks < 1 || tasks > max_ranks || repeats < 1) break;
        nodes += repeats;
        if (node < nodes) return static_cast<int>(tasks);
        if (*end != ',') break;
        at = end + 1;
    }
    fail("%s=%s: no number of tasks for node %d (SLURM_NODEID)", name, text.c_str(), node);
}

void check_local_rank(const RankEnvironment& e, const char* name) {
    if (e.local_ranks == 0 || e.local_rank < e.local_ranks) return;
    fail("%s=%d: this node has only %d ranks", name, e.local_rank, e.local_ranks);
}

// What launch_ranks hands down beside torchrun's variables.
void read_supervisor(RankEnvironment& e) {
    e.supervised = is_set("MUGPT_SUPERVISED");
    if (e.rank == 0 && is_set("MUGPT_LISTEN_FD")) {
        e.listening_socket = number("MUGPT_LISTEN_FD", 0, INT32_MAX, "RANK");
        if (fcntl(e.listening_socket, F_SETFD, FD_CLOEXEC) != 0)
            fail("MUGPT_LISTEN_FD=%d: not an open socket", e.listening_socket);
    }
    unsetenv("MUGPT_SUPERVISED");
    unsetenv("MUGPT_LISTEN_FD");
}

RankEnvironment torchrun_environment() {
    RankEnvironment e;
    const char* because = is_set("RANK") ? "RANK" : "WORLD_SIZE";
    e.ranks = number("WORLD_SIZE", 1, max_ranks, because);
    e.rank = number("RANK", 0, e.ranks - 1, because);
    e.local_ranks = is_set("LOCAL_WORLD_SIZE") ? number("LOCAL_WORLD_SIZE", 1, e.ranks, because)
                    : e.ranks > 1              ? 0
                                               : 1;
    // Nobody may forget it: ranks of one node would share a GPU.
    if (e.ranks > 1 || is_set("LOCAL_RANK")) e.local_rank = number("LOCAL_RANK", 0, e.rank, because);
    check_local_rank(e, "LOCAL_RANK");
    if (is_set("GROUP_RANK")) e.node = number("GROUP_RANK", 0, e.rank, because);
    e.job = variable("TORCHELASTIC_RUN_ID");
    if (e.ranks > 1) {
        if (!is_set("MASTER_ADDR")) fail("MASTER_ADDR: not set, though WORLD_SIZE=%d is", e.ranks);
        e.address = variable("MASTER_ADDR");
        e.port = number("MASTER_PORT", 1, max_port, because);
        // Then a store of torchrun's own listens there.
        if (variable("TORCHELASTIC_USE_AGENT_STORE") == "True")
            e.port = port_of_job("torchrun " + e.job + " at " + std::to_string(e.port));
    }
    read_supervisor(e);
    return e;
}

// Where rank 0 listens under a launcher that does not say it: `first_node` is where rank 0 is, "" where that
// is not known.
void choose_address(RankEnvironment& e, const std::string& first_node, const char* because) {
    if (e.ranks == 1) return;
    if (is_set("MASTER_ADDR")) {
        e.address = variable("MASTER_ADDR");
    } else if (e.local_ranks < e.ranks) {
        if (first_node.empty()) {
            fail("MASTER_ADDR: not set: %d ranks are on several nodes and need the name of rank 0's",
                 e.ranks);
        }
        e.address = first_node;
    }
    e.port = is_set("MASTER_PORT") ? number("MASTER_PORT", 1, max_port, because) : port_of_job(e.job);
}

std::string first_slurm_node() {
    for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
        if (is_set(name)) return first_host(variable(name));
    }
    return variable("SLURM_LAUNCH_NODE_IPADDR");
}

RankEnvironment mpirun_environment() {
    constexpr const char* because = "OMPI_COMM_WORLD_SIZE";
    RankEnvironment e;
    e.ranks = number("OMPI_COMM_WORLD_SIZE", 1, max_ranks, because);
    e.rank = number("OMPI_COMM_WORLD_RANK", 0, e.ranks - 1, because);
    e.local_ranks = number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, e.ranks, because);
    e.local_rank = number("OMPI_COMM_WORLD_LOCAL_RANK", 0, e.local_ranks - 1, because);
    // Open MPI 4 and 5 set the first, 2 and 3 the second; mpirun's process id is in all of them.
    e.job = "mpirun " + variable(is_set("PMIX_NAMESPACE") ? "PMIX_NAMESPACE" : "OMPI_MCA_ess_base_jobid");
    choose_address(e, first_slurm_node(), because);
    return e;
}

// The numbers from here on are Slurm's own for the shells of sbatch and salloc and the like (slurm.h:
// SLURM_MAX_NORMAL_STEP_ID).
constexpr unsigned long first_special_step = 0xfffffff0;

bool started_by_srun() {
    const std::string step = variable("SLURM_STEP_ID");
    char* end = nullptr;
    const unsigned long id = strtoul(step.c_str(), &end, 10);
    return !step.empty() && step[0] != '-' && *end == '\0' && id < first_special_step;
}

RankEnvironment srun_environment() {
    constexpr const char* because = "SLURM_STEP_ID";
    RankEnvironment e;
    // The step's number of tasks; a shell's own --ntasks may be another.
    e.ranks = number(is_set("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS", 1, max_ranks,
                     because);
    e.rank = number("SLURM_PROCID", 0, e.ranks - 1, because);
    e.local_rank = number("SLURM_LOCALID", 0, e.rank, because);
    e.node = number("SLURM_NODEID", 0, e.ranks - 1, because);
    e.local_ranks = tasks_of_node(
        is_set("SLURM_STEP_TASKS_PER_NODE") ? "SLURM_STEP_TASKS_PER_NODE" : "SLURM_TASKS_PER_NODE", e.node);
    check_local_rank(e, "SLURM_LOCALID");
    e.job = "srun " + variable("SLURM_JOB_ID") + "." + variable("SLURM_STEP_ID");
    choose_address(e, first_slurm_node(), because);
    return e;
}

}  // namespace

RankEnvironment rank_environment() {
    if (is_set("RANK") || is_set("WORLD_SIZE")) return torchrun_environment();
    if (is_set("OMPI_COMM_WORLD_RANK") || is_set("OMPI_COMM_WORLD_SIZE")) return mpirun_environment();
    if (started_by_srun()) return srun_environment();
    return {};
}
