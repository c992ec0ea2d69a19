/*
Options that this program, as it was built, cannot follow.
*/
#pragma once

#include "comm/collectives.h"
#include "comm/model_share.h"  // local_part
#include "comm/world.h"
#include "data/algorithm_file.h"
#include "data/error.h"
#include "data/options.h"
#include "kernels/attention.cuh"
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

// Takes --attention over.
inline void choose_attention(const Options& o) {
    if (o.attention == "auto") return;
#ifdef DEVICE_CPU
    fail("--attention %s: this program has no kernels for GPUs; leave it out, or build with DEVICE=cuda",
         o.attention.c_str());
#else
    bool wgmma = o.attention == "wgmma";
    if (wgmma && !has_wgmma_attention(attention_shape(1, 1, 1, 1, o.head_size, 0, nullptr))) {
        fail("--attention wgmma: needs a Hopper card, a program built with PRECISION=bf16, and heads of a "
             "multiple of 8 up to 128 (here: %s, heads of %d); give auto",
             floatX_name, o.head_size);
    }
    attention_kernels = wgmma ? AttentionKernels::wgmma : AttentionKernels::mma;
#endif
}

// In fp32 products are for comparisons, and not for speed.
#ifdef DEVICE_CPU
constexpr bool has_products_in_bf16 = false;
#else
constexpr bool has_products_in_bf16 = sizeof(floatX) < sizeof(float);
#endif

// Products in fp8 need a card that has them, sizes that its rows of 16 bytes divide, and weights that stay in
// one place.
inline void check_matmul_dtype(const Options& o) {
    if (o.matmul_dtype != "fp8") return;
    auto refuse = [](const std::string& reason) {
        fail("--matmul-dtype fp8: %s, or give --matmul-dtype bf16", reason.c_str());
    };
    if (!has_products_in_bf16) {
        refuse(text("this program has no such products (%s, %s); build with DEVICE=cuda PRECISION=bf16",
                    device_name, floatX_name));
    }
    const cudaDeviceProp& device = device_properties();
    if (device.major < 9) refuse(text("%s has no such products; take a Hopper or later", device.name));
    if (o.zero == 3)
        refuse("copies of all weights stay on each rank, which --zero 3 does not; give --zero 2");
    ModelConfig c = local_part(o, o.tp);
    int rows = o.micro_batch * o.sequence_length;
    struct Size {
        const char* what;
        int size;
    };
    for (auto [what, size] :
         {Size{"channels", c.channels},
          {"elements of queries, keys and values", qkv_width(c)},
          {"elements of all heads", c.heads * c.head_size},
          {"hidden channels of the MLP", c.mlp_width},
          {"tokens of a micro-batch at once", rows / (o.tp > 1 ? o.tp * std::max(o.tp_overlap, 1) : 1)}}) {
        if (size % 16 == 0) continue;
        refuse(text("%d %s on a rank, no multiple of 16; choose other sizes", size, what));
    }
}

// The file that keeps the choice, for a run that makes one.
inline std::string algorithm_file(const Options& o) {
    return o.matmul_tuning == "on" ? algorithm_path(o.run_dir) : o.matmul_tuning;
}

inline void check_tuning(const Options& o) {
    const std::string& asked = o.matmul_tuning;
    if (!has_products_in_bf16 && asked != "on" && asked != "off") {
        fail("--matmul-tuning %s: products are not timed in this program (%s, %s); give off, or build with "
             "DEVICE=cuda PRECISION=bf16",
             printable(asked).c_str(), device_name, floatX_name);
    }
    if (has_products_in_bf16 && asked != "off") read_algorithms(algorithm_file(o));
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
