// The program as a user runs it, in a process of its own: what its tests share. Each works in a fresh folder;
// the program is the one beside the test.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "data/token_files.h"
#include "dev/test/temp_folder.h"

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::milliseconds;

inline std::string program() {
    return (fs::read_symlink("/proc/self/exe").parent_path() / "train_gpt").string();
}

struct Result {
    int status = -1;  // exit status, or -signal
    std::string out, err;
};

inline std::string read_file(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

// Starts the program with stdout and stderr into files of `folder`, or into others.
inline pid_t start(const TempFolder& folder, const std::vector<std::string>& arguments,
                   rlim_t file_limit = RLIM_INFINITY, const std::string& stdout_path = "",
                   const std::string& stderr_path = "") {
    fs::remove(folder / "stdout");  // a wait for its text must not see an earlier run's
    const pid_t pid = fork();
    if (pid != 0) return pid;
    setenv("OMP_WAIT_POLICY", "passive", 1);  // on a busy machine, threads that spin take turns with others
    const std::string out_path = stdout_path.empty() ? folder / "stdout" : stdout_path;
    const int out = open(out_path.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0644);
    const std::string err_path = stderr_path.empty() ? folder / "stderr" : stderr_path;
    const int err = open(err_path.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0644);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    if (file_limit != RLIM_INFINITY) {
        const rlimit limit = {file_limit, file_limit};
        setrlimit(RLIMIT_FSIZE, &limit);
    }
    std::vector<std::string> all = {program()};
    all.insert(all.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& argument : all) argv.push_back(argument.data());
    argv.push_back(nullptr);
    execv(argv[0], argv.data());
    _exit(127);
}

inline Result finish(const TempFolder& folder, pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), read_file(folder / "stdout"),
            read_file(folder / "stderr")};
}

inline Result run(const TempFolder& folder, const std::vector<std::string>& arguments) {
    return finish(folder, start(folder, arguments));
}

// Tokens that a model can learn from: a noisy walk over the vocabulary.
inline void write_shard(const std::string& path, size_t count, uint32_t vocab, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<uint32_t> tokens(count);
    for (size_t i = 0; i < count; i++) {
        tokens[i] = i > 0 && random() % 4 != 0 ? (tokens[i - 1] * 5 + 1) % vocab : random() % vocab;
    }
    token_file_write(path, tokens, 2);
}

using Arguments = std::vector<std::string>;

// A model that trains in milliseconds a step, on two shards whose epoch ends inside a step.
inline Arguments tiny(const TempFolder& folder, const std::string& out, const Arguments& more = {}) {
    if (!fs::exists(folder / "data_train_000.bin")) {
        write_shard(folder / "data_train_000.bin", 1500, 101, 1);
        write_shard(folder / "data_train_001.bin", 999, 101, 2);
        write_shard(folder / "data_val_000.bin", 700, 101, 3);
    }
    Arguments arguments = {"--train-data",
                           folder / "data_train_*.bin",
                           "--val-data",
                           folder / "data_val_*.bin",
                           "--out",
                           folder / out,
                           "--layers",
                           "2",
                           "--heads",
                           "3",
                           "--channels",
                           "48",
                           "--seq-len",
                           "24",
                           "--vocab-size",
                           "101",
                           "--batch-size",
                           "4",
                           "--tokens-per-step",
                           "288",
                           "--steps",
                           "20",
                           "--lr",
                           "3e-3",
                           "--warmup",
                           "4",
                           "--val-every",
                           "7",
                           "--sample-tokens",
                           "5",
                           "--checkpoint-every",
                           "0",
                           "--threads",
                           "2"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
}

// The same with other values of some options.
inline Arguments tiny_with(const TempFolder& folder, const std::string& out, const Arguments& changes) {
    Arguments arguments = tiny(folder, out);
    for (size_t i = 0; i < changes.size(); i += 2) {
        const auto at = std::find(arguments.begin(), arguments.end(), changes[i]);
        if (at != arguments.end()) {
            *(at + 1) = changes[i + 1];
        } else {
            arguments.insert(arguments.end(), {changes[i], changes[i + 1]});
        }
    }
    return arguments;
}

inline std::vector<json> log_lines(const std::string& folder) {
    std::vector<json> lines;
    std::ifstream file(folder + "/log.jsonl");
    for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
    return lines;
}

// Steps of the checkpoints in a folder.
inline std::vector<uint64_t> checkpoints(const std::string& folder) {
    std::vector<uint64_t> steps;
    if (!fs::exists(folder)) return steps;
    for (const auto& entry : fs::directory_iterator(folder)) {
        const std::string name = entry.path().filename().string();
        if (name.starts_with("step_")) steps.push_back(std::stoul(name.substr(5)));
    }
    std::sort(steps.begin(), steps.end());
    return steps;
}

// Drops every other checkpoint, as if the process had been killed right after it saved this one.
inline void keep_checkpoint(const std::string& folder, uint64_t step) {
    for (const uint64_t other : checkpoints(folder)) {
        char name[32];
        snprintf(name, sizeof(name), "/step_%08lu", other);
        if (other != step) fs::remove_all(folder + name);
    }
}

// Waits, half a minute at most, until a file holds a text.
inline void wait_for(const std::string& path, const std::string& text) {
    for (int i = 0; i < 1500 && read_file(path).find(text) == std::string::npos; i++)
        std::this_thread::sleep_for(milliseconds(20));
}

// Every file of a folder with its contents and the time of its last change.
using Snapshot = std::map<std::string, std::pair<std::string, fs::file_time_type>>;
inline Snapshot snapshot(const std::string& folder) {
    Snapshot files;
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
        const std::string text = entry.is_regular_file() ? read_file(entry.path()) : "";
        files[entry.path().string()] = {text, entry.last_write_time()};
    }
    return files;
}

// The training lines of a log without the fields that hold times.
inline std::vector<std::string> training_lines(const std::string& folder,
                                               const std::vector<const char*>& also_without = {}) {
    std::vector<std::string> lines;
    for (json object : log_lines(folder)) {
        if (object["type"] != "train" && object["type"] != "val") continue;
        for (const char* time : {"ms", "optimizer_ms", "comm_ms", "tokens_per_second", "mfu", "peak_bytes"})
            object.erase(time);
        for (const char* key : also_without) object.erase(key);
        lines.push_back(object.dump());
    }
    return lines;
}

inline std::string one_line(std::string text) {
    if (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
}

// The program ends with status 1 and one line on stderr that holds each of `words`.
inline void expect_rejected(const TempFolder& folder, const Arguments& arguments,
                            const std::vector<std::string>& words) {
    const auto begin = std::chrono::steady_clock::now();
    const Result result = run(folder, arguments);
    const std::string line = one_line(result.err);
    EXPECT_EQ(result.status, 1) << line;
    EXPECT_FALSE(line.empty());
    EXPECT_EQ(line.find('\n'), std::string::npos) << line;
    for (const std::string& word : words)
        EXPECT_NE(line.find(word), std::string::npos) << word << " in: " << line;
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}
