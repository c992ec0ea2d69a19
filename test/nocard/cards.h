/*
The cards that there can be: NOCARD names the one of this run (h100), NOCARD_GPUS how many of them the machine
has (8), NOCARD_MEMORY their memory in MiB, where it shall not be the real one's.
*/
#pragma once

#include <cuda_runtime.h>

namespace nocard {

struct Card {
    const char* key;   // NOCARD names the card so
    const char* name;  // the driver's
    int major, minor, multiprocessors;
    size_t memory;  // bytes that the driver reports
    size_t shared_optin, shared_per_multiprocessor;
    int threads_per_multiprocessor, blocks_per_multiprocessor;
    int l2_bytes, clock_khz, memory_clock_khz, memory_bits;
    double bf16_flops;  // dense products do so many a second, and twice as many in fp8
};

// Ends the process where NOCARD is not the key of one.
const Card& card();

int device_count();

// The card's properties as the one of this number has them.
void fill_properties(cudaDeviceProp& properties, int device);

// The number of the device that the calling thread uses.
int current_device();

constexpr int registers_per_multiprocessor = 65536;
constexpr size_t shared_without_asking = 48 << 10;
constexpr size_t shared_of_system = 1 << 10;  // every block loses it, from compute capability 8 on

}  // namespace nocard
