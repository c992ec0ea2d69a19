/*
The rows of n-gram tables that a rank owns (comm/ngram_tables.h), and what depends on where they are:

    device    in arrays in its memory; kernels fetch and update rows
    host      in arrays in host memory; cores fetch and update rows, as work on a separate stream
    disk      in a file, with a cache in host memory (data/tables/); as for host, but rows are first brought
              into the cache, and are addressed by its slots

Checkpoints access the rows in the same way in all three places: by number, as records. A record has, for each
table of the stage, the values of the row and its sum of squares.
*/
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "comm/mesh.h"          // Mesh, wait_for
#include "comm/ngram_arrays.h"  // TableSizes, TableArrays
#include "data/base/error.h"    // fail
#include "data/base/screen.h"
#include "data/tables/page_file.h"
#include "data/tables/row_cache.h"
#include "data/tables/row_set.h"
#include "data/tables/row_snapshot.h"
#include "kernels/streams.cuh"
#include "kernels/table_rows.cuh"

class OwnRows {
public:
    // sizes and arrays must outlive this.
    OwnRows(const TableSizes& sizes, const TableArrays& arrays, const ZeroSettings& settings,
            const Mesh& mesh, cudaStream_t compute)
        : sizes_(sizes),
          arrays_(arrays),
          settings_(settings),
          mesh_(mesh),
          me_(index_along(stage_axes, mesh.position, mesh.shape)),
          compute_(compute),
          host_(compute),
          keys_(sizes.tables()),
          snapshot_(arrays.copies, arrays.copied_rows, sizes.record_bytes()) {
        if (sizes.tables() == 0) return;
        for (const OwnTable& table : on_host() ? arrays_.tables : arrays_.staged) {
            fields_.push_back({table.values, sizes_.row_bytes()});
            fields_.push_back({(char*)table.squares, sizeof(float)});
        }
        if (on_disk() && !ledger) open_file();
        for (size_t i = 0; i < sets_.size() && settings.training && !ledger; i++)
            sets_[i] = RowSet(arrays.sets[i], sizes.own_rows());
        if (on_host() && settings.overlap.data) host_ = new_communication_stream("tables on the host");
    }
    ~OwnRows() {
        if (host_ != compute_) end_stream(host_);
    }
    OwnRows(const OwnRows&) = delete;
    OwnRows& operator=(const OwnRows&) = delete;

    int me() const { return me_; }  // this rank's number among the owners
    // Returns whether the host's cores fetch and update the rows, as for tables in host memory or on disk.
    bool on_host() const { return settings_.table_place != TablePlace::device; }
    // The stream that fetches and updates rows; the compute stream for tables on the device.
    cudaStream_t host() const { return host_; }

    // The seed determines the initial values of rows.
    void set_seed(uint64_t seed) {
        for (size_t i = 0; i < keys_.size(); i++)
            keys_[i] = random_key(seed, "layers." + std::to_string(sizes_.layers[i]) + ".ngram");
    }
    // Returns a table of this stage whose rows are addressed by their places in its arrays.
    TableRows by_place(size_t number) const {
        const OwnTable& own = arrays_.tables[number];
        return {numbers(own.values), own.squares,   sizes_.W,      keys_[number],
                deviation,           (uint64_t)me_, sizes_.owners, arrays_.notes.rows};
    }
    // Returns the table with its rows addressed by number; on disk, only for initial values.
    TableRows by_number(size_t number) const {
        TableRows table = by_place(number);
        table.rows = nullptr;
        return table;
    }

    // ---- steps, on the host

