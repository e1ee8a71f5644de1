// What the files of attention share. attention.cu chooses between two sets of kernels: attention_flash.cu, on
// tensor cores, and attention_general.cu, for every type and head size.
#pragma once

#include <cstddef>

#include "kernels/cuda/stream.h"

struct AttentionShape {
    size_t B, T, C, NH, HS;
    float scale;  // of the scores: 1/sqrt(HS)
};

// The contract's ops (kernels/kernels.h) without their checks. delta (B,NH,T) = dout . out of each row.
template <typename Storage>
void attention_general_forward(Storage* out, float* lse, const Storage* qkv, const AttentionShape& shape,
                               Stream* stream);
template <typename Storage>
void attention_general_backward(Storage* dqkv, const Storage* dout, const float* lse, const float* delta,
                                const Storage* qkv, const AttentionShape& shape, Stream* stream);
