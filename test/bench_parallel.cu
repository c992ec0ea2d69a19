/*
How much of the communication hides behind the computation. Every link is slowed down until what a step sends
takes as long as what it computes; then the step is timed with and without overlap.

    mpirun -np N bench_parallel

    compute     a step over links that are not slowed down
    link        a step's bytes / compute
    can hide    gradients travel during the backward pass (two thirds of the computation), parameters during
                the forward pass, those of ZeRO 3 during both; what takes longer than its pass cannot hide
    hidden      (serial - overlapped) / can hide
*/
#include "test/bench.h"

// What a rank sends in a step for each purpose.
struct Sent {
    double gradients, parameters;
};

inline Sent sent_in_step(Gpt& g, const Batch& batch) {
    step_seconds(g, batch, 1);
    reset_traffic();
    constexpr int steps = 2;  // with the one that warms up
    step_seconds(g, batch, steps - 1);
    return {(double)bytes_sent(Traffic::gradients) / steps, (double)bytes_sent(Traffic::parameters) / steps};
}

int main(int argc, char** argv) try {
    World world(&argc, &argv);
    choose_device(world);
#ifdef RANKS_USE_NCCL
    fail("bench_parallel: slows down the host transport, and this program uses NCCL; build with COMM=mpi");
#else
    if (!world.is_root() && !freopen("/dev/null", "w", stdout)) fail("/dev/null: cannot be opened");
    if (world.size() < 2)
        fail("bench_parallel: one process sends nothing; start it with mpirun -np 2 or more");
    constexpr int repeats = 7;
    ModelConfig config;
    config.layers = 12, config.channels = 256, config.heads = 4, config.vocab_size = 512,
    config.context = 128;
    complete(config);
    Workload workload = {2, 128, true, Recompute::none, 256};
    printf("%d ranks, %d threads each: %s parameters, micro-batch %d x %d\n", world.size(),
           threads_per_rank(world) ? threads_per_rank(world) : atoi(getenv("OMP_NUM_THREADS")),
           human((double)parameter_count(config)).c_str(), workload.B, workload.T);
    printf("%-8s %10s %12s %11s %10s %12s %13s %12s %8s\n", "ZeRO", "sent MB", "compute ms", "link GB/s",
           "serial ms", "overlap ms", "saved ms", "can hide ms", "hidden");
    for (int level = 0; level <= 3; level++) {
        Mesh mesh(world, {.dp = world.size(), .shard = level ? world.size() : 1}, nullptr);
        ZeroSettings overlapped = {.level = level, .keep_master = sizeof(floatX) < sizeof(float)},
                     serial = overlapped;
        serial.overlap = false;
        auto seconds_of = [&](const ZeroSettings& settings, double link, Sent* sent) {
            Gpt g(config, workload, settings, mesh);
            initialize(g, 1);
            RandomBatch batch(g, config.vocab_size);
            host_link_speed(0);
            if (sent) *sent = sent_in_step(g, *batch);
            host_link_speed(link);
            double seconds = step_seconds(g, *batch, repeats);
            host_link_speed(0);
            // all ranks use the numbers of the first
            world.broadcast(&seconds, sizeof seconds);
            return seconds;
        };
        Sent sent;
        double compute = seconds_of(serial, 0, &sent);
        double bytes = sent.gradients + sent.parameters, link = bytes / compute / 1e9;
        double apart = seconds_of(serial, link, nullptr), together = seconds_of(overlapped, link, nullptr);
        double gradients = sent.gradients / link / 1e9, parameters = sent.parameters / link / 1e9;
        double forward = compute / 3, backward = compute - forward;
        double can_hide = level < 3 ? std::min(gradients, backward) + std::min(parameters, forward)
                                    : std::min(gradients + parameters, compute);
        printf("%-8d %10.1f %12.1f %11.3f %10.1f %12.1f %13.1f %12.1f %7.0f%%\n", level, bytes / 1e6,
               compute * 1e3, link, apart * 1e3, together * 1e3, (apart - together) * 1e3, can_hide * 1e3,
               100 * (apart - together) / can_hide);
        fflush(stdout);
    }
    return 0;
#endif
} catch (const Error& error) {
    fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
}
