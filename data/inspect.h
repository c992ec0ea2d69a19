/*
The inspect subcommand: what a checkpoint is of, how it was made, and which tensors it holds. With --verify
every byte of it is read and checked, and each piece that is damaged is named.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "data/checkpoint_files.h"
#include "data/checkpoint_folder.h"
#include "data/error.h"
#include "data/meter.h"
#include "data/option_values.h"
#include "data/ordered_work.h"
#include "data/progress.h"
#include "data/visible_text.h"
#include "data/words.h"

class CheckpointReport {
public:
    explicit CheckpointReport(const CheckpointReader& reader) : index_(reader.index()) {
        about(reader.folder());
        options();
        tensors();
    }

    const std::vector<std::string>& lines() const { return lines_; }

private:
    static constexpr size_t widest = 100;

    void add(const std::string& line) { lines_.push_back(line); }

    // Items on as many lines as they need; `line` is how the first begins.
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
        for (const CheckpointTensor& tensor : index_.tensors) parameters += tensor.size();
        add(text("checkpoint   %s, written by %s", folder.c_str(),
                 visible_text(index_.about["program"].get<std::string>()).c_str()));
        add(text("trained      %lld steps, %lld samples", (long long)index_.step(),
                 (long long)index_.samples()));
        add(text("parameters   %s (%llu) in %zu tensors", human((double)parameters).c_str(),
                 (unsigned long long)parameters, index_.tensors.size()));
        add(text("on disk      %.1f MB in %zu data files, %zu pieces", (double)bytes / 1e6,
                 index_.file_bytes.size(), index_.pieces.size()));
    }

    // The layout, and what else is not as by default.
    void options() {
        const nlohmann::ordered_json& stored = index_.about["options"];
        const nlohmann::ordered_json usual = options_to_json(Options(), command_train);
        std::vector<std::string> layout, others;
        for (const OptionRow& row : option_table()) {
            if (!stored.contains(row.field)) continue;
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

    // As on the command line.
    static std::string value_text(const nlohmann::ordered_json& value) {
        if (value.is_boolean()) return value.get<bool>() ? "on" : "off";
        if (!value.is_string()) return visible_text(value.dump());
        std::string shown = visible_text(value.get<std::string>());
        bool plain = !shown.empty() && shown.find_first_of(" '\"*?") == shown.npos;
        return plain ? shown : "'" + shown + "'";
    }

    void tensors() {
        std::vector<std::vector<std::string>> rows = {
            {"tensor", "shape", "weight", "master", "m", "v", "bytes"}};
        for (const CheckpointTensor& tensor : index_.tensors) {
            std::vector<std::string> row = {visible_text(tensor.name), shape_text(tensor.shape)};
            uint64_t bytes = 0;
            for (const auto& dtype : tensor.slots) {
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

// Names in a checkpoint's folder that are not of it; sorted.
inline std::vector<std::string> stray_names(const CheckpointReader& reader) {
    std::set<std::string> known = {"index.bin"}, strays;
    for (size_t number = 0; number < reader.index().file_bytes.size(); number++)
        known.insert(data_file_name((int)number));
    std::error_code error;
    std::filesystem::directory_iterator entry(reader.folder(), error), end;
    for (; !error && entry != end; entry.increment(error)) {
        std::string name = entry->path().filename();
        if (!known.contains(name)) strays.insert(name);
    }
    if (error) fail_with_code(error, reader.folder(), "list it");
    return {strays.begin(), strays.end()};
}

// Reads every byte, by as many threads as there are cores. Calls report(line) for each data file and each
// piece that is damaged, and for each file that is not of the checkpoint; fails if there are any.
template <typename Report>
void verify_checkpoint(const CheckpointReader& reader, Report&& report) {
    const CheckpointIndex& index = reader.index();
    size_t files = index.file_bytes.size(), damaged_files = 0, damaged_pieces = 0;
    std::vector<bool> whole(files);
    for (uint32_t number = 0; number < files; number++) {
        std::string trouble;
        note_trouble(trouble, [&] { reader.check_file(number); });
        whole[number] = trouble.empty();
        if (!whole[number]) damaged_files++, report(trouble);
    }

    uint64_t bytes = 0;
    std::vector<uint32_t> order;
    for (uint32_t p :
         index.sorted_by([](const CheckpointPiece& piece) { return std::tuple(piece.file, piece.offset); })) {
        if (whole[index.pieces[p].file]) {
            order.push_back(p);
            bytes += index.bytes_of(index.pieces[p]);
        } else {
            damaged_pieces++;
        }
    }
    struct Verdict {
        uint64_t bytes;
        std::string trouble;
    };
    auto next = [&, at = (size_t)0](const CheckpointPiece*& piece) mutable {
        if (at == order.size()) return false;
        piece = &index.pieces[order[at++]];
        return true;
    };
    auto verify = [&](const CheckpointPiece* piece) {
        thread_local std::vector<char> data;
        Verdict verdict = {index.bytes_of(*piece), ""};
        data.resize(verdict.bytes);
        note_trouble(verdict.trouble, [&] { reader.read(*piece, data.data()); });
        return verdict;
    };
    ProgressLine progress("verify", (double)bytes);
    OrderedWork<const CheckpointPiece*, Verdict> work(next, verify, std::thread::hardware_concurrency());
    for (Verdict verdict; work.take(verdict);) {
        progress.add((double)verdict.bytes);
        if (verdict.trouble.empty()) continue;
        damaged_pieces++;
        progress.clear();
        report(verdict.trouble);
    }
    progress.clear();
    std::vector<std::string> strays = stray_names(reader);
    for (const std::string& name : strays)
        report(text("%s/%s: is not of this checkpoint; remove it", reader.folder().c_str(),
                    visible_text(name).c_str()));
    bool damaged = damaged_files + damaged_pieces > 0;
    if (!damaged && strays.empty()) return;
    std::string trouble = text("%zu of %zu pieces are damaged", damaged_pieces, index.pieces.size());
    if (damaged_files > 0) trouble += text(", %zu of %zu data files as a whole", damaged_files, files);
    if (!strays.empty()) trouble += text(", and files that are not of it: %zu", strays.size());
    fail("%s: %s; %s", reader.folder().c_str(), trouble.c_str(),
         damaged ? "use another checkpoint" : "remove those");
}

// Prints what a checkpoint holds: the one named, or the newest of a run directory.
inline void inspect_checkpoint(const std::string& path, bool verify) {
    std::string folder = newest_checkpoint(path);
    if (folder != path) {
        std::string steps;
        for (int64_t step : checkpoint_steps(path))
            steps += (steps.empty() ? "" : ", ") + std::to_string(step);
        printf("run          %s, with checkpoints of steps %s\n", path.c_str(), steps.c_str());
    }
    auto print = [](const std::string& line) {
        puts(line.c_str());
        fflush(stdout);
    };
    CheckpointReader reader(folder, false);
    CheckpointReport report(reader);
    for (const std::string& line : report.lines()) print(line);
    if (verify) {
        verify_checkpoint(reader, print);
        print("\nverified: every byte is as it was written");
    } else {
        reader.check_sizes();
    }
}
