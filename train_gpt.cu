/*
train_gpt pre-trains GPT-style transformers. This is a training step, and where each of its lines lives:

    for each micro-batch, in the order of the pipeline's schedule        run_micro_batches; comm/pipeline.h
        x = wte[tokens] + wpe[positions]                                 embed_forward
        for each layer                                                   stage_forward
            x = x + attention(norm(x));  x = x + mlp(norm(x))            block_forward
        loss = cross_entropy(norm(x) wte^T, targets)                     head_forward, classify
        the gradients of all that, from the last line to the first       stage_backward, *_backward
        sum each unit's gradients over the data ranks                    ZeroState::reduce_gradients
    clip the gradients by their global norm                              ZeroState::update
    step the parameters that this rank owns, by AdamW or another         kernels/adamw.cuh
    bring new parameters to all who use them                             ZeroState::publish in comm/zero.h

On one process the lines about other ranks do nothing, and the rest is the same. From top to bottom:

    model         what a rank has of it, and the memory that it takes
    layers        attention, MLP, block, embedding, head: each forward, with its backward directly under it
    stage         the part of both passes that one pipeline stage makes
    step          micro-batches, statistics, update
    sampling      text from a model, with a key/value cache
    training      the train command: check, build, loop
    commands      sample, eval; the table of all commands; main

The arithmetic of a layer is in kernels/, one file each: the formula, the plain loop that specifies it, the
CUDA kernels. How the work is cut over ranks is in comm/: matrices over tensor ranks in tensor_parallel.h,
parameters in zero.h. The parameters are one table, of name, shape, initialisation, decay and shards, beside
the switches that they follow from: data/options/model_config.h. The activations are another, of name, size
and lifetime: comm/activations.h. What is read and written on disk, and what the commands make of passes
through a model, is in data/.
*/
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/agreement.h"            // check_same_program, check_same_options: ranks compare what they have
#include "comm/activations.h"          // Workload, ActivationMemory, ActivationArrays
#include "comm/fault_checks.h"         // FaultChecks: devices that compute wrongly
#include "comm/memory_plan.h"          // memory_plan, stream_size
#include "comm/batches.h"              // batches read once for all ranks of a machine
#include "comm/plan_report.h"          // the plan command
#include "comm/run_checkpoints.h"      // RunCheckpoints: a run saved, and gone on with
#include "comm/selftest.h"             // the selftest command
#include "comm/settings.h"             // zero_settings, make_optimizer, training_workload
#include "comm/run_device.h"           // GemmRate, print_rate
#include "comm/spikes.h"               // SpikeGuard: steps that are left out
#include "comm/plan_times.h"           // prediction_text
#include "comm/tensor_parallel.h"      // column_parallel, row_parallel
#include "comm/timings.h"              // Timings: when each rank did what
#include "comm/training_plan.h"        // TrainingPlan, check_training: what is refused before a run begins
#include "comm/watchdog.h"             // watch_ranks
#include "comm/whole_tensors.h"        // initialize, raise_not_finite, trust_ratios
#include "comm/zero.h"                 // ZeroState: parameters, gradients and optimizer state, cut over ranks
#include "data/commands/commands.h"    // the command line, and commands without a device
#include "data/commands/eval.h"        // the loss on token files, multiple-choice questions
#include "data/commands/generation.h"  // TextWriter, write_texts, the sample command
#include "data/run/run_report.h"       // the header of a run
#include "data/run/status_line.h"      // the last line of the screen
#include "data/run/step_log.h"         // shows and keeps a record of each step
#include "data/tokens/token_loader.h"  // TokenLoader
#include "kernels/attention.cuh"       // attention_forward, attention_backward
#include "kernels/classifier.cuh"      // classifier, sum_losses
#include "kernels/elementwise.cuh"     // residual_forward
#include "kernels/embedding.cuh"       // embedding_forward, embedding_backward
#include "kernels/fill.cuh"            // fill
#include "kernels/kv_cache.cuh"        // kv_cache_append, kv_cache_attention
#include "kernels/norm.cuh"            // norm_forward, residual_norm_forward, norm_backward
#include "kernels/qk_norm.cuh"         // qk_norm_forward, qk_norm_backward
#include "kernels/rope.cuh"            // rope_forward, rope_backward
#include "kernels/swiglu.cuh"          // swiglu_forward, swiglu_backward

// ----------------------------------------------------------------------------
// model
// ----------------------------------------------------------------------------

struct Gpt {
    ModelConfig config;
    Workload workload;
    const Mesh& mesh;
    Stage stage;             // this rank's part of the model,
    ParameterLayout layout;  // and where its parameters lie
    const Norm norm = norm_kernel(config.norm);
    const Gelu gelu = gelu_kernel(config.mlp);
    const bool swiglu = config.mlp == MlpKind::swiglu, parallel = config.block == BlockKind::parallel;
    // the two halves of a block stand alone, unless the block is parallel
    const Branch first = parallel ? Branch::first : Branch::alone,
                 last = parallel ? Branch::last : Branch::alone;

    ComputeStream compute;
    cudaStream_t stream = compute.stream;
    Arena memory;       // holds everything that follows
    ZeroState state;    // parameters, gradients, optimizer state
    Pipeline pipeline;  // activations from stage to stage
    ActivationMemory<Activations> activations;
    std::vector<Activations>& acts;           // each layer's, for the micro-batch that is worked on
    BlockProducts products;                   // products with the blocks' matrices
    SequenceParallel rows;                    // activations' rows, over tensor ranks
    TensorParallel tp;                        // linear layers over tensor ranks
    float* rope;                              // (positions, R/2, 2) cosines and sines
    DeviceArray<StepStatistics> stats{1};     // (1)
    HostArray<StepStatistics> sent_stats{1};  // the host's copy, valid once it is past the event
    Event stats_sent;
    Graphs graphs;                      // graphs of the work on a micro-batch
    std::atomic<int> micro_batches{0};  // micro-batches that are worked on

    // layout.mesh is the mesh's shape.
    Gpt(const ModelConfig& config, const Workload& workload, const ZeroSettings& settings, const Mesh& mesh,
        const Layout& layout);
    Gpt(const ModelConfig& config, const Workload& workload, const ZeroSettings& settings)
        : Gpt(config, workload, settings, one_process(), {}) {}
    ~Gpt() { cudaStreamSynchronize(stream); }

    Dims dims(const Batch& batch) const { return {config, rows.ranks(), batch.B, batch.T}; }

    // Views into a unit. What they show is there while the unit is acquired, or its gradients have begun.
    UnitTensors<floatX> weights(int unit) const { return layout.tensors(unit, state.params(unit)); }
    UnitTensors<float> gradients(int unit) const {
        return workload.training ? layout.tensors(unit, state.grads(unit)) : UnitTensors<float>();
    }
    // the units of the last norm, and of the classifier's weights (Vp, C)
    int last_norm_unit() const { return config.layers; }
    int classifier_unit() const { return config.tie_embeddings ? 0 : layout.last_unit(); }
    Tensor classifier_weight() const { return config.tie_embeddings ? wte : headw; }
    int local_vocab() const { return padded_vocab(config, rows.ranks()); }

