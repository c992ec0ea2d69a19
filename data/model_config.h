/*
What a model is made of: one transformer with switches. The fields are options of the same names (--mlp-width for
mlp_width). Zero means "derived from the others"; complete() fills those in.
*/
#pragma once

#include <string>

struct ModelConfig {
    int layers = 12;
    int channels = 768;
    int heads = 12;
    int kv_heads = 0;   // 0: heads
    int head_size = 0;  // 0: channels / heads
    int mlp_width = 0;  // 0: 4 * channels
    int vocab_size = 50257;
    int context = 1024;                  // positions the model is made for
    std::string norm = "layernorm";      // layernorm | rmsnorm
    float norm_eps = 1e-5f;
    std::string position = "learned";    // learned | rope
    float rope_theta = 10000;
    int rope_dims = 0;                   // rotated dimensions of each head; 0: head_size
    float rope_scaling = 1;              // Llama 3.1 frequency scaling; 1: none
    float rope_low_frequency = 1;
    float rope_high_frequency = 4;
    int rope_original_context = 8192;
    std::string mlp = "gelu";            // gelu (tanh) | gelu-exact | swiglu
    bool bias = true;
    int window = 0;                      // sliding attention window; 0: none
    std::string block = "sequential";    // sequential | parallel (one norm, attention and MLP side by side)
    bool tie_embeddings = true;
    bool qk_norm = false;
};
