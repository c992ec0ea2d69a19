/*
Plays ledgers (kernels/ledger.h): simulates the streams of a rank, or of one rank of each pipeline stage. Each
stream executes its entries in order, and waits for other streams' events and for other ranks' messages.
Nothing about steps is known here: the program itself has recorded what is sent, when, and what waits for it.

    compute     optimizer | F0 | F1 | B0 | F2 | B1 | B2
    forward out                | F0 | F1 | F2
    gathers     gathered parameters | ...
    reductions                              reduced gradients

A piece of work begins when the last piece that it waits for has ended: if any piece takes less time, no step
takes longer. A step begins and ends where the global norm of the gradients is known: the only place where all
ranks wait for each other, unless the optimizer computes other norms.

Ranks that are not simulated are assumed to do what the simulated rank of their stage does: a message between
ranks of a stage begins when that rank is ready. Parameters and gradients share the links, one message after
another, in the order in which that rank enqueues them.
*/
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/mesh_shape.h"         // mesh_groups
#include "comm/machine_rates.h"      // launch_time, call_seconds
#include "data/base/error.h"         // fail
#include "data/run/flight_record.h"  // Operation, Traffic
#include "kernels/ledger.h"          // Ledger

// Links between stages have numbers after those of the table.
inline const char* group_name(const GroupCall& call) {
    auto number = (size_t)call.group.number;
    return number < mesh_groups.size() ? mesh_groups[number].name : "link";
}

// Sums over tensor ranks with copies of a tensor count as messages of tensor ranks, not of data ranks.
inline Traffic purpose_of(const GroupCall& call) {
    auto group = (MeshGroup)call.group.number;
    bool of_tensor_ranks = group == MeshGroup::tensor || group == MeshGroup::copies;
    return of_tensor_ranks ? Traffic::activations : (Traffic)call.purpose;
}

// The kinds of messages that take time. A step in which one kind takes none shows what waiting for it costs.
struct MessagesTaken {
    bool tensor = true, pipeline = true, data = true;

    bool has(Traffic purpose) const {
        return purpose == Traffic::activations ? tensor : purpose == Traffic::pipeline ? pipeline : data;
    }
};

// Bytes that a rank sends in a step, except small messages and those between tensor ranks.
struct BytesSent {
    double pipeline = 0, parameters = 0, gradients = 0, updates = 0;
    double all() const { return pipeline + parameters + gradients + updates; }

    void add(const GroupCall& call) {
        double bytes = bytes_of_rank(call);
        Traffic purpose = purpose_of(call);
        if (purpose == Traffic::pipeline) pipeline += bytes;
        if (purpose == Traffic::parameters) parameters += bytes;
        if (purpose == Traffic::gradients) gradients += bytes;
        if (purpose == Traffic::updates) updates += bytes;
    }
};

struct SimulatedStep {
    double seconds = 0;
    std::vector<double> busy;  // (ranks) seconds of the passes' launches
    // Seconds, of the rank with the most: launches outside the passes and, when messages are taken to cost no
    // time, waits for the host.
    double optimizer = 0;
    std::vector<BytesSent> sent;  // (ranks)
    // The time that ranks wait, as a share of the time that they compute.
    double bubble() const {
        double idle = 0, work = 0;
        for (double rank : busy) idle += seconds - rank, work += rank;
        return idle / work;
    }
};

// A message that the ranks of a group send each other repeatedly.
struct PlannedMessage {
    GroupCall call;
    int nodes;       // nodes its ranks are on
    double seconds;  // each time
};

class StepPlayer {
public:
    // numbers: the ranks of the mesh that will be added, in their order. in_sections: keeps the sections of
    // the first rank separate, for play().
    StepPlayer(const Machine& machine, const std::vector<int>& numbers, bool in_sections = false)
        : machine_(machine), numbers_(numbers), in_sections_(in_sections) {}

    // Adds the next rank. All ledgers have the same number of steps.
    void add(const Ledger& book);

    // Simulates the steps, one after another. sections: receives the seconds of each section of the first
    // rank's ledger on its compute stream. Throws Error if ranks deadlock.
    std::vector<SimulatedStep> play(const MessagesTaken& taken = {},
                                    std::vector<double>* sections = nullptr) const;

