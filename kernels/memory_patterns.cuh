/*
Patterns that find broken memory: one pass writes a pattern to all words of a range, and the next looks for
words that have changed. Each pattern targets a kind of fault (Abadir & Reghbati, "Functional testing of
semiconductor random access memories", 1983):

    walking      word i has only bit (i + turn) mod 64 set: finds bits that are stuck or copy a neighbor's
                 value. In 64 turns each bit of each word is set once.
    address      word i is i: finds two addresses of the same word, which keeps only the last value written
    complement   inverts either, so that each bit is tested both ways
*/
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common.cuh"

struct MemoryPattern {
    enum Kind { walking, address } kind;
    unsigned turn = 0;
    bool complement = false;

    HOST_DEVICE uint64_t word(uint64_t i) const {
        uint64_t value = kind == walking ? uint64_t(1) << (i + turn) % 64 : i;
        return complement ? ~value : value;
    }
};

// A summary of the wrong words in a range. By default there are none.
struct WrongWords {
    unsigned long long count = 0, first = ~0ull;  // first: lowest index of a wrong word
    unsigned long long bits = 0;                  // bits that have the wrong value in some word
};

// ----------------------------------------------------------------------------
// CPU

inline void write_pattern_cpu(uint64_t* words, size_t n, MemoryPattern pattern) {
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) words[i] = pattern.word(i);
}

inline void check_pattern_cpu(WrongWords* wrong, const uint64_t* words, size_t n, MemoryPattern pattern) {
    unsigned long long count = 0, first = ~0ull, bits = 0;
#pragma omp parallel for reduction(+ : count) reduction(min : first) reduction(| : bits)
    for (size_t i = 0; i < n; i++) {
        uint64_t difference = words[i] ^ pattern.word(i);
        if (!difference) continue;
        count++, bits |= difference;
        first = std::min<unsigned long long>(first, i);
    }
    wrong->count += count, wrong->bits |= bits, wrong->first = std::min(wrong->first, first);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned pattern_block = 256;

// Two words at a time: the widest store of a thread.
__global__ void write_pattern_kernel(uint64_t* words, size_t n, MemoryPattern pattern) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t pair = (size_t)blockIdx.x * blockDim.x + threadIdx.x; pair < n / 2; pair += step) {
        Vec<uint64_t, 2> two = {{pattern.word(2 * pair), pattern.word(2 * pair + 1)}};
        store_last(words + 2 * pair, two);
    }
}

// Wrong words are few, so their atomics cost little. The order of the atomics does not affect the result.
__global__ void check_pattern_kernel(WrongWords* wrong, const uint64_t* words, size_t n,
                                     MemoryPattern pattern) {
    size_t step = (size_t)gridDim.x * blockDim.x;
#pragma unroll 4
    for (size_t pair = (size_t)blockIdx.x * blockDim.x + threadIdx.x; pair < n / 2; pair += step) {
        auto two = load_last<2>(words + 2 * pair);
        for (int k = 0; k < 2; k++) {
            uint64_t difference = two[k] ^ pattern.word(2 * pair + k);
            if (!difference) continue;
            atomicAdd(&wrong->count, 1ull);
            atomicMin(&wrong->first, (unsigned long long)(2 * pair + k));
            atomicOr(&wrong->bits, (unsigned long long)difference);
        }
    }
}

inline unsigned pattern_blocks(size_t n) {
    constexpr size_t pairs_of_thread = 8, most = 4096;
    return (unsigned)std::clamp<size_t>(ceil_div(n / 2, pattern_block * pairs_of_thread), 1, most);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// n must be even, and words aligned to 16 bytes.
inline void write_pattern(uint64_t* words /* (n) */, size_t n, MemoryPattern pattern, cudaStream_t stream) {
    ON_DEVICE(stream, (LaunchCost{.written = array_bytes(words, n)}), write_pattern_cpu(words, n, pattern),
              launch(write_pattern_kernel, pattern_blocks(n), pattern_block, 0, stream, words, n, pattern));
}

// Adds to *wrong the words that differ from the pattern that write_pattern() wrote.
inline void check_pattern(WrongWords* wrong /* (1) */, const uint64_t* words /* (n) */, size_t n,
                          MemoryPattern pattern, cudaStream_t stream) {
    ON_DEVICE(
        stream, (LaunchCost{.read = array_bytes(words, n)}), check_pattern_cpu(wrong, words, n, pattern),
        launch(check_pattern_kernel, pattern_blocks(n), pattern_block, 0, stream, wrong, words, n, pattern));
}
