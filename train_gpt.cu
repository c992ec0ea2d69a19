/*
train_gpt: pre-trains GPT-style transformers. Read it top to bottom:

    parameters    one table: name, shape, initialisation, weight decay
    activations   one table: name, size, kept for every layer or recomputed
    model         memory, initial weights
    forward       embedding, blocks, classifier
    backward      the forward pass in reverse
    update        gradient norm, clipping, AdamW (in comm/zero.h, for one rank as for many)
    batches       from token shards to the device
    weights       to and from a file
    sampling      text from a model
    training      the loop, with evaluation, samples and the log
    main          the subcommands

Each layer's arithmetic is in kernels/, how the work is cut over ranks in comm/, what is read and written on
disk in data/.
*/
#include <csignal>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "comm/memory.h"           // allocate, MemoryClass
#include "comm/mesh.h"             // Mesh: this rank's place and its groups
#include "comm/parameters.h"       // TensorRow, ParameterLayout
#include "comm/watch.h"            // wait_for
#include "comm/whole_tensors.h"    // set_tensors, collect_tensors
#include "comm/world.h"            // launched by mpirun or alone
#include "comm/zero.h"             // ZeroState: parameters, gradients and optimizer state, cut over ranks
#include "data/error.h"            // fail
#include "data/meter.h"            // FLOPs, rates, durations
#include "data/model_config.h"     // ModelConfig
#include "data/options.h"          // the options table, parse_options
#include "data/run_log.h"          // the run directory and log.jsonl
#include "data/sample_order.h"     // which tokens a sample is made of
#include "data/token_shards.h"     // .bin files of tokens
#include "data/tokenize.h"         // the tokenize subcommand
#include "data/tokenizer.h"        // bytes <-> tokens
#include "data/weights_file.h"     // named tensors in a file
#include "kernels/adamw.cuh"       // AdamW
#include "kernels/attention.cuh"   // attention_forward, attention_backward
#include "kernels/classifier.cuh"  // classifier, sum_losses
#include "kernels/embedding.cuh"   // embedding_forward, embedding_backward, bucket_tokens
#include "kernels/gelu.cuh"        // gelu_backward
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
};

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

// One micro-batch on the device.
struct Batch {
    int B, T;
    const int* tokens = nullptr;     // (B, T)
    const int* targets = nullptr;    // (B, T) -1: no loss here
    const int* order = nullptr;      // (B*T) positions sorted by token
    const int* starts = nullptr;     // (buckets + 1) where each distinct token begins in order
    const int* doc_start = nullptr;  // (B, T) where each position's document begins; null: at 0
    int buckets = 0;
};

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
    float* rope = nullptr;   // (T, R/2, 2) cosines and sines
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
    size_t rope = config.position == "rope" ? (size_t)w.T * config.rope_dims * sizeof(float) : 0;
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
        fail("--micro-batch %d: needs %s of memory and %s are free; --micro-batch %d fits, --recompute block "
             "saves more",
             workload.B, size_text(need).c_str(), size_text(available).c_str(), fits);
    }
    fail("the model needs %s of memory and %s are free; %s", size_text(need).c_str(),
         size_text(available).c_str(),
         workload.training ? "choose a smaller --model, a shorter --sequence-length or --recompute block, or "
                             "cut it over more processes with --zero"
                           : "free some, or ask for fewer --tokens");
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
        std::vector<float> table((size_t)workload.T * R);
        RopeScaling scaling = {config.rope_scaling, config.rope_low_frequency, config.rope_high_frequency,
                               config.rope_original_context};
        rope_table(table.data(), workload.T, R, config.rope_theta, scaling);
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
    if (int R = g.rope_dims())
        rope_forward(a.qkv, g.rope, B, T, c.heads, c.kv_heads, c.head_size, R, g.stream);
    attention_forward(a.att, a.lse, a.qkv, batch.doc_start, B, T, c.heads, c.kv_heads, c.head_size, c.window,
                      g.stream);
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
    embedding_forward(g.acts[0].residual, batch.tokens, embedding[wte], embedding[wpe], B, T, C, g.stream);
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
                       batch.buckets, B, T, C, g.stream);
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
// batches
// ----------------------------------------------------------------------------

