// Pipeline schedules: every list is whole and can be run, and takes the time and memory of the published
// formulas.
#include <doctest/doctest.h>

#include <map>
#include <set>

#include "comm/pipeline_schedule.h"
#include "test/file_testing.h"

using enum PipelineSchedule;

static std::vector<PipelineShape> shapes() {
    std::vector<PipelineShape> all;
    for (int stages : {1, 2, 3, 4, 8}) {
        for (int micro_batches : {1, 2, 3, 7, 8, 16}) {
            for (PipelineSchedule schedule : {gpipe, one_f_one_b, zero_bubble})
                all.push_back({schedule, stages, micro_batches});
            for (int chunks : {1, 2, 3}) all.push_back({interleaved, stages, stages * micro_batches, chunks});
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
            // Gradients are added up in the order of the micro-batches, whatever the schedule: the same bits.
            std::map<int, int> last;
            for (auto [what, micro_batch, chunk] : actions) {
                if (what != backward && what != weight_gradient) continue;
                CHECK(micro_batch == last[chunk]++);
            }
        }
        CHECK_NOTHROW(time_pipeline(shape, {1, 1, 1, 0.5}));  // nobody waits for ever
    }
}

TEST_CASE("pipeline: idle time and memory are those of the formulas") {
    for (const PipelineShape& shape : shapes()) {
        auto [schedule, stages, micro_batches, chunks] = shape;
        if (micro_batches < stages) continue;  // the formulas are for pipelines that fill up
        INFO((int)schedule << " stages " << stages << " micro-batches " << micro_batches << " chunks "
                           << chunks);
        for (PipelineCosts costs : {PipelineCosts{1, 1, 1}, {2, 3, 1}, {1, 2, 2}}) {
            PipelineTiming timing = time_pipeline(shape, costs);
            double one = costs.forward + costs.input_gradient + costs.weight_gradient;
            double idle = (stages - 1) * one / chunks;
            if (schedule == zero_bubble)
                idle = (stages - 1) *
                       std::max(0.0, costs.forward + costs.input_gradient - costs.weight_gradient);
            bool equal = costs.forward == costs.input_gradient;  // ZB-H1 is made for equal costs
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
    // One bubble at the sizes that are usually drawn.
    CHECK(time_pipeline({one_f_one_b, 4, 8}, {}).bubble() == doctest::Approx(3.0 / 8));
    CHECK(time_pipeline({interleaved, 4, 8, 2}, {}).bubble() == doctest::Approx(3.0 / 16));
    CHECK(time_pipeline({zero_bubble, 4, 8}, {}).bubble() == doctest::Approx(1.0 / 8));
}

TEST_CASE("pipeline: what does not fit is refused") {
    check_error(error_of([] { pipeline_actions({one_f_one_b, 4, 8, 2}, 0); }), "pipeline", "2 chunks");
    check_error(error_of([] { pipeline_actions({interleaved, 4, 6, 2}, 0); }), "pipeline", "multiple of 4");
    check_error(error_of([] { pipeline_actions({gpipe, 4, 0}, 0); }), "pipeline", "1 or more");
}
