/*
Kernels: their registration, their attributes, and their launches.

nvcc makes a program register its code before main(), and each kernel under the address of a host function.
The PTX is decoded at the first use.
*/
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <cxxabi.h>
#include <fatbinary_section.h>
#include <map>
#include <memory>
#include <mutex>

#include "test/nocard/cards.h"
#include "test/nocard/counts.h"
#include "test/nocard/device_memory.h"
#include "test/nocard/errors.h"
#include "test/nocard/fat_binary.h"
#include "test/nocard/fault.h"
#include "test/nocard/kernels.h"
#include "test/nocard/record.h"
#include "test/nocard/report.h"
#include "test/nocard/streams.h"

namespace nocard {
namespace {

// One fat binary of the program: of an object file, or of several that nvcc has linked.
struct Module {
    std::vector<CodeEntry> entries;
    Image image;  // for this card
    std::shared_ptr<PtxModule> ptx;

    explicit Module(const void* container) : entries(read_fat_binary(container)) {
        image = choose_image(entries, card().major * 10 + card().minor);
    }

    bool runs_here() const { return image.cubin || image.ptx; }

    // Decodes the PTX at the first use. The caller holds the lock.
    const PtxModule& code(const std::string& kernel) {
        if (ptx) return *ptx;
        std::string architecture =
            image.cubin ? text("%d%s", image.cubin->architecture, image.cubin->specific ? "a" : "") : "";
        if (!image.ptx)
            fault(kernel, text("has machine code of sm_%s, but no PTX to run here; build with "
                               "-gencode arch=compute_%s,code=[compute_%s,sm_%s]",
                               architecture.c_str(), architecture.c_str(), architecture.c_str(),
                               architecture.c_str()));
        if (image.ptx->compressed) fault(kernel, "its PTX is compressed; build with nvcc --no-compress");
        try {
            ptx = load_ptx(image.ptx->text,
                           text("compute_%d%s", image.ptx->architecture, image.ptx->specific ? "a" : ""));
        } catch (const std::exception& error) {
            fault(kernel, error.what());
        }
        return *ptx;
    }
};

struct Kernel {
    Module* module = nullptr;
    std::string name;
    int most_dynamic_shared = -1;  // set by cudaFuncSetAttribute(); -1: not set
    bool loaded = false;           // launched before
    // found at the first use
    KernelResources resources;
    KernelFacts facts;
    std::vector<size_t> sizes, offsets;  // the parameters'
};

struct Kernels {
    std::mutex mutex;
    std::vector<std::unique_ptr<Module>> modules;
    std::map<const void*, Kernel> by_function;