// Runs what one rank does alone. What goes wrong is kept for the moment when all ranks can hear of it.
template <typename Work>
void note_trouble(std::string& trouble, Work&& work) {
    try {
        work();
    } catch (const Error& error) {
        if (trouble.empty()) trouble = error.what();
    }
}

// Brings micro-batches to the device. While the device works on one, the host prepares the next. What cannot
// be read is written to `trouble`, and the batch has no targets: one rank alone cannot leave a step.
class Batches {
public:
    Batches(const TokenLoader& loader, const Gpt& g, int document_end, std::string& trouble)
        : loader_(loader),
          mesh_(g.mesh),
          B_(g.workload.B),
          T_(g.workload.T),
          document_end_(document_end),
          stream_(g.stream),
          trouble_(trouble) {
        size_t N = (size_t)B_ * T_;
        size_ = 4 * N + (N + 1);
        allocate(device_, size_);
        for (Slot& slot : slots_) {
            cudaCheck(cudaMallocHost((void**)&slot.host, size_ * sizeof(int)));
            cudaCheck(cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming));
        }
    }

    ~Batches() {
        cudaStreamSynchronize(stream_);
        cudaFree(device_);
        for (Slot& slot : slots_) {
            cudaFreeHost(slot.host);
            cudaEventDestroy(slot.copied);
        }
    }

    Batches(const Batches&) = delete;
    Batches& operator=(const Batches&) = delete;

    // Samples first, first + 1, ... in the order of the run; rows from `count` on have no targets.
    Batch load(uint64_t first, int count) {
        Slot& slot = slots_[next_++ % 2];
        wait_for(slot.copied, mesh_);  // its memory is free once the last copy from it is over
        size_t N = (size_t)B_ * T_;
        int *tokens = slot.host, *targets = tokens + N, *doc_start = targets + N, *order = doc_start + N,
            *starts = order + N;
        for (int row = 0; row < B_; row++) {
            size_t at = (size_t)row * T_;
            if (row >= count || !read(first + row, tokens + at, targets + at)) {
                std::fill_n(tokens + at, T_, 0);
                std::fill_n(targets + at, T_, -1);
            }
            for (int t = 0, start = 0; t < T_; t++) {
                doc_start[at + t] = start;
                if (tokens[at + t] == document_end_) start = t + 1;
            }
        }
        int buckets = bucket_tokens(order, starts, tokens, (int)N);
        cudaCheck(cudaMemcpyAsync(device_, slot.host, size_ * sizeof(int), cudaMemcpyHostToDevice, stream_));
        cudaCheck(cudaEventRecord(slot.copied, stream_));
        return {B_,
                T_,
                device_,
                device_ + N,
                device_ + 3 * N,
                device_ + 4 * N,
                document_end_ >= 0 ? device_ + 2 * N : nullptr,
                buckets};
    }

private:
    struct Slot {
        int* host;
        cudaEvent_t copied;
    };

    bool read(uint64_t sample, int* tokens, int* targets) {
        bool done = false;
        note_trouble(trouble_, [&] {
            loader_.load(sample, tokens, targets);
            done = true;
        });
        return done;
    }

    const TokenLoader& loader_;
    const Mesh& mesh_;
    const int B_, T_, document_end_;
    cudaStream_t stream_;
    std::string& trouble_;
    size_t size_;
    int* device_;
    Slot slots_[2];
    size_t next_ = 0;
};

// ----------------------------------------------------------------------------
// sampling
// ----------------------------------------------------------------------------

struct Sampling {
    int tokens;         // how many to add
    float temperature;  // 0: always the most likely token
    int top_k;          // choose among the k most likely; 0: all
    int end;            // token that ends the text; -1: none
};

