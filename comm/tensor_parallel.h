/*
Tensor parallelism (Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019) with the rows between its products cut as well, which is sequence parallelism (Korthikanti
et al., "Reducing Activation Recomputation in Large Transformer Models", 2022). The ranks of a tensor group
share each matrix of a block. A pair of matrices needs nothing from other ranks between its two:

    column-parallel   each rank makes a part of the outputs of all rows    gather rows, then multiply
    row-parallel      each rank makes partial sums from its inputs         multiply, then scatter sums

What lies between pairs, sums of the residual stream and norms, works row by row: there each rank has rows of
its own. The backward pass is the mirror image: of a row-parallel matrix it gathers, of a column-parallel one
it scatters. A matrix is stored as (OC, C), so what is cut of a column-parallel one are rows in memory: its
name is that of the transposed matrix, as in the papers.

The N rows are taken as chunks, each cut evenly over the ranks, and the own rows of a rank lie one after
another. 12 rows in 2 chunks over 3 ranks:

    row          0  1 |  2  3 |  4  5 ||  6  7 |  8  9 | 10 11
    rank           0  |   1   |   2   ||   0   |   1   |   2         own rows of rank 1:  2 3 8 9

While one chunk is on its way, the product works on another. Communication has a stream of its own for that;
without overlap it is put on the compute stream: the same calls, so the same bits.

Of the rows that a column-parallel matrix reads, a rank keeps its own alone. The gradient of the weight reads
all of them once more: they come together again in the backward pass, behind that of the weight before it.
*/
#pragma once

#include <vector>

#include "comm/collectives.h"  // Communicator
#include "comm/recorder.h"     // TraceSpan
#include "comm/mesh.h"         // Mesh
#include "data/base/error.h"
#include "kernels/fp8_matmul.cuh"   // BlockProducts
#include "kernels/gelu.cuh"         // Gelu
#include "kernels/causal_conv.cuh"  // causal_conv_forward, causal_conv_backward

// ----------------------------------------------------------------------------
// rows between products

class SequenceParallel {
public:
    // A group of one: nothing is cut, and nothing sent.
    SequenceParallel() = default;

