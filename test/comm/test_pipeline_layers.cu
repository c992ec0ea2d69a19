// Distributing layers over the parts of a pipeline, compared with an exhaustive search.
// devices: cpu
#include <doctest/doctest.h>

#include "comm/layout.h"
#include "kernels/random.cuh"
#include "test/support/file_testing.h"

using Split = std::vector<int>;

// The load of a part: the sum of its layers' loads, plus the embedding's in the first part and the
// classifier's in the last.
struct Loads {
    std::vector<double> layers;
    int parts;
    double embedding = 0, classifier = 0;

    double operator()(int part, int begin, int end) const {
        double load = (part == 0 ? embedding : 0) + (part == parts - 1 ? classifier : 0);
        for (int layer = begin; layer < end; layer++) load += layers[layer];
        return load;
    }
};

static Split split_of(const Loads& loads) {
    return even_split((int)loads.layers.size(), loads.parts, loads);
}

template <typename Cost>
double largest_cost(const Split& split, Cost&& cost) {
    double largest = 0;
    int begin = 0;
    for (size_t part = 0; part < split.size(); part++) {
        largest = std::max(largest, cost((int)part, begin, begin + split[part]));
        begin += split[part];
    }
    return largest;
}

// The minimum, over all ways to split the `left` layers after `split` into `parts` more parts, of the largest
// cost.
template <typename Cost>
double try_all(Split& split, int left, int parts, Cost&& cost) {
    double best = INFINITY;
    for (int own = parts == 1 ? left : 1; own <= left - parts + 1; own++) {
        split.push_back(own);
        best = std::min(best,
                        parts == 1 ? largest_cost(split, cost) : try_all(split, left - own, parts - 1, cost));
        split.pop_back();
    }
    return best;
}

template <typename Cost>
void check_best(int layers, int parts, Cost&& cost) {
    bool possible = true;  // false if the cost of an impossible part is requested
    Split tried, split = even_split(layers, parts, [&](int part, int begin, int end) {
                     possible &= part >= 0 && part < parts && begin >= part && begin < end &&
                                 end <= layers - (parts - 1 - part);
                     possible &= part > 0 || begin == 0;
                     possible &= part < parts - 1 || end == layers;
                     return cost(part, begin, end);
                 });
    CHECK(possible);
    REQUIRE(split.size() == (size_t)parts);
    int sum = 0;
    for (int own : split) {
        CHECK(own >= 1);
        sum += own;
    }
    CHECK(sum == layers);
    CHECK(largest_cost(split, cost) == doctest::Approx(try_all(tried, layers, parts, cost)));
}

TEST_CASE("pipeline layers: no cut has a smaller largest part") {
    for (uint64_t round = 0; round < 200; round++) {
        Random4 random = philox(3, round);
        int layers = 1 + (int)(random.at[0] % 9), parts = 1 + (int)(random.at[1] % layers);
        Loads loads = {{}, parts, (double)(random.at[2] % 4), (double)(random.at[3] % 8)};
        for (int i = 0; i < layers; i++) loads.layers.push_back(1 + philox(4, round * 100 + i).at[0] % 5);
        check_best(layers, parts, loads);
        // costs like memory: earlier stages hold more micro-batches, in addition to the parameters
        check_best(layers, parts, [&](int part, int begin, int end) {
            return loads(part, begin, end) + (parts - part) * 3.0 * (end - begin);
        });
    }
}

TEST_CASE(
    "pipeline layers: equal layers are dealt evenly, and the ends give way to embedding and classifier") {
    std::vector<double> equal(12, 1);
    CHECK(split_of({equal, 4}) == Split{3, 3, 3, 3});
    CHECK(split_of({equal, 1}) == Split{12});
    CHECK(split_of({equal, 12}) == Split(12, 1));
    CHECK(split_of({equal, 4, 0, 2}).back() < 3);
    CHECK(split_of({std::vector<double>(14, 1), 4, 1, 1}) == Split{3, 4, 4, 3});
}

TEST_CASE("pipeline layers: parts that weigh on their layers differently") {
    // A stage holds one micro-batch for itself and one for each later stage.
    auto kept = [](int part, int begin, int end) { return 1.0 * (3 - part) * (end - begin); };
    CHECK(even_split(11, 3, kept) == Split{2, 3, 6});
    // A cost that grows faster than the number of layers.
    auto squared = [](int, int begin, int end) { return 1.0 * (end * end - begin * begin); };
    CHECK(even_split(10, 2, squared) == Split{7, 3});
}

TEST_CASE("pipeline layers: more parts than layers are refused") {
    for (int parts : {0, 3})
        check_error(error_of([&] {
                        split_of({{1, 1}, parts});
                    }),
                    "pipeline", text("cannot be cut into %d parts", parts));
}
