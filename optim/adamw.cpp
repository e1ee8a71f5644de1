// AdamW (Loshchilov, Hutter 2019, arXiv:1711.05101) on the slots it owns; the formula is in kernels.h.
#include "optim/adamw.h"

#include <cmath>

#include "kernels/kernels.h"

template <typename State, typename Storage>
void adamw_step(const Optimizer& optimizer, Storage* params, float* master, const float* grads, float lr,
                float grad_scale, Stream* stream) {
    const OptimizerConfig& config = optimizer.config;
    // 1 - beta^t in fp64: in fp32 it would lose digits to cancellation in the first steps.
    const double t = static_cast<double>(optimizer.steps);
    AdamWStep step{};
    step.beta1 = config.beta1;
    step.beta2 = config.beta2;
    step.eps = config.eps;
    step.bias_correction1 = static_cast<float>(1.0 - std::pow(static_cast<double>(config.beta1), t));
    step.bias_correction2 = static_cast<float>(1.0 - std::pow(static_cast<double>(config.beta2), t));
    step.grad_scale = grad_scale;
    step.cautious = config.weight_decay_mode == DecayMode::cautious;

    for (const OptimizerSlot& slot : optimizer.slots) {
        if (slot.muon || !slot.own) continue;
        step.lr = optimizer_slot_lr(optimizer, slot, lr);
        step.weight_decay = optimizer_weight_decay(optimizer, slot, step.lr);
        const size_t offset = slot.offset();
        adamw_update(params + offset, master == nullptr ? nullptr : master + slot.master_offset,
                     static_cast<State*>(slot.first), static_cast<State*>(slot.second), grads + offset,
                     slot.size(), step, optimizer_rounding(optimizer, slot), stream);
    }
}

#define INSTANTIATE(Storage)                                                                        \
    template void adamw_step<float>(const Optimizer&, Storage*, float*, const float*, float, float, \
                                    Stream*);                                                       \
    template void adamw_step<bf16_t>(const Optimizer&, Storage*, float*, const float*, float, float, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