    // The caller holds the lock.
    Kernel& require(const char* call, const void* function) {
        auto place = by_function.find(function);
        if (place == by_function.end()) fault(call, text("%p is no kernel of this program", function));
        return place->second;
    }
};

Kernels& kernels() {
    static Kernels& kernels = *new Kernels;
    return kernels;
}

void prepare(Kernel& kernel) {
    if (!kernel.sizes.empty()) return;
    const PtxModule& code = kernel.module->code(kernel.name);
    if (!has_kernel(code, kernel.name)) fault(kernel.name, "is not in the PTX of the program");
    kernel.facts = facts(code, kernel.name);
    kernel.sizes = parameter_sizes(code, kernel.name);
    kernel.offsets = parameter_offsets(code, kernel.name);
    kernel.resources.static_shared = kernel.facts.static_shared;
    if (!kernel.module->image.cubin) return;
    auto& known = kernel.module->image.cubin->kernels;
    if (auto place = known.find(kernel.name); place != known.end())
        kernel.resources = {place->second.registers, place->second.static_shared};
}

// Returns "fill_kernel" for its mangled name, for messages.
std::string short_name(const std::string& mangled) {
    int status = 0;
    char* whole = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
    if (!whole) return mangled;
    std::string name = whole;
    free(whole);
    name = name.substr(0, name.rfind('('));
    return name.starts_with("void ") ? name.substr(5) : name;
}

// Registers are allocated to warps in pieces of 256, and to four warps at a time.
size_t registers_of_block(int registers, size_t threads) {
    constexpr size_t piece = 256, warp = 32, together = 4;
    size_t warps = (threads + warp - 1) / warp;
    warps = (warps + together - 1) / together * together;
    return ((size_t)registers * warp + piece - 1) / piece * piece * warps;
}

// Prints a line along with the error that the call returns, because the error alone says little.
cudaError_t refuse(const char* call, const Kernel& kernel, cudaError_t error, const std::string& reason) {
    fprintf(stderr, "nocard: %s: %s: %s\n", call, short_name(kernel.name).c_str(), reason.c_str());
    return noted(error);
}

cudaError_t check_sizes(const char* call, const Kernel& kernel, dim3 grid, dim3 block, size_t shared) {
    auto size = [](dim3 d) { return text("%u x %u x %u", d.x, d.y, d.z); };
    size_t threads = (size_t)block.x * block.y * block.z;
    constexpr unsigned most_grid = 2147483647, most_grid_yz = 65535, most_block = 1024, most_block_z = 64;
    if (!grid.x || !grid.y || !grid.z || grid.x > most_grid || grid.y > most_grid_yz || grid.z > most_grid_yz)
        return refuse(call, kernel, cudaErrorInvalidConfiguration, "a grid of " + size(grid) + " blocks");
    if (threads == 0 || threads > most_block || block.z > most_block_z)
        return refuse(call, kernel, cudaErrorInvalidConfiguration, "a block of " + size(block) + " threads");
    size_t allowed =
        kernel.most_dynamic_shared >= 0
            ? (size_t)kernel.most_dynamic_shared
            : shared_without_asking - std::min(shared_without_asking, kernel.resources.static_shared);
    if (shared > allowed)
        return refuse(call, kernel, cudaErrorInvalidValue,
                      text("%zu bytes of shared memory, where %zu were asked for", shared, allowed));
    if (kernel.facts.max_threads && threads > (size_t)kernel.facts.max_threads)
        return refuse(call, kernel, cudaErrorLaunchOutOfResources,
                      text("%zu threads in a block, of %d that it was compiled for", threads,
                           kernel.facts.max_threads));
    if (size_t registers = registers_of_block(kernel.resources.registers, threads);
        registers > registers_per_multiprocessor)
        return refuse(call, kernel, cudaErrorLaunchOutOfResources,
                      text("%zu threads of %d registers, which are more than a multiprocessor has", threads,
                           kernel.resources.registers));
    return cudaSuccess;
}

CardLimits limits() {
    const Card& c = card();
    CardLimits limits;
    limits.multiprocessors = c.multiprocessors;
    limits.major = c.major;
    limits.minor = c.minor;
    limits.shared_per_multiprocessor = c.shared_per_multiprocessor;
    limits.shared_optin = c.shared_optin;
    limits.threads_per_multiprocessor = c.threads_per_multiprocessor;
    limits.registers_per_multiprocessor = registers_per_multiprocessor;
    limits.blocks_per_multiprocessor = c.blocks_per_multiprocessor;
    return limits;
}

// Returns a different seed for each launch of the process.
uint64_t next_seed() {
    static std::atomic<uint64_t> launches = 0;
    uint64_t x = seed_of_process() * 0x9e3779b97f4a7c15 + ++launches;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    return x ^ x >> 31;
}

// Returns the memory that parameters point to: any word of them may be an address in an allocation.
std::vector<Touched> pointed_to(const std::vector<uint8_t>& parameters) {
    std::vector<Touched> touched;
    for (size_t at = 0; at + sizeof(void*) <= parameters.size(); at += sizeof(void*)) {
        void* pointer;
        memcpy(&pointer, parameters.data() + at, sizeof pointer);
        const Allocation* allocation = find_allocation(pointer);
        if (allocation) touched.push_back({allocation->begin, allocation->bytes});
    }
    return touched;
}

cudaError_t launch(const char* call, const void* function, dim3 grid, dim3 block, size_t shared,
                   void** arguments, cudaStream_t stream) {
    GridCall grid_call;
    {
        std::lock_guard lock(kernels().mutex);
        Kernel& kernel = kernels().require(call, function);
        if (!kernel.module->runs_here()) return noted(cudaErrorNoKernelImageForDevice);
        prepare(kernel);
        if (is_capturing(stream) && !kernel.loaded)
            fault(call,
                  text("the first launch of %s is in a capture, in which a driver that loads code when it is "
                       "needed may not do so",
                       short_name(kernel.name).c_str()));
        kernel.loaded = true;
        if (cudaError_t error = check_sizes(call, kernel, grid, block, shared)) return error;
        grid_call.module = kernel.module->ptx.get();
        grid_call.kernel = kernel.name;
        grid_call.resources = kernel.resources;
        size_t count = kernel.sizes.size();
        grid_call.parameters.resize(count ? kernel.offsets.back() + kernel.sizes.back() : 0);
        for (size_t i = 0; i < count; i++)
            memcpy(grid_call.parameters.data() + kernel.offsets[i], arguments[i], kernel.sizes[i]);
    }
    grid_call.grid = {grid.x, grid.y, grid.z};
    grid_call.block = {block.x, block.y, block.z};
    grid_call.dynamic_shared = shared;
    grid_call.card = limits();
    report_launch(short_name(grid_call.kernel));
    const RecordedPlace place = record_kernel(stream);
    grid_call.counts_units = counts_units();
    grid_call.counts_bytes = place.lines > 0 || grid_call.counts_units;

    Operation operation;
    operation.call = short_name(grid_call.kernel);
    operation.touched = pointed_to(grid_call.parameters);
    operation.begin = [grid_call, place]() -> Advance {
        return [grid_call, place, seed = next_seed()]() mutable {
            grid_call.seed = seed;
            GridCounts counts = run_grid(grid_call);
            if (place.lines > 0) record_touched(place, counts.read, counts.written);
            if (grid_call.counts_units) report_counts(short_name(grid_call.kernel), counts);
            return true;
        };
    };
    return enqueue(stream, operation);
}

}  // namespace
}  // namespace nocard