    // Returns one message of each kind, with the size and number of nodes that are most frequent.
    std::vector<PlannedMessage> messages() const {
        std::vector<PlannedMessage> all;
        for (auto& [kind, sizes] : calls_) {
            auto most = std::ranges::max_element(sizes, {}, [](auto& size) { return size.second.first; });
            const GroupCall& call = most->second.second;
            all.push_back({call, most->first.second, call_seconds(machine_, call)});
        }
        return all;
    }

private:
    // A piece of work on a stream. which: for a record or a hold, the record's number on its rank; for a
    // meeting, its number among all meetings.
    struct Piece {
        enum Kind { work, message, meeting, record, hold, mark } kind = work;
        Traffic purpose = {};
        bool of_pass = false, crosses = false;
        int step = 0, section = 0, which = 0;
        double seconds = 0;
    };
    // An entry of a ledger, prepared once, because it may be repeated many times.
    struct Prepared {
        Piece piece;
        int stream = 0, event = 0;
        int here = 0;   // simulated ranks in the group of a call
        int nodes = 0;  // nodes this group is on
        bool shares_way = false;
    };
    struct Rank {
        std::vector<std::vector<Piece>> streams;
        int compute = 0;                     // index of the compute stream
        std::vector<int> recorded_on;        // (records) the stream of each
        std::vector<char> is_link;           // (streams) carries messages between stages
        std::vector<BytesSent> sent = {{}};  // before the first step, then in each step
    };
    // A call in which several simulated ranks take part.
    struct Meeting {
        GroupCall call;
        int number, here;  // its number among the group's calls; simulated ranks in it
    };
    using Came = std::vector<std::pair<int, int>>;  // (rank, stream)

    std::vector<Prepared> prepared(const Ledger& book, Rank& rank, size_t& events) const;
    int meeting(const GroupCall& call, int number, int here);
    void count(const GroupCall& call, int nodes);
    [[noreturn]] void refuse_deadlock(const std::vector<Came>& came) const;

    const Machine machine_;
    const std::vector<int> numbers_;
    const bool in_sections_;
    size_t sections_ = 0;  // the first rank's
    std::vector<Rank> ranks_;
    std::vector<Meeting> meetings_;
    std::map<GroupOfRanks, std::vector<int>> meetings_of_;  // a group's, in order
    // by kind, and then by bytes and nodes: the number of these calls, and one of them
    std::map<std::array<int, 3>, std::map<std::pair<double, int>, std::pair<int, GroupCall>>> calls_;
};

// ----------------------------------------------------------------------------
// ledgers to pieces of work

inline std::vector<StepPlayer::Prepared> StepPlayer::prepared(const Ledger& book, Rank& rank,
                                                              size_t& events) const {
    std::unordered_map<const void*, int> streams, known_events;
    auto number_of = [](auto& numbers, const void* thing) {
        return numbers.try_emplace(thing, (int)numbers.size()).first->second;
    };
    std::vector<Prepared> all(book.entries.size());
    double sent = 0, received = 0;  // seconds of calls that begin together
    for (size_t i = 0; i < all.size(); i++) {
        const LedgerEntry& entry = book.entries[i];
        Prepared& one = all[i];
        if (entry.kind == LedgerEntry::repeat) continue;
        one.stream = number_of(streams, entry.stream);
        one.piece.section = in_sections_ ? entry.section : 0;
        one.piece.of_pass = book.sections[entry.section].work >= 0;
        if (entry.kind == LedgerEntry::launch) one.piece.seconds = launch_time(machine_, entry).all();
        if (entry.kind == LedgerEntry::record || entry.kind == LedgerEntry::hold)
            one.event = number_of(known_events, entry.event);
        if (entry.kind == LedgerEntry::step) rank.compute = one.stream, one.piece.kind = Piece::mark;
        if (entry.kind != LedgerEntry::call) continue;
        const GroupOfRanks& group = entry.call_of.group;
        Traffic purpose = purpose_of(entry.call_of);
        one.here = (int)std::ranges::count_if(numbers_, [&](int number) { return group.has(number); });
        one.shares_way = purpose == Traffic::parameters || purpose == Traffic::gradients;
        one.piece.kind = one.here > 1 ? Piece::meeting : Piece::message;
        one.piece.purpose = purpose;
        // calls that begin together use both directions of a link at once
        if (!entry.call_of.joins) sent = received = 0;
        double before = std::max(sent, received);
        (entry.call_of.operation == (int)Operation::receive ? received : sent) +=
            call_seconds(machine_, entry.call_of);
        one.piece.seconds = std::max(sent, received) - before;
        one.nodes = in_nodes(machine_, group).nodes;
        one.piece.crosses = one.nodes > 1;
    }
    rank.streams.resize(streams.size()), rank.is_link.resize(streams.size());
    events = known_events.size();
    return all;
}

inline int StepPlayer::meeting(const GroupCall& call, int number, int here) {
    std::vector<int>& of_group = meetings_of_[call.group];
    if ((int)of_group.size() <= number) {
        of_group.push_back((int)meetings_.size());
        meetings_.push_back({call, number, here});
    }
    return of_group[number];
}

