// A rank's flight record as other processes read it, and the same state as JSON.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "data/launch/parse_command_line.h"
#include "data/run/agent.h"
#include "data/run/rank_state.h"
#include "test/support/file_testing.h"

namespace {

AgentOptions agent_options(const std::vector<std::string>& words) {
    return parse_options_of<AgentOptions>(read_arguments(command_agent, words));
}

// A record with one group of four and two issued calls; the second has begun and is not done.
void fill(FlightRecord& record, const std::string& run_dir, int rank) {
    record.process = getpid(), record.rank = rank, record.ranks = 4;
    record.sizes[Axis::shard] = 4;
    copy_name(record.host, "node5"), copy_name(record.run_dir, path_of_run(run_dir));
    copy_name(record.phase, "step");
    record.step = 7;
    FlightGroup& group = record.groups[record.group_count++];
    copy_name(group.name, "shard");
    group.size = 4, group.axes = 2;
    for (int i = 0; i < 4; i++) group.ranks[i] = i;
    group.issued = 2, group.begun = 2, group.done = 1;
    auto add = [&](FlightEntry entry) { record.entries[record.entry_count++] = entry; };
    add({.begin = 1, .end = 2, .micro_batch = 3, .operation = Operation::forward, .timed = true});
    add({.begin = 1, .end = 2, .number = 1, .unit = 13, .group = 0, .operation = Operation::reduce_scatter});
    add({.begin = 2, .end = 0, .micro_batch = 3, .operation = Operation::backward, .timed = true});
    add({.begin = 3, .end = 0, .number = 2, .unit = 12, .group = 0, .operation = Operation::reduce_scatter});
    record.entries[3].track = 4;
    add({.begin = 4, .end = 0, .operation = Operation::wait, .traffic = (uint8_t)Traffic::gradients});
    add({.micro_batch = 4, .operation = Operation::forward, .timed = true});
    record.is_record = FlightRecord::mark;
}

}  // namespace

TEST_CASE("a record tells what its rank is at, and what it waits for") {
    TemporaryFolder run;
    SharedFlightRecord record;
    fill(*record, run.path, 2);
    record->work_since = 1;
    copy_name(record->work, "writing a.bin");
    RankState rank = state_of(*record);
    CHECK(rank.rank == 2);
    CHECK(rank.host == "node5");
    CHECK(rank.alive);
    CHECK(rank.state == "R");
    CHECK(rank.step == 7);
    CHECK(rank.work == "writing a.bin");
    CHECK(rank.work_seconds > 1e9);  // since 1970
    CHECK(rank.wait_seconds == 0);
    REQUIRE(rank.groups.size() == 1);
    CHECK(rank.groups[0].ranks == std::vector<int>{0, 1, 2, 3});
    CHECK(rank.groups[0].next.operation == "reduce-scatter");
    CHECK(rank.groups[0].next.unit == 12);
    CHECK(rank.pass.operation == "backward");
    CHECK(rank.begun);
    CHECK(rank.wait.traffic == "gradients");
    CHECK(rank.last.operation == "forward");
    CHECK(rank.last.micro_batch == 4);

    nlohmann::json json = rank;
    CHECK(nlohmann::json::parse(json.dump()).get<RankState>() == rank);

    // The record is found by the run's folder, however its path is written.
    std::string other_name = run.path + "/../" + run.path.substr(run.path.rfind('/') + 1) + "/";
    auto found = read_rank_states(other_name);
    REQUIRE(found.size() == 1);
    CHECK(found[0].groups == rank.groups);
    CHECK(read_rank_states(run.path + "2").empty());
}

TEST_CASE("a process that was stopped or killed is seen to be, and one that has ended in order is gone") {
    TemporaryFolder run;
    auto start = [&](bool in_order) {
        pid_t child = fork();
        if (child == 0) {
            {
                SharedFlightRecord record;
                fill(*record, run.path, 1);
                if (!in_order) raise(SIGSTOP);
            }
            _exit(0);
        }
        int status;
        waitpid(child, &status, WUNTRACED);
        return child;
    };
    start(true);
    CHECK(read_rank_states(run.path).empty());
    pid_t stopped = start(false);
    auto ranks = read_rank_states(run.path);
    REQUIRE(ranks.size() == 1);
    CHECK(ranks[0].process == stopped);
    CHECK(ranks[0].alive);
    CHECK(ranks[0].state == "T");
    kill(stopped, SIGKILL);
    waitid(P_PID, (id_t)stopped, nullptr, WEXITED | WNOWAIT);
    ranks = read_rank_states(run.path);  // a zombie
    REQUIRE(ranks.size() == 1);
    CHECK(!ranks[0].alive);
    waitpid(stopped, nullptr, 0);
    CHECK(!read_rank_states(run.path).at(0).alive);

    // A live process takes the place of the dead one.
    SharedFlightRecord record;
    fill(*record, run.path, 1);
    CHECK(read_rank_states(run.path).at(0).alive);
}

TEST_CASE("an agent tells what the ranks of its run are at, until nobody listens") {
    TemporaryFolder run;
    SharedFlightRecord record;
    fill(*record, run.path, 2);
    nlohmann::json line = nlohmann::json::parse(agent_line("node5", run.path));
    CHECK(line["agent"] == "node5");
    CHECK(line["ranks"].at(0).get<RankState>().groups.size() == 1);
    record->sign_of_life = INT64_MAX / 2;  // it makes progress
    record->groups[0].done = 2;
    CHECK(nlohmann::json::parse(agent_line("node5", run.path))["ranks"].at(0)["groups"].empty());
    CHECK(nlohmann::json::parse(agent_line("node5", run.path + "2"))["ranks"].empty());
    CHECK(!nlohmann::json::parse(agent_line("node5", run.path, 3)).contains("verdict"));
    record->sign_of_life = 1;  // 1970
    record->work_since = 1;
    copy_name(record->work, "writing a.bin");
    CHECK(nlohmann::json::parse(agent_line("node5", run.path, 3))["verdict"]["kind"] == "disk");

    int input[2], output[2];
    REQUIRE((pipe(input) == 0 && pipe(output) == 0));
    fflush(stdout);  // doctest's output is not the agent's
    pid_t child = fork();
    if (child == 0) {
        dup2(input[0], STDIN_FILENO), dup2(output[1], STDOUT_FILENO);
        close(input[1]), close(output[0]);
        run_agent(agent_options({"agent", "--every", "0.01", "--run-dir", run.path}));
        _exit(7);
    }
    close(input[0]), close(output[1]);
    std::string told;
    while (std::count(told.begin(), told.end(), '\n') < 3) {
        char bytes[4096];
        ssize_t got = read(output[0], bytes, sizeof bytes);
        REQUIRE(got > 0);
        told.append(bytes, (size_t)got);
    }
    CHECK(nlohmann::json::parse(told.substr(0, told.find('\n')))["ranks"].at(0)["host"] == "node5");
    close(input[1]);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WEXITSTATUS(status) == 7);
    close(output[0]);
}

TEST_CASE("an agent refuses what it does not know") {
    CHECK(agent_options({"agent", "--run-dir", "a"}).every == 1);
    CHECK_THROWS_AS(agent_options({"agent"}), Error);
    CHECK_THROWS_AS(agent_options({"agent", "--run-dir"}), Error);
    CHECK_THROWS_AS(agent_options({"agent", "--rundir", "a"}), Error);
    CHECK_THROWS_AS(agent_options({"agent", "--run-dir", "a", "--every", "x"}), Error);
}
