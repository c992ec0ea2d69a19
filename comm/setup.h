/*
A run set up from its options: what they come to in the terms of the optimizer and of the ranks (settings,
sizes, layout), what this program, as it was built, cannot follow, which work goes through CUDA graphs, what
the device reaches, and which algorithm each matrix product takes.
*/
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "comm/activations.h"        // Workload, Recompute
#include "comm/collectives.h"        // host_link_speed
#include "comm/device_batches.h"     // Batch
#include "comm/layout.h"             // make_layout, pipeline_text
#include "kernels/cards.h"           // this_machine
#include "comm/memory.h"             // has_own_memory, available_memory
#include "comm/mesh.h"               // Mesh
#include "comm/pipeline.h"           // PipelineTask
#include "comm/save_clock.h"         // saves_on_the_way
#include "comm/stage.h"              // local_part, Dims, Stage
#include "comm/placement.h"          // core_lines, threads_per_rank
#include "comm/world.h"              // World
#include "comm/zero.h"               // ZeroSettings
#include "data/base/added_rows.h"    // with_added
#include "data/base/error.h"         // fail, note_error
#include "data/base/figures.h"       // human, seconds_now
#include "data/base/stop_signals.h"  // launcher_advice
#include "data/options/options.h"    // Options
#include "data/options/schedule.h"   // the course of the learning rate
#include "data/run/algorithm_file.h"
#include "kernels/adamw.cuh"      // adamw_optimizer
#include "kernels/attention.cuh"  // has_wgmma_attention, attention_kernels
#include "kernels/common.cuh"
#include "kernels/fp8_matmul.cuh"  // Fp8Sizes
#include "kernels/gelu.cuh"        // Gelu
#include "kernels/graph.cuh"       // graph_key
#include "kernels/lamb.cuh"        // lamb_optimizer
#include "kernels/matmul.cuh"      // measured_gemm_rate, SparedMultiprocessors
#include "kernels/muon.cuh"        // muon_optimizer, orthogonalise_scratch
#include "kernels/norm.cuh"        // Norm
#include "kernels/rope.cuh"        // rope_table
#ifndef DEVICE_CPU
#include "kernels/product_tuning.cuh"
#endif

// ----------------------------------------------------------------------------
// settings

// The optimizer of the run, for the step after `step` steps.
inline Optimizer make_optimizer(const Options& o, int step) {
    AdamW settings = {.learning_rate = o.learning_rate * schedule(o, step),
                      .beta1 = o.beta1,
                      .beta2 = o.beta2,
                      .eps = o.adam_eps,
                      .weight_decay = o.weight_decay,
                      .step = step + 1,
                      .stochastic_rounding = o.stochastic_rounding};
    switch (o.optimizer) {
    case OptimizerKind::adamw:
        return adamw_optimizer(settings, (uint64_t)o.seed);
    case OptimizerKind::lamb:
        return lamb_optimizer(settings, (uint64_t)o.seed);
    case OptimizerKind::muon:
        return muon_optimizer({settings, o.muon_momentum}, (uint64_t)o.seed);
    }
    __builtin_unreachable();
}

inline std::array<Multipliers, tensor_kinds> multipliers(const Options& o) {
    std::array<Multipliers, tensor_kinds> by_kind;
    by_kind[(int)TensorKind::embedding] = {o.embedding_lr, o.embedding_decay};
    by_kind[(int)TensorKind::head] = {o.head_lr, o.head_decay};
    by_kind[(int)TensorKind::vector].learning_rate = o.vector_lr;
    return by_kind;
}

