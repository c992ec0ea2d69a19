/*
Options that this program, as it was built, cannot follow.
*/
#pragma once

#include "comm/collectives.h"
#include "comm/world.h"
#include "data/error.h"
#include "data/options.h"
#include "kernels/common.cuh"

// Options about rounding depend on what parameters are made of, which is decided when the program is built.
inline void check_precision(const Options& o) {
    if (sizeof(floatX) == sizeof(float)) {
        // It may be given, or be that of a checkpoint.
        auto refuse = [](const char* option, const char* value, const char* other) {
            fail("%s %s: parameters are fp32 in this program; give %s %s, or build with PRECISION=bf16",
                 option, value, option, other);
        };
        if (o.stochastic_rounding) refuse("--stochastic-rounding", "on", "off");
        if (!o.master_weights) refuse("--master-weights", "off", "on");
    } else if (!o.master_weights && !o.stochastic_rounding) {
        fail("--master-weights off: bf16 alone loses small updates; add --stochastic-rounding on");
    }
}

inline int ranks_sharing_device([[maybe_unused]] const World& world) {
#ifdef RANKS_USE_NCCL
    return 1;  // though a rank may see no device but its own
#else
    int devices;
    cudaCheck(cudaGetDeviceCount(&devices));
    return ceil_div(world.local_size(), devices);
#endif
}

inline void check_communication(const Options& o) {
#ifdef RANKS_USE_NCCL
    if (o.throttle_link > 0) {
        fail("--throttle-link %g: NCCL's links cannot be slowed down; leave it out, or build with COMM=mpi",
             o.throttle_link);
    }
#else
    host_link_speed(o.throttle_link);
#endif
}
