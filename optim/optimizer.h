// The optimizer: which tensor is updated by what (routing), the optimizer state, and the step.
//
// AdamW owns everything with --optimizer adamw. With --optimizer muon, the 2-D matrices inside the blocks go
// to Muon, one Block at a time (q, k, v apart), and the embeddings, head, biases and norms stay with AdamW.
// What each does to its slots is in adamw.h and muon.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/dtype.h"
#include "kernels/kernels.h"
#include "optim/newton_schulz.h"
#include "optim/ownership.h"
#include "optim/parameter_table.h"
#include "optim/schedule.h"

enum class OptimizerKind { adamw, muon };

// s(rows, cols), the factor on the orthogonalised update: match_rms 0.2*sqrt(max(rows, cols)) gives it the
// RMS of AdamW's updates, so that AdamW's lr and decay carry over (Liu et al. 2025, "Muon is scalable",
// arXiv:2502.16982); original sqrt(max(1, rows/cols)) (Jordan 2024); spectral sqrt(max(rows, cols)), an RMS
// of 1; unit_rms sqrt(rows/cols) (Bernstein 2025).
enum class MuonScale { match_rms, original, spectral, unit_rms };

// What a step takes from a weight W that decays, where lr is the weight's own learning rate: decoupled
// lr weight_decay W (Loshchilov, Hutter 2019); independent weight_decay W, whatever lr is, but nothing where
// lr is 0 (Wortsman et al. 2023, arXiv:2309.14322); cautious as decoupled, but of entries that the update
// makes no larger only.
enum class DecayMode { decoupled, independent, cautious };

// Newton-Schulz's matrices, and for tf32 the rounding of its products' inputs. automatic: what the device is
// fast in, fp16 on a GPU and fp32 on a CPU.
enum class NewtonSchulzPrecision { automatic, fp16, bf16, tf32, fp32 };

struct OptimizerConfig {
    OptimizerKind kind = OptimizerKind::adamw;
    uint64_t total_steps = 0;  // of the whole run, for the schedules of decay and momentum
    // Learning rates of the groups as multiples of the step's own.
    float lr_embedding = 1, lr_head = 1, lr_scalar = 1, lr_muon = 1;
    float weight_decay = 0.1f;
    DecayMode weight_decay_mode = DecayMode::decoupled;
    DecaySchedule weight_decay_schedule = DecaySchedule::constant;
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
    float muon_momentum = 0.95f, muon_momentum_start = 0.85f;
    uint64_t muon_momentum_warmup = 0, muon_momentum_cooldown = 0;  // steps; see MomentumSchedule
    bool muon_nesterov = true;
    std::string muon_ns = "cubic5";
    std::string muon_ns_coefficients;  // of muon_ns "custom"
    int muon_ns_steps = 5;
    NewtonSchulzVariant muon_ns_variant = NewtonSchulzVariant::gram;
    NewtonSchulzPrecision muon_ns_dtype = NewtonSchulzPrecision::automatic;
    MuonScale muon_scale = MuonScale::match_rms;
    float muon_scale_factor = 1;  // on top of muon_scale
    bool muon_normuon = false;    // muon_normalize_neurons after Newton-Schulz
    float muon_normuon_beta2 = 0.95f;
    Dtype state_dtype = Dtype::fp32;        // of momentum and moments: fp32 or bf16
    std::optional<Dtype> muon_state_dtype;  // of Muon's momentum, where it is another one
    uint64_t seed = 0;                      // of the stochastic rounding of bf16 state
};

// One block of one tensor with its optimizer state: vectors of size() numbers, each at a multiple
// of 128 bytes in the arena.
struct OptimizerSlot {
    const Parameter* parameter;
    Block block;
    bool muon;
    Dtype state_dtype;         // of first and second
    bool own;                  // else another rank updates it, and there is no state here
    size_t master_offset;      // of the block's master weights in their arena
    float lr_factor = 1;       // times the learning rate, the decay's too: lr_adapt.h
    void* first = nullptr;     // Muon: momentum; AdamW: m
    void* second = nullptr;    // AdamW: v; null for Muon
    float* neurons = nullptr;  // NorMuon: v of the neurons, in fp32; else null

