/*
The program without its main, for tests and benchmarks.
*/
#pragma once

#define TESTING
#include "train_gpt.cu"

// Waits for all work on the compute stream, and returns its result over `targets` targets.
inline StepResult read_result(Gpt& g, double targets) {
    g.stats.send(g.stream);
    return g.stats.result(targets, g.mesh);
}

// Runs one micro-batch that is already on the device.
inline void accumulate_gradients(Gpt& g, const Batch& batch, float dloss, bool ends_step) {
    accumulate_gradients(
        g, 1, [&](int, int) { return batch; }, dloss, ends_step);
}
