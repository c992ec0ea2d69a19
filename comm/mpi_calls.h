/*
How MPI is called: by many threads, one at a time, and without ever waiting inside MPI.

MPI's own waits spin, and spin while they hold the library. Here every call is made under one mutex
(MPI_THREAD_SERIALIZED is enough), and a wait is a test under the mutex with sleep outside it. So the threads of a
process wait for different messages at the same time, and a process that waits costs no core.
*/
#pragma once

#ifndef WITHOUT_MPI

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mpi.h>
#include <mutex>
#include <sched.h>
#include <string>
#include <thread>

#include "data/error.h"

// ----------------------------------------------------------------------------
// calls

// Held during every MPI call of every thread.
inline std::mutex mpi_mutex;

// What MPI says of an error. The caller holds mpi_mutex.
inline std::string mpi_error_text(int code) {
    char words[MPI_MAX_ERROR_STRING] = "unknown error";
    int length = 0;
    MPI_Error_string(code, words, &length);
    return words;
}

template <typename Call>
void mpi_check(Call&& call, const char* name, const char* file, int line) {
    std::lock_guard lock(mpi_mutex);
    int code = call();
    if (code != MPI_SUCCESS)
        fail("MPI: %s failed: %s (%s:%d)", name, mpi_error_text(code).c_str(), file, line);
}

// Makes the call under the mutex and throws Error if it fails (where the communicator returns errors). A call that
// waits for other ranks keeps all threads of this one out of MPI meanwhile: start it without waiting, and mpi_wait.
#define mpiCheck(call) mpi_check([&] { return call; }, #call, __FILE__, __LINE__)

// ----------------------------------------------------------------------------
// waiting

using Clock = std::chrono::steady_clock;

// Waits between two looks at something: at first a few yields, then sleeps that grow with the time waited. What is
// waited for is noticed late by an eighth of a short wait, and a hundredth of a long one, which then costs nothing.
class Patience {
public:
    // Returns after a while, but not later than `until`.
    void wait(Clock::time_point until = Clock::time_point::max()) {
        if (looks_++ < yields) {
            sched_yield();
            return;
        }
        auto now = Clock::now();
        if (looks_ == yields + 1) since_ = now;
        Clock::duration waited = now - since_, nap = waited / 8;
        if (nap > short_nap) nap = std::clamp<Clock::duration>(waited / 100, short_nap, longest_nap);
        std::this_thread::sleep_until(std::min(until, now + nap));
    }

    void reset() { looks_ = 0; }

private:
    static constexpr int yields = 8;
    static constexpr std::chrono::microseconds short_nap{100}, longest_nap{1000};
    int looks_ = 0;
    Clock::time_point since_;
};

// Waits until all requests are complete. Returns false, with requests left as they are, if give_up() said so before.
// Throws Error if MPI reports one.
inline bool mpi_wait(MPI_Request* requests, int count, const std::function<bool()>& give_up = {}) {
    Patience patience;
    for (;;) {
        int done = 0;
        mpiCheck(MPI_Testall(count, requests, &done, MPI_STATUSES_IGNORE));
        if (done) return true;
        if (give_up && give_up()) return false;
        patience.wait();
    }
}

// ----------------------------------------------------------------------------
// the link

// Messages leave as over one full-duplex link of a given speed, shared by all threads of the process.
class HostLink {
public:
    // 0: as fast as they go.
    void set_speed(double gigabytes_per_second) {
        std::lock_guard lock(mutex_);
        speed_ = gigabytes_per_second;
        free_at_ = {};
    }

    // When the last byte of a message that is ready now has left.
    Clock::time_point book(size_t bytes) {
        std::lock_guard lock(mutex_);
        if (speed_ <= 0) return {};
        auto duration = std::chrono::duration<double, std::nano>((double)bytes / speed_);
        free_at_ = std::max(free_at_, Clock::now()) + std::chrono::ceil<Clock::duration>(duration);
        return free_at_;
    }

    std::atomic<uint64_t> bytes_sent = 0;

private:
    std::mutex mutex_;
    double speed_ = 0;  // bytes per nanosecond
    Clock::time_point free_at_;
};
inline HostLink host_link;

// ----------------------------------------------------------------------------
// rows of messages

struct Piece {
    char* data;
    size_t bytes;  // less than 2^31
};

// A row of messages to one rank and a row of messages from one, sent and received in order with some of each under
// way. What they are, and what is done with one that has arrived, says the derived class. Both ends know the sizes;
// a message of no bytes is not sent.
class MessageFlow {
public:
    static constexpr size_t most_under_way = 4;

    virtual ~MessageFlow() = default;

    // Does what can be done without waiting, and says whether it did something. Throws Error if MPI reports one.
    bool advance() {
        bool any = false;
        while (!done() && advance_once()) any = true;
        return any;
    }

