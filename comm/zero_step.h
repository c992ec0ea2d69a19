/*
The step of ZeroState: each rank sums the squares of the gradients it owns, the sums become the global norm,
and AdamW (on the device, or on the host for --offload optimizer) steps the parameters the rank owns, each
unit in one launch. What others need of them is sent unit by unit, behind the forward pass that begins
meanwhile.
*/
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif
#include <memory>

#include "comm/zero.h"              // ZeroState
#include "kernels/adamw.cuh"        // adamw_update, adamw_update_on_host
#include "kernels/global_norm.cuh"  // sum_squares, clip_scale
#include "kernels/random.cuh"       // name_hash

inline void ZeroState::sum_statistics(float* stats) {
    order(compute_, reductions_);
    mesh_.world().all_reduce(stats, summed_statistics, Traffic::statistics, reductions_);
    order(reductions_, compute_);
}

// What a step goes through on this rank, as the launchers take it.
inline void ZeroState::plan_step() {
    steps_.resize(layout_.units());
    for (int unit : layout_.held()) {
        for (const TensorPart& part : owned_parts(unit)) {
            steps_[unit].push_back(
                {part.at - owned_begin(unit), part.count, part.first, name_hash(part.name), part.row->decay});
        }
        if (mesh_.position.replica > 0) continue;  // of copies, one rank counts the gradient
        size_t own_begin = owned_begin(unit), own_end = own_begin + part_size(unit);
        for (auto [range_begin, range_end] : layout_.counted(unit)) {
            size_t begin = std::max(range_begin, own_begin), end = std::min(range_end, own_end);
            if (begin >= end) continue;
            counted_.push_back({owned_grads(unit) - grads_ + (begin - own_begin), end - begin});
        }
    }
}

// Gradients of what this rank has copies of become the sum over all that have them.
inline void ZeroState::sum_copies() {
    auto sum_of_tensor_ranks = [&] {
        for (int unit : layout_.held()) {
            size_t own_begin = owned_begin(unit), own_end = own_begin + part_size(unit);
            for (const GradientSum& sum : layout_.sums(unit)) {
                size_t begin = std::max(sum.begin, own_begin), end = std::min(sum.begin + sum.count, own_end);
                if (begin >= end) continue;
                neighbours(sum.ranks).all_reduce(owned_grads(unit) + (begin - own_begin), end - begin,
                                                 Traffic::gradients, reductions_);
            }
        }
    };
    if (mesh_.tensor().size() > 1) grouped(sum_of_tensor_ranks);
    for (int unit : layout_.held()) {
        if (!has_copies(unit)) continue;
        if (has_twin(unit))
            mesh_.ends().all_reduce(owned_grads(unit), part_size(unit), Traffic::gradients, reductions_);
        if (settings_.offload) copy_gradients_to_host(unit);
    }
}

inline void ZeroState::update(float* stats, const AdamW& settings, float max_norm, uint64_t seed,
                              const std::function<void()>& measured) {
    sum_copies();
    order(reductions_, compute_);  // the last gradient has been summed
    order(gathers_, compute_);     // and what is stepped now has been read
    sum_squares(stats + stat_squares, norm_scratch_, grads_, counted_, compute_);
    sum_statistics(stats);
    clip_scale(stats + stat_norm, stats + stat_squares, stats + stat_loss, max_norm, compute_);
    measured();

    for (Place& place : param_at_) place.unit = -1;  // what was gathered is old now
    if (settings_.offload) {
        cudaCheck(cudaMemcpyAsync(host_scale_, stats + stat_scale, sizeof(float), cudaMemcpyDeviceToHost,
                                  compute_));
        order(compute_, host_);
    }
    for (int unit : layout_.held()) {
        if (settings_.offload)
            step_on_host(unit, settings, seed);
        else
            step_on_device(unit, stats + stat_scale, settings, seed);
        publish(unit);
    }
}

inline void ZeroState::step_on_device(int unit, const float* scale, const AdamW& settings, uint64_t seed) {
    adamw_update(owned_params(unit), owned_master(unit), owned_m(unit), owned_v(unit), owned_grads(unit),
                 scale, steps_[unit], settings, seed, compute_);
}

inline void ZeroState::step_on_host(int unit, const AdamW& settings, uint64_t seed) {
    auto run = [](void* data) {
        std::unique_ptr<HostUpdate> own_update((HostUpdate*)data);
        auto& [state, settings, seed, unit] = *own_update;
#ifdef _OPENMP
        // a thread of CUDA's or of a stream's: it does not know what others were told
        if (int threads = state->settings_.host_threads) omp_set_num_threads(threads);
#endif
        size_t at = state->shard_offset(unit);
        adamw_update_on_host(state->host_params_ + at, state->owned_master(unit), state->m_ + at,
                             state->v_ + at, state->host_grads_ + at, state->host_scale_, state->steps_[unit],
                             settings, seed);
    };
    // it runs when the caller may be at the next step already
    cudaCheck(cudaLaunchHostFunc(host_, run, new HostUpdate{this, settings, seed, unit}));
    cudaCheck(cudaMemcpyAsync(owned_params(unit), host_params_ + shard_offset(unit),
                              part_size(unit) * sizeof(floatX), cudaMemcpyHostToDevice, host_));
}

// Brings a unit's new parameters to all who use them, behind what the compute stream does next.
inline void ZeroState::publish(int unit) {
    order(settings_.offload ? host_ : compute_, gathers_);
    if (cut_params_) {  // the first units are gathered while others are stepped
        auto& held = layout_.held();
        auto number = std::find(held.begin(), held.end(), unit) - held.begin();
        if (number <= settings_.prefetch && unit <= layout_.layers) gather(unit);
        return;
    }
    mesh_.gathers().all_gather(params(unit), part_size(unit), Traffic::parameters, gathers_);
    cudaCheck(cudaEventRecord(updated_[unit], gathers_));
}
