// Choosing tokens: golden probabilities of Hugging Face transformers, documented edge cases, counted choices.
#include "test/support/file_testing.h"

#include <cmath>
#include <map>
#include <numeric>

#include <nlohmann/json.hpp>

#include "kernels/random.cuh"
#include "data/commands/sampler.h"

using Logits = std::vector<float>;

static std::vector<int> kept(const std::vector<float>& weights) {
    std::vector<int> tokens;
    for (int i = 0; i < (int)weights.size(); i++) {
        if (weights[i] > 0) tokens.push_back(i);
    }
    return tokens;
}

using Tokens = std::vector<int>;

static Tokens kept(const Logits& logits, const Sampling& sampling, const Tokens& seen = {}) {
    return kept(token_weights(logits, sampling, seen));
}

static Logits logs(const std::vector<double>& probabilities) {
    Logits logits;
    for (double p : probabilities) logits.push_back((float)std::log(p));
    return logits;
}

// Made by test/golden/make_sampler_golden.py.
TEST_CASE("sampler: the probabilities of transformers") {
    std::ifstream file("test/golden/sampler.json");
    REQUIRE(file.good());
    nlohmann::json cases = nlohmann::json::parse(file);
    REQUIRE(cases.size() > 80);
    for (const auto& c : cases) {
        Sampling sampling{.temperature = c["temperature"],
                          .top_k = c["top_k"],
                          .top_p = c["top_p"],
                          .min_p = c["min_p"],
                          .repetition_penalty = c["repetition_penalty"]};
        std::vector<float> weights =
            token_weights(c["logits"].get<Logits>(), sampling, c["seen"].get<Tokens>());
        double total = std::accumulate(weights.begin(), weights.end(), 0.0), worst = 0;
        std::vector<double> want = c["probabilities"];
        REQUIRE(weights.size() == want.size());
        bool same_kept = true;
        for (size_t i = 0; i < want.size(); i++) {
            same_kept &= (weights[i] > 0) == (want[i] > 0);
            if (want[i] > 0) worst = std::max(worst, std::fabs(weights[i] / total / want[i] - 1));
        }
        CAPTURE(c.dump());
        CHECK(same_kept);
        CHECK(worst < 1e-5);
    }
}

TEST_CASE("sampler: temperature 0 takes the likeliest, the lowest of equals") {
    Sampling greedy{.temperature = 0};
    for (float u : {0.0f, 0.5f, 0.99999994f}) {
        CHECK(choose_token({1, 3, 2, 3}, greedy, {}, u) == 1);
        CHECK(choose_token({-INFINITY, -5, -5}, greedy, {}, u) == 1);
        CHECK(choose_token({7}, greedy, {}, u) == 0);
    }
    Tokens seen{1, 3};
    CHECK(choose_token({1, 3, 2, 3}, {.temperature = 0, .repetition_penalty = 2}, seen, 0.5f) == 2);
    // A tiny temperature acts like 0, and no number overflows.
    for (float temperature : {1e-3f, 1e-38f, 1e-45f}) {
        CHECK(choose_token({-100, 3, 2.9f, -INFINITY}, {.temperature = temperature}, {}, 0.999f) == 1);
    }
}

TEST_CASE("sampler: top-k keeps what is as likely as the k-th") {
    Logits logits{1, 5, 3, 3, 4, -INFINITY};
    CHECK(kept(logits, {.top_k = 1}) == Tokens{1});
    CHECK(kept(logits, {.top_k = 2}) == Tokens{1, 4});
    CHECK(kept(logits, {.top_k = 3}) == Tokens{1, 2, 3, 4});
    CHECK(kept(logits, {.top_k = 4}) == Tokens{1, 2, 3, 4});
    for (int top_k : {0, 5, 6, 100}) CHECK(kept(logits, {.top_k = top_k}) == Tokens{0, 1, 2, 3, 4});
}

TEST_CASE("sampler: top-p keeps the fewest that reach it") {
    Logits logits = logs({0.1, 0.4, 0.2, 0.05, 0.25});
    CHECK(kept(logits, {.top_p = 0}) == Tokens{1});
    CHECK(kept(logits, {.top_p = 0.39f}) == Tokens{1});
    CHECK(kept(logits, {.top_p = 0.41f}) == Tokens{1, 4});
    CHECK(kept(logits, {.top_p = 0.64f}) == Tokens{1, 4});
    CHECK(kept(logits, {.top_p = 0.66f}) == Tokens{1, 2, 4});
    CHECK(kept(logits, {.top_p = 0.96f}) == Tokens{0, 1, 2, 3, 4});
    CHECK(kept(logits, {.top_p = 1}) == Tokens{0, 1, 2, 3, 4});
    CHECK(kept({2, 2, 2, 2}, {.top_p = 0.5f}) == Tokens{0, 1});  // among equals, the lowest ids are kept
    CHECK(kept({2, 2, 2, 2}, {.top_p = 0.51f}) == Tokens{0, 1, 2});
    CHECK(kept({-INFINITY, 2, -INFINITY}, {.top_p = 0.99f}) == Tokens{1});
}

