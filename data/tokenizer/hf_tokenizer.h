/*
A tokenizer as stored by Hugging Face's `tokenizers` library in a tokenizer.json: byte-pair encoding, over
bytes (GPT-2, Llama 3, Qwen) or over characters with bytes as a fallback (Llama 2, Mistral). It gives the same
ids as the library (0.23) for any text (pattern.h and normal_form.h describe how the newest characters
differ), and refuses by name any feature in a file that it does not support.

The library accepts only text. Here any bytes can be encoded: a byte that is not part of a UTF-8 character
counts as a character that is neither letter, digit nor space.

decode(encode(text)) == text, unless the file itself asks for a change: a normal form, a prepended space,
white space that an added token consumes, U+2581 in place of a space. changes_text() returns whether it does.
*/
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/tokenizer/added_tokens.h"
#include "data/tokenizer/bpe.h"
#include "data/tokenizer/byte_alphabet.h"
#include "data/tokenizer/normalizer.h"
#include "data/tokenizer/pre_tokenizer.h"

// The content of a tokenizer.json.
struct TokenizerParts {
    std::vector<std::string> vocabulary;  // by id, written as in the file; empty for unused ids
    std::vector<Merge> merges;            // in order of rank
    BpeOptions options;
    std::string unknown_token;  // never produced, because every byte has a token
    bool fuse_unknown = false;
    std::vector<AddedToken> added;
    nlohmann::json normalizer, pre_tokenizer, post_processor, decoder;  // sections of the file, unchanged
};

class HfTokenizer {
public:
    // `file` names the source in messages.
    HfTokenizer(TokenizerParts parts, const std::string& file)
        : parts_(std::make_unique<TokenizerParts>(std::move(parts))),
          file_(file),
          normalizer_(parts_->normalizer, file),
          pre_tokenizer_(parts_->pre_tokenizer, file),
          bpe_(make_bpe()) {
        make_tokens();
        read_decoder(parts_->decoder, file + ": decoder");
        check_decoder();
        for (size_t id = 0; id < bytes_.size(); id++) {
            if (!texts_[id].empty()) bytes_[id] = bytes_of(texts_[id], added_[id]);
        }
        read_post_processor(parts_->post_processor, file + ": post_processor");
        // If two added tokens have the same content, the library prefers the special one.
        for (bool special : {true, false}) {
            for (const AddedToken& token : parts_->added) {
                if (token.special != special) continue;
                std::string content = token.normalized ? normalizer_.apply(token.content) : token.content;
                check_added_token(content, file);
                (token.normalized ? in_normalized_ : in_raw_).add(content, token);
            }
        }
    }

    // Reads and writes a tokenizer.json; defined in data/tokenizer/tokenizer_json.h.
    static HfTokenizer read(const std::string& path);
    void write(const std::string& path) const;

    // Encodes a text. Any number of threads may encode with one tokenizer at the same time.
    void encode(std::string_view text, std::vector<int>& tokens /* replaced */,
                SpecialTokens special = SpecialTokens::as_text) const {
        tokens.clear();
        auto add = [&](int id) { tokens.push_back(id); };
        in_raw_.split(
            text, special,
            [&](size_t begin, size_t end) {
                std::string_view part = text.substr(begin, end - begin);
                if (normalizer_.changes_nothing())
                    return encode_normalized(part, begin == 0, special, tokens);
                encode_normalized(normalizer_.apply(part), begin == 0, special, tokens);
            },
            add);
    }

    std::vector<int> encode(std::string_view text, SpecialTokens special = SpecialTokens::as_text) const {
        std::vector<int> tokens;
        encode(text, tokens, special);
        return tokens;
    }

    // Returns the bytes of a text, without the leading spaces that the file's decoder strips.
    std::string decode(const std::vector<int>& tokens) const {
        std::string text;
        for (int token : tokens) text += token_bytes(token);
        size_t drop = 0;
        while (drop < text.size() && drop < (size_t)dropped_spaces_ && text[drop] == ' ') drop++;
        return text.substr(drop);
    }

    // The bytes that a token adds to the text; an added token adds its name.
    const std::string& token_bytes(int token) const {
        if (!has(token)) {
            fail("token %d: is not in the vocabulary of %d; check the tokenizer", token, vocab_size());
        }
        return bytes_[(size_t)token];
    }

    // Ids below vocab_size() may be unused.
    bool has(int token) const { return token >= 0 && token < vocab_size() && !texts_[(size_t)token].empty(); }

