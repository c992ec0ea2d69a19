/*
Contributors to checkpoints. The weights and the optimizer's state are the first one
(comm/zero_checkpoint.h); whatever else training changes, and a run needs to go on, is another. A contributor
says on each rank what is to be saved of it, and fills itself from a checkpoint of any layout. The rest is the
same for all, and is done by the saver and the loader: folders, files, checksums, full disks, and errors of
which all ranks must hear.

A save, on each rank:

    begin_save()   the training's thread   what follows is of the state as it is now
    plan()         the saver's thread      tensors, and how many bytes of them this rank writes
    write()        the saver's thread      the pieces, into a file of the rank's and the contributor's own
    end_save()     the training's thread   whether there is a checkpoint now

Files that hold what has not changed need not be written again: plan() keeps their tensors, and the new
checkpoint shares the files with the last one (data/checkpoint/folder.h).

A load, on all ranks:

    begin_load()   refuses the checkpoint, or deals its pieces to the ranks
    take()         this rank has read a batch: what others are to have of it
    receive()      what another rank had read
    settle()       all that was given is in its place
    end_load()     all ranks have all that is theirs
*/
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "data/checkpoint/files.h"  // CheckpointReader

// ----------------------------------------------------------------------------
// a save

struct SaveScope {
    bool in_background = false;  // training continues during write()
    bool weights_alone = false;  // nothing to go on from: for a disk on which there is no room for more
};

// A tensor of a contributor, the same on all ranks but for `rows`.
struct PlannedTensor {
    CheckpointTensor tensor;
    // A tensor of 0 rows gets the rows of all ranks, in the order of the ranks; this rank has this many.
    uint64_t rows = 0;
    // It is as the last checkpoint has it. What a contributor has written in one save, it keeps whole or not
    // at all.
    bool kept = false;

    bool counts_rows() const { return tensor.shape[0] == 0 && !kept; }
};

struct SavePlan {
    std::vector<PlannedTensor> tensors;
    uint64_t bytes = 0;  // to be written by this rank
};

// Takes a piece: the number of its tensor in the plan, its slot and its elements, which count from the
// beginning of this rank's rows where rows are counted.
using WritePiece = std::function<void(const CheckpointPiece& piece, const void* values)>;

// ----------------------------------------------------------------------------
// a load

// Pieces that a rank reads one after another, and sends before it reads on.
struct PieceBatch {
    std::vector<const CheckpointPiece*> pieces;
    uint64_t elements = 0, bytes = 0;
};

using Messages = std::map<int, std::string>;  // by the rank they go to

// ----------------------------------------------------------------------------
// replicas

// The kinds of memory that groups of ranks hold alike (comm/fault_checks.h).
enum class Replicated { weights, state, copies, head_copies, embeddings };

// A piece of memory of this rank that others hold alike.
struct ReplicatedPiece {
    Replicated what;
    std::string name;  // names the tensor or the unit
    const void* begin;
    size_t bytes;
    bool on_host;
};

// ----------------------------------------------------------------------------
// a contributor

class Stateful {
public:
    virtual ~Stateful() = default;

    // ---- saving

    // Bytes that this rank would write now, of all that it has.
    virtual uint64_t bytes_to_write(bool weights_alone) const = 0;
    // An error here says that no save has begun.
    virtual void begin_save(const SaveScope& scope) = 0;
    // has_last: the checkpoint that was saved or loaded last is where it was, so tensors may be kept.
    virtual SavePlan plan(bool has_last) = 0;
    virtual void write(const WritePiece& write) = 0;
    // published: the checkpoint is there, and the last one from now on.
    virtual void end_save(bool published) { (void)published; }
    // Seconds that changes of the state waited for the save that ends.
    virtual double stall() const { return 0; }
    // Tells whether all of it is of one step: not where a step has thrown in the middle.
    virtual bool is_whole() const { return true; }

    // ---- loading

    // Tells whether a tensor of this name is its own.
    virtual bool has(const std::string& tensor) const = 0;
    // The pieces that this rank reads, in batches. Talks to no other rank.
    virtual std::vector<PieceBatch> begin_load(const CheckpointReader& reader, bool weights_only) = 0;
    // values: those of the batch, piece after piece. They, and messages, stay until settle() has returned.
    virtual Messages take(const PieceBatch& batch, const char* values) = 0;
    virtual void receive(std::string_view message) = 0;
    virtual void settle() = 0;
    // For all ranks. Returns what was converted on the way, for the header of the run; empty: nothing.
    virtual std::string end_load() = 0;

    // ---- checks

    // Memory that this rank and others may hold alike, in an order that they share; by_tensor: in pieces with
    // names of tensors.
    virtual std::vector<ReplicatedPiece> replicated(bool by_tensor) const {
        (void)by_tensor;
        return {};
    }
};

// All that a run saves. In a checkpoint, the tensors of the first come first.
using Contributors = std::vector<Stateful*>;
