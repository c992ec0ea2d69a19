// The simulated step: it waits as the formulas of the schedules say, and no faster link makes it slower.
// devices: cpu
#include <doctest/doctest.h>

#include "comm/plan_machine.h"
#include "comm/memory_plan.h"
#include "comm/plan_simulator.h"
#include "test/support/program.h"
#include "data/options/presets.h"

using enum PipelineSchedule;

namespace {

ModelConfig preset(const char* name) {
    ModelConfig c = find_preset(name)->config;
    complete(c);
    return c;
}

Layout layout_of(const ModelConfig& c, int tp, const PipelineShape& shape, int dp, int shard) {
    int parts = shape.stages * shape.chunks;
    return {.mesh = {.tp = tp, .pp = shape.stages, .dp = dp, .shard = shard},
            .row_chunks = tp > 1 ? 4 : 1,
            .pipeline = shape,
            .split = even_split(c.layers, parts, [](int, int begin, int end) { return end - begin; })};
}

Options options_of(const ModelConfig& c) {
    Options o;
    (ModelConfig&)o = c;
    return o;
}

// Everything that a simulation refers to.
struct Simulation {
    ModelConfig config;
    Machine machine;
    Layout layout;
    Workload workload;
    MicroBatchTime times;
    ParameterLayout parameters;
    int zero;
    bool overlap = true;

    Simulation(const ModelConfig& c, const Machine& m, const Layout& cut, int B, int zero,
               Recompute recompute = Recompute::none)
        : config(c),
          machine(m),
          layout(cut),
          workload{.B = B,
                   .T = c.context,
                   .training = true,
                   .recompute = recompute,
                   .loss_chunk = chosen_loss_chunk(c, B * c.context, m.element_bytes),
                   .element_bytes = (size_t)m.element_bytes},
          times(micro_batch_time(options_of(c), workload, cut, m)),
          parameters(parameter_layout(c, cut.mesh.shard, {.tp = cut.mesh.tp})),
          zero(zero) {}

    StepToSimulate step() const {
        return {machine,
                config,
                layout,
                times,
                parameters,
                zero,
                1,
                overlap,
                (double)workload.element_bytes * stream_size(config, workload, layout),
                workload.element_bytes};
    }
    double seconds(MessagesTaken taken = {}) const { return simulate_step(step(), taken).seconds; }
};

// All layers alike, and nothing beside them.
void make_equal(MicroBatchTime& times, double forward, double input, double weight) {
    for (LayerTime& layer : times.layers)
        layer = {{forward, 0}, {forward, 0}, {input, 0}, {weight, 0}, {input + weight, 0}};
    for (WorkTime* other : {&times.embedding_forward, &times.embedding_backward, &times.head_forward,
                            &times.head_backward, &times.stream})
        *other = {};
    times.others = {};
}

constexpr MessagesTaken no_messages = {false, false, false};

}  // namespace

TEST_CASE("without messages, stages wait as the formulas of the schedules say") {
    ModelConfig c = preset("gpt2-350M");  // 24 layers
    for (PipelineShape shape : {PipelineShape{gpipe, 4, 8},
                                {one_f_one_b, 4, 8},
                                {one_f_one_b, 8, 16},
                                {interleaved, 4, 8, 2},
                                {interleaved, 4, 8, 3},
                                {interleaved, 2, 6, 4},
                                {zero_bubble, 4, 8},
                                {zero_bubble, 8, 24},
                                {one_f_one_b, 1, 4}}) {
        CAPTURE((int)shape.schedule);
        CAPTURE(shape.stages);
        for (int zero : {0, 1}) {
            Simulation s(c, find_machine("h100"), layout_of(c, 1, shape, zero ? 8 : 1, zero ? 8 : 1), 1,
                         zero);
            make_equal(s.times, 1, 1, 1);
            SimulatedStep step = simulate_step(s.step(), no_messages);
            int p = shape.stages, m = shape.micro_batches;
            double bubble = (p - 1.0) / m / shape.chunks / (shape.schedule == zero_bubble ? 3 : 1);
            CHECK(step.bubble() == doctest::Approx(bubble));
            CHECK(step.seconds == doctest::Approx(m * 72.0 / p * (1 + bubble)));
        }
    }
}