    // The number of spaces that decoding strips from the start of a text.
    int dropped_spaces() const { return dropped_spaces_; }

    // The highest id plus one.
    int vocab_size() const { return (int)texts_.size(); }

    // Finds a token by its text in the file: "Ġthe", "<|endoftext|>".
    std::optional<int> id_of(std::string_view token) const {
        auto found = ids_.find(token);
        return found == ids_.end() ? std::nullopt : std::optional(found->second);
    }

    bool is_special(int token) const {
        return token >= 0 && token < vocab_size() && added_[(size_t)token] && added_[(size_t)token]->special;
    }

    // Returns whether decode(encode(text)) may differ from the text.
    bool changes_text() const {
        bool takes_space = std::any_of(parts_->added.begin(), parts_->added.end(),
                                       [](const AddedToken& token) { return token.lstrip || token.rstrip; });
        return !normalizer_.changes_nothing() || pre_tokenizer_.adds_space() || takes_space ||
               dropped_spaces_ > 0;
    }

    // The tokens that the library puts before a text, such as the one that begins it.
    const std::vector<int>& before_text() const { return before_text_; }

    const TokenizerParts& parts() const { return *parts_; }

private:
    void encode_normalized(std::string_view text, bool leading, SpecialTokens special,
                           std::vector<int>& tokens) const {
        auto word = [&](std::string_view piece) { bpe_.encode_word(piece, tokens); };
        in_normalized_.split(
            text, special,
            [&](size_t begin, size_t end) {
                pre_tokenizer_.split(text.substr(begin, end - begin), leading && begin == 0, word);
            },
            [&](int id) { tokens.push_back(id); });
    }

    Bpe make_bpe() const {
        bool byte_level = pre_tokenizer_.byte_level();
        if (byte_level == parts_->options.byte_fallback) {
            fail("%s: model: %s, so %s; use a tokenizer with exactly one of the two", file_.c_str(),
                 byte_level ? "byte_fallback is on and the pre_tokenizer is ByteLevel"
                            : "byte_fallback is off and the pre_tokenizer is not ByteLevel",
                 byte_level ? "bytes can be written in two ways" : "some text cannot be encoded");
        }
        std::vector<std::string> tokens = parts_->vocabulary;
        for (std::string& token : tokens) {
            // Words are written in the byte alphabet, so a token with other characters cannot occur in one.
            if (byte_level) token = from_byte_alphabet(token).value_or("");
        }
        return Bpe(std::move(tokens), parts_->merges, parts_->options, file_);
    }

    void make_tokens() {
        texts_ = parts_->vocabulary;
        for (const AddedToken& token : parts_->added) {
            if (texts_.size() <= (size_t)token.id) texts_.resize((size_t)token.id + 1);
            texts_[(size_t)token.id] = token.content;
        }
        added_.resize(texts_.size());
        bytes_.resize(texts_.size());
        for (const AddedToken& token : parts_->added) added_[(size_t)token.id] = &token;
        for (size_t id = 0; id < texts_.size(); id++) {
            if (!texts_[id].empty()) ids_.emplace(texts_[id], (int)id);
        }
    }

    // ------------------------------------------------------------------------
    // decoding

    void read_decoder(const nlohmann::json& settings, const std::string& where) {
        JsonObject object(settings, where);
        std::string type = object.string("type");
        bool fused = !decoding_.empty() && decoding_.back() >= Decoding::fuse;
        Decoding step;
        if (type == "Sequence") {
            for (const auto& each : object.array("decoders")) read_decoder(each, where);
            return object.done(unsupported_remedy);
        } else if (type == "ByteLevel") {
            for (const char* name : {"add_prefix_space", "trim_offsets", "use_regex"}) object.ignore(name);
            step = Decoding::byte_level;
        } else if (type == "Replace") {
            std::string what = Normalizer::read_replaced(object);
            replacements_.push_back({what, object.string("content")});
            step = Decoding::replace;
        } else if (type == "ByteFallback") {
            step = Decoding::byte_fallback;
        } else if (type == "Fuse") {
            step = Decoding::fuse;
        } else if (type == "Strip" && fused) {
            if (object.string("content") != " " || object.integer("stop", 0, 1 << 20) != 0)
                fail("%s: Strip is supported only for leading spaces; use another decoder", where.c_str());
            dropped_spaces_ += (int)object.integer("start", 0, 1 << 20);
            step = Decoding::strip;
        } else {
            fail("%s: %s is not supported here; use ByteLevel, or a Sequence of Replace, ByteFallback, Fuse "
                 "and Strip",
                 where.c_str(), printable(type).c_str());
        }
        if (!decoding_.empty() && decoding_.back() > step)
            fail("%s: %s comes too late; put it before the steps that join tokens", where.c_str(),
                 printable(type).c_str());
        decoding_.push_back(step);
        check_steps(decoding_.size(), where);
        object.done(unsupported_remedy);
    }

