/*
The tables of n-gram memory as a contributor to checkpoints (comm/stateful.h). A checkpoint holds, once, each
row that has ever had a gradient, and the seed that all other rows follow from:

    layers.3.table.ids        (rows) uint64        their numbers in the table of layer 3
    layers.3.table.rows       (rows, width)        their values
    layers.3.table.squares    (rows)               their sums of squares
    ngram.hash                (1 + tokens) uint64  the seed, and the token that each counts as (NgramHash)

Owners write their rows, and any number of owners can load them. A background save writes a copy, which is
made before it begins.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/memory.h"        // DeviceArray
#include "comm/ngram_tables.h"  // NgramTables
#include "comm/stateful.h"      // Stateful
#include "data/base/dtype.h"
#include "data/checkpoint/files.h"  // CheckpointReader
#include "kernels/bf16_bits.h"

class NgramCheckpoint final : public Stateful {
public:
    // The tables must outlive it.
    NgramCheckpoint(NgramTables& tables, const Layout& layout)
        : tables_(tables),
          config_(tables.config()),
          shape_(tables.mesh().shape),
          W_((size_t)config_.ngram_width),
          rows_at_once(std::min(most_rows, (size_t)largest_piece / W_)),
          rows_(rows_of_table(config_)) {
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

    // Counts all rows, since any may have had a gradient by then.
    uint64_t bytes_to_write(bool) const override {
        const TableSizes& sizes = tables_.sizes();
        return sizes.tables() * sizes.own_rows() * bytes_of_row() + hash_bytes();
    }

    void begin_save(const SaveScope& scope) override {
        in_background_ = scope.in_background;
        tables_.forget_stale();
        tables_.synchronize();
        squares_.clear();
        for (int layer : tables_.sizes().layers) {
            squares_.push_back(copied(tables_.own(layer).squares, tables_.sizes().own_rows()));
            if (in_background_) stage(layer, squares_.back());
        }
    }

    SavePlan plan(bool) override {
        SavePlan plan;
        for (int layer : layers_) {
            uint64_t rows = 0;
            if (const std::vector<float>* squares = squares_of(layer))
                rows = squares->size() - (uint64_t)std::ranges::count(*squares, 0.0f);
            plan.tensors.push_back({tensor(layer, "ids", {0}, Slot::data, Dtype::uint64), rows});
            plan.tensors.push_back(
                {tensor(layer, "rows", {0, (int64_t)W_}, Slot::weight, dtype_of(Slot::weight)), rows});
            plan.tensors.push_back({tensor(layer, "squares", {0}, Slot::weight, Dtype::fp32), rows});
            plan.bytes += rows * bytes_of_row();
        }
        CheckpointTensor hash = {hash_name, {1 + config_.vocab_size}, {}};
        hash.slots[(size_t)Slot::data] = Dtype::uint64;
        plan.tensors.push_back({std::move(hash)});
        plan.bytes += hash_bytes();
        return plan;
    }

    void write(const WritePiece& write) override {
        for (size_t i = 0; i < layers_.size(); i++)
            if (squares_of(layers_[i])) write_table(write, (uint32_t)(3 * i), layers_[i]);
        std::vector<uint64_t> hash = hash_values();
        for (uint64_t at = 0, n; at < hash.size(); at += n) {
            n = std::min<uint64_t>(hash.size() - at, largest_piece);
            write({(uint32_t)(3 * layers_.size()), Slot::data, 0, 0, 0, 1, at, n, 0, 0}, &hash[at]);
        }
    }

    // ---- loading

    bool has(const std::string& tensor) const override {
        return tensor == hash_name || place_of(tensor).first >= 0;
    }

    // A batch holds the ids of some rows, the rows, and their squares; ranks read batches in turn. Every rank
    // reads the hash.
    std::vector<PieceBatch> begin_load(const CheckpointReader& reader, bool weights_only) override {
        reader_ = &reader;
        weights_only_ = weights_only;
        const CheckpointIndex& index = reader.index();
        std::map<std::pair<int, uint64_t>, std::array<const CheckpointPiece*, 3>>
            parts;  // by (layer, first row)
        std::vector<PieceBatch> batches;
        for (int layer : layers_)
            for (size_t part = 0; part < parts_of_row.size(); part++) check_tensor(layer, part);
        if (int number = index.find(hash_name);
            number < 0 || !has_only(index.tensors[number], Slot::data) ||
            index.tensors[number].size() != 1 + (uint64_t)config_.vocab_size)
            fail("%s: has no n-gram hash for %d tokens; choose the options that it was trained with",
                 reader.folder().c_str(), config_.vocab_size);
        for (const CheckpointPiece& piece : index.pieces) {
            const CheckpointTensor& tensor = index.tensors[piece.tensor];
            if (tensor.name == hash_name) batches.push_back({{&piece}, piece.count, index.bytes_of(piece)});
            auto [layer, part] = place_of(tensor.name);
            if (layer >= 0) parts[{layer, piece.begin / tensor.width()}][part] = &piece;
        }
        int turn = 0;
        for (auto& [place, of_rows] : parts) {
            auto [ids, rows, squares] = of_rows;
            if (!ids || !rows || !squares || rows->count != ids->count * W_ || squares->count != ids->count)
                fail("%s: rows of layer %d's table do not match their row numbers; use another checkpoint",
                     reader.folder().c_str(), place.first);
            if (turn++ % shape_.ranks() != me()) continue;
            PieceBatch batch = {{ids, rows, squares}};
            for (const CheckpointPiece* piece : batch.pieces)
                batch.elements += piece->count, batch.bytes += index.bytes_of(*piece);
            batches.push_back(std::move(batch));
        }
        forget_rows();
        return batches;
    }

    Messages take(const PieceBatch& batch, const char* values) override {
        if (batch.pieces.size() == 1) {
            const CheckpointPiece& piece = *batch.pieces[0];
            hash_.resize(std::max<size_t>(hash_.size(), piece.begin + piece.count));
            memcpy(&hash_[piece.begin], values, piece.count * sizeof(uint64_t));
            return {};
        }
        const CheckpointTensor& rows_tensor = reader_->index().tensors[batch.pieces[1]->tensor];
        const int layer = place_of(rows_tensor.name).first;
        const Dtype stored = *rows_tensor.dtype(Slot::weight);
        const size_t count = batch.pieces[0]->count;
        const char* rows = values + count * sizeof(uint64_t);
        const char* squares = rows + count * W_ * dtype_size(stored);
        std::map<int, std::vector<size_t>> of_rank;
        for (size_t i = 0; i < count; i++) {
            uint64_t id = at<uint64_t>(values, i);
            if (id >= rows_)
                fail("%s: row %llu is outside the table of %llu rows; use another checkpoint",
                     reader_->folder().c_str(), (unsigned long long)id, (unsigned long long)rows_);
            of_rank[owner(layer, id)].push_back(i);
        }
        Messages messages;
        for (auto& [rank, numbers] : of_rank) {
            std::string& message = messages[rank];
            auto add = [&](const auto& value) { message.append((const char*)&value, sizeof value); };
            add((uint64_t)layer);
            add((uint64_t)numbers.size());
            for (size_t i : numbers) add(at<uint64_t>(values, i) / owners());
            for (size_t i : numbers) add(weights_only_ ? FLT_MIN : at<float>(squares, i));
            for (size_t i : numbers)
                for (size_t w = 0; w < W_; w++) add(number_at(rows, stored, i * W_ + w));
        }
        if (auto own = messages.find(me()); own != messages.end()) {
            receive(own->second);
            messages.erase(own);
        }
        return messages;
    }

    // message: layer, count, rows of this owner (count), squares (count), values (count, W).
    void receive(std::string_view message) override {
        if (message.empty()) return;
        auto header = (const uint64_t*)message.data();
        TableRows table = tables_.table((int)header[0]);
        const size_t count = header[1];
        const uint64_t* rows = header + 2;
        auto squares = (const float*)(rows + count);
        auto values = (const floatX*)(squares + count);
        if (on_host()) return put_rows_cpu(table, rows, values, squares, (int)count);
        cudaStream_t stream = tables_.stream();
        DeviceArray<uint64_t> rows_there(count);
        DeviceArray<float> squares_there(count);
        DeviceArray<floatX> values_there(count * W_);
        copy_async(rows_there.data, rows, count, stream);
        copy_async(squares_there.data, squares, count, stream);
        copy_async(values_there.data, values, count * W_, stream);
        put_rows(table, rows_there.data, values_there.data, squares_there.data, (int)count, stream);
        synchronize(stream);
    }

    void settle() override {}

    std::string end_load() override {
        uint64_t seed = hash_.at(0);
        hash_.erase(hash_.begin());
        tables_.set_hash(seed, std::exchange(hash_, {}));
        Dtype stored =
            *reader_->index().tensors[reader_->index().find(name_of(layers_[0], "rows"))].dtype(Slot::weight);
        if (stored == dtype_of(Slot::weight)) return "";
        return text("rows of tables %s in the checkpoint, %s to %s", dtype_name(stored),
                    stored == Dtype::fp32 ? "rounded" : "widened", dtype_name(dtype_of(Slot::weight)));
    }

private:
    static constexpr const char* hash_name = "ngram.hash";
    static constexpr std::array parts_of_row = {"ids", "rows", "squares"};
    static constexpr size_t most_rows = 16384;  // in a piece

    template <typename T>
    static T at(const char* bytes, size_t i) {
        T value;
        memcpy(&value, bytes + i * sizeof value, sizeof value);
        return value;
    }
    static floatX number_at(const char* numbers, Dtype stored, size_t i) {
        return floatX(stored == Dtype::fp32 ? at<float>(numbers, i)
                                            : bf16_to_float(at<uint16_t>(numbers, i)));
    }

    bool on_host() const { return tables_.settings().table_place == TablePlace::host; }
    int me() const { return rank_of(tables_.mesh().position, shape_); }
    uint64_t owners() const { return (uint64_t)shape_.along(stage_axes); }
    uint64_t bytes_of_row() const {
        return sizeof(uint64_t) + sizeof(float) + W_ * dtype_size(dtype_of(Slot::weight));
    }
    // The rank that owns a row of a layer's table.
    int owner(int layer, uint64_t row) const {
        size_t number = (size_t)(std::ranges::find(layers_, layer) - layers_.begin());
        MeshPosition place = first_of_stage(stage_of_[number]);
        return rank_of(moved_along(stage_axes, (int)(row % owners()), place, shape_), shape_);
    }

    static std::string name_of(int layer, const char* part) {
        return "layers." + std::to_string(layer) + ".table." + part;
    }
    static CheckpointTensor tensor(int layer, const char* part, std::vector<int64_t> shape, Slot slot,
                                   Dtype dtype) {
        CheckpointTensor tensor = {name_of(layer, part), std::move(shape), {}};
        tensor.slots[(size_t)slot] = dtype;
        return tensor;
    }
    // Returns the layer of a tensor, and its index in parts_of_row. Layer -1: the tensor belongs to no table.
    std::pair<int, size_t> place_of(const std::string& name) const {
        for (int layer : layers_)
            for (size_t part = 0; part < parts_of_row.size(); part++)
                if (name == name_of(layer, parts_of_row[part])) return {layer, part};
        return {-1, 0};
    }
    static bool has_only(const CheckpointTensor& tensor, Slot slot) {
        return tensor.dtype(slot) &&
               std::ranges::count_if(tensor.slots, [](auto& stored) { return stored.has_value(); }) == 1;
    }
    void check_tensor(int layer, size_t part) const {
        const CheckpointIndex& index = reader_->index();
        std::string name = name_of(layer, parts_of_row[part]);
        int number = index.find(name);
        bool good = number >= 0 && index.tensors[number].width() == (part == 1 ? W_ : 1) &&
                    has_only(index.tensors[number], part == 0 ? Slot::data : Slot::weight) &&
                    (part != 2 || index.tensors[number].dtype(Slot::weight) == Dtype::fp32);
        if (!good)
            fail("%s: has no tensor %s with rows of %zu numbers, which the model has; choose the options "
                 "that it was trained with",
                 reader_->folder().c_str(), name.c_str(), W_);
    }

    // Only the first rank writes the hash.
    uint64_t hash_bytes() const {
        return me() == 0 ? (1 + (uint64_t)config_.vocab_size) * sizeof(uint64_t) : 0;
    }
    std::vector<uint64_t> hash_values() const {
        if (me() != 0) return {};
        std::vector<uint64_t> values = {tables_.hash().seed()};
        values.insert(values.end(), tables_.hash().folded().begin(), tables_.hash().folded().end());
        return values;
    }

    // Returns a copy of an owner's array on the host.
    template <typename T>
    std::vector<T> copied(const T* from, size_t count) const {
        std::vector<T> values(count);
        copy_async(values.data(), from, count, tables_.stream());
        ::synchronize(tables_.stream());
        return values;
    }
    // The squares copied for the current save. Null: the table is not on this stage.
    const std::vector<float>* squares_of(int layer) const {
        const std::vector<int>& here = tables_.sizes().layers;
        auto found = std::ranges::find(here, layer);
        return found == here.end() ? nullptr : &squares_[(size_t)(found - here.begin())];
    }

    // Copies a table to its staging memory. If the table is on the host, copies only the rows that have had a
    // gradient, so that few pages are touched.
    void stage(int layer, const std::vector<float>& squares) {
        const floatX* from = tables_.own(layer).values;
        floatX* to = tables_.staged(layer).values;
        if (!on_host()) {
            copy_async(to, from, squares.size() * W_, tables_.stream());
            return ::synchronize(tables_.stream());
        }
#pragma omp parallel for
        for (size_t row = 0; row < squares.size(); row++)
            if (squares[row] != 0) std::copy_n(from + row * W_, W_, to + row * W_);
    }

    void write_table(const WritePiece& write, uint32_t tensor, int layer) {
        const std::vector<float>& squares = *squares_of(layer);
        const bool copies = !in_background_ && !on_host();
        std::vector<uint64_t> ids;
        std::vector<float> row_squares;
        std::vector<floatX> rows;
        uint64_t written = 0;
        auto flush = [&] {
            uint64_t n = ids.size();
            if (n == 0) return;
            write({tensor, Slot::data, 0, 0, 0, 1, written, n, 0, 0}, ids.data());
            write({tensor + 1, Slot::weight, 0, 0, 0, W_, written * W_, n * W_, 0, 0}, rows.data());
            write({tensor + 2, Slot::weight, 0, 0, 0, 1, written, n, 0, 0}, row_squares.data());
            written += n;
            ids.clear(), row_squares.clear(), rows.clear();
        };
        for (size_t begin = 0; begin < squares.size(); begin += rows_at_once) {
            size_t end = std::min(begin + rows_at_once, squares.size());
            std::vector<floatX> block;
            if (copies) block = copied(tables_.own(layer).values + begin * W_, (end - begin) * W_);
            const OwnTable& source = in_background_ ? tables_.staged(layer) : tables_.own(layer);
            const floatX* values = copies ? block.data() : source.values + begin * W_;
            for (size_t row = begin; row < end; row++) {
                if (squares[row] == 0) continue;
                const floatX* from = values + (row - begin) * W_;
                ids.push_back(row * owners() + (uint64_t)tables_.me());
                row_squares.push_back(squares[row]);
                rows.insert(rows.end(), from, from + W_);
                if (ids.size() == rows_at_once) flush();
            }
        }
        flush();
    }

    // Gives all rows their initial values, which follow from the seed.
    void forget_rows() {
        tables_.synchronize();
        for (int layer : tables_.sizes().layers) {
            float* squares = tables_.own(layer).squares;
            size_t count = tables_.sizes().own_rows();
            if (!on_host()) {
                zero_async(squares, count, tables_.stream());
                continue;
            }
            for (size_t row = 0; row < count; row++)  // pages that were never written stay so
                if (squares[row] != 0) squares[row] = 0;
        }
    }

    NgramTables& tables_;
    const ModelConfig& config_;
    const MeshShape shape_;
    const size_t W_, rows_at_once;
    const uint64_t rows_;                 // in each table
    std::vector<int> layers_, stage_of_;  // those with a table, and the stage that has each

    // the current save
    bool in_background_ = false;
    std::vector<std::vector<float>> squares_;  // for each table of this stage

    // the current load
    const CheckpointReader* reader_ = nullptr;
    bool weights_only_ = false;
    std::vector<uint64_t> hash_;
};
