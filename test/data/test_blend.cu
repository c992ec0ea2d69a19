// Blends: their syntax, which source each sample is drawn from, and which of its samples it is.
#include "test/support/file_testing.h"

#include <cmath>
#include <numeric>
#include <set>

#include "data/tokens/blend.h"

static std::vector<uint64_t> weights_of(const std::string& list) {
    std::vector<uint64_t> weights;
    for (const BlendSource& source : parse_blend(list)) weights.push_back(source.weight);
    return weights;
}

TEST_CASE("blend: how it is written") {
    auto sources = parse_blend("0.7:a*.bin,0.3:data/b.idx");
    REQUIRE(sources.size() == 2);
    CHECK((sources[0].files == "a*.bin" && sources[0].weight == 7));
    CHECK((sources[1].files == "data/b.idx" && sources[1].weight == 3));
    using Weights = std::vector<uint64_t>;
    CHECK(weights_of("1:a,1:b,1:c") == Weights{1, 1, 1});
    CHECK(weights_of("300:a,100:b") == Weights{3, 1});
    CHECK(weights_of("0.5:a,,.25:b,0.250:c,") == Weights{2, 1, 1});
    CHECK(weights_of("1.:a,0.001:b") == Weights{1000, 1});
    CHECK(weights_of("0.70000000000000000000000:a,0.3:b") == Weights{7, 3});
    CHECK(weights_of("0.333:a,0.333:b,0.334:c") == Weights{333, 333, 334});
    CHECK(weights_of("1234567890123:a,1:b") == Weights{1234567890123, 1});
    CHECK(weights_of("0.1:a") == Weights{1});
    CHECK(parse_blend("1:a:b")[0].files == "a:b");

    for (const char* list :
         {"a.bin", "a*.bin,b.bin", "./2:a.bin", "c:a.bin", "e:a.bin", ":a.bin", "x2:a,3"}) {
        CAPTURE(list);
        sources = parse_blend(list);
        REQUIRE(sources.size() == 1);
        CHECK((sources[0].files == list && sources[0].weight == 1));
    }
    CHECK_REFUSED(parse_blend("0.7:a.bin,b.bin"), "'b.bin': has no weight");
    CHECK_REFUSED(parse_blend("b.bin,0.7:a.bin"), "'b.bin': has no weight");
    CHECK_REFUSED(parse_blend("0.7:"), "has no files");
    CHECK_REFUSED(parse_blend("0:a.bin,1:b.bin"), "'0:a.bin': the weight must be above 0");
    CHECK_REFUSED(parse_blend("0.00:a.bin"), "must be above 0");
    for (const char* list : {"-1:a", "+1:a", "1e-3:a", "1.2.3:a", "1..2:a", "0.7-:a", "1.e2:a"})
        CHECK_REFUSED(parse_blend(list), "not a decimal number");
    CHECK_REFUSED(parse_blend("123456789012345678901:a"), "too many digits");
    CHECK_REFUSED(parse_blend("10000000000:a,0.00000000001:b"), "too many digits");
    CHECK_REFUSED(parse_blend("18446744073709551615:a,1:b"), "too many digits");
}

// Draws the first samples of a blend. Returns the largest deviation of a source from its share.
static double check_prefixes(const Blend& blend, const std::vector<double>& weights, uint64_t samples) {
    double sum = std::accumulate(weights.begin(), weights.end(), 0.0), largest = 0;
    std::vector<uint64_t> drawn(weights.size());
    for (uint64_t sample = 0; sample < samples; sample++) {
        auto [source, number] = blend(sample);
        REQUIRE(source < weights.size());
        REQUIRE(number == drawn[source]);
        drawn[source]++;
        for (size_t i = 0; i < weights.size(); i++) {
            double share = weights[i] / sum * (double)(sample + 1);
            largest = std::max(largest, std::abs((double)drawn[i] - share));
        }
    }
    return largest;
}

TEST_CASE("blend: after any number of samples, every source has its share to within one") {
    std::vector<std::vector<uint64_t>> cases = {{1},
                                                {7, 3},
                                                {1, 1},
                                                {1, 1, 1},
                                                {999, 1},
                                                {1, 999},
                                                {50, 1, 1, 1, 1, 1},
                                                {400, 300, 200, 99, 1},
                                                {333, 333, 334},
                                                {2, 3, 5, 7, 11, 13, 17, 19, 23}};
    cases.push_back(std::vector<uint64_t>(50, 1));
    cases.back().push_back(50);
    uint64_t key = random_key(1, "weights");
    for (uint64_t i = 0; i < 200; i++) {
        std::vector<uint64_t> weights(1 + philox(key, i).at[0] % 12);
        for (uint64_t j = 0; j < weights.size(); j++) {
            Random4 random = philox(key, i, j + 1);
            weights[j] = 1 + random.at[0] % (random.at[1] % 3 == 0 ? 300 : 10);
        }
        cases.push_back(weights);
    }
    for (const std::vector<uint64_t>& weights : cases) {
        Blend blend(weights);
        uint64_t sum = std::accumulate(weights.begin(), weights.end(), uint64_t(0));
        CHECK(sum % blend.round() == 0);
        std::vector<double> real(weights.begin(), weights.end());
        double largest = check_prefixes(blend, real, 2 * blend.round() + 10);
        CHECK(largest < 1);
        // and far from the beginning
        for (uint64_t far : {(1ull << 40) + 12345, (1ull << 60) + 1}) {
            std::vector<uint64_t> next(weights.size(), UINT64_MAX);
            for (uint64_t sample = far; sample < far + 20; sample++) {
                auto [source, number] = blend(sample);
                long double share = (long double)sample * (long double)weights[source] / (long double)sum;
                CHECK(std::abs((long double)number - share) < 1.01L);
                CHECK((next[source] == UINT64_MAX || number == next[source]));
                next[source] = number + 1;
            }
        }
    }
}

