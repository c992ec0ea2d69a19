// The run directory: runs that begin, replace others or resume, and the log of their steps as one curve.
#include <fcntl.h>

#include <fstream>
#include <sstream>

#include "data/checkpoint/builder.h"
#include "data/run/run_log.h"
#include "data/run/run_report.h"
#include "data/run/step_log.h"
#include "test/data/failing_calls.h"
#include "test/support/file_testing.h"

static const nlohmann::ordered_json some_options = {{"layers", 4}, {"learning_rate", 0.0006}};

static std::vector<nlohmann::json> lines_of(const std::string& run) {
    std::ifstream file(run + "/log.jsonl");
    std::vector<nlohmann::json> result;
    for (std::string line; std::getline(file, line);) result.push_back(nlohmann::json::parse(line));
    return result;
}

static void make_checkpoint(const std::string& run_dir, int64_t step) {
    CheckpointBuilder builder(
        run_dir, step, {{"program", "test"}, {"step", step}, {"samples", 0}, {"options", some_options}},
        {{"wte", {1}, {Dtype::fp32}}});
    float value = 1;
    builder.append(0, Slot::weight, 0, 1, &value);
    builder.commit();
}

static nlohmann::ordered_json step_line(int step, const char* what = "loss") {
    return {{"step", step}, {what, 1.5}};
}

TEST_CASE("a run directory is not overwritten by accident") {
    TemporaryFolder folder;
    std::string run = folder / "a/b";
    {
        RunLog log(run, RunFolder::fresh);
        CHECK(log.begin(some_options, 0).empty());
        log.write({{"step", 0}, {"loss", 5.5}, {"text", "\xff"}});
        CHECK(lines_of(run).size() == 1);  // written before the log is closed
        log.write({{"step", 1}, {"loss", 5.25}});
        for (RunFolder use : {RunFolder::replaced, RunFolder::continued})
            CHECK_REFUSED(RunLog(run, use), run + ": another process is training there; ");
    }
    CHECK(lines_of(run)[1]["loss"] == 5.25);
    CHECK(nlohmann::ordered_json::parse(contents(run + "/options.json")) == some_options);
    CHECK_REFUSED(RunLog(run, RunFolder::fresh), run + ": already holds a run; ");

    // nothing is changed before the run begins
    make_checkpoint(run, 1);
    RunLog(run, RunFolder::replaced);
    CHECK(lines_of(run).size() == 2);
    CHECK(checkpoint_steps(run).size() == 1);

    RunLog(run, RunFolder::replaced).begin({{"layers", 5}}, 0);
    CHECK(lines_of(run).empty());
    CHECK(checkpoint_steps(run).empty());
    CHECK(nlohmann::json::parse(contents(run + "/options.json"))["layers"] == 5);
    RunLog(run, RunFolder::fresh).begin(some_options, 0);  // the run before produced nothing

    make_checkpoint(run, 7);
    CHECK_REFUSED(RunLog(run, RunFolder::fresh), run + ": already holds a run; ");

    write_file(folder / "file", "x");
    CHECK_REFUSED(RunLog(folder / "file", RunFolder::fresh), "/file: cannot make the folder: ");
    CHECK_REFUSED(RunLog("/proc/run", RunFolder::fresh), "/proc/run: cannot make the folder: ");

    // the message names the option of the caller's command
    std::string refused = error_of([&] { RunLog(run, RunFolder::fresh, "--output"); });
    CHECK(refused == run + ": already holds a run; replace it with --overwrite, or name another directory "
                           "with --output");
    CHECK_REFUSED(RunLog(run, RunFolder::fresh), "; resume it with --resume auto, replace it with");
}

TEST_CASE("a log is on disk when it is said to be") {
    TemporaryFolder folder;
    std::string run = folder / "run";
    RunLog log(run, RunFolder::fresh);
    log.begin(some_options, 0);
    log.write(step_line(1));
    synced.clear();
    interrupted_syncs = 3;
    log.sync();
    CHECK(synced == std::vector<std::string>{run + "/log.jsonl"});
    fail_next_sync_of = run + "/log.jsonl";
    CHECK(log.sync().find("log.jsonl: cannot write it: Input/output error; ") != std::string::npos);
    CHECK(log.sync().find("can be written again") != std::string::npos);
}

