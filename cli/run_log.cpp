// See run_log.h.
#include "cli/run_log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

#include "data/files.h"
#include "kernels/error.h"

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* jsonl_name = "log.jsonl";
constexpr const char* main_name = "main.log";
constexpr const char* lock_name = ".lock";

std::string path_of(const RunLog& log, const char* name) { return log.folder + "/" + name; }

// Whether a line of either file was there, or stays true, when the checkpoint of `step` was saved. Skipped
// steps have the step before them, so their running count tells; a run that starts from the checkpoint writes
// its own configuration, and a finished one that goes on is not done. Lines that are not whole do not stay.
bool stays(std::string_view line, uint64_t step, uint64_t skipped) {
    if (line.starts_with("s:")) return strtoull(line.data() + 2, nullptr, 10) <= step;
    const json object = json::parse(line, nullptr, false);
    if (!object.is_object() || !object.contains("type") || !object.contains("step")) return false;
    const json &type = object["type"], &at = object["step"];
    if (!at.is_number_unsigned() || at > step) return false;
    if (type == "skip") return object.value("skipped", uint64_t{0}) <= skipped;
    if (type == "config") return at < step || step == 0;
    return type != "done" || at < step;
}

std::string cut(std::string_view text, uint64_t step, uint64_t skipped) {
    std::string kept;
    for (size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1)) {
        const std::string_view line = text.substr(0, end + 1);
        if (stays(line, step, skipped)) kept += line;
    }
    return kept;
}

// What stays of a file of an earlier run, none without one.
std::string read_cut(const std::string& path, uint64_t step, uint64_t skipped) {
    return file_exists(path) ? cut(file_map(path, "").text(), step, skipped) : "";
}

// A file with this beginning, to be appended to. It is renamed into place, so that a crash loses nothing.
FILE* open_with(const std::string& path, const std::string& beginning) {
    file_write(path, {beginning});
    FILE* file = fopen(path.c_str(), "a");
    if (file == nullptr) fail("%s: cannot write: %s", path.c_str(), strerror(errno));
    return file;
}

// flock(2): the lock goes with the process, however that ends.
void lock_folder(RunLog& log) {
    if (flock(log.lock, LOCK_EX | LOCK_NB) == 0) return;
    close(log.lock);
    fail("--out %s: another run is using this folder", log.folder.c_str());
}

// Makes the folder with its lock, unless run_log_open found that. A lock that has appeared meanwhile is that
// of a run which started at the same time.
void make_folder(RunLog& log) {
    if (log.lock >= 0) return;
    std::error_code error;
    fs::create_directories(log.folder, error);
    if (error) fail("--out %s: cannot make this folder: %s", log.folder.c_str(), error.message().c_str());
    log.lock = open(path_of(log, lock_name).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (log.lock < 0 && errno == EEXIST)
        fail("--out %s: another run is using this folder", log.folder.c_str());
    if (log.lock < 0) fail("--out %s: cannot write there: %s", log.folder.c_str(), strerror(errno));
    lock_folder(log);
}

// Appends a line; it is on its way to the disk when this returns.
void append_line(FILE* file, const std::string& path, const std::string& line) {
    if (fputs(line.c_str(), file) < 0 || fputc('\n', file) < 0 || fflush(file) != 0)
        fail("%s: cannot write: %s", path.c_str(), strerror(errno));
}

}  // namespace

RunLog run_log_open(const std::string& folder) {
    RunLog log;
    log.folder = folder;
    if (folder.empty()) return log;
    log.lock = open(path_of(log, lock_name).c_str(), O_RDONLY | O_CLOEXEC);
    if (log.lock >= 0) {
        lock_folder(log);
    } else if (errno != ENOENT) {
        fail("--out %s: cannot be used: %s", folder.c_str(), strerror(errno));
    }
    return log;
}

void run_log_close(RunLog& log) {
    if (log.jsonl != nullptr) fclose(log.jsonl);
    if (log.main != nullptr) fclose(log.main);
    if (log.lock >= 0) close(log.lock);  // and with it the lock
    log = {};
}

void run_log_start(RunLog& log) {
    if (log.folder.empty()) return;
    make_folder(log);
    log.jsonl = open_with(path_of(log, jsonl_name), "");
    log.main = open_with(path_of(log, main_name), "");
}

void run_log_resume(RunLog& log, uint64_t step, uint64_t skipped) {
    if (log.folder.empty()) return;
    make_folder(log);
    const std::string jsonl = read_cut(path_of(log, jsonl_name), step, skipped);
    const std::string main = read_cut(path_of(log, main_name), step, skipped);
    log.jsonl = open_with(path_of(log, jsonl_name), jsonl);
    log.main = open_with(path_of(log, main_name), main);
}

void run_log_write(RunLog& log, const char* type, uint64_t step, const json& fields) {
    if (log.jsonl == nullptr) return;
    nlohmann::ordered_json line = {{"type", type}, {"step", step}};
    for (const auto& [key, value] : fields.items()) line[key] = value;
    // Text that is not UTF-8 (a sample of bytes, a path) must not stop the run.
    append_line(log.jsonl, path_of(log, jsonl_name),
                line.dump(-1, ' ', false, json::error_handler_t::replace));
}

void run_log_train_line(RunLog& log, uint64_t step, double loss, double lr, double norm) {
    char line[160];
    snprintf(line, sizeof(line), "s:%lu trl:%.4f lr:%.6e norm:%.2f", step, loss, lr, norm);
    if (log.main != nullptr) append_line(log.main, path_of(log, main_name), line);
}

void run_log_validation_line(RunLog& log, uint64_t step, double loss) {
    char line[64];
    snprintf(line, sizeof(line), "s:%lu tel:%.4f", step, loss);
    if (log.main != nullptr) append_line(log.main, path_of(log, main_name), line);
}
