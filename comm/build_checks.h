/*
Options that this program, as it was built, or the card that it runs on, cannot follow.
*/
#pragma once

#include <algorithm>
#include <string>

#include "comm/collectives.h"      // RANKS_USE_NCCL
#include "comm/stage.h"            // local_part
#include "comm/world.h"            // World
#include "data/base/error.h"       // fail
#include "data/options/options.h"  // Options
#include "data/run/algorithm_file.h"
#include "kernels/attention.cuh"   // has_wgmma_attention, attention_kernels
#include "kernels/fp8_matmul.cuh"  // fp8
#include "kernels/matmul.cuh"

// Options about rounding depend on what parameters are made of, which is decided when the program is built.
inline void check_precision(const Options& o, size_t number_bytes = sizeof(floatX)) {
    if (number_bytes == sizeof(float)) {
        // It may be given, or be that of a checkpoint.
        auto refuse = [](const char* option, const char* value, const char* other) {
            fail("%s %s: parameters are fp32 here; give %s %s, or build with PRECISION=bf16", option, value,
                 option, other);
        };
        if (o.stochastic_rounding) refuse("--stochastic-rounding", "on", "off");
        if (!o.master_weights) refuse("--master-weights", "off", "on");
    } else if (!o.master_weights && !o.stochastic_rounding) {
        fail("--master-weights off: bf16 alone loses small updates; add --stochastic-rounding on");
    }
}

// Which kernels attention can take depends on the size of its heads alone.
inline AttentionShape heads_of_model(const Options& o) {
    return self_attention_shape(1, 1, 1, 1, o.head_size, 0, nullptr);
}

// Takes --attention over.
inline void choose_attention(const Options& o) {
    if (o.attention == AttentionChoice::automatic) return;
#ifdef DEVICE_CPU
    fail("--attention %s: this program has no kernels for GPUs; leave it out, or build with DEVICE=cuda",
         name_of(o.attention));
#else
    bool wgmma = o.attention == AttentionChoice::wgmma;
    if (wgmma && !has_wgmma_attention(heads_of_model(o))) {
        fail("--attention wgmma: needs a Hopper card, a program built with PRECISION=bf16, and heads of a "
             "multiple of 8 up to 128 (here: %s, heads of %d); give auto",
             floatX_name, o.head_size);
    }
    attention_kernels = wgmma ? AttentionKernels::wgmma : AttentionKernels::mma;
#endif
}

// Says after choose_attention() whether the kernels of Hopper are taken.
inline bool takes_wgmma_attention([[maybe_unused]] const Options& o) {
#ifdef DEVICE_CPU
    return false;
#else
    return takes_wgmma(heads_of_model(o));
#endif
}

// A warning where a Hopper runs attention at half its speed; empty: it does not.
inline std::string attention_warning([[maybe_unused]] const Options& o) {
#if defined(PRECISION_BF16) && !defined(DEVICE_CPU)
    bool slow = device_properties().major == 9 && hopper_attention_fits(heads_of_model(o)) &&
                o.attention == AttentionChoice::automatic && !takes_wgmma_attention(o);
    if (slow)
        return text("warning: attention takes the kernels of every card, at half the speed of Hopper's: this "
                    "program's code is for sm_%d; build with make GPU_ARCH=90a",
                    kernel_architecture());
#endif
    return "";
}

// The builds whose own products are in bf16. In fp32 a GPU's are for comparisons, and not for speed.
#ifdef DEVICE_CPU
constexpr bool has_products_in_bf16 = false;
#else
constexpr bool has_products_in_bf16 = sizeof(floatX) < sizeof(float);
#endif

// Says why a run that is cut so cannot have products in fp8; empty: it can.
inline std::string fp8_refusal(const Options& o) {
    if (o.zero == 3) return "weights are known by where they lie, and --zero 3 moves them; give --zero 2";
    ModelConfig c = local_part(o, o.tp);
    int rows = o.micro_batch * o.sequence_length;
    struct Size {
        const char* what;
        int size;
    };
    for (auto [what, size] :
         {Size{"channels", c.channels},
          {"elements of queries, keys and values", qkv_width(c)},
          {"elements of values by themselves", c.local_filter ? c.kv_heads * c.head_size : 0},
          {"channels within the local filter", c.local_filter ? filter_width(c) / o.tp : 0},
          {"elements of all heads", c.heads * c.head_size},
          {"hidden channels of the MLP", c.mlp_width},
          {"tokens of a micro-batch at once", rows / (o.tp > 1 ? o.tp * std::max(o.tp_overlap, 1) : 1)}}) {
        if (size % 16 == 0) continue;
        return text("%d %s on a rank, no multiple of 16; choose other sizes", size, what);
    }
    return "";
}

// Takes --matmul-dtype over. Products in bf16 need a processor or a build that has them; those in fp8 a card
// that has them, sizes that its rows of 16 bytes divide, and weights that stay in one place.
inline void choose_matmul_dtype(const Options& o) {
    auto refuse = [&](const std::string& reason) {
        fail("--matmul-dtype %s: %s, or give --matmul-dtype auto", name_of(o.matmul_dtype), reason.c_str());
    };
    bool bf16 = o.matmul_dtype == MatmulDtype::bf16;
#ifdef DEVICE_CPU
    cpu_products_in_bf16 = bf16;
    if (bf16 && !has_cpu_products_in_bf16())
        refuse("this processor has no such products; take one with avx512_bf16 or AMX");
#else
    if (bf16 && !has_products_in_bf16)
        refuse(text("this program multiplies in fp32 (%s); build with PRECISION=bf16", device_name));
#endif
    if (o.matmul_dtype != MatmulDtype::fp8) {
        // It may be given, or be that of a checkpoint.
        if (o.fp8_fast_gradients)
            fail("--fp8-fast-gradients on: goes with --matmul-dtype fp8; give --fp8-fast-gradients off");
        return;
    }
    fp8_fast_gradients = o.fp8_fast_gradients;
    if (!has_products_in_bf16) {
        refuse(text("this program has no such products (%s, %s); build with DEVICE=cuda PRECISION=bf16",
                    device_name, floatX_name));
    }
    const cudaDeviceProp& device = device_properties();
    if (!multiplies_fp8(capability_of(device)))
        refuse(text("%s has no such products; take an Ada, a Hopper or later", device.name));
    if (std::string reason = fp8_refusal(o); !reason.empty()) refuse(reason);
}

// The file that keeps the choice, for a run that makes one.
inline std::string algorithm_file(const Options& o) {
    bool in_run = kind_of<MatmulTuning>(o.matmul_tuning) == MatmulTuning::on;
    return in_run ? algorithm_path(o.run_dir) : o.matmul_tuning;
}

inline void check_tuning(const Options& o) {
    MatmulTuning tuning = kind_of<MatmulTuning>(o.matmul_tuning);
    if (!has_products_in_bf16 && tuning == MatmulTuning::file) {
        fail("--matmul-tuning %s: products are not timed in this program (%s, %s); give off, or build with "
             "DEVICE=cuda PRECISION=bf16",
             printable(o.matmul_tuning).c_str(), device_name, floatX_name);
    }
    if (has_products_in_bf16 && tuning != MatmulTuning::off) read_algorithms(algorithm_file(o));
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

// Refuses options of a run that this program cannot follow, and takes over those that set its kernels and
// links.
inline void check_build(const Options& o) {
    check_precision(o);
    choose_attention(o);
    choose_matmul_dtype(o);
    check_communication(o);
}
