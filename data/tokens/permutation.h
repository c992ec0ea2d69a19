/*
A pseudo-random permutation computed one element at a time, without a table, so that a data set of any size is
shuffled in constant memory: a Feistel network over the next power of two (each half-round is a bijection for
any round function), repeated while the result is not in 0 .. n-1 ("cycle walking"; Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002).
*/
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/random.cuh"

// A pseudo-random permutation of 0 .. n-1, chosen by key.
class Permutation {
public:
    Permutation(uint64_t n, uint64_t key) : n_(n), key_(key) {
        // A network on fewer than 8 bits does not mix well, and small sets can afford the longer walk.
        int bits = std::max(8, (int)std::bit_width(n - 1));
        low_bits_ = (bits + 1) / 2;
        low_mask_ = (uint64_t(1) << low_bits_) - 1;
        high_mask_ = (uint64_t(1) << (bits - low_bits_)) - 1;
    }

    uint64_t operator()(uint64_t i) const {
        do i = scramble(i);
        while (i >= n_);
        return i;
    }

private:
    uint64_t scramble(uint64_t i) const {
        constexpr uint64_t rounds = 4;
        uint64_t low = i & low_mask_, high = i >> low_bits_;
        for (uint64_t round = 0; round < rounds; round++) {
            Random4 random = philox(key_, round << 32 | low);
            high ^= random.at[0] & high_mask_;
            random = philox(~key_, round << 32 | high);
            low ^= random.at[0] & low_mask_;
        }
        return high << low_bits_ | low;
    }

    uint64_t n_, key_;
    int low_bits_;
    uint64_t low_mask_, high_mask_;  // at most 32 bits each
};
