/*
Runs the same model and batch in several layouts over links of several speeds: above which speed does tensor
parallelism cost more than a pipeline and ZeRO?

A link's time matters relative to the computation that a device does meanwhile. So the links are slowed down
to match 8 H100 GPUs, each of which computes 660 TFLOP/s in bf16 products and sends 400 GB/s: a rank, which
computes products on its core or its share of one, can send as many elements per FLOP as such a GPU. (fp32
elements have twice the bytes, so the links get twice the speed.) 100 and 200 GB/s represent slower links
between the same devices.

The model is small. With two ranks, tensor parallelism sends as much per FLOP as a model of 4096 channels over
8 GPUs does, and ZeRO 1 as much as on many GPUs with 2048 tokens each. With four tensor ranks, tensor
parallelism sends three times as much.

Ranks that share a core can use it while another of them waits for the link, which a rank with a GPU to itself
cannot. So every layout with more ranks than cores looks better over slow links than it is.
*/
#pragma once

#include <thread>

#include "test/bench/bench_links.h"

inline void bench_layouts(const World& world) {
    constexpr int sequences = 16, tokens = 128, micro_batches = 8;  // the last: in a pipeline; else 1
    constexpr double gpu_flops = 660e12, speeds[] = {400, 200, 100};
    int ranks = world.size();
    ModelConfig config;
    config.vocab_size = 512, config.context = tokens, config.tie_embeddings = false;
    config.layers = 2, config.channels = 512, config.heads = 8;
    complete(config);
    struct Row {
        int tp, pp, dp;
    };
    std::vector<Row> layouts = {{ranks, 1, 1}, {1, 2, ranks / 2}};
    layouts.push_back(ranks == 2 ? Row{1, 1, 2} : Row{2, 1, ranks / 2});

    double rate = world.is_root() ? measured_gemm_rate(available_memory(), nullptr) : 0;  // one rank only
    rate *= std::min(1.0, (double)std::thread::hardware_concurrency() / ranks);
    world.broadcast(&rate, sizeof rate);
    auto speed_here = [&](double gigabytes) {
        return gigabytes * 1e9 / gpu_flops * rate * sizeof(floatX) / 2;
    };
    printf("%d ranks of %sFLOP/s in products: 400 GB/s here are %.3f\n", ranks, human(rate).c_str(),
           speed_here(400) / 1e9);
    printf("%-28s %14s", "ms per step over links of", "full speed");
    for (double speed : speeds) printf(" %11.0f GB/s", speed);
    printf("\n");
    for (auto [tp, pp, dp] : layouts) {
        Mesh mesh(world, {.tp = tp, .pp = pp, .dp = dp, .shard = dp}, nullptr);
        int micro = pp > 1 ? micro_batches : 1, B = sequences / dp / micro;
        Layout layout = {mesh.shape, tp > 1 ? 4 : 1, {PipelineSchedule::one_f_one_b, pp, micro}, {}};
        layout.split.assign(pp, config.layers / pp);
        ZeroSettings settings = {.level = dp > 1, .keep_master = sizeof(floatX) < sizeof(float)};
        TimedModel model(world, mesh, config, {B, tokens, true, Recompute::none, B * tokens}, settings,
                         layout);
        std::string name;
        auto add = [&](const char* what, int ranks) {
            if (ranks > 1) name += text("%s%s %d", name.empty() ? "" : ", ", what, ranks);
        };
        add("tensor", tp);
        add("pipeline", pp);
        add("ZeRO 1 data", dp);
        auto seconds = [&](double link) {
            std::vector<double> steps;
            for (int i = 0; i < 3; i++) steps.push_back(model.seconds(link));
            return median(steps);
        };
        model.seconds(0);
        double full = seconds(0);
        printf("%-28s %14.0f", name.c_str(), full * 1e3);
        for (double speed : speeds) {
            double slowed = seconds(speed_here(speed));
            printf(" %9.0f %5.0f%%", slowed * 1e3, 100 * full / slowed);
        }
        printf("\n");
        fflush(stdout);
    }
}
