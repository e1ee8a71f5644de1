// Tests of data/: token shards, the loader's order, tokenizers, `tokenize`, the quickstart text. Token files
// are made and read here byte by byte from the description of the format, not by the code under test.
// Run from the project's root: the quickstart text is read from data/text.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>

#include "data/loader.h"
#include "data/tokenize.h"
#include "data/tokenizer.h"
#include "kernels/error.h"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Ids = std::vector<uint32_t>;

// ---------------------------------------------------------------------------------------------------
// Files

// Each test has an empty folder of its own.
struct Data : testing::Test {
    fs::path folder;

    void SetUp() override {
        std::string name = (fs::temp_directory_path() / "mugpt_test_data_XXXXXX").string();
        ASSERT_NE(mkdtemp(name.data()), nullptr);
        folder = name;
    }
    void TearDown() override { fs::remove_all(folder); }
    std::string path(const std::string& name) const { return (folder / name).string(); }
    std::vector<std::string> names() const {
        std::vector<std::string> result;
        for (const auto& entry : fs::directory_iterator(folder)) result.push_back(entry.path().filename());
        std::sort(result.begin(), result.end());
        return result;
    }
};
using TokenFiles = Data;
using LoaderTest = Data;
using TokenizerTest = Data;
using Tokenize = Data;

