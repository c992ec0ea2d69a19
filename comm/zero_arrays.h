/*
The memory for the parameters that a rank trains and for the state that it keeps for them, which depends on
the settings of the run and its optimizer. The operations on them are in comm/zero.h.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "comm/memory.h"            // Arena
#include "comm/parameters.h"        // ParameterLayout, UnitBuffers
#include "data/base/dtype.h"        // Dtype
#include "data/checkpoint/slot.h"   // Slot
#include "data/options/options.h"   // TablePlace, RowDtype
#include "kernels/global_norm.cuh"  // sum_squares_scratch
#include "kernels/optimizer.h"      // most_optimizer_slots, TransformScratch

// Factors for the optimizer's learning rate and weight decay.
struct Multipliers {
    double learning_rate = 1, weight_decay = 1;
};

// The kinds of messages that are sent while the compute stream works, instead of making it wait: those of
// tensor ranks, pipeline stages and data ranks. A run overlaps all kinds or none; a plan that does not
// overlap one kind shows what its overlap saves.
struct Overlap {
    bool tensor, pipeline, data;
    Overlap(bool all = true) : tensor(all), pipeline(all), data(all) {}
};

struct ZeroSettings {
    int level = 0;
    bool training = true;                          // false: parameters only
    std::vector<Slot> slots = {Slot::m, Slot::v};  // arrays that the optimizer keeps, in its order
    std::vector<Slot> not_of_matrices = {};        // those not kept for the blocks' matrices
    bool takes_norms = false;                      // norms of sections, see Optimizer::takes_norms
    TransformScratch transform_scratch = nullptr;  // null: no matrix is transformed
    std::array<Multipliers, tensor_kinds> multipliers = {};
    bool keep_master = false;  // an fp32 copy of the parameters for the optimizer
    bool offload = false;
    TablePlace table_place = TablePlace::device;  // keeps the rows of n-gram tables
    RowDtype table_dtype = RowDtype::automatic;
    int table_prefetch = 1,
        table_staleness = 0;     // on the host: steps by which rows are fetched ahead; updates they may miss
    size_t table_cache = 0;      // tables on disk: bytes of host memory for rows
    std::string table_dir = {};  // and the folder of their files
    int host_threads = 0;        // OpenMP threads for host steps; 0: as OpenMP chooses
    Overlap overlap = true;
    Dtype reduce_dtype = Dtype::fp32;  // in which gradients are sent to other data ranks
    int prefetch = 1;                  // level 3: units gathered ahead of their use
    // Room in host memory for a copy of the state, which is written while training continues.
    bool staging = false;
    bool checks = false;  // room for hashes of what ranks hold, and of their gradients

    // The format of tables' rows in a build whose parameters have element_bytes.
    Dtype rows_dtype(size_t element_bytes = sizeof(floatX)) const {
        bool in_bf16 =
            table_dtype == RowDtype::automatic ? element_bytes == 2 : table_dtype == RowDtype::bf16;
        return in_bf16 ? Dtype::bf16 : Dtype::fp32;
    }
};

// Returns the slots that a state keeps for each element.
inline std::vector<Slot> slots_of(const ZeroSettings& settings) {
    std::vector<Slot> slots = {Slot::weight};
    if (!settings.training) return slots;
    if (settings.keep_master) slots.push_back(Slot::master);
    slots.insert(slots.end(), settings.slots.begin(), settings.slots.end());
    return slots;
}
// Returns the slots that a state keeps for one tensor.
inline std::vector<Slot> slots_of(const ZeroSettings& settings, const TensorRow& row) {
    std::vector<Slot> slots = slots_of(settings);
    if (row.is_block_matrix())
        std::erase_if(slots, [&](Slot slot) { return std::ranges::count(settings.not_of_matrices, slot); });
    return slots;
}
// Returns the number of elements for which a slot has room on a rank that owns `own` elements of a unit. A
// slot that is not kept for the blocks' matrices needs room only for the elements that may precede them.
inline size_t capacity_of_slot(const ZeroSettings& settings, Slot slot, const ParameterLayout& layout,
                               int unit, size_t own) {
    return std::ranges::count(settings.not_of_matrices, slot) ? std::min(own, layout.before_matrices(unit))
                                                              : own;
}
constexpr Dtype dtype_of(Slot slot) {
    return slot == Slot::weight && sizeof(floatX) == 2 ? Dtype::bf16 : Dtype::fp32;
}

// Replicas own the same part of a unit, and each reads and writes a slice of it. Slices are equal, except
// that the last one also has the remainder: fewer than part_alignment elements per replica.
inline UnitRange replica_slice(size_t part, int replicas, int replica) {
    size_t each = part / (size_t)replicas / part_alignment * part_alignment, begin = (size_t)replica * each;
    return {begin, replica == replicas - 1 ? part : begin + each};
}
inline size_t largest_slice(size_t part, int replicas) {
    return part - (size_t)(replicas - 1) * replica_slice(part, replicas, 0).end;
}
// Returns the replica whose slice has element `at` of the part.
inline int replica_at(size_t part, int replicas, size_t at) {
    size_t each = replica_slice(part, replicas, 0).end;
    return replicas == 1 || each == 0 ? replicas - 1 : (int)std::min(at / each, (size_t)replicas - 1);
}

// The number of hashes for checks, in addition to one for each unit.
constexpr int hashes_of_state = 8;

// The result of a step, in device memory.
struct StepStatistics {
    // sums over the ranks
    float loss;     // the sum of the losses
    float squares;  // the sum of the gradients' squares
    float stop;     // ranks that were asked to stop
    float saved;    // ranks that have finished their part of the save under way
    float save;     // 1 if the first rank's clock says that a checkpoint is due
    float rows;     // rows of tables that came from the host's memory
    float late;     // those of them that waited for an update
    // computed from the sums
    float norm;   // the gradients' norm
    float scale;  // multiplies the gradients; NaN: nothing is stepped
};
constexpr int summed_statistics = 7;
static_assert(offsetof(StepStatistics, norm) == summed_statistics * sizeof(float));

// All memory of a state. shards: ranks of its shard group
struct ZeroArrays {
    bool cut_grads, cut_params;  // over the ranks of the shard group

    floatX* params;        // all units, or (cut) this rank's part of each
    floatX* whole_params;  // cut: the places of units in use
    float* whole_grads;    // likewise
    float* grads;          // laid out like params
    size_t norm_scratch_floats;
    float* norm_scratch;
    uint64_t* hashes;        // (units + hashes_of_state), if checks are on
    float* section_squares;  // (2, sections) of weights and of updates, if the optimizer uses norms
    // This rank's part of each unit begins at slot_at[slot][unit].
    float* slots[most_optimizer_slots] = {};
    std::vector<size_t> slot_at[most_optimizer_slots];
    float* master;  // this rank's parts, without gaps; null: none is kept
    // offload: in host memory, like slots and master
    float* host_grads;    // this rank's part of each unit
    floatX* host_params;  // likewise
    float* host_scale;    // (1)
    float* host_section_squares;

    ZeroArrays(Arena& memory, const ParameterLayout& layout, int shards, const ZeroSettings& s,
               cudaStream_t stream = nullptr)
        : cut_grads(s.training && s.level >= 2 && shards > 1), cut_params(s.level >= 3 && shards > 1) {
        if (s.slots.size() > most_optimizer_slots)
            fail("optimizer: it keeps %zu slots; raise most_optimizer_slots (%d)", s.slots.size(),
                 most_optimizer_slots);
        size_t whole = layout.size(), part = whole / shards, own = s.training ? part : 0;
        auto take = [&](float*& array, size_t count) { array = memory.take_zeros<float>(count, stream); };
        auto take_elements = [&](floatX*& array, size_t count) {
            array = memory.take_zero_numbers(count, stream);
        };
        memory.of("parameters");
        take_elements(params, cut_params ? part : whole);
        memory.of("units in use");
        take_elements(whole_params, cut_params ? UnitBuffers(layout, s.prefetch + 1).size() : 0);
        take(whole_grads, cut_grads ? UnitBuffers(layout, 2).size() : 0);
        memory.of("gradients");
        take(grads, cut_grads ? own : s.training ? whole : 0);
        norm_scratch_floats = s.training ? norm_scratch_size(layout, shards) : 0;
        take(norm_scratch, norm_scratch_floats);
        size_t squares = s.training && s.takes_norms ? 2 * layout.sections() : 0;
        take(section_squares, squares);
        memory.of("checks");
        hashes = memory.take_zeros<uint64_t>(s.checks ? (size_t)layout.units() + hashes_of_state : 0, stream);
        memory.of("optimizer", s.offload);
        for (size_t i = 0; i < s.slots.size() && s.training; i++) {
            size_t size = 0;
            for (int unit = 0; unit < layout.units(); unit++) {
                slot_at[i].push_back(size);
                size += capacity_of_slot(s, s.slots[i], layout, unit, layout.unit_size(unit) / shards);
            }
            take(slots[i], size);
        }
        take(master, s.keep_master ? own : 0);
        memory.of("copies for offload", true);
        take(host_grads, s.offload ? own : 0);
        take_elements(host_params, s.offload ? own : 0);
        take(host_scale, s.offload && s.training ? 1 : 0);
        take(host_section_squares, s.offload ? squares : 0);
    }

private:
    static size_t norm_scratch_size(const ParameterLayout& layout, int shards) {
        size_t floats = 0;
        for (int unit : layout.held()) {
            // each end of a range may cut a chunk, and a section has at most one range
            floats += sum_squares_scratch(layout.unit_size(unit) / shards) + layout.section_parts(unit);
        }
        return floats;
    }
};
