// The mesh of ranks and the control plane: numbering, members of groups, errors that all ranks agree on.
// devices: cpu cuda
// ranks: 2 1 3 4 6
#include <chrono>
#include <set>
#include <thread>

#include "comm/memory_plan.h"
#include "comm/mesh.h"
#include "test/support/file_testing.h"
#include "test/support/ranks.h"
#include "test/support/testing.h"

namespace {

// All mesh shapes of a number of ranks.
std::vector<MeshShape> shapes_of(int ranks) {
    std::vector<MeshShape> shapes;
    auto divides = [&](int number) { return number <= ranks && ranks % number == 0; };
    for (int tp = 1; tp <= ranks; tp++) {
        for (int cp = 1; divides(tp) && cp <= ranks / tp; cp++) {
            for (int pp = 1; divides(tp * cp) && pp <= ranks / tp / cp; pp++) {
                int dp = ranks / tp / cp / pp;
                for (int shard = 1; divides(tp * cp * pp) && shard <= dp; shard++) {
                    if (dp % shard) continue;
                    shapes.push_back({.tp = tp, .cp = cp, .pp = pp, .dp = dp, .shard = shard});
                    if (pp > 1) shapes.push_back(shapes.back()), shapes.back().ring = true;
                }
            }
        }
    }
    return shapes;
}

// The ranks in a group, in the order that the communicator gives them.
std::vector<int> members_of(const Communicator& group) {
    Buffer<int> numbers((size_t)group.size());
    int mine = test_world().rank();
    cudaCheck(cudaMemcpy(numbers + group.rank(), &mine, sizeof mine, cudaMemcpyHostToDevice));
    group.all_gather((int*)numbers, 1, Traffic::statistics, test_stream());
    return numbers.host();
}

// The ranks at the other ends of the links, or -1: forward_in, forward_out, backward_in, backward_out.
std::vector<int> neighbours_of(const MeshLinks& links) {
    auto mine = (float)test_world().rank();
    Buffer<float> number(std::vector<float>(1, mine)), met(std::vector<float>(4, -1.0f));
    // Each rank's number travels forward, and then backward.
    auto exchange = [&](const Communicator& in, const Communicator& out, float* from, float* back) {
        auto pass = [&](const Communicator& way_in, int sender, const Communicator& way_out, float* to) {
            ncclCheck(ncclGroupStart());
            if (way_out.size() > 1)
                way_out.send((float*)number, 1, 1 - sender, Traffic::statistics, test_stream());
            if (way_in.size() > 1) way_in.receive(to, 1, sender, test_stream());
            ncclCheck(ncclGroupEnd());
        };
        pass(in, MeshLinks::sender, out, from);
        pass(out, MeshLinks::receiver, in, back);
    };
    exchange(links.forward_in, links.forward_out, met, met + 1);
    exchange(links.backward_in, links.backward_out, met + 2, met + 3);
    std::vector<float> all = met.host();
    return {all.begin(), all.end()};
}

std::string name_of(const MeshShape& shape) {
    return text("tp %d cp %d pp %d dp %d shard %d", shape.tp, shape.cp, shape.pp, shape.dp, shape.shard);
}

std::string text_of(const std::vector<int>& numbers) {
    std::string result;
    for (int number : numbers) result += text("%d ", number);
    return result;
}

}  // namespace

// ----------------------------------------------------------------------------
// arithmetic

TEST_CASE("each rank has a place of its own, and is found there") {
    for (int ranks : {1, 2, 3, 4, 6, 8, 12, 16, 24, 30}) {
        for (const MeshShape& shape : shapes_of(ranks)) {
            CAPTURE(name_of(shape));
            std::set<std::vector<int>> places;
            bool found = true, inside = true;
            for (int rank = 0; rank < ranks; rank++) {
                MeshPosition p = position_of(rank, shape);
                found = found && rank_of(p, shape) == rank;
                const int sizes[] = {shape.tp, shape.cp, shape.shard, shape.dp / shape.shard, shape.pp};
                for (int axis = 0; axis < 5; axis++)
                    inside = inside && p.of[axis] >= 0 && p.of[axis] < sizes[axis];
                places.insert({p.of.begin(), p.of.end()});
            }
            CHECK(found);
            CHECK(inside);
            CHECK((int)places.size() == ranks);
        }
    }
}

