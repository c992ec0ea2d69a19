/*
Shared by the benchmarks of several ranks: a model that is partitioned over them, and its steps over links
that are slowed down.
*/
#pragma once

#include <array>
#include <numeric>

#include "test/bench/bench.h"

// Sets the links' speed in bytes per second; 0 means full speed.
inline void set_link([[maybe_unused]] double speed) {
#ifdef RANKS_USE_NCCL
    fail("bench_parallel: slows down the host transport, and this program uses NCCL; build with COMM=mpi");
#else
    host_link_speed(speed / 1e9);
#endif
}

class TimedModel {
public:
    TimedModel(const World& world, const Mesh& mesh, const ModelConfig& config, const Workload& workload,
               const ZeroSettings& settings, const Layout& layout)
        : g(config, workload, settings, mesh, layout),
          world_(world),
          batch_(g, config.vocab_size),
          micro_batches_(layout.pipeline.micro_batches) {
        initialize(g.state, 1);
    }

    // Runs a step and returns its seconds. This and sent() return the same number on all ranks.
    double seconds(double link) {
        world_.barrier();
        reset_traffic();
        set_link(link);
        double seconds = step_seconds(g, *batch_, ++step_, micro_batches_);
        g.state.synchronize();
        world_.barrier();
        set_link(0);
        world_.broadcast(&seconds, sizeof seconds);
        for (size_t kind = 0; kind < sent_.size(); kind++) sent_[kind] = (double)bytes_sent((Traffic)kind);
        world_.broadcast(sent_.data(), sizeof sent_);
        return seconds;
    }

    // Returns the seconds of the forward and backward passes only, without the end of a step: the same number
    // on all ranks.
    double pass_seconds() {
        std::vector<double> seconds;
        for (int i = 0; i < 3; i++) {
            world_.barrier();
            zero_gradients(g);
            cudaCheck(cudaStreamSynchronize(g.stream));
            double start = seconds_now();
            accumulate_gradients(
                g, micro_batches_, [&](int, int) { return *batch_; }, 1, false);
            g.state.synchronize();
            seconds.push_back(seconds_now() - start);
        }
        double typical = median(seconds);
        world_.broadcast(&typical, sizeof typical);
        return typical;
    }

    // Bytes that the first rank sent in the last step.
    double sent(Traffic kind) const { return sent_[(size_t)kind]; }
    double sent() const { return std::accumulate(sent_.begin(), sent_.end(), 0.0); }

    Gpt g;

private:
    const World& world_;
    RandomBatch batch_;
    int micro_batches_, step_ = 0;
    std::array<double, traffic_names.size()> sent_ = {};
};
