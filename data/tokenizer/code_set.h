/*
Sets of characters, as the brackets of a pattern write them: ranges of code points, and whether bytes that are
not UTF-8 belong.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "data/tokenizer/unicode_categories.h"
#include "data/base/utf8.h"

struct CodeSet {
    CodeRanges ranges;  // ascending, with gaps between
    bool invalid = false;

    bool operator==(const CodeSet&) const = default;

    bool contains(int32_t code) const {
        auto after = std::upper_bound(ranges.begin(), ranges.end(), code,
                                      [](int32_t value, const auto& range) { return value < range.first; });
        return after != ranges.begin() && code <= std::prev(after)->second;
    }

    void add(const CodeSet& other) {
        CodeRanges all = std::move(ranges);
        all.insert(all.end(), other.ranges.begin(), other.ranges.end());
        std::sort(all.begin(), all.end());
        ranges.clear();
        for (auto [first, last] : all) {
            if (!ranges.empty() && first <= ranges.back().second + 1)
                ranges.back().second = std::max(ranges.back().second, last);
            else
                ranges.push_back({first, last});
        }
        invalid |= other.invalid;
    }

    void add(int32_t first, int32_t last) { add(CodeSet{{{first, last}}, false}); }

    CodeSet complement() const {
        CodeSet rest;
        int32_t next = 0;
        for (auto [first, last] : ranges) {
            if (first > next) rest.ranges.push_back({next, first - 1});
            next = last + 1;
        }
        if (next < code_points) rest.ranges.push_back({next, code_points - 1});
        rest.invalid = !invalid;
        return rest;
    }

    // With the other case of each letter of ASCII, and the two letters beyond ASCII that fold to one.
    void ignore_case() {
        CodeSet more;
        for (int32_t letter = 'a'; letter <= 'z'; letter++) {
            int32_t upper = letter - 'a' + 'A';
            if (!contains(letter) && !contains(upper)) continue;
            more.add(letter, letter);
            more.add(upper, upper);
            if (letter == 's') more.add(0x17f, 0x17f);
            if (letter == 'k') more.add(0x212a, 0x212a);
        }
        add(more);
    }
};

inline CodeSet white_space_set() {
    CodeSet set;
    for (int32_t code = 0; code < 0x3001; code++) {
        if (is_white_space(code)) set.add(code, code);
    }
    return set;
}
