/*
Reads the regular expressions that tokenizer files cut text with. They are written for another engine
(Oniguruma), so only what means the same there and in PCRE2 is let through: alternatives, groups, look-around,
repetition, and sets of characters. The rest is refused by name.
*/
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer/code_set.h"
#include "data/base/error.h"
#include "data/base/strings.h"

// A pattern cut into syntax and sets of characters, one after the other: syntax[0] sets[0] syntax[1] sets[1]
// ...
struct PatternParts {
    std::vector<std::string> syntax;  // one more than sets
    std::vector<CodeSet> sets;
};

class PatternReader {
public:
    PatternReader(std::string_view pattern, const std::string& owner)
        : pattern_(pattern), at_(pattern.data()), end_(at_ + pattern.size()), owner_(owner) {}

    PatternParts read() {
        if (!is_utf8(pattern_)) refuse("text that is not UTF-8");
        parts_.syntax.emplace_back();
        while (at_ < end_) read_one();
        if (ignores_case_.size() != 1) refuse("an open '('");
        return std::move(parts_);
    }

private:
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
            return set(read_brackets());
        case '.':
        case '^':
        case '$':
        case ']':
        case '}':
            refuse(text("'%c'", *at_));
        case '\\':
            return set(read_escape());
        default: {
            int32_t code = next_code_point(at_, end_);
            if (ignores_case_.back()) check_folding(code);
            set(single(code));
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
            syntax("(?:");
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
    CodeSet read_brackets() {
        CodeSet set;
        bool negated = take("^"), first = true;
        if (next_is("]")) refuse("an empty []");
        while (!take("]")) {
            if (at_ == end_) refuse("an open '['");
            if (next_is("[")) refuse("'[' in []");
            if (next_is("&&")) refuse("\"&&\" in []");
            if (next_is("-") && !first && !next_is("-]")) refuse("'-' in the middle of []");
            CodeSet from = read_member();
            bool range = next_is("-") && !next_is("-]");
            if (range) {
                take_char();
                if (at_ == end_ || next_is("[")) refuse("a range without an end");
                CodeSet to = read_member();
                if (!is_single(from) || !is_single(to) || from.ranges[0].first > to.ranges[0].first)
                    refuse("a range that is none");
                from = CodeSet{{{from.ranges[0].first, to.ranges[0].first}}, false};
                if (ignores_case_.back() && from.ranges[0].second >= 0x80) refuse("a range in (?i:");
            }
            set.add(from);
            first = false;
        }
        if (ignores_case_.back()) {
            if (negated) refuse("[^ in (?i:");
            set.ignore_case();
        }
        return negated ? set.complement() : set;
    }

    CodeSet read_member() {
        if (next_is("\\")) return read_escape();
        int32_t code = next_code_point(at_, end_);
        if (ignores_case_.back() && code >= 0x80) refuse("a character beyond ASCII in (?i:");
        return CodeSet{{{code, code}}, false};
    }

    // From the backslash on.
    CodeSet read_escape() {
        take_char();
        if (at_ == end_) refuse("a '\\' at its end");
        char letter = *take_char().begin();
        bool negated = false;
        CodeSet set;
        switch (letter) {
        case 'S':
            negated = true;
            [[fallthrough]];
        case 's':
            set = white_space_set();
            break;
        case 'D':
            negated = true;
            [[fallthrough]];
        case 'd':
            set.ranges = *code_points_of_category("Nd");
            break;
        case 'P':
            negated = true;
            [[fallthrough]];
        case 'p':
            set.ranges = read_category(&negated);
            break;
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
        if (ignores_case_.back()) refuse(std::string("\"\\") + letter + "\" in (?i:");
        return negated ? set.complement() : set;
    }

    CodeRanges read_category(bool* negated) {
        if (!take("{")) refuse("\"\\p\" without a '{'");
        if (take("^")) *negated = !*negated;
        const char* begin = at_;
        while (at_ < end_ && *at_ != '}') at_++;
        std::string name(begin, at_);
        if (!take("}")) refuse("\"\\p{\" without a '}'");
        std::optional<CodeRanges> ranges = code_points_of_category(name);
        if (!ranges) refuse("\\p{" + name + "}");
        return *ranges;
    }

    int32_t read_hex(int least, int most) {
        int32_t code = 0;
        int count = 0;
        for (; count < most && at_ < end_ && isxdigit((unsigned char)*at_); count++, at_++)
            code = code * 16 + (*at_ <= '9' ? *at_ - '0' : (*at_ | 0x20) - 'a' + 10);
        if (count < least || code >= code_points) refuse("a code point that is none");
        return code;
    }

    // Where case is ignored, some letters in a row match one character (ß for ss); no pattern here needs
    // that.
    void check_folding(int32_t code) {
        if (code >= 0x80) refuse("a character beyond ASCII in (?i:");
        std::string pair = {(char)tolower(before_), (char)tolower(code)};
        for (const char* folded : {"ss", "ff", "fi", "fl", "st"}) {
            if (pair == folded) refuse("\"" + pair + "\" in (?i:");
        }
    }

    CodeSet single(int32_t code) const {
        CodeSet set{{{code, code}}, false};
        if (ignores_case_.back()) set.ignore_case();
        return set;
    }

    static bool is_single(const CodeSet& set) {
        return set.ranges.size() == 1 && set.ranges[0].first == set.ranges[0].second;
    }

    std::string take_char() { return std::string(1, *at_++); }
    void syntax(const std::string& text) { parts_.syntax.back() += text; }

    void set(CodeSet set) {
        parts_.sets.push_back(std::move(set));
        parts_.syntax.emplace_back();
        repeatable_ = true;
        before_ = 0;
    }

    std::string_view pattern_;
    const char *at_, *end_;
    std::string owner_;
    PatternParts parts_;
    std::vector<bool> ignores_case_ = {false};  // in the groups that are open, and outside of them
    std::vector<bool> around_;                  // whether each open group is a look-around
    bool repeatable_ = false;                   // whether a repetition may follow
    int32_t before_ = 0;                        // the literal character just read, else 0
};
