/*
Records the work that this rank gives to its device, and when it is done. Writes the flight record
(data/run/flight_record.h) and the times of a step (data/run/step_times.h).

Each piece of work is between two events on its stream:

    { TraceSpan pass(Operation::forward, stream); ... give the work to the stream ... }

The events are read once the device has reached them, usually a step later, and no thread waits for them.
Times are seconds on the device's own clock since the start of the record. CUDA returns the difference of two
events as a float, which is precise only if the difference is short; so each step has an anchor: an event from
which its times are measured.

A wait of the compute stream for communication is an entry too; it counts as waiting, and not as part of the
pass that it interrupts. Calls between ncclGroupStart and ncclGroupEnd begin together and make one entry. A
CUDA graph contains no events: the pass that it runs is one entry.

In a long step of many small collectives, the events would cost measurable time. So only some steps are
recorded with details (communication and waits); the first rank chooses how many: comm/timings.h.
*/
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/base/deadlines.h"  // BusyScope
#include "data/base/figures.h"    // seconds_now, unix_nanoseconds
#include "data/run/flight_record.h"
#include "data/run/step_times.h"
#include "kernels/common.cuh"

// A group of ranks, as the record lists it.
struct RecordedGroup {
    std::string name;
    std::vector<int> ranks;  // the first members, or all
    int size = 1;
    AxisSet axes;  // axes along which the ranks lie; none: `ranks` lists them
};

// The rank that a record is about: its number, the sizes of the world and of its mesh, its host and its run.
struct RecordedRank {
    int rank = 0, ranks = 1;
    PerAxis sizes = one_along_each;
    std::string host, run_dir;
};

// A step that the device has finished.
struct RecordedStep {
    StepTimes times;
    std::vector<FlightEntry> passes;  // in their order
};

constexpr StepPhase phase_of(Operation operation) {
    switch (operation) {
    case Operation::forward:
        return StepPhase::forward;
    case Operation::backward:
    case Operation::input_gradient:
        return StepPhase::backward;
    case Operation::weight_gradient:
        return StepPhase::weight_gradients;
    case Operation::optimizer:
        return StepPhase::optimizer;
    case Operation::data:
        return StepPhase::data;
    case Operation::save:
        return StepPhase::save;
    case Operation::step:
    case Operation::wait:
    case Operation::all_reduce:
    case Operation::reduce_scatter:
    case Operation::all_gather:
    case Operation::broadcast:
    case Operation::all_to_all:
    case Operation::send:
    case Operation::receive:
        return StepPhase::other;
    }
    __builtin_unreachable();
}

constexpr StepPhase wait_for_traffic(Traffic kind) {
    switch (kind) {
    case Traffic::activations:
        return StepPhase::wait_tensor;
    case Traffic::pipeline:
        return StepPhase::wait_pipeline;
    case Traffic::parameters:
    case Traffic::weights:
        return StepPhase::wait_parameters;
    case Traffic::gradients:
    case Traffic::statistics:
    case Traffic::updates:
        return StepPhase::wait_gradients;
    }
    __builtin_unreachable();
}

#ifdef DEVICE_CPU
inline constexpr bool is_processor = true;
#else
inline constexpr bool is_processor = false;
#endif

class Recorder {
public:
    static constexpr uint8_t compute_track = 0, host_track = 1;

    bool on() const { return on_.load(std::memory_order_relaxed) && !ledger; }

