/*
The tables of n-gram memory as a contributor to checkpoints (comm/stateful.h). A checkpoint holds each row
that has ever had a gradient, and the seed that all other rows follow from:

    layers.3.table.ids            (rows) uint64        their numbers in the table of layer 3
    layers.3.table.rows           (rows, width)        their values
    layers.3.table.squares        (rows)               their sums of squares
    layers.3.table.changes.2.ids  and so on            rows that changed after the parts before
    ngram.hash                    (1 + tokens) uint64  the seed, and what each token counts as (NgramHash)

The first save writes these rows as a base. A later one writes the rows that have changed since the last save,
as changes, and shares the files of the older parts. For a table on disk, changes include all rows that are
newer in the cache than in the file, because a return to the checkpoint finds only the latter. After
`most_changes` parts with changes, a save replaces all changes by one part, with every row that has changed
since the base; and once the changes would have more rows than a base, a save writes a new base. If several
parts have a row, the one with the highest number counts.

Owners write their rows, and any number of owners can load them. If all owners have a table on disk that can
return to the checkpoint (data/tables/page_file.h), only the checkpoint's last changes are read.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cfloat>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/memory.h"            // size_text
#include "comm/ngram_tables.h"      // NgramTables
#include "comm/stateful.h"          // Stateful, sum_over_ranks
#include "data/base/dtype.h"        // to_floats
#include "data/checkpoint/files.h"  // CheckpointReader

class NgramCheckpoint final : public Stateful {
public:
    // The tables must outlive it.
    NgramCheckpoint(NgramTables& tables, const Layout& layout)
        : tables_(tables),
          own_(tables.own()),
          sizes_(tables.sizes()),
          config_(tables.config()),
          shape_(tables.mesh().shape),
          W_((size_t)sizes_.W),
          rows_at_once(std::min(most_rows, (size_t)largest_piece / W_)),
          since_base_(own_.set(2)),
          saving_(own_.set(3)) {
        std::vector<Stage> stages;
        for (int number = 0; number < shape_.pp; number++)
            stages.emplace_back(config_, layout, first_of_stage(number), false);
        for (int layer = 0; layer < config_.layers; layer++) {
            if (!has_table(config_, layer)) continue;
            auto has = [&](const Stage& stage) { return stage.has(layer); };
            layers_.push_back(layer);
            stage_of_.push_back((int)(std::ranges::find_if(stages, has) - stages.begin()));
        }
    }

    // ---- saving

    uint64_t bytes_to_write(bool) const override {
        // Most rows of a table on disk may never be touched.
        uint64_t rows = own_.file() ? own_.touched().size() + own_.changed().size() : sizes_.own_rows();
        return sizes_.checkpoint_bytes(rows) + hash_bytes();
    }

    void begin_save(const SaveScope& scope) override {
        tables_.forget_stale();
        tables_.synchronize();
        scope_ = scope;
        RowSet &changed = own_.changed(), &touched = own_.touched();
        if (RowCache* cache = own_.cache()) cache->each_changed([&](uint64_t row) { changed.insert(row); });
        touched.insert(changed);
        since_base_.insert(changed);
        const uint64_t tables = sizes_.tables();
        const std::vector<RankNumbers> all = sum_over_ranks(
            *scope.world, {changed.size() * tables, touched.size() * tables, since_base_.size() * tables});
        const bool base = !scope.has_last || parts_.empty() || written_since_base_ + all[0].all > all[1].all,
                   joins = !base && parts_.size() > most_changes;
        saved_parts_ = base ? std::vector<int>() : joins ? std::vector{0} : parts_;
        saved_parts_.push_back(base ? 0 : parts_.back() + 1);
        saving_.clear();
        saving_.insert(base ? touched : joins ? since_base_ : changed);
        written_ = all[base ? 1 : joins ? 2 : 0].all;
        problem_ = nullptr;
        if (PageFile* file = own_.file(); file && !scope.weights_alone) {
            try {
                if (base) own_.cache()->flush();
                file->mark(scope.id);
            } catch (const Error&) {
                problem_ = std::current_exception();  // a full disk costs only this save
            }
        }
        own_.begin_copies(scope.in_background);
        if (scope.in_background) note_saved();
        own_.snapshot().begin(saving_);
    }

    SavePlan plan() override {
        if (problem_) std::rethrow_exception(problem_);
        SavePlan plan;
        for (int part : saved_parts_) {
            bool kept = part != saved_parts_.back();
            for (int layer : layers_) {
                uint64_t rows = kept || !is_here(layer) ? 0 : saving_.size();
                auto add = [&](const char* what, std::vector<int64_t> shape, Slot slot, Dtype dtype) {
                    CheckpointTensor tensor = {name_of(layer, part, what), std::move(shape), {}};
                    tensor.slots[(size_t)slot] = dtype;
                    plan.tensors.push_back({std::move(tensor), rows, kept});
                };
                add("ids", {0}, Slot::data, Dtype::uint64);
                add("rows", {0, (int64_t)W_}, Slot::weight, sizes_.dtype);
                add("squares", {0}, Slot::weight, Dtype::fp32);
            }
        }
        CheckpointTensor hash = {hash_name, {1 + config_.vocab_size}, {}};
        hash.slots[(size_t)Slot::data] = Dtype::uint64;
        plan.tensors.push_back({std::move(hash), 0, !writes_base()});
        plan.bytes = sizes_.checkpoint_bytes(saving_.size()) + (writes_base() ? hash_bytes() : 0);
        return plan;
    }

    void write(const WritePiece& write) override {
        write_rows(write);
        if (writes_base()) write_hash(write);
        if (PageFile* file = own_.file(); file && !scope_.weights_alone) write_notes(*file, scope_.id);
    }

    void let_go() override { own_.snapshot().end(); }

    void end_save(bool published) override {
        own_.snapshot().end();
        const bool counts = published && !scope_.weights_alone;
        std::string error;
        if (PageFile* file = own_.file())
            note_error(error, [&] {
                std::lock_guard lock(own_.snapshot().mutex());  // updates write to the same log
                counts ? file->forget_before(scope_.id) : file->forget_newest(scope_.id);
            });
        if (!counts && scope_.in_background) own_.changed().insert(saving_);
        if (counts) {
            if (!scope_.in_background) note_saved();
            parts_ = saved_parts_;
            if (parts_.size() <= 2) written_since_base_ = 0;
            if (parts_.size() > 1) written_since_base_ += written_;
        }
        if (!error.empty()) screen.warn("tables: " + error + " (the next checkpoint tries again)");
    }

    double stall() const override { return own_.snapshot().stalled(); }

    // ---- loading

    bool has(const std::string& tensor) const override {
        return tensor == hash_name || place_of(tensor).layer >= 0;
    }

    void find_state(const World& world, const CheckpointReader& reader, bool weights_only) override {
        tables_.synchronize();
        PageFile* file = own_.file();
        const uint64_t id = reader.index().save_id;
        bool found = !layers_.empty() && sizes_.tables() == 0;
        if (file && !weights_only && file->can_return_to(id)) {
            own_.cache()->forget();
            found = read_sets(file->companion(id), {&own_.touched(), &since_base_}) && file->return_to(id);
        }
        has_rows_ = world.largest(!found) == 0;
    }

    // A batch holds the ids of some rows, the rows, and their squares; ranks read batches in turn. Every rank
    // reads the hash. All ranks have the same number of batches of each part, so no part overtakes an earlier
    // one.
    std::vector<PieceBatch> begin_load(const CheckpointReader& reader, bool weights_only) override {
        reader_ = &reader;
        weights_only_ = weights_only;
        const CheckpointIndex& index = reader.index();
        find_parts(index);
        std::map<int, std::map<std::pair<int, uint64_t>, std::array<const CheckpointPiece*, 3>>>
            parts;  // by number, then by (layer, first row)
        std::vector<PieceBatch> batches;
        if (int number = index.find(hash_name);
            number < 0 || !has_only(index.tensors[number], Slot::data) ||
            index.tensors[number].size() != 1 + (uint64_t)config_.vocab_size)
            fail("%s: has no n-gram hash for %d tokens; choose the options that it was trained with",
                 reader.folder().c_str(), config_.vocab_size);
        for (const CheckpointPiece& piece : index.pieces) {
            const CheckpointTensor& tensor = index.tensors[piece.tensor];
            if (tensor.name == hash_name) batches.push_back({{&piece}, piece.count, index.bytes_of(piece)});
            const Place& place = places_[piece.tensor];
            bool wanted = !has_rows_ || (place.number > 0 && place.number == parts_.back());
            if (place.layer >= 0 && wanted)
                parts[place.number][{place.layer, piece.begin / tensor.width()}][place.which] = &piece;
        }
        for (auto& [number, pieces] : parts) {
            int turn = 0;
            for (auto& [place, of_rows] : pieces) {
                auto [ids, rows, squares] = of_rows;
                if (!ids || !rows || !squares || rows->count != ids->count * W_ ||
                    squares->count != ids->count)
                    fail("%s: rows of layer %d's table do not match their row numbers; use another "
                         "checkpoint",
                         reader.folder().c_str(), place.first);
                if (turn++ % shape_.ranks() != me()) continue;
                PieceBatch batch = {{ids, rows, squares}};
                for (const CheckpointPiece* piece : batch.pieces)
                    batch.elements += piece->count, batch.bytes += index.bytes_of(*piece);
                batches.push_back(std::move(batch));
            }
            if (int left = turn % shape_.ranks(); left > 0 && me() >= left) batches.emplace_back();
        }
        if (!has_rows_) own_.forget();
        own_.changed().clear();
        return batches;
    }

    Messages take(const PieceBatch& batch, const char* values) override {
        if (batch.pieces.empty()) return {};
        if (batch.pieces.size() == 1) {
            const CheckpointPiece& piece = *batch.pieces[0];
            hash_.resize(std::max<size_t>(hash_.size(), piece.begin + piece.count));
            memcpy(&hash_[piece.begin], values, piece.count * sizeof(uint64_t));
            return {};
        }
        const uint32_t rows_tensor = batch.pieces[1]->tensor;
        const auto [layer, number, which] = places_[rows_tensor];
        const Dtype stored = *reader_->index().tensors[rows_tensor].dtype(Slot::weight);
        const size_t count = batch.pieces[0]->count, row_bytes = W_ * dtype_size(stored);
        const char* rows = values + count * sizeof(uint64_t);
        const char* squares = rows + count * row_bytes;
        std::map<int, std::vector<size_t>> of_rank;
        for (size_t i = 0; i < count; i++) {
            uint64_t id = at<uint64_t>(values, i);
            if (id >= sizes_.rows)
                fail("%s: row %llu is outside the table of %llu rows; use another checkpoint",
                     reader_->folder().c_str(), (unsigned long long)id, (unsigned long long)sizes_.rows);
            of_rank[owner(layer, id)].push_back(i);
        }
        std::vector<float> floats(W_);
        std::vector<char> row(sizes_.row_bytes());
        Messages messages;
        for (auto& [rank, numbers] : of_rank) {
            std::string& message = messages[rank];
            auto add = [&](const auto& value) { message.append((const char*)&value, sizeof value); };
            add((uint64_t)layer);
            add((uint64_t)number);
            add((uint64_t)numbers.size());
            for (size_t i : numbers) add(sizes_.own_number(at<uint64_t>(values, i)));
            for (size_t i : numbers) add(weights_only_ ? FLT_MIN : at<float>(squares, i));
            for (size_t i : numbers) {
                to_floats(stored, rows + i * row_bytes, W_, floats.data());
                from_floats(sizes_.dtype, floats.data(), W_, row.data());
                message.append(row.data(), row.size());
            }
        }
        if (auto own = messages.find(me()); own != messages.end()) {
            receive(own->second);
            messages.erase(own);
        }
        return messages;
    }

    // message: layer, number, count, rows of this owner (count), squares (count), values (count, W).
    void receive(std::string_view message) override {
        if (message.empty()) return;
        auto header = (const uint64_t*)message.data();
        const int layer = (int)header[0];
        const size_t count = header[2];
        const uint64_t* rows = header + 3;
        auto squares = (const float*)(rows + count);
        auto values = (const char*)(squares + count);
        for (size_t i = 0; i < count && since_base_.rows() > 0; i++) {
            own_.touched().insert(rows[i]);
            if (header[1] > 0) since_base_.insert(rows[i]);
        }
        own_.put(tables_.table_of(layer), rows, values, squares, (int)count);
    }

    void settle() override {}

    std::string end_load() override {
        uint64_t seed = hash_.at(0);
        hash_.erase(hash_.begin());
        tables_.set_hash(seed, std::exchange(hash_, {}));
        const CheckpointIndex& index = reader_->index();
        Dtype stored = *index.tensors[index.find(name_of(layers_[0], 0, "rows"))].dtype(Slot::weight);
        bool same = stored == sizes_.dtype;
        written_since_base_ = 0;
        for (size_t i = 0; i < places_.size(); i++)
            if (places_[i].number > 0 && places_[i].which == 0)
                written_since_base_ += index.tensors[i].size();
        if (!same || weights_only_) parts_.clear();  // the next save writes all rows
        if (PageFile* file = own_.file(); file && same && !weights_only_ && !has_rows_) {
            own_.cache()->flush();
            file->mark(index.save_id);
            write_notes(*file, index.save_id);
        }
        if (same && has_rows_ && own_.file())
            return text(
                "tables on disk were rolled back to this checkpoint; the first rank read %s from its file",
                size_text(own_.file()->bytes_read()).c_str());
        if (same) return "";
        return text("rows of tables stored as %s, %s to %s", dtype_name(stored),
                    stored == Dtype::fp32 ? "rounded" : "widened", dtype_name(sizes_.dtype));
    }

private:
    static constexpr const char* hash_name = "ngram.hash";
    static constexpr std::array parts_of_row = {"ids", "rows", "squares"};
    static constexpr size_t most_rows = 16384;  // in a piece
    static constexpr size_t most_changes = 16;  // parts of a checkpoint, besides the base

    // A tensor's layer, the number of its part (0: the base), and its index in parts_of_row. Layer -1: the
    // tensor belongs to no table.
    struct Place {
        int layer = -1, number = 0;
        size_t which = 0;
    };

    template <typename T>
    static T at(const char* bytes, size_t i) {
        T value;
        memcpy(&value, bytes + i * sizeof value, sizeof value);
        return value;
    }

    bool is_here(int layer) const { return std::ranges::count(sizes_.layers, layer) > 0; }
    // Makes the sets record only changes made after this save.
    void note_saved() {
        own_.changed().clear();
        if (writes_base()) since_base_.clear();
    }
    bool writes_base() const { return saved_parts_.size() == 1; }
    int me() const { return rank_of(tables_.mesh().position, shape_); }
    // The rank that owns a row of a layer's table.
    int owner(int layer, uint64_t row) const {
        size_t number = (size_t)(std::ranges::find(layers_, layer) - layers_.begin());
        MeshPosition place = first_of_stage(stage_of_[number]);
        return rank_of(moved_along(stage_axes, (int)sizes_.owner_of(row), place, shape_), shape_);
    }

    static std::string name_of(int layer, int number, const char* what) {
        std::string part = number > 0 ? "changes." + std::to_string(number) + "." : "";
        return "layers." + std::to_string(layer) + ".table." + part + what;
    }
    Place place_of(const std::string& name) const {
        for (int layer : layers_) {
            int number = 0;
            std::string base = name_of(layer, 0, "");
            if (!name.starts_with(base)) continue;
            sscanf(name.c_str() + base.size(), "changes.%d.", &number);
            for (size_t which = 0; which < parts_of_row.size(); which++)
                if (name == name_of(layer, number, parts_of_row[which])) return {layer, number, which};
        }
        return {};
    }
    // Fills places_ and parts_. All tables must have the same parts.
    void find_parts(const CheckpointIndex& index) {
        std::set<int> numbers = {0};
        places_.clear();
        for (const CheckpointTensor& tensor : index.tensors)
            numbers.insert(places_.emplace_back(place_of(tensor.name)).number);
        parts_.assign(numbers.begin(), numbers.end());
        for (int number : parts_)
            for (int layer : layers_)
                for (size_t which = 0; which < parts_of_row.size(); which++)
                    check_tensor(layer, number, which);
    }
    static bool has_only(const CheckpointTensor& tensor, Slot slot) {
        return tensor.dtype(slot) &&
               std::ranges::count_if(tensor.slots, [](auto& stored) { return stored.has_value(); }) == 1;
    }
    void check_tensor(int layer, int part_number, size_t part) const {
        const CheckpointIndex& index = reader_->index();
        std::string name = name_of(layer, part_number, parts_of_row[part]);
        int number = index.find(name);
        bool good = number >= 0 && index.tensors[number].width() == (part == 1 ? W_ : 1) &&
                    has_only(index.tensors[number], part == 0 ? Slot::data : Slot::weight) &&
                    (part != 2 || index.tensors[number].dtype(Slot::weight) == Dtype::fp32);
        if (!good)
            fail("%s: has no tensor %s with rows of %zu elements, which the model has; choose the "
                 "options that it was trained with",
                 reader_->folder().c_str(), name.c_str(), W_);
    }

    // Only the first rank writes the hash.
    uint64_t hash_bytes() const {
        return me() == 0 ? (1 + (uint64_t)config_.vocab_size) * sizeof(uint64_t) : 0;
    }
    void write_hash(const WritePiece& write) const {
        if (me() != 0) return;
        std::vector<uint64_t> hash = {tables_.hash().seed()};
        hash.insert(hash.end(), tables_.hash().folded().begin(), tables_.hash().folded().end());
        for (uint64_t at = 0, n; at < hash.size(); at += n) {
            n = std::min<uint64_t>(hash.size() - at, largest_piece);
            write({(uint32_t)(3 * layers_.size()), Slot::data, 0, 0, 0, 1, at, n, 0, 0}, &hash[at]);
        }
    }
    void write_notes(PageFile& file, uint64_t id) const {
        write_sets(file.companion(id), {&own_.touched(), &since_base_});
    }

    // Writes the rows of this save, at most rows_at_once at a time.
    void write_rows(const WritePiece& write) {
        const std::vector<int>& here = sizes_.layers;
        const size_t record = sizes_.record_bytes();
        std::vector<uint64_t> rows, ids;
        std::vector<char> records(rows_at_once * record);
        auto read = [&](auto& some, auto& to) { own_.copy(some, to); };
        uint64_t written = 0;
        while (!here.empty() && own_.snapshot().next(rows_at_once, rows, records.data(), read) > 0) {
            const uint64_t n = rows.size();
            ids.clear();
            for (uint64_t row : rows) ids.push_back(sizes_.row_of((size_t)own_.me(), row));
            std::vector<char> values(n * sizes_.row_bytes());
            std::vector<float> squares(n);
            for (size_t table = 0; table < here.size(); table++) {
                for (size_t i = 0; i < n; i++)
                    squares[i] = own_.take_apart(&records[i * record], table, rows[i],
                                                 &values[i * sizes_.row_bytes()]);
                size_t layer = (size_t)(std::ranges::find(layers_, here[table]) - layers_.begin());
                auto tensor = (uint32_t)(3 * ((saved_parts_.size() - 1) * layers_.size() + layer));
                write({tensor, Slot::data, 0, 0, 0, 1, written, n, 0, 0}, ids.data());
                write({tensor + 1, Slot::weight, 0, 0, 0, W_, written * W_, n * W_, 0, 0}, values.data());
                write({tensor + 2, Slot::weight, 0, 0, 0, 1, written, n, 0, 0}, squares.data());
            }
            written += n;
        }
    }

    NgramTables& tables_;
    OwnRows& own_;
    const TableSizes& sizes_;
    const ModelConfig& config_;
    const MeshShape shape_;
    const size_t W_, rows_at_once;
    std::vector<int> layers_, stage_of_;  // those with a table, and the stage that has each

    RowSet &since_base_, &saving_;     // rows that have changed since the base; those to be saved
    std::vector<int> parts_;           // of the last checkpoint; empty: there is none
    uint64_t written_since_base_ = 0;  // rows of its changes, over all tables

    // the current save
    SaveScope scope_;
    std::exception_ptr problem_;    // why the save cannot succeed, if known when it begins
    std::vector<int> saved_parts_;  // of the new checkpoint; the save writes the last one
    uint64_t written_ = 0;          // rows of that part, over all tables

    // the current load
    const CheckpointReader* reader_ = nullptr;
    bool weights_only_ = false, has_rows_ = false;  // has_rows_: only the last changes are read
    std::vector<Place> places_;                     // of each tensor
    std::vector<uint64_t> hash_;
};
