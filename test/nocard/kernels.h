/*
The interface between the two halves of test/nocard/: the CUDA runtime and driver on one side, and on the
other the interpreter that runs the PTX from nvcc. The runtime loads modules and runs grids; the interpreter
asks the runtime which memory is live and which bytes have been written.

    auto module = nocard::load_ptx(text, "train_gpt");
    nocard::run_grid({module.get(), "_Z11fill_kernelPffm", grid, block, 0, parameters, {}, card, seed});

Kernels see the same addresses of device memory as the host. Several threads may run grids at the same time.
*/
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace nocard {

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// The resources of a compiled kernel, from its cubin or ptxas (0: unknown).
struct KernelResources {
    int registers = 0;
    size_t static_shared = 0;
};

// The limits of a card. 0 stands for no limit.
struct CardLimits {
    int multiprocessors = 0, major = 0, minor = 0;
    size_t shared_per_multiprocessor = 0;  // for all blocks on it together, 1 KiB per block included
    size_t shared_optin = 0;               // per block, for kernels that opted in
    int threads_per_multiprocessor = 0, registers_per_multiprocessor = 0, blocks_per_multiprocessor = 0;
};

// An error that a card or a sanitizer would report: one line with kernel, block, thread, instruction, reason.
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// ----------------------------------------------------------------------------
// modules

class PtxModule;  // one PTX text, decoded

// Throws std::runtime_error with line and instruction if the text has an instruction that the interpreter
// does not know.
std::shared_ptr<PtxModule> load_ptx(const std::string& text, const std::string& name);

bool has_kernel(const PtxModule&, const std::string& mangled_name);

// The bytes of each parameter, in order, and its offset among the bytes of all.
std::vector<size_t> parameter_sizes(const PtxModule&, const std::string& kernel);
std::vector<size_t> parameter_offsets(const PtxModule&, const std::string& kernel);

struct KernelFacts {
    size_t static_shared = 0;
    int target = 0;                       // 90 for .target sm_90a
    bool arch_specific = false;           // the a of sm_90a: it runs on no other card
    int max_threads = 0;                  // .maxntid, or 0
    int required_threads[3] = {0, 0, 0};  // .reqntid
};
KernelFacts facts(const PtxModule&, const std::string& kernel);

// ----------------------------------------------------------------------------
// grids

struct GridCall {
    const PtxModule* module = nullptr;
    std::string kernel;
    Dim3 grid, block;
    size_t dynamic_shared = 0;        // already checked by the runtime against the kernel's opt-in
    std::vector<uint8_t> parameters;  // each at its offset; the vector ends with the last one
    KernelResources resources;
    CardLimits card;
    uint64_t seed =
        0;  // draws what a card leaves open: orders of blocks and warps, timing of copies and products
    bool counts_bytes = false, counts_units = false;
};

// The work of a grid's multiprocessors (ptx_counts.h). Instructions are counted per warp, and `lanes` adds up
// their active lanes. `multiply_adds` are those of tensor cores, issued by single warps (by_warps) or by
// warpgroups. `passes` are those of shared memory; all beyond least_passes are bank conflicts. Global memory
// moves `sectors` of 32 bytes for the `asked` bytes. A multiprocessor holds `blocks` blocks at once.
struct UnitCounts {
    uint64_t issued = 0, fp32 = 0, integer = 0, special = 0, lanes = 0;
    double multiply_adds = 0;
    bool by_warps = false;
    uint64_t passes = 0, least_passes = 0, sectors = 0, asked = 0;
    int blocks = 0;
};

// The bytes of global memory that a grid touches, each counted once, and its work per unit.
struct GridCounts {
    size_t read = 0, written = 0;
    UnitCounts units = {};
};

// Runs the grid to its end on the calling thread. If it throws a Fault, memory stays as the kernel left it.
// Returns zeros unless the call asks for counts.
GridCounts run_grid(const GridCall&);

// ----------------------------------------------------------------------------
// memory, as the runtime half knows it

// `written` has one byte for each 4 bytes of the allocation, in which bit i stands for byte i; it is null if
// writes are not tracked. The interpreter sets the bits, and so do the runtime's copies and memsets.
struct Allocation {
    char* begin = nullptr;
    size_t bytes = 0;
    bool device = true;  // false: pinned memory of the host, which kernels may load and store
    uint8_t* written = nullptr;
};

// Returns the live allocation that contains this address, or null. Must be cheap, and safe from several
// threads; the interpreter caches the last ones within a grid.
const Allocation* find_allocation(const void* address);

// Marks bytes [offset, offset + bytes) of an allocation as written.
inline void mark_written(const Allocation& allocation, size_t offset, size_t bytes) {
    if (!allocation.written) return;
    size_t end = offset + bytes;
    for (; offset < end && offset % 4; offset++) allocation.written[offset / 4] |= uint8_t(1 << offset % 4);
    for (; offset + 4 <= end; offset += 4) allocation.written[offset / 4] = 15;
    for (; offset < end; offset++) allocation.written[offset / 4] |= uint8_t(1 << offset % 4);
}

// Returns whether all of these bytes have been written.
inline bool is_written(const Allocation& allocation, size_t offset, size_t bytes) {
    if (!allocation.written) return true;
    size_t end = offset + bytes;
    for (; offset < end && offset % 4; offset++) {
        if (!(allocation.written[offset / 4] >> offset % 4 & 1)) return false;
    }
    for (; offset + 4 <= end; offset += 4) {
        if (allocation.written[offset / 4] != 15) return false;
    }
    for (; offset < end; offset++) {
        if (!(allocation.written[offset / 4] >> offset % 4 & 1)) return false;
    }
    return true;
}

// ----------------------------------------------------------------------------
// tensor maps

// The content of a CUtensorMap here, which cuTensorMapEncodeTiled writes after it has checked its arguments.
// The values of `type`, `interleave`, `swizzle`, `l2` and `fill` are those of the driver's enumerations.
struct TensorMap {
    static constexpr uint64_t magic_number = 0x70616d72736e6574;  // "tensrmap"
    uint64_t magic = magic_number;
    char* address = nullptr;
    uint64_t size[5] = {};    // in elements; dimension 0 is contiguous
    uint64_t stride[4] = {};  // in bytes, of dimensions 1 to 4
    uint16_t box[5] = {};     // in elements, up to 256
    uint8_t element_stride[5] = {1, 1, 1, 1, 1};
    uint8_t rank = 0;
    uint8_t element_bytes = 0;  // 1, 2, 4 or 8
    uint8_t type = 0;
    uint8_t interleave = 0, swizzle = 0, l2 = 0;  // swizzle: 0 none, 1 over 32 bytes, 2 over 64, 3 over 128
    uint8_t fill = 0;                             // outside of the tensor: 0 zeros, 1 NaNs
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace nocard
