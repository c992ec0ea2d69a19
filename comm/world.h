/*
The processes of a run. Started alone, a program is a world of one and never touches MPI; started by mpirun or
srun it joins the others. Training works in one process, so a larger world is refused before anything is read
or written. Built WITHOUT_MPI, a program cannot join the others, but still sees that there are some.
*/
#pragma once

#include <cstdlib>
#include <string>

#ifndef WITHOUT_MPI
#include <mpi.h>
#endif
#ifdef __CUDACC__
#include <nccl.h>
#endif

#include "data/error.h"

class World {
public:
    World([[maybe_unused]] int* argc, [[maybe_unused]] char*** argv) {
#ifdef WITHOUT_MPI
        for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
            if (const char* size = getenv(variable)) size_ = atoi(size);
        }
#else
        for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE"}) {
            launched_ = launched_ || getenv(variable);
        }
        if (!launched_) return;
        if (MPI_Init(argc, argv) != MPI_SUCCESS)
            fail("MPI_Init failed; check the Open MPI installation (mpirun -version)");
        MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
        MPI_Comm_size(MPI_COMM_WORLD, &size_);
#endif
    }

    ~World() {
#ifndef WITHOUT_MPI
        if (launched_) MPI_Finalize();
#endif
    }

    World(const World&) = delete;
    World& operator=(const World&) = delete;

    int rank() const {
        return rank_;
    }
    int size() const {
        return size_;
    }

    void require_one_process() const {
        if (size_ > 1)
            fail("mpirun -np %d: one process trains one model; start it with -np 1 or without mpirun", size_);
    }

private:
    [[maybe_unused]] bool launched_ = false;
    int rank_ = 0, size_ = 1;
};

// The communication libraries this program was built with, for the run's header.
inline std::string communication_libraries() {
#ifdef WITHOUT_MPI
    std::string libraries = "no MPI";
#else
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(version, &length);
    std::string libraries(version, version + length);
    libraries = libraries.substr(0, libraries.find_first_of(",\n"));
#endif
#ifdef __CUDACC__
    int nccl = 0;
    if (ncclGetVersion(&nccl) == ncclSuccess) {
        libraries += text(", NCCL %d.%d.%d", nccl / 10000, nccl / 100 % 100, nccl % 100);
    }
#endif
    return libraries;
}
