// The recorder: the kinds of work, when the device runs it, and the phase of a step that it is counted in.
// devices: cpu simt-bf16 cuda thread
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <optional>
#include <string>

#include "comm/recorder.h"
#include "comm/mesh.h"
#include "test/support/recording.h"
#include "test/support/testing.h"

namespace {

// Work on the stream that takes equally long on every device.
void sleep_on(cudaStream_t stream, double seconds) {
    auto sleep = [](void* time) { usleep((useconds_t)(1e6 * *(double*)time)); };
    static std::deque<double> times;
    times.push_back(seconds);
    cudaCheck(cudaLaunchHostFunc(stream, sleep, &times.back()));
}

const FlightEntry& only(const std::vector<FlightEntry>& entries, Operation operation) {
    const FlightEntry* found = nullptr;
    for (const FlightEntry& entry : entries) {
        if (entry.operation != operation) continue;
        REQUIRE(!found);
        found = &entry;
    }
    REQUIRE(found);
    return *found;
}

}  // namespace

TEST_CASE("a pass counts without what it waits for others, and what is left of a step is other") {
    cudaStream_t stream = test_stream();
    auto record = [&] {
        return recorded_work(stream, [&] {
            recorder.at_micro_batch(3, 1);
            recorder.at_unit(7);
            {
                TraceSpan pass(Operation::forward, stream);
                sleep_on(stream, 0.02);
                TraceSpan wait(Traffic::activations, stream);
                sleep_on(stream, 0.03);
            }
            {
                TraceSpan wait(Traffic::pipeline, stream);
                sleep_on(stream, 0.01);
            }
            sleep_on(stream, 0.015);
        });
    };
    constexpr int attempts = 6;  // one suffices on an idle machine
    auto is_late = [](const auto& times) { return times.seconds > 0.075 + 0.3; };
    RecordedWork work = record();
    for (int attempt = 1; attempt < attempts && is_late(work.times); attempt++) work = record();
    auto is_about = [&](StepPhase phase, double seconds) {
        CAPTURE(step_phase_names[(size_t)phase]);
        CHECK(work.times[phase] >= 0.999 * seconds);
        CHECK(work.times[phase] < seconds + 0.3);  // allows for a busy machine
    };
    is_about(StepPhase::forward, 0.02);
    is_about(StepPhase::wait_tensor, 0.03);
    is_about(StepPhase::wait_pipeline, 0.01);
    is_about(StepPhase::other, 0.015);
    CHECK(work.times[StepPhase::backward] == 0);
    float sum = 0;
    for (size_t phase = 0; phase <= (size_t)StepPhase::other; phase++) sum += work.times.phases[phase];
    CHECK(sum == doctest::Approx(work.times.seconds).epsilon(1e-4));
    const FlightEntry& pass = only(work.entries, Operation::forward);
    CHECK(pass.micro_batch == 3);
    CHECK(pass.chunk == 1);
    CHECK(pass.unit == 7);
    CHECK(pass.end - pass.begin >= 0.05);
    const FlightEntry& step = only(work.entries, Operation::step);
    CHECK(step.begin <= pass.begin);
    CHECK(step.end >= pass.end);
}

TEST_CASE("without details passes are recorded, and waits are part of them") {
    cudaStream_t stream = test_stream();
    RecordedWork work = recorded_work(
        stream,
        [&] {
            TraceSpan pass(Operation::backward, stream);
            TraceSpan wait(Traffic::activations, stream);
            sleep_on(stream, 0.01);
        },
        false);
    CHECK(!work.times.detailed);
    CHECK(work.times[StepPhase::backward] >= 0.00999);
    CHECK(work.times[StepPhase::wait_tensor] == 0);
    CHECK(work.entries.size() == 2);  // the step and its work
}

TEST_CASE("what the host waits between two steps is the next one's") {
    TraceSession recording(test_stream(), {});
    {
        HostSpan save(Operation::save);
        usleep(5000);
    }
    recorder.begin_step(4, true);
    {
        HostSpan data(Operation::data);
        usleep(3000);
    }
    recorder.end_step();
    std::optional<RecordedStep> step;
    while (!step) recorder.poll(), step = recorder.take_step();
    CHECK(step->times.step == 4);
    CHECK(step->times[StepPhase::save] >= 0.005f);
    CHECK(step->times[StepPhase::data] >= 0.003f);
    CHECK(step->times[StepPhase::data] < 0.005f + 1);
}

TEST_CASE("steps follow each other without being waited for, and each has its own times") {
    cudaStream_t stream = test_stream();
    TraceSession recording(stream, {});
    constexpr int steps = 5;
    for (int step = 0; step < steps; step++) {
        recorder.begin_step(step, true);
        {
            TraceSpan pass(Operation::forward, stream);
            sleep_on(stream, 0.004 * (step + 1));
        }
        recorder.end_step();
    }
    for (int step = 0; step < steps;) {
        recorder.poll();
        if (auto done = recorder.take_step()) {
            CHECK(done->times.step == step);
            CHECK(done->times[StepPhase::forward] >= 0.999f * 0.004f * (float)(step + 1));
            step++;
        }
    }
}

