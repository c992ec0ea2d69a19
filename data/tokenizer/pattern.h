/*
A regular expression that cuts text into words, run by PCRE2. PCRE2's version of Unicode (14 in Debian 12)
defines which characters are letters, digits or spaces; pattern_unicode() returns that version. Characters
added to Unicode later may be cut differently by another version; for all others the words are the same as
those of Hugging Face's `tokenizers` (Unicode 16).

PCRE2 reads only UTF-8. A byte that is not part of a character counts here as a character that is neither
letter, digit nor space, so that any bytes can be cut.
*/
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer/pattern_syntax.h"

class Pattern {
public:
    // `owner` names the file in messages.
    Pattern(std::string_view pattern, const std::string& owner) : owner_(owner), source_(pattern) {
        compile(pattern_for_pcre2(pattern, owner));
    }

    // Returns a pattern that matches only this text.
    static std::string quoted(std::string_view text) {
        std::string pattern;
        for (char c : text) {
            bool letter =
                (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c & 0x80);
            bool control = (unsigned char)c < 0x20 || c == 0x7f;
            if (control) {
                constexpr char digits[] = "0123456789abcdef";
                pattern += std::string("\\x{") + digits[(c >> 4) & 15] + digits[c & 15] + "}";
            } else {
                pattern += letter ? std::string(1, c) : std::string("\\") + c;
            }
        }
        return pattern;
    }

    // Calls piece(begin, end, matched) for the matches of the pattern and the stretches between them, in
    // order.
    template <typename F>
    void split(std::string_view text, F&& piece) const {
        size_t before = 0;
        auto found = [&](size_t begin, size_t end) {
            if (before < begin) piece(before, begin, false);
            piece(begin, end, true);
            before = end;
        };
        if (is_utf8(text)) {
            for_each_match(text, found);
        } else {
            std::string readable = with_stand_ins(text);
            size_t index = 0;  // in `readable`; `at` is the same position in `text`
            const char* at = text.data();
            auto place = [&](size_t to) {
                for (; index < to; index += (size_t)utf8_length(readable[index]))
                    next_code_point(at, text.data() + text.size());
                return (size_t)(at - text.data());
            };
            for_each_match(readable, [&](size_t begin, size_t end) {
                size_t from = place(begin);
                found(from, place(end));
            });
        }
        if (before < text.size()) piece(before, text.size(), false);
    }

    const std::string& source() const { return source_; }

private:
    // Returns the text with each invalid byte replaced by U+FFFF, which is a noncharacter.
    static std::string with_stand_ins(std::string_view text) {
        std::string readable;
        const char *at = text.data(), *end = at + text.size();
        while (at < end) {
            int32_t code = next_code_point(at, end);
            append_utf8(readable, code == invalid_byte ? 0xffff : code);
        }
        return readable;
    }

    void compile(const std::string& pattern) {
        for (auto [code, options] : {std::pair(&code_, 0u), {&code_here_, PCRE2_ANCHORED}}) {
            int error;
            size_t place;
            code->reset(pcre2_compile((PCRE2_SPTR)pattern.data(), pattern.size(),
                                      PCRE2_UTF | PCRE2_UCP | PCRE2_NO_AUTO_CAPTURE | options, &error, &place,
                                      nullptr));
            if (!*code) {
                char reason[200] = "";
                pcre2_get_error_message(error, (PCRE2_UCHAR*)reason, sizeof reason);
                refuse_pattern(source_, owner_, reason);
            }
        }
        uint32_t matches_nothing = 0;
        pcre2_pattern_info(code_.get(), PCRE2_INFO_MATCHEMPTY, &matches_nothing);
        if (matches_nothing) refuse_pattern(source_, owner_, "a way to match the empty string");
        // If PCRE2 has no JIT compiler for this processor, the pattern is interpreted.
        compiled_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0 &&
                    pcre2_jit_compile(code_here_.get(), PCRE2_JIT_COMPLETE) == 0;
    }

