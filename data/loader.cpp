// The order of training windows; see loader.h. A shuffled list of windows would cost memory and had to be
// saved or rebuilt on a resume; a pseudo-random permutation that is computed per index costs neither.
#include "data/loader.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "data/tokenizer.h"
#include "kernels/error.h"
#include "kernels/random.h"

namespace {

constexpr size_t tokens_checked_at_open = size_t{1} << 27;

// Windows start every T tokens; each also needs the token after its end, as its last target.
size_t windows_of(const TokenFile& file, size_t T) { return file.tokens == 0 ? 0 : (file.tokens - 1) / T; }

// Inputs and targets (T) of one window, targets one token later.
void read_window(const Loader& loader, size_t window, int* inputs, int* targets) {
    const auto& starts = loader.first_window;
    // The last file that starts at or before the window; files without windows are stepped over.
    const size_t f =
        static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), window) - starts.begin()) - 1;
    const TokenFile& file = loader.files[f];
    const size_t first = (window - starts[f]) * loader.T;
    token_file_check(file, first, loader.T + 1, loader.vocab_size);
    for (size_t t = 0; t < loader.T; t++) {
        inputs[t] = static_cast<int>(file.token(first + t));
        targets[t] = static_cast<int>(file.token(first + t + 1));
    }
}

// FNV-1a (Fowler, Noll, Vo): notices a file that is not the same, not one that was forged.
uint64_t fnv1a(uint64_t hash, const char* data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ static_cast<unsigned char>(data[i])) * 0x100000001B3;
    return hash;
}

// Checksum of 64 blocks of 4 KiB, evenly spaced from the first byte to the last: files up to 256 KiB are
// covered in full, and a thousand shards on a slow disk do not hold up the start.
std::string sampled_checksum(const MappedFile& file) {
    constexpr size_t blocks = 64, block_bytes = 4096;
    uint64_t hash = 0xCBF29CE484222325;
    if (file.bytes <= blocks * block_bytes) {
        hash = fnv1a(hash, file.data.get(), file.bytes);
    } else {
        for (size_t b = 0; b < blocks; b++) {
            const size_t start = (file.bytes - block_bytes) * b / (blocks - 1);
            hash = fnv1a(hash, file.data.get() + start, block_bytes);
        }
    }
    char text[17];
    snprintf(text, sizeof(text), "%016" PRIx64, hash);
    return text;
}

}  // namespace

Loader loader_create(std::vector<TokenFile> files, const std::string& source, size_t rows, size_t T,
                     size_t vocab_size, uint64_t seed) {
    if (rows == 0 || T == 0 || vocab_size == 0) {
        fail("%s: batches of %zu rows of %zu tokens from %zu ids: each must be at least 1", source.c_str(),
             rows, T, vocab_size);
    }
    Loader loader;
    loader.files = std::move(files);
    loader.T = T;
    loader.rows = rows;
    loader.vocab_size = vocab_size;
    loader.seed = seed;
    loader.first_window.push_back(0);
    size_t unchecked = tokens_checked_at_open, tokens = 0;
    for (const TokenFile& file : loader.files) {
        const size_t count = std::min(file.tokens, unchecked);
        token_file_check(file, 0, count, vocab_size);
        unchecked -= count;
        tokens += file.tokens;
        loader.first_window.push_back(loader.first_window.back() + windows_of(file, T));
    }
    if (loader_windows(loader) < rows) {
        fail("%s: %zu tokens give %zu rows of %zu (--seq-len); needs %zu of them: %zu tokens in one file",
             source.c_str(), tokens, loader_windows(loader), T, rows, rows * T + 1);
    }
    return loader;
}

Loader loader_open(const std::string& pattern, const std::string& flag, size_t rows, size_t T,
                   size_t vocab_size, uint64_t seed) {
    return loader_create(token_files_open(pattern, flag), flag + " " + pattern, rows, T, vocab_size, seed);
}

void loader_close(Loader& loader) { token_files_close(loader.files); }