TEST_CASE("a run that is there takes the place of another") {
    TemporaryFolder folder;
    std::string run = folder / "run";
    RunLog log(run, RunFolder::replaced);
    log.write(step_line(1));
    for (int step : {5, 100, 200}) make_checkpoint(run, step);
    // the older run's newest checkpoint is removed last: if a removal fails, the run still has it
    fail_next_rename_to = checkpoint_folder(run, 200) + ".partial";
    CHECK_REFUSED(log.begin_as({{"layers", 3}}, 5), "step_00000200: cannot rename it: ");
    CHECK(checkpoint_steps(run) == std::vector<int64_t>{200, 5});
    CHECK(lines_of(run).size() == 1);
    log.begin_as({{"layers", 3}}, 5);
    CHECK(checkpoint_steps(run) == std::vector<int64_t>{5});
    CHECK(lines_of(run).empty());
    CHECK(nlohmann::json::parse(contents(run + "/options.json"))["layers"] == 3);
}

TEST_CASE("what killed runs left of a checkpoint is no run, and goes") {
    TemporaryFolder folder;
    std::string run = folder / "run", partial = checkpoint_folder(run, 5) + ".partial";
    for (RunFolder use : {RunFolder::fresh, RunFolder::replaced, RunFolder::continued}) {
        fs::create_directories(partial);
        RunLog(run, use).begin(some_options, 0);
        CHECK(!fs::exists(partial));
    }
}

TEST_CASE("a run that goes on has one curve") {
    TemporaryFolder folder;
    std::string run = folder / "run";
    std::vector<nlohmann::ordered_json> expected;
    {
        RunLog log(run, RunFolder::fresh);
        log.begin(some_options, 0);
        // each line, and whether it stays when the run resumes after step 100
        auto write = [&](const nlohmann::ordered_json& line, bool stays) {
            log.write(line);
            if (stays) expected.push_back(line);
        };
        write(step_line(0, "val_loss"), true);
        write(step_line(99), true);
        write(step_line(99, "val_loss"), true);
        write(step_line(100), true);
        write(step_line(100, "val_loss"), false);  // measured again
        write(step_line(100, "sample"), false);
        write(step_line(101), false);
        write({{"step", 100}, {"checkpoint", "step_00000100"}, {"bytes", 5}}, true);  // written late
        write(step_line(102), false);
        write({{"step", 100}, {"checkpoint", nullptr}, {"trouble", "full"}}, true);
        write({{"step", 102}, {"checkpoint", "step_00000102"}}, false);
    }
    for (int step : {50, 100, 102, 150}) make_checkpoint(run, step);
    {
        RunLog log(run, RunFolder::continued);
        std::vector<std::string> notes = log.begin({{"layers", 9}}, 100);
        REQUIRE(notes.size() == 2);
        CHECK(notes[0].starts_with(checkpoint_folder(run, 150) + ": newer than step 100"));
        CHECK(notes[0].ends_with("step_00000150.aside"));
        log.write(step_line(101, "new"));
    }
    CHECK(checkpoint_steps(run) == std::vector<int64_t>{100, 50});
    CHECK(fs::exists(checkpoint_folder(run, 150) + ".aside/index.bin"));
    expected.push_back(step_line(101, "new"));
    CHECK(nlohmann::json(lines_of(run)) == nlohmann::json(expected));
    CHECK(nlohmann::json::parse(contents(run + "/options.json"))["layers"] == 9);

    // resuming again from the same step leaves the same log
    expected.pop_back();
    CHECK(RunLog(run, RunFolder::continued).begin(some_options, 100).empty());
    CHECK(nlohmann::json(lines_of(run)) == nlohmann::json(expected));
}

TEST_CASE("a run that goes on says what its libraries have become") {
    TemporaryFolder folder;
    std::string run = folder / "run";
    auto start = [&](int step, const std::string& communication) {
        return nlohmann::ordered_json{
            {"step", step}, {"start", start_record(Options(), "host", 2, "device", communication, "", {})}};
    };
    {
        RunLog log(run, RunFolder::fresh);
        CHECK(log.last_start().is_null());
        CHECK(communication_note(log.last_start(), "MPI 4") == "");
        log.begin(some_options, 0);
        log.write(start(0, "MPI 4, NCCL 2.27.3"));
        log.write(step_line(1));
        log.write(start(1, "MPI 4, NCCL 2.28.3, NCCL_ALGO=Ring"));
        log.write({{"step", 1}, {"sample", "a \"start\""}});
    }
    std::ofstream(run + "/log.jsonl", std::ios::app) << "{\"step\": 2, \"start\": {\"comm";  // torn
    nlohmann::json last = RunLog(run, RunFolder::continued).last_start();
    REQUIRE(last.is_object());
    CHECK(last["processes"] == 2);
    CHECK(communication_note(last, "MPI 4, NCCL 2.28.3, NCCL_ALGO=Ring") == "");
    CHECK(communication_note(last, "MPI 4, NCCL 2.29.1") ==
          "communication used MPI 4, NCCL 2.28.3, NCCL_ALGO=Ring and now uses MPI 4, NCCL 2.29.1: sums "
          "may be computed "
          "in another order, and differ in their last bits");
    // Older records lack it.
    last.erase("communication");
    CHECK(communication_note(last, "MPI 4") == "");
}

