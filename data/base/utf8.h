/*
Reads UTF-8 one character at a time. Text from outside may hold anything: a byte that is not part of a
well-formed character counts as a separate character, so any bytes can be tokenized and restored.
*/
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

constexpr int32_t invalid_byte = -1;  // in place of a code point
constexpr int32_t code_points = 0x110000;

// Returns the code point at `at` (which is before `end`), and advances `at`.
inline int32_t next_code_point(const char*& at, const char* end) {
    auto byte = [&](int i) { return (uint8_t)at[i]; };
    auto continues = [&](int i) { return end - at > i && (byte(i) & 0xc0) == 0x80; };
    uint8_t first = byte(0);
    int32_t code = invalid_byte;
    int length = 1;
    if (first < 0x80) {
        code = first;
    } else if (first >= 0xc2 && first < 0xe0 && continues(1)) {
        code = (first & 0x1f) << 6 | (byte(1) & 0x3f);
        length = 2;
    } else if (first >= 0xe0 && first < 0xf0 && continues(1) && continues(2)) {
        int32_t value = (first & 0x0f) << 12 | (byte(1) & 0x3f) << 6 | (byte(2) & 0x3f);
        bool surrogate = value >= 0xd800 && value < 0xe000;
        if (value >= 0x800 && !surrogate) code = value, length = 3;
    } else if (first >= 0xf0 && first < 0xf5 && continues(1) && continues(2) && continues(3)) {
        int32_t value =
            (first & 0x07) << 18 | (byte(1) & 0x3f) << 12 | (byte(2) & 0x3f) << 6 | (byte(3) & 0x3f);
        if (value >= 0x10000 && value < code_points) code = value, length = 4;
    }
    at += length;
    return code;
}

// The number of bytes in a well-formed character, given the first one.
inline int utf8_length(char first) {
    uint8_t byte = (uint8_t)first;
    return byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

// The size of a text without an incomplete character at its end, whose other bytes may follow later.
inline size_t whole_characters(std::string_view text) {
    for (size_t back = 1; back <= 3 && back <= text.size(); back++) {
        char byte = text[text.size() - back];
        if ((byte & 0xc0) == 0x80) continue;  // the character begins earlier
        return text.size() - ((size_t)utf8_length(byte) > back ? back : 0);
    }
    return text.size();
}

inline void append_utf8(std::string& text, int32_t code) {
    if (code < 0x80) {
        text += (char)code;
        return;
    }
    if (code < 0x800) {
        text += (char)(0xc0 | code >> 6);
    } else {
        if (code < 0x10000) {
            text += (char)(0xe0 | code >> 12);
        } else {
            text += (char)(0xf0 | code >> 18);
            text += (char)(0x80 | (code >> 12 & 0x3f));
        }
        text += (char)(0x80 | (code >> 6 & 0x3f));
    }
    text += (char)(0x80 | (code & 0x3f));
}

inline bool is_utf8(std::string_view text) {
    const char *at = text.data(), *end = at + text.size();
    while (at < end) {
        if (next_code_point(at, end) == invalid_byte) return false;
    }
    return true;
}

// White space as Unicode defines it.
inline bool is_white_space(int32_t code) {
    return (code >= 0x09 && code <= 0x0d) || code == 0x20 || code == 0x85 || code == 0xa0 || code == 0x1680 ||
           (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f ||
           code == 0x205f || code == 0x3000;
}
