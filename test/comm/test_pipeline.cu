/*
The pipeline executor on real ranks: under every schedule a toy model's results are bitwise those of one
process, stages idle for as long as the formulas say, and communication overlaps work.
*/
// ranks: 2 1 4
// alone: 4
// seconds: 10
#include <deque>
#include <map>
#include <memory>
#include <sstream>
#include <unistd.h>

#include "comm/pipeline.h"
#include "test/support/file_testing.h"
#include "test/support/ranks.h"
#include "test/support/recording.h"
#include "test/support/testing.h"

using enum PipelineSchedule;
using enum PipelineWork;

namespace {

// ----------------------------------------------------------------------------
// the toy model

// mix: out = x * a + y * b + z
#ifdef DEVICE_CPU
void mix_cpu(floatX* out, const floatX* a, const floatX* b, float x, float y, float z, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = (floatX)(x * (float)a[i] + y * (float)b[i] + z);
}

void add_product_cpu(float* sum, const floatX* a, const floatX* b, size_t n) {
    for (size_t i = 0; i < n; i++) sum[i] += (float)a[i] * (float)b[i];
}
#else
__global__ void mix_kernel(floatX* out, const floatX* a, const floatX* b, float x, float y, float z,
                           size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = (floatX)(x * (float)a[i] + y * (float)b[i] + z);
}

__global__ void add_product_kernel(float* sum, const floatX* a, const floatX* b, size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] += (float)a[i] * (float)b[i];
}
#endif

void mix(floatX* out, const floatX* a, const floatX* b, float x, float y, float z, size_t n,
         cudaStream_t stream) {
    ON_DEVICE(stream, LaunchCost(), mix_cpu(out, a, b, x, y, z, n),
              launch(mix_kernel, ceil_div(n, 128), 128, 0, stream, out, a, b, x, y, z, n));
}

void add_product(float* sum, const floatX* a, const floatX* b, size_t n, cudaStream_t stream) {
    ON_DEVICE(stream, LaunchCost(), add_product_cpu(sum, a, b, n),
              launch(add_product_kernel, ceil_div(n, 128), 128, 0, stream, sum, a, b, n));
}

void copy(floatX* to, const floatX* from, size_t n) {
    cudaCheck(cudaMemcpyAsync(to, from, n * sizeof(floatX), cudaMemcpyDeviceToDevice, test_stream()));
}

void poison(floatX* data, size_t n) {
    cudaCheck(cudaMemsetAsync(data, 0xff, n * sizeof(floatX), test_stream()));
}

// The work of part `part`: results depend on the part, the micro-batch and the order of parts.
void part_forward(int part, const floatX* input, const floatX* batch, floatX* kept, floatX* output,
                  size_t n) {
    mix(kept, input, batch, 0.5f, 0.25f, (float)part, n, test_stream());
    mix(output, kept, input, 1.0f, -0.375f, 0.125f * (float)part, n, test_stream());
}

void part_input_gradient(int part, const floatX* kept, floatX* gradient, size_t n) {
    mix(gradient, gradient, kept, 0.5f, 0.125f, (float)part, n, test_stream());
}

void part_weight_gradient(const floatX* gradient, const floatX* input, const floatX* kept,
                          const floatX* batch, float* sum, size_t n) {
    add_product(sum, gradient, input, n, test_stream());
    add_product(sum, kept, batch, n, test_stream());
}

void loss_gradient(const floatX* kept, const floatX* batch, int micro_batch, floatX* gradient, size_t n) {
    mix(gradient, kept, batch, 1.0f, -1.0f, (float)micro_batch, n, test_stream());
}

// The results of a run: of all parts on one process, or of this stage's parts.
struct Outcome {
    std::vector<floatX> results;          // (micro_batches, n) of the last part
    std::vector<floatX> first_gradients;  // (micro_batches, n) of the input of the first part
    std::vector<float> sums;              // (parts, n)
};

struct Data {
    size_t n;
    Buffer<floatX> sources, batches, results, first_gradients;  // (micro_batches, n)
    Buffer<float> sums;                                         // (parts, n)

    Data(int data_rank, int micro_batches, int parts, size_t n)
        : n(n),
          sources(random_values<floatX>(text("sources %d", data_rank).c_str(), (size_t)micro_batches * n)),
          batches(random_values<floatX>(text("batches %d", data_rank).c_str(), (size_t)micro_batches * n)),
          results((size_t)micro_batches * n),
          first_gradients((size_t)micro_batches * n),
          sums(std::vector<float>((size_t)parts * n, 0.0f)) {}

