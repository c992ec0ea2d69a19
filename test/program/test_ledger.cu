/*
The ledger of a step (kernels/ledger.h) against what the simulated device reads and writes, and what follows
from it for real cards.
*/
// devices: simt-bf16
// ranks: 2
// seconds: 3
#include "kernels/cards.h"
#include "comm/plan_choice.h"
#include "test/program/model_testing.h"
#include "test/simt/simt.h"
#include "test/support/ranks.h"

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

// A step whose traffic is counted.
struct Case {
    std::string name;
    ModelConfig (*config)(int C);
    Recompute recompute;
    std::vector<Sizes> sizes;
    bool fp8 = false;
    OptimizerKind optimizer = OptimizerKind::adamw;
    PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
    int capability = 90;  // the card's
};

using TrafficByLauncher = std::map<std::string, simt::Traffic>;

struct Counted {
    TrafficByLauncher device, ledger;
};

// The traffic of a step on the simulated device, for this rank of `tp`, and by an imagined step's ledger.
Counted counted(const Case& one, const Sizes& s, const World& world, int tp) {
    const ModelConfig config = one.config(s.C);
    Options o;
    (ModelConfig&)o = config;
    o.optimizer = one.optimizer, o.async_save = false;
    o.tp = tp, o.pp = o.dp = o.shard_group = 1;
    Workload workload = {.B = s.B,
                         .T = s.T,
                         .training = true,
                         .recompute = one.recompute,
                         .loss_chunk = s.B * s.T / 2,
                         .fp8 = one.fp8};
    const ZeroSettings settings = zero_settings(o);
    Layout layout = {
        .mesh = mesh_shape(o), .row_chunks = tp > 1 ? 2 : 1, .pipeline = {one.schedule, 1, s.micro_batches}};
    int N = s.B * s.T;
    std::vector<int> tokens(N), targets(N);
    for (int i = 0; i < N; i++)  // tokens that are all different
        tokens[i] = (i * 7919) % config.vocab_size, targets[i] = (i * 31 + 7) % config.vocab_size;
    TestBatch batch(s.B, s.T, tokens, targets);
    auto step = [&](Gpt& g) {
        zero_gradients(g);
        accumulate_gradients(
            g, s.micro_batches, [&](int, int) { return *batch; }, 1.0f / N, true);
        g.state.update(g.stats.data, make_optimizer(o, 0), 1.0f);
    };
    Counted counted;
    attention_kernels = one.capability == 90 ? AttentionKernels::wgmma : AttentionKernels::mma;
    Mesh mesh = tp > 1 ? Mesh(world, layout.mesh, nullptr) : Mesh();
    {
        Gpt g(config, workload, settings, mesh, layout);
        initialize(g.state, 5);
        g.state.synchronize();
        simt::CountTraffic count;
        step(g);
        CHECK(read_result(g, 1).finite);
        g.state.synchronize();
        counted.device = count.take();
    }
    Ledger book({sizeof(floatX), one.capability}, s.T, config.vocab_size);
    Mesh imagined(layout.mesh, mesh.position);
    Gpt g(config, workload, settings, imagined, layout);
    book.forget();
    step(g);
    for (const LedgerEntry& entry : book.entries) {
        if (entry.kind != LedgerEntry::launch || !entry.launcher) continue;
        const LaunchCost& cost = entry.cost;
        counted.ledger[entry.launcher] +=
            {cost.launches, (size_t)cost.read, (size_t)cost.written, cost.product.flops()};
    }
    return counted;
}

void compare(const Case& one, const World& world, int tp) {
    for (const Sizes& s : one.sizes) {
        CAPTURE(one.name);
        CAPTURE(s.T);
        CAPTURE(s.C);
        auto [device, ledger] = counted(one, s, world, tp);
        for (auto& [launcher, was] : device) {
            CAPTURE(launcher);
            simt::Traffic says = ledger[launcher];
            CHECK(says.launches == was.launches);
            CHECK(says.flops == doctest::Approx(was.flops));
            // a piece of the list that holds tokens of two ranks is read by both
            double within = tp > 1 && launcher == "embedding_backward" ? 0.2 : 0.01;
            constexpr double single_numbers = 256;  // bytes per launch
            auto close = [&](size_t bytes, size_t want) {
                return std::abs((double)bytes - (double)want) <=
                       within * (double)want + single_numbers * (double)was.launches;
            };
            CHECK_MESSAGE(close(says.read, was.read), says.read, " for ", was.read);
            CHECK_MESSAGE(close(says.written, was.written), says.written, " for ", was.written);
        }
        CHECK(ledger.size() == device.size());
    }
}

}  // namespace