TEST_CASE(
    "neighbours along an axis are a fixed step apart: tensor 1, then context, shard, replica, pipeline") {
    for (int ranks : {1, 2, 3, 4, 6, 8, 12, 16, 24, 30}) {
        for (const MeshShape& shape : shapes_of(ranks)) {
            CAPTURE(name_of(shape));
            bool right = true;
            for (int rank = 0; rank < ranks; rank++) {
                MeshPosition p = position_of(rank, shape);
                auto step = [&](Axis axis) { return rank_of(p.with(axis, p[axis] + 1), shape) - rank; };
                int both = shape.tp * shape.cp;
                right = right && step(Axis::tensor) == 1 && step(Axis::context) == shape.tp &&
                        step(Axis::shard) == both && step(Axis::replica) == both * shape.shard &&
                        step(Axis::pipeline) == both * shape.dp;
            }
            CHECK(right);
        }
    }
}

TEST_CASE("groups along each set of axes cut the world evenly") {
    for (int ranks : {1, 6, 8, 12, 16, 24}) {
        for (const MeshShape& shape : shapes_of(ranks)) {
            CAPTURE(name_of(shape));
            int sizes[] = {shape.tp, shape.cp, shape.shard, shape.dp / shape.shard, shape.pp};
            bool right = true;
            for (int axes = 0; axes < 32; axes++) {
                int size = 1;
                for (int axis = 0; axis < 5; axis++) size *= axes >> axis & 1 ? sizes[axis] : 1;
                for (int rank = 0; rank < ranks; rank++) {
                    std::vector<int> group = group_of(rank, AxisSet(axes), shape);
                    right = right && (int)group.size() == size &&
                            std::is_sorted(group.begin(), group.end()) &&
                            std::count(group.begin(), group.end(), rank) == 1;
                    for (int member : group) right = right && group_of(member, AxisSet(axes), shape) == group;
                }
            }
            CHECK(right);
        }
    }
}

TEST_CASE("the example in the documentation") {
    PerAxis sizes = MeshShape{.tp = 2, .dp = 4, .shard = 2};
    CHECK(group_of(5, Axis::tensor, sizes) == std::vector<int>{4, 5});
    CHECK(group_of(5, Axis::shard, sizes) == std::vector<int>{5, 7});
    CHECK(group_of(5, Axis::replica, sizes) == std::vector<int>{1, 5});
    CHECK(group_of(5, data_axes, sizes) == std::vector<int>{1, 3, 5, 7});
    CHECK(group_of(5, Axis::pipeline, sizes) == std::vector<int>{5});
    CHECK(position_of(5, sizes) == MeshPosition{{1, 0, 0, 1, 0}});
}

// ----------------------------------------------------------------------------
// communicators

