/*
The part of a machine that a rank uses: a device, and the cores near it.

A GPU is attached to one NUMA node of its machine. If the process runs on another node, copies to pinned
memory and NCCL's threads have to cross nodes, and mpirun deals processes to nodes in turn, regardless of the
devices that they choose. So a process that its launcher has not bound binds itself to the cores of its
device's node, before it creates threads and allocates memory. If the launcher has bound it, the header of the
run says to which cores.
*/
#pragma once

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sched.h>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

#include "comm/world.h"
#include "data/base/error.h"
#include "kernels/common.cuh"
#ifndef DEVICE_CPU
#include "kernels/cublas.cuh"
#endif
#include "kernels/kernel_image.cuh"

// ----------------------------------------------------------------------------
// cores

using Cores = std::set<int>;

// Parses a list as Linux writes it: "0-15,32-47".
inline Cores parse_cores(const std::string& list) {
    Cores cores;
    const char* at = list.c_str();
    for (int first, last, length; sscanf(at, "%d%n", &first, &length) == 1; at += *at == ',') {
        at += length;
        last = first;
        if (sscanf(at, "-%d%n", &last, &length) == 1) at += length;
        for (int core = first; core <= last; core++) cores.insert(core);
    }
    return cores;
}

inline Cores allowed_cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    Cores cores;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return cores;
    for (int core = 0; core < CPU_SETSIZE; core++) {
        if (CPU_ISSET(core, &set)) cores.insert(core);
    }
    return cores;
}

inline std::string first_line(const std::string& path) {
    std::string line;
    std::getline(std::ifstream(path) >> std::ws, line);
    return line;
}

// The address of the device on the PCI bus, such as "0000:18:00.0"; empty if it is not a GPU.
inline std::string bus_of_device() {
#ifdef __CUDACC__
    char bus[32] = "";
    int device = 0;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaDeviceGetPCIBusId(bus, sizeof bus, device));
    return bus;
#else
    return "";
#endif
}

// The cores of the device's NUMA node; without a GPU, the ranks of a machine share its nodes. Empty if there
// is only one node or fewer ranks than nodes, Linux does not report them, or the process is the only one on
// its machine and may use all of it.
inline Cores cores_of_device(const World& world) {
    if (world.local_size() == 1) return {};
    if (std::string bus = bus_of_device(); !bus.empty()) {
        for (char& letter : bus) letter = (char)tolower(letter);
        return parse_cores(first_line("/sys/bus/pci/devices/" + bus + "/local_cpulist"));
    }
    std::vector<Cores> nodes;
    for (int node : parse_cores(first_line("/sys/devices/system/node/has_cpu")))
        nodes.push_back(parse_cores(first_line(text("/sys/devices/system/node/node%d/cpulist", node))));
    if (nodes.size() < 2 || world.local_size() < (int)nodes.size()) return {};
    return nodes[(size_t)world.local_rank() * nodes.size() / (size_t)world.local_size()];
}

struct CoreChoice {
    Cores bind_to;     // empty: do not bind
    std::string text;  // for the header
};

// launcher: "mpirun: --bind-to none" or the like, empty without one. all: the number of the machine's cores.
inline CoreChoice choose_cores(const Cores& allowed, const Cores& near, size_t all,
                               const std::string& launcher) {
    auto is_near = [&](int core) { return near.contains(core); };
    if (allowed.size() == all) {
        if (near.empty() || near.size() == all) return {{}, text("%zu", all)};
        return {near, text("%zu of %zu, those of the device's NUMA node", near.size(), all)};
    }
    std::string words = text("%zu of %zu", allowed.size(), all);
    if (!launcher.empty()) words += ", bound by " + launcher;
    if (!near.empty() && std::ranges::none_of(allowed, is_near))
        words += "; the device is on another NUMA node";
    return {{}, words};
}

// Returns the launcher that binds the processes, with its option that leaves them unbound, or empty.
inline std::string binding_launcher() {
    for (const LauncherVariables& row : launcher_table)
        if (*row.unbound && getenv(row.size)) return row.unbound;
    return "";
}

// The cores that the process runs on, for the header; set once it has chosen its device.
inline std::string& process_cores() {
    static std::string words;
    return words;
}