    Outcome outcome() const { return {results.host(), first_gradients.host(), sums.host()}; }
};

// Runs on one process, one micro-batch after another.
Outcome run_alone(int data_rank, int micro_batches, int parts, size_t n) {
    Data data(data_rank, micro_batches, parts, n);
    Buffer<floatX> inputs((size_t)(parts + 1) * n), kept((size_t)parts * n), gradient(n);
    for (int m = 0; m < micro_batches; m++) {
        floatX* batch = data.batches + (size_t)m * n;
        copy(inputs, data.sources + (size_t)m * n, n);
        for (int part = 0; part < parts; part++) {
            part_forward(part, inputs + (size_t)part * n, batch, kept + (size_t)part * n,
                         inputs + (size_t)(part + 1) * n, n);
        }
        copy(data.results + (size_t)m * n, inputs + (size_t)parts * n, n);
        loss_gradient(kept + (size_t)(parts - 1) * n, batch, m, gradient, n);
        for (int part = parts - 1; part >= 0; part--) {
            floatX* of_part = kept + (size_t)part * n;
            part_weight_gradient(gradient, inputs + (size_t)part * n, of_part, batch,
                                 data.sums + (size_t)part * n, n);
            part_input_gradient(part, of_part, gradient, n);
        }
        copy(data.first_gradients + (size_t)m * n, gradient, n);
    }
    return data.outcome();
}

// The parts of one stage. Data is poisoned after its last use, so that work must use what the pipeline keeps
// for it.
class ToyStage {
public:
    ToyStage(const PipelineShape& shape, const PipelineCapacity& capacity, size_t n, bool pauses)
        : shape_(shape),
          capacity_(capacity),
          pauses_(pauses),
          most_(n),
          batches_((size_t)capacity.micro_batches * n) {
        for (int chunk = 0; chunk < shape.chunks; chunk++) {
            kept_.push_back(std::make_unique<Buffer<floatX>>((size_t)capacity.kept[chunk] * n));
            pending_.push_back(
                std::make_unique<Buffer<floatX>>((size_t)std::max(1, capacity.pending[chunk]) * n));
        }
    }

    void work(const PipelineTask& task, Data& data, bool trains) {
        size_t n = data.n, m = (size_t)task.micro_batch;
        floatX* batch = batches_ + (size_t)task.batch_slot * most_;
        floatX* kept = *kept_[task.chunk] + (size_t)task.slot * most_;
        floatX* pending = *pending_[task.chunk] + (size_t)task.pending_slot * most_;
        float* sum = data.sums + (size_t)task.part * n;
        bool last = task.part == shape_.stages * shape_.chunks - 1;
        REQUIRE(task.slot < capacity_.kept[task.chunk]);
        REQUIRE((task.output != nullptr) == (task.work == forward && !last));
        REQUIRE((task.gradient != nullptr) == (task.work == backward || task.work == input_gradient));
        pause();
        if (task.work == forward) {
            if (task.chunk == 0) copy(batch, data.batches + m * n, n);
            if (task.part == 0) copy(task.input, data.sources + m * n, n);
            if (task.output) poison(task.output, n);
            part_forward(task.part, task.input, batch, kept, last ? data.results + m * n : task.output, n);
            if (!trains) finish(task, batch, kept, pending, n, task.chunk == shape_.chunks - 1);
            return;
        }
        if (task.gradient && last) {
            poison(task.gradient, n);
            loss_gradient(kept, batch, task.micro_batch, task.gradient, n);
        }
        if (task.work == input_gradient) copy(pending, task.gradient, n);
        if (task.work != input_gradient) {
            part_weight_gradient(task.gradient ? task.gradient : pending, task.input, kept, batch, sum, n);
        }
        if (task.gradient) {
            part_input_gradient(task.part, kept, task.gradient, n);
            if (task.part == 0) copy(data.first_gradients + m * n, task.gradient, n);
        }
        if (task.work != input_gradient) finish(task, batch, kept, pending, n, task.chunk == 0);
    }

private:
    void finish(const PipelineTask& task, floatX* batch, floatX* kept, floatX* pending, size_t n,
                bool last_chunk) {
        poison(task.input, n);
        poison(kept, n);
        poison(pending, n);
        if (last_chunk) poison(batch, n);
    }

