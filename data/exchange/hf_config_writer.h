/*
ModelConfig -> Hugging Face config.json: the family that a model belongs to, and what its config says. Reading
it back gives the same model. One that no family expresses is refused by the option that stands in the way.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <cmath>
#include <string>

#include "data/base/error.h"
#include "data/options/model_config.h"
#include "data/options/values.h"  // number_text

enum class HfFamily { gpt2, llama, mistral, qwen3, gpt_neox, gptj };

// As model_type in config.json has it.
inline const char* family_name(HfFamily family) {
    constexpr const char* names[] = {"gpt2", "llama", "mistral", "qwen3", "gpt_neox", "gptj"};
    return names[(int)family];
}

inline const char* family_class(HfFamily family) {
    constexpr const char* classes[] = {"GPT2LMHeadModel",  "LlamaForCausalLM",   "MistralForCausalLM",
                                       "Qwen3ForCausalLM", "GPTNeoXForCausalLM", "GPTJForCausalLM"};
    return classes[(int)family];
}

namespace hf {

inline HfFamily nearest_family(const ModelConfig& c) {
    if (c.norm == NormKind::rmsnorm)
        return c.qk_norm ? HfFamily::qwen3 : c.window ? HfFamily::mistral : HfFamily::llama;
    if (c.position == PositionKind::learned) return HfFamily::gpt2;
    return c.bias ? HfFamily::gpt_neox : HfFamily::gptj;
}

// A float as a double would show digits that it does not have.
inline double shortest(float value) {
    return std::stod(number_text(value));
}

}  // namespace hf

// The family that expresses a completed config.
inline HfFamily hf_family(const ModelConfig& c) {
    using enum HfFamily;
    HfFamily family = hf::nearest_family(c);
    auto needs = [&](bool holds, const char* option, const std::string& value, const std::string& wanted) {
        if (holds) return;
        fail("--%s %s: Hugging Face's %s, the nearest family, has only %s; train such a model to export it",
             option, value.c_str(), family_name(family), wanted.c_str());
    };
    auto needs_name = [&](const char* option, auto value, auto wanted) {
        needs(value == wanted, option, name_of(value), name_of(wanted));
    };
    auto needs_size = [&](const char* option, int value, int wanted) {
        needs(value == wanted, option, std::to_string(value), std::to_string(wanted));
    };
    if (c.norm == NormKind::rmsnorm) {
        needs_name("position", c.position, PositionKind::rope);
        needs_name("mlp", c.mlp, MlpKind::swiglu);
        needs_name("block", c.block, BlockKind::sequential);
        needs_size("rope-dims", c.rope_dims, c.head_size);
        if (family != llama) needs_name("bias", c.bias, false);
        return family;
    }
    needs(c.mlp != MlpKind::swiglu, "mlp", name_of(c.mlp),
          alternatives({name_of(MlpKind::gelu), name_of(MlpKind::gelu_exact)}));
    needs_name("qk-norm", c.qk_norm, false);
    needs_size("window", c.window, 0);
    needs_size("kv-heads", c.kv_heads, c.heads);
    needs((int64_t)c.heads * c.head_size == c.channels, "head-size", std::to_string(c.head_size),
          "channels / heads");
    if (family == gpt2) {
        needs_name("block", c.block, BlockKind::sequential);
        needs_name("bias", c.bias, true);
    } else if (family == gptj) {
        needs_name("block", c.block, BlockKind::parallel);
        needs(c.rope_theta == 10000, "rope-theta", number_text(c.rope_theta), "10000");
        needs(c.rope_scaling == 1, "rope-scaling", number_text(c.rope_scaling), "1");
    }
    return family;
}

namespace hf {

using Json = nlohmann::ordered_json;

// The sizes under the names of GPT-2, which GPT-J took over.
inline void write_openai_sizes(const ModelConfig& c, Json& json) {
    json["n_layer"] = c.layers;
    json["n_embd"] = c.channels;
    json["n_head"] = c.heads;
    json["n_inner"] = c.mlp_width;
    json["n_positions"] = c.context;
    json["layer_norm_epsilon"] = shortest(c.norm_eps);
    json["activation_function"] = c.mlp == MlpKind::gelu ? "gelu_new" : "gelu";
    for (const char* dropout : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) json[dropout] = 0.0;
}

inline void write_sizes(const ModelConfig& c, Json& json) {
    json["num_hidden_layers"] = c.layers;
    json["hidden_size"] = c.channels;
    json["num_attention_heads"] = c.heads;
    json["intermediate_size"] = c.mlp_width;
    json["max_position_embeddings"] = c.context;
    json["attention_dropout"] = 0.0;
}

inline void write_rope_scaling(const ModelConfig& c, Json& json) {
    if (c.rope_scaling == 1) return;
    json["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", shortest(c.rope_scaling)},
                            {"low_freq_factor", shortest(c.rope_low_frequency)},
                            {"high_freq_factor", shortest(c.rope_high_frequency)},
                            {"original_max_position_embeddings", c.rope_original_context}};
}

inline void write_llama(const ModelConfig& c, HfFamily family, Json& json) {
    write_sizes(c, json);
    json["num_key_value_heads"] = c.kv_heads;
    json["head_dim"] = c.head_size;
    json["hidden_act"] = "silu";
    json["rms_norm_eps"] = shortest(c.norm_eps);
    json["rope_theta"] = shortest(c.rope_theta);
    write_rope_scaling(c, json);
    if (family == HfFamily::llama) {
        json["attention_bias"] = c.bias;
        json["mlp_bias"] = c.bias;
        return;
    }
    json["sliding_window"] = c.window ? Json(c.window) : Json(nullptr);
    if (family == HfFamily::mistral) return;
    json["attention_bias"] = false;
    json["use_sliding_window"] = c.window > 0;
    json["max_window_layers"] = c.window ? 0 : c.layers;  // the first layers, which have no window
}

// The share of a head that is rotated. What multiplies it by the width of a head rounds down.
inline double rotated_share(const ModelConfig& c) {
    double share = (double)c.rope_dims / c.head_size;
    return (int)(c.head_size * share) == c.rope_dims ? share : std::nextafter(share, 1);
}

inline void write_gpt_neox(const ModelConfig& c, Json& json) {
    write_sizes(c, json);
    json["hidden_dropout"] = 0.0;
    json["hidden_act"] = c.mlp == MlpKind::gelu ? "gelu_new" : "gelu";
    json["layer_norm_eps"] = shortest(c.norm_eps);
    json["use_parallel_residual"] = c.block == BlockKind::parallel;
    json["attention_bias"] = true;
    json["rotary_pct"] = rotated_share(c);
    json["rotary_emb_base"] = shortest(c.rope_theta);
    write_rope_scaling(c, json);
}

}  // namespace hf

// The config.json of a completed config. `dtype` is what torch calls that of the weights; the token that ends
// a document, or -1, begins a text too.
inline nlohmann::ordered_json hf_config_json(const ModelConfig& c, const char* dtype, int document_end) {
    HfFamily family = hf_family(c);
    hf::Json json, end = document_end < 0 ? hf::Json(nullptr) : hf::Json(document_end);
    json["model_type"] = family_name(family);
    json["architectures"] = hf::Json::array({family_class(family)});
    json["torch_dtype"] = dtype;
    json["vocab_size"] = c.vocab_size;
    json["tie_word_embeddings"] = c.tie_embeddings;
    json["bos_token_id"] = end;
    json["eos_token_id"] = end;
    switch (family) {
    case HfFamily::gpt2:
        hf::write_openai_sizes(c, json);
        break;
    case HfFamily::gptj:
        hf::write_openai_sizes(c, json);
        json["rotary_dim"] = c.rope_dims;
        break;
    case HfFamily::gpt_neox:
        hf::write_gpt_neox(c, json);
        break;
    default:
        hf::write_llama(c, family, json);
    }
    return json;
}
