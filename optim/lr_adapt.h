// --lr-adapt: learning rates that react to the variance of the gradients, block by block.
//
// The leaves of a step (virtual ranks) are K samples of the same gradient. With g_k the mean gradient of leaf
// k's tokens and g = mean of the g_k, the step's gradient, both by the sums of their squares alone:
//   noise  = (mean |g_k|^2 - |g|^2) K / (K - 1)    the variance of one leaf's gradient, unbiased
//   signal = |g|^2 - noise / K                     the square of the true gradient, unbiased
// (McCandlish et al. 2018, "An empirical model of large-batch training", arXiv:1812.06162, appendix A.1). The
// part rho = signal / (signal + noise / K) of |g|^2 that is no noise is the square of the cosine that a
// step's gradient has with the true one, and does not depend on how many leaves a step is cut into.
//
// AdamW's and Muon's updates have a size of their own, whatever the gradient's. Along a direction whose
// cosine with the true gradient is c the best step of that kind is proportional to c: to sqrt(rho), which is
// also the square-root rule that adaptive optimizers obey when the batch changes (Malladi et al. 2022,
// arXiv:2205.10287). What it is proportional to is the schedule's business; so rho counts relative to its own
// past:
//   fast += (rho - fast) max(1/t, 1/10),  slow += (rho - slow) max(1/t, 1/100)    after t = 1, 2, ... steps
//   multiplier = sqrt((fast + floor) / (slow + floor)), kept in [1/2, 2]
// It is 1 in the first ten steps and wherever rho is steady, falls when the gradients get noisier than they
// used to be (a smaller batch), and rises when they agree more. A step's rho is cut off at 0 and 1; of noise
// in n directions it has a standard deviation of about sqrt(2 / n), and `floor`, which is as much at n = 800,
// keeps chance from moving the rates of blocks whose gradient is all noise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

struct GradientNoise {
    double signal, noise;  // as above; of little signal, chance can make it negative
};

// leaf_squares: the sum over the K = `leaves` leaves, 2 at least, of the squares of their shares of the
// gradient, g_k / K; squares: |g|^2, the square of their sum.
GradientNoise gradient_noise(double leaf_squares, double squares, size_t leaves);

struct LrAdapt {
    static constexpr double fast_steps = 10, slow_steps = 100;
    static constexpr double floor = 0.05;
    static constexpr double lowest = 0.5, highest = 2;

    uint64_t steps = 0;
    std::vector<double> fast, slow;  // of each block
};

LrAdapt lr_adapt_create(size_t blocks);

// The multipliers of a step's learning rates, one a block, from the sums of squares of its gradients, all of
// them finite; see gradient_noise. A block without any gradient counts as noise. Where the step is not taken
// this must not be called.
std::vector<float> lr_adapt_step(LrAdapt& adapt, const std::vector<double>& leaf_squares,
                                 const std::vector<double>& squares, size_t leaves);