    // Delays a stage occasionally.
    void pause() {
        if (!pauses_) return;
        static int times[] = {0, 0, 50, 300, 1000};
        int* time = &times[philox(17, (uint64_t)calls_++ * 64 + (uint64_t)test_world().rank()).at[0] % 5];
        cudaCheck(cudaLaunchHostFunc(
            test_stream(), [](void* microseconds) { usleep(*(const useconds_t*)microseconds); }, time));
    }

    const PipelineShape shape_;
    const PipelineCapacity capacity_;
    const bool pauses_;
    const size_t most_;
    Buffer<floatX> batches_;
    std::vector<std::unique_ptr<Buffer<floatX>>> kept_, pending_;  // (chunks)
    int calls_ = 0;
};

template <typename T>
bool same_bits(const std::vector<T>& got, const std::vector<T>& want, size_t begin, size_t count) {
    return memcmp(got.data() + begin, want.data() + begin, count * sizeof(T)) == 0;
}

// Compares with this stage's part of `want`. After only a forward pass, sums are zero.
void check_outcome(const Outcome& got, const Outcome& want, const PipelineShape& shape, int stage, size_t n,
                   bool trains) {
    if (stage == shape.stages - 1) CHECK(same_bits(got.results, want.results, 0, want.results.size()));
    if (trains && stage == 0) {
        CHECK(same_bits(got.first_gradients, want.first_gradients, 0, want.first_gradients.size()));
    }
    Outcome none;
    none.sums.resize(want.sums.size(), 0.0f);
    for (int chunk = 0; chunk < shape.chunks; chunk++) {
        size_t at = (size_t)(chunk * shape.stages + stage) * n;
        CHECK(same_bits(got.sums, trains ? want.sums : none.sums, at, n));
    }
}

std::string name_of(const PipelineShape& shape) {
    return text("%s, %d stages, %d micro-batches, %d chunks", name_of(shape.schedule), shape.stages,
                shape.micro_batches, shape.chunks);
}

std::vector<PipelineShape> shapes_of(int stages) {
    std::vector<PipelineShape> shapes;
    for (int micro_batches : std::vector<int>{1, 2, 5, 2 * stages}) {
        for (PipelineSchedule schedule : {gpipe, one_f_one_b, zero_bubble})
            shapes.push_back({schedule, stages, micro_batches});
    }
    for (int rounds : {1, 2, 3}) shapes.push_back({interleaved, stages, rounds * stages, 2});
    shapes.push_back({interleaved, stages, 2 * stages, 3});
    return shapes;
}

// Runs steps and evaluations back to back; the second evaluation has less data.
void check_runs(const Mesh& mesh, const PipelineShape& shape, bool overlap, bool pauses) {
    CAPTURE(name_of(shape));
    CAPTURE(overlap);
    int stage = mesh.position[Axis::pipeline], parts = shape.stages * shape.chunks;
    size_t n = on_cpu ? 5000 : 300;  // MPI sends 5000 floats only after a rendezvous
    std::vector<PipelineAction> step = pipeline_actions(shape, stage), evaluation = forward_actions(shape);
    PipelineCapacity capacity = pipeline_capacity(step, shape.chunks);
    Arena memory;
    Pipeline pipeline(memory, mesh, shape, capacity, n, test_stream(), overlap);
    CHECK(memory.bytes() ==
          memory_total(memory_of<PipelineArrays>(sizeof(floatX), shape, capacity, stage, n)));
    ToyStage toy(shape, capacity, n, pauses);
    struct Run {
        bool trains;
        size_t n;
    };
    std::deque<Data> data;
    std::vector<Run> runs = {{true, n}, {false, n}, {true, n}, {true, n / 2}, {false, n / 3}};
    for (auto [trains, count] : runs) data.emplace_back(mesh.data_rank(), shape.micro_batches, parts, count);
    for (size_t i = 0; i < runs.size(); i++) {
        pipeline.run(runs[i].trains ? step : evaluation, runs[i].n,
                     [&](const PipelineTask& task) { toy.work(task, data[i], runs[i].trains); });
    }
    for (size_t i = 0; i < runs.size(); i++) {
        CAPTURE(i);
        Outcome want = run_alone(mesh.data_rank(), shape.micro_batches, parts, runs[i].n);
        check_outcome(data[i].outcome(), want, shape, stage, runs[i].n, runs[i].trains);
    }
}

}  // namespace

