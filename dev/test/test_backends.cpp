// Two builds of one program: twenty training steps of build/sim/train_gpt, the CUDA sources in the simulator,
// against build/cpu/train_gpt. Both start from the same weights and see the same data, so their losses may
// differ by rounding alone.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dev/test/temp_folder.h"
#include "model/safetensors.h"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The folder of this build's programs; the CPU's stand beside it.
fs::path build_folder() { return fs::read_symlink("/proc/self/exe").parent_path(); }

struct Step {
    double loss, grad_norm;
};

struct Backends : testing::Test {
    Backends() {
        std::ofstream text(folder / "text.txt");
        for (int i = 0; i < 400; i++) text << "the " << i * i % 97 << " and the " << i % 7 << ";\n";
        text.close();
        command(build_folder() / "../cpu/train_gpt",
                "tokenize --input " + (folder / "text.txt") + " --out " + (folder / "text"));
    }

    void command(const fs::path& program, const std::string& arguments) {
        const std::string line = program.string() + " " + arguments + " > " + (folder / "output") + " 2>&1";
        const int status = system(line.c_str());
        std::ifstream output(folder / "output");
        const std::string text((std::istreambuf_iterator<char>(output)), {});
        ASSERT_EQ(status, 0) << line << "\n" << text;
    }

    std::vector<Step> train(const std::string& backend, const std::string& optimizer,
                            const std::string& dtype, const std::string& state_dtype) {
        const std::string out = folder / (backend + optimizer + dtype + state_dtype);
        command(build_folder() / ".." / backend / "train_gpt",
                "--train-data '" + (folder / "text_train_*.bin") + "' --out " + out + " --optimizer " +
                    optimizer + " --dtype " + dtype + " --state-dtype " + state_dtype + " --muon-ns-dtype " +
                    (dtype == "fp32" ? "fp32" : "auto") +  // fp16 in the simulator, fp32 on the CPU
                    // One head of 64: in 16 bits the tensor-core attention runs, in fp32 the general one.
                    " --layers 1 --heads 1 --channels 64 --seq-len 19 --batch-size 2 --tokens-per-step 76"
                    " --steps 20 --lr 2e-3 --sample-tokens 0");
        std::vector<Step> steps;
        std::ifstream log(out + "/log.jsonl");
        for (std::string line; std::getline(log, line);) {
            const json entry = json::parse(line);
            if (entry["type"] == "train") steps.push_back({entry["loss"], entry["grad_norm"]});
        }
        EXPECT_EQ(steps.size(), 20u);
        return steps;
    }

    void compare(const std::string& optimizer, const std::string& dtype, double tolerance,
                 const std::string& state_dtype = "fp32") {
        SCOPED_TRACE(optimizer + " " + dtype + " " + state_dtype);
        const std::vector<Step> cpu = train("cpu", optimizer, dtype, state_dtype),
                                sim = train("sim", optimizer, dtype, state_dtype);
        ASSERT_EQ(cpu.size(), sim.size());
        for (size_t i = 0; i < cpu.size(); i++) {
            EXPECT_NEAR(sim[i].loss / cpu[i].loss, 1, tolerance) << "step " << i + 1;
            EXPECT_NEAR(sim[i].grad_norm / cpu[i].grad_norm, 1, 30 * tolerance) << "step " << i + 1;
        }
        EXPECT_LT(cpu.back().loss, 0.9 * cpu.front().loss) << "nothing was learnt, so little was compared";
    }

    TempFolder folder;
};

TEST_F(Backends, Fp32) {
    compare("adamw", "fp32", 1e-4);
    compare("muon", "fp32", 1e-4);
}
TEST_F(Backends, Bf16) {
    compare("adamw", "bf16", 1e-2);
    compare("muon", "bf16", 1e-2);
}
TEST_F(Backends, Fp16) {
    compare("adamw", "fp16", 1e-2);
    compare("muon", "fp16", 1e-2);
}
// Both round with the same random bits: averages that fp32 computes alike up to its last places are rounded
// alike but for a few. With other bits, half of them or more would not be.
TEST_F(Backends, Bf16State) {
    for (const std::string optimizer : {"adamw", "muon"}) {
        compare(optimizer, "fp32", 1e-4, "bf16");
        const auto state = [&](const std::string& backend) {
            const std::string out = folder / (backend + optimizer + "fp32bf16");
            return safetensors_open(out + "/step_00000020/optimizer_000.safetensors");
        };
        const SafeTensorsFile cpu = state("cpu"), sim = state("sim");
        size_t averages = 0, equal = 0;
        for (const auto& [name, tensor] : cpu.tensors) {
            if (tensor.dtype != "BF16") continue;
            const auto* a = static_cast<const uint16_t*>(tensor.data);
            const auto* b = static_cast<const uint16_t*>(sim.tensors.at(name).data);
            averages += tensor.bytes / 2;
            for (size_t i = 0; i < tensor.bytes / 2; i++) equal += a[i] == b[i];
        }
        EXPECT_GT(averages, 50000u);
        EXPECT_GT(equal, averages * 9 / 10) << optimizer << ", of " << averages;
    }
}

// The whole program on two ranks, over NCCL and with overlap: each line's numbers, and every saved weight, as
// on one rank that plays both.
TEST_F(Backends, RanksOverNccl) {
    setenv("CUDASIM_DEVICES", "2", 1);
    const auto run = [&](int ranks) {
        const std::string out = folder / ("ranks" + std::to_string(ranks));
        command(build_folder() / "train_gpt",
                "--train-data '" + (folder / "text_train_*.bin") + "' --out " + out +
                    " --optimizer muon --dtype bf16 --reduce-dtype bf16 --layers 1 --heads 1 --channels 64"
                    " --seq-len 19 --batch-size 1 --tokens-per-step 38 --steps 4 --lr 2e-3 --sample-tokens 0"
                    " --virtual-ranks 2 --ranks " +
                    std::to_string(ranks));
        std::vector<double> numbers;
        std::ifstream log(out + "/log.jsonl");
        for (std::string line; std::getline(log, line);) {
            const json entry = json::parse(line);
            if (entry["type"] != "train") continue;
            for (const char* key : {"loss", "grad_norm", "lr", "orthogonalized"})
                numbers.push_back(entry[key]);
        }
        EXPECT_EQ(numbers.size(), 4u * 4u);
        const SafeTensorsFile model = safetensors_open(out + "/step_00000004/model.safetensors");
        std::map<std::string, std::string> weights;
        for (const auto& [name, tensor] : model.tensors)
            weights[name] = {static_cast<const char*>(tensor.data), tensor.bytes};
        return std::pair(numbers, weights);
    };
    EXPECT_EQ(run(1), run(2));
    unsetenv("CUDASIM_DEVICES");
}

}  // namespace