TEST_CASE("a step reads and writes what launchers say" * doctest::test_suite("long")) {
    constexpr Sizes large = {1, 192, 128, 1}, small = {1, 64, 128, 2}, wide = {1, 64, 192, 1};
    const Case cases[] = {
        {"gpt", gpt, Recompute::none, {large, small, wide}},
        {"gpt without bias", gpt_without_bias, Recompute::elementwise, {large}},
        {"gpt with biases of queries, keys and values", gpt_with_qkv_bias, Recompute::none, {large}},
        {"llama", llama, Recompute::elementwise, {large, small, wide}},
        {"yuan", yuan, Recompute::mlp, {large}},
        {"parallel", parallel, Recompute::block, {large}},
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
        {"parallel in fp8", parallel, Recompute::block, {small}, true},
        {"yuan with kernels of an A100",
         yuan,
         Recompute::none,
         {large, small},
         false,
         OptimizerKind::adamw,
         PipelineSchedule::one_f_one_b,
         80},
        {"llama with kernels of an A100",
         llama,
         Recompute::none,
         {large},
         false,
         OptimizerKind::adamw,
         PipelineSchedule::one_f_one_b,
         80}};
    int number = 0;
    for (const Case& one : cases)  // the ranks share the cases
        if (number++ % test_world().size() == test_world().rank()) compare(one, test_world(), 1);
}

TEST_CASE("a step of a tensor rank reads and writes what launchers say" * doctest::test_suite("long")) {
    constexpr Sizes one = {1, 128, 256, 1};
    const Case cases[] = {{"gpt", gpt, Recompute::none, {one}},
                          {"llama", llama, Recompute::elementwise, {one}},
                          {"parallel", parallel, Recompute::mlp, {one}},
                          {"llama with Muon", llama, Recompute::none, {one}, false, OptimizerKind::muon},
                          {"gpt in fp8", gpt, Recompute::none, {one}, true},
                          {"yuan in fp8", yuan, Recompute::block, {one}, true},
                          {"llama in fp8, weights later",
                           llama,
                           Recompute::none,
                           {one},
                           true,
                           OptimizerKind::adamw,
                           PipelineSchedule::zero_bubble}};
    for (const Case& one : cases) compare(one, test_world(), test_world().size());
}

namespace {

Machine h200() {
    cudaDeviceProp device = {};
    snprintf(device.name, sizeof device.name, "NVIDIA H200");
    device.multiProcessorCount = 132;
    return machine_of(device, 0, 0);
}

// A machine whose products reach their rate more slowly than the fit to published runs says.
Machine slow_products() {
    Machine machine = h200();
    machine.gemm_half_k = 110;
    return machine;
}

// A step of a preset on an H200.
struct Step {
    std::string model;
    int B, T;
    Recompute recompute;
    bool master;
    double share;  // the predicted share of the card's FLOP/s, counted as MFU counts them, must reach this
    bool fp8 = false, fast_gradients = false;
    int micro_batches = 4;

