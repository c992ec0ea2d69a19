/*
JSON lines (.jsonl): each line is an object, and one of its fields holds the text of a document. Only that
field is kept while a line is read, so a line of 100 MB needs little more than 100 MB of memory.

A line that is not a valid object with a string in the field is refused, for example {"text": null}, half a
line, bytes that are not UTF-8, or a field that appears twice. Extensions that Python's json.dumps writes are
accepted: NaN, Infinity, and lone surrogates (\ud800), which become U+FFFD. Blank lines are skipped.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "data/base/error.h"
#include "data/base/json.h"  // behind_literal
#include "data/base/strings.h"

// The callbacks of nlohmann's parser for each item in a line.
class TextFieldReader : public nlohmann::json_sax<nlohmann::json> {
public:
    TextFieldReader(const std::string& field, std::string& text) : field_(field), text_(text) {
        text.clear();
    }

    enum Found { nothing, text, other_type, twice };
    Found found() const { return found_; }
    bool is_object() const { return object_; }
    size_t error_byte() const { return error_byte_; }  // counted from 1

    bool null() override { return other(); }
    bool boolean(bool) override { return other(); }
    bool number_integer(number_integer_t) override { return other(); }
    bool number_unsigned(number_unsigned_t) override { return other(); }
    bool number_float(number_float_t, const string_t&) override { return other(); }
    bool binary(binary_t&) override { return other(); }

    bool string(string_t& value) override {
        if (take(text)) text_ = std::move(value);
        return true;
    }
    bool key(string_t& name) override {
        wanted_ = depth_ == 1 && name == field_;
        return true;
    }
    bool start_object(size_t) override {
        object_ |= depth_ == 0;
        return open();
    }
    bool start_array(size_t) override { return open(); }
    bool end_object() override { return close(); }
    bool end_array() override { return close(); }
    bool parse_error(size_t byte, const std::string&, const nlohmann::detail::exception&) override {
        error_byte_ = byte;
        return false;
    }

private:
    bool other() {
        take(other_type);
        return true;
    }
    bool open() {
        take(other_type);
        depth_++;
        return true;
    }
    bool close() {
        depth_--;
        return true;
    }
    // Handles the start of a value; returns whether it belongs to the field.
    bool take(Found what) {
        if (!wanted_) return false;
        wanted_ = false;
        found_ = found_ == nothing ? what : twice;
        return true;
    }

    const std::string& field_;
    std::string& text_;
    size_t depth_ = 0, error_byte_ = 0;
    bool object_ = false, wanted_ = false;
    Found found_ = nothing;
};

// The UTF-16 code unit whose escape begins at `at`, as in \ud83d; -1 if no escape is there.
inline int escaped_unit(std::string_view json, size_t at) {
    std::string_view escape = json.substr(std::min(at, json.size()), 6);
    int unit = -1;
    if (escape.size() < 6 || !escape.starts_with("\\u")) return -1;
    auto [end, error] = std::from_chars(escape.data() + 2, escape.data() + 6, unit, 16);
    return end == escape.data() + 6 && unit >= 0 ? unit : -1;
}

// Replaces the non-JSON output of Python's json.dumps by JSON: NaN and infinities by a number, with white
// space on both sides, so that it does not merge with its neighbors, and lone surrogates by U+FFFD. Byte
// offsets do not change. Returns the number of lone surrogates.
inline uint64_t repair_json(std::string& line) {
    constexpr std::pair<std::string_view, std::string_view> numbers[] = {
        {"NaN", " 0 "}, {"-Infinity", " 0       "}, {"Infinity", " 0      "}};
    auto high = [](int unit) { return unit >= 0xd800 && unit < 0xdc00; };
    auto low = [](int unit) { return unit >= 0xdc00 && unit < 0xe000; };
    uint64_t lone = 0;
    for (size_t at = 0; at < line.size(); at++) {
        for (auto [name, number] : numbers) {
            if (line.compare(at, name.size(), name) == 0) line.replace(at, name.size(), number);
        }
        if (line[at] != '"') continue;
        for (size_t end = behind_literal(line, at); at + 1 < end; at++) {
            if (line[at] != '\\') continue;
            int unit = escaped_unit(line, at), next = escaped_unit(line, at + 6);
            if (high(unit) && low(next)) {
                at += 11;
            } else if (high(unit) || low(unit)) {
                line.replace(at, 6, "\\ufffd");
                lone++;
            } else {
                at++;
            }
        }
    }
    return lone;
}

// Extracts the text from a line that is not blank. Returns what is wrong with the line and how to fix it,
// "REASON; REMEDY", or an empty string.
inline std::string
read_json_line(std::string_view line, const std::string& field, std::string& document /* replaced */,
               uint64_t* lone_surrogates = nullptr /* those that became U+FFFD are added */) {
    std::optional<TextFieldReader> reader(std::in_place, field, document);
    if (!nlohmann::json::sax_parse(line, &*reader)) {
        std::string repaired(line);
        uint64_t lone = repair_json(repaired);
        reader.emplace(field, document);
        if (!nlohmann::json::sax_parse(repaired, &*reader))
            return text("is not valid JSON at byte %zu of the line; repair the line", reader->error_byte());
        if (lone_surrogates) *lone_surrogates += lone;
    }
    std::string name = printable(field);
    if (!reader->is_object()) return "is not a JSON object; write each line as {\"" + name + "\": \"...\"}";
    switch (reader->found()) {
    case TextFieldReader::nothing:
        return "has no field \"" + name + "\"; name the field that holds the text with --text-field";
    case TextFieldReader::other_type:
        return "the field \"" + name + "\" is not a string; name another with --text-field";
    case TextFieldReader::twice:
        return "has the field \"" + name + "\" twice; remove one of them";
    case TextFieldReader::text:
        break;
    }
    return "";
}
