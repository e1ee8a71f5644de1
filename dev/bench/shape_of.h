// The model that a bench's training options speak of.
#pragma once

#include "cli/options.h"
#include "kernels/error.h"

// As train_gpt makes it of the same options, but that no data is asked for the vocabulary.
inline GptConfig shape_of(const TrainOptions& o) {
    GptConfig config;
    if (!gpt_preset(o.model, config)) fail("--model %s: must be a preset here", o.model.c_str());
    if (o.layers) config.layers = o.layers;
    if (o.heads) config.heads = o.heads;
    if (o.channels) config.channels = o.channels;
    if (o.seq_len) config.seq_len = o.seq_len;
    if (o.vocab_size) config.vocab_size = o.vocab_size;
    config.tied_head = !o.untie_head;
    gpt_check(config);
    if (o.optimizer.kind == OptimizerKind::muon) {
        config.split_qkv = o.muon_split_qkv;
        config.qk_group_heads = o.muon_qk_group;
    }
    return config;
}
