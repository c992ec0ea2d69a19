/*
Translates a run's options into settings of the optimizer and the ranks, sizes, and the cut of the model.
*/
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "comm/activations.h"        // Workload
#include "comm/layout.h"             // make_layout
#include "comm/memory.h"             // memory_of, memory_total
#include "comm/parameters.h"         // parameter_layout
#include "comm/save_clock.h"         // saves_on_the_way
#include "comm/stage.h"              // local_part, Dims, Stage
#include "comm/zero_arrays.h"        // ZeroSettings
#include "data/checkpoint/folder.h"  // shared_run_dir
#include "data/options/options.h"    // Options
#include "data/options/schedule.h"   // the course of the learning rate
#include "kernels/adamw.cuh"         // adamw_optimizer
#include "kernels/fp8_matmul.cuh"    // Fp8Sizes
#include "kernels/gelu.cuh"          // Gelu
#include "kernels/lamb.cuh"          // lamb_optimizer
#include "kernels/muon.cuh"          // muon_optimizer, orthogonalise_scratch
#include "kernels/norm.cuh"          // Norm
#include "kernels/rope.cuh"          // rope_table
#include "kernels/table_rows.cuh"    // AdaGrad

// ----------------------------------------------------------------------------
// settings

// Returns the run's optimizer for the step that follows `step` steps.
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

// Returns ZeRO's settings, including what the optimizer keeps per element and what it needs. fp32 parameters
// are their own master copy. host_threads: threads with which a rank updates its part of the optimizer state
// on the host
inline ZeroSettings zero_settings(const Options& o, size_t element_bytes = sizeof(floatX),
                                  int host_threads = 0) {
    bool muon = o.optimizer == OptimizerKind::muon;
    return {.level = o.zero,
            .slots = {Slot::m, Slot::v},
            .not_of_matrices = muon ? std::vector{Slot::v} : std::vector<Slot>(),
            .takes_norms = o.optimizer == OptimizerKind::lamb,
            .transform_scratch = muon ? orthogonalise_scratch : nullptr,
            .multipliers = multipliers(o),
            .keep_master = o.master_weights && element_bytes < sizeof(float),
            .offload = o.offload == Offload::optimizer,
            .table_place = o.ngram_place,
            .table_dtype = o.ngram_dtype,
            .table_prefetch = o.ngram_prefetch,
            .table_staleness = o.ngram_staleness,
            .table_cache = (size_t)o.ngram_cache,
            .table_dir = o.ngram_dir.empty() ? o.run_dir + "/tables" : shared_run_dir(o.ngram_dir, o.run_dir),
            .host_threads = host_threads,
            .overlap = o.overlap,
            .reduce_dtype = o.reduce_dtype,
            .prefetch = o.prefetch,
            .staging = o.async_save && saves_on_the_way(o.save_every, o.steps),
            .checks = o.check_replicas > 0 || o.check_replay > 0};
}

// Returns whether the host updates some of the parameters.
inline bool steps_on_host(const Options& o) {
    return o.offload == Offload::optimizer || (!o.ngram.empty() && o.ngram_place != TablePlace::device);
}

// Returns the tables' optimizer for the step that follows `step` steps.
inline AdaGrad make_adagrad(const Options& o, int step) {
    return {(float)(o.ngram_lr * schedule(o, step)), 1e-8f, step + 1};
}

// Returns the number of tokens whose logits exist at once, if the user does not set it. For each chunk, the
// fp32 gradient of the classifier's weights is read and written: 8 bytes per element, for 2 FLOPs per element
// and token. A card that does 150 to 300 FLOPs in the time that a byte takes is kept busy by about a thousand
// tokens at once, whose logits take up to 1 GiB in bf16. Chunks have about the same size, because products of
// few rows are slow, and consist of whole tiles if possible.
inline int chosen_loss_chunk(const ModelConfig& config, int tokens, size_t element_bytes = sizeof(floatX)) {
    const size_t budget = (size_t)(element_bytes == 2 ? 1024 : 256) << 20;
    constexpr int tile = 256;
    int most = (int)std::clamp<size_t>(budget / (padded_vocab(config) * element_bytes), 1, tokens);
    if (most == tokens) return tokens;
    int unit = most < tile ? 1 : tile;
    return ceil_div(even_share(tokens, most / unit * unit), unit) * unit;
}

