/*
Tensor parallelism (Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019) with the activations between matrix products split by rows as well, which is sequence
parallelism (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022). The
ranks of a tensor group share each matrix of a block. A pair of matrices needs no communication between its
two products:

    column-parallel   each rank computes a part of the outputs of all rows    gather rows, then multiply
    row-parallel      each rank computes partial sums from its inputs         multiply, then scatter sums

The operations between pairs (sums of the residual stream, norms) work row by row, and each rank does them
for its own rows. The backward pass is the mirror image: it gathers for a row-parallel matrix and scatters for
a column-parallel one. A matrix is stored as (OC, C), so a column-parallel one is cut between rows in memory;
the names refer to the transposed matrix, as in the papers.

The N rows are divided into chunks, each chunk is cut evenly over the ranks, and a rank's own rows are
contiguous in memory. 12 rows in 2 chunks over 3 ranks:

    row          0  1 |  2  3 |  4  5 ||  6  7 |  8  9 | 10 11
    rank           0  |   1   |   2   ||   0   |   1   |   2         own rows of rank 1:  2 3 8 9

While one chunk is being sent, the product works on another. Communication has its own stream for that;
without overlap it runs on the compute stream, with the same calls, so the results are bit-identical.

A rank keeps only its own rows of a column-parallel matrix's input. The weight's gradient needs all of them,
so the backward pass regathers them, overlapped with the weight gradient that precedes it.
*/
#pragma once

#include <vector>

#include "comm/collectives.h"       // Communicator
#include "comm/context_parallel.h"  // ContextParallel
#include "comm/recorder.h"          // TraceSpan
#include "comm/mesh.h"              // Mesh
#include "data/base/error.h"
#include "kernels/accumulate.cuh"   // accumulate
#include "kernels/fp8_matmul.cuh"   // BlockProducts
#include "kernels/gelu.cuh"         // Gelu
#include "kernels/causal_conv.cuh"  // causal_conv_forward, causal_conv_backward

// ----------------------------------------------------------------------------
// rows between products

class SequenceParallel {
public:
    // A group of one rank: nothing is cut or sent.
    SequenceParallel() = default;

    // For all ranks of the group.
    SequenceParallel(const Communicator& group, int chunks, bool overlap, cudaStream_t compute)
        : group_(group), compute_(compute), sends_(compute) {
        if (chunks < 1) fail("sequence parallel: %d chunks; there must be at least 1", chunks);
        if (ranks() == 1) return;
        chunks_ = chunks;
        if (!overlap) return;
        sends_ = new_communication_stream("tensor");
        events_.resize((size_t)chunks + 3);
    }

    ~SequenceParallel() {
        if (overlaps()) end_stream(sends_);
    }

    SequenceParallel(const SequenceParallel&) = delete;
    SequenceParallel& operator=(const SequenceParallel&) = delete;

    int ranks() const { return group_.size(); }
    int rank() const { return group_.rank(); }
    int chunks() const { return chunks_; }

    // Returns the number of a rank's own rows among `rows`. Fails if `rows` cannot be divided evenly.
    int own_rows(int rows) const {
        if (rows % ranks()) {
            fail("sequence parallel: %d rows cannot be split evenly over %d ranks; choose another "
                 "--micro-batch or another --sequence-length",
                 rows, ranks());
        }
        return rows / ranks();
    }

    // Gathers every rank's own rows into `all` (rows, width), chunk by chunk. work(first, count) puts the
    // work that reads rows [first, first + count) of `all` on the compute stream, while the next chunks are
    // being sent. `own` (own rows, width) must not change before all work is on that stream. In a group of
    // one, own is all, and the only call is work(0, rows).
    template <typename Work>
    void gather(const floatX* own, floatX* all, int rows, int width, Work&& work) {
        if (ranks() == 1) return work_alone(own, all, rows, work);
        int chunks = chunks_of(rows), count = rows / chunks;
        send_rows(own, all, rows, width, [&](int chunk) { record(sends_, 1 + chunk); });
        for (int chunk = 0; chunk < chunks; chunk++) {
            await(1 + chunk);
            work(chunk * count, count);
        }
    }

    // Starts the same gather, to overlap it with other work. The caller calls wait_for_gathered() before it
    // puts work that reads `all` on the compute stream, and before the next start_gather(). Scatters may come
    // in between.
    void start_gather(const floatX* own, floatX* all, int rows, int width) {
        if (ranks() == 1) return work_alone(own, all, rows, [](int, int) {});
        send_rows(own, all, rows, width, [](int) {});
        record(sends_, gathered());
    }
    void wait_for_gathered() { await(gathered()); }

