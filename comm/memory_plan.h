/*
The memory that a model needs on a rank, by class: everything that uses memory requests it from an Arena that
only counts. A MemoryPlan reports whether it all fits, and which micro-batch would fit; a training run uses it
to choose what to recompute.
*/
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/activations.h"          // Workload, ActivationArrays
#include "comm/checkpoint_places.h"    // staging_bytes
#include "comm/batches.h"              // DeviceBatches
#include "comm/gradient_sums.h"        // GradientSumArrays
#include "comm/layout.h"               // Layout
#include "comm/matrix_owners.h"        // MatrixArrays
#include "comm/memory.h"               // Arena, MemoryClass
#include "comm/mesh_shape.h"           // MeshShape, mesh_groups
#include "comm/ngram_arrays.h"         // TableArrays
#include "comm/pipeline.h"             // PipelineArrays
#include "comm/placement.h"            // ranks_sharing_device
#include "comm/pipeline_schedule.h"    // PipelineShape
#include "comm/settings.h"             // rope_floats, fp8_sizes, zero_settings, training_layout
#include "comm/stage.h"                // Stage
#include "comm/world.h"                // World
#include "comm/zero_arrays.h"          // ZeroArrays
#include "data/base/error.h"           // fail, text
#include "data/options/named_lists.h"  // named_lists
#include "data/options/options.h"      // Options
#include "kernels/fp8_matmul.cuh"      // Fp8Arrays

// ----------------------------------------------------------------------------
// communicators
//
// Device memory that NCCL uses for the groups of a mesh, estimated before they exist.
//
// A group communicates over channels, each a thread block of its kernels, and in each channel a rank has a
// connection to the next rank of a ring. A connection has buffers for three protocols: 512 KiB for LL, 4.7
// MiB for LL128 and 4 MiB for Simple (NCCL's default NCCL_BUFFSIZE). Between machines, sender and receiver
// each have a set of buffers, because the network card copies from one to the other; within a machine only
// the receiver has one. A channel also lists all ranks of its group.
//
// This is an estimate on the safe side: NCCL may use fewer channels than it is allowed. Once the mesh is
// made, MemoryPlan::check_left verifies that everything else fits beside what NCCL has actually allocated.

constexpr size_t memory_of_connection = ((size_t)512 << 10) + 4915200 + ((size_t)4 << 20);
constexpr size_t memory_of_peer = 640;  // bytes, in each channel

// per_machine: ranks on a machine.
inline size_t communicator_memory(const MeshShape& shape, int per_machine) {
    size_t bytes = 0;
    // span: the last rank of the group minus its first.
    auto add = [&](int ranks, int span, int channels) {
        if (ranks == 1) return;
        bool crosses = span >= per_machine;
        bytes += (size_t)channels * ((crosses ? 2 : 1) * memory_of_connection + ranks * memory_of_peer);
    };
    for (size_t group = 0; group < mesh_groups.size(); group++) {
        const GroupRow& row = mesh_groups[group];
        if (served_by(group, shape) == group) add(ranks_of(row, shape), span_of(row, shape), row.blocks);
    }
    for (int link = 0; link < 4 && shape.pp > 1; link++) add(2, shape.along(stage_axes), blocks_of_links);
    return bytes;
}

constexpr const char* memory_of_groups = "communicators up to";

// The groups' memory as a class, on each rank. Empty if ranks do not use NCCL.
inline std::vector<MemoryClass> memory_of_mesh([[maybe_unused]] const MeshShape& shape,
                                               [[maybe_unused]] const World& world) {
#ifdef RANKS_USE_NCCL
    return {{memory_of_groups, communicator_memory(shape, world.local_size())}};
#else
    return {};
#endif
}

// ----------------------------------------------------------------------------
// memory that is taken

// Elements of the residual stream that a rank sends to the next stage: the rows of a tensor rank.
inline size_t stream_size(const ModelConfig& config, const Workload& w, const Layout& cut) {
    return (size_t)w.B * w.T / cut.mesh.tp * config.channels;
}

