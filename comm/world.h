/*
The processes of a run. A program that is started alone is a world of one and never calls MPI; one that mpirun
or srun starts joins the others. World adds to the control plane the machines of the ranks, and errors that
all ranks agree on. Calls that are said to be for all ranks must be made by every rank in the same order.

No rank may be left waiting for one that has exited, so a process with an exception that the other ranks do
not share ends the whole job with MPI_Abort. No rank may wait forever for one that is stuck either, so each
process has a watchdog, even a single one.
*/
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "comm/control_plane.h"
#include "data/base/deadlines.h"
#include "data/base/error.h"
#include "data/base/screen.h"
#include "data/base/strings.h"
#include "data/base/this_machine.h"  // host_name
#include "kernels/common.cuh"

#if defined(__CUDACC__) && !defined(COMM_MPI)
#define RANKS_USE_NCCL
#include <nccl.h>
#endif

// An error that every rank knows of and throws at the same place.
struct CommonError : Error {
    using Error::Error;
};

// Encodes an error of one rank for the others. The text is not empty, even if the message is.
inline std::string packed(const NotedError& error) {
    return std::to_string(error.exit_code) + ":" + error.message;
}
inline NotedError unpacked_error(const std::string& text) {
    return {atoi(text.c_str()), text.substr(text.find(':') + 1)};
}

// The environment variables in which launchers pass each process the number of processes and its rank. Those
// of mpirun come first, because within a Slurm job, Slurm's variables count mpirun's daemons.
struct LauncherVariables {
    const char *size, *rank;  // an empty size: another row has it
    bool is_mpi;              // MPI uses them to find the other processes
    const char* unbound;      // the launcher, and its option that does not bind processes to cores
};
inline constexpr LauncherVariables launcher_table[] = {
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", true, "mpirun: --bind-to none"},
    {"PMI_SIZE", "PMI_RANK", true, ""},
    {"", "PMIX_RANK", true, ""},
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", false, "srun: --cpu-bind=none"},
    {"WORLD_SIZE", "LOCAL_RANK", false, ""},  // torchrun and similar, which assign devices
    {"WORLD_SIZE", "RANK", false, ""},
};

// Returns the number of processes that a launcher says it started, from the environment; 0 without a
// launcher.
inline int launched_processes() {
    for (const LauncherVariables& row : launcher_table)
        if (const char* size = getenv(row.size); size && getenv(row.rank)) return std::max(atoi(size), 1);
    return 0;
}

// Refuses to train in one process if the Slurm job asks for several tasks, but its script has not started
// them.
inline void check_all_started() {
    const char* tasks = getenv("SLURM_NTASKS");
    if (!tasks || atoi(tasks) <= 1 || launched_processes() > 0) return;
    fail("SLURM_NTASKS is %d, but this process is alone; start all tasks with srun --mpi=pmix or mpirun, "
         "or unset SLURM_NTASKS to train in one process",
         atoi(tasks));
}

// "rank 3 of 8 on HOST, GPU 3 (0000:1b:00.0)".
using NameOfRank = std::function<std::string(int)>;

// A thread that keeps ranks from waiting forever (comm/watchdog.h).
class RankWatch {
public:
    virtual ~RankWatch() = default;
#ifndef WITHOUT_MPI
    // Lets the ranks ask each other over this communicator, which only the watchdogs use.
    virtual void connect(MPI_Comm) {}
#endif
    // Sets the names of the ranks in messages.
    virtual void name_ranks(NameOfRank) {}
};
// host: this process's machine, for messages before connect(); alone: there is no other process
using MakeWatch = std::unique_ptr<RankWatch>(const std::string& host, bool alone);

class World : public ControlPlane {
public:
    // For all ranks. Only once in a process, because MPI starts only once.
    World([[maybe_unused]] int* argc, [[maybe_unused]] char*** argv, MakeWatch& make_watch) {
        hosts_ = {host_name()};  // one per rank, once they are known
        int promised = launched_processes();
#ifdef WITHOUT_MPI
        if (promised > 1) {
            fail("mpirun -np %d: this program is built without MPI, so its processes cannot find each other; "
                 "build it with MPI=on, or start one process",
                 promised);
        }
#else
        bool can_join = std::ranges::any_of(
            launcher_table, [](const LauncherVariables& row) { return row.is_mpi && getenv(row.rank); });
        if (can_join) join(argc, argv, make_watch);
        if (promised > 1 && size_ != promised) {
            leave();
            fail("MPI: %d processes were started, but this one finds %d; start them with the mpirun of the "
                 "MPI that this program is built with (%s), or with srun --mpi=pmix",
                 promised, size_, mpi_library().c_str());
        }
        if (can_join) return;
#endif
        watch_ = make_watch(host(), true);
    }

