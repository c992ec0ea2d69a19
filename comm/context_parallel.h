/*
Context parallelism: the ranks of a context group have different tokens of the same sequences
(kernels/context_cut.h). Attention also looks at the tokens of other ranks. Its keys and values are gathered
over the group, as in Llama 3 (Dubey et al., 2024), and dropped after use; the backward pass gathers them
again.

    forward      keys and values of own rows  ->  of all ranks             all-gather, as queries are computed
                 attention of each of the two pieces, which sees the keys before its end
    backward     the same gather, during the backward pass of the product after attention
                 gradients of all keys and values, in float  ->  of own    reduce-scatter, during the backward
                 pass of the query product

If sequences are long, heads are sent in parts. Attention over one part needs no other part, so all parts but
the first are gathered, and the gradients of all but the last are summed, while attention is computed.

If attention has a sliding window, ranks send each other only the pieces that queries see, provided that these
are at most half of all.

A query sees the same keys in the same tiles as without context ranks, so the outputs are bit-identical. All
sums have a fixed order.

A convolution over tokens looks back, too: for each piece it receives what it needs of the token before it
and, in the backward pass, the gradient of the token after it.
*/
#pragma once

#include <algorithm>
#include <vector>

#include "comm/collectives.h"  // Communicator
#include "comm/recorder.h"     // TraceSpan
#include "comm/stage.h"        // Dims
#include "kernels/accumulate.cuh"
#include "kernels/causal_conv.cuh"  // ConvRows
#include "kernels/context_rows.cuh"
#include "kernels/matrix_part.cuh"  // convert

class ContextParallel {
public:
    // For all ranks of the group. T: tokens of a whole sequence
    ContextParallel(const Communicator& group, int T, bool overlap, cudaStream_t compute)
        : cut_{group.size(), group.rank(), T}, group_(group), compute_(compute), sends_(compute) {
        if (overlap && ranks() > 1) sends_ = new_communication_stream("context");
    }
    ~ContextParallel() {
        if (sends_ != compute_) end_stream(sends_);
    }
    ContextParallel(const ContextParallel&) = delete;
    ContextParallel& operator=(const ContextParallel&) = delete;

    int ranks() const { return cut_.ranks; }
    const ContextCut& cut() const { return cut_; }

    // parts: the number of parts of the heads. W: elements of a row's keys and values in one part
    int parts(const Dims& d) const { return head_parts(d, cut_); }
    size_t W(const Dims& d) const { return (size_t)(d.QKV - d.A) / parts(d); }

    // Zeroes by_rank: keys that no query sees are still multiplied by zero, so they must be finite, even if
    // they never arrive.
    void clear(floatX* by_rank, const Dims& d) const { zero_async(by_rank, of_part(parts(d), d), compute_); }

    // Starts to gather keys and values into by_rank (parts, ranks, own rows, W): at least those that queries
    // see through the window. own (own rows, 2*NKV*HS). The compute stream may do other work until the last
    // end_gather(), but may not write by_rank.
    void start_gather(floatX* by_rank, const floatX* own, const Dims& d, int window) const {
        for (int part = 0; part < parts(d); part++)
            copy_columns(by_rank + own_rows(part, d), W(d) / 2, own + part * W(d) / 2, d.NKV * d.HS, W(d) / 2,
                         2 * d.N, compute_);
        order_.order(compute_, sends_);
        for (int part = 0; part < parts(d); part++) {
            floatX* all = by_rank + of_part(part, d);
            if (sends_pieces(window)) {
                grouped({group_}, [&] {
                    each_message(window, [&](int piece, int reader) {
                        send_piece(all, piece, piece, cut_.owner_of(piece), reader, d);
                    });
                });
            } else {
                group_.all_gather(all, own_size(d), kind, sends_);
            }
            arrived_[part].record(sends_);
        }
    }
    // Writes a part of all keys and values to `keys` (B, T, W).
    void end_gather(floatX* keys, const floatX* by_rank, int part, const Dims& d) const {
        await(arrived_[part]);
        order_by_position(keys, by_rank + of_part(part, d), rows(d), compute_);
    }

