/*
The checkpoints of a run: the one it resumes from, and those it saves while training.
*/
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/checkpoint_loader.h"  // load_checkpoint
#include "comm/checkpoint_saver.h"   // CheckpointSaver
#include "comm/save_clock.h"         // SaveClock
#include "comm/world.h"              // World, CommonError
#include "data/base/error.h"
#include "data/base/figures.h"
#include "data/base/file.h"             // free_space
#include "data/base/program_version.h"  // program_version
#include "data/base/screen.h"
#include "data/base/stop_signals.h"        // waits_for_user
#include "data/checkpoint/folder.h"        // checkpoint_steps, remove_checkpoint
#include "data/checkpoint/retention.h"     // Retention, BestCheckpoints
#include "data/checkpoint/save_report.h"   // SaveReport
#include "data/checkpoint/verification.h"  // verify_checkpoint
#include "data/launch/find_checkpoint.h"   // find_checkpoint, StoredRun
#include "data/options/named_lists.h"      // named_lists
#include "data/options/options.h"          // Options
#include "data/options/values.h"           // options_to_json
#include "data/run/spike_rule.h"           // SpikeHistory
#include "data/tokenizer/tokenizer.h"      // Tokenizer
#include "data/tokens/blend.h"             // parse_blend
#include "data/tokens/token_shards.h"      // files_named

// ----------------------------------------------------------------------------
// the last checkpoint of a run
//
// Saves the last checkpoint of a run when it cannot be saved in the run directory. Without it, the work since
// the previous checkpoint would be lost, so several ways are tried in turn:
//
//     --fallback-dir    the checkpoint is saved there
//     weights           are saved separately and marked as such, because the program may be killed while it
//                       waits for room
//     --disk-wait       saving is retried until there is room, the time runs out, or Ctrl-C is pressed
//     older checkpoints are deleted, except the newest complete one and those that --keep-every and
//                       --keep-best keep
//
// Weights are saved separately if room is lacking (disk, quota, file size), and removed once a complete
// checkpoint of the step exists. Older checkpoints are deleted only if a disk or a quota is full. There is no
// waiting for a quota or a limit on file sizes, because neither changes by itself.

inline Retention retention_of(const Options& o) {
    return {.newest = o.keep, .every = o.keep_every};
}

class LastCheckpoint {
public:
    // save() saves the state, of `bytes` bytes, in the run directory; report() receives the reports of all
    // other saves. about: see CheckpointSaver.
    LastCheckpoint(const Contributors& parts, const World& world, const Options& o, uint64_t bytes,
                   nlohmann::ordered_json about, std::function<SaveReport()> save,
                   std::function<void(const SaveReport&)> report)
        : parts_(parts),
          world_(world),
          options_(o),
          bytes_(bytes),
          about_(std::move(about)),
          save_(std::move(save)),
          report_(std::move(report)) {}

    // For all ranks, after a failed save: saves by other means, and returns the checkpoint's folder. If no
    // checkpoint can be saved, all ranks throw CommonError, which says what was saved.
    std::string save(SaveReport failed) {
        Phase phase("save");
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
        bool is_short = world_.largest(world_.is_root() && is_short_of_room(failed)),
             deleting_helps = failed.lack == Lack::quota || is_short;
        if (deleting_helps && make_room(failed.lack)) failed = save_again();
        if (failed.error.empty()) return failed.folder;
        if (weights.empty() && failed.lack != Lack::none) weights = save_weights();
        if (weights.empty()) throw CommonError(failed.error);
        throw CommonError(text("%s (only its weights are saved, in %s: sample, eval, export and --init can "
                               "use them, but no run can resume from them)",
                               failed.error.c_str(), weights.c_str()));
    }

private:
    static constexpr double longest_pause = 30;  // seconds between two attempts

