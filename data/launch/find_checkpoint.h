/*
Finds the checkpoint that a run resumes from: the newest usable one, or the one that is named.
*/
#pragma once

#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/checkpoint/files.h"
#include "data/checkpoint/folder.h"
#include "data/checkpoint/verification.h"
#include "data/base/error.h"
#include "data/base/figures.h"  // counted
#include "data/launch/resume.h"
#include "data/run/run_log.h"

// Returns RUN of RUN/checkpoints/step_N; empty for a checkpoint elsewhere.
inline std::string run_of_checkpoint(const std::string& folder) {
    using std::filesystem::path;
    for (path place : {path(folder), std::filesystem::current_path() / folder}) {
        place = (place / "").lexically_normal().parent_path();
        if (place.parent_path().filename() != "checkpoints") continue;
        path run = place.parent_path().parent_path();
        return run.empty() ? "." : run.string();
    }
    return "";
}

inline StoredRun stored_run(const CheckpointReader& reader) {
    const std::string& folder = reader.folder();
    const CheckpointIndex& index = reader.index();
    if (!index.about.contains("options")) {
        fail("%s: no options in the header; use the program that wrote the checkpoint",
             index_path(folder).c_str());
    }
    StoredRun run;
    run.checkpoint = folder;
    run.run_dir = run_of_checkpoint(folder);
    run.step = index.step();
    run.is_published = index.about.contains(published_key);
    run.options = index.about["options"];
    std::string tokenizer = tokenizer_path(run.run_dir);
    if (!run.run_dir.empty() && access(tokenizer.c_str(), F_OK) == 0) run.tokenizer = tokenizer;
    return run;
}

// A program that is killed after it has written all of a checkpoint, but before it renames it, leaves
// step_N.partial. If that is newer than all checkpoints, and complete according to its checksums, it is
// renamed here. Returns a note about this, or an empty string.
inline std::string complete_unfinished(const std::string& run_dir) {
    std::vector<int64_t> steps = checkpoint_steps(run_dir);
    int64_t newest = steps.empty() ? -1 : steps[0];
    std::string found;
    for (int64_t step : checkpoint_steps(run_dir, ".partial")) {
        std::string folder = checkpoint_folder(run_dir, step) + ".partial";
        if (step <= newest || access(index_path(folder).c_str(), F_OK) != 0) continue;
        newest = step;
        found = folder;
    }
    if (found.empty()) return "";
    // The program that saves it may still be running. If there is no log, there is no such program.
    FileHandle log(open(log_path(run_dir).c_str(), O_WRONLY | O_CLOEXEC));
    if (!log && errno != ENOENT) return "";
    if (log && !try_lock(log)) return "";
    try {
        CheckpointReader reader(found);
        if (reader.index().step() != newest) return "";
        verify_checkpoint(reader, [](const std::string&) {});
        rename_folder(found, checkpoint_folder(run_dir, newest));
    } catch (const Error& error) {
        return std::string("passed over: ") + error.what();
    }
    return found + ": complete except for its name; renamed to " + checkpoint_folder(run_dir, newest);
}

// Returns the checkpoint in a folder, after checking that all of its files are there.
inline StoredRun checkpoint_at(const std::string& folder) {
    std::string index = read_checkpoint_index(folder);
    CheckpointReader reader(folder, index);
    reader.check_sizes();
    StoredRun run = stored_run(reader);
    run.index = std::move(index);
    return run;
}

// Returns the run's folder in the --fallback-dir that a run's record names; empty: there is none.
inline std::string recorded_fallback(const std::string& run_dir) {
    if (access(options_path(run_dir).c_str(), F_OK) != 0) return "";
    const nlohmann::json record = run_options_json(run_dir);
    auto folder = record.is_object() ? record.find("fallback_dir") : record.end();
    std::string shared = folder != record.end() && folder->is_string() ? folder->get<std::string>() : "";
    return shared.empty() ? "" : shared_run_dir(shared, run_dir);
}

// place: a checkpoint, a run directory, or the options.json of a run. That file means the run's folder in the
// --fallback-dir that it names: all ranks agree on places, but only the one that looks there reads the file.
inline std::optional<StoredRun> find_checkpoint(const std::string& place) {
    if (std::filesystem::path record = place; record.filename() == "options.json") {
        std::string fallback = recorded_fallback(record.parent_path());
        if (fallback.empty()) return std::nullopt;
        check_own_folder(fallback);
        return find_checkpoint(fallback);
    }
    if (place.ends_with(".partial")) {
        fail("%s: may be incomplete; name its run directory, and --resume uses this checkpoint if it is "
             "complete",
             place.c_str());
    }
    if (access(index_path(place).c_str(), F_OK) == 0) return checkpoint_at(place);
    std::vector<std::string> notes, unusable;
    if (std::string completed = complete_unfinished(place); !completed.empty()) notes.push_back(completed);
    std::vector<std::string> folders;
    for (int64_t step : checkpoint_steps(place)) folders.push_back(checkpoint_folder(place, step));
    for (auto folder = folders.begin(); folder != folders.end(); ++folder) {
        try {
            StoredRun run = checkpoint_at(*folder);
            run.notes = std::move(notes);
            run.older.assign(folder + 1, folders.end());
            return run;
        } catch (const Error& error) {
            unusable.push_back(error.what());
            notes.push_back("passed over: " + unusable.back());
        }
    }
    if (unusable.empty()) return std::nullopt;
    fail("%s: has %s, but none can be used; the newest: %s", place.c_str(),
         counted(unusable.size(), "checkpoint").c_str(), unusable[0].c_str());
}
