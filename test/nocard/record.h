/*
Where NOCARD_RECORD names a file, all that a rank gives to streams is written there, `.RANK` behind the name:
a line for each piece of work, in the order of the calls, as "STREAM WHAT".

    kernel LAUNCHER       a kernel or a product; the outermost range of NVTX in which it is given, or -
    fill BYTES, copy BYTES    on the card, outside of any range
    all_gather BYTES RANKS    a call of NCCL: the bytes that it is given, as ncclAllGather() counts them
    wait STREAM LINES     it waits until another stream has done so many lines, waits not counted
*/
#pragma once

#include <cstddef>
#include <cuda_runtime.h>
#include <string>

namespace nocard {

void record(cudaStream_t stream, const std::string& what);
void record_kernel(cudaStream_t stream);
// Unless it is a launcher's own.
void record_outside_of_launchers(cudaStream_t stream, const std::string& what);

// Where a stream has come to, for an event.
struct RecordedPlace {
    cudaStream_t stream = nullptr;
    size_t lines = 0;
};
RecordedPlace recorded_place(cudaStream_t stream);
void record_wait(cudaStream_t stream, const RecordedPlace& place);

}  // namespace nocard
