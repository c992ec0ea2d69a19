/*
Small messages in host memory between the processes of a job, over MPI: broadcast to all, gathered from all,
or sent to some.

A job may have ten thousand processes, and the cost of a call per process must not grow with their number.
MPI's own nonblocking collectives send from each rank to each other rank if lengths differ: N^2 messages and
N^2 connections. Here, with N ranks, the messages are

    broadcast       a tree                                          N - 1 messages
    gather          to the first, which receives them in any order  N - 1
    all_gather      gather, then broadcast                          2N, and N more if texts are long
    exchange        to ranks that get any, then a barrier           the texts, and N log2 N
    largest, sum    up a tree and down it                           2N
    barrier         in log2 N rounds                                N log2 N
    post            to the first, which looks for them later        N - 1, and no rank waits

Every rank makes the same calls in the same order. A call's messages have its number as their tag, so a rank
that is ahead does not disturb an earlier call of the others.
*/
#pragma once

#include <algorithm>
#include <climits>
#include <cstring>
#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/mpi_calls.h"
#include "data/base/error.h"  // fail

class ControlPlane {
public:
    // A world of one, which sends nothing.
    ControlPlane() = default;

    int rank() const { return rank_; }
    int size() const { return size_; }
    bool is_root() const { return rank_ == 0; }

