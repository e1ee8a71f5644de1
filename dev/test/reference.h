// Textbook references for every op of kernels/kernels.h: plain loops in double, written from the formulas in
// the papers that kernels.h names, with no blocking, no online tricks and nothing shared with a backend.
// Slow and obvious on purpose: they are what the fast code is judged by. The gradients here are themselves
// judged by central differences (numeric_gradient) in the tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <vector>

using Vector = std::vector<double>;

namespace reference {

// d loss / d x(i) by central differences. The error is about step^2 times the third derivative: 1e-9 for the
// smooth functions of order 1 that it is used on.
inline Vector numeric_gradient(const std::function<double(const Vector&)>& loss, Vector x) {
    const double step = 1e-4;
    Vector gradient(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
        const double original = x[i];
        x[i] = original + step;
        const double above = loss(x);
        x[i] = original - step;
        const double below = loss(x);
        x[i] = original;
        gradient[i] = (above - below) / (2 * step);
    }
    return gradient;
}

inline double dot(const Vector& a, const Vector& b) {
    double total = 0;
    for (size_t i = 0; i < a.size(); ++i) total += a[i] * b[i];
    return total;
}

// ---------------------------------------------------------------------------------------------------
// Embedding

inline Vector embedding_forward(const std::vector<int>& tokens, const Vector& wte, const Vector& wpe,
                                size_t B, size_t T, size_t C) {
    Vector out(B * T * C);
    for (size_t b = 0; b < B; ++b) {
        for (size_t t = 0; t < T; ++t) {
            const size_t token = static_cast<size_t>(tokens[b * T + t]);
            for (size_t c = 0; c < C; ++c) out[(b * T + t) * C + c] = wte[token * C + c] + wpe[t * C + c];
        }
    }
    return out;
}

// ---------------------------------------------------------------------------------------------------
// LayerNorm

struct LayerNorm {
    Vector out, mean, rstd;
};

inline LayerNorm layernorm_forward(const Vector& x, const Vector& weight, const Vector& bias, size_t N,
                                   size_t C) {
    LayerNorm result{Vector(N * C), Vector(N), Vector(N)};
    for (size_t i = 0; i < N; ++i) {
        double mean = 0;
        for (size_t c = 0; c < C; ++c) mean += x[i * C + c] / C;
        double variance = 0;  // the biased estimate, as in the paper
        for (size_t c = 0; c < C; ++c) variance += (x[i * C + c] - mean) * (x[i * C + c] - mean) / C;
        const double rstd = 1 / std::sqrt(variance + 1e-5);
        for (size_t c = 0; c < C; ++c) {
            result.out[i * C + c] = (x[i * C + c] - mean) * rstd * weight[c] + bias[c];
        }
        result.mean[i] = mean;
        result.rstd[i] = rstd;
    }
    return result;
}

struct LayerNormGradient {
    Vector dx, dweight, dbias;
};

// With xhat = (x - mean) rstd and g = dout weight:  d xhat(i)/d x(j) = rstd ([i=j] - 1/C - xhat(i)
// xhat(j)/C).
inline LayerNormGradient layernorm_backward(const Vector& dout, const Vector& x, const Vector& weight,
                                            size_t N, size_t C) {
    const LayerNorm forward = layernorm_forward(x, Vector(C, 1.0), Vector(C, 0.0), N, C);
    LayerNormGradient result{Vector(N * C), Vector(C), Vector(C)};
    for (size_t i = 0; i < N; ++i) {
        const double* xhat = &forward.out[i * C];
        double mean_g = 0, mean_g_xhat = 0;
        for (size_t c = 0; c < C; ++c) {
            const double g = dout[i * C + c] * weight[c];
            mean_g += g / C;
            mean_g_xhat += g * xhat[c] / C;
            result.dweight[c] += dout[i * C + c] * xhat[c];
            result.dbias[c] += dout[i * C + c];
        }
        for (size_t c = 0; c < C; ++c) {
            const double g = dout[i * C + c] * weight[c];
            result.dx[i * C + c] = forward.rstd[i] * (g - mean_g - xhat[c] * mean_g_xhat);
        }
    }
    return result;
}

// ---------------------------------------------------------------------------------------------------
// Matrix products and GELU

// op(a) * op(b) for row-major a and b; op(a) is (m,k), op(b) is (k,n).
inline Vector matmul(const Vector& a, const Vector& b, bool transpose_a, bool transpose_b, size_t m, size_t n,
                     size_t k) {
    Vector d(m * n, 0.0);
    for (size_t i = 0; i < m; ++i) {
        for (size_t l = 0; l < k; ++l) {
            const double a_il = transpose_a ? a[l * m + i] : a[i * k + l];
            for (size_t j = 0; j < n; ++j) d[i * n + j] += a_il * (transpose_b ? b[j * k + l] : b[l * n + j]);
        }
    }
    return d;
}

constexpr double sqrt_2_over_pi = 0.79788456080286535588;

inline double gelu(double x) {
    return 0.5 * x * (1 + std::tanh(sqrt_2_over_pi * (x + 0.044715 * x * x * x)));
}

inline double gelu_gradient(double x) {
    const double t = std::tanh(sqrt_2_over_pi * (x + 0.044715 * x * x * x));
    const double inner = sqrt_2_over_pi * (1 + 3 * 0.044715 * x * x);
    return 0.5 * (1 + t) + (t * t == 1 ? 0 : 0.5 * x * (1 - t * t) * inner);
}

inline Vector map(double function(double), Vector x) {
    std::transform(x.begin(), x.end(), x.begin(), function);
    return x;
}

// x weight^T + bias, before any GELU.
inline Vector linear_forward(const Vector& x, const Vector& weight, const Vector& bias, size_t N, size_t C,
                             size_t OC) {
    Vector y = matmul(x, weight, false, true, N, OC, C);
    for (size_t i = 0; i < N * OC; ++i) y[i] += bias[i % OC];
    return y;
}

inline Vector column_sums(const Vector& x, size_t N, size_t C) {
    Vector sums(C, 0.0);
    for (size_t i = 0; i < N * C; ++i) sums[i % C] += x[i];
    return sums;
}

// ---------------------------------------------------------------------------------------------------
// Attention, with the whole (T,T) matrix of probabilities

// Where q, k or v (part 0, 1, 2) of head h stands in row (b,t) of qkv (B,T,3C).
inline size_t qkv_index(size_t b, size_t t, size_t part, size_t h, size_t T, size_t C, size_t HS) {
    return (b * T + t) * 3 * C + part * C + h * HS;
}

struct Attention {
    Vector out, lse;
    Vector probabilities;  // (B,NH,T,T), zero above the diagonal
};

inline Attention attention_forward(const Vector& qkv, size_t B, size_t T, size_t C, size_t NH) {
    const size_t HS = C / NH;
    Attention result{Vector(B * T * C), Vector(B * NH * T), Vector(B * NH * T * T)};
    for (size_t b = 0; b < B; ++b) {
        for (size_t h = 0; h < NH; ++h) {
            for (size_t i = 0; i < T; ++i) {
                double* p = &result.probabilities[((b * NH + h) * T + i) * T];
                const double* q = &qkv[qkv_index(b, i, 0, h, T, C, HS)];
                double maximum = -INFINITY, total = 0;
                for (size_t j = 0; j <= i; ++j) {
                    const double* k = &qkv[qkv_index(b, j, 1, h, T, C, HS)];
                    for (size_t c = 0; c < HS; ++c) p[j] += q[c] * k[c];
                    p[j] /= std::sqrt(static_cast<double>(HS));
                    maximum = std::max(maximum, p[j]);
                }
                for (size_t j = 0; j <= i; ++j) total += p[j] = std::exp(p[j] - maximum);
                for (size_t j = 0; j <= i; ++j) {
                    p[j] /= total;
                    const double* v = &qkv[qkv_index(b, j, 2, h, T, C, HS)];
                    for (size_t c = 0; c < HS; ++c) result.out[(b * T + i) * C + h * HS + c] += p[j] * v[c];
                }
                result.lse[(b * NH + h) * T + i] = maximum + std::log(total);
            }
        }
    }
    return result;
}

// dp = dout v^T;  ds = p (dp - sum(p dp)), the softmax's Jacobian;  dq = ds k, dk = ds^T q, dv = p^T dout.
inline Vector attention_backward(const Vector& dout, const Vector& qkv, size_t B, size_t T, size_t C,
                                 size_t NH) {
    const size_t HS = C / NH;
    const double scale = 1 / std::sqrt(static_cast<double>(HS));
    const Attention forward = attention_forward(qkv, B, T, C, NH);
    Vector dqkv(B * T * 3 * C), dp(T);
    for (size_t b = 0; b < B; ++b) {
        for (size_t h = 0; h < NH; ++h) {
            for (size_t i = 0; i < T; ++i) {
                const double* p = &forward.probabilities[((b * NH + h) * T + i) * T];
                const double* dout_i = &dout[(b * T + i) * C + h * HS];
                const size_t q = qkv_index(b, i, 0, h, T, C, HS);
                double p_dot_dp = 0;
                for (size_t j = 0; j <= i; ++j) {
                    const size_t v = qkv_index(b, j, 2, h, T, C, HS);
                    dp[j] = 0;
                    for (size_t c = 0; c < HS; ++c) dp[j] += dout_i[c] * qkv[v + c];
                    for (size_t c = 0; c < HS; ++c) dqkv[v + c] += p[j] * dout_i[c];
                    p_dot_dp += p[j] * dp[j];
                }
                for (size_t j = 0; j <= i; ++j) {
                    const size_t k = qkv_index(b, j, 1, h, T, C, HS);
                    const double ds = p[j] * (dp[j] - p_dot_dp) * scale;
                    for (size_t c = 0; c < HS; ++c) dqkv[q + c] += ds * qkv[k + c];
                    for (size_t c = 0; c < HS; ++c) dqkv[k + c] += ds * qkv[q + c];
                }
            }
        }
    }
    return dqkv;
}

// ---------------------------------------------------------------------------------------------------
// Cross-entropy: losses (N) from the first V of each row of logits (N,Vp)

inline Vector cross_entropy_forward(const Vector& logits, const std::vector<int>& targets, size_t N, size_t V,
                                    size_t Vp) {
    Vector losses(N);
    for (size_t i = 0; i < N; ++i) {
        const double* row = &logits[i * Vp];
        const double maximum = *std::max_element(row, row + V);
        double total = 0;
        for (size_t v = 0; v < V; ++v) total += std::exp(row[v] - maximum);
        losses[i] = maximum + std::log(total) - row[targets[i]];
    }
    return losses;
}

inline Vector cross_entropy_backward(const Vector& logits, const std::vector<int>& targets, double dloss,
                                     size_t N, size_t V, size_t Vp) {
    Vector dlogits(N * Vp, 0.0);
    for (size_t i = 0; i < N; ++i) {
        const double* row = &logits[i * Vp];
        const double maximum = *std::max_element(row, row + V);
        double total = 0;
        for (size_t v = 0; v < V; ++v) total += std::exp(row[v] - maximum);
        for (size_t v = 0; v < V; ++v) dlogits[i * Vp + v] = std::exp(row[v] - maximum) / total * dloss;
        dlogits[i * Vp + static_cast<size_t>(targets[i])] -= dloss;
    }
    return dlogits;
}

// ---------------------------------------------------------------------------------------------------
// Optimizers

struct AdamW {
    double lr, beta1, beta2, eps, weight_decay;
    bool cautious = false;  // decay only where m p >= 0 (arXiv:2510.12402)
};

// Step t = 1, 2, ... of algorithm 2 of arXiv:1711.05101, with the decay scaled by lr as in PyTorch.
inline void adamw_update(Vector& p, Vector& m, Vector& v, const Vector& grad, const AdamW& config, int t) {
    for (size_t i = 0; i < p.size(); ++i) {
        m[i] = config.beta1 * m[i] + (1 - config.beta1) * grad[i];
        v[i] = config.beta2 * v[i] + (1 - config.beta2) * grad[i] * grad[i];
        const double m_hat = m[i] / (1 - std::pow(config.beta1, t));
        const double v_hat = v[i] / (1 - std::pow(config.beta2, t));
        if (!config.cautious || m[i] * p[i] >= 0) p[i] -= config.lr * config.weight_decay * p[i];
        p[i] -= config.lr * m_hat / (std::sqrt(v_hat) + config.eps);
    }
}

// NorMuon's normalisation (arXiv:2510.05491) of a row-major (rows, cols) matrix, where neurons are the
// indices of the longer side, rows if equal.
inline void normalize_neurons(Vector& o, Vector& v, size_t rows, size_t cols, double beta2) {
    const bool tall = rows >= cols;
    const size_t entries = tall ? cols : rows;
    Vector mean(v.size(), 0.0);
    double before = 0, after = 0;
    for (size_t i = 0; i < o.size(); ++i) {
        mean[tall ? i / cols : i % cols] += o[i] * o[i] / static_cast<double>(entries);
        before += o[i] * o[i];
    }
    for (size_t j = 0; j < v.size(); ++j) v[j] = beta2 * v[j] + (1 - beta2) * mean[j];
    for (size_t i = 0; i < o.size(); ++i) {
        o[i] /= std::sqrt(std::max(v[tall ? i / cols : i % cols], 1e-10));
        after += o[i] * o[i];
    }
    if (after == 0) return;
    for (double& x : o) x *= std::sqrt(before / after);
}

// bf16's neighbours of x are whole multiples of a unit; x goes to the one further from zero if what it is
// above the other, in 65536ths of the unit and without their fractions, and the random number make 65536 or
// more. A finite number does not leave the range.
inline double stochastic_bf16(double x, unsigned random) {
    if (x == 0 || !std::isfinite(x)) return x;
    const double unit = std::ldexp(1.0, std::max(std::ilogb(x), -126) - 7);
    const double multiple = std::floor(std::abs(x) / unit);
    const double above = std::floor((std::abs(x) / unit - multiple) * 65536);
    const double rounded = (above + random >= 65536 ? multiple + 1 : multiple) * unit;
    return std::copysign(std::min(rounded, std::ldexp(255.0, 120)), x);
}

// The moving average of the gradients, and Nesterov's look one step ahead along it.
inline Vector muon_momentum(Vector& momentum, const Vector& grad, double mu, bool nesterov) {
    Vector direction(grad.size());
    for (size_t i = 0; i < grad.size(); ++i) {
        momentum[i] = mu * momentum[i] + (1 - mu) * grad[i];
        direction[i] = nesterov ? mu * momentum[i] + (1 - mu) * grad[i] : momentum[i];
    }
    return direction;
}

}  // namespace reference
