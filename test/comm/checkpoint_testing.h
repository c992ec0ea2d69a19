/*
Shared by the tests of checkpoints: models that are only parameters, states in which every element of every
slot has its own value, and byte-for-byte comparison of checkpoints.
*/
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "comm/checkpoint_loader.h"
#include "comm/checkpoint_saver.h"
#include "comm/zero_checkpoint.h"

// ----------------------------------------------------------------------------
// models

struct ToyModel {
    std::vector<TensorRow> rows;
    int layers;
    bool tied;
};

// Has one tensor for each way of partitioning: a padded vocabulary of odd size, heads copied to several
// tensor ranks, columns, and replicated tensors. Fits 1, 2, 4 or 8 tensor ranks.
inline ToyModel toy_model(bool tied) {
    using enum Unit;
    std::vector<TensorRow> rows = {
        {0, embedding, "in", 51, 16, 0, 1, true, Shard::rows, {}, 16},
        {1, embedding, "position", 7, 16, 0, 1, true, Shard::replicated},
        {2, block, "norm", 13, 0, 1, 1, false, Shard::replicated},
        {3, block, "heads", 24, 16, 0, 1, true, Shard::rows, {{16, 8}, {4, 2}, {4, 2}}},
        {4, block, "heads.bias", 24, 0, 0, 1, false, Shard::rows, {{16, 8}, {4, 2}, {4, 2}}},
        {5, block, "out", 11, 24, 0, 1, true, Shard::columns, {{5, 0}, {6, 0}}},
        {6, block, "up", 2 * 40, 9, 0, 1, true, Shard::rows, {{40, 0}, {40, 0}}},
        {7, block, "scale", 3, 0, 0, 1, false},
        {8, last_block, "normf", 13, 0, 1, 1, false, Shard::replicated}};
    if (!tied) rows.push_back({9, head, "out", 51, 16, 0, 1, true, Shard::rows, {}, 16});
    return {rows, 5, tied};
}

// Spreads units evenly over stages; the first stages have one more if needed.
inline ParameterLayout toy_layout(const ToyModel& model, const MeshShape& shape,
                                  const MeshPosition& position) {
    StageUnits place = {.tp = shape.tp, .tensor = position[Axis::tensor]};
    int units = model.layers + 2, stage = position[Axis::pipeline];
    auto first = [&](int of) { return of * (units / shape.pp) + std::min(of, units % shape.pp); };
    if (shape.pp > 1) {
        place.embedding_copy = model.tied && stage == shape.pp - 1;
        if (place.embedding_copy) place.units.push_back(0);
        for (int unit = first(stage); unit < first(stage + 1); unit++) place.units.push_back(unit);
    }
    return ParameterLayout(model.rows, model.layers, model.tied, shape.shard, place);
}

// ----------------------------------------------------------------------------
// states

// A mesh, a layout, and a state partitioned by them. Used collectively, by all ranks.
struct ToyState {
    MeshShape shape;
    ToyModel model;
    Mesh mesh;
    ParameterLayout layout;
    ComputeStream compute;
    Arena memory;
    ZeroState state;
    ZeroCheckpoint contributor{state, layout_at()};
    Contributors parts = {&contributor};

    ToyState(const World& world, const MeshShape& shape, const ToyModel& model, const ZeroSettings& settings)
        : shape(shape),
          model(model),
          mesh(world, shape, nullptr),
          layout(toy_layout(model, shape, mesh.position)),
          state(memory, layout, mesh, settings, compute.stream) {}

    std::function<ParameterLayout(const MeshPosition&)> layout_at() const {
        return [this](const MeshPosition& position) { return toy_layout(model, shape, position); };
    }
};