    // Starts the record of this process, whose passes run on the stream `compute`.
    void start(cudaStream_t compute, const RecordedRank& rank) {
        std::lock_guard lock(mutex_);
        cudaCheck(cudaGetDevice(&device_));
        record_.emplace();
        FlightRecord& record = **record_;
        record.process = getpid();
        record.rank = rank.rank, record.ranks = rank.ranks;
        record.device = is_processor ? -1 : device_;
        record.sizes = rank.sizes;
        copy_name(record.host, rank.host), copy_name(record.run_dir, rank.run_dir);
        for (RecordedGroup& group : groups_) {
            if (record.group_count == FlightRecord::most_groups) break;
            FlightGroup& place = record.groups[record.group_count++];
            copy_name(place.name, group.name);
            place.size = group.size, place.axes = group.axes.bits();
            std::copy_n(group.ranks.begin(), std::min<size_t>(group.ranks.size(), FlightGroup::most_named),
                        place.ranks);
        }
        record.is_record = FlightRecord::mark;
        tracks_.resize(2);
        tracks_[compute_track] = {compute, "compute", {}};
        tracks_[host_track] = {nullptr, "host", {}};
        compute_ = compute;
        cudaEvent_t origin = take_event();
        cudaCheck(cudaStreamSynchronize(compute));
        double before = seconds_now();
        cudaCheck(cudaEventRecord(origin, compute));
        cudaCheck(cudaEventSynchronize(origin));
        origin_ = (before + seconds_now()) / 2;
        anchors_.push_back(std::make_shared<Anchor>(Anchor{origin, true, 0}));
        on_ = true;
    }

    // Ends the record, before the device and its streams are destroyed. Entries that were not read are lost.
    void stop() {
        on_ = false;
        std::lock_guard lock(mutex_);
        tracks_.clear(), accounts_.clear(), anchors_.clear(), finished_.clear(), kept_.clear();
        groups_.clear();
        for (cudaEvent_t event : all_events_) cudaEventDestroy(event);
        all_events_.clear(), free_events_.clear();
        record_.reset();
        passes_given_ = passes_done_ = passes_to_do_ = 0;
        step_ = no_step, enclosing_.reset(), paused_ = 0, keeping_ = false;
    }

    // Adds a group to the next record, and returns its number there.
    int add_group(RecordedGroup group) {
        groups_.push_back(std::move(group));
        return (int)groups_.size() - 1;
    }
    const std::vector<RecordedGroup>& groups() const { return groups_; }

    // Names a stream in timelines.
    void name_stream(cudaStream_t stream, const char* name) {
        if (is_imagined(stream)) return;
        std::lock_guard lock(mutex_);
        names_.emplace_back(stream, name);
    }
    std::vector<std::string> track_names() const {
        std::lock_guard lock(mutex_);
        std::vector<std::string> names;
        for (const Track& track : tracks_) names.push_back(track.name);
        return names;
    }

    // ---- position of the launching thread, for entries made from now on

