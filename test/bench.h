/*
What the benchmarks share: the program without its main, batches without data, and the time of a step.
*/
#pragma once

#define TESTING
#include "train_gpt.cu"

// Tokens without data: the speed does not depend on what they are.
class RandomBatch {
public:
    RandomBatch(const Gpt& g, int vocab) {
        int B = g.workload.B, T = g.workload.T, N = B * T;
        std::vector<int> values(4 * (size_t)N + 1);
        int *tokens = values.data(), *targets = tokens + N, *order = targets + N, *starts = order + N;
        for (int i = 0; i < N; i++) {
            Random4 random = philox(1, i);
            tokens[i] = (int)(random.at[0] % vocab);
            targets[i] = (int)(random.at[1] % vocab);
        }
        int buckets = bucket_tokens(order, starts, tokens, N);
        allocate(device_, values.size());
        copy_to_device(device_, values.data(), values.size(), g.stream);
        batch_ = {B, T, device_, device_ + N, device_ + 2 * N, device_ + 3 * N, nullptr, buckets};
    }
    ~RandomBatch() { cudaFree(device_); }
    RandomBatch(const RandomBatch&) = delete;
    RandomBatch& operator=(const RandomBatch&) = delete;
    const Batch& operator*() const { return batch_; }

private:
    int* device_;
    Batch batch_;
};

// Seconds of a training step: the median of several.
inline double step_seconds(Gpt& g, const Batch& batch, int repeats) {
    std::vector<double> seconds;
    for (int step = 0; step <= repeats; step++) {
        double start = seconds_now();
        zero_gradients(g);
        accumulate_gradients(g, batch, 1.0f / (batch.B * batch.T), true);
        g.state.update(g.stats, {3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, step + 1, false}, 1.0f, 0);
        if (!read_stats(g, batch.B * batch.T).finite)
            fail("bench: a step was not finite; the kernels are at fault");
        if (step > 0) seconds.push_back(seconds_now() - start);
    }
    std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
    return seconds[repeats / 2];
}
