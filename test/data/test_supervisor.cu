// A supervisor's decisions and memory: which failures are retried, on which hosts, and what it knows when it
// takes over a job.
#include <csignal>
#include <sys/wait.h>

#include "data/supervisor/agents.h"
#include "data/supervisor/host_checks.h"
#include "data/supervisor/job.h"
#include "data/supervisor/launch_line.h"
#include "data/supervisor/policy.h"
#include "data/supervisor/progress.h"
#include "data/supervisor/state.h"
#include "test/support/file_testing.h"

// ----------------------------------------------------------------------------
// policy

// An attempt that reached a step and ended like this, a minute after the one before it.
static Attempt ended(JobEnd end, int64_t last_step, int code = 75, bool exchanged = false) {
    static double time = 1e9;
    Attempt attempt;
    attempt.end = end, attempt.code = code, attempt.last_step = last_step, attempt.exchanged = exchanged;
    attempt.begun = time, attempt.ended = time += 60;
    return attempt;
}

static Restart::Kind kind_after(const std::vector<Attempt>& attempts, bool asked = false) {
    return decide(attempts, {}, asked).kind;
}

TEST_CASE("an exit code is an end of its kind") {
    struct {
        int code;
        bool said_why;
        JobEnd end;
    } rows[] = {
        {0, false, JobEnd::done},       {1, true, JobEnd::bad_input},    {1, false, JobEnd::launcher},
        {70, true, JobEnd::not_finite}, {75, true, JobEnd::failed_part}, {75, false, JobEnd::failed_part},
        {137, false, JobEnd::killed},   {139, true, JobEnd::killed},     {143, false, JobEnd::killed},
        {205, false, JobEnd::launcher}, {255, false, JobEnd::launcher},  {127, false, JobEnd::launcher}};
    for (auto& row : rows) {
        INFO(row.code);
        CHECK(name_of(end_of_job(row.code, row.said_why)) == std::string(name_of(row.end)));
    }
}

TEST_CASE("what is done after an end is as the table says") {
    using enum JobEnd;
    CHECK(kind_after({ended(done, 10, 0)}) == Restart::finish);
    CHECK(kind_after({ended(bad_input, -1, 1)}) == Restart::give_up);
    CHECK(kind_after({ended(failed_part, 10)}) == Restart::from_newest);
    CHECK(kind_after({ended(failed_part, -1)}) == Restart::from_newest);
    CHECK(kind_after({ended(killed, 10, 137)}) == Restart::from_newest);
    CHECK(kind_after({ended(hung, 10, 143)}) == Restart::from_newest);
    CHECK(kind_after({ended(launcher, 10, 205)}) == Restart::from_newest);
    CHECK(kind_after({ended(not_finite, 10, 70)}) == Restart::from_before);
    CHECK(kind_after({ended(killed, 10, 143)}, true) == Restart::give_up);
    // it was asked to stop, but had finished
    CHECK(kind_after({ended(done, 10, 0)}, true) == Restart::finish);
}

TEST_CASE("numbers that are not finite again, after a checkpoint was gone back, end it; later ones do not") {
    using enum JobEnd;
    Attempt first = ended(not_finite, 10, 70);
    CHECK(kind_after({first, ended(not_finite, 10, 70)}) == Restart::give_up);
    CHECK(kind_after({first, ended(not_finite, 7, 70)}) == Restart::give_up);
    CHECK(kind_after({first, ended(killed, 8, 137), ended(not_finite, 9, 70)}) == Restart::give_up);
    CHECK(kind_after({first, ended(not_finite, 11, 70)}) == Restart::from_before);
    CHECK(decide({first, ended(not_finite, 10, 70)}, {}, false).reason.find("step 11") != std::string::npos);
}

TEST_CASE("the same step that fails twice in the same way ends it, unless something was done about it") {
    using enum JobEnd;
    CHECK(kind_after({ended(killed, 10, 139), ended(killed, 10, 139)}) == Restart::give_up);
    CHECK(kind_after({ended(killed, 10, 139), ended(killed, 10, 137)}) == Restart::from_newest);
    CHECK(kind_after({ended(killed, 10, 139), ended(failed_part, 10)}) == Restart::from_newest);
    CHECK(kind_after({ended(killed, 10, 139), ended(killed, 12, 139)}) == Restart::from_newest);
    CHECK(kind_after({ended(killed, 10, 139, true), ended(killed, 10, 139)}) == Restart::from_newest);
    CHECK(decide({ended(killed, 10, 139), ended(killed, 10, 139)}, {}, false).reason.find("step 11") !=
          std::string::npos);
}