// element_bytes: of the program that will run, which may be built for a different precision from this one
inline Workload training_workload(const Options& o, Recompute recompute,
                                  size_t element_bytes = sizeof(floatX)) {
    int tokens = o.micro_batch * o.own_tokens();
    int chunk =
        o.loss_chunk > 0 ? std::min(o.loss_chunk, tokens) : chosen_loss_chunk(o, tokens, element_bytes);
    return {.B = o.micro_batch,
            .T = o.own_tokens(),
            .training = true,
            .recompute = recompute,
            .loss_chunk = chunk,
            .fp8 = o.matmul_dtype == MatmulDtype::fp8,
            .element_bytes = element_bytes,
            .fast_gradients = o.fp8_fast_gradients,
            .contexts = o.cp};
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

// Returns how a run divides the model and its largest step.
inline Layout training_layout(const Options& o, const Workload& w) {
    LayerBytes bytes = {};
    if (kind_of<PipelineLayers>(o.pp_layers) == PipelineLayers::memory) {
        const Stage whole(o, {.mesh = {.tp = o.tp, .cp = o.cp}}, {}, true);
        const ParameterLayout parameters = parameter_layout(o);
        auto state = memory_of<ZeroArrays>(w.element_bytes, parameters, 1, zero_settings(o, w.element_bytes));
        double of_parameter = (double)memory_total(state) / parameters.parameter_count();
        bytes = {.state = of_parameter * block_parameters(o),
                 .activations = (double)layer_bytes(activation_table(o, w, whole)),
                 .table = of_parameter * padded_vocab(o) * o.channels};
    }
    return {mesh_shape(o), o.tp_overlap, pipeline_shape(o), pipeline_split(o, bytes)};
}

// Returns the sizes of fp8 memory for the products of this rank's blocks.
inline Fp8Sizes fp8_sizes(const ModelConfig& config, const Workload& w, const Stage& stage) {
    if (!w.fp8) return {};
    size_t layers = 0;
    for (int of_chunk : stage.layers(0)) layers += of_chunk;
    Fp8Sizes sizes = {.keeps_weights = w.recompute == Recompute::none,
                      .fast_gradients = w.fast_gradients,
                      .rows = (size_t)w.B * w.T};
    for (const LocalProduct& product : local_products(config, stage.layout().mesh.tp, w.contexts)) {
        size_t weight = product.inputs * product.outputs;
        sizes.matrices += layers;
        sizes.weights += layers * weight;
        sizes.largest_weight = std::max(sizes.largest_weight, weight);
        sizes.width = std::max({sizes.width, product.inputs, product.outputs});
    }
    return sizes;
}

// ----------------------------------------------------------------------------
// multiprocessors

// A pass over a micro-batch, which may be the step's first or its last.
struct PassOfStep {
    bool forward = true, first = false, last = false;
};

// Messages between data ranks during a pass.
struct DataMessages {
    bool parameters = false, gradients = false;
};

// Returns the messages during a pass. Parameters are gathered in the first forward pass, or in every pass if
// they are cut. Gradients are summed in the last backward pass, or in every one if they are cut.
inline DataMessages messages_beside(const PassOfStep& pass, bool cut_params, bool cut_grads) {
    return {.parameters = cut_params || (pass.forward && pass.first),
            .gradients = !pass.forward && (cut_grads || pass.last)};
}

// Returns the number of SMs that NCCL's kernels are expected to hold while products run: those of two
// receives from neighboring stages, which are launched as early as possible and wait; and those of one group,
// if tensor, context or data ranks send during products. It depends only on the layout and the pass, because
// algorithms depend on it, and the bits must be the same without overlap and with any schedule of the
// pipeline.
inline int held_multiprocessors(const MeshShape& mesh, int row_chunks, const DataMessages& data) {
    bool ranks_of_layer_send = (mesh.tp > 1 && row_chunks > 1) || mesh.cp > 1;
    bool gathers = data.parameters && mesh.shards() > 1, reduces = data.gradients && mesh.dp * mesh.cp > 1;
    return (mesh.pp > 1 ? 2 * blocks_of_links : 0) +
           (ranks_of_layer_send || gathers || reduces ? blocks_of_groups : 0);
}

// Returns the number of SMs that products leave free; 0 if ranks communicate without kernels.
inline int spared_by_products(const MeshShape& mesh, int row_chunks, const DataMessages& data) {
#ifdef RANKS_USE_NCCL
    bool by_kernels = true;
#else
    bool by_kernels = false;
#endif
    if (ledger) by_kernels = ledger->card.capability > 0;
    return by_kernels ? held_multiprocessors(mesh, row_chunks, data) : 0;
}

// ----------------------------------------------------------------------------
// number formats

// Refuses rounding options that do not fit the precision of parameters, which is fixed when the program is
// built.
inline void check_precision(const Options& o, size_t element_bytes = sizeof(floatX)) {
    if (element_bytes == sizeof(float)) {
        // The option may have been given, or come from a checkpoint.
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

// Says why a run cannot have products in fp8, whatever the rest of its layout; empty if it can.
inline std::string fp8_refusal_on_any_layout(const Options& o) {
    if (o.zero == 3) return "weights must stay at one address, and --zero 3 moves them; give --zero 2";
    return o.ngram.empty() ? "" : "n-gram memory multiplies in bf16; leave out --ngram";
}

// Says why a run with this layout cannot have products in fp8; empty if it can.
inline std::string fp8_refusal(const Options& o) {
    if (std::string reason = fp8_refusal_on_any_layout(o); !reason.empty()) return reason;
    auto multiplies = [](size_t size) { return size % 16 == 0; };
    for (const LocalProduct& product : local_products(o, o.tp, o.cp)) {
        if (multiplies(product.inputs) && multiplies(product.outputs)) continue;
        return text(
            "%s has %zu inputs and %zu outputs on a rank, not both multiples of 16; choose other sizes",
            product.name, product.inputs, product.outputs);
    }
    int tokens = o.micro_batch * o.own_tokens() / (o.tp > 1 ? o.tp * std::max(o.tp_overlap, 1) : 1);
    if (multiplies(tokens)) return "";
    return text("a rank processes %d tokens at once, which is not a multiple of 16; choose other sizes",
                tokens);
}

// ----------------------------------------------------------------------------
// CUDA graphs (--cuda-graphs)

constexpr int kernels_of_layer = 30;  // approximately, forward and backward

// auto: graphs are used if the host, at about 4 us per launch, would launch kernels more slowly than the
// device runs them. The time of a layer's products follows from their rate in FLOP/s.
inline bool wants_graphs(const Options& o, double gemm_rate) {
    constexpr double launch = 4e-6, margin = 2;
    double products = 6.0 * block_parameters(o) * o.micro_batch * o.sequence_length / gemm_rate;
    bool alone = o.ranks() == 1 && o.offload == Offload::none;
    bool pays = has_own_memory && alone && products < margin * launch * kernels_of_layer;
    return o.cuda_graphs == CudaGraphs::on || (o.cuda_graphs == CudaGraphs::automatic && pays);
}

// Returns the bytes that the driver may use for the graphs of a run, before the rate is measured: 64 KiB per
// kernel up to version 550 (according to PyTorch's guide to its CUDAGraph trees), less since then. The
// backward pass is captured three times, because the first and the last one of a step differ from the others.
inline size_t graph_memory(const Options& o) {
    constexpr double fastest_card = 3e15;
    constexpr size_t of_kernel = 64 << 10;
    bool takes = has_own_memory && wants_graphs(o, fastest_card);
    return takes ? of_kernel * 3 * kernels_of_layer * o.layers : 0;
}
