// A whole training step on the CPU beside what the machine allows: tokens a second of four models, the floor,
// and PyTorch where it is asked for. Everything takes turns within one run, for a machine's speed moves by
// more than what is to be seen.
//
// The floor is the time of a step that does nothing but
//   - its products through OpenBLAS, as large as they are here (the head in chunks), warm, the best of some
//     calls in each round; of attention's products only the causal half is counted;
//   - read and write, at the speed of a copy or triad of 256 MiB, what no product reads or writes: the bytes
//     are in op_costs.h. A bias, its gradient, the softmax and all arithmetic count nothing.
//
//   build/cpu/train_step --json FILE [--rows c128,c384] [--dtype fp32,bf16] [--profile] [--python
//   venv/bin/python]
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dev/bench/blas.h"
#include "dev/bench/op_costs.h"
#include "dev/bench/timing.h"
#include "kernels/device.h"
#include "kernels/error.h"
#include "kernels/kernels.h"
#include "model/gpt.h"
#include "optim/grad_clip.h"
#include "optim/optimizer.h"

namespace {

using nlohmann::json;

struct Row {
    const char *key, *name;
    size_t layers, channels, heads, vocab, B, T;

    GptConfig config() const {
        GptConfig c;
        c.layers = layers, c.channels = channels, c.heads = heads, c.vocab_size = vocab, c.seq_len = T;
        return c;
    }
    size_t tokens() const { return B * T; }
};

constexpr Row all_rows[] = {
    {"gpt2-t64", "GPT-2 124M, B=4 T=64", 12, 768, 12, 50257, 4, 64},
    {"gpt2-t256", "GPT-2 124M, B=4 T=256", 12, 768, 12, 50257, 4, 256},
    {"c384", "6 layers, 384 channels, 6 heads, V=65, B=4 T=256", 6, 384, 6, 65, 4, 256},
    {"c128", "4 layers, 128 channels, 4 heads, V=65, B=4 T=64", 4, 128, 4, 65, 4, 64},
};

struct Settings {
    std::vector<std::string> rows, dtypes = {"fp32"};
    std::string python, out;
    int rounds = 7, threads = 0;
    double sample_ms = 500, quiet = 0.15;
    bool profile = false;
    double (*clock)() = now_seconds;  // of one thread, cpu_seconds
};

// ---------------------------------------------------------------------------------------------------
// Our step

// A model with its optimizer, and a micro-batch that it trains on.
template <typename Storage>
struct Trainer {
    Row row;
    Stream* stream;
    Gpt<Storage> model;
    Optimizer optimizer;
    double* norm_sums;
    std::vector<int> tokens, targets;
    double first_step = 0;

    Trainer(const Row& row_, Stream* stream_, const Settings& settings) : row(row_), stream(stream_) {
        model = gpt_create<Storage>(row.config(), row.B, row.T, true, Recompute::none, 0, stream);
        gpt_initialize(model, 1, stream);
        optimizer = optimizer_create({}, model.table, stream);
        norm_sums = static_cast<double*>(device_malloc(table_blocks(model.table) * sizeof(double), stream));
        for (size_t i = 0; i < row.tokens(); i++) {
            tokens.push_back(static_cast<int>(i * 7919 % row.vocab));
            targets.push_back(static_cast<int>((i + 1) * 7919 % row.vocab));
        }
        first_step = seconds_of([&] { step(); }, 1, settings.clock);
    }
    Trainer(const Trainer&) = delete;
    Trainer& operator=(const Trainer&) = delete;
    ~Trainer() {
        device_free(norm_sums, stream);
        optimizer_destroy(optimizer, stream);
        gpt_destroy(model, stream);
    }

