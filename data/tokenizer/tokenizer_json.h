/*
Reads and writes tokenizer.json, the file of Hugging Face's `tokenizers`: an unknown field is refused by name,
and output has the library's format.
*/
#pragma once

#include <climits>
#include <string>
#include <unordered_map>
#include <vector>

#include "data/base/file.h"
#include "data/tokenizer/hf_tokenizer.h"

class TokenizerJsonReader {
public:
    TokenizerJsonReader(std::string_view source, std::string file) : file_(std::move(file)) {
        nlohmann::json document = parse_json(source, file_);
        JsonObject object(document, file_);
        const nlohmann::json& version = object.get("version");
        if (!version.is_null() && version != "1.0") {
            fail("%s: unknown version %s; it must be \"1.0\"", file_.c_str(), json_text(version).c_str());
        }
        object.without("truncation", unsupported_remedy);
        object.without("padding", unsupported_remedy);
        read_model(object.get("model"));
        if (!object.get("added_tokens").is_null()) read_added_tokens(object.array("added_tokens"));
        parts_.normalizer = object.get("normalizer");
        parts_.pre_tokenizer = object.get("pre_tokenizer");
        parts_.post_processor = object.get("post_processor");
        parts_.decoder = object.get("decoder");
        object.done(unsupported_remedy);
    }

    HfTokenizer tokenizer() && { return HfTokenizer(std::move(parts_), file_); }

private:
    void read_model(const nlohmann::json& settings) {
        JsonObject model(settings, file_ + ": model");
        const nlohmann::json& type = model.get("type");
        if (!type.is_null() && type != "BPE")
            fail("%s: model %s is not supported; it must be BPE", file_.c_str(), json_text(type).c_str());
        for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"})
            model.without(name, unsupported_remedy);
        if (!model.get("unk_token").is_null()) parts_.unknown_token = model.string("unk_token");
        parts_.fuse_unknown = model.boolean("fuse_unk", false);
        parts_.options.byte_fallback = model.boolean("byte_fallback", false);
        parts_.options.ignore_merges = model.boolean("ignore_merges", false);
        read_vocabulary(model.get("vocab"));
        read_merges(model.array("merges"));
        model.done(unsupported_remedy);
    }

    void read_vocabulary(const nlohmann::json& vocabulary) {
        JsonObject(vocabulary, file_ + ": model: vocab");
        for (const auto& [token, value] : vocabulary.items()) {
            size_t id = (size_t)json_integer(value, 0, highest_id(vocabulary.size()),
                                             file_ + ": model: vocab: \"" + printable(token) + "\"");
            if (token.empty())
                fail("%s: model: vocab: token %zu is empty; give it some text", file_.c_str(), id);
            if (id >= parts_.vocabulary.size()) parts_.vocabulary.resize(id + 1);
            if (!parts_.vocabulary[id].empty()) {
                fail("%s: model: vocab: \"%s\" and \"%s\" are both token %zu; give each its own id",
                     file_.c_str(), printable(parts_.vocabulary[id]).c_str(), printable(token).c_str(), id);
            }
            parts_.vocabulary[id] = token;
            ids_.emplace(token, (int)id);
        }
        if (ids_.empty()) fail("%s: model: vocab is empty; use another tokenizer", file_.c_str());
    }

    int id_of(const std::string& token, size_t rank) const {
        auto found = ids_.find(token);
        if (found == ids_.end()) {
            fail("%s: model: merge %zu has \"%s\", which is not in the vocabulary; the file is damaged",
                 file_.c_str(), rank, printable(token).c_str());
        }
        return found->second;
    }

    // Each merge is two strings, or one with a space between the parts.
    void read_merges(const nlohmann::json& merges) {
        for (size_t rank = 0; rank < merges.size(); rank++) {
            const nlohmann::json& merge = merges[rank];
            std::string left, right;
            if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
                left = merge[0].get<std::string>(), right = merge[1].get<std::string>();
            } else if (merge.is_string()) {
                left = merge.get<std::string>();
                if (left.starts_with("#version")) continue;
                size_t space = left.find(' ');
                if (space == left.npos || left.find(' ', space + 1) != left.npos)
                    fail("%s: model: merge %zu is not two strings with a space between; the file is damaged",
                         file_.c_str(), rank);
                right = left.substr(space + 1);
                left.resize(space);
            } else {
                fail("%s: model: merge %zu is %s; it must be two strings", file_.c_str(), rank,
                     json_text(merge).c_str());
            }
            parts_.merges.push_back({id_of(left, rank), id_of(right, rank), id_of(left + right, rank)});
        }
    }

    // The library ignores the id here: it looks the text up in the vocabulary, or uses the next free number.
    void read_added_tokens(const nlohmann::json& tokens) {
        int next = (int)ids_.size(), highest = -1;
        std::unordered_map<std::string, int> seen;
        for (const auto& settings : tokens) {
            JsonObject object(settings, file_ + ": added_tokens");
            AddedToken token;
            token.content = object.string("content");
            std::string what = file_ + ": added_tokens: \"" + printable(token.content) + "\"";
            token.id = (int)object.integer("id", 0, INT_MAX);
            token.lstrip = object.boolean("lstrip", false);
            token.rstrip = object.boolean("rstrip", false);
            token.special = object.boolean("special", false);
            token.normalized = object.boolean("normalized", !token.special);
            if (object.boolean("single_word", false))
                fail("%s: single_word is not supported; set it to false", what.c_str());
            object.done(unsupported_remedy);
            if (token.content.empty()) fail("%s: is empty; give it some text", what.c_str());
            if (!seen.emplace(token.content, token.id).second)
                fail("%s: appears twice; leave one out", what.c_str());
            auto found = ids_.find(token.content);
            int given = found != ids_.end() ? found->second : std::max(next, highest + 1);
            if (given != token.id) {
                fail("%s: has the id %d, but the tokenizers library assigns it %d; change the id to that",
                     what.c_str(), token.id, given);
            }
            if (found == ids_.end() && (size_t)given < parts_.vocabulary.size() &&
                !parts_.vocabulary[(size_t)given].empty()) {
                fail("%s: has the id of \"%s\"; give it its own id", what.c_str(),
                     printable(parts_.vocabulary[(size_t)given]).c_str());
            }
            highest = std::max(highest, given);
            parts_.added.push_back(std::move(token));
        }
    }

    std::string file_;
    TokenizerParts parts_;
    std::unordered_map<std::string, int> ids_;  // the vocabulary
};

