// Learning-rate schedules: a linear warm-up, then a factor that falls from 1 to 0; see schedule.h.
#include "optim/schedule.h"

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