TEST_CASE("two restarts without progress end it") {
    using enum JobEnd;
    CHECK(kind_after({ended(killed, 10, 137), ended(failed_part, 8)}) == Restart::from_newest);
    CHECK(kind_after({ended(killed, 10, 137), ended(failed_part, 8), ended(killed, 9, 137)}) ==
          Restart::give_up);
    CHECK(kind_after({ended(killed, 10, 137), ended(failed_part, 8), ended(killed, 11, 137)}) ==
          Restart::from_newest);
    // it never begins; the first start does not count as a restart
    CHECK(kind_after({ended(failed_part, -1), ended(failed_part, -1)}) == Restart::from_newest);
    CHECK(kind_after({ended(failed_part, -1), ended(failed_part, -1), ended(failed_part, -1)}) ==
          Restart::give_up);
    // replaced hosts are a reason to try again
    CHECK(kind_after({ended(failed_part, -1), ended(failed_part, -1, 75, true), ended(failed_part, -1)}) ==
          Restart::from_newest);
}

TEST_CASE("restarts are counted in a window, and wait the longer the less they bring") {
    using enum JobEnd;
    RestartLimits limits = {.most = 3, .window = 600, .backoff = 2, .longest = 7};
    std::vector<Attempt> attempts;
    for (int i = 0; i < 3; i++) {
        attempts.push_back(ended(killed, 10 + i, 137));
        CHECK(decide(attempts, limits, false).kind == Restart::from_newest);
        CHECK(decide(attempts, limits, false).wait == 2);
    }
    attempts.push_back(ended(killed, 20, 137));
    CHECK(decide(attempts, limits, false).kind == Restart::give_up);
    CHECK(decide(attempts, limits, false).reason.find("3 times") != std::string::npos);
    // restarts from long ago do not count
    for (Attempt& attempt : attempts) attempt.ended -= 3600;
    attempts.push_back(ended(killed, 21, 137));
    CHECK(decide(attempts, limits, false).kind == Restart::from_newest);

    std::vector<double> waits;
    std::vector<Attempt> failing = {ended(launcher, 5, 255, true)};
    for (int i = 0; i < 3; i++) {
        waits.push_back(decide(failing, {.most = 20, .backoff = 2, .longest = 7}, false).wait);
        failing.push_back(ended(launcher, 5, 255, true));
    }
    CHECK(waits == std::vector<double>{2, 4, 7});
    CHECK(decide({ended(killed, 3, 137)}, {.most = 0}, false).kind == Restart::give_up);
}

// ----------------------------------------------------------------------------
// hosts

static std::string hosts_error(const TemporaryFolder& folder, const std::string& content) {
    write_file(folder / "hosts", content);
    std::string error;
    note_error(error, [&] { read_hosts(folder / "hosts"); });
    return error;
}

TEST_CASE("a file of hosts is read as mpirun reads it, and what is wrong with it is said") {
    TemporaryFolder folder;
    write_file(folder / "hosts",
               "# of the first rack\n\nnode1 slots=8\n  node2   slots=4 max_slots=8 # half\nfd00::2 slots=1");
    std::vector<Host> hosts = read_hosts(folder / "hosts");
    REQUIRE(hosts.size() == 3);
    CHECK(hosts[0].name == "node1");
    CHECK(hosts[0].slots == 8);
    CHECK(hosts[1].name == "node2");
    CHECK(hosts[1].slots == 4);
    CHECK(hosts[2].name == "fd00::2");
    CHECK(slots_of(hosts) == 13);
    std::pair<const char*, const char*> wrong[] = {
        {"", "has no hosts"},
        {"# none\n", "has no hosts"},
        {"a slots=1\nb slots=2\na slots=1\n", "line 3: a appears twice"},
        {"a slots=1\nb\n", "line 2: b has no slots"},
        {"a slots=0\n", "line 1: slots=0"},
        {"a slots=100000000000000000000\n", "line 1: slots=1"},
        {"a slots=-1\n", "line 1: slots=-1"},
        {"a slots=2x\n", "line 1: slots=2x"},
        {"a cpu=2 slots=2\n", "line 1: unknown setting cpu=2"},
        {"-x slots=2\n", "line 1: -x is not a host name"},
        {"a;rm slots=2\n", "line 1: a;rm is not a host name"},
        {"\x01\x02\xff slots=2\n", "line 1: "},
    };
    for (auto [content, words] : wrong) {
        INFO(content);
        std::string error = hosts_error(folder, content);
        CHECK(error.find(words) != std::string::npos);
        CHECK(error.find("; ") != std::string::npos);
        CHECK(std::ranges::none_of(error, [](char c) { return c == '\n'; }));
    }
}

