/*
A regular expression that cuts text into words, run by PCRE2. The pattern is seldom about characters, nearly
always about a few kinds of them (letters, digits, spaces). So characters that it does not tell apart become
one byte, the text becomes one byte a character, and the pattern is rewritten for that: PCRE2 never sees
Unicode. It is faster so, bytes that are no UTF-8 are a kind like any other, and what a letter is does not
depend on PCRE2's version.

ASCII stays as it is: such text is matched in place.
*/
#pragma once

#define PCRE2_CODE_UNIT_WIDTH 8
#include <cstring>
#include <pcre2.h>

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer/pattern_syntax.h"

class Pattern {
public:
    // `owner` names the file in messages.
    Pattern(std::string_view pattern, const std::string& owner) : owner_(owner), source_(pattern) {
        PatternParts parts = PatternReader(pattern, owner).read();
        assign_kinds(parts.sets);
        std::string rewritten = parts.syntax[0];
        for (size_t i = 0; i < parts.sets.size(); i++)
            rewritten += bytes_of(parts.sets[i]) + parts.syntax[i + 1];
        compile(rewritten);
    }

    // A pattern that matches this text and no other.
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

    // Calls piece(begin, end, matched) for what the pattern matches and what lies between, in order.
    template <typename F>
    void split(std::string_view text, F&& piece) const {
        size_t ascii = ascii_prefix(text);
        if (ascii == text.size()) {
            size_t before = 0;
            for_each_match(text, [&](size_t begin, size_t end) {
                if (before < begin) piece(before, begin, false);
                piece(begin, end, true);
                before = end;
            });
            if (before < text.size()) piece(before, text.size(), false);
            return;
        }
        std::string kinds = kinds_of(text, ascii);
        size_t index = 0, at = 0;  // the same place in kinds and in text
        auto advance = [&](size_t to) {
            for (; index < to; index++)
                at += kinds[index] == invalid_kind ? 1 : (size_t)utf8_length(text[at]);
            return at;
        };
        size_t before = 0;
        for_each_match(kinds, [&](size_t begin, size_t end) {
            size_t from = advance(begin), to = advance(end);
            if (before < from) piece(before, from, false);
            piece(from, to, true);
            before = to;
        });
        if (before < text.size()) piece(before, text.size(), false);
    }

    const std::string& source() const { return source_; }

private:
    static constexpr char invalid_kind = (char)0x80;  // of bytes that are not UTF-8

    // Numbers the kinds of characters beyond ASCII from 0x81 on: two are of one kind if they are in the same
    // sets.
    void assign_kinds(const std::vector<CodeSet>& all) {
        for (const CodeSet& set : all) {
            bool beyond_ascii = set.invalid || (!set.ranges.empty() && set.ranges.back().second >= 0x80);
            if (beyond_ascii && std::find(sets_.begin(), sets_.end(), set) == sets_.end())
                sets_.push_back(set);
        }
        if (sets_.size() > 64) refuse("more than 64 different sets of characters");
        std::vector<int32_t> borders = {0x80, code_points};
        for (const CodeSet& set : sets_) {
            for (auto [first, last] : set.ranges) borders.insert(borders.end(), {first, last + 1});
        }
        std::sort(borders.begin(), borders.end());
        kinds_.resize((size_t)code_points);
        for (int32_t code = 0; code < 0x80; code++) kinds_[(size_t)code] = (char)code;
        std::map<uint64_t, char> kind_of;
        for (size_t i = 0; i + 1 < borders.size(); i++) {
            if (borders[i] < 0x80 || borders[i] == borders[i + 1]) continue;
            uint64_t member = 0;
            for (size_t s = 0; s < sets_.size(); s++) member |= (uint64_t)sets_[s].contains(borders[i]) << s;
            auto [found, added] = kind_of.try_emplace(member, (char)(invalid_kind + 1 + (int)kind_of.size()));
            if (kind_of.size() > 127) refuse("more than 127 kinds of characters");
            std::fill(kinds_.begin() + borders[i], kinds_.begin() + borders[i + 1], found->second);
        }
        members_.assign(128, 0);
        for (auto [member, kind] : kind_of) members_[(size_t)(kind & 0x7f)] = member;
        for (size_t s = 0; s < sets_.size(); s++) members_[0] |= (uint64_t)sets_[s].invalid << s;
        known_ = kind_of.size() + 1;
    }

