// Pipeline schedules: every list is complete, runs without deadlock, and needs the time and memory that
// published formulas give.
// devices: cpu
#include <doctest/doctest.h>

#include <map>
#include <set>

#include "comm/pipeline_schedule.h"
#include "test/support/file_testing.h"

using enum PipelineSchedule;

static std::vector<PipelineShape> shapes() {
    std::vector<PipelineShape> all;
    for (int stages : {1, 2, 3, 4, 8}) {
        for (int micro_batches : {1, 2, 3, 7, 8, 16}) {
            for (PipelineSchedule schedule : {gpipe, one_f_one_b, zero_bubble})
                all.push_back({schedule, stages, micro_batches});
            for (int chunks : {1, 2, 3}) {
                all.push_back({interleaved, stages, stages * micro_batches, chunks});
                if (micro_batches % stages) all.push_back({interleaved, stages, micro_batches, chunks});
            }
        }
    }
    return all;
}

TEST_CASE("pipeline: every micro-batch goes through every chunk once, forward before backward") {
    for (const PipelineShape& shape : shapes()) {
        for (int stage = 0; stage < shape.stages; stage++) {
            std::map<std::pair<int, int>, std::vector<PipelineWork>> work;
            std::vector<PipelineAction> actions = pipeline_actions(shape, stage);
            for (auto [what, micro_batch, chunk] : actions) work[{micro_batch, chunk}].push_back(what);
            CHECK(work.size() == (size_t)shape.micro_batches * shape.chunks);
            using enum PipelineWork;
            std::vector<PipelineWork> expected = {forward, backward};
            if (shape.schedule == zero_bubble) expected = {forward, input_gradient, weight_gradient};
            for (const auto& [place, order] : work) {
                CHECK((place.first >= 0 && place.first < shape.micro_batches));
                CHECK((place.second >= 0 && place.second < shape.chunks));
                CHECK(order == expected);
            }
            // Gradients are added in the order of the micro-batches, so all schedules give the same bits.
            std::map<int, int> last;
            for (auto [what, micro_batch, chunk] : actions) {
                if (what != backward && what != weight_gradient) continue;
                CHECK(micro_batch == last[chunk]++);
            }
        }
        CHECK_NOTHROW(time_pipeline(shape, {1, 1, 1, 0.5}));  // no deadlock
    }
}

TEST_CASE("pipeline: idle time and memory are those of the formulas") {
    for (const PipelineShape& shape : shapes()) {
        auto [schedule, stages, micro_batches, chunks] = shape;
        if (micro_batches < stages) continue;  // the formulas are for pipelines that fill up
        if (chunks > 1 && micro_batches % stages) continue;
        INFO((int)schedule << " stages " << stages << " micro-batches " << micro_batches << " chunks "
                           << chunks);
        for (PipelineCosts costs : {PipelineCosts{1, 1, 1}, {2, 3, 1}, {1, 2, 2}}) {
            PipelineTiming timing = time_pipeline(shape, costs);
            double one = costs.forward + costs.input_gradient + costs.weight_gradient;
            double idle = (stages - 1) * one / chunks;
            if (schedule == zero_bubble)
                idle = (stages - 1) *
                       std::max(0.0, costs.forward + costs.input_gradient - costs.weight_gradient);
            bool equal = costs.forward == costs.input_gradient;  // ZB-H1 is designed for equal costs
            if (schedule != zero_bubble || equal)
                CHECK(timing.bubble() == doctest::Approx(idle / (micro_batches * one)));
            for (int stage = 0; stage < stages; stage++) {
                CHECK(timing.busy[stage] == doctest::Approx(micro_batches * chunks * one));
                int kept = timing.most_kept[stage];
                switch (schedule) {
                case gpipe:
                    CHECK(kept == micro_batches);
                    break;
                case one_f_one_b:
                    CHECK(kept == stages - stage);
                    break;
                case zero_bubble:
                    CHECK(kept <= stages);  // no more than the first stage of 1F1B
                    break;
                case interleaved:
                    CHECK(kept <= stages * chunks + (chunks > 1 ? stages - 1 : 0));
                    break;
                }
            }
        }
    }
    // The bubbles at the sizes that diagrams usually show.
    CHECK(time_pipeline({one_f_one_b, 4, 8}, {}).bubble() == doctest::Approx(3.0 / 8));
    CHECK(time_pipeline({interleaved, 4, 8, 2}, {}).bubble() == doctest::Approx(3.0 / 16));
    CHECK(time_pipeline({zero_bubble, 4, 8}, {}).bubble() == doctest::Approx(1.0 / 8));
}

