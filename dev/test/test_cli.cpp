// The command line, the console's formats and the run log.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "cli/console.h"
#include "cli/options.h"
#include "cli/run_log.h"
#include "kernels/error.h"

using nlohmann::json;

namespace {

std::string read_file(const std::string& path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

// The message of the Error that a call ends with, "" if none.
template <typename Call>
std::string error_of(Call call) {
    try {
        call();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

struct OptionRow {
    std::string name, initial;
};

// The rows "| `--name` | default | description |" of options_markdown().
std::vector<OptionRow> option_rows() {
    std::vector<OptionRow> rows;
    std::istringstream text(options_markdown());
    for (std::string line; std::getline(text, line);) {
        if (!line.starts_with("| `--")) continue;
        const size_t name_end = line.find("` | "), initial_end = line.find(" | ", name_end + 4);
        rows.push_back({line.substr(3, name_end - 3), line.substr(name_end + 4, initial_end - name_end - 4)});
    }
    return rows;
}

}  // namespace

TEST(Options, HelpReadmeAndParserAgree) {
    const std::string readme = read_file("README.md");
    std::istringstream table(options_markdown());
    for (std::string line; std::getline(table, line);) {
        if (line.starts_with("| `--")) {
            EXPECT_NE(readme.find(line), std::string::npos) << "README lacks: " << line;
        }
    }
    std::string help = parse_train({"--help"}).help, generate_help, tokenize_help;
    parse_generate({"--help"}, generate_help);
    parse_tokenize({"--help"}, tokenize_help);
    help += generate_help + tokenize_help;
    EXPECT_GT(option_rows().size(), 40u);
    for (const OptionRow& row : option_rows()) {
        EXPECT_NE(help.find(row.name), std::string::npos) << row.name;
    }
}

TEST(Options, EveryOptionTakesItsOwnDefault) {
    const json defaults = parse_train({}).values;
    for (const auto& [name, value] : defaults.items()) {
        if (value.is_string() && value.get<std::string>().empty()) continue;
        const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
        const TrainCommand command = parse_train({"--" + name + "=" + text});
        EXPECT_EQ(command.values[name], value) << name;
        EXPECT_EQ(command.given, std::set<std::string>{name});
    }
}

TEST(Options, DefaultsAreTheDocumentedRecipe) {
    const TrainOptions o = parse_train({}).options;
    EXPECT_EQ(o.model, "d12");
    EXPECT_DOUBLE_EQ(o.schedule.lr, 6e-4);
    EXPECT_EQ(o.schedule.warmup, 700u);
    EXPECT_EQ(o.schedule.kind, Schedule::cosine);
    EXPECT_FLOAT_EQ(o.optimizer.weight_decay, 0.1f);
    EXPECT_FLOAT_EQ(o.optimizer.beta1, 0.9f);
    EXPECT_FLOAT_EQ(o.optimizer.beta2, 0.95f);
    EXPECT_DOUBLE_EQ(o.grad_clip, 1.0);
    EXPECT_EQ(o.tokens_per_step, 524288u);
    EXPECT_EQ(o.optimizer.kind, OptimizerKind::adamw);
}

TEST(Options, ValuesReachTheirFields) {
    const TrainOptions o = parse_train({"--optimizer", "muon", "--muon-ns", "keller", "--muon-ns-steps", "6",
                                        "--muon-nesterov", "false", "--muon-scale", "original", "--schedule",
                                        "wsd", "--untie-head", "--seed", "9007199254740991"})
                               .options;
    EXPECT_EQ(o.optimizer.kind, OptimizerKind::muon);
    EXPECT_EQ(o.optimizer.muon_ns, "keller");
    EXPECT_EQ(o.optimizer.muon_ns_steps, 6);
    EXPECT_FALSE(o.optimizer.muon_nesterov);
    EXPECT_EQ(o.optimizer.muon_scale, MuonScale::original);
    EXPECT_EQ(o.schedule.kind, Schedule::wsd);
    EXPECT_TRUE(o.untie_head);
    EXPECT_EQ(o.seed, 9007199254740991u);
}

// A preset speaks of what was not given; a resumed run has its values, whatever the preset says by then.
TEST(Options, MuonPresets) {
    const TrainOptions drop_in = parse_train({}).options;
    EXPECT_EQ(drop_in.optimizer.lr_muon, 1.0f);
    EXPECT_EQ(drop_in.optimizer.muon_ns, "cubic5");
    EXPECT_EQ(drop_in.optimizer.muon_scale, MuonScale::match_rms);
    EXPECT_FALSE(drop_in.optimizer.muon_normuon);

    const TrainCommand tuned = parse_train({"--optimizer=muon", "--muon-preset", "tuned"});
    EXPECT_FLOAT_EQ(tuned.options.optimizer.lr_muon, 0.025f / 0.0006f);
    EXPECT_EQ(tuned.options.optimizer.weight_decay, 0.05f);
    EXPECT_EQ(tuned.options.optimizer.eps, 1e-10f);
    EXPECT_EQ(tuned.options.optimizer.muon_ns, "polar-express");
    EXPECT_EQ(tuned.options.optimizer.muon_scale, MuonScale::original);
    EXPECT_EQ(tuned.options.optimizer.muon_momentum_warmup, 300u);
    EXPECT_FALSE(tuned.options.optimizer.muon_normuon);
    EXPECT_EQ(tuned.given, (std::set<std::string>{"muon-preset", "optimizer"}));
    EXPECT_EQ(tuned.values["weight-decay"], 0.05);

    const TrainOptions mixed = parse_train({"--optimizer=muon", "--muon-preset=normuon", "--weight-decay=0.2",
                                            "--muon-scale=spectral"})
                                   .options;
    EXPECT_EQ(mixed.optimizer.weight_decay, 0.2f);
    EXPECT_EQ(mixed.optimizer.muon_scale, MuonScale::spectral);
    EXPECT_TRUE(mixed.optimizer.muon_normuon);
    EXPECT_FLOAT_EQ(mixed.optimizer.lr_muon, 0.025f / 0.0006f);

    // Muon's presets are none of AdamW's business.
    EXPECT_EQ(parse_train({"--muon-preset=tuned"}).options.optimizer.weight_decay, 0.1f);

    std::vector<std::string> changes;
    const TrainCommand resumed = resume_train(
        parse_train({}), parse_train({"--optimizer=muon", "--muon-preset=tuned"}).values, changes);
    EXPECT_EQ(resumed.options.optimizer.weight_decay, 0.05f);
    EXPECT_FLOAT_EQ(resumed.options.optimizer.lr_muon, 0.025f / 0.0006f);
    EXPECT_TRUE(changes.empty());
}

// Peaks of groups are learning rates like --lr, which they follow through the schedule.
TEST(Options, GroupRates) {
    const TrainOptions o = parse_train({"--lr=0.002", "--lr-embedding=0.004", "--lr-head=0.001",
                                        "--lr-scalar=0.01", "--lr-muon=0.02"})
                               .options;
    EXPECT_FLOAT_EQ(o.optimizer.lr_embedding, 2);
    EXPECT_FLOAT_EQ(o.optimizer.lr_head, 0.5);
    EXPECT_FLOAT_EQ(o.optimizer.lr_scalar, 5);
    EXPECT_FLOAT_EQ(o.optimizer.lr_muon, 10);
    EXPECT_FLOAT_EQ(parse_train({"--lr=0.002"}).options.optimizer.lr_muon, 1);
    EXPECT_EQ(error_of([] {
                  parse_train({"--lr=0", "--lr-muon=0.02"});
              }),
              "--lr-muon 0.02: needs an --lr above 0, whose schedule it follows");
}

TEST(Options, ConfigFileBelowTheCommandLine) {
    const std::string path = testing::TempDir() + "mugpt_config.ini";
    std::ofstream(path) << "# a comment\nlr = 0.0025\nbatch-size=8\nmuon-nesterov=false\nuntie-head=true\n"
                           "train-data = \"a folder/b_*.bin\"\n";
    const TrainCommand command = parse_train({"--config", path, "--batch-size", "2"});
    EXPECT_DOUBLE_EQ(command.options.schedule.lr, 0.0025);
    EXPECT_EQ(command.options.batch_size, 2u);
    EXPECT_EQ(command.options.train_data, "a folder/b_*.bin");
    EXPECT_TRUE(command.options.untie_head);
    EXPECT_FALSE(command.options.optimizer.muon_nesterov);
    std::ofstream(path) << "learning-rate=0.0025\n";
    EXPECT_NE(error_of([&] { parse_train({"--config", path}); }), "");
    EXPECT_NE(error_of([&] { parse_train({"--config", path + ".absent"}); }), "");

    // Text in quotes is taken as it is; what is no line of the format is refused, with its number.
    std::ofstream(path) << "sample-prompt = \"say # now, a b\"  # a comment\n lr=1e-2# another\n";
    const TrainCommand quoted = parse_train({"--config", path});
    EXPECT_EQ(quoted.options.sample_prompt, "say # now, a b");
    EXPECT_EQ(quoted.options.schedule.lr, 1e-2);
    for (const char* bad :
         {"lr", "[a", "[train]", "= 3", "lr =", "sample-prompt = \"open", "out = \"a\" b"}) {
        std::ofstream(path) << "# first\n" << bad << "\n";
        const std::string error = error_of([&] { parse_train({"--config", path}); });
        EXPECT_NE(error.find("line 2"), std::string::npos) << bad << ": " << error;
    }
}

TEST(Options, ErrorsNameOptionAndValueInOneLine) {
    const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
        {{"--lr", "nan"}, "nan"},
        {{"--lr", "inf"}, "inf"},
        {{"--lr", "-1e-9"}, "'-1e-9'"},
        {{"--beta1", "1"}, "1: must be in [0, 1)"},
        {{"--beta1", "nan"}, "nan"},
        {{"--eps", "0"}, "0: must be finite and positive"},
        {{"--weight-decay", "1e300"}, "inf: must be finite"},
        {{"--top-p", "0"}, "0: must be above 0"},
        {{"--temperature", "-1"}, "-1: must be 0 (greedy)"},
        {{"--muon-ns", "newton"}, "newton"},
        {{"--layers", "-1"}, "'-1'"},
        {{"--beta2", "-0.1"}, "-0.1"},
        {{"--grad-clip", "-1"}, "-1"},
        {{"--top-k", "-1"}, "-1"},
        {{"--seed", "1e30"}, "1e30"},
        {{"--muon-nesterov", "maybe"}, "'maybe'"},
        {{"--muon-split-qkv", ""}, "''"},
        {{"--muon-normuon", "1"}, "'1'"},
        {{"--schedule", "step"}, "step"},
        {{"--epochs", "0"}, "'0'"},
        {{"--steps", "1.5"}, "1.5"},
        {{"--final-lr-frac", "2"}, "'2'"},
        {{"--threads", "-2"}, "-2"},
        {{"--val-tokens", "0"}, "'0'"},
        {{"--keep", "-1"}, "-1"},
        {{"--layers", "x"}, "'x'"},
        {{"--log-every", "0"}, "'0'"},
    };
    for (const auto& [arguments, value] : cases) {
        const std::string message = error_of([&] { parse_train(arguments); });
        EXPECT_NE(message.find(arguments[0]), std::string::npos) << arguments[0] << ": " << message;
        EXPECT_NE(message.find(value), std::string::npos) << value << ": " << message;
        EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    }
}

// What is Muon's alone is kept on AdamW's command line, so that one option switches, and said.
TEST(Options, MuonsOptionsAreNamedWhereAdamWIgnoresThem) {
    const std::vector<std::string> muons = {"--muon-ns", "keller", "--lr-muon", "0.1", "--lr", "0.1"};
    const auto with = [&](const char* optimizer) {
        std::vector<std::string> arguments = muons;
        arguments.insert(arguments.end(), {"--optimizer", optimizer});
        return options_without_effect(parse_train(arguments));
    };
    EXPECT_EQ(with("adamw"), "--lr-muon --muon-ns");
    EXPECT_EQ(with("muon"), "");
    EXPECT_EQ(options_without_effect(parse_train({"--optimizer", "adamw"})), "");
}

TEST(Options, ResumeTakesTheSavedValuesAndReportsChanges) {
    const json saved = parse_train({"--out", "a", "--lr", "1e-3", "--steps", "100", "--untie-head",
                                    "--train-data", "x y*.bin", "--sample-prompt", "--odd=1"})
                           .values;
    std::vector<std::string> changes;
    const TrainCommand resumed =
        resume_train(parse_train({"--resume", "--out", "b", "--steps", "200"}), saved, changes);
    EXPECT_DOUBLE_EQ(resumed.options.schedule.lr, 1e-3);
    EXPECT_EQ(resumed.options.steps, 200u);
    EXPECT_EQ(resumed.options.out, "b");
    EXPECT_TRUE(resumed.options.untie_head);
    EXPECT_TRUE(resumed.options.resume);
    EXPECT_EQ(resumed.options.train_data, "x y*.bin");
    EXPECT_EQ(resumed.options.sample_prompt, "--odd=1");
    EXPECT_EQ(changes, std::vector<std::string>{"--steps: 100 -> 200"});
    const auto refused = [&](const std::string& name, const std::string& value) {
        return error_of([&] {
            resume_train(parse_train({"--resume", "--out", "b", name, value}), saved, changes);
        });
    };
    EXPECT_NE(refused("--seed", "2").find("--seed"), std::string::npos);
    EXPECT_EQ(refused("--seed", "+1337"), "");
    EXPECT_NE(refused("--optimizer", "muon").find("--optimizer"), std::string::npos);
    EXPECT_EQ(refused("--lr", "5e-4"), "");
}

// The same number written in another way is no change.
TEST(Options, ResumeComparesValuesNotText) {
    const json saved =
        parse_train({"--lr", ".001", "--keep", "+5", "--steps", "+64", "--beta1", "9e-1"}).values;
    EXPECT_EQ(saved["lr"], 0.001);
    EXPECT_EQ(saved["keep"], 5);
    EXPECT_EQ(saved["steps"], 64);
    std::vector<std::string> changes;
    const TrainCommand resumed = resume_train(
        parse_train({"--lr", "1e-3", "--keep", "5", "--steps", "64", "--beta1", ".9"}), saved, changes);
    EXPECT_EQ(changes, std::vector<std::string>{});
    EXPECT_EQ(resumed.values["lr"], 0.001);
}

// What the checkpoint has counts as given; the steps of other epochs are counted anew.
TEST(Options, ResumeDerivesNothingAnewFromADefault) {
    json saved = parse_train({}).values;
    saved["steps"] = 40;  // as the run had them, from --epochs 1
    saved["warmup"] = 700;
    std::vector<std::string> changes;
    const TrainCommand same = resume_train(parse_train({}), saved, changes);
    EXPECT_TRUE(same.given.contains("warmup"));
    EXPECT_EQ(same.options.steps, 40u);
    EXPECT_EQ(resume_train(parse_train({"--epochs", "2"}), saved, changes).options.steps, 0u);
    EXPECT_EQ(resume_train(parse_train({"--epochs", "2", "--steps", "9"}), saved, changes).options.steps, 9u);
}

TEST(Options, StrayAndRepeatedArguments) {
    const auto message = [](const std::vector<std::string>& arguments) {
        return error_of([&] { parse_train(arguments); });
    };
    EXPECT_EQ(message({"x"}), "x: not an option (see train_gpt --help)");
    EXPECT_EQ(message(std::vector<std::string>(10000, "x")),
              "x: not an option, and 9999 more like it (see train_gpt --help)");
    EXPECT_EQ(message({"--lr", "1", "--lr", "2"}), "--lr: given twice (see train_gpt --help)");
    EXPECT_EQ(message({"--lr=1", "--lr=2", "--lr=3"}), "--lr: given 3 times (see train_gpt --help)");
}

// A terminal would obey an escape sequence in a file's name.
TEST(Console, ErrorsAreOneShortLineOfText) {
    const auto printed = [](const std::string& text) {
        testing::internal::CaptureStderr();
        console_error(text);
        return testing::internal::GetCapturedStderr();
    };
    EXPECT_EQ(printed("caf\xC3\xA9: \x1b[2J\nno\xFF"), "train_gpt: caf\xC3\xA9: \uFFFD[2J\uFFFDno\uFFFD\n");
    const std::string path(4000, 'x');
    EXPECT_EQ(printed("--out " + path + ": no"),
              "train_gpt: --out " + path.substr(0, 994) + " ... " + path.substr(0, 996) + ": no\n");
}

TEST(Console, TablesAndNumbers) {
    EXPECT_EQ(boxed_table({{"name", "n"}, {"a", "12"}, {"longer", "3"}}),
              "+--------+----+\n"
              "| name   | n  |\n"
              "+--------+----+\n"
              "| a      | 12 |\n"
              "| longer |  3 |\n"
              "+--------+----+\n");
    EXPECT_EQ(with_commas(0), "0");
    EXPECT_EQ(with_commas(999), "999");
    EXPECT_EQ(with_commas(1234567), "1,234,567");
    EXPECT_EQ(duration(45), "45s");
    EXPECT_EQ(duration(200), "3m20s");
    EXPECT_EQ(duration(7500), "2h05m");
    EXPECT_EQ(duration(3 * 86400 + 4 * 3600), "3d04h");
    EXPECT_EQ(duration(-1), "?");
    EXPECT_EQ(mebibytes(1048576 * 3 / 2), "1.5");
}

TEST(RunLog, AResumedRunCutsTheLogBack) {
    const std::string folder = testing::TempDir() + "mugpt_run_log";
    std::filesystem::remove_all(folder);
    RunLog log = run_log_open(folder);
    run_log_start(log);
    for (uint64_t step = 1; step <= 5; step++) {
        run_log_write(log, "train", step, {{"loss", 1.0 / 3.0}});
        run_log_train_line(log, step, 1.0 / 3.0, 6e-7, 1.5);
        run_log_validation_line(log, step, 2.0);
    }
    run_log_close(log);
    std::ofstream(folder + "/log.jsonl", std::ios::app)
        << "{\"type\":\"train\",\"st";  // killed while writing

    log = run_log_open(folder);
    run_log_resume(log, 3, 0);
    run_log_write(log, "train", 4, {{"loss", 0.25}});
    run_log_close(log);
    std::istringstream lines(read_file(folder + "/log.jsonl"));
    std::vector<uint64_t> steps;
    for (std::string line; std::getline(lines, line);) {
        const json object = json::parse(line);
        steps.push_back(object["step"]);
        if (object["step"] == 1) {
            EXPECT_EQ(object["loss"], 1.0 / 3.0);  // full precision
        }
    }
    EXPECT_EQ(steps, (std::vector<uint64_t>{1, 2, 3, 4}));
    EXPECT_EQ(read_file(folder + "/main.log").find("s:4"), std::string::npos);
    EXPECT_NE(
        read_file(folder + "/main.log").find("s:3 trl:0.3333 lr:6.000000e-07 norm:1.50\ns:3 tel:2.0000\n"),
        std::string::npos);

    // A new run starts new files.
    log = run_log_open(folder);
    run_log_start(log);
    run_log_close(log);
    EXPECT_EQ(read_file(folder + "/log.jsonl"), "");
    std::filesystem::remove_all(folder);
}

// The checkpoint of step 2 was saved with one skipped step. What followed it is gone: the second skipped
// step, which has the same `step`, the start of a run that came no further, and the end of a run that goes
// on.
TEST(RunLog, TheCutKeepsWhatTheCheckpointKnew) {
    const std::string folder = testing::TempDir() + "mugpt_run_log_cut";
    std::filesystem::remove_all(folder);
    RunLog log = run_log_open(folder);
    run_log_start(log);
    const std::vector<std::string> before = {
        R"({"type":"config","step":0})",
        R"({"type":"train","step":1})",
        R"({"type":"skip","step":1,"skipped":1})",
        R"({"type":"train","step":2})",
        R"({"type":"val","step":2})",
        R"({"type":"checkpoint","step":2})",
        R"({"type":"sample","step":2})",
    };
    std::vector<std::string> after = {
        R"({"type":"done","step":2})",
        R"({"type":"config","step":2})",
        R"({"type":"skip","step":2,"skipped":2})",
        R"({"type":"train","step":3})",
    };
    const auto write = [&](const std::string& line) {
        json fields = json::parse(line);
        const std::string type = fields["type"];
        const uint64_t step = fields["step"];
        fields.erase("type");
        fields.erase("step");
        run_log_write(log, type.c_str(), step, fields);
    };
    for (const std::string& line : before) write(line);
    for (const std::string& line : after) write(line);
    run_log_close(log);
    log = run_log_open(folder);
    run_log_resume(log, 2, 1);
    run_log_close(log);
    std::string expected;
    for (const std::string& line : before) expected += line + "\n";
    EXPECT_EQ(read_file(folder + "/log.jsonl"), expected);
    std::filesystem::remove_all(folder);
}

TEST(RunLog, FaultsHaveTheirReason) {
    const std::string folder = testing::TempDir() + "mugpt_run_log_faults";
    std::filesystem::remove_all(folder);
    RunLog log = run_log_open(folder);
    EXPECT_FALSE(std::filesystem::exists(folder)) << "only a start makes it";
    run_log_start(log);
    run_log_close(log);
    // A log that cannot be read is not an empty one.
    std::filesystem::remove(folder + "/log.jsonl");
    std::filesystem::create_directory(folder + "/log.jsonl");
    log = run_log_open(folder);
    EXPECT_NE(error_of([&] { run_log_resume(log, 3, 0); }).find("log.jsonl: is a folder"), std::string::npos);
    const std::string message = error_of([&] { run_log_start(log); });
    EXPECT_NE(message.find("log.jsonl: Is a directory"), std::string::npos) << message;
    EXPECT_FALSE(std::filesystem::exists(folder + "/log.jsonl.tmp"));
    run_log_close(log);
    std::filesystem::remove_all(folder);
    // A full disk, while a line is written.
    FILE* full = fopen("/dev/full", "w");
    if (full == nullptr) GTEST_SKIP() << "no /dev/full here";
    log.folder = folder;
    log.jsonl = full;
    errno = 0;
    const std::string long_text(100000, 'x');  // longer than any buffer
    for (const std::string& text : {std::string("x"), long_text}) {
        EXPECT_NE(error_of([&] {
                      run_log_write(log, "sample", 1, {{"text", text}});
                  }).find("No space left"),
                  std::string::npos);
    }
    run_log_close(log);
}

TEST(RunLog, OneRunAtATime) {
    const std::string folder = testing::TempDir() + "mugpt_run_lock";
    std::filesystem::remove_all(folder);
    // Both begin where there is no folder yet; the first to start has it.
    RunLog first = run_log_open(folder), late = run_log_open(folder);
    run_log_start(first);
    EXPECT_NE(error_of([&] { run_log_start(late); }).find("another run"), std::string::npos);
    EXPECT_NE(error_of([&] { run_log_open(folder); }).find("another run"), std::string::npos);
    run_log_close(first);
    RunLog second = run_log_open(folder);
    EXPECT_NE(error_of([&] { run_log_open(folder); }).find("another run"), std::string::npos);
    run_log_close(second);
    std::filesystem::remove_all(folder);
}
