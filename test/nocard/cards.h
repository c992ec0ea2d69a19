/*
The simulated cards. NOCARD names the card of this run (h100), NOCARD_GPUS sets the number of devices (8), and
NOCARD_MEMORY sets the memory of each in MiB (default: that of the real card).
*/
#pragma once

#include <cuda_runtime.h>

namespace nocard {

struct Card {
    const char* key;   // the value of NOCARD that selects the card
    const char* name;  // the driver's name for it
    int major, minor, multiprocessors;
    size_t memory;  // bytes that the driver reports
    size_t shared_optin, shared_per_multiprocessor;
    int threads_per_multiprocessor, blocks_per_multiprocessor;
    int l2_bytes, clock_khz, memory_clock_khz, memory_bits;
    double bf16_flops;  // FLOP/s of dense bf16 products; fp8 has twice the rate
};

// Ends the process if NOCARD names no known card.
const Card& card();

int device_count();

// Fills in the card's properties as those of this device.
void fill_properties(cudaDeviceProp& properties, int device);

// Returns the device number that the calling thread uses.
int current_device();

constexpr int registers_per_multiprocessor = 65536;
constexpr size_t shared_without_asking = 48 << 10;
constexpr size_t shared_of_system = 1 << 10;  // reserved in every block, from compute capability 8 on

}  // namespace nocard
