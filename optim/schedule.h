// Learning-rate schedules.
#pragma once

#include <cstddef>
#include <string>

enum class Schedule { cosine, linear, constant, wsd };

struct ScheduleConfig {
    Schedule kind = Schedule::cosine;
    double lr = 6e-4;            // the peak
    size_t warmup = 700;         // optimizer steps of linear rise: lr * (step + 1) / warmup
    size_t steps = 0;            // optimizer steps of the whole run
    double final_lr_frac = 0.0;  // the schedule ends at lr * final_lr_frac
};

// The learning rate of optimizer step `step` = 0, 1, ...; always in [0, lr] for a final_lr_frac in [0, 1],
// and held at the final value past the end. After the warm-up, with x = (step - warmup) / (steps - warmup):
// cosine falls as (1 + cos(pi x)) / 2 (llm.c), linear as 1 - x; wsd stays until x = 0.8, then falls as
// 1 - sqrt((x - 0.8) / 0.2) (Haegele et al. 2024, arXiv:2405.18392); constant stays, whatever final_lr_frac.
// A warm-up of `steps` or more leaves no time to decay.
double learning_rate(const ScheduleConfig& config, size_t step);

// Muon's momentum: from `start` linearly to `peak` in `warmup` steps, and back to `start` in the last
// `cooldown` of the run's `steps` (modded-nanogpt: 0.85 to 0.95 in 300 steps, back in the last 50). A warm-up
// or cool-down of 0 is none.
struct MomentumSchedule {
    double start, peak;
    size_t warmup, cooldown, steps;
};
// The momentum of optimizer step `step` = 0, 1, ...; always between start and peak.
double momentum_at(const MomentumSchedule& schedule, size_t step);

// The weight decay of optimizer step `step` as a part of its peak, with x = step / steps, 1 at most: 1;
// (1 + cos(pi x)) / 2 (nanochat); or 1 - x.
enum class DecaySchedule { constant, cosine, linear };
double decay_factor(DecaySchedule schedule, size_t step, size_t steps);