    void at_unit(int unit) {
        if (!ledger) unit_ = (int16_t)unit;
    }
    void at_micro_batch(int micro_batch, int chunk) {
        if (!ledger) micro_batch_ = micro_batch, chunk_ = (int16_t)chunk;
    }
    // Records what the threads of this process are doing, for readers of the record when the process no
    // longer responds. Any thread may call it.
    void look_at_threads() {
        const BusyState *work = nullptr, *wait = nullptr;
        const std::vector<BusyState> all = BusyScope::all();
        for (const BusyState& each : all) {
            const BusyState*& longest = each.activity == Activity::works ? work : wait;
            if (each.activity == Activity::launches) continue;
            if (!longest || each.since < longest->since) longest = &each;
        }
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock || !on()) return;
        FlightRecord& record = **record_;
        auto since = [](const BusyState* it) {
            return it ? unix_nanoseconds() - (int64_t)(1e9 * it->seconds()) : 0;
        };
        copy_name(record.phase, Phase::of_process());
        copy_name(record.work, work ? work->what : "");
        record.work_since = since(work), record.wait_since = since(wait);
    }

    // ---- steps

    void begin_step(int step, bool detailed) {
        if (!on()) return;
        cudaEvent_t anchor, begin;
        {
            std::lock_guard lock(mutex_);
            anchor = take_event(), begin = take_event();
        }
        cudaCheck(cudaEventRecord(anchor, compute_));
        cudaCheck(cudaEventRecord(begin, compute_));
        std::lock_guard lock(mutex_);
        anchors_.push_back(std::make_shared<Anchor>(Anchor{anchor, false, 0}));
        detailed_ = detailed;
        events_of_step_ = 0;
        step_ = step;
        (*record_)->step = step;
        Account& account =
            accounts_.emplace_back(Account{{{.step = step, .detailed = detailed}, {}}, 1, false});
        account.step.times[StepPhase::data] = std::exchange(carried_[0], 0);
        account.step.times[StepPhase::save] = std::exchange(carried_[1], 0);
        step_begin_ = begin;
    }

    void end_step() {
        if (!on()) return;
        cudaEvent_t end;
        {
            std::lock_guard lock(mutex_);
            end = take_event();
        }
        cudaCheck(cudaEventRecord(end, compute_));
        std::lock_guard lock(mutex_);
        Pending step = pending(Operation::step, compute_track);
        step.begin = step_begin_, step.end = end;
        accounts_.back().outstanding--;  // begin_step() counted it already
        tracks_[compute_track].pending.push_back(step);
        accounts_.back().closed = true;
        step_ = no_step;
        at_micro_batch(FlightEntry::none, FlightEntry::none);
    }

    // Returns the oldest finished step that has not been taken.
    std::optional<RecordedStep> take_step() {
        std::lock_guard lock(mutex_);
        if (finished_.empty()) return {};
        RecordedStep step = std::move(finished_.front());
        finished_.pop_front();
        return step;
    }

    // The number of events that the last step used.
    int events_of_step() const { return events_of_step_; }

    // Reads the events that the device has reached. Any thread may call it; while another holds the lock, it
    // does nothing.
    void poll() {
        if (!on()) return;
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock || !on()) return;
        thread_local bool has_device = false;
        if (!has_device) has_device = cudaSetDevice(device_) == cudaSuccess;
        for (size_t i = 1; i < anchors_.size(); i++) {
            Anchor &anchor = *anchors_[i], &before = *anchors_[i - 1];
            if (anchor.known) continue;
            if (cudaEventQuery(anchor.event) != cudaSuccess) break;
            anchor.time = before.time + elapsed(before.event, anchor.event);
            anchor.known = true;
        }
        for (Track& track : tracks_) {
            for (; !track.pending.empty(); track.pending.pop_front()) {
                Pending& first = track.pending.front();
                if (!first.anchor->known || cudaEventQuery(first.end) != cudaSuccess) break;
                complete(first);
            }
            look_for_begun(track);
        }
        while (!accounts_.empty() && accounts_.front().closed && accounts_.front().outstanding == 0) {
            finished_.push_back(std::move(accounts_.front().step));
            finished_.back().times.complete();
            accounts_.pop_front();
        }
        // An anchor is needed while pending entries are measured from it, and until the next anchor's time is
        // known.
        while (anchors_.size() > 1 && anchors_[1]->known && anchors_[0].use_count() == 1) {
            free_events_.push_back(anchors_[0]->event);
            anchors_.pop_front();
        }
    }

    // Returns whether the device has done everything that was recorded, as of the last poll().
    bool is_idle() const {
        std::lock_guard lock(mutex_);
        return std::ranges::all_of(tracks_, [](const Track& track) { return track.pending.empty(); });
    }

    // ---- entries

    // Starts or stops keeping finished entries, for take_kept().
    void keep_entries(bool on) {
        std::lock_guard lock(mutex_);
        keeping_ = on;
    }
    std::vector<FlightEntry> take_kept() {
        std::lock_guard lock(mutex_);
        return std::exchange(kept_, {});
    }
    // Begins a step, or a validation, of `passes` passes of this rank over `micro_batches` micro-batches.
    void begin_passes(int passes, int micro_batches) {
        if (ledger) return;
        passes_before_ = passes_given_.load();
        passes_to_do_ = passes, micro_batches_ = micro_batches;
    }
    // Returns how many of these micro-batches are done; 0 of 0 if that is unknown. Any thread may call it.
    PassProgress progress() {
        poll();
        if (!on() || passes_to_do_ == 0) return {};
        float done = std::clamp((float)(passes_done_ - passes_before_) / (float)passes_to_do_, 0.f, 1.f);
        return {done * (float)micro_batches_, micro_batches_};
    }

    // Seconds since the start, on the host's clock.
    double host_time() const { return seconds_now() - origin_; }

    // Returns the seconds by which the device's clock is now ahead of host_time(), and the maximum error of
    // this value. The stream must be idle.
    std::pair<double, double> clock_offset() {
        double best_width = std::numeric_limits<double>::max(), offset = 0;
        std::unique_lock lock(mutex_);
        cudaEvent_t event = take_event();
        const std::shared_ptr<Anchor> anchor = anchors_.back();
        lock.unlock();
        cudaCheck(cudaStreamSynchronize(compute_));
        for (bool known = false; !known;) {
            poll();
            std::lock_guard look(mutex_);
            known = anchor->known;
        }
        for (int tries = 0; tries < 8; tries++) {
            double before = host_time();
            cudaCheck(cudaEventRecord(event, compute_));
            cudaCheck(cudaEventSynchronize(event));
            double after = host_time();
            if (after - before >= best_width) continue;
            best_width = after - before;
            offset = anchor->time + elapsed(anchor->event, event) - (before + after) / 2;
        }
        lock.lock();
        free_events_.push_back(event);
        return {offset, best_width / 2};
    }

    // Returns the seconds that host and device spend on one event: the minimum of several trials, because
    // other programs use the machine too.
    double cost_of_event() {
        constexpr int events = 64, trials = 8;
        std::vector<cudaEvent_t> taken;
        {
            std::lock_guard lock(mutex_);
            for (int i = 0; i < events; i++) taken.push_back(take_event());
        }
        double least = std::numeric_limits<double>::max();
        for (int trial = 0; trial < trials; trial++) {
            cudaCheck(cudaStreamSynchronize(compute_));
            double start = seconds_now();
            for (cudaEvent_t event : taken) cudaCheck(cudaEventRecord(event, compute_));
            cudaCheck(cudaStreamSynchronize(compute_));
            least = std::min(least, seconds_now() - start);
        }
        std::lock_guard lock(mutex_);
        free_events_.insert(free_events_.end(), taken.begin(), taken.end());
        return least / events;
    }

    // Returns the folder of the run; empty if nothing is recorded, or if a stuck thread holds the lock. Any
    // thread may call it.
    std::string run_dir() const {
        if (!lock_within(0.1, mutex_)) return "";
        std::lock_guard lock(mutex_, std::adopt_lock);
        return on() ? (*record_)->run_dir : "";
    }

