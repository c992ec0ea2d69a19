/*
Finds the checkpoint that a run goes on from: the newest that can be used, or the one that is named.
*/
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/checkpoint_files.h"
#include "data/checkpoint_folder.h"
#include "data/error.h"
#include "data/resume.h"
#include "data/run_log.h"

// RUN of RUN/checkpoints/step_N; empty for a checkpoint that lies elsewhere.
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
    run.options = index.about["options"];
    std::string tokenizer = tokenizer_path(run.run_dir);
    if (!run.run_dir.empty() && access(tokenizer.c_str(), F_OK) == 0) run.tokenizer = tokenizer;
    return run;
}

inline std::optional<StoredRun> find_checkpoint(const std::string& place) {
    if (place.ends_with(".partial"))
        fail("%s: an unfinished checkpoint, which the next start removes; name a whole one", place.c_str());
    if (access(index_path(place).c_str(), F_OK) == 0) return stored_run(CheckpointReader(place));
    std::vector<std::string> unusable;
    for (int64_t step : checkpoint_steps(place)) {
        try {
            StoredRun run = stored_run(CheckpointReader(checkpoint_folder(place, step)));
            run.unusable = std::move(unusable);
            return run;
        } catch (const Error& error) {
            unusable.push_back(error.what());
        }
    }
    if (unusable.empty()) return std::nullopt;
    fail("%s: it has %zu checkpoint%s, and none can be used, the newest because of %s", place.c_str(),
         unusable.size(), unusable.size() == 1 ? "" : "s", unusable[0].c_str());
}