// Bytes of each class of memory that a model needs on one rank of a stage. layout: that of the stage's
// parameters.
inline std::vector<MemoryClass> stage_memory(const ModelConfig& config, const Workload& w,
                                             const ZeroSettings& settings, const Layout& cut,
                                             const Stage& stage, const ParameterLayout& layout) {
    Arena counted(Arena::counts, w.element_bytes);
    ZeroArrays(counted, layout, cut.mesh.shards(), settings);
    MatrixArrays(counted, layout, cut.mesh, settings.transform_scratch);
    GradientSumArrays(counted, layout, cut.mesh, settings);
    PipelineArrays(counted, cut.pipeline, stage.capacity, stage.number(), stream_size(config, w, cut));
    ActivationArrays(counted, activation_table(config, w, stage), stage);
    counted.of("activations").take<float>(rope_floats(config, w));
    Fp8Arrays(counted, fp8_sizes(config, w, stage));
    TableArrays(counted, TableSizes(config, w.B, w.T, stage, settings.rows_dtype(w.element_bytes)), settings);
    if (settings.staging) {
        counted.of("staging for checkpoints", true)
            .take<char>(staging_bytes(layout, cut.mesh, settings, counted.element_bytes()));
    }
    return counted.classes();
}

// Combines the classes of all stages into the worst case: the device classes of the stage that needs most on
// the device, and the host classes of the stage that needs most on the host. If device and host share one
// memory, these are the classes of the stage that needs most.
inline std::vector<MemoryClass> most_of_stages(const std::vector<std::vector<MemoryClass>>& stages,
                                               bool own_memory = has_own_memory) {
    std::vector<MemoryClass> most = *std::ranges::max_element(
        stages, {}, [&](const auto& classes) { return memory_total(classes, own_memory); });
    if (!own_memory) return most;
    std::erase_if(most, &MemoryClass::on_host);
    std::ranges::copy_if(*std::ranges::max_element(stages, {}, pinned_total), std::back_inserter(most),
                         &MemoryClass::on_host);
    return most;
}

// Bytes of each class that a model needs on a rank, for the stages that need most.
inline std::vector<MemoryClass> memory_classes(const ModelConfig& config, const Workload& w,
                                               const ZeroSettings& settings, const Layout& cut = {}) {
    std::vector<std::vector<MemoryClass>> stages;
    for (int number = 0; number < cut.mesh.pp; number++) {
        Stage stage(config, cut, first_of_stage(number), w.training);
        stages.push_back(stage_memory(config, w, settings, cut, stage,
                                      parameter_layout(config, cut.mesh.shards(), stage.units())));
    }
    return most_of_stages(stages);
}

// ----------------------------------------------------------------------------
// layouts that fit

// Bytes that a rank may use on its device and, in addition, on the host.
struct MemoryCapacity {
    size_t device, host = SIZE_MAX;
};

// Returns what each rank may use now.
inline MemoryCapacity memory_capacity(const World& world) {
    return {available_memory(ranks_sharing_device(world)),
            has_own_memory ? available_host_memory(world.local_size()) : SIZE_MAX};
}

// Determines whether a model fits into the memory of a rank, and the largest micro-batch with which it would.
class MemoryPlan {
public:
    // Bytes of each class with B sequences in a micro-batch and this many micro-batches in a step.
    using Classes = std::function<std::vector<MemoryClass>(int B, int micro_batches)>;

    MemoryPlan(const Workload& workload, const PipelineShape& pipeline, MemoryCapacity capacity,
               Classes classes)
        : B_(workload.B),
          T_(workload.T),
          pipeline_(pipeline),
          training_(workload.training),
          recompute_(workload.recompute),
          capacity_(capacity),
          classes_of_(std::move(classes)),
          classes_(classes_of_(B_, pipeline.micro_batches)) {}

    size_t needs() const { return memory_total(classes_); }
    size_t available() const { return capacity_.device; }
    size_t pins() const { return pinned_total(classes_); }
    bool fits() const { return needs() <= capacity_.device && pins() <= capacity_.host; }

