// The order of samples: permutations, epochs, and what a sample is made of.
#include "test/file_testing.h"

#include <cmath>
#include <map>
#include <set>
#include <thread>

#include "data/sample_order.h"

// Shards of the given lengths whose tokens count up through all of them.
static std::string counting_shards(const TemporaryFolder& folder, const std::vector<int>& lengths) {
    uint16_t next = 0;
    for (size_t i = 0; i < lengths.size(); i++) {
        std::vector<uint16_t> tokens((size_t)lengths[i]);
        for (uint16_t& token : tokens) token = next++;
        write_file(folder / text("shard%03zu.bin", i), shard_bytes(tokens));
    }
    return folder / "shard*.bin";
}

TEST_CASE("order: a permutation for every size") {
    for (uint64_t n : {1, 2, 3, 5, 8, 100, 255, 256, 257, 1000, 4097}) {
        for (uint64_t key : {1, 2, 3}) {
            Permutation permutation(n, key);
            std::vector<bool> seen(n);
            for (uint64_t i = 0; i < n; i++) {
                uint64_t image = permutation(i);
                REQUIRE(image < n);
                REQUIRE(!seen[image]);
                seen[image] = true;
            }
        }
    }
    for (uint64_t n : {(1ull << 33) + 5, 1ull << 40, (1ull << 52) - 1}) {
        Permutation permutation(n, 1);
        uint64_t upper_half = 0;
        std::set<uint64_t> images;
        for (uint64_t i = 0; i < 1000; i++) {
            images.insert(permutation(i));
            upper_half += permutation(i) >= n / 2;
        }
        CHECK(images.size() == 1000);
        CHECK(*images.rbegin() < n);
        CHECK((upper_half > 400 && upper_half < 600));
    }
}

// chi-square / degrees of freedom is 1 +- sqrt(2 / degrees) for uniform counts.
TEST_CASE("order: permutations are uniform") {
    std::map<std::vector<uint64_t>, int> counts;
    const int expected = 100, possible = 120;
    for (uint64_t key = 0; key < expected * possible; key++) {
        Permutation permutation(5, key);
        std::vector<uint64_t> images;
        for (uint64_t i = 0; i < 5; i++) images.push_back(permutation(i));
        counts[images]++;
    }
    CHECK(counts.size() == possible);
    double chi_square = 0;
    for (const auto& [images, count] : counts) chi_square += std::pow(count - expected, 2) / expected;
    CHECK(chi_square / (possible - 1) == doctest::Approx(1).epsilon(0.5));

    // Each element goes to each place equally often, and its successor does not follow it.
    const size_t n = 100;
    std::vector<int> places(n * n);
    int followed = 0;
    const int keys = 3000;
    for (int key = 0; key < keys; key++) {
        Permutation permutation(n, (uint64_t)key);
        for (size_t i = 0; i < n; i++) {
            places[i * n + permutation(i)]++;
            followed += permutation((i + 1) % n) == (permutation(i) + 1) % n;
        }
    }
    chi_square = 0;
    for (int count : places) chi_square += std::pow(count - keys / (double)n, 2) / (keys / (double)n);
    CHECK(chi_square / ((n - 1) * (n - 1)) == doctest::Approx(1).epsilon(0.06));
    CHECK(followed / (keys * n / (n - 1.0)) == doctest::Approx(1).epsilon(0.1));
}

TEST_CASE("order: each sample exactly once per epoch, in a new order each time") {
    struct Case {
        std::vector<int> lengths;
        int T;
    };
    for (const Case& c : {Case{{100}, 1}, Case{{101}, 10}, Case{{9, 50, 3, 64, 65, 66, 8}, 8},
                          Case{{400, 17, 1000}, 16}, Case{{5, 5}, 4}}) {
        TemporaryFolder folder;
        std::string list = counting_shards(folder, c.lengths);
        std::set<int> expected;  // first tokens of samples
        int shard_begin = 0;
        for (int length : c.lengths) {
            for (int at = 0; at + c.T + 1 <= length; at += c.T) expected.insert(shard_begin + at);
            shard_begin += length;
        }
        for (uint64_t seed : {0, 1, 99}) {
            CAPTURE(seed);
            TokenLoader loader(list, 65536, c.T, SampleOrder::shuffled, seed);
            uint64_t S = loader.samples_per_epoch();
            REQUIRE(S == expected.size());
            std::vector<std::vector<int>> orders;
            for (uint64_t epoch = 0; epoch < 3; epoch++) {
                std::vector<int> order, inputs((size_t)c.T), targets((size_t)c.T);
                for (uint64_t sample = epoch * S; sample < (epoch + 1) * S; sample++) {
                    CHECK(loader.epoch(sample) == epoch);
                    loader.load(sample, inputs.data(), targets.data());
                    order.push_back(inputs[0]);
                    for (int t = 0; t < c.T; t++) {
                        REQUIRE(inputs[(size_t)t] == inputs[0] + t);
                        REQUIRE(targets[(size_t)t] == inputs[0] + t + 1);
                    }
                }
                CHECK(std::set<int>(order.begin(), order.end()) == expected);
                orders.push_back(order);
            }
            if (S > 10) {
                CHECK(orders[0] != orders[1]);
                CHECK(orders[1] != orders[2]);
                CHECK(orders[0] != std::vector<int>(expected.begin(), expected.end()));
            }
        }
    }
}

