/*
train_gpt: pre-trains GPT-style transformers. Read it top to bottom:

    parameters    one table: name, shape, initialisation, weight decay
    activations   one table: name, size, kept for every layer or recomputed
    model         memory, initial weights
    forward       embedding, blocks, classifier
    backward      the forward pass in reverse
    update        gradient norm, clipping, AdamW (in comm/zero.h, for one rank as for many)
    sampling      text from a model, with a key/value cache
    training      one step, and what goes before it; the train command
    commands      sample, eval, data
    main          from the command line to a command

Each layer's arithmetic is in kernels/, how the work is cut over ranks in comm/, what is read and written on
disk in data/.
*/
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <memory>
#include <span>
#include <vector>

#include "comm/device_batches.h"   // Batch, Batches
#include "comm/memory.h"           // allocate, MemoryClass
#include "comm/mesh.h"             // Mesh: this rank's place and its groups
#include "comm/node_reader.h"      // batches read once for all ranks of a machine
#include "comm/parameters.h"       // TensorRow, ParameterLayout
#include "comm/watch.h"            // copy_to_host
#include "comm/weights_io.h"       // save_weights, load_weights
#include "comm/whole_tensors.h"    // set_tensors
#include "comm/world.h"            // launched by mpirun or alone
#include "comm/zero.h"             // ZeroState: parameters, gradients and optimizer state, cut over ranks
#include "data/choices.h"          // multiple-choice questions
#include "data/data_report.h"      // the data subcommand
#include "data/error.h"            // fail, note_trouble
#include "data/file.h"             // read_text, print_bytes
#include "data/meter.h"            // FLOPs, rates, durations
#include "data/model_config.h"     // ModelConfig
#include "data/options.h"          // the options table, parse_options
#include "data/run_log.h"          // the run directory and log.jsonl
#include "data/sample_order.h"     // which tokens a sample is made of
#include "data/sampler.h"          // choose_token
#include "data/schedule.h"         // the course of the learning rate
#include "data/step_log.h"         // what is shown and kept of each step
#include "data/stop_signals.h"     // how a run is asked to stop
#include "data/stop_text.h"        // texts that end a sample
#include "data/tokenize.h"         // the tokenize subcommand
#include "data/tokenizer.h"        // text <-> tokens
#include "data/trained_model.h"    // what a run left
#include "kernels/adamw.cuh"       // AdamW
#include "kernels/attention.cuh"   // attention_forward, attention_backward
#include "kernels/classifier.cuh"  // classifier, sum_losses
#include "kernels/embedding.cuh"   // embedding_forward, embedding_backward, bucket_tokens
#include "kernels/gelu.cuh"        // gelu_backward
#include "kernels/kv_cache.cuh"    // kv_cache_append, kv_cache_attention
#include "kernels/matmul.cuh"      // matmul_*, gemm_rate
#include "kernels/norm.cuh"        // norm_forward, residual_norm_forward, norm_backward
#include "kernels/qk_norm.cuh"     // qk_norm_forward, qk_norm_backward
#include "kernels/random.cuh"      // random_key, random_normal
#include "kernels/rope.cuh"        // rope_table, rope_forward, rope_backward
#include "kernels/swiglu.cuh"      // swiglu_forward, swiglu_backward

// ----------------------------------------------------------------------------
// parameters
// ----------------------------------------------------------------------------

enum Tensor {
    wte,
    wpe,  // embedding
    norm1w,
    norm1b,
    qkvw,
    qkvb,
    qnormw,
    knormw,
    attprojw,
    attprojb,  // block
    norm2w,
    norm2b,
    fcw,
    fcb,
    fcprojw,
    fcprojb,
    normfw,
    normfb,
    headw,  // head
    tensor_count
};

constexpr int vocab_multiple = 128;  // the vocabulary is padded to this: products with odd sizes are slow

inline int padded_vocab(const ModelConfig& c) {
    return ceil_div(c.vocab_size, vocab_multiple) * vocab_multiple;
}

// The parameters of a model, one row each. Initial values follow GPT-2: normal(0, 0.02), and the two
// projections back to the residual stream scaled by 1/sqrt(2 layers).
inline std::vector<TensorRow> tensor_table(const ModelConfig& c) {
    size_t C = c.channels, V = c.vocab_size, P = c.context, HS = c.head_size, A = c.heads * HS,
           F = c.mlp_width;
    size_t QKV = qkv_width(c), F1 = fc_width(c), pad = padded_vocab(c) - c.vocab_size;
    float in = 0.02f, out = 0.02f / std::sqrt(2.0f * c.layers);
    bool bias = c.bias, norm_bias = bias && c.norm == "layernorm", two_norms = c.block == "sequential";
    std::vector<TensorRow> rows;
    auto add = [&](bool present, TensorRow row) {
        if (present) rows.push_back(row);
    };
    using enum Unit;
    add(true, {wte, embedding, "wte", V, C, 0, in, true, pad});
    add(c.position == "learned", {wpe, embedding, "wpe", P, C, 0, in, true});
    add(true, {norm1w, block, "norm1.weight", C, 0, 1, 0, false});
    add(norm_bias, {norm1b, block, "norm1.bias", C, 0, 0, 0, false});
    add(true, {qkvw, block, "qkv.weight", QKV, C, 0, in, true});
    add(bias, {qkvb, block, "qkv.bias", QKV, 0, 0, 0, false});
    add(c.qk_norm, {qnormw, block, "qnorm.weight", HS, 0, 1, 0, false});
    add(c.qk_norm, {knormw, block, "knorm.weight", HS, 0, 1, 0, false});
    add(true, {attprojw, block, "attproj.weight", C, A, 0, out, true});
    add(bias, {attprojb, block, "attproj.bias", C, 0, 0, 0, false});
    add(two_norms, {norm2w, block, "norm2.weight", C, 0, 1, 0, false});
    add(two_norms && norm_bias, {norm2b, block, "norm2.bias", C, 0, 0, 0, false});
    add(true, {fcw, block, "fc.weight", F1, C, 0, in, true});
    add(bias, {fcb, block, "fc.bias", F1, 0, 0, 0, false});
    add(true, {fcprojw, block, "fcproj.weight", C, F, 0, out, true});
    add(bias, {fcprojb, block, "fcproj.bias", C, 0, 0, 0, false});
    add(true, {normfw, head, "normf.weight", C, 0, 1, 0, false});
    add(norm_bias, {normfb, head, "normf.bias", C, 0, 0, 0, false});
    add(!c.tie_embeddings, {headw, head, "head.weight", V, C, 0, in, true, pad});
    return rows;
}

// For a data group of `ranks`.
inline ParameterLayout parameter_layout(const ModelConfig& config, int ranks = 1) {
    return ParameterLayout(tensor_table(config), config.layers, config.tie_embeddings, ranks);
}

// ----------------------------------------------------------------------------
// activations
// ----------------------------------------------------------------------------

// What a pass through the model writes, as one layer sees it. Fields that are kept for the backward pass
// point to the layer's own memory, the others to memory that all layers share. N = B*T; A = NH*HS; F is
// mlp_width, F1 is 2F for SwiGLU and F otherwise.
struct Activations {
    // forward, block
    floatX* residual;   // (N, C) input of the block
    floatX* norm1;      // (N, C)
    float* norm1_mean;  // (N) layernorm only, as all means
    float* norm1_rstd;  // (N)
    floatX* qkv_raw;    // (N, QKV) before the norm of queries and keys
    float* qk_rstd;     // (N, NH + NKV)
    floatX* qkv;        // (N, QKV) as attention reads it: normed and rotated
    floatX* att;        // (N, A)
    float* lse;         // (B, NH, T)
    floatX* residual2;  // (N, C) between attention and MLP (sequential block)
    floatX* norm2;      // (N, C)
    float* norm2_mean;  // (N)
    float* norm2_rstd;  // (N)
    floatX* fc;         // (N, F1)
    floatX* act;        // (N, F)
    floatX* delta;      // (N, C) what the last part of a block adds to the residual stream
    floatX* cache;      // (cache rows, cache length, 2, NKV, HS) keys and values of earlier tokens
    // forward, head
    floatX* residualf;  // (N, C)
    floatX* normf;      // (N, C)
    float* normf_mean;  // (N)
    float* normf_rstd;  // (N)
    floatX* logits;     // (loss chunk, Vp)
    float* losses;      // (N)
    // backward
    floatX* dresidual;  // (N, C)
    floatX* dnorm;      // (N, C)
    floatX* dact;       // (N, F)
    floatX* dfc;        // (N, F1)
    floatX* datt;       // (N, A)
    floatX* dqkv;       // (N, QKV)
    float* scratch;     // two-stage sums
};

