// Step times of all ranks. The passes sleep, so that ranks that outnumber the cores wait for each other as
// ranks on separate devices would.
// devices: cpu
// ranks: 8
// alone: 8
#include <unistd.h>
#include <zlib.h>

#include <deque>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/memory.h"
#include "comm/pipeline.h"
#include "comm/timings.h"
#include "data/report/report_data.h"
#include "data/run/meter.h"
#include "test/support/file_testing.h"
#include "test/support/ranks.h"
#include "test/support/testing.h"

namespace {

using nlohmann::json;

// A folder of the first rank, whose path all ranks know.
struct SharedFolder {
    std::unique_ptr<TemporaryFolder> own;
    std::string path;
    SharedFolder() {
        if (test_world().is_root()) own = std::make_unique<TemporaryFolder>();
        path = test_world().broadcast_text(own ? own->path : "");
    }
};

std::vector<json> lines_of(const std::string& path) {
    std::vector<json> lines;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
    return lines;
}

std::string unpacked(const std::string& path) {
    gzFile file = gzopen(path.c_str(), "rb");
    REQUIRE(file);
    std::string text;
    char piece[1 << 14];
    for (int bytes; (bytes = gzread(file, piece, sizeof piece)) > 0;) text.append(piece, (size_t)bytes);
    gzclose(file);
    return text;
}

// A run whose passes sleep, and whose steps end with a sum over all ranks, as real ones do.
struct SleepingRun {
    MeshShape shape;
    PipelineShape pipeline_shape;
    double pass = 0.006;  // seconds
    int slow_rank = -1;
    double stretched = 1.3;
    std::string trace_steps = {};

    void go(const std::string& folder, int steps) {
        const World& world = test_world();
        Options o;
        o.layers = pipeline_shape.stages * pipeline_shape.chunks, o.run_dir = folder, o.steps = steps;
        o.dp = shape.dp, o.pp = shape.pp, o.sequence_length = 8, o.global_batch = 64;
        o.trace_steps = trace_steps;
        std::optional<RunLog> log;
        if (world.is_root()) log.emplace(folder, RunFolder::fresh);
        if (log) log->begin({}, 0);
        Meter meter(o, o.sequence_length, 0, 1e9, world.size());
        StepLog progress(o, meter, log ? &*log : nullptr);
        Mesh mesh(world, shape, test_stream());
        Layout layout = {shape, 1, pipeline_shape,
                         std::vector<int>((size_t)(pipeline_shape.stages * pipeline_shape.chunks), 1)};
        Stage stage(o, layout, mesh.position, true);
        constexpr size_t n = 64;
        Arena memory;
        Pipeline pipeline(memory, mesh, pipeline_shape, stage.capacity, n, test_stream(), true);
        DeviceArray<float> sum(1);
        Timings timings(o, world, mesh, stage, test_stream(), progress);
        auto actions = pipeline_actions(pipeline_shape, mesh.position[Axis::pipeline]);
        double seconds = pass * (world.rank() == slow_rank ? stretched : 1);
        std::deque<useconds_t> times;
        auto sleep = [](void* time) { usleep(*(const useconds_t*)time); };
        Event step_done;
        for (int step = 1; step <= steps; step++) {
            double start = seconds_now();
            timings.begin_step(step);
            pipeline.run(actions, n, [&](const PipelineTask& task) {
                bool both = task.work == PipelineWork::backward;
                times.push_back((useconds_t)(1e6 * seconds * (both ? 2 : 1)));
                cudaCheck(cudaLaunchHostFunc(test_stream(), sleep, &times.back()));
            });
            mesh.world().all_reduce(sum.data, 1, Traffic::statistics, test_stream());
            timings.end_step();
            step_done.record(test_stream());
            wait_for(step_done, mesh);
            timings.collect(step, seconds_now() - start);
        }
        timings.finish();
        world.barrier();
    }
};

constexpr int attempts = 5;  // one suffices on an idle machine

}  // namespace

TEST_CASE("what ranks post comes to the first one, from each in its order") {
    const World& world = test_world();
    constexpr int posts = 50;
    for (int i = 0; i < posts; i++)
        if (!world.is_root()) world.post(text("%d %d %s", world.rank(), i, std::string(500, 'x').c_str()));
    world.await_posts();
    std::vector<int> next((size_t)world.size(), 0);
    for (auto& [rank, message] : world.posted()) {
        CHECK(message.starts_with(text("%d %d x", rank, next[(size_t)rank])));
        CHECK(message.size() > 500);
        next[(size_t)rank]++;
    }
    for (int rank = 0; rank < world.size(); rank++)
        CHECK(next[(size_t)rank] == (world.is_root() && rank > 0 ? posts : 0));
    CHECK(world.posted().empty());
}

