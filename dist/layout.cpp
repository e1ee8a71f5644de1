// Owners by longest processing time first; see layout.h.
#include "dist/layout.h"

#include <algorithm>
#include <tuple>

namespace {

struct Piece {
    size_t number;  // of the block
    double work;    // of Newton-Schulz, in products of numbers; 0 for AdamW
    size_t elements;
};

struct Load {
    double work = 0;
    size_t elements = 0;
};

}  // namespace

Ownership assign_owners(const ParameterTable& table, OptimizerKind kind, int ranks, int rank) {
    if (ranks == 1) return own_all(table);
    std::vector<Piece> pieces;
    for_blocks(table, [&](const Parameter& parameter, const Block& block, size_t number) {
        const bool muon = kind == OptimizerKind::muon && parameter.group == ParameterGroup::muon;
        const auto small = static_cast<double>(std::min(block.rows, parameter.cols));
        const auto large = static_cast<double>(std::max(block.rows, parameter.cols));
        pieces.push_back({number, muon ? small * small * large : 0, block.rows * parameter.cols});
    });
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
        return std::tie(a.work, a.elements) > std::tie(b.work, b.elements);
    });

    Ownership ownership;
    ownership.rank = rank;
    ownership.owner.resize(pieces.size());
    ownership.master_offset.resize(pieces.size());
    std::vector<Load> loads(static_cast<size_t>(ranks));
    for (const Piece& piece : pieces) {
        const auto least = std::min_element(loads.begin(), loads.end(), [&](const Load& a, const Load& b) {
            if (piece.work == 0) return a.elements < b.elements;
            return std::tie(a.work, a.elements) < std::tie(b.work, b.elements);
        });
        least->work += piece.work;
        least->elements += piece.elements;
        ownership.owner[piece.number] = static_cast<int>(least - loads.begin());
    }
    for_blocks(table, [&](const Parameter& parameter, const Block& block, size_t number) {
        if (!ownership.own(number)) return;
        ownership.master_offset[number] = ownership.master_elements;
        ownership.master_elements += aligned_elements(block.rows * parameter.cols);
    });
    return ownership;
}
