/*
How the two halves of test/nocard/ meet: the CUDA runtime and driver on one side, and the interpreter that
runs the PTX which nvcc wrote on the other. The runtime loads modules and asks for grids; the interpreter asks
the runtime which memory is alive and who has written it.

    auto module = nocard::load_ptx(text, "train_gpt");
    nocard::run_grid({module.get(), "_Z11fill_kernelPffm", grid, block, 0, parameters, {}, card, seed});

Kernels see addresses of device memory as the host does. Several threads may run grids at a time.
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

// A kernel was compiled to this, by its cubin or ptxas (0: unknown).
struct KernelResources {
    int registers = 0;
    size_t static_shared = 0;
};

// A card has this much. 0 stands for no limit.
struct CardLimits {
    int multiprocessors = 0, major = 0, minor = 0;
    size_t shared_per_multiprocessor = 0;  // all blocks of one together, 1 KiB a block included
    size_t shared_optin = 0;               // a block, where the kernel was opted in
    int threads_per_multiprocessor = 0, registers_per_multiprocessor = 0, blocks_per_multiprocessor = 0;
};

// A card or a sanitizer would report this: one line that names kernel, block, thread, instruction and reason.
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// ----------------------------------------------------------------------------
// modules

class PtxModule;  // one PTX text, decoded

// Throws std::runtime_error that names line and instruction, if it has one that nobody taught the
// interpreter.
std::shared_ptr<PtxModule> load_ptx(const std::string& text, const std::string& name);

bool has_kernel(const PtxModule&, const std::string& mangled_name);

// Bytes of each parameter, in order, and where each stands among the bytes of all.
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
    size_t dynamic_shared = 0;        // already held against what the kernel was opted in to, by the runtime
    std::vector<uint8_t> parameters;  // each at its offset; the last ends them
    KernelResources resources;
    CardLimits card;
    uint64_t seed =
        0;  // draws what a card leaves open: orders of blocks and warps, when copies and products happen
    bool counts_bytes = false, counts_units = false;
};

// The work of multiprocessors for a grid (ptx_counts.h). Instructions are counted for each warp, and `lanes`
// are those that were on. Tensor cores make `multiply_adds`, which warps ask for by themselves or (by_warps
// is false) as a warpgroup. Shared memory takes `passes`, of which all but least_passes are conflicts of
// banks. Global memory moves sectors of 32 bytes for the bytes that were asked for. A multiprocessor has
// room for `blocks` at once.
struct UnitCounts {
    uint64_t issued = 0, fp32 = 0, integer = 0, special = 0, lanes = 0;
    double multiply_adds = 0;
    bool by_warps = false;
    uint64_t passes = 0, least_passes = 0, sectors = 0, asked = 0;
    int blocks = 0;
};

// Bytes of global memory that a grid touches, each counted once; and the work of units.
struct GridCounts {
    size_t read = 0, written = 0;
    UnitCounts units = {};
};

// Runs the grid to its end on the calling thread. Throws a Fault; memory is then as the kernel left it.
// Returns zeros where the call does not ask for counts.
GridCounts run_grid(const GridCall&);

// ----------------------------------------------------------------------------
// memory, as the runtime half knows it

// `written` has a byte for each 4 bytes of the allocation, of which bit i stands for byte i, or is null where
// nobody keeps account. The interpreter sets bits; copies and memsets of the runtime do, too.
struct Allocation {
    char* begin = nullptr;
    size_t bytes = 0;
    bool device = true;  // false: pinned memory of the host, which kernels may load and store
    uint8_t* written = nullptr;
};

// The live allocation that has this address, or null. Must be cheap, and safe from several threads; the
// interpreter remembers the last ones within a grid.
const Allocation* find_allocation(const void* address);

// Marks bytes [offset, offset + bytes) of an allocation as written.
inline void mark_written(const Allocation& allocation, size_t offset, size_t bytes) {
    if (!allocation.written) return;
    size_t end = offset + bytes;
    for (; offset < end && offset % 4; offset++) allocation.written[offset / 4] |= uint8_t(1 << offset % 4);
    for (; offset + 4 <= end; offset += 4) allocation.written[offset / 4] = 15;
    for (; offset < end; offset++) allocation.written[offset / 4] |= uint8_t(1 << offset % 4);
}

// Tells whether somebody wrote all of these bytes.
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

// cuTensorMapEncodeTiled writes this into a CUtensorMap here, once it has checked its arguments. The numbers
// of `type`, `interleave`, `swizzle`, `l2` and `fill` are those of the driver's enumerations.
struct TensorMap {
    static constexpr uint64_t magic_number = 0x70616d72736e6574;  // "tensrmap"
    uint64_t magic = magic_number;
    char* address = nullptr;
    uint64_t size[5] = {};    // in elements; the first runs fastest
    uint64_t stride[4] = {};  // in bytes: of dimensions 1 to 4
    uint16_t box[5] = {};     // in elements, up to 256
    uint8_t element_stride[5] = {1, 1, 1, 1, 1};
    uint8_t rank = 0;
    uint8_t element_bytes = 0;  // 1, 2, 4 or 8
    uint8_t type = 0;
    uint8_t interleave = 0, swizzle = 0, l2 = 0;  // swizzle: 0 none, 1 of 32 bytes, 2 of 64, 3 of 128
    uint8_t fill = 0;                             // outside of the tensor: 0 zeros, 1 NaNs
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace nocard
