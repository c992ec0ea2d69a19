/*
The device of a run: options that it and this build do not support, the work that is launched as CUDA graphs,
its name and its rates, and the algorithm of each matrix product.
*/
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "comm/batches.h"             // Batch
#include "comm/collectives.h"         // RANKS_USE_NCCL
#include "comm/layout.h"              // Layout, pipeline_text
#include "comm/memory.h"              // available_memory
#include "comm/mesh.h"                // Mesh
#include "comm/pipeline_schedule.h"   // PipelineTask
#include "comm/settings.h"            // wants_graphs
#include "comm/placement.h"           // core_lines
#include "comm/stage.h"               // local_part
#include "comm/world.h"               // World
#include "data/base/error.h"          // fail, note_error
#include "data/base/figures.h"        // human, seconds_now
#include "data/base/print.h"          // print
#include "data/base/stop_signals.h"   // launcher_advice
#include "data/options/options.h"     // Options
#include "data/run/algorithm_file.h"  // AlgorithmChoices
#include "kernels/attention.cuh"      // has_wgmma_attention, attention_kernels
#include "kernels/cards.h"            // this_machine
#include "kernels/fp8_matmul.cuh"     // fp8
#include "kernels/graph.cuh"          // graph_key
#include "kernels/matmul.cuh"         // measured_gemm_rate
#ifndef DEVICE_CPU
#include "kernels/product_tuning.cuh"
#endif

// ----------------------------------------------------------------------------
// limits of this build
//
// Options that this build of the program, or the card that it runs on, does not support.

// Returns a shape with the size of the model's heads: only that decides which kernels attention can use.
inline AttentionShape heads_of_model(const Options& o) {
    return self_attention_shape(1, 1, 1, 1, o.head_size, 0, nullptr);
}

// Applies --attention.
inline void choose_attention(const Options& o) {
    if (o.attention == AttentionChoice::automatic) return;
#ifdef DEVICE_CPU
    fail("--attention %s: this program has no kernels for GPUs; leave it out, or build with DEVICE=cuda",
         name_of(o.attention));
#else
    bool wgmma = o.attention == AttentionChoice::wgmma;
    if (wgmma && !has_wgmma_attention(heads_of_model(o))) {
        fail("--attention wgmma: needs a Hopper card, a program built with PRECISION=bf16, and a head size "
             "that is a multiple of 8 up to 128 (here: %s, heads of %d); give auto",
             floatX_name, o.head_size);
    }
    attention_kernels = wgmma ? AttentionKernels::wgmma : AttentionKernels::mma;
#endif
}

// Returns whether Hopper's kernels are used. Called after choose_attention().
inline bool takes_wgmma_attention([[maybe_unused]] const Options& o) {
#ifdef DEVICE_CPU
    return false;
#else
    return takes_wgmma(heads_of_model(o));
#endif
}

// Returns a warning if a Hopper card runs attention at half its speed; otherwise empty.
inline std::string attention_warning([[maybe_unused]] const Options& o) {
#if defined(PRECISION_BF16) && !defined(DEVICE_CPU)
    bool slow = device_properties().major == 9 && hopper_attention_fits(heads_of_model(o)) &&
                o.attention == AttentionChoice::automatic && !takes_wgmma_attention(o);
    if (slow)
        return text("warning: attention uses the kernels for any card, at half the speed of Hopper's: this "
                    "program was compiled for sm_%d; build with make GPU_ARCH=90a",
                    kernel_architecture());
#endif
    return "";
}

// True for builds whose own products are in bf16. fp32 builds for GPUs are for comparisons, not for speed.
#ifdef DEVICE_CPU
constexpr bool has_products_in_bf16 = false;
#else
constexpr bool has_products_in_bf16 = sizeof(floatX) < sizeof(float);
#endif

