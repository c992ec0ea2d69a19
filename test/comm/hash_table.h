/*
A contributor to checkpoints that differs from a model: a table of rows keyed by id, as for sparse parameters.
It shows that comm/stateful.h supports such contributors.

New ids may appear at any time, so the number of rows may grow between checkpoints. A rank owns the ids that
hash to it, for any number of ranks. The first save writes all rows (a base), and later ones the rows that
have changed since the last save (deltas), next to the existing files; after a few deltas a new base is
written. If a row changes while a save is being written, its value from when the save began is kept aside.

    table.3.ids     (rows) uint64      the ids that the third published save wrote
    table.3.rows    (rows, width)      their rows

If several saves contain an id, the last one counts.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/checkpoint_loader.h"
#include "comm/checkpoint_saver.h"
#include "comm/world.h"
#include "test/comm/checkpoint_testing.h"

class HashTable : public Stateful {
public:
    static constexpr int width = 6;
    using Row = std::array<float, width>;

    explicit HashTable(const World& world) : world_(world) {}

    static uint64_t mixed(uint64_t number) {
        number = (number ^ number >> 31) * 0x7fb5d329728ea185u;
        return (number ^ number >> 27) * 0x81dadef4bc2dd44du >> 20;
    }

    bool owns(uint64_t id) const { return owner(id) == world_.rank(); }

    void set(uint64_t id, const Row& row) {
        std::lock_guard lock(mutex_);
        auto old = rows_.find(id);
        if (saving_) before_.emplace(id, old == rows_.end() ? std::nullopt : std::optional<Row>(old->second));
        rows_[id] = row;
        changed_.insert(id);
    }

    const std::map<uint64_t, Row>& rows() const { return rows_; }

    // ---- saving

    uint64_t bytes_to_write(bool) const override { return rows_.size() * bytes_of_row; }

    void begin_save(const SaveScope& scope) override {
        std::lock_guard lock(mutex_);
        has_last_ = scope.has_last;
        saving_ = true;
        before_.clear();
        saved_changes_ = std::move(changed_);
        changed_.clear();
    }

    SavePlan plan() override {
        std::lock_guard lock(mutex_);
        bool all = !has_last_ || parts_.empty() || parts_.size() > most_deltas;
        ids_.clear();
        if (all) {
            for (auto& [id, row] : rows_) ids_.push_back(id);
            std::erase_if(ids_, [&](uint64_t id) { return !row_then(id); });
        } else {
            ids_.assign(saved_changes_.begin(), saved_changes_.end());
        }
        saved_parts_ = all ? std::vector<int>() : parts_;
        saved_parts_.push_back(parts_.empty() ? 1 : parts_.back() + 1);
        SavePlan plan;
        plan.bytes = ids_.size() * bytes_of_row;
        for (int part : saved_parts_) {
            bool kept = part != saved_parts_.back();
            CheckpointTensor ids = {name_of(part, "ids"), {0}, {}},
                             rows = {name_of(part, "rows"), {0, width}, {}};
            ids.slots[(size_t)Slot::data] = Dtype::uint64;
            rows.slots[(size_t)Slot::weight] = Dtype::fp32;
            plan.tensors.push_back({ids, kept ? 0 : ids_.size(), kept});
            plan.tensors.push_back({rows, kept ? 0 : ids_.size(), kept});
        }
        return plan;
    }

    void write(const WritePiece& write) override {
        auto tensor = (uint32_t)(2 * (saved_parts_.size() - 1));
        for (size_t first = 0, n; first < ids_.size(); first += n) {
            n = std::min(rows_in_piece, ids_.size() - first);
            std::vector<Row> rows;
            {
                std::lock_guard lock(mutex_);
                for (size_t i = 0; i < n; i++) rows.push_back(*row_then(ids_[first + i]));
            }
            write({tensor, Slot::data, 0, 0, 0, 1, first, n, 0, 0}, &ids_[first]);
            write({tensor + 1, Slot::weight, 0, 0, 0, width, first * width, n * width, 0, 0}, rows.data());
        }
    }

    void end_save(bool published) override {
        std::lock_guard lock(mutex_);
        saving_ = false;
        if (published)
            parts_ = saved_parts_;
        else
            changed_.insert(saved_changes_.begin(), saved_changes_.end());
    }

    // ---- loading

    bool has(const std::string& tensor) const override { return tensor.starts_with("table."); }

    // A batch is a few ids and their rows; batches are assigned to ranks round-robin.
    std::vector<PieceBatch> begin_load(const CheckpointReader& reader, bool) override {
        const CheckpointIndex& index = reader.index();
        tensors_ = &index.tensors;
        loaded_.clear();
        loaded_parts_.clear();
        std::map<std::pair<int, uint64_t>, std::array<const CheckpointPiece*, 2>>
            pieces;  // by part, first row
        for (const CheckpointPiece& piece : index.pieces) {
            const std::string& name = index.tensors[piece.tensor].name;
            if (!has(name)) continue;
            bool of_rows = name.ends_with(".rows");
            pieces[{part_in(name), piece.begin / (of_rows ? width : 1)}][of_rows] = &piece;
        }
        for (const CheckpointTensor& tensor : index.tensors) {
            if (has(tensor.name) && tensor.name.ends_with(".ids"))
                loaded_parts_.push_back(part_in(tensor.name));
        }
        std::vector<PieceBatch> batches;
        int turn = 0;
        for (auto& [place, pair] : pieces) {
            auto [ids, rows] = pair;
            if (!ids || !rows || rows->count != ids->count * width)
                fail("%s: pieces of ids without their rows; use another checkpoint", reader.folder().c_str());
            if (turn++ % world_.size() != world_.rank()) continue;
            batches.push_back({{ids, rows}, ids->count + rows->count, ids->count * bytes_of_row});
        }
        return batches;
    }

    Messages take(const PieceBatch& batch, const char* values) override {
        Messages messages;
        const CheckpointPiece& ids = *batch.pieces[0];
        const char* rows = values + ids.count * sizeof(uint64_t);
        for (size_t i = 0; i < ids.count; i++) {
            Record record = {0, part_in((*tensors_)[ids.tensor].name), {}};
            memcpy(&record.id, values + i * sizeof record.id, sizeof record.id);
            memcpy(&record.row, rows + i * sizeof record.row, sizeof record.row);
            messages[owner(record.id)].append((const char*)&record, sizeof record);
        }
        if (auto own = messages.find(world_.rank()); own != messages.end()) {
            receive(own->second);
            messages.erase(own);
        }
        return messages;
    }

    void receive(std::string_view message) override {
        for (; !message.empty(); message.remove_prefix(sizeof(Record))) {
            Record record;
            memcpy(&record, message.data(), sizeof record);
            auto& [part, row] = loaded_[record.id];
            if (record.part >= part) part = record.part, row = record.row;
        }
    }

    void settle() override {}

    std::string end_load() override {
        rows_.clear();
        changed_.clear();
        for (auto& [id, record] : loaded_) rows_[id] = record.second;
        parts_ = loaded_parts_;
        std::sort(parts_.begin(), parts_.end());
        return "";
    }

private:
    struct Record {
        uint64_t id;
        int part;
        Row row;
    };
    static constexpr uint64_t bytes_of_row = sizeof(uint64_t) + sizeof(Row);
    static constexpr size_t most_deltas = 3, rows_in_piece = 50;

    int owner(uint64_t id) const { return (int)(mixed(id) % (uint64_t)world_.size()); }

    static std::string name_of(int part, const char* what) {
        return "table." + std::to_string(part) + "." + what;
    }
    static int part_in(const std::string& name) { return std::stoi(name.substr(strlen("table."))); }

    // A row as it was when the save began; empty if it did not exist.
    std::optional<Row> row_then(uint64_t id) const {
        auto before = before_.find(id);
        return before == before_.end() ? std::optional<Row>(rows_.at(id)) : before->second;
    }

    const World& world_;
    std::mutex mutex_;              // training and saving run concurrently
    std::map<uint64_t, Row> rows_;  // this rank's
    std::set<uint64_t> changed_;    // since the last save
    std::vector<int> parts_;        // of the last checkpoint

    // the save in progress
    bool saving_ = false, has_last_ = false;
    std::map<uint64_t, std::optional<Row>> before_;  // old values of rows changed since it began
    std::set<uint64_t> saved_changes_;
    std::vector<uint64_t> ids_;  // to write
    std::vector<int> saved_parts_;

    // the load in progress
    const std::vector<CheckpointTensor>* tensors_ = nullptr;
    std::map<uint64_t, std::pair<int, Row>> loaded_;
    std::vector<int> loaded_parts_;
};

// ----------------------------------------------------------------------------
// runs whose state after any step is known

// A model and a table, saved together. Each step changes a third of the ids, whose number grows with each
// step. Used on all ranks.
class TableRun {
public:
    TableRun(const World& world, const std::string& run_dir, int keep, bool in_background)
        : world_(world),
          toy_(world, {.dp = world.size(), .shard = world.size()}, toy_model(true), {.level = 3}),
          table_(world),
          parts_{&toy_.contributor, &table_},
          saver_(parts_, world, run_dir, {.newest = keep}, in_background) {}

    int step() const { return step_; }
    const Contributors& parts() const { return parts_; }

    void train(int steps = 1) {
        for (; steps > 0; steps--) {
            step_++;
            each_change(step_, [&](uint64_t id) { table_.set(id, row_of(id, step_)); });
        }
        fill(toy_.state, (uint64_t)step_);
    }

    // Saves while training continues. Returns the report of this save.
    SaveReport save() {
        saver_.save(about_step(step_));
        step_++;
        each_change(step_, [&](uint64_t id) { table_.set(id, row_of(id, step_)); });
        SaveReport report = saver_.finish();
        fill(toy_.state, (uint64_t)step_);
        return report;
    }

    void load(const std::string& folder) {
        CheckpointReader reader(folder);
        load_checkpoint(parts_, world_, reader, false);
        saver_.loaded(reader);
        step_ = (int)reader.index().step();
    }

    // The number of the model's bytes on this rank that differ from their values after the current step, plus
    // 1 if the table differs.
    size_t wrong() {
        std::map<uint64_t, HashTable::Row> want;
        for (int step = 1; step <= step_; step++)
            each_change(step, [&](uint64_t id) { want[id] = row_of(id, step); });
        return (table_.rows() != want) +
               wrong_bytes(toy_.state, slots_of(toy_.state.settings()), (uint64_t)step_);
    }

private:
    static HashTable::Row row_of(uint64_t id, int step) {
        HashTable::Row row;
        for (size_t i = 0; i < row.size(); i++)
            row[i] = (float)HashTable::mixed(id * 1000003 + (uint64_t)step * 1009 + i) / 3.0f;
        return row;
    }

    template <typename Visit>
    void each_change(int step, Visit&& visit) const {
        for (uint64_t id = 0; id < 100 * (uint64_t)step; id++) {
            bool changes = HashTable::mixed(id * 7919 + (uint64_t)step) % 3 == 0;
            if (changes && table_.owns(id)) visit(id);
        }
    }

    const World& world_;
    ToyState toy_;
    HashTable table_;
    const Contributors parts_;
    CheckpointSaver saver_;
    int step_ = 0;
};
