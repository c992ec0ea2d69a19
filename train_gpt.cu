/*
train_gpt pre-trains GPT-style transformers. This is one training step, and where each line is implemented:

    for each micro-batch, in the order of the pipeline's schedule        run_micro_batches; comm/pipeline.h
        x = wte[tokens] + wpe[positions]                                 embed_forward
        for each layer                                                   stage_forward
            x = x + attention(norm(x));  x = x + mlp(norm(x))            block_forward
        loss = cross_entropy(norm(x) wte^T, targets)                     head_forward, classify
        compute the gradients of these lines, last to first              stage_backward, *_backward
        sum each unit's gradients over the data ranks                    ZeroState::reduce_gradients
    clip the gradients by their global norm                              ZeroState::update
    update the parameters this rank owns (AdamW or another optimizer)    kernels/adamw.cuh
    send the new parameters to the ranks that use them                   ZeroState::publish in comm/zero.h

In a single process the lines about other ranks do nothing; the rest is the same. The sections of this file:

    model         the part of the model that a rank holds, and its memory
    layers        attention, MLP, block, embedding, head: each forward pass, with its backward pass below it
    stage         the part of both passes that one pipeline stage runs
    step          micro-batches: losses, gradients
    passes        logits of the next token and losses of batches, for generation and evaluation
    training      one step of a run; the train command with its loop
    commands      loading a model for sample and eval; the table of all commands; main

kernels/ has the arithmetic of each layer, one file per layer: the formula, the plain loop that specifies it,
the CUDA kernels. comm/ divides the work over ranks: tensor_parallel.h splits matrices across tensor ranks,
and zero.h shards parameters across data ranks. data/options/model_config.h lists all parameters in one table
(name, shape, initialization, decay and shards), beside the switches that determine them. comm/activations.h
lists all activations in another (name, size and lifetime). data/ reads and writes all files, and implements
what the commands do with a model's outputs.
*/
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/activations.h"        // Workload, ActivationMemory, ActivationArrays
#include "comm/inference.h"          // ModelPasses, Generator, BatchLosses; the sample and eval commands
#include "comm/memory_plan.h"        // memory_plan, stream_size
#include "comm/ngram_checkpoint.h"   // NgramCheckpoint: saves and loads NgramTables
#include "comm/ngram_tables.h"       // NgramTables: rows that n-grams look up
#include "comm/batches.h"            // batches read once for all ranks of a machine
#include "comm/context_parallel.h"   // ContextParallel: keys and values of other context ranks
#include "comm/plan_report.h"        // the plan command
#include "comm/zero_checkpoint.h"    // ZeroCheckpoint: saves and loads ZeroState
#include "comm/run_command.h"        // run_program: from main() to a command on every rank
#include "comm/selftest.h"           // the selftest command
#include "comm/settings.h"           // zero_settings, make_optimizer, wants_graphs
#include "comm/run_device.h"         // print_rate, task_key
#include "comm/tensor_parallel.h"    // column_parallel, row_parallel
#include "comm/training_plan.h"      // open_training: checks that precede a run
#include "comm/training_run.h"       // TrainingRun: everything between the steps of a run
#include "comm/zero.h"               // ZeroState: parameters, gradients and optimizer state, cut over ranks
#include "data/commands/commands.h"  // the command line, and commands without a device
#include "kernels/attention.cuh"     // attention_forward, attention_backward
#include "kernels/classifier.cuh"    // classifier, sum_losses
#include "kernels/elementwise.cuh"   // residual_forward
#include "kernels/embedding.cuh"     // embedding_forward, embedding_backward
#include "kernels/kv_cache.cuh"      // kv_cache_append, kv_cache_attention
#include "kernels/ngram_gate.cuh"    // ngram_gate_forward, ngram_gate_backward
#include "kernels/norm.cuh"          // norm_forward, residual_norm_forward, norm_backward
#include "kernels/qk_norm.cuh"       // qk_norm_forward, qk_norm_backward
#include "kernels/rope.cuh"          // rope_forward, rope_backward
#include "kernels/swiglu.cuh"        // swiglu_forward, swiglu_backward

// ----------------------------------------------------------------------------
// model
// ----------------------------------------------------------------------------

struct Gpt {
    ModelConfig config;
    Workload workload;
    const Mesh& mesh;
    Stage stage;             // this rank's part of the model
    ParameterLayout layout;  // offsets of its parameters
    const Norm norm = config.norm == NormKind::layernorm ? Norm::layernorm : Norm::rmsnorm;
    const bool swiglu = config.mlp == MlpKind::swiglu;
    const RowsInPlace in_place{config, workload.recompute};  // norms whose rows recomputation has regathered

    ComputeStream compute;
    cudaStream_t stream = compute.stream;
    Arena memory;        // owns the arrays of all members below
    ZeroState state;     // parameters, gradients, optimizer state
    Pipeline pipeline;   // sends activations between stages
    NgramTables tables;  // rows that n-grams look up
    ActivationMemory<Activations> activations;
    // one per layer, for the current micro-batch; arrays that layers share are in each, so also in acts[0]
    std::vector<Activations>& acts;
    BlockProducts products;    // products with the blocks' matrices
    SequenceParallel rows;     // activation rows, split across tensor ranks
    TensorParallel tp;         // linear layers, split across tensor ranks
    ContextParallel contexts;  // keys and values, split across context ranks
    float* rope;               // (positions, R/2, 2) cosines and sines
    StatisticsOnDevice stats;  // losses and norm of the step
    Graphs graphs;             // CUDA graphs of the passes over a micro-batch
    // SMs that products leave free for communication kernels, unless a pass sets its own number
    SparedMultiprocessors spares{spared({})};

    // layout.mesh must be the shape of `mesh`.
    Gpt(const ModelConfig& config, const Workload& workload, const ZeroSettings& settings, const Mesh& mesh,
        const Layout& layout);
    Gpt(const ModelConfig& config, const Workload& workload, const ZeroSettings& settings)
        : Gpt(config, workload, settings, one_process(), {}) {}
    ~Gpt() { drain(stream); }

    Dims dims(const Batch& batch) const { return {config, rows.ranks(), batch.B, batch.T}; }

    // Views of a unit's tensors: unit 0 is the embedding, then come the blocks, and then the head if it has
    // its own matrix. Weights are valid while the unit is acquired, gradients after begin_gradients().
    UnitTensors<floatX> weights(int unit) const { return layout.tensors(unit, state.params(unit)); }
    UnitTensors<float> gradients(int unit) const {
        return workload.training ? layout.tensors(unit, state.grads(unit)) : UnitTensors<float>();
    }
    // units of the last norm, which is stored with the last block, and of the classifier's weights (Vp, C)
    int last_norm_unit() const { return config.layers; }
    int classifier_unit() const { return config.tie_embeddings ? 0 : layout.last_unit(); }
    Tensor classifier_weight() const { return config.tie_embeddings ? wte : headw; }
    int local_vocab() const { return padded_vocab(config, rows.ranks()); }

    // Returns the number of SMs that products of this pass leave free for communication kernels.
    int spared(const PassOfStep& pass) const {
        return spared_by_products(mesh.shape, rows.chunks(),
                                  messages_beside(pass, state.cuts_params(), state.ranks_in_step() > 1));
    }

    // Points acts at the activations of this task.
    void bind_activations(const PipelineTask& task) {
        activations.bind(task);
        products.begin_work();
        acts[stage.first_layer(task.chunk)].residual = task.input;
        for (Activations& view : acts) view.dresidual = task.gradient;
    }
};

Gpt::Gpt(const ModelConfig& config, const Workload& workload, const ZeroSettings& settings, const Mesh& mesh,
         const Layout& cut)
    : config(config),
      workload(workload),
      mesh(mesh),
      stage(config, cut, mesh.position, workload.training),
      layout(parameter_layout(config, mesh.shape.shards(), stage.units())),
      state(memory, layout, mesh, settings, stream),
      pipeline(memory, mesh, cut.pipeline, stage.capacity, stream_size(config, workload, cut), stream,
               settings.overlap.pipeline),
      tables(memory, this->config, workload, settings, mesh, stage, stream),
      activations(memory, activation_table(config, workload, stage), stage, config.layers),
      acts(activations.views),
      products(memory, fp8_sizes(config, workload, stage), stream),
      rows(mesh.tensor(), cut.row_chunks, settings.overlap.tensor, stream),
      tp{rows, products, stream, acts[0].partial, acts[0].scratch},
      contexts(mesh.context(), workload.sequence(), settings.overlap.tensor, stream),
      rope(memory.of("activations").take<float>(rope_floats(config, workload))) {
    if (workload.training && tables.here()) state.count_squares(tables.squares());
    if (ledger) return;  // no kernel will read the angles
    if (floatX* keys = acts[0].keys_by_rank)
        contexts.clear(keys, Dims(config, rows.ranks(), workload.B, workload.T));
    std::vector<float> angles = rope_angles(config, workload);
    if (!angles.empty()) copy_to_device(rope, angles.data(), angles.size(), stream);
    synchronize(stream);
}