TEST_CASE("each communicator of every shape has the members it should have, in order") {
    const World& world = test_world();
    for (MeshShape shape : shapes_of(world.size())) {
        CAPTURE(name_of(shape));
        shape.stage_group = true;
        // no group size except 1 divides 11, 13 or 17
        constexpr MeshTraffic traffic = {.unit = 11, .rows = 13, .keys = 17, .sent = 5};
        Mesh mesh(world, shape, test_stream(), traffic);
        // Derived here from the definition: ranks that agree in the other coordinates.
        auto expected = [&](bool tensor, bool context, bool shard, bool replica, bool pipeline) {
            std::vector<int> members;
            const int sizes[] = {shape.tp, shape.cp, shape.shard, shape.dp / shape.shard, shape.pp};
            const bool along[] = {tensor, context, shard, replica, pipeline};
            for (int rank = 0; rank < world.size(); rank++) {
                bool in = true;
                for (int axis = 0, mine = world.rank(), other = rank; axis < 5; axis++) {
                    in = in && (along[axis] || mine % sizes[axis] == other % sizes[axis]);
                    mine /= sizes[axis], other /= sizes[axis];
                }
                if (in) members.push_back(rank);
            }
            return text_of(members);
        };
        CHECK(text_of(members_of(mesh.world())) == expected(true, true, true, true, true));
        CHECK(text_of(members_of(mesh.tensor())) == expected(true, false, false, false, false));
        CHECK(text_of(members_of(mesh.context())) == expected(false, true, false, false, false));
        CHECK(text_of(members_of(mesh.shard())) == expected(false, true, true, false, false));
        CHECK(text_of(members_of(mesh.replica())) == expected(false, false, false, true, false));

        CHECK(mesh.context().rank() == mesh.position[Axis::context]);
        CHECK(mesh.shard().rank() == mesh.position[Axis::shard] * shape.cp + mesh.position[Axis::context]);
        CHECK(mesh.replica().rank() == mesh.position[Axis::replica]);
        CHECK(mesh.tensor().rank() == mesh.position[Axis::tensor]);

        // Matrices are sent by number in the stage group: the rank of the counterpart on the first stage.
        MeshPosition on_first = mesh.position;
        on_first[Axis::pipeline] = 0;
        CHECK(text_of(members_of(mesh.stage())) == expected(true, true, true, true, false));
        CHECK(mesh.stage().rank() == rank_of(on_first, shape));

        // Groups with the same members are shared, and a group of one needs no communicator.
        std::set<std::string> different;
        const Communicator* groups[] = {&mesh.stage(), &mesh.tensor(), &mesh.shard(), &mesh.replica()};
        for (const Communicator* group : groups) {
            std::string members = text_of(members_of(*group));
            if (group->size() > 1) different.insert(members);
            for (const Communicator* other : groups) {
                bool same = text_of(members_of(*other)) == members;
                CHECK(same == group->same_group(*other));
            }
        }
        // Gathers are an exception: they overlap reductions over the same ranks. So are context groups.
        bool contexts = mesh.context().size() > 1;
        for (const Communicator* group : groups) CHECK((!contexts || !group->same_group(mesh.context())));
        CHECK(text_of(members_of(mesh.gathers())) == text_of(members_of(mesh.shard())));
        bool own_group = mesh.gathers().size() > 1;
        if (own_group) CHECK(!mesh.gathers().same_group(mesh.shard()));
        // So is the group of all ranks, which has one channel.
        bool all = mesh.world().size() > 1;
        for (const Communicator* group : groups) CHECK((!all || !group->same_group(mesh.world())));

        // Links connect neighbors; each is a separate group.
        int step = shape.tp * shape.cp * shape.dp, stage = mesh.position[Axis::pipeline], last = shape.pp - 1;
        bool round = shape.ring && last > 0;
        int before = stage > 0 ? world.rank() - step : round ? world.rank() + last * step : -1;
        int behind = stage < last ? world.rank() + step : round ? world.rank() - last * step : -1;
        const MeshLinks& links = mesh.links();
        CHECK(neighbours_of(links) == std::vector<int>{before, behind, behind, before});
        const Communicator* ways[] = {&links.forward_in, &links.forward_out, &links.backward_in,
                                      &links.backward_out};
        int linked = 0;
        for (const Communicator* way : ways) {
            if (way->size() == 1) continue;
            linked++;
            bool receives = way == &links.forward_in || way == &links.backward_in;
            CHECK(way->rank() == (receives ? MeshLinks::receiver : MeshLinks::sender));
            for (const Communicator* other : groups) CHECK(!way->same_group(*other));
            for (const Communicator* other : ways) CHECK((way == other) == way->same_group(*other));
        }

        // The ends of the pipeline.
        int first = world.rank() - stage * step;
        bool at_end = last > 0 && (stage == 0 || stage == last);
        std::vector<int> ends = {first, first + last * step};
        CHECK(members_of(mesh.embedding_group()) == (at_end ? ends : std::vector<int>{world.rank()}));

        CHECK(mesh.groups_built == all + (int)different.size() + own_group + contexts + linked + at_end);
        CHECK((mesh.build_seconds > 0) == (world.size() > 1));
        mesh.check();
    }
}

