// The order in which blocks of the attention kernels take their tiles: no block waits forever, and
// multiprocessors stay busy, as a simulation of the blocks' completion times shows. The tests call the
// kernels' own functions.
// devices: simt-bf16 cuda-bf16 nocard
// seconds: 1
#include <map>
#include <queue>
#include <tuple>

#include "test/kernels/attention_testing.h"

#ifdef PRECISION_BF16

namespace {

// Expected microseconds on an H100 or H200. The shares of busy time hardly depend on them.
struct ExpectedTimes {
    double forward_tile,
        forward_ends;              // a key tile with one query tile; before the first tile and after the last
    double step, ends;             // in the backward pass: a query tile with one key tile; both ends
    double finish = 1.1;           // the last addition, by the block itself, and storing dq
    double add = 1.1, seen = 0.7;  // an addition to dq; until the next block sees its turn
};

template <int HSP>
constexpr ExpectedTimes expected_times() {
    if (HSP == 64) return {.forward_tile = 0.8, .forward_ends = 0.8, .step = 2.8, .ends = 2.8};
    return {.forward_tile = 1.3, .forward_ends = 1.0, .step = 2.6, .ends = 4.0};
}

// The times at which multiprocessors become free, earliest first.
class FreeTimes {
public:
    explicit FreeTimes(int multiprocessors) {
        for (int i = 0; i < multiprocessors; i++) times_.push(0);
    }
    double take() {
        double earliest = times_.top();
        times_.pop();
        return earliest;
    }
    void give(double time) {
        times_.push(time);
        last_ = std::max(last_, time);
    }
    double last() const { return last_; }

private:
    std::priority_queue<double, std::vector<double>, std::greater<>> times_;
    double last_ = 0;
};

// The share of the multiprocessors' time that is spent on work.
template <int HSP>
double forward_share(const AttentionShape& s, int multiprocessors) {
    ExpectedTimes t = expected_times<HSP>();
    FreeTimes free(multiprocessors);
    double work = 0;
    for (int ticket = 0; ticket < HopperQueries::tickets(s); ticket++) {
        auto tile = HopperQueries::of(s, forward_section(s), ticket);
        double time = t.forward_ends + (tile.last_keys - tile.first_keys + 1) * t.forward_tile;
        free.give(free.take() + time);
        work += time;
    }
    return work / multiprocessors / free.last();
}

// Blocks wait only for earlier tickets, so each can be simulated to its end before the next.
template <int HSP>
double backward_share(const AttentionShape& s, int multiprocessors) {
    ExpectedTimes t = expected_times<HSP>();
    FreeTimes free(multiprocessors);
    std::map<std::tuple<int, int, int>, double> passed;  // when the last turn was passed on
    double work = 0;
    int section = backward_section(s, multiprocessors);
    for (int ticket = 0; ticket < HopperKeys<HSP>::tickets(s); ticket++) {
        auto tile = HopperKeys<HSP>::of(s, section, ticket);
        double now = free.take() + t.ends / 2, dq_empty = now;
        work += t.ends;
        for (auto step = tile.first_step(s); tile.has(step); tile.advance(s, step)) {
            work += t.step;
            now += t.step;
            double& turn = passed[{tile.b, step.h, step.tile}];
            double mine = tile.turn(s, step) == 0 ? 0 : turn + t.seen;
            if (tile.has_last_turn(s, step)) {
                now = std::max(now, mine) + t.finish;
                work += t.finish;
            } else {
                now = std::max(now, dq_empty);
                dq_empty = turn = std::max(now, mine) + t.add;
            }
        }
        free.give(std::max(now, dq_empty) + t.ends / 2);
    }
    return work / multiprocessors / free.last();
}

AttentionShape heads_of(int B, int T, int NH, int NKV, int HS) {
    return self_attention_shape(B, T, NH, NKV, HS, 0, nullptr);
}

// Shapes that are hard for the order: groups, a short last tile, windows, documents, queries of only some
// positions.
std::vector<Case> hard_cases() {
    return {{2, 1000, 4, 2, 128},
            {3, 700, 3, 3, 64},
            {1, 900, 2, 1, 64, 200},
            {2, 640, 2, 1, 128, 0, {1, 130, 131, 500}},
            Case{1, 900, 2, 2, 128}.part(300, 333)};
}

constexpr int cards[] = {132, 116};  // all multiprocessors of an H100, and those that 16 NCCL blocks leave

}  // namespace