    // Adds dkeys (B, T, W) to by_rank (parts, ranks, own rows, W): the gradients of a part of the keys and
    // values before the end of a piece, from the queries of that piece. is_first: overwrites instead
    void add_gradients(float* by_rank, const floatX* dkeys, const AttentionShape& piece, bool is_first,
                       int part, const Dims& d) const {
        add_by_rank(by_rank + of_part(part, d), dkeys, rows(d), piece.keys_end(), is_first, compute_);
    }
    // Starts to sum the gradients of a part over the ranks. If pieces are sent singly, they arrive in the
    // places of pieces that this rank neither has nor reads.
    void start_scatter(float* by_rank, int part, const Dims& d, int window) const {
        order_.order(compute_, sends_);
        float* all = by_rank + of_part(part, d);
        if (!sends_pieces(window)) return group_.reduce_scatter(all, own_size(d), kind, sends_);
        std::vector<int> places = unused_pieces(window);
        grouped({group_}, [&] {
            each_message(window, [&](int piece, int reader) {
                int place = cut_.owner_of(piece) == cut_.rank ? places.back() : piece;
                if (cut_.owner_of(piece) == cut_.rank) places.pop_back();
                send_piece(all, piece, place, reader, cut_.owner_of(piece), d);
            });
        });
    }
    // Writes the sums for own rows to `own` (own rows, 2*NKV*HS). room (own rows, W) is overwritten.
    void end_scatter(floatX* own, float* by_rank, floatX* room, const Dims& d, int window) const {
        await();
        for (int part = 0; part < parts(d); part++) {
            if (sends_pieces(window)) add_received(by_rank + of_part(part, d), d, window);
            convert(parts(d) > 1 ? room : own, by_rank + own_rows(part, d), own_size(d), compute_);
            if (parts(d) == 1) return;
            copy_columns(own + part * W(d) / 2, d.NKV * d.HS, room, W(d) / 2, W(d) / 2, 2 * d.N, compute_);
        }
    }

    // For a causal convolution over the rows of pieces: writes the first taps of the row before each piece to
    // halo (sequences, 2, C), which has room for (ranks + 1) times as much. products (N, 2, C)
    void taps_before(floatX* halo, const floatX* products, const ConvRows& rows, int C) const {
        const floatX* last = products + (size_t)(rows.T - 1) * 2 * C;
        move_ends(halo, last, (size_t)rows.T * 2 * C, rows.N / rows.T / 2, C, -1);
    }
    // Writes the gradient of the row after each piece. dout (N, C)
    void gradient_after(floatX* halo, const floatX* dout, const ConvRows& rows, int C) const {
        move_ends(halo, dout, (size_t)rows.T * C, rows.N / rows.T / 2, C, +1);
    }

private:
    static constexpr auto kind = Traffic::activations;

    // ---- single pieces
    //
    // Through a window, queries see only the keys of their own piece and of some before it. If these are at
    // most half of all, pieces are sent only to the ranks that read them, instead of all pieces to all ranks.

    // The number of pieces before its own that a query sees. A window of 1 is the query's own key.
    int reach(int window) const { return ceil_div(window - 1, cut_.piece()); }
    bool sends_pieces(int window) const { return window > 0 && 2 * reach(window) <= ranks() - 1; }

