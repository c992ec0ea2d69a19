/*
The device of a run: its name and its rates, and which work goes through CUDA graphs.
*/
#pragma once

#include <string>

#include "comm/build_checks.h"       // takes_wgmma_attention
#include "comm/device_batches.h"     // Batch
#include "comm/layout.h"             // Layout, pipeline_text
#include "comm/memory.h"             // available_memory
#include "comm/mesh.h"               // Mesh
#include "comm/pipeline_schedule.h"  // PipelineTask
#include "comm/placement.h"          // core_lines
#include "comm/world.h"              // World
#include "data/base/error.h"         // note_error
#include "data/base/figures.h"       // human, seconds_now
#include "data/base/print.h"         // print
#include "data/base/stop_signals.h"  // launcher_advice
#include "data/options/options.h"    // Options
#include "kernels/cards.h"           // this_machine
#include "kernels/graph.cuh"         // graph_key
#include "kernels/matmul.cuh"        // measured_gemm_rate

// ----------------------------------------------------------------------------
// CUDA graphs (--cuda-graphs)
//
// Only the passes of a process that is alone with its device go through graphs: what is sent to other ranks,
// or to the state of the optimizer on the host, has streams of its own, whose events lie outside.

// Names the work on a task: all that its kernels are made from, but for what is in memory. Its place in the
// list of micro-batches does not matter. more: what the caller adds.
template <typename... More>
std::string task_key(const Batch& b, const PipelineTask& task, const More&... more) {
    return graph_key(task.work, task.chunk, task.input, task.output, task.gradient, b.B, b.T, b.tokens,
                     b.targets, b.doc_start, b.positions, b.by_token, b.by_position, b.past, b.row, more...);
}

constexpr int kernels_of_layer = 30;  // about, forward and backward

// auto: where the host would give kernels to the device more slowly than that runs them, at some 4 us each.
// The time of a layer's products follows from their rate in FLOP/s.
inline bool wants_graphs(const Options& o, double gemm_rate) {
    constexpr double launch = 4e-6, margin = 2;
    double products = 6.0 * block_parameters(o) * o.micro_batch * o.sequence_length / gemm_rate;
    bool alone = o.dp * o.tp * o.pp == 1 && o.offload == Offload::none;
    bool pays = has_own_memory && alone && products < margin * launch * kernels_of_layer;
    return o.cuda_graphs == CudaGraphs::on || (o.cuda_graphs == CudaGraphs::automatic && pays);
}

// Bytes that the driver may take for the graphs of a run, before the rate is measured: up to version 550 it
// took 64 KiB for each kernel (says PyTorch's guide to its CUDAGraph trees), and less since. A pass backward
// is there twice, for the one that ends a step is another.
inline size_t graph_memory(const Options& o) {
    constexpr double fastest_card = 3e15;
    constexpr size_t of_kernel = 64 << 10;
    bool takes = has_own_memory && wants_graphs(o, fastest_card);
    return takes ? of_kernel * 2 * kernels_of_layer * o.layers : 0;
}

// ----------------------------------------------------------------------------
// the device

// The device that the program was built for, the one that it runs on, and its kernels of attention.
inline std::string device_text([[maybe_unused]] const Options& o) {
#ifdef DEVICE_CPU
    const char* attention = "";
#else
    const char* attention =
        takes_wgmma_attention(o) ? "; attention by wgmma" : "; attention by mma, of every card";
#endif
    return text("%s (%s, %s; %s%s)", device_properties().name, device_name, floatX_name,
                communication_libraries().c_str(), attention);
}

// FLOP/s that the device does at most; 0: they are not known.
inline double card_rate() {
    return sizeof(floatX) == 2 ? this_machine().flops : 0;
}

// FLOP/s that MFU is a share of; 0: they are not known.
inline double peak_rate(const Options& o) {
    return o.peak_tflops > 0 ? o.peak_tflops * 1e12 : card_rate();
}

// The rate of matrix products that this device reaches, in FLOP/s. It is measured when a run starts, and now
// and then again, for others may have used the device before.
class GemmRate {
public:
    explicit GemmRate(cudaStream_t stream)
        : rate(measured_gemm_rate(available_memory(), stream)), stream_(stream) {}

    const double rate;  // when the run started

    bool measurement_due() const { return seconds_now() - measured_ > until_next_; }

    // The time to the next measurement begins here.
    void restart_clock() { measured_ = seconds_now(); }

    // The rate now; 0 where another program has the memory. Nothing else may run on the device.
    double measure_again() {
        constexpr size_t enough = 64 << 20;
        double rate = 0;
        std::string ignored;  // another program may take the memory meanwhile
        note_error(ignored, [&] {
            if (size_t free_bytes = available_memory(); free_bytes > enough)
                rate = measured_gemm_rate(free_bytes / 4, stream_);
        });
        cudaGetLastError();
        measured_ = seconds_now();
        until_next_ *= 2;
        return rate;
    }

private:
    cudaStream_t stream_;
    double measured_ = seconds_now(), until_next_ = 30;  // seconds
};

// The part of a run's header that is known when its ranks have met.
inline void print_ranks(const Options& o, const World& world, const Mesh& mesh, const Layout& layout) {
    if (world.size() > 1) print("ranks        %s\n", mesh.picture().c_str());
    for (const std::string& line : core_lines(world)) print("cores        %s\n", line.c_str());
    if (std::string advice = launcher_advice(); !advice.empty()) print("stopping     %s\n", advice.c_str());
    if (o.pp > 1) print("pipeline     %s\n", pipeline_text(layout).c_str());
}

// The part that is known when the device has been measured.
inline void print_rate(double gemm_rate, bool graphs) {
    if (graphs) print("graphs       each pass over a micro-batch is one launch\n");
    std::string peak;
    if (card_rate() > 0)
        peak = text(", %sFLOP/s %s", human(card_rate()).c_str(),
                    this_machine().published ? "published" : "estimated for this card");
    print("rate         %sFLOP/s measured in products%s\n", human(gemm_rate).c_str(), peak.c_str());
}