TEST_CASE("every schedule gives the bits of one process, with overlap and without") {
    const World& world = test_world();
    for (int dp = 1; dp <= world.size(); dp++) {
        if (world.size() % dp || (dp > 1 && dp == world.size())) continue;  // one stage: tested on one rank
        Mesh mesh(world, {.pp = world.size() / dp, .dp = dp, .ring = true}, test_stream());
        for (const PipelineShape& shape : shapes_of(mesh.shape.pp)) {
            for (bool overlap : {true, false}) check_runs(mesh, shape, overlap, false);
            check_runs(mesh, shape, true, true);
        }
    }
}

TEST_CASE("a pipeline for evaluation alone, without a ring, in less memory") {
    const World& world = test_world();
    int stages = world.size();
    Mesh mesh(world, {.pp = stages}, test_stream());
    int stage = mesh.position[Axis::pipeline];
    PipelineShape shape = {one_f_one_b, stages, 5};
    PipelineCapacity capacity = pipeline_capacity(forward_actions(shape), 1);
    size_t n = 200, places = (stage > 0 ? 2 : 1) + (stage < stages - 1 ? 2 : 0);
    Arena memory;
    Pipeline pipeline(memory, mesh, shape, capacity, n, test_stream(), true);
    CHECK(memory.bytes() == places * n * sizeof(floatX));
    ToyStage toy(shape, capacity, n, true);
    Data data(0, shape.micro_batches, stages, n);
    pipeline.run(forward_actions(shape), n, [&](const PipelineTask& task) { toy.work(task, data, false); });
    check_outcome(data.outcome(), run_alone(0, shape.micro_batches, stages, n), shape, stage, n, false);

    auto nothing = [](const PipelineTask&) {};
    CHECK_REFUSED(pipeline.run(pipeline_actions(shape, stage), n, nothing), "more room than was allocated");
    CHECK_REFUSED(pipeline.run(forward_actions(shape), n + 1, nothing), "more room than was allocated");
    CHECK_REFUSED(Pipeline(memory, mesh, {gpipe, stages + 1, 5}, capacity, n, test_stream(), true),
                  "make them agree");
    if (stages == 1) return;
    shape = {interleaved, stages, stages, 2};
    capacity = pipeline_capacity(forward_actions(shape), 2);
    CHECK_REFUSED(Pipeline(memory, mesh, shape, capacity, n, test_stream(), true), "MeshShape::ring");
}

TEST_CASE("bytes sent and memory held are those of the formulas") {
    const World& world = test_world();
    int stages = world.size();
    Mesh mesh(world, {.pp = stages}, test_stream());
    int stage = mesh.position[Axis::pipeline], micro_batches = 2 * stages;
    size_t n = 1000, place = n * sizeof(floatX);
    for (PipelineSchedule schedule : {gpipe, one_f_one_b}) {
        PipelineShape shape = {schedule, stages, micro_batches};
        PipelineCapacity capacity = pipeline_capacity(pipeline_actions(shape, stage), 1);
        Arena memory;
        Pipeline pipeline(memory, mesh, shape, capacity, n, test_stream(), true);
        bool before = stage > 0, behind = stage < stages - 1;
        int inputs = (schedule == gpipe ? micro_batches : stages - stage) + before;
        CHECK(memory.bytes() == (inputs + (stages > 1 ? 3 : 1) + (behind ? 2 : 0)) * place);
        ToyStage toy(shape, capacity, n, false);
        Data data(0, micro_batches, stages, n);
        reset_traffic();
        pipeline.run(pipeline_actions(shape, stage), n,
                     [&](const PipelineTask& task) { toy.work(task, data, true); });
        CHECK(bytes_sent(Traffic::pipeline) ==
              (size_t)micro_batches * (before + behind) * n * sizeof(floatX));
        cudaCheck(cudaStreamSynchronize(test_stream()));
    }
}

// ----------------------------------------------------------------------------
// lists

