/*
Random numbers as a function of (key, counter): Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel
random numbers: as easy as 1, 2, 3" (SC 2011). There is no state, so a number does not depend on the rank,
thread or iteration that asks for it: the n-th number of a tensor is the same for every layout of the work.
*/
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

#include "kernels/host_device.h"

struct Random4 {
    uint32_t at[4];
};

// The counter has 128 bits, for numbers with two indices, such as element and step.
HOST_DEVICE inline Random4 philox(uint64_t key, uint64_t counter, uint64_t counter_high = 0) {
    uint32_t x[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), (uint32_t)counter_high,
                     (uint32_t)(counter_high >> 32)};
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * x[0], product1 = (uint64_t)0xCD9E8D57u * x[2];
        uint32_t y0 = (uint32_t)(product1 >> 32) ^ x[1] ^ k0, y2 = (uint32_t)(product0 >> 32) ^ x[3] ^ k1;
        x[0] = y0, x[1] = (uint32_t)product1, x[2] = y2, x[3] = (uint32_t)product0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {{x[0], x[1], x[2], x[3]}};
}

// FNV-1a.
inline uint64_t name_hash(std::string_view name) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3u;
    return hash;
}

// Returns the key of a named purpose ("wte", "data order") under a run's seed: the hash of the name, mixed
// with the seed.
inline uint64_t random_key(uint64_t seed, uint64_t hash) {
    Random4 mixed = philox(seed, hash);
    return (uint64_t)mixed.at[0] << 32 | mixed.at[1];
}
inline uint64_t random_key(uint64_t seed, std::string_view name) {
    return random_key(seed, name_hash(name));
}

// Returns a uniform number in [0, 1), with 24 bits.
HOST_DEVICE inline float random_uniform(uint32_t bits) {
    return (float)(bits >> 8) * 0x1p-24f;
}

// Returns the i-th number of a stream of standard normal numbers (Box-Muller; two from each 64 random bits).
inline float random_normal(uint64_t key, uint64_t i) {
    Random4 random = philox(key, i / 4);
    int pair = (int)(i % 4) / 2 * 2;
    double u = ((double)random.at[pair] + 1) * 0x1p-32;  // in (0, 1], so that its logarithm is finite
    double angle = 6.283185307179586 * ((double)random.at[pair + 1] * 0x1p-32);
    double radius = std::sqrt(-2 * std::log(u));
    return (float)(radius * (i % 2 ? std::sin(angle) : std::cos(angle)));
}

// Returns the i-th number of a stream of uniform numbers in [-1, 1).
inline float random_symmetric(uint64_t key, uint64_t i) {
    return 2 * random_uniform(philox(key, i / 4).at[i % 4]) - 1;
}
