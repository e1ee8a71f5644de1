// The files of a run: OUT/log.jsonl (one JSON object a line, full precision) and OUT/main.log (llm.c's line
// format, so that its plotting tools work).
#pragma once

#include <cstdint>
#include <cstdio>
#include <nlohmann/json_fwd.hpp>
#include <string>

struct RunLog {
    std::string folder;  // "" where nothing is written
    FILE* jsonl = nullptr;
    FILE* main = nullptr;
    int lock = -1;
};

// Locks the folder for this process where an earlier run has been in it: two runs in one folder would ruin
// each other, so the second fails. Writes nothing, and makes no folder. An empty name gives a log that never
// writes.
RunLog run_log_open(const std::string& folder);
void run_log_close(RunLog& log);

// Each makes the folder (and its parents) where it is missing, and locks it if that was not done yet.
// Starts new files:
void run_log_start(RunLog& log);
// Goes on with an earlier run's files, cut back to what it had written when it saved its checkpoint of `step`
// with `skipped` steps skipped so far; the samples of that step stay.
void run_log_resume(RunLog& log, uint64_t step, uint64_t skipped);

// Appends one object {"type": type, "step": step, ...} and flushes it. Fails with path and reason.
void run_log_write(RunLog& log, const char* type, uint64_t step, const nlohmann::json& fields);

// llm.c's lines: "s:12 trl:3.4567 lr:6.000000e-04 norm:1.23" and "s:12 tel:3.4567".
void run_log_train_line(RunLog& log, uint64_t step, double loss, double lr, double norm);
void run_log_validation_line(RunLog& log, uint64_t step, double loss);
