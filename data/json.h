/*
JSON from files that others wrote: parsed with a bound on nesting, and read by name with the type and the
range checked, so that a bad value is a message and not a crash.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "data/error.h"
#include "data/words.h"

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
