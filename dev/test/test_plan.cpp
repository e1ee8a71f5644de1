// The plan of the house as a test: which folder may include which, no circles, no backend conditionals above
// kernels/, and foreign headers only in the rooms that are made for them. Reads the sources; run it from the
// project's root.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace fs = std::filesystem;

namespace {

struct Source {
    std::vector<std::string> lines;
    std::vector<std::string> ours;    // #include "..."
    std::vector<std::string> theirs;  // #include <...>
};

std::map<std::string, Source> read_sources(const fs::path& root) {
    std::map<std::string, Source> sources;
    const std::regex include(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"].*)");
    for (auto entry = fs::recursive_directory_iterator(root); entry != fs::recursive_directory_iterator();
         ++entry) {
        const std::string path = fs::relative(entry->path(), root).string();
        if (entry->is_directory() && (path == "build" || path == ".git" || path == "runs")) {
            entry.disable_recursion_pending();
            continue;
        }
        const std::string ending = entry->path().extension().string();
        if (!std::set<std::string>{".h", ".cpp", ".cu", ".cuh"}.contains(ending)) continue;
        Source& source = sources[path];
        std::ifstream file(entry->path());
        for (std::string line; std::getline(file, line);) {
            std::smatch match;
            if (std::regex_match(line, match, include)) {
                (match[1] == "\"" ? source.ours : source.theirs).push_back(match[2]);
            }
            source.lines.push_back(line);
        }
    }
    return sources;
}

// The room a path is in: its first folder, or "program" for files at the root.
std::string room(const std::string& path) {
    const size_t slash = path.find('/');
    return slash == std::string::npos ? "program" : path.substr(0, slash);
}

// Which rooms a room may look into, itself aside. dev may look anywhere and is not listed.
const std::map<std::string, std::set<std::string>> may_include = {
    {"kernels", {}},
    {"optim", {"kernels"}},
    {"data", {"kernels"}},
    {"dist", {"optim", "kernels"}},
    {"model", {"optim", "data", "kernels"}},
    {"cli", {"model", "optim", "data", "dist", "kernels", "build"}},
    {"program", {"cli", "model", "optim", "data", "dist", "kernels"}},
};

// What breaks the plan in these sources, one line each.
std::vector<std::string> faults(const std::map<std::string, Source>& sources) {
    std::vector<std::string> found;
    for (const auto& [path, source] : sources) {
        const std::string here = room(path);
        if (here != "dev" && !may_include.contains(here)) found.push_back(path + ": not a room of the plan");
        const bool test = here == "dev" || path.starts_with("test_");
        for (const std::string& include : source.ours) {
            const std::string there = room(include);
            if (there == "dev" && !test) found.push_back(path + " includes " + include);
            if (!test && may_include.contains(here) && there != here &&
                !may_include.at(here).contains(there)) {
                found.push_back(path + " includes " + include);
            }
            for (const char* backend : {"kernels/cpu/", "kernels/cuda/"}) {
                if (include.starts_with(backend) && !path.starts_with(backend) && here != "dev" &&
                    path != "dist/transport_nccl.cpp") {
                    found.push_back(path + " includes " + include);
                }
            }
        }
        for (const std::string& include : source.theirs) {
            const auto only_in = [&](const char* prefix, std::vector<const char*> rooms) {
                if (!include.starts_with(prefix)) return;
                for (const char* allowed : rooms) {
                    if (path.starts_with(allowed)) return;
                }
                found.push_back(path + " includes <" + include + ">");
            };
            for (const char* cuda : {"cuda", "cublas", "nccl"})
                only_in(cuda, {"kernels/cuda/", "dist/transport_nccl.cpp", "dev/"});
            only_in("mpi", {"dev/"});
            for (const char* blas : {"cblas", "openblas", "mkl"}) only_in(blas, {"dev/"});
        }
        if (here == "kernels" || here == "dev") continue;
        for (const std::string& line : source.lines) {
            static const std::regex conditional(R"(^\s*#\s*(if|ifdef|ifndef|elif).*)");
            static const std::regex backend(R"(CUDA|__NVCC__|CPU|AVX|_OPENMP|BACKEND|SIM)");
            if (std::regex_match(line, conditional) && std::regex_search(line, backend)) {
                found.push_back(path + ": " + line);
            }
        }
    }
    return found;
}

// A circle of includes, "" where there is none.
std::string circle(const std::map<std::string, Source>& sources) {
    std::map<std::string, int> state;  // 1 = on the way down, 2 = done
    std::string result;
    const std::function<void(const std::string&, const std::string&)> visit = [&](const std::string& path,
                                                                                  const std::string& trail) {
        if (!sources.contains(path) || state[path] == 2 || !result.empty()) return;
        if (state[path] == 1) {
            result = trail + path;
            return;
        }
        state[path] = 1;
        for (const std::string& include : sources.at(path).ours) visit(include, trail + path + " -> ");
        state[path] = 2;
    };
    for (const auto& [path, source] : sources) visit(path, "");
    return result;
}

}  // namespace