TEST_CASE("a log that was torn anywhere is cut to whole lines") {
    TemporaryFolder folder;
    std::string run = folder / "run", path = run + "/log.jsonl", whole;
    for (int step = 1; step <= 6; step++) whole += step_line(step).dump() + "\n";
    RunLog(run, RunFolder::fresh).begin(some_options, 0);
    size_t line = whole.size() / 6;
    for (size_t length = 0; length <= whole.size(); length++) {
        write_file(path, whole.substr(0, length));
        RunLog log(run, RunFolder::continued);
        log.begin(some_options, 4);
        CAPTURE(length);
        CHECK(contents(path) == whole.substr(0, std::min(length / line, (size_t)4) * line));
        log.write(step_line(5));
        CHECK(contents(path).ends_with("{\"step\":5,\"loss\":1.5}\n"));
    }
    // lines that our program does not write
    for (const char* odd : {"\n", "[]\n", "{}\n", "{\"step\":\"3\"}\n", "{\"step\":3.5}\n",
                            "{\"step\":1e99}\n", "x\n", "\xff\n", "{\"step\":18446744073709551615}\n"}) {
        write_file(path, whole.substr(0, line) + odd + whole.substr(line));
        RunLog(run, RunFolder::continued).begin(some_options, 4);
        CHECK(contents(path) == whole.substr(0, 4 * line));
    }
    write_file(path, whole + std::string(100000, '[') + "\n");
    RunLog(run, RunFolder::continued).begin(some_options, 6);
    CHECK(contents(path) == whole);
    RunLog(run, RunFolder::continued).begin(some_options, 0);
    CHECK(contents(path).empty());
}

TEST_CASE("a run from a checkpoint of another has a log of its own") {
    TemporaryFolder folder;
    std::string run = folder / "branch";
    RunLog log(run, RunFolder::fresh);
    CHECK(log.begin(some_options, 100).empty());
    log.write(step_line(101));
    CHECK(lines_of(run).size() == 1);
}

TEST_CASE("a log on a full disk") {
    SmallDisk disk("64k");
    if (!disk.mounted) SKIP("a small tmpfs cannot be mounted here");
    std::string run = disk.folder / "run";
    auto fill = [&](const std::string& name) {  // to the last byte
        std::ofstream file(disk.folder / name, std::ios::binary);
        for (int i = 0; i < 100 << 10; i++) file.put('x').flush();
    };
    RunLog log(run, RunFolder::fresh);
    log.begin(some_options, 0);
    CHECK(log.write(step_line(1)) == "");
    fill("filler");
    // one warning for any number of lines; lines that do not fit in memory either are counted
    std::vector<std::string> told;
    int last = 1, lines = (int)LogFile::most_waiting + 300;
    for (int i = 0; i < lines; i++) {
        std::string words = i % 100 == 0 ? log.sync() : log.write(step_line(++last));
        if (!words.empty()) told.push_back(words);
    }
    REQUIRE(told.size() == 1);
    CHECK(told[0].starts_with(run + "/log.jsonl: cannot write it: No space left on device; "));
    CHECK(contents(run + "/log.jsonl").back() == '\n');  // the half line is gone
    auto begin = [&] { RunLog(disk.folder / "other", RunFolder::fresh).begin(some_options, 0); };
    CHECK_REFUSED(begin(), "No space left on device; ");

    fs::remove(disk.folder / "filler");
    REQUIRE(mount("", disk.folder.path.c_str(), "", MS_REMOUNT, "size=10m") == 0);
    CHECK(log.write(step_line(++last)).find("can be written again") != std::string::npos);
    CHECK(log.waiting() == 0);
    auto written = lines_of(run);
    int expected = 1, dropped = 0;
    for (const auto& line : written) {
        if (line.contains("dropped_lines")) {
            dropped += line["dropped_lines"].get<int>();
            expected += dropped;
            CHECK(line["step"] == expected - 1);
        } else {
            CHECK(line["step"] == expected++);
        }
    }
    CHECK(expected == last + 1);
    CHECK(dropped > 0);
    CHECK(dropped < 300);
}

