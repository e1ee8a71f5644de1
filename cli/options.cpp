// Declares every option with CLI11; see options.h.
#include "cli/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <optional>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "cli/version.h"
#include "kernels/error.h"

using nlohmann::json;

namespace {

// Whole numbers up to here are exact in JSON and in double.
constexpr double largest = 9007199254740991;

// A number in [low, high]; unlike CLI::Range it also refuses NaN.
CLI::Validator between(double low, double high) {
    CLI::Validator validator;
    validator.operation([low, high](std::string& text) -> std::string {
        char* end = nullptr;
        const double value = strtod(text.c_str(), &end);
        // Plain decimal: 010 and 0x10 would be read as eight and sixteen.
        const size_t digits = text.find_first_not_of("+-");
        const bool decimal =
            text.find_first_of("xX") == std::string::npos &&
            (digits == std::string::npos || text[digits] != '0' || digits + 1 == text.size() ||
             !isdigit(static_cast<unsigned char>(text[digits + 1])));
        if (decimal && end != text.c_str() && *end == '\0' && value >= low && value <= high) return "";
        char rule[64];
        snprintf(rule, sizeof(rule), " is not a number from %g to %g", low, high);
        return "'" + text + "'" + rule;
    });
    return validator;
}

// Declares an option that takes a number in [low, high].
template <typename Number>
void add_number(CLI::App& app, const std::string& name, Number& target, double low, double high,
                const std::string& description, const std::string& group) {
    app.add_option(name, target, description)->check(between(low, high))->group(group);
}

// Declares an option that takes true or false. CLI11 takes much else for one of them, an empty text for
// false.
void add_boolean(CLI::App& app, const std::string& name, bool& target, const std::string& description,
                 const std::string& group) {
    const auto check = [](const std::string& text) {
        return text == "true" || text == "false" ? "" : "'" + text + "' is not true or false";
    };
    app.add_option(name, target, description)
        ->check(check)
        ->default_str(target ? "true" : "false")
        ->group(group);
}

// Declares an option that takes a number whose legal range is the business of what uses it: gpt_check,
// optimizer_check, sample_check, tokenize.
template <typename Number>
void add_number(CLI::App& app, const std::string& name, Number& target, const std::string& description,
                const std::string& group) {
    constexpr double most = std::is_integral_v<Number> ? largest : 1e308;
    add_number(app, name, target, std::is_unsigned_v<Number> ? 0 : -most, most, description, group);
}

// Options that a resumed run keeps: other values would be another model, optimizer or data order. What the
// data are, and how they are cut, is compared by the loader's fingerprint.
const std::set<std::string> fixed_on_resume = {
    "model",         "layers",      "heads", "channels",    "vocab-size",       "untie-head",
    "seed",          "optimizer",   "dtype", "state-dtype", "muon-state-dtype", "muon-split-qkv",
    "muon-qk-group", "muon-normuon"};

const std::set<std::string> of_a_start = {"resume", "new-data",   "out",    "threads",
                                          "ranks",  "no-overlap", "timeout"};

const std::map<std::string, OptimizerKind> optimizers = {{"adamw", OptimizerKind::adamw},
                                                         {"muon", OptimizerKind::muon}};
const std::map<std::string, Dtype> dtypes = {
    {"fp32", Dtype::fp32}, {"bf16", Dtype::bf16}, {"fp16", Dtype::fp16}};
const std::map<std::string, Dtype> state_dtypes = {{"fp32", Dtype::fp32}, {"bf16", Dtype::bf16}};
const std::map<std::string, std::optional<Dtype>> muon_state_dtypes = {
    {"same", std::nullopt}, {"fp32", Dtype::fp32}, {"bf16", Dtype::bf16}};
const std::map<std::string, NewtonSchulzPrecision> newton_schulz_dtypes = {
    {"auto", NewtonSchulzPrecision::automatic},
    {"fp16", NewtonSchulzPrecision::fp16},
    {"bf16", NewtonSchulzPrecision::bf16},
    {"tf32", NewtonSchulzPrecision::tf32},
    {"fp32", NewtonSchulzPrecision::fp32}};
const std::map<std::string, DecayMode> decay_modes = {{"decoupled", DecayMode::decoupled},
                                                      {"independent", DecayMode::independent},
                                                      {"cautious", DecayMode::cautious}};
const std::map<std::string, DecaySchedule> decay_schedules = {{"constant", DecaySchedule::constant},
                                                              {"cosine", DecaySchedule::cosine},
                                                              {"linear", DecaySchedule::linear}};
const std::map<std::string, size_t> head_groups = {{"all", 0}, {"1", 1}, {"2", 2}, {"4", 4}};
const std::map<std::string, MuonPreset> muon_presets = {
    {"drop-in", MuonPreset::drop_in}, {"tuned", MuonPreset::tuned}, {"normuon", MuonPreset::normuon}};

// What a preset says of options that are not given. tuned: modded-nanogpt's best plain Muon on GPT-2 124M
// (track 3, 0.025 for the matrices, decay 0.05); normuon: with NorMuon on top.
std::vector<std::pair<std::string, std::string>> preset_values(MuonPreset preset) {
    if (preset == MuonPreset::drop_in) return {};
    std::vector<std::pair<std::string, std::string>> values = {
        {"lr-muon", "0.025"},         {"weight-decay", "0.05"},   {"eps", "1e-10"},
        {"muon-ns", "polar-express"}, {"muon-scale", "original"}, {"muon-momentum-warmup", "300"}};
    if (preset == MuonPreset::normuon) values.emplace_back("muon-normuon", "true");
    return values;
}
const std::map<std::string, Recompute> recomputes = {
    {"none", Recompute::none}, {"gelu", Recompute::gelu}, {"block", Recompute::block}};
const std::map<std::string, Schedule> schedules = {{"cosine", Schedule::cosine},
                                                   {"linear", Schedule::linear},
                                                   {"constant", Schedule::constant},
                                                   {"wsd", Schedule::wsd}};
const std::map<std::string, MuonScale> muon_scales = {{"match-rms", MuonScale::match_rms},
                                                      {"original", MuonScale::original},
                                                      {"spectral", MuonScale::spectral},
                                                      {"unit-rms", MuonScale::unit_rms}};

// The coefficient sets of newton_schulz_set; the option's value is the name itself.
const std::map<std::string, std::string> newton_schulz_names = {{"keller", "keller"},
                                                                {"you", "you"},
                                                                {"polar-express", "polar-express"},
                                                                {"cubic5", "cubic5"},
                                                                {"custom", "custom"}};
const std::map<std::string, NewtonSchulzVariant> newton_schulz_variants = {
    {"dense", NewtonSchulzVariant::dense},
    {"symmetric", NewtonSchulzVariant::symmetric},
    {"gram", NewtonSchulzVariant::gram}};

// Declares an option that takes one of the names of a table; --help and the log show names, not numbers.
template <typename Choice>
void add_choice(CLI::App& app, const std::string& name, Choice& target,
                const std::map<std::string, Choice>& choices, const std::string& description,
                const std::string& group) {
    std::string names, initial;
    for (const auto& [word, value] : choices) {
        names += (names.empty() ? "" : ", ") + word;
        if (value == target) initial = word;
    }
    app.add_option_function<std::string>(
           name, [&target, &choices](const std::string& word) { target = choices.at(word); },
           description + ": " + names)
        ->check(CLI::Validator(
            [&choices, names](std::string& word) {
                return choices.contains(word) ? std::string() : word + " is not one of " + names;
            },
            ""))
        ->default_str(initial)
        ->group(group);
}

void add_sample_options(CLI::App& app, SampleConfig& sample, const std::string& group) {
    add_number(app, "--temperature", sample.temperature, "softmax temperature; 0 takes the likeliest token",
               group);
    add_number(app, "--top-k", sample.top_k, "sample among the k likeliest tokens; 0: all", group);
    add_number(app, "--top-p", sample.top_p,
               "sample among the likeliest tokens that make up this probability, above 0; 1: all", group);
}

void add_threads(CLI::App& app, int& threads, const std::string& group) {
    add_number(app, "--threads", threads, 0, 4096,
               "CPU threads; 0: OMP_NUM_THREADS, else every core available", group);
}

// The file of --config. CLI11's own reader takes a # within quotes for a comment, splits values at commas,
// and passes over lines that it cannot read.
class ConfigFile : public CLI::ConfigBase {
public:
    std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
        std::vector<CLI::ConfigItem> lines;
        std::string line;
        for (size_t number = 1; std::getline(input, line); number++) {
            const std::string text = CLI::detail::trim_copy(line);
            if (text.empty() || text[0] == '#') continue;
            const auto require = [&](bool legal) {
                if (!legal) fail("--config: line %zu, '%s', is not name = value", number, text.c_str());
            };
            const size_t equals = text.find('=');
            require(equals != std::string::npos && equals > 0);
            CLI::ConfigItem item;
            item.name = CLI::detail::trim_copy(text.substr(0, equals));
            std::string value = CLI::detail::trim_copy(text.substr(equals + 1));
            if (value.starts_with('"')) {
                const size_t end = value.find('"', 1);
                require(end != std::string::npos);
                const std::string rest = CLI::detail::trim_copy(value.substr(end + 1));
                require(rest.empty() || rest[0] == '#');
                value = value.substr(1, end - 1);
            } else {
                value = CLI::detail::trim_copy(value.substr(0, value.find('#')));
                require(!value.empty());
            }
            item.inputs.push_back(value);
            lines.push_back(item);
        }
        return lines;
    }
};