// ----------------------------------------------------------------------------
// layers
// ----------------------------------------------------------------------------
//
// How each tensor rank computes a block. Between products a rank holds only its own n of the N rows (see the
// figure in comm/tensor_parallel.h); a product works on all N. C, the width of the residual stream, is not
// split; the letters for heads and the MLP mean this rank's part (Dims in comm/stage.h defines all letters).
//
//     stream_norm      residual (n, C)    -> norm1 (n, C)
//     qkv              all_norm1 (N, C)   -> qkv (N, QKV)              all-gather of the ranks' own rows
//     attention        qkv                -> att (N, A)                each rank has its own heads
//     attproj          att                -> delta (n, C)              reduce-scatter
//     stream_norm      residual + delta   -> residual2, norm2 (n, C)
//     fc, gelu         all_norm2 (N, C)   -> fc (N, F1), act (N, F)    all-gather
//     fcproj           act                -> delta (n, C)              reduce-scatter; the next norm adds it
//
// In a parallel block fc reads all_norm1 too: rows are gathered once for both halves, and the sum of their
// outputs is scattered once. The backward pass is the mirror image: dresidual, the gradient of a sum, is
// gathered into dmlp_out or datt_out, and the gradient of gathered rows is reduce-scattered into dnorm.
// Gradients that a rank computes from only its own rows or heads, such as those of norms, are summed over
// tensor ranks by ZeroState::update.

// A norm over this rank's own rows, of the residual stream or within a local filter.
struct NormLayer {
    Norm norm;
    const floatX *weight, *bias;
    float *dweight, *dbias;
    floatX *inp = nullptr, *out = nullptr;   // (n, C)
    float *mean = nullptr, *rstd = nullptr;  // (n)
    // (1) fp8: amax of the output rows, and of the input's gradient; or null
    float *amax = nullptr, *dinp_amax = nullptr;
    float* dinp_column_sums = nullptr;  // (C) receives the column sums of the input's gradient; or null
    // (n, C) the part of the output's gradient that bypasses the products (a skip connection), so that dnorm
    // lacks it; or null
    const floatX* dout_beside = nullptr;
};

// The arrays of a block for one micro-batch, and their sizes: everything that its sublayers share. Weights
// are valid while the block's unit is acquired.
struct BlockArrays {
    Gpt& g;
    const Batch& batch;
    LayerKind kind;
    Dims d;
    Activations& a;
    UnitTensors<floatX> w;
    UnitTensors<float> dw;

    BlockArrays(Gpt& g, int number, const Batch& batch)
        : g(g),
          batch(batch),
          kind(layer_kind(g.config, number)),
          d(g.dims(batch)),
          a(g.acts[number]),
          w(g.weights(number + 1)),
          dw(g.gradients(number + 1)) {}

    // Returns the linear layer with this matrix, bias and operands, split across tensor ranks as the matrix's
    // row in the table of tensors says. bias: tensor_count if there is none
    Linear linear(Tensor weight, Tensor bias, Linear operands) const {
        LocalShape shape = g.layout.here(weight);
        operands.parallel = shape.shard == Shard::columns ? Parallel::row : Parallel::column;
        operands.N = d.N, operands.C = (int)shape.cols, operands.OC = (int)shape.rows;
        operands.weight = w[weight], operands.bias = w[bias];
        operands.dweight = dw[weight], operands.dbias = dw[bias];
        return operands;
    }

    // Returns the fp8 copy of an activation (N, width) for the products that read it; empty without fp8.
    // measured: the kernel that writes the activation also computes its amax. That kernel must write all
    // rows; norms, and GELUs that are fused with products, do not if there are several tensor ranks.
    Fp8Operand in_fp8(char* memory, int width, bool measured) const {
        return Fp8Operand::in_memory(memory, (size_t)d.N * width, measured);
    }
    bool has_all_rows() const { return d.n == d.N; }

    NormLayer norm(Tensor weight, Tensor bias) const {
        return {g.norm, w[weight], w[bias], dw[weight], dw[bias]};
    }
};

// The residual stream, and a delta yet to be added to it. The norm that reads the sum computes it, in the
// same pass over memory. Without a delta, `residual` is the sum already.
struct Sum {
    const floatX *residual, *delta = nullptr;  // (n, C)
};

// ---- norms

// Computes the norm of a sum, and writes the sum to l.inp. Without a delta, the sum is in l.inp already. If
// l.out is null, computes only the sum.
inline void stream_norm(Gpt& g, const NormLayer& l, const Sum& x, int n) {
    int C = g.config.channels;
    if (!l.out) {
        if (x.delta) residual_forward(l.inp, x.residual, x.delta, (size_t)n * C, g.stream);
        return;
    }
    float eps = g.config.norm_eps;
    if (x.delta)
        residual_norm_forward(l.norm, l.inp, l.out, l.mean, l.rstd, x.residual, x.delta, l.weight, l.bias, n,
                              C, eps, g.stream, l.amax);
    else
        norm_forward(l.norm, l.out, l.mean, l.rstd, x.residual, l.weight, l.bias, n, C, eps, g.stream,
                     l.amax);
}

// Computes the gradient of the norm's input from dnorm and dout_beside, and adds it to dinp.
inline void stream_norm_backward(Gpt& g, const NormLayer& l, floatX* dinp, const Activations& a, int n) {
    int C = g.config.channels;
    if (!l.out) return;
    if (l.dout_beside) residual_forward(a.dnorm, a.dnorm, l.dout_beside, (size_t)n * C, g.stream);
    norm_backward(l.norm, dinp, l.dweight, l.dbias, a.scratch, a.dnorm, l.inp, l.weight, l.mean, l.rstd, n, C,
                  g.stream, l.dinp_amax, l.dinp_column_sums);
}

// ---- sublayers

// A sublayer reads a norm of the residual stream, and adds to the stream. The sublayers of a parallel block
// work side by side and share one gather and one scatter: the first gathers the norm's rows, and the last
// scatters the sum of all their outputs.
struct Sublayer {
    const BlockArrays& l;
    const LinearInput inp;  // the norm's rows
    const Side side;        // its place among the sublayers that read them
    Gpt& g = l.g;
    const Dims& d = l.d;
    Activations& a = l.a;

    Sublayer(const BlockArrays& l, const LinearInput& inp, Side side) : l(l), inp(inp), side(side) {}
    virtual ~Sublayer() = default;

    // Computes delta from this rank's rows of the norm. Sublayers side by side are summed into one delta.
    virtual void forward() const = 0;
    // Recomputes what the forward pass did not keep, by the same operations, so bit-identically.
    virtual void recompute(Recompute kind) const = 0;
    // Computes dnorm from dresidual, the stream's gradient. Sublayers side by side are summed into one dnorm.
    virtual void backward(WeightGradients weights) const = 0;
    // Returns its linear layers, last to first.
    virtual std::vector<const Linear*> linears() const = 0;

protected:
    // Returns the linear layer that adds to the stream; the gradient of its output is dresidual. copy:
    // receives all rows of dresidual, gathered from tensor ranks or saved for deferred weight gradients, as
    // dresidual changes before those are computed. Null: dresidual is read in place.
    Linear linear_to_stream(Tensor weight, Tensor bias, const LinearInput& inp, floatX* copy) const {
        return l.linear(weight, bias,
                        {.inp = inp,
                         .dout = copy ? copy : a.dresidual,
                         .dout8 = Fp8Operand::of_gradient(a.dresidual_scale),
                         .dout_column_sums = a.dresidual_sums});
    }
};

// ---- n-gram memory: key, value = ngram(the table rows of a token's n-grams). A gate scales the value by how
// well the key matches the norm of the stream, and the result is added to the stream. Without a gate there is
// no key, and the value is added as it is.

struct NgramMemory : Sublayer {
    const int layer, W = g.config.ngram_width, rows = d.N * d.K;
    const bool gate = g.config.ngram_gate;
    floatX* dout = gate ? a.dngram_kv : a.dresidual;
    Linear kv =
        l.linear(ngramw, tensor_count, {.inp = {a.ngram_rows}, .dout = a.dngram_all ? a.dngram_all : dout});

    NgramMemory(const BlockArrays& l, int layer, const LinearInput& inp, Side side)
        : Sublayer(l, inp, side), layer(layer) {}

