// The page dev/scaling.md: what a step of GPT-2 should take on 8, 64 and 1,024 GPUs, by arithmetic. Bytes
// come from the plan that the program sends by, FLOPs from the model's and Newton-Schulz's own counts, owners
// from the program's layout; the speeds below are assumed, as shares of what data sheets say.
//
//   build/cpu/bench_scaling > dev/scaling.md
#include <algorithm>
#include <cstdio>
#include <vector>

#include "cli/console.h"
#include "dist/data_parallel.h"
#include "dist/layout.h"
#include "model/gpt.h"
#include "optim/optimizer.h"

namespace {

// An H100 or H200 in nodes of 8.
constexpr int ranks_of_a_node = 8;
constexpr double model_flops = 495e12;  // half of the dense bf16 peak, 989 TFLOP/s
constexpr double newton_schulz_flops_rate = 495e12;
constexpr double memory_bytes = 4.0e12;  // of 4.8 TB/s (H200)
constexpr double node_bytes = 360e9;     // of NVLink's 450 GB/s each way
constexpr double network_bytes = 40e9;   // of one 400 Gb/s port a GPU
constexpr double value_seconds = 10e-6;  // rank 0 hears and answers one rank
constexpr size_t T = 1024, rows = 64;    // tokens of a GPU and step: 65,536

struct Times {
    double forward, backward, update, gradients, weights, values;

    // Gradients travel beside the backward but for its last stage, weights beside the next forward.
    double step(size_t stages) const {
        const double hidden = backward * static_cast<double>(stages - 1) / static_cast<double>(stages);
        return forward + backward + update + values + std::max(0.0, gradients - hidden) +
               std::max(0.0, weights - forward);
    }
};

// The busiest link decides: what a rank sends, and what comes to it from all others.
struct Load {
    double within = 0, between = 0;
};

Times times_of(const GptConfig& config, OptimizerKind kind, int ranks) {
    const ParameterTable table = gpt_parameter_table(config);
    const std::vector<ParameterRange> stages = gpt_stages(config);
    OptimizerConfig settings;
    settings.kind = kind;
    const Optimizer optimizer = optimizer_plan(settings, table);
    const int group = std::min(ranks, ranks_of_a_node), groups = ranks / group;

    std::vector<Load> gradients(static_cast<size_t>(ranks)), weights(gradients.size());
    std::vector<double> update(gradients.size());
    const Ownership ownership = assign_owners(table, kind, ranks, 0);
    const ExchangePlan plan =
        exchange_plan(table, stages, ownership, ranks, group,
                      {.leaves = static_cast<size_t>(ranks), .reduce_dtype = Dtype::bf16});
    for (int rank = 0; rank < ranks && ranks > 1; rank++) {
        const StepBytes sent = step_bytes(plan, rank, 2);
        Load &g = gradients[static_cast<size_t>(rank)], &w = weights[static_cast<size_t>(rank)];
        g = {static_cast<double>(sent.gradients_within), static_cast<double>(sent.gradients_between)};
        w = {static_cast<double>(sent.weights_within), static_cast<double>(sent.weights_between)};
    }
    std::vector<double> owned(gradients.size()), owned_at(static_cast<size_t>(group));
    for_blocks(table, [&](const Parameter& parameter, const Block& block, size_t number) {
        const auto owner = static_cast<size_t>(ownership.owner[number]);
        const auto elements = static_cast<double>(block.rows * parameter.cols);
        owned[owner] += elements;
        owned_at[owner % static_cast<size_t>(group)] += elements;
        const bool muon = kind == OptimizerKind::muon && parameter.group == ParameterGroup::muon;
        // Bytes of the update: gradient, state and master read, state, master and weight written.
        update[owner] += elements * (muon ? 22 : 30) / memory_bytes;
        if (muon) {
            update[owner] += newton_schulz_flops(optimizer.newton_schulz, block.rows, parameter.cols) /
                             newton_schulz_flops_rate;
        }
    });
    const double all = static_cast<double>(table_elements(table));
    double gradient_time = 0, weight_time = 0;
    for (int rank = 0; rank < ranks && ranks > 1; rank++) {
        const auto r = static_cast<size_t>(rank);
        const double here = owned_at[r % static_cast<size_t>(group)];  // what this rank adds up for its group
        const Load come = {2 * here * (group - 1), 4 * owned[r] * (groups - 1)};
        const Load weights_come = {2 * (all - here), 2 * (here - owned[r])};
        const auto time = [](const Load& load) {
            return load.within / node_bytes + load.between / network_bytes;
        };
        gradient_time = std::max({gradient_time, time(gradients[r]), time(come)});
        weight_time = std::max({weight_time, time(weights[r]), time(weights_come)});
    }
    const double compute = gpt_flops_per_token(config, T) * rows * T / model_flops;
    return {compute / 3,   2 * compute / 3, *std::max_element(update.begin(), update.end()),
            gradient_time, weight_time,     ranks == 1 ? 0 : 3 * value_seconds * (ranks - 1)};
}

// What a rank sends in a step, on average: the plan's count on one node.
void print_bytes() {
    printf(
        "## Bytes a rank and step\n\nOn one node, bf16 training, from the same plan: with as many leaves "
        "as ranks "
        "the\ngradients travel in `--reduce-dtype`; with more, sums of leaves travel in fp32.\n\n"
        "| model | optimizer | ranks | gradients, bf16 leaves | fp32 leaves or sums | weights | 4 (P-1)/P "
        "N |\n"
        "|---|---|---|---|---|---|---|\n");
    for (const char* name : {"d12", "d24", "d36", "d48"}) {
        GptConfig config;
        gpt_preset(name, config);
        const ParameterTable table = gpt_parameter_table(config);
        size_t N = 0;
        for (const Parameter& parameter : table) N += parameter.size();
        for (const OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::muon}) {
            for (const size_t P : {2, 4, 8}) {
                const int ranks_ = static_cast<int>(P);
                uint64_t bf16 = 0, fp32 = 0, weights = 0;
                for (int rank = 0; rank < ranks_; rank++) {
                    const Ownership ownership = assign_owners(table, kind, ranks_, rank);
                    const auto bytes = [&](Dtype dtype) {
                        const ExchangePlan plan = exchange_plan(table, gpt_stages(config), ownership, ranks_,
                                                                ranks_, {.leaves = P, .reduce_dtype = dtype});
                        return step_bytes(plan, rank, 2);
                    };
                    bf16 += bytes(Dtype::bf16).gradients();
                    fp32 += bytes(Dtype::fp32).gradients();
                    weights += bytes(Dtype::fp32).weights();
                }
                printf("| %s | %s | %zu | %s | %s | %s | %s |\n", name,
                       kind == OptimizerKind::adamw ? "AdamW" : "Muon", P, with_commas(bf16 / P).c_str(),
                       with_commas(fp32 / P).c_str(), with_commas(weights / P).c_str(),
                       with_commas(4 * (P - 1) * N / P).c_str());
            }
        }
    }
}

}  // namespace

