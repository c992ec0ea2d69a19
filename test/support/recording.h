/*
Runs work under the recorder, for tests and benchmarks.
*/
#pragma once

#include <thread>
#include <vector>

#include "comm/recorder.h"

// The recorder's account of work(), recorded as one step on the compute stream, once that step has completed.
struct RecordedWork {
    StepTimes times;
    std::vector<FlightEntry> entries;  // in the order in which they ended on their streams
    double origin = 0;                 // zero point of their times, on the host's clock

    std::vector<FlightEntry> passes() const {
        std::vector<FlightEntry> result;
        for (const FlightEntry& entry : entries)
            if (is_pass(entry.operation)) result.push_back(entry);
        return result;
    }
};

template <typename Work>
RecordedWork recorded_work(cudaStream_t compute, Work&& work, bool detailed = true) {
    TraceSession recording(compute, {});
    recorder.keep_entries(true);
    recorder.begin_step(0, detailed);
    work();
    recorder.end_step();
    for (;;) {
        recorder.poll();
        if (auto step = recorder.take_step())
            return {step->times, recorder.take_kept(), seconds_now() - recorder.host_time()};
        std::this_thread::yield();
    }
}