struct ActivationRow {
    const char* name;
    size_t field;  // where the pointer is in Activations
    size_t element_size;
    size_t elements;
    bool every_layer;  // kept for each layer, or one for all

    size_t bytes() const { return ceil_div(elements * element_size, 256) * 256; }
    void point(Activations& view, char* memory) const {
        memcpy((char*)&view + field, &memory, sizeof memory);
    }
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

    int positions() const { return std::max(T, cache_length); }
};

// Elements of the key/value cache of one text, in one layer.
inline size_t cache_row_size(const ModelConfig& c, int length) {
    return (size_t)length * 2 * c.kv_heads * c.head_size;
}

inline std::vector<ActivationRow> activation_table(const ModelConfig& c, const Workload& w) {
    size_t N = (size_t)w.B * w.T, C = c.channels, QKV = qkv_width(c), A = (size_t)c.heads * c.head_size;
    size_t F = c.mlp_width, F1 = fc_width(c), chunk = w.loss_chunk;
    bool keep = w.training;
    bool keep_hidden = keep && w.recompute == Recompute::none;
    bool keep_block = keep && w.recompute != Recompute::block;
    bool mean = c.norm == "layernorm", two_norms = c.block == "sequential";
    size_t scratch = std::max({attention_backward_scratch(w.B, w.T, c.heads, c.kv_heads, c.head_size),
                               norm_backward_scratch(c.channels), qk_norm_backward_scratch(c.head_size),
                               matmul_backward_bias_scratch((int)std::max({F1, QKV, C}))});
    std::vector<ActivationRow> rows;
    auto add = [&](bool present, ActivationRow row) {
        if (present && row.elements) rows.push_back(row);
    };
    add(true, {FIELD(residual), N * C, keep});
    add(true, {FIELD(norm1), N * C, keep_block});
    add(mean, {FIELD(norm1_mean), N, keep_block});
    add(true, {FIELD(norm1_rstd), N, keep_block});
    add(c.qk_norm, {FIELD(qkv_raw), N * QKV, keep_block});
    add(c.qk_norm, {FIELD(qk_rstd), N * (c.heads + c.kv_heads), keep_block});
    add(true, {FIELD(qkv), N * QKV, keep_block});
    add(true, {FIELD(att), N * A, keep_block});
    add(true, {FIELD(lse), N * c.heads, keep_block});
    add(two_norms, {FIELD(residual2), N * C, keep_block});
    add(two_norms, {FIELD(norm2), N * C, keep_hidden});
    add(two_norms && mean, {FIELD(norm2_mean), N, keep_hidden});
    add(two_norms, {FIELD(norm2_rstd), N, keep_hidden});
    add(true, {FIELD(fc), N * F1, keep_hidden});
    add(true, {FIELD(act), N * F, keep_hidden});
    add(true, {FIELD(delta), N * C, false});
    add(true, {FIELD(cache), cache_row_size(c, w.cache_length) * w.cache_rows, true});
    add(true, {FIELD(residualf), N * C, false});
    add(true, {FIELD(normf), N * C, false});
    add(mean, {FIELD(normf_mean), N, false});
    add(true, {FIELD(normf_rstd), N, false});
    add(true, {FIELD(logits), chunk * padded_vocab(c), false});
    add(true, {FIELD(losses), N, false});
    add(w.training, {FIELD(dresidual), N * C, false});
    add(w.training, {FIELD(dnorm), N * C, false});
    add(w.training, {FIELD(dact), N * F, false});
    add(w.training, {FIELD(dfc), N * F1, false});
    add(w.training, {FIELD(datt), N * A, false});
    add(w.training, {FIELD(dqkv), N * QKV, false});
    add(w.training, {FIELD(scratch), scratch, false});
#undef FIELD
    return rows;
}

inline size_t activation_bytes(const ModelConfig& config, const Workload& workload) {
    size_t bytes = 0;
    for (const ActivationRow& row : activation_table(config, workload)) {
        bytes += row.bytes() * (row.every_layer ? config.layers : 1);
    }
    return bytes;
}

// ----------------------------------------------------------------------------
// model
// ----------------------------------------------------------------------------

