/*
Measures how well plans predict steps: compares the simulated seconds of several layouts of the same work with
those that the executor needs.

    mpirun -np N bench_plan sleep      layers that sleep for known times, over links that are slowed down
    mpirun -np N bench_plan compute    real steps of a small model, planned for this machine as measured

Sleeping needs no core, so ranks that outnumber the cores wait for each other as ranks on their own devices
would. Parameters, gradients and the rows that stages exchange are real, and so is the code that sends them:
the pipeline (comm/pipeline.h) and ZeRO (comm/zero.h).

Each row shows the error of the simulated time. bench_plan.sh runs all variants, makes one table of each kind,
and adds the median error and the place, by measured time, of the row that was planned to be fastest.
*/
#include <deque>

#include "comm/watchdog.h"
#include "comm/plan_choice.h"
#include "comm/machine.h"
#include "test/bench/bench_links.h"
#include "test/support/program.h"

namespace {

struct Row {
    int pp, dp;
    PipelineSchedule schedule;
    int chunks, zero;
};

std::string name_of_row(const Row& row) {
    int ranks = row.pp * row.dp;
    std::string name = text("%d rank%s: pp %d, dp %d", ranks, ranks > 1 ? "s" : "", row.pp, row.dp);
    if (row.pp > 1) name += text(", %s", name_of(row.schedule));
    if (row.chunks > 1) name += text(" x%d", row.chunks);
    if (row.dp > 1) name += text(", ZeRO %d", row.zero);
    return name;
}

// Four layouts for each number of ranks: 2, 4 and 8.
std::vector<Row> rows_of(int ranks) {
    using enum PipelineSchedule;
    if (ranks == 2)
        return {{2, 1, one_f_one_b, 1, 0},
                {2, 1, interleaved, 2, 0},
                {1, 2, one_f_one_b, 1, 1},
                {1, 2, one_f_one_b, 1, 3}};
    if (ranks == 4)
        return {{4, 1, zero_bubble, 1, 0},
                {2, 2, interleaved, 2, 1},
                {2, 2, one_f_one_b, 1, 1},
                {1, 4, one_f_one_b, 1, 2}};
    if (ranks == 8)
        return {{8, 1, one_f_one_b, 1, 0},
                {4, 2, interleaved, 2, 1},
                {4, 2, zero_bubble, 1, 1},
                {2, 4, one_f_one_b, 1, 1}};
    fail("bench_plan sleep: on 2, 4 or 8 ranks; start so many");
}

constexpr int sequences = 16;  // per step, one per micro-batch

Options options_of_row(const ModelConfig& config, const Row& row) {
    Options o;
    static_cast<ModelConfig&>(o) = config;
    o.sequence_length = config.context, o.micro_batch = 1;
    o.global_batch = (long long)sequences * o.sequence_length;
    o.pp = row.pp, o.dp = row.dp, o.pp_schedule = row.schedule, o.zero = row.zero;
    o.pp_chunks = row.chunks > 1 ? row.chunks : 0;
    o.recompute = Recompute::none;
    complete_layout(o, row.pp * row.dp);
    return o;
}

Layout layout_of(const Options& o) {
    PipelineShape shape = {o.pp_schedule, o.pp, sequences / o.dp, o.pp_chunks};
    std::vector<int> split((size_t)o.pp * o.pp_chunks, o.layers / o.pp / o.pp_chunks);
    return {mesh_shape(o), o.tp_overlap, shape, split};
}

// ----------------------------------------------------------------------------
// layers that sleep

struct SleepingTimes {
    double forward = 12e-3, input_gradient = 12e-3, weight_gradient = 12e-3;  // per layer
    double head = 9e-3, embedding = 3e-3;  // in either pass, but the head's backward takes twice as long
};

// A rank of a run whose kernels sleep, in the order of the program's stage_forward() and stage_backward(). It
// can also be recorded: a sleep is then recorded with its duration, and the optimizer's launches are real.
class SleepingRank {
public:
    SleepingRank(const Mesh& mesh, const Options& o, const SleepingTimes& times)
        : times_(times),
          micro_batches_(sequences / o.dp),
          stage_(o, layout_of(o), mesh.position, true),
          units_(parameter_layout(o, o.shard_group, stage_.units())),
          state_(memory_, units_, mesh, zero_settings(o), stream_.stream),
          list_(pipeline_actions(stage_.pipeline(micro_batches_), stage_.number())),
          rows_((size_t)o.sequence_length * o.channels),
          pipeline_(memory_, mesh, stage_.pipeline(micro_batches_), pipeline_capacity(list_, stage_.chunks()),
                    rows_, stream_.stream, o.overlap),
          stats_(1) {
        if (!ledger) initialize(state_, 1);
    }