// Counts a call, unless it is a receive, which other ranks count as a send, or statistics, which are small.
inline void StepPlayer::count(const GroupCall& call, int nodes) {
    if (call.operation == (int)Operation::receive || call.purpose == (int)Traffic::statistics) return;
    const int links = mesh_groups.size();  // links have this number or a higher one
    auto& sizes = calls_[{call.purpose, call.operation, std::min(call.group.number, links)}];
    auto& [count, one] = sizes.try_emplace({call.bytes, nodes}, 0, call).first->second;
    count++, one.joins = false;
}

inline void StepPlayer::add(const Ledger& book) {
    constexpr int never = -1;
    if (ranks_.empty()) sections_ = book.sections.size();
    Rank& rank = ranks_.emplace_back();
    size_t events = 0;
    const std::vector<Prepared> all = prepared(book, rank, events);
    std::vector<int> last_record(events, never);
    std::map<GroupOfRanks, int> calls;  // in which several simulated ranks take part
    int steps = 0, last_on_way = never;
    const auto marks = std::ranges::count(book.entries, LedgerEntry::step, &LedgerEntry::kind);
    auto record = [&](int stream) {
        rank.streams[stream].push_back({.kind = Piece::record, .which = (int)rank.recorded_on.size()});
        rank.recorded_on.push_back(stream);
        return (int)rank.recorded_on.size() - 1;
    };
    auto hold = [&](const Prepared& one, int which) {
        if (which == never || rank.recorded_on[which] == one.stream) return;
        Piece piece = one.piece;
        piece.kind = Piece::hold, piece.step = steps, piece.which = which;
        rank.streams[one.stream].push_back(piece);
    };
    book.each([&](const LedgerEntry& entry) {
        if (steps == marks) return;  // the remaining entries belong to no step
        const Prepared& one = all[(size_t)(&entry - book.entries.data())];
        std::vector<Piece>& stream = rank.streams[one.stream];
        Piece piece = one.piece;
        piece.step = steps;
        auto goes_on = [&](const Piece& before) {
            return before.kind == Piece::work && before.of_pass == piece.of_pass && before.step == steps &&
                   before.section == piece.section;
        };
        switch (entry.kind) {
        case LedgerEntry::launch:
            if (!stream.empty() && goes_on(stream.back()))
                stream.back().seconds += piece.seconds;
            else
                stream.push_back(piece);
            break;
        case LedgerEntry::record:
            last_record[one.event] = record(one.stream);
            break;
        case LedgerEntry::hold:
            hold(one, last_record[one.event]);
            break;
        case LedgerEntry::call:
            rank.sent.back().add(entry.call_of);
            count(entry.call_of, one.nodes);
            if (one.shares_way) hold(one, last_on_way);
            if (one.here > 1) {
                piece.which = meeting(entry.call_of, calls[entry.call_of.group]++, one.here);
                rank.is_link[one.stream] |= piece.purpose == Traffic::pipeline;
            }
            stream.push_back(piece);
            if (one.shares_way) last_on_way = record(one.stream);
            break;
        case LedgerEntry::step:
            stream.push_back(piece);
            if (++steps < marks) rank.sent.emplace_back();
            break;
        case LedgerEntry::repeat:
            break;  // each() visits what it repeats
        }
    });
}

// ----------------------------------------------------------------------------
// playing