    // Sums `all` (rows, width) over the ranks, and scatters the sums: `own` (own rows, width) receives this
    // rank's rows. work(first, count) puts the work that writes rows [first, first + count) of `all` on the
    // compute stream, while the previous chunk is being sent. The compute stream can continue with other
    // work, but may read or write `own`, and write `all`, only after wait(). In a group of one, own is all,
    // and the only call is work(0, rows).
    template <typename Work>
    void scatter(floatX* own, floatX* all, int rows, int width, Work&& work) {
        if (ranks() == 1) return work_alone(own, all, rows, work);
        int chunks = chunks_of(rows), count = rows / chunks;
        size_t part = (size_t)(own_rows(rows) / chunks) * (size_t)width;
        wait();
        for (int chunk = 0; chunk < chunks; chunk++) {
            work(chunk * count, count);
            send_after_work();
            group_.reduce_scatter((const floatX*)all + chunk * part * ranks(), own + chunk * part, part,
                                  Traffic::activations, sends_);
        }
        record(sends_, scattered());
    }

    // These two do not overlap with other work; the next work on the compute stream sees the result.
    void gather(const floatX* own, floatX* all, int rows, int width) {
        gather(own, all, rows, width, [](int, int) {});
    }
    void scatter(floatX* own, floatX* all, int rows, int width) {
        scatter(own, all, rows, width, [](int, int) {});
        wait();
    }

    // All-gathers data (ranks * part), to which each rank contributes its part.
    template <typename T>
    void exchange(T* data, size_t part) {
        send_after_work();
        group_.all_gather(data, part, Traffic::statistics, sends_);
        record(sends_, scattered());
        wait();
    }

    // Makes the compute stream wait for the last scatter. The next gather or scatter does so too.
    void wait() { await(scattered()); }

private:
    bool overlaps() const { return sends_ != compute_; }

    // Rows that cannot be cut into chunks_ chunks, such as those of a short text, are sent as one chunk.
    int chunks_of(int rows) const { return rows % (ranks() * chunks_) ? 1 : chunks_; }

    template <typename Work>
    static void work_alone(const floatX* own, const floatX* all, int rows, Work&& work) {
        if (own != all) fail("sequence parallel: in a group of one, a rank's own rows are all rows");
        work(0, rows);
    }

    // Calls sent(chunk) once the chunk's communication is on its stream.
    template <typename Sent>
    void send_rows(const floatX* own, floatX* all, int rows, int width, Sent&& sent) {
        int chunks = chunks_of(rows);
        size_t part = (size_t)(own_rows(rows) / chunks) * (size_t)width;
        send_after_work();
        for (int chunk = 0; chunk < chunks; chunk++) {
            group_.all_gather(own + chunk * part, all + chunk * part * ranks(), part, Traffic::activations,
                              sends_);
            sent(chunk);
        }
    }

    // Events: 0 marks the compute work that communication must wait for; then one per chunk, one for the last
    // scatter and one for the last start_gather(). Without overlap a single stream orders everything.
    size_t scattered() const { return (size_t)chunks_ + 1; }
    size_t gathered() const { return (size_t)chunks_ + 2; }
    void record(cudaStream_t stream, size_t event) {
        if (overlaps()) events_[event].record(stream);
    }
    // Makes the compute stream wait for communication.
    void await(size_t event) {
        if (!overlaps()) return;
        TraceSpan wait(Traffic::activations, compute_);
        events_[event].hold(compute_);
    }

    // Orders later sends after all work that is now on the compute stream.
    void send_after_work() {
        record(compute_, 0);
        if (overlaps()) events_[0].hold(sends_);
    }

    Communicator group_;
    int chunks_ = 1;
    cudaStream_t compute_ = nullptr, sends_ = nullptr;  // equal without overlap
    std::vector<Event> events_;
};

// ----------------------------------------------------------------------------
// linear layers

enum class Parallel { column, row };

// A linear layer may be a causal convolution over each row and the row before it. Its weight (2, OC, C) holds
// the two taps; kernels/causal_conv.cuh has the formula.
struct CausalConv {
    floatX* products = nullptr;   // (N, 2, OC) of both taps; null: not a convolution
    floatX* dproducts = nullptr;  // (N, 2, OC) their gradient
    floatX* state = nullptr;      // (N / T, OC) the first taps of each sequence's newest token, or null
    ConvRows rows = {};
    // memory for the rows adjacent to this rank's pieces, if there are several context ranks
    const ContextParallel* contexts = nullptr;
    floatX* halo = nullptr;
};

