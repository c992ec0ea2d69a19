/*
Hugging Face config.json -> ModelConfig, for the families that our switches express exactly. Every key must be
understood: one that is neither read nor known to leave the arithmetic alone is refused, so that a variant of
a family is never taken for the family itself.
*/
#pragma once

#include <filesystem>
#include <string>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/exchange/hf_families.h"
#include "data/base/json.h"
#include "data/options/model_config.h"
#include "data/options/values.h"  // checked_model

inline ModelConfig hf_model(const nlohmann::json& json, const std::string& file) {
    JsonObject config(json, file);
    hf::ignore_bystanders(config);
    std::string type = config.string("model_type");
    ModelConfig model;
    if (type == "gpt2")
        model = hf::gpt2(config);
    else if (type == "llama")
        model = hf::llama(config);
    else if (type == "mistral")
        model = hf::mistral(config);
    else if (type == "qwen3")
        model = hf::qwen3(config);
    else if (type == "gpt_neox")
        model = hf::gpt_neox(config);
    else if (type == "gptj")
        model = hf::gptj(config);
    else
        hf::refuse(config, "model_type", type, "gpt2, llama, mistral, qwen3, gpt_neox or gptj");
    config.done(hf::unknown_remedy);
    try {
        checked_model(
            model);  // itself left incomplete, so that options can still change what follows from them
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
