/*
Prints all output of the program. Names, options and samples may come from files of other users, and a
terminal obeys some characters as commands, so all text passes through here, where these characters are
replaced by escapes.
*/
#pragma once

#include <cstdarg>
#include <cstdio>
#include <string>
#include <string_view>

#include "data/base/error.h"
#include "data/base/utf8.h"

// Characters that control a terminal (C0, C1, DEL), and marks that change the order in which letters are
// shown (UAX #9).
inline bool is_control(int32_t code) {
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x61c || code == 0x200e ||
           code == 0x200f || (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
}

// Makes text from outside safe to show anywhere: writes control characters as in JSON, \u001b, except for
// tabs and line feeds if lines_stay, and bytes that are not UTF-8 as \x9b. JSON for other programs remains
// JSON.
inline std::string visible(std::string_view from, bool lines_stay = true) {
    std::string result;
    for (const char *at = from.data(), *end = at + from.size(); at < end;) {
        const char* begin = at;
        const int32_t code = next_code_point(at, end);
        if (code == invalid_byte)
            result += text("\\x%02x", (unsigned char)*begin);
        else if (is_control(code) && !(lines_stay && (code == '\n' || code == '\t')))
            result += text("\\u%04x", (unsigned)code);
        else
            result.append(begin, at);
    }
    return result;
}
inline std::string one_line(std::string_view from) {
    return visible(from, false);
}

// Text from a file or the command line, fit for a message: on one line and not too long.
inline std::string printable(std::string_view from) {
    constexpr size_t longest = 100;
    if (from.size() <= longest) return one_line(from);
    return one_line(from.substr(0, whole_characters(from.substr(0, longest)))) + "...";
}

// Prints to standard output.
inline void print_text(std::string_view from) {
    const std::string shown = visible(from);
    fwrite(shown.data(), 1, shown.size(), stdout);
}

// printf through visible().
__attribute__((format(printf, 1, 2))) inline void print(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    print_text(text_of(format, arguments));
    va_end(arguments);
}

// Prints a message of this program as one line on standard error.
inline void print_error(std::string_view message) {
    fprintf(stderr, "train_gpt: %s\n", one_line(message).c_str());
}

// Writes raw bytes, including zero bytes, to standard output: only for output that programs read.
inline void print_bytes(std::string_view bytes) {
    fwrite(bytes.data(), 1, bytes.size(), stdout);
}
