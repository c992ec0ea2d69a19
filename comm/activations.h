/*
How long activations are kept, and where. A table has one row for each activation; the number of its instances
in memory is the most that are needed at the same time, which follows from the pipeline's schedule. While a
task of the schedule runs, each layer sees its own instances through a struct of pointers, the View.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "comm/memory.h"             // Arena
#include "comm/parameters.h"         // padded_vocab
#include "comm/pipeline_schedule.h"  // PipelineTask
#include "comm/stage.h"              // Stage, Dims, local_part
#include "data/options/model_config.h"
#include "data/options/options.h"  // Recompute
#include "kernels/attention.cuh"   // attention_backward_scratch
#include "kernels/embedding.cuh"   // embedding_backward_scratch
#include "kernels/fp8_matmul.cuh"  // Fp8Operand
#include "kernels/matmul.cuh"      // matmul_backward_bias_scratch, gelu_may_ride
#include "kernels/norm.cuh"        // norm_backward_scratch
#include "kernels/qk_norm.cuh"     // qk_norm_backward_scratch

// ----------------------------------------------------------------------------
// requirements of a model

// Sizes that the activations depend on.
struct Workload {
    int B, T;       // sequences of a micro-batch, and tokens of each on a context rank
    bool training;  // false: forward only, nothing is kept
    Recompute recompute = Recompute::none;
    int loss_chunk;  // tokens whose logits exist at the same time
    // Texts that are generated at once, and tokens of each in the key/value cache. 0: no cache.
    int cache_rows = 0, cache_length = 0;
    bool fp8 = false;                       // for the blocks' matrix products
    size_t element_bytes = sizeof(floatX);  // differs in plans for another build
    bool fast_gradients = false;            // for fp8; see Fp8Sizes
    int contexts = 1;                       // context ranks

    int sequence() const { return T * contexts; }
    int positions() const { return std::max(sequence(), cache_length); }
};

// Returns how many elements one text has in one layer's key/value cache.
inline size_t cache_row_size(const ModelConfig& c, int length) {
    return (size_t)length * 2 * c.kv_heads * c.head_size;
}

// ----------------------------------------------------------------------------
// the table

enum class Lifetime {
    shared,  // one for all layers
    layer,   // for each layer and micro-batch, from its forward to its backward pass
    inner,   // like layer, but none for the first layer of a chunk, which reads the received array in place
    table,   // like layer, only for layers with an n-gram table
    // for each layer and micro-batch, from its input gradient to its weight gradient; plus one instance for
    // what the forward pass writes and the backward pass recomputes
    pending,
    head  // for each micro-batch, from its forward to its backward pass
};

struct ActivationRow {
    const char* name;
    size_t size;  // bytes of one instance
    Lifetime lifetime;
    bool is_floatX;
    void (*point)(void* view, void* memory);  // sets the view's field of this name
    char* memory = nullptr;

    size_t stride() const { return ceil_div(size, 256) * 256; }
    size_t instances(const Stage& stage) const {
        switch (lifetime) {
        case Lifetime::shared:
            return 1;
        case Lifetime::layer:
            return stage.layer_slots;
        case Lifetime::inner:
            return stage.inner_slots;
        case Lifetime::table:
            return stage.table_slots;
        case Lifetime::pending:
            return first_pending(stage, stage.chunks(), 0);
        case Lifetime::head:
            return stage.capacity.kept.back();
        }
        __builtin_unreachable();
    }
    void bind(void* view, size_t instance) const { point(view, memory + instance * stride()); }

    // Returns the first instance for the layers of this chunk and the micro-batch in this slot.
    static size_t first_pending(const Stage& stage, int chunk, int slot) {
        std::vector<int> layers = stage.layers(0);
        size_t instance = 1;  // 0 is for what the forward pass writes
        for (int before = 0; before < chunk; before++)
            instance += stage.capacity.pending[before] * layers[before];
        return slot == 0 ? instance : instance + slot * layers[chunk];
    }
};

// Allocates all instances of all rows.
struct ActivationArrays {
    std::vector<ActivationRow> table;

    ActivationArrays(Arena& memory, std::vector<ActivationRow> rows, const Stage& stage)
        : table(std::move(rows)) {
        memory.of("activations");
        for (ActivationRow& row : table) {
            size_t bytes = row.stride() * row.instances(stage);
            row.memory = row.is_floatX ? (char*)memory.take_elements(bytes / memory.element_bytes())
                                       : memory.take<char>(bytes);
        }
    }
};

// Returns the bytes that one layer without an n-gram table keeps for one micro-batch until its backward pass.
inline size_t layer_bytes(const std::vector<ActivationRow>& table) {
    size_t bytes = 0;
    for (const ActivationRow& row : table) {
        if (row.lifetime == Lifetime::layer || row.lifetime == Lifetime::inner) bytes += row.stride();
    }
    return bytes;
}

// The rows of a table in memory. Each layer sees its own instances.
template <typename View>
class ActivationMemory {
public:
    // layers: the number in the whole model, because each layer has a view. The memory must outlive this.
    ActivationMemory(Arena& memory, std::vector<ActivationRow> table, const Stage& stage, int layers)
        : views(layers),
          table_(ActivationArrays(memory, std::move(table), stage).table),
          stage_(stage),
          layer_slots_(stage.layers(0)),
          inner_slots_(stage.layers(1)),
          table_slots_(stage.tables_of_chunks()) {
        for (const ActivationRow& row : table_) {
            for (View& view : views) row.bind(&view, 0);
        }
    }

    std::vector<View> views;  // one for each layer; set by the last bind()

    // has_backward: if false, nothing is kept from one task to the next.
    void begin_run(bool has_backward) {
        for (ActivationSlots* slots : {&layer_slots_, &inner_slots_, &table_slots_})
            slots->begin_run(has_backward);
    }

    // Points the views of the task's layers at the instances kept for it. Tasks must be bound in the order of
    // their list.
    void bind(const PipelineTask& task) {
        PipelineAction action = {task.work, task.micro_batch, task.chunk};
        std::vector<int> slots = layer_slots_.enter(action), inner = inner_slots_.enter(action),
                         of_tables = table_slots_.enter(action);
        int begin = stage_.first_layer(task.chunk), end = stage_.end_layer(task.chunk);
        size_t pending = ActivationRow::first_pending(stage_, task.chunk, task.pending_slot);
        for (const ActivationRow& row : table_) {
            switch (row.lifetime) {
            case Lifetime::shared:  // always in the same place
                break;
            case Lifetime::layer:
                for (int i = begin; i < end; i++) row.bind(&views[i], slots[i - begin]);
                break;
            case Lifetime::inner:
                for (int i = begin + 1; i < end; i++) row.bind(&views[i], inner[i - begin - 1]);
                break;
            case Lifetime::table:
                for (int i = begin, table = 0; i < end; i++)
                    if (stage_.has_table(i)) row.bind(&views[i], of_tables[table++]);
                break;
            case Lifetime::pending:
                for (int i = begin; i < end; i++)
                    row.bind(&views[i], task.work == PipelineWork::forward ? 0 : pending + (i - begin));
                break;
            case Lifetime::head:
                for (View& view : views) {
                    if (task.part == stage_.last_part()) row.bind(&view, task.slot);
                }
            }
        }
    }

private:
    std::vector<ActivationRow> table_;
    const Stage& stage_;
    ActivationSlots layer_slots_, inner_slots_, table_slots_;
};

// ----------------------------------------------------------------------------
// the activations of a GPT
//
// The activations of a transformer are everything that a pass through it writes. They form one table, with a
// row for each: type, name, elements, lifetime, and whether it exists at all. The table defines the struct
// through which layers see them, and the memory that they use.
//
// A block keeps its activations for its backward pass, unless they are recomputed: `elementwise` is the
// lifetime of outputs of norms and activation functions, `hidden` that of the MLP's other activations, and
// `block` that of all others. Operands of the weight gradients live `until_weights`, and matmul_input() keeps
// the input of a matrix that long too. In fp8 the gradient of a matrix is computed from rows ending in _fp8.
// --recompute elementwise keeps these rows, and recomputes the fp8 copies of the weights instead. N, n, C ...
// are those of Dims (comm/stage.h).
//
// A norm computes only this tensor rank's own rows, and these are kept (RowsOfNorm). The rows of all ranks
// are in memory only while matrices read them.

// clang-format off
#define ACTIVATIONS(X)                                                                                       \
    /* forward: attention */                                                                                 \
    X(floatX, residual,   n * C,            inner,                true)  /* input of the block */            \
    X(floatX, norm1,      n * C,            of_norm1.own,         true)                                      \
    X(floatX, all_norm1,  N * C,            of_norm1.all,         tp > 1)  /* also of normf, norm2 */        \
    X(char,   norm1_fp8,  in_fp8(N * C),    of_norm1.fp8,         fp8)                                       \
    X(float,  norm1_mean, n,                fp8 ? block : elementwise, mean)                                 \
    X(float,  norm1_rstd, n,                fp8 ? block : elementwise, true)  /* 1 / deviation */            \
    X(floatX, qkv_raw,    N * QKV,          block,                c.qk_norm)  /* before their norm */        \
    X(float,  qk_rstd,    N * (NH + NKV),   block,                c.qk_norm)                                 \
    X(floatX, qkv,        N * QKV,          c.qk_norm ? elementwise : block, true)  /* for attention */      \
    X(floatX, att,        N * A,            fp8 ? block : matmul_input(block), true)                         \
    X(char,   att_fp8,    in_fp8(N * A),    matmul_input(block),  fp8)                                       \
    X(float,  lse,        N * NH,           block,                true)  /* log of sums, (B, NH, T) */       \
    X(floatX, cache,      cache,            layer,                true)  /* of keys and values */            \
    /* context parallelism: keys and values of all ranks (keys: one part, by position) */                    \
    X(floatX, keys,       all_keys / parts, shared,               cp > 1)                                    \
    X(floatX, keys_by_rank, all_keys,       shared,               cp > 1)                                    \
    X(floatX, dkeys,      all_keys / parts, shared,               training && cp > 1)                        \
    X(float,  dkeys_by_rank, all_keys,      shared,               training && cp > 1)                        \
    /* forward: local filter */                                                                              \
    X(floatX, taps,       N * 2 * C,        shared,               filter)  /* of both convolutions */        \
    X(floatX, filter1,    N * H,            fp8 ? shared : matmul_input(block), filter)  /* 1st output */    \
    X(char,   filter1_fp8, in_fp8(N * H),   matmul_input(block),  filter && fp8)                             \
    X(floatX, filter_sum, n * C,            block,                filter)  /* norm1 + 2nd output */          \
    X(float,  filter_rstd, n,               fp8 ? block : elementwise, filter)                               \
    X(floatX, filtered,   n * C,            of_filtered.own,      filter)                                    \
    X(floatX, all_filtered, N * C,          of_filtered.all,      filter && tp > 1)                          \
    X(char,   filtered_fp8, in_fp8(N * C),  of_filtered.fp8,      filter && fp8)                             \
    X(floatX, qk_and_v,   N * QKV,          shared,               filter)  /* joined into qkv */             \
    X(floatX, halo,       (cp + 1) * 2 * B * C, shared,           filter && cp > 1)  /* next to pieces */    \
    X(floatX, filter1_state, texts * H,     layer,                filter)  /* taps of the newest token */    \
    X(floatX, filter2_state, texts * C,     layer,                filter)                                    \
    /* forward: n-gram memory */                                                                             \
    X(floatX, ngram_norm, n * C,            of_table(elementwise), gates)  /* the gate's queries */          \
    X(float,  ngram_rstd, n,                of_table(elementwise), gates)                                    \
    X(floatX, ngram_rows, N * E,            of_table(elementwise), tables)  /* looked up */                  \
    X(floatX, ngram_kv,   n * 2 * C,        of_table(block),      gates)  /* keys and values */              \
    X(float,  ngram_score, n,               of_table(block),      gates)  /* of the gate */                  \
    X(float,  ngram_key_rstd, n,            of_table(block),      gates)                                     \
    X(floatX, ngram_residual, n * C,        of_table(block),      tables)  /* table's output added */        \
    /* forward: MLP */                                                                                       \
    X(floatX, residual2,  n * C,            block,                sequential)  /* attention added */         \
    X(floatX, norm2,      n * C,            of_norm2.own,         sequential)                                \
    X(floatX, all_norm2,  N * C,            of_norm2.all,         tp > 1 && sequential && in_place.norm2)    \
    X(char,   norm2_fp8,  in_fp8(N * C),    of_norm2.fp8,         sequential && fp8)                         \
    X(float,  norm2_mean, n,                fp8 ? hidden : elementwise, sequential && mean)                  \
    X(float,  norm2_rstd, n,                fp8 ? hidden : elementwise, sequential)                          \
    X(floatX, fc,         N * F1,           hidden,               true)  /* SwiGLU: gates, values */         \
    X(floatX, act,        N * F,            fp8 ? shared : matmul_input(fused ? hidden : elementwise), true) \
    X(char,   act_fp8,    in_fp8(N * F),    matmul_input(hidden), fp8)                                       \
    X(floatX, delta,      n * C,            shared,               true)  /* to be added to the stream */     \
    /* forward: head */                                                                                      \
    X(floatX, residualf,  n * C,            head,                 has_head)                                  \
    X(floatX, normf,      n * C,            head,                 has_head)                                  \
    X(float,  normf_mean, n,                head,                 has_head && mean)                          \
    X(float,  normf_rstd, n,                head,                 has_head)                                  \
    X(floatX, logits,     logits * Vp,      shared,               has_head)                                  \
    X(float,  parts,      tp * chunk * 3,   shared,               has_head && tp > 1)                        \
    X(float,  losses,     N,                shared,               has_head)  /* of each token */             \
    /* tensor parallelism */                                                                                 \
    X(floatX, partial,    N * C * widest_sum, shared,             tp > 1)  /* to be summed over ranks */     \
    /* backward; dresidual (n, C) is the pipeline's */                                                       \
    X(floatX, dnorm,      n * C,            shared,               training)                                  \
    X(floatX, dact,       N * F,            shared,               training && swiglu)                        \
    X(floatX, dfc,        N * F1,           until_weights,        training)                                  \
    /* scales of gradients in fp8, if one kernel writes all rows that a product reads */                     \
    X(float,  dfc_scale,  fp8_scale_floats, shared,               fp8 && (tp == 1 || swiglu))                \
    X(float,  dresidual_scale, fp8_scale_floats, shared,          fp8 && tp == 1)                            \
    X(float,  dqkv_scale, fp8_scale_floats, shared,               turned)                                    \
    /* column sums of dresidual over the own rows: the gradient of a bias added to the stream */             \
    X(float,  dresidual_sums, C,            shared,               training && c.bias)                        \
    X(floatX, datt,       N * A,            shared,               training)                                  \
    X(floatX, dqkv,       N * QKV,          filter ? shared : until_weights, training)                       \
    X(floatX, dqk_and_v,  N * QKV,          until_weights,        training && filter)                        \
    X(floatX, dfilter_sum, n * C,           shared,               training && filter)                        \
    X(floatX, dfilter_out, N * C,           shared,               training && filter && tp > 1)              \
    X(floatX, dfilter1,   N * H,            shared,               training && filter)                        \
    X(floatX, dtaps1,     N * 2 * H,        until_weights,        training && filter)                        \
    X(floatX, dtaps2,     N * 2 * C,        until_weights,        training && filter)                        \
    X(floatX, dngram_rows, N * E,           shared,               training && tables)                        \
    X(floatX, dngram_kv,  n * 2 * C,        shared,               training && gates)                         \
    X(floatX, dngram_all, N * C * widest_sum, shared,             training && tables && tp > 1)              \
    X(floatX, dmlp_out,   N * C,            until_weights,        training && (tp > 1 || later))             \
    X(floatX, datt_out,   N * C,            until_weights,        training && later && sequential)           \
    X(float,  scratch,    scratch,          shared,               training)  /* two-stage sums */
