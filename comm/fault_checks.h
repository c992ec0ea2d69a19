/*
The checks of a run for devices that compute wrongly: when they are due, and what happens when one fails. The
run then ends with a line that names the rank, its host, its device and what is wrong, and with the exit code
for a failed part, which marks the run as worth restarting. Its state is not saved, because it is not known
which parts of the state are right.
*/
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/mesh.h"             // MeshShape, MeshPosition, position_of, rank_of
#include "comm/parameters.h"       // ParameterLayout
#include "comm/placement.h"        // process_place
#include "comm/run_checkpoints.h"  // RunCheckpoints
#include "comm/stateful.h"         // Contributors, ReplicatedPiece
#include "comm/world.h"            // World
#include "comm/zero.h"             // ZeroState
#include "data/options/options.h"  // Options
#include "kernels/hash.cuh"        // add_hash, hash_of_bytes_cpu, mix_word

// ----------------------------------------------------------------------------
// replicated state
//
// --check-replicas checks that ranks that should hold the same bits do so. Memory and links have their own
// checksums, but a device that occasionally computes wrongly gives no sign of it (Dixit et al., "Silent Data
// Corruptions at Scale", 2021): the run continues with replicas that no longer hold the same model.
//
// Ranks compare these:
//
//     weights           on all data ranks; with --zero 3 on the replicas of a shard
//     optimizer state   on the replicas of a shard, the master copy of the weights included
//     copied weights    on tensor ranks: norms, biases, and key/value heads if there are fewer than ranks
//     embeddings        on the first and last stage, if they are tied
//
// Each rank computes a 64-bit hash of each of them (kernels/hash.cuh), and the first rank compares the hashes
// within each group. A value that the majority holds is taken as right, and the other members are named; if
// no value has a majority, as with two members that differ, all are named. Only if a group disagrees are its
// tensors compared one by one, to name those that differ.
//
// The check runs every N steps and before each checkpoint, so what is on disk is known to be sound. A run
// that fails the check saves nothing more. The check cannot see two things: errors in state that only one
// rank holds, such as the optimizer state with --zero 1 and no replicas; and errors made before gradients
// were summed, because all replicas then hold the same wrong weights. --check-replay finds the latter.

// ----------------------------------------------------------------------------
// groups, and the members that differ

// Returns the members of a group whose value is not that of the majority, or all if no value has a majority.
inline std::vector<int> odd_members(std::span<const uint64_t> values) {
    std::map<uint64_t, size_t> count;
    for (uint64_t value : values) count[value]++;
    std::vector<int> odd;
    if (count.size() == 1) return odd;
    for (size_t i = 0; i < values.size(); i++)
        if (2 * count[values[i]] <= values.size()) odd.push_back((int)i);
    return odd;
}

constexpr int held_alike = 5;
constexpr const char* name_of_held[held_alike] = {"weights", "optimizer state", "copied weights",
                                                  "copied weights", "tied embeddings"};

// Returns the ranks that hold the same bits of `what` as `rank`.
inline std::vector<int> replica_group(Replicated what, int rank, const MeshShape& shape, bool cut_params,
                                      bool tied) {
    auto group = [&](MeshGroup group) { return members_of(mesh_groups[(size_t)group], rank, shape); };
    switch (what) {
    case Replicated::weights:
        return group_of(rank, cut_params ? replica_axes : replica_axes | shard_axes, shape);
    case Replicated::state:
        return group(MeshGroup::replica);
    case Replicated::copies:
        return group(MeshGroup::tensor);
    case Replicated::head_copies:
        return group(MeshGroup::copies);
    case Replicated::embeddings:
        return tied ? group(MeshGroup::embedding) : std::vector{rank};
    }
    __builtin_unreachable();
}

// ----------------------------------------------------------------------------
// the check

class ReplicaCheck {
public:
    // The state must have room for hashes (ZeroSettings::checks).
    ReplicaCheck(const ZeroState& state, const Contributors& parts, const World& world)
        : state_(state), parts_(parts), world_(world) {}

    // For all ranks, while nothing works on the state: returns what is wrong in one line, or an empty text.
    std::string find() const {
        uint64_t mine[held_alike];
        hash_all(mine);
        // The first rank reports which groups disagree: a letter for each rank and kind of memory.
        std::string disagree = world_.agree(bytes_of(mine, sizeof mine), [&](auto& texts) {
            std::string letters((size_t)world_.size() * held_alike, '-');
            each_group([&](int what, const std::vector<int>& ranks) {
                std::vector<uint64_t> values;
                for (int rank : ranks) values.push_back(hash_in(texts[(size_t)rank], what));
                if (odd_members(values).empty()) return;
                for (int rank : ranks) letters[(size_t)(rank * held_alike + what)] = 'x';
            });
            return letters.find('x') == letters.npos ? "" : letters;
        });
        return disagree.empty() ? "" : name_odd(disagree);
    }

private:
    static std::string bytes_of(const void* data, size_t bytes) { return {(const char*)data, bytes}; }
    static uint64_t hash_in(const std::string& bytes, int at) {
        uint64_t hash;
        memcpy(&hash, bytes.data() + (size_t)at * sizeof hash, sizeof hash);
        return hash;
    }

