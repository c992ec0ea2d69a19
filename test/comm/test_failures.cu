/*
The simulation of failures (comm/failures.h) against what can be worked out, and what must always hold.
*/
// devices: cpu
// seconds: 1
#include "comm/failures.h"
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
    CHECK(count_of_failures(false) == 419);
    CHECK(1000 * failures_per_node_day == doctest::Approx(3.79).epsilon(0.001));
    CHECK(1 / large_cluster().per_second() / 3600 == doctest::Approx(3.09).epsilon(0.001));
}

TEST_CASE("failures: without any, only checkpoints take time") {
    FailureModel m = large_cluster();
    m.per_node_day = 0, m.save_stall = 20;
    CHECK(effective_training_time(m, 1800 * 50) == doctest::Approx(1800.0 / 1820));
    m.save_interval = HUGE_VAL;
    CHECK(effective_training_time(m, 12345) == doctest::Approx(1));
}

// Periods between failures are exponential. Of one that begins with a wait w, the number of checkpoints is
// geometric: kept are tau / (exp(rate (tau + stall)) - 1) on average, times the chance that it outlasts w.
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
    check([](FailureModel& f) { f.per_node_day /= 2; });
    CHECK(best < 1);
}

TEST_CASE("failures: a run that never gets to its next checkpoint does not end") {
    FailureModel m = large_cluster();
    m.save_interval = 10 * seconds_of_day;
    CHECK(effective_training_time(m, 100 * seconds_of_day) == 0);
    m.save_interval = HUGE_VAL;
    CHECK(effective_training_time(m, 100 * seconds_of_day) == 0);
}