    SaveReport save_as(const std::string& run_dir, bool weights_alone) {
        CheckpointSaver saver(parts_, world_, run_dir, {}, false, weights_alone);
        saver.save(about_);
        SaveReport report = saver.finish();
        report_(report);
        return report;
    }

    // For all ranks: returns whether the folder belongs to this user or does not exist; warns otherwise.
    bool is_ours(const std::string& folder) const {
        std::string error;
        if (world_.is_root()) note_error(error, [&] { check_own_folder(folder); });
        if (!error.empty()) screen.warn(error);
        return world_.largest(!error.empty()) == 0;
    }

    // For all ranks: saves only the weights. Returns their folder; empty if that fails.
    std::string save_weights() {
        SaveReport report = save_as(options_.run_dir, true);
        return report.error.empty() ? report.folder : "";
    }

    // For all ranks: retries the save whenever there seems to be room, until it succeeds, the time runs out,
    // or Ctrl-C is pressed.
    SaveReport try_again(SaveReport failed) {
        double end = seconds_now() + options_.disk_wait, pause = 1, next = 0;
        const bool is_short = is_short_of_room(failed);
        std::string remedy = "check the disk";
        if (is_short)
            remedy = text("free %sB in %s", human((double)missing()).c_str(),
                          checkpoints_folder(options_.run_dir).c_str());
        if (world_.is_root())
            screen.warn(text("checkpoint after step %lld: %s; retrying for %s, or until Ctrl-C%s",
                             (long long)failed.step, remedy.c_str(), duration(options_.disk_wait).c_str(),
                             is_short && options_.keep > 0 ? "; then older ones are deleted" : ""));
        waits_for_user = true;
        for (;;) {
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            double now = seconds_now();
            if (world_.largest(!waits_for_user || (world_.is_root() && now > end))) break;
            bool worth_it = world_.is_root() && now > next && !is_short_of_room(failed);
            if (!world_.largest(worth_it)) continue;
            failed = save_again();
            if (failed.error.empty()) break;
            next = now + pause;
            pause = std::min(2 * pause, longest_pause);
        }
        waits_for_user = false;
        return failed;
    }

    SaveReport save_again() {
        SaveReport report = save_();
        bytes_ = report.bytes;
        return report;
    }

    // Returns the bytes that the checkpoints' disk lacks for a new one.
    uint64_t missing() const {
        return bytes_ - std::min(bytes_, free_space(checkpoints_folder(options_.run_dir) + "/"));
    }
    // Returns whether that is why a save failed: another disk may be full, such as that of tables.
    bool is_short_of_room(const SaveReport& failed) const {
        return failed.lack == Lack::disk && missing() > 0;
    }

    // For all ranks: deletes older checkpoints, the oldest first, until a new one fits; deletes none if all
    // of them together would not free enough. Returns whether this succeeded.
    bool make_room(Lack lack) {
        bool deleted = false;
        world_.on_all_ranks([&] {
            if (!world_.is_root()) return;
            std::string error;
            note_error(error, [&] { deleted = delete_spare(lack); });
            if (!error.empty()) screen.warn(one_line(error));
        });
        return world_.largest(deleted);
    }