    // Calls visit(piece, reader) for each rank that reads a piece of another rank, in the same order on all
    // ranks.
    template <typename Visit>
    void each_message(int window, Visit&& visit) const {
        for (int piece = 0; piece < cut_.pieces(); piece++) {
            std::vector<bool> has((size_t)ranks());
            has[cut_.owner_of(piece)] = true;
            for (int by = piece + 1; by <= std::min(piece + reach(window), cut_.pieces() - 1); by++) {
                int reader = cut_.owner_of(by);
                if (!has[reader]) visit(piece, reader);
                has[reader] = true;
            }
        }
    }
    // Returns the pieces that this rank neither has nor reads.
    std::vector<int> unused_pieces(int window) const {
        std::vector<bool> used((size_t)cut_.pieces());
        for (int piece = 0; piece < cut_.pieces(); piece++) used[piece] = cut_.owner_of(piece) == cut_.rank;
        each_message(window, [&](int piece, int reader) {
            if (reader == cut_.rank) used[piece] = true;
        });
        std::vector<int> unused;
        for (int piece = 0; piece < cut_.pieces(); piece++)
            if (!used[piece]) unused.push_back(piece);
        return unused;
    }
    // Offset of a piece of sequence `b` in an array by rank, and the number of its elements.
    size_t at(int piece, int b, const Dims& d) const {
        return own_size(d) * cut_.owner_of(piece) +
               ((size_t)b * cut_.own() + cut_.index(piece * cut_.piece())) * W(d);
    }
    size_t piece_size(const Dims& d) const { return cut_.piece() * W(d); }

    // Sends a piece of all sequences to the place of another piece, or receives it, if this rank is its
    // sender or receiver.
    template <typename T>
    void send_piece(T* by_rank, int piece, int place, int sender, int receiver, const Dims& d) const {
        for (int b = 0; b < d.B; b++) {
            if (sender == cut_.rank)
                group_.send(by_rank + at(piece, b, d), piece_size(d), receiver, kind, sends_);
            if (receiver == cut_.rank)
                group_.receive(by_rank + at(place, b, d), piece_size(d), sender, sends_, kind);
        }
    }

    // Adds the gradients received for this rank's pieces, in the order of start_scatter(), to its own
    // gradients of them.
    void add_received(float* by_rank, const Dims& d, int window) const {
        std::vector<int> places = unused_pieces(window);
        each_message(window, [&](int piece, int) {
            if (cut_.owner_of(piece) != cut_.rank) return;
            for (int b = 0; b < d.B; b++)
                accumulate(by_rank + at(piece, b, d), by_rank + at(places.back(), b, d), piece_size(d),
                           compute_);
            places.pop_back();
        });
    }

    // ---- rows next to pieces

    // Gathers one row of each piece from all ranks (the rows of `ends` are `stride` elements apart), and
    // copies to halo the rows of the pieces before (-1) or after (+1) this rank's own.
    void move_ends(floatX* halo, const floatX* ends, size_t stride, int B, int C, int direction) const {
        size_t part = (size_t)B * 2 * C;
        floatX* all = halo + part;
        copy_columns(all + cut_.rank * part, C, ends, stride, C, (size_t)B * 2, compute_);
        order_.order(compute_, sends_);
        group_.all_gather(all, part, kind, sends_);
        await();
        for (int piece : {0, 1}) {
            int other = cut_.number(cut_.rank, piece) + direction;
            if (other < 0 || other == cut_.pieces()) continue;  // the sequence begins or ends here
            const floatX* from = all + cut_.owner_of(other) * part + (other < ranks() ? 0 : C);
            copy_columns(halo + (size_t)piece * C, 2 * C, from, 2 * C, C, B, compute_);
        }
    }

    // Elements of own rows in a part, and offsets of a part and of its own rows in an array by rank.
    size_t own_size(const Dims& d) const { return d.N * W(d); }
    size_t of_part(int part, const Dims& d) const { return (size_t)part * ranks() * own_size(d); }
    size_t own_rows(int part, const Dims& d) const { return of_part(part, d) + cut_.rank * own_size(d); }
    ContextRows rows(const Dims& d) const { return {cut_, d.B, (int)W(d)}; }
    // Makes the compute stream wait for an event between messages, or for the last message.
    void await(const Event& arrived) const {
        if (sends_ == compute_) return;
        TraceSpan wait(kind, compute_);
        arrived.hold(compute_);
    }
    void await() const {
        order_.record(sends_);
        await(order_);
    }

    const ContextCut cut_;
    const Communicator group_;
    cudaStream_t compute_, sends_;  // equal without overlap
    Event order_, arrived_[most_head_parts];
};
