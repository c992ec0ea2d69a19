/*
Which work of a run goes through CUDA graphs (--cuda-graphs), and how a piece of it is known again.

Only the passes of a process that is alone with its device: what is sent to other ranks, or to the
optimizer's state on the host, has streams of its own, whose events lie outside. The backward pass of the
embedding is left out, for its kernels' sizes depend on the tokens.
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
                     b.targets, b.doc_start, b.counted_from, b.past, b.row, more...);
}

// auto: where the host would give kernels to the device more slowly than that runs them. A layer has about
// thirty of them, forward and backward, at some 4 us each; what its products take is known from the rate
// measured at the start.
inline bool choose_graphs(const Options& o, double gemm_rate) {
    constexpr double launches_of_layer = 30 * 4e-6, margin = 2;
    double products = 6.0 * block_parameters(o) * o.micro_batch * o.sequence_length / gemm_rate;
    bool alone = o.dp * o.tp * o.pp == 1 && o.offload == "none";
    bool pays = has_own_memory && alone && products < margin * launches_of_layer;
    bool on = o.cuda_graphs == "on" || (o.cuda_graphs == "auto" && pays);
    if (on) printf("graphs       each pass over a micro-batch is one launch\n");
    return on;
}
