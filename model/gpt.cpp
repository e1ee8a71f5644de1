// The GPT of gpt.h, read from top to bottom: sizes, the parameter table, memory, forward, loss, backward.
//
//     x = wte[token] + wpe[position]
//     for each layer:   x += proj(attention(qkv(ln1(x))));   x += fcproj(gelu(fc(ln2(x))))
//     logits = head(lnf(x))
//
// (Radford et al. 2019; the block's order from Brown et al. 2020.) A residual sum and the LayerNorm that
// reads it are one op, so a block leaves its output in `branch` and the next LayerNorm adds it to x.
#include "model/gpt.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "kernels/error.h"
#include "kernels/kernels.h"
#include "kernels/random.h"

namespace {

// Rows whose logits are in memory at once. Constant, so that the order of every sum is; large enough that
// reading the head's weights once a chunk costs little beside the arithmetic.
constexpr size_t head_chunk = 256;

constexpr size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// An embedding in ranges of rows that ranks share among them. They do not depend on how many ranks there are,
// because the gradient's norm is summed range by range.
std::vector<Block> row_ranges(size_t rows, size_t cols) {
    const size_t ranges = rows * cols >= size_t{1} << 22 ? 32 : rows * cols >= size_t{1} << 16 ? 8 : 1;
    const size_t length = (rows + ranges - 1) / ranges;
    std::vector<Block> result;
    for (size_t first = 0; first < rows; first += length)
        result.push_back({"", first, std::min(length, rows - first)});
    return result;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------
// Sizes

bool gpt_preset(const std::string& name, GptConfig& config) {
    struct Preset {
        const char* name;
        size_t layers, heads, channels;  // heads are 64 wide throughout
    };
    constexpr Preset presets[] = {
        {"d6", 6, 6, 384},     {"d12", 12, 12, 768},  {"d24", 24, 16, 1024},
        {"d36", 36, 20, 1280}, {"d48", 48, 25, 1600},
    };
    for (const Preset& preset : presets) {
        if (name != preset.name) continue;
        config.layers = preset.layers;
        config.heads = preset.heads;
        config.channels = preset.channels;
        return true;
    }
    return false;
}

void gpt_check(const GptConfig& config, const std::string& path) {
    // Generous limits, within which no product of sizes in this file can overflow 64 bits. Token ids are int.
    struct Limit {
        const char *option, *key;
        size_t value, most;
    };
    const Limit limits[] = {
        {"--layers", "n_layer", config.layers, 10'000},
        {"--heads", "n_head", config.heads, size_t{1} << 20},
        {"--channels", "n_embd", config.channels, size_t{1} << 20},
        {"--seq-len", "n_positions", config.seq_len, size_t{1} << 30},
        {"--vocab-size", "vocab_size", config.vocab_size, INT_MAX},
    };
    const std::string source = path.empty() ? "" : path + ": ";
    std::string sizes;
    for (const Limit& limit : limits) {
        const std::string size =
            std::string(path.empty() ? limit.option : limit.key) + " " + std::to_string(limit.value);
        if (limit.value < 1 || limit.value > limit.most)
            fail("%s%s: must be 1 to %zu", source.c_str(), size.c_str(), limit.most);
        sizes += (sizes.empty() ? "" : ", ") + size;
    }
    if (config.channels % config.heads != 0) {
        fail("%s%s: every head has the same number of channels, but %zu does not divide %zu", source.c_str(),
             sizes.c_str(), config.heads, config.channels);
    }
    const size_t parameters = gpt_parameter_count(gpt_parameter_table(config));
    if (parameters > size_t{1} << 40) {
        fail("%s%s: %zu parameters, %zu bytes in fp32; at most 2^40 parameters", source.c_str(),
             sizes.c_str(), parameters, 4 * parameters);
    }
}

double gpt_flops_per_token(const GptConfig& config, size_t T) {
    // Each parameter (llm.c counts the padding too) takes part in one multiply-add forward, two backward. An
    // untied head computes what a tied one does: its second table is only read row by row.
    GptConfig tied = config;
    tied.tied_head = true;
    double N = 0;
    for (const Parameter& parameter : gpt_parameter_table(tied)) N += static_cast<double>(parameter.size());
    const double attention = static_cast<double>(config.layers) * static_cast<double>(config.channels);
    return 6.0 * N + 6.0 * attention * static_cast<double>(T);
}

// ---------------------------------------------------------------------------------------------------
// The parameter table

namespace {

std::vector<Block> qkv_blocks(const GptConfig& config) {
    const size_t C = config.channels;
    if (!config.split_qkv) return {{"", 0, 3 * C}};
    const size_t group = config.qk_group_heads == 0 ? C : config.qk_group_heads * (C / config.heads);
    std::vector<Block> blocks;
    for (size_t row = 0; row < 2 * C; row += group) blocks.push_back({row < C ? "q" : "k", row, group});
    blocks.push_back({"v", 2 * C, C});
    return blocks;
}

}  // namespace

ParameterTable gpt_parameter_table(const GptConfig& config) {
    const size_t L = config.layers, C = config.channels, V = config.vocab_size, Vp = config.padded_vocab();
    const float std = 0.02f;
    // Each layer adds two branches to the residual stream: scaled so, its variance does not grow with L.
    const float residual_std = std / std::sqrt(2.0f * static_cast<float>(L));

    ParameterTable table;
    size_t offset = 0;
    const auto add = [&](Parameter parameter) {
        parameter.offset = offset;
        offset += aligned_elements(parameter.size());
        table.push_back(std::move(parameter));
    };
    const auto add_embedding = [&](const std::string& name, size_t rows, size_t used_rows,
                                   ParameterGroup group) {
        add({.name = name,
             .rows = rows,
             .cols = C,
             .used_rows = used_rows,
             .offset = 0,
             .initializer = Initializer::normal,
             .init_std = std,
             .weight_decay = true,
             .group = group,
             .conv1d = false,
             .blocks = row_ranges(rows, C)});
    };
    const auto add_matrix = [&](const std::string& name, size_t rows, size_t cols, float init_std,
                                const std::vector<Block>& blocks) {
        add({.name = name,
             .rows = rows,
             .cols = cols,
             .used_rows = rows,
             .offset = 0,
             .initializer = Initializer::normal,
             .init_std = init_std,
             .weight_decay = true,
             .group = ParameterGroup::muon,
             .conv1d = true,
             .blocks = blocks});
    };
    const auto add_vector = [&](const std::string& name, size_t size, Initializer initializer) {
        add({.name = name,
             .rows = 1,
             .cols = size,
             .used_rows = 1,
             .offset = 0,
             .initializer = initializer,
             .init_std = 0,
             .weight_decay = false,
             .group = ParameterGroup::adamw_scalar,
             .conv1d = false,
             .blocks = {{"", 0, 1}}});
    };
    const auto add_layernorm = [&](const std::string& name) {
        add_vector(name + ".weight", C, Initializer::ones);
        add_vector(name + ".bias", C, Initializer::zeros);
    };
    const auto add_linear = [&](const std::string& name, size_t rows, size_t cols, float init_std,
                                const std::vector<Block>& blocks) {
        add_matrix(name + ".weight", rows, cols, init_std, blocks);
        add_vector(name + ".bias", rows, Initializer::zeros);
    };

    add_embedding("wte.weight", Vp, V, ParameterGroup::adamw_embedding);
    add_embedding("wpe.weight", config.seq_len, config.seq_len, ParameterGroup::adamw_embedding);
    for (size_t l = 0; l < L; l++) {
        const std::string layer = "h." + std::to_string(l);
        add_layernorm(layer + ".ln_1");
        add_linear(layer + ".attn.c_attn", 3 * C, C, std, qkv_blocks(config));
        add_linear(layer + ".attn.c_proj", C, C, residual_std, {{"", 0, C}});
        add_layernorm(layer + ".ln_2");
        add_linear(layer + ".mlp.c_fc", 4 * C, C, std, {{"", 0, 4 * C}});
        add_linear(layer + ".mlp.c_proj", C, 4 * C, residual_std, {{"", 0, C}});
    }
    add_layernorm("ln_f");
    if (!config.tied_head) add_embedding("lm_head.weight", Vp, V, ParameterGroup::adamw_head);
    return table;
}

std::vector<ParameterRange> gpt_stages(const GptConfig& config) {
    constexpr size_t embeddings = 2, of_a_layer = 12;
    std::vector<ParameterRange> stages = {{0, embeddings}};
    for (size_t l = 0; l < config.layers; l++) {
        const size_t first = stages.back().end_parameter;
        stages.push_back({first, first + of_a_layer});
    }
    stages.push_back({stages.back().end_parameter, gpt_parameter_table(config).size()});
    return stages;
}

size_t gpt_parameter_count(const ParameterTable& table) {
    size_t count = 0;
    for (const Parameter& parameter : table) count += parameter.used_rows * parameter.cols;
    return count;
}

// ---------------------------------------------------------------------------------------------------
// Memory: one arena each for parameters, gradients and activations

namespace {

// The tensors of an arena that the table lays out.
template <typename Element>
GptTensors<Element> tensors_of(Element* arena, const ParameterTable& table, const GptConfig& config) {
    std::unordered_map<std::string, Element*> place;
    for (const Parameter& parameter : table) place[parameter.name] = arena + parameter.offset;

    GptTensors<Element> tensors;
    tensors.wte = place.at("wte.weight");
    tensors.wpe = place.at("wpe.weight");
    for (size_t l = 0; l < config.layers; l++) {
        const std::string layer = "h." + std::to_string(l);
        tensors.layers.push_back({
            place.at(layer + ".ln_1.weight"),
            place.at(layer + ".ln_1.bias"),
            place.at(layer + ".attn.c_attn.weight"),
            place.at(layer + ".attn.c_attn.bias"),
            place.at(layer + ".attn.c_proj.weight"),
            place.at(layer + ".attn.c_proj.bias"),
            place.at(layer + ".ln_2.weight"),
            place.at(layer + ".ln_2.bias"),
            place.at(layer + ".mlp.c_fc.weight"),
            place.at(layer + ".mlp.c_fc.bias"),
            place.at(layer + ".mlp.c_proj.weight"),
            place.at(layer + ".mlp.c_proj.bias"),
        });
    }
    tensors.lnf_weight = place.at("ln_f.weight");
    tensors.lnf_bias = place.at("ln_f.bias");
    tensors.head = config.tied_head ? tensors.wte : place.at("lm_head.weight");
    return tensors;
}

// Hands out the memory of an arena from its start. With a null arena it only counts: the same walk over the
// tensors first finds the arena's size and then places them.
struct Bump {
    char* arena;
    size_t bytes = 0;

    template <typename Element>
    void place(Element*& tensor, size_t elements) {
        tensor = arena == nullptr ? nullptr : reinterpret_cast<Element*>(arena + bytes);
        bytes += round_up(elements * sizeof(Element), 256);
    }
};

// Places the activations of N = B*T rows; returns the bytes they take.
template <typename Storage>
size_t place_activations(GptActivations<Storage>& a, char* arena, const GptConfig& config, size_t N,
                         bool trainable, Recompute recompute) {
    const size_t L = config.layers, C = config.channels, NH = config.heads, Vp = config.padded_vocab();
    const size_t chunk = std::min(N, head_chunk);
    const bool keep_residual = trainable, keep_gelu = trainable && recompute == Recompute::none,
               keep_others = trainable && recompute != Recompute::block;
    Bump bump{arena};

    bump.place(a.tokens, N);
    bump.place(a.targets, N);
    bump.place(a.embedded, N * C);
    a.layers.resize(L);
    for (size_t l = 0; l < L; l++) {
        GptLayerActivations<Storage>& layer = a.layers[l];
        if (l > 0) layer = a.layers[0];  // what is not kept, every layer writes over
        if (l == 0 || keep_residual) bump.place(layer.residual_out, N * C);
        if (l == 0 || keep_gelu) bump.place(layer.fc_gelu, N * 4 * C);
        if (l > 0 && !keep_others) continue;
        bump.place(layer.ln1, N * C);
        bump.place(layer.ln1_mean, N);
        bump.place(layer.ln1_rstd, N);
        bump.place(layer.qkv, N * 3 * C);
        bump.place(layer.attention, N * C);
        bump.place(layer.lse, N * NH);
        bump.place(layer.residual_mid, N * C);
        bump.place(layer.ln2, N * C);
        bump.place(layer.ln2_mean, N);
        bump.place(layer.ln2_rstd, N);
        bump.place(layer.fc_pre_gelu, N * 4 * C);
    }
    bump.place(a.lnf, N * C);
    bump.place(a.lnf_mean, N);
    bump.place(a.lnf_rstd, N);
    bump.place(a.branch, N * C);
    bump.place(a.logits, chunk * Vp);
    bump.place(a.losses, N);
    bump.place(a.loss_sum, 1);
    if (trainable) {
        if constexpr (std::is_same_v<Storage, float>) {
            a.dlogits = a.logits;
        } else {
            bump.place(a.dlogits, chunk * Vp);
        }
        bump.place(a.dresidual, N * C);
        a.dbranch = a.branch;  // the forward's last branch has been added before the backward's first
        bump.place(a.dwide, N * 4 * C);
    }
    return bump.bytes;
}

}  // namespace

template <typename Storage>
Gpt<Storage> gpt_plan(const GptConfig& config, size_t B, size_t T, bool trainable, Recompute recompute,
                      size_t min_workspace, const Ownership* ownership) {
    gpt_check(config);
    if (T < 1 || T > config.seq_len)
        fail("--seq-len %zu: must be 1 to %zu, the positions of the model", T, config.seq_len);
    if (B < 1 || B > INT_MAX / T)
        fail("--batch-size %zu at --seq-len %zu: a batch must have 1 to %d tokens", B, T, INT_MAX);

    Gpt<Storage> model{};
    model.config = config;
    model.table = gpt_parameter_table(config);
    model.ownership = ownership == nullptr ? own_all(model.table) : *ownership;
    model.B = B;
    model.T = T;
    model.recompute = recompute;
    const size_t elements = table_elements(model.table);
    model.params_bytes = elements * sizeof(Storage);
    if (trainable && !std::is_same_v<Storage, float>)
        model.master_bytes = model.ownership.master_elements * sizeof(float);
    if (trainable) model.grads_bytes = elements * sizeof(float);
    model.activations_bytes =
        std::max(min_workspace, place_activations(model.a, nullptr, config, B * T, trainable, recompute));
    return model;
}

template <typename Storage>
Gpt<Storage> gpt_create(const GptConfig& config, size_t B, size_t T, bool trainable, Recompute recompute,
                        size_t min_workspace, Stream* stream, const Ownership* ownership) {
    Gpt<Storage> model = gpt_plan<Storage>(config, B, T, trainable, recompute, min_workspace, ownership);
    // Zeroed, so that the gaps between tensors are zeros too.
    const auto take = [&](auto*& arena, size_t bytes) {
        if (bytes == 0) return;
        arena = static_cast<std::remove_reference_t<decltype(arena)>>(device_malloc(bytes, stream));
        device_memset_zero(arena, bytes, stream);
    };
    try {
        take(model.params, model.params_bytes);
        take(model.master, model.master_bytes);
        take(model.grads, model.grads_bytes);
        model.activations = static_cast<char*>(device_malloc(model.activations_bytes, stream));
    } catch (...) {  // out of memory: hand back what was there
        gpt_destroy(model, stream);
        throw;
    }
    model.p = tensors_of(model.params, model.table, config);
    if (trainable) model.g = tensors_of(model.grads, model.table, config);
    place_activations(model.a, model.activations, config, B * T, trainable, recompute);
    return model;
}

template <typename Storage>
void gpt_destroy(Gpt<Storage>& model, Stream* stream) {
    device_free(model.params, stream);
    device_free(model.master, stream);
    device_free(model.grads, stream);
    device_free(model.activations, stream);
    model = Gpt<Storage>{};
}

namespace {

// The own blocks of a tensor; of rows that only pad it there are zeros.
template <typename Storage>
void set_master(Gpt<Storage>& model, const Parameter& parameter, const float* values, Stream* stream) {
    for_blocks(model.table, [&](const Parameter& p, const Block& block, size_t number) {
        if (&p != &parameter || !model.ownership.own(number)) return;
        float* master = model.master + model.ownership.master_offset[number];
        const size_t end = std::min(block.first_row + block.rows, p.used_rows);
        const size_t used = end > block.first_row ? (end - block.first_row) * p.cols : 0;
        copy_to_device(master, values + block.first_row * p.cols, used * sizeof(float), stream);
        device_memset_zero(master + used, (block.rows * p.cols - used) * sizeof(float), stream);
    });
}

}  // namespace

template <typename Storage>
void gpt_set_tensor(Gpt<Storage>& model, const Parameter& parameter, const float* values, Stream* stream) {
    const size_t used = parameter.used_rows * parameter.cols, padding = parameter.size() - used;
    const auto set = [&](auto* tensor, const auto* from) {
        copy_to_device(tensor, from, used * sizeof(*tensor), stream);
        if (padding > 0) device_memset_zero(tensor + used, padding * sizeof(*tensor), stream);
    };
    if (model.master != nullptr) set_master(model, parameter, values, stream);
    if constexpr (std::is_same_v<Storage, float>) {
        set(model.params + parameter.offset, values);
    } else {
        std::vector<Storage> rounded(used);
        std::transform(values, values + used, rounded.begin(), from_float<Storage>);
        set(model.params + parameter.offset, rounded.data());
    }
}

template <typename Storage>
void gpt_initialize(Gpt<Storage>& model, uint64_t seed, Stream* stream) {
    constexpr size_t chunk = 8192;  // elements that a thread draws at a time
    for (size_t i = 0; i < model.table.size(); i++) {
        const Parameter& parameter = model.table[i];
        std::vector<float> values(parameter.used_rows * parameter.cols,
                                  parameter.initializer == Initializer::ones ? 1.0f : 0.0f);
        if (parameter.initializer == Initializer::normal) {
#pragma omp parallel for num_threads(device_threads(stream)) schedule(static)
            for (size_t e = 0; e < values.size(); e += chunk) {
                random_normals(values.data() + e, std::min(chunk, values.size() - e), parameter.init_std,
                               seed, RandomStream::initialization, static_cast<uint32_t>(i), e);
            }
        }
        gpt_set_tensor(model, parameter, values.data(), stream);
    }
}

// ---------------------------------------------------------------------------------------------------
// Forward

namespace {

// The padded token table has rows for ids that do not exist: a wrong id must not quietly find one.
void upload_ids(int* device, const int* ids, size_t N, size_t V, Stream* stream) {
    for (size_t i = 0; i < N; i++) {
        if (ids[i] < 0 || static_cast<size_t>(ids[i]) >= V)
            fail("token id %d at position %zu of a batch: must be 0 to %zu (--vocab-size %zu)", ids[i], i,
                 V - 1, V);
    }
    copy_to_device(device, ids, N * sizeof(int), stream);
}

// The residual stream as it enters layer l.
template <typename Storage>
const Storage* residual_into(const GptActivations<Storage>& a, size_t l) {
    return l == 0 ? a.embedded : a.layers[l - 1].residual_out;
}

// One layer from ln1, the output of its first LayerNorm, to fc_gelu. What is left is the MLP's second
// product.
template <typename Storage>
void forward_from_ln1(const Gpt<Storage>& model, size_t l, size_t B, size_t T, Stream* stream) {
    const size_t N = B * T, C = model.config.channels, NH = model.config.heads;
    const GptLayer<Storage>& w = model.p.layers[l];
    const GptActivations<Storage>& a = model.a;
    const GptLayerActivations<Storage>& x = a.layers[l];

    // Attention
    linear_forward<Storage>(x.qkv, nullptr, x.ln1, w.qkv_weight, w.qkv_bias, N, C, 3 * C, stream);
    attention_forward(x.attention, x.lse, x.qkv, B, T, C, NH, stream);
    linear_forward<Storage>(a.branch, nullptr, x.attention, w.proj_weight, w.proj_bias, N, C, C, stream);

    // MLP
    residual_layernorm_forward(x.residual_mid, x.ln2, x.ln2_mean, x.ln2_rstd, residual_into(a, l), a.branch,
                               w.ln2_weight, w.ln2_bias, N, C, stream);
    linear_forward(x.fc_gelu, x.fc_pre_gelu, x.ln2, w.fc_weight, w.fc_bias, N, C, 4 * C, stream);
}

// From host tokens (B,T) to lnf, the final LayerNorm's output.
template <typename Storage>
void forward(Gpt<Storage>& model, const int* tokens, size_t B, size_t T, const GptHooks& hooks,
             Stream* stream) {
    if (B < 1 || T < 1 || B > model.B || T > model.T)
        fail("a batch of %zu x %zu tokens: the model has room for %zu x %zu", B, T, model.B, model.T);
    const size_t N = B * T, C = model.config.channels;
    const GptTensors<Storage>& p = model.p;
    const GptActivations<Storage>& a = model.a;

    const auto enter = [&](size_t stage) {
        if (hooks.before_forward) hooks.before_forward(stage);
    };

    upload_ids(a.tokens, tokens, N, model.config.vocab_size, stream);
    enter(0);
    embedding_forward(a.embedded, a.tokens, p.wte, p.wpe, B, T, C, stream);

    for (size_t l = 0; l < model.config.layers; l++) {
        const GptLayer<Storage>& w = p.layers[l];
        const GptLayerActivations<Storage>& x = a.layers[l];
        enter(1 + l);

        // The residual sum that ends the layer before is part of this layer's first LayerNorm.
        if (l == 0) {
            layernorm_forward(x.ln1, x.ln1_mean, x.ln1_rstd, a.embedded, w.ln1_weight, w.ln1_bias, N, C,
                              stream);
        } else {
            const GptLayerActivations<Storage>& previous = a.layers[l - 1];
            residual_layernorm_forward(previous.residual_out, x.ln1, x.ln1_mean, x.ln1_rstd,
                                       previous.residual_mid, a.branch, w.ln1_weight, w.ln1_bias, N, C,
                                       stream);
        }
        forward_from_ln1(model, l, B, T, stream);
        linear_forward<Storage>(a.branch, nullptr, x.fc_gelu, w.fcproj_weight, w.fcproj_bias, N, 4 * C, C,
                                stream);
    }

    enter(1 + model.config.layers);
    const GptLayerActivations<Storage>& last = a.layers.back();
    residual_layernorm_forward(last.residual_out, a.lnf, a.lnf_mean, a.lnf_rstd, last.residual_mid, a.branch,
                               p.lnf_weight, p.lnf_bias, N, C, stream);
}

// ---------------------------------------------------------------------------------------------------
// Head and loss, a chunk of rows at a time: a (B*T, Vp) matrix would be the largest buffer of all

// The sum of the token losses against host targets (N). With `gradient` also that of the head, and in
// dbranch that of lnf, both of loss_scale * loss.
template <typename Storage>
double head_and_loss(Gpt<Storage>& model, const int* targets, size_t N, bool gradient, float loss_scale,
                     Stream* stream) {
    const size_t C = model.config.channels, V = model.config.vocab_size, Vp = model.config.padded_vocab();
    const GptActivations<Storage>& a = model.a;

    upload_ids(a.targets, targets, N, V, stream);
    for (size_t first = 0; first < N; first += head_chunk) {
        const size_t rows = std::min(head_chunk, N - first);
        const Storage* x = a.lnf + first * C;
        logits_forward(a.logits, x, model.p.head, rows, C, Vp, stream);
        cross_entropy<Storage>(a.losses + first, gradient ? a.dlogits : nullptr, a.logits, a.targets + first,
                               loss_scale, rows, V, Vp, stream);
        if (gradient) {
            linear_backward<Storage>(a.dbranch + first * C, model.g.head, nullptr, a.dlogits, x, model.p.head,
                                     nullptr, rows, C, Vp, stream);
        }
    }
    double loss = 0;
    sum(a.loss_sum, a.losses, N, stream);
    copy_to_host(&loss, a.loss_sum, sizeof(loss), stream);
    return loss;
}

// ---------------------------------------------------------------------------------------------------
// Backward: forward's ops in reverse

// Computes again what the forward did not keep of a layer. The last layer's is still there.
template <typename Storage>
void restore_layer(const Gpt<Storage>& model, size_t l, size_t B, size_t T, Stream* stream) {
    const size_t N = B * T, C = model.config.channels;
    const GptLayer<Storage>& w = model.p.layers[l];
    const GptLayerActivations<Storage>& x = model.a.layers[l];
    if (model.recompute == Recompute::none || l == model.config.layers - 1) return;
    if (model.recompute == Recompute::gelu) {
        gelu_forward(x.fc_gelu, x.fc_pre_gelu, N * 4 * C, stream);
    } else {
        layernorm_forward(x.ln1, x.ln1_mean, x.ln1_rstd, residual_into(model.a, l), w.ln1_weight, w.ln1_bias,
                          N, C, stream);
        forward_from_ln1(model, l, B, T, stream);
    }
}

// From dbranch, the gradient of lnf, to the gradients of all parameters. dresidual is the gradient of the
// residual stream: a branch's output has it too, because a sum hands its gradient to both of its terms, and
// a LayerNorm that read the stream adds its part to it.
template <typename Storage>
void backward(Gpt<Storage>& model, size_t B, size_t T, const GptHooks& hooks, Stream* stream) {
    const size_t N = B * T, C = model.config.channels, NH = model.config.heads;
    const GptTensors<Storage>& p = model.p;
    const GptTensors<float>& g = model.g;
    const GptActivations<Storage>& a = model.a;

    const auto leave = [&](size_t stage) {
        if (hooks.after_backward) hooks.after_backward(stage);
    };

    device_memset_zero(a.dresidual, N * C * sizeof(Storage), stream);
    layernorm_backward(a.dresidual, g.lnf_weight, g.lnf_bias, a.dbranch, a.layers.back().residual_out,
                       a.lnf_mean, a.lnf_rstd, p.lnf_weight, N, C, stream);
    leave(1 + model.config.layers);

    for (size_t l = model.config.layers; l-- > 0;) {
        const GptLayer<Storage>& w = p.layers[l];
        const GptLayer<float>& dw = g.layers[l];
        const GptLayerActivations<Storage>& x = a.layers[l];
        restore_layer(model, l, B, T, stream);  // its use of branch is free: dbranch is not in use here

        // MLP
        linear_backward(a.dwide, dw.fcproj_weight, dw.fcproj_bias, a.dresidual, x.fc_gelu, w.fcproj_weight,
                        x.fc_pre_gelu, N, 4 * C, C, stream);
        linear_backward<Storage>(a.dbranch, dw.fc_weight, dw.fc_bias, a.dwide, x.ln2, w.fc_weight, nullptr, N,
                                 C, 4 * C, stream);
        layernorm_backward(a.dresidual, dw.ln2_weight, dw.ln2_bias, a.dbranch, x.residual_mid, x.ln2_mean,
                           x.ln2_rstd, w.ln2_weight, N, C, stream);

        // Attention
        linear_backward<Storage>(a.dbranch, dw.proj_weight, dw.proj_bias, a.dresidual, x.attention,
                                 w.proj_weight, nullptr, N, C, C, stream);
        attention_backward(a.dwide, a.dbranch, x.attention, x.lse, x.qkv, B, T, C, NH, stream);
        linear_backward<Storage>(a.dbranch, dw.qkv_weight, dw.qkv_bias, a.dwide, x.ln1, w.qkv_weight, nullptr,
                                 N, C, 3 * C, stream);
        layernorm_backward(a.dresidual, dw.ln1_weight, dw.ln1_bias, a.dbranch, residual_into(a, l),
                           x.ln1_mean, x.ln1_rstd, w.ln1_weight, N, C, stream);
        leave(1 + l);
    }

    // A tied head has already added its part to wte's gradient.
    embedding_backward(g.wte, g.wpe, a.dresidual, a.tokens, B, T, C, stream);
    leave(0);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------
// What the rest of the program calls

template <typename Storage>
double gpt_forward_backward(Gpt<Storage>& model, const int* tokens, const int* targets, size_t B, size_t T,
                            float loss_scale, Stream* stream, const GptHooks& hooks) {
    if (model.grads == nullptr) fail("gpt_forward_backward: the model was not made to be trained");
    forward(model, tokens, B, T, hooks, stream);
    const double loss = head_and_loss(model, targets, B * T, true, loss_scale, stream);
    backward(model, B, T, hooks, stream);
    return loss;
}

template <typename Storage>
double gpt_loss(Gpt<Storage>& model, const int* tokens, const int* targets, size_t B, size_t T,
                Stream* stream) {
    forward(model, tokens, B, T, {}, stream);
    return head_and_loss(model, targets, B * T, false, 0.0f, stream);
}

template <typename Storage>
void gpt_logits(Gpt<Storage>& model, float* logits, const int* tokens, size_t B, size_t T, size_t first,
                size_t count, Stream* stream) {
    const size_t N = B * T, C = model.config.channels, V = model.config.vocab_size,
                 Vp = model.config.padded_vocab();
    if (first > N || count > N - first)
        fail("gpt_logits: %zu rows from row %zu of a batch of %zu", count, first, N);
    forward(model, tokens, B, T, {}, stream);
    for (size_t done = 0; done < count; done += head_chunk) {
        const size_t rows = std::min(head_chunk, count - done);
        logits_forward(model.a.logits, model.a.lnf + (first + done) * C, model.p.head, rows, C, Vp, stream);
        for (size_t row = 0; row < rows; row++) {  // the padding stays behind
            copy_to_host(logits + (done + row) * V, model.a.logits + row * Vp, V * sizeof(float), stream);
        }
    }
}

#define INSTANTIATE(Storage)                                                                             \
    template Gpt<Storage> gpt_plan(const GptConfig&, size_t, size_t, bool, Recompute, size_t,            \
                                   const Ownership*);                                                    \
    template Gpt<Storage> gpt_create(const GptConfig&, size_t, size_t, bool, Recompute, size_t, Stream*, \
                                     const Ownership*);                                                  \
    template void gpt_destroy(Gpt<Storage>&, Stream*);                                                   \
    template void gpt_set_tensor(Gpt<Storage>&, const Parameter&, const float*, Stream*);                \
    template void gpt_initialize(Gpt<Storage>&, uint64_t, Stream*);                                      \
    template double gpt_forward_backward(Gpt<Storage>&, const int*, const int*, size_t, size_t, float,   \
                                         Stream*, const GptHooks&);                                      \
    template double gpt_loss(Gpt<Storage>&, const int*, const int*, size_t, size_t, Stream*);            \
    template void gpt_logits(Gpt<Storage>&, float*, const int*, size_t, size_t, size_t, size_t, Stream*);
INSTANTIATE(float)
INSTANTIATE(bf16_t)
INSTANTIATE(fp16_t)
#undef INSTANTIATE
