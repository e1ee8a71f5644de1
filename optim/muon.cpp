// Muon on the slots it owns; see muon.h. Blocks of one shape go through Newton-Schulz together, as many at a
// time as the workspace holds: few large products instead of many small ones.
#include "optim/muon.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <type_traits>

#include "kernels/error.h"
#include "kernels/kernels.h"

// Rounds of Newton-Schulz, of which the last counts. More than one is a handicap, of a build that tests
// whether scripts/reproduce_98.sh would notice it.
#ifndef MUGPT_HANDICAP_MUON
#define MUGPT_HANDICAP_MUON 1
#endif

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

size_t muon_workspace(const NewtonSchulz& method, size_t count, size_t rows, size_t cols) {
    return count * rows * cols + newton_schulz_workspace(method, count, rows, cols);
}

size_t own_matrices(const Optimizer& optimizer) {
    size_t count = 0;
    for (const std::vector<size_t>& batch : optimizer.muon_batches) count += batch.size();
    return count;
}

void muon_create(Optimizer& optimizer, Stream* stream) {
    const size_t count = own_matrices(optimizer);
    if (count == 0) return;
    optimizer.muon_blocks = static_cast<MuonBlock*>(device_malloc(count * sizeof(MuonBlock), stream));
    optimizer.muon_step = static_cast<MuonStep*>(device_malloc(sizeof(MuonStep), stream));
    optimizer.muon_replay = replay_create();
    optimizer.mean_squares = device_malloc(count * dtype_size(optimizer.newton_schulz_dtype), stream);
}

namespace {

// Queues all of a step. What differs from one step to the next stands in optimizer.muon_step and muon_blocks
// alone.
template <typename State, typename Iterate, typename Storage>
void queue_step(const Optimizer& optimizer, Storage* params, float* master, const float* grads,
                float* workspace, size_t workspace_floats, Stream* stream) {
    const OptimizerConfig& config = optimizer.config;
    const MuonStep* step = optimizer.muon_step;
    const MuonBlock* blocks = optimizer.muon_blocks;  // of the next chunk
    int* degenerate = optimizer.degenerate;
    Iterate* mean_squares = static_cast<Iterate*>(optimizer.mean_squares);
    for (const std::vector<size_t>& batch : optimizer.muon_batches) {
        const OptimizerSlot& any = optimizer.slots[batch.front()];
        const size_t rows = any.block.rows, cols = any.parameter->cols, size = any.size();
        const float scale = muon_scale_factor(config.muon_scale, rows, cols) * config.muon_scale_factor;
        const size_t fit = workspace_floats / muon_workspace(optimizer.newton_schulz, 1, rows, cols);
        for (size_t first = 0; first < batch.size(); first += fit) {
            const size_t count = std::min(fit, batch.size() - first);
            float* directions = workspace;
            Iterate* x;  // the directions, normalised: in their place where they are of one type
            if constexpr (std::is_same_v<Iterate, float>) {
                x = directions;
            } else {
                x = reinterpret_cast<Iterate*>(directions + count * size);
            }
            for (int round = 1; round < MUGPT_HANDICAP_MUON; round++) {
                device_memset_zero(x, count * size * sizeof(Iterate), stream);
                newton_schulz(x, x + count * size, count, rows, cols, optimizer.newton_schulz, stream);
            }
            // No safety margin in the norm: both coefficient sets tolerate a little more than 1.
            muon_prologue<State>(x, degenerate, directions, grads, blocks, step, count, size,
                                 config.muon_nesterov, 1.0f, config.seed, stream);
            Iterate* const updates =
                newton_schulz(x, x + count * size, count, rows, cols, optimizer.newton_schulz, stream);
            if (optimizer.steps == 1) {
                // |O|_F^2 / min(rows, cols) of each, 1 where it is orthogonal: a product of each with itself.
                gemm_batched<Iterate>(mean_squares, updates, updates, nullptr, false, true, 1, 1, size,
                                      1.0f / static_cast<float>(std::min(rows, cols)), 0.0f, count, stream);
                mean_squares += count;
            }
            for (size_t i = 0; i < count && config.muon_normuon; i++) {
                muon_normalize_neurons(updates + i * size, optimizer.slots[batch[first + i]].neurons, step,
                                       rows, cols, config.muon_normuon_beta2, stream);
            }
            muon_epilogue(params, master, updates, blocks, step, count, size, scale, stream);
            blocks += count;
            degenerate += count;
        }
    }
}

// `mean_squares` and `degenerate` in the order of muon_batches.
template <typename Iterate>
void find_first_update_faults(Optimizer& optimizer, const std::vector<Iterate>& mean_squares,
                              const std::vector<int>& degenerate) {
    size_t i = 0;
    for (const std::vector<size_t>& batch : optimizer.muon_batches) {
        for (const size_t number : batch) {
            const OptimizerSlot& slot = optimizer.slots[number];
            const float of_orthogonal = std::sqrt(to_float(mean_squares[i]));
            const bool off = !(of_orthogonal >= 0.3f && of_orthogonal <= 1.3f) && !degenerate[i];
            i++;
            if (!off) continue;
            const size_t rows = slot.block.rows, cols = slot.parameter->cols;
            const float intended = muon_scale_factor(optimizer.config.muon_scale, rows, cols) *
                                   optimizer.config.muon_scale_factor /
                                   std::sqrt(static_cast<float>(std::max(rows, cols)));
            char text[200];
            snprintf(text, sizeof(text),
                     "%s%s%s: the first update's RMS is %.3g times the learning rate, not %.3g",
                     slot.parameter->name.c_str(), slot.block.name.empty() ? "" : " ",
                     slot.block.name.c_str(), static_cast<double>(intended * of_orthogonal),
                     static_cast<double>(intended));
            optimizer.first_update_faults.push_back(text);
        }
    }
}

// The own matrices in the order of muon_batches, with the current step's rates; see optimizer.h.
std::vector<MuonBlock> muon_blocks_of(const Optimizer& optimizer, float lr) {
    std::vector<MuonBlock> blocks;
    for (const std::vector<size_t>& batch : optimizer.muon_batches) {
        for (const size_t index : batch) {
            const OptimizerSlot& slot = optimizer.slots[index];
            // The decay uses the learning rate itself, not the one that the shape scales.
            const float own_lr = optimizer_slot_lr(optimizer, slot, lr);
            const double decay =
                static_cast<double>(own_lr) * optimizer_weight_decay(optimizer, slot, own_lr);
            blocks.push_back(
                {slot.first, slot.offset(), slot.master_offset, own_lr, static_cast<float>(1.0 - decay)});
        }
    }
    return blocks;
}

// What the current step has for all of them.
MuonStep muon_step_of(const Optimizer& optimizer, float grad_scale) {
    const OptimizerConfig& config = optimizer.config;
    const double momentum =
        momentum_at({config.muon_momentum_start, config.muon_momentum, config.muon_momentum_warmup,
                     config.muon_momentum_cooldown, config.total_steps},
                    optimizer.steps - 1);
    return {.mu = static_cast<float>(momentum),
            .grad_scale = grad_scale,
            .rounding_step = static_cast<uint32_t>(optimizer.steps),
            .skip = 0,
            .cautious = config.weight_decay_mode == DecayMode::cautious};
}

}  // namespace