TEST_CASE("room: what stages hold at the same time") {
    for (int stages : {1, 2, 3, 4, 8}) {
        for (int micro_batches : {1, 2, 4, 8, 24}) {
            for (PipelineSchedule schedule : {gpipe, one_f_one_b, zero_bubble, interleaved}) {
                PipelineShape shape = {schedule, stages, micro_batches};
                if (schedule == interleaved) shape.micro_batches *= stages, shape.chunks = 2;
                CAPTURE(name_of(shape));
                PipelineTiming timing = time_pipeline(shape, {});
                for (int stage = 0; stage < stages; stage++) {
                    PipelineCapacity capacity =
                        pipeline_capacity(pipeline_actions(shape, stage), shape.chunks);
                    REQUIRE((int)capacity.kept.size() == shape.chunks);
                    CHECK(capacity.has_backward);
                    int kept = 0;
                    for (int chunk = 0; chunk < shape.chunks; chunk++) {
                        kept += capacity.kept[chunk];
                        int pending = schedule == zero_bubble ? std::min(micro_batches, stage + 1) : 0;
                        CHECK(capacity.pending[chunk] <= pending);
                        bool fills_up = micro_batches >= 2 * stages;
                        if (schedule != zero_bubble || fills_up) CHECK(capacity.pending[chunk] == pending);
                    }
                    if (schedule == gpipe) CHECK(capacity.kept[0] == micro_batches);
                    if (schedule == one_f_one_b)
                        CHECK(capacity.kept[0] == std::min(micro_batches, stages - stage));
                    if (schedule == zero_bubble) CHECK(capacity.kept[0] <= std::min(micro_batches, stages));
                    if (shape.chunks == 1) {
                        CHECK(kept == timing.most_kept[stage]);
                        CHECK(capacity.micro_batches == kept);
                    } else {
                        CHECK(kept >= timing.most_kept[stage]);
                        CHECK(capacity.kept[0] <= 2 * stages);
                        CHECK(capacity.micro_batches >= capacity.kept[0]);
                        CHECK(capacity.micro_batches <= 2 * stages);
                    }
                }
                PipelineCapacity capacity = pipeline_capacity(forward_actions(shape), shape.chunks);
                CHECK(capacity.kept == std::vector<int>(shape.chunks, 1));
                CHECK(capacity.pending == std::vector<int>(shape.chunks, 0));
                CHECK(capacity.micro_batches == (shape.chunks > 1 ? stages : 1));
                CHECK_FALSE(capacity.has_backward);
            }
        }
    }
}

namespace {

// Walks through the lists of all stages, handing a message over only when it is the receiver's next work, so
// that stages depend on each other as much as possible. Returns whether all lists are completed.
bool come_to_an_end(const PipelineShape& shape) {
    struct Stage {
        std::vector<PipelineAction> list;
        size_t next = 0, gradients = 0;
        std::deque<PipelineAction> outputs;                        // to be handed over
        std::deque<std::pair<PipelineAction, size_t>> gradients_;  // and which gradient of the stage it is
    };
    int S = shape.stages;
    std::vector<Stage> stages((size_t)S);
    for (int stage = 0; stage < S; stage++) stages[(size_t)stage].list = pipeline_actions(shape, stage);
    size_t left = (size_t)S * stages[0].list.size();
    for (bool any = true; any;) {
        any = false;
        for (int number = 0; number < S; number++) {
            Stage& stage = stages[(size_t)number];
            if (stage.next == stage.list.size()) continue;
            PipelineAction action = stage.list[stage.next];
            int part = action.chunk * S + number;
            bool first = part == 0, last = part == S * shape.chunks - 1;
            Stage& before = stages[(size_t)((number + S - 1) % S)];
            Stage& behind = stages[(size_t)((number + 1) % S)];
            if (action.work == forward) {
                if (!first && before.outputs.empty()) continue;
                if (!last && stage.outputs.size() == 2) continue;
                if (!first) {
                    CHECK(before.outputs.front().micro_batch == action.micro_batch);
                    before.outputs.pop_front();
                }
                if (!last) stage.outputs.push_back(action);
            } else if (action.work != weight_gradient) {
                if (!last && behind.gradients_.empty()) continue;
                bool place_taken =
                    !stage.gradients_.empty() && stage.gradients_.front().second + 3 <= stage.gradients;
                if (place_taken) continue;
                if (!last) {
                    CHECK(behind.gradients_.front().first.micro_batch == action.micro_batch);
                    behind.gradients_.pop_front();
                }
                if (!first) stage.gradients_.push_back({action, stage.gradients});
                stage.gradients++;
            }
            stage.next++;
            left--;
            any = true;
        }
    }
    return left == 0;
}

}  // namespace

