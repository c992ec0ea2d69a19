// Playing a step: its waits follow the formulas of the schedules, no faster link makes it slower, and ranks
// in a deadlock are named.
// devices: cpu
#include <doctest/doctest.h>

#include <functional>

#include "comm/machine.h"
#include "comm/plan_times.h"
#include "test/support/file_testing.h"
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
    return {.mesh = {.tp = tp, .pp = shape.stages, .dp = dp, .shard = shard, .ring = shape.chunks > 1},
            .row_chunks = tp > 1 ? 4 : 1,
            .pipeline = shape,
            .split = even_split(c.layers, parts, [](int, int begin, int end) { return end - begin; })};
}

Options options_of(const ModelConfig& c) {
    Options o;
    (ModelConfig&)o = c;
    return o;
}

// A step to be played, and the changes that a test makes to each stage's ledger.
struct Played {
    ModelConfig config;
    Machine machine;
    Layout layout;
    int zero = 0;
    Recompute recompute = Recompute::none;
    Overlap overlap = true;
    std::function<void(Ledger&, int stage)> change = [](Ledger&, int) {};

    Workload workload() const {
        return {.B = 1,
                .T = config.context,
                .training = true,
                .recompute = recompute,
                .loss_chunk = chosen_loss_chunk(config, config.context, machine.element_bytes),
                .element_bytes = (size_t)machine.element_bytes};
    }
    MicroBatchTime times() const {
        return micro_batch_time(options_of(config), workload(), layout, machine, overlap.tensor);
    }
    StepPlayer player() const {
        std::vector<int> numbers;
        for (int stage = 0; stage < layout.mesh.pp; stage++)
            numbers.push_back(rank_of(first_of_stage(stage), layout.mesh));
        StepPlayer player(machine, numbers);
        for (int stage = 0; stage < layout.mesh.pp; stage++) {
            Ledger book({workload().element_bytes}, config.context, config.vocab_size);
            record_steps(config, workload(), {.level = zero, .overlap = overlap},
                         make_optimizer(Options(), 0), layout, first_of_stage(stage),
                         {layout.pipeline.micro_batches});
            change(book, stage);
            player.add(book);
        }
        return player;
    }
    SimulatedStep step(const MessagesTaken& taken = {}) const { return player().play(taken)[0]; }
};

// Gives all layers the same times, and everything else zero.
auto equal_layers(double forward, double input, double weight) {
    return [=](Ledger& book, int) {
        int last_section = -1;
        for (LedgerEntry& entry : book.entries) {
            if (entry.kind != LedgerEntry::launch) continue;
            const Ledger::Section& section = book.sections[entry.section];
            std::string_view launcher = entry.launcher ? entry.launcher : "";
            double seconds = 0;
            if (launcher == "attention_forward") seconds = forward;
            if (launcher == "attention_backward" && entry.cost.flops() > 0)
                seconds = section.work == (int)PipelineWork::backward ? input + weight : input;
            if (section.work == (int)PipelineWork::weight_gradient && section.unit > 0 &&
                entry.section != last_section)
                seconds = weight, last_section = entry.section;
            entry.cost = {.launches = 0}, entry.seconds = seconds;
        }
    };
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
        for (int zero : {0, 1, 3}) {
            Played s = {c, find_machine("h100"), layout_of(c, 1, shape, zero ? 8 : 1, zero ? 8 : 1), zero};
            s.change = equal_layers(1, 1, 1);
            SimulatedStep step = s.step(no_messages);
            int p = shape.stages, m = shape.micro_batches;
            double bubble = (p - 1.0) / m / shape.chunks / (shape.schedule == zero_bubble ? 3 : 1);
            CHECK(step.bubble() == doctest::Approx(bubble));
            CHECK(step.seconds == doctest::Approx(m * 72.0 / p * (1 + bubble)));
        }
    }
}

TEST_CASE("only layers with a table take its time") {
    ModelConfig c = preset("gpt2-124M");
    auto times = [](const ModelConfig& c) {
        return Played{c, find_machine("h100"), layout_of(c, 1, {one_f_one_b, 1, 2}, 1, 1)}.times();
    };
    MicroBatchTime without = times(c);
    for (const char* pattern : {"", "2:1"}) {
        c.window = *pattern ? 64 : 0, c.window_pattern = pattern;
        c.ngram = "2,3", c.ngram_layers = "3,7";
        complete(c);
        MicroBatchTime with = times(c);
        CHECK(with.layers[3].forward > 1.01 * with.layers[6].forward);
        CHECK(with.layers[3].backward > 1.01 * with.layers[6].backward);
        CHECK(with.layers[9].forward == with.layers[6].forward);
        if (!*pattern) {
            CHECK(with.layers[7].forward == with.layers[3].forward);
            CHECK(with.layers[5].forward == doctest::Approx(without.layers[5].forward));
            CHECK(with.flops > without.flops);
        }
    }
}

