/*
A run directory for a model from elsewhere: the options that describe it, and one checkpoint, so that it can
be sampled from, evaluated, exported and trained like a run of our own. A run that it replaces stays untouched
until all of the new one is on disk; then files are renamed.
*/
#pragma once

#include <cerrno>
#include <cstdio>
#include <functional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "data/checkpoint/builder.h"
#include "data/options/values.h"
#include "data/base/program_version.h"
#include "data/run/run_log.h"
#include "data/tokenizer/tokenizer.h"

class ImportedRun {
public:
    // Returns names and shapes of the tensors of a model.
    using TensorsOf = std::function<std::vector<CheckpointTensor>(const Options&)>;

    // Makes the directory, which may hold a run only with `overwrite`. `published` comes from PublishedFiles.
    ImportedRun(const std::string& run_dir, const Options& options, bool overwrite, int64_t step,
                std::vector<CheckpointTensor> tensors, const nlohmann::ordered_json& published = {})
        : run_dir_(run_dir),
          step_(step),
          json_(model_options_to_json(options)),
          log_(run_dir, overwrite ? RunFolder::replaced : RunFolder::fresh, "--output"),
          checkpoint(run_dir, step, header(published), std::move(tensors)) {}

    // If the program is killed meanwhile, the directory holds either the old run or the new one, never with
    // the tokenizer of the other. Only its tokenizer may be missing; --tokenizer must name it in that case.
    void commit(const Tokenizer* tokenizer = nullptr) {
        const std::string place = tokenizer_path(run_dir_), older = place + ".aside", newer = place + ".new";
        checkpoint.complete();
        if (tokenizer) tokenizer->write(newer);
        bool had_one = rename(place.c_str(), older.c_str()) == 0;
        if (!had_one && errno != ENOENT) fail_with_errno(place, "rename it");
        sync_folder(run_dir_);
        checkpoint.publish();
        log_.begin_as(json_, step_);
        if (tokenizer && rename(newer.c_str(), place.c_str()) != 0) fail_with_errno(place, "write it");
        sync_folder(run_dir_);
        if (had_one) unlink(older.c_str());
    }

private:
    nlohmann::ordered_json header(const nlohmann::ordered_json& published) const {
        nlohmann::ordered_json header = {
            {"program", program_version}, {"step", step_}, {"samples", 0}, {"options", json_}};
        if (!published.empty()) header[published_key] = published;
        return header;
    }

    std::string run_dir_;
    int64_t step_;
    nlohmann::ordered_json json_;
    RunLog log_;

public:
    CheckpointBuilder checkpoint;  // the importer fills it
};