static std::string hosts_text(const std::vector<Host>& hosts) {
    std::string words;
    for (const Host& host : hosts) words += text("%s:%d ", host.name.c_str(), host.slots);
    return words;
}

TEST_CASE("the nodes of a job of Slurm or PBS are hosts, with a slot for each task") {
    CHECK(hosts_text(slurm_hosts("login1", "")) == "login1:1 ");
    CHECK(hosts_text(slurm_hosts("node[1-3],gpu-7", "8(x2),4,2")) == "node1:8 node2:8 node3:4 gpu-7:2 ");
    CHECK(hosts_text(slurm_hosts("node[08-10,012]", "4(x4)")) == "node08:4 node09:4 node10:4 node012:4 ");
    CHECK(hosts_text(slurm_hosts("a,rack[1-2]n[1,3-4].local,b", "1(x8)")) ==
          "a:1 rack1n1.local:1 rack1n3.local:1 rack1n4.local:1 rack2n1.local:1 rack2n3.local:1 "
          "rack2n4.local:1 b:1 ");
    for (const char* wrong : {"node[1-3", "a b", "-x", "a,", "node[0-99999999]", "n[1-2]]"}) {
        INFO(wrong);
        CHECK(error_of([&] { slurm_hosts(wrong, "1"); }).starts_with("SLURM_JOB_NODELIST: "));
    }
    TemporaryFolder folder;
    write_file(folder / "nodes", "n2.local\nn2.local\nn1\n\nn2.local\n");
    CHECK(hosts_text(pbs_hosts(folder / "nodes")) == "n2.local:3 n1:1 ");
    write_file(folder / "nodes", "n1\n-oProxyCommand=x\n");
    CHECK(error_of([&] { pbs_hosts(folder / "nodes"); }).find("is not a host name") != std::string::npos);
}

static std::string placed(const std::vector<Host>& hosts, int ranks, int unit) {
    std::string words;
    for (const HostRanks& place : place_ranks(hosts, ranks, unit))
        words += text("%s:%d+%d ", place.name.c_str(), place.first, place.ranks);
    return words;
}

TEST_CASE("ranks fill hosts in order, spares take over, and without one whole data ranks go") {
    std::vector<Host> hosts = {{"a", 4}, {"b", 4}, {"c", 4}};
    CHECK(placed(hosts, 8, 2) == "a:0+4 b:4+4 ");
    CHECK(placed(hosts, 6, 2) == "a:0+4 b:4+2 ");
    hosts[0].aside = "gone";
    CHECK(placed(hosts, 8, 2) == "b:0+4 c:4+4 ");
    CHECK(placed(hosts, 12, 4) == "b:0+4 c:4+4 ");
    hosts[1].slots = 3;
    CHECK(placed(hosts, 8, 4) == "b:0+3 c:3+1 ");
    CHECK(placed(hosts, 8, 8).empty());
    hosts[2].aside = hosts[1].aside = "gone";
    CHECK(placed(hosts, 8, 1).empty());
    std::vector<HostRanks> places = place_ranks({{"a", 4}, {"b", 4}}, 6, 1);
    CHECK(host_of_rank(places, 3) == "a");
    CHECK(host_of_rank(places, 4) == "b");
    CHECK(host_of_rank(places, 6).empty());
    CHECK(hosts_file_text(places) == "a slots=4\nb slots=2\n");
}

// ----------------------------------------------------------------------------
// command lines

static std::string started(const std::string& launcher, bool on_hosts, const std::vector<HostRanks>& places) {
    std::string line;
    for (const std::string& word : Launcher(launcher, on_hosts).start(places, "FILE", {"gpt", "train"}))
        line += "[" + word + "]";
    return line;
}

TEST_CASE("a launcher's command line gets what it lacks, and what a user wrote stands") {
    std::vector<HostRanks> places = {{"a", 0, 4}, {"b", 4, 2}};
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    CHECK(started("mpirun", true, places) ==
          "[mpirun][--hostfile][FILE][--map-by][slot][--bind-to][none][-n][6][gpt][train]");
    CHECK(started("mpirun", false, places) == "[mpirun][--map-by][slot][--bind-to][none][-n][6][gpt][train]");
    CHECK(started("/opt/mpi/bin/mpirun --oversubscribe --map-by node --bind-to core -n {ranks} env A='b c'",
                  false, places) ==
          "[/opt/mpi/bin/mpirun][--oversubscribe][--map-by][node][--bind-to][core][-n][6][env][A=b "
          "c][gpt][train]");
    CHECK(started("srun --mpi=pmi2", true, places) == "[srun][--mpi=pmi2][--kill-on-bad-exit=1][--overlap][--"
                                                      "nodes=2][--nodelist=a,b][--ntasks=6][gpt][train]");
    CHECK(started("my\\ run \"{hosts}\" {ranks} --x={nodes}", true, places) ==
          "[my run][FILE][6][--x=2][gpt][train]");
    for (const char* wrong : {"", "  ", "'mpirun", "ssh node", "start {hosts}", "start {ranks}"}) {
        INFO(wrong);
        CHECK_THROWS_AS(Launcher(wrong, true), Error);
    }
    unsetenv("OMPI_ALLOW_RUN_AS_ROOT");
    if (geteuid() == 0) {
        if (!in_container())
            CHECK_REFUSED(started("mpirun", false, places), "give --launcher 'mpirun --allow-run-as-root'");
        setenv("container", "podman", 1);
        for (const char* line : {"mpirun", "mpirun --allow-run-as-root"})
            CHECK(started(line, false, places).starts_with("[mpirun][--allow-run-as-root][--map-by]"));
        unsetenv("container");
    }
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
}