    // Points acts to what is kept for this task.
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
      layout(parameter_layout(config, mesh.shape.shard, stage.units())),
      state(memory, layout, mesh, settings, stream),
      pipeline(memory, mesh, cut.pipeline, stage.room, stream_size(config, workload, cut), stream,
               settings.overlap),
      activations(memory, activation_table(config, workload, stage), stage, config.layers),
      acts(activations.views),
      products(memory, fp8_sizes(config, workload, stage), stream),
      rows(mesh.tensor(), cut.row_chunks, settings.overlap, stream),
      tp{rows, products, stream, acts[0].partial, acts[0].scratch},
      rope(memory.of("activations").take<float>(rope_floats(config, workload))) {
    std::vector<float> angles = rope_angles(config, workload);
    if (!angles.empty()) copy_to_device(rope, angles.data(), angles.size(), stream);
    cudaCheck(cudaStreamSynchronize(stream));
}

// ----------------------------------------------------------------------------
// layers
// ----------------------------------------------------------------------------

// A norm, of the residual stream or within a local filter, of the own rows of this rank.
struct NormLayer {
    Norm norm;
    floatX *inp, *out;  // (n, C)
    float *mean, *rstd;
    const floatX *weight, *bias;
    float *dweight, *dbias;
    // (1) In fp8: become the largest element of the rows it makes, and of its input's gradient; or null.
    float *largest = nullptr, *dinp_largest = nullptr;
    float* dinp_sums = nullptr;  // (C) become the sums of that gradient's columns; or null
};

// A block, as both passes see it: its sizes, weights, gradients and activations, and what it is made of. It
// is made for each block and micro-batch; its weights are there while the unit is acquired.
struct Layer {
    const Batch& batch;
    Dims d;
    Activations& a;
    Fp8Activations fp8;
    UnitTensors<floatX> w;
    UnitTensors<float> dw;
    AttentionShape heads;
    QkvRows rows;
    Rotation rope;
    NormLayer norm1, norm2, filternorm;
    Linear qkv, attproj, fc, fcproj;
    Linear filter1 = {}, filter2 = {}, qk = {}, v = {};  // a local filter takes the place of qkv
    float* dqkvb = nullptr;  // (QKV) the gradient of its bias, if the backward pass of attention makes it

    Layer(Gpt& g, int number, const Batch& batch)
        : batch(batch),
          d(g.dims(batch)),
          a(g.acts[number]),
          fp8(a, d, g.swiglu),
          w(g.weights(number + 1)),
          dw(g.gradients(number + 1)),
          heads(self_attention_shape(d.B, d.T, d.NH, d.NKV, d.HS, window_of_layer(g.config, number),
                                     batch.doc_start)),
          rows{d.N, d.NH, d.NKV, d.HS},
          rope{g.rope, batch.positions, d.R},
          norm1{g.norm,    a.residual, a.norm1,    a.norm1_mean,        a.norm1_rstd,           w[norm1w],
                w[norm1b], dw[norm1w], dw[norm1b], fp8.norm1.largest(), fp8.dresidual.largest()},
          norm2{g.norm,    a.residual2, a.norm2,    a.norm2_mean,        a.norm2_rstd,           w[norm2w],
                w[norm2b], dw[norm2w],  dw[norm2b], fp8.norm2.largest(), fp8.dresidual.largest()},
          filternorm{Norm::rmsnorm,  a.filter_sum, a.filtered,      nullptr, a.filter_rstd,
                     w[filternormw], nullptr,      dw[filternormw], nullptr, fp8.filtered.largest()} {
        using enum Parallel;
        auto linear = [&](Parallel parallel, int C, int OC, Tensor weight, Tensor bias,
                          const LinearInput& inp, floatX* dout) {
            return Linear{parallel, d.N, C, OC, w[weight], w[bias], dw[weight], dw[bias], inp, dout, g.gelu};
        };
        RowsInPlace in_place(g.config, g.workload.recompute);
        floatX* all_norm2 = a.all_norm2 ? a.all_norm2 : a.all_norm1;
        LinearInput x1 = gathered_input(a.norm1, a.all_norm1, fp8.norm1, in_place.norm1),
                    x2 = gathered_input(a.norm2, all_norm2, fp8.norm2, in_place.norm2),
                    xf = gathered_input(a.filtered, a.all_filtered, fp8.filtered, in_place.filtered);
        // The output of each half of the block is added to the stream, so it has the stream's gradient. That
        // gradient is copied if all rows come together, or if weight gradients are made later, when the
        // stream's has changed.
        floatX* dmlp_out = a.dmlp_out ? a.dmlp_out : a.dresidual;
        floatX* datt_out = a.datt_out ? a.datt_out : dmlp_out;
        qkv = linear(column, d.C, d.QKV, qkvw, qkvb, x1, a.dqkv);
        if (attention_makes_bias_gradient(g.config)) dqkvb = std::exchange(qkv.dbias, nullptr);
        attproj = linear(row, d.A, d.C, attprojw, attprojb, {a.att, fp8.att}, datt_out);
        fc = linear(column, d.C, d.F1, fcw, fcb, g.parallel ? x1 : x2, a.dfc);
        fcproj = linear(row, d.F, d.C, fcprojw, fcprojb, {a.act, fp8.act}, dmlp_out);
        qkv.dout8 = fp8.dqkv, fc.dout8 = fp8.dfc, attproj.dout8 = fcproj.dout8 = fp8.dresidual;
        attproj.dout_sums = fcproj.dout_sums = norm1.dinp_sums = norm2.dinp_sums = a.dresidual_sums;
        if (!g.swiglu) fc.gelu_out = a.act, fc.gelu_largest = fp8.act.largest();
        if (!g.swiglu) fcproj.gelu_inp = a.fc, fcproj.gelu_largest = fp8.dfc.largest();
        if (!g.config.local_filter) return;
        auto convolution = [&](Linear l, floatX* dtaps, floatX* state) {
            if (state) state += (size_t)batch.row * l.OC;
            l.taps = {a.taps, dtaps, state, {d.N, d.T, batch.doc_start}};
            if (batch.past > 0) l.taps.rows.before = l.taps.state;
            return l;
        };
        floatX* dsum = a.dfilter_out ? a.dfilter_out : a.dfilter_sum;
        filter1 = convolution(linear(column, d.C, d.H, filter1w, filter1b, x1, a.dfilter1), a.dtaps1,
                              a.filter1_state);
        filter2 = convolution(linear(row, d.H, d.C, filter2w, filter2b, {a.filter1, fp8.filter1}, dsum),
                              a.dtaps2, a.filter2_state);
        qk = qkv.outputs(0, rows.qk_heads() * d.HS, xf, a.dqk_and_v);
        v = qkv.outputs(qk.OC, d.NKV * d.HS, x1, a.dqk_and_v + (size_t)d.N * qk.OC);
    }