// For all ranks: applies --matmul-dtype auto, after choose_matmul_dtype(). On CPUs with matrix units,
// products are in bf16, which is faster there for models of every size. Dot products in bf16 alone may be
// slower than fp32. Returns a note for the header, or an empty string.
inline std::string choose_automatic_dtype([[maybe_unused]] const Options& o,
                                          [[maybe_unused]] const World& world) {
#ifdef DEVICE_CPU
    if (o.matmul_dtype != MatmulDtype::automatic) return "";
    cpu_products_in_bf16 = true;
    for (const std::string& answer : world.all_gather(has_matrix_unit() ? "bf16" : "fp32"))
        if (answer != "bf16") cpu_products_in_bf16 = false;
    if (cpu_products_in_bf16)
        return "--matmul-dtype auto: products are in bf16, which is faster than fp32 on this processor";
#endif
    return "";
}

// Applies --matmul-dtype. bf16 products need a processor or a build that supports them; fp8 products need a
// card that supports them, sizes that are multiples of 16, and weights that stay at one address.
inline void choose_matmul_dtype(const Options& o) {
    auto refuse = [&](const std::string& reason) {
        fail("--matmul-dtype %s: %s, or give --matmul-dtype auto", name_of(o.matmul_dtype), reason.c_str());
    };
    bool bf16 = o.matmul_dtype == MatmulDtype::bf16;
#ifdef DEVICE_CPU
    cpu_products_in_bf16 = bf16;
    if (bf16 && !has_cpu_products_in_bf16())
        refuse("this processor does not multiply in bf16; use one with avx512_bf16 or AMX");
#else
    if (bf16 && !has_products_in_bf16)
        refuse(text("this program multiplies in fp32 (%s); build with PRECISION=bf16", device_name));
    if (o.matmul_dtype == MatmulDtype::fp32 && has_products_in_bf16)
        refuse(text("this program multiplies in bf16 (%s); build with PRECISION=fp32", device_name));
#endif
    if (o.matmul_dtype != MatmulDtype::fp8) {
        // The option may have been given, or come from a checkpoint.
        if (o.fp8_fast_gradients)
            fail("--fp8-fast-gradients on: needs --matmul-dtype fp8; give --fp8-fast-gradients off");
        return;
    }
    if (!has_products_in_bf16) {
        refuse(text("this program does not multiply in fp8 (%s, %s); build with DEVICE=cuda PRECISION=bf16",
                    device_name, floatX_name));
    }
    const cudaDeviceProp& device = device_properties();
    if (!multiplies_fp8(capability_of(device)))
        refuse(text("%s does not multiply in fp8; use an Ada or Hopper card or later", device.name));
    if (std::string reason = fp8_refusal(o); !reason.empty()) refuse(reason);
}

// Returns the file that stores the chosen algorithms, for a run that chooses them.
inline std::string algorithm_file(const Options& o) {
    bool in_run = kind_of<MatmulTuning>(o.matmul_tuning) == MatmulTuning::on;
    return in_run ? algorithm_path(o.run_dir) : o.matmul_tuning;
}

inline void check_tuning(const Options& o) {
    MatmulTuning tuning = kind_of<MatmulTuning>(o.matmul_tuning);
    if (!has_products_in_bf16 && tuning == MatmulTuning::file) {
        fail("--matmul-tuning %s: products are not timed in this program (%s, %s); give off, or build with "
             "DEVICE=cuda PRECISION=bf16",
             printable(o.matmul_tuning).c_str(), device_name, floatX_name);
    }
    if (has_products_in_bf16 && tuning != MatmulTuning::off) read_algorithms(algorithm_file(o));
}

inline void check_communication(const Options& o) {
#ifdef RANKS_USE_NCCL
    if (o.throttle_link > 0) {
        fail("--throttle-link %g: NCCL's links cannot be slowed down; leave it out, or build with COMM=mpi",
             o.throttle_link);
    }
#else
    host_link_speed(o.throttle_link);
#endif
}

// Refuses options that this build does not support, and applies those that set its kernels and links.
inline void check_build(const Options& o) {
    check_precision(o);
    choose_attention(o);
    choose_matmul_dtype(o);
    check_communication(o);
}

// ----------------------------------------------------------------------------
// CUDA graphs (--cuda-graphs)
//
// Only a single process that keeps its optimizer state on the device uses graphs: communication with other
// ranks, or with optimizer state on the host, has its own streams, whose events lie outside a graph.

