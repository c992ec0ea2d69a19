/*
Computes the table rows that the n-grams of a text look up (kernels/ngram_gate.cuh). They depend only on the
tokens, so the rows that a step needs are known before it begins.

A head of n tokens hashes the n tokens that end with the current one, each multiplied by its own factor; the
hash modulo the head's prime number of rows selects the row. Tokens are folded first: those that are the same
word except for case and a leading space count as one, so that "the", " the" and "The" share what they learn.
The n-gram is shorter at the beginning of a document or text.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "data/options/model_config.h"  // NgramHead, ngram_heads
#include "data/tokenizer/tokenizer.h"
#include "kernels/random.cuh"  // random_key

// Maps each token to the first one that is the same word, ignoring ASCII case and a leading space. Without a
// tokenizer, each token maps to itself.
inline std::vector<uint64_t> folded_tokens(const Tokenizer* tokenizer, int vocab_size) {
    std::vector<uint64_t> folded((size_t)vocab_size);
    std::map<std::string, uint64_t> first;
    for (int token = 0; token < vocab_size; token++) {
        folded[(size_t)token] = (uint64_t)token;
        if (!tokenizer || !tokenizer->has(token)) continue;
        std::string word = tokenizer->token_bytes(token);
        if (word.size() > 1 && word[0] == ' ' && word[1] != ' ') word.erase(0, 1);
        for (char& c : word) c = c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
        folded[(size_t)token] = first.try_emplace(word, token).first->second;
    }
    return folded;
}

// A row of tokens to look up, and the context before its first token.
struct NgramTokens {
    const int* tokens;  // those in [first, first + count) are looked up; `before` more precede tokens[0]
    int count, before = 0;
    // start of each token's document, as an index into `tokens`; null: one document
    const int* doc_start = nullptr;
    int first = 0;
};

// The tokens of `count` micro-batches, from sample `first` on, whose rows are looked up together.
struct Lookups {
    uint64_t first;
    int count;
    std::function<std::vector<NgramTokens>(int micro_batch)> tokens;
    const void* reader = nullptr;  // identifies the data set; null: none

    bool are_those_of(const Lookups& other) const {
        return first == other.first && count == other.count && reader == other.reader;
    }
};

// The lookups of a micro-batch on the device, (B, T, heads) each: the index of each lookup's row among the
// rows of the step, and the lookups sorted by that index.
struct PlacesOfRows {
    const int *of_lookups = nullptr, *in_order = nullptr;
};

class NgramHash {
public:
    // folded: an entry for each token of the vocabulary
    NgramHash(const ModelConfig& c, uint64_t seed, std::vector<uint64_t> folded)
        : seed_(seed), folded_(std::move(folded)), heads_(ngram_heads(c)) {
        for (size_t head = 0; head < heads_.size(); head++) {
            for (int back = 0; back < heads_[head].tokens; back++)
                factors_.push_back(random_key(seed, "n-gram head " + std::to_string(head) + " token " +
                                                        std::to_string(back)) |
                                   1);
        }
    }

    uint64_t seed() const { return seed_; }
    const std::vector<uint64_t>& folded() const { return folded_; }

    // rows (count, heads): the row of each token for heads [first, first + heads).
    void look_up(uint64_t* rows, const NgramTokens& text, int first, int heads) const {
        size_t factor = 0;
        for (int head = 0; head < first; head++) factor += (size_t)heads_[(size_t)head].tokens;
        for (int head = 0; head < heads; head++) {
            const NgramHead& of = heads_[(size_t)(first + head)];
            for (int i = 0; i < text.count; i++) {
                int t = text.first + i;
                int seen = t - (text.doc_start ? text.doc_start[t] : -text.before);
                uint64_t hash = 0;
                for (int back = 0; back < std::min(of.tokens, seen + 1); back++)
                    hash ^= (folded_[(size_t)text.tokens[t - back]] + 1) * factors_[factor + (size_t)back];
                hash = (hash ^ hash >> 33) * 0xff51afd7ed558ccd;
                rows[(size_t)i * (size_t)heads + (size_t)head] = of.first + (hash ^ hash >> 33) % of.rows;
            }
            factor += (size_t)of.tokens;
        }
    }

private:
    uint64_t seed_;
    std::vector<uint64_t> folded_;
    std::vector<NgramHead> heads_;
    std::vector<uint64_t> factors_;  // head by head, from the current token back
};
