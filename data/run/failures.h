/*
Estimates the effective training time of a run on many machines, which is the share of its time that makes
lasting progress, by a Monte Carlo simulation of failures, their cost, and the measures against them.

A failure ends the step under way, and all training since the last checkpoint is lost. The failure is noticed,
a broken machine is replaced, and the processes restart and load the checkpoint:

    train | save | train | save | train x  noticed | replaced | started, loaded | train ...
                 '------- lost --------'

Machines, the network and software fail at separate rates. The causes and their frequencies are those of 54
days of training Llama 3 on 16,384 devices (Llama Team, "The Llama 3 Herd of Models", 2024, table 5). Only a
failed machine needs replacement: traffic is routed around a failed part of the network. One failure in ten is
a hang, which is noticed only by a time-out (Wan et al., "Robust LLM Training Infrastructure at ByteDance",
2025).
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <vector>

#include "kernels/random.cuh"  // philox

// ----------------------------------------------------------------------------
// parts that fail

enum class FailingPart { machine, network, software };
constexpr int failing_parts = 3;
constexpr const char* name_of_part[failing_parts] = {"machines", "the network", "software"};

struct FailureCause {
    const char* name;
    double count;  // in those 54 days
    FailingPart part;
};

constexpr FailureCause failure_causes[] = {{"devices", 196, FailingPart::machine},
                                           {"memory of devices", 72, FailingPart::machine},
                                           {"software", 54, FailingPart::software},
                                           {"network", 42, FailingPart::network},
                                           {"maintenance of hosts", 32, FailingPart::machine},
                                           {"wrong results", 6, FailingPart::machine},
                                           {"time-outs of messages", 7, FailingPart::network},
                                           {"others", 10, FailingPart::software}};
constexpr double observed_node_days = 54 * 2048.0;
constexpr double share_of_hangs = 0.1;

// Failures per node and day, for each part.
struct FailureRates {
    double of[failing_parts] = {};

    constexpr double all() const {
        double sum = 0;
        for (double rate : of) sum += rate;
        return sum;
    }
    constexpr FailureRates times(double factor) const {
        FailureRates scaled = *this;
        for (double& rate : scaled.of) rate *= factor;
        return scaled;
    }
    // Returns the part that fails next, chosen by a number that is uniform in [0, 1).
    FailingPart part(double uniform) const {
        int part = 0;
        for (double left = uniform * all(); part < failing_parts - 1 && left >= of[part]; part++)
            left -= of[part];
        return FailingPart(part);
    }
};

constexpr FailureRates observed_failures() {
    FailureRates rates;
    for (const FailureCause& cause : failure_causes)
        rates.of[(int)cause.part] += cause.count / observed_node_days;
    return rates;
}
// Returns rates that sum to `per_node_day`, in the observed proportions.
constexpr FailureRates failures_like_observed(double per_node_day) {
    return observed_failures().times(per_node_day / observed_failures().all());
}

// ----------------------------------------------------------------------------
// a run

constexpr double seconds_of_day = 86400;

// Times in seconds.
struct FailureModel {
    int nodes = 1;
    FailureRates per_node_day = observed_failures();
    double save_interval = HUGE_VAL;  // training time between checkpoints
    double save_stall = 1;            // time that training pauses for each checkpoint
    double save_time = 60;            // until a checkpoint is on disk; training continues meanwhile
    double notice = 20;               // until the end of a process is noticed
    double time_out = 600;            // until a hang is noticed
    double restart = 300;             // processes start, connect and load
    double replacement = 1800;        // until a new machine is available, if no spare is left
    double repair = seconds_of_day;   // until a spare that was used is replaced
    int spares = 0;                   // machines held in reserve
    int data_ranks = 1;
    bool elastic = false;  // without a spare, the other data ranks continue until a new machine arrives

    double per_second() const { return nodes * per_node_day.all() / seconds_of_day; }
};

// Training without a failure, at a fraction of full speed, with checkpoints. Work is measured in seconds at
// full speed.
struct Uninterrupted {
    const FailureModel& m;
    double speed;

    double round() const { return m.save_interval / speed + m.save_stall; }
    double rounds(double seconds) const { return std::isinf(round()) ? 0 : std::floor(seconds / round()); }
    double trained(double seconds) const {
        double whole = rounds(seconds), rest = seconds - (whole > 0 ? whole * round() : 0);
        return (whole > 0 ? whole * m.save_interval : 0) + std::min(rest * speed, m.save_interval);
    }
    double saved(double seconds) const {
        double whole = rounds(std::max(seconds - m.save_time, 0.0));
        return whole > 0 ? whole * m.save_interval : 0;
    }
    double time_of(double work) const {
        return work / speed + std::floor(work / m.save_interval) * m.save_stall;
    }
};

// Returns the time in seconds that a run with `training` seconds of work takes, or infinity if it never ends.
// Runs with different numbers are independent.
inline double simulate_run(const FailureModel& m, double training, uint64_t number) {
    const uint64_t key = random_key(number, "failures");
    const double hopeless = 100 * training;
    double now = 0, kept = 0, waiting = 0, ran = 0;  // waiting: until training resumes; ran: since it did
    int spares = m.spares, missing = 0;              // missing: data ranks
    std::priority_queue<double, std::vector<double>, std::greater<>> returns;  // when machines return
    uint64_t draws = 0;
    while (now < hopeless) {
        Random4 random = philox(key, draws++);
        double fails =
            m.per_second() > 0 ? -std::log(1 - random_uniform(random.at[0])) / m.per_second() : HUGE_VAL;
        double returned = returns.empty() ? HUGE_VAL : std::max(returns.top() - now, 0.0);
        Uninterrupted train{m, 1 - (double)missing / m.data_ranks};
        double period = std::min(fails, returned), trains = std::max(period - waiting, 0.0);
        double needed = train.time_of(training - kept) - ran;
        if (needed <= trains) return now + waiting + needed;
        now += period, ran += trains;
        waiting = std::max(waiting - period, 0.0);
        if (returned <= fails) {
            returns.pop();
            if (missing == 0) {
                spares++;
            } else {  // it joins the others at a checkpoint made for it
                missing--;
                kept += train.trained(ran), ran = 0;
                waiting += m.restart;
            }
            continue;
        }
        kept += train.saved(ran), ran = 0;
        waiting = m.restart + (random_uniform(random.at[1]) < share_of_hangs ? m.time_out : m.notice);
        if (m.per_node_day.part(random_uniform(random.at[2])) != FailingPart::machine) continue;
        if (spares > 0) {
            spares--;
            returns.push(now + m.repair);
        } else if (m.elastic && missing + 1 < m.data_ranks) {
            missing++;
            returns.push(now + m.replacement);
        } else {
            waiting += m.replacement;
        }
    }
    return HUGE_VAL;
}

// Returns the share of a run's time that makes lasting progress, averaged over 100 runs, or over fewer that
// have 100,000 failures together; 0 if any would not end.
inline double effective_training_time(const FailureModel& m, double training) {
    constexpr int most_runs = 100;
    constexpr double enough_failures = 1e5;
    double all = 0;
    int runs = 0;
    while (runs < most_runs && all * m.per_second() < enough_failures)
        all += simulate_run(m, training, runs++);
    return runs * training / all;
}
