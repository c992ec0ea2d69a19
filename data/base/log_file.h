/*
A file of JSON lines that a run appends to. A disk that is full or unavailable for a while must not end the
run: lines that cannot be written wait in memory, and are written when that is possible again.
*/
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <deque>
#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "data/base/error.h"
#include "data/base/file.h"
#include "data/base/json.h"

class LogFile {
public:
    static constexpr size_t most_waiting = 10000;  // lines; the oldest are dropped first

    // Opens the file, or creates an empty one.
    explicit LogFile(std::string path) : path_(std::move(path)) {
        file_ = open_to_write(path_, O_WRONLY | O_CREAT | O_APPEND);
        if (!file_) fail_with_errno(path_, "create it");
    }

    const std::string& path() const { return path_; }

    // Locks the file for the lifetime of this object. Returns false if another process has locked it.
    bool lock() { return try_lock(file_); }

    // Adds a line, which must have a "step". Returns a message when lines start to wait in memory, or can be
    // written again; otherwise an empty string.
    std::string add(nlohmann::ordered_json line) {
        waiting_.push_back(std::move(line));
        if (waiting_.size() > most_waiting) {
            dropped_++;
            dropped_until_ = waiting_.front().at("step");
            waiting_.pop_front();
        }
        return attempt([&] { write_waiting(); });
    }

    // Writes the waiting lines, and returns once everything written is on disk. Returns a message as add()
    // does.
    std::string sync() {
        return attempt([&] {
            write_waiting();
            sync_file(file_, path_);
        });
    }

    // The number of lines that are only in memory or were dropped from it.
    size_t waiting() const { return waiting_.size() + dropped_; }

    // Appends whole lines, all of them or none. Throws on errors.
    void append(const std::string& lines) {
        WorksOn work("writing " + path_);
        struct stat status;
        if (fstat(file_.get(), &status) != 0) fail_with_errno(path_, "stat it");
        for (size_t done = 0; done < lines.size();) {
            ssize_t written = write(file_.get(), lines.data() + done, lines.size() - done);
            if (written < 0 && errno == EINTR) continue;
            if (written < 0) {
                int reason = errno;
                // only if we wrote some: this may also remove lines of another program, such as eval --log
                [[maybe_unused]] int failed = done > 0 ? ftruncate(file_.get(), status.st_size) : 0;
                errno = reason;
                fail_with_errno(path_, "write it");
            }
            done += (size_t)written;
        }
    }

    void truncate_to(uint64_t bytes) {
        if (ftruncate(file_.get(), (off_t)bytes) != 0) fail_with_errno(path_, "truncate it");
    }

private:
    void write_waiting() {
        if (dropped_ > 0) append(json_line({{"step", dropped_until_}, {"dropped_lines", dropped_}}));
        dropped_ = 0;
        for (; !waiting_.empty(); waiting_.pop_front()) append(json_line(waiting_.front()));
    }

    template <typename Work>
    std::string attempt(Work&& work) {
        std::string error;
        note_error(error, work);
        bool was_failing = std::exchange(failing_, !error.empty());
        if (failing_ == was_failing) return "";
        if (!failing_) return path_ + ": can be written again; all pending lines are now in it";
        return text("%s (the run continues: up to %zu log lines are kept in memory)", error.c_str(),
                    most_waiting);
    }

    const std::string path_;
    FileHandle file_;
    std::deque<nlohmann::ordered_json> waiting_;
    int64_t dropped_until_ = 0;  // step of the newest line that was dropped
    size_t dropped_ = 0;         // dropped lines that the file does not report yet
    bool failing_ = false;
};
