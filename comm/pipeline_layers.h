/*
Which layers each part of a pipeline has. The slowest part sets the pace of all, so the layers are cut, in
order, such that the largest part is as small as it can be. What a part comes to is the caller's to say: the
first has the embedding too, the last the classifier.
*/
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "data/error.h"

// Layers of each of `parts` parts, one at least. cost(part, begin, end) is what layers [begin, end) come to
// as that part, in any unit: time, or bytes. Of cuts that are equally good it prefers parts that are close to
// each other.
template <typename Cost>
std::vector<int> even_split(int layers, int parts, Cost&& cost) {
    if (parts < 1 || parts > layers) {
        fail("pipeline: %d layers cannot be cut into %d parts; give fewer stages or chunks, or more layers",
             layers, parts);
    }

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
        bool first = part == 0, last = part == parts - 1;
        int latest_end = layers - (parts - 1 - part);  // a layer at least for each part behind
        for (int begin = part; begin <= (first ? 0 : latest_end - 1); begin++) {
            for (int end = last ? layers : begin + 1; end <= latest_end; end++) {
                const Best& rest = best[part + 1][end];
                double own = cost(part, begin, end);
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
