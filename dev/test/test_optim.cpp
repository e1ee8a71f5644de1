// Tests of optim/: schedules, Newton-Schulz, both optimizers, the gradient norm. Judged by published numbers,
// by hand-computed values, and by plain arithmetic in double: known singular vectors and values, a Jacobi
// singular value decomposition, the textbook optimizers of reference.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>

#include "dev/test/buffers.h"
#include "dev/test/muon_parts.h"
#include "dev/test/reference.h"
#include "kernels/kernels.h"
#include "model/gpt.h"
#include "optim/grad_clip.h"
#include "optim/loss_scaler.h"
#include "optim/lr_adapt.h"
#include "optim/muon.h"
#include "optim/newton_schulz.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"

namespace {

const double infinity = std::numeric_limits<double>::infinity();
const double nan_value = std::numeric_limits<double>::quiet_NaN();

// ---------------------------------------------------------------------------------------------------
// Matrices in double

struct Matrix {
    size_t rows, cols;
    Vector x;

    double& operator()(size_t i, size_t j) { return x[i * cols + j]; }
    double operator()(size_t i, size_t j) const { return x[i * cols + j]; }
};

Matrix zeros(size_t rows, size_t cols) { return {rows, cols, Vector(rows * cols, 0.0)}; }

Matrix random_matrix(size_t rows, size_t cols, unsigned seed) {
    return {rows, cols, doubles(normal<float>(rows * cols, seed))};
}

Matrix transposed(const Matrix& m) {
    Matrix result = zeros(m.cols, m.rows);
    for (size_t i = 0; i < m.rows; ++i) {
        for (size_t j = 0; j < m.cols; ++j) result(j, i) = m(i, j);
    }
    return result;
}

Matrix operator*(const Matrix& a, const Matrix& b) {
    return {a.rows, b.cols, reference::matmul(a.x, b.x, false, false, a.rows, b.cols, a.cols)};
}

Matrix operator*(double factor, Matrix m) {
    for (double& x : m.x) x *= factor;
    return m;
}

Matrix operator+(Matrix a, const Matrix& b) {
    for (size_t i = 0; i < a.x.size(); ++i) a.x[i] += b.x[i];
    return a;
}

double frobenius(const Matrix& m) { return std::sqrt(reference::dot(m.x, m.x)); }

double relative_distance(const Matrix& a, const Matrix& b) { return frobenius(a + -1.0 * b) / frobenius(b); }

// The values as a Buffer of fp32 would hold them.
Matrix in_fp32(const Matrix& m) { return {m.rows, m.cols, doubles(rounded<float>(m.x))}; }

// (rows, cols) with orthonormal columns, by Gram-Schmidt done twice.
Matrix orthonormal(size_t rows, size_t cols, unsigned seed) {
    Matrix q = random_matrix(rows, cols, seed);
    for (size_t j = 0; j < cols; ++j) {
        for (size_t k = 0; k < 2 * j; ++k) {
            double projection = 0;
            for (size_t i = 0; i < rows; ++i) projection += q(i, j) * q(i, k % j);
            for (size_t i = 0; i < rows; ++i) q(i, j) -= projection * q(i, k % j);
        }
        double square = 0;
        for (size_t i = 0; i < rows; ++i) square += q(i, j) * q(i, j);
        for (size_t i = 0; i < rows; ++i) q(i, j) /= std::sqrt(square);
    }
    return q;
}

// U diag(s) V^T
Matrix compose(const Matrix& u, const Vector& s, const Matrix& v) {
    Matrix us = u;
    for (size_t i = 0; i < u.rows; ++i) {
        for (size_t j = 0; j < u.cols; ++j) us(i, j) *= s[j];
    }
    return us * transposed(v);
}

// n values spaced evenly in the logarithm from 1 down to `lowest`.
Vector log_spectrum(size_t n, double lowest) {
    Vector s(n, 1.0);
    for (size_t i = 1; i < n; ++i)
        s[i] = std::pow(lowest, static_cast<double>(i) / static_cast<double>(n - 1));
    return s;
}

Matrix with_spectrum(size_t rows, size_t cols, const Vector& s, unsigned seed) {
    return compose(orthonormal(rows, s.size(), seed), s, orthonormal(cols, s.size(), seed + 1));
}

// Singular values, largest first: one-sided Jacobi (Hestenes 1958) rotates pairs of columns until all are
// orthogonal; their lengths are the singular values. A dozen sweeps do; NaNs must not keep it going.
Vector singular_values(const Matrix& m) {
    Matrix a = m.rows < m.cols ? transposed(m) : m;
    bool rotated = true;
    for (int sweep = 0; rotated && sweep < 50; ++sweep) {
        rotated = false;
        for (size_t p = 0; p < a.cols; ++p) {
            for (size_t q = p + 1; q < a.cols; ++q) {
                double pp = 0, qq = 0, pq = 0;
                for (size_t i = 0; i < a.rows; ++i) {
                    pp += a(i, p) * a(i, p);
                    qq += a(i, q) * a(i, q);
                    pq += a(i, p) * a(i, q);
                }
                if (std::abs(pq) <= 1e-14 * std::sqrt(pp * qq) || std::abs(pq) < 1e-290) continue;
                rotated = true;
                const double cotangent = (qq - pp) / (2 * pq);
                const double t =
                    std::copysign(1.0, cotangent) / (std::abs(cotangent) + std::hypot(1.0, cotangent));
                const double cosine = 1 / std::hypot(1.0, t), sine = t * cosine;
                for (size_t i = 0; i < a.rows; ++i) {
                    const double x = a(i, p), y = a(i, q);
                    a(i, p) = cosine * x - sine * y;
                    a(i, q) = sine * x + cosine * y;
                }
            }
        }
    }
    Vector s(a.cols, 0.0);
    for (size_t j = 0; j < a.cols; ++j) {
        for (size_t i = 0; i < a.rows; ++i) s[j] += a(i, j) * a(i, j);
        s[j] = std::sqrt(s[j]);
    }
    std::sort(s.rbegin(), s.rend());
    return s;
}

TEST(Helpers, JacobiFindsAKnownSpectrum) {
    const Vector expected = log_spectrum(12, 1e-6);
    for (const auto& [rows, cols] : std::vector<std::pair<size_t, size_t>>{{12, 12}, {12, 30}, {30, 12}}) {
        const Vector found = singular_values(with_spectrum(rows, cols, expected, 1));
        for (size_t i = 0; i < 12; ++i) EXPECT_NEAR(found[i], expected[i], 1e-13);
    }
}

// ---------------------------------------------------------------------------------------------------
// Schedules

const std::vector<Schedule> all_schedules = {Schedule::cosine, Schedule::linear, Schedule::constant,
                                             Schedule::wsd};

// llm.c's cosine, worked out by hand: 10 steps of warm-up in 100, peak 1e-3, down to a tenth.
TEST(ScheduleTest, CosineLikeLlmc) {
    const ScheduleConfig config{
        .kind = Schedule::cosine, .lr = 1e-3, .warmup = 10, .steps = 100, .final_lr_frac = 0.1};
    EXPECT_DOUBLE_EQ(learning_rate(config, 0), 1e-4);
    EXPECT_DOUBLE_EQ(learning_rate(config, 4), 5e-4);
    EXPECT_DOUBLE_EQ(learning_rate(config, 9), 1e-3);
    EXPECT_DOUBLE_EQ(learning_rate(config, 10), 1e-3);
    EXPECT_DOUBLE_EQ(learning_rate(config, 55), 5.5e-4);
    EXPECT_NEAR(learning_rate(config, 99), 1.0027e-4, 1e-8);
    EXPECT_DOUBLE_EQ(learning_rate(config, 100), 1e-4);
}

TEST(ScheduleTest, OthersByHand) {
    ScheduleConfig config{
        .kind = Schedule::linear, .lr = 2.0, .warmup = 10, .steps = 1010, .final_lr_frac = 0.1};
    EXPECT_DOUBLE_EQ(learning_rate(config, 260), 2.0 * (0.1 + 0.9 * 0.75));
    EXPECT_DOUBLE_EQ(learning_rate(config, 1010), 0.2);

    config.kind = Schedule::wsd;
    EXPECT_EQ(learning_rate(config, 4), 1.0);
    EXPECT_EQ(learning_rate(config, 500), 2.0);
    EXPECT_EQ(learning_rate(config, 810), 2.0);                               // x = 0.8
    EXPECT_NEAR(learning_rate(config, 860), 2.0 * (0.1 + 0.9 * 0.5), 1e-12);  // 1 - sqrt(0.05 / 0.2)
    EXPECT_NEAR(learning_rate(config, 938), 2.0 * (0.1 + 0.9 * 0.2), 1e-12);  // 1 - sqrt(0.128 / 0.2)
    EXPECT_DOUBLE_EQ(learning_rate(config, 1010), 0.2);

    config.kind = Schedule::constant;
    for (const size_t step : {9, 10, 500, 1009, 1010, 5000}) EXPECT_EQ(learning_rate(config, step), 2.0);
}

// Degenerate lengths, a resume past the end, a warm-up that outlasts the run: nothing may be NaN,
// negative, above the peak, or zero at the first step; after the warm-up the rate never rises.
TEST(ScheduleTest, AlwaysBetweenZeroAndThePeak) {
    const std::vector<std::pair<size_t, size_t>> lengths = {{0, 10}, {10, 10},   {10, 100}, {1, 1},
                                                            {0, 1},  {200, 100}, {0, 0},    {1, 2}};
    for (const Schedule kind : all_schedules) {
        for (const auto& [warmup, steps] : lengths) {
            for (const double final_frac : {0.0, 0.1, 1.0 / 3.0, 1.0}) {
                const ScheduleConfig config{
                    .kind = kind, .lr = 7e-4, .warmup = warmup, .steps = steps, .final_lr_frac = final_frac};
                SCOPED_TRACE(testing::Message() << "kind " << static_cast<int>(kind) << " warmup " << warmup
                                                << " steps " << steps << " final " << final_frac);
                if (steps > 0) {
                    EXPECT_GT(learning_rate(config, 0), 0.0);
                }
                double before = config.lr;
                for (size_t step = 0; step < 1000; ++step) {
                    const double lr = learning_rate(config, step);
                    ASSERT_TRUE(lr >= 0.0 && lr <= config.lr) << lr << " at " << step;
                    if (step >= warmup) {
                        ASSERT_LE(lr, before) << "at " << step;
                        before = lr;
                    }
                }
                const double last = kind == Schedule::constant ? config.lr : config.lr * final_frac;
                EXPECT_DOUBLE_EQ(learning_rate(config, 1000), last);
                EXPECT_DOUBLE_EQ(learning_rate(config, size_t{1} << 60), last);
            }
        }
    }
}

// modded-nanogpt's: 0.85 to 0.95 in 300 steps, back in the last 50.
TEST(ScheduleTest, MomentumWarmsUpAndCoolsDown) {
    const MomentumSchedule schedule{
        .start = 0.85, .peak = 0.95, .warmup = 300, .cooldown = 50, .steps = 1000};
    for (const auto& [step, momentum] : std::vector<std::pair<size_t, double>>{{0, 0.85},
                                                                               {150, 0.90},
                                                                               {299, 0.85 + 0.1 * 299 / 300},
                                                                               {300, 0.95},
                                                                               {950, 0.95},
                                                                               {975, 0.90},
                                                                               {999, 0.852},
                                                                               {1000, 0.85},
                                                                               {5000, 0.85}})
        EXPECT_NEAR(momentum_at(schedule, step), momentum, 1e-12) << step;
    // Without either it is the peak, exactly, and so it is where nobody knows the run's length.
    for (const size_t step : {0, 1, 999, 1000}) {
        EXPECT_EQ(momentum_at({0.85, 0.95, 0, 0, 1000}, step), 0.95);
        EXPECT_EQ(momentum_at({0.85, 0.95, 0, 0, 0}, step), 0.95);
    }
    // Both at once, in a run that is shorter than their sum.
    EXPECT_NEAR(momentum_at({0.85, 0.95, 10, 10, 10}, 5), 0.90, 1e-12);
}

TEST(ScheduleTest, DecaySchedules) {
    EXPECT_EQ(decay_factor(DecaySchedule::constant, 77, 100), 1.0);
    EXPECT_EQ(decay_factor(DecaySchedule::constant, 77, 0), 1.0);
    EXPECT_DOUBLE_EQ(decay_factor(DecaySchedule::linear, 0, 100), 1.0);
    EXPECT_DOUBLE_EQ(decay_factor(DecaySchedule::linear, 25, 100), 0.75);
    EXPECT_DOUBLE_EQ(decay_factor(DecaySchedule::linear, 200, 100), 0.0);
    EXPECT_DOUBLE_EQ(decay_factor(DecaySchedule::cosine, 0, 100), 1.0);
    EXPECT_NEAR(decay_factor(DecaySchedule::cosine, 25, 100), 0.5 + 0.25 * std::sqrt(2.0), 1e-12);
    EXPECT_NEAR(decay_factor(DecaySchedule::cosine, 50, 100), 0.5, 1e-12);
    EXPECT_NEAR(decay_factor(DecaySchedule::cosine, 100, 100), 0.0, 1e-12);
}

// ---------------------------------------------------------------------------------------------------
// Newton-Schulz: coefficients

using Steps = NewtonSchulzSteps;

const NewtonSchulzStep keller{3.4445, -4.7750, 2.0315};

// Sets that others use, for what they do when used as they should or should not be.
const Steps you_quintic = {{4.0848, -6.8946, 2.9270},
                           {3.9505, -6.3029, 2.6377},
                           {3.7418, -5.5913, 2.3037},
                           {2.8769, -3.1427, 1.2046},
                           {2.8366, -3.0525, 1.2012}};
const Steps aol = {{4.0098, -7.0585, 2.4635},
                   {3.4585, -5.5479, 2.5959},
                   {2.7573, -3.2939, 1.4254},
                   {2.7215, -3.0494, 1.3169}};

// A named set as the variants other than gram have it.
Steps coefficients(const std::string& name, int steps) {
    return newton_schulz_set(name, steps, NewtonSchulzVariant::symmetric);
}

// The first n of a set that starts again when it is through.
Steps cycled(const Steps& steps, size_t n) {
    Steps result;
    for (size_t i = 0; i < n; ++i) result.push_back(steps[i % steps.size()]);
    return result;
}

double compose(const Steps& steps, double s) {
    for (const NewtonSchulzStep& p : steps) s = p.a * s + p.b * std::pow(s, 3) + p.c * std::pow(s, 5);
    return s;
}

void expect_same_steps(const Steps& actual, const Steps& expected, double relative) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_NEAR(actual[i].a / expected[i].a, 1.0, relative) << "step " << i;
        EXPECT_NEAR(actual[i].b / expected[i].b, 1.0, relative) << "step " << i;
        EXPECT_NEAR(actual[i].c / expected[i].c, 1.0, relative) << "step " << i;
    }
}

