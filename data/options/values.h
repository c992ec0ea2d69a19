/*
Conversion of one option's value to and from text and JSON, guided by its row of the table.
*/
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "data/base/error.h"
#include "data/base/json.h"
#include "data/options/model_config.h"
#include "data/options/table.h"
#include "data/base/strings.h"

// ----------------------------------------------------------------------------
// names

inline std::string option_name(const OptionRow& row) {
    std::string name = row.field;
    for (char& c : name) {
        if (c == '_') c = '-';
    }
    return "--" + name;
}

// Finds the row of an option as written on the command line, dashes included; null if there is none. Commands
// may have different options of the same name, so `command` can select one.
inline const OptionRow* find_option(std::string_view name, std::optional<Command> command = {}) {
    for (const OptionRow& row : option_table()) {
        bool belongs = !command || row.belongs_to(*command);
        if (!row.positional && belongs && option_name(row) == name) return &row;
    }
    return nullptr;
}

// Returns whether `plan` searches over the option if it is not given.
inline bool is_searched(const OptionRow& row, Command command) {
    constexpr std::string_view fields[] = {"micro_batch", "tp",        "cp",   "pp",          "tp_overlap",
                                           "pp_schedule", "pp_chunks", "zero", "shard_group", "recompute"};
    return command == command_plan && std::ranges::find(fields, row.field) != std::end(fields);
}

// Returns whether the option accepts auto as another name for 0.
inline bool may_be_auto(const OptionRow& row) {
    return std::string_view(row.field) == "tp" || std::string_view(row.field) == "pp";
}

// Returns whether weights depend on the option's value, so that it is stored with them.
inline bool describes_model(const OptionRow& row) {
    return row.resume == Resume::shape || row.resume == Resume::tokens;
}

template <typename Value>
bool holds(const OptionRow& row) {
    return std::holds_alternative<Value>(row.example());
}

inline bool is_switch(const OptionRow& row) {
    return holds<bool>(row);
}

inline bool is_whole(const OptionRow& row) {
    return holds<int>(row) || holds<long long>(row);
}

inline bool is_number(const OptionRow& row) {
    return is_whole(row) || holds<float>(row) || holds<double>(row);
}

// ----------------------------------------------------------------------------
// to text

// The shortest text that reads back as the same number.
template <typename Number>
std::string number_text(Number value) {
    char buffer[64];
    std::to_chars_result result;
    if constexpr (std::is_integral_v<Number>) {
        result = std::to_chars(buffer, buffer + sizeof buffer, value);
    } else {
        result = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::general);
    }
    return std::string(buffer, result.ptr);
}

// 500, 90s, 10m, 2h or auto.
inline std::string interval_text(const Interval& interval) {
    if (interval.unit == Interval::best) return "auto";
    std::string unit;
    int count = interval.count;
    if (interval.unit == Interval::seconds) {
        unit = "s";
        for (const char* larger : {"m", "h"}) {
            if (count % 60) break;
            unit = larger, count /= 60;
        }
    }
    return number_text(count) + unit;
}

inline std::string value_text(const OptionValue& any) {
    return std::visit(
        [](const auto& value) -> std::string {
            using Value = std::decay_t<decltype(value)>;
            if constexpr (std::is_same_v<Value, bool>) {
                return name_of(value);
            } else if constexpr (std::is_arithmetic_v<Value>) {
                return number_text(value);
            } else if constexpr (std::is_same_v<Value, Choice>) {
                return value.names[(size_t)value.value];
            } else if constexpr (std::is_same_v<Value, Interval>) {
                return interval_text(value);
            } else if constexpr (std::is_same_v<Value, std::string>) {
                return value;
            } else {
                return joined(value, " ");
            }
        },
        any);
}

template <typename O>
std::string value_text(const OptionRow& row, const O& options) {
    return value_text(row.get(options));
}

// Returns whether the row's upper limit is only that of its type.
inline bool is_open_ended(const OptionRow& row) {
    return is_whole(row) && row.limits.high == INT32_MAX;
}

// Describes the suffixes that may follow the digits of a number; empty if none may.
inline std::string suffixes_text(const OptionRow& row) {
    switch (row.limits.suffixes) {
    case Suffixes::none:
        return "";
    case Suffixes::of_count:
        return "k, M, B, T: powers of 1000; Ki to Ti: of 1024";
    case Suffixes::of_size:
        return "k, M, G: powers of 1024";
    case Suffixes::of_time:
        return "a time such as 90m, 2h or 3h50m";
    }
    __builtin_unreachable();
}

