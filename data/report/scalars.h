/*
Exports the numbers of every step of a run for other programs, as a CSV table or as event files for
TensorBoard. No step is dropped, and only the last few steps are held in memory.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "data/base/file.h"
#include "data/options/values.h"
#include "data/report/records.h"
#include "data/report/run_history.h"
#include "data/run/run_log.h"

// ----------------------------------------------------------------------------
// numbers of a line of the log

// Returns whether a field's values over the steps form a curve; other fields describe single events.
inline bool is_curve(std::string_view field) {
    constexpr std::string_view others[] = {"step", "bytes", "stall_ms", "write_ms", "dropped_lines"};
    return std::find(std::begin(others), std::end(others), field) == std::end(others);
}

// Calls take(group, name, value) for every number of a line; a loss or norm that is null is passed as NaN.
template <typename Take>
void take_scalars(const nlohmann::json& line, Take&& take) {
    for (const auto& [name, value] : line.items()) {
        bool was_nan = value.is_null() && (name == "loss" || name == "grad_norm" || is_validation_loss(name));
        if (value.is_number() ? is_curve(name) : was_nan) take("", name, number_of(value));
        if (name == "skipped" && value == true) take("", name, 1.0);
    }
    const nlohmann::json& timings = object_in(line, "timings");
    const char* parts[] = {"min", "median", "max", "rank"};
    auto take_range = [&](const std::string& name, const nlohmann::json& range) {
        for (size_t i = 0; range.is_array() && i < std::min<size_t>(range.size(), std::size(parts)); i++)
            take("timings", name + "_" + parts[i], number_of(range[i]));
    };
    for (const auto& [phase, range] : object_in(timings, "ms").items()) take_range(phase + "_ms", range);
    take_range("waited", array_in(timings, "waited"));
}

// A file that is written in large pieces.
class Output {
public:
    explicit Output(const std::string& path) : file_(path) {}

    void add(std::string_view bytes) {
        waiting_.append(bytes);
        if (waiting_.size() >= piece) flush();
    }

    void commit() {
        flush();
        file_.commit();
    }

private:
    static constexpr size_t piece = 1 << 20;

    void flush() {
        file_.write(waiting_.data(), waiting_.size());
        waiting_.clear();
    }

    NewFile file_;
    std::string waiting_;
};

// ----------------------------------------------------------------------------
// CSV

inline std::string csv_field(const std::string& field) {
    if (field.find_first_of(",\"\r\n") == field.npos) return field;
    std::string quoted = "\"";
    for (char c : field) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
    return quoted + "\"";
}

inline std::string csv_number(double value) {
    return std::isnan(value) ? "nan" : std::isinf(value) ? (value > 0 ? "inf" : "-inf") : number_text(value);
}

struct CsvRow {
    std::map<size_t, std::string> fields;  // by column
    std::string time;
};

// Writes one row for each step of each run, which combines the log's lines about that step. The usual columns
// are followed by any others that occur in the logs.
inline void write_csv(const std::vector<std::string>& runs, const std::string& path) {
    std::vector<std::string> columns = {"loss",         "val_loss", "grad_norm",  "lr", "tokens",
                                        "tokens_per_s", "mfu",      "gemm_share", "ms"};
    constexpr int64_t late_steps = 3;     // the timings of a step follow the line of the next step, or later
    constexpr size_t most_columns = 300;  // each row has all of them, even if most are empty
    std::map<std::string, size_t> places;
    for (size_t i = 0; i < columns.size(); i++) places[columns[i]] = i;
    for (const std::string& run : runs) {
        read_records(log_path(run), [&](const nlohmann::json& line) {
            take_scalars(line, [&](const char*, const std::string& name, double) {
                if (places.try_emplace(name, columns.size()).second) columns.push_back(name);
                if (columns.size() > most_columns) {
                    fail("%s: has more than %zu different fields, too many for a table; use --format "
                         "tensorboard",
                         log_path(run).c_str(), most_columns);
                }
            });
        });
    }
    Output file(path);
    std::string head = "run,step,time";
    for (const std::string& column : columns) head += "," + csv_field(column);
    file.add(head + "\n");
    for (const std::string& run : runs) {
        std::map<int64_t, CsvRow> rows;  // by step, those that are not written yet
        auto write_rows = [&](int64_t last) {
            for (; !rows.empty() && rows.begin()->first <= last; rows.erase(rows.begin())) {
                auto& [step, row] = *rows.begin();
                std::string line = csv_field(run) + "," + std::to_string(step) + "," + csv_field(row.time);
                for (size_t i = 0; i < columns.size(); i++) line += "," + row.fields[i];
                file.add(line + "\n");
            }
        };
        read_records(log_path(run), [&](const nlohmann::json& line) {
            CsvRow now;
            take_scalars(line, [&](const char*, const std::string& name, double value) {
                auto place = places.find(name);
                if (place == places.end()) return;  // the run wrote it after the columns were chosen
                now.fields[place->second] = csv_number(value);
            });
            if (now.fields.empty()) return;
            int64_t step = integer_in(line, "step");
            auto same = rows.find(step);
            // A run that goes back to a checkpoint computes the loss, column 0, of a step again.
            bool again = same != rows.end() && same->second.fields.contains(0) && now.fields.contains(0);
            bool went_back = again || (!rows.empty() && rows.rbegin()->first - step >= late_steps);
            write_rows(went_back ? INT64_MAX : step - late_steps);
            CsvRow& row = rows[step];
            now.fields.merge(row.fields);
            row.fields = std::move(now.fields);
            if (line.contains("time")) row.time = text_in(line, "time");
        });
        write_rows(INT64_MAX);
    }
    file.commit();
}

// ----------------------------------------------------------------------------
// TensorBoard: records in the TFRecord format, each a protocol-buffer Event

// CRC-32C (Castagnoli), bit-reversed polynomial 0x82f63b78.
inline uint32_t crc32c(std::string_view bytes) {
    static const std::array<uint32_t, 256> table = [] {
        std::array<uint32_t, 256> made{};
        for (uint32_t i = 0; i < 256; i++) {
            made[i] = i;
            for (int bit = 0; bit < 8; bit++) made[i] = made[i] >> 1 ^ (made[i] & 1 ? 0x82f63b78 : 0);
        }
        return made;
    }();
    uint32_t crc = ~0u;
    for (char c : bytes) crc = crc >> 8 ^ table[(crc ^ (uint8_t)c) & 0xff];
    return ~crc;
}

// Returns the checksum rotated and offset, as TFRecord requires, because a CRC over data that contains CRCs
// is weak.
inline uint32_t masked_crc32c(std::string_view bytes) {
    uint32_t crc = crc32c(bytes);
    return (crc >> 15 | crc << 17) + 0xa282ead8;
}

// Returns the bytes of an integer, the least significant first.
template <typename Integer>
std::string little_endian(Integer value) {
    std::string bytes;
    for (size_t i = 0; i < sizeof value; i++) bytes += (char)(uint8_t)((uint64_t)value >> 8 * i);
    return bytes;
}

// length, its checksum, the record, its checksum
inline std::string tf_record(const std::string& record) {
    std::string length = little_endian((uint64_t)record.size());
    return length + little_endian(masked_crc32c(length)) + record + little_endian(masked_crc32c(record));
}

// A protocol-buffer message: fields one after another, each preceded by its number and its wire type.
class ProtoMessage {
public:
    void integer(int field, uint64_t value) {
        varint((uint64_t)field << 3 | 0);
        varint(value);
    }
    void real(int field, double value) {
        varint((uint64_t)field << 3 | 1);
        bytes_ += little_endian(std::bit_cast<uint64_t>(value));
    }
    void text(int field, std::string_view value) {
        varint((uint64_t)field << 3 | 2);
        varint(value.size());
        bytes_ += value;
    }
    void real(int field, float value) {
        varint((uint64_t)field << 3 | 5);
        bytes_ += little_endian(std::bit_cast<uint32_t>(value));
    }
    void message(int field, const ProtoMessage& value) { text(field, value.bytes_); }

    const std::string& bytes() const { return bytes_; }
    bool empty() const { return bytes_.empty(); }

private:
    void varint(uint64_t value) {
        for (; value >= 0x80; value >>= 7) bytes_ += (char)(uint8_t)(value | 0x80);
        bytes_ += (char)(uint8_t)value;
    }

    std::string bytes_;
};

// Field numbers in TensorFlow's event.proto, summary.proto and tensor.proto.
namespace event_fields {
constexpr int wall_time = 1, step = 2, file_version = 3, summary = 5;           // Event
constexpr int value = 1;                                                        // Summary
constexpr int tag = 1, simple_value = 2, tensor = 8, metadata = 9;              // Summary.Value
constexpr int plugin_data = 1, plugin_name = 1;                                 // SummaryMetadata
constexpr int dtype = 1, tensor_shape = 2, dim = 2, dim_size = 1, strings = 8;  // TensorProto
constexpr int dtype_string = 7;
}  // namespace event_fields

inline ProtoMessage scalar_value(const std::string& tag, double value) {
    ProtoMessage message;
    message.text(event_fields::tag, tag);
    message.real(event_fields::simple_value, (float)value);
    return message;
}

// Returns a value for the text plugin, which reads Markdown: an indent of four spaces keeps text verbatim.
inline ProtoMessage text_value(const std::string& tag, const std::string& words) {
    using namespace event_fields;
    std::string indented = "    ";
    for (char c : words) indented += c == '\n' ? std::string("\n    ") : std::string(1, c);
    ProtoMessage plugin, about, size, shape, values, message;
    plugin.text(plugin_name, "text");
    about.message(plugin_data, plugin);
    size.integer(dim_size, 1);
    shape.message(dim, size);
    values.integer(dtype, dtype_string);
    values.message(tensor_shape, shape);
    values.text(strings, indented);
    message.text(event_fields::tag, tag);
    message.message(tensor, values);
    message.message(metadata, about);
    return message;
}

// Writes one event for each line of the log that has numbers or a sample.
inline void write_events(const std::string& run, const std::string& path) {
    Output file(path);
    double time = 0;
    auto add = [&](const ProtoMessage& content) {
        ProtoMessage event;
        event.real(event_fields::wall_time, time);
        file.add(tf_record(event.bytes() + content.bytes()));
    };
    bool begun = false;
    auto begin = [&] {
        ProtoMessage version;
        version.text(event_fields::file_version, "brain.Event:2");
        if (!begun) add(version);
        begun = true;
    };
    read_records(log_path(run), [&](const nlohmann::json& line) {
        std::string told = text_in(line, "time");
        if (told.empty()) told = text_in(object_in(line, "start"), "time");
        if (double seconds = seconds_of(told); std::isfinite(seconds)) time = seconds;
        begin();
        ProtoMessage summary, content;
        take_scalars(line, [&](const std::string& group, const std::string& name, double value) {
            summary.message(event_fields::value,
                            scalar_value(group.empty() ? name : group + "/" + name, value));
        });
        if (line.contains("sample"))
            summary.message(event_fields::value, text_value("sample", text_in(line, "sample")));
        if (summary.empty()) return;
        content.integer(event_fields::step, (uint64_t)integer_in(line, "step"));
        content.message(event_fields::summary, summary);
        add(content);
    });
    begin();
    file.commit();
}
