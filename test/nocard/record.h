/*
Where NOCARD_RECORD names a file, all that a rank gives to streams is written there, `.RANK` behind the name:
a line for each piece of work, in the order of the calls, as "STREAM WHAT".

    kernel LAUNCHER       the outermost range of NVTX in which it is given, or -; followed, for a product, by
                          " ROWS x COLUMNS x SUMS", " fp8" and " gelu"
    fill BYTES, copy BYTES    on the card, outside of any range
    all_gather BYTES RANKS    a call of NCCL: the bytes that it is given, as ncclAllGather() counts them
    wait STREAM LINES     it waits until another stream has done so many lines, waits not counted
    touched LINE READ WRITTEN    the kernel of that line is over: bytes of global memory that it read and
                          wrote, each counted once; it does not count as a line itself
*/
#pragma once

#include <cstddef>
#include <cuda_runtime.h>
#include <string>

namespace nocard {

void record(cudaStream_t stream, const std::string& what);
// Unless it is a launcher's own.
void record_outside_of_launchers(cudaStream_t stream, const std::string& what);

// Where a stream has come to, for an event.
struct RecordedPlace {
    cudaStream_t stream = nullptr;
    size_t lines = 0;
};
RecordedPlace recorded_place(cudaStream_t stream);
RecordedPlace record_kernel(cudaStream_t stream, const std::string& product = "");
void record_touched(const RecordedPlace& kernel, size_t read, size_t written);
void record_wait(cudaStream_t stream, const RecordedPlace& place);

}  // namespace nocard
