// Sampling tokens from a model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "model/gpt.h"

struct SampleConfig {
    double temperature = 1.0;  // 0 = greedy: the largest logit, the lowest id among equals
    size_t top_k = 0;          // keep the k likeliest; 0 or >= V: off
    double top_p = 1.0;        // keep the smallest set that has probability p (Holtzman et al. 2019); 1: off
    uint64_t seed = 0;
};

// Fails, naming the option, on a negative or non-finite temperature, top_p outside (0, 1].
void sample_check(const SampleConfig& config);

// The token that u, uniform in [0, 1), picks from the logits (V) under the config. Always in [0, V). Fails on
// a NaN among the logits, and where all are minus infinity: then no token has a probability.
int sample_token(const float* logits, size_t V, const SampleConfig& config, double u);

// Continues the prompt by `count` tokens, calling on_token with each, until it returns false. The context is
// the last model.T tokens: a model made for T = min(seq_len, prompt + count) uses all that it can. An empty
// prompt is refused: start with the end-of-text token. Draw i depends on (seed, i) and the context alone.
template <typename Storage>
void generate(Gpt<Storage>& model, std::vector<int> prompt, size_t count, const SampleConfig& config,
              const std::function<bool(int)>& on_token, Stream* stream);
