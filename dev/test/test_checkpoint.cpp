// Files on disk: safetensors, Hugging Face folders, checkpoints. The formats are judged by files written out
// by hand here and by the formats' descriptions; dev/reference/check_transformers.py judges what the last
// test exports. Damage, full disks and sudden death are made for real, in child processes where they must be.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <clocale>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <thread>

#include "data/files.h"
#include "data/tokenizer.h"
#include "dev/test/temp_folder.h"
#include "kernels/error.h"
#include "kernels/random.h"
#include "model/checkpoint.h"
#include "model/huggingface.h"
#include "model/integrity.h"
#include "model/safetensors.h"

namespace {

using nlohmann::json;
namespace fs = std::filesystem;

// -----------------------------------------------------------------------------------------------------
// Tools

std::string slurp(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) fail("%s: cannot open", path.c_str());
    return {std::istreambuf_iterator<char>(file), {}};
}

void spill(const std::string& path, const std::string& bytes) {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file << bytes;
    if (!file.flush()) fail("%s: cannot write", path.c_str());
}

std::vector<std::string> names_in(const std::string& folder) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
}

// What the action says when it refuses: one line that has every one of `parts`.
void expect_refused(const std::function<void()>& action, const std::vector<std::string>& parts) {
    try {
        action();
        ADD_FAILURE() << "was not refused";
    } catch (const Error& error) {
        const std::string text = error.what();
        EXPECT_EQ(text.find('\n'), std::string::npos) << text;
        EXPECT_LT(text.size(), 600u) << text;
        for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
    }
}

constexpr int passed = 0, failed = 1, not_permitted = 77;

// Runs the body in a child process and returns its exit status, or minus the signal that ended it.
int in_child(const std::function<int()>& body) {
    const pid_t child = fork();
    if (child == 0) {
        int result = failed;
        try {
            result = body();
        } catch (const std::exception& error) {
            fprintf(stderr, "in the child: %s\n", error.what());
        }
        _exit(result);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// A safetensors file by hand.
std::string file_bytes(const std::string& header, const std::string& data) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

template <typename Element>
std::string bytes_of(const std::vector<Element>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Element)};
}

std::vector<float> floats_of(const SafeTensorsFile& file, const std::string& name) {
    const SafeTensor& tensor = file.tensors.at(name);
    size_t count = 1;
    for (const size_t extent : tensor.shape) count *= extent;
    std::vector<float> values(count);
    safetensor_to_float(values.data(), tensor, name, file.path);
    return values;
}

// A model and its optimizer that differ in every number with the seed.
struct Trained {
    Stream* stream = stream_create({.index = 0, .threads = 1});
    Gpt<float> model;
    Optimizer optimizer;

    explicit Trained(const GptConfig& config, OptimizerKind kind = OptimizerKind::muon,
                     Dtype state_dtype = Dtype::fp32, bool normuon = false) {
        model = gpt_create<float>(config, 1, std::min<size_t>(config.seq_len, 64), false, Recompute::none, 0,
                                  stream);
        OptimizerConfig settings;
        settings.kind = kind;
        settings.state_dtype = state_dtype;
        settings.muon_normuon = normuon;
        optimizer = optimizer_create(settings, model.table, stream);
    }
    ~Trained() {
        optimizer_destroy(optimizer, stream);
        gpt_destroy(model, stream);
        stream_destroy(stream);
    }
    Trained(const Trained&) = delete;
    Trained& operator=(const Trained&) = delete;

    // Every bit pattern may come, NaN and denormal numbers too; the padding of a table is zero, as it always
    // is.
    void fill_bits(uint64_t seed) {
        uint32_t index = 0;
        const auto fill = [&](float* values, size_t count) {
            for (size_t i = 0; i < count; i++) {
                values[i] = std::bit_cast<float>(random_bits(seed, RandomStream::sampling, index, i)[0]);
            }
            index++;
        };
        std::fill(model.params, model.params + table_elements(model.table), 0.0f);
        for (const Parameter& parameter : model.table) {
            fill(model.params + parameter.offset, parameter.used_rows * parameter.cols);
        }
        fill(static_cast<float*>(optimizer.state), optimizer_state_bytes(optimizer) / sizeof(float));
        optimizer.steps = seed * 3 + 1;
        optimizer.degenerate_updates = seed * 5;
    }

    // Weights of a size at which every tensor shows in the logits.
    void fill_weights(uint64_t seed) {
        uint32_t index = 0;
        for (const Parameter& parameter : model.table) {
            const float mean = parameter.initializer == Initializer::ones ? 1.0f : 0.0f;
            for (size_t i = 0; i < parameter.used_rows * parameter.cols; i++) {
                const double normal = random_normal(seed, RandomStream::sampling, index, i);
                model.params[parameter.offset + i] = mean + 0.2f * static_cast<float>(normal);
            }
            index++;
        }
    }

    std::string bits() const {
        std::string all(reinterpret_cast<const char*>(model.params),
                        table_elements(model.table) * sizeof(float));
        for (const OptimizerSlot& slot : optimizer.slots) {
            const size_t bytes = slot.size() * dtype_size(slot.state_dtype);
            all.append(static_cast<const char*>(slot.first), bytes);
            if (slot.second) all.append(static_cast<const char*>(slot.second), bytes);
            if (slot.neurons)
                all.append(reinterpret_cast<const char*>(slot.neurons), slot.neuron_count() * sizeof(float));
        }
        return all + "/" + std::to_string(optimizer.steps) + "/" +
               std::to_string(optimizer.degenerate_updates);
    }

    void save(const std::string& out, uint64_t step, size_t keep = 0, const json& state = json::object()) {
        checkpoint_save(out, step, model, optimizer, state, "", -1, keep, stream);
    }
    void load(const std::string& folder) { checkpoint_load(folder, model, optimizer, stream); }
    void write(const std::string& folder) { huggingface_write(folder, model, -1, stream); }
    std::vector<std::string> read(const std::string& folder) {
        std::vector<std::string> warnings;
        huggingface_read(model, folder, warnings, stream);
        return warnings;
    }
};

// Sizes that are multiples of nothing.
GptConfig small_config() {
    return {.layers = 2, .heads = 3, .channels = 21, .seq_len = 19, .vocab_size = 131, .tied_head = true};
}

const Parameter& parameter_named(const ParameterTable& table, const std::string& name) {
    return *std::find_if(table.begin(), table.end(), [&](const Parameter& p) { return p.name == name; });
}

// Rewrites a model.safetensors: the function gets its tensors by name and may change, rename, drop or add
// some.
using Tensors = std::map<std::string, SafeTensor>;
void rewrite(const std::string& path, const std::function<void(Tensors&)>& change) {
    const std::string kept = path + ".before";
    fs::rename(path, kept);
    const SafeTensorsFile file = safetensors_open(kept);
    Tensors tensors = file.tensors;
    change(tensors);
    safetensors_write(path, {tensors.begin(), tensors.end()}, file.metadata);
    fs::remove(kept);
}

void rewrite_json(const std::string& path, const std::function<void(json&)>& change) {
    json content = json::parse(slurp(path));
    change(content);
    spill(path, content.dump());
}

// -----------------------------------------------------------------------------------------------------
// Files

TEST(Files, ChecksumIsXxh3) {
    // XXH3_64bits with seed 0 of no bytes, from the xxHash specification's test vectors.
    EXPECT_EQ(checksum(""), "2d06800538d394c2");
    const TempFolder folder;
    std::string bytes(3'000'001, '\0');  // several reads, the last one odd
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<char>(i * i >> 3);
    spill(folder / "file", bytes);
    const FileDigest digest = file_digest(folder / "file");
    EXPECT_EQ(digest.bytes, bytes.size());
    EXPECT_EQ(digest.xxh3, checksum(bytes));
    bytes[2'000'000] ^= 1;
    EXPECT_NE(digest.xxh3, checksum(bytes));
}