TEST_CASE("a step waits for the stages as time_pipeline() does") {
    ModelConfig c = preset("gpt2-350M");
    for (PipelineShape shape :
         {PipelineShape{one_f_one_b, 4, 8}, {interleaved, 4, 8, 2}, {zero_bubble, 3, 7}}) {
        for (bool overlap : {true, false}) {
            Simulation s(c, find_machine("a100"), layout_of(c, 8, shape, 1, 1), 1, 0);
            make_equal(s.times, 1, 1.5, 0.5);
            s.overlap = overlap;
            double layers = 24.0 / shape.stages / shape.chunks;
            double transfer = message_seconds(s.machine, false, s.step().stream_bytes);
            PipelineCosts costs = {layers, 1.5 * layers, 0.5 * layers, transfer, overlap};
            CHECK(s.seconds({false, true, false}) == doctest::Approx(time_pipeline(shape, costs).seconds));
        }
    }
}

TEST_CASE("a faster link, or less to send, never makes a step slower") {
    ModelConfig gpt3 = preset("gpt3-6.7B"), yuan = preset("yuan2-2B");
    ModelConfig parallel = preset("llama3-8B");
    parallel.block = BlockKind::parallel;
    struct {
        const ModelConfig* config;
        int tp;
        PipelineShape shape;
        int dp, shard, zero;
        Recompute recompute;
    } cases[] = {{&gpt3, 8, {one_f_one_b, 4, 8}, 8, 8, 1, Recompute::none},
                 {&gpt3, 2, {interleaved, 4, 8, 2}, 8, 4, 2, Recompute::elementwise},
                 {&gpt3, 1, {one_f_one_b, 1, 2}, 64, 64, 3, Recompute::block},
                 {&parallel, 4, {zero_bubble, 4, 8}, 16, 16, 2, Recompute::mlp},
                 {&yuan, 4, {zero_bubble, 2, 4}, 16, 4, 3, Recompute::elementwise},
                 {&yuan, 1, {gpipe, 2, 4}, 3, 1, 0, Recompute::none}};
    for (auto& one : cases) {
        CAPTURE(&one - cases);
        Layout cut = layout_of(*one.config, one.tp, one.shape, one.dp, one.shard);
        Machine machine = find_machine("h100");
        auto seconds = [&](const Machine& m, bool overlap) {
            Simulation s(*one.config, m, cut, 1, one.zero, one.recompute);
            s.overlap = overlap;
            s.times = micro_batch_time(options_of(s.config), s.workload, cut, m, overlap);
            return s.seconds();
        };
        double usual = seconds(machine, true);
        CHECK(seconds(machine, false) >= usual);
        for (double Machine::*rate : {&Machine::node_bandwidth, &Machine::network, &Machine::gemm_flops,
                                      &Machine::memory_bandwidth}) {
            for (double faster : {1.25, 2.0, 8.0}) {
                Machine better = machine;
                better.*rate *= faster;
                CHECK(seconds(better, true) <= usual * (1 + 1e-12));
            }
        }
        for (double Machine::*latency : {&Machine::link_latency, &Machine::network_latency}) {
            Machine better = machine;
            better.*latency /= 2;
            CHECK(seconds(better, true) <= usual);
        }
        Simulation s(*one.config, machine, cut, 1, one.zero, one.recompute);
        double without = s.seconds(no_messages);
        for (MessagesTaken taken :
             {MessagesTaken{true, false, false}, {false, true, false}, {false, false, true}}) {
            CHECK(s.seconds(taken) >= without);
            CHECK(s.seconds(taken) <= usual);
        }
    }
}