std::unique_ptr<CLI::App> make_app(const std::string& command, const std::string& description) {
    auto app = std::make_unique<CLI::App>(description, command);
    app->option_defaults()->always_capture_default();
    app->get_formatter()->column_width(34);
    app->set_version_flag("--version", version_text());
    return app;
}

std::unique_ptr<CLI::App> train_app(TrainOptions& o) {
    auto app =
        make_app("train_gpt",
                 "Trains a GPT on token shards. Other commands: tokenize, generate; each has its --help.");
    app->set_config("--config", "", "read options from this file: lines of name=value");
    app->config_formatter(std::make_shared<ConfigFile>());
    app->allow_config_extras(CLI::config_extras_mode::error);

    std::string group = "Data";
    app->add_option("--train-data", o.train_data, "token shards to train on: a glob pattern, quoted")
        ->group(group);
    app->add_option("--val-data", o.val_data, "token shards to validate on; none: no validation")
        ->group(group);
    app->add_option("--out", o.out, "folder for log and checkpoints; none: nothing is written")->group(group);
    app->add_option("--tokenizer", o.tokenizer,
                    "tokenizer.json, for samples; none: the shards' PREFIX_tokenizer.json where it exists")
        ->group(group);
    app->add_flag("--resume", o.resume, "go on from the newest complete checkpoint in --out, if there is one")
        ->group(group);
    app->add_flag("--new-data", o.new_data,
                  "with --resume: the data changed; start reading at their beginning")
        ->group(group);

    group = "Model";
    app->add_option("--model", o.model,
                    "d6, d12 (GPT-2 124M), d24, d36, d48, or a Hugging Face or checkpoint folder")
        ->group(group);
    add_number(*app, "--layers", o.layers, "transformer blocks; 0: as --model", group);
    add_number(*app, "--heads", o.heads, "attention heads; 0: as --model", group);
    add_number(*app, "--channels", o.channels, "width; 0: as --model", group);
    add_number(*app, "--seq-len", o.seq_len,
               "tokens a row, and positions of a new model; 0: as --model (1024)", group);
    add_number(*app, "--vocab-size", o.vocab_size, "token ids; 0: the tokenizer's, else as --model (50257)",
               group);
    app->add_flag("--untie-head", o.untie_head, "give the output layer weights of its own")->group(group);

    group = "Batch";
    add_number(*app, "--batch-size", o.batch_size, 1, 1e6, "rows of a micro-batch", group);
    add_number(*app, "--tokens-per-step", o.tokens_per_step, 1, 1e12,
               "tokens of an optimizer step, a multiple of batch-size * seq-len (llm.c: 0.5M)", group);
    add_number(*app, "--steps", o.steps, 0, 1e12, "optimizer steps of the whole run; 0: as --epochs", group);
    add_number(*app, "--epochs", o.epochs, 1e-6, 1e6,
               "length of the run in passes over the data, where --steps is 0", group);

    group = "Optimizer";
    add_choice(*app, "--optimizer", o.optimizer.kind, optimizers,
               "who owns the matrices of the blocks; AdamW has the rest", group);
    add_number(*app, "--lr", o.schedule.lr, 0, 1e6, "peak learning rate (llm.c's GPT-2 124M); 0: a dry run",
               group);
    add_number(*app, "--warmup", o.schedule.warmup, 0, 1e12,
               "steps of linear rise (llm.c's GPT-2 124M); the default is at most a tenth of the run", group);
    add_number(*app, "--lr-embedding", o.lr_embedding, 0, 1e6,
               "peak of the token and position tables; 0: --lr", group);
    add_number(*app, "--lr-head", o.lr_head, 0, 1e6, "peak of an untied head; 0: --lr", group);
    add_number(*app, "--lr-scalar", o.lr_scalar, 0, 1e6, "peak of biases and norms; 0: --lr", group);
    add_choice(*app, "--schedule", o.schedule.kind, schedules, "what follows the warm-up", group);
    add_number(*app, "--final-lr-frac", o.schedule.final_lr_frac, 0, 1,
               "the schedule ends at this fraction of --lr (llm.c)", group);
    add_number(*app, "--weight-decay", o.optimizer.weight_decay,
               "decoupled decay of the 2-D tensors, embeddings too (llm.c, nanoGPT)", group);
    add_choice(
        *app, "--weight-decay-mode", o.optimizer.weight_decay_mode, decay_modes,
        "of the weight, times the learning rate or not; cautious: only where the update does not grow it",
        group);
    add_choice(*app, "--weight-decay-schedule", o.optimizer.weight_decay_schedule, decay_schedules,
               "from the full decay to none at the end of the run", group);
    add_number(*app, "--beta1", o.optimizer.beta1, "AdamW's first moment (llm.c, nanoGPT)", group);
    add_number(*app, "--beta2", o.optimizer.beta2, "AdamW's second moment (llm.c, nanoGPT)", group);
    add_number(*app, "--eps", o.optimizer.eps, "AdamW's epsilon (PyTorch)", group);
    add_number(*app, "--grad-clip", o.grad_clip, 0, 1e30,
               "largest global gradient norm (llm.c, nanoGPT); 0: no clipping", group);
    app->add_flag("--lr-adapt", o.lr_adapt,
                  "scale each matrix's learning rate, from half to double, by how well the virtual ranks' "
                  "gradients agree compared with before; needs 2 or more of them")
        ->group(group);

    group = "Muon";
    add_choice(*app, "--muon-preset", o.muon_preset, muon_presets,
               "defaults for the options that are not given. drop-in: AdamW's --lr and --weight-decay serve; "
               "tuned: --lr-muon 0.025 --weight-decay 0.05 --eps 1e-10 --muon-scale original "
               "--muon-momentum-warmup 300; normuon: those and --muon-normuon true",
               group);
    add_number(*app, "--lr-muon", o.lr_muon, 0, 1e6, "peak of Muon's matrices; 0: --lr", group);
    add_number(*app, "--muon-momentum", o.optimizer.muon_momentum, "EMA momentum (Jordan 2024)", group);
    add_number(*app, "--muon-momentum-start", o.optimizer.muon_momentum_start,
               "momentum at the ends of its warm-up and cool-down (modded-nanogpt)", group);
    add_number(*app, "--muon-momentum-warmup", o.optimizer.muon_momentum_warmup, 0, 1e12,
               "steps in which the momentum rises from its start; 0: none", group);
    add_number(*app, "--muon-momentum-cooldown", o.optimizer.muon_momentum_cooldown, 0, 1e12,
               "last steps, in which it falls back; 0: none", group);
    add_boolean(*app, "--muon-nesterov", o.optimizer.muon_nesterov,
                "Nesterov momentum, true or false (Jordan 2024)", group);
    add_choice(*app, "--muon-ns", o.optimizer.muon_ns, newton_schulz_names, "Newton-Schulz coefficients",
               group);
    add_number(*app, "--muon-ns-steps", o.optimizer.muon_ns_steps,
               "Newton-Schulz steps: 3 to 10 of keller, 5 to 10 of polar-express, 5 of you and cubic5",
               group);
    app->add_option("--muon-ns-coefficients", o.optimizer.muon_ns_coefficients,
                    "of --muon-ns custom: a,b,c for every step, or a,b,c;a,b,c;... with three a step")
        ->group(group);
    add_choice(*app, "--muon-ns-variant", o.optimizer.muon_ns_variant, newton_schulz_variants,
               "products in full, half of those that are symmetric, or Gram Newton-Schulz", group);
    add_choice(*app, "--muon-ns-dtype", o.optimizer.muon_ns_dtype, newton_schulz_dtypes,
               "Newton-Schulz's matrices; auto: fp16 on a GPU, fp32 on a CPU; tf32 is for GPUs", group);
    add_choice(*app, "--muon-scale", o.optimizer.muon_scale, muon_scales,
               "update scale (match-rms reuses AdamW's lr and decay: Liu et al. 2025)", group);
    add_number(*app, "--muon-scale-factor", o.optimizer.muon_scale_factor, "a factor on top of it", group);
    add_boolean(*app, "--muon-split-qkv", o.muon_split_qkv,
                "q, k and v as three matrices, true or false (Jordan 2024)", group);
    add_choice(*app, "--muon-qk-group", o.muon_qk_group, head_groups,
               "heads of q and of k that are one matrix", group);
    add_boolean(*app, "--muon-normuon", o.optimizer.muon_normuon,
                "normalise the update's neurons, true or false (arXiv:2510.05491)", group);
    add_number(*app, "--muon-normuon-beta2", o.optimizer.muon_normuon_beta2,
               "average of a neuron's squares (arXiv:2510.05491)", group);

    group = "Precision";
    add_choice(*app, "--dtype", o.dtype, dtypes,
               "storage of weights and activations; 16-bit weights have an fp32 master copy", group);
    add_choice(*app, "--state-dtype", o.optimizer.state_dtype, state_dtypes,
               "storage of the optimizers' momentum and moments; bf16 is rounded stochastically", group);
    add_choice(*app, "--muon-state-dtype", o.optimizer.muon_state_dtype, muon_state_dtypes,
               "storage of Muon's momentum alone; same: as --state-dtype", group);
    add_number(*app, "--loss-scale", o.loss_scale, 0, 0x1p24,
               "fp16: a fixed power of two; 0: adapted to the gradients, from 65536 (PyTorch)", group);
    add_choice(*app, "--recompute", o.recompute, recomputes,
               "what backward computes again to save memory, to the same bits", group);
    app->add_flag("--tf32", o.tf32, "fp32 products on a GPU round their inputs to TF32")->group(group);

    group = "Ranks";
    add_number(*app, "--ranks", o.ranks, 0, 2047,
               "start as many processes on this machine; 0: as mpirun, srun or torchrun say, else one",
               group);
    add_number(
        *app, "--virtual-ranks", o.virtual_ranks, 0, 2047,
        "shares of a step whose gradients are added in a fixed order: equal numbers give equal bits on "
        "any number of ranks; 0: as many as ranks",
        group);
    add_choice(*app, "--reduce-dtype", o.reduce_dtype, state_dtypes,
               "what the gradient of a share is rounded to before they are added", group);
    app->add_flag("--no-overlap", o.no_overlap,
                  "send gradients and weights after the computation, not beside it")
        ->group(group);
    add_number(*app, "--timeout", o.timeout, 1, 86400,
               "seconds without a sign of life after which a rank is taken for dead", group);

    group = "Run";
    add_number(*app, "--seed", o.seed, 0, largest,
               "of initialisation, data order, samples and the rounding of bf16 state", group);
    add_threads(*app, o.threads, group);
    add_number(*app, "--val-every", o.val_every, 0, largest,
               "steps between validations (llm.c); 0: only at the end", group);
    add_number(*app, "--val-tokens", o.val_tokens, 1, 1e12,
               "tokens of a validation, from the front of the data (llm.c: 20*4*1024)", group);
    add_number(*app, "--sample-every", o.sample_every, 0, largest,
               "steps between samples; 0: only at the end", group);
    add_number(*app, "--sample-tokens", o.sample_tokens, 0, 1e6, "tokens of a sample; 0: no samples", group);
    app->add_option("--sample-prompt", o.sample_prompt,
                    "text that samples start with, or its last tokens where the model has fewer positions; "
                    "none: end-of-text")
        ->group(group);
    add_sample_options(*app, o.sample, group);
    add_number(*app, "--checkpoint-every", o.checkpoint_every, 0, largest,
               "steps between checkpoints; 0: only at the end", group);
    add_number(*app, "--keep", o.keep, 0, largest, "checkpoints to keep; 0: all", group);
    add_number(*app, "--log-every", o.log_every, 1, 1e12,
               "steps between console lines; log.jsonl has every step", group);
    return app;
}

