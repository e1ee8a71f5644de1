// Newton-Schulz iteration: an odd matrix polynomial, applied a few times, turns a matrix X = U S V^T with
// singular values in [0, 1] into nearly U V^T, its polar factor, with matrix products only.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/device.h"

// One step X <- a X + b (X X^T) X + c (X X^T)^2 X: every singular value s becomes p(s) = a s + b s^3 + c s^5.
struct NewtonSchulzStep {
    double a, b, c;

    double value(double s) const { return s * (a + s * s * (b + s * s * c)); }
};

// A named coefficient set for a number of steps:
//   "keller"         (3.4445, -4.7750, 2.0315) every step (Jordan 2024); 3 to 10 steps
//   "polar-express"  generated: polar_express(1e-3, steps, 0.02, 0.02); 5 to 10 steps
// Fails, with the reason, on an unknown set and on a step count that the set was not made for.
std::vector<NewtonSchulzStep> newton_schulz_set(const std::string& name, int steps);

// The optimal odd quintics for singular values that start in [lower, 1] (Amsel, Persson, Musco, Gower, "The
// Polar Express", arXiv:2505.16932). Each equi-oscillates around 1 on the interval that the steps before it
// leave, taken as no wider than [cushion * upper, upper] so that small values do not make it overshoot. All
// but the last are stretched, p(s / (1 + safety)), which tolerates values that rounding lifts above the
// interval. (1e-3, 5, 0.02, 0.02) gives the coefficients of modded-nanogpt and nanochat.
std::vector<NewtonSchulzStep> polar_express(double lower, int steps, double safety, double cushion);

// Where the composed polynomial takes the singular values of [lowest, 1].
struct SingularValueRange {
    double low, high;
};
SingularValueRange newton_schulz_range(const std::vector<NewtonSchulzStep>& steps, double lowest);

// The guard behind every set: fails unless the steps take all of [0.01, 1] into [0.35, 1.3]. A set that is
// cut short, repeated or cycled can shrink updates to an eighth, or even reverse their sign, while training
// seems to go on.
void newton_schulz_check(const std::string& name, const std::vector<NewtonSchulzStep>& steps);

// Elements of workspace that `newton_schulz` needs for `batch` matrices.
size_t newton_schulz_workspace(size_t batch, size_t rows, size_t cols);

// Applies the steps to `batch` contiguous (rows, cols) matrices, each of spectral norm at most 1 (see
// muon_prologue). Uses x and the workspace by turns and returns where the result lies: x after an even
// number of steps, the start of the workspace after an odd one. The Gram matrix of the smaller side is used,
// so a tall matrix needs no transpose: 4 m^2 n + 2 m^3 FLOPs a step for sides m <= n. A zero matrix stays
// exactly zero. The bits of one matrix do not depend on its batch.
//
// Element is float or fp16_t: each product is rounded to it once, its sums are fp32. fp16's 11 bits are
// enough where the norm was divided by in fp32 before rounding, as muon_prologue does; bf16's 8 are not
// offered.
template <typename Element>
Element* newton_schulz(Element* x, Element* workspace, size_t batch, size_t rows, size_t cols,
                       const std::vector<NewtonSchulzStep>& steps, Stream* stream);
