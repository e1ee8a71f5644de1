// What checkpoints need beside data/files.h: checksums, and JSON that nobody vouches for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

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
