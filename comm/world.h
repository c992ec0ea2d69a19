/*
The processes of a run. Started alone, a program is a world of one and never touches MPI; started by mpirun or
srun it joins the others. World is the control plane: small messages in host memory, and errors that all ranks
agree on. The calls below that are said to be for all ranks must be made by every rank in the same order.

No rank may be left waiting for one that is gone, so a process that meets an exception of its own ends the
whole job with MPI_Abort.
*/
#pragma once

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <sched.h>
#include <set>
#include <string>
#include <string_view>
#include <unistd.h>
#include <utility>
#include <vector>

#include "comm/mpi_calls.h"
#include "data/base/error.h"
#include "data/base/strings.h"
#include "kernels/common.cuh"
#include "kernels/kernel_image.cuh"

#if defined(__CUDACC__) && !defined(COMM_MPI)
#define RANKS_USE_NCCL
#include <nccl.h>
#endif

// An error that every rank knows of and throws at the same place.
struct CommonError : Error {
    using Error::Error;
};

// The processes that a launcher says it has started, by its environment; 0 if there is no launcher.
inline int launched_processes() {
    for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
        if (const char* size = getenv(variable)) return std::max(atoi(size), 1);
    }
    return 0;
}

class World {
public:
    // For all ranks. Once in a process, for MPI starts only once.
    World([[maybe_unused]] int* argc, [[maybe_unused]] char*** argv) {
        char host[256] = "";
        gethostname(host, sizeof host - 1);
        host_ = host;
        int promised = launched_processes();
#ifdef WITHOUT_MPI
        if (promised > 1) {
            fail("mpirun -np %d: this program is built without MPI, so its processes cannot find each other; "
                 "build it with MPI=on, or start one process",
                 promised);
        }
#else
        bool can_join = false;
        for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"}) {
            can_join = can_join || getenv(variable);
        }
        if (can_join) join(argc, argv);
        if (promised > 1 && size_ != promised) {
            leave();
            fail("MPI: %d processes were started, but this one finds %d; start them with the mpirun of the "
                 "MPI it is built with (%s), or with srun --mpi=pmix",
                 promised, size_, mpi_library().c_str());
        }
#endif
    }

    // For all ranks: the same ranks once more, for another thread, whose messages meet none of this one's. It
    // goes before this World does.
    std::unique_ptr<World> for_another_thread() const {
        std::unique_ptr<World> other(new World(*this));
#ifndef WITHOUT_MPI
        if (size_ > 1) {
            MPI_Request request;
            mpiCheck(MPI_Comm_idup(control_, &other->control_, &request));
            mpi_wait(&request, 1);
        }
#endif
        return other;
    }

    // With other ranks still at work, leaving because of an exception that they do not know of ends the job.
    ~World() {
        if (first_ && size_ > 1 && std::uncaught_exceptions() > exceptions_ && !agreed_) abort();
        leave();
    }

    World& operator=(const World&) = delete;

    int rank() const {
        return rank_;
    }
    int size() const {
        return size_;
    }
    bool is_root() const {
        return rank_ == 0;
    }
    // Among the processes on this machine.
    int local_rank() const {
        return local_rank_;
    }
    int local_size() const {
        return local_size_;
    }
    const std::string& host() const {
        return host_;
    }

    // "rank 2 of 4 on HOST", for messages.
    std::string name_of(int rank, const std::string& host) const {
        return text("rank %d of %d on %s", rank, size_, host.c_str());
    }
    std::string name() const {
        return name_of(rank_, host_);
    }

    // For all ranks: root's bytes, in host memory, to everyone.
    void broadcast([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes,
                   [[maybe_unused]] int root = 0) const {
#ifndef WITHOUT_MPI
        if (size_ == 1) return;
        constexpr size_t most = INT_MAX;  // MPI counts in int
        MPI_Request request;
        for (size_t at = 0; at < bytes; at += most) {
            int count = (int)std::min(bytes - at, most);
            mpiCheck(MPI_Ibcast((char*)data + at, count, MPI_BYTE, root, control_, &request));
            mpi_wait(&request, 1);
        }
#endif
    }

    // For all ranks: everyone's text, by rank, on every rank. Together below 2 GiB.
    std::vector<std::string> all_gather(const std::string& mine) const {
        std::vector<std::string> texts = {mine};
#ifndef WITHOUT_MPI
        if (size_ == 1) return texts;
        std::vector<int> lengths((size_t)size_), offsets((size_t)size_);
        int length = (int)mine.size();
        MPI_Request request;
        mpiCheck(MPI_Iallgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, control_, &request));
        mpi_wait(&request, 1);
        long long total = 0;
        for (int rank = 0; rank < size_; rank++) {
            offsets[(size_t)rank] = (int)total;
            total += lengths[(size_t)rank];
        }
        if (total > INT_MAX) fail("World::all_gather: %lld bytes are too many; send less", total);
        std::string all((size_t)total, '\0');
        mpiCheck(MPI_Iallgatherv(mine.data(), length, MPI_BYTE, all.data(), lengths.data(), offsets.data(),
                                 MPI_BYTE, control_, &request));
        mpi_wait(&request, 1);
        texts.clear();
        for (size_t rank = 0; rank < lengths.size(); rank++) {
            texts.push_back(all.substr((size_t)offsets[rank], (size_t)lengths[rank]));
        }
#endif
        return texts;
    }

    // For all ranks: to_each[r] goes to rank r, and what each rank sent comes back. Most ranks have nothing
    // to say to most others, and messages are large: so the ranks tell each other the lengths, and send what
    // is not empty from where it lies.
    std::vector<std::string> exchange(const std::vector<std::string_view>& to_each) const {
        std::vector<std::string> from_each(to_each.size());
        from_each[(size_t)rank_] = to_each[(size_t)rank_];
#ifndef WITHOUT_MPI
        if (size_ == 1) return from_each;
        std::vector<int> lengths, incoming(to_each.size());
        for (std::string_view message : to_each) {
            if (message.size() > INT_MAX)
                fail("World::exchange: %zu bytes are too many; send less", message.size());
            lengths.push_back((int)message.size());
        }
        MPI_Request sizes;
        mpiCheck(MPI_Ialltoall(lengths.data(), 1, MPI_INT, incoming.data(), 1, MPI_INT, control_, &sizes));
        mpi_wait(&sizes, 1);
        constexpr int tag = 0;
        std::vector<MPI_Request> requests;
        for (int peer = 0; peer < size_; peer++) {
            std::string& message = from_each[(size_t)peer];
            int bytes = incoming[(size_t)peer];
            if (peer == rank_ || bytes == 0) continue;
            message.resize((size_t)bytes);
            mpiCheck(
                MPI_Irecv(message.data(), bytes, MPI_BYTE, peer, tag, control_, &requests.emplace_back()));
        }
        for (int peer = 0; peer < size_; peer++) {
            int bytes = lengths[(size_t)peer];
            if (peer == rank_ || bytes == 0) continue;
            mpiCheck(MPI_Isend(to_each[(size_t)peer].data(), bytes, MPI_BYTE, peer, tag, control_,
                               &requests.emplace_back()));
        }
        mpi_wait(requests.data(), (int)requests.size());
#endif
        return from_each;
    }

    // For all ranks: returns when every rank is here.
    void barrier() const {
#ifndef WITHOUT_MPI
        if (size_ == 1) return;
        MPI_Request request;
        mpiCheck(MPI_Ibarrier(control_, &request));
        mpi_wait(&request, 1);
#endif
    }

    // For all ranks: the largest value.
    int largest(int value) const {
#ifndef WITHOUT_MPI
        if (size_ == 1) return value;
        MPI_Request request;
        mpiCheck(MPI_Iallreduce(MPI_IN_PLACE, &value, 1, MPI_INT, MPI_MAX, control_, &request));
        mpi_wait(&request, 1);
#endif
        return value;
    }

    // For all ranks: runs `step`. If it fails on some, every rank throws the same CommonError: the message
    // that all ranks give, or else that of the first rank that failed, with its name before it. The step may
    // talk to other ranks only if it fails on all of them or on none.
    template <typename Step>
    void on_all_ranks(Step&& step) const {
        bool failed = true;
        std::string message;
        try {
            std::forward<Step>(step)();
            failed = false;
        } catch (const std::exception& error) {
            message = message_of(error);
        }
        if (largest(failed)) throw_common(failed, message);
    }

    // After the error of on_all_ranks() was caught: the ranks do not leave with it, but go on.
    void recover() const {
        agreed_ = false;
    }

    // Ends the job at once, on all ranks, with exit code 1.
    [[noreturn]] void abort() const {
        fflush(nullptr);
#ifndef WITHOUT_MPI
        // The thread that ends the job may be one that holds the mutex, and waits for nobody else for long.
        for (int tries = 0; tries < 1000 && !mpi_mutex.try_lock(); tries++) usleep(1000);
        MPI_Abort(MPI_COMM_WORLD, 1);
#endif
        _exit(1);
    }

    static std::string mpi_library() {
#ifdef WITHOUT_MPI
        return "no MPI";
#else
        char version[MPI_MAX_LIBRARY_VERSION_STRING];
        int length = 0;
        MPI_Get_library_version(version, &length);
        std::string library(version, version + length);
        return library.substr(0, library.find_first_of(",\n"));
#endif
    }