    double norm() {
        return global_grad_norm(block_squares(model.grads, model.table, model.ownership, norm_sums, stream));
    }
    void update(float grad_scale) {
        optimizer_step<Storage>(optimizer, model.params, model.master, model.grads, 1e-4f, grad_scale,
                                reinterpret_cast<float*>(model.activations),
                                model.activations_bytes / sizeof(float), stream);
    }
    void step() {
        device_memset_zero(model.grads, model.grads_bytes, stream);
        gpt_forward_backward(model, tokens.data(), targets.data(), row.B, row.T,
                             1.0f / static_cast<float>(row.tokens()), stream);
        update(clip_factor(norm(), 1.0));
    }
};

// ---------------------------------------------------------------------------------------------------
// The floor

struct Counted {
    const char* name;
    Product product;
    float beta;
    double count;  // in a step; of attention, times the share that is causal
    size_t heads;  // not 0: so many at a time, one a thread, as attention's are
};

std::vector<Counted> step_products(const Row& row) {
    constexpr size_t head_chunk = 256;  // rows, as in model/gpt.cpp
    const size_t N = row.tokens(), C = row.channels, HS = C / row.heads, T = row.T;
    std::vector<Counted> products;
    const auto add_linear = [&](const char* name, size_t rows, size_t in, size_t out, double count) {
        products.push_back({name, {false, true, rows, out, in}, 0.0f, count, 0});
        products.push_back({"  dx", {false, false, rows, in, out}, 0.0f, count, 0});
        products.push_back({"  dw", {true, false, out, in, rows}, 1.0f, count, 0});
    };
    const double L = static_cast<double>(row.layers);
    add_linear("qkv", N, C, 3 * C, L);
    add_linear("attention proj", N, C, C, L);
    add_linear("fc", N, C, 4 * C, L);
    add_linear("fc proj", N, 4 * C, C, L);
    const size_t chunk = std::min(N, head_chunk);
    add_linear("head", chunk, C, row.config().padded_vocab(),
               static_cast<double>(N) / static_cast<double>(chunk));
    const double causal = L * static_cast<double>(T + 1) / static_cast<double>(2 * T);
    const size_t heads = row.B * row.heads;
    products.push_back({"q k^T, dout v^T", {false, true, T, T, HS}, 0.0f, 3 * causal, heads});
    products.push_back({"p v, ds k", {false, false, T, HS, T}, 0.0f, 2 * causal, heads});
    products.push_back({"ds^T q, p^T dout", {true, false, T, HS, T}, 0.0f, 2 * causal, heads});
    return products;
}

// Bytes of a step that no product reads or writes, s bytes a stored number.
double other_bytes(const Row& row, size_t parameters, size_t s) {
    const size_t N = row.tokens(), C = row.channels, L = row.layers;
    return 4 * product(parameters, 1) +  // gradients set to zero
           embedding_forward_cost(N, C, s).bytes + embedding_backward_cost(N, row.T, C, s).bytes +
           layernorm_forward_cost(N, C, s).bytes +
           product(2 * L, 1) * residual_layernorm_forward_cost(N, C, s).bytes +
           product(2 * L + 1, 1) * layernorm_backward_cost(N, C, s).bytes +
           2 * product(L * N, 4 * C, s) +  // the input of GELU, written and read
           cross_entropy_cost(N, row.config().padded_vocab(), s).bytes + sum_cost(parameters).bytes +
           adamw_update_cost(parameters, s).bytes;
}

// Arrays of floats that are warm when a product is timed.
class Floor {
public:
    Floor(const Row& row, Stream* stream_, const Settings& settings)
        : products(step_products(row)), stream(stream_), clock(settings.clock) {
        size_t most[3] = {1024 * 1024, 1024 * 1024, 1024 * 1024};
        for (const Counted& p : products) {
            const size_t heads = std::max(p.heads, size_t{1});
            const size_t sizes[3] = {p.product.m * p.product.k, p.product.k * p.product.n,
                                     p.product.m * p.product.n};
            for (int i = 0; i < 3; i++) most[i] = std::max(most[i], heads * sizes[i]);
        }
        for (int i = 0; i < 3; i++) {
            buffers[i] = static_cast<float*>(device_malloc(most[i] * sizeof(float), stream));
            for (size_t j = 0; j < most[i]; j++)
                buffers[i][j] = static_cast<float>(j * 2654435761u % 1000) * 1e-3f - 0.5f;
        }
    }
    Floor(const Floor&) = delete;
    Floor& operator=(const Floor&) = delete;
    ~Floor() {
        for (float* buffer : buffers) device_free(buffer, stream);
    }