// Chooses a token from its logits (V), with u uniform in [0, 1).
inline int choose_token(std::vector<float> logits, const Sampling& sampling, float u) {
    auto most_likely = std::max_element(logits.begin(), logits.end());
    if (sampling.temperature <= 0) return (int)(most_likely - logits.begin());
    float largest = *most_likely, threshold = -INFINITY;
    if (sampling.top_k > 0 && sampling.top_k < (int)logits.size()) {
        std::vector<float> sorted = logits;
        std::nth_element(sorted.begin(), sorted.begin() + (sampling.top_k - 1), sorted.end(),
                         std::greater<>());
        threshold = sorted[sampling.top_k - 1];
    }
    double total = 0;
    for (float& logit : logits) {
        logit = logit < threshold ? 0 : std::exp((logit - largest) / sampling.temperature);
        total += logit;
    }
    double remaining = u * total;
    int last = 0;
    for (int i = 0; i < (int)logits.size(); i++) {
        if (logits[i] == 0) continue;
        last = i;
        remaining -= logits[i];
        if (remaining < 0) break;
    }
    return last;
}

// Continues `context`, computing the whole of it again for each token; a context longer than the model's is
// cut at its start. Calls show(token) for each new token. The same key gives the same text. All ranks do the
// same work, and take the tokens that the first one chooses.
template <typename Show>
void generate(Gpt& g, std::vector<int> context, const Sampling& sampling, uint64_t key, Show&& show) {
    constexpr int step = 64;  // lengths are rounded up to this, so that products come in few shapes
    int limit = g.workload.T, V = g.config.vocab_size, Vp = padded_vocab(g.config), C = g.config.channels;
    int* device_tokens;
    allocate(device_tokens, limit);
    for (int i = 0; i < sampling.tokens; i++) {
        int length = (int)std::min<size_t>(context.size(), limit),
            padded = std::min(ceil_div(length, step) * step, limit);
        std::vector<int> tokens(context.end() - length, context.end());
        tokens.resize(padded, 0);  // positions after the last token do not reach it
        cudaCheck(cudaMemcpyAsync(device_tokens, tokens.data(), padded * sizeof(int), cudaMemcpyHostToDevice,
                                  g.stream));
        Batch batch = {.B = 1, .T = padded, .tokens = device_tokens};
        forward(g, batch);
        auto& a = g.acts[0];
        int unit = g.classifier_unit();
        g.state.acquire(unit, 0);
        matmul_forward(a.logits, a.normf + (size_t)(length - 1) * C, g.weights(unit)[g.classifier_weight()],
                       nullptr, 1, C, Vp, g.stream);
        g.state.release(unit);
        std::vector<floatX> logits(V);
        copy_to_host(logits.data(), a.logits, V, g.stream, g.mesh);
        int token =
            choose_token({logits.begin(), logits.end()}, sampling, random_uniform(philox(key, i).at[0]));
        if (g.mesh.world().size() > 1) {
            copy_to_device(device_tokens, &token, 1, g.stream);
            g.mesh.world().broadcast(device_tokens, 1, 0, Traffic::statistics, g.stream);
            copy_to_host(&token, device_tokens, 1, g.stream, g.mesh);
        }
        if (token == sampling.end) break;
        context.push_back(token);
        show(token);
    }
    cudaCheck(cudaFree(device_tokens));
}

// ----------------------------------------------------------------------------
// training
// ----------------------------------------------------------------------------

// The rate of step `step` of `steps` (from 0), as a share of the peak. Warm-up rises linearly to 1; the last
// step runs at the final rate exactly. "wsd" is warm-up, stable, decay (Hu et al., MiniCPM, 2024).
inline float schedule(const Options& o, int step) {
    if (step < o.warmup_steps) return (float)(step + 1) / o.warmup_steps;
    float last = o.final_learning_rate;
    float progress = (float)(step + 1 - o.warmup_steps) / (o.steps - o.warmup_steps);  // (0, 1]
    if (o.schedule == "cosine") return last + (1 - last) * 0.5f * (1 + std::cos((float)M_PI * progress));
    if (o.schedule == "linear") return 1 - (1 - last) * progress;
    if (o.schedule == "wsd") {
        float length = std::clamp(o.decay_fraction * o.steps, 1.0f, (float)(o.steps - o.warmup_steps));
        float decay = (float)(o.steps - 1 - step) / length;  // 1 .. 0 while decaying
        return decay >= 1 ? 1 : last + (1 - last) * decay;
    }
    return 1;
}

static volatile sig_atomic_t stop_requested = 0;

// Ctrl-C, SIGTERM, SIGUSR1, or a terminal or pipe that closes ends the run after the step; a second Ctrl-C
// ends the program at once. SIGUSR1 is the one that mpirun passes on without killing the ranks a second
// later.
inline void request_stop(int signal) {
    stop_requested = signal;
    if (signal != SIGPIPE) std::signal(signal, SIG_DFL);  // what is still printed brings that one again
}

