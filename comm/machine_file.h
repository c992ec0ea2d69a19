/*
Machines that a plan is made for: a card of the table by its name (comm/machine.h), or a file that describes
other nodes. The file is a JSON object with these fields, and no others; those of the last three lines may be
left out, and "measured" is true of a file that plan --measure or selftest --measure wrote:

    {"multiprocessors": 132, "flops": 989.4e12, "products": 720e12, "streams": 3.0e12, "memory": 80e9,
     "links": 360e9, "link_latency": 3e-6, "node": 8, "network": 45e9, "network_latency": 1e-5,
     "number_bytes": 2,
     "attention_forward": 677e12, "attention_backward": 504e12, "half_sums": 90, "launch": 2.5e-6,
     "host_memory": 250e9, "host_streams": 50e9, "host_link": 45e9, "storage": 2e9,
     "measured": false}
*/
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "comm/machine.h"       // Machine, find_card
#include "data/base/error.h"    // fail
#include "data/base/file.h"     // read_whole
#include "data/base/json.h"     // JsonObject, parse_json
#include "data/base/strings.h"  // nearest_name, printable

// A field of a machine's file. What is counted is a whole number.
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
        {"flops", &Machine::flops, nullptr, 1e18},                     // by the data sheet, for MFU
        {"products", &Machine::products, nullptr, 1e18},               // FLOP/s that large ones reach
        {"streams", &Machine::streams, nullptr, 1e15},               // bytes/s of memory that a copy reaches
        {"memory", &Machine::memory, nullptr, 1e15},                 // bytes of a device
        {"links", &Machine::links, nullptr, 1e15},                   // bytes/s within the node, one way
        {"link_latency", &Machine::link_latency, nullptr, 1},        // seconds of a message there
        {"node", nullptr, &Machine::node, 1 << 20},                  // devices
        {"network", &Machine::network, nullptr, 1e15},               // bytes/s of a device to other nodes
        {"network_latency", &Machine::network_latency, nullptr, 1},  // seconds of a message there
        {"number_bytes", nullptr, &Machine::number_bytes, 4},        // an activation's: 2 bf16, 4 fp32
        {"attention_forward", &Machine::attention_forward, nullptr, 1e18, true},    // FLOP/s of its inner
        {"attention_backward", &Machine::attention_backward, nullptr, 1e18, true},  // loop
        {"half_sums", &Machine::half_sums, nullptr, 1e6, true},  // terms of sums that take twice their time
        {"launch", &Machine::launch, nullptr, 1, true},          // seconds from one kernel to the next
        {"host_memory", &Machine::host_memory, nullptr, 1e15, true},    // bytes of the host, for each device
        {"host_streams", &Machine::host_streams, nullptr, 1e15, true},  // bytes/s that a copy there reaches
        {"host_link", &Machine::host_link, nullptr, 1e15, true},        // bytes/s between the two, one way
        {"storage", &Machine::storage, nullptr, 1e15, true},            // bytes/s that a node writes to disk
    };
    return fields;
}

// file: for messages.
inline Machine machine_from_json(const nlohmann::json& json, const std::string& file) {
    Machine machine = {};
    JsonObject object(json, file);
    for (const MachineField& field : machine_fields()) {
        if (field.count)
            machine.*field.count = (int)object.integer(field.name, 1, (int64_t)field.most);
        else if (!field.may_miss || object.has(field.name))
            machine.*field.rate = object.number(field.name, field.most);
    }
    if (machine.attention_forward == 0) machine.attention_forward = with_mma.forward * machine.products;
    if (machine.attention_backward == 0) machine.attention_backward = with_mma.backward * machine.products;
    machine.measured = object.boolean("measured", false);
    object.done("leave it out, or see comm/machine_file.h for those that are");
    if (machine.number_bytes != 2 && machine.number_bytes != 4)
        fail("%s: number_bytes is %d; it must be 2 or 4", file.c_str(), machine.number_bytes);
    if (machine.products > machine.flops)
        fail("%s: products is %g, more than flops, %g; correct one of them", file.c_str(), machine.products,
             machine.flops);
    machine.memory_rate = machine.streams, machine.link_rate = machine.links;
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
    return json;
}

// The row that has all words of the name: of several the one with the fastest links, and then the most
// memory. Null: there is none.
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

// The row of the device that is here; null: it has none, or there is no device.
inline const Card* card_here() {
    int count = 0, device = 0;
    cudaDeviceProp properties;
    bool any = cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
               cudaGetDevice(&device) == cudaSuccess &&
               cudaGetDeviceProperties(&properties, device) == cudaSuccess;
    return any ? find_card(properties.name) : nullptr;
}

// name: of a card, such as h100 or "A100 PCIe", or of a file, which ends in .json.
inline Machine find_machine(const std::string& name) {
    if (name.ends_with(".json")) {
        constexpr uint64_t most = 1 << 20;
        std::string source = read_whole(name, most, "larger than a machine's file; name another");
        return machine_from_json(parse_json(source, name), name);
    }
    if (const Card* card = card_called(name)) return machine_of(*card);
    std::vector<std::string> known;
    std::string all;
    for (const Card& card : cards) {
        std::string words = card.words;
        std::replace(words.begin(), words.end(), ' ', '-');
        std::transform(words.begin(), words.end(), words.begin(), [](unsigned char c) { return tolower(c); });
        known.push_back(words);
        all += (all.empty() ? "" : " ") + words;
    }
    fail("--machine %s: not a card that is known here%s; give a .json file that describes it, or one of %s",
         printable(name).c_str(), nearest_name(name, known).c_str(), all.c_str());
}
