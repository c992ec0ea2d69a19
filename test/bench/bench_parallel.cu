/*
Measures what communication between ranks costs over the host transport, and how much of it can be hidden.

    mpirun -np N bench_parallel groups      the time to build the groups of a mesh
    mpirun -np N bench_parallel data        how much communication hides behind computation: that of ZeRO,
    mpirun -np N bench_parallel tensor      of tensor parallelism,
    mpirun -np N bench_parallel pipeline    and of a pipeline
    mpirun -np N bench_parallel layouts     the cost of several layouts of one model over slow links
*/
#include "test/bench/bench_layouts.h"
#include "test/bench/bench_overlap.h"

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

int main(int argc, char** argv) try {
    World world(&argc, &argv, watch_ranks);
    choose_device(world);
    if (!world.is_root() && !freopen("/dev/null", "w", stdout)) fail("/dev/null: cannot be opened");
    std::string what = argc == 2 ? argv[1] : "";
    if (world.size() < 2)
        fail("bench_parallel: one process sends nothing; start it with mpirun -np 2 or more");
    struct {
        const char* name;
        void (*measure)(const World&);
    } benchmarks[] = {{"groups", bench_groups},
                      {"data", bench_data_overlap},
                      {"tensor", bench_tensor_overlap},
                      {"pipeline", bench_pipeline_overlap},
                      {"layouts", bench_layouts}};
    for (auto [name, measure] : benchmarks) {
        if (what != name) continue;
        measure(world);
        return 0;
    }
    fail("bench_parallel: what to measure? give groups, data, tensor, pipeline or layouts");
} catch (const Error& error) {
    fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
}