    bool done() const { return arrived_ == receives && sent_ == sends; }

    // Before then there is nothing to send.
    Clock::time_point next_send() const {
        return posted_sends_ < booked_ ? due_[posted_sends_ % most_under_way] : Clock::time_point::max();
    }

    // Forgets the messages under way. Their memory must last until the communicator is gone.
    void abandon() {
        std::lock_guard lock(mpi_mutex);
        for (auto* requests : {&send_requests_, &receive_requests_}) {
            for (MPI_Request& request : *requests) {
                if (request == MPI_REQUEST_NULL) continue;
                if (requests == &receive_requests_) MPI_Cancel(&request);
                MPI_Request_free(&request);
            }
        }
    }

protected:
    MessageFlow(MPI_Comm comm, int tag, int to, int from) : comm_(comm), tag_(tag), to_(to), from_(from) {
        send_requests_.fill(MPI_REQUEST_NULL);
        receive_requests_.fill(MPI_REQUEST_NULL);
    }

    virtual Piece outgoing(size_t index) = 0;
    virtual Piece incoming(size_t index) = 0;
    virtual void arrived(size_t) {}

    size_t sends = 0, receives = 0;     // messages in all
    size_t under_way = most_under_way;  // sent but not gone, or expected but not here: at most
    size_t lead = 0;                    // message i can be sent when message i - lead has arrived

private:
    // A message is expected only when the one `under_way` before it has been sent. So memory that was sent from can be
    // received into `under_way` messages later, and still no ring of ranks waits for itself: each waits for an earlier
    // message.
    bool advance_once() {
        size_t receives_before = posted_receives_, sends_before = posted_sends_, sent_before = sent_;
        bool here = false;
        {
            std::lock_guard lock(mpi_mutex);
            while (posted_receives_ < receives && posted_receives_ < arrived_ + under_way &&
                   (sends == 0 || posted_receives_ < sent_ + under_way)) {
                Piece piece = incoming(posted_receives_);
                MPI_Request& request = receive_requests_[posted_receives_++ % most_under_way];
                if (piece.bytes)
                    check(MPI_Irecv(piece.data, (int)piece.bytes, MPI_BYTE, from_, tag_, comm_, &request));
            }
            while (booked_ < sends && booked_ < sent_ + under_way &&
                   (receives == 0 || booked_ < arrived_ + lead)) {
                due_[booked_ % most_under_way] = host_link.book(outgoing(booked_).bytes);
                booked_++;
            }
            while (posted_sends_ < booked_ && is_due(due_[posted_sends_ % most_under_way])) {
                Piece piece = outgoing(posted_sends_);
                MPI_Request& request = send_requests_[posted_sends_++ % most_under_way];
                if (piece.bytes) {
                    check(MPI_Isend(piece.data, (int)piece.bytes, MPI_BYTE, to_, tag_, comm_, &request));
                    host_link.bytes_sent += piece.bytes;
                }
            }
            while (sent_ < posted_sends_ && complete(send_requests_[sent_ % most_under_way])) sent_++;
            if (arrived_ < posted_receives_) here = complete(receive_requests_[arrived_ % most_under_way]);
        }
        if (here) arrived(arrived_++);
        return here || receives_before != posted_receives_ || sends_before != posted_sends_ ||
               sent_before != sent_;
    }

    static bool is_due(Clock::time_point due) { return due == Clock::time_point() || due <= Clock::now(); }

    static bool complete(MPI_Request& request) {
        int flag = 0;
        check(MPI_Test(&request, &flag, MPI_STATUS_IGNORE));
        return flag;
    }

    static void check(int code) {
        if (code != MPI_SUCCESS) fail("MPI: a message failed: %s", mpi_error_text(code).c_str());
    }

    MPI_Comm comm_;
    int tag_, to_, from_;
    std::array<MPI_Request, most_under_way> send_requests_, receive_requests_;
    std::array<Clock::time_point, most_under_way> due_;
    size_t booked_ = 0, posted_sends_ = 0, sent_ = 0, posted_receives_ = 0, arrived_ = 0;
};

constexpr size_t largest_piece = size_t(1) << 19;  // half of a core's second-level cache, or less

// A buffer passed along a chain of ranks: received from one (none: -1), sent on to another (none: -1).
class ChainFlow : public MessageFlow {
public:
    ChainFlow(MPI_Comm comm, int tag, char* data, size_t bytes, int from, int to)
        : MessageFlow(comm, tag, to, from), data_(data), bytes_(bytes) {
        size_t pieces = (bytes + largest_piece - 1) / largest_piece;
        sends = to < 0 ? 0 : pieces;
        receives = from < 0 ? 0 : pieces;
    }

private:
    Piece incoming(size_t index) override {
        size_t at = index * largest_piece;
        return {data_ + at, std::min(largest_piece, bytes_ - at)};
    }
    Piece outgoing(size_t index) override { return incoming(index); }

