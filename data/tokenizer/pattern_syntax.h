/*
Reads the regular expressions that tokenizer files cut text with, and writes them for PCRE2. They are made for
another engine (Oniguruma), so only what means the same there and in PCRE2 is let through: alternatives,
groups, look-around, repetition, and sets of characters. The rest is refused by name. White space is written
out, for PCRE2 counts U+180E among it, which Unicode does no longer.
*/
#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/strings.h"
#include "data/base/utf8.h"

class PatternReader {
public:
    PatternReader(std::string_view pattern, const std::string& owner)
        : pattern_(pattern), at_(pattern.data()), end_(at_ + pattern.size()), owner_(owner) {}

    // The pattern for PCRE2 with PCRE2_UTF and PCRE2_UCP; its groups do not capture.
    std::string read() {
        if (!is_utf8(pattern_)) refuse("text that is not UTF-8");
        while (at_ < end_) read_one();
        if (ignores_case_.size() != 1) refuse("an open '('");
        return std::move(written_);
    }

private:
    // A member of a set: one character, or characters as they are written between brackets.
    struct Member {
        std::string text;
        int32_t code = -1;  // -1: not one character
    };

    [[noreturn]] void refuse(const std::string& what) const {
        fail("%s: the pattern \"%s\" has %s, which is not supported; use a pattern without it",
             owner_.c_str(), printable(pattern_).c_str(), printable(what).c_str());
    }

    bool next_is(std::string_view text) const {
        return std::string_view(at_, (size_t)(end_ - at_)).starts_with(text);
    }

    bool take(std::string_view text) {
        if (!next_is(text)) return false;
        at_ += text.size();
        return true;
    }

    void read_one() {
        switch (*at_) {
        case '(':
            return read_group();
        case ')':
            if (ignores_case_.size() == 1) refuse("a ')' too many");
            ignores_case_.pop_back();
            repeatable_ = !around_.back();
            around_.pop_back();
            before_ = 0;
            return syntax(take_char());
        case '|':
            repeatable_ = false;
            before_ = 0;
            return syntax(take_char());
        case '*':
        case '+':
        case '?':
        case '{':
            return read_repetition();
        case '[':
            take_char();
            return character(read_brackets());
        case '.':
        case '^':
        case '$':
        case ']':
        case '}':
            refuse(text("'%c'", *at_));
        case '\\':
            return character("[" + read_escape().text + "]");
        default: {
            int32_t code = next_code_point(at_, end_);
            if (ignores_case_.back()) check_folding(code);
            character(single(code).text);
            before_ = code;
        }
        }
    }

    void read_group() {
        bool ignores_case = ignores_case_.back(), around = false;
        if (take("(?:")) {
            syntax("(?:");
        } else if (take("(?i:")) {
            ignores_case = true;
            syntax("(?i:");
        } else if (take("(?>")) {
            syntax("(?>");
        } else if (next_is("(?=") || next_is("(?!")) {
            around = true;
            syntax(std::string(at_, 3));
            at_ += 3;
        } else if (next_is("(?<=") || next_is("(?<!")) {
            around = true;
            syntax(std::string(at_, 4));
            at_ += 4;
        } else if (next_is("(?") || next_is("(*")) {
            refuse("\"" + std::string(at_, (size_t)std::min<ptrdiff_t>(4, end_ - at_)) + "\"");
        } else {
            take("(");
            syntax("(?:");
        }
        ignores_case_.push_back(ignores_case);
        around_.push_back(around);
        repeatable_ = false;
        before_ = 0;
    }

    // Oniguruma reads {1,2}+ and {1}? otherwise than PCRE2 does, so braces stand alone.
    void read_repetition() {
        if (!repeatable_) refuse("a repetition of nothing");
        repeatable_ = false;
        before_ = 0;
        if (*at_ != '{') {
            syntax(take_char());
            if (at_ < end_ && (*at_ == '?' || *at_ == '+')) syntax(take_char());
            return;
        }
        const char* begin = at_++;
        auto digits = [&] {
            size_t count = 0;
            while (at_ < end_ && *at_ >= '0' && *at_ <= '9') at_++, count++;
            return count > 0 && count < 5;
        };
        bool good = digits();
        if (good && take(",") && !next_is("}")) good = digits();
        if (!good || !take("}")) refuse("a '{' that is no repetition");
        if (next_is("?") || next_is("+")) refuse(text("'%c' behind a '}'", *at_));
        syntax(std::string(begin, at_));
    }