inline void stop_on_signals() {
    for (int signal : {SIGINT, SIGTERM, SIGUSR1, SIGPIPE}) std::signal(signal, request_stop);
    if (std::signal(SIGHUP, request_stop) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);  // started by nohup
}

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

inline std::string token_text(const Options& o, int token) {
    if (o.tokenizer == "none") return text("%d ", token);
    // the vocabulary may have more words than the tokenizer
    return token < ByteTokenizer::vocab_size ? ByteTokenizer::decode(token) : text("<|%d|>", token);
}

// The tokens a sample starts from: the prompt, or what comes before a document.
inline std::vector<int> prompt_tokens(const Options& o) {
    if (o.prompt.empty()) return {std::max(o.document_end, 0)};
    return ByteTokenizer::encode(o.prompt);
}

inline std::string sample_text(Gpt& g, const Options& o, int step) {
    std::string sample = o.prompt;
    uint64_t key = random_key(o.seed, text("sample at step %d", step));
    generate(g, prompt_tokens(o), {o.sample_tokens, 0.8f, 0, o.document_end}, key,
             [&](int token) { sample += token_text(o, token); });
    return sample;
}

// ----------------------------------------------------------------------------
// weights in a file
// ----------------------------------------------------------------------------

// Writes the fp32 master copy if there is one, else the parameters, from rank 0. Padding rows stay out. All
// ranks call it together, and all throw what goes wrong on the first.
inline void save_weights(Gpt& g, const Options& o, const std::string& path, const World& world) {
    std::unique_ptr<WeightsWriter> writer;
    auto on_root = [&](auto&& work) {
        world.together([&] {
            if (world.is_root()) work();
        });
    };
    on_root([&] {
        Dtype dtype = g.state.keeps_floats() ? Dtype::fp32 : Dtype::bf16;
        std::vector<StoredTensor> tensors;
        g.layout.each([&](const TensorRow& row, const std::string& name, size_t) {
            tensors.push_back({name, row.shape(), dtype});
        });
        writer = std::make_unique<WeightsWriter>(
            path, nlohmann::ordered_json{{"options", options_to_json(o, command_train)}}, tensors);
    });
    std::string trouble;  // the other ranks send on, so it is thrown when they are done
    collect_tensors(g.state, [&](const std::string& name, const void* data, size_t bytes) {
        note_trouble(trouble, [&] { writer->write(name, data, bytes); });
    });
    on_root([&] {
        if (!trouble.empty()) fail("%s", trouble.c_str());
        writer->commit();
    });
}

// bf16 is the upper half of fp32.
inline float bf16_to_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

