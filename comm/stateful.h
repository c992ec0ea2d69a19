/*
Contributors to checkpoints. The weights and the optimizer state form the first contributor
(comm/zero_checkpoint.h); any other state that training changes and a resumed run needs is a further one. On
each rank, a contributor lists what it saves, and restores itself from a checkpoint of any layout. The saver
and the loader handle what is common to all contributors: folders, files, checksums, full disks, and errors
that all ranks must learn of.

A save, on each rank:

    begin_save()   training thread   fixes the state to save, as it is now
    plan()         saver thread      lists the tensors, and counts the bytes that this rank writes
    write()        saver thread      writes the pieces, into a file for each rank and contributor
    let_go()       saver thread      releases the fixed state, whether it was written or not
    end_save()     training thread   is informed whether the checkpoint now exists

Files whose contents have not changed need not be rewritten: plan() keeps their tensors, and the new
checkpoint shares the files with the last one (data/checkpoint/folder.h).

A load, on all ranks:

    find_state()   looks for parts of the state that the ranks still have
    begin_load()   refuses the checkpoint, or assigns its pieces to the ranks
    take()         uses a batch that this rank has read, and returns the parts that other ranks need
    receive()      uses what another rank has read
    settle()       waits until everything read or received is in place
    end_load()     completes the load once all ranks have received everything
*/
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "comm/world.h"             // World
#include "data/checkpoint/files.h"  // CheckpointReader

// ----------------------------------------------------------------------------
// a save

struct SaveScope {
    const World* world = nullptr;
    bool in_background = false;  // training continues during write()
    bool weights_alone = false;  // only weights, for a disk without room for more; no run can resume from it
    bool has_last = false;       // the checkpoint saved or loaded last still exists, so tensors may be kept
    uint64_t id = 0;             // the save id (data/checkpoint/files.h)
};

// A tensor of a contributor, the same on all ranks except for `rows`.
struct PlannedTensor {
    CheckpointTensor tensor;
    // If its shape has 0 rows, the tensor receives the rows of all ranks, in rank order: `rows` of them from
    // this rank.
    uint64_t rows = 0;
    // The tensor is unchanged since the last checkpoint. A contributor keeps either all or none of the
    // tensors that it wrote in one save.
    bool kept = false;

    bool counts_rows() const { return tensor.shape[0] == 0 && !kept; }
};

struct SavePlan {
    std::vector<PlannedTensor> tensors;
    uint64_t bytes = 0;  // to be written by this rank
};

// Writes a piece, given by the number of its tensor in the plan, its slot and its elements. If the tensor
// counts_rows(), elements are numbered from the beginning of this rank's rows.
using WritePiece = std::function<void(const CheckpointPiece& piece, const void* values)>;

// Sums of a number that each rank has, as one rank sees them.
struct RankNumbers {
    uint64_t before = 0, all = 0;   // sums over the ranks before this one, and over all
    int some_before = 0, some = 0;  // likewise, counts of the ranks whose number is above 0
};

// For all ranks: returns the sums of each of these numbers over the ranks.
inline std::vector<RankNumbers> sum_over_ranks(const World& world, const std::vector<uint64_t>& mine) {
    std::vector<RankNumbers> sums(mine.size());
    const auto of_all = world.all_gather({(const char*)mine.data(), mine.size() * sizeof mine[0]});
    for (int rank = 0; rank < world.size(); rank++) {
        for (size_t i = 0; i < mine.size(); i++) {
            uint64_t number;
            memcpy(&number, &of_all[(size_t)rank][i * sizeof number], sizeof number);
            sums[i].all += number, sums[i].some += number > 0;
            if (rank < world.rank()) sums[i].before += number, sums[i].some_before += number > 0;
        }
    }
    return sums;
}

// ----------------------------------------------------------------------------
// a load

// Pieces that a rank reads one after another, and sends before it reads the next batch.
struct PieceBatch {
    std::vector<const CheckpointPiece*> pieces;
    uint64_t elements = 0, bytes = 0;
};

using Messages = std::map<int, std::string>;  // by destination rank

// ----------------------------------------------------------------------------
// replicas

// The kinds of memory that groups of ranks replicate (comm/fault_checks.h).
enum class Replicated { weights, state, copies, head_copies, embeddings };

// A piece of this rank's memory that other ranks replicate.
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

    // Returns the bytes that this rank would write now if it saved everything.
    virtual uint64_t bytes_to_write(bool weights_alone) const = 0;
    // For all ranks. If this throws, no save has begun.
    virtual void begin_save(const SaveScope& scope) = 0;
    virtual SavePlan plan() = 0;
    virtual void write(const WritePiece& write) = 0;
    virtual void let_go() {}
    // published: the checkpoint exists, and is now the newest one
    virtual void end_save(bool published) { (void)published; }
    // Returns the seconds for which changes to the state had to wait for the save that is ending.
    virtual double stall() const { return 0; }
    // Returns whether the whole state belongs to one step; false if a step threw midway.
    virtual bool is_whole() const { return true; }

    // ---- loading

    // Returns whether a tensor of this name belongs to this contributor.
    virtual bool has(const std::string& tensor) const = 0;
    // For all ranks, before begin_load().
    virtual void find_state(const World& world, const CheckpointReader& reader, bool weights_only) {
        (void)world, (void)reader, (void)weights_only;
    }
    // Returns the pieces that this rank reads, in batches. Communicates with no other rank. Batch i of every
    // rank is received before any rank's batch i + 1 is used; a batch may be empty, to keep ranks in step.
    virtual std::vector<PieceBatch> begin_load(const CheckpointReader& reader, bool weights_only) = 0;
    // values: those of the batch, piece by piece. They and the messages remain valid until settle() has
    // returned.
    virtual Messages take(const PieceBatch& batch, const char* values) = 0;
    virtual void receive(std::string_view message) = 0;
    virtual void settle() = 0;
    // For all ranks. Describes what was converted during the load, for the header of the run; empty if
    // nothing was.
    virtual std::string end_load() = 0;

    // ---- checks

    // Returns the memory of this rank that other ranks may replicate, in the same order on all of them.
    // by_tensor: divided into pieces that are named after tensors
    virtual std::vector<ReplicatedPiece> replicated(bool by_tensor) const {
        (void)by_tensor;
        return {};
    }
};

// Everything that a run saves. A checkpoint lists the tensors of the first contributor first.
using Contributors = std::vector<Stateful*>;
