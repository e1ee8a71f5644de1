// Saving, finding and loading checkpoints; see checkpoint.h.
//
// At every moment of a save, OUT holds the last complete checkpoint under a name that checkpoint_find reads:
//   1. everything is written and synced in .tmp_step_N;
//   2. a step_N that is already there becomes .old_step_N, which stands in for it while step_N is absent;
//   3. .tmp_step_N becomes step_N, and OUT is synced;
//   4. what is to go is first renamed to .tmp_*, so that a half-removed folder never has a final name.
#include "model/checkpoint.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "data/files.h"
#include "kernels/error.h"
#include "model/huggingface.h"
#include "model/integrity.h"
#include "model/safetensors.h"

namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* format_name = "mugpt-checkpoint";
constexpr int format_version = 2;  // 1 had one block for each embedding
constexpr const char* state_name = "/state.json";
const std::string temporary_prefix = ".tmp_";
const std::string replaced_prefix = ".old_";

std::string folder_name(uint64_t step) {
    char name[32];
    snprintf(name, sizeof(name), "step_%08" PRIu64, step);
    return name;
}

// Whether a name is exactly prefix + step_N: no copies, backups or other spellings of the number.
bool parse_name(const std::string& name, const std::string& prefix, uint64_t& step) {
    const std::string before = prefix + "step_";
    if (!name.starts_with(before)) return false;
    step = strtoull(name.c_str() + before.size(), nullptr, 10);
    return name == prefix + folder_name(step);
}

// Names in a folder; none where the folder is missing.
std::vector<std::string> list_names(const std::string& folder) {
    std::error_code error;
    std::vector<std::string> names;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
        names.push_back(entry->path().filename().string());
    }
    if (error && error != std::errc::no_such_file_or_directory) {
        fail("%s: cannot list: %s", folder.c_str(), error.message().c_str());
    }
    std::sort(names.begin(), names.end());
    return names;
}

void move_folder(const std::string& from, const std::string& to) {
    std::error_code error;
    fs::rename(from, to, error);
    if (error) fail("%s: cannot rename to %s: %s", from.c_str(), to.c_str(), error.message().c_str());
}

void remove_folder(const std::string& folder) {
    std::error_code error;
    fs::remove_all(folder, error);
    if (error) fail("%s: cannot remove: %s", folder.c_str(), error.message().c_str());
}

// -----------------------------------------------------------------------------------------------------
// state.json

// The checksum of everything in state.json but the checksum itself. Dumping is the inverse of parsing, so
// writer and reader see the same text.
std::string state_checksum(json content) {
    content.erase("checksum");
    return checksum(content.dump());
}

// state.json of a folder, complete and undamaged.
json read_state_file(const std::string& folder) {
    const std::string path = folder + state_name;
    json content = json_read(path);
    if (!content.is_object() || content.value("format", json()) != format_name) {
        fail("%s: is not a checkpoint's", path.c_str());
    }
    const json version = content.value("version", json());
    if (version != format_version) {
        fail("%s: has version %s; this program reads %d", path.c_str(), escaped(version).c_str(),
             format_version);
    }
    if (content.value("checksum", json()) != state_checksum(content)) {
        fail("%s: is damaged: the checksum is wrong", path.c_str());
    }
    return content;
}

// Fails with the reason where a folder is not the complete checkpoint of that step. Sizes tell what was cut
// off or is missing; only the contents, read in full, tell what was changed.
void verify(const std::string& folder, uint64_t step, bool read_contents) {
    const json content = read_state_file(folder);
    if (content.at("step") != step) {
        fail("state.json is of step %s", content.at("step").dump().c_str());
    }
    for (const auto& [name, expected] : content.at("files").items()) {
        const std::string path = folder + "/" + name;
        std::error_code error;
        const uint64_t bytes = fs::file_size(path, error);
        if (error) fail("%s: %s", name.c_str(), error.message().c_str());
        if (expected.at("bytes") != bytes) {
            fail("%s has %" PRIu64 " bytes instead of %s", name.c_str(), bytes,
                 expected.at("bytes").dump().c_str());
        }
        if (read_contents && expected.at("xxh3") != file_digest(path).xxh3) {
            fail("%s is damaged: the checksum is wrong", name.c_str());
        }
    }
}

