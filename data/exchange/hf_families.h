/*
Families of models in Hugging Face transformers, as config.json describes them: what each says, in terms of
our switches. Only what our switches express exactly is read; anything else is refused by its key.
*/
#pragma once

#include <string>
#include <string_view>

#include "data/exchange/hf_object.h"
#include "data/options/model_config.h"

namespace hf {

// Keys that say where a model came from, how to train or to sample it, but not what it computes.
inline void ignore_bystanders(HfObject& config) {
    for (const char* key : {"_name_or_path",
                            "architectures",
                            "attention_dropout",
                            "attention_probs_dropout_prob",
                            "attn_pdrop",
                            "auto_map",
                            "bos_token_id",
                            "chunk_size_feed_forward",
                            "classifier_dropout",
                            "dtype",
                            "embd_pdrop",
                            "eos_token_id",
                            "finetuning_task",
                            "gradient_checkpointing",
                            "hidden_dropout",
                            "hidden_dropout_prob",
                            "id2label",
                            "initializer_range",
                            "is_decoder",
                            "label2id",
                            "n_ctx",
                            "output_attentions",
                            "output_hidden_states",
                            "output_past",
                            "pad_token_id",
                            "pretraining_tp",
                            "problem_type",
                            "resid_pdrop",
                            "return_dict",
                            "summary_activation",
                            "summary_first_dropout",
                            "summary_proj_to_labels",
                            "summary_type",
                            "summary_use_proj",
                            "task_specific_params",
                            "tokenizer_class",
                            "torch_dtype",
                            "transformers_version",
                            "use_cache"}) {
        config.ignore(key);
    }
}

inline void read_gelu(HfObject& config, const char* key, ModelConfig& model) {
    std::string activation = config.word(key);
    bool tanh = activation == "gelu_new" || activation == "gelu_pytorch_tanh" || activation == "gelu_fast";
    if (!tanh && activation != "gelu")
        config.refuse(key, activation, "gelu, gelu_new, gelu_fast or gelu_pytorch_tanh");
    model.mlp = tanh ? "gelu" : "gelu-exact";
}

// The sizes under the names of GPT-2, which GPT-J took over.
inline void read_openai_sizes(HfObject& config, ModelConfig& model) {
    model.layers = config.size("n_layer");
    model.channels = config.size("n_embd");
    model.heads = config.size("n_head");
    model.mlp_width = config.size("n_inner", 0);
    model.vocab_size = config.size("vocab_size");
    model.context = config.size("n_positions");
}

inline ModelConfig gpt2(HfObject& config) {
    ModelConfig model;
    read_openai_sizes(config, model);
    model.norm_eps = config.real("layer_norm_epsilon", 1e-5f);
    model.tie_embeddings = config.flag("tie_word_embeddings", true);
    config.ignore("reorder_and_upcast_attn");  // a matter of rounding
    read_gelu(config, "activation_function", model);
    if (!config.flag("scale_attn_weights", true)) config.refuse("scale_attn_weights", "false", "true");
    if (config.flag("scale_attn_by_inverse_layer_idx", false)) {
        config.refuse("scale_attn_by_inverse_layer_idx", "true", "false");
    }
    if (config.flag("add_cross_attention", false)) config.refuse("add_cross_attention", "true", "false");
    return model;
}

// `rotated` is the share of a head that is turned, for families that have one.
inline void read_rope_scaling(HfObject scaling, ModelConfig& model, bool holds_theta, double* rotated) {
    std::string type = scaling.word(scaling.has("rope_type") ? "rope_type" : "type");
    scaling.ignore("type");
    if (holds_theta) model.rope_theta = scaling.real("rope_theta");
    if (rotated) *rotated = scaling.fraction("partial_rotary_factor", *rotated);
    if (type == "llama3") {
        model.rope_scaling = scaling.real("factor");
        model.rope_low_frequency = scaling.real("low_freq_factor");
        model.rope_high_frequency = scaling.real("high_freq_factor");
        model.rope_original_context = scaling.size("original_max_position_embeddings");
    } else if (type != "default") {
        scaling.refuse("rope_type", type, "llama3 or default");
    }
    scaling.refuse_unread();
}

inline void read_rope(HfObject& config, ModelConfig& model, const char* theta, double* rotated = nullptr) {
    model.rope_theta = config.real(theta, 10000);
    config.ignore("rope_scaling");
    config.ignore("rope_parameters");
    for (const char* key : {"rope_parameters", "rope_scaling"}) {
        if (!config.has(key)) continue;
        bool holds_theta = key == std::string_view("rope_parameters");
        read_rope_scaling({config.value(key), config.where(key)}, model, holds_theta, rotated);
        break;
    }
}

// What llama, mistral and qwen3 share.
inline ModelConfig llama_family(HfObject& config) {
    ModelConfig model;
    model.norm = "rmsnorm";
    model.position = "rope";
    model.mlp = "swiglu";
    model.bias = false;
    model.layers = config.size("num_hidden_layers");
    model.channels = config.size("hidden_size");
    model.heads = config.size("num_attention_heads");
    model.kv_heads = config.size("num_key_value_heads", model.heads);
    model.head_size = config.size("head_dim", 0);
    model.mlp_width = config.size("intermediate_size");
    model.vocab_size = config.size("vocab_size");
    model.context = config.size("max_position_embeddings");
    model.norm_eps = config.real("rms_norm_eps");
    model.tie_embeddings = config.flag("tie_word_embeddings", false);
    read_rope(config, model, "rope_theta");
    if (std::string activation = config.word("hidden_act"); activation != "silu") {
        config.refuse("hidden_act", activation, "silu");
    }
    return model;
}

inline ModelConfig llama(HfObject& config) {
    ModelConfig model = llama_family(config);
    bool attention_bias = config.flag("attention_bias", false), mlp_bias = config.flag("mlp_bias", false);
    if (attention_bias != mlp_bias) {
        config.refuse("attention_bias", attention_bias ? "true" : "false", "the value of mlp_bias");
    }
    model.bias = attention_bias;
    return model;
}

inline ModelConfig mistral(HfObject& config) {
    config.value("num_key_value_heads");
    ModelConfig model = llama_family(config);
    // null is no window, but absent is a window of some default size.
    if (!config.is_null("sliding_window")) model.window = config.size("sliding_window");
    return model;
}

// Layers from max_window_layers on may have a sliding window, the first ones not.
inline void read_layer_windows(HfObject& config, ModelConfig& model) {
    bool windowed = config.flag("use_sliding_window", false);
    config.ignore("sliding_window");
    config.ignore("max_window_layers");
    if (windowed && config.has("sliding_window")) {
        int64_t full =
            json_integer(config.value("max_window_layers"), 0, 1 << 24, config.where("max_window_layers"));
        if (full == 0) {
            model.window = config.size("sliding_window");
        } else if (full < model.layers) {
            config.refuse("max_window_layers", std::to_string(full), "a window in all layers or in none");
        }
    }
    config.ignore("layer_types");
    if (!config.has("layer_types")) return;
    const nlohmann::json& types = config.value("layer_types");
    const char* expected = model.window ? "sliding_attention" : "full_attention";
    bool same = types.is_array() && types.size() == (size_t)model.layers;
    for (const auto& type : types) same = same && type == expected;
    if (!same)
        config.refuse("layer_types", "given",
                      "the same type in all layers, agreeing with use_sliding_window");
}

inline ModelConfig qwen3(HfObject& config) {
    config.value("num_key_value_heads");
    config.value("head_dim");
    ModelConfig model = llama_family(config);
    model.qk_norm = true;
    if (config.flag("attention_bias", false)) config.refuse("attention_bias", "true", "false");
    read_layer_windows(config, model);
    return model;
}

inline ModelConfig gpt_neox(HfObject& config) {
    ModelConfig model;
    model.position = "rope";
    model.layers = config.size("num_hidden_layers");
    model.channels = config.size("hidden_size");
    model.heads = config.size("num_attention_heads");
    model.mlp_width = config.size("intermediate_size");
    model.vocab_size = config.size("vocab_size");
    model.context = config.size("max_position_embeddings");
    model.norm_eps = config.real("layer_norm_eps", 1e-5f);
    model.block = config.flag("use_parallel_residual", true) ? "parallel" : "sequential";
    model.tie_embeddings = config.flag("tie_word_embeddings", false);
    read_gelu(config, "hidden_act", model);
    if (!config.flag("attention_bias", true)) config.refuse("attention_bias", "false", "true");

    double rotated = config.fraction("rotary_pct", 0.25);
    read_rope(config, model, "rotary_emb_base", &rotated);
    model.rope_dims = (int)(model.channels / model.heads * rotated);
    if (model.rope_dims < 2) config.refuse("rotary_pct", text("%g", rotated), "a pair in each head or more");
    // Some versions of transformers write these beside the two above.
    if (config.real("rope_theta", model.rope_theta) != model.rope_theta)
        config.refuse("rope_theta", text("%g", config.real("rope_theta")), "the value of rotary_emb_base");
    if (double again = config.fraction("partial_rotary_factor", rotated); again != rotated)
        config.refuse("partial_rotary_factor", text("%g", again), "the value of rotary_pct");
    return model;
}

inline ModelConfig gptj(HfObject& config) {
    ModelConfig model;
    model.position = "rope";
    model.block = "parallel";
    model.bias = false;  // of those that GPT-J has, all must be zero
    read_openai_sizes(config, model);
    model.rope_dims = config.size("rotary_dim");
    model.norm_eps = config.real("layer_norm_epsilon", 1e-5f);
    model.tie_embeddings = config.flag("tie_word_embeddings", false);
    read_gelu(config, "activation_function", model);
    if (!config.flag("rotary", true)) config.refuse("rotary", "false", "true");
    if (!config.flag("scale_attn_weights", true)) config.refuse("scale_attn_weights", "false", "true");
    return model;
}

}  // namespace hf