    std::vector<ReplicatedPiece> replicated(bool by_tensor) const {
        std::vector<ReplicatedPiece> pieces;
        for (const Stateful* part : parts_) {
            for (ReplicatedPiece& piece : part->replicated(by_tensor)) pieces.push_back(std::move(piece));
        }
        return pieces;
    }

    std::vector<int> holders(int what, int rank) const {
        return replica_group(Replicated(what), rank, state_.mesh().shape, state_.cuts_params(),
                             state_.layout().tied);
    }

    // Calls visit(what, ranks) for each group of more than one rank.
    template <typename Visit>
    void each_group(Visit&& visit) const {
        for (int what = 0; what < held_alike; what++) {
            std::vector<bool> seen((size_t)world_.size());
            for (int rank = 0; rank < world_.size(); rank++) {
                if (seen[(size_t)rank]) continue;
                std::vector<int> ranks = holders(what, rank);
                for (int member : ranks) seen[(size_t)member] = true;
                if (ranks.size() > 1) visit(what, ranks);
            }
        }
    }

    uint64_t hash(const ReplicatedPiece& piece) const {
        if (piece.on_host) return hash_of_bytes_cpu((const uint8_t*)piece.begin, piece.bytes, 0);
        uint64_t value;
        hash_bytes(state_.hashes(), piece.begin, piece.bytes, state_.stream());
        copy_to_host(&value, state_.hashes(), 1, state_.stream(), state_.mesh());
        return value;
    }

    // For each kind of memory, computes the sum of its pieces' hashes. A piece's hash depends on the piece's
    // place, so that swapped pieces change the sum.
    void hash_all(uint64_t* sums) const {
        constexpr uint64_t far_apart = (uint64_t)1 << 40;
        cudaStream_t stream = state_.stream();
        zero_async(state_.hashes(), held_alike, stream);
        bool alone[held_alike];
        for (int what = 0; what < held_alike; what++) alone[what] = holders(what, world_.rank()).size() == 1;
        uint64_t of_host[held_alike] = {}, place = 0;
        for (const ReplicatedPiece& piece : replicated(false)) {
            int what = (int)piece.what;
            place += far_apart;
            if (alone[what]) continue;
            if (piece.on_host)
                of_host[what] += hash_of_bytes_cpu((const uint8_t*)piece.begin, piece.bytes, place);
            else
                add_hash(state_.hashes() + what, piece.begin, piece.bytes, place, stream);
        }
        copy_to_host(sums, state_.hashes(), held_alike, stream, state_.mesh());
        for (int what = 0; what < held_alike; what++) sums[what] += of_host[what];
    }

    // For all ranks: the members of groups that disagree report hashes of what they hold, tensor by tensor.
    std::string name_odd(const std::string& disagree) const {
        // by kind of memory, because the members of a group may be in different groups for other kinds
        const nlohmann::json none(held_alike, nlohmann::json::array());
        nlohmann::json told = {{"place", process_place()}, {"names", none}, {"hashes", none}};
        for (const ReplicatedPiece& piece : replicated(true)) {
            auto what = (size_t)piece.what;
            if (disagree[(size_t)(world_.rank() * held_alike) + what] != 'x') continue;
            told["names"][what].push_back(piece.name);
            told["hashes"][what].push_back(hash(piece));
        }
        return world_.agree(told.dump(), [&](auto& texts) {
            std::string line;
            each_group([&](int what, const std::vector<int>& ranks) {
                if (disagree[(size_t)(ranks[0] * held_alike + what)] != 'x') return;
                std::vector<nlohmann::json> members;
                for (int rank : ranks) members.push_back(nlohmann::json::parse(texts[(size_t)rank]));
                line += (line.empty() ? "" : "; ") + sentence(what, members);
            });
            return line;
        });
    }