TEST_CASE("the median of the first steps is compared with the planned time, once") {
    TemporaryFolder folder;
    std::string run = folder / "run";
    RunLog log(run, RunFolder::fresh);
    log.begin(some_options, 0);
    Options options;
    options.global_batch = options.sequence_length = 16;
    Meter meter(options, 16, 0, 1e9, 1);
    StepLog steps(options, meter, &log);
    steps.expect(0.1);
    for (int step = 1; step <= 30; step++)  // the first is slow, and so is one of the others
        steps.step(step, 16, 1, 1, 1e-3f, step == 1 ? 9 : step == 5 ? 7 : 0.12, 0);
    int compared = 0;
    for (const nlohmann::json& line : lines_of(run)) {
        if (!line.contains("planned_ms")) continue;
        compared++;
        CHECK(line["step"] == 11);
        CHECK(line["planned_ms"] == doctest::Approx(100));
        CHECK(line["measured_ms"] == doctest::Approx(120));
    }
    CHECK(compared == 1);
}

TEST_CASE("checkpoints in the log") {
    TemporaryFolder folder;
    std::string run = folder / "run";
    RunLog log(run, RunFolder::fresh);
    log.begin(some_options, 0);
    Options options;
    Meter meter(options, 16, 0, 1e9, 1);
    StepLog steps(options, meter, &log);
    SaveReport report;
    report.step = 100;
    report.folder = "run/checkpoints/step_00000100";
    report.bytes = 1500000000;
    report.stalled = 0.25;
    report.seconds = 2;
    steps.checkpoint(report);
    report.step = 200;
    report.error = "disk: full; free some";
    steps.checkpoint(report);
    auto lines = lines_of(run);
    REQUIRE(lines.size() == 2);
    CHECK(lines[0] == nlohmann::json{{"step", 100},
                                     {"checkpoint", "run/checkpoints/step_00000100"},
                                     {"bytes", 1500000000},
                                     {"stall_ms", 250.0},
                                     {"write_ms", 2000.0}});
    CHECK(lines[1]["checkpoint"].is_null());
    CHECK(lines[1]["trouble"] == "disk: full; free some");
    StepLog(options, meter, nullptr).checkpoint(report);  // a rank that has no log
}

TEST_CASE("a line on the screen has the means of its steps, and the slowest of them") {
    TemporaryFolder folder;
    std::string run = folder / "run";
    RunLog log(run, RunFolder::fresh);
    log.begin(some_options, 0);
    Options options;
    options.steps = 8;
    options.log_every = 3;
    options.global_batch = options.sequence_length = 1000;
    Meter meter(options, 1000, 0, 1e9, 1);
    fflush(stdout);
    int output = dup(STDOUT_FILENO), file = open((folder / "shown").c_str(), O_CREAT | O_WRONLY, 0600);
    dup2(file, STDOUT_FILENO);
    {
        StepLog steps(options, meter, &log);
        double ms[] = {900, 20, 30, 40, 80, 60, 50, 10};
        for (int step = 1; step <= 8; step++)
            steps.step(step, 1000, (float)(10 - step), 0.5f * (float)step, 1e-3f, ms[step - 1] / 1e3, 0);
        CHECK(steps.seconds_left(8) == 0);
    }
    fflush(stdout);
    dup2(output, STDOUT_FILENO);
    close(output), close(file);
    std::istringstream shown(contents(folder / "shown"));
    std::vector<std::string> lines;
    for (std::string line; std::getline(shown, line);) lines.push_back(line);
    REQUIRE(lines.size() == 4);
    auto has = [](const std::string& line, const std::string& part) {
        return line.find(part) != std::string::npos;
    };
    CHECK(has(lines[0], "step      1/8  loss 9.0000  norm  0.500  lr 1.00e-03    900.0 ms   1.11k tok/s"));
    CHECK(!has(lines[0], "slowest"));
    CHECK(has(lines[1], "step      3/8  loss 7.5000  norm  1.250  lr 1.00e-03     25.0 ms   40.0k tok/s"));
    CHECK(lines[1].ends_with("  slowest 30.0 ms at step 3"));
    CHECK(has(lines[2], "step      6/8  loss 5.0000  norm  2.500  lr 1.00e-03     60.0 ms   16.7k tok/s"));
    CHECK(lines[2].ends_with("  slowest 80.0 ms at step 5"));
    CHECK(has(lines[3], "step      8/8  loss 2.5000"));
    CHECK(lines[3].ends_with(" 0s left  slowest 50.0 ms at step 7"));
    CHECK(lines_of(run).size() == 8);
    CHECK(lines_of(run)[3]["ms"] == doctest::Approx(40));
}
