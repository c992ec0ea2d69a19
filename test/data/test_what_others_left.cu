// Files and records that other users may have left where ours are written and read, and text that they may
// have written for us to print.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "data/base/log_file.h"
#include "data/base/print.h"
#include "data/report/report.h"
#include "data/run/rank_state.h"
#include "data/run/culprit.h"
#include "data/run/run_log.h"
#include "data/supervisor/job.h"
#include "data/supervisor/progress.h"
#include "test/support/file_testing.h"

TEST_CASE("control characters are printed by their numbers, and text stays as it is") {
    CHECK(visible("a\tb\nc \u00e9\u4e2d\U0001f600") == "a\tb\nc \u00e9\u4e2d\U0001f600");
    CHECK(visible("\x1b]0;x\x07") == "\\u001b]0;x\\u0007");
    CHECK(visible("\u009b2J \u007f") == "\\u009b2J \\u007f");
    CHECK(visible("\u202eabc\u2066 \u200f \u2028") == "\\u202eabc\\u2066 \\u200f \\u2028");
    CHECK(visible("\x9b"
                  "2J \xe4\xb8") == "\\x9b2J \\xe4\\xb8");
    CHECK(visible(std::string_view("\0", 1)) == "\\u0000");
    CHECK(one_line("a\r\n\tb") == "a\\u000d\\u000a\\u0009b");
    const nlohmann::json json = {{"name", "\u202e\x1b\u009b"}};
    CHECK(nlohmann::json::parse(visible(json.dump())) == json);
    CHECK(printable(std::string(99, 'a') + "\u4e2d") == std::string(99, 'a') + "...");
    CHECK(default_run_dir("x\x1b[2J") == "runs/x\\u001b[2J");
}

TEST_CASE("links, FIFOs and devices in the place of files of a run are refused, and nothing is written "
          "through them") {
    TemporaryFolder folder;
    const std::string target = folder / "precious", name = folder / "file";
    auto refused_by_all = [&](const std::string& place, const std::string& reason) {
        for (const std::string& error :
             {error_of([&] { LogFile file(name); }), error_of([&] { write_over(name, "x"); }),
              error_of([&] { open_to_write(name, O_WRONLY | O_CREAT | O_TRUNC); })}) {
            CHECK_MESSAGE(error.starts_with(name + ": is " + reason), error);
        }
        fs::rename(name, place);
        const std::string error = error_of([&] { write_whole(name, "x"); });
        CHECK_MESSAGE(error.starts_with(place + ": is " + reason), error);
        CHECK(!fs::exists(name));
        fs::remove(place);
    };
    write_file(target, "precious");
    fs::create_symlink(target, name);
    refused_by_all(name + ".partial", "a link");
    fs::create_symlink(folder / "missing", name);  // nor does a link create a file elsewhere
    refused_by_all(name + ".partial", "a link");
    CHECK(!fs::exists(folder / "missing"));
    REQUIRE(mkfifo(name.c_str(), 0600) == 0);
    refused_by_all(name + ".partial", "not a regular file");
    CHECK(contents(target) == "precious");

    // A link in place of a whole file is replaced by the file.
    fs::create_symlink(target, name);
    write_whole(name, "new");
    CHECK(contents(name) == "new");
    CHECK(!fs::is_symlink(name));
    CHECK(contents(target) == "precious");
}

TEST_CASE("a file that somebody else may have open is not written: a new one takes its place") {
    TemporaryFolder folder;
    const std::string name = folder / "file";
    write_file(name + ".partial", "left by a run that was killed, or by somebody who waits");
    FileHandle others = open_file(name + ".partial", O_RDWR);
    write_whole(name, "secret");
    CHECK(contents(name) == "secret");
    char first = 0;
    REQUIRE(pread(others.get(), &first, 1, 0) == 1);
    CHECK(first == 'l');
    CHECK(!fs::exists(name + ".partial"));
    // A file that a running process is writing is not replaced.
    NewFile mine(name);
    CHECK_REFUSED(NewFile{name}, ": another process is writing it;");
    CHECK(fs::exists(name + ".partial"));
    mine.commit();
    CHECK(contents(name).empty());
}

