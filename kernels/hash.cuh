/*
A 64-bit hash of any bytes on a device: ranks that should hold the same numbers compare eight bytes instead of
all of them, and a single flipped bit is detected.

    hash = sum over i of mix(word[i], i)   modulo 2^64,    word[i]: the bytes 8 i to 8 i + 7

For each i, mix is a bijection of the word (the finalizer of MurmurHash3; Appleby, 2011), so any change within
one word changes the hash. A change in several words, such as a swap of two, goes undetected with probability
2^-64. The order of the terms does not matter: the hash is the same for any number of threads and on every
device, and the hash of a whole is the sum of the hashes of its parts, wherever these are. It protects against
faults, not attackers: collisions are easy to construct.
*/
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/common.cuh"
#include "kernels/streams.cuh"

constexpr size_t hash_word = sizeof(uint64_t);

HOST_DEVICE inline uint64_t mix_word(uint64_t word, uint64_t place) {
    uint64_t x = word ^ (place + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ x >> 33) * 0xff51afd7ed558ccd;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53;
    return x ^ x >> 33;
}

// Returns word i of n bytes, which may begin at any address. Bytes past the end are zero.
HOST_DEVICE inline uint64_t word_of_bytes(const uint8_t* bytes, size_t n, size_t i) {
    uint64_t word = 0;
    size_t count = n - i * hash_word < hash_word ? n - i * hash_word : hash_word;
    for (size_t k = 0; k < count; k++) word |= (uint64_t)bytes[i * hash_word + k] << (8 * k);
    return word;
}

// ----------------------------------------------------------------------------
// CPU

inline uint64_t hash_of_bytes_cpu(const uint8_t* bytes, size_t n, uint64_t first_word) {
    uint64_t sum = 0;
    size_t words = n / hash_word;
#pragma omp parallel for simd reduction(+ : sum)
    for (size_t i = 0; i < words; i++) {
        uint64_t word;
        memcpy(&word, bytes + i * hash_word, hash_word);
        sum += mix_word(word, first_word + i);
    }
    if (n % hash_word) sum += mix_word(word_of_bytes(bytes, n, words), first_word + words);
    return sum;
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned hash_block = 256;

// W: words that a thread reads at once; 0: reads byte by byte, for bytes at any address.
template <int W>
__global__ void hash_kernel(uint64_t* hash, const uint8_t* bytes, size_t n, uint64_t first_word) {
    uint64_t sum = 0;
    size_t words = n / hash_word, thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x,
           threads = (size_t)gridDim.x * blockDim.x;
    if constexpr (W > 0) {
        const uint64_t* from = reinterpret_cast<const uint64_t*>(bytes);
#pragma unroll 4
        for (size_t i = thread * W; i < words; i += threads * W) {
            auto word = load_last<W>(from + i);
            for (int k = 0; k < W; k++) sum += mix_word(word[k], first_word + i + k);
        }
    } else {
        for (size_t i = thread; i < words; i += threads)
            sum += mix_word(word_of_bytes(bytes, n, i), first_word + i);
    }
    if (thread == 0 && n % hash_word) sum += mix_word(word_of_bytes(bytes, n, words), first_word + words);
    for (int offset = warp_size / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (threadIdx.x % warp_size == 0) atomicAdd(reinterpret_cast<unsigned long long*>(hash), sum);
}

inline void launch_hash(uint64_t* hash, const uint8_t* bytes, size_t n, uint64_t first_word,
                        cudaStream_t stream) {
    constexpr unsigned words_of_thread = 16, most_blocks = 1024;
    unsigned blocks =
        (unsigned)std::clamp<size_t>(ceil_div(n, hash_word * hash_block * words_of_thread), 1, most_blocks);
    auto start = [&](auto W) {
        launch(hash_kernel<W>, blocks, hash_block, 0, stream, hash, bytes, n, first_word);
    };
    if ((uintptr_t)bytes % hash_word)
        start(std::integral_constant<int, 0>{});
    else  // vectors, if they divide the words evenly
        with_vec_width<uint64_t>((uintptr_t)bytes / hash_word | n / hash_word, start);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// Adds to *hash the hash of n bytes that begin at word `first_word` of the whole. Every part except the last
// must consist of whole words.
inline void add_hash(uint64_t* hash /* (1) */, const void* bytes, size_t n, uint64_t first_word,
                     cudaStream_t stream) {
    const uint8_t* from = static_cast<const uint8_t*>(bytes);
    ON_DEVICE(stream, (LaunchCost{.read = (double)n}), *hash += hash_of_bytes_cpu(from, n, first_word),
              launch_hash(hash, from, n, first_word, stream));
}

// Sets *hash to the hash of n bytes.
inline void hash_bytes(uint64_t* hash /* (1) */, const void* bytes, size_t n, cudaStream_t stream) {
    zero_async(hash, 1, stream);
    add_hash(hash, bytes, n, 0, stream);
}
