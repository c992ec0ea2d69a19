/*
The part of a model that one rank holds: the layers of its pipeline stage, and its tensor rank's part of each
tensor. It is the same for all ranks of a data group.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/layout.h"             // Layout
#include "comm/mesh_shape.h"         // MeshPosition
#include "comm/parameters.h"         // StageUnits
#include "comm/pipeline_schedule.h"  // PipelineCapacity
#include "data/base/error.h"
#include "data/options/model_config.h"
#include "kernels/attention_shape.h"  // AttentionShape
#include "kernels/context_cut.h"      // ContextCut
#include "kernels/embedding.cuh"      // VocabRange

// Returns the part of each block that one of `tp` tensor ranks has, as a smaller model.
inline ModelConfig local_part(ModelConfig c, int tp) {
    c.heads /= tp;
    c.kv_heads = std::max(1, c.kv_heads / tp);  // if ranks outnumber KV heads, several share one
    c.mlp_width /= tp;
    return c;
}

// The sizes in a pass on this rank; heads and the MLP are its part of the whole.
struct Dims {
    int B, T;                 // sequences, and the tokens of each
    int N, n;                 // rows (B*T), and this tensor rank's own rows between products
    int C;                    // channels of the residual stream
    int NH, NKV, HS, A, QKV;  // query heads, key/value heads, their size; A = NH*HS; width of qkv
    int H;                    // channels between the convolutions of the local filter
    int F, F1;                // hidden channels of the MLP, and outputs of its first matrix: 2F for SwiGLU
    int R;                    // rotated elements of a head (RoPE); 0: none
    int K, E;                 // table rows that a token looks up, and elements in all of them; 0: no tables

    Dims(const ModelConfig& config, int tensor_ranks, int B, int T)
        : B(B), T(T), N(B * T), n(N / tensor_ranks) {
        ModelConfig c = local_part(config, tensor_ranks);
        C = c.channels, H = filter_width(c) / tensor_ranks, NH = c.heads, NKV = c.kv_heads, HS = c.head_size,
        A = NH * HS, QKV = qkv_width(c);
        F = c.mlp_width, F1 = fc_width(c), R = c.position == PositionKind::rope ? c.rope_dims : 0;
        K = ngram_head_count(c, tensor_ranks), E = K * c.ngram_width;
    }
};

constexpr int pieces_of(const ContextCut& cut) {
    return cut.ranks == 1 ? 1 : 2;
}

// The minimum number of queries, summed over heads, in a call to attention for a part of the heads. With
// fewer, many multiprocessors would wait for the last tiles. Tests lower it.
inline size_t least_queries_of_part = 1 << 16;

constexpr int most_head_parts = 8;

// Returns the number of parts in which context ranks send heads of keys and values: the next part is on its
// way during attention to the one before.
inline int head_parts(const Dims& d, const ContextCut& cut) {
    int parts = 1;
    for (int n = 2; cut.ranks > 1 && n <= most_head_parts; n++)
        if (d.NKV % n == 0 && (size_t)d.B * cut.piece() * (d.NH / n) >= least_queries_of_part) parts = n;
    return parts;
}

// Returns the shape of attention for one of a context rank's pieces of the sequences, and one part of the
// heads; without context ranks, there is only one piece with all heads.
inline AttentionShape attention_of(const Dims& d, const ContextCut& cut, int piece, int window,
                                   const int* doc_start) {
    if (cut.ranks == 1) return self_attention_shape(d.B, d.T, d.NH, d.NKV, d.HS, window, doc_start);
    const int parts = head_parts(d, cut);
    return attention_shape_apart({.B = d.B,
                                  .Tq = cut.piece(),
                                  .Tk = cut.T,
                                  .q0 = cut.position(piece * cut.piece()),
                                  .NH = d.NH / parts,
                                  .NKV = d.NKV / parts,
                                  .HS = d.HS,
                                  .window = window,
                                  .doc_start = doc_start},
                                 d.T, d.NH);
}

// Returns whether attention's backward pass computes the gradient of the bias of queries, keys and values: it
// does if they have one and no other operation lies between the product and attention.
inline bool attention_makes_bias_gradient(const ModelConfig& c, int contexts) {
    return has_qkv_bias(c) && contexts == 1 && !c.qk_norm && !c.local_filter &&
           c.position != PositionKind::rope;
}

// Returns whether RoPE's backward pass is the last to change the gradient of queries, keys and values.
inline bool rotation_ends_attention(const ModelConfig& c) {
    return c.position == PositionKind::rope && c.rope_dims > 0 && !c.qk_norm && !c.local_filter;
}

class Stage {
public:
    // training: micro-batches also go backward, and their activations are kept until then
    Stage(const ModelConfig& config, const Layout& layout, const MeshPosition& position, bool training)
        : layout_(layout), config_(config), position_(position) {
        auto& shape = layout_.pipeline;
        if (layout_.split.empty()) layout_.split = {config.layers};
        for (int layers : layout_.split) begin_.push_back(begin_.back() + layers);
        if ((int)layout_.split.size() != shape.stages * shape.chunks || begin_.back() != config.layers)
            fail("pipeline: %zu parts with %d layers in total do not fit the model; see --pp-layers",
                 layout_.split.size(), begin_.back());
        auto list = training ? pipeline_actions(shape, number()) : forward_actions(shape);
        capacity = pipeline_capacity(list, shape.chunks);
        // Evaluation may have more micro-batches than a step; an interleaved stage then holds as many as
        // there are stages.
        if (shape.chunks > 1) capacity.micro_batches = std::max(capacity.micro_batches, shape.stages);
        layer_slots = ActivationSlots::most(layers(0), list, training);
        inner_slots = ActivationSlots::most(layers(1), list, training);
        table_slots = ActivationSlots::most(tables_of_chunks(), list, training);
    }

    PipelineCapacity capacity;  // micro-batches that are held at the same time
    // Slots for what layers keep, over all micro-batches and chunks: for all layers; for those that are not
    // the first of their chunk; for those with a table
    size_t layer_slots, inner_slots, table_slots;

    const Layout& layout() const { return layout_; }
    int number() const { return position_[Axis::pipeline]; }
    int tensor() const { return position_[Axis::tensor]; }
    int chunks() const { return layout_.pipeline.chunks; }
    int last_part() const { return (int)layout_.split.size() - 1; }

    bool has_embedding() const { return number() == 0; }
    bool has_head() const { return number() == layout_.pipeline.stages - 1; }
    // The layers of a chunk, numbered in the whole model.
    int first_layer(int chunk) const { return begin_[part(chunk)]; }
    int end_layer(int chunk) const { return begin_[part(chunk) + 1]; }
    // The number of layers of each chunk, without its first `less` ones.
    std::vector<int> layers(int less) const {
        std::vector<int> layers;
        for (int chunk = 0; chunk < chunks(); chunk++)
            layers.push_back(end_layer(chunk) - first_layer(chunk) - less);
        return layers;
    }
    std::vector<int> tables_of_chunks() const {
        std::vector<int> layers;
        for (int chunk = 0; chunk < chunks(); chunk++) {
            int& count = layers.emplace_back(0);
            for (int layer = first_layer(chunk); layer < end_layer(chunk); layer++) count += has_table(layer);
        }
        return layers;
    }
    bool has_table(int layer) const { return ::has_table(config_, layer); }
    bool has(int layer) const {
        for (int chunk = 0; chunk < chunks(); chunk++)
            if (layer >= first_layer(chunk) && layer < end_layer(chunk)) return true;
        return false;
    }
    // The rows of the vocabulary that this tensor rank has.
    VocabRange vocab() const { return vocab_of(tensor()); }
    VocabRange vocab_of(int tensor) const {
        auto first = [&](int rank) { return (int)((int64_t)config_.vocab_size * rank / layout_.mesh.tp); };
        return {first(tensor), first(tensor + 1) - first(tensor)};
    }

    // The pipeline with a different number of micro-batches.
    PipelineShape pipeline(int micro_batches) const {
        PipelineShape shape = layout_.pipeline;
        shape.micro_batches = micro_batches;
        return shape;
    }

    StageUnits units() const {
        StageUnits units = {layout_.mesh.tp, tensor(), {}};
        units.embedding_copy = config_.tie_embeddings && has_head() && !has_embedding();
        if (has_embedding() || units.embedding_copy) units.units.push_back(0);
        for (int chunk = 0; chunk < chunks(); chunk++) {
            for (int layer = first_layer(chunk); layer < end_layer(chunk); layer++)
                units.units.push_back(layer + 1);
        }
        if (has_head() && !config_.tie_embeddings) units.units.push_back(config_.layers + 1);
        return units;
    }

private:
    int part(int chunk) const { return chunk * layout_.pipeline.stages + number(); }

    Layout layout_;
    ModelConfig config_;
    MeshPosition position_;
    std::vector<int> begin_ = {0};  // first layer of each part
};

inline ParameterLayout parameter_layout(const ModelConfig& config, const Layout& layout,
                                        const MeshPosition& position, bool training) {
    return parameter_layout(config, layout.mesh.shards(), Stage(config, layout, position, training).units());
}

// Returns the traffic of any rank that trains on micro-batches of B sequences of T tokens.
inline MeshTraffic mesh_traffic(const ModelConfig& config, const Layout& layout, int B, int T,
                                Dtype reduce_dtype) {
    Dims d(config, layout.mesh.tp, B, T / layout.mesh.cp);
    MeshTraffic traffic;
    if (layout.mesh.tp > 1) traffic.rows = (size_t)d.N * d.C;
    if (layout.mesh.cp > 1) traffic.keys = (size_t)B * T * (d.QKV - d.A);
    traffic.sent = (size_t)d.n * d.C;
    traffic.all_to_all = reduce_dtype == Dtype::bf16;
    for (int stage = 0; stage < layout.mesh.pp; stage++) {
        ParameterLayout parameters = parameter_layout(config, layout, first_of_stage(stage), true);
        for (int unit : parameters.held()) traffic.unit = std::max(traffic.unit, parameters.unit_size(unit));
    }
    return traffic;
}