// The settings say what the optimizer keeps of each element, and asks for. fp32 parameters are their own
// master copy.
inline ZeroSettings zero_settings(const Options& o, size_t number_bytes = sizeof(floatX)) {
    bool muon = o.optimizer == OptimizerKind::muon;
    return {.level = o.zero,
            .slots = with_added<Slot>({Slot::m, Slot::v}),
            .not_of_matrices = muon ? std::vector{Slot::v} : std::vector<Slot>(),
            .takes_norms = o.optimizer == OptimizerKind::lamb,
            .transform_scratch = muon ? orthogonalise_scratch : nullptr,
            .multipliers = multipliers(o),
            .keep_master = o.master_weights && number_bytes < sizeof(float),
            .offload = o.offload == Offload::optimizer,
            .overlap = o.overlap,
            .reduce_dtype = o.reduce_dtype,
            .prefetch = o.prefetch,
            .staging = o.async_save && saves_on_the_way(o.save_every, o.steps),
            .checks = o.check_replicas > 0 || o.check_replay > 0};
}

// For a rank that steps its part of the optimizer's state on the host.
inline ZeroSettings zero_settings(const Options& o, const World& world) {
    ZeroSettings settings = zero_settings(o);
    settings.host_threads = threads_per_rank(world);
    return settings;
}

// Kernels have enums of their own.
inline Norm norm_kernel(NormKind kind) {
    switch (kind) {
    case NormKind::layernorm:
        return Norm::layernorm;
    case NormKind::rmsnorm:
        return Norm::rmsnorm;
    }
    __builtin_unreachable();
}

// GELU's form; SwiGLU has none, and is not asked.
inline Gelu gelu_kernel(MlpKind kind) {
    switch (kind) {
    case MlpKind::gelu:
    case MlpKind::swiglu:
        return Gelu::tanh;
    case MlpKind::gelu_exact:
        return Gelu::exact;
    }
    __builtin_unreachable();
}

// Tokens whose logits exist at once, if the user leaves it open. Each chunk reads and writes all of the fp32
// gradient of the classifier's weights: 8 bytes for 2 FLOPs a token. A card that does 150 to 300 FLOPs in the
// time of a byte is kept busy by some thousand tokens at once, which in bf16 take up to 1 GiB. Chunks are of
// about the same size, for products of a few rows are slow; and of whole tiles of products, where they can.
inline int chosen_loss_chunk(const ModelConfig& config, int tokens, size_t number_bytes = sizeof(floatX)) {
    const size_t budget = (size_t)(number_bytes == 2 ? 1024 : 256) << 20;
    constexpr int tile = 256;
    int most = (int)std::clamp<size_t>(budget / (padded_vocab(config) * number_bytes), 1, tokens);
    if (most == tokens) return tokens;
    int unit = most < tile ? 1 : tile;
    return ceil_div(even_share(tokens, most / unit * unit), unit) * unit;
}

// number_bytes: of the program that is to run, which may be built for other numbers than this one.
inline Workload training_workload(const Options& o, Recompute recompute,
                                  size_t number_bytes = sizeof(floatX)) {
    int tokens = o.micro_batch * o.sequence_length;
    int chunk =
        o.loss_chunk > 0 ? std::min(o.loss_chunk, tokens) : chosen_loss_chunk(o, tokens, number_bytes);
    return {.B = o.micro_batch,
            .T = o.sequence_length,
            .training = true,
            .recompute = recompute,
            .loss_chunk = chunk,
            .fp8 = o.matmul_dtype == MatmulDtype::fp8,
            .number_bytes = number_bytes,
            .fast_gradients = o.fp8_fast_gradients};
}

// ----------------------------------------------------------------------------
// sizes

inline size_t rope_floats(const ModelConfig& config, const Workload& w) {
    return config.position == PositionKind::rope ? (size_t)w.positions() * config.rope_dims : 0;
}

// (positions, rope_dims / 2, 2) from rope_table(); empty without RoPE.
inline std::vector<float> rope_angles(const ModelConfig& config, const Workload& w) {
    std::vector<float> table(rope_floats(config, w));
    RopeScaling scaling = {config.rope_scaling, config.rope_low_frequency, config.rope_high_frequency,
                           config.rope_original_context};
    if (!table.empty()) rope_table(table.data(), w.positions(), config.rope_dims, config.rope_theta, scaling);
    return table;
}

