/*
From tensors to the parts that ranks own, and back: initial values, and weights to and from files. Nothing
larger than a piece is ever whole on one rank.
*/
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "comm/memory.h"  // allocate
#include "comm/zero.h"    // ZeroState

constexpr size_t tensor_piece = 1 << 22;  // elements that pass through host memory at a time

// For all ranks: sets every parameter. values(row, name, first, count) gives the elements [first, first +
// count) of a tensor, as a span of floats; a rank asks for those it owns.
template <typename Values>
void set_tensors(ZeroState& state, Values&& values) {
    state.synchronize();
    for (int unit = 0; unit < state.layout().units(); unit++) {
        for (const TensorPart& part : state.owned_parts(unit)) {
            for (size_t done = 0; done < part.count; done += tensor_piece) {
                size_t count = std::min(tensor_piece, part.count - done);
                state.set(unit, part.at - state.owned_begin(unit) + done,
                          values(*part.row, part.name, part.first + done, count));
            }
        }
    }
    state.share();
}

// For all ranks: calls visit(name, data, bytes) on rank 0 of the data group with every tensor, piece after
// piece, in the order of memory. The values are floats if state.keeps_floats(), else floatX.
template <typename Visit>
void collect_tensors(ZeroState& state, Visit&& visit) {
    const Mesh& mesh = state.mesh();
    const ParameterLayout& layout = state.layout();
    state.synchronize();
    if (mesh.position.replica > 0) return;
    const Communicator& group = mesh.shard();
    size_t width = state.keeps_floats() ? sizeof(float) : sizeof(floatX);
    char* received = nullptr;
    if (group.rank() == 0 && group.size() > 1) allocate(received, tensor_piece * width);
    std::vector<char> staging;

    // One piece, from its owner to rank 0.
    auto pass = [&](int owner, char* from, const std::string& name, size_t bytes) {
        if (group.rank() != 0) {
            group.send(from, bytes, 0, Traffic::weights, state.stream());
            wait_for(state.stream(), mesh);  // no longer than rank 0 takes for what the others have before
            return;
        }
        if (owner != 0) {
            from = received;
            group.receive(received, bytes, owner, state.stream());
        }
        staging.resize(bytes);
        copy_to_host(staging.data(), from, bytes, state.stream(), mesh);
        visit(name, staging.data(), bytes);
    };
    for (int unit = 0; unit < layout.units(); unit++) {
        float* master = state.owned_master(unit);
        char* own = master ? (char*)master : (char*)state.owned_params(unit);
        for (int owner = 0; owner < group.size(); owner++) {
            if (group.rank() != 0 && group.rank() != owner) continue;
            size_t begin = owner * state.part_size(unit), end = begin + state.part_size(unit);
            for (const TensorPart& part : layout.parts(unit, begin, end)) {
                for (size_t done = 0; done < part.count; done += tensor_piece) {
                    size_t bytes = std::min(tensor_piece, part.count - done) * width;
                    pass(owner, own + (part.at - begin + done) * width, part.name, bytes);
                }
            }
        }
    }
    cudaFree(received);
}