private:
    friend class TraceSpan;
    friend class HostSpan;
    friend class TraceGroup;
    friend class TracePause;

    static constexpr int no_step = -1;

    struct Anchor {
        cudaEvent_t event;
        bool known;   // the device has reached it
        double time;  // seconds since the start
    };
    // An entry whose events have been enqueued.
    struct Pending {
        uint64_t entry = 0;
        FlightEntry copy;
        cudaEvent_t begin = {}, end = {};
        std::shared_ptr<Anchor> anchor;
        std::optional<Operation> enclosing;
        bool counts = false;  // toward the step it was made in
        std::vector<std::pair<int16_t, uint64_t>>
            together;  // calls that begin at the same time: group, number
    };
    struct Track {
        cudaStream_t stream;
        std::string name;
        std::deque<Pending> pending;
    };
    struct Account {
        RecordedStep step;
        int outstanding;  // entries that have not finished
        bool closed;
    };

    // The caller holds the lock, here and in all functions below except begin(), end() and waited_on_host().
    cudaEvent_t take_event() {
        events_of_step_++;
        if (free_events_.empty()) {
            cudaEvent_t event;
            cudaCheck(cudaEventCreate(&event));
            all_events_.push_back(event);
            return event;
        }
        cudaEvent_t event = free_events_.back();
        free_events_.pop_back();
        return event;
    }

    // Makes a new entry, with events if it is timed.
    Pending begin(const FlightEntry& what, cudaStream_t stream, bool timed) {
        std::lock_guard lock(mutex_);
        Pending made = pending(what.operation, track_of(stream));
        FlightEntry& entry = made.copy;
        entry.group = what.group < (*record_)->group_count ? what.group : FlightEntry::none;
        entry.traffic = what.traffic, entry.bytes = what.bytes;
        if (is_pass(entry.operation)) passes_given_++;
        if (entry.group >= 0) entry.number = ++(*record_)->groups[entry.group].issued;
        bool follows = together_ && first_;
        entry.timed = timed;
        place(made.entry) = entry;
        if (follows) {
            first_->copy.bytes += entry.bytes;
            if (entry.group >= 0) first_->together.emplace_back(entry.group, entry.number);
        }
        if (timed && !follows)
            made.begin = take_event(), made.end = take_event();
        else if (made.counts)
            accounts_.back().outstanding--;
        return made;
    }

    // Ends an entry: all of its work has been enqueued.
    void end(Pending made, cudaStream_t stream) {
        if (cudaEventRecord(made.end, stream) != cudaSuccess) return;  // the next CUDA call reports it
        std::lock_guard lock(mutex_);
        if (on()) tracks_[made.copy.track].pending.push_back(std::move(made));
    }

    void waited_on_host(Operation operation, double since) {
        std::lock_guard lock(mutex_);
        Pending made = pending(operation, host_track);
        made.copy.begin = since, made.copy.end = host_time();
        if (!made.counts) carried_[operation == Operation::save] += (float)(made.copy.end - since);
        finish(made);
    }

    uint8_t track_of(cudaStream_t stream) {
        for (size_t i = 0; i < tracks_.size(); i++)
            if (tracks_[i].stream == stream && i != host_track) return (uint8_t)i;
        std::string name = text("stream %zu", tracks_.size());
        for (auto& [named, its_name] : names_)
            if (named == stream) name = its_name;
        tracks_.push_back({stream, name, {}});
        return (uint8_t)(tracks_.size() - 1);
    }

    // Adds an entry to the ring.
    Pending pending(Operation operation, uint8_t track) {
        FlightRecord& record = **record_;
        Pending made;
        made.copy = {.step = step_ == no_step ? (int32_t)record.step : step_,
                     .micro_batch = micro_batch_,
                     .unit = unit_,
                     .chunk = chunk_,
                     .operation = operation,
                     .track = track};
        made.anchor = anchors_.back();
        made.enclosing = enclosing_;
        made.counts = step_ != no_step;
        if (made.counts) accounts_.back().outstanding++;
        made.entry = record.entry_count;
        place(made.entry) = made.copy;
        record.entry_count++;
        sign_of_life();
        return made;
    }
    FlightEntry& place(uint64_t entry) { return (*record_)->entries[entry % FlightRecord::most_entries]; }

    void sign_of_life() { (*record_)->sign_of_life = unix_nanoseconds(); }

    static double elapsed(cudaEvent_t begin, cudaEvent_t end) {
        float milliseconds = 0;
        if (cudaEventElapsedTime(&milliseconds, begin, end) != cudaSuccess) return 0;  // other calls say why
        return (double)milliseconds / 1e3;
    }

    // Marks entries that have begun. Entries are in order of their ends: a part of a pass comes before the
    // pass, although it begins later.
    void look_for_begun(Track& track) {
        bool part_to_come = false;
        for (Pending& each : track.pending) {
            if (each.copy.begin != 0) continue;
            if (!each.anchor->known) return;
            Operation operation = each.copy.operation;
            bool encloses =
                is_pass(operation) || operation == Operation::optimizer || operation == Operation::step;
            if (part_to_come && !encloses) continue;
            bool begun = cudaEventQuery(each.begin) == cudaSuccess;
            if (begun) begin_on_device(each);
            if (encloses && (!begun || part_to_come)) return;
            part_to_come |= !begun;
        }
    }

    // Notes that an entry's stream has reached its beginning.
    void begin_on_device(Pending& begun) {
        FlightRecord& record = **record_;
        begun.copy.begin = begun.anchor->time + elapsed(begun.anchor->event, begun.begin);
        if (record.entry_count - begun.entry <= FlightRecord::most_entries) place(begun.entry) = begun.copy;
        bring(&FlightGroup::begun, begun);
        sign_of_life();
    }

    // Raises a counter of the entry's groups to the numbers of its calls.
    void bring(std::atomic<uint64_t> FlightGroup::*count, const Pending& calls) {
        auto to = [&](int16_t group, uint64_t number) {
            std::atomic<uint64_t>& counted = (*record_)->groups[group].*count;
            if (counted < number) counted = number;
        };
        if (calls.copy.group >= 0) to(calls.copy.group, calls.copy.number);
        for (auto [group, number] : calls.together) to(group, number);
    }

    void complete(Pending& done) {
        double base = done.anchor->time;
        done.copy.begin = base + elapsed(done.anchor->event, done.begin);
        done.copy.end = base + elapsed(done.anchor->event, done.end);
        free_events_.push_back(done.begin), free_events_.push_back(done.end);
        done.anchor = nullptr;
        finish(done);
    }

    // Notes a finished entry, whose times are known.
    void finish(const Pending& done) {
        const FlightEntry& entry = done.copy;
        FlightRecord& record = **record_;
        if (record.entry_count - done.entry <= FlightRecord::most_entries) place(done.entry) = entry;
        bring(&FlightGroup::begun, done);
        bring(&FlightGroup::done, done);
        sign_of_life();
        if (keeping_) kept_.push_back(entry);
        if (is_pass(entry.operation)) passes_done_++;
        if (!done.counts) return;
        auto account = std::ranges::find_if(
            accounts_, [&](const Account& each) { return each.step.times.step == entry.step; });
        if (account == accounts_.end()) return;
        account->outstanding--;
        if (is_pass(entry.operation)) account->step.passes.push_back(entry);
        StepTimes& times = account->step.times;
        auto seconds = (float)(entry.end - entry.begin);
        bool waits = entry.operation == Operation::wait ||
                     (is_communication(entry.operation) && entry.track == compute_track);
        if (waits) {
            times[wait_for_traffic((Traffic)entry.traffic)] += seconds;
            if (done.enclosing) times[phase_of(*done.enclosing)] -= seconds;
        } else if (entry.operation == Operation::step) {
            times.seconds = seconds;
        } else if (!is_communication(entry.operation)) {
            times[phase_of(entry.operation)] += seconds;
        }
    }

    std::atomic<bool> on_ = false;
    mutable std::mutex mutex_;
    std::optional<SharedFlightRecord> record_;
    int device_ = 0;
    cudaStream_t compute_ = nullptr;
    double origin_ = 0;  // the host's clock when the device's was 0

    std::vector<RecordedGroup> groups_;
    std::vector<std::pair<cudaStream_t, const char*>> names_;
    std::vector<Track> tracks_;
    std::deque<std::shared_ptr<Anchor>> anchors_;
    std::vector<cudaEvent_t> all_events_, free_events_;

    int step_ = no_step;
    cudaEvent_t step_begin_ = {};
    bool detailed_ = true;
    int events_of_step_ = 0;
    std::deque<Account> accounts_;  // steps that the device has not finished
    std::deque<RecordedStep> finished_;
    std::vector<FlightEntry> kept_;
    std::atomic<int> passes_given_ = 0, passes_done_ = 0;    // since the start
    std::atomic<int> passes_before_ = 0, passes_to_do_ = 0;  // at the last begin_passes()
    std::atomic<int> micro_batches_ = 0;                     // at the last begin_passes()
    bool keeping_ = false;
    float carried_[2] = {};  // seconds of waits for data and for saves between steps; added to the next step

    int16_t unit_ = FlightEntry::none, chunk_ = FlightEntry::none;
    int32_t micro_batch_ = FlightEntry::none;
    std::optional<Operation> enclosing_;  // the pass or update that current work belongs to
    int paused_ = 0;
    bool together_ = false;         // calls begin together
    std::optional<Pending> first_;  // the first of them
    cudaStream_t first_stream_ = nullptr;
};