    ModelConfig config() const {
        ModelConfig c = find_preset(model)->config;
        complete(c);
        return c;
    }
    double parameters() const { return (double)parameter_layout(config()).size(); }
    Workload workload() const {
        return {.B = B,
                .T = T,
                .training = true,
                .recompute = recompute,
                .loss_chunk = chosen_loss_chunk(config(), B * T),
                .fp8 = fp8,
                .fast_gradients = fast_gradients};
    }
    // The ledger of its passes and of its update, on one device.
    std::vector<LedgerEntry> entries() const {
        ModelConfig c = config();
        Workload w = workload();
        ZeroSettings settings = {.keep_master = master};
        CHECK(memory_total(memory_classes(c, w, settings)) < 149e9);
        Ledger book({w.element_bytes}, T, c.vocab_size);
        Gpt g(c, w, settings);
        book.forget();
        zero_gradients(g);
        DeviceArray<int> numbers(batch_ints(B, T));
        Batch batch = {batch_at((const int*)numbers.data, B, T), B, T};
        accumulate_gradients(
            g, micro_batches, [&](int, int) { return batch; }, 1.0f, true);
        g.state.update(g.stats.data, make_optimizer(Options(), 0), 1.0f);
        return book.entries;
    }
    static double seconds(const std::vector<LedgerEntry>& entries) {
        double seconds = 0;
        for (const LedgerEntry& entry : entries)
            if (entry.kind == LedgerEntry::launch) seconds += launch_time(slow_products(), entry).all();
        return seconds;
    }
    double predicted_share() const {
        double tokens = (double)B * T * micro_batches;
        return flops_per_token(config(), T, false) * tokens / seconds(entries()) / h200().flops;
    }
    // The share of the step's time that a change to its launches would save.
    template <typename Change>
    double gain(Change&& change) const {
        std::vector<LedgerEntry> before = entries(), after = before;
        change(after);
        return 1 - seconds(after) / seconds(before);
    }
};

const Step gpt2_124m = {"gpt2-124M", 64, 1024, Recompute::none, true, 0.535},
           gpt2_1558m = {"gpt2-1558M", 32, 1024, Recompute::none, true, 0.575},
           llama3_8b = {"llama3-8B", 1, 8192, Recompute::elementwise, false, 0.66};

bool is_of(const LedgerEntry& entry, std::string_view launcher) {
    return entry.launcher && entry.launcher == launcher;
}
// Weight gradients and column sums are recorded under the same launcher.
bool is_weight_gradient(const LedgerEntry& entry) {
    return (is_of(entry, "matmul_backward_weight") || is_of(entry, "fp8_matmul_backward_weight")) &&
           entry.cost.product.sums > 0;
}
LedgerEntry launch_of(const char* launcher, LaunchCost cost) {
    return {.kind = LedgerEntry::launch, .stream = nullptr, .launcher = launcher, .cost = cost};
}

}  // namespace

// Predictions are not measurements: this only ensures that no change makes steps longer by the ledger.
TEST_CASE("predicted shares of an H200's published FLOP/s") {
    CHECK(h200().gemm_flops == doctest::Approx(720e12).epsilon(0.01));
    CHECK(h200().memory_bandwidth == doctest::Approx(4.3e12).epsilon(0.01));
    for (const Step& step : {gpt2_124m, gpt2_1558m, llama3_8b}) {
        CAPTURE(step.model);
        double share = step.predicted_share();
        CHECK(share >= step.share);
        CHECK(share < step.share + 0.03);  // otherwise the ledger has lost a launch
    }
    double bf16 = llama3_8b.predicted_share();
    Step fp8 = llama3_8b;
    fp8.fp8 = true;
    CHECK(fp8.predicted_share() > 1.24 * bf16);
    fp8.fast_gradients = true;
    CHECK(fp8.predicted_share() > 1.29 * bf16);
    CHECK(fp8.predicted_share() < 1.33 * bf16);
}

TEST_CASE("a step is played as its launches say, whether passes are written down once or each time") {
    Step kept = gpt2_124m, made_again = llama3_8b;  // their fp8 copies of weights
    kept.fp8 = made_again.fp8 = true;
    for (const Step& step : {gpt2_124m, llama3_8b, kept, made_again}) {
        CAPTURE(step.model);
        CAPTURE(step.fp8);
        Ledger book({2}, step.T, step.config().vocab_size);
        record_steps(
            step.config(), step.workload(), {.keep_master = step.master}, make_optimizer(Options(), 0),
            {.pipeline = {PipelineSchedule::one_f_one_b, 1, step.micro_batches}}, {}, {step.micro_batches});
        StepPlayer player(slow_products(), {0});
        player.add(book);
        std::vector<SimulatedStep> steps = player.play();
        CHECK(steps.size() == 1);
        CHECK(steps[0].seconds == doctest::Approx(Step::seconds(step.entries())).epsilon(1e-3));
        CHECK(steps[0].busy[0] + steps[0].optimizer == doctest::Approx(steps[0].seconds));
    }
}