    void forward() const override {
        gather_rows();
        row_parallel(g.tp, kv, gate ? a.ngram_kv : a.delta);
        if (!gate) return;
        ngram_gate_forward(a.delta, a.ngram_score, a.ngram_key_rstd, a.ngram_norm, a.ngram_kv, d.n, d.C,
                           g.config.norm_eps, g.stream);
    }

    void recompute(Recompute) const override { gather_rows(); }

    // Computes the matrix's gradient right away, even if others are deferred: it costs little.
    void backward(WeightGradients) const override {
        if (gate)
            ngram_gate_backward(a.dnorm, a.dngram_kv, a.dresidual, a.ngram_score, a.ngram_key_rstd,
                                a.ngram_norm, a.ngram_kv, d.n, d.C, g.stream);
        row_parallel_backward(g.tp, kv, dout, a.dngram_rows, Side::alone, WeightGradients::now, kv);
        sum_rows(g.tables.grads(layer), a.scratch, (const floatX*)a.dngram_rows, l.batch.rows.of_lookups,
                 l.batch.rows.in_order, rows, W, g.stream);
    }

    std::vector<const Linear*> linears() const override { return {}; }

    void gather_rows() const {
        embedding_forward(a.ngram_rows, l.batch.rows.of_lookups, g.tables.rows(layer), nullptr, nullptr, rows,
                          W, g.stream);
    }
};

// ---- attention: att = softmax(q k^T) v, with q, k and v = qkv(norm); attproj adds it to the stream
//
// On several context ranks, queries, keys and values are not side by side in a row of qkv: keys and values
// are computed first, into separate rows after all queries, and are sent while queries are computed. In the
// backward pass, queries come first, while the gradients of keys and values are summed over the ranks.

struct Attention : Sublayer {
    Fp8Operand att8 = l.in_fp8(a.att_fp8, d.A, true), dqkv8 = Fp8Operand::of_gradient(a.dqkv_scale);
    Linear qkv = l.linear(qkvw, qkvb, {.inp = inp, .dout = a.dqkv, .dout8 = dqkv8});
    Linear attproj =
        linear_to_stream(attprojw, attprojb, {a.att, att8}, a.datt_out ? a.datt_out : a.dmlp_out);
    const bool is_split = g.contexts.ranks() > 1;    // keys and values are not in the rows of queries
    const bool is_cut = is_split && !l.batch.whole;  // and other ranks have some of them
    const ContextCut cut = is_cut ? g.contexts.cut() : ContextCut();
    const int parts = head_parts(d, cut);      // heads are divided into parts, which are sent in turn
    const size_t queries = (size_t)d.N * d.A;  // elements
    // parts of qkv that compute its outputs separately if is_split
    Linear q = qkv.outputs(0, d.A, inp, a.dqkv), kv = qkv.outputs(d.A, d.QKV - d.A, inp, a.dqkv + queries);
    // (QKV) gradient of qkv's bias, if attention's backward pass computes it instead of qkv's; else null
    float* dqkvb = attention_makes_bias_gradient(g.config, g.contexts.ranks())
                       ? std::exchange(qkv.dbias, nullptr)
                       : nullptr;
    Rotation rope = {g.rope, l.batch.positions, d.R};

    // Adjacent heads: their rows in qkv, and where they begin in qkv and in qk_rstd.
    struct Heads {
        QkvRows rows;
        size_t at = 0, rstd_at = 0;
    };
    const Heads all_heads = {{d.N, d.NH, d.NKV, d.HS}}, of_queries = {{d.N, d.NH, 0, d.HS}},
                of_keys = {{d.N, 0, d.NKV, d.HS}, queries, (size_t)d.N*d.NH};

    using Sublayer::Sublayer;

    void forward() const override {
        hidden();
        row_parallel(g.tp, attproj, a.delta, side);
    }

    void recompute(Recompute kind) const override {
        if (is_recomputed(SublayerKind::attention, kind)) {
            hidden();
            keep_input(g.tp, attproj);  // fp8: usually kept by attproj's product, which is not recomputed
        } else if (g.config.qk_norm) {
            finish(is_split ? of_queries : all_heads);
            if (is_split) finish(of_keys);
        }
    }

    void backward(WeightGradients weights) const override {
        if (is_cut) g.contexts.start_gather(a.keys_by_rank, a.qkv + queries, d, l.kind.window);
        row_parallel_backward(g.tp, attproj, a.dresidual, a.datt, side, weights, next_backward());
        attend_backward();
        finish_backward(is_cut ? of_queries : all_heads);
        qkv_backward(weights, [&] {
            if (!is_cut) return;
            g.contexts.end_scatter(a.dqkv + queries, a.dkeys_by_rank, a.keys_by_rank, d, l.kind.window);
            finish_backward(of_keys);
        });
    }

    std::vector<const Linear*> linears() const override {
        return is_split ? std::vector{&attproj, &q, &kv} : std::vector{&attproj, &qkv};
    }

    // The layer whose backward pass follows attproj's. Its input is regathered during attproj's.
    virtual const Linear& next_backward() const { return is_split ? q : qkv; }
    // Writes queries, keys and values to `out`, laid out like qkv. keys_made() enqueues work that reads keys
    // and values.
    virtual void qkv_forward(floatX* out, const std::function<void()>& keys_made) const {
        if (!is_split) return column_parallel(g.tp, qkv, out, side);
        column_parallel(g.tp, kv, out + queries, side);
        keys_made();
        column_parallel(g.tp, q, out, Side::middle);
    }
    // Computes dnorm from dqkv, in which end_keys() completes the gradients of keys and values.
    virtual void qkv_backward(WeightGradients weights, const std::function<void()>& end_keys) const {
        if (!is_split) return column_parallel_backward(g.tp, qkv, a.dnorm, side, weights);
        column_parallel_backward(g.tp, q, a.dnorm, begins(side) ? Side::first : Side::middle, weights);
        end_keys();
        column_parallel_backward(g.tp, kv, a.dnorm, ends(side) ? Side::last : Side::middle, weights);
    }

    // Writes qkv and att.
    void hidden() const {
        qkv_forward(g.config.qk_norm ? a.qkv_raw : a.qkv, [&] {
            if (!is_split) return;
            finish(of_keys);
            if (is_cut) g.contexts.start_gather(a.keys_by_rank, a.qkv + queries, d, l.kind.window);
        });
        finish(is_split ? of_queries : all_heads);
        const Batch& batch = l.batch;
        if (int limit = g.workload.cache_length; limit && batch.row >= 0) {
            KvCacheShape shape =
                kv_cache_shape(d.B, d.T, limit, 0, d.NH, d.NKV, d.HS, l.kind.window, batch.past);
            floatX* cache = a.cache + (size_t)batch.row * limit * shape.row();
            kv_cache_append(cache, a.qkv, shape, g.stream);
            if (batch.past) return kv_cache_attention(a.att, a.qkv, cache, shape, g.stream);
        }
        attend();
    }

    // A context rank has two pieces of each sequence. For each part of the heads, their attention is computed
    // one piece after the other.
    struct Piece {
        int piece, part;
    };
    AttentionShape shape(const Piece& at) const {
        AttentionShape of_piece = attention_of(d, cut, at.piece, l.kind.window, l.batch.doc_start);
        return is_split && !is_cut ? attention_shape_apart(of_piece, d.T, d.NH) : of_piece;
    }
    // A piece begins at first() in rows of heads and at first_lse() in lse; heads() returns its heads, or
    // their gradients.
    size_t first(const Piece& at) const {
        return (size_t)at.piece * cut.piece() * d.A + at.part * d.A / parts;
    }
    size_t first_lse(const Piece& at) const {
        return (size_t)at.piece * cut.piece() + (size_t)at.part * d.NH / parts * d.T;
    }
    template <typename T>
    Qkv<T> heads(T* own, T* keys_of_all, const Piece& at) const {
        if (!is_split) return in_rows(own, shape(at));
        return {own + first(at), is_cut ? keys_of_all : own + queries};
    }

    // Computes att from qkv, and from the keys and values that other context ranks send.
    void attend() const {
        for (int part = 0; part < parts; part++) {
            if (is_cut) g.contexts.end_gather(a.keys, a.keys_by_rank, part, d);
            for (int piece = 0; piece < pieces_of(cut); piece++) {
                Piece at = {piece, part};
                attention_forward(a.att + first(at), a.lse + first_lse(at),
                                  heads<const floatX>(a.qkv, a.keys, at), shape(at), g.stream,
                                  is_cut ? nullptr : att8.amax());
            }
        }
        if (is_cut && att8.amax()) find_amax(att8.amax(), a.att, queries, g.stream);
    }