    // All that the block has, the last first.
    std::vector<const Linear*> linears() const {
        if (!filter1.weight) return {&fcproj, &fc, &attproj, &qkv};
        return {&fcproj, &fc, &attproj, &v, &qk, &filter2, &filter1};
    }
};

// The seam between two layers: the residual stream, and what the first adds to it. Their sum is left to the
// norm that reads it, which makes it in the same pass over memory.
struct Sum {
    const floatX *residual, *delta;  // (n, C)
};

// ---- norms

inline void stream_norm(Gpt& g, const NormLayer& l, int n) {
    norm_forward(l.norm, l.out, l.mean, l.rstd, l.inp, l.weight, l.bias, n, g.config.channels,
                 g.config.norm_eps, g.stream, l.largest);
}

// The norm of a sum, which is written to l.inp in the same pass.
inline void stream_norm(Gpt& g, const NormLayer& l, const Sum& x, int n) {
    residual_norm_forward(l.norm, l.inp, l.out, l.mean, l.rstd, x.residual, x.delta, l.weight, l.bias, n,
                          g.config.channels, g.config.norm_eps, g.stream, l.largest);
}

// Adds to the gradient dinp of the norm's input what the gradient dnorm of its own rows comes to.
inline void stream_norm_backward(Gpt& g, const NormLayer& l, floatX* dinp, const Activations& a, int n) {
    norm_backward(l.norm, dinp, l.dweight, l.dbias, a.scratch, a.dnorm, l.inp, l.weight, l.mean, l.rstd, n,
                  g.config.channels, g.stream, l.dinp_largest, l.dinp_sums);
}

// ---- local filter: queries and keys = qk(filternorm(x + filter2(filter1(x)))), values = v(x), x = norm1
//
// Localized filtering attention (Wu et al., "YUAN 2.0: A Large Language Model with Localized Filtering-based
// Attention", 2023): queries and keys are made of a token and the two before it, by two convolutions over two
// tokens each. What comes before a document, or before the first convolution's outputs there, is zero.

// For the next token of each text that is written, if any is.
inline void keep_taps(Gpt& g, const Linear& l, const Batch& batch) {
    if (!l.taps.state) return;
    copy_columns(l.taps.state, l.OC, l.taps.out + (size_t)batch.last * 2 * l.OC, (size_t)batch.T * 2 * l.OC,
                 l.OC, batch.B, g.stream);
}

inline void filtered_qkv(Gpt& g, const Layer& l, floatX* qkv) {
    auto& a = l.a;
    const Linear &qk = l.qk, &v = l.v;
    column_parallel(g.tp, l.filter1, a.filter1, Branch::first);
    keep_taps(g, l.filter1, l.batch);
    row_parallel(g.tp, l.filter2, a.delta);
    keep_taps(g, l.filter2, l.batch);
    stream_norm(g, l.filternorm, {a.norm1, a.delta}, l.d.n);
    floatX* values = a.qk_and_v + (size_t)l.d.N * qk.OC;
    column_parallel(g.tp, qk, a.qk_and_v);
    column_parallel(g.tp, v, values, Branch::middle);  // all rows of norm1 are in place
    copy_columns(qkv, l.d.QKV, a.qk_and_v, qk.OC, qk.OC, l.d.N, g.stream);
    copy_columns(qkv + qk.OC, l.d.QKV, values, v.OC, v.OC, l.d.N, g.stream);
}

// Makes dnorm of dqkv, but for the part of it that goes around the filter: dfilter_sum.
inline void filtered_qkv_backward(Gpt& g, const Layer& l, WeightGradients weights) {
    auto& a = l.a;
    const Linear &qk = l.qk, &v = l.v;
    copy_columns(qk.dout, qk.OC, a.dqkv, l.d.QKV, qk.OC, l.d.N, g.stream);
    copy_columns(v.dout, v.OC, a.dqkv + qk.OC, l.d.QKV, v.OC, l.d.N, g.stream);
    column_parallel_backward(g.tp, qk, a.dnorm, Branch::alone, weights);
    cudaCheck(cudaMemsetAsync(a.dfilter_sum, 0, (size_t)l.d.n * l.d.C * sizeof(floatX), g.stream));
    stream_norm_backward(g, l.filternorm, a.dfilter_sum, a, l.d.n);
    row_parallel_backward(g.tp, l.filter2, a.dfilter_sum, a.dfilter1, Branch::alone, weights, v);
    column_parallel_backward(g.tp, v, a.dnorm, Branch::first, weights);
    column_parallel_backward(g.tp, l.filter1, a.dnorm, g.parallel ? Branch::middle : Branch::last, weights);
}

// ---- attention: att = softmax(q k^T) v of qkv(norm1); attproj adds it to the stream

// Queries and keys with their own norm, if they have one, and with their positions, if these are rotations.
inline void finish_qkv(Gpt& g, const Layer& l) {
    auto& a = l.a;
    if (g.config.qk_norm) {
        qk_norm_forward(a.qkv, a.qk_rstd, a.qkv_raw, l.w[qnormw], l.w[knormw], l.rope, l.rows,
                        g.config.norm_eps, g.stream);
    } else if (l.d.R > 0) {
        rope_forward(a.qkv, l.rope, l.rows, g.stream);
    }
}

// The own rows of norm1 are in place. Writes qkv and att.
inline void attention_hidden(Gpt& g, const Layer& l) {
    auto& a = l.a;
    const Dims& d = l.d;
    const Batch& batch = l.batch;
    floatX* qkv = g.config.qk_norm ? a.qkv_raw : a.qkv;
    if (g.config.local_filter)
        filtered_qkv(g, l, qkv);
    else
        column_parallel(g.tp, l.qkv, qkv, g.first);
    finish_qkv(g, l);
    if (int limit = g.workload.cache_length) {
        KvCacheShape shape = kv_cache_shape(d.B, d.T, limit, batch.past, d.NH, d.NKV, d.HS, l.heads.window);
        floatX* cache = a.cache + (size_t)batch.row * limit * shape.row();
        kv_cache_append(cache, a.qkv, shape, g.stream);
        if (batch.past > 0) return kv_cache_attention(a.att, a.qkv, cache, shape, g.stream);
    }
    attention_forward(a.att, a.lse, a.qkv, l.heads, g.stream, l.fp8.att.largest());
}

inline void attention_forward(Gpt& g, const Layer& l) {
    attention_hidden(g, l);
    row_parallel(g.tp, l.attproj, l.a.delta, g.first);
}

// Goes from the stream's gradient to that of norm1.
inline void attention_backward(Gpt& g, const Layer& l, WeightGradients weights) {
    auto& a = l.a;
    const Linear& next = g.config.local_filter ? l.qk : l.qkv;
    row_parallel_backward(g.tp, l.attproj, a.dresidual, a.datt, g.first, weights, next);
    attention_backward(a.dqkv, a.scratch, a.datt, a.qkv, a.att, a.lse, l.heads, g.stream, l.dqkvb);
    if (g.config.qk_norm) {
        qk_norm_backward(a.dqkv, l.dw[qnormw], l.dw[knormw], a.scratch, a.dqkv, a.qkv_raw, a.qk_rstd,
                         l.w[qnormw], l.w[knormw], l.rope, l.rows, g.stream);
    } else if (l.d.R > 0) {
        rope_backward(a.dqkv, l.rope, l.rows, g.stream, l.fp8.dqkv.largest());
    }
    if (g.config.local_filter)
        filtered_qkv_backward(g, l, weights);
    else
        column_parallel_backward(g.tp, l.qkv, a.dnorm, g.first, weights);
}

// ---- MLP: act = gelu or swiglu of fc(norm2); fcproj adds it to the stream

// The own rows of norm2 are in place, or of a parallel block all rows of norm1. Writes fc and act.
inline void mlp_hidden(Gpt& g, const Layer& l) {
    column_parallel(g.tp, l.fc, l.a.fc, g.last);  // applies the GELU too
    if (g.swiglu) swiglu_forward(l.a.act, l.a.fc, l.d.N, l.d.F, g.stream, l.fp8.act.largest());
}

// In a parallel block, added to what attention left.
inline void mlp_forward(Gpt& g, const Layer& l) {
    mlp_hidden(g, l);
    row_parallel(g.tp, l.fcproj, l.a.delta, g.last);
}

// Goes from the stream's gradient to that of norm2.
inline void mlp_backward(Gpt& g, const Layer& l, WeightGradients weights) {
    auto& a = l.a;
    row_parallel_backward(g.tp, l.fcproj, a.dresidual, g.swiglu ? a.dact : a.dfc, g.last, weights, l.fc);
    if (g.swiglu) swiglu_backward(a.dfc, a.dact, a.fc, l.d.N, l.d.F, g.stream, l.fp8.dfc.largest());
    column_parallel_backward(g.tp, l.fc, a.dnorm, g.last, weights);
}

// ---- block

// A transformer block, from norm1 to what its successor adds up:
//
//     sequential    y = x + attention(norm1(x)),  out = y + mlp(norm2(y))
//     parallel      out = x + attention(norm1(x)) + mlp(norm1(x))
//
// The norm before it is made by the caller, who knows what x is the sum of; and each sum is made by the norm
// after it.
inline Sum block_forward(Gpt& g, const Layer& l) {
    auto& a = l.a;
    attention_forward(g, l);
    if (!g.parallel) stream_norm(g, l.norm2, {a.residual, a.delta}, l.d.n);
    mlp_forward(g, l);
    return {g.parallel ? a.residual : a.residual2, a.delta};
}

// act of an fc that was kept.
inline void activation_again(Gpt& g, const Layer& l) {
    if (g.swiglu)
        swiglu_forward(l.a.act, l.a.fc, l.d.N, l.d.F, g.stream);
    else if (!gelu_is_fused(g.config, g.workload, l.d.F))
        gelu_forward(g.gelu, l.a.act, l.a.fc, (size_t)l.d.N * l.d.F, g.stream);
}

// Makes again what the forward pass did not keep, by the same operations, so with the same bits.
inline void recompute(Gpt& g, const Layer& l) {
    auto& a = l.a;
    Recompute kind = g.workload.recompute;
    if (kind == Recompute::none) return;
    if (kind == Recompute::block) {
        stream_norm(g, l.norm1, l.d.n);
        g.parallel ? attention_hidden(g, l) : attention_forward(g, l);
        g.parallel ? keep_input(g.tp, l.attproj) : stream_norm(g, l.norm2, {a.residual, a.delta}, l.d.n);
        mlp_hidden(g, l);
        return keep_input(g.tp, l.fcproj);
    }
    bool fp8 = g.workload.fp8;  // keeps what matrices read, in fp8
    if (!fp8 || (kind == Recompute::mlp && g.parallel)) stream_norm(g, l.norm1, l.d.n);
    if (!fp8 && g.config.local_filter) stream_norm(g, l.filternorm, l.d.n);
    if (g.config.qk_norm) finish_qkv(g, l);
    if (kind == Recompute::elementwise) {
        if (fp8) return;
        if (!g.parallel) stream_norm(g, l.norm2, l.d.n);
        return activation_again(g, l);
    }
    g.parallel ? g.rows.gather(l.fc.inp.own, l.fc.inp.all, l.d.N, l.d.C) : stream_norm(g, l.norm2, l.d.n);
    mlp_hidden(g, l);
    keep_input(g.tp, l.fcproj);
}

// dresidual, the gradient of the block's output, becomes that of its input. Of a parallel block both halves
// read the same, in either order, and dnorm is the sum of what they make of it.
inline void block_backward(Gpt& g, const Layer& l, WeightGradients weights) {
    auto& a = l.a;
    recompute(g, l);
    if (!g.parallel) {
        mlp_backward(g, l, weights);
        stream_norm_backward(g, l.norm2, a.dresidual, a, l.d.n);
    }
    attention_backward(g, l, weights);
    if (g.parallel) mlp_backward(g, l, weights);
    if (a.dfilter_sum) residual_forward(a.dnorm, a.dnorm, a.dfilter_sum, (size_t)l.d.n * l.d.C, g.stream);
    stream_norm_backward(g, l.norm1, a.dresidual, a, l.d.n);
}

// ---- embedding: out = wte[token] + wpe[position]

// Writes this rank's own rows, (n, C). Each tensor rank has a part of the vocabulary, and the first adds the
// positions.
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

// Goes from dresidual to the gradients of the tables.
inline void embed_backward(Gpt& g, const Batch& batch, bool last_micro_batch) {
    Dims d = g.dims(batch);
    g.state.begin_gradients(0);
    auto dw = g.gradients(0);
    floatX *own = g.acts[0].dresidual, *all = g.tp.partial_sums(own);
    g.rows.gather(own, all, d.N, d.C);
    float* dpositions = g.rows.rank() == 0 ? dw[wpe] : nullptr;  // see the forward pass
    embedding_backward(dw[wte], dpositions, g.acts[0].scratch, all, batch.tokens, batch.by_token,
                       batch.positions, batch.by_position, d.N, d.C, g.stream, g.stage.vocab());
    g.state.reduce_gradients(0, last_micro_batch);
}

// ---- head: the last norm, the classifier and the loss

inline NormLayer head_norm(const Gpt& g) {
    auto& a = g.acts[0];
    auto w = g.weights(g.last_norm_unit());
    auto dw = g.gradients(g.last_norm_unit());
    return {g.norm,    a.residualf, a.normf,    a.normf_mean, a.normf_rstd,      w[normfw],
            w[normfb], dw[normfw],  dw[normfb], nullptr,      a.dresidual_scale, a.dresidual_sums};
}

// Goes from the output of the last block to this rank's rows of normf.
inline void head_forward(Gpt& g, const Batch& batch, const Sum& x) {
    g.state.acquire(g.last_norm_unit(), +1);
    stream_norm(g, head_norm(g), x, g.dims(batch).n);
    g.state.release(g.last_norm_unit());
}

// All rows of normf, which the classifier reads. Those of a block's norm lay there, which are no longer read.
inline const floatX* classifier_input(Gpt& g, const Dims& d) {
    auto& a = g.acts[0];
    floatX* all = a.all_norm1 ? a.all_norm1 : a.normf;
    g.rows.gather(a.normf, all, d.N, d.C);
    return all;
}

// Goes from dnorm, as classify() leaves it, to dresidual. The gradients of the norm are reduced with those of
// the last block.
inline void head_backward(Gpt& g, const Batch& batch) {
    int unit = g.last_norm_unit();
    Dims d = g.dims(batch);
    auto& a = g.acts[0];
    g.state.acquire(unit, -1);
    g.state.begin_gradients(unit);
    cudaCheck(cudaMemsetAsync(a.dresidual, 0, (size_t)d.n * d.C * sizeof(floatX), g.stream));
    stream_norm_backward(g, head_norm(g), a.dresidual, a, d.n);
    g.state.release(unit);
}

// Goes from logits of this rank's vocabulary range to losses, and to the gradient of the logits.
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
               {a.parts, ranks, first_token});  // without ranks there are no parts
}

