/*
Families of models in Hugging Face transformers, as config.json describes them: what each says, in terms of
our switches. Only what our switches express exactly is read; anything else is refused by its key.
*/
#pragma once

#include <string>
#include <string_view>

#include "data/base/json.h"
#include "data/options/model_config.h"

namespace hf {

constexpr const char* unknown_remedy = "remove it if the model computes the same without it";

inline int size(JsonObject& config, const char* key) {
    return (int)config.integer(key, 1, 1 << 24);
}

inline int size(JsonObject& config, const char* key, int otherwise) {
    return config.has(key) ? size(config, key) : otherwise;
}

inline float real(JsonObject& config, const char* key) {
    return (float)config.number(key, 1e12);
}

inline float real(JsonObject& config, const char* key, float otherwise) {
    return config.has(key) ? real(config, key) : otherwise;
}

[[noreturn]] inline void refuse(const JsonObject& config, const char* key, const std::string& value,
                                const char* supported) {
    fail("%s: %s %s is not supported; only %s is", config.what().c_str(), key, printable(value).c_str(),
         supported);
}

// A switch of a family that its models here have only one way.
inline void only(JsonObject& config, const char* key, bool value) {
    if (config.boolean(key, value) != value)
        refuse(config, key, value ? "false" : "true", value ? "true" : "false");
}

// Keys that say where a model came from, how to train or to sample it, but not what it computes.
inline void ignore_bystanders(JsonObject& config) {
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

inline void read_gelu(JsonObject& config, const char* key, ModelConfig& model) {
    std::string activation = config.string(key);
    bool tanh = activation == "gelu_new" || activation == "gelu_pytorch_tanh" || activation == "gelu_fast";
    if (!tanh && activation != "gelu")
        refuse(config, key, activation, "gelu, gelu_new, gelu_fast or gelu_pytorch_tanh");
    model.mlp = tanh ? MlpKind::gelu : MlpKind::gelu_exact;
}

// The sizes under the names of GPT-2, which GPT-J took over.
inline void read_openai_sizes(JsonObject& config, ModelConfig& model) {
    model.layers = size(config, "n_layer");
    model.channels = size(config, "n_embd");
    model.heads = size(config, "n_head");
    model.mlp_width = size(config, "n_inner", 0);
    model.vocab_size = size(config, "vocab_size");
    model.context = size(config, "n_positions");
}

inline ModelConfig gpt2(JsonObject& config) {
    ModelConfig model;
    read_openai_sizes(config, model);
    model.norm_eps = real(config, "layer_norm_epsilon", 1e-5f);
    model.tie_embeddings = config.boolean("tie_word_embeddings", true);
    config.ignore("reorder_and_upcast_attn");  // a matter of rounding
    read_gelu(config, "activation_function", model);
    only(config, "scale_attn_weights", true);
    only(config, "scale_attn_by_inverse_layer_idx", false);
    only(config, "add_cross_attention", false);
    return model;
}

// `rotated` is the share of a head that is turned, for families that have one.
inline void read_rope_scaling(JsonObject scaling, ModelConfig& model, bool holds_theta, double* rotated) {
    std::string type = scaling.string(scaling.has("rope_type") ? "rope_type" : "type");
    scaling.ignore("type");
    if (holds_theta) model.rope_theta = real(scaling, "rope_theta");
    if (rotated) *rotated = scaling.number("partial_rotary_factor", 1, *rotated);
    if (type == "llama3") {
        model.rope_scaling = real(scaling, "factor");
        model.rope_low_frequency = real(scaling, "low_freq_factor");
        model.rope_high_frequency = real(scaling, "high_freq_factor");
        model.rope_original_context = size(scaling, "original_max_position_embeddings");
    } else if (type != "default") {
        refuse(scaling, "rope_type", type, "llama3 or default");
    }
    scaling.done(unknown_remedy);
}

inline void read_rope(JsonObject& config, ModelConfig& model, const char* theta, double* rotated = nullptr) {
    model.rope_theta = real(config, theta, 10000);
    config.ignore("rope_scaling");
    for (const char* key : {"rope_parameters", "rope_scaling"}) {
        if (!config.has(key)) continue;
        bool holds_theta = key == std::string_view("rope_parameters");
        read_rope_scaling(config.child(key), model, holds_theta, rotated);
        break;
    }
}

// What llama, mistral and qwen3 share.
inline ModelConfig llama_family(JsonObject& config) {
    ModelConfig model;
    model.norm = NormKind::rmsnorm;
    model.position = PositionKind::rope;
    model.mlp = MlpKind::swiglu;
    model.bias = false;
    model.layers = size(config, "num_hidden_layers");
    model.channels = size(config, "hidden_size");
    model.heads = size(config, "num_attention_heads");
    model.kv_heads = size(config, "num_key_value_heads", model.heads);
    model.head_size = size(config, "head_dim", 0);
    model.mlp_width = size(config, "intermediate_size");
    model.vocab_size = size(config, "vocab_size");
    model.context = size(config, "max_position_embeddings");
    model.norm_eps = real(config, "rms_norm_eps");
    model.tie_embeddings = config.boolean("tie_word_embeddings", false);
    read_rope(config, model, "rope_theta");
    if (std::string activation = config.string("hidden_act"); activation != "silu") {
        refuse(config, "hidden_act", activation, "silu");
    }
    return model;
}

inline ModelConfig llama(JsonObject& config) {
    ModelConfig model = llama_family(config);
    bool attention_bias = config.boolean("attention_bias", false),
         mlp_bias = config.boolean("mlp_bias", false);
    if (attention_bias != mlp_bias) {
        refuse(config, "attention_bias", attention_bias ? "true" : "false", "the value of mlp_bias");
    }
    model.bias = attention_bias;
    return model;
}

inline ModelConfig mistral(JsonObject& config) {
    size(config, "num_key_value_heads");
    ModelConfig model = llama_family(config);
    // null is no window, but absent is a window of some default size.
    if (!config.is_null("sliding_window")) model.window = size(config, "sliding_window");
    return model;
}

// Layers from max_window_layers on may have a sliding window, the first ones not.
inline void read_layer_windows(JsonObject& config, ModelConfig& model) {
    bool windowed = config.boolean("use_sliding_window", false);
    config.ignore("sliding_window");
    config.ignore("max_window_layers");
    if (windowed && config.has("sliding_window")) {
        int64_t full = config.integer("max_window_layers", 0, 1 << 24);
        if (full == 0) {
            model.window = size(config, "sliding_window");
        } else if (full < model.layers) {
            refuse(config, "max_window_layers", std::to_string(full), "a window in all layers or in none");
        }
    }
    if (!config.has("layer_types")) return;
    const nlohmann::json& types = config.get("layer_types");
    const char* expected = model.window ? "sliding_attention" : "full_attention";
    bool same = types.is_array() && types.size() == (size_t)model.layers;
    for (const auto& type : types) same = same && type == expected;
    if (!same)
        refuse(config, "layer_types", "given",
               "the same type in all layers, agreeing with use_sliding_window");
}

inline ModelConfig qwen3(JsonObject& config) {
    size(config, "num_key_value_heads");
    size(config, "head_dim");
    ModelConfig model = llama_family(config);
    model.qk_norm = true;
    only(config, "attention_bias", false);
    read_layer_windows(config, model);
    return model;
}

inline ModelConfig gpt_neox(JsonObject& config) {
    ModelConfig model;
    model.position = PositionKind::rope;
    model.layers = size(config, "num_hidden_layers");
    model.channels = size(config, "hidden_size");
    model.heads = size(config, "num_attention_heads");
    model.mlp_width = size(config, "intermediate_size");
    model.vocab_size = size(config, "vocab_size");
    model.context = size(config, "max_position_embeddings");
    model.norm_eps = real(config, "layer_norm_eps", 1e-5f);
    model.block = config.boolean("use_parallel_residual", true) ? BlockKind::parallel : BlockKind::sequential;
    model.tie_embeddings = config.boolean("tie_word_embeddings", false);
    read_gelu(config, "hidden_act", model);
    only(config, "attention_bias", true);

    double rotated = config.number("rotary_pct", 1, 0.25);
    read_rope(config, model, "rotary_emb_base", &rotated);
    model.rope_dims = (int)(model.channels / model.heads * rotated);
    if (model.rope_dims < 2) refuse(config, "rotary_pct", text("%g", rotated), "a pair in each head or more");
    // Some versions of transformers write these beside the two above.
    if (real(config, "rope_theta", model.rope_theta) != model.rope_theta)
        refuse(config, "rope_theta", text("%g", real(config, "rope_theta")), "the value of rotary_emb_base");
    if (double again = config.number("partial_rotary_factor", 1, rotated); again != rotated)
        refuse(config, "partial_rotary_factor", text("%g", again), "the value of rotary_pct");
    return model;
}

inline ModelConfig gptj(JsonObject& config) {
    ModelConfig model;
    model.position = PositionKind::rope;
    model.block = BlockKind::parallel;
    model.bias = false;  // of those that GPT-J has, all must be zero
    read_openai_sizes(config, model);
    model.rope_dims = size(config, "rotary_dim");
    model.norm_eps = real(config, "layer_norm_epsilon", 1e-5f);
    model.tie_embeddings = config.boolean("tie_word_embeddings", false);
    read_gelu(config, "activation_function", model);
    only(config, "rotary", true);
    only(config, "scale_attn_weights", true);
    return model;
}

}  // namespace hf