    // For all ranks of the group.
    SequenceParallel(const Communicator& group, int chunks, bool overlap, cudaStream_t compute)
        : group_(group), compute_(compute), sends_(compute) {
        if (chunks < 1) fail("sequence parallel: %d chunks; 1 is the least", chunks);
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

    // How many of this many rows are a rank's own. Fails if they cannot be cut evenly.
    int own_rows(int rows) const {
        if (rows % ranks()) {
            fail("sequence parallel: %d rows cannot be cut evenly for %d ranks; choose other values of "
                 "--micro-batch or --sequence-length",
                 rows, ranks());
        }
        return rows / ranks();
    }

    // The own rows of all ranks come together in `all` (rows, width), chunk after chunk. work(first, count)
    // puts on the compute stream what reads rows [first, first + count) of `all`, while the next chunks are
    // on their way. `own` (own rows, width) stays as it is until all work has been put there. In a group of
    // one, own is all, and the work is work(0, rows).
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

    // Likewise, while other work is done: what reads `all` is put on the compute stream after
    // wait_for_gathered(), which is called before the next start_gather(). Scatters may come in between.
    void start_gather(const floatX* own, floatX* all, int rows, int width) {
        if (ranks() == 1) return work_alone(own, all, rows, [](int, int) {});
        send_rows(own, all, rows, width, [](int) {});
        record(sends_, gathered());
    }
    void wait_for_gathered() { await(gathered()); }

    // work(first, count) puts on the compute stream what writes rows [first, first + count) of `all` (rows,
    // width), while the chunk before is on its way. The sum over the ranks of the own rows goes to `own` (own
    // rows, width). The compute stream can go on with other work, but may read or write `own`, and write
    // `all`, only after wait(). In a group of one, own is all, and the work is work(0, rows).
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

    // These two have no work to put behind or before them, and are done for the compute stream's next work.
    void gather(const floatX* own, floatX* all, int rows, int width) {
        gather(own, all, rows, width, [](int, int) {});
    }
    void scatter(floatX* own, floatX* all, int rows, int width) {
        scatter(own, all, rows, width, [](int, int) {});
        wait();
    }

    // data (ranks * part): each rank's part of some numbers, to all of them.
    template <typename T>
    void exchange(T* data, size_t part) {
        send_after_work();
        group_.all_gather(data, part, Traffic::statistics, sends_);
        record(sends_, scattered());
        wait();
    }

    // The compute stream waits for what the last scatter sends. The next gather or scatter does so too.
    void wait() { await(scattered()); }

private:
    bool overlaps() const { return sends_ != compute_; }

    // Rows that do not make so many chunks, as those of a short sample, travel as one.
    int chunks_of(int rows) const { return rows % (ranks() * chunks_) ? 1 : chunks_; }

    template <typename Work>
    static void work_alone(const floatX* own, const floatX* all, int rows, Work&& work) {
        if (own != all) fail("sequence parallel: of a group of one, the own rows are all rows");
        work(0, rows);
    }

    // sent(chunk) is called when that is on its way.
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

    // Events: of work of the compute stream that sends wait for, of each chunk, of the last scatter, and of
    // the last gather that was started. What is on one stream only is in order anyway.
    size_t scattered() const { return (size_t)chunks_ + 1; }
    size_t gathered() const { return (size_t)chunks_ + 2; }
    void record(cudaStream_t stream, size_t event) {
        if (overlaps()) events_[event].record(stream);
    }
    // The compute stream waits for what is sent.
    void await(size_t event) {
        if (!overlaps()) return;
        TraceSpan wait(Traffic::activations, compute_);
        events_[event].hold(compute_);
    }

    // Orders later sends behind all that is on the compute stream now.
    void send_after_work() {
        record(compute_, 0);
        if (overlaps()) events_[0].hold(sends_);
    }

    Communicator group_;
    int chunks_ = 1;
    cudaStream_t compute_ = nullptr, sends_ = nullptr;  // one stream if nothing overlaps
    std::vector<Event> events_;
};

// ----------------------------------------------------------------------------
// linear layers

enum class Parallel { column, row };

// A linear layer may be a causal convolution over each row and the one before it, whose two taps are a weight
// (2, OC, C): kernels/causal_conv.cuh has the formula.
struct CausalConv {
    floatX* products = nullptr;   // (N, 2, OC) of both taps; null: the layer is no convolution
    floatX* dproducts = nullptr;  // (N, 2, OC) their gradient
    floatX* state = nullptr;      // (N / T, OC) the first taps of each sequence's newest token, or null
    ConvRows rows = {};
};

// The input of a linear layer.
struct LinearInput {
    floatX* all = nullptr;  // (N, C) all rows
    Fp8Operand fp8 = {};    // all rows in fp8
    // (own rows, C) column-parallel: those that this rank has made, which come together in `all`
    const floatX* own = nullptr;
    // The backward pass finds all rows where they are, and need not bring them together again.
    bool in_place = true;
};

// The input of a column-parallel layer. all: null in a group of one, whose own rows are all.
inline LinearInput gathered_input(floatX* own, floatX* all, const Fp8Operand& fp8, bool in_place) {
    return {all ? all : own, fp8, own, in_place || !all};
}

// A linear layer out (N, OC) = inp (N, C) weight^T + bias, as this rank has it: both passes, and the
// gradients of its parameters, are made from this one description.
struct Linear {
    Parallel parallel = Parallel::column;
    int N = 0, C = 0, OC = 0;        // rows of activations; inputs and outputs of this rank's part
    const floatX* weight = nullptr;  // (OC, C)
    const floatX* bias = nullptr;    // (OC) or null
    float *dweight = nullptr, *dbias = nullptr;  // their gradients; null if nothing is trained
    LinearInput inp = {};                        // (N, C)
    floatX* dout = nullptr;                      // (N, OC) all rows of the gradient of the output
    // A GELU that is made in the same pass as the product.
    Gelu gelu = Gelu::tanh;
    floatX* gelu_out = nullptr;        // (N, OC) column-parallel: the GELU of the output, or null
    const floatX* gelu_inp = nullptr;  // (N, C) row-parallel: what inp is the GELU of, or null
    // (1) in fp8: of gelu_out, or of the gradient of gelu_inp, where these are made at once; or null
    float* gelu_amax = nullptr;
    Fp8Operand dout8 = {};  // product_gradient() in fp8
    // (OC) row-parallel: sums of the columns of this rank's rows of dout, which their maker left; or null
    const float* dout_column_sums = nullptr;
    CausalConv conv = {};  // a convolution's, which has no GELU