// A pipe with a slow reader takes a little at a time, and a timer interrupts the writes meanwhile.
TEST(Files, ShortAndInterruptedWritesAreCompleted) {
    const TempFolder folder;
    const std::string path = folder / "pipe";
    ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
    std::string sent(3'000'000, '\0'), received;
    for (size_t i = 0; i < sent.size(); i++) sent[i] = static_cast<char>(i % 251);

    // The timer belongs to the process: only the writing thread may take its signal.
    sigset_t alarm_set;
    sigemptyset(&alarm_set);
    sigaddset(&alarm_set, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarm_set, nullptr);
    std::jthread reader([&] {
        std::ifstream file(path, std::ios::binary);
        std::vector<char> buffer(100'000);
        while (file.read(buffer.data(), static_cast<std::streamsize>(buffer.size())) || file.gcount() > 0) {
            received.append(buffer.data(), static_cast<size_t>(file.gcount()));
            usleep(1000);
        }
    });
    pthread_sigmask(SIG_UNBLOCK, &alarm_set, nullptr);
    static volatile sig_atomic_t alarms;
    alarms = 0;
    struct sigaction action = {}, before;
    action.sa_handler = [](int) { alarms = alarms + 1; };  // without SA_RESTART
    sigaction(SIGALRM, &action, &before);
    const itimerval every = {{0, 300}, {0, 300}}, never = {};
    setitimer(ITIMER_REAL, &every, nullptr);
    {
        FileWriter file(path);
        file_append(file, sent.data(), sent.size());
    }
    setitimer(ITIMER_REAL, &never, nullptr);
    sigaction(SIGALRM, &before, nullptr);
    reader.join();
    EXPECT_GT(alarms, 3);
    EXPECT_TRUE(received == sent);
    EXPECT_FALSE(fs::exists(path));  // what is not committed does not stay
}

TEST(Files, JsonIsStrict) {
    const auto parse = [](const std::string& text) { return [text] { json_parse(text, "a/file"); }; };
    EXPECT_EQ(json_parse(R"({"a": {"x": 1}, "b": [{"x": 2}, {"x": 3}]})", "a/file")["b"][1]["x"], 3);
    expect_refused(parse(R"({"a": 1, "a": 2})"), {"a/file", "\"a\" twice"});
    expect_refused(parse(R"([{"a": {"b": 1}, "a": 2}])"), {"a/file", "\"a\" twice"});
    expect_refused(parse(R"({"a": 1} x)"), {"a/file", "not valid JSON"});
    expect_refused(parse(std::string("{}\0{}", 5)), {"a/file", "zero byte"});
    expect_refused(parse("{\"a\n\": " + std::string(1'000'000, 'z')), {"a/file", "not valid JSON"});
    expect_refused(parse("{\"\xff\": 1}"), {"a/file", "not valid JSON"});
    for (const char* open : {"[", "{\"a\":"}) {
        std::string nested;
        for (int i = 0; i < 10'000; i++) nested += open;
        expect_refused(parse(nested), {"a/file", "nested"});
    }
}

// -----------------------------------------------------------------------------------------------------
// Safetensors

// The file byte by byte, without our reader.
TEST(SafeTensors, WritesTheFormat) {
    const TempFolder folder;
    const std::vector<float> a = {1.0f, -2.5f, 3e-30f, 4.0f, 5.0f, 6.0f};
    const std::vector<uint16_t> b = {0x3f80, 0xc000, 0x7fc0};
    const std::vector<std::pair<std::string, SafeTensor>> tensors = {{"z", {"F32", {2, 3}, a.data(), 24}},
                                                                     {"b", {"BF16", {3}, b.data(), 6}},
                                                                     {"none", {"F32", {0, 4}, nullptr, 0}}};
    for (const bool fetched : {false, true}) {
        const auto fetch = [&](size_t i) { return tensors[i].second.data; };
        safetensors_write(folder / "file", tensors, {{"format", "pt"}},
                          fetched ? std::function<const void*(size_t)>(fetch) : nullptr);
        const std::string bytes = slurp(folder / "file");
        uint64_t length;
        std::memcpy(&length, bytes.data(), 8);
        EXPECT_EQ(length % 8, 0u);
        ASSERT_EQ(bytes.size(), 8 + length + 30);
        EXPECT_EQ(bytes[8], '{');
        const json expected = {{"__metadata__", {{"format", "pt"}}},
                               {"z", {{"dtype", "F32"}, {"shape", {2, 3}}, {"data_offsets", {0, 24}}}},
                               {"b", {{"dtype", "BF16"}, {"shape", {3}}, {"data_offsets", {24, 30}}}},
                               {"none", {{"dtype", "F32"}, {"shape", {0, 4}}, {"data_offsets", {30, 30}}}}};
        EXPECT_EQ(json::parse(bytes.substr(8, length)), expected);
        EXPECT_EQ(bytes.substr(8 + length), bytes_of(a) + bytes_of(b));
    }
    const SafeTensor wrong = {"F32", {2, 2}, a.data(), 24};
    expect_refused([&] { safetensors_write(folder / "file", {{"z", wrong}}, {}); }, {"\"z\"", "24 bytes"});
    expect_refused(
        [&] {
            safetensors_write(folder / "file", {tensors[0], tensors[0]}, {});
        },
        {"two", "\"z\""});
}

TEST(SafeTensors, ReadsEveryFloatingPointType) {
    const TempFolder folder;
    const float infinity = std::numeric_limits<float>::infinity();
    // I8 first, so that everything after it lies at odd addresses.
    const std::string data = std::string("\x07", 1) + bytes_of<double>({0.1, 1e300, -3.0}) +
                             bytes_of<uint16_t>({0x3c00, 0x0001, 0xfbff, 0x7c00}) +
                             bytes_of<uint16_t>({0x3f80, 0x0001, 0xff7f}) + bytes_of<float>({1e-45f, -0.0f}) +
                             bytes_of<int64_t>({42});
    spill(folder / "file", file_bytes(R"({"i8":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},
        "f64":{"dtype":"F64","shape":[3],"data_offsets":[1,25]},
        "f16":{"dtype":"F16","shape":[2,2],"data_offsets":[25,33]},
        "\u00e9\n\ud83d\ude00":{"dtype":"BF16","shape":[3],"data_offsets":[33,39]},
        "f32":{"dtype":"F32","shape":[2,1],"data_offsets":[39,47]},
        "none":{"dtype":"F32","shape":[0],"data_offsets":[39,39]},
        "i64":{"dtype":"I64","shape":[],"data_offsets":[47,55]},"__metadata__":{"a":"b"}}   )",
                                      data));
    const SafeTensorsFile file = safetensors_open(folder / "file");
    EXPECT_EQ(file.tensors.size(), 7u);
    EXPECT_EQ(file.metadata.at("a"), "b");
    EXPECT_EQ(floats_of(file, "f64"), (std::vector<float>{0.1f, infinity, -3.0f}));
    EXPECT_EQ(floats_of(file, "f16"), (std::vector<float>{1.0f, 0x1p-24f, -65504.0f, infinity}));
    EXPECT_EQ(floats_of(file, "\u00e9\n\U0001F600"), (std::vector<float>{1.0f, 0x1p-133f, -0x1.fep127f}));
    EXPECT_EQ(floats_of(file, "f32"), (std::vector<float>{1e-45f, -0.0f}));
    EXPECT_TRUE(floats_of(file, "none").empty());
    EXPECT_EQ(safetensors_get(file, "f16", {2, 2}).dtype, "F16");
    expect_refused([&] { safetensors_get(file, "f16", {4}); }, {"f16", "[2,2]", "[4]"});
    expect_refused([&] { safetensors_get(file, "f17", {4}); }, {"file", "f17"});
    for (const char* name : {"i8", "i64"}) expect_refused([&] { floats_of(file, name); }, {name, "type I"});
}

