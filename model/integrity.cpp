// Checksums and strict JSON; see integrity.h.
#include "model/integrity.h"

#include <cinttypes>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include <xxhash.h>

#include "data/files.h"
#include "kernels/error.h"

namespace {

constexpr int max_json_depth = 64;
constexpr size_t max_message_text = 160;

std::string hex(uint64_t value) {
    char text[17];
    snprintf(text, sizeof(text), "%016" PRIx64, value);
    return text;
}

}  // namespace

FileDigest file_digest(const std::string& path) {
    const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), XXH3_freeState);
    XXH3_64bits_reset(state.get());
    uint64_t total = 0;
    file_read(path, [&](std::string_view piece) {
        XXH3_64bits_update(state.get(), piece.data(), piece.size());
        total += piece.size();
    });
    return {total, hex(XXH3_64bits_digest(state.get()))};
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
