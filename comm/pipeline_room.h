/*
How much a pipeline stage has to hold at the same time, found by walking through its list of work.
*/
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "comm/pipeline_schedule.h"  // PipelineAction

struct PipelineRoom {
    std::vector<int> kept;      // (chunks) micro-batches from forward to the end of backward, 1 at least
    std::vector<int> pending;   // (chunks) micro-batches from input_gradient to weight_gradient
    int micro_batches = 1;      // from the first to the last piece of work on them, over all chunks
    bool has_backward = false;  // or else nothing is kept after a forward

    // Whether what a list needs is there.
    bool holds(const PipelineRoom& need) const {
        auto fits = [](const std::vector<int>& have, const std::vector<int>& wanted) {
            return std::equal(have.begin(), have.end(), wanted.begin(), wanted.end(), std::greater_equal<>());
        };
        return fits(kept, need.kept) && fits(pending, need.pending) && micro_batches >= need.micro_batches &&
               has_backward >= need.has_backward;
    }
};

// The most micro-batches that are in work at the same time: from the first action on them that counts to the
// last. A number modulo this tells them apart.
template <typename Counts>
int most_in_work(const std::vector<PipelineAction>& list, Counts&& counts) {
    std::map<int, const PipelineAction*> last;
    for (const PipelineAction& action : list) {
        if (counts(action)) last[action.micro_batch] = &action;
    }
    std::set<int> in_work;
    int most = 0;
    for (const PipelineAction& action : list) {
        if (!counts(action)) continue;
        in_work.insert(action.micro_batch);
        most = std::max(most, *in_work.rbegin() - *in_work.begin() + 1);
        if (last[action.micro_batch] == &action) in_work.erase(action.micro_batch);
    }
    return most;
}

inline PipelineRoom pipeline_room(const std::vector<PipelineAction>& list, int chunks) {
    using enum PipelineWork;
    PipelineRoom room;
    for (int chunk = 0; chunk < chunks; chunk++) {
        auto of_chunk = [&](const PipelineAction& action) { return action.chunk == chunk; };
        auto halves = [&](const PipelineAction& action) {
            return of_chunk(action) && (action.work == input_gradient || action.work == weight_gradient);
        };
        room.kept.push_back(std::max(1, most_in_work(list, of_chunk)));
        room.pending.push_back(most_in_work(list, halves));
    }
    room.micro_batches = std::max(1, most_in_work(list, [](const PipelineAction&) { return true; }));
    room.has_backward = std::any_of(list.begin(), list.end(),
                                    [](const PipelineAction& action) { return action.work != forward; });
    return room;
}
