/*
Measures how much communication hides behind computation, over links slowed down until a step's bytes take as
long as its computation.

    compute     a step over links that are not slowed down
    link        a step's bytes / compute
    serial      a step without overlap, over slow links
    overlapped  the same with overlap
    can hide    the seconds that overlap saves if only the order of the work limits it
    hidden      (serial - overlapped) / can hide

How much can be hidden depends on the computation that runs meanwhile:

    data        Gradients travel during the backward pass (two thirds of the time of both passes) once its
                first layer is done, parameters during the forward pass; with ZeRO 3 both travel during both
                passes. The part of a transfer that takes longer cannot be hidden.
    tensor      Rows travel in n chunks while their product computes other chunks. The product waits for the
                first chunk of a gather, and the last chunk of a scatter waits for the product. So if the
                product takes p seconds and its rows travel for s seconds, (n - 1) / n of the shorter time
                can be hidden. In the backward pass a scatter also overlaps the weight gradient that follows.
                Around the embedding, the classifier and the loss nothing can be hidden.
    pipeline    A stage computes while it sends, instead of idling; but this gains nothing for a stage that
                waits for its neighbor's answer. So time_pipeline() simulates the action lists of the stages
                with the measured costs and the transfers, with overlap and without. 1f1b can hide hardly
                anything: between sending an output and receiving its gradient, the first of two stages has
                just as much work as the second, and none left to cover the transfers. Schedules with more
                work in flight have some.
*/
#pragma once

#include "test/bench/bench_links.h"
#include "test/support/recording.h"

// ----------------------------------------------------------------------------
// tensor-parallel communication that can be hidden

// Measures the seconds of products of all rows on this rank, in chunks as in a step, while all ranks compute.
class ProductTimes {
public:
    ProductTimes(const World& world, const Gpt& g) : world_(world), g_(g) {
        N_ = g.workload.B * g.workload.T, chunks_ = g.rows.chunks();
        ModelConfig c = local_part(g.config, g.rows.ranks());
        widest_ = (size_t)std::max({fc_width(c), qkv_width(c), c.channels});
        for (floatX** memory : {&out_, &inp_, &weight_}) {
            allocate(*memory, widest_ * std::max(widest_, (size_t)N_));
            cudaCheck(cudaMemsetAsync(*memory, 0, widest_ * widest_ * sizeof(floatX), g.stream));
        }
        allocate(dweight_, widest_ * widest_);
    }
    ~ProductTimes() {
        for (void* memory : {(void*)out_, (void*)inp_, (void*)weight_, (void*)dweight_}) cudaFree(memory);
    }
    ProductTimes(const ProductTimes&) = delete;
    ProductTimes& operator=(const ProductTimes&) = delete;

    double forward(int in, int out) {
        return seconds(chunks_, [&](int rows) {
            matmul_forward(out_, inp_, weight_, nullptr, rows, in, out, g_.stream);
        });
    }
    double input_gradient(int in, int out) {
        return seconds(
            chunks_, [&](int rows) { matmul_backward_input(inp_, out_, weight_, rows, in, out, g_.stream); });
    }
    double weight_gradient(int in, int out) {
        return seconds(
            1, [&](int rows) { matmul_backward_weight(dweight_, out_, inp_, rows, in, out, g_.stream); });
    }

private:
    template <typename Product>
    double seconds(int pieces, Product&& product) {
        std::vector<double> seconds;
        world_.barrier();
        for (int i = 0; i < 9; i++) {
            double start = seconds_now();
            for (int piece = 0; piece < pieces; piece++) product(N_ / pieces);
            cudaCheck(cudaStreamSynchronize(g_.stream));
            seconds.push_back(seconds_now() - start);
        }
        return median(seconds);
    }

    const World& world_;
    const Gpt& g_;
    int N_, chunks_;
    size_t widest_;
    floatX *out_, *inp_, *weight_;
    float* dweight_;
};

// Returns the seconds of a gather that can be hidden: its rows travel for s seconds in n chunks, and their
// product takes p seconds.
inline double hidden_gather(double s, double p, int n) {
    return std::min(s, p) * (n - 1) / n;
}

// Likewise for a scatter, with `after` seconds of other work that follows the product.
inline double hidden_scatter(double s, double p, int n, double after = 0) {
    double sent = s > p ? p / n + s : p + s / n;
    return s + p + after - std::max(p + after, sent);
}

inline double tensor_can_hide(const World& world, const Gpt& g, double link) {
    ProductTimes time(world, g);
    ModelConfig c = local_part(g.config, g.rows.ranks());
    int C = c.channels, A = c.heads * c.head_size, QKV = qkv_width(c), F = c.mlp_width, F1 = fc_width(c),
        n = g.rows.chunks(), ranks = g.rows.ranks();
    double s = (double)g.workload.B * g.workload.T * C * sizeof(floatX) * (ranks - 1) / ranks / link;
    double forward = hidden_gather(s, time.forward(C, QKV), n) + hidden_scatter(s, time.forward(A, C), n) +
                     hidden_gather(s, time.forward(C, F1), n) + hidden_scatter(s, time.forward(F, C), n);
    double backward = hidden_gather(s, time.input_gradient(F, C), n) +
                      hidden_scatter(s, time.input_gradient(C, F1), n, time.weight_gradient(C, F1)) +
                      hidden_gather(s, time.input_gradient(A, C), n) +
                      hidden_scatter(s, time.input_gradient(C, QKV), n, time.weight_gradient(C, QKV));
    return c.layers * (forward + backward);
}

// ----------------------------------------------------------------------------
// pipeline messages that can be hidden

