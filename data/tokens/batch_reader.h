/*
Micro-batches in host memory. While the device works on a batch, the next one is read: the one that the caller
named, or else the one a fixed stride later. So a step waits for the disk only if reading is slower than
computing. Reading ahead is only a guess: any batch can be requested, and it is the same whether or not it was
guessed.

BatchReader reads in the background. Another reader (comm/batches.h) is a BatchSource as well: a subclass
defines how one batch is read, and BatchSource decides what is read ahead, and when.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/base/background.h"
#include "data/base/error.h"
#include "data/tokens/ngrams.h"  // NgramTokens
#include "data/tokens/token_loader.h"
#include "kernels/context_cut.h"  // ContextCut
#include "kernels/row_order.h"    // sort_by_token, sort_by_position

// The arrays of a batch of B rows of T tokens, on the host or the device. A context rank has `own` tokens of
// each row, and everything that it must know about the others. N = B*own.
template <typename Int>
struct BatchArrays {
    Int* tokens = nullptr;       // (B, own)
    Int* targets = nullptr;      // (B, own) -1: none
    Int* doc_start = nullptr;    // (B, T) start of each token's document in its row; null: one per row
    Int* positions = nullptr;    // (B, own) rows of the table that embeds or rotates tokens
    Int* by_token = nullptr;     // (N) indices sorted by token
    Int* by_position = nullptr;  // (N) indices sorted by position
    Int* all_tokens = nullptr;   // (B, T) of all context ranks; equals `tokens` if there is only one
};

using HostBatch = BatchArrays<const int>;

// Returns the number of ints in a batch. Its arrays are contiguous, in the order of BatchArrays, so that one
// copy moves all of them.
inline size_t batch_ints(int B, int T, int contexts = 1) {
    size_t all = (size_t)B * (size_t)T, N = all / (size_t)contexts;
    return 5 * N + all + (contexts > 1 ? all : 0);
}

template <typename Int>
BatchArrays<Int> batch_at(Int* memory, int B, int T, int contexts = 1) {
    size_t all = (size_t)B * (size_t)T, N = all / (size_t)contexts;
    Int* behind = memory + 2 * N + all;
    return {memory,
            memory + N,
            memory + 2 * N,
            behind,
            behind + N,
            behind + 2 * N,
            contexts > 1 ? behind + 3 * N : memory};
}

// The properties that all batches of a run share.
struct BatchShape {
    int B, T;
    int document_end;               // the token that ends a document; -1: a row is one document
    bool reset_positions;           // positions count from the beginning of the document, not of the row
    int contexts = 1, context = 0;  // context ranks, and which of them this is

    ContextCut cut(int of_rank) const { return {contexts, of_rank, T}; }
    size_t ints() const { return batch_ints(B, T, contexts); }
};

// The arrays of a batch that read_batch() has written.
inline HostBatch host_batch(const int* memory, const BatchShape& shape) {
    HostBatch batch = batch_at(memory, shape.B, shape.T, shape.contexts);
    if (shape.document_end < 0) batch.doc_start = nullptr;
    return batch;
}

// Returns the rows of a batch, for lookups of the rank's own tokens in n-gram tables. They hold all tokens,
// because an n-gram may begin with tokens of another rank.
inline std::vector<NgramTokens> rows_of(const HostBatch& batch, int B, const ContextCut& cut) {
    std::vector<NgramTokens> rows;
    for (int row = 0; row < B; row++) {
        size_t at = (size_t)row * (size_t)cut.T;
        NgramTokens all = {batch.all_tokens + at, cut.T, 0, batch.doc_start ? batch.doc_start + at : nullptr};
        if (cut.ranks == 1) rows.push_back(all);
        for (int piece = 0; piece < 2 && cut.ranks > 1; piece++) {
            all.first = cut.position(piece * cut.piece()), all.count = cut.piece();
            rows.push_back(all);
        }
    }
    return rows;
}
inline std::vector<NgramTokens> rows_of(const HostBatch& batch, int B, int T) {
    return rows_of(batch, B, {.T = T});
}

// Samples first .. first+count-1 of the run, padded to B rows by rows without targets; only the tokens of one
// context rank.
struct BatchRequest {
    uint64_t first;
    int count, context = 0;
    bool operator==(const BatchRequest&) const = default;
};

// Writes a context rank's part of a batch: shape.ints() ints. whole: the batch of all ranks; its doc_start
// and its sorted lists may be null
inline void cut_batch(const BatchShape& shape, int context, const HostBatch& whole, int* memory) {
    const ContextCut cut = shape.cut(context);
    const int own = cut.own();
    const size_t all = (size_t)shape.B * (size_t)shape.T;
    BatchArrays<int> batch = batch_at(memory, shape.B, shape.T, shape.contexts);
    std::copy_n(whole.tokens, all, batch.all_tokens);
    whole.doc_start ? std::copy_n(whole.doc_start, all, batch.doc_start)
                    : std::fill_n(batch.doc_start, all, 0);
    for (int row = 0; row < shape.B; row++) {
        for (int t = 0; t < own; t++) {
            size_t to = (size_t)(row * own + t),
                   from = (size_t)row * (size_t)shape.T + (size_t)cut.position(t);
            batch.tokens[to] = whole.tokens[from], batch.targets[to] = whole.targets[from];
            batch.positions[to] = whole.positions[from];
        }
    }
    sort_by_token(batch.by_token, batch.tokens, shape.B * own);
    sort_by_position(batch.by_position, batch.positions, shape.B * own);
}

// Writes shape.ints() ints. Calls load(row, tokens, targets) for each of the first `count` rows. Targets and
// document starts are computed for whole rows, which are divided among the context ranks last.
template <typename Load>
void write_batch(const BatchShape& shape, const BatchRequest& request, int* memory, Load&& load) {
    std::vector<int> whole(shape.contexts > 1 ? batch_ints(shape.B, shape.T) : 0);
    BatchArrays<int> batch = batch_at(whole.empty() ? memory : whole.data(), shape.B, shape.T);
    for (int row = 0; row < shape.B; row++) {
        size_t at = (size_t)row * (size_t)shape.T;
        if (row < request.count) {
            load(row, batch.tokens + at, batch.targets + at);
        } else {
            std::fill_n(batch.tokens + at, shape.T, 0);
            std::fill_n(batch.targets + at, shape.T, -1);
        }
        for (int t = 0, start = 0; t < shape.T; t++) {
            batch.doc_start[at + (size_t)t] = start;
            batch.positions[at + (size_t)t] = shape.reset_positions ? t - start : t;
            if (batch.tokens[at + (size_t)t] == shape.document_end) start = t + 1;
        }
    }
    if (!whole.empty()) {
        const int* data = whole.data();
        return cut_batch(shape, request.context, batch_at(data, shape.B, shape.T), memory);
    }
    sort_by_token(batch.by_token, batch.tokens, shape.B * shape.T);
    sort_by_position(batch.by_position, batch.positions, shape.B * shape.T);
}

inline void read_batch(const TokenLoader& loader, const BatchShape& shape, BatchRequest request,
                       int* memory) {
    write_batch(shape, request, memory, [&](int row, int* tokens, int* targets) {
        loader.load(request.first + (uint64_t)row, tokens, targets);
    });
}

// Returns how many keys the queries of each context rank see in a batch, ignoring windows. The numbers differ
// because of documents.
inline std::vector<double> keys_seen(const HostBatch& batch, const BatchShape& shape) {
    std::vector<double> seen((size_t)shape.contexts);
    const ContextCut cut = shape.cut(0);
    for (int row = 0; row < shape.B; row++) {
        const int* doc_start = batch.doc_start ? batch.doc_start + (size_t)row * (size_t)shape.T : nullptr;
        for (int piece = 0; piece < cut.pieces(); piece++)
            for (int t = piece * cut.piece(); t < (piece + 1) * cut.piece(); t++)
                seen[(size_t)cut.owner_of(piece)] += t + 1 - (doc_start ? doc_start[t] : 0);
    }
    return seen;
}

// Writes a batch without samples.
inline void write_empty_batch(const BatchShape& shape, int* memory) {
    write_batch(shape, {0, 0, shape.context}, memory, [](int, int*, int*) {});
}

// Reads a batch in a thread that must not throw: stores the failure in `error`, or clears it.
inline void try_read_batch(const TokenLoader& loader, const BatchShape& shape, BatchRequest request,
                           int* memory, NotedError& error) {
    try {
        error = {};
        read_batch(loader, shape, request, memory);
    } catch (const std::exception& problem) {
        error = {exit_code_of(problem), message_of(problem)};
    }
}

class BatchSource {
public:
    virtual ~BatchSource() = default;
    const BatchShape& shape() const { return shape_; }
    // Number of memory blocks: one is filled while the other is used.
    static constexpr int blocks = 2;
    BatchSource(const BatchSource&) = delete;
    BatchSource& operator=(const BatchSource&) = delete;

    // Returns samples first .. first+B-1 of the run; rows from `count` on have no targets and token 0. The
    // batch is valid until the next call. It was read ahead if count is B and the last call gave `first` as
    // next_first, which defaults to its own `first` plus the stride. Throws Error if the samples cannot be
    // read; any batch can be requested afterwards, and one of 0 rows reads nothing.
    const HostBatch& load(uint64_t first, int count, std::optional<uint64_t> next_first = {}) {
        BatchRequest wanted = {first, count, shape_.context},
                     next = {next_first.value_or(first + stride_), shape_.B, shape_.context};
        int back = 1 - front_;
        if (!(reading_ && ahead_ == wanted)) {
            if (reading_) skip();
            start(back, wanted);
        }
        reading_ = false;
        try {
            finish();
        } catch (const Error&) {
            read_ahead(back, next);
            throw;
        }
        front_ = back;
        batch_ = host_batch(block(front_), shape_);
        read_ahead(1 - front_, next);
        return batch_;
    }

protected:
    BatchSource(const BatchShape& shape, uint64_t stride) : shape_(shape), stride_(stride) {}

    virtual const int* block(int number) const = 0;
    // Starts reading into a block. Only one batch is read at a time.
    virtual void start(int block, BatchRequest request) = 0;
    // Waits for the read to end. Throws Error if the batch could not be read.
    virtual void finish() = 0;

    const BatchShape shape_;

private:
    void read_ahead(int block, BatchRequest next) {
        start(block, next);
        ahead_ = next;
        reading_ = true;
    }

    // Discards what was read ahead, and any error in reading it.
    void skip() {
        try {
            finish();
        } catch (const Error&) {
        }
    }

    const uint64_t stride_;
    int front_ = 0;         // the block that the caller uses
    bool reading_ = false;  // ahead_ is being read into the other block
    BatchRequest ahead_ = {};
    HostBatch batch_;
};

class BatchReader final : public BatchSource {
public:
    // The loader must outlive the reader.
    BatchReader(const TokenLoader& loader, const BatchShape& shape, uint64_t stride)
        : BatchSource(shape, stride), loader_(loader) {
        for (std::vector<int>& block : blocks_) block.resize(shape.ints());
    }

protected:
    const int* block(int number) const override { return blocks_[(size_t)number].data(); }

    void start(int block, BatchRequest request) override {
        reading_.start([this, request, into = blocks_[(size_t)block].data()] {
            try_read_batch(loader_, shape_, request, into, error_);
        });
    }

    void finish() override {
        reading_.finish();
        error_.raise();
    }

private:
    const TokenLoader& loader_;
    std::array<std::vector<int>, 2> blocks_;
    NotedError error_;
    Background reading_;  // destroyed first, because it writes the members above
};