    // The product has a width of its own, as its gradient has: both are (N, product_width()).
    int product_width() const { return conv.products ? 2 * OC : OC; }
    const floatX* product_gradient() const { return conv.products ? conv.dproducts : dout; }

    // Outputs [from, from + count) as a layer of their own, with an input and a gradient of its own.
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

// The place of a linear layer among those that read, or add to, the residual stream side by side, as those of
// a parallel block do. They gather its rows once and sum over the ranks once: the first gathers, and the last
// adds its partial sums to those of the others and scatters them.
enum class Side { alone, first, middle, last };

// The place of layer `number` among `layers` of them.
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

// When the gradients of a layer's parameters are made: in its backward pass, or afterwards by
// weight_gradient(), as zero-bubble pipelines do (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
enum class WeightGradients { now, later };

// The context in which the linear layers of a rank work.
struct TensorParallel {
    SequenceParallel& rows;
    BlockProducts& products;
    cudaStream_t stream;
    // (N, C of the model) partial sums of all rows; not used in a group of one
    floatX* partial = nullptr;
    float* scratch = nullptr;  // for matmul_backward_bias()
    bool overwrites = false;   // gradients of weights, which hold nothing yet, where others are added to

    // The memory for the partial sums of all rows, whose sum over the ranks goes to `own`. In a group of one
    // it is `own` itself.
    floatX* partial_sums(floatX* own) const { return rows.ranks() == 1 ? own : partial; }
};

// In fp8: keeps all rows of the input for the weight's gradient, where no product that sees them all does so.
inline void keep_input(const TensorParallel& tp, const Linear& l) {
    tp.products.keep_input(l.inp.all, l.inp.fp8, l.N, l.C);
}

// Rows [first, first + rows) of out (N, OC), from those of the input; accumulate: added to it, but for a
// convolution. Of that, the rows before them must have been made.
inline void linear_rows(const TensorParallel& tp, const Linear& l, floatX* out, const floatX* bias, int first,
                        int rows, bool accumulate) {
    const floatX* inp = l.inp.all + (size_t)first * l.C;
    size_t at = (size_t)first * l.OC;
    if (l.conv.products) {
        tp.products.forward(l.conv.products + 2 * at, inp, l.inp.fp8, l.weight, nullptr, rows, l.C, 2 * l.OC);
        causal_conv_forward(out, l.conv.products, bias, l.conv.rows, first, rows, l.OC, tp.stream);
    } else if (l.gelu_out) {
        tp.products.gelu_forward(l.gelu, l.gelu_out + at, out + at, inp, l.inp.fp8, l.weight, bias, rows, l.C,
                                 l.OC, l.gelu_amax);
    } else {
        tp.products.forward(out + at, inp, l.inp.fp8, l.weight, bias, rows, l.C, l.OC, accumulate);
    }
    if (rows < l.N && first + rows == l.N) keep_input(tp, l);
}

// Rows of the gradient of the input, or of gelu_inp where there is one.
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

// out (N, OC) of all rows, from those of the input, which come together first.
inline void column_parallel(const TensorParallel& tp, const Linear& l, floatX* out, Side side = Side::alone) {
    auto product = [&](int first, int rows) { linear_rows(tp, l, out, l.bias, first, rows, false); };
    begins(side) ? tp.rows.gather(l.inp.own, l.inp.all, l.N, l.C, product) : product(0, l.N);
}

// own_out (own rows, OC): the sum over the ranks of what each makes of its part of the inputs.
inline void row_parallel(const TensorParallel& tp, const Linear& l, floatX* own_out,
                         Side side = Side::alone) {
    floatX* partial = tp.partial_sums(own_out);
    const floatX* bias = tp.rows.rank() == 0 ? l.bias : nullptr;  // once in the sum
    auto product = [&](int first, int rows) {
        linear_rows(tp, l, partial, bias, first, rows, !begins(side));
    };
    if (!ends(side)) return product(0, l.N);
    tp.rows.scatter(own_out, partial, l.N, l.OC, product);
    tp.rows.wait();
}

// Makes the gradient of the weight, and adds to that of the bias, from inp and dout. The backward pass has
// already made that of a row-parallel layer's bias, which each of the ranks has, from the rank's own rows;
// and that of a convolution's.
inline void weight_gradient(const TensorParallel& tp, const Linear& l) {
    bool bias_is_done = l.conv.products || l.parallel == Parallel::row;
    tp.products.backward_weight(l.dweight, l.product_gradient(), l.inp.all, l.inp.fp8, l.N, l.C,
                                l.product_width(), bias_is_done ? nullptr : l.dbias, tp.scratch,
                                !tp.overwrites);
}

// All rows of an input that are not in place come together again for the weight's gradient, while other work
// is done between these two.
inline void start_regather(const TensorParallel& tp, const Linear& l) {
    tp.rows.start_gather(l.inp.own, l.inp.all, l.N, l.C);
}
inline void end_regather(const TensorParallel& tp, const Linear& l) {
    tp.rows.wait_for_gathered();
    keep_input(tp, l);
}

// Makes what the backward passes of these layers have left for later. Each input comes together again behind
// the gradient of the weight before it, for the first layer that reads it.
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

// own_dinp (own rows, C): the gradient of this rank's rows of the input, from dout. It is summed over the
// ranks behind the product for the weights.
inline void column_parallel_backward(const TensorParallel& tp, const Linear& l, floatX* own_dinp, Side side,
                                     WeightGradients weights) {
    floatX* partial = tp.partial_sums(own_dinp);
    if (l.conv.products) {
        matmul_backward_bias(l.dbias, tp.scratch, l.dout, l.N, l.OC, tp.stream);
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

// dinp (N, C): the gradient of the input, or of gelu_inp where there is one, from the gradient of this rank's
// rows of the output, own_dout (own rows, OC), which come together in dout. The column-parallel layer whose
// backward pass is next has its input come together again meanwhile. with_dinp() puts on the compute stream
// what is made of dinp before the gradient of the weight, which may read what it makes.
template <typename WithInput>
void row_parallel_backward(const TensorParallel& tp, const Linear& l, const floatX* own_dout, floatX* dinp,
                           Side side, WeightGradients weights, const Linear& next, WithInput&& with_dinp) {
    bool alone = tp.rows.ranks() == 1;
    auto product = [&](int first, int rows) { linear_rows_backward(tp, l, dinp, first, rows, false); };
    // The gradient of a row's first taps is in the row after it, so the rows before these are complete now.
    auto convolution = [&](int first, int rows) {
        causal_conv_backward(l.conv.dproducts, l.dout, l.conv.rows, first, rows, l.OC, tp.stream);
        if (first > 0) product(first - rows, rows);
        if (first + rows == l.N) product(first, rows);
    };
    auto work = [&](int first, int rows) {
        l.conv.products ? convolution(first, rows) : product(first, rows);
    };
    if (l.dbias && l.dout_column_sums)
        add_bias_sums(l.dbias, l.dout_column_sums, l.OC, tp.stream);
    else if (l.dbias)
        matmul_backward_bias(l.dbias, tp.scratch, own_dout, tp.rows.own_rows(l.N), l.OC, tp.stream);
    bool gathered = !begins(side);
    if (alone && l.dout != own_dout && !gathered) {  // for later, when own_dout has changed
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