TEST_CASE("sampler: each filter acts on what the others left") {
    Logits logits = logs({0.1, 0.4, 0.2, 0.05, 0.25});
    // token 1 has probability 0.615 among the two that top-k leaves, and 0.4 among all
    CHECK(kept(logits, {.top_k = 2, .top_p = 0.6f}) == Tokens{1});
    CHECK(kept(logits, {.top_k = 2, .top_p = 0.63f}) == Tokens{1, 4});
    // at temperature 0.5 the probabilities are 1, 16, 4, 0.25 and 6.25, divided by 27.5
    CHECK(kept(logits, {.temperature = 0.5f, .top_p = 0.57f}) == Tokens{1});
    CHECK(kept(logits, {.temperature = 0.5f, .min_p = 0.3f}) == Tokens{1, 4});
    CHECK(kept(logits, {.min_p = 0.3f}) == Tokens{1, 2, 4});
    CHECK(kept(logits, {.min_p = 1}) == Tokens{1});
    CHECK(kept({2, 2, 1}, {.min_p = 1}) == Tokens{0, 1});
    // the penalty is applied first: token 1 falls from first to second place
    CHECK(kept({3, 4, 0}, {.top_k = 1, .repetition_penalty = 2}, {1}) == Tokens{0});
}

TEST_CASE("sampler: a token that was seen is made less likely once") {
    Logits logits{2, -2, 0, 2, 6};
    penalize_repetition(logits, 2, Tokens{0, 1, 2, 0, 0, 1});
    CHECK(logits == Logits{1, -4, 0, 2, 6});
    penalize_repetition(logits, 0.5f, Tokens{4});
    CHECK(logits == Logits{1, -4, 0, 2, 12});
    penalize_repetition(logits, 3, {});
    CHECK(logits == Logits{1, -4, 0, 2, 12});
}

TEST_CASE("sampler: u goes along the tokens by id") {
    Logits logits = logs({0.25, 0.5, 0.25});
    std::map<float, int> choices{{0.0f, 0}, {0.24f, 0}, {0.26f, 1}, {0.74f, 1}, {0.76f, 2}, {0.99999994f, 2}};
    for (auto [u, token] : choices) CHECK(choose_token(logits, {}, {}, u) == token);
    // never a token that was filtered out, at either end
    logits = logs({0.01, 0.5, 0.48, 0.01});
    CHECK(choose_token(logits, {.top_k = 2}, {}, 0.0f) == 1);
    CHECK(choose_token(logits, {.top_k = 2}, {}, 0.99999994f) == 2);
}

TEST_CASE("sampler: what is no number is refused") {
    for (float temperature : {0.0f, 1.0f}) {
        Sampling sampling{.temperature = temperature};
        CHECK_REFUSED(choose_token({1, NAN, 2}, sampling, {}, 0.5f), "the logit of token 1 is nan");
        CHECK_REFUSED(choose_token({-NAN, 1}, sampling, {}, 0.5f), "the logit of token 0 is");
        CHECK_REFUSED(choose_token({1, 2, INFINITY}, sampling, {}, 0.5f), "the logit of token 2 is inf");
        CHECK_REFUSED(choose_token({-INFINITY, -INFINITY}, sampling, {}, 0.5f), "all logits are -inf");
    }
    Tokens seen{0};
    CHECK_REFUSED(choose_token({NAN, 1}, {.repetition_penalty = 2}, seen, 0.5f),
                  "the logit of token 0 is nan");
}

// Draws many tokens and returns Pearson's chi-square of their counts. If they are drawn from `probabilities`,
// it is about the number of possible tokens less one, and above 30 in one of 200,000 runs.
static double chi_square(const Logits& logits, const Sampling& sampling,
                         const std::vector<double>& probabilities) {
    constexpr int draws = 100000;
    std::vector<int> counts(logits.size());
    uint64_t key = random_key(11, "draws");
    for (int i = 0; i < draws; i++) {
        counts[choose_token(logits, sampling, {}, random_uniform(philox(key, i).at[0]))]++;
    }
    double sum = 0;
    for (size_t i = 0; i < counts.size(); i++) {
        if (probabilities[i] == 0) {
            CHECK(counts[i] == 0);
        } else {
            double expected = draws * probabilities[i];
            sum += (counts[i] - expected) * (counts[i] - expected) / expected;
        }
    }
    return sum;
}

TEST_CASE("sampler: tokens are as frequent as they are likely") {
    std::vector<double> p{0.3, 0.02, 0.18, 0.1, 0.4};
    Logits logits = logs(p);
    CHECK(chi_square(logits, {}, p) < 30);
    CHECK(chi_square(logits, {.top_k = 3}, {0.3 / 0.88, 0, 0.18 / 0.88, 0, 0.4 / 0.88}) < 30);
    CHECK(chi_square(logits, {.top_p = 0.65f}, {0.3 / 0.7, 0, 0, 0, 0.4 / 0.7}) < 30);
    std::vector<double> cold;
    double total = 0;
    for (double x : p) total += x * x;
    for (double x : p) cold.push_back(x * x / total);
    CHECK(chi_square(logits, {.temperature = 0.5f}, cold) < 30);
    CHECK(chi_square(logits, {}, cold) > 1000);  // the measure detects a wrong temperature
}

TEST_CASE("sampler: a large vocabulary, with top-p by complete sorting") {
    constexpr int V = 5000;
    uint64_t key = random_key(3, "logits");
    for (float spread : {0.0f, 1.0f, 5.0f}) {
        Logits logits;
        for (int i = 0; i < V; i++) logits.push_back(std::round(8 * spread * random_normal(key, i)) / 8);
        std::vector<float> weights = token_weights(logits, {}, {});
        Tokens order(V);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return weights[i] > weights[j]; });
        double total = std::accumulate(weights.begin(), weights.end(), 0.0);
        for (float top_p : {0.001f, 0.303f, 0.951f}) {
            Tokens want;
            double sum = 0;
            for (int i = 0; i < V && sum < top_p * total; i++) {
                want.push_back(order[i]);
                sum += weights[order[i]];
            }
            std::sort(want.begin(), want.end());
            CHECK(kept(logits, {.top_p = top_p}) == want);
        }
    }
}