inline std::vector<SimulatedStep> StepPlayer::play(const MessagesTaken& taken,
                                                   std::vector<double>* sections) const {
    constexpr double never = -1;
    constexpr int none = -1;
    struct Stream {
        size_t next = 0;
        double clock = 0;
        int next_waiting = none;  // another stream, which waits for the same record
    };
    struct InStep {
        double end = 0, busy = 0, beside = 0, network = 0;
    };
    struct Playing {
        std::vector<Stream> streams;
        std::vector<double> reached;  // (records)
        std::vector<int> waiting;     // (records) the first stream that waits for it
        std::vector<InStep> steps;    // the time before the first step, then each step
    };
    std::vector<Playing> ranks;
    Came ready;  // streams that can run
    for (const Rank& rank : ranks_) {
        for (int stream = 0; stream < (int)rank.streams.size(); stream++)
            ready.push_back({(int)ranks.size(), stream});
        ranks.push_back(
            {std::vector<Stream>(rank.streams.size()), std::vector<double>(rank.recorded_on.size(), never),
             std::vector<int>(rank.recorded_on.size(), none), std::vector<InStep>(rank.sent.size())});
    }
    std::vector<Came> came(meetings_.size());
    std::vector<double> latest(meetings_.size());

    // Runs a stream until it must wait or has no more work.
    auto run = [&](int number, int at) {
        const Rank& rank = ranks_[number];
        Playing& playing = ranks[number];
        Stream& stream = playing.streams[at];
        const std::vector<Piece>& pieces = rank.streams[at];
        const bool computes = at == rank.compute;
        for (; stream.next < pieces.size(); stream.next++) {
            const Piece& piece = pieces[stream.next];
            InStep& step = playing.steps[piece.step];
            const double before = stream.clock;
            const bool sends = piece.kind == Piece::message || piece.kind == Piece::meeting;
            const double seconds = sends && !taken.has(piece.purpose) ? 0 : piece.seconds;
            switch (piece.kind) {
            case Piece::work:
                stream.clock += seconds;
                if (computes) (piece.of_pass ? step.busy : step.beside) += seconds;
                break;
            case Piece::message:
                stream.clock += seconds;
                if (piece.crosses) step.network += seconds;
                break;
            case Piece::meeting:
                latest[piece.which] = std::max(latest[piece.which], stream.clock);
                came[piece.which].push_back({number, at});
                if ((int)came[piece.which].size() < meetings_[piece.which].here) return;
                for (auto [other, its_stream] : came[piece.which]) {
                    Stream& there = ranks[other].streams[its_stream];
                    there.clock = latest[piece.which] + seconds;
                    if (piece.crosses) ranks[other].steps[piece.step].network += seconds;
                    if (&there == &stream) continue;
                    there.next++;
                    ready.push_back({other, its_stream});
                }
                break;
            case Piece::record:
                playing.reached[piece.which] = stream.clock;
                for (int& other = playing.waiting[piece.which]; other != none;) {
                    ready.push_back({number, other});
                    other = std::exchange(playing.streams[other].next_waiting, none);
                }
                break;
            case Piece::hold: {
                double reached = playing.reached[piece.which];
                if (reached == never) {
                    stream.next_waiting = std::exchange(playing.waiting[piece.which], at);
                    return;
                }
                stream.clock = std::max(stream.clock, reached);
                bool of_link = rank.is_link[rank.recorded_on[piece.which]];
                if (computes && piece.of_pass && !of_link) step.beside += stream.clock - before;
                break;
            }
            case Piece::mark:
                step.end = stream.clock;
                break;
            }
            if (sections && computes && number == 0) (*sections)[piece.section] += stream.clock - before;
        }
    };
    if (sections) sections->assign(sections_, 0);
    while (!ready.empty()) {
        auto [rank, stream] = ready.back();
        ready.pop_back();
        run(rank, stream);
    }
    for (size_t rank = 0; rank < ranks.size(); rank++)
        for (size_t stream = 0; stream < ranks[rank].streams.size(); stream++)
            if (ranks[rank].streams[stream].next < ranks_[rank].streams[stream].size()) refuse_deadlock(came);

    std::vector<SimulatedStep> steps(ranks_[0].sent.size() - 1);
    for (size_t i = 0; i < steps.size(); i++) {
        SimulatedStep& step = steps[i];
        double begin = 0, end = 0, network = 0;
        for (size_t rank = 0; rank < ranks.size(); rank++) {
            const InStep& here = ranks[rank].steps[i + 1];
            begin = std::max(begin, ranks[rank].steps[i].end), end = std::max(end, here.end);
            network = std::max(network, here.network);
            step.busy.push_back(here.busy);
            step.optimizer = std::max(step.optimizer, here.beside);
            step.sent.push_back(ranks_[rank].sent[i + 1]);
        }
        step.seconds = std::max(end - begin, network);  // a rank's messages share its network
    }
    return steps;
}

// Fails, naming the first meeting that only some of its ranks have reached. came: the ranks at each one.
inline void StepPlayer::refuse_deadlock(const std::vector<Came>& came) const {
    for (size_t i = 0; i < came.size(); i++) {
        auto& [call, number, here] = meetings_[i];
        if (came[i].empty() || (int)came[i].size() == here) continue;
        auto is_missing = [&](int rank) {
            return call.group.has(rank) &&
                   std::ranges::none_of(came[i], [&](auto& one) { return numbers_[one.first] == rank; });
        };
        fail("a step never ends: rank %d waits in call %d of the group \"%s\", and rank %d never reaches it; "
             "make their calls in the same order",
             numbers_[came[i][0].first], number, group_name(call),
             *std::ranges::find_if(numbers_, is_missing));
    }
    fail("a step never ends: a stream waits for an event that is never reached; check the order of its work");
}