    // Returns the number of the next step's list; from these numbers, the cache knows which rows to keep.
    uint32_t next_turn() { return ++turns_; }
    // Enqueues work that brings `count` rows of `fetched`, from `begin` on, into memory. Returns their places
    // there: the row numbers themselves or, for tables on disk, slots, which that work fills in.
    const uint64_t* bring(const TableLists& list, size_t begin, int count) {
        const uint64_t* rows = list.fetched + begin;
        if (!on_disk()) return rows;
        uint64_t* slots = list.fetched_slots + begin;
        if (ledger) {
            // a missing row costs a read of its page; the row evicted for it, a read and a write
            const size_t here = sizes_.rows_in_memory(settings_);
            double missing = count * (1 - (double)here / (double)sizes_.own_rows()),
                   bytes = missing * (double)RowCache::page_bytes_for(sizes_.record_bytes());
            ledger->launched(nullptr, host_,
                             LaunchCost{.read = 2 * bytes, .written = bytes, .place = LaunchCost::disk});
        } else {
            cache_work(slots, (size_t)count,
                       [=, this, turn = list.number] { cache_->hold(rows, (size_t)count, slots, turn); });
        }
        return slots;
    }
    // Enqueues the fetch of rows from a table. places (count): where they are
    void fetch(floatX* to, size_t number, const uint64_t* places, int count) const {
        if (ledger) return fetch_rows(to, by_place(number), places, count, host_);
        host_work(host_, settings_.host_threads,
                  [=, table = by_place(number)] { fetch_rows_cpu(to, table, places, count); });
    }
    // Enqueues the update of rows of `own`: entries [begin, end) of `turn`, or all of them in the order of
    // the list. sums (tables, each): the gradients of `own`
    void step(const TableLists& list, size_t begin, size_t end, const float* sums, size_t each,
              const float* scale, const AdaGrad& adagrad) {
        if (end == begin) return;
        const int count = (int)(end - begin);
        const int* turn = begin > 0 || end < list.distinct ? list.turn + begin : nullptr;
        const uint64_t* places = on_disk() ? list.own_slots : list.own;
        if (!ledger) prepare_change(list, (size_t)count, turn);
        for (size_t i = 0; i < sizes_.tables(); i++, sums += each) {
            if (ledger)
                step_rows(by_place(i), list.own, sums, count, scale, adagrad, host_);
            else
                host_work(host_, settings_.host_threads, [=, this, table = by_place(i)] {
                    if (!disk_failed_) step_rows_cpu(table, places, sums, count, scale, adagrad, turn);
                });
        }
    }
    // Throws the error of the enqueued work, if there was one.
    void raise_error() const {
        if (disk_failed_) disk_error_.raise();
    }

    // ---- checkpoints

    // Sets of own rows, if the tables are trained: rows that have changed since the last save began, rows
    // that have ever changed, and two sets for NgramCheckpoint.
    RowSet& set(size_t number) { return sets_[number]; }
    RowSet& changed() { return sets_[0]; }
    RowSet& touched() { return sets_[1]; }
    // The rows as they were when a save began.
    RowSnapshot& snapshot() { return snapshot_; }
    // The file and the cache of tables on disk; null for other tables.
    PageFile* file() { return file_ ? &*file_ : nullptr; }
    RowCache* cache() { return cache_ ? &*cache_ : nullptr; }

