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

using NewtonSchulzSteps = std::vector<NewtonSchulzStep>;

// What is multiplied with what; all compute the same function of X. For sides m <= n and a quintic step:
//   dense      the three products in full: 4 m^2 n + 2 m^3 FLOPs
//   symmetric  X X^T and its square by their lower triangle (gemm_symmetric): 3 m^2 n + m^3
//   gram       X X^T is formed once; the steps work on it alone, and what they come to is multiplied with X
//              at the end (Gram Newton-Schulz, https://github.com/Dao-AILab/gram-newton-schulz): 3 m^2 n
//              FLOPs for each stretch between restarts, and up to 4 m^3 a step. Square matrices gain nothing
//              by it and go by `symmetric`.
enum class NewtonSchulzVariant { dense, symmetric, gram };

// A named coefficient set for a number of steps:
//   "keller"         (3.4445, -4.7750, 2.0315) every step (Jordan 2024); 3 to 10 steps
//   "you"            You Jiacheng's five quintics, as Emerging-Optimizers prints them; 5 steps
//   "polar-express"  generated: polar_express(1e-3, steps, 0.02, 0.02), or for gram, which is less exact,
//                    polar_express_gram(steps); 5 to 10 steps
//   "cubic5"         five cubics (arXiv:2606.00371), which need no square of the Gram matrix; 5 steps
// Fails, with the reason, on an unknown set and on a step count that the set was not made for.
NewtonSchulzSteps newton_schulz_set(const std::string& name, int steps, NewtonSchulzVariant variant);

// The steps that a user wrote: "a,b,c" for every step, or "a,b,c;a,b,c;..." with one triple a step, at most
// 12. Fails on text that says something else, and where newton_schulz_check does.
NewtonSchulzSteps newton_schulz_custom(const std::string& coefficients, int steps);

// The optimal odd quintics for singular values that start in [lower, 1] (Amsel, Persson, Musco, Gower, "The
// Polar Express", arXiv:2505.16932). Each equi-oscillates around 1 on the interval that the steps before it
// leave, taken as no wider than [cushion * upper, upper] so that small values do not make it overshoot. All
// but the last are stretched, p(s / (1 + safety)), which tolerates values that rounding lifts above the
// interval. (1e-3, 5, 0.02, 0.02) gives the coefficients of modded-nanogpt and nanochat.
NewtonSchulzSteps polar_express(double lower, int steps, double safety, double cushion);

// The Polar Express of Gram Newton-Schulz: every step of polar_express(1e-3, steps, 0, 0.024...) stretched,
// p(s / 1.05), the last too. Against the set above, with its one restart, gram_condition is 85 instead of
// 119, and the error in fp16 (192 x 768, singular values from 1 to 1e-3) 0.045 instead of 0.057 of the whole.
NewtonSchulzSteps polar_express_gram(int steps);

// Where the composed polynomial takes the singular values of [lowest, 1].
struct SingularValueRange {
    double low, high;
};
SingularValueRange newton_schulz_range(const NewtonSchulzSteps& steps, double lowest);

// The guard behind every set: fails unless the steps take all of [0.01, 1] into [0.35, 1.3] and what is in
// [1e-4, 0.01] into (0, 1.3]. A set that is cut short, repeated or cycled can shrink updates
// to an eighth, or even reverse their sign, while training seems to go on.
void newton_schulz_check(const std::string& name, const NewtonSchulzSteps& steps);

struct NewtonSchulz {
    NewtonSchulzSteps steps;
    NewtonSchulzVariant variant = NewtonSchulzVariant::dense;
    std::vector<size_t> restarts;  // gram: the steps, counted from 0, before which X X^T is formed anew
};

// The steps by a variant; for gram with the restarts of newton_schulz_restarts.
NewtonSchulz newton_schulz_plan(const NewtonSchulzSteps& steps, NewtonSchulzVariant variant,
                                size_t fewest_restarts = 0);

// How far rounding can grow in the gram variant: the largest condition number that the factor Q of X takes
// between restarts when rounding has shifted every eigenvalue x^2 of X X^T down by 4e-4, x from 1 to 1e-10
// (the criterion of Gram Newton-Schulz's authors). Small negative eigenvalues grow from step to step.
double gram_condition(const NewtonSchulzSteps& steps, const std::vector<size_t>& restarts);

// The fewest restarts, but fewest_restarts at least, that keep gram_condition at 300 or below, where it is
// lowest: [2] for five steps of the Polar Express (85) and `you` (53), [3] for five of keller (63), none for
// cubic5 (271). Fails where no positions do.
std::vector<size_t> newton_schulz_restarts(const NewtonSchulzSteps& steps, size_t fewest_restarts);

// FLOPs of one (rows, cols) matrix, 2 for each multiply-add that is needed: m^2 k for the lower triangle of
// an (m,m) product.
double newton_schulz_flops(const NewtonSchulz& method, size_t rows, size_t cols);

// Elements of workspace that `newton_schulz` needs for `batch` matrices.
size_t newton_schulz_workspace(const NewtonSchulz& method, size_t batch, size_t rows, size_t cols);

// Applies the steps to `batch` contiguous (rows, cols) matrices, each of spectral norm at most 1 (see
// muon_prologue). Overwrites x and the workspace and returns which of the two the result starts at. The Gram
// matrix of the smaller side is used, so a tall matrix needs no transpose. A zero matrix stays exactly zero.
// The bits of one matrix do not depend on its batch.
//
// Element is float, fp16_t or bf16_t: each product is rounded to it once, its sums are fp32. fp16's 11 bits
// are enough where the norm was divided by in fp32 before rounding, as muon_prologue does; with bf16's 8,
// errors are eight times as large.
template <typename Element>
Element* newton_schulz(Element* x, Element* workspace, size_t batch, size_t rows, size_t cols,
                       const NewtonSchulz& method, Stream* stream);
