// Safetensors files (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a
// JSON header {"name": {"dtype", "shape", "data_offsets"}, "__metadata__": {...}}, then the data.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/dtype.h"

struct SafeTensor {
    std::string dtype;  // "F32", "BF16", "F16", "I64", ...
    std::vector<size_t> shape;
    const void* data;   // into the mapped file, or what is to be written
    size_t bytes;
};

// A read-only mapping of a file. Opening checks everything: header length, JSON, known types, shapes whose
// product fits, offsets in order without gaps or overlaps, no trailing bytes; it fails with the file's name.
struct SafeTensorsFile {
    std::string path;
    std::map<std::string, SafeTensor> tensors;
    std::map<std::string, std::string> metadata;
    void* mapping = nullptr;
    size_t mapping_bytes = 0;
};
SafeTensorsFile safetensors_open(const std::string& path);
void safetensors_close(SafeTensorsFile& file);

// Writes and syncs a whole file; fails with path and reason (a full disk among them).
void safetensors_write(const std::string& path, const std::vector<std::pair<std::string, SafeTensor>>& tensors,
                       const std::map<std::string, std::string>& metadata);

// Element i of a floating-point tensor's data as fp32; fails for other types.
void safetensor_to_float(float* out, const SafeTensor& tensor, const std::string& name, const std::string& path);
