// Ranks: what launchers say about them, what ranks say to each other, and how a run ends when one fails. Each
// rank is a process of its own, forked or started again from this program.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "dist/environment.h"
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

}  // namespace