TEST_CASE("the memory of groups follows from their channels, and from where the machines are divided") {
    constexpr size_t ring = memory_of_connection, peer = memory_of_peer;
    CHECK(communicator_memory({}, 8) == 0);
    // Eight tensor ranks in one machine, and then in two.
    CHECK(communicator_memory({.tp = 8}, 8) == ring + 8 * peer + 16 * (ring + 8 * peer));
    CHECK(communicator_memory({.tp = 8}, 4) == 2 * ring + 8 * peer + 16 * (2 * ring + 8 * peer));
    // Two shards within a machine and two replicas across, with separate groups for gathers.
    CHECK(communicator_memory({.dp = 4, .shard = 2}, 2) ==
          2 * ring + 4 * peer + 2 * 16 * (ring + 2 * peer) + 16 * (2 * ring + 2 * peer));
    // Muon's matrices are sent among all four ranks.
    CHECK(communicator_memory({.dp = 4, .shard = 2, .stage_group = true}, 2) -
              communicator_memory({.dp = 4, .shard = 2}, 2) ==
          16 * (2 * ring + 4 * peer));
    CHECK(communicator_memory({.dp = 4, .shard = 4, .stage_group = true}, 8) ==
          communicator_memory({.dp = 4, .shard = 4}, 8));
    // Between two stages on separate machines: four links, and the group of both ends.
    CHECK(communicator_memory({.pp = 2}, 1) == (1 + 4 * blocks_of_links + 16) * (2 * ring + 2 * peer));
    // For a run on 12,288 cards, 1.2 to 2 GB are expected.
    double large = (double)communicator_memory({.tp = 8, .pp = 8, .dp = 192, .shard = 192}, 8);
    CHECK(large > 1.2e9);
    CHECK(large < 2e9);
}

TEST_CASE("settings of a library are found in the environment") {
    const char* environment[] = {"PATH=/bin", "NCCL_PROTO=LL", "NCCL_ALGO=Ring", "XNCCL_A=1", nullptr};
    CHECK(settings_in((char**)environment, "NCCL_") == ", NCCL_ALGO=Ring, NCCL_PROTO=LL");
    CHECK(settings_in((char**)environment + 4, "NCCL_") == "");
}

TEST_CASE("a shape that is not that of the world is refused") {
    const World& world = test_world();
    CHECK_REFUSED(Mesh(world, {.tp = 2, .dp = world.size()}, test_stream()), "mesh: tp 2 * cp 1 * pp 1");
    CHECK_REFUSED(Mesh(world, {.dp = world.size(), .shard = world.size() + 1}, test_stream()),
                  "shard groups of");
}

TEST_CASE("the picture names the sizes and the groups") {
    CHECK(Mesh().picture() == "1 rank = 1 replica x 1 shard (tensor 1, pipeline 1)");
    Mesh mesh;
    mesh.shape = {.dp = 4, .shard = 2};
    mesh.groups_built = 3;
    mesh.build_seconds = 0.012;
    CHECK(mesh.picture() ==
          "4 ranks = 2 replicas x 2 shards (tensor 1, pipeline 1); 3 groups built in 12 ms\n"
          "  shard      {0 1} {2 3}\n"
          "  replica    {0 2} {1 3}");
    mesh.shape = {.tp = 8, .pp = 4, .dp = 512, .shard = 64};
    mesh.shape.cp = 2;
    CHECK(mesh.picture().find(" (tensor 8, context 2, pipeline 4)") != std::string::npos);
    mesh.shape.cp = 1;
    std::istringstream lines(mesh.picture());
    int count = 0;
    for (std::string line; std::getline(lines, line); count++) {
        CHECK(line.size() <= 110);
        if (count > 0) CHECK(line.ends_with(" ..."));
    }
    CHECK(count == 5);
}

// ----------------------------------------------------------------------------
// the control plane

TEST_CASE("broadcast gives root's bytes to everyone") {
    const World& world = test_world();
    for (int root = 0; root < world.size(); root++) {
        std::vector<int> values(1000, -1);
        if (world.rank() == root) {
            for (int i = 0; i < 1000; i++) values[(size_t)i] = root * 1000 + i;
        }
        world.broadcast(values.data(), values.size() * sizeof(int), root);
        CHECK(values.front() == root * 1000);
        CHECK(values.back() == root * 1000 + 999);
        world.broadcast(nullptr, 0, root);
    }
}

TEST_CASE("gather brings everyone's text, whatever its length") {
    const World& world = test_world();
    for (size_t most : {0, 1, 100000}) {
        // Lengths differ between ranks, and some are 0.
        auto of_rank = [&](int rank) { return std::string(most * (size_t)rank, (char)('a' + rank)); };
        std::vector<std::string> texts = world.all_gather(of_rank(world.rank()));
        REQUIRE((int)texts.size() == world.size());
        for (int rank = 0; rank < world.size(); rank++) CHECK(texts[(size_t)rank] == of_rank(rank));
    }
}

