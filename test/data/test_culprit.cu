// Which rank is to blame for a hang, on simulated ranks in every kind of layout, which advance by the rules
// of groups, with a planted fault, until none can.
#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "data/run/culprit.h"
#include "test/support/testing.h"

namespace {

struct Shape {
    int tp, shard, replicas, pp, cp = 1;
    int ranks() const { return tp * cp * shard * replicas * pp; }
    PerAxis sizes() const { return {{tp, cp, shard, replicas, pp}}; }
};

// The work of a rank in a step, in order: passes of its device, and calls of its groups.
struct Doing {
    std::string what;          // "forward", "backward", "optimizer", or a call
    std::string group;         // group of a call
    std::vector<int> members;  // ranks of that group
    int micro_batch = -1, unit = -1;
};

constexpr int micro_batches = 3, layers = 2;

std::vector<int> along(const Shape& shape, int rank, AxisSet axes) {
    return group_of(rank, axes, shape.sizes());
}

std::vector<Doing> step_of(const Shape& shape, int rank) {
    const int stride = shape.tp * shape.cp * shape.shard * shape.replicas, stage = rank / stride;
    const int before = rank - stride, behind = rank + stride;
    std::vector<Doing> doings;
    auto call = [&](const char* what, const char* group, std::vector<int> members, int batch, int unit) {
        if (members.size() > 1) doings.push_back({what, group, members, batch, unit});
    };
    for (int batch = 0; batch < micro_batches; batch++) {
        for (const char* pass : {"forward", "backward"}) {
            bool forward = pass == std::string("forward");
            if (forward && stage > 0) call("receive", "forward in", {before, rank}, batch, -1);
            if (!forward && stage < shape.pp - 1) call("receive", "backward in", {behind, rank}, batch, -1);
            for (int layer = 0; layer < layers; layer++) {
                doings.push_back({pass, "", {}, batch, layer});
                call("all-gather", "context", along(shape, rank, Axis::context), batch, layer);
                call("all-reduce", "tensor", along(shape, rank, Axis::tensor), batch, layer);
            }
            if (forward && stage < shape.pp - 1) call("send", "forward out", {rank, behind}, batch, -1);
            if (!forward && stage > 0) call("send", "backward out", {rank, before}, batch, -1);
        }
    }
    call("reduce-scatter", "shard", along(shape, rank, {Axis::context, Axis::shard}), -1, 1);
    call("all-reduce", "replica", along(shape, rank, Axis::replica), -1, 1);
    doings.push_back({"optimizer", "", {}, -1, -1});
    call("all-reduce", "world", along(shape, rank, all_axes), -1, -1);
    return doings;
}

// A rank that makes no progress from its operation number `doing` on.
struct Broken {
    int rank;
    size_t doing;
    bool link = false;  // its messages never arrive, but it computes on
};

// Returns the states when no rank can make progress any more.
std::vector<RankState> stuck(const Shape& shape, const std::vector<Broken>& broken) {
    const int n = shape.ranks();
    std::vector<std::vector<Doing>> doings;
    for (int rank = 0; rank < n; rank++) doings.push_back(step_of(shape, rank));
    std::vector<size_t> at((size_t)n, 0);
    auto key = [](const Doing& doing) { return common_name(doing.group) + text_of_ranks(doing.members); };
    auto calls_before = [&](int rank, size_t end, const std::string& group) {
        uint64_t count = 0;
        for (size_t i = 0; i < end; i++)
            count += !doings[(size_t)rank][i].group.empty() && key(doings[(size_t)rank][i]) == group;
        return count;
    };
    auto is_broken = [&](int rank, bool link) {
        return std::ranges::any_of(broken, [&](const Broken& each) {
            return each.rank == rank && each.link == link && at[(size_t)rank] >= each.doing;
        });
    };
    for (bool moved = true; moved;) {
        moved = false;
        for (int rank = 0; rank < n; rank++) {
            size_t& place = at[(size_t)rank];
            if (place == doings[(size_t)rank].size() || is_broken(rank, false)) continue;
            const Doing& doing = doings[(size_t)rank][place];
            bool ready = true;
            if (!doing.group.empty()) {
                uint64_t number = calls_before(rank, place, key(doing));
                for (int member : doing.members) {
                    size_t theirs = at[(size_t)member];
                    bool inside = theirs < doings[(size_t)member].size();
                    ready &= calls_before(member, std::min(theirs + inside, doings[(size_t)member].size()),
                                          key(doing)) > number;
                    ready &= !is_broken(member, true);
                }
            }
            if (ready) place++, moved = true;
        }
    }
    std::vector<RankState> states;
    for (int rank = 0; rank < n; rank++) {
        RankState state;
        state.rank = rank, state.ranks = n, state.host = "node" + std::to_string(rank / 4);
        state.sizes = shape.sizes();
        state.device = rank % 4, state.process = 100 + rank, state.alive = true, state.state = "S";
        state.phase = "step", state.quiet_seconds = 10, state.wait_seconds = 10, state.detailed = true;
        const auto& mine = doings[(size_t)rank];
        size_t place = at[(size_t)rank];
        std::map<std::string, GroupState> groups;
        for (size_t i = 0; i < mine.size(); i++) {
            if (mine[i].group.empty()) continue;
            GroupState& group = groups[mine[i].group];
            group.name = mine[i].group, group.size = (int)mine[i].members.size();
            group.ranks = mine[i].members;
            group.issued++;  // the host is far ahead
            group.begun += i <= place, group.done += i < place;
            if (i == place)
                group.next = {mine[i].what,        "gradients", group.name, mine[i].unit,
                              mine[i].micro_batch, 1,           group.begun};
        }
        for (auto& [name, group] : groups) state.groups.push_back(group);
        bool computes = place < mine.size() && mine[place].group.empty();
        if (place < mine.size()) {
            state.pass.operation = computes ? mine[place].what : "optimizer";
            state.pass.micro_batch = mine[place].micro_batch;
            state.begun = computes;
        }
        states.push_back(state);
    }
    return states;
}

const Shape shapes[] = {{1, 1, 8, 1},    {1, 8, 1, 1},    {1, 2, 4, 1},    {8, 1, 1, 1},
                        {2, 4, 1, 1},    {1, 1, 1, 8},    {1, 2, 1, 4},    {2, 1, 1, 4},
                        {2, 2, 1, 2},    {2, 2, 2, 2},    {1, 32, 1, 1},   {2, 4, 2, 2},
                        {1, 1, 1, 1, 4}, {2, 2, 1, 1, 2}, {1, 1, 2, 2, 2}, {2, 2, 2, 2, 2}};

bool accuses(const HangDiagnosis& diagnosis, int rank) {
    return std::ranges::find(diagnosis.ranks, rank) != diagnosis.ranks.end();
}

size_t random_below(size_t bound) {
    static uint64_t state = 1;
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (size_t)(state >> 33) % bound;
}

// Returns a random moment at which the rank computes.
size_t moment_of(const Shape& shape, int rank) {
    std::vector<Doing> doings = step_of(shape, rank);
    for (;;) {
        size_t moment = random_below(doings.size());
        if (doings[moment].group.empty()) return moment;
    }
}

}  // namespace