TEST_CASE("what the sums of biases' gradients, made by kernels that write the matrices, save of a step") {
    for (auto [step, least] : {std::pair{gpt2_124m, 0.015}, {gpt2_1558m, 0.01}}) {
        ModelConfig c = step.config();
        double rows = (double)step.B * step.T, layers = c.layers * step.micro_batches;
        double gain = -step.gain([&](std::vector<LedgerEntry>& entries) {
            std::erase_if(entries, [&](const LedgerEntry& entry) {
                return is_of(entry, "accumulate") ||
                       (is_of(entry, "attention_backward") && entry.cost.written == 12 * c.channels &&
                        entry.cost.flops() == 0);
            });
            for (double width : {c.channels, c.channels, 3 * c.channels})
                for (int i = 0; i < layers; i++)
                    entries.push_back(
                        launch_of("matmul_backward_bias", {.read = 2 * rows * width, .launches = 2}));
        });
        CHECK(gain > least);
    }
}

// Ideas that are left out because they would save too little.
TEST_CASE("what would save too little of a step") {
    for (auto& [step, bf16_gradients] :
         {std::pair{gpt2_124m, 0.002}, {gpt2_1558m, 0.002}, {llama3_8b, 0.005}}) {
        CAPTURE(step.model);
        double P = step.parameters();
        // Weight gradients in bf16.
        double gain = step.gain([&](std::vector<LedgerEntry>& entries) {
            double stepped = 0;
            for (LedgerEntry& entry : entries) {
                LaunchCost& cost = entry.cost;
                const ProductShape& p = cost.product;
                if (is_weight_gradient(entry)) {
                    cost.written /= 2;
                    if (cost.read > 2 * (p.rows + p.columns) * p.sums) cost.read -= cost.written;  // it adds
                }
                if (is_of(entry, "sums_of_squares")) cost.read /= 2;
                if (!is_of(entry, "optimizer_pass")) continue;
                double elements = cost.read / (4 + 8 + (step.master ? 4 : 2));
                cost.read -= 2 * elements, stepped += elements;
            }
            CHECK(stepped == doctest::Approx(P).epsilon(1e-3));  // without the padding of units
        });
        CHECK(gain > 0);
        CHECK(gain < bf16_gradients);
    }
    // GELU's gradient by a kernel after the product, which also sums the columns that it writes: the bias
    // gradient then needs no pass of its own, but the product's epilogue computes GELU's gradient for less.
    for (const Step& step : {gpt2_124m, gpt2_1558m}) {
        CAPTURE(step.model);
        double width = 4.0 * step.config().channels, bytes = 2.0 * step.B * step.T * width;
        double gain = step.gain([&](std::vector<LedgerEntry>& entries) {
            CHECK(std::erase_if(entries, [&](const LedgerEntry& entry) {  // removes only the sums of fc
                      return is_of(entry, "matmul_backward_weight") && entry.cost.launches == 2;
                  }) == step.config().layers * step.micro_batches);
            for (size_t i = 0; i < entries.size(); i++) {
                if (!is_of(entries[i], "matmul_backward_gelu")) continue;
                entries[i].launcher = "matmul_backward_input";
                entries[i].cost.read -= bytes;
                entries.push_back(launch_of("elementwise", {.read = 2 * bytes, .written = bytes}));
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
    std::string text = prediction_text(h200(), 1e15, true, o, w);
    CHECK(text.find("% MFU") != std::string::npos);
    CHECK(text.find("none of it is measured") != std::string::npos);
    CHECK(prediction_text({}, 1e15, true, o, w).empty());
    CHECK(prediction_text(h200(), 1e15, false, o, w).empty());
    o.offload = Offload::optimizer;
    CHECK(prediction_text(h200(), 1e15, true, o, w).empty());
}
