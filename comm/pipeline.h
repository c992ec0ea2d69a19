/*
Executes the list of a pipeline stage (comm/pipeline_schedule.h): receives the input of each piece of work,
calls back for the work itself, and sends the result on. It knows nothing of layers.

Messages use buffers in turn:

    inputs      for each chunk, one for each micro-batch that it keeps, and one more, into which the next
                input arrives while the stage works. An input stays until its backward work is done.
    gradients   three: one arrives, one is worked on, one leaves. The work turns the gradient of its output
                into that of its input in place.
    outputs     two: one is made, one leaves.

The host goes through the list without waiting, and each link has a stream of its own (below), so messages
overlap the work, each direction independently:

    forward_in   receive 5 ..|    receive 6 ....|
    backward_in  receive c ........|    receive d ....|
    compute      |  F4  |     B b      |  F5  |     B c
    forward_out         | send 4 ....|        | send 5 ..
    backward_out                       | send b ....|

A receive is enqueued as soon as the last work on its buffer is. Without overlap, the compute stream waits for
each send; because there is always a buffer for what comes next, stages that send to each other still do not
deadlock. Either way, each buffer holds the same values in the same order.

This file has, in order: links and their buffers, pieces of work and their memory, the executor, a run.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "comm/memory.h"             // Arena
#include "comm/mesh.h"               // Communicator, MeshLinks
#include "comm/pipeline_schedule.h"  // PipelineCapacity
#include "comm/recorder.h"           // TraceSpan
#include "data/base/error.h"         // fail
#include "kernels/common.cuh"

// ----------------------------------------------------------------------------
// links
//
// The buffers that a pipeline stage sends from and receives into, used in turn, and the links to its
// neighbors, each with a stream of its own.
//
// The host enqueues work on all streams without waiting, and orders it by events. An event can be waited for
// only once it has been recorded. So the host counts the uses of a buffer whose last work is enqueued, and
// enqueues a receive into the buffer only once its previous use is among them.

struct PipelineBuffer {
    floatX* data;
    Event arrived = {}, free = {};
};

// Buffers that are used one after another. A run counts the uses.
struct PipelineTurns {
    std::vector<PipelineBuffer> places;
    size_t ended = 0;  // uses whose last work is enqueued

    // Takes `count` buffers of `size` elements.
    PipelineTurns(Arena& memory, int count, size_t size) {
        for (int i = 0; i < count; i++) {
            floatX* data = memory.take_elements(size);
            if (!memory.only_counts()) places.push_back({data});
        }
    }
    PipelineBuffer& at(size_t use) { return places[use % places.size()]; }
    bool free_for(size_t use) const { return use < ended + places.size(); }
};

// One end of a link. Has no stream if there is no neighbor.
class PipelineLink {
public:
    PipelineLink(const Communicator& link, const char* name) : link_(link) {
        if (link.size() > 1) stream_ = new_communication_stream(name);
    }
    ~PipelineLink() {
        if (stream_) end_stream(stream_);
    }
    PipelineLink(const PipelineLink&) = delete;
    PipelineLink& operator=(const PipelineLink&) = delete;

protected:
    const Communicator& link_;
    cudaStream_t stream_ = nullptr;
};

class PipelineReceiver : public PipelineLink {
public:
    using PipelineLink::PipelineLink;

    void begin_run(size_t count) {
        count_ = count;
        arrivals_.clear();
        begun_ = taken_ = 0;
    }
    // Adds the next message of the run, and the buffer for it.
    void expect(PipelineTurns& turns, size_t use) { arrivals_.push_back({&turns, use}); }

    // Enqueues all receives whose buffers are free.
    void receive_ahead() {
        while (begun_ < arrivals_.size() && arrivals_[begun_].turns->free_for(arrivals_[begun_].use))
            receive();
    }

    // Makes the compute stream wait for the next message.
    void take(cudaStream_t compute) {
        TraceSpan wait(Traffic::pipeline, compute);
        arrivals_[taken_++].place().arrived.hold(compute);
    }

private:
    struct Arrival {
        PipelineTurns* turns;
        size_t use;
        PipelineBuffer& place() const { return turns->at(use); }
    };

    void receive() {
        PipelineBuffer& place = arrivals_[begun_++].place();
        place.free.hold(stream_);
        link_.receive(place.data, count_, MeshLinks::sender, stream_);
        place.arrived.record(stream_);
    }

    size_t count_ = 0;
    std::vector<Arrival> arrivals_;  // this run's, in order
    size_t begun_ = 0, taken_ = 0;   // how many are enqueued, and how many are taken
};

class PipelineSender : public PipelineLink {
public:
    using PipelineLink::PipelineLink;

    // Sends what the compute stream has written. With overlap, that stream continues; otherwise it waits.
    void send(PipelineBuffer& place, size_t count, cudaStream_t compute, bool overlap) {
        order_.record(compute);
        order_.hold(stream_);
        link_.send(place.data, count, MeshLinks::receiver, Traffic::pipeline, stream_);
        place.free.record(stream_);
        if (!overlap) hold(place, compute);
    }

    // Makes the compute stream wait until the last message from this buffer is sent.
    static void hold(const PipelineBuffer& place, cudaStream_t compute) {
        TraceSpan wait(Traffic::pipeline, compute);
        place.free.hold(compute);
    }

private:
    Event order_;
};

// ----------------------------------------------------------------------------
// pieces of work and their memory

// The buffers of a stage: all device memory that the pipeline itself uses.
struct PipelineArrays {
    std::vector<PipelineTurns> inputs;  // (chunks)
    PipelineTurns gradients, outputs;

    // capacity: what the most demanding list needs. count: the maximum number of elements of a message.
    PipelineArrays(Arena& memory, const PipelineShape& shape, const PipelineCapacity& capacity, int stage,
                   size_t count)
        : inputs(input_places(memory.of("activations"), shape, capacity, stage, count)),
          gradients(memory,
                    !capacity.has_backward ? 0
                    : shape.stages == 1    ? 1
                                           : 3,
                    count),
          outputs(memory, sends(shape, stage) ? 2 : 0, count) {}

private:
    static bool sends(const PipelineShape& shape, int stage) {
        return shape.stages > 1 && (stage < shape.stages - 1 || shape.chunks > 1);
    }
    static std::vector<PipelineTurns> input_places(Arena& memory, const PipelineShape& shape,
                                                   const PipelineCapacity& capacity, int stage,
                                                   size_t count) {
        std::vector<PipelineTurns> inputs;
        for (int chunk = 0; chunk < shape.chunks; chunk++) {
            bool receives_ahead = chunk + stage > 0;  // the first part receives nothing
            inputs.emplace_back(memory, capacity.kept[chunk] + receives_ahead, count);
        }
        return inputs;
    }
};

// Returns the recorder's name for a piece of work.
constexpr Operation recorded_as(PipelineWork work) {
    switch (work) {
    case PipelineWork::forward:
        return Operation::forward;
    case PipelineWork::backward:
        return Operation::backward;
    case PipelineWork::input_gradient:
        return Operation::input_gradient;
    case PipelineWork::weight_gradient:
        return Operation::weight_gradient;
    }
    __builtin_unreachable();
}

class Pipeline {
public:
    // capacity and count: as for PipelineArrays. The memory must outlive the pipeline.
    Pipeline(Arena& memory, const Mesh& mesh, const PipelineShape& shape, const PipelineCapacity& capacity,
             size_t count, cudaStream_t compute, bool overlap);
    ~Pipeline();
    Pipeline(const Pipeline&) = delete;
    Pipeline& operator=(const Pipeline&) = delete;

    // For all stages: executes the lists of one schedule. work(const PipelineTask&) enqueues a piece of work
    // on the compute stream. Returns when everything is enqueued; the next run can follow at once. The
    // micro-batches of a chunk go forward in order, and backward in the same order.
    template <typename Work>
    void run(const std::vector<PipelineAction>& list, size_t count, Work&& work) {
        begin_run(list, count);
        for (const PipelineAction& action : list) {
            forward_in_.receive_ahead();
            backward_in_.receive_ahead();
            recorder.at_micro_batch(action.micro_batch, action.chunk);
            if (ledger) ledger->begin_task((int)action.work, action.micro_batch);
            const PipelineTask task = enter(action);
            {
                TraceSpan pass(recorded_as(action.work), compute_);
                work(task);
            }
            leave(task);
        }
    }

private:
    int part(int chunk) const { return chunk * shape_.stages + stage_; }
    bool is_last(int part) const { return part == shape_.stages * shape_.chunks - 1; }
    bool has_before(int chunk) const { return shape_.stages > 1 && part(chunk) > 0; }
    bool has_behind(int chunk) const { return shape_.stages > 1 && !is_last(part(chunk)); }

    void begin_run(const std::vector<PipelineAction>& list, size_t count);
    PipelineTask enter(const PipelineAction& action);
    void leave(const PipelineTask& task);

    const PipelineShape shape_;
    const PipelineCapacity capacity_;
    const int stage_;
    const size_t most_;  // elements
    const bool overlap_;
    cudaStream_t compute_;

    PipelineArrays arrays_;
    PipelineReceiver forward_in_, backward_in_;
    PipelineSender forward_out_, backward_out_;

    // the current run
    size_t count_ = 0;
    bool has_backward_ = false;
};

// ----------------------------------------------------------------------------
// the executor

// Fails if the shapes do not match, before any memory is taken.
inline const PipelineShape& checked_pipeline(const Mesh& mesh, const PipelineShape& shape,
                                             const PipelineCapacity& capacity) {
    check_pipeline(shape);
    if (shape.stages != mesh.shape.pp || (int)capacity.kept.size() != shape.chunks)
        fail("pipeline: %d stages of %d chunks; mesh of %d stages, capacity for %zu chunks; make them agree",
             shape.stages, shape.chunks, mesh.shape.pp, capacity.kept.size());
    if (shape.stages > 1 && shape.chunks > 1 && !mesh.shape.ring)
        fail("pipeline: %d chunks on a stage need a link from the last stage to the first, which the mesh "
             "lacks; make it with MeshShape::ring",
             shape.chunks);
    return shape;
}

inline Pipeline::Pipeline(Arena& memory, const Mesh& mesh, const PipelineShape& shape,
                          const PipelineCapacity& capacity, size_t count, cudaStream_t compute, bool overlap)
    : shape_(checked_pipeline(mesh, shape, capacity)),
      capacity_(capacity),
      stage_(mesh.position[Axis::pipeline]),
      most_(count),
      overlap_(overlap),
      compute_(compute),
      arrays_(memory, shape, capacity, stage_, count),
      forward_in_(mesh.links().forward_in, "forward in"),
      backward_in_(mesh.links().backward_in, "backward in"),
      forward_out_(mesh.links().forward_out, "forward out"),
      backward_out_(mesh.links().backward_out, "backward out") {}

// Each link's destructor waits for its own stream.
inline Pipeline::~Pipeline() {
    drain(compute_);
}

// ----------------------------------------------------------------------------
// a run

inline void Pipeline::begin_run(const std::vector<PipelineAction>& list, size_t count) {
    PipelineCapacity need = pipeline_capacity(list, shape_.chunks);
    if (count > most_ || !capacity_.holds(need))
        fail("pipeline: a list of %zu actions on %zu elements needs more room than was allocated; make the "
             "pipeline with the capacity of its largest list",
             list.size(), count);
    count_ = count;
    has_backward_ = need.has_backward;

    for (PipelineTurns& turns : arrays_.inputs) turns.ended = 0;
    arrays_.gradients.ended = arrays_.outputs.ended = 0;
    forward_in_.begin_run(count);
    backward_in_.begin_run(count);
    size_t gradient = 0;
    for (auto [work, micro_batch, chunk] : list) {
        if (work == PipelineWork::forward) {
            if (has_before(chunk)) forward_in_.expect(arrays_.inputs[chunk], (size_t)micro_batch);
        } else if (work != PipelineWork::weight_gradient) {
            if (has_behind(chunk)) backward_in_.expect(arrays_.gradients, gradient);
            gradient++;
        }
    }
}

// Returns a piece of work and its buffers, and makes the compute stream wait until these are ready.
inline PipelineTask Pipeline::enter(const PipelineAction& action) {
    auto [work, micro_batch, chunk] = action;
    PipelineTask task = {.work = work,
                         .micro_batch = micro_batch,
                         .chunk = chunk,
                         .part = part(chunk),
                         .slot = micro_batch % capacity_.kept[chunk],
                         .pending_slot = micro_batch % std::max(1, capacity_.pending[chunk]),
                         .batch_slot = micro_batch % capacity_.micro_batches,
                         .input = arrays_.inputs[chunk].at((size_t)micro_batch).data,
                         .output = nullptr,
                         .gradient = nullptr};
    if (work == PipelineWork::forward) {
        if (has_before(chunk)) forward_in_.take(compute_);
        if (has_behind(chunk)) {
            PipelineBuffer& place = arrays_.outputs.at(arrays_.outputs.ended);
            PipelineSender::hold(place, compute_);
            task.output = place.data;
        } else if (!is_last(task.part)) {
            task.output = arrays_.inputs[chunk + 1].at((size_t)micro_batch).data;
        }
    } else if (work != PipelineWork::weight_gradient) {
        PipelineBuffer& place = arrays_.gradients.at(arrays_.gradients.ended);
        if (has_behind(chunk))
            backward_in_.take(compute_);
        else if (shape_.stages > 1)
            PipelineSender::hold(place, compute_);
        task.gradient = place.data;
    }
    return task;
}

inline void Pipeline::leave(const PipelineTask& task) {
    bool forward = task.work == PipelineWork::forward;
    if (forward && has_behind(task.chunk))
        forward_out_.send(arrays_.outputs.at(arrays_.outputs.ended++), count_, compute_, overlap_);
    if (task.gradient) {
        PipelineBuffer& place = arrays_.gradients.at(arrays_.gradients.ended++);
        if (has_before(task.chunk))
            backward_out_.send(place, count_, compute_, overlap_);
        else
            place.free.record(compute_);
    }
    bool ends = forward ? !has_backward_ : task.work != PipelineWork::input_gradient;
    if (ends) {
        arrays_.inputs[task.chunk].at((size_t)task.micro_batch).free.record(compute_);
        arrays_.inputs[task.chunk].ended++;
    }
}
