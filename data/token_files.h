// Token shards in llm.c's format, memory-mapped: a header of 256 little-endian int32, then the tokens.
// {20240520, 1, n}: n uint16 tokens. {20240801, 7, n}: n uint32 tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/files.h"

struct TokenFile {
    std::string flag, path;  // the option that named it, for messages
    size_t tokens = 0;
    int bytes_per_token = 2;
    const char* body = nullptr;  // the first token, inside the mapping
    MappedFile mapping;

    uint32_t token(size_t i) const;
};

// Opens the file of that name, or else every file that matches the glob pattern, sorted by their bytes;
// `flag` names the option in messages. Fails on no match, a folder, a wrong magic, version or size.
std::vector<TokenFile> token_files_open(const std::string& pattern, const std::string& flag);
void token_files_close(std::vector<TokenFile>& files);

// Writes one shard, synced and renamed into place; width 2 or 4 bytes. Fails on an id that does not fit (the
// largest are 65535 and 2^31-1) or over 2^31-1 tokens.
void token_file_write(const std::string& path, std::span<const uint32_t> tokens, int bytes_per_token);

// Fails, naming flag, file, position and id, if a token of [first, first + count) is not below vocab_size.
void token_file_check(const TokenFile& file, size_t first, size_t count, size_t vocab_size);
