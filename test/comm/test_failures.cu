/*
The simulation of failures (data/run/failures.h), checked against derived values and invariants.
*/
// devices: cpu
// seconds: 1
#include "data/run/failures.h"
#include "comm/save_clock.h"
#include "test/support/testing.h"

namespace {

constexpr double long_run = 300 * seconds_of_day;

FailureModel large_cluster() {
    FailureModel m;
    m.nodes = 2048;
    m.save_interval = 1800;
    return m;
}

}  // namespace

TEST_CASE("failures: those of Llama 3 are all counted") {
    double count = 0;
    for (const FailureCause& cause : failure_causes) count += cause.count;
    CHECK(count == 419);
    FailureRates observed = observed_failures();
    CHECK(1000 * observed.all() == doctest::Approx(3.79).epsilon(0.001));
    const double counts[] = {306, 49, 64};  // machines, the network and software
    for (int part = 0; part < failing_parts; part++) {
        CHECK(observed.of[part] / observed.all() == doctest::Approx(counts[part] / 419));
        CHECK(failures_like_observed(2).of[part] == doctest::Approx(2 * counts[part] / 419));
    }
    CHECK(1 / large_cluster().per_second() / 3600 == doctest::Approx(3.09).epsilon(0.001));
}

TEST_CASE("failures: without any, only checkpoints take time") {
    FailureModel m = large_cluster();
    m.per_node_day = {}, m.save_stall = 20;
    CHECK(effective_training_time(m, 1800 * 50) == doctest::Approx(1800.0 / 1820));
    m.save_interval = HUGE_VAL;
    CHECK(effective_training_time(m, 12345) == doctest::Approx(1));
}

// Periods between failures are exponentially distributed. In a period that begins with a wait w, the number
// of checkpoints is geometrically distributed: on average, tau / (exp(rate (tau + stall)) - 1) seconds are
// kept, times the probability that the period outlasts w.
TEST_CASE("failures: the share that trains is the expected one") {
    for (double tau : {300.0, 1800.0, 7200.0}) {
        for (double restart : {100.0, 1500.0}) {
            CAPTURE(tau);
            CAPTURE(restart);
            FailureModel m = large_cluster();
            m.save_interval = tau, m.save_stall = 5, m.save_time = 0;
            m.restart = restart, m.replacement = 0;
            double rate = m.per_second(), outlasts = 0;
            for (double hangs : {share_of_hangs, 1 - share_of_hangs})
                outlasts +=
                    hangs * std::exp(-rate * (restart + (hangs == share_of_hangs ? m.time_out : m.notice)));
            double want = rate * outlasts * tau / (std::exp(rate * (tau + m.save_stall)) - 1);
            CHECK(effective_training_time(m, long_run) == doctest::Approx(want).epsilon(0.005));
        }
    }
}

TEST_CASE("failures: each remedy helps, and all of them more") {
    FailureModel m = large_cluster();
    double before = effective_training_time(m, long_run), best = before;
    CHECK(before == effective_training_time(m, long_run));
    FailureModel all = m;
    auto check = [&](auto&& change) {
        FailureModel other = m;
        change(other);
        CHECK(effective_training_time(other, long_run) > before);
        change(all);
        double share = effective_training_time(all, long_run);
        CHECK(share > best);
        best = share;
    };
    check([](FailureModel& f) { f.save_interval = 120; });
    check([](FailureModel& f) { f.time_out = 60; });
    check([](FailureModel& f) { f.restart = 60; });
    check([](FailureModel& f) { f.spares = 4; });
    check([](FailureModel& f) { f.elastic = true, f.data_ranks = 128; });
    check([](FailureModel& f) { f.per_node_day = f.per_node_day.times(0.5); });
    CHECK(best < 1);
}

TEST_CASE("failures: each part fails at its own rate, and only machines are replaced") {
    FailureRates rates = {{3, 1, 2}};
    int struck[failing_parts] = {};
    constexpr int draws = 6000;
    for (int i = 0; i < draws; i++) struck[(int)rates.part(i / (double)draws)]++;
    CHECK(struck[0] == 3000);
    CHECK(struck[1] == 1000);
    CHECK(struck[2] == 2000);
    CHECK(FailureRates{{0, 0, 1}}.part(0) == FailingPart::software);
    CHECK(FailureRates{{1, 0, 0}}.part(0.999999) == FailingPart::machine);

    FailureModel m = large_cluster();
    auto share = [&](FailureRates per_node_day, double replacement) {
        m.per_node_day = per_node_day, m.replacement = replacement;
        return effective_training_time(m, long_run);
    };
    double all = observed_failures().all();
    for (FailingPart part : {FailingPart::network, FailingPart::software}) {
        FailureRates alone;
        alone.of[(int)part] = all;
        CHECK(share(alone, 0) == share(alone, 7200));
        CHECK(share(alone, 7200) > share({{all, 0, 0}}, 7200));
        CHECK(share(alone, 7200) > share(observed_failures(), 7200));
    }
    CHECK(share({{all, 0, 0}}, 0) > share({{all, 0, 0}}, 7200));
}

