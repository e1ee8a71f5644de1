// What Muon costs: the whole optimizer step, and its Newton-Schulz alone, at GPT-2 124M's shapes for each
// variant of Newton-Schulz. The variants take turns, so that a machine that is busy for a while is busy for
// all of them, and are compared by the ratios of medians to the dense variant.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "dev/bench/timing.h"
#include "kernels/device.h"
#include "kernels/error.h"
#include "kernels/kernels.h"
#include "model/gpt.h"
#include "optim/optimizer.h"

namespace {

struct Settings {
    std::string model = "d12";
    size_t layers = 0;  // 0: the model's
    int rounds = 5, threads = 0;
};

struct Variant {
    const char* name;
    const char* set;
    NewtonSchulzVariant variant;
    Dtype dtype = Dtype::fp32;  // that Newton-Schulz computes in
};
const std::vector<Variant> variants = {
    {"dense", "polar-express", NewtonSchulzVariant::dense},
    {"symmetric", "polar-express", NewtonSchulzVariant::symmetric},
    {"gram", "polar-express", NewtonSchulzVariant::gram},
    {"gram, fp16", "polar-express", NewtonSchulzVariant::gram, Dtype::fp16},
    {"dense cubic5", "cubic5", NewtonSchulzVariant::dense},
    {"symmetric cubic5", "cubic5", NewtonSchulzVariant::symmetric},
    {"gram cubic5", "cubic5", NewtonSchulzVariant::gram},
    {"gram cubic5, fp16", "cubic5", NewtonSchulzVariant::gram, Dtype::fp16},
    {"symmetric keller", "keller", NewtonSchulzVariant::symmetric},
    {"symmetric you", "you", NewtonSchulzVariant::symmetric}};

// Arenas of the table's size, with gradients that are no two alike.
struct Arenas {
    float *params, *grads, *workspace;
    size_t workspace_floats;
};

Arenas make_arenas(const ParameterTable& table, size_t workspace_floats, Stream* stream) {
    const size_t n = table_elements(table);
    const auto floats = [&](size_t count) {
        return static_cast<float*>(device_malloc(count * sizeof(float), stream));
    };
    std::vector<float> values(n);
    for (size_t i = 0; i < n; i++)
        values[i] = static_cast<float>(i * 2654435761u % 1000003) / 1000003.0f - 0.5f;
    const Arenas arenas{floats(n), floats(n), floats(workspace_floats), workspace_floats};
    copy_to_device(arenas.params, values.data(), n * sizeof(float), stream);
    copy_to_device(arenas.grads, values.data(), n * sizeof(float), stream);
    return arenas;
}

// Newton-Schulz of every batch of the optimizer, in the chunks that fit the workspace. What is in the
// workspace does not matter, but that it is finite and small.
template <typename Element>
double newton_schulz_seconds(const Optimizer& optimizer, const Arenas& arenas, Stream* stream) {
    Element* const x = reinterpret_cast<Element*>(arenas.workspace);
    device_memset_zero(arenas.workspace, arenas.workspace_floats * sizeof(float), stream);
    const double start = now_seconds();
    for (const std::vector<size_t>& batch : optimizer.muon_batches) {
        const OptimizerSlot& slot = optimizer.slots[batch.front()];
        const size_t rows = slot.block.rows, cols = slot.parameter->cols;
        const size_t one = slot.size() + newton_schulz_workspace(optimizer.newton_schulz, 1, rows, cols);
        for (size_t left = batch.size(); left > 0;) {
            const size_t count = std::min(left, arenas.workspace_floats / one);
            newton_schulz(x, x + count * slot.size(), count, rows, cols, optimizer.newton_schulz, stream);
            left -= count;
        }
    }
    stream_synchronize(stream);
    return now_seconds() - start;
}

void run(const Settings& settings) {
    Stream* stream = stream_create({.threads = settings.threads});
    GptConfig model;
    if (!gpt_preset(settings.model, model)) fail("--model %s: not a preset", settings.model.c_str());
    if (settings.layers != 0) model.layers = settings.layers;
    const ParameterTable table = gpt_parameter_table(model);

    // One set of arenas and of states serves all variants: only the Newton-Schulz method differs.
    OptimizerConfig config;
    config.kind = OptimizerKind::muon;
    Optimizer optimizer = optimizer_create(config, table, stream);
    std::vector<NewtonSchulz> methods;
    size_t workspace = 0;
    for (const Variant& v : variants) {
        methods.push_back(newton_schulz_plan(newton_schulz_set(v.set, 5, v.variant), v.variant));
        optimizer.newton_schulz = methods.back();
        workspace = std::max(workspace, 4 * optimizer_minimum_workspace(optimizer));
    }
    const Arenas arenas = make_arenas(table, workspace, stream);
    // A layer's largest product takes the scratch memory that a run has by the time of its first update, and
    // that the optimizer's products then share.
    const size_t C = model.channels, N = std::min<size_t>(256, workspace / (4 * C));
    linear_forward<float>(arenas.workspace, nullptr, arenas.grads, arenas.params, nullptr, N, C, 4 * C,
                          stream);
    printf("%s; %s with %zu layers, %d rounds\n", device_name(stream).c_str(), settings.model.c_str(),
           model.layers, settings.rounds);

    std::vector<std::vector<double>> step(variants.size()), alone(variants.size());
    for (int round = 0; round <= settings.rounds; round++) {  // the first warms up
        for (size_t i = 0; i < variants.size(); i++) {
            optimizer.newton_schulz = methods[i];
            optimizer.newton_schulz_dtype = variants[i].dtype;
            replay_destroy(optimizer.muon_replay);  // a record would be of the method before
            optimizer.muon_replay = replay_create();
            const double start = now_seconds();
            optimizer_step<float>(optimizer, arenas.params, nullptr, arenas.grads, 1e-6f, 1.0f,
                                  arenas.workspace, workspace, stream);
            stream_synchronize(stream);
            const double seconds = now_seconds() - start;
            const double part = variants[i].dtype == Dtype::fp32
                                    ? newton_schulz_seconds<float>(optimizer, arenas, stream)
                                    : newton_schulz_seconds<fp16_t>(optimizer, arenas, stream);
            if (round == 0) continue;
            step[i].push_back(seconds);
            alone[i].push_back(part);
        }
    }

    printf("%-18s %9s %9s %11s %7s %9s %9s\n", "variant", "step ms", "of dense", "N.-S. ms", "of dense",
           "TFLOP", "of dense");
    double dense_flops = 0;
    for (size_t i = 0; i < variants.size(); i++) {
        double flops = 0;
        for (const OptimizerSlot& slot : optimizer.slots) {
            if (slot.muon) flops += newton_schulz_flops(methods[i], slot.block.rows, slot.parameter->cols);
        }
        if (i == 0) dense_flops = flops;
        printf("%-18s %9.1f %9.3f %11.1f %8.3f %9.3f %9.3f\n", variants[i].name, 1e3 * median(step[i]),
               median(step[i]) / median(step[0]), 1e3 * median(alone[i]), median(alone[i]) / median(alone[0]),
               flops * 1e-12, flops / dense_flops);
    }
    optimizer_destroy(optimizer, stream);
    for (float* arena : {arenas.params, arenas.grads, arenas.workspace}) device_free(arena, stream);
    stream_destroy(stream);
}

}  // namespace

int main(int argc, char** argv) {
    Settings settings;
    CLI::App app("Muon's step at GPT-2's shapes, by variant of Newton-Schulz.", "bench_muon");
    app.add_option("--model", settings.model, "d6, d12 (GPT-2 124M), d24, d36, d48")->capture_default_str();
    app.add_option("--layers", settings.layers, "0: the model's")->capture_default_str();
    app.add_option("--rounds", settings.rounds)->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--threads", settings.threads)->check(CLI::Range(0, 4096))->capture_default_str();
    CLI11_PARSE(app, argc, argv);
    try {
        run(settings);
    } catch (const Error& error) {
        fprintf(stderr, "bench_muon: %s\n", error.what());
        return 1;
    }
    return 0;
}
