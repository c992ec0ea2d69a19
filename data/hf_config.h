/*
Hugging Face config.json -> ModelConfig, for the families that our switches express exactly: gpt2, llama,
mistral and qwen3. Every key must be understood: one that is neither read nor known to leave the arithmetic
alone is refused, so that a variant of a family is never taken for the family itself.
*/
#pragma once

#include <filesystem>
#include <set>
#include <string>

#include "data/error.h"
#include "data/file.h"
#include "data/json.h"
#include "data/model_config.h"

// Reads a JSON object by key, and remembers which keys were read.
class HfObject {
public:
    HfObject(const nlohmann::json& object, std::string file) : object_(object), file_(std::move(file)) {
        if (!object.is_object()) fail("%s: not a JSON object; not a model's config", file_.c_str());
    }

    bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }

    bool is_null(const char* key) {
        used_.insert(key);
        return object_.contains(key) && object_[key].is_null();
    }

    const nlohmann::json& value(const char* key) {
        used_.insert(key);
        if (!has(key)) fail("%s: %s is missing; is this the model's own config.json?", file_.c_str(), key);
        return object_[key];
    }

    int size(const char* key) { return (int)json_integer(value(key), 1, 1 << 24, where(key)); }

    int size(const char* key, int standard) {
        used_.insert(key);
        return has(key) ? size(key) : standard;
    }

    float real(const char* key) {
        const nlohmann::json& found = value(key);
        float result = found.is_number() ? found.get<float>() : NAN;
        if (!(result > 0 && result < 1e12f)) {
            fail("%s: %s is %s; it must be a number above 0 and below 1e12", file_.c_str(), key,
                 json_text(found).c_str());
        }
        return result;
    }

    float real(const char* key, float standard) {
        used_.insert(key);
        return has(key) ? real(key) : standard;
    }

    bool flag(const char* key, bool standard) {
        used_.insert(key);
        if (!has(key)) return standard;
        if (!object_[key].is_boolean()) {
            fail("%s: %s is %s; it must be true or false", file_.c_str(), key,
                 json_text(object_[key]).c_str());
        }
        return object_[key].get<bool>();
    }

    std::string word(const char* key) {
        const nlohmann::json& found = value(key);
        if (!found.is_string()) {
            fail("%s: %s is %s; it must be a string", file_.c_str(), key, json_text(found).c_str());
        }
        return found.get<std::string>();
    }

    void ignore(const char* key) { used_.insert(key); }

    [[noreturn]] void refuse(const char* key, const std::string& value, const char* supported) {
        fail("%s: %s %s is not supported; only %s is", file_.c_str(), key, printable(value).c_str(),
             supported);
    }

    void refuse_unread() const {
        for (const auto& [key, value] : object_.items()) {
            if (!used_.contains(key)) {
                fail("%s: %s is not known for this kind of model; remove it if the model computes the same "
                     "without it",
                     file_.c_str(), printable(key).c_str());
            }
        }
    }

    std::string where(const char* key) const { return file_ + ": " + key; }

private:
    const nlohmann::json& object_;
    std::string file_;
    std::set<std::string, std::less<>> used_;
};

namespace hf {

// Keys that say where a model came from, how to train or to sample it, but not what it computes.
inline void ignore_bystanders(HfObject& config) {
    for (const char* key : {"_name_or_path",
                            "architectures",
                            "attention_dropout",
                            "attn_pdrop",
                            "auto_map",
                            "bos_token_id",
                            "chunk_size_feed_forward",
                            "dtype",
                            "embd_pdrop",
                            "eos_token_id",
                            "finetuning_task",
                            "id2label",
                            "initializer_range",
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
                            "torch_dtype",
                            "transformers_version",
                            "use_cache"}) {
        config.ignore(key);
    }
}

inline ModelConfig gpt2(HfObject& config) {
    ModelConfig model;
    model.layers = config.size("n_layer");
    model.channels = config.size("n_embd");
    model.heads = config.size("n_head");
    model.mlp_width = config.size("n_inner", 0);
    model.vocab_size = config.size("vocab_size");
    model.context = config.size("n_positions");
    model.norm_eps = config.real("layer_norm_epsilon", 1e-5f);
    model.tie_embeddings = config.flag("tie_word_embeddings", true);
    config.ignore("reorder_and_upcast_attn");  // a matter of rounding
    std::string activation = config.word("activation_function");
    if (activation == "gelu")
        model.mlp = "gelu-exact";
    else if (activation != "gelu_new" && activation != "gelu_pytorch_tanh")
        config.refuse("activation_function", activation, "gelu_new, gelu_pytorch_tanh or gelu");
    if (!config.flag("scale_attn_weights", true)) config.refuse("scale_attn_weights", "false", "true");
    if (config.flag("scale_attn_by_inverse_layer_idx", false)) {
        config.refuse("scale_attn_by_inverse_layer_idx", "true", "false");
    }
    if (config.flag("add_cross_attention", false)) config.refuse("add_cross_attention", "true", "false");
    return model;
}

inline void read_rope_scaling(HfObject scaling, ModelConfig& model, bool holds_theta) {
    std::string type = scaling.word(scaling.has("rope_type") ? "rope_type" : "type");
    scaling.ignore("type");
    if (holds_theta) model.rope_theta = scaling.real("rope_theta");
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

inline void read_rope(HfObject& config, ModelConfig& model) {
    model.rope_theta = config.real("rope_theta", 10000);
    config.ignore("rope_scaling");
    config.ignore("rope_parameters");
    if (config.has("rope_parameters")) {
        read_rope_scaling({config.value("rope_parameters"), config.where("rope_parameters")}, model, true);
    } else if (config.has("rope_scaling")) {
        read_rope_scaling({config.value("rope_scaling"), config.where("rope_scaling")}, model, false);
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
    read_rope(config, model);
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

}  // namespace hf

inline ModelConfig parse_hf_config(std::string_view source, const std::string& file) {
    nlohmann::json json = parse_json(source, file);
    HfObject config(json, file);
    hf::ignore_bystanders(config);
    std::string type = config.word("model_type");
    ModelConfig model;
    if (type == "gpt2")
        model = hf::gpt2(config);
    else if (type == "llama")
        model = hf::llama(config);
    else if (type == "mistral")
        model = hf::mistral(config);
    else if (type == "qwen3")
        model = hf::qwen3(config);
    else
        config.refuse("model_type", type, "gpt2, llama, mistral or qwen3");
    config.refuse_unread();
    ModelConfig checked =
        model;  // left incomplete itself, so that options can still change what follows from them
    try {
        complete(checked);
    } catch (const Error& error) {
        fail("%s: %s", file.c_str(), error.what());
    }
    return model;
}

// The path of the config that a --model argument names, or nothing if it names none.
inline std::string hf_config_path(const std::string& model) {
    std::error_code ignored;
    if (std::filesystem::is_directory(model, ignored)) return model + "/config.json";
    return std::filesystem::exists(model, ignored) ? model : "";
}

inline ModelConfig read_hf_config(const std::string& path) {
    MappedFile file(path);
    constexpr size_t longest = 1 << 20;
    if (file.size() > longest)
        fail("%s: %zu bytes; a config.json is smaller than a megabyte", path.c_str(), file.size());
    return parse_hf_config({file.data(), file.size()}, path);
}
