/*
Limits on the cost of a tokenizer from another program: on its steps, its ids, its added tokens, and the size
of a normalized text.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "data/base/error.h"
#include "data/base/strings.h"

// Each step goes over the whole text, and steps may call each other recursively.
inline void check_steps(size_t steps, const std::string& where) {
    constexpr size_t most = 50;
    if (steps > most) fail("%s: has more than %zu steps; use a tokenizer with fewer", where.c_str(), most);
}

// The highest id allowed in a file of `tokens` tokens. Ids may have gaps, but tables need an entry for each.
inline int64_t highest_id(size_t tokens) {
    return (int64_t)std::min<size_t>(8 * tokens + (1 << 18), 1 << 22) - 1;
}

// A search may compare the whole added token at each position of a text.
inline void check_added_token(const std::string& content, const std::string& file) {
    constexpr size_t longest = 256;
    if (content.size() > longest) {
        fail("%s: added_tokens: \"%s...\" is longer than %zu bytes; use a tokenizer without it", file.c_str(),
             printable(content.substr(0, 40)).c_str(), longest);
    }
}

// Limits how much a change may lengthen a text. NFKD can turn 3 bytes into 33.
class GrowthLimit {
public:
    // `where` names the change in messages, and must outlive this object.
    GrowthLimit(std::string_view text, const std::string& where) : text_bytes_(text.size()), where_(where) {}

    void check(const std::string& made) const {
        if (made.size() > 32 * text_bytes_ + 64) {
            fail("%s: produces more than %zu bytes from a text of %zu; use another tokenizer", where_.c_str(),
                 made.size() - 1, text_bytes_);
        }
    }

    // Returns the text with every occurrence of `from` replaced.
    std::string replaced(std::string_view text, std::string_view from, std::string_view to) const {
        std::string result;
        for (;;) {
            size_t found = text.find(from);
            result += text.substr(0, found);
            check(result);
            if (found == text.npos) return result;
            result += to;
            text.remove_prefix(found + from.size());
        }
    }

private:
    size_t text_bytes_;
    const std::string& where_;
};
