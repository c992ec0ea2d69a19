/*
The checkpoints of a run: where it goes on from, and what is saved of it while it goes on.
*/
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "comm/checkpoint_loader.h"  // load_checkpoint
#include "comm/checkpoint_saver.h"   // CheckpointSaver
#include "comm/last_checkpoint.h"    // LastCheckpoint
#include "comm/world.h"              // World, CommonError
#include "data/base/error.h"
#include "data/base/program_version.h"    // program_version
#include "data/checkpoint/folder.h"       // checkpoint_steps
#include "data/launch/find_checkpoint.h"  // find_checkpoint, StoredRun
#include "data/options/values.h"          // options_to_json

// How far a run has come.
struct RunPosition {
    int step = 0;          // steps done
    uint64_t samples = 0;  // taken from the data, in the order of the run
};

class RunCheckpoints {
public:
    using LayoutAt = std::function<ParameterLayout(const MeshPosition&)>;
    using Report = std::function<void(const SaveReport&)>;

    // layout_at gives the layout of the rank there. before_save is called on all ranks before a save, and
    // report with what came of it.
    RunCheckpoints(ZeroState& state, LayoutAt layout_at, const Options& o, const World& world,
                   std::function<void()> before_save, Report report)
        : state_(state),
          layout_at_(std::move(layout_at)),
          options_(o),
          world_(world),
          before_save_(std::move(before_save)),
          report_(std::move(report)),
          saver_(state, world, o.run_dir, o.keep, o.keep_every, state.settings().staging) {}

    // For all ranks: the state of this checkpoint or, if it is not whole, of the newest before it.
    RunPosition resume(const StoredRun& origin) {
        std::string first_error;
        std::vector<std::string> folders = candidates(origin);
        for (const std::string& folder : folders) {
            try {
                RunPosition position = load(folder, false);
                printf("resume       %s: goes on after step %d\n", folder.c_str(), position.step);
                if (is_own(folder, position.step)) on_disk_ = position.step;
                return position;
            } catch (const CommonError& error) {
                if (folders.size() == 1) throw;
                world_.recover();
                if (first_error.empty()) first_error = error.what();
                printf("resume       passed over: %s\n", one_line(error.what()).c_str());
            }
        }
        throw CommonError(text("--resume %s: none of %zu checkpoints can be used; the newest: %s",
                               printable(options_.resume).c_str(), folders.size(), first_error.c_str()));
    }

    // For all ranks: the weights alone.
    void take_weights(const std::string& folder) {
        load(folder, true);
        printf("weights      of %s\n", folder.c_str());
    }

    // For all ranks: begins to save, or saves.
    void save(const RunPosition& position) {
        before_save_();
        if (auto report = saver_.save(header(position))) tell(*report);
    }

    uint64_t bytes() const { return saver_.bytes(); }  // of one
    // Tells whether a save is over on this rank whose outcome finish() has not yet told.
    bool is_ready() const { return saver_.under_way() && saver_.is_ready(); }

    // For all ranks: waits for a save under way, if there is one, and tells what came of it.
    void finish() {
        if (saver_.under_way()) tell(saver_.finish());
    }

    // For all ranks: returns when this position, the last one, is on disk, and gives the checkpoint's folder.
    // Throws CommonError if it cannot be saved.
    std::string finish_at(const RunPosition& position) {
        finish();
        auto save_now = [&] {
            save(position);
            finish();
            return last_;
        };
        if (on_disk_ != position.step) save_now();
        if (on_disk_ == position.step) return checkpoint_folder(options_.run_dir, position.step);
        LastCheckpoint last(state_, world_, options_, bytes(), header(position), save_now, report_);
        return last.save(last_);
    }

    // For all ranks: work() trains, and moves `position` on. Where an error ends it after a step, the error
    // that is thrown in its place says what could be saved of the run.
    template <typename Work>
    void rescue_from_errors(const RunPosition& position, Work&& work) {
        int first_step = position.step;
        try {
            work();
        } catch (const std::exception& error) {
            if (position.step == first_step) throw;
            // Bad data, a full disk or a launch that fails cost at most the step that met them.
            bool agreed = world_.size() == 1 || dynamic_cast<const CommonError*>(&error);
            std::string message = message_of(error) + "; " + (agreed ? rescue(position) : all_is_lost);
            if (agreed) throw CommonError(message);
            throw Error(message);
        }
    }

private:
    static constexpr const char* all_is_lost = "what was trained since the last checkpoint is lost";

    // For all ranks, in a run that ends with an error: saves what it has come to, and says what came of that.
    // Throws Error where this rank alone cannot go on with saving.
    std::string rescue(const RunPosition& position) {
        if (!state_.is_whole()) return all_is_lost;
        world_.recover();
        // A device that can go on is done with what failed, and forgets it.
        if (world_.size() == 1) cudaDeviceSynchronize(), cudaGetLastError();
        try {
            std::string folder = finish_at(position);
            return text("the run up to step %d is saved in %s", position.step, folder.c_str());
        } catch (const Error& error) {
            if (world_.size() > 1 && !dynamic_cast<const CommonError*>(&error)) throw;
            return text("nor could step %d be saved: %s; %s", position.step, error.what(), all_is_lost);
        }
    }