TEST_CASE("the first rank's text, and what it makes of everyone's") {
    const World& world = test_world();
    for (size_t length : {0, 1, 3999, 4000, 4001, 1'000'000}) {
        std::string mine(length, (char)('a' + world.rank()));
        CHECK(world.broadcast_text(mine) == std::string(length, 'a'));
        int last = world.size() - 1;
        CHECK(world.broadcast_text(mine, last) == std::string(length, (char)('a' + last)));
    }
    std::string all;
    for (int rank = 0; rank < world.size(); rank++) all += (char)('a' + rank);
    std::string joined = world.agree({(char)('a' + world.rank())}, [](const std::vector<std::string>& texts) {
        std::string together;
        for (const std::string& text : texts) together += text;
        return together;
    });
    CHECK(joined == all);
    CHECK(world.gather("x").size() == (size_t)(world.is_root() ? world.size() : 0));
}

TEST_CASE("exchange brings to each what others have for him, call after call") {
    const World& world = test_world();
    int size = world.size(), rank = world.rank();
    // In turn n, rank r writes to r through r + n; some messages are long.
    auto message = [](int turn, int from, int to) {
        return std::string((size_t)(to % 2 ? 70'000 : 3), (char)('a' + turn)) + text("%d %d", from, to);
    };
    for (int turn = 0; turn < 20; turn++) {
        std::vector<std::string> mine((size_t)size);
        auto writes = [&](int from, int to) { return (to - from + size) % size <= turn % size; };
        for (int to = 0; to < size; to++) {
            if (writes(rank, to)) mine[(size_t)to] = message(turn, rank, to);
        }
        std::vector<std::string> received = world.exchange({mine.begin(), mine.end()});
        REQUIRE((int)received.size() == size);
        for (int from = 0; from < size; from++)
            CHECK(received[(size_t)from] == (writes(from, rank) ? message(turn, from, rank) : ""));
    }
}

TEST_CASE("the largest value of all ranks") {
    const World& world = test_world();
    CHECK(world.largest(world.rank()) == world.size() - 1);
    CHECK(world.largest(-world.rank() - 5) == -5);
}

TEST_CASE("ranks of one machine are told apart") {
    const World& world = test_world();
    CHECK(world.local_rank() >= 0);
    CHECK(world.local_rank() < world.local_size());
    auto places = world.all_gather(world.host() + text(" %d", world.local_rank()));
    CHECK(std::set<std::string>(places.begin(), places.end()).size() == (size_t)world.size());
}

static std::string common_error_of(const std::function<void()>& step) {
    try {
        test_world().on_all_ranks(step);
    } catch (const CommonError& error) {
        return error.what();
    }
    return "none";
}

TEST_CASE("an error on some ranks is thrown by all, with the name of the first") {
    const World& world = test_world();
    int ranks = world.size();
    for (int bad = 0; bad < ranks; bad++) {
        CAPTURE(bad);
        std::string got = common_error_of([&] {
            if (world.rank() >= bad) fail("x.bin: cannot be read; look after it");
        });
        std::string prefix = bad == 0 ? "" : text("rank %d of %d on %s: ", bad, ranks, world.host().c_str());
        CHECK(got == prefix + "x.bin: cannot be read; look after it");
    }
    // Messages differ: the first rank's is reported, with its name.
    std::string got = common_error_of([&] { fail("file %d: bad; mend it", world.rank()); });
    std::string prefix = ranks == 1 ? "" : text("rank 0 of %d on %s: ", ranks, world.host().c_str());
    CHECK(got == prefix + "file 0: bad; mend it");
}

TEST_CASE("an error on one rank only does not leave the others behind") {
    const World& world = test_world();
    for (int bad = 0; bad < world.size(); bad++) {
        std::string got = common_error_of([&] {
            if (world.rank() == bad) throw Error("");  // an empty message is a message
        });
        CHECK(got == (world.size() == 1
                          ? ""
                          : text("rank %d of %d on %s: ", bad, world.size(), world.host().c_str())));
    }
}

TEST_CASE("no error, other exceptions, and errors within errors") {
    const World& world = test_world();
    int done = 0;
    CHECK(common_error_of([&] { done++; }) == "none");
    CHECK(done == 1);
    CHECK(common_error_of([] { throw std::bad_alloc(); }).starts_with("out of memory; "));
    CHECK(common_error_of([] { throw std::runtime_error("words"); }) == "words");
    // An error that an inner on_all_ranks() has agreed on passes through the outer one unchanged.
    std::string inner = common_error_of([&] {
        if (world.rank() == world.size() - 1) fail("a: b; c");
    });
    std::string outer = common_error_of([&] {
        world.on_all_ranks([&] {
            if (world.rank() == world.size() - 1) fail("a: b; c");
        });
    });
    CHECK(outer == inner);
}

TEST_CASE("cores are those beside the device where the launcher leaves the choice") {
    auto range = [](int first, int end) {
        Cores cores;
        for (int core = first; core < end; core++) cores.insert(core);
        return cores;
    };
    CHECK(parse_cores("0-3,8,10-11") == Cores{0, 1, 2, 3, 8, 10, 11});
    CHECK(parse_cores("5") == Cores{5});
    CHECK(parse_cores("").empty());
    CHECK(parse_cores("none").empty());
    Cores all = range(0, 64), near = range(32, 64);
    CoreChoice free = choose_cores(all, near, 64, "mpirun: --bind-to none");
    CHECK(free.bind_to == near);
    CHECK(free.text == "32 of 64, those of the device's NUMA node");
    CHECK(choose_cores(all, {}, 64, "").bind_to.empty());
    CHECK(choose_cores(all, all, 64, "").text == "64");
    CoreChoice bound = choose_cores({40}, near, 64, "mpirun: --bind-to none");
    CHECK(bound.bind_to.empty());
    CHECK(bound.text == "1 of 64, bound by mpirun: --bind-to none");
    CHECK(choose_cores({4}, near, 64, "").text == "1 of 64; the device is on another NUMA node");
}

TEST_CASE("threads for each rank: its share of the cores, of those it may use, unless told otherwise") {
    const World& world = test_world();
    const char* set = getenv("OMP_NUM_THREADS");
    std::string kept = set ? set : "";
    unsetenv("OMP_NUM_THREADS");
    cpu_set_t allowed, one;
    REQUIRE(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN), share = std::max(1, cores / world.local_size());
    CHECK(threads_per_rank(world) == std::min(share, CPU_COUNT(&allowed)));
    CPU_ZERO(&one);
    for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; core++) {
        if (CPU_ISSET(core, &allowed)) CPU_SET(core, &one);
    }
    REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(threads_per_rank(world) == 1);
    REQUIRE(sched_setaffinity(0, sizeof allowed, &allowed) == 0);
    setenv("OMP_NUM_THREADS", "3", 1);
    CHECK(threads_per_rank(world) == 0);
    if (set) {
        setenv("OMP_NUM_THREADS", kept.c_str(), 1);
    } else {
        unsetenv("OMP_NUM_THREADS");
    }
}

// Clears the variables that launchers set, so that the process counts as started without one; restores them
// at the end.
class NoLauncher {
public:
    NoLauncher() {
        for (const char* variable : variables) {
            if (const char* value = getenv(variable)) kept_.emplace_back(variable, value);
            unsetenv(variable);
        }
    }
    ~NoLauncher() {
        for (const char* variable : variables) unsetenv(variable);
        for (auto& [variable, value] : kept_) setenv(variable, value.c_str(), 1);
    }

private:
    static constexpr const char* variables[] = {
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK",  "PMI_RANK",     "PMI_SIZE",
        "SLURM_STEP_NUM_TASKS", "WORLD_SIZE",           "LOCAL_RANK", "SLURM_PROCID", "RANK",
        "SLURM_NTASKS"};
    std::vector<std::pair<const char*, std::string>> kept_;
};

TEST_CASE("launchers say how many processes there are") {
    NoLauncher none;
    CHECK(launched_processes() == 0);
    for (auto [size, rank] :
         {std::pair("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), std::pair("PMI_SIZE", "PMI_RANK"),
          std::pair("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")}) {
        setenv(size, "3", 1);
        setenv(rank, "1", 1);
        CHECK(launched_processes() == 3);
        for (const char* variable : {size, rank}) unsetenv(variable);
    }
    // mpirun within a Slurm job: Slurm counts and numbers mpirun's daemons.
    const std::pair<const char*, const char*> both[] = {{"SLURM_STEP_NUM_TASKS", "2"},
                                                        {"SLURM_PROCID", "1"},
                                                        {"OMPI_COMM_WORLD_SIZE", "5"},
                                                        {"OMPI_COMM_WORLD_RANK", "4"}};
    std::string environment(1, '\0');
    for (auto [variable, value] : both) {
        setenv(variable, value, 1);
        environment += std::string(variable) + "=" + value + '\0';
    }
    CHECK(launched_processes() == 5);
    CHECK(binding_launcher() == "mpirun: --bind-to none");
    CHECK(rank_told_in(environment) == "4");
    CHECK(rank_told_in(std::string(1, '\0') + "XPMI_RANK=4") == "");
    for (auto [variable, value] : both) unsetenv(variable);
    // Many users have WORLD_SIZE set; torchrun also passes each process its rank.
    setenv("WORLD_SIZE", "4", 1);
    CHECK(launched_processes() == 0);
    for (const char* variable : {"LOCAL_RANK", "RANK"}) {
        setenv(variable, "0", 1);
        CHECK(launched_processes() == 4);
        unsetenv(variable);
    }
    setenv("SLURM_NTASKS", "1", 1);
    CHECK_NOTHROW(check_all_started());
    setenv("SLURM_NTASKS", "16", 1);
    CHECK_THROWS_WITH(check_all_started(),
                      "SLURM_NTASKS is 16, but this process is alone; start all tasks with srun --mpi=pmix "
                      "or mpirun, or unset SLURM_NTASKS to train in one process");
    setenv("OMPI_COMM_WORLD_SIZE", "1", 1);  // one process is intended
    setenv("OMPI_COMM_WORLD_RANK", "0", 1);
    CHECK_NOTHROW(check_all_started());
}

TEST_CASE("one of several processes that cannot find the others is refused") {
    NoLauncher none;
    std::vector<std::pair<const char*, const char*>> launchers[] = {
        {{"SLURM_STEP_NUM_TASKS", "6"}, {"SLURM_PROCID", "1"}}, {{"WORLD_SIZE", "6"}, {"LOCAL_RANK", "1"}}};
    for (auto& variables : launchers) {
        for (auto [variable, value] : variables) setenv(variable, value, 1);
        CHECK_REFUSED(World(nullptr, nullptr, watch_ranks),
                      "6 processes were started, but this one finds 1; ");
        for (auto [variable, value] : variables) unsetenv(variable);
    }
    setenv("SLURM_NTASKS", "6", 1);  // a single process, started by a script within the job
    CHECK(World(nullptr, nullptr, watch_ranks).size() == 1);
}

TEST_CASE("a message has its rank's name once") {
    const World& world = test_world();
    CHECK(world.said_by(0, "a: b") == world.name_of(0) + ": a: b");
    std::string thrown = error_of([] { cudaCheck(cudaErrorInvalidValue); });
    CHECK(thrown.starts_with(process_place() + ": "));
    CHECK(world.said_by(world.rank(), thrown) == thrown);
    // an error that all ranks agree on contains the name only once too
    int bad = world.size() - 1;
    std::string common = common_error_of([&] {
        if (world.rank() == bad) cudaCheck(cudaErrorInvalidValue);
    });
    CHECK(common.starts_with(world.name_of(bad)));
    CHECK(common.find(world.name_of(bad), 1) == common.npos);
}

// ----------------------------------------------------------------------------
// waiting

TEST_CASE("a wait ends with the work, and sees it done") {
    const World& world = test_world();
    Mesh mesh(world, {1, 1, world.size(), 1}, test_stream());
    for (int i = 0; i < 20; i++) {
        Buffer<float> numbers(std::vector<float>(1000, 1.0f));
        mesh.world().all_reduce((float*)numbers, numbers.size(), Traffic::gradients, test_stream());
        wait_for(test_stream(), mesh);
        CHECK(cudaStreamQuery(test_stream()) == cudaSuccess);
        CHECK(numbers.host() == std::vector<float>(1000, (float)world.size()));
    }
}

TEST_CASE("an abort ends what is on the links and between the ends") {
    const World& world = test_world();
    if (world.size() == 1) SKIP("one rank has no other");
    Mesh mesh(world, {.pp = world.size(), .ring = true}, test_stream());
    const Communicator* groups[] = {&mesh.links().forward_in, &mesh.links().backward_in,
                                    &mesh.embedding_group()};
    Buffer<float> number(1);
    for (const Communicator* group : groups) {
        if (group->size() == 1) continue;
        group->receive((float*)number, 1, 1 - group->rank(), test_stream());  // never sent
    }
    CHECK(cudaStreamQuery(test_stream()) == cudaErrorNotReady);
    mesh.abort();
    cudaCheck(cudaStreamSynchronize(test_stream()));
    for (const Communicator* group : groups) {
        if (group->size() == 1) continue;
        CHECK(error_of([&] { group->check(); }).find("abort") != std::string::npos);
    }
    world.barrier();
}

static RollAnswer at(std::vector<RollAnswer::Doing> doing, const std::string& phase = "step") {
    return {true, phase, std::move(doing)};
}

TEST_CASE("the watchdog blames who keeps the others waiting, and nobody who gets on with his work") {
    using enum Activity;
    RollAnswer::Doing wait = {waits, "step", "", 11}, wait_since_lately = {waits, "step", "", 3},
                      saves = {waits, "save", "", 11}, writes = {works, "save", "writing a.bin", 3},
                      hangs = {works, "save", "writing a.bin", 12}, gives = {launches, "step", "giving", 3},
                      cannot_give = {launches, "step", "giving", 12};
    auto name_of = [](int rank) { return text("rank %d", rank); };
    auto of = [&](std::vector<RollAnswer> roll, const char* phase = "step") {
        return blame(roll, 0, phase, 10, name_of);
    };
    RollAnswer silent;
    CHECK(of({at({wait}), silent, at({})}) == "rank 1 does not answer");
    CHECK(of({at({wait}), at({wait}), at({}, "load")}) == "rank 2 is missing (it is in the phase `load`)");
    CHECK(of({at({wait}), at({saves}), at({wait})}).starts_with("rank 1 is missing"));
    CHECK(of({at({wait}), at({wait}), at({wait, writes})}) == "");  // rank 2 is also working
    CHECK(of({at({saves}), at({saves}), at({writes})}, "save") == "");
    CHECK(of({at({saves}), at({saves}), at({hangs})}, "save") == "rank 2 has been writing a.bin for 12 s");
    CHECK(of({at({wait}), at({wait}), at({wait})}) == "all ranks wait for each other");
    CHECK(of({at({wait}), at({wait}), at({wait_since_lately})}) == "");
    CHECK(of({at({wait_since_lately}), silent}) == "");  // rank 0's earlier wait has ended
    CHECK(of({at({saves}), silent}) == "");
    CHECK(of({at({wait}), at({gives})}) == "");
    CHECK(of({at({wait}), at({cannot_give})}) == "rank 1 is giving, which has accepted none for 12 s");
    CHECK(of({at({cannot_give}), at({wait})}) == "rank 0 is giving, which has accepted none for 12 s");
    CHECK(of({at({cannot_give}), silent}) == "rank 1 does not answer");
    CHECK(of({at({cannot_give}), at({}, "load")}).starts_with("rank 1 is missing"));
    CHECK(of({at({cannot_give}), at({gives})}) == "");  // rank 0's full queue may wait for rank 1
    CHECK(of({at({hangs}), at({})}, "save") == "rank 0 has been writing a.bin for 12 s");
    CHECK(of({at({wait}), silent, silent, silent, silent, silent})
              .ends_with("rank 4 does not answer and 1 more"));
}

TEST_CASE("whom the records name is blamed, of ranks that do not answer too") {
    auto record = [](int rank, const char* state) {
        RankState of;
        of.rank = rank, of.ranks = 3, of.host = "a", of.process = 100 + rank;
        of.alive = true, of.state = state, of.phase = "step", of.quiet_seconds = 12;
        return of;
    };
    std::vector<RollAnswer> roll(3);  // the third is silent; there is also a record of an earlier run
    for (int rank = 0; rank < 2; rank++) {
        roll[rank] = at({{Activity::waits, "step", "", 11}});
        roll[rank].records = {record(rank, "S"), record(2, "T"), record(1 - rank, "X"), record(7, "T")};
    }
    std::vector<RankState> records = records_of(roll);
    REQUIRE(records.size() == 3);
    for (int rank = 0; rank < 3; rank++) CHECK(records[rank].rank == rank);
    CHECK(records[1].state == "S");
    CHECK(named_by_records(records, 10, true, "").starts_with("rank 2 (a) is stopped (process 102)"));
    for (RollAnswer& answer : roll) answer.records.clear();
    CHECK(named_by_records(records_of(roll), 10, true, "rank 2 does not answer") == "rank 2 does not answer");
}
