/*
The cards that the program knows, one row each, and the performance to expect of the device in use.

A row's rates are those of the vendor's data sheet: dense bf16 matrix products with sums in fp32, device
memory, and the link to the other cards of a node, in one direction (NVLink if every card of a node has it;
PCIe if bridges join at most pairs). No program reaches these rates. The product share is the fraction to
expect: the rate of large cuBLASLt products in published measurements, less what the power limit costs in a
run of hours. The share of the A100 with NVLink, and the shares and times below the table, are fitted to the
step times of published runs by test/bench/calibrate_planner.cu.

A row also describes the nodes in which such cards are usually bought: the number of linked cards, and the
network's rate per card, in one direction. Other nodes can be described in a file (comm/machine.h).
*/
#pragma once

#include <algorithm>
#include <cctype>
#include <string>

#include "kernels/common.cuh"

// The rate of attention's inner loops on one multiprocessor, with heads of size 128, as a share of the rate
// of products.
struct AttentionShare {
    double forward, backward;
};
constexpr AttentionShare with_wgmma = {0.94, 0.70};        // counted in the Hopper kernels' code
constexpr AttentionShare with_mma = {0.75, 0.60};          // other cards, with Ampere's mma
constexpr AttentionShare mma_of_blackwell = {0.30, 0.24};  // Blackwell's products use faster instructions
constexpr AttentionShare of_host = {0.60, 0.50};

// capability: see capability_of; 0: the host.
inline AttentionShare attention_share(int capability) {
    if (capability == 0) return of_host;
    int generation = capability / 10;
    return generation == 9 ? with_wgmma : generation == 10 || generation == 11 ? mma_of_blackwell : with_mma;
}

struct Card {
    const char* words;  // all must be in cudaDeviceProp::name, in any order; the first matching row is used
    int capability;     // see capability_of
    int multiprocessors;
    double flops;           // FLOP/s
    double memory;          // bytes that the driver offers: the nominal GiB, less what it reserves
    double memory_rate;     // bytes/s
    double link_rate;       // bytes/s
    double product_share;   // fraction of flops to expect
    double network_rate;    // bytes/s per card, from node to node
    int node = 8;           // cards per node
    int element_bytes = 2;  // size of an activation in the program built for this card
};

constexpr Card cards[] = {
    {"A100 PCIe 80GB", 80, 108, 312e12, 85.0e9, 1935e9, 32e9, 0.72, 12.5e9},
    {"A100 PCIe", 80, 108, 312e12, 42.3e9, 1555e9, 32e9, 0.72, 12.5e9},
    {"A100 40GB", 80, 108, 312e12, 42.3e9, 1555e9, 300e9, 0.765, 25e9},
    {"A100 80GB", 80, 108, 312e12, 85.0e9, 2039e9, 300e9, 0.765, 25e9},  // best measured: 271 TFLOP/s
    {"A800 PCIe 80GB", 80, 108, 312e12, 85.0e9, 1935e9, 32e9, 0.72, 12.5e9},
    {"A800 40GB", 80, 108, 312e12, 42.3e9, 1555e9, 32e9, 0.72, 12.5e9},
    {"A800 80GB", 80, 108, 312e12, 85.0e9, 2039e9, 200e9, 0.765, 25e9},
    {"H100 PCIe", 90, 114, 756e12, 84.9e9, 2.0e12, 64e9, 0.62, 25e9},
    {"H100 NVL", 90, 132, 835.5e12, 100e9, 3.9e12, 64e9, 0.68, 25e9},
    {"H100", 90, 132, 989.4e12, 84.9e9, 3.35e12, 450e9, 0.728, 50e9},  // 720 of 989.4 TFLOP/s
    {"H800 PCIe", 90, 114, 756e12, 84.9e9, 2.0e12, 64e9, 0.62, 25e9},
    {"H800", 90, 132, 989.4e12, 84.9e9, 3.35e12, 200e9, 0.728, 50e9},
    {"H200 NVL", 90, 132, 835.5e12, 150.1e9, 4.8e12, 64e9, 0.68, 25e9},
    {"H200", 90, 132, 989.4e12, 150.1e9, 4.8e12, 450e9, 0.728, 50e9},
    {"GH200 144G", 90, 132, 989.4e12, 144e9, 4.9e12, 450e9, 0.75, 25e9, 4},
    {"GH200", 90, 132, 989.4e12, 101.5e9, 4.0e12, 450e9, 0.75, 25e9, 4},
    {"H20", 90, 78, 148e12, 102e9, 4.0e12, 450e9, 0.90, 50e9},
    {"B200", 100, 148, 2250e12, 191.5e9, 7.67e12, 900e9, 0.70, 50e9},
    {"GB200", 100, 152, 2500e12, 186e9, 8.0e12, 900e9, 0.70, 50e9, 72},
    {"B300", 103, 148, 2250e12, 287e9, 8.0e12, 900e9, 0.70, 100e9},
    {"GB300", 103, 152, 2500e12, 287e9, 8.0e12, 900e9, 0.70, 100e9, 72},
    {"L40S", 89, 142, 362e12, 47.8e9, 864e9, 32e9, 0.65, 12.5e9},
    {"L40", 89, 142, 181e12, 47.8e9, 864e9, 32e9, 0.80, 12.5e9},
    {"L4", 89, 58, 121e12, 23.7e9, 300e9, 32e9, 0.60, 12.5e9},
    {"RTX 3090", 86, 82, 71e12, 25.4e9, 936e9, 32e9, 0.90, 3.125e9},
    {"RTX 4090", 89, 128, 165.2e12, 25.4e9, 1008e9, 32e9, 0.90, 3.125e9},
    {"RTX PRO 6000", 120, 188, 503.8e12, 101.5e9, 1792e9, 64e9, 0.80, 12.5e9},
    {"RTX 5090", 120, 170, 209.5e12, 33.7e9, 1792e9, 64e9, 0.90, 3.125e9},
    // 16 cores of a server with a 10 Gbit/s network, only for plans: no driver reports this name
    {"host CPU", 0, 16, 1e12, 64e9, 100e9, 10e9, 0.70, 1.25e9, 1, 4},
};