TEST_CASE("two ranks send each other texts, whatever else is under way") {
    const World& world = test_world();
    int rank = world.rank(), peer = rank ^ 1;
    std::string mine(rank % 3 ? 10 : 100'000, (char)('a' + rank));
    if (rank < peer) {
        world.send_to(peer, mine);
        CHECK(world.receive_from(peer)[0] == 'a' + peer);
    } else {
        CHECK(world.receive_from(peer)[0] == 'a' + peer);
        world.send_to(peer, mine);
    }
}

TEST_CASE("ranks of a machine have one clock") {
    std::vector<ClockOffset> clocks = clock_offsets(test_world());
    CHECK(clocks.size() == (test_world().is_root() ? 8u : 0u));
    for (const ClockOffset& clock : clocks) CHECK(clock.ahead == 0);
}

TEST_CASE("a rank whose passes are stretched is named, and a healthy run names nobody" *
          doctest::test_suite("alone")) {
    for (int slow : {5, -1}) {
        CAPTURE(slow);
        std::vector<json> found;
        bool right = false;
        for (int attempt = 0; attempt < attempts && !right; attempt++) {
            SharedFolder folder;
            SleepingRun run = {{.pp = 2, .dp = 4}, {PipelineSchedule::one_f_one_b, 2, 4, 1}};
            run.slow_rank = slow;
            run.pass *= 1 << attempt;  // a busy machine adds the same delays to longer passes
            run.go(folder.path, 20);
            if (test_world().is_root()) {
                found.clear();
                for (const json& line : lines_of(folder.path + "/log.jsonl"))
                    if (line.contains("slow")) found.push_back(line["slow"]);
                right = slow < 0 ? found.empty()
                                 : found.size() == 1 && found[0].size() == 1 && found[0][0]["rank"] == slow &&
                                       found[0][0]["phase"] == "backward";
                std::vector<json> ranks = lines_of(folder.path + "/ranks.jsonl");
                REQUIRE(ranks.size() >= 3);  // the ranks, the pipeline, the interval
                CHECK(ranks[0]["start"]["hosts"].size() == 8);
                CHECK(ranks[0]["start"]["places"][5] == json::array({0, 0, 0, 1, 1}));
                json report = report_json({RunHistory(folder.path)}, "")["runs"][0];
                CHECK(report["heat"]["ranks"] == 8);
                if (right && slow >= 0) {
                    CHECK(report["slow"].size() == 1);
                    CHECK(report["slow"][0]["rank"] == slow);
                    CHECK(report["slow"][0]["phase"] == "backward");
                }
                if (right && slow < 0) CHECK(report["slow"].empty());
            }
            right = test_world().largest(right);
        }
        if (!test_world().is_root()) {
            CHECK(right);
            continue;
        }
        if (slow < 0) {
            CHECK(found.empty());
        } else {
            REQUIRE(found.size() == 1);
            REQUIRE(found[0].size() == 1);
            CHECK(found[0][0]["rank"] == slow);
            CHECK(found[0][0]["phase"] == "backward");
            CHECK(found[0][0]["ratio"].get<double>() > 1.2);
            CHECK(found[0][0]["ratio"].get<double>() < 1.4);
        }
    }
}

TEST_CASE("a timeline has causes before effects, and stages idle as the formula says" *
          doctest::test_suite("alone")) {
    using enum PipelineSchedule;
    for (PipelineShape shape : {PipelineShape{one_f_one_b, 4, 8, 1}, PipelineShape{interleaved, 4, 4, 2}}) {
        const double want = time_pipeline(shape, {1, 1, 1}).bubble();
        double got = 0;
        for (int attempt = 0; attempt < attempts; attempt++) {
            SharedFolder folder;
            SleepingRun run = {{.pp = 4, .dp = 2, .ring = shape.chunks > 1}, shape};
            run.trace_steps = "2:3";
            run.pass *= 1 << attempt;
            run.go(folder.path, 4);
            int good = 0;
            if (test_world().is_root()) {
                json trace = json::parse(unpacked(folder.path + "/trace_000002.json.gz"));
                double error = 0;  // microseconds
                for (double each : trace["otherData"]["clock_error_us"]) error = std::max(error, each);
                CHECK(error > 0);
                std::map<std::string, double> sent, received;
                std::map<int, double> busy, begin, end;  // times of the passes of step 3, by rank
                std::map<int, std::pair<double, double>> step;
                for (const json& event : trace["traceEvents"]) {
                    std::string kind = event["ph"], name = event["name"];
                    if (kind == "s") sent[event["id"]] = event["ts"];
                    if (kind == "f") received[event["id"]] = event["ts"];
                    if (kind != "X") continue;
                    double first = event["ts"], length = event["dur"];
                    CHECK(length >= 0);
                    if (name == "step 3") step[event["pid"]] = {first, first + length};
                }
                for (const json& event : trace["traceEvents"]) {
                    if (event["ph"] != "X" || event["cat"] != "pass") continue;
                    int rank = event["pid"];
                    double first = event["ts"], length = event["dur"];
                    if (first < step[rank].first) continue;
                    if (!busy.count(rank)) begin[rank] = first;
                    busy[rank] += length;
                    begin[rank] = std::min(begin[rank], first),
                    end[rank] = std::max(end[rank], first + length);
                }
                // two steps, two replicas, two directions; between all neighboring parts
                CHECK(sent.size() == (size_t)(2 * 2 * 2 * (4 * shape.chunks - 1) * shape.micro_batches));
                CHECK(received.size() == sent.size());
                for (auto& [id, time] : sent) {
                    REQUIRE(received.count(id));
                    CHECK(received[id] >= time - 2 * error);
                }
                REQUIRE(busy.size() == 8);
                double all = 0, work = 0;
                for (int replica : {0, 1}) {  // stages are two ranks apart
                    double first = 1e18, last = 0;
                    for (int stage = 0; stage < 4; stage++) {
                        int rank = 2 * stage + replica;
                        first = std::min(first, begin[rank]), last = std::max(last, end[rank]);
                        work += busy[rank];
                    }
                    all += 4 * (last - first);
                }
                got = (all - work) / work;
                good = std::abs(got - want) < 0.15 * want;
            }
            if (test_world().largest(good)) break;
        }
        if (!test_world().is_root()) {
            CHECK(want > 0);
            continue;
        }
        CAPTURE(name_of(shape.schedule));
        CHECK(got > 0.85 * want);
        CHECK(got < 1.15 * want);
    }
}