    // Returns the largest micro-batch that fits, or 0. A step of several micro-batches keeps its size: if
    // they are smaller, there are more of them, and a pipeline may hold more at once.
    int largest_micro_batch() const {
        int step = pipeline_.micro_batches * B_;
        bool single = pipeline_.micro_batches == 1;
        auto fits = [&](int B) {
            auto classes = classes_of_(B, single ? 1 : ceil_div(step, B));
            return memory_total(classes) <= capacity_.device && pinned_total(classes) <= capacity_.host;
        };
        int most = 0, too_large = single ? INT_MAX / T_ : step + 1;
        while (too_large - most > 1) {
            int B = most + (too_large - most) / 2;
            (fits(B) ? most : too_large) = B;
        }
        while (!single && most > 0 && (step % most || !fits(most))) most--;
        return most;
    }

    // Fails if the model does not fit.
    void check() const {
        if (fits()) return;
        if (pins() > capacity_.host && !training_)
            fail("tables: need %s of the host's memory for each rank, but only %s are free; free some, "
                 "ask for less at once, or use more machines",
                 size_text(pins()).c_str(), size_text(capacity_.host).c_str());
        if (pins() > capacity_.host)
            fail("--async-save and --offload: need %s of the host's memory for each rank, including its "
                 "batches, but only %s are free; give --async-save off, offload less, or choose a smaller "
                 "--micro-batch",
                 size_text(pins()).c_str(), size_text(capacity_.host).c_str());
        bool saves_more = training_ && recompute_ < Recompute::block;
        if (int fits = largest_micro_batch()) {
            fail("--micro-batch %d: needs %s of memory, but only %s are free; --micro-batch %d fits%s", B_,
                 size_text(needs()).c_str(), size_text(capacity_.device).c_str(), fits,
                 saves_more ? "; --recompute block saves more" : "");
        }
        fail("the model needs %s of memory, but only %s are free; %s", size_text(needs()).c_str(),
             size_text(capacity_.device).c_str(),
             !training_ ? "free some, ask for less at once, or cut the model over more processes (mpirun -np)"
                        : text("choose a smaller --model, a shorter --sequence-length%s or --async-save off, "
                               "or cut it over more processes with --zero, --tp or --pp",
                               saves_more ? ", --recompute block" : "")
                              .c_str());
    }

    // Fails if the other classes do not fit into the `left` bytes that the communicators leave.
    void check_left(size_t left) const {
        size_t needs = 0;
        for (const MemoryClass& one : classes_)
            if (std::string_view(one.name) != memory_of_groups) needs += memory_total({one});
        if (needs <= left) return;
        fail("--micro-batch %d: needs %s more memory, but only %s are left after the communicators; choose a "
             "smaller one, or --recompute block",
             B_, size_text(needs).c_str(), size_text(left).c_str());
    }

    void print_lines(int ranks) const {
        const char* where = pipeline_.stages > 1 ? " on the stage that needs most"
                            : ranks > 1          ? " on each rank"
                                                 : "";
        print("memory      ");
        for (const MemoryClass& part : classes_) print(" %s %s,", part.name, size_text(part.bytes).c_str());
        print(" %s in all%s\n             %s free and %s kept for libraries, enough for --micro-batch %d\n",
              size_text(needs()).c_str(), where, size_text(capacity_.device).c_str(),
              size_text(library_memory()).c_str(), largest_micro_batch());
        if (has_own_memory && pins() > 0)
            print("             %s of the host's memory%s; %s are free for each rank\n",
                  size_text(pins()).c_str(),
                  pipeline_.stages > 1 ? " on the stage that needs most of it" : "",
                  size_text(capacity_.host).c_str());
    }

    // Returns what print_lines() prints, for the log of a run, and the pipeline's bubble for default costs.
    nlohmann::ordered_json record() const {
        nlohmann::ordered_json classes = nlohmann::ordered_json::array();
        for (const MemoryClass& part : classes_)
            classes.push_back({{"class", part.name}, {"bytes", part.bytes}, {"host", part.on_host}});
        if (capacity_.device > needs())
            classes.push_back({{"class", "free"}, {"bytes", capacity_.device - needs()}, {"host", false}});
        nlohmann::ordered_json result = {{"memory", classes}};
        if (pipeline_.stages > 1)
            result["pipeline"] = {{"schedule", name_of(pipeline_.schedule)},
                                  {"stages", pipeline_.stages},
                                  {"chunks", pipeline_.chunks},
                                  {"micro_batches", pipeline_.micro_batches},
                                  {"idle", time_pipeline(pipeline_, {}).bubble()}};
        return result;
    }

private:
    int B_, T_;
    PipelineShape pipeline_;
    bool training_;
    Recompute recompute_;
    MemoryCapacity capacity_;
    Classes classes_of_;
    std::vector<MemoryClass> classes_;
};

