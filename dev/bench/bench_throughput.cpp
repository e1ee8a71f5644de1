// AdamW against Muon, and Muon's variants, on the real training step: forward and backward over the step's
// micro-batches, clipping, update, in one process. Each contender has its own model and optimizer; all see
// the same data from the same seed. They take turns, a block of steps each, in an order that is reversed from
// one round to the next, so that a machine that slows down slows down for all. The numbers of every block go
// to
// --json; scripts/reproduce_98.sh judges them.
//
//   bench_throughput --contender "adamw: --optimizer adamw" --contender "muon: --optimizer muon"
//       --difficulty 1 --json FILE -- --train-data GLOB --layers 4 ...     (train_gpt's options)
//
// --difficulty X chooses the tokens of a step: X times those for which dense Newton-Schulz, five steps of
// Polar Express with q, k and v apart, is 5 % of the model's FLOPs.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cli/options.h"
#include "cli/version.h"
#include "data/loader.h"
#include "dev/bench/shape_of.h"
#include "dev/bench/timing.h"
#include "dist/layout.h"
#include "kernels/device.h"
#include "kernels/error.h"
#include "kernels/matmul_ceiling.h"
#include "model/gpt.h"
#include "optim/grad_clip.h"
#include "optim/loss_scaler.h"
#include "optim/optimizer.h"