// Measures the costs of one part and micro-batch on the slowest stage.
inline PipelineCosts measured_costs(const World& world, TimedModel& model) {
    std::map<Operation, std::vector<double>> seconds;
    for (const FlightEntry& pass : recorded_work(model.g.stream, [&] { model.seconds(0); }).passes())
        seconds[pass.operation].push_back(pass.end - pass.begin);
    auto typical = [&](PipelineWork work) {
        const std::vector<double>& all = seconds[recorded_as(work)];
        return world.largest(all.empty() ? 0 : (int)(median(all) * 1e9)) / 1e9;
    };
    PipelineCosts costs;
    double both = typical(PipelineWork::backward);  // 0 if the schedule splits it
    costs.forward = typical(PipelineWork::forward);
    costs.input_gradient = both ? both / 2 : typical(PipelineWork::input_gradient);
    costs.weight_gradient = both ? both / 2 : typical(PipelineWork::weight_gradient);
    return costs;
}

inline double pipeline_can_hide(const World& world, TimedModel& model, double link) {
    PipelineCosts costs = measured_costs(world, model), serial;
    auto& shape = model.g.stage.layout().pipeline;
    costs.transfer =
        (double)model.g.workload.B * model.g.workload.T * model.g.config.channels * sizeof(floatX) / link;
    serial = costs;
    serial.overlap = false;
    return time_pipeline(shape, serial).seconds - time_pipeline(shape, costs).seconds;
}

// ----------------------------------------------------------------------------
// the table

// Prints one row. can_hide(model, link) returns how many seconds of a step can be hidden.
template <typename CanHide>
void bench_overlap(const World& world, const char* name, const Layout& layout, int zero,
                   const ModelConfig& config, const Workload& workload, CanHide&& can_hide) {
    Mesh mesh(world, layout.mesh, nullptr);
    ZeroSettings on = {.level = zero, .keep_master = sizeof(floatX) < sizeof(float)}, off = on;
    off.overlap = false;
    TimedModel overlapped(world, mesh, config, workload, on, layout),
        serial(world, mesh, config, workload, off, layout);
    for (TimedModel* model : {&serial, &overlapped}) model->seconds(0);  // the first step is slower
    double compute = std::min(serial.seconds(0), serial.seconds(0)), sent = serial.sent(),
           link = sent / compute;
    std::vector<double> computes, serials, overlaps;  // interleaved, so that all see the same noise
    for (int round = 0; round < 5; round++) {
        computes.push_back(serial.seconds(0));
        serials.push_back(serial.seconds(link));
        overlaps.push_back(overlapped.seconds(link));
    }
    compute = median(computes);
    double hide = can_hide(serial, link);
    printf("%-14s %9.1f %11.1f %10.3f %10.1f %14.1f %11.1f %7.0f%%\n", name, sent / 1e6, compute * 1e3,
           link / 1e9, median(serials) * 1e3, median(overlaps) * 1e3, hide * 1e3,
           100 * (median(serials) - median(overlaps)) / hide);
    fflush(stdout);
}

inline void print_overlap_header(const World& world) {
    printf("%-14s %9s %11s %10s %10s %14s %11s %8s\n", text("%d ranks", world.size()).c_str(), "sent MB",
           "compute ms", "link GB/s", "serial ms", "overlapped ms", "can hide ms", "hidden");
}

inline ModelConfig bench_config(int layers, int channels) {
    ModelConfig config;
    config.layers = layers, config.channels = channels, config.heads = channels / 64;
    config.vocab_size = 512, config.context = 128, config.tie_embeddings = false;
    complete(config);
    return config;
}

inline void bench_data_overlap(const World& world) {
    print_overlap_header(world);
    for (int level = 0; level <= 3; level++) {
        auto can_hide = [&](TimedModel& model, double link) {
            double gradients = model.sent(Traffic::gradients) / link,
                   parameters = model.sent(Traffic::parameters) / link, passes = model.pass_seconds(),
                   layers = model.g.config.layers, during_backward = passes * 2 / 3 * (layers - 1) / layers;
            return level < 3 ? std::min(gradients, during_backward) + std::min(parameters, passes / 3)
                             : std::min(gradients + parameters, passes);
        };
        int ranks = world.size();
        bench_overlap(world, text("ZeRO %d", level).c_str(), {{.dp = ranks, .shard = level ? ranks : 1}},
                      level, bench_config(12, 256), {4, 128, true, Recompute::none, 512}, can_hide);
    }
}

inline void bench_tensor_overlap(const World& world) {
    auto can_hide = [&](TimedModel& model, double link) { return tensor_can_hide(world, model.g, link); };
    print_overlap_header(world);
    constexpr int chunks = 4;
    bench_overlap(world, text("%d chunks", chunks).c_str(), {{.tp = world.size()}, chunks}, 0,
                  bench_config(2, 1024), {8, 128, true, Recompute::none, 1024}, can_hide);
}

inline void bench_pipeline_overlap(const World& world) {
    auto can_hide = [&](TimedModel& model, double link) { return pipeline_can_hide(world, model, link); };
    int ranks = world.size();
    using enum PipelineSchedule;
    print_overlap_header(world);
    for (PipelineSchedule schedule : {gpipe, one_f_one_b, interleaved, zero_bubble}) {
        int chunks = schedule == interleaved ? 2 : 1;
        std::vector<int> split(ranks * chunks, 2 / chunks);
        Layout layout = {{.pp = ranks, .ring = chunks > 1}, 1, {schedule, ranks, 8, chunks}, split};
        bench_overlap(world, name_of(schedule), layout, 0, bench_config(2 * ranks, 256),
                      {2, 128, true, Recompute::none, 256}, can_hide);
    }
}
