/*
train_gpt: pre-trains GPT-style transformers. Read it top to bottom:

    activations   one table: name, size, how long it is kept
    model         memory, initial weights
    forward       embedding, blocks, classifier
    backward      the forward pass in reverse
    passes        micro-batches through the stages of a pipeline
    update        gradient norm, clipping, AdamW (in comm/zero.h, for one rank as for many)
    sampling      text from a model, with a key/value cache
    training      one step, and what goes before it; the train command
    commands      sample, eval, data
    main          from the command line to a command

Each layer's arithmetic is in kernels/, how the work is cut over ranks in comm/, what is read and written on
disk, and what the commands make of passes through a model, in data/. The parameters are one table as well, of
name, shape, initialisation, weight decay and cut: comm/tensor_table.h.
*/
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "comm/activations.h"          // ActivationRow
#include "comm/setup.h"                // what this build cannot follow
#include "comm/device_batches.h"       // Batch, Batches
#include "comm/layout.h"               // Division: how the model is cut
#include "comm/run_checkpoints.h"      // find_on_root
#include "comm/memory.h"               // allocate, MemoryClass
#include "comm/mesh.h"                 // Mesh: this rank's place and its groups
#include "comm/stage.h"                // Share: what this rank has of the model
#include "comm/node_reader.h"          // batches read once for all ranks of a machine
#include "comm/parameters.h"           // ParameterLayout
#include "comm/pipeline.h"             // Pipeline: micro-batches from stage to stage
#include "comm/tensor_parallel.h"      // SequenceShards: rows of activations over tensor ranks
#include "comm/tensor_table.h"         // tensor_table, parameter_layout
#include "comm/watch.h"                // copy_to_host
#include "comm/whole_tensors.h"        // set_tensors
#include "comm/world.h"                // launched by mpirun or alone
#include "comm/zero.h"                 // ZeroState: parameters, gradients and optimizer state, cut over ranks
#include "data/tokens/data_overlap.h"  // validation on what is trained on
#include "data/commands/data_report.h"  // the data subcommand
#include "data/base/error.h"            // fail, note_trouble
#include "data/commands/evaluation.h"   // the loss on token files, multiple-choice questions
#include "data/base/file.h"             // check_standard_output, check_space
#include "data/commands/generation.h"   // TextWriter, write_texts, Sampling, the sample command
#include "data/commands/inspect.h"      // the inspect command
#include "data/base/figures.h"
#include "data/run/meter.h"                // FLOPs, rates, durations
#include "data/options/model_config.h"     // ModelConfig
#include "data/commands/model_exchange.h"  // the export and import commands
#include "data/launch/command_line.h"      // the options table, parse_options
#include "data/run/run_report.h"           // the header of a run
#include "data/run/run_log.h"              // the run directory and log.jsonl
#include "data/tokens/token_loader.h"      // which tokens a sample is made of
#include "data/run/step_log.h"             // what is shown and kept of each step
#include "data/base/stop_signals.h"        // how a run is asked to stop
#include "data/tokens/token_record.h"      // what token files were made with
#include "data/text/tokenize.h"            // the tokenize subcommand
#include "data/tokenizer/tokenizer.h"      // text <-> tokens
#include "data/launch/trained_model.h"     // what a run left
#include "kernels/adamw.cuh"               // AdamW
#include "kernels/attention.cuh"           // attention_forward, attention_backward
#include "kernels/classifier.cuh"          // classifier, sum_losses
#include "kernels/embedding.cuh"           // embedding_forward, embedding_backward
#include "kernels/fp8_matmul.cuh"          // BlockProducts
#include "kernels/gelu.cuh"                // Gelu
#include "kernels/kv_cache.cuh"            // kv_cache_append, kv_cache_attention
#include "kernels/matmul.cuh"              // matmul_*, gemm_rate
#include "kernels/norm.cuh"                // norm_forward, residual_norm_forward, norm_backward
#include "kernels/qk_norm.cuh"             // qk_norm_forward, qk_norm_backward
#include "kernels/random.cuh"              // random_key, random_normal
#include "kernels/residual.cuh"            // residual_forward
#include "kernels/rope.cuh"                // rope_table, rope_forward, rope_backward
#include "kernels/swiglu.cuh"              // swiglu_forward, swiglu_backward

// ----------------------------------------------------------------------------
// activations
// ----------------------------------------------------------------------------

// What a pass through the model writes, as one layer sees it. N = B*T; n are the rows of those that this
// tensor rank has, N without tensor parallelism. NH, NKV and F (mlp_width) are this rank's part; A = NH*HS,
// F1 is 2F for SwiGLU and F otherwise.
struct Activations {
    // forward, block
    floatX* residual;   // (n, C) input of the block
    floatX* norm1;      // (N, C)
    float* norm1_mean;  // (n) layernorm only, as all means
    float* norm1_rstd;  // (n)
    floatX* qkv_raw;    // (N, QKV) before the norm of queries and keys
    float* qk_rstd;     // (N, NH + NKV)
    floatX* qkv;        // (N, QKV) as attention reads it: normed and rotated
    floatX* att;        // (N, A)
    float* lse;         // (B, NH, T)
    floatX* residual2;  // (n, C) between attention and MLP (sequential block)
    floatX* norm2;      // (N, C)
    float* norm2_mean;  // (n)
    float* norm2_rstd;  // (n)
    floatX* fc;         // (N, F1)
    floatX* act;        // (N, F)
    floatX* delta;      // (n, C) what the last part of a block adds to the residual stream
    floatX* cache;      // (cache rows, cache length, 2, NKV, HS) keys and values of earlier tokens
    // forward, head
    floatX* residualf;  // (n, C)
    floatX* normf;      // (N, C)
    float* normf_mean;  // (n)
    float* normf_rstd;  // (n)
    floatX* logits;     // (loss chunk, Vp)
    float* parts;       // (tensor ranks, loss chunk, 3) what each knows of a row of logits
    float* losses;      // (N)
    // backward
    floatX* dresidual;  // (n, C)
    floatX* dnorm;      // (n, C)
    floatX* dact;       // (N, F) SwiGLU only: that of GELU becomes dfc where it is made
    floatX* dfc;        // (N, F1)
    floatX* datt;       // (N, A)
    floatX* dqkv;       // (N, QKV)
    floatX* dmlp_out;   // (N, C) all rows of dresidual as the MLP reads it
    floatX* datt_out;   // (N, C) and as attention does
    float* scratch;     // two-stage sums
    // tensor parallelism
    floatX* own_norm;  // (n, C) of a norm, before all have it
    floatX* summands;  // (N, C) of a product, before the ranks' are summed
};

#define FIELD(name) #name, offsetof(Activations, name), sizeof(*Activations::name)

enum class Recompute { none, mlp, block };

// Sizes that the activations depend on.
struct Workload {
    int B, T;       // sequences and tokens of each, in a micro-batch
    bool training;  // false: forward only, nothing is kept
    Recompute recompute = Recompute::none;
    int loss_chunk;  // tokens whose logits exist at the same time
    // Texts that are written together, and the tokens of each whose keys and values are kept. 0: none.
    int cache_rows = 0, cache_length = 0;
    bool fp8 = false;  // products of the blocks

    int positions() const { return std::max(T, cache_length); }
};

// Elements of the key/value cache of one text, in one layer.
inline size_t cache_row_size(const ModelConfig& c, int length) {
    return (size_t)length * 2 * c.kv_heads * c.head_size;
}