// "0 to 10", "at least 0", "cosine, linear or constant", or nothing for free text. shows_type: the limit of
// the row's type is not left out.
inline std::string limits_text(const OptionRow& row, bool shows_type = false) {
    if (is_switch(row)) return alternatives({name_of(true), name_of(false)});
    if (const Choice* choice = std::get_if<Choice>(&row.example()))
        return alternatives({choice->names.begin(), choice->names.end()});
    if (holds<Interval>(row)) return "a number of steps, a time such as 90s, 10m or 2h, or auto";
    if (!is_number(row)) return "";
    if (is_open_ended(row) && !shows_type) return "at least " + number_text((long long)row.limits.low);
    if (is_whole(row)) return text("%lld to %lld", (long long)row.limits.low, (long long)row.limits.high);
    return number_text(row.limits.low) + " to " + number_text(row.limits.high);
}

// ----------------------------------------------------------------------------
// reading text

constexpr const char *not_a_number = "not a number", *out_of_range = "out of range";

[[noreturn]] inline void refuse_value(const OptionRow& row, std::string_view value, const char* reason) {
    std::string kind;
    bool is_above = reason == std::string_view(out_of_range) && !value.starts_with('-') && value != "0";
    if (is_number(row)) {
        kind = is_whole(row) ? "a whole number " : "a number ";
        kind += is_open_ended(row) && !is_above ? "of " : "from ";
    }
    std::string suffixes = suffixes_text(row);
    if (!suffixes.empty()) suffixes = " (" + suffixes + ")";
    fail("%s %s: %s; give %s%s%s", option_name(row).c_str(), value.empty() ? "''" : printable(value).c_str(),
         reason, kind.c_str(), limits_text(row, is_above).c_str(), suffixes.c_str());
}

inline void check_limits(const OptionRow& row, const OptionValue& any) {
    std::visit(
        [&](const auto& value) {
            using Value = std::decay_t<decltype(value)>;
            if constexpr (std::is_arithmetic_v<Value> && !std::is_same_v<Value, bool>) {
                // Limits are cast to Value, because 0.1 as a float exceeds 0.1 as a double.
                bool inside = value >= (Value)row.limits.low && value <= (Value)row.limits.high;
                if (!inside) refuse_value(row, number_text(value), out_of_range);
            }
        },
        any);
}

// Refuses a command's options if any value is beyond its limits.
template <typename O>
void check_limits(const O& options) {
    for (const OptionRow& row : option_table()) {
        if (row.belongs_to(O::command)) check_limits(row, row.get(options));
    }
}

// Reads the whole text as one number. Returns what is wrong with it, or an empty string.
template <typename Number>
std::string read_number(std::string_view source, Number& value) {
    auto [end, error] = std::from_chars(source.data(), source.data() + source.size(), value);
    if (error == std::errc::result_out_of_range) return out_of_range;
    if (error != std::errc() || end != source.data() + source.size()) return not_a_number;
    if constexpr (std::is_floating_point_v<Number>) return std::isfinite(value) ? "" : "not a finite number";
    return "";
}

// Reads an integer written with a suffix or an exponent: 20M, 1.5T, 3e9, 128Ki. Returns errors like
// read_number(). The decimal point is shifted in the text: a product such as 1.1 * 1e9 may not be an integer.
inline std::string read_suffixed(Suffixes kind, std::string_view source, double& value) {
    static const std::map<std::string_view, int> powers = {{"", 0},   {"k", 1}, {"M", 2},  {"G", 3},
                                                           {"B", 3},  {"T", 4}, {"Ki", 1}, {"Mi", 2},
                                                           {"Gi", 3}, {"Ti", 4}};
    size_t end = std::min(source.find_first_not_of("-.0123456789"), source.size());
    std::string digits(source.substr(0, end)), suffix(source.substr(end));
    int exponent = 0;
    if (auto power = powers.find(suffix); power != powers.end())
        exponent = 3 * power->second;
    else if (suffix[0] != 'e' || !read_number(suffix.substr(1), exponent).empty() || exponent < 0)
        return not_a_number;
    double by_1000 = 0, by_1024 = 0;
    std::string wrong = read_number(digits + "e" + std::to_string(exponent), by_1000);
    if (!wrong.empty()) return wrong;
    read_number(digits + "e" + std::to_string(exponent % 3), by_1024);
    by_1024 = std::ldexp(by_1024, 10 * (exponent / 3));
    bool of_size = kind == Suffixes::of_size;
    bool binary = suffix.ends_with('i') || (of_size && std::string_view("kMG").find(suffix) != suffix.npos);
    value = binary ? by_1024 : by_1000;
    if (of_size && !binary && by_1000 != by_1024)
        return text("either %.0f, by powers of 1000, or %.0f, by powers of 1024", by_1000, by_1024);
    return value == std::floor(value) ? "" : "not a whole number";
}