    // Behind the '['.
    std::string read_brackets() {
        std::string set = "[";
        bool first = true, negated = take("^");
        if (negated && ignores_case_.back()) refuse("[^ in (?i:");
        if (negated) set += "^";
        if (next_is("]")) refuse("an empty []");
        while (!take("]")) {
            if (at_ == end_) refuse("an open '['");
            if (next_is("[")) refuse("'[' in []");
            if (next_is("&&")) refuse("\"&&\" in []");
            if (next_is("-") && !first && !next_is("-]")) refuse("'-' in the middle of []");
            Member from = read_member();
            set += from.text;
            first = false;
            if (!next_is("-") || next_is("-]")) continue;
            take_char();
            if (at_ == end_ || next_is("[")) refuse("a range without an end");
            Member to = read_member();
            if (from.code < 0 || from.code > to.code) refuse("a range that is none");
            if (ignores_case_.back() && to.code >= 0x80) refuse("a range in (?i:");
            set += "-" + to.text;
        }
        return set + "]";
    }

    Member read_member() {
        if (next_is("\\")) return read_escape();
        int32_t code = next_code_point(at_, end_);
        if (ignores_case_.back() && code >= 0x80) refuse("a character beyond ASCII in (?i:");
        return single(code);
    }

    // Reads an escape, from the backslash on.
    Member read_escape() {
        static constexpr char white[] = "\\t-\\r\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}"
                                        "\\x{2029}\\x{202f}\\x{205f}\\x{3000}";
        take_char();
        if (at_ == end_) refuse("a '\\' at its end");
        char letter = *take_char().begin();
        if (ignores_case_.back() && std::string_view("sSdDpP").find(letter) != std::string_view::npos)
            refuse(std::string("\"\\") + letter + "\" in (?i:");
        switch (letter) {
        case 's':
            return {white};
        case 'S':
            return {"\\S\\x{180e}"};
        case 'd':
            return {"\\p{Nd}"};
        case 'D':
            return {"\\P{Nd}"};
        case 'p':
        case 'P':
            return {read_category(letter == 'P')};
        case 'n':
            return single('\n');
        case 'r':
            return single('\r');
        case 't':
            return single('\t');
        case 'f':
            return single('\f');
        case 'v':
            return single('\v');
        case 'u':
            return single(read_hex(4, 4));
        case 'x': {
            if (!take("{")) refuse("\"\\x\" without a '{'");
            int32_t code = read_hex(1, 6);
            if (!take("}")) refuse("\"\\x{\" without a '}'");
            return single(code);
        }
        default:
            if ((letter >= '0' && letter <= '9') || (letter >= 'a' && letter <= 'z') ||
                (letter >= 'A' && letter <= 'Z') || (letter & 0x80))
                refuse(std::string("\"\\") + letter + "\"");
            return single((unsigned char)letter);
        }
    }

    std::string read_category(bool negated) {
        static constexpr std::string_view names =
            "LuLlLtLmLoMnMcMeNdNlNoPcPdPsPePiPfPoSmScSkSoZsZlZpCcCfCsCoCn";
        if (!take("{")) refuse("\"\\p\" without a '{'");
        if (take("^")) negated = !negated;
        const char* begin = at_;
        while (at_ < end_ && *at_ != '}') at_++;
        std::string name(begin, at_);
        if (!take("}")) refuse("\"\\p{\" without a '}'");
        size_t found = name.empty() ? names.npos : names.find(name);
        if (name.size() > 2 || found == names.npos || found % 2 != 0) refuse("\\p{" + name + "}");
        return (negated ? "\\P{" : "\\p{") + name + "}";
    }

    int32_t read_hex(int least, int most) {
        int32_t code = 0;
        int count = 0;
        for (; count < most && at_ < end_ && isxdigit((unsigned char)*at_); count++, at_++)
            code = code * 16 + (*at_ <= '9' ? *at_ - '0' : (*at_ | 0x20) - 'a' + 10);
        if (count < least || code >= code_points) refuse("a code point that is none");
        return code;
    }

    // If case is ignored, some letters in a row match one character (ß for ss); no pattern here needs that.
    void check_folding(int32_t code) {
        if (code >= 0x80) refuse("a character beyond ASCII in (?i:");
        std::string pair = {(char)tolower(before_), (char)tolower(code)};
        for (const char* folded : {"ss", "ff", "fi", "fl", "st"}) {
            if (pair == folded) refuse("\"" + pair + "\" in (?i:");
        }
    }

    static Member single(int32_t code) { return {text("\\x{%x}", (unsigned)code), code}; }

    std::string take_char() { return std::string(1, *at_++); }
    void syntax(const std::string& text) { written_ += text; }

    // One character of the text, or one of a set.
    void character(const std::string& text) {
        written_ += text;
        repeatable_ = true;
        before_ = 0;
    }

    std::string_view pattern_;
    const char *at_, *end_;
    std::string owner_;
    std::string written_;
    std::vector<bool> ignores_case_ = {false};  // in the groups that are open, and outside of them
    std::vector<bool> around_;                  // for each open group: it is a look-around
    bool repeatable_ = false;                   // a repetition may follow
    int32_t before_ = 0;                        // the literal character just read, else 0
};