// Returns a key for the work on a task: everything that determines its kernels, except the contents of
// memory. The task's position in the step matters only for backward passes that are the first or the last.
// more: what the caller adds to the key. While a ledger records, the key leaves out addresses, which a ledger
// does not see; the first forward pass of a step has its own key, because only that pass waits for new
// weights.
template <typename... More>
std::string task_key(const Batch& b, const PipelineTask& task, const PassOfStep& pass, const More&... more) {
    bool ends = !pass.forward && pass.last;
    if (ledger) return graph_key(task.work, task.chunk, pass.first, ends);
    return graph_key(task.work, !pass.forward && pass.first, ends, task.chunk, task.input, task.output,
                     task.gradient, b.B, b.T, b.tokens, b.targets, b.doc_start, b.positions, b.by_token,
                     b.by_position, b.past, b.row, more...);
}

// ----------------------------------------------------------------------------
// the device

// Describes the device that the program was built for, the one it runs on, and its attention kernels.
inline std::string device_text([[maybe_unused]] const Options& o) {
#ifdef DEVICE_CPU
    const char* attention = "";
#else
    const char* attention =
        takes_wgmma_attention(o) ? "; attention by wgmma" : "; attention by mma, for any card";
#endif
    return text("%s (%s, %s; %s%s)", device_properties().name, device_name, floatX_name,
                communication_libraries().c_str(), attention);
}

// Peak FLOP/s of the device; 0: unknown.
inline double card_rate() {
    return sizeof(floatX) == 2 ? this_machine().flops : 0;
}

// FLOP/s that MFU is relative to; 0: unknown.
inline double peak_rate(const Options& o) {
    return o.peak_tflops > 0 ? o.peak_tflops * 1e12 : card_rate();
}

// The rate in FLOP/s that matrix products reach on this device. It is measured when a run starts, and
// repeatedly later, because other programs may use the device.
class GemmRate {
public:
    explicit GemmRate(cudaStream_t stream)
        : rate(measured_gemm_rate(available_memory(), stream)), stream_(stream) {}

    const double rate;  // when the run started

    bool measurement_due() const { return seconds_now() - measured_ > until_next_; }

    // Restarts the time until the next measurement.
    void restart_clock() { measured_ = seconds_now(); }

    // Measures the rate; returns 0 if another program has taken the memory. Nothing else may use the device.
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

// Prints the part of a run's header that is known once its ranks are connected.
inline void print_ranks(const Options& o, const World& world, const Mesh& mesh, const Layout& layout) {
    if (world.size() > 1) print("ranks        %s\n", mesh.picture().c_str());
    for (const std::string& line : core_lines(world)) print("cores        %s\n", line.c_str());
    if (std::string advice = launcher_advice(); !advice.empty()) print("stopping     %s\n", advice.c_str());
    if (o.pp > 1) print("pipeline     %s\n", pipeline_text(layout).c_str());
}

// Prints the part of the header that is known once the device has been measured.
inline void print_rate(double gemm_rate, bool graphs) {
    if (graphs) print("graphs       each pass over a micro-batch is one launch\n");
    std::string peak;
    if (card_rate() > 0)
        peak = text(", %sFLOP/s %s", human(card_rate()).c_str(),
                    this_machine().published ? "published" : "estimated for this card");
    print("rate         %sFLOP/s measured in products%s\n", human(gemm_rate).c_str(), peak.c_str());
}

// ----------------------------------------------------------------------------
// algorithms of products
//
// Products are timed before the first step, so that each uses its fastest algorithm. The algorithm determines
// the order of sums, so all ranks use the same one, and a resumed run uses the one it started with: the
// choice is stored in a file, and only kinds of products that the file lacks are timed.
//
// The first rank that computes a kind of product chooses its algorithm for all. All data ranks compute the
// same products, so only the first of them times any. Ranks whose card or library differs from rank 0's use
// what their library proposes.

#ifdef DEVICE_CPU

// oneDNN offers no choice.
template <typename... Any>
std::vector<std::string> tune_products(const Any&...) {
    return {};
}

#else

// Converts choices to the form in which ranks exchange them.
inline nlohmann::json choices_to_json(const AlgorithmChoices& choices) {
    nlohmann::json json = nlohmann::json::object();
    for (auto& [kind, bytes] : choices) json[kind] = hex_of(bytes);
    return json;
}

inline AlgorithmChoices choices_from_json(const nlohmann::json& json) {
    AlgorithmChoices choices;
    for (auto& [kind, digits] : json.items()) choices[kind] = bytes_of_hex(digits);
    return choices;
}

// The combined choices of all ranks.
struct GatheredChoices {
    AlgorithmChoices choices;
    int others = 0;   // ranks with a different setup
    int changed = 0;  // kinds that now use a different algorithm
    double seconds = 0, seconds_once = 0;

