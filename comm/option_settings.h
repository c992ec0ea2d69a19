/*
What the options come to in the terms of the optimizer and of the ranks that share it.
*/
#pragma once

#include "comm/zero.h"        // ZeroSettings
#include "data/options.h"     // Options
#include "data/schedule.h"    // the course of the learning rate
#include "kernels/adamw.cuh"  // AdamW

// fp32 parameters are their own master copy.
inline ZeroSettings zero_settings(const Options& o) {
    return {.level = o.zero,
            .keep_master = o.master_weights && sizeof(floatX) < sizeof(float),
            .offload = o.offload == "optimizer",
            .overlap = o.overlap,
            .prefetch = o.prefetch,
            .staging = o.async_save && o.save_every > 0 && o.save_every < o.steps};
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