TEST_CASE("pipeline: sending takes as long as the order of the work lets it") {
    // Two stages and 8 micro-batches, which take 27 without transfers.
    for (double transfer : {0.75, 1.5, 3.0}) {
        CAPTURE(transfer);
        auto seconds = [&](PipelineSchedule schedule, bool overlap) {
            return time_pipeline({schedule, 2, 8}, {1, 1, 1, transfer, overlap}).seconds;
        };
        // The first stage waits for one round trip for every two micro-batches.
        CHECK(seconds(one_f_one_b, true) == doctest::Approx(27 + 8 * transfer));
        CHECK(seconds(one_f_one_b, false) == doctest::Approx(27 + 9 * transfer));
        // Without overlap, a stage idles while it sends.
        CHECK(seconds(gpipe, false) == doctest::Approx(27 + 16 * transfer));
    }
    // A stage with several chunks sends both ways over one link.
    PipelineCosts costs = {0.5, 0.5, 0.5, 1};
    CHECK(time_pipeline({interleaved, 2, 8, 2}, costs).seconds == doctest::Approx(36));
    costs.overlap = false;
    CHECK(time_pipeline({interleaved, 2, 8, 2}, costs).seconds == doctest::Approx(50.5));
}

TEST_CASE("pipeline: what does not fit is refused") {
    check_error(error_of([] { pipeline_actions({one_f_one_b, 4, 8, 2}, 0); }), "pipeline", "2 chunks");
    check_error(error_of([] { pipeline_actions({gpipe, 4, 0}, 0); }), "pipeline", "at least 1");
}

TEST_CASE("forward passes alone take any number of micro-batches") {
    for (int micro_batches = 1; micro_batches <= 7; micro_batches++) {
        PipelineShape shape = {PipelineSchedule::interleaved, 3, micro_batches, 2};
        std::vector<PipelineAction> actions = forward_actions(shape);
        std::set<std::pair<int, int>> done;  // micro-batch, chunk
        for (const PipelineAction& action : actions) {
            CHECK(action.work == PipelineWork::forward);
            CHECK(action.micro_batch < micro_batches);
            CHECK((action.chunk == 0 || done.count({action.micro_batch, action.chunk - 1})));
            done.insert({action.micro_batch, action.chunk});
        }
        CHECK(actions.size() == 2 * (size_t)micro_batches);
        CHECK(done.size() == actions.size());
    }
}

TEST_CASE("interleaved pipelines take any number of micro-batches, and are no slower than 1f1b") {
    CHECK(time_pipeline({interleaved, 4, 7, 2}, {}).bubble() <
          time_pipeline({one_f_one_b, 4, 7}, {}).bubble());
    for (int stages = 2; stages <= 6; stages++) {
        for (int chunks = 2; chunks <= 4; chunks++) {
            for (int micro_batches = 1; micro_batches <= 3 * stages; micro_batches++) {
                CAPTURE(text("%d stages, %d chunks, %d micro-batches", stages, chunks, micro_batches));
                double of_layers = chunks;
                double plain =
                    time_pipeline({one_f_one_b, stages, micro_batches}, {of_layers, of_layers, of_layers})
                        .seconds;
                CHECK(time_pipeline({interleaved, stages, micro_batches, chunks}, {}).seconds <= plain);
            }
        }
    }
}

TEST_CASE("what a stage keeps of some micro-batches it has room for with more of them") {
    for (auto schedule : {gpipe, one_f_one_b, interleaved, zero_bubble}) {
        for (int stages = 1; stages <= 6; stages++) {
            for (int chunks = 1; chunks <= (schedule == interleaved ? 3 : 1); chunks++) {
                for (int stage = 0; stage < stages; stage++) {
                    PipelineCapacity before;
                    size_t slots_before = 0;
                    for (int micro_batches = 1; micro_batches <= 3 * stages + 1; micro_batches++) {
                        CAPTURE(text("schedule %d, stage %d of %d, %d chunks, %d micro-batches",
                                     (int)schedule, stage, stages, chunks, micro_batches));
                        auto list = pipeline_actions({schedule, stages, micro_batches, chunks}, stage);
                        PipelineCapacity capacity = pipeline_capacity(list, chunks);
                        size_t slots = ActivationSlots::most(std::vector<int>((size_t)chunks, 2), list, true);
                        if (micro_batches > 1) CHECK(capacity.holds(before));
                        CHECK(slots >= slots_before);
                        before = capacity, slots_before = slots;
                    }
                }
            }
        }
    }
}

