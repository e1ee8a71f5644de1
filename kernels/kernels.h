// The contract of every op. One declaration each; a backend defines them all (kernels/cpu, kernels/cuda).
//
// Shapes: B batch rows, T tokens a row, N = B*T rows of a 2-D activation, C channels, OC output channels,
// NH heads, HS = C/NH head size, V vocabulary, Vp = V padded to a multiple of 128.
// Matrices are row-major; weights are (out, in). Activations and their gradients are in `Storage`; weight
// gradients are fp32 and every op ADDS to them ("+="); all arithmetic is fp32 unless a comment says fp64.
// A 16-bit result is the fp32 result rounded once, to nearest; but what follows from a stored intermediate (a
// residual sum, a GELU's input) may start from it as stored, GELU and its derivative may round before and
// after, and attention may round its probabilities.
// Argument order: outputs, inputs, sizes, stream. Sizes of zero are refused. Buffers must not overlap
// except where a comment allows it.
//
// Every op gives the same bits on every run and at any number of threads: no sum's order depends on how
// the work is split.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device.h"
#include "kernels/dtype.h"

// ---------------------------------------------------------------------------------------------------
// Embedding

// out(b,t,:) = wte(token(b,t),:) + wpe(t,:).   out (B,T,C), tokens (B,T), wte (Vp,C), wpe (>=T,C).
template <typename Storage>
void embedding_forward(Storage* out, const int* tokens, const Storage* wte, const Storage* wpe, size_t B,
                       size_t T, size_t C, Stream* stream);

// dwte(token(b,t),:) += dout(b,t,:);  dwpe(t,:) += dout(b,t,:), each in the order of b, then t.
template <typename Storage>
void embedding_backward(float* dwte, float* dwpe, const Storage* dout, const int* tokens, size_t B, size_t T,
                        size_t C, Stream* stream);

// ---------------------------------------------------------------------------------------------------
// LayerNorm (Ba, Kiros, Hinton 2016, arXiv:1607.06450), eps 1e-5 as in GPT-2

// out = (x - mean) * rstd * weight + bias for each row; mean and rstd = 1/sqrt(var + eps) are kept.
// out, x (N,C); mean, rstd (N); weight, bias (C).
template <typename Storage>
void layernorm_forward(Storage* out, float* mean, float* rstd, const Storage* x, const Storage* weight,
                       const Storage* bias, size_t N, size_t C, Stream* stream);

// sum = a + b, then LayerNorm of sum as stored: one pass over memory, and the very bits that
// layernorm_forward gives of sum. sum may be a or b. All (N,C).
template <typename Storage>
void residual_layernorm_forward(Storage* sum, Storage* out, float* mean, float* rstd, const Storage* a,
                                const Storage* b, const Storage* weight, const Storage* bias, size_t N,
                                size_t C, Stream* stream);

// dx += gradient of the LayerNorm (dx holds the residual branch's gradient); dweight, dbias +=.
template <typename Storage>
void layernorm_backward(Storage* dx, float* dweight, float* dbias, const Storage* dout, const Storage* x,
                        const float* mean, const float* rstd, const Storage* weight, size_t N, size_t C,
                        Stream* stream);

// ---------------------------------------------------------------------------------------------------
// Linear layers, with tanh-GELU (Hendrycks, Gimpel 2016, arXiv:1606.08415) where it saves a pass
// gelu(x) = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))

// y = x * weight^T + bias. Without pre_gelu: out = y. With it: pre_gelu = y and out = gelu(y).
// x (N,C), weight (OC,C), bias (OC) or null, out and pre_gelu (N,OC).
template <typename Storage>
void linear_forward(Storage* out, Storage* pre_gelu, const Storage* x, const Storage* weight,
                    const Storage* bias, size_t N, size_t C, size_t OC, Stream* stream);

// out = gelu(x): the very bits that linear_forward gives as out beside x as pre_gelu. All (n).
template <typename Storage>
void gelu_forward(Storage* out, const Storage* x, size_t n, Stream* stream);

// dx = dout * weight, times gelu'(pre_gelu) where pre_gelu, the value whose GELU x is, is given;
// dweight += dout^T * x;  dbias += column sums of dout. dx, dbias and pre_gelu may each be null.
// dx, x, pre_gelu (N,C); dout (N,OC); weight, dweight (OC,C); dbias (OC).
template <typename Storage>
void linear_backward(Storage* dx, float* dweight, float* dbias, const Storage* dout, const Storage* x,
                     const Storage* weight, const Storage* pre_gelu, size_t N, size_t C, size_t OC,
                     Stream* stream);

