/*
In every step, the ranks share their losses, the squares of their gradients, and requests to stop or to save a
checkpoint. The device sums these numbers over the ranks, and sends the sums to the host.
*/
#pragma once

#include <cfloat>
#include <cmath>

#include "comm/memory.h"        // OwnedArray, HostArray
#include "comm/mesh.h"          // Mesh, wait_for
#include "comm/zero_arrays.h"   // StepStatistics
#include "kernels/fill.cuh"     // fill
#include "kernels/streams.cuh"  // Event, copy_async, zero_async

// The result of a step, as all ranks see it.
struct StepResult {
    float loss;           // mean over the targets of the step
    float gradient_norm;  // before clipping
    bool finite;          // false: the weights were not changed
    bool stepped;         // false also if the loss or the norm exceeded its limit
    bool stop;            // a rank was asked to stop
    bool saved;           // all ranks have finished the save under way
    bool save;            // the first rank's clock says that a save is due
    float late_rows;      // share of table rows from host memory that waited for an update; NaN: no rows
};

// The statistics on the device (1), and the copy last sent to the host.
class StatisticsOnDevice : public DeviceArray<StepStatistics> {
public:
    StatisticsOnDevice() : OwnedArray(1) {}

    void clear(cudaStream_t stream) { zero_async(data, 1, stream); }

    // Makes the loss of all ranks NaN, because this one has an error.
    void poison(cudaStream_t stream) { fill(&data->loss, NAN, 1, stream); }

    // Sets the number of table rows that came from this rank's host, and how many of them waited for an
    // update.
    void count_rows(size_t rows, size_t late, cudaStream_t stream) {
        if (rows == 0) return;
        fill(&data->rows, (float)rows, 1, stream);
        fill(&data->late, (float)late, 1, stream);
    }

    // Sends the current values to the host, as work of the stream.
    void send(cudaStream_t stream) {
        copy_async(host_.data, data, 1, stream);
        sent_.record(stream);
    }

    // Waits for the values sent last. targets: number of targets whose losses were summed
    StepResult result(double targets, const Mesh& mesh) const {
        wait_for(sent_, mesh);
        const StepStatistics& s = *host_.data;
        bool saved = s.saved > (float)mesh.shape.ranks() - 0.5f;
        bool finite = s.norm <= FLT_MAX && std::abs(s.loss) <= FLT_MAX, stepped = !std::isnan(s.scale);
        return {(float)(s.loss / targets),
                s.norm,
                finite,
                stepped,
                s.stop > 0,
                saved,
                s.save > 0,
                s.late / s.rows};
    }

private:
    HostArray<StepStatistics> host_{1};  // valid once sent_ has occurred
    Event sent_;
};