struct LinearInput {
    floatX* all = nullptr;  // (N, C) all rows
    Fp8Operand fp8 = {};    // all rows in fp8
    // (own rows, C) column-parallel: rows that this rank has computed, to be gathered into `all`
    const floatX* own = nullptr;
    // All rows are still in `all` in the backward pass, so it need not regather them.
    bool in_place = true;
};

// Returns the input of a column-parallel layer. all: null in a group of one, where a rank's own rows are all
// rows
inline LinearInput gathered_input(floatX* own, floatX* all, const Fp8Operand& fp8, bool in_place) {
    return {all ? all : own, fp8, own, in_place || !all};
}

// This rank's part of a linear layer out (N, OC) = inp (N, C) weight^T + bias. It describes the layer for
// both passes, and for the gradients of its parameters.
struct Linear {
    Parallel parallel = Parallel::column;
    int N = 0, C = 0, OC = 0;        // rows of activations; inputs and outputs of this rank's part
    const floatX* weight = nullptr;  // (OC, C)
    const floatX* bias = nullptr;    // (OC) or null
    float *dweight = nullptr, *dbias = nullptr;  // their gradients; null if nothing is trained
    LinearInput inp = {};                        // (N, C)
    floatX* dout = nullptr;                      // (N, OC) all rows of the gradient of the output
    // A GELU that is computed together with the product.
    Gelu gelu = Gelu::tanh;
    floatX* gelu_out = nullptr;        // (N, OC) column-parallel: the GELU of the output, or null
    const floatX* gelu_inp = nullptr;  // (N, C) row-parallel: input of the GELU whose output is inp, or null
    // (1) fp8: amax of gelu_out, or of gelu_inp's gradient, if one kernel writes all its rows; or null
    float* gelu_amax = nullptr;
    Fp8Operand dout8 = {};  // product_gradient() in fp8
    // (OC) row-parallel: column sums of this rank's rows of dout, left by the kernel that wrote them; or null
    const float* dout_column_sums = nullptr;
    CausalConv conv = {};  // for a convolution, which has no GELU

    // The product and its gradient are (N, product_width()); for a convolution, that is wider than the
    // output.
    int product_width() const { return conv.products ? 2 * OC : OC; }
    const floatX* product_gradient() const { return conv.products ? conv.dproducts : dout; }

    // Returns outputs [from, from + count) as a separate layer, with its own input and output gradient.
    Linear outputs(int from, int count, const LinearInput& of_inp, floatX* of_dout) const {
        Linear part = *this;
        part.OC = count, part.inp = of_inp, part.dout = of_dout;
        part.weight += (size_t)from * C;
        if (dweight) part.dweight += (size_t)from * C;
        if (bias) part.bias += from;
        if (dbias) part.dbias += from;
        return part;
    }
};

// The position of a linear layer among those that read, or add to, the residual stream side by side, as in a
// parallel block. They gather rows once and sum over the ranks once: the first layer gathers, and the last
// adds its partial sums to those of the others and scatters them.
enum class Side { alone, first, middle, last };

// Returns the position of layer `number` among `layers` layers.
constexpr Side side_of(size_t number, size_t layers) {
    bool first = number == 0, last = number == layers - 1;
    return first ? (last ? Side::alone : Side::first) : (last ? Side::last : Side::middle);
}

constexpr bool begins(Side side) {
    return side == Side::alone || side == Side::first;
}
constexpr bool ends(Side side) {
    return side == Side::alone || side == Side::last;
}

// When a layer's weight gradients are computed: in its backward pass, or later by weight_gradient(), as in
// zero-bubble pipelines (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
enum class WeightGradients { now, later };

// The context that the linear layers of a rank share.
struct TensorParallel {
    SequenceParallel& rows;
    BlockProducts& products;
    cudaStream_t stream;
    // (N, C of the model) partial sums of all rows; not used in a group of one
    floatX* partial = nullptr;
    float* scratch = nullptr;  // for matmul_backward_bias()
    bool overwrites = false;  // weight gradients, which hold nothing yet, are overwritten instead of added to

    // Returns the memory for the partial sums of all rows, which are then summed over the ranks into `own`.
    // In a group of one it is `own` itself.
    floatX* partial_sums(floatX* own) const { return rows.ranks() == 1 ? own : partial; }
};

// In fp8: keeps all rows of the input for the weight's gradient. A product that reads all rows keeps them
// itself.
inline void keep_input(const TensorParallel& tp, const Linear& l) {
    tp.products.keep_input(l.inp.all, l.inp.fp8, l.N, l.C);
}