inline std::vector<ActivationRow> activation_table(const ModelConfig& config, const Workload& w,
                                                   const Share& share) {
    int tp = share.division().tp;
    ModelConfig c = local_part(config, tp);
    size_t N = (size_t)w.B * w.T, n = N / tp, C = c.channels, QKV = qkv_width(c),
           A = (size_t)c.heads * c.head_size, F = c.mlp_width, F1 = fc_width(c), chunk = w.loss_chunk;
    bool mean = c.norm == "layernorm", two_norms = c.block == "sequential", cut = tp > 1;
    // Whether the weights' gradients are left for later, with what they are made from.
    bool later = w.training && std::ranges::max(share.room.pending) > 0;
    Keep until_weights = later ? Keep::pending : Keep::shared;
    Keep block = w.training && w.recompute != Recompute::block ? Keep::layer : Keep::shared;
    Keep hidden = w.training && w.recompute == Recompute::none ? Keep::layer : Keep::shared;
    auto product_input = [&](Keep kept) { return kept == Keep::shared && later ? Keep::remade : kept; };
    size_t scratch = std::max({attention_backward_scratch(w.B, w.T, c.heads, c.kv_heads, c.head_size),
                               norm_backward_scratch(c.channels), qk_norm_backward_scratch(c.head_size),
                               matmul_backward_bias_scratch((int)std::max({F1, QKV, C})),
                               embedding_backward_scratch(w.B * w.T, c.channels)});
    std::vector<ActivationRow> rows;
    auto add = [&](bool present, ActivationRow row) {
        if (present && row.elements) rows.push_back(row);
    };
    add(true, {FIELD(residual), n * C, w.training ? Keep::inner : Keep::shared});
    add(true, {FIELD(norm1), N * C, product_input(block)});
    add(mean, {FIELD(norm1_mean), n, block});
    add(true, {FIELD(norm1_rstd), n, block});
    add(c.qk_norm, {FIELD(qkv_raw), N * QKV, block});
    add(c.qk_norm, {FIELD(qk_rstd), N * (c.heads + c.kv_heads), block});
    add(true, {FIELD(qkv), N * QKV, block});
    add(true, {FIELD(att), N * A, product_input(block)});
    add(true, {FIELD(lse), N * c.heads, block});
    add(two_norms, {FIELD(residual2), n * C, block});
    add(two_norms, {FIELD(norm2), N * C, product_input(hidden)});
    add(two_norms && mean, {FIELD(norm2_mean), n, hidden});
    add(two_norms, {FIELD(norm2_rstd), n, hidden});
    add(true, {FIELD(fc), N * F1, hidden});
    add(true, {FIELD(act), N * F, product_input(hidden)});
    add(true, {FIELD(delta), n * C, Keep::shared});
    add(true, {FIELD(cache), cache_row_size(c, w.cache_length) * w.cache_rows, Keep::layer});
    if (share.has_head()) {
        Keep head = w.training ? Keep::head : Keep::shared;
        add(true, {FIELD(residualf), n * C, head});
        add(true, {FIELD(normf), N * C, head});
        add(mean, {FIELD(normf_mean), n, head});
        add(true, {FIELD(normf_rstd), n, head});
        // for a sample, those of one token come together from all tensor ranks
        add(true, {FIELD(logits), std::max<size_t>(chunk, tp) * padded_vocab(c, tp), Keep::shared});
        add(cut, {FIELD(parts), tp * chunk * 3, Keep::shared});
        add(true, {FIELD(losses), N, Keep::shared});
    }
    add(cut, {FIELD(own_norm), n * C, Keep::shared});
    add(cut, {FIELD(summands), N * C, Keep::shared});
    if (!w.training) return rows;
    add(true, {FIELD(dnorm), n * C, Keep::shared});
    add(c.mlp == "swiglu", {FIELD(dact), N * F, Keep::shared});
    add(true, {FIELD(dfc), N * F1, until_weights});
    add(true, {FIELD(datt), N * A, Keep::shared});
    add(true, {FIELD(dqkv), N * QKV, until_weights});
    add(cut || later, {FIELD(dmlp_out), N * C, until_weights});
    add(later && two_norms, {FIELD(datt_out), N * C, until_weights});
    add(true, {FIELD(scratch), scratch, Keep::shared});
#undef FIELD
    return rows;
}

// What is kept of one micro-batch for one layer.
inline size_t layer_bytes(const ModelConfig& config, const Workload& w, const Share& share) {
    size_t bytes = 0;
    for (const ActivationRow& row : activation_table(config, w, share)) {
        if (row.keep == Keep::layer || row.keep == Keep::inner) bytes += row.bytes();
    }
    return bytes;
}

// With what goes from stage to stage: the input of each part, and the gradient of the residual stream.
inline size_t activation_bytes(const ModelConfig& config, const Workload& w, const Share& share) {
    auto& division = share.division();
    size_t own = (size_t)w.B * w.T / division.tp * config.channels;
    size_t bytes = Pipeline::bytes(division.pipeline, share.room, share.stage(), own);
    for (const ActivationRow& row : activation_table(config, w, share))
        bytes += row.bytes() * row.instances(share);
    return bytes;
}

// What the products of the blocks on this rank take in fp8.
inline Fp8Sizes fp8_sizes(const ModelConfig& config, const Workload& w, const Share& share) {
    if (!w.fp8) return {};
    ModelConfig c = local_part(config, share.division().tp);
    size_t C = c.channels, QKV = qkv_width(c), A = c.heads * c.head_size, F = c.mlp_width, F1 = fc_width(c);
    size_t layers = 0;
    for (int of_chunk : share.layers(0)) layers += of_chunk;
    return {.weights = layers * C * (QKV + A + F1 + F),
            .matrices = 4 * layers,
            .rows = (size_t)w.B * w.T,
            .width = std::max({C, QKV, A, F1})};
}

// ----------------------------------------------------------------------------
// model
// ----------------------------------------------------------------------------

struct Gpt {
    ModelConfig config, local;  // the whole model, and what this rank has of a block
    Workload workload;
    const Mesh& mesh;
    Share share;  // of the model, that this rank has
    ParameterLayout layout;
    Norm norm;
    bool parallel, swiglu;
    Gelu gelu;

    ComputeStream compute;
    cudaStream_t stream;
    ZeroState state;      // parameters, gradients, optimizer state
    SequenceShards rows;  // activations over tensor ranks
    Pipeline pipeline;    // and from stage to stage
    DeviceArray<char> fp8_memory;
    BlockProducts products;  // of the blocks' matrices

    // one allocation for each class of memory
    char* activations = nullptr;
    float* rope = nullptr;   // (positions, R/2, 2) cosines and sines
    float* stats = nullptr;  // (stat_count)

    HostArray<float> sent_stats{stat_count};  // what the host sees of stats once it is past the event
    cudaEvent_t stats_sent;
    Graphs graphs;  // of the work on a micro-batch
    std::vector<ActivationRow> table;
    std::vector<Activations> acts;            // for each layer, of the micro-batch that is worked on
    ActivationSlots held_layers, held_inner;  // instances of Keep::layer and of Keep::inner

    // division.tp and its stages are those of the mesh.
    Gpt(const ModelConfig& config, const Workload& workload, const ZeroSettings& settings,
        const Mesh& mesh = one_process(), const Division& division = {});
    ~Gpt();
    Gpt(const Gpt&) = delete;
    Gpt& operator=(const Gpt&) = delete;

    // Points acts to what is kept for this task.
    void show(const PipelineTask& task);
    // Where all rows of what is then summed into `own` are made: there, if nothing is cut.
    floatX* summands(floatX* own) const { return rows.ranks() == 1 ? own : acts[0].summands; }
    // Where a norm's own rows are made, before they are gathered in `all`.
    floatX* own_norm(floatX* all) const { return rows.ranks() == 1 ? all : acts[0].own_norm; }

    // Of a unit that is acquired, or whose gradients have begun.
    UnitTensors<floatX> weights(int unit) const { return layout.tensors(unit, state.params(unit)); }
    UnitTensors<float> gradients(int unit) const { return layout.tensors(unit, state.grads(unit)); }
    int head_unit() const { return layout.last_unit(); }
    int rope_dims() const { return config.position == "rope" ? config.rope_dims : 0; }
    // where the classifier's weights (Vp, C) are
    int classifier_unit() const { return config.tie_embeddings ? 0 : head_unit(); }
    Tensor classifier_weight() const { return config.tie_embeddings ? wte : headw; }
    int local_vocab() const { return padded_vocab(config, rows.ranks()); }
};

// Bytes of each class of memory that a model takes on one rank: the one of the stage that takes most.
inline std::vector<MemoryClass> memory_classes(const ModelConfig& config, const Workload& w,
                                               const ZeroSettings& settings, const MeshShape& shape = {},
                                               const Division& division = {}) {
    size_t rope = config.position == "rope" ? (size_t)w.positions() * config.rope_dims * sizeof(float) : 0;
    std::vector<MemoryClass> most;
    for (int stage = 0; stage < shape.pp; stage++) {
        Share share(config, division, {.pipeline = stage}, w.training);
        ParameterLayout layout = parameter_layout(config, shape.dp, share.place());
        auto classes = ZeroState::memory(layout, shape, settings);
        classes.push_back({"activations", activation_bytes(config, w, share) + rope});
        if (w.fp8) classes.push_back({"fp8 copies", fp8_sizes(config, w, share).bytes()});
        if (settings.staging) {
            size_t bytes = CheckpointSaver::staging_bytes(layout, shape, settings);
            classes.push_back({"staging for checkpoints", bytes, true});
        }
        if (memory_total(classes) > memory_total(most)) most = classes;
    }
    return most;
}

inline MemoryPlan memory_plan(const ModelConfig& config, const Workload& workload,
                              const ZeroSettings& settings, const MeshShape& shape = {},
                              const Division& division = {}, int ranks_sharing_device = 1,
                              size_t of_graphs = 0) {
    auto classes = [=](int B, int micro_batches) {
        Workload w = workload;
        Division d = division;
        w.B = B, d.pipeline.micro_batches = micro_batches;
        auto classes = memory_classes(config, w, settings, shape, d);
        if (of_graphs > 0) classes.push_back({"graphs up to", of_graphs});
        return classes;
    };
    return {
        workload.B, workload.T, division.pipeline, workload.training, available_memory(ranks_sharing_device),
        classes};
}

