// AdamW's part of an optimizer step: every slot that is not Muon's.
#pragma once

#include "optim/optimizer.h"

// Updates the AdamW slots with kernels.h's adamw_update, for step t = optimizer.steps. State is the slots'
// state_dtype; arguments as in optimizer_step.
template <typename State, typename Storage>
void adamw_step(const Optimizer& optimizer, Storage* params, float* master, const float* grads, float lr,
                float grad_scale, Stream* stream);
