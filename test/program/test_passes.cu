/*
The table of passes (comm/passes.h) against what the simulated device reads and writes in a step.
*/
// devices: simt-bf16
// seconds: 3
#include "comm/machine.h"
#include "comm/passes.h"
#include "comm/step_time.h"
#include "test/program/model_testing.h"
#include "test/simt/simt.h"

namespace {

ModelConfig gpt(int C) {
    ModelConfig c;
    c.layers = 2, c.channels = C, c.heads = C / 64, c.head_size = 64, c.mlp_width = 3 * C, c.vocab_size = 256,
    c.context = 256;
    complete(c);
    return c;
}

ModelConfig gpt_without_bias(int C) {
    ModelConfig c = gpt(C);
    c.bias = false;
    return c;
}

ModelConfig llama(int C) {
    ModelConfig c = gpt(C);
    c.norm = NormKind::rmsnorm, c.position = PositionKind::rope, c.mlp = MlpKind::swiglu;
    c.bias = false, c.tie_embeddings = false, c.kv_heads = c.heads / 2, c.rope_dims = c.head_size;
    complete(c);
    return c;
}

ModelConfig yuan(int C) {
    ModelConfig c = llama(C);
    c.local_filter = true;
    complete(c);
    return c;
}

ModelConfig parallel(int C) {
    ModelConfig c = llama(C);
    c.qk_norm = true, c.block = BlockKind::parallel;
    complete(c);
    return c;
}

struct Sizes {
    int B, T, C, micro_batches;
};

using TrafficByLauncher = std::map<std::string, simt::Traffic>;

struct Counted {
    TrafficByLauncher device, table;
};

// A step on the simulated device, and what the table says of it.
Counted counted(const ModelConfig& config, const Sizes& s, Recompute recompute, bool fp8, OptimizerKind kind,
                PipelineSchedule schedule) {
    Workload workload = {.B = s.B,
                         .T = s.T,
                         .training = true,
                         .recompute = recompute,
                         .loss_chunk = s.B * s.T / 2,
                         .fp8 = fp8};
    Options o;
    o.optimizer = kind, o.async_save = false;
    const ZeroSettings settings = zero_settings(o);
    Gpt g(config, workload, settings, one_process(), {.pipeline = {schedule, 1, s.micro_batches}});
    initialize(g.state, 5);
    int N = s.B * s.T;
    std::vector<int> tokens(N), targets(N);
    for (int i = 0; i < N; i++)  // tokens that are all different
        tokens[i] = (i * 7919) % config.vocab_size, targets[i] = (i * 31 + 7) % config.vocab_size;
    TestBatch batch(s.B, s.T, tokens, targets);
    cudaCheck(cudaStreamSynchronize(g.stream));
    Counted counted;
    {
        simt::CountTraffic count;
        zero_gradients(g);
        accumulate_gradients(
            g, s.micro_batches, [&](int, int) { return *batch; }, 1.0f / N, true);
        g.state.update(g.stats.data, make_optimizer(o, 0), 1.0f);
        CHECK(read_result(g, 1).finite);
        g.state.synchronize();
        counted.device = count.take();
    }
    double matrices = 0;
    for (int unit : g.layout.held())
        matrices += (double)(g.layout.unit_size(unit) - g.layout.before_matrices(unit));
    StepPasses passes(config, workload, g.stage, s.micro_batches, {(double)g.layout.size(), matrices},
                      settings);
    for (const Pass& pass : passes.rows) {
        if (!pass.launcher) continue;
        counted.table[pass.launcher] +=
            {(long)(pass.times * pass.launches), (size_t)(pass.times * pass.read),
             (size_t)(pass.times * pass.written), pass.times * pass.product.flops()};
    }
    return counted;
}

}  // namespace

