/*
Splits lists and lines, and builds phrases for messages: alternatives, and the nearest known name to a
misspelled one.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/print.h"

// Converts words, "input gradient", to the name of a field in a file, input_gradient, and back.
inline std::string name_of_words(std::string words) {
    std::ranges::replace(words, ' ', '_');
    return words;
}
inline std::string words_of_name(std::string name) {
    std::ranges::replace(name, '_', ' ');
    return name;
}

// The items of "a,b,c", including empty ones.
inline std::vector<std::string> comma_separated(std::string_view list) {
    std::vector<std::string> items;
    for (size_t begin = 0; begin <= list.size();) {
        size_t end = std::min(list.find(',', begin), list.size());
        items.emplace_back(list.substr(begin, end - begin));
        begin = end + 1;
    }
    return items;
}

// Appends an item to a list, with `between` before all but the first: "a", "a, b".
inline void append_item(std::string& list, std::string_view item, std::string_view between = ", ") {
    if (!list.empty()) list += between;
    list += item;
}

// "a, b, c"; with more than `most` items, "a, b and 3 more".
inline std::string joined(const std::vector<std::string>& words, std::string_view between = ", ",
                          size_t most = SIZE_MAX) {
    std::string result;
    for (size_t i = 0; i < std::min(words.size(), most); i++) append_item(result, words[i], between);
    if (words.size() > most) result += text(" and %zu more", words.size() - most);
    return result;
}

// Removes the first line and its line feed from a text that is not empty; returns the line without the line
// feed.
inline std::string_view next_line(std::string_view& rest) {
    std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    return line;
}

// The last lines of a program's output, joined into one: mpirun explains in a paragraph, between rules, why
// it does not start.
inline std::string last_words(std::string_view output) {
    constexpr size_t most_lines = 6, longest = 200;
    std::vector<std::string> lines;
    while (!output.empty()) {
        std::string_view line = next_line(output);
        if (line.find_first_not_of("-= \t\r") == line.npos) continue;
        lines.push_back(one_line(line.substr(0, longest)));
        if (lines.size() > most_lines) lines.erase(lines.begin());
    }
    return lines.empty() ? "it said nothing" : joined(lines, " / ");
}

inline bool is_blank(std::string_view line) {
    return line.find_first_not_of(" \t\r\n") == line.npos;
}

// Refuses a git-lfs pointer: git leaves one in place of a large file until git-lfs fetches the file.
inline void refuse_lfs_pointer(std::string_view bytes, const std::string& path) {
    if (bytes.starts_with("version https://git-lfs."))
        fail("%s: only a git-lfs pointer to the file; get the file itself with `git lfs pull`", path.c_str());
}

// "3 x 4"
template <typename Size>
std::string shape_text(const std::vector<Size>& shape) {
    std::string result;
    for (Size size : shape) append_item(result, std::to_string(size), " x ");
    return result.empty() ? "()" : result;
}

// "a, b or c"
inline std::string alternatives(const std::vector<std::string>& words) {
    std::string result;
    for (const std::string& word : words) append_item(result, word, &word == &words.back() ? " or " : ", ");
    return result;
}

// Levenshtein distance: the insertions, deletions and substitutions that turn one word into the other.
inline size_t edit_distance(std::string_view from, std::string_view to) {
    std::vector<size_t> row(to.size() + 1);
    for (size_t j = 0; j <= to.size(); j++) row[j] = j;
    for (size_t i = 1; i <= from.size(); i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= to.size(); j++) {
            size_t substituted = diagonal + (from[i - 1] != to[j - 1]);
            diagonal = row[j];
            row[j] = std::min({substituted, row[j] + 1, row[j - 1] + 1});
        }
    }
    return row.back();
}

// ", the nearest is NAME", or nothing if no name is near.
inline std::string nearest_name(const std::string& word, const std::vector<std::string>& names) {
    if (word.size() > 100) return "";
    const std::string* nearest = nullptr;
    size_t distance = word.size() / 3 + 2;
    for (const std::string& name : names) {
        if (size_t d = edit_distance(word, name); d < distance) distance = d, nearest = &name;
    }
    return nearest ? ", the nearest is " + *nearest : "";
}
