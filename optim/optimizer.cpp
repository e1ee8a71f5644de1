// Routing, state and the step; see optimizer.h.
#include "optim/optimizer.h"

#include <algorithm>
#include <cmath>

#include "kernels/error.h"
#include "optim/adamw.h"
#include "optim/muon.h"

namespace {

// A row in no block would never be updated, one in two blocks updated twice.
void check_blocks(const Parameter& parameter) {
    size_t row = 0;
    for (const Block& block : parameter.blocks) {
        if (block.first_row != row || block.rows == 0) break;
        row += block.rows;
    }
    if (row != parameter.rows)
        fail("%s: its blocks do not tile its %zu rows", parameter.name.c_str(), parameter.rows);
}

NewtonSchulz newton_schulz_of(const OptimizerConfig& config) {
    const bool custom = config.muon_ns == "custom";
    if (!custom && !config.muon_ns_coefficients.empty())
        fail("--muon-ns-coefficients '%s': is for --muon-ns custom", config.muon_ns_coefficients.c_str());
    const NewtonSchulzSteps steps =
        custom ? newton_schulz_custom(config.muon_ns_coefficients, config.muon_ns_steps)
               : newton_schulz_set(config.muon_ns, config.muon_ns_steps, config.muon_ns_variant);
    // bf16 rounds so coarsely that Gram Newton-Schulz needs a restart with any coefficients.
    return newton_schulz_plan(steps, config.muon_ns_variant,
                              config.muon_ns_dtype == NewtonSchulzPrecision::bf16 ? 1 : 0);
}

// The storage of a precision; TF32 is fp32 in memory. Fails where the device lacks it.
Dtype newton_schulz_dtype(NewtonSchulzPrecision precision, Stream* stream) {
    switch (precision) {
        case NewtonSchulzPrecision::automatic:
            return device_has_fast_fp16(stream) ? Dtype::fp16 : Dtype::fp32;
        case NewtonSchulzPrecision::fp16:
            return Dtype::fp16;
        case NewtonSchulzPrecision::bf16:
            return Dtype::bf16;
        case NewtonSchulzPrecision::tf32:
            device_set_tf32(stream, device_set_tf32(stream, true));
            break;
        case NewtonSchulzPrecision::fp32:
            break;
    }
    return Dtype::fp32;
}

std::vector<std::vector<size_t>> batches_of_equal_shape(const std::vector<OptimizerSlot>& slots) {
    std::vector<std::vector<size_t>> batches;
    for (size_t i = 0; i < slots.size(); i++) {
        if (!slots[i].muon || !slots[i].own) continue;
        const auto same_shape = [&](const std::vector<size_t>& batch) {
            const OptimizerSlot& other = slots[batch.front()];
            return other.block.rows == slots[i].block.rows &&
                   other.parameter->cols == slots[i].parameter->cols;
        };
        const auto batch = std::find_if(batches.begin(), batches.end(), same_shape);
        if (batch == batches.end()) {
            batches.push_back({i});
        } else {
            batch->push_back(i);
        }
    }
    return batches;
}

}  // namespace

void optimizer_check(const OptimizerConfig& config) {
    // The comparisons are written so that a NaN is illegal.
    const auto require = [](bool legal, const char* option, float value, const char* rule) {
        if (!legal) fail("%s %g: must be %s", option, static_cast<double>(value), rule);
    };
    const auto is_average = [](float beta) { return beta >= 0.0f && beta < 1.0f; };
    require(config.weight_decay >= 0.0f && std::isfinite(config.weight_decay), "--weight-decay",
            config.weight_decay, "finite and not negative");
    require(is_average(config.beta1), "--beta1", config.beta1, "in [0, 1)");
    require(is_average(config.beta2), "--beta2", config.beta2, "in [0, 1)");
    require(config.eps > 0.0f && std::isfinite(config.eps), "--eps", config.eps, "finite and positive");
    require(is_average(config.muon_momentum), "--muon-momentum", config.muon_momentum, "in [0, 1)");
    require(is_average(config.muon_momentum_start), "--muon-momentum-start", config.muon_momentum_start,
            "in [0, 1)");
    require(is_average(config.muon_normuon_beta2), "--muon-normuon-beta2", config.muon_normuon_beta2,
            "in [0, 1)");
    require(config.muon_scale_factor > 0.0f && std::isfinite(config.muon_scale_factor), "--muon-scale-factor",
            config.muon_scale_factor, "finite and positive");
    const auto require_state = [](const char* option, Dtype dtype) {
        if (dtype != Dtype::fp32 && dtype != Dtype::bf16)
            fail("%s %s: must be fp32 or bf16", option, dtype_name(dtype));
    };
    require_state("--state-dtype", config.state_dtype);
    if (config.muon_state_dtype) require_state("--muon-state-dtype", *config.muon_state_dtype);
}

