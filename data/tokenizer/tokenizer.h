/*
Text to tokens and back, with one of three kinds of tokenizer:

    bytes           each byte is a token (0 .. 255), and 256 ends a text: no file, no training
    tokenizer.json  of Hugging Face tokenizers (data/tokenizer/hf_tokenizer.h)
    rank files      of tiktoken (data/tokenizer/tiktoken.h)

Text is data: any bytes can be encoded, and the name of a special token in a text is encoded as ordinary text.
decode(encode(text)) == text, except for tokenizers whose file asks for a change.
*/
#pragma once

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/options/options.h"  // TokenizerKind
#include "data/tokenizer/hf_tokenizer.h"
#include "data/tokenizer/tiktoken.h"
#include "data/tokenizer/tokenizer_json.h"
#include "data/base/utf8.h"
#include "data/tokenizer/word_counts.h"  // last_word_boundary

class Tokenizer {
public:
    static constexpr int byte_end_of_text = 256, byte_vocab_size = 257;

    // One token for each byte.
    Tokenizer() = default;

    // `file` is where the tokenizer was read from.
    Tokenizer(HfTokenizer tokenizer, std::string file)
        : hf_(std::make_unique<HfTokenizer>(std::move(tokenizer))),
          file_(std::move(file)),
          end_of_text_(find_end_of_text()),
          can_cut_(has_safe_cuts()) {}

    // Loads "bytes"; a tokenizer.json or the folder that holds one; a rank file of tiktoken, named
    // ENCODING.tiktoken or given as ENCODING:FILE.
    static Tokenizer load(const std::string& name) {
        if (kind_of<TokenizerKind>(name) == TokenizerKind::bytes) return Tokenizer();
        std::string path = name;
        std::error_code not_there;
        if (std::filesystem::is_directory(path, not_there)) path += "/tokenizer.json";
        std::string encoding = std::filesystem::path(path).stem();
        size_t colon = path.find(':');
        if (colon != path.npos && is_encoding(path.substr(0, colon))) {
            encoding = path.substr(0, colon);
            path = path.substr(colon + 1);
        }
        if (path.ends_with(".json")) return Tokenizer(HfTokenizer::read(path), path);
        if (is_encoding(name) && access(name.c_str(), F_OK) != 0) {
            fail("--tokenizer %s: is an encoding of tiktoken; give its rank file too, as %s:FILE",
                 name.c_str(), name.c_str());
        }
        if (is_encoding(encoding)) return Tokenizer(read_tiktoken(path, encoding), path);
        fail("--tokenizer %s: not a tokenizer; give bytes, a tokenizer.json, or a tiktoken rank file as "
             "ENCODING:FILE, where the encoding is %s",
             printable(name).c_str(), alternatives(encodings()).c_str());
    }

    // Loads a tokenizer, or returns null for "none" and "".
    static std::unique_ptr<Tokenizer> load_if_any(const std::string& name) {
        if (name.empty() || kind_of<TokenizerKind>(name) == TokenizerKind::none) return nullptr;
        return std::make_unique<Tokenizer>(load(name));
    }

    // Encodes a text. Any number of threads may encode with one tokenizer at the same time.
    void encode(std::string_view text, std::vector<int>& tokens /* replaced */) const {
        if (hf_) return hf_->encode(text, tokens);
        tokens.assign((const uint8_t*)text.data(), (const uint8_t*)text.data() + text.size());
    }

    std::vector<int> encode(std::string_view text) const {
        std::vector<int> tokens;
        encode(text, tokens);
        return tokens;
    }

    // Prompts begin as the tokenizer's file says, such as with a token that begins a text: for models that
    // others trained on such texts. Our own data has none.
    void begin_prompts() {
        if (hf_) before_prompt_ = hf_->before_text();
    }
    std::vector<int> encode_prompt(std::string_view text) const {
        std::vector<int> tokens = before_prompt_, of_text = encode(text);
        tokens.insert(tokens.end(), of_text.begin(), of_text.end());
        return tokens;
    }

    // Returns the bytes that a token adds to a text; for a special token, its name.
    std::string token_bytes(int token) const {
        if (hf_) return hf_->token_bytes(token);
        if (token == byte_end_of_text) return "<|endoftext|>";
        if (token < 0 || token >= byte_vocab_size)
            fail("token %d: is not in the vocabulary of %d; check the tokenizer", token, byte_vocab_size);
        return std::string(1, (char)token);
    }

    std::string decode(const std::vector<int>& tokens) const {
        if (hf_) return hf_->decode(tokens);
        std::string text;
        for (int token : tokens) text += token_bytes(token);
        return text;
    }

    // The highest token id plus one.
    int vocab_size() const { return hf_ ? hf_->vocab_size() : byte_vocab_size; }

    // Returns whether a token exists: ids below vocab_size() may be unused.
    bool has(int token) const { return hf_ ? hf_->has(token) : token >= 0 && token < byte_vocab_size; }

    bool is_special(int token) const { return hf_ ? hf_->is_special(token) : token == byte_end_of_text; }

    // The token that ends a document; -1: none.
    int end_of_text() const { return end_of_text_; }

