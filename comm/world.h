/*
The processes of a run. Started alone, a program is a world of one and never touches MPI; started by mpirun or
srun it joins the others. Training works in one process, so a larger world is refused before anything is read
or written.
*/
#pragma once

#include <cstdlib>
#include <string>

#include <mpi.h>
#ifdef __CUDACC__
#include <nccl.h>
#endif

#include "data/error.h"

class World {
public:
    World(int* argc, char*** argv) {
        for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE"}) {
            launched_ = launched_ || getenv(variable);
        }
        if (!launched_) return;
        if (MPI_Init(argc, argv) != MPI_SUCCESS)
            fail("MPI_Init failed; check the Open MPI installation (mpirun -version)");
        MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
        MPI_Comm_size(MPI_COMM_WORLD, &size_);
    }

    ~World() {
        if (launched_) MPI_Finalize();
    }

    World(const World&) = delete;
    World& operator=(const World&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }

    void require_one_process() const {
        if (size_ > 1)
            fail("mpirun -np %d: one process trains one model; start it with -np 1 or without mpirun", size_);
    }

private:
    bool launched_ = false;
    int rank_ = 0, size_ = 1;
};

// The communication libraries this program was built with, for the run's header.
inline std::string communication_libraries() {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(version, &length);
    std::string libraries(version, version + length);
    libraries = libraries.substr(0, libraries.find_first_of(",\n"));
#ifdef __CUDACC__
    int nccl = 0;
    if (ncclGetVersion(&nccl) == ncclSuccess) {
        libraries += text(", NCCL %d.%d.%d", nccl / 10000, nccl / 100 % 100, nccl % 100);
    }
#endif
    return libraries;
}