// On the last stage: adds the sum of the losses to the statistics. With a gradient, the loss counts dloss
// times: writes dnorm, the gradient of normf, and adds to that of the classifier's weights. Logits exist for
// loss_chunk tokens at a time, which is why this layer makes both passes at once.
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
        GivesWork::goes_on();
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
    // all tensor ranks know the losses, and one counts them
    if (g.rows.rank() == 0) sum_losses(&g.stats.data->loss, a.losses, d.N, g.stream);
}

// ----------------------------------------------------------------------------
// stage
// ----------------------------------------------------------------------------

// The part of the forward pass that a task stands for: from tokens, or the stream that the part before sent,
// to the stream for the next part, or to normf.
inline void stage_forward(Gpt& g, const Batch& batch, const PipelineTask& task) {
    Dims d = g.dims(batch);
    int begin = g.stage.first_layer(task.chunk), end = g.stage.end_layer(task.chunk);
    if (task.part == 0) embed_forward(g, batch, task.input);
    Sum x = {};
    for (int number = begin; number < end; number++) {
        GivesWork::goes_on();
        g.state.acquire(number + 1, +1);
        Layer l(g, number, batch);
        if (number == begin)
            stream_norm(g, l.norm1, d.n);  // task.input is whole
        else
            stream_norm(g, l.norm1, x, d.n);
        x = block_forward(g, l);
        g.state.release(number + 1);
    }
    if (task.part < g.stage.last_part())
        residual_forward(task.output, x.residual, x.delta, (size_t)d.n * d.C, g.stream);
    else
        head_forward(g, batch, x);
}

// Finds, of the stream's gradient that another part sent, what norms find of the one that they make.
inline void know_stream_gradient(Gpt& g, const floatX* gradient, const Dims& d) {
    auto& a = g.acts[0];
    if (a.dresidual_scale) largest_element(a.dresidual_scale, gradient, (size_t)d.n * d.C, g.stream);
    if (!a.dresidual_sums) return;
    cudaCheck(cudaMemsetAsync(a.dresidual_sums, 0, d.C * sizeof(float), g.stream));
    matmul_backward_bias(a.dresidual_sums, a.scratch, gradient, d.n, d.C, g.stream);
}

// The part of the backward pass that a task stands for: from the loss, or from the gradient that the next
// part sent, to the gradients of the blocks and what the part before is sent, or to those of the tables.
// After the last micro-batch of a step the gradients of each unit are summed over the ranks as soon as they
// are there.
inline void stage_backward(Gpt& g, const Batch& batch, const PipelineTask& task, float dloss,
                           bool last_micro_batch) {
    bool now = task.work == PipelineWork::backward;
    if (task.part == g.stage.last_part()) {
        classify(g, batch, dloss, true);
        // the classifier's weights are used for nothing else, but for tied embeddings by the first stage
        bool used_again = g.config.tie_embeddings && g.stage.has_embedding();
        if (!used_again) g.state.reduce_gradients(g.classifier_unit(), last_micro_batch);
        head_backward(g, batch);
    } else {
        know_stream_gradient(g, task.gradient, g.dims(batch));
    }
    int begin = g.stage.first_layer(task.chunk), end = g.stage.end_layer(task.chunk);
    for (int number = end - 1; number >= begin; number--) {
        GivesWork::goes_on();
        g.state.acquire(number + 1, -1);
        g.state.begin_gradients(number + 1);
        block_backward(g, Layer(g, number, batch), now ? WeightGradients::now : WeightGradients::later);
        g.state.release(number + 1);
        g.state.reduce_gradients(number + 1, last_micro_batch && now);
    }
    if (task.part == 0) embed_backward(g, batch, last_micro_batch);
}