// The stream that computes; it outlives what works on it.
struct ComputeStream {
    cudaStream_t stream;
    ComputeStream() { cudaCheck(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
    ~ComputeStream() {
        cudaStreamSynchronize(stream);
        cudaStreamDestroy(stream);
    }
    ComputeStream(const ComputeStream&) = delete;
    ComputeStream& operator=(const ComputeStream&) = delete;
};

inline const Mesh& one_process() {
    static const Mesh mesh;
    return mesh;
}

struct Gpt {
    ModelConfig config;
    Workload workload;
    const Mesh& mesh;
    ParameterLayout layout;
    Norm norm;
    bool parallel, swiglu;
    Gelu gelu;

    ComputeStream compute;
    cudaStream_t stream;
    ZeroState state;  // parameters, gradients, optimizer state

    // one allocation for each class of memory
    char* activations = nullptr;
    float* rope = nullptr;   // (positions, R/2, 2) cosines and sines
    float* stats = nullptr;  // (stat_count)

    std::vector<Activations> acts;  // one view for each layer

    Gpt(const ModelConfig& config, const Workload& workload, const ZeroSettings& settings,
        const Mesh& mesh = one_process());
    ~Gpt();
    Gpt(const Gpt&) = delete;
    Gpt& operator=(const Gpt&) = delete;

    // Of a unit that is acquired, or whose gradients have begun.
    UnitTensors<floatX> weights(int unit) const { return layout.tensors(unit, state.params(unit)); }
    UnitTensors<float> gradients(int unit) const { return layout.tensors(unit, state.grads(unit)); }
    int head_unit() const { return layout.last_unit(); }
    int rope_dims() const { return config.position == "rope" ? config.rope_dims : 0; }
    // where the classifier's weights (Vp, C) are
    int classifier_unit() const { return config.tie_embeddings ? 0 : head_unit(); }
    Tensor classifier_weight() const { return config.tie_embeddings ? wte : headw; }
};

// Bytes of each class of memory that a model takes on one rank.
inline std::vector<MemoryClass> memory_classes(const ModelConfig& config, const Workload& w,
                                               const ZeroSettings& settings, const MeshShape& shape = {}) {
    size_t rope = config.position == "rope" ? (size_t)w.positions() * config.rope_dims * sizeof(float) : 0;
    auto classes = ZeroState::memory(parameter_layout(config, shape.dp), shape, settings);
    classes.push_back({"activations", activation_bytes(config, w) + rope});
    return classes;
}

// On the device.
inline size_t memory_total(const std::vector<MemoryClass>& classes) {
    size_t total = 0;
    for (const MemoryClass& part : classes) total += part.on_host && has_own_memory ? 0 : part.bytes;
    return total;
}

// The largest micro-batch whose memory fits in `available` bytes; 0 if none does.
inline int largest_micro_batch(const ModelConfig& config, Workload workload, const ZeroSettings& settings,
                               const MeshShape& shape, size_t available) {
    int fits = 0, too_large = INT32_MAX / workload.T;
    while (too_large - fits > 1) {
        workload.B = fits + (too_large - fits) / 2;
        size_t need = memory_total(memory_classes(config, workload, settings, shape));
        (need <= available ? fits : too_large) = workload.B;
    }
    return fits;
}

inline void check_memory(const ModelConfig& config, const Workload& workload, const ZeroSettings& settings,
                         const MeshShape& shape = {}, int ranks_sharing = 1) {
    size_t available = available_memory(ranks_sharing);
    size_t need = memory_total(memory_classes(config, workload, settings, shape));
    if (need <= available) return;
    int fits = largest_micro_batch(config, workload, settings, shape, available);
    if (fits > 0) {
        fail("--micro-batch %d: needs %s of memory and %s are free; --micro-batch %d fits%s", workload.B,
             size_text(need).c_str(), size_text(available).c_str(), fits,
             workload.training ? ", --recompute block saves more" : "");
    }
    fail("the model needs %s of memory and %s are free; %s", size_text(need).c_str(),
         size_text(available).c_str(),
         workload.training ? "choose a smaller --model, a shorter --sequence-length or --recompute block, or "
                             "cut it over more processes with --zero"
                           : "free some, or ask for less at once");
}

Gpt::Gpt(const ModelConfig& config_, const Workload& workload_, const ZeroSettings& settings,
         const Mesh& mesh_)
    : config(config_),
      workload(workload_),
      mesh(mesh_),
      layout(parameter_layout(config, mesh.shape.dp)),
      stream(compute.stream),
      state(layout, mesh, settings, stream) {
    norm = config.norm == "rmsnorm" ? Norm::rmsnorm : Norm::layernorm;
    parallel = config.block == "parallel";
    swiglu = config.mlp == "swiglu";
    gelu = config.mlp == "gelu-exact" ? Gelu::exact : Gelu::tanh;
    allocate(stats, stat_count);

    auto table = activation_table(config, workload);
    allocate(activations, activation_bytes(config, workload));
    acts.resize(config.layers);
    char* next = activations;
    for (const ActivationRow& row : table) {
        for (int layer = 0; layer < config.layers; layer++) {
            char* own = row.every_layer ? next + layer * row.bytes() : next;
            row.point(acts[layer], own);
        }
        next += row.bytes() * (row.every_layer ? config.layers : 1);
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

Gpt::~Gpt() {
    cudaStreamSynchronize(stream);
    for (void* pointer : {(void*)activations, (void*)rope, (void*)stats}) cudaFree(pointer);
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

// norm1 is in place; writes qkv, att, and what attention adds to the residual stream (delta).
inline void attention_part(Gpt& g, int layer, const Batch& batch) {
    auto& a = g.acts[layer];
    auto w = g.weights(layer + 1);
    auto& c = g.config;
    int B = batch.B, T = batch.T, N = B * T, C = c.channels, A = c.heads * c.head_size;
    matmul_forward(c.qk_norm ? a.qkv_raw : a.qkv, a.norm1, w[qkvw], w[qkvb], N, C, qkv_width(c), g.stream);
    if (c.qk_norm) {
        qk_norm_forward(a.qkv, a.qk_rstd, a.qkv_raw, w[qnormw], w[knormw], N, c.heads, c.kv_heads,
                        c.head_size, c.norm_eps, g.stream);
    }
    if (int R = g.rope_dims()) {
        rope_forward(a.qkv, g.rope + (size_t)batch.past * R, B, T, c.heads, c.kv_heads, c.head_size, R,
                     g.stream);
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
    matmul_forward(a.delta, a.att, w[attprojw], w[attprojb], N, A, C, g.stream);
}

// What the MLP reads: its own norm, or in a parallel block the norm it shares with attention.
inline floatX* mlp_input(const Gpt& g, int layer) {
    return g.parallel ? g.acts[layer].norm1 : g.acts[layer].norm2;
}

// Writes fc and act.
inline void mlp_hidden(Gpt& g, int layer, const Batch& batch) {
    auto& a = g.acts[layer];
    auto w = g.weights(layer + 1);
    int N = batch.B * batch.T, C = g.config.channels, F = g.config.mlp_width;
    if (g.swiglu) {
        matmul_forward(a.fc, mlp_input(g, layer), w[fcw], w[fcb], N, C, 2 * F, g.stream);
        swiglu_forward(a.act, a.fc, N, F, g.stream);
    } else {
        matmul_gelu_forward(g.gelu, a.act, a.fc, mlp_input(g, layer), w[fcw], w[fcb], N, C, F, g.stream);
    }
}

// Runs the block from its input to act. The input is a.residual, or before the first pass over it, what the
// block before left: that block's stream and delta, added here in the same pass over memory as the norm.
inline void block_forward(Gpt& g, int layer, const Batch& batch, bool input_ready) {
    auto& a = g.acts[layer];
    auto w = g.weights(layer + 1);
    int N = batch.B * batch.T, C = g.config.channels;
    float eps = g.config.norm_eps;
    if (input_ready) {
        norm_forward(g.norm, a.norm1, a.norm1_mean, a.norm1_rstd, a.residual, w[norm1w], w[norm1b], N, C, eps,
                     g.stream);
    } else {
        auto& before = g.acts[layer - 1];
        residual_norm_forward(g.norm, a.residual, a.norm1, a.norm1_mean, a.norm1_rstd,
                              g.parallel ? before.residual : before.residual2, before.delta, w[norm1w],
                              w[norm1b], N, C, eps, g.stream);
    }
    attention_part(g, layer, batch);
    if (!g.parallel) {
        residual_norm_forward(g.norm, a.residual2, a.norm2, a.norm2_mean, a.norm2_rstd, a.residual, a.delta,
                              w[norm2w], w[norm2b], N, C, eps, g.stream);
    }
    mlp_hidden(g, layer, batch);
}

// From tokens to the normed output of the last block (normf).
inline void forward(Gpt& g, const Batch& batch) {
    auto& c = g.config;
    int B = batch.B, T = batch.T, N = B * T, C = c.channels, last = c.layers - 1;
    g.state.acquire(0, +1);
    auto embedding = g.weights(0);
    floatX* positions = embedding[wpe] ? embedding[wpe] + (size_t)batch.past * C : nullptr;
    embedding_forward(g.acts[0].residual, batch.tokens, embedding[wte], positions, batch.counted_from, B, T,
                      C, g.stream);
    g.state.release(0);
    for (int layer = 0; layer <= last; layer++) {
        g.state.acquire(layer + 1, +1);
        auto& a = g.acts[layer];
        auto w = g.weights(layer + 1);
        block_forward(g, layer, batch, layer == 0);
        // a parallel block's MLP adds to what its attention left in delta
        matmul_forward(a.delta, a.act, w[fcprojw], w[fcprojb], N, c.mlp_width, C, g.stream, g.parallel);
        g.state.release(layer + 1);
    }
    g.state.acquire(g.head_unit(), +1);
    auto head = g.weights(g.head_unit());
    auto& a = g.acts[last];
    residual_norm_forward(g.norm, a.residualf, a.normf, a.normf_mean, a.normf_rstd,
                          g.parallel ? a.residual : a.residual2, a.delta, head[normfw], head[normfb], N, C,
                          c.norm_eps, g.stream);
    g.state.release(g.head_unit());
}

// Adds the sum of the losses to stats. With a gradient, the loss counts dloss times: writes dnorm (the
// gradient of normf) and adds to that of the classifier's weights. Logits exist for loss_chunk tokens at a
// time.
inline void classify(Gpt& g, const Batch& batch, float dloss, bool want_gradient) {
    auto& a = g.acts[0];
    int N = batch.B * batch.T, C = g.config.channels, V = g.config.vocab_size, Vp = padded_vocab(g.config);
    int unit = g.classifier_unit();
    g.state.acquire(unit, 0);
    const floatX* weight = g.weights(unit)[g.classifier_weight()];
    float* dweight = nullptr;
    if (want_gradient) {
        g.state.begin_gradients(unit);
        dweight = g.gradients(unit)[g.classifier_weight()];
    }
    for (int begin = 0; begin < N; begin += g.workload.loss_chunk) {
        int n = std::min(g.workload.loss_chunk, N - begin);
        const floatX* inp = a.normf + (size_t)begin * C;
        matmul_forward(a.logits, inp, weight, nullptr, n, C, Vp, g.stream);
        classifier(a.logits, a.losses + begin, batch.targets + begin, dloss, n, V, Vp, want_gradient,
                   g.stream);
        if (!want_gradient) continue;
        matmul_backward_input(a.dnorm + (size_t)begin * C, a.logits, weight, n, C, Vp, g.stream);
        matmul_backward_weight(dweight, a.logits, inp, n, C, Vp, g.stream);
    }
    g.state.release(unit);
    sum_losses(g.stats + stat_loss, a.losses, N, g.stream);
}

// ----------------------------------------------------------------------------
// backward
// ----------------------------------------------------------------------------

// The three products of a linear layer's backward pass. Shapes as in matmul.cuh.
inline void linear_backward(Gpt& g, floatX* dinp, float* dweight, float* dbias, const floatX* dout,
                            const floatX* inp, const floatX* weight, int N, int C, int OC,
                            bool accumulate_dinp = false) {
    matmul_backward_weight(dweight, dout, inp, N, C, OC, g.stream);
    if (dbias) matmul_backward_bias(dbias, g.acts[0].scratch, dout, N, OC, g.stream);
    matmul_backward_input(dinp, dout, weight, N, C, OC, g.stream, accumulate_dinp);
}

// Makes again what the forward pass of the layer did not keep: by the same operations, so the same bits.
inline void recompute(Gpt& g, int layer, const Batch& batch) {
    if (g.workload.recompute == Recompute::block) block_forward(g, layer, batch, true);
    if (g.workload.recompute == Recompute::mlp) {
        auto& a = g.acts[layer];
        auto w = g.weights(layer + 1);
        if (!g.parallel) {
            norm_forward(g.norm, a.norm2, a.norm2_mean, a.norm2_rstd, a.residual2, w[norm2w], w[norm2b],
                         batch.B * batch.T, g.config.channels, g.config.norm_eps, g.stream);
        }
        mlp_hidden(g, layer, batch);
    }
}

// From dnorm as classify() left it to the gradients of all parameters. dresidual is the gradient of the
// residual stream: each part of a block reads it as the gradient of its output and adds that of its input.
// After the last micro-batch of a step the gradients of each unit are summed over the ranks as soon as they
// are there.
inline void backward(Gpt& g, const Batch& batch, bool last_micro_batch) {
    auto& c = g.config;
    int B = batch.B, T = batch.T, N = B * T, C = c.channels, F = c.mlp_width, F1 = fc_width(c);
    int A = c.heads * c.head_size, QKV = qkv_width(c);
    {
        int unit = g.head_unit();
        g.state.acquire(unit, -1);
        g.state.begin_gradients(unit);
        auto& a = g.acts[0];
        auto w = g.weights(unit);
        auto dw = g.gradients(unit);
        cudaCheck(cudaMemsetAsync(a.dresidual, 0, (size_t)N * C * sizeof(floatX), g.stream));
        norm_backward(g.norm, a.dresidual, dw[normfw], dw[normfb], a.scratch, a.dnorm, a.residualf, w[normfw],
                      a.normf_mean, a.normf_rstd, N, C, g.stream);
        g.state.release(unit);
        g.state.reduce_gradients(unit, last_micro_batch);
    }
    for (int layer = c.layers - 1; layer >= 0; layer--) {
        g.state.acquire(layer + 1, -1);
        g.state.begin_gradients(layer + 1);
        auto& a = g.acts[layer];
        auto w = g.weights(layer + 1);
        auto dw = g.gradients(layer + 1);
        recompute(g, layer, batch);

        // MLP
        linear_backward(g, a.dact, dw[fcprojw], dw[fcprojb], a.dresidual, a.act, w[fcprojw], N, F, C);
        if (g.swiglu)
            swiglu_backward(a.dfc, a.dact, a.fc, N, F, g.stream);
        else
            gelu_backward(g.gelu, a.dfc, a.dact, a.fc, (size_t)N * F, g.stream);
        linear_backward(g, a.dnorm, dw[fcw], dw[fcb], a.dfc, mlp_input(g, layer), w[fcw], N, C, F1);
        // attention of a parallel block has the same output gradient as its MLP, so dresidual stays as it is
        if (!g.parallel) {
            norm_backward(g.norm, a.dresidual, dw[norm2w], dw[norm2b], a.scratch, a.dnorm, a.residual2,
                          w[norm2w], a.norm2_mean, a.norm2_rstd, N, C, g.stream);
        }

        // attention
        linear_backward(g, a.datt, dw[attprojw], dw[attprojb], a.dresidual, a.att, w[attprojw], N, A, C);
        attention_backward(a.dqkv, a.scratch, a.datt, a.qkv, a.att, a.lse, batch.doc_start, B, T, c.heads,
                           c.kv_heads, c.head_size, c.window, g.stream);
        if (int R = g.rope_dims())
            rope_backward(a.dqkv, g.rope, B, T, c.heads, c.kv_heads, c.head_size, R, g.stream);
        if (c.qk_norm) {
            qk_norm_backward(a.dqkv, dw[qnormw], dw[knormw], a.scratch, a.dqkv, a.qkv_raw, a.qk_rstd,
                             w[qnormw], w[knormw], N, c.heads, c.kv_heads, c.head_size, g.stream);
        }
        linear_backward(g, a.dnorm, dw[qkvw], dw[qkvb], a.dqkv, a.norm1, w[qkvw], N, C, QKV, g.parallel);
        norm_backward(g.norm, a.dresidual, dw[norm1w], dw[norm1b], a.scratch, a.dnorm, a.residual, w[norm1w],
                      a.norm1_mean, a.norm1_rstd, N, C, g.stream);
        g.state.release(layer + 1);
        g.state.reduce_gradients(layer + 1, last_micro_batch);
    }
    g.state.begin_gradients(0);
    auto dw = g.gradients(0);
    embedding_backward(dw[wte], dw[wpe], g.acts[0].dresidual, batch.tokens, batch.order, batch.starts,
                       batch.buckets, batch.counted_from, B, T, C, g.stream);
    g.state.reduce_gradients(0, last_micro_batch);
}

// Adds the gradients of a micro-batch whose losses count dloss times, and their sum to stats.
inline void accumulate_gradients(Gpt& g, const Batch& batch, float dloss, bool last_micro_batch) {
    forward(g, batch);
    classify(g, batch, dloss, true);
    backward(g, batch, last_micro_batch);
}

// ----------------------------------------------------------------------------
// update
// ----------------------------------------------------------------------------

struct StepStats {
    float loss;           // mean over the targets of the step
    float gradient_norm;  // before clipping
    bool finite;          // false: the weights were left as they were
    bool stop;            // a rank was asked to stop
};

// Starts a step: no gradient, no loss.
inline void zero_gradients(Gpt& g) {
    g.state.zero_gradients();
    cudaCheck(cudaMemsetAsync(g.stats, 0, stat_count * sizeof(float), g.stream));
}

// Waits for the device. `targets` is the number of targets whose losses were summed.
inline StepStats read_stats(Gpt& g, double targets) {
    float stats[stat_count];
    copy_to_host(stats, g.stats, stat_count, g.stream, g.mesh);
    return {(float)(stats[stat_loss] / targets), stats[stat_norm], !std::isnan(stats[stat_scale]),
            stats[stat_stop] > 0};
}

// The first gradient of this rank that is not finite, for the message that stops a run; empty if there is
// none.
inline std::string first_bad_gradient(const Gpt& g) {
    for (int unit = 0; unit < g.layout.units(); unit++) {
        std::vector<float> values(g.state.part_size(unit));
        cudaCheck(cudaMemcpy(values.data(), g.state.owned_grads(unit), values.size() * sizeof(float),
                             cudaMemcpyDeviceToHost));
        for (const TensorPart& part : g.state.owned_parts(unit)) {
            const float* value = &values[part.at - g.state.owned_begin(unit)];
            for (size_t i = 0; i < part.count; i++) {
                if (!std::isfinite(value[i]))
                    return text("%s[%zu] = %g", part.name.c_str(), part.first + i, value[i]);
            }
        }
    }
    return "";
}

// ----------------------------------------------------------------------------
// sampling
// ----------------------------------------------------------------------------

// Logits of the tokens that follow rows `first`, first + 1, ... of normf, one row for each.
inline std::vector<std::vector<float>> next_logits(Gpt& g, size_t first, int rows) {
    auto& a = g.acts[0];
    int unit = g.classifier_unit(), V = g.config.vocab_size, Vp = padded_vocab(g.config),
        C = g.config.channels;
    g.state.acquire(unit, 0);
    matmul_forward(a.logits, a.normf + first * C, g.weights(unit)[g.classifier_weight()], nullptr, rows, C,
                   Vp, g.stream);
    g.state.release(unit);
    std::vector<floatX> values((size_t)rows * Vp);
    copy_to_host(values.data(), a.logits, values.size(), g.stream, g.mesh);
    std::vector<std::vector<float>> logits;
    for (int row = 0; row < rows; row++) {
        const floatX* begin = &values[(size_t)row * Vp];
        logits.emplace_back(begin, begin + V);
    }
    return logits;
}

// Continues `prompt` once for each of some texts, all of them together. What is not in the cache is computed
// again: all of it where there is no cache. When the model's context is full, its older half is left out from
// then on, and the rest has new positions.
class Writer {
public:
    Writer(Gpt& g, const std::vector<int>& prompt, int texts)
        : g_(g),
          cached_(g.workload.cache_length > 0),
          limit_(cached_ ? g.workload.cache_length : std::min(g.workload.T, g.config.context)),
          texts_(texts, prompt),
          tokens_(std::max(limit_, texts)) {}

    const std::vector<int>& text(int number) const { return texts_[number]; }

    // Logits (V) of what comes next, for each text.
    std::vector<std::vector<float>> next() {
        int length = (int)(texts_[0].size() - begin_), rows = (int)texts_.size();
        if (length > limit_) {
            length = std::max(limit_ / 2, 1);
            begin_ = texts_[0].size() - length;
            past_ = 0;
        }
        std::vector<std::vector<float>> logits;
        if (past_ > 0) {
            std::vector<int> newest;
            for (const auto& text : texts_) newest.push_back(text.back());
            pass(newest, {.B = rows, .T = 1, .past = past_});
            logits = next_logits(g_, 0, rows);
        } else {
            for (int row = 0; row < (all_alike_ ? 1 : rows); row++) logits.push_back(read(row, length));
            if (all_alike_) logits.resize(rows, logits[0]);
            if (all_alike_ && cached_) copy_first_row(length);
        }
        past_ = cached_ ? length : 0;
        return logits;
    }

    // A token for each text. All ranks take those of the first.
    void add(std::vector<int>& tokens) {
        if (g_.mesh.world().size() > 1) {
            copy_to_device(tokens_.data, tokens.data(), tokens.size(), g_.stream);
            g_.mesh.world().broadcast(tokens_.data, tokens.size(), 0, Traffic::statistics, g_.stream);
            copy_to_host(tokens.data(), tokens_.data, tokens.size(), g_.stream, g_.mesh);
        }
        for (size_t i = 0; i < texts_.size(); i++) texts_[i].push_back(tokens[i]);
        all_alike_ = false;
    }

private:
    void pass(const std::vector<int>& tokens, Batch batch) {
        copy_to_device(tokens_.data, tokens.data(), tokens.size(), g_.stream);
        batch.tokens = tokens_.data;
        forward(g_, batch);
    }

    // The last `length` tokens of a text, from the beginning.
    std::vector<float> read(int row, int length) {
        constexpr int step = 64;  // lengths are rounded up to this, so that products come in few shapes
        std::vector<int> tokens(texts_[row].begin() + begin_, texts_[row].end());
        tokens.resize(std::min(ceil_div(length, step) * step, limit_), 0);  // what is behind reaches nothing
        pass(tokens, {.B = 1, .T = (int)tokens.size(), .row = row});
        return next_logits(g_, length - 1, 1)[0];
    }

    // The prompt was read once.
    void copy_first_row(int length) {
        size_t row = cache_row_size(g_.config, limit_), used = cache_row_size(g_.config, length);
        for (const Activations& a : g_.acts) {
            for (size_t i = 1; i < texts_.size(); i++) {
                cudaCheck(cudaMemcpyAsync(a.cache + i * row, a.cache, used * sizeof(floatX),
                                          cudaMemcpyDeviceToDevice, g_.stream));
            }
        }
    }

    Gpt& g_;
    const bool cached_;
    const int limit_;  // tokens that the model sees at once
    std::vector<std::vector<int>> texts_;
    bool all_alike_ = true;
    size_t begin_ = 0;  // of what the model sees
    int past_ = 0;      // tokens of that in the cache
    DeviceInts tokens_;
};

// Adds up to `count` tokens to the prompt, for each key a text of its own: the same key gives the same text.
// show(text, token) is called for each new token and says whether the text goes on; the token `end` ends it
// too. All ranks do the same work, and take the tokens that the first one chooses.
template <typename Show>
void generate(Gpt& g, const std::vector<int>& prompt, int count, int end, const Sampling& sampling,
              const std::vector<uint64_t>& keys, Show&& show) {
    Writer writer(g, prompt, (int)keys.size());
    std::vector<bool> over(keys.size());
    for (int i = 0; i < count && std::count(over.begin(), over.end(), false) > 0; i++) {
        auto logits = writer.next();
        std::vector<int> tokens(keys.size());
        std::string trouble;
        for (size_t row = 0; row < keys.size(); row++) {
            if (over[row]) continue;
            float u = random_uniform(philox(keys[row], i).at[0]);
            note_trouble(trouble, [&] {
                tokens[row] = choose_token(std::move(logits[row]), sampling, writer.text((int)row), u);
            });
        }
        if (!trouble.empty()) tokens[0] = -1;  // so that all ranks hear of it
        writer.add(tokens);
        if (tokens[0] < 0) fail("%s", trouble.empty() ? "sample: no token can be chosen" : trouble.c_str());
        for (size_t row = 0; row < keys.size(); row++) {
            if (!over[row]) over[row] = tokens[row] == end || !show((int)row, tokens[row]);
        }
    }
}

// ----------------------------------------------------------------------------
// training
// ----------------------------------------------------------------------------

inline Recompute recompute_mode(const std::string& name) {
    return name == "block" ? Recompute::block : name == "mlp" ? Recompute::mlp : Recompute::none;
}

// Tokens whose logits exist at once, if the user leaves it open: enough for an efficient product, within
// 256 MiB.
inline int chosen_loss_chunk(const ModelConfig& config, int tokens) {
    size_t row = padded_vocab(config) * sizeof(floatX), budget = (size_t)256 << 20;
    return (int)std::clamp<size_t>(budget / row, 1, tokens);
}

inline Workload training_workload(const Options& o) {
    int tokens = o.micro_batch * o.sequence_length;
    int chunk = o.loss_chunk > 0 ? std::min(o.loss_chunk, tokens) : chosen_loss_chunk(o, tokens);
    return {o.micro_batch, o.sequence_length, true, recompute_mode(o.recompute), chunk};
}

// fp32 parameters are their own master copy.
inline ZeroSettings zero_settings(const Options& o) {
    return {.level = o.zero,
            .keep_master = o.master_weights && sizeof(floatX) < sizeof(float),
            .offload = o.offload == "optimizer",
            .overlap = o.overlap,
            .prefetch = o.prefetch};
}

inline MeshShape mesh_shape(const Options& o) {
    return {.tp = o.tp, .pp = o.pp, .dp = o.dp, .shard = o.shard_group};
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
    for (uint64_t first = B * g.mesh.data_rank(); first < ceil_div(count, of_all) * of_all; first += of_all) {
        Batch batch = batches.load(first, (int)std::min(B, count - std::min(count, first)));
        forward(g, batch);
        classify(g, batch, 0, false);
    }
    if (!trouble.empty()) spoil_loss(g);
    g.state.sum_statistics(g.stats);
    return read_stats(g, (double)count * g.workload.T).loss;
}

// One step of `micro_batches` micro-batches on each data rank, from sample `first` on. A rank in trouble
// makes the loss of all ranks NaN, so that none of them changes its weights.
inline void train_step(Gpt& g, Batches& batches, uint64_t first, int micro_batches, AdamW settings,
                       float max_norm, uint64_t seed, const std::string& trouble) {
    int ranks = g.mesh.shape.dp, rank = g.mesh.data_rank(), B = g.workload.B;
    float dloss = 1.0f / ((float)micro_batches * ranks * B * g.workload.T);
    zero_gradients(g);
    for (int micro = 0; micro < micro_batches; micro++) {
        Batch batch = batches.load(first + ((uint64_t)micro * ranks + rank) * B, B);
        accumulate_gradients(g, batch, dloss, micro == micro_batches - 1);
    }
    if (!trouble.empty()) spoil_loss(g);
    if (stop_requested) {
        constexpr int some_number = 0x3f;
        cudaCheck(cudaMemsetAsync(g.stats + stat_stop, some_number, sizeof(float), g.stream));
    }
    g.state.update(g.stats, settings, max_norm, seed);
}

inline AdamW adamw_settings(const Options& o, int step) {
    return {o.learning_rate * schedule(o, step),
            o.beta1,
            o.beta2,
            o.adam_eps,
            o.weight_decay,
            step + 1,
            o.stochastic_rounding};
}

// The tokens a text starts from: the prompt, or what comes before a document.
inline std::vector<int> prompt_tokens(const Options& o, const Tokenizer* tokenizer, std::string_view prompt) {
    if (prompt.empty()) return {std::max(o.document_end, 0)};
    std::vector<int> tokens = tokenizer->encode(prompt);
    if (tokens.empty()) fail("--prompt: has no tokens; give it other text, or use another tokenizer");
    return tokens;
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

// The GEMM rate of this device, from the largest product that takes a reasonable time and fits beside the
// model.
inline double measured_gemm_rate(cudaStream_t stream) {
    double rate = 0;
    for (int size = 512; size <= 8192; size *= 2) {
        if (rate > 0 && 3 * sizeof(floatX) * size * size > available_memory()) break;
        rate = std::max(rate, gemm_rate(size, stream));
        if (2.0 * size * size * size / rate > 0.01) break;
    }
    return rate;
}

inline void print_memory(const Options& o, const Workload& workload, int ranks_sharing) {
    auto classes = memory_classes(o, workload, zero_settings(o), mesh_shape(o));
    size_t available = available_memory(ranks_sharing);
    printf("memory      ");
    for (const MemoryClass& part : classes) printf(" %s %s,", part.name, size_text(part.bytes).c_str());
    printf(" %s in all%s\n             %s free and %s kept for libraries, enough for --micro-batch %d\n",
           size_text(memory_total(classes)).c_str(), o.dp > 1 ? " on each rank" : "",
           size_text(available).c_str(), size_text(library_memory).c_str(),
           largest_micro_batch(o, workload, zero_settings(o), mesh_shape(o), available));
}

inline void print_run(const Options& o, const Workload& workload, const TokenLoader& data) {
    double count = (double)parameter_layout(o).parameter_count();
    printf("model        %s: %s parameters, %d layers of %d channels, %sFLOP per token (%s if attention "
           "counts causal)\n",
           o.model.c_str(), human(count).c_str(), o.layers, o.channels,
           human(flops_per_token(o, workload.T, false)).c_str(),
           human(flops_per_token(o, workload.T, true)).c_str());
    printf("data         %s tokens, %s samples of %d\n", human((double)data.total_tokens()).c_str(),
           human((double)data.samples_per_epoch()).c_str(), workload.T);
    for (const std::string& line : data.summary()) printf("             %s\n", line.c_str());
    for (const std::string& path : data.too_short())
        printf("             %s is shorter than a sample: not used\n", path.c_str());
    double epochs = (double)o.steps * o.global_batch / workload.T / data.samples_per_epoch();
    printf("run          %s: %d steps of %lld tokens (%d x %d at a time%s), %.2f epochs\n", o.run_dir.c_str(),
           o.steps, o.global_batch, workload.B, workload.T,
           o.dp > 1 ? text(" on each of %d ranks", o.dp).c_str() : "", epochs);
}

// By this rank, since the start.
inline uint64_t sent_bytes() {
    uint64_t bytes = 0;
    for (auto& of_kind : traffic_bytes) bytes += of_kind;
    return bytes;
}

// Options about rounding depend on what parameters are made of, which is decided when the program is built.
inline void check_precision(const Options& o) {
    if (sizeof(floatX) == sizeof(float)) {
        const char* remedy =
            "parameters are fp32 in this program; leave it out, or build with PRECISION=bf16";
        if (o.stochastic_rounding) fail("--stochastic-rounding on: %s", remedy);
        if (!o.master_weights) fail("--master-weights off: %s", remedy);
    } else if (!o.master_weights && !o.stochastic_rounding) {
        fail("--master-weights off: bf16 alone loses small updates; add --stochastic-rounding on");
    }
}

// The sign that a NaN can have says nothing.
inline float without_sign(float value) {
    return std::isnan(value) ? NAN : value;
}

inline int ranks_sharing_device([[maybe_unused]] const World& world) {
#ifdef RANKS_USE_NCCL
    return 1;  // though a rank may see no device but its own
#else
    int devices;
    cudaCheck(cudaGetDeviceCount(&devices));
    return ceil_div(world.local_size(), devices);
#endif
}

inline void check_communication(const Options& o) {
    if (o.tp > 1 || o.pp > 1) {
        fail("--tp %d --pp %d: models are cut over data ranks only; leave both out, and use --zero 3 where "
             "one "
             "device is too small",
             o.tp, o.pp);
    }
#ifdef RANKS_USE_NCCL
    if (o.throttle_link > 0) {
        fail("--throttle-link %g: NCCL's links cannot be slowed down; leave it out, or build with COMM=mpi",
             o.throttle_link);
    }
#else
    host_link_speed(o.throttle_link);
#endif
}

// Where all ranks learn that one of them is in trouble.
inline void raise_trouble(const World& world, const std::string& trouble) {
    world.together([&] {
        if (!trouble.empty()) fail("%s", trouble.c_str());
    });
}

// For all ranks, after a step whose loss or gradient is not finite: throws the reason.
inline void raise_not_finite(const Gpt& g, const World& world, const std::string& trouble, int step,
                             const StepStats& stats) {
    raise_trouble(world, trouble);
    std::string bad;
    for (const std::string& of_rank : world.gather(first_bad_gradient(g))) {
        if (bad.empty()) bad = of_rank;
    }
    raise_trouble(world,
                  text("step %d: loss %g, gradient norm %g, first gradient that is not finite: %s; try a "
                       "lower --learning-rate or a longer --warmup-steps",
                       step, without_sign(stats.loss), without_sign(stats.gradient_norm),
                       bad.empty() ? "none" : bad.c_str()));
}

// Ends the job because of an error that only this rank knows of: the others may wait for it.
[[noreturn]] inline void leave_alone(const World& world, const std::exception& error) {
    fprintf(stderr, "train_gpt: %s: %s\n", world.name().c_str(), one_line(message_of(error)).c_str());
    world.abort();
}

// For all ranks.
inline void train(const Options& o, const World& world) {
    // What can be refused is refused before the run directory is made and memory is taken.
    Workload workload = training_workload(o);
    std::unique_ptr<TokenLoader> train_data, val_data;
    std::unique_ptr<Tokenizer> tokenizer;
    std::unique_ptr<RunLog> log;
    world.together([&] {
        check_precision(o);
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
        check_memory(o, workload, zero_settings(o), mesh_shape(o), ranks_sharing_device(world));
    });
    world.together([&] {
        if (!world.is_root()) return;
        log = std::make_unique<RunLog>(o.run_dir, options_to_json(o, command_train), o.overwrite);
        size_t width = zero_settings(o).keep_master ? sizeof(float) : sizeof(floatX);
        check_space(weights_path(o.run_dir), parameter_layout(o).parameter_count() * width);
        unlink(tokenizer_path(o.run_dir).c_str());
        if (tokenizer && !tokenizer->file().empty()) tokenizer->write(tokenizer_path(o.run_dir));
    });

    printf("%s\n", options_summary(o, command_train, terminal_width()).c_str());
    cudaDeviceProp device;
    cudaCheck(cudaGetDeviceProperties(&device, 0));
    printf("device       %s (%s, %s; %s)\n", device.name, device_name, floatX_name,
           communication_libraries().c_str());
    print_run(o, workload, *train_data);
    print_memory(o, workload, ranks_sharing_device(world));
    fflush(stdout);

    Mesh mesh(world, mesh_shape(o), nullptr);
    mesh.timeout_seconds = o.communication_timeout;
    if (world.size() > 1) printf("ranks        %s\n", mesh.picture().c_str());
    ZeroSettings settings = zero_settings(o);
    settings.host_threads = threads_per_rank(world);
    Gpt g(o, workload, settings, mesh);
    initialize(g, o.seed);
    const std::string weights = weights_path(o.run_dir);
    auto save = [&] {
        save_weights(g.state, {{"options", options_to_json(o, command_train)}}, weights, world);
    };
    double gemm = measured_gemm_rate(g.stream), published = published_peak(device.name, sizeof(floatX) == 2);
    Meter meter(o, workload.T, o.peak_tflops > 0 ? o.peak_tflops * 1e12 : published, gemm, world.size());
    printf("rate         %sFLOP/s measured in products%s\n", human(gemm).c_str(),
           published > 0 ? text(", %sFLOP/s published", human(published).c_str()).c_str() : "");

    uint64_t samples_per_step = (uint64_t)(o.global_batch / workload.T);
    std::string trouble;  // what went wrong on this rank, to be raised when all ranks can hear of it
    auto make_batches = [&](const TokenLoader& loader) {
        BatchShape shape = {workload.B, workload.T, o.document_end};
        uint64_t stride = (uint64_t)workload.B * o.dp;  // the data ranks take turns
        return std::make_unique<Batches>(
            make_batch_source(world, o.data_reader == "node", loader, shape, stride), o.reset_positions,
            g.stream, mesh, trouble);
    };
    std::unique_ptr<Batches> batches = make_batches(*train_data), val_batches;
    uint64_t val_samples = 0;
    if (val_data) {
        val_batches = make_batches(*val_data);
        val_samples = std::min<uint64_t>(val_data->samples_per_epoch(), o.val_batches * samples_per_step);
    }
    int micro_batches = (int)(samples_per_step / ((uint64_t)workload.B * o.dp));
    // mpirun shows its processes a terminal whatever its own output is
    StepLog progress(o, meter, log.get(), isatty(1) && !launched_processes());
    stop_on_signals();

    int step = 0;           // steps done
    bool stopping = false;  // as all ranks agreed in the last step
    auto asked_to_stop = [&] { return stopping || (world.size() == 1 && stop_requested); };
    try {
        for (;;) {
            // A run that is asked to stop may be killed soon, so it saves its weights before anything else.
            auto due = [&](int every) {
                return every > 0 && !asked_to_stop() && (step == o.steps || step % every == 0);
            };
            if (val_data && due(o.val_every)) {
                float loss = evaluate(g, *val_batches, val_samples, trouble);
                note_trouble(trouble, [&] { progress.validation(step, without_sign(loss)); });
            }
            if (due(o.sample_every)) {
                note_trouble(trouble,
                             [&] { progress.sample(step, sample_text(g, o, tokenizer.get(), step)); });
            }
            if (step == o.steps || asked_to_stop() || (world.size() == 1 && !trouble.empty())) break;

            double start = seconds_now();
            uint64_t sent_before = sent_bytes();
            AdamW adamw = adamw_settings(o, step);
            train_step(g, *batches, step * samples_per_step, micro_batches, adamw, o.gradient_clip, o.seed,
                       trouble);
            StepStats stats = read_stats(g, (double)o.global_batch);
            if (!stats.finite) raise_not_finite(g, world, trouble, step + 1, stats);
            step++;
            stopping = stats.stop;
            uint64_t sent = sent_bytes() - sent_before;
            note_trouble(trouble, [&] {
                progress.step(step, stats.loss, stats.gradient_norm, adamw.learning_rate,
                              seconds_now() - start, sent);
            });
        }
        raise_trouble(world, trouble);
    } catch (const CommonError& error) {
        if (step == 0) throw;
        // Bad data or a full disk costs at most the step that met it.
        save();
        throw CommonError(
            text("%s; the weights after step %d are in %s", error.what(), step, weights.c_str()));
    } catch (const std::exception& error) {
        if (world.size() > 1) leave_alone(world, error);  // streams that wait for others cannot be put away
        throw;
    }
    save();
    printf("%s after step %d; the weights are in %s\n", asked_to_stop() ? "stopped as asked" : "done", step,
           weights.c_str());
}

// ----------------------------------------------------------------------------
// the sample command
// ----------------------------------------------------------------------------

// A model that is not trained any further.
inline std::unique_ptr<Gpt> load_model(const TrainedModel& model, const Workload& workload) {
    ZeroSettings settings = {.training = false};
    check_memory(model.options, workload, settings);
    auto g = std::make_unique<Gpt>(model.options, workload, settings);
    load_weights(g->state, model.reader);
    return g;
}

// Continues a prompt and prints it: a single text as it comes, several when all are there.
inline void print_samples(Gpt& g, const TrainedModel& model, const Options& command,
                          const std::string& prompt, int number) {
    const Options& o = model.options;
    int samples = command.samples;
    bool streams = samples == 1;
    std::vector<uint64_t> keys;
    std::vector<TextDecoder> decoders(samples, TextDecoder(model.tokenizer.get(), prompt.empty()));
    std::vector<StopText> stops(samples, StopText(command.stop));
    std::vector<std::string> texts(samples, prompt);
    for (int i = 0; i < samples; i++) keys.push_back(random_key(command.seed, text("sample %d", number + i)));
    auto add = [&](int i, const std::string& piece) {
        texts[i] += piece;
        if (!streams) return;
        print_bytes(piece);
        fflush(stdout);
    };

    if (streams) print_bytes(prompt);
    double start = seconds_now();
    long long tokens = 0;
    generate(g, prompt_tokens(o, model.tokenizer.get(), prompt), command.tokens, o.document_end,
             {command.temperature, command.top_k, command.top_p, command.min_p, command.repetition_penalty},
             keys, [&](int i, int token) {
                 tokens++;
                 add(i, stops[i].add(decoders[i].add(token)));
                 return !stops[i].stopped();
             });
    double seconds = seconds_now() - start;
    for (int i = 0; i < samples; i++) {
        add(i, stops[i].add(decoders[i].finish()));
        add(i, stops[i].finish());
        if (!streams) print_bytes(texts[i]);
        printf("\n%s", i + 1 < samples ? "----\n" : "");
    }
    check_standard_output();
    fprintf(stderr, "%lld tokens in %.1f s, %.1f tokens/s\n", tokens, seconds, tokens / seconds);
}

inline void sample(const Options& command) {
    TrainedModel model(command.run, command.tokenizer);
    const Options& o = model.options;
    std::string prompt = command.prompt_file.empty() ? command.prompt : read_text(command.prompt_file);
    if (!model.tokenizer && (command.interactive || !prompt.empty() || !command.stop.empty())) {
        const char* option = command.interactive           ? "--interactive"
                             : prompt.empty()              ? "--stop"
                             : command.prompt_file.empty() ? "--prompt"
                                                           : "--prompt-file";
        fail("%s: needs a tokenizer, and there is none for %s; leave it out, or name one with --tokenizer",
             option, model.reader.path().c_str());
    }
    // A prompt that is not known yet may fill the context.
    size_t length = command.interactive
                        ? o.context
                        : prompt_tokens(o, model.tokenizer.get(), prompt).size() + command.tokens;
    int limit = (int)std::min<size_t>(length, o.context);
    Workload workload = {.B = 1,
                         .T = std::max(limit, command.samples),
                         .training = false,
                         .loss_chunk = command.samples,
                         .cache_rows = command.cache ? command.samples : 0,
                         .cache_length = command.cache ? limit : 0};
    std::unique_ptr<Gpt> g = load_model(model, workload);
    if (!command.interactive) return print_samples(*g, model, command, prompt, 0);
    bool on_terminal = isatty(STDIN_FILENO);
    for (int number = 0;; number++) {
        if (on_terminal) fputs("> ", stdout), fflush(stdout);
        if (!std::getline(std::cin, prompt)) break;
        if (prompt.ends_with('\r')) prompt.pop_back();
        if (!prompt.empty()) print_samples(*g, model, command, prompt, number);
    }
    if (on_terminal) printf("\n");
}

// ----------------------------------------------------------------------------
// the eval command
// ----------------------------------------------------------------------------

// Reads (N) losses of the last batch, and calls visit(position, loss) for those that have a target.
template <typename Visit>
void each_loss(Gpt& g, const int* targets, Visit&& visit) {
    std::vector<float> losses((size_t)g.workload.B * g.workload.T);
    copy_to_host(losses.data(), g.acts[0].losses, losses.size(), g.stream, g.mesh);
    for (size_t i = 0; i < losses.size(); i++) {
        if (targets[i] >= 0) visit(i, losses[i]);
    }
}

// Loss, perplexity and bits per byte on token files.
inline void evaluate_data(Gpt& g, const TrainedModel& model, const Options& command) {
    const Options& o = model.options;
    int B = g.workload.B, T = g.workload.T;
    TokenLoader loader(command.data, o.vocab_size, T, SampleOrder::sequential);
    uint64_t count = loader.samples_per_epoch();
    if (command.limit > 0) count = std::min<uint64_t>(count, command.limit);
    std::string trouble;
    BatchShape shape = {B, T, o.document_end};
    Batches batches(std::make_unique<BatchReader>(loader, shape, B), o.reset_positions, g.stream, g.mesh,
                    trouble);
    double loss = 0;
    uint64_t targets = 0, bytes = 0;
    ProgressLine progress("eval", (double)count * T, "tokens");
    for (uint64_t first = 0; first < count; first += B) {
        Batch batch = batches.load(first, (int)std::min<uint64_t>(B, count - first));
        if (!trouble.empty()) fail("%s", trouble.c_str());
        forward(g, batch);
        classify(g, batch, 0, false);
        each_loss(g, batches.targets(), [&](size_t i, float value) {
            int target = batches.targets()[i];
            loss += value;
            targets++;
            if (!model.tokenizer || target == o.document_end) return;
            if (!model.tokenizer->has(target)) {
                fail("%s: has token %d, which the tokenizer has not; name the one it was made with",
                     command.data.c_str(), target);
            }
            bytes += model.tokenizer->token_bytes(target).size();
        });
        progress.add((double)B * T);
    }
    progress.clear();
    double mean = loss / targets;
    printf("loss %.4f  perplexity %.2f", mean, std::exp(mean));
    if (bytes > 0) printf("  bits per byte %.4f", loss / std::log(2.0) / bytes);
    printf("  (%llu tokens%s in %llu samples of %s)\n", (unsigned long long)targets,
           bytes > 0 ? text(", %llu bytes of text", (unsigned long long)bytes).c_str() : "",
           (unsigned long long)count, command.data.c_str());
}

// Which choice the model finds likeliest, for multiple-choice questions.
inline void evaluate_choices(Gpt& g, const TrainedModel& model, const Options& command) {
    std::vector<ChoiceExample> examples =
        read_choices(command.choices, model.tokenizer.get(), model.options.vocab_size);
    if (command.limit > 0 && examples.size() > (size_t)command.limit) examples.resize(command.limit);
    int B = g.workload.B, T = g.workload.T;
    std::vector<std::vector<double>> likelihoods;
    std::vector<std::pair<size_t, size_t>> rows;  // example and choice
    for (size_t i = 0; i < examples.size(); i++) {
        likelihoods.emplace_back(examples[i].choices.size());
        for (size_t j = 0; j < examples[i].choices.size(); j++) rows.push_back({i, j});
    }
    DeviceInts device((size_t)2 * B * T);
    ProgressLine progress("eval", (double)rows.size(), "choices");
    for (size_t first = 0; first < rows.size(); first += B) {
        std::vector<int> inputs((size_t)2 * B * T);
        int* targets = inputs.data() + (size_t)B * T;
        std::fill_n(targets, (size_t)B * T, -1);
        for (size_t i = first; i < std::min(first + B, rows.size()); i++) {
            size_t at = (i - first) * T;
            choice_row(examples[rows[i].first], rows[i].second, T, &inputs[at], targets + at);
        }
        copy_to_device(device.data, inputs.data(), inputs.size(), g.stream);
        Batch batch = {.B = B, .T = T, .tokens = device.data, .targets = device.data + (size_t)B * T};
        forward(g, batch);
        classify(g, batch, 0, false);
        each_loss(g, targets, [&](size_t i, float loss) {
            auto [example, choice] = rows[first + i / T];
            likelihoods[example][choice] -= loss;
        });
        progress.add(B);
    }
    progress.clear();
    ChoiceScore score;
    for (size_t i = 0; i < examples.size(); i++) score.add(examples[i], likelihoods[i]);
    printf("right %.1f%% by the sum of log-likelihoods, %.1f%% by their mean per token (+- %.1f), of %lld "
           "questions of %s\n",
           100 * score.accuracy(), 100 * score.accuracy_by_mean(),
           100 * score.standard_error(score.accuracy()), (long long)score.examples, command.choices.c_str());
}

inline void evaluate_run(const Options& command) {
    TrainedModel model(command.run, command.tokenizer);
    Options& o = model.options;
    o.micro_batch = command.micro_batch;
    o.sequence_length = command.sequence_length;
    complete_sequence_length(o);
    check_micro_batch(o);
    int tokens = o.micro_batch * o.sequence_length;
    Workload workload = {o.micro_batch, o.sequence_length, false, Recompute::none,
                         chosen_loss_chunk(o, tokens)};
    std::unique_ptr<Gpt> g = load_model(model, workload);
    if (!command.data.empty()) evaluate_data(*g, model, command);
    if (!command.choices.empty()) evaluate_choices(*g, model, command);
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
    Options options;
    world.together([&] {
        options = parse_options(command, argc - 1, argv + 1, command == command_train ? world.size() : 1);
        if (command != command_train && world.size() > 1) {
            fail("%s: works in one process and there are %d; start it without mpirun", argv[1], world.size());
        }
    });
    choose_device(world);
#ifndef __CUDACC__
    if (world.size() > 1) host_device.threads = threads_per_rank(world);
#endif
    // One rank speaks for all.
    if (!world.is_root() && !freopen("/dev/null", "w", stdout)) fail_with_errno("/dev/null", "write it");
    switch (command) {
    case command_train:
        train(options, world);
        break;
    case command_sample:
        sample(options);
        break;
    case command_eval:
        evaluate_run(options);
        break;
    case command_data:
        look_into_data(options);
        break;
    case command_tokenize:
        tokenize({.inputs = options.inputs,
                  .output = options.output,
                  .val_fraction = options.val_fraction,
                  .shard_tokens = options.shard_tokens,
                  .seed = (uint64_t)options.seed,
                  .overwrite = options.overwrite,
                  .tokenizer = options.tokenizer,
                  .text_field = options.text_field,
                  .threads = options.threads,
                  .train_tokenizer = options.train_tokenizer,
                  .pre_tokenizer = options.pre_tokenizer,
                  .tokenizer_text = options.tokenizer_text});
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
