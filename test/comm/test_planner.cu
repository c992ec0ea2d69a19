// The plan command: its search finds the result of an exhaustive search, its memory equals a run's, and
// requests that cannot be planned are refused with a remedy.
// devices: cpu
// seconds: 20
#include <doctest/doctest.h>

#include "test/comm/published_runs.h"
#include "test/support/file_testing.h"
#include "test/support/head_parts.h"

namespace {

PlanLine plan_line(std::string words) {
    words = "plan " + words;
    std::vector<std::string> arguments = words_of(words);
    return parse_plan(read_arguments(command_plan, arguments));
}

std::string planned_text(const std::string& words) {
    return plan(plan_line(words));
}
nlohmann::json planned(const std::string& words) {
    return nlohmann::json::parse(planned_text(words + " --format json"));
}

// A model of four layers on cards with little memory and slow links, so that every technique helps somewhere.
constexpr const char* small_model =
    "--model gpt2-350M --layers 4 --global-batch 32k --gpus 8 --tokens 1G --machine ";

std::string small_machine(const TemporaryFolder& folder, double memory) {
    Machine machine = find_machine("a100");
    machine.memory = memory, machine.node_bandwidth = 20e9, machine.network = 5e9, machine.node = 4;
    write_file(folder / "small.json", machine_to_json(machine).dump());
    return folder / "small.json";
}

struct Planned {
    PlanLine line;
    Machine machine;
    PlanTask task;
    Planner planner;
    explicit Planned(const std::string& words)
        : line(plan_line(words)),
          machine(find_machine(line.command.machine)),
          task(plan_task(line, machine)),
          planner(task) {}

