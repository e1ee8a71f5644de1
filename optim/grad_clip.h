// The global gradient norm and clipping by it.
#pragma once

#include "kernels/device.h"
#include "optim/parameter_table.h"

// The 2-norm of all gradients in the arena `grads`: squares in fp64, row by row, then block by block in
// table order, so that the bits depend on nothing else. Non-finite if any gradient is.
// `device_sums` is device memory for one double a block (table_blocks of them).
double global_grad_norm(const float* grads, const ParameterTable& table, double* device_sums, Stream* stream);

// Number of blocks in the table.
size_t table_blocks(const ParameterTable& table);

// The factor that brings a gradient of this norm down to max_norm: min(1, max_norm / (norm + 1e-6)), as
// torch.nn.utils.clip_grad_norm_ has it; 1 where max_norm is 0 (clipping off). No factor repairs a non-finite
// norm: such a step must be skipped; a NaN gives NaN.
float clip_factor(double norm, double max_norm);