// ---------------------------------------------------------------------------------------------------
// Causal self-attention (Vaswani et al. 2017) with online softmax: no (T,T) matrix in memory
// (Milakov, Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135)

// For each head: out = softmax(q k^T / sqrt(HS), causal) v;  lse = log-sum-exp of each row of the scaled
// scores. qkv (B,T,3C): q, k, v of all heads side by side; out (B,T,C); lse (B,NH,T). C = NH*HS.
template <typename Storage>
void attention_forward(Storage* out, float* lse, const Storage* qkv, size_t B, size_t T, size_t C, size_t NH,
                       Stream* stream);

// dqkv = gradient of the above, with the probabilities recomputed from lse. dqkv (B,T,3C), dout (B,T,C).
template <typename Storage>
void attention_backward(Storage* dqkv, const Storage* dout, const Storage* out, const float* lse,
                        const Storage* qkv, size_t B, size_t T, size_t C, size_t NH, Stream* stream);

// ---------------------------------------------------------------------------------------------------
// Head and loss. The model walks the rows in chunks, so that no (B*T, Vp) buffer ever exists.

// logits = x * weight^T in fp32. logits (N,Vp), x (N,C), weight (Vp,C).
template <typename Storage>
void logits_forward(float* logits, const Storage* x, const Storage* weight, size_t N, size_t C, size_t Vp,
                    Stream* stream);

// losses(i) = logsumexp(logits(i,:V)) - logits(i,target(i)), in nats; and where dlogits is given,
// dlogits(i,v) = (softmax(logits(i,:V))(v) - [v = target(i)]) * dloss, exactly 0 for v in [V,Vp).
// logits, dlogits (N,Vp); targets (N), each in [0,V). For float, dlogits may be logits.
template <typename Storage>
void cross_entropy(float* losses, Storage* dlogits, const float* logits, const int* targets, float dloss,
                   size_t N, size_t V, size_t Vp, Stream* stream);

// ---------------------------------------------------------------------------------------------------
// Reductions

// *out = sum of x(0..n) in fp64: neighbours are added level by level, an odd one out moves up as it is.
void sum(double* out, const float* x, size_t n, Stream* stream);

// *out = sum of the squares of x in fp64, row by row, then over the rows in order. x (rows,cols).
// Entries of 1e-30 and 1e30 are ordinary; an infinity or NaN in x makes the result non-finite.
void sum_of_squares(double* out, const float* x, size_t rows, size_t cols, Stream* stream);

// ---------------------------------------------------------------------------------------------------
// Sums over the leaves and ranks of a step

// to = from, rounded to nearest. All (n).
template <typename Storage>
void cast(Storage* to, const float* from, size_t n, Stream* stream);

// x = x rounded to nearest to Storage and back. (n).
template <typename Storage>
void round_through(float* x, size_t n, Stream* stream);

// out = a + b; out may be a or b. All (n).
void add(float* out, const float* a, const float* b, size_t n, Stream* stream);

// out(i) = the sum over p of parts(p * stride + i), for `count` parts in the order of kernels/tree.h, in
// fp32. out (n); 1 <= count <= tree_max_parts, stride >= n.
template <typename Storage>
void tree_sum(float* out, const Storage* parts, size_t count, size_t stride, size_t n, Stream* stream);

// ---------------------------------------------------------------------------------------------------
// Averages that optimizers keep, in `State`: float, or bf16_t rounded stochastically (kernels/dtype.h). To
// nearest, a change of less than half of bf16's last place would be lost at every step. What else an op
// computes from a new average takes it before it is rounded.

// The random bits of a call. Its entry i is entry e = first + i of all parameters, and rounds its averages
// with random_bits(seed, RandomStream::rounding, step, e / 4)[e % 4] (kernels/random.h): the first average
// with the word's lower half, the second with its upper half. Ignored where State is float.
struct StateRounding {
    uint64_t seed;
    uint32_t step;  // of the optimizer
    size_t first;
};

// ---------------------------------------------------------------------------------------------------
// AdamW (Loshchilov, Hutter 2019, arXiv:1711.05101; PyTorch's semantics)

struct AdamWStep {
    float lr, beta1, beta2, eps, weight_decay;
    float bias_correction1, bias_correction2;  // 1 - beta1^t, 1 - beta2^t for step t = 1, 2, ...
    float grad_scale;                          // multiplies the gradient: clipping and unscaling
    bool cautious = false;                     // decays only entries that do not grow: m p >= 0
};