    size_t size() const { return block.rows * parameter->cols; }
    size_t offset() const { return parameter->offset + block.first_row * parameter->cols; }
    // Of one of its vectors, with the gap up to the next.
    size_t vector_bytes() const { return aligned_elements(size()) * dtype_size(state_dtype); }
    size_t neuron_count() const { return block.rows > parameter->cols ? block.rows : parameter->cols; }
};

struct Optimizer {
    OptimizerConfig config;
    NewtonSchulz newton_schulz;
    Dtype newton_schulz_dtype = Dtype::fp32;        // known once there is a device
    std::vector<OptimizerSlot> slots;               // in table order
    std::vector<std::vector<size_t>> muon_batches;  // Muon's own slots, those of equal shape together
    void* state = nullptr;                          // one arena: the slots' vectors, then their neurons
    size_t state_bytes = 0, neuron_elements = 0;    // of the vectors, of the neurons
    int* degenerate = nullptr;         // one flag a slot; the first are those of muon_batches, in order
    MuonBlock* muon_blocks = nullptr;  // on the device: of the current step, those of muon_batches in order
    MuonStep* muon_step = nullptr;     // on the device: of the current step
    Replay* muon_replay = nullptr;     // of Muon's ops
    void* mean_squares = nullptr;      // on the device, of Newton-Schulz's type: of each first update
    uint64_t steps = 0;                // optimizer steps taken: t of AdamW's bias correction
    uint64_t degenerate_updates = 0;  // Muon updates so far that were zero, as their norm was 0 or not finite
    uint64_t orthogonalized = 0;      // matrices that went through Newton-Schulz so far
    // One line for each matrix whose first update was not of the size that it is meant to have.
    std::vector<std::string> first_update_faults;
};

// Fails, naming the option, on a decay, average or epsilon out of range, and on state that is neither fp32
// nor bf16.
void optimizer_check(const OptimizerConfig& config);

// The optimizer without its memory: which slot is whose, and how much state and workspace it takes. `table`
// must outlive it; without an ownership all of it is this rank's. Fails, naming the option, on illegal
// settings, and on a table whose blocks do not tile their tensors.
Optimizer optimizer_plan(const OptimizerConfig& config, const ParameterTable& table,
                         const Ownership* ownership = nullptr);

// The planned optimizer with its state, zeroed.
Optimizer optimizer_create(const OptimizerConfig& config, const ParameterTable& table, Stream* stream,
                           const Ownership* ownership = nullptr);
void optimizer_destroy(Optimizer& optimizer, Stream* stream);

// The random bits of a slot's rounding in the current step. They follow a number's place in the parameters'
// arena, and so neither the order of the updates nor who makes them.
StateRounding optimizer_rounding(const Optimizer& optimizer, const OptimizerSlot& slot);

// The learning rate of a slot, where `lr` is the schedule's; and the factor that, times a learning rate of
// `own_lr`, gives the current step's decay, 0 for a slot that has none.
float optimizer_slot_lr(const Optimizer& optimizer, const OptimizerSlot& slot, float lr);
float optimizer_weight_decay(const Optimizer& optimizer, const OptimizerSlot& slot, float own_lr);

// Bytes of optimizer state in the arena.
size_t optimizer_state_bytes(const Optimizer& optimizer);
// Bytes of device memory beside the state: a flag a slot, and what Muon's kernels are told of its matrices.
size_t optimizer_lists_bytes(const Optimizer& optimizer);

// The fewest floats of workspace that a step can work with: one matrix of the largest shape fits; 0 without
// Muon. More lets the matrices of a shape be orthogonalised in larger batches, never with other bits.
size_t optimizer_minimum_workspace(const Optimizer& optimizer);

// One step on all own slots: gradients are multiplied by grad_scale (clipping, unscaling) first.
// The gradients must be finite, for a NaN stays in momentum and moments: skip a step whose global norm is
// not. params and grads are the arenas of the table; master, the fp32 copy
// that 16-bit params are rounded from, is null where Storage is float. workspace: memory
// that is dead between backward and the next forward. Fails, with nothing changed, if it is too small.
template <typename Storage>
void optimizer_step(Optimizer& optimizer, Storage* params, float* master, const float* grads, float lr,
                    float grad_scale, float* workspace, size_t workspace_floats, Stream* stream);