// The gradients of the blocks' matrices, which stage_backward() left.
inline void stage_weight_gradients(Gpt& g, const Batch& batch, const PipelineTask& task,
                                   bool last_micro_batch) {
    for (int number = g.stage.end_layer(task.chunk) - 1; number >= g.stage.first_layer(task.chunk);
         number--) {
        GivesWork::goes_on();
        g.state.begin_gradients(number + 1);
        Layer l(g, number, batch);
        weight_gradients(g.tp, l.linears());
        g.state.reduce_gradients(number + 1, last_micro_batch);
    }
}

// Goes through a list of actions on micro-batches of `tokens` tokens. load(micro_batch, slot) brings one to
// the device when the first action on it comes, work(batch, task) does the actions of this stage.
template <typename Load, typename Work>
void run_micro_batches(Gpt& g, const std::vector<PipelineAction>& actions, int tokens, Load&& load,
                       Work&& work) {
    std::vector<Batch> batches(g.stage.room.micro_batches);
    std::vector<int> loaded(batches.size(), -1);
    g.activations.begin_run(pipeline_room(actions, g.stage.chunks()).has_backward);
    size_t sent = (size_t)g.rows.own_rows(tokens) * g.config.channels;
    recorder.begin_passes((int)actions.size());
    g.micro_batches =
        actions.empty() ? 0 : std::ranges::max(actions, {}, &PipelineAction::micro_batch).micro_batch + 1;
    GivesWork gives;
    g.pipeline.run(actions, sent, [&](const PipelineTask& task) {
        GivesWork::goes_on();
        int slot = task.batch_slot;
        if (loaded[slot] != task.micro_batch) batches[slot] = load(task.micro_batch, slot);
        loaded[slot] = task.micro_batch;
        g.bind_activations(task);
        work(batches[slot], task);
    });
}

// Goes from tokens to normf on the last stage.
inline void forward(Gpt& g, const Batch& batch) {
    auto load = [&](int, int) { return batch; };
    run_micro_batches(g, forward_actions(g.stage.pipeline(1)), batch.B * batch.T, load,
                      [&](const Batch& batch, const PipelineTask& task) { stage_forward(g, batch, task); });
}

// ----------------------------------------------------------------------------
// step
// ----------------------------------------------------------------------------

// Adds the losses of micro-batches load(0, slot), load(1, slot) ... to the statistics.
template <typename Load>
void add_losses(Gpt& g, int micro_batches, Load&& load) {
    run_micro_batches(g, forward_actions(g.stage.pipeline(micro_batches)), g.workload.B * g.workload.T, load,
                      [&](const Batch& batch, const PipelineTask& task) {
                          stage_forward(g, batch, task);
                          if (task.part == g.stage.last_part()) classify(g, batch, 0, false);
                      });
}

// Adds their gradients too, with losses that count dloss times. ends_step: they are the last of the step.
template <typename Load>
void accumulate_gradients(Gpt& g, int micro_batches, Load&& load, float dloss, bool ends_step = true) {
    auto actions = pipeline_actions(g.stage.pipeline(micro_batches), g.stage.number());
    run_micro_batches(g, actions, g.workload.B * g.workload.T, load,
                      [&](const Batch& batch, const PipelineTask& task) {
                          bool last = ends_step && task.micro_batch == micro_batches - 1;
                          auto key = [&] { return task_key(batch, task, dloss, last, g.acts); };
                          NotRecorded in_a_graph(g.graphs.on);
                          g.graphs.run(key, g.stream, [&] {
                              switch (task.work) {
                              case PipelineWork::forward:
                                  return stage_forward(g, batch, task);
                              case PipelineWork::weight_gradient:
                                  return stage_weight_gradients(g, batch, task, last);
                              case PipelineWork::backward:
                              case PipelineWork::input_gradient:
                                  return stage_backward(g, batch, task, dloss, last);
                              }
                          });
                      });
}

// The result of a step, as all ranks see it.
struct StepResult {
    float loss;           // mean over the targets of the step
    float gradient_norm;  // before clipping
    bool finite;          // false: the weights were left as they were,
    bool stepped;         // false also after a loss or a norm above its limit
    bool stop;            // a rank was asked to stop
    bool saved;           // no rank need be waited for to go on with a checkpoint
    bool save;            // the first rank's clock says that one is due
};

inline void clear_statistics(Gpt& g) {
    cudaCheck(cudaMemsetAsync(g.stats.data, 0, sizeof *g.stats.data, g.stream));
}

// Starts a step: no gradient, no loss.
inline void zero_gradients(Gpt& g) {
    g.state.zero_gradients();
    clear_statistics(g);
}

// Makes the loss of all ranks NaN, because this one has an error.
inline void spoil_loss(Gpt& g) {
    fill(&g.stats.data->loss, NAN, 1, g.stream);
}

// Sends the host what the statistics are when the compute stream comes here.
inline void send_statistics(Gpt& g) {
    cudaCheck(cudaMemcpyAsync(g.sent_stats.data, g.stats.data, sizeof *g.stats.data, cudaMemcpyDeviceToHost,
                              g.stream));
    g.stats_sent.record(g.stream);
}

// Waits for what was sent last. `targets` is the number of targets whose losses were summed.
inline StepResult await_result(Gpt& g, double targets) {
    g.stats_sent.wait(g.mesh);
    const StepStatistics& s = *g.sent_stats.data;
    bool saved = s.saved > (float)g.mesh.shape.ranks() - 0.5f;
    bool finite = s.norm <= FLT_MAX && std::abs(s.loss) <= FLT_MAX, stepped = !std::isnan(s.scale);
    return {(float)(s.loss / targets), s.norm, finite, stepped, s.stop > 0, saved, s.save > 0};
}

// Waits for all work given to the compute stream, and returns its result.
inline StepResult read_result(Gpt& g, double targets) {
    send_statistics(g);
    return await_result(g, targets);
}

// Mean loss over the first `count` samples, which the data ranks share.
inline float evaluate(Gpt& g, DeviceBatches& batches, uint64_t count, const NotedError& error) {
    clear_statistics(g);
    uint64_t B = g.workload.B, of_all = B * g.mesh.data_ranks();
    add_losses(g, (int)ceil_div(count, of_all), [&](int micro, int slot) {
        uint64_t first = micro * of_all + B * g.mesh.data_rank();
        return batches.load(first, (int)std::min(B, count - std::min(count, first)), slot);
    });
    if (!error.empty()) spoil_loss(g);
    g.state.sum_statistics(g.stats.data);
    return read_result(g, (double)count * g.workload.T).loss;
}

// The losses and gradients of `micro_batches` micro-batches on all data ranks, from sample `first` on.
inline void step_gradients(Gpt& g, DeviceBatches& batches, uint64_t first, int micro_batches,
                           bool ends_step = true) {
    StepShare share{g.mesh.data_ranks(), g.mesh.data_rank(), g.state.ranks_in_step(), first,
                    micro_batches,       g.workload.B};
    zero_gradients(g);
    auto load = [&](int micro, int slot) {
        return batches.load(share.sample(micro), share.samples(micro), slot, share.sample(micro + 1));
    };
    accumulate_gradients(g, share.joined(), load, share.of_token(g.workload.T), ends_step);
}

