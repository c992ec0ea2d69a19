/*
Tokens that are found in the text as they are written, before it is cut into words: "<|endoftext|>" and the
like. At each place the longest one counts, as in the library: a token found is passed over as a whole, even
where it is not to be taken.
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
    bool lstrip = false, rstrip = false;  // takes the white space before, behind it with it
    bool normalized = false;              // looked for in the normalized text
    bool special = false;                 // a mark and no text: left out by decoders that are asked to
};

enum class SpecialTokens {
    as_text,    // text is data: what looks like a special token is encoded as the text it is
    recognized  // text that looks like a special token is that token
};

// Finds added tokens in a text.
class AddedTokenFinder {
public:
    // The first token of a content counts.
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

    // Calls text(begin, end) for the stretches between tokens, and token(id) for the tokens, in order.
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

    // The beginning of the white space that ends at `end`.
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
