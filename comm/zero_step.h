/*
The step of ZeroState: each rank sums the squares of the gradients it owns, the sums become the global norm,
and AdamW (on the device, or on the host for --offload optimizer) steps the parameters the rank owns. What
others need of them is sent unit by unit, behind the forward pass that begins meanwhile.
*/
#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif
#include <memory>

#include "comm/zero.h"              // ZeroState
#include "kernels/adamw.cuh"        // adamw_update, adamw_update_on_host
#include "kernels/global_norm.cuh"  // sum_squares, clip_scale
#include "kernels/random.cuh"       // random_key

inline void ZeroState::sum_statistics(float* stats) {
    order(compute_, reductions_);
    mesh_.data().all_reduce(stats, summed_statistics, Traffic::statistics, reductions_);
    order(reductions_, compute_);
}

inline void ZeroState::update(float* stats, const AdamW& settings, float max_norm, uint64_t seed) {
    order(reductions_, compute_);  // the last gradient has been summed
    order(gathers_, compute_);     // and what is stepped now has been read
    for (int unit = 0; unit < layout_.units(); unit++) {
        sum_squares(stats + stat_squares, norm_scratch_, owned_grads(unit), part_size(unit), unit > 0,
                    compute_);
    }
    // replicas hold the same gradients, which count once
    if (mesh_.position.replica > 0) {
        cudaCheck(cudaMemsetAsync(stats + stat_squares, 0, sizeof(float), compute_));
    }
    sum_statistics(stats);
    clip_scale(stats + stat_norm, stats + stat_squares, stats + stat_loss, max_norm, compute_);

    for (Place& place : param_at_) place.unit = -1;  // what was gathered is old now
    if (settings_.offload) {
        cudaCheck(cudaMemcpyAsync(host_scale_, stats + stat_scale, sizeof(float), cudaMemcpyDeviceToHost,
                                  compute_));
        order(compute_, host_);
    }
    for (int unit = 0; unit < layout_.units(); unit++) {
        if (settings_.offload)
            step_on_host(unit, settings, seed);
        else
            step_on_device(unit, stats + stat_scale, settings, seed);
        publish(unit);
    }
}

inline AdamW settings_of(const TensorRow& row, AdamW settings) {
    if (!row.decay) settings.weight_decay = 0;
    return settings;
}

inline void ZeroState::step_on_device(int unit, const float* scale, const AdamW& settings, uint64_t seed) {
    for (const TensorPart& part : owned_parts(unit)) {
        size_t at = part.at - owned_begin(unit);
        adamw_update(owned_params(unit) + at, master_ ? owned_master(unit) + at : nullptr, owned_m(unit) + at,
                     owned_v(unit) + at, owned_grads(unit) + at, scale, part.first, part.count,
                     settings_of(*part.row, settings), random_key(seed, part.name), compute_);
    }
}

inline void ZeroState::step_on_host(int unit, const AdamW& settings, uint64_t seed) {
    auto run = [](void* data) {
        std::unique_ptr<HostUpdate> own_update((HostUpdate*)data);
        auto& [state, settings, seed, unit] = *own_update;
#ifdef _OPENMP
        // a thread of CUDA's or of a stream's: it does not know what others were told
        if (int threads = state->settings_.host_threads) omp_set_num_threads(threads);
#endif
        size_t base = state->shard_offset(unit);
        for (const TensorPart& part : state->owned_parts(unit)) {
            size_t at = base + part.at - state->owned_begin(unit);
            float* master = state->master_ ? state->master_ + at : nullptr;
            adamw_update_on_host(state->host_params_ + at, master, state->m_ + at, state->v_ + at,
                                 state->host_grads_ + at, state->host_scale_, part.first, part.count,
                                 settings_of(*part.row, settings), random_key(seed, part.name));
        }
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
        if (unit <= std::min(settings_.prefetch, layout_.layers)) gather(unit);
        return;
    }
    mesh_.gathers().all_gather(params(unit), part_size(unit), Traffic::parameters, gathers_);
    cudaCheck(cudaEventRecord(updated_[unit], gathers_));
}
