/*
How long a step may take on a card: a prediction from its passes (comm/passes.h) and the rates that are
expected of it (comm/machine.h), before anything is measured.

A product is as fast as the machine's large ones, less what its tiles waste: those at the edges, those of a
last wave that does not fill all multiprocessors, and the start of each sum. A kernel that reads and writes
has a share of the rate of memory. Attention has the rate of its inner loop, less the halves of tiles at the
diagonal and the ends of each row of tiles.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "comm/machine.h"     // Machine
#include "comm/passes.h"      // Pass, StepPasses
#include "comm/setup.h"       // zero_settings
#include "data/base/error.h"  // text
#include "data/options/options.h"
#include "data/options/schedule.h"  // tokens_of_step
#include "data/run/meter.h"         // flops_per_token

// ----------------------------------------------------------------------------
// products

// On a host, the rate of long sums. On a card that of the best tiles, of those that libraries have for
// Hopper. A sum may be split over multiprocessors where there are few tiles, as long as its parts fit in the
// workspace.
inline double expected_product_rate(const Machine& machine, const ProductShape& p) {
    constexpr double workspace = 256 << 20;
    constexpr struct {
        double rows, columns, share;
    } tiles[] = {{128, 256, 1}, {256, 128, 1},    {192, 128, 0.96}, {128, 192, 0.96},
                 {256, 192, 1}, {128, 160, 0.96}, {128, 128, 0.93}};
    constexpr double split_share = 0.95;
    if (machine.number_bytes == sizeof(float))
        return machine.products * p.sums / (p.sums + machine.half_sums);
    double best = 0;
    for (auto [rows, columns, share] : tiles) {
        double down = std::ceil(p.rows / rows), across = std::ceil(p.columns / columns),
               count = down * across;
        double used = p.rows * p.columns / (down * rows * across * columns);
        double most = count >= 3 * machine.multiprocessors
                          ? 1
                          : std::clamp(workspace / (4 * p.rows * p.columns), 1.0, 16.0);
        for (int parts = 1; parts <= (int)most; parts++) {
            double waves = count * parts / machine.multiprocessors, sums = p.sums / parts;
            best = std::max(best, share * used * waves / std::ceil(waves) * sums /
                                      (sums + machine.half_sums) * (parts > 1 ? split_share : 1));
        }
    }
    // fp8 has twice the peak, which operands' ways to the tensor cores and sums in more bits leave less of.
    double numbers = !p.fp8 ? 1 : p.fast_sums ? 1.62 : 1.45;
    return machine.products * numbers * best;
}

// ----------------------------------------------------------------------------
// attention

// Whole rows of tiles have a share of the inner loop's rate; small heads have fewer products for each
// exponential. What orders of tiles leave of that is simulated with the kernels' own functions, by
// test/kernels/test_attention_order.cu. The shares of small heads are those that give 300 TFLOP/s forward and
// 280 backward at T = 1,024 on an H200, which loops like these reach in orders that leave 0.94 and 0.895.
inline double expected_attention_rate(const Machine& machine, int HS, double mean_keys, bool forward) {
    constexpr double tile = 128, of_diagonal = 0.5, of_ends = 1;
    double loop = forward ? machine.attention_forward : machine.attention_backward;
    if (HS <= 64) loop *= forward ? 0.65 : 0.855;
    double scheduled = forward ? 0.98 : mean_keys > 768 ? 0.97 : 0.9;
    double tiles = mean_keys / tile;
    return loop * scheduled * tiles / (tiles + of_diagonal + of_ends);
}

// ----------------------------------------------------------------------------
// kernels that read and write

// Shares of the rate of streams. What machine code shows of these kernels is in test/tools: that they move
// whole vectors (check_sass.py), and how many issue slots their loops take (sass_loops.json). A
// multiprocessor does 128 instructions of threads in a clock, in which memory brings it some 20 bytes.
inline double expected_stream_share(std::string_view launcher) {
    constexpr struct {
        std::string_view launcher;
        double share;
    } shares[] = {
        {"attention_backward", 0.8},       // its statistics, of short rows; and sums for a bias
        {"classifier", 0.82},              // two passes over a row, the second in the L2 cache
        {"embedding_forward", 0.6},        // rows from all over a table
        {"embedding_backward", 0.6},       // likewise
        {"matmul_backward_weight", 0.75},  // gradients of biases, which are short
        {"matmul_backward_bias", 0.75},    // likewise
        {"fp8_quantize", 0.88},            // some 14 instructions for an element's 4 bytes
        {"norm_backward", 0.82},           // in one pass, but it waits for the sums of a row
        {"", 0.95},                        // fills
    };
    for (auto [name, share] : shares)
        if (name == launcher) return share;
    return 0.88;
}

// ----------------------------------------------------------------------------
// a step

struct StepTime {
    double products = 0, attention = 0, streams = 0;  // seconds
    double all() const { return products + attention + streams; }
};

inline StepTime predicted_time(const Machine& machine, int head_size, const std::vector<Pass>& passes) {
    StepTime time;
    for (const Pass& pass : passes) {
        std::string_view launcher = pass.launcher ? pass.launcher : "";
        double memory = (pass.read + pass.written) / machine.streams,
               launches = pass.launches * machine.launch;
        if (pass.product.sums > 0) {
            double fused = launcher == "matmul_gelu_forward"    ? 0.88
                           : launcher == "matmul_backward_gelu" ? 0.85
                                                                : 1;
            double seconds = pass.flops() / (fused * expected_product_rate(machine, pass.product));
            time.products += pass.times * (std::max(seconds, memory / 0.95) + launches);
        } else if (pass.attention_flops > 0) {
            double rate =
                expected_attention_rate(machine, head_size, pass.mean_keys, launcher == "attention_forward");
            time.attention += pass.times * (pass.flops() / rate + launches);
        } else {
            time.streams += pass.times * (memory / expected_stream_share(launcher) + launches);
        }
    }
    return time;
}

// For the header of a run on one device; empty where too little is known of the device, or of such a step: of
// others than those with the attention kernels of Hopper, and an optimizer on the device that steps each
// element by itself. peak: FLOP/s that MFU is a share of.
inline std::string prediction_text(const Machine& machine, double peak, bool takes_wgmma, const Options& o,
                                   const Workload& workload, const Stage& stage, double parameters) {
    bool known_machine = machine.products > 0 && machine.streams > 0 && peak > 0 && takes_wgmma;
    bool known_step = sizeof(floatX) == 2 && o.optimizer != OptimizerKind::muon && o.offload == Offload::none;
    if (!known_machine || !known_step) return "";
    StepPasses passes(o, workload, stage, micro_batches_of_rank(o, 0), parameters, zero_settings(o));
    StepTime time = predicted_time(machine, o.head_size, passes.rows);
    double rate = flops_per_token(o, o.sequence_length, false) * tokens_of_step(o, 0) / time.all();
    return text(
        "%.3g ms a step and %.1f%% MFU (products %.0f%%, attention %.0f%%, memory %.0f%%), by rates that "
        "are expected of such cards; nothing of it is measured",
        1e3 * time.all(), 100 * rate / peak, 100 * time.products / time.all(),
        100 * time.attention / time.all(), 100 * time.streams / time.all());
}
