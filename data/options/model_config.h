/*
What a model is made of: one transformer with switches. The fields are options of the same names (--mlp-width
for mlp_width). Zero means "derived from the others"; complete() fills those in.
*/
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "data/base/error.h"

struct ModelConfig {
    int layers = 12;
    int channels = 768;
    int heads = 12;
    int kv_heads = 0;   // 0: heads
    int head_size = 0;  // 0: channels / heads
    int mlp_width = 0;  // 0: 4 * channels
    int vocab_size = 50257;
    int context = 1024;              // positions the model is made for
    std::string norm = "layernorm";  // layernorm | rmsnorm
    float norm_eps = 1e-5f;
    std::string position = "learned";  // learned | rope
    float rope_theta = 10000;
    int rope_dims = 0;       // rotated dimensions of each head; 0: head_size
    float rope_scaling = 1;  // Llama 3.1 frequency scaling; 1: none
    float rope_low_frequency = 1;
    float rope_high_frequency = 4;
    int rope_original_context = 8192;
    std::string mlp = "gelu";  // gelu (tanh) | gelu-exact | swiglu
    bool bias = true;
    int window = 0;                    // sliding attention window; 0: none
    std::string block = "sequential";  // sequential | parallel (one norm, attention and MLP side by side)
    bool tie_embeddings = true;
    bool qk_norm = false;
};

// Outputs of the product that makes queries, keys and values.
inline int qkv_width(const ModelConfig& c) {
    return (c.heads + 2 * c.kv_heads) * c.head_size;
}

// Outputs of the first product of the MLP: SwiGLU has a gate beside each value.
inline int fc_width(const ModelConfig& c) {
    return c.mlp == "swiglu" ? 2 * c.mlp_width : c.mlp_width;
}

// Parameters of a completed config; a tied output matrix counts once.
inline int64_t parameter_count(const ModelConfig& c) {
    bool layernorm_bias = c.norm == "layernorm" && c.bias;
    int64_t C = c.channels, F = c.mlp_width, V = c.vocab_size;
    int64_t queries = (int64_t)c.heads * c.head_size, keys = (int64_t)c.kv_heads * c.head_size;
    int64_t up = c.mlp == "swiglu" ? 2 * F : F;
    int64_t norm = C + (layernorm_bias ? C : 0);

    int64_t qkv = (queries + 2 * keys) * (C + c.bias) + (c.qk_norm ? 2 * c.head_size : 0);
    int64_t attention = qkv + C * (queries + c.bias);
    int64_t mlp = up * (C + c.bias) + C * (F + c.bias);
    int64_t norms = c.block == "parallel" ? norm : 2 * norm;
    int64_t embedding = V * C + (c.position == "learned" ? c.context * C : 0);
    int64_t head = norm + (c.tie_embeddings ? 0 : V * C);
    return embedding + c.layers * (attention + mlp + norms) + head;
}

// Of one layer.
inline int64_t block_parameters(ModelConfig c) {
    c.layers = 1;
    int64_t one = parameter_count(c);
    c.layers = 0;
    return one - parameter_count(c);
}

// Fills in the zeros and refuses what is not a model.
inline void complete(ModelConfig& c) {
    constexpr int most = 1 << 24;  // of any one size: no product of two overflows
    auto check_size = [&](const char* option, int value, int least) {
        if (value < least || value > most) {
            fail("%s %d: out of range; give a whole number from %d to %d", option, value, least, most);
        }
    };
    check_size("--layers", c.layers, 1);
    check_size("--channels", c.channels, 1);
    check_size("--heads", c.heads, 1);
    check_size("--kv-heads", c.kv_heads, 0);
    check_size("--head-size", c.head_size, 0);
    check_size("--mlp-width", c.mlp_width, 0);
    check_size("--vocab-size", c.vocab_size, 1);
    check_size("--context", c.context, 1);
    check_size("--window", c.window, 0);
    check_size("--rope-dims", c.rope_dims, 0);
    check_size("--rope-original-context", c.rope_original_context, 1);

    if (c.head_size == 0) {
        if (c.channels % c.heads) {
            fail("--heads %d: does not divide --channels %d; change either, or give --head-size", c.heads,
                 c.channels);
        }
        c.head_size = c.channels / c.heads;
    }
    if (c.head_size > 256) {
        fail("--head-size %d: attention takes heads up to 256 wide; use more heads or a smaller --head-size",
             c.head_size);
    }
    if (c.kv_heads == 0) c.kv_heads = c.heads;
    if (c.heads % c.kv_heads) {
        fail("--kv-heads %d: does not divide --heads %d; give a divisor of it", c.kv_heads, c.heads);
    }
    if (c.mlp_width == 0) {
        if (c.channels > most / 4)
            fail("--channels %d: too wide for an MLP of 4 times that; lower it", c.channels);
        c.mlp_width = 4 * c.channels;
    }

    if (c.position == "rope") {
        if (c.rope_dims == 0) c.rope_dims = c.head_size;
        if (c.rope_dims > c.head_size || c.rope_dims % 2) {
            fail("--rope-dims %d: RoPE turns pairs within a head of %d; give an even number up to that",
                 c.rope_dims, c.head_size);
        }
        if (!(c.rope_theta >= 1)) fail("--rope-theta %g: out of range; give at least 1", c.rope_theta);
        if (!(c.rope_scaling >= 1)) fail("--rope-scaling %g: out of range; give at least 1", c.rope_scaling);
        if (c.rope_scaling > 1 &&
            !(c.rope_low_frequency > 0 && c.rope_high_frequency > c.rope_low_frequency)) {
            fail("--rope-high-frequency %g: not above --rope-low-frequency %g; raise it",
                 c.rope_high_frequency, c.rope_low_frequency);
        }
    }
    if (!(c.norm_eps > 0)) fail("--norm-eps %g: out of range; give a number above 0", c.norm_eps);

    // The layers multiply numbers that are below 2^51, so their count is looked at in floating point first.
    ModelConfig one_layer = c;
    one_layer.layers = 1;
    constexpr double most_parameters = 1e15;
    if ((double)parameter_count(one_layer) * c.layers > most_parameters) {
        fail("model of %g parameters: too large; lower --layers, --channels, --mlp-width or --vocab-size",
             (double)parameter_count(one_layer) * c.layers);
    }
}
