/*
A simulated GPU, so that CUDA kernels run and are checked on machines without one.

Every CUDA thread is a fiber. One block runs at a time; its threads run one after another, each until it waits
(for a barrier, for a copy, or for the other lanes of its warp) or ends. A seed determines the order of
blocks, warps and lanes.

Kernels are compiled with -fsanitize=thread but not linked with its library: this device implements the hooks
that the compiler calls at each memory access, and looks for
  - accesses outside of live device memory and of the block's shared memory, and misaligned ones;
  - reads of shared memory that no thread of the block wrote;
  - races: accesses to the same byte of shared or device memory by two threads of a grid, at least one of them
    writing and not both atomic, that are unordered: no barrier, no operation of their common warp, and no
    counter that one block sets and another waits for lies between them, whichever of the two ran first here;
  - barriers and warp operations that some of the expected threads never reach;
  - shared memory that the tensor cores or the copy engine read before the stores to it are visible to them;
  - operands that Hopper's instructions do not accept.
The first error ends the kernel, and the process too unless the test has created an Errors object.
*/
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/host_cuda.h"

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
};

namespace simt {

// ----------------------------------------------------------------------------
// for tests

enum class Kind { out_of_bounds, misaligned, unwritten, race, divergence, unfenced, misuse };

struct Error {
    Kind kind;
    std::string text;  // one line: what, which kernel, block and thread, where
};

// While one of these exists, an error ends only its kernel and is kept here.
class Errors {
public:
    Errors();
    ~Errors();
    std::vector<Error> take();  // errors of all kernels that have ended; the caller synchronizes the stream
};

// Bytes of device memory that launches read and write; each byte counts once per launch. FLOPs are those of
// products.
struct Traffic {
    long launches = 0;
    size_t read = 0, written = 0;
    double flops = 0;

    Traffic& operator+=(const Traffic& more) {
        launches += more.launches, read += more.read, written += more.written, flops += more.flops;
        return *this;
    }
};

// While one of these exists, the traffic of kernels and products is counted by the name of the outermost
// profiler range in which they were launched. The caller synchronizes streams before and after.
class CountTraffic {
public:
    CountTraffic();
    ~CountTraffic();
    std::map<std::string, Traffic> take();
};

// Sets the seed for the order of threads and blocks. It starts as the environment variable SIMT_SEED, or 1.
void set_seed(uint64_t seed);

// ----------------------------------------------------------------------------
// for the stand-ins of CUDA's headers

constexpr size_t max_dynamic_shared = 227 * 1024;  // per block

using Invoke = void (*)(const void* parameters);

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, Invoke invoke,
                   const void* parameters, size_t parameters_bytes);
cudaError_t allow_dynamic_shared(const void* kernel, size_t bytes);
int push_range(const char*name), pop_range();  // return the number of enclosing ranges
void note_product(const Traffic& traffic);

int sync_block(const char* name, bool predicate);  // returns in how many threads the predicate holds

// Every lane of `mask` that has not ended calls this with its own value.
uint64_t shuffle(unsigned mask, uint64_t value, unsigned source_lane);
unsigned ballot(unsigned mask, bool predicate);
void sync_warp(unsigned mask);
unsigned live_lanes();
unsigned lane();

void* dynamic_shared();
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void ldmatrix(uint32_t* out, const void* row, int matrices, bool transposed);
void need_global(const void* pointer, const char* name);
void add_global(float* sum, float value);
void fence_device();
void cp_async_16(void* shared, const void* global, bool valid);
void cp_async_commit();
void cp_async_wait(int pending);

// Instructions of Hopper. Each thread has `count` floats of D; `a` holds four registers.
uint64_t matrix_descriptor(const void* start, uint64_t swizzle, int leading, int stride);
void wgmma(float* d, int count, uint64_t a, bool a_mn, uint64_t b, bool b_mn, bool keep);
void wgmma(float* d, int count, const uint32_t* a, uint64_t b, bool b_mn, bool keep);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);
void mbarrier_init(uint64_t* barrier, int arrivals);
void mbarrier_arrive(uint64_t* barrier, int bytes);
void mbarrier_wait(uint64_t* barrier, int phase);
void named_barrier(int id, int threads, bool wait);
void fence_async();
void set_registers(int registers, bool more);
void copy_box(void* to, const void* map, std::array<int, 4> at, uint64_t* barrier);
void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier);
void bulk_store(void* to, const void* from, int bytes, bool add);
void bulk_commit();
void bulk_wait(int pending, bool only_read);
unsigned counter_now(const unsigned* counter);
void counter_wait(const unsigned* counter, unsigned value, unsigned seen);
void counter_set(unsigned* counter, unsigned value);

}  // namespace simt
