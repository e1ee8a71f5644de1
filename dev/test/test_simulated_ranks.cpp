// Ranks on GPUs, in the simulator: a step's forward, backward, reduction, update and gathering of weights
// over NCCL, on streams that wait for each other by events only. The ranks are threads of this process, each
// with a device of its own (CUDASIM_DEVICES=4). Whatever the order of streams, the number of ranks and the
// overlap, the bits must be the same; a wait that is missing is the simulator's to report.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "dev/cudasim/cudasim.h"
#include "dist/data_parallel.h"
#include "dist/launcher.h"
#include "dist/layout.h"
#include "kernels/error.h"
#include "kernels/random.h"
#include "kernels/tree.h"
#include "model/gpt.h"
#include "optim/grad_clip.h"
#include "optim/optimizer.h"

namespace {

// What a run is, and what rank 0 leaves of it.
struct Setting {
    OptimizerKind optimizer = OptimizerKind::muon;
    Dtype reduce_dtype = Dtype::bf16;
    bool overlap = true;
    size_t leaves = 4;
};
struct Outcome {
    std::vector<double> losses, norms;
    std::vector<std::vector<double>> leaf_squares;  // of each step
    std::vector<uint16_t> weights;

    bool operator==(const Outcome&) const = default;
};

// launch_ranks passes texts only, and the ranks are threads of this process.
Setting setting;
Outcome outcome;

constexpr size_t B = 1, T = 17, steps = 3;
const GptConfig config{.layers = 2, .heads = 1, .channels = 64, .seq_len = T, .vocab_size = 120};

void micro_batch(uint64_t index, std::vector<int>& tokens, std::vector<int>& targets) {
    for (size_t i = 0; i < B * T; ++i) {
        const auto bits = random_bits(7, RandomStream::shuffle, static_cast<uint32_t>(index), i);
        tokens[i] = static_cast<int>(bits[0] % config.vocab_size);
        targets[i] = static_cast<int>((bits[0] * 5 + 1) % config.vocab_size);
    }
}

// Trains as train_gpt does, in bf16.
void train_rank(Comm* comm, int device) {
    Stream* stream = stream_create({.index = device});
    comm_open_transport(comm, stream);
    const ParameterTable table = gpt_parameter_table(config);
    OptimizerConfig optimizer_config;
    optimizer_config.kind = setting.optimizer;
    const Ownership ownership = assign_owners(table, setting.optimizer, comm_ranks(comm), comm_rank(comm));
    Optimizer optimizer = optimizer_create(optimizer_config, table, stream, &ownership);
    Gpt<bf16_t> model =
        gpt_create<bf16_t>(config, B, T, true, Recompute::none,
                           optimizer_minimum_workspace(optimizer) * sizeof(float), stream, &ownership);
    gpt_initialize(model, 1, stream);
    DataParallel parallel = data_parallel_create(
        comm, table, gpt_stages(config), ownership,
        {setting.leaves, setting.reduce_dtype, setting.overlap, true}, {.index = device}, stream);
    auto* sums = static_cast<double*>(device_malloc(table_blocks(table) * sizeof(double), stream));
    std::vector<int> tokens(B * T), targets(B * T);
    GptHooks hooks;
    hooks.before_forward = [&](size_t stage) { await_weights(parallel, stage); };
    Outcome result;
    for (size_t step = 0; step < steps; ++step) {
        std::vector<double> losses(setting.leaves);
        for (size_t leaf = 0; leaf < parallel.own_leaves; ++leaf) {
            const size_t number = parallel.first_leaf + leaf;
            const bool last = leaf + 1 == parallel.own_leaves;
            if (last)
                hooks.after_backward = [&](size_t stage) { reduce_stage(parallel, stage, model.grads); };
            device_memset_zero(model.grads, model.grads_bytes, stream);
            micro_batch(number, tokens, targets);  // the same in every step: they are learnt
            losses[number] =
                gpt_forward_backward(model, tokens.data(), targets.data(), B, T,
                                     1.0f / static_cast<float>(setting.leaves * B * T), stream, hooks);
            if (!last) keep_leaf(parallel, leaf, model.grads);
            hooks.after_backward = nullptr;
        }
        finish_reduction(parallel);
        std::vector<double> squares = block_squares(model.grads, table, ownership, sums, stream);
        comm_sum(comm, squares.data(), squares.size());
        comm_sum(comm, losses.data(), losses.size());
        const std::vector<double> own = own_leaf_squares(parallel);
        const auto ranks = static_cast<size_t>(comm_ranks(comm)), rank = static_cast<size_t>(comm_rank(comm));
        std::vector<double> of_ranks(ranks * own.size());
        std::copy(own.begin(), own.end(), of_ranks.begin() + static_cast<std::ptrdiff_t>(rank * own.size()));
        comm_sum(comm, of_ranks.data(), of_ranks.size());
        result.leaf_squares.push_back(sum_leaf_squares(of_ranks, ranks));
        result.norms.push_back(global_grad_norm(squares));
        result.losses.push_back(tree_fold<double>(static_cast<unsigned>(setting.leaves),
                                                  [&](unsigned leaf) { return losses[leaf]; }));
        optimizer_step<bf16_t>(
            optimizer, model.params, model.master, model.grads, 3e-3f, clip_factor(result.norms.back(), 1),
            reinterpret_cast<float*>(model.activations), model.activations_bytes / sizeof(float), stream);
        gather_weights(parallel, model.params);
    }
    await_all_weights(parallel);
    std::vector<bf16_t> weights(table_elements(table));
    copy_to_host(weights.data(), model.params, weights.size() * sizeof(bf16_t), stream);
    for (const bf16_t weight : weights) result.weights.push_back(weight.bits);
    if (comm_rank(comm) == 0) outcome = result;

    device_free(sums, stream);
    data_parallel_destroy(parallel);
    gpt_destroy(model, stream);
    optimizer_destroy(optimizer, stream);
    comm_disconnect(comm);
    stream_destroy(stream);
}

void report(const std::string& line) { fprintf(stderr, "%s\n", line.c_str()); }

int rank_main(const RankEnvironment& environment, const std::vector<std::string>&) {
    Comm* comm = comm_connect(environment, 60, report);
    try {
        train_rank(comm, environment.local_rank);
        return 0;
    } catch (const std::exception& error) {
        comm_abort(comm, error.what());
    }
}

Outcome train(int ranks, const Setting& wanted, uint64_t seed = 0) {
    cudasim::set_seed(seed);
    setting = wanted;
    outcome = {};
    EXPECT_EQ(launch_ranks(ranks, {}, rank_main, report), 0);
    EXPECT_EQ(outcome.losses.size(), steps);
    return outcome;
}

TEST(Ranks, TheSameBits) {
    for (const auto& [optimizer, wire] :
         {std::pair{OptimizerKind::muon, Dtype::bf16}, std::pair{OptimizerKind::adamw, Dtype::fp32}}) {
        const Setting with{optimizer, wire, true, 4};
        const Outcome one = train(1, with);
        EXPECT_LT(one.losses.back(), one.losses.front());
        for (const int ranks : {2, 4}) EXPECT_EQ(train(ranks, with, 1), one) << ranks << " ranks";
    }
}

TEST(Ranks, TheSameBitsWithoutOverlapAndInAnyOrderOfStreams) {
    const Outcome expected = train(2, {OptimizerKind::muon, Dtype::bf16, true, 2});
    for (const bool overlap : {true, false}) {
        for (const uint64_t seed : {1, 2, 3}) {
            EXPECT_EQ(train(2, {OptimizerKind::muon, Dtype::bf16, overlap, 2}, seed), expected)
                << "overlap " << overlap << ", seed " << seed;
        }
    }
}

}  // namespace
