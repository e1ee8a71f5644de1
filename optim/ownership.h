// Who updates what in a data-parallel run. The unit is a block of the parameter table: a matrix that Muon
// orthogonalises, or a row range of a tensor that AdamW updates. One rank owns it: keeps its optimizer state
// and fp32 master weights, updates it, and sends the new weights to the others (ZeRO stage 1, Rajbhandari et
// al. 2020, arXiv:1910.02054, by block instead of by element). dist/layout.h chooses the owners.
#pragma once

#include <cstddef>
#include <vector>

#include "optim/parameter_table.h"

struct Ownership {
    int rank = 0;
    std::vector<int> owner;             // of each block, in table order
    std::vector<size_t> master_offset;  // where a block's master weights lie in the owner's arena of them
    size_t master_elements = 0;         // of this rank's arena

    bool own(size_t block) const { return owner[block] == rank; }
};

// Number of blocks in the table.
inline size_t table_blocks(const ParameterTable& table) {
    size_t blocks = 0;
    for (const Parameter& parameter : table) blocks += parameter.blocks.size();
    return blocks;
}

// Calls body(parameter, block, number) for every block in table order.
template <typename Body>
void for_blocks(const ParameterTable& table, const Body& body) {
    size_t number = 0;
    for (const Parameter& parameter : table) {
        for (const Block& block : parameter.blocks) body(parameter, block, number++);
    }
}

// One rank that owns everything: its master weights lie as the parameters do.
inline Ownership own_all(const ParameterTable& table) {
    Ownership ownership;
    ownership.master_elements = table_elements(table);
    for_blocks(table, [&](const Parameter& parameter, const Block& block, size_t) {
        ownership.owner.push_back(0);
        ownership.master_offset.push_back(parameter.offset + block.first_row * parameter.cols);
    });
    return ownership;
}
