/*
What a run left: its weights, the options that shaped them, and the tokenizer that its text goes through.
*/
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <unistd.h>

#include "data/error.h"
#include "data/options.h"
#include "data/run_log.h"
#include "data/tokenizer.h"
#include "data/weights_file.h"

struct TrainedModel {
    WeightsReader reader;
    Options options;
    std::unique_ptr<Tokenizer> tokenizer;

    // From a run directory or a weights file. `tokenizer_name` takes the place of the run's own tokenizer.
    TrainedModel(const std::string& run, const std::string& tokenizer_name) : reader(weights_file(run)) {
        if (!reader.header().contains("options"))
            fail("%s: no options in the header; the file is damaged", reader.path().c_str());
        options = stored_options(reader.header()["options"], reader.path());
        std::string name = tokenizer_name.empty() ? options.tokenizer : tokenizer_name;
        if (tokenizer_name.empty() && name != "bytes" && name != "none") {
            std::string folder = std::filesystem::path(reader.path()).parent_path().string();
            name = tokenizer_path(folder.empty() ? "." : folder);
            if (access(name.c_str(), F_OK) != 0) {
                fail("%s: the tokenizer of the run is missing; name it with --tokenizer", name.c_str());
            }
        }
        tokenizer = Tokenizer::load_if_any(name);
        if (tokenizer && tokenizer->vocab_size() > options.vocab_size) {
            fail("--tokenizer %s: has %d tokens, and the model of %s only %d; name the one it was trained "
                 "with",
                 name.c_str(), tokenizer->vocab_size(), reader.path().c_str(), options.vocab_size);
        }
    }

private:
    static std::string weights_file(const std::string& run) {
        std::error_code not_there;  // which the reader reports
        return std::filesystem::is_directory(run, not_there) ? weights_path(run) : run;
    }
};
