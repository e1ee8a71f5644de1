// The parameter table: one row a tensor (and layer). The model writes it (model/gpt.cpp); allocation,
// initialisation, checkpoints, conversion, weight decay, optimizer routing and the printed tables all walk
// it. No tensor is ever picked by a magic index.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

// Which optimizer owns a tensor when --optimizer muon; with --optimizer adamw all of them go to AdamW.
enum class ParameterGroup { muon, adamw_embedding, adamw_head, adamw_scalar };

enum class Initializer { zeros, ones, normal };

// Rows [first_row, first_row + rows) of a tensor: one matrix that Muon orthogonalises (q, k, v apart).
struct Block {
    std::string name;  // "" for the whole tensor, else "q", "k", "v"
    size_t first_row;
    size_t rows;
};

struct Parameter {
    std::string name;  // Hugging Face's GPT-2 name without its prefix, e.g. "h.0.attn.c_attn.weight"
    size_t rows;       // (rows, cols) = (out, in) as stored here; a vector is one row
    size_t cols;
    size_t used_rows;  // rows that exist outside; the rest (a padded vocabulary) is zero and stays zero
    size_t offset;     // first element in the parameter, gradient and master arenas; a multiple of 64
    Initializer initializer;
    float init_std;  // of `normal`
    bool weight_decay;
    ParameterGroup group;
    bool conv1d;  // Hugging Face's GPT-2 keeps it transposed, (in, out)
    std::vector<Block> blocks;

    size_t size() const { return rows * cols; }
};

using ParameterTable = std::vector<Parameter>;

// Neighbouring tensors of the table that are used, and done with, together.
struct ParameterRange {
    size_t first_parameter, end_parameter;
};

// A tensor or state vector with the gap after it: the next one starts at a multiple of 64 elements, where
// vector loads like it.
constexpr size_t aligned_elements(size_t elements) { return (elements + 63) / 64 * 64; }

// Elements of an arena that holds the whole table, alignment gaps included.
inline size_t table_elements(const ParameterTable& table) {
    const Parameter& last = table.back();
    return aligned_elements(last.offset + last.size());
}