TEST_CASE("blend: weights of many digits") {
    // A round of a million draws is exact; a longer one is rounded.
    Blend exact(weights_of("0.123457:a,0.876543:b"));
    CHECK(exact.round() == 1000000);
    CHECK(exact.draws_in_round(0) == 123457);
    Blend rounded({1234567890123, 9876543210987, 55555555555});
    CHECK(rounded.round() == 1 << 20);
    double sum = 1234567890123. + 9876543210987. + 55555555555.;
    CHECK(std::abs((double)rounded.draws_in_round(0) - 1234567890123. / sum * 0x1p20) < 1);
    CHECK(std::abs((double)rounded.draws_in_round(1) - 9876543210987. / sum * 0x1p20) < 1);
    CHECK(std::abs((double)rounded.draws_in_round(2) - 55555555555. / sum * 0x1p20) < 1);
    std::vector<double> shares;
    for (size_t i = 0; i < 3; i++) shares.push_back((double)rounded.draws_in_round(i));
    CHECK(check_prefixes(rounded, shares, 100000) < 1);
    CHECK(Blend({300, 100}).round() == 4);
    // the largest possible weights
    Blend largest({UINT64_MAX, UINT64_MAX - 1, UINT64_MAX - 2});
    CHECK(largest.round() == 1 << 20);
    CHECK(std::abs((double)largest.draws_in_round(2) - 0x1p20 / 3) < 1);

    CHECK_REFUSED(Blend({1ull << 40, 1}), "less than a millionth");
    CHECK_REFUSED(Blend({1, 0}), "weight is 0");
    CHECK_REFUSED(Blend({}), "no sources");
}

// Existing runs depend on these draws, which must not change by accident.
TEST_CASE("blend: the first draws") {
    Blend blend({7, 3});
    std::string order;
    for (uint64_t i = 0; i < 20; i++) order += (char)('a' + blend(i).source);
    CHECK(order == "aabaabaaabaabaabaaab");
}

TEST_CASE("blend: each source gives each of its samples once per epoch, in an order of its own") {
    std::vector<uint64_t> sizes = {40, 7, 40};
    for (uint64_t seed : {1, 2}) {
        BlendOrder order(Blend({5, 3, 2}), sizes, SampleOrder::shuffled, seed);
        std::vector<std::vector<uint64_t>> given(3);
        for (uint64_t sample = 0; sample < 1000; sample++) {
            auto [source, at, epoch] = order(sample);
            REQUIRE(at < sizes[source]);
            CHECK(epoch == given[source].size() / sizes[source]);
            given[source].push_back(at);
        }
        CHECK(given[0].size() == 500);
        for (size_t source = 0; source < 3; source++) {
            uint64_t size = sizes[source];
            std::vector<uint64_t> before;
            for (size_t begin = 0; begin + size <= given[source].size(); begin += size) {
                std::vector<uint64_t> epoch(given[source].begin() + (long)begin,
                                            given[source].begin() + (long)(begin + size));
                CHECK(std::set<uint64_t>(epoch.begin(), epoch.end()).size() == size);
                CHECK(epoch != before);
                before = epoch;
            }
        }
        CHECK(!std::equal(given[0].begin(), given[0].begin() + 40, given[2].begin()));
    }
    auto places = [&](SampleOrder order, uint64_t seed) {
        BlendOrder blend(Blend({5, 3, 2}), sizes, order, seed);
        std::vector<uint64_t> result;
        for (uint64_t sample = 0; sample < 200; sample++) result.push_back(blend(sample).sample);
        return result;
    };
    CHECK(places(SampleOrder::shuffled, 1) == places(SampleOrder::shuffled, 1));
    CHECK(places(SampleOrder::shuffled, 1) != places(SampleOrder::shuffled, 2));
    CHECK(places(SampleOrder::sequential, 1) == places(SampleOrder::sequential, 2));
    BlendOrder sequential(Blend({1, 1}), {3, 2}, SampleOrder::sequential, 1);
    std::string order;
    for (uint64_t i = 0; i < 8; i++) order += text("%zu%d ", sequential(i).source, (int)sequential(i).sample);
    CHECK(order == "00 10 01 11 02 10 00 11 ");

    CHECK_REFUSED(BlendOrder(Blend({1, 1}), {3}, SampleOrder::shuffled, 1), "2 sources and 1 sizes");
    CHECK_REFUSED(BlendOrder(Blend({1, 1}), {3, 0}, SampleOrder::shuffled, 1), "no samples");
}
