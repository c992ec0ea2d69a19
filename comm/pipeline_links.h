/*
What a pipeline stage sends from and receives into: buffers that are used in turn, and the links to its
neighbours, each with a stream of its own.

The host gives all streams their work without waiting, and orders them by events. An event can be waited for
only when it was recorded; so the host counts how often a buffer was given its last work, and nothing is
received into it before.
*/
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "comm/mesh.h"  // Communicator, MeshLinks
#include "kernels/common.cuh"

// An event that has no time.
class PipelineEvent {
public:
    PipelineEvent() { cudaCheck(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
    ~PipelineEvent() {
        if (event_) cudaEventDestroy(event_);
    }
    PipelineEvent(PipelineEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
    PipelineEvent& operator=(PipelineEvent&&) = delete;

    void record(cudaStream_t stream) { cudaCheck(cudaEventRecord(event_, stream)); }
    // The stream waits until what was recorded last has come.
    void hold(cudaStream_t stream) const { cudaCheck(cudaStreamWaitEvent(stream, event_, 0)); }

private:
    cudaEvent_t event_ = nullptr;
};

struct PipelinePlace {
    floatX* data;
    PipelineEvent arrived = {}, free = {};
};

// Places that are used one after another. A run counts the uses.
struct PipelineTurns {
    std::vector<PipelinePlace> places;
    size_t ended = 0;  // uses whose last work is on its stream

    // Takes `count` places of `size` elements from `memory`.
    PipelineTurns(int count, size_t size, floatX*& memory) {
        for (int i = 0; i < count; i++, memory += size) places.push_back({memory});
    }
    PipelinePlace& at(size_t use) { return places[use % places.size()]; }
    bool free_for(size_t use) const { return use < ended + places.size(); }
};

// One end of a link, or of none.
class PipelineLink {
public:
    explicit PipelineLink(const Communicator& link) : link_(link) {
        if (link.size() > 1) stream_ = new_communication_stream();
    }
    ~PipelineLink() {
        if (!stream_) return;
        cudaStreamSynchronize(stream_);
        cudaStreamDestroy(stream_);
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
    // The next one in the run, and where it goes.
    void expect(PipelineTurns& turns, size_t use) { arrivals_.push_back({&turns, use}); }

    // Receives what there is a place for.
    void receive_ahead() {
        while (begun_ < arrivals_.size() && arrivals_[begun_].turns->free_for(arrivals_[begun_].use))
            receive();
    }

    // The compute stream waits for the next one.
    void take(cudaStream_t compute) { arrivals_[taken_++].place().arrived.hold(compute); }

private:
    struct Arrival {
        PipelineTurns* turns;
        size_t use;
        PipelinePlace& place() const { return turns->at(use); }
    };

    void receive() {
        PipelinePlace& place = arrivals_[begun_++].place();
        place.free.hold(stream_);
        link_.receive(place.data, count_, MeshLinks::sender, stream_);
        place.arrived.record(stream_);
    }

    size_t count_ = 0;
    std::vector<Arrival> arrivals_;  // of the run, in order
    size_t begun_ = 0, taken_ = 0;   // of them
};

class PipelineSender : public PipelineLink {
public:
    using PipelineLink::PipelineLink;

    // Sends what the compute stream has made; that goes on meanwhile, or waits until it is sent.
    void send(PipelinePlace& place, size_t count, cudaStream_t compute, bool overlap) {
        order_.record(compute);
        order_.hold(stream_);
        link_.send(place.data, count, MeshLinks::receiver, Traffic::pipeline, stream_);
        place.free.record(stream_);
        if (!overlap) place.free.hold(compute);
    }

private:
    PipelineEvent order_;
};