    // Call before copy(), for each save. If steps may change tables on the device during the save, copies
    // them, because no snapshot protects them.
    void begin_copies(bool in_background) {
        staged_ = in_background && !on_host();
        for (size_t i = 0; i < sizes_.tables() && staged_; i++) {
            const OwnTable &own = arrays_.tables[i], &to = arrays_.staged[i];
            copy_async(to.values, own.values, sizes_.own_rows() * sizes_.row_bytes(), compute_);
            copy_async(to.squares, own.squares, sizes_.own_rows(), compute_);
        }
        if (staged_) synchronize(compute_);
    }
    // Copies the records of rows (ascending).
    void copy(const std::vector<uint64_t>& rows, const std::vector<char*>& records) const {
        if (cache_) return cache_->copy(rows, records);
        if (!on_host() && !staged_) return copy_from_device(rows, records);
        for (size_t i = 0; i < rows.size(); i++) copy_record(fields_, rows[i], records[i]);
    }
    // Copies the values of a row in a table from its record, and returns its sum of squares. If the row has
    // had no gradient, these are its initial values.
    float take_apart(const char* record, size_t number, uint64_t row, char* values) const {
        const char* from = record + number * sizes_.table_bytes();
        float squares;
        memcpy(values, from, sizes_.row_bytes());
        memcpy(&squares, from + sizes_.row_bytes(), sizeof squares);
        for (int w = 0; w < sizes_.W && squares == 0; w++)
            numbers(values).set(w, by_number(number).value(row, w, true));
        return squares;
    }
    // Sets rows of a table. values (count, W) are in its format.
    void put(size_t number, const uint64_t* rows, const char* values, const float* squares, int count) {
        if (cache_) return put_in_cache(number, rows, values, squares, count);
        if (on_host()) return put_rows_cpu(by_number(number), rows, numbers(values), squares, count);
        DeviceArray<uint64_t> rows_there(count);
        DeviceArray<float> squares_there(count);
        DeviceArray<char> values_there((size_t)count * sizes_.row_bytes());
        copy_async(rows_there.data, rows, count, compute_);
        copy_async(squares_there.data, squares, count, compute_);
        copy_async(values_there.data, values, (size_t)count * sizes_.row_bytes(), compute_);
        put_rows(by_number(number), rows_there.data, numbers(values_there.data), squares_there.data, count,
                 compute_);
        synchronize(compute_);
    }
    // Gives all rows their initial values, which follow from the seed.
    void forget() {
        touched().insert(changed());
        if (file_) cache_->forget(), file_->clear();
        for (size_t i = 0; i < sizes_.tables() && !file_; i++) {
            float* squares = arrays_.tables[i].squares;
            const size_t count = sizes_.own_rows();
            if (!on_host())
                zero_async(squares, count, compute_);
            else if (touched().rows() > 0)
                for (uint64_t row = touched().next(0); row < count; row = touched().next(row + 1))
                    squares[row] = 0;
            else
                for (size_t row = 0; row < count; row++)  // leaves pages that were never written untouched
                    if (squares[row] != 0) squares[row] = 0;
        }
        for (RowSet& set : sets_) set.clear();
    }

private:
    // Initial values are uniform, with the standard deviation of embeddings.
    static constexpr float deviation = 0.02f * 1.7320508f;

    bool on_disk() const { return settings_.table_place == TablePlace::disk; }
    NumberArray numbers(const char* data) const { return {(void*)data, sizes_.dtype == Dtype::bf16}; }

    void open_file() {
        const size_t record = sizes_.record_bytes(), rows = arrays_.notes.slots, needed = 2 * sizes_.asked();
        if (rows < std::min(needed, sizes_.own_rows()))
            fail("--ngram-cache: has room for %zu rows of %zu bytes, but two steps may need %zu; give at "
                 "least %zu",
                 rows, record, needed, needed * (record + SlotNotes::bytes_of_slot));
        std::string what = text("%llu rows of %zu bytes, owner %d of %zu, layers",
                                (unsigned long long)sizes_.rows, sizes_.row_bytes(), me_, sizes_.owners);
        for (int layer : sizes_.layers) what += " " + std::to_string(layer);
        std::string path = text("%s/stage-%02d-owner-%05d", settings_.table_dir.c_str(),
                                mesh_.position[Axis::pipeline], me_);
        if (!settings_.training) path += "." + std::to_string(getpid());
        file_.emplace(path, RowCache::pages_for(sizes_.own_rows(), record), RowCache::page_bytes_for(record),
                      XXH3_64bits(what.data(), what.size()), !settings_.training);
        if (!file_->is_direct() && me_ == 0 && settings_.training)
            screen.warn(text("%s: the file system does not support direct I/O, so pages of tables also fill "
                             "the system's cache",
                             settings_.table_dir.c_str()));
        cache_.emplace(*file_, fields_, arrays_.notes);
    }