void write_bytes(const std::string& path, const std::string& bytes) {
    std::ofstream file(path, std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    ASSERT_TRUE(file.good()) << path;
}

std::string read_bytes(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    EXPECT_TRUE(file.good()) << path;
    return {std::istreambuf_iterator<char>(file), {}};
}

std::string little_endian(uint64_t value, int bytes) {
    std::string result;
    for (int i = 0; i < bytes; i++) result += static_cast<char>(value >> 8 * i & 0xFF);
    return result;
}

std::string header(int32_t magic, int32_t version, int32_t count) {
    std::string bytes = little_endian(static_cast<uint32_t>(magic), 4) +
                        little_endian(static_cast<uint32_t>(version), 4) +
                        little_endian(static_cast<uint32_t>(count), 4);
    bytes.resize(1024, '\0');
    return bytes;
}

std::string body(const Ids& ids, int width) {
    std::string bytes;
    for (const uint32_t id : ids) bytes += little_endian(id, width);
    return bytes;
}

// A whole token file: width 2 is magic 20240520 version 1, width 4 is magic 20240801 version 7.
std::string shard(const Ids& ids, int width = 2) {
    const auto count = static_cast<int32_t>(ids.size());
    return (width == 2 ? header(20240520, 1, count) : header(20240801, 7, count)) + body(ids, width);
}

// Ids first, first + 1, ..., modulo V.
Ids counting(size_t n, size_t V = 503, size_t first = 0) {
    Ids ids(n);
    for (size_t i = 0; i < n; i++) ids[i] = static_cast<uint32_t>((first + i) % V);
    return ids;
}

// The ids of a token file, with its header checked.
Ids read_shard(const std::string& path, int width = 2) {
    const std::string bytes = read_bytes(path);
    const size_t count = (bytes.size() - 1024) / static_cast<size_t>(width);
    Ids ids(count);
    for (size_t i = 0; i < bytes.size() - 1024; i++) {
        const auto w = static_cast<size_t>(width);
        ids[i / w] |= static_cast<uint32_t>(static_cast<unsigned char>(bytes[1024 + i])) << 8 * (i % w);
    }
    EXPECT_EQ(bytes, shard(ids, width)) << path;
    return ids;
}

// Runs f, which must throw Error with one line that holds every part.
void expect_error(const std::function<void()>& f, const std::vector<std::string>& parts) {
    try {
        f();
    } catch (const Error& error) {
        const std::string text = error.what();
        for (const std::string& part : parts) {
            EXPECT_NE(text.find(part), std::string::npos) << '"' << text << "\" lacks \"" << part << '"';
        }
        EXPECT_EQ(text.find('\n'), std::string::npos) << text;
        return;
    }
    ADD_FAILURE() << "nothing failed; expected an Error with: " << (parts.empty() ? "" : parts[0]);
}

// Fails writes past `bytes` for the life of this object, as a full disk does.
struct FileSizeLimit {
    rlimit before;
    explicit FileSizeLimit(rlim_t bytes) {
        signal(SIGXFSZ, SIG_IGN);
        getrlimit(RLIMIT_FSIZE, &before);
        const rlimit limit = {bytes, before.rlim_max};
        setrlimit(RLIMIT_FSIZE, &limit);
    }
    ~FileSizeLimit() { setrlimit(RLIMIT_FSIZE, &before); }
};

// ---------------------------------------------------------------------------------------------------
// Token files

TEST_F(TokenFiles, BothWidthsGiveTheSameTokens) {
    Ids ids = counting(1000);
    ids[17] = 65535;
    write_bytes(path("narrow.bin"), shard(ids, 2));
    write_bytes(path("wide.bin"), shard(ids, 4));
    for (const std::string name : {"narrow.bin", "wide.bin"}) {
        auto files = token_files_open(path(name), "--train-data");
        ASSERT_EQ(files.size(), 1u);
        ASSERT_EQ(files[0].tokens, ids.size());
        EXPECT_EQ(files[0].path, path(name));
        for (size_t i = 0; i < ids.size(); i++) ASSERT_EQ(files[0].token(i), ids[i]) << name << " " << i;
        token_files_close(files);
        EXPECT_TRUE(files.empty());
    }
}

TEST_F(TokenFiles, RejectsEverythingElse) {
    const Ids ids = counting(1000);
    const std::string good = shard(ids), tokens = good.substr(1024);
    std::string big_endian = good;
    for (size_t i = 0; i < 1024; i += 4) std::reverse(&big_endian[i], &big_endian[i] + 4);
    for (size_t i = 1024; i < good.size(); i += 2) std::swap(big_endian[i], big_endian[i + 1]);

    const std::map<std::string, std::pair<std::string, std::vector<std::string>>> cases = {
        {"magic", {header(20240521, 1, 1000) + tokens, {"magic", "20240521", "20240520"}}},
        {"version", {header(20240520, 2, 1000) + tokens, {"version 2", "20240520"}}},
        {"wide_header_narrow_body",
         {header(20240801, 7, 1000) + tokens, {"1000 tokens of 4", "5024", "3024"}}},
        {"narrow_header_wide_body",
         {header(20240520, 1, 1000) + body(ids, 4), {"tokens of 2", "3024", "5024"}}},
        {"wide_version_1", {header(20240801, 1, 1000) + body(ids, 4), {"version 1", "20240801"}}},
        {"one_too_many", {header(20240520, 1, 1001) + tokens, {"1001", "3026", "3024"}}},
        {"one_too_few", {header(20240520, 1, 999) + tokens, {"999", "3022", "3024"}}},
        {"odd_byte", {good + "x", {"3024", "3025"}}},
        {"cut_header", {good.substr(0, 1023), {"1023 bytes", "header", "1024"}}},
        {"empty", {"", {"0 bytes", "header"}}},
        {"big_endian", {big_endian, {"big-endian"}}},
        {"negative", {header(20240520, 1, -1) + tokens, {"-1"}}},
        {"huge", {header(20240520, 1, INT32_MAX) + tokens, {"2147483647", "3024"}}},
        {"text", {std::string(2000, 'a'), {"not a token file"}}},
    };
    for (const auto& [name, content] : cases) {
        const std::string file = path(name);
        write_bytes(file, content.first);
        std::vector<std::string> parts = content.second;
        parts.push_back("--val-data " + file);
        expect_error([&] { token_files_open(file, "--val-data"); }, parts);
    }
    expect_error([&] { token_files_open(folder, "--train-data"); },
                 {"--train-data " + folder.string(), "folder", "*.bin"});
    expect_error([&] { token_files_open(path("none_*.bin"), "--train-data"); },
                 {"--train-data " + path("none_*.bin"), "no file matches"});
    expect_error([&] { token_files_open("", "--train-data"); }, {"--train-data", "no file matches"});
    // A folder or pipe among the files: refused, not passed over, and without waiting for a writer.
    fs::create_directory(path("mix_b.bin"));
    expect_error([&] { token_files_open(path("mix_*.bin"), "--train-data"); }, {path("mix_b.bin"), "folder"});
    ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
    expect_error([&] { token_files_open(path("pipe"), "--train-data"); }, {path("pipe"), "regular"});
}

TEST_F(TokenFiles, PatternsAreSortedAndNamesAreTakenAsTheyStand) {
    for (const std::string name :
         {"a_10.bin", "a_02.bin", "a_1.bin", "B_1.bin", "a_1.txt", "x[1].bin", "x1.bin"}) {
        write_bytes(path(name), shard(counting(5)));
    }
    const auto opened = [&](const std::string& pattern) {
        std::vector<std::string> result;
        for (const TokenFile& file : token_files_open(path(pattern), "--train-data")) {
            result.push_back(fs::path(file.path).filename());
        }
        return result;
    };
    EXPECT_EQ(opened("*_*.bin"), (std::vector<std::string>{"B_1.bin", "a_02.bin", "a_1.bin", "a_10.bin"}));
    EXPECT_EQ(opened("x[1].bin"), (std::vector<std::string>{"x[1].bin"}));
    EXPECT_EQ(opened("x[12].bin"), (std::vector<std::string>{"x1.bin"}));
}

TEST_F(TokenFiles, WritesTheFormatByteByByte) {
    const Ids narrow = {0, 1, 256, 65535}, wide = {0, 65535, 65536, 70000, INT32_MAX};
    token_file_write(path("narrow.bin"), narrow, 2);
    token_file_write(path("wide.bin"), wide, 4);
    token_file_write(path("none.bin"), {}, 2);
    EXPECT_EQ(read_bytes(path("narrow.bin")), shard(narrow, 2));
    EXPECT_EQ(read_bytes(path("wide.bin")), shard(wide, 4));
    EXPECT_EQ(read_bytes(path("none.bin")), shard({}, 2));
    EXPECT_EQ(names(), (std::vector<std::string>{"narrow.bin", "none.bin", "wide.bin"}));
}

TEST_F(TokenFiles, WriterRefusesWhatDoesNotFit) {
    const std::string out = path("x.bin");
    for (const uint32_t id : {65536u, 70000u, static_cast<uint32_t>(-1)}) {
        expect_error(
            [&] {
                token_file_write(out, Ids{0, id}, 2);
            },
            {out, "token 1", std::to_string(id), "65535"});
    }
    for (const uint32_t id : {2147483648u, static_cast<uint32_t>(-1)}) {
        expect_error([&] { token_file_write(out, Ids{id}, 4); }, {out, "token 0", std::to_string(id)});
    }
    expect_error([&] { token_file_write(out, Ids{1}, 3); }, {out, "3 bytes"});
    // 2^31 tokens that take no memory: pages are never touched, as the count is refused first.
    const size_t count = size_t{1} << 31;
    void* pages = mmap(nullptr, count * 4, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(pages, MAP_FAILED);
    const std::span<const uint32_t> many(static_cast<const uint32_t*>(pages), count);
    expect_error([&] { token_file_write(out, many, 4); }, {out, "2147483648 tokens", "2147483647"});
    munmap(pages, count * 4);
    EXPECT_TRUE(names().empty());
}

TEST_F(TokenFiles, AFailedWriteLeavesTheOldFile) {
    token_file_write(path("x.bin"), counting(10), 2);
    {
        const FileSizeLimit limit(4096);
        expect_error([&] { token_file_write(path("x.bin"), counting(5000), 2); },
                     {path("x.bin"), "too large"});
    }
    EXPECT_EQ(read_bytes(path("x.bin")), shard(counting(10)));
    EXPECT_EQ(names(), std::vector<std::string>{"x.bin"});
    expect_error([&] { token_file_write(path("no/x.bin"), counting(5), 2); },
                 {path("no/x.bin"), "No such file"});
    expect_error([&] { token_file_write(folder, counting(5), 2); }, {folder.string(), "directory"});
}

// Past 2 and past 4 GiB, in files that are all hole but for the ends.
TEST_F(TokenFiles, HugeFiles) {
    const size_t count = 1'200'000'000;
    for (const int width : {2, 4}) {
        const std::string name = path("sparse.bin");
        write_bytes(name,
                    width == 2 ? header(20240520, 1, 1'200'000'000) : header(20240801, 7, 1'200'000'000));
        const size_t size = 1024 + count * static_cast<size_t>(width);
        ASSERT_EQ(truncate(name.c_str(), static_cast<off_t>(size)), 0);
        const int file = open(name.c_str(), O_WRONLY);
        const std::string end = little_endian(123, width) + little_endian(502, width);
        ASSERT_EQ(pwrite(file, end.data(), end.size(), static_cast<off_t>(size - end.size())),
                  static_cast<ssize_t>(end.size()));
        close(file);
        const auto files = token_files_open(name, "--train-data");
        ASSERT_EQ(files[0].tokens, count);
        EXPECT_EQ(files[0].token(count - 3), 0u);
        EXPECT_EQ(files[0].token(count - 2), 123u);
        EXPECT_EQ(files[0].token(count - 1), 502u);
        fs::remove(name);
    }
}

// ---------------------------------------------------------------------------------------------------
// The permutation

TEST(Permutation, EveryIndexOnceForEverySmallN) {
    for (uint64_t n = 1; n <= 300; n++) {
        for (uint32_t epoch = 0; epoch < 2; epoch++) {
            std::vector<bool> seen(n);
            for (uint64_t i = 0; i < n; i++) {
                const uint64_t x = permuted_index(i, n, 42, epoch);
                ASSERT_LT(x, n);
                ASSERT_FALSE(seen[x]) << "n " << n << " i " << i;
                seen[x] = true;
            }
        }
    }
    expect_error([] { permuted_index(5, 5, 1, 0); }, {"5"});
    expect_error([] { permuted_index(0, 0, 1, 0); }, {"0"});
}

TEST(Permutation, LargeNIsOneToOneToo) {
    for (const uint64_t n : {uint64_t{1025}, uint64_t{4096}, uint64_t{99'991}, uint64_t{262'145}}) {
        std::vector<bool> seen(n);
        for (uint64_t i = 0; i < n; i++) {
            const uint64_t x = permuted_index(i, n, 7, 3);
            ASSERT_LT(x, n);
            ASSERT_FALSE(seen[x]);
            seen[x] = true;
        }
    }
    // Too many to visit: 20,000 neighbours at either end must land apart.
    for (const uint64_t n : {(uint64_t{1} << 32) + 1, uint64_t{1} << 40, UINT64_MAX}) {
        std::set<uint64_t> seen;
        for (uint64_t i = 0; i < 20'000; i++) {
            for (const uint64_t place : {i, n - 1 - i}) {
                const uint64_t x = permuted_index(place, n, 7, 3);
                ASSERT_LT(x, n);
                ASSERT_TRUE(seen.insert(x).second) << n;
            }
        }
    }
}

// Pearson's chi-square: (seen - expected)^2 / expected, summed; its mean is the degrees of freedom, its
// variance twice that. Here as the distance from the mean in standard deviations.
double chi_square_deviation(const std::vector<double>& seen, double expected, double freedom) {
    double sum = 0;
    for (const double count : seen) sum += (count - expected) * (count - expected) / expected;
    return (sum - freedom) / std::sqrt(2 * freedom);
}

TEST(Permutation, SmallOnesLookRandomOverEpochs) {
    for (const size_t n : {5, 10, 17, 64}) {
        const size_t epochs = 2000;
        std::vector<double> where(n * n), next(n * n);
        for (uint32_t epoch = 0; epoch < epochs; epoch++) {
            size_t before = n;
            for (size_t i = 0; i < n; i++) {
                const size_t x = permuted_index(i, n, 1234, epoch);
                where[i * n + x]++;  // element x at place i
                if (before < n && x != before) next[before * (n - 1) + (x > before ? x - 1 : x)]++;
                before = x;
            }
        }
        next.resize(n * (n - 1));
        const double N = static_cast<double>(n);
        EXPECT_LT(std::fabs(chi_square_deviation(where, epochs / N, (N - 1) * (N - 1))), 4) << n;
        EXPECT_LT(std::fabs(chi_square_deviation(next, epochs / N, N * (N - 1))), 4) << n;
    }
}

TEST(Permutation, LargeOnesLookRandom) {
    const uint64_t n = 300'000;
    const size_t cells = 30;
    std::vector<double> blocks(cells * cells), steps(cells);
    double displacement = 0;
    uint64_t before = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t x = permuted_index(i, n, 99, 0);
        blocks[i * cells / n * cells + x * cells / n]++;
        displacement += std::fabs(static_cast<double>(x) - static_cast<double>(i));
        if (i > 0) steps[(x + n - before) % n * cells / n]++;
        before = x;
    }
    const double N = static_cast<double>(n), C = static_cast<double>(cells);
    EXPECT_LT(std::fabs(chi_square_deviation(blocks, N / (C * C), (C - 1) * (C - 1))), 4);
    EXPECT_LT(std::fabs(chi_square_deviation(steps, N / C, C - 1)), 4);
    // Two independent uniform places are n/3 apart on average, with a standard deviation of n / sqrt(18).
    EXPECT_NEAR(displacement / N, N / 3, 4 * N / std::sqrt(18.0 * N));
}

TEST(Permutation, SeedsAndEpochsDiffer) {
    const uint64_t n = 1000;
    const auto fixed_points = [&](uint64_t seed, uint32_t epoch) {
        size_t same = 0;
        for (uint64_t i = 0; i < n; i++)
            same += permuted_index(i, n, seed, epoch) == permuted_index(i, n, 1, 0);
        return same;
    };
    EXPECT_EQ(fixed_points(1, 0), n);
    // Two independent permutations agree at one place on average (Poisson).
    for (const auto& [seed, epoch] :
         {std::pair<uint64_t, uint32_t>{1, 1}, {2, 0}, {uint64_t{1} << 32 | 1, 0}}) {
        EXPECT_LT(fixed_points(seed, epoch), 8u) << seed << " " << epoch;
    }
}

// ---------------------------------------------------------------------------------------------------
// The loader

struct Batch {
    std::vector<int> inputs, targets;
    bool operator==(const Batch&) const = default;
};

Batch batch_of(const Loader& loader, uint64_t index) {
    Batch batch = {std::vector<int>(loader.rows * loader.T, -1),
                   std::vector<int>(loader.rows * loader.T, -1)};
    loader_batch(loader, index, batch.inputs.data(), batch.targets.data());
    return batch;
}

Batch windows_of(const Loader& loader, size_t first, size_t count) {
    Batch batch = {std::vector<int>(count * loader.T, -1), std::vector<int>(count * loader.T, -1)};
    loader_windows_in_order(loader, first, count, batch.inputs.data(), batch.targets.data());
    return batch;
}

// The first input of each row of one epoch.
std::vector<int> epoch_order(const Loader& loader, uint64_t epoch) {
    std::vector<int> order;
    const size_t batches = loader_batches_per_epoch(loader);
    for (size_t b = 0; b < batches; b++) {
        const Batch batch = batch_of(loader, epoch * batches + b);
        for (size_t row = 0; row < loader.rows; row++) order.push_back(batch.inputs[row * loader.T]);
    }
    return order;
}

std::vector<int> sorted(std::vector<int> values) {
    std::sort(values.begin(), values.end());
    return values;
}

TEST_F(LoaderTest, TooLittleDataIsRefused) {
    for (const size_t count : {0, 1, 32}) {
        const std::string name = path("short_" + std::to_string(count) + ".bin");
        write_bytes(name, shard(counting(count)));
        expect_error([&] { loader_open(name, "--val-data", 4, 8, 503, 1); },
                     {"--val-data " + name, std::to_string(count) + " tokens", "33 tokens", "needs 4"});
    }
    write_bytes(path("enough.bin"), shard(counting(33)));
    const Loader loader = loader_open(path("enough.bin"), "--train-data", 4, 8, 503, 1);
    EXPECT_EQ(loader_batches_per_epoch(loader), 1u);
    for (uint64_t index = 0; index < 5; index++) {
        const Batch batch = batch_of(loader, index);
        for (size_t i = 0; i < 32; i++) EXPECT_EQ(batch.targets[i], batch.inputs[i] + 1);
        std::vector<int> all(32);
        std::iota(all.begin(), all.end(), 0);
        EXPECT_EQ(sorted(batch.inputs), all);
    }
    const auto open = [&](size_t rows, size_t T, size_t vocab_size) {
        loader_open(path("enough.bin"), "--train-data", rows, T, vocab_size, 1);
    };
    expect_error([&] { open(0, 8, 503); }, {"--train-data", "0 rows"});
    expect_error([&] { open(4, 0, 503); }, {"--train-data", "0 tokens"});
    expect_error([&] { open(4, 8, 0); }, {"--train-data", "0 ids"});
}

TEST_F(LoaderTest, IdsOutsideTheVocabularyAreRefused) {
    const std::string name = path("ids.bin");
    for (const int width : {2, 4}) {
        // An input in the middle; the last target of the last window (T 8: token 29,992); the unused tail.
        for (const size_t position : {20'000, 29'992, 29'999}) {
            for (const uint32_t id : {502u, 503u, 511u, 512u, 65535u}) {
                Ids ids = counting(30'000);
                ids[position] = id;
                write_bytes(name, shard(ids, width));
                const auto open = [&] { return loader_open(name, "--train-data", 4, 8, 503, 1); };
                if (id == 502) {
                    EXPECT_NO_THROW(open());
                } else {
                    expect_error(open, {"--train-data " + name, "token " + std::to_string(position),
                                        "id " + std::to_string(id), "503"});
                }
            }
        }
    }
}

// Past the tokens that are checked when a file is opened, the ones of a window are checked as it is read.
TEST_F(LoaderTest, LastWindowOfAHugeShard) {
    const std::string name = path("sparse.bin");
    const size_t count = 1'200'000'000, T = 1024, windows = (count - 1) / T, first = (windows - 1) * T;
    write_bytes(name, header(20240520, 1, static_cast<int32_t>(count)));
    ASSERT_EQ(truncate(name.c_str(), static_cast<off_t>(1024 + 2 * count)), 0);
    const int file = open(name.c_str(), O_WRONLY);
    const auto put = [&](const Ids& ids, size_t position) {
        const std::string bytes = body(ids, 2);
        const auto offset = static_cast<off_t>(1024 + 2 * position);
        ASSERT_EQ(pwrite(file, bytes.data(), bytes.size(), offset), static_cast<ssize_t>(bytes.size()));
    };
    put(counting(T + 1, 503, 5), first);
    {
        const Loader loader = loader_open(name, "--train-data", 4, T, 503, 1);
        ASSERT_EQ(loader_windows(loader), windows);
        const Batch batch = windows_of(loader, windows - 1, 1);
        for (size_t t = 0; t < T; t++) {
            ASSERT_EQ(batch.inputs[t], static_cast<int>((5 + t) % 503));
            ASSERT_EQ(batch.targets[t], static_cast<int>((6 + t) % 503));
        }
    }
    put({503}, first + T);
    const Loader loader = loader_open(name, "--train-data", 4, T, 503, 1);
    expect_error([&] { windows_of(loader, windows - 1, 1); },
                 {name, "token " + std::to_string(first + T), "id 503"});
    EXPECT_NO_THROW(windows_of(loader, windows - 2, 1));
    close(file);
}

TEST_F(LoaderTest, BatchesOfAnEpoch) {
    write_bytes(path("a.bin"), shard(counting(100)));
    write_bytes(path("b.bin"), shard(counting(130)));
    write_bytes(path("c65.bin"), shard(counting(65)));
    write_bytes(path("d64.bin"), shard(counting(64)));
    const size_t rows = 2 * 4, T = 8;
    const auto batches = [&](const std::string& pattern) {
        return loader_batches_per_epoch(loader_open(path(pattern), "--train-data", rows, T, 503, 1));
    };
    EXPECT_EQ(batches("a.bin"), 1u);
    EXPECT_EQ(batches("c65.bin"), 1u);
    EXPECT_EQ(batches("[ab].bin"), 3u);
    expect_error([&] { batches("d64.bin"); }, {"64 tokens", "7 rows", "65 tokens"});
}

TEST_F(LoaderTest, EveryWindowOnceAnEpochInANewOrder) {
    write_bytes(path("a.bin"), shard(counting(1025, 65536, 0)));
    write_bytes(path("b.bin"), shard(counting(1025, 65536, 1025), 4));
    const auto open = [&](size_t rows, uint64_t seed) {
        return loader_open(path("*.bin"), "--train-data", rows, 16, 2050, seed);
    };
    const Loader loader = open(8, 42);
    std::vector<int> starts;
    for (int w = 0; w < 64; w++) starts.insert(starts.end(), {w * 16, 1025 + w * 16});
    const auto first = epoch_order(loader, 0), second = epoch_order(loader, 1);
    EXPECT_EQ(sorted(first), sorted(starts));
    EXPECT_EQ(sorted(second), sorted(starts));
    EXPECT_NE(first, second);
    EXPECT_NE(first, sorted(starts));
    EXPECT_EQ(epoch_order(open(8, 42), 0), first);
    EXPECT_NE(epoch_order(open(8, 43), 0), first);
    // The order of windows does not depend on how many make a batch.
    EXPECT_EQ(epoch_order(open(4, 42), 0), first);
    // A row is 16 tokens in sequence, targets one later: no row reaches from one file into the other.
    for (uint64_t index = 0; index < 32; index++) {
        const Batch batch = batch_of(loader, index);
        for (size_t i = 0; i < batch.inputs.size(); i++) {
            ASSERT_EQ(batch.inputs[i], batch.inputs[i / 16 * 16] + static_cast<int>(i % 16));
            ASSERT_EQ(batch.targets[i], batch.inputs[i] + 1);
        }
        EXPECT_EQ(batch_of(loader, index), batch);
    }
}

TEST_F(LoaderTest, TheRestOfAnEpochIsDroppedButNotAlwaysTheSame) {
    write_bytes(path("a.bin"), shard(counting(13 * 8 + 1)));
    const Loader loader = loader_open(path("a.bin"), "--train-data", 4, 8, 503, 1);
    ASSERT_EQ(loader_windows(loader), 13u);
    ASSERT_EQ(loader_batches_per_epoch(loader), 3u);
    std::set<int> seen;
    for (uint64_t epoch = 0; epoch < 30; epoch++) {
        const auto order = epoch_order(loader, epoch);
        const std::set<int> unique(order.begin(), order.end());
        EXPECT_EQ(unique.size(), 12u);
        seen.insert(unique.begin(), unique.end());
    }
    EXPECT_EQ(seen.size(), 13u);
}

TEST_F(LoaderTest, ValidationInFileOrder) {
    write_bytes(path("a.bin"), shard(counting(20, 65536, 0)));    // 2 windows of 8
    write_bytes(path("b.bin"), shard(counting(8, 65536, 100)));   // none: its last target is missing
    write_bytes(path("c.bin"), shard(counting(25, 65536, 200)));  // 3
    const Loader loader = loader_open(path("*.bin"), "--val-data", 1, 8, 1000, 1);
    ASSERT_EQ(loader_windows(loader), 5u);
    const int starts[] = {0, 8, 200, 208, 216};
    for (size_t first = 0; first <= 5; first++) {
        for (size_t count = 0; first + count <= 5; count++) {
            const Batch batch = windows_of(loader, first, count);
            for (size_t i = 0; i < count * 8; i++) {
                ASSERT_EQ(batch.inputs[i], starts[first + i / 8] + static_cast<int>(i % 8));
                ASSERT_EQ(batch.targets[i], batch.inputs[i] + 1);
            }
        }
    }
    expect_error([&] { windows_of(loader, 4, 2); }, {"6", "5"});
    expect_error([&] { windows_of(loader, 6, 0); }, {"6", "5"});
}

TEST_F(LoaderTest, FingerprintNoticesChangedData) {
    const auto make = [&](const std::string& sub) {
        fs::create_directory(path(sub));
        for (int f = 0; f < 3; f++) {
            write_bytes(path(sub + "/s" + std::to_string(f) + ".bin"), shard(counting(1000, 503, 10 * f)));
        }
        return sub;
    };
    const auto fingerprint = [&](const std::string& sub, size_t rows = 4, size_t T = 8, uint64_t seed = 1) {
        return loader_fingerprint(loader_open(path(sub + "/*.bin"), "--train-data", rows, T, 503, seed));
    };
    const json original = fingerprint(make("original"));
    EXPECT_EQ(fingerprint("original"), original);
    EXPECT_EQ(fingerprint(make("moved")), original) << "another folder is no other data";
    EXPECT_EQ(json::parse(original.dump()), original);

    fs::rename(path(make("renamed") + "/s1.bin"), path("renamed/s1a.bin"));  // sorts where it did
    write_bytes(path(make("added") + "/a.bin"), shard(counting(1000)));
    write_bytes(path(make("shortened") + "/s1.bin"), shard(counting(500, 503, 10)));
    Ids ids = counting(1000, 503, 10);
    ids[500] ^= 1;
    write_bytes(path(make("edited") + "/s1.bin"), shard(ids));
    for (const std::string sub : {"renamed", "added", "shortened", "edited"}) {
        EXPECT_NE(fingerprint(sub), original) << sub;
    }
    // What differs is said in the words of the command line.
    EXPECT_EQ(loader_difference(original, original), "");
    const std::pair<json, const char*> differences[] = {
        {fingerprint("renamed"), "s1a.bin stands where s1.bin was"},
        {fingerprint("added"), "a.bin stands where s0.bin was"},
        {fingerprint("shortened"), "s1.bin has another size"},
        {fingerprint("edited"), "s1.bin has other contents"},
        {fingerprint("original", 8, 8), "--batch-size was 4, is 8"},
        {fingerprint("original", 4, 4), "--seq-len was 8, is 4"},
        {fingerprint("original", 4, 8, 2), "--seed was 1, is 2"},
    };
    for (const auto& [changed, text] : differences) EXPECT_EQ(loader_difference(original, changed), text);
    fs::remove(path("added/a.bin"));
    write_bytes(path("added/t.bin"), shard(counting(1000)));
    EXPECT_EQ(loader_difference(original, fingerprint("added")), "4 files, were 3");
    EXPECT_NE(fingerprint("original", 8, 8), original);
    EXPECT_NE(fingerprint("original", 4, 4), original);
    EXPECT_NE(fingerprint("original", 8, 4), original);  // the same tokens a batch
    EXPECT_NE(fingerprint("original", 4, 8, 2), original);

    // A large shard is sampled: another first or last token is seen, and so is another text.
    fs::create_directory(path("large"));
    const Ids large = counting(1'000'000);
    write_bytes(path("large/s.bin"), shard(large));
    const json before = fingerprint("large");
    std::vector<Ids> changes = {large, large, counting(1'000'000, 503, 1)};
    changes[0].front() ^= 1;
    changes[1].back() ^= 1;
    for (const Ids& changed : changes) {
        write_bytes(path("large/s.bin"), shard(changed));
        EXPECT_NE(fingerprint("large"), before);
    }
    // A name that is not UTF-8 still gives JSON that can be written.
    fs::create_directory(path("bytes"));
    write_bytes(path("bytes/\xFF.bin"), shard(counting(1000)));
    EXPECT_NO_THROW(fingerprint("bytes").dump());
}

// ---------------------------------------------------------------------------------------------------
// Tokenizers

std::string random_text(size_t size, unsigned seed) {
    std::mt19937 random(seed);
    std::string text(size, '\0');
    for (char& c : text) c = static_cast<char>(random());
    return text;
}

const std::string awkward_text = std::string("a\0b\0\0", 5) + "\r\n\t <|endoftext|>  " + "\xFF" +
                                 "\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80 \xF0\x9F" + std::string(100, ' ');

TEST_F(TokenizerTest, BytesRoundTrip) {
    const Tokenizer tokenizer = byte_tokenizer();
    EXPECT_EQ(tokenizer.vocab_size(), 257u);
    EXPECT_EQ(tokenizer.end_of_text, 256);
    for (const std::string& text : {std::string(), awkward_text, random_text(100'000, 1)}) {
        const std::vector<int> ids = encode(tokenizer, text);
        ASSERT_EQ(ids.size(), text.size());
        for (size_t i = 0; i < ids.size(); i++) ASSERT_EQ(ids[i], static_cast<unsigned char>(text[i]));
        EXPECT_EQ(decode(tokenizer, ids), text);
    }
    EXPECT_EQ(decode(tokenizer, {104, 105, 256}), "hi<|endoftext|>");
    EXPECT_EQ(decode(tokenizer, {-1, 257, 65}), "[-1][257]A");
}

// The alphabet that GPT-2 published: printable Latin-1 stands for itself, the rest for U+0100 and up.
TEST_F(TokenizerTest, WritesGpt2sByteAlphabet) {
    tokenizer_write(path("tokenizer.json"), byte_tokenizer());
    const json root = json::parse(read_bytes(path("tokenizer.json")));
    const json& vocab = root["model"]["vocab"];
    EXPECT_EQ(vocab.size(), 257u);
    const std::map<std::string, int> known = {
        {"\u0100", 0},   {"\u010A", 10},  {"\u0120", 32},  {"!", 33},
        {"\"", 34},      {"\\", 92},      {"~", 126},      {"\u0121", 127},
        {"\u0122", 128}, {"\u0142", 160}, {"\u00A1", 161}, {"\u00AC", 172},
        {"\u0143", 173}, {"\u00AE", 174}, {"\u00FF", 255}, {"<|endoftext|>", 256}};
    for (const auto& [text, id] : known) EXPECT_EQ(vocab.at(text), id) << text;
    std::set<int> ids;
    for (const auto& [text, id] : vocab.items()) ids.insert(id.get<int>());
    EXPECT_EQ(ids.size(), 257u);
    EXPECT_EQ(root["model"]["type"], "BPE");
    EXPECT_TRUE(root["model"]["merges"].empty());
    for (const char* part : {"pre_tokenizer", "decoder"}) {
        EXPECT_EQ(root[part]["type"], "ByteLevel");
        EXPECT_EQ(root[part]["add_prefix_space"], false);
        EXPECT_EQ(root[part]["use_regex"], false);
    }
    EXPECT_EQ(root["added_tokens"][0]["content"], "<|endoftext|>");
    EXPECT_EQ(root["added_tokens"][0]["id"], 256);
    EXPECT_EQ(root["added_tokens"][0]["special"], true);
    EXPECT_EQ(names(), std::vector<std::string>{"tokenizer.json"});
}

TEST_F(TokenizerTest, ReadsWhatItWrites) {
    tokenizer_write(path("bytes.json"), byte_tokenizer());
    const Tokenizer read = tokenizer_read(path("bytes.json"), "--tokenizer");
    EXPECT_EQ(read.bytes, byte_tokenizer().bytes);
    EXPECT_EQ(read.end_of_text, 256);
    EXPECT_EQ(read.obstacle, "");
    // Bytes in another order, and an id that is not used.
    Tokenizer shuffled;
    shuffled.obstacle = "";
    shuffled.bytes = {"<|endoftext|>", ""};
    shuffled.end_of_text = 0;
    for (int byte = 255; byte >= 0; byte--) shuffled.bytes.emplace_back(1, static_cast<char>(byte));
    tokenizer_write(path("shuffled.json"), shuffled);
    const Tokenizer again = tokenizer_read(path("shuffled.json"), "--tokenizer");
    EXPECT_EQ(again.bytes, shuffled.bytes);
    EXPECT_EQ(again.end_of_text, 0);
    EXPECT_EQ(encode(again, "A"), std::vector<int>{2 + 255 - 'A'});
    EXPECT_EQ(decode(again, encode(again, awkward_text)), awkward_text);
    EXPECT_EQ(decode(again, {1}), "[1]");
    expect_error([&] { tokenizer_write(path("no/tokenizer.json"), read); }, {path("no/tokenizer.json")});
}

// The form of GPT-2's own file: a vocabulary in the byte alphabet (\u0120 a space, \u010A a newline), merges.
const char* const gpt2_like = R"({
    "version": "1.0", "added_tokens": [{"id": 7, "content": "<|endoftext|>", "special": true}],
    "normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "merges": ["h i", "\u0120 hi"], "vocab": {
        "h": 0, "i": 1, "\u0120": 2, "hi": 3, "\u0120hi": 4, "\u010A\u010A": 5, "\u00C3\u00A9": 6}}})";

// The JSON with members replaced, or removed by null (RFC 7396).
std::string patched(const std::string& text, const std::string& patch) {
    json result = json::parse(text);
    result.merge_patch(json::parse(patch));
    return result.dump();
}

TEST_F(TokenizerTest, ReadsAVocabularyWithMergesForDecoding) {
    write_bytes(path("tokenizer.json"), gpt2_like);
    const Tokenizer tokenizer = tokenizer_read(path("tokenizer.json"), "--tokenizer");
    EXPECT_EQ(tokenizer.vocab_size(), 8u);
    EXPECT_EQ(tokenizer.end_of_text, 7);
    EXPECT_EQ(decode(tokenizer, {3, 4, 5, 6, 7, 2, 0}), "hi hi\n\n\xC3\xA9<|endoftext|> h");
    EXPECT_EQ(tokenizer.obstacle, "has merges");
    expect_error([&] { encode(tokenizer, "hi"); }, {"merges"});
    expect_error([&] { tokenizer_write(path("x.json"), tokenizer); }, {path("x.json"), "byte tokenizer"});
}

// What is more than a table of bytes must not be encoded as one.
TEST_F(TokenizerTest, EncodesOnlyWhereBytesAreAllThereIs) {
    tokenizer_write(path("bytes.json"), byte_tokenizer());
    const std::string bytes = read_bytes(path("bytes.json"));
    EXPECT_EQ(tokenizer_read(path("bytes.json"), "").obstacle, "");
    const std::pair<const char*, const char*> cases[] = {
        {R"({"normalizer": {"type": "NFC"}})", "normalizer"},
        {R"({"pre_tokenizer": {"add_prefix_space": true}})", "prefix space"},
        {R"({"pre_tokenizer": {"type": "Whitespace"}})", "pre_tokenizer"},
        {R"({"model": {"merges": ["a b"]}})", "merges"},
        {R"({"model": {"vocab": {"the": 300}}})", "several bytes"},
        {R"({"model": {"vocab": {"a": null}}})", "no token for some bytes"},
    };
    for (const auto& [patch, word] : cases) {
        write_bytes(path("changed.json"), patched(bytes, patch));
        const Tokenizer changed = tokenizer_read(path("changed.json"), "");
        expect_error([&] { encode(changed, "a"); }, {word});
    }
}

TEST_F(TokenizerTest, RejectsEverythingElse) {
    const std::string name = path("tokenizer.json"), good = gpt2_like;
    const std::pair<std::string, std::string> cases[] = {
        {"", "JSON"},
        {good.substr(0, good.size() / 2), "JSON"},
        {"[1, 2]", "JSON"},
        {std::string(100'000, '['), "JSON"},
        {shard(counting(100)), "JSON"},
        {"{}", "byte-level"},
        {patched(good, R"({"model": null})"), "model.vocab"},
        {patched(good, R"({"model": {"vocab": [["a", -1.5]]}})"), "model.vocab"},
        {R"({"model": {"vocab": {}}, "decoder": {"type": "ByteLevel"}})", "vocabulary is empty"},
        {patched(good, R"({"decoder": {"type": "WordPiece"}})"), "ByteLevel"},
        {patched(good, R"({"decoder": null})"), "ByteLevel"},
        {patched(good, R"({"model": {"vocab": {"x": -1}}})"), "id -1"},
        {patched(good, R"({"model": {"vocab": {"x": 4000000000}}})"), "id 4000000000"},
        {patched(good, R"({"model": {"vocab": {"x": 18446744073709551615}}})"), "id 18446744073709551615"},
        {patched(good, R"({"model": {"vocab": {"x": 1.5}}})"), "id 1.5"},
        {patched(good, R"({"model": {"vocab": {"x": "y"}}})"), "id \"y\""},
        {patched(good, R"({"model": {"vocab": {"x": 3}}})"), "two tokens have id 3"},
        {patched(good, R"({"model": {"vocab": {"\u20AC": 9}}})"), "alphabet"},
        {patched(good, R"({"model": {"vocab": {"a b\n": 9}}})"), "alphabet"},
        {patched(good, R"({"added_tokens": [{"id": 8}]})"), "content"},
        {patched(good, R"({"added_tokens": [{"content": "x"}]})"), "id null"},
        {patched(good, R"({"added_tokens": [7]})"), "content"},
    };
    for (const auto& [text, part] : cases) {
        write_bytes(name, text);
        expect_error([&] { tokenizer_read(name, "--tokenizer"); }, {"--tokenizer " + name, part});
    }
    expect_error([&] { tokenizer_read(path("missing.json"), "--tokenizer"); },
                 {"--tokenizer " + path("missing.json"), "No such file"});
    expect_error([&] { tokenizer_read(folder, "--tokenizer"); }, {folder.string(), "folder"});
}

std::string shown(const std::string& bytes) {
    std::string pending;
    return printable(bytes, pending);
}

TEST(Printable, NothingReachesTheTerminalButText) {
    const std::string replaced = "\xEF\xBF\xBD";
    for (int byte = 0; byte < 256; byte++) {
        const std::string text = std::string(1, static_cast<char>(byte)) + ".";
        const bool passes = byte == '\n' || byte == '\t' || (byte >= 0x20 && byte < 0x7F);
        EXPECT_EQ(shown(text), passes ? text : replaced + ".") << byte;
    }
    EXPECT_EQ(shown("\x1B[31mred"), replaced + "[31mred");
    EXPECT_EQ(shown("\xC2\x9B"
                    "31m"),
              replaced + "31m");  // CSI of 8-bit terminals, as UTF-8
    EXPECT_EQ(shown("\xC2\xA0\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"),
              "\xC2\xA0\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
    EXPECT_EQ(shown("\xC0\xAF"), replaced + replaced);                                // overlong
    EXPECT_EQ(shown("\xED\xA0\x80"), replaced + replaced + replaced);                 // a surrogate
    EXPECT_EQ(shown("\xF4\x90\x80\x80"), replaced + replaced + replaced + replaced);  // above U+10FFFF
    EXPECT_EQ(shown("\xE2\x82."), replaced + replaced + ".");
}

TEST(Printable, OneLine) {
    EXPECT_EQ(printable_line("a\nb\tc\x1b[2J \xC2\x9B caf\xC3\xA9"),
              "a\uFFFDb\uFFFDc\uFFFD[2J \uFFFD caf\xC3\xA9");
    EXPECT_EQ(printable_line("cut \xF0\x9F"), "cut \uFFFD");
    EXPECT_EQ(printable_line(""), "");
}

TEST(Printable, WaitsForTheRestOfACharacter) {
    std::string pending;
    EXPECT_EQ(printable("a\xF0\x9F", pending), "a");
    EXPECT_EQ(pending, "\xF0\x9F");
    EXPECT_EQ(printable("\x98", pending), "");
    EXPECT_EQ(printable("\x80"
                        "b",
                        pending),
              "\xF0\x9F\x98\x80"
              "b");
    EXPECT_EQ(pending, "");
    EXPECT_EQ(printable("\xE2", pending), "");
    EXPECT_EQ(printable("\n", pending), "\xEF\xBF\xBD\n");
}

// Byte by byte or all at once: the same text, valid UTF-8 (judged by the JSON library) without controls.
TEST(Printable, RandomBytesInPieces) {
    const std::string text = random_text(20'000, 3) + "\xF0\x9F\x98\x80.";
    std::string pending, pieces;
    for (size_t i = 0; i < text.size(); i += 1 + i % 3)
        pieces += printable(text.substr(i, 1 + i % 3), pending);
    EXPECT_EQ(pending, "");
    EXPECT_EQ(pieces, shown(text));
    EXPECT_NO_THROW(json(pieces).dump());
    for (const char c : pieces) ASSERT_TRUE(c == '\n' || c == '\t' || static_cast<unsigned char>(c) >= 0x20);
    EXPECT_EQ(pieces.find('\x7F'), std::string::npos);
}

// ---------------------------------------------------------------------------------------------------
// tokenize

// Runs it and returns what it printed.
std::string run_tokenize(const TokenizeOptions& options) {
    testing::internal::CaptureStdout();
    try {
        tokenize(options);
    } catch (...) {
        testing::internal::GetCapturedStdout();
        throw;
    }
    return testing::internal::GetCapturedStdout();
}

TokenizeOptions make_options(const std::vector<std::string>& inputs, const std::string& out,
                             double val_frac) {
    TokenizeOptions options;
    options.inputs = inputs;
    options.out = out;
    options.val_frac = val_frac;
    return options;
}

// The ids that documents of these bytes should give: 256, then the bytes; nothing for an empty one.
Ids expected_ids(const std::vector<std::string>& documents) {
    Ids ids;
    for (const std::string& document : documents) {
        if (document.empty()) continue;
        ids.push_back(256);
        for (const char c : document) ids.push_back(static_cast<unsigned char>(c));
    }
    return ids;
}

TEST_F(Tokenize, CutsTheEndOfEachFileForValidation) {
    // Plain letters where the cut falls: random bytes might look like the middle of a UTF-8 character.
    const std::string a = random_text(1000, 1).replace(890, 20, "twenty plain letters");
    const std::string b = awkward_text + std::string(5 << 19, 'x') + "\n", c = "tiny";
    write_bytes(path("a.txt"), a);
    write_bytes(path("b.txt"), b);
    write_bytes(path("c.txt"), c);
    write_bytes(path("empty.txt"), "");
    const std::string printed = run_tokenize(
        make_options({path("a.txt"), path("empty.txt"), path("b.txt"), path("c.txt")}, path("out"), 0.1));
    const size_t b_cut = b.size() - b.size() / 10;
    const Ids train = expected_ids({a.substr(0, 900), b.substr(0, b_cut), c});
    const Ids val = expected_ids({a.substr(900), b.substr(b_cut)});
    EXPECT_EQ(read_shard(path("out_train_000.bin")), train);
    EXPECT_EQ(read_shard(path("out_val_000.bin")), val);
    EXPECT_EQ(tokenizer_read(path("out_tokenizer.json"), "--tokenizer").bytes, byte_tokenizer().bytes);
    EXPECT_EQ(printed, path("empty.txt") + "  passed over: empty\n" + path("out_train_000.bin") + "  " +
                           std::to_string(train.size()) + " tokens\n" + path("out_val_000.bin") + "  " +
                           std::to_string(val.size()) + " tokens\n" + path("out_tokenizer.json") +
                           "  257 ids\n");
}

TEST_F(Tokenize, NeverCutsInsideACharacter) {
    // 10 bytes of which half are validation; the cut at 5 falls on each byte of a character in turn.
    const std::map<std::string, size_t> cuts = {
        {"12345\xF0\x9F\x98\x80.", 5},
        {"1234\xF0\x9F\x98\x80..", 4},
        {"123\xF0\x9F\x98\x80...", 3},
        {"12\xF0\x9F\x98\x80....", 2},
        {"1\xF0\x9F\x98\x80.....", 5},
        {"1234\xC3\xA9....", 4},
        {"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80", 2},  // no text at all: moved by three at most
    };
    for (const auto& [text, cut] : cuts) {
        ASSERT_EQ(text.size(), 10u);
        write_bytes(path("x.txt"), text);
        run_tokenize(make_options({path("x.txt")}, path("x"), 0.5));
        EXPECT_EQ(read_shard(path("x_train_000.bin")), expected_ids({text.substr(0, cut)}));
        EXPECT_EQ(read_shard(path("x_val_000.bin")), expected_ids({text.substr(cut)}));
    }
}

TEST_F(Tokenize, ShardsAddUpAndReplaceAnEarlierSet) {
    const std::string a = random_text(1000, 5), b = random_text(777, 6);
    write_bytes(path("a.txt"), a);
    write_bytes(path("b.txt"), b);
    auto options = make_options({path("a.txt"), path("b.txt")}, folder.string() + "//x", 0);
    options.shard_tokens = 300;
    run_tokenize(options);
    const Ids all = expected_ids({a, b});
    for (size_t s = 0; s * 300 < all.size(); s++) {
        const auto begin = all.begin() + static_cast<ptrdiff_t>(s * 300);
        const auto end = all.begin() + static_cast<ptrdiff_t>(std::min(all.size(), (s + 1) * 300));
        EXPECT_EQ(read_shard(path("x_train_00" + std::to_string(s) + ".bin")), Ids(begin, end)) << s;
    }
    EXPECT_EQ(names(), (std::vector<std::string>{"a.txt", "b.txt", "x_tokenizer.json", "x_train_000.bin",
                                                 "x_train_001.bin", "x_train_002.bin", "x_train_003.bin",
                                                 "x_train_004.bin", "x_train_005.bin"}));

    // A second run with fewer shards, and first with, then without validation: no old shard stays to be
    // swallowed by x_train_*.bin; files of other names stay.
    for (const std::string name :
         {"x_train_007.bin.bak", "x_train_abc.bin", "xx_train_001.bin", "x_train_.bin"}) {
        write_bytes(path(name), "keep");
    }
    options.shard_tokens = 1000;
    options.val_frac = 0.5;
    std::string printed = run_tokenize(options);
    EXPECT_NE(printed.find("x_train_005.bin  removed"), std::string::npos) << printed;
    EXPECT_EQ(printed.find("x_train_000.bin  removed"), std::string::npos) << printed;
    const std::vector<std::string> kept = {"a.txt",           "b.txt",           "x_tokenizer.json",
                                           "x_train_.bin",    "x_train_000.bin", "x_train_007.bin.bak",
                                           "x_train_abc.bin", "xx_train_001.bin"};
    auto with_validation = kept;
    with_validation.insert(with_validation.end() - 1, "x_val_000.bin");
    EXPECT_EQ(names(), with_validation);
    options.val_frac = 0;
    options.shard_tokens = 10'000;
    printed = run_tokenize(options);
    EXPECT_NE(printed.find("x_val_000.bin  removed"), std::string::npos) << printed;
    EXPECT_EQ(names(), kept);
    EXPECT_EQ(read_shard(path("x_train_000.bin")), all);
    // An exact fit leaves no empty shard behind.
    options.shard_tokens = all.size() / 2;
    ASSERT_EQ(all.size() % 2, 1u);
    run_tokenize(options);
    EXPECT_EQ(read_shard(path("x_train_002.bin")), Ids{all.back()});
    options.shard_tokens = all.size();
    run_tokenize(options);
    EXPECT_EQ(names(), kept);
}

TEST_F(Tokenize, ReadsItsOwnTokenizerAndAnyName) {
    fs::create_directory(path("50% of \"it\" [1]"));
    const std::string input = path("50% of \"it\" [1]/%s %n.txt"), out = path("50% of \"it\" [1]/%d x");
    write_bytes(input, awkward_text);
    run_tokenize(make_options({input}, out, 0));
    EXPECT_EQ(read_shard(out + "_train_000.bin"), expected_ids({awkward_text}));
    auto again = make_options({input}, path("again"), 0);
    again.tokenizer = out + "_tokenizer.json";
    run_tokenize(again);
    EXPECT_EQ(read_bytes(path("again_train_000.bin")), read_bytes(out + "_train_000.bin"));
    EXPECT_EQ(read_bytes(path("again_tokenizer.json")), read_bytes(out + "_tokenizer.json"));
    const Loader loader = loader_open(out + "_train_000.bin", "--train-data", 1, 16, 257, 1);
    EXPECT_EQ(loader_windows(loader), awkward_text.size() / 16);
}

// More ids than 16 bits hold: the 32-bit format, and no id is wrapped.
TEST_F(Tokenize, WideVocabulary) {
    Tokenizer wide;
    wide.obstacle = "";
    wide.bytes.resize(70'000);
    for (size_t byte = 0; byte < 256; byte++)
        wide.bytes[byte * 270] = std::string(1, static_cast<char>(byte));
    wide.end_of_text = 69'999;
    wide.bytes.back() = "<|endoftext|>";
    tokenizer_write(path("wide.json"), wide);
    write_bytes(path("x.txt"),
                "\xFF"
                "A");
    auto options = make_options({path("x.txt")}, path("x"), 0);
    options.tokenizer = path("wide.json");
    run_tokenize(options);
    EXPECT_EQ(read_shard(path("x_train_000.bin"), 4), (Ids{69'999, 255 * 270, 'A' * 270}));
}

TEST_F(Tokenize, BadInputIsRefusedBeforeAnythingIsWritten) {
    fs::create_directory(path("in"));
    const std::string good = path("in/good.txt"), empty = path("in/empty.txt"), tiny = path("in/tiny.txt");
    write_bytes(good, "some text to learn from");
    write_bytes(empty, "");
    write_bytes(tiny, "abc");
    write_bytes(path("in/merges.json"), gpt2_like);
    const auto rejects = [&](const TokenizeOptions& options, const std::vector<std::string>& parts) {
        expect_error([&] { run_tokenize(options); }, parts);
        EXPECT_EQ(names(), std::vector<std::string>{"in"});
    };
    const std::string out = path("out");
    rejects(make_options({}, out, 0.1), {"--input"});
    rejects(make_options({good, path("in/missing.txt")}, out, 0.1),
            {"--input", path("in/missing.txt"), "No such"});
    rejects(make_options({good, path("in")}, out, 0.1), {"--input " + path("in"), "folder"});
    rejects(make_options({good, "/dev/null"}, out, 0.1), {"--input /dev/null", "regular"});
    rejects(make_options({empty, empty}, out, 0), {"--input", empty, "0 bytes"});
    rejects(make_options({tiny}, out, 0.1), {"--val-frac 0.1", "3 bytes"});
    rejects(make_options({good}, "", 0.1), {"--out"});
    rejects(make_options({good}, folder.string() + "/", 0.1), {"--out", folder.string()});
    rejects(make_options({good}, path("no/out"), 0.1), {path("no/out_train_000.bin"), "No such file"});
    rejects(make_options({good}, good + "/out", 0.1), {good + "/out_train_000.bin", "Not a directory"});
    for (const double val_frac : {-0.1, 1.0, 1.5, std::nan("")}) {
        rejects(make_options({good}, out, val_frac), {"--val-frac"});
    }
    auto options = make_options({good}, out, 0.1);
    options.shard_tokens = 0;
    rejects(options, {"--shard-tokens 0"});
    options.shard_tokens = size_t{1} << 31;
    rejects(options, {"--shard-tokens 2147483648"});
    options.shard_tokens = 100;
    options.tokenizer = path("in/merges.json");
    rejects(options, {"--tokenizer " + options.tokenizer, "merges"});
    options.tokenizer = "gpt3";
    rejects(options, {"--tokenizer gpt3"});
    options.tokenizer = "bytes";
    const FileSizeLimit limit(1030);
    rejects(options, {out + "_train_000.bin", "too large"});
}

// ---------------------------------------------------------------------------------------------------
// The quickstart text

TEST_F(Data, QuickstartTextIsPlainAndComplete) {
    const std::map<std::string, std::pair<std::string, std::string>> ends = {
        {"data/text/sherlock_holmes.txt",
         {"THE ADVENTURES OF SHERLOCK HOLMES\n\nby\n\nSIR ARTHUR CONAN DOYLE\n",
          "has met with considerable success.\n"}},
        {"data/text/tom_sawyer.txt", {"THE ADVENTURES OF TOM SAWYER\n", "part of their lives at present.\n"}},
    };
    size_t total = 0;
    for (const auto& [name, end] : ends) {
        SCOPED_TRACE(name);
        const std::string text = read_bytes(name);
        total += text.size();
        EXPECT_LT(text.find(end.first), 40u);
        EXPECT_TRUE(text.ends_with(end.second));
        EXPECT_NO_THROW(json(text).dump()) << "not UTF-8";
        for (const char c : text) ASSERT_TRUE(c == '\n' || static_cast<unsigned char>(c) >= 0x20) << int{c};
        std::string lower = text;
        std::transform(lower.begin(), lower.end(), lower.begin(),
                       [](char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
        for (const char* word : {"gutenberg", "ebook", "e-text", "trademark", "copyright", "http", "www."}) {
            EXPECT_EQ(lower.find(word), std::string::npos) << word;
        }
    }
    EXPECT_NEAR(static_cast<double>(total), 1e6, 1e5);

    run_tokenize(
        make_options({"data/text/sherlock_holmes.txt", "data/text/tom_sawyer.txt"}, path("books"), 0.1));
    const Ids train = read_shard(path("books_train_000.bin")), val = read_shard(path("books_val_000.bin"));
    EXPECT_EQ(train.size() + val.size(), total + 4);
    EXPECT_EQ(std::count(train.begin(), train.end(), 256u), 2);
    EXPECT_EQ(std::count(val.begin(), val.end(), 256u), 2);
    EXPECT_NEAR(static_cast<double>(val.size()), 0.1 * static_cast<double>(total), 10);
}

}  // namespace