    void check_decoder() const {
        bool bytes = std::find(decoding_.begin(), decoding_.end(), Decoding::byte_level) != decoding_.end();
        bool fallback =
            std::find(decoding_.begin(), decoding_.end(), Decoding::byte_fallback) != decoding_.end();
        bool alone = decoding_.size() == 1;
        if (pre_tokenizer_.byte_level() ? !bytes || !alone : bytes || !fallback) {
            fail("%s: decoder: does not fit the model; it must %s", file_.c_str(),
                 pre_tokenizer_.byte_level() ? "be ByteLevel" : "have a ByteFallback and no ByteLevel");
        }
    }

    // The library decodes a normalized added token to its normalized content, which it also searches for.
    // Here added tokens are plain text; the library decodes them from the byte alphabet if it can, so that
    // "é" becomes half a character.
    std::string bytes_of(const std::string& text, const AddedToken* added) const {
        std::string result = added && added->normalized ? normalizer_.apply(text) : text;
        if (pre_tokenizer_.byte_level()) return added ? result : from_byte_alphabet(text).value_or(text);
        std::string where = file_ + ": decoder";
        GrowthLimit limit(text, where);
        for (const auto& [what, with] : replacements_) result = limit.replaced(result, what, with);
        bool byte = result.size() == 6 && result.starts_with("<0x") && result.ends_with('>') &&
                    isxdigit((unsigned char)result[3]) && isxdigit((unsigned char)result[4]);
        return byte ? std::string(1, (char)std::stoi(result.substr(3, 2), nullptr, 16)) : result;
    }

    // ------------------------------------------------------------------------
    // tokens that the library adds around a text

    void read_post_processor(const nlohmann::json& settings, const std::string& where) {
        if (settings.is_null()) return;
        JsonObject object(settings, where);
        std::string type = object.string("type");
        if (type == "Sequence") {
            for (const auto& each : object.array("processors")) read_post_processor(each, where);
        } else if (type == "ByteLevel") {
            for (const char* name : {"add_prefix_space", "trim_offsets", "use_regex"}) object.ignore(name);
        } else if (type == "TemplateProcessing") {
            object.ignore("pair");
            read_template(object.get("single"), object.get("special_tokens"), where);
        } else {
            fail("%s: %s is not supported; use TemplateProcessing or ByteLevel", where.c_str(),
                 printable(type).c_str());
        }
        object.done(unsupported_remedy);
    }

    // Finds the tokens that a template puts before a text. encode() adds none.
    void read_template(const nlohmann::json& single, const nlohmann::json& special,
                       const std::string& where) {
        if (!single.is_array()) return;
        for (const nlohmann::json& piece : single) {
            JsonObject object(piece, where + ": single");
            if (!object.has("SpecialToken")) return;  // the text
            JsonObject ids(special, where + ": special_tokens");
            JsonObject token = ids.child(object.child("SpecialToken").string("id"));
            for (const nlohmann::json& id : token.array("ids"))
                before_text_.push_back((int)json_integer(id, 0, vocab_size() - 1, token.where("ids")));
        }
    }

    // in the order in which a file must list them
    enum class Decoding { byte_level, replace, byte_fallback, fuse, strip };

    struct Hash {
        using is_transparent = void;
        size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
    };

    std::unique_ptr<TokenizerParts> parts_;
    std::string file_;
    Normalizer normalizer_;
    PreTokenizer pre_tokenizer_;
    Bpe bpe_;
    AddedTokenFinder in_raw_, in_normalized_;
    std::vector<std::string> texts_, bytes_;  // by id: as written in the file, and as decoded
    std::vector<const AddedToken*> added_;    // by id; null for other tokens
    std::unordered_map<std::string, int, Hash, std::equal_to<>> ids_;
    std::vector<Decoding> decoding_;
    std::vector<std::pair<std::string, std::string>> replacements_;
    int dropped_spaces_ = 0;
    std::vector<int> before_text_;
};
