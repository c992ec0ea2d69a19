/*
What one rank has of a model: the layers of its pipeline stage, and of each tensor the part of its tensor
rank. The same for every rank of a data group.
*/
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/layout.h"             // Division
#include "comm/mesh.h"               // MeshPosition
#include "comm/parameters.h"         // ModelPlace
#include "comm/pipeline_schedule.h"  // PipelineRoom
#include "data/base/error.h"
#include "data/options/model_config.h"
#include "kernels/embedding.cuh"  // WordRange

// The part of each block that one of `tp` tensor ranks has, as a model of its own.
inline ModelConfig local_part(ModelConfig c, int tp) {
    c.heads /= tp;
    c.kv_heads = std::max(1, c.kv_heads / tp);  // with fewer than ranks, several ranks have the same
    c.mlp_width /= tp;
    return c;
}

class Share {
public:
    // training: micro-batches go backward too, and are kept until then.
    Share(const ModelConfig& config, const Division& division, const MeshPosition& position, bool training)
        : division_(division), config_(config), position_(position) {
        auto& shape = division_.pipeline;
        if (division_.split.empty()) division_.split = {config.layers};
        for (int layers : division_.split) begin_.push_back(begin_.back() + layers);
        if ((int)division_.split.size() != shape.stages * shape.chunks || begin_.back() != config.layers)
            fail("pipeline: %zu parts of %d layers in all do not fit the model; see --pp-layers",
                 division_.split.size(), begin_.back());
        auto list = training ? pipeline_actions(shape, stage()) : forward_actions(shape);
        room = pipeline_room(list, shape.chunks);
        layer_places = ActivationSlots::places(layers(0), list, training);
        inner_places = ActivationSlots::places(layers(1), list, training);
    }

    PipelineRoom room;  // micro-batches that are held at the same time
    // Layers that are, of all micro-batches and chunks; and those that are not the first of their chunk.
    size_t layer_places, inner_places;

    const Division& division() const { return division_; }
    int stage() const { return position_.pipeline; }
    int tensor() const { return position_.tensor; }
    int chunks() const { return division_.pipeline.chunks; }
    int last_part() const { return (int)division_.split.size() - 1; }

    bool has_embedding() const { return stage() == 0; }
    bool has_head() const { return stage() == division_.pipeline.stages - 1; }
    // Of the whole model.
    int first_layer(int chunk) const { return begin_[part(chunk)]; }
    int end_layer(int chunk) const { return begin_[part(chunk) + 1]; }
    // Of each chunk, without the first `less` of it.
    std::vector<int> layers(int less) const {
        std::vector<int> layers;
        for (int chunk = 0; chunk < chunks(); chunk++)
            layers.push_back(end_layer(chunk) - first_layer(chunk) - less);
        return layers;
    }
    // Of the vocabulary.
    WordRange words() const { return words_of(tensor()); }
    WordRange words_of(int tensor) const {
        auto first = [&](int rank) { return (int)((int64_t)config_.vocab_size * rank / division_.tp); };
        return {first(tensor), first(tensor + 1) - first(tensor)};
    }

    // The pipeline with another number of micro-batches.
    PipelineShape pipeline(int micro_batches) const {
        PipelineShape shape = division_.pipeline;
        shape.micro_batches = micro_batches;
        return shape;
    }

    ModelPlace place() const {
        ModelPlace place = {division_.tp, tensor(), {}};
        place.embedding_copy = config_.tie_embeddings && has_head() && !has_embedding();
        if (has_embedding() || place.embedding_copy) place.units.push_back(0);
        for (int chunk = 0; chunk < chunks(); chunk++) {
            for (int layer = first_layer(chunk); layer < end_layer(chunk); layer++)
                place.units.push_back(layer + 1);
        }
        if (has_head()) place.units.push_back(config_.layers + 1);
        return place;
    }

private:
    int part(int chunk) const { return chunk * division_.pipeline.stages + stage(); }

    Division division_;
    ModelConfig config_;
    MeshPosition position_;
    std::vector<int> begin_ = {0};  // first layer of each part
};