// Writes state.json over the files that the folder has by now.
void write_state(const std::string& folder, uint64_t step, const Optimizer& optimizer, const json& state) {
    json files = json::object();
    for (const std::string& name : list_names(folder)) {
        const FileDigest digest = file_digest(folder + "/" + name);
        files[name] = {{"bytes", digest.bytes}, {"xxh3", digest.xxh3}};
    }
    json content = {
        {"format", format_name},
        {"version", format_version},
        {"step", step},
        {"optimizer_step", optimizer.steps},
        {"degenerate_updates", optimizer.degenerate_updates},
        {"files", files},
        {"state", state},
    };
    // Options may hold bytes that are not UTF-8, in a path for instance; JSON cannot, and a save must not
    // fail over them.
    content = json::parse(content.dump(-1, ' ', false, json::error_handler_t::replace));
    content["checksum"] = state_checksum(content);
    file_write(folder + state_name, {content.dump(2), "\n"});
}

// -----------------------------------------------------------------------------------------------------
// Optimizer state

// optimizer_000.safetensors, ...: one file for each rank that saved.
std::string optimizer_file(int rank) {
    char name[40];
    snprintf(name, sizeof(name), "optimizer_%03d.safetensors", rank);
    return name;
}

// One vector of one slot in a file: "h.0.attn.c_attn.weight[0:128].momentum".
struct StateVector {
    std::string name;
    std::vector<size_t> shape;  // (rows, cols) of the block, as the optimizer has it: (out, in)
    Dtype dtype;
    void* data;  // on the device
    size_t bytes;
};

// The vectors of this rank's slots. `master` is null where parameters are their own master copy.
std::vector<StateVector> state_vectors(const Optimizer& optimizer, float* master) {
    std::vector<StateVector> vectors;
    for (const OptimizerSlot& slot : optimizer.slots) {
        if (!slot.own) continue;
        const std::string block = slot.parameter->name + "[" + std::to_string(slot.block.first_row) + ":" +
                                  std::to_string(slot.block.first_row + slot.block.rows) + "]";
        const std::vector<size_t> shape = {slot.block.rows, slot.parameter->cols};
        const auto add = [&](const char* what, Dtype dtype, void* data) {
            if (data != nullptr)
                vectors.push_back({block + what, shape, dtype, data, slot.size() * dtype_size(dtype)});
        };
        add(slot.muon ? ".momentum" : ".m", slot.state_dtype, slot.first);
        add(".v", slot.state_dtype, slot.second);
        if (slot.neurons != nullptr) {
            vectors.push_back({block + ".neurons",
                               {slot.neuron_count()},
                               Dtype::fp32,
                               slot.neurons,
                               slot.neuron_count() * sizeof(float)});
        }
        add(".master", Dtype::fp32, master == nullptr ? nullptr : master + slot.master_offset);
    }
    return vectors;
}

void write_optimizer(const std::string& path, const Optimizer& optimizer, float* master, Stream* stream) {
    const std::vector<StateVector> vectors = state_vectors(optimizer, master);
    std::vector<std::pair<std::string, SafeTensor>> tensors;
    for (const StateVector& vector : vectors) {
        tensors.emplace_back(
            vector.name, SafeTensor{safetensors_dtype(vector.dtype), vector.shape, nullptr, vector.bytes});
    }
    std::vector<char> host;
    const auto fetch = [&](size_t i) -> const void* {
        host.resize(vectors[i].bytes);
        copy_to_host(host.data(), vectors[i].data, vectors[i].bytes, stream);
        return host.data();
    };
    safetensors_write(path, tensors, {}, fetch);
}

// How many tensors all ranks' files hold together.
size_t saved_vectors(const Optimizer& optimizer, bool with_master) {
    const size_t muon = optimizer.config.muon_normuon ? 2 : 1;
    size_t count = 0;
    for (const OptimizerSlot& slot : optimizer.slots) count += (slot.muon ? muon : 2) + (with_master ? 1 : 0);
    return count;
}