    bool delete_spare(Lack lack) const {
        uint64_t room = lack == Lack::quota ? 0 : bytes_ - missing(), more = 0;
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

    // Returns the bytes that deleting a checkpoint frees: files that it shares with others stay.
    uint64_t folder_bytes(int64_t step) const {
        uint64_t bytes = 0;
        for (const auto& entry :
             std::filesystem::directory_iterator(checkpoint_folder(options_.run_dir, step)))
            bytes += entry.hard_link_count() == 1 ? entry.file_size() : 0;
        return bytes;
    }

    // Returns the steps of checkpoints that the run can do without, the oldest first.
    std::vector<int64_t> spare_steps() const {
        std::vector<int64_t> spare;
        if (options_.keep == 0) return spare;  // all are kept
        bool verified = false;
        Retention retention = retention_of(options_);
        BestCheckpoints best = best_checkpoints(about_, "the last checkpoint");
        for (int64_t step : checkpoint_steps(options_.run_dir)) {
            if (verified && !retention.stays(step) && !best.has(step)) spare.push_back(step);
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

    const Contributors& parts_;
    const World& world_;
    const Options& options_;
    uint64_t bytes_;  // size of the checkpoint to be saved
    const nlohmann::ordered_json about_;
    const std::function<SaveReport()> save_;
    const std::function<void(const SaveReport&)> report_;
};

// ----------------------------------------------------------------------------
// the start of a run
//
// If each rank looked for a checkpoint, they might see different ones, because file systems are slow to show
// files that other machines have written; and thousands of ranks that look at every file would overload the
// file system. So the first rank looks, and informs the others.

// StoredRun::index stays on the rank that read it: it is large, and only one of the checkpoints is loaded.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StoredRun, checkpoint, run_dir, tokenizer, step, is_published, options,
                                   notes, gone, older)

// Returns the options of a checkpoint that name missing files, for example after a run was moved.
inline std::vector<std::string> gone_files(const StoredRun& run) {
    std::vector<std::string> gone;
    auto look = [&](const char* option, auto&& find) {
        auto value = run.options.find(find_option(option, command_train)->field);
        if (value == run.options.end() || !value->is_string()) return;
        std::string error;
        note_error(error, [&] { find(value->template get<std::string>()); });
        if (!error.empty()) gone.push_back(option);
    };
    auto find_tokens = [](const std::string& list) {
        if (list.empty()) return;
        for (const BlendSource& source : parse_blend(list)) files_named(source.files);
    };
    look("--train-data", find_tokens);
    look("--val-data", [&](const std::string& lists) {
        for (const NamedList& one : named_lists("--val-data", lists)) find_tokens(one.list);
    });
    look("--choices", [](const std::string& path) {
        if (!path.empty()) MappedFile file(path);
    });
    if (run.tokenizer.empty())
        look("--tokenizer", [](const std::string& name) { Tokenizer::load_if_any(name); });
    return gone;
}

// For all ranks, with the same places: the first rank looks at them. The returned function replays its
// answers without communication.
inline FindCheckpoint find_on_root(const World& world, const std::vector<std::string>& places,
                                   const FindCheckpoint& find = find_checkpoint) {
    std::string message;
    std::map<std::string, std::string> indexes;
    if (world.is_root()) {
        nlohmann::json answers = nlohmann::json::array();
        for (const std::string& place : places) {
            try {
                std::optional<StoredRun> found = find(place);
                if (found) found->gone = gone_files(*found);
                answers.push_back(found ? nlohmann::json(*found) : nullptr);
                if (found) indexes[place] = std::move(found->index);
            } catch (const std::exception& error) {
                answers.push_back({{"error", message_of(error)}});
            }
        }
        // CBOR, because paths may not be valid UTF-8, which JSON text requires.
        nlohmann::json::to_cbor(answers, message);
    }
    nlohmann::json answers = nlohmann::json::from_cbor(world.broadcast_text(message));
    std::map<std::string, nlohmann::json> by_place;
    for (size_t i = 0; i < answers.size(); i++) by_place.emplace(places[i], answers[i]);
    return [by_place, indexes](const std::string& place) -> std::optional<StoredRun> {
        const nlohmann::json& answer = by_place.at(place);
        if (answer.is_null()) return std::nullopt;
        if (answer.contains("error")) fail("%s", answer["error"].get<std::string>().c_str());
        StoredRun run = answer;
        if (auto index = indexes.find(place); index != indexes.end()) run.index = index->second;
        return run;
    };
}

// ----------------------------------------------------------------------------
// the run and its checkpoints

// How far a run has come.
struct RunPosition {
    int step = 0;          // steps done
    uint64_t samples = 0;  // taken from the data in the order of the run, including those passed over
    SpikeHistory spikes = {};
    BestCheckpoints best = {};
};

class RunCheckpoints {
public:
    using Report = std::function<void(const SaveReport&)>;

    // parts: everything to save. before_save() is called on all ranks before each save, and report() after
    // it, with the save's report.
    RunCheckpoints(Contributors parts, bool in_background, const Options& o, const World& world,
                   std::function<void()> before_save, Report report)
        : parts_(std::move(parts)),
          options_(o),
          world_(world),
          before_save_(std::move(before_save)),
          report_(std::move(report)),
          clock_(o, world.size()),
          in_background_(in_background),
          saver_(parts_, world, o.run_dir, retention_of(o), in_background) {}

    const Contributors& parts() const { return parts_; }

    // For all ranks: loads this checkpoint or, if it is not whole, the newest whole one before it.
    RunPosition resume(const StoredRun& origin) {
        std::vector<std::string> folders = origin.older;
        folders.insert(folders.begin(), origin.checkpoint);
        auto run_of = [&](const std::string& folder) {
            return folder == origin.checkpoint ? origin : older_run(folder);
        };
        RunPosition position = load_newest("--resume " + printable(options_.resume), folders, run_of);
        origin_ = {loaded_, position.step};
        print("resume       %s: resumes after step %d\n", loaded_.c_str(), position.step);
        return position;
    }

    // For all ranks, during a run: loads its newest whole checkpoint up to this step. Empty if there is none.
    std::optional<RunPosition> go_back(int step) {
        finish();
        std::string steps = text_from_root(world_, [&] {
            nlohmann::json list = checkpoint_steps(options_.run_dir);
            return list.dump();
        });
        std::vector<std::string> folders;
        for (int64_t saved : nlohmann::json::parse(steps).get<std::vector<int64_t>>()) {
            if (saved <= step) folders.push_back(checkpoint_folder(options_.run_dir, saved));
        }
        // The checkpoint that the run started from may lie elsewhere.
        bool counts = !origin_.first.empty() && origin_.second <= step;
        if (folders.empty() && counts) folders.push_back(origin_.first);
        if (folders.empty()) return std::nullopt;
        return load_newest("going back", folders,
                           [&](const std::string& folder) { return older_run(folder); });
    }

    // For all ranks: loads only the weights.
    void take_weights(const StoredRun& origin) {
        load(origin, true);
        print("weights      from %s\n", origin.checkpoint.c_str());
    }

    // Returns whether to save the state after this step. The first rank decides for all; others return false.
    bool due(int step) const { return world_.is_root() && clock_.due(step); }

    // Describes, during this step, when the next save is due.
    std::string next(int step) const { return clock_.next(step, options_.steps); }

    // For all ranks: saves, or starts a save in the background.
    void save(const RunPosition& position) {
        finish();  // ends the save before; if that failed, `position` has lost its best checkpoints
        Phase phase("save");
        clock_.restart();
        double start = seconds_now();
        before_save_();
        before_seconds_ = seconds_now() - start;
        saving_ = position.best;
        saver_.save(header(position));
        if (!in_background_) finish();
    }

    bool is_on_disk(int step) const { return on_disk_ == step; }
    // The best checkpoints, as of the last checkpoint on disk.
    const BestCheckpoints& best() const { return best_; }
    uint64_t bytes() const { return saver_.bytes(); }  // size of one checkpoint

    // On the first rank, with `steps_left` steps to go: returns a warning if the disk has no room for all
    // checkpoints that will exist at the same time; otherwise empty.
    std::string space_note(int steps_left) const {
        auto there = (int64_t)checkpoint_steps(options_.run_dir).size();
        int64_t most = most_checkpoints(options_, steps_left);
        uint64_t room = free_space(checkpoints_folder(options_.run_dir) + "/");
        int64_t fit = there + (int64_t)std::min<uint64_t>(room / bytes(), INT32_MAX);
        if (most <= fit) return "";
        std::string remedy = "free some space or name another --run-dir";
        if (fit > 1)
            remedy += text(", or give --keep %lld%s", (long long)fit - 1,
                           options_.keep_every ? " without --keep-every" : "");
        return text(
            "each checkpoint takes %sB, and up to %lld are on disk at a time, but there is room for %lld; %s",
            human((double)bytes()).c_str(), (long long)most, (long long)fit, remedy.c_str());
    }

    bool under_way() const { return saver_.under_way(); }  // a save, which the next one waits for

    // Returns whether a save has ended on this rank but has not yet been reported by finish().
    bool is_ready() const { return saver_.under_way() && saver_.is_ready(); }

    // For all ranks: waits for the save under way, if there is one, and reports its outcome.
    void finish() {
        if (saver_.under_way()) tell(saver_.finish());
    }

    // For all ranks: ensures that this position, the last one, is on disk, and returns the checkpoint's
    // folder. Throws CommonError if it cannot be saved.
    std::string finish_at(const RunPosition& position) {
        finish();
        ending_ = true;
        auto save_now = [&] {
            save(position);
            finish();
            return last_;
        };
        if (on_disk_ != position.step) save_now();
        if (on_disk_ == position.step) return checkpoint_folder(options_.run_dir, position.step);
        LastCheckpoint last(parts_, world_, options_, bytes(), header(position), save_now, report_);
        return last.save(last_);
    }

    // Marks the state as untrustworthy: from now on, rescue_from_errors() does not save it.
    void forbid_saving() { is_trusted_ = false; }

    // For all ranks: calls work(), which trains and advances `position`. If an error ends it after at least
    // one step, saves what it can of the run, and throws an error that also says what was saved.
    template <typename Work>
    void rescue_from_errors(const RunPosition& position, Work&& work) {
        int first_step = position.step;
        try {
            work();
        } catch (const std::exception& error) {
            if (position.step == first_step || !is_trusted_) throw;
            // Bad data, a full disk or a failed launch cost at most the step in which they occur.
            bool agreed = world_.size() == 1 || dynamic_cast<const CommonError*>(&error);
            std::string message = message_of(error) + "; " + (agreed ? rescue(position) : all_is_lost);
            if (agreed) throw CommonError(message, exit_code_of(error));
            throw Error(message, exit_code_of(error));
        }
    }

private:
    static constexpr const char* all_is_lost = "what was trained since the last checkpoint is lost";

    // For all ranks, in a run that ends with an error: saves its state, and returns a description of the
    // outcome. Throws Error if only this rank cannot continue with saving.
    std::string rescue(const RunPosition& position) {
        if (!std::ranges::all_of(parts_, &Stateful::is_whole)) return all_is_lost;
        world_.recover();
        // A device that can recover finishes its work, and forgets the error.
        if (world_.size() == 1) cudaDeviceSynchronize(), cudaGetLastError();
        try {
            std::string folder = finish_at(position);
            return text("the run up to step %d is saved in %s", position.step, folder.c_str());
        } catch (const Error& error) {
            if (world_.size() > 1 && !dynamic_cast<const CommonError*>(&error)) throw;
            return text("saving step %d failed too: %s; %s", position.step, error.what(), all_is_lost);
        }
    }

    // For all ranks: loads the first of these checkpoints that is whole.
    template <typename RunOf>
    RunPosition load_newest(const std::string& what, const std::vector<std::string>& folders,
                            RunOf&& run_of) {
        std::string first_error;
        for (const std::string& folder : folders) {
            try {
                RunPosition position = load(run_of(folder), false);
                on_disk_ = is_own(folder, position.step) ? position.step : -1;
                best_ = position.best;
                loaded_ = folder;
                return position;
            } catch (const CommonError& error) {
                if (folders.size() == 1) throw;
                world_.recover();
                if (first_error.empty()) first_error = error.what();
                screen.warn("resume       passed over: " + one_line(error.what()));
            }
        }
        throw CommonError(text("%s: none of %zu checkpoints can be used; the newest: %s", what.c_str(),
                               folders.size(), first_error.c_str()));
    }

    // For all ranks: reads an older checkpoint of the run, whose fixed options must be those of this run.
    StoredRun older_run(const std::string& folder) const {
        FindCheckpoint find = find_on_root(world_, {folder}, checkpoint_at);
        StoredRun run;
        world_.on_all_ranks([&] {
            run = *find(folder);
            StoredOptions(run, false).check_fixed(options_, "name a checkpoint of this run");
        });
        return run;
    }

    // For all ranks: returns whether, on the first rank, this is the run directory's checkpoint of this step.
    bool is_own(const std::string& folder, int step) const {
        return world_.largest(world_.is_root() &&
                              is_same_folder(folder, checkpoint_folder(options_.run_dir, step)));
    }

    // For all ranks: loads a checkpoint. The first rank has the index, and sends it to the others.
    RunPosition load(const StoredRun& run, bool weights_only) {
        Phase phase("load");
        std::string index = world_.broadcast_text(run.index);
        std::unique_ptr<CheckpointReader> reader;
        world_.on_all_ranks([&] { reader = std::make_unique<CheckpointReader>(run.checkpoint, index); });
        is_trusted_ = false;  // until all of it is loaded
        std::string converted = load_checkpoint(parts_, world_, *reader, weights_only);
        if (!weights_only) saver_.loaded(*reader);
        if (!converted.empty()) print("             %s\n", converted.c_str());
        RunPosition position = {(int)run.step, (uint64_t)reader->index().samples()};
        world_.on_all_ranks([&] {
            nlohmann::json about = reader->index().about;
            published_ = about.value(published_key, nlohmann::json());
            position.best = best_checkpoints(about, index_path(run.checkpoint));
            position.spikes = spike_history_from_json(about.value("spikes", nlohmann::json()),
                                                      index_path(run.checkpoint) + ": spikes");
        });
        is_trusted_ = true;
        return position;
    }

    nlohmann::ordered_json header(const RunPosition& position) const {
        nlohmann::ordered_json header = {{"program", program_version},
                                         {"step", position.step},
                                         {"samples", position.samples},
                                         {"options", options_to_json(options_)}};
        if (!position.spikes.is_empty()) header["spikes"] = position.spikes.to_json();
        if (!position.best.losses.empty()) header[best_key] = to_json(position.best);
        if (!published_.is_null()) header[published_key] = published_;
        return header;
    }

    void tell(SaveReport report) {
        report.stalled += before_seconds_;
        last_ = report;
        if (report.error.empty()) on_disk_ = (int)report.step, best_ = saving_;
        report_(report);
        if (report.error.empty() && !ending_ && clock_.learn(report)) {
            Screen::Turn turn(screen);
            print("saves        %s\n", clock_.summary().c_str());
        }
    }

    const Contributors parts_;
    const Options& options_;
    const World& world_;
    const std::function<void()> before_save_;
    Report report_;
    SaveClock clock_;
    const bool in_background_;
    CheckpointSaver saver_;
    double before_seconds_ = 0;  // seconds that before_save_ took for the last save
    bool is_trusted_ = true;
    bool ending_ = false;                 // training has ended; waiting for saves to finish
    int on_disk_ = -1;                    // step of the last checkpoint on disk
    BestCheckpoints saving_, best_;       // those of the save under way, and of the checkpoint on disk
    std::string loaded_;                  // the checkpoint that was loaded last
    std::pair<std::string, int> origin_;  // the one that the run started from, and its step; empty: none
    nlohmann::json published_;            // text files that the model came with; null: none
    SaveReport last_;                     // the last save's
};
