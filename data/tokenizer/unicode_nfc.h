/*
Unicode's normalization form C: é as one character, and marks in their canonical order. Nearly all text is in
it already, so only the stretches around characters that could change are given to utf8proc.

Hugging Face's `tokenizers` (0.23) normalizes by Unicode 9 and leaves later characters alone. Those that would
take part are therefore borders here, which text on both sides is normalized apart from: the result is the
same, whichever Unicode version utf8proc knows.
*/
#pragma once

#include <utf8proc.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/tokenizer/unicode_categories.h"
#include "data/base/utf8.h"

enum class NfcRole : uint8_t {
    inert,   // stays as it is, and nothing before it changes because of it
    border,  // inert, and what follows it does not combine with it
    active   // may change, move or combine with what is before it
};

// By code point.
inline const std::vector<NfcRole>& nfc_roles() {
    // Characters after Unicode 9 that decompose, combine, or have a place in the order of marks.
    static constexpr int32_t later[][2] = {
        {0x5c8, 0x5c9},     {0x7fd, 0x7fd},     {0x897, 0x89f},     {0x8ca, 0x8d3},     {0x9fe, 0x9fe},
        {0xc3c, 0xc3c},     {0xd3b, 0xd3c},     {0xeba, 0xeba},     {0x1715, 0x1715},   {0x1abf, 0x1af0},
        {0x1df6, 0x1dfa},   {0xa82c, 0xa82c},   {0x105c9, 0x105c9}, {0x105d2, 0x105d2}, {0x105da, 0x105da},
        {0x105e4, 0x105e4}, {0x10d24, 0x10d27}, {0x10d69, 0x10d6d}, {0x10eab, 0x10eac}, {0x10ecb, 0x10ecf},
        {0x10ef0, 0x10efb}, {0x10efd, 0x10eff}, {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070},
        {0x1133b, 0x1133b}, {0x11382, 0x11385}, {0x1138b, 0x1138b}, {0x1138e, 0x1138e}, {0x11390, 0x11391},
        {0x113b8, 0x113b8}, {0x113bb, 0x113bb}, {0x113c2, 0x113c2}, {0x113c5, 0x113c5}, {0x113c7, 0x113c9},
        {0x113ce, 0x113d0}, {0x1145e, 0x1145e}, {0x11839, 0x1183a}, {0x11930, 0x11930}, {0x11935, 0x11935},
        {0x11938, 0x11938}, {0x1193d, 0x1193e}, {0x11943, 0x11943}, {0x119e0, 0x119e0}, {0x11a34, 0x11a34},
        {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42}, {0x11d44, 0x11d45}, {0x11d97, 0x11d97},
        {0x11f41, 0x11f42}, {0x1611e, 0x16129}, {0x1612f, 0x1612f}, {0x16d63, 0x16d63}, {0x16d67, 0x16d6a},
        {0x16ff0, 0x16ff1}, {0x1d127, 0x1d128}, {0x1d250, 0x1d252}, {0x1d25b, 0x1d25c}, {0x1d25f, 0x1d25f},
        {0x1d280, 0x1d281}, {0x1e08f, 0x1e08f}, {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef},
        {0x1e4ec, 0x1e4ef}, {0x1e5ee, 0x1e5ef}, {0x1e6e3, 0x1e6e3}, {0x1e6e6, 0x1e6e6}, {0x1e6ee, 0x1e6ef},
        {0x1e6f5, 0x1e6f5}};
    static const std::vector<NfcRole> roles = [] {
        std::vector<NfcRole> of((size_t)code_points, NfcRole::inert);
        auto set = [&](int32_t first, int32_t last, NfcRole role) {
            std::fill(of.begin() + first, of.begin() + last + 1, role);
        };
        const int32_t first_syllable = 0xac00, last_syllable = 0xd7a3;  // of Hangul: composed already
        for (int32_t code = 0; code < code_points; code++) {
            if (code == first_syllable) code = last_syllable + 1;
            const utf8proc_property_t* property = utf8proc_get_property(code);
            if (property->decomp_seqindex == UINT16_MAX || property->decomp_type != 0) continue;
            utf8proc_int32_t buffer[8];
            utf8proc_ssize_t count = utf8proc_decompose_char(code, buffer, 8, UTF8PROC_DECOMPOSE, nullptr);
            count = utf8proc_normalize_utf32(buffer, count,
                                             (utf8proc_option_t)(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
            if (count != 1 || buffer[0] != code) of[code] = NfcRole::active;
        }
        const CodeRanges marks = *code_points_of_category("M"), unassigned = *code_points_of_category("Cn");
        for (auto [first, last] : marks) set(first, last, NfcRole::active);
        set(0x1161, 0x1175, NfcRole::active);  // vowels and final consonants of Hangul
        set(0x11a8, 0x11c2, NfcRole::active);
        for (auto [first, last] : unassigned) set(first, last, NfcRole::border);
        for (auto [first, last] : later) set(first, last, NfcRole::border);
        return of;
    }();
    return roles;
}

// Appends a stretch that begins and ends where characters do not combine across.
inline void append_nfc_of(const std::vector<utf8proc_int32_t>& stretch, std::string& out) {
    constexpr int longest =
        18;  // code points that one decomposes to; by Unicode's stability policy no more than 4
    std::vector<utf8proc_int32_t> codes;
    for (int32_t code : stretch) {
        utf8proc_int32_t buffer[longest];
        utf8proc_ssize_t count = utf8proc_decompose_char(code, buffer, longest, UTF8PROC_DECOMPOSE, nullptr);
        if (count < 0 || count > longest)
            fail("utf8proc: U+%04X: %s; install another version", code, utf8proc_errmsg(count));
        codes.insert(codes.end(), buffer, buffer + count);
    }
    // Ordered here and not by utf8proc, whose time grows with the square of a run of marks.
    auto order = [](int32_t code) { return utf8proc_get_property(code)->combining_class; };
    for (size_t i = 0; i < codes.size();) {
        size_t begin = i;
        while (i < codes.size() && order(codes[i]) != 0) i++;
        std::stable_sort(codes.begin() + (ptrdiff_t)begin, codes.begin() + (ptrdiff_t)i,
                         [&](int32_t a, int32_t b) { return order(a) < order(b); });
        if (i < codes.size()) i++;
    }
    utf8proc_ssize_t count =
        utf8proc_normalize_utf32(codes.data(), (utf8proc_ssize_t)codes.size(),
                                 (utf8proc_option_t)(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
    for (utf8proc_ssize_t i = 0; i < count; i++) append_utf8(out, codes[(size_t)i]);
}

// The text in form C. Bytes that are not UTF-8 stay, and nothing combines across them.
inline std::string to_nfc(std::string_view text) {
    const std::vector<NfcRole>& roles = nfc_roles();
    std::string out;
    out.reserve(text.size());
    std::vector<utf8proc_int32_t> stretch;  // from the last inert character on, once an active one has come
    const char *at = text.data(), *end = at + text.size();
    const char* copied = at;        // up to here the result is in `out`
    const char* starter = nullptr;  // the inert character that the next one may combine with
    int32_t starter_code = 0;
    auto finish = [&](const char* here) {
        if (stretch.empty()) return;
        append_nfc_of(stretch, out);
        stretch.clear();
        copied = here;
    };
    while (at < end) {
        const char* here = at;
        int32_t code = next_code_point(at, end);
        NfcRole role = code == invalid_byte ? NfcRole::border : roles[(size_t)code];
        if (role == NfcRole::active) {
            if (stretch.empty()) {
                const char* begin = starter ? starter : here;
                out.append(copied, begin);
                if (starter) stretch.push_back(starter_code);
            }
            stretch.push_back(code);
            starter = nullptr;
        } else {
            finish(here);
            starter = role == NfcRole::inert ? here : nullptr;
            starter_code = code;
        }
    }
    finish(end);
    out.append(copied, end);
    return out;
}
