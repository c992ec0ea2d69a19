/*
The program without its main, for tests and benchmarks.
*/
#pragma once

#define TESTING
#include "train_gpt.cu"

// One micro-batch that is on the device already.
inline void accumulate_gradients(Gpt& g, const Batch& batch, float dloss, bool ends_step) {
    accumulate_gradients(
        g, 1, [&](int, int) { return batch; }, dloss, ends_step);
}
