/*
The devices, nodes and links that a plan is made for: taken from the table of cards or from a file, or
measured by the ranks that run this.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "comm/memory.h"         // DeviceArray
#include "comm/mesh.h"           // Mesh
#include "comm/placement.h"      // threads_per_rank
#include "comm/machine_rates.h"  // expected_product_rate, expected_attention_rate
#include "comm/world.h"          // World
#include "data/base/error.h"     // fail
#include "data/base/file.h"      // read_whole, NewFile
#include "data/base/json.h"      // JsonObject, parse_json
#include "data/base/strings.h"   // nearest_name, printable
#include "kernels/adamw.cuh"     // adamw_optimizer
#include "kernels/attention.cuh"
#include "kernels/cards.h"          // Machine, find_card
#include "kernels/elementwise.cuh"  // residual_forward
#include "kernels/fill.cuh"
#include "kernels/matmul.cuh"

// ----------------------------------------------------------------------------
// machine files
//
// A plan is made for a card of the table, by its name (kernels/cards.h), or for other nodes that a file
// describes. The file is a JSON object with these fields, and no others; those of the last four lines, and
// the capability, may be left out. "measured" is true in a file from plan --measure or selftest --measure,
// and "bf16_products" if those were on a CPU that trains with products in bf16:
//
//     {"multiprocessors": 132, "flops": 989.4e12, "products": 720e12, "streams": 3.0e12, "memory": 80e9,
//      "links": 360e9, "link_latency": 3e-6, "node": 8, "network": 45e9, "network_latency": 1e-5,
//      "number_bytes": 2, "capability": 90,
//      "attention_forward": 677e12, "attention_backward": 504e12, "half_sums": 90, "launch": 2.5e-6,
//      "host_memory": 250e9, "host_streams": 50e9, "host_link": 45e9, "storage": 2e9,
//      "disk": 2e9,
//      "measured": false, "bf16_products": false}

// A field of a machine file. A count is a whole number.
struct MachineField {
    using Rate = double Machine::*;
    using Count = int Machine::*;

    const char* name;
    Rate rate;
    Count count;
    double most;
    bool may_miss = false;
};

inline std::span<const MachineField> machine_fields() {
    static const MachineField fields[] = {
        {"multiprocessors", nullptr, &Machine::multiprocessors, 1e4},  // or cores
        {"flops", &Machine::flops, nullptr, 1e18},                     // on the data sheet, for MFU
        {"products", &Machine::gemm_flops, nullptr, 1e18},             // FLOP/s that large products reach
        {"streams", &Machine::memory_bandwidth, nullptr, 1e15},      // bytes/s of memory that a copy reaches
        {"memory", &Machine::memory, nullptr, 1e15},                 // bytes of a device
        {"links", &Machine::node_bandwidth, nullptr, 1e15},          // bytes/s within the node, one way
        {"link_latency", &Machine::link_latency, nullptr, 1},        // seconds of a message within the node
        {"node", nullptr, &Machine::node, 1 << 20},                  // devices of a node
        {"network", &Machine::network, nullptr, 1e15},               // bytes/s of a device to other nodes
        {"network_latency", &Machine::network_latency, nullptr, 1},  // seconds of a message between nodes
        {"number_bytes", nullptr, &Machine::element_bytes, 4},       // of an activation: 2 bf16, 4 fp32
        {"capability", nullptr, &Machine::capability, 999, true},    // such as 90; 0: the host
        {"attention_forward", &Machine::attention_forward, nullptr, 1e18, true},    // inner loop's FLOP/s
        {"attention_backward", &Machine::attention_backward, nullptr, 1e18, true},  // inner loop's FLOP/s
        {"half_sums", &Machine::gemm_half_k, nullptr, 1e6, true},  // inner dimension K that halves the rate
        {"launch", &Machine::launch, nullptr, 1, true},            // seconds from one kernel to the next
        {"host_memory", &Machine::host_memory, nullptr, 1e15, true},  // bytes of the host, for each device
        {"host_streams", &Machine::host_bandwidth, nullptr, 1e15, true},  // bytes/s that a copy there reaches
        {"host_link", &Machine::host_link, nullptr, 1e15, true},          // bytes/s to the host, one way
        {"storage", &Machine::storage, nullptr, 1e15, true},  // bytes/s that a node writes to disk
        {"disk", &Machine::disk, nullptr, 1e15, true},        // bytes/s of random pages, for each device
    };
    return fields;
}

// file: its name, for messages.
inline Machine machine_from_json(const nlohmann::json& json, const std::string& file) {
    Machine machine = {};
    JsonObject object(json, file);
    for (const MachineField& field : machine_fields()) {
        if (field.may_miss && !object.has(field.name)) continue;
        if (field.count)
            machine.*field.count =
                (int)object.integer(field.name, field.count != &Machine::capability, (int64_t)field.most);
        else
            machine.*field.rate = object.number(field.name, field.most);
    }
    if (!object.has("capability") && machine.element_bytes == sizeof(float)) machine.capability = 0;
    const AttentionShare share = attention_share(machine.capability);
    if (machine.attention_forward == 0) machine.attention_forward = share.forward * machine.gemm_flops;
    if (machine.attention_backward == 0) machine.attention_backward = share.backward * machine.gemm_flops;
    machine.measured = object.boolean("measured", false);
    machine.bf16_products = object.boolean("bf16_products", false);
    object.done("leave it out, or see comm/machine.h for the known fields");
    if (machine.element_bytes != 2 && machine.element_bytes != 4)
        fail("%s: number_bytes is %d; it must be 2 or 4", file.c_str(), machine.element_bytes);
    if (machine.gemm_flops > machine.flops)
        fail("%s: products is %g, more than flops, %g; correct one of them", file.c_str(), machine.gemm_flops,
             machine.flops);
    machine.memory_rate = machine.memory_bandwidth, machine.link_rate = machine.node_bandwidth;
    machine.published = true;
    return machine;
}

inline nlohmann::ordered_json machine_to_json(const Machine& machine) {
    nlohmann::ordered_json json;
    for (const MachineField& field : machine_fields()) {
        if (field.rate)
            json[field.name] = machine.*field.rate;
        else
            json[field.name] = machine.*field.count;
    }
    if (machine.measured) json["measured"] = true;
    if (machine.bf16_products) json["bf16_products"] = true;
    return json;
}

// Returns the card whose words are all in the name. If there is none, returns, of the cards whose words
// include the name, the one with the fastest links, and of several such cards the one with the most memory.
// Null if no card matches.
inline const Card* card_called(const std::string& name) {
    if (const Card* card = find_card(name)) return card;
    const Card* best = nullptr;
    for (const Card& card : cards) {
        bool better = !best || card.link_rate > best->link_rate ||
                      (card.link_rate == best->link_rate && card.memory > best->memory);
        if (has_word(card.words, name) && better) best = &card;
    }
    return best;
}

// Returns the table's card for the device of this process. Null if the table has none, or if there is no
// device.
inline const Card* card_here() {
    int count = 0, device = 0;
    cudaDeviceProp properties;
    bool any = cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
               cudaGetDevice(&device) == cudaSuccess &&
               cudaGetDeviceProperties(&properties, device) == cudaSuccess;
    return any ? find_card(properties.name) : nullptr;
}

// name: the name of a card, such as h100 or "A100 PCIe", or of a file, which ends in .json.
inline Machine find_machine(const std::string& name) {
    if (name.ends_with(".json")) {
        constexpr uint64_t most = 1 << 20;
        std::string source = read_whole(name, most, "too large for a machine file; name another");
        return machine_from_json(parse_json(source, name), name);
    }
    if (const Card* card = card_called(name)) return machine_of(*card);
    std::vector<std::string> known;
    for (const Card& card : cards) {
        std::string words = card.words;
        std::replace(words.begin(), words.end(), ' ', '-');
        std::transform(words.begin(), words.end(), words.begin(), [](unsigned char c) { return tolower(c); });
        known.push_back(words);
    }
    fail("--machine %s: not a known card%s; give a .json file that describes it, or one of %s",
         printable(name).c_str(), nearest_name(name, known).c_str(), joined(known, " ").c_str());
}

// ----------------------------------------------------------------------------
// measured
//
// `plan --measure` writes what `--machine` reads. All ranks measure at the same time, as they work in a run,
// so that those of a host share its cores and memory; the first rank's rates are written.
//
// The rates are chosen such that the formulas of comm/machine_rates.h give the measured times.

// The sizes of what is measured.
struct MeasuredSizes {
    int product;                   // rows, columns and terms
    size_t stream, host, message;  // elements: of arrays on the device, on the host, and of a message
    int tokens, heads;             // attention's
    double seconds;                // how long calls are repeated
};

inline MeasuredSizes measured_sizes() {
    constexpr size_t million = 1 << 20;
    if (has_own_memory) return {8192, 128 * million, 64 * million, 32 * million, 8192, 16, 0.05};
    return {1024, 16 * million, 8 * million, million, 1024, 2, 0.05};
}

// Measures how long a call takes: the median of several rounds, each of many calls.
class Stopwatch {
public:
    // enough: seconds for which calls are repeated
    Stopwatch(const World& world, cudaStream_t stream, double enough)
        : world_(world), timer_(stream), enough_(enough) {}

    // For all ranks, which make the same number of calls. Returns the seconds of one call, on the slowest
    // rank.
    template <typename Call>
    double seconds(Call&& call) const {
        constexpr int rounds = 5, most = 1000;
        auto measure = [&](int calls) {
            world_.barrier();
            timer_.start();
            for (int i = 0; i < calls; i++) call();
            timer_.stop();
            int nanoseconds = (int)std::min(1e9 * timer_.seconds(), (double)INT_MAX);
            return 1e-9 * std::max(world_.largest(nanoseconds), 1) / calls;
        };
        measure(1);  // the first is slow: libraries load their code
        int calls = (int)std::clamp(enough_ / measure(1), 1.0, (double)most);
        std::vector<double> times(rounds);
        for (double& time : times) time = measure(calls);
        std::sort(times.begin(), times.end());
        return times[rounds / 2];
    }

private:
    const World& world_;
    const StreamTimer timer_;
    const double enough_;
};

// Seconds of a product of (size, sums) and (size, sums) transposed.
inline double product_seconds(const Stopwatch& watch, int size, int sums, cudaStream_t stream) {
    size_t out = (size_t)size * size, inp = (size_t)size * sums;
    DeviceArray<floatX> numbers(out + 2 * inp);
    std::vector<floatX> some(std::min(out + 2 * inp, (size_t)1 << 20));
    // Normally distributed values, which may repeat: with constant values, a device uses less power and runs
    // at a higher clock.
    uint64_t key = random_key(0, "machine");
    for (size_t i = 0; i < some.size(); i++) some[i] = floatX(random_normal(key, i));
    for (size_t at = 0; at < out + 2 * inp; at += some.size()) {
        copy_async(numbers.data + at, some.data(), std::min(some.size(), out + 2 * inp - at), stream);
    }
    return watch.seconds([&] {
        matmul_forward(numbers.data, numbers.data + out, numbers.data + out + inp, nullptr, size, sums, size,
                       stream);
    });
}

// Sets gemm_flops and gemm_half_k, from two products with outputs of the same size: the one with longer sums
// takes less time for each term.
inline void measure_products(Machine& machine, const Stopwatch& watch, int size, cudaStream_t stream) {
    const int few = size / 16;
    auto shape = [&](int sums) { return ProductShape{(double)size, (double)size, (double)sums}; };
    double many_seconds = product_seconds(watch, size, size, stream),
           few_seconds = product_seconds(watch, size, few, stream);
    // seconds = c (sums + gemm_half_k), for both
    double each = (many_seconds - few_seconds) / (size - few);
    machine.gemm_half_k = std::clamp(each > 0 ? many_seconds / each - size : 0.0, 1.0, 1e4);
    machine.gemm_flops = 1;
    machine.gemm_flops = shape(size).flops() / many_seconds / expected_product_rate(machine, shape(size));
}

inline void measure_memory(Machine& machine, const Stopwatch& watch, const World& world, size_t count,
                           cudaStream_t stream) {
    DeviceArray<floatX> numbers(3 * count);
    zero_async(numbers.data, 3 * count, stream);
    auto add = [&](size_t n) {
        residual_forward(numbers.data, numbers.data + count, numbers.data + 2 * count, n, stream);
    };
    double share = expected_stream_share("elementwise");
    machine.memory_bandwidth =
        3.0 * (double)count * sizeof(floatX) / watch.seconds([&] { add(count); }) / share;
    machine.launch = std::clamp(watch.seconds([&] { add(64); }), 1e-9, 1e-3);
    size_t free_bytes, total;
    cudaCheck(cudaMemGetInfo(&free_bytes, &total));
    machine.memory = (double)total / (has_own_memory ? 1 : world.local_size());
}

// Measures a device's host: the memory bandwidth that AdamW reaches there, and the rate of copies from pinned
// memory to the device.
inline void measure_host(Machine& machine, const Stopwatch& watch, const World& world, size_t count,
                         cudaStream_t stream) {
    machine.host_memory = (double)available_host_memory(world.local_size());
    Arena arena;
    arena.of("host", true);
    float* numbers[4];
    for (float*& array : numbers) array = arena.take_zeros<float>(count, stream);
    floatX* params = arena.take_zero_numbers(count, stream);
    DeviceArray<float> device(count);
    machine.host_link = (double)count * sizeof(float) /
                        watch.seconds([&] { copy_async(device.data, numbers[0], count, stream); });
    constexpr bool has_master = sizeof(floatX) < sizeof(float);
    float scale = 1;
    auto [grads, m, v, master] = numbers;
    OptimizerArrays arrays = {params, has_master ? master : nullptr, {m, v}, grads, &scale};
    Optimizer adamw = adamw_optimizer({1e-3, 0.9, 0.95, 1e-8, 0.1, 1, false}, 0);
    auto step = [&] { adamw.step.on_host(arrays, {{0, count, 0, 0, true}}); };
    cudaCheck(cudaStreamSynchronize(stream));
    step();  // the first touches the pages
    world.barrier();
    double start = seconds_now();
    step();
    double bytes = 4 + 4 * 4 + 8 + sizeof(floatX) * has_master;  // like optimizer_cost()
    machine.host_bandwidth = bytes * (double)count / std::max(seconds_now() - start, 1e-9);
}

inline void measure_attention(Machine& machine, const Stopwatch& watch, int T, int NH, cudaStream_t stream) {
    constexpr int HS = 128;
    AttentionShape shape = self_attention_shape(1, T, NH, NH, HS, 0, nullptr);
    size_t out = (size_t)T * NH * HS, qkv = 3 * out;
    DeviceArray<floatX> numbers(2 * qkv + 2 * out);
    DeviceArray<float> lse((size_t)T * NH), scratch(attention_backward_scratch(shape));
    zero_async(numbers.data, 2 * qkv + 2 * out, stream);
    floatX *inputs = numbers.data, *gradients = inputs + qkv, *outputs = gradients + qkv,
           *output_gradients = outputs + out;
    double keys = (T + 1) / 2.0, scores = 2.0 * keys * (double)out;  // FLOPs of one of its products
    auto rate = [&](double products, double seconds, bool forward) {
        return products * scores / seconds / expected_attention_rate(machine, {scores, keys, HS, forward});
    };
    machine.attention_forward = machine.attention_backward = 1;
    double forward = watch.seconds([&] { attention_forward(outputs, lse.data, inputs, shape, stream); });
    double backward = watch.seconds([&] {
        attention_backward(gradients, scratch.data, output_gradients, inputs, outputs, lse.data, shape,
                           stream);
    });
    double forward_rate = rate(2, forward, true), backward_rate = rate(5, backward, false);
    machine.attention_forward = forward_rate, machine.attention_backward = backward_rate;
}

// Measures a group's bandwidth (bytes per second) and latency (seconds), by all-gathers.
inline void measure_group(const Communicator& group, const Stopwatch& watch, size_t part, cudaStream_t stream,
                          double& rate, double& latency) {
    int others = group.size() - 1;
    DeviceArray<float> numbers(part * (size_t)group.size());
    zero_async(numbers.data, part * (size_t)group.size(), stream);
    auto gather = [&](size_t count) {
        return watch.seconds([&] { group.all_gather(numbers.data, count, Traffic::weights, stream); });
    };
    latency = std::clamp(gather(1) / others, 1e-9, 1.0);
    double bytes = (double)others * (double)part * sizeof(float), seconds = gather(part);
    rate = bytes / std::max(seconds - others * latency, seconds / 2);
}

// Returns whether this process rounds operands of products to bf16 although its numbers are fp32.
inline bool rounds_products_to_bf16() {
#ifdef DEVICE_CPU
    return cpu_products_in_bf16;
#else
    return false;
#endif
}

// For all ranks.
inline Machine measured_machine(const World& world, const MeasuredSizes& sizes = measured_sizes()) {
    if (world.size() % world.local_size())
        fail("--measure: nodes have different numbers of ranks; start the same number on each");
    ComputeStream own;
    cudaStream_t stream = own.stream;
    Machine machine = {};
    machine.measured = true;
    Stopwatch watch(world, stream, sizes.seconds);
    int nodes = world.size() / world.local_size();
    Mesh mesh(world, {.tp = world.local_size(), .pp = 1, .dp = nodes, .shard = nodes}, stream);
    machine.multiprocessors =
        has_own_memory ? device_properties().multiProcessorCount : std::max(threads_per_rank(world), 1);
    machine.element_bytes = sizeof(floatX);
    machine.capability = has_own_memory ? capability_of(device_properties()) : 0;
    machine.node = world.local_size();
    machine.bf16_products = rounds_products_to_bf16();
    measure_products(machine, watch, sizes.product, stream);
    measure_memory(machine, watch, world, sizes.stream, stream);
    measure_attention(machine, watch, sizes.tokens, sizes.heads, stream);
    measure_host(machine, watch, world, sizes.host, stream);
    const Card* card = card_here();
    Machine usual = machine_of(card ? *card : *find_card("host CPU"));
    machine.flops = card ? std::max(card->flops, machine.gemm_flops) : machine.gemm_flops;
    machine.node_bandwidth = usual.node_bandwidth, machine.network = usual.network;
    if (world.local_size() > 1)
        measure_group(mesh.tensor(), watch, sizes.message, stream, machine.node_bandwidth,
                      machine.link_latency);
    if (nodes > 1)
        measure_group(mesh.shard(), watch, sizes.message, stream, machine.network, machine.network_latency);
    return machine;
}

// The measured rates, as text.
inline std::string measurement_text(const Machine& m, const World& world, const std::string& file) {
    std::string result;
    auto say = [&](const char* what, const std::string& words) {
        result += text("%-13s%s\n", what, words.c_str());
    };
    say("products", text("%sFLOP/s%s; half that rate for sums of %.0f terms", human(m.gemm_flops).c_str(),
                         m.bf16_products ? " in bf16" : "", m.gemm_half_k));
    say("attention", text("%sFLOP/s forward, %sFLOP/s backward", human(m.attention_forward).c_str(),
                          human(m.attention_backward).c_str()));
    say("memory",
        text("%s at %sB/s; %.3g us from one kernel to the next", size_text((size_t)m.memory).c_str(),
             human(m.memory_bandwidth).c_str(), 1e6 * m.launch));
    bool one = world.local_size() == 1, one_node = world.size() == world.local_size();
    say("links", one ? "not measured, because that needs two ranks on a node; the usual value is assumed"
                     : text("%sB/s, %.3g us", human(m.node_bandwidth).c_str(), 1e6 * m.link_latency));
    say("network", one_node ? "not measured, because that needs two nodes; the usual value is assumed"
                            : text("%sB/s, %.3g us", human(m.network).c_str(), 1e6 * m.network_latency));
    return result + "\n" + text("train_gpt plan --machine %s ...\n", file.c_str());
}

// For all ranks: rejects a bad file name for --measure before anything is measured.
inline void check_measure(const std::string& path, const World& world) {
    world.on_all_ranks([&] {
        if (!path.ends_with(".json"))
            fail("--measure %s: not the name of a .json file, which --machine requires; give one",
                 printable(path).c_str());
        if (world.is_root() && access(path.c_str(), F_OK) == 0)
            fail("--measure %s: already exists; delete it or name another", printable(path).c_str());
    });
}

// For all ranks.
inline void write_machine(const Machine& machine, const std::string& path, const World& world) {
    world.on_all_ranks([&] {
        if (world.is_root()) write_whole(path, machine_to_json(machine).dump(4) + "\n");
    });
}

// For all ranks: `plan --measure FILE`.
inline void measure_machine(const std::string& path, const World& world) {
    check_measure(path, world);
    Machine machine = measured_machine(world);
    write_machine(machine, path, world);
    print_text(measurement_text(machine, world, path));
}