private:
    World(const World& other)
        : host_(other.host_),
          rank_(other.rank_),
          size_(other.size_),
          local_rank_(other.local_rank_),
          local_size_(other.local_size_),
          first_(false) {}

    [[noreturn]] void throw_common(bool failed, const std::string& message) const {
        // A letter before the message tells an empty one from none.
        std::vector<std::string> messages = all_gather(failed ? "!" + message : "");
        std::vector<std::string> hosts = all_gather(host_);
        agreed_ = true;
        size_t first = 0;
        while (messages[first].empty()) first++;
        std::string common = messages[first].substr(1);
        bool same = std::all_of(messages.begin(), messages.end(),
                                [&](const std::string& other) { return other == messages[first]; });
        throw CommonError(same ? common : name_of((int)first, hosts[first]) + ": " + common);
    }

#ifndef WITHOUT_MPI
    void join(int* argc, char*** argv) {
        int provided = MPI_THREAD_SINGLE;
        if (MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS)
            fail("MPI: cannot start; check the Open MPI installation (mpirun -version)");
        joined_ = true;
        if (provided < MPI_THREAD_SERIALIZED) {
            leave();
            fail("MPI: %s cannot be called from several threads; install an MPI built with "
                 "MPI_THREAD_SERIALIZED or more",
                 mpi_library().c_str());
        }
        // Errors become exceptions with a message (mpiCheck) instead of ending the process.
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
        MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
        mpiCheck(MPI_Comm_dup(MPI_COMM_WORLD, &control_));
        MPI_Comm local;
        mpiCheck(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local));
        MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
        MPI_Comm_size(MPI_COMM_WORLD, &size_);
        MPI_Comm_rank(local, &local_rank_);
        MPI_Comm_size(local, &local_size_);
        MPI_Comm_free(&local);
    }

    void leave() {
        if (!joined_) {
            std::lock_guard lock(mpi_mutex);
            if (control_ != MPI_COMM_NULL) MPI_Comm_free(&control_);
            return;
        }
        try {
            barrier();  // MPI_Finalize waits too, but keeps a core busy
        } catch (const Error& error) {
            fprintf(stderr, "train_gpt: %s\n", error.what());
            abort();
        }
        std::lock_guard lock(mpi_mutex);
        if (control_ != MPI_COMM_NULL) MPI_Comm_free(&control_);
        joined_ = false;
        MPI_Finalize();
    }

    MPI_Comm control_ = MPI_COMM_NULL;  // messages of this class meet no others
    bool joined_ = false;               // this World is the one that leaves MPI