constexpr double stream_share = 0.9;    // fraction of memory_rate to expect: 4.3 of 4.8 TB/s on an H200
constexpr double link_share = 0.83;     // fraction of link_rate that large NCCL collectives reach: fitted
constexpr double network_share = 0.86;  // fraction of network_rate: fitted
constexpr double unknown_product_share = 0.7;  // for cards without a row

// Returns whether the text has the word, with no letter or digit next to it. Case does not matter.
inline bool has_word(const std::string& text, const std::string& word) {
    auto same = [](char a, char b) { return tolower((unsigned char)a) == tolower((unsigned char)b); };
    auto ends = [&](auto at) { return at == text.end() || !isalnum((unsigned char)*at); };
    for (auto at = text.begin();; ++at) {
        at = std::search(at, text.end(), word.begin(), word.end(), same);
        if (at == text.end()) return false;
        if ((at == text.begin() || ends(at - 1)) && ends(at + (long)word.size())) return true;
    }
}

// Returns the row of the card with this name, or null if there is none.
inline const Card* find_card(const std::string& name) {
    for (const Card& card : cards) {
        std::string words = card.words, word;
        bool all = true;
        for (size_t begin = 0, end; begin < words.size(); begin = end + 1) {
            end = std::min(words.find(' ', begin), words.size());
            all = all && has_word(name, words.substr(begin, end - begin));
        }
        if (all) return &card;
    }
    return nullptr;
}

// Returns the FLOPs of dense bf16 products, with sums in fp32, that a multiprocessor performs per clock; 0:
// not known. GeForce cards do half as many as others of their generation.
inline double flops_per_clock(const cudaDeviceProp& device) {
    constexpr struct {
        int capability;
        double flops;
    } generations[] = {{80, 2048}, {86, 1024}, {89, 1024}, {90, 4096}, {100, 8192}, {103, 8192}, {120, 1024}};
    for (auto [capability, flops] : generations) {
        if (capability_of(device) != capability) continue;
        return has_word(device.name, "GeForce") ? flops / 2 : flops;
    }
    return 0;
}

