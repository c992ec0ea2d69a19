/*
The weights and the optimizer state as a contributor to checkpoints (comm/stateful.h).

To save, each rank writes its slices of the parts that it owns (comm/checkpoint_places.h). For a save in the
background, they are copied into host memory first: they do not change until the next update, so the copy has
its own stream and overlaps with the passes, and only the update waits for it.

To load, a slot of the checkpoint is first assigned to each slot of the state. A rank sends the pieces that it
reads to the ranks whose slices contain some of their elements; an element is sent to only one of the replicas
that own it. So the ranks read disjoint parts of the checkpoint, and each reads only its own part if the
layout is that of the save. At the end, the replicas gather their slices from device to device, over the links
of their group.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/checkpoint_places.h"  // pieces_to_write, TensorPlaces
#include "comm/memory.h"             // HostArray, ComputeStream
#include "comm/parameters.h"         // ParameterLayout
#include "comm/stateful.h"           // Stateful
#include "comm/zero.h"               // ZeroState
#include "data/base/error.h"
#include "data/base/strings.h"      // printable, shape_text
#include "data/checkpoint/files.h"  // CheckpointReader

// ----------------------------------------------------------------------------
// sources of the slots
//
// Chooses the slots of a checkpoint that fill the slots of a state, if that is possible: the model must be
// the same; precision and optimizer state may differ.
//
//     the checkpoint has       the state keeps          and gets
//     bf16, master             bf16, master             both as they are
//     bf16, master             fp32                     the master copy
//     bf16, master             bf16                     the weights
//     fp32                     bf16, master             the weights rounded, and unrounded for a master copy
//     bf16                     fp32, or bf16, master    the weights, for a master copy too
//     moments                  none (or weights_only)   none of them
//     no moments               moments                  refused, unless only weights are wanted

// SlotSources names the stored slot from which each slot of a state is filled. A slot of the state without a
// source stays as it is.
struct SlotSources {
    std::optional<Slot> of[slot_count];
    std::optional<Slot>& operator[](Slot slot) { return of[(size_t)slot]; }
    std::optional<Slot> operator[](Slot slot) const { return of[(size_t)slot]; }
    bool uses(Slot source) const {
        return std::any_of(std::begin(of), std::end(of), [&](auto& slot) { return slot == source; });
    }
};

// Returns the sources for a state with these settings. Refuses a checkpoint that cannot fill it.
inline SlotSources slot_sources(const CheckpointReader& reader, const ZeroSettings& settings,
                                bool weights_only) {
    const CheckpointTensor& any = reader.index().tensors.at(0);
    SlotSources sources;
    for (Slot slot : slots_of(settings)) {
        if (is_of_optimizer(slot) && weights_only) continue;
        if (is_of_optimizer(slot) && !any.dtype(slot)) {
            fail("%s: %s; start a new run from it with --init", reader.folder().c_str(),
                 any.keeps_optimizer()
                     ? text("its optimizer kept no %s, which this one needs", slot_name(slot)).c_str()
                     : "has only weights, and no optimizer state");
        }
        sources[slot] = any.dtype(slot) ? slot : Slot::weight;
    }
    // fp32 parameters are a master copy themselves
    bool keeps_none = dtype_of(Slot::weight) == Dtype::fp32 && !settings.keep_master;
    if (keeps_none && any.dtype(Slot::master)) sources[Slot::weight] = Slot::master;
    return sources;
}

// Describes how weights are converted if the state stores them in another precision than the checkpoint;
// empty if they are not converted. The numbers stay the same unless they are rounded, or a master copy is not
// used.
inline std::string conversions(const CheckpointTensor& stored, const SlotSources& sources) {
    std::vector<std::string> all;
    Dtype kept = dtype_of(Slot::weight), there = *stored.dtype(Slot::weight);
    const char* had = dtype_name(there);
    if (sources[Slot::weight] == Slot::master) {
        if (there != kept)
            all.push_back(text("weights stored as %s, restored from the fp32 master copy", had));
    } else if (there != kept) {
        const char* how = kept == Dtype::bf16 ? "rounded" : "widened";
        all.push_back(text("weights stored as %s, %s to %s", had, how, dtype_name(kept)));
    }
    if (sources[Slot::master] == Slot::weight)
        all.push_back(text("no master copy in the checkpoint: one was made from its %s weights", had));
    if (stored.dtype(Slot::master) && !sources.uses(Slot::master))
        all.push_back("the fp32 master copy in the checkpoint is not used");
    std::string result;
    for (const std::string& one : all) result += (result.empty() ? "" : "; ") + one;
    return result;
}

// Refuses a checkpoint of another model.
inline void check_tensors(const CheckpointReader& reader, const ParameterLayout& layout) {
    const CheckpointIndex& index = reader.index();
    layout.each_of_model([&](const TensorRow& row, const std::string& name) {
        int number = index.find(name);
        if (number < 0) {
            fail("%s: has no tensor %s, which the model has; choose the options that it was trained with",
                 reader.folder().c_str(), name.c_str());
        }
        const CheckpointTensor& tensor = index.tensors[number];
        if (tensor.shape != row.shape()) {
            fail("%s: tensor %s is %s, but %s in the model; choose the options that it was trained with",
                 reader.folder().c_str(), name.c_str(), shape_text(tensor.shape).c_str(),
                 shape_text(row.shape()).c_str());
        }
        for (Slot slot : {Slot::weight, Slot::master}) {
            if (tensor.dtype(slot) == index.tensors[0].dtype(slot)) continue;
            fail("%s: tensor %s is not stored like %s; use another checkpoint", reader.folder().c_str(),
                 name.c_str(), printable(index.tensors[0].name).c_str());
        }
    });
}

// Refuses a checkpoint whose optimizer kept, for some tensor, other slots than this one does.
inline void check_slots(const CheckpointReader& reader, const ParameterLayout& layout,
                        const ZeroSettings& settings) {
    layout.each_of_model([&](const TensorRow& row, const std::string& name) {
        const CheckpointTensor& tensor = reader.index().tensors[reader.index().find(name)];
        std::vector<Slot> wanted = slots_of(settings, row);
        for (Slot slot : settings.slots) {
            bool wants = std::ranges::count(wanted, slot) > 0, has = tensor.dtype(slot).has_value();
            if (wants == has) continue;
            fail("%s: for tensor %s its optimizer kept %s '%s', but this one keeps %s; use the optimizer "
                 "that it was trained with, or start a new run from it with --init",
                 reader.folder().c_str(), name.c_str(), has ? "the slot" : "no slot", slot_name(slot),
                 wants ? "one" : "none");
        }
    });
}

// ----------------------------------------------------------------------------
// messages between ranks

// Elements of one stored slot for the part of a unit that a rank owns. Their bytes follow.
struct RunHeader {
    Slot slot;
    int unit;
    uint64_t at, count;
};

// A sequence of runs. Runs that will be adjacent at their destination are joined.
class RunMessage {
public:
    void add(const RunHeader& run, const char* values, size_t width) {
        bool goes_on = run.slot == last_.slot && run.unit == last_.unit && run.at == last_.at + last_.count;
        if (goes_on && !bytes_.empty()) {
            last_.count += run.count;
        } else {
            last_ = run;
            last_at_ = bytes_.size();
            bytes_.resize(last_at_ + sizeof last_);
        }
        memcpy(&bytes_[last_at_], &last_, sizeof last_);
        bytes_.append(values, run.count * width);
    }

    std::string take() { return std::move(bytes_); }

    // Calls visit(header, values) for each run. width(slot) returns the bytes per element.
    template <typename Width, typename Visit>
    static void each(std::string_view message, Width&& width, Visit&& visit) {
        while (!message.empty()) {
            RunHeader header;
            memcpy(&header, message.data(), sizeof header);
            message.remove_prefix(sizeof header);
            visit(header, message.data());
            message.remove_prefix(header.count * width(header.slot));
        }
    }

private:
    std::string bytes_;
    RunHeader last_ = {};
    size_t last_at_ = 0;
};

// ----------------------------------------------------------------------------
// the contributor

class ZeroCheckpoint : public Stateful {
public:
    using LayoutAt = std::function<ParameterLayout(const MeshPosition&)>;

    // layout_at returns the layout of the rank at a position. A state that is saved in the background
    // reserves memory for its copy from the start (ZeroSettings::staging).
    ZeroCheckpoint(ZeroState& state, LayoutAt layout_at)
        : state_(state),
          layout_at_(std::move(layout_at)),
          numbers_(tensor_numbers(layout())),
          pieces_(pieces_to_write(layout(), numbers_, shape(), state.mesh().position, state.settings())) {
        if (state.settings().staging) reserve(staging_bytes(layout(), shape(), state.settings()));
    }

    uint64_t bytes_to_write(bool weights_alone) const override { return bytes_of(saved(weights_alone)); }

    void begin_save(const SaveScope& scope) override {
        scope_ = scope;
        saved_ = saved(scope.weights_alone);
        size_t all = bytes_of(saved_);
        reserve(scope.in_background ? all : std::min(all, largest_piece * sizeof(float)));
        if (scope.in_background)
            state_.copy_aside(copies_.stream, [this] { copy(0, saved_.size(), copies_.stream); });
        else
            state_.synchronize();
    }

    SavePlan plan() override {
        ZeroSettings settings = state_.settings();
        if (scope_.weights_alone) settings.training = false;
        SavePlan plan;
        for (CheckpointTensor& tensor : checkpoint_tensors(layout(), settings))
            plan.tensors.push_back({std::move(tensor)});
        plan.bytes = bytes_of(saved_);
        return plan;
    }

    // Alternately fills the staging memory and writes it out.
    void write(const WritePiece& write) override {
        if (scope_.in_background) state_.wait_for_copies();
        for (size_t begin = 0, end; begin < saved_.size(); begin = end) {
            uint64_t bytes = 0;
            for (end = begin; end < saved_.size() && bytes + saved_[end].bytes() <= room_; end++)
                bytes += saved_[end].bytes();
            if (!scope_.in_background) {  // otherwise it holds everything already
                copy(begin, end, state_.stream());
                cudaCheck(cudaStreamSynchronize(state_.stream()));
            }
            const char* from = staging_->data;
            for (size_t i = begin; i < end; i++) {
                write(saved_[i].piece, from);
                from += saved_[i].bytes();
            }
        }
    }

    double stall() const override { return scope_.in_background ? state_.stall_of_copies() : 0; }
    bool is_whole() const override { return state_.is_whole(); }

    bool has(const std::string& tensor) const override { return numbers_.contains(tensor); }

    std::vector<PieceBatch> begin_load(const CheckpointReader& reader, bool weights_only) override {
        const ZeroSettings& settings = state_.settings();
        check_tensors(reader, layout());
        SlotSources sources = slot_sources(reader, settings, weights_only);
        if (settings.training && !weights_only) check_slots(reader, layout(), settings);
        state_.synchronize();
        load_.reset(new Load{reader.index(), sources, TensorPlaces(shape(), layout_at_, reader.index())});
        return pieces_to_read(load_->places, reader.index(), rank(),
                              [&](Slot slot) { return sources.uses(slot); });
    }

    // Copies this rank's own elements of a batch to the state, and the others into messages.
    Messages take(const PieceBatch& batch, const char* values) override {
        const int me = rank();
        std::map<int, RunMessage> others;
        RunMessage own;  // small runs, joined where adjacent
        for (const CheckpointPiece* piece : batch.pieces) {
            size_t width = load_->width(piece->slot);
            load_->places.each_slice(*piece, [&](int to, const PieceRun& run) {
                const char* from = values + run.from * width;
                RunHeader header = {piece->slot, run.unit, run.at, run.count};
                if (to != me)
                    others[to].add(header, from, width);
                else if (run.count * width >= large_run)
                    put(header, from);
                else
                    own.add(header, from, width);
            });
            values += piece->count * width;
        }
        receive(load_->own = own.take());
        Messages messages;
        for (auto& [to, message] : others) messages[to] = message.take();
        return messages;
    }

    void receive(std::string_view message) override {
        RunMessage::each(
            message, [this](Slot slot) { return load_->width(slot); },
            [this](const RunHeader& run, const char* values) { put(run, values); });
    }

    void settle() override {
        cudaCheck(cudaStreamSynchronize(state_.stream()));
        if (load_) load_->converted.clear();
    }

    std::string end_load() override {
        for (Slot slot : slots_of(state_.settings())) {
            if (load_->sources[slot]) state_.gather_replicas(slot);
        }
        state_.publish_all();
        std::string told = conversions(load_->index.tensors[0], load_->sources);
        load_.reset();
        return told;
    }

    std::vector<ReplicatedPiece> replicated(bool by_tensor) const override;

private:
    static constexpr size_t large_run = 64 << 10;  // bytes that justify a separate copy to the device

    // A load under way.
    struct Load {
        const CheckpointIndex& index;
        SlotSources sources;
        TensorPlaces places;
        std::string own = {};                    // this rank's small runs of a batch
        std::deque<std::string> converted = {};  // to the state's precision, until settle()

        Dtype stored(Slot slot) const { return *index.tensors[0].dtype(slot); }
        size_t width(Slot slot) const { return dtype_size(stored(slot)); }
    };

    const ParameterLayout& layout() const { return state_.layout(); }
    const MeshShape& shape() const { return state_.mesh().shape; }
    int rank() const { return rank_of(state_.mesh().position, shape()); }

    std::vector<OwnPiece> saved(bool weights_alone) const {
        std::vector<OwnPiece> pieces = pieces_;
        if (weights_alone)
            std::erase_if(pieces, [](const OwnPiece& own) { return own.piece.slot != Slot::weight; });
        return pieces;
    }

    static uint64_t bytes_of(const std::vector<OwnPiece>& pieces) {
        uint64_t bytes = 0;
        for (const OwnPiece& own : pieces) bytes += own.bytes();
        return bytes;
    }

    // Touches the memory, so that the first copy does not wait for the system to allocate pages.
    void reserve(size_t bytes) {
        if (staging_ && bytes <= room_) return;
        staging_.reset();
        staging_ = std::make_unique<HostArray<char>>(bytes);
        memset(staging_->data, 0, bytes);
        room_ = bytes;
    }

    // Packs pieces [begin, end) of this save into the staging memory, as work of the stream.
    void copy(size_t begin, size_t end, cudaStream_t stream) {
        char* to = staging_->data;
        for (size_t i = begin; i < end; i++) {
            const OwnPiece& own = saved_[i];
            state_.copy_out(own.piece.slot, own.unit, own.at, own.piece.count, to, stream);
            to += own.bytes();
        }
    }

    void put(const RunHeader& run, const char* values) {
        for (Slot slot : slots_of(state_.settings())) {
            if (load_->sources[slot] != run.slot) continue;
            Dtype stored = load_->stored(run.slot);
            bool alike = stored == dtype_of(slot);
            if (!alike) load_->converted.push_back(other_dtype(values, run.count, stored));
            state_.copy_in(slot, run.unit, run.at, run.count,
                           alike ? values : load_->converted.back().data());
        }
    }

    // Converts bf16 to fp32, and fp32 to bf16.
    static std::string other_dtype(const char* values, size_t count, Dtype dtype) {
        Dtype other = dtype == Dtype::bf16 ? Dtype::fp32 : Dtype::bf16;
        std::vector<float> floats(count);
        std::string result(count * dtype_size(other), '\0');
        to_floats(dtype, values, count, floats.data());
        from_floats(other, floats.data(), count, result.data());
        return result;
    }

    ZeroState& state_;
    const LayoutAt layout_at_;
    const TensorNumbers numbers_;
    const std::vector<OwnPiece> pieces_;  // everything that this rank writes
    std::unique_ptr<HostArray<char>> staging_;
    size_t room_ = 0;       // bytes of staging_
    ComputeStream copies_;  // copies into staging_

    SaveScope scope_;
    std::vector<OwnPiece> saved_;  // the pieces of the save under way
    std::unique_ptr<Load> load_;
};

// ----------------------------------------------------------------------------
// replicas

// Returns whole units, or (by_tensor) their tensors and the padding between them.
inline std::vector<ReplicatedPiece> ZeroCheckpoint::replicated(bool by_tensor) const {
    const ZeroSettings& settings = state_.settings();
    bool cut = state_.cuts_params();
    std::vector<ReplicatedPiece> pieces;
    // Adds elements [begin, end) of a unit, from an array that starts at the unit's element `at`.
    auto add = [&](Replicated what, const char* slot, int unit, const void* array, size_t width, size_t at,
                   size_t begin, size_t end, bool on_host) {
        auto piece = [&](const std::string& name, size_t from, size_t to) {
            if (from >= to) return;
            std::string named = slot[0] ? name + " (" + slot + ")" : name;
            pieces.push_back(
                {what, named, (const char*)array + (from - at) * width, (to - from) * width, on_host});
        };
        if (!by_tensor) return piece(text("unit %d", unit), begin, end);
        size_t done = begin;
        for (const TensorPart& part : layout().parts(unit, begin, end)) {
            piece(text("padding of unit %d", unit), done, part.at);
            piece(part.name, part.at, part.at + part.count);
            done = part.at + part.count;
        }
        piece(text("padding of unit %d", unit), done, end);
    };
    for (int unit : layout().held()) {
        size_t own = state_.owned_begin(unit), own_end = own + state_.part_size(unit);
        const floatX* weights = cut ? state_.owned_params(unit) : state_.params(unit);
        size_t at = cut ? own : 0, end = cut ? own_end : layout().unit_size(unit);
        add(Replicated::weights, "", unit, weights, sizeof(floatX), at, at, end, false);
        for (const GradientSum& sum : layout().sums(unit)) {
            Replicated what = sum.ranks == shape().tp ? Replicated::copies : Replicated::head_copies;
            add(what, "", unit, weights, sizeof(floatX), at, std::max(sum.begin, at),
                std::min(sum.begin + sum.count, end), false);
        }
        if (unit == 0 && layout().tied)
            add(Replicated::embeddings, "", unit, weights, sizeof(floatX), at, at, end, false);
        if (!settings.training) continue;
        if (const float* master = state_.owned_master(unit))
            add(Replicated::state, "master copy", unit, master, sizeof(float), own, own, own_end,
                settings.offload);
        for (Slot slot : settings.slots) {
            size_t room = capacity_of_slot(settings, slot, layout(), unit, state_.part_size(unit));
            add(Replicated::state, slot_name(slot), unit, state_.owned_slot(slot, unit), sizeof(float), own,
                own, own + room, settings.offload);
        }
    }
    return pieces;
}
