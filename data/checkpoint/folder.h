/*
Checkpoints of a run: RUN/checkpoints/step_00000100 and so on. A folder with a name of this form is a complete
checkpoint: it is written as step_00000100.partial, and renamed when everything is on disk; it is renamed back
before it is removed. Folders *.partial left by a killed program are removed by the next one. A checkpoint
that is being replaced is step_00000100.aside until the new one is in its place. If a full disk has room only
for the weights of the last step, they are saved as step_00000100.weights.

Checkpoints share data files that did not change between them: a shared file is hard-linked into the folder of
each, and disappears with the last of them. So each folder is self-contained, and can be copied and deleted
independently.
*/
#pragma once

#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <vector>

#include "data/checkpoint/files.h"
#include "data/base/error.h"
#include "data/base/file.h"

inline std::string checkpoints_folder(const std::string& run_dir) {
    return run_dir + "/checkpoints";
}

inline std::string checkpoint_folder(const std::string& run_dir, int64_t step) {
    return checkpoints_folder(run_dir) + "/" + checkpoint_name(step);
}

constexpr const char* weights_ending = ".weights";

// The folder of a run in a folder that several runs share. Its name contains a hash of the run's path: so
// runs do not touch each other's files, and a run finds its own folder from anywhere on the same file system.
inline std::string shared_run_dir(const std::string& shared, const std::string& run_dir) {
    std::filesystem::path run = (std::filesystem::absolute(run_dir) / "").lexically_normal().parent_path();
    std::string path = run.string();
    return text("%s/%s-%08x", shared.c_str(), run.filename().c_str(),
                (unsigned)XXH3_64bits(path.data(), path.size()));
}

// Names of the folders in checkpoints/, or none if it does not exist.
inline std::vector<std::string> checkpoint_folder_names(const std::string& run_dir) {
    std::vector<std::string> names;
    std::string folder = checkpoints_folder(run_dir);
    WorksOn work("listing " + folder);
    std::error_code error;
    std::filesystem::directory_iterator entry(folder, error), end;
    if (error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory) return names;
    for (; !error && entry != end; entry.increment(error)) {
        std::error_code gone;  // an entry that has disappeared meanwhile
        if (entry->is_directory(gone)) names.push_back(entry->path().filename().string());
    }
    if (error) fail_with_code(error, folder, "list it");
    return names;
}

// The steps of complete checkpoints, newest first; with an ending, the steps of folders whose name has this
// ending after the step.
inline std::vector<int64_t> checkpoint_steps(const std::string& run_dir, const std::string& ending = "") {
    std::vector<int64_t> steps;
    for (const std::string& name : checkpoint_folder_names(run_dir)) {
        if (!name.ends_with(ending)) continue;
        int64_t step = step_of_name(name.substr(0, name.size() - ending.size()));
        if (step >= 0) steps.push_back(step);
    }
    std::sort(steps.begin(), steps.end(), std::greater());
    return steps;
}

// Refuses a path without a checkpoint. option: the option that names it, such as "--init ".
[[noreturn]] inline void fail_without_checkpoint(const std::string& path, const std::string& option = "") {
    const std::string place = printable(path), thing = option + place;
    if (access((path + "/config.json").c_str(), F_OK) == 0)
        fail("%s: a Hugging Face model; import it first: train_gpt import '%s' --output runs/imported",
             thing.c_str(), place.c_str());
    fail("%s: no checkpoint there; name a run directory that has one, or a checkpoint folder", thing.c_str());
}

// Returns the newest checkpoint of a run directory. If the path is the folder of a checkpoint, returns that
// path.
inline std::string newest_checkpoint(const std::string& path) {
    if (access(index_path(path).c_str(), F_OK) == 0) return path;
    std::vector<int64_t> steps = checkpoint_steps(path);
    if (steps.empty()) fail_without_checkpoint(path);
    return checkpoint_folder(path, steps[0]);
}

// ----------------------------------------------------------------------------
// changes that are durable when they return

inline void rename_folder(const std::string& from, const std::string& to) {
    if (rename_file(from, to) != 0) fail_with_errno(from, "rename it");
    sync_folder(std::filesystem::path(to).parent_path().string());
}

// Removes a folder and its content; it need not exist.
inline void remove_folder(const std::string& folder) {
    WorksOn work("removing " + folder);
    std::error_code error;
    std::filesystem::remove_all(folder, error);
    if (error) fail_with_code(error, folder, "remove it");
}

// Hard-links a file, or copies it if it cannot be linked, for example to another file system.
inline void share_file(const std::string& from, const std::string& to) {
    WorksOn work("sharing " + from);
    if (link(from.c_str(), to.c_str()) == 0) return;
    bool can_copy =
        errno == EXDEV || errno == EPERM || errno == EMLINK || errno == EOPNOTSUPP || errno == ENOSYS;
    if (!can_copy) fail_with_errno(from, "link it");
    // not by std::filesystem, which reports a full disk as an I/O error
    struct stat status;
    FileHandle source = open_regular(from, &status), copy = open_to_write(to, O_WRONLY | O_CREAT | O_EXCL);
    if (!copy) fail_with_errno(to, "create it");
    std::vector<char> piece(1 << 20);
    for (uint64_t at = 0, n, size = (uint64_t)status.st_size; at < size; at += n) {
        n = std::min<uint64_t>(size - at, piece.size());
        if (!read_at(source, from, at, piece.data(), n))
            fail("%s: was truncated while it was copied; use another checkpoint", from.c_str());
        write_at(copy, to, at, piece.data(), n);
    }
    sync_file(copy, to);
}

