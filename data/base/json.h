/*
JSON from files of other programs: parsed with a bound on nesting, and read by name with type and range
checked, so that a bad value leads to an error message, not to a crash.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/strings.h"

// The position after a string literal whose opening quote is at `at`, or the end of the text.
inline size_t behind_literal(std::string_view json, size_t at) {
    for (at++; at < json.size(); at++) {
        if (json[at] == '"') return at + 1;
        if (json[at] == '\\') at++;
    }
    return json.size();
}

// The deepest nesting of brackets in a text that may be JSON.
inline int64_t json_depth(std::string_view source) {
    int64_t depth = 0, deepest = 0;
    for (size_t at = 0; at < source.size();) {
        char c = source[at];
        depth += (c == '[' || c == '{') - (c == ']' || c == '}');
        deepest = std::max(deepest, depth);
        at = c == '"' ? behind_literal(source, at) : at + 1;
    }
    return deepest;
}

// Deepest nesting accepted in JSON of other programs: the library copies, compares and writes a value
// recursively. The depth is checked beforehand, not by a callback of the library's parser: with a callback,
// the library scans all previous elements of an object or a list each time an object in it ends.
constexpr int deepest_json = 32;

// Returns a discarded value if the text is not JSON, or is nested too deep.
template <typename Json = nlohmann::json>
inline Json try_json(std::string_view source) {
    if (json_depth(source) > deepest_json) return Json::value_t::discarded;
    return Json::parse(source, nullptr, false);
}

inline nlohmann::json parse_json(std::string_view source, const std::string& file) {
    refuse_lfs_pointer(source, file);
    if (json_depth(source) > deepest_json)
        fail("%s: JSON nested more than %d deep; use a file of the right kind", file.c_str(), deepest_json);
    try {
        return nlohmann::json::parse(source);
    } catch (const nlohmann::json::parse_error& error) {
        fail("%s: not valid JSON at byte %zu; the file may be cut short or of another kind", file.c_str(),
             error.byte);
    } catch (const nlohmann::json::exception& error) {
        fail("%s: not valid JSON (%s); the file may be damaged", file.c_str(),
             printable(error.what()).c_str());
    }
}

// A JSON value for a message.
inline std::string json_text(const nlohmann::json& value) {
    if (!value.is_primitive()) return value.is_array() ? "an array" : "an object";
    return printable(value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
}

// Calls visit(object, place) for each non-blank line of a text. place: "FILE:LINE", for messages.
template <typename Visit>
void each_json_object(std::string_view content, const std::string& file, Visit&& visit) {
    for (size_t number = 1; !content.empty(); number++) {
        std::string_view line = next_line(content);
        if (is_blank(line)) continue;
        std::string place = text("%s:%zu", file.c_str(), number);
        nlohmann::json value = parse_json(line, place);
        if (!value.is_object())
            fail("%s: is %s; each line must be an object", place.c_str(), json_text(value).c_str());
        visit(value, place);
    }
}

// Returns a value as one line of a file. Bytes that are not UTF-8 are replaced.
inline std::string json_line(const nlohmann::ordered_json& value) {
    return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

// Returns a JSON number, which must be an integer in range.
inline int64_t json_integer(const nlohmann::json& value, int64_t low, int64_t high, const std::string& what) {
    bool fits =
        value.is_number_unsigned() ? value.get<uint64_t>() <= (uint64_t)INT64_MAX : value.is_number_integer();
    if (!fits || value.get<int64_t>() < low || value.get<int64_t>() > high) {
        fail("%s is %s; it must be a whole number from %lld to %lld", what.c_str(), json_text(value).c_str(),
             (long long)low, (long long)high);
    }
    return value.get<int64_t>();
}

// Returns an integer field, from -1 to the maximum of the type. The library throws if the field is missing.
template <typename Integer = int>
Integer whole_in(const nlohmann::json& record, const char* name) {
    constexpr uint64_t most = std::min<uint64_t>(std::numeric_limits<Integer>::max(), INT64_MAX);
    return (Integer)json_integer(record.at(name), -1, (int64_t)most, name);
}

// Returns the value truncated to an integer, or `otherwise` if it is too large to cast.
inline int64_t integer_of(double value, int64_t otherwise) {
    return std::abs(value) < 9e15 ? (int64_t)value : otherwise;
}

// Returns whether every number in the value can be cast to any type of integer; the library casts without a
// check.
inline bool fits_integers(const nlohmann::json& value) {
    if (value.is_number_float()) return value.get<double>() > -1 && value.get<double>() < 0x1p31;
    return value.is_primitive() || std::ranges::all_of(value, fits_integers);
}

// A JSON object of a fixed form, from a file of another program: each field is read by name with type and
// range checked, and a field that is never read is refused, because it may mean something.
class JsonObject {
public:
    // `what` names the object in messages: "FILE: model".
    JsonObject(const nlohmann::json& value, std::string what) : value_(value), what_(std::move(what)) {
        if (!value.is_object())
            fail("%s is %s; it must be an object", what_.c_str(), json_text(value).c_str());
    }

    const std::string& what() const { return what_; }

    JsonObject child(const std::string& name) { return {get(name), where(name)}; }

    std::string where(const std::string& name) const { return what_ + ": " + name; }

    // Returns null for a missing field.
    const nlohmann::json& get(const std::string& name) {
        static const nlohmann::json null;
        read_.insert(name);
        auto found = value_.find(name);
        return found == value_.end() ? null : *found;
    }

    // A null field counts as missing, except in is_null().
    bool has(const std::string& name) { return !get(name).is_null(); }
    bool is_null(const std::string& name) { return !has(name) && value_.contains(name); }

    bool boolean(const std::string& name, bool otherwise) {
        const nlohmann::json& value = get(name);
        if (value.is_null()) return otherwise;
        if (!value.is_boolean()) wrong(name, "true or false");
        return value.get<bool>();
    }

    std::string string(const std::string& name) {
        const nlohmann::json& value = get(name);
        if (!value.is_string()) wrong(name, "a string");
        return value.get<std::string>();
    }

    int64_t integer(const std::string& name, int64_t low, int64_t high) {
        if (!has(name))
            wrong(name, text("a whole number from %lld to %lld", (long long)low, (long long)high));
        return json_integer(get(name), low, high, where(name));
    }

    // Returns a number above 0 and at most `most`; it must be above 0 even after rounding to float.
    double number(const std::string& name, double most) {
        const nlohmann::json& value = get(name);
        double result = value.is_number() ? value.get<double>() : NAN;
        if (!((float)result > 0 && result <= most))
            wrong(name, text("a number above 0 and at most %g", most));
        return result;
    }

    double number(const std::string& name, double most, double otherwise) {
        return has(name) ? number(name, most) : otherwise;
    }

    // Any unsigned 64-bit integer.
    uint64_t bits(const std::string& name) {
        if (!get(name).is_number_unsigned()) wrong(name, "a whole number");
        return get(name).get<uint64_t>();
    }

    const nlohmann::json& array(const std::string& name) {
        const nlohmann::json& value = get(name);
        if (!value.is_array()) wrong(name, "an array");
        return value;
    }

    // Accepts a field that has no effect here.
    void ignore(const std::string& name) { get(name); }

    // Accepts a field only if its value has no effect: null, false, 0, "" or empty.
    void without(const std::string& name, const char* remedy) {
        const nlohmann::json& value = get(name);
        bool no_effect = value.is_null() || value == false || value == 0 || value == "" ||
                         (value.is_structured() && value.empty());
        if (!no_effect)
            fail("%s is %s, which is not supported; %s", where(name).c_str(), json_text(value).c_str(),
                 remedy);
    }

    // The names of the fields that were not read.
    std::vector<std::string> unread() const {
        std::vector<std::string> names;
        for (const auto& [name, value] : value_.items()) {
            if (!read_.contains(name)) names.push_back(name);
        }
        return names;
    }

    // Refuses a field that was not read.
    void done(const char* remedy) const {
        for (const std::string& name : unread())
            fail("%s: the field \"%s\" is not known; %s", what_.c_str(), printable(name).c_str(), remedy);
    }

private:
    [[noreturn]] void wrong(const std::string& name, const std::string& wanted) {
        fail("%s is %s; it must be %s", where(name).c_str(),
             has(name) ? json_text(get(name)).c_str() : "missing", wanted.c_str());
    }

    const nlohmann::json& value_;
    std::string what_;
    std::set<std::string> read_;
};