    // Computes dqkv from datt; on several context ranks, computes only the gradients of queries, and starts
    // to sum those of keys and values. The keys of the second piece end later, so that piece is processed
    // first and overwrites all sums.
    void attend_backward() const {
        for (int part = 0; part < parts; part++) {
            if (is_cut) g.contexts.end_gather(a.keys, a.keys_by_rank, part, d);
            for (int piece = pieces_of(cut) - 1; piece >= 0; piece--) {
                Piece at = {piece, part};
                attention_backward(heads(a.dqkv, a.dkeys, at), a.scratch, a.datt + first(at),
                                   heads<const floatX>(a.qkv, a.keys, at), a.att + first(at),
                                   a.lse + first_lse(at), shape(at), g.stream, dqkvb);
                if (is_cut)
                    g.contexts.add_gradients(a.dkeys_by_rank, a.dkeys, shape(at), piece == 1, part, d);
            }
            if (is_cut) g.contexts.start_scatter(a.dkeys_by_rank, part, d, l.kind.window);
        }
    }

    // Applies QK-norm to queries and keys if the model has it, and RoPE if positions are rotary.
    void finish(const Heads& h) const {
        if (g.config.qk_norm)
            qk_norm_forward(a.qkv + h.at, a.qk_rstd + h.rstd_at, a.qkv_raw + h.at, l.w[qnormw], l.w[knormw],
                            rope, h.rows, g.config.norm_eps, g.stream);
        else if (d.R > 0)
            rope_forward(a.qkv + h.at, rope, h.rows, g.stream);
    }

    void finish_backward(const Heads& h) const {
        floatX* dqkv = a.dqkv + h.at;
        if (g.config.qk_norm)
            qk_norm_backward(dqkv, l.dw[qnormw], l.dw[knormw], a.scratch, dqkv, a.qkv_raw + h.at,
                             a.qk_rstd + h.rstd_at, l.w[qnormw], l.w[knormw], rope, h.rows, g.stream);
        else if (d.R > 0)
            rope_backward(dqkv, rope, h.rows, g.stream, dqkv8.amax());
    }
};

// ---- MLP: act = gelu or swiglu of fc(norm); fcproj adds it to the stream

struct Mlp : Sublayer {
    Fp8Operand act8 = l.in_fp8(a.act_fp8, d.F, l.has_all_rows() || g.swiglu);
    Fp8Operand dfc8 = Fp8Operand::of_gradient(a.dfc_scale);
    Linear fc = l.linear(fcw, fcb, {.inp = inp, .dout = a.dfc, .dout8 = dfc8});
    Linear fcproj = linear_to_stream(fcprojw, fcprojb, {a.act, act8}, a.dmlp_out);

    Mlp(const BlockArrays& l, const LinearInput& inp, Side side) : Sublayer(l, inp, side) {
        if (g.swiglu) return;
        fc.gelu = fcproj.gelu = g.config.mlp == MlpKind::gelu_exact ? Gelu::exact : Gelu::tanh;
        fc.gelu_out = a.act, fc.gelu_amax = act8.amax();
        fcproj.gelu_inp = a.fc, fcproj.gelu_amax = dfc8.amax();
    }

    void forward() const override {
        hidden();
        row_parallel(g.tp, fcproj, a.delta, side);
    }

    void recompute(Recompute kind) const override {
        if (!is_recomputed(SublayerKind::mlp, kind)) {
            // The output of a fused GELU was kept (gelu_is_fused in comm/activations.h).
            if (!g.workload.fp8 && !g.swiglu && !gelu_is_fused(g.config, g.workload, d.F))
                gelu_forward(fc.gelu, a.act, a.fc, (size_t)d.N * d.F, g.stream);
            return;
        }
        // the first sublayer gathers the rows; in a parallel block that is attention, if it is recomputed
        bool gathered = begins(side) || is_recomputed(SublayerKind::attention, kind);
        if (!gathered) g.rows.gather(inp.own, inp.all, d.N, d.C);
        hidden(!swiglu_is_made_backward(g.config, g.workload));
        keep_input(g.tp, fcproj);
    }

    void backward(WeightGradients weights) const override {
        row_parallel_backward(g.tp, fcproj, a.dresidual, g.swiglu ? a.dact : a.dfc, side, weights, fc, [&] {
            floatX* act = swiglu_is_made_backward(g.config, g.workload) ? a.act : nullptr;
            if (g.swiglu) swiglu_backward(a.dfc, a.dact, a.fc, d.N, d.F, g.stream, dfc8.amax(), act);
        });
        column_parallel_backward(g.tp, fc, a.dnorm, side, weights);
    }

    std::vector<const Linear*> linears() const override { return {&fcproj, &fc}; }

    // Writes fc and act.
    void hidden(bool act = true) const {
        column_parallel(g.tp, fc, a.fc, side);  // applies the GELU too
        if (g.swiglu && act) swiglu_forward(a.act, a.fc, d.N, d.F, g.stream, act8.amax());
    }
};

// ---- filtered attention: queries and keys = qk(filternorm(x + filter2(filter1(x)))), values = v(x)
//
// Localized filtering attention (Wu et al., "YUAN 2.0: A Large Language Model with Localized Filtering-based
// Attention", 2023), on x = norm1: queries and keys depend on a token and the two before it, through two
// convolutions over two tokens each. The inputs of both convolutions are zero before the start of a document.

struct FilteredAttention : Attention {
    Fp8Operand filtered8 = l.in_fp8(a.filtered_fp8, d.C, l.has_all_rows());
    LinearInput filtered = gathered_input(a.filtered, a.all_filtered, filtered8, g.in_place.filtered);
    Linear filter1 = convolution(filter1w, filter1b, inp, a.dfilter1, a.dtaps1, a.filter1_state);
    Linear filter2 = convolution(filter2w, filter2b, {a.filter1, l.in_fp8(a.filter1_fp8, d.H, false)},
                                 a.dfilter_out ? a.dfilter_out : a.dfilter_sum, a.dtaps2, a.filter2_state);
    NormLayer filternorm = {Norm::rmsnorm, l.w[filternormw], nullptr, l.dw[filternormw], nullptr};
    // qk and v multiply by parts of one matrix separately, because their inputs differ.
    Linear qk = qkv.outputs(0, d.A + d.NKV * d.HS, filtered, a.dqk_and_v);
    Linear v = qkv.outputs(qk.OC, d.NKV* d.HS, inp, a.dqk_and_v + (size_t)d.N * qk.OC);

    FilteredAttention(const BlockArrays& l, const LinearInput& inp, Side side) : Attention(l, inp, side) {
        filternorm.inp = a.filter_sum, filternorm.out = a.filtered, filternorm.rstd = a.filter_rstd;
        filternorm.amax = filtered8.amax();
    }

    void recompute(Recompute kind) const override {
        bool makes_all = is_recomputed(SublayerKind::attention, kind);
        if (!makes_all && !g.workload.fp8) stream_norm(g, filternorm, {a.filter_sum}, d.n);
        Attention::recompute(kind);
    }

    std::vector<const Linear*> linears() const override { return {&attproj, &qk, &v, &filter2, &filter1}; }
    const Linear& next_backward() const override { return qk; }

    void qkv_forward(floatX* out, const std::function<void()>& keys_made) const override {
        column_parallel(g.tp, filter1, a.filter1, Side::first);
        save_conv_state(filter1);
        row_parallel(g.tp, filter2, a.delta);
        save_conv_state(filter2);
        stream_norm(g, filternorm, {a.norm1, a.delta}, d.n);
        floatX* values = a.qk_and_v + (size_t)d.N * qk.OC;
        column_parallel(g.tp, qk, a.qk_and_v);
        column_parallel(g.tp, v, values, Side::middle);  // filter1 has gathered all rows of norm1
        each_part([&](size_t at, int row, const Linear& part, int from, int columns) {
            const floatX* made = &part == &qk ? a.qk_and_v : values;
            copy_columns(out + at, row, made + from, part.OC, columns, d.N, g.stream);
        });
        keys_made();
    }

    // Leaves the gradient of the skip connection around the filter in dfilter_sum, for norm1's backward pass.
    void qkv_backward(WeightGradients weights, const std::function<void()>& end_keys) const override {
        end_keys();
        each_part([&](size_t at, int row, const Linear& part, int from, int columns) {
            copy_columns(part.dout + from, part.OC, a.dqkv + at, row, columns, d.N, g.stream);
        });
        column_parallel_backward(g.tp, qk, a.dnorm, Side::alone, weights);
        zero_async(a.dfilter_sum, (size_t)d.n * d.C, g.stream);
        stream_norm_backward(g, filternorm, a.dfilter_sum, a, d.n);
        row_parallel_backward(g.tp, filter2, a.dfilter_sum, a.dfilter1, Side::alone, weights, v);
        column_parallel_backward(g.tp, v, a.dnorm, Side::first, weights);
        column_parallel_backward(g.tp, filter1, a.dnorm, ends(side) ? Side::last : Side::middle, weights);
    }

