// The config.json files of published models, as on Hugging Face.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "data/exchange/hf_config.h"

// Returns the model that the text of a config.json describes.
inline ModelConfig parse_hf_config(std::string_view source, const std::string& file) {
    std::vector<std::string> notes;
    return hf_model(parse_json(source, file), file, notes);
}

inline nlohmann::json hf_gpt2() {
    return nlohmann::json::parse(R"({"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
        "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
        "summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
        "vocab_size": 50257})");
}

inline nlohmann::json hf_llama() {
    return nlohmann::json::parse(R"({"architectures": ["LlamaForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0", "use_cache": true, "vocab_size": 128256})");
}

// Qwen2.5-0.5B
inline nlohmann::json hf_qwen2() {
    return nlohmann::json::parse(R"({"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896,
        "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
        "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false,
        "use_sliding_window": false, "vocab_size": 151936})");
}

inline nlohmann::json hf_qwen3() {
    return nlohmann::json::parse(R"({"architectures": ["Qwen3ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936})");
}

inline nlohmann::json hf_mistral() {
    return nlohmann::json::parse(
        R"({"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0",
        "use_cache": true, "vocab_size": 32000})");
}

// Seed-OSS-36B
inline nlohmann::json hf_seed_oss() {
    return nlohmann::json::parse(R"({"architectures": ["SeedOssForCausalLM"], "attention_bias": true,
        "attention_dropout": 0.1, "attention_out_bias": false, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648,
        "max_position_embeddings": 524288, "mlp_bias": false, "model_type": "seed_oss", "num_attention_heads": 80,
        "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 1, "residual_dropout": 0.1,
        "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 155136})");
}

// pythia-70m
inline nlohmann::json hf_gpt_neox() {
    return nlohmann::json::parse(
        R"({"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
        "hidden_act": "gelu", "hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox",
        "num_attention_heads": 8, "num_hidden_layers": 6, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": true,
        "use_parallel_residual": true, "vocab_size": 50304})");
}

// Yuan2-51B-hf
inline nlohmann::json hf_yuan2() {
    return nlohmann::json::parse(
        R"({"_from_model_config": true, "architectures": ["YuanForCausalLM"], "auto_map":
        {"AutoConfig": "configuration_yuan.YuanConfig", "AutoModelForCausalLM": "yuan_hf_model.YuanForCausalLM"},
        "bos_token_id": 77185, "causal_mask": true, "dropout": 0.1, "eod_token": 77185, "eod_token_id": 77185,
        "eos_token_id": 77185, "hidden_act": "silu", "hidden_size": 8192, "initializer_range": 0.02,
        "intermediate_size": 32768, "mask_token_id": 77185, "max_position_embeddings": 4096, "model_max_length": 4096,
        "model_type": "yuan", "num_attention_heads": 64, "num_hidden_layers": 42, "pad_token_id": 77185,
        "reset_attention_mask": true, "reset_position_ids": true, "rms_norm_eps": 1e-06, "sep_token": 77187,
        "sep_token_id": 77185, "tokenizer_class": "YuanTokenizer", "torch_dtype": "bfloat16",
        "transformers_version": "4.30.2", "use_cache": true, "use_flash_attention": true, "use_loss_mask": false,
        "vocab_size": 135040})");
}

// gpt-j-6b
inline nlohmann::json hf_gptj() {
    return nlohmann::json::parse(R"({"activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"],
        "attn_pdrop": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256,
        "gradient_checkpointing": false, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
        "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_inner": null, "n_layer": 28, "n_positions": 2048,
        "resid_pdrop": 0.0, "rotary": true, "rotary_dim": 64, "scale_attn_weights": true,
        "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
        "summary_type": "cls_index", "summary_use_proj": true, "task_specific_params":
        {"text-generation": {"do_sample": true, "max_length": 50, "temperature": 1.0}},
        "tie_word_embeddings": false, "tokenizer_class": "GPT2Tokenizer", "transformers_version": "4.18.0.dev0",
        "use_cache": true, "vocab_size": 50400})");
}