#else
    void leave() {}
#endif

    std::string host_;
    int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
    bool first_ = true;  // of the threads' Worlds
    int exceptions_ = std::uncaught_exceptions();
    mutable bool agreed_ = false;  // all ranks are leaving with the same error
};

// ----------------------------------------------------------------------------
// the part of a machine that a rank takes

// OpenMP threads for each rank on a machine, so that together they keep its cores busy, but not more; 0:
// leave it to OMP_NUM_THREADS, which is set.
inline int threads_per_rank(const World& world) {
    if (getenv("OMP_NUM_THREADS")) return 0;
    cpu_set_t cores;
    CPU_ZERO(&cores);
    int allowed = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : INT_MAX;
    int fair_share = (int)sysconf(_SC_NPROCESSORS_ONLN) / world.local_size();
    return std::clamp(fair_share, 1, std::max(allowed, 1));
}

// For all ranks: takes the GPU of this rank's number on its machine. NCCL wants a GPU for each rank; over
// MPI, ranks can share one.
inline void choose_device(const World& world) {
    // Streams that compute, reduce, gather and send in four directions wait for each other, and would wait
    // for ever if they shared the few queues that a GPU has by default, or the one that some clusters set.
    // So might a kernel that is loaded when it is first launched, for that waits for all that run.
    if (world.size() > 1) {
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
        setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    }
    world.on_all_ranks([&] {
        int devices = 0;
        cudaError_t error = cudaGetDeviceCount(&devices);
        if (error != cudaSuccess || devices == 0) {
            fail("GPU: none found on %s (%s); see that nvidia-smi lists one, or build for the CPU with "
                 "DEVICE=cpu",
                 world.host().c_str(), cudaGetErrorString(error));
        }
        cudaCheck(cudaSetDevice(world.local_rank() % devices));
#ifndef DEVICE_CPU
        if (!kernel_architecture(error)) {
            const cudaDeviceProp& device = device_properties();
            fail("GPU: %s on %s does not run the kernels of this program (%s); build with make GPU_ARCH=%d%d",
                 device.name, world.host().c_str(), cudaGetErrorString(error), device.major, device.minor);
        }
#endif
    });
#ifdef RANKS_USE_NCCL
    // Slurm may show each process only its own GPU, so GPUs are told apart by what they are, not by number.
    const auto& uuid = device_properties().uuid;
    std::string mine(uuid.bytes, sizeof uuid.bytes);
    std::set<std::string> different;
    for (const std::string& gpu : world.all_gather(world.host() + " " + mine)) {
        if (gpu.starts_with(world.host() + " ")) different.insert(gpu);
    }
    world.on_all_ranks([&] {
        if ((int)different.size() < world.local_size()) {
            fail(
                "GPUs: %d processes on %s have %d of them, and NCCL needs one each; start %d there, or build "
                "with COMM=mpi to share",
                world.local_size(), world.host().c_str(), (int)different.size(), (int)different.size());
        }
    });
#endif
}