inline Recorder recorder;

// Records this process during its lifetime.
class TraceSession {
public:
    TraceSession(cudaStream_t compute, const RecordedRank& rank) { recorder.start(compute, rank); }
    ~TraceSession() { recorder.stop(); }
    TraceSession(const TraceSession&) = delete;
    TraceSession& operator=(const TraceSession&) = delete;
};

// Makes one entry of all work put on the stream during its lifetime.
class TraceSpan {
public:
    // A pass, or the update; entries made meanwhile are part of it.
    TraceSpan(Operation operation, cudaStream_t stream) {
        if (!recorder.on() || recorder.paused_) return;
        begin({.operation = operation}, stream, true);
        outer_ = std::exchange(recorder.enclosing_, operation);
    }

    // A call of a group; `group` is its number in the record.
    TraceSpan(Operation operation, int group, Traffic kind, uint64_t bytes, cudaStream_t stream) {
        if (!recorder.on() || recorder.paused_ || group < 0) return;
        begin({.bytes = bytes, .group = (int16_t)group, .operation = operation, .traffic = (uint8_t)kind},
              stream, recorder.detailed_);
    }

    // The stream waits for communication of this kind.
    TraceSpan(Traffic waits_for, cudaStream_t stream) {
        if (!recorder.on() || recorder.paused_ || !recorder.detailed_) return;
        begin({.operation = Operation::wait, .traffic = (uint8_t)waits_for}, stream, true);
    }

