/*
tiktoken rank files: one line per token, its bytes in base64 and its rank, which is its id. They contain
neither the pattern that cuts text into words nor the special tokens; those follow from the name of the
encoding.

tiktoken merges any two adjacent tokens whose bytes together are a token, the lowest rank first. Each token is
made from only one pair: the two parts left after all merges of lower rank. These pairs are the merges.
*/
#pragma once

#include <algorithm>
#include <array>
#include <climits>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "data/tokenizer/tokenizer_json.h"
#include "data/base/strings.h"

struct TiktokenEncoding {
    std::string name, pattern;
    std::vector<std::pair<std::string, int>> special;  // special tokens and their ids
    bool nfc = false;                                  // text is normalized first
};

inline const std::vector<TiktokenEncoding>& tiktoken_encodings() {
    static const std::vector<TiktokenEncoding> encodings = [] {
        const std::string llama3 = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
                                   " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
        const std::string qwen = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"
                                 " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
        const std::string cl100k = "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}++|\\p{N}{1,3}|"
                                   " ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+";
        const std::string upper = "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]",
                          lower = "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]";
        const std::string start = "[^\\r\\n\\p{L}\\p{N}]?", end = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|";
        const std::string o200k =
            start + upper + "*" + lower + "+" + end + start + upper + "+" + lower + "*" + end +
            "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
        std::vector<std::string> llama3_special = {"<|begin_of_text|>", "<|end_of_text|>"};
        auto reserve = [&](int first, int last) {
            for (int i = first; i <= last; i++)
                llama3_special.push_back(text("<|reserved_special_token_%d|>", i));
        };
        reserve(0, 3);
        llama3_special.insert(llama3_special.end(), {"<|start_header_id|>", "<|end_header_id|>"});
        reserve(4, 4);
        llama3_special.push_back("<|eot_id|>");
        reserve(5, 250);
        std::vector<std::string> qwen_special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
        for (int i = 0; i < 205; i++) qwen_special.push_back(text("<|extra_%d|>", i));
        auto from = [](int id, const std::vector<std::string>& names) {
            std::vector<std::pair<std::string, int>> special;
            for (const std::string& name : names) special.push_back({name, id++});
            return special;
        };
        return std::vector<TiktokenEncoding>{
            {"gpt2", gpt2_pattern, {{"<|endoftext|>", 50256}}},
            {"r50k_base", gpt2_pattern, {{"<|endoftext|>", 50256}}},
            {"p50k_base", gpt2_pattern, {{"<|endoftext|>", 50256}}},
            {"cl100k_base",
             cl100k,
             {{"<|endoftext|>", 100257},
              {"<|fim_prefix|>", 100258},
              {"<|fim_middle|>", 100259},
              {"<|fim_suffix|>", 100260},
              {"<|endofprompt|>", 100276}}},
            {"o200k_base", o200k, {{"<|endoftext|>", 199999}, {"<|endofprompt|>", 200018}}},
            {"llama3", llama3, from(128000, llama3_special)},
            {"qwen", qwen, from(151643, qwen_special), true}};
    }();
    return encodings;
}

