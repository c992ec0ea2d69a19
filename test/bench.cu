/*
Training speed of gpt2-124M on this device, beside the rate of a large matrix product in the same run.

    bench [B T]...    pairs of micro-batch and sequence length; the default is 4 64  1 1024  4 1024
*/
#define TESTING
#include "train_gpt.cu"

#include <sys/resource.h>

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
        accumulate_gradients(g, batch, 1.0f / (batch.B * batch.T));
        update(g, {3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, step + 1, false}, 1.0f, 0);
        if (!read_stats(g, batch.B * batch.T).finite)
            fail("bench: a step was not finite; the kernels are at fault");
        if (step > 0) seconds.push_back(seconds_now() - start);
    }
    std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
    return seconds[repeats / 2];
}

int main(int argc, char** argv) try {
    std::vector<std::pair<int, int>> shapes = {{4, 64}, {1, 1024}, {4, 1024}};
    if (argc > 2) shapes.clear();
    for (int i = 1; i + 1 < argc; i += 2) shapes.push_back({atoi(argv[i]), atoi(argv[i + 1])});
    constexpr int repeats = 5;

    ModelConfig config = find_preset("gpt2-124M")->config;
    complete(config);
    cudaDeviceProp device;
    cudaCheck(cudaGetDeviceProperties(&device, 0));
    printf("%s (%s, %s): gpt2-124M, training step\n", device.name, device_name, floatX_name);
    // shares by the published FLOP count, and with attention counted causal
    printf("%4s %6s %10s %10s %12s %14s %8s %10s\n", "B", "T", "ms", "tokens/s", "GEMM GFLOP/s",
           "share of GEMM", "causal", "MFU");
    bool keep_master = sizeof(floatX) < sizeof(float);
    for (auto [B, T] : shapes) {
        Workload workload = {B, T, true, Recompute::none, chosen_loss_chunk(config, B * T)};
        Gpt g(config, workload, keep_master);
        initialize(g, 1);
        RandomBatch batch(g, config.vocab_size);
        double gemm = measured_gemm_rate(g.stream), seconds = step_seconds(g, *batch, repeats);
        double rate = B * T / seconds, peak = published_peak(device.name);
        Meter meter(config, T, peak, gemm);
        printf("%4d %6d %10.1f %10.0f %12.1f %13.1f%% %7.1f%% %10s\n", B, T, seconds * 1e3, rate, gemm / 1e9,
               100 * meter.gemm_share(rate), 100 * meter.gemm_share_causal(rate),
               peak > 0 ? text("%.1f%%", 100 * meter.mfu(rate)).c_str() : "-");
        fflush(stdout);
    }
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    printf("peak memory of the process %.2f GiB\n", (double)usage.ru_maxrss / (1 << 20));
    return 0;
} catch (const Error& error) {
    fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
}