inline void load_weights(Gpt& g, const WeightsReader& reader) {
    std::vector<float> values;
    std::vector<uint16_t> narrow;
    set_tensors(g.state, [&](const TensorRow& row, const std::string& name, size_t first, size_t count) {
        const StoredTensor& tensor = reader.tensor(name);
        if (tensor.shape != row.shape()) {
            fail("%s: tensor %s has another shape than its options say; the file is damaged",
                 reader.path().c_str(), name.c_str());
        }
        values.resize(count);
        if (tensor.dtype == Dtype::fp32) {
            reader.read(tensor, first * sizeof(float), values.data(), count * sizeof(float));
        } else {
            narrow.resize(count);
            reader.read(tensor, first * sizeof(uint16_t), narrow.data(), count * sizeof(uint16_t));
            std::transform(narrow.begin(), narrow.end(), values.begin(), bf16_to_float);
        }
        return std::span<const float>(values);
    });
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
    printf("data         %s tokens, %s samples of %d\n", human((double)data.shards().total_tokens()).c_str(),
           human((double)data.samples_per_epoch()).c_str(), workload.T);
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

// What the user sees and the log keeps of each step. Rank 0 alone has a log.
class Progress {
public:
    Progress(const Options& o, const Meter& meter, RunLog* log)
        : o_(o), meter_(meter), log_(log), on_terminal_(isatty(1) && !launched_processes()) {}

    // An error message begins on a line of its own.
    ~Progress() {
        clear();
        fflush(stdout);
    }

    void step(int step, const StepStats& stats, float learning_rate, double seconds) {
        double rate = o_.global_batch / seconds;
        recent_ = recent_ == 0 ? seconds : 0.95 * recent_ + 0.05 * seconds;
        nlohmann::ordered_json line = {{"step", step},
                                       {"loss", stats.loss},
                                       {"grad_norm", stats.gradient_norm},
                                       {"lr", learning_rate},
                                       {"tokens", step * o_.global_batch},
                                       {"tokens_per_s", rate},
                                       {"mfu", nullptr},
                                       {"gemm_share", meter_.gemm_share(rate)},
                                       {"ms", seconds * 1e3}};
        if (meter_.has_peak()) line["mfu"] = meter_.mfu(rate);
        if (o_.dp > 1) line["sent_bytes"] = sent_bytes() - sent_before_;
        sent_before_ = sent_bytes();
        write(line);
        std::string left = duration(recent_ * (o_.steps - step));
        if (step % o_.log_every && step != 1 && step != o_.steps) {
            if (on_terminal_)
                printf("\r\033[Kstep %d/%d  loss %.4f  %s left", step, o_.steps, stats.loss, left.c_str());
        } else {
            clear();
            std::string mfu = meter_.has_peak() ? text("  MFU %4.1f%%", 100 * meter_.mfu(rate)) : "";
            printf("step %6d/%d  loss %.4f  norm %6.3f  lr %.2e  %7.1f ms  %6s tok/s%s  %4.1f%% of GEMM rate "
                   " %s left\n",
                   step, o_.steps, stats.loss, stats.gradient_norm, learning_rate, seconds * 1e3,
                   human(rate).c_str(), mfu.c_str(), 100 * meter_.gemm_share(rate), left.c_str());
        }
        fflush(stdout);
    }

    void validation(int step, float loss) {
        clear();
        printf("step %6d/%d  validation loss %.4f\n", step, o_.steps, loss);
        fflush(stdout);
        write({{"step", step}, {"val_loss", loss}});
    }

    void sample(int step, const std::string& sample) {
        clear();
        printf("---- sample at step %d\n%s\n----\n", step, sample.c_str());
        fflush(stdout);
        write({{"step", step}, {"sample", sample}});
    }

private:
    void clear() const {
        if (on_terminal_) printf("\r\033[K");
    }

    void write(const nlohmann::ordered_json& line) {
        if (log_) log_->write(line);
    }

    const Options& o_;
    const Meter& meter_;
    RunLog* log_;
    const bool on_terminal_;    // mpirun shows its processes a terminal whatever its own output is
    double recent_ = 0;         // seconds of a step, averaged
    uint64_t sent_before_ = 0;  // bytes that this rank had sent at the last step
};

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

// What to print of an exception.
inline std::string message_of(const std::exception& error) {
    bool memory = dynamic_cast<const std::bad_alloc*>(&error);
    return memory ? "memory: the system gives no more; free some or choose smaller sizes"
                  : one_line(error.what());
}

// Ends the job because of an error that only this rank knows of: the others may wait for it.
[[noreturn]] inline void leave_alone(const World& world, const std::exception& error) {
    fprintf(stderr, "train_gpt: %s: %s\n", world.name().c_str(), message_of(error).c_str());
    world.abort();
}

inline void train(const Options& o, const World& world) {
    // What can be refused is refused before the run directory is made and memory is taken.
    Workload workload = training_workload(o);
    std::unique_ptr<TokenLoader> train_data, val_data;
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
        check_memory(o, workload, zero_settings(o), mesh_shape(o), ranks_sharing_device(world));
    });
    world.together([&] {
        if (!world.is_root()) return;
        log = std::make_unique<RunLog>(o.run_dir, options_to_json(o, command_train), o.overwrite);
    });
    std::string weights_path = o.run_dir + "/weights.bin";

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
    double gemm = measured_gemm_rate(g.stream), published = published_peak(device.name, sizeof(floatX) == 2);
    Meter meter(o, workload.T, o.peak_tflops > 0 ? o.peak_tflops * 1e12 : published, gemm, world.size());
    printf("rate         %sFLOP/s measured in products%s\n", human(gemm).c_str(),
           published > 0 ? text(", %sFLOP/s published", human(published).c_str()).c_str() : "");

    uint64_t samples_per_step = (uint64_t)(o.global_batch / workload.T);
    std::string trouble;  // what went wrong on this rank, to be raised when all ranks can hear of it
    Batches batches(*train_data, g, o.document_end, trouble);
    std::unique_ptr<Batches> val_batches;
    uint64_t val_samples = 0;
    if (val_data) {
        val_batches = std::make_unique<Batches>(*val_data, g, o.document_end, trouble);
        val_samples = std::min<uint64_t>(val_data->samples_per_epoch(), o.val_batches * samples_per_step);
    }
    int micro_batches = (int)(samples_per_step / ((uint64_t)workload.B * o.dp));
    Progress progress(o, meter, log.get());
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
                std::string sample = sample_text(g, o, step);
                note_trouble(trouble, [&] { progress.sample(step, sample); });
            }
            if (step == o.steps || asked_to_stop() || (world.size() == 1 && !trouble.empty())) break;

            double start = seconds_now();
            AdamW adamw = adamw_settings(o, step);
            train_step(g, batches, step * samples_per_step, micro_batches, adamw, o.gradient_clip, o.seed,
                       trouble);
            StepStats stats = read_stats(g, (double)o.global_batch);
            if (!stats.finite) raise_not_finite(g, world, trouble, step + 1, stats);
            step++;
            stopping = stats.stop;
            note_trouble(trouble,
                         [&] { progress.step(step, stats, adamw.learning_rate, seconds_now() - start); });
        }
        raise_trouble(world, trouble);
    } catch (const CommonError& error) {
        if (step == 0) throw;
        // Bad data or a full disk costs at most the step that met it.
        save_weights(g, o, weights_path, world);
        throw CommonError(
            text("%s; the weights after step %d are in %s", error.what(), step, weights_path.c_str()));
    } catch (const std::exception& error) {
        if (world.size() > 1) leave_alone(world, error);  // streams that wait for others cannot be put away
        throw;
    }
    save_weights(g, o, weights_path, world);
    printf("%s after step %d; the weights are in %s\n", asked_to_stop() ? "stopped as asked" : "done", step,
           weights_path.c_str());
}

