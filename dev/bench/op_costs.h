// What each op of kernels/kernels.h has to do at least: bytes to and from memory, each tensor once, and the
// FLOPs of its products (2 for each multiply-add). Sizes as in kernels.h; s = bytes of a stored value.
// A measured time is judged by the slower of the two at the machine's ceilings (bench_ops).
#pragma once

#include <cstddef>

struct OpCost {
    double bytes;
    double flops = 0;  // of products alone: element-wise arithmetic hides behind memory
};

inline double product(size_t a, size_t b, size_t c = 1) {
    return static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
}

// Reads a row of each table, writes the sum; the ids are little beside them.
inline OpCost embedding_forward_cost(size_t N, size_t C, size_t s) { return {3 * product(N, C, s)}; }
// Reads dout; reads and writes the fp32 rows that tokens name, at most N of them, and those of T positions.
inline OpCost embedding_backward_cost(size_t N, size_t T, size_t C, size_t s) {
    return {product(N, C, s) + 8 * product(N + T, C)};
}

inline OpCost layernorm_forward_cost(size_t N, size_t C, size_t s) { return {2 * product(N, C, s)}; }
inline OpCost residual_layernorm_forward_cost(size_t N, size_t C, size_t s) { return {4 * product(N, C, s)}; }
// Reads dout and x, reads and writes dx.
inline OpCost layernorm_backward_cost(size_t N, size_t C, size_t s) { return {4 * product(N, C, s)}; }

// With GELU both the value before it and the one after are written.
inline OpCost linear_forward_cost(size_t N, size_t C, size_t OC, bool gelu, size_t s) {
    return {product(N, C, s) + product(OC, C, s) + product(N, OC, s) * (gelu ? 2 : 1), 2 * product(N, C, OC)};
}
inline OpCost gelu_forward_cost(size_t n, size_t s) { return {2 * product(n, s)}; }
// dx = dout w and dw += dout^T x: two products; dw is read and written in fp32.
inline OpCost linear_backward_cost(size_t N, size_t C, size_t OC, bool gelu, size_t s) {
    return {product(N, C, s) * (gelu ? 3 : 2) + product(N, OC, s) + product(OC, C, s) + 8 * product(OC, C),
            4 * product(N, C, OC)};
}

// Two products for each pair of positions (t, s <= t): scores and values.
inline OpCost attention_forward_cost(size_t B, size_t T, size_t C, size_t s) {
    return {4 * product(B * T, C, s), 4 * product(B * T, (T + 1), C) / 2};
}
// Five products a pair: the scores again, dv, the probabilities' gradient, dq, dk.
inline OpCost attention_backward_cost(size_t B, size_t T, size_t C, size_t s) {
    return {8 * product(B * T, C, s), 10 * product(B * T, (T + 1), C) / 2};
}

inline OpCost logits_forward_cost(size_t N, size_t C, size_t Vp, size_t s) {
    return {product(N, C, s) + product(Vp, C, s) + 4 * product(N, Vp), 2 * product(N, C, Vp)};
}
inline OpCost cross_entropy_cost(size_t N, size_t Vp, size_t s) { return {product(N, Vp, 4 + s)}; }

inline OpCost sum_cost(size_t n) { return {4 * product(n, 1)}; }
// Reads gradient, both moments and the master copy, writes all but the gradient; 16-bit weights are written.
inline OpCost adamw_update_cost(size_t n, size_t s) { return {product(n, 28 + (s == 4 ? 0 : s))}; }
// Reads the gradient, reads and writes momentum and directions, writes what is normalised.
inline OpCost muon_prologue_cost(size_t n, size_t s) { return {product(n, 20 + s)}; }
inline OpCost muon_epilogue_cost(size_t n, size_t s) { return {product(n, 12 + (s == 4 ? 0 : s))}; }
inline OpCost gemm_cost(size_t m, size_t n, size_t k, size_t batch, size_t s) {
    return {product(batch, m * k + k * n + m * n, s), 2 * product(batch, m * n, k)};
}
// On and below the diagonal. Reads one operand, which is the other as well, and where `add` the matrix that
// is added.
inline OpCost gemm_symmetric_cost(size_t m, size_t k, bool add, size_t batch, size_t s) {
    return {product(batch, m * k + m * m * (add ? 2 : 1), s), product(batch, m * (m + 1), k)};
}