// Binds this process if choose_cores() says so, and returns which cores it runs on, for the header.
inline std::string bind_to_cores(const World& world) {
    CoreChoice choice = choose_cores(allowed_cores(), cores_of_device(world),
                                     (size_t)sysconf(_SC_NPROCESSORS_ONLN), binding_launcher());
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int core : choice.bind_to) {
        if (core < CPU_SETSIZE) CPU_SET(core, &set);
    }
    if (!choice.bind_to.empty() && sched_setaffinity(0, sizeof set, &set) != 0)
        return text("%ld, not bound: %s", sysconf(_SC_NPROCESSORS_ONLN), strerror(errno));
    return choice.text;
}

// For all ranks: on the first rank, returns the header lines about the cores of all ranks.
inline std::vector<std::string> core_lines(const World& world) {
    std::map<std::string, int> ranks;
    for (const std::string& words : world.gather(process_cores())) ranks[words]++;
    std::vector<std::string> lines;
    for (auto& [words, count] : ranks)
        lines.push_back(ranks.size() == 1 ? words : text("%s (%d ranks)", words.c_str(), count));
    return lines;
}

// OpenMP threads for each rank of a machine, so that together they use each core once. 0 if OMP_NUM_THREADS
// is set, which then decides.
inline int threads_per_rank(const World& world) {
    if (getenv("OMP_NUM_THREADS")) return 0;
    auto allowed = (int)allowed_cores().size();
    int fair_share = (int)sysconf(_SC_NPROCESSORS_ONLN) / world.local_size();
    return std::clamp(fair_share, 1, std::max(allowed, 1));
}

// ----------------------------------------------------------------------------
// devices

// Call before MPI starts, which may start CUDA. Streams that compute, reduce, gather and send in four
// directions wait for each other, and would deadlock if they shared the few queues that CUDA has by default,
// or the one that some clusters set. Loading a kernel at its first launch might deadlock too, because loading
// waits for all running kernels.
inline void set_device_variables() {
    if (launched_processes() <= 1) return;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
}

// For all ranks: chooses the GPU by this rank's number on its machine. NCCL requires a GPU for each rank;
// over MPI, ranks can share one.
inline void choose_device(const World& world) {
    world.on_all_ranks([&] {
        int devices = 0;
        cudaError_t error = cudaGetDeviceCount(&devices);
        if (error != cudaSuccess || devices == 0) {
            fail("GPU: none found on %s (%s); check that nvidia-smi lists one, or build for the CPU with "
                 "DEVICE=cpu",
                 world.host().c_str(), cudaGetErrorString(error));
        }
        int device = world.local_rank() % devices;
        cudaCheck(cudaSetDevice(device));
        process_place() = world.name();
        if (std::string bus = bus_of_device(); !bus.empty())
            process_place() += text(", GPU %d (%s)", device, bus.c_str());
#ifndef DEVICE_CPU
        const cudaDeviceProp& card = device_properties();
        if (!kernel_architecture(error)) {
            fail("GPU: %s on %s does not run the kernels of this program (%s); build with make GPU_ARCH=%d%d",
                 card.name, world.host().c_str(), cudaGetErrorString(error), card.major, card.minor);
        }
        check_cublas_version(card);
#endif
        process_cores() = bind_to_cores(world);
    });
    world.name_places(process_place());
#ifdef RANKS_USE_NCCL
    // Slurm may show each process only its own GPU, so GPUs are identified by UUID, not by number.
    const auto& uuid = device_properties().uuid;
    std::string mine(uuid.bytes, sizeof uuid.bytes);
    std::string crowded = world.agree(mine, [&](const std::vector<std::string>& gpus) {
        std::map<std::string, std::set<std::string>> of_host;
        std::map<std::string, int> processes;
        for (int rank = 0; rank < world.size(); rank++) {
            of_host[world.host(rank)].insert(gpus[(size_t)rank]);
            processes[world.host(rank)]++;
        }
        for (auto& [host, different] : of_host) {
            auto there = (int)different.size();
            if (there < processes[host])
                return text("GPUs: %d processes on %s share %d, but NCCL needs one for each; start %d "
                            "there, or build with COMM=mpi to share",
                            processes[host], host.c_str(), there, there);
        }
        return std::string();
    });
    if (!crowded.empty()) world.fail_on_all(crowded, exit_bad_input);
#endif
}

// Returns the maximum number of this host's ranks that share a device.
inline int ranks_sharing_device([[maybe_unused]] const World& world) {
#ifdef RANKS_USE_NCCL
    return 1;  // even though a rank may see only its own device
#else
    int devices;
    cudaCheck(cudaGetDeviceCount(&devices));
    return ceil_div(world.local_size(), devices);
#endif
}
