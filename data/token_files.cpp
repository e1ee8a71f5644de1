// Token shards; the format stands in token_files.h. Nothing in a header is trusted: magic, version, count
// and the size of the file must all agree before a token is read.
#include "data/token_files.h"

#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string_view>

#include "kernels/error.h"

// A 64-bit size holds any file; tokens and header are read as they lie in memory.
static_assert(sizeof(size_t) == 8 && std::endian::native == std::endian::little);

namespace {

using Header = std::array<int32_t, 256>;

struct Format {
    int32_t magic, version;
    int bytes_per_token;
};
constexpr Format formats[] = {{20240520, 1, 2}, {20240801, 7, 4}};

// The files that a pattern names, never none.
std::vector<std::string> match(const std::string& pattern, const std::string& flag) {
    // A name that exists is meant as it stands, even with brackets or stars in it.
    struct stat info;
    if (stat(pattern.c_str(), &info) == 0) return {pattern};

    glob_t found = {};
    const int result = glob(pattern.c_str(), GLOB_NOSORT | GLOB_TILDE, nullptr, &found);
    std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    if (result != 0 || paths.empty()) fail("%s %s: no file matches", flag.c_str(), pattern.c_str());
    std::sort(paths.begin(), paths.end());  // by bytes: glob's own order depends on the locale
    return paths;
}

const Format& find_format(const Header& header, const std::string& name) {
    for (const Format& format : formats) {
        if (header[0] != format.magic) continue;
        if (header[1] == format.version) return format;
        fail("%s: version %d of token files with magic %d is unknown, expected %d", name.c_str(), header[1],
             header[0], format.version);
    }
    for (const Format& format : formats) {
        if (header[0] == static_cast<int32_t>(__builtin_bswap32(static_cast<uint32_t>(format.magic)))) {
            fail("%s: is a big-endian token file (magic %d, reversed); only little-endian is read",
                 name.c_str(), format.magic);
        }
    }
    fail("%s: not a token file: magic is %d, expected %d (uint16) or %d (uint32)", name.c_str(), header[0],
         formats[0].magic, formats[1].magic);
}

TokenFile open_one(const std::string& path, const std::string& flag) {
    const std::string name = flag + " " + path;
    struct stat info;
    if (stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
        fail("%s: is a folder; name the token files in it, such as %s/*.bin", name.c_str(), path.c_str());
    }
    TokenFile file;
    file.flag = flag;
    file.path = path;
    file.mapping = file_map(path, flag);
    const size_t size = file.mapping.bytes;
    Header header;
    if (size < sizeof(header)) {
        fail("%s: %zu bytes, shorter than a token file's header of %zu", name.c_str(), size, sizeof(header));
    }
    memcpy(header.data(), file.mapping.data.get(), sizeof(header));

    const Format& format = find_format(header, name);
    if (header[2] < 0) fail("%s: header says %d tokens", name.c_str(), header[2]);
    file.tokens = static_cast<size_t>(header[2]);
    file.bytes_per_token = format.bytes_per_token;
    file.body = file.mapping.data.get() + sizeof(header);
    const size_t expected = sizeof(header) + file.tokens * static_cast<size_t>(file.bytes_per_token);
    if (size != expected) {
        fail("%s: header says %zu tokens of %d bytes, which is a file of %zu bytes, but it has %zu",
             name.c_str(), file.tokens, file.bytes_per_token, expected, size);
    }
    return file;
}

}  // namespace

uint32_t TokenFile::token(size_t i) const {
    if (bytes_per_token == 2) {
        uint16_t id;
        memcpy(&id, body + i * sizeof(id), sizeof(id));
        return id;
    }
    uint32_t id;
    memcpy(&id, body + i * sizeof(id), sizeof(id));
    return id;
}

std::vector<TokenFile> token_files_open(const std::string& pattern, const std::string& flag) {
    std::vector<TokenFile> files;
    for (const std::string& path : match(pattern, flag)) files.push_back(open_one(path, flag));
    return files;
}

void token_files_close(std::vector<TokenFile>& files) { files.clear(); }

void token_file_write(const std::string& path, std::span<const uint32_t> tokens, int bytes_per_token) {
    if (tokens.size() > INT32_MAX) {
        fail("%s: %zu tokens, but a token file holds at most %d", path.c_str(), tokens.size(), INT32_MAX);
    }
    if (bytes_per_token != 2 && bytes_per_token != 4) {
        fail("%s: %d bytes a token, must be 2 or 4", path.c_str(), bytes_per_token);
    }
    // Ids are `int` everywhere else, so the wide format ends there too: -1 is refused, not wrapped.
    const uint32_t largest = bytes_per_token == 2 ? UINT16_MAX : INT32_MAX;
    for (size_t i = 0; i < tokens.size(); i++) {
        if (tokens[i] > largest) {
            fail("%s: token %zu is id %u, but %d bytes hold ids up to %u", path.c_str(), i, tokens[i],
                 bytes_per_token, largest);
        }
    }

    const Format& format = formats[bytes_per_token == 2 ? 0 : 1];
    const Header header = {format.magic, format.version, static_cast<int32_t>(tokens.size())};
    const std::string_view head(reinterpret_cast<const char*>(header.data()), sizeof(header));
    if (bytes_per_token == 2) {
        const std::vector<uint16_t> narrow(tokens.begin(), tokens.end());
        file_write(path, {head, {reinterpret_cast<const char*>(narrow.data()), narrow.size() * 2}});
    } else {
        file_write(path, {head, {reinterpret_cast<const char*>(tokens.data()), tokens.size() * 4}});
    }
}

void token_file_check(const TokenFile& file, size_t first, size_t count, size_t vocab_size) {
    for (size_t i = first; i < first + count; i++) {
        const uint32_t id = file.token(i);
        if (id >= vocab_size) {
            fail("%s %s: token %zu is id %u, but the vocabulary has %zu ids; was another tokenizer used?",
                 file.flag.c_str(), file.path.c_str(), i, id, vocab_size);
        }
    }
}
