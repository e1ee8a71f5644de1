// Training over ranks, as a user starts it: the same bits on any number of ranks, from any launcher; ranks
// that die, hang or were started wrong; what is sent. The ranks are processes, more of them than this machine
// has cores.
#include "dev/test/program.h"

#include <csignal>
#include <cstdlib>

#include "dist/data_parallel.h"
#include "dist/layout.h"
#include "model/gpt.h"
#include "model/safetensors.h"

namespace {

// A step is 8 micro-batches of 2 rows: 8 leaves, or fewer of more. An epoch of 104 rows ends inside step 7.
Arguments small(const TempFolder& folder, const std::string& out, const Arguments& changes = {}) {
    Arguments all = {
        "--batch-size",       "2", "--tokens-per-step", "384", "--steps", "10", "--val-every",     "5",
        "--virtual-ranks",    "8", "--threads",         "1",   "--keep",  "0",  "--sample-tokens", "0",
        "--checkpoint-every", "4"};
    all.insert(all.end(), changes.begin(), changes.end());
    return tiny_with(folder, out, all);
}

Arguments on_ranks(Arguments arguments, int ranks) {
    arguments.insert(arguments.end(), {"--ranks", std::to_string(ranks)});
    return arguments;
}

void expect_success(const Result& result) {
    ASSERT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(result.err, "");
}

// What must not depend on the ranks: of every line, all but times, memory and bytes.
std::vector<std::string> lines_of(const std::string& folder) {
    return training_lines(folder, {"bytes_sent", "bytes_sent_as"});
}

// All saved numbers by the name of their tensor: weights, master weights and optimizer state, from however
// many files.
std::map<std::string, std::string> saved_tensors(const std::string& checkpoint) {
    std::map<std::string, std::string> tensors;
    for (const auto& entry : fs::directory_iterator(checkpoint)) {
        if (entry.path().extension() != ".safetensors") continue;
        const SafeTensorsFile file = safetensors_open(entry.path().string());
        for (const auto& [name, tensor] : file.tensors) {
            const auto* bytes = static_cast<const char*>(tensor.data);
            EXPECT_TRUE(tensors.emplace(name, std::string(bytes, tensor.bytes)).second) << name << " twice";
        }
    }
    return tensors;
}

void expect_same_run(const TempFolder& folder, const std::string& a, const std::string& b,
                     const std::string& last = "/step_00000010") {
    EXPECT_EQ(lines_of(folder / a), lines_of(folder / b)) << a << " and " << b;
    const auto expected = saved_tensors(folder / (a + last));
    const auto actual = saved_tensors(folder / (b + last));
    EXPECT_EQ(actual.size(), expected.size());
    for (const auto& [name, bytes] : expected)
        EXPECT_TRUE(actual.contains(name) && actual.at(name) == bytes) << name << " of " << a << " and " << b;
}

// ---------------------------------------------------------------------------------------------------
// The same bits

struct Kind {
    const char *optimizer, *dtype, *reduce_dtype;
};

class SameBits : public testing::TestWithParam<Kind> {};

TEST_P(SameBits, OnAnyNumberOfRanks) {
    const Kind kind = GetParam();
    const Arguments settings = {"--optimizer", kind.optimizer,   "--dtype",
                                kind.dtype,    "--reduce-dtype", kind.reduce_dtype};
    const TempFolder folder;
    expect_success(run(folder, small(folder, "one", settings)));
    ASSERT_EQ(lines_of(folder / "one").size(), 10u + 3u);
    for (const int ranks : {2, 4, 8}) {
        const std::string name = std::to_string(ranks);
        expect_success(run(folder, on_ranks(small(folder, name, settings), ranks)));
        expect_same_run(folder, "one", name);
    }
    // Saved by 2, gone on with by 4 from inside an epoch; saved by 4, gone on with by 1.
    for (const auto& [before, after] : {std::pair{2, 4}, std::pair{4, 1}}) {
        const std::string name = std::to_string(before) + "then" + std::to_string(after);
        fs::copy(folder / std::to_string(before), folder / name, fs::copy_options::recursive);
        keep_checkpoint(folder / name, 4);
        Arguments arguments = small(folder, name, settings);
        arguments.push_back("--resume");
        expect_success(run(folder, on_ranks(arguments, after)));
        expect_same_run(folder, "one", name);
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, SameBits,
                         testing::Values(Kind{"adamw", "fp32", "fp32"}, Kind{"muon", "fp32", "fp32"},
                                         Kind{"adamw", "bf16", "bf16"}, Kind{"muon", "bf16", "bf16"},
                                         Kind{"adamw", "fp16", "fp32"}, Kind{"muon", "fp16", "bf16"}),
                         [](const auto& tested) {
                             return std::string(tested.param.optimizer) + "_" + tested.param.dtype + "_" +
                                    tested.param.reduce_dtype;
                         });

TEST(Ranks, ThreeRanksAreThreeLeaves) {
    const TempFolder folder;
    const Arguments settings = {"--tokens-per-step", "288", "--virtual-ranks", "3", "--optimizer", "muon"};
    expect_success(run(folder, small(folder, "one", settings)));
    expect_success(run(folder, on_ranks(small(folder, "three", settings), 3)));
    expect_same_run(folder, "one", "three");
}

// Rates that follow the leaves' gradients, whoever computes them; and what they follow is saved. They only
// move after ten steps.
TEST(Ranks, AdaptedRatesAreTheSame) {
    for (const char* optimizer : {"adamw", "muon"}) {
        const TempFolder folder;
        const Arguments settings = {"--optimizer",        optimizer, "--dtype", "bf16",
                                    "--reduce-dtype",     "bf16",    "--steps", "18",
                                    "--checkpoint-every", "12"};
        const auto adapted = [&](const std::string& out) {
            Arguments arguments = small(folder, out, settings);
            arguments.push_back("--lr-adapt");
            return arguments;
        };
        const auto averages = [&](const std::string& out) {
            return json::parse(read_file(folder / (out + "/step_00000018/state.json")))["state"]["lr_adapt"];
        };
        expect_success(run(folder, adapted("one")));
        const json expected = averages("one");
        EXPECT_EQ(expected["steps"], 18);
        for (const int ranks : {2, 4, 8}) {
            const std::string name = std::to_string(ranks);
            expect_success(run(folder, on_ranks(adapted(name), ranks)));
            expect_same_run(folder, "one", name, "/step_00000018");
            EXPECT_EQ(averages(name), expected);
        }
        keep_checkpoint(folder / "2", 12);
        Arguments on_four = on_ranks(adapted("2"), 4);
        on_four.push_back("--resume");
        expect_success(run(folder, on_four));
        expect_same_run(folder, "one", "2", "/step_00000018");
        EXPECT_EQ(averages("2"), expected);
        bool moved = false;
        for (const json& line : log_lines(folder / "one")) {
            if (line["type"] == "train") moved |= line["lr_multiplier"][0] != line["lr_multiplier"][2];
        }
        EXPECT_TRUE(moved);
    }
}

// More ranks than matrices, or than blocks that any of them could own.
TEST(Ranks, MoreRanksThanMatrices) {
    const TempFolder folder;
    const Arguments settings = {"--layers",        "1",  "--tokens-per-step", "624",
                                "--virtual-ranks", "13", "--optimizer",       "muon"};
    expect_success(run(folder, small(folder, "one", settings)));
    expect_success(run(folder, on_ranks(small(folder, "thirteen", settings), 13)));
    expect_same_run(folder, "one", "thirteen");
}

TEST(Ranks, WithoutOverlapTheBitsAreTheSame) {
    const TempFolder folder;
    const Arguments settings = {"--optimizer", "muon", "--dtype", "bf16"};
    expect_success(run(folder, on_ranks(small(folder, "beside", settings), 2)));
    Arguments after = on_ranks(small(folder, "after", settings), 2);
    after.push_back("--no-overlap");
    expect_success(run(folder, after));
    expect_same_run(folder, "beside", "after");
}

// A leaf is rounded whatever the number of ranks, so that bf16 leaves are not fp32 ones even on one rank; and
// the number of leaves is part of what a run computes.
TEST(Ranks, TheReduceDtypeAndTheLeavesCount) {
    const TempFolder folder;
    expect_success(run(folder, small(folder, "fp32")));
    expect_success(run(folder, small(folder, "bf16", {"--reduce-dtype", "bf16"})));
    expect_success(run(folder, small(folder, "four", {"--virtual-ranks", "4"})));
    const auto loss = [&](const char* name) {
        return log_lines(folder / name).back().at("val_loss").get<double>();
    };
    EXPECT_NE(lines_of(folder / "fp32"), lines_of(folder / "bf16"));
    EXPECT_NE(lines_of(folder / "fp32"), lines_of(folder / "four"));
    EXPECT_NEAR(loss("fp32"), loss("bf16"), 0.02);
    EXPECT_NEAR(loss("fp32"), loss("four"), 1e-4);
}

TEST(Ranks, EachMatrixIsOrthogonalizedOnce) {
    const TempFolder folder;
    for (const int ranks : {1, 2, 8}) {
        const std::string name = std::to_string(ranks);
        expect_success(run(folder, on_ranks(small(folder, name, {"--optimizer", "muon"}), ranks)));
        size_t steps = 0;
        for (const json& line : log_lines(folder / name)) {
            if (line["type"] != "train") continue;
            steps++;
            EXPECT_EQ(line["orthogonalized"], 2 * 6) << "matrices of 2 layers";
        }
        EXPECT_EQ(steps, 10u);
    }
}

TEST(Ranks, OtherRanksNeedOtherLeavesToResume) {
    const TempFolder folder;
    expect_success(run(folder, on_ranks(small(folder, "run", {"--tokens-per-step", "1152"}), 2)));
    keep_checkpoint(folder / "run", 4);
    Arguments arguments = small(folder, "run", {"--tokens-per-step", "1152", "--ranks", "3"});
    const auto leaves = std::find(arguments.begin(), arguments.end(), "--virtual-ranks");
    arguments.erase(leaves, leaves + 2);
    arguments.push_back("--resume");
    expect_rejected(folder, arguments, {"--virtual-ranks 8", "3 ranks"});
    arguments.insert(arguments.end(), {"--virtual-ranks", "3"});
    const Result result = run(folder, arguments);
    expect_success(result);
    EXPECT_NE(result.out.find("--virtual-ranks 3, was 8: from here on the bits differ"), std::string::npos)
        << result.out;
}

// ---------------------------------------------------------------------------------------------------
// What is sent

TEST(Traffic, IsWhatThePlanSays) {
    const TempFolder folder;
    const GptConfig config{.layers = 2, .heads = 3, .channels = 48, .seq_len = 24, .vocab_size = 101};
    const ParameterTable table = gpt_parameter_table(config);
    for (const auto& [ranks, leaves] : {std::pair{2, 2}, std::pair{4, 4}, std::pair{2, 8}, std::pair{8, 8}}) {
        const std::string name = std::to_string(ranks) + "of" + std::to_string(leaves);
        expect_success(run(folder, on_ranks(small(folder, name,
                                                  {"--virtual-ranks", std::to_string(leaves), "--dtype",
                                                   "bf16", "--reduce-dtype", "bf16", "--optimizer", "muon"}),
                                            ranks)));
        uint64_t gradients = 0, weights = 0;
        for (int rank = 0; rank < ranks; ++rank) {
            const Ownership ownership = assign_owners(table, OptimizerKind::muon, ranks, rank);
            const StepBytes bytes = step_bytes(
                exchange_plan(table, gpt_stages(config), ownership, ranks, ranks,
                              {.leaves = static_cast<size_t>(leaves), .reduce_dtype = Dtype::bf16}),
                rank, 2);
            gradients += bytes.gradients(), weights += bytes.weights();
            if (rank != 0) continue;
            for (const json& line : log_lines(folder / name)) {
                if (line["type"] != "train") continue;
                EXPECT_EQ(line["bytes_sent_as"]["gradients"], json({bytes.gradients(), 0})) << name;
                EXPECT_EQ(line["bytes_sent_as"]["weights"], json({bytes.weights(), 0})) << name;
            }
        }
        const json done = log_lines(folder / name).back();
        EXPECT_EQ(done["bytes_sent_as"]["gradients"], json({10 * gradients, 0})) << name;
        EXPECT_EQ(done["bytes_sent_as"]["weights"], json({10 * weights, 0})) << name;
    }
}

// ---------------------------------------------------------------------------------------------------
// Launchers

// Ranks as some launcher would start them, each with its own variables and arguments.
struct Started {
    std::vector<pid_t> ranks;
};

int free_port() {
    static int next = 21000 + getpid() % 20000;
    return next++;
}

// With `world` rank 1 is told of that many ranks; with `of_a_node` nodes have so many ranks.
Started start_ranks(const TempFolder& folder, const std::vector<Arguments>& arguments, int world = 0,
                    int of_a_node = 0) {
    const int ranks = static_cast<int>(arguments.size()), port = free_port();
    Started started;
    for (int rank = 0; rank < ranks; ++rank) {
        setenv("RANK", std::to_string(rank).c_str(), 1);
        setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
        if (of_a_node != 0) setenv("GROUP_RANK", std::to_string(rank / of_a_node).c_str(), 1);
        const int size = world != 0 && rank == 1 ? world : ranks;
        setenv("WORLD_SIZE", std::to_string(size).c_str(), 1);
        setenv("LOCAL_WORLD_SIZE", std::to_string(size).c_str(), 1);
        setenv("MASTER_ADDR", "127.0.0.1", 1);
        setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
        started.ranks.push_back(start(folder, arguments[static_cast<size_t>(rank)], RLIM_INFINITY, "",
                                      folder / ("stderr" + std::to_string(rank))));
    }
    for (const char* name :
         {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
        unsetenv(name);
    return started;
}

// Their exit statuses, or -signal; and all that they said on stderr.
std::pair<std::vector<int>, std::string> finish_ranks(const TempFolder& folder, const Started& started) {
    std::vector<int> statuses;
    std::string said;
    for (size_t rank = 0; rank < started.ranks.size(); ++rank) {
        int status = 0;
        waitpid(started.ranks[rank], &status, 0);
        statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
        said += read_file(folder / ("stderr" + std::to_string(rank)));
    }
    return {statuses, said};
}

TEST(Launchers, TorchrunsVariables) {
    const TempFolder folder;
    expect_success(run(folder, small(folder, "one")));
    const auto [statuses, said] =
        finish_ranks(folder, start_ranks(folder, {small(folder, "two"), small(folder, "two")}));
    EXPECT_EQ(statuses, (std::vector<int>{0, 0})) << said;
    EXPECT_EQ(said, "");
    expect_same_run(folder, "one", "two");
}

// 2 nodes of 4 and 4 of 2, as their launcher says: a node adds among itself first, to the same bits, and what
// crosses is as much as the plan says.
TEST(Launchers, NodesAddFirst) {
    const TempFolder folder;
    const Arguments settings = {"--optimizer", "muon", "--dtype", "bf16", "--reduce-dtype", "bf16"};
    expect_success(run(folder, small(folder, "one", settings)));
    const GptConfig config{.layers = 2, .heads = 3, .channels = 48, .seq_len = 24, .vocab_size = 101};
    const ParameterTable table = gpt_parameter_table(config);
    const Ownership ownership = assign_owners(table, OptimizerKind::muon, 8, 0);
    for (const int of_a_node : {4, 2}) {
        const std::string name = "nodes of " + std::to_string(of_a_node);
        const std::vector<Arguments> arguments(8, small(folder, name, settings));
        const auto [statuses, said] = finish_ranks(folder, start_ranks(folder, arguments, 0, of_a_node));
        EXPECT_EQ(statuses, std::vector<int>(8, 0)) << said;
        expect_same_run(folder, "one", name);
        const StepBytes bytes = step_bytes(exchange_plan(table, gpt_stages(config), ownership, 8, of_a_node,
                                                         {.leaves = 8, .reduce_dtype = Dtype::bf16}),
                                           0, 2);
        EXPECT_GT(bytes.gradients_between, 0u);
        for (const json& line : log_lines(folder / name)) {
            if (line["type"] != "train") continue;
            EXPECT_EQ(line["bytes_sent_as"]["gradients"],
                      json({bytes.gradients_within, bytes.gradients_between}));
            EXPECT_EQ(line["bytes_sent_as"]["weights"], json({bytes.weights_within, bytes.weights_between}));
        }
    }
}

TEST(Launchers, Mpirun) {
    if (system("command -v mpirun >/dev/null 2>&1") != 0) GTEST_SKIP() << "mpirun is not installed";
    const TempFolder folder;
    expect_success(run(folder, small(folder, "one")));
    std::string command = "mpirun --allow-run-as-root --oversubscribe -np 4 " + program();
    for (const std::string& argument : small(folder, "four")) command += " '" + argument + "'";
    command += " >" + (folder / "said") + " 2>&1";
    EXPECT_EQ(system(command.c_str()), 0) << read_file(folder / "said");
    expect_same_run(folder, "one", "four");
}

TEST(Launchers, RanksThatDoNotFitAreRefused) {
    const TempFolder folder;
    expect_rejected(folder, on_ranks(small(folder, "out"), 3), {"--virtual-ranks 8", "3 ranks"});
    expect_rejected(folder, on_ranks(small(folder, "out", {"--virtual-ranks", "3"}), 2),
                    {"--virtual-ranks 3"});
    expect_rejected(folder, on_ranks(small(folder, "out", {"--tokens-per-step", "48"}), 2),
                    {"--tokens-per-step 48", "virtual ranks"});
    expect_rejected(folder, small(folder, "out", {"--virtual-ranks", "2048"}), {"--virtual-ranks"});
    EXPECT_FALSE(fs::exists(folder / "out/log.jsonl"));
}

// ---------------------------------------------------------------------------------------------------
// Ranks that fail. Each of these ends within seconds, all ranks with a status that is not 0, and one line.

void expect_one_line(const std::string& said, const std::vector<std::string>& words) {
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    for (const std::string& word : words)
        EXPECT_NE(said.find(word), std::string::npos) << word << " in: " << said;
}

TEST(Failures, ARankWithAnotherOption) {
    const TempFolder folder;
    const auto [statuses, said] = finish_ranks(
        folder, start_ranks(folder, {small(folder, "out"), small(folder, "out", {"--lr", "0.5"})}));
    EXPECT_EQ(statuses, (std::vector<int>{1, 1}));
    expect_one_line(said, {"rank 1", "--lr 0.5", "0.003"});
}

TEST(Failures, ARankWithABadOption) {
    const TempFolder folder;
    for (const int bad : {0, 1, 2}) {
        std::vector<Arguments> arguments(
            3, small(folder, "out", {"--virtual-ranks", "3", "--tokens-per-step", "432"}));
        arguments[static_cast<size_t>(bad)].insert(arguments[static_cast<size_t>(bad)].end(),
                                                   {"--heads", "seven"});
        const auto [statuses, said] = finish_ranks(folder, start_ranks(folder, arguments));
        EXPECT_EQ(statuses, (std::vector<int>{1, 1, 1}));
        expect_one_line(said, {"seven"});
        if (bad > 0) expect_one_line(said, {"rank " + std::to_string(bad)});
    }
}

TEST(Failures, ARankWithOtherData) {
    const TempFolder folder;
    const Arguments good = small(folder, "out");
    write_shard(folder / "other_train_000.bin", 1500, 101, 7);
    const auto [statuses, said] = finish_ranks(
        folder,
        start_ranks(folder, {good, small(folder, "out", {"--train-data", folder / "other_train_*.bin"})}));
    EXPECT_EQ(statuses, (std::vector<int>{1, 1}));
    expect_one_line(said, {"rank 1", "--train-data"});
}

TEST(Failures, AFolderThatIsNotShared) {
    const TempFolder folder;
    const Arguments arguments = small(folder, "out");
    Arguments elsewhere = arguments;
    *(std::find(elsewhere.begin(), elsewhere.end(), "--out") + 1) = folder / "other";
    const auto [statuses, said] = finish_ranks(folder, start_ranks(folder, {arguments, elsewhere}));
    EXPECT_EQ(statuses, (std::vector<int>{1, 1}));
    expect_one_line(said, {"rank 1", "--out"});
    EXPECT_TRUE(checkpoints(folder / "out").empty());
}

TEST(Failures, WorldSizesThatDiffer) {
    const TempFolder folder;
    const auto [statuses, said] =
        finish_ranks(folder, start_ranks(folder, {small(folder, "out"), small(folder, "out")}, 4));
    EXPECT_EQ(statuses, (std::vector<int>{1, 1}));
    expect_one_line(said, {"4"});
}

// One of `ranks` ranks is sent a signal in the middle of training; returns what is said on stderr.
std::string strike(const TempFolder& folder, const std::string& out, int ranks, int victim, int signal_number,
                   const Arguments& more = {}) {
    Arguments arguments =
        small(folder, out, {"--steps", "1000000", "--val-every", "0", "--checkpoint-every", "3"});
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Started started =
        start_ranks(folder, std::vector<Arguments>(static_cast<size_t>(ranks), arguments));
    wait_for(folder / (out + "/log.jsonl"), "\"step\":7,");
    kill(started.ranks[static_cast<size_t>(victim)], signal_number);
    const auto begin = std::chrono::steady_clock::now();
    if (signal_number == SIGSTOP) {  // a stopped process is not ended by a closed connection
        std::this_thread::sleep_for(std::chrono::seconds(8));
        kill(started.ranks[static_cast<size_t>(victim)], SIGKILL);
    }
    const auto [statuses, said] = finish_ranks(folder, started);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
    for (const int status : statuses) EXPECT_NE(status, 0);
    return said;
}

TEST(Failures, AnyRankIsKilled) {
    const TempFolder folder;
    for (const int victim : {0, 1, 2, 3}) {
        const std::string out = "run" + std::to_string(victim);
        expect_one_line(strike(folder, out, 4, victim, SIGKILL), {"rank " + std::to_string(victim)});
        // The last checkpoint is whole, and another number of ranks goes on from it.
        const std::vector<uint64_t> saved = checkpoints(folder / out);
        ASSERT_FALSE(saved.empty());
        Arguments arguments = small(folder, out, {"--steps", std::to_string(saved.back() + 2)});
        arguments.push_back("--resume");
        expect_success(run(folder, on_ranks(arguments, 2)));
    }
}

TEST(Failures, ARankHangs) {
    const TempFolder folder;
    expect_one_line(strike(folder, "one", 2, 1, SIGSTOP, {"--timeout", "3"}), {"rank 1", "3"});
    expect_one_line(strike(folder, "zero", 2, 0, SIGSTOP, {"--timeout", "3"}), {"rank 0", "3"});
}

// SIGTERM to any one rank, or to the supervisor: all finish the step, save once and end with 0.
TEST(Failures, AStopSignalToOneRankStopsAll) {
    const TempFolder folder;
    for (const int victim : {0, 1}) {
        const std::string out = "run" + std::to_string(victim);
        const Arguments arguments = small(folder, out, {"--steps", "1000000", "--val-every", "0"});
        const Started started = start_ranks(folder, {arguments, arguments});
        wait_for(folder / (out + "/log.jsonl"), "\"step\":5,");
        kill(started.ranks[static_cast<size_t>(victim)], SIGTERM);
        const auto [statuses, said] = finish_ranks(folder, started);
        EXPECT_EQ(statuses, (std::vector<int>{0, 0})) << said;
        const json last = log_lines(folder / out).back();
        EXPECT_EQ(checkpoints(folder / out).back(), last["step"]);
    }
    const pid_t supervisor =
        start(folder, on_ranks(small(folder, "supervised", {"--steps", "1000000", "--val-every", "0"}), 2));
    wait_for(folder / "supervised/log.jsonl", "\"step\":5,");
    kill(supervisor, SIGTERM);
    expect_success(finish(folder, supervisor));
    EXPECT_EQ(checkpoints(folder / "supervised").back(), log_lines(folder / "supervised").back()["step"]);
}

}  // namespace
