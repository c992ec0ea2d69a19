/*
ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020): each
rank of a shard group holds a part of what plain data parallelism holds on every rank.

    level   cut over the shard group          a step sends
    0       nothing (but see below)           all-reduce of the gradients
    1       optimizer state                   reduce-scatter of the gradients, all-gather of the parameters
    2       and gradients                     the same, reduce-scatter for each micro-batch
    3       and parameters                    and all-gather of each unit's parameters before its use

Every unit of the layout is cut evenly: part r of each unit belongs to rank r of the shard group. If the shard
group is smaller than the data group (hybrid sharding), the ranks that own the same part, one in each shard
group, all-reduce its gradient. So level 0 is simply a shard group of one data rank. If that data rank has
context ranks, they form the shard group, and state is cut over them as at level 1.

Tensor and pipeline ranks have different parameters, with two exceptions: tensors that tensor ranks replicate,
and tied embeddings, which are on the first and on the last stage. Right before the step, the ranks that own
the same elements sum their gradients. They all get the same bits from a sum, so the copies stay identical.

The passes over the model use the same protocol at every level:

    acquire(unit)  ... params(unit) ...  release(unit)
    begin_gradients(unit) ... grads(unit) ... reduce_gradients(unit)

comm/gradient_sums.h describes how gradients are summed over ranks, in fp32 or sent in bf16. Communication has
its own streams: gradients are reduced while the backward pass continues with the next unit, parameters arrive
while the passes work on earlier ones, and neither waits for the other. Without overlap those streams are the
compute stream itself: the same operations run one after the other, so the results are bit-identical.

Offload keeps the optimizer state in host memory and steps it there, unit by unit, while the device continues
with the units that are done. An optimizer that uses norms (kernels/optimizer.h) makes one more pass over all
units first; the norms are summed over all ranks in one call, so that copies of a tensor see the same bits. An
optimizer that transforms whole matrices steps their units in rounds (comm/matrix_owners.h).

The sections of this file: the state, what a rank owns, parameters, gradients, the step. Settings and memory
of the state are in comm/zero_arrays.h.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/gradient_sums.h"     // GradientSums
#include "comm/matrix_owners.h"     // MatrixOwners
#include "comm/mesh.h"              // Mesh, Communicator
#include "comm/parameters.h"        // ParameterLayout
#include "comm/recorder.h"          // TraceSpan
#include "comm/zero_arrays.h"       // ZeroSettings, ZeroArrays, StepStatistics
#include "data/base/deadlines.h"    // LaunchGuard
#include "kernels/accumulate.cuh"   // accumulate
#include "kernels/global_norm.cuh"  // SquaresRange, sum_squares, sums_of_squares, clip_scale
#include "kernels/optimizer.h"      // Optimizer, OptimizerPass, OptimizerPart, OptimizerArrays
#include "kernels/random.cuh"       // name_hash

// How the first work on a unit's matrices treats their gradients: it either adds to them, so they must be
// zero, or overwrites them. Later work adds.
enum class Matrices { added_to, overwritten };

class ZeroState {
public:
    // The memory must outlive the state.
    ZeroState(Arena& memory, const ParameterLayout& layout, const Mesh& mesh, const ZeroSettings& settings,
              cudaStream_t compute);
    ~ZeroState();
    ZeroState(const ZeroState&) = delete;
    ZeroState& operator=(const ZeroState&) = delete;

    // ---- parameters, (unit_size) each

    // Makes params(unit) valid for the compute stream's next work, until release(unit). Units that follow in
    // this direction (+1, -1, or 0 for none) are prefetched.
    void acquire(int unit, int direction);
    void release(int unit);
    floatX* params(int unit) const {
        return arrays_.cut_params ? arrays_.whole_params + param_places_.offset(param_places_.place(unit))
                                  : arrays_.params + layout_.unit_offset(unit);
    }

    // ---- gradients, (unit_size) each

    // The number of adjacent data ranks that reduce gradients together in every micro-batch, and so need the
    // same number of micro-batches; 1 if gradients are not cut.
    int ranks_in_step() const { return arrays_.cut_grads ? mesh_.shape.shard : 1; }
    // Starts a step: zeroes gradients, except those of matrices that are overwritten.
    void zero_gradients(Matrices matrices = Matrices::added_to);
    // Prepares grads(unit), to which the compute stream's next work adds, until reduce_gradients(unit).
    // overwritten: that work computes the gradients of matrices, and overwrites them if overwrites() says so.
    // A second call in a micro-batch does nothing.
    void begin_gradients(int unit, Matrices matrices = Matrices::added_to);
    // Returns whether the gradients of matrices are overwritten: gradients that stay whole start anew in each
    // step, cut ones in each micro-batch.
    bool overwrites(bool first_micro_batch) const { return arrays_.cut_grads || first_micro_batch; }
    void reduce_gradients(int unit, bool last_micro_batch);
    // Sets a function that is called whenever the compute stream's work has added to a unit's gradients,
    // before they are reduced. Null: nothing is called.
    void watch_gradients(std::function<void(int unit)> made) { gradients_made_ = std::move(made); }
    // Includes `squares` (1), on the device, in the norm: the sum of the squares of other gradients that this
    // rank has.
    void count_squares(const float* squares) { other_squares_ = squares; }
    float* grads(int unit) const {
        return arrays_.cut_grads ? arrays_.whole_grads + grad_places_.offset(grad_places_.place(unit))
                                 : arrays_.grads + layout_.unit_offset(unit);
    }

    // ---- the step

    // Sums the statistics of all ranks, clips the gradients and steps the parameters. The device decides,
    // alike on every rank, whether to skip the step because the loss or a gradient is not finite or exceeds a
    // limit. measured() is called once the compute stream has the statistics, before it steps anything.
    void update(
        StepStatistics* stats, const Optimizer& optimizer, ClipLimits limits,
        const std::function<void()>& measured = [] {});
    // Sums the first summed_statistics of the statistics over all ranks.
    void sum_statistics(StepStatistics* stats);

    // ---- what this rank owns

    // Elements [owned_begin, owned_begin + part_size) of a unit.
    size_t owned_begin(int unit) const { return mesh_.shard_rank() * part_size(unit); }
    size_t part_size(int unit) const { return layout_.unit_size(unit) / shards_; }
    std::vector<TensorPart> owned_parts(int unit) const {
        return layout_.parts(unit, owned_begin(unit), owned_begin(unit) + part_size(unit));
    }
    floatX* owned_params(int unit) const {
        return arrays_.params + (arrays_.cut_params ? shard_offset(unit) : whole_offset(unit));
    }
    float* owned_grads(int unit) const {
        return arrays_.grads + (arrays_.cut_grads ? shard_offset(unit) : whole_offset(unit));
    }
    const Mesh& mesh() const { return mesh_; }
    const ParameterLayout& layout() const { return layout_; }
    const ZeroSettings& settings() const { return settings_; }
    cudaStream_t stream() const { return compute_; }
    bool cuts_params() const { return arrays_.cut_params; }
    // (units + hashes_of_state), on the device; null without ZeroSettings::checks
    uint64_t* hashes() const { return arrays_.hashes; }
    // On the device, or on the host with offload. Null: the array is not kept.
    float* owned_master(int unit) const {
        return arrays_.master ? arrays_.master + shard_offset(unit) : nullptr;
    }
    float* owned_slot(Slot slot, int unit) const {
        auto at = std::find(settings_.slots.begin(), settings_.slots.end(), slot) - settings_.slots.begin();
        if (!settings_.training || at == (ptrdiff_t)settings_.slots.size()) return nullptr;
        return arrays_.slots[at] + arrays_.slot_at[at][unit];
    }

    // Sets elements of this rank's part of a unit, from element `at` of the part on, and waits until they are
    // set. Other ranks see the new values after publish_all().
    void set(int unit, size_t at, std::span<const float> values);
    // Copies elements of one slot, in their stored format, to host memory on `stream`, and back on the
    // compute stream.
    void copy_out(Slot slot, int unit, size_t at, size_t count, void* to, cudaStream_t stream) const;
    void copy_out(Slot slot, int unit, size_t at, size_t count, void* to) const {
        copy_out(slot, unit, at, count, to, compute_);
    }
    void copy_in(Slot slot, int unit, size_t at, size_t count, const void* from);
    // For all ranks: gathers this slot over the replicas, each of which has set its slice of the part that
    // they all own. Runs on the compute stream.
    void gather_replicas(Slot slot);
    // For all ranks: after set(), sends all parameters to the ranks that use them.
    void publish_all();
    // Waits for all work on the state.
    void synchronize() const;
    // Calls copy(), which puts copies of the state on the stream `copies`. They see the state as it is now:
    // they run after all work on it so far, and later changes wait for them.
    void copy_aside(cudaStream_t copies, const std::function<void()>& copy);
    // Waits until those copies are done. Any thread may call it, because it communicates with no rank.
    void wait_for_copies() const { copied_.wait(); }
    // Seconds that work on the state waited for those copies.
    double stall_of_copies() const;
    // (2, sections) on the device: the squares of weights and updates that the last step used.
    const float* section_squares() const { return arrays_.section_squares; }
    // Returns whether all parameters belong to one step; false if update() threw midway.
    bool is_whole() const { return is_whole_; }

private:
    struct Place {
        int unit = -1;  // the unit in this place
        bool in_use = false;
        Event ready = {}, free = {};
    };

    char* owned(Slot slot, int unit) const;

    static const Mesh& with_groups(const Mesh& mesh, const ParameterLayout& layout);
    // Returns the group of adjacent ranks that share the copies of a tensor.
    static const Communicator& neighbours(const Mesh& mesh, int ranks) {
        return ranks == mesh.tensor().size() ? mesh.tensor() : mesh.copies();
    }
    // True for tied embeddings on the first and the last stage.
    bool has_tied_copy(int unit) const {
        return unit == 0 && layout_.tied && mesh_.embedding_group().size() > 1;
    }
    bool has_copies(int unit) const { return has_tied_copy(unit) || !layout_.sums(unit).empty(); }

    size_t shard_size() const { return layout_.size() / shards_; }
    // The beginning of this rank's part of a unit, in arrays of whole units and in arrays of parts.
    size_t whole_offset(int unit) const { return layout_.unit_offset(unit) + owned_begin(unit); }
    size_t shard_offset(int unit) const { return layout_.unit_offset(unit) / shards_; }

    void order(cudaStream_t before, cudaStream_t after) { order_.order(before, after); }
    // Makes the compute stream wait for communication: up to an event, or for all of it so far.
    void wait(Traffic kind, const Event& event);
    void wait(Traffic kind, cudaStream_t communication);
    void gather_unit(int unit);
    void copy_gradients_to_host(int unit);
    void plan_step();
    void sum_copies();
    OptimizerArrays own_arrays(int unit, const float* scale) const;
    void on_host(std::function<void()> work) const {
        host_work(host_, settings_.host_threads, std::move(work));
    }
    void await_copies();
    void run_pass(int unit, const OptimizerPass& pass, const float* scale);
    void sum_norms(const float* scale);
    void copy_updates(const std::vector<int>& units, bool to_host);
    void publish(int unit);

    const ParameterLayout& layout_;
    const Mesh& mesh_;
    const ZeroSettings settings_;
    const int shards_;
    const UnitBuffers param_places_, grad_places_;

    cudaStream_t compute_, reductions_, gathers_;
    cudaStream_t host_;  // copies to and from the host, and host steps
    std::vector<cudaStream_t> own_streams_;
    Event order_, gradients_copied_;
    // copy_aside(): the copies are done; work starts to wait for them
    Event copied_{cudaEventBlockingSync}, copies_awaited_{cudaEventBlockingSync};
    enum class Copies { none, made, awaited } copies_ = Copies::none;  // state of the last copies
    std::vector<std::vector<OptimizerPart>> steps_;                    // for each unit: its own part
    std::vector<SquaresRange> counted_;  // parts of arrays_.grads that count in the norm
    std::vector<std::vector<SquaresRange>> counted_sections_;  // for each unit: of its own part
    std::vector<Event> updated_;             // for each unit: parameters of the new step are complete
    std::vector<char> unawaited_;            // for each unit: the compute stream has yet to wait for that
    std::vector<Place> param_at_, grad_at_;  // the contents of the places

    std::function<void(int unit)> gradients_made_;
    const float* other_squares_ = nullptr;

    const ZeroArrays arrays_;
    const GradientSums sums_;
    MatrixOwners owners_;  // has no rounds if no matrix is transformed
    bool is_whole_ = true;
};

// ----------------------------------------------------------------------------
// the state

// Refuses a mesh without the groups that a layout needs, before any memory is taken or work begun.
inline const Mesh& ZeroState::with_groups(const Mesh& mesh, const ParameterLayout& layout) {
    for (int unit : layout.held()) {
        for (const GradientSum& sum : layout.sums(unit)) {
            if (neighbours(mesh, sum.ranks).size() != sum.ranks)
                fail("ZeRO: %d tensor ranks share copies, but the mesh has no groups of them; see "
                     "MeshShape::copies",
                     sum.ranks);
        }
    }
    return mesh;
}

inline ZeroState::ZeroState(Arena& memory, const ParameterLayout& layout, const Mesh& mesh,
                            const ZeroSettings& settings, cudaStream_t compute)
    : layout_(layout),
      mesh_(with_groups(mesh, layout)),
      settings_(settings),
      shards_(mesh.shape.shards()),
      param_places_(layout, settings.prefetch + 1),
      grad_places_(layout, 2),
      compute_(compute),
      reductions_(compute),
      gathers_(compute),
      host_(compute),
      updated_(layout.units()),
      unawaited_(layout.units(), true),
      arrays_(memory, layout, shards_, settings, compute),
      sums_({memory, layout, mesh.shape, settings}),
      owners_(memory, layout, mesh.shape, mesh.position, mesh.stage(),
              settings.training ? settings.transform_scratch : nullptr, compute) {
    if (settings.overlap.data && (mesh.shape.ranks() > 1 || settings.offload)) {
        std::pair<cudaStream_t*, const char*> streams[] = {
            {&reductions_, "reductions"}, {&gathers_, "gathers"}, {&host_, "host copies"}};
        for (auto [stream, name] : streams) {
            *stream = new_communication_stream(name);
            own_streams_.push_back(*stream);
        }
    }
    if (arrays_.cut_params) param_at_.resize(param_places_.count());
    if (arrays_.cut_grads) grad_at_.resize(grad_places_.count());
    if (ledger && arrays_.cut_params) {
        ledger->left_behind.get = [this] {
            std::vector<int> units;
            for (const Place& place : param_at_) units.push_back(place.unit);
            return units;
        };
        ledger->left_behind.set = [this](const std::vector<int>& units) {
            for (size_t i = 0; i < units.size(); i++) param_at_[i].unit = units[i];
        };
    }

    if (settings.training) plan_step();
    ::synchronize(compute_);
}

inline ZeroState::~ZeroState() {
    if (ledger) ledger->left_behind = {};
    drain(compute_);
    for (cudaStream_t stream : own_streams_) end_stream(stream);
}

inline void ZeroState::wait(Traffic kind, const Event& event) {
    TraceSpan wait(kind, compute_);
    event.hold(compute_);
}

inline void ZeroState::wait(Traffic kind, cudaStream_t communication) {
    if (communication == compute_) return;
    TraceSpan wait(kind, compute_);
    order(communication, compute_);
}

// ----------------------------------------------------------------------------
// this rank's own part

inline char* ZeroState::owned(Slot slot, int unit) const {
    return slot == Slot::weight   ? (char*)owned_params(unit)
           : slot == Slot::master ? (char*)owned_master(unit)
                                  : (char*)owned_slot(slot, unit);
}

// For an offloaded state, the copy is host work, because CUDA's own copy from host to host blocks the caller.
inline void ZeroState::copy_out(Slot slot, int unit, size_t at, size_t count, void* to,
                                cudaStream_t stream) const {
    size_t width = dtype_size(dtype_of(slot));
    const char* from = owned(slot, unit) + at * width;
    if (settings_.offload && slot != Slot::weight)
        host_work(stream, settings_.host_threads, [=] { memcpy(to, from, count * width); });
    else
        copy_async((char*)to, from, count * width, stream);
}

inline void ZeroState::copy_aside(cudaStream_t copies, const std::function<void()>& copy) {
    for (cudaStream_t stream : {host_, reductions_, gathers_, compute_}) order(stream, copies);
    copy();
    copied_.record(copies);
    copies_ = Copies::made;
}

// Called before the compute stream is given work that changes the state.
inline void ZeroState::await_copies() {
    if (copies_ != Copies::made) return;
    copies_awaited_.record(compute_);
    copied_.hold(compute_);
    copies_ = Copies::awaited;
}

inline double ZeroState::stall_of_copies() const {
    if (copies_ != Copies::awaited) return 0;
    for (const Event* event : {&copies_awaited_, &copied_}) wait_for(*event, mesh_);
    return std::max(copied_.seconds_since(copies_awaited_), 0.0);
}

inline void ZeroState::copy_in(Slot slot, int unit, size_t at, size_t count, const void* from) {
    size_t width = dtype_size(dtype_of(slot));
    auto copy = [&](char* to) { copy_async(to, (const char*)from, count * width, compute_); };
    await_copies();
    copy(owned(slot, unit) + at * width);
    if (slot == Slot::weight && arrays_.host_params)
        copy((char*)(arrays_.host_params + shard_offset(unit) + at));
}

inline void ZeroState::set(int unit, size_t at, std::span<const float> values) {
    std::vector<floatX> rounded(values.begin(), values.end());
    copy_in(Slot::weight, unit, at, rounded.size(), rounded.data());
    if (arrays_.master) copy_in(Slot::master, unit, at, values.size(), values.data());
    cudaCheck(cudaStreamSynchronize(compute_));
}

// Arrays on the host (offload) pass through the gradients' memory on the device.
inline void ZeroState::gather_replicas(Slot slot) {
    const Communicator& replicas = mesh_.replica();
    if (replicas.size() == 1) return;
    auto gather = [&](int unit, auto* own, size_t room) {
        auto slice_of = [&](int replica) {
            auto [begin, end] = replica_slice(part_size(unit), replicas.size(), replica);
            return UnitRange{std::min(begin, room), std::min(end, room)};
        };
        bool visits = settings_.offload && slot != Slot::weight;
        auto* here = visits ? (decltype(own))owned_grads(unit) : own;
        auto [begin, end] = slice_of(replicas.rank());
        if (visits) copy_async(here + begin, own + begin, end - begin, compute_);
        size_t each = slice_of(0).end, all = each * (size_t)replicas.size(), gathered = all <= room ? all : 0;
        if (gathered > 0) replicas.all_gather(here, each, Traffic::weights, compute_);
        for (int replica = 0; replica < replicas.size(); replica++) {  // not gathered
            auto [from, to] = slice_of(replica);
            from = std::max(from, gathered);
            if (from < to) replicas.broadcast(here + from, to - from, replica, Traffic::weights, compute_);
        }
        if (visits) copy_async(own, here, room, compute_);
    };
    for (int unit : layout_.held()) {
        if (slot != Slot::weight) {
            gather(unit, (float*)owned(slot, unit),
                   capacity_of_slot(settings_, slot, layout_, unit, part_size(unit)));
            continue;
        }
        gather(unit, owned_params(unit), part_size(unit));
        if (arrays_.host_params)
            copy_async(arrays_.host_params + shard_offset(unit), owned_params(unit), part_size(unit),
                       compute_);
    }
}

inline void ZeroState::publish_all() {
    for (Place& place : param_at_) place.unit = -1;
    for (int unit : layout_.held()) {
        if (arrays_.cut_params) break;
        mesh_.shard().all_gather(params(unit), part_size(unit), Traffic::weights, compute_);
    }
    wait_for(compute_, mesh_);
}

inline void ZeroState::synchronize() const {
    for (cudaStream_t stream : {host_, reductions_, gathers_, compute_}) wait_for(stream, mesh_);
}

// ----------------------------------------------------------------------------
// parameters

// Gathers the parts of a unit into its place, unless they are there already.
inline void ZeroState::gather_unit(int unit) {
    Place& place = param_at_[param_places_.place(unit)];
    if (place.unit == unit) return;
    recorder.at_unit(unit);
    place.unit = unit;
    place.free.hold(gathers_);
    copy_async(params(unit) + owned_begin(unit), owned_params(unit), part_size(unit), gathers_);
    mesh_.gathers().all_gather(params(unit), part_size(unit), Traffic::parameters, gathers_);
    place.ready.record(gathers_);
}

inline void ZeroState::acquire(int unit, int direction) {
    if (ledger) ledger->enter(unit);
    if (!arrays_.cut_params) {
        recorder.at_unit(unit);
        // a single stream needs no wait, and neither does a unit that was waited for before
        if (!own_streams_.empty() && unawaited_[unit]) wait(Traffic::parameters, updated_[unit]);
        unawaited_[unit] = false;
        return;
    }
    gather_unit(unit);
    Place& place = param_at_[param_places_.place(unit)];
    place.in_use = true;
    wait(Traffic::parameters, place.ready);
    // the backward pass does not read the embedding
    int end = direction > 0 ? layout_.last_unit() : 1;
    for (int ahead = 1; direction != 0 && ahead <= settings_.prefetch; ahead++) {
        int next = unit + direction * ahead;
        if (direction > 0 ? next > end : next < end) break;
        if (!layout_.has(next)) break;  // it is on another stage
        if (!param_at_[param_places_.place(next)].in_use) gather_unit(next);
    }
    recorder.at_unit(unit);
}

inline void ZeroState::release(int unit) {
    if (ledger) ledger->enter(-1);
    if (!arrays_.cut_params) return;
    Place& place = param_at_[param_places_.place(unit)];
    place.in_use = false;
    place.free.record(compute_);
}

// ----------------------------------------------------------------------------
// gradients

inline void ZeroState::zero_gradients(Matrices matrices) {
    gradients_copied_.hold(compute_);  // until offload has copied the previous ones
    bool all = arrays_.cut_grads || matrices == Matrices::added_to;
    if (all) return zero_async(arrays_.grads, arrays_.cut_grads ? shard_size() : layout_.size(), compute_);
    for (int unit : layout_.held()) zero_async(grads(unit), layout_.before_matrices(unit), compute_);
}

inline void ZeroState::begin_gradients(int unit, Matrices matrices) {
    if (ledger) ledger->enter(unit);
    if (!arrays_.cut_grads) return;
    Place& place = grad_at_[grad_places_.place(unit)];
    if (place.in_use) return;
    place.in_use = true;
    wait(Traffic::gradients, place.free);
    // The padding between matrices is zero, unless the place held a unit that is laid out differently.
    bool others = place.unit >= 0 && !layout_.are_alike(place.unit, unit);
    place.unit = unit;
    bool all = others || matrices == Matrices::added_to;
    zero_async(grads(unit), all ? layout_.unit_size(unit) : layout_.before_matrices(unit), compute_);
}

// Gradients that stay whole are summed over the ranks once, after the last micro-batch has added to them. A
// cut gradient cannot wait: another unit needs the place that it was computed in.
inline void ZeroState::reduce_gradients(int unit, bool last_micro_batch) {
    if (gradients_made_) gradients_made_(unit);
    if (!arrays_.cut_grads && !last_micro_batch) return;
    recorder.at_unit(unit);
    order(compute_, reductions_);
    size_t part = part_size(unit);
    sums_.reduce_scatter(mesh_.shard(), grads(unit), part, reductions_);
    if (arrays_.cut_grads) {
        accumulate(owned_grads(unit), grads(unit) + owned_begin(unit), part, reductions_);
        Place& place = grad_at_[grad_places_.place(unit)];
        place.in_use = false;
        place.free.record(reductions_);
    }
    if (!last_micro_batch) return;
    sums_.all_reduce(mesh_.replica(), owned_grads(unit), part, reductions_);
    if (settings_.offload && !has_copies(unit)) copy_gradients_to_host(unit);
}

inline void ZeroState::copy_gradients_to_host(int unit) {
    order(reductions_, host_);
    copy_async(arrays_.host_grads + shard_offset(unit), owned_grads(unit), part_size(unit), host_);
    gradients_copied_.record(host_);
}

// ----------------------------------------------------------------------------
// the step
//
// Each rank sums the squares of the gradients it owns, these sums are added up over the ranks to give the
// global norm, and the optimizer (on the device, or on the host for --offload optimizer) steps the parameters
// that the rank owns, with one launch per unit, or one per unit and pass. Other ranks receive new parameters
// unit by unit, overlapped with the next forward pass.

inline void ZeroState::sum_statistics(StepStatistics* stats) {
    order(compute_, reductions_);
    mesh_.world().all_reduce(&stats->loss, summed_statistics, Traffic::statistics, reductions_);
    wait(Traffic::statistics, reductions_);
}

// Lists the elements that this rank updates, in the form that the launchers use.
inline void ZeroState::plan_step() {
    steps_.resize(layout_.units());
    counted_sections_.resize(layout_.units());
    bool first_replica = mesh_.replica().rank() == 0;  // other replicas have the same elements
    for (int unit : layout_.held()) {
        size_t own_begin = owned_begin(unit), own_end = own_begin + part_size(unit);
        for (const SectionPart& part : layout_.section_parts(unit, owned_parts(unit))) {
            OptimizerPart step = {part.at - own_begin,  part.count,      part.first,
                                  name_hash(part.name), part.row->decay, part.section};
            const Multipliers& by = settings_.multipliers[(int)part.row->kind()];
            step.learning_rate = by.learning_rate, step.weight_decay = by.weight_decay;
            if (part.of_block_matrix()) step.rows = (int)part.rows, step.cols = (int)part.row->cols;
            steps_[unit].push_back(step);
            if (part.counts && first_replica)
                counted_sections_[unit].push_back({part.at - own_begin, part.count, part.section});
        }
        if (!first_replica) continue;
        for (auto [range_begin, range_end] : layout_.counted(unit)) {
            size_t begin = std::max(range_begin, own_begin), end = std::min(range_end, own_end);
            if (begin >= end) continue;
            counted_.push_back({owned_grads(unit) - arrays_.grads + (begin - own_begin), end - begin});
        }
    }
}

// Sums the gradients of replicated parameters over all ranks that have copies of them.
inline void ZeroState::sum_copies() {
    auto sum_of_tensor_ranks = [&] {
        for (int unit : layout_.held()) {
            size_t own_begin = owned_begin(unit), own_end = own_begin + part_size(unit);
            for (const GradientSum& sum : layout_.sums(unit)) {
                size_t begin = std::max(sum.begin, own_begin), end = std::min(sum.begin + sum.count, own_end);
                if (begin >= end) continue;
                neighbours(mesh_, sum.ranks)
                    .all_reduce(owned_grads(unit) + (begin - own_begin), end - begin, Traffic::gradients,
                                reductions_);
            }
        }
    };
    if (mesh_.tensor().size() > 1) grouped({mesh_.tensor(), mesh_.copies()}, sum_of_tensor_ranks);
    for (int unit : layout_.held()) {
        if (!has_copies(unit)) continue;
        if (has_tied_copy(unit))
            mesh_.embedding_group().all_reduce(owned_grads(unit), part_size(unit), Traffic::gradients,
                                               reductions_);
        if (settings_.offload) copy_gradients_to_host(unit);
    }
}

inline void ZeroState::update(StepStatistics* stats, const Optimizer& optimizer, ClipLimits limits,
                              const std::function<void()>& measured) {
    bool transforms = (bool)optimizer.transform, has_room = settings_.transform_scratch;
    if (optimizer.takes_norms != settings_.takes_norms || transforms != has_room)
        fail("optimizer: its use of norms or matrices differs from the settings of the state");
    LaunchGuard gives;
    sum_copies();
    wait(Traffic::gradients, reductions_);  // the last gradient has been summed
    wait(Traffic::parameters, gathers_);    // gathers have read the parameters
    sum_squares(&stats->squares, arrays_.norm_scratch, arrays_.grads, counted_, compute_);
    if (other_squares_) accumulate(&stats->squares, other_squares_, 1, compute_);
    sum_statistics(stats);
    clip_scale(&stats->norm, &stats->squares, &stats->loss, limits, compute_);
    measured();

    await_copies();
    TraceSpan entry(Operation::optimizer, compute_);
    is_whole_ = false;
    for (Place& place : param_at_) place.unit = -1;  // gathered parameters are stale now
    if (settings_.offload) {
        copy_async(arrays_.host_scale, &stats->scale, 1, compute_);
        order(compute_, host_);
    }
    if (optimizer.prepare) {
        for (int unit : layout_.held()) run_pass(unit, optimizer.prepare, &stats->scale);
    }
    if (optimizer.takes_norms) sum_norms(&stats->scale);
    auto step = [&](const std::vector<int>& units) {
        for (int unit : units) {
            LaunchGuard::tick();
            run_pass(unit, optimizer.step, &stats->scale);
            if (settings_.offload)
                copy_async(owned_params(unit), arrays_.host_params + shard_offset(unit), part_size(unit),
                           host_);
            publish(unit);
        }
    };
    bool visits = optimizer.transform && settings_.offload;
    if (visits) {
        copy_updates(layout_.held(), false);
        order(host_, compute_);
    }
    for (const MatrixRound& round : owners_.rounds()) {
        LaunchGuard::tick();
        owners_.transform_at_owners(
            round, [&](int unit) { return owned_grads(unit); }, &stats->scale, optimizer.transform);
        if (visits) {
            order(compute_, host_);
            copy_updates(round.units, true);
        }
        step(round.units);
    }
    if (!optimizer.transform) step(layout_.held());
    is_whole_ = true;  // the device does all of it or, once something has failed, nothing
}

// Returns the arrays of this rank's part, on the device, or on the host with offload. scale: on the device
inline OptimizerArrays ZeroState::own_arrays(int unit, const float* scale) const {
    size_t at = shard_offset(unit);
    bool offload = settings_.offload;
    OptimizerArrays own = {.params = offload ? arrays_.host_params + at : owned_params(unit),
                           .master = owned_master(unit),
                           .slots = {},
                           .grads = offload ? arrays_.host_grads + at : owned_grads(unit),
                           .scale = offload ? arrays_.host_scale : scale};
    for (size_t i = 0; i < settings_.slots.size(); i++)
        own.slots[i] = arrays_.slots[i] + arrays_.slot_at[i][unit];
    if (settings_.takes_norms) {
        own.weight_squares = offload ? arrays_.host_section_squares : arrays_.section_squares;
        own.update_squares = own.weight_squares + layout_.sections();
    }
    return own;
}

inline void ZeroState::run_pass(int unit, const OptimizerPass& pass, const float* scale) {
    OptimizerArrays own = own_arrays(unit, scale);
    if (settings_.offload && !ledger)
        on_host([=, this] { pass.on_host(own, steps_[unit]); });
    else  // a ledger infers from the arrays where they are stepped
        pass.on_device(own, steps_[unit], settings_.offload ? host_ : compute_);
}

// Copies updates of block matrices between device and host, for all units that have some: with offload, they
// are copied to the device to be transformed.
inline void ZeroState::copy_updates(const std::vector<int>& units, bool to_host) {
    for (int unit : units) {
        if (std::ranges::none_of(steps_[unit], &OptimizerPart::of_block_matrix)) continue;
        float *here = owned_grads(unit), *there = arrays_.host_grads + shard_offset(unit);
        copy_async(to_host ? there : here, to_host ? here : there, part_size(unit), host_);
    }
    if (to_host) gradients_copied_.record(host_);
}

// Sums the squares of weights and updates over all ranks, for each section of the model. Each element counts
// once, and one call sums everything, so ranks that step the same section see the same bits.
inline void ZeroState::sum_norms(const float* scale) {
    size_t sections = layout_.sections(), bytes = 2 * sections * sizeof(float);
    auto sum_own = [this, scale, sections](auto&& sum) {
        for (int unit : layout_.held()) {
            OptimizerArrays own = own_arrays(unit, scale);
            float* squares = (float*)own.weight_squares;
            const std::vector<SquaresRange>& ranges = counted_sections_[unit];
            own.master ? sum(squares, own.master, ranges) : sum(squares, own.params, ranges);
            sum(squares + sections, own.grads, ranges);
        }
    };
    cudaStream_t stream = settings_.offload ? host_ : compute_;
    if (settings_.offload && !ledger) {
        on_host([=, this, scratch_size = arrays_.norm_scratch_floats] {
            std::vector<float> scratch(scratch_size);
            memset(arrays_.host_section_squares, 0, bytes);
            sum_own([&](float* sums, const auto* values, const std::vector<SquaresRange>& ranges) {
                sums_of_squares_on_host(sums, scratch.data(), values, ranges);
            });
        });
        copy_async(arrays_.section_squares, arrays_.host_section_squares, 2 * sections, host_);
    } else {
        zero_async(arrays_.section_squares, 2 * sections, stream);
        sum_own([&](float* sums, const auto* values, const std::vector<SquaresRange>& ranges) {
            sums_of_squares(sums, arrays_.norm_scratch, values, ranges, stream);
        });
    }
    order(stream, reductions_);
    mesh_.world().all_reduce(arrays_.section_squares, 2 * sections, Traffic::statistics, reductions_);
    settings_.offload ? order(reductions_, stream) : wait(Traffic::statistics, reductions_);
    if (settings_.offload)
        copy_async(arrays_.host_section_squares, arrays_.section_squares, 2 * sections, host_);
}

// Sends a unit's new parameters to the ranks that use them, overlapped with the compute stream's next work.
inline void ZeroState::publish(int unit) {
    recorder.at_unit(unit);
    order(settings_.offload ? host_ : compute_, gathers_);
    if (arrays_.cut_params) {  // the first units are gathered while others are stepped
        auto& held = layout_.held();
        auto number = std::find(held.begin(), held.end(), unit) - held.begin();
        if (number <= settings_.prefetch && unit <= layout_.layers) gather_unit(unit);
        return;
    }
    mesh_.gathers().all_gather(params(unit), part_size(unit), Traffic::parameters, gathers_);
    updated_[unit].record(gathers_);
    unawaited_[unit] = true;
}
