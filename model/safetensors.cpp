// Safetensors files, read as input that nobody vouches for; see safetensors.h. The rules are those of the
// format's description: https://github.com/huggingface/safetensors#format
#include "model/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>
#include <type_traits>

#include "kernels/error.h"
#include "model/integrity.h"

static_assert(std::endian::native == std::endian::little, "the data of a file is used as it is mapped");

namespace {

using nlohmann::json;

constexpr size_t length_bytes = 8;                  // of the header length at the start
constexpr uint64_t max_header_bytes = 100'000'000;  // the format's own limit
constexpr const char* metadata_key = "__metadata__";

// Bytes of one element; 0 for a type that is unknown, or packs several elements into a byte.
size_t element_bytes(const std::string& dtype) {
    static const std::map<std::string, size_t> sizes = {
        {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
        {"U16", 2},  {"I16", 2}, {"F16", 2}, {"BF16", 2},    {"U32", 4},     {"I32", 4},
        {"F32", 4},  {"U64", 8}, {"I64", 8}, {"F64", 8},     {"C64", 8}};
    const auto found = sizes.find(dtype);
    return found == sizes.end() ? 0 : found->second;
}

// Bytes of a tensor of this shape. False where they do not fit into a size_t.
bool shape_bytes(const std::vector<size_t>& shape, size_t element, size_t& bytes) {
    bytes = element;
    for (const size_t extent : shape) {
        if (__builtin_mul_overflow(bytes, extent, &bytes)) return false;
    }
    return true;
}

// A list of non-negative integers. False for anything else.
bool read_sizes(const json& list, std::vector<size_t>& sizes) {
    if (!list.is_array()) return false;
    for (const json& value : list) {
        if (!value.is_number_unsigned()) return false;
        sizes.push_back(value.get<size_t>());
    }
    return true;
}

// One entry of the header. `data` are the bytes after the header.
SafeTensor read_entry(const json& entry, const std::string& name, const std::string& path, const char* data,
                      size_t data_bytes) {
    const auto refuse = [&](const char* reason) {
        fail("%s: tensor %s: %s", path.c_str(), escaped(name).c_str(), reason);
    };
    const bool complete = entry.is_object() && entry.size() == 3 && entry.contains("dtype") &&
                          entry["dtype"].is_string() && entry.contains("shape") &&
                          entry.contains("data_offsets");
    if (!complete) refuse("needs dtype, shape and data_offsets, and nothing else");

    SafeTensor tensor;
    tensor.dtype = entry["dtype"].get<std::string>();
    const size_t element = element_bytes(tensor.dtype);
    if (element == 0) refuse(("unknown dtype " + escaped(tensor.dtype)).c_str());

    std::vector<size_t> offsets;
    if (!read_sizes(entry["shape"], tensor.shape)) refuse("shape is not a list of sizes");
    if (!read_sizes(entry["data_offsets"], offsets) || offsets.size() != 2)
        refuse("data_offsets are not two sizes");
    if (offsets[0] > offsets[1] || offsets[1] > data_bytes) refuse("data_offsets lie outside the file");
    if (!shape_bytes(tensor.shape, element, tensor.bytes)) refuse("shape is too large");
    if (offsets[1] - offsets[0] != tensor.bytes) refuse("shape and data_offsets disagree");
    tensor.data = data + offsets[0];
    return tensor;
}

// Every byte of the data belongs to exactly one tensor.
void check_coverage(const SafeTensorsFile& file, const char* data, size_t data_bytes) {
    std::vector<std::pair<size_t, size_t>> ranges;
    for (const auto& [name, tensor] : file.tensors) {
        const size_t begin = static_cast<size_t>(static_cast<const char*>(tensor.data) - data);
        ranges.emplace_back(begin, begin + tensor.bytes);
    }
    std::sort(ranges.begin(), ranges.end());
    size_t covered = 0;
    for (const auto& [begin, end] : ranges) {
        if (begin != covered) {
            fail("%s: tensors %s at byte %zu of the data", file.path.c_str(),
                 begin < covered ? "overlap" : "leave a gap", std::min(begin, covered));
        }
        covered = end;
    }
    if (covered != data_bytes)
        fail("%s: %zu bytes after the last tensor", file.path.c_str(), data_bytes - covered);
}

template <typename Element>
void widen(float* out, const void* data, size_t count) {
    for (size_t i = 0; i < count; i++) {
        Element element;  // the data may lie at any address
        std::memcpy(&element, static_cast<const char*>(data) + i * sizeof(Element), sizeof(Element));
        if constexpr (std::is_same_v<Element, double>) {
            out[i] = static_cast<float>(element);
        } else {
            out[i] = to_float(element);
        }
    }
}

}  // namespace

SafeTensorsFile safetensors_open(const std::string& path) {
    SafeTensorsFile result;
    result.path = path;
    result.file = file_map(path, "");
    const char* const start = result.file.data.get();
    const size_t file_bytes = result.file.bytes;

    if (file_bytes < length_bytes)
        fail("%s: has %zu bytes, too few for a safetensors file", path.c_str(), file_bytes);
    uint64_t header_bytes;
    std::memcpy(&header_bytes, start, length_bytes);
    if (header_bytes > max_header_bytes || header_bytes > file_bytes - length_bytes) {
        fail("%s: a header of %llu bytes in a file of %zu: not a safetensors file, or cut off", path.c_str(),
             static_cast<unsigned long long>(header_bytes), file_bytes);
    }
    const std::string_view text(start + length_bytes, header_bytes);
    if (!text.starts_with('{')) fail("%s: the header is not a JSON object", path.c_str());
    const json header = json_parse(text, path);

    const char* const data = start + length_bytes + header_bytes;
    const size_t data_bytes = file_bytes - length_bytes - header_bytes;
    for (const auto& [name, entry] : header.items()) {
        if (name != metadata_key) {
            result.tensors[name] = read_entry(entry, name, path, data, data_bytes);
            continue;
        }
        if (!entry.is_object()) fail("%s: %s is not an object", path.c_str(), metadata_key);
        for (const auto& [key, value] : entry.items()) {
            if (!value.is_string()) fail("%s: %s is not a string", path.c_str(), escaped(key).c_str());
            result.metadata[key] = value.get<std::string>();
        }
    }
    check_coverage(result, data, data_bytes);
    return result;
}

const SafeTensor& safetensors_get(const SafeTensorsFile& file, const std::string& name,
                                  const std::vector<size_t>& shape) {
    const auto found = file.tensors.find(name);
    if (found == file.tensors.end()) fail("%s: has no tensor %s", file.path.c_str(), escaped(name).c_str());
    if (found->second.shape != shape) {
        fail("%s: tensor %s has shape %s instead of %s", file.path.c_str(), escaped(name).c_str(),
             escaped(found->second.shape).c_str(), escaped(shape).c_str());
    }
    return found->second;
}

void safetensors_write(const std::string& path,
                       const std::vector<std::pair<std::string, SafeTensor>>& tensors,
                       const std::map<std::string, std::string>& metadata,
                       const std::function<const void*(size_t)>& fetch) {
    json header = json::object();
    if (!metadata.empty()) header[metadata_key] = metadata;
    size_t offset = 0;
    for (const auto& [name, tensor] : tensors) {
        size_t bytes;
        if (!shape_bytes(tensor.shape, element_bytes(tensor.dtype), bytes) || bytes != tensor.bytes) {
            fail("%s: tensor %s: %zu bytes do not fit dtype and shape", path.c_str(), escaped(name).c_str(),
                 tensor.bytes);
        }
        if (header.contains(name)) fail("%s: two tensors named %s", path.c_str(), escaped(name).c_str());
        header[name] = {
            {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + bytes}}};
        offset += bytes;
    }
    std::string text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' ');  // the data starts at a multiple of 8
    const uint64_t header_bytes = text.size();

    FileWriter file(path);
    file_append(file, &header_bytes, length_bytes);
    file_append(file, text.data(), text.size());
    for (size_t i = 0; i < tensors.size(); i++) {
        file_append(file, fetch ? fetch(i) : tensors[i].second.data, tensors[i].second.bytes);
    }
    file_commit(file);
}

void safetensor_to_float(float* out, const SafeTensor& tensor, const std::string& name,
                         const std::string& path) {
    if (tensor.dtype == "F32") {
        widen<float>(out, tensor.data, tensor.bytes / 4);
    } else if (tensor.dtype == "BF16") {
        widen<bf16_t>(out, tensor.data, tensor.bytes / 2);
    } else if (tensor.dtype == "F16") {
        widen<fp16_t>(out, tensor.data, tensor.bytes / 2);
    } else if (tensor.dtype == "F64") {
        widen<double>(out, tensor.data, tensor.bytes / 8);
    } else {
        fail("%s: tensor %s has the type %s, not a floating-point type that is read here", path.c_str(),
             escaped(name).c_str(), tensor.dtype.c_str());
    }
}

const char* safetensors_dtype(Dtype dtype) {
    return dtype == Dtype::fp32 ? "F32" : dtype == Dtype::bf16 ? "BF16" : "F16";
}