// layer_bytes: activations that are kept of a layer for one micro-batch.
inline Layout training_layout(const Options& o, size_t layer_bytes) {
    ParameterLayout whole = parameter_layout(o);
    double state =
        (double)memory_total(memory_of<ZeroArrays>(whole, 1, zero_settings(o))) / whole.parameter_count();
    return make_layout(o, {.state = state * block_parameters(o),
                           .activations = (double)layer_bytes,
                           .table = state * padded_vocab(o) * o.channels});
}

// The fp8 memory of the products of this rank's blocks.
inline Fp8Sizes fp8_sizes(const ModelConfig& config, const Workload& w, const Stage& stage) {
    if (!w.fp8) return {};
    Dims d(config, stage.layout().mesh.tp, w.B, w.T);
    size_t layers = 0;
    for (int of_chunk : stage.layers(0)) layers += of_chunk;
    bool filter = config.local_filter;  // its two matrices; and values have another input than queries
    size_t widths = std::max({d.QKV, d.A, d.F1, d.F, filter ? 2 * d.H : 0});
    return {.weights = layers * d.C * ((size_t)d.QKV + d.A + d.F1 + d.F + (filter ? 4 * d.H : 0)),
            .matrices = (filter ? 7 : 4) * layers,
            .largest_weight = d.C * widths,
            .keeps_weights = w.recompute == Recompute::none,
            .rows = (size_t)d.N,
            .width = (size_t)std::max({filter ? 2 * d.C : d.C, d.QKV, d.A, d.F1})};
}

// ----------------------------------------------------------------------------
// options that this program, as it was built, cannot follow

// Options about rounding depend on what parameters are made of, which is decided when the program is built.
inline void check_precision(const Options& o, size_t number_bytes = sizeof(floatX)) {
    if (number_bytes == sizeof(float)) {
        // It may be given, or be that of a checkpoint.
        auto refuse = [](const char* option, const char* value, const char* other) {
            fail("%s %s: parameters are fp32 here; give %s %s, or build with PRECISION=bf16", option, value,
                 option, other);
        };
        if (o.stochastic_rounding) refuse("--stochastic-rounding", "on", "off");
        if (!o.master_weights) refuse("--master-weights", "off", "on");
    } else if (!o.master_weights && !o.stochastic_rounding) {
        fail("--master-weights off: bf16 alone loses small updates; add --stochastic-rounding on");
    }
}

// Which kernels attention can take depends on the size of its heads alone.
inline AttentionShape heads_of_model(const Options& o) {
    return self_attention_shape(1, 1, 1, 1, o.head_size, 0, nullptr);
}

// Takes --attention over.
inline void choose_attention(const Options& o) {
    if (o.attention == AttentionChoice::automatic) return;
#ifdef DEVICE_CPU
    fail("--attention %s: this program has no kernels for GPUs; leave it out, or build with DEVICE=cuda",
         name_of(o.attention));
#else
    bool wgmma = o.attention == AttentionChoice::wgmma;
    if (wgmma && !has_wgmma_attention(heads_of_model(o))) {
        fail("--attention wgmma: needs a Hopper card, a program built with PRECISION=bf16, and heads of a "
             "multiple of 8 up to 128 (here: %s, heads of %d); give auto",
             floatX_name, o.head_size);
    }
    attention_kernels = wgmma ? AttentionKernels::wgmma : AttentionKernels::mma;
#endif
}

// Says after choose_attention() whether the kernels of Hopper are taken.
inline bool takes_wgmma_attention([[maybe_unused]] const Options& o) {
#ifdef DEVICE_CPU
    return false;
#else
    return takes_wgmma(heads_of_model(o));
#endif
}

