/*
The table of passes (comm/plan_passes.h) against what the simulated device reads and writes in a step.
*/
// devices: simt-bf16
// seconds: 3
#include "kernels/cards.h"
#include "comm/plan_passes.h"
#include "comm/plan_times.h"
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

ModelConfig gpt_with_qkv_bias(int C) {
    ModelConfig c = gpt_without_bias(C);
    c.qkv_bias = true;
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
    c.local_filter = c.qkv_bias = true;
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
    TrafficByLauncher device, ledger, table;
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
    auto step = [&] {
        zero_gradients(g);
        accumulate_gradients(
            g, s.micro_batches, [&](int, int) { return *batch; }, 1.0f / N, true);
        g.state.update(g.stats.data, make_optimizer(o, 0), 1.0f);
    };
    Counted counted;
    {
        simt::CountTraffic count;
        step();
        CHECK(read_result(g, 1).finite);
        g.state.synchronize();
        counted.device = count.take();
    }
    g.products.weights_changed(false);
    Ledger asked = {sizeof(floatX), s.T};
    ledger = &asked;
    step();
    ledger = nullptr;
    for (const LedgerEntry& entry : asked.entries) {
        if (!entry.launcher) continue;
        const LaunchCost& cost = entry.cost;
        counted.ledger[entry.launcher] +=
            {cost.launches, (size_t)cost.read, (size_t)cost.written, cost.product.flops()};
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

TEST_CASE("a step reads and writes what launchers and the table say" * doctest::test_suite("long")) {
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
                  {"gpt with biases of queries, keys and values", gpt_with_qkv_bias, Recompute::none},
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
            auto [device, ledger, table] =
                counted(model.config(s.C), s, model.recompute, model.fp8, model.optimizer, model.schedule);
            for (auto& [launcher, was] : device) {
                CAPTURE(launcher);
                for (simt::Traffic says : {ledger[launcher], table[launcher]}) {
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
            }
            CHECK(ledger.size() == device.size());
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

// A step of a preset on an H200.
struct Step {
    std::string model;
    int B, T;
    Recompute recompute;
    bool master;
    double share;  // the part of the card's FLOP/s, as MFU counts them, that is to be predicted
    bool fp8 = false, fast_gradients = false;
    int micro_batches = 4;

    ModelConfig config() const {
        ModelConfig c = find_preset(model)->config;
        complete(c);
        return c;
    }
    double parameters() const { return (double)parameter_layout(config()).size(); }
    std::vector<Pass> passes() const {
        ModelConfig c = config();
        Workload w{.B = B,
                   .T = T,
                   .training = true,
                   .recompute = recompute,
                   .loss_chunk = chosen_loss_chunk(c, B * T),
                   .fp8 = fp8,
                   .fast_gradients = fast_gradients};
        CHECK(memory_total(memory_classes(c, w, {.keep_master = master})) < 149e9);
        StepPasses passes(c, w, Stage(c, {}, {}, true), micro_batches, parameters(), {.keep_master = master});
        return passes.rows;
    }
    // Products are taken to begin more slowly than the rates fitted on published runs say.
    double seconds(const std::vector<Pass>& passes) const {
        Machine machine = h200();
        machine.gemm_half_k = 110;
        return predicted_time(machine, config().head_size, passes).all();
    }
    double predicted_share() const {
        double tokens = (double)B * T * micro_batches;
        return flops_per_token(config(), T, false) * tokens / seconds(passes()) / h200().flops;
    }
    // The part of the step that a change to its passes would save.
    template <typename Change>
    double gain(Change&& change) const {
        std::vector<Pass> before = passes(), after = before;
        change(after);
        return 1 - seconds(after) / seconds(before);
    }
};

const Step gpt2_124m = {"gpt2-124M", 64, 1024, Recompute::none, true, 0.535},
           gpt2_1558m = {"gpt2-1558M", 32, 1024, Recompute::none, true, 0.575},
           llama3_8b = {"llama3-8B", 1, 8192, Recompute::elementwise, false, 0.66};

bool is_of(const Pass& pass, std::string_view launcher) {
    return pass.launcher && pass.launcher == launcher;
}
bool is_fill_of(const Pass& pass, double bytes) {
    return !pass.launcher && pass.written == bytes;
}

}  // namespace

// Predictions are no measurements: this holds that no change makes steps longer by what the table knows.
TEST_CASE("predicted shares of an H200's published FLOP/s") {
    CHECK(h200().gemm_flops == doctest::Approx(720e12).epsilon(0.01));
    CHECK(h200().memory_bandwidth == doctest::Approx(4.3e12).epsilon(0.01));
    for (const Step& step : {gpt2_124m, gpt2_1558m, llama3_8b}) {
        CAPTURE(step.model);
        double share = step.predicted_share();
        CHECK(share >= step.share);
        CHECK(share < step.share + 0.03);  // or the table has lost a pass
    }
    double bf16 = llama3_8b.predicted_share();
    Step fp8 = llama3_8b;
    fp8.fp8 = true;
    CHECK(fp8.predicted_share() > 1.24 * bf16);
    fp8.fast_gradients = true;
    CHECK(fp8.predicted_share() > 1.3 * bf16);
    CHECK(fp8.predicted_share() < 1.33 * bf16);
}

TEST_CASE("what the sums of biases' gradients, made by kernels that write the matrices, save of a step") {
    for (auto [step, least] : {std::pair{gpt2_124m, 0.015}, {gpt2_1558m, 0.01}}) {
        ModelConfig c = step.config();
        double rows = (double)step.B * step.T, layers = (double)c.layers * step.micro_batches;
        double gain = -step.gain([&](std::vector<Pass>& passes) {
            std::erase_if(passes, [&](const Pass& pass) {
                return is_of(pass, "add_bias_sums") ||
                       (is_of(pass, "attention_backward") && pass.written == 12 * c.channels &&
                        pass.attention_flops == 0);
            });
            for (double width : {c.channels, c.channels, 3 * c.channels})
                passes.push_back({"matmul_backward_bias", layers, 2 * rows * width, 0, {}, 0, 0, 2});
        });
        CHECK(gain > least);
    }
}

// These were thought of, and are left out because of this.
TEST_CASE("what would save too little of a step") {
    struct {
        const Step& step;
        double first, bf16_gradients;
    } of_steps[] = {{gpt2_124m, 0.001, 0.002}, {gpt2_1558m, 0.001, 0.002}, {llama3_8b, 0.003, 0.005}};
    for (auto& [step, first, bf16_gradients] : of_steps) {
        CAPTURE(step.model);
        double P = step.parameters();
        // The first micro-batch writes gradients, and does not add to zeros.
        double gain = step.gain([&](std::vector<Pass>& passes) {
            CHECK(std::erase_if(passes, [&](const Pass& pass) { return is_fill_of(pass, 4 * P); }) == 1);
            for (Pass& pass : passes)
                if (pass.is_weight_gradient()) pass.read -= pass.written / step.micro_batches;
        });
        CHECK(gain > 0);
        CHECK(gain < first);
        // Gradients of weights in bf16.
        gain = step.gain([&](std::vector<Pass>& passes) {
            for (Pass& pass : passes) {
                if (is_fill_of(pass, 4 * P)) pass.written /= 2;
                if (pass.is_weight_gradient()) pass.read -= pass.written / 2, pass.written /= 2;
                if (is_of(pass, "sums_of_squares")) pass.read /= 2;
                if (is_of(pass, "optimizer_pass")) pass.read -= 2 * P;
            }
        });
        CHECK(gain > 0);
        CHECK(gain < bf16_gradients);
    }
    // GELU's gradient by a kernel behind the product, which adds up the columns of what it writes: that of a
    // bias then costs no pass, but the product's epilogue makes GELU's for less.
    for (const Step& step : {gpt2_124m, gpt2_1558m}) {
        CAPTURE(step.model);
        double width = 4.0 * step.config().channels, bytes = 2.0 * step.B * step.T * width;
        double gain = step.gain([&](std::vector<Pass>& passes) {
            CHECK(std::erase_if(passes, [&](const Pass& pass) {  // removes fc's passes alone
                      return is_of(pass, "matmul_backward_weight") && pass.launches == 2;
                  }) == step.config().layers);
            for (size_t i = 0; i < passes.size(); i++) {
                if (!is_of(passes[i], "matmul_backward_gelu")) continue;
                passes[i].launcher = "matmul_backward_input";
                passes[i].read -= bytes;
                passes.push_back({"elementwise", passes[i].times, 2 * bytes, bytes});
            }
        });
        CHECK(gain < 0);
    }
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
