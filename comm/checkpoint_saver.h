/*
Saving a state: every rank writes its slices to a data file of its own, and the first one publishes the
checkpoint when all are on disk. A run that saves in the background does not stop for it. Until the next
update, nothing changes of what is saved: its copy into host memory has a stream of its own and runs behind
the passes, and only the update waits for it.

    save()      all ranks    wait for the save under way, begin to copy
                threads      make the folder; wait for the copy
                             hash, write, fsync; tell the first rank's what is where
                its thread   write the index, give the folder its name, delete older checkpoints
                threads      learn what came of it
    finish()    all ranks    wait for the threads

The threads talk to each other by themselves: the checkpoint is there as soon as it can be, whatever the ranks
are doing. What goes wrong on any rank on the way leaves nothing of the new checkpoint, and the older ones as
they were. It is reported and not thrown: losing a checkpoint is no reason to lose the run.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/checkpoint_places.h"       // pieces_to_write
#include "comm/memory.h"                  // HostArray, ComputeStream
#include "comm/world.h"                   // World
#include "comm/zero.h"                    // ZeroState
#include "data/base/background.h"         // Background
#include "data/base/figures.h"            // seconds_now
#include "data/base/json.h"               // json_line
#include "data/checkpoint/files.h"        // CheckpointDataFile
#include "data/checkpoint/folder.h"       // NewCheckpoint, keep_newest
#include "data/checkpoint/save_report.h"  // SaveReport

// ----------------------------------------------------------------------------
// work shared by all ranks

// Work that every rank does for itself, and of which all ranks learn what came.
struct WorkOutcome {
    std::string error;       // the first rank's that has one, with its name; empty: none has
    Lack lack = Lack::none;  // the error is that there is no room
    std::string remark;      // the first rank's that has one
    double seconds = 0;      // the slowest rank's
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WorkOutcome, error, lack, remark, seconds)

// For all ranks: work(remark) throws what goes wrong, and talks to no other rank. Returns when all are done.
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
    // For all ranks. Of older checkpoints, the newest stay, `keep` with the new one (0: all), and those whose
    // step is a multiple of keep_every (0: none). weights_alone: what is saved is nothing to go on from.
    CheckpointSaver(ZeroState& state, const World& world, const std::string& run_dir, int keep,
                    int64_t keep_every, bool in_background, bool weights_alone = false)
        : state_(state),
          world_(world),
          thread_world_(world.for_another_thread()),
          run_dir_(run_dir),
          keep_(keep),
          keep_every_(keep_every),
          in_background_(in_background),
          weights_alone_(weights_alone),
          saved_(saved_settings()),
          pieces_(pieces_to_write(state.layout(), tensor_numbers(state.layout()), mesh().shape,
                                  mesh().position, saved_)),
          room_(staging_room()),
          staging_(room_) {
        cudaCheck(cudaGetDevice(&device_));
        // The first copy is not to wait until the system has found memory.
        memset(staging_.data, 0, room_);
        // Files are numbered without gaps: ranks that have nothing to write have none.
        std::vector<std::string> sizes = world.all_gather(std::to_string(total_bytes(pieces_)));
        for (int rank = 0; rank < world.size(); rank++) {
            uint64_t bytes = std::stoull(sizes[rank]);
            all_bytes_ += bytes;
            if (rank < world.rank() && bytes > 0) file_number_++;
        }
    }

    CheckpointSaver(const CheckpointSaver&) = delete;
    CheckpointSaver& operator=(const CheckpointSaver&) = delete;

    // For all ranks: begins to copy the state, to be written in the background, or writes it at once. about:
    // what the header of the index says, step and samples among it. Returns the report of the save before
    // this one, if it had to be waited for; or that of this one, if it is not written in the background.
    std::optional<SaveReport> save(nlohmann::ordered_json about) {
        double start = seconds_now();
        std::optional<SaveReport> before;
        if (under_way()) before = finish();
        report_ = {};
        report_.step = about.at("step").get<int64_t>();
        report_.folder = checkpoint_folder(run_dir_, report_.step) + (weights_alone_ ? weights_ending : "");
        report_.weights_alone = weights_alone_;
        report_.bytes = all_bytes_;
        about_ = std::move(about);
        if (in_background_)
            state_.copy_aside(copies_.stream, [this] { copy(0, pieces_.size(), copies_.stream); });
        else
            state_.synchronize();
        under_way_ = true;  // a save that could not be copied has thrown, and there is nothing to finish
        if (in_background_)
            work_.start([this] { work(); });
        else
            work();
        report_.stalled = seconds_now() - start;
        return in_background_ ? before : finish();
    }

    uint64_t bytes() const { return all_bytes_; }  // the size of a checkpoint

    // Tells whether a save has begun of which finish() has not yet told the outcome. All ranks get the same
    // answer.
    bool under_way() const { return under_way_; }
    // Tells whether finish() would return at once on this rank.
    bool is_ready() const { return work_.is_done(); }

    // For all ranks, while a save is under way: waits until it is over.
    SaveReport finish() {
        Phase phase("save");
        WaitsForOthers wait;
        double start = seconds_now();
        work_.finish();
        if (in_background_) report_.stalled += state_.stall_of_copies();
        new_checkpoint_.reset();  // if it is not published, nothing of it stays
        under_way_ = false;
        report_.stalled += seconds_now() - start;
        return report_;
    }

private:
    const Mesh& mesh() const { return state_.mesh(); }

    ZeroSettings saved_settings() const {
        ZeroSettings settings = state_.settings();
        if (weights_alone_) settings.training = false;
        return settings;
    }

    size_t staging_room() const {
        size_t all = staging_bytes(state_.layout(), mesh().shape, saved_);
        return in_background_ ? all : std::min(all, largest_piece * sizeof(float));
    }

    static uint64_t total_bytes(const std::vector<OwnPiece>& pieces) {
        uint64_t bytes = 0;
        for (const OwnPiece& own : pieces) bytes += own.bytes();
        return bytes;
    }

    // For all ranks: makes the folder to write to.
    void begin_folder() {
        auto make = [this](std::string&) {
            if (!world_.is_root()) return;
            new_checkpoint_.reset();  // it is left from a save that has thrown
            new_checkpoint_ = std::make_unique<NewCheckpoint>(run_dir_, report_.folder);
            check_space(new_checkpoint_->folder(), all_bytes_);
            save_id_ = new_save_id();
        };
        note(do_shared_work(*thread_world_, make));
        folder_ = thread_world_->broadcast_text(new_checkpoint_ ? new_checkpoint_->folder() : "");
        thread_world_->broadcast(&save_id_, sizeof save_id_);
    }

    // The stream copies pieces [begin, end) into the staging memory, one behind the other.
    void copy(size_t begin, size_t end, cudaStream_t stream) {
        char* to = staging_.data;
        for (size_t i = begin; i < end; i++) {
            const OwnPiece& own = pieces_[i];
            state_.copy_out(own.piece.slot, own.unit, own.at, own.piece.count, to, stream);
            to += own.bytes();
        }
    }

    // For all ranks: from the copy to the checkpoint.
    void work() {
        Phase phase("save");
        try {
            cudaCheck(cudaSetDevice(device_));  // a thread of its own does not know it
            begin_folder();
            if (report_.error.empty())
                note(do_shared_work(*thread_world_, [this](std::string&) { write(); }));
            if (report_.error.empty()) publish();
        } catch (const std::exception& error) {
            if (world_.size() > 1) abort_job(world_, error);  // the others wait for this one
            report_.error = message_of(error);
        }
    }

    void note(const WorkOutcome& outcome) {
        report_.error = outcome.error;
        report_.lack = outcome.lack;
        report_.remark = outcome.remark;
        report_.seconds += outcome.seconds;
    }

    // Writes this rank's file, as much at a time as the staging memory holds.
    void write() {
        if (in_background_) state_.wait_for_copies();
        if (pieces_.empty()) return;
        CheckpointDataFile file(folder_, file_number_, save_id_);
        for (size_t begin = 0, end; begin < pieces_.size(); begin = end) {
            uint64_t bytes = 0;
            for (end = begin; end < pieces_.size() && bytes + pieces_[end].bytes() <= room_; end++)
                bytes += pieces_[end].bytes();
            if (!in_background_) {  // otherwise all of it is there
                copy(begin, end, state_.stream());
                cudaCheck(cudaStreamSynchronize(state_.stream()));
            }
            const char* from = staging_.data;
            for (size_t i = begin; i < end; i++) {
                file.append(pieces_[i].piece, from, pieces_[i].bytes());
                from += pieces_[i].bytes();
            }
        }
        file.finish();
    }

    // For all ranks: the first learns where everyone's pieces are, and publishes the checkpoint.
    void publish() {
        std::vector<std::string_view> to_each(world_.size());
        std::string table = table_of(pieces_);
        to_each[0] = table;
        std::vector<std::string> tables = thread_world_->exchange(to_each);
        note(do_shared_work(*thread_world_, [&](std::string& remark) {
            if (!world_.is_root()) return;
            new_checkpoint_->commit(index_of(tables));
            note_error(remark, [&] {
                if (!weights_alone_) remove_weights(run_dir_, report_.step);
                keep_newest(run_dir_, keep_, keep_every_);
            });
        }));
    }

    static std::string table_of(const std::vector<OwnPiece>& pieces) {
        std::string table;
        for (const OwnPiece& own : pieces) table.append((const char*)&own.piece, sizeof own.piece);
        return table;
    }

    // The index of everyone's pieces.
    CheckpointIndex index_of(const std::vector<std::string>& tables) const {
        CheckpointIndex index = {save_id_, about_, checkpoint_tensors(state_.layout(), saved_), {}, {}};
        for (const std::string& table : tables) {
            if (table.empty()) continue;
            size_t first = index.pieces.size(), count = table.size() / sizeof(CheckpointPiece);
            index.pieces.resize(first + count);
            memcpy(&index.pieces[first], table.data(), table.size());
            const CheckpointPiece& last = index.pieces.back();
            index.file_bytes.push_back(last.offset + index.bytes_of(last));
        }
        return index;
    }

    ZeroState& state_;
    const World& world_;
    const std::unique_ptr<World> thread_world_;
    const std::string run_dir_;
    const int keep_;
    const int64_t keep_every_;
    const bool in_background_, weights_alone_;
    const ZeroSettings saved_;      // the part of the state that is saved
    std::vector<OwnPiece> pieces_;  // the pieces that this rank writes
    uint64_t all_bytes_ = 0;        // all ranks' pieces together
    int file_number_ = 0;
    const size_t room_;  // bytes of staging memory
    HostArray<char> staging_;
    ComputeStream copies_;  // into it
    int device_ = 0;

    // the save under way
    bool under_way_ = false;
    nlohmann::ordered_json about_;
    std::unique_ptr<NewCheckpoint> new_checkpoint_;  // on the first rank
    std::string folder_;                             // the folder that is written to
    uint64_t save_id_ = 0;
    SaveReport report_;  // the thread's, while it works
    Background work_;    // last: it ends before what it works with
};
