// The program as a user runs it: training, resume, signals, kills, bad input.
#include "dev/test/program.h"

#include <cmath>
#include <cstring>
#include <set>

#include "data/tokenizer.h"
#include "model/integrity.h"
#include "model/safetensors.h"

namespace {

// Gives a tensor of a model folder one value, from element `first` on.
void overwrite_tensor(const std::string& folder, const std::string& name, float value, size_t first = 0) {
    const std::string path = folder + "/model.safetensors";
    size_t offset, count;
    {
        const SafeTensorsFile file = safetensors_open(path);
        const SafeTensor& tensor = file.tensors.at(name);
        offset = static_cast<size_t>(static_cast<const char*>(tensor.data) - file.file.data.get()) +
                 first * sizeof(float);
        count = tensor.bytes / sizeof(float) - first;
    }
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(offset));
    for (size_t i = 0; i < count; i++) file.write(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace

void expect_resume_equals_straight_run(const std::string& optimizer, const std::string& dtype,
                                       const Arguments& more, const std::vector<const char*>& steps) {
    std::string trace = optimizer + " " + dtype;
    for (const std::string& option : more) trace += " " + option;
    SCOPED_TRACE(trace);
    TempFolder folder;
    const Arguments kind = {"--optimizer", optimizer, "--dtype", dtype};
    const auto with_more = [&](Arguments arguments) {
        arguments.insert(arguments.end(), more.begin(), more.end());
        return arguments;
    };
    const auto averages = [&](const std::string& out) {
        const json state = json::parse(read_file(folder / (out + "/step_00000020/state.json")))["state"];
        return state.value("lr_adapt", json());
    };
    const Result straight = run(folder, with_more(tiny(folder, "straight", kind)));
    ASSERT_EQ(straight.status, 0) << straight.err;
    const auto expected = training_lines(folder / "straight");
    ASSERT_EQ(expected.size(), 20u + 4u);  // 20 steps; validation at 0, 7, 14, 20
    // 103 rows make 25 micro-batches an epoch, 3 a step: epoch 2 begins inside step 9.
    for (const char* at : steps) {
        const std::string out = std::string("resumed") + at;
        Arguments changes = kind;
        changes.insert(changes.end(), {"--checkpoint-every", at, "--keep", "0"});
        ASSERT_EQ(run(folder, with_more(tiny_with(folder, out, changes))).status, 0);
        keep_checkpoint(folder / out, std::stoul(at));
        const Result resumed = run(folder, {"--out", folder / out, "--resume"});
        ASSERT_EQ(resumed.status, 0) << resumed.err;
        EXPECT_EQ(training_lines(folder / out), expected) << "at " << at;
        for (const char* file : {"model.safetensors", "optimizer_000.safetensors"}) {
            EXPECT_EQ(read_file(folder / (out + "/step_00000020/" + file)),
                      read_file(folder / (std::string("straight/step_00000020/") + file)))
                << "at " << at;
        }
        EXPECT_EQ(averages(out), averages("straight")) << "at " << at;
    }
}

TEST(Program, ResumeAtAnyStepEqualsTheStraightRunBitForBit) {
    for (const char* optimizer : {"adamw", "muon"}) {
        expect_resume_equals_straight_run(optimizer, "fp32", {}, {"1", "7", "8", "9", "13", "19"});
        expect_resume_equals_straight_run(optimizer, "bf16", {}, {"8"});
        expect_resume_equals_straight_run(optimizer, "fp16", {}, {"13"});
        expect_resume_equals_straight_run(optimizer, "fp32", {"--state-dtype", "bf16"}, {"9"});
        expect_resume_equals_straight_run(optimizer, "bf16", {"--state-dtype", "bf16"}, {"7"});
    }
    expect_resume_equals_straight_run("muon", "fp32", {"--muon-state-dtype", "bf16"}, {"9"});
}

// Before the adapted rates move, after the first tenth step that does it, and later; with a loss scale that
// grows and steps that it makes the run skip.
TEST(Program, ResumeWithAdaptedRatesEqualsTheStraightRunBitForBit) {
    const Arguments adapted = {"--lr-adapt", "--virtual-ranks", "3"};
    for (const char* optimizer : {"adamw", "muon"})
        expect_resume_equals_straight_run(optimizer, "fp32", adapted, {"5", "11", "17"});
    expect_resume_equals_straight_run(
        "muon", "fp16", {"--lr-adapt", "--virtual-ranks", "3", "--state-dtype", "bf16"}, {"13"});
}

// What backward computes again changes no bit, and need not stay the same over a resume.
TEST(Program, ResumeWithAnotherRecomputeEqualsTheStraightRunBitForBit) {
    for (const char* optimizer : {"adamw", "muon"}) {
        for (const char* dtype : {"fp32", "bf16", "fp16"}) {
            SCOPED_TRACE(std::string(optimizer) + " " + dtype);
            TempFolder folder;
            const Arguments kind = {"--optimizer", optimizer, "--dtype", dtype};
            ASSERT_EQ(run(folder, tiny(folder, "straight", kind)).status, 0);
            const auto with = [&](const Arguments& more) {
                Arguments all = kind;
                all.insert(all.end(), more.begin(), more.end());
                return tiny_with(folder, "resumed", all);
            };
            ASSERT_EQ(
                run(folder, with({"--recompute", "block", "--checkpoint-every", "8", "--keep", "0"})).status,
                0);
            keep_checkpoint(folder / "resumed", 8);
            const Result resumed =
                run(folder, {"--out", folder / "resumed", "--resume", "--recompute", "gelu"});
            ASSERT_EQ(resumed.status, 0) << resumed.err;
            EXPECT_NE(resumed.out.find("--recompute: \"block\" -> \"gelu\""), std::string::npos);
            EXPECT_EQ(training_lines(folder / "resumed"), training_lines(folder / "straight"));
            for (const char* file :
                 {"/step_00000020/model.safetensors", "/step_00000020/optimizer_000.safetensors"})
                EXPECT_EQ(read_file(folder / "resumed" + file), read_file(folder / "straight" + file));
        }
    }
    TempFolder folder;
    expect_rejected(folder, tiny(folder, "run", {"--recompute", "all"}), {"--recompute", "all"});
}

// The rows of the memory table, by their names.
std::map<std::string, uint64_t> memory_table(const std::string& out) {
    std::map<std::string, uint64_t> rows;
    std::istringstream text(out.substr(out.find("| memory ")));
    std::string line;
    std::getline(text, line);
    while (std::getline(text, line) && !line.starts_with("step")) {
        if (!line.starts_with("| ")) continue;
        const size_t bar = line.find('|', 2);
        std::string bytes = line.substr(bar + 1, line.find('|', bar + 1) - bar - 1);
        std::erase_if(bytes, [](char c) { return c == ',' || c == ' '; });
        rows[line.substr(2, line.find_last_not_of(' ', bar - 1) - 1)] = std::stoull(bytes);
    }
    return rows;
}

// The last row, which is the device's own count, is the sum of the others, and at the end, after validation,
// samples and checkpoints, no more has ever been taken.
TEST(Program, TheMemoryTableIsComplete) {
    for (const char* optimizer : {"adamw", "muon"}) {
        for (const char* dtype : {"fp32", "bf16", "fp16"}) {
            const std::string state_dtype = std::string(dtype) == "bf16" ? "bf16" : "fp32";
            std::set<uint64_t> activations;
            for (const char* recompute : {"none", "gelu", "block"}) {
                SCOPED_TRACE(std::string(optimizer) + " " + dtype + " " + recompute);
                TempFolder folder;
                const Result result =
                    run(folder, tiny_with(folder, "run",
                                          {"--optimizer", optimizer, "--dtype", dtype, "--recompute",
                                           recompute, "--state-dtype", state_dtype, "--steps", "3",
                                           "--warmup", "1", "--layers", "3"}));
                ASSERT_EQ(result.status, 0) << result.err;
                std::map<std::string, uint64_t> rows = memory_table(result.out);
                const uint64_t all = rows.at("all");
                uint64_t sum = 0;
                for (const auto& [name, bytes] : rows) {
                    if (name != "all") sum += bytes;
                    if (name.starts_with("activations")) activations.insert(bytes);
                }
                EXPECT_EQ(rows.size(), 11u);
                EXPECT_EQ(sum, all);
                // Muon's are 12 matrices of C x C a layer, or as much.
                const uint64_t muon = std::string(optimizer) == "muon" ? 3 * 12 * 48 * 48 : 0;
                EXPECT_EQ(rows.at("Muon's state"), muon * (state_dtype == "bf16" ? 2 : 4));
                const std::vector<json> lines = log_lines(folder / "run");
                EXPECT_EQ(rows.at("Muon's state") + rows.at("AdamW's state"),
                          lines.front()["optimizer_state_bytes"]);
                EXPECT_EQ(lines.back()["type"], "done");
                EXPECT_EQ(lines.back()["peak_bytes"], all);
                // The rehearsal that found the scratch counts for nothing.
                const json state = json::parse(read_file(folder / "run/step_00000003/state.json"));
                EXPECT_EQ(state["optimizer_step"], 3);
                EXPECT_EQ(state["degenerate_updates"], 0);
            }
            EXPECT_EQ(activations.size(), 3u);
        }
    }
}

// With one token a step, the gradient of a logit is up to the loss scale: 65536 is infinite in fp16. The run
// halves it, loses no step, and takes the scale with it into a checkpoint.
TEST(Program, Fp16RecoversFromOverflow) {
    for (const char* optimizer : {"adamw", "muon"}) {
        TempFolder folder;
        const auto arguments = [&](const std::string& out, const Arguments& changes) {
            Arguments all =
                tiny_with(folder, out,
                          {"--dtype", "fp16", "--optimizer", optimizer, "--seq-len", "1", "--batch-size", "1",
                           "--tokens-per-step", "1", "--val-every", "0", "--sample-tokens", "0"});
            all.insert(all.end(), changes.begin(), changes.end());
            return all;
        };
        ASSERT_EQ(run(folder, arguments("run", {})).status, 0);
        uint64_t step = 0, skipped = 0;
        double scale = 65536;
        for (const json& line : log_lines(folder / "run")) {
            if (line["type"] == "skip") {
                EXPECT_EQ(line["loss_scale"], scale);
                EXPECT_EQ(line["skipped"], ++skipped);
                scale /= 2;
            } else if (line["type"] == "train") {
                EXPECT_EQ(line["step"], ++step);
                EXPECT_EQ(line["loss_scale"], scale);
                EXPECT_EQ(line["skipped"], skipped);
                EXPECT_TRUE(line["loss"].is_number() && line["grad_norm"].is_number()) << line;
            }
        }
        EXPECT_EQ(step, 20u);
        EXPECT_GE(skipped, 1u);
        const json state = json::parse(read_file(folder / "run/step_00000020/state.json"))["state"];
        EXPECT_EQ(state["loss_scale"], scale);

        // A scale that cannot back off shows why it must: every gradient overflows.
        const Result fixed = run(folder, arguments("fixed", {"--loss-scale", "1048576"}));
        EXPECT_EQ(fixed.status, 1);
        EXPECT_NE(one_line(fixed.err).find("not finite 10 times in a row"), std::string::npos) << fixed.err;
        EXPECT_NE(fixed.out.find("--loss-scale 1.04858e+06 is fixed"), std::string::npos) << fixed.out;
    }
}

// Gives a checkpoint another loss scale, with the checksum that state.json then has.
void set_loss_scale(const std::string& checkpoint, double scale) {
    const std::string path = checkpoint + "/state.json";
    json content = json::parse(read_file(path));
    content["state"]["loss_scale"] = scale;
    content.erase("checksum");
    content["checksum"] = checksum(content.dump());
    std::ofstream(path) << content.dump();
}

// Overflow at two chosen steps, the 6th and the 11th: the loss scale of the checkpoint before is raised to
// 2^24, 2^24/96 a token, which is infinite in fp16. Each time the run backs off, takes every step once at the
// rate that it has without overflow, counts what it skipped, and in the end has learnt as much.
TEST(Program, Fp16RecoversFromOverflowAtChosenSteps) {
    for (const char* optimizer : {"adamw", "muon"}) {
        SCOPED_TRACE(optimizer);
        TempFolder folder;
        const auto train = [&](const std::string& out) {
            return run(folder, tiny_with(folder, out,
                                         {"--dtype", "fp16", "--optimizer", optimizer, "--tokens-per-step",
                                          "96", "--checkpoint-every", "5", "--keep", "0"}));
        };
        const std::string straight = folder / "straight", forced = folder / "forced";
        for (const char* out : {"straight", "forced"}) ASSERT_EQ(train(out).status, 0);
        for (const uint64_t step : {5, 10}) {
            keep_checkpoint(forced, step);
            set_loss_scale(forced + (step == 5 ? "/step_00000005" : "/step_00000010"), 0x1p24);
            const Result resumed = run(folder, {"--out", forced, "--resume"});
            ASSERT_EQ(resumed.status, 0) << resumed.err;
        }

        std::map<uint64_t, json> expected;
        for (const json& line : log_lines(straight)) {
            EXPECT_NE(line["type"], "skip");
            if (line["type"] == "train") expected[line["step"]] = line;
        }
        std::map<uint64_t, uint64_t> skips;  // after so many steps
        uint64_t skipped = 0, step = 0;
        double scale = 65536;
        for (const json& line : log_lines(forced)) {
            if (line["type"] == "skip") {
                if (skips[line["step"]]++ == 0) scale = 0x1p24;
                EXPECT_EQ(line["step"], step);
                EXPECT_EQ(line["loss_scale"], scale);
                EXPECT_EQ(line["skipped"], ++skipped);
                scale /= 2;
            } else if (line["type"] == "train") {
                EXPECT_EQ(line["step"], ++step);
                EXPECT_EQ(line["lr"], expected[step]["lr"]);
                EXPECT_EQ(line["loss_scale"], scale);
                EXPECT_EQ(line["skipped"], skipped);
            }
        }
        EXPECT_EQ(step, 20u);
        ASSERT_EQ(skips.size(), 2u);
        EXPECT_GE(skips[5], 2u);  // 2^24 and 2^23
        EXPECT_GE(skips[10], 2u);
        const json state = json::parse(read_file(forced + "/step_00000020/state.json"))["state"];
        EXPECT_EQ(state["skipped"], skipped);
        EXPECT_EQ(state["loss_scale"], scale);
        const double with = log_lines(forced).back()["val_loss"],
                     without = log_lines(straight).back()["val_loss"];
        EXPECT_NEAR(with / without, 1, 0.02);  // other rows were read, so it is not the same
    }
}

// Steps from --epochs, the warm-up's tenth and the model's shape are the run's own, not the defaults of a
// later command line.
TEST(Program, ResumeKeepsWhatTheStraightRunDerived) {
    TempFolder folder;
    const auto derived = [&](const std::string& out) {
        Arguments arguments = tiny_with(folder, out, {"--checkpoint-every", "15", "--keep", "0"});
        for (const char* name : {"--steps", "--warmup"}) {
            const auto at = std::find(arguments.begin(), arguments.end(), name);
            arguments.erase(at, at + 2);
        }
        arguments.insert(arguments.end(), {"--epochs", "4"});  // of 25 micro-batches, 3 a step
        return arguments;
    };
    ASSERT_EQ(run(folder, derived("straight")).status, 0);
    ASSERT_EQ(run(folder, derived("resumed")).status, 0);
    keep_checkpoint(folder / "resumed", 15);
    const json options = log_lines(folder / "straight")[0]["options"];
    EXPECT_EQ(options["steps"], 33);
    EXPECT_EQ(options["warmup"], 3);
    const Result resumed = run(folder, {"--out", folder / "resumed", "--resume", "--layers", "2"});
    ASSERT_EQ(resumed.status, 0) << resumed.err;
    EXPECT_EQ(training_lines(folder / "resumed"), training_lines(folder / "straight"));
    EXPECT_EQ(resumed.out.find("changed since"), std::string::npos) << resumed.out;
    const Result longer = run(folder, {"--out", folder / "resumed", "--resume", "--epochs", "5"});
    ASSERT_EQ(longer.status, 0) << longer.err;
    EXPECT_EQ(checkpoints(folder / "resumed").back(), 41u);
}

// A warm-up that was given keeps its length even where it is the default's: 700 of 1000 steps.
TEST(Program, ResumeKeepsAGivenWarmup) {
    TempFolder folder;
    Arguments arguments = tiny_with(folder, "run", {"--steps", "1000", "--warmup", "700"});
    for (int part = 0; part < 2; part++) {
        const pid_t pid = start(folder, arguments);
        wait_for(folder / "stdout", "tok/s");
        kill(pid, SIGTERM);
        const Result result = finish(folder, pid);
        ASSERT_EQ(result.status, 0) << result.err;
        arguments = {"--out", folder / "run", "--resume"};
    }
    size_t steps = 0;
    for (const json& line : log_lines(folder / "run")) {
        if (line["type"] != "train") continue;
        steps++;
        EXPECT_EQ(line["lr"], 3e-3 * line["step"].get<double>() / 700) << line["step"];
    }
    EXPECT_GE(steps, 2u);
}

TEST(Program, ThreadsDoNotChangeTheBits) {
    TempFolder folder;
    for (const std::string threads : {"1", "2", "3"}) {
        Arguments arguments = tiny(folder, "threads" + threads, {"--optimizer", "muon"});
        *(std::find(arguments.begin(), arguments.end(), "--threads") + 1) = threads;
        ASSERT_EQ(run(folder, arguments).status, 0);
        EXPECT_EQ(training_lines(folder / ("threads" + threads)), training_lines(folder / "threads1"));
    }
}

TEST(Program, ValidationSamplesAndCheckpointsDoNotDisturbTraining) {
    TempFolder folder;
    const auto losses = [&](const std::string& out, const Arguments& changes) {
        EXPECT_EQ(run(folder, tiny_with(folder, out, changes)).status, 0);
        std::vector<std::string> lines;
        for (const std::string& line : training_lines(folder / out)) {
            if (json::parse(line)["type"] == "train") lines.push_back(line);
        }
        EXPECT_EQ(lines.size(), 20u);
        return lines;
    };
    const auto plain = losses("plain", {"--val-every", "0", "--sample-tokens", "0"});
    EXPECT_EQ(losses("validated", {"--val-every", "1"}), plain);
    EXPECT_EQ(losses("sampled", {"--sample-every", "1"}), plain);
    EXPECT_EQ(losses("saved", {"--checkpoint-every", "1"}), plain);
}

TEST(Program, LearnsAndWritesItsLogs) {
    TempFolder folder;
    const Result result = run(folder, tiny(folder, "run", {"--optimizer", "muon"}));
    ASSERT_EQ(result.status, 0) << result.err;
    EXPECT_NE(result.out.find("Muon"), std::string::npos);
    const std::vector<json> lines = log_lines(folder / "run");
    const std::string readme = read_file("README.md");
    for (const json& line : lines) {
        EXPECT_NE(readme.find("| `" + line["type"].get<std::string>() + "` |"), std::string::npos) << line;
        for (const auto& [key, value] : line.items())
            EXPECT_NE(readme.find("`" + key + "`"), std::string::npos) << "README lacks the key " << key;
    }
    EXPECT_EQ(lines.front()["type"], "config");
    EXPECT_EQ(lines.front()["options"]["lr"], 3e-3);
    EXPECT_EQ(lines.back()["type"], "done");
    std::vector<double> losses;
    for (const json& line : lines) {
        if (line["type"] != "train") continue;
        for (const char* key : {"loss", "grad_norm", "lr", "tokens_per_second", "ms", "optimizer_ms", "mfu",
                                "bytes_sent", "peak_bytes", "loss_scale", "skipped"}) {
            EXPECT_TRUE(line.contains(key)) << key;
        }
        losses.push_back(line["loss"]);
    }
    EXPECT_NEAR(losses.front(), std::log(101.0), 0.1);
    EXPECT_LT(losses.back(), losses.front() - 0.5);
    const std::string main_log = read_file(folder / "run/main.log");
    EXPECT_NE(main_log.find("s:0 tel:"), std::string::npos);
    EXPECT_NE(main_log.find("s:20 trl:"), std::string::npos);
}

TEST(Program, AFinishedRunResumesToNothing) {
    TempFolder folder;
    ASSERT_EQ(run(folder, tiny(folder, "run")).status, 0);
    const auto before = fs::last_write_time(folder / "run/step_00000020/state.json");
    const std::string log = read_file(folder / "run/log.jsonl");
    const Result again = run(folder, tiny(folder, "run", {"--resume"}));
    EXPECT_EQ(again.status, 0) << again.err;
    EXPECT_EQ(fs::last_write_time(folder / "run/step_00000020/state.json"), before);
    EXPECT_EQ(read_file(folder / "run/log.jsonl"), log);
}

TEST(Program, ResumeSaysWhatChangedAndRefusesWhatCannot) {
    TempFolder folder;
    ASSERT_EQ(run(folder, tiny(folder, "run")).status, 0);
    const Result longer = run(folder, {"--out", folder / "run", "--resume", "--steps", "25", "--lr", "1e-3"});
    EXPECT_EQ(longer.status, 0) << longer.err;
    EXPECT_NE(longer.out.find("--steps: 20 -> 25"), std::string::npos) << longer.out;
    EXPECT_NE(longer.out.find("--lr"), std::string::npos);
    expect_rejected(folder, {"--out", folder / "run", "--resume", "--steps", "30", "--channels", "96"},
                    {"--channels"});
    expect_rejected(folder, {"--out", folder / "run", "--resume", "--steps", "30", "--optimizer", "muon"},
                    {"--optimizer", "muon"});
    expect_rejected(folder, {"--out", folder / "run", "--resume", "--steps", "30", "--state-dtype", "bf16"},
                    {"--state-dtype", "bf16", "fp32"});
    expect_rejected(folder, {"--out", folder / "run", "--resume", "--steps", "30", "--batch-size", "3"},
                    {"--new-data", "--batch-size was 4, is 3"});
    // Without --resume the folder is not touched.
    expect_rejected(folder, tiny(folder, "run"), {"--out", "--resume"});
}

TEST(Program, ChangedDataAreNoticedOnResume) {
    TempFolder folder;
    ASSERT_EQ(run(folder, tiny(folder, "run")).status, 0);
    const Arguments resume = {"--out", folder / "run", "--resume", "--steps", "22"};
    fs::rename(folder / "data_train_001.bin", folder / "data_train_002.bin");
    expect_rejected(folder, resume, {"--train-data", "--new-data", "data_train_002.bin"});
    fs::rename(folder / "data_train_002.bin", folder / "data_train_001.bin");
    write_shard(folder / "data_train_001.bin", 500, 101, 2);  // shorter
    expect_rejected(folder, resume, {"--train-data", "--new-data", "data_train_001.bin has another size"});
    Arguments anew = resume;
    anew.push_back("--new-data");
    const Result result = run(folder, anew);
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_NE(result.out.find("beginning"), std::string::npos);
}

// --new-data is taken at its word where the data are the same, and is for a resumed run alone.
TEST(Program, NewDataStartsAtTheBeginning) {
    TempFolder folder;
    expect_rejected(folder, tiny(folder, "run", {"--new-data"}), {"--new-data", "--resume"});
    const Arguments rate_of_zero = {"--lr", "0", "--steps", "8", "--checkpoint-every", "0"};
    ASSERT_EQ(run(folder, tiny_with(folder, "run", rate_of_zero)).status, 0);
    const Result anew = run(folder, {"--out", folder / "run", "--resume", "--steps", "16", "--new-data"});
    ASSERT_EQ(anew.status, 0) << anew.err;
    std::map<uint64_t, double> losses;  // the weights stand still: the same data give the same losses
    for (const json& line : log_lines(folder / "run")) {
        if (line["type"] == "train") losses[line["step"]] = line["loss"];
    }
    for (uint64_t step = 1; step <= 8; step++) EXPECT_EQ(losses.at(step), losses.at(step + 8)) << step;
}

// A shard is mapped into memory: what another program cuts off of it cannot be read any more.
TEST(Program, AShardThatIsCutOffWhileItIsReadIsOneLine) {
    TempFolder folder;
    const pid_t pid = start(folder, tiny_with(folder, "run", {"--steps", "100000"}));
    wait_for(folder / "stdout", "tok/s");
    for (const char* name : {"data_train_000.bin", "data_train_001.bin"}) fs::resize_file(folder / name, 0);
    const Result result = finish(folder, pid);
    EXPECT_EQ(result.status, 1);
    EXPECT_NE(one_line(result.err).find("shortened"), std::string::npos) << result.err;
}

// Validation and samples may be long; a signal does not wait for them.
TEST(Program, SignalsCutValidationAndSamplesShort) {
    for (const bool sample : {false, true}) {
        TempFolder folder;
        write_shard(folder / "data_val_000.bin", 2000000, 101, 3);
        const Arguments changes =
            sample ? Arguments{"--sample-tokens", "1000000", "--sample-every", "1", "--val-every", "0"}
                   : Arguments{"--val-tokens", "2000000", "--val-every", "1", "--sample-tokens", "0"};
        const pid_t pid = start(folder, tiny_with(folder, "run", changes));
        wait_for(folder / "run/log.jsonl", sample ? "train" : "config");
        const auto sent = std::chrono::steady_clock::now();
        kill(pid, SIGTERM);
        const Result result = finish(folder, pid);
        EXPECT_EQ(result.status, 0) << result.err;
        EXPECT_LT(std::chrono::steady_clock::now() - sent, std::chrono::seconds(10));
        EXPECT_EQ(checkpoints(folder / "run").size(), 1u);
    }
}

TEST(Program, SignalsFinishTheStepSaveAndExitCleanly) {
    for (const int signal : {SIGTERM, SIGINT}) {
        TempFolder folder;
        Arguments arguments = tiny(folder, "run", {"--log-every", "1"});
        *(std::find(arguments.begin(), arguments.end(), "--steps") + 1) = "100000";
        const pid_t pid = start(folder, arguments);
        for (int i = 0; i < 200 && read_file(folder / "stdout").find("step      5/") == std::string::npos;
             i++) {
            std::this_thread::sleep_for(milliseconds(50));
        }
        kill(pid, signal);
        const Result result = finish(folder, pid);
        EXPECT_EQ(result.status, 0) << result.err;
        EXPECT_NE(result.out.find("stopped by a signal after step"), std::string::npos);
        EXPECT_EQ(checkpoints(folder / "run").size(), 1u);
        EXPECT_EQ(run(folder, {"--out", folder / "run", "--resume", "--steps", "4"}).status, 0);
    }
}

// The step that a signal falls into may be the last: then the run is done, not stopped.
TEST(Program, ASignalInTheLastStepChangesNothing) {
    TempFolder folder;
    const pid_t pid = start(
        folder, tiny_with(folder, "run", {"--steps", "1", "--tokens-per-step", "57600", "--warmup", "0"}));
    wait_for(folder / "run/log.jsonl", "val");
    kill(pid, SIGTERM);
    const Result result = finish(folder, pid);
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(result.out.find("stopped"), std::string::npos) << result.out;
    EXPECT_EQ(log_lines(folder / "run").back()["type"], "done");
}

// Nothing that is there may be lost, not even the log, because no checkpoint can be read.
TEST(Program, DamagedCheckpointsAreNotStartedOver) {
    TempFolder folder;
    ASSERT_EQ(run(folder, tiny_with(folder, "run", {"--checkpoint-every", "10"})).status, 0);
    for (const char* step : {"10", "20"}) {
        const std::string name = std::string("run/step_000000") + step;
        overwrite_tensor(folder / name, "transformer.ln_f.bias", 1.0f);
    }
    fs::remove(folder / "run/.lock");  // as in a folder that was copied
    const Snapshot before = snapshot(folder / "run");
    expect_rejected(folder, tiny(folder, "run", {"--resume"}),
                    {"--out", "step_00000020", "model.safetensors"});
    expect_rejected(folder, tiny(folder, "run"), {"--out", "step_00000020", "model.safetensors"});
    EXPECT_EQ(snapshot(folder / "run"), before);
}

// A model folder with damaged weights: every gradient is NaN, and no step can be taken.
TEST(Program, NanEndsTheRunWithOneLine) {
    TempFolder folder;
    ASSERT_EQ(run(folder, tiny(folder, "good")).status, 0);
    const std::string good = folder / "good/step_00000020", damaged = folder / "damaged";
    fs::copy(good, damaged);
    overwrite_tensor(damaged, "transformer.h.1.mlp.c_fc.bias", NAN);
    const Arguments from_damaged = {"--model",           damaged, "--train-data", folder / "data_train_*.bin",
                                    "--batch-size",      "4",     "--steps",      "20",
                                    "--tokens-per-step", "288",   "--out",        folder / "run"};
    expect_rejected(folder, from_damaged, {"10 times in a row", "wte.weight", "there is no checkpoint"});
    EXPECT_EQ(checkpoints(folder / "run"), std::vector<uint64_t>{});
    const std::vector<json> lines = log_lines(folder / "run");
    EXPECT_EQ(lines.back()["type"], "skip");
    EXPECT_EQ(lines.back()["skipped"], 10);
    expect_rejected(folder, {"generate", "--model", damaged}, {"NaN"});
    // Damage where no gradient sees it, in a position that no row reaches, is not saved either.
    fs::remove_all(damaged);
    fs::remove_all(folder / "run");
    fs::copy(good, damaged);
    overwrite_tensor(damaged, "transformer.wpe.weight", INFINITY, 12 * 48);
    Arguments short_rows = from_damaged;
    short_rows.insert(short_rows.end(), {"--seq-len", "12", "--checkpoint-every", "1"});
    expect_rejected(folder, short_rows, {"wpe.weight"});
    EXPECT_EQ(checkpoints(folder / "run"), std::vector<uint64_t>{});
}

// Weights that overflow: a signal after a skipped step saves the state with that step counted, and what the
// resumed run skips is counted on from there. What is not finite has reached no weight and no average.
void expect_skips_change_nothing(const std::string& optimizer, const std::string& state_dtype) {
    SCOPED_TRACE(optimizer + " " + state_dtype);
    TempFolder folder;
    ASSERT_EQ(run(folder, tiny(folder, "good")).status, 0);
    const std::string model = folder / "good/step_00000020";
    overwrite_tensor(model, "transformer.wte.weight", 1e30f);
    overwrite_tensor(model, "transformer.ln_f.weight", 1e30f);
    const pid_t pid = start(
        folder, {"--model", model, "--train-data", folder / "data_train_*.bin", "--batch-size", "4",
                 "--tokens-per-step", "5760", "--steps", "20", "--optimizer", optimizer, "--state-dtype",
                 state_dtype, "--out", folder / "run", "--lr-adapt", "--virtual-ranks", "2"});
    wait_for(folder / "stdout", "step skipped");
    kill(pid, SIGTERM);
    const Result stopped = finish(folder, pid);
    ASSERT_EQ(stopped.status, 0) << stopped.err;
    EXPECT_EQ(checkpoints(folder / "run"), std::vector<uint64_t>{0});
    const std::string saved = folder / "run/step_00000000/";
    EXPECT_TRUE(read_file(saved + "model.safetensors") == read_file(model + "/model.safetensors"));
    for (const auto& [name, tensor] : safetensors_open(saved + "optimizer_000.safetensors").tensors) {
        const char* bytes = static_cast<const char*>(tensor.data);
        EXPECT_TRUE(std::all_of(bytes, bytes + tensor.bytes, [](char byte) { return byte == 0; })) << name;
    }
    const json adapt = json::parse(read_file(saved + "state.json"))["state"]["lr_adapt"];
    EXPECT_EQ(adapt["steps"], 0);
    for (const char* average : {"fast", "slow"}) {
        EXPECT_FALSE(adapt[average].empty());
        for (const json& value : adapt[average]) EXPECT_EQ(value, 0.0);
    }
    expect_rejected(folder, {"--out", folder / "run", "--resume"},
                    {"10 times in a row", "step_00000000 is untouched"});
    expect_rejected(folder, {"--out", folder / "run", "--resume"}, {"step_00000000 is untouched"});
    uint64_t skipped = 0;
    for (const json& line : log_lines(folder / "run")) {
        if (line["type"] != "skip") continue;
        EXPECT_EQ(line["skipped"], ++skipped);
        EXPECT_EQ(line["step"], 0);
    }
    EXPECT_GE(skipped, 11u);
}

TEST(Program, SkippedStepsAreSavedAndLoggedOnce) {
    expect_skips_change_nothing("adamw", "fp32");
    expect_skips_change_nothing("muon", "bf16");
}

// The rows of validation are the same whatever a batch holds, so one number comes out.
TEST(Program, ValidationIsOneNumberAtAnyBatchSize) {
    TempFolder folder;
    std::vector<uint32_t> tokens(1001);  // ever harder to guess
    std::mt19937 random(11);
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = random() % (1 + i / 10);
    token_file_write(folder / "val.bin", tokens, 2);
    std::vector<double> losses;
    for (const size_t B : {1, 2, 3, 5, 7, 16, 64}) {
        const std::string out = "run" + std::to_string(B);
        const Result result =
            run(folder, tiny_with(folder, out,
                                  {"--batch-size", std::to_string(B), "--tokens-per-step",
                                   std::to_string(24 * B), "--steps", "1", "--warmup", "0", "--val-data",
                                   folder / "val.bin", "--sample-tokens", "0"}));
        ASSERT_EQ(result.status, 0) << result.err;
        const json line = log_lines(folder / out)[1];
        ASSERT_EQ(line["type"], "val");
        EXPECT_EQ(line["targets"], 41 * 24);  // of 1000
        losses.push_back(line["val_loss"]);
        EXPECT_NEAR(losses.back(), losses.front(), 1e-9 * losses.front()) << B;
    }
}

// A training step at rate 0 is a dry run: everything happens, and the weights stay as they are.
TEST(Program, ARateOfZeroMovesNothing) {
    TempFolder folder;
    ASSERT_EQ(run(folder, tiny_with(folder, "run",
                                    {"--lr", "0", "--checkpoint-every", "1", "--keep", "0", "--steps", "3",
                                     "--warmup", "1"}))
                  .status,
              0);
    EXPECT_EQ(read_file(folder / "run/step_00000001/model.safetensors"),
              read_file(folder / "run/step_00000003/model.safetensors"));
}

// What goes to stdout and does not arrive is an error, whatever the command.
TEST(Program, AFullStdoutIsReported) {
    if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
    TempFolder folder;
    ASSERT_EQ(run(folder, tiny(folder, "run")).status, 0);
    std::ofstream(folder / "text.txt") << std::string(1000, 'x');
    for (const Arguments& arguments : {Arguments{"--help"},
                                       {"--version"},
                                       {"generate", "--help"},
                                       {"generate", "--model", folder / "run/step_00000020", "--tokens", "3"},
                                       {"tokenize", "--input", folder / "text.txt", "--out", folder / "text"},
                                       tiny(folder, "other")}) {
        const Result result = finish(folder, start(folder, arguments, RLIM_INFINITY, "/dev/full"));
        EXPECT_EQ(result.status, 1) << arguments[0];
        EXPECT_EQ(result.err, "train_gpt: cannot write to stdout: No space left on device\n");
    }
}

// The table of owners and the total count the same parameters: a padded vocabulary has more rows in memory.
TEST(Program, TheOwnersTableAddsUp) {
    TempFolder folder;
    const Result result =
        run(folder, tiny_with(folder, "run", {"--optimizer", "muon", "--steps", "1", "--warmup", "0"}));
    ASSERT_EQ(result.status, 0) << result.err;
    const auto number = [](std::string cell) {
        std::erase(cell, ',');
        return std::stoul(cell);
    };
    size_t sum = 0, total = 0;
    std::istringstream text(result.out);
    for (std::string line; std::getline(text, line);) {
        std::vector<std::string> cells;
        std::istringstream row(line);
        for (std::string cell; std::getline(row, cell, '|');) cells.push_back(cell);
        if (line.starts_with("| parameters ") && total == 0) total = number(cells[2]);
        if (cells.size() > 6 &&
            (cells[2].find("Muon") != std::string::npos || cells[2].find("AdamW ") != std::string::npos))
            sum += number(cells[5]);
    }
    // wte, wpe, two layers of 12 C^2 + 13 C, the last norm.
    EXPECT_EQ(total, 48u * (101 + 24) + 2 * (12 * 48 * 48 + 13 * 48) + 2 * 48);
    EXPECT_EQ(sum, total);
}

TEST(Program, SlowTwentyKillsWhileSavingLoseNoCheckpoint) {
    TempFolder folder;
    Arguments arguments = tiny(folder, "run", {"--resume"});
    *(std::find(arguments.begin(), arguments.end(), "--steps") + 1) = "100000";
    *(std::find(arguments.begin(), arguments.end(), "--checkpoint-every") + 1) = "1";
    std::mt19937 random(7);
    uint64_t newest = 0;
    for (int i = 0; i < 20; i++) {
        const pid_t pid = start(folder, arguments);
        std::this_thread::sleep_for(milliseconds(400 + random() % 400));
        // The last step that said "checkpoint saved" must still be there after the kill.
        kill(pid, SIGKILL);
        const Result killed = finish(folder, pid);
        ASSERT_EQ(killed.status, -SIGKILL) << killed.err;
        for (size_t at = killed.out.find("| checkpoint saved"); at != std::string::npos;
             at = killed.out.find("| checkpoint saved", at + 1)) {
            newest = std::stoul(killed.out.substr(killed.out.rfind("step ", at) + 5));
        }
        if (newest == 0) continue;
        const Result resumed = run(folder, {"--out", folder / "run", "--resume", "--steps", "4"});
        ASSERT_EQ(resumed.status, 0) << resumed.err;
        const size_t from = resumed.out.find("resuming from");
        ASSERT_NE(from, std::string::npos) << resumed.out;
        EXPECT_GE(std::stoul(resumed.out.substr(resumed.out.find("step_", from) + 5)), newest);
    }
    EXPECT_GT(newest, 0u);
}

TEST(Program, AFileSizeLimitIsReportedAndTheOldCheckpointStays) {
    TempFolder folder;
    Arguments arguments = tiny(folder, "run");
    ASSERT_EQ(run(folder, arguments).status, 0);
    const pid_t pid = start(folder, {"--out", folder / "run", "--resume", "--steps", "21"}, 100000);
    const Result result = finish(folder, pid);
    EXPECT_EQ(result.status, 1);
    EXPECT_NE(result.err.find(folder / "run"), std::string::npos) << result.err;
    EXPECT_EQ(run(folder, {"--out", folder / "run", "--resume", "--steps", "21"}).status, 0);
}

// nlohmann/json#302: where the decimal point is a comma, "0.1" was once read as 0.
TEST(Program, TheLocaleChangesNothing) {
    TempFolder folder;
    ASSERT_EQ(run(folder, tiny(folder, "plain")).status, 0);
    // Debian's `locales` package has the sources; the locale is made here, for this test alone.
    const std::string make = "localedef -i de_DE -f UTF-8 " + (folder / "de_DE.UTF-8") + " 2>/dev/null";
    if (system(make.c_str()) != 0) GTEST_SKIP() << "no locale sources here (Debian package locales)";
    setenv("LOCPATH", folder.path.c_str(), 1);
    setenv("LC_ALL", "de_DE.UTF-8", 1);
    const Result german = run(folder, tiny(folder, "german"));
    unsetenv("LC_ALL");
    unsetenv("LOCPATH");
    ASSERT_EQ(german.status, 0) << german.err;
    EXPECT_EQ(training_lines(folder / "german"), training_lines(folder / "plain"));
    EXPECT_EQ(read_file(folder / "german/main.log"), read_file(folder / "plain/main.log"));
    const Result resumed = run(folder, {"--out", folder / "german", "--resume", "--steps", "21"});
    EXPECT_EQ(resumed.status, 0) << resumed.err;
}

TEST(Program, TwoRunsInOneFolderAreRefused) {
    TempFolder folder;
    Arguments arguments = tiny(folder, "run");
    *(std::find(arguments.begin(), arguments.end(), "--steps") + 1) = "100000";
    const pid_t pid = start(folder, arguments);
    for (int i = 0; i < 200 && !fs::exists(folder / "run/log.jsonl"); i++) {
        std::this_thread::sleep_for(milliseconds(20));
    }
    TempFolder second;
    Arguments other = tiny(second, "x");
    *(std::find(other.begin(), other.end(), "--out") + 1) = folder / "run";
    expect_rejected(second, other, {"--out", "another run"});
    kill(pid, SIGKILL);
    finish(folder, pid);
}

TEST(Program, OddFolderNames) {
    TempFolder folder;
    for (const std::string name :
         {"a.b/c.d", "with space", "%s%n", "quote'\"", "new\nline", "caf\xc3\xa9", "raw\xff"}) {
        EXPECT_EQ(run(folder, tiny(folder, name)).status, 0) << name;
        EXPECT_TRUE(fs::exists(folder / (name + "/step_00000020/state.json"))) << name;
    }
    expect_rejected(folder, tiny(folder, std::string(4500, 'x')), {"--out"});
    std::ofstream(folder / "file") << "x";
    expect_rejected(folder, tiny(folder, "file"), {"--out"});
}

TEST(Program, BadOptionsAreOneLineAndStatus1) {
    TempFolder folder;
    const auto with = [&](const Arguments& changes) {
        Arguments arguments = tiny(folder, "run");
        const auto at = std::find(arguments.begin(), arguments.end(), changes[0]);
        if (at != arguments.end()) arguments.erase(at, at + 2);
        arguments.insert(arguments.end(), changes.begin(), changes.end());
        return arguments;
    };
    expect_rejected(folder, with({"--tokens-per-step", "100"}), {"--tokens-per-step", "100", "96"});
    expect_rejected(folder, with({"--tokens-per-step", "0"}), {"--tokens-per-step", "0"});
    expect_rejected(folder, with({"--tokens-per-step", "-288"}), {"--tokens-per-step", "-288"});
    expect_rejected(folder, with({"--tokens-per-step", "2147483648"}), {"--tokens-per-step", "2147483648"});
    expect_rejected(folder, with({"--batch-size"}), {"--batch-size"});
    expect_rejected(folder, with({"--batch-size", "4x"}), {"--batch-size", "4x"});
    expect_rejected(folder, with({"--batch-size", "1e3"}), {"--batch-size", "1e3"});
    expect_rejected(folder, with({"--steps", "020"}), {"--steps", "020"});
    expect_rejected(folder, with({"--seed", "0x10"}), {"--seed", "0x10"});
    expect_rejected(folder, with({"--batch-size", "0"}), {"--batch-size", "0"});
    expect_rejected(folder, with({"--seq-len", "-1"}), {"--seq-len", "-1"});
    expect_rejected(folder, with({"--lr", "nan"}), {"--lr", "nan"});
    expect_rejected(folder, with({"--lr", "-1e-3"}), {"--lr", "-1e-3"});
    expect_rejected(folder, with({"--heads", "5"}), {"--heads", "5"});
    expect_rejected(folder, with({"--model", "d7"}), {"--model", "d7"});
    expect_rejected(folder, with({"--optimizer", "sgd"}), {"--optimizer", "sgd"});
    expect_rejected(folder, with({"--warmup", "200"}), {"--warmup", "200"});
    expect_rejected(folder, with({"--temperature", "-1"}), {"--temperature", "-1"});
    expect_rejected(folder, with({"--temperature", "nan"}), {"--temperature", "nan"});
    expect_rejected(folder, with({"--top-p", "1.5"}), {"--top-p", "1.5"});
    expect_rejected(folder, with({"--no-such-flag"}), {"--no-such-flag"});
    expect_rejected(folder, with({"-"}), {"-"});
    expect_rejected(folder, with({""}), {});
    expect_rejected(folder, with({"--train-data", folder / "nothing_*.bin"}),
                    {"--train-data", "nothing_*.bin"});
    expect_rejected(folder, with({"--val-data", folder / "nothing_*.bin"}), {"--val-data", "nothing_*.bin"});
    expect_rejected(folder,
                    with({"--optimizer", "muon", "--muon-ns", "polar-express", "--muon-ns-steps", "3"}),
                    {"polar-express", "3"});
    expect_rejected(folder, with({"--optimizer", "muon", "--muon-ns", "keller", "--muon-ns-steps", "2"}),
                    {"keller", "2"});
    expect_rejected(folder, with({"--lr-adapt"}), {"--lr-adapt", "--virtual-ranks 2"});
    expect_rejected(folder, with({"--virtual-ranks", "1", "--lr-adapt"}),
                    {"--lr-adapt", "--virtual-ranks 2"});
    Arguments twice = tiny(folder, "run");
    twice.insert(twice.end(), {"--lr", "1e-3"});
    expect_rejected(folder, twice, {"--lr", "given twice"});
    expect_rejected(folder, Arguments(10000, "x"), {"x", "9999 more"});
    expect_rejected(folder, with({"--model", "no\x1b[2Jsuch\nthing"}),
                    {"--model no\uFFFD[2Jsuch\uFFFDthing"});
    expect_rejected(folder, {}, {"--train-data"});
    expect_rejected(folder, {"--resume", "--train-data", folder / "data_train_*.bin"}, {"--resume", "--out"});
    EXPECT_FALSE(fs::exists(folder / "run")) << "made before all was checked";
}

// What sampling needs is checked before training begins.
TEST(Program, TokenizersMustFitModelAndPrompt) {
    TempFolder folder;
    tokenizer_write(folder / "bytes.json", byte_tokenizer());
    json merges = json::parse(read_file(folder / "bytes.json"));
    merges["model"]["merges"] = {"a b"};
    std::ofstream(folder / "merges.json") << merges;
    const auto with = [&](const std::string& vocabulary, const Arguments& more) {
        Arguments arguments = tiny_with(folder, "run", {"--vocab-size", vocabulary});
        arguments.insert(arguments.end(), more.begin(), more.end());
        return arguments;
    };
    const std::string bytes = folder / "bytes.json", merged = folder / "merges.json";
    expect_rejected(folder, with("300", {"--tokenizer", merged, "--sample-prompt", "hi"}),
                    {"--sample-prompt", "merges.json has merges"});
    expect_rejected(folder, with("300", {"--sample-prompt", "hi"}), {"--sample-prompt", "--tokenizer"});
    // 256 ids have no room for the end of a text, which is the tokenizer's last.
    expect_rejected(folder, with("256", {"--tokenizer", bytes}), {"--tokenizer", "bytes.json", "257", "256"});
    expect_rejected(folder, with("101", {"--tokenizer", bytes, "--sample-prompt", "hi"}), {"257", "101"});
    expect_rejected(folder, with("300", {"--tokenizer", folder / "none.json"}), {"--tokenizer", "none.json"});
    EXPECT_FALSE(fs::exists(folder / "run"));
    ASSERT_EQ(run(folder, with("300", {"--tokenizer", bytes, "--sample-prompt", "hi"})).status, 0);

    const std::string model = folder / "run/step_00000020";
    const auto generate = [&](const Arguments& more) {
        Arguments arguments = {"generate", "--model", model, "--tokens", "2"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        return arguments;
    };
    EXPECT_EQ(run(folder, generate({"--prompt", "hi"})).status, 0);
    EXPECT_EQ(run(folder, generate({"--tokenizer", merged})).status, 0);  // to decode, merges are no matter
    expect_rejected(folder, generate({"--prompt", "hi", "--tokenizer", merged}), {"--prompt", "has merges"});
    expect_rejected(folder, generate({"--tokenizer", folder / "none.json"}), {"--tokenizer", "none.json"});
    ASSERT_EQ(run(folder, tiny(folder, "small")).status, 0);
    expect_rejected(folder, {"generate", "--model", folder / "small/step_00000020", "--tokenizer", bytes},
                    {"--tokenizer", "257", "101"});
    // Sizes that come from a folder are its keys, not options.
    json config = json::parse(read_file(model + "/config.json"));
    config["n_positions"] = 2147483647;
    std::ofstream(model + "/config.json") << config;
    expect_rejected(folder, generate({}), {"config.json", "n_positions 2147483647"});
}

TEST(Program, BadDataAreOneLineAndStatus1) {
    TempFolder folder;
    const auto with_train = [&](const std::string& path) {
        Arguments arguments = tiny(folder, "run");
        *(std::find(arguments.begin(), arguments.end(), "--train-data") + 1) = path;
        return arguments;
    };
    tiny(folder, "run");
    for (const size_t tokens : {0, 1, 32, 96}) {  // one batch of 4 x 24 needs 97
        write_shard(folder / "short.bin", tokens, 101, 1);
        expect_rejected(folder, with_train(folder / "short.bin"), {"short.bin"});
    }
    write_shard(folder / "enough.bin", 97, 101, 1);
    EXPECT_EQ(run(folder, with_train(folder / "enough.bin")).status, 0);
    fs::remove_all(folder / "run");
    write_shard(folder / "large_ids.bin", 1000, 512, 1);
    expect_rejected(folder, with_train(folder / "large_ids.bin"), {"large_ids.bin"});
    std::string bytes = read_file(folder / "data_train_000.bin");
    std::ofstream(folder / "cut.bin", std::ios::binary) << bytes.substr(0, bytes.size() - 1);
    expect_rejected(folder, with_train(folder / "cut.bin"), {"cut.bin"});
    std::ofstream(folder / "header.bin", std::ios::binary) << bytes.substr(0, 1023);
    expect_rejected(folder, with_train(folder / "header.bin"), {"header.bin"});
    bytes[0] = static_cast<char>(bytes[0] + 1);
    std::ofstream(folder / "magic.bin", std::ios::binary) << bytes;
    expect_rejected(folder, with_train(folder / "magic.bin"), {"magic.bin"});
    std::ofstream(folder / "empty.bin", std::ios::binary) << "";
    expect_rejected(folder, with_train(folder / "empty.bin"), {"empty.bin"});
    expect_rejected(folder, with_train(folder.path), {folder.path});
    Arguments small_validation = tiny(folder, "run");
    write_shard(folder / "small_val.bin", 24, 101, 1);  // a row of 24 needs 25
    *(std::find(small_validation.begin(), small_validation.end(), "--val-data") + 1) =
        folder / "small_val.bin";
    expect_rejected(folder, small_validation, {"--val-data", "small_val.bin", "25 tokens"});
    write_shard(folder / "small_val.bin", 25, 101, 1);
    EXPECT_EQ(run(folder, small_validation).status, 0);
}

TEST(Program, TokenizeTrainGenerate) {
    TempFolder folder;
    std::ofstream text(folder / "text.txt");
    // 25 bytes: every phase of the sentence meets every position of a row.
    for (int i = 0; i < 400; i++) text << "the cat sat on the mats. ";
    text.close();
    ASSERT_EQ(run(folder, {"tokenize", "--input", folder / "text.txt", "--out", folder / "cat"}).status, 0);
    const Result trained = run(folder, {"train",
                                        "--train-data",
                                        folder / "cat_train_*.bin",
                                        "--val-data",
                                        folder / "cat_val_*.bin",
                                        "--out",
                                        folder / "run",
                                        "--layers",
                                        "1",
                                        "--heads",
                                        "2",
                                        "--channels",
                                        "32",
                                        "--seq-len",
                                        "32",
                                        "--batch-size",
                                        "8",
                                        "--tokens-per-step",
                                        "256",
                                        "--steps",
                                        "150",
                                        "--lr",
                                        "1e-2",
                                        "--optimizer",
                                        "muon",
                                        "--warmup",
                                        "10",
                                        "--val-every",
                                        "0"});
    ASSERT_EQ(trained.status, 0) << trained.err;
    const std::string model = folder / "run/step_00000150";
    const Arguments generate = {"generate", "--model", model,           "--prompt", "the c",
                                "--tokens", "40",      "--temperature", "0"};
    const Result first = run(folder, generate);
    ASSERT_EQ(first.status, 0) << first.err;
    EXPECT_TRUE(first.out.starts_with("the cat sat on the mats. the cat sat")) << first.out;
    EXPECT_EQ(run(folder, generate).out, first.out);
    const Arguments drawn = {"generate",      "--model", model,    "--tokens", "100",
                             "--temperature", "2",       "--seed", "5"};
    EXPECT_EQ(run(folder, drawn).out, run(folder, drawn).out);
    expect_rejected(folder, {"generate", "--model", folder / "nowhere"}, {"--model", "nowhere"});
    expect_rejected(folder, {"generate", "--model", model, "--temperature", "-1"}, {"--temperature", "-1"});
    expect_rejected(folder, {"tokenize", "--input", folder / "absent.txt", "--out", folder / "x"},
                    {"absent.txt"});
    // Fine-tuning starts from the folder's weights: the first loss is that of the trained model.
    const Result tuned =
        run(folder, {"--train-data", folder / "cat_train_*.bin", "--model", model, "--out", folder / "tuned",
                     "--batch-size", "8", "--tokens-per-step", "256", "--steps", "1"});
    ASSERT_EQ(tuned.status, 0) << tuned.err;
    EXPECT_LT(json::parse(training_lines(folder / "tuned")[0])["loss"], 0.3);
}

TEST(Program, VersionAndHelp) {
    TempFolder folder;
    for (const Arguments& arguments : {Arguments{"--help"},
                                       {"train", "--help"},
                                       {"tokenize", "--help"},
                                       {"generate", "--help"},
                                       {"--version"}}) {
        const Result result = run(folder, arguments);
        EXPECT_EQ(result.status, 0);
        EXPECT_FALSE(result.out.empty());
        EXPECT_TRUE(result.err.empty());
    }
    const std::string version = run(folder, {"--version"}).out;
    EXPECT_TRUE(version.find("GCC 1") != std::string::npos || version.find("lang 1") != std::string::npos)
        << version;
}

// A run under nohup goes on when its terminal is gone.
TEST(Program, NohupIsKept) {
    TempFolder folder;
    signal(SIGHUP, SIG_IGN);
    const pid_t pid = start(folder, tiny_with(folder, "run", {"--steps", "300", "--val-every", "0"}));
    signal(SIGHUP, SIG_DFL);
    wait_for(folder / "run/log.jsonl", "\"step\":1,");
    kill(pid, SIGHUP);
    const Result result = finish(folder, pid);
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(log_lines(folder / "run").back()["type"], "done");
}