namespace {

// Stages that block in each send until the receiver has a place for the message, as without overlap, with the
// buffers of comm/pipeline.h. Messages are in flight for the shortest possible time, so if this terminates,
// every run does.
class BlockingStages {
public:
    explicit BlockingStages(const PipelineShape& shape) : shape_(shape), stages_((size_t)shape.stages) {
        for (int s = 0; s < shape.stages; s++) {
            Stage& stage = stages_[(size_t)s];
            stage.list = pipeline_actions(shape, s);
            stage.capacity = pipeline_capacity(stage.list, shape.chunks);
            stage.ended.resize((size_t)shape.chunks);
            size_t gradients = 0;
            for (const PipelineAction& action : stage.list) {
                if (action.work == PipelineWork::weight_gradient) continue;
                bool forward = action.work == PipelineWork::forward;
                if (forward && part(s, action) > 0) stage.inputs.expected.push_back(action);
                if (!forward && !is_last(part(s, action))) stage.gradients.numbers.push_back(gradients);
                gradients += !forward;
            }
        }
    }

    bool end() {
        for (bool any = true; any;) {
            any = false;
            for (int s = 0; s < shape_.stages; s++) any |= receive(s) | advance(s);
        }
        return std::all_of(stages_.begin(), stages_.end(),
                           [](const Stage& stage) { return stage.next == stage.list.size(); });
    }

private:
    struct Messages {  // received by a stage, in order
        std::vector<PipelineAction> expected;
        std::vector<size_t> numbers;
        size_t sent = 0, places_given = 0, taken = 0;
    };
    struct Stage {
        std::vector<PipelineAction> list;
        PipelineCapacity capacity;
        Messages inputs, gradients;
        std::vector<int> ended;     // micro-batches of each chunk that are no longer kept
        size_t gradients_gone = 0;  // gradients whose places are free
        size_t next = 0;
        Messages* sending = nullptr;
    };

    int part(int s, const PipelineAction& action) const { return action.chunk * shape_.stages + s; }
    bool is_last(int part) const { return part == shape_.stages * shape_.chunks - 1; }

    // Assigns places to the next messages.
    bool receive(int s) {
        Stage& stage = stages_[(size_t)s];
        size_t before = stage.inputs.places_given + stage.gradients.places_given;
        auto& [inputs, numbers, sent, given, taken] = stage.inputs;
        for (; given < inputs.size(); given++) {
            auto [work, micro_batch, chunk] = inputs[given];
            if (micro_batch - (stage.capacity.kept[(size_t)chunk] + 1) >= stage.ended[(size_t)chunk]) break;
        }
        size_t& places = stage.gradients.places_given;
        while (places < stage.gradients.numbers.size() &&
               stage.gradients.numbers[places] < stage.gradients_gone + 3)
            places++;
        return stage.inputs.places_given + places > before;
    }

    bool advance(int s) {
        Stage& stage = stages_[(size_t)s];
        if (stage.next == stage.list.size()) return false;
        const PipelineAction& action = stage.list[stage.next];
        bool forward = action.work == PipelineWork::forward,
             later = action.work == PipelineWork::weight_gradient;
        int own = part(s, action);
        if (!stage.sending && !later) {
            Messages& in = forward ? stage.inputs : stage.gradients;
            bool receives = forward ? own > 0 : !is_last(own);
            if (receives && std::min(in.sent, in.places_given) <= in.taken) return false;
            in.taken += receives;
            bool sends = forward ? !is_last(own) : own > 0;
            int S = shape_.stages, to = forward ? (s + 1) % S : (s + S - 1) % S;
            if (sends) {
                Stage& other = stages_[(size_t)to];
                stage.sending = forward ? &other.inputs : &other.gradients;
                stage.sending->sent++;
            }
        }
        if (stage.sending && stage.sending->places_given < stage.sending->sent) return false;
        stage.sending = nullptr;
        if (!forward && !later) stage.gradients_gone++;
        if (later || action.work == PipelineWork::backward) stage.ended[(size_t)action.chunk]++;
        stage.next++;
        return true;
    }

    PipelineShape shape_;
    std::vector<Stage> stages_;
};

}  // namespace

TEST_CASE("stages that wait for each send do not wait for ever") {
    for (auto schedule : {gpipe, one_f_one_b, interleaved, zero_bubble}) {
        for (int stages = 2; stages <= 8; stages++) {
            for (int chunks = 1; chunks <= (schedule == interleaved ? 4 : 1); chunks++) {
                for (int micro_batches = 1; micro_batches <= 4 * stages; micro_batches++) {
                    PipelineShape shape = {schedule, stages, micro_batches, chunks};
                    CAPTURE(text("schedule %d, %d stages, %d chunks, %d micro-batches", (int)schedule, stages,
                                 chunks, shape.micro_batches));
                    CHECK(BlockingStages(shape).end());
                }
            }
        }
    }
}
