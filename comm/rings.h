/*
Ring algorithms. n ranks form a ring; each receives from the previous one and sends to the next, so all links
are always busy. A buffer of n chunks is summed in n - 1 steps, and the sums are passed on to all ranks in
n - 1 more. Rank 0 of four in an all-reduce:

    step    sends           receives    which makes
    0       its chunk 0     chunk 3     3 + own
    1       that sum        chunk 2     2 + own
    2       that sum        chunk 1     1 + own: the whole sum of chunk 1, of ranks 1, 2, 3, 0
    3       chunk 1         chunk 0     (sums pass unchanged from here)
    4       chunk 0         chunk 3
    5       chunk 3         chunk 2

Each step moves 1/n of the buffer, so a rank sends (n - 1)/n of it in each half, the minimum for any number of
ranks. Each element is summed by one rank at a time in ring order, so the bits are the same in every run and
on every rank.

The first half by itself is a reduce-scatter (started one chunk earlier, so that each rank ends with its own
chunk), and the second half by itself an all-gather.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

#include "comm/messages.h"     // MessageFlow, Piece
#include "kernels/common.cuh"  // ceil_div

constexpr size_t largest_message = size_t(1) << 19;  // bytes; at most half of a core's L2 cache

// Returns the beginning of chunk c of `count` elements that are cut into `chunks` chunks: it has elements
// [chunk_begin(c), chunk_begin(c + 1)). If the cut is uneven, the first chunks have one more element.
constexpr size_t chunk_begin(size_t count, size_t chunks, size_t c) {
    return count / chunks * c + std::min(count % chunks, c);
}

enum class RingPass { reduce_scatter, all_gather, all_reduce };

struct RingBuffers {
    const char* input;  // all chunks (all_gather: not used)
    char* result;  // all chunks; reduce_scatter: only the own chunk; all_gather: holds the own chunk at first
    size_t count;  // elements of all chunks
    size_t element_bytes;
    void (*add)(char* out, const char* a, const char* b, size_t count);  // (all_gather: not used)
};

// Chunks are cut into blocks of a few pieces. Each block goes through all steps before the next one starts,
// so that it is still in the cache when it is sent on.
class RingFlow : public MessageFlow {
public:
    RingFlow(const MessageGroup& group, int tag, int rank, int ranks, RingPass pass,
             const RingBuffers& buffers)
        : MessageFlow(group, tag, (rank + 1) % ranks, (rank + ranks - 1) % ranks),
          buffers_(buffers),
          ranks_((size_t)ranks) {
        bool scatters = pass == RingPass::reduce_scatter;
        first_chunk_ = (size_t)(scatters ? rank + ranks - 1 : rank);
        result_begin_ = scatters ? chunk_begin(buffers.count, ranks_, (size_t)rank) : 0;
        adding_steps_ = pass == RingPass::all_gather ? 0 : ranks_ - 1;
        steps_ = adding_steps_ + (scatters ? 0 : ranks_ - 1);

        size_t largest_chunk = ceil_div(buffers.count, ranks_);
        pieces_ = std::max<size_t>(ceil_div(largest_chunk, largest_message / buffers.element_bytes), 1);
        block_ = std::min(pieces_, most_under_way);
        pieces_ = ceil_div(pieces_, block_) * block_;
        under_way = lead = block_;
        sends = receives = steps_ * pieces_;

        slot_bytes_ = ceil_div(largest_chunk, pieces_) * buffers.element_bytes;
        if (adding_steps_) slots_.reset(new char[2 * block_ * slot_bytes_]);
    }

private:
    struct Place {
        size_t step, begin, count;  // elements of the whole buffer
    };

    // Returns the step and elements of message `index`: in step s a rank sends the chunk that is s before its
    // first (behind = 0), and receives the one before that (behind = 1).
    Place place(size_t index, size_t behind) const {
        size_t step = index / block_ % steps_;
        size_t piece = index / (block_ * steps_) * block_ + index % block_;
        size_t chunk = (first_chunk_ + 2 * ranks_ - step - behind) % ranks_;
        size_t begin = chunk_begin(buffers_.count, ranks_, chunk);
        size_t size = chunk_begin(buffers_.count, ranks_, chunk + 1) - begin;
        size_t first = chunk_begin(size, pieces_, piece), last = chunk_begin(size, pieces_, piece + 1);
        return {step, begin + first, last - first};
    }
    Place sent_place(size_t index) const { return place(index, 0); }
    Place received_place(size_t index) const { return place(index, 1); }

    char* input(const Place& at) const {
        return const_cast<char*>(buffers_.input) + at.begin * buffers_.element_bytes;
    }
    char* result(const Place& at) const {
        return buffers_.result + (at.begin - result_begin_) * buffers_.element_bytes;
    }
    // The memory that receives message `index`, which is then added to the input. The sum is sent on as
    // message index + block_, and the memory is free for message index + 2 * block_.
    char* slot(size_t index) const { return slots_.get() + index % (2 * block_) * slot_bytes_; }

    Piece outgoing(size_t index) override {
        Place at = sent_place(index);
        char* data = at.step >= adding_steps_ ? result(at) : at.step == 0 ? input(at) : slot(index - block_);
        return {data, at.count * buffers_.element_bytes};
    }

    Piece incoming(size_t index) override {
        Place at = received_place(index);
        return {at.step < adding_steps_ ? slot(index) : result(at), at.count * buffers_.element_bytes};
    }

    void arrived(size_t index) override {
        Place at = received_place(index);
        if (at.step >= adding_steps_) return;
        bool whole = at.step + 1 == adding_steps_;
        buffers_.add(whole ? result(at) : slot(index), slot(index), input(at), at.count);
    }

    RingBuffers buffers_;
    size_t ranks_;
    size_t first_chunk_;   // the chunk that this rank sends in step 0
    size_t result_begin_;  // first element of `result` in the whole buffer
    size_t adding_steps_, steps_;
    size_t pieces_, block_;  // pieces in a chunk, and in a block
    size_t slot_bytes_;
    std::unique_ptr<char[]> slots_;
};

// Passes a buffer along a chain of ranks: receives from one (-1: none), and sends to another (-1: none). Each
// piece is forwarded as soon as it arrives, so a long chain takes hardly longer than a short one.
class ChainFlow : public MessageFlow {
public:
    ChainFlow(const MessageGroup& group, int tag, char* data, size_t bytes, int from, int to)
        : MessageFlow(group, tag, to, from), data_(data), bytes_(bytes) {
        size_t pieces = ceil_div(bytes, largest_message);
        sends = to < 0 ? 0 : pieces;
        receives = from < 0 ? 0 : pieces;
    }

private:
    Piece incoming(size_t index) override {
        size_t at = index * largest_message;
        return {data_ + at, std::min(largest_message, bytes_ - at)};
    }
    Piece outgoing(size_t index) override { return incoming(index); }

    char* data_;
    size_t bytes_;
};
