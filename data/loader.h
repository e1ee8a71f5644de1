// The order in which training and validation tokens are read. Nothing here has state that must be saved:
// batch i is a pure function of (files, seed, T, i).
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "data/token_files.h"

// Each shard is cut into windows of T inputs (and one more token, the last target); a tail that is too short
// is left out. An epoch visits the windows of all shards in an order that is one pseudo-random permutation,
// a function of (seed, epoch), and drops the last windows % rows of it, so that every batch is full.
struct Loader {
    std::vector<TokenFile> files;
    std::vector<size_t> first_window;  // of each file; one more at the end: the total
    size_t T = 0;
    size_t rows = 0;  // rows of one batch
    size_t vocab_size = 0;
    uint64_t seed = 0;
};

// Reads from these shards; `source` ("--train-data a*.bin") stands in messages. Fails if they hold fewer than
// `rows` windows, with what is needed (rows*T+1 tokens in one shard), or if a token id is not below
// vocab_size (all tokens are checked here up to 2^27 of them, the rest when a batch reads them).
Loader loader_create(std::vector<TokenFile> files, const std::string& source, size_t rows, size_t T,
                     size_t vocab_size, uint64_t seed);
// Opens the shards of a pattern first.
Loader loader_open(const std::string& pattern, const std::string& flag, size_t rows, size_t T,
                   size_t vocab_size, uint64_t seed);
void loader_close(Loader& loader);

size_t loader_windows(const Loader& loader);
size_t loader_batches_per_epoch(const Loader& loader);

// Batch `index` = 0, 1, ... counted over all epochs: inputs and targets (rows,T), targets one token later.
void loader_batch(const Loader& loader, uint64_t index, int* inputs, int* targets);

// `count` consecutive windows in file order from window `first`: for validation. Fails past the last window.
void loader_windows_in_order(const Loader& loader, size_t first, size_t count, int* inputs, int* targets);

// What a resumed run compares: T, rows, seed, and name (without folder), size and a checksum of every shard;
// of shards over 256 KiB, the checksum of 64 samples.
nlohmann::json loader_fingerprint(const Loader& loader);

// What differs first between two of them, for people: an option, or a file and what of it; "" where nothing
// does.
std::string loader_difference(const nlohmann::json& before, const nlohmann::json& now);

// Element i of the pseudo-random permutation of [0, n) for (seed, epoch): a four-round Feistel network on
// the next power of four, at least 4^5, walked until it lands inside (Black, Rogaway 2002, "Ciphers with
// arbitrary finite domains"). Costs no memory whatever n is. Fails if i is not below n.
uint64_t permuted_index(uint64_t i, uint64_t n, uint64_t seed, uint32_t epoch);