TEST_CASE("a step reads and writes what the table says") {
    constexpr Sizes large = {1, 192, 128, 1}, small = {1, 64, 128, 2}, wide = {1, 64, 192, 1};
    struct {
        std::string name;
        ModelConfig (*config)(int C);
        Recompute recompute;
        std::vector<Sizes> sizes = {large};
        bool fp8 = false;
        OptimizerKind optimizer = OptimizerKind::adamw;
        PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
    } models[] = {{"gpt", gpt, Recompute::none, {large, small, wide}},
                  {"gpt without bias", gpt_without_bias, Recompute::elementwise},
                  {"llama", llama, Recompute::elementwise, {large, small, wide}},
                  {"yuan", yuan, Recompute::mlp},
                  {"parallel", parallel, Recompute::block},
                  {"gpt with LAMB", gpt, Recompute::none, {small}, false, OptimizerKind::lamb},
                  {"llama with Muon", llama, Recompute::none, {small}, false, OptimizerKind::muon},
                  {"llama in fp8, weights later",
                   llama,
                   Recompute::none,
                   {small},
                   true,
                   OptimizerKind::adamw,
                   PipelineSchedule::zero_bubble},
                  {"gpt in fp8", gpt, Recompute::none, {small}, true},
                  {"yuan in fp8", yuan, Recompute::mlp, {small}, true},
                  {"parallel in fp8", parallel, Recompute::block, {small}, true}};
    for (auto& model : models) {
        for (const Sizes& s : model.sizes) {
            CAPTURE(model.name);
            CAPTURE(s.T);
            CAPTURE(s.C);
            auto [device, table] =
                counted(model.config(s.C), s, model.recompute, model.fp8, model.optimizer, model.schedule);
            for (auto& [launcher, was] : device) {
                CAPTURE(launcher);
                simt::Traffic says = table[launcher];
                CHECK(says.launches == was.launches);
                CHECK(says.flops == doctest::Approx(was.flops));
                constexpr double single_numbers = 256;  // bytes of a launch
                auto close = [&](size_t bytes, size_t want) {
                    return std::abs((double)bytes - (double)want) <=
                           0.01 * (double)want + single_numbers * (double)was.launches;
                };
                CHECK_MESSAGE(close(says.read, was.read), says.read, " for ", was.read);
                CHECK_MESSAGE(close(says.written, was.written), says.written, " for ", was.written);
            }
            CHECK(table.size() == device.size());
        }
    }
}

namespace {

Machine h200() {
    cudaDeviceProp device = {};
    snprintf(device.name, sizeof device.name, "NVIDIA H200");
    device.multiProcessorCount = 132;
    return machine_of(device, 0, 0);
}

}  // namespace

// Predictions are no measurements: this holds that no change makes steps longer by what the table knows.
TEST_CASE("predicted shares of an H200's published FLOP/s") {
    Machine machine = h200();
    CHECK(machine.products == doctest::Approx(720e12).epsilon(0.01));
    CHECK(machine.streams == doctest::Approx(4.3e12).epsilon(0.01));
    struct Goal {
        std::string model;
        int B, T, micro_batches;
        Recompute recompute;
        bool master;
        double share;
        bool fp8 = false, fast_gradients = false;
    };
    auto predicted = [&](const Goal& goal) {
        fp8_fast_gradients = goal.fast_gradients;
        ModelConfig c = find_preset(goal.model)->config;
        complete(c);
        Workload w{.B = goal.B,
                   .T = goal.T,
                   .training = true,
                   .recompute = goal.recompute,
                   .loss_chunk = chosen_loss_chunk(c, goal.B * goal.T),
                   .fp8 = goal.fp8};
        CHECK(memory_total(memory_classes(c, w, {.keep_master = goal.master})) < 149e9);
        StepPasses passes(c, w, Stage(c, {}, {}, true), goal.micro_batches,
                          (double)parameter_layout(c).size(), {.keep_master = goal.master});
        double seconds = predicted_time(machine, c.head_size, passes.rows).all();
        double tokens = (double)goal.B * goal.T * goal.micro_batches;
        fp8_fast_gradients = false;
        return flops_per_token(c, goal.T, false) * tokens / seconds / machine.flops;
    };
    Goal llama = {"llama3-8B", 1, 8192, 4, Recompute::elementwise, false, 0.66};
    for (const Goal& goal : {Goal{"gpt2-124M", 64, 1024, 4, Recompute::none, true, 0.535},
                             Goal{"gpt2-1558M", 32, 1024, 4, Recompute::none, true, 0.575}, llama}) {
        CAPTURE(goal.model);
        double share = predicted(goal);
        CHECK(share >= goal.share);
        CHECK(share < goal.share + 0.03);  // or the table has lost a pass
    }
    double bf16 = predicted(llama);
    llama.fp8 = true;
    CHECK(predicted(llama) > 1.24 * bf16);
    llama.fast_gradients = true;
    CHECK(predicted(llama) > 1.3 * bf16);
    CHECK(predicted(llama) < 1.33 * bf16);
}

TEST_CASE("the header of a run has the prediction where the device is known") {
    Options o;
    (ModelConfig&)o = gpt(128);
    o.sequence_length = 256, o.micro_batch = 8, o.global_batch = 8 * 256, o.dp = 1;
    Workload w = training_workload(o, Recompute::none);
    Stage stage(o, {}, {}, true);
    std::string text = prediction_text(h200(), 1e15, true, o, w, stage, 1e6);
    CHECK(text.find("% MFU") != std::string::npos);
    CHECK(text.find("nothing of it is measured") != std::string::npos);
    CHECK(prediction_text({}, 1e15, true, o, w, stage, 1e6).empty());
    CHECK(prediction_text(h200(), 1e15, false, o, w, stage, 1e6).empty());
    o.offload = Offload::optimizer;
    CHECK(prediction_text(h200(), 1e15, true, o, w, stage, 1e6).empty());
}