    // Runs a step; returns the seconds of the slowest rank.
    double seconds(const World& world, double link) {
        state_.synchronize();
        world.barrier();
        set_link(link);
        double start = seconds_now();
        sleeps_.clear();
        passes();
        update([] {});
        state_.synchronize();
        double slowest = 1e-6 * world.largest((int)(1e6 * (seconds_now() - start)));
        set_link(0);
        return slowest;
    }

    // Records a step in the ledger.
    void record() {
        auto end = [&] { ledger->end_step(stream_.stream); };
        ledger->forget();
        update(end);
        passes();
        ledger->end_passes();
        update(end);
    }

private:
    void passes() {
        state_.zero_gradients();
        zero_async(stats_.data, 1, stream_.stream);
        pipeline_.run(list_, rows_, [&](const PipelineTask& task) { work(task); });
    }
    void update(const std::function<void()>& measured) {
        state_.update(stats_.data, adamw_optimizer({3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, ++step_, false}, 0),
                      1.0f, measured);
    }
    void sleep(double seconds) {
        if (ledger)
            return ledger->add({.kind = LedgerEntry::launch,
                                .stream = stream_.stream,
                                .launcher = "sleep",
                                .seconds = seconds});
        sleeps_.push_back((useconds_t)(1e6 * seconds));
        cudaCheck(cudaLaunchHostFunc(
            stream_.stream, [](void* time) { usleep(*(const useconds_t*)time); }, &sleeps_.back()));
    }
    void pass(int unit, int direction, double seconds) {
        state_.acquire(unit, direction);
        if (direction <= 0) state_.begin_gradients(unit);
        sleep(seconds);
        state_.release(unit);
    }
    void work(const PipelineTask& task) {
        bool last = task.micro_batch == micro_batches_ - 1, now = task.work == PipelineWork::backward;
        int begin = stage_.first_layer(task.chunk), end = stage_.end_layer(task.chunk),
            last_block = units_.layers, classifier = units_.tied ? 0 : units_.last_unit();
        if (task.work == PipelineWork::weight_gradient) {
            for (int layer = end - 1; layer >= begin; layer--) {
                state_.begin_gradients(layer + 1);
                sleep(times_.weight_gradient);
                state_.reduce_gradients(layer + 1, last);
            }
        } else if (task.work == PipelineWork::forward) {
            if (task.part == 0) pass(0, +1, times_.embedding);
            for (int layer = begin; layer < end; layer++) pass(layer + 1, +1, times_.forward);
            if (task.part == stage_.last_part()) pass(last_block, +1, times_.head);
        } else {
            if (task.part == stage_.last_part()) {
                pass(classifier, 0, 2 * times_.head);
                bool used_again = units_.tied && stage_.has_embedding();
                if (!used_again) state_.reduce_gradients(classifier, last);
            }
            for (int layer = end - 1; layer >= begin; layer--) {
                pass(layer + 1, -1, times_.input_gradient + (now ? times_.weight_gradient : 0));
                state_.reduce_gradients(layer + 1, last && now);
            }
            if (task.part > 0) return;
            state_.begin_gradients(0);
            sleep(times_.embedding);
            state_.reduce_gradients(0, last);
        }
    }