TEST_CASE("the last words of a program are its last lines, without rules") {
    CHECK(last_words("") == "it said nothing");
    CHECK(last_words("-----\n\n  \n") == "it said nothing");
    CHECK(last_words("-----\nmpirun has detected\x1b an attempt\n\nto run as root.\n----") ==
          "mpirun has detected\\u001b an attempt / to run as root.");
    CHECK(last_words("1\n2\n3\n4\n5\n6\n7\n8\n") == "3 / 4 / 5 / 6 / 7 / 8");
}

static std::string launch_error(std::string line, LaunchLine* good = nullptr) {
    std::vector<std::string> words = words_of(line);
    std::string error;
    note_error(error, [&] {
        auto end = std::ranges::find(words, "--");
        GivenOptions own = read_arguments(command_launch, {words.begin(), end});
        LaunchLine parsed = parse_launch(own, end == words.end() ? std::vector<std::string>()
                                                                 : std::vector(end + 1, words.end()));
        if (good) *good = parsed;
    });
    return error;
}

TEST_CASE("a command line of launch is taken apart, and gets one line where it is wrong") {
    TemporaryFolder folder;
    std::string hosts = folder / "hosts";
    write_file(hosts, "a slots=4\nb slots=4\nc slots=4\n");
    const std::string job = " -- train --train-data x.bin --run-dir r";
    LaunchLine line;
    CHECK(launch_error("launch --hosts " + hosts + " --ranks 8 --spares 1" + job + " --tp 2", &line).empty());
    CHECK(line.ranks == 8);
    CHECK(line.unit == 2);
    CHECK(line.run_dir == "r");
    auto added = [&] { return std::vector<std::string>(line.job.begin() + 5, line.job.end()); };
    using Added = std::vector<std::string>;
    CHECK(added() == Added{"--tp", "2", "--resume", "auto", "--save-every", "auto"});
    CHECK(launch_error("launch --hosts " + hosts + " --spares 1" + job + " --resume auto", &line).empty());
    CHECK(line.ranks == 8);
    CHECK(added() == Added{"--resume", "auto", "--save-every", "auto"});
    CHECK(launch_error("launch" + job + " --save-every 500", &line).empty());
    CHECK(added() == Added{"--save-every", "500", "--resume", "auto"});
    Options begun;
    for (int every : {1000, 50}) {
        begun.save_every.count = every;
        write_run_options(folder.path, options_to_json(begun));
        CHECK(launch_error("launch -- train --run-dir " + folder.path, &line).empty());
        CHECK(line.job.back() == "auto");
        CHECK(line.job[line.job.size() - 2] == (every == 50 ? "--resume" : "--save-every"));
    }
    // the choice of an earlier launch: the same command line is that of the same job
    begun.save_every = {Interval::best, 0};
    write_run_options(folder.path, options_to_json(begun));
    CHECK(launch_error("launch -- train --run-dir " + folder.path, &line).empty());
    CHECK(line.job[line.job.size() - 2] == "--save-every");
    CHECK(launch_error("launch" + job + " --overwrite off").empty());
    CHECK(launch_error("launch" + job, &line).empty());
    CHECK(line.ranks == 1);
    CHECK(launch_error("launch --ranks 4" + job + " --dp 4", &line).empty());
    CHECK(line.unit == 4);
    CHECK(line.hosts.empty());
    setenv("SLURM_JOB_NODELIST", "n[1-2]", 1);
    setenv("SLURM_TASKS_PER_NODE", "3(x2)", 1);
    CHECK(launch_error("launch" + job, &line).empty());
    CHECK(hosts_text(line.hosts) + line.hosts_from == "n1:3 n2:3 SLURM_JOB_NODELIST");
    CHECK(line.ranks == 6);
    CHECK(launch_error("launch --ranks 7" + job) ==
          "--ranks 7: SLURM_JOB_NODELIST has only 6 slots; name more hosts, or give fewer ranks");
    CHECK(launch_error("launch --hosts " + hosts + job, &line).empty());
    CHECK(line.hosts_from == hosts);
    for (const char* variable : {"SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"}) unsetenv(variable);
    std::pair<std::string, const char*> wrong[] = {
        {"launch", "no job"},
        {"launch --ranks 4", "no job"},
        {"launch --ranks 4 --", "no job"},
        {"launch --ranks 4 train --run-dir r", "train: unexpected"},
        {"launch --rank 4" + job, "--rank: no such option, the nearest is --ranks"},
        {"launch --ranks x" + job, "--ranks x: not a number"},
        {"launch --ranks -1" + job, "--ranks -1: out of range"},
        {"launch -- eval r", "eval does not train"},
        {"launch -- trian --run-dir r", "trian: no such command"},
        {"launch -- train --train-data x.bin", "--run-dir: missing"},
        {"launch" + job + " --overwrite", "--overwrite: would delete"},
        {"launch" + job + " --resume r2", "--resume r2: a job always resumes"},
        {"launch" + job + " --laerning-rate 1", "--laerning-rate: no such option"},
        {"launch --spares 1" + job, "--spares 1: there is only this machine"},
        {"launch --ranks 6" + job + " --tp 2 --pp 2", "--ranks 6: --tp 2 --pp 2 need a multiple of 4"},
        {"launch --ranks 6" + job + " --zero 1 --shard-group 4", "need a multiple of 4"},
        {"launch --hosts nothing" + job, "nothing: cannot open it"},
        {"launch --hosts " + hosts + " --ranks 13" + job, "12 slots"},
        {"launch --hosts " + hosts + " --ranks 9 --spares 1" + job, "8 slots without its last 1 hosts"},
        {"launch --hosts " + hosts + " --spares 3" + job, "--spares 3: "},
    };
    for (auto& [typed, words] : wrong) {
        INFO(typed);
        std::string error = launch_error(typed);
        INFO(error);
        CHECK(error.find(words) != std::string::npos);
    }
}

