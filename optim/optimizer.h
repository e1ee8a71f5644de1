// The optimizer: which tensor is updated by what (routing), the optimizer state, and the step.
//
// AdamW owns everything with --optimizer adamw. With --optimizer muon, the 2-D matrices inside the blocks go
// to Muon, one Block at a time (q, k, v apart), and the embeddings, head, biases and norms stay with AdamW.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "optim/newton_schulz.h"
#include "optim/parameter_table.h"

enum class OptimizerKind { adamw, muon };

// s(rows, cols), the factor on the orthogonalised update (muon.md is summarised in README, "Muon"):
// match_rms 0.2*sqrt(max) has AdamW's update RMS, so that AdamW's lr and decay carry over (Liu et al. 2025,
// "Muon is scalable", arXiv:2502.16982); original sqrt(max(1, rows/cols)) (Jordan 2024); spectral sqrt(max);
// unit_rms sqrt(rows/cols) (Bernstein 2025).
enum class MuonScale { match_rms, original, spectral, unit_rms };

struct OptimizerConfig {
    OptimizerKind kind = OptimizerKind::adamw;
    float weight_decay = 0.1f;
    float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
    float muon_momentum = 0.95f;
    bool muon_nesterov = true;
    std::string muon_ns = "polar-express";
    int muon_ns_steps = 5;
    MuonScale muon_scale = MuonScale::match_rms;
};

// One block of one tensor with its optimizer state. Vectors of a slot are contiguous.
struct OptimizerSlot {
    const Parameter* parameter;
    Block block;
    bool muon;
    float* first;   // Muon: momentum; AdamW: m
    float* second;  // AdamW: v; null for Muon

    size_t size() const { return block.rows * parameter->cols; }
    size_t offset() const { return parameter->offset + block.first_row * parameter->cols; }
};

struct Optimizer {
    OptimizerConfig config;
    NewtonSchulzSet newton_schulz;
    std::vector<OptimizerSlot> slots;                   // in table order
    std::vector<std::vector<size_t>> muon_batches;      // slots of equal shape, orthogonalised together
    float* state = nullptr;                             // one arena
    size_t state_elements = 0;
    int* degenerate = nullptr;                          // one flag a slot: its norm was zero or not finite
    uint64_t steps = 0;                                 // optimizer steps taken: t of AdamW's bias correction
    uint64_t degenerate_updates = 0;                    // Muon updates so far that were zero for that reason
};

// Builds the slots and the zeroed state. `table` must outlive the optimizer. Fails on illegal settings.
Optimizer optimizer_create(const OptimizerConfig& config, const ParameterTable& table, Stream* stream);
void optimizer_destroy(Optimizer& optimizer, Stream* stream);

// Bytes of optimizer state in the arena.
size_t optimizer_state_bytes(const Optimizer& optimizer);

// Workspace in floats: with `minimum`, one matrix at a time fits; with less memory the step fails.
// More lets the matrices of a shape be orthogonalised in larger batches, never with other bits.
size_t optimizer_minimum_workspace(const Optimizer& optimizer);

// One step on all tensors: gradients are multiplied by grad_scale (clipping, unscaling) first.
// params and grads are the arenas of the table; master is null where Storage is float.
// workspace: memory that is dead between backward and the next forward.
template <typename Storage>
void optimizer_step(Optimizer& optimizer, Storage* params, float* master, const float* grads, float lr,
                    float grad_scale, float* workspace, size_t workspace_floats, Stream* stream);

// s(rows, cols) of a scale mode.
float muon_scale_factor(MuonScale mode, size_t rows, size_t cols);