    const SleepingTimes times_;
    const int micro_batches_;
    ComputeStream stream_;
    Arena memory_;
    Stage stage_;
    ParameterLayout units_;
    ZeroState state_;
    std::vector<PipelineAction> list_;
    size_t rows_;
    Pipeline pipeline_;
    DeviceArray<StepStatistics> stats_;
    std::deque<useconds_t> sleeps_;
    int step_ = 0;
};

// Plays a step of such ranks; returns its simulated seconds.
double played_seconds(const Options& o, const SleepingTimes& times, const Machine& machine) {
    std::vector<int> numbers;
    for (int stage = 0; stage < o.pp; stage++)
        numbers.push_back(rank_of(first_of_stage(stage), mesh_shape(o)));
    StepPlayer player(machine, numbers);
    for (int stage = 0; stage < o.pp; stage++) {
        Ledger book({sizeof(floatX)});
        Mesh mesh(mesh_shape(o), first_of_stage(stage));
        SleepingRank(mesh, o, times).record();
        player.add(book);
    }
    return player.play()[0].seconds;
}

// ----------------------------------------------------------------------------
// the table

struct Compared {
    std::string name;
    double planned, measured;
};

void print_compared(const std::vector<Compared>& rows) {
    for (const Compared& row : rows)
        printf("%-44s %10.1f ms %10.1f ms %+7.1f%%\n", row.name.c_str(), 1e3 * row.planned,
               1e3 * row.measured, 100 * (row.planned / row.measured - 1));
    fflush(stdout);
}

// The minimum is used because other programs on the machine only ever add to a time.
double fastest_of_steps(const std::function<double()>& step, int steps) {
    step();  // the first step is slower
    double fastest = step();
    for (int i = 1; i < steps; i++) fastest = std::min(fastest, step());
    return fastest;
}

void bench_sleep(const World& world) {
    constexpr double link = 0.13e9;  // bytes per second and rank
    constexpr int steps = 4;
    ModelConfig config;
    config.layers = 8, config.channels = 256, config.heads = 4, config.vocab_size = 512;
    config.context = 256, config.tie_embeddings = false;
    complete(config);
    SleepingTimes times;
    Machine machine = measured_machine(world);
    world.broadcast(&machine, sizeof machine);
    machine.node = world.size(), machine.node_bandwidth = machine.network = link;
    machine.link_latency = machine.network_latency = 5e-5;
    std::vector<Compared> compared;
    for (const Row& row : rows_of(world.size())) {
        Options o = options_of_row(config, row);
        double planned = played_seconds(o, times, machine);
        Mesh mesh(world, mesh_shape(o), nullptr);
        SleepingRank rank(mesh, o, times);
        compared.push_back(
            {name_of_row(row), planned, fastest_of_steps([&] { return rank.seconds(world, link); }, steps)});
    }
    print_compared(compared);
}

void bench_compute(const World& world) {
    constexpr int steps = 5;
    ModelConfig config;
    config.layers = 4, config.channels = 512, config.heads = 4, config.vocab_size = 2048;
    config.context = 256, config.tie_embeddings = false;
    complete(config);
    std::vector<Compared> compared;
    std::vector<Row> rows = {{1, 1, PipelineSchedule::one_f_one_b, 1, 0}};
    if (world.size() > 1) rows = rows_of(world.size());
    for (const Row& row : rows) {
        Machine machine = measured_machine(world);  // each time: shared machines change by the minute
        world.broadcast(&machine, sizeof machine);
        Options o = options_of_row(config, row);
        PlanTask task = {.options = o, .machine = machine, .devices = world.size()};
        double planned = Planner(task).simulated(o, {}).seconds;
        Mesh mesh(world, mesh_shape(o), nullptr);
        TimedModel model(world, mesh, config, training_workload(o, Recompute::none), zero_settings(o),
                         layout_of(o));
        compared.push_back(
            {name_of_row(row), planned, fastest_of_steps([&] { return model.seconds(0); }, steps)});
    }
    print_compared(compared);
}

}  // namespace

int main(int argc, char** argv) try {
    World world(&argc, &argv, watch_ranks);
    choose_device(world);
#ifndef __CUDACC__
    if (world.size() > 1) host_device.threads = threads_per_rank(world);
#endif
    if (!world.is_root() && !freopen("/dev/null", "w", stdout)) fail("/dev/null: cannot be opened");
    std::string what = argc == 2 ? argv[1] : "";
    if (what == "sleep")
        bench_sleep(world);
    else if (what == "compute")
        bench_compute(world);
    else
        fail("bench_plan: what is compared? give sleep or compute");
    return 0;
} catch (const Error& error) {
    fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
}
