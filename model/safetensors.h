// Safetensors files (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a
// JSON header {"name": {"dtype", "shape", "data_offsets"}, "__metadata__": {...}}, then the data.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/dtype.h"
#include "data/files.h"

struct SafeTensor {
    std::string dtype;  // "F32", "BF16", "F16", "I64", ...
    std::vector<size_t> shape;
    const void* data;  // into the mapped file, at any alignment; or what is to be written
    size_t bytes;
};

// A read-only mapping of a file. Opening checks everything: header length (at most 100 MB), strict JSON,
// known types, shapes whose product fits, offsets without gaps or overlaps, no trailing bytes. It fails with
// the file's name and reason, and takes no memory that the file's own size does not account for.
struct SafeTensorsFile {
    std::string path;
    std::map<std::string, SafeTensor> tensors;
    std::map<std::string, std::string> metadata;
    MappedFile file;  // unmapped with the last copy: the tensors' data must not outlive it
};
SafeTensorsFile safetensors_open(const std::string& path);

// The tensor of that name; fails, naming file and tensor, where it is missing or has another shape.
const SafeTensor& safetensors_get(const SafeTensorsFile& file, const std::string& name,
                                  const std::vector<size_t>& shape);

// Writes and syncs a whole file in the order given; fails with path and reason (a full disk among them).
// Where fetch is given, fetch(i) returns tensor i's data when its turn comes, valid until the next call, so
// that the tensors of a device need no second copy of the model in host memory.
void safetensors_write(const std::string& path,
                       const std::vector<std::pair<std::string, SafeTensor>>& tensors,
                       const std::map<std::string, std::string>& metadata,
                       const std::function<const void*(size_t)>& fetch = {});

// The data of a floating-point tensor (F64, F32, F16, BF16) as fp32, rounded to nearest; name and path stand
// in the message where it has another type.
void safetensor_to_float(float* out, const SafeTensor& tensor, const std::string& name,
                         const std::string& path);

// "F32", "BF16", "F16".
const char* safetensors_dtype(Dtype dtype);
