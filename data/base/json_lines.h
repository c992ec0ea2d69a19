/*
JSON lines (.jsonl): each line is an object, and one of its fields holds the text of a document. Only that
field is kept while a line is read, so a line of 100 MB costs little more memory than it has bytes.

A line that is not one valid object with a text in the field is refused: {"text": null} as much as half a
line, bytes that are no UTF-8, half a surrogate pair (\ud800), or the field twice. Lines of white space are
passed over.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <string_view>

#include "data/base/error.h"
#include "data/base/strings.h"

// The callbacks of nlohmann's parser for each item that it meets in a line.
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
    // A value has come; whether it is that of the field.
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

// Takes the text out of a line that is not blank. Returns what is wrong with the line and what to do,
// "REASON; REMEDY", or nothing.
inline std::string read_json_line(std::string_view line, const std::string& field,
                                  std::string& document /* replaced */) {
    TextFieldReader reader(field, document);
    if (!nlohmann::json::sax_parse(line, &reader)) {
        return text("is not valid JSON at byte %zu of the line; repair the line or leave it out",
                    reader.error_byte());
    }
    std::string name = printable(field);
    if (!reader.is_object()) return "is no JSON object; give each line the form {\"" + name + "\": \"...\"}";
    switch (reader.found()) {
    case TextFieldReader::nothing:
        return "has no field \"" + name + "\"; name the field that holds the text with --text-field";
    case TextFieldReader::other_type:
        return "the field \"" + name + "\" is no text; name another with --text-field, or leave the line out";
    case TextFieldReader::twice:
        return "has the field \"" + name + "\" twice; leave one of them out";
    case TextFieldReader::text:
        break;
    }
    return "";
}