Gpt::Gpt(const ModelConfig& config_, const Workload& workload_, const ZeroSettings& settings,
         const Mesh& mesh_, const Division& division)
    : config(config_),
      local(local_part(config, division.tp)),
      workload(workload_),
      mesh(mesh_),
      share(config, division, mesh.position, workload.training),
      layout(parameter_layout(config, mesh.shape.dp, share.place())),
      stream(compute.stream),
      state(layout, mesh, settings, stream),
      rows(mesh.tensor(), division.row_chunks, settings.overlap, stream),
      pipeline(mesh, division.pipeline, share.room,
               (size_t)workload.B * workload.T / division.tp * config.channels, stream, settings.overlap),
      fp8_memory(fp8_sizes(config, workload, share).bytes()),
      products(fp8_sizes(config, workload, share), fp8_memory.data, stream),
      held_layers(share.layers(0)),
      held_inner(share.layers(1)) {
    norm = config.norm == "rmsnorm" ? Norm::rmsnorm : Norm::layernorm;
    parallel = config.block == "parallel";
    swiglu = config.mlp == "swiglu";
    gelu = config.mlp == "gelu-exact" ? Gelu::exact : Gelu::tanh;
    allocate(stats, stat_count);
    cudaCheck(cudaEventCreateWithFlags(&stats_sent, cudaEventDisableTiming));

    table = activation_table(config, workload, share);
    size_t bytes = 0;
    for (const ActivationRow& row : table) bytes += row.bytes() * row.instances(share);
    allocate(activations, bytes);
    acts.resize(config.layers);
    char* next = activations;
    for (ActivationRow& row : table) {
        row.memory = next;
        next += row.bytes() * row.instances(share);
        for (Activations& view : acts) row.point(&view, 0);
    }

    if (int R = rope_dims()) {
        int positions = workload.positions();
        std::vector<float> table((size_t)positions * R);
        RopeScaling scaling = {config.rope_scaling, config.rope_low_frequency, config.rope_high_frequency,
                               config.rope_original_context};
        rope_table(table.data(), positions, R, config.rope_theta, scaling);
        allocate(rope, table.size());
        copy_to_device(rope, table.data(), table.size(), stream);
    }
    cudaCheck(cudaStreamSynchronize(stream));
}

void Gpt::show(const PipelineTask& task) {
    int begin = share.first_layer(task.chunk), end = share.end_layer(task.chunk);
    PipelineAction action = {task.work, task.micro_batch, task.chunk};
    std::vector<int> places = held_layers.enter(action), inner_places = held_inner.enter(action);
    bool forward = task.work == PipelineWork::forward;
    for (const ActivationRow& row : table) {
        if (row.keep == Keep::shared) continue;  // always in the same place
        if (row.keep == Keep::head) {
            if (task.part < share.last_part()) continue;
            for (Activations& view : acts) row.point(&view, task.slot);
            continue;
        }
        size_t pending = row.first_pending(share, task.chunk, task.pending_slot);
        for (int layer = row.keep == Keep::inner ? begin + 1 : begin; layer < end; layer++) {
            row.point(&acts[layer], row.keep == Keep::layer   ? places[layer - begin]
                                    : row.keep == Keep::inner ? inner_places[layer - begin - 1]
                                    : forward                 ? 0
                                                              : pending + (layer - begin));
        }
    }
    acts[begin].residual = task.input;
    for (Activations& view : acts) view.dresidual = task.gradient;
}

Gpt::~Gpt() {
    cudaStreamSynchronize(stream);
    for (void* pointer : {(void*)activations, (void*)rope, (void*)stats}) cudaFree(pointer);
    cudaEventDestroy(stats_sent);
}

// Each value depends on the seed, the tensor's name and the element only.
inline void initialize(Gpt& model, uint64_t seed) {
    std::vector<float> values;
    set_tensors(model.state, [&](const TensorRow& row, const std::string& name, size_t first, size_t count) {
        uint64_t key = random_key(seed, name);
        values.assign(count, row.mean);
        if (row.deviation > 0) {
#pragma omp parallel for
            for (size_t i = 0; i < count; i++) values[i] += row.deviation * random_normal(key, first + i);
        }
        return std::span<const float>(values);
    });
}

// ----------------------------------------------------------------------------
// forward
// ----------------------------------------------------------------------------

// out (own rows, OC) = inp (N, C) times a weight (OC, C) that is cut by columns: every tensor rank makes its
// summands of all rows.
inline void summed_product(Gpt& g, floatX* out, const floatX* inp, const floatX* weight, const floatX* bias,
                           int N, int C, int OC, bool accumulate) {
    floatX* all = g.summands(out);
    if (g.rows.rank() > 0) bias = nullptr;  // once in the sum
    g.rows.scatter(out, all, N, OC, [&](int first, int rows) {
        g.products.forward(all + (size_t)first * OC, inp + (size_t)first * C, weight, bias, rows, C, OC,
                           accumulate);
    });
    g.rows.wait();
}

// The own rows of norm1 are in place; writes qkv, att, and what attention adds to the residual stream: to
// delta, or in a parallel block to where the MLP adds its part before they are summed.
inline void attention_part(Gpt& g, int layer, const Batch& batch) {
    auto& a = g.acts[layer];
    auto w = g.weights(layer + 1);
    auto& c = g.local;
    int B = batch.B, T = batch.T, N = B * T, C = c.channels, A = c.heads * c.head_size, QKV = qkv_width(c);
    floatX* qkv = c.qk_norm ? a.qkv_raw : a.qkv;
    g.rows.gather(g.own_norm(a.norm1), a.norm1, N, C, [&](int first, int rows) {
        g.products.forward(qkv + (size_t)first * QKV, a.norm1 + (size_t)first * C, w[qkvw], w[qkvb], rows, C,
                           QKV);
    });
    int R = g.rope_dims();
    const float* angles = g.rope + (size_t)batch.past * R;
    if (c.qk_norm) {
        qk_norm_forward(a.qkv, a.qk_rstd, a.qkv_raw, w[qnormw], w[knormw], {angles, T, R}, N, c.heads,
                        c.kv_heads, c.head_size, c.norm_eps, g.stream);
    } else if (R > 0) {
        rope_forward(a.qkv, angles, B, T, c.heads, c.kv_heads, c.head_size, R, g.stream);
    }
    int limit = g.workload.cache_length;
    floatX* cache = limit ? a.cache + batch.row * cache_row_size(c, limit) : nullptr;
    if (cache) {
        kv_cache_append(cache, a.qkv, B, T, limit, batch.past, c.heads, c.kv_heads, c.head_size, g.stream);
    }
    if (batch.past > 0) {
        kv_cache_attention(a.att, a.qkv, cache, B, T, limit, batch.past, c.heads, c.kv_heads, c.head_size,
                           c.window, g.stream);
    } else {
        attention_forward(a.att, a.lse, a.qkv, batch.doc_start, B, T, c.heads, c.kv_heads, c.head_size,
                          c.window, g.stream);
    }
    if (g.parallel) {
        const floatX* bias = g.rows.rank() > 0 ? nullptr : w[attprojb];
        g.products.forward(g.summands(a.delta), a.att, w[attprojw], bias, N, A, C);
    } else {
        summed_product(g, a.delta, a.att, w[attprojw], w[attprojb], N, A, C, false);
    }
}

// What the MLP reads: its own norm, or in a parallel block the norm it shares with attention.
inline floatX* mlp_input(const Gpt& g, int layer) {
    return g.parallel ? g.acts[layer].norm1 : g.acts[layer].norm2;
}

// Writes fc and act.
inline void mlp_hidden(Gpt& g, int layer, const Batch& batch) {
    auto& a = g.acts[layer];
    auto w = g.weights(layer + 1);
    int N = batch.B * batch.T, C = g.config.channels, F = g.local.mlp_width, F1 = fc_width(g.local);
    auto product = [&](int first, int rows) {
        const floatX* inp = mlp_input(g, layer) + (size_t)first * C;
        floatX *fc = a.fc + (size_t)first * F1, *act = a.act + (size_t)first * F;
        if (g.swiglu) {
            g.products.forward(fc, inp, w[fcw], w[fcb], rows, C, F1);
            swiglu_forward(act, fc, rows, F, g.stream);
        } else {
            g.products.gelu_forward(g.gelu, act, fc, inp, w[fcw], w[fcb], rows, C, F);
        }
    };
    if (g.parallel)
        product(0, N);  // norm1 was gathered for attention
    else
        g.rows.gather(g.own_norm(a.norm2), a.norm2, N, C, product);
}

// Runs the block from its input to act. The input is a.residual, or before the first pass over it, what the
// block before left: that block's stream and delta, added here in the same pass over memory as the norm.
inline void block_forward(Gpt& g, int layer, const Batch& batch, bool input_ready) {
    auto& a = g.acts[layer];
    auto w = g.weights(layer + 1);
    int n = g.rows.own_rows(batch.B * batch.T), C = g.config.channels;
    float eps = g.config.norm_eps;
    floatX* normed = g.own_norm(a.norm1);
    if (input_ready) {
        norm_forward(g.norm, normed, a.norm1_mean, a.norm1_rstd, a.residual, w[norm1w], w[norm1b], n, C, eps,
                     g.stream);
    } else {
        auto& before = g.acts[layer - 1];
        residual_norm_forward(g.norm, a.residual, normed, a.norm1_mean, a.norm1_rstd,
                              g.parallel ? before.residual : before.residual2, before.delta, w[norm1w],
                              w[norm1b], n, C, eps, g.stream);
    }
    attention_part(g, layer, batch);
    if (!g.parallel) {
        residual_norm_forward(g.norm, a.residual2, g.own_norm(a.norm2), a.norm2_mean, a.norm2_rstd,
                              a.residual, a.delta, w[norm2w], w[norm2b], n, C, eps, g.stream);
    }
    mlp_hidden(g, layer, batch);
}