// This rank's vectors from whichever of the checkpoint's files has them.
void read_optimizer(const std::string& folder, const json& files, Optimizer& optimizer, float* master,
                    Stream* stream) {
    std::vector<SafeTensorsFile> opened;
    size_t saved = 0;
    for (int rank = 0; files.contains(optimizer_file(rank)); rank++) {
        opened.push_back(safetensors_open(folder + "/" + optimizer_file(rank)));
        saved += opened.back().tensors.size();
    }
    if (opened.empty()) fail("%s: has no %s", folder.c_str(), optimizer_file(0).c_str());
    const std::string path = opened[0].path;
    if (const size_t needed = saved_vectors(optimizer, master != nullptr); saved != needed) {
        fail(
            "%s: has %zu tensors, this optimizer needs %zu: was it saved with another --optimizer or "
            "--dtype?",
            path.c_str(), saved, needed);
    }
    for (const StateVector& vector : state_vectors(optimizer, master)) {
        const auto holder = std::find_if(opened.begin(), opened.end(), [&](const SafeTensorsFile& file) {
            return file.tensors.contains(vector.name);
        });
        const SafeTensorsFile& file = holder == opened.end() ? opened[0] : *holder;
        const SafeTensor& tensor = safetensors_get(file, vector.name, vector.shape);
        if (const std::string expected = safetensors_dtype(vector.dtype); tensor.dtype != expected) {
            fail(
                "%s: tensor \"%s\" is %s, not %s: was it saved with another --state-dtype or "
                "--muon-state-dtype?",
                file.path.c_str(), vector.name.c_str(), tensor.dtype.c_str(), expected.c_str());
        }
        copy_to_device(vector.data, tensor.data, vector.bytes, stream);
    }
}

// A tokenizer, and the word that makes transformers' AutoTokenizer take it as it is.
void copy_tokenizer(const std::string& folder, const std::string& tokenizer, int end_of_text,
                    size_t seq_len) {
    file_write(folder + "/tokenizer.json", {file_map(tokenizer, "").text()});
    json config = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"model_max_length", seq_len}};
    if (end_of_text >= 0) config["bos_token"] = config["eos_token"] = "<|endoftext|>";
    file_write(folder + "/tokenizer_config.json", {config.dump(2), "\n"});
}

// -----------------------------------------------------------------------------------------------------
// Folders in OUT

// Removes what interrupted saves have left. A replaced checkpoint whose replacement never came is put back.
void clear_leftovers(const std::string& out) {
    for (const std::string& name : list_names(out)) {
        const std::string path = out + "/" + name;
        uint64_t step;
        if (parse_name(name, temporary_prefix, step)) remove_folder(path);
        if (!parse_name(name, replaced_prefix, step)) continue;
        const std::string replacement = out + "/" + folder_name(step);
        if (file_exists(replacement)) {
            remove_folder(path);
        } else {
            move_folder(path, replacement);
        }
    }
}

// Folders with a checkpoint's name by step, newest first.
std::map<uint64_t, std::string, std::greater<uint64_t>> list_checkpoints(const std::string& out) {
    std::map<uint64_t, std::string, std::greater<uint64_t>> found;
    for (const std::string& name : list_names(out)) {
        uint64_t step;
        if (parse_name(name, "", step)) found[step] = name;
        if (parse_name(name, replaced_prefix, step)) found.emplace(step, name);
    }
    return found;
}

// Whether a folder verifies, and why not.
bool verifies(const std::string& folder, uint64_t step, bool read_contents, std::string& reason) {
    try {
        verify(folder, step, read_contents);
        return true;
    } catch (const Error& error) {
        reason = error.what();
    } catch (const json::exception& error) {  // a key that is not there, or has another type
        reason = error.what();
    }
    return false;
}

