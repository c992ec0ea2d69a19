// Damage for JSON that is well-formed: a fuzzer's bytes choose nodes of a document, and what to put in their
// place.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string_view>
#include <vector>

inline void list_nodes(nlohmann::json& node, std::vector<nlohmann::json*>& nodes) {
    nodes.push_back(&node);
    if (!node.is_structured()) return;
    for (auto& child : node) list_nodes(child, nodes);
}

// Every three bytes are one change: two choose the node, one the value.
inline void damage_json(nlohmann::json& document, std::string_view bytes) {
    static const nlohmann::json values =
        nlohmann::json::parse(R"([null, true, false, 0, 1, -1, 2, 3, 7, 8, 63, 64, 65,
        128, 1000, 16777216, 16777217, 2147483647, 2147483648, 4294967296, 9223372036854775807, 9223372036854775808,
        18446744073709551615, -9223372036854775808, 0.5, -0.5, 1e-300, 1e300, 1e13, "", "a\n", "fp32", "bf16", "silu",
        "gelu", "gpt2", "llama", "mistral", "qwen2", "qwen3", "seed_oss", "default", "yarn", "full_attention", "sliding_attention", [], [1],
        [[]], {}, {"rope_type": "llama3"}, {"type": "default", "rope_theta": 10000}])");
    for (; bytes.size() >= 3; bytes.remove_prefix(3)) {
        std::vector<nlohmann::json*> nodes;
        list_nodes(document, nodes);
        nlohmann::json& node = *nodes[((uint8_t)bytes[0] * 256u + (uint8_t)bytes[1]) % nodes.size()];
        uint8_t choice = (uint8_t)bytes[2];
        if (choice < values.size())
            node = values[choice];
        else if (choice < 100 && node.is_structured() && !node.empty())
            node.erase(node.begin());
        else if (choice < 120 && node.is_object())
            node["sliding_window"] = node["use_sliding_window"] = true;
        else if (choice < 140 && node.is_array() && node.size() < 100)
            node.push_back(values[choice % values.size()]);
        else
            node = nlohmann::json(*nodes[choice % nodes.size()]);
        if (document.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace).size() > 65536) return;
    }
}