// Computes rows [first, first + rows) of out (N, OC) from those of the input. accumulate: adds to out, unless
// the layer is a convolution. For a convolution, all earlier rows must have been computed.
inline void linear_rows(const TensorParallel& tp, const Linear& l, floatX* out, const floatX* bias, int first,
                        int rows, bool accumulate) {
    const floatX* inp = l.inp.all + (size_t)first * l.C;
    size_t at = (size_t)first * l.OC;
    if (l.conv.products) {
        tp.products.forward(l.conv.products + 2 * at, inp, l.inp.fp8, l.weight, nullptr, rows, l.C, 2 * l.OC);
        if (!l.conv.rows.is_cut()) {
            causal_conv_forward(out, l.conv.products, bias, l.conv.rows, first, rows, l.OC, tp.stream);
        } else if (first + rows == l.N) {  // this rank's pieces need rows of other ranks
            l.conv.contexts->taps_before(l.conv.halo, l.conv.products, l.conv.rows, l.OC);
            causal_conv_forward(out, l.conv.products, bias, l.conv.rows, 0, l.N, l.OC, tp.stream);
        }
    } else if (l.gelu_out) {
        tp.products.gelu_forward(l.gelu, l.gelu_out + at, out + at, inp, l.inp.fp8, l.weight, bias, rows, l.C,
                                 l.OC, l.gelu_amax);
    } else {
        tp.products.forward(out + at, inp, l.inp.fp8, l.weight, bias, rows, l.C, l.OC, accumulate);
    }
    if (rows < l.N && first + rows == l.N) keep_input(tp, l);
}

// Computes rows of the gradient of the input, or of gelu_inp if there is one.
inline void linear_rows_backward(const TensorParallel& tp, const Linear& l, floatX* dinp, int first, int rows,
                                 bool accumulate) {
    int width = l.product_width();
    const floatX* dout = l.product_gradient() + (size_t)first * width;
    size_t at = (size_t)first * l.C;
    if (l.gelu_inp)
        tp.products.backward_gelu(l.gelu, dinp + at, l.gelu_inp + at, dout, l.dout8, l.weight, rows, l.C,
                                  width, l.gelu_amax);
    else
        tp.products.backward_input(dinp + at, dout, l.dout8, l.weight, rows, l.C, width, accumulate);
}

// Computes all rows of out (N, OC) from those of the input, which are gathered first.
inline void column_parallel(const TensorParallel& tp, const Linear& l, floatX* out, Side side = Side::alone) {
    auto product = [&](int first, int rows) { linear_rows(tp, l, out, l.bias, first, rows, false); };
    begins(side) ? tp.rows.gather(l.inp.own, l.inp.all, l.N, l.C, product) : product(0, l.N);
}

// Computes own_out (own rows, OC), summed over the ranks, each of which multiplies its part of the inputs.
inline void row_parallel(const TensorParallel& tp, const Linear& l, floatX* own_out,
                         Side side = Side::alone) {
    floatX* partial = tp.partial_sums(own_out);
    const floatX* bias = tp.rows.rank() == 0 ? l.bias : nullptr;  // only once in the sum
    auto product = [&](int first, int rows) {
        linear_rows(tp, l, partial, bias, first, rows, !begins(side));
    };
    if (!ends(side)) return product(0, l.N);
    if (l.conv.rows.is_cut()) {
        product(0, l.N);
        return tp.rows.scatter(own_out, partial, l.N, l.OC);
    }
    tp.rows.scatter(own_out, partial, l.N, l.OC, product);
    tp.rows.wait();
}

// Computes the gradient of the weight from inp and dout, and adds to that of the bias. For convolutions and
// row-parallel layers, the backward pass has already added the bias gradient; the bias of a row-parallel
// layer is replicated, and each rank adds the gradient from its own rows.
inline void weight_gradient(const TensorParallel& tp, const Linear& l) {
    bool bias_is_done = l.conv.products || l.parallel == Parallel::row;
    tp.products.backward_weight(l.dweight, l.product_gradient(), l.inp.all, l.inp.fp8, l.N, l.C,
                                l.product_width(), bias_is_done ? nullptr : l.dbias, tp.scratch,
                                !tp.overwrites);
}

// These two regather an input whose rows are not in place, for the weight's gradient. Other work can be done
// between the two calls.
inline void start_regather(const TensorParallel& tp, const Linear& l) {
    tp.rows.start_gather(l.inp.own, l.inp.all, l.N, l.C);
}
inline void end_regather(const TensorParallel& tp, const Linear& l) {
    tp.rows.wait_for_gathered();
    keep_input(tp, l);
}

