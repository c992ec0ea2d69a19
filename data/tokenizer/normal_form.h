/*
Unicode normal forms, which a tokenizer.json requests by name: NFC composes (é becomes one character), NFD
decomposes, and NFKC and NFKD also replace compatibility characters (ﬁ by fi, ² by 2). Nearly all text is
already normalized, so only the stretches around characters that could change are passed to utf8proc.

Hugging Face's `tokenizers` (0.23) normalizes by Unicode 9, and this code by the version of utf8proc (Unicode
15 in Debian 12). Characters known to both give the same text. The library leaves later ones unchanged, while
this code normalizes them like all others: a few hundred marks, and letters of historic scripts and of
phonetics.
*/
#pragma once

#include <utf8proc.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/utf8.h"

class NormalForm {
public:
    // `name`: NFC, NFD, NFKC or NFKD.
    explicit NormalForm(std::string_view name) : active_((size_t)code_points) {
        if (name.starts_with("NFK")) decompose_ = UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT;
        if (name.ends_with("C")) compose_ = UTF8PROC_COMPOSE | UTF8PROC_STABLE;
        for (int32_t code = 0; code < code_points; code++) {
            const utf8proc_property_t* property = utf8proc_get_property(code);
            bool mark = property->category == UTF8PROC_CATEGORY_MN ||
                        property->category == UTF8PROC_CATEGORY_MC ||
                        property->category == UTF8PROC_CATEGORY_ME;
            // Vowels and final consonants of Hangul combine with the letter before them, as marks do.
            bool ends_syllable = (code >= 0x1161 && code <= 0x1175) || (code >= 0x11a8 && code <= 0x11c2);
            bool syllable = code >= 0xac00 && code <= 0xd7a3;
            bool decomposes = syllable || property->decomp_seqindex != UINT16_MAX;
            active_[(size_t)code] =
                mark || ends_syllable || (decomposes && normalized({code}) != Codes{code});
        }
    }

    // Returns the text in this form. Bytes that are not UTF-8 are kept, and nothing combines across them.
    std::string apply(std::string_view text) const {
        std::string out;
        out.reserve(text.size());
        const char *at = text.data(), *end = at + text.size();
        const char* copied = at;   // text up to here is already in `out`
        const char* starter = at;  // the character before `at`, which the next may combine with; `at`: none
        auto next_is_active = [&](const char*& next, int32_t& code) {
            code = next_code_point(next, end);
            return code != invalid_byte && active_[(size_t)code];
        };
        while (at < end) {
            int32_t code;
            const char* next = at;
            if (!next_is_active(next, code)) {
                starter = code == invalid_byte ? next : at;
                at = next;
                continue;
            }
            out.append(copied, starter);
            Codes stretch;
            if (starter < at) stretch.push_back(next_code_point(starter, at));
            do {
                stretch.push_back(code);
                at = next;
            } while (at < end && next_is_active(next, code));
            for (int32_t each : normalized(stretch)) append_utf8(out, each);
            copied = starter = at;
        }
        return out.append(copied, end);
    }

private:
    using Codes = std::vector<utf8proc_int32_t>;

    Codes normalized(const Codes& from) const {
        constexpr int longest = 18;  // longest decomposition of a code point, by Unicode's stability policy
        Codes codes;
        for (int32_t code : from) {
            utf8proc_int32_t parts[longest];
            utf8proc_ssize_t count =
                utf8proc_decompose_char(code, parts, longest, (utf8proc_option_t)decompose_, nullptr);
            if (count < 0 || count > longest)
                fail("utf8proc: U+%04X: %s; install another version", code, utf8proc_errmsg(count));
            codes.insert(codes.end(), parts, parts + count);
        }
        // Marks are sorted here and not by utf8proc, whose time is quadratic in the length of a run of marks.
        auto order = [](int32_t code) { return utf8proc_get_property(code)->combining_class; };
        for (auto first = codes.begin(); first != codes.end();) {
            auto last = std::find_if(first, codes.end(), [&](int32_t code) { return order(code) == 0; });
            std::stable_sort(first, last, [&](int32_t a, int32_t b) { return order(a) < order(b); });
            first = last == codes.end() ? last : last + 1;
        }
        utf8proc_ssize_t count = utf8proc_normalize_utf32(codes.data(), (utf8proc_ssize_t)codes.size(),
                                                          (utf8proc_option_t)compose_);
        codes.resize((size_t)count);
        return codes;
    }

    int decompose_ = UTF8PROC_DECOMPOSE, compose_ = 0;  // options of utf8proc
    std::vector<bool> active_;  // by code point: may change, move, or combine with characters before it
};
