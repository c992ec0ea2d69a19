/*
Training speed of gpt2-124M on this device, beside the rate of a large matrix product in the same run.

    bench [B T]...    pairs of micro-batch and sequence length; the default is 4 64  1 1024  4 1024
*/
#include <sys/resource.h>

#include "test/bench.h"

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
    ZeroSettings settings = {.keep_master = sizeof(floatX) < sizeof(float)};
    for (auto [B, T] : shapes) {
        Workload workload = {B, T, true, Recompute::none, chosen_loss_chunk(config, B * T)};
        Gpt g(config, workload, settings);
        initialize(g, 1);
        RandomBatch batch(g, config.vocab_size);
        double gemm = measured_gemm_rate(available_memory(), g.stream),
               seconds = median_step_seconds(g, *batch, repeats);
        double rate = B * T / seconds, peak = published_peak(device.name, sizeof(floatX) == 2);
        Meter meter(config, T, peak, gemm, 1);
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
