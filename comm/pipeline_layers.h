/*
Which layers each part of a pipeline has. The slowest part sets the pace of all, so the layers are cut, in
order, such that the largest part is as small as it can be; the embedding counts as work of the first part,
the classifier as work of the last.
*/
#pragma once

#include <algorithm>
#include <charconv>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "data/error.h"
#include "data/words.h"

// What a part comes to, in any unit: time, or bytes.
struct LayerLoads {
    std::vector<double> layers;  // of each
    double first = 0, last = 0;  // embedding; head and classifier
};

// Layers of each of `parts` parts, one at least. Of cuts that are equally good it prefers parts that are
// close to each other.
inline std::vector<int> even_split(const LayerLoads& loads, int parts) {
    int layers = (int)loads.layers.size();
    if (parts < 1 || parts > layers) {
        fail("pipeline: %d layers cannot be cut into %d parts; give fewer stages or chunks, or more layers",
             layers, parts);
    }
    std::vector<double> before(1, 0);  // load of the layers before each
    for (double load : loads.layers) before.push_back(before.back() + load);
    auto load = [&](int part, int begin, int end) {
        return before[end] - before[begin] + (part == 0 ? loads.first : 0) +
               (part == parts - 1 ? loads.last : 0);
    };

    // best[p][n]: the smallest largest load of parts p .. parts-1 that hold the layers from n on; and of
    // those the smallest sum of squares.
    struct Best {
        double largest = std::numeric_limits<double>::infinity(), squares = 0;
        int end = 0;  // where part p ends then
        bool operator<(const Best& other) const {
            double slack = 1e-9 * largest;  // loads that differ by rounding are equal
            if (largest < other.largest - slack) return true;
            return largest <= other.largest + slack && squares < other.squares * (1 - 1e-12);
        }
    };
    std::vector<std::vector<Best>> best(parts + 1, std::vector<Best>(layers + 1));
    best[parts][layers].largest = 0;
    for (int part = parts - 1; part >= 0; part--) {
        for (int begin = 0; begin < layers; begin++) {
            for (int end = begin + 1; end <= layers; end++) {
                const Best& rest = best[part + 1][end];
                if (rest.largest == std::numeric_limits<double>::infinity()) continue;
                double own = load(part, begin, end);
                Best with = {std::max(own, rest.largest), own * own + rest.squares, end};
                if (with < best[part][begin]) best[part][begin] = with;
            }
        }
    }
    std::vector<int> split;
    for (int part = 0, begin = 0; part < parts; part++) {
        int end = best[part][begin].end;
        split.push_back(end - begin);
        begin = end;
    }
    return split;
}

// "3,4,4,3": layers of each part, which must be `parts` numbers with the sum `layers`.
inline std::vector<int> parse_split(const std::string& list, int layers, int parts) {
    std::vector<int> split;
    long long sum = 0;
    for (const std::string& item : comma_separated(list)) {
        int number = 0;
        const char* end = item.data() + item.size();
        auto [rest, error] = std::from_chars(item.data(), end, number);
        if (error != std::errc() || rest != end || number < 1) {
            fail("--pp-layers %s: '%s' is no number of layers; write it like 3,4,4,3", list.c_str(),
                 item.c_str());
        }
        split.push_back(number);
        sum += number;
    }
    if ((int)split.size() != parts || sum != layers) {
        fail("--pp-layers %s: %zu parts of %lld layers in all, and the model has %d layers for %d parts; "
             "make both "
             "agree",
             list.c_str(), split.size(), sum, layers, parts);
    }
    return split;
}