// Rows of the token and position tables to `out` (own rows, C). Each tensor rank has a part of the words,
// and the first one adds the positions.
inline void embed(Gpt& g, const Batch& batch, floatX* out) {
    int C = g.config.channels;
    g.state.acquire(0, +1);
    auto w = g.weights(0);
    floatX* positions = w[wpe] && g.rows.rank() == 0 ? w[wpe] + (size_t)batch.past * C : nullptr;
    floatX* all = g.summands(out);
    embedding_forward(all, batch.tokens, w[wte], positions, batch.counted_from, batch.B, batch.T, C, g.stream,
                      g.share.words());
    g.rows.scatter(out, all, batch.B * batch.T, C);
    g.state.release(0);
}

// The part of the forward pass that a task stands for: from tokens or the stream of the part before, to the
// stream for the next part or the normed output of the last block (normf).
inline void forward_part(Gpt& g, const Batch& batch, const PipelineTask& task) {
    int N = batch.B * batch.T, n = g.rows.own_rows(N), C = g.config.channels;
    int begin = g.share.first_layer(task.chunk), end = g.share.end_layer(task.chunk);
    if (task.part == 0) embed(g, batch, task.input);
    for (int layer = begin; layer < end; layer++) {
        g.state.acquire(layer + 1, +1);
        auto& a = g.acts[layer];
        auto w = g.weights(layer + 1);
        block_forward(g, layer, batch, layer == begin);
        // a parallel block's MLP adds to what its attention left
        summed_product(g, a.delta, a.act, w[fcprojw], w[fcprojb], N, g.local.mlp_width, C, g.parallel);
        g.state.release(layer + 1);
    }
    auto& a = g.acts[end - 1];
    floatX* stream = g.parallel ? a.residual : a.residual2;
    if (task.part < g.share.last_part()) {
        residual_forward(task.output, stream, a.delta, (size_t)n * C, g.stream);
        return;
    }
    g.state.acquire(g.head_unit(), +1);
    auto head = g.weights(g.head_unit());
    floatX* normed = g.own_norm(a.normf);
    residual_norm_forward(g.norm, a.residualf, normed, a.normf_mean, a.normf_rstd, stream, a.delta,
                          head[normfw], head[normfb], n, C, g.config.norm_eps, g.stream);
    g.rows.gather(normed, a.normf, N, C);
    g.state.release(g.head_unit());
}

// From logits of this rank's words to losses, and to the gradient of the logits.
inline void classify_rows(Gpt& g, float* losses, const int* targets, float dloss, int rows,
                          bool want_gradient) {
    auto& a = g.acts[0];
    auto [first_word, V] = g.share.words();
    int Vp = g.local_vocab(), ranks = g.rows.ranks();
    if (ranks == 1) {
        classifier(a.logits, losses, targets, dloss, rows, V, Vp, want_gradient, g.stream);
        return;
    }
    size_t part = (size_t)rows * 3;
    classifier_part(a.parts + g.rows.rank() * part, a.logits, targets, first_word, rows, V, Vp, g.stream);
    g.rows.exchange(a.parts, part);
    classifier_whole(a.logits, losses, a.parts, ranks, targets, dloss, first_word, rows, V, Vp, want_gradient,
                     g.stream);
}

// On the last stage: adds the sum of the losses to stats. With a gradient, the loss counts dloss times:
// writes dnorm (the gradient of normf) and adds to that of the classifier's weights. Logits exist for
// loss_chunk tokens at a time.
inline void classify(Gpt& g, const Batch& batch, float dloss, bool want_gradient) {
    auto& a = g.acts[0];
    int N = batch.B * batch.T, C = g.config.channels, Vp = g.local_vocab();
    int unit = g.classifier_unit();
    g.state.acquire(unit, 0);
    const floatX* weight = g.weights(unit)[g.classifier_weight()];
    float* dweight = nullptr;
    floatX* dnorm = g.summands(a.dnorm);
    if (want_gradient) {
        g.state.begin_gradients(unit);
        dweight = g.gradients(unit)[g.classifier_weight()];
    }
    for (int begin = 0; begin < N; begin += g.workload.loss_chunk) {
        int n = std::min(g.workload.loss_chunk, N - begin);
        const floatX* inp = a.normf + (size_t)begin * C;
        matmul_forward(a.logits, inp, weight, nullptr, n, C, Vp, g.stream);
        classify_rows(g, a.losses + begin, batch.targets + begin, dloss, n, want_gradient);
        if (!want_gradient) continue;
        matmul_backward_input(dnorm + (size_t)begin * C, a.logits, weight, n, C, Vp, g.stream);
        matmul_backward_weight(dweight, a.logits, inp, n, C, Vp, g.stream);
    }
    g.state.release(unit);
    if (want_gradient) g.rows.scatter(a.dnorm, dnorm, N, C);
    // all tensor ranks know the losses, and one counts them
    if (g.rows.rank() == 0) sum_losses(g.stats + stat_loss, a.losses, N, g.stream);
}

// ----------------------------------------------------------------------------
// backward
// ----------------------------------------------------------------------------

// A matrix of a block, and what its gradients are made from. Shapes as in matmul.cuh.
struct Linear {
    Tensor weight, bias;
    int C, OC;
    const floatX* inp;  // (N, C)
    floatX* dout;       // (N, OC) null: dresidual is read where it is
    // each tensor rank makes the gradient of the bias from its own rows of dresidual
    bool bias_of_own_rows = false;
    const floatX* pre_gelu = nullptr;  // (N, C) what inp is the GELU of, where it is
};

struct BlockLinears {
    Linear qkv, attproj, fc, fcproj;

    BlockLinears(const Gpt& g, int layer) {
        auto& a = g.acts[layer];
        auto& c = g.local;
        int C = c.channels, A = c.heads * c.head_size, F = c.mlp_width;
        // attention and MLP of a parallel block have one gradient; and without a place of its own, that of
        // attention comes where the MLP's has been used
        floatX* datt_out = a.datt_out ? a.datt_out : a.dmlp_out;
        bool cut = g.rows.ranks() > 1;
        qkv = {qkvw, qkvb, C, qkv_width(c), a.norm1, a.dqkv};
        attproj = {attprojw, attprojb, A, C, a.att, datt_out, cut};
        fc = {fcw, fcb, C, fc_width(c), mlp_input(g, layer), a.dfc};
        fcproj = {fcprojw, fcprojb, F, C, a.act, a.dmlp_out, cut, g.swiglu ? nullptr : a.fc};
    }
};

inline void weight_backward(Gpt& g, int layer, const Linear& l, const floatX* dout, int N) {
    auto dw = g.gradients(layer + 1);
    float* dbias = l.bias_of_own_rows ? nullptr : dw[l.bias];
    g.products.backward_weight(dw[l.weight], dout, l.inp, N, l.C, l.OC, dbias, g.acts[layer].scratch);
}

// Backward pass of a matrix that reads the residual stream: the gradient of its input goes to dnorm, and is
// summed over the tensor ranks behind the product for the weights. `sum` off: the summands wait for those of
// another matrix, which accumulates. with_weights off: the weights' gradient is left for later.
inline void reader_backward(Gpt& g, int layer, const Linear& l, int N, bool accumulate, bool sum,
                            bool with_weights) {
    auto& a = g.acts[layer];
    auto w = g.weights(layer + 1);
    floatX* all = g.summands(a.dnorm);
    auto product = [&](int first, int rows) {
        g.products.backward_input(all + (size_t)first * l.C, l.dout + (size_t)first * l.OC, w[l.weight], rows,
                                  l.C, l.OC, accumulate);
    };
    sum ? g.rows.scatter(a.dnorm, all, N, l.C, product) : product(0, N);
    if (with_weights) weight_backward(g, layer, l, l.dout, N);
    g.rows.wait();
}

// Of a matrix that writes to the residual stream, whose gradient comes from all tensor ranks, unless it is
// there already. dinp is the gradient of what the matrix reads, or of what that is the GELU of.
inline void writer_backward(Gpt& g, int layer, const Linear& l, floatX* dinp, int N, bool gathered,
                            bool with_weights) {
    auto& a = g.acts[layer];
    auto w = g.weights(layer + 1);
    auto dw = g.gradients(layer + 1);
    floatX *own = a.dresidual, *all = l.dout ? l.dout : own;
    auto product = [&](int first, int rows) {
        floatX *dx = dinp + (size_t)first * l.C, *dy = all + (size_t)first * l.OC;
        if (l.pre_gelu) {
            const floatX* pre_gelu = l.pre_gelu + (size_t)first * l.C;
            g.products.backward_gelu(g.gelu, dx, pre_gelu, dy, w[l.weight], rows, l.C, l.OC);
        } else {
            g.products.backward_input(dx, dy, w[l.weight], rows, l.C, l.OC);
        }
    };
    if (l.bias_of_own_rows && dw[l.bias])
        matmul_backward_bias(dw[l.bias], a.scratch, own, g.rows.own_rows(N), l.OC, g.stream);
    if (g.rows.ranks() == 1 && all != own && !gathered) {  // for later, when dresidual has changed
        size_t bytes = (size_t)N * l.OC * sizeof(floatX);
        cudaCheck(cudaMemcpyAsync(all, own, bytes, cudaMemcpyDeviceToDevice, g.stream));
        gathered = true;
    }
    gathered ? product(0, N) : g.rows.gather(own, all, N, l.OC, product);
    if (with_weights) weight_backward(g, layer, l, all, N);
}