// The gradients of one micro-batch on each data rank, beside the step.
inline void gradients_beside(Gpt& g, DeviceBatches& batches, uint64_t first) {
    zero_gradients(g);
    float of_token = 1.0f / ((float)g.workload.B * g.workload.T);
    auto load = [&](int, int slot) { return batches.load(first, g.workload.B, slot); };
    accumulate_gradients(g, 1, load, of_token, false);
}

// ----------------------------------------------------------------------------
// sampling
// ----------------------------------------------------------------------------

// Continues `prompt` once for each of some texts with this model. One rank has the logits, and chooses.
class Writer final : public TextWriter {
public:
    Writer(Gpt& g, const std::vector<int>& prompt, int texts)
        : TextWriter(prompt, texts, g.workload.cache_length, std::min(g.workload.T, g.config.context),
                     g.rows.ranks()),
          g_(g),
          chooser_(first_of_stage(g.mesh.shape.pp - 1)),
          tokens_(2 * std::max(limit(), texts)) {}

private:
    Rows read(const std::vector<int>& tokens, int length, int row) override {
        pass(tokens, (int)tokens.size(), 0, row, length - 1);
        return next_logits(length - 1, 1);
    }

    Rows extend(const std::vector<int>& newest, int past) override {
        pass(newest, 1, past, 0, 0);
        return next_logits(0, (int)newest.size());
    }

    // Texts of T tokens each, behind `past` that are in the cache; `row` is the place of the first there, and
    // `last` the last token before padding.
    void pass(const std::vector<int>& tokens, int T, int past, int row, int last) {
        int N = (int)tokens.size();
        std::vector<int> with_positions = tokens;
        for (int n = 0; n < N; n++) with_positions.push_back(past + n % T);
        copy_to_device(tokens_.data, with_positions.data(), with_positions.size(), g_.stream);
        Batch batch = {{.tokens = tokens_.data, .positions = tokens_.data + N}, N / T, T, past, row, last};
        forward(g_, batch);
        if (g_.stage.has_head()) normf_ = classifier_input(g_, g_.dims(batch));
    }

    // Logits of the tokens that follow rows `first`, first + 1, ... of normf, one row for each.
    Rows next_logits(size_t first, int rows) {
        Rows logits;
        if (!g_.stage.has_head()) return logits;
        int unit = g_.classifier_unit(), Vp = g_.local_vocab(), C = g_.config.channels,
            ranks = g_.rows.ranks();
        size_t part = (size_t)rows * Vp;
        g_.state.acquire(unit, 0);
        floatX* all = g_.acts[0].logits;
        matmul_forward(all + g_.rows.rank() * part, normf_ + first * C,
                       g_.weights(unit)[g_.classifier_weight()], nullptr, rows, C, Vp, g_.stream);
        g_.state.release(unit);
        g_.rows.exchange(all, part);
        if (!(g_.mesh.position == chooser_)) return logits;
        std::vector<floatX> values(ranks * part);
        copy_to_host(values.data(), all, values.size(), g_.stream, g_.mesh);
        for (int row = 0; row < rows; row++) {
            logits.emplace_back();
            for (int rank = 0; rank < ranks; rank++) {
                const floatX* begin = &values[rank * part + (size_t)row * Vp];
                logits.back().insert(logits.back().end(), begin, begin + g_.stage.vocab_of(rank).count);
            }
        }
        return logits;
    }

    void copy_first_row(int length, int texts) override {
        size_t row = cache_row_size(g_.config, limit()), used = cache_row_size(g_.config, length);
        auto copy = [&](floatX* rows, size_t width, size_t columns) {
            for (int i = 1; i < texts && rows; i++) {
                cudaCheck(cudaMemcpyAsync(rows + i * width, rows, columns * sizeof(floatX),
                                          cudaMemcpyDeviceToDevice, g_.stream));
            }
        };
        Dims d(g_.config, g_.rows.ranks(), 1, 1);
        for (const Activations& a : g_.acts) {
            copy(a.cache, row, used);
            copy(a.filter1_state, d.H, d.H);
            copy(a.filter2_state, d.C, d.C);
        }
    }

    // All ranks take the tokens of the one that chooses.
    void agree_on(std::vector<int>& tokens) override {
        if (g_.mesh.world().size() == 1) return;
        copy_to_device(tokens_.data, tokens.data(), tokens.size(), g_.stream);
        g_.mesh.world().broadcast(tokens_.data, tokens.size(), rank_of(chooser_, g_.mesh.shape),
                                  Traffic::statistics, g_.stream);
        copy_to_host(tokens.data(), tokens_.data, tokens.size(), g_.stream, g_.mesh);
    }

    Gpt& g_;
    const MeshPosition chooser_;
    DeviceArray<int> tokens_;        // and their positions
    const floatX* normf_ = nullptr;  // all rows of the last pass
};

inline std::string sample_text(Gpt& g, const Options& o, const Tokenizer* tokenizer, int step) {
    TextDecoder decoder(tokenizer, o.prompt.empty());
    std::string sample = o.prompt;
    uint64_t key = random_key(o.seed, text("sample at step %d", step));
    Writer writer(g, prompt_tokens(o, tokenizer, o.prompt), 1);
    write_texts(writer, o.sample_tokens, {o.document_end}, {.temperature = 0.8f}, {key}, [&](int, int token) {
        sample += decoder.add(token);
        return true;
    });
    return sample + decoder.finish();
}

// ----------------------------------------------------------------------------
// training
// ----------------------------------------------------------------------------

// All that a run is made of, each member built from those before it; and the loop.
struct TrainingRun {
    const TrainingLine& line;
    const Options& o;
    const World& world;
    const TrainingPlan& plan;
    const Mesh& mesh;
    Gpt g{o, plan.memory->workload, zero_settings(o, sizeof(floatX), threads_per_rank(world)), mesh,
          plan.memory->layout};
    GemmRate gemm{g.stream};
    const SparedMultiprocessors spared{spared_by_products(plan.memory->layout, o.zero)};
    Meter meter{o, o.sequence_length, peak_rate(o), gemm.rate, world.size()};
    NotedError error;  // this rank's, raised when all ranks can hear of it
    StatusLine status{screen, o.steps, [&] {
                          double done = recorder.passes_done();
                          int of = done < 0 ? 0 : g.micro_batches.load();
                          return PassProgress{(float)done * (float)of, of};
                      }};
    StepLog progress{o, meter, plan.log.get()};
    RunCheckpoints checkpoints{
        g.state,
        [&](const MeshPosition& position) {
            return parameter_layout(o, o.shard_group, Stage(o, plan.memory->layout, position, true).units());
        },
        o, world,
        // So the log tells of every step that a checkpoint has, even if the power fails.
        [&] { plan.log ? progress.warn(plan.log->sync()) : void(); },
        [&](const SaveReport& report) { progress.checkpoint(report); }};
    RunPosition at = {};  // how far the run has come
    SpikeGuard spikes{o, world, checkpoints, progress, plan.log.get()};
    FaultChecks checks{o, g.state, world, checkpoints};
    std::unique_ptr<Timings> timings;
    std::unique_ptr<DeviceBatches> batches, val_batches;
    bool stopping = false, saving = false;  // all ranks agreed on these in the last step

    // ---- build: for all ranks, as all that follows
    TrainingRun(const TrainingLine& line, const World& world, const TrainingPlan& plan, const Mesh& mesh)
        : line(line), o(line.options), world(world), plan(plan), mesh(mesh) {
        or_abort(world, [&] { build(); });
    }

    void build() {
        g.graphs.on = wants_graphs(o, gemm.rate);
        print_rate(gemm.rate, g.graphs.on);
        std::string text = world.size() > 1
                               ? ""
                               : prediction_text(this_machine(), peak_rate(o), takes_wgmma_attention(o), o,
                                                 g.workload, g.stage, (double)g.layout.size());
        if (!text.empty()) print("prediction   %s\n", text.c_str());
        progress.expect(plan.expected_seconds);
        begin();
        begin_log();
        batches = make_batches(*plan.train_data);
        if (plan.val_data) val_batches = make_batches(*plan.val_data);
        tune();
        timings = std::make_unique<Timings>(o, world, mesh, g.stage, g.stream, progress);
        step_to_stop_after = world.size() > 1 ? at.step + 1 : at.step;
        stop_on_signals(screen.descriptor_of_signals(), screen.before_signal_line());
        gemm.restart_clock();
    }

