// train_gpt: trains a GPT from token shards. Read it top to bottom: what a run holds, how it is set up, one
// training step, validation, samples, checkpoints, the loop, and main. The file is plain C++ for every
// backend; the ops behind kernels/kernels.h are CUDA or CPU code, whichever was linked.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>  // write, _exit

#include "cli/console.h"    // boxed_table, console_step, console_error
#include "cli/options.h"    // TrainOptions, parse_train
#include "cli/run_log.h"    // log.jsonl, main.log
#include "cli/version.h"    // git_commit
#include "data/loader.h"    // loader_batch
#include "data/tokenize.h"  // the tokenize command
#include "data/tokenizer.h"
#include "dist/comm.h"  // ranks
#include "dist/data_parallel.h"
#include "dist/launcher.h"
#include "dist/layout.h"  // assign_owners
#include "kernels/device.h"
#include "kernels/error.h"
#include "kernels/matmul_ceiling.h"
#include "kernels/tree.h"  // tree_fold
#include "model/checkpoint.h"
#include "model/gpt.h"  // gpt_forward_backward
#include "model/huggingface.h"
#include "model/sample.h"
#include "optim/grad_clip.h"
#include "optim/loss_scaler.h"
#include "optim/lr_adapt.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"

using nlohmann::json;
namespace fs = std::filesystem;

namespace {

// The first SIGINT, SIGTERM or SIGHUP asks the loop to finish its step, save and exit; any second one ends
// the process at once. A signal handler has no context: the one global there is.
volatile std::sig_atomic_t stop_requested = 0;
constexpr int stop_signals[] = {SIGINT, SIGTERM, SIGHUP};

void request_stop(int) {
    stop_requested = 1;
    for (const int number : stop_signals) signal(number, SIG_DFL);
}

// What nohup ignores stays ignored.
void catch_stop_signals() {
    for (const int number : stop_signals) {
        const auto before = signal(number, request_stop);
        if (number == SIGHUP && before == SIG_IGN) signal(number, SIG_IGN);
    }
}

// Shards are mapped into memory: what another program cuts off while they are read shows as a bus error.
void report_bus_error(int) {
    constexpr char text[] =
        "train_gpt: a data file was shortened while it was read, or cannot be read (SIGBUS)\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, sizeof(text) - 1);
    _exit(1);
}

double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---------------------------------------------------------------------------------------------------
// What a run holds

// Consecutive steps with a non-finite gradient after which a run gives up: it will not recover by itself.
// Steps that a smaller loss scale may mend do not count.
constexpr uint64_t max_consecutive_skips = 10;

template <typename Storage>
struct Run {
    TrainOptions options;
    json values;                // the options, for the log and checkpoints
    bool warmup_given = false;  // else the default gives way to a short run
    Comm* comm = nullptr;       // of all ranks; this one's part of the work is below
    Stream* stream = nullptr;
    RunLog log;
    Console console;
    Tokenizer tokenizer;  // empty where none is known
    std::string tokenizer_path;
    std::vector<int> prompt;  // what samples start with
    Loader train, val;        // val.files is empty without --val-data
    Gpt<Storage> model;
    Optimizer optimizer;
    Ownership ownership;  // which blocks this rank updates
    DataParallel parallel;
    LossScaler scaler;                 // stays at 1 but for fp16
    double* norm_sums = nullptr;       // device, one a block
    std::vector<double> squares;       // of the last step's gradients, by block
    std::vector<double> leaf_squares;  // with --lr-adapt: of its leaves' gradients, all leaves together
    LrAdapt lr_adapt;
    size_t T = 0;  // tokens a row
    size_t micro_batches_per_step = 0;
    bool resumed = false;              // from a checkpoint
    std::string last_checkpoint;       // its folder; "" before the first
    uint64_t first_step = 0;           // steps that an earlier run has done
    uint64_t step = 0;                 // optimizer steps done
    uint64_t micro_batches = 0;        // read so far: the position in the data
    uint64_t skipped = 0;              // steps not taken because a gradient was not finite
    double matmul_ceiling = 0;         // FLOP/s of a large product: what MFU is measured against
    double flops_per_token = 0;        // forward and backward
    double val_loss = NAN;             // the last one
    bool stop = false;                 // a signal came, to any rank
    std::vector<int> inputs, targets;  // one micro-batch

