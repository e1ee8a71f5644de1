// The program of `make MARCH=any` under every instruction set that this machine has: the C library is told
// (GLIBC_TUNABLES) to do without the better ones, and its loader then takes the library of ops that a lesser
// machine would get. It must say so, train alike, and where nothing is left hold nothing but x86-64.
#include <regex>
#include <set>

#include "dev/test/program.h"

namespace {

struct Level {
    std::string folder, without, vectors;  // where its ops lie, what it lacks, how the program names it
};
const Level x86_64 = {"", "AVX2", "portable vectors"};
const Level v3 = {"glibc-hwcaps/x86-64-v3", "AVX512F", "AVX2"};
const Level v4 = {"glibc-hwcaps/x86-64-v4", "", "AVX-512"};

// What a command writes, its errors too.
std::string output_of(const std::string& command) {
    FILE* const pipe = popen((command + " 2>&1").c_str(), "r");
    std::string text;
    char piece[4096];
    while (const size_t count = fread(piece, 1, sizeof(piece), pipe)) text.append(piece, count);
    pclose(pipe);
    return text;
}

std::string kernels(const Level& level) {
    return (fs::path(program()).parent_path() / level.folder / "libmugpt_kernels.so").string();
}

struct Portable : testing::Test {
    void SetUp() override {
        if (!fs::exists(kernels(x86_64))) GTEST_SKIP() << "one instruction set: this is no x86-64";
    }

    // Whether this machine and its loader have a level.
    static bool have(const Level& level) {
        const std::string name = fs::path(level.folder).filename();
        return output_of("/lib64/ld-linux-x86-64.so.2 --help").find(name + " (supported") !=
               std::string::npos;
    }

    // The log of twenty steps.
    std::vector<json> train(const Level& level, const Arguments& kind) const {
        setenv("GLIBC_TUNABLES", ("glibc.cpu.hwcaps=-" + level.without).c_str(), 1);
        fs::remove_all(folder / "out");
        const Result result = run(folder, tiny(folder, "out", kind));
        EXPECT_EQ(result.status, 0) << result.err;
        // What the library throws, the program catches.
        expect_rejected(folder, tiny(folder, "refused", {"--tf32"}), {"--tf32", "GPUs"});
        unsetenv("GLIBC_TUNABLES");
        const std::vector<json> lines = log_lines(folder / "out");
        const std::string device = lines.at(0).at("device");
        EXPECT_NE(device.find("threads, " + level.vectors), std::string::npos) << device;
        return lines;
    }
    std::vector<std::string> train_to_the_bit(const Level& level, const Arguments& kind) const {
        train(level, kind);
        return training_lines(folder / "out");
    }

    TempFolder folder;
};

// Instructions that x86-64 has not: whatever begins with v is AVX, and those of x86-64-v3 beside it.
size_t count_newer_instructions(const std::string& file) {
    const char* const names =
        "v[a-z0-9]+|andn|bextr|bls[irm].*|bzhi|mulx|rorx|s(ar|hl|hr)x|movbe|popcnt|lzcnt";
    return std::stoul(
        output_of("objdump -d --no-show-raw-insn " + file + " | grep -cE '\\s(" + names + ")\\s'"));
}

}  // namespace

TEST_F(Portable, TheOldestMachineIsServed) {
    const std::vector<json> log = train(x86_64, {});
    EXPECT_LT(log.back().at("val_loss"), 4.4);  // log(101) = 4.6 at first
    EXPECT_EQ(count_newer_instructions(program()), 0u);
    EXPECT_EQ(count_newer_instructions(kernels(x86_64)), 0u);
    EXPECT_GT(count_newer_instructions(kernels(v3)), 1000u);  // the count sees them
}

// fma(a, b, c) rounds once where x86-64 rounds a product and a sum: losses differ by roundings of fp32, 6e-8.
TEST_F(Portable, Avx2TrainsAsTheOldestDoes) {
    if (!have(v3)) GTEST_SKIP() << "no x86-64-v3 here";
    for (const char* optimizer : {"adamw", "muon"}) {
        const std::vector<json> expected = train(x86_64, {"--optimizer", optimizer});
        const std::vector<json> actual = train(v3, {"--optimizer", optimizer});
        ASSERT_EQ(actual.size(), expected.size());
        for (size_t i = 0; i < actual.size(); i++) {
            if (actual[i]["type"] != "train") continue;
            const double loss = actual[i].at("loss"), expected_loss = expected[i].at("loss");
            EXPECT_NEAR(loss / expected_loss, 1, 2e-6) << "step " << i;
        }
    }
}

// Every sum has an order that no vector's length changes, a product's being one chain of fma in the order of
// k.
TEST_F(Portable, Avx512GivesTheBitsOfAvx2) {
    if (!have(v4)) GTEST_SKIP() << "no x86-64-v4 here";
    for (const char* dtype : {"fp32", "bf16", "fp16"}) {
        for (const char* optimizer : {"adamw", "muon"}) {
            const Arguments kind = {"--optimizer", optimizer, "--dtype", dtype};
            EXPECT_EQ(train_to_the_bit(v4, kind), train_to_the_bit(v3, kind)) << optimizer << " " << dtype;
        }
    }
}

// Ops take from the program what reports failures, and no inline function that was compiled for x86-64.
TEST_F(Portable, OpsCallTheirOwnCopies) {
    const std::string bindings = output_of("LD_BIND_NOW=1 LD_DEBUG=bindings " + program() + " --version");
    const std::regex binding("binding file [^ ]*libmugpt_kernels.so [^ ]* to [^ ]*train_gpt [^`]*`([^']*)'");
    std::set<std::string> from_program;
    for (std::sregex_iterator match(bindings.begin(), bindings.end(), binding), end; match != end; ++match)
        from_program.insert((*match)[1]);
    EXPECT_EQ(from_program, std::set<std::string>{"_Z4failPKcz"});
}
