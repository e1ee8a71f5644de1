// A Hugging Face GPT-2 model folder: config.json and model.safetensors, read and written. Names and layouts
// are those of transformers' GPT2LMHeadModel, whose "Conv1D" keeps a linear layer's weight as (in, out).
#pragma once

#include <string>
#include <vector>

#include "model/gpt.h"

// Reads config.json of a folder. Fails, naming the key, on an architecture that is not GPT-2's (model_type,
// activation, width of the MLP, LayerNorm's epsilon, scaling of the scores) and on sizes that are no sizes.
GptConfig huggingface_read_config(const std::string& folder);

// Writes config.json and model.safetensors into an existing folder, synced. Weights are written in Storage,
// with GPT-2's names ("transformer.h.0.attn.c_attn.weight"), Conv1D weights transposed to (in, out), and
// the token table without its padding rows; lm_head.weight only where untied. end_of_text: id or -1.
template <typename Storage>
void huggingface_write(const std::string& folder, const Gpt<Storage>& model, int end_of_text, Stream* stream);

// Loads the weights of a folder into a model of that config: names with or without "transformer.", any
// floating-point type, mask buffers ignored; unknown tensors are named in `warnings`; a missing or
// misshapen tensor, or a tied model with a different lm_head, fails. Layout is decided by name, never shape.
// Values of Storage's own type keep their bits, others are rounded to nearest even. Padding rows become zero.
template <typename Storage>
void huggingface_read(Gpt<Storage>& model, const std::string& folder, std::vector<std::string>& warnings,
                      Stream* stream);