    // Names the members of a group whose bits are not those of the majority, and the tensors that differ.
    static std::string sentence(int what, const std::vector<nlohmann::json>& members) {
        std::map<int, std::vector<std::string>> odd;  // tensors, by member
        const nlohmann::json& names = members[0]["names"][(size_t)what];
        for (size_t piece = 0; piece < names.size(); piece++) {
            std::vector<uint64_t> values;
            for (const nlohmann::json& member : members)
                values.push_back(member["hashes"][(size_t)what][piece]);
            for (int member : odd_members(values)) odd[member].push_back(names[piece]);
        }
        std::string line;
        for (auto& [member, tensors] : odd) {
            constexpr size_t most = 3;
            std::string list;
            for (size_t i = 0; i < std::min(most, tensors.size()); i++) list += (i ? ", " : "") + tensors[i];
            if (tensors.size() > most) list += text(" and %zu more", tensors.size() - most);
            line += (line.empty() ? "" : "; ") + members[(size_t)member]["place"].get<std::string>() +
                    ": its " + name_of_held[what] + " differ from those of " +
                    (2 * odd.size() < members.size() ? text("%zu ranks", members.size() - odd.size())
                                                     : "the others (no majority shows which are right)") +
                    " in " + list;
        }
        return line;
    }

    const ZeroState& state_;
    const Contributors& parts_;
    const World& world_;
};

// ----------------------------------------------------------------------------
// replaying a micro-batch on two ranks
//
// --check-replay checks that data ranks compute the same gradients from the same micro-batch. A device that
// computes wrongly before gradients are summed gives all replicas the same wrong weights, so comparing what
// they hold cannot find it. But in this program the same work gives the same bits on any device. So every N
// steps, in addition to training, each data rank processes two micro-batches of the next step: its own first
// one, and that of the next data rank in a ring.
//
//     data rank      0       1       2       3
//     processes      0, 1    1, 2    2, 3    3, 0        two ranks process each micro-batch
//
// Each rank hashes the gradients of each unit (kernels/hash.cuh) after the backward pass has computed them
// and before they are summed over ranks, so the check works at every --zero level: it keeps only one number
// for each unit. If a rank disagrees with both of its neighbors, only that rank is named; if just two
// neighbors disagree, both are named. Tensor ranks and pipeline stages process a micro-batch together, so an
// error of one of them also shows on those that work with it.
//
// The check finds devices that compute wrongly always or often. It finds a single error only if that occurs
// in these extra passes.

// Returns the rank that follows this one in its ring of data ranks.
inline int next_in_ring(int rank, const MeshShape& shape) {
    MeshPosition at = position_of(rank, shape);
    int next = (index_along(data_axes, at, shape) + 1) % shape.along(data_axes);
    return rank_of(moved_along(data_axes, next, at, shape), shape);
}

class ReplayCheck {
public:
    // The state must have room for hashes (ZeroSettings::checks).
    ReplayCheck(ZeroState& state, const World& world) : state_(state), world_(world) {}

    // Called after a unit's gradients have been computed and before they are hashed; a test corrupts them
    // here.
    std::function<void(int unit)> before_hash;

    // For all ranks, between steps: returns what is wrong, in one line; empty if nothing is.
    // gradients(data_rank) computes the gradients of that data rank's micro-batch, starting from zeros.
    template <typename Gradients>
    std::string find(Gradients&& gradients) {
        int mine = state_.mesh().data_rank(), next = (mine + 1) % state_.mesh().data_ranks();
        std::vector<uint64_t> own = hashes_of([&] { gradients(mine); });
        std::vector<uint64_t> others = hashes_of([&] { gradients(next); });
        const uint64_t sums[2] = {sum(own), sum(others)};
        std::string wrong = world_.agree({(const char*)sums, sizeof sums}, [&](auto& texts) {
            // a letter for each rank: whether it disagrees with the one after it
            std::string letters((size_t)world_.size(), '-');
            for (int rank = 0; rank < world_.size(); rank++) {
                if (hash_in(texts, rank, 1) != hash_in(texts, behind(rank), 0)) letters[(size_t)rank] = 'x';
            }
            return letters.find('x') == letters.npos ? "" : letters;
        });
        return wrong.empty() ? "" : name_odd(wrong, own, others);
    }

private:
    int behind(int rank) const { return next_in_ring(rank, state_.mesh().shape); }

    static uint64_t hash_in(const std::vector<std::string>& texts, int rank, int at) {
        uint64_t hash;
        memcpy(&hash, texts[(size_t)rank].data() + (size_t)at * sizeof hash, sizeof hash);
        return hash;
    }
    static uint64_t sum(const std::vector<uint64_t>& hashes) {
        uint64_t sum = 0;
        for (size_t unit = 0; unit < hashes.size(); unit++) sum += mix_word(hashes[unit], unit);
        return sum;
    }

