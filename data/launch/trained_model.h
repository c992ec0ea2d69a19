/*
The result of a run: its weights, the options that shaped them, and the tokenizer of its text.
*/
#pragma once

#include <memory>
#include <string>

#include "data/checkpoint/files.h"
#include "data/checkpoint/folder.h"
#include "data/base/error.h"
#include "data/launch/find_checkpoint.h"
#include "data/options/rules.h"
#include "data/run/run_log.h"
#include "data/tokenizer/tokenizer.h"

struct TrainedModel {
    CheckpointReader reader;
    Options options;
    std::unique_ptr<Tokenizer> tokenizer;

    // Loads the newest checkpoint of a run directory, or the checkpoint in a folder. `tokenizer_name`, unless
    // empty, replaces the run's own tokenizer.
    TrainedModel(const std::string& run, const std::string& tokenizer_name) : reader(newest_checkpoint(run)) {
        StoredRun stored = stored_run(reader);
        options = stored_options(stored.options, stored.checkpoint);
        std::string name = tokenizer_name.empty() ? options.tokenizer : tokenizer_name;
        if (tokenizer_name.empty() && kind_of<TokenizerKind>(name) == TokenizerKind::file) {
            if (stored.tokenizer.empty()) {
                fail("%s: the tokenizer of the run is missing; name it with --tokenizer",
                     tokenizer_path(stored.run_dir.empty() ? run : stored.run_dir).c_str());
            }
            name = stored.tokenizer;
        }
        tokenizer = Tokenizer::load_if_any(name);
        if (!tokenizer) return;
        check_tokenizer(*tokenizer, name, options, stored.checkpoint);
        if (stored.is_published) tokenizer->begin_prompts();
    }

    // An import has seen no samples until a run has trained it.
    bool is_trained_here() const { return reader.index().samples() > 0; }
};
