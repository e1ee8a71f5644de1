// Muon's part of an optimizer step (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), in the
// form that shares AdamW's learning rate and decay (Liu et al. 2025, "Muon is scalable", arXiv:2502.16982):
//   direction = momentum with Nesterov;  O = Newton-Schulz(direction / Frobenius norm), nearly its polar
//   factor; W <- W (1 - lr weight_decay) - lr s(rows, cols) O
// for each block W of a tensor by itself: q, k and v are three matrices.
#pragma once

#include "optim/optimizer.h"

// s(rows, cols) of a scale mode, for a block of (out, in) = (rows, cols).
float muon_scale_factor(MuonScale mode, size_t rows, size_t cols);

// Floats of workspace for orthogonalising `count` blocks of (rows, cols) together, in fp32; 16 bits take
// less.
size_t muon_workspace(const NewtonSchulz& method, size_t count, size_t rows, size_t cols);

// How many matrices this rank updates: those of muon_batches.
size_t own_matrices(const Optimizer& optimizer);

// What muon_step needs beside the state: room on the device for its lists.
void muon_create(Optimizer& optimizer, Stream* stream);

// Updates the Muon slots and counts the degenerate ones. The first step also fills first_update_faults: the
// root mean square of a matrix's update, degenerate ones apart, should be that of an orthogonal matrix times
// s, up to the polynomial's range and to the rank of the gradient: between 0.3 and 1.3 times as much. State
// is the slots' state_dtype, Iterate the type of Newton-Schulz's matrices, any storage type; other
// arguments as in optimizer_step, which has checked that one matrix of each shape fits the workspace.
template <typename State, typename Iterate, typename Storage>
void muon_step(Optimizer& optimizer, Storage* params, float* master, const float* grads, float lr,
               float grad_scale, float* workspace, size_t workspace_floats, Stream* stream);