    // For all ranks: returns a World of the same ranks for another thread, whose messages are separate from
    // this one's. It must be destroyed before this World.
    std::unique_ptr<World> for_another_thread() const {
        std::unique_ptr<World> other(new World(*this));
#ifndef WITHOUT_MPI
        other->mpi_ = MPI_COMM_NULL;  // the communicator belongs to this World
        if (size_ > 1) {
            MPI_Request request;
            mpiCheck(MPI_Comm_idup(mpi_, &other->mpi_, &request));
            mpi_wait(&request, 1);
        }
#endif
        return other;
    }

    // Ends the job if this rank leaves because of an exception that the other ranks, still working, do not
    // know of.
    ~World() {
        if (first_ && size_ > 1 && std::uncaught_exceptions() > exceptions_ && !agreed_) abort();
        leave();
    }

    World& operator=(const World&) = delete;

    // Rank and size among the processes on this machine.
    int local_rank() const {
        return local_rank_;
    }
    int local_size() const {
        return local_size_;
    }
    // The number of ranks on the machine that has the most; the same on all ranks.
    int most_on_a_host() const {
        std::map<std::string, int> of_host;
        int most = 1;
        for (const std::string& host : hosts_) most = std::max(most, ++of_host[host]);
        return most;
    }
    bool on_several_hosts() const {
        return most_on_a_host() < size_;
    }
    const std::string& host(int rank) const {
        return hosts_[(size_t)rank];
    }
    const std::string& host() const {
        return host(rank_);
    }

    // "rank 2 of 4 on HOST", for messages.
    std::string name_of(int rank) const {
        return text("rank %d of %d on %s", rank, size_, host(rank).c_str());
    }
    std::string name() const {
        return name_of(rank_);
    }
    // Puts a rank's name before its message, unless the message already begins with it, as those of failed
    // calls do.
    std::string said_by(int rank, const std::string& message) const {
        return message.starts_with(name_of(rank)) ? message : name_of(rank) + ": " + message;
    }

    // For all ranks, each of which passes its own name: sets the names of ranks in the watchdogs' messages.
    void name_places(const std::string& mine) const {
        std::vector<std::string> places = gather(mine);
        if (!watch_) return;
        watch_->name_ranks([this, mine, places](int rank) {
            return rank == rank_ ? mine : is_root() ? places[(size_t)rank] : name_of(rank);
        });
    }

    // For all ranks: runs `step`. If it fails on some, every rank throws the same CommonError: the message
    // common to all ranks, or else that of the first rank that failed, preceded by its name. The step may
    // communicate with other ranks only if it fails on all of them or on none.
    template <typename Step>
    void on_all_ranks(Step&& step) const {
        bool failed = true;
        NotedError mine;
        try {
            std::forward<Step>(step)();
            failed = false;
        } catch (const std::exception& error) {
            mine = {exit_code_of(error), message_of(error)};
        }
        if (largest(failed)) throw_common(failed, mine);
    }

    // For all ranks: throws an error that all of them know already.
    [[noreturn]] void fail_on_all(const std::string& message, int exit_code) const {
        agreed_ = true;
        throw CommonError(message, exit_code);
    }

    // Called after the error of on_all_ranks() was caught: the ranks do not exit with it, but continue.
    void recover() const {
        agreed_ = false;
    }

