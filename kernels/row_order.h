/*
The order in which the backward pass of the embedding visits the rows of a batch: by token, and by position.
The host sorts them once per batch; see kernels/embedding.cuh for the reason.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

// Sorts 0 .. N-1 by key(n), which must be >= 0, and by n if keys are equal: a radix sort, byte by byte.
template <typename Key>
void sort_by(int* order /* (N) */, int N, Key&& key) {
    std::vector<int> other(N);
    int *from = order, *to = other.data();
    uint32_t largest = 0;
    for (int n = 0; n < N; n++) {
        order[n] = n;
        largest = std::max(largest, (uint32_t)key(n));
    }
    for (int shift = 0; shift < 32 && largest >> shift; shift += 8) {
        auto digit = [&](int n) { return (uint32_t)key(n) >> shift & 255; };
        int ends[257] = {};
        for (int n = 0; n < N; n++) ends[digit(n) + 1]++;
        for (int d = 0; d < 256; d++) ends[d + 1] += ends[d];
        for (int i = 0; i < N; i++) to[ends[digit(from[i])]++] = from[i];
        std::swap(from, to);
    }
    if (from != order) std::copy_n(from, N, order);
}

inline void sort_by_token(int* order /* (N) */, const int* tokens /* (N) */, int N) {
    sort_by(order, N, [=](int n) { return tokens[n]; });
}
inline void sort_by_position(int* order /* (N) */, const int* positions /* (N) */, int N) {
    sort_by(order, N, [=](int n) { return positions[n]; });
}