// Reads seconds written as 90s, 10m, 2h or 3h50m. Returns errors like read_number().
inline std::string read_time(std::string_view source, double& seconds) {
    seconds = 0;
    for (auto [unit, length] : {std::pair{'h', 3600}, {'m', 60}, {'s', 1}}) {
        size_t end = source.find(unit);
        if (end == source.npos) continue;
        int count = 0;
        if (std::string wrong = read_number(source.substr(0, end), count); !wrong.empty()) return wrong;
        if (count < 0) return out_of_range;
        seconds += (double)count * length;
        source.remove_prefix(end + 1);
    }
    return source.empty() ? "" : not_a_number;
}

template <typename Number>
std::string read_number(Suffixes kind, std::string_view source, Number& value) {
    std::string wrong = read_number(source, value);
    if constexpr (std::is_integral_v<Number>) {
        if (kind == Suffixes::none || wrong != not_a_number) return wrong;
        double number = 0;
        wrong = kind == Suffixes::of_time ? read_time(source, number) : read_suffixed(kind, source, number);
        if (!wrong.empty()) return wrong;
        if (std::abs(number) > 9e18 || !std::in_range<Number>((long long)number)) return out_of_range;
        value = (Number)number;
    }
    return wrong;
}

template <typename Number>
Number parse_number(const OptionRow& row, std::string_view source) {
    Number value{};
    std::string wrong = read_number(row.limits.suffixes, source, value);
    if (!wrong.empty()) refuse_value(row, source, wrong.c_str());
    return value;
}

// Reads an interval in the form of interval_text().
inline Interval parse_interval(const OptionRow& row, std::string_view source) {
    if (source == "auto") return {Interval::best, 0};
    bool is_time = !source.empty() && std::string_view("smh").find(source.back()) != std::string_view::npos;
    int count = 0;
    std::string wrong = read_number(is_time ? Suffixes::of_time : row.limits.suffixes, source, count);
    if (wrong == not_a_number) refuse_value(row, source, "neither steps nor a time");
    if (!wrong.empty() || count < is_time) refuse_value(row, source, out_of_range);
    return {is_time ? Interval::seconds : Interval::steps, count};
}

template <typename O>
void set_value(const OptionRow& row, O& options, const std::string& source) {
    OptionValue any = row.get(options);
    std::visit(
        [&](auto& value) {
            using Value = std::decay_t<decltype(value)>;
            if constexpr (std::is_same_v<Value, bool>) {
                if (source != name_of(true) && source != name_of(false))
                    refuse_value(row, source, "not a switch");
                value = source == name_of(true);
            } else if constexpr (std::is_arithmetic_v<Value>) {
                value = may_be_auto(row) && source == "auto" ? Value(0) : parse_number<Value>(row, source);
            } else if constexpr (std::is_same_v<Value, Choice>) {
                auto name = std::find(value.names.begin(), value.names.end(), source);
                if (name == value.names.end()) refuse_value(row, source, "not one of the choices");
                value.value = (int)(name - value.names.begin());
            } else if constexpr (std::is_same_v<Value, Interval>) {
                value = parse_interval(row, source);
            } else if constexpr (std::is_same_v<Value, std::string>) {
                value = source;
            } else {
                value.push_back(source);
            }
        },
        any);
    check_limits(row, any);
    row.set(options, any);
}

// ----------------------------------------------------------------------------
// JSON