    // Calls visit(at, row, layer, from, columns) for queries, keys and values: they are `columns` outputs of
    // a layer, from `from` on, and are in qkv from offset `at` on, in rows that are `row` elements apart.
    template <typename Visit>
    void each_part(Visit&& visit) const {
        int keys = d.NKV * d.HS, row = is_split ? d.QKV - d.A : d.QKV;
        size_t keys_at = is_split ? queries : d.A;
        visit((size_t)0, is_split ? d.A : d.QKV, qk, 0, d.A);
        visit(keys_at, row, qk, d.A, keys);
        visit(keys_at + keys, row, v, 0, keys);
    }

    Linear convolution(Tensor weight, Tensor bias, const LinearInput& inp, floatX* dout, floatX* dtaps,
                       floatX* state) const {
        Linear linear = l.linear(weight, bias, {.inp = inp, .dout = dout});
        linear.OC /= 2;
        state = state && l.batch.row >= 0 ? state + (size_t)l.batch.row * linear.OC : nullptr;
        int piece = d.T / pieces_of(cut);
        linear.conv = {a.taps,      dtaps, state, {d.N, piece, l.batch.doc_start, a.halo, a.halo, cut},
                       &g.contexts, a.halo};
        if (l.batch.past) linear.conv.rows.before = state;
        return linear;
    }

    // Saves the state for the next token of each text being generated, if there are any.
    void save_conv_state(const Linear& filter) const {
        if (!filter.conv.state) return;
        size_t row = 2 * filter.OC;
        copy_columns(filter.conv.state, filter.OC, filter.conv.products + l.batch.last * row, d.T * row,
                     filter.OC, d.B, g.stream);
    }
};

// ---- block

// A block, for both passes: groups of sublayers, where each group reads one norm. Built for each pass of a
// micro-batch.
struct Block : BlockArrays {
    struct Group {
        NormLayer norm;
        std::vector<std::unique_ptr<Sublayer>> sublayers = {};
        bool is_recomputed = false;  // true if any of the sublayers is

        void add(SublayerKind kind, const BlockArrays& l, int layer, const LinearInput& inp, Side side) {
            is_recomputed |= ::is_recomputed(kind, l.g.workload.recompute);
            if (kind == SublayerKind::ngram_memory)
                return sublayers.push_back(std::make_unique<NgramMemory>(l, layer, inp, side));
            if (kind == SublayerKind::mlp) return sublayers.push_back(std::make_unique<Mlp>(l, inp, side));
            if (kind == SublayerKind::attention)
                sublayers.push_back(std::make_unique<Attention>(l, inp, side));
            if (kind == SublayerKind::filtered_attention)
                sublayers.push_back(std::make_unique<FilteredAttention>(l, inp, side));
        }
    };
    std::vector<Group> groups;

    Block(Gpt& g, int number, const Batch& batch) : BlockArrays(g, number, batch) {
        Fp8Operand norm1_8 = in_fp8(a.norm1_fp8, d.C, has_all_rows()),
                   norm2_8 = in_fp8(a.norm2_fp8, d.C, has_all_rows());
        floatX* all_norm2 = a.all_norm2 ? a.all_norm2 : a.all_norm1;
        LinearInput rows1 = gathered_input(a.norm1, a.all_norm1, norm1_8, g.in_place.norm1),
                    rows2 = gathered_input(a.norm2, all_norm2, norm2_8, g.in_place.norm2);
        NormLayer norm1 = norm(norm1w, norm1b), norm2 = norm(norm2w, norm2b);
        NormLayer of_table = {Norm::rmsnorm, w[ngramnormw], nullptr, dw[ngramnormw], nullptr};
        of_table.inp = a.residual, of_table.out = a.ngram_norm, of_table.rstd = a.ngram_rstd;
        norm1.inp = kind.has_table ? a.ngram_residual : a.residual, norm1.out = a.norm1,
        norm1.mean = a.norm1_mean, norm1.rstd = a.norm1_rstd;
        norm2.inp = a.residual2, norm2.out = a.norm2, norm2.mean = a.norm2_mean, norm2.rstd = a.norm2_rstd;
        norm1.amax = norm1_8.amax(), norm2.amax = norm2_8.amax();
        norm1.dout_beside = a.dfilter_sum;
        auto add = [&](const NormLayer& norm, const SublayerGroup& kinds, const LinearInput& rows) {
            Group& group = groups.emplace_back(norm);
            group.norm.dinp_amax = a.dresidual_scale, group.norm.dinp_column_sums = a.dresidual_sums;
            for (size_t i = 0; i < kinds.size(); i++)
                group.add(kinds[i], *this, number, rows, side_of(i, kinds.size()));
        };
        if (kind.has_table) add(of_table, {SublayerKind::ngram_memory}, {});
        add(norm1, kind.groups.front(), rows1);
        if (kind.groups.size() > 1) add(norm2, kind.groups.back(), rows2);
    }
    Block(const Block&) = delete;

    // Returns the linear layers of all sublayers, last to first.
    std::vector<const Linear*> linears() const {
        std::vector<const Linear*> all;
        for (const Group& group : groups) {
            for (const auto& sublayer : group.sublayers) {
                auto its = sublayer->linears();
                all.insert(all.begin(), its.begin(), its.end());
            }
        }
        return all;
    }
};

// Computes a transformer block. x: the previous block's output, with its delta not yet added
//
//     sequential    y = x + attention(norm1(x)),  out = y + mlp(norm2(y))
//     parallel      out = x + attention(norm1(x)) + mlp(norm1(x))
//
// Before either, a layer with an n-gram table adds its memory: x = x + memory(norm(x)).
inline Sum block_forward(Gpt& g, const Block& l, Sum x) {
    for (const Block::Group& group : l.groups) {
        stream_norm(g, group.norm, x, l.d.n);
        for (const auto& sublayer : group.sublayers) sublayer->forward();
        x = {group.norm.inp, l.a.delta};
    }
    return x;
}

// Recomputes what the forward pass did not keep, depending on --recompute:
//
//     elementwise    norms, QK-norm with RoPE, activation functions
//     mlp            those, and fc: all of the MLP except its last product
//     block          all of the block except its last product
//
// In fp8 the forward pass kept the quantized inputs of products, so norms and activation functions are
// recomputed only where a product is.
inline void recompute(Gpt& g, const Block& l) {
    Recompute kind = g.workload.recompute;
    if (kind == Recompute::none) return;
    Sum x = {l.groups[0].norm.inp};
    for (const Block::Group& group : l.groups) {
        if (kind != Recompute::block) x = {group.norm.inp};
        if (group.is_recomputed || !g.workload.fp8) stream_norm(g, group.norm, x, l.d.n);
        bool is_last = &group == &l.groups.back();
        for (const auto& sublayer : group.sublayers)
            kind == Recompute::block && !is_last ? sublayer->forward() : sublayer->recompute(kind);
        x = {group.norm.inp, l.a.delta};
    }
}

// Turns dresidual from the gradient of the block's output into that of its input.
inline void block_backward(Gpt& g, const Block& l, WeightGradients weights) {
    recompute(g, l);
    for (size_t i = l.groups.size(); i-- > 0;) {
        const Block::Group& group = l.groups[i];
        for (const auto& sublayer : group.sublayers) sublayer->backward(weights);
        stream_norm_backward(g, group.norm, l.a.dresidual, l.a, l.d.n);
    }
}

// ---- embedding: out = wte[token] + wpe[position]

// Writes this rank's own rows (n, C). Each tensor rank looks up its part of the vocabulary; only the first
// adds the positions, so that the sum over ranks contains them once.
inline void embed_forward(Gpt& g, const Batch& batch, floatX* out) {
    Dims d = g.dims(batch);
    g.state.acquire(0, +1);
    auto w = g.weights(0);
    const floatX* positions = g.rows.rank() == 0 ? w[wpe] : nullptr;
    floatX* partial = g.tp.partial_sums(out);
    embedding_forward(partial, batch.tokens, w[wte], positions, batch.positions, d.N, d.C, g.stream,
                      g.stage.vocab());
    g.rows.scatter(out, partial, d.N, d.C);
    g.state.release(0);
}