    // Seconds of each product once, all heads of it: the best of so many calls that they take some ms.
    double seconds(const Counted& p) {
        const auto call = [&] {
            if (p.heads == 0) return openblas_gemm(buffers[2], buffers[0], buffers[1], p.product, p.beta);
            const size_t m = p.product.m, n = p.product.n, k = p.product.k;
#pragma omp parallel for num_threads(device_threads(stream)) schedule(dynamic)
            for (size_t head = 0; head < p.heads; head++) {
                openblas_gemm(buffers[2] + head * m * n, buffers[0] + head * m * k, buffers[1] + head * k * n,
                              p.product);
            }
        };
        double best = seconds_of(call, 1, clock), spent = best;  // the first warms up
        for (int i = 0; i < 20 && (i < 2 || spent < 5e-3); i++) {
            const double now = seconds_of(call, 1, clock);
            best = std::min(best, now), spent += now;
        }
        return best;
    }
    double cube_seconds() { return seconds({"", {false, false, 1024, 1024, 1024}, 0.0f, 1, 0}); }

    std::vector<Counted> products;

private:
    Stream* stream;
    double (*clock)();
    float* buffers[3];
};

// Bytes a second, of a copy or a triad of 256 MiB, whichever is faster.
double memory_bandwidth(const Settings& settings, Stream* stream) {
    const size_t n = size_t{64} << 20;
    float* arrays[3];
    for (float*& array : arrays) {
        array = static_cast<float*>(device_malloc(n * sizeof(float), stream));
        device_memset_zero(array, n * sizeof(float), stream);
    }
    double best = 0;
    for (int i = 0; i < 7; i++) {
        const double copy = seconds_of(
            [&] { copy_on_device(arrays[0], arrays[1], n * sizeof(float), stream); }, 1, settings.clock);
        const double triad =
            seconds_of([&] { add(arrays[0], arrays[1], arrays[2], n, stream); }, 1, settings.clock);
        best = std::max({best, 8 * product(n, 1) / copy, 12 * product(n, 1) / triad});
    }
    for (float* array : arrays) device_free(array, stream);
    return best;
}

// ---------------------------------------------------------------------------------------------------
// PyTorch, in a process of its own that steps when it is told to (dev/reference/train_speed.py)

class PyTorch {
public:
    PyTorch(const std::string& python, const char* mode, const Row& row, int threads) {
        int down[2], up[2];
        if (pipe(down) != 0 || pipe(up) != 0) fail("--python %s: no pipe", python.c_str());
        child = fork();
        if (child == 0) {
            dup2(down[0], 0);
            dup2(up[1], 1);
            for (const int end : {down[0], down[1], up[0], up[1]}) close(end);
            // Without it glibc gives back and fetches again each large tensor's pages.
            setenv("GLIBC_TUNABLES",
                   "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592:"
                   "glibc.malloc.top_pad=268435456",
                   1);
            unsetenv("OPENBLAS_CORETYPE");
            const std::string sizes[] = {std::to_string(row.layers), std::to_string(row.channels),
                                         std::to_string(row.heads),  std::to_string(row.vocab),
                                         std::to_string(row.B),      std::to_string(row.T),
                                         std::to_string(threads)};
            execlp(python.c_str(), python.c_str(), "dev/reference/train_speed.py", mode, sizes[0].c_str(),
                   sizes[1].c_str(), sizes[2].c_str(), sizes[3].c_str(), sizes[4].c_str(), sizes[5].c_str(),
                   sizes[6].c_str(), static_cast<char*>(nullptr));
            _exit(127);
        }
        close(down[0]);
        close(up[1]);
        to = fdopen(down[1], "w");
        from = fdopen(up[0], "r");
        steps(2);  // compiles, takes memory
    }
    PyTorch(const PyTorch&) = delete;
    PyTorch& operator=(const PyTorch&) = delete;
    ~PyTorch() {
        fclose(to);  // at the end of its input it ends
        fclose(from);
        waitpid(child, nullptr, 0);
    }