TEST_CASE("a device that gets no further is found in every layout, and nobody else is accused") {
    for (const Shape& shape : shapes) {
        for (int tries = 0; tries < 20; tries++) {
            int rank = (int)random_below((size_t)shape.ranks());
            HangDiagnosis diagnosis = diagnose_hang(stuck(shape, {{rank, moment_of(shape, rank)}}), 5);
            CAPTURE(diagnosis.sentence);
            CHECK(diagnosis.kind == Fault::absent);
            CHECK(diagnosis.ranks == std::vector<int>{rank});
        }
    }
}

TEST_CASE("of two devices that get no further, at least one is found, and nobody else is accused") {
    for (const Shape& shape : shapes) {
        for (int tries = 0; tries < 20; tries++) {
            int a = (int)random_below((size_t)shape.ranks()), b = (int)random_below((size_t)shape.ranks());
            HangDiagnosis diagnosis =
                diagnose_hang(stuck(shape, {{a, moment_of(shape, a)}, {b, moment_of(shape, b)}}), 5);
            CAPTURE(diagnosis.sentence);
            CHECK(!diagnosis.ranks.empty());
            for (int rank : diagnosis.ranks) CHECK((rank == a || rank == b));
        }
    }
}

TEST_CASE("a rank whose messages do not arrive is among those whose links are named") {
    for (const Shape& shape : shapes) {
        for (int tries = 0; tries < 20; tries++) {
            int rank = (int)random_below((size_t)shape.ranks());
            HangDiagnosis diagnosis = diagnose_hang(stuck(shape, {{rank, random_below(6), true}}), 5);
            CAPTURE(diagnosis.sentence);
            CHECK(diagnosis.kind == Fault::link);
            CHECK(accuses(diagnosis, rank));
        }
    }
}