    Cut cut(int tp = 1, int pp = 1, int dp = 1, int micro_batch = 1,
            PipelineSchedule schedule = PipelineSchedule::one_f_one_b, int chunks = 1, int zero = 0,
            int shard = 1, Recompute recompute = Recompute::none) const {
        Cut cut = on_one_rank(task.options);
        cut.tp = tp, cut.pp = pp, cut.dp = dp, cut.micro_batch = micro_batch;
        cut.pp_schedule = schedule, cut.pp_chunks = chunks;
        cut.zero = zero, cut.shard_group = shard, cut.recompute = recompute;
        return cut;
    }
};

// Calls visit(cut) for every cut that divides the batch and the model.
template <typename Visit>
void each_cut(Planned& p, Visit&& visit) {
    using enum PipelineSchedule;
    for (int tp : {1, 2, 4}) {
        for (int pp : {1, 2, 3, 4}) {
            for (int dp : {1, 2, 4, 8}) {
                if (tp * pp * dp > p.task.devices) continue;
                for (int micro_batch : {1, 2, 4, 8, 16, 32}) {
                    for (auto schedule : {gpipe, one_f_one_b, interleaved, zero_bubble}) {
                        for (int chunks : {1, 2, 4}) {
                            if (pp == 1 && schedule != one_f_one_b) continue;
                            if (schedule == interleaved && chunks == 1) continue;
                            for (int zero = 0; zero <= 3; zero++) {
                                for (int shard : {1, 2, 4, 8}) {
                                    if (zero == 0 && shard > 1) continue;
                                    for (int kind = 0; kind <= (int)Recompute::block; kind++) {
                                        Cut cut = p.cut(tp, pp, dp, micro_batch, schedule, chunks, zero,
                                                        shard, Recompute(kind));
                                        cut.tp_overlap = p.planner.fastest_row_chunks(cut);
                                        if (p.planner.is_possible(cut)) visit(cut);
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

}  // namespace

TEST_CASE("the search finds the fastest of all layouts that fit") {
    TemporaryFolder folder;
    for (auto [memory, layers] :
         {std::pair{2.0e9, "time"}, {2.6e9, "time"}, {40e9, "time"}, {2.6e9, "memory"}}) {
        CAPTURE(memory);
        CAPTURE(layers);
        Planned p(small_model + small_machine(folder, memory));
        p.task.options.pp_layers = layers;
        std::vector<PlannedStep> found = p.planner.best(3);
        REQUIRE(found.size() == 3);
        double fastest = HUGE_VAL;
        int possible = 0, fit = 0;
        each_cut(p, [&](const Cut& cut) {
            possible++;
            double bound = p.planner.bound(cut);
            if (bound >= fastest || !p.planner.fits(cut)) return;
            fit++;
            PlannedStep step = p.planner.planned(cut);
            CHECK(bound <= step.seconds * (1 + 1e-9));
            fastest = std::min(fastest, step.seconds);
        });
        CHECK(possible > 1000);
        CHECK(fit >= 3);
        CHECK(found[0].seconds == doctest::Approx(fastest).epsilon(1e-9));
        for (const PlannedStep& step : found) {
            CHECK(p.planner.fits(step.cut));
            CHECK(step.seconds == p.planner.planned(step.cut).seconds);
            CHECK(step.seconds >= found[0].seconds);
        }
    }
}

TEST_CASE("where gradients are cut, groups of ranks are chosen by what they send for every micro-batch") {
    std::string line = "--model llama3-8B --machine a100 --gpus 64 --global-batch 2M --sequence-length 2048 "
                       "--micro-batch 1 --tp 4 --pp 1 --zero 2";
    double best = Planned(line).planner.best(1).at(0).seconds;
    for (int shard : {2, 4, 8, 16}) {
        auto with = Planned(line + text(" --shard-group %d", shard)).planner.best(1);
        if (!with.empty()) CHECK(best <= with[0].seconds);
    }
}

TEST_CASE("layers that are added to a model take time and memory in its plans") {
    std::string line = "--model llama3-8B --machine h100 --gpus 8 --global-batch 512k --explain --zero 1";
    nlohmann::json plain = planned(line)["layouts"][0];
    nlohmann::json filtered = planned(line + " --local-filter on")["layouts"][0];
    for (const char* field : {"seconds", "memory_bytes"}) CHECK(filtered[field] > plain[field]);
    CHECK(filtered["seconds_of"]["products"] > plain["seconds_of"]["products"]);
    CHECK(filtered["seconds_of"]["other_kernels"] > plain["seconds_of"]["other_kernels"]);
}

TEST_CASE("the rows that a switch adds to the tables are in every plan") {
    struct Figures {
        double seconds;
        long long micro_batches;
        std::map<std::string, double> memory;
        std::vector<TensorRow> tensors;
        double activations = 0;  // bytes
        double passes =
            0;  // seconds of a micro-batch, if each launch ran at the full rate of memory or of products
    };
    auto figures = [&](const char* filter) {
        Planned p("--model llama3-8B --machine h100 --gpus 64 --global-batch 512k --explain --tp 2 --zero 1 "
                  "--micro-batch 1 --recompute none --local-filter " +
                  std::string(filter));
        const Cut cut = given_cut(p.planner, p.line);
        const Options o = p.planner.options_of(cut);
        Workload w = training_workload(o, cut.recompute);
        w.element_bytes = 2;
        const Stage stage(o, {.mesh = {.tp = 2}}, {}, true);
        PlannedStep step = p.planner.planned(cut);
        Figures f = {step.seconds, p.planner.micro_batches(cut), {}, tensor_table(o)};
        for (const MemoryClass& one : step.memory) f.memory[one.name] += (double)one.bytes;
        for (const ActivationRow& row : activation_table(o, w, stage))
            f.activations += (double)(row.stride() * row.instances(stage));
        Ledger book(p.machine.ledger_card(), w.T, o.vocab_size);
        record_steps(o, w, {}, make_optimizer(Options(), 0), {.mesh = {.tp = 2}}, {}, {1});
        for (const LedgerEntry& entry : book.entries)
            if (book.sections[entry.section].work >= 0)
                f.passes += std::max((entry.cost.read + entry.cost.written) / p.machine.memory_bandwidth,
                                     entry.cost.product.flops() / p.machine.gemm_flops);
        return f;
    };
    const Figures plain = figures("off"), with = figures("on");
    auto more = [&](const char* name) { return with.memory.at(name) - plain.memory.at(name); };
    constexpr int layers = 32, shards = 32;

    double elements = 0;
    for (const TensorRow& row : with.tensors)
        if (std::string_view(row.name).starts_with("filter"))
            elements += layers * (double)row.rows * (double)std::max<size_t>(row.cols, 1) / 2;
    REQUIRE(elements > 5e8);
    CHECK(more("parameters") == doctest::Approx(2 * elements).epsilon(0.01));
    CHECK(more("gradients") == doctest::Approx(4 * elements).epsilon(0.01));
    CHECK(more("optimizer") == doctest::Approx(12 * elements / shards).epsilon(0.01));

    REQUIRE(with.activations - plain.activations > 1e9);
    CHECK(more("activations") == doctest::Approx(with.activations - plain.activations).epsilon(0.01));

    double least = (double)with.micro_batches * (with.passes - plain.passes);
    REQUIRE(least > 0.1 * plain.seconds);
    CHECK(with.seconds - plain.seconds > 0.8 * least);
}

TEST_CASE("an optimizer takes what its passes go over, and what it keeps") {
    std::string line = "--model gpt2-1558M --machine h100 --global-batch 64k --micro-batch 2 --zero 1 "
                       "--recompute none --explain --gpus ";
    auto layout = [&](int gpus, const char* optimizer) {
        return planned(line + text("%d --optimizer %s", gpus, optimizer))["layouts"][0];
    };
    nlohmann::json adamw = layout(1, "adamw"), lamb = layout(1, "lamb");
    // AdamW reads w, g, m and v, and writes w twice, m and v: 30 bytes. LAMB's first pass moves 16 + 12, the
    // one for squares 8, and its second pass 8 + 6: 20 more.
    Options o = plan_line(line + "1").options;
    double parameters = (double)parameter_count(o),
           more = 20 * parameters / find_machine("h100").memory_bandwidth;
    double seconds = lamb["seconds"].get<double>() - adamw["seconds"].get<double>();
    CHECK(seconds > more);
    CHECK(seconds < more / 0.78);
    CHECK(lamb["memory_bytes"].get<double>() - adamw["memory_bytes"].get<double>() < 1 << 20);
    CHECK(lamb["command"].get<std::string>().find("--optimizer lamb") != std::string::npos);
    // Each rank updates an eighth, but all of them wait for the norms.
    double cut = layout(8, "lamb")["seconds"].get<double>() - layout(8, "adamw")["seconds"].get<double>();
    CHECK(cut > seconds / 8);
    CHECK(cut < seconds / 4);
    CHECK_REFUSED(planned_text(line + "1 --optimizer sgd"), "--optimizer sgd");

    // Muon keeps no v of matrices, and orthogonalizes each of them in five steps of three products. The
    // matrices of queries, keys, values and attention's output have 1600 rows, those of the MLP 1600 rows and
    // 6400 columns.
    nlohmann::json muon = layout(1, "muon"), of_eight = layout(8, "muon");
    auto flops = [](double rows, double columns) {
        return 5 * (4 * rows * rows * columns + 2 * rows * rows * rows);
    };
    double products = 48 * (4 * flops(1600, 1600) + 2 * flops(1600, 6400)),
           least = products / find_machine("h100").gemm_flops;
    seconds = muon["seconds"].get<double>() - adamw["seconds"].get<double>();
    CHECK(seconds > least);
    CHECK(seconds < 2 * least);
    auto bytes = [](const nlohmann::json& layout, const char* name) {
        return layout["memory"].value(name, 0.0);
    };
    CHECK(bytes(adamw, "optimizer") - bytes(muon, "optimizer") ==
          doctest::Approx(4.0 * 48 * 12 * 1600 * 1600).epsilon(0.01));
    CHECK(bytes(muon, "whole matrices") > 3 * 2.0 * 1600 * 6400);
    // Eight ranks own an eighth each.
    double of_rank = of_eight["seconds"].get<double>() - layout(8, "adamw")["seconds"].get<double>();
    CHECK(of_rank > seconds / 8);
    CHECK(of_rank < seconds / 3);
}

TEST_CASE("an optimizer on the host frees the device, and takes the host's time") {
    TemporaryFolder folder;
    Machine machine = find_machine("h100");
    auto layout = [&](const char* options) {
        write_file(folder / "m.json", machine_to_json(machine).dump());
        return planned(
            "--model llama3-8B --gpus 8 --global-batch 512k --micro-batch 1 --zero 1 --tp 1 --pp 1 "
            "--recompute elementwise --explain --machine " +
            (folder / "m.json") + " " + options)["layouts"][0];
    };
    auto seconds = [&](const char* options) { return layout(options)["seconds"].get<double>(); };
    double own = (double)parameter_count(plan_line("--model llama3-8B --gpus 8").options) / 8;
    nlohmann::json device = layout(""), host = layout("--offload optimizer");
    // A master copy and two moments move to the host, which in addition holds copies of gradients and
    // parameters.
    CHECK(device["memory_bytes"].get<double>() - host["memory_bytes"].get<double>() ==
          doctest::Approx(12 * own).epsilon(0.02));
    CHECK(host["host_bytes"].get<double>() - device["host_bytes"].get<double>() ==
          doctest::Approx((12 + 4 + 2) * own).epsilon(0.02));
    CHECK(host["command"].get<std::string>().find("--offload optimizer") != std::string::npos);
    // A step of AdamW moves 30 bytes per parameter on the host; 4 bytes travel to the host and 2 back.
    double of_host = own * (30 / machine.host_bandwidth + 6 / machine.host_link);
    double more = host["seconds"].get<double>() - device["seconds"].get<double>();
    CHECK(more > 0.1 * of_host);
    CHECK(more < 1.3 * of_host);
    for (double Machine::*rate : {&Machine::host_bandwidth, &Machine::host_link}) {
        double before = seconds("--offload optimizer"), usual = machine.*rate;
        machine.*rate *= 2;
        CHECK(seconds("--offload optimizer") < before);
        machine.*rate = usual;
    }
    machine.host_bandwidth = machine.host_link = 1e14;
    CHECK(seconds("--offload optimizer") < device["seconds"]);
    CHECK(seconds("") == device["seconds"]);

    machine.host_memory = 10e9;
    nlohmann::json small = layout("--offload optimizer");
    CHECK(small["fits"] == false);
    CHECK(small["warnings"][0].get<std::string>().find("of the host's memory for each device") !=
          std::string::npos);
    CHECK_REFUSED(
        planned_text("--model llama3-8B --gpus 8 --global-batch 512k --offload optimizer --tp 1 --pp 1 "
                     "--machine " +
                     (folder / "m.json")),
        "does not fit on 8 devices");
    std::string table = planned_text("--model llama3-8B --gpus 8 --global-batch 512k --machine h100 "
                                     "--offload optimizer");
    CHECK(table.find("memory  host\n") != std::string::npos);
}

TEST_CASE("products in fp8 are planned where there are some") {
    std::string line = "--model llama3-8B --gpus 32 --global-batch 2M --machine ",
                cut = " --tp 2 --pp 2 --tp-overlap 2 --micro-batch 1 --zero 2 --recompute none --explain "
                      "--pp-schedule ";
    for (const char* schedule : {"1f1b", "zero-bubble"}) {
        auto seconds = [&](const char* options) {
            return planned(line + "h100" + cut + schedule + options)["layouts"][0]["seconds"].get<double>();
        };
        double bf16 = seconds(""), fp8 = seconds(" --matmul-dtype fp8"),
               fast = seconds(" --matmul-dtype fp8 --fp8-fast-gradients on");
        CHECK(fp8 < 0.95 * bf16);
        CHECK(fp8 > bf16 / 2);
        CHECK(fast < fp8);
    }
    // Parameters are not sent in fp8, and rows are multiples of 16 elements.
    nlohmann::json best = planned(line + "h100 --matmul-dtype fp8")["layouts"];
    REQUIRE(!best.empty());
    for (auto& layout : best) CHECK(layout["zero"] < 3);
    CHECK_REFUSED(planned_text(line + "h100 --matmul-dtype fp8 --zero 3"),
                  "--matmul-dtype fp8: weights must stay at one address, and --zero 3");
    CHECK_REFUSED(planned_text(line + "h100 --matmul-dtype fp8 --mlp-width 14344"), "no layout divides");
    CHECK_REFUSED(planned_text(line + "a100 --matmul-dtype fp8"),
                  "--matmul-dtype fp8: the machine does not multiply in fp8");
    CHECK_REFUSED(planned_text(line + "h100 --fp8-fast-gradients on"), "needs --matmul-dtype fp8");
    CHECK_REFUSED(planned_text(line + "cpu --matmul-dtype bf16"),
                  "--matmul-dtype bf16: plans assume fp32 products");
    TemporaryFolder folder;
    Machine measured = find_machine("cpu");
    measured.bf16_products = true;
    std::string file = folder / "m.json";
    write_file(file, machine_to_json(measured).dump());
    CHECK(!planned(line + file + " --matmul-dtype bf16")["layouts"].empty());
    CHECK_REFUSED(planned_text(line + file + " --matmul-dtype fp32"),
                  "--matmul-dtype fp32: plans assume bf16 products");
}

TEST_CASE("failures and what helps are part of a plan") {
    std::string line =
        "--model gpt3-175B --machine h100 --gpus 4096 --global-batch 4M --tokens 100G --tp 8 --pp 8 "
        "--micro-batch 1 --zero 1 --recompute block --pp-schedule 1f1b";
    nlohmann::json usual = planned(line)["failures"], none = planned(line + " --failures 0")["failures"];
    CHECK(usual["hours_between"] == doctest::Approx(1000 * 24 / 3.79 / 512));
    double of_network = usual["hours_between_of"]["network"];
    CHECK(of_network == doctest::Approx(usual["hours_between"].get<double>() * 419 / 49));
    nlohmann::json given =
        planned(line + " --failures 0 --network-failures 2 --software-failures 1")["failures"];
    CHECK(given["hours_between"] == doctest::Approx(1000 * 24 / 3.0 / 512));
    CHECK(given["hours_between_of"]["machines"] == 0);
    CHECK(given["hours_between_of"]["software"] == doctest::Approx(1000 * 24 / 1.0 / 512));
    CHECK(given["training_share"] > usual["training_share"]);
    CHECK(usual["training_share"] < 0.96);
    double best = 0;
    for (auto& remedy : usual["with"]) {
        CHECK(remedy["training_share"] > usual["training_share"]);
        best = std::max(best, remedy["training_share"].get<double>());
    }
    CHECK(usual["with"].back()["what"] == "all of these");
    CHECK(usual["with"].back()["training_share"] == best);
    CHECK(none["training_share"] == 1);
    CHECK(planned_text(line).find("failures     one in 12.4 h (of machines in 16.9 h, of") !=
          std::string::npos);
    CHECK(planned_text(line + " --failures 0").find("failures ") == std::string::npos);
}

TEST_CASE("more micro-batches never make a step shorter, be the host fast or slow") {
    for (const char* options : {"", " --offload optimizer"}) {
        CAPTURE(options);
        double before = 0;
        for (int count : {1, 8, 31, 32, 33, 64, 1024}) {
            CAPTURE(count);
            Planned p(text("--model gpt2-124M --machine h100 --gpus 4 --global-batch %d", 4 * count * 1024) +
                      options);
            double seconds =
                p.planner.planned(p.cut(1, 1, 4, 1, PipelineSchedule::one_f_one_b, 1, 1, 4)).seconds;
            CHECK(seconds > before);
            before = seconds;
        }
    }
}

TEST_CASE("a message between stages in different nodes has the network") {
    TemporaryFolder folder;
    Machine machine = find_machine("h100");
    machine.network = 2e9;
    write_file(folder / "slow.json", machine_to_json(machine).dump());
    auto seconds = [&](const std::string& on, int tp, int pp) {
        Planned p("--model gpt2-350M --layers 32 --gpus 16 --global-batch 64k --machine " + on);
        return p.planner.planned(p.cut(tp, pp)).seconds;
    };
    for (auto [tp, pp] : {std::pair{1, 16}, {2, 8}, {4, 4}})
        CHECK(seconds(folder / "slow.json", tp, pp) > 1.05 * seconds("h100", tp, pp));
    for (auto [tp, pp] : {std::pair{1, 8}, {2, 4}, {4, 2}})
        CHECK(seconds(folder / "slow.json", tp, pp) == seconds("h100", tp, pp));
}

TEST_CASE("of many micro-batches, those are simulated that a step begins and ends with") {
    Planned p("--model gpt2-350M --layers 8 --global-batch 512k --gpus 16 --machine a100");
    using enum PipelineSchedule;
    for (const Cut& cut :
         {p.cut(1, 1, 2, 1, one_f_one_b, 1, 1, 2), p.cut(1, 1, 2, 1, one_f_one_b, 1, 3, 2),
          p.cut(2, 4, 2, 1, one_f_one_b, 1, 1, 2), p.cut(1, 4, 2, 1, interleaved, 2, 2, 2),
          p.cut(1, 4, 2, 2, zero_bubble, 1, 2, 1), p.cut(1, 8, 1, 1, zero_bubble, 1, 0, 1)}) {
        int all = (int)p.planner.micro_batches(cut);
        CHECK(all >= 128);
        SimulatedStep whole = p.planner.simulated(cut, {}, {all})[0];
        CHECK(p.planner.planned(cut).seconds == doctest::Approx(whole.seconds).epsilon(1e-4));
        BytesSent sent = *std::ranges::max_element(whole.sent, {}, &BytesSent::all);
        CHECK(p.planner.sent(cut).all() == doctest::Approx(sent.all()));
    }
}

TEST_CASE("planned memory is that of a run") {
    TemporaryFolder folder;
    Planned p(small_model + std::string("cpu"));
    int number = 0, compared = 0;
    each_cut(p, [&](const Cut& cut) {
        if (number++ % 97) return;
        Options o = p.planner.options_of(cut);
        Workload w = training_workload(o, cut.recompute);
        Layout layout = training_layout(o, w);
        auto of_run = memory_classes(o, w, zero_settings(o), layout);
        PlannedStep step = p.planner.planned(cut);
        CHECK(p.planner.total(step.memory) == memory_total(of_run));
        compared++;
    });
    CHECK(compared >= 50);
    // Memory of Muon's whole matrices, which the planner does not count part by part.
    for (const char* more : {"", " --kv-heads 4", " --kv-heads 2"}) {
        Planned muon(small_model + std::string("cpu --optimizer muon") + more);
        for (auto [tp, dp, shard] :
             {std::tuple{1, 1, 1}, {1, 8, 8}, {4, 2, 2}, {2, 4, 2}, {8, 1, 1}, {1, 8, 2}}) {
            CAPTURE(more);
            CAPTURE(tp);
            CAPTURE(shard);
            Cut cut = muon.cut(tp, 1, dp);
            cut.shard_group = shard, cut.zero = dp > 1;
            Options o = muon.planner.options_of(cut);
            Layout layout = {.mesh = mesh_shape(o)};
            auto of_run = memory_classes(o, training_workload(o, cut.recompute), zero_settings(o), layout);
            auto bytes_of = [](const std::vector<MemoryClass>& classes) {
                for (const MemoryClass& one : classes)
                    if (one.name == std::string("whole matrices")) return (double)one.bytes;
                return 0.0;
            };
            double planned = bytes_of(muon.planner.planned(cut).memory), run = bytes_of(of_run);
            CHECK(run > 0);
            CHECK(planned == doctest::Approx(run).epsilon(0.1));
        }
    }
    // A plan for bf16 has parameters and activations of half the size.
    Planned bf16(small_model + std::string("h100"));
    Cut cut = p.cut(1, 1, 1, 4);
    auto bytes = [&](Planned& plan, const char* name) {
        for (const MemoryClass& one : plan.planner.planned(cut).memory)
            if (one.name == std::string(name)) return (double)one.bytes;
        return 0.0;
    };
    CHECK(bytes(bf16, "parameters") == bytes(p, "parameters") / 2);
    CHECK(bytes(bf16, "gradients") == bytes(p, "gradients"));
    CHECK(bytes(bf16, "optimizer") == doctest::Approx(1.5 * bytes(p, "optimizer")));  // a master copy
    CHECK(bytes(bf16, "activations") < 0.8 * bytes(p, "activations"));
    // On cards, communicators need memory too.
    CHECK(bytes(p, "communicators") == 0);
    CHECK(bytes(bf16, "communicators") == 0);
    cut.tp = 2;
    CHECK(bytes(p, "communicators") == 0);
    CHECK(bytes(bf16, "communicators") == communicator_memory({.tp = 2}, 8));
}

TEST_CASE("the state is cut over as many data ranks as make a step shortest, and fit") {
    TemporaryFolder folder;
    Planned p(small_model + small_machine(folder, 40e9));
    Machine machine = p.machine;
    machine.element_bytes = sizeof(floatX);
    auto complete = [&](int zero) {
        Cut cut = p.cut(1, 1, 8, 4);
        cut.zero = zero, cut.shard_group = 8;
        return p.planner.options_of(cut);
    };
    for (int zero : {1, 2, 3}) {
        Options o = complete(zero);
        for (double network : {1e8, 5e9, 1e12}) {
            CAPTURE(zero);
            CAPTURE(network);
            machine.network = network;
            PlanTask task = {.options = o, .machine = machine, .devices = 8};
            Planner planner(task);
            auto seconds = [&](int shard) {
                Cut cut = o;
                cut.shard_group = shard;
                return planner.simulated(cut, {}).seconds;
            };
            int chosen = chosen_shard_group(o, machine);
            for (int shard : {2, 4, 8}) CHECK(seconds(chosen) <= seconds(shard) * (1 + 1e-9));
            if (network == 1e8 && zero == 3) CHECK(chosen <= machine.node);
            // If only the largest group fits, it is chosen.
            Machine small = machine;
            Cut four = o, eight = o;
            four.shard_group = 4;
            size_t kept = library_memory();
            small.memory = (double)(planner.total(planner.planned(eight).memory) + kept);
            REQUIRE(planner.total(planner.planned(four).memory) + kept > (size_t)small.memory);
            CHECK(chosen_shard_group(o, small) == 8);
        }
    }
    Options o = complete(3);
    Machine unknown = machine;
    unknown.flops = 0;
    CHECK(chosen_shard_group(o, unknown) == 8);
    o.batch_ramp = "8k:32k:10";
    CHECK(chosen_shard_group(o, machine) == 8);
}

TEST_CASE("what a rank pins must fit into its host, and what is left behind the groups into the device") {
    constexpr size_t MiB = 1 << 20;
    auto classes = [&](int B, int) {
        return std::vector<MemoryClass>{
            {"activations", B * 10 * MiB}, {"optimizer", 30 * MiB, true}, {memory_of_groups, 5 * MiB}};
    };
    Workload w = {.B = 4, .T = 16, .training = true, .loss_chunk = 64};
    PipelineShape alone = {PipelineSchedule::one_f_one_b, 1, 1};
    size_t needs = memory_total(classes(4, 1));
    MemoryPlan plan(w, alone, {needs, 30 * MiB}, classes);
    CHECK(plan.fits());
    CHECK(plan.pins() == 30 * MiB);
    CHECK_NOTHROW(plan.check());
    MemoryPlan pins_too_much(w, alone, {needs, 30 * MiB - 1}, classes);
    CHECK(!pins_too_much.fits());
    CHECK_REFUSED(pins_too_much.check(), "--async-save and --offload: need 30.0 MiB of the host's memory");
    MemoryPlan too_large(w, alone, {needs - 1, 30 * MiB}, classes);
    CHECK_REFUSED(too_large.check(), "--micro-batch 3 fits");
    CHECK_NOTHROW(plan.check_left(needs - 5 * MiB));
    CHECK_REFUSED(plan.check_left(needs - 5 * MiB - 1), "more memory, but");
}

TEST_CASE("the largest micro-batch is any that divides the step, and fits, interleaved too") {
    // 12 sequences per step on 8 stages; 100 bytes for a step, and 10 per sequence of 2 micro-batches held
    auto classes = [](int B, int micro_batches) {
        CHECK(B * micro_batches >= 12);
        return std::vector<MemoryClass>{{"activations", (size_t)(100 + 20 * B)},
                                        {"batches", (size_t)B, true}};
    };
    Workload w = {.B = 1, .T = 16, .training = true, .loss_chunk = 16};
    for (auto schedule : {PipelineSchedule::one_f_one_b, PipelineSchedule::interleaved}) {
        PipelineShape shape = {schedule, 8, 12, 2};
        auto largest = [&](MemoryCapacity capacity) {
            return MemoryPlan(w, shape, capacity, classes).largest_micro_batch();
        };
        CHECK(largest({1000}) == 12);
        CHECK(largest({220}) == 4);  // 5 would fit, but does not divide 12
        CHECK(largest({150}) == 2);
        CHECK(largest({100}) == 0);
        CHECK(largest({1000, 3}) == 3);  // limited by host memory
    }
}

TEST_CASE("memory is that of the stage which takes most, of the device and of the host") {
    std::vector<std::vector<MemoryClass>> stages = {{{"parameters", 5}, {"staging", 9, true}},
                                                    {{"parameters", 8}, {"optimizer", 2, true}},
                                                    {{"parameters", 7}, {"optimizer", 4, true}}};
    std::vector<MemoryClass> apart = most_of_stages(stages, true), together = most_of_stages(stages, false);
    CHECK(memory_total(apart, true) == 8);
    CHECK(pinned_total(apart) == 9);
    REQUIRE(apart.size() == 2);
    CHECK(apart[1].name == std::string("staging"));
    CHECK(memory_total(together, false) == 14);
    CHECK(pinned_total(together) == 9);
}

// Korthikanti et al. count sbh (34 + 5as/h) / t bytes per layer, for elements of 2 bytes: 11 for attention,
// 19 for the MLP, 4 for the norms, and the scores. Two of the 34 are dropout masks, which this model does not
// have. Tiled attention keeps no scores, but a 4-byte sum for each row of a head.
TEST_CASE("tensor ranks hold of a layer what sequence parallelism leaves") {
    struct {
        int channels, heads, s, b;
    } models[] = {{6144, 64, 2048, 4}, {12288, 96, 2048, 1}, {20480, 128, 2048, 1}, {25600, 160, 2048, 1}};
    for (auto [h, a, s, b] : models) {
        for (int t : {1, 2, 4, 8}) {
            CAPTURE(h);
            CAPTURE(t);
            auto held = [&](int layers) {
                Options o = plan_line(text("--model gpt3-175B --machine h100 --gpus 8 --global-batch 64k "
                                           "--layers %d --channels %d --heads %d",
                                           layers, h, a))
                                .options;
                Workload w = {.B = b, .T = s, .training = true, .loss_chunk = s, .element_bytes = 2};
                Stage stage(o, {.mesh = {.tp = t}}, {}, true);
                return (double)memory_total(
                    memory_of<ActivationArrays>(sizeof(floatX), activation_table(o, w, stage), stage));
            };
            double of_layer = held(4) - held(3), sbh = (double)s * b * h;
            CHECK(of_layer / (sbh / t) == doctest::Approx(34 - 2).epsilon(0.05));
        }
    }
}

TEST_CASE("the largest Llama 3 fits in its layout without recomputing") {
    nlohmann::json layout = planned(
        "--model llama3-70B --layers 126 --channels 16384 --heads 128 --mlp-width 53248 --machine h100 "
        "--gpus 16384 --global-batch 16M --sequence-length 8192 --micro-batch 1 --tp 8 --pp 16 "
        "--pp-schedule 1f1b --zero 2 --recompute none --explain")["layouts"][0];
    CHECK(layout["dp"] == 128);
    CHECK(layout["recompute"] == "none");
    CHECK(layout["fits"] == true);
}

TEST_CASE("more devices never make a run longer") {
    for (const char* model : {"--model gpt2-1558M --global-batch 512k --machine a100",
                              "--model llama3-8B --global-batch 768k --machine h100"}) {
        double before = HUGE_VAL;
        for (int gpus : {4, 5, 7, 8, 12, 16, 24, 31, 64, 100, 512}) {
            Planned p(text("%s --gpus %d", model, gpus));
            std::vector<PlannedStep> best = p.planner.best(1);
            if (best.empty()) {
                CHECK(before == HUGE_VAL);
                continue;
            }
            CAPTURE(gpus);
            CHECK(best[0].seconds <= before);
            CHECK(best[0].cut.ranks() <= gpus);
            before = best[0].seconds;
        }
        CHECK(before < HUGE_VAL);
    }
}

TEST_CASE("what is hidden of the messages of each kind can be told") {
    std::string line =
        "--model gpt3-6.7B --machine h100 --gpus 32 --global-batch 512k --explain --tp 4 --pp 4 "
        "--tp-overlap 2 --pp-schedule 1f1b --zero 2 --micro-batch 1 --recompute none ";
    auto seconds = [&](const char* options) -> double {
        return planned(line + options)["layouts"][0]["seconds"];
    };
    double hidden = seconds(""), none = seconds("--overlap off"), sum = 0;
    for (const char* kind : {"tensor", "pipeline", "data"}) {
        CAPTURE(kind);
        double exposed = seconds(("--exposed " + std::string(kind)).c_str());
        CHECK(exposed > hidden);
        CHECK(exposed < none);
        CHECK(exposed == seconds(("--overlap on --exposed " + std::string(kind)).c_str()));
        sum += exposed - hidden;
    }
    CHECK(sum > 0.5 * (none - hidden));
    CHECK(seconds("--overlap off --exposed data") == none);
    CHECK(seconds("--exposed none") == hidden);
}

TEST_CASE("keys and values travel during attention to other heads") {
    TemporaryFolder folder;
    Machine machine = find_machine("h100");
    machine.node_bandwidth = 28e9;  // a gather takes half as long as attention forward
    write_file(folder / "slow.json", machine_to_json(machine).dump());
    std::string line = "--model llama3-8B --layers 2 --context 131072 --gpus 8 --cp 8 --micro-batch 1 "
                       "--global-batch 128k --recompute none --explain --machine " +
                       (folder / "slow.json");
    auto hidden = [&] {
        auto waits = [&](const char* options) -> double {
            return planned(line + options)["layouts"][0]["seconds_of"]["tensor"];
        };
        return 1 - waits("") / waits(" --exposed tensor");
    };
    CHECK(hidden() > 0.8);
    HeadParts whole(SIZE_MAX);
    CHECK(hidden() < 0.4);
}

TEST_CASE("messages are told with the numbers that travel") {
    nlohmann::json layout =
        planned("--model gpt3-6.7B --machine h100 --gpus 32 --global-batch 512k --explain "
                "--tp 2 --tp-overlap 1 --pp 2 --zero 1 --micro-batch 2")["layouts"][0];
    // A block of GPT-3 has 12 matrices of 4096 x 4096; a tensor rank has half of them.
    double elements = 12.0 / 2 * 4096 * 4096, bytes[4] = {};
    for (auto& message : layout["messages"]) {
        int i = message["what"] == "parameters, all-gather"      ? 0
                : message["what"] == "gradients, reduce-scatter" ? 1
                : message["what"] == "activations, all-gather"   ? 2
                : message["what"] == "pipeline, send"            ? 3
                                                                 : -1;
        bool is_summed =
            message["what"] == "gradients, all-reduce" || message["what"] == "activations, reduce-scatter";
        REQUIRE((i >= 0 || is_summed));
        if (i < 0) continue;
        CHECK(bytes[i] == 0);
        bytes[i] = message["bytes"];
        CHECK(message["numbers"] == (i == 1 ? "fp32" : "bf16"));
    }
    CHECK(bytes[0] == doctest::Approx(2 * elements).epsilon(0.01));
    CHECK(bytes[1] == doctest::Approx(4 * elements).epsilon(0.01));
    CHECK(bytes[2] == 2.0 * 2 * 2048 * 4096);
    CHECK(bytes[3] == bytes[2] / 2);

    // Gradients in bf16 halve only the bytes sent for gradients, and the memory of these messages.
    auto with = [&](const char* more) {
        return planned(std::string("--model gpt3-6.7B --machine h100 --gpus 32 --global-batch 512k --explain "
                                   "--tp 8 --zero 1 --micro-batch 2") +
                       more)["layouts"][0];
    };
    nlohmann::json fp32 = with(""), bf16 = with(" --reduce-dtype bf16");
    // except for copies that tensor ranks and stages sum
    double of_bf16 = bf16["sent_bytes"]["gradients"], of_fp32 = fp32["sent_bytes"]["gradients"];
    CHECK(of_bf16 >= of_fp32 / 2);
    CHECK(of_bf16 < 1.03 * of_fp32 / 2);
    CHECK(bf16["sent_bytes"]["parameters"] == fp32["sent_bytes"]["parameters"]);
    CHECK(bf16["seconds"] < fp32["seconds"]);
    CHECK(fp32["seconds_with_bf16_gradients"] == bf16["seconds"]);
    CHECK(!bf16.contains("seconds_with_bf16_gradients"));
    CHECK(bf16["command"].get<std::string>().find("--reduce-dtype bf16") != std::string::npos);
    CHECK(bf16["memory"]["gradients on their way"] > 0);
    CHECK(!fp32["memory"].contains("gradients on their way"));
}

TEST_CASE("large plans are whole") {
    nlohmann::json plan = planned(
        "--model gpt3-175B --machine h100 --gpus 12288 --global-batch 12M --tokens 300B --price 2 --tp 4");
    CHECK(plan["simulated"] == true);
    CHECK(plan["layouts"].size() == 5);
    CHECK(plan["petaflop_days_6n"].get<double>() == doctest::Approx(3638).epsilon(0.01));
    CHECK(plan["runner_up"].get<std::string>().find(" s more than 1") != std::string::npos);
    double before = 0;
    for (auto& layout : plan["layouts"]) {
        double seconds = layout["seconds"], all = 0;
        CHECK(seconds >= before);
        before = seconds;
        CHECK(layout["fits"] == true);
        CHECK(layout["tp"].get<int>() * layout["pp"].get<int>() * layout["dp"].get<int>() == 12288);
        CHECK(layout["mfu"] > 0.3);
        CHECK(layout["mfu"] < 0.7);
        CHECK(layout["mfu_causal"] < layout["mfu"]);
        for (auto& [name, part] : layout["seconds_of"].items()) all += part.get<double>();
        CHECK(all == doctest::Approx(seconds).epsilon(0.01));
        CHECK(layout["tokens_per_s"].get<double>() == doctest::Approx(12 * 0x1p20 / seconds));
        CHECK(layout["cost"].get<double>() == doctest::Approx(layout["days"].get<double>() * 24 * 12288 * 2));
    }
    std::string text =
        planned_text("--model gpt3-6.7B --machine h100 --gpus 64 --global-batch 4M --tokens 300G --price 2");
    for (const char* words : {"simulated", "none is measured", "runner-up", "PetaFLOP/s-days", "which cost",
                              "mpirun --hostfile hosts -np 64 ./train_gpt train --model gpt3-6.7B"})
        CHECK_MESSAGE(text.find(words) != std::string::npos, words);
}

TEST_CASE("the command line of a plan trains in that layout") {
    for (const char* line : {"--model llama3-8B --machine h100 --gpus 64 --global-batch 4M --tokens 100G",
                             "--model gpt3-6.7B --machine a100 --gpus 16 --global-batch 1M --layers 30",
                             "--model gpt2-124M --machine cpu --gpus 1 --global-batch 64k --overlap off"}) {
        CAPTURE(line);
        nlohmann::json layout = planned(line)["layouts"][0];
        std::string command = layout["command"];
        command = command.substr(command.find(" train ") + 1);
        command.replace(command.find("..."), 3, "x.bin");
        std::vector<std::string> words = words_of(command);
        int ranks = layout["tp"].get<int>() * layout["pp"].get<int>() * layout["dp"].get<int>();
        Options o = parse_training(read_arguments(command_train, words), ranks).options;
        CHECK(o.tp == layout["tp"]);
        CHECK(o.pp == layout["pp"]);
        CHECK(o.dp == layout["dp"]);
        CHECK(o.pp_chunks == layout["pp_chunks"]);
        CHECK(o.tp_overlap == layout["tp_overlap"]);
        CHECK(o.zero == layout["zero"]);
        CHECK(o.shard_group == layout["shard_group"]);
        CHECK(o.micro_batch == layout["micro_batch"]);
        CHECK(micro_batches_of_rank(o, 0) == layout["micro_batches"]);
        CHECK(name_of(o.recompute) == layout["recompute"]);
        PlanLine planned = plan_line(line);
        CHECK(o.layers == planned.options.layers);
        CHECK(o.overlap == planned.options.overlap);
        if (planned.command.tokens > 0) {
            CHECK(tokens_until(o, o.steps) >= planned.command.tokens);
            CHECK(tokens_until(o, o.steps - 1) < planned.command.tokens);
        }
    }
}

TEST_CASE(
    "a plan that is not told the batch takes a usual one, and says so; and whether rates are measured") {
    struct {
        const char* model;
        long long tokens;
    } usual[] = {{"gpt3-125M", 512 << 10}, {"gpt2-1558M", 1 << 20},
                 {"gpt3-6.7B", 2 << 20},   {"llama3-8B", 2 << 20},
                 {"gpt3-175B", 4 << 20},   {"gpt3-175B --sequence-length 1500", 3072000}};
    for (auto [model, tokens] : usual) {
        CAPTURE(model);
        PlanLine line = plan_line(text("--gpus 8 --model %s", model));
        CHECK(line.options.global_batch == tokens);
        REQUIRE(line.notes.size() == 1);
        CHECK(line.notes[0].starts_with(text("--global-batch %lld, about", tokens)));
    }
    CHECK(plan_line("--gpus 8 --model gpt3-125M --global-batch 1M").notes.empty());

    TemporaryFolder folder;
    std::string path = folder / "here.json", line = "--model llama3-8B --gpus 8 --machine " + path;
    Machine machine = find_machine("h100");
    write_file(path, machine_to_json(machine).dump());
    CHECK(planned_text(line).find("none is measured") != std::string::npos);
    machine.measured = true;
    write_file(path, machine_to_json(machine).dump());
    std::string report = planned_text(line);
    CHECK(report.find("none is measured") == std::string::npos);
    CHECK(report.find("rates that --measure wrote to") != std::string::npos);
    CHECK(report.find("note         --global-batch 2097152, about") != std::string::npos);
    CHECK(planned(line)["global_batch"] == 2 << 20);
}

TEST_CASE("options of the layout hold, and one layout is explained as it is given") {
    std::string line = "--model llama3-8B --machine h100 --gpus 64 --global-batch 4M";
    CHECK(planned(line) == planned(line));
    nlohmann::json kept = planned(line + " --tp 4 --pp 2 --zero 1 --pp-schedule zero-bubble")["layouts"];
    REQUIRE(!kept.empty());
    for (auto& layout : kept) {
        CHECK(layout["tp"] == 4);
        CHECK(layout["pp"] == 2);
        CHECK(layout["zero"] == 1);
        CHECK(layout["pp_schedule"] == "zero-bubble");
    }
    for (const char* options : {"--pp 4 --pp-schedule interleaved --pp-chunks 5", "--shard-group 16 --zero 2",
                                "--pp-schedule gpipe --pp 2", "--tp 8 --tp-overlap 2", "--recompute mlp",
                                "--micro-batch 2 --tp 1"}) {
        CAPTURE(options);
        PlanLine asked = plan_line(line + " " + options);
        nlohmann::json layouts = planned(line + " " + options)["layouts"];
        REQUIRE(!layouts.empty());
        for (auto& layout : layouts) {
            for (const GivenOption& option : asked.given) {
                std::string field = option.row->field;
                if (!layout.contains(field)) continue;
                bool is_text = layout[field].is_string();
                CHECK((is_text ? layout[field].get<std::string>() : layout[field].dump()) == option.value);
            }
        }
    }
    nlohmann::json best = planned(line)["layouts"][0];
    std::string given = text(" --explain --tp %d --pp %d --zero %d --shard-group %d --micro-batch %d "
                             "--recompute %s --tp-overlap %d",
                             best["tp"].get<int>(), best["pp"].get<int>(), best["zero"].get<int>(),
                             best["shard_group"].get<int>(), best["micro_batch"].get<int>(),
                             best["recompute"].get<std::string>().c_str(), best["tp_overlap"].get<int>());
    if (best["pp"] > 1)
        given += text(" --pp-schedule %s --pp-chunks %d", best["pp_schedule"].get<std::string>().c_str(),
                      best["pp_chunks"].get<int>());
    nlohmann::json explained = planned(line + given)["layouts"];
    REQUIRE(explained.size() == 1);
    CHECK(explained[0] == best);
    // A layout that does not fit is explained too.
    nlohmann::json large = planned("--model gpt3-175B --machine h100 --gpus 8 --global-batch 64k --explain "
                                   "--tp 8 --micro-batch 1")["layouts"][0];
    CHECK(large["fits"] == false);
    CHECK(large["warnings"][0].get<std::string>().find("does not fit") != std::string::npos);
    CHECK(planned_text(line + " --explain --tp 16 --micro-batch 1").find("tensor groups of 16 span nodes") !=
          std::string::npos);
}

TEST_CASE("what cannot be planned is refused in a line that says what can") {
    std::string line = "--model llama3-8B --machine h100 --global-batch 4M ";
    CHECK_REFUSED(plan_line("--model llama3-8B --machine h100 --global-batch 4M"), "--gpus: missing");
    CHECK_REFUSED(plan_line(line + "--gpus 0"), "--gpus: missing, or 0");
    CHECK_REFUSED(plan_line(line + "--gpus -8"), "--gpus -8: out of range");
    CHECK_REFUSED(plan_line(line + "--gpus 10000000000"), "--gpus 10000000000: out of range");
    CHECK_REFUSED(plan_line(line + "--gpus 8 --layers 100000"), "--layers 100000: out of range");
    CHECK_REFUSED(plan_line(line + "--gpus 8 --heads 7"), "--heads 7: does not divide --channels 4096");
    CHECK_REFUSED(plan_line("--model gpt5 --gpus 8 --global-batch 4M"), "--model gpt5: neither a preset");
    CHECK_REFUSED(plan_line("--model llama3-8B --gpus 8 --global-batch 10000"), "give 8192 or 16384");
    CHECK_REFUSED(plan_line(line + "--gpus 8 --sequence-length 9000"), "longer than the model's context");
    CHECK_REFUSED(plan_line(line + "--gpus 8 --tokens 100000000G"),
                  "--tokens 100000000000000000: out of range");
    CHECK_REFUSED(plan_line(line + "--gpus 8 --train-data x"),
                  "--train-data: not an option of train_gpt plan");
    CHECK_REFUSED(planned_text("--model llama3-8B --gpus 8 --global-batch 4M --machine h101"),
                  "nearest is h100");
    CHECK_REFUSED(planned_text(line + "--gpus 8 --explain --tp 3"), "--tp 3: ");
    CHECK_REFUSED(planned_text(line + "--gpus 8 --tp 3"), "no layout divides");
    CHECK_REFUSED(planned_text(line + "--gpus 8 --micro-batch 1024"), "no layout divides");
    // the smallest layout would fit, but has one data rank
    CHECK_REFUSED(planned_text(line + "--gpus 8 --shard-group 3"), "no layout divides");
    // gpipe keeps all micro-batches; layouts with too many of them to be simulated are left out
    CHECK(!planned("--model gpt2-124M --machine h100 --gpus 16 --pp 4 --pp-schedule gpipe --micro-batch 1 "
                   "--global-batch 8M")["layouts"]
               .empty());

    // The number of devices that the message recommends does suffice.
    std::string refused =
        error_of([] { planned_text("--model llama3-70B --machine h100 --gpus 8 --global-batch 1M"); });
    CAPTURE(refused);
    check_refusal(refused, "does not fit on 8 devices", __LINE__);
    size_t at = refused.rfind("; ") + 2;
    int enough = atoi(refused.c_str() + at);
    CHECK(enough > 8);
    auto layouts_on = [](int gpus) {
        return planned(text("--model llama3-70B --machine h100 --gpus %d --global-batch 1M", gpus))["layouts"]
            .size();
    };
    CHECK(layouts_on(enough) >= 1);
    CHECK_REFUSED(layouts_on(enough - 1), text("; %d devices are enough", enough));
}

TEST_CASE("published step times are predicted, but for a factor of each publication's software") {
    PublishedRuns all = published_runs();
    CHECK(all.runs.size() == 40);
    std::vector<double> every;
    for (int p = 0; p < (int)all.publications.size(); p++) {
        Machine machine = find_machine(all.publications[p].machine);
        std::vector<double> errors;
        std::vector<const PublishedRun*> runs;
        for (const PublishedRun& run : all.runs) {
            if (run.publication != p) continue;
            errors.push_back(log_error(run, predicted_seconds(run, all.publications[p], machine)));
            runs.push_back(&run);
        }
        double factor = std::accumulate(errors.begin(), errors.end(), 0.0) / (double)errors.size();
        CHECK(std::abs(factor) < 0.07);
        CHECK(std::ranges::count_if(runs, [](auto* run) { return run->within > 0.11; }) <= 1);
        for (size_t i = 0; i < runs.size(); i++) {
            double off = std::abs(std::expm1(errors[i] - factor));
            CHECK_MESSAGE(off < runs[i]->within, runs[i]->name);
            every.push_back(off);
        }
    }
    std::sort(every.begin(), every.end());
    CHECK(every[every.size() / 2] < 0.045);
}

TEST_CASE("absurd sizes are planned or refused, soon" * doctest::test_suite("long")) {
    for (const char* line : {"--model gpt3-175B --machine h100 --gpus 1048576 --global-batch 256M --tp 8 "
                             "--pp 16",
                             "--model gpt2-124M --machine h100 --gpus 1 --global-batch 900G",
                             "--model gpt2-124M --machine h100 --gpus 64 --global-batch 8M --layers 1500",
                             "--model tiny --machine cpu --gpus 3 --global-batch 256"}) {
        CAPTURE(line);
        std::string error = error_of([&] { CHECK(planned(line)["layouts"].size() >= 1); });
        if (error != "no error") check_refusal(error, "plan:", __LINE__);
    }
}

TEST_CASE("--tp auto has the parts that --pp-layers lists, and evens out the memory of a run") {
    auto chosen = [](const char* layers) {
        PlanLine line = plan_line("--model gpt2-124M --global-batch 64k --gpus 4 --machine h100");
        Options o = line.options;
        o.tp = o.pp = 0;
        o.pp_layers = layers;
        choose_cut(o, line.given, find_machine("h100"), 4);
        return o;
    };
    Options listed = chosen("3,4,3,2");
    CHECK(listed.pp * listed.pp_chunks == 4);
    Planned p("--model gpt2-124M --global-batch 64k --gpus 4 --machine h100");
    PlanTask task = p.task;
    task.options.pp_layers = "memory";
    Planner planner(task);
    for (int pp : {2, 3, 4}) {
        Cut cut = p.cut(1, pp, 1);
        const Options o = planner.options_of(cut);
        const std::vector<int>& split = planner.split(cut);
        CHECK(split == training_layout(o, training_workload(o, cut.recompute, 2)).split);
        CHECK(split != p.planner.split(cut));
    }
}

TEST_CASE("--tp auto keeps what the command line gives, be it the default") {
    auto chosen = [](const std::string& words) {
        PlanLine line = plan_line("--model gpt2-350M --global-batch 512k --gpus 8 --machine h100 " + words);
        Options o = line.options;
        o.tp = o.pp = 0;
        choose_cut(o, line.given, find_machine("h100"), 8);
        return o;
    };
    const Options usual, fastest = chosen("");
    CHECK(fastest.micro_batch != usual.micro_batch);
    CHECK(fastest.zero != usual.zero);
    CHECK(chosen("--micro-batch 4").micro_batch == usual.micro_batch);
    CHECK(chosen("--zero 0").zero == usual.zero);
}