// Makes again what the forward pass of the layer did not keep: by the same operations, so the same bits.
inline void recompute(Gpt& g, int layer, const Batch& batch) {
    if (g.workload.recompute == Recompute::block) block_forward(g, layer, batch, true);
    if (g.workload.recompute == Recompute::mlp) {
        auto& a = g.acts[layer];
        auto w = g.weights(layer + 1);
        if (!g.parallel) {
            norm_forward(g.norm, g.own_norm(a.norm2), a.norm2_mean, a.norm2_rstd, a.residual2, w[norm2w],
                         w[norm2b], g.rows.own_rows(batch.B * batch.T), g.config.channels, g.config.norm_eps,
                         g.stream);
        }
        mlp_hidden(g, layer, batch);
    }
}

// dresidual is the gradient of the residual stream: each part of the block reads it as the gradient of its
// output and adds that of its input. with_weights off: the gradients of the matrices are left for
// weight_gradients().
inline void block_backward(Gpt& g, int layer, const Batch& batch, bool with_weights) {
    auto& c = g.local;
    int B = batch.B, T = batch.T, N = B * T, n = g.rows.own_rows(N), C = c.channels, F = c.mlp_width;
    auto& a = g.acts[layer];
    auto w = g.weights(layer + 1);
    auto dw = g.gradients(layer + 1);
    BlockLinears linears(g, layer);
    recompute(g, layer, batch);

    // MLP
    writer_backward(g, layer, linears.fcproj, g.swiglu ? a.dact : a.dfc, N, false, with_weights);
    if (g.swiglu) swiglu_backward(a.dfc, a.dact, a.fc, N, F, g.stream);
    reader_backward(g, layer, linears.fc, N, false, !g.parallel, with_weights);
    // attention of a parallel block has the same output gradient as its MLP, so dresidual stays as it is
    if (!g.parallel) {
        norm_backward(g.norm, a.dresidual, dw[norm2w], dw[norm2b], a.scratch, a.dnorm, a.residual2, w[norm2w],
                      a.norm2_mean, a.norm2_rstd, n, C, g.stream);
    }

    // attention
    writer_backward(g, layer, linears.attproj, a.datt, N, g.parallel, with_weights);
    attention_backward(a.dqkv, a.scratch, a.datt, a.qkv, a.att, a.lse, batch.doc_start, B, T, c.heads,
                       c.kv_heads, c.head_size, c.window, g.stream);
    int R = g.rope_dims();
    if (c.qk_norm) {
        qk_norm_backward(a.dqkv, dw[qnormw], dw[knormw], a.scratch, a.dqkv, a.qkv_raw, a.qk_rstd, w[qnormw],
                         w[knormw], {g.rope, T, R}, N, c.heads, c.kv_heads, c.head_size, g.stream);
    } else if (R > 0) {
        rope_backward(a.dqkv, g.rope, B, T, c.heads, c.kv_heads, c.head_size, R, g.stream);
    }
    reader_backward(g, layer, linears.qkv, N, g.parallel, true, with_weights);
    norm_backward(g.norm, a.dresidual, dw[norm1w], dw[norm1b], a.scratch, a.dnorm, a.residual, w[norm1w],
                  a.norm1_mean, a.norm1_rstd, n, C, g.stream);
}

// From dnorm as classify() left it to dresidual.
inline void head_backward(Gpt& g, const Batch& batch, bool last_micro_batch) {
    int unit = g.head_unit(), n = g.rows.own_rows(batch.B * batch.T), C = g.config.channels;
    g.state.acquire(unit, -1);
    g.state.begin_gradients(unit);
    auto& a = g.acts[0];
    auto w = g.weights(unit);
    auto dw = g.gradients(unit);
    cudaCheck(cudaMemsetAsync(a.dresidual, 0, (size_t)n * C * sizeof(floatX), g.stream));
    norm_backward(g.norm, a.dresidual, dw[normfw], dw[normfb], a.scratch, a.dnorm, a.residualf, w[normfw],
                  a.normf_mean, a.normf_rstd, n, C, g.stream);
    g.state.release(unit);
    g.state.reduce_gradients(unit, last_micro_batch);
}

// From dresidual to the gradients of the tables.
inline void embed_backward(Gpt& g, const Batch& batch, bool last_micro_batch) {
    int C = g.config.channels;
    g.state.begin_gradients(0);
    auto dw = g.gradients(0);
    floatX *own = g.acts[0].dresidual, *all = g.summands(own);
    g.rows.gather(own, all, batch.B * batch.T, C);
    float* dpositions = g.rows.rank() == 0 ? dw[wpe] : nullptr;  // as in the forward pass
    embedding_backward(dw[wte], dpositions, g.acts[0].scratch, all, batch.tokens, batch.by_token,
                       batch.by_position, batch.counted_from, batch.B, batch.T, C, g.stream, g.share.words());
    g.state.reduce_gradients(0, last_micro_batch);
}

// The part of the backward pass that a task stands for: from the loss, or from the gradient that the next
// part sent, to the gradients of the blocks and what the part before is sent, or to those of the tables.
// After the last micro-batch of a step the gradients of each unit are summed over the ranks as soon as they
// are there.
inline void backward_part(Gpt& g, const Batch& batch, const PipelineTask& task, float dloss,
                          bool last_micro_batch) {
    bool with_weights = task.work == PipelineWork::backward;
    if (task.part == g.share.last_part()) {
        classify(g, batch, dloss, true);
        // tied embeddings are used for nothing else on the last of several stages
        if (g.layout.has(0) && !g.share.has_embedding()) g.state.reduce_gradients(0, last_micro_batch);
        head_backward(g, batch, last_micro_batch);
    }
    int begin = g.share.first_layer(task.chunk), end = g.share.end_layer(task.chunk);
    for (int layer = end - 1; layer >= begin; layer--) {
        g.state.acquire(layer + 1, -1);
        g.state.begin_gradients(layer + 1);
        block_backward(g, layer, batch, with_weights);
        g.state.release(layer + 1);
        g.state.reduce_gradients(layer + 1, last_micro_batch && with_weights);
    }
    if (task.part == 0) embed_backward(g, batch, last_micro_batch);
}

// The gradients of the blocks' matrices, which backward_part() left.
inline void weight_gradients(Gpt& g, const Batch& batch, const PipelineTask& task, bool last_micro_batch) {
    int N = batch.B * batch.T;
    for (int layer = g.share.end_layer(task.chunk) - 1; layer >= g.share.first_layer(task.chunk); layer--) {
        g.state.begin_gradients(layer + 1);
        BlockLinears all(g, layer);
        for (const Linear& l : {all.fcproj, all.fc, all.attproj, all.qkv})
            weight_backward(g, layer, l, l.dout, N);
        g.state.reduce_gradients(layer + 1, last_micro_batch);
    }
}

// ----------------------------------------------------------------------------
// passes
// ----------------------------------------------------------------------------

// Goes through a list of actions on micro-batches of `tokens` tokens. load(micro_batch, slot) brings one to
// the device when the first action on it comes, work(batch, task) does the actions of this stage.
template <typename Load, typename Work>
void run_pipeline(Gpt& g, const std::vector<PipelineAction>& actions, int tokens, Load&& load, Work&& work) {
    std::vector<Batch> batches(g.share.room.micro_batches);
    std::vector<int> loaded(batches.size(), -1);
    size_t size = (size_t)g.rows.own_rows(tokens) * g.config.channels;
    bool has_backward = pipeline_room(actions, g.share.chunks()).has_backward;
    for (ActivationSlots* held : {&g.held_layers, &g.held_inner}) held->begin_run(has_backward);
    g.pipeline.run(actions, size, [&](const PipelineTask& task) {
        int slot = task.batch_slot;
        if (loaded[slot] != task.micro_batch) batches[slot] = load(task.micro_batch, slot);
        loaded[slot] = task.micro_batch;
        g.show(task);
        work(batches[slot], task);
    });
}

// From tokens to normf on the last stage.
inline void forward(Gpt& g, const Batch& batch) {
    auto load = [&](int, int) { return batch; };
    run_pipeline(g, forward_actions(g.share.pipeline(1)), batch.B * batch.T, load,
                 [&](const Batch& batch, const PipelineTask& task) { forward_part(g, batch, task); });
}

// Adds the losses of micro-batches load(0, slot), load(1, slot) ... to stats.
template <typename Load>
void add_losses(Gpt& g, int micro_batches, Load&& load) {
    run_pipeline(g, forward_actions(g.share.pipeline(micro_batches)), g.workload.B * g.workload.T, load,
                 [&](const Batch& batch, const PipelineTask& task) {
                     forward_part(g, batch, task);
                     if (task.part == g.share.last_part()) classify(g, batch, 0, false);
                 });
}

