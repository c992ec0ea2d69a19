/*
How tokenizer files write bytes as text: each of the 256 bytes has a printable character, its own if that is
printable in Latin-1, otherwise one from U+0100 on. " the" is written as "Ġthe".
*/
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "data/base/utf8.h"

// The code point that represents each byte.
inline constexpr std::array<int32_t, 256> byte_alphabet = [] {
    std::array<int32_t, 256> letters{};
    int32_t next = 0x100;
    for (int byte = 0; byte < 256; byte++) {
        bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
        letters[byte] = printable ? byte : next++;
    }
    return letters;
}();

inline std::string to_byte_alphabet(std::string_view bytes) {
    std::string text;
    for (char byte : bytes) append_utf8(text, byte_alphabet[(uint8_t)byte]);
    return text;
}

// Returns nothing if the text has a character that does not represent a byte.
inline std::optional<std::string> from_byte_alphabet(std::string_view text) {
    static constexpr std::array<int16_t, 0x144> byte_of = [] {
        std::array<int16_t, 0x144> bytes{};
        bytes.fill(-1);
        for (int byte = 0; byte < 256; byte++) bytes[byte_alphabet[byte]] = (int16_t)byte;
        return bytes;
    }();
    std::string bytes;
    const char *at = text.data(), *end = at + text.size();
    while (at < end) {
        int32_t code = next_code_point(at, end);
        if (code < 0 || code >= (int32_t)byte_of.size() || byte_of[code] < 0) return {};
        bytes += (char)byte_of[code];
    }
    return bytes;
}
