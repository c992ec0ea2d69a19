/*
JSON from files that others wrote: parsed with a bound on nesting, and read by name with the type and the
range checked, so that a bad value is a message and not a crash.
*/
#pragma once

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/strings.h"

inline nlohmann::json parse_json(std::string_view source, const std::string& file) {
    constexpr int deepest = 32;
    auto bound_depth = [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
        if (depth > deepest)
            fail("%s: JSON nested more than %d deep; not a file of this kind", file.c_str(), deepest);
        return true;
    };
    try {
        return nlohmann::json::parse(source, bound_depth);
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

// A value as a line of a file. Bytes that are no UTF-8 are replaced.
inline std::string json_line(const nlohmann::ordered_json& value) {
    return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

// A JSON number that must be whole and in range.
inline int64_t json_integer(const nlohmann::json& value, int64_t low, int64_t high, const std::string& what) {
    bool fits =
        value.is_number_unsigned() ? value.get<uint64_t>() <= (uint64_t)INT64_MAX : value.is_number_integer();
    if (!fits || value.get<int64_t>() < low || value.get<int64_t>() > high) {
        fail("%s is %s; it must be a whole number from %lld to %lld", what.c_str(), json_text(value).c_str(),
             (long long)low, (long long)high);
    }
    return value.get<int64_t>();
}

// JSON objects of a fixed form, from files that others wrote: every field is read by name with its type
// checked, and a field that nobody reads is refused, because it may mean something.
class JsonObject {
public:
    // `what` names the object in messages: "FILE: model".
    JsonObject(const nlohmann::json& value, std::string what) : value_(value), what_(std::move(what)) {
        if (!value.is_object())
            fail("%s is %s; it must be an object", what_.c_str(), json_text(value).c_str());
    }

    const std::string& what() const { return what_; }

    // Null for a field that is not there.
    const nlohmann::json& get(const std::string& name) {
        static const nlohmann::json null;
        read_.push_back(name);
        auto found = value_.find(name);
        return found == value_.end() ? null : *found;
    }

    bool boolean(const std::string& name, bool otherwise) {
        const nlohmann::json& value = get(name);
        if (value.is_null()) return otherwise;
        if (!value.is_boolean()) refuse(name, value, "true or false");
        return value.get<bool>();
    }

    std::string string(const std::string& name) {
        const nlohmann::json& value = get(name);
        if (!value.is_string()) refuse(name, value, "a text");
        return value.get<std::string>();
    }

    int64_t integer(const std::string& name, int64_t low, int64_t high) {
        return json_integer(get(name), low, high, what_ + ": " + name);
    }

    const nlohmann::json& array(const std::string& name) {
        const nlohmann::json& value = get(name);
        if (!value.is_array()) refuse(name, value, "an array");
        return value;
    }

    // A field that has no effect here.
    void ignore(const std::string& name) { get(name); }

    // A field that may be there only without effect: null, false, 0 or "".
    void without(const std::string& name) {
        const nlohmann::json& value = get(name);
        bool no_effect = value.is_null() || value == false || value == 0 || value == "";
        if (!no_effect)
            fail("%s: %s is %s, which is not supported; use a tokenizer without it", what_.c_str(),
                 name.c_str(), json_text(value).c_str());
    }

    void done() const {
        for (const auto& [name, value] : value_.items()) {
            if (std::find(read_.begin(), read_.end(), name) == read_.end()) {
                fail("%s: the field \"%s\" is not known; use a tokenizer without it", what_.c_str(),
                     printable(name).c_str());
            }
        }
    }

private:
    [[noreturn]] void refuse(const std::string& name, const nlohmann::json& value, const char* wanted) const {
        fail("%s: %s is %s; it must be %s", what_.c_str(), name.c_str(),
             value.is_null() ? "missing" : json_text(value).c_str(), wanted);
    }

    const nlohmann::json& value_;
    std::string what_;
    std::vector<std::string> read_;
};
