/*
From tensors to the parts that ranks have of them, and back: initial values, and weights to and from files.
Nothing larger than a piece is ever whole on one rank.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "comm/memory.h"  // allocate
#include "comm/zero.h"    // ZeroState
#include "data/meter.h"   // without_sign

constexpr size_t tensor_piece = 1 << 22;  // elements that pass through host memory at a time

// Calls visit(piece) for parts in turn, cut where they are longer than a piece.
template <typename Visit>
void each_piece(const std::vector<TensorPart>& parts, Visit&& visit) {
    for (const TensorPart& part : parts) {
        for (size_t done = 0; done < part.count; done += tensor_piece)
            visit(part.slice(done, std::min(tensor_piece, part.count - done)));
    }
}

// For all ranks: sets every parameter. values(row, name, first, count) gives the elements [first, first +
// count) of a whole tensor, as a span of floats; a rank asks for those it owns.
template <typename Values>
void set_tensors(ZeroState& state, Values&& values) {
    state.synchronize();
    std::vector<float> here;
    for (int unit : state.layout().held()) {
        each_piece(state.owned_parts(unit), [&](const TensorPart& piece) {
            here.resize(piece.count);
            piece.each_run([&](size_t first, size_t count, size_t offset) {
                std::span<const float> run = values(*piece.row, piece.name, first, count);
                std::copy(run.begin(), run.end(), here.begin() + offset);
            });
            state.set(unit, piece.at - state.owned_begin(unit), here);
        });
    }
    state.share();
}

// For all ranks: calls visit(name, from, data, bytes) on rank 0 of the world with all of every tensor, piece
// after piece: bytes [from, from + bytes) of it. The values are floats if state.keeps_floats(), else floatX.
// Where no tensor is cut, they come in the order of memory. layout_at(position) gives the layout of a rank.
template <typename LayoutAt, typename Visit>
void collect_tensors(ZeroState& state, LayoutAt&& layout_at, Visit&& visit) {
    const Mesh& mesh = state.mesh();
    const MeshShape& shape = mesh.shape;
    const Communicator& world = mesh.world();
    size_t width = state.keeps_floats() ? sizeof(float) : sizeof(floatX);
    state.synchronize();
    if (mesh.position.replica > 0) return;

    auto owned = [&](int unit, size_t at) {
        float* master = state.owned_master(unit);
        char* own = master ? (char*)master : (char*)state.owned_params(unit);
        return own + at * width;
    };
    // What a rank at this place sends of a unit: visit_piece(piece, where it begins in what the rank owns).
    auto each_sent = [&](const ParameterLayout& layout, int shard, int unit, auto&& visit_piece) {
        size_t part = layout.unit_size(unit) / shape.shard, begin = shard * part;
        each_piece(layout.counted_parts(unit, begin, begin + part),
                   [&](const TensorPart& piece) { visit_piece(piece, piece.at - begin); });
    };

    if (world.rank() != 0) {
        for (int unit : state.layout().held()) {
            each_sent(state.layout(), mesh.position.shard, unit, [&](const TensorPart& piece, size_t at) {
                world.send(owned(unit, at), piece.count * width, 0, Traffic::weights, state.stream());
                // until rank 0 has written what others have before, which may take longer than a step
                wait_for(state.stream(), mesh, 0);
            });
        }
        return;
    }

    std::vector<ParameterLayout> layouts;
    for (int pipeline = 0; pipeline < shape.pp; pipeline++) {
        for (int tensor = 0; tensor < shape.tp; tensor++)
            layouts.push_back(layout_at(MeshPosition{.tensor = tensor, .pipeline = pipeline}));
    }
    char* received = nullptr;
    if (world.size() > 1) allocate(received, tensor_piece * width);
    std::vector<char> staging;
    auto take = [&](int unit, MeshPosition position) {
        const ParameterLayout& layout = layouts[position.pipeline * shape.tp + position.tensor];
        int owner = rank_of(position, shape);
        each_sent(layout, position.shard, unit, [&](const TensorPart& piece, size_t at) {
            char* from = received;
            size_t bytes = piece.count * width;
            if (owner == 0)
                from = owned(unit, at);
            else
                world.receive(received, bytes, owner, state.stream());
            staging.resize(bytes);
            copy_to_host(staging.data(), from, bytes, state.stream(), mesh);
            piece.each_run([&](size_t first, size_t count, size_t offset) {
                visit(piece.name, first * width, staging.data() + offset * width, count * width);
            });
        });
    };
    for (int unit = 0; unit < state.layout().units(); unit++) {
        for (int pipeline = 0; pipeline < shape.pp; pipeline++) {
            for (int tensor = 0; tensor < shape.tp; tensor++) {
                for (int shard = 0; shard < shape.shard; shard++)
                    take(unit, {.tensor = tensor, .shard = shard, .pipeline = pipeline});
            }
        }
    }
    cudaFree(received);
}

// The first gradient of this rank that is not finite, for the message that stops a run; empty if there is
// none.
inline std::string first_bad_gradient(const ZeroState& state) {
    for (int unit : state.layout().held()) {
        std::vector<float> values(state.part_size(unit));
        cudaCheck(cudaMemcpy(values.data(), state.owned_grads(unit), values.size() * sizeof(float),
                             cudaMemcpyDeviceToHost));
        for (const TensorPart& part : state.owned_parts(unit)) {
            const float* value = &values[part.at - state.owned_begin(unit)];
            for (size_t i = 0; i < part.count; i++) {
                if (std::isfinite(value[i])) continue;
                size_t element = 0;
                part.slice(i, 1).each_run([&](size_t first, size_t, size_t) { element = first; });
                return text("%s[%zu] = %g", part.name.c_str(), element, without_sign(value[i]));
            }
        }
    }
    return "";
}