    // The run goes on, or begins with weights of its own or another's.
    void begin() {
        if (line.origin && !line.weights_only)
            at = checkpoints.resume(*line.origin);
        else if (line.origin)
            checkpoints.take_weights(*line.origin);
        else
            initialize(g.state, o.seed);
    }

    void begin_log() {
        world.on_all_ranks([&] {
            if (!plan.log) return;
            if (line.folder != RunFolder::replaced)
                check_space(checkpoints_folder(o.run_dir), checkpoints.bytes());
            std::vector<std::string> changes = line.notes;
            std::string communication = communication_libraries();
            nlohmann::json before = at.step > 0 ? plan.log->last_start() : nlohmann::json();
            std::vector<std::string> found = plan.log->begin(options_to_json(o), at.step);
            for (const std::string& changed :
                 {world.size() > 1 ? communication_note(before, communication) : "",
                  validation_note(before, plan.validation)})
                if (!changed.empty()) found.push_back(changed);
            if (std::string space = checkpoints.space_note(o.steps - at.step); !space.empty())
                found.push_back(space);
            for (const std::string& note : found) {
                screen.warn(note, "             ");
                changes.push_back(note);
            }
            std::string origin = line.origin ? line.origin->checkpoint : "";
            nlohmann::ordered_json how =
                start_record(o, world.host(), world.size(), device_text(o), communication, origin, changes);
            how.update(plan.memory->plan.record());
            if (plan.val_data) how["validation"] = record_of(plan.validation);
            progress.start(at.step, how);
            if (plan.tokenizer && !plan.tokenizer->file().empty())
                plan.tokenizer->write(tokenizer_path(o.run_dir));
            else if (line.folder != RunFolder::continued)
                unlink(tokenizer_path(o.run_dir).c_str());
        });
    }

    std::unique_ptr<DeviceBatches> make_batches(const TokenLoader& loader) {
        BatchShape shape = {o.micro_batch, o.sequence_length, o.document_end, resets_positions(o)};
        uint64_t stride = (uint64_t)o.micro_batch * o.dp;  // the data ranks take turns
        auto source = make_batch_source(world, o.data_reader == DataReader::node, loader, shape, stride);
        return std::make_unique<DeviceBatches>(std::move(source), g.stream, mesh, error,
                                               g.stage.room.micro_batches);
    }

    // Times the matrix products of the first micro-batches, and takes the fastest algorithm for each.
    void tune() {
        auto first_micro_batches = [&] {
            int some = std::min(micro_batches_of_step(o, at.step), o.dp * o.pp);
            step_gradients(g, *batches, at.samples, some, false);
            g.state.synchronize();
        };
        for (const std::string& note : tune_products(world, o, line.origin ? line.origin->run_dir : "",
                                                     mesh.data_rank() == 0, g.stream, first_micro_batches))
            print("products     %s\n", note.c_str());
    }

    // ---- loop

    bool asked_to_stop() const { return stopping || (world.size() == 1 && stop_requested); }

    // A run that is asked to stop may be killed soon, so it saves its state before anything else.
    bool due(int every) const {
        return every > 0 && !asked_to_stop() && (at.step == o.steps || at.step % every == 0);
    }
    bool validation_due() const { return val_batches && due(o.val_every); }
    bool measurement_due() const { return world.is_root() && gemm.measurement_due(); }

    bool next_is_a_step() const {
        return at.step < o.steps && !asked_to_stop() && !measurement_due() && !validation_due() &&
               !due(o.sample_every);
    }

    void loop() {
        for (;;) {
            if (validation_due()) validate();
            if (due(o.sample_every)) show_sample();
            check();
            if (at.step == o.steps || asked_to_stop() || (world.size() == 1 && !error.empty())) break;
            step_to_stop_after = at.step + 1;
            if (saving) {
                RecordedOnHost wait(Operation::save);
                checkpoints.save(at);
            }
            if (measurement_due()) {
                g.state.synchronize();
                meter.add_measurement(gemm.measure_again());
            }
            step();
        }
        raise_error(world, error);
        g.state.synchronize();
        timings->finish();
    }

    // Ends the run if a device does not compute what it should.
    void check() {
        bool saves = saving || at.step == o.steps || asked_to_stop();
        checks.run(at.step, saves, [&](int data_rank) {
            NotedLaunchErrors noted(error);
            gradients_beside(g, *batches, at.samples + (uint64_t)o.micro_batch * data_rank);
        });
    }

    void validate() {
        NotedLaunchErrors noted(error);
        status.begin_validation(at.step);
        progress.validation(at.step, plain_nan(evaluate(g, *val_batches, plan.validation.samples, error)));
    }

    void show_sample() {
        NotedLaunchErrors noted(error);
        status.begin_work("sample", at.step);
        note_error(error,
                   [&] { progress.sample(at.step, sample_text(g, o, plan.tokenizer.get(), at.step)); });
    }

    // A rank with an error, such as a launch that failed, goes on with the step and makes the loss of all
    // ranks NaN, so that none of them changes its weights. That a rank is asked to stop, or has its
    // checkpoint on disk, is agreed with the statistics of the step; what comes when those are on their way
    // is agreed a step later.
    void give_step(const Optimizer& optimizer) {
        GivesWork gives;
        timings->begin_step(at.step + 1);
        {
            NotedLaunchErrors noted(error);
            step_gradients(g, *batches, at.samples, micro_batches_of_step(o, at.step));
        }
        if (!error.empty()) spoil_loss(g);
        if (stop_requested) fill(&g.stats.data->stop, 1, 1, g.stream);
        if (checkpoints.is_ready()) fill(&g.stats.data->saved, 1, 1, g.stream);
        if (checkpoints.due(at.step + 1)) fill(&g.stats.data->save, 1, 1, g.stream);
        if (world.size() > 1) step_to_stop_after = std::min(at.step + 2, o.steps);
        // The statistics are sent before the weights change: while they do, the host can read them and give
        // the device the next step.
        ClipLimits limits = spikes.limits(at, (double)tokens_of_step(o, at.step));
        g.state.update(g.stats.data, optimizer, limits, [&] { send_statistics(g); });
        timings->end_step();
    }

    void step() {
        Phase phase("step");
        status.set_next_checkpoint(checkpoints.next(at.step + 1));
        status.begin_step(at.step + 1);
        double start = seconds_now();
        uint64_t sent_before = sent_bytes();
        Optimizer optimizer = make_optimizer(o, at.step);
        if (batch_changes(o, at.step)) g.graphs.clear(g.stream);  // they have the share of a token in it
        give_step(optimizer);
        StepResult result = await_result(g, (double)tokens_of_step(o, at.step));
        if (!result.finite) {
            raise_error(world, error);
            progress.not_finite(at.step + 1, result.loss, result.gradient_norm);
            raise_not_finite(world, g.state, at.step + 1, result.loss, result.gradient_norm);
        }
        at.samples += samples_of_step(o, at.step++);
        NotedLaunchErrors noted(error);
        g.products.weights_changed(g.graphs.on);
        stopping = result.stop, saving = result.save;
        // The update still runs. A next step waits for it, in its own time; else its time is this step's.
        if (!next_is_a_step()) g.state.synchronize();
        uint64_t trained_on = at.samples - at.spikes.samples_passed_over();
        progress.step(at.step, trained_on * o.sequence_length, result.loss, result.gradient_norm,
                      optimizer.learning_rate, seconds_now() - start, sent_bytes() - sent_before,
                      !result.stepped);
        spikes.add_step(at, result.loss, result.gradient_norm, !result.stepped);
        status.set_seconds_left(progress.seconds_left(at.step));
        if (o.log_trust_ratios > 0 && at.step % o.log_trust_ratios == 0 && world.is_root())
            progress.trust_ratios(at.step, trust_ratios(g.state));
        timings->collect(at.step, seconds_now() - start);
        status.set_slowest(timings->slowest_text());
        if (result.saved) checkpoints.finish();
        if (spikes.has_enough(at)) go_back();
    }

