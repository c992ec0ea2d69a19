// The first rank's view of all ranks: the spread of a step's times, and which ranks are slow.
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/run/rank_times.h"
#include "test/support/testing.h"

namespace {

using enum StepPhase;

constexpr int steps = 20;

// Times with random noise of a few percent.
struct Run {
    std::vector<RankPlace> places;
    std::vector<double> stretched;  // by rank: a factor on the duration of its passes
    uint64_t state = 1;

    double noise() {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return 1 + 0.04 * ((double)(state >> 40) / (1 << 24) - 0.5);
    }

    StepTimes times(int step, size_t rank) {
        StepTimes times;
        times.step = step, times.detailed = true;
        double layers = places[rank].layers, slow = stretched[rank];
        times[forward] = (float)(0.010 * layers * slow * noise());
        times[backward] = (float)(0.020 * layers * slow * noise());
        times[optimizer] = (float)(0.002 * noise());
        double most = 0;  // the slowest sets the pace
        for (size_t other = 0; other < places.size(); other++)
            most = std::max(most, 0.030 * places[other].layers * stretched[other]);
        times[wait_gradients] = (float)std::max(0.0, most - times.own_work());
        times.seconds = (float)(most + 0.003);
        times.complete();
        return times;
    }
};

Run run_of(int stages, int data_ranks) {
    Run run;
    for (int stage = 0; stage < stages; stage++) {
        for (int data = 0; data < data_ranks; data++)
            run.places.push_back({stage % 2 ? "b" : "a",
                                  PerAxis().with(Axis::shard, data).with(Axis::pipeline, stage), 4,
                                  stage > 0 && stage < stages - 1});
    }
    run.stretched.assign(run.places.size(), 1);
    return run;
}

std::vector<SlowRank> slow_ranks_of(Run run, int count = steps) {
    RankTimes all(run.places, count);
    for (int step = 0; step < count; step++) {
        CHECK(!all.is_due());
        for (size_t rank = run.places.size(); rank-- > 0;) {
            auto line = all.add((int)rank, run.times(step, rank));
            CHECK((bool)line == (rank == 0));
        }
    }
    REQUIRE(all.is_due());
    all.take_interval();
    return all.slow();
}

}  // namespace

TEST_CASE("the median is the one in the middle, or between the two") {
    CHECK(median_of({3, 1, 2}) == 2);
    CHECK(median_of({4, 1, 3, 2}) == 2.5);
    CHECK(median_of({7}) == 7);
    Spread spread = spread_of({5, 1, 9, 3});
    CHECK(spread.least == 1);
    CHECK(spread.median == 4);
    CHECK(spread.most == 9);
    CHECK(spread.rank == 2);
}

TEST_CASE("a step is told when all ranks have told theirs, with the slowest rank of each phase") {
    Run run = run_of(1, 3);
    RankTimes all(run.places, steps);
    auto times = [](float forward_time, float wait) {
        StepTimes t;
        t.step = 7, t.detailed = true, t.seconds = 0.1f;
        t[forward] = forward_time, t[wait_gradients] = wait;
        t.complete();
        return t;
    };
    CHECK(!all.add(2, times(0.030f, 0.05f)));
    CHECK(!all.add(0, times(0.020f, 0.06f)));
    auto line = all.add(1, times(0.050f, 0.03f));
    REQUIRE(line);
    CHECK((*line)["step"] == 7);
    CHECK((*line)["timings"]["ms"]["forward"] == nlohmann::json::array({20, 30, 50, 1}));
    CHECK((*line)["timings"]["ms"]["wait_gradients"] == nlohmann::json::array({30, 50, 60, 0}));
    CHECK((*line)["timings"]["waited"] == nlohmann::json::array({0.3, 0.5, 0.6, 0}));
    CHECK(!(*line)["timings"]["ms"].contains("backward"));  // no rank ran it
}

TEST_CASE("a rank that computes long while its peers wait is named, with the phase") {
    for (auto [stages, data_ranks, slow] : {std::array{1, 8, 5}, {1, 2, 1}, {2, 4, 6}, {4, 2, 3}}) {
        CAPTURE(stages);
        CAPTURE(data_ranks);
        Run run = run_of(stages, data_ranks);
        run.stretched[(size_t)slow] = 1.3;
        std::vector<SlowRank> found = slow_ranks_of(run);
        REQUIRE(found.size() == 1);
        CHECK(found[0].rank == slow);
        CHECK(found[0].phase == backward);
        CHECK(found[0].ratio == doctest::Approx(1.3 * 30 / 32 + 2.0 / 32).epsilon(0.05));
    }
}

