/*
What several ranks cost and hide, over the host transport.

    mpirun -np N bench_parallel overlap    how much communication hides behind computation, over links slowed
                                           down until a step's bytes take as long as its computation
    mpirun -np N bench_parallel groups     how long it takes to build the groups of a mesh

    compute     a step over links that are not slowed down
    link        a step's bytes / compute
    serial      a step without overlap, over slow links
    can hide    gradients travel during the backward pass (two thirds of the computation), parameters during
                the forward pass, those of ZeRO 3 during both; what takes longer than its pass cannot hide
    hidden      (serial - overlapped) / can hide
*/
#include "test/bench.h"

inline void bench_groups(const World& world) {
    int n = world.size(), tp = n >= 8 ? 2 : 1, pp = n >= 16 ? 2 : 1, dp = n / tp / pp;
    MeshShape shape = {tp, pp, dp, dp >= 4 ? 2 : dp};
    int slowest = INT_MAX, groups = 0;
    for (int i = 0; i < 3; i++) {
        world.barrier();
        Mesh mesh(world, shape, nullptr);
        slowest = std::min(slowest, world.largest((int)(mesh.build_seconds * 1e6)));
        groups = mesh.groups_built;
    }
    printf("%8d %8d %10.1f\n", n, groups, slowest / 1e3);
}

#ifdef RANKS_USE_NCCL

inline void bench_overlap(const World&) {
    fail("bench_parallel: slows down the host transport, and this program uses NCCL; build with COMM=mpi");
}

#else

inline double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

// Seconds of the three kinds of step, taken in turns so that they meet the same noise.
struct StepTimes {
    std::vector<double> compute, serial, overlapped;
};

inline void bench_overlap(const World& world) {
    ModelConfig config;
    config.layers = 24, config.channels = 256, config.heads = 4, config.vocab_size = 512,
    config.context = 128;
    complete(config);
    Workload workload = {8, 128, true, Recompute::none, 1024};
    printf("%d ranks: %s parameters, micro-batch %d x %d\n", world.size(),
           human((double)parameter_count(config)).c_str(), workload.B, workload.T);
    printf("%-6s %9s %11s %10s %10s %14s %11s %8s\n", "ZeRO", "sent MB", "compute ms", "link GB/s",
           "serial ms", "overlapped ms", "can hide ms", "hidden");
    for (int level = 0; level <= 3; level++) {
        Mesh mesh(world, {.dp = world.size(), .shard = level ? world.size() : 1}, nullptr);
        ZeroSettings on = {.level = level, .keep_master = sizeof(floatX) < sizeof(float)}, off = on;
        off.overlap = false;
        Gpt overlapped(config, workload, on, mesh), serial(config, workload, off, mesh);
        RandomBatch batch(serial, config.vocab_size), same_batch(overlapped, config.vocab_size);
        initialize(overlapped, 1);
        initialize(serial, 1);
        constexpr int rounds = 3, steps = 2;
        auto time_steps = [&](Gpt& g, const Batch& batch, double link) {
            host_link_speed(link);
            double seconds = step_seconds(g, batch, steps);
            g.state.synchronize();
            host_link_speed(0);
            world.broadcast(&seconds, sizeof seconds);  // all ranks use the times of the first
            return seconds;
        };
        reset_traffic();
        double compute = time_steps(serial, *batch, 0);
        double gradients = (double)bytes_sent(Traffic::gradients) / (steps + 1),
               parameters = (double)bytes_sent(Traffic::parameters) / (steps + 1);
        double link = (gradients + parameters) / compute / 1e9;
        StepTimes times;
        for (int round = 0; round < rounds; round++) {
            times.compute.push_back(time_steps(serial, *batch, 0));
            times.serial.push_back(time_steps(serial, *batch, link));
            times.overlapped.push_back(time_steps(overlapped, *same_batch, link));
        }
        compute = median(times.compute);
        double saved = median(times.serial) - median(times.overlapped);
        double send_gradients = gradients / link / 1e9, send_parameters = parameters / link / 1e9;
        double can_hide =
            level < 3 ? std::min(send_gradients, compute * 2 / 3) + std::min(send_parameters, compute / 3)
                      : std::min(send_gradients + send_parameters, compute);
        printf("%-6d %9.1f %11.1f %10.3f %10.1f %14.1f %11.1f %7.0f%%\n", level,
               (gradients + parameters) / 1e6, compute * 1e3, link, median(times.serial) * 1e3,
               median(times.overlapped) * 1e3, can_hide * 1e3, 100 * saved / can_hide);
        fflush(stdout);
    }
}

#endif

int main(int argc, char** argv) try {
    World world(&argc, &argv);
    choose_device(world);
    if (!world.is_root() && !freopen("/dev/null", "w", stdout)) fail("/dev/null: cannot be opened");
    std::string what = argc == 2 ? argv[1] : "";
    if (world.size() < 2)
        fail("bench_parallel: one process sends nothing; start it with mpirun -np 2 or more");
    if (what != "groups" && what != "overlap")
        fail("bench_parallel: what to measure? give groups or overlap");
    what == "groups" ? bench_groups(world) : bench_overlap(world);
    return 0;
} catch (const Error& error) {
    fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
}