size_t loader_windows(const Loader& loader) { return loader.first_window.back(); }

size_t loader_batches_per_epoch(const Loader& loader) { return loader_windows(loader) / loader.rows; }

void loader_batch(const Loader& loader, uint64_t index, int* inputs, int* targets) {
    const size_t batches = loader_batches_per_epoch(loader);
    const auto epoch = static_cast<uint32_t>(index / batches);
    for (size_t row = 0; row < loader.rows; row++) {
        const uint64_t place = index % batches * loader.rows + row;
        const uint64_t window = permuted_index(place, loader_windows(loader), loader.seed, epoch);
        read_window(loader, window, inputs + row * loader.T, targets + row * loader.T);
    }
}

void loader_windows_in_order(const Loader& loader, size_t first, size_t count, int* inputs, int* targets) {
    const size_t windows = loader_windows(loader);
    if (first > windows || count > windows - first) {
        fail("windows %zu to %zu asked for, but the token files have %zu", first, first + count, windows);
    }
    for (size_t i = 0; i < count; i++) {
        read_window(loader, first + i, inputs + i * loader.T, targets + i * loader.T);
    }
}

nlohmann::json loader_fingerprint(const Loader& loader) {
    nlohmann::json shards = nlohmann::json::array();
    for (const TokenFile& file : loader.files) {
        // The name without its folder: a run may move to another disk together with its data. JSON is UTF-8,
        // file names need not be.
        std::string incomplete;
        const std::string name = printable(std::filesystem::path(file.path).filename().string(), incomplete);
        shards.push_back(
            {{"name", name}, {"bytes", file.mapping.bytes}, {"checksum", sampled_checksum(file.mapping)}});
    }
    return {{"T", loader.T}, {"rows", loader.rows}, {"seed", loader.seed}, {"shards", shards}};
}

std::string loader_difference(const nlohmann::json& before, const nlohmann::json& now) {
    const std::pair<const char*, const char*> options[] = {
        {"T", "--seq-len"}, {"rows", "--batch-size"}, {"seed", "--seed"}};
    for (const auto& [key, option] : options) {
        if (before.at(key) != now.at(key))
            return std::string(option) + " was " + before.at(key).dump() + ", is " + now.at(key).dump();
    }
    const auto &old_shards = before.at("shards"), &shards = now.at("shards");
    for (size_t i = 0; i < std::min(old_shards.size(), shards.size()); i++) {
        if (old_shards[i] == shards[i]) continue;
        const std::string name = shards[i].at("name"), old_name = old_shards[i].at("name");
        if (name != old_name) return name + " stands where " + old_name + " was";
        const bool resized = old_shards[i].at("bytes") != shards[i].at("bytes");
        return name + (resized ? " has another size" : " has other contents");
    }
    if (old_shards.size() == shards.size()) return "";
    return std::to_string(shards.size()) + " files, were " + std::to_string(old_shards.size());
}

uint64_t permuted_index(uint64_t i, uint64_t n, uint64_t seed, uint32_t epoch) {
    if (i >= n) fail("permuted_index: %" PRIu64 " is not below %" PRIu64, i, n);
    // A Feistel network permutes [0, 4^half) whatever its round function is: each round can be undone.
    // Four rounds on fewer than five bits a half mix visibly worse, so tiny n walk a little further.
    int half = 5;
    while (half < 32 && uint64_t{1} << 2 * half < n) half++;
    const uint64_t mask = (uint64_t{1} << half) - 1;
    uint64_t x = i;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 4; round++) {
            const auto bits = random_bits(seed, RandomStream::shuffle, epoch, round << 32 | right);
            left ^= bits[0] & mask;
            std::swap(left, right);
        }
        x = left << half | right;
        // A permutation of the larger domain, followed until it comes back inside, is one of [0, n): the walk
        // along a cycle cannot miss i's own successor, and the domain is less than 4 n, so it is short.
    } while (x >= n);
    return x;
}
