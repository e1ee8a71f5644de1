// Newton-Schulz iteration: an odd matrix polynomial, applied a few times, turns a matrix X = U S V^T with
// singular values in [0, 1] into nearly U V^T, its polar factor, with matrix products only.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/device.h"

// One step X <- a X + b (X X^T) X + c (X X^T)^2 X: every singular value s becomes a s + b s^3 + c s^5.
struct NewtonSchulzStep {
    float a, b, c;
};

// A named coefficient set for a number of steps:
//   "keller"         (3.4445, -4.7750, 2.0315) every step (Jordan 2024); 3 steps or more
//   "polar-express"  generated: polar_express(1e-3, steps, 0.02, 0.02); 5 steps or more
// Fails, with the reason, on an unknown set, a step count that the set was not made for, and (a guard for
// every set) where the composed polynomial does not bring all of [0.01, 1] near 1.
struct NewtonSchulzSet {
    std::vector<NewtonSchulzStep> steps;
    float safety;  // divide by safety * Frobenius norm before the first step
};
NewtonSchulzSet newton_schulz_set(const std::string& name, int steps);

// The optimal odd quintics for singular values that start in [lower, 1] (Amsel, Persson, Musco, Gower,
// "The Polar Express", arXiv:2505.16932). Each equi-oscillates around 1 on the current interval, whose
// lower end is not taken below cushion * its upper end; each but (as published) is divided by 1 + safety.
std::vector<NewtonSchulzStep> polar_express(double lower, int steps, double safety, double cushion);

// Floats of workspace that `newton_schulz` needs for `batch` matrices.
size_t newton_schulz_workspace(size_t batch, size_t rows, size_t cols);

// Applies the steps to `batch` contiguous (rows, cols) matrices in place; the small side's Gram matrix is
// used, so tall matrices need no transpose. x must be normalised (muon_normalize). A zero matrix stays
// exactly zero. The bits of one matrix do not depend on the batch.
void newton_schulz(float* x, float* workspace, size_t batch, size_t rows, size_t cols,
                   const std::vector<NewtonSchulzStep>& steps, Stream* stream);