    // After too many spikes. The steps that are to be saved or shown are others now.
    void go_back() {
        g.state.synchronize();
        spikes.go_back(at);
        g.products.weights_changed(g.graphs.on);
        saving = false;
    }

    void finish() {
        status.begin_work("saving", at.step);
        std::string saved = checkpoints.finish_at(at);
        status.end();
        if (asked_to_stop()) progress.stopped(at.step);
        screen.end_quiet();
        print("%s after step %d; the checkpoint is %s\n", asked_to_stop() ? "stopped as asked" : "done",
              at.step, saved.c_str());
        if (stop_requested == SIGPIPE)
            fprintf(
                stderr,
                "train_gpt: nobody reads the output any more: stopped after step %d; the checkpoint is %s\n",
                at.step, saved.c_str());
    }
};

inline void train(const TrainingLine& line, const World& world) {
    if (world.is_root()) screen.open(launched_processes() > 0, line.options.quiet);
    TrainingPlan plan = check_training(line, world);
    int64_t done = line.origin && !line.weights_only ? line.origin->step : 0;
    print_header(line.options, device_text(line.options), *plan.train_data, plan.validation, done,
                 plan.notes);
    plan.memory->plan.print_lines(world.size());
    fflush(stdout);  // the work that follows can take long, or wait for other ranks
    const Layout& layout = plan.memory->layout;
    Mesh mesh(world, layout.mesh, nullptr,
              mesh_traffic(line.options, layout, line.options.micro_batch, line.options.sequence_length,
                           line.options.reduce_dtype));
    plan.memory->check_groups(world);
    print_ranks(line.options, world, mesh, layout);
    TrainingRun run(line, world, plan, mesh);
    or_abort(world, [&] { run.checkpoints.rescue_from_errors(run.at, [&] { run.loop(); }); });
    run.finish();
}

// ----------------------------------------------------------------------------
// commands
// ----------------------------------------------------------------------------

// A model that is not trained any further.
inline std::unique_ptr<Gpt> load_model(const TrainedModel& model, const Workload& workload,
                                       const World& world) {
    ZeroSettings settings = {.training = false};
    memory_plan(model.options, workload, settings).check();
    auto g = std::make_unique<Gpt>(model.options, workload, settings);
    auto layout_at = [&](const MeshPosition&) { return g->layout; };
    load_checkpoint(g->state, world, layout_at, model.reader, true);
    return g;
}

inline void sample(const SampleOptions& command, const World& world) {
    TrainedModel model(command.run, command.tokenizer);
    std::string prompt = sample_prompt(model, command);
    int length = sample_length(model, command, prompt), samples = command.samples;
    Workload workload = {.B = 1,
                         .T = std::max(length, samples),
                         .training = false,
                         .loss_chunk = samples,
                         .cache_rows = command.cache ? samples : 0,
                         .cache_length = command.cache ? length : 0};
    std::unique_ptr<Gpt> g = load_model(model, workload, world);
    auto writer = [&](const std::vector<int>& tokens, int texts) { return Writer(*g, tokens, texts); };
    write_samples(model, command, prompt, writer);
}

// The losses (B*T) of a batch as the eval command has them. `device` has room for batch_ints().
inline std::vector<float> batch_losses(Gpt& g, const HostBatch& host, DeviceArray<int>& device) {
    int B = g.workload.B, T = g.workload.T;
    size_t N = (size_t)B * T;
    copy_to_device(device.data, host.tokens, batch_ints(B, T), g.stream);
    Batch batch = batch_on_device(device.data, host, B, T);
    clear_statistics(g);  // the sum of these losses is added to them
    forward(g, batch);
    classify(g, batch, 0, false);
    std::vector<float> losses(N);
    copy_to_host(losses.data(), g.acts[0].losses, N, g.stream, g.mesh);
    return losses;
}

inline void evaluate_run(const EvalOptions& command, const World& world) {
    TrainedModel model(command.run, command.tokenizer);
    const Options& o = shape_evaluation(model.options, command);
    int tokens = o.micro_batch * o.sequence_length;
    Workload workload = {o.micro_batch, o.sequence_length, false, Recompute::none,
                         chosen_loss_chunk(o, tokens)};
    std::unique_ptr<Gpt> g = load_model(model, workload, world);
    DeviceArray<int> device(batch_ints(o.micro_batch, o.sequence_length));
    auto losses = [&](const HostBatch& batch) { return batch_losses(*g, batch, device); };
    print_scores(model, command, losses);
}

extern const char source_hash[];  // the Makefile makes it, of all that the program is built from

// Every rank runs its command with this, by the type of the options; data/options/help.h has the names.
struct CommandWork {
    const World& world;

    void operator()(const TrainingLine& line) const { train(line, world); }
    void operator()(const PlanLine& line) const { plan_or_measure(line, world); }
    void operator()(const SelftestOptions& o) const { selftest(o, world); }
    void operator()(const SampleOptions& o) const { sample(o, world); }
    void operator()(const EvalOptions& o) const { evaluate_run(o, world); }
    void operator()(const FileCommand& command) const {
        run_on_files(command, [](const Options& model) {
            return checkpoint_tensors(parameter_layout(model), {.training = false});
        });
    }
};

// The options of a command line, by which ranks are compared.
struct ComparedOptions {
    const World& world;

    void operator()(const TrainingLine& line) const { check_same_options(world, line.options, true); }
    void operator()(const PlanLine& line) const { check_same_options(world, line.command, true); }
    void operator()(const FileCommand&) const {}  // which one rank runs
    template <typename O>
    void operator()(const O& options) const {
        check_same_options(world, options, true);
    }
};

// Runs the command on every rank. An error that stops it is thrown.
inline void run(const AskedLine& asked, const World& world) {
    check_same_program(world, source_hash, asked.name.c_str());
    world.on_all_ranks([&] {
        asked.refusal.raise();
        if (asked.command == command_train) check_all_started();
        bool alone = asked.command != command_train && asked.command != command_selftest &&
                     !is_given("--measure", asked.given);
        if (alone && world.size() > 1)
            fail("%s: works in one process and there are %d; start it without mpirun", asked.name.c_str(),
                 world.size());
        if (!world.is_root()) return;
        for (const std::string& remark : asked.remarks) screen.warn(remark);
    });
    check_same_options(world, asked.training, false);
    FindCheckpoint find = find_on_root(world, asked.places);
    CommandLine line;
    world.on_all_ranks(
        [&] { line = parse_command_line(asked, world.size(), find, layout_choices(world, asked.given)); });
    std::visit(ComparedOptions{world}, line);
    if (computes(asked.command, asked.given)) choose_device(world);
#ifndef __CUDACC__
    if (world.size() > 1) host_device.threads = threads_per_rank(world);
#endif
    // One rank speaks for all.
    if (!world.is_root() && !freopen("/dev/null", "w", stdout)) fail_with_errno("/dev/null", "write it");
    std::visit(CommandWork{world}, line);
    if (stop_requested != SIGPIPE) check_standard_output();
}

// The program, which test programs can be too (test/program/train_gpt.cu).
inline int run_train_gpt(int argc, char** argv) try {
    open_standard_streams();
    const AskedLine asked = read_command_line(argc, argv);
    if (std::optional<int> code = run_without_ranks(asked)) return *code;
    double usual = launched_processes() > 1 ? Options().communication_timeout : 0;
    time_limit = asked.time_limit.value_or(usual);
    set_device_variables();
    World world(&argc, &argv, watch_ranks);
    try {
        or_abort(world, [&] { run(asked, world); });
        return 0;
    } catch (const CommonError& error) {
        if (world.is_root()) print_error(error.what());
        return error.exit_code;
    }
} catch (const std::exception& error) {
    print_error(message_of(error));
    return exit_code_of(error);
}

#ifndef TESTING
int main(int argc, char** argv) {
    return run_train_gpt(argc, argv);
}
#endif
