/*
Hugging Face config.json -> ModelConfig, and back, for the families that our switches express exactly. Every
key must be understood: one that is neither read nor known to leave the arithmetic alone is refused, so that a
variant of a family is never taken for the family itself. And a model is written only where reading it back
gives the same model.
*/
#pragma once

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

inline ModelConfig read_model(const nlohmann::json& json, const std::string& file) {
    JsonObject object(json, file);
    ignore_bystanders(object);
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
        object.done(HfConfig::remedy);
        return model;
    }
    fail("%s: model_type %s is not supported; only %s is", file.c_str(), printable(type).c_str(),
         alternatives(names).c_str());
}

}  // namespace hf

// It is left incomplete, so that options can still change what follows from them.
inline ModelConfig hf_model(const nlohmann::json& json, const std::string& file) {
    ModelConfig model = hf::read_model(json, file);
    try {
        checked_model(model);
    } catch (const Error& error) {
        fail("%s: %s", file.c_str(), error.what());
    }
    return model;
}

inline ModelConfig parse_hf_config(std::string_view source, const std::string& file) {
    return hf_model(parse_json(source, file), file);
}

// The token that ends a text, the first where a config names several; -1 where it names none of `vocab_size`.
inline int hf_end_of_text(const nlohmann::json& config, int vocab_size) {
    nlohmann::json end = config.value("eos_token_id", nlohmann::json());
    if (end.is_array() && !end.empty()) end = nlohmann::json(end[0]);
    int64_t token = end.is_number_integer() ? end.get<int64_t>() : -1;
    return token >= 0 && token < vocab_size ? (int)token : -1;
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

inline ModelConfig read_hf_config(const std::string& path) {
    return hf_model(read_hf_json(path), path);
}

// ----------------------------------------------------------------------------
// writing

namespace hf {

inline const HfFamily& nearest_family(const ModelConfig& c) {
    const char* name = c.position == PositionKind::learned ? "gpt2" : c.bias ? "gpt_neox" : "gptj";
    if (c.norm == NormKind::rmsnorm) name = c.qk_norm ? "qwen3" : c.window ? "mistral" : "llama";
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

// The config.json of a completed config, as family_config() has it.
inline nlohmann::ordered_json hf_config_json(const ModelConfig& c, const char* dtype, int document_end) {
    return hf::family_config(hf_family(c), c, dtype, document_end);
}