TEST_CASE("the clock of the device is that of the host, shifted") {
    cudaStream_t stream = test_stream();
    TraceSession recording(stream, {});
    recorder.begin_step(0, true);
    recorder.end_step();
    sleep_on(stream, 0.01);
    auto [offset, error] = recorder.clock_offset();
    CHECK(error > 0);
    CHECK(error < 0.05);
    CHECK(std::abs(offset) < 0.5);  // the error of start()'s guess, with allowance for a busy machine
    sleep_on(stream, 0.01);
    auto [again, error_again] = recorder.clock_offset();
    CHECK(std::abs(again - offset) <= error + error_again + 1e-5);
}

TEST_CASE("calls are counted for their group, and others can read the record of a process") {
    cudaStream_t stream = test_stream();
    int group = recorder.add_group({"shard", {4, 6}, 2, Axis::shard});
    TraceSession recording(
        stream, {.rank = 6, .ranks = 8, .sizes = {{2, 2, 2, 1}}, .host = "here", .run_dir = "runs/a"});
    recorder.begin_step(11, true);
    recorder.at_unit(5);
    {
        TraceSpan call(Operation::reduce_scatter, group, Traffic::gradients, 4096, stream);
        sleep_on(stream, 0.02);
    }
    auto record = read_flight_record(getpid());
    REQUIRE(record);
    CHECK(record->rank == 6);
    CHECK(record->ranks == 8);
    CHECK(record->host == std::string("here"));
    CHECK(record->run_dir == std::string("runs/a"));
    CHECK(record->step == 11);
    REQUIRE(record->group_count == 1);
    CHECK(record->groups[0].name == std::string("shard"));
    CHECK(record->groups[0].ranks[1] == 6);
    CHECK(record->groups[0].issued == 1);
    CHECK(record->groups[0].done == 0);
    const FlightEntry& entry = record->entry(record->entry_count - 1);
    CHECK(entry.operation == Operation::reduce_scatter);
    CHECK(entry.bytes == 4096);
    CHECK(entry.unit == 5);
    CHECK(entry.number == 1);
    recorder.end_step();
    while (!recorder.take_step()) recorder.poll();
    CHECK(record->groups[0].done == 1);
    CHECK(record->entry(record->entry_count - 2).end > 0);
    CHECK(!read_flight_record(1));  // a process without one
}

TEST_CASE("a call that its stream has come to has begun, and the one behind it has not") {
    cudaStream_t stream = test_stream();
    int group = recorder.add_group({"shard", {0, 1}, 2, Axis::shard});
    TraceSession recording(stream, {});
    recorder.begin_step(0, true);
    static std::atomic<bool> may_go_on;
    may_go_on = false;
    for (int call = 0; call < 2; call++) {
        TraceSpan recorded(Operation::all_reduce, group, Traffic::gradients, 4, stream);
        auto wait = [](void*) {
            while (!may_go_on) usleep(100);
        };
        cudaCheck(cudaLaunchHostFunc(stream, wait, nullptr));
    }
    auto record = read_flight_record(getpid());
    REQUIRE(record);
    const FlightGroup& counts = record->groups[0];
    while (counts.begun == 0) recorder.poll();
    CHECK(counts.issued == 2);
    CHECK(counts.begun == 1);
    CHECK(counts.done == 0);
    CHECK(record->entry(record->entry_count - 2).begin > 0);
    CHECK(record->entry(record->entry_count - 2).end == 0);
    CHECK(record->entry(record->entry_count - 1).begin == 0);
    may_go_on = true;
    recorder.end_step();
    while (!recorder.take_step()) recorder.poll();
    CHECK(counts.begun == 2);
    CHECK(counts.done == 2);
}

TEST_CASE("a ring that is full keeps the newest entries, and the counts of all") {
    cudaStream_t stream = test_stream();
    int group = recorder.add_group({"world", {0, 1}, 2, all_axes});
    TraceSession recording(stream, {});
    constexpr int calls = FlightRecord::most_entries + 100;
    recorder.begin_step(0, false);
    for (int i = 0; i < calls; i++)
        TraceSpan call(Operation::all_reduce, group, Traffic::statistics, 4, stream);
    auto record = read_flight_record(getpid());
    REQUIRE(record);
    CHECK(record->groups[0].issued == calls);
    CHECK(record->entry_count == calls);
    CHECK(record->entry(calls - 1).number == calls);
    recorder.end_step();
}

TEST_CASE("the record of a process that was killed goes when the next one begins") {
    std::string left;
    {
        pid_t child = fork();
        if (child == 0) _exit(0);
        waitpid(child, nullptr, 0);
        left = SharedFlightRecord::name_of_process(child);
        int file = shm_open(left.c_str(), O_RDWR | O_CREAT, 0600);
        REQUIRE(file >= 0);
        close(file);
    }
    { TraceSession recording(test_stream(), {}); }
    CHECK(shm_open(left.c_str(), O_RDONLY, 0) < 0);
    CHECK(!read_flight_record(getpid()));  // and its own record is removed with the run
}

TEST_CASE("calls that begin together are one entry with the bytes of all") {
    cudaStream_t stream = test_stream();
    int group = recorder.add_group({"stage", {0, 1}, 2, Axis::tensor});
    RecordedWork work = recorded_work(stream, [&] {
        TraceGroup together;
        for (int i = 0; i < 3; i++) TraceSpan call(Operation::send, group, Traffic::updates, 100, stream);
        sleep_on(stream, 0.005);
    });
    const FlightEntry& entry = only(work.entries, Operation::send);
    CHECK(entry.bytes == 300);
    CHECK(entry.end - entry.begin >= 0.00499);
}
