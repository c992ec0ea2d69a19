/*
Shared by the benchmarks: the program without its main, batches of random tokens, and the time of a step.
*/
#pragma once

#include "test/bench/bench_times.h"
#include "test/support/program.h"

// A batch of random tokens: the speed does not depend on their values.
class RandomBatch {
public:
    RandomBatch(const Gpt& g, int vocab) {
        int B = g.workload.B, T = g.workload.T, N = B * T;
        std::vector<int> values(batch_ints(B, T));
        BatchArrays<int> rows = batch_at(values.data(), B, T);
        for (int i = 0; i < N; i++) {
            Random4 random = philox(1, i);
            rows.tokens[i] = (int)(random.at[0] % vocab);
            rows.targets[i] = (int)(random.at[1] % vocab);
            rows.positions[i] = i % T;
        }
        sort_by_token(rows.by_token, rows.tokens, N);
        sort_by_position(rows.by_position, rows.positions, N);
        allocate(device_, values.size());
        copy_to_device(device_, values.data(), values.size(), g.stream);
        batch_ = {batch_at<const int>(device_, B, T), B, T};
        batch_.doc_start = nullptr;
    }
    ~RandomBatch() { cudaFree(device_); }
    RandomBatch(const RandomBatch&) = delete;
    RandomBatch& operator=(const RandomBatch&) = delete;
    const Batch& operator*() const { return batch_; }

private:
    int* device_;
    Batch batch_;
};

// Runs step number `step`, counted from 1, on `micro_batches` micro-batches; returns its seconds.
inline double step_seconds(Gpt& g, const Batch& batch, int step, int micro_batches = 1) {
    double start = seconds_now(), targets = (double)batch.B * batch.T * micro_batches;
    zero_gradients(g);
    accumulate_gradients(
        g, micro_batches, [&](int, int) { return batch; }, (float)(1 / targets));
    bool at_random = sizeof(floatX) < sizeof(float) && !g.state.settings().keep_master;
    g.state.update(g.stats.data, adamw_optimizer({3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, step, at_random}, 0),
                   1.0f);
    g.products.weights_changed(g.graphs.on);
    if (!read_result(g, targets).finite) fail("bench: a step was not finite; the kernels are at fault");
    return seconds_now() - start;
}

// Returns the median seconds of `repeats` steps, after one that is not counted.
inline double median_step_seconds(Gpt& g, const Batch& batch, int repeats) {
    std::vector<double> seconds;
    for (int step = 0; step <= repeats; step++) {
        double of_step = step_seconds(g, batch, step + 1);
        if (step > 0) seconds.push_back(of_step);
    }
    return median(seconds);
}