TEST(SafeTensors, RefusesMalformedFiles) {
    const TempFolder folder;
    const std::string path = folder / "model.safetensors";
    const auto refuse = [&](const char* what, const std::string& bytes, const char* reason) {
        SCOPED_TRACE(what);
        spill(path, bytes);
        expect_refused([&] { safetensors_open(path); }, {path, reason});
    };
    // The entry of a tensor, and a header of nothing else.
    const auto tensor = [](const char* name, const char* dtype, const char* shape, const char* offsets) {
        return std::string("\"") + name + "\":{\"dtype\":" + dtype + ",\"shape\":" + shape +
               ",\"data_offsets\":" + offsets + "}";
    };
    const std::string a = tensor("a", R"("F32")", "[2]", "[0,8]"),
                      good = file_bytes("{" + a + "}", "8 bytes.");
    const auto with_length = [&](uint64_t length) {
        return std::string(reinterpret_cast<const char*>(&length), 8) + good.substr(8);
    };
    refuse("empty", "", "0 bytes");
    refuse("seven bytes", good.substr(0, 7), "7 bytes");
    refuse("cut in the header", good.substr(0, 30), "cut off");
    refuse("cut in the data", good.substr(0, good.size() - 5), "outside");
    refuse("cut by one byte", good.substr(0, good.size() - 1), "outside");
    refuse("one byte more", good + "x", "1 bytes after");
    refuse("header length 0", with_length(0), "not a JSON object");
    refuse("header length 2^63", with_length(uint64_t{1} << 63), "9223372036854775808");
    refuse("header length 2^64-1", with_length(~uint64_t{0}), "18446744073709551615");
    refuse("header longer than the file", with_length(good.size() - 7), "cut off");
    refuse("header length too small", with_length(a.size() - 10), "not valid JSON");
    refuse("a pickle", std::string("\x80\x02}q\x00.", 6) + std::string(100, 'x'), "not a safetensors");

    const auto refuse_header = [&](const char* what, const std::string& header, const char* reason) {
        refuse(what, file_bytes(header, "8 bytes."), reason);
    };
    refuse_header("a list", "[]", "not a JSON object");
    refuse_header("space first", " {}", "not a JSON object");
    refuse_header("zeros for spaces", "{" + a + "}" + std::string(3, '\0'), "zero byte");
    refuse_header("nested lists", "{\"a\":" + std::string(10'000, '['), "nested");
    std::string nested = "{";
    for (int i = 0; i < 10'000; i++) nested += "\"a\":{";
    refuse_header("nested objects", nested, "nested");
    refuse_header("name twice", "{" + a + "," + a + "}", "twice");
    refuse_header("key twice", R"({"a":{"shape":[2],"shape":[2],"data_offsets":[0,8],"dtype":"F32"}})",
                  "twice");
    refuse_header("no dtype", R"({"a":{"shape":[2],"data_offsets":[0,8]}})", "dtype");
    refuse_header("unknown key", R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":2}})",
                  "nothing else");
    refuse_header("a number", R"({"a":1})", "needs dtype");
    refuse_header("metadata is text", "{\"__metadata__\":\"x\"," + a + "}", "__metadata__");
    refuse_header("metadata of numbers", "{\"__metadata__\":{\"x\":1}," + a + "}", "\"x\"");
    refuse_header("name of two lines", R"({"a\nb":{}})", R"("a\nb")");
    refuse_header("name of a megabyte", "{\"" + std::string(1'000'000, 'a') + "\":{}}", "...");

    struct Case {
        const char *dtype, *shape, *offsets, *reason;
    };
    const Case cases[] = {
        {"\"F32\"", "[2]", "[8,16]", "outside"},
        {"\"F32\"", "[2]", "[8,0]", "outside"},
        {"\"F32\"", "[4]", "[0,16]", "outside"},
        {"\"F32\"", "[4]", "[0,18446744073709551615]", "outside"},
        {"\"F32\"", "[1]", "[4,8]", "gap"},
        {"\"F32\"", "[1]", "[0,4]", "4 bytes after"},
        {"\"F32\"", "[2]", "[-8,0]", "data_offsets"},
        {"\"F32\"", "[2]", "[0,8.0]", "data_offsets"},
        {"\"F32\"", "[2]", "[0,4,8]", "two sizes"},
        {"\"F32\"", "[2]", "8", "two sizes"},
        {"\"F32\"", "[-2]", "[0,8]", "list of sizes"},
        {"\"F32\"", "[\"2\"]", "[0,8]", "list of sizes"},
        {"\"F32\"", "2", "[0,8]", "list of sizes"},
        {"\"F32\"", "[1]", "[0,8]", "disagree"},
        {"\"F16\"", "[2]", "[0,8]", "disagree"},
        {"\"F32\"", "[4294967296,4294967296,2]", "[0,8]", "too large"},
        {"\"F32\"", "[4611686018427387906]", "[0,8]", "too large"},  // 4 times that is 8 modulo 2^64
        {"\"F33\"", "[2]", "[0,8]", "F33"},
        {"32", "[2]", "[0,8]", "dtype"},
    };
    for (const Case& bad : cases) {
        const std::string header = "{" + tensor("a", bad.dtype, bad.shape, bad.offsets) + "}";
        refuse_header(header.c_str(), header, bad.reason);
    }
    for (const char* offsets : {"[4,8]", "[0,4]"}) {
        const std::string b = tensor("b", R"("F32")", "[1]", offsets);
        refuse_header("overlap", "{" + a + "," + b + "}", "overlap");
    }

    spill(path, good);
    EXPECT_EQ(safetensors_open(path).tensors.size(), 1u);
    expect_refused([&] { safetensors_open(folder.path); }, {folder.path});
    expect_refused([&] { safetensors_open(folder / "absent"); }, {folder / "absent", "No such file"});
}

TEST(SafeTensors, ReadsHeadersOfAnySizeUpToTheLimit) {
    const TempFolder folder;
    for (size_t length = 99'990; length <= 100'010; length++) {
        std::string header =
            R"({"__metadata__":{"x":"y"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
        header.replace(header.find('y'), 1, std::string(length - header.size() + 1, 'y'));
        ASSERT_EQ(header.size(), length);
        spill(folder / "file", file_bytes(header, "x"));
        EXPECT_EQ(safetensors_open(folder / "file").tensors.at("a").bytes, 1u);
    }
}

// Offsets past 4 GiB, in a file that takes no space.
TEST(SafeTensors, ReadsPast4GiB) {
    const TempFolder folder;
    const uint64_t size = (uint64_t{5} << 30) + 6;
    std::ostringstream header;
    header << R"({"a":{"dtype":"U8","shape":[)" << size << R"(],"data_offsets":[0,)" << size
           << R"(]},"b":{"dtype":"F32","shape":[1],"data_offsets":[)" << size << "," << size + 4 << "]}}";
    const std::string start = file_bytes(header.str(), "");
    spill(folder / "file", start);
    fs::resize_file(folder / "file", start.size() + size);
    {
        std::ofstream file(folder / "file", std::ios::binary | std::ios::app);
        file << bytes_of<float>({7.0f});
    }
    const SafeTensorsFile file = safetensors_open(folder / "file");
    EXPECT_EQ(file.tensors.at("a").bytes, size);
    EXPECT_EQ(floats_of(file, "b"), std::vector<float>{7.0f});
}

// -----------------------------------------------------------------------------------------------------
// Hugging Face folders

// The layout element by element. attn.c_proj is square: only its name says that it is transposed.
TEST(HuggingFace, WritesNamesAndLayout) {
    const TempFolder folder;
    for (const bool tied : {true, false}) {
        GptConfig config = small_config();
        config.tied_head = tied;
        Trained trained(config);
        trained.fill_weights(1);
        trained.write(folder.path);
        const SafeTensorsFile file = safetensors_open(folder / "model.safetensors");
        EXPECT_EQ(file.metadata.at("format"), "pt");
        EXPECT_EQ(file.tensors.size(), 2 + 12 * 2 + 2 + (tied ? 0u : 1u));
        const size_t C = 21, V = 131;
        const std::map<std::string, std::vector<size_t>> shapes = {
            {"transformer.wte.weight", {V, C}},
            {"transformer.wpe.weight", {19, C}},
            {"transformer.h.1.ln_1.weight", {C}},
            {"transformer.h.1.attn.c_attn.weight", {C, 3 * C}},
            {"transformer.h.1.attn.c_attn.bias", {3 * C}},
            {"transformer.h.1.attn.c_proj.weight", {C, C}},
            {"transformer.h.1.mlp.c_fc.weight", {C, 4 * C}},
            {"transformer.h.1.mlp.c_proj.weight", {4 * C, C}},
            {"transformer.ln_f.bias", {C}}};
        for (const auto& [name, shape] : shapes) safetensors_get(file, name, shape);
        for (const Parameter& parameter : trained.model.table) {
            SCOPED_TRACE(parameter.name);
            const bool head = parameter.name == "lm_head.weight";
            const std::vector<float> values = floats_of(file, (head ? "" : "transformer.") + parameter.name);
            ASSERT_EQ(values.size(), parameter.used_rows * parameter.cols);
            const bool linear =
                parameter.name.find(".c_") != std::string::npos && parameter.name.ends_with("weight");
            const float* ours = trained.model.params + parameter.offset;
            bool same = true;
            for (size_t row = 0; row < parameter.used_rows; row++) {
                for (size_t col = 0; col < parameter.cols; col++) {
                    const size_t theirs = linear ? col * parameter.rows + row : row * parameter.cols + col;
                    same &= values[theirs] == ours[row * parameter.cols + col];
                }
            }
            EXPECT_TRUE(same);
        }
        const json written = json::parse(slurp(folder / "config.json"));
        EXPECT_EQ(written["tie_word_embeddings"], tied);
        EXPECT_EQ(written["vocab_size"], V);
        EXPECT_EQ(written["eos_token_id"], nullptr);
        EXPECT_EQ(written["activation_function"], "gelu_new");
    }
}

TEST(HuggingFace, ExportOfImportIsTheSameFile) {
    const TempFolder first, second;
    for (const bool tied : {true, false}) {
        GptConfig config = small_config();
        config.tied_head = tied;
        Trained trained(config), other(config);
        trained.fill_bits(2);
        trained.write(first.path);
        EXPECT_TRUE(other.read(first.path).empty());
        other.write(second.path);
        EXPECT_TRUE(slurp(first / "model.safetensors") == slurp(second / "model.safetensors"));
        EXPECT_EQ(slurp(first / "config.json"), slurp(second / "config.json"));
        const GptConfig read = huggingface_read_config(first.path);
        EXPECT_EQ(read.layers, config.layers);
        EXPECT_EQ(read.heads, config.heads);
        EXPECT_EQ(read.channels, config.channels);
        EXPECT_EQ(read.seq_len, config.seq_len);
        EXPECT_EQ(read.vocab_size, config.vocab_size);
        EXPECT_EQ(read.tied_head, config.tied_head);
    }
}

TEST(HuggingFace, PaddingIsNeverWrittenAndIsZeroAfterReading) {
    const TempFolder folder;
    for (const size_t V : {1, 127, 128, 503, 512}) {
        GptConfig config = small_config();
        config.vocab_size = V;
        config.tied_head = false;
        Trained trained(config), other(config);
        trained.fill_weights(3);
        trained.write(folder.path);
        EXPECT_EQ(json::parse(slurp(folder / "config.json"))["vocab_size"], V);
        std::fill(other.model.params, other.model.params + table_elements(other.model.table), 9.0f);
        other.read(folder.path);
        for (const char* name : {"wte.weight", "lm_head.weight"}) {
            const Parameter& parameter = parameter_named(other.model.table, name);
            EXPECT_EQ(parameter.rows, (V + 127) / 128 * 128);
            const float* padding = other.model.params + parameter.offset + V * config.channels;
            const float* end = other.model.params + parameter.offset + parameter.size();
            EXPECT_TRUE(std::all_of(padding, end, [](float value) { return value == 0.0f; }));
        }
    }
}

TEST(HuggingFace, ReadsEveryNaming) {
    const TempFolder folder;
    Trained trained(small_config()), other(small_config());
    trained.fill_weights(4);
    const std::string path = folder / "model.safetensors";
    const std::vector<float> mask(19 * 19, 1.0f);
    const float masked_bias = -1e4f;
    const std::string bool_mask(19 * 19, '\1');

    const auto without_prefix = [](Tensors& tensors) {
        Tensors renamed;
        for (const auto& [name, tensor] : tensors) renamed[name.substr(std::strlen("transformer."))] = tensor;
        tensors = renamed;
    };
    const auto with_head = [](Tensors& tensors) {
        tensors["lm_head.weight"] = tensors.at("transformer.wte.weight");
    };
    const auto with_masks = [&](Tensors& tensors) {
        tensors["transformer.h.0.attn.bias"] = {"F32", {1, 1, 19, 19}, mask.data(), mask.size() * 4};
        tensors["transformer.h.1.attn.bias"] = {"BOOL", {1, 1, 19, 19}, bool_mask.data(), bool_mask.size()};
        tensors["transformer.h.1.attn.masked_bias"] = {"F32", {}, &masked_bias, 4};
    };
    const std::vector<std::function<void(Tensors&)>> variants = {
        [](Tensors&) {},
        without_prefix,
        with_head,
        with_masks,
        [&](Tensors& tensors) {
            with_head(tensors);
            with_masks(tensors);
        },
    };
    for (size_t i = 0; i < variants.size(); i++) {
        SCOPED_TRACE(i);
        trained.write(folder.path);
        rewrite(path, variants[i]);
        other.fill_bits(5);
        EXPECT_TRUE(other.read(folder.path).empty());
        EXPECT_EQ(
            std::memcmp(other.model.params, trained.model.params, table_elements(trained.model.table) * 4),
            0);
    }
    trained.write(folder.path);
    rewrite(path, [&](Tensors& tensors) {
        tensors["transformer.h.0.attn.rotary"] = {"F32", {}, &masked_bias, 4};
    });
    const std::vector<std::string> warnings = other.read(folder.path);
    ASSERT_EQ(warnings.size(), 1u);
    EXPECT_NE(warnings[0].find("transformer.h.0.attn.rotary"), std::string::npos) << warnings[0];
}

TEST(HuggingFace, RefusesWhatDoesNotFit) {
    const TempFolder folder;
    Trained trained(small_config()), other(small_config());
    trained.fill_weights(6);
    std::vector<float> head(131 * 21, 0.5f);
    std::vector<int8_t> bytes(21);
    const auto refuse = [&](const std::function<void(Tensors&)>& change,
                            const std::vector<std::string>& parts) {
        trained.write(folder.path);
        rewrite(folder / "model.safetensors", change);
        expect_refused([&] { other.read(folder.path); }, parts);
    };
    refuse(
        [&](Tensors& t) {
            t["lm_head.weight"] = {"F32", {131, 21}, head.data(), head.size() * 4};
        },
        {"lm_head.weight", "wte.weight"});
    refuse(
        [&](Tensors& t) {
            t["lm_head.weight"] = {"F32", {1, 21}, head.data(), 21 * 4};
        },
        {"lm_head.weight"});
    refuse([](Tensors& t) { t.erase("transformer.ln_f.bias"); }, {"no tensor", "ln_f.bias"});
    refuse(
        [](Tensors& t) {
            t.at("transformer.h.0.mlp.c_fc.weight").shape = {84, 21};
        },
        {"h.0.mlp.c_fc.weight", "[84,21]", "[21,84]"});
    refuse(
        [](Tensors& t) {
            t.at("transformer.ln_f.bias").shape = {1, 21};
        },
        {"ln_f.bias", "[1,21]", "[21]"});
    refuse(
        [&](Tensors& t) {
            t["transformer.ln_f.bias"] = {"I8", {21}, bytes.data(), 21};
        },
        {"ln_f.bias", "I8"});
    refuse([](Tensors& t) { t["wte.weight"] = t.at("transformer.wte.weight"); }, {"wte.weight", "without"});

    GptConfig untied = small_config(), larger = small_config();
    untied.tied_head = false;
    larger.vocab_size = 132;  // the same padded size
    trained.write(folder.path);
    Trained needs_head(untied), needs_rows(larger);
    expect_refused([&] { needs_head.read(folder.path); }, {"lm_head.weight"});
    expect_refused([&] { needs_rows.read(folder.path); }, {"wte.weight", "[131,21]", "[132,21]"});

    fs::rename(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors");
    expect_refused([&] { other.read(folder.path); }, {"model.safetensors", "No such file"});
    spill(folder / "model.safetensors.index.json", "{}");
    expect_refused([&] { other.read(folder.path); }, {folder.path, "split over several files"});
}

TEST(HuggingFace, ConfigMustBeGpt2s) {
    const TempFolder folder;
    Trained trained(small_config());
    const auto with = [&](const std::function<void(json&)>& change) {
        trained.write(folder.path);
        rewrite_json(folder / "config.json", change);
    };
    const std::vector<std::pair<std::string, json>> refused = {{"model_type", "llama"},
                                                               {"activation_function", "relu"},
                                                               {"activation_function", "gelu"},
                                                               {"n_inner", 63},
                                                               {"layer_norm_epsilon", 1e-6},
                                                               {"scale_attn_weights", false},
                                                               {"scale_attn_by_inverse_layer_idx", true},
                                                               {"add_cross_attention", true},
                                                               {"tie_word_embeddings", "yes"},
                                                               {"vocab_size", 0},
                                                               {"vocab_size", -5},
                                                               {"n_positions", 1.5},
                                                               {"n_embd", "21"},
                                                               {"n_layer", uint64_t{1} << 40},
                                                               {"n_head", 0},
                                                               {"n_head", 2}};
    for (const auto& [key, value] : refused) {
        SCOPED_TRACE(key + " " + value.dump());
        with([&, k = key, v = value](json& config) { config[k] = v; });
        expect_refused([&] { huggingface_read_config(folder.path); }, {"config.json", key});
    }
    for (const char* key : {"model_type", "vocab_size", "n_positions", "n_embd", "n_layer", "n_head"}) {
        with([&](json& config) { config.erase(key); });
        expect_refused([&] { huggingface_read_config(folder.path); }, {"config.json", key});
    }
    with([](json& config) {  // GPT-2's own config.json has neither of these
        for (const char* key : {"tie_word_embeddings", "scale_attn_weights", "n_inner"}) config.erase(key);
    });
    EXPECT_TRUE(huggingface_read_config(folder.path).tied_head);
    with([](json& config) {
        config["n_inner"] = 84;
        config["activation_function"] = "gelu_pytorch_tanh";
        config["layer_norm_epsilon"] = 0.00001;
    });
    EXPECT_EQ(huggingface_read_config(folder.path).channels, 21u);
    spill(folder / "config.json", "[1]");
    expect_refused([&] { huggingface_read_config(folder.path); }, {"config.json", "model_type"});
    spill(folder / "config.json", "{\"model_type\": \"gpt2\"");
    expect_refused([&] { huggingface_read_config(folder.path); }, {"config.json", "JSON"});
}

// Values half-way between two bf16 numbers go to the one whose last bit is 0; F64 goes through fp32.
TEST(HuggingFace, ConvertsToTheModelsType) {
    const TempFolder folder;
    Trained trained(small_config());
    trained.fill_weights(7);
    const Parameter& bias = parameter_named(trained.model.table, "ln_f.bias");
    const float values[] = {
        1.0f, 1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f, 1.0f + 0x1p-8f + 0x1p-23f, -1.0f - 0x1p-8f, 3.4028235e38f};
    const uint16_t expected[] = {0x3f80, 0x3f80, 0x3f82, 0x3f81, 0xbf80, 0x7f80};
    std::copy(std::begin(values), std::end(values), trained.model.params + bias.offset);
    trained.write(folder.path);

    Gpt<bf16_t> narrow;
    narrow.config = trained.model.config;
    narrow.table = trained.model.table;
    std::vector<bf16_t> params(table_elements(narrow.table));
    narrow.params = params.data();
    std::vector<std::string> warnings;
    huggingface_read(narrow, folder.path, warnings, trained.stream);
    for (size_t i = 0; i < std::size(values); i++) EXPECT_EQ(params[bias.offset + i].bits, expected[i]) << i;

    huggingface_write(folder.path, narrow, 7, trained.stream);
    EXPECT_EQ(json::parse(slurp(folder / "config.json"))["torch_dtype"], "bfloat16");
    EXPECT_EQ(json::parse(slurp(folder / "config.json"))["eos_token_id"], 7);
    EXPECT_EQ(safetensors_open(folder / "model.safetensors").tensors.at("transformer.wte.weight").dtype,
              "BF16");
    EXPECT_TRUE(trained.read(folder.path).empty());
    EXPECT_EQ(trained.model.params[bias.offset + 2], 1.0f + 0x1p-6f);
}

// "0,1" is how some languages write it; files never do.
TEST(HuggingFace, TheSameInEveryLocale) {
    const TempFolder plain, local;
    Trained trained(small_config());
    trained.fill_weights(8);
    trained.write(plain.path);
    if (setlocale(LC_ALL, "de_DE.UTF-8") == nullptr) {  // not installed: make one for this test
        const std::string make = "localedef -i de_DE -f UTF-8 " + local / "de_DE.UTF-8" + " >/dev/null 2>&1";
        setenv("LOCPATH", local.path.c_str(), 1);
        if (system(make.c_str()) != 0 || setlocale(LC_ALL, "de_DE.UTF-8") == nullptr) {
            GTEST_SKIP() << "skipped: there is no German locale, nor localedef to make one";
        }
    }
    EXPECT_STREQ(localeconv()->decimal_point, ",");
    trained.write(local.path);
    EXPECT_EQ(huggingface_read_config(local.path).channels, 21u);
    trained.save(local / "out", 3, 0, {{"lr", 6e-4}});
    EXPECT_EQ(checkpoint_find(local / "out").step, 3u);
    EXPECT_EQ(checkpoint_read_state(local / "out/step_00000003")["lr"], 6e-4);
    setlocale(LC_ALL, "C");
    EXPECT_EQ(slurp(plain / "config.json"), slurp(local / "config.json"));
    EXPECT_TRUE(slurp(plain / "model.safetensors") == slurp(local / "model.safetensors"));
    EXPECT_EQ(checkpoint_find(local / "out").step, 3u);
    EXPECT_EQ(checkpoint_read_state(local / "out/step_00000003")["lr"], 6e-4);
}

// -----------------------------------------------------------------------------------------------------
// Checkpoints

TEST(Checkpoint, ComesBackBitForBit) {
    for (const auto& [kind, state_dtype, normuon] : {std::tuple{OptimizerKind::adamw, Dtype::fp32, false},
                                                     {OptimizerKind::muon, Dtype::fp32, false},
                                                     {OptimizerKind::adamw, Dtype::bf16, false},
                                                     {OptimizerKind::muon, Dtype::bf16, false},
                                                     {OptimizerKind::muon, Dtype::fp32, true},
                                                     {OptimizerKind::muon, Dtype::bf16, true}}) {
        const TempFolder out;
        GptConfig config = small_config();
        config.tied_head = kind == OptimizerKind::adamw;
        Trained trained(config, kind, state_dtype, normuon), other(config, kind, state_dtype, normuon);
        trained.fill_bits(9);
        other.fill_bits(10);
        const json state = {
            {"lr", 0.1}, {"tokens", uint64_t{1} << 63}, {"name", "a \"b\" \u00e9"}, {"tiny", 5e-324}};
        trained.save(out / "new/run", 123, 0, state);
        const FoundCheckpoint found = checkpoint_find(out / "new/run");
        EXPECT_EQ(found.folder, out / "new/run/step_00000123");
        EXPECT_EQ(found.step, 123u);
        EXPECT_TRUE(found.passed_over.empty());
        EXPECT_EQ(checkpoint_read_state(found.folder), state);
        other.load(found.folder);
        EXPECT_TRUE(other.bits() == trained.bits());
        EXPECT_EQ(huggingface_read_config(found.folder).tied_head, config.tied_head);
    }
}

// What another program may rely on.
TEST(Checkpoint, FolderHoldsWhatItSays) {
    const TempFolder out;
    GptConfig config = small_config();
    Trained trained(config);
    trained.fill_bits(11);
    tokenizer_write(out / "bytes.json", byte_tokenizer());
    checkpoint_save(out.path, 7, trained.model, trained.optimizer, {{"path", "not UTF-8: \xff"}},
                    out / "bytes.json", 256, 0, trained.stream);
    const std::string folder = out / "step_00000007";
    EXPECT_EQ(names_in(folder),
              (std::vector<std::string>{"config.json", "model.safetensors", "optimizer_000.safetensors",
                                        "state.json", "tokenizer.json", "tokenizer_config.json"}));
    EXPECT_EQ(slurp(folder + "/tokenizer.json"), slurp(out / "bytes.json"));
    EXPECT_EQ(json::parse(slurp(folder + "/config.json"))["eos_token_id"], 256);
    const json state = json::parse(slurp(folder + "/state.json"));
    EXPECT_EQ(state["step"], 7);
    EXPECT_EQ(state["optimizer_step"], 34);
    EXPECT_EQ(state["files"].size(), 5u);
    for (const auto& [name, digest] : state["files"].items()) {
        EXPECT_EQ(digest["bytes"], fs::file_size(folder + "/" + name));
        EXPECT_EQ(digest["xxh3"], checksum(slurp(folder + "/" + name)));
    }
    EXPECT_EQ(checkpoint_find(out.path).step, 7u);

    const SafeTensorsFile optimizer = safetensors_open(folder + "/optimizer_000.safetensors");
    for (const char* name :
         {"h.1.attn.c_attn.weight[21:42].momentum", "h.0.attn.c_proj.weight[0:21].momentum"}) {
        EXPECT_EQ(safetensors_get(optimizer, name, {21, 21}).dtype, "F32");
    }
    safetensors_get(optimizer, "wte.weight[0:256].m", {256, 21});
    safetensors_get(optimizer, "wte.weight[0:256].v", {256, 21});
    safetensors_get(optimizer, "ln_f.bias[0:1].v", {1, 21});

    Trained half(config, OptimizerKind::muon, Dtype::bf16);
    half.fill_bits(11);
    half.save(out.path, 8);
    const SafeTensorsFile bf16 = safetensors_open(out / "step_00000008/optimizer_000.safetensors");
    EXPECT_EQ(bf16.tensors.size(), optimizer.tensors.size());
    for (const auto& [name, tensor] : bf16.tensors) {
        EXPECT_EQ(tensor.dtype, "BF16");
        EXPECT_EQ(tensor.shape, optimizer.tensors.at(name).shape);
    }
}

TEST(Checkpoint, RefusesAnotherModelOrOptimizer) {
    const TempFolder out;
    Trained trained(small_config());
    trained.fill_bits(12);
    trained.save(out.path, 1);
    const std::string folder = out / "step_00000001";
    const auto refuse = [&](const GptConfig& config, OptimizerKind kind,
                            const std::vector<std::string>& parts, Dtype state_dtype = Dtype::fp32) {
        Trained other(config, kind, state_dtype);
        expect_refused([&] { other.load(folder); }, parts);
    };
    GptConfig deeper = small_config(), shallower = small_config(), heads = small_config();
    deeper.layers = 3;
    shallower.layers = 1;
    heads.heads = 7;
    refuse(deeper, OptimizerKind::muon, {folder, "h.2.ln_1"});
    refuse(shallower, OptimizerKind::muon, {folder, "h.1."});
    refuse(heads, OptimizerKind::muon, {folder, "3 heads"});
    refuse(small_config(), OptimizerKind::adamw, {folder, "--optimizer"});
    refuse(small_config(), OptimizerKind::muon, {folder, "F32", "BF16", "--state-dtype"}, Dtype::bf16);
    fs::remove(folder + "/optimizer_000.safetensors");
    refuse(small_config(), OptimizerKind::muon, {"optimizer_000.safetensors", "No such file"});
}

TEST(Checkpoint, FindsTheNewestCompleteOneAmongClutter) {
    const TempFolder out;
    EXPECT_EQ(checkpoint_find(out / "absent").folder, "");
    EXPECT_EQ(checkpoint_find(out.path).folder, "");
    Trained trained(small_config());
    for (const uint64_t step : {5, 9, 10, 12, 14}) trained.save(out.path, step);
    const std::string model = out / "step_00000012/model.safetensors";
    fs::resize_file(model, fs::file_size(model) - 1);
    fs::copy(out / "step_00000005", out / "step_00000013");  // says that it is of step 5
    fs::remove(out / "step_00000014/optimizer_000.safetensors");
    fs::create_directory(out / "step_00000015");
    spill(out / "step_00000016", "a file with the name of a folder");
    for (const char* other : {"step_00000010.bak", "step_00000099_old", "step_0000000000000099", "step_99",
                              "step_", "step_0000009x", "xstep_00000099", "step_00000099 ", "step_-0000099",
                              "step_99999999999999999999", "Step_00000099", "model_00000010.bin.bak",
                              "DONE_00000012", ".tmp_step_00000099", "step_000000099"}) {
        fs::copy(out / "step_00000010", out / other, fs::copy_options::recursive);
    }
    const FoundCheckpoint found = checkpoint_find(out.path);
    EXPECT_EQ(found.folder, out / "step_00000010");
    EXPECT_EQ(found.step, 10u);
    const char* reasons[][2] = {{"step_00000016: ", "Not a directory"},
                                {"step_00000015: ", "state.json"},
                                {"step_00000014: ", "optimizer_000.safetensors: No such file"},
                                {"step_00000013: ", "of step 5"},
                                {"step_00000012: ", "model.safetensors has "}};
    ASSERT_EQ(found.passed_over.size(), std::size(reasons));
    for (size_t i = 0; i < std::size(reasons); i++) {
        EXPECT_TRUE(found.passed_over[i].starts_with(reasons[i][0])) << found.passed_over[i];
        EXPECT_NE(found.passed_over[i].find(reasons[i][1]), std::string::npos) << found.passed_over[i];
    }
    spill(out / "file", "");
    expect_refused([&] { checkpoint_find(out / "file"); }, {out / "file", "Not a directory"});
}

TEST(Checkpoint, StepsAreOrderedAsNumbers) {
    const TempFolder out;
    Trained trained(small_config());
    for (const uint64_t step : {99, 100, 99'999'999}) trained.save(out.path, step);
    EXPECT_EQ(checkpoint_find(out.path).step, 99'999'999u);
    fs::remove_all(out / "step_99999999");
    EXPECT_EQ(checkpoint_find(out.path).step, 100u);
    trained.save(out.path, 100'000'000);
    trained.save(out.path, 99'999'999);
    EXPECT_EQ(checkpoint_find(out.path).folder, out / "step_100000000");
    trained.save(out.path, std::numeric_limits<uint64_t>::max());
    EXPECT_EQ(checkpoint_find(out.path).step, std::numeric_limits<uint64_t>::max());
}

// One flipped bit anywhere, or one byte less, and the checkpoint before it is taken.
TEST(Checkpoint, PassesOverDamage) {
    const TempFolder out;
    Trained trained(small_config());
    trained.fill_bits(13);
    tokenizer_write(out / "bytes.json", byte_tokenizer());
    for (const uint64_t step : {1, 2}) {
        checkpoint_save(out.path, step, trained.model, trained.optimizer, {{"lr", 6e-4}, {"text", "abc"}},
                        out / "bytes.json", 256, 0, trained.stream);
    }
    std::mt19937 random(1);
    for (const std::string& name : names_in(out / "step_00000002")) {
        const std::string path = out / "step_00000002/" + name;
        const std::string good = slurp(path);
        std::vector<size_t> places = {0, 9, good.size() / 2, good.size() - 3};
        for (int i = 0; i < 4; i++) places.push_back(random() % (good.size() - 1));
        for (const size_t place : places) {
            std::string bad = good;
            bad[place] ^= 1;
            spill(path, bad);
            const FoundCheckpoint found = checkpoint_find(out.path);
            EXPECT_EQ(found.step, 1u) << name << " byte " << place;
            ASSERT_EQ(found.passed_over.size(), 1u);
            EXPECT_NE(found.passed_over[0].find(name), std::string::npos) << found.passed_over[0];
        }
        for (const std::string& cut : {good.substr(0, good.size() - 2), std::string()}) {
            spill(path, cut);
            EXPECT_EQ(checkpoint_find(out.path).step, 1u) << name << " cut";
        }
        spill(path, good);
        EXPECT_EQ(checkpoint_find(out.path).step, 2u);
    }
    rewrite_json(out / "step_00000002/state.json", [](json& content) { content["version"] = 1; });
    expect_refused([&] { checkpoint_read_state(out / "step_00000002"); }, {"state.json", "version 1"});
    rewrite_json(out / "step_00000002/state.json", [](json& content) { content["state"]["lr"] = 7e-4; });
    expect_refused([&] { checkpoint_read_state(out / "step_00000002"); }, {"state.json"});
}

TEST(Checkpoint, KeepsTheNewestCompleteOnes) {
    const TempFolder out;
    Trained trained(small_config());
    for (uint64_t step = 1; step <= 6; step++) trained.save(out.path, step, 3);
    EXPECT_EQ(names_in(out.path),
              (std::vector<std::string>{"step_00000004", "step_00000005", "step_00000006"}));
    // An incomplete one does not count and is left alone, as are later ones and foreign names.
    fs::resize_file(out / "step_00000006/model.safetensors", 5);
    trained.save(out.path, 50);
    fs::create_directory(out / "step_00000001_mine");
    trained.save(out.path, 7, 2);
    EXPECT_EQ(names_in(out.path),
              (std::vector<std::string>{"step_00000001_mine", "step_00000005", "step_00000006",
                                        "step_00000007", "step_00000050"}));
    trained.save(out.path, 8, 1);
    EXPECT_TRUE(fs::exists(out / "step_00000008"));
    EXPECT_FALSE(fs::exists(out / "step_00000007"));
    trained.save(out.path, 9, 0);
    EXPECT_TRUE(fs::exists(out / "step_00000008"));
}

TEST(Checkpoint, ReplacesOneOfTheSameStep) {
    const TempFolder out;
    Trained trained(small_config()), other(small_config());
    trained.fill_bits(14);
    other.fill_bits(15);
    trained.save(out.path, 4);
    other.save(out.path, 4, 1);
    EXPECT_EQ(names_in(out.path), std::vector<std::string>{"step_00000004"});
    trained.load(checkpoint_find(out.path).folder);
    EXPECT_TRUE(trained.bits() == other.bits());
    // Even where that is no checkpoint.
    fs::remove_all(out / "step_00000004");
    spill(out / "step_00000004", "a file");
    other.save(out.path, 4);
    EXPECT_EQ(checkpoint_find(out.path).step, 4u);
}

// The states that a crash can leave: a half-written folder, a complete one not yet renamed, and, between the
// two renames of a replacement, the old one under its stand-in name.
TEST(Checkpoint, RecoversFromAnInterruptedSave) {
    const TempFolder out;
    Trained trained(small_config()), other(small_config());
    trained.fill_bits(16);
    trained.save(out.path, 4);
    fs::create_directories(out / ".tmp_step_00000005");
    spill(out / ".tmp_step_00000005/config.json", "{");
    fs::copy(out / "step_00000004", out / ".tmp_step_00000004");
    fs::rename(out / "step_00000004", out / ".old_step_00000004");
    const FoundCheckpoint found = checkpoint_find(out.path);
    EXPECT_EQ(found.step, 4u);
    other.load(found.folder);
    EXPECT_TRUE(trained.bits() == other.bits());
    other.save(out.path, 6);
    EXPECT_EQ(names_in(out.path), (std::vector<std::string>{"step_00000004", "step_00000006"}));
    // The old one of a replacement that was completed is no longer needed.
    fs::copy(out / "step_00000004", out / ".old_step_00000006");
    EXPECT_EQ(checkpoint_find(out.path).folder, out / "step_00000006");
    other.save(out.path, 7);
    EXPECT_EQ(names_in(out.path),
              (std::vector<std::string>{"step_00000004", "step_00000006", "step_00000007"}));
}

// A child saves, reports when a save begins (0) and when it has returned (its step), and is killed at a
// random moment after the first has begun.
TEST(Checkpoint, SurvivesKillAtAnyMoment) {
    const TempFolder out;
    const GptConfig config = {
        .layers = 3, .heads = 4, .channels = 128, .seq_len = 64, .vocab_size = 1000, .tied_head = true};
    Trained trained(config), other(config);
    trained.fill_bits(1);
    const auto start = std::chrono::steady_clock::now();
    trained.save(out.path, 1);
    const double one_save = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

    std::mt19937 random(std::random_device{}());
    const uint64_t begins = 0;
    uint64_t last_complete = 1;
    int interrupted = 0;
    for (int round = 0; round < 20; round++) {
        int reports[2];
        ASSERT_EQ(pipe(reports), 0);
        const pid_t child = fork();
        if (child == 0) {
            // The first save replaces the newest one.
            for (uint64_t step = last_complete;; step++) {
                trained.fill_bits(step);
                if (write(reports[1], &begins, sizeof(begins)) != sizeof(begins)) _exit(1);
                trained.save(out.path, step, 2);
                if (write(reports[1], &step, sizeof(step)) != sizeof(step)) _exit(1);
            }
        }
        close(reports[1]);
        uint64_t step;
        ASSERT_EQ(read(reports[0], &step, sizeof(step)), ssize_t(sizeof(step)));
        usleep(static_cast<useconds_t>(std::uniform_real_distribution(0.0, 3e6 * one_save)(random)));
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
        while (read(reports[0], &step, sizeof(step)) == sizeof(step))
            if (step != begins) last_complete = step;
        close(reports[0]);

        for (const std::string& name : names_in(out.path)) interrupted += name.starts_with(".");
        const FoundCheckpoint found = checkpoint_find(out.path);
        ASSERT_GE(found.step, last_complete);
        EXPECT_LE(found.step, last_complete + 1);
        EXPECT_TRUE(found.passed_over.empty()) << found.passed_over[0];  // a final name means complete
        other.load(found.folder);
        trained.fill_bits(found.step);
        EXPECT_TRUE(other.bits() == trained.bits());
        last_complete = found.step;
    }
    EXPECT_GT(interrupted, 0) << "no kill came during a save";
    trained.save(out.path, last_complete + 1, 1);
    EXPECT_EQ(names_in(out.path).size(), 1u);
}

// What a save that cannot succeed must leave: its reason with the path, and everything as it was.
int expect_failed_save(Trained& trained, const std::string& out, const std::string& reason) {
    const std::vector<std::string> before = names_in(out);
    try {
        trained.save(out, 2, 1);
        fprintf(stderr, "the save succeeded\n");
        return failed;
    } catch (const Error& error) {
        const std::string text = error.what();
        const bool named = text.find(out + "/.tmp_step_00000002") != std::string::npos &&
                           text.find(reason) != std::string::npos && text.find('\n') == std::string::npos;
        if (!named) fprintf(stderr, "the message is: %s\n", error.what());
        const bool kept = names_in(out) == before && checkpoint_find(out).step == 1;
        if (!kept) fprintf(stderr, "the folder has changed\n");
        return named && kept ? passed : failed;
    }
}

TEST(Checkpoint, ReportsAFileSizeLimit) {
    const TempFolder out;
    Trained trained(small_config());
    trained.save(out.path, 1);
    const int result = in_child([&] {
        signal(SIGXFSZ, SIG_IGN);  // as the program does
        for (const rlim_t limit : {10u, 1000u, 60'000u}) {
            const rlimit limits = {limit, RLIM_INFINITY};
            setrlimit(RLIMIT_FSIZE, &limits);
            if (expect_failed_save(trained, out.path, "File too large") != passed) return failed;
        }
        const rlimit unlimited = {RLIM_INFINITY, RLIM_INFINITY};
        setrlimit(RLIMIT_FSIZE, &unlimited);
        trained.save(out.path, 2, 1);
        return checkpoint_find(out.path).step == 2 ? passed : failed;
    });
    EXPECT_EQ(result, passed);
}

// Mounts a small disk that only this process sees, and that goes with it. False where that is not permitted.
bool mount_disk(const std::string& path, size_t bytes) {
    const std::string user = std::to_string(getuid()), group = std::to_string(getgid());
    if (unshare(CLONE_NEWNS) != 0) {  // not root: become the root of a name space of one's own
        if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
        try {
            spill("/proc/self/setgroups", "deny");
            spill("/proc/self/uid_map", "0 " + user + " 1");
            spill("/proc/self/gid_map", "0 " + group + " 1");
        } catch (const Error&) {
            return false;
        }
    }
    mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
    fs::create_directory(path);
    return mount("tmpfs", path.c_str(), "tmpfs", 0, ("size=" + std::to_string(bytes)).c_str()) == 0;
}

TEST(Checkpoint, ReportsAFullDisk) {
    const TempFolder out;
    Trained trained(small_config());
    trained.save(out / "sizing", 1);
    size_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(out / "sizing/step_00000001")) bytes += entry.file_size();
    const int result = in_child([&] {
        const std::string disk = out / "disk";
        if (!mount_disk(disk, bytes * 3 / 2 + 32'768)) return not_permitted;
        trained.save(disk, 1);
        if (expect_failed_save(trained, disk, "No space left on device") != passed) return failed;
        return expect_failed_save(trained, disk, "No space left on device");
    });
    if (result == not_permitted) GTEST_SKIP() << "skipped: mounting a small disk is not permitted here";
    EXPECT_EQ(result, passed);
}

TEST(Checkpoint, ReportsAReadOnlyFolder) {
    const TempFolder out;
    Trained trained(small_config());
    trained.save(out.path, 1);
    fs::permissions(out.path, fs::perms(0555));
    const int result = in_child([&] {
        if (geteuid() == 0 && setuid(65534) != 0) return failed;  // root may write anywhere; nobody may not
        return expect_failed_save(trained, out.path, "Permission denied");
    });
    fs::permissions(out.path, fs::perms(0755));
    EXPECT_EQ(result, passed);
}

// An old checkpoint that cannot be removed is reported; what is left of it is no checkpoint by its name.
TEST(Checkpoint, NeverHalfRemovesUnderAFinalName) {
    const TempFolder out;
    Trained trained(small_config());
    trained.save(out.path, 1);
    const fs::path old = out / "step_00000001", gone = out / ".tmp_step_00000001";
    fs::create_directory(old / "locked");
    spill(old / "locked/file", "");
    for (const fs::path& open : {fs::path(out.path), old}) fs::permissions(open, fs::perms(0777));
    fs::permissions(old / "locked", fs::perms(0555));
    const int result = in_child([&] {
        if (geteuid() == 0 && setuid(65534) != 0) return failed;
        expect_refused([&] { trained.save(out.path, 2, 1); }, {gone, "cannot remove"});
        return testing::Test::HasFailure() ? failed : passed;
    });
    EXPECT_EQ(result, passed);
    EXPECT_EQ(names_in(out.path), (std::vector<std::string>{gone.filename(), "step_00000002"}));
    EXPECT_EQ(checkpoint_find(out.path).step, 2u);
    fs::permissions(gone / "locked", fs::perms(0755));
    trained.save(out.path, 3, 1);
    EXPECT_EQ(names_in(out.path), std::vector<std::string>{"step_00000003"});
}

TEST(Checkpoint, RefusesATokenizerThatIsNotThere) {
    const TempFolder out;
    Trained trained(small_config());
    expect_refused(
        [&] {
            checkpoint_save(out.path, 1, trained.model, trained.optimizer, {}, out / "absent.json", -1, 0,
                            trained.stream);
        },
        {out / "absent.json", "No such file"});
    EXPECT_TRUE(names_in(out.path).empty());
}

// -----------------------------------------------------------------------------------------------------
// For dev/reference/check_transformers.py: checkpoints with the logits that this program computes from them.
// They stay where MUGPT_EXPORT_DIR says; without it they are only computed from the reloaded weights here.

TEST(Export, CheckpointsWithTheirLogits) {
    const TempFolder temporary;
    const char* directory = getenv("MUGPT_EXPORT_DIR");
    const std::string out = directory != nullptr ? directory : temporary.path;
    for (const bool tied : {true, false}) {
        const size_t T = 50, V = 257;
        const GptConfig config = {
            .layers = 3, .heads = 4, .channels = 48, .seq_len = 64, .vocab_size = V, .tied_head = tied};
        Trained trained(config), other(config);
        trained.fill_weights(17);
        std::vector<int> tokens(T);
        for (size_t t = 0; t < T; t++) tokens[t] = static_cast<int>((t * 97 + 13) % V);
        std::vector<float> logits(T * V), again(T * V);
        gpt_logits(trained.model, logits.data(), tokens.data(), 1, T, 0, T, trained.stream);

        const std::string folder = out + (tied ? "/tied" : "/untied");
        fs::create_directories(folder);
        tokenizer_write(folder + "/bytes.json", byte_tokenizer());
        checkpoint_save(folder, 1, trained.model, trained.optimizer, {}, folder + "/bytes.json", 256, 0,
                        trained.stream);
        safetensors_write(folder + "/logits.safetensors",
                          {{"tokens", {"I32", {T}, tokens.data(), T * 4}},
                           {"logits", {"F32", {T, V}, logits.data(), T * V * 4}}},
                          {});
        other.load(folder + "/step_00000001");
        gpt_logits(other.model, again.data(), tokens.data(), 1, T, 0, T, other.stream);
        EXPECT_EQ(std::memcmp(logits.data(), again.data(), T * V * 4), 0);
    }
}

}  // namespace
