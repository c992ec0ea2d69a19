/*
Models by name. Sizes are those of the published models; a test checks the parameter counts.
*/
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/options/options.h"

struct Preset {
    const char* name;
    ModelConfig config;
    TokenizerKind tokenizer = TokenizerKind::none;
    int document_end = -1;
};

namespace preset_family {

// Radford et al., "Language Models are Unsupervised Multitask Learners" (2019)
inline ModelConfig gpt2(int layers, int channels, int heads) {
    return {.layers = layers, .channels = channels, .heads = heads};
}

// Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1; all layers attend densely
inline ModelConfig gpt3(int layers, int channels, int heads) {
    return {.layers = layers, .channels = channels, .heads = heads, .context = 2048};
}

// Touvron et al. (2023): what LLaMA, Mistral and Qwen have in common
inline ModelConfig llama(int layers, int channels, int heads, int kv_heads, int mlp_width) {
    return {.layers = layers,
            .channels = channels,
            .heads = heads,
            .kv_heads = kv_heads,
            .mlp_width = mlp_width,
            .norm = NormKind::rmsnorm,
            .position = PositionKind::rope,
            .mlp = MlpKind::swiglu,
            .bias = false,
            .tie_embeddings = false};
}

inline ModelConfig llama2(int layers, int channels, int heads, int kv_heads, int mlp_width) {
    ModelConfig config = llama(layers, channels, heads, kv_heads, mlp_width);
    config.vocab_size = 32000;
    config.context = 4096;
    return config;
}

// "The Llama 3 Herd of Models" (2024)
inline ModelConfig llama3(int layers, int channels, int heads, int kv_heads, int mlp_width) {
    ModelConfig config = llama(layers, channels, heads, kv_heads, mlp_width);
    config.vocab_size = 128256;
    config.context = 8192;
    config.rope_theta = 500000;
    return config;
}

// Llama 3.1 and 3.2 stretch the context by scaling RoPE.
inline ModelConfig llama3_long(ModelConfig config, float rope_scaling, bool tie_embeddings) {
    config.context = 131072;
    config.rope_scaling = rope_scaling;
    config.tie_embeddings = tie_embeddings;
    return config;
}

// Jiang et al., "Mistral 7B" (2023)
inline ModelConfig mistral(int layers, int channels, int heads, int kv_heads, int mlp_width) {
    ModelConfig config = llama(layers, channels, heads, kv_heads, mlp_width);
    config.vocab_size = 32000;
    config.context = 32768;
    config.window = 4096;
    return config;
}

// Qwen2.5 and Qwen3 have this in common.
inline ModelConfig qwen(int layers, int channels, int heads, int kv_heads, int mlp_width,
                        bool tie_embeddings) {
    ModelConfig config = llama(layers, channels, heads, kv_heads, mlp_width);
    config.vocab_size = 151936;
    config.norm_eps = 1e-6f;
    config.rope_theta = 1000000;
    config.tie_embeddings = tie_embeddings;
    return config;
}

// "Qwen2.5 Technical Report" (2024)
inline ModelConfig qwen25(ModelConfig config, int context, int vocab_size) {
    config.context = context;
    config.vocab_size = vocab_size;
    config.qkv_bias = true;
    return config;
}

// "Qwen3 Technical Report" (2025)
inline ModelConfig qwen3(ModelConfig config) {
    config.head_size = 128;
    config.context = 40960;
    config.qk_norm = true;
    return config;
}

// Wu et al., "YUAN 2.0: A Large Language Model with Localized Filtering-based Attention" (2023), table 8
inline ModelConfig yuan2(int layers, int channels, int heads, int context) {
    ModelConfig config = llama(layers, channels, heads, 0, 0);
    config.vocab_size = 135040;
    config.context = context;
    config.norm_eps = 1e-6f;
    config.tie_embeddings = true;
    config.local_filter = true;
    return config;
}

// Small enough to learn something in two minutes on a laptop. Its tokens are bytes, and 256 ends a document.
inline ModelConfig tiny() {
    ModelConfig config = llama(4, 128, 4, 0, 384);
    config.vocab_size = 257;
    config.context = 256;
    config.tie_embeddings = true;
    return config;
}

}  // namespace preset_family

inline const std::vector<Preset>& preset_table() {
    using namespace preset_family;
    static const std::vector<Preset> table = {
        {"tiny", tiny(), TokenizerKind::bytes, 256},
        {"gpt2-124M", gpt2(12, 768, 12)},
        {"gpt2-350M", gpt2(24, 1024, 16)},
        {"gpt2-774M", gpt2(36, 1280, 20)},
        {"gpt2-1558M", gpt2(48, 1600, 25)},
        {"gpt3-125M", gpt3(12, 768, 12)},
        {"gpt3-350M", gpt3(24, 1024, 16)},
        {"gpt3-760M", gpt3(24, 1536, 16)},
        {"gpt3-2.7B", gpt3(32, 2560, 32)},
        {"gpt3-6.7B", gpt3(32, 4096, 32)},
        {"gpt3-175B", gpt3(96, 12288, 96)},
        {"llama2-7B", llama2(32, 4096, 32, 32, 11008)},
        {"llama3-8B", llama3(32, 4096, 32, 8, 14336)},
        {"llama3-70B", llama3(80, 8192, 64, 8, 28672)},
        {"llama3.1-8B", llama3_long(llama3(32, 4096, 32, 8, 14336), 8, false)},
        {"llama3.2-1B", llama3_long(llama3(16, 2048, 32, 8, 8192), 32, true)},
        {"llama3.2-3B", llama3_long(llama3(28, 3072, 24, 8, 8192), 32, true)},
        {"mistral-7B", mistral(32, 4096, 32, 8, 14336)},
        {"qwen2.5-0.5B", qwen25(qwen(24, 896, 14, 2, 4864, true), 32768, 151936)},
        {"qwen2.5-1.5B", qwen25(qwen(28, 1536, 12, 2, 8960, true), 131072, 151936)},
        {"qwen2.5-7B", qwen25(qwen(28, 3584, 28, 4, 18944, false), 131072, 152064)},
        {"qwen3-0.6B", qwen3(qwen(28, 1024, 16, 8, 3072, true))},
        {"qwen3-1.7B", qwen3(qwen(28, 2048, 16, 8, 6144, true))},
        {"qwen3-8B", qwen3(qwen(36, 4096, 32, 8, 12288, false))},
        {"yuan2-2B", yuan2(24, 2048, 32, 8192)},
        {"yuan2-51B", yuan2(42, 8192, 64, 4096)},
        {"yuan2-102B", yuan2(84, 8192, 64, 4096)},
    };
    return table;
}

inline const Preset* find_preset(std::string_view name) {
    for (const Preset& row : preset_table()) {
        if (row.name == name) return &row;
    }
    return nullptr;
}