// The communication libraries this program was built with, for the run's header.
inline std::string communication_libraries() {
    std::string libraries = World::mpi_library();
#ifdef RANKS_USE_NCCL
    int nccl = 0;
    if (ncclGetVersion(&nccl) == ncclSuccess) {
        libraries += text(", NCCL %d.%d.%d", nccl / 10000, nccl / 100 % 100, nccl % 100);
    }
#elif !defined(WITHOUT_MPI)
    libraries += " (host transport)";
#endif
    return libraries;
}

// ----------------------------------------------------------------------------
// errors that end a run

// For all ranks: if one of them has an error (empty: it has none), all throw it.
inline void raise_error(const World& world, const std::string& error) {
    world.on_all_ranks([&] {
        if (!error.empty()) fail("%s", error.c_str());
    });
}

// Ends the job because of an error that only this rank knows of: the others may wait for it.
[[noreturn]] inline void abort_job(const World& world, const std::exception& error) {
    fprintf(stderr, "train_gpt: %s: %s\n", world.name().c_str(), one_line(message_of(error)).c_str());
    world.abort();
}

// For all ranks: runs work that throws what goes wrong. An error that not all ranks agree on ends the job at
// once, before the work's streams are put away: some may wait for other ranks.
template <typename Work>
void or_abort(const World& world, Work&& work) {
    try {
        work();
    } catch (const CommonError&) {
        throw;
    } catch (const std::exception& error) {
        if (world.size() > 1) abort_job(world, error);
        throw;
    }
}
