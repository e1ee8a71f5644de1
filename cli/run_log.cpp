// See run_log.h.
#include "cli/run_log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "kernels/error.h"

namespace fs = std::filesystem;

namespace {

std::string path_of(const RunLog& log, const char* name) { return log.folder + "/" + name; }

// The step of a line of either file; none for a line that is not whole.
bool line_step(const std::string& line, uint64_t& step) {
    if (line.starts_with("s:")) return sscanf(line.c_str(), "s:%lu ", &step) == 1;
    const nlohmann::json object = nlohmann::json::parse(line, nullptr, false);
    if (!object.is_object() || !object.contains("step") || !object["step"].is_number_unsigned()) return false;
    step = object["step"];
    return true;
}

// Opens a file that holds only what an earlier run wrote up to `step`. The cut copy is renamed into place,
// so that a crash here loses nothing.
FILE* open_cut(const std::string& path, uint64_t step) {
    const std::string cut = path + ".tmp";
    {
        std::ifstream in(path);
        std::ofstream out(cut, std::ios::trunc);
        for (std::string line; step > 0 && std::getline(in, line);) {
            uint64_t at = 0;
            if (line_step(line, at) && at <= step) out << line << '\n';
        }
        out.flush();
        if (!out) fail("%s: cannot write: %s", cut.c_str(), strerror(errno));
    }
    if (rename(cut.c_str(), path.c_str()) != 0) fail("%s: cannot write: %s", path.c_str(), strerror(errno));
    FILE* file = fopen(path.c_str(), "a");
    if (file == nullptr) fail("%s: cannot write: %s", path.c_str(), strerror(errno));
    return file;
}

void flush(FILE* file, const std::string& path) {
    if (fflush(file) != 0 || ferror(file)) fail("%s: cannot write: %s", path.c_str(), strerror(errno));
}

}  // namespace

RunLog run_log_open(const std::string& folder) {
    RunLog log;
    if (folder.empty()) return log;
    std::error_code error;
    fs::create_directories(folder, error);
    std::error_code ignored;
    if (!fs::is_directory(folder, ignored)) {
        fail("--out %s: cannot make this folder: %s", folder.c_str(),
             error ? error.message().c_str() : "a file is in its place");
    }
    log.folder = folder;
    const std::string lock = path_of(log, ".lock");
    log.lock = open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (log.lock < 0) fail("--out %s: cannot write there: %s", folder.c_str(), strerror(errno));
    if (flock(log.lock, LOCK_EX | LOCK_NB) != 0) {
        close(log.lock);
        fail("--out %s: another run is using this folder", folder.c_str());
    }
    return log;
}

void run_log_close(RunLog& log) {
    if (log.jsonl != nullptr) fclose(log.jsonl);
    if (log.main != nullptr) fclose(log.main);
    if (log.lock >= 0) close(log.lock);  // and with it the lock
    log = {};
}

void run_log_start(RunLog& log, uint64_t step) {
    if (log.folder.empty()) return;
    log.jsonl = open_cut(path_of(log, "log.jsonl"), step);
    log.main = open_cut(path_of(log, "main.log"), step);
}

void run_log_write(RunLog& log, const char* type, uint64_t step, const nlohmann::json& fields) {
    if (log.jsonl == nullptr) return;
    nlohmann::ordered_json line = {{"type", type}, {"step", step}};
    for (const auto& [key, value] : fields.items()) line[key] = value;
    // Text that is not UTF-8 (a sample of bytes, a path) must not stop the run.
    const std::string text = line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    fprintf(log.jsonl, "%s\n", text.c_str());
    flush(log.jsonl, path_of(log, "log.jsonl"));
}

void run_log_train_line(RunLog& log, uint64_t step, double loss, double lr, double norm) {
    if (log.main == nullptr) return;
    fprintf(log.main, "s:%lu trl:%.4f lr:%.6e norm:%.2f\n", step, loss, lr, norm);
    flush(log.main, path_of(log, "main.log"));
}

void run_log_validation_line(RunLog& log, uint64_t step, double loss) {
    if (log.main == nullptr) return;
    fprintf(log.main, "s:%lu tel:%.4f\n", step, loss);
    flush(log.main, path_of(log, "main.log"));
}