// Returns element i of a tensor in a slot: a pseudorandom number in [-1, 1), so two rarely coincide.
inline float value_of(uint64_t key, size_t i) {
    uint64_t bits = (key ^ (i + 1) * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    return (float)((int64_t)(bits >> 40) - (1 << 23)) * 0x1p-23f;
}

inline uint64_t key_of(Slot slot, const std::string& name, uint64_t salt = 0) {
    return random_key((uint64_t)slot + 10 * salt, name);
}

// The values of a part of a tensor, as a state stores them.
inline std::string values_of(Slot slot, const TensorPart& part, uint64_t salt = 0) {
    size_t width = dtype_size(dtype_of(slot));
    std::string bytes(part.count * width, '\0');
    uint64_t key = key_of(slot, part.name, salt);
    part.each_run([&](size_t first, size_t count, size_t offset) {
        for (size_t i = 0; i < count; i++) {
            float value = value_of(key, first + i);
            uint16_t narrow = float_to_bf16(value);
            memcpy(&bytes[(offset + i) * width], width == 2 ? (void*)&narrow : (void*)&value, width);
        }
    });
    return bytes;
}

// Called on all ranks: sets every element of every slot to its value for this salt.
inline void fill(ZeroState& state, uint64_t salt = 0) {
    state.synchronize();
    for (int unit : state.layout().held()) {
        for (const TensorPart& part : state.owned_parts(unit)) {
            for (Slot slot : slots_of(state.settings(), *part.row)) {
                std::string bytes = values_of(slot, part, salt);
                state.copy_in(slot, unit, part.at - state.owned_begin(unit), part.count, bytes.data());
                cudaCheck(cudaStreamSynchronize(state.stream()));
            }
        }
    }
    state.publish_all();
}

// Returns the number of bytes on this rank that differ from what fill() sets, in the part that it owns and in
// the parameters that the passes see. Padding must be zero.
inline size_t wrong_bytes(ZeroState& state, const std::vector<Slot>& slots, uint64_t salt = 0) {
    size_t wrong = 0;
    state.synchronize();
    auto compare = [&](const std::string& got, const std::string& want) {
        for (size_t i = 0; i < want.size(); i++) wrong += got[i] != want[i];
    };
    // A slot that block matrices do not have ends where the matrices begin.
    auto end_of = [&](Slot slot, int unit) {
        bool all = !std::ranges::count(state.settings().not_of_matrices, slot);
        return all ? state.layout().unit_size(unit) : state.layout().before_matrices(unit);
    };
    auto want_of = [&](Slot slot, int unit, size_t begin, size_t end) {
        size_t width = dtype_size(dtype_of(slot));
        std::string want((end - begin) * width, '\0');
        for (const TensorPart& part : state.layout().parts(unit, begin, std::min(end, end_of(slot, unit))))
            want.replace((part.at - begin) * width, part.count * width, values_of(slot, part, salt));
        return want;
    };
    for (int unit : state.layout().held()) {
        size_t begin = state.owned_begin(unit), part = state.part_size(unit);
        for (Slot slot : slots) {
            size_t count = std::min(part, end_of(slot, unit));
            std::string got(count * dtype_size(dtype_of(slot)), '\1');
            state.copy_out(slot, unit, 0, count, got.data());
            cudaCheck(cudaStreamSynchronize(state.stream()));
            compare(got, want_of(slot, unit, begin, begin + count));
        }
        std::string seen(state.layout().unit_size(unit) * sizeof(floatX), '\1');
        state.acquire(unit, 0);
        cudaCheck(
            cudaMemcpyAsync(seen.data(), state.params(unit), seen.size(), cudaMemcpyDefault, state.stream()));
        state.release(unit);
        state.synchronize();
        compare(seen, want_of(Slot::weight, unit, 0, state.layout().unit_size(unit)));
    }
    return wrong;
}

// ----------------------------------------------------------------------------
// checkpoints

inline nlohmann::ordered_json about_step(int64_t step) {
    return {{"program", "test"}, {"step", step}, {"samples", 3 * step}, {"options", {{"seed", 5}}}};
}

// The bytes of a tensor in a slot, however it was partitioned.
inline std::string tensor_bytes(const CheckpointReader& reader, uint32_t tensor, Slot slot) {
    const CheckpointTensor& whole = reader.index().tensors[tensor];
    size_t width = dtype_size(*whole.dtype(slot));
    std::string bytes(whole.size() * width, '\1');
    for (const CheckpointPiece& piece : reader.index().pieces) {
        if (piece.tensor != tensor || piece.slot != slot) continue;
        std::string part(piece.count * width, '\0');
        reader.read(piece, part.data());
        piece.run().each_run(whole.width(), [&](uint64_t first, uint64_t count, uint64_t at) {
            memcpy(&bytes[first * width], &part[at * width], count * width);
        });
    }
    return bytes;
}

// All tensors, keyed by "NAME SLOT".
inline std::map<std::string, std::string> logical_tensors(const std::string& folder) {
    CheckpointReader reader(folder);
    std::map<std::string, std::string> tensors;
    for (uint32_t t = 0; t < reader.index().tensors.size(); t++) {
        const CheckpointTensor& tensor = reader.index().tensors[t];
        for (int slot = 0; slot < slot_count; slot++) {
            if (tensor.slots[slot])
                tensors[tensor.name + " " + slot_name((Slot)slot)] = tensor_bytes(reader, t, (Slot)slot);
        }
    }
    return tensors;
}