// clang-format on

// The activations of one layer, or of the head, for the current micro-batch. Null if absent.
struct Activations {
#define X(type, name, elements, lifetime, present) type* name = nullptr;
    ACTIVATIONS(X)
#undef X
    floatX* dresidual = nullptr;  // gradient of the residual stream, to which each part of a block adds
};

// A fused GELU (of width F) reads sums that are not yet rounded, so an elementwise kernel cannot recompute
// the same bits. The GELU is fused only with a bias; its gradient is fused without one too.
inline bool gelu_gradient_is_fused(const ModelConfig& c, const Workload& w, size_t F) {
    return c.mlp == MlpKind::gelu && !w.fp8 && gelu_may_ride(Gelu::tanh, (int)F, w.element_bytes);
}
inline bool gelu_is_fused(const ModelConfig& c, const Workload& w, size_t F) {
    return c.bias && gelu_gradient_is_fused(c, w, F);
}

// If SwiGLU's output is recomputed, only the gradient of the next matrix needs it, so the backward pass of
// SwiGLU, which reads the same inputs, writes it. In fp8 it is needed earlier, for the fp8 copy.
inline bool swiglu_is_made_backward(const ModelConfig& c, const Workload& w) {
    return c.mlp == MlpKind::swiglu && !w.fp8 && w.recompute != Recompute::none;
}