// Computes the weight gradients that the backward passes of these layers deferred. Each input is regathered
// for the first layer that reads it, overlapped with the weight gradient of the previous layer.
inline void weight_gradients(const TensorParallel& tp, const std::vector<const Linear*>& layers) {
    auto gathers = [&](size_t i) {
        bool is_first = true;
        for (size_t j = 0; j < i; j++) is_first &= layers[j]->inp.own != layers[i]->inp.own;
        return !layers[i]->inp.in_place && is_first;
    };
    for (size_t i = 0; i <= layers.size(); i++) {
        if (i > 0 && gathers(i - 1)) end_regather(tp, *layers[i - 1]);
        if (i < layers.size() && gathers(i)) start_regather(tp, *layers[i]);
        if (i > 0) weight_gradient(tp, *layers[i - 1]);
    }
}

// Computes own_dinp (own rows, C), the gradient of this rank's rows of the input, from dout. Its sum over the
// ranks overlaps with the product for the weight's gradient.
inline void column_parallel_backward(const TensorParallel& tp, const Linear& l, floatX* own_dinp, Side side,
                                     WeightGradients weights) {
    floatX* partial = tp.partial_sums(own_dinp);
    if (l.conv.products) {
        matmul_backward_bias(l.dbias, tp.scratch, l.dout, l.N, l.OC, tp.stream);
        if (l.conv.rows.is_cut()) l.conv.contexts->gradient_after(l.conv.halo, l.dout, l.conv.rows, l.OC);
        causal_conv_backward(l.conv.dproducts, l.dout, l.conv.rows, 0, l.N, l.OC, tp.stream);
    }
    auto product = [&](int first, int rows) {
        linear_rows_backward(tp, l, partial, first, rows, !begins(side));
    };
    ends(side) ? tp.rows.scatter(own_dinp, partial, l.N, l.C, product) : product(0, l.N);
    if (weights == WeightGradients::now) {
        if (begins(side) && !l.inp.in_place) end_regather(tp, l);
        weight_gradient(tp, l);
    }
    tp.rows.wait();
}

// Computes dinp (N, C), the gradient of the input, or of gelu_inp if there is one. own_dout (own rows, OC) is
// the gradient of this rank's rows of the output, and is gathered into dout. During the product for the
// weight's gradient, the input of `next`, the column-parallel layer whose backward pass follows, is
// regathered. with_dinp() puts work that reads dinp on the compute stream before the weight's gradient, which
// may read the results.
template <typename WithInput>
void row_parallel_backward(const TensorParallel& tp, const Linear& l, const floatX* own_dout, floatX* dinp,
                           Side side, WeightGradients weights, const Linear& next, WithInput&& with_dinp) {
    bool alone = tp.rows.ranks() == 1;
    auto product = [&](int first, int rows) { linear_rows_backward(tp, l, dinp, first, rows, false); };
    // The gradient of a row's first tap comes from the next row, so the previous chunk is complete only now.
    auto convolution = [&](int first, int rows) {
        causal_conv_backward(l.conv.dproducts, l.dout, l.conv.rows, first, rows, l.OC, tp.stream);
        if (first > 0) product(first - rows, rows);
        if (first + rows == l.N) product(first, rows);
    };
    auto work = [&](int first, int rows) {
        if (l.conv.rows.is_cut()) {
            if (first + rows < l.N) return;
            l.conv.contexts->gradient_after(l.conv.halo, l.dout, l.conv.rows, l.OC);
            first = 0, rows = l.N;
        }
        l.conv.products ? convolution(first, rows) : product(first, rows);
    };
    if (l.dbias && l.dout_column_sums)
        accumulate(l.dbias, l.dout_column_sums, (size_t)l.OC, tp.stream);
    else if (l.dbias)
        matmul_backward_bias(l.dbias, tp.scratch, own_dout, tp.rows.own_rows(l.N), l.OC, tp.stream);
    bool gathered = !begins(side);
    if (alone && l.dout != own_dout && !gathered) {  // own_dout may change while dout is in use
        copy_async(l.dout, own_dout, (size_t)l.N * l.OC, tp.stream);
    }
    alone || gathered ? work(0, l.N) : tp.rows.gather(own_dout, l.dout, l.N, l.OC, work);
    with_dinp();
    if (weights == WeightGradients::later) return;
    if (begins(side) && !next.inp.in_place) start_regather(tp, next);
    weight_gradient(tp, l);
}

inline void row_parallel_backward(const TensorParallel& tp, const Linear& l, const floatX* own_dout,
                                  floatX* dinp, Side side, WeightGradients weights, const Linear& next) {
    row_parallel_backward(tp, l, own_dout, dinp, side, weights, next, [] {});
}