std::unique_ptr<CLI::App> generate_app(GenerateOptions& o) {
    auto app = make_app("train_gpt generate", "Samples text from a model.");
    const std::string group = "Generate";
    app->add_option("--model", o.model, "checkpoint or Hugging Face folder")->required()->group(group);
    app->add_option("--prompt", o.prompt,
                    "text to go on from, or its last tokens where the model has fewer positions; none: "
                    "end-of-text")
        ->group(group);
    add_number(*app, "--tokens", o.tokens, 0, 1e9, "tokens to add", group);
    app->add_option("--tokenizer", o.tokenizer, "tokenizer.json; none: the model folder's")->group(group);
    add_sample_options(*app, o.sample, group);
    add_number(*app, "--seed", o.sample.seed, 0, largest, "of the draws", group);
    add_threads(*app, o.threads, group);
    return app;
}

std::unique_ptr<CLI::App> tokenize_app(TokenizeOptions& o) {
    auto app = make_app("train_gpt tokenize", "Turns text files into token shards.");
    const std::string group = "Tokenize";
    app->add_option("--input", o.inputs, "text files; each is one document")->required()->group(group);
    app->add_option("--out", o.out,
                    "PREFIX of PREFIX_train_000.bin, PREFIX_val_000.bin, PREFIX_tokenizer.json")
        ->required()
        ->group(group);
    app->add_option("--tokenizer", o.tokenizer, "bytes, or a tokenizer.json of single bytes")->group(group);
    add_number(*app, "--val-frac", o.val_frac, "the end of each file that goes to validation", group);
    add_number(*app, "--shard-tokens", o.shard_tokens, "tokens of a shard at most (llm.c: 1e8)", group);
    return app;
}