// Adds to the gradients of wte and wpe, from dresidual.
inline void embed_backward(Gpt& g, const Batch& batch, bool last_micro_batch) {
    Dims d = g.dims(batch);
    g.state.begin_gradients(0);
    auto dw = g.gradients(0);
    floatX *own = g.acts[0].dresidual, *all = g.tp.partial_sums(own);
    g.rows.gather(own, all, d.N, d.C);
    float* dpositions = g.rows.rank() == 0 ? dw[wpe] : nullptr;  // only rank 0 added positions
    embedding_backward(dw[wte], dpositions, g.acts[0].scratch, all, batch.tokens, batch.by_token,
                       batch.positions, batch.by_position, d.N, d.C, g.stream, g.stage.vocab());
    g.state.reduce_gradients(0, last_micro_batch);
}

// ---- head: the last norm, the classifier and the loss

inline NormLayer head_norm(const Gpt& g) {
    auto& a = g.acts[0];
    auto w = g.weights(g.last_norm_unit());
    auto dw = g.gradients(g.last_norm_unit());
    NormLayer norm = {g.norm, w[normfw], w[normfb], dw[normfw], dw[normfb]};
    norm.inp = a.residualf, norm.out = a.normf, norm.mean = a.normf_mean, norm.rstd = a.normf_rstd;
    norm.dinp_amax = a.dresidual_scale, norm.dinp_column_sums = a.dresidual_sums;
    return norm;
}

// Computes this rank's rows of normf from the output of the last block.
inline void head_forward(Gpt& g, const Batch& batch, const Sum& x) {
    g.state.acquire(g.last_norm_unit(), +1);
    stream_norm(g, head_norm(g), x, g.dims(batch).n);
    g.state.release(g.last_norm_unit());
}

// Returns all rows of normf, gathered for the classifier into all_norm1, which no block uses by then.
inline const floatX* classifier_input(Gpt& g, const Dims& d) {
    auto& a = g.acts[0];
    floatX* all = a.all_norm1 ? a.all_norm1 : a.normf;
    g.rows.gather(a.normf, all, d.N, d.C);
    return all;
}

// Computes losses, and the gradient of the logits, from logits of this rank's range of the vocabulary.
inline void classify_rows(Gpt& g, float* losses, const int* targets, float dloss, int rows,
                          bool want_gradient) {
    auto& a = g.acts[0];
    auto [first_token, V] = g.stage.vocab();
    int Vp = g.local_vocab(), ranks = g.rows.ranks();
    if (ranks > 1) {
        size_t part = (size_t)rows * classifier_part_floats;
        classifier_part(a.parts + g.rows.rank() * part, a.logits, targets, first_token, rows, V, Vp,
                        g.stream);
        g.rows.exchange(a.parts, part);
    }
    classifier(a.logits, losses, targets, dloss, rows, V, Vp, want_gradient, g.stream,
               {a.parts, ranks, first_token});  // a.parts is null on a single tensor rank
}

// For the last stage: adds the sum of the losses to the statistics. want_gradient: also scales each loss by
// dloss, writes dnorm, the gradient of normf, and adds to the gradient of the classifier's weights. Logits
// exist for only loss_chunk tokens at a time, so this layer runs both passes together.
inline void classify(Gpt& g, const Batch& batch, float dloss, bool want_gradient) {
    auto& a = g.acts[0];
    Dims d = g.dims(batch);
    int unit = g.classifier_unit(), C = d.C, Vp = g.local_vocab();
    g.state.acquire(unit, 0);
    const floatX* weight = g.weights(unit)[g.classifier_weight()];
    float* dweight = nullptr;
    const floatX* normf = classifier_input(g, d);
    floatX* dnorm = g.tp.partial_sums(a.dnorm);
    if (want_gradient) {
        g.state.begin_gradients(unit);
        dweight = g.gradients(unit)[g.classifier_weight()];
    }
    for (int begin = 0; begin < d.N; begin += g.workload.loss_chunk) {
        LaunchGuard::tick();
        int n = std::min(g.workload.loss_chunk, d.N - begin);
        const floatX* inp = normf + (size_t)begin * C;
        matmul_forward(a.logits, inp, weight, nullptr, n, C, Vp, g.stream);
        classify_rows(g, a.losses + begin, batch.targets + begin, dloss, n, want_gradient);
        if (!want_gradient) continue;
        matmul_backward_input(dnorm + (size_t)begin * C, a.logits, weight, n, C, Vp, g.stream);
        matmul_backward_weight(dweight, a.logits, inp, n, C, Vp, g.stream);
    }
    g.state.release(unit);
    if (want_gradient) g.rows.scatter(a.dnorm, dnorm, d.N, C);
    // all tensor ranks have the losses; only one adds them
    if (g.rows.rank() == 0) sum_losses(&g.stats.data->loss, a.losses, d.N, g.stream);
}

// Computes dresidual from the dnorm that classify() wrote. The last norm is stored in the last block's unit,
// so its gradients are reduced with those of that block.
inline void head_backward(Gpt& g, const Batch& batch, Matrices matrices) {
    int unit = g.last_norm_unit();
    Dims d = g.dims(batch);
    auto& a = g.acts[0];
    g.state.acquire(unit, -1);
    g.state.begin_gradients(unit, matrices);
    zero_async(a.dresidual, (size_t)d.n * d.C, g.stream);
    stream_norm_backward(g, head_norm(g), a.dresidual, a, d.n);
    g.state.release(unit);
}

// ----------------------------------------------------------------------------
// stage
// ----------------------------------------------------------------------------

// The layers are cut into parts, and each stage has one part per chunk. A task is one pass of one micro-batch
// through one part.

// Runs the forward pass of a task: from tokens (first part) or the stream that the previous part sent, to the
// stream for the next part or normf (last part).
inline void stage_forward(Gpt& g, const Batch& batch, const PipelineTask& task) {
    Dims d = g.dims(batch);
    int begin = g.stage.first_layer(task.chunk), end = g.stage.end_layer(task.chunk);
    if (task.part == 0) embed_forward(g, batch, task.input);
    Sum x = {task.input};
    for (int number = begin; number < end; number++) {
        LaunchGuard::tick();
        g.state.acquire(number + 1, +1);
        x = block_forward(g, Block(g, number, batch), x);
        g.state.release(number + 1);
    }
    if (task.part < g.stage.last_part())
        residual_forward(task.output, x.residual, x.delta, (size_t)d.n * d.C, g.stream);
    else
        head_forward(g, batch, x);
}

// Computes, for a gradient of the stream that another part sent, what a norm's backward pass would have left:
// its amax (fp8) and its column sums (bias).
inline void measure_stream_gradient(Gpt& g, const floatX* gradient, const Dims& d) {
    auto& a = g.acts[0];
    if (a.dresidual_scale) find_amax(a.dresidual_scale, gradient, (size_t)d.n * d.C, g.stream);
    if (!a.dresidual_sums) return;
    zero_async(a.dresidual_sums, d.C, g.stream);
    matmul_backward_bias(a.dresidual_sums, a.scratch, gradient, d.n, d.C, g.stream);
}

// Runs the backward pass of a task: from the loss (last part) or the gradient that the next part sent, to the
// gradients of the blocks and the stream's gradient for the previous part, or the gradients of the embedding
// tables (first part). After the last micro-batch of a step, each unit's gradients are summed over the ranks
// as soon as they are complete.
inline void stage_backward(Gpt& g, const Batch& batch, const PipelineTask& task, float dloss,
                           bool last_micro_batch) {
    bool now = task.work == PipelineWork::backward;
    Matrices matrices = now ? Matrices::overwritten : Matrices::added_to;
    if (task.part == g.stage.last_part()) {
        classify(g, batch, dloss, true);
        // embed_backward() adds to tied embeddings on this stage, and reduces them afterwards
        bool used_again = g.config.tie_embeddings && g.stage.has_embedding();
        if (!used_again) g.state.reduce_gradients(g.classifier_unit(), last_micro_batch);
        head_backward(g, batch, matrices);
    } else {
        measure_stream_gradient(g, task.gradient, g.dims(batch));
    }
    int begin = g.stage.first_layer(task.chunk), end = g.stage.end_layer(task.chunk);
    for (int number = end - 1; number >= begin; number--) {
        LaunchGuard::tick();
        g.state.acquire(number + 1, -1);
        g.state.begin_gradients(number + 1, matrices);
        block_backward(g, Block(g, number, batch), now ? WeightGradients::now : WeightGradients::later);
        g.state.release(number + 1);
        g.state.reduce_gradients(number + 1, last_micro_batch && now);
    }
    if (task.part == 0) embed_backward(g, batch, last_micro_batch);
}

