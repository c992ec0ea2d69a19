/*
Where the layers of a pipeline stage keep what they need of a micro-batch, from its forward pass to the end of
its backward pass. The chunks of a stage share the places: what one gives back, another takes. So there are
only as many as are in use at the same time, which is the least that the schedule allows. A place has one
layer, for chunks may have different numbers of them.

The last of 2 stages with 2 chunks of one layer (interleaved; 0 .. 3 forward, a .. d backward, ' of chunk 1):

    work      0  1  0' a' 1' b' 2  a  3  b  2' c' 3' d' c  d
    place 0   0  0  0  0  0  0  0  0  3  3  3  3  3  3  3  3
    place 1      1  1  1  1  1  1  1  1  1  2' 2' 3' 3'
    place 2         0' 0' 1' 1' 2  2  2  2  2  2  2  2  2
*/
#pragma once

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "comm/pipeline_schedule.h"  // PipelineAction

class HeldLayers {
public:
    // layers: of each chunk.
    explicit HeldLayers(std::vector<int> layers) : layers_(std::move(layers)) {}

    // has_backward: or else nothing is held, and each layer has a place of its own.
    void begin_run(bool has_backward) {
        has_backward_ = has_backward;
        held_.clear();
        in_use_.clear();
    }

    // The places of the layers of the chunk for an action, which come in the order of the list.
    std::vector<int> enter(const PipelineAction& action) {
        auto [work, micro_batch, chunk] = action;
        if (!has_backward_) return of_their_own(chunk);
        auto& held = held_[{chunk, micro_batch}];
        if (work == PipelineWork::forward) held = take(layers_[chunk]);
        std::vector<int> places = held;
        if (work == PipelineWork::backward || work == PipelineWork::weight_gradient) {
            for (int place : held) in_use_[place] = false;
            held_.erase({chunk, micro_batch});
        }
        return places;
    }

    // How many places the actions of a list need.
    static size_t places(const std::vector<int>& layers, const std::vector<PipelineAction>& list,
                         bool has_backward) {
        HeldLayers held(layers);
        held.begin_run(has_backward);
        int most = 0;
        for (const PipelineAction& action : list) {
            for (int place : held.enter(action)) most = std::max(most, place + 1);
        }
        return (size_t)most;
    }

private:
    std::vector<int> of_their_own(int chunk) const {
        int first = 0;
        for (int before = 0; before < chunk; before++) first += layers_[before];
        std::vector<int> places;
        for (int i = 0; i < layers_[chunk]; i++) places.push_back(first + i);
        return places;
    }

    // The lowest that are free: so there are never more than are in use at the same time.
    std::vector<int> take(int count) {
        std::vector<int> places;
        for (int place = 0; (int)places.size() < count; place++) {
            if (place == (int)in_use_.size()) in_use_.push_back(false);
            if (in_use_[place]) continue;
            in_use_[place] = true;
            places.push_back(place);
        }
        return places;
    }

    std::vector<int> layers_;
    bool has_backward_ = false;
    std::map<std::pair<int, int>, std::vector<int>> held_;  // by chunk and micro-batch
    std::vector<bool> in_use_;
};
