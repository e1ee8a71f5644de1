// Signal, noise and the multipliers of learning rates; see lr_adapt.h.
#include "optim/lr_adapt.h"

#include <algorithm>
#include <cmath>

GradientNoise gradient_noise(double leaf_squares, double squares, size_t leaves) {
    const auto K = static_cast<double>(leaves);
    const double mean = K * leaf_squares;  // of |g_k|^2
    const double noise = (mean - squares) * K / (K - 1);
    return {squares - noise / K, noise};
}

LrAdapt lr_adapt_create(size_t blocks) {
    LrAdapt adapt;
    adapt.fast.resize(blocks);
    adapt.slow.resize(blocks);
    return adapt;
}

std::vector<float> lr_adapt_step(LrAdapt& adapt, const std::vector<double>& leaf_squares,
                                 const std::vector<double>& squares, size_t leaves) {
    adapt.steps++;
    const double first = 1 / static_cast<double>(adapt.steps);
    std::vector<float> multipliers;
    for (size_t block = 0; block < squares.size(); block++) {
        double rho = 0;
        if (squares[block] > 0) {
            const double signal = gradient_noise(leaf_squares[block], squares[block], leaves).signal;
            rho = std::clamp(signal / squares[block], 0.0, 1.0);
        }
        double &fast = adapt.fast[block], &slow = adapt.slow[block];
        fast += (rho - fast) * std::max(first, 1 / LrAdapt::fast_steps);
        slow += (rho - slow) * std::max(first, 1 / LrAdapt::slow_steps);
        const double multiplier = std::sqrt((fast + LrAdapt::floor) / (slow + LrAdapt::floor));
        multipliers.push_back(static_cast<float>(std::clamp(multiplier, LrAdapt::lowest, LrAdapt::highest)));
    }
    return multipliers;
}
