// GPT-2/GPT-3 (Radford et al. 2019; Brown et al. 2020): configuration, the parameter table, memory, forward
// and backward. Pre-LayerNorm blocks of causal attention and a 4x GELU MLP, learned positions, biases, the
// head tied to the token embedding unless told otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/dtype.h"
#include "optim/ownership.h"
#include "optim/parameter_table.h"

struct GptConfig {
    size_t layers = 12;
    size_t heads = 12;
    size_t channels = 768;
    size_t seq_len = 1024;  // positions: the longest context
    size_t vocab_size = 50257;
    bool tied_head = true;
    // The blocks of the attention's first matrix: q, k and v apart, or all of it as one; and of q and k
    // further, by groups of so many heads (0: all). An optimizer that works by matrices sees the difference.
    bool split_qkv = true;
    size_t qk_group_heads = 0;

    // The token tables have a multiple of 128 rows; those from vocab_size on are zero and never used.
    size_t padded_vocab() const { return (vocab_size + 127) / 128 * 128; }
};

// "d6", "d12" (GPT-2 124M), "d24" (350M), "d36" (774M), "d48" (1558M), as llm.c names them by their depth.
// False for any other name.
bool gpt_preset(const std::string& name, GptConfig& config);

// Fails on sizes that make no model (a zero, channels not a multiple of heads, ...), naming the options, or,
// where the sizes come from a config.json, its path and keys.
void gpt_check(const GptConfig& config, const std::string& path = "");

// The parameter table: wte, wpe, the layers' twelve tensors each, ln_f, and lm_head where untied.
// GPT-2 initialisation: normal(0, 0.02), residual projections 0.02/sqrt(2 layers), biases 0, gains 1.
ParameterTable gpt_parameter_table(const GptConfig& config);

// The tensors by when they are used and done with, as ranges of the table: the forward reaches the stages in
// this order, and the backward completes their gradients in the reverse. The embeddings, each layer, and last
// the final LayerNorm with an untied head.
std::vector<ParameterRange> gpt_stages(const GptConfig& config);

// Number of parameters that exist outside (padding not counted).
size_t gpt_parameter_count(const ParameterTable& table);

// FLOPs of one token's forward and backward as llm.c counts them: 6 N + 6 L C T.
double gpt_flops_per_token(const GptConfig& config, size_t T);

// One layer's parameters (or, as floats, their gradients), each (out, in) or (channels).
template <typename Element>
struct GptLayer {
    Element *ln1_weight, *ln1_bias;        // (C), (C)
    Element *qkv_weight, *qkv_bias;        // (3C,C), (3C)
    Element *proj_weight, *proj_bias;      // (C,C), (C)
    Element *ln2_weight, *ln2_bias;        // (C), (C)
    Element *fc_weight, *fc_bias;          // (4C,C), (4C)
    Element *fcproj_weight, *fcproj_bias;  // (C,4C), (C)
};

template <typename Element>
struct GptTensors {
    Element *wte, *wpe;  // (Vp,C), (seq_len,C)
    std::vector<GptLayer<Element>> layers;
    Element *lnf_weight, *lnf_bias;  // (C), (C)
    Element* head;                   // (Vp,C); wte where tied
};

// What a trained model keeps of each layer's forward for its backward; the rest is computed again, by the
// same ops and so to the same bits. `none`: everything is kept. `gelu`: all but fc_gelu. `block`: the
// residual stream alone, and a layer's forward runs again before its backward (Chen et al. 2016,
// arXiv:1604.06174).
enum class Recompute { none, gelu, block };

// What one layer's forward leaves for its backward. N = B*T. What is not kept is the same memory in all
// layers.
template <typename Storage>
struct GptLayerActivations {
    Storage* ln1;                    // (N,C)
    float *ln1_mean, *ln1_rstd;      // (N)
    Storage* qkv;                    // (N,3C)
    Storage* attention;              // (N,C)
    float* lse;                      // (B,NH,T)
    Storage* residual_mid;           // (N,C)  after attention
    Storage* ln2;                    // (N,C)
    float *ln2_mean, *ln2_rstd;      // (N)
    Storage *fc_pre_gelu, *fc_gelu;  // (N,4C)
    Storage* residual_out;           // (N,C)  after the MLP
};

