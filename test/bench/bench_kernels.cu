/*
Runs each kernel on the shapes of real models: checks its results against a double-precision reference on the
same shape, then reports its time, its operations or bytes per second, and their share of the best rate that
this device reached in the same run, in a large matrix product or a copy.

    bench_kernels [--quick | --full] [GROUP]...

All groups run unless some are named. --quick uses small shapes, which is the default without a GPU; --full
uses the real ones. Caches are flushed before each repetition, and the median is reported. The exit code is 1
if a result was wrong. On the simulated device, results are checked but not timed.
*/
#include <cstring>

#include "test/bench/bench_ends.h"
#include "test/bench/bench_products.h"
#include "test/bench/bench_rows.h"

static const struct {
    const char* name;
    void (*rows)(Bench&);
} groups[] = {
    {"attention", attention_rows},
    {"matmul", matmul_rows},
    {"norm", norm_rows},
    {"rope", rope_rows},
    {"qk_norm", qk_norm_rows},
    {"swiglu", swiglu_rows},
    {"gelu", gelu_rows},
    {"sums", sum_rows},
    {"classifier", classifier_rows},
    {"embedding", embedding_rows},
    {"adamw", adamw_rows},
    {"global_norm", global_norm_rows},
    {"causal_conv", causal_conv_rows},
};

int main(int argc, char** argv) try {
    bool small = !has_own_memory, all = true;
    std::vector<bool> wanted(std::size(groups));
    std::string names;
    for (auto& group : groups) names += std::string(" ") + group.name;
    for (int i = 1; i < argc; i++) {
        auto named = [&](auto& group) { return !strcmp(argv[i], group.name); };
        auto group = std::find_if(std::begin(groups), std::end(groups), named);
        if (group != std::end(groups))
            wanted[group - groups] = true, all = false;
        else if (!strcmp(argv[i], "--quick") || !strcmp(argv[i], "--full"))
            small = argv[i][2] == 'q';
        else
            fail("bench_kernels: %s: no such group; there are%s, and --quick and --full", argv[i],
                 names.c_str());
    }
    printf("%s (%s, %s%s)\n", device_properties().name, device_name, floatX_name,
           simulated ? ", simulated" : "");
    ComputeStream compute;
    Bench bench(compute.stream, small);
    for (size_t i = 0; i < std::size(groups); i++) {
        if (all || wanted[i]) groups[i].rows(bench);
    }
    if (bench.failed()) fail("bench_kernels: %d results were wrong", bench.failed());
    return 0;
} catch (const Error& error) {
    fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
}