    // Seconds of `count` steps.
    double steps(size_t count) {
        double seconds = 0;
        fprintf(to, "%zu\n", count);
        fflush(to);
        if (fscanf(from, "%lf", &seconds) != 1) fail("--python: dev/reference/train_speed.py ended early");
        return seconds;
    }

private:
    pid_t child;
    FILE *to, *from;
};

// ---------------------------------------------------------------------------------------------------
// The profile

struct Op {
    const char* name;
    double count;
    std::function<void()> call;
};

// The ops of a step, each as often as it occurs, on layer 0's own buffers.
template <typename Storage>
std::vector<Op> step_ops(Trainer<Storage>& t) {
    Gpt<Storage>& model = t.model;
    const GptTensors<Storage>& p = model.p;
    const GptTensors<float>& g = model.g;
    const GptActivations<Storage>& a = model.a;
    const GptLayer<Storage>& w = p.layers[0];
    const GptLayer<float>& dw = g.layers[0];
    const GptLayerActivations<Storage>& x = a.layers[0];
    const size_t B = t.row.B, T = t.row.T, N = B * T, C = t.row.channels, NH = t.row.heads, V = t.row.vocab,
                 Vp = t.row.config().padded_vocab(), rows = std::min<size_t>(N, 256);
    const double L = static_cast<double>(t.row.layers), chunks = static_cast<double>(N / rows);
    Stream* const stream = t.stream;
    const auto linear = [=](const char* name, const Storage* in, const Storage* weight, const Storage* bias,
                            float* dweight, float* dbias, Storage* out, size_t IC, size_t OC, bool gelu_after,
                            bool gelu_before) {
        return std::vector<Op>{{name, L,
                                [=] {
                                    linear_forward<Storage>(out, gelu_after ? x.fc_pre_gelu : nullptr, in,
                                                            weight, bias, N, IC, OC, stream);
                                }},
                               {"  backward", L, [=] {
                                    linear_backward<Storage>(gelu_before ? a.dwide : a.dbranch, dweight,
                                                             dbias, OC == C ? a.dresidual : a.dwide, in,
                                                             weight, gelu_before ? x.fc_pre_gelu : nullptr, N,
                                                             IC, OC, stream);
                                }}};
    };
    std::vector<Op> ops = {
        {"gradients to zero", 1, [=, &model] { device_memset_zero(model.grads, model.grads_bytes, stream); }},
        {"embedding_forward", 1,
         [=] { embedding_forward(a.embedded, a.tokens, p.wte, p.wpe, B, T, C, stream); }},
        {"embedding_backward", 1,
         [=] { embedding_backward(g.wte, g.wpe, a.dresidual, a.tokens, B, T, C, stream); }},
        {"residual_layernorm_forward", 2 * L + 1,
         [=] {
             residual_layernorm_forward(x.residual_mid, x.ln2, x.ln2_mean, x.ln2_rstd, a.embedded, a.branch,
                                        w.ln2_weight, w.ln2_bias, N, C, stream);
         }},
        {"layernorm_backward", 2 * L + 1,
         [=] {
             layernorm_backward(a.dresidual, dw.ln2_weight, dw.ln2_bias, a.dbranch, x.residual_mid,
                                x.ln2_mean, x.ln2_rstd, w.ln2_weight, N, C, stream);
         }},
        {"attention_forward", L, [=] { attention_forward(x.attention, x.lse, x.qkv, B, T, C, NH, stream); }},
        {"attention_backward", L,
         [=] { attention_backward(a.dwide, a.dbranch, x.attention, x.lse, x.qkv, B, T, C, NH, stream); }},
        {"logits_forward", chunks, [=] { logits_forward(a.logits, a.lnf, p.head, rows, C, Vp, stream); }},
        {"cross_entropy", chunks,
         [=] {
             cross_entropy<Storage>(a.losses, a.dlogits, a.logits, a.targets, 1e-3f, rows, V, Vp, stream);
         }},
        {"head's backward", chunks,
         [=] {
             linear_backward<Storage>(a.dbranch, g.head, nullptr, a.dlogits, a.lnf, p.head, nullptr, rows, C,
                                      Vp, stream);
         }},
        {"norm of the gradients", 1, [&t] { t.norm(); }},
        {"AdamW", 1, [&t] { t.update(1e-6f); }},
    };
    for (const std::vector<Op>& of_layer :
         {linear("qkv", x.ln1, w.qkv_weight, w.qkv_bias, dw.qkv_weight, dw.qkv_bias, x.qkv, C, 3 * C, false,
                 false),
          linear("attention proj", x.attention, w.proj_weight, w.proj_bias, dw.proj_weight, dw.proj_bias,
                 a.branch, C, C, false, false),
          linear("fc with GELU", x.ln2, w.fc_weight, w.fc_bias, dw.fc_weight, dw.fc_bias, x.fc_gelu, C, 4 * C,
                 true, false),
          linear("fc proj", x.fc_gelu, w.fcproj_weight, w.fcproj_bias, dw.fcproj_weight, dw.fcproj_bias,
                 a.branch, 4 * C, C, false, true)})
        ops.insert(ops.end(), of_layer.begin(), of_layer.end());
    return ops;
}

// The best of the rounds: ops alone, one after the other, while the whole step's time is the median.
template <typename Storage>
void print_profile(Trainer<Storage>& trainer, const Settings& settings, double step) {
    trainer.step();  // finite numbers in every buffer
    double sum = 0;
    printf("  %-28s %9s %9s %7s\n", "op", "calls", "ms a step", "share");
    for (const Op& op : step_ops(trainer)) {
        double best = std::numeric_limits<double>::infinity();
        for (int i = 0; i <= settings.rounds; i++)
            best = std::min(best, seconds_of(op.call, 1, settings.clock));
        sum += op.count * best;
        printf("  %-28s %9.0f %9.3f %6.1f%%\n", op.name, op.count, 1e3 * op.count * best,
               100 * op.count * best / step);
    }
    printf("  %-28s %9s %9.3f %6.1f%%\n", "all", "", 1e3 * sum, 100 * sum / step);
}

// ---------------------------------------------------------------------------------------------------
// The table

// One that takes turns: `steps` are a sample long enough to be timed.
struct Runner {
    std::string name;
    std::function<double(size_t)> seconds;  // of so many steps
    size_t steps = 1;
    std::vector<double> samples = {};  // seconds of a step
};

void calibrate(Runner& runner, const Settings& settings) {
    const double once = runner.seconds(1);
    runner.steps = static_cast<size_t>(std::clamp(settings.sample_ms * 1e-3 / once, 1.0, 1e4));
}

template <typename Storage>
std::shared_ptr<Trainer<Storage>> add_trainer(const Row& row, const Settings& settings, Stream* stream,
                                              std::vector<Runner>& runners,
                                              std::vector<std::function<void(double)>>& profiles) {
    const auto trainer = std::make_shared<Trainer<Storage>>(row, stream, settings);
    runners.push_back({dtype_name(dtype_of<Storage>()), [trainer, clock = settings.clock](size_t steps) {
                           return seconds_of([&] { trainer->step(); }, steps, clock);
                       }});
    calibrate(runners.back(), settings);
    printf("  %s: first step %.1f ms, the ones after it %.1f\n", runners.back().name.c_str(),
           1e3 * trainer->first_step, 1e3 * runners.back().seconds(1));
    profiles.push_back([trainer, &settings](double step) { print_profile(*trainer, settings, step); });
    return trainer;
}

// A row of the table: all runners and the floor take turns; a round that others disturbed is taken again, up
// to three times as many as asked for.
json bench_row(const Row& row, const Settings& settings, double bandwidth, Stream* stream) {
    printf("\n%s (%s)\n", row.name, row.key);
    std::vector<Runner> runners;
    std::vector<std::function<void(double)>> profiles;
    for (const std::string& dtype : settings.dtypes) {
        if (dtype == "fp32") add_trainer<float>(row, settings, stream, runners, profiles);
        if (dtype == "bf16") add_trainer<bf16_t>(row, settings, stream, runners, profiles);
        if (dtype == "fp16") add_trainer<fp16_t>(row, settings, stream, runners, profiles);
    }
    const size_t ours = runners.size();
    for (const char* mode : {"eager", "compile"}) {
        if (settings.python.empty()) break;
        const auto torch = std::make_shared<PyTorch>(settings.python, mode, row, device_threads(stream));
        runners.push_back({mode, [torch](size_t steps) { return torch->steps(steps); }});
        calibrate(runners.back(), settings);
    }

    Floor floor(row, stream, settings);
    const double other = other_bytes(row, table_elements(gpt_parameter_table(row.config())), 4) / bandwidth;
    std::vector<double> floors, cubes, foreign;
    std::vector<std::vector<double>> product_times(floor.products.size());
    for (int round = 0, tries = 0; round < settings.rounds && tries < 3 * settings.rounds; tries++) {
        const CpuTime before = cpu_time();
        const double start = now_seconds();
        std::vector<double> times;
        for (size_t i = 0; i < ours; i++) times.push_back(runners[i].seconds(runners[i].steps));
        double seconds = other;
        for (size_t i = 0; have_openblas && i < floor.products.size(); i++) {
            product_times[i].push_back(floor.seconds(floor.products[i]));
            seconds += floor.products[i].count * product_times[i].back();
        }
        const double cube = have_openblas ? floor.cube_seconds() : 1;
        foreign.push_back(foreign_cores(before, cpu_time(), now_seconds() - start));
        for (size_t i = ours; i < runners.size(); i++) times.push_back(runners[i].seconds(runners[i].steps));
        if (foreign.back() > settings.quiet && 3 * settings.rounds - tries > settings.rounds - round)
            continue;
        for (size_t i = 0; i < runners.size(); i++)
            runners[i].samples.push_back(times[i] / static_cast<double>(runners[i].steps));
        floors.push_back(seconds), cubes.push_back(cube);
        round++;
    }

    const double tokens = static_cast<double>(row.tokens()), step = median(runners[0].samples),
                 least = median(floors);
    json result = {{"name", row.name},         {"key", row.key},
                   {"dtype", runners[0].name}, {"tokens_per_second", tokens / step},
                   {"rounds", floors.size()},  {"foreign_cores", median(foreign)}};
    printf("  %-8s %10.1f tokens/s  %9.2f ms\n", runners[0].name.c_str(), tokens / step, 1e3 * step);
    if (have_openblas) {
        result["floor_tokens_per_second"] = tokens / least;
        result["share_of_floor"] = least / step;
        result["floor_other_ms"] = 1e3 * other;
        result["openblas_1024_cubed_gflops"] = 2.147483648 / median(cubes);
        printf("  %-8s %10.1f tokens/s  %9.2f ms, %.2f of them memory; 1024^3 at %.0f GFLOP/s\n", "floor",
               tokens / least, 1e3 * least, 1e3 * other, 2.147483648 / median(cubes));
        printf("  share of the floor %.3f; others kept %.2f cores busy\n", least / step, median(foreign));
    }
    for (size_t i = 1; i < runners.size(); i++) {
        const double other_step = median(runners[i].samples);
        const std::string key = i < ours ? runners[i].name : "pytorch_" + runners[i].name;
        result[key + "_tokens_per_second"] = tokens / other_step;
        printf("  %-8s %10.1f tokens/s; %s is %.2f of it\n", runners[i].name.c_str(), tokens / other_step,
               runners[0].name.c_str(), other_step / step);
        if (i < ours) continue;
        result["pytorch_tokens_per_second"] =
            std::max(tokens / other_step, result.value("pytorch_tokens_per_second", 0.0));
    }
    if (settings.profile) {
        for (size_t i = 0; i < ours; i++) {
            printf("  profile, %s\n", runners[i].name.c_str());
            profiles[i](median(runners[i].samples));
        }
        printf("  %-28s %9s %9s %9s\n", "OpenBLAS", "calls", "ms a step", "GFLOP/s");
        for (size_t i = 0; have_openblas && i < floor.products.size(); i++) {
            const Counted& p = floor.products[i];
            const double once = median(product_times[i]),
                         heads = static_cast<double>(std::max(p.heads, size_t{1}));
            printf("  %-28s %9.1f %9.3f %9.1f\n", p.name, p.count, 1e3 * p.count * once,
                   1e-9 * heads * p.product.flops() / once);
        }
    }
    fflush(stdout);
    return result;
}

void run(const Settings& settings) {
    Stream* stream = stream_create({.threads = settings.threads});
    printf("%s; medians of %d rounds in alternation\n", device_name(stream).c_str(), settings.rounds);
    start_openblas(device_threads(stream));
    const double bandwidth = memory_bandwidth(settings, stream);
    printf("memory: %.1f GB/s\n", 1e-9 * bandwidth);
    json rows = json::array();
    for (const Row& row : all_rows) {
        const auto wanted = std::find(settings.rows.begin(), settings.rows.end(), row.key);
        if (settings.rows.empty() || wanted != settings.rows.end())
            rows.push_back(bench_row(row, settings, bandwidth, stream));
    }
    if (!settings.out.empty()) {
        std::ofstream file(settings.out);
        file << json{{"device", device_name(stream)}, {"memory_bandwidth", bandwidth}, {"rows", rows}}.dump(1)
             << "\n";
        if (!file.flush()) fail("--json %s: cannot be written", settings.out.c_str());
    }
    stream_destroy(stream);
}

}  // namespace

