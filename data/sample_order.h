/*
Which tokens a sample is made of, as a function of (seed, global sample index) alone: not of ranks,
micro-batches or where a run was interrupted. A sample is T inputs and their T successors: T+1 tokens of one
shard, at stride T, so each token but a shard's first is predicted once per epoch. Epoch e is samples e*S ..
(e+1)*S-1 of the run, S samples in all, each once, in an order that changes with the epoch.

The order is a permutation computed one element at a time, with no table: a Feistel network over the next
power of two (every half-round is a bijection whatever its function is), applied again to results that fall
outside 0 .. S-1 ("cycle walking"; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
*/
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "data/error.h"
#include "data/token_shards.h"
#include "kernels/random.cuh"

// A pseudo-random permutation of 0 .. n-1, chosen by key.
class Permutation {
public:
    Permutation(uint64_t n, uint64_t key) : n_(n), key_(key) {
        // A network over fewer bits than 8 does not mix well, and small sets can afford the longer walk.
        int bits = std::max(8, (int)std::bit_width(n - 1));
        low_bits_ = (bits + 1) / 2;
        low_mask_ = (uint64_t(1) << low_bits_) - 1;
        high_mask_ = (uint64_t(1) << (bits - low_bits_)) - 1;
    }

    uint64_t operator()(uint64_t i) const {
        do i = scramble(i);
        while (i >= n_);
        return i;
    }

private:
    uint64_t scramble(uint64_t i) const {
        constexpr uint64_t rounds = 4;
        uint64_t low = i & low_mask_, high = i >> low_bits_;
        for (uint64_t round = 0; round < rounds; round++) {
            Random4 random = philox(key_, round << 32 | low);
            high ^= random.at[0] & high_mask_;
            random = philox(~key_, round << 32 | high);
            low ^= random.at[0] & low_mask_;
        }
        return high << low_bits_ | low;
    }

    uint64_t n_, key_;
    int low_bits_;
    uint64_t low_mask_, high_mask_;  // at most 32 bits each
};

enum class SampleOrder { shuffled, sequential };

// Serves samples by global index. All of it may be called by several threads at once.
class TokenLoader {
public:
    // `list` as in files_named(). Sequential order, for validation, is the same in every epoch.
    TokenLoader(const std::string& list, int vocab, int T, SampleOrder order, uint64_t seed = 0)
        : shards_(list, vocab), T_(T), order_(order), key_(random_key(seed, "data order")) {
        for (size_t i = 0; i < shards_.size(); i++) {
            first_sample_.push_back(samples_);
            uint64_t samples = (uint64_t)(shards_[i].count() - 1) / (uint64_t)T;
            if (samples == 0) too_short_.push_back(shards_[i].path());
            samples_ += samples;
        }
        if (samples_ == 0) fail_too_short();
    }

    uint64_t samples_per_epoch() const { return samples_; }
    uint64_t epoch(uint64_t sample) const { return sample / samples_; }
    const TokenShards& shards() const { return shards_; }
    // Shards that hold no sample of T+1 tokens and are never read.
    const std::vector<std::string>& too_short() const { return too_short_; }

    struct Place {
        size_t shard;
        int64_t token;  // of the shard, where the sample begins
    };

    // Where sample number `sample` of the run lies.
    Place place(uint64_t sample) const {
        uint64_t i = sample % samples_;
        if (order_ == SampleOrder::shuffled) {
            Random4 random = philox(key_, epoch(sample));
            i = Permutation(samples_, (uint64_t)random.at[0] << 32 | random.at[1])(i);
        }
        auto next = std::upper_bound(first_sample_.begin(), first_sample_.end(), i);
        size_t shard = (size_t)(next - first_sample_.begin()) - 1;
        return {shard, (int64_t)((i - first_sample_[shard]) * (uint64_t)T_)};
    }

    void load(uint64_t sample, int* inputs /* (T) */, int* targets /* (T) */) const {
        auto [shard, token] = place(sample);
        shards_.copy(shard, token, T_, inputs);
        shards_.copy(shard, token + 1, T_, targets);
    }

private:
    [[noreturn]] void fail_too_short() const {
        size_t longest = 0;
        for (size_t i = 0; i < shards_.size(); i++) {
            if (shards_[i].count() > shards_[longest].count()) longest = i;
        }
        fail("%s: has %lld tokens%s, and a sample takes %d; use more text or a shorter --sequence-length",
             shards_[longest].path().c_str(), (long long)shards_[longest].count(),
             shards_.size() > 1 ? ", the most of all shards" : "", T_ + 1);
    }

    TokenShards shards_;
    int T_;
    SampleOrder order_;
    uint64_t key_;
    uint64_t samples_ = 0;                // per epoch
    std::vector<uint64_t> first_sample_;  // of each shard, in sequential order
    std::vector<std::string> too_short_;
};
