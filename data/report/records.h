/*
Reads files of JSON lines piece by piece: the log of a long run is too large to be held in memory, and that of
an active run keeps growing. Nothing in such a file is an error: a line that cannot be read is skipped and
counted, and so is an incomplete last line, which a killed run leaves or an active one is still writing.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/figures.h"  // counted
#include "data/base/file.h"
#include "data/base/json.h"
#include "data/base/strings.h"

// The outcome of reading a file.
struct Reading {
    uint64_t lines = 0, records = 0;
    uint64_t unreadable = 0, first_unreadable = 0;  // lines, and the number of the first one
    uint64_t half_line = 0;                         // bytes of an unterminated last line
    uint64_t with_nan = 0;  // lines with a NaN or an infinity, which are not valid JSON

    // Returns remarks of one sentence each; `name` is that of the file.
    std::vector<std::string> notes(const std::string& name) const {
        std::vector<std::string> result;
        if (unreadable > 0)
            result.push_back(name + ": " + counted(unreadable, "line") + " of " + std::to_string(lines) +
                             " could not be read; the first is line " + std::to_string(first_unreadable));
        if (half_line > 0)
            result.push_back(name + ": the last line is cut short after " + counted(half_line, "byte") +
                             ": the run was interrupted there, or is still writing it");
        if (with_nan > 0)
            result.push_back(name + ": a NaN or an infinity in " + counted(with_nan, "line") +
                             " is shown as a missing value");
        return result;
    }
};

// Returns a line with null in place of the NaN, Infinity and -Infinity that some writers of JSON produce.
inline std::string without_nan(std::string_view line) {
    std::string result;
    bool in_text = false;
    for (size_t i = 0; i < line.size(); i++) {
        if (line[i] == '"') in_text = !in_text;
        if (in_text && line[i] == '\\' && i + 1 < line.size()) result += line[i++];
        bool replaced = false;
        for (std::string_view word : {"NaN", "nan", "-Infinity", "Infinity", "-inf", "inf"}) {
            if (in_text || replaced || !line.substr(i).starts_with(word)) continue;
            result += "null";
            i += word.size() - 1;
            replaced = true;
        }
        if (!replaced) result += line[i];
    }
    return result;
}

// Parses a line as an object. Returns a value that is not an object if that fails.
inline nlohmann::json parse_record(std::string_view line, Reading& reading) {
    nlohmann::json record = try_json(line);
    if (record.is_discarded()) {
        record = try_json(without_nan(line));
        reading.with_nan += record.is_object();
    }
    reading.records += record.is_object();
    if (!record.is_object() && reading.unreadable++ == 0) reading.first_unreadable = reading.lines;
    return record;
}

inline bool exists(const std::string& path) {
    struct stat status;
    return stat(path.c_str(), &status) == 0;
}

// Passes every record of a file to take(), in order.
template <typename Take>
Reading read_records(const std::string& path, Take&& take) {
    constexpr size_t piece = 1 << 20, longest_line = 64 << 20;
    Reading reading;
    struct stat status;
    FileHandle file = open_regular(path, &status);
    std::string waiting;  // the beginning of a line whose end has not been read yet
    std::string buffer(piece, '\0');
    bool too_long = false;
    for (uint64_t at = 0;;) {
        ssize_t got = pread(file.get(), buffer.data(), piece, (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) fail_with_errno(path, "read it");
        if (got == 0) break;
        at += (uint64_t)got;
        std::string_view rest(buffer.data(), (size_t)got);
        for (size_t end; (end = rest.find('\n')) != rest.npos; rest.remove_prefix(end + 1)) {
            waiting.append(rest.substr(0, end));
            reading.lines++;
            if (!is_blank(waiting) || too_long) {
                nlohmann::json record = parse_record(too_long ? "" : waiting, reading);
                if (record.is_object()) take(record);
            }
            waiting.clear();
            too_long = false;
        }
        waiting.append(rest);
        if (waiting.size() > longest_line) waiting.clear(), too_long = true;
    }
    reading.half_line = is_blank(waiting) ? 0 : waiting.size();
    return reading;
}

// ----------------------------------------------------------------------------
// fields, any of which may be missing, null or of another type

// Returns NaN if it is not a number.
inline double number_of(const nlohmann::json& value) {
    return value.is_number() ? value.get<double>() : NAN;
}

inline double number_in(const nlohmann::json& record, const char* name) {
    auto found = record.find(name);
    return found == record.end() ? NAN : number_of(*found);
}

inline int64_t integer_in(const nlohmann::json& record, const char* name, int64_t otherwise = 0) {
    return integer_of(number_in(record, name), otherwise);
}

inline std::string text_in(const nlohmann::json& record, const char* name) {
    auto found = record.find(name);
    return found != record.end() && found->is_string() ? found->get<std::string>() : "";
}

// Returns a field that is an array, or else an empty array.
inline const nlohmann::json& array_in(const nlohmann::json& record, const char* name) {
    static const nlohmann::json none = nlohmann::json::array();
    if (!record.is_object()) return none;
    auto found = record.find(name);
    return found != record.end() && found->is_array() ? *found : none;
}

// Returns a field that is an object, or else an empty object.
inline const nlohmann::json& object_in(const nlohmann::json& record, const char* name) {
    static const nlohmann::json none = nlohmann::json::object();
    auto found = record.find(name);
    return found != record.end() && found->is_object() ? *found : none;
}

// Returns a number for a page, with seven digits; null if it is not finite.
inline nlohmann::ordered_json number_or_null(double value) {
    if (!std::isfinite(value)) return nullptr;
    if (value == std::floor(value) && std::abs(value) < 9e15) return (int64_t)value;
    return std::stod(text("%.7g", value));
}