// Runs the parser. Returns the text that --help or --version asks for, else ""; an error is one line.
std::string parse(CLI::App& app, std::vector<std::string> arguments) {
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
    try {
        app.parse(arguments);
    } catch (const CLI::CallForHelp&) {
        return app.help();
    } catch (const CLI::CallForVersion&) {
        return version_text() + "\n";
    } catch (const CLI::ExtrasError&) {
        const std::vector<std::string> extras = app.remaining();
        const std::string more =
            extras.size() > 1 ? ", and " + std::to_string(extras.size() - 1) + " more like it" : "";
        fail("%s: not an option%s (see %s --help)", extras[0].c_str(), more.c_str(), app.get_name().c_str());
    } catch (const CLI::ParseError& error) {
        std::string message = error.what();
        // CLI11's words for an option that stands there twice.
        const std::string repeated = ": At Most 1 required but received ";
        if (const size_t at = message.find(repeated); at != std::string::npos) {
            const std::string times = message.substr(at + repeated.size());
            message = message.substr(0, at) + ": given " + (times == "2" ? "twice" : times + " times");
        }
        fail("%s (see %s --help)", message.c_str(), app.get_name().c_str());
    }
    return "";
}

// The options that make up a configuration: all but --help, --version and --config.
std::vector<CLI::Option*> configuration(CLI::App& app) {
    return app.get_options([](const CLI::Option* option) {
        const std::string name = option->get_single_name();
        return name != "help" && name != "version" && name != "config";
    });
}

