/*
Which slots of a checkpoint fill which slots of a state, and whether they can: the model must be the same, the
precision and what is kept for the optimizer need not be.

    the checkpoint has       the state keeps          and gets
    bf16, master             bf16, master             both as they are
    bf16, master             fp32                     the master copy
    bf16, master             bf16                     the weights
    fp32                     bf16, master             the weights rounded, and as they are for a master copy
    bf16                     fp32, or bf16, master    the weights, for a master copy too
    moments                  none, or others wanted   none of them
    no moments               moments                  refused, unless only weights are wanted
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/parameters.h"        // ParameterLayout
#include "comm/zero.h"              // slots_of, dtype_of
#include "data/checkpoint_files.h"  // CheckpointReader
#include "data/error.h"
#include "data/words.h"  // printable, shape_text

// From which stored slot each slot of a state comes. A slot of the state that nothing is said of stays as
// it is.
struct SlotSources {
    std::optional<Slot> of[slot_count];
    std::optional<Slot>& operator[](Slot slot) { return of[(size_t)slot]; }
    std::optional<Slot> operator[](Slot slot) const { return of[(size_t)slot]; }
    bool uses(Slot source) const {
        return std::any_of(std::begin(of), std::end(of), [&](auto& slot) { return slot == source; });
    }
};

// For a state with these settings. Refuses a checkpoint that cannot fill it.
inline SlotSources slot_sources(const CheckpointReader& reader, const ZeroSettings& settings,
                                bool weights_only) {
    const CheckpointTensor& any = reader.index().tensors.at(0);
    SlotSources sources;
    for (Slot slot : slots_of(settings)) {
        bool moment = slot == Slot::m || slot == Slot::v;
        if (moment && weights_only) continue;
        if (moment && !any.dtype(slot)) {
            fail("%s: has weights only, and no state of the optimizer; start a new run from it with --init",
                 reader.folder().c_str());
        }
        sources[slot] = any.dtype(slot) ? slot : Slot::weight;
    }
    // fp32 parameters are a master copy themselves
    bool keeps_none = dtype_of(Slot::weight) == Dtype::fp32 && !settings.keep_master;
    if (keeps_none && any.dtype(Slot::master)) sources[Slot::weight] = Slot::master;
    return sources;
}

// What becomes of the weights where the state does not store them as the checkpoint does; empty: nothing.
// They are the same numbers still unless they are rounded, or a master copy is left out.
inline std::string conversions(const CheckpointTensor& stored, const SlotSources& sources) {
    std::vector<std::string> all;
    Dtype kept = dtype_of(Slot::weight), there = *stored.dtype(Slot::weight);
    const char* had = dtype_name(there);
    if (sources[Slot::weight] == Slot::master) {
        if (there != kept)
            all.push_back(text("weights %s in the checkpoint, taken from its fp32 master copy", had));
    } else if (there != kept) {
        const char* how = kept == Dtype::bf16 ? "rounded" : "widened";
        all.push_back(text("weights %s in the checkpoint, %s to %s", had, how, dtype_name(kept)));
    }
    if (sources[Slot::master] == Slot::weight)
        all.push_back(text("no master copy in the checkpoint, made from its %s weights", had));
    if (stored.dtype(Slot::master) && !sources.uses(Slot::master))
        all.push_back("the fp32 master copy in the checkpoint is left out");
    std::string result;
    for (const std::string& one : all) result += (result.empty() ? "" : "; ") + one;
    return result;
}

// Refuses a checkpoint of another model.
inline void check_tensors(const CheckpointReader& reader, const ParameterLayout& layout) {
    const CheckpointIndex& index = reader.index();
    std::set<std::string> known;
    layout.each_of_model([&](const TensorRow& row, const std::string& name) {
        int number = index.find(name);
        if (number < 0) {
            fail("%s: has no tensor %s, which the model has; choose the options that it was trained with",
                 reader.folder().c_str(), name.c_str());
        }
        const CheckpointTensor& tensor = index.tensors[number];
        if (tensor.shape != row.shape()) {
            fail("%s: tensor %s is %s, and in the model %s; choose the options that it was trained with",
                 reader.folder().c_str(), name.c_str(), shape_text(tensor.shape).c_str(),
                 shape_text(row.shape()).c_str());
        }
        if (tensor.slots != index.tensors[0].slots) {
            fail("%s: tensor %s is not stored like %s; use another checkpoint", reader.folder().c_str(),
                 name.c_str(), printable(index.tensors[0].name).c_str());
        }
        known.insert(name);
    });
    for (const CheckpointTensor& tensor : index.tensors) {
        if (known.count(tensor.name) == 0) {
            fail("%s: has a tensor %s, which the model has not; choose the options that it was trained with",
                 reader.folder().c_str(), printable(tensor.name).c_str());
        }
    }
}
