// Hugging Face's GPT-2 format; see huggingface.h. The keys of config.json and their defaults are those of
// https://huggingface.co/docs/transformers/model_doc/gpt2
#include "model/huggingface.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "data/files.h"
#include "kernels/error.h"
#include "model/integrity.h"
#include "model/safetensors.h"

namespace {

using nlohmann::json;

constexpr const char* config_name = "/config.json";
constexpr const char* weights_name = "/model.safetensors";
constexpr const char* embedding_name = "wte.weight";
constexpr const char* head_name = "lm_head.weight";
const std::string prefix = "transformer.";

size_t read_size(const json& config, const char* key, const std::string& path) {
    if (!config.contains(key)) fail("%s: has no %s", path.c_str(), key);
    const json& value = config[key];
    if (!value.is_number_unsigned()) {
        fail("%s: %s is %s, not a size", path.c_str(), key, escaped(value).c_str());
    }
    return value.get<size_t>();
}

// Fails where a key that changes what the model computes has a value that this program does not compute.
void require(const json& config, const char* key, const std::vector<json>& accepted,
             const std::string& path) {
    const auto found = config.find(key);
    if (found == config.end()) return;  // then transformers' default holds, and that is GPT-2's
    if (std::find(accepted.begin(), accepted.end(), *found) == accepted.end()) {
        fail("%s: %s is %s; this program needs %s", path.c_str(), key, escaped(*found).c_str(),
             accepted[0].dump().c_str());
    }
}

// A tensor as it stands in a file: its name, and its shape there. A vector is the only kind with one extent.
std::string file_name(const Parameter& parameter) {
    return parameter.name == head_name ? parameter.name : prefix + parameter.name;
}

std::vector<size_t> file_shape(const Parameter& parameter) {
    if (parameter.group == ParameterGroup::adamw_scalar) return {parameter.cols};
    if (parameter.conv1d) return {parameter.cols, parameter.rows};
    return {parameter.used_rows, parameter.cols};
}

// out (cols,rows) = in (rows,cols) transposed, in strips of rows so that each line of the cache is written
// once.
template <typename Storage>
void transpose(Storage* out, const Storage* in, size_t rows, size_t cols) {
    constexpr size_t strip = 16;
    for (size_t first = 0; first < rows; first += strip) {
        const size_t last = std::min(first + strip, rows);
        for (size_t col = 0; col < cols; col++) {
            for (size_t row = first; row < last; row++) out[col * rows + row] = in[row * cols + col];
        }
    }
}

SafeTensorsFile open_weights(const std::string& folder) {
    const std::string path = folder + weights_name;
    if (!file_exists(path) && file_exists(path + ".index.json")) {
        fail("%s: the weights are split over several files; save them as one model.safetensors",
             folder.c_str());
    }
    return safetensors_open(path);
}

// The file's tensors, each with its full name, by their names without the prefix.
using NamedTensor = std::pair<const std::string, SafeTensor>;
std::map<std::string, const NamedTensor*> strip_names(const SafeTensorsFile& file) {
    std::map<std::string, const NamedTensor*> stripped;
    for (const NamedTensor& tensor : file.tensors) {
        const std::string& name = tensor.first;
        const std::string rest = name.starts_with(prefix) ? name.substr(prefix.size()) : name;
        if (!stripped.emplace(rest, &tensor).second) {
            fail("%s: has %s with and without \"transformer.\"", file.path.c_str(), escaped(rest).c_str());
        }
    }
    return stripped;
}

// Old files carry the causal mask, which is no parameter, with each layer.
bool is_mask(const std::string& name) {
    return name.starts_with("h.") && (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"));
}

// Whether two tensors hold the same numbers.
bool same_values(const SafeTensor& a, const SafeTensor& b, const std::string& path) {
    if (a.shape != b.shape) return false;
    if (a.dtype == b.dtype) return std::memcmp(a.data, b.data, a.bytes) == 0;
    size_t count = 1;
    for (const size_t extent : a.shape) count *= extent;
    std::vector<float> values_a(count), values_b(count);
    safetensor_to_float(values_a.data(), a, head_name, path);
    safetensor_to_float(values_b.data(), b, head_name, path);
    return values_a == values_b;
}

}  // namespace

GptConfig huggingface_read_config(const std::string& folder) {
    const std::string path = folder + config_name;
    const json config = json_read(path);
    if (!config.is_object() || !config.contains("model_type")) {
        fail("%s: names no model_type, which must be \"gpt2\"", path.c_str());
    }
    require(config, "model_type", {"gpt2"}, path);

    GptConfig result;
    result.vocab_size = read_size(config, "vocab_size", path);
    result.seq_len = read_size(config, "n_positions", path);
    result.channels = read_size(config, "n_embd", path);
    result.layers = read_size(config, "n_layer", path);
    result.heads = read_size(config, "n_head", path);
    require(config, "activation_function", {"gelu_new", "gelu_pytorch_tanh"}, path);
    require(config, "n_inner", {4 * result.channels, nullptr}, path);
    require(config, "layer_norm_epsilon", {1e-5}, path);
    require(config, "scale_attn_weights", {true}, path);
    require(config, "scale_attn_by_inverse_layer_idx", {false}, path);
    require(config, "add_cross_attention", {false}, path);
    require(config, "tie_word_embeddings", {true, false}, path);
    result.tied_head = config.value("tie_word_embeddings", true);
    gpt_check(result, path);
    return result;
}

template <typename Storage>
void huggingface_write(const std::string& folder, const Gpt<Storage>& model, int end_of_text,
                       Stream* stream) {
    const GptConfig& config = model.config;
    const json end_of_text_id = end_of_text >= 0 ? json(end_of_text) : json(nullptr);
    const Dtype dtype = dtype_of<Storage>();
    const json text = {
        {"architectures", json::array({"GPT2LMHeadModel"})},
        {"model_type", "gpt2"},
        {"torch_dtype", dtype == Dtype::fp32   ? "float32"
                        : dtype == Dtype::bf16 ? "bfloat16"
                                               : "float16"},
        {"vocab_size", config.vocab_size},
        {"n_positions", config.seq_len},
        {"n_ctx", config.seq_len},
        {"n_embd", config.channels},
        {"n_layer", config.layers},
        {"n_head", config.heads},
        {"n_inner", nullptr},
        {"activation_function", "gelu_new"},
        {"layer_norm_epsilon", 1e-5},
        {"initializer_range", 0.02},
        {"scale_attn_weights", true},
        {"embd_pdrop", 0.0},  // nothing here drops out; a reader that goes on training should not start to
        {"attn_pdrop", 0.0},
        {"resid_pdrop", 0.0},
        {"tie_word_embeddings", config.tied_head},
        {"bos_token_id", end_of_text_id},
        {"eos_token_id", end_of_text_id},
    };
    file_write(folder + config_name, {text.dump(2), "\n"});

    std::vector<std::pair<std::string, SafeTensor>> tensors;
    for (const Parameter& parameter : model.table) {
        const size_t bytes = parameter.used_rows * parameter.cols * sizeof(Storage);
        tensors.emplace_back(file_name(parameter),
                             SafeTensor{safetensors_dtype(dtype), file_shape(parameter), nullptr, bytes});
    }
    std::vector<Storage> values, transposed;
    const auto fetch = [&](size_t i) -> const void* {
        const Parameter& parameter = model.table[i];
        values.resize(parameter.used_rows * parameter.cols);
        copy_to_host(values.data(), model.params + parameter.offset, values.size() * sizeof(Storage), stream);
        if (!parameter.conv1d) return values.data();
        transposed.resize(values.size());
        transpose(transposed.data(), values.data(), parameter.rows, parameter.cols);
        return transposed.data();
    };
    safetensors_write(folder + weights_name, tensors, {{"format", "pt"}}, fetch);
}

template <typename Storage>
void huggingface_read(Gpt<Storage>& model, const std::string& folder, std::vector<std::string>& warnings,
                      Stream* stream) {
    const SafeTensorsFile file = open_weights(folder);
    const std::map<std::string, const NamedTensor*> tensors = strip_names(file);
    std::map<std::string, const NamedTensor*> unread = tensors;
    std::vector<float> values, transposed;  // the master copy is not rounded
    for (const Parameter& parameter : model.table) {
        const auto found = tensors.find(parameter.name);
        if (found == tensors.end()) {
            fail("%s: has no tensor \"%s\"", file.path.c_str(), file_name(parameter).c_str());
        }
        const auto& [name, tensor] = *found->second;
        if (tensor.shape != file_shape(parameter)) {
            fail("%s: tensor \"%s\" has shape %s, the model needs %s", file.path.c_str(), name.c_str(),
                 escaped(tensor.shape).c_str(), escaped(file_shape(parameter)).c_str());
        }
        const size_t used = parameter.used_rows * parameter.cols;
        values.resize(used);
        safetensor_to_float(values.data(), tensor, name, file.path);
        if (parameter.conv1d) {
            transposed.resize(used);
            transpose(transposed.data(), values.data(), parameter.cols, parameter.rows);
            values.swap(transposed);
        }
        gpt_set_tensor(model, parameter, values.data(), stream);
        unread.erase(parameter.name);
    }

    // A tied model's file may repeat the embedding as the head.
    if (const auto head = unread.find(head_name); head != unread.end()) {
        if (!same_values(head->second->second, tensors.at(embedding_name)->second, file.path)) {
            fail("%s: tensor \"%s\" differs from %s, but config.json ties them", file.path.c_str(), head_name,
                 embedding_name);
        }
        unread.erase(head);
    }
    for (const auto& [name, tensor] : unread) {
        if (!is_mask(name))
            warnings.push_back(file.path + ": tensor " + escaped(tensor->first) + " is not used");
    }
}

template void huggingface_write(const std::string&, const Gpt<float>&, int, Stream*);
template void huggingface_write(const std::string&, const Gpt<bf16_t>&, int, Stream*);
template void huggingface_write(const std::string&, const Gpt<fp16_t>&, int, Stream*);
template void huggingface_read(Gpt<float>&, const std::string&, std::vector<std::string>&, Stream*);
template void huggingface_read(Gpt<bf16_t>&, const std::string&, std::vector<std::string>&, Stream*);
template void huggingface_read(Gpt<fp16_t>&, const std::string&, std::vector<std::string>&, Stream*);