// ----------------------------------------------------------------------------
// state that is kept

TEST_CASE("a state that was written is read again, and what is no state is refused") {
    TemporaryFolder folder;
    CHECK(!read_state(folder.path));
    SupervisorState state;
    state.began = 1e9, state.first_step = 7, state.command = {"train", "--run-dir", "a b"};
    state.number = 3, state.resume = "x", state.resumed_step = 5, state.trained = 12.5;
    state.attempts = {ended(JobEnd::hung, 11, 143, true), ended(JobEnd::launcher, 12, 205)};
    state.attempts[1].why = "a line with \"quotes\" and \xff";
    state.incident = Incident{.time = "t",
                              .what = "w",
                              .who = "rank 1 on b",
                              .then = "again",
                              .step = 12,
                              .lost_steps = 4,
                              .since = 9e8,
                              .seconds = 1};
    state.places = {{"a", 0, 4}, {"b", 4, 4}};
    state.aside = {{"c", 4, "gone"}};
    SupervisorFiles files(folder.path);
    CHECK(files.write(state).empty());
    std::optional<SupervisorState> read = read_state(folder.path);
    REQUIRE(read);
    nlohmann::json one = nlohmann::json::parse(
        state.json(1e9 + 50).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    nlohmann::json other = read->json(1e9 + 50);
    one.erase("time"), other.erase("time");
    CHECK(one == other);
    CHECK(one["effective_training_time"] == 0.25);
    write_file(supervisor_path(folder.path), "{\"began\": 1}");
    CHECK_THROWS_AS(read_state(folder.path), Error);
    write_file(supervisor_path(folder.path), "{");
    CHECK_THROWS_AS(read_state(folder.path), Error);
}

TEST_CASE("progress is that of the log as it stands, also when it was cut and grew again") {
    TemporaryFolder folder;
    auto step = [](int i, int ms) { return text("{\"step\":%d,\"loss\":1.5,\"ms\":%d}\n", i, ms); };
    Progress progress(folder.path);
    CHECK(!progress.update());
    CHECK(!progress.is_visible());
    write_file(log_path(folder.path),
               "{\"step\":0,\"start\":{}}\n" + step(1, 100) + step(2, 100) + "{\"step\":3,\"lo");
    CHECK(progress.update());
    CHECK(progress.is_visible());
    CHECK(progress.last_step() == 2);
    CHECK(progress.longest_step() == 0.1);
    CHECK(!progress.update());
    write_file(log_path(folder.path),
               "{\"step\":0,\"start\":{}}\n" + step(1, 100) + step(2, 100) + step(3, 300));
    CHECK(progress.update());
    CHECK(progress.trained_since(0) == doctest::Approx(0.5));
    CHECK(progress.trained_since(1) == doctest::Approx(0.4));
    // The run started again after step 2. What was logged before that is no progress.
    const std::string again = "{\"step\":0,\"start\":{}}\n" + step(1, 100) + step(2, 100);
    write_file(log_path(folder.path), again + "{\"step\":2,\"start\":{}}\n");
    CHECK(!progress.update());
    write_file(log_path(folder.path), again + "{\"step\":2,\"start\":{}}\n" + step(3, 300));
    CHECK(progress.update());
    // the run went back to step 1, and its log is already longer than before
    write_file(log_path(folder.path), "{\"step\":0,\"start\":{}}\n" + step(1, 100) +
                                          "{\"step\":1,\"start\":{}}\n" + step(2, 200) + step(3, 200) +
                                          step(4, 200));
    progress.update();
    CHECK(progress.last_step() == 4);
    CHECK(progress.started_after() == 1);
    CHECK(progress.trained_since(1) == doctest::Approx(0.6));
}

// ----------------------------------------------------------------------------
// processes

// Waits for the end of a job and returns its exit code.
static int code_of(Job& job) {
    for (int i = 0; i < 6000 && job.code() < 0; i++) usleep(20000);
    return job.code();
}

TEST_CASE("a job's exit code and output are known, also to one who comes later") {
    TemporaryFolder folder;
    for (auto [command, code] : {std::pair{"echo one; exit 75", 75}, {"kill -9 $$", 137}, {"exit 0", 0}}) {
        INFO(command);
        Job job(folder.path, 3, {"/bin/sh", "-c", command});
        CHECK(code_of(job) == code);
        std::optional<JobRecord> record = JobRecord::read(folder.path);
        REQUIRE(record);
        CHECK(record->number == 3);
        CHECK(record->code == code);
        CHECK(!is_locked(job_lock_path(folder.path)));
    }
    Job missing(folder.path, 4, {"/nothing/there"});
    CHECK(code_of(missing) == 127);
    std::string_view shown;
    CHECK(missing.read_output(&shown).find("/nothing/there: cannot start it") != std::string::npos);
}

TEST_CASE("a job outlives its supervisor, and the next one takes it up") {
    TemporaryFolder folder;
    pid_t supervisor = fork();
    if (supervisor == 0) {
        Job job(folder.path, 1,
                {"/bin/sh", "-c",
                 "trap 'echo asked; exit 5' USR1; echo early; for i in $(seq 300); do sleep 1; done"});
        for (int i = 0; i < 60'000 && read_text(job_log_path(folder.path)) != "early\n"; i++) usleep(1000);
        raise(SIGKILL);
    }
    waitpid(supervisor, nullptr, 0);
    CHECK(is_locked(job_lock_path(folder.path)));
    CHECK_THROWS_AS(Job(folder.path, 2, {"/bin/true"}), Error);  // no second job beside it
    std::optional<JobRecord> record;
    for (int i = 0; i < 6000 && !record; i++, usleep(20000)) record = JobRecord::read(folder.path);
    REQUIRE(record);
    CHECK(is_alive(record->launcher));
    Job job(folder.path, *record);
    CHECK(job.code() == -1);
    std::string_view shown;
    CHECK(job.read_output(&shown) == "early\n");
    CHECK(shown.empty());  // its first supervisor has shown it
    job.ask_to_stop();
    CHECK(code_of(job) == 5);
    CHECK(job.read_output(&shown) == "asked\n");
    CHECK(shown == "asked\n");
    CHECK(!is_alive(record->launcher));
}

TEST_CASE("a job whose keeper was killed is followed to its end, which nobody can tell") {
    TemporaryFolder folder;
    Job job(folder.path, 1, {"/bin/sleep", "600"});
    kill(job.record().keeper.id, SIGKILL);
    usleep(100000);
    CHECK(job.code() == -1);
    kill(job.record().launcher.id, SIGKILL);
    CHECK(code_of(job) == Job::not_known);
    CHECK(job.is_lost());
}

TEST_CASE("what others write in a run's directory ends no process and reaches no other host") {
    TemporaryFolder folder;
    pid_t victim = fork();
    if (victim == 0) {
        setpgid(0, 0);
        execlp("sleep", "sleep", "60", nullptr);
        _exit(127);
    }
    setpgid(victim, victim);
    while (!is_alive(find_process(victim))) usleep(1000);
    const Process self = find_process(getpid()), sleeper = find_process(victim);
    JobRecord forged = {1, self, sleeper, 0, -1};
    CHECK(!is_kept(forged, folder.path));
    {
        FileHandle lock = Job::lock_of(folder.path);
        CHECK(is_kept(forged, folder.path));
        fs::rename(folder / "job.lock", folder / "other");
        fs::create_symlink(folder / "other", folder / "job.lock");
        CHECK(!is_kept(forged, folder.path));
        fs::remove(folder / "job.lock");
        fs::create_hard_link(folder / "other", folder / "job.lock");
        CHECK(!is_kept(forged, folder.path));
    }
    forged.keeper = sleeper;
    CHECK(!is_kept(forged, folder.path));
    Job job(folder.path, forged);
    job.ask_to_stop();
    job.end(SIGKILL);
    usleep(20000);
    CHECK(is_alive(sleeper));
    forged.launcher = {1, find_process(1).start, boot_id()};
    Job(folder.path, forged).end(0);
    kill(victim, SIGKILL);
    waitpid(victim, nullptr, 0);

    TemporaryFolder own;
    Job real(own.path, 1, {"/bin/sleep", "60"});
    CHECK(is_kept(real.record(), own.path));
    Job again(own.path, real.record());
    again.end(SIGKILL);
    CHECK(code_of(real) == 128 + SIGKILL);

    std::vector<Host> hosts = {{"a", 2}, {"b", 2}};
    CHECK(are_on({{"a", 0, 2}, {"b", 2, 1}}, hosts));
    CHECK(are_on({}, hosts));
    for (const HostRanks& place :
         {HostRanks{"-oProxyCommand=x", 0, 1}, {"c", 0, 1}, {"a", 0, 3}, {"a", 1, 1}, {"a", 0, 0}})
        CHECK(!are_on({place}, hosts));

    check_own_folder(folder / "not there");
    check_own_folder(folder.path);
    fs::create_directory_symlink(folder.path, folder / "link");
    CHECK_REFUSED(check_own_folder(folder / "link"), "/link: is not a folder that you own; ");
    if (geteuid() == 0) {
        fs::create_directory(folder / "theirs");
        REQUIRE(chown((folder / "theirs").c_str(), 65534, 65534) == 0);
        CHECK_REFUSED(check_own_folder(folder / "theirs"), "/theirs: is not a folder that you own; ");
    }
}

TEST_CASE("a process is told from a later one of the same number") {
    Process self = find_process(getpid());
    CHECK(is_alive(self));
    Process other = self;
    other.start++;
    CHECK(!is_alive(other));
    other = self, other.boot = "another";
    CHECK(!is_alive(other));
    CHECK(!is_alive(Process{}));
    CHECK(!is_alive(find_process(1 << 29)));
}

constexpr volatile sig_atomic_t not_stopped = 0;

TEST_CASE("commands that do not end are ended") {
    std::vector<CommandResult> results;
    auto are_late = [&] { return results[0].code < 0 || results[1].output.empty() || results[2].code < 0; };
    for (double limit = 0.5; results.empty() || (are_late() && limit < 50); limit *= 4)
        results = run_commands({{"/bin/sh", "-c", "echo a >&2; exit 3"},
                                {"/bin/sh", "-c", "echo b; exec sleep 600"},
                                {"/nothing/there"}},
                               limit, not_stopped);
    CHECK(results[0].code == 3);
    CHECK(results[0].output == "a\n");
    CHECK(results[1].code == -1);
    CHECK(results[1].output == "b\n");
    CHECK(results[2].code == 127);
}

TEST_CASE("commands are ended once the supervisor is asked to stop") {
    volatile sig_atomic_t stopped = 1;
    double begin = seconds_now();
    std::vector<CommandResult> results = run_commands({{"/bin/sleep", "600"}}, 600, stopped);
    CHECK(results[0].code == -1);
    CHECK(seconds_now() - begin < 300);
}

TEST_CASE("a host that answers is used, one that does not is put aside, and one without the run's directory "
          "is named") {
    TemporaryFolder folder;
    // Stands in for ssh: one host is down, and one sees another file system.
    std::string script = folder / "rsh";
    write_file(script, "#!/bin/sh\nhost=$1; shift 2\ncase $host in down) exit 255;; esac\n"
                       "[ $host != apart ] || { echo 'has its own'; exit; }\nexec \"$@\"\n");
    fs::permissions(script, fs::perms::owner_all);
    Launcher launcher(script + " {names} {ranks}", true);
    Scratch scratch;
    std::vector<Host> hosts = {{"up", 1}, {"down", 1}, {"apart", 1}, {"back", 1, "was down"}};
    std::vector<std::string> notes;
    {
        HostChecks checks(launcher, scratch, folder.path, 100, not_stopped);
        notes = checks.check(hosts, {});
    }
    CHECK(hosts[0].aside.empty());
    CHECK(hosts[1].aside.find("255") != std::string::npos);
    CHECK(hosts[2].aside.empty());
    CHECK(hosts[3].aside.empty());
    REQUIRE(notes.size() == 3);
    CHECK(notes[0].find("is not shared with apart:") != std::string::npos);
    CHECK(notes[1].find("down is put aside") == 0);
    CHECK(notes[2] == "back can be used again");
    CHECK(folder.files() == std::vector<std::string>{"rsh"});

    hosts[1].aside.clear();
    volatile sig_atomic_t stopped = 1;
    HostChecks checks(launcher, scratch, folder.path, 100, stopped);
    CHECK(checks.check(hosts, {}).empty());
    CHECK(hosts[1].aside.empty());
}

TEST_CASE("what agents say makes the newest state of each rank, and the one that is stopped is named") {
    auto rank = [](int number, int step, const char* letter, double quiet) {
        RankState state;
        state.rank = number, state.ranks = 2, state.sizes[Axis::replica] = 2, state.step = step,
        state.state = letter;
        state.alive = *letter, state.quiet_seconds = quiet, state.phase = "step", state.host = "here";
        return state;
    };
    auto line = [](std::vector<RankState> ranks) {
        return nlohmann::json({{"agent", "here"}, {"time", 1.0}, {"ranks", ranks}}).dump() + "\n";
    };
    TemporaryFolder folder;
    // the launcher's output and records left by an earlier start are ignored
    write_file(folder / "said", "mpirun: hello\n" + line({rank(0, 6, "S", 0), rank(1, 6, "S", 0)}) +
                                    line({rank(0, 7, "S", 30), rank(1, 7, "T", 30), rank(2, 9, "", 1e6)}));
    Agents agents;
    Scratch scratch;
    agents.start(Launcher("mpirun", false), true, {{"here", 0, 2}}, scratch,
                 {"/bin/sh", "-c", "cat " + (folder / "said") + "; exec sleep 60"});
    for (int i = 0; i < 2000 && agents.last_step() < 7; i++) {
        agents.wait(0.05);
        agents.read();
    }
    CHECK(agents.last_step() == 7);
    CHECK(agents.last_sign() <= seconds_now());
    CHECK(agents.last_sign() > seconds_now() - 100);
    HangDiagnosis diagnosis = agents.diagnosis(5);
    CHECK(diagnosis.ranks == std::vector<int>{1});
    CHECK(diagnosis.sentence.find("rank 1") != std::string::npos);
    agents.stop();
}

TEST_CASE("an agent that ends is told once, with its last words") {
    Agents agents;
    Scratch scratch;
    agents.start(Launcher("mpirun", false), true, {{"here", 0, 2}}, scratch,
                 {"/bin/sh", "-c", "echo '{\"ranks\":[]}'; echo no such library >&2; exit 3"});
    std::vector<std::string> notes;
    for (int i = 0; i < 2000 && notes.empty(); i++) {
        agents.wait(0.05);
        notes = agents.read();
    }
    CHECK(notes ==
          std::vector<std::string>{"the agent on here, which watches its ranks, ended with exit code 3: "
                                   "no such library"});
    CHECK(agents.read().empty());
}

TEST_CASE("a host whose selftest names a suspect is put aside, with the reason, until it passes") {
    TemporaryFolder folder;
    std::string script = folder / "rsh";
    write_file(script, "#!/bin/sh\nhost=$1 ranks=$2; shift 2\n[ $1 = selftest ] || exec \"$@\"\n"
                       "case $host in\n"
                       "bad) echo 'train_gpt: suspect: rank 1 of 4: the disk is slow'; exit 75;;\n"
                       "odd) exit 9;;\n"
                       "*) [ $ranks = 4 ];;\nesac\n");
    fs::permissions(script, fs::perms::owner_all);
    Launcher launcher(script + " {names} {ranks}", true);
    Scratch scratch;
    std::vector<Host> hosts = {{"good", 4}, {"bad", 4}, {"odd", 4}};
    HostChecks checks(launcher, scratch, folder.path, 100, not_stopped);
    std::vector<std::string> notes = checks.check(hosts, {"selftest"});
    CHECK(hosts[0].aside.empty());
    CHECK(hosts[1].aside == "selftest: rank 1 of 4: the disk is slow");
    CHECK(hosts[2].aside == "its selftest ended with exit code 9: it said nothing");
    REQUIRE(notes.size() == 2);
    CHECK(notes[0] == "bad is put aside: " + hosts[1].aside);
    checks.check(hosts, {});
    CHECK(hosts[1].aside.empty());
}