TEST_CASE("each tile of queries is one ticket's, and those of a section are taken from the longest to the "
          "shortest") {
    for (const Case& c : hard_cases())
        for (int section : {1, 2, 5}) {
            CAPTURE(c.name());
            std::vector<int> documents = c.doc_start();
            AttentionShape s = c.shape(documents.data());
            std::map<std::tuple<int, int, int>, int> taken;
            int last_start = 0, last_section = -1;
            for (int ticket = 0; ticket < HopperQueries::tickets(s); ticket++) {
                auto tile = HopperQueries::of(s, section, ticket);
                taken[{tile.b, tile.h, tile.start}]++;
                int in = (tile.b * s.NH + tile.h) / section;
                CHECK((in > last_section || (in == last_section && tile.start <= last_start)));
                last_section = in, last_start = tile.start;
                CHECK(tile.first_keys * hopper_keys <= s.first_key(tile.b, tile.start));
                CHECK(tile.last_keys <=
                      s.position(std::min(tile.start + hopper_queries, s.Tq) - 1) / hopper_keys);
            }
            CHECK((int)taken.size() == HopperQueries::tickets(s));
        }
}

TEST_CASE(
    "a block of the backward pass waits only for earlier tickets, and each tile of dq has a last turn") {
    for (const Case& c : hard_cases())
        for (int section : {1, 2, 5}) {
            CAPTURE(c.name());
            std::vector<int> documents = c.doc_start();
            AttentionShape s = c.shape(documents.data());
            using Work = KeyTileWork<128, 64>;
            std::map<std::tuple<int, int, int>, int> turns;  // turns taken so far
            int finished = 0;
            for (int ticket = 0; ticket < Work::tickets(s); ticket++) {
                auto tile = Work::of(s, section, ticket);
                for (auto step = tile.first_step(s); tile.has(step); tile.advance(s, step)) {
                    int& taken = turns[{tile.b, step.h, step.tile}];
                    CHECK(tile.turn(s, step) == taken++);
                    finished += tile.has_last_turn(s, step);
                }
            }
            CHECK((int)turns.size() == s.B * s.NH * ceil_div(s.Tq, 64));
            CHECK(finished == (int)turns.size());
        }
}

// comm/machine_rates.h uses these shares.
TEST_CASE("multiprocessors are as busy as the prediction of a step takes them to be") {
    for (auto [B, NH] : {std::pair{64, 12}, {32, 25}}) {
        AttentionShape s = heads_of(B, 1024, NH, NH, 64);
        CHECK(forward_share<64>(s, 132) >= 0.98);
        CHECK(backward_share<64>(s, 132) >= 0.9);
    }
    AttentionShape s = heads_of(1, 8192, 32, 8, 128);
    CHECK(forward_share<128>(s, 132) >= 0.98);
    CHECK(backward_share<128>(s, 132) >= 0.97);
}

TEST_CASE("multiprocessors are busy in both passes") {
    for (int multiprocessors : cards) {
        CAPTURE(multiprocessors);
        for (auto [B, T, NH, NKV] : {std::array{1, 8192, 64, 8},
                                     {1, 8192, 32, 8},
                                     {2, 8192, 32, 8},
                                     {4, 8192, 32, 8},
                                     {1, 8192, 16, 16},
                                     {2, 8192, 16, 16},
                                     {4, 4096, 16, 16},
                                     {8, 2048, 16, 16},
                                     {2, 4096, 32, 8},
                                     {8, 2048, 32, 8}}) {
            CAPTURE(T);
            CAPTURE(NH);
            CAPTURE(B);
            AttentionShape s = heads_of(B, T, NH, NKV, 128);
            CHECK(forward_share<128>(s, multiprocessors) >= 0.96);
            CHECK(backward_share<128>(s, multiprocessors) >= 0.96);
        }
        for (auto [B, NH] : {std::pair{32, 12}, {64, 12}, {16, 25}}) {
            CAPTURE(NH);
            CAPTURE(B);
            AttentionShape s = heads_of(B, 1024, NH, NH, 64);
            CHECK(forward_share<64>(s, multiprocessors) >= 0.96);
            CHECK(backward_share<64>(s, multiprocessors) >= 0.88);
        }
    }
}

#endif
