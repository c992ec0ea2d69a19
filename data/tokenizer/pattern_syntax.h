/*
Translates the regular expressions of tokenizer files to PCRE2. They are written for another engine
(Oniguruma), so only syntax that means the same in both is accepted: alternatives, groups, look-around,
repetition, and sets of characters. The grammar of that syntax is itself a PCRE2 pattern. Anything else is
refused, with a message that shows the pattern up to where it leaves the grammar.
*/
#pragma once

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "data/base/print.h"
#include "data/base/utf8.h"

struct FreePattern {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
    void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
};

[[noreturn]] inline void refuse_pattern(std::string_view pattern, const std::string& owner,
                                        const std::string& what) {
    fail("%s: the pattern \"%s\" has %s, which is not supported; use a pattern without it", owner.c_str(),
         printable(pattern).c_str(), printable(what).c_str());
}

// (?<name> ...) defines a rule and (?&name) uses it; (?x) allows blanks and comments between their parts. A +
// after a repetition forbids backtracking into it, so the time does not explode. The limits are twice the
// needs of the largest patterns that PCRE2 compiles (250 nested groups, 64 KiB).
inline constexpr const char* pattern_grammar = R"((*LIMIT_DEPTH=3000)(*LIMIT_MATCH=1000000)(?x)
\A (?&pattern) \z (?(DEFINE)

    # Oniguruma cannot repeat a look-around, and reads {1,2}+ and {1}? unlike PCRE2: no suffix after braces.
    (?<pattern>    (?: (?&item) (?&repetition)?+ | \(\?<?+[=!] (?&pattern) \) | \| )*+ )
    (?<item>       (?&character) | (?&class) | (?&set) | \((?:\?[:>])?+ (?&pattern)\) | \(\?i: (?&folded)\) )
    (?<repetition> [*+?][+?]?+ | \{ \d{1,4}+ (?: , \d{0,4}+ )?+ \} (?![+?]) )

    (?<character>  [^][\\(){}|*+?.^$] | (?&escape) )
    (?<escape>     \\ (?: [nrtfv] | u[[:xdigit:]]{4} | x\{[[:xdigit:]]{1,6}+\} | [[:punct:][:cntrl:]\ ] ) )
    (?<class>      \\ (?: [sSdD] | [pP]\{ \^?+ (?&category) \} ) )
    (?<category>   C[cfnos]?+ | L[lmotu]?+ | M[cen]?+ | N[dlo]?+ | P[cdefios]?+ | S[ckmo]?+ | Z[lps]?+ )

    # A '-' in a set is a character only at the beginning or end; elsewhere it makes a range.
    (?<set>        \[ \^?+ (?!\]) (?: - (?&range)?+ )?+ (?: (?&class) | (?&member) (?&range)?+ )*+ -?+ \] )
    (?<member>     (?!&&) [^][\\-] | (?&escape) )
    (?<range>      - (?: [^][\\] | (?&escape) ) )

    # If case is ignored, Oniguruma matches some sequences of letters as one (ss as ß), and differs
    # from PCRE2 on characters beyond ASCII and on negated sets; no pattern here needs those.
    (?<folded>       (?: (?&folded_item) (?&repetition)?+ | \(\?<?+[=!] (?&folded) \) | \| )*+ )
    (?<folded_item>  (?! [sS][sStT] | [fF][fFiIlL] | [^\0-\x7f] ) (?&character) | (?&folded_set)
                     | \( (?: \?i?+: | \?> )?+ (?&folded) \) )
    (?<folded_set>   \[ (?![]^]) (?: - (?&folded_range)?+ )?+
                     (?: (?![^\0-\x7f]) (?&member) (?&folded_range)?+ )*+ -?+ \] )
    (?<folded_range> (?! - (?&beyond_ascii) ) (?&range) )
    (?<beyond_ascii> [^\0-\x7f] | \\u (?!00[0-7]) | \\x\{ (?! 0* [0-7]? [[:xdigit:]] \} ) )
))";

// Returns whether the grammar accepts `part` or, with PCRE2_PARTIAL_HARD, some pattern that begins with it.
inline bool in_pattern_grammar(std::string_view part, uint32_t mode) {
    int error;
    size_t place;
    static const std::unique_ptr<pcre2_code, FreePattern> grammar(pcre2_compile(
        (PCRE2_SPTR)pattern_grammar, PCRE2_ZERO_TERMINATED, PCRE2_UTF, &error, &place, nullptr));
    std::unique_ptr<pcre2_match_data, FreePattern> match(pcre2_match_data_create(1, nullptr));
    if (!grammar || !match) throw std::bad_alloc();
    int found =
        pcre2_match(grammar.get(), (PCRE2_SPTR)part.data(), part.size(), 0, mode, match.get(), nullptr);
    return found >= 0 || found == PCRE2_ERROR_PARTIAL;
}

inline void check_pattern(std::string_view pattern, const std::string& owner) {
    if (!is_utf8(pattern)) refuse_pattern(pattern, owner, "text that is not UTF-8");
    if (in_pattern_grammar(pattern, 0)) return;
    // The shortest prefix that no accepted pattern has ends with the part to refuse.
    size_t good = 0, wrong = pattern.size() + 1;
    while (good + 1 < wrong) {
        size_t middle = (good + wrong) / 2;
        std::string_view beginning = pattern.substr(0, whole_characters(pattern.substr(0, middle)));
        (in_pattern_grammar(beginning, PCRE2_PARTIAL_HARD) ? good : wrong) = middle;
    }
    if (wrong > pattern.size()) refuse_pattern(pattern, owner, "no end");
    std::string_view shown = pattern.substr(0, wrong);
    while (shown.size() > 40 || (shown.front() & 0xc0) == 0x80) shown.remove_prefix(1);
    refuse_pattern(pattern, owner, "\"" + std::string(shown) + "\"");
}

// PCRE2 reads some escapes differently from Oniguruma, and still treats U+180E as white space.
inline constexpr std::pair<char, const char*> meanings_of_escapes[] = {
    {'s', "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"},
    {'S', "\\S\\x{180e}"},
    {'d', "\\p{Nd}"},
    {'D', "\\P{Nd}"},
    {'v', "\\x{b}"}};

// Returns the pattern for PCRE2 with PCRE2_UTF, PCRE2_UCP and PCRE2_NO_AUTO_CAPTURE. Escapes are put in
// brackets, because PCRE2 10.42 treats \P{Lu}*\P{Nd} as if no character matched both. A '\' in sets keeps
// PCRE2 from reading [:a:] as the name of a class.
inline std::string pattern_for_pcre2(std::string_view pattern, const std::string& owner) {
    check_pattern(pattern, owner);
    std::string written;
    for (bool in_set = false; !pattern.empty();) {
        const bool is_escape = pattern[0] == '\\';
        const char letter = is_escape ? pattern[1] : '\0';
        size_t length = letter == 'u' ? 6 : is_escape ? 2 : 1;
        if (letter == 'p' || letter == 'P' || letter == 'x') length = pattern.find('}') + 1;
        std::string token(pattern.substr(0, length));
        pattern.remove_prefix(length);
        if (token == "[" || token == "]") in_set = token == "[";
        if (in_set && token.find_first_of(":.=") == 0) token = "\\" + token;
        if (letter == 'u') token = "\\x{" + token.substr(2) + "}";
        for (const auto& [escape, meaning] : meanings_of_escapes) {
            if (letter == escape) token = meaning;
        }
        written += is_escape && !in_set ? "[" + token + "]" : token;
    }
    return written;
}