    // A set as PCRE2 writes a set of bytes.
    std::string bytes_of(const CodeSet& set) const {
        size_t number = (size_t)(std::find(sets_.begin(), sets_.end(), set) - sets_.begin());
        auto contains = [&](int byte) {
            if (byte < 0x80) return set.contains(byte);
            size_t kind = (size_t)byte - 0x80;
            return number < sets_.size() && kind < known_ && (members_[kind] >> number & 1) != 0;
        };
        std::string inside;
        for (int byte = 0; byte < 256; byte++) {
            if (!contains(byte)) continue;
            int last = byte;
            while (last < 255 && contains(last + 1)) last++;
            inside += text("\\x%02x", byte);
            if (last > byte) inside += text("-\\x%02x", last);
            byte = last;
        }
        return inside.empty() ? "[^\\x00-\\xff]" : "[" + inside + "]";
    }

    void compile(const std::string& rewritten) {
        int error;
        size_t place;
        code_.reset(
            pcre2_compile((PCRE2_SPTR)rewritten.data(), rewritten.size(), 0, &error, &place, nullptr));
        if (!code_) {
            char reason[200] = "";
            pcre2_get_error_message(error, (PCRE2_UCHAR*)reason, sizeof reason);
            refuse(reason);
        }
        uint32_t matches_nothing = 0;
        pcre2_pattern_info(code_.get(), PCRE2_INFO_MATCHEMPTY, &matches_nothing);
        if (matches_nothing) refuse("a way to match nothing");
        // Where there is no compiler for this processor, the pattern is interpreted.
        compiled_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0;
    }

    static size_t ascii_prefix(std::string_view text) {
        size_t i = 0;
        for (uint64_t eight; i + 8 <= text.size(); i += 8) {
            memcpy(&eight, text.data() + i, 8);
            if (eight & 0x8080808080808080) break;
        }
        while (i < text.size() && !(text[i] & 0x80)) i++;
        return i;
    }

    std::string kinds_of(std::string_view text, size_t ascii) const {
        std::string kinds(text.size(), '\0');
        memcpy(kinds.data(), text.data(), ascii);
        char* out = kinds.data() + ascii;
        const char *at = text.data() + ascii, *end = text.data() + text.size();
        while (at < end) {
            if (!(*at & 0x80)) {
                *out++ = *at++;
                continue;
            }
            int32_t code = next_code_point(at, end);
            *out++ = code == invalid_byte ? invalid_kind : kinds_[(size_t)code];
        }
        kinds.resize((size_t)(out - kinds.data()));
        return kinds;
    }

    // What PCRE2 writes to while it matches; each thread has its own.
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
        // Going back over a long run of spaces some times is work, going back without end is not.
        constexpr size_t least = 10'000'000;
        pcre2_set_match_limit(workspace.context,
                              (uint32_t)std::min<size_t>(least + 16 * subject.size(), UINT32_MAX));
        const PCRE2_SIZE* place = pcre2_get_ovector_pointer(workspace.match);
        auto match = compiled_ ? pcre2_jit_match : pcre2_match;
        for (size_t at = 0; at < subject.size();) {
            int result = match(code_.get(), (PCRE2_SPTR)subject.data(), subject.size(), at, 0,
                               workspace.match, workspace.context);
            if (result == PCRE2_ERROR_NOMATCH) return;
            if (result < 0) {
                fail("%s: the pattern \"%s\" takes too long or too much memory on this text (PCRE2 error "
                     "%d); cut the text at shorter lines",
                     owner_.c_str(), printable(source_).c_str(), result);
            }
            size_t begin = place[0];
            at = place[1];
            found(begin, at);
        }
    }

    [[noreturn]] void refuse(const std::string& what) const {
        fail("%s: the pattern \"%s\" has %s, which is not supported; use a pattern without it",
             owner_.c_str(), printable(source_).c_str(), printable(what).c_str());
    }

    struct FreeCode {
        void operator()(pcre2_code* code) const { pcre2_code_free(code); }
    };

    std::string owner_, source_;
    std::vector<CodeSet> sets_;      // those that reach beyond ASCII
    std::vector<uint64_t> members_;  // by kind - 0x80: the sets that it is in
    size_t known_ = 0;               // kinds
    std::vector<char> kinds_;        // by code point
    std::unique_ptr<pcre2_code, FreeCode> code_;
    bool compiled_ = false;  // to machine code
};
