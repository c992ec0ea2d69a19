/*
Families of models in Hugging Face transformers: what their config.json says, in terms of our options, and how
their tensors map to ours. Each fact is stated once and used in both directions: an import reads a model, and
an export writes it. Only what our options express exactly is read. A key that is known to change what a model
computes is read, or refused by name; a key that is known not to is ignored, and so is an unknown one, which
is reported (hf_keys.h). A missing key has the value that transformers assumes.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/json.h"
#include "data/exchange/hf_keys.h"
#include "data/options/model_config.h"
#include "data/options/values.h"  // number_text

// A config.json that is read or written: each call transfers one key, to or from a field of the model.
class HfConfig {
public:
    using Json = nlohmann::ordered_json;
    static constexpr const char* remedy = "remove it if the model computes the same without it";
    std::vector<std::string> unknown;  // keys that are in no table

    HfConfig(JsonObject& from, ModelConfig& into) : model(into), in(&from), out(nullptr) {}
    HfConfig(const ModelConfig& from, Json& into) : model(own_), in(nullptr), out(&into), own_(from) {}
    HfConfig(const HfConfig&) = delete;
    HfConfig& operator=(const HfConfig&) = delete;

    ModelConfig& model;
    JsonObject* const in;  // one of the two is null
    Json* const out;

    void write(const char* key, Json value) { (*out)[key] = std::move(value); }

    // Fails if the key is missing, unless `otherwise` is given.
    void size(const char* key, int& field, std::optional<int> otherwise = {}) {
        if (out)
            write(key, field);
        else
            field = otherwise && !in->has(key) ? *otherwise : (int)in->integer(key, 1, 1 << 24);
    }

    void real(const char* key, float& field, std::optional<float> otherwise = {}) {
        if (out)
            write(key, std::stod(number_text(field)));  // writes only as many digits as a float needs
        else
            field = otherwise && !in->has(key) ? *otherwise : (float)in->number(key, 1e12);
    }

    void flag(const char* key, bool& field, bool otherwise) {
        if (out)
            write(key, field);
        else
            field = in->boolean(key, otherwise);
    }

    // A switch that has this value in all models of the family; a missing key means the same.
    void only(const char* key, bool value, bool written = false) {
        if (out && written) write(key, value);
        if (in && in->boolean(key, value) != value)
            refuse(key, value ? "false" : "true", value ? "true" : "false");
    }

    // A probability that is used only in training: not read, and written as 0.
    void dropout(const char* key) {
        if (out) write(key, 0.0);
    }

    [[noreturn]] void refuse(const char* key, const std::string& value, const char* supported) const {
        fail("%s: %s %s is not supported; only %s is", in->what().c_str(), key, printable(value).c_str(),
             supported);
    }

private:
    ModelConfig own_;  // the model that is written
};

namespace hf {

constexpr const char* original_context = "original_max_position_embeddings";

// ----------------------------------------------------------------------------
// config.json

// Activations by transformers' names; an export writes the first name of a kind.
struct Activation {
    const char* name;
    MlpKind mlp;
};
constexpr Activation activations[] = {{"gelu_new", MlpKind::gelu},
                                      {"gelu_pytorch_tanh", MlpKind::gelu},
                                      {"gelu_fast", MlpKind::gelu},
                                      {"gelu_accurate", MlpKind::gelu},
                                      {"gelu_python_tanh", MlpKind::gelu},
                                      {"gelu", MlpKind::gelu_exact},
                                      {"gelu_python", MlpKind::gelu_exact},
                                      {"silu", MlpKind::swiglu},
                                      {"swish", MlpKind::swiglu}};

// usual: the activation if the key is missing. It also determines whether the family has a gate.
inline void activation(HfConfig& config, const char* key, const char* usual) {
    auto find = [](auto&& is_it) {
        return std::find_if(std::begin(activations), std::end(activations), is_it);
    };
    auto named = [&](std::string_view name) {
        return find([&](const Activation& row) { return row.name == name; });
    };
    bool gated = named(usual)->mlp == MlpKind::swiglu;
    auto fits = [&](const Activation& row) { return (row.mlp == MlpKind::swiglu) == gated; };
    if (config.out) {
        auto row = find([&](const Activation& row) { return row.mlp == config.model.mlp && fits(row); });
        return config.write(key, row == std::end(activations) ? usual : row->name);
    }
    std::string found = config.in->has(key) ? config.in->string(key) : usual;
    auto row = named(found);
    if (row != std::end(activations) && fits(*row)) {
        config.model.mlp = row->mlp;
        return;
    }
    std::vector<std::string> names;
    for (const Activation& each : activations) {
        if (fits(each)) names.push_back(each.name);
    }
    config.refuse(key, found, alternatives(names).c_str());
}

// The keys that GPT-J took over from GPT-2.
inline void openai(HfConfig& config) {
    ModelConfig& model = config.model;
    config.size("n_layer", model.layers);
    config.size("n_embd", model.channels);
    config.size("n_head", model.heads);
    config.size("n_inner", model.mlp_width, 0);
    config.size("n_positions", model.context);
    config.real("layer_norm_epsilon", model.norm_eps, 1e-5f);
    activation(config, "activation_function", "gelu_new");
    for (const char* key : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) config.dropout(key);
    config.only("scale_attn_weights", true);
}

inline void gpt2(HfConfig& config) {
    openai(config);
}

inline void gptj(HfConfig& config) {
    openai(config);
    config.size("rotary_dim", config.model.rope_dims);
    config.only("rotary", true);
}

// The sizes that the other families share.
inline void sizes(HfConfig& config) {
    ModelConfig& model = config.model;
    config.size("num_hidden_layers", model.layers);
    config.size("hidden_size", model.channels);
    config.size("num_attention_heads", model.heads);
    config.size("intermediate_size", model.mlp_width);
    config.size("max_position_embeddings", model.context);
    config.dropout("attention_dropout");
}

// The two supported types of rope_scaling: llama3 and linear.
inline void llama3_scaling(HfConfig& scaling) {
    ModelConfig& model = scaling.model;
    scaling.real("factor", model.rope_scaling);
    scaling.real("low_freq_factor", model.rope_low_frequency);
    scaling.real("high_freq_factor", model.rope_high_frequency);
    scaling.size(original_context, model.rope_original_context, model.context);
}

// All wavelengths are stretched equally, because all are long compared with an original context of 1.
inline void linear_scaling(HfConfig& scaling) {
    ModelConfig& model = scaling.model;
    scaling.real("factor", model.rope_scaling);
    if (model.rope_scaling == 1) return;
    model.rope_original_context = 1, model.rope_low_frequency = 1, model.rope_high_frequency = 4;
}

inline bool is_linear(const ModelConfig& c) {
    return c.rope_original_context == 1 && c.rope_low_frequency == 1 && c.rope_high_frequency == 4;
}

// Newer versions of transformers keep all settings of RoPE in rope_parameters. Older ones keep only the
// scaling, in rope_scaling, which transformers prefers if both are present. `rotated` is the fraction of a
// head that is rotated, for families that have one.
inline void rope(HfConfig& config, const char* theta, double* rotated = nullptr) {
    ModelConfig& model = config.model;
    config.real(theta, model.rope_theta, 10000);
    if (config.out) {
        if (model.rope_scaling == 1) return;
        bool linear = is_linear(model);
        HfConfig::Json scaling = {{"rope_type", linear ? "linear" : "llama3"}};
        HfConfig writer(model, scaling);
        (linear ? linear_scaling : llama3_scaling)(writer);
        config.write("rope_scaling", scaling);
        return;
    }
    bool has_original = config.in->has(original_context);
    const char* key = "rope_parameters";
    for (const char* name : {"rope_parameters", "rope_scaling"}) {
        const nlohmann::json& value = config.in->get(name);
        if (!value.is_null() && !value.empty()) key = name;
    }
    if (config.in->get(key).empty()) return;
    JsonObject object = config.in->child(key);
    HfConfig scaling(object, model);
    std::string type = "default";
    for (const char* name : {"type", "rope_type"}) {
        if (object.has(name)) type = object.string(name);
    }
    scaling.real("rope_theta", model.rope_theta, model.rope_theta);
    if (rotated) *rotated = object.number("partial_rotary_factor", 1, *rotated);
    if (type == "llama3")
        llama3_scaling(scaling);
    else if (type == "linear")
        linear_scaling(scaling);
    else if (type != "default")
        scaling.refuse("rope_type", type, "llama3, linear or default");
    if (type == "llama3" && has_original) config.size(original_context, model.rope_original_context);
    for (const char* unused : {"factor", "low_freq_factor", "high_freq_factor", original_context})
        object.ignore(unused);
    read_others(object, HfConfig::remedy, config.unknown);
}

// Values of Llama and similar families for missing keys; 0: derived from other values.
struct LlamaDefaults {
    int kv_heads = 0, head_size = 0;
};

// The keys that Llama and similar families share.
inline void llama_family(HfConfig& config, LlamaDefaults defaults) {
    ModelConfig& model = config.model;
    sizes(config);
    bool own = defaults.kv_heads > 0 && !(config.in && config.in->is_null("num_key_value_heads"));
    config.size("num_key_value_heads", model.kv_heads, own ? defaults.kv_heads : model.heads);
    config.size("head_dim", model.head_size, defaults.head_size);
    activation(config, "hidden_act", "silu");
    config.real("rms_norm_eps", model.norm_eps, 1e-6f);
    rope(config, "rope_theta");
}

// Marks keys of other families as known: transformers does not read them in this family.
inline void ignore(HfConfig& config, std::initializer_list<const char*> keys) {
    for (const char* key : keys) {
        if (config.in) config.in->ignore(key);
    }
}

constexpr int usual_window = 4096;

inline void llama(HfConfig& config) {
    llama_family(config, {});
    ignore(config, {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"});
    bool mlp_bias = config.model.bias;
    config.flag("attention_bias", config.model.bias, false);
    config.flag("mlp_bias", mlp_bias, false);
    if (mlp_bias != config.model.bias)
        config.refuse("attention_bias", mlp_bias ? "false" : "true", "the value of mlp_bias");
}

// null means no window, but a missing key means a window of the usual size.
inline void mistral(HfConfig& config) {
    llama_family(config, {.kv_heads = 8});
    ignore(config, {"layer_types", "use_sliding_window", "max_window_layers"});
    if (config.out && config.model.window == 0)
        config.write("sliding_window", nullptr);
    else if (config.out || !config.in->is_null("sliding_window"))
        config.size("sliding_window", config.model.window, usual_window);
}

// layer_types says which layers have a window; without it, the layers from max_window_layers on have one.
inline void read_layer_windows(HfConfig& config) {
    JsonObject& json = *config.in;
    ModelConfig& model = config.model;
    bool windowed = json.boolean("use_sliding_window", false), by_layer = json.has("layer_types");
    json.ignore("max_window_layers");
    json.ignore("sliding_window");
    if (windowed && !json.is_null("sliding_window")) {
        bool given = json.has("max_window_layers");
        int64_t full = by_layer ? 0 : given ? json.integer("max_window_layers", 0, 1 << 24) : 28;
        if (full == 0)
            config.size("sliding_window", model.window, usual_window);
        else if (full < model.layers)
            config.refuse("max_window_layers", std::to_string(full), "a window in all layers or in none");
    }
    if (!by_layer) return;
    const nlohmann::json& types = json.get("layer_types");
    auto run_of = [&](const char* type, size_t from) {
        size_t end = from;
        while (end < types.size() && types[end] == type) end++;
        return (int)(end - from);
    };
    if (types.is_array() && run_of("full_attention", 0) == (int)types.size()) model.window = 0;
    if (types.is_array() && model.window > 0) {
        int sliding = run_of("sliding_attention", 0), full = run_of("full_attention", sliding);
        if (sliding > 0 && full > 0) model.window_pattern = WindowPattern{sliding, full}.text();
    }
    bool same = types.is_array() && types.size() == (size_t)model.layers;
    for (int layer = 0; same && layer < model.layers; layer++)
        same = types[layer] == (window_of_layer(model, layer) ? "sliding_attention" : "full_attention");
    if (!same) {
        config.refuse("layer_types", "given",
                      "a list that agrees with use_sliding_window and either is uniform or repeats a run of "
                      "sliding layers and a run of full ones");
    }
}

// qwen2 and qwen3 share these keys, including those of windows.
inline void qwen_family(HfConfig& config, LlamaDefaults defaults) {
    llama_family(config, defaults);
    if (config.in) return read_layer_windows(config);
    const ModelConfig& model = config.model;
    config.write("sliding_window", model.window ? HfConfig::Json(model.window) : HfConfig::Json(nullptr));
    config.write("use_sliding_window", model.window > 0);
    config.write("max_window_layers", model.window ? 0 : model.layers);
    if (model.window_pattern.empty()) return;
    HfConfig::Json types = HfConfig::Json::array();
    for (int layer = 0; layer < model.layers; layer++)
        types.push_back(window_of_layer(model, layer) ? "sliding_attention" : "full_attention");
    config.write("layer_types", types);
}

// Qwen2 always has its biases; transformers does not read a switch for them.
inline void qwen2(HfConfig& config) {
    qwen_family(config, {.kv_heads = 32});
    ignore(config, {"attention_bias"});
}

// Seed-OSS has one switch for each of three kinds of biases. A model of ours has none of them, only those of
// queries, keys and values, or all.
inline void seed_oss(HfConfig& config) {
    ModelConfig& model = config.model;
    llama_family(config, {.kv_heads = 8, .head_size = 128});
    config.dropout("residual_dropout");
    if (config.out)
        // the default is token 1, whose embedding would not be trained
        config.write("pad_token_id", nullptr);
    bool queries = model.bias || model.qkv_bias, output = model.bias, mlp = model.bias;
    config.flag("attention_bias", queries, true);
    config.flag("attention_out_bias", output, false);
    config.flag("mlp_bias", mlp, false);
    if (output != mlp)
        config.refuse("attention_out_bias", output ? "true" : "false", "the value of mlp_bias");
    if (mlp && !queries) config.refuse("attention_bias", "false", "true with mlp_bias");
    model.bias = mlp;
    model.qkv_bias = queries && !mlp;
}

inline void qwen3(HfConfig& config) {
    qwen_family(config, {.kv_heads = 32, .head_size = 128});
    config.only("attention_bias", false, true);
}

// Returns the fraction of a head that is rotated, such that a reader that multiplies it by the head size and
// rounds down gets rope_dims.
inline double rotated_share(const ModelConfig& c) {
    double share = (double)c.rope_dims / c.head_size;
    return (int)(c.head_size * share) == c.rope_dims ? share : std::nextafter(share, 1);
}

inline void gpt_neox(HfConfig& config) {
    ModelConfig& model = config.model;
    sizes(config);
    config.dropout("hidden_dropout");
    activation(config, "hidden_act", "gelu");
    config.real("layer_norm_eps", model.norm_eps, 1e-5f);
    bool parallel = model.block == BlockKind::parallel;
    config.flag("use_parallel_residual", parallel, true);
    model.block = parallel ? BlockKind::parallel : BlockKind::sequential;
    config.only("attention_bias", true, true);
    if (config.out) {
        config.write("rotary_pct", rotated_share(model));
        return rope(config, "rotary_emb_base");
    }
    JsonObject& json = *config.in;
    double rotated = json.number("rotary_pct", 1, 0.25);
    rope(config, "rotary_emb_base", &rotated);
    model.rope_dims = (int)(model.channels / model.heads * rotated);
    if (model.rope_dims < 2) config.refuse("rotary_pct", text("%g", rotated), "one pair per head or more");
    // Some versions of transformers write these in addition to the two above.
    float theta = model.rope_theta;
    config.real("rope_theta", theta, theta);
    if (theta != model.rope_theta)
        config.refuse("rope_theta", text("%g", theta), "the value of rotary_emb_base");
    if (double again = json.number("partial_rotary_factor", 1, rotated); again != rotated)
        config.refuse("partial_rotary_factor", text("%g", again), "the value of rotary_pct");
}

// Yuan 2.0, whose code is published with its models. Its config omits what all of its models share: RoPE's
// base, and the epsilon of the local filter's norm, which we require of all norms.
inline void yuan(HfConfig& config) {
    sizes(config);
    activation(config, "hidden_act", "silu");
    constexpr float filter_eps = 1e-6f;
    config.model.norm_eps = config.out ? filter_eps : config.model.norm_eps;
    config.real("rms_norm_eps", config.model.norm_eps);
    if (config.model.norm_eps != filter_eps)
        config.refuse("rms_norm_eps", number_text(config.model.norm_eps), number_text(filter_eps).c_str());
    config.only("causal_mask", true, true);
    if (config.in) return;
    config.write("auto_map", {{"AutoConfig", "configuration_yuan.YuanConfig"},
                              {"AutoModelForCausalLM", "yuan_hf_model.YuanForCausalLM"}});
    // Without these keys, that code uses tokens of its own vocabulary, or fails.
    config.write("eod_token", (*config.out)["eos_token_id"]);
    for (const char* key : {"pad_token_id", "sep_token"}) config.write(key, nullptr);
    for (const char* key :
         {"reset_attention_mask", "reset_position_ids", "use_flash_attention", "use_loss_mask"})
        config.write(key, false);
}

}  // namespace hf

// ----------------------------------------------------------------------------
// tensors

enum class HfOrder { straight, transposed, by_head, interleaved, paired, taps };

// One of their tensors, which holds one of ours or a section of one. The names omit .weight and .bias and, in
// a block, the prefix of the block.
struct HfRow {
    const char* theirs;
    const char* ours;
    HfOrder order = HfOrder::straight;
    int section = -1;              // the part of ours: queries, keys, values; or gates, values; -1: all
    const char* copies = nullptr;  // the tensor of ours that it repeats, if a model lacks `ours`
    bool has_bias = false;         // theirs has a bias, of zeros, and ours has none
};

struct HfFamily {
    const char* name;          // model_type in config.json
    const char* architecture;  // class in transformers
    const ModelConfig* base;   // the switches that all its models share, or their defaults
    void (*config)(HfConfig& config);
    const char* prefix;  // begins all names except the head's; files of a model without its head may lack it
    const char* block;   // prefix of the names in a block, before its number
    std::vector<HfRow> rows;
    const char* head = "lm_head.weight";
    const char* other_head = "";  // in files of some versions
    bool head_has_bias = false;
};

// clang-format off
inline const std::vector<HfFamily>& hf_families() {
    using enum HfOrder;
    static const ModelConfig gpt2 = {};
    static const ModelConfig neox = {.position = PositionKind::rope, .tie_embeddings = false};
    static const ModelConfig gptj = {.position = PositionKind::rope, .bias = false,
                                     .block = BlockKind::parallel, .tie_embeddings = false};
    static const ModelConfig llama = {.norm = NormKind::rmsnorm, .position = PositionKind::rope,
                                      .mlp = MlpKind::swiglu, .bias = false, .tie_embeddings = false};
    static const ModelConfig qwen2 = {.norm = NormKind::rmsnorm, .position = PositionKind::rope,
                                      .mlp = MlpKind::swiglu, .bias = false, .qkv_bias = true,
                                      .tie_embeddings = false};
    static const ModelConfig qwen3 = {.norm = NormKind::rmsnorm, .position = PositionKind::rope,
                                      .mlp = MlpKind::swiglu, .bias = false, .tie_embeddings = false,
                                      .qk_norm = true};
    static const ModelConfig yuan = {.norm = NormKind::rmsnorm, .position = PositionKind::rope,
                                     .mlp = MlpKind::swiglu, .bias = false, .local_filter = true};
    static const std::vector<HfRow> llama_rows = {
        {"embed_tokens", "wte"},
        {"input_layernorm", "norm1"},
        {"self_attn.q_proj", "qkv", straight, 0},
        {"self_attn.k_proj", "qkv", straight, 1},
        {"self_attn.v_proj", "qkv", straight, 2},
        {"self_attn.q_norm", "qnorm"},
        {"self_attn.k_norm", "knorm"},
        {"self_attn.o_proj", "attproj"},
        {"post_attention_layernorm", "norm2"},
        {"mlp.gate_proj", "fc", straight, 0},
        {"mlp.up_proj", "fc", straight, 1},
        {"mlp.down_proj", "fcproj"},
        {"norm", "normf"}};
    static const std::vector<HfFamily> table = {
        {"gpt2", "GPT2LMHeadModel", &gpt2, hf::gpt2, "transformer.", "h.", {
            {"wte", "wte"},
            {"wpe", "wpe"},
            {"ln_1", "norm1"},
            {"attn.c_attn", "qkv", transposed},
            {"attn.c_proj", "attproj", transposed},
            {"ln_2", "norm2"},
            {"mlp.c_fc", "fc", transposed},
            {"mlp.c_proj", "fcproj", transposed},
            {"ln_f", "normf"}}},
        {"llama", "LlamaForCausalLM", &llama, hf::llama, "model.", "layers.", llama_rows},
        {"mistral", "MistralForCausalLM", &llama, hf::mistral, "model.", "layers.", llama_rows},
        {"qwen2", "Qwen2ForCausalLM", &qwen2, hf::qwen2, "model.", "layers.", llama_rows},
        {"qwen3", "Qwen3ForCausalLM", &qwen3, hf::qwen3, "model.", "layers.", llama_rows},
        {"seed_oss", "SeedOssForCausalLM", &llama, hf::seed_oss, "model.", "layers.", llama_rows},
        {"yuan", "YuanForCausalLM", &yuan, hf::yuan, "model.", "layers.", {
            {"embed_tokens", "wte"},
            {"input_layernorm", "norm1"},
            {"self_attn.lf_gate.conv1", "filter1", taps},
            {"self_attn.lf_gate.conv2", "filter2", taps},
            {"self_attn.lf_gate.output_layernorm", "filternorm"},
            {"self_attn.q_proj", "qkv", paired, 0},
            {"self_attn.k_proj", "qkv", paired, 1},
            {"self_attn.v_proj", "qkv", straight, 2},
            {"self_attn.o_proj", "attproj"},
            {"post_attention_layernorm", "norm2"},
            {"mlp.up_proj", "fc", straight, 0},  // Yuan applies SiLU to this one
            {"mlp.gate_proj", "fc", straight, 1},
            {"mlp.down_proj", "fcproj"},
            {"norm", "normf"}}},
        {"gpt_neox", "GPTNeoXForCausalLM", &neox,
         hf::gpt_neox, "gpt_neox.", "layers.", {
            {"embed_in", "wte"},
            {"input_layernorm", "norm1"},
            {.theirs = "post_attention_layernorm", .ours = "norm2", .copies = "norm1"},
            {"attention.query_key_value", "qkv", by_head},
            {"attention.dense", "attproj"},
            {"mlp.dense_h_to_4h", "fc"},
            {"mlp.dense_4h_to_h", "fcproj"},
            {"final_layer_norm", "normf"}},
         "embed_out.weight", "lm_head.weight"},
        // GPT-J has biases, which must all be zero
        {"gptj", "GPTJForCausalLM", &gptj,
         hf::gptj, "transformer.", "h.", {
            {"wte", "wte"},
            {.theirs = "ln_1", .ours = "norm1", .has_bias = true},
            {"attn.q_proj", "qkv", interleaved, 0},
            {"attn.k_proj", "qkv", interleaved, 1},
            {"attn.v_proj", "qkv", straight, 2},
            {"attn.out_proj", "attproj"},
            {.theirs = "mlp.fc_in", .ours = "fc", .has_bias = true},
            {.theirs = "mlp.fc_out", .ours = "fcproj", .has_bias = true},
            {.theirs = "ln_f", .ours = "normf", .has_bias = true}},
         "lm_head.weight", "", true}};
    return table;
}
// clang-format on