// Settings, as in tokenizer.json, that cut text by a pattern and then write it in the byte alphabet.
inline nlohmann::json byte_level_settings(bool use_regex) {
    return {
        {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", use_regex}};
}
inline nlohmann::json pattern_settings(const std::string& pattern) {
    nlohmann::json split = {
        {"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
    return {{"type", "Sequence"}, {"pretokenizers", {split, byte_level_settings(false)}}};
}

inline const TiktokenEncoding& tiktoken_encoding(const std::string& name) {
    std::vector<std::string> names;
    for (const TiktokenEncoding& encoding : tiktoken_encodings()) {
        if (encoding.name == name) return encoding;
        names.push_back(encoding.name);
    }
    fail("%s: is not an encoding of tiktoken; give %s", printable(name).c_str(), alternatives(names).c_str());
}

// Returns nothing if the text is not base64.
inline std::optional<std::string> from_base64(std::string_view text) {
    constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    if (text.size() % 4 != 0) return {};
    size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
    std::string bytes;
    for (size_t i = 0; i < text.size(); i += 4) {
        uint32_t group = 0;
        for (size_t j = i; j < i + 4; j++) {
            size_t digit = j < text.size() - padding ? digits.find(text[j]) : 0;
            if (digit == digits.npos) return {};
            group = group << 6 | (uint32_t)digit;
        }
        for (int shift = 16; shift >= 0; shift -= 8) bytes += (char)(group >> shift & 0xff);
    }
    bytes.resize(bytes.size() - padding);
    return bytes;
}

// Parses a rank file; `file` names it in messages.
inline HfTokenizer parse_tiktoken(std::string_view source, const TiktokenEncoding& encoding,
                                  const std::string& file) {
    std::unordered_map<std::string, int> ranks;
    std::vector<std::string> tokens;
    const int64_t highest = highest_id((size_t)std::count(source.begin(), source.end(), '\n'));
    constexpr size_t longest = 1024;
    for (int line = 1; !source.empty(); line++) {
        std::string_view text = next_line(source);
        if (text.ends_with('\r')) text.remove_suffix(1);
        if (text.empty()) continue;
        size_t space = text.find(' ');
        std::optional<std::string> bytes = from_base64(text.substr(0, space));
        std::string_view number = space == text.npos ? "" : text.substr(space + 1);
        int rank = 0;
        bool good =
            bytes && !bytes->empty() && bytes->size() <= longest && !number.empty() && number.size() < 8;
        for (char digit : number) good = good && digit >= '0' && digit <= '9';
        if (good) rank = std::stoi(std::string(number));
        if (!good || rank > highest)
            fail("%s: line %d is not a base64 token and its rank; the file is damaged or of another kind",
                 file.c_str(), line);
        if ((size_t)rank >= tokens.size()) tokens.resize((size_t)rank + 1);
        if (!tokens[(size_t)rank].empty() || !ranks.emplace(*bytes, rank).second)
            fail("%s: line %d repeats a token or a rank; the file is damaged", file.c_str(), line);
        tokens[(size_t)rank] = std::move(*bytes);
    }

    TokenizerParts parts;
    auto rank_of = [&](std::string_view bytes) {
        auto found = ranks.find(std::string(bytes));
        return found == ranks.end() ? INT_MAX : found->second;
    };
    for (int rank = 0; rank < (int)tokens.size(); rank++) {
        std::string_view token = tokens[(size_t)rank];
        std::vector<size_t> borders;  // boundaries of its parts
        for (size_t i = 0; i <= token.size() && !token.empty(); i++) borders.push_back(i);
        auto rank_at = [&](size_t i) {
            return rank_of(token.substr(borders[i], borders[i + 2] - borders[i]));
        };
        std::vector<int> joined;  // [i]: rank of parts i and i + 1 joined
        for (size_t i = 0; i + 2 < borders.size(); i++) joined.push_back(rank_at(i));
        while (borders.size() > 3) {
            auto lowest = std::min_element(joined.begin(), joined.end());
            if (*lowest >= rank) break;
            size_t at = (size_t)(lowest - joined.begin());
            borders.erase(borders.begin() + (ptrdiff_t)at + 1);
            joined.erase(lowest);
            for (size_t i = at > 0 ? at - 1 : 0; i <= at && i < joined.size(); i++) joined[i] = rank_at(i);
        }
        if (borders.size() != 3) continue;  // a single byte, or a token for whole words only
        int left = rank_of(token.substr(0, borders[1])), right = rank_of(token.substr(borders[1]));
        if (left == INT_MAX || right == INT_MAX)
            fail("%s: a byte has no token; the file is damaged", file.c_str());
        parts.merges.push_back({left, right, rank});
    }
    for (const std::string& token : tokens) parts.vocabulary.push_back(to_byte_alphabet(token));
    parts.options.ignore_merges = true;
    for (const auto& [content, id] : encoding.special) {
        if ((size_t)id < tokens.size() && !tokens[(size_t)id].empty())
            fail("%s: token %d is not a special token, but in %s it is; name another encoding", file.c_str(),
                 id, encoding.name.c_str());
        parts.added.push_back({id, content, false, false, false, true});
    }
    parts.pre_tokenizer = pattern_settings(encoding.pattern);
    if (encoding.nfc) parts.normalizer = {{"type", "NFC"}};
    parts.decoder = byte_level_settings(false);
    return HfTokenizer(std::move(parts), file);
}

inline HfTokenizer read_tiktoken(const std::string& path, const std::string& encoding) {
    MappedFile file(path);
    return parse_tiktoken({file.data(), file.size()}, tiktoken_encoding(encoding), path);
}
