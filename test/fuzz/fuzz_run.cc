// libFuzzer: whatever is in the files of a run directory, a report of it is made, and a supervisor reads its
// own files or says in a line why it cannot.
#include <cstdlib>
#include <filesystem>
#include <string>
#include <sys/stat.h>

#include "data/report/report_data.h"
#include "data/report/scalars.h"
#include "data/supervisor/job.h"
#include "data/supervisor/progress.h"
#include "data/supervisor/state.h"
#include "test/fuzz/fuzz_json.h"

// The files of a run of a few steps, which a supervisor has restarted once.
static nlohmann::json sound_run() {
    return nlohmann::json::parse(R"json({
        "options.json": [{"model": "tiny", "steps": 20, "global_batch": 8, "val_data": "v", "val_tokens": 512,
            "learning_rate": 0.001, "run_dir": "r"}],
        "log.jsonl": [
            {"step": 0, "start": {"ranks": 4, "time": "2026-11-25T05:42:00Z", "hosts": ["a", "b"],
                "validation": {"hash": "12", "tokens": 512}, "options": {"steps": 20},
                "memory": [{"class": "weights", "bytes": 7, "host": false}]}},
            {"step": 1, "loss": 3.5, "grad_norm": 1.5, "ms": 12.5, "tokens": 512, "learning_rate": 0.001,
                "time": "2026-11-25T05:42:01Z", "mfu": 0.4},
            {"step": 2, "loss": 3.25, "grad_norm": 1.25, "ms": 12.5, "tokens": 512},
            {"step": 2, "timings": {"ms": {"forward": [1, 2, 3, 0], "backward": [1, 2, 3, 1]}}},
            {"step": 2, "val_loss": 3.75, "eval": {"hellaswag": {"accuracy": 0.25, "error": 0.1}}},
            {"step": 2, "sample": "once"}, {"step": 3, "skipped": "spike", "loss": 9.5},
            {"step": 4, "checkpoint": "r/checkpoints/step_00000004", "bytes": 470784, "stall_ms": 10,
                "write_ms": 9},
            {"step": 4, "dropped_lines": 2},
            {"step": 4, "slow_rank": {"rank": 1, "times": 1.5, "phase": "forward"}}],
        "ranks.jsonl": [
            {"places": [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 1]], "devices": [0, 1, 0, 1],
                "hosts": ["a", "a", "b", "b"]},
            {"step": 10, "steps": 10, "ms": {"forward": [1, 2, 3, 4], "backward": [1, 2, 3, 4]}, "pipeline":
                {"measured": [{"stage": 0, "passes": [["forward", 0, 0, 0.1, 0.2]]}], "ideal_idle": 0.2}}],
        "incidents.jsonl": [
            {"time": "2026-11-25T05:43:00Z", "what": "w", "who": "rank 1 (a)", "then": "t", "step": 2,
                "lost_steps": 1, "since": 1795584120.5, "seconds": 7.5}],
        "supervisor.json": [{"time": "2026-11-25T05:43:00Z", "began": 1795584120.5, "first_step": 0,
            "command": ["train_gpt", "train"], "number": 2, "resume": "", "resumed_step": -1, "result": "",
            "stopping": false, "code": 0, "trained_seconds": 1.5, "effective_training_time": 0.5,
            "hosts": [{"name": "a", "first": 0, "ranks": 2}],
            "aside": [{"name": "b", "slots": 2, "why": "w"}],
            "attempts": [{"end": "done", "code": 75, "last_step": 2, "begun": 1795584120.5,
                "ended": 1795584121.5, "ranks": 4, "exchanged": true, "why": "w"}],
            "incident": {"time": "2026-11-25T05:43:00Z", "what": "w", "who": "", "then": "t", "step": 2,
                "lost_steps": 1, "since": 1795584120.5, "seconds": 7.5}}],
        "job.json": [{"number": 2, "keeper": {"id": 1, "start": 7, "boot": "b"},
            "launcher": {"id": 2, "start": 7, "boot": "b"}, "log_begin": 5, "code": -1}]})json");
}

static void write_files(const std::string& folder, const nlohmann::json& files, std::string_view raw) {
    for (const char* name :
         {"options.json", "log.jsonl", "ranks.jsonl", "incidents.jsonl", "supervisor.json", "job.json"}) {
        std::string lines;
        auto found = files.is_object() ? files.find(name) : files.end();
        if (found != files.end())
            for (const auto& line : *found) lines += line.dump() + "\n";
        if (!raw.empty() && (uint8_t)raw[0] % 6 == name[0] % 6) lines = raw;
        FileHandle file = open_file(folder + "/" + name, O_WRONLY | O_CREAT | O_TRUNC);
        if (!file) abort();
        write_at(file, name, 0, lines.data(), lines.size());
    }
}

// Returns whether work() succeeds; if not, its error must be one line.
template <typename Work>
static bool works(Work&& work) {
    try {
        work();
        return true;
    } catch (const Error& error) {
        if (one_line(error.what()).find('\n') != std::string::npos) abort();
        return false;
    }
}

static int test_one_input(const uint8_t* data, size_t size) {
    static const std::string folder = [] {
        std::string name = "/dev/shm/fuzz_run.XXXXXX";
        if (!mkdtemp(name.data())) abort();
        static const std::string left = name;
        atexit([] { std::filesystem::remove_all(left); });
        return name;
    }();
    if (size < 4) return 0;
    const std::string_view bytes((const char*)data, size);
    nlohmann::json files = sound_run();
    const bool is_raw = data[0] & 1;
    if (!is_raw) damage_json(files, bytes.substr(1));
    write_files(folder, files, is_raw ? bytes.substr(1) : "");

    works([&] {
        nlohmann::ordered_json report = report_json({RunHistory(folder)}, "2026-11-25T05:44:00Z");
        if (report.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).size() > 64 << 20) abort();
    });
    works([&] { write_csv({folder}, folder + "/report.csv"); });
    works([&] { read_state(folder); });
    works([&] { run_options_json(folder); });
    if (std::optional<JobRecord> record = JobRecord::read(folder)) {
        if (is_kept(*record, folder)) abort();  // there is no keeper
    }
    Progress progress(folder);
    progress.update();
    return 0;
}
