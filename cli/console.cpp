// See console.h.
#include "cli/console.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "data/tokenizer.h"  // printable
#include "kernels/error.h"

namespace {

// Bytes of an error line that are printed from each of its ends, where it is longer than both.
constexpr size_t error_end = 1000;

const std::string clear_line = "\r\033[2K";  // goes to the line's start first

template <typename... Arguments>
std::string format(const char* pattern, Arguments... arguments) {
    char text[512];
    snprintf(text, sizeof(text), pattern, arguments...);
    return text;
}

}  // namespace

std::string boxed_table(const std::vector<std::vector<std::string>>& rows) {
    std::vector<size_t> widths;
    for (const auto& row : rows) {
        widths.resize(std::max(widths.size(), row.size()));
        for (size_t i = 0; i < row.size(); i++) widths[i] = std::max(widths[i], row[i].size());
    }
    std::string rule = "+";
    for (const size_t width : widths) rule += std::string(width + 2, '-') + "+";
    rule += "\n";

    std::string text = rule;
    for (size_t r = 0; r < rows.size(); r++) {
        text += "|";
        for (size_t i = 0; i < widths.size(); i++) {
            const std::string cell = i < rows[r].size() ? rows[r][i] : "";
            const std::string space(widths[i] - cell.size(), ' ');
            const bool number =
                r > 0 && !cell.empty() && cell.find_first_not_of("0123456789,.") == std::string::npos;
            text += " " + (number ? space + cell : cell + space) + " |";
        }
        text += "\n";
        if (r == 0) text += rule;
    }
    return text + rule;
}

std::string with_commas(uint64_t number) {
    std::string text = std::to_string(number);
    for (size_t i = text.size(); i > 3; i -= 3) text.insert(i - 3, ",");
    return text;
}

std::string duration(double seconds) {
    if (!(seconds >= 0) || seconds > 1e9) return "?";
    const long s = static_cast<long>(seconds + 0.5);
    if (s < 60) return format("%lds", s);
    if (s < 3600) return format("%ldm%02lds", s / 60, s % 60);
    if (s < 86400) return format("%ldh%02ldm", s / 3600, s / 60 % 60);
    return format("%ldd%02ldh", s / 86400, s / 3600 % 24);
}

std::string mebibytes(size_t bytes) { return format("%.1f", static_cast<double>(bytes) / 1048576.0); }

Console console_open() { return {.terminal = isatty(STDOUT_FILENO) == 1}; }

void console_live(Console& console, const std::string& text) {
    if (console.silent || !console.terminal) return;
    console_print(clear_line + printable_line(text));
    console.live = true;
}

void console_line(Console& console, const std::string& text) {
    if (console.silent) return;
    std::string incomplete;
    console_print((console.live ? clear_line : "") + printable(text, incomplete) + "\n");
    console.live = false;
}

void console_step(Console& console, const StepReport& r) {
    const int width = static_cast<int>(std::to_string(r.steps).size());
    console_line(console, format("step %*lu/%lu | loss %.4f | norm %.3f | lr %.2e | %s tok/s | MFU %.1f%% | "
                                 "%.1f ms (%s %.1f) | ETA %s",
                                 width, r.step, r.steps, r.loss, r.grad_norm, r.lr,
                                 with_commas(static_cast<uint64_t>(r.tokens_per_second)).c_str(), 100 * r.mfu,
                                 r.ms, r.optimizer, r.optimizer_ms, duration(r.eta_seconds).c_str()));
}

void console_print(std::string_view bytes) {
    if (fwrite(bytes.data(), 1, bytes.size(), stdout) != bytes.size() || fflush(stdout) != 0)
        fail("cannot write to stdout: %s", strerror(errno));
    if (ferror(stdout)) fail("cannot write to stdout");  // an earlier call failed: its reason is lost
}

void console_error(const std::string& text) {
    fflush(stdout);  // may fail: the line below is what there is to say
    std::string line = text;
    if (line.size() > 2 * error_end) line.replace(error_end, line.size() - 2 * error_end, " ... ");
    fprintf(stderr, "train_gpt: %s\n", printable_line(line).c_str());
}
