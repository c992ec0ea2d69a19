/*
Text and progress on a terminal.

Text from any source is shown faithfully and safely: control characters, characters that are invisible or
change the direction of writing, and bytes that are not valid characters are escaped. Sentences are wrapped to
the width of the terminal.

ProgressLine shows the progress of long work, and how much longer it will take. It appears on standard error
after a second, if that is a terminal, and is removed at the end. For work of unknown size it shows how much
is done.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <sys/ioctl.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/figures.h"  // seconds_now
#include "data/base/screen.h"
#include "data/base/utf8.h"

// Characters that a terminal obeys or hides rather than shows.
inline bool is_invisible(int32_t code) {
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0xad || code == 0x61c || code == 0x180e ||
           (code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
           (code >= 0x2060 && code <= 0x206f) || code == 0xfeff || (code >= 0xfff9 && code <= 0xfffb) ||
           (code >= 0xe0000 && code < 0xe1000);
}

// Returns the character at `at`, as it is or escaped ("\n", "\x1b", "\u{202e}"), and advances `at`. A
// backslash is not escaped.
inline std::string visible_character(const char*& at, const char* end) {
    const char* begin = at;
    int32_t code = next_code_point(at, end);
    switch (code) {
    case '\n':
        return "\\n";
    case '\r':
        return "\\r";
    case '\t':
        return "\\t";
    case invalid_byte:
        return text("\\x%02x", (uint8_t)*begin);
    }
    if (!is_invisible(code)) return {begin, at};
    return text(code < 0x80 ? "\\x%02x" : "\\u{%x}", (unsigned)code);
}

// A whole text on one line, with escapes.
inline std::string visible_text(std::string_view from) {
    std::string result;
    for (const char *at = from.data(), *end = at + from.size(); at < end;)
        result += visible_character(at, end);
    return result;
}

// The beginning of a text: at most `lines` lines, each of at most `characters` characters. "..." marks what
// was left out. Line breaks of the text are kept.
inline std::vector<std::string> visible_lines(std::string_view from, size_t lines, size_t characters) {
    std::vector<std::string> result;
    const char *at = from.data(), *end = at + from.size();
    while (at < end && result.size() < lines) {
        std::string line;
        size_t shown = 0;
        for (; at < end && *at != '\n'; shown++) {
            std::string character = visible_character(at, end);
            if (shown < characters) line += character;
        }
        if (shown > characters) line += "...";
        if (at < end) at++;  // the line feed
        result.push_back(line);
    }
    if (at < end) result.push_back("...");
    return result;
}

// Columns to wrap text at: those of the terminal on stdout, within limits; `unknown` if stdout is not a
// terminal.
inline int terminal_width(int unknown = 110) {
    constexpr int least = 60, most = 110;
    winsize size = {};
    if (!isatty(STDOUT_FILENO) || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0)
        return unknown;
    return std::clamp<int>(size.ws_col, least, most);
}

// Words wrapped to lines of `width` columns, all but the first indented; the first one begins at `column`.
inline std::string wrapped(const std::string& words, int indent, int column, int width) {
    std::string result;
    for (size_t at = 0; at < words.size();) {
        size_t end = std::min(words.find(' ', at), words.size());
        std::string word = words.substr(at, end - at);
        at = end + 1;
        bool first = result.empty();
        if (!first && column + 1 + (int)word.size() > width) {
            result += "\n" + std::string((size_t)indent, ' ');
            column = indent;
            first = true;
        }
        if (!first) result += ' ', column++;
        result += word;
        column += (int)word.size();
    }
    return result + "\n";
}

class ProgressLine {
public:
    // `what` begins the line: "tokenize". Work is counted in bytes and shown in MB, or is counted in `units`.
    // A total of 0 means unknown.
    ProgressLine(std::string what, double total, const char* units = nullptr)
        : what_(std::move(what)), units_(units ? units : "MB"), scale_(units ? 1 : 1e-6), total_(total) {
        screen_.open(false, false);
    }
    ~ProgressLine() { clear(); }

    void add(double work) { add(work, seconds_now() - start_); }
    // seconds: since the start
    void add(double work, double seconds) {
        done_ += work;
        if (seconds < next_) return;
        next_ = seconds + 0.2;
        screen_.keep_below([this, seconds](int) { return one_line(words(seconds)); });
    }

    // The text of the line, `seconds` after the start.
    std::string words(double seconds) const {
        double done = done_ * scale_, share = std::min(1.0, done_ / total_);
        if (total_ == 0)
            return text("%s: %.0f %s, %.0f %s/s", what_.c_str(), done, units_, done / seconds, units_);
        return text("%s: %3.0f%% of %.0f %s, %.0f %s/s, %.0f s left", what_.c_str(), 100 * share,
                    total_ * scale_, units_, done / seconds, units_, seconds * (1 / share - 1));
    }

    // Removes the line, so that something can be printed; the next add() may draw it again.
    void clear() { screen_.remove_line(); }

private:
    double start_ = seconds_now();
    std::string what_;
    const char* units_;
    double scale_;
    double total_, done_ = 0, next_ = 1;
    Screen screen_{stderr};
};