// A warning where a Hopper runs attention at half its speed; empty: it does not.
inline std::string attention_warning([[maybe_unused]] const Options& o) {
#if defined(PRECISION_BF16) && !defined(DEVICE_CPU)
    bool slow = device_properties().major == 9 && hopper_attention_fits(heads_of_model(o)) &&
                o.attention == AttentionChoice::automatic && !takes_wgmma_attention(o);
    if (slow)
        return text("warning: attention takes the kernels of every card, at half the speed of Hopper's: this "
                    "program's code is for sm_%d; build with make GPU_ARCH=90a",
                    kernel_architecture());
#endif
    return "";
}

// The builds whose own products are in bf16. In fp32 a GPU's are for comparisons, and not for speed.
#ifdef DEVICE_CPU
constexpr bool has_products_in_bf16 = false;
#else
constexpr bool has_products_in_bf16 = sizeof(floatX) < sizeof(float);
#endif

// Says why a run that is cut so cannot have products in fp8; empty: it can.
inline std::string fp8_refusal(const Options& o) {
    if (o.zero == 3) return "weights are known by where they lie, and --zero 3 moves them; give --zero 2";
    ModelConfig c = local_part(o, o.tp);
    int rows = o.micro_batch * o.sequence_length;
    struct Size {
        const char* what;
        int size;
    };
    for (auto [what, size] :
         {Size{"channels", c.channels},
          {"elements of queries, keys and values", qkv_width(c)},
          {"elements of values by themselves", c.local_filter ? c.kv_heads * c.head_size : 0},
          {"channels within the local filter", c.local_filter ? filter_width(c) / o.tp : 0},
          {"elements of all heads", c.heads * c.head_size},
          {"hidden channels of the MLP", c.mlp_width},
          {"tokens of a micro-batch at once", rows / (o.tp > 1 ? o.tp * std::max(o.tp_overlap, 1) : 1)}}) {
        if (size % 16 == 0) continue;
        return text("%d %s on a rank, no multiple of 16; choose other sizes", size, what);
    }
    return "";
}

// Takes --matmul-dtype over. Products in bf16 need a processor or a build that has them; those in fp8 a card
// that has them, sizes that its rows of 16 bytes divide, and weights that stay in one place.
inline void choose_matmul_dtype(const Options& o) {
    auto refuse = [&](const std::string& reason) {
        fail("--matmul-dtype %s: %s, or give --matmul-dtype auto", name_of(o.matmul_dtype), reason.c_str());
    };
    bool bf16 = o.matmul_dtype == MatmulDtype::bf16;
#ifdef DEVICE_CPU
    cpu_products_in_bf16 = bf16;
    if (bf16 && !has_cpu_products_in_bf16())
        refuse("this processor has no such products; take one with avx512_bf16 or AMX");
#else
    if (bf16 && !has_products_in_bf16)
        refuse(text("this program multiplies in fp32 (%s); build with PRECISION=bf16", device_name));
#endif
    if (o.matmul_dtype != MatmulDtype::fp8) {
        // It may be given, or be that of a checkpoint.
        if (o.fp8_fast_gradients)
            fail("--fp8-fast-gradients on: goes with --matmul-dtype fp8; give --fp8-fast-gradients off");
        return;
    }
    fp8_fast_gradients = o.fp8_fast_gradients;
    if (!has_products_in_bf16) {
        refuse(text("this program has no such products (%s, %s); build with DEVICE=cuda PRECISION=bf16",
                    device_name, floatX_name));
    }
    const cudaDeviceProp& device = device_properties();
    if (!multiplies_fp8(capability_of(device)))
        refuse(text("%s has no such products; take an Ada, a Hopper or later", device.name));
    if (std::string reason = fp8_refusal(o); !reason.empty()) refuse(reason);
}

// The file that keeps the choice, for a run that makes one.
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