// Adds their gradients too, with losses that count dloss times. ends_step: they are the last of the step.
template <typename Load>
void accumulate_gradients(Gpt& g, int micro_batches, Load&& load, float dloss, bool ends_step = true) {
    auto actions = pipeline_actions(g.share.pipeline(micro_batches), g.share.stage());
    run_pipeline(g, actions, g.workload.B * g.workload.T, load,
                 [&](const Batch& batch, const PipelineTask& task) {
                     bool last = ends_step && task.micro_batch == micro_batches - 1;
                     auto key = [&] { return task_key(batch, task, dloss, last, g.acts); };
                     g.graphs.run(key, g.stream, [&] {
                         switch (task.work) {
                         case PipelineWork::forward:
                             return forward_part(g, batch, task);
                         case PipelineWork::weight_gradient:
                             return weight_gradients(g, batch, task, last);
                         default:
                             return backward_part(g, batch, task, dloss, last);
                         }
                     });
                 });
}

// ----------------------------------------------------------------------------
// update
// ----------------------------------------------------------------------------

// What a rank adds to a statistic that counts ranks: a float of four equal bytes, which a memset can write.
constexpr int one_rank_byte = 0x3f;
constexpr float one_rank = std::bit_cast<float>(0x3f3f3f3f);

struct StepStats {
    float loss;           // mean over the targets of the step
    float gradient_norm;  // before clipping
    bool finite;          // false: the weights were left as they were
    bool stop;            // a rank was asked to stop
    bool saved;           // no rank need be waited for to go on with a checkpoint
};

// Starts a step: no gradient, no loss.
inline void zero_gradients(Gpt& g) {
    g.state.zero_gradients();
    cudaCheck(cudaMemsetAsync(g.stats, 0, stat_count * sizeof(float), g.stream));
}

// Sends the host what they are when the compute stream comes here.
inline void send_stats(Gpt& g) {
    cudaCheck(cudaMemcpyAsync(g.sent_stats.data, g.stats, stat_count * sizeof(float), cudaMemcpyDeviceToHost,
                              g.stream));
    cudaCheck(cudaEventRecord(g.stats_sent, g.stream));
}

// Waits for them. `targets` is the number of targets whose losses were summed.
inline StepStats await_stats(Gpt& g, double targets) {
    wait_for(g.stats_sent, g.mesh);
    const float* stats = g.sent_stats.data;
    return {(float)(stats[stat_loss] / targets), stats[stat_norm], !std::isnan(stats[stat_scale]),
            stats[stat_stop] > 0, stats[stat_saved] > (g.mesh.shape.ranks() - 0.5f) * one_rank};
}

// When all work of the compute stream is done.
inline StepStats read_stats(Gpt& g, double targets) {
    send_stats(g);
    return await_stats(g, targets);
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
          chooser_({.pipeline = g.mesh.shape.pp - 1}),
          tokens_(std::max(limit(), texts)) {}

private:
    std::vector<std::vector<float>> read(const std::vector<int>& tokens, int length, int row) override {
        pass(tokens, {.B = 1, .T = (int)tokens.size(), .row = row});
        return next_logits(length - 1, 1);
    }

    std::vector<std::vector<float>> go_on(const std::vector<int>& newest, int past) override {
        pass(newest, {.B = (int)newest.size(), .T = 1, .past = past});
        return next_logits(0, (int)newest.size());
    }

    void pass(const std::vector<int>& tokens, Batch batch) {
        copy_to_device(tokens_.data, tokens.data(), tokens.size(), g_.stream);
        batch.tokens = tokens_.data;
        forward(g_, batch);
    }

    // Logits of the tokens that follow rows `first`, first + 1, ... of normf, one row for each.
    std::vector<std::vector<float>> next_logits(size_t first, int rows) {
        std::vector<std::vector<float>> logits;
        if (!g_.share.has_head()) return logits;
        int unit = g_.classifier_unit(), Vp = g_.local_vocab(), C = g_.config.channels,
            ranks = g_.rows.ranks();
        size_t part = (size_t)rows * Vp;
        g_.state.acquire(unit, 0);
        floatX* all = g_.acts[0].logits;
        matmul_forward(all + g_.rows.rank() * part, g_.acts[0].normf + first * C,
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
                logits.back().insert(logits.back().end(), begin, begin + g_.share.words_of(rank).count);
            }
        }
        return logits;
    }

    void copy_first_row(int length, int texts) override {
        size_t row = cache_row_size(g_.config, limit()), used = cache_row_size(g_.config, length);
        for (const Activations& a : g_.acts) {
            for (int i = 1; i < texts; i++) {
                cudaCheck(cudaMemcpyAsync(a.cache + i * row, a.cache, used * sizeof(floatX),
                                          cudaMemcpyDeviceToDevice, g_.stream));
            }
        }
    }

    // All ranks take the tokens of the one that chooses.
    void share(std::vector<int>& tokens) override {
        if (g_.mesh.world().size() == 1) return;
        copy_to_device(tokens_.data, tokens.data(), tokens.size(), g_.stream);
        g_.mesh.world().broadcast(tokens_.data, tokens.size(), rank_of(chooser_, g_.mesh.shape),
                                  Traffic::statistics, g_.stream);
        copy_to_host(tokens.data(), tokens_.data, tokens.size(), g_.stream, g_.mesh);
    }

    Gpt& g_;
    const MeshPosition chooser_;
    DeviceArray<int> tokens_;
};

// Adds up to `count` tokens to the prompt, for each key a text of its own: write_texts() says how.
template <typename Show>
void generate(Gpt& g, const std::vector<int>& prompt, int count, int end, const Sampling& sampling,
              const std::vector<uint64_t>& keys, Show&& show) {
    Writer writer(g, prompt, (int)keys.size());
    write_texts(writer, count, end, sampling, keys, show);
}

// ----------------------------------------------------------------------------
// training
// ----------------------------------------------------------------------------

inline Recompute recompute_mode(const std::string& name) {
    return name == "block" ? Recompute::block : name == "mlp" ? Recompute::mlp : Recompute::none;
}

// Tokens whose logits exist at once, if the user leaves it open. Each chunk reads and writes all of the fp32
// gradient of the classifier's weights: 8 bytes for 2 FLOPs a token. A card that does 150 to 300 FLOPs in the
// time of a byte is kept busy by some thousand tokens at once, which in bf16 take up to 1 GiB.
inline int chosen_loss_chunk(const ModelConfig& config, int tokens) {
    constexpr size_t budget = (sizeof(floatX) == 2 ? 1024 : 256) << 20;
    return (int)std::clamp<size_t>(budget / (padded_vocab(config) * sizeof(floatX)), 1, tokens);
}

inline Workload training_workload(const Options& o) {
    int tokens = o.micro_batch * o.sequence_length;
    int chunk = o.loss_chunk > 0 ? std::min(o.loss_chunk, tokens) : chosen_loss_chunk(o, tokens);
    return {.B = o.micro_batch,
            .T = o.sequence_length,
            .training = true,
            .recompute = recompute_mode(o.recompute),
            .loss_chunk = chunk,
            .fp8 = o.matmul_dtype == "fp8"};
}

inline Division division_of(const Options& o, const Workload& w) {
    size_t parameters = parameter_layout(o).parameter_count();
    double state =
        (double)memory_total(ZeroState::memory(parameter_layout(o), {}, zero_settings(o))) / parameters;
    return divide(o, {.state = state * block_parameters(o),
                      .activations = (double)layer_bytes(o, w, Share(o, {.tp = o.tp}, {}, true)),
                      .table = state * padded_vocab(o) * o.channels});
}

// Makes the loss of all ranks NaN, because this one is in trouble.
inline void spoil_loss(Gpt& g) {
    constexpr int nan_bytes = 0xff;
    cudaCheck(cudaMemsetAsync(g.stats + stat_loss, nan_bytes, sizeof(float), g.stream));
}

// Mean loss over the first `count` samples, which the data ranks share.
inline float evaluate(Gpt& g, Batches& batches, uint64_t count, const std::string& trouble) {
    cudaCheck(cudaMemsetAsync(g.stats, 0, stat_count * sizeof(float), g.stream));
    uint64_t B = g.workload.B, of_all = B * g.mesh.shape.dp;
    add_losses(g, (int)ceil_div(count, of_all), [&](int micro, int slot) {
        uint64_t first = micro * of_all + B * g.mesh.data_rank();
        return batches.load(first, (int)std::min(B, count - std::min(count, first)), slot);
    });
    if (!trouble.empty()) spoil_loss(g);
    g.state.sum_statistics(g.stats);
    return read_stats(g, (double)count * g.workload.T).loss;
}

// Adds this rank to those that say so, for all ranks to see after the step.
inline void count_rank(Gpt& g, Statistic what) {
    cudaCheck(cudaMemsetAsync(g.stats + what, one_rank_byte, sizeof(float), g.stream));
}

// The losses and gradients of `micro_batches` micro-batches on each data rank, from sample `first` on.
inline void pass_step(Gpt& g, Batches& batches, uint64_t first, int micro_batches, bool ends_step) {
    int ranks = g.mesh.shape.dp, rank = g.mesh.data_rank(), B = g.workload.B;
    float dloss = 1.0f / ((float)micro_batches * ranks * B * g.workload.T);
    zero_gradients(g);
    auto load = [&](int micro, int slot) {
        return batches.load(first + ((uint64_t)micro * ranks + rank) * B, B, slot);
    };
    accumulate_gradients(g, micro_batches, load, dloss, ends_step);
}

