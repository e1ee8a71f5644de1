// The speed of every op on whatever backend is linked: time, GB/s, TFLOP/s, and the share of what the machine
// could do, measured in the same run: copying for memory, a large product for FLOPs. See op_costs.h.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dev/bench/op_costs.h"
#include "dev/bench/timing.h"
#include "kernels/device.h"
#include "kernels/error.h"
#include "kernels/kernels.h"

namespace {

using nlohmann::json;

struct Sizes {
    size_t B, T, C, NH, V;
    size_t ceiling;  // side of the product that measures the machine
};

const std::map<std::string, Sizes> all_sizes = {
    {"tiny", {1, 19, 64, 1, 257, 64}},
    {"small", {8, 128, 128, 4, 257, 1024}},
    {"gpt2", {4, 1024, 768, 12, 50257, 4096}},
};

struct Settings {
    std::string size = "small", dtype = "all", out;
    int samples = 7, threads = 0;
    double sample_ms = 20;
    bool fused_epilogues = false;
};

struct Ceilings {
    double bandwidth, flops;  // bytes and FLOPs a second
};

// Device arrays that live as long as the bench of one type.
class Arrays {
public:
    explicit Arrays(Stream* stream_) : stream(stream_) {}
    ~Arrays() {
        for (void* array : arrays) device_free(array, stream);
    }
    Arrays(const Arrays&) = delete;
    Arrays& operator=(const Arrays&) = delete;

    // n values between -1/2 and 1/2 that repeat only after a prime number of entries.
    template <typename Element>
    Element* values(size_t n) {
        return upload<Element>(
            n, [](size_t i) { return from_float<Element>(static_cast<float>(i % 1009) / 1009.0f - 0.5f); });
    }
    int* integers(size_t n, size_t below) {
        return upload<int>(n, [below](size_t i) { return static_cast<int>(i * 7919 % below); });
    }

private:
    template <typename Element, typename Value>
    Element* upload(size_t n, const Value& value) {
        std::vector<Element> host(n);
        for (size_t i = 0; i < n; i++) host[i] = value(i);
        Element* device = static_cast<Element*>(device_malloc(n * sizeof(Element), stream));
        copy_to_device(device, host.data(), n * sizeof(Element), stream);
        arrays.push_back(device);
        return device;
    }

