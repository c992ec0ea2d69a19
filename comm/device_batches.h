/*
Micro-batches on the device. While the device works on one, the host has the next one ready: a BatchSource
reads it ahead, and two blocks of pinned memory take turns, so that no copy waits for another.
*/
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "comm/memory.h"               // DeviceArray, HostArray
#include "comm/mesh.h"                 // Mesh
#include "comm/recorder.h"             // RecordedOnHost
#include "comm/watch.h"                // Event
#include "data/tokens/batch_reader.h"  // BatchSource, BatchArrays
#include "data/base/deadlines.h"       // WorksOn
#include "data/base/error.h"           // note_error

// One micro-batch on the device.
struct Batch : BatchArrays<const int> {
    int B, T;
    int past = 0;  // tokens before the first, which are in the key/value cache
    int row = 0;   // row of the cache for the first sequence
    int last = 0;  // token of each sequence, from 0, behind which there may be padding
};

// A batch of the host that was copied to `memory` on the device.
inline Batch batch_on_device(const int* memory, const HostBatch& host, int B, int T) {
    Batch batch = {batch_at(memory, B, T), B, T};
    if (!host.doc_start) batch.doc_start = nullptr;
    return batch;
}

// Brings micro-batches to the device. While the device works on one, the host prepares the next. What cannot
// be read is written to `error`, and the batch has no targets: one rank alone cannot leave a step.
class DeviceBatches {
public:
    // slots: batches that are on the device at the same time.
    DeviceBatches(std::unique_ptr<BatchSource> source, cudaStream_t stream, const Mesh& mesh,
                  NotedError& error, int slots = 1)
        : source_(std::move(source)),
          stream_(stream),
          mesh_(mesh),
          error_(error),
          size_(batch_ints(source_->shape().B, source_->shape().T)),
          device_(size_ * slots),
          empty_(size_) {
        write_empty_batch(source_->shape(), empty_.data);
    }

    ~DeviceBatches() { cudaStreamSynchronize(stream_); }  // it may copy from the slots

    // Bytes of the host's memory that a rank takes for batches of this size: what they are read into, which
    // is shared memory where one process reads for a machine, and the pinned blocks that they are copied
    // from.
    static size_t host_bytes(int B, int T) {
        return (BatchSource::blocks + pinned_slots + 1) * batch_ints(B, T) * sizeof(int);
    }

    // Samples first, first + 1, ... in the order of the run; rows from `count` on have no targets. On the
    // device they take the place of what was loaded to this slot. next: the sample to read ahead from. A
    // batch of no rows leaves alone what is read ahead.
    Batch load(uint64_t first, int count, int slot_on_device = 0, std::optional<uint64_t> next = {}) {
        int* device = device_.data + slot_on_device * size_;
        if (count == 0) return copy(empty_.data, device);
        Slot& slot = slots_[next_++ % pinned_slots];
        slot.copied.wait(mesh_);  // its memory is free once the last copy from it is over
        const HostBatch* batch = nullptr;
        note_error(error_, [&] {
            WorksOn work("reading the next micro-batch");
            RecordedOnHost wait(Operation::data);
            batch = &source_->load(first, count, next);
        });
        if (!batch) return copy(empty_.data, device);
        std::copy_n(batch->tokens, size_, slot.host.data);  // the other arrays are behind it
        Batch copied = copy(slot.host.data, device);
        slot.copied.record(stream_);
        return copied;
    }

private:
    Batch copy(const int* host, int* device) {
        cudaCheck(cudaMemcpyAsync(device, host, size_ * sizeof(int), cudaMemcpyHostToDevice, stream_));
        const BatchShape& shape = source_->shape();
        return batch_on_device(device, host_batch(host, shape), shape.B, shape.T);
    }

    struct Slot {
        HostArray<int> host;
        Event copied;
        explicit Slot(size_t size) : host(size) {}
    };

    std::unique_ptr<BatchSource> source_;
    cudaStream_t stream_;
    const Mesh& mesh_;
    NotedError& error_;
    const size_t size_;  // ints
    DeviceArray<int> device_;
    HostArray<int> empty_;  // a batch of no rows
    static constexpr int pinned_slots = 2;
    Slot slots_[pinned_slots] = {Slot(size_), Slot(size_)};
    size_t next_ = 0;
};