// Computes the weight gradients of the blocks that stage_backward() deferred (zero-bubble). It reads
// activations and gradients, but no weights, so it acquires no unit.
inline void stage_weight_gradients(Gpt& g, const Batch& batch, const PipelineTask& task,
                                   bool last_micro_batch) {
    for (int number = g.stage.end_layer(task.chunk) - 1; number >= g.stage.first_layer(task.chunk);
         number--) {
        LaunchGuard::tick();
        // NgramMemory::backward has already computed the gradient of a table's matrix.
        g.state.begin_gradients(number + 1,
                                g.stage.has_table(number) ? Matrices::added_to : Matrices::overwritten);
        Block l(g, number, batch);
        weight_gradients(g.tp, l.linears());
        g.state.reduce_gradients(number + 1, last_micro_batch);
    }
}

// Runs this stage's list of actions on micro-batches of `tokens` tokens. load(micro_batch, slot) copies a
// micro-batch to the device when its first action is due; work(batch, task) runs an action.
template <typename Load, typename Work>
void run_micro_batches(Gpt& g, const std::vector<PipelineAction>& actions, int tokens, Load&& load,
                       Work&& work) {
    std::vector<Batch> batches(g.stage.capacity.micro_batches);
    std::vector<int> loaded(batches.size(), -1);
    g.activations.begin_run(pipeline_capacity(actions, g.stage.chunks()).has_backward);
    size_t sent = (size_t)g.rows.own_rows(tokens) * g.config.channels;
    recorder.begin_passes(
        (int)actions.size(),
        actions.empty() ? 0 : std::ranges::max(actions, {}, &PipelineAction::micro_batch).micro_batch + 1);
    LaunchGuard guard;
    g.pipeline.run(actions, sent, [&](const PipelineTask& task) {
        LaunchGuard::tick();
        int slot = task.batch_slot;
        if (loaded[slot] != task.micro_batch) {
            batches[slot] = load(task.micro_batch, slot);
            batches[slot].rows = g.tables.places(task.micro_batch, slot);
        }
        loaded[slot] = task.micro_batch;
        g.bind_activations(task);
        work(batches[slot], task);
    });
}

// Computes normf on the last stage from tokens.
inline void forward(Gpt& g, const Batch& batch) {
    auto load = [&](int, int) { return batch; };
    run_micro_batches(g, forward_actions(g.stage.pipeline(1)), batch.B * batch.T, load,
                      [&](const Batch& batch, const PipelineTask& task) { stage_forward(g, batch, task); });
}

// ----------------------------------------------------------------------------
// step
// ----------------------------------------------------------------------------

// Adds the losses of micro-batches load(0, slot), load(1, slot) ... to the statistics, and the gradients of
// dloss times these losses to the gradients. ends_step: these are the last micro-batches of the step.
template <typename Load>
void accumulate_gradients(Gpt& g, int micro_batches, Load&& load, float dloss, bool ends_step = true) {
    auto actions = pipeline_actions(g.stage.pipeline(micro_batches), g.stage.number());
    run_micro_batches(g, actions, g.workload.B * g.workload.T, load,
                      [&](const Batch& batch, const PipelineTask& task) {
                          PassOfStep pass = {task.work == PipelineWork::forward, task.micro_batch == 0,
                                             ends_step && task.micro_batch == micro_batches - 1};
                          SparedMultiprocessors spared(g.spared(pass));
                          g.tp.overwrites = g.state.overwrites(pass.first);
                          auto key = [&] { return task_key(batch, task, pass, dloss, g.acts); };
                          TracePause in_a_graph(g.graphs.on);
                          g.graphs.run(key, g.stream, [&] {
                              switch (task.work) {
                              case PipelineWork::forward:
                                  return stage_forward(g, batch, task);
                              case PipelineWork::weight_gradient:
                                  return stage_weight_gradients(g, batch, task, pass.last);
                              case PipelineWork::backward:
                              case PipelineWork::input_gradient:
                                  return stage_backward(g, batch, task, dloss, pass.last);
                              }
                          });
                      });
}

// Starts a step: resets gradients and statistics.
inline void zero_gradients(Gpt& g, Matrices matrices = Matrices::overwritten) {
    g.state.zero_gradients(matrices);
    g.stats.clear(g.stream);
}

// Returns the samples of this rank's micro-batches, by their number in the step.
inline std::function<BatchRequest(int)> requests(const StepShare& share) {
    return [share](int micro) -> BatchRequest { return {share.sample(micro), share.samples(micro)}; };
}

inline StepShare step_share(const Gpt& g, uint64_t first, int micro_batches) {
    return {g.mesh.data_ranks(), g.mesh.data_rank(), g.state.ranks_in_step(), first,
            micro_batches,       g.workload.B};
}

// Computes the losses and gradients of a rank's `micro_batches` micro-batches. load: as in
// run_micro_batches(); token_share: a token's weight in the loss
template <typename Load>
void step_gradients(Gpt& g, const Lookups& lookups, int micro_batches, Load&& load, float token_share) {
    zero_gradients(g);
    g.tables.look_up(lookups);
    g.stats.count_rows(g.tables.sent(), g.tables.waited_for(), g.stream);
    accumulate_gradients(g, micro_batches, load, token_share);
    g.tables.sum_gradients();
}

// Computes those of this rank's part of `micro_batches` micro-batches, which begin at sample `first`.
inline void step_gradients(Gpt& g, DeviceBatches& batches, uint64_t first, int micro_batches) {
    StepShare share = step_share(g, first, micro_batches);
    step_gradients(g, batches.lookups(share.joined(), requests(share)), share.joined(),
                   batches.loads(requests(share)), share.of_token(g.workload.sequence()));
}

// ----------------------------------------------------------------------------
// passes outside training steps
// ----------------------------------------------------------------------------

// The passes that generation and evaluation (comm/inference.h) use, and a training run uses between steps.
struct GptPasses final : ModelInTraining {
    Gpt& g;
    std::optional<NgramCheckpoint> saved_tables;

    explicit GptPasses(Gpt& g)
        : ModelInTraining({g.config, g.workload, g.mesh, g.stream, g.stage.capacity.micro_batches,
                           g.tables.most_at_once(inference_micro_batches(g.mesh.shape.pp)),
                           g.state.cuts_params() || g.tables.any(),
                           g.layout.size() / (g.state.cuts_params() ? g.mesh.shape.shards() : 1)},
                          g.state, g.stage),
          g(g) {
        if (g.tables.any()) saved_tables.emplace(g.tables, g.stage.layout());
    }

    void look_up(int count, const std::function<std::vector<NgramTokens>(int)>& tokens) override {
        g.tables.look_up({0, count, tokens});
    }

    Logits logits(const Batch& batch, int texts) override {
        forward(g, batch);
        if (!g.stage.has_head()) return {};
        const floatX* normf = classifier_input(g, g.dims(batch)) + (size_t)batch.last * g.config.channels;
        int unit = g.classifier_unit(), Vp = g.local_vocab(), ranks = g.rows.ranks();
        size_t part = (size_t)texts * Vp;
        floatX* all = g.acts[0].logits;
        g.state.acquire(unit, 0);
        matmul_forward(all + g.rows.rank() * part, normf, g.weights(unit)[g.classifier_weight()], nullptr,
                       texts, g.config.channels, Vp, g.stream);
        g.state.release(unit);
        g.rows.exchange(all, part);
        if (g.rows.rank() != 0 || g.contexts.cut().rank != 0) return {};
        std::vector<floatX> values(ranks * part);
        copy_to_host(values.data(), all, values.size(), g.stream, g.mesh);
        return joined_logits(values, texts, g.stage, ranks);
    }

    void check_tables() const override { g.tables.synchronize(); }

    void copy_row(int from, int to, int length) override {
        Dims d(g.config, g.rows.ranks(), 1, 1);
        size_t position = (size_t)2 * d.NKV * d.HS;
        auto copy = [&](floatX* rows, size_t width, size_t columns) {
            if (rows) copy_async(rows + to * width, rows + from * width, columns, g.stream);
        };
        for (const Activations& a : g.acts) {
            copy(a.cache, g.workload.cache_length * position, length * position);
            copy(a.filter1_state, d.H, d.H);
            copy(a.filter2_state, d.C, d.C);
        }
    }

    // Adds the losses of `count` batches to the statistics; the last stage calls added(number) after each.
    template <typename Loader, typename Added>
    void add_losses(int count, Loader&& load, Added&& added) {
        auto work = [&](const Batch& batch, const PipelineTask& task) {
            stage_forward(g, batch, task);
            if (task.part < g.stage.last_part()) return;
            classify(g, batch, 0, false);
            added(task.micro_batch);
        };
        run_micro_batches(g, forward_actions(g.stage.pipeline(count)), g.workload.B * g.workload.T, load,
                          work);
    }

