/*
Options of `train` in a file (--config): lines as --print-config writes them, or the options.json of a run.

    # a comment
    model = gpt2-124M
    learning-rate = 3e-4        # learning_rate, as in JSON, is the same
    prompt = '#include <'       # a value may be quoted; in double quotes it is a JSON string

Each line counts as an option on the command line, so all rules of the command line also hold for the file.
*/
#pragma once

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"
#include "data/base/strings.h"
#include "data/base/utf8.h"      // is_utf8
#include "data/launch/resume.h"  // GivenOption, is_said
#include "data/options/rules.h"  // is_derived
#include "data/options/synonyms.h"
#include "data/options/values.h"

// Returns whether a file may hold the option; --config and --print-config are only for the command line.
inline bool is_in_config(const OptionRow& row) {
    return row.belongs_to(command_train) && row.field != std::string_view("config") &&
           row.field != std::string_view("print_config");
}

// Returns whether the value of an option follows from the option `from`. A file has the value of every
// option, but values that follow from an option on the command line must not be taken from the file.
inline bool follows(const OptionRow& row, const std::string& from) {
    static const std::map<std::string_view, std::vector<std::string_view>> followers = {
        {"--tokenizer", {"vocab_size", "document_end"}},
        {"--steps", {"warmup_steps"}},
        {"--epochs", {"warmup_steps"}},
        {"--context", {"sequence_length"}},
        {"--channels", {"head_size", "mlp_width", "rope_dims"}},
        {"--heads", {"kv_heads", "head_size", "rope_dims"}},
        {"--head-size", {"rope_dims"}},
        {"--tp", {"tp_overlap"}},
        {"--pp-schedule", {"pp_chunks"}}};
    if (from == "--model") return describes_model(row) && row.field != std::string_view("model");
    auto found = followers.find(from);
    return found != followers.end() && std::ranges::count(found->second, row.field) > 0;
}

// Returns whether a run has derived the value of an option from its number of ranks or its layout. Another
// run does not take over such a value, but derives its own.
inline bool is_of_layout(const OptionRow& row, const Options& run) {
    bool may_follow = row.resume == Resume::layout || &row == find_option("--global-batch", command_train);
    return follows_ranks(row) || (may_follow && is_derived(row, row.standard(command_train), run));
}

// Returns --learning-rate for learning_rate or learning-rate.
inline std::string name_of_key(std::string key) {
    std::ranges::replace(key, '_', '-');
    return "--" + key;
}

// value(row): returns the text of an option's value. Errors in the name or the value are reported with the
// file and the line.
template <typename Value>
GivenOption config_option(const std::string& file, long line, const std::string& name, Value&& value) try {
    const OptionRow* row = find_option(name, command_train);
    if (!row) refuse_unknown(name, command_train);
    if (!is_in_config(*row)) fail("%s: works only on the command line; leave it out", name.c_str());
    GivenOption option = {row, value(*row)};
    Options checked;
    set_value(*row, checked, option.value);
    return option;
} catch (const Error& error) {
    fail("%s:%ld: %s", printable(file).c_str(), line, error.what());
}

// Returns the value of a line; `rest` is the text after its =.
inline std::string config_value(std::string_view rest) {
    constexpr std::string_view blanks = " \t\r";
    rest.remove_prefix(std::min(rest.find_first_not_of(blanks), rest.size()));
    size_t end = 0;
    std::string value;
    if (rest.starts_with('"')) {
        end = behind_literal(rest, 0);
        nlohmann::json text = try_json(rest.substr(0, end));
        if (!text.is_string())
            fail("the double quotes do not hold a JSON string; use '...' for literal text");
        value = text;
    } else if (rest.starts_with('\'')) {
        end = rest.find('\'', 1);
        if (end == rest.npos) fail("the quote is not closed; add a '");
        value = rest.substr(1, end++ - 1);
    } else {
        while (end < rest.size() &&
               (rest[end] != '#' || (end > 0 && blanks.find(rest[end - 1]) == blanks.npos)))
            end++;
        value = rest.substr(0, end);
        value.erase(value.find_last_not_of(blanks) + 1);
    }
    rest.remove_prefix(end);
    size_t more = rest.find_first_not_of(blanks);
    if (more != rest.npos && rest[more] != '#')
        fail("%s: unexpected after the value; put quotes around all of it",
             printable(rest.substr(more)).c_str());
    return value;
}