namespace {

using nlohmann::json;

constexpr double equal_difficulty = 0.05;  // Newton-Schulz's share in NVIDIA's runs: 51/1029 and 35/686

struct Settings {
    std::vector<std::string> contenders;  // "name: options"
    std::vector<std::string> common;      // options of all
    double difficulty = 0;                // 0: --tokens-per-step says it
    int blocks = 5;
    double block_seconds = 0;  // a block has at least one step
    std::string json_file;
};

template <typename Storage>
struct Contender {
    std::string name, options;
    TrainOptions o;
    Gpt<Storage> model;
    Optimizer optimizer;
    LossScaler scaler;
    double* norm_sums = nullptr;
    uint64_t micro_batches = 0;
    uint64_t skipped = 0;
    double loss = 0;                                 // of the last step
    double newton_schulz_flops = 0;                  // a step
    std::vector<double> seconds, optimizer_seconds;  // a step, in each block
};

// "name: options" as the name, the options, and all options as train_gpt would parse them.
TrainOptions parse_contender(const Settings& settings, const std::string& text, std::string& name,
                             std::string& options) {
    const size_t colon = text.find(": ");
    if (colon == std::string::npos) fail("--contender %s: must be \"name: options\"", text.c_str());
    name = text.substr(0, colon);
    options = text.substr(colon + 2);
    std::vector<std::string> arguments = settings.common;
    std::istringstream words(options);
    for (std::string word; words >> word;) arguments.push_back(word);
    return parse_train(arguments).options;
}

double newton_schulz_flops(const Optimizer& optimizer) {
    double flops = 0;
    for (const OptimizerSlot& slot : optimizer.slots) {
        if (slot.muon)
            flops += newton_schulz_flops(optimizer.newton_schulz, slot.block.rows, slot.parameter->cols);
    }
    return flops;
}

// What equal difficulty is defined by.
double dense_newton_schulz_flops(GptConfig config) {
    config.split_qkv = true;
    config.qk_group_heads = 0;
    OptimizerConfig muon;
    muon.kind = OptimizerKind::muon;
    muon.muon_ns = "polar-express";
    muon.muon_ns_variant = NewtonSchulzVariant::dense;
    const ParameterTable table = gpt_parameter_table(config);
    return newton_schulz_flops(optimizer_plan(muon, table));
}

template <typename Storage>
Contender<Storage> create(const TrainOptions& o, Stream* stream) {
    Contender<Storage> c;
    c.o = o;
    const GptConfig config = shape_of(o);
    const ParameterTable table = gpt_parameter_table(config);
    const Ownership ownership = assign_owners(table, o.optimizer.kind, 1, 0);
    const size_t workspace = optimizer_minimum_workspace(optimizer_plan(o.optimizer, table, &ownership));
    c.model = gpt_create<Storage>(config, o.batch_size, config.seq_len, true, o.recompute,
                                  workspace * sizeof(float), stream, &ownership);
    gpt_initialize(c.model, o.seed, stream);
    c.optimizer = optimizer_create(o.optimizer, c.model.table, stream, &ownership);
    c.norm_sums = static_cast<double*>(device_malloc(table_blocks(c.model.table) * sizeof(double), stream));
    c.scaler = o.dtype == Dtype::fp16 ? LossScaler{} : loss_scaler_fixed(1);
    c.newton_schulz_flops = newton_schulz_flops(c.optimizer);
    return c;
}

// One training step as train_gpt takes it on one rank, at a constant learning rate. Returns the seconds of
// the whole and of its optimizer: norm, clipping and update.
template <typename Storage>
std::pair<double, double> train_step(Contender<Storage>& c, const Loader& loader, size_t micro_batches,
                                     Stream* stream) {
    Gpt<Storage>& model = c.model;
    std::vector<int> inputs(model.B * model.T), targets(model.B * model.T);
    const double tokens = static_cast<double>(micro_batches * model.B * model.T), start = now_seconds();
    const float scale = c.scaler.scale;
    device_memset_zero(model.grads, model.grads_bytes, stream);
    double loss_sum = 0;
    for (size_t i = 0; i < micro_batches; i++) {
        loader_batch(loader, c.micro_batches++, inputs.data(), targets.data());
        loss_sum += gpt_forward_backward(model, inputs.data(), targets.data(), model.B, model.T,
                                         scale / static_cast<float>(tokens), stream);
    }
    stream_synchronize(stream);
    const double backward_done = now_seconds();
    const double norm =
        global_grad_norm(block_squares(model.grads, model.table, model.ownership, c.norm_sums, stream)) /
        scale;
    loss_scaler_update(c.scaler, std::isfinite(norm));
    if (std::isfinite(norm)) {
        optimizer_step<Storage>(c.optimizer, model.params, model.master, model.grads,
                                static_cast<float>(c.o.schedule.lr), clip_factor(norm, c.o.grad_clip) / scale,
                                reinterpret_cast<float*>(model.activations),
                                model.activations_bytes / sizeof(float), stream);
    } else {
        c.skipped++;
    }
    stream_synchronize(stream);
    c.loss = loss_sum / tokens;
    return {now_seconds() - start, now_seconds() - backward_done};
}

template <typename Storage>
void run_block(Contender<Storage>& c, const Loader& loader, size_t micro_batches, size_t steps,
               Stream* stream) {
    double seconds = 0, optimizer = 0;
    for (size_t i = 0; i < steps; i++) {
        const auto [all, update] = train_step(c, loader, micro_batches, stream);
        seconds += all;
        optimizer += update;
    }
    c.seconds.push_back(seconds / static_cast<double>(steps));
    c.optimizer_seconds.push_back(optimizer / static_cast<double>(steps));
}

template <typename Storage>
json contender_json(const Contender<Storage>& c) {
    return {{"name", c.name},
            {"options", c.options},
            {"newton_schulz_flops", c.newton_schulz_flops},
            {"optimizer_state_bytes", optimizer_state_bytes(c.optimizer)},
            {"skipped", c.skipped},
            {"loss", c.loss},
            {"seconds", c.seconds},
            {"optimizer_seconds", c.optimizer_seconds}};
}

template <typename Storage>
void print_table(const std::vector<Contender<Storage>>& contenders, double flops_per_token, double tokens) {
    printf("%-22s %10s %8s %8s %12s %9s %9s\n", "contender", "step ms", "least", "most", "optimizer ms",
           "N.-S. %", "of first");
    const double first = median(contenders.front().seconds);
    for (const Contender<Storage>& c : contenders) {
        const auto [least, most] = std::minmax_element(c.seconds.begin(), c.seconds.end());
        printf("%-22s %10.1f %8.1f %8.1f %12.2f %9.3f %9.4f\n", c.name.c_str(), 1e3 * median(c.seconds),
               1e3 * *least, 1e3 * *most, 1e3 * median(c.optimizer_seconds),
               100 * c.newton_schulz_flops / (flops_per_token * tokens), first / median(c.seconds));
    }
}

template <typename Storage>
void run(const Settings& settings) {
    std::string name, options;
    const TrainOptions first = parse_contender(settings, settings.contenders.front(), name, options);
    Stream* stream = stream_create({.threads = first.threads, .tf32 = first.tf32});
    const double ceiling = measure_matmul_ceiling<Storage>(stream);
    std::vector<Contender<Storage>> contenders;
    contenders.reserve(settings.contenders.size());  // optimizers point into their models
    for (const std::string& text : settings.contenders) {
        contenders.push_back(create<Storage>(parse_contender(settings, text, name, options), stream));
        contenders.back().name = name;
        contenders.back().options = options;
    }
    const GptConfig config = shape_of(first);
    const double flops_per_token = gpt_flops_per_token(config, config.seq_len);
    const double dense = dense_newton_schulz_flops(config);
    const double equal_tokens = dense / (equal_difficulty * flops_per_token);
    const size_t micro_tokens = first.batch_size * config.seq_len;
    const double wanted = settings.difficulty > 0 ? settings.difficulty * equal_tokens
                                                  : static_cast<double>(first.tokens_per_step);
    const auto micro_batches =
        static_cast<size_t>(std::max(1.0, std::round(wanted / static_cast<double>(micro_tokens))));
    const size_t tokens = micro_batches * micro_tokens;
    Loader loader = loader_open(first.train_data, "--train-data", first.batch_size, config.seq_len,
                                config.vocab_size, first.seed);
    printf("%s; %zu tokens a step in %zu micro-batches; dense Newton-Schulz is %.2f %% of the model\n",
           device_name(stream).c_str(), tokens, micro_batches,
           100 * dense / (flops_per_token * static_cast<double>(tokens)));

    // The first step of each warms up, and tells how many a block needs.
    double slowest = 0;
    for (Contender<Storage>& c : contenders)
        slowest = std::max(slowest, train_step(c, loader, micro_batches, stream).first);
    const auto steps = static_cast<size_t>(std::max(1.0, std::ceil(settings.block_seconds / slowest)));
    const CpuTime cpu_before = cpu_time();
    const double start = now_seconds();
    for (int round = 0; round < settings.blocks; round++) {
        for (size_t i = 0; i < contenders.size(); i++) {
            const size_t turn = round % 2 ? contenders.size() - 1 - i : i;
            run_block(contenders[turn], loader, micro_batches, steps, stream);
        }
    }
    const double foreign = foreign_cores(cpu_before, cpu_time(), now_seconds() - start);
    print_table(contenders, flops_per_token, static_cast<double>(tokens));

    json result = {{"git", git_commit()},
                   {"device", device_name(stream)},
                   {"threads", device_threads(stream)},
                   {"dtype", dtype_name(first.dtype)},
                   {"parameters", gpt_parameter_count(contenders.front().model.table)},
                   {"flops_per_token", flops_per_token},
                   {"matmul_ceiling_flops", ceiling},
                   {"dense_newton_schulz_flops", dense},
                   {"equal_difficulty_tokens", equal_tokens},
                   {"tokens_per_step", tokens},
                   {"micro_batches", micro_batches},
                   {"steps_per_block", steps},
                   {"cores_of_other_processes", foreign},
                   {"contenders", json::array()}};
    for (Contender<Storage>& c : contenders) {
        result["contenders"].push_back(contender_json(c));
        optimizer_destroy(c.optimizer, stream);
        device_free(c.norm_sums, stream);
        gpt_destroy(c.model, stream);
    }
    loader_close(loader);
    stream_destroy(stream);
    if (settings.json_file.empty()) return;
    std::ofstream file(settings.json_file);
    file << result.dump(1) << "\n";
    if (!file.flush()) fail("--json %s: cannot be written", settings.json_file.c_str());
}

void run_with_dtype(const Settings& settings) {
    std::string name, options;
    switch (parse_contender(settings, settings.contenders.front(), name, options).dtype) {
        case Dtype::fp32:
            return run<float>(settings);
        case Dtype::bf16:
            return run<bf16_t>(settings);
        case Dtype::fp16:
            return run<fp16_t>(settings);
    }
}

}  // namespace

int main(int argc, char** argv) {
    Settings settings;
    CLI::App app("AdamW against Muon on the real training step.", "bench_throughput");
    app.add_option("--contender", settings.contenders, "\"name: options of train_gpt\", once for each")
        ->allow_extra_args(false)
        ->required();
    app.add_option(
           "--difficulty", settings.difficulty,
           "tokens a step, as a multiple of those at which dense Newton-Schulz is 5 % of the model; 0: "
           "--tokens-per-step")
        ->check(CLI::Range(0.0, 1e6))
        ->capture_default_str();
    app.add_option("--blocks", settings.blocks, "of each contender")
        ->check(CLI::Range(1, 10000))
        ->capture_default_str();
    app.add_option("--block-seconds", settings.block_seconds, "a block has as many steps as take so long")
        ->check(CLI::Range(0.0, 3600.0))
        ->capture_default_str();
    app.add_option("--json", settings.json_file, "file for the numbers");
    app.add_option("options", settings.common, "train_gpt's options, after --");
    CLI11_PARSE(app, argc, argv);
    try {
        run_with_dtype(settings);
    } catch (const Error& error) {
        fprintf(stderr, "bench_throughput: %s\n", error.what());
        return 1;
    }
    return 0;
}