// Returns whether a sublayer is recomputed from its input rows. In other sublayers, only the outputs of norms
// and activation functions are recomputed.
inline bool is_recomputed(SublayerKind sublayer, Recompute kind) {
    return kind >= (sublayer == SublayerKind::mlp ? Recompute::mlp : Recompute::block);
}

// Norms whose rows a recomputed sublayer has already gathered from all ranks when the backward pass of the
// matrices that read them begins.
struct RowsInPlace {
    bool norm1, norm2, filtered;

    RowsInPlace(const ModelConfig& c, Recompute kind) {
        auto reader_is_recomputed = [&](const SublayerGroup& group) {
            return std::ranges::any_of(group, [&](SublayerKind s) { return is_recomputed(s, kind); });
        };
        const LayerKind layer = layer_kind(c, 0);
        norm1 = reader_is_recomputed(layer.groups.front());
        norm2 = reader_is_recomputed(layer.groups.back());
        filtered = is_recomputed(SublayerKind::filtered_attention, kind);
    }
};

// Lifetimes of a norm's output: this rank's own rows, the rows of all ranks, and these in fp8.
struct RowsOfNorm {
    Lifetime own, all, fp8;
};

// Returns the table of a rank of the stage: the rows that exist there, with their sizes.
inline std::vector<ActivationRow> activation_table(const ModelConfig& c, const Workload& w,
                                                   const Stage& stage) {
    size_t tp = stage.layout().mesh.tp, chunk = w.loss_chunk, Vp = padded_vocab(c, tp);
    Dims d(c, tp, w.B, w.T);
    size_t B = d.B, N = d.N, n = d.n, C = d.C, NH = d.NH, NKV = d.NKV, A = d.A, QKV = d.QKV, H = d.H, F = d.F,
           F1 = d.F1, E = d.E, texts = w.cache_rows;
    bool training = w.training, mean = c.norm == NormKind::layernorm,
         sequential = c.block == BlockKind::sequential, swiglu = c.mlp == MlpKind::swiglu,
         fused = gelu_is_fused(c, w, d.F), filter = c.local_filter, fp8 = training && w.fp8,
         has_head = stage.has_head(), tables = stage.table_slots > 0, gates = tables && c.ngram_gate,
         later = training && std::ranges::max(stage.capacity.pending) > 0,
         turned = fp8 && w.contexts == 1 && rotation_ends_attention(c);
    constexpr Lifetime shared = Lifetime::shared, layer = Lifetime::layer;
    auto kept = [&](bool is, Lifetime lifetime) { return training && is ? lifetime : shared; };
    Lifetime inner = kept(true, Lifetime::inner), head = kept(true, Lifetime::head),
             block = kept(!is_recomputed(SublayerKind::attention, w.recompute), layer),
             hidden = kept(!is_recomputed(SublayerKind::mlp, w.recompute), layer),
             elementwise = kept(w.recompute == Recompute::none, layer),
             until_weights = kept(later, Lifetime::pending);
    auto of_table = [&](Lifetime own) { return own == layer ? Lifetime::table : own; };
    size_t widest_sum = gates ? 2 : 1;
    auto matmul_input = [&](Lifetime own) { return own == shared ? until_weights : own; };
    // If the backward pass gathers the rows, a rank keeps only its own; with one rank, these are all rows.
    auto of_norm = [&](Lifetime operand, bool in_place) -> RowsOfNorm {
        Lifetime own = fp8 ? operand : elementwise;
        if (tp == 1) return {fp8 ? shared : matmul_input(own), shared, matmul_input(operand)};
        if (!in_place) return {matmul_input(own), shared, shared};
        return {shared, fp8 ? shared : until_weights, until_weights};
    };
    RowsInPlace in_place(c, w.recompute);
    RowsOfNorm of_norm1 = of_norm(block, in_place.norm1), of_norm2 = of_norm(hidden, in_place.norm2),
               of_filtered = of_norm(block, in_place.filtered);
    auto in_fp8 = [](size_t elements) { return Fp8Operand::bytes(elements); };
    size_t cache = cache_row_size(local_part(c, tp), w.cache_length) * w.cache_rows;
    size_t logits = std::max(chunk, tp);  // sampling gathers a row's logits from all tensor ranks
    const ContextCut cut = {w.contexts, 0, w.sequence()};
    size_t cp = w.contexts, all_keys = cp * N * (QKV - A), parts = head_parts(d, cut);
    size_t widest = std::ranges::max(local_products(c, (int)tp), {}, &LocalProduct::outputs).outputs;
    size_t scratch =
        std::max({attention_backward_scratch(attention_of(d, cut, 0, 0, nullptr),
                                             attention_makes_bias_gradient(c, w.contexts), w.element_bytes),
                  norm_backward_scratch(d.C), qk_norm_backward_scratch(d.HS),
                  matmul_backward_bias_scratch((int)widest), embedding_backward_scratch(d.N, d.C),
                  embedding_backward_scratch(d.N * d.K, c.ngram_width)});
    const size_t bytes_of_char = 1, bytes_of_float = sizeof(float), bytes_of_floatX = w.element_bytes;
    std::vector<ActivationRow> rows;
#define X(type, name, elements, lifetime, present)                                                           \
    if (size_t count = (present) ? (elements) : 0) {                                                         \
        auto point = [](void* view, void* at) { ((Activations*)view)->name = (type*)at; };                   \
        bool is_floatX = std::string_view(#type) == "floatX";                                                \
        rows.push_back({#name, count * bytes_of_##type, lifetime, is_floatX, point});                        \
    }
    ACTIVATIONS(X)
#undef X
    return rows;
}