    // Ends the job at once, on all ranks.
    [[noreturn]] void abort(int exit_code = exit_failed_part) const {
        fflush(nullptr);
#ifndef WITHOUT_MPI
        // This thread may hold the mutex itself, so it waits only briefly for it.
        lock_within(1, mpi_mutex);
        MPI_Abort(MPI_COMM_WORLD, exit_code);
#endif
        _exit(exit_code);
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
        : ControlPlane(other),
          hosts_(other.hosts_),
          local_rank_(other.local_rank_),
          local_size_(other.local_size_),
          first_(false) {}

    // The first rank chooses among the messages of those that failed.
    [[noreturn]] void throw_common(bool failed, const NotedError& mine) const {
        std::string common = agree(failed ? packed(mine) : "", [this](const std::vector<std::string>& all) {
            size_t first = 0;
            while (all[first].empty()) first++;
            NotedError chosen = unpacked_error(all[first]);
            bool same =
                std::ranges::all_of(all, [&](const std::string& other) { return other == all[first]; });
            if (!same) chosen.message = said_by((int)first, chosen.message);
            return packed(chosen);
        });
        NotedError failure = unpacked_error(common);
        fail_on_all(failure.message, failure.exit_code);
    }

#ifndef WITHOUT_MPI
    void join(int* argc, char*** argv, MakeWatch& make_watch) {
        watch_ = make_watch(host(), false);
        int provided = MPI_THREAD_SINGLE;
        {
            WaitsForOthers wait;
            if (MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS)
                fail("MPI: cannot start; check the Open MPI installation (mpirun -version)");
        }
        joined_ = true;
        if (provided < MPI_THREAD_SERIALIZED) {
            leave();
            fail("MPI: %s cannot be called from several threads; install an MPI built with "
                 "MPI_THREAD_SERIALIZED or more",
                 mpi_library().c_str());
        }
        // Errors become exceptions with a message (mpiCheck) instead of ending the process.
        mpiCheck(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
        mpiCheck(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN));
        // Watchdogs are connected first, so that they can ask each other during the waits that follow.
        MPI_Request made;
        mpiCheck(MPI_Comm_idup(MPI_COMM_WORLD, &watched_, &made));
        mpi_wait(&made, 1);
        watch_->connect(watched_);
        MPI_Comm control;
        mpiCheck(MPI_Comm_idup(MPI_COMM_WORLD, &control, &made));
        mpi_wait(&made, 1);
        const std::string mine = host();
        use(control);
        hosts_ = all_gather(mine);
        local_rank_ = (int)std::count(hosts_.begin(), hosts_.begin() + rank_, host());
        local_size_ = (int)std::ranges::count(hosts_, host());
        watch_->name_ranks([this](int rank) { return name_of(rank); });
    }

    void leave() {
        if (!joined_) {
            std::lock_guard lock(mpi_mutex);
            if (mpi_ != MPI_COMM_NULL) MPI_Comm_free(&mpi_);
            return;
        }
        Phase phase("end");
        try {
            barrier();  // MPI_Finalize waits too, but keeps a core busy
        } catch (const Error& error) {
            screen.give_up();
            print_error(error.what());
            abort();
        }
        watch_.reset();
        std::lock_guard lock(mpi_mutex);
        for (MPI_Comm* mpi : {&mpi_, &watched_}) {
            if (*mpi != MPI_COMM_NULL) MPI_Comm_free(mpi);
        }
        joined_ = false;
        MPI_Finalize();
    }

    MPI_Comm watched_ = MPI_COMM_NULL;  // messages of the watchdogs
    bool joined_ = false;               // this World is the one that leaves MPI
#else
    void leave() {}
#endif
    std::unique_ptr<RankWatch> watch_;

    std::vector<std::string> hosts_;  // by rank
    int local_rank_ = 0, local_size_ = 1;
    bool first_ = true;  // not one that for_another_thread() made
    int exceptions_ = std::uncaught_exceptions();
    mutable bool agreed_ = false;  // all ranks are leaving with the same error
};

// ----------------------------------------------------------------------------
// settings of a run

// Lists the variables of an environment that begin with `prefix`: ", NCCL_ALGO=Ring, NCCL_PROTO=LL".
inline std::string settings_in(char** environment, const std::string& prefix) {
    std::set<std::string> settings;
    for (char** one = environment; *one; one++) {
        if (std::string(*one).starts_with(prefix)) settings.insert(printable(*one));
    }
    std::string list;
    for (const std::string& setting : settings) list += ", " + setting;
    return list;
}

// Describes the communication libraries of this program and their settings, for the run's header.
inline std::string communication_libraries() {
    std::string libraries = World::mpi_library();
#ifdef RANKS_USE_NCCL
    int nccl = 0;
    if (ncclGetVersion(&nccl) == ncclSuccess) {
        libraries += text(", NCCL %d.%d.%d", nccl / 10000, nccl / 100 % 100, nccl % 100);
    }
    libraries += settings_in(environ, "NCCL_");
#elif !defined(WITHOUT_MPI)
    libraries += " (host transport)";
#endif
    return libraries;
}

// ----------------------------------------------------------------------------
// errors that end a run

// For all ranks: if one of them has an error, all throw it.
inline void raise_error(const World& world, const NotedError& error) {
    world.on_all_ranks([&] { error.raise(); });
}

// For all ranks: calls make() on the first one, and returns its result on all; if make() throws, all ranks
// throw the same error. Thousands of ranks that read the same file would overload the file system, and might
// see different versions of the file.
template <typename Make>
std::string text_from_root(const World& world, Make&& make) {
    std::string text;
    if (world.is_root()) {
        try {
            text = "+" + make();
        } catch (const std::exception& error) {
            text = "-" + packed({exit_code_of(error), message_of(error)});
        }
    }
    text = world.broadcast_text(std::move(text));
    if (text[0] == '+') return text.substr(1);
    NotedError failure = unpacked_error(text.substr(1));
    world.fail_on_all(failure.message, failure.exit_code);
}

// Ends the job because of an error that only this rank knows of: the others may be waiting for this rank.
[[noreturn]] inline void abort_job(const World& world, const std::exception& error) {
    screen.give_up();
    print_error(world.said_by(world.rank(), message_of(error)));
    world.abort(exit_code_of(error));
}

// For all ranks: runs work(). An error that not all ranks agree on ends the job at once, before the work's
// streams are destroyed: some of these may be waiting for other ranks.
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
