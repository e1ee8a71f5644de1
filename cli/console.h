// What a run prints: boxed tables at the start, one line a step, and on a terminal a live line in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// Rows of cells in a box; the first row is the header. Columns are as wide as their widest cell; cells that
// are a number are aligned right.
std::string boxed_table(const std::vector<std::vector<std::string>>& rows);

// 1234567 -> "1,234,567".
std::string with_commas(uint64_t number);
// Seconds -> "45s", "3m20s", "2h05m", "3d04h".
std::string duration(double seconds);
// Bytes -> "123.4" MiB.
std::string mebibytes(size_t bytes);

struct StepReport {
    uint64_t step, steps;
    double loss, grad_norm, lr;
    double tokens_per_second, mfu;
    double ms, optimizer_ms;
    double eta_seconds;
    const char* optimizer;  // "adamw", "muon"
};

struct Console {
    bool silent = false;    // one of many ranks: rank 0 alone prints
    bool terminal = false;  // stdout is one: show the live line
    bool live = false;      // a live line is on the screen
};

Console console_open();

// Each prints text made fit for a terminal, which need not be valid UTF-8, and fails where stdout cannot take
// it. The first replaces the live line, and does nothing where stdout is not a terminal; the second prints a
// line (or several) for good.
void console_live(Console& console, const std::string& text);
void console_line(Console& console, const std::string& text);
void console_step(Console& console, const StepReport& report);

// Prints bytes as they are, which may be none, and fails, with the reason where it is known, if they or
// anything that was printed before could not be written.
void console_print(std::string_view bytes);
// Prints "train_gpt: text" as one line on stderr, after all of stdout: control characters are made visible,
// the middle of what would fill a screen is left out.
void console_error(const std::string& text);