    // For all ranks: checkpoints to go on from, the best first, as the first rank sees them.
    std::vector<std::string> candidates(const StoredRun& origin) const {
        std::string run = options_.resume == "auto" ? options_.run_dir : options_.resume, mine;
        world_.on_all_ranks([&] {
            mine = origin.checkpoint + '\0';
            if (access(index_path(run).c_str(), F_OK) == 0) return;  // that one was named
            for (int64_t step : checkpoint_steps(run)) {
                std::string folder = checkpoint_folder(run, step);
                if (step <= origin.step && folder != origin.checkpoint) mine += folder + '\0';
            }
        });
        std::vector<std::string> folders;
        std::string all = world_.all_gather(mine)[0];
        for (size_t begin = 0, end; begin < all.size(); begin = end + 1) {
            end = all.find('\0', begin);
            folders.push_back(all.substr(begin, end - begin));
        }
        return folders;
    }

    // For all ranks: whether it is, for the first rank, the checkpoint of this step in the run directory.
    bool is_own(const std::string& folder, int step) const {
        return world_.largest(world_.is_root() &&
                              is_same_folder(folder, checkpoint_folder(options_.run_dir, step)));
    }

    // That a checkpoint's state means what this run takes it for.
    void check_same_meaning(const nlohmann::ordered_json& stored, const std::string& folder) const {
        nlohmann::ordered_json own = options_to_json(options_, command_train);
        for (const OptionRow& row : option_table()) {
            bool fixed = row.resume == Resume::shape || row.resume == Resume::fixed;
            if (!fixed || !stored.contains(row.field) || stored[row.field] == own[row.field]) continue;
            fail("%s: made with %s %s, and the run has %s; name a checkpoint of this run", folder.c_str(),
                 option_name(row).c_str(), json_text(stored[row.field]).c_str(),
                 json_text(own[row.field]).c_str());
        }
    }

    RunPosition load(const std::string& folder, bool weights_only) {
        std::unique_ptr<CheckpointReader> reader;
        world_.on_all_ranks([&] {
            reader = std::make_unique<CheckpointReader>(folder, world_.is_root());  // one looks at all files
            if (!weights_only) check_same_meaning(reader->index().about.at("options"), folder);
        });
        std::string converted = load_checkpoint(state_, world_, layout_at_, *reader, weights_only);
        if (!converted.empty()) printf("             %s\n", converted.c_str());
        auto& index = reader->index();
        return {(int)index.step(), (uint64_t)index.samples()};
    }

    nlohmann::ordered_json header(const RunPosition& position) const {
        return {{"program", program_version},
                {"step", position.step},
                {"samples", position.samples},
                {"options", options_to_json(options_, command_train)}};
    }

    void tell(const SaveReport& report) {
        last_ = report;
        if (report.error.empty()) on_disk_ = (int)report.step;
        report_(report);
    }

    ZeroState& state_;
    LayoutAt layout_at_;
    const Options& options_;
    const World& world_;
    const std::function<void()> before_save_;
    Report report_;
    CheckpointSaver saver_;
    int on_disk_ = -1;  // step of the last checkpoint that is
    SaveReport last_;   // of the last save
};

// ----------------------------------------------------------------------------
// where a run begins
//
// Ranks that look for a checkpoint each by themselves may see different ones, for a file system shows the
// files of other machines late; and thousands of them that look at every file at once are a load on it. So
// the first rank looks, and tells the others.

// What came of looking, from rank to rank.
inline nlohmann::json found_to_json(const std::optional<StoredRun>& found) {
    if (!found) return nullptr;
    return {{"checkpoint", found->checkpoint}, {"run_dir", found->run_dir},
            {"tokenizer", found->tokenizer},   {"step", found->step},
            {"options", found->options},       {"notes", found->notes}};
}

inline std::optional<StoredRun> stored_run_from_json(const nlohmann::json& json) {
    if (json.is_null()) return std::nullopt;
    return StoredRun{.checkpoint = json.at("checkpoint"),
                     .run_dir = json.at("run_dir"),
                     .tokenizer = json.at("tokenizer"),
                     .step = json.at("step"),
                     .options = json.at("options"),
                     .notes = json.at("notes")};
}

// For all ranks: the first one looks at these places, the same on all. What it returns knows what came of
// that, and speaks to nobody.
inline FindCheckpoint find_on_root(const World& world, const std::vector<std::string>& places,
                                   const FindCheckpoint& find = find_checkpoint) {
    std::string message;
    if (world.is_root()) {
        nlohmann::json answers = nlohmann::json::array();
        for (const std::string& place : places) {
            try {
                answers.push_back(found_to_json(find(place)));
            } catch (const std::exception& error) {
                answers.push_back({{"error", message_of(error)}});
            }
        }
        // Paths may be no UTF-8, which JSON's text would not take.
        nlohmann::json::to_cbor(answers, message);
    }
    nlohmann::json answers = nlohmann::json::from_cbor(world.all_gather(message)[0]);
    std::map<std::string, nlohmann::json> by_place;
    for (size_t i = 0; i < answers.size(); i++) by_place.emplace(places[i], answers[i]);
    return [by_place](const std::string& place) {
        const nlohmann::json& answer = by_place.at(place);
        if (answer.contains("error")) fail("%s", answer["error"].get<std::string>().c_str());
        return stored_run_from_json(answer);
    };
}