bool is_flag(const CLI::Option* option) { return option->get_expected_max() == 0; }

// The option's value as typed JSON: what was parsed, not how it was written.
json value_of(const CLI::Option* option) {
    if (is_flag(option)) return option->count() > 0 && option->as<bool>();
    const std::string type = option->get_type_name();
    const auto value = [&](auto parsed) {
        if (option->count() > 0) return option->as<decltype(parsed)>();
        CLI::detail::lexical_cast(option->get_default_str(), parsed);
        return parsed;
    };
    if (type.starts_with("BOOLEAN")) return value(false);
    if (type.starts_with("UINT")) return value(uint64_t{});
    if (type.starts_with("INT")) return value(int64_t{});
    if (type.starts_with("FLOAT")) return value(double{});
    return value(std::string());
}

}  // namespace

namespace {

// Groups' learning rates as multiples of --lr, which the schedule gives for every step.
void set_group_rates(TrainOptions& o) {
    const auto set = [&](const char* option, double peak, float& multiple) {
        if (peak == 0) return;
        if (o.schedule.lr == 0) fail("%s %g: needs an --lr above 0, whose schedule it follows", option, peak);
        multiple = static_cast<float>(peak / o.schedule.lr);
    };
    set("--lr-embedding", o.lr_embedding, o.optimizer.lr_embedding);
    set("--lr-head", o.lr_head, o.optimizer.lr_head);
    set("--lr-scalar", o.lr_scalar, o.optimizer.lr_scalar);
    set("--lr-muon", o.lr_muon, o.optimizer.lr_muon);
}

TrainCommand parse_without_preset(const std::vector<std::string>& arguments) {
    TrainCommand command;
    const auto app = train_app(command.options);
    command.help = parse(*app, arguments);
    if (!command.help.empty()) return command;
    command.values = json::object();
    for (const CLI::Option* option : configuration(*app)) {
        command.values[option->get_single_name()] = value_of(option);
        if (option->count() > 0) command.given.insert(option->get_single_name());
    }
    command.options.optimizer.seed = command.options.seed;
    return command;
}

}  // namespace