TEST(Plan, NoIncludeRunsUpwardAndForeignHeadersStayInTheirRooms) {
    const auto sources = read_sources(".");
    ASSERT_TRUE(sources.contains("kernels/kernels.h")) << "run this from the project's root";
    for (const std::string& fault : faults(sources)) ADD_FAILURE() << fault;
}

TEST(Plan, NoCircles) { EXPECT_EQ(circle(read_sources(".")), ""); }

TEST(Plan, LinesAreAtMost110Characters) {
    for (const auto& [path, source] : read_sources(".")) {
        for (size_t i = 0; i < source.lines.size(); i++) {
            // UTF-8 continuation bytes are not characters.
            const auto characters = std::count_if(source.lines[i].begin(), source.lines[i].end(),
                                                  [](char c) { return (c & 0xc0) != 0x80; });
            EXPECT_LE(characters, 110) << path << ":" << i + 1;
        }
    }
}

// The checks above find what they are made for.
TEST(Plan, PlantedFaultsAreFound) {
    const auto count = [](const std::string& path, const Source& source) {
        return faults({{path, source}}).size();
    };
    EXPECT_EQ(count("optim/a.cpp", {{}, {"model/gpt.h"}, {}}), 1u);
    EXPECT_EQ(count("kernels/a.h", {{}, {"optim/optimizer.h"}, {}}), 1u);
    EXPECT_EQ(count("model/a.cpp", {{}, {"kernels/cpu/gemm.h"}, {}}), 1u);
    EXPECT_EQ(count("model/a.cpp", {{}, {"dev/test/reference.h"}, {}}), 2u);
    EXPECT_EQ(count("model/a.cpp", {{}, {}, {"cuda_runtime.h"}}), 1u);
    EXPECT_EQ(count("dist/transport_nccl.cpp", {{}, {}, {"nccl.h"}}), 0u);
    EXPECT_EQ(count("data/a.cpp", {{}, {}, {"mpi.h"}}), 1u);
    EXPECT_EQ(count("kernels/cpu/a.cpp", {{}, {}, {"cblas.h"}}), 1u);
    EXPECT_EQ(count("model/a.cpp", {{"#ifdef USE_CUDA"}, {}, {}}), 1u);
    EXPECT_EQ(count("kernels/cpu/a.cpp", {{"#if defined(__AVX2__)"}, {}, {}}), 0u);
    EXPECT_EQ(count("extra/a.cpp", {}), 1u);
    EXPECT_NE(circle({{"a.h", {{}, {"b.h"}, {}}}, {"b.h", {{}, {"a.h"}, {}}}}), "");
    EXPECT_EQ(circle({{"a.h", {{}, {"b.h"}, {}}}, {"b.h", {}}}), "");
}
