// Muon on the slots it owns; see muon.h. Blocks of one shape go through Newton-Schulz together, as many at a
// time as the workspace holds: few large products instead of many small ones.
#include "optim/muon.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "kernels/error.h"
#include "kernels/kernels.h"

float muon_scale_factor(MuonScale mode, size_t rows, size_t cols) {
    const double out = static_cast<double>(rows);
    const double in = static_cast<double>(cols);
    switch (mode) {
        case MuonScale::match_rms:
            return static_cast<float>(0.2 * std::sqrt(std::max(out, in)));
        case MuonScale::original:
            return static_cast<float>(std::sqrt(std::max(1.0, out / in)));
        case MuonScale::spectral:
            return static_cast<float>(std::sqrt(std::max(out, in)));
        case MuonScale::unit_rms:
            return static_cast<float>(std::sqrt(out / in));
    }
    fail("--muon-scale: unknown mode %d", static_cast<int>(mode));
}

size_t muon_workspace(size_t count, size_t rows, size_t cols) {
    return count * rows * cols + newton_schulz_workspace(count, rows, cols);
}

template <typename State, typename Iterate, typename Storage>
void muon_step(Optimizer& optimizer, Storage* params, float* master, const float* grads, float lr,
               float grad_scale, float* workspace, size_t workspace_floats, Stream* stream) {
    const OptimizerConfig& config = optimizer.config;
    int* degenerate = optimizer.degenerate;  // of the next chunk
    for (const std::vector<size_t>& batch : optimizer.muon_batches) {
        const OptimizerSlot& any = optimizer.slots[batch.front()];
        const size_t rows = any.block.rows, cols = any.parameter->cols, size = any.size();
        const float scale = muon_scale_factor(config.muon_scale, rows, cols);
        const size_t fit = workspace_floats / muon_workspace(1, rows, cols);
        for (size_t first = 0; first < batch.size(); first += fit) {
            const size_t count = std::min(fit, batch.size() - first);
            float* directions = workspace;
            Iterate* x;  // the directions, normalised: in their place where they are of one type
            if constexpr (std::is_same_v<Iterate, float>) {
                x = directions;
            } else {
                x = reinterpret_cast<Iterate*>(directions + count * size);
            }
            for (size_t i = 0; i < count; i++) {
                const OptimizerSlot& slot = optimizer.slots[batch[first + i]];
                muon_momentum(directions + i * size, static_cast<State*>(slot.first), grads + slot.offset(),
                              size, config.muon_momentum, config.muon_nesterov, grad_scale,
                              optimizer_rounding(optimizer, slot), stream);
            }
            // No safety margin in the norm: both coefficient sets tolerate a little more than 1.
            muon_normalize(x, degenerate, directions, count, size, 1.0f, stream);
            const Iterate* updates =
                newton_schulz(x, x + count * size, count, rows, cols, optimizer.newton_schulz, stream);
            for (size_t i = 0; i < count; i++) {
                const OptimizerSlot& slot = optimizer.slots[batch[first + i]];
                const size_t offset = slot.offset();
                // The decay uses the learning rate itself, not the one that the shape scales.
                const float weight_decay = slot.parameter->weight_decay ? config.weight_decay : 0.0f;
                muon_update(params + offset, master == nullptr ? nullptr : master + slot.master_offset,
                            updates + i * size, size, lr, scale, weight_decay, stream);
            }
            degenerate += count;
            optimizer.orthogonalized += count;
        }
    }
    if (degenerate == optimizer.degenerate) return;
    std::vector<int> flags(static_cast<size_t>(degenerate - optimizer.degenerate));
    copy_to_host(flags.data(), optimizer.degenerate, flags.size() * sizeof(int), stream);
    optimizer.degenerate_updates += std::accumulate(flags.begin(), flags.end(), uint64_t{0});
}

#define INSTANTIATE_FOR(State, Iterate, Storage)                                                      \
    template void muon_step<State, Iterate>(Optimizer&, Storage*, float*, const float*, float, float, \
                                            float*, size_t, Stream*);
#define INSTANTIATE(Storage)                \
    INSTANTIATE_FOR(float, float, Storage)  \
    INSTANTIATE_FOR(float, fp16_t, Storage) \
    INSTANTIATE_FOR(bf16_t, float, Storage) \
    INSTANTIATE_FOR(bf16_t, fp16_t, Storage)
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