TEST_CASE("a run directory may be a link, and nothing in it") {
    TemporaryFolder folder;
    fs::create_directories(folder / "real");
    fs::create_directories(folder / "elsewhere/step_00000001.partial");
    fs::create_directory_symlink(folder / "real", folder / "run");
    { RunLog log(folder / "run", RunFolder::fresh); }
    CHECK(fs::exists(folder / "real/log.jsonl"));
    fs::create_directory_symlink(folder / "elsewhere", folder / "run/checkpoints");
    CHECK_REFUSED(RunLog(folder / "run", RunFolder::fresh), "/run/checkpoints: is a link ");
    CHECK_REFUSED(NewCheckpoint(folder / "run", checkpoint_folder(folder / "run", 1)),
                  "/run/checkpoints: is a link ");
    CHECK(fs::exists(folder / "elsewhere/step_00000001.partial"));
    fs::create_directory_symlink(folder / "elsewhere", folder / "run/tensorboard");
    write_file(folder / "real/log.jsonl", "{\"step\":1,\"loss\":2.5}\n");
    ReportOptions options;
    options.runs = {folder / "run"}, options.format = ReportFormat::tensorboard;
    CHECK_REFUSED(report_runs(options), "/run/tensorboard: is a link ");
    options.output = folder / "run/tensorboard";  // a path that the user names is trusted
    report_runs(options);
    CHECK(fs::exists(folder / "elsewhere/events.out.tfevents.0.train_gpt"));

    fs::remove(folder / "real/log.jsonl");
    REQUIRE(mkfifo((folder / "real/log.jsonl").c_str(), 0600) == 0);  // no reader waits for a writer
    Progress progress(folder / "run");
    CHECK(!progress.update());
    CHECK(!progress.is_visible());
    CHECK_REFUSED(RunLog(folder / "run", RunFolder::continued), "/run/checkpoints: is a link ");
    fs::remove(folder / "run/checkpoints");
    CHECK_REFUSED(RunLog(folder / "run", RunFolder::continued), "/run/log.jsonl: is not a regular file;");

    for (const char* name : {"job.lock", "job.log"}) {
        write_file(folder / "precious", "precious");
        fs::create_symlink(folder / "precious", folder / ("run/" + std::string(name)));
        CHECK_REFUSED(Job(folder / "run", 1, {"true"}), std::string("/run/") + name + ": is a link");
        fs::remove(folder / ("run/" + std::string(name)));
        CHECK(contents(folder / "precious") == "precious");
    }
}

namespace {

// A record that another program of this machine may have left, with the state of 4 ranks in one group.
struct Planted {
    static constexpr int process = 2000000000;  // no process has this number
    std::string name = SharedFlightRecord::name_of_process(process);
    FlightRecord* record;