    ~TraceSpan() {
        if (!own_) return;
        if (outer_) recorder.enclosing_ = *outer_;
        recorder.end(std::move(*own_), stream_);
    }
    TraceSpan(const TraceSpan&) = delete;
    TraceSpan& operator=(const TraceSpan&) = delete;

private:
    void begin(const FlightEntry& what, cudaStream_t stream, bool timed) {
        Recorder::Pending made = recorder.begin(what, stream, timed);
        if (!made.begin) return;
        cudaCheck(cudaEventRecord(made.begin, stream));
        if (recorder.together_) {
            recorder.first_ = std::move(made), recorder.first_stream_ = stream;
        } else {
            own_ = std::move(made), stream_ = stream;
        }
    }

    std::optional<Recorder::Pending> own_;
    std::optional<std::optional<Operation>> outer_;
    cudaStream_t stream_ = nullptr;
};

// Makes one entry of the calls during its lifetime, which begin together.
class TraceGroup {
public:
    TraceGroup() { recorder.together_ = true; }
    ~TraceGroup() {
        recorder.together_ = false;
        if (recorder.first_) recorder.end(*std::exchange(recorder.first_, {}), recorder.first_stream_);
    }
    TraceGroup(const TraceGroup&) = delete;
    TraceGroup& operator=(const TraceGroup&) = delete;
};

// Records that the host waits during its lifetime.
class HostSpan {
public:
    explicit HostSpan(Operation operation) : operation_(operation), begin_(recorder.host_time()) {}
    ~HostSpan() {
        if (recorder.on()) recorder.waited_on_host(operation_, begin_);
    }
    HostSpan(const HostSpan&) = delete;
    HostSpan& operator=(const HostSpan&) = delete;

private:
    const Operation operation_;
    const double begin_;
};

// Stops recording during its lifetime, because the work is captured in a graph.
class TracePause {
public:
    explicit TracePause(bool really = true) : really_(really) { recorder.paused_ += really_; }
    ~TracePause() { recorder.paused_ -= really_; }
    TracePause(const TracePause&) = delete;
    TracePause& operator=(const TracePause&) = delete;

private:
    const bool really_;
};
