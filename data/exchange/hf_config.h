/*
Hugging Face config.json -> ModelConfig, and back, for the families that our options express exactly. A key
that no family reads is refused if it changes what a model computes, according to hf_keys.h, so that a variant
of a family is never mistaken for the family itself. A model is exported only if reading it back gives the
same model. An imported model is exported with its original config, as long as that describes it.
*/
#pragma once

#include <algorithm>
#include <climits>
#include <filesystem>
#include <string>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"
#include "data/exchange/hf_families.h"
#include "data/exchange/same_model.h"
#include "data/options/model_config.h"
#include "data/options/values.h"

namespace hf {

// Returns the model that a config.json describes. Keys that are in no table are added to `unknown`.
inline ModelConfig read_model(const nlohmann::json& json, const std::string& file,
                              std::vector<std::string>& unknown) {
    JsonObject object(json, file);
    std::string type = object.string("model_type");
    std::vector<std::string> names;
    for (const HfFamily& family : hf_families()) {
        names.push_back(family.name);
        if (type != family.name) continue;
        ModelConfig model = *family.base;
        HfConfig config(object, model);
        config.size("vocab_size", model.vocab_size);
        config.flag("tie_word_embeddings", model.tie_embeddings, model.tie_embeddings);
        config.only("is_causal", true);
        family.config(config);
        read_others(object, HfConfig::remedy, config.unknown);
        unknown = config.unknown;
        return model;
    }
    fail("%s: model_type %s is not supported; only %s is", file.c_str(), printable(type).c_str(),
         alternatives(names).c_str());
}

inline ModelConfig read_model(const nlohmann::json& json, const std::string& file) {
    std::vector<std::string> unknown;
    return read_model(json, file, unknown);
}

}  // namespace hf

// Returns an incomplete config, so that options can still change the values from which others are derived.
// Remarks are added to `notes`.
inline ModelConfig hf_model(const nlohmann::json& json, const std::string& file,
                            std::vector<std::string>& notes) {
    std::vector<std::string> unknown;
    ModelConfig model = hf::read_model(json, file, unknown);
    try {
        checked_model(model);
    } catch (const Error& error) {
        fail("%s: %s", file.c_str(), error.what());
    }
    std::string names;
    for (const std::string& key : unknown) append_item(names, printable(key));
    if (!names.empty()) {
        notes.push_back(text("%s: unknown keys, ignored: %s; check that the model computes the same "
                             "without them",
                             file.c_str(), names.c_str()));
    }
    return model;
}

// Returns the tokens that end a text, from a config.json or a generation_config.json, except those beyond
// `vocab_size`.
inline std::vector<int> hf_ends_of_text(const HfConfig::Json& config, int vocab_size) {
    HfConfig::Json named = config.value("eos_token_id", HfConfig::Json());
    std::vector<int> ends;
    if (!named.is_array()) named = HfConfig::Json::array({named});
    for (const HfConfig::Json& end : named) {
        int64_t token = end.is_number_integer() ? end.get<int64_t>() : -1;
        if (token >= 0 && token < vocab_size) ends.push_back((int)token);
    }
    return ends;
}

// Returns the path of the config that a --model argument names; empty if it names none.
inline std::string hf_config_path(const std::string& model) {
    std::error_code ignored;
    if (std::filesystem::is_directory(model, ignored)) return model + "/config.json";
    return std::filesystem::exists(model, ignored) ? model : "";
}

inline nlohmann::json read_hf_json(const std::string& path) {
    return parse_json(read_whole(path, 1 << 20, "a config.json is smaller than a megabyte"), path);
}

inline ModelConfig read_hf_config(const std::string& path, std::vector<std::string>& notes) {
    return hf_model(read_hf_json(path), path, notes);
}

// ----------------------------------------------------------------------------
// writing

namespace hf {

inline const HfFamily& nearest_family(const ModelConfig& c) {
    const char* name = c.position == PositionKind::learned ? "gpt2" : c.bias ? "gpt_neox" : "gptj";
    // transformers 5 rejects a Llama whose width is not a multiple of its number of heads, but accepts the
    // same model as a Mistral without a window or, with biases, as a Seed-OSS
    bool uneven = c.channels % c.heads, biased = c.bias || c.qkv_bias;
    const char* plain = !uneven ? "llama" : biased ? "seed_oss" : "mistral";
    if (c.norm == NormKind::rmsnorm) {
        bool qwen2 = c.qkv_bias && (c.window || !uneven);
        name = c.qk_norm ? "qwen3" : qwen2 ? "qwen2" : c.window ? "mistral" : plain;
    }
    if (c.local_filter) name = "yuan";
    for (const HfFamily& family : hf_families()) {
        if (family.name == std::string_view(name)) return family;
    }
    fail("%s: no such family; give it a row in hf_families()", name);
}

// Returns the config.json of a model of this family. `dtype` is the torch name of the weights' dtype.
// `document_end`, the token that ends a document (-1: none), is also written as the one that begins a text.
inline HfConfig::Json family_config(const HfFamily& family, const ModelConfig& c, const char* dtype,
                                    int document_end) {
    HfConfig::Json json, end;
    if (document_end >= 0) end = document_end;
    HfConfig config(c, json);
    json["model_type"] = family.name;
    json["architectures"] = {family.architecture};
    json["torch_dtype"] = dtype;
    config.size("vocab_size", config.model.vocab_size);
    config.flag("tie_word_embeddings", config.model.tie_embeddings, false);
    json["bos_token_id"] = end;
    json["eos_token_id"] = end;
    family.config(config);
    return json;
}

inline bool reads_as(const nlohmann::json& json, const ModelConfig& c) {
    try {
        check_same_model(c, read_model(json, "config.json"), "", "");
        return true;
    } catch (const Error&) {
        return false;
    }
}

// Sets the token that ends a document (-1: unknown) if the config does not have it, because the token may
// have changed since the import.
inline void keep_end(HfConfig::Json& config, int document_end) {
    std::vector<int> ends = hf_ends_of_text(config, INT_MAX);
    if (document_end >= 0 && std::find(ends.begin(), ends.end(), document_end) == ends.end())
        config["eos_token_id"] = document_end;
}

}  // namespace hf

// Returns the family that expresses a completed config: its config.json reads back as the same model. If
// there is none, the option that prevents it is refused.
inline const HfFamily& hf_family(const ModelConfig& c) {
    const HfFamily& family = hf::nearest_family(c);
    ModelConfig back = hf::read_model(nlohmann::json(hf::family_config(family, c, "", -1)), "config.json");
    check_same_model(c, back, text("Hugging Face's %s, the nearest family,", family.name),
                     "only a model with that value can be exported");
    return family;
}

// Returns the config.json of a completed config. `published` is the one that the model was imported with, or
// null: if it describes this model, it is kept except for the dtype and the document end.
inline nlohmann::ordered_json hf_config_json(const ModelConfig& c, const char* dtype, int document_end,
                                             const HfConfig::Json& published = {}) {
    const HfFamily& family = hf_family(c);
    if (published.is_null() || !hf::reads_as(nlohmann::json(published), c))
        return hf::family_config(family, c, dtype, document_end);
    HfConfig::Json json = published;
    for (const char* key : {"torch_dtype", "dtype"}) {
        if (json.contains(key) && !json[key].is_null()) json[key] = dtype;
    }
    hf::keep_end(json, document_end);
    return json;
}