Optimizer optimizer_plan(const OptimizerConfig& config, const ParameterTable& table,
                         const Ownership* ownership) {
    optimizer_check(config);
    Optimizer optimizer;
    optimizer.config = config;
    optimizer.newton_schulz = newton_schulz_of(config);
    for (const Parameter& parameter : table) check_blocks(parameter);
    const Ownership all = own_all(table);
    const Ownership& owners = ownership == nullptr ? all : *ownership;
    for_blocks(table, [&](const Parameter& parameter, const Block& block, size_t number) {
        const bool muon = config.kind == OptimizerKind::muon && parameter.group == ParameterGroup::muon;
        const Dtype dtype = muon ? config.muon_state_dtype.value_or(config.state_dtype) : config.state_dtype;
        const OptimizerSlot slot{
            &parameter, block, muon, dtype, owners.own(number), owners.master_offset[number]};
        if (slot.own) optimizer.state_bytes += (muon ? 1 : 2) * slot.vector_bytes();
        if (slot.own && muon && config.muon_normuon)
            optimizer.neuron_elements += aligned_elements(slot.neuron_count());
        optimizer.slots.push_back(slot);
    });
    optimizer.muon_batches = batches_of_equal_shape(optimizer.slots);
    return optimizer;
}

Optimizer optimizer_create(const OptimizerConfig& config, const ParameterTable& table, Stream* stream,
                           const Ownership* ownership) {
    Optimizer optimizer = optimizer_plan(config, table, ownership);
    optimizer.newton_schulz_dtype = newton_schulz_dtype(config.muon_ns_dtype, stream);
    const size_t bytes = optimizer_state_bytes(optimizer);
    optimizer.state = device_malloc(bytes, stream);
    device_memset_zero(optimizer.state, bytes, stream);
    optimizer.degenerate = static_cast<int*>(device_malloc(optimizer.slots.size() * sizeof(int), stream));
    char* next = static_cast<char*>(optimizer.state);
    float* next_neurons = reinterpret_cast<float*>(next + optimizer.state_bytes);
    for (OptimizerSlot& slot : optimizer.slots) {
        if (!slot.own) continue;
        slot.first = next;
        next += slot.vector_bytes();
        if (slot.muon && config.muon_normuon) {
            slot.neurons = next_neurons;
            next_neurons += aligned_elements(slot.neuron_count());
        }
        if (slot.muon) continue;
        slot.second = next;
        next += slot.vector_bytes();
    }
    muon_create(optimizer, stream);
    return optimizer;
}

void optimizer_destroy(Optimizer& optimizer, Stream* stream) {
    device_free(optimizer.state, stream);
    device_free(optimizer.degenerate, stream);
    device_free(optimizer.muon_blocks, stream);
    device_free(optimizer.muon_step, stream);
    device_free(optimizer.mean_squares, stream);
    replay_destroy(optimizer.muon_replay);
    optimizer = {};
}

StateRounding optimizer_rounding(const Optimizer& optimizer, const OptimizerSlot& slot) {
    return {optimizer.config.seed, static_cast<uint32_t>(optimizer.steps), slot.offset()};
}