TEST_CASE("stages never wait for each other for ever, with the places they have") {
    for (int stages : {2, 3, 4, 8, 16}) {
        for (int rounds : {1, 2, 3, 5}) {
            for (PipelineSchedule schedule : {gpipe, one_f_one_b, zero_bubble}) {
                CHECK(come_to_an_end({schedule, stages, rounds}));
                CHECK(come_to_an_end({schedule, stages, rounds * stages + 1}));
            }
            for (int chunks : {1, 2, 3, 5}) {
                PipelineShape shape = {interleaved, stages, rounds * stages, chunks};
                CAPTURE(name_of(shape));
                CHECK(come_to_an_end(shape));
            }
        }
    }
}

// ----------------------------------------------------------------------------
// time

namespace {

// The timelines of all stages in repeated steps whose work sleeps. On a busy machine, random pieces of work
// are late in each step, but waits caused by the pipeline recur. So each piece of work counts with its
// shortest time, and with its shortest delay after its inputs were ready.
class SleepingSteps {
public:
    SleepingSteps(const Mesh& mesh, const PipelineShape& shape, const PipelineCosts& costs, size_t n)
        : mesh_(mesh), shape_(shape), costs_(costs), n_(n) {
        for (int stage = 0; stage < shape.stages; stage++) {
            lists_.push_back(pipeline_actions(shape, stage));
            best_.emplace_back(lists_.back().size(), Best{1e9, 1e9});
        }
    }

    // Called on all ranks: runs one more step.
    void measure() {
        std::vector<std::vector<Span>> steps = timelines();
        replay([&](size_t stage, size_t i, double ready) {
            Span span = steps[stage][i];
            Best& best = best_[stage][i];
            best.delay = std::min(best.delay, std::max(0.0, span.begin - ready));
            best.length = std::min(best.length, span.end - span.begin);
            return span;
        });
    }

    // The stages' idle time as a share of their busy time.
    double bubble() { return (shape_.stages * seconds() - busy_) / busy_; }
    double seconds() {
        return replay([&](size_t stage, size_t i, double ready) {
            Best best = best_[stage][i];
            return Span{ready + best.delay, ready + best.delay + best.length};
        });
    }

private:
    struct Span {
        double begin, end;
    };
    struct Best {
        double delay, length;
    };

    // The timelines of all stages, on one clock.
    std::vector<std::vector<Span>> timelines() {
        const std::vector<PipelineAction>& list = lists_[(size_t)mesh_.position[Axis::pipeline]];
        Arena memory;
        Pipeline pipeline(memory, mesh_, shape_, pipeline_capacity(list, shape_.chunks), n_, test_stream(),
                          true);
        std::deque<useconds_t> times;
        auto sleep = [](void* time) { usleep(*(const useconds_t*)time); };
        test_world().barrier();
        RecordedWork recorded = recorded_work(test_stream(), [&] {
            pipeline.run(list, n_, [&](const PipelineTask& task) {
                times.push_back((useconds_t)(costs_.of(task.work) * 1e6));
                cudaCheck(cudaLaunchHostFunc(test_stream(), sleep, &times.back()));
            });
        });
        std::vector<FlightEntry> passes = recorded.passes();
        REQUIRE(passes.size() == list.size());
        std::string mine;
        double end = 0;
        for (size_t i = 0; i < passes.size(); i++) {
            const FlightEntry& pass = passes[i];
            CHECK(pass.operation == recorded_as(list[i].work));
            CHECK(pass.micro_batch == list[i].micro_batch);
            CHECK(pass.chunk == list[i].chunk);
            REQUIRE(pass.begin >= end);  // one after another
            REQUIRE(pass.end >= pass.begin + 0.999 * costs_.of(list[i].work));
            end = pass.end;
            mine += text("%.9f %.9f ", recorded.origin + pass.begin, recorded.origin + pass.end);
        }
        std::vector<std::vector<Span>> all;
        for (const std::string& numbers : test_world().all_gather(mine)) {
            std::istringstream stream(numbers);
            all.emplace_back();
            for (Span each; stream >> each.begin >> each.end;) all.back().push_back(each);
        }
        return all;
    }