using namespace nocard;

extern "C" {

// ----------------------------------------------------------------------------
// calls that nvcc has a program make before main()

void** __cudaRegisterFatBinary(void* wrapper) {
    std::lock_guard lock(kernels().mutex);
    auto& modules = kernels().modules;
    modules.push_back(std::make_unique<Module>(((const __fatBinC_Wrapper_t*)wrapper)->data));
    return (void**)modules.back().get();
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** module, const char* function, char*, const char* name, int, void*, void*,
                            void*, void*, int*) {
    std::lock_guard lock(kernels().mutex);
    Kernel& kernel = kernels().by_function[function];
    kernel.module = (Module*)module;
    kernel.name = name;
}

// Does nothing: the interpreter places variables of the card, and the host never refers to them.
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

char __cudaInitModule(void**) {
    return 0;
}

// ----------------------------------------------------------------------------
// launches

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t stream) {
    return launch("cudaLaunchKernel", function, grid, block, shared, arguments, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
    if (config->numAttrs)
        fault("cudaLaunchKernelExC", "attributes of a launch, such as clusters, are not known here");
    return launch("cudaLaunchKernelExC", function, config->gridDim, config->blockDim,
                  config->dynamicSmemBytes, arguments, config->stream);
}

// A launch kernel<<<...>>>(...) consists of two calls.
struct LaunchOfThread {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
static thread_local LaunchOfThread next_launch;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    next_launch = {grid, block, shared, stream};
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = next_launch.grid;
    *block = next_launch.block;
    *shared = next_launch.shared;
    *(cudaStream_t*)stream = next_launch.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
    return launch("cudaLaunchKernel", kernel, grid, block, shared, arguments, stream);
}

// ----------------------------------------------------------------------------
// facts about kernels

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
    std::lock_guard lock(kernels().mutex);
    Kernel& kernel = kernels().require("cudaFuncSetAttribute", function);
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
        fault("cudaFuncSetAttribute", text("attribute %d is not known here", (int)attribute));
    if (!kernel.module->runs_here()) return noted(cudaErrorNoKernelImageForDevice);
    prepare(kernel);
    size_t most = card().shared_optin - kernel.resources.static_shared;
    if (value < 0 || (size_t)value > most)
        return refuse("cudaFuncSetAttribute", kernel, cudaErrorInvalidValue,
                      text("%d bytes of shared memory, of %zu that the card has for it", value, most));
    kernel.most_dynamic_shared = value;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
    std::lock_guard lock(kernels().mutex);
    Kernel& kernel = kernels().require("cudaFuncGetAttributes", function);
    const Image& image = kernel.module->image;
    if (!kernel.module->runs_here()) return noted(cudaErrorNoKernelImageForDevice);
    *attributes = {};
    attributes->ptxVersion = image.cubin ? image.cubin->architecture : image.ptx->architecture;
    attributes->binaryVersion = image.cubin ? image.cubin->architecture : card().major * 10 + card().minor;
    prepare(kernel);
    attributes->numRegs = kernel.resources.registers;
    attributes->sharedSizeBytes = kernel.resources.static_shared;
    attributes->maxThreadsPerBlock = kernel.facts.max_threads ? kernel.facts.max_threads : 1024;
    attributes->maxDynamicSharedSizeBytes =
        kernel.most_dynamic_shared >= 0 ? kernel.most_dynamic_shared
                                        : (int)(shared_without_asking - kernel.resources.static_shared);
    return cudaSuccess;
}
}
