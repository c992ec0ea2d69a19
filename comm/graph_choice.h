/*
Which work of a run goes through CUDA graphs (--cuda-graphs), and how a piece of it is known again.

Only the passes of a process that is alone with its device: what is sent to other ranks, or to the
optimizer's state on the host, has streams of its own, whose events lie outside.
*/
#pragma once

#include <cstdio>
#include <string>

#include "comm/device_batches.h"  // Batch
#include "comm/memory.h"          // has_own_memory
#include "comm/pipeline.h"        // PipelineTask
#include "data/options.h"         // Options
#include "kernels/graph.cuh"      // Graphs, graph_key

// Of the work on a task: all that its kernels are made from, but for what is in memory. Its place in the list
// of micro-batches does not matter. more: what the caller adds.
template <typename... More>
std::string task_key(const Batch& b, const PipelineTask& task, const More&... more) {
    return graph_key(task.work, task.chunk, task.input, task.output, task.gradient, b.B, b.T, b.tokens,
                     b.targets, b.by_token, b.by_position, b.doc_start, b.counted_from, b.past, b.row,
                     more...);
}

constexpr int kernels_of_layer = 30;  // about, forward and backward

// auto: where the host would give kernels to the device more slowly than that runs them, at some 4 us each.
// What the products of a layer take is known from their rate in FLOP/s.
inline bool wants_graphs(const Options& o, double gemm_rate) {
    constexpr double launch = 4e-6, margin = 2;
    double products = 6.0 * block_parameters(o) * o.micro_batch * o.sequence_length / gemm_rate;
    bool alone = o.dp * o.tp * o.pp == 1 && o.offload == "none";
    bool pays = has_own_memory && alone && products < margin * launch * kernels_of_layer;
    return o.cuda_graphs == "on" || (o.cuda_graphs == "auto" && pays);
}

inline bool choose_graphs(const Options& o, double gemm_rate) {
    bool on = wants_graphs(o, gemm_rate);
    if (on) printf("graphs       each pass over a micro-batch is one launch\n");
    return on;
}

// Bytes that the driver may take for the graphs of a run, before the rate is measured: up to version 550 it
// took 64 KiB for each kernel (says PyTorch's guide to its CUDAGraph trees), and less since. A pass backward
// is there twice, for the one that ends a step is another.
inline size_t graph_memory(const Options& o) {
    constexpr double fastest_card = 3e15;
    constexpr size_t of_kernel = 64 << 10;
    bool takes = has_own_memory && wants_graphs(o, fastest_card);
    return takes ? of_kernel * 2 * kernels_of_layer * o.layers : 0;
}