TEST_CASE("who is dead, stopped or blocked is named as such, and the others are not") {
    for (const Shape& shape : shapes) {
        int rank = (int)random_below((size_t)shape.ranks());
        const auto states = stuck(shape, {{rank, moment_of(shape, rank)}});
        auto verdict_if = [&](std::function<void(RankState&)> is) {
            auto changed = states;
            is(changed[(size_t)rank]);
            return diagnose_hang(changed, 5);
        };
        const std::vector<int> it = {rank};
        HangDiagnosis diagnosis = verdict_if([](RankState& state) { state.alive = false; });
        CHECK(diagnosis.kind == Fault::dead);
        CHECK(diagnosis.ranks == it);
        diagnosis = verdict_if([](RankState& state) { state.state = "T"; });
        CHECK(diagnosis.kind == Fault::stopped);
        CHECK(diagnosis.ranks == it);
        diagnosis =
            verdict_if([](RankState& state) { state.work = "writing a.bin", state.work_seconds = 9; });
        CHECK(diagnosis.kind == Fault::disk);
        CHECK(diagnosis.ranks == it);
        CHECK(diagnosis.sentence.find("writing a.bin") != std::string::npos);

        auto rest = states;
        rest.erase(rest.begin() + rank);
        CHECK(diagnose_hang(rest, 5).ranks == it);
        CHECK(diagnose_hang(rest, 5, false).ranks.empty());  // it may be on another machine
    }
}

TEST_CASE("nobody is accused while anybody gets on, or where no rank is") {
    for (const Shape& shape : shapes) {
        auto states = stuck(shape, {{0, 0}});
        CHECK(diagnose_hang(states, 11).kind == Fault::nobody);
        states.back().quiet_seconds = 1;
        CHECK(diagnose_hang(states, 5).kind == Fault::nobody);
        states.back().quiet_seconds = 10;
        states.back().work = "writing a.bin", states.back().work_seconds = 1;
        CHECK(diagnose_hang(states, 5).kind == Fault::nobody);
        CHECK(diagnose_hang(states, 5, true, true).kind == Fault::nobody);
        states.front().work = "writing b.bin", states.front().work_seconds = 6;
        CHECK(diagnose_hang(states, 5).kind == Fault::nobody);
        CHECK(diagnose_hang(states, 5, true, true).kind == Fault::disk);  // a rank has waited for it
        CHECK(diagnose_hang(states, 5, true, true).ranks == std::vector<int>{0});
        states.front().work = "";
        for (RankState& state : states) state.alive = false;
        CHECK(diagnose_hang(states, 5).kind == Fault::nobody);
    }
    CHECK(diagnose_hang({}, 5).kind == Fault::nobody);
}

TEST_CASE("a step without details tells by its passes") {
    auto states = stuck({1, 8, 1, 1}, {{3, 0}});
    for (RankState& state : states) state.detailed = false;
    CHECK(diagnose_hang(states, 5).ranks == std::vector<int>{3});
    for (RankState& state : states) state.begun = true, state.pass.operation = "backward";
    CHECK(diagnose_hang(states, 5).kind == Fault::nobody);
}

TEST_CASE("the sentence names the rank, the call, the group and what the rank is at") {
    auto states = stuck({1, 4, 1, 1}, {{2, 5}});
    CHECK(diagnose_hang(states, 5).sentence ==
          "rank 2 (node0, GPU 2) has not entered the reduce-scatter of gradients of unit 1 in data group "
          "{0, 1, 2, 3}; it is in the forward pass of micro-batch 1");
}
