/*
Tokens that are found in the text as written, before it is cut into words, such as "<|endoftext|>". The
longest match at each position counts, as in the Hugging Face library: it is skipped as a whole, even if it is
then treated as ordinary text.
*/
#pragma once

#include <array>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/utf8.h"

struct AddedToken {
    int id = 0;
    std::string content;
    bool lstrip = false, rstrip = false;  // also consumes white space before, after it
    bool normalized = false;              // searched for in the normalized text
    bool special = false;                 // a marker, not text: decoders leave it out if asked to
};

enum class SpecialTokens {
    as_text,    // text is data: the name of a special token is encoded as ordinary text
    recognized  // the name of a special token in a text is encoded as that token
};

// Finds added tokens in a text.
class AddedTokenFinder {
public:
    // Adds a token; if two have the same content, the first one counts.
    void add(const std::string& content, AddedToken token) {
        if (content.empty()) return;
        starts_[(uint8_t)content[0]] = true;
        size_t node = 0;
        for (char byte : content) {
            auto [child, added] = nodes_[node].children.try_emplace(byte, nodes_.size());
            node = child->second;
            if (added) nodes_.emplace_back();
        }
        if (nodes_[node].token >= 0) return;
        nodes_[node].token = (int)tokens_.size();
        tokens_.push_back(std::move(token));
    }

    // Calls on_text(begin, end) for the stretches between tokens, and on_token(id) for the tokens, in order.
    template <typename Text, typename Token>
    void split(std::string_view text, SpecialTokens special, Text&& on_text, Token&& on_token) const {
        size_t done = 0;
        for (size_t at = 0; at < text.size() && !tokens_.empty();) {
            if (!starts_[(uint8_t)text[at]]) {
                at++;
                continue;
            }
            auto [token, length] = longest_at(text.substr(at));
            if (!token) {
                at++;
                continue;
            }
            size_t begin = at, end = at + length;
            at = end;
            if (token->special && special == SpecialTokens::as_text) continue;
            if (token->lstrip) begin = space_before(text, done, begin);
            if (token->rstrip) end = space_behind(text, end);
            begin = std::max(begin, done);
            if (done < begin) on_text(done, begin);
            on_token(token->id);
            done = end;
        }
        if (done < text.size()) on_text(done, text.size());
    }

private:
    struct Node {
        std::map<char, size_t> children;
        int token = -1;
    };

    std::pair<const AddedToken*, size_t> longest_at(std::string_view text) const {
        std::pair<const AddedToken*, size_t> longest{nullptr, 0};
        size_t node = 0;
        for (size_t length = 0; length < text.size();) {
            auto child = nodes_[node].children.find(text[length]);
            if (child == nodes_[node].children.end()) break;
            node = child->second;
            length++;
            if (nodes_[node].token >= 0) longest = {&tokens_[(size_t)nodes_[node].token], length};
        }
        return longest;
    }

    // Returns the start of the white space that ends at `end`.
    static size_t space_before(std::string_view text, size_t from, size_t end) {
        while (end > from) {
            size_t begin = end - 1;
            while (begin > from && end - begin < 4 && (text[begin] & 0xc0) == 0x80) begin--;
            const char* at = text.data() + begin;
            if (!is_white_space(next_code_point(at, text.data() + end)) || at != text.data() + end) break;
            end = begin;
        }
        return end;
    }

    static size_t space_behind(std::string_view text, size_t begin) {
        const char *at = text.data() + begin, *end = text.data() + text.size();
        while (at < end) {
            const char* next = at;
            if (!is_white_space(next_code_point(next, end))) break;
            at = next;
        }
        return (size_t)(at - text.data());
    }

    std::vector<Node> nodes_ = std::vector<Node>(1);
    std::vector<AddedToken> tokens_;
    std::array<bool, 256> starts_{};
};