// g = grad*grad_scale; m = beta1 m + (1-beta1) g; v = beta2 v + (1-beta2) g^2;
// p = p (1 - lr wd) - lr (m/bias_correction1) / (sqrt(v/bias_correction2) + eps).
// p is master where given (then param = p rounded), else param, which must be float. All (n).
template <typename Storage, typename State>
void adamw_update(Storage* param, float* master, State* m, State* v, const float* grad, size_t n,
                  const AdamWStep& step, const StateRounding& rounding, Stream* stream);

// ---------------------------------------------------------------------------------------------------
// Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): momentum, orthogonalisation, update

// What changes from step to step. Ops read it from device memory when they run: so they can be recorded once
// and replayed (kernels/device.h).
struct MuonStep {
    float mu;                // of the momentum
    float grad_scale;        // multiplies the gradients: clipping and unscaling
    uint32_t rounding_step;  // StateRounding::step
    uint32_t skip;           // not 0: momentum, masters and parameters stay as they are
    uint32_t cautious = 0;   // not 0: only entries with update*p >= 0 decay (arXiv:2510.12402)
};

// A matrix of n entries: where it lies in the arenas of gradients, parameters and master weights, and its own
// rates, which change from step to step too.
struct MuonBlock {
    void* momentum;        // (n) of State
    size_t offset;         // of its first entry in gradients and parameters; StateRounding::first
    size_t master_offset;  // in the master weights
    float lr;
    float decay;  // 1 - lr * weight_decay; 1 where there is none
};

// For each of `batch` blocks of n entries each, in as few launches as an order of its own for every norm
// needs:
//   g = grad*grad_scale; momentum = mu*momentum + (1-mu)*g;
//   direction = nesterov ? (1-mu)*g + mu*momentum : momentum;
//   x = direction / (safety * Frobenius norm), the norm scaled so that 1e-30 and 1e30 are ordinary.
// A zero or non-finite norm gives x = 0, and degenerate(i) = 1 (else 0); a skipped step x = 0 and degenerate
// 0. x, direction (batch,n), may be the same buffer for float; degenerate, blocks (batch); grads is the
// arena. blocks and step are in device memory. `seed` is StateRounding's.
template <typename State, typename Storage>
void muon_prologue(Storage* x, int* degenerate, float* direction, const float* grads, const MuonBlock* blocks,
                   const MuonStep* step, size_t batch, size_t n, bool nesterov, float safety, uint64_t seed,
                   Stream* stream);

// NorMuon (arXiv:2510.05491). A neuron is a row of a tall matrix, a column of a wide one: one of the longer
// side, for those of the shorter side have equal norms already. With u the mean of a neuron's squared
// entries: v = beta2*v + (1-beta2)*u;  o = o / sqrt(max(v, 1e-10)), all of it scaled back to o's Frobenius
// norm. A zero matrix stays zero, and of a skipped step everything. Sums are fp64. o (rows,cols); v
// (max(rows,cols)); step is in device memory. Update is any storage type.
template <typename Update>
void muon_normalize_neurons(Update* o, float* v, const MuonStep* step, size_t rows, size_t cols, float beta2,
                            Stream* stream);

// For each of `batch` blocks: p = p*decay - lr*scale*update; p as in adamw_update. params and master are the
// arenas, updates (batch,n), blocks (batch). Update is any storage type.
template <typename Storage, typename Update>
void muon_epilogue(Storage* params, float* master, const Update* updates, const MuonBlock* blocks,
                   const MuonStep* step, size_t batch, size_t n, float scale, Stream* stream);

// For each of `batch` contiguous matrices: d = alpha * op(a) * op(b) + beta * c, where op transposes if
// asked. op(a) (m,k), op(b) (k,n), c and d (m,n); c may be null when beta is 0, and may not be d. The bits of
// one matrix do not depend on the batch it is in.
template <typename Storage>
void gemm_batched(Storage* d, const Storage* a, const Storage* b, const Storage* c, bool transpose_a,
                  bool transpose_b, size_t m, size_t n, size_t k, float alpha, float beta, size_t batch,
                  Stream* stream);

// For each of `batch` contiguous matrices: d = alpha * a * b^T + beta * c + gamma * I, or alpha * a^T * b
// with `transpose`, where the caller knows that the product is symmetric: a = b, or a and b are symmetric and
// commute. The tiles on and below the diagonal are computed and mirrored: about half of gemm_batched's work.
// a, b (m,k), or (k,m) with transpose; c, d (m,m), c symmetric; c may be null when beta is 0; d may be
// none of a, b and c. The bits of one matrix do not depend on the batch it is in, and d is exactly symmetric.
template <typename Storage>
void gemm_symmetric(Storage* d, const Storage* a, const Storage* b, const Storage* c, bool transpose,
                    size_t m, size_t k, float alpha, float beta, float gamma, size_t batch, Stream* stream);