    Stream* stream;
    std::vector<void*> arrays;
};

// Seconds of one call: the median of samples, each of so many calls that it lasts long enough.
double seconds_a_call(const std::function<void()>& work, const Settings& settings, Stream* stream) {
    const auto seconds_of_calls = [&](size_t calls) {
        return seconds_of([&] {
            for (size_t i = 0; i < calls; i++) work();
            stream_synchronize(stream);
        });
    };
    seconds_of_calls(1);  // takes scratch memory, chooses algorithms
    const double once = seconds_of_calls(1);
    const size_t calls = static_cast<size_t>(std::clamp(settings.sample_ms * 1e-3 / once, 1.0, 1000.0));
    std::vector<double> samples;
    for (int i = 0; i < settings.samples; i++)
        samples.push_back(seconds_of_calls(calls) / static_cast<double>(calls));
    return median(samples);
}

template <typename Storage>
Ceilings measure_ceilings(const Sizes& sizes, const Settings& settings, Stream* stream) {
    Arrays arrays(stream);
    const size_t n = sizes.ceiling, bytes = 16 * n * n;
    Storage *a = arrays.values<Storage>(n * n), *b = arrays.values<Storage>(n * n),
            *d = arrays.values<Storage>(n * n);
    float *from = arrays.values<float>(bytes / 4), *to = arrays.values<float>(bytes / 4);
    const double product_time = seconds_a_call(
        [&] { gemm_batched<Storage>(d, a, b, nullptr, false, true, n, n, n, 1.0f, 0.0f, 1, stream); },
        settings, stream);
    const double copy_time =
        seconds_a_call([&] { copy_on_device(to, from, bytes, stream); }, settings, stream);
    return {2.0 * static_cast<double>(bytes) / copy_time,
            gemm_cost(n, n, n, 1, sizeof(Storage)).flops / product_time};
}

template <typename Storage>
void bench_type(const Sizes& sizes, const Settings& settings, Stream* stream, json& rows) {
    const auto [B, T, C, NH, V, ceiling] = sizes;
    const size_t N = B * T, Vp = (V + 127) / 128 * 128, s = sizeof(Storage);
    const size_t chunk = std::min<size_t>(N, 256);  // rows of the head at a time
    const char* type = dtype_name(dtype_of<Storage>());
    const Ceilings machine = measure_ceilings<Storage>(sizes, settings, stream);
    printf(
        "\n%s: B %zu, T %zu, C %zu, %zu heads, V %zu; copying %.1f GB/s, a product of %zu^3 %.3f TFLOP/s\n",
        type, B, T, C, NH, V, machine.bandwidth * 1e-9, ceiling, machine.flops * 1e-12);
    printf("%-28s %11s %9s %9s %7s\n", "op", "us", "GB/s", "TFLOP/s", "share");

    const auto row = [&](const std::string& name, const OpCost& cost, const std::function<void()>& work) {
        const double seconds = seconds_a_call(work, settings, stream);
        const double share = std::max(cost.bytes / machine.bandwidth, cost.flops / machine.flops) / seconds;
        printf("%-28s %11.1f %9.2f %9.4f %6.1f%%\n", name.c_str(), seconds * 1e6, cost.bytes / seconds * 1e-9,
               cost.flops / seconds * 1e-12, 100 * share);
        fflush(stdout);
        rows.push_back({{"op", name},
                        {"dtype", type},
                        {"B", B},
                        {"T", T},
                        {"C", C},
                        {"heads", NH},
                        {"V", V},
                        {"us", seconds * 1e6},
                        {"bytes", cost.bytes},
                        {"flops", cost.flops},
                        {"bandwidth_ceiling", machine.bandwidth},
                        {"flops_ceiling", machine.flops},
                        {"share", share}});
    };

    Arrays arrays(stream);
    const auto stored = [&](size_t n) { return arrays.values<Storage>(n); };
    const auto floats = [&](size_t n) { return arrays.values<float>(n); };
    int *tokens = arrays.integers(N, V), *targets = arrays.integers(N, V);
    // Activations of one layer, weights and gradients of its largest matrices; ops share them.
    Storage *x = stored(N * C), *y = stored(N * C), *sum_ = stored(N * C), *out = stored(N * C);
    Storage *wide = stored(N * 4 * C), *wide2 = stored(N * 4 * C), *qkv = stored(N * 3 * C),
            *dqkv = stored(N * 3 * C);
    Storage *wte = stored(Vp * C), *wpe = stored(T * C), *weight = stored(4 * C * C), *bias = stored(4 * C);
    float *dwte = floats(Vp * C), *dweight = floats(4 * C * C), *dbias = floats(4 * C), *dwpe = floats(T * C);
    float *mean = floats(N), *rstd = floats(N), *lse = floats(B * NH * T), *losses = floats(N);
    float* logits = floats(chunk * Vp);
    Storage* dlogits = stored(chunk * Vp);

    row("embedding_forward", embedding_forward_cost(N, C, s),
        [&] { embedding_forward(out, tokens, wte, wpe, B, T, C, stream); });
    row("embedding_backward", embedding_backward_cost(N, T, C, s),
        [&] { embedding_backward(dwte, dwpe, x, tokens, B, T, C, stream); });
    row("layernorm_forward", layernorm_forward_cost(N, C, s),
        [&] { layernorm_forward(out, mean, rstd, x, weight, bias, N, C, stream); });
    row("residual_layernorm_forward", residual_layernorm_forward_cost(N, C, s),
        [&] { residual_layernorm_forward(sum_, out, mean, rstd, x, y, weight, bias, N, C, stream); });
    row("layernorm_backward", layernorm_backward_cost(N, C, s),
        [&] { layernorm_backward(out, dweight, dbias, y, x, mean, rstd, weight, N, C, stream); });
    row("linear_forward qkv", linear_forward_cost(N, C, 3 * C, false, s),
        [&] { linear_forward<Storage>(dqkv, nullptr, x, weight, bias, N, C, 3 * C, stream); });
    row("linear_forward fc, gelu", linear_forward_cost(N, C, 4 * C, true, s),
        [&] { linear_forward(wide, wide2, x, weight, bias, N, C, 4 * C, stream); });
    row("gelu_forward", gelu_forward_cost(N * 4 * C, s),
        [&] { gelu_forward(wide, wide2, N * 4 * C, stream); });
    row("linear_backward qkv", linear_backward_cost(N, C, 3 * C, false, s),
        [&] { linear_backward<Storage>(out, dweight, dbias, qkv, x, weight, nullptr, N, C, 3 * C, stream); });
    row("linear_backward proj, gelu", linear_backward_cost(N, 4 * C, C, true, s),
        [&] { linear_backward(wide, dweight, dbias, x, wide2, weight, wide2, N, 4 * C, C, stream); });
    row("attention_forward", attention_forward_cost(B, T, C, s),
        [&] { attention_forward(out, lse, qkv, B, T, C, NH, stream); });
    row("attention_backward", attention_backward_cost(B, T, C, s),
        [&] { attention_backward(dqkv, x, out, lse, qkv, B, T, C, NH, stream); });
    row("logits_forward", logits_forward_cost(chunk, C, Vp, s),
        [&] { logits_forward(logits, x, wte, chunk, C, Vp, stream); });
    row("cross_entropy", cross_entropy_cost(chunk, Vp, s), [&] {
        cross_entropy(losses, dlogits, logits, targets, 1.0f / static_cast<float>(N), chunk, V, Vp, stream);
    });

    // The optimizers, on the four matrices of 4C x C entries that a layer has at most of.
    const size_t n = 4 * C * C;
    float *master = floats(n), *m = floats(n), *v = floats(n);
    device_memset_zero(v, n * sizeof(float), stream);
    double* total = reinterpret_cast<double*>(floats(2));
    int* degenerate = arrays.integers(1, 1);
    const AdamWStep step = {.lr = 1e-6f,
                            .beta1 = 0.9f,
                            .beta2 = 0.95f,
                            .eps = 1e-8f,
                            .weight_decay = 0.1f,
                            .bias_correction1 = 1,
                            .bias_correction2 = 1,
                            .grad_scale = 1};
    float* const masters = s == 4 ? nullptr : master;
    row("sum_of_squares", sum_cost(n), [&] { sum_of_squares(total, dweight, 4 * C, C, stream); });
    row("adamw_update", adamw_update_cost(n, s),
        [&] { adamw_update(weight, masters, m, v, dweight, n, step, {}, stream); });
    MuonBlock* block = reinterpret_cast<MuonBlock*>(floats(sizeof(MuonBlock) / sizeof(float)));
    MuonStep* muon_step = reinterpret_cast<MuonStep*>(floats(sizeof(MuonStep) / sizeof(float)));
    const MuonBlock whole = {m, 0, 0, 1e-6f, 1};
    const MuonStep small = {.mu = 0.95f, .grad_scale = 1, .rounding_step = 0, .skip = 0};
    copy_to_device(block, &whole, sizeof(whole), stream);
    copy_to_device(muon_step, &small, sizeof(small), stream);
    Storage* normalized = stored(n);
    row("muon_prologue", muon_prologue_cost(n, s), [&] {
        muon_prologue<float>(normalized, degenerate, v, dweight, block, muon_step, 1, n, true, 1.0f, 0,
                             stream);
    });
    row("gemm_batched X X^T", gemm_cost(C, C, 4 * C, 1, s), [&] {
        gemm_batched<Storage>(wte, weight, weight, nullptr, false, true, C, C, 4 * C, 1.0f, 0.0f, 1, stream);
    });
    // Newton-Schulz's products of a layer's q, k and v, and of its widest matrix, at half the work.
    Storage *squares = stored(3 * C * C), *polynomials = stored(3 * C * C);
    row("gemm_symmetric X X^T", gemm_symmetric_cost(C, 4 * C, false, 1, s), [&] {
        gemm_symmetric<Storage>(squares, weight, weight, nullptr, false, C, 4 * C, 1.0f, 0.0f, 0.0f, 1,
                                stream);
    });
    row("gemm_symmetric X^T X, 3", gemm_symmetric_cost(C, C, false, 3, s), [&] {
        gemm_symmetric<Storage>(squares, weight, weight, nullptr, true, C, C, 1.0f, 0.0f, 0.0f, 3, stream);
    });
    row("gemm_symmetric polynomial, 3", gemm_symmetric_cost(C, C, true, 3, s), [&] {
        gemm_symmetric(polynomials, squares, squares, squares, false, C, C, 2.0f, -4.8f, 3.4f, 3, stream);
    });
    row("muon_epilogue", muon_epilogue_cost(n, s),
        [&] { muon_epilogue(weight, masters, v, block, muon_step, 1, n, 1.0f, stream); });
}

void run(const Settings& settings) {
    const Sizes& sizes = all_sizes.at(settings.size);
    Stream* stream =
        stream_create({.threads = settings.threads, .fused_epilogues = settings.fused_epilogues});
    json result = {{"device", device_name(stream)}, {"size", settings.size}, {"rows", json::array()}};
    printf("%s; median of %d samples of %g ms\n", device_name(stream).c_str(), settings.samples,
           settings.sample_ms);
    const auto wanted = [&](const char* type) { return settings.dtype == "all" || settings.dtype == type; };
    if (wanted("fp32")) bench_type<float>(sizes, settings, stream, result["rows"]);
    if (wanted("bf16")) bench_type<bf16_t>(sizes, settings, stream, result["rows"]);
    if (wanted("fp16")) bench_type<fp16_t>(sizes, settings, stream, result["rows"]);
    if (!settings.out.empty()) {
        std::ofstream file(settings.out);
        file << result.dump(1) << "\n";
        if (!file.flush()) fail("--json %s: cannot be written", settings.out.c_str());
    }
    stream_destroy(stream);
}

}  // namespace

int main(int argc, char** argv) {
    Settings settings;
    CLI::App app("The speed of every op, against the ceilings of this machine.", "bench_ops");
    app.add_option("--size", settings.size, "tiny, small or gpt2 (124M, 4 rows of 1024)")
        ->check(CLI::IsMember({"tiny", "small", "gpt2"}))
        ->capture_default_str();
    app.add_option("--dtype", settings.dtype)
        ->check(CLI::IsMember({"all", "fp32", "bf16", "fp16"}))
        ->capture_default_str();
    app.add_option("--samples", settings.samples)->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--sample-ms", settings.sample_ms, "length of a sample")
        ->check(CLI::Range(0.0, 1e4))
        ->capture_default_str();
    app.add_option("--threads", settings.threads)->check(CLI::Range(0, 4096))->capture_default_str();
    app.add_flag("--fused-epilogues", settings.fused_epilogues,
                 "on a GPU: bias and GELU within cuBLASLt's products");
    app.add_option("--json", settings.out, "file for the results");
    CLI11_PARSE(app, argc, argv);
    try {
        run(settings);
    } catch (const Error& error) {
        fprintf(stderr, "bench_ops: %s\n", error.what());
        return 1;
    }
    return 0;
}
