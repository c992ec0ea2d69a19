/*
The last checkpoint of a run, where the run directory does not take it. It has the work since the one before,
so it is not given up at once:

    --fallback-dir    it goes there
    the weights       are saved alone, and marked as such, for the program may be killed while it waits
    --disk-wait       it is tried again, until somebody has made room, the time is over, or Ctrl-C
    older ones        are deleted, but not the newest that is whole, nor what --keep-every or --keep 0 keeps

The second and the last are for a full disk or quota. A quota, or a limit on the size of a file, is not waited
for: neither changes by itself. What was saved of the weights goes when there is more.
*/
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/checkpoint_saver.h"         // CheckpointSaver
#include "comm/world.h"                    // World, CommonError
#include "data/checkpoint/folder.h"        // checkpoint_steps, remove_checkpoint
#include "data/checkpoint/verification.h"  // verify_checkpoint
#include "data/base/file.h"                // free_space
#include "data/base/figures.h"
#include "data/base/screen.h"
#include "data/options/options.h"         // Options
#include "data/checkpoint/save_report.h"  // SaveReport
#include "data/base/stop_signals.h"       // waits_for_user

class LastCheckpoint {
public:
    // save() saves the state in the run directory, which takes so many bytes; report() is told of what is
    // saved elsewhere. about: as CheckpointSaver has it.
    LastCheckpoint(ZeroState& state, const World& world, const Options& o, uint64_t bytes,
                   nlohmann::ordered_json about, std::function<SaveReport()> save,
                   std::function<void(const SaveReport&)> report)
        : state_(state),
          world_(world),
          options_(o),
          bytes_(bytes),
          about_(std::move(about)),
          save_(std::move(save)),
          report_(std::move(report)) {}

    // For all ranks, after a save that failed: saves by other means, and returns the checkpoint's folder. If
    // there is no checkpoint in the end, all ranks throw CommonError, which says what there is.
    std::string save(SaveReport failed) {
        if (!options_.fallback_dir.empty()) {
            std::string fallback = shared_run_dir(options_.fallback_dir, options_.run_dir);
            if (is_ours(fallback)) {
                SaveReport report = save_as(fallback, false);
                if (report.error.empty()) return report.folder;
            }
        }
        std::string weights = failed.lack != Lack::none ? save_weights() : "";
        bool limited = failed.lack == Lack::quota || failed.lack == Lack::file_size;
        if (!limited && options_.disk_wait > 0) failed = try_again(failed);
        bool deleting_helps = failed.lack == Lack::disk || failed.lack == Lack::quota;
        if (deleting_helps && make_room()) failed = save_();
        if (failed.error.empty()) return failed.folder;
        if (weights.empty() && failed.lack != Lack::none) weights = save_weights();
        if (weights.empty()) throw CommonError(failed.error);
        throw CommonError(
            text("%s (its weights alone are saved, in %s: sample, eval, export and --init take them, "
                 "but no run can go on from there)",
                 failed.error.c_str(), weights.c_str()));
    }

private:
    static constexpr double longest_pause = 30;  // seconds between two saves that are tried

    SaveReport save_as(const std::string& run_dir, bool weights_alone) {
        CheckpointSaver saver(state_, world_, run_dir, 0, 0, false, weights_alone);
        SaveReport report = *saver.save(about_);
        report_(report);
        return report;
    }

    // For all ranks.
    bool is_ours(const std::string& folder) const {
        std::string error;
        if (world_.is_root()) note_error(error, [&] { check_own_folder(folder); });
        if (!error.empty()) screen.warn(error);
        return world_.largest(!error.empty()) == 0;
    }

    // For all ranks: their folder, or nothing.
    std::string save_weights() {
        SaveReport report = save_as(options_.run_dir, true);
        return report.error.empty() ? report.folder : "";
    }