    // Walks through all lists; span_of(stage, i, ready) is the time span of action i of a stage, whose inputs
    // are available at `ready`. Returns the time from the first beginning to the last end.
    template <typename SpanOf>
    double replay(SpanOf&& span_of) {
        int S = shape_.stages, parts = S * shape_.chunks;
        std::map<std::pair<int, int>, double> forward_end, backward_end;  // by part and micro-batch
        std::vector<size_t> next((size_t)S, 0);
        std::vector<double> free_at((size_t)S, 0);
        double first = 1e18, last = 0;
        busy_ = 0;
        for (bool any = true; any;) {
            any = false;
            for (int stage = 0; stage < S; stage++) {
                size_t s = (size_t)stage;
                if (next[s] == lists_[s].size()) continue;
                PipelineAction action = lists_[s][next[s]];
                int part = action.chunk * S + stage, m = action.micro_batch;
                bool goes_forward = action.work == forward;
                bool waits = goes_forward ? part > 0 : action.work != weight_gradient && part < parts - 1;
                double ready = free_at[s];
                if (waits) {
                    auto& ends = goes_forward ? forward_end : backward_end;
                    auto found = ends.find({part + (goes_forward ? -1 : 1), m});
                    if (found == ends.end()) continue;
                    ready = std::max(ready, found->second);
                }
                Span span = span_of(s, next[s]++, ready);
                if (action.work != weight_gradient)
                    (goes_forward ? forward_end : backward_end)[{part, m}] = span.end;
                free_at[s] = span.end;
                first = std::min(first, span.begin);
                last = std::max(last, span.end);
                busy_ += span.end - span.begin;
                any = true;
            }
        }
        return last - first;
    }

    const Mesh& mesh_;
    const PipelineShape shape_;
    const PipelineCosts costs_;
    const size_t n_;
    std::vector<std::vector<PipelineAction>> lists_;  // (stages)
    std::vector<std::vector<Best>> best_;             // of each action
    double busy_ = 0;
};

std::vector<PipelineShape> timed_shapes() {
    return {{gpipe, 4, 8}, {one_f_one_b, 4, 8}, {interleaved, 4, 8, 2}, {zero_bubble, 4, 8}};
}

constexpr int attempts = 6;  // one suffices on an idle machine

}  // namespace

TEST_CASE("stages idle for as long as the formulas say" * doctest::test_suite("alone")) {
    if (test_world().size() != 4) SKIP("four stages need four ranks");
    Mesh mesh(test_world(), {.pp = 4, .ring = true}, test_stream());
    for (const PipelineShape& shape : timed_shapes()) {
        PipelineCosts costs = {0.03, 0.03, 0.03};
        SleepingSteps steps(mesh, shape, costs, 100);
        double want = time_pipeline(shape, costs).bubble(), got = 0;
        for (int attempt = 0; attempt < attempts; attempt++) {
            steps.measure();
            got = steps.bubble();
            if (std::abs(got - want) < 0.15 * want) break;
        }
        CAPTURE(name_of(shape));
        CHECK(got > 0.85 * want);
        CHECK(got < 1.15 * want);
    }
}

#ifndef RANKS_USE_NCCL  // NCCL cannot be slowed down
TEST_CASE("what is sent is hidden behind the work" * doctest::test_suite("alone")) {
    if (test_world().size() != 4) SKIP("four stages need four ranks");
    Mesh mesh(test_world(), {.pp = 4, .ring = true}, test_stream());
    constexpr size_t n = 900;  // small enough that MPI sends them without a rendezvous, which would take time
    constexpr double transfer = 0.008;
    for (const PipelineShape& shape : timed_shapes()) {
        PipelineCosts costs = {0.03, 0.03, 0.03, transfer}, blocking = costs;
        blocking.forward += transfer, blocking.input_gradient += transfer;
        double hidden = time_pipeline(shape, costs).seconds;
        CAPTURE(name_of(shape));
        CAPTURE(hidden);
        CAPTURE(time_pipeline(shape, blocking).seconds);
        SleepingSteps steps(mesh, shape, costs, n);
        double got = 0;
        for (int attempt = 0; attempt < attempts; attempt++) {
            test_world().barrier();
            host_link_speed(n * sizeof(floatX) / transfer / 1e9);
            steps.measure();
            test_world().barrier();
            host_link_speed(0);
            got = steps.seconds();
            if (got < 1.07 * hidden) break;
        }
        CHECK(got < 1.07 * hidden);
    }
}
#endif