template <typename Storage>
struct GptActivations {
    Storage* embedded;  // (N,C)
    std::vector<GptLayerActivations<Storage>> layers;
    Storage* lnf;                  // (N,C)
    float *lnf_mean, *lnf_rstd;    // (N)
    Storage* branch;               // (N,C)  a block's output before the residual sum
    float* logits;                 // (chunk,Vp)
    Storage* dlogits;              // (chunk,Vp); the logits' own memory where Storage is float
    Storage *dresidual, *dbranch;  // (N,C)  dbranch is branch's memory
    Storage* dwide;                // (N,4C)
    float* losses;                 // (N)
    double* loss_sum;              // (1)
    int *tokens, *targets;         // (N)
};

template <typename Storage>
struct Gpt {
    GptConfig config;
    ParameterTable table;
    Ownership ownership;
    size_t B = 0, T = 0;  // the largest batch that the activations hold
    Recompute recompute = Recompute::none;
    Storage* params = nullptr;  // arenas
    float* master = nullptr;    // own parameters before rounding; null for float, and where not trained
    float* grads = nullptr;     // null in a model that is not trained
    char* activations = nullptr;
    size_t params_bytes = 0, master_bytes = 0, grads_bytes = 0, activations_bytes = 0;
    GptTensors<Storage> p;
    GptTensors<float> g;
    GptActivations<Storage> a;
};

// A model for batches up to (B, T) without its memory: how many bytes each arena takes. The activation arena
// has at least min_workspace bytes, since the optimizer works in it. With trainable = false there are no
// gradients, no master copy and only one layer's activations, whatever recompute says. 16-bit parameters that
// are trained have an fp32 master copy: an update is often less than half a unit in their last place, and
// would be lost (Micikevicius et al. 2017, arXiv:1710.03740). Of the blocks that are other ranks' there is
// none.
template <typename Storage>
Gpt<Storage> gpt_plan(const GptConfig& config, size_t B, size_t T, bool trainable, Recompute recompute,
                      size_t min_workspace, const Ownership* ownership = nullptr);

// The planned model with its memory; parameters, master copy and gradients are zeros.
template <typename Storage>
Gpt<Storage> gpt_create(const GptConfig& config, size_t B, size_t T, bool trainable, Recompute recompute,
                        size_t min_workspace, Stream* stream, const Ownership* ownership = nullptr);
template <typename Storage>
void gpt_destroy(Gpt<Storage>& model, Stream* stream);

// Sets the rows of a tensor that exist from fp32 host values (used_rows, cols): the parameters, rounded, and
// the master copy where there is one. Rows of padding become zero.
template <typename Storage>
void gpt_set_tensor(Gpt<Storage>& model, const Parameter& parameter, const float* values, Stream* stream);

// Fills the parameters from the table's initialisers. A number depends on (seed, tensor, index) alone.
template <typename Storage>
void gpt_initialize(Gpt<Storage>& model, uint64_t seed, Stream* stream);

// What a caller does around the stages of a micro-batch: before the forward reads a stage's parameters, and
// after the backward has completed its gradients. Called with the stage's number, while the ops before are
// queued and may not have run.
struct GptHooks {
    std::function<void(size_t stage)> before_forward, after_backward;
};

// Forward and backward of one micro-batch of host tokens and targets (B,T), B <= model.B, T <= model.T:
// gradients += d(loss_scale * sum of the token losses); returns the sum of the token losses, in nats.
// For a mean over M tokens give loss_scale = 1/M.
template <typename Storage>
double gpt_forward_backward(Gpt<Storage>& model, const int* tokens, const int* targets, size_t B, size_t T,
                            float loss_scale, Stream* stream, const GptHooks& hooks = {});

// Forward only: the sum of the token losses.
template <typename Storage>
double gpt_loss(Gpt<Storage>& model, const int* tokens, const int* targets, size_t B, size_t T,
                Stream* stream);

// Forward only: logits (host, vocab_size each) of the rows [first, first + count) of the B*T positions.
template <typename Storage>
void gpt_logits(Gpt<Storage>& model, float* logits, const int* tokens, size_t B, size_t T, size_t first,
                size_t count, Stream* stream);