    // For all ranks.
    GatheredChoices(const World& world, const std::vector<TunedProduct>& mine, const std::string& setup,
                    const std::string& setup_of_root) {
        nlohmann::json message = {{"setup", setup}, {"tuned", nlohmann::json::array()}};
        for (const TunedProduct& product : mine) {
            message["tuned"].push_back({product.kind, hex_of(product.algorithm), product.changed,
                                        product.seconds, product.seconds_once});
        }
        for (const std::string& text : world.all_gather(message.dump())) {
            nlohmann::json theirs = nlohmann::json::parse(text);
            if (theirs["setup"] != setup_of_root) {
                others++;
                continue;
            }
            for (const nlohmann::json& product : theirs["tuned"]) {
                if (!choices.emplace(product[0], bytes_of_hex(product[1])).second) continue;
                changed += product[2].get<bool>();
                seconds += product[3].get<double>();
                seconds_once += product[4].get<double>();
            }
        }
    }
};

// For all ranks: chooses algorithms for the products that step() computes; their results are not used. Known
// choices are read from `file`, or from `origin` if that has none, and all are stored in `file`. times: this
// rank times kinds without a choice. Returns notes for the log, one line each.
template <typename Step>
std::vector<std::string> choose_products(const World& world, const std::string& file,
                                         const std::string& origin, bool times, cudaStream_t stream,
                                         Step&& step) {
    double start = seconds_now();
    AlgorithmTable table;
    world.on_all_ranks([&] {
        if (!world.is_root()) return;
        table = read_algorithms(file);
        if (table.empty() && !origin.empty()) table = read_algorithms(origin);
    });
    const std::string setup = cublas_setup();
    nlohmann::json known = {{"setup", setup}, {"algorithms", choices_to_json(table[setup])}};
    known = nlohmann::json::parse(world.broadcast_text(known.dump()));
    bool has_setup = known["setup"] == setup;
    AlgorithmChoices choices;
    if (has_setup) choices = choices_from_json(known["algorithms"]);
    choose_algorithms(choices);
    NotedProducts noted = note_products(step);
    std::vector<TunedProduct> mine;
    if (has_setup && times) mine = time_products(noted, stream);
    GatheredChoices all(world, mine, setup, known["setup"]);

    if (has_setup) {
        for (auto& [kind, bytes] : all.choices) choices[kind] = bytes;
        choose_algorithms(choices);
    }
    world.on_all_ranks([&] { take_workspaces(stream); });
    table[setup] = choices;
    world.on_all_ranks([&] {
        if (world.is_root() && !table[setup].empty()) write_algorithms(file, table);
    });
    std::vector<std::string> notes;
    if (!all.choices.empty()) {
        notes.push_back(text("%zu kinds timed in %.1f s: %d have a faster algorithm than the default; "
                             "one of each kind takes %.1f%% less time",
                             all.choices.size(), seconds_now() - start, all.changed,
                             100 * (1 - all.seconds / all.seconds_once)));
    }
    if (all.others > 0)
        notes.push_back(text("%d ranks differ from the first in card or library; their products are untimed",
                             all.others));
    return notes;
}

// For all ranks: chooses algorithms if the options say so, for a run that resumes one in `origin` (empty:
// none).
template <typename Step>
std::vector<std::string> tune_products(const World& world, const Options& o, const std::string& origin,
                                       bool times, cudaStream_t stream, Step&& step) {
    MatmulTuning tuning = kind_of<MatmulTuning>(o.matmul_tuning);
    if (!has_products_in_bf16 || tuning == MatmulTuning::off) return {};
    std::string other = tuning == MatmulTuning::on && !origin.empty() ? algorithm_path(origin) : "";
    return choose_products(world, algorithm_file(o), other, times, stream, std::forward<Step>(step));
}

#endif