std::string options_without_effect(const TrainCommand& command) {
    std::string names;
    if (command.options.optimizer.kind == OptimizerKind::muon) return names;
    for (const std::string& name : command.given) {
        if (name == "lr-muon" || name.starts_with("muon-")) names += (names.empty() ? "--" : " --") + name;
    }
    return names;
}

TrainCommand parse_train(const std::vector<std::string>& arguments) {
    TrainCommand command = parse_without_preset(arguments);
    if (!command.help.empty()) return command;
    // The preset's values as if they had been given, but what was given counts. AdamW has no preset.
    const bool muon = command.options.optimizer.kind == OptimizerKind::muon;
    std::vector<std::string> with_preset = arguments;
    for (const auto& [name, value] :
         preset_values(muon ? command.options.muon_preset : MuonPreset::drop_in)) {
        if (!command.given.contains(name)) with_preset.push_back("--" + name + "=" + value);
    }
    if (with_preset.size() > arguments.size()) {
        const std::set<std::string> given = command.given;
        command = parse_without_preset(with_preset);
        command.given = given;
    }
    set_group_rates(command.options);
    optimizer_check(command.options.optimizer);
    sample_check(command.options.sample);
    return command;
}

GenerateOptions parse_generate(const std::vector<std::string>& arguments, std::string& help) {
    GenerateOptions options;
    help = parse(*generate_app(options), arguments);
    if (help.empty()) sample_check(options.sample);
    return options;
}

