// Learning-rate schedules: a linear warm-up, then a factor that falls from 1 to 0; see schedule.h.
#include "optim/schedule.h"

#include <algorithm>
#include <cmath>

namespace {

// What is left of the way from the peak to the final value at x in [0, 1]. Each form gives exactly 1 at the
// start and exactly 0 at the end.
double remaining(Schedule kind, double x) {
    switch (kind) {
        case Schedule::cosine:
            return 0.5 * (1.0 + std::cos(M_PI * x));
        case Schedule::linear:
            return 1.0 - x;
        case Schedule::wsd:
            return x <= 0.8 ? 1.0 : 1.0 - std::sqrt(1.0 - (1.0 - x) / 0.2);
        case Schedule::constant:
            break;
    }
    return 1.0;
}

}  // namespace

double learning_rate(const ScheduleConfig& config, size_t step) {
    if (step < config.warmup) {
        return config.lr * static_cast<double>(step + 1) / static_cast<double>(config.warmup);
    }
    // Past the end, and where the warm-up takes the whole run, the schedule is over.
    const double x = step < config.steps ? static_cast<double>(step - config.warmup) /
                                               static_cast<double>(config.steps - config.warmup)
                                         : 1.0;
    return config.lr * (config.final_lr_frac + (1.0 - config.final_lr_frac) * remaining(config.kind, x));
}

double momentum_at(const MomentumSchedule& schedule, size_t step) {
    double way = 1.0;  // from start to peak
    if (step < schedule.warmup) way = static_cast<double>(step) / static_cast<double>(schedule.warmup);
    if (step + schedule.cooldown >= schedule.steps && schedule.cooldown > 0) {
        const size_t left = schedule.steps > step ? schedule.steps - step : 0;
        way = std::min(way, static_cast<double>(left) / static_cast<double>(schedule.cooldown));
    }
    return schedule.peak - (1.0 - way) * (schedule.peak - schedule.start);  // exactly the peak on its way
}

double decay_factor(DecaySchedule schedule, size_t step, size_t steps) {
    const double x = step < steps ? static_cast<double>(step) / static_cast<double>(steps) : 1.0;
    switch (schedule) {
        case DecaySchedule::cosine:
            return remaining(Schedule::cosine, x);
        case DecaySchedule::linear:
            return remaining(Schedule::linear, x);
        case DecaySchedule::constant:
            break;
    }
    return 1.0;
}
