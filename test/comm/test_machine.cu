// The table of cards: names as the driver gives them, and estimates for cards that have no row.
// devices: cpu
#include <cmath>
#include <cstring>
#include <set>

#include "comm/machine.h"
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

// The card has as many multiprocessors as its row says.
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
                 {"NVIDIA B200", 2250, 8000},
                 {"NVIDIA GB200", 2500, 8000},
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
        CHECK(card.flops / card.multiprocessors > 0.5e12);
        CHECK(card.flops / card.multiprocessors < 20e12);
        CHECK(card.product_share >= 0.6);
        CHECK(card.product_share <= 0.9);
    }
}

TEST_CASE("expected rates are shares of the published ones") {
    Machine h200 = named("NVIDIA H200");
    CHECK(h200.products == doctest::Approx(720e12).epsilon(0.005));
    CHECK(h200.streams == doctest::Approx(4.3e12).epsilon(0.01));
}

TEST_CASE("a part of a card has a share of its rates, as an estimate") {
    Machine part = named("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 66),
            whole = named("NVIDIA H100 80GB HBM3", 132);
    CHECK(whole.published);
    CHECK(!part.published);
    CHECK(part.flops == doctest::Approx(whole.flops / 2).epsilon(1e-12));
    CHECK(part.products == doctest::Approx(whole.products / 2).epsilon(1e-12));
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
                   {device("NVIDIA B300", 148, 10, 3), 1.855e9, 2250}};
    for (auto& card : unknown) {
        CAPTURE(card.device.name);
        Machine m = machine_of(card.device, card.clock, 768e9);
        CHECK(!m.published);
        CHECK(m.flops == doctest::Approx(card.tflops * 1e12).epsilon(0.01));
        CHECK(m.products < m.flops);
        CHECK(m.memory_rate == 768e9);
        CHECK(m.streams == doctest::Approx(stream_share * 768e9));
    }
    CHECK(machine_of(device("NVIDIA V100", 80, 7, 0), 1.5e9, 0).flops == 0);  // has no bf16
}

TEST_CASE("a CPU is measured") {
    CHECK(this_machine().flops == 0);
    CHECK(!this_machine().published);
}
