// Layers dealt to the parts of a pipeline: against trying every cut.
#include <doctest/doctest.h>

#include "comm/pipeline_layers.h"
#include "kernels/random.cuh"
#include "test/file_testing.h"

using Split = std::vector<int>;

static double largest_load(const LayerLoads& loads, const Split& split) {
    double largest = 0;
    size_t at = 0;
    for (size_t part = 0; part < split.size(); part++) {
        double load = (part == 0 ? loads.first : 0) + (part + 1 == split.size() ? loads.last : 0);
        for (int i = 0; i < split[part]; i++) load += loads.layers[at++];
        largest = std::max(largest, load);
    }
    return largest;
}

// The smallest largest load of all ways to cut the `left` layers behind `split` into `parts` more parts.
static double try_all(const LayerLoads& loads, Split& split, int left, int parts) {
    if (parts == 1) {
        split.push_back(left);
        double largest = largest_load(loads, split);
        split.pop_back();
        return largest;
    }
    double best = INFINITY;
    for (int own = 1; own <= left - parts + 1; own++) {
        split.push_back(own);
        best = std::min(best, try_all(loads, split, left - own, parts - 1));
        split.pop_back();
    }
    return best;
}

TEST_CASE("pipeline layers: no cut has a smaller largest part") {
    for (uint64_t round = 0; round < 200; round++) {
        Random4 random = philox(3, round);
        int layers = 1 + (int)(random.at[0] % 9), parts = 1 + (int)(random.at[1] % layers);
        LayerLoads loads;
        for (int i = 0; i < layers; i++) loads.layers.push_back(1 + philox(4, round * 100 + i).at[0] % 5);
        loads.first = random.at[2] % 4, loads.last = random.at[3] % 8;
        Split split = even_split(loads, parts), tried;
        REQUIRE(split.size() == (size_t)parts);
        int sum = 0;
        for (int own : split) {
            CHECK(own >= 1);
            sum += own;
        }
        CHECK(sum == layers);
        CHECK(largest_load(loads, split) == doctest::Approx(try_all(loads, tried, layers, parts)));
    }
}

TEST_CASE(
    "pipeline layers: equal layers are dealt evenly, and the ends give way to embedding and classifier") {
    LayerLoads equal = {std::vector<double>(12, 1), 0, 0};
    CHECK(even_split(equal, 4) == Split{3, 3, 3, 3});
    CHECK(even_split(equal, 1) == Split{12});
    CHECK(even_split(equal, 12) == Split(12, 1));
    equal.last = 2;
    CHECK(even_split(equal, 4).back() < 3);
    LayerLoads both = {std::vector<double>(14, 1), 1, 1};
    CHECK(even_split(both, 4) == Split{3, 4, 4, 3});
}

TEST_CASE("pipeline layers: a list as it is written") {
    CHECK(parse_split("3,4,4,3", 14, 4) == Split{3, 4, 4, 3});
    CHECK(parse_split("5", 5, 1) == Split{5});
    for (const char* bad : {"", "3,", "3,,4", "a", "3,0,4", "-1,8", "3 4", "99999999999"})
        check_error(error_of([&] { parse_split(bad, 7, 2); }), text("--pp-layers %s", bad),
                    "no number of layers");
    check_error(error_of([] { parse_split("3,4", 8, 2); }), "--pp-layers 3,4", "has 8 layers for 2 parts");
    check_error(error_of([] { parse_split("3,4", 7, 3); }), "--pp-layers 3,4", "7 layers in all");
    check_error(error_of([] { even_split({{1, 1}, 0, 0}, 3); }), "pipeline", "cannot be cut into 3 parts");
}