inline nlohmann::ordered_json value_to_json(const OptionValue& any) {
    return std::visit(
        [&](const auto& value) -> nlohmann::ordered_json {
            using Value = std::decay_t<decltype(value)>;
            // A float cast to double would print false digits: 0.0006000000284984708 for 0.0006.
            if constexpr (std::is_same_v<Value, float>)
                return std::stod(number_text(value));
            else if constexpr (std::is_same_v<Value, Choice>)
                return value_text(any);
            else if constexpr (std::is_same_v<Value, Interval>)
                return value.unit == Interval::steps ? nlohmann::ordered_json(value.count)
                                                     : nlohmann::ordered_json(value_text(any));
            else
                return value;
        },
        any);
}

// The value of --val-tokens for a number of batches, clamped to its limits.
inline long long tokens_of_batches(double batches, double global_batch) {
    const Limits& limits = find_option("--val-tokens")->limits;
    return (long long)std::clamp(batches * global_batch, limits.low, limits.high);
}

// The field of a record that states its form.
constexpr const char* form_of_record = "record_form";
constexpr int todays_form = 2;

// Converts the options of a record to today's form: in older records, bf16 was the name of --matmul-dtype
// auto, and the length of a validation was in batches.
template <typename Json>
Json in_todays_form(Json json, const std::string& file) {
    if (!json.contains(form_of_record)) {
        if (json.contains("matmul_dtype") && json["matmul_dtype"] == "bf16") json["matmul_dtype"] = "auto";
    } else if (json[form_of_record] != todays_form) {
        fail("%s: options are in an unknown format; use the program that wrote the file", file.c_str());
    }
    json.erase(form_of_record);
    bool in_batches = json.contains("val_batches") && json.contains("global_batch");
    if (in_batches && !json.contains("val_tokens") && json["val_batches"].is_number_integer() &&
        json["global_batch"].is_number_integer()) {
        json["val_tokens"] = tokens_of_batches(json["val_batches"].template get<double>(),
                                               json["global_batch"].template get<double>());
        json["val_batches"] = 0;
    }
    return json;
}

inline nlohmann::ordered_json options_to_json(const Options& options) {
    nlohmann::ordered_json json = {{form_of_record, todays_form}};
    for (const OptionRow& row : option_table()) {
        if (row.belongs_to(command_train)) json[row.field] = value_to_json(row.get(options));
    }
    return json;
}

// A JSON value as it would be written on the command line.
inline std::string text_of_json(const OptionRow& row, const nlohmann::json& value) {
    bool right_type = is_switch(row)   ? value.is_boolean()
                      : is_number(row) ? value.is_number()
                                       : value.is_string() || (holds<Interval>(row) && value.is_number());
    if (!right_type)
        fail("option %s should not be of type %s; the file is damaged", row.field, value.type_name());
    if (value.is_boolean()) return name_of(value.get<bool>());
    return value.is_string() ? value.get<std::string>() : value.dump();
}

// Returns only the options that describe the model: an imported model has no others.
inline nlohmann::ordered_json model_options_to_json(const Options& options) {
    nlohmann::ordered_json json = options_to_json(options);
    for (const OptionRow& row : option_table()) {
        if (!describes_model(row)) json.erase(row.field);
    }
    return json;
}

// Reads the output of options_to_json() or model_options_to_json(). Every option that describes the model
// must be present, except those added later.
inline Options options_from_json(const nlohmann::json& record, const std::string& file) {
    if (!record.is_object()) fail("%s: options are not a JSON object; the file is damaged", file.c_str());
    nlohmann::json json = in_todays_form(record, file);
    Options options;
    std::set<std::string> known;
    for (const OptionRow& row : option_table()) {
        if (!row.belongs_to(command_train)) continue;
        if (!json.contains(row.field)) {
            if (!describes_model(row) || row.later) continue;
            fail("%s: option %s is missing; use the program that wrote the file", file.c_str(), row.field);
        }
        known.insert(row.field);
        try {
            set_value(row, options, text_of_json(row, json[row.field]));
        } catch (const Error& error) {
            fail("%s: %s", file.c_str(), error.what());
        }
    }
    for (const auto& [name, value] : json.items()) {
        if (known.contains(name)) continue;
        fail("%s: option %s is not known here; use the program that wrote the file", file.c_str(),
             printable(name).c_str());
    }
    return options;
}

// Checks a model from a foreign file as if it had been given by options: refuses what the command line would
// refuse. Returns it with derived fields filled in.
inline ModelConfig checked_model(const ModelConfig& model) {
    Options options;
    static_cast<ModelConfig&>(options) = model;
    check_limits(options);
    complete(static_cast<ModelConfig&>(options));
    return options;
}
