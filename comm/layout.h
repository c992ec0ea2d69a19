/*
How the options cut a model over ranks, and a step into micro-batches.
*/
#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "comm/mesh_shape.h"         // MeshShape
#include "comm/pipeline_schedule.h"  // pipeline_capacity
#include "data/base/error.h"
#include "data/base/figures.h"       // counted
#include "data/options/cut_rules.h"  // Options, parse_split
#include "data/options/schedule.h"   // tokens_of_step

// ----------------------------------------------------------------------------
// layers of a pipeline
//
// The slowest part sets the pace of all, so the layers are cut, in order, such that the largest part is as
// small as possible. The caller defines the cost of a part: the first also has the embedding, the last the
// classifier.

// Returns the number of layers, at least one, of each of `parts` parts. cost(part, begin, end) is the cost of
// layers [begin, end) as that part, in any unit, such as time or bytes; it grows with the number of layers.
// Among equally good cuts it prefers parts of similar cost.
template <typename Cost>
std::vector<int> even_split(int layers, int parts, Cost&& cost) {
    if (parts < 1 || parts > layers) {
        fail("pipeline: %d layers cannot be cut into %d parts; give fewer stages or chunks, or more layers",
             layers, parts);
    }

    // best[p][n]: the cut of layers n and later into parts p .. parts-1 whose largest load is smallest; among
    // several such cuts, the one with the smallest sum of squared loads.
    struct Best {
        double largest = std::numeric_limits<double>::infinity(), squares = 0;
        int end = 0;  // the end of part p
        bool operator<(const Best& other) const {
            double slack = 1e-9 * largest;  // loads that differ only by rounding count as equal
            if (largest < other.largest - slack) return true;
            return largest <= other.largest + slack && squares < other.squares * (1 - 1e-12);
        }
    };
    std::vector<std::vector<Best>> best(parts + 1, std::vector<Best>(layers + 1));
    best[parts][layers].largest = 0;
    for (int part = parts - 1; part >= 0; part--) {
        bool first = part == 0, last = part == parts - 1;
        int latest_end = layers - (parts - 1 - part);  // at least one layer for each later part
        for (int begin = part; begin <= (first ? 0 : latest_end - 1); begin++) {
            for (int end = last ? layers : begin + 1; end <= latest_end; end++) {
                const Best& rest = best[part + 1][end];
                double own = cost(part, begin, end);
                if (own > (1 + 1e-6) * best[part][begin].largest) break;  // more layers cost even more
                Best with = {std::max(own, rest.largest), own * own + rest.squares, end};
                if (with < best[part][begin]) best[part][begin] = with;
            }
        }
    }
    std::vector<int> split;
    for (int part = 0, begin = 0; part < parts; part++) {
        int end = best[part][begin].end;
        split.push_back(end - begin);
        begin = end;
    }
    return split;
}

// ----------------------------------------------------------------------------
// micro-batches of data ranks

// The data ranks take the micro-batches of a step in turn, so a step trains on the same samples with any
// number of ranks; the first ranks may have one micro-batch more than the others.
//
// If gradients are sharded (--zero 2 and 3), the ranks of a shard group sum them in every micro-batch, and
// may gather parameters too. A rank with one micro-batch fewer then takes part with an empty one: it has no
// targets, so its gradients are zero, and it costs only time that its rank would otherwise spend waiting.
struct StepShare {
    int ranks, rank;  // number of data ranks, and this one's number
    int group;        // adjacent ranks that must have the same number of micro-batches; 1: none
    uint64_t first;   // the step's first sample
    int all, B;       // micro-batches over all ranks, and the samples of each

    // Micro-batches of this rank; and those that it processes, empty ones included.
    int own() const { return of(rank); }
    int joined() const { return of(rank / group * group); }
    // The number of samples in this rank's micro-batch `micro`, and the first sample. After the rank's last
    // micro-batch, sample() returns the first sample of its first micro-batch in the next step.
    int samples(int micro) const { return micro < own() ? B : 0; }
    uint64_t sample(int micro) const {
        return first + (micro < own() ? (uint64_t)micro * ranks + rank : (uint64_t)all + rank) * B;
    }
    // The weight of a token's loss in the loss of the step.
    float of_token(int T) const { return 1.0f / ((float)all * B * T); }

private:
    int of(int rank) const { return ceil_div(all - rank, ranks); }
};

// ----------------------------------------------------------------------------
// the layout