TEST_CASE("a rank a tenth slower than its peers is named when it has been that for long") {
    Run run = run_of(1, 8);
    run.stretched[5] = 1.15;
    RankTimes all(run.places, steps);
    for (int step = 1; step <= 12 * steps; step++) {
        if (step == 6 * steps) run.stretched[5] = 1;
        if (step == 7 * steps) run.stretched[5] = 1.15;
        for (size_t rank = 0; rank < 8; rank++) all.add((int)rank, run.times(step, rank));
        if (!all.is_due()) continue;
        all.take_interval();
        CAPTURE(step);
        int in_a_row = step <= 6 * steps ? step : std::max(step - 7 * steps, 0);
        CHECK(all.slow().size() == (in_a_row >= 3 * steps));
    }
}

TEST_CASE("stages of one rank are compared by the layer, but for the ends") {
    Run run = run_of(6, 1);
    run.places[2].layers = 8;  // twice the layers take twice the time, as they should
    CHECK(slow_ranks_of(run).empty());
    run.stretched[3] = 2.5;
    std::vector<SlowRank> found = slow_ranks_of(run);
    REQUIRE(found.size() == 1);
    CHECK(found[0].rank == 3);
    run.stretched[3] = 1, run.stretched[0] = 2.5;  // stage 0 also has the embedding, so it is not compared
    CHECK(slow_ranks_of(run).empty());
}

TEST_CASE("a healthy run names nobody, nor does one freeze, nor a rank for which nobody waits") {
    for (int seed = 1; seed <= 20; seed++) {
        Run run = run_of(seed % 3 + 1, 8);
        run.state = (uint64_t)seed * 977;
        CHECK(slow_ranks_of(run).empty());
    }
    Run run = run_of(1, 4);
    RankTimes frozen(run.places, steps), unhurried(run.places, steps);
    for (int step = 0; step < steps; step++) {
        for (size_t rank = 0; rank < 4; rank++) {
            StepTimes times = run.times(step, rank);
            StepTimes freezes = times, alone = times;
            if (rank == 2 && step == 9) freezes[forward] += 0.5f;
            if (rank == 2) alone[forward] *= 2;  // yet no rank waited longer
            frozen.add((int)rank, freezes);
            unhurried.add((int)rank, alone);
        }
    }
    frozen.take_interval(), unhurried.take_interval();
    CHECK(frozen.slow().empty());
    CHECK(unhurried.slow().empty());
}

TEST_CASE("an interval has the means of every rank, and the next one begins anew") {
    Run run = run_of(1, 2);
    RankTimes all(run.places, 2);
    auto tell = [&](int step, float seconds) {
        for (int rank = 0; rank < 2; rank++) {
            StepTimes times;
            times.step = step, times.detailed = true, times.seconds = 0.1f;
            times[forward] = seconds * (float)(rank + 1);
            all.add(rank, times);
        }
    };
    tell(1, 0.01f), tell(2, 0.03f);
    nlohmann::json line = all.take_interval();
    CHECK(line["step"] == 2);
    CHECK(line["steps"] == 2);
    CHECK(line["ms"]["forward"] == nlohmann::json::array({20, 40}));
    CHECK(line["step_ms"] == nlohmann::json::array({100, 100}));
    CHECK(!line["ms"].contains("save"));
    tell(3, 0.05f);
    CHECK(!all.is_due());
    CHECK(all.has_any());
    CHECK(all.take_interval()["ms"]["forward"] == nlohmann::json::array({50, 100}));
    CHECK(!all.has_any());
}

TEST_CASE("a slow rank is told in words and for the log") {
    Run run = run_of(1, 4);
    run.stretched[3] = 1.5;
    RankTimes all(run.places, steps);
    for (int step = 0; step < steps; step++)
        for (size_t rank = 0; rank < 4; rank++) all.add((int)rank, run.times(step, rank));
    all.take_interval();
    REQUIRE(all.slow().size() == 1);
    CHECK(all.slow_text(all.slow()[0]).starts_with("rank 3 on a: 1.4"));
    CHECK(all.slow_text(all.slow()[0]).ends_with(" times as slow as its peers, mostly in backward"));
    CHECK(all.slowest_text() == "slowest rank 3 (backward 1.5x)");
    CHECK(all.slow_record()[0]["rank"] == 3);
    CHECK(all.slow_record()[0]["phase"] == "backward");
}
