/*
Chooses the next token from its logits. The filters have the same order and meaning as those of `generate` in
Hugging Face transformers:

    repetition penalty, temperature, top-k, top-p, min-p

Each filter acts on what the previous ones have left, with its probabilities renormalized to sum to 1. The
last step takes the token at which the running sum of the probabilities, in the order of token ids, exceeds u:
a choice is a function of its arguments, so a run with the same numbers u writes the same text.

This runs on the host, because the work is a few passes over the vocabulary. Only the tokens that top-p keeps
are sorted.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "data/base/error.h"

struct Sampling {
    float temperature = 1;  // divides the logits; 0: always the likeliest token (the lowest id among equals)
    int top_k = 0;          // only the k likeliest, and those as likely as the k-th; 0: all
    float top_p = 1;        // only the likeliest whose sum reaches this, at least one; 1: all
    float min_p = 0;        // only those at least this likely, relative to the likeliest; 0: all
    float repetition_penalty = 1;  // above 1: tokens seen before become less likely; 1: no effect
};

// Penalizes the logit of each token in `seen`, once however often it occurs: divides it by the penalty if it
// is positive, and multiplies it otherwise.
inline void penalize_repetition(std::vector<float>& logits, float penalty, std::span<const int> seen) {
    std::vector<bool> done(logits.size());
    for (int token : seen) {
        if (done[token]) continue;
        done[token] = true;
        logits[token] = logits[token] > 0 ? logits[token] / penalty : logits[token] * penalty;
    }
}

// Sets all weights to 0 except those of the likeliest tokens whose sum reaches top_p of the total. Among
// equal weights, the lowest token comes first.
inline void keep_top_p(std::vector<float>& weights, float top_p) {
    std::vector<int> heap;
    double total = 0;
    for (int i = 0; i < (int)weights.size(); i++) {
        if (weights[i] > 0) heap.push_back(i);
        total += weights[i];
    }
    auto after = [&](int i, int j) { return weights[i] != weights[j] ? weights[i] < weights[j] : i > j; };
    std::make_heap(heap.begin(), heap.end(), after);
    auto rest_end = heap.end();  // [begin, rest_end) is a heap of the tokens that are not kept so far
    double sum = 0;
    do {
        sum += weights[heap.front()];
        std::pop_heap(heap.begin(), rest_end--, after);
    } while (rest_end != heap.begin() && sum < top_p * total);
    for (auto i = heap.begin(); i != rest_end; i++) weights[*i] = 0;
}

// Returns the probability of each token relative to the likeliest (1), and 0 for those that are filtered out.
// `logits` (V) are those of the model, and `seen` holds the tokens of the prompt and of the text so far.
// Temperature 0 leaves one token. Fails if a logit is NaN or +Inf, or if all are -Inf.
inline std::vector<float> token_weights(std::vector<float> logits, const Sampling& sampling,
                                        std::span<const int> seen) {
    if (sampling.repetition_penalty != 1) penalize_repetition(logits, sampling.repetition_penalty, seen);
    for (size_t i = 0; i < logits.size(); i++) {
        if (!(logits[i] < INFINITY)) {
            fail("the logit of token %zu is %f; the weights are damaged, or too large for this precision", i,
                 logits[i]);
        }
    }
    auto likeliest = std::max_element(logits.begin(), logits.end());
    float largest = *likeliest;
    if (largest == -INFINITY)
        fail("all logits are -inf; the weights are damaged, or too large for this precision");

    std::vector<float> weights(logits.size());
    if (sampling.temperature <= 0) {
        weights[likeliest - logits.begin()] = 1;
        return weights;
    }
    float threshold = -INFINITY;
    if (sampling.top_k > 0 && sampling.top_k < (int)logits.size()) {
        std::vector<float> sorted = logits;
        auto kth = sorted.begin() + (sampling.top_k - 1);
        std::nth_element(sorted.begin(), kth, sorted.end(), std::greater<>());
        threshold = *kth;
    }
    for (size_t i = 0; i < logits.size(); i++) {
        if (logits[i] >= threshold) weights[i] = std::exp((logits[i] - largest) / sampling.temperature);
    }
    if (sampling.top_p < 1) keep_top_p(weights, sampling.top_p);
    for (float& weight : weights) {
        if (weight < sampling.min_p) weight = 0;
    }
    return weights;
}

// Chooses a token from its logits (V), with u uniform in [0, 1). `seen` holds the tokens of the prompt and of
// the text so far, all below V. Fails as token_weights does.
inline int choose_token(std::vector<float> logits, const Sampling& sampling, std::span<const int> seen,
                        float u) {
    std::vector<float> weights = token_weights(std::move(logits), sampling, seen);
    double total = 0;
    for (float weight : weights) total += weight;
    double remaining = u * total;  // the sum of all weights exceeds it, because u is below 1
    int token = 0, last = (int)weights.size() - 1;
    while (token < last && (remaining -= weights[token]) >= 0) token++;
    return token;
}