    explicit Planted(const std::string& run_dir) {
        shm_unlink(name.c_str());
        int file = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
        REQUIRE(ftruncate(file, sizeof(FlightRecord)) == 0);
        void* memory = mmap(nullptr, sizeof(FlightRecord), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        record = new (memory) FlightRecord;
        record->process = process, record->ranks = 4, record->sizes[Axis::tensor] = 4;
        copy_name(record->run_dir, path_of_run(run_dir)), copy_name(record->host, "node5");
        FlightGroup& group = record->groups[0];
        record->group_count = 1, group.size = 4, group.axes = 1;
        group.issued = 5, group.begun = 5, group.done = 1;
        record->entries[0] = {.number = 2, .group = 0, .operation = Operation::all_reduce, .timed = true};
        record->entry_count = 1;
        record->is_record = FlightRecord::mark;
    }
    ~Planted() {
        munmap(record, sizeof *record);
        shm_unlink(name.c_str());
    }
    void set_mode(mode_t mode) const { REQUIRE(chmod(("/dev/shm" + name).c_str(), mode) == 0); }
};

}  // namespace

TEST_CASE("records that another user has left or could write are none, and impossible ones are passed over") {
    TemporaryFolder folder;
    Planted planted(folder.path);
    FlightRecord& record = *planted.record;
    auto is_there = [&] { return read_rank_states(folder.path).size() == 1; };
    CHECK(is_there());
    planted.set_mode(0620);
    CHECK(!is_there());
    planted.set_mode(0600);
    if (geteuid() == 0) {
        REQUIRE(chown(("/dev/shm" + planted.name).c_str(), 65534, 65534) == 0);
        CHECK(!is_there());
        REQUIRE(chown(("/dev/shm" + planted.name).c_str(), 0, 0) == 0);
    }
    auto wrong = [&](auto& field, auto value) {
        auto before = field;
        field = value;
        CHECK(!is_there());
        field = before;
    };
    for (int size : {0, -4, 5}) wrong(record.sizes[Axis::tensor], size);
    wrong(record.sizes[Axis::pipeline], INT_MAX);
    wrong(record.ranks, INT_MAX), wrong(record.ranks, 0), wrong(record.ranks, -1), wrong(record.rank, 4);
    wrong(record.rank, -1), wrong(record.process, 1);
    FlightGroup& group = record.groups[0];
    wrong(group.size, 0), wrong(group.size, 100), wrong(group.size, INT_MIN), wrong(group.axes, 32);
    wrong(group.axes, -1), wrong(group.ranks[3], 4), wrong(group.ranks[0], -1);
    CHECK(is_there());

    // Impossible counts, names without a terminating NUL, and operations that do not exist.
    record.group_count = -1;
    CHECK(read_rank_states(folder.path).at(0).groups.empty());
    record.group_count = INT_MAX;
    CHECK(!is_there());  // the other groups have no ranks
    record.group_count = 1;
    memset(record.host, 'h', sizeof record.host);
    memset(record.phase, 'p', sizeof record.phase);
    memset(group.name, 'g', sizeof group.name);
    memset((void*)&record.entries[0].operation, 0xff, 1);
    RankState state = read_rank_states(folder.path).at(0);
    CHECK(state.host == std::string(sizeof record.host, 'h'));
    CHECK(state.phase == std::string(sizeof record.phase, 'p'));
    CHECK(state.groups.at(0).name == std::string(sizeof group.name, 'g'));
    CHECK(state.last.operation.empty());
    record.entry_count = UINT64_MAX;
    CHECK(is_there());
    CHECK(diagnose_hang(read_rank_states(folder.path), 1).sentence.size() > 10);
    record.sign_of_life = INT64_MIN;
    CHECK(!is_there());
}

TEST_CASE("a line of an agent is taken only with ranks that there can be") {
    RankState state;
    state.rank = 1, state.ranks = 2, state.sizes[Axis::tensor] = 2, state.groups.resize(1);
    nlohmann::json line = {{"agent", "node5"}, {"ranks", {state}}};
    auto count = [&](const char* field, const nlohmann::json& value) {
        nlohmann::json changed = line;
        changed["ranks"][0][nlohmann::json::json_pointer(field)] = value;
        return states_in_line(changed.dump()).size();
    };
    CHECK(count("/step", 7) == 1);
    CHECK(states_in_line(line.dump()).at(0) == state);
    for (const char* field : {"/sizes/0", "/ranks", "/sizes/1"}) CHECK(count(field, 0) == 0);
    for (const char* field : {"/rank", "/step", "/device"}) CHECK(count(field, 1e300) == 0);
    for (double value : {-1.0, 1e300}) CHECK(count("/groups/0/begun", value) == 0);
    CHECK(count("/ranks", INT_MAX) == 0);
    CHECK(count("/quiet_seconds", -1.0) == 0);
    CHECK(count("/work_seconds", 1e300) == 0);
    CHECK(count("/step", "seven") == 0);
    CHECK(count("/groups", std::vector<GroupState>(100)) == 0);
    for (const char* other : {"", "mpirun: hello", "[1]", "{}", "{\"ranks\":7}", "{\"ranks\":[null]}"})
        CHECK(states_in_line(other).empty());
}
