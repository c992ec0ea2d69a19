// The table of cards: names as drivers report them, and estimates for cards without a row.
// devices: cpu
#include <cmath>
#include <cstring>
#include <set>

#include "kernels/cards.h"
#include "comm/machine.h"
#include "test/support/file_testing.h"
#include "test/support/testing.h"

namespace {

cudaDeviceProp device(const char* name, int multiprocessors, int major = 9, int minor = 0) {
    cudaDeviceProp properties = {};
    strcpy(properties.name, name);
    properties.multiProcessorCount = multiprocessors;
    properties.major = major;
    properties.minor = minor;
    return properties;
}

Machine named(const char* name, int multiprocessors) {
    return machine_of(device(name, multiprocessors), 0, 0);
}

// A card with the number of multiprocessors in its row of the table.
Machine named(const char* name) {
    const Card* card = find_card(name);
    return named(name, card ? card->multiprocessors : 100);
}

}  // namespace

TEST_CASE("cards by the names that drivers give") {
    struct {
        const char* name;
        double tflops, gigabytes_per_second;
    } known[] = {{"NVIDIA A100-SXM4-80GB", 312, 2039},
                 {"NVIDIA A100-SXM4-40GB", 312, 1555},
                 {"NVIDIA A100 80GB PCIe", 312, 1935},
                 {"A100-PCIE-40GB", 312, 1555},
                 {"NVIDIA A800-SXM4-80GB", 312, 2039},
                 {"NVIDIA A800 80GB PCIe", 312, 1935},
                 {"NVIDIA H100 80GB HBM3", 989.4, 3350},
                 {"NVIDIA H100 SXM5 80GB", 989.4, 3350},
                 {"NVIDIA H100 PCIe", 756, 2000},
                 {"NVIDIA H100 NVL", 835.5, 3900},
                 {"NVIDIA H800", 989.4, 3350},
                 {"NVIDIA H200", 989.4, 4800},
                 {"NVIDIA H200 NVL", 835.5, 4800},
                 {"NVIDIA GH200 480GB", 989.4, 4000},
                 {"NVIDIA GH200 144G HBM3e", 989.4, 4900},
                 {"NVIDIA H20", 148, 4000},
                 {"NVIDIA B200", 2250, 7670},
                 {"NVIDIA GB200", 2500, 8000},
                 {"NVIDIA B300 SXM6 AC", 2250, 8000},
                 {"NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8, 1792},
                 {"NVIDIA L40S", 362, 864},
                 {"NVIDIA GeForce RTX 4090", 165.2, 1008}};
    for (auto& card : known) {
        CAPTURE(card.name);
        Machine m = named(card.name);
        CHECK(m.published);
        CHECK(m.flops == doctest::Approx(card.tflops * 1e12).epsilon(1e-12));
        CHECK(m.memory_rate == doctest::Approx(card.gigabytes_per_second * 1e9).epsilon(1e-12));
    }
    for (const char* name : {"", "NVIDIA", "NVIDIA H1000", "NVIDIA XH100", "AMD EPYC 9654 96-Core Processor",
                             "NVIDIA RTX A6000", "NVIDIA A100X"}) {
        CAPTURE(name);
        CHECK(find_card(name) == nullptr);
        CHECK(!named(name).published);
        CHECK(named(name).flops == 0);
    }
    CHECK(named("NVIDIA H800").link_rate == 200e9);
    CHECK(named("NVIDIA H100 80GB HBM3").link_rate == 450e9);
}

TEST_CASE("each row of the table can be found") {
    std::set<std::string> words;
    for (const Card& card : cards) {
        CAPTURE(card.words);
        CHECK(find_card(card.words) == &card);
        CHECK(words.insert(card.words).second);
        bool is_gpu = card.element_bytes == 2;
        CHECK(card.flops / card.multiprocessors > (is_gpu ? 0.5e12 : 10e9));
        CHECK(card.flops / card.multiprocessors < 20e12);
        CHECK(card.network_rate <= card.link_rate);
        CHECK(card.node >= 1);
        CHECK(card.product_share >= 0.6);
        CHECK(card.product_share <= 0.9);
    }
}

TEST_CASE("expected rates are shares of the published ones") {
    Machine h200 = named("NVIDIA H200");
    CHECK(h200.gemm_flops == doctest::Approx(720e12).epsilon(0.005));
    CHECK(h200.memory_bandwidth == doctest::Approx(4.3e12).epsilon(0.01));
}

TEST_CASE("a part of a card has a share of its rates, as an estimate") {
    Machine part = named("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 66),
            whole = named("NVIDIA H100 80GB HBM3", 132);
    CHECK(whole.published);
    CHECK(!part.published);
    CHECK(part.flops == doctest::Approx(whole.flops / 2).epsilon(1e-12));
    CHECK(part.gemm_flops == doctest::Approx(whole.gemm_flops / 2).epsilon(1e-12));
    CHECK(!named("NVIDIA GeForce RTX 3090 Ti", 84).published);
}

TEST_CASE("an unknown card is estimated from its clock") {
    // published for these: RTX A6000 154.8, GeForce RTX 3080 59.5 (with sums in fp32), B300 2250 TFLOP/s
    struct {
        cudaDeviceProp device;
        double clock, tflops;
    } unknown[] = {{device("NVIDIA RTX A6000", 84, 8, 6), 1.8e9, 154.8},
                   {device("NVIDIA GeForce RTX 3080", 68, 8, 6), 1.71e9, 59.5},
                   {device("NVIDIA of tomorrow", 132, 9, 0), 1.83e9, 989.4},
                   {device("NVIDIA B3xx", 148, 10, 3), 1.855e9, 2250}};
    for (auto& card : unknown) {
        CAPTURE(card.device.name);
        Machine m = machine_of(card.device, card.clock, 768e9);
        CHECK(!m.published);
        CHECK(m.flops == doctest::Approx(card.tflops * 1e12).epsilon(0.01));
        CHECK(m.gemm_flops < m.flops);
        CHECK(m.memory_rate == 768e9);
        CHECK(m.memory_bandwidth == doctest::Approx(stream_share * 768e9));
    }
    CHECK(machine_of(device("NVIDIA V100", 80, 7, 0), 1.5e9, 0).flops == 0);  // has no bf16
}

TEST_CASE("a CPU is measured") {
    CHECK(this_machine().flops == 0);
    CHECK(!this_machine().published);
}

TEST_CASE("machines of plans are found by parts of their names") {
    struct {
        const char* name;
        double tflops, memory, network;
        int node;
    } known[] = {{"h100", 989.4, 84.9e9, 50e9, 8}, {"H200", 989.4, 150.1e9, 50e9, 8},
                 {"a100", 312, 85.0e9, 25e9, 8},   {"A100-40GB", 312, 42.3e9, 25e9, 8},
                 {"gb200", 2500, 186e9, 50e9, 72}, {"cpu", 1, 64e9, 1.25e9, 1}};
    for (auto& card : known) {
        CAPTURE(card.name);
        Machine m = find_machine(card.name);
        CHECK(m.flops == doctest::Approx(card.tflops * 1e12));
        CHECK(m.memory == card.memory);
        CHECK(m.network == doctest::Approx(network_share * card.network));
        CHECK(m.node == card.node);
        CHECK(m.element_bytes == (card.tflops == 1 ? 4 : 2));
    }
    CHECK_REFUSED(find_machine("h1000"), "nearest is h100");
    CHECK_REFUSED(find_machine(""), ".json");
    CHECK(find_card("Intel(R) Xeon(R) CPU @ 2.20GHz") == nullptr);
}

TEST_CASE("machines are written to files and read from them") {
    Machine machine = find_machine("h100");
    machine.node = 4, machine.network = 12.5e9;
    nlohmann::json json = machine_to_json(machine);
    CHECK(machine_to_json(machine_from_json(json, "m.json")) == machine_to_json(machine));
    CHECK(!json.contains("measured"));
    machine.measured = machine.bf16_products = true;
    Machine again = machine_from_json(machine_to_json(machine), "m.json");
    CHECK(again.measured);
    CHECK(again.bf16_products);
    CHECK(!machine_from_json(json, "m.json").measured);
    CHECK(!machine_from_json(json, "m.json").bf16_products);
    TemporaryFolder folder;
    write_file(folder / "m.json", json.dump());
    CHECK(find_machine(folder / "m.json").network == 12.5e9);

    struct {
        const char* field;
        nlohmann::json value;
        const char* error;
    } wrong[] = {{"flops", -1.0, "flops is -1.0; it must be a number above 0"},
                 {"links", 0, "links is 0; it must be a number above 0"},
                 {"streams", "fast", "streams is \"fast\"; it must be a number above 0"},
                 {"memory", 1e300, "memory is 1e+300; it must be a number above 0"},
                 {"node", 0, "node is 0; it must be a whole number from 1"},
                 {"node", 1.5, "node is 1.5; it must be a whole number from 1"},
                 {"number_bytes", 3, "number_bytes is 3; it must be 2 or 4"},
                 {"products", 1e17, "more than flops"},
                 {"measured", "yes", "measured is \"yes\"; it must be true or false"},
                 {"bf16_products", 2, "bf16_products is 2; it must be true or false"},
                 {"nodes", 8, "the field \"nodes\" is not known"}};
    for (auto& one : wrong) {
        CAPTURE(one.error);
        nlohmann::json bad = json;
        bad[one.field] = one.value;
        CHECK_REFUSED(machine_from_json(bad, "m.json"), one.error);
    }
    for (const MachineField& field : machine_fields()) {
        nlohmann::json bad = json;
        bad.erase(field.name);
        if (field.may_miss)
            CHECK(machine_from_json(bad, "m.json").*field.rate > 0);
        else
            CHECK_REFUSED(machine_from_json(bad, "m.json"), std::string(field.name) + " is missing");
    }
    CHECK_REFUSED(machine_from_json(nlohmann::json::array(), "m.json"), "must be an object");
    CHECK_REFUSED(find_machine("/nowhere/m.json"), "/nowhere/m.json");
}
