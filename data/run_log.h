/*
The run directory: options.json says how the run was started, and log.jsonl tells how it went, one JSON object
to a line. A line is on its way to disk before the next step begins, so that a killed run leaves a whole log.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <filesystem>
#include <string>
#include <unistd.h>

#include "data/error.h"
#include "data/file.h"

class RunLog {
public:
    // Makes the directory. One that holds a run already is refused, or with `overwrite` cleared of its
    // record.
    RunLog(const std::string& directory, const nlohmann::ordered_json& options, bool overwrite)
        : directory_(directory), path_(directory + "/log.jsonl") {
        std::error_code error;
        std::filesystem::create_directories(directory, error);
        if (error) {
            fail("%s: cannot make the run directory: %s; check the path or name another with --run-dir",
                 directory.c_str(), error.message().c_str());
        }
        int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (overwrite ? O_TRUNC : O_EXCL);
        file_ = FileHandle(open(path_.c_str(), flags, 0666));
        if (!file_ && errno == EEXIST) {
            fail("%s: already holds a run; name another directory with --run-dir, or replace it with "
                 "--overwrite",
                 directory.c_str());
        }
        if (!file_) fail_with_errno(path_, "create it");

        NewFile record(file("options.json"));
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

    // A path in the run directory.
    std::string file(const std::string& name) const { return directory_ + "/" + name; }

private:
    std::string directory_, path_;
    FileHandle file_;
};