TEST_CASE("failures: a run that never gets to its next checkpoint does not end") {
    FailureModel m = large_cluster();
    m.save_interval = 10 * seconds_of_day;
    CHECK(effective_training_time(m, 100 * seconds_of_day) == 0);
    m.save_interval = HUGE_VAL;
    CHECK(effective_training_time(m, 100 * seconds_of_day) == 0);
}

// ----------------------------------------------------------------------------
// how often to save

TEST_CASE("the best interval is where stalls and what failures cost are least together") {
    for (double between : {3600.0, 3.1 * 3600, 1e6}) {
        for (double stall : {0.05, 1.0, 30.0}) {
            CAPTURE(between);
            CAPTURE(stall);
            // the duration of a run with such failures, per unit of work, by Daly's model
            auto cost = [&](double interval) {
                return between / interval * std::expm1((interval + stall) / between);
            };
            double best = best_interval(stall, between);
            for (double other : {0.8, 0.9, 1.1, 1.25}) CHECK(cost(best) < cost(other * best));
        }
    }
    CHECK(best_interval(100, 40) == 40);
    // Llama 3 on 16,384 devices: a failure every 3.1 hours
    SaveClock clock({Interval::best, 0}, Options().failure_rate, 16384);
    SaveReport report;
    report.stalled = 0.5, report.seconds = 20;
    clock.learn(report);
    CHECK(std::abs(clock.seconds() - std::sqrt(2 * 0.5 * 3.1 * 3600)) < 2);
}

TEST_CASE("checkpoints that are on disk at one time") {
    Options o;
    o.save_every = {Interval::steps, 10}, o.keep = 2;
    CHECK(most_checkpoints(o, 100) == 3);
    CHECK(most_checkpoints(o, 9) == 1);
    CHECK(most_checkpoints(o, 10) == 2);
    o.keep_every = 50;
    CHECK(most_checkpoints(o, 1000) == 23);
    o.keep = 0;
    CHECK(most_checkpoints(o, 1000) == 101);
    o.save_every = {Interval::best, 0};
    CHECK(most_checkpoints(o, 1000) == 1);
    o.keep = 2, o.keep_every = 0;
    CHECK(most_checkpoints(o, 1000) == 3);
    o.save_every = {Interval::steps, 0};
    CHECK(most_checkpoints(o, 1000) == 1);
}

TEST_CASE("a run saves after so many steps, after so much time, or as its saves and failures want") {
    double now = seconds_now();
    SaveClock steps({Interval::steps, 10}, 1, 1), never({Interval::steps, 0}, 1, 1),
        minutes({Interval::seconds, 600}, 1, 1);
    CHECK(steps.due(20));
    CHECK(!steps.due(21));
    CHECK(!never.due(20));
    CHECK(!minutes.due(20, now + 590));
    CHECK(minutes.due(20, now + 610));
    minutes.restart(now + 610);
    CHECK(!minutes.due(21, now + 1200));
    CHECK(minutes.due(21, now + 1211));
    SaveReport report;
    report.stalled = 1, report.seconds = 10;
    for (SaveClock* clock : {&steps, &never, &minutes}) {
        CHECK(!clock->learn(report));
        CHECK(clock->summary() == "");
    }

    // the next save in words, during a step; empty if that is the save at the end, which every run makes
    CHECK(steps.next(12, 100) == "in 8 steps");
    CHECK(steps.next(19, 100) == "in 1 step");
    CHECK(steps.next(20, 100) == "after this step");
    CHECK(steps.next(95, 100) == "");
    CHECK(never.next(12, 100) == "");
    CHECK(minutes.next(12, 100, now + 610 + 180) == "in 7 min");
    CHECK(minutes.next(12, 100, now + 610 + 700) == "in 0 s");

    // ten minutes until the cost of a save is known, then between twice a save's duration and an hour
    SaveClock one({Interval::best, 0}, 0.474, 1), many({Interval::best, 0}, 0.474, 100000),
        none({Interval::best, 0}, 0, 8);
    CHECK(one.seconds() == 600);
    CHECK(none.seconds() == 600);
    CHECK(one.summary() ==
          "every 10m00s: no save has been measured yet, a failure every 2110 days on 1 device");
    for (SaveClock* clock : {&one, &many, &none}) CHECK(clock->learn(report));
    CHECK(one.seconds() == 3600);
    CHECK(none.seconds() == 3600);
    CHECK(!one.learn(report));
    double usual = many.seconds();
    CHECK(usual > 55);
    CHECK(usual < 61);
    report.seconds = 100;
    CHECK(many.learn(report));
    CHECK(many.seconds() == 200);
    CHECK(many.summary() == "every 3m20s: training waits 1.000 s for a save, which takes 100.0 s to write, a "
                            "failure every 30m23s on 100000 devices");
}