// The rates of a device. 0: not known, in which case rates must be measured (GemmRate), as for a CPU.
struct Machine {
    int multiprocessors;
    double flops, memory_rate, link_rate;  // peak rates, in FLOP/s and bytes/s
    double gemm_flops,
        memory_bandwidth;  // expected rates of large products, and of kernels that only read and write
    bool published;        // flops is from the data sheet; else it is an estimate
    // nodes of such devices, and the expected rates and latencies of messages within and between them
    double memory = 0;                                   // bytes per device
    int node = 1;                                        // devices per node
    double node_bandwidth = 0, network = 0;              // bytes/s per device, in one direction
    double link_latency = 3e-6, network_latency = 1e-5;  // seconds per message
    int element_bytes = 2;                               // see Card
    int capability = 90;                                 // see Card
    // other parameters of kernel times (comm/machine_rates.h)
    double attention_forward = 0, attention_backward = 0;  // FLOP/s of the inner loops with heads of 128
    double gemm_half_k = 90;  // K whose sums take as long as loading the first operands: fitted
    double launch = 2.5e-6;   // seconds from one kernel to the next: fitted
    // the host, per device: bytes of its memory, that memory's bytes/s, and bytes/s between host and device,
    // one way
    double host_memory = 128e9, host_bandwidth = 25e9, host_link = 22e9;
    double storage = 2e9;        // bytes/s at which a node writes to its runs' disk
    double disk = 2e9;           // bytes/s of random 4 KB pages on local disks, for each device
    bool measured = false;       // rates come from --measure, on such devices
    bool bf16_products = false;  // for fp32 numbers: operands of products are rounded to bf16 (CPUs)

    LedgerCard ledger_card() const { return {(size_t)element_bytes, capability}; }

    void set_gemm_flops(double rate, const AttentionShare& attention) {
        gemm_flops = rate;
        attention_forward = attention.forward * rate, attention_backward = attention.backward * rate;
    }
};

// Returns the rates of a card from its row.
inline Machine machine_of(const Card& card) {
    Machine machine = {.multiprocessors = card.multiprocessors,
                       .flops = card.flops,
                       .memory_rate = card.memory_rate,
                       .link_rate = card.link_rate,
                       .gemm_flops = 0,
                       .memory_bandwidth = stream_share * card.memory_rate,
                       .published = true,
                       .memory = card.memory,
                       .node = card.node,
                       .node_bandwidth = link_share * card.link_rate,
                       .network = network_share * card.network_rate,
                       .element_bytes = card.element_bytes,
                       .capability = card.capability};
    machine.set_gemm_flops(card.product_share * card.flops, attention_share(card.capability));
    if (card.capability == 0)
        machine.host_memory = machine.memory,
        machine.host_bandwidth = machine.host_link = machine.memory_bandwidth;
    else if (card.capability >= 90)  // hosts with PCIe 5 and DDR5
        machine.host_memory = 250e9, machine.host_bandwidth = 50e9, machine.host_link = 45e9;
    return machine;
}

// Returns the rates of a device. If its number of multiprocessors differs from its row's, it is part of a
// card (MIG) or another card of the same name: flops and memory_rate are scaled accordingly. clock (Hz) and
// memory_rate are as the driver reports them; 0: not reported.
inline Machine machine_of(const cudaDeviceProp& device, double clock, double memory_rate) {
    Machine m = {};
    m.multiprocessors = device.multiProcessorCount;
    double product_share = unknown_product_share;
    m.capability = capability_of(device);
    if (const Card* card = find_card(device.name)) {
        double part = device.multiProcessorCount / (double)card->multiprocessors;
        m.flops = part * card->flops;
        m.memory_rate = part * card->memory_rate;
        m.link_rate = card->link_rate;
        m.published = part == 1;
        product_share = card->product_share, m.capability = card->capability;
    } else {
        m.flops = device.multiProcessorCount * clock * flops_per_clock(device);
        m.memory_rate = memory_rate;
    }
    m.set_gemm_flops(product_share * m.flops, attention_share(m.capability));
    m.memory_bandwidth = stream_share * m.memory_rate;
    return m;
}

// The device that this process uses.
inline const Machine& this_machine() {
    static const Machine machine = [] {
        int device, clock, memory_clock, memory_bits;  // clocks in kHz
        cudaCheck(cudaGetDevice(&device));
        cudaCheck(cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, device));
        cudaCheck(cudaDeviceGetAttribute(&memory_clock, cudaDevAttrMemoryClockRate, device));
        cudaCheck(cudaDeviceGetAttribute(&memory_bits, cudaDevAttrGlobalMemoryBusWidth, device));
        double memory_rate = 2 * 1e3 * memory_clock * memory_bits / 8;  // two transfers per clock
        return machine_of(device_properties(), 1e3 * clock, memory_rate);
    }();
    return machine;
}