TEST_CASE("messages take what rings, trees and nodes let them") {
    Machine m = find_machine("h100");
    m.node_bandwidth = 400e9, m.network = 50e9, m.link_latency = 1e-6, m.network_latency = 1e-5;
    double bytes = 8e9;
    CHECK(gather_seconds(m, {1, 1}, bytes) == 0);
    CHECK(gather_seconds(m, {8, 1}, bytes) == doctest::Approx(7.0 / 8 * bytes / 400e9 + 7e-6));
    // One rank of each node has one card's network, and eight of them have that of eight.
    CHECK(gather_seconds(m, {8, 8}, bytes) == doctest::Approx(7.0 / 8 * bytes / 50e9 + 7e-5).epsilon(1e-9));
    CHECK(gather_seconds(m, {64, 1}, bytes) == doctest::Approx(63.0 / 64 * bytes / 400e9 + 8e-5 + 55e-6));
    CHECK(RankGroup{8, 2}.in_node(m) == 4);
    CHECK(RankGroup{8, 2}.nodes(m) == 2);
    CHECK(!RankGroup{2, 4}.crosses_nodes(m));
    CHECK(RankGroup{2, 8}.crosses_nodes(m));
    CHECK(RankGroup{16, 1}.in_node(m) == 8);
    // 0 ... 5, 6 ... 11 and so on: two of the second are in the first node.
    CHECK(RankGroup{6, 1}.in_node(m) == 2);
    CHECK(RankGroup{6, 1}.nodes(m) == 2);
    CHECK(RankGroup{3, 2}.in_node(m) == 1);
    CHECK(RankGroup{12, 1}.in_node(m) == 4);
    CHECK(RankGroup{10, 1}.nodes(m) == 2);
    CHECK(RankGroup{11, 1}.nodes(m) == 3);
    // Small sums go by trees, large ones by rings.
    CHECK(sum_seconds(m, {1024, 8}, 16) < 100 * m.network_latency);
    CHECK(sum_seconds(m, {2, 8}, bytes) == doctest::Approx(bytes / 50e9 + 2e-5).epsilon(1e-9));
    // What goes straight from rank to rank has one card's network, and the links of its node besides.
    CHECK(exchange_seconds(m, {1, 1}, bytes) == 0);
    CHECK(exchange_seconds(m, {8, 1}, bytes) == doctest::Approx(7.0 / 8 * bytes / 400e9 + 7e-6));
    CHECK(exchange_seconds(m, {8, 8}, bytes) == doctest::Approx(7.0 / 8 * bytes / 50e9 + 1e-5).epsilon(1e-9));
    CHECK(exchange_seconds(m, {64, 1}, bytes) == doctest::Approx(56.0 / 64 * bytes / 50e9 + 17e-6));
    // Gradients in bf16 take half as long between nodes with one rank in each, and longer with eight.
    GradientMessages fp32 = {m, Dtype::fp32}, bf16 = {m, Dtype::bf16};
    double count = 1e9;
    CHECK(fp32.scatter_seconds({8, 8}, count) == gather_seconds(m, {8, 8}, 4 * count));
    CHECK(fp32.sum_seconds({8, 8}, count) == sum_seconds(m, {8, 8}, 4 * count));
    CHECK(bf16.scatter_seconds({8, 8}, count) ==
          doctest::Approx(fp32.scatter_seconds({8, 8}, count) / 2).epsilon(0.1));
    CHECK(bf16.sum_seconds({8, 8}, count) ==
          doctest::Approx(fp32.sum_seconds({8, 8}, count) / 2).epsilon(0.1));
    CHECK(bf16.scatter_seconds({64, 1}, count) > 2 * fp32.scatter_seconds({64, 1}, count));
    CHECK(bf16.sum_seconds({1, 1}, count) == 0);
}

TEST_CASE("what a layer takes is in the passes, and what tensor ranks send is beside it") {
    ModelConfig c = preset("gpt3-6.7B");
    Machine m = find_machine("h100");
    Simulation alone(c, m, layout_of(c, 1, {one_f_one_b, 1, 1}, 1, 1), 1, 0);
    const LayerTime& layer = alone.times.layers[1];
    CHECK(layer.forward.sending == 0);
    // gradients of the stream are copied for weights' gradients that are made later
    double later = layer.input_gradient.work + layer.weight_gradient.work;
    CHECK(later > layer.backward.work);
    CHECK(later < 1.02 * layer.backward.work);
    CHECK(layer.first.work < layer.forward.work);
    double stepped = (double)alone.parameters.size();
    CHECK(alone.seconds() ==
          doctest::Approx(alone.times.kinds.all() +
                          stepped * (alone.times.optimizer() + alone.times.others.clearing))
              .epsilon(1e-3));

    Simulation cut(c, m, layout_of(c, 8, {one_f_one_b, 1, 1}, 1, 1), 1, 0);
    const LayerTime& part = cut.times.layers[1];
    CHECK(part.forward.sending > 0);
    // The gradients of weights hide some of what those of inputs send; rows come together again behind them.
    CHECK(part.backward.sending < part.input_gradient.sending + part.weight_gradient.sending);
    CHECK(part.forward.work > layer.forward.work / 8);
    CHECK(part.forward.work < layer.forward.work / 4);
    // Blocks with both halves side by side send half as often.
    ModelConfig parallel = c;
    parallel.block = BlockKind::parallel;
    Simulation half(parallel, m, layout_of(parallel, 8, {one_f_one_b, 1, 1}, 1, 1), 1, 0);
    CHECK(half.times.layers[1].forward.sending < 0.75 * part.forward.sending);
}