    // PCRE2's working memory for matching, one for each thread.
    struct Workspace {
        pcre2_match_data* match = pcre2_match_data_create(1, nullptr);
        pcre2_match_context* context = pcre2_match_context_create(nullptr);
        pcre2_jit_stack* stack = pcre2_jit_stack_create(32 << 10, 64 << 20, nullptr);
        Workspace() {
            if (!match || !context || !stack) throw std::bad_alloc();
            pcre2_jit_stack_assign(context, nullptr, stack);
        }
        Workspace(const Workspace&) = delete;
        Workspace& operator=(const Workspace&) = delete;
        ~Workspace() {
            pcre2_match_data_free(match);
            pcre2_match_context_free(context);
            pcre2_jit_stack_free(stack);
        }
    };

    template <typename F>
    void for_each_match(std::string_view subject, F&& found) const {
        static thread_local Workspace workspace;
        const PCRE2_SIZE* place = pcre2_get_ovector_pointer(workspace.match);
        auto match = compiled_ ? pcre2_jit_match : pcre2_match;
        auto run = [&](const auto& code, size_t at, size_t limit) {
            pcre2_set_match_limit(workspace.context, (uint32_t)std::min<size_t>(limit, UINT32_MAX));
            return match(code.get(), (PCRE2_SPTR)subject.data(), subject.size(), at, PCRE2_NO_UTF_CHECK,
                         workspace.match, workspace.context);
        };
        // Some backtracking over a long run of spaces is acceptable, but not without bound. PCRE2
        // limits the work for each starting position, but does not report how much it did. If a match exceeds
        // the usual limit, positions are tried one by one with growing limits, whose sum is bounded by the
        // length of the text, or for short texts by its square.
        constexpr size_t usual = 1000, short_text = 800;
        size_t squared = std::min(subject.size(), short_text);
        size_t left = 16 * squared * squared + 128 * subject.size();
        for (size_t at = 0; at < subject.size();) {
            int result = run(code_, at, usual);
            bool is_long = result == PCRE2_ERROR_MATCHLIMIT;
            for (size_t limit = usual; is_long && at < subject.size();) {
                result = run(code_here_, at, limit);
                if (result == PCRE2_ERROR_NOMATCH) {
                    at += (size_t)utf8_length(subject[at]);
                    limit = usual;
                } else if (result == PCRE2_ERROR_MATCHLIMIT && left > 0) {
                    limit = std::min(8 * limit, left);
                    left -= limit;
                } else {
                    break;
                }
            }
            if (result == PCRE2_ERROR_NOMATCH) return;
            if (result < 0) {
                fail("%s: the pattern \"%s\" takes too long or too much memory on this text (PCRE2 error "
                     "%d); split the text into shorter lines",
                     owner_.c_str(), printable(source_).c_str(), result);
            }
            size_t begin = place[0];
            at = place[1];
            found(begin, at);
        }
    }

    std::string owner_, source_;
    std::unique_ptr<pcre2_code, FreePattern> code_, code_here_;  // finds the next match; matches only here
    bool compiled_ = false;                                      // to machine code
};

// The version of Unicode that patterns use: "14.0.0".
inline std::string pattern_unicode() {
    char version[64] = "";
    pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, version);
    return version;
}

// Returns for each code point whether a pattern for single characters matches it.
inline std::vector<bool> characters_of(const std::string& pattern) {
    std::vector<bool> result((size_t)code_points);
    std::string all;
    for (int32_t code = 0; code < code_points; code++) {
        if (code < 0xd800 || code >= 0xe000) append_utf8(all, code);
    }
    Pattern(pattern, "characters").split(all, [&](size_t begin, size_t end, bool matched) {
        for (const char* at = all.data() + begin; matched && at < all.data() + end;)
            result[(size_t)next_code_point(at, all.data() + all.size())] = true;
    });
    return result;
}