    bool leads() const { return comm_rank(comm) == 0; }
    DeviceConfig device() const {
        const std::vector<int>& nodes = comm_nodes(comm);
        const auto here = std::count(nodes.begin(), nodes.end(), nodes[static_cast<size_t>(comm_rank(comm))]);
        return {.index = comm_environment(comm).local_rank,
                .threads = options.threads,
                .sharers = static_cast<int>(here),
                .tf32 = options.tf32};
    }
};

// ---------------------------------------------------------------------------------------------------
// Set-up

// The tokenizer's end-of-text id; without a tokenizer, GPT-2's where the vocabulary is GPT-2's, else 0.
int end_of_text(const Tokenizer& tokenizer, const GptConfig& config) {
    if (tokenizer.end_of_text >= 0) return tokenizer.end_of_text;
    return config.vocab_size == 50257 ? 50256 : 0;
}

// Every id that a tokenizer makes must be one of the model's. A model may have more: a vocabulary is often
// rounded up.
void check_tokenizer(const Tokenizer& tokenizer, const std::string& path, const GptConfig& config) {
    if (tokenizer.vocab_size() <= config.vocab_size) return;
    fail("--tokenizer %s: has %zu token ids, but the model has only %zu", path.c_str(),
         tokenizer.vocab_size(), config.vocab_size);
}

// The ids that sampling starts with: those of the text that `flag` gave, or end-of-text without any.
std::vector<int> prompt_ids(const std::string& flag, const std::string& text, const Tokenizer& tokenizer,
                            const std::string& tokenizer_path, const GptConfig& config) {
    if (text.empty()) return {end_of_text(tokenizer, config)};
    if (tokenizer_path.empty()) fail("%s: no tokenizer is known; give one with --tokenizer", flag.c_str());
    if (!tokenizer.obstacle.empty()) {
        fail("%s: cannot be encoded: %s %s; this program encodes text with byte tokenizers only",
             flag.c_str(), tokenizer_path.c_str(), tokenizer.obstacle.c_str());
    }
    return encode(tokenizer, text);
}

// PREFIX_tokenizer.json beside shards PREFIX_train_000.bin, as `tokenize` writes it; "" where there is none.
std::string tokenizer_of_shards(const std::vector<TokenFile>& shards) {
    const std::string& path = shards[0].path;
    const size_t cut = path.rfind("_train_");
    if (cut == std::string::npos) return "";
    const std::string candidate = path.substr(0, cut) + "_tokenizer.json";
    return fs::exists(candidate) ? candidate : "";
}

// The model's shape: a preset or a folder, then what the options say about it.
GptConfig choose_config(const TrainOptions& o, const std::string& checkpoint, const Tokenizer& tokenizer) {
    if (!checkpoint.empty()) return huggingface_read_config(checkpoint);
    GptConfig config;
    if (!gpt_preset(o.model, config)) {
        if (!fs::is_directory(o.model))
            fail("--model %s: neither d6, d12, d24, d36, d48 nor a folder", o.model.c_str());
        config = huggingface_read_config(o.model);
        if (o.layers || o.heads || o.channels || o.vocab_size || o.untie_head) {
            fail(
                "--model %s: a folder has its own --layers, --heads, --channels, --vocab-size and "
                "--untie-head",
                o.model.c_str());
        }
        return config;
    }
    if (o.layers) config.layers = o.layers;
    if (o.heads) config.heads = o.heads;
    if (o.channels) config.channels = o.channels;
    if (o.seq_len) config.seq_len = o.seq_len;
    if (o.vocab_size) {
        config.vocab_size = o.vocab_size;
    } else if (tokenizer.vocab_size() > 0) {
        config.vocab_size = tokenizer.vocab_size();
    }
    config.tied_head = !o.untie_head;
    gpt_check(config);
    return config;
}

// The matrices that Muon orthogonalises within the attention's first one.
void set_muon_blocks(GptConfig& config, const TrainOptions& o) {
    config.split_qkv = o.muon_split_qkv;
    config.qk_group_heads = o.muon_qk_group;
    if (o.muon_qk_group == 0) return;
    if (!o.muon_split_qkv) fail("--muon-qk-group %zu: needs --muon-split-qkv true", o.muon_qk_group);
    if (config.heads % o.muon_qk_group != 0)
        fail("--muon-qk-group %zu: does not divide %zu heads", o.muon_qk_group, config.heads);
}

// Micro-batches of a step, steps of the run and its warm-up, from the options and the data.
template <typename Storage>
void plan_steps(Run<Storage>& run) {
    TrainOptions& o = run.options;
    const size_t micro_tokens = o.batch_size * run.T, leaves = o.virtual_ranks;
    if (o.tokens_per_step % (micro_tokens * leaves) != 0) {
        const size_t unit = micro_tokens * leaves, below = o.tokens_per_step / unit * unit;
        const std::string shared = leaves == 1 ? "" : " times " + std::to_string(leaves) + " virtual ranks";
        fail(
            "--tokens-per-step %zu: not a multiple of --batch-size %zu times --seq-len %zu%s = %zu; %s%zu "
            "would be",
            o.tokens_per_step, o.batch_size, run.T, shared.c_str(), unit,
            below > 0 ? (std::to_string(below) + " or ").c_str() : "", below + unit);
    }
    run.micro_batches_per_step = o.tokens_per_step / micro_tokens;
    if (o.steps == 0) {
        const double batches = o.epochs * static_cast<double>(loader_batches_per_epoch(run.train));
        o.steps = static_cast<size_t>(batches / static_cast<double>(run.micro_batches_per_step));
        if (o.steps == 0) {
            fail(
                "--epochs %g: %.0f micro-batches are less than a step of %zu (--tokens-per-step %zu); "
                "--steps says how many steps to take",
                o.epochs, batches, run.micro_batches_per_step, o.tokens_per_step);
        }
    }
    o.schedule.steps = o.optimizer.total_steps = o.steps;
    if (!run.warmup_given) o.schedule.warmup = std::min(o.schedule.warmup, o.steps / 10);
    if (o.schedule.warmup > o.steps) {
        fail("--warmup %zu: longer than the run of %zu steps", o.schedule.warmup, o.steps);
    }
}

// "h.3.attn.c_attn.weight" -> "h.*.attn.c_attn.weight": what the layers have in common.
std::string without_layer(const std::string& name) {
    if (!name.starts_with("h.")) return name;
    return "h.*" + name.substr(name.find('.', 2));
}

// "1e-05", "0.0006": a number as people write it.
std::string short_number(double x) {
    char text[32];
    snprintf(text, sizeof(text), "%g", x);
    return text;
}

std::string precision_text(const LossScaler& scaler, Dtype dtype, const OptimizerConfig& config) {
    std::string state = std::string(", ") + dtype_name(config.state_dtype) + " optimizer state";
    if (config.kind == OptimizerKind::muon && config.muon_state_dtype)
        state += std::string(", ") + dtype_name(*config.muon_state_dtype) + " momentum of Muon";
    if (dtype == Dtype::fp32) return "fp32" + state;
    const std::string text = std::string(dtype_name(dtype)) + ", fp32 master weights and gradients" + state;
    if (dtype == Dtype::bf16) return text;
    return text + ", loss scale " + short_number(scaler.scale) +
           (scaler.dynamic ? " at the start" : ", fixed");
}

// "4, each 2 of 8 virtual ranks, gradients added in fp32"
template <typename Storage>
std::string ranks_text(const Run<Storage>& run) {
    const TrainOptions& o = run.options;
    std::string text = std::to_string(comm_ranks(run.comm));
    if (o.virtual_ranks > 1) {
        text += ", each " + std::to_string(run.parallel.own_leaves) + " of " +
                std::to_string(o.virtual_ranks) + " virtual ranks";
    }
    return text + ", gradients reduced in " + dtype_name(o.reduce_dtype);
}

template <typename Storage>
std::string configuration_table(const Run<Storage>& run) {
    const TrainOptions& o = run.options;
    const GptConfig& c = run.model.config;
    const auto counted = [](size_t count, const char* what) { return std::to_string(count) + " " + what; };
    const std::string schedule = run.values["schedule"];
    const double final_lr = o.schedule.lr * o.schedule.final_lr_frac;
    const bool muon = o.optimizer.kind == OptimizerKind::muon;
    return boxed_table({
        {"configuration", ""},
        {"program", version_text()},
        {"device", device_name(run.stream) + ", matmul ceiling " +
                       short_number(std::round(run.matmul_ceiling / 1e9)) + " GFLOP/s (measured)"},
        {"model", counted(c.layers, "layers, ") + counted(c.heads, "heads, ") +
                      counted(c.channels, "channels, ") + counted(c.vocab_size, "token ids, ") +
                      counted(c.seq_len, "positions") + (c.tied_head ? "" : ", untied head")},
        {"parameters", with_commas(gpt_parameter_count(run.model.table))},
        {"training data", counted(run.train.files.size(), "shard(s), ") +
                              with_commas(loader_windows(run.train)) + " rows of " +
                              counted(run.T, "tokens")},
        {"batch", with_commas(o.tokens_per_step) +
                      " tokens a step = " + counted(run.micro_batches_per_step, "micro-batch(es) of ") +
                      counted(o.batch_size, "x ") + std::to_string(run.T)},
        {"ranks", ranks_text(run)},
        {"length", with_commas(o.steps) + " steps, " + with_commas(o.steps * o.tokens_per_step) + " tokens"},
        {"learning rate", short_number(o.schedule.lr) + ", warm-up " + counted(o.schedule.warmup, "steps, ") +
                              schedule + " to " + short_number(final_lr)},
        {"optimizer", muon ? "Muon for the blocks' matrices, AdamW for the rest" : "AdamW"},
        {"precision", precision_text(run.scaler, dtype_of<Storage>(), o.optimizer)},
        {"output", o.out.empty() ? "none (--out writes log and checkpoints)" : o.out},
    });
}

// Who owns what: the optimizer's slots, with those of all layers in one row.
template <typename Storage>
std::string ownership_table(const Run<Storage>& run) {
    std::vector<std::vector<std::string>> rows = {
        {"tensor", "optimizer", "matrices", "shape", "parameters", "decay", "state bytes"}};
    const auto add = [](std::string& cell, size_t more) { cell = std::to_string(std::stoull(cell) + more); };
    for (const OptimizerSlot& slot : run.optimizer.slots) {
        const Parameter& p = *slot.parameter;
        const std::string name =
            without_layer(p.name) + (slot.block.name.empty() ? "" : " (" + slot.block.name + ")");
        // An embedding's ranges of rows are one tensor to the reader.
        const bool goes_on = slot.block.name.empty() && slot.block.first_row > 0;
        const size_t shape_rows = slot.block.name.empty() ? p.used_rows : slot.block.rows;
        const auto same =
            std::find_if(rows.begin() + 1, rows.end(), [&](const auto& row) { return row[0] == name; });
        // Rows that only pad a table are no parameters, but have state.
        const size_t used = std::max(p.used_rows, slot.block.first_row) - slot.block.first_row;
        const size_t rows_used = std::min(slot.block.rows, used);
        const size_t parameters = rows_used * p.cols;
        const size_t neurons =
            slot.muon && run.optimizer.config.muon_normuon ? slot.neuron_count() * sizeof(float) : 0;
        const size_t state = slot.size() * dtype_size(slot.state_dtype) * (slot.muon ? 1 : 2) + neurons;
        if (same == rows.end()) {
            rows.push_back({name, slot.muon ? "Muon" : "AdamW", "1",
                            std::to_string(shape_rows) + " x " + std::to_string(p.cols),
                            std::to_string(parameters), p.weight_decay ? "yes" : "no",
                            std::to_string(state)});
        } else {
            if (!goes_on) add((*same)[2], 1);
            add((*same)[4], parameters);
            add((*same)[6], state);
        }
    }
    for (size_t i = 1; i < rows.size(); i++) {
        for (const size_t column : {2, 4, 6}) rows[i][column] = with_commas(std::stoull(rows[i][column]));
    }
    return boxed_table(rows);
}

// Muon's part of the optimizer's state; AdamW has the rest.
size_t muon_state_bytes(const Optimizer& optimizer) {
    size_t bytes = optimizer.neuron_elements * sizeof(float);
    for (const OptimizerSlot& slot : optimizer.slots) {
        if (slot.muon && slot.own) bytes += slot.vector_bytes();
    }
    return bytes;
}

// What the run has of the device's memory, row by row, and the device's own count of all of it.
template <typename Storage>
std::string memory_table(const Run<Storage>& run) {
    const Gpt<Storage>& model = run.model;
    const size_t muon = muon_state_bytes(run.optimizer), blocks = table_blocks(model.table);
    const size_t squared_leaves = run.options.lr_adapt ? run.parallel.own_leaves : 0;
    const std::string recompute = run.values["recompute"];
    std::string activations = "activations and optimizer's work, --recompute " + recompute;
    if (model.recompute != Recompute::none) {
        const size_t workspace = optimizer_minimum_workspace(run.optimizer) * sizeof(float);
        const Gpt<Storage> all_kept =
            gpt_plan<Storage>(model.config, model.B, model.T, true, Recompute::none, workspace);
        activations += " (none: " + mebibytes(all_kept.activations_bytes) + " MiB)";
    }
    std::vector<std::vector<std::string>> rows = {{"memory", "bytes", "MiB"}};
    const auto add = [&](const std::string& what, size_t bytes) {
        rows.push_back({what, with_commas(bytes), mebibytes(bytes)});
    };
    add("parameters", model.params_bytes);
    add("master weights (fp32)", model.master_bytes);
    add("gradients (fp32)", model.grads_bytes);
    add("AdamW's state", optimizer_state_bytes(run.optimizer) - muon);
    add("Muon's state", muon);
    add(activations, model.activations_bytes);
    add("sums of earlier leaves (fp32)", run.parallel.kept_bytes);
    add("gradients on their way", run.parallel.staging_bytes);
    add("sums of blocks, lists of the optimizer",
        (1 + squared_leaves) * blocks * sizeof(double) + optimizer_lists_bytes(run.optimizer));
    add("scratch of the ops", device_scratch_bytes(run.stream));
    add("all", device_allocated_bytes(run.stream));
    return boxed_table(rows);
}

// The checkpoint that the run goes on from; its folder is "" where the run is a new one. Changes nothing.
FoundCheckpoint find_checkpoint(const TrainOptions& o, Console& console) {
    if (o.new_data && !o.resume) fail("--new-data: is for a run that --resume goes on with");
    if (o.out.empty()) {
        if (o.resume) fail("--resume: needs --out, the folder to resume from");
        return {};
    }
    const FoundCheckpoint found = checkpoint_find(o.out);
    if (found.folder.empty() && !found.passed_over.empty()) {
        fail(
            "--out %s: none of its %zu checkpoint(s) is complete and undamaged, and nothing was changed; the "
            "newest is %s; give another folder, or move them away to start from the beginning",
            o.out.c_str(), found.passed_over.size(), found.passed_over[0].c_str());
    }
    if (!found.folder.empty() && !o.resume) {
        fail("--out %s: has a checkpoint of step %lu; give --resume to go on from it, or another folder",
             o.out.c_str(), found.step);
    }
    for (const std::string& reason : found.passed_over)
        console_line(console, "passed over checkpoint " + reason);
    if (!found.folder.empty()) {
        console_line(console, "resuming from " + found.folder);
    } else if (o.resume) {
        console_line(console, "no checkpoint in " + o.out + ": starting from the beginning");
    }
    return found;
}

// fp16 alone needs a loss scale: bf16 has fp32's range.
LossScaler choose_scaler(const TrainOptions& o) {
    if (o.loss_scale != 0 && o.dtype != Dtype::fp16)
        fail("--loss-scale %g: is for --dtype fp16 only", o.loss_scale);
    if (o.loss_scale != 0 && std::exp2(std::round(std::log2(o.loss_scale))) != o.loss_scale)
        fail("--loss-scale %g: must be a power of two, so that scaling rounds nothing", o.loss_scale);
    if (o.dtype != Dtype::fp16) return loss_scaler_fixed(1);
    return o.loss_scale != 0 ? loss_scaler_fixed(static_cast<float>(o.loss_scale)) : LossScaler{};
}

// What is known of a run before its storage type is: a resumed run has the checkpoint's.
struct Start {
    Console console;
    RunLog log;
    FoundCheckpoint checkpoint;  // its folder is "" where the run is a new one
    json saved;                  // the checkpoint's state
    TrainCommand command;        // a resumed run has the checkpoint's options below those given
};

// Rank 0 looks; the others are told.
Start find_start(const TrainCommand& command, Comm* comm) {
    Start start{console_open(), {}, {}, {}, command};
    start.console.silent = comm_rank(comm) != 0;
    std::string found;
    if (comm_rank(comm) == 0) {
        start.log = run_log_open(command.options.out);
        start.checkpoint = find_checkpoint(command.options, start.console);
        found = std::to_string(start.checkpoint.step) + " " + start.checkpoint.folder;
    }
    comm_broadcast(comm, found);
    start.checkpoint.step = strtoull(found.c_str(), nullptr, 10);
    start.checkpoint.folder = found.substr(found.find(' ') + 1);
    if (start.checkpoint.folder.empty()) return start;
    start.saved = checkpoint_read_state(start.checkpoint.folder);
    std::vector<std::string> changes;
    start.command = resume_train(command, start.saved.at("options"), changes);
    for (const std::string& change : changes)
        console_line(start.console, "changed since the checkpoint: " + change);
    return start;
}

// Opens shards and tokenizer and returns the model's shape. The three depend on each other: the tokenizer
// that stands beside the shards gives a new model its vocabulary, and the shards' ids must be in it.
template <typename Storage>
GptConfig open_data(Run<Storage>& run, const std::string& checkpoint) {
    const TrainOptions& o = run.options;
    if (o.train_data.empty()) fail("--train-data: say which token shards to train on");
    std::vector<TokenFile> shards = token_files_open(o.train_data, "--train-data");
    run.tokenizer_path = o.tokenizer.empty() ? tokenizer_of_shards(shards) : o.tokenizer;
    if (!run.tokenizer_path.empty()) run.tokenizer = tokenizer_read(run.tokenizer_path, "--tokenizer");
    GptConfig config = choose_config(o, checkpoint, run.tokenizer);
    if (o.optimizer.kind == OptimizerKind::muon) set_muon_blocks(config, o);
    check_tokenizer(run.tokenizer, run.tokenizer_path, config);
    run.prompt = prompt_ids("--sample-prompt", o.sample_prompt, run.tokenizer, run.tokenizer_path, config);

    run.T = o.seq_len ? o.seq_len : config.seq_len;
    if (run.T > config.seq_len) fail("--seq-len %zu: the model has %zu positions", run.T, config.seq_len);
    run.train = loader_create(std::move(shards), "--train-data " + o.train_data, o.batch_size, run.T,
                              config.vocab_size, o.seed);
    // Validation reads its rows in order, as many at a time as there are: a batch need not be full.
    if (!o.val_data.empty())
        run.val = loader_open(o.val_data, "--val-data", 1, run.T, config.vocab_size, o.seed);
    return config;
}

// Puts what the options left open as this run has it: a resumed run takes it from there, and so has the
// same model and schedule whatever the defaults would say then.
template <typename Storage>
void settle_values(Run<Storage>& run, const GptConfig& config) {
    run.values["layers"] = config.layers;
    run.values["heads"] = config.heads;
    run.values["channels"] = config.channels;
    run.values["vocab-size"] = config.vocab_size;
    run.values["untie-head"] = !config.tied_head;
    run.values["seq-len"] = run.T;
    run.values["steps"] = run.options.steps;
    run.values["warmup"] = run.options.schedule.warmup;
    run.values["virtual-ranks"] = run.options.virtual_ranks;
}

// What all ranks must have alike, a line each: the program, the options but those of a start, and the data,
// whose path may differ.
template <typename Storage>
std::vector<std::string> common_ground(const Run<Storage>& run) {
    std::vector<std::string> lines = {version_text()};
    for (const auto& [name, value] : run.values.items()) {
        if (!option_is_of_a_start(name) && name != "train-data" && name != "val-data")
            lines.push_back("--" + name + " " + value.dump(-1, ' ', false, json::error_handler_t::replace));
    }
    const auto add_data = [&](const char* option, const Loader& loader) {
        lines.push_back(std::string(option) +
                        (loader.files.empty() ? "" : " " + loader_fingerprint(loader).dump()));
    };
    add_data("--train-data", run.train);
    add_data("--val-data", run.val);
    return lines;
}

// Fails on rank 0, and so everywhere, where a rank was started with something else.
template <typename Storage>
void check_ranks_agree(const Run<Storage>& run) {
    const std::vector<std::string> own = common_ground(run);
    std::string text;
    for (const std::string& line : own) text += line + "\n";
    const std::vector<std::string> texts = comm_gather(run.comm, text);
    for (size_t rank = 1; rank < texts.size(); rank++) {
        std::istringstream lines(texts[rank]);
        std::string line;
        for (const std::string& expected : own) {
            if (std::getline(lines, line) && line == expected) continue;
            fail("ranks disagree: rank %zu has %s, rank 0 %s", rank, line.c_str(), expected.c_str());
        }
    }
}

// The optimizer works in the activations' memory, which is dead between backward and the next forward.
template <typename Storage>
void update_weights(Run<Storage>& run, double lr, float grad_scale) {
    Gpt<Storage>& model = run.model;
    optimizer_step<Storage>(run.optimizer, model.params, model.master, model.grads, static_cast<float>(lr),
                            grad_scale, reinterpret_cast<float*>(model.activations),
                            model.activations_bytes / sizeof(float), run.stream);
}

// A micro-batch and an update before there are weights: each op takes its scratch now, so that the memory
// table is complete, what is missing is missed here, and the first step takes no longer than others. Of zero
// weights and gradients of a loss times zero, zeros are left; only the optimizer counts, and forgets it
// again.
template <typename Storage>
void rehearse(Run<Storage>& run) {
    console_live(run.console, "setting up: a micro-batch of zeros");
    gpt_forward_backward(run.model, run.inputs.data(), run.targets.data(), run.model.B, run.model.T, 0.0f,
                         run.stream);
    block_squares(run.model.grads, run.model.table, run.ownership, run.norm_sums, run.stream);
    update_weights(run, 0, 0.0f);
    run.optimizer.steps = run.optimizer.degenerate_updates = run.optimizer.orthogonalized = 0;
}

// Takes all memory of the run.
template <typename Storage>
void create_model(Run<Storage>& run, const GptConfig& config) {
    const TrainOptions& o = run.options;
    const ParameterTable table = gpt_parameter_table(config);
    run.ownership = assign_owners(table, o.optimizer.kind, comm_ranks(run.comm), comm_rank(run.comm));
    const Optimizer plan = optimizer_plan(o.optimizer, table, &run.ownership);
    const size_t workspace = optimizer_minimum_workspace(plan) * sizeof(float);
    // The ceiling has a stream of its own: its matrices are gone before the run's memory is taken and
    // counted.
    run.stream = stream_create(run.device());
    run.matmul_ceiling = measure_matmul_ceiling<Storage>(run.stream);
    stream_destroy(run.stream);
    comm_sum(run.comm, &run.matmul_ceiling, 1);
    run.stream = stream_create(run.device());
    comm_open_transport(run.comm, run.stream);
    run.model = gpt_create<Storage>(config, o.batch_size, run.T, true, o.recompute, workspace, run.stream,
                                    &run.ownership);
    run.optimizer = optimizer_create(o.optimizer, run.model.table, run.stream, &run.ownership);
    run.parallel = data_parallel_create(run.comm, run.model.table, gpt_stages(config), run.ownership,
                                        {o.virtual_ranks, o.reduce_dtype, !o.no_overlap, o.lr_adapt},
                                        run.device(), run.stream);
    run.norm_sums =
        static_cast<double*>(device_malloc(table_blocks(run.model.table) * sizeof(double), run.stream));
    if (o.lr_adapt) run.lr_adapt = lr_adapt_create(table_blocks(run.model.table));
    run.flops_per_token = gpt_flops_per_token(config, run.T);
    run.inputs.resize(o.batch_size * run.T);
    run.targets.resize(o.batch_size * run.T);
    rehearse(run);
}

// Where a resumed run stands: its steps, its loss scale, and its position in the data, which is their
// beginning where they are other data.
template <typename Storage>
void take_up(Run<Storage>& run, const Start& start) {
    const json& saved = start.saved;
    run.last_checkpoint = start.checkpoint.folder;
    run.step = run.first_step = start.checkpoint.step;
    run.skipped = saved.at("skipped");
    if (run.scaler.dynamic) {
        run.scaler.scale = saved.at("loss_scale");
        run.scaler.good_steps = saved.at("loss_scale_good_steps");
    }
    run.micro_batches = saved.at("micro_batches");
    if (const json before = saved.at("options").at("virtual-ranks"); before != run.options.virtual_ranks) {
        console_line(run.console,
                     "--virtual-ranks " + std::to_string(run.options.virtual_ranks) + ", was " +
                         before.dump() +
                         ": from here on the bits differ from those of a run without the change");
    }
    const std::string difference = loader_difference(saved.at("data"), loader_fingerprint(run.train));
    if (difference.empty() && !run.options.new_data) return;
    if (!run.options.new_data) {
        fail(
            "--train-data %s: not the data of the checkpoint: %s; --new-data starts reading at their "
            "beginning",
            run.options.train_data.c_str(), difference.c_str());
    }
    console_line(run.console, difference.empty()
                                  ? "--new-data: reading starts at the data's beginning"
                                  : "other data than the checkpoint's: reading starts at their "
                                    "beginning");
    run.micro_batches = 0;
}

// The averages of --lr-adapt; a checkpoint of a run without it has none.
json lr_adapt_json(const LrAdapt& adapt) {
    return {{"steps", adapt.steps}, {"fast", adapt.fast}, {"slow", adapt.slow}};
}

void lr_adapt_restore(LrAdapt& adapt, const json& saved, const std::string& folder) {
    LrAdapt restored = {saved.at("steps"), saved.at("fast"), saved.at("slow")};
    if (restored.fast.size() != adapt.fast.size() || restored.slow.size() != adapt.slow.size())
        fail("%s: state.json's lr_adapt is of another model", folder.c_str());
    adapt = std::move(restored);
}

// The weights that a run starts with; a resumed run has the optimizer's state too.
template <typename Storage>
void load_weights(Run<Storage>& run, const Start& from) {
    const FoundCheckpoint& start = from.checkpoint;
    if (run.resumed) {
        checkpoint_load(start.folder, run.model, run.optimizer, run.stream);
        if (run.options.lr_adapt && from.saved.contains("lr_adapt"))
            lr_adapt_restore(run.lr_adapt, from.saved["lr_adapt"], start.folder);
    } else if (!fs::is_directory(run.options.model)) {
        gpt_initialize(run.model, run.options.seed, run.stream);
    } else {
        std::vector<std::string> warnings;
        huggingface_read(run.model, run.options.model, warnings, run.stream);
        for (const std::string& warning : warnings) console_line(run.console, warning);
    }
}

// Sets a run up, or resumes it. The order is cheap checks first: a bad option or data file is found before
// memory is taken.
template <typename Storage>
Run<Storage> set_up(const Start& start, Comm* comm) {
    Run<Storage> run;
    run.comm = comm;
    run.console = start.console;
    run.log = start.log;
    run.options = start.command.options;
    run.values = start.command.values;
    run.warmup_given = start.command.given.contains("warmup");
    if (run.options.virtual_ranks == 0) run.options.virtual_ranks = static_cast<size_t>(comm_ranks(comm));
    data_parallel_check(run.options.virtual_ranks, comm_ranks(comm));
    if (run.options.lr_adapt && run.options.virtual_ranks < 2) {
        fail(
            "--lr-adapt: compares the gradients of 2 or more virtual ranks, and there is 1; --virtual-ranks "
            "2 would cut a step in two");
    }
    run.scaler = choose_scaler(run.options);
    if (run.options.loss_scale != 0) {
        console_line(run.console, "--loss-scale " + short_number(run.options.loss_scale) +
                                      " is fixed: what over- or underflows with it is lost at every step");
    }
    run.resumed = !start.checkpoint.folder.empty();
    // Not refused: a command line for Muon is AdamW's by one option.
    const std::string unused = run.resumed ? "" : options_without_effect(start.command);
    if (!unused.empty()) console_line(run.console, "without effect with --optimizer adamw: " + unused);
    const GptConfig config = open_data(run, start.checkpoint.folder);
    plan_steps(run);
    settle_values(run, config);
    check_ranks_agree(run);
    if (run.resumed) take_up(run, start);
    create_model(run, config);
    load_weights(run, start);
    return run;
}

// ---------------------------------------------------------------------------------------------------
// One training step

struct StepResult {
    double loss, grad_norm, lr;
    double seconds, optimizer_seconds;
    double loss_scale;
    double comm_seconds;
    BytesSent bytes_sent;               // by this rank
    uint64_t orthogonalized;            // matrices, by all ranks
    std::vector<float> lr_multipliers;  // of --lr-adapt, by block
    bool skipped;
    bool hopeless;  // skipped, and no smaller loss scale could help
};

// Forward and backward over the micro-batches of this rank's leaf `leaf`: its gradients are left in the
// arena, and those of the rank's last leaf are on their way to their owners. Returns the sum of the token
// losses.
template <typename Storage>
double train_leaf(Run<Storage>& run, size_t leaf, float loss_scale) {
    DataParallel& parallel = run.parallel;
    const size_t micro_batches = run.micro_batches_per_step / run.options.virtual_ranks;
    const uint64_t first = run.micro_batches + (parallel.first_leaf + leaf) * micro_batches;
    const bool last_leaf = leaf + 1 == parallel.own_leaves;
    GptHooks hooks;
    hooks.before_forward = [&](size_t stage) { await_weights(parallel, stage); };
    device_memset_zero(run.model.grads, run.model.grads_bytes, run.stream);
    double loss_sum = 0;
    for (size_t i = 0; i < micro_batches; i++) {
        if (last_leaf && i + 1 == micro_batches)
            hooks.after_backward = [&](size_t stage) { reduce_stage(parallel, stage, run.model.grads); };
        loader_batch(run.train, first + i, run.inputs.data(), run.targets.data());
        loss_sum += gpt_forward_backward(run.model, run.inputs.data(), run.targets.data(),
                                         run.options.batch_size, run.T, loss_scale, run.stream, hooks);
        const size_t own = parallel.own_leaves * micro_batches;
        if (own > 1) {
            console_live(run.console, "step " + std::to_string(run.step + 1) + ": micro-batch " +
                                          std::to_string(leaf * micro_batches + i + 1) + " of " +
                                          std::to_string(own));
        }
    }
    if (!last_leaf) keep_leaf(parallel, leaf, run.model.grads);
    return loss_sum;
}

// The step's gradients, summed over all leaves, on the owners of their blocks. Returns the sum of the token
// losses of all ranks, and leaves the squares of all blocks: leaf by leaf and block by block, so that neither
// depends on how many ranks there are. With --lr-adapt each rank's sums over its leaves come along.
template <typename Storage>
double sum_gradients(Run<Storage>& run, float loss_scale) {
    const size_t leaves = run.options.virtual_ranks, blocks = table_blocks(run.model.table);
    const auto ranks = static_cast<size_t>(comm_ranks(run.comm)),
               rank = static_cast<size_t>(comm_rank(run.comm));
    std::vector<double> values(leaves + blocks + (run.options.lr_adapt ? ranks * blocks : 0));
    const auto squares = values.begin() + static_cast<std::ptrdiff_t>(leaves);
    const auto of_ranks = squares + static_cast<std::ptrdiff_t>(blocks);
    for (size_t leaf = 0; leaf < run.parallel.own_leaves; leaf++)
        values[run.parallel.first_leaf + leaf] = train_leaf(run, leaf, loss_scale);
    run.micro_batches += run.micro_batches_per_step;
    finish_reduction(run.parallel);
    run.squares = block_squares(run.model.grads, run.model.table, run.ownership, run.norm_sums, run.stream);
    std::copy(run.squares.begin(), run.squares.end(), squares);
    if (run.options.lr_adapt) {
        const std::vector<double> own = own_leaf_squares(run.parallel);
        std::copy(own.begin(), own.end(), of_ranks + static_cast<std::ptrdiff_t>(rank * blocks));
    }
    comm_sum(run.comm, values.data(), values.size());
    run.squares.assign(squares, of_ranks);
    if (run.options.lr_adapt) run.leaf_squares = sum_leaf_squares({of_ranks, values.end()}, ranks);
    return tree_fold<double>(static_cast<unsigned>(leaves), [&](unsigned leaf) { return values[leaf]; });
}

// The optimizer's counters, which each rank has of its own matrices, as those of all ranks.
template <typename Storage>
uint64_t sum_counters(Run<Storage>& run, uint64_t degenerate_before, uint64_t orthogonalized_before) {
    Optimizer& optimizer = run.optimizer;
    double counts[] = {static_cast<double>(optimizer.degenerate_updates - degenerate_before),
                       static_cast<double>(optimizer.orthogonalized - orthogonalized_before)};
    comm_sum(run.comm, counts, 2);
    optimizer.degenerate_updates = degenerate_before + static_cast<uint64_t>(counts[0]);
    return static_cast<uint64_t>(counts[1]);
}

// Gives each slot, which are one a block, the learning rate that the agreement of the leaves allows.
template <typename Storage>
std::vector<float> adapt_rates(Run<Storage>& run) {
    if (!run.options.lr_adapt) return {};
    const std::vector<float> multipliers =
        lr_adapt_step(run.lr_adapt, run.leaf_squares, run.squares, run.options.virtual_ranks);
    for (size_t i = 0; i < multipliers.size(); i++) run.optimizer.slots[i].lr_factor = multipliers[i];
    return multipliers;
}

// Forward and backward over the step's micro-batches, then clip and update. A gradient that is not finite
// changes nothing: the step is skipped and counted, and only the data position and the loss scale move on.
template <typename Storage>
StepResult train_step(Run<Storage>& run) {
    const TrainOptions& o = run.options;
    StepResult result = {};
    const double start = now_seconds();
    const BytesSent bytes_before = comm_bytes_sent(run.comm);
    const double comm_before = comm_seconds(run.comm);
    const float scale = run.scaler.scale;
    const double loss_sum = sum_gradients(run, scale / static_cast<float>(o.tokens_per_step));
    const double backward_done = now_seconds();

    result.loss = loss_sum / static_cast<double>(o.tokens_per_step);
    result.lr = learning_rate(o.schedule, run.step);
    result.loss_scale = scale;
    result.grad_norm = global_grad_norm(run.squares) / scale;
    result.skipped = !std::isfinite(result.grad_norm);
    result.hopeless = result.skipped && !loss_scaler_can_back_off(run.scaler);
    loss_scaler_update(run.scaler, !result.skipped);
    if (!result.skipped) {
        // Unscaled, then clipped: by powers of two, so that the loss scale changes no bit of the update.
        const float grad_scale = clip_factor(result.grad_norm, o.grad_clip) / scale;
        const uint64_t degenerate = run.optimizer.degenerate_updates,
                       orthogonalized = run.optimizer.orthogonalized;
        result.lr_multipliers = adapt_rates(run);
        update_weights(run, result.lr, grad_scale);
        gather_weights(run.parallel, run.model.params);
        result.orthogonalized = sum_counters(run, degenerate, orthogonalized);
        run.step++;
    } else {
        run.skipped++;
    }
    stream_synchronize(run.stream);
    result.bytes_sent = comm_bytes_sent(run.comm) - bytes_before;
    result.comm_seconds = comm_seconds(run.comm) - comm_before;
    result.seconds = now_seconds() - start;
    result.optimizer_seconds = now_seconds() - backward_done;
    return result;
}

// ---------------------------------------------------------------------------------------------------
// Validation, samples, checkpoints

// Whether a signal asks for the end, which cuts validation and samples short; a run that has taken its last
// step finishes as if there had been none.
template <typename Storage>
bool stopping(const Run<Storage>& run) {
    return (run.stop || stop_requested) && run.step < run.options.steps;
}

// The same on all ranks, where a signal may have come to any one.
template <typename Storage>
bool all_stopping(Run<Storage>& run) {
    double requests = stop_requested;
    comm_sum(run.comm, &requests, 1);
    run.stop = requests > 0;
    return run.stop && run.step < run.options.steps;
}

// The mean loss over the first --val-tokens targets, whatever the batch size: the last batch may be smaller.
// The ranks take batches in turn, and their sums are added batch by batch.
template <typename Storage>
void validate(Run<Storage>& run) {
    if (run.val.files.empty()) return;
    const double start = now_seconds();
    const size_t wanted = (run.options.val_tokens + run.T - 1) / run.T;
    const size_t windows = std::min(wanted, loader_windows(run.val));
    const size_t B = run.options.batch_size, batches = (windows + B - 1) / B;
    const auto ranks = static_cast<size_t>(comm_ranks(run.comm)),
               rank = static_cast<size_t>(comm_rank(run.comm));
    std::vector<double> losses(batches);
    await_all_weights(run.parallel);
    for (size_t round = 0; round < batches; round += ranks) {
        if (all_stopping(run)) return;
        const size_t batch = round + rank;
        if (batch >= batches) continue;
        const size_t rows = std::min(B, windows - batch * B);
        loader_windows_in_order(run.val, batch * B, rows, run.inputs.data(), run.targets.data());
        losses[batch] = gpt_loss(run.model, run.inputs.data(), run.targets.data(), rows, run.T, run.stream);
        console_live(run.console, "validation: row " + std::to_string(batch * B + rows) + " of " +
                                      std::to_string(windows));
    }
    comm_sum(run.comm, losses.data(), losses.size());
    const double loss_sum = std::accumulate(losses.begin(), losses.end(), 0.0);
    const size_t targets = windows * run.T;
    run.val_loss = loss_sum / static_cast<double>(targets);
    const double ms = 1e3 * (now_seconds() - start);
    run_log_write(run.log, "val", run.step, {{"val_loss", run.val_loss}, {"targets", targets}, {"ms", ms}});
    run_log_validation_line(run.log, run.step, run.val_loss);
    char text[128];
    snprintf(text, sizeof(text), "step %lu | validation loss %.4f over %s targets | %.0f ms", run.step,
             run.val_loss, with_commas(targets).c_str(), ms);
    console_line(run.console, text);
}

// Turns sampled ids into text for people: no control characters, ids where no tokenizer is known.
std::string readable(const Tokenizer& tokenizer, const std::vector<int>& ids) {
    std::string pending;
    std::string text = printable(decode(tokenizer, ids), pending);
    return pending.empty() ? text : text + "\xEF\xBF\xBD";
}

template <typename Storage>
void sample(Run<Storage>& run) {
    if (run.options.sample_tokens == 0 || !run.leads()) return;
    await_all_weights(run.parallel);
    SampleConfig config = run.options.sample;
    config.seed = run.options.seed + run.step;  // another text at every step, the same in every run
    std::vector<int> sampled;
    if (!run.options.sample_prompt.empty()) sampled = run.prompt;
    generate<Storage>(
        run.model, run.prompt, run.options.sample_tokens, config,
        [&](int id) {
            sampled.push_back(id);
            return !stopping(run);
        },
        run.stream);
    if (stopping(run)) return;
    const std::string text = readable(run.tokenizer, sampled);
    run_log_write(run.log, "sample", run.step, {{"text", text}});
    console_line(run.console, "--- sample at step " + std::to_string(run.step) + " ---\n" + text + "\n---");
}

// What a message says of the state that a failed run leaves behind.
template <typename Storage>
std::string what_is_saved(const Run<Storage>& run) {
    return run.last_checkpoint.empty() ? "there is no checkpoint" : run.last_checkpoint + " is untouched";
}

// The first tensor with a weight that is not finite; "" where all are.
template <typename Storage>
std::string nonfinite_weight(const Run<Storage>& run) {
    std::vector<Storage> values;
    for (const Parameter& parameter : run.model.table) {
        values.resize(parameter.size());
        copy_to_host(values.data(), run.model.params + parameter.offset, values.size() * sizeof(Storage),
                     run.stream);
        for (const Storage value : values) {
            if (!std::isfinite(to_float(value))) return parameter.name;
        }
    }
    return "";
}

template <typename Storage>
void save(Run<Storage>& run) {
    if (run.options.out.empty()) return;
    const double start = now_seconds();
    await_all_weights(run.parallel);
    // All ranks have the same weights.
    if (const std::string name = run.leads() ? nonfinite_weight(run) : ""; !name.empty()) {
        fail("step %lu: %s has a weight that is not finite, and is not saved; %s (a lower --lr may help)",
             run.step, name.c_str(), what_is_saved(run).c_str());
    }
    json state = {{"options", run.values},
                  {"micro_batches", run.micro_batches},
                  {"skipped", run.skipped},
                  {"loss_scale", run.scaler.scale},
                  {"loss_scale_good_steps", run.scaler.good_steps},
                  {"data", loader_fingerprint(run.train)}};
    if (run.options.lr_adapt) state["lr_adapt"] = lr_adapt_json(run.lr_adapt);
    const CheckpointRanks ranks = {comm_rank(run.comm), [&run] {
                                       double nothing = 0;
                                       comm_sum(run.comm, &nothing, 1);
                                   }};
    checkpoint_save(run.options.out, run.step, run.model, run.optimizer, state, run.tokenizer_path,
                    end_of_text(run.tokenizer, run.model.config), run.options.keep, run.stream, ranks);
    run.last_checkpoint = checkpoint_folder(run.options.out, run.step);
    const double ms = 1e3 * (now_seconds() - start);
    run_log_write(run.log, "checkpoint", run.step, {{"ms", ms}});
    char text[96];
    snprintf(text, sizeof(text), "step %lu | checkpoint saved | %.0f ms", run.step, ms);
    console_line(run.console, text);
}

// ---------------------------------------------------------------------------------------------------
// The loop

// Bytes by what they were, each within the node and to other nodes.
json bytes_json(const BytesSent& bytes) {
    json result;
    const char* names[] = {"gradients", "weights", "values"};
    for (size_t kind = 0; kind < std::size(names); kind++)
        result[names[kind]] = {bytes.within_node[kind], bytes.between_nodes[kind]};
    return result;
}

std::vector<double> least_mean_most(const std::vector<float>& values) {
    const auto [least, most] = std::minmax_element(values.begin(), values.end());
    const double sum = std::accumulate(values.begin(), values.end(), 0.0);
    return {*least, sum / static_cast<double>(values.size()), *most};
}

template <typename Storage>
void report_step(Run<Storage>& run, const StepResult& result, double loop_start) {
    const double tokens_per_second = static_cast<double>(run.options.tokens_per_step) / result.seconds;
    const double mfu = run.flops_per_token * tokens_per_second / run.matmul_ceiling;
    json line = {{"loss", result.loss},
                 {"grad_norm", result.grad_norm},
                 {"lr", result.lr},
                 {"tokens_per_second", tokens_per_second},
                 {"ms", 1e3 * result.seconds},
                 {"optimizer_ms", 1e3 * result.optimizer_seconds},
                 {"comm_ms", 1e3 * result.comm_seconds},
                 {"mfu", mfu},
                 {"bytes_sent", result.bytes_sent.total()},
                 {"bytes_sent_as", bytes_json(result.bytes_sent)},
                 {"orthogonalized", result.orthogonalized},
                 {"peak_bytes", device_peak_bytes(run.stream)},
                 {"loss_scale", result.loss_scale},
                 {"skipped", run.skipped},
                 {"degenerate_updates", run.optimizer.degenerate_updates}};
    if (run.options.lr_adapt) line["lr_multiplier"] = least_mean_most(result.lr_multipliers);
    run_log_write(run.log, "train", run.step, line);
    run_log_train_line(run.log, run.step, result.loss, result.lr, result.grad_norm);
    if (run.step % run.options.log_every != 0 && run.step != run.options.steps) return;
    const double per_step = (now_seconds() - loop_start) / static_cast<double>(run.step - run.first_step);
    console_step(run.console,
                 {.step = run.step,
                  .steps = run.options.steps,
                  .loss = result.loss,
                  .grad_norm = result.grad_norm,
                  .lr = result.lr,
                  .tokens_per_second = tokens_per_second,
                  .mfu = mfu,
                  .ms = 1e3 * result.seconds,
                  .optimizer_ms = 1e3 * result.optimizer_seconds,
                  .eta_seconds = per_step * static_cast<double>(run.options.steps - run.step),
                  .optimizer = run.optimizer.config.kind == OptimizerKind::muon ? "muon" : "adamw"});
}

// Whether something that happens every `every` steps, and at the end of the run, is due.
template <typename Storage>
bool due(const Run<Storage>& run, size_t every) {
    return run.step == run.options.steps || (every != 0 && run.step % every == 0);
}

// The first tensor with a gradient that is not finite.
template <typename Storage>
std::string nonfinite_gradient(const Run<Storage>& run) {
    std::string name;
    for_blocks(run.model.table, [&](const Parameter& parameter, const Block&, size_t number) {
        if (name.empty() && !std::isfinite(run.squares[number])) name = parameter.name;
    });
    return name;
}

// A step that was skipped: said, and given up on when it goes on.
template <typename Storage>
void report_skip(Run<Storage>& run, const StepResult& result, uint64_t consecutive_skips) {
    const std::string tensor = nonfinite_gradient(run);
    const std::string scale =
        result.loss_scale == 1 ? "" : " at loss scale " + short_number(result.loss_scale);
    run_log_write(run.log, "skip", run.step,
                  {{"loss", result.loss},
                   {"tensor", tensor},
                   {"loss_scale", result.loss_scale},
                   {"skipped", run.skipped}});
    console_line(run.console, "step " + std::to_string(run.step + 1) + ": the gradient of " + tensor +
                                  " is not finite" + scale + ", step skipped; " +
                                  std::to_string(run.skipped) + " so far");
    if (consecutive_skips == max_consecutive_skips) {
        fail(
            "step %lu: the gradient was not finite %lu times in a row, first in %s; %s (a lower --lr or an "
            "earlier checkpoint may help)",
            run.step + 1, consecutive_skips, tensor.c_str(), what_is_saved(run).c_str());
    }
}

// What all ranks have sent since the start.
template <typename Storage>
BytesSent all_bytes_sent(Run<Storage>& run) {
    BytesSent bytes = comm_bytes_sent(run.comm);
    std::vector<double> counts(bytes.within_node, std::end(bytes.within_node));
    counts.insert(counts.end(), bytes.between_nodes, std::end(bytes.between_nodes));
    comm_sum(run.comm, counts.data(), counts.size());
    const size_t kinds = std::size(bytes.within_node);
    for (size_t kind = 0; kind < kinds; kind++) {
        bytes.within_node[kind] = static_cast<uint64_t>(counts[kind]);
        bytes.between_nodes[kind] = static_cast<uint64_t>(counts[kinds + kind]);
    }
    return bytes;
}

// ", sent by 4 ranks: 12.3 MiB of gradients, 6.1 MiB of weights, 0.1 MiB of values (0.0 MiB between nodes)"
std::string traffic_text(const BytesSent& bytes, int ranks) {
    if (ranks == 1) return "";
    const auto of = [&](Traffic traffic) {
        const auto kind = static_cast<size_t>(traffic);
        return mebibytes(bytes.within_node[kind] + bytes.between_nodes[kind]) + " MiB of ";
    };
    const uint64_t between =
        std::accumulate(std::begin(bytes.between_nodes), std::end(bytes.between_nodes), uint64_t{0});
    return "; sent by " + std::to_string(ranks) + " ranks: " + of(Traffic::gradients) + "gradients, " +
           of(Traffic::weights) + "weights, " + of(Traffic::values) + "values (" + mebibytes(between) +
           " MiB between nodes)";
}

template <typename Storage>
void train_loop(Run<Storage>& run) {
    const TrainOptions& o = run.options;
    if (!run.resumed && o.val_every != 0) validate(run);
    const double start = now_seconds();
    uint64_t consecutive_skips = 0;
    while (run.step < o.steps) {
        const StepResult result = train_step(run);
        bool saved = false;
        if (result.skipped) {
            if (result.hopeless) consecutive_skips++;
            report_skip(run, result, consecutive_skips);
        } else {
            consecutive_skips = 0;
            report_step(run, result, start);
            if (run.step == 1) {
                for (const std::string& fault : run.optimizer.first_update_faults)
                    console_line(run.console, "step 1: " + fault);
            }
            if (due(run, o.val_every)) validate(run);
            saved = due(run, o.checkpoint_every);
            if (saved) save(run);  // before anything that may fail for its own reasons
            if (due(run, o.sample_every)) sample(run);
        }
        if (all_stopping(run)) {
            if (!saved) save(run);
            console_line(run.console, "stopped by a signal after step " + std::to_string(run.step) +
                                          (o.out.empty() ? "" : "; --resume goes on from here"));
            return;
        }
    }
    const double seconds = now_seconds() - start;
    const BytesSent bytes = all_bytes_sent(run);
    run_log_write(run.log, "done", run.step,
                  {{"seconds", seconds},
                   {"bytes_sent", bytes.total()},
                   {"bytes_sent_as", bytes_json(bytes)},
                   {"val_loss", run.val_loss},
                   {"skipped", run.skipped},
                   {"peak_bytes", device_peak_bytes(run.stream)}});
    console_line(run.console, "done: " + std::to_string(run.step) + " steps, " + duration(seconds) +
                                  ", peak memory " + mebibytes(device_peak_bytes(run.stream)) + " MiB" +
                                  traffic_text(bytes, comm_ranks(run.comm)));
}

template <typename Storage>
void tear_down(Run<Storage>& run) {
    data_parallel_destroy(run.parallel);
    device_free(run.norm_sums, run.stream);
    optimizer_destroy(run.optimizer, run.stream);
    gpt_destroy(run.model, run.stream);
    stream_destroy(run.stream);
    loader_close(run.train);
    loader_close(run.val);
    run_log_close(run.log);
}

// Fails on a rank that does not see rank 0's folder, now rather than at the first checkpoint. A file system
// over the network may take a moment to show it.
template <typename Storage>
void check_shared_folder(const Run<Storage>& run) {
    const std::string& out = run.options.out;
    std::string opened = "rank 0 has opened its log";
    comm_broadcast(run.comm, opened);
    if (out.empty() || run.leads()) return;
    for (int tries = 0; tries < 50; tries++) {
        if (fs::exists(out + "/log.jsonl")) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    fail("--out %s: is not the folder that rank 0 writes; all ranks must share it", out.c_str());
}

template <typename Storage>
void train(const Start& start, Comm* comm) {
    Run<Storage> run = set_up<Storage>(start, comm);
    if (run.step >= run.options.steps) {
        console_line(run.console, "step " + std::to_string(run.step) + " of " +
                                      std::to_string(run.options.steps) + ": this run is finished");
    } else {
        std::string tables = configuration_table(run) + ownership_table(run) + memory_table(run);
        tables.pop_back();  // console_line ends the line
        console_line(run.console, tables);
        catch_stop_signals();
        if (!run.leads()) {
            // its log never writes
        } else if (run.resumed) {
            run_log_resume(run.log, run.step, run.skipped);
        } else {
            run_log_start(run.log);
        }
        run_log_write(run.log, "config", run.step,
                      {{"options", run.values},
                       {"parameters", gpt_parameter_count(run.model.table)},
                       {"optimizer_state_bytes", optimizer_state_bytes(run.optimizer)},
                       {"git", git_commit()},
                       {"program", version_text()},
                       {"device", device_name(run.stream)},
                       {"ranks", comm_ranks(run.comm)},
                       {"threads", device_threads(run.stream)},
                       {"matmul_ceiling_flops", run.matmul_ceiling}});
        check_shared_folder(run);
        train_loop(run);
    }
    tear_down(run);
}

// ---------------------------------------------------------------------------------------------------
// The other commands

// Writes text to stdout as it is sampled: made fit for people on a terminal, byte for byte into a pipe.
template <typename Storage>
void generate_text(const GenerateOptions& o) {
    if (!fs::is_directory(o.model))
        fail("--model %s: must be a checkpoint or Hugging Face folder", o.model.c_str());
    const GptConfig config = huggingface_read_config(o.model);
    std::string tokenizer_path = o.tokenizer;
    if (tokenizer_path.empty() && fs::exists(o.model + "/tokenizer.json"))
        tokenizer_path = o.model + "/tokenizer.json";
    Tokenizer tokenizer;
    if (!tokenizer_path.empty()) tokenizer = tokenizer_read(tokenizer_path, "--tokenizer");
    check_tokenizer(tokenizer, tokenizer_path, config);
    const std::vector<int> prompt = prompt_ids("--prompt", o.prompt, tokenizer, tokenizer_path, config);

    Stream* stream = stream_create({.threads = o.threads});
    Gpt<Storage> model = gpt_create<Storage>(config, 1, config.seq_len, false, Recompute::none, 0, stream);
    std::vector<std::string> warnings;
    huggingface_read(model, o.model, warnings, stream);
    for (const std::string& warning : warnings) console_error(warning);

    const bool terminal = console_open().terminal;
    std::string pending;
    const auto show = [&](const std::string& bytes) {
        console_print(terminal ? printable(bytes, pending) : bytes);
    };
    show(o.prompt);
    generate<Storage>(
        model, prompt, o.tokens, o.sample,
        [&](int id) {
            show(decode(tokenizer, {id}));
            return true;
        },
        stream);
    if (terminal) console_print("\n");
    gpt_destroy(model, stream);
    stream_destroy(stream);
}

void train(const TrainCommand& command, Comm* comm) {
    comm_set_timeout(comm, command.options.timeout);
    const Start start = find_start(command, comm);
    switch (start.command.options.dtype) {
        case Dtype::fp32:
            return train<float>(start, comm);
        case Dtype::bf16:
            return train<bf16_t>(start, comm);
        case Dtype::fp16:
            return train<fp16_t>(start, comm);
    }
}

void report_failure(const std::string& line) { console_error(line); }

// Returns the exit status.
int run_rank(const RankEnvironment& environment, const std::vector<std::string>& arguments);

// Trains as a rank of those that a launcher started, or starts as many as --ranks says.
int train_command(const std::vector<std::string>& arguments, const TrainCommand& parsed, Comm* comm) {
    const int asked = parsed.options.ranks, ranks = comm_ranks(comm);
    if (asked > 1 && ranks == 1) return launch_ranks(asked, arguments, run_rank, report_failure);
    if (asked != 0 && asked != ranks) fail("--ranks %d: the launcher has started %d", asked, ranks);
    train(parsed, comm);
    return 0;
}

int run_command(std::vector<std::string> arguments, Comm* comm) {
    const std::vector<std::string> all_arguments = arguments;
    const std::string command = arguments.empty() ? "" : arguments[0];
    const bool named = command == "train" || command == "generate" || command == "tokenize";
    if (named) arguments.erase(arguments.begin());
    if (named && command != "train" && comm_ranks(comm) > 1)
        fail("%s: is for one process, and the launcher has started %d", command.c_str(), comm_ranks(comm));
    std::string help;
    if (command == "tokenize") {
        const TokenizeOptions options = parse_tokenize(arguments, help);
        if (help.empty()) tokenize(options);
    } else if (command == "generate") {
        const GenerateOptions options = parse_generate(arguments, help);
        if (help.empty()) generate_text<float>(options);
    } else {
        const TrainCommand parsed = parse_train(arguments);
        help = parsed.help;
        if (help.empty()) return train_command(all_arguments, parsed, comm);
    }
    if (comm_rank(comm) == 0) console_print(help);
    return 0;
}

// The program as one rank, from its arguments to its exit status. A rank that fails ends all the others.
int run_rank(const RankEnvironment& environment, const std::vector<std::string>& arguments) {
    constexpr double meeting_seconds = 60;
    Comm* comm = nullptr;
    std::string failure;
    try {
        comm = comm_connect(environment, meeting_seconds, report_failure);
        const int status = run_command(arguments, comm);
        comm_disconnect(comm);
        return status;
    } catch (const std::bad_alloc&) {
        failure = "out of memory; try a smaller --batch-size or model";
    } catch (const std::exception& error) {
        failure = error.what();
    }
    if (comm != nullptr && comm_ranks(comm) > 1) {
        // What is wrong on all ranks is rank 0's to say, without a rank's name.
        if (comm_rank(comm) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        comm_abort(comm, failure);
    }
    console_error(failure);
    return 1;
}

}  // namespace

int main(int argc, char** argv) {
    signal(SIGBUS, report_bus_error);
    signal(SIGXFSZ, SIG_IGN);  // a file-size limit is reported by the write that hits it
    try {
        return run_rank(rank_environment(), std::vector<std::string>(argv + 1, argv + argc));
    } catch (const std::exception& error) {
        console_error(error.what());
        return 1;
    }
}