// One step of `micro_batches` micro-batches on each data rank, from sample `first` on. A rank in trouble
// makes the loss of all ranks NaN, so that none of them changes its weights. What else the ranks tell each
// other, tell() counts when the device has the passes. The statistics are sent before the weights change:
// while they do, the host can read them and give the device the next step.
template <typename Tell>
void train_step(Gpt& g, Batches& batches, uint64_t first, int micro_batches, AdamW settings, float max_norm,
                uint64_t seed, const std::string& trouble, Tell&& tell) {
    pass_step(g, batches, first, micro_batches, true);
    if (!trouble.empty()) spoil_loss(g);
    tell();
    g.state.update(g.stats, settings, max_norm, seed, [&] { send_stats(g); });
    g.products.weights_changed(g.graphs.on);
}

inline std::string sample_text(Gpt& g, const Options& o, const Tokenizer* tokenizer, int step) {
    TextDecoder decoder(tokenizer, o.prompt.empty());
    std::string sample = o.prompt;
    uint64_t key = random_key(o.seed, text("sample at step %d", step));
    generate(g, prompt_tokens(o, tokenizer, o.prompt), o.sample_tokens, o.document_end, {.temperature = 0.8f},
             {key}, [&](int, int token) {
                 sample += decoder.add(token);
                 return true;
             });
    return sample + decoder.finish();
}

// ----------------------------------------------------------------------------
// the train command
// ----------------------------------------------------------------------------

// For all ranks, after a step whose loss or gradient is not finite: throws the reason.
inline void raise_not_finite(const Gpt& g, const World& world, const std::string& trouble, int step,
                             const StepStats& stats) {
    raise_trouble(world, trouble);
    std::string bad;
    for (const std::string& of_rank : world.gather(first_bad_gradient(g.state))) {
        if (bad.empty()) bad = of_rank;
    }
    raise_trouble(world,
                  text("step %d: loss %g, gradient norm %g, first gradient that is not finite: %s; try a "
                       "lower --learning-rate or a longer --warmup-steps",
                       step, plain_nan(stats.loss), plain_nan(stats.gradient_norm),
                       bad.empty() ? "none" : bad.c_str()));
}

// For all ranks: where the run goes on, or begins with weights of its own or another's.
inline RunPosition begin_run(Gpt& g, const CommandLine& line, RunCheckpoints& checkpoints) {
    if (line.origin && !line.weights_only) return checkpoints.resume(*line.origin);
    if (line.origin)
        checkpoints.take_weights(line.origin->checkpoint);
    else
        initialize(g, line.options.seed);
    return {};
}

// Refuses data that were made for another tokenizer, and adds what else is strange about them to the notes.
inline void check_data(const Options& o, const TokenLoader& train, const TokenLoader* val,
                       const Tokenizer* tokenizer, std::vector<std::string>& notes) {
    auto add = [&](const std::vector<std::string>& more) {
        notes.insert(notes.end(), more.begin(), more.end());
    };
    add(check_token_records(train, tokenizer, o.document_end));
    if (!val) return;
    add(check_token_records(*val, tokenizer, o.document_end));
    add(overlap_warnings(train, *val));
}

// For all ranks.
inline void train(const CommandLine& line, const World& world) {
    const Options& o = line.options;
    // What can be refused is refused before the run directory is made and memory is taken.
    Workload workload = training_workload(o);
    Division division;
    std::unique_ptr<TokenLoader> train_data, val_data;
    std::unique_ptr<Tokenizer> tokenizer;
    std::unique_ptr<RunLog> log;
    std::unique_ptr<MemoryPlan> memory;
    std::vector<std::string> notes = line.notes;  // for the header
    world.together([&] {
        check_precision(o);
        choose_attention(o);
        check_matmul_dtype(o);
        check_communication(o);
        train_data = std::make_unique<TokenLoader>(o.train_data, o.vocab_size, workload.T,
                                                   SampleOrder::shuffled, o.seed);
        if (!o.val_data.empty()) {
            val_data =
                std::make_unique<TokenLoader>(o.val_data, o.vocab_size, workload.T, SampleOrder::sequential);
        }
        // Tokens of another vocabulary are noticed before an earlier run is cleared away.
        std::vector<int> tokens(2 * workload.T);
        for (const auto* loader : {&train_data, &val_data}) {
            if (*loader) (*loader)->load(0, tokens.data(), tokens.data() + workload.T);
        }
        tokenizer = Tokenizer::load_if_any(o.tokenizer);
        if (world.is_root()) check_data(o, *train_data, val_data.get(), tokenizer.get(), notes);
        division = division_of(o, workload);
        memory =
            std::make_unique<MemoryPlan>(memory_plan(o, workload, zero_settings(o), mesh_shape(o), division,
                                                     ranks_sharing_device(world), graph_memory(o)));
        memory->check();
    });
    world.together([&] {
        if (!world.is_root()) return;
        check_tuning(o);
        log = std::make_unique<RunLog>(o.run_dir, line.folder);
    });

    printf("%s\n", options_summary(o, command_train, terminal_width()).c_str());
    const cudaDeviceProp& device = device_properties();
    std::string built =
        text("%s (%s, %s; %s)", device.name, device_name, floatX_name, communication_libraries().c_str());
    printf("device       %s\n", built.c_str());
    print_run(o, *train_data);
    for (const std::string& note : notes) printf("             %s\n", note.c_str());
    memory->print(o.pp > 1 ? " on the stage that takes most" : o.dp * o.tp > 1 ? " on each rank" : "");
    fflush(stdout);

    Mesh mesh(world, mesh_shape(o), nullptr);
    mesh.timeout_seconds = o.communication_timeout;
    if (world.size() > 1) printf("ranks        %s\n", mesh.picture().c_str());
    if (std::string advice = launcher_advice(); !advice.empty()) printf("stopping     %s\n", advice.c_str());
    if (o.pp > 1) printf("pipeline     %s\n", pipeline_text(division, o.pp_schedule).c_str());
    ZeroSettings settings = zero_settings(o);
    settings.host_threads = threads_per_rank(world);
    Gpt g(o, workload, settings, mesh, division);

    double gemm = measured_gemm_rate(available_memory(), g.stream),
           published = published_peak(device.name, sizeof(floatX) == 2);
    g.graphs.on = choose_graphs(o, gemm);
    Meter meter(o, workload.T, o.peak_tflops > 0 ? o.peak_tflops * 1e12 : published, gemm, world.size());
    printf("rate         %sFLOP/s measured in products%s\n", human(gemm).c_str(),
           published > 0 ? text(", %sFLOP/s published", human(published).c_str()).c_str() : "");

    std::string trouble;  // what went wrong on this rank, to be raised when all ranks can hear of it
    // mpirun shows its processes a terminal whatever its own output is
    bool on_terminal = isatty(STDOUT_FILENO) && !launched_processes();
    StepLog progress(o, meter, log.get(), on_terminal);
    auto layout_at = [&](const MeshPosition& position) {
        return parameter_layout(o, o.dp, Share(o, division, position, true).place());
    };
    // So the log tells of every step that a checkpoint has, even if the power fails.
    auto sync_log = [&] {
        if (log) progress.warn(log->sync());
    };
    RunCheckpoints checkpoints(g.state, layout_at, o, world, sync_log,
                               [&](const SaveReport& report) { progress.checkpoint(report); });
    RunPosition at = begin_run(g, line, checkpoints);
    const int first_step = at.step;
    world.together([&] {
        if (!log) return;
        if (line.folder != RunFolder::replaced)
            check_space(checkpoints_folder(o.run_dir), checkpoints.bytes());
        std::vector<std::string> changes = line.notes;
        for (const std::string& note : log->begin(options_to_json(o, command_train), at.step)) {
            printf("             %s\n", note.c_str());
            changes.push_back(note);
        }
        std::string origin = line.origin ? line.origin->checkpoint : "";
        progress.start(at.step, start_record(o, world.host(), world.size(), built, origin, changes));
        if (tokenizer && !tokenizer->file().empty())
            tokenizer->write(tokenizer_path(o.run_dir));
        else if (line.folder != RunFolder::continued)
            unlink(tokenizer_path(o.run_dir).c_str());
    });

    uint64_t samples_per_step = (uint64_t)(o.global_batch / workload.T);
    auto make_batches = [&](const TokenLoader& loader) {
        BatchShape shape = {workload.B, workload.T, o.document_end};
        uint64_t stride = (uint64_t)workload.B * o.dp;  // the data ranks take turns
        return std::make_unique<Batches>(
            make_batch_source(world, o.data_reader == "node", loader, shape, stride), o.reset_positions,
            g.stream, mesh, trouble, g.share.room.micro_batches);
    };
    std::unique_ptr<Batches> batches = make_batches(*train_data), val_batches;
    uint64_t val_samples = 0;
    if (val_data) {
        val_batches = make_batches(*val_data);
        val_samples = std::min<uint64_t>(val_data->samples_per_epoch(), o.val_batches * samples_per_step);
    }
    int micro_batches = micro_batches_per_step(o);
    auto first_passes = [&] {
        pass_step(g, *batches, at.samples, std::min(micro_batches, o.pp), false);
        g.state.synchronize();
    };
    for (const std::string& note : tune_products(world, o, line.origin ? line.origin->run_dir : "",
                                                 mesh.data_rank() == 0, g.stream, first_passes))
        printf("products     %s\n", note.c_str());
    step_to_stop_after = world.size() > 1 ? at.step + 1 : at.step;
    stop_on_signals(on_terminal);

    bool stopping = false;  // as all ranks agreed in the last step
    auto asked_to_stop = [&] { return stopping || (world.size() == 1 && stop_requested); };
    // A run that is asked to stop may be killed soon, so it saves its state before anything else.
    auto due = [&](int every) {
        return every > 0 && !asked_to_stop() && (at.step == o.steps || at.step % every == 0);
    };
    // The stop that a rank is asked for is agreed with the statistics of a step. Once those are on their way
    // it comes a step later.
    auto tell_ranks = [&] {
        if (stop_requested) count_rank(g, stat_stop);
        if (checkpoints.is_ready()) count_rank(g, stat_saved);
        if (world.size() > 1) step_to_stop_after = std::min(at.step + 2, o.steps);
    };
    // Now and then the rate of products is measured again, for others may have used the device before.
    double measured = seconds_now(), until_measured = 30;
    auto measures = [&] { return world.is_root() && seconds_now() - measured > until_measured; };
    auto measure_again = [&] {
        constexpr size_t enough = 64 << 20;
        g.state.synchronize();
        std::string ignored;  // another program may take the memory meanwhile
        note_trouble(ignored, [&] {
            if (size_t free_bytes = available_memory(); free_bytes > enough)
                meter.add_measurement(measured_gemm_rate(free_bytes / 4, g.stream));
        });
        cudaGetLastError();
        measured = seconds_now();
        until_measured *= 2;
    };
    auto next_is_a_step = [&] {
        bool ends = at.step == o.steps || asked_to_stop();
        return !ends && !measures() && !due(val_data ? o.val_every : 0) && !due(o.sample_every) &&
               !due(o.save_every);
    };
    try {
        for (;;) {
            if (val_data && due(o.val_every)) {
                float loss = evaluate(g, *val_batches, val_samples, trouble);
                progress.validation(at.step, plain_nan(loss));
            }
            if (due(o.sample_every)) {
                note_trouble(trouble,
                             [&] { progress.sample(at.step, sample_text(g, o, tokenizer.get(), at.step)); });
            }
            if (at.step == o.steps || asked_to_stop() || (world.size() == 1 && !trouble.empty())) break;
            step_to_stop_after = at.step + 1;
            if (due(o.save_every) && at.step > first_step) checkpoints.save(at);

            if (measures()) measure_again();
            double start = seconds_now();
            uint64_t sent_before = sent_bytes();
            AdamW adamw = adamw_settings(o, at.step);
            train_step(g, *batches, at.samples, micro_batches, adamw, o.gradient_clip, o.seed, trouble,
                       tell_ranks);
            StepStats stats = await_stats(g, (double)o.global_batch);
            if (!stats.finite) raise_not_finite(g, world, trouble, at.step + 1, stats);
            at = {at.step + 1, at.samples + samples_per_step};
            stopping = stats.stop;
            // The update still runs. A next step waits for it, in its own time; else its time is this step's.
            if (!next_is_a_step()) g.state.synchronize();
            uint64_t sent = sent_bytes() - sent_before;
            progress.step(at.step, at.samples * workload.T, stats.loss, stats.gradient_norm,
                          adamw.learning_rate, seconds_now() - start, sent);
            if (stats.saved) checkpoints.finish();
        }
        raise_trouble(world, trouble);
    } catch (const CommonError& error) {
        if (at.step == first_step) throw;
        // Bad data or a full disk costs at most the step that met it.
        throw CommonError(text("%s; %s", error.what(), checkpoints.rescue(at).c_str()));
    } catch (const std::exception& error) {
        if (world.size() > 1) leave_alone(world, error);  // streams that wait for others cannot be put away
        throw;
    }
    std::string saved = checkpoints.finish_at(at);
    printf("%s after step %d; the checkpoint is %s\n", asked_to_stop() ? "stopped as asked" : "done", at.step,
           saved.c_str());
}

