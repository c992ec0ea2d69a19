/*
Part of simt.cc: the device as the host sees it: its memory, and launches of kernels.
*/
#pragma once

namespace simt {
namespace {

std::mutex memory_mutex;

// Runs before main, so that all device memory is allocated here.
[[maybe_unused]] const bool installed = [] {
    host_device.allocate = [](size_t bytes) {
        std::lock_guard lock(memory_mutex);
        return device_memory.allocate(bytes);
    };
    host_device.release = [](void* pointer) {
        std::lock_guard lock(memory_mutex);
        size_t place = device_memory.place((uintptr_t)pointer);
        device_shadow.forget(place, device_memory.release(pointer));
    };
    host_device.major = 9;
    host_device.shared_bytes = max_dynamic_shared;
    return true;
}();

void run_grid(const cudaLaunchConfig_t& config, const void* kernel) {
    if (!shadow) {
        program = {};  // the thread-local block is that of this thread
        shadow.emplace(max_dynamic_shared + program.thread_locals.size + 16);
    }
    failure.happened = false;
    grid_size = config.gridDim;
    block_size = config.blockDim;
    dynamic_size = config.dynamicSmemBytes;
    size_t blocks = (size_t)grid_size.x * grid_size.y * grid_size.z;
    grid_order.start((block_size.x * block_size.y * block_size.z + warp_size - 1) / warp_size);
    std::vector<uint32_t> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    seed_random(blocks);
    for (size_t i = blocks; i > 0; i--) {
        std::swap(order[i - 1], order[random((uint32_t)i)]);
        if (!run_block(order[i - 1])) return report(kernel);
    }
}

// For tests of whole programs, in rank SIMT_RANK of an MPI job, or in each process: SIMT_FAIL_LAUNCH=k fails
// the k-th launch, counted from 1; at exit the number of launches is written to SIMT_LAUNCHES=path.
class Launches {
public:
    Launches() {
        const char *rank = getenv("SIMT_RANK"), *own_rank = getenv("OMPI_COMM_WORLD_RANK");
        if (rank && *rank && (!own_rank || strcmp(rank, own_rank) != 0)) return;
        if (const char* number = getenv("SIMT_FAIL_LAUNCH")) fails_ = atol(number);
        path_ = getenv("SIMT_LAUNCHES");
    }
    ~Launches() {
        FILE* file = path_ ? fopen(path_, "w") : nullptr;
        if (!file) return;
        fprintf(file, "%ld\n", count_.load());
        fclose(file);
    }
    bool next_fails() { return ++count_ == fails_; }

private:
    std::atomic<long> count_ = 0;
    long fails_ = 0;
    const char* path_ = nullptr;
} launches;

std::mutex limits_mutex;
std::map<const void*, size_t> limits;  // dynamic shared memory requested for a kernel

}  // namespace

void set_seed(uint64_t new_seed) {
    seed = new_seed;
}

cudaError_t allow_dynamic_shared(const void* kernel, size_t bytes) {
    if (bytes > max_dynamic_shared) return cudaErrorInvalidValue;
    std::lock_guard lock(limits_mutex);
    limits[kernel] = bytes;
    return cudaSuccess;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, Invoke call, const void* parameters,
                   size_t parameters_bytes) {
    dim3 grid = config.gridDim, threads = config.blockDim;
    size_t limit = dynamic_shared_without_asking;
    {
        std::lock_guard lock(limits_mutex);
        if (auto found = limits.find(kernel); found != limits.end()) limit = std::max(limit, found->second);
    }
    if (config.dynamicSmemBytes > limit || parameters_bytes > page) return cudaErrorInvalidValue;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535 ||
        threads.x == 0 || threads.y == 0 || threads.z == 0 || threads.z > 64 ||
        (size_t)threads.x * threads.y * threads.z > Stacks::max_threads) {
        return cudaErrorInvalidConfiguration;
    }
    if (launches.next_fails()) return cudaErrorLaunchOutOfResources;
    // One host thread runs all kernels, one at a time, and nothing else: its thread-local variables are the
    // static shared memory. It is never destroyed because streams may outlive any other object.
    static HostStream& device = *new HostStream;
    static std::mutex one_grid;
    std::string copy((const char*)parameters, parameters_bytes), range = outermost_range();
    host_stream(config.stream).enqueue([=] {
        std::lock_guard lock(one_grid);
        device.enqueue([&] {
            memcpy(stacks.parameters(), copy.data(), copy.size());
            invoke = call;
            if (counts_traffic) traffic_counter.begin(range);
            run_grid(config, kernel);
        });
        device.synchronize();
    });
    return cudaSuccess;
}

}  // namespace simt
