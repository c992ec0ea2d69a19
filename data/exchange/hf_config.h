/*
Hugging Face config.json -> ModelConfig, and back, for the families that our switches express exactly. Of a
key that no family reads, a table tells whether it changes what a model computes (hf_keys.h): then it is
refused, so that a variant of a family is never taken for the family itself. A model is written only where
reading it back gives the same model. One that was imported goes out with the config that it came with, while
that tells of it.
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

// Adds keys that nobody knows to `unknown`.
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

// It is left incomplete, so that options can still change what follows from them. What there is to tell is
// added to `notes`.
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
        notes.push_back(
            text("%s: not known here, and passed over: %s; look whether the model computes the same "
                 "without",
                 file.c_str(), names.c_str()));
    }
    return model;
}

// The tokens that end a text, by a config.json or a generation_config.json, without any beyond `vocab_size`.
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

// The path of the config that a --model argument names, or nothing if it names none.
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
    // transformers 5 takes no Llama of an uneven width, but a Mistral without a window and, with biases, a
    // Seed-OSS
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

// Writes what a family says of a model. `dtype` is what torch calls that of the weights; the token that ends
// a document, or -1, begins a text too.
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

// Names the token that ends a document, which may have changed since the config came. -1: nothing is known.
inline void keep_end(HfConfig::Json& config, int document_end) {
    std::vector<int> ends = hf_ends_of_text(config, INT_MAX);
    if (document_end >= 0 && std::find(ends.begin(), ends.end(), document_end) == ends.end())
        config["eos_token_id"] = document_end;
}

}  // namespace hf

// The family that expresses a completed config: what is written of it reads back as the same model. One that
// no family expresses is refused by the option that stands in the way.
inline const HfFamily& hf_family(const ModelConfig& c) {
    const HfFamily& family = hf::nearest_family(c);
    ModelConfig back = hf::read_model(nlohmann::json(hf::family_config(family, c, "", -1)), "config.json");
    check_same_model(c, back, text("Hugging Face's %s, the nearest family,", family.name),
                     "train such a model to export it");
    return family;
}

// The config.json of a completed config, as family_config() has it. `published` is the one that it came with,
// or null: it goes out again while it tells of this model, with our dtype and end of a document.
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
