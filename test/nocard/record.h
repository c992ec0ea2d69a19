/*
If NOCARD_RECORD names a file, each rank writes there, with the suffix `.RANK`, all work that it gives to
streams: a line for each piece of work, in the order of the calls, as "STREAM WORK".

    kernel LAUNCHER       the outermost NVTX range in which it is launched, or -; followed, for a product, by
                          " ROWS x COLUMNS x SUMS", " fp8" and " gelu"
    fill BYTES, copy BYTES    on the card, outside of any range
    ncclAllGather BYTES RANKS    a call of NCCL: its count in bytes, and the size of its group
    wait STREAM LINES     the stream waits until STREAM has done its first LINES lines, not counting waits
    touched LINE READ WRITTEN    the kernel of that line has ended: bytes of global memory that it read and
                          wrote, each counted once; this does not count as a line itself
*/
#pragma once

#include <cstddef>
#include <cuda_runtime.h>
#include <string>

namespace nocard {

void record(cudaStream_t stream, const std::string& what);
// Records nothing within a launcher's NVTX range.
void record_outside_of_launchers(cudaStream_t stream, const std::string& what);

// The position of a stream in the record, for an event.
struct RecordedPlace {
    cudaStream_t stream = nullptr;
    size_t lines = 0;
};
RecordedPlace recorded_place(cudaStream_t stream);
RecordedPlace record_kernel(cudaStream_t stream, const std::string& product = "");
void record_touched(const RecordedPlace& kernel, size_t read, size_t written);
void record_wait(cudaStream_t stream, const RecordedPlace& place);

}  // namespace nocard
