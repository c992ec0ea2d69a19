/*
Context parallelism: the ranks of a context group have different tokens of the same sequences
(kernels/context_cut.h). Attention looks at the tokens of other ranks. Its keys and values are gathered
over the group, as in Llama 3 (Dubey et al., 2024), and dropped after use; the backward pass gathers them
again.

    forward      keys and values of own rows  ->  of all ranks             all-gather, while queries are made
                 attention of each of the two pieces, which sees the keys before its end
    backward     the same gather, during the backward pass of the product after attention
                 gradients of all keys and values, in float  ->  of own    reduce-scatter, during the backward
                 pass of the product that makes queries

A query sees the same keys in the same tiles as without context ranks, so the outputs are the same bits. All
sums have a fixed order.

A convolution over tokens looks back, too: it gets what it needs of the token before each piece, and its
backward pass the gradient of the token after.
*/
#pragma once

#include "comm/collectives.h"       // Communicator
#include "comm/recorder.h"          // TraceSpan
#include "comm/stage.h"             // Dims
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

    // Starts to gather the own keys and values, rows (own rows, 2*NKV*HS), into by_rank (ranks, own rows,
    // 2*NKV*HS). The compute stream may do other work until end_gather(), but may not write by_rank.
    void start_gather(floatX* by_rank, const floatX* own, const Dims& d) const {
        copy_async(by_rank + cut_.rank * part(d), own, part(d), compute_);
        order_.order(compute_, sends_);
        group_.all_gather(by_rank, part(d), Traffic::activations, sends_);
    }
    // Writes the own queries, rows (own rows, NH*HS), and all keys and values to heads
    // (attention_shape_apart).
    void end_gather(floatX* heads, const floatX* by_rank, const floatX* queries, const Dims& d) const {
        copy_async(heads, queries, (size_t)d.N * d.A, compute_);
        await();
        order_by_position(heads + (size_t)d.N * d.A, by_rank, rows(d), compute_);
    }

    // Adds the gradients that the queries of a piece have for keys and values to dkeys (ranks, own rows,
    // 2*NKV*HS). is_first: overwrites instead
    void add_gradients(float* dkeys, const floatX* dheads, const AttentionShape& piece, bool is_first,
                       const Dims& d) const {
        add_by_rank(dkeys, dheads + (size_t)d.N * d.A, rows(d), piece.keys_end(), is_first, compute_);
    }
    // Starts to sum the gradients over the ranks.
    void start_scatter(float* dkeys, const Dims& d) const {
        order_.order(compute_, sends_);
        group_.reduce_scatter(dkeys, part(d), Traffic::activations, sends_);
    }
    // Writes the sums for own rows to `own` (own rows, 2*NKV*HS).
    void end_scatter(floatX* own, const float* dkeys, const Dims& d) const {
        await();
        convert(own, dkeys + cut_.rank * part(d), part(d), compute_);
    }

    // For a causal convolution whose rows are those of pieces: writes the first taps of the row before each
    // piece (sequences, 2, C) to halo, which has room for (ranks + 1) times as much. products (N, 2, C)
    void taps_before(floatX* halo, const floatX* products, const ConvRows& rows, int C) const {
        const floatX* last = products + (size_t)(rows.T - 1) * 2 * C;
        move_ends(halo, last, (size_t)rows.T * 2 * C, rows.N / rows.T / 2, C, -1);
    }
    // Writes the gradient of the row after each piece. dout (N, C)
    void gradient_after(floatX* halo, const floatX* dout, const ConvRows& rows, int C) const {
        move_ends(halo, dout, (size_t)rows.T * C, rows.N / rows.T / 2, C, +1);
    }

private:
    // Gathers a row of each piece of all ranks, `stride` elements apart in `ends`, and copies those of the
    // pieces before (-1) or after (+1) the own ones.
    void move_ends(floatX* halo, const floatX* ends, size_t stride, int B, int C, int direction) const {
        size_t part = (size_t)B * 2 * C;
        floatX* all = halo + part;
        copy_columns(all + cut_.rank * part, C, ends, stride, C, (size_t)B * 2, compute_);
        order_.order(compute_, sends_);
        group_.all_gather(all, part, Traffic::activations, sends_);
        await();
        for (int piece : {0, 1}) {
            int other = (piece ? 2 * ranks() - 1 - cut_.rank : cut_.rank) + direction,
                at = other * cut_.piece();
            if (at < 0 || at >= cut_.T) continue;  // the sequence begins or ends here
            const floatX* from = all + cut_.owner(at) * part + (cut_.index(at) > 0 ? C : 0);
            copy_columns(halo + (size_t)piece * C, 2 * C, from, 2 * C, C, B, compute_);
        }
    }

    static size_t part(const Dims& d) { return (size_t)d.N * (d.QKV - d.A); }  // keys and values of own rows
    ContextRows rows(const Dims& d) const { return {cut_, d.B, d.QKV - d.A}; }
    // Makes the compute stream wait for the last message.
    void await() const {
        if (sends_ == compute_) return;
        TraceSpan wait(Traffic::activations, compute_);
        order_.order(sends_, compute_);
    }

    const ContextCut cut_;
    const Communicator group_;
    cudaStream_t compute_, sends_;  // one stream without overlap
    Event order_;
};