// beside: returns what a rank needs besides the model's own arrays; or null.
inline MemoryPlan memory_plan(const ModelConfig& config, const Workload& workload,
                              const ZeroSettings& settings, const Layout& layout = {},
                              MemoryCapacity capacity = {available_memory()},
                              std::function<std::vector<MemoryClass>(const Workload&)> beside = nullptr) {
    auto classes = [=](int B, int micro_batches) {
        Workload w = workload;
        Layout cut = layout;
        w.B = B, cut.pipeline.micro_batches = micro_batches;
        auto classes = memory_classes(config, w, settings, cut);
        if (beside) std::ranges::copy(beside(w), std::back_inserter(classes));
        return classes;
    };
    return {workload, layout.pipeline, capacity, classes};
}

// ----------------------------------------------------------------------------
// the choice of --recompute

// A training run with one kind of recomputation.
struct TrainingMemory {
    Workload workload;
    Layout layout;
    MemoryPlan plan;

    TrainingMemory(const Options& o, Recompute recompute, const World& world)
        : workload(training_workload(o, recompute)),
          layout(training_layout(o, workload)),
          plan(memory_plan(o, workload, zero_settings(o), layout, memory_capacity(world),
                           beside(o, layout.mesh, world))) {}

    // For all ranks, after their groups are made: fails if the memory that the run still needs does not fit
    // beside them.
    void check_groups(const World& world) const {
        world.on_all_ranks([&] {
            if (has_own_memory) plan.check_left(available_memory(ranks_sharing_device(world)));
        });
    }

private:
    // Batches, of training and of each validation set, and what NCCL and CUDA graphs need.
    static std::function<std::vector<MemoryClass>(const Workload&)>
    beside(const Options& o, const MeshShape& mesh, const World& world) {
        std::vector<MemoryClass> classes = memory_of_mesh(mesh, world);
        classes.push_back({"graphs up to", graph_memory(o)});
        std::erase_if(classes, [](const MemoryClass& one) { return one.bytes == 0; });
        size_t sources = 1 + named_lists("--val-data", o.val_data).size();
        return [=](const Workload& w) {
            std::vector<MemoryClass> all = classes;
            all.push_back(
                {"batches", sources * DeviceBatches::host_bytes(w.B, w.sequence(), w.contexts), true});
            return all;
        };
    }
};

// Returns the least recomputation that fits, or block. Each kind recomputes everything that the one before it
// does, so the least is the fastest.
inline Recompute least_recomputation(const std::function<bool(Recompute)>& fits) {
    Recompute kind = Recompute::none;
    while (kind < Recompute::block && !fits(kind)) kind = Recompute((int)kind + 1);
    return kind;
}

// For all ranks, which get the same recomputation: fails if the run does not fit. With --recompute auto, a
// note reports the choice, unless it is `none`.
inline TrainingMemory fit_training(const Options& o, const World& world, std::vector<std::string>& notes) {
    std::map<Recompute, TrainingMemory> tried;
    auto with = [&](Recompute kind) -> TrainingMemory& {
        return tried.try_emplace(kind, o, kind, world).first->second;
    };
    Recompute kind = o.recompute;
    if (kind == Recompute::automatic) {
        world.on_all_ranks([&] {
            kind = least_recomputation([&](Recompute candidate) { return with(candidate).plan.fits(); });
        });
        kind = Recompute(world.largest((int)kind));
        const MemoryPlan& plan = with(Recompute::none).plan;         // every rank has tried this first
        int least = -world.largest(-(int)(plan.available() >> 20));  // MiB, the least of any rank
        if (kind != Recompute::none)
            notes.push_back(text("--recompute %s: %s are free, but without it %s are needed", name_of(kind),
                                 size_text((size_t)least << 20).c_str(), size_text(plan.needs()).c_str()));
    }
    world.on_all_ranks([&] { with(kind).plan.check(); });
    return std::move(with(kind));
}
