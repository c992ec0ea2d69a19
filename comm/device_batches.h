/*
Micro-batches on the device. While the device works on one, the host has the next one ready: a BatchSource
reads it ahead, and two blocks of pinned memory take turns, so that no copy waits for another.
*/
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "comm/memory.h"               // allocate
#include "comm/mesh.h"                 // Mesh
#include "comm/watch.h"                // wait_for
#include "data/tokens/batch_reader.h"  // BatchSource, HostBatch
#include "data/base/error.h"           // note_trouble

// One micro-batch on the device.
struct Batch {
    int B, T;
    const int* tokens = nullptr;        // (B, T)
    const int* targets = nullptr;       // (B, T) -1: no loss here
    const int* by_token = nullptr;      // (B*T) places sorted by their token
    const int* by_position = nullptr;   // (B*T) places sorted by their position in the document
    const int* doc_start = nullptr;     // (B, T) where each position's document begins; null: at 0
    const int* counted_from = nullptr;  // (B, T) where each position is counted from; null: 0
    int past = 0;                       // tokens before the first, which are in the key/value cache
    int row = 0;                        // of the cache, for the first sequence
};

// Brings micro-batches to the device. While the device works on one, the host prepares the next. What cannot
// be read is written to `trouble`, and the batch has no targets: one rank alone cannot leave a step.
class Batches {
public:
    // reset_positions: positions are counted from the beginning of each document. slots: batches that are on
    // the device at the same time.
    Batches(std::unique_ptr<BatchSource> source, bool reset_positions, cudaStream_t stream, const Mesh& mesh,
            std::string& trouble, int slots = 1)
        : source_(std::move(source)),
          reset_positions_(reset_positions),
          stream_(stream),
          mesh_(mesh),
          trouble_(trouble),
          size_(batch_ints(source_->shape().B, source_->shape().T)) {
        allocate(device_, size_ * slots);
        for (Slot& slot : slots_) {
            cudaCheck(cudaMallocHost((void**)&slot.host, size_ * sizeof(int)));
            cudaCheck(cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming));
        }
    }

    ~Batches() {
        cudaStreamSynchronize(stream_);
        cudaFree(device_);
        for (Slot& slot : slots_) {
            cudaFreeHost(slot.host);
            cudaEventDestroy(slot.copied);
        }
    }

    Batches(const Batches&) = delete;
    Batches& operator=(const Batches&) = delete;

    // Samples first, first + 1, ... in the order of the run; rows from `count` on have no targets. On the
    // device they take the place of what was loaded to this slot.
    Batch load(uint64_t first, int count, int slot_on_device = 0) {
        int* device = device_ + slot_on_device * size_;
        Slot& slot = slots_[next_++ % 2];
        wait_for(slot.copied, mesh_);  // its memory is free once the last copy from it is over
        const HostBatch* batch = nullptr;
        note_trouble(trouble_, [&] { batch = &source_->load(first, count); });
        if (!batch) batch = &source_->load(first, 0);
        std::copy_n(batch->tokens, size_, slot.host);  // the other arrays are behind it
        auto [B, T, document_end] = source_->shape();
        size_t N = (size_t)B * T;
        cudaCheck(cudaMemcpyAsync(device, slot.host, size_ * sizeof(int), cudaMemcpyHostToDevice, stream_));
        cudaCheck(cudaEventRecord(slot.copied, stream_));
        const int* documents = document_end >= 0 ? device + 2 * N : nullptr;
        return {.B = B,
                .T = T,
                .tokens = device,
                .targets = device + N,
                .by_token = device + 3 * N,
                .by_position = device + 4 * N,
                .doc_start = documents,
                .counted_from = reset_positions_ ? documents : nullptr};
    }

private:
    struct Slot {
        int* host;
        cudaEvent_t copied;
    };

    std::unique_ptr<BatchSource> source_;
    const bool reset_positions_;
    cudaStream_t stream_;
    const Mesh& mesh_;
    std::string& trouble_;
    const size_t size_;  // ints
    int* device_;
    Slot slots_[2];
    size_t next_ = 0;
};
