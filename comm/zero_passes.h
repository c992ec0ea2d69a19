/*
What the passes over the model ask of ZeroState: the parameters of a unit, whole, for as long as they are
used, and gradients summed over the data ranks when they are made.
*/
#pragma once

#include <algorithm>

#include "comm/zero.h"             // ZeroState
#include "kernels/accumulate.cuh"  // accumulate

// ----------------------------------------------------------------------------
// parameters

// Brings the parts of a unit together in its place, unless they are there.
inline void ZeroState::gather(int unit) {
    Place& place = param_at_[param_places_.place(unit)];
    if (place.unit == unit) return;
    place.unit = unit;
    cudaCheck(cudaStreamWaitEvent(gathers_, place.free, 0));
    cudaCheck(cudaMemcpyAsync(params(unit) + owned_begin(unit), owned_params(unit),
                              part_size(unit) * sizeof(floatX), cudaMemcpyDeviceToDevice, gathers_));
    mesh_.gathers().all_gather(params(unit), part_size(unit), Traffic::parameters, gathers_);
    cudaCheck(cudaEventRecord(place.ready, gathers_));
}

inline void ZeroState::acquire(int unit, int direction) {
    if (!cut_params_) {
        // what is on one stream only is in order anyway
        if (!own_streams_.empty()) cudaCheck(cudaStreamWaitEvent(compute_, updated_[unit], 0));
        return;
    }
    gather(unit);
    Place& place = param_at_[param_places_.place(unit)];
    place.in_use = true;
    cudaCheck(cudaStreamWaitEvent(compute_, place.ready, 0));
    // the backward pass does not read the embedding
    int end = direction > 0 ? layout_.last_unit() : 1;
    for (int ahead = 1; direction != 0 && ahead <= settings_.prefetch; ahead++) {
        int next = unit + direction * ahead;
        if (direction > 0 ? next > end : next < end) break;
        if (!layout_.has(next)) break;  // it is on another stage
        if (!param_at_[param_places_.place(next)].in_use) gather(next);
    }
}

inline void ZeroState::release(int unit) {
    if (!cut_params_) return;
    Place& place = param_at_[param_places_.place(unit)];
    place.in_use = false;
    cudaCheck(cudaEventRecord(place.free, compute_));
}

// ----------------------------------------------------------------------------
// gradients

inline void ZeroState::zero_gradients() {
    cudaCheck(cudaStreamWaitEvent(compute_, gradients_copied_, 0));  // offload has read the last ones
    size_t kept = cut_grads_ ? shard_size() : layout_.size();
    cudaCheck(cudaMemsetAsync(grads_, 0, kept * sizeof(float), compute_));
}

inline void ZeroState::begin_gradients(int unit) {
    if (!cut_grads_) return;
    Place& place = grad_at_[grad_places_.place(unit)];
    if (place.in_use) return;
    place.in_use = true;
    cudaCheck(cudaStreamWaitEvent(compute_, place.free, 0));
    cudaCheck(cudaMemsetAsync(grads(unit), 0, layout_.unit_size(unit) * sizeof(float), compute_));
}

// Gradients that stay whole are summed over the ranks once, when the last micro-batch has added to them. A
// cut gradient cannot wait: the place it is made in is needed for another unit.
inline void ZeroState::reduce_gradients(int unit, bool last_micro_batch) {
    if (!cut_grads_ && !last_micro_batch) return;
    order(compute_, reductions_);
    size_t part = part_size(unit);
    mesh_.shard().reduce_scatter(grads(unit), part, Traffic::gradients, reductions_);
    if (cut_grads_) {
        accumulate(owned_grads(unit), grads(unit) + owned_begin(unit), part, reductions_);
        Place& place = grad_at_[grad_places_.place(unit)];
        place.in_use = false;
        cudaCheck(cudaEventRecord(place.free, reductions_));
    }
    if (!last_micro_batch) return;
    mesh_.replica().all_reduce(owned_grads(unit), part, Traffic::gradients, reductions_);
    if (settings_.offload && !has_copies(unit)) copy_gradients_to_host(unit);
}

inline void ZeroState::copy_gradients_to_host(int unit) {
    order(reductions_, host_);
    cudaCheck(cudaMemcpyAsync(host_grads_ + shard_offset(unit), owned_grads(unit),
                              part_size(unit) * sizeof(float), cudaMemcpyDeviceToHost, host_));
    cudaCheck(cudaEventRecord(gradients_copied_, host_));
}