    // For all ranks: saves as soon as there seems to be room, until that succeeds or the time is over.
    SaveReport try_again(SaveReport failed) {
        double end = seconds_now() + options_.disk_wait, pause = 1, next = 0;
        std::string folder = checkpoints_folder(options_.run_dir);
        auto missing = [&] { return bytes_ - std::min(bytes_, free_space(folder + "/")); };
        std::string remedy = "see to the disk";
        if (failed.lack == Lack::disk) {
            uint64_t bytes = missing();
            remedy = text("free %sB in %s", human((double)(bytes ? bytes : bytes_)).c_str(), folder.c_str());
        }
        if (world_.is_root())
            screen.warn(text(
                "checkpoint after step %lld: %s; trying again for %s, until Ctrl-C%s", (long long)failed.step,
                remedy.c_str(), duration(options_.disk_wait).c_str(),
                failed.lack == Lack::disk && options_.keep > 0 ? "; then older checkpoints make room" : ""));
        waits_for_user = true;
        for (;;) {
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            double now = seconds_now();
            if (world_.largest(!waits_for_user || (world_.is_root() && now > end))) break;
            bool worth_it = world_.is_root() && now > next && (failed.lack != Lack::disk || missing() == 0);
            if (!world_.largest(worth_it)) continue;
            failed = save_();
            if (failed.error.empty()) break;
            next = now + pause;
            pause = std::min(2 * pause, longest_pause);
        }
        waits_for_user = false;
        return failed;
    }

    // For all ranks: deletes older checkpoints, the oldest first, until a new one fits; none if all of them
    // would not be enough. Returns whether there is more room.
    bool make_room() {
        bool deleted = false;
        world_.on_all_ranks([&] {
            if (!world_.is_root()) return;
            std::string error;
            note_error(error, [&] { deleted = delete_spare(); });
            if (!error.empty()) screen.warn(one_line(error));
        });
        return world_.largest(deleted);
    }

    bool delete_spare() const {
        uint64_t room = free_space(checkpoints_folder(options_.run_dir) + "/"), more = 0;
        if (room >= bytes_) room = 0;                     // the disk has room, but a quota or a limit says no
        std::vector<std::pair<int64_t, uint64_t>> spare;  // step and bytes
        for (int64_t step : spare_steps()) {
            spare.emplace_back(step, folder_bytes(step));
            more += spare.back().second;
        }
        if (room + more < bytes_) return false;
        for (auto [step, bytes] : spare) {
            if (room >= bytes_) break;
            room += bytes;
            remove_checkpoint(options_.run_dir, step);
            screen.warn(text("checkpoint after step %lld: deleted to make room", (long long)step));
        }
        return true;
    }

    uint64_t folder_bytes(int64_t step) const {
        uint64_t bytes = 0;
        for (const auto& entry :
             std::filesystem::directory_iterator(checkpoint_folder(options_.run_dir, step)))
            bytes += entry.file_size();
        return bytes;
    }

    // Steps of checkpoints that the run can do without, the oldest first.
    std::vector<int64_t> spare_steps() const {
        std::vector<int64_t> spare;
        if (options_.keep == 0) return spare;  // all are to stay
        bool verified = false;
        for (int64_t step : checkpoint_steps(options_.run_dir)) {
            if (verified && !stays_for_good(step, options_.keep_every)) spare.push_back(step);
            verified = verified || is_whole(step);
        }
        std::reverse(spare.begin(), spare.end());
        return spare;
    }

    bool is_whole(int64_t step) const {
        std::string error;
        note_error(error, [&] {
            verify_checkpoint(CheckpointReader(checkpoint_folder(options_.run_dir, step)),
                              [](const std::string&) {});
        });
        return error.empty();
    }

    ZeroState& state_;
    const World& world_;
    const Options& options_;
    const uint64_t bytes_;
    const nlohmann::ordered_json about_;
    const std::function<SaveReport()> save_;
    const std::function<void(const SaveReport&)> report_;
};
