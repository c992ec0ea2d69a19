/*
Tensor parallelism with the rows between its products cut as well (Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022). The ranks of a tensor group share each product. What lies
between products, sums of the residual stream and norms, works row by row: there each rank has rows of its
own. So a block gathers rows before a product that is cut by columns, and scatters the sum over the ranks
after one that is cut by rows.

The N rows are taken as chunks, each cut evenly over the ranks, and the own rows of a rank lie one after
another. 12 rows in 2 chunks over 3 ranks:

    row          0  1 |  2  3 |  4  5 ||  6  7 |  8  9 | 10 11
    rank           0  |   1   |   2   ||   0   |   1   |   2         own rows of rank 1:  2 3 8 9

While one chunk is on its way, the product works on another. Communication has a stream of its own for that;
without overlap it is put on the compute stream: the same calls, so the same bits.
*/
#pragma once

#include <vector>

#include "comm/collectives.h"  // Communicator
#include "data/base/error.h"

class SequenceShards {
public:
    // A group of one: nothing is cut, and nothing sent.
    SequenceShards() = default;

    // For all ranks of the group.
    SequenceShards(const Communicator& group, int chunks, bool overlap, cudaStream_t compute)
        : group_(group), compute_(compute), sends_(compute) {
        if (chunks < 1) fail("sequence shards: %d chunks; 1 is the least", chunks);
        if (ranks() == 1) return;
        chunks_ = chunks;
        if (!overlap) return;
        sends_ = new_communication_stream();
        events_.resize((size_t)chunks + 2);
        for (cudaEvent_t& event : events_) {
            cudaCheck(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        }
    }

    ~SequenceShards() {
        if (!overlaps()) return;
        cudaStreamSynchronize(sends_);
        cudaStreamDestroy(sends_);
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
    }

    SequenceShards(const SequenceShards&) = delete;
    SequenceShards& operator=(const SequenceShards&) = delete;

    int ranks() const { return group_.size(); }
    int rank() const { return group_.rank(); }
    int chunks() const { return chunks_; }

    // Of this many rows. Fails if they cannot be cut evenly.
    int own_rows(int rows) const {
        if (rows % ranks()) {
            fail("sequence shards: %d rows cannot be cut evenly for %d ranks; choose other values of "
                 "--micro-batch or --sequence-length",
                 rows, ranks());
        }
        return rows / ranks();
    }

    // The own rows of all ranks come together in `all` (rows, width), chunk after chunk. work(first, count)
    // puts on the compute stream what reads rows [first, first + count) of `all`, while the next chunks are
    // on their way. `own` (own rows, width) stays as it is until all work has been put there. In a group of
    // one, own is all, and the work is work(0, rows).
    template <typename Work>
    void gather(const floatX* own, floatX* all, int rows, int width, Work&& work) {
        if (ranks() == 1) return work_alone(own, all, rows, work);
        int chunks = chunks_of(rows), count = rows / chunks;
        size_t part = (size_t)(own_rows(rows) / chunks) * (size_t)width;
        send_after_work();
        for (int chunk = 0; chunk < chunks; chunk++) {
            group_.all_gather(own + chunk * part, all + chunk * part * ranks(), part, Traffic::activations,
                              sends_);
            record(sends_, 1 + chunk);
        }
        for (int chunk = 0; chunk < chunks; chunk++) {
            wait_for_event(compute_, 1 + chunk);
            work(chunk * count, count);
        }
    }

    // work(first, count) puts on the compute stream what writes rows [first, first + count) of `all` (rows,
    // width), while the chunk before is on its way. The sum over the ranks of the own rows goes to `own` (own
    // rows, width). The compute stream can go on with other work, but may read or write `own`, and write
    // `all`, only after wait(). In a group of one, own is all, and the work is work(0, rows).
    template <typename Work>
    void scatter(floatX* own, floatX* all, int rows, int width, Work&& work) {
        if (ranks() == 1) return work_alone(own, all, rows, work);
        int chunks = chunks_of(rows), count = rows / chunks;
        size_t part = (size_t)(own_rows(rows) / chunks) * (size_t)width;
        wait();
        for (int chunk = 0; chunk < chunks; chunk++) {
            work(chunk * count, count);
            send_after_work();
            group_.reduce_scatter((const floatX*)all + chunk * part * ranks(), own + chunk * part, part,
                                  Traffic::activations, sends_);
        }
        record(sends_, scattered());
    }

    // Both without work to put behind or before them, and done for the compute stream's next work.
    void gather(const floatX* own, floatX* all, int rows, int width) {
        gather(own, all, rows, width, [](int, int) {});
    }
    void scatter(floatX* own, floatX* all, int rows, int width) {
        scatter(own, all, rows, width, [](int, int) {});
        wait();
    }

    // data (ranks * part): each rank's part of some numbers, to all of them.
    template <typename T>
    void exchange(T* data, size_t part) {
        send_after_work();
        group_.all_gather(data, part, Traffic::statistics, sends_);
        record(sends_, scattered());
        wait();
    }

    // The compute stream waits for what the last scatter sends. The next gather or scatter does so too.
    void wait() { wait_for_event(compute_, scattered()); }

private:
    bool overlaps() const { return sends_ != compute_; }

    // Rows that do not make so many chunks, as those of a short sample, travel as one.
    int chunks_of(int rows) const { return rows % (ranks() * chunks_) ? 1 : chunks_; }

    template <typename Work>
    static void work_alone(const floatX* own, const floatX* all, int rows, Work&& work) {
        if (own != all) fail("sequence shards: of a group of one, the own rows are all rows");
        work(0, rows);
    }

    // Events: of work of the compute stream that sends wait for, of each chunk, and of the last scatter.
    // What is on one stream only is in order anyway.
    size_t scattered() const { return (size_t)chunks_ + 1; }
    void record(cudaStream_t stream, size_t event) {
        if (overlaps()) cudaCheck(cudaEventRecord(events_[event], stream));
    }
    void wait_for_event(cudaStream_t stream, size_t event) {
        if (overlaps()) cudaCheck(cudaStreamWaitEvent(stream, events_[event], 0));
    }

    // What is sent from now on comes after all that is on the compute stream by now.
    void send_after_work() {
        record(compute_, 0);
        wait_for_event(sends_, 0);
    }

    Communicator group_;
    int chunks_ = 1;
    cudaStream_t compute_ = nullptr, sends_ = nullptr;  // the same without overlap
    std::vector<cudaEvent_t> events_;
};
