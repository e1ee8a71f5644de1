// Generates the coefficients of the Polar Express (Amsel, Persson, Musco, Gower, arXiv:2505.16932): for the
// interval [l, u] that holds the singular values before a step, the odd quintic p with the smallest largest
// |p(s) - 1| there; then on to the interval it leaves, [p(l), 2 - p(l)]. What is best for each step by itself
// is also best for all of them together, as they prove. Generated rather than tabulated, so that any number
// of steps has its own set and the source shows where the numbers come from.
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "optim/newton_schulz.h"

namespace {

// Solves four linear equations, each row (coefficients..., right side): Gaussian elimination with pivoting.
std::array<double, 4> solve(std::array<std::array<double, 5>, 4> rows) {
    for (size_t i = 0; i < 4; i++) {
        size_t pivot = i;
        for (size_t r = i + 1; r < 4; r++) {
            if (std::abs(rows[r][i]) > std::abs(rows[pivot][i])) pivot = r;
        }
        std::swap(rows[i], rows[pivot]);
        for (size_t r = i + 1; r < 4; r++) {
            const double factor = rows[r][i] / rows[i][i];
            for (size_t c = i; c < 5; c++) rows[r][c] -= factor * rows[i][c];
        }
    }
    std::array<double, 4> x{};
    for (size_t i = 4; i-- > 0;) {
        double rest = rows[i][4];
        for (size_t c = i + 1; c < 4; c++) rest -= rows[i][c] * x[c];
        x[i] = rest / rows[i][i];
    }
    return x;
}

// p(s / scale)
NewtonSchulzStep stretched(const NewtonSchulzStep& p, double scale) {
    return {p.a / scale, p.b / std::pow(scale, 3), p.c / std::pow(scale, 5)};
}

// The odd quintic closest to 1 on [lower, upper], by Remez's exchange: its error takes the values
// -e, +e, -e, +e at lower, two interior extrema and upper. Solve for (a, b, c, e) with the extrema guessed,
// move the guesses to where p' = 0, repeat until e stands still.
NewtonSchulzStep optimal_quintic(double lower, double upper) {
    // As the interval shrinks the equations become singular, and p tends to the quintic with p = 1 and
    // p' = p'' = 0 at its upper end. Below this width the two agree to fp64 precision in value.
    if (lower > (1.0 - 5e-6) * upper) return stretched({1.875, -1.25, 0.375}, upper);

    double q = (3.0 * lower + upper) / 4.0;
    double r = (lower + 3.0 * upper) / 4.0;
    double error = INFINITY;
    NewtonSchulzStep p{};
    for (int iteration = 0; iteration < 100; iteration++) {
        const auto equation = [](double s, double sign) {
            return std::array<double, 5>{s, std::pow(s, 3), std::pow(s, 5), sign, 1.0};
        };
        const auto [a, b, c, e] =
            solve({equation(lower, 1.0), equation(q, -1.0), equation(r, 1.0), equation(upper, -1.0)});
        p = {a, b, c};
        if (std::abs(e - error) <= 1e-15) break;
        error = e;
        const double root = std::sqrt(9.0 * b * b - 20.0 * a * c);
        q = std::sqrt((-3.0 * b - root) / (10.0 * c));
        r = std::sqrt((-3.0 * b + root) / (10.0 * c));
    }
    return p;
}

}  // namespace

NewtonSchulzSteps polar_express(double lower, int steps, double safety, double cushion) {
    NewtonSchulzSteps result;
    double upper = 1.0;
    for (int i = 0; i < steps; i++) {
        const double cushioned = cushion * upper;
        NewtonSchulzStep p = optimal_quintic(std::max(lower, cushioned), upper);
        if (lower < cushioned) {
            // Values below the cushion come out lower than intended: centre the whole range around 1 again.
            const double centre = (p.value(lower) + p.value(upper)) / 2.0;
            p = {p.a / centre, p.b / centre, p.c / centre};
        }
        if (i + 1 < steps) p = stretched(p, 1.0 + safety);
        lower = p.value(lower);
        upper = 2.0 - lower;
        result.push_back(p);
    }
    return result;
}

NewtonSchulzSteps polar_express_gram(int steps) {
    // The cushion of the authors' own implementation of the Polar Express; its list is what is stretched.
    NewtonSchulzSteps result = polar_express(1e-3, steps, 0.0, 0.02407327424182761);
    for (NewtonSchulzStep& p : result) p = stretched(p, 1.05);
    return result;
}