// Returns the options in the record of a run's start, without those that apply only to that start, and
// without those that follow from its ranks and its layout.
inline GivenOptions options_of_record(const std::string& file, const std::string& content) {
    GivenOptions given;
    Options run;
    const nlohmann::json record = in_todays_form(parse_json(content, file), file);
    for (const auto& [key, value] : record.items()) {
        std::string name = name_of_key(key);
        const OptionRow* row = find_option(name, command_train);
        if (row && row->resume == Resume::not_stored && name != "--init") continue;
        size_t at = std::min(content.find('"' + key + '"'), content.size());
        long line = 1 + std::count(content.begin(), content.begin() + (std::ptrdiff_t)at, '\n');
        given.push_back(
            config_option(file, line, name, [&](const OptionRow& row) { return text_of_json(row, value); }));
    }
    set_values(given, run);
    std::erase_if(given, [&](const GivenOption& option) { return is_of_layout(*option.row, run); });
    return given;
}

inline GivenOptions read_config(const std::string& file) {
    constexpr uint64_t most_bytes = 1 << 20;
    constexpr std::string_view blanks = " \t\r\n";
    const std::string content = read_whole(file, most_bytes, "too large for an options file");
    size_t begin = content.find_first_not_of(blanks);
    if (begin != content.npos && content[begin] == '{') return options_of_record(file, content);
    GivenOptions given;
    std::string_view rest = content;
    for (long number = 1; !rest.empty(); number++) {
        std::string_view line = next_line(rest);
        line.remove_prefix(std::min(line.find_first_not_of(blanks), line.size()));
        if (line.empty() || line[0] == '#') continue;
        size_t equals = line.find('=');
        if (equals == line.npos)
            fail("%s:%ld: %s: not an option; write KEY = VALUE, as in learning-rate = 3e-4",
                 printable(file).c_str(), number, printable(line).c_str());
        std::string key(line.substr(0, equals));
        key.erase(key.find_last_not_of(blanks) + 1);
        given.push_back(config_option(file, number, name_of_key(key), [&](const OptionRow&) {
            return config_value(line.substr(equals + 1));
        }));
    }
    return with_joined_lists(given);
}

// Returns the options of a command line, preceded by those options of its --config file that the command line
// neither gives nor determines by other options.
inline GivenOptions with_config(const GivenOptions& given) {
    GivenOptions all;
    for (const GivenOption& option : given) {
        if (option.row->field != std::string_view("config")) continue;
        all = option.value.empty() ? GivenOptions() : read_config(option.value);
    }
    std::erase_if(all, [&](const GivenOption& option) {
        auto sets = [&](const GivenOption& other) { return follows(*option.row, option_name(*other.row)); };
        return is_said(*option.row, given) || std::ranges::any_of(given, sets);
    });
    all.insert(all.end(), given.begin(), given.end());
    return all;
}

// Returns all options, except those that follow from the ranks and the layout, in the form that read_config()
// reads.
inline std::string config_text(const Options& options) {
    constexpr std::string_view plain =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+.,:/*=%@~";
    std::string lines;
    for (const OptionRow& row : option_table()) {
        if (!is_in_config(row) || is_of_layout(row, options)) continue;
        std::string value = value_text(row, options);
        if (!is_utf8(value))
            fail("%s %s: is not valid UTF-8, which an options file requires; rename it",
                 option_name(row).c_str(), printable(value).c_str());
        bool as_it_is = one_line(value) == value && value.find('\'') == value.npos;
        if (value.empty() || value.find_first_not_of(plain) != value.npos)
            value = as_it_is ? "'" + value + "'" : nlohmann::json(value).dump();
        lines += option_name(row).substr(2) + " = " + value + "\n";
    }
    return lines;
}
