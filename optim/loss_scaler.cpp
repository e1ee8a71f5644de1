// Dynamic loss scaling; see loss_scaler.h.
#include "optim/loss_scaler.h"

#include <algorithm>

LossScaler loss_scaler_fixed(float scale) { return {.dynamic = false, .scale = scale}; }

void loss_scaler_update(LossScaler& scaler, bool finite) {
    if (!scaler.dynamic) return;
    if (!finite) {
        scaler.scale = std::max(scaler.scale / 2, LossScaler::floor);
        scaler.good_steps = 0;
    } else if (++scaler.good_steps == LossScaler::growth_interval) {
        scaler.scale = std::min(scaler.scale * 2, LossScaler::ceiling);
        scaler.good_steps = 0;
    }
}

bool loss_scaler_can_back_off(const LossScaler& scaler) {
    return scaler.dynamic && scaler.scale > LossScaler::floor;
}
