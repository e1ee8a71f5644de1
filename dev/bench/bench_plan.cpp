// What a run takes, by plan and without taking it: bytes of each arena, the largest micro-batch that a memory
// holds, and the bytes that a rank sends in a step. From the very plans that the program allocates and sends
// by, so that models that do not fit this machine can be counted too. Prints one JSON object.
//
//   bench_plan --memory 24 -- --model d48 --optimizer muon --dtype bf16 ...     (train_gpt's options)
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/options.h"
#include "dev/bench/shape_of.h"
#include "dist/data_parallel.h"
#include "dist/layout.h"
#include "kernels/error.h"
#include "model/gpt.h"
#include "optim/optimizer.h"

namespace {

using nlohmann::json;

struct Settings {
    std::vector<std::string> options;
    std::vector<size_t> memories = {8, 16, 24, 48, 80, 141};  // GiB
    std::vector<size_t> ranks = {2, 4, 8};
};

// The model's arenas and the optimizer's state; the ops' scratch, which depends on the device, is left out.
template <typename Storage>
Gpt<Storage> plan_of(const TrainOptions& o, const Optimizer& optimizer, size_t batch_size) {
    const GptConfig config = shape_of(o);
    return gpt_plan<Storage>(config, batch_size, config.seq_len, true, o.recompute,
                             optimizer_minimum_workspace(optimizer) * sizeof(float));
}

template <typename Storage>
size_t all_bytes(const Gpt<Storage>& plan, const Optimizer& optimizer) {
    return plan.params_bytes + plan.master_bytes + plan.grads_bytes + plan.activations_bytes +
           optimizer_state_bytes(optimizer);
}

// The most rows of a micro-batch; 0 where one row does not fit.
template <typename Storage>
size_t largest_batch(const TrainOptions& o, const Optimizer& optimizer, size_t bytes) {
    size_t fits = 0, too_many = 1;
    while (all_bytes(plan_of<Storage>(o, optimizer, too_many), optimizer) <= bytes) {
        fits = too_many;
        too_many *= 2;
    }
    while (too_many - fits > 1) {
        const size_t middle = (fits + too_many) / 2;
        if (all_bytes(plan_of<Storage>(o, optimizer, middle), optimizer) <= bytes) {
            fits = middle;
        } else {
            too_many = middle;
        }
    }
    return fits;
}

// Bytes that a rank sends in a step, the mean over the ranks of one node, a leaf each.
json traffic(const TrainOptions& o, const GptConfig& config, const ParameterTable& table, int ranks) {
    const ExchangePlan plan =
        exchange_plan(table, gpt_stages(config), assign_owners(table, o.optimizer.kind, ranks, 0), ranks,
                      ranks, {.leaves = static_cast<size_t>(ranks), .reduce_dtype = o.reduce_dtype});
    uint64_t gradients = 0, weights = 0;
    for (int rank = 0; rank < ranks; rank++) {
        const StepBytes bytes = step_bytes(plan, rank, dtype_size(o.dtype));
        gradients += bytes.gradients();
        weights += bytes.weights();
    }
    const auto P = static_cast<uint64_t>(ranks);
    return {{"gradients", gradients / P}, {"weights", weights / P}};
}

template <typename Storage>
void run(const Settings& settings, const TrainOptions& o) {
    const GptConfig config = shape_of(o);
    const ParameterTable table = gpt_parameter_table(config);
    const Optimizer optimizer = optimizer_plan(o.optimizer, table);
    const Gpt<Storage> plan = plan_of<Storage>(o, optimizer, o.batch_size);
    json result = {{"parameters", gpt_parameter_count(table)},
                   {"params_bytes", plan.params_bytes},
                   {"master_bytes", plan.master_bytes},
                   {"grads_bytes", plan.grads_bytes},
                   {"activations_bytes", plan.activations_bytes},
                   {"optimizer_state_bytes", optimizer_state_bytes(optimizer)},
                   {"all_bytes", all_bytes(plan, optimizer)}};
    for (const size_t memory : settings.memories) {
        result["largest_batch"][std::to_string(memory)] = largest_batch<Storage>(o, optimizer, memory << 30);
    }
    for (const size_t ranks : settings.ranks)
        result["traffic"][std::to_string(ranks)] = traffic(o, config, table, static_cast<int>(ranks));
    printf("%s\n", result.dump().c_str());
}

}  // namespace

int main(int argc, char** argv) {
    Settings settings;
    CLI::App app("What a run takes, by plan: memory and traffic.", "bench_plan");
    app.add_option("--memory", settings.memories, "memories of a device, in GiB");
    app.add_option("--ranks", settings.ranks, "numbers of ranks");
    app.add_option("options", settings.options, "train_gpt's options, after --");
    CLI11_PARSE(app, argc, argv);
    try {
        const TrainOptions o = parse_train(settings.options).options;
        if (o.dtype == Dtype::fp32) {
            run<float>(settings, o);
        } else {
            run<bf16_t>(settings, o);  // as large as fp16
        }
    } catch (const Error& error) {
        fprintf(stderr, "bench_plan: %s\n", error.what());
        return 1;
    }
    return 0;
}
