/*
A rank's share of the tables of n-gram memory (comm/ngram_tables.h): its sizes, lists and arrays. Plans count
the same arrays.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "comm/memory.h"            // Arena
#include "comm/stage.h"             // Stage
#include "comm/zero_arrays.h"       // ZeroSettings
#include "data/tables/row_cache.h"  // SlotNotes
#include "data/tables/row_set.h"    // RowSet
#include "kernels/embedding.cuh"    // embedding_backward_scratch
#include "kernels/global_norm.cuh"  // sum_squares_scratch

// A rank's share of the tables.
struct TableSizes {
    std::vector<int> layers;  // those with a table on this stage
    int W = 0, heads = 0;     // elements of a row; lookups of a token
    size_t lookups = 0;       // for a micro-batch
    int micro_batches = 0;    // looked up at once, at most
    int slots = 0;            // micro-batches on the device at the same time
    uint64_t rows = 0;        // in a table
    size_t owners = 1;
    Dtype dtype = Dtype::fp32;  // rows are stored in this format

    TableSizes() = default;
    TableSizes(const ModelConfig& c, int B, int T, const Stage& stage, Dtype dtype) : dtype(dtype) {
        if (c.ngram.empty()) return;
        for (int layer = 0; layer < c.layers; layer++)
            if (stage.has(layer) && has_table(c, layer)) layers.push_back(layer);
        const MeshShape& shape = stage.layout().mesh;
        W = c.ngram_width, heads = ngram_head_count(c, shape.tp), rows = rows_of_table(c);
        lookups = (size_t)B * (size_t)T * (size_t)heads;
        micro_batches = stage.layout().pipeline.micro_batches, slots = stage.capacity.micro_batches;
        owners = (size_t)shape.along(stage_axes);
    }

    size_t tables() const { return layers.size(); }
    size_t own_rows() const { return (size_t)ceil_div(rows, (uint64_t)owners); }
    // The owner of a row, the row's number among those of its owner, and back.
    size_t owner_of(uint64_t row) const { return (size_t)(row % owners); }
    uint64_t own_number(uint64_t row) const { return row / owners; }
    uint64_t row_of(size_t owner, uint64_t own_number) const { return own_number * owners + owner; }
    // Bytes of a row's values in a table, of these and their sum of squares, and of both in all tables of the
    // stage.
    size_t row_bytes() const { return (size_t)W * dtype_size(dtype); }
    size_t table_bytes() const { return row_bytes() + sizeof(float); }
    size_t record_bytes() const { return tables() * table_bytes(); }
    // Number of this rank's rows of each table that are in memory. Outside training there is room for those
    // of at least two passes.
    size_t rows_in_memory(const ZeroSettings& settings) const {
        if (settings.table_place != TablePlace::disk || tables() == 0) return own_rows();
        size_t cached = settings.table_cache / (record_bytes() + SlotNotes::bytes_of_slot);
        if (!settings.training) cached = std::max(cached, 2 * asked());
        return std::min({own_rows(), cached, (size_t)INT32_MAX});
    }
    // Distinct rows of a step, at most.
    size_t distinct() const { return (size_t)std::min<uint64_t>(lookups * (size_t)micro_batches, rows); }
    // Bytes on disk once `reached` own rows have been touched: in the file of a table on disk, where each may
    // lie in a different page, and in a checkpoint.
    double file_bytes(uint64_t reached) const {
        size_t record = record_bytes();
        uint64_t pages = RowCache::pages_for(own_rows(), record);
        return (double)std::min(reached, pages) * (double)RowCache::page_bytes_for(record);
    }
    uint64_t checkpoint_bytes(uint64_t reached) const {
        return reached * (record_bytes() + tables() * sizeof(uint64_t));
    }
    // Rows that all ranks together ask one owner for, at most. Hashes spread rows over owners at random, and
    // all ranks may ask for the same row, which multiplies the variance by their number: this is nine
    // standard deviations above the mean.
    size_t asked() const {
        if (owners == 1) return distinct();
        auto mean = (double)distinct();
        return std::min((size_t)(mean + 9 * std::sqrt(mean * (double)owners) + 64), distinct() * owners);
    }
};

// The rows of a table that an owner has in memory.
struct OwnTable {
    char* values;    // (rows, W) in the format of TableSizes
    float* squares;  // (rows)
};

// The lists of a step. The host makes them while the device may still read those of the step before.
struct TableLists {
    uint64_t* wanted;       // (distinct) the rows of this rank's step, by owner
    int *slots, *by_slot;   // (micro-batches, lookups) each one's place in `wanted`; lookups sorted by place
    uint64_t *asked, *own;  // (asked) own rows that ranks request, rank by rank; the same without duplicates
    int *rows, *order;      // (asked) place in `own` of each row of `asked`; rows of `asked` sorted by place
    // for tables on the host
    uint64_t* fetched;  // (asked) the rows of `asked`, in the order in which they are sent to the device
    int *place, *turn;  // (asked) place of each row in `fetched`; the order in which own rows are updated
    // for tables on disk
    uint64_t *fetched_slots, *own_slots;  // (asked) where the cache has the rows of `fetched` and `own`
    uint32_t number = 0;

    // used only by the host
    std::vector<size_t> from, to;  // numbers of rows requested by each rank, and from each rank
    size_t distinct = 0;           // entries of `own`
    size_t early = 0, sent = 0;    // entries of `fetched` that need no update first; those sent already
    size_t shared = 0;             // entries of `turn` that the next step needs too
    size_t wants() const { return std::accumulate(to.begin(), to.end(), (size_t)0); }
    size_t asks() const { return std::accumulate(from.begin(), from.end(), (size_t)0); }
};

struct TableArrays {
    static constexpr size_t row_sets = 4;
    // A save copies the rows that change before it has read them. There is room for an eighth of the rows in
    // memory, but for at least this many rows (or all).
    static constexpr size_t least_copied = 4096;

    std::vector<OwnTable> tables;
    std::vector<OwnTable> staged;  // copies for checkpoints of tables on the device
    std::vector<floatX*> rows;     // for each table (distinct, W) the rows of the step
    float* grads = nullptr;        // (tables, distinct, W) their gradients
    float* sums = nullptr;         // (tables, asked, W) sums of them over the ranks; with one owner, grads
    floatX* answers = nullptr;     // (asked, W) rows to send to the ranks that asked for them
    float *received = nullptr, *scratch = nullptr;  // (asked, W) gradients that ranks have sent
    float *squares = nullptr, *norm_scratch = nullptr;
    int* slots = nullptr;                       // (slots, 2, lookups) lists of micro-batches
    uint64_t *asked = nullptr, *own = nullptr;  // copies of the lists in TableLists
    int *list_rows = nullptr, *order = nullptr, *place = nullptr;  // likewise
    int *counts = nullptr, *host_counts = nullptr;                 // (2, owners), also on the host
    uint64_t *wanted = nullptr, *asks = nullptr;                   // (distinct), (asked) while they are sent
    std::array<TableLists, 2> lists = {};
    uint64_t* known = nullptr;  // (places) hash table from a step's rows to their places in its list
    int* known_at = nullptr;
    size_t places = 0;
    // for tables on the host
    floatX *host_answers = nullptr, *fetched = nullptr;  // (tables, asked, W) on the host; on the device
    float *host_sums = nullptr, *host_scale = nullptr;   // (tables, asked, W), (2)
    SlotNotes notes = {};                                // for tables on disk
    // for checkpoints of trained tables: sets with a bit for each own row, and copies of rows that change
    // during a save
    std::array<uint64_t*, row_sets> sets = {};
    char* copies = nullptr;  // (copied_rows, record)
    size_t copied_rows = 0;

    TableArrays(Arena& memory, const TableSizes& s, const ZeroSettings& settings,
                cudaStream_t stream = nullptr) {
        if (s.tables() == 0) return;
        bool on_host = settings.table_place != TablePlace::device,
             on_disk = settings.table_place == TablePlace::disk, training = settings.training,
             several = s.owners > 1;
        size_t n = s.tables(), distinct = s.distinct(), asked_ = s.asked(), own_rows = s.own_rows(),
               here = s.rows_in_memory(settings), W = (size_t)s.W, all = (size_t)s.micro_batches * s.lookups;
        auto take_table = [&](bool host) -> OwnTable {
            const size_t bytes = here * s.row_bytes();
            if (host) return {memory.take_pages<char>(bytes), memory.take_pages<float>(here)};
            return {memory.take_zeros<char>(bytes, stream), memory.take_zeros<float>(here, stream)};
        };
        memory.of(on_disk   ? "cache of n-gram tables in host memory"
                  : on_host ? "n-gram tables in host memory"
                            : "n-gram tables",
                  on_host);
        for (size_t i = 0; i < n; i++) tables.push_back(take_table(on_host));
        if (on_disk) {
            notes.slots = here, notes.indices = SlotNotes::indices_for(here);
            notes.rows = memory.take_pages<uint64_t>(here), notes.turns = memory.take_pages<uint32_t>(here);
            notes.uses = memory.take_pages<uint8_t>(here), notes.changed = memory.take_pages<bool>(here);
            notes.index = memory.take_pages<uint32_t>(notes.indices);
        }
        memory.of("n-gram rows");
        for (size_t i = 0; i < n; i++) rows.push_back(memory.take_elements(distinct * W));
        if (on_host) fetched = memory.take_elements(n * asked_ * W), place = memory.take<int>(asked_);
        slots = memory.take<int>((size_t)s.slots * 2 * s.lookups);
        asked = own = memory.take<uint64_t>(asked_);
        if (several) {
            answers = memory.take_elements(asked_ * W);
            wanted = memory.take<uint64_t>(distinct), asks = memory.take<uint64_t>(asked_);
            counts = memory.take<int>(2 * s.owners);
        }
        if (training) {
            grads = memory.take<float>(n * distinct * W);
            squares = memory.take<float>(1);
            norm_scratch = memory.take<float>(n * (sum_squares_scratch(asked_ * W) + 1));
            sums = grads;
        }
        if (training && several) {
            sums = memory.take<float>(n * asked_ * W);
            received = memory.take<float>(asked_ * W);
            scratch = memory.take_zeros<float>(embedding_backward_scratch((int)asked_, s.W), stream);
            own = memory.take<uint64_t>(asked_);
            list_rows = memory.take<int>(asked_), order = memory.take<int>(asked_);
        }
        memory.of("n-gram lists", true);
        for (TableLists& list : lists) {
            list.wanted = memory.take<uint64_t>(distinct);
            list.slots = memory.take<int>(all), list.by_slot = memory.take<int>(all);
            list.asked = list.own = list.wanted;  // a single owner needs only one list
            auto ids = [&] { return memory.take<uint64_t>(asked_); };
            auto ints = [&] { return memory.take<int>(asked_); };
            if (several) list.asked = ids(), list.own = ids(), list.rows = ints(), list.order = ints();
            if (on_host) list.fetched = ids(), list.place = ints(), list.turn = ints();
            if (on_disk) list.fetched_slots = ids(), list.own_slots = ids();
        }
        for (uint64_t*& set : sets)
            set = memory.take_pages<uint64_t>(training ? RowSet::words_of(own_rows) : 0);
        for (places = 1; places < 2 * std::max(all, asked_);) places *= 2;
        host_counts = memory.take<int>(several ? 2 * s.owners : 0);
        known = memory.take<uint64_t>(places), known_at = memory.take<int>(places);
        if (on_host) {
            host_answers = memory.take_elements(n * asked_ * W);
            host_sums = memory.take<float>(training ? n * asked_ * W : 0);
            host_scale = memory.take<float>(training ? lists.size() : 0);
        }
        if (settings.staging) {
            memory.of("staging for checkpoints", true);
            // pinned, because training waits for the copies from the device
            for (size_t i = 0; i < n && !on_host; i++)
                staged.push_back({memory.take<char>(here * s.row_bytes()), memory.take<float>(here)});
            copied_rows = on_host ? std::max(here / 8, std::min(here, least_copied)) : 0;
            copies = memory.take_pages<char>(copied_rows * s.record_bytes());
        }
    }
};
