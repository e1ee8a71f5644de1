// The command line. Each option is declared once, in options.cpp, and that declaration gives parsing, the
// range check, --help, the config file, the config line of the log, and the README's table.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "data/tokenize.h"
#include "kernels/dtype.h"
#include "model/gpt.h"
#include "model/sample.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"

// Values of options by name, for those that were not given.
enum class MuonPreset { drop_in, tuned, normuon };

struct TrainOptions {
    // data and run folder
    std::string train_data, val_data, out, tokenizer;
    bool resume = false, new_data = false;
    // model; 0 = as the --model says
    std::string model = "d12";
    size_t layers = 0, heads = 0, channels = 0, seq_len = 0, vocab_size = 0;
    bool untie_head = false;
    // batch and length
    size_t batch_size = 4;
    size_t tokens_per_step = 524288;
    size_t steps = 0;
    double epochs = 1.0;
    // optimizer
    OptimizerConfig optimizer;
    ScheduleConfig schedule;
    double lr_embedding = 0, lr_head = 0, lr_scalar = 0, lr_muon = 0;  // peaks; 0: as schedule.lr
    double grad_clip = 1.0;
    bool lr_adapt = false;
    MuonPreset muon_preset = MuonPreset::drop_in;
    bool muon_split_qkv = true;
    size_t muon_qk_group = 0;  // heads; 0: all
    // precision
    Dtype dtype = Dtype::fp32;
    double loss_scale = 0;
    bool tf32 = false;
    Recompute recompute = Recompute::none;
    // ranks
    int ranks = 0;             // to start here; 0: as the launcher says, or one
    size_t virtual_ranks = 0;  // leaves of a step; 0: as many as ranks
    Dtype reduce_dtype = Dtype::fp32;
    bool no_overlap = false;
    double timeout = 60;
    // run
    uint64_t seed = 1337;
    int threads = 0;
    size_t val_every = 250, val_tokens = 81920;
    size_t sample_every = 1000, sample_tokens = 64;
    std::string sample_prompt;
    SampleConfig sample;
    size_t checkpoint_every = 1000, keep = 3;
    size_t log_every = 1;
};

struct GenerateOptions {
    std::string model, prompt, tokenizer;
    size_t tokens = 256;
    int threads = 0;
    SampleConfig sample;
};

// A parsed command line. help is non-empty where --help or --version asked for that text instead of a run.
struct TrainCommand {
    TrainOptions options;
    nlohmann::json values;        // every option by name, defaults included
    std::set<std::string> given;  // options that the command line, config file or checkpoint set
    std::string help;
};

// The options for Muon alone that were given to a run with AdamW: "--muon-ns --lr-muon"; "" where none was.
std::string options_without_effect(const TrainCommand& command);

// Each parser takes the arguments after the program's and subcommand's name, and fails with one line that
// names the option and the value.
TrainCommand parse_train(const std::vector<std::string>& arguments);
GenerateOptions parse_generate(const std::vector<std::string>& arguments, std::string& help);
TokenizeOptions parse_tokenize(const std::vector<std::string>& arguments, std::string& help);

// Whether an option speaks of one start of a run or of its machine, and is no part of what a run is.
bool option_is_of_a_start(const std::string& name);

// For --resume: the command line again, with the checkpoint's values for every option that was not given.
// They count as given: nothing is derived anew from a default. Only --epochs, when given, sets the steps
// again. `changes` gets a line for each option whose value changed. Fails on a change that a resumed run
// cannot honour: of the model, the seed or the optimizer.
TrainCommand resume_train(const TrainCommand& command, const nlohmann::json& saved_values,
                          std::vector<std::string>& changes);

// The options of every command as the README's tables: "| `--lr` | 0.0006 | peak learning rate ... |".
std::string options_markdown();
