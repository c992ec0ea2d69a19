/*
The parameters of a model, one row each: name, shape, initialisation, weight decay, how it is sharded.
*/
#pragma once

#include <cmath>
#include <vector>

#include "comm/parameters.h"            // TensorRow, ParameterLayout
#include "data/options/model_config.h"  // ModelConfig, fc_width

// clang-format off
enum Tensor {
    // embedding
    wte, wpe,
    // block
    norm1w, norm1b, qkvw, qkvb, qnormw, knormw, attprojw, attprojb, norm2w, norm2b,
    fcw, fcb, fcprojw, fcprojb,
    // head
    normfw, normfb, headw,
    tensor_count
};
// clang-format on

constexpr int vocab_multiple = 128;  // the vocabulary is padded to this: products with odd sizes are slow

// Rows of the vocabulary on each of `tp` ranks.
inline int padded_vocab(const ModelConfig& c, int tp = 1) {
    return ceil_div(ceil_div(c.vocab_size, tp), vocab_multiple) * vocab_multiple;
}

// Initial values follow GPT-2: normal(0, 0.02), and the two projections back to the residual stream scaled by
// 1/sqrt(2 layers).
//
// Tensor ranks have a part of the heads, of the MLP and of the vocabulary each (Shoeybi et al.,
// "Megatron-LM", 2019): rows of the matrices that read the residual stream, columns of those that write to
// it. Norms, and biases of what is written, work on a part of the tokens each (Korthikanti et al., "Reducing
// activation recomputation in large transformer models", 2022), so their gradients are summed.
inline std::vector<TensorRow> tensor_table(const ModelConfig& c) {
    size_t C = c.channels, V = c.vocab_size, P = c.context, HS = c.head_size, A = c.heads * HS,
           KV = c.kv_heads * HS, F = c.mlp_width, F1 = fc_width(c);
    float in = 0.02f, out = 0.02f / std::sqrt(2.0f * c.layers);
    bool bias = c.bias, norm_bias = bias && c.norm == "layernorm", two_norms = c.block == "sequential";
    std::vector<Section> heads = {{A, c.heads}, {KV, c.kv_heads}, {KV, c.kv_heads}}, hidden = {{F, 0}};
    if (F1 > F) hidden.push_back({F, 0});  // gates, then values
    std::vector<TensorRow> table;
    auto add = [&](bool present, TensorRow row) {
        if (present) table.push_back(row);
    };
    using enum Unit;
    using enum Shard;
    add(true, {wte, embedding, "wte", V, C, 0, in, true, rows, {}, vocab_multiple});
    add(c.position == "learned", {wpe, embedding, "wpe", P, C, 0, in, true, replicated});
    add(true, {norm1w, block, "norm1.weight", C, 0, 1, 0, false, replicated});
    add(norm_bias, {norm1b, block, "norm1.bias", C, 0, 0, 0, false, replicated});
    add(true, {qkvw, block, "qkv.weight", A + 2 * KV, C, 0, in, true, rows, heads});
    add(bias, {qkvb, block, "qkv.bias", A + 2 * KV, 0, 0, 0, false, rows, heads});
    add(c.qk_norm, {qnormw, block, "qnorm.weight", HS, 0, 1, 0, false, replicated});
    add(c.qk_norm, {knormw, block, "knorm.weight", HS, 0, 1, 0, false, replicated});
    add(true, {attprojw, block, "attproj.weight", C, A, 0, out, true, columns});
    add(bias, {attprojb, block, "attproj.bias", C, 0, 0, 0, false, replicated});
    add(two_norms, {norm2w, block, "norm2.weight", C, 0, 1, 0, false, replicated});
    add(two_norms && norm_bias, {norm2b, block, "norm2.bias", C, 0, 0, 0, false, replicated});
    add(true, {fcw, block, "fc.weight", F1, C, 0, in, true, rows, hidden});
    add(bias, {fcb, block, "fc.bias", F1, 0, 0, 0, false, rows, hidden});
    add(true, {fcprojw, block, "fcproj.weight", C, F, 0, out, true, columns});
    add(bias, {fcprojb, block, "fcproj.bias", C, 0, 0, 0, false, replicated});
    add(true, {normfw, head, "normf.weight", C, 0, 1, 0, false, replicated});
    add(norm_bias, {normfb, head, "normf.bias", C, 0, 0, 0, false, replicated});
    add(!c.tie_embeddings, {headw, head, "head.weight", V, C, 0, in, true, rows, {}, vocab_multiple});
    return table;
}

// For a data group of `ranks`.
inline ParameterLayout parameter_layout(const ModelConfig& config, int ranks = 1, StageUnits place = {}) {
    return ParameterLayout(tensor_table(config), config.layers, config.tie_embeddings, ranks, place);
}
