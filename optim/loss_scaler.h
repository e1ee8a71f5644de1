// Dynamic loss scaling for FP16 (Micikevicius et al. 2017, arXiv:1710.03740): small gradients would vanish in
// fp16, whose smallest number is 2^-24, so the loss is multiplied by a power of two before backward and the
// fp32 gradients by its inverse after. A scale that is too large shows as a gradient that is not finite.
#pragma once

#include <cstdint>

struct LossScaler {
    // The first scale, how long it must hold before it is doubled, and its bounds. PyTorch's GradScaler has
    // the same start and interval, and no bounds: 0 and infinity are then reached in the end.
    static constexpr float initial_scale = 65536, floor = 1, ceiling = 16777216;
    static constexpr uint64_t growth_interval = 2000;

    bool dynamic = true;
    float scale = initial_scale;
    uint64_t good_steps = 0;  // since the scale changed
};

// 1 for ever, for types with fp32's range, or the scale that the user fixed.
LossScaler loss_scaler_fixed(float scale);

// After each step: a step with finite gradients counts, and every growth_interval of them double the scale;
// one without, which the caller skips, halves it. Neither leaves [floor, ceiling].
void loss_scaler_update(LossScaler& scaler, bool finite);

// Whether a smaller scale could help, so that a skipped step is no sign of a failing run.
bool loss_scaler_can_back_off(const LossScaler& scaler);