    char* data_;
    size_t bytes_;
};

// out = a + b, say, for `count` elements.
using Combine = void (*)(char* out, const char* a, const char* b, size_t count);

// Chunk c of a buffer of `count` elements, cut for `ranks`: elements [chunk_begin(c), chunk_begin(c + 1)).
constexpr size_t chunk_begin(size_t count, int ranks, int c) {
    return count / (size_t)ranks * (size_t)c + std::min(count % (size_t)ranks, (size_t)c);
}

enum class RingPass { reduce_scatter, all_gather, both };

// A buffer of one chunk for each rank goes around the ring, chunk by chunk; in the pass that reduces, each rank adds
// its own input. The chunks are cut into blocks of up to `under_way` pieces, and each block goes all the way before
// the next: so a block is still in the cache when it is sent on.
class RingFlow : public MessageFlow {
public:
    struct Buffers {
        const char* input;  // all chunks (of all_gather: unused, the own chunk is in `result`)
        char* result;       // all chunks (of reduce_scatter: the own chunk)
        char* scratch;      // scratch_bytes, unless all_gather
        size_t count, element_bytes;
        Combine combine;
    };
    static constexpr size_t slots = 2 * most_under_way, scratch_bytes = slots * largest_piece;

    RingFlow(MPI_Comm comm, int tag, int rank, int ranks, RingPass pass, const Buffers& buffers)
        : MessageFlow(comm, tag, (rank + 1) % ranks, (rank + ranks - 1) % ranks),
          rank_(rank),
          ranks_(ranks),
          pass_(pass),
          buffers_(buffers) {
        size_t largest = chunk_begin(buffers.count, ranks, 1) * buffers.element_bytes;
        // a piece of an uneven cut can have one element more
        size_t limit = largest_piece - buffers.element_bytes;
        size_t pieces = std::max<size_t>((largest + limit - 1) / limit, 1);
        under_way = lead = std::min(pieces, most_under_way);
        pieces_ = (pieces + lead - 1) / lead * lead;
        reducing_steps_ = pass == RingPass::all_gather ? 0 : (size_t)ranks - 1;
        steps_ = pass == RingPass::both ? 2 * reducing_steps_ : (size_t)ranks - 1;
        sends = receives = steps_ * pieces_;
    }

private:
    struct Place {
        size_t step, begin, end, chunk;  // elements of the whole buffer; where the chunk begins
    };

    // The piece that message `index` carries, of the chunk that is `behind` ranks behind this one.
    Place place(size_t index, int behind) const {
        size_t step = index / lead % steps_;
        size_t piece = index / (lead * steps_) * lead + index % lead;
        int shift =
            pass_ == RingPass::reduce_scatter ? 1 : 0;  // ends with the own chunk; `both` with the next one
        int c = (int)(((size_t)(2 * ranks_ + rank_ - shift - behind) + 2 * (size_t)ranks_ - step) %
                      (size_t)ranks_);
        size_t begin = chunk_begin(buffers_.count, ranks_, c),
               size = chunk_begin(buffers_.count, ranks_, c + 1) - begin;
        return {step, begin + chunk_begin(size, (int)pieces_, (int)piece),
                begin + chunk_begin(size, (int)pieces_, (int)piece + 1), begin};
    }

    Piece piece(const char* from, size_t begin, size_t end) const {
        return {const_cast<char*>(from) + begin * buffers_.element_bytes,
                (end - begin) * buffers_.element_bytes};
    }
    char* slot(size_t index) const { return buffers_.scratch + index % slots * largest_piece; }

    Piece outgoing(size_t index) override {
        Place at = place(index, 0);
        if (at.step == 0 && reducing_steps_) return piece(buffers_.input, at.begin, at.end);
        if (pass_ == RingPass::reduce_scatter) return piece(slot(index - lead), 0, at.end - at.begin);
        return piece(buffers_.result, at.begin, at.end);
    }

    Piece incoming(size_t index) override {
        Place at = place(index, 1);
        if (at.step < reducing_steps_) return piece(slot(index), 0, at.end - at.begin);
        return piece(buffers_.result, at.begin, at.end);
    }

    void arrived(size_t index) override {
        Place at = place(index, 1);
        if (at.step >= reducing_steps_) return;
        char* out = piece(buffers_.result, at.begin, at.end).data;
        if (pass_ == RingPass::reduce_scatter) {
            bool last = at.step + 1 == steps_;
            out = last ? piece(buffers_.result, at.begin - at.chunk, 0).data : slot(index);
        }
        buffers_.combine(out, slot(index), piece(buffers_.input, at.begin, at.end).data, at.end - at.begin);
    }

    int rank_, ranks_;
    RingPass pass_;
    Buffers buffers_;
    size_t pieces_, steps_, reducing_steps_;
};

#endif