inline int ranks_sharing_device([[maybe_unused]] const World& world) {
#ifdef RANKS_USE_NCCL
    return 1;  // though a rank may see no device but its own
#else
    int devices;
    cudaCheck(cudaGetDeviceCount(&devices));
    return ceil_div(world.local_size(), devices);
#endif
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

// Refuses options of a run that this program cannot follow, and takes over those that set its kernels and
// links.
inline void check_build(const Options& o) {
    check_precision(o);
    choose_attention(o);
    choose_matmul_dtype(o);
    check_communication(o);
}

// Multiprocessors that NCCL's kernels are expected to hold while products run: those of two receives from the
// stages beside, which are there as soon as they can be and wait; and of one group, where tensor ranks send
// beside products, or data ranks in every micro-batch. It follows from the layout alone: algorithms depend on
// it, and the bits are the same without overlap.
inline int held_multiprocessors(const Layout& layout, int zero) {
    const MeshShape& mesh = layout.mesh;
    bool tensor_ranks_send = mesh.tp > 1 && layout.row_chunks > 1;
    bool data_ranks_send = mesh.shard > 1 && zero >= 2;
    return (mesh.pp > 1 ? 2 * blocks_of_links : 0) +
           (tensor_ranks_send || data_ranks_send ? blocks_of_groups : 0);
}

// Products spare these, but where ranks talk by something else than kernels: there they spare none.
inline int spared_by_products([[maybe_unused]] const Layout& layout, [[maybe_unused]] int zero) {
#ifdef RANKS_USE_NCCL
    return held_multiprocessors(layout, zero);
#else
    return 0;
#endif
}

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

// ----------------------------------------------------------------------------
// matrix products
//
// Products are timed before the first step, so that each takes the fastest algorithm. The algorithm decides
// the order of sums, so all ranks take the same, and a run that goes on takes what it began with: the choice
// is kept in a file, and only kinds of products that it does not have are timed.
//
// The first rank that makes a kind of product chooses for all; of the data ranks, who all make the same ones,
// the first alone does. Ranks with another card or library than rank 0's keep what their library proposes.

#ifdef DEVICE_CPU

// oneDNN offers no choice.
template <typename... Any>
std::vector<std::string> tune_products(const Any&...) {
    return {};
}

#else

// Choices as they go from rank to rank.
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

// The choices of all ranks, brought together.
struct GatheredChoices {
    AlgorithmChoices choices;
    int others = 0;   // ranks of another setup
    int changed = 0;  // kinds that take another algorithm than before
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

// For all ranks: chooses algorithms for the products that step() makes, which leaves nothing of use behind.
// They are looked for in `file`, or where nothing is there in `origin`, and kept in `file`. times: this rank
// does, what is not known. Returns what there is to tell, one line each.
template <typename Step>
std::vector<std::string> choose_products(const World& world, const std::string& file,
                                         const std::string& origin, bool times, cudaStream_t stream,
                                         Step&& step) {
    using Clock = std::chrono::steady_clock;
    auto start = Clock::now();
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
        notes.push_back(text("%zu kinds timed in %.1f s: %d are faster than what would be taken untimed, "
                             "%.1f%% less time for one of each",
                             all.choices.size(), std::chrono::duration<double>(Clock::now() - start).count(),
                             all.changed, 100 * (1 - all.seconds / all.seconds_once)));
    }
    if (all.others > 0)
        notes.push_back(
            text("%d ranks have another card or library than the first; theirs are not timed", all.others));
    return notes;
}

// For all ranks: the same as the options say, for a run that goes on from one in `origin` (empty: from none).
template <typename Step>
std::vector<std::string> tune_products(const World& world, const Options& o, const std::string& origin,
                                       bool times, cudaStream_t stream, Step&& step) {
    MatmulTuning tuning = kind_of<MatmulTuning>(o.matmul_tuning);
    if (!has_products_in_bf16 || tuning == MatmulTuning::off) return {};
    std::string other = tuning == MatmulTuning::on && !origin.empty() ? algorithm_path(origin) : "";
    return choose_products(world, algorithm_file(o), other, times, stream, std::forward<Step>(step));
}

#endif