    void losses(int count, const Load& load, const Take& take) override {
        g.stats.clear(g.stream);
        add_losses(count, load, [&](int micro_batch) {
            if (g.rows.rank() != 0) return;  // each context rank has the losses of its own tokens
            std::vector<float> losses((size_t)g.workload.B * g.workload.T);
            copy_to_host(losses.data(), g.acts[0].losses, losses.size(), g.stream, g.mesh);
            take(micro_batch, losses);
        });
    }

    float mean_loss(DeviceBatches& batches, uint64_t samples, const NotedError& error) override {
        g.stats.clear(g.stream);
        uint64_t B = g.workload.B, of_all = B * g.mesh.data_ranks();
        int count = (int)ceil_div(samples, of_all), some = g.tables.most_at_once(count);
        for (int begin = 0; begin < count; begin += some) {
            auto request = [=, rank = g.mesh.data_rank()](int micro) -> BatchRequest {
                uint64_t first = (begin + micro) * of_all + B * rank;
                return {first, (int)std::min(B, samples - std::min(samples, first))};
            };
            int here = std::min(some, count - begin);
            g.tables.look_up(batches.lookups(here, request));
            add_losses(here, batches.loads(request), [](int) {});
        }
        if (!error.empty()) g.stats.poison(g.stream);
        g.state.sum_statistics(g.stats.data);
        g.stats.send(g.stream);
        return g.stats.result((double)samples * g.workload.sequence(), g.mesh).loss;
    }

    void try_gradients(DeviceBatches& batches, uint64_t first, int micro_batches) override {
        step_gradients(g, batches, first, micro_batches);
        g.graphs.clear(g.stream);  // the algorithms of products may change now
    }

    void gradients_beside(DeviceBatches& batches, uint64_t first) override {
        // Zeroes matrices too: a unit's gradients are examined when only some of the passes over it are done.
        zero_gradients(g, Matrices::added_to);
        float of_token = 1.0f / ((float)g.workload.B * g.workload.sequence());
        auto request = [=, B = g.workload.B](int) -> BatchRequest { return {first, B}; };
        Lookups beside = batches.lookups(1, request);
        beside.reader = nullptr;  // some ranks may have listed these rows ahead; all must do the same
        g.tables.look_up(beside);
        accumulate_gradients(g, 1, batches.loads(request), of_token, false);
    }

    Stateful* tables() override { return saved_tables ? &*saved_tables : nullptr; }
    void begin_tables(uint64_t seed, std::vector<uint64_t> folded) override {
        g.tables.own().forget();
        g.tables.set_hash(seed, std::move(folded));
    }

    void weights_changed() override { g.products.weights_changed(g.graphs.on); }
};

// ----------------------------------------------------------------------------
// training
// ----------------------------------------------------------------------------

// While the device runs a step, lists the table rows of the next step, if one is expected to follow.
inline void look_ahead(Gpt& g, const TrainingRun& run) {
    const int next = run.at.step + 1;
    if (!g.tables.any() || next >= run.o.steps) return;
    uint64_t first = run.at.samples + samples_of_step(run.o, run.at.step);
    StepShare share = step_share(g, first, micro_batches_of_step(run.o, next));
    g.tables.look_ahead(run.batches->lookups(share.joined(), requests(share), true));
}

// Launches all work of one step, then waits for the result. A rank that hits an error, such as a failed
// launch, finishes the step but makes the loss NaN on all ranks, so that no rank changes its weights.
inline void step(Gpt& g, TrainingRun& run) {
    Phase phase("step");
    const int number = run.at.step;
    const auto targets = (double)tokens_of_step(run.o, number);
    run.begin_step();
    Optimizer optimizer = make_optimizer(run.o, number);
    if (batch_changes(run.o, number)) g.graphs.clear(g.stream);  // graphs contain a token's loss weight
    {
        LaunchGuard guard;
        {
            NotedLaunchErrors noted(run.error);
            step_gradients(g, *run.batches, run.at.samples, micro_batches_of_step(run.o, number));
        }
        run.tell_ranks(g.stats);
        // The statistics are sent before the weights change, so that the host can read them and launch the
        // next step while the optimizer runs.
        g.state.update(g.stats.data, optimizer, run.spikes.limits(run.at, targets),
                       [&] { g.stats.send(g.stream); });
        look_ahead(g, run);
        g.tables.update(make_adagrad(run.o, number), &g.stats.data->scale);
        run.timings->end_step();
    }
    run.end_step(g.stats.result(targets, g.mesh), optimizer.learning_rate);
}

// Records the work of steps in the ledger, for plans; see comm/plan_times.h.
void record_steps(const ModelConfig& config, const Workload& workload, const ZeroSettings& settings,
                  const Optimizer& optimizer, const Layout& layout, const MeshPosition& position,
                  const std::vector<int>& micro_batches) {
    Mesh mesh(layout.mesh, position);
    Gpt g(config, workload, settings, mesh, layout);
    g.graphs.on = true;  // identical passes are recorded once
    ledger->forget();    // building the model is not part of a step
    const int T = workload.sequence(), contexts = workload.contexts;
    DeviceArray<int> numbers(batch_ints(workload.B, T, contexts));
    Batch batch = {batch_at((const int*)numbers.data, workload.B, T, contexts), workload.B, workload.T};
    batch.doc_start = nullptr;
    auto load = [&](int, int) { return batch; };
    auto update = [&](size_t next) {
        g.state.update(g.stats.data, optimizer, 0, [&] { ledger->end_step(g.stream); });
        if (next < micro_batches.size()) g.tables.look_ahead({0, micro_batches[next], nullptr});
        g.tables.update({}, &g.stats.data->scale);
    };
    update(0);
    for (size_t i = 0; i < micro_batches.size(); i++) {
        step_gradients(g, Lookups{0, micro_batches[i], nullptr}, micro_batches[i], load, 1.0f);
        ledger->end_passes();
        update(i + 1);
    }
}

inline void train(const TrainingLine& line, const World& world) {
    TrainingPlan plan = open_training(line, world);
    const Options& o = line.options;
    const Layout& layout = plan.memory->layout;
    Mesh mesh(world, layout.mesh, nullptr,
              mesh_traffic(o, layout, o.micro_batch, o.sequence_length, o.reduce_dtype));
    plan.memory->check_groups(world);
    print_ranks(o, world, mesh, layout);
    Gpt g(o, plan.memory->workload, zero_settings(o, sizeof(floatX), threads_per_rank(world)), mesh, layout);
    GptPasses passes(g);
    TrainingRun run(line, world, plan, passes);
    or_abort(world, [&] {
        g.graphs.on = wants_graphs(o, run.gemm.rate);
        print_rate(run.gemm.rate, g.graphs.on);
        run.begin();
    });
    run.rescue_from_errors([&] {
        while (run.goes_on()) step(g, run);
    });
    run.finish();
}

// ----------------------------------------------------------------------------
// commands
// ----------------------------------------------------------------------------

// A model loaded from a checkpoint, for inference only.
struct LoadedGpt {
    Gpt g;
    GptPasses passes{g};

    LoadedGpt(const InferencePlan& plan, const Mesh& mesh, const CheckpointReader& checkpoint,
              const World& world)
        : g(plan.options, plan.workload, plan.settings, mesh, plan.layout) {
        ZeroCheckpoint state(g.state, [&](const MeshPosition& position) {
            return parameter_layout(plan.options, plan.layout, position, false);
        });
        load_checkpoint(passes.contributors(state), world, checkpoint, true);
    }
};

inline std::shared_ptr<ModelPasses> load_model(const InferencePlan& plan, const Mesh& mesh,
                                               const CheckpointReader& checkpoint, const World& world) {
    auto loaded = std::make_shared<LoadedGpt>(plan, mesh, checkpoint, world);
    return {loaded, &loaded->passes};
}

// Runs the command of a rank, selected by the type of its options; data/options/help.h has the names.
struct CommandWork {
    const World& world;

    void operator()(const TrainingLine& line) const { train(line, world); }
    void operator()(const PlanLine& line) const { plan_or_measure(line, world); }
    void operator()(const SelftestOptions& o) const { selftest(o, world); }
    void operator()(const SampleOptions& o) const { sample(o, world, load_model); }
    void operator()(const EvalOptions& o) const { evaluate_runs(o, world, load_model); }
    void operator()(const FileCommand& command) const {
        run_on_files(command, [](const Options& model) {
            return checkpoint_tensors(parameter_layout(model), {.training = false});
        });
    }
};

// The program as a function, so that test programs can run it too (test/program/train_gpt.cu).
inline int run_train_gpt(int argc, char** argv) {
    return run_program(argc, argv, [](const CommandLine& line, const World& world) {
        std::visit(CommandWork{world}, line);
    });
}

#ifndef TESTING
int main(int argc, char** argv) {
    return run_train_gpt(argc, argv);
}
#endif