    // Returns whether encoding prepends a space to a text that begins without one.
    bool adds_space() const {
        std::vector<int> tokens = encode("a");
        return !tokens.empty() && token_bytes(tokens[0]).starts_with(' ');
    }

    // The number of spaces that decoding strips from the start of a text.
    int dropped_spaces() const { return hf_ ? hf_->dropped_spaces() : 0; }

    // Returns the last position, at most text.size(), where a long text can be cut so that its parts, encoded
    // separately, give the tokens of the whole; 0 if there is none.
    size_t cut_place(std::string_view text) const {
        if (!hf_) return text.size();
        return can_cut_ ? last_word_boundary(text, 0) : 0;
    }

    // Empty for the bytes tokenizer.
    const std::string& file() const { return file_; }

    // Everything that determines the tokens of a text, and nothing else. Not for the bytes tokenizer.
    std::string encoding_json() const {
        TokenizerParts parts = hf_->parts();
        parts.post_processor = parts.decoder = nullptr;
        std::erase_if(parts.added, [](const AddedToken& token) { return token.special; });
        return tokenizer_json(parts);
    }

    // The tokenizer as a tokenizer.json. Not for the bytes tokenizer.
    std::string json() const { return tokenizer_json(hf_->parts()); }
    void write(const std::string& path) const { hf_->write(path); }

private:
    static std::vector<std::string> encodings() {
        std::vector<std::string> names;
        for (const TiktokenEncoding& encoding : tiktoken_encodings()) names.push_back(encoding.name);
        return names;
    }
    static bool is_encoding(const std::string& name) {
        auto names = encodings();
        return std::find(names.begin(), names.end(), name) != names.end();
    }

    // Files do not mark which of their special tokens ends a text, so known names are tried.
    int find_end_of_text() const {
        for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>"}) {
            if (auto id = hf_->id_of(name); id && hf_->is_special(*id)) return *id;
        }
        return -1;
    }

    // Words of the known patterns end where is_word_boundary() says; other patterns may depend on more
    // context. NFC never turns a letter or number into another kind of character; the other forms may (NFKC
    // turns one number character into "(1)").
    bool has_safe_cuts() const {
        for (const AddedToken& token : hf_->parts().added) {
            bool holds_space = token.content.find_first_of(" \t\r\n") != std::string::npos;
            if (token.lstrip || token.rstrip || holds_space) return false;
        }
        const nlohmann::json& normalizer = hf_->parts().normalizer;
        bool plain = normalizer.is_null() || normalizer.value("type", "") == "NFC";
        int patterns = 0;
        return plain && has_safe_cuts(hf_->parts().pre_tokenizer, patterns) && patterns > 0;
    }

    static bool has_safe_cuts(const nlohmann::json& step, int& patterns) {
        if (!step.is_object()) return false;
        std::string type = step.value("type", "");
        if (type == "Sequence") {
            for (const auto& each : step["pretokenizers"]) {
                if (!has_safe_cuts(each, patterns)) return false;
            }
            return true;
        }
        if (type == "ByteLevel") {
            patterns += step.value("use_regex", true);
            return !step.value("add_prefix_space", true);
        }
        if (type == "Digits") return true;
        // Nothing is lost between matches: these patterns match every character.
        std::string behavior = step.value("behavior", "");
        bool inverted = step.value("invert", false);
        if (type != "Split" || behavior != (inverted ? "Removed" : "Isolated")) return false;
        const nlohmann::json& pattern = step["pattern"];
        std::string regex = pattern.value("Regex", "");
        for (const TiktokenEncoding& encoding : tiktoken_encodings()) {
            if (regex == encoding.pattern) return patterns++, true;
        }
        return false;
    }

    std::unique_ptr<HfTokenizer> hf_;  // null: the bytes tokenizer
    std::string file_;
    int end_of_text_ = byte_end_of_text;
    bool can_cut_ = true;
    std::vector<int> before_prompt_;
};

// Converts tokens to text one by one, as they arrive. A character may span several tokens: its bytes are held
// back until it is complete, or turns out to be invalid.
class TextDecoder {
public:
    // Without a tokenizer (null) tokens are shown as numbers. `begins`: the first token begins a text, rather
    // than continuing one.
    TextDecoder(const Tokenizer* tokenizer, bool begins)
        : tokenizer_(tokenizer), drop_(tokenizer && begins ? tokenizer->dropped_spaces() : 0) {}

    std::string add(int token) {
        held_ += shown(token);
        while (drop_ > 0 && !held_.empty()) {
            if (held_[0] != ' ')
                drop_ = 0;
            else
                held_.erase(0, 1), drop_--;
        }
        size_t complete = whole_characters(held_);
        std::string text = held_.substr(0, complete);
        held_.erase(0, complete);
        return text;
    }

    // Returns the bytes that are still held back after the last token.
    std::string finish() { return std::exchange(held_, {}); }

private:
    // A model may have more tokens than its tokenizer.
    std::string shown(int token) const {
        if (!tokenizer_) return text("%d ", token);
        return tokenizer_->has(token) ? tokenizer_->token_bytes(token) : text("<|%d|>", token);
    }

    const Tokenizer* tokenizer_;
    int drop_;
    std::string held_;
};