TEST_CASE("order: depends on the seed and the sample index alone") {
    TemporaryFolder folder;
    const int T = 8;
    std::string list = counting_shards(folder, {900, 700});
    auto first_tokens = [&](uint64_t seed, SampleOrder order, auto&& indices) {
        TokenLoader loader(list, 65536, T, order, seed);
        std::map<uint64_t, int> firsts;
        int inputs[T], targets[T];
        for (uint64_t i : indices) loader.load(i, inputs, targets), firsts[i] = inputs[0];
        return firsts;
    };
    std::vector<uint64_t> forwards, backwards, by_rank;
    for (uint64_t i = 0; i < 240; i++) forwards.push_back(i), backwards.push_back(239 - i);
    for (uint64_t rank = 0; rank < 4; rank++) {
        for (uint64_t i = rank; i < 240; i += 4) by_rank.push_back(i);
    }
    auto reference = first_tokens(5, SampleOrder::shuffled, forwards);
    CHECK(first_tokens(5, SampleOrder::shuffled, backwards) == reference);
    CHECK(first_tokens(5, SampleOrder::shuffled, by_rank) == reference);
    CHECK(first_tokens(6, SampleOrder::shuffled, forwards) != reference);

    // Sequential order ignores the seed and starts again with each epoch.
    auto sequential = first_tokens(5, SampleOrder::sequential, forwards);
    CHECK(first_tokens(6, SampleOrder::sequential, forwards) == sequential);
    uint64_t S = TokenLoader(list, 65536, T, SampleOrder::sequential).samples_per_epoch();
    REQUIRE(S == 112 + 87);
    CHECK(sequential[0] == 0);
    CHECK(sequential[1] == T);
    CHECK(sequential[112] == 900);  // a sample does not cross the border of shards
    CHECK(sequential[S] == 0);
}

// The order is part of what a seed means, so it must not change by accident.
TEST_CASE("order: the first samples of a known run") {
    std::vector<uint64_t> images;
    for (uint64_t i = 0; i < 6; i++) images.push_back(Permutation(1000, 42)(i));
    CHECK(images == std::vector<uint64_t>{208, 5, 12, 997, 891, 536});
}

TEST_CASE("order: threads read the same samples") {
    TemporaryFolder folder;
    const int T = 16;
    TokenLoader loader(counting_shards(folder, {3000, 3000}), 65536, T, SampleOrder::shuffled, 3);
    auto sum = [&loader] {
        uint64_t hash = 0;
        int inputs[T], targets[T];
        for (uint64_t i = 0; i < 1000; i++)
            loader.load(i, inputs, targets), hash = hash * 31 + (uint64_t)targets[T - 1];
        return hash;
    };
    uint64_t sums[4];
    std::vector<std::thread> threads;
    for (uint64_t& result : sums) threads.emplace_back([&] { result = sum(); });
    for (std::thread& thread : threads) thread.join();
    for (uint64_t result : sums) CHECK(result == sum());
}

TEST_CASE("order: shards too short for a sample") {
    TemporaryFolder folder;
    std::string list = counting_shards(folder, {4, 5, 1});
    TokenLoader loader(list, 65536, 4, SampleOrder::shuffled);
    CHECK(loader.samples_per_epoch() == 1);
    CHECK(loader.too_short() == std::vector<std::string>{folder / "shard000.bin", folder / "shard002.bin"});
    check_error(error_of([&] { TokenLoader(list, 65536, 5, SampleOrder::shuffled); }),
                folder / "shard001.bin", "has 5 tokens");
    int inputs[4], targets[4];
    TokenLoader small(list, 8, 4, SampleOrder::shuffled);
    check_error(error_of([&] { small.load(0, inputs, targets); }), folder / "shard001.bin", "token 4 is 8");
}
