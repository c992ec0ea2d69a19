/*
The tensors of a model that is cut over ranks, put together from what each rank would write to a checkpoint.
*/
#pragma once

#include <functional>
#include <map>
#include <string>

#include "test/program/model_testing.h"
#include "test/support/ranks.h"

// Called on all ranks, returns all tensors by name, in elements of `width` bytes. copy(piece, bytes) copies a
// piece of this rank's part.
inline std::map<std::string, std::string>
collected(const ZeroState& state, Slot slot, size_t width,
          const std::function<void(const OwnPiece&, std::string& bytes)>& copy) {
    const Mesh& mesh = state.mesh();
    std::vector<CheckpointTensor> model = checkpoint_tensors(state.layout(), state.settings());
    state.synchronize();
    std::string mine;  // pieces, each followed by its bytes
    for (const OwnPiece& own : pieces_to_write(state.layout(), tensor_numbers(state.layout()), mesh.shape,
                                               mesh.position, state.settings())) {
        if (own.piece.slot != slot) continue;
        std::string bytes(own.piece.count * width, 0);
        copy(own, bytes);
        state.synchronize();
        mine.append((const char*)&own.piece, sizeof own.piece) += bytes;
    }
    std::map<std::string, std::string> tensors;
    for (const CheckpointTensor& tensor : model) tensors[tensor.name].resize(tensor.size() * width);
    bool alone = mesh.shape.ranks() == 1;
    for (const std::string& pieces : alone ? std::vector{mine} : test_world().all_gather(mine)) {
        for (size_t at = 0; at < pieces.size();) {
            CheckpointPiece piece;
            memcpy(&piece, &pieces[at], sizeof piece);
            at += sizeof piece;
            const CheckpointTensor& tensor = model[piece.tensor];
            piece.run().each_run(tensor.width(), [&](size_t first, size_t count, size_t offset) {
                memcpy(&tensors[tensor.name][first * width], &pieces[at + offset * width], count * width);
            });
            at += piece.count * width;
        }
    }
    return tensors;
}

// The master copy of the parameters, or the parameters themselves if there is none.
inline std::map<std::string, std::string> collected_bytes(ZeroState& state) {
    bool has_master = state.settings().training && state.settings().keep_master;
    Slot slot = has_master ? Slot::master : Slot::weight;
    return collected(state, slot, dtype_size(dtype_of(slot)), [&](const OwnPiece& own, std::string& bytes) {
        state.copy_out(slot, own.unit, own.at, own.piece.count, bytes.data());
    });
}

// The gradients of the last step, after its update has summed them.
inline std::map<std::string, std::string> collected_gradients(ZeroState& state) {
    return collected(state, Slot::weight, sizeof(float), [&](const OwnPiece& own, std::string& bytes) {
        std::vector<float> values = from_device(state.owned_grads(own.unit) + own.at, own.piece.count);
        memcpy(bytes.data(), values.data(), bytes.size());
    });
}
