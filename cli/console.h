// What a run prints: boxed tables at the start, one line a step, and on a terminal a live line in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
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
    bool terminal = false;  // stdout is one: show the live line
    bool live = false;      // a live line is on the screen
};

Console console_open();

// Replaces the live line; nothing where stdout is not a terminal.
void console_live(Console& console, const std::string& text);
// Prints a line (or several) for good.
void console_line(Console& console, const std::string& text);
void console_step(Console& console, const StepReport& report);
