// What checkpoints need of files, beside data/files.h: writing a large file piece by piece, checksums, and
// JSON that nobody vouches for.
//
// A file is durable once its bytes, and the entry in its folder, have been synced: file_commit does the
// first, folder_sync the second. Offsets are 64 bits wide throughout. A file over `ulimit -f` is reported as
// "File too large" only where the program ignores SIGXFSZ, which would otherwise end it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "data/files.h"

bool file_exists(const std::string& path);

// A file that is being written from front to back. Where it ends without file_commit, by an error for
// instance, the incomplete file is removed.
struct FileWriter {
    std::string path;
    int descriptor;

    explicit FileWriter(const std::string& path);  // creates the file, or empties the one that is there
    ~FileWriter();
    FileWriter(const FileWriter&) = delete;
    FileWriter& operator=(const FileWriter&) = delete;
};

// Each fails with path and reason: a full disk, a size limit, a failing device.
void file_append(FileWriter& file, const void* data, size_t bytes);
void file_commit(FileWriter& file);  // syncs and closes

// Syncs a folder: what was created, renamed or removed in it stays so. Fails with path and reason.
void folder_sync(const std::string& path);

// Size and checksum of a file's bytes.
struct FileDigest {
    uint64_t bytes;
    std::string xxh3;  // as checksum() gives it
};
FileDigest file_digest(const std::string& path);

// XXH3-64 (Collet, https://github.com/Cyan4973/xxHash) of some bytes as 16 hexadecimal digits: it finds
// damage at the speed of memory; it is no protection against someone who wants to deceive.
std::string checksum(std::string_view bytes);

// Parses JSON strictly: no duplicate keys, nesting of at most 64, nothing after the value. Numbers are read
// and written with '.' in every locale. `path` names the source in the one-line error.
nlohmann::json json_parse(std::string_view text, const std::string& path);
nlohmann::json json_read(const std::string& path);

// A value or text from a file as it may stand in a one-line message: as JSON in ASCII, cut where it is long.
std::string escaped(const nlohmann::json& value);
