/*
Saves the state of a run (comm/stateful.h): every rank writes a data file for each contributor for which it
has data, and the first rank publishes the checkpoint when all files are on disk. A run that saves in the
background does not stop meanwhile.

    save()      all ranks    contributors begin to copy their data
                threads      make the folder; agree on tensors and files;
                             hash, write, fsync; send the places of the pieces to the first rank
                first rank's write the index, rename the folder, delete older checkpoints
                threads      receive the outcome
    finish()    all ranks    wait for the threads

The threads communicate independently of the ranks' main threads, so the checkpoint is complete as soon as
possible, whatever the main threads are doing. An error on any rank removes the new checkpoint and leaves the
older ones as they were. It is reported, not thrown: losing a checkpoint is no reason to lose the run.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/stateful.h"                // Stateful
#include "comm/world.h"                   // World
#include "data/base/background.h"         // Background
#include "data/base/figures.h"            // seconds_now
#include "data/base/json.h"               // json_line
#include "data/checkpoint/files.h"        // CheckpointDataFile
#include "data/checkpoint/folder.h"       // NewCheckpoint
#include "data/checkpoint/retention.h"    // Retention, remove_old_checkpoints
#include "data/checkpoint/save_report.h"  // SaveReport

// ----------------------------------------------------------------------------
// work shared by all ranks

// The outcome of work that every rank does for itself, combined over the ranks and the same on all.
struct WorkOutcome {
    std::string error;       // of the first rank that has one, with that rank's name; empty: none
    Lack lack = Lack::none;  // the resource that ran out, if that is the cause
    std::string remark;      // of the first rank that has one
    double seconds = 0;      // the slowest rank's
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WorkOutcome, error, lack, remark, seconds)

// For all ranks: runs work(remark), which throws its errors and must not communicate with other ranks.
// Returns when all ranks are done.
template <typename Work>
WorkOutcome do_shared_work(const World& world, Work&& work) {
    double start = seconds_now();
    WorkOutcome mine, all;
    try {
        work(mine.remark);
    } catch (const DiskFull& thrown) {
        mine.error = thrown.what();
        mine.lack = thrown.lack;
    } catch (const std::exception& thrown) {
        mine.error = message_of(thrown);
    }
    if (!mine.error.empty() && world.size() > 1) mine.error = world.said_by(world.rank(), mine.error);
    mine.seconds = seconds_now() - start;
    std::string outcome =
        world.agree(json_line(nlohmann::json(mine)), [&](const std::vector<std::string>& lines) {
            for (const std::string& line : lines) {
                WorkOutcome theirs = nlohmann::json::parse(line);
                if (all.error.empty()) all.error = theirs.error, all.lack = theirs.lack;
                if (all.remark.empty()) all.remark = theirs.remark;
                all.seconds = std::max(all.seconds, theirs.seconds);
            }
            return json_line(nlohmann::json(all));
        });
    return nlohmann::json::parse(outcome);
}

// ----------------------------------------------------------------------------
// saving

class CheckpointSaver {
public:
    // For all ranks. retention: which older checkpoints are kept, besides the best ones, which the header
    // names. weights_alone: saves only weights, from which a run cannot resume.
    CheckpointSaver(Contributors parts, const World& world, const std::string& run_dir,
                    const Retention& retention, bool in_background, bool weights_alone = false)
        : parts_(std::move(parts)),
          world_(world),
          thread_world_(world.for_another_thread()),
          run_dir_(run_dir),
          retention_(retention),
          scope_{&world, in_background, weights_alone} {
        cudaCheck(cudaGetDevice(&device_));
        uint64_t mine = 0;
        for (const Stateful* part : parts_) mine += part->bytes_to_write(weights_alone);
        all_bytes_ = sum_over_ranks(world, {mine})[0].all;
    }

    CheckpointSaver(const CheckpointSaver&) = delete;
    CheckpointSaver& operator=(const CheckpointSaver&) = delete;

    // For all ranks, while no save is under way: saves the state, at once or in the background. finish() then
    // returns the outcome. about: the header of the index, with the step and the samples
    void save(nlohmann::ordered_json about) {
        double start = seconds_now();
        report_ = {};
        report_.step = about.at("step").get<int64_t>();
        report_.folder =
            checkpoint_folder(run_dir_, report_.step) + (scope_.weights_alone ? weights_ending : "");
        report_.weights_alone = scope_.weights_alone;
        report_.bytes = all_bytes_;
        about_ = std::move(about);
        if (world_.is_root()) {
            scope_.id = new_save_id(), scope_.has_last = false;
            std::string ignored;  // a last checkpoint that cannot be read counts as gone
            if (!scope_.weights_alone && last_)
                note_error(ignored, [&] { scope_.has_last = save_id_in(last_->folder) == last_->save_id; });
        }
        world_.broadcast(&scope_.id, sizeof scope_.id);
        world_.broadcast(&scope_.has_last, sizeof scope_.has_last);
        begin_parts();
        under_way_ = true;  // only now: a save that could not begin has thrown, and needs no finish()
        if (scope_.in_background)
            work_.start([this] { work(); });
        else
            work(), end_parts();
        report_.stalled += seconds_now() - start;
    }

    // For all ranks: notes that the state was loaded from this checkpoint.
    void loaded(const CheckpointReader& reader) { last_ = {reader.folder(), reader.index().save_id}; }

    uint64_t bytes() const { return all_bytes_; }  // of the last checkpoint, or of the first one to come

    // Returns whether a save has begun whose outcome finish() has not yet returned; the same on all ranks.
    bool under_way() const { return under_way_; }
    // Returns whether finish() would return at once on this rank.
    bool is_ready() const { return work_.is_done(); }

    // For all ranks, while a save is under way: waits until it is done, and returns its report.
    SaveReport finish() {
        Phase phase("save");
        WaitsForOthers wait;
        double start = seconds_now();
        work_.finish();
        if (scope_.in_background) end_parts();
        all_bytes_ = report_.bytes;
        new_checkpoint_.reset();  // if it was not published, this removes it
        under_way_ = false;
        report_.stalled += seconds_now() - start;
        return report_;
    }

private:
    // A planned tensor's number in the checkpoint, and the number of this rank's first row if rows are
    // counted.
    struct TensorPlace {
        uint32_t number;
        uint64_t first_row;
    };
    // The files and tensors of a save, over all ranks.
    struct Contents {
        std::vector<CheckpointTensor> tensors;
        std::vector<std::vector<TensorPlace>> places;  // for each contributor and planned tensor
        std::vector<int> file_numbers;                 // this rank's file, for each contributor
        int files = 0;                                 // new files
        std::map<std::string, uint32_t> kept;          // numbers of tensors kept from the last checkpoint
    };

    // If a contributor cannot begin, the ones before it end their save.
    void begin_parts() {
        for (auto part = parts_.begin(); part != parts_.end(); part++) {
            try {
                (*part)->begin_save(scope_);
            } catch (...) {
                while (part != parts_.begin()) (*--part)->end_save(false);
                throw;
            }
        }
    }

    void end_parts() {
        for (Stateful* part : parts_) {
            report_.stalled += part->stall();
            part->end_save(report_.error.empty());
        }
    }

    // For all ranks: carries out the save that has begun, and publishes the checkpoint.
    void work() {
        Phase phase("save");
        try {
            cudaCheck(cudaSetDevice(device_));  // the current device is set per thread
            begin_folder();
            if (report_.error.empty()) plan();
            if (report_.error.empty())
                note(do_shared_work(*thread_world_, [this](std::string&) { write(); }));
            for (Stateful* part : parts_) part->let_go();
            if (report_.error.empty()) publish();
        } catch (const std::exception& error) {
            if (world_.size() > 1) abort_job(world_, error);  // the other ranks wait for this one
            report_.error = message_of(error);
            for (Stateful* part : parts_) part->let_go();
        }
    }

    void note(const WorkOutcome& outcome) {
        report_.error = outcome.error;
        report_.lack = outcome.lack;
        report_.remark = outcome.remark;
        report_.seconds += outcome.seconds;
    }

    // For all ranks: makes the folder to write to.
    void begin_folder() {
        auto make = [this](std::string&) {
            if (!world_.is_root()) return;
            new_checkpoint_.reset();  // left over from a save that threw
            new_checkpoint_ = std::make_unique<NewCheckpoint>(run_dir_, report_.folder);
        };
        note(do_shared_work(*thread_world_, make));
        folder_ = thread_world_->broadcast_text(new_checkpoint_ ? new_checkpoint_->folder() : "");
    }

    // For all ranks: determines what the checkpoint contains, and what each rank writes.
    void plan() {
        std::vector<SavePlan> plans;
        std::vector<uint64_t> mine;
        note(do_shared_work(*thread_world_, [&](std::string&) {
            for (Stateful* part : parts_) plans.push_back(part->plan());
        }));
        if (!report_.error.empty()) return;
        for (const SavePlan& plan : plans) mine.push_back(plan.bytes);
        for (const SavePlan& plan : plans) {
            for (const PlannedTensor& planned : plan.tensors)
                if (planned.counts_rows()) mine.push_back(planned.rows);
        }
        std::vector<RankNumbers> all = sum_over_ranks(*thread_world_, mine);
        set_contents(plans, all);
        note(do_shared_work(*thread_world_, [&](std::string&) {
            if (world_.is_root()) check_space(folder_, report_.bytes);
        }));
    }

    // numbers: the bytes of each contributor, then the rows of each tensor whose rows are counted.
    void set_contents(const std::vector<SavePlan>& plans, const std::vector<RankNumbers>& numbers) {
        contents_ = {};
        report_.bytes = 0;
        auto bytes = numbers.begin(), rows = bytes + (ptrdiff_t)plans.size();
        for (const SavePlan& plan : plans) {
            contents_.file_numbers.push_back(contents_.files + bytes->some_before);
            contents_.files += bytes->some;
            report_.bytes += bytes++->all;
            std::vector<TensorPlace>& places = contents_.places.emplace_back();
            for (const PlannedTensor& planned : plan.tensors) {
                auto number = (uint32_t)contents_.tensors.size();
                CheckpointTensor tensor = planned.tensor;
                places.push_back({number, 0});
                if (planned.kept) contents_.kept[tensor.name] = number;
                if (planned.counts_rows()) {
                    places.back().first_row = rows->before;
                    tensor.shape[0] = (int64_t)rows++->all;
                }
                contents_.tensors.push_back(std::move(tensor));
            }
        }
    }

    // Writes this rank's files.
    void write() {
        pieces_.clear();
        for (size_t i = 0; i < parts_.size(); i++) {
            std::unique_ptr<CheckpointDataFile> file;  // null on ranks that have nothing to write
            parts_[i]->write([&](CheckpointPiece piece, const void* values) {
                TensorPlace place = contents_.places[i][piece.tensor];
                piece.tensor = place.number, piece.begin += place.first_row * piece.columns;
                if (!file) {
                    int number = contents_.file_numbers[i];
                    file = std::make_unique<CheckpointDataFile>(folder_, number, scope_.id);
                }
                Dtype dtype = *contents_.tensors[piece.tensor].dtype(piece.slot);
                file->append(piece, values, piece.count * dtype_size(dtype));
                pieces_.push_back(piece);
            });
            if (file) file->finish();
        }
    }

    // For all ranks: the first rank receives the places of all pieces, and publishes the checkpoint.
    void publish() {
        std::vector<std::string_view> to_each(world_.size());
        to_each[0] = {(const char*)pieces_.data(), pieces_.size() * sizeof(CheckpointPiece)};
        std::vector<std::string> tables = thread_world_->exchange(to_each);
        note(do_shared_work(*thread_world_, [&](std::string& remark) {
            if (!world_.is_root()) return;
            try {
                new_checkpoint_->commit(index_of(tables));
            } catch (const DiskFull&) {
                throw;
            } catch (...) {
                last_.reset();  // its files may be the cause, so the next checkpoint shares none of them
                throw;
            }
            if (!scope_.weights_alone) last_ = {report_.folder, scope_.id};
            note_error(remark, [&] {
                if (!scope_.weights_alone) remove_weights(run_dir_, report_.step);
                remove_old_checkpoints(run_dir_, retention_, best_checkpoints(about_, report_.folder));
            });
        }));
    }

    // Returns the index of all ranks' pieces, and of the tensors kept from the last checkpoint.
    CheckpointIndex index_of(const std::vector<std::string>& tables) const {
        CheckpointIndex index = {scope_.id, about_, contents_.tensors, {}, {}};
        for (const std::string& table : tables) {
            if (table.empty()) continue;
            size_t first = index.pieces.size(), count = table.size() / sizeof(CheckpointPiece);
            index.pieces.resize(first + count);
            memcpy(&index.pieces[first], table.data(), table.size());
        }
        std::ranges::stable_sort(index.pieces, {}, &CheckpointPiece::file);
        index.file_bytes.resize((size_t)contents_.files);
        for (const CheckpointPiece& piece : index.pieces)
            index.file_bytes[piece.file] = piece.offset + index.bytes_of(piece);
        if (!contents_.kept.empty()) keep_last(index);
        return index;
    }

    // Adds the tensors kept from the last checkpoint, with their pieces and files.
    void keep_last(CheckpointIndex& index) const {
        const CheckpointReader reader(last_->folder, false);
        const CheckpointIndex& last = reader.index();
        std::map<uint32_t, uint32_t> files;  // file numbers: in the last checkpoint, and in this one
        for (CheckpointPiece piece : last.pieces) {
            const CheckpointTensor& tensor = last.tensors[piece.tensor];
            auto kept = contents_.kept.find(tensor.name);
            if (kept == contents_.kept.end()) continue;
            index.tensors[kept->second] = tensor;
            auto [file, is_new] = files.try_emplace(piece.file, (uint32_t)index.file_bytes.size());
            if (is_new) {
                index.shared[file->second] = last.origin_of(piece.file);
                index.file_bytes.push_back(last.file_bytes[piece.file]);
                share_file(last_->folder + "/" + data_file_name((int)file->first),
                           folder_ + "/" + data_file_name((int)file->second));
            }
            piece.tensor = kept->second, piece.file = file->second;
            index.pieces.push_back(piece);
        }
    }

    const Contributors parts_;
    const World& world_;
    const std::unique_ptr<World> thread_world_;
    const std::string run_dir_;
    const Retention retention_;
    SaveScope scope_;  // of the save in progress; equal on all ranks
    uint64_t all_bytes_ = 0;
    int device_ = 0;

    struct Last {
        std::string folder;
        uint64_t save_id;
    };
    std::optional<Last> last_;  // the checkpoint that was saved or loaded last, on the first rank

    // the save in progress
    bool under_way_ = false;
    nlohmann::ordered_json about_;
    std::unique_ptr<NewCheckpoint> new_checkpoint_;  // on the first rank
    std::string folder_;                             // the folder being written
    Contents contents_;
    std::vector<CheckpointPiece> pieces_;  // written by this rank
    SaveReport report_;                    // belongs to the thread while it works
    Background work_;                      // last member: it ends before what it uses is destroyed
};