// Parses the content of a file; `file` names it in messages.
inline HfTokenizer parse_tokenizer_json(std::string_view source, const std::string& file) {
    return TokenizerJsonReader(source, file).tokenizer();
}

inline HfTokenizer HfTokenizer::read(const std::string& path) {
    MappedFile file(path);
    return parse_tokenizer_json({file.data(), file.size()}, path);
}

// Returns the content of a tokenizer.json.
inline std::string tokenizer_json(const TokenizerParts& parts) {
    auto quoted = [](const std::string& text) { return nlohmann::json(text).dump(); };
    auto boolean = [](bool value) { return value ? "true" : "false"; };
    std::string out =
        "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n  \"added_tokens\": [";
    const char* comma = "";
    for (const AddedToken& token : parts.added) {
        out += text("%s\n    {\"id\": %d, \"content\": ", comma, token.id) + quoted(token.content);
        out += text(
            ", \"single_word\": false, \"lstrip\": %s, \"rstrip\": %s, \"normalized\": %s, \"special\": %s}",
            boolean(token.lstrip), boolean(token.rstrip), boolean(token.normalized), boolean(token.special));
        comma = ",";
    }
    out += "\n  ],\n";
    for (auto [name, value] : {std::pair("normalizer", &parts.normalizer),
                               {"pre_tokenizer", &parts.pre_tokenizer},
                               {"post_processor", &parts.post_processor},
                               {"decoder", &parts.decoder}})
        out += text("  \"%s\": ", name) + value->dump() + ",\n";
    out += "  \"model\": {\n    \"type\": \"BPE\",\n    \"dropout\": null,\n    \"unk_token\": ";
    out += parts.unknown_token.empty() ? "null" : quoted(parts.unknown_token);
    out += ",\n    \"continuing_subword_prefix\": null,\n    \"end_of_word_suffix\": null,\n";
    out += text(
        "    \"fuse_unk\": %s,\n    \"byte_fallback\": %s,\n    \"ignore_merges\": %s,\n    \"vocab\": {",
        boolean(parts.fuse_unknown), boolean(parts.options.byte_fallback),
        boolean(parts.options.ignore_merges));
    // Added tokens that the library would number differently are written into the vocabulary, where it looks
    // them up.
    std::vector<std::string> vocabulary = parts.vocabulary;
    int next = (int)(vocabulary.size() - (size_t)std::count(vocabulary.begin(), vocabulary.end(), ""));
    std::unordered_map<std::string_view, size_t> ids;
    for (size_t id = 0; id < parts.vocabulary.size(); id++) ids.emplace(parts.vocabulary[id], id);
    bool counted = true;
    for (const AddedToken& token : parts.added) {
        if (ids.contains(token.content)) continue;
        counted &= token.id == next++;
    }
    for (const AddedToken& token : parts.added) {
        if (counted || ids.contains(token.content)) continue;
        if (vocabulary.size() <= (size_t)token.id) vocabulary.resize((size_t)token.id + 1);
        vocabulary[(size_t)token.id] = token.content;
    }
    comma = "";
    for (size_t id = 0; id < vocabulary.size(); id++) {
        if (vocabulary[id].empty()) continue;
        out += text("%s\n      ", comma) + quoted(vocabulary[id]) + text(": %zu", id);
        comma = ",";
    }
    out += "\n    },\n    \"merges\": [";
    comma = "";
    for (const Merge& merge : parts.merges) {
        out += text("%s\n      [", comma) + quoted(parts.vocabulary[(size_t)merge.left]) + ", " +
               quoted(parts.vocabulary[(size_t)merge.right]) + "]";
        comma = ",";
    }
    return out + "\n    ]\n  }\n}\n";
}

inline void HfTokenizer::write(const std::string& path) const {
    write_whole(path, tokenizer_json(parts()));
}