int main(int argc, char** argv) {
    choose_openblas_kernels(argv);
    Settings settings;
    std::vector<std::string> keys;
    bool cpu_time_alone = false;
    for (const Row& row : all_rows) keys.push_back(row.key);
    CLI::App app("Training steps beside the machine's limit and PyTorch.", "train_step");
    app.add_option("--rows", settings.rows, "which models; all where not given")
        ->delimiter(',')
        ->check(CLI::IsMember(keys));
    app.add_option("--dtype", settings.dtypes,
                   "one or several that take turns: fp32, bf16, fp16; the first is the row's")
        ->delimiter(',')
        ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
        ->capture_default_str();
    app.add_option("--rounds", settings.rounds)->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--sample-ms", settings.sample_ms, "length of a sample")
        ->check(CLI::Range(0.0, 1e5))
        ->capture_default_str();
    app.add_option("--quiet", settings.quiet,
                   "a round is taken again where others kept more cores busy than this")
        ->check(CLI::Range(0.0, 4096.0))
        ->capture_default_str();
    app.add_option("--threads", settings.threads)->check(CLI::Range(0, 4096))->capture_default_str();
    app.add_flag("--cpu-time", cpu_time_alone,
                 "with --threads 1, count CPU time: on a machine that is never quiet");
    app.add_option("--python", settings.python, "an interpreter that has torch: PyTorch takes turns too");
    app.add_flag("--profile", settings.profile, "time of every op in a step");
    app.add_option("--json", settings.out, "file for the results");
    CLI11_PARSE(app, argc, argv);
    try {
        if (cpu_time_alone) {
            if (settings.threads != 1) fail("--cpu-time: needs --threads 1");
            settings.clock = cpu_seconds;
            settings.quiet = 4096;
        }
        run(settings);
    } catch (const Error& error) {
        fprintf(stderr, "train_step: %s\n", error.what());
        return 1;
    }
    return 0;
}