    // For all ranks: copies root's bytes, in host memory, to all.
    void broadcast([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes,
                   [[maybe_unused]] int root = 0) const {
#ifndef WITHOUT_MPI
        if (size_ == 1) return;
        constexpr size_t most = INT_MAX;  // MPI counts in int
        MPI_Request request;
        for (size_t at = 0; at < bytes; at += most) {
            int count = (int)std::min(bytes - at, most);
            mpiCheck(MPI_Ibcast((char*)data + at, count, MPI_BYTE, root, mpi_, &request));
            mpi_wait(&request, 1);
        }
#endif
    }

    // For all ranks: returns root's text on all of them; the other ranks' texts are ignored.
    std::string broadcast_text(std::string text, int root = 0) const {
        if (size_ == 1) return text;
        // One message, followed by a second one if the text does not fit into the first.
        struct {
            uint64_t length;
            char begin[short_text];
        } first = {};
        if (rank_ == root) {
            first.length = text.size();
            memcpy(first.begin, text.data(), std::min(text.size(), short_text));
        }
        broadcast(&first, sizeof first, root);
        text.resize(first.length);
        if (first.length > short_text)
            broadcast(text.data(), text.size(), root);
        else
            memcpy(text.data(), first.begin, text.size());
        return text;
    }

    // For all ranks: returns all texts, by rank, on the first rank; nothing on the others.
    std::vector<std::string> gather(const std::string& mine) const {
        if (size_ == 1) return {mine};
        std::vector<std::string> texts;
#ifndef WITHOUT_MPI
        int tag = next_tag();
        if (!is_root()) {
            MPI_Request request = send(MPI_Isend, mine, 0, tag);
            mpi_wait(&request, 1);
            return texts;
        }
        texts.resize((size_t)size_);
        texts[0] = mine;
        for (int missing = size_ - 1; missing > 0; missing--) receive_any(texts, tag);
#endif
        return texts;
    }

    // For all ranks: returns all texts, by rank, on every rank.
    std::vector<std::string> all_gather(const std::string& mine) const {
        if (size_ == 1) return {mine};
        std::string packed;
        for (const std::string& text : gather(mine)) {
            uint64_t length = text.size();
            packed.append((const char*)&length, sizeof length).append(text);
        }
        packed = broadcast_text(std::move(packed));
        std::vector<std::string> texts;
        for (size_t at = 0; at < packed.size();) {
            uint64_t length;
            memcpy(&length, &packed[at], sizeof length);
            texts.push_back(packed.substr(at + sizeof length, length));
            at += sizeof length + length;
        }
        return texts;
    }

    // For all ranks: returns on every rank what combine() makes of all texts. It is called on the first rank
    // only, and must not throw.
    template <typename Combine>
    std::string agree(const std::string& mine, Combine&& combine) const {
        std::vector<std::string> texts = gather(mine);
        return broadcast_text(is_root() ? combine(texts) : "");
    }

    // For all ranks: sends to_each[r] to rank r, and returns what each rank sent to this one. Most ranks send
    // nothing to most others, and a rank does not know which ones send to it. So it receives messages until
    // its own have all been received, then enters a nonblocking barrier and keeps receiving until all ranks
    // have entered (Hoefler, Siebert and Lumsdaine 2010, "Scalable communication protocols for dynamic sparse
    // data exchange").
    std::vector<std::string> exchange(const std::vector<std::string_view>& to_each) const {
        std::vector<std::string> from_each(to_each.size());
        from_each[(size_t)rank_] = to_each[(size_t)rank_];
#ifndef WITHOUT_MPI
        if (size_ == 1) return from_each;
        int tag = next_tag();
        std::vector<MPI_Request> sent;
        for (int peer = 0; peer < size_; peer++) {
            if (peer != rank_ && !to_each[(size_t)peer].empty())
                sent.push_back(send(MPI_Issend, to_each[(size_t)peer], peer, tag));
        }
        MPI_Request all_taken = MPI_REQUEST_NULL;
        bool told = false;
        MpiWait wait;
        for (;;) {
            int done = 0;
            while (is_coming(tag)) receive_any(from_each, tag);
            if (told)
                mpiCheck(MPI_Test(&all_taken, &done, MPI_STATUS_IGNORE));
            else
                mpiCheck(MPI_Testall((int)sent.size(), sent.data(), &done, MPI_STATUSES_IGNORE));
            if (done && told) return from_each;
            if (done) {
                mpiCheck(MPI_Ibarrier(mpi_, &all_taken));
                told = true;
                continue;
            }
            wait.again();
        }
#endif
        return from_each;
    }

    // Sends a text to one rank, which receives it with receive_from().
    void send_to([[maybe_unused]] int rank, [[maybe_unused]] const std::string& text) const {
#ifndef WITHOUT_MPI
        MPI_Request request = send(MPI_Isend, text, rank, pair_tag);
        mpi_wait(&request, 1);
#endif
    }
    std::string receive_from([[maybe_unused]] int rank) const {
#ifdef WITHOUT_MPI
        return "";
#else
        return receive(rank, pair_tag).second;
#endif
    }

    // Sends the first rank a text, which it receives with posted(). Neither rank waits.
    void post([[maybe_unused]] std::string text) const {
#ifndef WITHOUT_MPI
        std::erase_if(posts_, [](Post& post) {
            int done = 0;
            mpiCheck(MPI_Test(&post.request, &done, MPI_STATUS_IGNORE));
            return done;
        });
        Post& post = posts_.emplace_back(Post{std::move(text)});
        post.request = send(MPI_Isend, post.text, 0, post_tag);
#endif
    }
    // On the first rank: returns the texts that have arrived since the last call, each with its sender. Those
    // of one sender are in the order sent.
    std::vector<std::pair<int, std::string>> posted() const {
        std::vector<std::pair<int, std::string>> texts;
#ifndef WITHOUT_MPI
        while (size_ > 1 && is_coming(post_tag)) texts.push_back(receive(MPI_ANY_SOURCE, post_tag));
#endif
        return texts;
    }
    // For all ranks: when this returns, posted() returns every text posted before.
    void await_posts() const {
#ifndef WITHOUT_MPI
        for (Post& post : posts_) mpi_wait(&post.request, 1);
        posts_.clear();
#endif
        gather("");  // messages from a rank arrive in order
    }

    // For all ranks: returns when every rank has called this.
    void barrier() const {
#ifndef WITHOUT_MPI
        if (size_ == 1) return;
        MPI_Request request;
        mpiCheck(MPI_Ibarrier(mpi_, &request));
        mpi_wait(&request, 1);
#endif
    }

    // For all ranks: returns the largest value.
    int largest(int value) const {
#ifndef WITHOUT_MPI
        if (size_ == 1) return value;
        MPI_Request request;
        mpiCheck(MPI_Iallreduce(MPI_IN_PLACE, &value, 1, MPI_INT, MPI_MAX, mpi_, &request));
        mpi_wait(&request, 1);
#endif
        return value;
    }

    // For all ranks, with the same number of values: replaces each value by its sum over the ranks.
    void sum([[maybe_unused]] std::vector<double>& values) const {
#ifndef WITHOUT_MPI
        if (size_ == 1) return;
        MPI_Request request;
        mpiCheck(MPI_Iallreduce(MPI_IN_PLACE, values.data(), (int)values.size(), MPI_DOUBLE, MPI_SUM, mpi_,
                                &request));
        mpi_wait(&request, 1);
#endif
    }

protected:
    static constexpr size_t short_text = 4000;

    int rank_ = 0, size_ = 1;

#ifndef WITHOUT_MPI
    // Uses the ranks of this communicator, which the caller frees after this object's last call.
    void use(MPI_Comm mpi) {
        mpi_ = mpi;
        mpiCheck(MPI_Comm_rank(mpi, &rank_));
        mpiCheck(MPI_Comm_size(mpi, &size_));
    }

    MPI_Comm mpi_ = MPI_COMM_NULL;

private:
    int next_tag() const {
        return (int)(calls_++ % (1 << 14));
    }

    // call: MPI_Isend, or MPI_Issend, which completes only when the other rank receives the message.
    MPI_Request send(decltype(MPI_Isend) call, std::string_view message, int to, int tag) const {
        if (message.size() > INT_MAX)
            fail("message to rank %d: %zu bytes exceed MPI's limit of 2 GiB; send less", to, message.size());
        MPI_Request request;
        mpiCheck(call(message.data(), (int)message.size(), MPI_BYTE, to, tag, mpi_, &request));
        return request;
    }

    bool is_coming(int tag) const {
        int found = 0;
        mpiCheck(MPI_Iprobe(MPI_ANY_SOURCE, tag, mpi_, &found, MPI_STATUS_IGNORE));
        return found;
    }

    // Receives the next message from any rank, and stores it as that rank's text.
    void receive_any(std::vector<std::string>& texts, int tag) const {
        auto [rank, text] = receive(MPI_ANY_SOURCE, tag);
        texts[(size_t)rank] = std::move(text);
    }

    // Receives the next message from `from` (or any rank); returns its source and text.
    std::pair<int, std::string> receive(int from, int tag) const {
        MPI_Message message;
        MPI_Status status;
        MpiWait wait;
        for (;;) {
            int found = 0, bytes = 0;
            mpiCheck(MPI_Improbe(from, tag, mpi_, &found, &message, &status));
            if (!found) {
                wait.again();
                continue;
            }
            mpiCheck(MPI_Get_count(&status, MPI_BYTE, &bytes));
            std::string text((size_t)bytes, '\0');
            MPI_Request request;
            mpiCheck(MPI_Imrecv(text.data(), bytes, MPI_BYTE, &message, &request));
            mpi_wait(&request, 1);
            return {status.MPI_SOURCE, std::move(text)};
        }
    }

    // The tags of numbered calls are below these.
    static constexpr int post_tag = 1 << 14, pair_tag = post_tag + 1;

    struct Post {
        std::string text;
        MPI_Request request = MPI_REQUEST_NULL;
    };
    mutable std::list<Post> posts_;  // posts that may still be in flight
    mutable uint32_t calls_ = 0;
#endif
};