// How a model is cut over ranks, and a step into micro-batches.
struct Layout {
    MeshShape mesh = {};
    int row_chunks = 1;  // number of pieces in which tensor ranks send activations
    PipelineShape pipeline = {PipelineSchedule::one_f_one_b, 1, 1};
    std::vector<int> split = {};  // number of layers of each part of the pipeline; empty: one part
};

inline MeshShape mesh_shape(const Options& o) {
    return {.tp = o.tp,
            .cp = o.cp,
            .pp = o.pp,
            .dp = o.dp,
            .shard = o.shard_group,
            .copies = std::max(1, o.tp / o.kv_heads),
            .ring = o.pp_chunks > 1,
            .stage_group = o.optimizer == OptimizerKind::muon || !o.ngram.empty(),
            .tables = !o.ngram.empty()};
}

// Returns the number of sequences in step `step` (counted from 0), over all data ranks.
inline uint64_t samples_of_step(const Options& o, int step) {
    return (uint64_t)(tokens_of_step(o, step) / o.sequence_length);
}

// Returns the number of micro-batches in step `step`, over all data ranks.
inline int micro_batches_of_step(const Options& o, int step) {
    return (int)(samples_of_step(o, step) / (uint64_t)o.micro_batch);
}

// Returns the most micro-batches that any data rank has in step `step`.
inline int micro_batches_of_rank(const Options& o, int step) {
    return ceil_div(micro_batches_of_step(o, step), o.dp);
}

// Returns the most micro-batches that a data rank has in any step of the run: those of the last step, because
// batches never shrink.
inline int most_micro_batches(const Options& o) {
    return micro_batches_of_rank(o, o.steps - 1);
}

inline PipelineShape pipeline_shape(const Options& o) {
    return {o.pp_schedule, o.pp, most_micro_batches(o), o.pp_chunks};
}

// Bytes on a rank, for --pp-layers memory.
struct LayerBytes {
    double state;        // parameters, gradients and optimizer state of a layer
    double activations;  // kept for each layer and micro-batch
    double table;        // state of the embedding, or of the classifier
};

// Returns the number of layers of each part of the pipeline: as even as possible in time or in memory, or as
// listed. bytes: for `memory` only
inline std::vector<int> pipeline_split(const Options& o, const LayerBytes& bytes) {
    PipelineShape shape = pipeline_shape(o);
    int parts = shape.stages * shape.chunks;
    switch (kind_of<PipelineLayers>(o.pp_layers)) {
    case PipelineLayers::time: {
        // multiplications per token; the embedding has none, but copies a row of `channels` elements
        double block = (double)block_parameters(o) + 2.0 * o.sequence_length * o.heads * o.head_size;
        double classifier = (double)o.vocab_size * o.channels;
        return even_split(o.layers, parts, [&](int part, int begin, int end) {
            return (end - begin) * block + (part == 0 ? o.channels : 0) +
                   (part == parts - 1 ? classifier : 0);
        });
    }
    case PipelineLayers::memory: {
        std::vector<double> layer(parts);
        for (int stage = 0; stage < shape.stages; stage++) {
            PipelineCapacity capacity = pipeline_capacity(pipeline_actions(shape, stage), shape.chunks);
            for (int chunk = 0; chunk < shape.chunks; chunk++)
                layer[chunk * shape.stages + stage] = bytes.state + capacity.kept[chunk] * bytes.activations;
        }
        return even_split(o.layers, parts, [&](int part, int begin, int end) {
            bool has_table = part == 0 || part == parts - 1;
            return (end - begin) * layer[part] + has_table * bytes.table;
        });
    }
    case PipelineLayers::list:
        return parse_split(o.pp_layers, o.layers, parts);
    }
    __builtin_unreachable();
}

// "3 4 4 3 layers", or "4 layers each".
inline std::string layers_text(const std::vector<int>& split) {
    auto [least, most] = std::ranges::minmax(split);
    if (least == most) return counted(most, "layer") + " each";
    std::string layers;
    for (int of_part : split) layers += text("%d ", of_part);
    return layers + "layers";
}

// "4 stages with 3 4 4 3 layers ..."
inline std::string pipeline_text(const Layout& layout) {
    auto& shape = layout.pipeline;
    std::string layers = layers_text(layout.split);
    return text("%d stages%s with %s; %s, %s a step: the bubble is %.0f%% of the working time", shape.stages,
                shape.chunks > 1 ? text(" of %d chunks", shape.chunks).c_str() : "", layers.c_str(),
                name_of(shape.schedule), counted(shape.micro_batches, "micro-batch").c_str(),
                100 * time_pipeline(shape, {}).bubble());
}
