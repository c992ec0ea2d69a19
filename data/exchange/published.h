/*
The text files of a Hugging Face folder, which describe a model beyond its weights and its tokenizer. The
header of each checkpoint of the run contains them unchanged ("published"), so that an export restores the
tokens that end a text, the chat template, the names, and anything else that no option of ours represents.
*/
#pragma once

#include <nlohmann/json.hpp>
#include <xxhash.h>

#include <filesystem>
#include <string>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"
#include "data/checkpoint/index.h"
#include "data/exchange/hf_config.h"

class PublishedFiles {
public:
    static constexpr const char *config = "config.json", *generation = "generation_config.json",
                                *tokenizer = "tokenizer_config.json";

    // Reads the files of a folder. A file that cannot be read is reported in `remarks`.
    PublishedFiles(const std::string& folder, std::vector<std::string>& remarks)
        : files_(nlohmann::ordered_json::object()) {
        constexpr uint64_t most = 8 << 20;
        std::error_code not_there;
        for (const char* name :
             {config, generation, tokenizer, "special_tokens_map.json", "chat_template.jinja"}) {
            std::string path = folder + "/" + name, error;
            if (!std::filesystem::exists(path, not_there)) continue;
            note_error(error, [&] {
                std::string source = read_whole(path, most, "too large for a settings file");
                if (path.ends_with(".json")) JsonObject(parse_json(source, path), path);
                files_[name] = source;
            });
            if (!error.empty()) remarks.push_back(error + "; exports will not contain it");
        }
    }

    // Takes the files from the header of a checkpoint.
    explicit PublishedFiles(const nlohmann::ordered_json& about)
        : files_(about.value(published_key, nlohmann::ordered_json::object())) {}

    const nlohmann::ordered_json& to_json() const { return files_; }

    // The tokenizer.json that these files belong to is identified by its hash.
    void set_tokenizer(const std::string& json) { files_["tokenizer"] = hash_of(json); }
    bool tell_of(const std::string& tokenizer_json) const {
        return source("tokenizer") == hash_of(tokenizer_json);
    }

    // Returns the content of a file; empty if there is none.
    std::string source(const std::string& name) const {
        auto file = files_.find(name);
        return file != files_.end() && file->is_string() ? file->get<std::string>() : "";
    }

    // Returns the content of a file as JSON; null if there is none, or it is not valid.
    nlohmann::ordered_json json(const char* name) const {
        auto json = try_json<nlohmann::ordered_json>(source(name));
        return json.is_object() ? json : nlohmann::ordered_json();
    }

    // Returns the tokens that end a generated text. generation_config.json takes precedence over config.json,
    // as in transformers.
    std::vector<int> ends_of_text(int vocab_size) const {
        for (const char* name : {generation, config}) {
            nlohmann::ordered_json said = json(name);
            if (said.is_null()) continue;
            if (auto ends = hf_ends_of_text(said, vocab_size); !ends.empty()) return ends;
        }
        return {};
    }

private:
    static std::string hash_of(const std::string& json) {
        return text("%016llx", (unsigned long long)XXH3_64bits(json.data(), json.size()));
    }

    nlohmann::ordered_json files_;  // texts by name
};