TokenizeOptions parse_tokenize(const std::vector<std::string>& arguments, std::string& help) {
    TokenizeOptions options;
    help = parse(*tokenize_app(options), arguments);
    return options;
}

bool option_is_of_a_start(const std::string& name) { return of_a_start.contains(name); }

TrainCommand resume_train(const TrainCommand& command, const json& saved_values,
                          std::vector<std::string>& changes) {
    std::vector<std::string> arguments;
    std::set<std::string> given = command.given;
    if (given.contains("epochs")) given.insert("steps");  // the saved steps came from other epochs, or none
    for (const auto& [name, value] : command.values.items()) {
        const bool of_this_start = option_is_of_a_start(name);
        const bool saved = saved_values.contains(name) && !of_this_start;
        const json& chosen = saved && !given.contains(name) ? saved_values[name] : value;
        if (saved && chosen != saved_values[name]) {
            if (fixed_on_resume.contains(name)) {
                fail("--%s %s: the checkpoint has %s, and a resumed run cannot change it", name.c_str(),
                     chosen.dump().c_str(), saved_values[name].dump().c_str());
            }
            changes.push_back("--" + name + ": " + saved_values[name].dump() + " -> " + chosen.dump());
        }
        if (saved) given.insert(name);
        if (chosen.is_boolean()) {
            arguments.push_back("--" + name + "=" + (chosen.get<bool>() ? "true" : "false"));
        } else {
            const std::string text = chosen.is_string() ? chosen.get<std::string>() : chosen.dump();
            if (!text.empty()) arguments.push_back("--" + name + "=" + text);
        }
    }
    TrainCommand resumed = parse_train(arguments);
    resumed.given = given;
    return resumed;
}

std::string options_markdown() {
    std::string text;
    const auto table = [&text](CLI::App& app) {
        for (const std::string& group : app.get_groups()) {
            std::string rows;
            for (const CLI::Option* option : configuration(app)) {
                if (option->get_group() != group) continue;
                std::string initial = is_flag(option) ? "off" : option->get_default_str();
                if (option->get_required()) initial = "required";
                rows += "| `--" + option->get_single_name() + "` | " + (initial.empty() ? "none" : initial) +
                        " | " + option->get_description() + " |\n";
            }
            if (!rows.empty())
                text += "\n**" + group + "**\n\n| option | default | |\n|---|---|---|\n" + rows;
        }
    };
    TrainOptions train;
    GenerateOptions generate;
    TokenizeOptions tokenize_options;
    table(*train_app(train));
    table(*generate_app(generate));
    table(*tokenize_app(tokenize_options));
    return text;
}
