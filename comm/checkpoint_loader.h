/*
Loading a state from a checkpoint of any layout. Which slot of the checkpoint fills which slot of the state is
decided first. Each piece of the files is read and verified once, by one rank, which sends what is in it to
those that have it in their slices (comm/checkpoint_places.h): an element goes to one of the replicas that own
it. So the ranks read disjoint parts of the checkpoint, and on the layout that it was saved with, nothing but
their own. Ranks read in rounds: as much as one piece may hold, then an exchange, while the next is read.

In the end the replicas bring their slices together, from device to device over the links of their group.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "comm/checkpoint_places.h"  // TensorPlaces
#include "comm/memory.h"             // HostArray
#include "comm/parameters.h"         // ParameterLayout
#include "comm/world.h"              // World
#include "comm/zero.h"               // slots_of, dtype_of
#include "data/base/background.h"
#include "data/base/error.h"
#include "data/base/strings.h"      // printable, shape_text
#include "data/checkpoint/files.h"  // CheckpointReader

// ----------------------------------------------------------------------------
// sources of the slots
//
// Which slots of a checkpoint fill which slots of a state, and whether they can: the model must be the same,
// the precision and what is kept for the optimizer need not be.
//
//     the checkpoint has       the state keeps          and gets
//     bf16, master             bf16, master             both as they are
//     bf16, master             fp32                     the master copy
//     bf16, master             bf16                     the weights
//     fp32                     bf16, master             the weights rounded, and unrounded for a master copy
//     bf16                     fp32, or bf16, master    the weights, for a master copy too
//     moments                  none, or others wanted   none of them
//     no moments               moments                  refused, unless only weights are wanted

// SlotSources names the stored slot from which each slot of a state is filled. A slot of the state without
// one stays as it is.
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
        if (is_of_optimizer(slot) && weights_only) continue;
        if (is_of_optimizer(slot) && !any.dtype(slot)) {
            fail("%s: %s; start a new run from it with --init", reader.folder().c_str(),
                 any.keeps_optimizer()
                     ? text("its optimizer kept no %s, which this one needs", slot_name(slot)).c_str()
                     : "has weights only, and no state of the optimizer");
        }
        sources[slot] = any.dtype(slot) ? slot : Slot::weight;
    }
    // fp32 parameters are a master copy themselves
    bool keeps_none = dtype_of(Slot::weight) == Dtype::fp32 && !settings.keep_master;
    if (keeps_none && any.dtype(Slot::master)) sources[Slot::weight] = Slot::master;
    return sources;
}

// conversions() says what becomes of the weights where the state does not store them as the checkpoint does;
// an empty text means that nothing does. They are the same numbers still unless they are rounded, or a master
// copy is left out.
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
        for (Slot slot : {Slot::weight, Slot::master}) {
            if (tensor.dtype(slot) == index.tensors[0].dtype(slot)) continue;
            fail("%s: tensor %s is not stored like %s; use another checkpoint", reader.folder().c_str(),
                 name.c_str(), printable(index.tensors[0].name).c_str());
        }
        known.insert(name);
    });
    for (const CheckpointTensor& tensor : index.tensors) {
        if (known.count(tensor.name) == 0) {
            fail("%s: contains tensor %s, which this model does not have; choose the options that it was "
                 "trained with",
                 reader.folder().c_str(), printable(tensor.name).c_str());
        }
    }
}

// Refuses a checkpoint whose optimizer kept, of any tensor, more or less of the wanted slots than this one.
inline void check_slots(const CheckpointReader& reader, const ParameterLayout& layout,
                        const ZeroSettings& settings) {
    layout.each_of_model([&](const TensorRow& row, const std::string& name) {
        const CheckpointTensor& tensor = reader.index().tensors[reader.index().find(name)];
        std::vector<Slot> wanted = slots_of(settings, row);
        for (Slot slot : settings.slots) {
            bool wants = std::ranges::count(wanted, slot) > 0, has = tensor.dtype(slot).has_value();
            if (wants == has) continue;
            fail("%s: of tensor %s its optimizer kept %s '%s' and this one keeps %s; take the optimizer that "
                 "it was trained with, or start a new run from it with --init",
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

// Runs, one behind the other. Those that are neighbours where they go become one.
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

    std::string_view bytes() const { return bytes_; }

    // Calls visit(header, values) for each run. width(slot) gives the bytes of an element.
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
// loading

class CheckpointLoader {
public:
    template <typename LayoutAt>
    CheckpointLoader(ZeroState& state, const World& world, LayoutAt&& layout_at,
                     const CheckpointReader& reader, const SlotSources& sources)
        : state_(state),
          world_(world),
          reader_(reader),
          sources_(sources),
          places_(shape(), layout_at, reader.index()),
          batches_(pieces_to_read(places_, reader.index(), world.rank(),
                                  [&](Slot slot) { return sources.uses(slot); })),
          buffers_(2 * batch_room) {}

    // Waits, because pieces that were read may still be on their way to the state.
    ~CheckpointLoader() { cudaStreamSynchronize(state_.stream()); }

    CheckpointLoader(const CheckpointLoader&) = delete;
    CheckpointLoader& operator=(const CheckpointLoader&) = delete;

    void load() {
        state_.synchronize();
        read_ahead(0);
        int rounds = world_.largest((int)batches_.size());
        for (int round = 0; round < rounds; round++) {
            Messages messages;
            world_.on_all_ranks([&] {
                if (round < (int)batches_.size()) messages = take((size_t)round);
            });
            deliver(messages);
        }
        for (Slot slot : slots_of(state_.settings())) {
            if (sources_[slot]) state_.gather_replicas(slot);
        }
        state_.publish_all();
    }

    // By this rank: bytes of the files, and those that went to other ranks as messages.
    uint64_t bytes_read() const { return bytes_read_; }
    uint64_t bytes_sent() const { return bytes_sent_; }

private:
    static constexpr size_t batch_room = largest_piece * sizeof(float);
    static constexpr size_t large_run = 64 << 10;  // bytes that are worth a copy to the device of their own

    using Messages = std::map<int, RunMessage>;  // by the rank they go to

    const MeshShape& shape() const { return state_.mesh().shape; }
    Dtype stored(Slot slot) const { return *reader_.index().tensors[0].dtype(slot); }
    size_t width_of(Slot slot) const { return dtype_size(stored(slot)); }

    char* buffer(size_t number) { return buffers_.data + number % 2 * batch_room; }

    void read_ahead(size_t number) {
        if (number >= batches_.size()) return;
        ahead_.start([this, number, to = buffer(number)]() mutable {
            for (const CheckpointPiece* piece : batches_[number].pieces) {
                reader_.read(*piece, to);
                to += reader_.index().bytes_of(*piece);
            }
        });
    }

    // Waits for what is read ahead. What this rank owns of it goes to the state, the rest is for others.
    Messages take(size_t number) {
        ahead_.finish();
        read_ahead(number + 1);
        Messages messages;
        const char* from = buffer(number);
        for (const CheckpointPiece* piece : batches_[number].pieces) {
            size_t width = width_of(piece->slot);
            places_.each_slice(*piece, [&](int rank, const PieceRun& run) {
                const char* values = from + run.from * width;
                RunHeader header = {piece->slot, run.unit, run.at, run.count};
                if (rank != world_.rank())
                    messages[rank].add(header, values, width);
                else if (run.count * width >= large_run)
                    put(header, values);
                else
                    own_.add(header, values, width);
            });
            from += piece->count * width;
        }
        put_all(own_.bytes());
        bytes_read_ += batches_[number].bytes;
        return messages;
    }

    // For all ranks.
    void deliver(const Messages& messages) {
        std::vector<std::string_view> to_each(world_.size());
        for (auto& [rank, message] : messages) {
            to_each[rank] = message.bytes();
            bytes_sent_ += message.bytes().size();
        }
        std::vector<std::string> received = world_.exchange(to_each);
        for (const std::string& message : received) put_all(message);
        cudaCheck(cudaStreamSynchronize(state_.stream()));
        converted_.clear();
        own_ = {};
    }

    void put_all(std::string_view message) {
        RunMessage::each(
            message, [&](Slot slot) { return width_of(slot); },
            [&](const RunHeader& run, const char* values) { put(run, values); });
    }

    // The values must stay where they are until the stream has come to its end.
    void put(const RunHeader& run, const char* values) {
        for (Slot slot : slots_of(state_.settings())) {
            if (sources_[slot] != run.slot) continue;
            bool alike = stored(run.slot) == dtype_of(slot);
            if (!alike) converted_.push_back(other_dtype(values, run.count, stored(run.slot)));
            state_.copy_in(slot, run.unit, run.at, run.count, alike ? values : converted_.back().data());
        }
    }

    // bf16 as fp32, and fp32 as bf16.
    static std::string other_dtype(const char* values, size_t count, Dtype dtype) {
        auto convert = [&]<typename From, typename To>(To (*conversion)(From)) {
            std::string result(count * sizeof(To), '\0');
            for (size_t i = 0; i < count; i++) {
                From value;
                memcpy(&value, values + i * sizeof value, sizeof value);
                To other = conversion(value);
                memcpy(&result[i * sizeof other], &other, sizeof other);
            }
            return result;
        };
        return dtype == Dtype::bf16 ? convert(bf16_to_float) : convert(float_to_bf16);
    }

    ZeroState& state_;
    const World& world_;
    const CheckpointReader& reader_;
    SlotSources sources_;
    const TensorPlaces places_;
    const std::vector<PieceBatch> batches_;  // the pieces that this rank reads
    HostArray<char> buffers_;                // two: of the batch that is delivered, and of the next one
    RunMessage own_;                         // this rank's small runs of the batch, neighbours made one
    std::deque<std::string> converted_;      // to the state's precision, in this round
    uint64_t bytes_read_ = 0, bytes_sent_ = 0;
    Background ahead_;  // reads the next batch
};

// For all ranks: sets the state to what a checkpoint holds, bit for bit where both store it alike.
// layout_at(position) gives the layout of a rank. weights_only: the moments stay as they are. If the
// checkpoint is of another model, or what is read is damaged, all ranks throw the same CommonError, and the
// state is of no use until another one is loaded, after world.recover(). Returns what was converted on the
// way, for the header of the run; empty: nothing.
template <typename LayoutAt>
std::string load_checkpoint(ZeroState& state, const World& world, LayoutAt&& layout_at,
                            const CheckpointReader& reader, bool weights_only) {
    SlotSources sources;
    world.on_all_ranks([&] {
        check_tensors(reader, state.layout());
        sources = slot_sources(reader, state.settings(), weights_only);
        if (state.settings().training && !weights_only) check_slots(reader, state.layout(), state.settings());
    });
    CheckpointLoader(state, world, layout_at, reader, sources).load();
    return conversions(reader.index().tensors[0], sources);
}
