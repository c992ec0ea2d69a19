/*
Weights between the ranks that hold their parts and one file.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/whole_tensors.h"  // set_tensors, collect_tensors
#include "comm/world.h"          // World
#include "data/error.h"
#include "data/weights_file.h"

// Writes the fp32 master copy if there is one, else the parameters, from rank 0: the same file however the
// model is cut. layout_at(position) gives the layout of the rank there. All ranks call it together, and all
// throw what goes wrong on the first.
template <typename LayoutAt>
void save_weights(ZeroState& state, LayoutAt&& layout_at, const nlohmann::ordered_json& header,
                  const std::string& path, const World& world) {
    std::unique_ptr<WeightsWriter> writer;
    auto on_root = [&](auto&& work) {
        world.together([&] {
            if (world.is_root()) work();
        });
    };
    on_root([&] {
        Dtype dtype = state.keeps_floats() ? Dtype::fp32 : Dtype::bf16;
        std::vector<StoredTensor> tensors;
        state.layout().each_of_model([&](const TensorRow& row, const std::string& name) {
            tensors.push_back({name, row.shape(), dtype});
        });
        writer = std::make_unique<WeightsWriter>(path, header, tensors);
    });
    std::string trouble;  // the other ranks send on, so it is thrown when they are done
    collect_tensors(state, layout_at,
                    [&](const std::string& name, uint64_t from, const void* data, size_t bytes) {
                        note_trouble(trouble, [&] { writer->write_at(name, from, data, bytes); });
                    });
    on_root([&] {
        if (!trouble.empty()) fail("%s", trouble.c_str());
        writer->commit();
    });
}

// bf16 is the upper half of fp32.
inline float bf16_to_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

// For all ranks.
inline void load_weights(ZeroState& state, const WeightsReader& reader) {
    std::vector<float> values;
    std::vector<uint16_t> narrow;
    set_tensors(state, [&](const TensorRow& row, const std::string& name, size_t first, size_t count) {
        const StoredTensor& tensor = reader.tensor(name);
        if (tensor.shape != row.shape()) {
            fail("%s: tensor %s has another shape than its options say; the file is damaged",
                 reader.path().c_str(), name.c_str());
        }
        values.resize(count);
        if (tensor.dtype == Dtype::fp32) {
            reader.read(tensor, first * sizeof(float), values.data(), count * sizeof(float));
        } else {
            narrow.resize(count);
            reader.read(tensor, first * sizeof(uint16_t), narrow.data(), count * sizeof(uint16_t));
            std::transform(narrow.begin(), narrow.end(), values.begin(), bf16_to_float);
        }
        return std::span<const float>(values);
    });
}