// Keeps the newest `keep` complete checkpoints up to `step`, the one just saved. Later ones are none of this
// save's business, and incomplete ones neither count nor go.
void prune(const std::string& out, uint64_t step, size_t keep) {
    size_t complete = 0;
    for (const auto& [saved, name] : list_checkpoints(out)) {
        std::string reason;
        if (saved > step || !verifies(out + "/" + name, saved, false, reason)) continue;
        if (++complete <= keep) continue;
        const std::string doomed = out + "/" + temporary_prefix + folder_name(saved);
        move_folder(out + "/" + name, doomed);
        remove_folder(doomed);
    }
}

}  // namespace

template <typename Storage>
void checkpoint_save(const std::string& out, uint64_t step, const Gpt<Storage>& model,
                     const Optimizer& optimizer, const json& state, const std::string& tokenizer,
                     int end_of_text, size_t keep, Stream* stream, const CheckpointRanks& ranks) {
    const std::string name = folder_name(step);
    const std::string final_folder = checkpoint_folder(out, step);
    const std::string temporary = out + "/" + temporary_prefix + name;
    const std::string replaced = out + "/" + replaced_prefix + name;
    const std::string own_file = temporary + "/" + optimizer_file(ranks.rank);
    if (ranks.rank != 0) {
        ranks.barrier();  // the folder is there
        write_optimizer(own_file, optimizer, model.master, stream);
        ranks.barrier();  // all files are
        return;
    }
    clear_leftovers(out);
    try {
        std::error_code error;
        fs::create_directories(temporary, error);
        if (error) fail("%s: cannot create: %s", temporary.c_str(), error.message().c_str());
        ranks.barrier();
        huggingface_write(temporary, model, end_of_text, stream);
        write_optimizer(own_file, optimizer, model.master, stream);
        ranks.barrier();
        if (!tokenizer.empty()) copy_tokenizer(temporary, tokenizer, end_of_text, model.config.seq_len);
        write_state(temporary, step, optimizer, state);
        folder_sync(temporary);
        if (file_exists(final_folder)) move_folder(final_folder, replaced);
        move_folder(temporary, final_folder);
        folder_sync(out);
    } catch (...) {
        std::error_code ignored;  // the first error is the one to report
        fs::remove_all(temporary, ignored);
        throw;
    }
    clear_leftovers(out);
    if (keep > 0) prune(out, step, keep);
}

std::string checkpoint_folder(const std::string& out, uint64_t step) { return out + "/" + folder_name(step); }

FoundCheckpoint checkpoint_find(const std::string& out) {
    FoundCheckpoint found;
    for (const auto& [step, name] : list_checkpoints(out)) {
        std::string reason;
        if (verifies(out + "/" + name, step, true, reason)) {
            found.folder = out + "/" + name;
            found.step = step;
            break;
        }
        found.passed_over.push_back(name + ": " + reason);
    }
    return found;
}

json checkpoint_read_state(const std::string& folder) {
    return read_state_file(folder).value("state", json());
}

template <typename Storage>
void checkpoint_load(const std::string& folder, Gpt<Storage>& model, Optimizer& optimizer, Stream* stream) {
    const json state = read_state_file(folder);
    const GptConfig saved = huggingface_read_config(folder);
    if (saved.heads != model.config.heads) {  // all other sizes show in the tensors' shapes
        fail("%s: has %zu heads, the model %zu", folder.c_str(), saved.heads, model.config.heads);
    }
    std::vector<std::string> unused;
    huggingface_read(model, folder, unused, stream);
    if (!unused.empty()) fail("%s: the model is smaller than the one saved", unused[0].c_str());
    // The master copy as it was.
    read_optimizer(folder, state.at("files"), optimizer, model.master, stream);
    optimizer.steps = state.at("optimizer_step").get<uint64_t>();
    optimizer.degenerate_updates = state.at("degenerate_updates").get<uint64_t>();
}

#define INSTANTIATE(Storage)                                                                           \
    template void checkpoint_save(const std::string&, uint64_t, const Gpt<Storage>&, const Optimizer&, \
                                  const json&, const std::string&, int, size_t, Stream*,               \
                                  const CheckpointRanks&);                                             \
    template void checkpoint_load(const std::string&, Gpt<Storage>&, Optimizer&, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
