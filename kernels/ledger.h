/*
What a program asks of a card, written down instead of done. While a thread has a Ledger, its launches, copies
and fills become entries of it, in their order, and nothing runs: so a step can be priced for a card that is
not there, by the very code that trains.

The cost of a launch stands in its launcher. It is that of the kernel on a card, whatever device this program
is built for: bytes of memory, each tensor as often as the kernel passes over it (single numbers are left
out), and FLOPs.
*/
#pragma once

#include <cstddef>
#include <vector>

// D (rows, columns) as sums over `sums` products each.
struct ProductShape {
    double rows = 0, columns = 0, sums = 0;
    bool fp8 = false, fast_sums = false;  // 8-bit operands; sums as Product (kernels/cublas.cuh) has them
    double flops() const { return 2 * rows * columns * sums; }
};

struct LaunchCost {
    double read = 0, written = 0;  // bytes
    ProductShape product = {};
    double attention_flops = 0;  // scores that are computed and then masked do not count
    double mean_keys = 0;        // attention: seen by a query
    int launches = 1;            // kernels

    LaunchCost plus(double more_read, double more_written) const {
        LaunchCost sum = *this;
        sum.read += more_read, sum.written += more_written;
        return sum;
    }
    double flops() const { return attention_flops > 0 ? attention_flops : product.flops(); }
};

struct LedgerEntry {
    const char* launcher;  // the function of kernels/; nullptr: a fill or a copy by the driver
    const void* stream;
    LaunchCost cost;
};

struct Ledger {
    size_t element_bytes;  // a parameter or an activation has so many on the card
    int T;                 // positions of a sequence
    std::vector<LedgerEntry> entries = {};

    void note(const char* launcher, const void* stream, const LaunchCost& cost) {
        entries.push_back({launcher, stream, cost});
    }
    void note(const char* launcher, const void* stream, const std::vector<LaunchCost>& costs) {
        for (const LaunchCost& cost : costs) note(launcher, stream, cost);
    }
};

// This thread's, or null: what it launches runs.
inline thread_local Ledger* ledger = nullptr;

// Bytes of an array of these sizes, or 0 where it is null.
template <typename T, typename... Sizes>
double array_bytes(const T* array, Sizes... sizes) {
    return array ? sizeof(T) * (1.0 * ... * (double)sizes) : 0;
}
