/*
The inspect subcommand: what a checkpoint contains, how it was made, and which tensors it holds. With --verify
every byte of it is read and checked, and each damaged piece is named.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "data/checkpoint/files.h"
#include "data/checkpoint/folder.h"
#include "data/checkpoint/retention.h"
#include "data/checkpoint/verification.h"
#include "data/base/error.h"
#include "data/base/figures.h"
#include "data/run/meter.h"
#include "data/options/values.h"
#include "data/base/terminal.h"
#include "data/base/strings.h"

class CheckpointReport {
public:
    explicit CheckpointReport(const CheckpointReader& reader) : index_(reader.index()) {
        about(reader.folder());
        options(reader.folder());
        tensors();
    }

    const std::vector<std::string>& lines() const { return lines_; }

private:
    static constexpr size_t widest = 100;

    void add(const std::string& line) { lines_.push_back(line); }

    // Adds items, wrapped over several lines if necessary; `line` begins the first of them.
    void add_items(std::string line, const std::vector<std::string>& items) {
        const std::string indent(line.size(), ' ');
        size_t first = line.size();
        for (const std::string& item : items) {
            if (line.size() > first && line.size() + item.size() + 2 > widest) {
                add(line);
                line = indent;
            }
            line += (line.size() > first ? "  " : "") + item;
        }
        if (line.size() > first) add(line);
    }

    void about(const std::string& folder) {
        uint64_t bytes = 0, parameters = 0;
        for (uint64_t file : index_.file_bytes) bytes += file;
        for (const CheckpointTensor& tensor : index_.tensors) {
            // each row of a table counts once, without its sums of squares (comm/ngram_checkpoint.h)
            bool again = tensor.name.find(".table.changes.") != std::string::npos ||
                         tensor.name.ends_with(".table.squares");
            parameters += tensor.dtype(Slot::weight) && !again ? tensor.size() : 0;
        }
        add(text("checkpoint   %s, written by %s", folder.c_str(),
                 visible_text(index_.about["program"].get<std::string>()).c_str()));
        add(text("trained      %lld steps, %lld samples", (long long)index_.step(),
                 (long long)index_.samples()));
        if (BestCheckpoints best = best_checkpoints(index_.about, "index"); !best.losses.empty())
            add("best         validation losses kept: " + best.words());
        add(text("parameters   %s (%llu) in %zu tensors", human((double)parameters).c_str(),
                 (unsigned long long)parameters, index_.tensors.size()));
        add(text("on disk      %.1f MB in %zu data files, %zu pieces", (double)bytes / 1e6,
                 index_.file_bytes.size(), index_.pieces.size()));
    }

    // Adds the layout, and the other options that differ from their defaults.
    void options(const std::string& folder) {
        const nlohmann::ordered_json stored = in_todays_form(index_.about["options"], folder);
        const nlohmann::ordered_json usual = options_to_json(Options());
        std::vector<std::string> layout, others;
        for (const OptionRow& row : option_table()) {
            if (!row.belongs_to(command_train) || !stored.contains(row.field)) continue;
            const nlohmann::ordered_json& value = stored[row.field];
            bool of_layout = std::string_view(row.group) == "Layout";
            bool as_usual = usual.contains(row.field) && usual[row.field] == value;
            if (!as_usual || always_shown(row.field))
                (of_layout ? layout : others).push_back(option_name(row) + " " + value_text(value));
        }
        add_items("layout       ", layout);
        add_items("options      ", others);
    }

    static bool always_shown(std::string_view field) {
        constexpr std::string_view fields[] = {"dp", "tp", "pp", "zero", "shard_group"};
        return std::find(std::begin(fields), std::end(fields), field) != std::end(fields);
    }

    // Returns the value as it is written on the command line.
    static std::string value_text(const nlohmann::ordered_json& value) {
        if (value.is_boolean()) return name_of(value.get<bool>());
        if (!value.is_string()) return visible_text(value.dump());
        std::string shown = visible_text(value.get<std::string>());
        bool plain = !shown.empty() && shown.find_first_of(" '\"*?") == shown.npos;
        return plain ? shown : "'" + shown + "'";
    }

    void tensors() {
        auto has_data = [](const CheckpointTensor& tensor) { return tensor.dtype(Slot::data).has_value(); };
        int columns = std::ranges::any_of(index_.tensors, has_data) ? slot_count : common_slots;
        std::vector<std::vector<std::string>> rows = {{"tensor", "shape"}};
        for (int slot = 0; slot < columns; slot++) rows[0].push_back(slot_name((Slot)slot));
        rows[0].push_back("bytes");
        for (const CheckpointTensor& tensor : index_.tensors) {
            std::vector<std::string> row = {visible_text(tensor.name), shape_text(tensor.shape)};
            uint64_t bytes = 0;
            for (int slot = 0; slot < columns; slot++) {
                std::optional<Dtype> dtype = tensor.slots[(size_t)slot];
                row.push_back(dtype ? dtype_name(*dtype) : "-");
                bytes += dtype ? tensor.size() * dtype_size(*dtype) : 0;
            }
            row.push_back(std::to_string(bytes));
            rows.push_back(row);
        }
        std::vector<size_t> widths(rows[0].size());
        for (const auto& row : rows) {
            for (size_t i = 0; i < row.size(); i++) widths[i] = std::max(widths[i], row[i].size());
        }
        add("");
        for (const auto& row : rows) {
            std::string line;
            for (size_t i = 0; i < row.size(); i++) {
                std::string space(widths[i] - row[i].size(), ' ');
                bool number = i + 1 == row.size();
                line += (i ? "  " : "") + (number ? space + row[i] : row[i] + space);
            }
            add(line);
        }
    }

    const CheckpointIndex& index_;
    std::vector<std::string> lines_;
};

// Prints the contents of the named checkpoint, or of the newest one in the named run directory.
inline void inspect_checkpoint(const InspectOptions& command) {
    const std::string& path = command.run;
    std::string folder = newest_checkpoint(path);
    if (folder != path) {
        std::string steps;
        for (int64_t step : checkpoint_steps(path)) append_item(steps, std::to_string(step));
        print("run          %s, with checkpoints of steps %s\n", path.c_str(), steps.c_str());
    }
    auto print_line = [](const std::string& line) {
        print("%s\n", line.c_str());
        fflush(stdout);
    };
    CheckpointReader reader(folder, false);
    CheckpointReport report(reader);
    for (const std::string& line : report.lines()) print_line(line);
    if (command.verify) {
        verify_checkpoint(reader, print_line);
        print_line("\nverified: every byte is as it was written");
    } else {
        reader.check_sizes();
    }
}
