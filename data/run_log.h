/*
The run directory: options.json says how the run was started, log.jsonl tells how it went, one JSON object
to a line, and weights.bin is what came of it. A line is on its way to disk before the next step begins, so
that a killed run leaves a whole log. The log stays locked for as long as the run lasts.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <filesystem>
#include <string>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/error.h"
#include "data/file.h"

inline std::string weights_path(const std::string& run_dir) {
    return run_dir + "/weights.bin";
}

// A copy, whatever kind of file the tokenizer came from.
inline std::string tokenizer_path(const std::string& run_dir) {
    return run_dir + "/tokenizer.json";
}

class RunLog {
public:
    // Makes the directory. One that holds a run already (a line of log, or weights) is refused, or with
    // `overwrite` cleared of it; what a run left that failed before its first step is not in the way.
    RunLog(const std::string& directory, const nlohmann::ordered_json& options, bool overwrite)
        : path_(directory + "/log.jsonl") {
        std::error_code error;
        std::filesystem::create_directories(directory, error);
        if (error) {
            fail("%s: cannot make the run directory: %s; check the path or name another with --run-dir",
                 directory.c_str(), error.message().c_str());
        }
        std::string weights = weights_path(directory);
        struct stat log;
        bool holds_run =
            (stat(path_.c_str(), &log) == 0 && log.st_size > 0) || access(weights.c_str(), F_OK) == 0;
        if (holds_run && !overwrite) {
            fail("%s: already holds a run; name another directory with --run-dir, or replace it with "
                 "--overwrite",
                 directory.c_str());
        }
        file_ = FileHandle(open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
        if (!file_) fail_with_errno(path_, "create it");
        if (flock(file_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
            fail("%s: another process is training there; wait for its end or name another directory with "
                 "--run-dir",
                 directory.c_str());
        }
        if (ftruncate(file_.get(), 0) != 0) fail_with_errno(path_, "empty it");
        if (unlink(weights.c_str()) != 0 && errno != ENOENT) fail_with_errno(weights, "remove it");

        NewFile record(directory + "/options.json");
        std::string line_text = options.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
        record.write(line_text.data(), line_text.size());
        record.commit();
    }

    void write(const nlohmann::ordered_json& line) {
        std::string line_text = line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
        for (size_t done = 0; done < line_text.size();) {
            ssize_t written = ::write(file_.get(), line_text.data() + done, line_text.size() - done);
            if (written < 0 && errno == EINTR) continue;
            if (written < 0) fail_with_errno(path_, "write it");
            done += (size_t)written;
        }
    }

private:
    std::string path_;
    FileHandle file_;
};