// The numbers that modded-nanogpt and nanochat print in their sources.
TEST(PolarExpress, PublishedFiveSteps) {
    const Steps published = {{8.156554524902461, -22.48329292557795, 15.878769915207462},
                             {4.042929935166739, -2.808917465908714, 0.5000178451051316},
                             {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
                             {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
                             {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}};
    expect_same_steps(polar_express(1e-3, 5, 0.02, 0.02), published, 1e-12);
    expect_same_steps(coefficients("polar-express", 5), published, 1e-12);
}

// Gram Newton-Schulz's list: the authors' own one, below, stretched by 1.05.
TEST(PolarExpress, PublishedGramSteps) {
    const Steps published = {{8.28721201814563, -23.595886519098837, 17.300387312530933},
                             {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                             {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                             {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                             {2.300652019954817, -1.6689039845747493, 0.4188073119525673}};
    Steps expected;
    for (const NewtonSchulzStep& p : published)
        expected.push_back({p.a / 1.05, p.b / std::pow(1.05, 3), p.c / std::pow(1.05, 5)});
    expect_same_steps(newton_schulz_set("polar-express", 5, NewtonSchulzVariant::gram), expected, 1e-12);
}

// The list of the authors' own implementation: another cushion, no safety. Its seventh step is so close to
// the limit that the two solvers agree to fewer digits.
TEST(PolarExpress, PublishedUnscaledSteps) {
    const Steps published = {{8.28721201814563, -23.595886519098837, 17.300387312530933},
                             {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                             {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                             {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                             {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
                             {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
                             {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
                             {1.875, -1.25, 0.375}};
    const Steps generated = polar_express(1e-3, 8, 0.0, 0.02407327424182761);
    expect_same_steps({generated.begin(), generated.begin() + 6}, {published.begin(), published.begin() + 6},
                      1e-12);
    expect_same_steps(generated, published, 1e-8);
}

// What makes a step the best one: its error alternates in sign, equally large, at four points.
TEST(PolarExpress, StepsEquioscillate) {
    const double lower = 0.03;
    const NewtonSchulzStep p = polar_express(lower, 1, 0.0, 0.0).front();
    const auto error = [&](double s) { return p.value(s) - 1.0; };
    std::vector<double> extrema = {error(lower)};
    for (double s = lower; s < 1.0; s += 1e-4) {
        const double here = error(s + 1e-4);
        if ((here - error(s)) * (error(s + 2e-4) - here) < 0 && s + 2e-4 < 1.0) extrema.push_back(here);
    }
    extrema.push_back(error(1.0));
    ASSERT_EQ(extrema.size(), 4u);
    for (size_t i = 1; i < 4; ++i) EXPECT_NEAR(extrema[i], -extrema[i - 1], 1e-6);
    EXPECT_LT(extrema[0], 0.0);
}

// The range of the composed polynomial, computed apart from this project for Keller Jordan's coefficients,
// You Jiacheng's, and the Polar Express.
TEST(NewtonSchulzSet, KnownRanges) {
    struct Case {
        Steps steps;
        double lowest, low, high, tolerance;
    };
    const std::vector<Case> cases = {
        {coefficients("keller", 3), 1e-2, 0.40, 1.20, 5e-3},
        {coefficients("keller", 5), 1e-2, 0.68, 1.13, 5e-3},
        {coefficients("keller", 5), 1e-3, 0.47, 1.20, 5e-3},
        {coefficients("polar-express", 5), 1e-2, 0.859, 1.141, 5e-4},
        {coefficients("polar-express", 5), 1e-3, 0.859, 1.141, 5e-4},
        {coefficients("polar-express", 8), 1e-3, 1.0, 1.0, 1e-12},
        {coefficients("you", 5), 1e-2, 0.978, 1.032, 5e-4},
        {coefficients("cubic5", 5), 1e-2, 0.774, 1.300, 5e-4},
        {cycled(you_quintic, 6), 1e-2, 0.064, 0.165, 5e-4},
        {cycled(aol, 5), 1e-2, -1.208, 1.208, 5e-4},
    };
    for (size_t i = 0; i < cases.size(); ++i) {
        const SingularValueRange range = newton_schulz_range(cases[i].steps, cases[i].lowest);
        EXPECT_NEAR(range.low, cases[i].low, cases[i].tolerance) << "case " << i;
        EXPECT_NEAR(range.high, cases[i].high, cases[i].tolerance) << "case " << i;
    }
    double slope = 1.0;
    for (const NewtonSchulzStep& p : coefficients("keller", 5)) slope *= p.a;
    EXPECT_NEAR(slope, 485, 1);
    slope = 1.0;
    for (const NewtonSchulzStep& p : coefficients("polar-express", 5)) slope *= p.a;
    EXPECT_NEAR(slope, 989, 1);
}

TEST(NewtonSchulzSet, LegalStepCounts) {
    for (int steps = -1; steps <= 12; ++steps) {
        for (const auto& [name, fewest, most] :
             {std::tuple{"keller", 3, 10}, {"polar-express", 5, 10}, {"you", 5, 5}, {"cubic5", 5, 5}}) {
            SCOPED_TRACE(testing::Message() << name << " " << steps);
            if (steps >= fewest && steps <= most) {
                EXPECT_EQ(coefficients(name, steps).size(), static_cast<size_t>(steps));
            } else {
                const std::string option = "--muon-ns-steps " + std::to_string(steps);
                expect_refused(option.c_str(), [&, name = name] { coefficients(name, steps); });
            }
        }
    }
    for (const char* name : {"", "Keller", "quintic", "aol", "custom"}) {
        expect_refused("--muon-ns ", [&] { coefficients(name, 5); });
    }
}

// Combinations that trainers have offered and that shrink updates eightfold, overshoot or turn them round.
TEST(NewtonSchulzSet, GuardRefusesKnownTraps) {
    const Steps express = coefficients("polar-express", 5);
    for (size_t n : {6, 7})
        expect_refused("you", [&] { newton_schulz_check("you", cycled(you_quintic, n)); });
    for (size_t n : {4, 5, 6, 7, 8})
        expect_refused("aol", [&] { newton_schulz_check("aol", cycled(aol, n)); });
    for (size_t n : {1, 2, 3, 4})
        expect_refused("cut", [&] { newton_schulz_check("cut", cycled(express, n)); });
    for (size_t n : {1, 2})
        expect_refused("keller", [&] { newton_schulz_check("keller", Steps(n, keller)); });
    expect_refused("empty", [] { newton_schulz_check("empty", {}); });
    EXPECT_NO_THROW(newton_schulz_check("you", you_quintic));
    EXPECT_NO_THROW(newton_schulz_check("exact", Steps(12, {2.0, -1.5, 0.5})));
}

// Coefficients that a user writes meet the same guard, and the reason names the values they lead to.
TEST(NewtonSchulzSet, CustomCoefficients) {
    expect_same_steps(newton_schulz_custom("3.4445,-4.7750,2.0315", 5), coefficients("keller", 5), 1e-15);
    expect_same_steps(
        newton_schulz_custom("4.0848,-6.8946,2.9270;3.9505,-6.3029,2.6377;3.7418,-5.5913,2.3037;"
                             "2.8769,-3.1427,1.2046;2.8366,-3.0525,1.2012",
                             5),
        coefficients("you", 5), 1e-15);
    const std::string aol_text =
        "4.0098,-7.0585,2.4635;3.4585,-5.5479,2.5959;2.7573,-3.2939,1.4254;2.7215,-3.0494,1.3169";
    expect_refused("not near 1", [&] { newton_schulz_custom(aol_text, 4); });
    expect_refused("not near 1", [&] { newton_schulz_custom(aol_text + ";4.0098,-7.0585,2.4635", 5); });
    expect_refused("--muon-ns-steps 5", [&] { newton_schulz_custom(aol_text, 5); });
    for (const char* text :
         {"", "1", "1,2", "1,2,3,4", "1,2,3;", "1,2,3;4", "a,b,c", "1,2,nan", "1;2;3", "1,,2"})
        expect_refused("--muon-ns-coefficients", [&] { newton_schulz_custom(text, 5); });
    for (const int steps : {-1, 0, 13}) {
        expect_refused("--muon-ns-steps", [&] { newton_schulz_custom("2,-1.5,0.5", steps); });
    }
}

// ---------------------------------------------------------------------------------------------------
// Newton-Schulz: the iteration

const Steps keller5(5, keller);
Steps express(int steps) { return coefficients("polar-express", steps); }

const std::vector<NewtonSchulzVariant> all_variants = {
    NewtonSchulzVariant::dense, NewtonSchulzVariant::symmetric, NewtonSchulzVariant::gram};
const char* const variant_names[] = {"dense", "symmetric", "gram"};

// Every variant of some steps, with its name.
void for_variants(const Steps& steps, const std::function<void(const NewtonSchulz&)>& body) {
    for (const NewtonSchulzVariant variant : all_variants) {
        SCOPED_TRACE(variant_names[static_cast<size_t>(variant)]);
        body(newton_schulz_plan(steps, variant));
    }
}

// What rounding does to a matrix of norm 1 in fp32. `gram` works with R = X X^T, which is off by 2^-24 of its
// largest eigenvalue; each step but the last before X is formed again multiplies that by a^2.
double fp32_tolerance(const NewtonSchulz& method) {
    if (method.variant != NewtonSchulzVariant::gram) return 1e-5;
    double growth = 1, largest = 1;
    for (size_t i = 0; i < method.steps.size(); ++i) {
        const bool last =
            std::find(method.restarts.begin(), method.restarts.end(), i + 1) != method.restarts.end();
        if (i + 1 < method.steps.size() && !last) growth *= method.steps[i].a * method.steps[i].a;
        largest = std::max(largest, growth);
        if (last) growth = 1;
    }
    return 1e-5 + largest * unit_roundoff<float>();
}

// Runs newton_schulz on matrices of one shape with exactly the workspace it asks for.
template <typename Element = float>
std::vector<Matrix> orthogonalised_batch(const std::vector<Matrix>& matrices, const NewtonSchulz& method,
                                         Stream* stream) {
    const size_t batch = matrices.size(), rows = matrices[0].rows, cols = matrices[0].cols;
    Vector all;
    for (const Matrix& m : matrices) all.insert(all.end(), m.x.begin(), m.x.end());
    Buffer<Element> x(rounded<Element>(all), stream);
    Buffer<Element> workspace(unwritten<Element>(newton_schulz_workspace(method, batch, rows, cols)), stream);
    std::vector<Element> result(all.size());
    const Element* where = newton_schulz<Element>(x, workspace, batch, rows, cols, method, stream);
    copy_to_host(result.data(), where, result.size() * sizeof(Element), stream);

    std::vector<Matrix> split;
    const Vector values = doubles(result);
    for (size_t i = 0; i < batch; ++i) {
        const auto first = values.begin() + static_cast<ptrdiff_t>(i * rows * cols);
        split.push_back({rows, cols, Vector(first, first + static_cast<ptrdiff_t>(rows * cols))});
    }
    return split;
}

Matrix orthogonalised(const Matrix& m, const NewtonSchulz& method) {
    return orthogonalised_batch({m}, method, open_stream().get()).front();
}

const std::vector<std::pair<size_t, size_t>> shapes = {{48, 48}, {37, 101}, {101, 37}, {64, 256}, {256, 64}};

// Every singular value goes where the scalar polynomial takes it, inside the published band, and the singular
// vectors stay: U^T O V is that diagonal, and nothing lies outside the span of U and V. Far off the diagonal
// only rounding is left, lifted by the polynomial's slope.
TEST(NewtonSchulz, KnownSpectrum) {
    struct Case {
        Steps steps;
        double low, high;
    };
    for (const Case& c : {Case{keller5, 0.681, 1.135},
                          {express(5), 0.858, 1.142},
                          {express(6), 0.997, 1.003},
                          {coefficients("you", 5), 0.977, 1.032},
                          {coefficients("cubic5", 5), 0.773, 1.301}}) {
        for (const auto& [rows, cols] : shapes) {
            SCOPED_TRACE(testing::Message() << rows << "x" << cols << ", slope " << c.steps[0].a);
            const size_t side = std::min(rows, cols);
            const Vector s = log_spectrum(side, 0.01);
            const Matrix u = orthonormal(rows, side, 7), v = orthonormal(cols, side, 8);
            Vector expected(side);
            for (size_t i = 0; i < side; ++i) expected[i] = compose(c.steps, s[i]);
            for_variants(c.steps, [&](const NewtonSchulz& method) {
                const Matrix o = orthogonalised(compose(u, s, v), method);
                EXPECT_LT(relative_distance(o, compose(u, expected, v)), fp32_tolerance(method));
                const Matrix core = transposed(u) * o * v;
                double worst_off_diagonal = 0;
                for (size_t i = 0; i < side; ++i) {
                    EXPECT_NEAR(core(i, i), expected[i], 10 * fp32_tolerance(method)) << i;
                    for (size_t j = 0; j < side; ++j) {
                        if (i != j) worst_off_diagonal = std::max(worst_off_diagonal, std::abs(core(i, j)));
                    }
                }
                EXPECT_LT(worst_off_diagonal, 3 * fp32_tolerance(method));

                const Vector found = singular_values(o);
                Vector sorted = expected;
                std::sort(sorted.rbegin(), sorted.rend());
                for (size_t i = 0; i < side; ++i)
                    EXPECT_NEAR(found[i], sorted[i], 10 * fp32_tolerance(method)) << i;
                EXPECT_GT(found.back(), c.low - 3 * fp32_tolerance(method));
                EXPECT_LT(found.front(), c.high + 3 * fp32_tolerance(method));
            });
        }
    }
}

// Matrices of four times as many columns as rows with known singular vectors, and what they are to be judged
// by.
struct KnownVectors {
    explicit KnownVectors(size_t side_) : side(side_) {
        Vector flat(side), spikes = log_spectrum(side - 2, 1e-3);
        for (size_t i = 0; i < side; ++i)
            flat[i] = 1 - 0.5 * static_cast<double>(i) / static_cast<double>(side - 1);
        for (double& x : spikes) x *= 1e-4;
        spikes.insert(spikes.begin(), 2, 1.0);
        Vector rank10 = log_spectrum(10, 0.1);
        rank10.resize(side, 0.0);
        spectra = {log_spectrum(side, 1e-3), log_spectrum(side, 1e-7), flat, spikes, rank10};
        // Normalised as the optimizer does it: by the Frobenius norm, before rounding.
        for (Vector& s : spectra) {
            const double norm = std::sqrt(reference::dot(s, s));
            for (double& x : s) x /= norm;
            wide.push_back(compose(u, s, v));
        }
    }

    // ||U^T O V - diag||_F / ||O||_F, what rounding added to O; also how far the diagonal is from the
    // polynomial's values at most. What lies outside the span of U and V counts too.
    struct Error {
        double off_diagonal, diagonal;
    };
    Error error(const Matrix& o, size_t spectrum, const Steps& steps) const {
        const Matrix core = transposed(u) * o * v;
        Error result{0, 0};
        double square = 0;
        for (size_t i = 0; i < side; ++i) {
            square += core(i, i) * core(i, i);
            result.diagonal =
                std::max(result.diagonal, std::abs(core(i, i) - compose(steps, spectra[spectrum][i])));
        }
        const double all = reference::dot(o.x, o.x);
        result.off_diagonal = std::sqrt(std::max(0.0, all - square) / all);
        return result;
    }

    size_t side;
    Matrix u = orthonormal(side, side, 7), v = orthonormal(4 * side, side, 8);
    std::vector<Vector> spectra;
    std::vector<Matrix> wide;
};
const char* const spectrum_names[] = {"1 to 1e-3", "1 to 1e-7", "1 to 0.5", "two spikes", "rank 10"};

// Published figures of such a simulation, products rounded one by one, are the yardstick; half as much again
// is allowed.
struct PublishedErrors {
    Steps steps;
    NewtonSchulzVariant variant;
    std::array<double, 5> off_diagonal;  // of the spectra
};

// `diagonal`: what rounding may add to the polynomial's values.
template <typename Iterate>
void expect_published_errors(const KnownVectors& known, const PublishedErrors& published, double diagonal,
                             Stream* stream) {
    const NewtonSchulz method = newton_schulz_plan(published.steps, published.variant);
    for (size_t i = 0; i < published.off_diagonal.size(); ++i) {
        for (const bool tall : {false, true}) {
            SCOPED_TRACE(std::string(variant_names[static_cast<size_t>(published.variant)]) + ", " +
                         spectrum_names[i] + ", slope " + std::to_string(published.steps[0].a));
            const Matrix x = tall ? transposed(known.wide[i]) : known.wide[i];
            const Matrix o = orthogonalised_batch<Iterate>({x}, method, stream)[0];
            const KnownVectors::Error error = known.error(tall ? transposed(o) : o, i, published.steps);
            // The published figures have one digit or two.
            EXPECT_LT(error.off_diagonal, 1.5 * (published.off_diagonal[i] + 0.0005));
            EXPECT_LT(error.diagonal, diagonal);
        }
    }
}

TEST(NewtonSchulz, SixteenBitsAsAccurateAsPublished) {
    const NewtonSchulzVariant dense = NewtonSchulzVariant::dense, symmetric = NewtonSchulzVariant::symmetric,
                              gram = NewtonSchulzVariant::gram;
    const StreamPointer stream = open_stream(2);
    const KnownVectors known(192);
    for (const NewtonSchulzVariant variant : {dense, symmetric}) {
        for (const PublishedErrors& published :
             {PublishedErrors{keller5, variant, {.007, .015, .002, .08, .04}},
              PublishedErrors{express(5), variant, {.010, .023, .001, .14, .07}}})
            expect_published_errors<fp16_t>(known, published, 0.005, stream.get());
        for (const PublishedErrors& published :
             {PublishedErrors{keller5, variant, {.059, .116, .013, .66, .33}},
              PublishedErrors{express(5), variant, {.079, .181, .011, 1.13, .55}}})
            expect_published_errors<bf16_t>(known, published, 8 * 0.005, stream.get());
    }
    expect_published_errors<fp16_t>(known, {polar_express_gram(5), gram, {.031, .036, .001, .12, .057}}, 0.05,
                                    stream.get());
    expect_published_errors<fp16_t>(known, {coefficients("cubic5", 5), gram, {.015, .027, .001, .31, .12}},
                                    0.05, stream.get());
    expect_published_errors<bf16_t>(known, {polar_express_gram(5), gram, {.26, .29, .011, .97, .46}},
                                    8 * 0.05, stream.get());
}

// The same polynomial iterated on whole matrices in double, always as written: (X X^T) from the left.
Matrix newton_schulz_reference(Matrix x, const Steps& steps) {
    for (const NewtonSchulzStep& p : steps) {
        const Matrix gram = x * transposed(x);
        x = p.a * x + p.b * (gram * x) + p.c * (gram * (gram * x));
    }
    return x;
}

TEST(NewtonSchulz, MatchesIterationInDouble) {
    for (const Steps& steps : {keller5, express(5), express(6), Steps(3, keller), polar_express_gram(5),
                               coefficients("you", 5), coefficients("cubic5", 5)}) {
        for (const auto& [rows, cols] : shapes) {
            const Matrix gaussian = random_matrix(rows, cols, 3);
            const Matrix x = in_fp32((1 / frobenius(gaussian)) * gaussian);
            const Matrix expected = newton_schulz_reference(x, steps);
            for_variants(steps, [&, rows = rows, cols = cols](const NewtonSchulz& method) {
                EXPECT_LT(relative_distance(orthogonalised(x, method), expected), fp32_tolerance(method))
                    << rows << "x" << cols;
            });
        }
    }
}

// 30 steps of (2, -1.5, 0.5) in double are the polar factor itself; eight of the Polar Express in fp32 are
// within its rounding.
TEST(NewtonSchulz, EightStepsGiveThePolarFactor) {
    const Matrix x = with_spectrum(30, 50, log_spectrum(30, 0.02), 5);
    const Matrix polar = newton_schulz_reference(x, Steps(30, {2.0, -1.5, 0.5}));
    for_variants(express(8), [&](const NewtonSchulz& method) {
        EXPECT_LT(relative_distance(orthogonalised(x, method), polar), fp32_tolerance(method));
    });
}

TEST(NewtonSchulz, TransposeGivesTranspose) {
    for (const Steps& steps : {keller5, express(5)}) {
        const Matrix x = with_spectrum(60, 25, log_spectrum(25, 0.01), 11);
        for_variants(steps, [&](const NewtonSchulz& method) {
            EXPECT_LT(relative_distance(transposed(orthogonalised(transposed(x), method)),
                                        orthogonalised(x, method)),
                      fp32_tolerance(method));
        });
    }
}

TEST(NewtonSchulz, BitsDoNotDependOnBatchOrThreads) {
    for (const auto& [rows, cols] :
         std::vector<std::pair<size_t, size_t>>{{70, 131}, {131, 70}, {33, 33}, {1, 5}}) {
        std::vector<Matrix> matrices;
        for (unsigned i = 0; i < 12; ++i) {
            const Matrix m = random_matrix(rows, cols, 100 + i);
            matrices.push_back((1 / frobenius(m)) * m);
        }
        for_variants(express(5), [&, rows = rows, cols = cols](const NewtonSchulz& method) {
            std::vector<Matrix> alone;
            for (const Matrix& m : matrices) alone.push_back(orthogonalised(m, method));
            for (const int threads : {1, 2, 3}) {
                const StreamPointer stream = open_stream(threads);
                for (const size_t batch : {1, 3, 12}) {
                    const std::vector<Matrix> chunk(matrices.end() - static_cast<ptrdiff_t>(batch),
                                                    matrices.end());
                    const std::vector<Matrix> together = orthogonalised_batch(chunk, method, stream.get());
                    for (size_t i = 0; i < batch; ++i) {
                        ASSERT_EQ(together[i].x, alone[12 - batch + i].x)
                            << rows << "x" << cols << " threads " << threads << " batch " << batch;
                    }
                }
            }
        });
    }
}

// Normalised and orthogonalised as a Muon step does it; the flag of the norm in *degenerate.
Matrix normalised_and_orthogonalised(const Matrix& m, const NewtonSchulz& method, int* degenerate) {
    const StreamPointer stream = open_stream(2);
    Buffer<float> x(rounded<float>(m.x), stream.get());
    Buffer<int> flag({-1}, stream.get());
    muon_normalize(x.data(), flag.data(), x.data(), 1, m.x.size(), 1.0f, stream.get());
    *degenerate = flag.read()[0];
    return orthogonalised({m.rows, m.cols, x.values()}, method);
}

// Inputs that have broken Muon elsewhere, with the values that they must give.
void check_degenerate_matrices(const NewtonSchulz& method) {
    const double limit = compose(keller5, 1.0);
    EXPECT_NEAR(limit, 0.696, 1e-3);
    for (const auto& [rows, cols] : std::vector<std::pair<size_t, size_t>>{{64, 128}, {128, 64}}) {
        SCOPED_TRACE(testing::Message() << rows << "x" << cols);
        int degenerate = 0;
        const auto apply = [&, rows = rows, cols = cols](const auto& entry) {
            Matrix m = zeros(rows, cols);
            for (size_t i = 0; i < rows; ++i) {
                for (size_t j = 0; j < cols; ++j) m(i, j) = entry(i, j);
            }
            return normalised_and_orthogonalised(m, method, &degenerate);
        };
        const auto expect_rank_one = [&](const Matrix& o) {
            const Vector s = singular_values(o);
            EXPECT_NEAR(s[0], limit, 1e-3);
            EXPECT_LT(s[1], 1e-3);
            EXPECT_EQ(degenerate, 0);
        };
        const auto expect_zero_and_flagged = [&, rows = rows, cols = cols](const Matrix& o) {
            EXPECT_EQ(o.x, Vector(rows * cols, 0.0));
            EXPECT_EQ(degenerate, 1);
        };
        const Matrix random = random_matrix(rows, cols, 21);
        const auto from_random = [&](size_t i, size_t j) { return random(i, j); };

        expect_zero_and_flagged(apply([](size_t, size_t) { return 0.0; }));
        expect_zero_and_flagged(
            apply([&](size_t i, size_t j) { return i + j == 9 ? nan_value : random(i, j); }));
        expect_zero_and_flagged(
            apply([&](size_t i, size_t j) { return i + j == 9 ? infinity : random(i, j); }));
        expect_rank_one(apply([](size_t, size_t) { return 1e-30; }));
        expect_rank_one(apply([](size_t, size_t) { return 1e30; }));
        expect_rank_one(apply([](size_t i, size_t j) { return std::sin(i + 1.0) * std::cos(3.0 * j); }));

        const Matrix single = apply([](size_t i, size_t j) { return i == 3 && j == 5 ? -2.5 : 0.0; });
        EXPECT_NEAR(single(3, 5), -limit, 1e-5);
        EXPECT_EQ(std::count(single.x.begin(), single.x.end(), 0.0), static_cast<ptrdiff_t>(rows * cols - 1));

        const Matrix zero_row = apply([&](size_t i, size_t j) { return i == 7 ? 0.0 : random(i, j); });
        for (size_t j = 0; j < cols; ++j) EXPECT_EQ(zero_row(7, j), 0.0);
        const Matrix equal_rows = apply([&](size_t i, size_t j) { return random(i == 7 ? 8 : i, j); });
        for (size_t j = 0; j < cols; ++j) EXPECT_NEAR(equal_rows(7, j), equal_rows(8, j), 1e-6);
        const Vector s = singular_values(equal_rows);
        EXPECT_LT(s.front(), 1.21);
        EXPECT_GT(s[s.size() - 2], 0.4);
        if (rows < cols) {
            EXPECT_LT(s.back(), 1e-3);
        }

        // The step does not see the scale: at a power of two not even in rounding.
        const Matrix plain = apply(from_random);
        for (const double scale : {0x1p10, 0x1p-10, 0x1p100, 0x1p-100}) {
            EXPECT_EQ(apply([&](size_t i, size_t j) { return scale * random(i, j); }).x, plain.x) << scale;
        }
        for (const double scale : {1e30, 1e-30}) {
            const Matrix o = apply([&](size_t i, size_t j) { return scale * random(i, j); });
            EXPECT_LT(relative_distance(o, plain), 1e-5) << scale;
        }
    }
    for (const auto& [rows, cols] : std::vector<std::pair<size_t, size_t>>{{1, 40}, {40, 1}, {1, 1}}) {
        int degenerate = 0;
        const Matrix m = random_matrix(rows, cols, 5);
        const Matrix o = normalised_and_orthogonalised(m, method, &degenerate);
        EXPECT_LT(relative_distance(o, (limit / frobenius(m)) * m), 1e-5);
    }
}

TEST(NewtonSchulz, DegenerateMatrices) { for_variants(keller5, check_degenerate_matrices); }

// The products of a GPT-2 layer of width d in d^3 FLOPs, counted by hand elsewhere: q, k, v and proj are
// squares, fc and fcproj four times as long; heads of 64 or pairs of them are strips of q, k and v.
TEST(NewtonSchulz, FlopsOfALayer) {
    const double d = 768;
    const auto layer = [&](const char* set, NewtonSchulzVariant variant, size_t head_rows) {
        const NewtonSchulz method = newton_schulz_plan(newton_schulz_set(set, 5, variant), variant);
        const double qkv =
            3 * (d / static_cast<double>(head_rows)) * newton_schulz_flops(method, head_rows, 768);
        return (qkv + newton_schulz_flops(method, 768, 768) + newton_schulz_flops(method, 3072, 768) +
                newton_schulz_flops(method, 768, 3072)) /
               (d * d * d);
    };
    using enum NewtonSchulzVariant;
    EXPECT_NEAR(layer("keller", dense, 768) / 300, 1, 0.01);
    EXPECT_NEAR(layer("polar-express", symmetric, 768) / 210, 1, 0.01);
    EXPECT_NEAR(layer("cubic5", symmetric, 768) / 180, 1, 0.01);
    EXPECT_NEAR(layer("polar-express", gram, 768) / 156, 1, 0.01);
    EXPECT_NEAR(layer("cubic5", gram, 768) / 108, 1, 0.01);
    EXPECT_NEAR(layer("polar-express", gram, 128) / 100, 1, 0.01);
    EXPECT_NEAR(layer("polar-express", gram, 64) / 98, 1, 0.01);
    EXPECT_NEAR(layer("cubic5", gram, 64) / 64, 1, 0.01);
}

// TFLOP of a step for the four GPT-2 models.
TEST(NewtonSchulz, FlopsOfGpt2) {
    struct Model {
        double layers;
        size_t d;
        double dense, symmetric, gram, cubic;
    };
    for (const Model& model : {Model{12, 768, 1.63, 1.14, 0.85, 0.59},
                               {24, 1024, 7.73, 5.41, 4.02, 2.78},
                               {36, 1280, 22.6, 15.9, 11.8, 8.15},
                               {48, 1600, 59.0, 41.3, 30.7, 21.2}}) {
        const auto tera = [&](const char* set, NewtonSchulzVariant variant) {
            const NewtonSchulz method = newton_schulz_plan(newton_schulz_set(set, 5, variant), variant);
            return 1e-12 * model.layers *
                   (4 * newton_schulz_flops(method, model.d, model.d) +
                    2 * newton_schulz_flops(method, 4 * model.d, model.d));
        };
        EXPECT_NEAR(tera("polar-express", NewtonSchulzVariant::dense) / model.dense, 1, 0.01);
        EXPECT_NEAR(tera("polar-express", NewtonSchulzVariant::symmetric) / model.symmetric, 1, 0.01);
        EXPECT_NEAR(tera("polar-express", NewtonSchulzVariant::gram) / model.gram, 1, 0.01);
        EXPECT_NEAR(tera("cubic5", NewtonSchulzVariant::gram) / model.cubic, 1, 0.01);
    }
}

// The condition numbers of Q, computed apart from this project, with the best positions.
TEST(NewtonSchulz, RestartsByThePublishedCriterion) {
    const std::vector<size_t> none;
    const Steps scaled = polar_express_gram(5);
    EXPECT_NEAR(gram_condition(scaled, none) / 2.7e12, 1, 0.02);
    EXPECT_NEAR(gram_condition(scaled, {2}), 85, 0.5);
    EXPECT_NEAR(gram_condition(scaled, {1, 2}), 61, 0.5);
    EXPECT_NEAR(gram_condition(express(5), none) / 1.7e14, 1, 0.02);
    EXPECT_NEAR(gram_condition(express(5), {2}), 119, 0.5);
    EXPECT_NEAR(gram_condition(you_quintic, {2}), 53, 0.5);
    EXPECT_NEAR(gram_condition(you_quintic, {1, 3}), 35, 0.5);
    EXPECT_NEAR(gram_condition(keller5, {3}), 63, 0.5);
    EXPECT_NEAR(gram_condition(keller5, {2, 3}), 19, 0.5);
    EXPECT_NEAR(gram_condition(coefficients("cubic5", 5), none), 271, 0.5);
    EXPECT_NEAR(gram_condition(coefficients("cubic5", 5), {1}), 135, 0.5);

    const auto chosen = [](const Steps& steps, size_t fewest = 0) {
        return newton_schulz_restarts(steps, fewest);
    };
    EXPECT_EQ(chosen(scaled), (std::vector<size_t>{2}));
    EXPECT_EQ(chosen(express(5)), (std::vector<size_t>{2}));
    EXPECT_EQ(chosen(you_quintic), (std::vector<size_t>{2}));
    EXPECT_EQ(chosen(keller5), (std::vector<size_t>{3}));
    EXPECT_EQ(chosen(coefficients("cubic5", 5)), none);
    EXPECT_EQ(chosen(coefficients("cubic5", 5), 1), (std::vector<size_t>{1}));
    EXPECT_EQ(chosen(express(5), 2), (std::vector<size_t>{1, 2}));
    // DeepSeek-V4's ten: three restarts at least.
    Steps ten(8, keller);
    ten.insert(ten.end(), 2, {2.0, -1.5, 0.5});
    EXPECT_EQ(chosen(ten), (std::vector<size_t>{2, 4, 6}));
    EXPECT_NEAR(gram_condition(ten, {2, 4, 6}), 73, 0.5);
}

// ---------------------------------------------------------------------------------------------------
// Optimizers: a table like the model's, and a host-side driver

// GPT-2's tensors, described here once more so that the optimizer is judged apart from the model.
ParameterTable gpt_like_table(size_t layers, size_t C, size_t vocab_size, size_t padded_vocab, size_t T,
                              bool tied = true) {
    ParameterTable table;
    size_t offset = 0;
    const auto add = [&](const std::string& name, size_t rows, size_t cols, ParameterGroup group,
                         bool decay) {
        Parameter p{};
        p.name = name;
        p.rows = p.used_rows = rows;
        p.cols = cols;
        p.offset = offset;
        p.weight_decay = decay;
        p.group = group;
        p.blocks = {{"", 0, rows}};
        offset += (p.size() + 63) / 64 * 64;
        table.push_back(p);
    };
    const auto vector = [&](const std::string& name, size_t n) {
        add(name, 1, n, ParameterGroup::adamw_scalar, false);
    };
    const auto matrix = [&](const std::string& name, size_t rows, size_t cols) {
        add(name, rows, cols, ParameterGroup::muon, true);
    };
    add("wte", padded_vocab, C, ParameterGroup::adamw_embedding, true);
    table.back().used_rows = vocab_size;
    add("wpe", T, C, ParameterGroup::adamw_embedding, true);
    for (size_t l = 0; l < layers; ++l) {
        const std::string h = "h." + std::to_string(l) + ".";
        vector(h + "ln_1.weight", C), vector(h + "ln_1.bias", C);
        matrix(h + "qkv.weight", 3 * C, C);
        table.back().blocks = {{"q", 0, C}, {"k", C, C}, {"v", 2 * C, C}};
        vector(h + "qkv.bias", 3 * C);
        matrix(h + "proj.weight", C, C), vector(h + "proj.bias", C);
        vector(h + "ln_2.weight", C), vector(h + "ln_2.bias", C);
        matrix(h + "fc.weight", 4 * C, C), vector(h + "fc.bias", 4 * C);
        matrix(h + "fcproj.weight", C, 4 * C), vector(h + "fcproj.bias", C);
    }
    vector("ln_f.weight", C), vector("ln_f.bias", C);
    if (!tied) {
        add("head", padded_vocab, C, ParameterGroup::adamw_head, true);
        table.back().used_rows = vocab_size;
    }
    return table;
}

constexpr size_t small_C = 24;
ParameterTable small_table() { return gpt_like_table(2, small_C, 50, 64, 10, false); }

// One model's parameters, gradients and optimizer on a device, with whole tensors and blocks read and written
// from the host.
struct Trainer {
    explicit Trainer(const OptimizerConfig& config, ParameterTable table_ = small_table(), int threads = 1,
                     size_t extra_workspace = 0)
        : stream(open_stream(threads)),
          table(std::move(table_)),
          optimizer(optimizer_create(config, table, stream.get())),
          params(table_elements(table)),
          grads(table_elements(table)),
          workspace_floats(optimizer_minimum_workspace(optimizer) + extra_workspace) {
        // Only rows that exist are filled: padding is zero, and alignment gaps do not matter.
        for (const Parameter& p : table) {
            const std::vector<float> values = normal<float>(p.used_rows * p.cols, 1000);
            std::copy(values.begin(), values.end(), params.begin() + static_cast<ptrdiff_t>(p.offset));
        }
    }
    ~Trainer() { optimizer_destroy(optimizer, stream.get()); }
    Trainer(const Trainer&) = delete;
    Trainer& operator=(const Trainer&) = delete;

    void random_grads(unsigned seed) {
        for (const Parameter& p : table) {
            const std::vector<float> values = normal<float>(p.used_rows * p.cols, seed++);
            std::copy(values.begin(), values.end(), grads.begin() + static_cast<ptrdiff_t>(p.offset));
        }
    }

    // The workspace is handed over full of NaNs, with guards around it and around the arenas.
    void step(float lr, float grad_scale = 1.0f) {
        Buffer<float> device_params(params, stream.get()), device_grads(grads, stream.get());
        Buffer<float> workspace(unwritten<float>(std::max<size_t>(workspace_floats, 1)), stream.get());
        optimizer_step(optimizer, device_params.data(), nullptr, device_grads.data(), lr, grad_scale,
                       workspace.data(), workspace_floats, stream.get());
        params = device_params.read();
        EXPECT_EQ(device_grads.read(), grads) << "the step wrote to the gradients";
    }

    const OptimizerSlot& slot(const std::string& name, const std::string& block = "") const {
        for (const OptimizerSlot& s : optimizer.slots) {
            if (s.parameter->name == name && s.block.name == block) return s;
        }
        throw std::runtime_error("no slot " + name + " " + block);
    }
    static Matrix read(const std::vector<float>& arena, const OptimizerSlot& s) {
        const auto first = arena.begin() + static_cast<ptrdiff_t>(s.offset());
        return {s.block.rows, s.parameter->cols,
                doubles(std::vector<float>(first, first + static_cast<ptrdiff_t>(s.size())))};
    }
    static void write(std::vector<float>& arena, const OptimizerSlot& s, const Matrix& m) {
        const std::vector<float> values = rounded<float>(m.x);
        std::copy(values.begin(), values.end(), arena.begin() + static_cast<ptrdiff_t>(s.offset()));
    }

    StreamPointer stream;
    ParameterTable table;
    Optimizer optimizer;
    std::vector<float> params, grads;
    size_t workspace_floats;
};

OptimizerConfig adamw_config() { return {}; }

OptimizerConfig muon_config() {
    OptimizerConfig config;
    config.kind = OptimizerKind::muon;
    // The polynomial that expected values below are of, and which has a tight band; check_options and the
    // suite NewtonSchulz have the others.
    config.muon_ns = "polar-express";
    config.muon_ns_variant = NewtonSchulzVariant::symmetric;
    config.muon_ns_dtype = NewtonSchulzPrecision::fp32;  // on every device, so that one tolerance judges all
    return config;
}

OptimizerConfig bare_muon(MuonScale scale) {
    OptimizerConfig config = muon_config();
    config.weight_decay = 0.0f;
    config.muon_momentum = 0.0f;
    config.muon_scale = scale;
    return config;
}

OptimizerConfig with_bf16_state(OptimizerConfig config) {
    config.state_dtype = Dtype::bf16;
    config.seed = 42;
    return config;
}

OptimizerConfig with_bf16_momentum(OptimizerConfig config) {
    config.muon_state_dtype = Dtype::bf16;
    config.seed = 42;
    return config;
}

// A slot's state as it lies in memory: its first vector, then its second where it has one.
std::string state_bytes(const Trainer& trainer, const OptimizerSlot& slot) {
    std::string bytes;
    for (const void* vector : {slot.first, slot.second}) {
        if (vector == nullptr) continue;
        const size_t from = bytes.size();
        bytes.resize(from + slot.size() * dtype_size(slot.state_dtype));
        copy_to_host(bytes.data() + from, vector, bytes.size() - from, trainer.stream.get());
    }
    return bytes;
}

// ---------------------------------------------------------------------------------------------------
// Routing and state

TEST(Routing, AdamWOwnsEverything) {
    const Trainer trainer(adamw_config());
    EXPECT_EQ(trainer.optimizer.slots.size(), trainer.table.size() + 2 * 2);  // q, k, v of two layers
    EXPECT_TRUE(trainer.optimizer.muon_batches.empty());
    EXPECT_EQ(optimizer_minimum_workspace(trainer.optimizer), 0u);
    for (const OptimizerSlot& slot : trainer.optimizer.slots) {
        EXPECT_FALSE(slot.muon);
        EXPECT_NE(slot.second, nullptr);
    }
}

// Every matrix inside the layers goes to Muon, q, k and v apart, and nothing else does.
TEST(Routing, MuonOwnsTheLayersMatrices) {
    const Trainer trainer(muon_config());
    std::set<std::string> muon, adamw;
    for (const OptimizerSlot& slot : trainer.optimizer.slots) {
        EXPECT_EQ(slot.second == nullptr, slot.muon);
        (slot.muon ? muon : adamw).insert(slot.parameter->name + ":" + slot.block.name);
    }
    std::set<std::string> expected_muon,
        expected_adamw = {"wte:", "wpe:", "ln_f.weight:", "ln_f.bias:", "head:"};
    for (const std::string h : {"h.0.", "h.1."}) {
        for (const char* name : {"qkv.weight:q", "qkv.weight:k", "qkv.weight:v",
                                 "proj.weight:", "fc.weight:", "fcproj.weight:"}) {
            expected_muon.insert(h + name);
        }
        for (const char* name : {"ln_1.weight:", "ln_1.bias:", "ln_2.weight:", "ln_2.bias:", "qkv.bias:",
                                 "proj.bias:", "fc.bias:", "fcproj.bias:"}) {
            expected_adamw.insert(h + name);
        }
    }
    EXPECT_EQ(muon, expected_muon);
    EXPECT_EQ(adamw, expected_adamw);

    // Batches: q, k, v, proj of both layers; fc; fcproj.
    ASSERT_EQ(trainer.optimizer.muon_batches.size(), 3u);
    EXPECT_EQ(trainer.optimizer.muon_batches[0].size(), 8u);
    EXPECT_EQ(trainer.optimizer.muon_batches[1].size(), 2u);
    EXPECT_EQ(trainer.optimizer.muon_batches[2].size(), 2u);
}

// State vectors are zero at first, aligned to 128 bytes, apart from one another and inside the arena.
TEST(Routing, StateVectorsAreDisjointAndZero) {
    for (const OptimizerConfig& config :
         {adamw_config(), muon_config(), with_bf16_state(adamw_config()), with_bf16_state(muon_config()),
          with_bf16_momentum(muon_config())}) {
        const Trainer trainer(config);
        const char* const begin = static_cast<const char*>(trainer.optimizer.state);
        const char* end = begin;
        for (const OptimizerSlot& slot : trainer.optimizer.slots) {
            for (const void* vector : {slot.first, slot.second}) {
                if (vector == nullptr) continue;
                const char* first = static_cast<const char*>(vector);
                EXPECT_GE(first, end);
                EXPECT_EQ(static_cast<size_t>(first - begin) % 128, 0u);
                end = first + slot.size() * dtype_size(slot.state_dtype);
            }
            const std::string bytes = state_bytes(trainer, slot);
            EXPECT_EQ(bytes, std::string(bytes.size(), '\0'));
        }
        EXPECT_LE(end, begin + optimizer_state_bytes(trainer.optimizer));
    }
}

// GPT-2 124M, vocabulary padded to 50304: 0.996 GB for AdamW, 0.656 GB with Muon on 84.9M parameters; half of
// it in bf16.
TEST(Routing, StateBytesOfGpt2) {
    const ParameterTable table = gpt_like_table(12, 768, 50257, 50304, 1024);
    const size_t matrices = 12 * 12 * 768 * 768;
    const size_t others = 50304 * 768 + 1024 * 768 + 12 * 13 * 768 + 2 * 768;
    const size_t adamw_bytes = optimizer_state_bytes(optimizer_plan(adamw_config(), table));
    EXPECT_EQ(adamw_bytes, 8 * (matrices + others));
    EXPECT_NEAR(static_cast<double>(adamw_bytes), 0.996e9, 0.0005e9);

    const Optimizer muon = optimizer_plan(muon_config(), table);
    const size_t muon_bytes = optimizer_state_bytes(muon);
    EXPECT_EQ(muon_bytes, 4 * matrices + 8 * others);
    EXPECT_NEAR(static_cast<double>(muon_bytes), 0.656e9, 0.0005e9);
    for (const auto& [config, bytes] : {std::pair{adamw_config(), adamw_bytes}, {muon_config(), muon_bytes}})
        EXPECT_EQ(optimizer_state_bytes(optimizer_plan(with_bf16_state(config), table)), bytes / 2);
    EXPECT_EQ(optimizer_state_bytes(optimizer_plan(with_bf16_momentum(muon_config()), table)),
              2 * matrices + 8 * others);
    // fc and fcproj need most: direction, result, and two Gram-sized matrices.
    EXPECT_EQ(optimizer_minimum_workspace(muon), 2 * 4 * 768 * 768 + 2 * 768 * 768u);
}

TEST(Routing, IllegalSettingsAreRefused) {
    const ParameterTable table = small_table();
    const auto refused = [&](const char* option, const auto& change) {
        OptimizerConfig config = muon_config();
        change(config);
        expect_refused(option, [&] { optimizer_plan(config, table); });
    };
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const float bad : {-0.1f, nan, INFINITY}) {
        refused("--weight-decay", [&](OptimizerConfig& c) { c.weight_decay = bad; });
    }
    for (const float bad : {-0.1f, 1.0f, nan}) {
        refused("--beta1", [&](OptimizerConfig& c) { c.beta1 = bad; });
        refused("--beta2", [&](OptimizerConfig& c) { c.beta2 = bad; });
        refused("--muon-momentum", [&](OptimizerConfig& c) { c.muon_momentum = bad; });
    }
    for (const float bad : {-1e-8f, 0.0f, nan}) refused("--eps", [&](OptimizerConfig& c) { c.eps = bad; });
    refused("--muon-momentum-start", [](OptimizerConfig& c) { c.muon_momentum_start = 1; });
    refused("--muon-normuon-beta2", [](OptimizerConfig& c) { c.muon_normuon_beta2 = -1; });
    refused("--muon-scale-factor", [](OptimizerConfig& c) { c.muon_scale_factor = 0; });
    refused("--muon-ns-coefficients", [](OptimizerConfig& c) { c.muon_ns_coefficients = "2,-1.5,0.5"; });
    refused("--muon-ns-coefficients", [](OptimizerConfig& c) { c.muon_ns = "custom"; });
    refused("--state-dtype", [](OptimizerConfig& c) { c.state_dtype = Dtype::fp16; });
    refused("--muon-state-dtype", [](OptimizerConfig& c) { c.muon_state_dtype = Dtype::fp16; });
    refused("--muon-ns", [](OptimizerConfig& c) { c.muon_ns = "quintic"; });
    refused("--muon-ns-steps", [](OptimizerConfig& c) { c.muon_ns_steps = 4; });

    // Blocks that leave rows out, overlap or reach too far.
    const size_t C = small_C;
    for (const std::vector<Block>& blocks : std::vector<std::vector<Block>>{
             {}, {{"q", 0, C}, {"k", C, C}}, {{"q", 0, 2 * C}, {"v", C, 2 * C}}, {{"q", 0, 4 * C}}}) {
        ParameterTable broken = table;
        const auto qkv = std::find_if(broken.begin(), broken.end(),
                                      [](const Parameter& p) { return p.name == "h.0.qkv.weight"; });
        qkv->blocks = blocks;
        expect_refused("h.0.qkv.weight", [&] { optimizer_plan(muon_config(), broken); });
    }
}

// With zero gradients only decay moves weights: the 2-D tensors, embeddings included, by exactly 1 - lr wd,
// with either optimizer. Degenerate updates are counted: each of Muon's twelve matrices.
TEST(Decay, ZeroGradientsLeaveOnlyDecay) {
    const float lr = 1e-2f, weight_decay = 0.1f;
    for (OptimizerConfig config : {adamw_config(), muon_config()}) {
        config.weight_decay = weight_decay;
        Trainer trainer(config);
        const std::vector<float> before = trainer.params;
        trainer.step(lr);
        std::set<std::string> changed;
        for (const OptimizerSlot& slot : trainer.optimizer.slots) {
            const Matrix old_values = trainer.read(before, slot), values = trainer.read(trainer.params, slot);
            if (values.x == old_values.x) continue;
            changed.insert(slot.parameter->name);
            const double factor = 1.0 - static_cast<double>(lr) * static_cast<double>(weight_decay);
            for (size_t i = 0; i < values.x.size(); ++i) {
                ASSERT_NEAR(values.x[i], factor * old_values.x[i], 1.2e-7 * std::abs(old_values.x[i]));
            }
        }
        EXPECT_EQ(changed, (std::set<std::string>{"wte", "wpe", "head", "h.0.qkv.weight", "h.0.proj.weight",
                                                  "h.0.fc.weight", "h.0.fcproj.weight", "h.1.qkv.weight",
                                                  "h.1.proj.weight", "h.1.fc.weight", "h.1.fcproj.weight"}));
        EXPECT_EQ(trainer.optimizer.degenerate_updates, config.kind == OptimizerKind::muon ? 12u : 0u);
    }
}

TEST(Decay, OffMeansOff) {
    for (OptimizerConfig config : {adamw_config(), muon_config()}) {
        config.weight_decay = 0.0f;
        Trainer trainer(config);
        const std::vector<float> before = trainer.params;
        trainer.step(1e-2f);
        EXPECT_EQ(trainer.params, before);
    }
}

// A vocabulary's padding has zero weights and zero gradients, and keeps its zeros.
TEST(Decay, PaddedRowsStayZero) {
    for (const OptimizerConfig& config : {adamw_config(), muon_config()}) {
        Trainer trainer(config);
        for (unsigned step = 0; step < 10; ++step) {
            trainer.random_grads(50 * step);
            trainer.step(1e-2f);
        }
        for (const char* name : {"wte", "head"}) {
            const Matrix m = trainer.read(trainer.params, trainer.slot(name));
            const size_t used = trainer.slot(name).parameter->used_rows * m.cols;
            EXPECT_TRUE(std::all_of(m.x.begin(), m.x.begin() + static_cast<ptrdiff_t>(used),
                                    [](double x) { return x != 0.0; }));
            EXPECT_TRUE(std::all_of(m.x.begin() + static_cast<ptrdiff_t>(used), m.x.end(),
                                    [](double x) { return x == 0.0; }));
        }
    }
}

// ---------------------------------------------------------------------------------------------------
// AdamW

// One parameter alone.
ParameterTable scalar_table() {
    Parameter p{};
    p.name = "p";
    p.rows = p.cols = p.used_rows = 1;
    p.weight_decay = true;
    p.group = ParameterGroup::adamw_scalar;
    p.blocks = {{"", 0, 1}};
    return {p};
}

// Epsilon counts after the bias correction. Added before it, the step would be 3.065e-5 and 1.827e-4.
TEST(AdamW, EpsilonAfterBiasCorrection) {
    for (const float beta2 : {0.999f, 0.95f}) {
        OptimizerConfig config = adamw_config();
        config.beta2 = beta2;
        config.weight_decay = 0.0f;
        Trainer trainer(config, scalar_table());
        trainer.params[0] = 0.0f;  // not 1, where fp32 has only four digits of the change
        trainer.grads[0] = 1e-8f;
        trainer.step(1e-3f);
        EXPECT_NEAR(trainer.params[0], -5.000e-4, 1e-9) << beta2;
    }
}

TEST(AdamW, ConstantGradientMovesByTheLearningRate) {
    OptimizerConfig config = adamw_config();
    config.weight_decay = 0.0f;
    Trainer trainer(config, scalar_table());
    trainer.params[0] = 1.0f;
    trainer.grads[0] = 1.0f;
    for (int step = 0; step < 10; ++step) trainer.step(1e-3f);
    EXPECT_NEAR(trainer.params[0], 1.0 - 10 * 1e-3, 1e-6);
    EXPECT_EQ(trainer.optimizer.steps, 10u);
}

// Five steps of every AdamW tensor, with decay and a gradient scale, against the textbook in double.
TEST(AdamW, MatchesTextbook) {
    for (const OptimizerConfig& config : {adamw_config(), muon_config()}) {
        Trainer trainer(config);
        std::vector<Vector> p, m, v;
        for (const OptimizerSlot& slot : trainer.optimizer.slots) {
            p.push_back(trainer.read(trainer.params, slot).x);
            m.emplace_back(slot.size(), 0.0);
            v.emplace_back(slot.size(), 0.0);
        }
        for (int t = 1; t <= 5; ++t) {
            const float lr = 1e-2f / static_cast<float>(t), grad_scale = 0.5f + 0.1f * static_cast<float>(t);
            trainer.random_grads(static_cast<unsigned>(100 * t));
            for (size_t i = 0; i < p.size(); ++i) {
                const OptimizerSlot& slot = trainer.optimizer.slots[i];
                const Vector g = (static_cast<double>(grad_scale) * trainer.read(trainer.grads, slot)).x;
                const reference::AdamW step{lr, config.beta1, config.beta2, config.eps,
                                            slot.parameter->weight_decay ? config.weight_decay : 0.0f};
                reference::adamw_update(p[i], m[i], v[i], g, step, t);
            }
            trainer.step(lr, grad_scale);
        }
        size_t judged = 0;
        for (size_t i = 0; i < p.size(); ++i) {
            const OptimizerSlot& slot = trainer.optimizer.slots[i];
            if (slot.muon) continue;
            ++judged;
            const Matrix actual = trainer.read(trainer.params, slot);
            for (size_t j = 0; j < actual.x.size(); ++j) {
                ASSERT_NEAR(actual.x[j], p[i][j], 2e-6) << slot.parameter->name << " " << j;
            }
        }
        EXPECT_EQ(judged, config.kind == OptimizerKind::muon ? 21u : trainer.optimizer.slots.size());
    }
}

// ---------------------------------------------------------------------------------------------------
// Muon

// The whole step in double, from the formulas.
struct MuonReference {
    double lr, weight_decay, mu;
    bool nesterov;
    Steps steps;
    double scale;

    void step(Matrix& w, Matrix& momentum, const Matrix& grad) const {
        const Matrix direction{w.rows, w.cols, reference::muon_momentum(momentum.x, grad.x, mu, nesterov)};
        const Matrix o = newton_schulz_reference((1 / frobenius(direction)) * direction, steps);
        w = (1 - lr * weight_decay) * w + (-lr * scale) * o;
    }
};

// Three steps of every Muon matrix: momentum, Nesterov, gradient scale, orthogonalisation, shape factor,
// decay.
TEST(Muon, MatchesTextbook) {
    for (const bool nesterov : {true, false}) {
        for (const auto& [ns, ns_steps] :
             {std::pair{"keller", 5}, {"polar-express", 5}, {"polar-express", 6}}) {
            OptimizerConfig config = muon_config();
            config.muon_nesterov = nesterov;
            config.muon_momentum = 0.8f;  // the past shows after three steps
            config.muon_ns = ns;
            config.muon_ns_steps = ns_steps;
            Trainer trainer(config);
            std::vector<Matrix> w, momentum;
            for (const OptimizerSlot& slot : trainer.optimizer.slots) {
                w.push_back(trainer.read(trainer.params, slot));
                momentum.push_back(zeros(slot.block.rows, slot.parameter->cols));
            }
            for (unsigned t = 1; t <= 3; ++t) {
                const float lr = 0.1f / static_cast<float>(t), grad_scale = 1.0f / static_cast<float>(t);
                trainer.random_grads(100 * t);
                for (size_t i = 0; i < w.size(); ++i) {
                    const OptimizerSlot& slot = trainer.optimizer.slots[i];
                    if (!slot.muon) continue;
                    const double longer = static_cast<double>(std::max(w[i].rows, w[i].cols));
                    const MuonReference muon{lr,
                                             config.weight_decay,
                                             config.muon_momentum,
                                             nesterov,
                                             trainer.optimizer.newton_schulz.steps,
                                             0.2 * std::sqrt(longer)};
                    muon.step(w[i], momentum[i],
                              static_cast<double>(grad_scale) * trainer.read(trainer.grads, slot));
                }
                trainer.step(lr, grad_scale);
            }
            for (size_t i = 0; i < w.size(); ++i) {
                const OptimizerSlot& slot = trainer.optimizer.slots[i];
                if (!slot.muon) continue;
                EXPECT_LT(relative_distance(trainer.read(trainer.params, slot), w[i]), 1e-6)
                    << slot.parameter->name << " " << slot.block.name << ", Nesterov " << nesterov << ", "
                    << ns;
            }
            EXPECT_EQ(trainer.optimizer.degenerate_updates, 0u);
        }
    }
}

// Every option of Muon and of the decay against the formulas in double, on all tensors, AdamW's too: three
// steps in a run of six.
void check_options(const char* name, const std::function<void(OptimizerConfig&)>& choose) {
    SCOPED_TRACE(name);
    OptimizerConfig config = muon_config();
    config.total_steps = 6;
    config.weight_decay = 0.5f;
    choose(config);
    Trainer trainer(config);
    struct Reference {
        Matrix w, momentum;
        Vector m, v, neurons;
    };
    std::vector<Reference> tensors;
    for (const OptimizerSlot& slot : trainer.optimizer.slots) {
        const size_t rows = slot.block.rows, cols = slot.parameter->cols, n = rows * cols;
        tensors.push_back({trainer.read(trainer.params, slot), zeros(rows, cols), Vector(n), Vector(n),
                           Vector(std::max(rows, cols))});
    }
    for (int t = 0; t < 3; ++t) {
        const double lr = 0.1 / (t + 1);
        trainer.random_grads(static_cast<unsigned>(100 * t + 7));
        const double x = t / 6.0;
        double decay = static_cast<double>(config.weight_decay);
        if (config.weight_decay_schedule == DecaySchedule::cosine) decay *= 0.5 + 0.5 * std::cos(M_PI * x);
        if (config.weight_decay_schedule == DecaySchedule::linear) decay *= 1 - x;
        double mu = static_cast<double>(config.muon_momentum);
        if (config.muon_momentum_warmup > 0) {
            const double start = static_cast<double>(config.muon_momentum_start);
            mu = start + (mu - start) * std::min(1.0, t / static_cast<double>(config.muon_momentum_warmup));
        }
        for (size_t i = 0; i < tensors.size(); ++i) {
            const OptimizerSlot& slot = trainer.optimizer.slots[i];
            Reference& r = tensors[i];
            const ParameterGroup group = slot.parameter->group;
            const double multiple = slot.muon                                  ? config.lr_muon
                                    : group == ParameterGroup::adamw_embedding ? config.lr_embedding
                                    : group == ParameterGroup::adamw_head      ? config.lr_head
                                                                               : config.lr_scalar;
            const double own_lr = lr * multiple;
            const bool cautious = config.weight_decay_mode == DecayMode::cautious;
            double rate = config.weight_decay_mode == DecayMode::independent ? decay : own_lr * decay;
            if (!slot.parameter->weight_decay) rate = 0;
            const Matrix grad = trainer.read(trainer.grads, slot);
            if (!slot.muon) {
                reference::adamw_update(
                    r.w.x, r.m, r.v, grad.x,
                    {own_lr, config.beta1, config.beta2, config.eps, rate / own_lr, cautious}, t + 1);
                continue;
            }
            const Matrix direction{grad.rows, grad.cols,
                                   reference::muon_momentum(r.momentum.x, grad.x, mu, config.muon_nesterov)};
            Matrix o = newton_schulz_reference((1 / frobenius(direction)) * direction,
                                               trainer.optimizer.newton_schulz.steps);
            if (config.muon_normuon) {
                reference::normalize_neurons(o.x, r.neurons, o.rows, o.cols,
                                             static_cast<double>(config.muon_normuon_beta2));
            }
            const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(o.rows, o.cols))) *
                                 static_cast<double>(config.muon_scale_factor);
            for (size_t j = 0; j < o.x.size(); ++j) {
                const double kept = cautious && o.x[j] * r.w.x[j] < 0 ? 1 : 1 - rate;
                r.w.x[j] = kept * r.w.x[j] - own_lr * scale * o.x[j];
            }
        }
        trainer.step(static_cast<float>(lr));
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
        const OptimizerSlot& slot = trainer.optimizer.slots[i];
        EXPECT_LT(relative_distance(trainer.read(trainer.params, slot), tensors[i].w),
                  slot.muon ? 5e-6 : 1e-5)
            << slot.parameter->name << " " << slot.block.name;
    }
}

TEST(Muon, OptionsMatchTextbook) {
    check_options("plain", [](OptimizerConfig&) {});
    check_options("momentum warm-up", [](OptimizerConfig& c) {
        c.muon_momentum_start = 0.2f;
        c.muon_momentum_warmup = 2;
    });
    check_options("scale factor", [](OptimizerConfig& c) { c.muon_scale_factor = 0.3f; });
    check_options("independent decay", [](OptimizerConfig& c) {
        c.weight_decay_mode = DecayMode::independent;
        c.weight_decay = 0.1f;
    });
    check_options("cautious decay", [](OptimizerConfig& c) { c.weight_decay_mode = DecayMode::cautious; });
    check_options("cosine decay",
                  [](OptimizerConfig& c) { c.weight_decay_schedule = DecaySchedule::cosine; });
    check_options("linear decay", [](OptimizerConfig& c) {
        c.weight_decay_schedule = DecaySchedule::linear;
        c.weight_decay_mode = DecayMode::cautious;
    });
    check_options("learning rates", [](OptimizerConfig& c) {
        c.lr_muon = 3, c.lr_embedding = 0.5f, c.lr_head = 0.25f, c.lr_scalar = 2;
    });
    check_options("NorMuon", [](OptimizerConfig& c) {
        c.muon_normuon = true;
        c.muon_normuon_beta2 = 0.6f;
    });
    check_options("gram", [](OptimizerConfig& c) { c.muon_ns_variant = NewtonSchulzVariant::gram; });
    check_options("no Nesterov", [](OptimizerConfig& c) { c.muon_nesterov = false; });
}

// A learning rate of 0 moves nothing, whatever the decay.
TEST(Muon, NoLearningRateNoStep) {
    for (const DecayMode mode : {DecayMode::decoupled, DecayMode::independent, DecayMode::cautious}) {
        OptimizerConfig config = muon_config();
        config.weight_decay_mode = mode;
        Trainer trainer(config);
        trainer.random_grads(3);
        const std::vector<float> before = trainer.params;
        trainer.step(0);
        EXPECT_EQ(trainer.params, before);
    }
}

// Heads of q and of k by themselves, by twos, or all of q, k and v as one: the matrices that the model's
// table tells the optimizer of.
TEST(Muon, HeadsAreBlocks) {
    const auto blocks = [](bool split, size_t group) {
        GptConfig config{.layers = 1, .heads = 4, .channels = 32, .seq_len = 8, .vocab_size = 20};
        config.split_qkv = split, config.qk_group_heads = group;
        std::vector<std::pair<std::string, size_t>> found;
        for (const Parameter& p : gpt_parameter_table(config)) {
            if (p.name != "h.0.attn.c_attn.weight") continue;
            size_t row = 0;
            for (const Block& block : p.blocks) {
                EXPECT_EQ(block.first_row, row);
                row += block.rows;
                found.emplace_back(block.name, block.rows);
            }
            EXPECT_EQ(row, p.rows);
        }
        return found;
    };
    using Blocks = std::vector<std::pair<std::string, size_t>>;
    EXPECT_EQ(blocks(false, 0), (Blocks{{"", 96}}));
    EXPECT_EQ(blocks(true, 0), (Blocks{{"q", 32}, {"k", 32}, {"v", 32}}));
    EXPECT_EQ(blocks(true, 4), (Blocks{{"q", 32}, {"k", 32}, {"v", 32}}));
    EXPECT_EQ(blocks(true, 2), (Blocks{{"q", 16}, {"q", 16}, {"k", 16}, {"k", 16}, {"v", 32}}));
    EXPECT_EQ(
        blocks(true, 1),
        (Blocks{{"q", 8}, {"q", 8}, {"q", 8}, {"q", 8}, {"k", 8}, {"k", 8}, {"k", 8}, {"k", 8}, {"v", 32}}));
}

// NorMuon keeps a number for each neuron: of GPT-2's matrices a thousandth of the momentum.
TEST(Muon, NeuronStateIsSmall) {
    const ParameterTable table = gpt_like_table(12, 768, 50257, 50304, 1024);
    OptimizerConfig config = muon_config();
    const size_t plain = optimizer_state_bytes(optimizer_plan(config, table));
    config.muon_normuon = true;
    EXPECT_EQ(optimizer_state_bytes(optimizer_plan(config, table)) - plain, 12 * (4 * 768 + 2 * 3072) * 4u);
}

// The precisions that a CPU has too; what they lead to.
TEST(Muon, NewtonSchulzPrecisions) {
    const StreamPointer stream = open_stream();
    const ParameterTable table = small_table();
    const auto dtype_of_precision = [&](NewtonSchulzPrecision precision) {
        OptimizerConfig config = muon_config();
        config.muon_ns_dtype = precision;
        Optimizer optimizer = optimizer_create(config, table, stream.get());
        const Dtype dtype = optimizer.newton_schulz_dtype;
        optimizer_destroy(optimizer, stream.get());
        return dtype;
    };
    EXPECT_EQ(dtype_of_precision(NewtonSchulzPrecision::fp32), Dtype::fp32);
    EXPECT_EQ(dtype_of_precision(NewtonSchulzPrecision::fp16), Dtype::fp16);
    EXPECT_EQ(dtype_of_precision(NewtonSchulzPrecision::bf16), Dtype::bf16);
    if (device_has_fast_fp16(stream.get())) {
        EXPECT_EQ(dtype_of_precision(NewtonSchulzPrecision::automatic), Dtype::fp16);
        EXPECT_EQ(dtype_of_precision(NewtonSchulzPrecision::tf32), Dtype::fp32);
    } else {
        EXPECT_EQ(dtype_of_precision(NewtonSchulzPrecision::automatic), Dtype::fp32);
        expect_refused("tf32", [&] { dtype_of_precision(NewtonSchulzPrecision::tf32); });
    }
    // bf16 with Gram Newton-Schulz has a restart, with any coefficients.
    OptimizerConfig config = muon_config();
    config.muon_ns = "cubic5";
    config.muon_ns_variant = NewtonSchulzVariant::gram;
    EXPECT_EQ(optimizer_plan(config, table).newton_schulz.restarts.size(), 0u);
    config.muon_ns_dtype = NewtonSchulzPrecision::bf16;
    EXPECT_EQ(optimizer_plan(config, table).newton_schulz.restarts.size(), 1u);

    // Steps in 16 bits go nearly where fp32's go.
    const auto trained = [&](NewtonSchulzPrecision precision) {
        OptimizerConfig c = bare_muon(MuonScale::match_rms);
        c.muon_ns_dtype = precision;
        Trainer trainer(c);
        std::fill(trainer.params.begin(), trainer.params.end(), 0.0f);
        trainer.random_grads(5);
        trainer.step(1);
        Vector change;
        for (const OptimizerSlot& slot : trainer.optimizer.slots) {
            const Matrix m = trainer.read(trainer.params, slot);
            if (slot.muon) change.insert(change.end(), m.x.begin(), m.x.end());
        }
        return Matrix{1, change.size(), change};
    };
    const Matrix fp32 = trained(NewtonSchulzPrecision::fp32);
    EXPECT_LT(relative_distance(trained(NewtonSchulzPrecision::fp16), fp32), 0.01);
    EXPECT_LT(relative_distance(trained(NewtonSchulzPrecision::bf16), fp32), 0.08);
}

// Change of a slot in one step from these gradients, without decay and momentum, at lr = 1.
Matrix change_of(Trainer& trainer, const OptimizerSlot& slot) {
    const Matrix before = trainer.read(trainer.params, slot);
    trainer.step(1.0f);
    return trainer.read(trainer.params, slot) + -1.0 * before;
}

// Every matrix really is orthogonalised: an ill-conditioned gradient moves it in nearly all directions alike,
// and not along the gradient.
TEST(Muon, NoMatrixIsSilentlyLeftOut) {
    size_t tested = 0;
    const Trainer names(bare_muon(MuonScale::spectral));
    for (const OptimizerSlot& named : names.optimizer.slots) {
        if (!named.muon) continue;
        ++tested;
        Trainer trainer(bare_muon(MuonScale::spectral));
        const OptimizerSlot& slot = trainer.slot(named.parameter->name, named.block.name);
        std::fill(trainer.params.begin(), trainer.params.end(), 0.0f);
        const Matrix grad =
            with_spectrum(slot.block.rows, slot.parameter->cols, log_spectrum(small_C, 1e-3), 3);
        trainer.write(trainer.grads, slot, grad);
        const double scale = std::sqrt(static_cast<double>(std::max(grad.rows, grad.cols)));
        const Matrix o = (-1.0 / scale) * change_of(trainer, slot);
        const Vector s = singular_values(o);
        EXPECT_LT(s.front(), 1.3);
        EXPECT_GT(s[s.size() / 2], 0.6);
        const double cosine = reference::dot(o.x, grad.x) / (frobenius(o) * frobenius(grad));
        EXPECT_GT(cosine, 0.1) << "not a descent direction";
        EXPECT_LT(cosine, 0.9) << named.parameter->name;
    }
    EXPECT_EQ(tested, 12u);
}

// Gradients whose singular values are all equal: the spectral norm of the change is the shape's factor times
// the polynomial's value at 1/sqrt(C), the same for all four of a layer's matrices.
TEST(Muon, ScaleOfEveryShape) {
    const double value = compose(express(5), 1 / std::sqrt(static_cast<double>(small_C)));
    const double C = small_C;
    struct Case {
        MuonScale mode;
        double square, fc, fcproj;
    };
    for (const Case& c : {Case{MuonScale::original, 1, 2, 1},
                          {MuonScale::match_rms, 0.2 * std::sqrt(C), 0.4 * std::sqrt(C), 0.4 * std::sqrt(C)},
                          {MuonScale::spectral, std::sqrt(C), 2 * std::sqrt(C), 2 * std::sqrt(C)},
                          {MuonScale::unit_rms, 1, 2, 0.5}}) {
        Trainer trainer(bare_muon(c.mode));
        std::fill(trainer.params.begin(), trainer.params.end(), 0.0f);
        for (const OptimizerSlot& slot : trainer.optimizer.slots) {
            const Vector ones(small_C, 1.0);
            if (slot.muon)
                trainer.write(trainer.grads, slot,
                              with_spectrum(slot.block.rows, slot.parameter->cols, ones, 9));
        }
        trainer.step(1.0f);
        for (const OptimizerSlot& slot : trainer.optimizer.slots) {
            if (!slot.muon) continue;
            const std::string& name = slot.parameter->name;
            const bool fc = name.ends_with("fc.weight"), fcproj = name.ends_with("fcproj.weight");
            const double expected = value * (fc ? c.fc : fcproj ? c.fcproj : c.square);
            const Vector s = singular_values(trainer.read(trainer.params, slot));
            EXPECT_NEAR(s.front() / expected, 1.0, 1e-4) << name << " " << slot.block.name;
            EXPECT_NEAR(s.back() / expected, 1.0, 1e-4) << name << " " << slot.block.name;
        }
    }
    EXPECT_FLOAT_EQ(muon_scale_factor(MuonScale::match_rms, 3072, 768), 0.2f * std::sqrt(3072.0f));
    EXPECT_FLOAT_EQ(muon_scale_factor(MuonScale::original, 768, 3072), 1.0f);
}

// match_rms: the update's root mean square is 0.2 lr, AdamW's, up to the polynomial's band.
TEST(Muon, MatchRmsHasAdamWsUpdateSize) {
    for (const auto& [ns, low, high] :
         {std::tuple{"polar-express", 0.858, 1.142}, {"keller", 0.681, 1.135}}) {
        OptimizerConfig config = bare_muon(MuonScale::match_rms);
        config.muon_ns = ns;
        Trainer trainer(config);
        std::fill(trainer.params.begin(), trainer.params.end(), 0.0f);
        for (const OptimizerSlot& slot : trainer.optimizer.slots) {
            const Vector s = log_spectrum(small_C, 0.05);
            if (slot.muon)
                trainer.write(trainer.grads, slot,
                              with_spectrum(slot.block.rows, slot.parameter->cols, s, 9));
        }
        const float lr = 6e-4f;
        trainer.step(lr);
        for (const OptimizerSlot& slot : trainer.optimizer.slots) {
            if (!slot.muon) continue;
            const double rms =
                frobenius(trainer.read(trainer.params, slot)) / std::sqrt(static_cast<double>(slot.size()));
            EXPECT_GT(rms / static_cast<double>(lr), 0.2 * low) << slot.parameter->name;
            EXPECT_LT(rms / static_cast<double>(lr), 0.2 * high) << slot.parameter->name;
        }
    }
}

// q, k and v are matrices of their own: a q gradient 1000 times as large changes no bit of k and v, and
// hardly q itself.
TEST(Muon, QueryGradientsDoNotTouchKeys) {
    std::vector<Matrix> changes[2];
    for (const int large : {0, 1}) {
        Trainer trainer(bare_muon(MuonScale::original));
        std::fill(trainer.params.begin(), trainer.params.end(), 0.0f);
        trainer.random_grads(77);
        const OptimizerSlot& q = trainer.slot("h.0.qkv.weight", "q");
        if (large == 1) trainer.write(trainer.grads, q, 1000.0 * trainer.read(trainer.grads, q));
        trainer.step(1.0f);
        for (const char* block : {"q", "k", "v"}) {
            changes[large].push_back(trainer.read(trainer.params, trainer.slot("h.0.qkv.weight", block)));
            EXPECT_LT(singular_values(changes[large].back()).front(), 1.142) << block;
        }
    }
    EXPECT_LT(relative_distance(changes[1][0], changes[0][0]), 1e-4);
    EXPECT_EQ(changes[1][1].x, changes[0][1].x);
    EXPECT_EQ(changes[1][2].x, changes[0][2].x);
}

// Muon does not see the size of the gradients, so a wrong gradient scale cannot change its step.
TEST(Muon, GradientScaleDoesNotMatter) {
    std::vector<float> results[2];
    for (const int scaled : {0, 1}) {
        Trainer trainer(muon_config());
        for (unsigned step = 0; step < 3; ++step) {
            trainer.random_grads(300 + 50 * step);
            trainer.step(0.1f, scaled == 1 ? 0x1p-12f : 1.0f);
        }
        for (const OptimizerSlot& slot : trainer.optimizer.slots) {
            if (!slot.muon) continue;
            const Matrix m = trainer.read(trainer.params, slot);
            results[scaled].insert(results[scaled].end(), m.x.begin(), m.x.end());
        }
    }
    EXPECT_EQ(results[0], results[1]);
}

// A NaN in one matrix's gradient: that matrix only decays, is counted, and touches no other.
TEST(Muon, NonFiniteGradientGivesACountedZeroUpdate) {
    Trainer good(muon_config()), bad(muon_config());
    for (Trainer* trainer : {&good, &bad}) trainer->random_grads(5);
    const OptimizerSlot& hit = bad.slot("h.0.qkv.weight", "k");
    bad.grads[hit.offset() + 11] = std::numeric_limits<float>::quiet_NaN();
    const Matrix before = bad.read(bad.params, hit);
    Buffer<float> params(bad.params, bad.stream.get()), grads(bad.grads, bad.stream.get());
    Buffer<float> workspace(unwritten<float>(bad.workspace_floats), bad.stream.get());
    optimizer_step(bad.optimizer, params.data(), nullptr, grads.data(), 0.1f, 1.0f, workspace.data(),
                   bad.workspace_floats, bad.stream.get());
    bad.params = params.read();
    good.step(0.1f);
    EXPECT_EQ(bad.optimizer.degenerate_updates, 1u);
    EXPECT_LT(relative_distance(bad.read(bad.params, hit), (1 - 0.1 * 0.1) * before), 1e-6);
    for (const OptimizerSlot& slot : bad.optimizer.slots) {
        if (&slot != &hit) {
            EXPECT_EQ(bad.read(bad.params, slot).x, good.read(good.params, slot).x);
        }
    }
}

// However many matrices share a batch, and at any number of threads: the same bits. A workspace too small
// for one matrix is refused before anything moves.
TEST(Muon, WorkspaceAndThreadsDoNotChangeBits) {
    const auto trained = [](size_t extra_workspace, int threads) {
        Trainer trainer(muon_config(), gpt_like_table(3, 40, 50, 64, 10), threads, extra_workspace);
        for (unsigned step = 0; step < 3; ++step) {
            trainer.random_grads(60 * step);
            trainer.step(0.02f, 0.7f);
        }
        return trainer.params;
    };
    const std::vector<float> expected = trained(0, 1);
    for (const size_t extra : {20000, 100000, 1000000}) EXPECT_EQ(trained(extra, 1), expected) << extra;
    for (const int threads : {2, 3}) EXPECT_EQ(trained(100000, threads), expected) << threads;

    Trainer trainer(muon_config());
    trainer.random_grads(1);
    trainer.workspace_floats--;
    const std::vector<float> before = trainer.params;
    expect_refused("workspace", [&] { trainer.step(0.1f); });
    EXPECT_EQ(trainer.params, before);
    EXPECT_EQ(trainer.optimizer.steps, 0u);
}

// ---------------------------------------------------------------------------------------------------
// What has gone wrong with Muon elsewhere

// The change of all of Muon's weights in the second of two steps from the same gradients, which are
// multiplied by first_scale and second_scale as clipping does it.
Matrix second_change(OptimizerConfig config, float first_scale, float second_scale) {
    config.weight_decay = 0;
    Trainer trainer(config);
    Vector change;
    std::vector<float> before;
    for (unsigned step = 0; step < 2; ++step) {
        before = trainer.params;
        trainer.random_grads(300 + 50 * step);
        trainer.step(0.1f, step == 0 ? first_scale : second_scale);
    }
    for (const OptimizerSlot& slot : trainer.optimizer.slots) {
        if (!slot.muon) continue;
        const Matrix m = trainer.read(trainer.params, slot) + -1.0 * trainer.read(before, slot);
        change.insert(change.end(), m.x.begin(), m.x.end());
    }
    return {1, change.size(), change};
}

// Clipping an orthogonalised update to norm 1 would divide it by sqrt(min(rows, cols)): by 5 here. Clipping
// the gradients only changes how they mix in the momentum.
TEST(MuonPitfalls, ClippingDoesNotShrinkTheUpdate) {
    const Matrix plain = second_change(muon_config(), 1, 1),
                 clipped = second_change(muon_config(), 1, 0.001f);
    EXPECT_NEAR(frobenius(clipped) / frobenius(plain), 1, 0.05);
    EXPECT_GT(relative_distance(clipped, plain), 0.1);
    EXPECT_LT(relative_distance(second_change(muon_config(), 0.001f, 0.001f), plain), 1e-5);
}

// A floor in the normalisation, 1e-7 in most implementations, makes updates shrink where gradients are small.
TEST(MuonPitfalls, NoFloorUnderSmallGradients) {
    const Matrix plain = second_change(muon_config(), 1, 1);
    for (const float scale : {1e-10f, 1e-20f, 1e-30f, 1e30f})
        EXPECT_LT(relative_distance(second_change(muon_config(), scale, scale), plain), 1e-4) << scale;
}

// Sum or mean over micro-batches: Muon cannot tell, so that its loss looks right; AdamW's epsilon can.
TEST(MuonPitfalls, SumInsteadOfMeanShowsInAdamWAlone) {
    std::vector<Matrix> wte, fc;
    for (const float scale : {1e-6f, 8e-6f}) {
        Trainer trainer(muon_config());
        std::fill(trainer.params.begin(), trainer.params.end(), 0.0f);
        trainer.random_grads(4);
        trainer.step(0.1f, scale * 1e-2f);
        wte.push_back(trainer.read(trainer.params, trainer.slot("wte")));
        fc.push_back(trainer.read(trainer.params, trainer.slot("h.0.fc.weight")));
    }
    EXPECT_LT(relative_distance(fc[1], fc[0]), 1e-5);
    EXPECT_GT(relative_distance(wte[1], wte[0]), 0.02);
}

// Trainers have routed every matrix to AdamW without a word, and compared AdamW with itself.
TEST(MuonPitfalls, MatricesAreNotRoutedToAdamW) {
    Trainer adamw(adamw_config()), muon(muon_config());
    for (Trainer* trainer : {&adamw, &muon}) {
        trainer->random_grads(5);
        trainer->step(0.1f);
    }
    for (const OptimizerSlot& slot : muon.optimizer.slots) {
        const double distance =
            relative_distance(muon.read(muon.params, slot), adamw.read(adamw.params, slot));
        if (slot.muon) {
            EXPECT_GT(distance, 1e-3) << slot.parameter->name;
        } else {
            EXPECT_EQ(distance, 0) << slot.parameter->name;
        }
    }
    EXPECT_EQ(muon.optimizer.orthogonalized, 12u);
}

// Once a step, however many micro-batches the gradients are the sum of: one call, each matrix once.
TEST(MuonPitfalls, EachMatrixOnceAStep) {
    Trainer trainer(muon_config(), small_table(), 1, 100000);
    for (uint64_t step = 1; step <= 3; ++step) {
        trainer.random_grads(5);
        trainer.step(0.1f);
        EXPECT_EQ(trainer.optimizer.orthogonalized, 12 * step);
    }
}

// A scheduler that writes one learning rate into all groups loses the matrices' own: as the schedule falls,
// the ratio of the two stays.
TEST(MuonPitfalls, TheScheduleScalesTheMatricesOwnRate) {
    OptimizerConfig config = bare_muon(MuonScale::match_rms);
    config.lr_muon = 40;
    std::vector<double> moved;
    for (const float lr : {1e-2f, 1e-3f, 1e-4f}) {
        Trainer trainer(config);
        std::fill(trainer.params.begin(), trainer.params.end(), 0.0f);
        trainer.random_grads(6);
        trainer.step(lr);
        moved.push_back(frobenius(trainer.read(trainer.params, trainer.slot("h.1.fc.weight"))) /
                        static_cast<double>(lr));
    }
    EXPECT_NEAR(moved[1] / moved[0], 1, 1e-5);
    EXPECT_NEAR(moved[2] / moved[0], 1, 1e-5);
    EXPECT_NEAR(moved[0] / (40 * 0.2 * std::sqrt(96.0 * small_C)), 1, 0.15);
}

// Zero rows that only pad a tensor would be orthogonalised with it: no matrix of Muon's has any.
TEST(MuonPitfalls, NoPaddingInMuonsMatrices) {
    for (const Parameter& p :
         gpt_parameter_table({.layers = 2, .heads = 3, .channels = 21, .vocab_size = 50})) {
        if (p.group == ParameterGroup::muon) {
            EXPECT_EQ(p.used_rows, p.rows) << p.name;
        }
    }
}

// A matrix whose first gradient is exactly zero, as behind projections that start at zero: no NaN, counted,
// and the others move as if it were not there.
TEST(MuonPitfalls, AZeroGradientIsNoNaN) {
    for (const NewtonSchulzVariant variant : all_variants) {
        for (const bool normuon : {false, true}) {
            OptimizerConfig config = bare_muon(MuonScale::original);
            config.muon_ns_variant = variant;
            config.muon_normuon = normuon;
            Trainer all(config), one_zero(config);
            for (Trainer* trainer : {&all, &one_zero}) trainer->random_grads(9);
            const OptimizerSlot& zero = one_zero.slot("h.1.fcproj.weight");
            one_zero.write(one_zero.grads, zero, zeros(zero.block.rows, zero.parameter->cols));
            const Matrix before = one_zero.read(one_zero.params, zero);
            for (Trainer* trainer : {&all, &one_zero}) trainer->step(0.1f);
            EXPECT_EQ(one_zero.optimizer.degenerate_updates, 1u);
            for (const OptimizerSlot& slot : one_zero.optimizer.slots) {
                const Matrix expected = &slot == &zero ? before : all.read(all.params, slot);
                EXPECT_EQ(one_zero.read(one_zero.params, slot).x, expected.x) << slot.parameter->name;
            }
        }
    }
}

// Single rows and columns are matrices too: their polar factor is the normalised vector.
TEST(MuonPitfalls, RowsAndColumnsAreMatrices) {
    for (const auto& [rows, cols] : std::vector<std::pair<size_t, size_t>>{{1, 300}, {300, 1}, {2, 300}}) {
        for_variants(express(8), [&, rows = rows, cols = cols](const NewtonSchulz& method) {
            int degenerate = 0;
            const Matrix m = random_matrix(rows, cols, 8);
            const Vector s = singular_values(normalised_and_orthogonalised(m, method, &degenerate));
            for (const double value : s) EXPECT_NEAR(value, 1, 1e-3);
        });
    }
}

// An iteration that keeps what it is through with needs memory for every step: here two matrices take turns.
TEST(MuonPitfalls, MemoryDoesNotGrowWithTheSteps) {
    for (const NewtonSchulzVariant variant : all_variants) {
        const auto workspace = [&](int steps) {
            const NewtonSchulz method =
                newton_schulz_plan(newton_schulz_set("polar-express", steps, variant), variant);
            return newton_schulz_workspace(method, 1, 768, 3072);
        };
        EXPECT_EQ(workspace(5), workspace(10));
        EXPECT_LE(workspace(5), 768 * (3072 + 4 * 768u));
    }
}

// The program looks at the size of each first update: right ones pass in every mode, and one that is not is
// named.
TEST(MuonPitfalls, TheFirstUpdatesSizeIsChecked) {
    for (const MuonScale scale :
         {MuonScale::match_rms, MuonScale::original, MuonScale::spectral, MuonScale::unit_rms}) {
        for (const NewtonSchulzPrecision precision :
             {NewtonSchulzPrecision::fp32, NewtonSchulzPrecision::fp16}) {
            OptimizerConfig config = bare_muon(scale);
            config.muon_ns_dtype = precision;
            Trainer trainer(config);
            trainer.random_grads(3);
            trainer.step(0.1f);
            EXPECT_TRUE(trainer.optimizer.first_update_faults.empty());
        }
    }
    // Coefficients that shrink: six of You's, past the guard.
    Trainer trainer(bare_muon(MuonScale::match_rms));
    trainer.optimizer.newton_schulz.steps = cycled(you_quintic, 6);
    trainer.random_grads(3);
    trainer.step(0.1f);
    ASSERT_EQ(trainer.optimizer.first_update_faults.size(), 12u);
    const std::string fault = trainer.optimizer.first_update_faults[0];
    EXPECT_NE(fault.find("h.0.qkv.weight q"), std::string::npos) << fault;
    EXPECT_NE(fault.find("not 0.2"), std::string::npos) << fault;
    const size_t faults = trainer.optimizer.first_update_faults.size();
    trainer.step(0.1f);
    EXPECT_EQ(trainer.optimizer.first_update_faults.size(), faults);  // the first step alone
}

// ---------------------------------------------------------------------------------------------------
// State in bf16

// Each slot's averages are rounded with the bits of its own place in the parameters' arena and of the step:
// the op, called on one slot alone with what kernels.h says, gives the step's bits. Two steps, so that what
// the first one rounded counts too.
TEST(Bf16State, RandomBitsFollowStepAndPlace) {
    for (const OptimizerConfig& config : {with_bf16_state(adamw_config()), with_bf16_state(muon_config())}) {
        Trainer trainer(config);
        Stream* const stream = trainer.stream.get();
        std::vector<std::vector<bf16_t>> first(trainer.optimizer.slots.size()), second(first.size());
        for (uint32_t step = 1; step <= 2; ++step) {
            trainer.random_grads(70 * step);
            trainer.step(0.01f, 0.5f);
            for (size_t i = 0; i < first.size(); ++i) {
                const OptimizerSlot& slot = trainer.optimizer.slots[i];
                const size_t n = slot.size();
                if (step == 1) first[i].resize(n), second[i].resize(n);
                Buffer<bf16_t> a(first[i], stream), b(second[i], stream);
                Buffer<float> unused(std::vector<float>(n), stream),
                    grad(rounded<float>(trainer.read(trainer.grads, slot).x), stream);
                const StateRounding rounding{config.seed, step, slot.offset()};
                if (slot.muon) {
                    muon_momentum<bf16_t>(unused, a, grad, n, config.muon_momentum, true, 0.5f, rounding,
                                          stream);
                } else {
                    const AdamWStep adamw = {.lr = 0,
                                             .beta1 = config.beta1,
                                             .beta2 = config.beta2,
                                             .eps = config.eps,
                                             .weight_decay = 0,
                                             .bias_correction1 = 1,
                                             .bias_correction2 = 1,
                                             .grad_scale = 0.5f};
                    adamw_update<float, bf16_t>(unused, nullptr, a, b, grad, n, adamw, rounding, stream);
                }
                first[i] = a.read(), second[i] = b.read();
                std::string expected(reinterpret_cast<const char*>(first[i].data()), 2 * n);
                if (!slot.muon) expected.append(reinterpret_cast<const char*>(second[i].data()), 2 * n);
                ASSERT_TRUE(state_bytes(trainer, slot) == expected)
                    << slot.parameter->name << " " << slot.block.name << " step " << step;
            }
        }
    }
}

// Muon's momentum alone in bf16: the matrices are updated to the bits that bf16 state gives them, and AdamW's
// tensors to those that fp32 state gives them, state and weights.
TEST(Bf16State, MuonsAloneLeavesTheRestInFp32) {
    const auto run = [](const OptimizerConfig& config) {
        Trainer trainer(config);
        for (unsigned step = 1; step <= 3; ++step) {
            trainer.random_grads(70 * step);
            trainer.step(0.01f, 0.5f);
        }
        std::vector<std::string> slots;
        for (const OptimizerSlot& slot : trainer.optimizer.slots) {
            const Matrix weights = trainer.read(trainer.params, slot);
            slots.push_back(state_bytes(trainer, slot));
            for (const double weight : weights.x) slots.back() += std::to_string(weight) + " ";
        }
        return slots;
    };
    OptimizerConfig fp32 = muon_config();
    fp32.seed = 42;
    const std::vector<std::string> full = run(fp32), half = run(with_bf16_state(muon_config())),
                                   mixed = run(with_bf16_momentum(muon_config()));
    const Optimizer plan = optimizer_plan(muon_config(), small_table());
    for (size_t i = 0; i < plan.slots.size(); ++i) {
        EXPECT_NE(full[i], half[i]);
        EXPECT_EQ(mixed[i], plan.slots[i].muon ? half[i] : full[i]) << plan.slots[i].parameter->name;
    }
}

// What a step takes by value would stay that of the recorded step: learning rate, gradient scale, and the
// step's number in the random bits of bf16 state change at every step, and every step has the bits of one
// that is not recorded.
TEST(Muon, ReplayedStepsEqualDirectOnes) {
    OptimizerConfig half = with_bf16_state(muon_config());
    half.muon_ns_dtype = NewtonSchulzPrecision::fp16;
    for (const OptimizerConfig& config : {muon_config(), half}) {
        const auto run = [&](bool replayed) {
            Trainer trainer(config, small_table(), 1, 5000);
            Stream* const stream = trainer.stream.get();
            Optimizer& optimizer = trainer.optimizer;
            Buffer<float> params(trainer.params, stream), grads(trainer.grads, stream);
            Buffer<float> workspace(unwritten<float>(trainer.workspace_floats), stream);
            Outputs outputs;
            for (unsigned step = 1; step <= 5; ++step) {
                if (!replayed) {
                    replay_destroy(optimizer.muon_replay);
                    optimizer.muon_replay = replay_create();
                }
                trainer.random_grads(70 * step);
                copy_to_device(grads, trainer.grads.data(), trainer.grads.size() * sizeof(float), stream);
                optimizer_step<float>(optimizer, params, nullptr, grads, 0.01f / static_cast<float>(step),
                                      1.0f / static_cast<float>(step), workspace, trainer.workspace_floats,
                                      stream);
                outputs.push_back(params.values());
                for (const OptimizerSlot& slot : optimizer.slots) {
                    Vector& bytes = outputs.emplace_back();
                    for (const char byte : state_bytes(trainer, slot)) bytes.push_back(byte);
                }
            }
            return outputs;
        };
        expect_same_bits(run(true), run(false), "replayed");
    }
}

// Rounding is noise around fp32's trajectory: after 30 steps the weights have gone nearly the same way. The
// seed chooses the noise.
TEST(Bf16State, StaysNearFp32) {
    for (const OptimizerConfig& config : {adamw_config(), muon_config()}) {
        const auto trained = [](const OptimizerConfig& c) {
            Trainer trainer(c);
            for (unsigned step = 0; step < 30; ++step) {
                trainer.random_grads(50 * step);
                trainer.step(1e-2f);
            }
            return trainer.params;
        };
        const Vector start = doubles(Trainer(config).params), fp32 = doubles(trained(config));
        const std::vector<float> bf16 = trained(with_bf16_state(config));
        OptimizerConfig other_seed = with_bf16_state(config);
        other_seed.seed++;
        EXPECT_TRUE(trained(with_bf16_state(config)) == bf16);
        EXPECT_FALSE(trained(other_seed) == bf16);
        double distance = 0, way = 0;
        for (size_t i = 0; i < start.size(); ++i) {
            distance += std::pow(static_cast<double>(bf16[i]) - fp32[i], 2);
            way += std::pow(fp32[i] - start[i], 2);
        }
        EXPECT_LT(std::sqrt(distance / way), 0x1p-7);  // bf16's unit
        EXPECT_GT(distance, 0);
    }
}

// ---------------------------------------------------------------------------------------------------
// The gradient norm and clipping

double norm_of(const Trainer& trainer, int threads = 1) {
    const StreamPointer stream = open_stream(threads);
    Buffer<float> grads(trainer.grads, stream.get());
    Buffer<double> sums(unwritten<double>(table_blocks(trainer.table)), stream.get());
    return global_grad_norm(block_squares(grads, trainer.table, own_all(trainer.table), sums, stream.get()));
}

TEST(GradientNorm, MatchesDouble) {
    Trainer trainer(adamw_config());
    EXPECT_EQ(table_blocks(trainer.table), trainer.optimizer.slots.size());
    EXPECT_EQ(norm_of(trainer), 0.0);
    trainer.random_grads(9);
    // What lies in the alignment gaps is no gradient.
    const Parameter& last = trainer.table.back();
    for (size_t i = last.offset + last.size(); i < trainer.grads.size(); ++i) trainer.grads[i] = 1e20f;
    double square = 0;
    for (const Parameter& p : trainer.table) {
        for (size_t i = 0; i < p.size(); ++i) {
            square += std::pow(static_cast<double>(trainer.grads[p.offset + i]), 2);
        }
    }
    const double norm = norm_of(trainer);
    EXPECT_NEAR(norm / std::sqrt(square), 1.0, 1e-13);
    for (const int threads : {2, 3}) EXPECT_EQ(norm_of(trainer, threads), norm);
}

TEST(GradientNorm, ExtremeEntries) {
    Trainer trainer(adamw_config());
    trainer.grads[0] = 3e30f;
    trainer.grads[trainer.table[5].offset] = 4e30f;
    EXPECT_NEAR(norm_of(trainer) / 5e30, 1.0, 1e-7);
    trainer.grads[0] = 3e-30f;
    trainer.grads[trainer.table[5].offset] = 4e-30f;
    EXPECT_NEAR(norm_of(trainer) / 5e-30, 1.0, 1e-7);
    for (const double bad : {nan_value, infinity, -infinity}) {
        trainer.grads[trainer.table.back().offset + 3] = static_cast<float>(bad);
        EXPECT_FALSE(std::isfinite(norm_of(trainer))) << bad;
    }
}

TEST(GradientNorm, ClipFactor) {
    EXPECT_EQ(clip_factor(0.5, 1.0), 1.0f);
    EXPECT_EQ(clip_factor(0.0, 1.0), 1.0f);
    EXPECT_FLOAT_EQ(clip_factor(4.0, 1.0), 0.25f);
    EXPECT_FLOAT_EQ(clip_factor(1e30, 1.0), 1e-30f);
    EXPECT_EQ(clip_factor(1e30, 0.0), 1.0f);  // off
    EXPECT_TRUE(std::isnan(clip_factor(nan_value, 1.0)));
}

// Gradients that were multiplied by a power of two, and unscaled and clipped as a training step does it: the
// same weights and state, to the bit.
TEST(GradientNorm, PowerOfTwoLossScalesChangeNoBit) {
    for (const OptimizerConfig& config :
         {adamw_config(), muon_config(), with_bf16_state(adamw_config()), with_bf16_state(muon_config())}) {
        const auto trained = [&](float loss_scale) {
            Trainer trainer(config);
            for (unsigned step = 0; step < 3; ++step) {
                trainer.random_grads(90 * step);
                for (float& g : trainer.grads) g *= loss_scale;
                const double norm = norm_of(trainer) / static_cast<double>(loss_scale);
                const float clip = clip_factor(norm, 1.0);
                EXPECT_LT(clip, 1.0f);
                trainer.step(0.01f, clip / loss_scale);
            }
            std::string bytes(reinterpret_cast<const char*>(trainer.params.data()),
                              trainer.params.size() * sizeof(float));
            for (const OptimizerSlot& slot : trainer.optimizer.slots) bytes += state_bytes(trainer, slot);
            return bytes;
        };
        const std::string unscaled = trained(1);
        for (const float loss_scale : {2.0f, 256.0f, 65536.0f, 0x1p24f})
            EXPECT_TRUE(trained(loss_scale) == unscaled) << loss_scale;
    }
}

// ---------------------------------------------------------------------------------------------------
// The loss scale, against what torch.amp.GradScaler's documentation promises: initial 2^16, doubled after
// 2000 finite steps in a row, halved by each other one.

TEST(LossScaler, GrowsAndBacksOff) {
    LossScaler scaler;
    EXPECT_EQ(scaler.scale, 65536.0f);
    for (int step = 1; step < 2000; step++) loss_scaler_update(scaler, true);
    EXPECT_EQ(scaler.scale, 65536.0f);
    loss_scaler_update(scaler, true);
    EXPECT_EQ(scaler.scale, 131072.0f);
    for (int step = 0; step < 1999; step++) loss_scaler_update(scaler, true);
    loss_scaler_update(scaler, false);  // the count starts again
    EXPECT_EQ(scaler.scale, 65536.0f);
    for (int step = 0; step < 1999; step++) loss_scaler_update(scaler, true);
    EXPECT_EQ(scaler.scale, 65536.0f);
    loss_scaler_update(scaler, true);
    EXPECT_EQ(scaler.scale, 131072.0f);
}

TEST(LossScaler, StaysWithinItsBoundsAndComesBack) {
    LossScaler scaler;
    for (int step = 0; step < 1000; step++) loss_scaler_update(scaler, false);
    EXPECT_EQ(scaler.scale, 1.0f);
    EXPECT_FALSE(loss_scaler_can_back_off(scaler));
    for (int step = 0; step < 2000; step++) loss_scaler_update(scaler, true);
    EXPECT_EQ(scaler.scale, 2.0f);
    EXPECT_TRUE(loss_scaler_can_back_off(scaler));
    for (int step = 0; step < 100 * 2000; step++) loss_scaler_update(scaler, true);
    EXPECT_EQ(scaler.scale, 16777216.0f);
}

TEST(LossScaler, AFixedScaleStays) {
    LossScaler scaler = loss_scaler_fixed(8);
    for (int step = 0; step < 5000; step++) loss_scaler_update(scaler, step % 3 != 0);
    EXPECT_EQ(scaler.scale, 8.0f);
    EXPECT_FALSE(loss_scaler_can_back_off(scaler));
}

// ---------------------------------------------------------------------------------------------------
// --lr-adapt

// The squares that a step has of one block: of the leaves' shares of its gradient together, and of their sum.
struct Squares {
    double of_leaves = 0, of_sum = 0;
};

// K leaves whose gradients are the same n entries `truth` plus noise of a given deviation.
Squares leaves_of(size_t K, size_t n, double truth, double deviation, unsigned seed) {
    Squares squares;
    Vector sum(n);
    for (size_t k = 0; k < K; ++k) {
        const std::vector<float> noise = normal<float>(n, seed * 100 + static_cast<unsigned>(k));
        for (size_t i = 0; i < n; ++i) {
            const double share = (truth + deviation * noise[i]) / static_cast<double>(K);
            squares.of_leaves += share * share;
            sum[i] += share;
        }
    }
    squares.of_sum = reference::dot(sum, sum);
    return squares;
}

// Signal and noise come out on average over many steps, whatever the number of leaves: signal is n truth^2,
// noise n deviation^2. The errors of the means are a few parts in a thousand of the noise.
TEST(LrAdapt, FindsKnownSignalAndNoise) {
    constexpr size_t n = 200, trials = 300;
    for (const size_t K : {2, 3, 8}) {
        for (const double truth : {0.0, 0.1, 1.0}) {
            double signal = 0, noise = 0;
            for (unsigned trial = 0; trial < trials; ++trial) {
                const Squares squares = leaves_of(K, n, truth, 0.7, trial);
                const GradientNoise found = gradient_noise(squares.of_leaves, squares.of_sum, K);
                signal += found.signal / trials, noise += found.noise / trials;
            }
            EXPECT_NEAR(noise, n * 0.49, 0.01 * n * 0.49) << K << " " << truth;
            EXPECT_NEAR(signal, n * truth * truth, 0.02 * n * (0.49 + truth * 0.7)) << K << " " << truth;
        }
    }
}

TEST(LrAdapt, EqualAndOppositeLeaves) {
    for (const size_t K : {2, 5}) {
        const Squares equal = leaves_of(K, 10, 3, 0, 1);
        const GradientNoise found = gradient_noise(equal.of_leaves, equal.of_sum, K);
        EXPECT_NEAR(found.signal, 90, 1e-12);
        EXPECT_NEAR(found.noise, 0, 1e-12);
    }
    // g and -g: the sample variance of +-3 is 18 an entry, and of their mean half of that, negative as
    // signal.
    const GradientNoise opposite = gradient_noise(2 * 10 * 1.5 * 1.5, 0, 2);
    EXPECT_DOUBLE_EQ(opposite.noise, 180);
    EXPECT_DOUBLE_EQ(opposite.signal, -90);
}

// The squares of two leaves with a ratio rho of signal: 1 of the gradient, and of the leaves what makes it
// so.
Squares of_ratio(double rho) { return {1 - rho / 2, 1}; }

// The multipliers of blocks with these ratios in one step.
std::vector<float> multipliers(LrAdapt& adapt, const Vector& ratios) {
    std::vector<double> leaf_squares, squares;
    for (const double rho : ratios) {
        leaf_squares.push_back(of_ratio(rho).of_leaves);
        squares.push_back(of_ratio(rho).of_sum);
    }
    return lr_adapt_step(adapt, leaf_squares, squares, 2);
}

// What is steady is 1, whatever it is, and from the first step on.
TEST(LrAdapt, ASteadyRatioIsOne) {
    LrAdapt adapt = lr_adapt_create(5);
    for (int step = 0; step < 500; ++step)
        EXPECT_EQ(multipliers(adapt, {1, 0.75, 0.5, 0, -0.25}), std::vector<float>(5, 1.0f));
    // Steady but for chance: a matrix of 500 entries with much noise, one with noise alone. Then one step's
    // rho has a standard deviation of sqrt(2 / 500 * 4 / 3) = 0.07 about 0, about 0.04 cut off at 0; the fast
    // average, of 19 independent steps in effect, 0.01; the multiplier half of that over mean and floor,
    // 0.06.
    for (const double truth : {0.3, 0.0}) {
        adapt = lr_adapt_create(1);
        for (unsigned step = 1; step <= 400; ++step) {
            const Squares squares = leaves_of(4, 500, truth, 1, step);
            const float multiplier = lr_adapt_step(adapt, {squares.of_leaves}, {squares.of_sum}, 4)[0];
            EXPECT_NEAR(multiplier, 1, 4 * 0.06) << truth << " step " << step;
        }
    }
}

// Half the batch has twice the noise. After n more steps the averages are still 0.9^n and 0.99^n of the
// change away from the new ratio; in the end the multiplier is 1 again.
TEST(LrAdapt, AHalvedBatchByHand) {
    constexpr double before = 0.5, after = 1.0 / 3;
    LrAdapt adapt = lr_adapt_create(2);
    for (int step = 0; step < 200; ++step) multipliers(adapt, {before, before});
    for (int n = 1; n <= 600; ++n) {
        const std::vector<float> found = multipliers(adapt, {after, before});
        const double fast = after + (before - after) * std::pow(0.9, n),
                     slow = after + (before - after) * std::pow(0.99, n);
        EXPECT_NEAR(found[0], std::sqrt((fast + 0.05) / (slow + 0.05)), 1e-6) << n;
        EXPECT_EQ(found[1], 1.0f) << "another block's shock";
    }
    EXPECT_NEAR(multipliers(adapt, {after, before})[0], 1, 1e-3);
}

// Between a half and two, and both are reached. A step without a gradient is one without signal.
TEST(LrAdapt, StaysWithinItsBounds) {
    LrAdapt adapt = lr_adapt_create(2);
    float least = 1, most = 1;
    for (int step = 0; step < 2000; ++step) {
        const bool up = step / 250 % 2 == 1;
        const std::vector<double> sums = {up ? 1.0 : 0.0, 1e60};
        for (const float m : lr_adapt_step(adapt, {0.5, up ? 1e200 : 0.5e60}, sums, 2)) {
            least = std::min(least, m), most = std::max(most, m);
            ASSERT_TRUE(m >= 0.5f && m <= 2.0f) << m;
        }
    }
    EXPECT_EQ(least, 0.5f);
    EXPECT_EQ(most, 2.0f);
}

TEST(LrAdapt, PowerOfTwoLossScalesChangeNoBit) {
    LrAdapt plain = lr_adapt_create(1), scaled = lr_adapt_create(1);
    for (unsigned step = 1; step <= 30; ++step) {
        const Squares squares = leaves_of(4, 50, 0.3, 1, step);
        const double scale = step < 20 ? 0x1p32 : 0x1p30;  // of the squares
        EXPECT_EQ(lr_adapt_step(scaled, {squares.of_leaves * scale}, {squares.of_sum * scale}, 4),
                  lr_adapt_step(plain, {squares.of_leaves}, {squares.of_sum}, 4));
    }
}

// A slot's factor is one on its learning rate, and so on its decay, in every step, recorded or not; of the
// other slots no bit changes.
TEST(LrAdapt, AFactorIsThatOfItsSlotsLearningRate) {
    for (OptimizerConfig config : {adamw_config(), muon_config()}) {
        config.weight_decay = 0.5f;
        for (const DecayMode mode : {DecayMode::decoupled, DecayMode::independent}) {
            config.weight_decay_mode = mode;
            Trainer plain(config), half(config), mixed(config);
            for (unsigned step = 0; step < 5; ++step) {
                const float factor = step % 2 == 0 ? 0.5f : 2.0f;
                const auto factor_of = [&](size_t slot) { return slot % 3 == step % 3 ? factor : 1.0f; };
                const std::vector<float> before = mixed.params;
                for (Trainer* trainer : {&plain, &half, &mixed}) {
                    trainer->params = before, trainer->random_grads(40 * step);
                    for (size_t i = 0; i < trainer->optimizer.slots.size(); ++i)
                        trainer->optimizer.slots[i].lr_factor = trainer == &mixed ? factor_of(i) : 1.0f;
                    trainer->step(trainer == &half ? 0.01f * factor : 0.01f);
                }
                for (size_t i = 0; i < mixed.optimizer.slots.size(); ++i) {
                    const OptimizerSlot& slot = mixed.optimizer.slots[i];
                    const Trainer& expected = factor_of(i) == 1.0f ? plain : half;
                    EXPECT_EQ(Trainer::read(mixed.params, slot).x, Trainer::read(expected.params, slot).x)
                        << slot.parameter->name << " " << slot.block.name << " step " << step;
                }
                EXPECT_NE(plain.params, half.params);
            }
        }
    }
}

}  // namespace