int main() {
    printf(
        "# Expected scaling\n\n"
        "Computed by `build/cpu/bench_scaling`, not measured: no run of muGPT on several GPUs has been "
        "timed\n"
        "yet. Bytes, FLOPs and owners are the program's own; the speeds are assumptions, of H100s or "
        "H200s in\n"
        "nodes of %d: %.0f TFLOP/s in the model and %.0f in Newton-Schulz, %.1f TB/s of memory, %.0f GB/s\n"
        "within a node, %.0f GB/s a GPU between nodes, %.0f us for rank 0 to hear one rank. Each GPU has\n"
        "%s tokens of a step, whatever their number; weights and gradients travel in bf16, sums of a node\n"
        "in fp32. Gradients hide behind the backward, weights behind the next forward; what does not fit "
        "there\n"
        "is exposed.\n\n",
        ranks_of_a_node, model_flops / 1e12, newton_schulz_flops_rate / 1e12, memory_bytes / 1e12,
        node_bytes / 1e9, network_bytes / 1e9, value_seconds * 1e6, with_commas(rows * T).c_str());
    printf(
        "| model | optimizer | GPUs | step ms | update ms | gradients ms | weights ms | values ms | "
        "exposed ms "
        "| efficiency | to AdamW |\n|---|---|---|---|---|---|---|---|---|---|---|\n");
    for (const char* name : {"d12", "d24", "d36", "d48"}) {
        GptConfig config;
        gpt_preset(name, config);
        for (const int ranks : {1, 8, 64, 1024}) {
            double adamw = 0;
            for (const OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::muon}) {
                const size_t stages = config.layers + 2;
                const Times one = times_of(config, kind, 1), t = times_of(config, kind, ranks);
                const double step = t.step(stages);
                if (kind == OptimizerKind::adamw) adamw = step;
                const double exposed = std::max(0.0, step - t.forward - t.backward - t.update - t.values);
                printf("| %s | %s | %s | %.1f | %.2f | %.1f | %.1f | %.2f | %.1f | %.1f %% | %.1f %% |\n",
                       name, kind == OptimizerKind::adamw ? "AdamW" : "Muon",
                       with_commas(static_cast<uint64_t>(ranks)).c_str(), 1e3 * step, 1e3 * t.update,
                       1e3 * t.gradients, 1e3 * t.weights, 1e3 * t.values, 1e3 * exposed,
                       100 * one.step(stages) / step, 100 * adamw / step);
            }
        }
    }
    printf(
        "\nThe efficiency is of weak scaling: the time of one GPU with its share of the tokens over that of\n"
        "all. An owner updates and orthogonalizes for everyone (ZeRO stage 1), so that the update shrinks "
        "with the\n"
        "GPUs until there are more of them than matrices; from there on the largest matrix decides, and so\n"
        "does what comes to its owner. At 1,024 GPUs the values, which go through rank 0, are what should "
        "be mended\n"
        "first.\n\n");
    print_bytes();
}
