/*
Learns a byte-pair encoding from text (Gage, 1994; Sennrich, Haddow and Birch, 2016): starting with the 256
bytes, repeatedly makes the most frequent pair of adjacent tokens within words a new token, until the
vocabulary reaches its size. Ties are broken in favor of the smaller ids, as in the BpeTrainer of Hugging Face
tokenizers, so the same words give the same tokens in both.

The distinct words are concatenated in one array, and each pair has a list of the places where it occurs, so
the cost of a merge is proportional to what it changes. Two facts keep this simple. All occurrences of a pair
appear in the same step, when the later of its two tokens is made. And each byte string is made by at most one
merge: no merge crosses the ends of a future token, so the bytes within it are always merged in the same way.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <numeric>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "data/tokenizer/byte_alphabet.h"
#include "data/base/error.h"
#include "data/tokenizer/word_counts.h"

struct BpeTrainingOptions {
    int vocab_size = 8192;   // includes the 256 bytes, but not special tokens
    uint64_t min_count = 2;  // rarer pairs are not merged, so the vocabulary may stay smaller
    std::function<void(int tokens)> progress;  // called after every merge
};

struct TrainedBpe {
    std::vector<std::string> tokens;          // by id
    std::vector<std::pair<int, int>> merges;  // by rank; the i-th makes token 256 + i
};

// Returns the bytes by id. As in GPT-2, they are sorted by their characters in the byte alphabet.
inline std::array<uint8_t, 256> bytes_by_id() {
    std::array<uint8_t, 256> bytes;
    std::iota(bytes.begin(), bytes.end(), 0);
    std::sort(bytes.begin(), bytes.end(), [](int a, int b) { return byte_alphabet[a] < byte_alphabet[b]; });
    return bytes;
}

class BpeTrainer {
public:
    BpeTrainer(const WordCounts& words, const BpeTrainingOptions& options) : options_(options) {
        if (options_.vocab_size < 256) {
            fail("vocabulary of %d: is too small for the 256 bytes; raise it (8192 is common for a small "
                 "model)",
                 options_.vocab_size);
        }
        options_.min_count = std::max<uint64_t>(options_.min_count, 1);
        for (uint8_t byte : bytes_by_id()) trained_.tokens.emplace_back(1, (char)byte);
        lay_out(words);
        count_bytes();
    }

    TrainedBpe train() {
        while ((int)trained_.tokens.size() < options_.vocab_size && !queue_.empty()) {
            Candidate best = queue_.top();
            queue_.pop();
            Pair& pair = pairs_.at(best.pair);
            if (pair.count != best.count) {  // it has lost occurrences since it was queued
                if (pair.count >= options_.min_count)
                    queue_.push({pair.count, best.pair});
                else
                    pairs_.erase(best.pair);
                continue;
            }
            std::vector<uint32_t> places = std::move(pair.places);
            pairs_.erase(best.pair);
            merge((int)(best.pair >> 32), (int)(uint32_t)best.pair, places);
            if (options_.progress) options_.progress((int)trained_.tokens.size());
        }
        return std::move(trained_);
    }

private:
    struct Pair {
        uint64_t count = 0;
        std::vector<uint32_t> places;  // positions of its left token, ascending; some may be stale
    };

    struct Candidate {
        uint64_t count, pair;
        bool operator<(const Candidate& other) const {
            return count != other.count ? count < other.count : pair > other.pair;
        }
    };

    // A pair that appears in this step, in a table indexed by its other token.
    struct NewPair {
        uint64_t count = 0;
        std::vector<uint32_t> places;
    };

    static constexpr int32_t border = -1, inside = -2;
    static uint64_t key(int left, int right) { return (uint64_t)left << 32 | (uint32_t)right; }

    // Words of one byte contain no pair, and are left out.
    void lay_out(const WordCounts& words) {
        uint64_t size = 1;
        for (const WordCounts::Entry& word : words.entries()) {
            if (word.length > 1) size += word.length + 1;
        }
        if (size > UINT32_MAX) {
            fail("the text: has %llu bytes of distinct words, more than the limit of 4 GiB; use less of it",
                 (unsigned long long)size);
        }
        std::array<int32_t, 256> id_of;
        for (int id = 0; uint8_t byte : bytes_by_id()) id_of[byte] = id++;
        ids_.reserve(size);
        word_of_.reserve(size);
        ids_.push_back(border);
        word_of_.push_back(0);
        for (const WordCounts::Entry& word : words.entries()) {
            if (word.length <= 1) continue;
            for (uint8_t byte : words.text_of(word)) ids_.push_back(id_of[byte]);
            ids_.push_back(border);
            word_of_.resize(ids_.size(), (uint32_t)counts_.size());
            counts_.push_back(word.count);
        }
    }

    void count_bytes() {
        std::vector<Pair> found(256 * 256);
        for (uint32_t at = 0; at + 1 < ids_.size(); at++) {
            if (ids_[at] == border || ids_[at + 1] == border) continue;
            Pair& pair = found[(size_t)(ids_[at] * 256 + ids_[at + 1])];
            pair.count += counts_[word_of_[at]];
            pair.places.push_back(at);
        }
        for (int i = 0; i < 256 * 256; i++) enter(key(i / 256, i % 256), std::move(found[(size_t)i]));
    }

    void enter(uint64_t pair, Pair&& found) {
        if (found.count < options_.min_count) return;
        found.places.shrink_to_fit();
        queue_.push({found.count, pair});
        pairs_.emplace(pair, std::move(found));
    }

    // Merges left and right into one token at all these places.
    void merge(int left, int right, const std::vector<uint32_t>& places) {
        int made = (int)trained_.tokens.size();
        trained_.merges.push_back({left, right});
        trained_.tokens.push_back(trained_.tokens[(size_t)left] + trained_.tokens[(size_t)right]);
        lost_before_.resize((size_t)made + 1), lost_after_.resize((size_t)made + 1);
        new_before_.resize((size_t)made + 1), new_after_.resize((size_t)made + 1);
        neighbours_.clear();
        uint32_t left_size = (uint32_t)trained_.tokens[(size_t)left].size();
        uint32_t size = (uint32_t)trained_.tokens[(size_t)made].size();

        for (uint32_t at : places) {
            uint32_t middle = at + left_size, end = at + size;
            if (ids_[at] != left || ids_[middle] != right) continue;
            uint64_t count = counts_[word_of_[at]];
            int32_t before = ids_[at - 1], after = ids_[end];
            ids_[middle - 1] = ids_[middle] = inside;
            ids_[at] = ids_[end - 1] = made;
            if (before == made) {  // earlier in this step this pair was (made, left)
                new_after_[(size_t)left].count -= count;
                add_new(new_after_, made, at - size, count);
            } else if (before != border) {
                lost_before_[(size_t)before] += count;
                add_new(new_before_, before, at - (uint32_t)trained_.tokens[(size_t)before].size(), count);
            }
            if (after != border) {
                lost_after_[(size_t)after] += count;
                add_new(new_after_, after, at, count);
            }
        }
        settle(left, right, made);
    }

    void add_new(std::vector<NewPair>& table, int32_t neighbour, uint32_t place, uint64_t count) {
        NewPair& pair = table[(size_t)neighbour];
        if (pair.places.empty()) neighbours_.push_back(neighbour);
        pair.count += count;
        pair.places.push_back(place);
    }

    // Applies the changes of a step to the table of pairs.
    void settle(int left, int right, int made) {
        std::sort(neighbours_.begin(), neighbours_.end());
        neighbours_.erase(std::unique(neighbours_.begin(), neighbours_.end()), neighbours_.end());
        for (int32_t neighbour : neighbours_) {
            lose(key(neighbour, left), std::exchange(lost_before_[(size_t)neighbour], 0));
            lose(key(right, neighbour), std::exchange(lost_after_[(size_t)neighbour], 0));
            NewPair before = std::exchange(new_before_[(size_t)neighbour], {});
            NewPair after = std::exchange(new_after_[(size_t)neighbour], {});
            enter(key(neighbour, made), {before.count, std::move(before.places)});
            enter(key(made, neighbour), {after.count, std::move(after.places)});
        }
    }

    void lose(uint64_t pair, uint64_t count) {
        if (count == 0) return;
        auto found = pairs_.find(pair);
        if (found != pairs_.end()) found->second.count -= count;
    }

    BpeTrainingOptions options_;
    TrainedBpe trained_;
    // The id of a token is stored at its first and last byte, where its neighbors look for it.
    std::vector<int32_t> ids_;       // borders lie between words
    std::vector<uint32_t> word_of_;  // word of each byte
    std::vector<uint64_t> counts_;   // how often each word occurs
    std::unordered_map<uint64_t, Pair> pairs_;
    std::priority_queue<Candidate> queue_;  // stale counts may be too large, never too small
    // Changes of a step, indexed by the token on the other side; all zero between steps.
    std::vector<uint64_t> lost_before_, lost_after_;
    std::vector<NewPair> new_before_, new_after_;
    std::vector<int32_t> neighbours_;
};

inline TrainedBpe train_bpe(const WordCounts& words, const BpeTrainingOptions& options) {
    return BpeTrainer(words, options).train();
}