template <typename State, typename Iterate, typename Storage>
void muon_step(Optimizer& optimizer, Storage* params, float* master, const float* grads, float lr,
               float grad_scale, float* workspace, size_t workspace_floats, Stream* stream) {
    const size_t count = own_matrices(optimizer);
    if (count == 0) return;
    const bool first_step = optimizer.steps == 1;
    const bool tf32 = optimizer.config.muon_ns_dtype == NewtonSchulzPrecision::tf32;
    const MuonStep step = muon_step_of(optimizer, grad_scale);
    copy_to_device(optimizer.muon_step, &step, sizeof(step), stream);
    const std::vector<MuonBlock> blocks = muon_blocks_of(optimizer, lr);
    copy_to_device(optimizer.muon_blocks, blocks.data(), count * sizeof(MuonBlock), stream);
    const bool model_tf32 = tf32 && device_set_tf32(stream, true);
    const auto address = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
    replay(
        optimizer.muon_replay,
        {address(params), address(master), address(grads), address(workspace), workspace_floats, first_step},
        [&] {
            queue_step<State, Iterate>(optimizer, params, master, grads, workspace, workspace_floats, stream);
        },
        stream);
    if (tf32) device_set_tf32(stream, model_tf32);
    std::vector<int> flags(count);
    copy_to_host(flags.data(), optimizer.degenerate, count * sizeof(int), stream);
    optimizer.degenerate_updates += std::accumulate(flags.begin(), flags.end(), uint64_t{0});
    optimizer.orthogonalized += count;
    if (!first_step) return;
    std::vector<Iterate> mean_squares(count);
    copy_to_host(mean_squares.data(), optimizer.mean_squares, count * sizeof(Iterate), stream);
    find_first_update_faults<Iterate>(optimizer, mean_squares, flags);
}

#define INSTANTIATE_FOR(State, Iterate, Storage)                                                      \
    template void muon_step<State, Iterate>(Optimizer&, Storage*, float*, const float*, float, float, \
                                            float*, size_t, Stream*);
#define INSTANTIATE(Storage)                 \
    INSTANTIATE_FOR(float, float, Storage)   \
    INSTANTIATE_FOR(float, fp16_t, Storage)  \
    INSTANTIATE_FOR(float, bf16_t, Storage)  \
    INSTANTIATE_FOR(bf16_t, float, Storage)  \
    INSTANTIATE_FOR(bf16_t, fp16_t, Storage) \
    INSTANTIATE_FOR(bf16_t, bf16_t, Storage)
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