// ----------------------------------------------------------------------------
// the sample command
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

inline void sample(const Options& command, const World& world) {
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

// ----------------------------------------------------------------------------
// the eval command
// ----------------------------------------------------------------------------

// The losses (B*T) of a batch as data/commands/evaluation.h has them. `device` has room for three numbers of
// each position.
inline std::vector<float> batch_losses(Gpt& g, const HostBatch& host, bool reset_positions,
                                       DeviceArray<int>& device) {
    int B = g.workload.B, T = g.workload.T;
    size_t N = (size_t)B * T;
    copy_to_device(device.data, host.tokens, (host.doc_start ? 3 : 2) * N, g.stream);
    const int* documents = host.doc_start ? device.data + 2 * N : nullptr;
    Batch batch = {.B = B,
                   .T = T,
                   .tokens = device.data,
                   .targets = device.data + N,
                   .doc_start = documents,
                   .counted_from = reset_positions ? documents : nullptr};
    forward(g, batch);
    classify(g, batch, 0, false);
    std::vector<float> losses(N);
    copy_to_host(losses.data(), g.acts[0].losses, N, g.stream, g.mesh);
    return losses;
}

inline void evaluate_run(const Options& command, const World& world) {
    TrainedModel model(command.run, command.tokenizer);
    const Options& o = shape_evaluation(model.options, command);
    int tokens = o.micro_batch * o.sequence_length;
    Workload workload = {o.micro_batch, o.sequence_length, false, Recompute::none,
                         chosen_loss_chunk(o, tokens)};
    std::unique_ptr<Gpt> g = load_model(model, workload, world);
    DeviceArray<int> device((size_t)3 * tokens);
    auto losses = [&](const HostBatch& batch) { return batch_losses(*g, batch, o.reset_positions, device); };
    print_scores(model, command, losses);
}

// ----------------------------------------------------------------------------
// the data command
// ----------------------------------------------------------------------------

inline void look_into_data(const Options& o) {
    report_data(o.inputs, Tokenizer::load_if_any(o.tokenizer).get(), o.document_end);
}

// ----------------------------------------------------------------------------
// main
// ----------------------------------------------------------------------------

#ifndef TESTING
// What every rank does; throws what stops it.
static void run(int argc, char** argv, const World& world) {
    Command command = parse_command(argv[1]);
    std::vector<std::string> places;
    world.together([&] {
        places = origin_places(command, argc - 1, argv + 1);
        if (command != command_train && world.size() > 1) {
            fail("%s: works in one process and there are %d; start it without mpirun", argv[1], world.size());
        }
    });
    FindCheckpoint find = find_on_root(world, places);
    CommandLine line;
    world.together([&] { line = parse_options(command, argc - 1, argv + 1, world.size(), find); });
    choose_device(world);
#ifndef __CUDACC__
    if (world.size() > 1) host_device.threads = threads_per_rank(world);
#endif
    // One rank speaks for all.
    if (!world.is_root() && !freopen("/dev/null", "w", stdout)) fail_with_errno("/dev/null", "write it");
    const Options& options = line.options;
    switch (command) {
    case command_train:
        train(line, world);
        break;
    case command_sample:
        sample(options, world);
        break;
    case command_eval:
        evaluate_run(options, world);
        break;
    case command_data:
        look_into_data(options);
        break;
    case command_inspect:
        inspect_checkpoint(options.run, options.verify);
        break;
    case command_export:
        export_model(options);
        break;
    case command_import:
        import_model(options, [](const Options& model) {
            return checkpoint_tensors(parameter_layout(model), {.training = false});
        });
        break;
    case command_tokenize:
        tokenize(options);
        break;
    }
    check_standard_output();
}

int main(int argc, char** argv) try {
    open_standard_streams();
    auto asks_for_help = [](const char* word) { return !strcmp(word, "--help") || !strcmp(word, "-h"); };
    if (argc < 2 || asks_for_help(argv[1])) {
        fputs(general_help(terminal_width()).c_str(), stdout);
        return 0;
    }
    if (std::any_of(argv + 2, argv + argc, asks_for_help)) {
        fputs(help_text(parse_command(argv[1]), terminal_width()).c_str(), stdout);
        return 0;
    }
    if (!strcmp(argv[1], "--version")) {
        puts(program_version);
        return 0;
    }
    World world(&argc, &argv);
    try {
        run(argc, argv, world);
        return 0;
    } catch (const CommonError& error) {
        if (world.is_root()) fprintf(stderr, "train_gpt: %s\n", one_line(error.what()).c_str());
        return 1;
    } catch (const std::exception& error) {
        if (world.size() > 1) leave_alone(world, error);
        throw;
    }
} catch (const std::exception& error) {
    fprintf(stderr, "train_gpt: %s\n", one_line(message_of(error)).c_str());
    return 1;
}
#endif