    // Enqueues work(), which finds slots. After an error all slots are 0, so fetches read wrong rows, and no
    // row changes any more; the error is thrown before anything computed from those rows is saved.
    template <typename Work>
    void cache_work(uint64_t* slots, size_t count, Work&& work) {
        host_work(host_, settings_.host_threads, [=, this] {
            try {
                std::lock_guard lock(snapshot_.mutex());
                if (!disk_failed_) return work();
            } catch (const std::exception& error) {
                disk_error_ = {exit_code_of(error), message_of(error)};
                disk_failed_ = true;
            }
            std::fill_n(slots, count, 0);
        });
    }

    // Call before own rows change: finds their slots, and copies the rows that a save has yet to read.
    void prepare_change(const TableLists& list, size_t count, const int* turn) {
        auto entry = [=](size_t i) { return turn ? (size_t)turn[i] : i; };
        if (cache_)
            cache_work(list.own_slots, list.distinct, [=, this, rows = list.own, slots = list.own_slots] {
                for (size_t i = 0; i < count; i++) cache_->change(&rows[entry(i)], 1, &slots[entry(i)]);
            });
        host_work(host_, settings_.host_threads, [=, this, own = list.own, slots = list.own_slots] {
            if (disk_failed_ || !snapshot_.is_active()) return;
            std::vector<uint64_t> rows;
            for (size_t i = 0; i < count; i++) rows.push_back(own[entry(i)]);
            snapshot_.before_change(rows.data(), count, [&](size_t i, char* to) {
                copy_record(fields_, cache_ ? slots[entry(i)] : rows[i], to);
            });
        });
    }

    void put_in_cache(size_t number, const uint64_t* rows, const char* values, const float* squares,
                      int count) {
        const int some = std::max((int)(arrays_.notes.slots / 4), 1);
        for (int begin = 0, n; begin < count; begin += n) {
            n = std::min(some, count - begin);
            std::vector<uint64_t> slots((size_t)n);
            turns_ += 2;  // so that rows of earlier turns can be evicted
            cache_->hold(rows + begin, (size_t)n, slots.data(), turns_);
            cache_->change(rows + begin, (size_t)n, slots.data());
            put_rows_cpu(by_number(number), slots.data(), numbers(values + begin * sizes_.row_bytes()),
                         squares + begin, n);
        }
    }

    // Copies the records of rows (ascending) of tables on the device.
    void copy_from_device(const std::vector<uint64_t>& rows, const std::vector<char*>& records) const {
        if (rows.empty()) return;
        const size_t row = sizes_.row_bytes(), count = rows.size();
        std::vector<char> values(count * row);
        std::vector<float> squares(rows.back() + 1 - rows.front());
        DeviceArray<uint64_t> rows_there(count);
        DeviceArray<char> values_there(count * row);
        copy_async(rows_there.data, rows.data(), count, compute_);
        for (size_t i = 0; i < sizes_.tables(); i++) {
            fetch_rows(numbers(values_there.data), by_number(i), rows_there.data, (int)count, compute_);
            copy_async(values.data(), values_there.data, values.size(), compute_);
            copy_async(squares.data(), by_number(i).squares + rows.front(), squares.size(), compute_);
            synchronize(compute_);
            for (size_t j = 0; j < count; j++) {
                char* to = records[j] + i * sizes_.table_bytes();
                memcpy(to, &values[j * row], row);
                memcpy(to + row, &squares[rows[j] - rows.front()], sizeof(float));
            }
        }
    }

    const TableSizes& sizes_;
    const TableArrays& arrays_;
    const ZeroSettings settings_;
    const Mesh& mesh_;
    const int me_;
    cudaStream_t compute_, host_;
    std::vector<uint64_t> keys_;    // for each table
    std::vector<RowField> fields_;  // of a record in host memory, of a table there or a staged copy
    std::array<RowSet, TableArrays::row_sets> sets_;
    RowSnapshot snapshot_;
    uint32_t turns_ = 0;
    std::optional<PageFile> file_;
    std::optional<RowCache> cache_;
    NotedError disk_error_;  // set if disk_failed_
    std::atomic<bool> disk_failed_ = false;
    bool staged_ = false;  // the current save reads copies of tables on the device
};
