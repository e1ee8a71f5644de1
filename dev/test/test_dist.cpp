// Ranks: what launchers say about them, what ranks say to each other, and how a run ends when one fails. Each
// rank is a process of its own, forked or started again from this program.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "dev/test/temp_folder.h"
#include "dist/comm.h"
#include "dist/environment.h"
#include "dist/launcher.h"
#include "dist/sockets.h"
#include "kernels/error.h"

extern char** environ;

namespace {

// ---------------------------------------------------------------------------------------------------
// Launchers' variables

bool is_launchers(const std::string& name) {
    for (const char* prefix : {"RANK", "WORLD_SIZE", "LOCAL_", "GROUP_RANK", "MASTER_", "TORCHELASTIC_",
                               "OMPI_", "PMIX_", "SLURM_", "MUGPT_"}) {
        if (name.starts_with(prefix)) return true;
    }
    return false;
}

void clear_launchers_variables() {
    std::vector<std::string> names;
    for (char** entry = environ; *entry != nullptr; entry++)
        names.push_back(std::string(*entry).substr(0, std::string(*entry).find('=')));
    for (const std::string& name : names) {
        if (is_launchers(name)) unsetenv(name.c_str());
    }
}

using Variables = std::map<std::string, std::string>;

RankEnvironment environment_of(const Variables& variables) {
    clear_launchers_variables();
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    RankEnvironment environment;
    try {
        environment = rank_environment();
    } catch (...) {
        clear_launchers_variables();
        throw;
    }
    clear_launchers_variables();
    return environment;
}

// The line of a failure; "" where there is none.
std::string failure_of(const Variables& variables) {
    try {
        environment_of(variables);
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

Variables with(Variables variables, const std::string& name, const std::string& value) {
    variables[name] = value;
    return variables;
}

const Variables torchrun = {
    {"RANK", "5"},       {"WORLD_SIZE", "8"},      {"LOCAL_RANK", "1"},      {"LOCAL_WORLD_SIZE", "4"},
    {"GROUP_RANK", "1"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "none"}};

// As `mpirun -np 6` of Open MPI 4.1 sets them on two nodes.
const Variables mpirun = {{"OMPI_COMM_WORLD_RANK", "4"},       {"OMPI_COMM_WORLD_SIZE", "6"},
                          {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                          {"OMPI_COMM_WORLD_NODE_RANK", "1"},  {"PMIX_NAMESPACE", "3021406209"}};

// As `srun -N 3 -n 5` sets them.
const Variables srun = {{"SLURM_JOB_ID", "4711"},
                        {"SLURM_STEP_ID", "0"},
                        {"SLURM_PROCID", "4"},
                        {"SLURM_NTASKS", "5"},
                        {"SLURM_STEP_NUM_TASKS", "5"},
                        {"SLURM_LOCALID", "0"},
                        {"SLURM_NODEID", "2"},
                        {"SLURM_TASKS_PER_NODE", "2(x2),1"},
                        {"SLURM_STEP_TASKS_PER_NODE", "2(x2),1"},
                        {"SLURM_STEP_NODELIST", "gpu[003-004,009]"},
                        {"SLURM_JOB_NODELIST", "gpu[001-004,009]"},
                        {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"}};

TEST(Environment, None) {
    const RankEnvironment e = environment_of({});
    EXPECT_EQ(e.rank, 0);
    EXPECT_EQ(e.ranks, 1);
    EXPECT_EQ(e.local_ranks, 1);
    EXPECT_FALSE(e.supervised);
}

TEST(Environment, Torchrun) {
    const RankEnvironment e = environment_of(torchrun);
    EXPECT_EQ(e.rank, 5);
    EXPECT_EQ(e.ranks, 8);
    EXPECT_EQ(e.local_rank, 1);
    EXPECT_EQ(e.local_ranks, 4);
    EXPECT_EQ(e.node, 1);
    EXPECT_EQ(e.address, "node7");
    EXPECT_EQ(e.port, 29500);
    EXPECT_EQ(e.listening_socket, -1);
    EXPECT_FALSE(e.supervised);
    // torchrun comes first: a run that it starts within a Slurm step counts its ranks, not Slurm's tasks.
    Variables both = torchrun;
    both.insert(srun.begin(), srun.end());
    EXPECT_EQ(environment_of(both).ranks, 8);
}

TEST(Environment, TorchrunWithoutTheOptionalVariables) {
    const RankEnvironment e = environment_of({{"RANK", "1"},
                                              {"WORLD_SIZE", "2"},
                                              {"LOCAL_RANK", "0"},
                                              {"MASTER_ADDR", "::1"},
                                              {"MASTER_PORT", "1234"}});
    EXPECT_EQ(e.local_ranks, 0);
    EXPECT_EQ(e.node, -1);
    EXPECT_EQ(e.address, "::1");
    EXPECT_EQ(environment_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).ranks, 1);
}

// A store of torchrun's listens at MASTER_PORT then.
TEST(Environment, TorchrunKeepsThePortForItself) {
    const Variables kept = with(torchrun, "TORCHELASTIC_USE_AGENT_STORE", "True");
    const int port = environment_of(kept).port;
    EXPECT_NE(port, 29500);
    EXPECT_EQ(environment_of(with(kept, "RANK", "7")).port, port);
    EXPECT_EQ(environment_of(with(torchrun, "TORCHELASTIC_USE_AGENT_STORE", "False")).port, 29500);
}

TEST(Environment, TorchrunRefused) {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
        Variables variables = torchrun;
        variables.erase(name);
        EXPECT_TRUE(failure_of(variables).starts_with(std::string(name) + ": not set")) << name;
        EXPECT_TRUE(failure_of(with(torchrun, name, "")).starts_with(std::string(name) + ": not set"))
            << name;
    }
    const auto refused = [](const std::string& name, const std::string& value) {
        return failure_of(with(torchrun, name, value)).starts_with(name + "=" + value + ": ");
    };
    for (const char* value : {"x", "5x", "-1", "8", "1e3", "99999999999999999999", "0x1"})
        EXPECT_TRUE(refused("RANK", value)) << value;
    for (const char* value : {"0", "-8", "70000", "8 "}) EXPECT_TRUE(refused("WORLD_SIZE", value)) << value;
    for (const char* value : {"4", "6", "-1"}) EXPECT_TRUE(refused("LOCAL_RANK", value)) << value;
    for (const char* value : {"0", "9"}) EXPECT_TRUE(refused("LOCAL_WORLD_SIZE", value)) << value;
    for (const char* value : {"0", "65536", "http"}) EXPECT_TRUE(refused("MASTER_PORT", value)) << value;
}

TEST(Environment, Mpirun) {
    const RankEnvironment e = environment_of(with(mpirun, "MASTER_ADDR", "head"));
    EXPECT_EQ(e.rank, 4);
    EXPECT_EQ(e.ranks, 6);
    EXPECT_EQ(e.local_rank, 1);
    EXPECT_EQ(e.local_ranks, 3);
    EXPECT_EQ(e.node, -1);  // OMPI_COMM_WORLD_NODE_RANK is the rank on the node, no node's number
    EXPECT_EQ(e.address, "head");
    EXPECT_GE(e.port, 20000);
    EXPECT_LT(e.port, 30000);
    const Variables one_node = with(mpirun, "OMPI_COMM_WORLD_LOCAL_SIZE", "6");
    EXPECT_EQ(environment_of(one_node).address, "127.0.0.1");
    EXPECT_EQ(environment_of(one_node).port, e.port);
    EXPECT_NE(environment_of(with(one_node, "PMIX_NAMESPACE", "3021406210")).port, e.port);
    EXPECT_EQ(environment_of(with(one_node, "MASTER_PORT", "4000")).port, 4000);
    EXPECT_TRUE(failure_of(mpirun).starts_with("MASTER_ADDR: not set"));
    // mpirun within a Slurm job.
    EXPECT_EQ(environment_of(with(mpirun, "SLURM_JOB_NODELIST", "n[12-15]")).address, "n12");
    EXPECT_TRUE(
        failure_of(with(one_node, "OMPI_COMM_WORLD_RANK", "6")).starts_with("OMPI_COMM_WORLD_RANK=6"));
}

TEST(Environment, Srun) {
    const RankEnvironment e = environment_of(srun);
    EXPECT_EQ(e.rank, 4);
    EXPECT_EQ(e.ranks, 5);
    EXPECT_EQ(e.local_rank, 0);
    EXPECT_EQ(e.local_ranks, 1);
    EXPECT_EQ(e.node, 2);
    EXPECT_EQ(e.address, "gpu003");
    EXPECT_GE(e.port, 20000);
    EXPECT_LT(e.port, 30000);
    EXPECT_NE(environment_of(with(srun, "SLURM_STEP_ID", "1")).port, e.port);
    EXPECT_NE(environment_of(with(srun, "SLURM_STEP_ID", "1")).job, e.job);
    EXPECT_EQ(environment_of(with(srun, "MASTER_PORT", "4000")).port, 4000);
    const auto address = [](const std::string& list) {
        return environment_of(with(srun, "SLURM_STEP_NODELIST", list)).address;
    };
    EXPECT_EQ(address("a,b"), "a");
    EXPECT_EQ(address("rack1-n[9,11]-ib,x"), "rack1-n9-ib");
    EXPECT_EQ(address("n7"), "n7");
    EXPECT_EQ(address("x.y.z,n[1-2]"), "x.y.z");
}

// The shells of sbatch and salloc have Slurm's variables and are no ranks.
TEST(Environment, SlurmWithoutSrun) {
    Variables sbatch = srun;
    sbatch.erase("SLURM_STEP_ID");
    sbatch["SLURM_PROCID"] = "0";
    EXPECT_EQ(environment_of(sbatch).ranks, 1);
    for (const char* step : {"4294967291", "4294967290", "4294967292", "batch", "-5"})
        EXPECT_EQ(environment_of(with(sbatch, "SLURM_STEP_ID", step)).ranks, 1) << step;
}

TEST(Environment, SrunRefused) {
    const auto refused = [](const std::string& name, const std::string& value) {
        return failure_of(with(srun, name, value)).starts_with(name + "=" + value);
    };
    EXPECT_TRUE(refused("SLURM_PROCID", "5"));
    EXPECT_TRUE(refused("SLURM_LOCALID", "1"));
    for (const char* value : {"2(x2)", "2(x", "x", "0(x3)", "2(x2),", "2(x-3),1", "2,2"})
        EXPECT_TRUE(refused("SLURM_STEP_TASKS_PER_NODE", value)) << value;
    EXPECT_FALSE(failure_of(with(srun, "SLURM_STEP_NODELIST", "gpu[")).empty());
    EXPECT_FALSE(failure_of(with(srun, "SLURM_STEP_NODELIST", "gpu[1")).empty());
}

TEST(Environment, Supervised) {
    Variables variables = torchrun;
    variables["RANK"] = "0", variables["LOCAL_RANK"] = "0", variables["GROUP_RANK"] = "0";
    const int socket = dup(STDOUT_FILENO);
    variables["MUGPT_SUPERVISED"] = "1", variables["MUGPT_LISTEN_FD"] = std::to_string(socket);
    const RankEnvironment e = environment_of(variables);
    EXPECT_TRUE(e.supervised);
    EXPECT_EQ(e.listening_socket, socket);
    variables["MUGPT_LISTEN_FD"] = "987654";
    EXPECT_TRUE(failure_of(variables).starts_with("MUGPT_LISTEN_FD=987654"));
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    setenv("MUGPT_LISTEN_FD", std::to_string(socket).c_str(), 1);
    rank_environment();
    EXPECT_EQ(getenv("MUGPT_SUPERVISED"), nullptr);
    EXPECT_EQ(getenv("MUGPT_LISTEN_FD"), nullptr);
    close(socket);
    clear_launchers_variables();
}

// ---------------------------------------------------------------------------------------------------
// Ranks as processes

constexpr double hang_seconds = 30;  // of any one run: after that its processes are killed and it has failed
constexpr unsigned test_seconds = 120;  // of any one test: after that SIGALRM ends this program

struct TimeLimit : testing::EmptyTestEventListener {
    void OnTestStart(const testing::TestInfo&) override { alarm(test_seconds); }
    void OnTestEnd(const testing::TestInfo&) override { alarm(0); }
};

void print_line(const std::string& line) { fprintf(stderr, "train_gpt: %s\n", line.c_str()); }

void sleep_seconds(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// In a rank: what does not hold ends the run, as any failure does.
void require(bool holds, const std::string& what) {
    if (!holds) fail("does not hold: %s", what.c_str());
}

using Body = std::function<void(Comm*)>;

// What a program does as a rank.
int run_rank(const RankEnvironment& environment, double timeout, const Body& body) {
    Comm* comm = nullptr;
    try {
        comm = comm_connect(environment, timeout, print_line);
        body(comm);
    } catch (const std::exception& error) {
        if (comm != nullptr) comm_abort(comm, error.what());
        print_line(error.what());
        return 1;
    }
    comm_disconnect(comm);
    return 0;
}

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

struct Ended {
    std::vector<int> statuses;  // exit statuses, or -signal
    std::string err;            // of all ranks together
    double seconds = 0;

    size_t lines() const { return static_cast<size_t>(std::count(err.begin(), err.end(), '\n')); }
    bool says(const std::string& text) const { return err.find(text) != std::string::npos; }
};

// Processes that write to one stderr.
struct Processes {
    TempFolder folder;
    std::vector<pid_t> pids;
    double started = monotonic_seconds();
    int met[2] = {-1, -1};  // a pipe, with a byte from every rank that has met the others

    Processes() { EXPECT_EQ(pipe(met), 0); }
    ~Processes() {
        close(met[0]);
        close(met[1]);
    }
    Processes(const Processes&) = delete;

    void wait_until_met() const {
        std::vector<char> bytes(pids.size());
        const double deadline = monotonic_seconds() + hang_seconds;
        for (size_t n = 0; n < bytes.size();) {
            std::vector<pollfd> wait = {{met[0], POLLIN, 0}};
            poll_until(wait, deadline);
            ASSERT_NE(wait[0].revents, 0) << "they do not meet";
            n += static_cast<size_t>(read(met[0], bytes.data(), bytes.size() - n));
        }
    }

    // Forks one, which runs `f` and ends with its status.
    void start(const std::function<int()>& f) {
        const pid_t pid = fork();
        if (pid != 0) {
            pids.push_back(pid);
            return;
        }
        const int err = open((folder / "stderr").c_str(), O_CREAT | O_WRONLY | O_APPEND, 0644);
        dup2(err, STDERR_FILENO);
        close(err);
        _exit(f());
    }

    // Waits for all of them; kills those that do not end.
    Ended finish(double limit = hang_seconds) {
        Ended ended;
        ended.statuses.assign(pids.size(), 0);
        std::vector<bool> over(pids.size());
        const double deadline = monotonic_seconds() + limit;
        for (size_t left = pids.size(); left > 0;) {
            for (size_t i = 0; i < pids.size(); i++) {
                int status = 0;
                if (over[i] || waitpid(pids[i], &status, WNOHANG) == 0) continue;
                over[i] = true, left--;
                ended.statuses[i] = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
            }
            if (left > 0 && monotonic_seconds() > deadline) {
                ADD_FAILURE() << "hangs";
                for (const pid_t pid : pids) kill(pid, SIGKILL);
            }
            sleep_seconds(0.002);
        }
        ended.seconds = monotonic_seconds() - started;
        ended.err = read_file(folder / "stderr");
        return ended;
    }
};

// The environments of ranks on this machine, with a socket that rank 0 inherits.
struct LocalRanks {
    std::vector<RankEnvironment> environments;
    int listener = listen_at("127.0.0.1", 0);

    explicit LocalRanks(int ranks) {
        for (int rank = 0; rank < ranks; rank++) {
            RankEnvironment& e = environments.emplace_back();
            e.rank = rank, e.ranks = ranks;
            e.local_rank = rank, e.local_ranks = ranks;
            e.port = listening_port(listener);
        }
        environments[0].listening_socket = listener;
    }
    ~LocalRanks() { close(listener); }
    LocalRanks(const LocalRanks&) = delete;

    void start(Processes& processes, double timeout, const Body& body) const {
        for (const RankEnvironment& environment : environments) {
            processes.start([&] {
                if (environment.rank != 0) close(listener);
                return run_rank(environment, timeout, [&](Comm* comm) {
                    require(write(processes.met[1], "m", 1) == 1, "pipe");
                    body(comm);
                });
            });
        }
    }
};

// All ranks run `body` and end with status 0, with nothing on stderr.
void expect_success(int ranks, const Body& body) {
    Processes processes;
    LocalRanks(ranks).start(processes, 20, body);
    const Ended ended = processes.finish();
    for (const int status : ended.statuses) EXPECT_EQ(status, 0);
    EXPECT_EQ(ended.err, "");
}

// All but the ranks of `killed` end with status 1, and one line says why.
void expect_failure(const Ended& ended, const std::string& line, const std::vector<int>& killed = {}) {
    for (size_t rank = 0; rank < ended.statuses.size(); rank++) {
        const bool was_killed = std::find(killed.begin(), killed.end(), rank) != killed.end();
        EXPECT_EQ(ended.statuses[rank], was_killed ? -SIGKILL : 1) << "rank " << rank;
    }
    EXPECT_EQ(ended.err, line.empty() ? "" : "train_gpt: " + line + "\n");
}

// ---------------------------------------------------------------------------------------------------
// Host values

uint64_t bits_of(double x) { return std::bit_cast<uint64_t>(x); }

// Numbers whose sum depends on its order, and the special ones.
std::vector<double> terms(int rank) {
    constexpr double inf = INFINITY;
    const double table[5][8] = {{1e16, -0.0, inf, inf, NAN, 5e-324, 1e308, -0.0},
                                {1.0, -0.0, 1.0, -inf, 1.0, 5e-324, 1e308, 0.0},
                                {-1e16, -0.0, inf, 1.0, 1.0, 0.0, -1e308, -0.0},
                                {1.0, -0.0, -1.0, 1.0, inf, -5e-324, -1e308, -0.0},
                                {3e-16, -0.0, 0.0, 0.0, 0.0, 1.0, 1.0, -0.0}};
    return std::vector<double>(table[rank], table[rank] + 8);
}

TEST(Comm, SumInTheOrderOfRanks) {
    for (const int ranks : {1, 2, 3, 5}) {
        expect_success(ranks, [&](Comm* comm) {
            std::vector<double> expected = terms(0);
            for (int rank = 1; rank < ranks; rank++) {
                for (size_t i = 0; i < expected.size(); i++) expected[i] = expected[i] + terms(rank)[i];
            }
            std::vector<double> sums = terms(comm_rank(comm));
            comm_sum(comm, sums.data(), sums.size());
            for (size_t i = 0; i < sums.size(); i++) {
                require(
                    std::isnan(expected[i]) ? std::isnan(sums[i]) : bits_of(sums[i]) == bits_of(expected[i]),
                    "sum " + std::to_string(i));
            }
            const std::string bits(reinterpret_cast<char*>(sums.data()), sums.size() * sizeof(double));
            for (const std::string& other : comm_gather(comm, bits)) require(other == bits, "same bits");
            comm_sum(comm, nullptr, 0);
        });
    }
}

TEST(Comm, OneValueAndZerosArriveUnchanged) {
    expect_success(3, [](Comm* comm) {
        const std::vector<double> values = {
            NAN, std::bit_cast<double>(0xfff8000000001234), INFINITY, -INFINITY, 5e-324, 1.0 / 3};
        for (int owner = 0; owner < 3; owner++) {
            std::vector<double> sums(values.size());
            if (comm_rank(comm) == owner) sums = values;
            comm_sum(comm, sums.data(), sums.size());
            require(memcmp(sums.data(), values.data(), values.size() * sizeof(double)) == 0, "values");
        }
    });
}

// A text with every byte, of any length. It repeats itself after 64 KiB.
std::string text_of(int rank, size_t n) {
    constexpr size_t period = 65536;
    std::string text(n, '\0');
    for (size_t i = 0; i < std::min(n, period); i++)
        text[i] = static_cast<char>(i * 7 + static_cast<size_t>(rank) + (i >> 8));
    for (size_t i = period; i < n; i += period) memcpy(&text[i], &text[0], std::min(period, n - i));
    return text;
}

TEST(Comm, BroadcastAndGather) {
    for (const int ranks : {1, 2, 4}) {
        expect_success(ranks, [&](Comm* comm) {
            const int rank = comm_rank(comm);
            for (const size_t n : {size_t{0}, size_t{1}, size_t{1} << 20}) {
                std::string text = rank == 0 ? text_of(0, n) : "mine";
                comm_broadcast(comm, text);
                require(text == text_of(0, n), "broadcast");
                // Every second rank has nothing to say.
                const auto own = [&](int r) { return r % 2 == 1 ? "" : text_of(r, n); };
                const std::vector<std::string> texts = comm_gather(comm, own(rank));
                require(texts.size() == (rank == 0 ? static_cast<size_t>(ranks) : 0), "texts");
                for (size_t r = 0; r < texts.size(); r++)
                    require(texts[r] == own(static_cast<int>(r)), "gather");
            }
        });
    }
}

TEST(Comm, RanksThatCallDifferently) {
    const auto failure = [](const Body& body) {
        Processes processes;
        LocalRanks(3).start(processes, 20, body);
        return processes.finish();
    };
    expect_failure(failure([](Comm* comm) {
                       double value = 0;
                       if (comm_rank(comm) == 2) comm_gather(comm, "x");
                       comm_sum(comm, &value, 1);
                   }),
                   "ranks do not do the same: this one is in comm_sum, rank 2 in comm_gather");
    expect_failure(failure([](Comm* comm) {
                       double values[2] = {};
                       comm_sum(comm, values, comm_rank(comm) == 1 ? 2 : 1);
                   }),
                   "ranks do not do the same: this one sums 1 values, rank 1 2");
}

// ---------------------------------------------------------------------------------------------------
// Exchanges

// Messages of one exchange: sizes[from][to] in the order in which both list them.
using Pattern = std::vector<std::vector<std::vector<size_t>>>;

Pattern random_pattern(int ranks, unsigned seed) {
    std::mt19937 random(seed);
    const size_t n = static_cast<size_t>(ranks);
    Pattern sizes(n, std::vector<std::vector<size_t>>(n));
    constexpr size_t some[] = {0, 1, 7, 8, 9, 4096, 65537, 1000003};
    for (size_t from = 0; from < n; from++) {
        for (size_t to = 0; to < n; to++) {
            if (from == to) continue;
            for (size_t count = random() % 4; count > 0; count--)
                sizes[from][to].push_back(some[random() % std::size(some)]);
        }
    }
    return sizes;
}

// Does the exchange and checks every byte.
void exchange(Comm* comm, const Pattern& sizes, Traffic traffic) {
    const size_t rank = static_cast<size_t>(comm_rank(comm));
    std::vector<std::string> out, in;
    std::vector<std::pair<size_t, size_t>> in_from;  // peer, number of the message
    std::vector<Transfer> sends, receives;
    for (size_t peer = 0; peer < sizes.size(); peer++) {
        for (const size_t n : sizes[rank][peer])
            out.push_back(text_of(static_cast<int>(rank + out.size()), n));
        for (size_t i = 0; i < sizes[peer][rank].size(); i++) {
            in.push_back(std::string(sizes[peer][rank][i], '?'));
            in_from.push_back({peer, i});
        }
    }
    size_t next = 0;
    for (size_t peer = 0; peer < sizes.size(); peer++) {
        for (size_t i = 0; i < sizes[rank][peer].size(); i++, next++)
            sends.push_back({static_cast<int>(peer), out[next].data(), out[next].size()});
    }
    for (size_t i = 0; i < in.size(); i++)
        receives.push_back({static_cast<int>(in_from[i].first), in[i].data(), in[i].size()});
    comm_exchange(comm, traffic, sends, receives, nullptr);
    for (size_t i = 0; i < in.size(); i++) {
        // What the peer had sent before, to lower ranks and to this one.
        const auto [peer, number] = in_from[i];
        size_t before = number;
        for (size_t lower = 0; lower < rank; lower++) before += sizes[peer][lower].size();
        require(in[i] == text_of(static_cast<int>(peer + before), in[i].size()),
                "message " + std::to_string(number) + " from " + std::to_string(peer));
    }
}

TEST(Comm, ExchangesOfRandomPatterns) {
    for (const int ranks : {2, 3, 5, 8}) {
        SCOPED_TRACE(ranks);
        expect_success(ranks, [&](Comm* comm) {
            comm_open_transport(comm, nullptr);
            for (unsigned seed = 0; seed < 12; seed++)
                exchange(comm, random_pattern(ranks, seed), Traffic::gradients);
        });
    }
}

TEST(Comm, ExchangesOfUnevenSizes) {
    constexpr size_t large = size_t{200} << 20;
    expect_success(2, [&](Comm* comm) {
        comm_open_transport(comm, nullptr);
        exchange(comm, {{{}, {large}}, {{large}, {}}}, Traffic::weights);
        exchange(comm, {{{}, {0, 3 << 20, 0}}, {{5, 0}, {}}}, Traffic::weights);
        exchange(comm, {{{}, {}}, {{}, {}}}, Traffic::weights);
        exchange(comm, {{{}, {0}}, {{}, {}}}, Traffic::weights);
    });
}

TEST(Comm, SizesThatDiffer) {
    Processes processes;
    LocalRanks(2).start(processes, 20, [](Comm* comm) {
        comm_open_transport(comm, nullptr);
        char memory[16] = {};
        const int peer = 1 - comm_rank(comm);
        if (comm_rank(comm) == 0) {
            comm_exchange(comm, Traffic::weights, {}, {{peer, memory, 8}}, nullptr);
        } else {
            comm_exchange(comm, Traffic::weights, {{peer, memory, 12}}, {}, nullptr);
        }
        double value = 0;
        comm_sum(comm, &value, 1);
    });
    expect_failure(processes.finish(), "rank 1 sends 12 bytes where 8 are expected");
}

TEST(Comm, ATransferToNobody) {
    for (const int peer : {-1, 1, 2}) {
        Processes processes;
        LocalRanks(2).start(processes, 20, [&](Comm* comm) {
            comm_open_transport(comm, nullptr);
            char byte = 0;
            if (comm_rank(comm) == 1) comm_exchange(comm, Traffic::weights, {{peer, &byte, 1}}, {}, nullptr);
        });
        expect_failure(processes.finish(),
                       "rank 1: comm_exchange: rank 1 of 2 has no peer " + std::to_string(peer));
    }
}

// Four ranks on two nodes, as their launcher says.
TEST(Comm, BytesWithinAndBetweenNodes) {
    LocalRanks ranks(4);
    for (RankEnvironment& e : ranks.environments) e.node = 7 - e.rank / 2;  // the first is 7, then 6
    Processes processes;
    ranks.start(processes, 20, [](Comm* comm) {
        require(comm_nodes(comm) == std::vector<int>{0, 0, 1, 1}, "nodes");
        require(comm_bytes_sent(comm).total() == 0, "nothing sent at first");
        const size_t rank = static_cast<size_t>(comm_rank(comm));
        double values[3] = {};
        comm_sum(comm, values, 3);
        const BytesSent one = comm_bytes_sent(comm);
        constexpr int v = static_cast<int>(Traffic::values);
        require(one.within_node[v] == (rank == 0 || rank == 1 ? 24 : 0), "values within");
        require(one.between_nodes[v] == (rank == 0 ? 48 : rank == 1 ? 0 : 24), "values between");
        comm_open_transport(comm, nullptr);
        const BytesSent before = comm_bytes_sent(comm);
        const Pattern sizes = random_pattern(4, 5);
        exchange(comm, sizes, Traffic::gradients);
        exchange(comm, sizes, Traffic::gradients);
        const BytesSent after = comm_bytes_sent(comm);
        uint64_t within = 0, between = 0;
        for (size_t peer = 0; peer < 4; peer++) {
            for (const size_t n : sizes[rank][peer]) (peer / 2 == rank / 2 ? within : between) += 2 * n;
        }
        constexpr int g = static_cast<int>(Traffic::gradients), w = static_cast<int>(Traffic::weights);
        require(after.within_node[g] == within && after.between_nodes[g] == between, "gradients");
        require(after.within_node[w] == 0 && after.between_nodes[w] == 0, "weights");
        require(after.total() - before.total() == within + between, "total");
    });
    const Ended ended = processes.finish();
    EXPECT_EQ(ended.statuses, std::vector<int>(4, 0));
    EXPECT_EQ(ended.err, "");
}

// Ranks whose launcher says nothing of nodes are on one where their machine is the same.
TEST(Comm, NodesByMachine) {
    expect_success(3, [](Comm* comm) { require(comm_nodes(comm) == std::vector<int>{0, 0, 0}, "nodes"); });
}

// ---------------------------------------------------------------------------------------------------
// Ranks that fail

enum class Doing { values, exchange, computing };

// Goes on for ever.
void work(Comm* comm, Doing what) {
    comm_open_transport(comm, nullptr);
    std::vector<std::string> out, in;
    std::vector<Transfer> sends, receives;
    for (int peer = 0; peer < comm_ranks(comm); peer++) {
        if (peer == comm_rank(comm)) continue;
        out.push_back(text_of(0, 8 << 20)), in.push_back(text_of(0, 8 << 20));
        sends.push_back({peer, out.back().data(), out.back().size()});
        receives.push_back({peer, in.back().data(), in.back().size()});
    }
    for (volatile double x = 1;;) {
        if (what == Doing::values) {
            double value = 1;
            comm_sum(comm, &value, 1);
        } else if (what == Doing::exchange) {
            for (size_t i = 0; i < out.size(); i++) sends[i].memory = out[i].data();
            for (size_t i = 0; i < in.size(); i++) receives[i].memory = in[i].data();
            comm_exchange(comm, Traffic::gradients, sends, receives, nullptr);
        } else {
            x = std::sqrt(x + 1);
        }
    }
}

std::string gone(int rank) {
    return "rank " + std::to_string(rank) + " is gone: it was killed, or ended without a word";
}

TEST(Failure, KilledRank) {
    std::mt19937 random(1);
    for (const Doing what : {Doing::values, Doing::exchange, Doing::computing}) {
        Processes runs[3];  // one a victim, together, to save time
        for (Processes& run : runs) LocalRanks(3).start(run, 20, [&](Comm* comm) { work(comm, what); });
        for (size_t victim = 0; victim < 3; victim++) {
            runs[victim].wait_until_met();
            sleep_seconds(0.1 + random() % 100 * 1e-3);
            kill(runs[victim].pids[victim], SIGKILL);
        }
        const double killed = monotonic_seconds();
        for (size_t victim = 0; victim < 3; victim++) {
            SCOPED_TRACE(testing::Message() << "doing " << static_cast<int>(what) << ", rank " << victim);
            const int rank = static_cast<int>(victim);
            expect_failure(runs[victim].finish(), gone(rank), {rank});
        }
        EXPECT_LT(monotonic_seconds() - killed, 5);
    }
}

// A launcher that watches over its ranks reports a rank 0 that dies; others do not.
TEST(Failure, KilledRanksUnderALauncher) {
    for (int victim = 0; victim < 2; victim++) {
        LocalRanks ranks(3);
        for (RankEnvironment& environment : ranks.environments) environment.supervised = true;
        Processes processes;
        ranks.start(processes, 20, [](Comm* comm) { work(comm, Doing::values); });
        processes.wait_until_met();
        kill(processes.pids[static_cast<size_t>(victim)], SIGKILL);
        expect_failure(processes.finish(), victim == 0 ? "" : gone(victim), {victim});
    }
}

// Rank 0 and another at once: the others are left without both.
TEST(Failure, TwoKilledRanks) {
    Processes processes;
    LocalRanks(4).start(processes, 20, [](Comm* comm) { work(comm, Doing::values); });
    processes.wait_until_met();
    kill(processes.pids[0], SIGKILL);
    kill(processes.pids[3], SIGKILL);
    expect_failure(processes.finish(), gone(0), {0, 3});
}

// One that ends by itself, without a word, is no better.
TEST(Failure, RankThatExits) {
    Processes processes;
    LocalRanks(2).start(processes, 20, [](Comm* comm) {
        if (comm_rank(comm) == 1) _exit(1);
        work(comm, Doing::values);
    });
    expect_failure(processes.finish(), gone(1));
}

TEST(Failure, StoppedRank) {
    Processes runs[2];  // together, to save time
    const size_t victims[] = {0, 2};
    for (Processes& processes : runs) {
        LocalRanks(3).start(processes, 20, [](Comm* comm) {
            comm_set_timeout(comm, 2);
            work(comm, Doing::exchange);
        });
    }
    for (const Processes& processes : runs) processes.wait_until_met();
    for (size_t i = 0; i < 2; i++) kill(runs[i].pids[victims[i]], SIGSTOP);
    sleep_seconds(4.5);  // the timeout, the interval of the signs of life and what a busy machine adds
    for (size_t i = 0; i < 2; i++) {
        SCOPED_TRACE(victims[i]);
        kill(runs[i].pids[victims[i]], SIGKILL);  // a stopped process cannot end otherwise
        expect_failure(
            runs[i].finish(1),
            "rank " + std::to_string(victims[i]) + " has given no sign of life for 2 s (--timeout)",
            {static_cast<int>(victims[i])});
    }
}

// All ranks stopped and continued later, as by a batch system or Ctrl-Z, have lost nobody; nor has a rank
// whose main thread takes its time.
TEST(Failure, SlownessIsNoDeath) {
    Processes processes;
    LocalRanks(3).start(processes, 20, [](Comm* comm) {
        comm_set_timeout(comm, 2);
        double value = 1;
        comm_sum(comm, &value, 1);
        const double start = monotonic_seconds();
        while (comm_rank(comm) == 1 && monotonic_seconds() - start < 6.5) sleep_seconds(0.01);
        comm_sum(comm, &value, 1);
        require(value == 9, "sum");
    });
    processes.wait_until_met();
    sleep_seconds(0.2);
    for (const pid_t pid : processes.pids) kill(pid, SIGSTOP);
    sleep_seconds(3.5);
    for (const pid_t pid : processes.pids) {
        kill(pid, SIGCONT);
        sleep_seconds(0.2);
    }
    const Ended ended = processes.finish();
    EXPECT_EQ(ended.statuses, std::vector<int>(3, 0));
    EXPECT_EQ(ended.err, "");
}

TEST(Failure, Abort) {
    for (const Doing others : {Doing::values, Doing::exchange, Doing::computing}) {
        for (const int failing : {0, 2}) {
            SCOPED_TRACE(testing::Message() << "others " << static_cast<int>(others) << ", rank " << failing);
            Processes processes;
            LocalRanks(4).start(processes, 20, [&](Comm* comm) {
                if (comm_rank(comm) == failing) {
                    comm_open_transport(comm, nullptr);
                    sleep_seconds(0.1);
                    comm_abort(comm, "shard 7: cut off");
                }
                work(comm, others);
            });
            const Ended ended = processes.finish();
            expect_failure(ended, failing == 0 ? "shard 7: cut off" : "rank 2: shard 7: cut off");
            EXPECT_LT(ended.seconds, 3);
        }
    }
}

TEST(Failure, AllAbortAtOnce) {
    for (int round = 0; round < 5; round++) {
        Processes processes;
        LocalRanks(4).start(processes, 20, [](Comm* comm) {
            double value = 0;
            comm_sum(comm, &value, 1);
            comm_abort(comm, "no space left");
        });
        const Ended ended = processes.finish();
        EXPECT_EQ(ended.statuses, std::vector<int>(4, 1));
        EXPECT_EQ(ended.lines(), 1u);
        EXPECT_TRUE(ended.says("no space left"));
    }
}

TEST(Failure, AbortOfOneRank) {
    Processes processes;
    processes.start([] { return run_rank({}, 20, [](Comm* comm) { comm_abort(comm, "alone"); }); });
    expect_failure(processes.finish(), "alone");
}

// A rank that has finished waits for the others, and still ends with them.
TEST(Failure, AfterSomeHaveFinished) {
    for (const int slow : {0, 2}) {
        Processes processes;
        LocalRanks(3).start(processes, 20, [&](Comm* comm) {
            if (comm_rank(comm) != slow) return;
            sleep_seconds(0.3);
            fail("late");
        });
        expect_failure(processes.finish(), slow == 0 ? "late" : "rank 2: late");
    }
    expect_success(3, [](Comm* comm) { sleep_seconds(0.2 * comm_rank(comm)); });
    expect_success(3, [](Comm* comm) { sleep_seconds(0.2 * (2 - comm_rank(comm))); });
}

// ---------------------------------------------------------------------------------------------------
// Meetings

// Without a socket from a launcher: rank 0 opens the port.
std::vector<RankEnvironment> separate_ranks(int ranks, const std::string& address = "127.0.0.1") {
    std::vector<RankEnvironment> environments = LocalRanks(ranks).environments;
    for (RankEnvironment& environment : environments) {
        environment.address = address;
        environment.listening_socket = -1;
    }
    return environments;
}

Ended meet_as(const std::vector<RankEnvironment>& environments, double timeout = 20) {
    Processes processes;
    for (const RankEnvironment& environment : environments)
        processes.start([&] { return run_rank(environment, timeout, [](Comm*) {}); });
    return processes.finish();
}

TEST(Meeting, OnEveryKindOfAddress) {
    for (const char* address : {"127.0.0.1", "localhost", "::1"}) {
        SCOPED_TRACE(address);
        const Ended ended = meet_as(separate_ranks(3, address));
        EXPECT_EQ(ended.statuses, std::vector<int>(3, 0));
        EXPECT_EQ(ended.err, "");
    }
    // Not a loopback address by its looks: rank 0 listens everywhere, ranks exchange through it.
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    Processes processes;
    for (const RankEnvironment& environment : separate_ranks(3, host)) {
        processes.start([&] {
            return run_rank(environment, 20, [](Comm* comm) {
                comm_open_transport(comm, nullptr);
                exchange(comm, random_pattern(3, 1), Traffic::weights);
            });
        });
    }
    const Ended ended = processes.finish();
    EXPECT_EQ(ended.statuses, std::vector<int>(3, 0));
    EXPECT_EQ(ended.err, "");
}

TEST(Meeting, PortInUse) {
    const int listener = listen_at("127.0.0.1", 0);
    RankEnvironment environment;
    environment.ranks = 2, environment.port = listening_port(listener);
    const std::string where = "127.0.0.1:" + std::to_string(environment.port);
    expect_failure(meet_as({environment}), where + ": cannot listen: Address already in use");
    close(listener);
}

TEST(Meeting, NoRank0) {
    RankEnvironment environment = separate_ranks(2)[1];
    const std::string where = "127.0.0.1:" + std::to_string(environment.port);
    expect_failure(meet_as({environment}, 0.5), where + ": cannot connect: Connection refused");
    environment.address = "nowhere.invalid";
    EXPECT_TRUE(meet_as({environment}, 0.5).says("nowhere.invalid:"));
}

TEST(Meeting, WorldSizesThatDiffer) {
    std::vector<RankEnvironment> environments = separate_ranks(3);
    environments[2].ranks = 4;
    const Ended ended = meet_as(environments);
    EXPECT_EQ(ended.statuses, std::vector<int>(3, 1));
    EXPECT_EQ(ended.lines(), 1u);
    EXPECT_TRUE(ended.says("counts 4 ranks, rank 0 counts 3 (WORLD_SIZE)")) << ended.err;
}

TEST(Meeting, TwoWithOneRank) {
    std::vector<RankEnvironment> environments = separate_ranks(3);
    environments[2].rank = 1;
    expect_failure(meet_as(environments), "two processes claim to be rank 1 (RANK)");
    environments = separate_ranks(3);
    environments.push_back(environments[2]);
    environments.erase(environments.begin() + 1);
    expect_failure(meet_as(environments), "two processes claim to be rank 2 (RANK)");
}

TEST(Meeting, MissingRanks) {
    std::vector<RankEnvironment> environments = separate_ranks(6);
    environments.pop_back();
    environments.erase(environments.begin() + 1, environments.begin() + 4);
    expect_failure(meet_as(environments, 1), "ranks 1-3, 5 of 6 did not arrive within 1 s");
    environments = separate_ranks(2);
    environments.pop_back();
    expect_failure(meet_as(environments, 0.5), "rank 1 of 2 did not arrive within 0.5 s");
}

// A process of another job that comes to this one's address is sent away; this one goes on.
TEST(Meeting, RankOfAnotherRun) {
    std::vector<RankEnvironment> environments = separate_ranks(2);
    for (RankEnvironment& environment : environments) environment.job = "job 1";
    RankEnvironment other = environments[1];
    other.job = "job 2";
    Processes processes;
    const auto start = [&](const RankEnvironment& environment) {
        processes.start([&] { return run_rank(environment, 20, [](Comm*) {}); });
    };
    start(environments[0]);
    start(other);
    siginfo_t ended_first;
    waitid(P_PID, static_cast<id_t>(processes.pids[1]), &ended_first, WEXITED | WNOWAIT);
    start(environments[1]);
    const Ended ended = processes.finish();
    EXPECT_EQ(ended.statuses, (std::vector<int>{0, 1, 0}));
    EXPECT_EQ(ended.lines(), 1u);
    EXPECT_TRUE(ended.says("another run meets there")) << ended.err;
}

// Who knocks at the port and speaks another language, or nothing, neither joins nor delays.
TEST(Meeting, Strangers) {
    const std::vector<RankEnvironment> environments = separate_ranks(2);
    const int port = environments[0].port;
    Processes processes;
    const auto body = [](Comm* comm) {
        double value = 1;
        comm_sum(comm, &value, 1);
        require(value == 2, "sum");
    };
    processes.start([&] { return run_rank(environments[0], 20, body); });
    std::vector<int> strangers;
    const std::string garbage = text_of(3, 100000);
    for (const std::string& text :
         {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), garbage, std::string("muGPT"),
          std::string("muGPTr01 but no more"), std::string()}) {
        strangers.push_back(connect_to("127.0.0.1", port, monotonic_seconds() + 10));
        send_all(strangers.back(), text.data(), text.size());
    }
    close(connect_to("127.0.0.1", port, monotonic_seconds() + 10));
    sleep_seconds(0.1);
    processes.start([&] { return run_rank(environments[1], 20, body); });
    const Ended ended = processes.finish();
    EXPECT_EQ(ended.statuses, (std::vector<int>{0, 0}));
    EXPECT_EQ(ended.err, "");
    EXPECT_LT(ended.seconds, 5);
    for (const int socket : strangers) close(socket);
}

// Rank 0 dies while the others still wait for a missing one.
TEST(Meeting, Rank0Dies) {
    std::vector<RankEnvironment> environments = separate_ranks(4);
    environments.pop_back();
    Processes processes;
    for (const RankEnvironment& environment : environments)
        processes.start([&] { return run_rank(environment, 20, [](Comm*) {}); });
    sleep_seconds(1);  // until they have come, also on a busy machine
    kill(processes.pids[0], SIGKILL);
    const Ended ended = processes.finish();
    EXPECT_EQ(ended.statuses, (std::vector<int>{-SIGKILL, 1, 1}));
    EXPECT_EQ(ended.lines(), 1u);
    EXPECT_TRUE(ended.says("rank 0 ended while ranks met")) << ended.err;
}

// ---------------------------------------------------------------------------------------------------
// Launchers: this program started again, by them, as a rank that does what its arguments say

volatile std::sig_atomic_t signals_caught = 0;
void catch_signal(int) { signals_caught = signals_caught + 1; }

// Until a rank has caught a signal, and a moment longer, in which a second one would come. Returns how many
// each rank has caught, on rank 0.
std::string count_signals(Comm* comm, const std::string& folder) {
    for (const int number : {SIGINT, SIGTERM, SIGHUP}) signal(number, catch_signal);
    const std::string rank = std::to_string(comm_rank(comm));
    std::ofstream(folder + "/ready_" + rank) << getpid();
    for (double stop = 0; stop == 0;) {
        sleep_seconds(0.01);
        stop = signals_caught;
        comm_sum(comm, &stop, 1);
    }
    sleep_seconds(0.2);
    std::string counts;
    for (const std::string& count : comm_gather(comm, std::to_string(signals_caught))) counts += count + " ";
    return counts;
}

// `rank WHAT FOLDER`, started by a launcher.
int rank_program(const std::string& what, const std::string& folder) {
    const RankEnvironment environment = rank_environment();
    if (what == "exit" && environment.rank == 1) return 3;
    const int status = run_rank(environment, 20, [&](Comm* comm) {
        comm_set_timeout(comm, what == "silent" ? 1.5 : 20);
        std::string said;
        if (what == "sum") {
            double sum = comm_rank(comm) + 1;
            comm_sum(comm, &sum, 1);
            require(getenv("MUGPT_LISTEN_FD") == nullptr, "environment");
            require(comm_rank(comm) == 0 || getchar() == EOF, "no stdin");
            said = std::to_string(comm_ranks(comm)) + " ranks, sum " + std::to_string(sum);
        } else if (what == "fail") {
            if (comm_rank(comm) == 2) fail("shard 7: cut off");
            work(comm, Doing::values);
        } else if (what == "signals") {
            said = count_signals(comm, folder);
        } else {
            std::ofstream(folder + "/ready_" + std::to_string(comm_rank(comm))) << getpid();
            work(comm, Doing::values);
        }
        printf("%s\n", said.c_str());  // only rank 0 has somebody to hear it
        fflush(stdout);
    });
    return status;
}

[[noreturn]] void start_again(const std::vector<std::string>& arguments) {
    std::vector<std::string> texts = {"test_dist"};
    texts.insert(texts.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& text : texts) argv.push_back(text.data());
    argv.push_back(nullptr);
    execv("/proc/self/exe", argv.data());
    _exit(127);
}

// launch_ranks with three ranks, in a process of its own.
struct Launched {
    Processes processes;

    explicit Launched(const std::string& what, bool on_terminal = false) {
        // Ranks that outlive their launcher become this process's children.
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        processes.start([&, on_terminal]() -> int {
            if (on_terminal) become_terminals(what);
            const int out = open((processes.folder / "stdout").c_str(), O_CREAT | O_WRONLY, 0644);
            dup2(out, STDOUT_FILENO);
            start_again({"launch", what, processes.folder.path});
        });
    }

    // Runs it as a terminal's foreground job, types Ctrl-C when the ranks are ready, and ends with its
    // status.
    [[noreturn]] void become_terminals(const std::string& what) {
        int terminal = -1;
        const pid_t pid = forkpty(&terminal, nullptr, nullptr, nullptr);
        if (pid == 0) start_again({"launch", what, processes.folder.path});
        wait_until_ready();
        // The launcher passes it on a little later, so that a rank that had it from the terminal counts two.
        kill(pid, SIGSTOP);
        [[maybe_unused]] const ssize_t typed = write(terminal, "\x03", 1);
        sleep_seconds(0.1);
        kill(pid, SIGCONT);
        std::string out;
        char buffer[256];
        for (ssize_t n; (n = read(terminal, buffer, sizeof(buffer))) > 0;)
            out.append(buffer, static_cast<size_t>(n));
        std::ofstream(processes.folder / "stdout") << out;
        int status = 0;
        waitpid(pid, &status, 0);
        _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 99);
    }

    // Process ids of the ranks.
    std::vector<pid_t> wait_until_ready() {
        std::vector<pid_t> pids;
        const double deadline = monotonic_seconds() + hang_seconds;
        for (int rank = 0; rank < 3 && monotonic_seconds() < deadline;) {
            const std::string text = read_file(processes.folder / ("ready_" + std::to_string(rank)));
            if (text.empty()) {
                sleep_seconds(0.01);
                continue;
            }
            pids.push_back(std::stoi(text));
            rank++;
        }
        return pids;
    }

    std::string out() const { return read_file(processes.folder / "stdout"); }
};

TEST(Launch, AllEndWell) {
    Launched run("sum");
    const Ended ended = run.processes.finish();
    EXPECT_EQ(ended.statuses[0], 0);
    EXPECT_EQ(ended.err, "");
    EXPECT_EQ(run.out(), "3 ranks, sum 6.000000\n");
}

TEST(Launch, KilledRank) {
    for (const size_t victim : {0, 2}) {
        Launched run("work");
        kill(run.wait_until_ready().at(victim), SIGKILL);
        expect_failure(run.processes.finish(),
                       victim == 0 ? "rank 0 was killed by signal 9 (Killed)" : gone(2));
    }
}

// Where rank 0 cannot say what has happened, the launcher does.
TEST(Launch, Rank0CannotSayIt) {
    Launched exits("exit"), silent("silent");  // together, to save time
    const std::vector<pid_t> pids = silent.wait_until_ready();
    kill(pids.at(0), SIGSTOP);
    expect_failure(exits.processes.finish(),
                   "rank 1 ended with status 3; rank 0 did not end by itself and was killed");
    const Ended ended = silent.processes.finish();
    EXPECT_EQ(ended.statuses[0], 1);
    EXPECT_EQ(ended.lines(), 1u);
    EXPECT_TRUE(ended.says(" ended with status 1; rank 0 did not end by itself and was killed")) << ended.err;
}

TEST(Launch, StopSignalsReachEveryRankOnce) {
    for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
        SCOPED_TRACE(strsignal(number));
        Launched run("signals");
        run.wait_until_ready();
        kill(run.processes.pids[0], number);
        const Ended ended = run.processes.finish();
        EXPECT_EQ(ended.statuses[0], 0);
        EXPECT_EQ(ended.err, "");
        EXPECT_EQ(run.out(), "1 1 1 \n");
    }
}

TEST(Launch, CtrlCOnATerminal) {
    Launched run("signals", true);
    EXPECT_EQ(run.processes.finish().statuses[0], 0);
    EXPECT_NE(run.out().find("1 1 1 "), std::string::npos) << run.out();
}

TEST(Launch, SignalThatIsNotCaught) {
    Launched run("work");
    run.wait_until_ready();
    kill(run.processes.pids[0], SIGTERM);
    const Ended ended = run.processes.finish();
    EXPECT_EQ(ended.statuses[0], 128 + SIGTERM);
    EXPECT_EQ(ended.err, "");
}

TEST(Launch, StoppedAndContinued) {
    Launched run("work");
    const std::vector<pid_t> pids = run.wait_until_ready();
    const auto wait_for_state = [](pid_t pid, const std::string& states) {
        for (const double deadline = monotonic_seconds() + 10; monotonic_seconds() < deadline;) {
            const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
            if (states.find(stat.at(stat.rfind(')') + 2)) != std::string::npos) return true;
            sleep_seconds(0.01);
        }
        return false;
    };
    kill(run.processes.pids[0], SIGTSTP);
    for (const pid_t pid : {run.processes.pids[0], pids.at(0), pids.at(2)})
        EXPECT_TRUE(wait_for_state(pid, "T"));
    kill(run.processes.pids[0], SIGCONT);
    for (const pid_t pid : {run.processes.pids[0], pids.at(0), pids.at(2)})
        EXPECT_TRUE(wait_for_state(pid, "SR"));
    kill(run.processes.pids[0], SIGTERM);
    EXPECT_EQ(run.processes.finish().statuses[0], 128 + SIGTERM);
}

TEST(Launch, RanksDoNotOutliveTheLauncher) {
    Launched run("work");
    const std::vector<pid_t> pids = run.wait_until_ready();
    kill(run.processes.pids[0], SIGKILL);
    EXPECT_EQ(run.processes.finish().statuses[0], -SIGKILL);
    const double deadline = monotonic_seconds() + hang_seconds;
    for (const pid_t pid : pids) {
        int status = 0;
        while (waitpid(pid, &status, WNOHANG) == 0) {
            sleep_seconds(0.01);
            if (monotonic_seconds() < deadline) continue;
            ADD_FAILURE() << "a rank lives on";
            kill(pid, SIGKILL);
        }
        EXPECT_TRUE(WIFSIGNALED(status));
    }
}

// The real mpirun. Its own text beside a failure's line is its business.
TEST(Launch, Mpirun) {
    if (system("command -v mpirun >/dev/null") != 0) GTEST_SKIP() << "mpirun is not here (openmpi-bin)";
    char self[4096] = "";
    ASSERT_GT(readlink("/proc/self/exe", self, sizeof(self) - 1), 0);
    const auto run = [&](const std::string& what, int& status) {
        const std::string command = std::string("mpirun --allow-run-as-root --oversubscribe -np 3 ") + self +
                                    " rank " + what + " /tmp 2>&1";
        FILE* pipe = popen(("timeout 30 " + command).c_str(), "r");
        std::string out;
        for (int c; (c = fgetc(pipe)) != EOF;) out += static_cast<char>(c);
        status = WEXITSTATUS(pclose(pipe));
        return out;
    };
    int status = 0;
    const std::string out = run("sum", status);
    EXPECT_EQ(status, 0);
    EXPECT_NE(out.find("3 ranks, sum 6.000000\n"), std::string::npos) << out;
    const std::string failed = run("fail", status);
    EXPECT_NE(status, 0);
    EXPECT_NE(failed.find("train_gpt: rank 2: shard 7: cut off\n"), std::string::npos) << failed;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string mode = argc == 4 ? argv[1] : "";
    if (mode == "rank") return rank_program(argv[2], argv[3]);
    if (mode == "launch") return launch_ranks(3, {"rank", argv[2], argv[3]}, nullptr, print_line);
    testing::InitGoogleTest(&argc, argv);
    testing::UnitTest::GetInstance()->listeners().Append(new TimeLimit);
    return RUN_ALL_TESTS();
}