TEST_CASE("a step waits for the stages as time_pipeline() does") {
    ModelConfig c = preset("gpt2-350M");
    for (PipelineShape shape :
         {PipelineShape{one_f_one_b, 4, 8}, {interleaved, 4, 8, 2}, {zero_bubble, 3, 7}}) {
        for (bool overlap : {true, false}) {
            CAPTURE((int)shape.schedule);
            CAPTURE(overlap);
            Played s = {c, find_machine("a100"), layout_of(c, 8, shape, 1, 1)};
            s.overlap = overlap;
            s.change = equal_layers(1, 1.5, 0.5);
            double layers = 24.0 / shape.stages / shape.chunks;
            double bytes = 2.0 * (double)stream_size(c, s.workload(), s.layout);
            const MeshShape& mesh = s.layout.mesh;
            GroupOfRanks link = {(int)mesh_groups.size(), 0, mesh.tp, 2, mesh.tp, blocks_of_links};
            double transfer = message_seconds(s.machine, link, bytes);
            PipelineCosts costs = {layers, 1.5 * layers, 0.5 * layers, transfer, overlap};
            CHECK(s.step({false, true, false}).seconds ==
                  doctest::Approx(time_pipeline(shape, costs).seconds));
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
        const Machine machine = find_machine("h100");
        auto seconds = [&](const Machine& m, Overlap overlap) {
            return Played{*one.config, m, cut, one.zero, one.recompute, overlap}.step().seconds;
        };
        double usual = seconds(machine, true);
        CHECK(seconds(machine, false) >= usual);
        for (bool Overlap::*kind : {&Overlap::tensor, &Overlap::pipeline, &Overlap::data}) {
            Overlap without_one = true;
            without_one.*kind = false;
            CHECK(seconds(machine, without_one) >= usual * (1 - 1e-12));
            CHECK(seconds(machine, without_one) <= seconds(machine, false) * (1 + 1e-12));
        }
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
        StepPlayer player = Played{*one.config, machine, cut, one.zero, one.recompute}.player();
        double without = player.play(no_messages)[0].seconds;
        for (MessagesTaken taken :
             {MessagesTaken{true, false, false}, {false, true, false}, {false, false, true}}) {
            double seconds = player.play(taken)[0].seconds;
            CHECK(seconds >= without);
            CHECK(seconds <= usual);
        }
    }
}

TEST_CASE("groups in a ledger have the ranks of those in a mesh") {
    for (MeshShape shape : {MeshShape{.tp = 4, .pp = 3, .dp = 4, .shard = 2, .copies = 2},
                            {.tp = 2, .pp = 2, .dp = 6, .shard = 3, .stage_group = true},
                            {.tp = 1, .pp = 5, .dp = 1, .shard = 1},
                            {.tp = 8, .pp = 1, .dp = 2, .shard = 1, .copies = 4}}) {
        for (int rank = 0; rank < shape.ranks(); rank++) {
            for (size_t group = 0; group < mesh_groups.size(); group++) {
                GroupOfRanks line = line_of(group, position_of(rank, shape), shape);
                std::vector<int> members = members_of(mesh_groups[group], rank, shape), here;
                for (int other = 0; other < shape.ranks(); other++)
                    if (line.ranks > 1 && line.has(other)) here.push_back(other);
                CHECK(here == (members.size() > 1 ? members : std::vector<int>()));
            }
        }
    }
}

TEST_CASE("ranks that wait for each other for ever are named") {
    ModelConfig c = preset("gpt2-350M");  // its embeddings are on two stages
    Played s = {c, find_machine("h100"), layout_of(c, 1, {one_f_one_b, 2, 4}, 1, 1)};
    CHECK(s.step().seconds > 0);
    auto is_call = [](MeshGroup group) {
        return [=](const LedgerEntry& entry) {
            return entry.kind == LedgerEntry::call && entry.call_of.group.number == (int)group;
        };
    };
    s.change = [&](Ledger& book, int stage) {
        auto call = std::ranges::find_if(book.entries, is_call(MeshGroup::embedding));
        REQUIRE(call != book.entries.end());
        if (stage == 1) call->kind = LedgerEntry::record, call->event = &s;  // removes the call
    };
    CHECK_REFUSED(s.step(), "rank 0 waits in call 0 of the group \"ends\", and rank 1 never reaches it");
    s.change = [&](Ledger& book, int stage) {
        auto ends = std::ranges::find_if(book.entries, is_call(MeshGroup::embedding)),
             world = std::ranges::find_if(book.entries, is_call(MeshGroup::world));
        if (stage == 1) std::swap(ends->call_of, world->call_of);
    };
    CHECK_REFUSED(s.step(), "a step never ends: rank 0 waits in call 0 of the group \"ends\", and rank 1");
    s.change = [](Ledger& book, int stage) {
        auto receive = std::ranges::find_if(book.entries, [](const LedgerEntry& entry) {
            return entry.kind == LedgerEntry::call && entry.call_of.operation == (int)Operation::receive;
        });
        REQUIRE(receive != book.entries.end());
        if (stage == 0) receive->kind = LedgerEntry::record, receive->event = &stage;
    };
    CHECK_REFUSED(s.step(), "a step never ends: rank 1 waits in call 3 of the group \"link\", and rank 0");
}

TEST_CASE("messages take what rings, trees and nodes let them") {
    Machine m = find_machine("h100");
    m.node_bandwidth = 400e9, m.network = 50e9, m.link_latency = 1e-6, m.network_latency = 1e-5;
    auto group = [](int ranks, int stride) { return GroupOfRanks{.stride = stride, .ranks = ranks}; };
    double bytes = 8e9;
    CHECK(gather_seconds(m, group(1, 1), bytes) == 0);
    CHECK(gather_seconds(m, group(8, 1), bytes) == doctest::Approx(7.0 / 8 * bytes / 400e9 + 7e-6));
    // One rank per node has one card's network bandwidth; eight per node have that of eight cards.
    CHECK(gather_seconds(m, group(8, 8), bytes) ==
          doctest::Approx(7.0 / 8 * bytes / 50e9 + 7e-5).epsilon(1e-9));
    CHECK(gather_seconds(m, group(64, 1), bytes) ==
          doctest::Approx(63.0 / 64 * bytes / 400e9 + 8e-5 + 55e-6));
    CHECK(in_nodes(m, group(8, 2)).in_node == 4);
    CHECK(in_nodes(m, group(8, 2)).nodes == 2);
    CHECK(in_nodes(m, group(2, 4)).nodes == 1);
    CHECK(in_nodes(m, group(2, 8)).nodes == 2);
    CHECK(in_nodes(m, group(16, 1)).in_node == 8);
    // 0 ... 5, 6 ... 11 and so on: the second group has two ranks in the first node.
    CHECK(in_nodes(m, group(6, 1)).in_node == 2);
    CHECK(in_nodes(m, group(6, 1)).nodes == 2);
    CHECK(in_nodes(m, group(3, 2)).in_node == 1);
    CHECK(in_nodes(m, group(12, 1)).in_node == 4);
    CHECK(in_nodes(m, group(10, 1)).nodes == 2);
    CHECK(in_nodes(m, group(11, 1)).nodes == 3);
    // Small sums use trees, large ones rings.
    CHECK(sum_seconds(m, group(1024, 8), 16) < 100 * m.network_latency);
    CHECK(sum_seconds(m, group(2, 8), bytes) == doctest::Approx(bytes / 50e9 + 2e-5).epsilon(1e-9));
    // Direct messages between ranks use one card's network, and in addition the links within the node.
    CHECK(exchange_seconds(m, group(1, 1), bytes) == 0);
    CHECK(exchange_seconds(m, group(8, 1), bytes) == doctest::Approx(7.0 / 8 * bytes / 400e9 + 7e-6));
    CHECK(exchange_seconds(m, group(8, 8), bytes) ==
          doctest::Approx(7.0 / 8 * bytes / 50e9 + 1e-5).epsilon(1e-9));
    CHECK(exchange_seconds(m, group(64, 1), bytes) == doctest::Approx(56.0 / 64 * bytes / 50e9 + 17e-6));
}

TEST_CASE("what a layer takes is in the passes, with what tensor ranks wait for") {
    ModelConfig c = preset("gpt3-6.7B");
    Machine m = find_machine("h100"), at_once = m;
    at_once.node_bandwidth = 1e18, at_once.link_latency = 0;
    auto layer_of = [](const ModelConfig& config, const Machine& machine, int tp, bool overlap = true) {
        Layout layout = layout_of(config, tp, {one_f_one_b, 1, 1}, 1, 1);
        return Played{config, machine, layout, 0, Recompute::none, overlap}.times().layers[1];
    };
    const LayerTime layer = layer_of(c, m, 1), part = layer_of(c, m, 8), work = layer_of(c, at_once, 8);
    CHECK(part.forward > work.forward);
    CHECK(work.forward > layer.forward / 8);
    CHECK(work.forward < layer.forward / 4);
    // Weight gradients hide part of the communication for input gradients; rows are re-gathered after them.
    CHECK(part.backward < layer_of(c, m, 8, false).backward);
    // Parallel blocks, with attention and MLP side by side, send half as often.
    ModelConfig parallel = c;
    parallel.block = BlockKind::parallel;
    CHECK(layer_of(parallel, m, 8).forward - layer_of(parallel, at_once, 8).forward <
          0.75 * (part.forward - work.forward));
    // If weight gradients are computed later, gradients of the residual stream are copied for them.
    auto seconds = [&](PipelineSchedule schedule) {
        return Played{c, m, layout_of(c, 1, {schedule, 1, 2}, 1, 1)}.step().seconds;
    };
    CHECK(seconds(zero_bubble) > seconds(one_f_one_b));
    CHECK(seconds(zero_bubble) < 1.02 * seconds(one_f_one_b));
}
