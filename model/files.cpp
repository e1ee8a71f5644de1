// Writing piece by piece, checksums and strict JSON; see files.h.
#include "model/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "kernels/error.h"

namespace {

constexpr size_t read_bytes = size_t{1} << 20;   // of one read
constexpr size_t write_bytes = size_t{1} << 30;  // of one write: some systems refuse 2^31
constexpr int max_json_depth = 64;
constexpr size_t max_message_text = 160;

[[noreturn]] void fail_errno(const std::string& path, const char* what) {
    fail("%s: cannot %s: %s", path.c_str(), what, strerror(errno));
}

// A system call that a signal interrupts before it did anything has to be made again.
template <typename Call>
auto retry(Call call) {
    auto result = call();
    while (result < 0 && errno == EINTR) result = call();
    return result;
}

// Closes a descriptor at the end of a scope.
struct Descriptor {
    int number;
    ~Descriptor() { close(number); }
};

std::string hex(uint64_t value) {
    char text[17];
    snprintf(text, sizeof(text), "%016" PRIx64, value);
    return text;
}

}  // namespace

bool file_exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

FileWriter::FileWriter(const std::string& name) : path(name) {
    descriptor = retry([&] { return open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666); });
    if (descriptor < 0) fail_errno(path, "create");
}

FileWriter::~FileWriter() {
    if (descriptor < 0) return;
    close(descriptor);
    unlink(path.c_str());
}

void file_append(FileWriter& file, const void* data, size_t bytes) {
    const char* next = static_cast<const char*>(data);
    while (bytes > 0) {  // a write may take less than it is given
        const ssize_t written =
            retry([&] { return write(file.descriptor, next, std::min(bytes, write_bytes)); });
        if (written < 0) fail_errno(file.path, "write");
        next += written;
        bytes -= static_cast<size_t>(written);
    }
}

void file_commit(FileWriter& file) {
    if (retry([&] { return fsync(file.descriptor); }) != 0) fail_errno(file.path, "sync");
    const int descriptor = file.descriptor;
    file.descriptor = -1;
    if (close(descriptor) != 0 && errno != EINTR) fail_errno(file.path, "close");
}

void folder_sync(const std::string& path) {
    const int number = retry([&] { return open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
    if (number < 0) fail_errno(path, "open");
    const Descriptor folder{number};
    // EINVAL: a file system that has no such operation keeps its folders in order by itself.
    if (retry([&] { return fsync(number); }) != 0 && errno != EINVAL) fail_errno(path, "sync");
}

FileDigest file_digest(const std::string& path) {
    // Read, not mapped: a failing disk must give an error, and a mapping would end the process.
    const int number = retry([&] { return open(path.c_str(), O_RDONLY | O_CLOEXEC); });
    if (number < 0) fail_errno(path, "open");
    const Descriptor file{number};
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    std::vector<char> buffer(read_bytes);
    uint64_t total = 0;
    while (true) {
        const ssize_t got = retry([&] { return read(number, buffer.data(), buffer.size()); });
        if (got < 0) fail_errno(path, "read");
        if (got == 0) return {total, hex(XXH3_64bits_digest(&state))};
        XXH3_64bits_update(&state, buffer.data(), static_cast<size_t>(got));
        total += static_cast<uint64_t>(got);
    }
}

std::string checksum(std::string_view bytes) { return hex(XXH3_64bits(bytes.data(), bytes.size())); }

nlohmann::json json_parse(std::string_view text, const std::string& path) {
    using Event = nlohmann::json::parse_event_t;
    if (text.find('\0') != std::string_view::npos) fail("%s: has a zero byte in its JSON", path.c_str());
    // The parser itself would keep the last of duplicate keys. A key at depth d belongs to the object that
    // started at depth d - 1.
    std::vector<std::set<std::string>> keys;
    const auto check = [&](int depth, Event event, nlohmann::json& value) {
        if (depth >= max_json_depth) fail("%s: JSON is nested deeper than %d", path.c_str(), max_json_depth);
        if (event == Event::object_start) {
            keys.resize(static_cast<size_t>(depth));
            keys.emplace_back();
        }
        if (event == Event::key &&
            !keys[static_cast<size_t>(depth) - 1].insert(value.get<std::string>()).second) {
            fail("%s: JSON has the key %s twice", path.c_str(), escaped(value).c_str());
        }
        return true;
    };
    try {
        return nlohmann::json::parse(text, check);
    } catch (const nlohmann::json::exception& error) {
        const std::string reason = error.what();
        fail("%s: not valid JSON: %s", path.c_str(), reason.substr(0, max_message_text).c_str());
    }
}

nlohmann::json json_read(const std::string& path) { return json_parse(file_map(path, "").text(), path); }

std::string escaped(const nlohmann::json& value) {
    const auto replace = nlohmann::json::error_handler_t::replace;  // of bytes that are not UTF-8
    const std::string text = value.dump(-1, ' ', true, replace);
    return text.size() > max_message_text ? text.substr(0, max_message_text) + "..." : text;
}