inline void remove_checkpoint(const std::string& run_dir, int64_t step) {
    std::string folder = checkpoint_folder(run_dir, step), partial = folder + ".partial";
    remove_folder(partial);
    rename_folder(folder, partial);
    remove_folder(partial);
}

// Removes weights-only saves of steps up to this one, which a checkpoint now supersedes.
inline void remove_weights(const std::string& run_dir, int64_t step) {
    for (int64_t other : checkpoint_steps(run_dir, weights_ending)) {
        if (other <= step) remove_folder(checkpoint_folder(run_dir, other) + weights_ending);
    }
}

// Removes folders that killed runs left unfinished.
inline void remove_unfinished(const std::string& run_dir) {
    for (const std::string& name : checkpoint_folder_names(run_dir)) {
        if (name.starts_with("step_") && name.ends_with(".partial"))
            remove_folder(checkpoints_folder(run_dir) + "/" + name);
    }
}

// Renames checkpoints of later steps to step_N.aside, because a run that resumes from this step would mistake
// them for its own. Returns their steps.
inline std::vector<int64_t> set_aside_newer(const std::string& run_dir, int64_t step) {
    std::vector<int64_t> newer = checkpoint_steps(run_dir);
    std::erase_if(newer, [&](int64_t other) { return other <= step; });
    for (int64_t other : newer) {
        std::string folder = checkpoint_folder(run_dir, other);
        remove_folder(folder + ".aside");
        rename_folder(folder, folder + ".aside");
    }
    return newer;
}

// ----------------------------------------------------------------------------
// a new checkpoint

// Used by one process. The others write their data files into folder() between its construction and commit().
class NewCheckpoint {
public:
    // Creates the folder, after removing what an interrupted save left there. `path`: the folder of the
    // complete checkpoint
    NewCheckpoint(const std::string& run_dir, const std::string& path)
        : run_dir_(run_dir), final_(path), partial_(final_ + ".partial") {
        WorksOn work("making " + partial_);
        std::error_code error;
        std::filesystem::create_directories(checkpoints_folder(run_dir), error);
        if (error) fail_with_code(error, checkpoints_folder(run_dir), "make it");
        check_folder_of_run(checkpoints_folder(run_dir));
        remove_folder(partial_);
        work.progress();
        if (mkdir(partial_.c_str(), 0777) != 0) fail_with_errno(partial_, "make it");
    }
    NewCheckpoint(const NewCheckpoint&) = delete;
    NewCheckpoint& operator=(const NewCheckpoint&) = delete;
    ~NewCheckpoint() {
        WorksOn work("removing " + partial_);
        std::error_code ignored;
        if (!committed_) std::filesystem::remove_all(partial_, ignored);
    }

    const std::string& folder() const { return partial_; }

    // Publishes the checkpoint under its name, durably. Every data file must be on disk.
    void commit(const CheckpointIndex& index) {
        complete(index);
        publish();
    }

    // The first half of commit(), which can run out of space; the second half only renames.
    void complete(const CheckpointIndex& index) {
        for (size_t number = 0; number < index.file_bytes.size(); number++)
            check_data_file(number, index.file_bytes[number]);
        write_whole(index_path(partial_), checkpoint_index_bytes(index));  // syncs data file names too
        sync_folder(run_dir_);                                             // checkpoints/ may be new
    }

    // Sets aside an older checkpoint of this step, and restores it if the new one cannot take its place.
    void publish() {
        const std::string aside = final_ + ".aside";
        bool replaces = access(final_.c_str(), F_OK) == 0;
        if (replaces) {
            remove_folder(aside);
            if (rename_file(final_, aside) != 0) fail_with_errno(final_, "rename it");
        }
        if (rename_file(partial_, final_) != 0) {
            int reason = errno;
            if (replaces) rename_file(aside, final_);
            errno = reason;
            fail_with_errno(partial_, "rename it");
        }
        committed_ = true;
        sync_folder(checkpoints_folder(run_dir_));
        WorksOn work("removing " + aside);
        std::error_code ignored;  // the new checkpoint is in place
        if (replaces) std::filesystem::remove_all(aside, ignored);
    }

private:
    void check_data_file(size_t number, uint64_t bytes) const {
        std::string path = partial_ + "/" + data_file_name((int)number);
        WorksOn work("checking " + path);
        struct stat status;
        bool there = stat(path.c_str(), &status) == 0;
        if (!there && errno != ENOENT) fail_with_errno(path, "stat it");
        if (!there || (uint64_t)status.st_size != bytes) {
            fail("%s: another process wrote it, but it is not visible here; use a run directory on a file "
                 "system that all machines share",
                 path.c_str());
        }
    }

    std::string run_dir_, final_, partial_;
    bool committed_ = false;
};
