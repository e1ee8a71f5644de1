// What the files of attention share. attention.cu chooses between two sets of kernels: attention_flash.cu, on
// tensor cores, and attention_general.cu, for every type and head size.
#pragma once

#include <cstddef>

#include "kernels/cuda/stream.h"

struct AttentionShape {
    size_t B, T, C, NH, HS;
    float scale;  // of the scores: 1/sqrt(HS)
};

// What the backward needs to know of a query: the log-sum-exp of its scores, and delta = dout . out. One
// load.
struct alignas(8) SoftmaxRow {
    float lse, delta;
};

// The contract's ops (kernels/kernels.h) without their checks. softmax_rows (B,NH,T).
template <typename Storage>
void attention_general_forward(Storage* out, float* lse, const Storage* qkv, const AttentionShape& shape,
                               Stream* stream);
template <typename Storage>
void attention_general_backward(Storage* dqkv, const Storage* dout, const SoftmaxRow* softmax_rows,
                                const Storage* qkv, const AttentionShape& shape, Stream* stream);

// The same for bf16_t and fp16_t, heads of 64 or 128 channels and tensors aligned to 16 bytes.
template <typename Storage>
void attention_flash_forward(Storage* out, float* lse, const Storage* qkv, const AttentionShape& shape,
                             Stream* stream);
template <typename Storage>
void attention_flash_backward(Storage* dqkv, const Storage* dout, const SoftmaxRow* softmax_rows,
                              const Storage* qkv, const AttentionShape& shape, Stream* stream);
