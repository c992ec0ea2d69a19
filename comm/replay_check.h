/*
--check-replay: whether data ranks make the same gradients of the same micro-batch. A device that computes
wrongly before gradients are summed gives all replicas the same wrong weights, which no comparison of what
they hold can find (comm/replica_check.h). But here the same work gives the same bits on any device, so every
N steps each data rank goes through two micro-batches of the next step beside the training: its own first one,
and that of the data rank behind it, in a ring.

    data rank      0       1       2       3
    goes through   0, 1    1, 2    2, 3    3, 0        each micro-batch is gone through by two ranks

Of the gradients of each unit there is a hash (kernels/hash.cuh), taken where the backward pass has made them
and before any are summed over ranks, so it works at every --zero level: nothing is kept but a number for each
unit. A rank that disagrees with both its neighbours is named alone; where two disagree and nobody else does,
or there are but two, both are named. Tensor ranks and pipeline stages make a micro-batch together, so what
one of them spoils shows on those that work with it as well.

It finds devices that are wrong always or often; of what goes wrong once in a step, it sees those passes
alone.
*/
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/mesh.h"       // MeshShape, position_of, rank_of
#include "comm/placement.h"  // process_place
#include "comm/watch.h"      // copy_to_host
#include "comm/world.h"      // World
#include "comm/zero.h"       // ZeroState
#include "kernels/hash.cuh"  // add_hash, mix_word

// The data rank behind that of this rank, in its ring.
inline int next_in_ring(int rank, const MeshShape& shape) {
    MeshPosition at = position_of(rank, shape);
    int next = (at.replica * shape.shard + at.shard + 1) % shape.dp;
    at.replica = next / shape.shard, at.shard = next % shape.shard;
    return rank_of(at, shape);
}

class ReplayCheck {
public:
    // The state has room for hashes (ZeroSettings::checks).
    ReplayCheck(ZeroState& state, const World& world) : state_(state), world_(world) {}

    // When gradients of a unit are made, and before their hash is: where a test does damage.
    std::function<void(int unit)> before_hash;

    // For all ranks, between steps: what is wrong, in one line; empty: nothing is. gradients(data_rank) makes
    // those of that data rank's micro-batch, of zeros.
    template <typename Gradients>
    std::string find(Gradients&& gradients) {
        int mine = state_.mesh().data_rank(), next = (mine + 1) % state_.mesh().shape.dp;
        std::vector<uint64_t> own = hashes_of([&] { gradients(mine); });
        std::vector<uint64_t> others = hashes_of([&] { gradients(next); });
        const uint64_t sums[2] = {sum(own), sum(others)};
        std::string wrong = world_.agree({(const char*)sums, sizeof sums}, [&](auto& texts) {
            // a letter for each rank and the one behind it
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

    // The hashes of each unit's gradients, as one pass makes them. If they are made in two parts, both count.
    template <typename Pass>
    std::vector<uint64_t> hashes_of(Pass&& pass) {
        std::vector<uint64_t> hashes((size_t)state_.layout().units());
        cudaCheck(cudaMemsetAsync(state_.hashes(), 0, hashes.size() * sizeof(uint64_t), state_.stream()));
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

    // For all ranks: those that disagree with a neighbour tell the hashes of all units.
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
                return state_.mesh().shape.dp > 2 && is_wrong(rank) && is_wrong(before[(size_t)rank]);
            };
            std::string line;
            auto add = [&](const std::string& sentence) { line += (line.empty() ? "" : "; ") + sentence; };
            auto place = [&](int rank) { return ranks[(size_t)rank]["place"].template get<std::string>(); };
            for (int rank = 0; rank < world_.size(); rank++) {
                int next = behind(rank);
                std::string units =
                    different_units(ranks[(size_t)rank]["others"], ranks[(size_t)next]["own"]);
                if (with_both(rank))
                    add(place(rank) + ": it makes other gradients than both its neighbours, in " + units);
                if (!is_wrong(rank) || with_both(rank) || with_both(next)) continue;
                add(place(rank) + ", or " + place(next) +
                    ": of the same micro-batch they make other gradients, in " + units);
            }
            return line;
        });
    }

    // In the order of the backward pass: what is wrong in one of them is wrong in those that follow.
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
