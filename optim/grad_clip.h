// The global gradient norm and clipping by it.
#pragma once

#include <vector>

#include "kernels/device.h"
#include "optim/ownership.h"

// *sum, on the device, = the sum of the squares of a block of the gradients' arena `grads`, in fp64.
void block_square(double* sum, const float* grads, const Parameter& parameter, const Block& block,
                  Stream* stream);

// The sum of the squares of each own block of the gradients' arena `grads`, in table order and fp64; 0 for
// the blocks of other ranks. Added up over the ranks, these are the sums of all blocks. `device_sums` is
// device memory for one double a block (table_blocks of them).
std::vector<double> block_squares(const float* grads, const ParameterTable& table, const Ownership& ownership,
                                  double* device_sums, Stream* stream);

// The 2-norm of all gradients from the squares of all blocks, added in table order: the bits depend on
// nothing else. Non-finite if any gradient is.
double global_grad_norm(const std::vector<double>& squares);

// The factor that brings a gradient of this norm down to max_norm: min(1, max_norm / (norm + 1e-6)), as
// torch.nn.utils.clip_grad_norm_ has it; 1 where max_norm is 0 (clipping off). No factor repairs a non-finite
// norm: such a step must be skipped; a NaN gives NaN.
float clip_factor(double norm, double max_norm);