    // Returns the hash of each unit's gradients in one pass. If these are computed in two parts, the hash is
    // the sum over both.
    template <typename Pass>
    std::vector<uint64_t> hashes_of(Pass&& pass) {
        std::vector<uint64_t> hashes((size_t)state_.layout().units());
        zero_async(state_.hashes(), hashes.size(), state_.stream());
        state_.watch_gradients([this](int unit) {
            if (before_hash) before_hash(unit);
            add_hash(state_.hashes() + unit, state_.grads(unit),
                     state_.layout().unit_size(unit) * sizeof(float), 0, state_.stream());
        });
        pass();
        state_.watch_gradients(nullptr);
        state_.synchronize();
        copy_to_host(hashes.data(), state_.hashes(), hashes.size(), state_.stream(), state_.mesh());
        return hashes;
    }

    // For all ranks: each reports the hashes of all units, and the first one names the ranks that disagree.
    std::string name_odd(const std::string& wrong, const std::vector<uint64_t>& own,
                         const std::vector<uint64_t>& others) const {
        nlohmann::json told = {{"place", process_place()}, {"own", own}, {"others", others}};
        return world_.agree(told.dump(), [&](auto& texts) {
            std::vector<nlohmann::json> ranks;
            for (const std::string& text : texts) ranks.push_back(nlohmann::json::parse(text));
            auto is_wrong = [&](int rank) { return wrong[(size_t)rank] == 'x'; };
            std::vector<int> before((size_t)world_.size());
            for (int rank = 0; rank < world_.size(); rank++) before[(size_t)behind(rank)] = rank;
            auto with_both = [&](int rank) {
                return state_.mesh().data_ranks() > 2 && is_wrong(rank) && is_wrong(before[(size_t)rank]);
            };
            std::string line;
            auto add = [&](const std::string& sentence) { line += (line.empty() ? "" : "; ") + sentence; };
            auto place = [&](int rank) { return ranks[(size_t)rank]["place"].template get<std::string>(); };
            for (int rank = 0; rank < world_.size(); rank++) {
                int next = behind(rank);
                std::string units =
                    different_units(ranks[(size_t)rank]["others"], ranks[(size_t)next]["own"]);
                if (with_both(rank))
                    add(place(rank) + ": its gradients differ from those of both its neighbors, in " + units);
                if (!is_wrong(rank) || with_both(rank) || with_both(next)) continue;
                add(place(rank) + ", or " + place(next) +
                    ": their gradients of the same micro-batch differ, in " + units);
            }
            return line;
        });
    }

    // Lists units in the order of the backward pass, because an error in one unit spoils those that follow.
    std::string different_units(const nlohmann::json& a, const nlohmann::json& b) const {
        std::string list;
        int last = state_.layout().last_unit(), named = 0, count = 0;
        for (int unit = last; unit >= 0; unit--) {
            if (a[(size_t)unit] == b[(size_t)unit]) continue;
            count++;
            if (named == 3) continue;
            list += (named++ ? ", " : "") + (unit == 0      ? std::string("the embeddings")
                                             : unit == last ? "the head"
                                                            : text("block %d", unit));
        }
        return list + (count > named ? text(" and %d more", count - named) : "");
    }

    ZeroState& state_;
    const World& world_;
};

class FaultChecks {
public:
    FaultChecks(const Options& o, ZeroState& state, const World& world, RunCheckpoints& checkpoints)
        : o_(o), world_(world), state_(state), checkpoints_(checkpoints) {}

    // All ranks call this after step `step`, or before the first step. saves: a checkpoint follows, so the
    // replicas are checked first. gradients: as in ReplayCheck::find().
    template <typename Gradients>
    void run(int step, bool saves, Gradients&& gradients) {
        bool replicas = o_.check_replicas > 0 && (saves || step % o_.check_replicas == 0);
        bool replay = o_.check_replay > 0 && step % o_.check_replay == 0;
        if (!replicas && !replay) return;
        Phase phase("checks");
        state_.synchronize();
        if (replicas)
            judge("--check-replicas", o_.check_replicas, step,
                  ReplicaCheck(state_, checkpoints_.parts(), world_).find());
        if (replay) {
            judge("--check-replay", o_.check_replay, step, ReplayCheck(state_, world_).find(gradients));
        }
        sound_ = step;
    }

private:
    void judge(const char* option, int every, int step, const std::string& found) {
        if (found.empty()) return;
        checkpoints_.forbid_saving();
        std::string sound =
            sound_ < 0 ? "this was the first check" : text("all was well after step %d", sound_);
        world_.fail_on_all(text("%s %d, after step %d: %s; %s, and nothing is saved; resume without that "
                                "device, from a checkpoint known to be good",
                                option, every, step, found.c_str(), sound.c_str()),
                           exit_failed_part);
    }

    const Options& o_;
    const World& world_;
    ZeroState& state_;
    RunCheckpoints& checkpoints_;
    int sound_ = -1;  // the step of the last check, which found nothing wrong
};