size_t optimizer_state_bytes(const Optimizer& optimizer) {
    return optimizer.state_bytes + optimizer.neuron_elements * sizeof(float);
}

size_t optimizer_lists_bytes(const Optimizer& optimizer) {
    const size_t matrices = own_matrices(optimizer);
    const size_t of_a_matrix = sizeof(MuonBlock) + dtype_size(optimizer.newton_schulz_dtype);
    return optimizer.slots.size() * sizeof(int) + matrices * of_a_matrix +
           (matrices > 0 ? sizeof(MuonStep) : 0);
}

float optimizer_slot_lr(const Optimizer& optimizer, const OptimizerSlot& slot, float lr) {
    const OptimizerConfig& config = optimizer.config;
    lr *= slot.lr_factor;
    switch (slot.parameter->group) {
        case ParameterGroup::adamw_embedding:
            return lr * config.lr_embedding;
        case ParameterGroup::adamw_head:
            return lr * config.lr_head;
        case ParameterGroup::adamw_scalar:
            return lr * config.lr_scalar;
        case ParameterGroup::muon:
            break;
    }
    return slot.muon ? lr * config.lr_muon : lr;
}

float optimizer_weight_decay(const Optimizer& optimizer, const OptimizerSlot& slot, float own_lr) {
    if (!slot.parameter->weight_decay) return 0.0f;
    const OptimizerConfig& config = optimizer.config;
    const double decay = config.weight_decay *
                         decay_factor(config.weight_decay_schedule, optimizer.steps - 1, config.total_steps);
    if (config.weight_decay_mode != DecayMode::independent) return static_cast<float>(decay);
    return own_lr > 0.0f ? static_cast<float>(decay / static_cast<double>(own_lr)) : 0.0f;
}

size_t optimizer_minimum_workspace(const Optimizer& optimizer) {
    size_t floats = 0;
    for (const std::vector<size_t>& batch : optimizer.muon_batches) {
        const OptimizerSlot& slot = optimizer.slots[batch.front()];
        floats = std::max(floats,
                          muon_workspace(optimizer.newton_schulz, 1, slot.block.rows, slot.parameter->cols));
    }
    return floats;
}

template <typename Storage>
void optimizer_step(Optimizer& optimizer, Storage* params, float* master, const float* grads, float lr,
                    float grad_scale, float* workspace, size_t workspace_floats, Stream* stream) {
    const size_t needed = optimizer_minimum_workspace(optimizer);
    if (workspace_floats < needed) {
        fail("optimizer step: a workspace of %zu floats is too small, Muon's largest matrix needs %zu",
             workspace_floats, needed);
    }
    optimizer.steps++;
    const OptimizerConfig& config = optimizer.config;
    const auto adamw =
        config.state_dtype == Dtype::bf16 ? adamw_step<bf16_t, Storage> : adamw_step<float, Storage>;
    adamw(optimizer, params, master, grads, lr, grad_scale, stream);
    const auto update_muon = [&]<typename State>(State) {
        const Dtype iterate = optimizer.newton_schulz_dtype;
        const auto muon = iterate == Dtype::fp16   ? muon_step<State, fp16_t, Storage>
                          : iterate == Dtype::bf16 ? muon_step<State, bf16_t, Storage>
                                                   : muon_step<State, float, Storage>;
        muon(optimizer, params, master, grads, lr, grad_scale, workspace, workspace_floats, stream);
    };
    if (config.muon_state_dtype.value_or(config.state_dtype) == Dtype::bf16) {
        update_muon(bf16_t{});
    } else {
        update_muon(float{});
    }
}

template void optimizer_step(Optimizer&, float*, float*, const float*, float, float, float*, size_t, Stream*);
template void optimizer_step(Optimizer&, bf16_t*, float*, const float*, float, float, float*, size_t,
                             Stream*);
template void optimizer_step(Optimizer&, fp16_t*, float*, const float*, float, float, float*, size_t,
                             Stream*);