// ----------------------------------------------------------------------------
// the sample command
// ----------------------------------------------------------------------------

// Prints text from a run directory or a weights file.
inline void sample(const Options& command) {
    std::error_code not_there;  // which the reader reports
    bool directory = std::filesystem::is_directory(command.run, not_there);
    WeightsReader reader(directory ? command.run + "/weights.bin" : command.run);
    if (!reader.header().contains("options"))
        fail("%s: no options in the header; the file is damaged", reader.path().c_str());
    Options o = stored_options(reader.header()["options"], reader.path());
    if (!command.prompt.empty() && o.tokenizer == "none") {
        fail("--prompt: %s was trained without a tokenizer; leave --prompt out", reader.path().c_str());
    }
    o.prompt = command.prompt;
    size_t length = prompt_tokens(o).size() + command.tokens;
    Workload workload = {1, (int)std::min<size_t>(length, o.context), false, Recompute::none, 1};
    ZeroSettings settings = {.training = false};
    check_memory(o, workload, settings);
    Gpt g(o, workload, settings);
    load_weights(g, reader);
    for (int i = 0; i < command.samples; i++) {
        printf("%s", o.prompt.c_str());
        generate(g, prompt_tokens(o), {command.tokens, command.temperature, command.top_k, o.document_end},
                 random_key(command.seed, text("sample %d", i)), [&](int token) {
                     fputs(token_text(o, token).c_str(), stdout);
                     fflush(stdout);
                 });
        printf("\n%s", i + 1 < command.samples ? "----\n" : "");
    }
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
            fail("train_gpt %s: works in one process and there are %d; start it without mpirun", argv[1],
                 world.size());
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
    case command_tokenize:
        tokenize({options.inputs, options.output, options.val_fraction, options.shard_tokens,
                  (uint64_t)options.seed, options.overwrite});
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
    fprintf(stderr, "train_gpt: %s\n", message_of(error).c_str());
    return 1;
}
#endif
