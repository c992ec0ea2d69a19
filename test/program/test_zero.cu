/*
ZeRO on real ranks against one rank: the same steps, the same bits on all replicas, and bytes sent and held as
the formulas say. Rank 0 also trains a model by itself on the whole batch for comparison.
*/
// ranks: 2 1 4
// seconds: 25
#include <map>

#include "comm/checkpoint_places.h"
#include "test/program/collected.h"
#include "test/program/model_testing.h"
#include "test/support/ranks.h"

namespace {

constexpr int T = 11, sequences = 8;   // per step, over all ranks and micro-batches
constexpr int steps = on_cpu ? 3 : 2;  // the simulated GPU is slow

struct Case {
    const char* name;
    int level;
    bool whole_group;  // the shard group is all ranks; otherwise half of them
    bool tied;
    int micro_batches;
    bool on_simt = false;  // it also runs on the simulated GPU, which is slow
    ZeroSettings settings = {};
    OptimizerKind optimizer = OptimizerKind::adamw;
};

using enum OptimizerKind;

const Case cases[] = {
    {"plain data parallel", 0, true, true, 1},
    {"plain, accumulating, Muon", 0, true, false, 2, false, {}, muon},
    {"ZeRO 1", 1, true, true, 1},
    {"ZeRO 1, accumulating, LAMB", 1, true, false, 2, true, {}, lamb},
    {"ZeRO 1, hybrid, LAMB", 1, false, true, 2, false, {}, lamb},
    {"ZeRO 2", 2, true, false, 1},
    {"ZeRO 2, accumulating", 2, true, true, 2},
    {"ZeRO 2, hybrid, Muon", 2, false, false, 2, false, {}, muon},
    {"ZeRO 3", 3, true, false, 1},
    {"ZeRO 3, tied", 3, true, true, 1},
    {"ZeRO 3, accumulating, Muon", 3, true, false, 2, true, {}, muon},
    {"ZeRO 3, tied, accumulating", 3, true, true, 2},
    {"ZeRO 3, hybrid, LAMB", 3, false, true, 2, false, {}, lamb},
    {"ZeRO 3, nothing ahead", 3, true, false, 2, false, {.prefetch = 0}},
    {"ZeRO 3, far ahead", 3, true, false, 2, false, {.prefetch = 9}},
    {"ZeRO 3, no overlap", 3, true, true, 1, false, {.overlap = false}},
    {"ZeRO 1, offload", 1, true, true, 2, false, {.offload = true}},
    {"ZeRO 1, offload, LAMB", 1, true, true, 1, false, {.offload = true}, lamb},
    {"ZeRO 3, offload, Muon", 3, true, false, 1, false, {.offload = true}, muon},
    {"plain, gradients sent in bf16", 0, true, true, 2, false, {.reduce_dtype = Dtype::bf16}},
    {"ZeRO 1, gradients sent in bf16", 1, true, true, 2, true, {.reduce_dtype = Dtype::bf16}},
    {"ZeRO 3, hybrid, gradients sent in bf16", 3, false, false, 2, false, {.reduce_dtype = Dtype::bf16}},
};

ModelConfig config_of(const Case& c) {
    ModelConfig config = small_config();
    config.layers = on_cpu ? 3 : 2;
    config.tie_embeddings = c.tied;
    if (!c.tied) {
        config.norm = NormKind::rmsnorm, config.position = PositionKind::rope, config.rope_dims = 6;
        config.mlp = MlpKind::swiglu, config.bias = false, config.kv_heads = 2;
    }
    return config;
}

MeshShape shape_of(const Case& c) {
    int ranks = test_world().size();
    int group = c.level == 0 ? 1 : c.whole_group || ranks % 2 ? ranks : ranks / 2;
    return {.dp = ranks, .shard = group, .stage_group = true};
}

ZeroSettings settings_of(const Case& c) {
    ZeroSettings settings = c.settings;
    settings.level = c.level;
    settings.keep_master = !exact;
    return for_optimizer(c.optimizer, settings);
}

// Rows [first, first + count) of a step's global batch.
TestBatch rows_of(int step, int first, int count, int vocab) {
    std::vector<int> tokens(count * T), targets(count * T);
    for (int i = 0; i < count * T; i++) {
        Random4 random = philox(random_key(7, text("step %d", step)), first * T + i);
        tokens[i] = random.at[0] % vocab;
        targets[i] = random.at[1] % vocab;
    }
    return TestBatch(count, T, tokens, targets);
}

StepResult step_of(Gpt& g, int step, int micro_batches, OptimizerKind kind = adamw) {
    int ranks = g.mesh.shape.dp, rank = g.mesh.data_rank(), B = sequences / ranks / micro_batches;
    std::unique_ptr<TestBatch> batch;
    auto load = [&](int micro, int) {
        cudaCheck(cudaStreamSynchronize(g.stream));  // the previous batch is freed here
        batch.reset(new TestBatch(rows_of(step, (micro * ranks + rank) * B, B, g.config.vocab_size)));
        return **batch;
    };
    zero_gradients(g);
    accumulate_gradients(g, micro_batches, load, 1.0f / (sequences * T));
    g.state.update(g.stats.data, optimizer_of(kind, {1e-2, 0.9, 0.95, 1e-8, 0.1, step + 1, false}, 0), 0.5f);
    return read_result(g, sequences * T);
}

Workload workload_of(int B) {
    return {B, T, true, Recompute::none, 16};
}

// The bits of all parameters as this rank's forward pass sees them.
std::string seen_parameters(Gpt& g) {
    std::string bits;
    for (int unit : g.layout.held()) {
        g.state.acquire(unit, 0);
        std::string of_unit(g.layout.unit_size(unit) * sizeof(floatX), 0);
        cudaCheck(cudaMemcpyAsync(of_unit.data(), g.state.params(unit), of_unit.size(),
                                  cudaMemcpyDeviceToHost, g.stream));
        g.state.release(unit);
        cudaCheck(cudaStreamSynchronize(g.stream));
        bits += of_unit;
    }
    return bits;
}

// All elements of all tensors, concatenated.
std::vector<double> collected(ZeroState& state) {
    std::string bytes;
    for (auto& [name, tensor] : collected_bytes(state)) bytes += tensor;
    if (!state.settings().keep_master && sizeof(floatX) < sizeof(float)) {
        auto* values = (const floatX*)bytes.data();
        return to_doubles(std::vector<floatX>(values, values + bytes.size() / sizeof(floatX)));
    }
    auto* values = (const float*)bytes.data();
    return {values, values + bytes.size() / sizeof(float)};
}

// A step's results depend on rounding. In bf16 activations are rounded too, and differ with the batch; bf16
// reduction rounds gradients, and AdamW amplifies small ones.
struct Tolerance {
    double loss, norm, weight;

    explicit Tolerance(const Case& c) {
        if (!exact)
            loss = 2e-3, norm = weight = 2e-2;
        else if (c.settings.reduce_dtype == Dtype::bf16)
            loss = 1e-3, norm = weight = 2e-2;
        else
            loss = 1e-6, norm = weight = 1e-5;
    }
};

}  // namespace

TEST_CASE("every level takes the steps of one rank, and all ranks hold the same bits") {
    for (const Case& c : cases) {
        if (!on_cpu && !c.on_simt) continue;
        CAPTURE(std::string(c.name));
        const Tolerance allowed(c);
        ModelConfig config = config_of(c);
        Mesh mesh(test_world(), shape_of(c), test_stream());
        Gpt g(config, workload_of(sequences / mesh.shape.dp / c.micro_batches), settings_of(c), mesh,
              {mesh.shape});
        initialize(g.state, 5);
        std::optional<Gpt> alone;  // a single rank's model as the reference
        if (test_world().is_root()) {
            alone.emplace(config, workload_of(sequences), for_optimizer(c.optimizer, with_master));
            initialize(alone->state, 5);
        }
        auto difference = [&] {
            std::vector<double> got = collected(g.state);
            return alone ? relative_error(got, collected(alone->state)) : 0;
        };
        CHECK(difference() == 0);
        for (int step = 0; step < steps; step++) {
            StepResult got = step_of(g, step, c.micro_batches, c.optimizer);
            CHECK(got.finite);
            if (alone) {
                StepResult want = step_of(*alone, step, 1, c.optimizer);
                CHECK(got.loss == doctest::Approx(want.loss).epsilon(allowed.loss));
                CHECK(got.gradient_norm == doctest::Approx(want.gradient_norm).epsilon(allowed.norm));
            }
            std::string seen = text("%.9g %.9g ", got.loss, got.gradient_norm) + seen_parameters(g);
            auto replicas = test_world().all_gather(seen);
            for (const std::string& bits : replicas) CHECK((bits == replicas[0]));
        }
        // Muon scales singular values of rounding noise up to the size of all others
        double noise = exact ? 100 : 10;
        CHECK(difference() < (c.optimizer == muon ? noise : 1) * allowed.weight);
    }
}

TEST_CASE("overlap, offload and units gathered ahead do not change a bit") {
    const ZeroSettings variants[] = {{.overlap = false},
                                     {.prefetch = 0},
                                     {.prefetch = 2},
                                     {.offload = true},
                                     {.offload = true, .overlap = false}};
    for (int level : {1, 2, 3}) {
        if (!on_cpu && level != 3) continue;
        Case c = {"", level, true, level == 2, 2};
        ModelConfig config = config_of(c);
        Mesh mesh(test_world(), shape_of(c), test_stream());
        std::vector<std::string> bits;
        auto train = [&](const ZeroSettings& variant) {
            c.settings = variant;
            Gpt g(config, workload_of(sequences / mesh.shape.dp / 2), settings_of(c), mesh, {mesh.shape});
            initialize(g.state, 5);
            for (int step = 0; step < steps; step++) CHECK(step_of(g, step, 2).finite);
            return seen_parameters(g);
        };
        std::string plain = train({});
        for (const ZeroSettings& variant : variants) {
            if (!on_cpu && !(variant.offload && variant.overlap.data)) continue;
            CAPTURE(text("level %d overlap %d offload %d prefetch %d", level, variant.overlap.data,
                         variant.offload, variant.prefetch));
            CHECK((train(variant) == plain));
        }
    }
}

namespace {

// Four units that hold parameters and compute nothing.
ParameterLayout bare_layout(bool tied, int shards) {
    return ParameterLayout({{0, Unit::embedding, "in", 50, 8, 0, 1, true},
                            {1, Unit::block, "weight", 40, 8, 0, 1, true},
                            {2, Unit::block, "bias", 24, 0, 0, 1, false},
                            {3, Unit::head, "out", 45, 8, 0, 1, true}},
                           4, tied, shards);
}

// Called on all ranks.
void set_normal(ZeroState& state) {
    std::vector<float> values;
    set_tensors(state, [&](const TensorRow&, const std::string& name, size_t first, size_t count) {
        values.resize(count);
        for (size_t i = 0; i < count; i++) values[i] = random_normal(random_key(3, name), first + i);
        return std::span<const float>(values);
    });
}

}  // namespace

#ifndef RANKS_USE_NCCL  // which cannot be slowed down
namespace {

struct Slowness {
    int compute;  // microseconds before and after each look at parameters or gradients
    double link;  // GB/s; 0: not slowed down
};

// Runs steps with noise as gradients; with overlap, the host waits for none of them. Returns the bits of all
// parameters at each use, of the statistics after each step, and of the final optimizer state. They do not
// depend on whether gradients of matrices are cleared and added to, or overwritten.
std::string bare_steps(const Case& c, const Slowness& slowness, Matrices matrices) {
    constexpr int bare_step_count = 3;
    Mesh mesh(test_world(), shape_of(c), test_stream());
    ParameterLayout layout = bare_layout(c.tied, mesh.shape.shard);
    cudaStream_t compute = test_stream();
    Arena memory;
    ZeroState state(memory, layout, mesh, settings_of(c), compute);
    set_normal(state);
    size_t looks = (size_t)bare_step_count * c.micro_batches * 3;
    Buffer<float> noise(
        random_values<float>(text("noise of %d", mesh.data_rank()).c_str(), looks * layout.size() / 3, 1));
    Buffer<floatX> seen(looks * layout.size());
    Buffer<StepStatistics> stats(1), seen_stats(bare_step_count);
    size_t seen_end = 0, noise_end = 0;
    auto pause = [&] {
        if (!slowness.compute) return;
        cudaCheck(cudaLaunchHostFunc(
            compute, [](void* time) { usleep(*(const int*)time); }, (void*)&slowness.compute));
    };
    auto look = [&](int unit, int direction) {
        state.acquire(unit, direction);
        pause();
        cudaCheck(cudaMemcpyAsync((floatX*)seen + seen_end, state.params(unit),
                                  layout.unit_size(unit) * sizeof(floatX), cudaMemcpyDeviceToDevice,
                                  compute));
        seen_end += layout.unit_size(unit);
        state.release(unit);
    };
    auto add_noise = [&](int unit, size_t count, bool first = false) {
        state.begin_gradients(unit, matrices);
        bool overwrites = matrices == Matrices::overwritten && state.overwrites(first);
        size_t added = overwrites ? std::min(count, layout.before_matrices(unit)) : count;
        pause();
        accumulate(state.grads(unit), (float*)noise + noise_end, added, compute);
        copy_async(state.grads(unit) + added, (float*)noise + noise_end + added, count - added, compute);
        noise_end += count;
    };
    int head = layout.last_unit(), classifier = c.tied ? 0 : head;
    host_link_speed(slowness.link);
    for (int step = 0; step < bare_step_count; step++) {
        state.zero_gradients(matrices);
        cudaCheck(cudaMemsetAsync(stats, 0, sizeof(StepStatistics), compute));
        for (int micro = 0; micro < c.micro_batches; micro++) {
            bool last = micro == c.micro_batches - 1;
            for (int unit = 0; unit <= head; unit++) look(unit, +1);
            look(classifier, 0);
            add_noise(classifier, 1);
            for (int unit = head; unit > 0; unit--) {
                look(unit, -1);
                add_noise(unit, layout.unit_size(unit) - (unit == classifier), micro == 0);
                state.reduce_gradients(unit, last);
            }
            add_noise(0, layout.unit_size(0) - (classifier == 0));
            state.reduce_gradients(0, last);
        }
        pause();
        accumulate(&((StepStatistics*)stats)->loss, noise, 1, compute);
        state.update(stats, adamw_optimizer({0.1 / (step + 1), 0.9, 0.95, 1e-8, 0.1, step + 1, false}, 0),
                     20);
        cudaCheck(cudaMemcpyAsync((StepStatistics*)seen_stats + step, stats, sizeof(StepStatistics),
                                  cudaMemcpyDeviceToDevice, compute));
        if (!c.settings.overlap.data) state.synchronize();
    }
    for (int unit = 0; unit <= head; unit++) look(unit, +1);
    state.synchronize();
    host_link_speed(0);
    std::string bits;
    auto add = [&](auto& buffer, size_t count) {
        auto values = buffer.host();
        bits.append((const char*)values.data(), count * sizeof values[0]);
    };
    add(seen, seen_end);
    add(seen_stats, seen_stats.size());
    for (auto& [name, tensor] : collected_bytes(state)) bits += tensor;
    return bits;
}

}  // namespace

// If a stream failed to wait for another, slowing the other down would expose data that is not ready.
TEST_CASE("a slow link or slow computation does not change a bit") {
    const Case kinds[] = {{"plain", 0, true, true, 2},
                          {"ZeRO 1", 1, true, false, 2, false, {.offload = true}},
                          {"ZeRO 1, hybrid", 1, false, false, 1},
                          {"ZeRO 2", 2, true, true, 1, false, {.offload = true}},
                          {"ZeRO 2, hybrid", 2, false, false, 2},
                          {"ZeRO 3, nothing ahead", 3, true, false, 2, false, {.prefetch = 0}},
                          {"ZeRO 3", 3, true, true, 2, true},
                          {"ZeRO 3, hybrid, far ahead", 3, false, false, 1, false, {.prefetch = 3}},
                          {"ZeRO 3, offload", 3, true, false, 1, true, {.offload = true, .prefetch = 2}}};
    for (Case c : kinds) {
        if (!on_cpu && !c.on_simt) continue;
        CAPTURE(std::string(c.name));
        Case in_order = c;
        in_order.settings.overlap = false;
        std::string want = bare_steps(in_order, {0, 0}, Matrices::added_to);
        CHECK((bare_steps(c, {0, 0}, Matrices::overwritten) == want));
        CHECK((bare_steps(c, {1000, 0}, Matrices::added_to) == want));
        CHECK((bare_steps(c, {0, 2e-3}, Matrices::overwritten) == want));
    }
}
#endif

TEST_CASE("every element is stepped alike whoever owns it, random rounding too") {
    Mesh one;
    for (auto [level, offload, kind, on_simt] : {std::tuple{1, false, adamw, false},
                                                 {3, true, adamw, true},
                                                 {1, true, muon, false},
                                                 {3, false, muon, true},
                                                 {1, false, lamb, true},
                                                 {3, true, lamb, false}}) {
        if (!on_cpu && !on_simt) continue;
        CAPTURE(text("level %d, offload %d, %s", level, offload, name_of(kind)));
        Case c = {"", level, level == 1, false, 1};
        auto stepped = [&](const Mesh& mesh) {
            // equal padding everywhere, so that elements have the same noise
            ParameterLayout layout = bare_layout(false, test_world().size());
            ZeroSettings settings = for_optimizer(kind, {.level = level, .offload = offload});
            Arena memory;
            ZeroState state(memory, layout, mesh, settings, test_stream());
            set_normal(state);
            Buffer<float> noise(random_values<float>("noise", layout.size(), 1));
            for (int step = 0; step < 2; step++) {
                state.zero_gradients();
                Buffer<StepStatistics> stats(std::vector<StepStatistics>(1));
                for (int unit = layout.last_unit(); unit >= 0; unit--) {
                    state.begin_gradients(unit);
                    // only one rank adds noise: a sum with zeros does not depend on the order
                    if (mesh.data_rank() == 0) {
                        accumulate(state.grads(unit), (float*)noise + layout.unit_offset(unit),
                                   layout.unit_size(unit), test_stream());
                    }
                    state.reduce_gradients(unit, true);
                }
                AdamW with = {0.1, 0.9, 0.95, 1e-8, 0.1, step + 1, !exact};
                state.update(stats, optimizer_of(kind, with, 9), 0);
                state.synchronize();
            }
            return collected(state);
        };
        double error = relative_error(stepped(Mesh(test_world(), shape_of(c), test_stream())), stepped(one));
        // norms are summed over ranks in another order
        CHECK(error <= (kind != lamb ? 0 : exact ? 1e-6 : 1e-3));
    }
}

TEST_CASE("each kind of tensor has its own learning rate and decay") {
    Options o;
    o.embedding_lr = 2, o.embedding_decay = 3, o.head_lr = 4, o.head_decay = 5, o.vector_lr = 6;
    auto by_kind = zero_settings(o).multipliers;
    auto are = [&](TensorKind kind, double rate, double decay) {
        CHECK(by_kind[(int)kind].learning_rate == rate);
        CHECK(by_kind[(int)kind].weight_decay == decay);
    };
    are(TensorKind::embedding, 2, 3);
    are(TensorKind::head, 4, 5);
    are(TensorKind::vector, 6, 1);
    are(TensorKind::matrix, 1, 1);

    Mesh mesh(test_world(), {.dp = test_world().size(), .shard = test_world().size(), .stage_group = true},
              test_stream());
    ParameterLayout layout = bare_layout(false, mesh.shape.shard);
    auto stepped = [&](OptimizerKind kind, TensorKind other, Multipliers by, bool steps = true) {
        ZeroSettings settings = for_optimizer(kind, {.level = 1});
        settings.multipliers[(int)other] = by;
        Arena memory;
        ZeroState state(memory, layout, mesh, settings, test_stream());
        set_normal(state);
        if (!steps) return collected_bytes(state);
        state.zero_gradients();
        Buffer<float> noise(random_values<float>("noise", layout.size(), 1));
        for (int unit = layout.last_unit(); unit >= 0; unit--) {
            state.begin_gradients(unit);
            accumulate(state.grads(unit), (float*)noise + layout.unit_offset(unit), layout.unit_size(unit),
                       test_stream());
            state.reduce_gradients(unit, true);
        }
        Buffer<StepStatistics> stats(std::vector<StepStatistics>(1));
        state.update(stats, optimizer_of(kind, {0.5, 0.9, 0.95, 1e-8, 0.25, 1, false}, 9), 0);
        state.synchronize();
        return collected_bytes(state);
    };
    const std::map<TensorKind, std::string> tensors = {{TensorKind::embedding, "in"},
                                                       {TensorKind::matrix, "layers.1.weight"},
                                                       {TensorKind::vector, "layers.1.bias"},
                                                       {TensorKind::head, "out"}};
    for (OptimizerKind kind : {adamw, lamb, muon}) {
        CAPTURE(name_of(kind));
        auto plain = stepped(kind, TensorKind::matrix, {}),
             initial = stepped(kind, TensorKind::matrix, {}, false);
        for (auto& [other, its_name] : tensors) {
            CAPTURE(its_name);
            for (Multipliers by : {Multipliers{0, 1}, {2, 1}, {1, 4}}) {
                auto got = stepped(kind, other, by);
                for (auto& [of, name] : tensors) {
                    bool differs = of == other && (by.weight_decay == 1 || of != TensorKind::vector);
                    CHECK((got[name] != plain[name]) == differs);
                }
                if (by.learning_rate == 0) CHECK((got[its_name] == initial[its_name]));
            }
        }
    }
}

TEST_CASE("a tensor of several pieces is set and collected whole") {
    constexpr size_t size = 2 * tensor_piece + 3;
    auto value = [](size_t i) { return exact ? (float)i : (float)(i >> 15); };  // no rounding in floatX
    Mesh mesh(test_world(), {.dp = test_world().size(), .shard = test_world().size(), .stage_group = true},
              test_stream());
    ParameterLayout layout({{0, Unit::embedding, "in", size, 0, 0, 1, true},
                            {1, Unit::block, "weight", 40, 8, 0, 1, true},
                            {2, Unit::head, "out", 45, 8, 0, 1, true}},
                           1, false, mesh.shape.shard);
    // the master copy is collected, if there is one
    Arena memory;
    ZeroState state(memory, layout, mesh, {.level = 1, .training = !exact, .keep_master = !exact},
                    test_stream());
    std::vector<float> values;
    set_tensors(state, [&](const TensorRow&, const std::string&, size_t first, size_t count) {
        values.resize(count);
        for (size_t i = 0; i < count; i++) values[i] = value(first + i);
        return std::span<const float>(values);
    });
    std::string bytes = collected_bytes(state)["in"];
    CHECK(bytes.size() == size * sizeof(float));
    size_t wrong = 0;
    for (size_t i = 0; i < bytes.size() / sizeof(float); i++)
        wrong += ((const float*)bytes.data())[i] != value(i);
    CHECK(wrong == 0);
}

namespace {

// One tensor for each way of partitioning.
ParameterLayout cut_layout(const MeshShape& shape, const MeshPosition& position) {
    StageUnits place = {.tp = shape.tp, .tensor = position[Axis::tensor]};
    bool last = position[Axis::pipeline] == shape.pp - 1;
    if (shape.pp > 1) {
        for (int unit = 0; unit <= 5; unit++) {
            if (std::min(unit / 2, shape.pp - 1) == position[Axis::pipeline] || (last && unit == 0))
                place.units.push_back(unit);
        }
        place.embedding_copy = last;
    }
    using enum Unit;
    return ParameterLayout({{0, embedding, "in", 51, 8, 0, 1, true, Shard::rows, {}, 16},
                            {1, block, "norm", 12, 0, 1, 1, false, Shard::replicated},
                            {2, block, "heads", 32, 8, 0, 1, true, Shard::rows, {{24, 12}, {4, 1}, {4, 1}}},
                            {3, block, "out", 6, 12, 0, 1, true, Shard::columns},
                            {4, block, "scale", 3, 0, 0, 1, false},
                            {5, last_block, "normf", 12, 0, 1, 1, false, Shard::replicated}},
                           4, true, shape.shard, place);
}

// The number of elements, including copies, that do not have set_normal()'s values in this rank's passes.
size_t not_normal(ZeroState& state) {
    size_t wrong = 0;
    const ParameterLayout& layout = state.layout();
    for (int unit : layout.held()) {
        state.acquire(unit, 0);
        state.synchronize();
        std::vector<floatX> seen = from_device(state.params(unit), layout.unit_size(unit));
        state.release(unit);
        for (const TensorPart& part : layout.parts(unit, 0, seen.size())) {
            uint64_t key = random_key(3, part.name);
            part.each_run([&](size_t first, size_t count, size_t offset) {
                for (size_t i = 0; i < count; i++) {
                    auto want = (floatX)random_normal(key, first + i);
                    wrong += (float)seen[part.at + offset + i] != (float)want;
                }
            });
        }
    }
    return wrong;
}

// The mesh shapes that a test's number of ranks allows.
std::vector<MeshShape> cut_shapes() {
    int n = test_world().size();
    std::vector<MeshShape> shapes = {{.tp = n}, {.dp = n, .shard = n}};
    if (n <= 3) shapes.push_back({.pp = n});
    if (n == 4) {
        shapes.insert(shapes.end(), {{.tp = 2, .pp = 2},
                                     {.tp = 2, .dp = 2, .shard = 2},
                                     {.tp = 2, .dp = 2},
                                     {.pp = 2, .dp = 2, .shard = 2}});
    }
    for (MeshShape& shape : shapes) shape.stage_group = true;  // for Muon
    return shapes;
}

// Adds up gradients that depend only on an element's name and number. For copies, a single rank provides
// them.
void make_gradients(ZeroState& state, int step) {
    const ParameterLayout& layout = state.layout();
    state.zero_gradients();
    for (int number = (int)layout.held().size() - 1; number >= 0; number--) {
        int unit = layout.held()[number];
        std::vector<float> values(layout.unit_size(unit));
        for (const TensorPart& part : layout.parts(unit, 0, values.size())) {
            if (!part.counts) continue;
            uint64_t key = random_key(10 + step, part.name);
            part.each_run([&](size_t first, size_t count, size_t offset) {
                for (size_t i = 0; i < count; i++)
                    values[part.at + offset + i] = random_normal(key, first + i);
            });
        }
        Buffer<float> gradient(values);
        state.begin_gradients(unit);
        if (state.mesh().data_rank() == 0)
            accumulate(state.grads(unit), gradient, values.size(), test_stream());
        state.reduce_gradients(unit, true);
        state.synchronize();  // the buffer is freed here
    }
}

}  // namespace

TEST_CASE("values that are set are the same whatever the model is cut into") {
    ZeroSettings one_rank = {.keep_master = !exact};
    ParameterLayout whole = cut_layout({}, {});
    Mesh one;
    Arena memory;
    ZeroState alone(memory, whole, one, one_rank, test_stream());
    set_normal(alone);
    for (MeshShape shape : cut_shapes()) {
        for (int level : {1, 3}) {
            CAPTURE(text("tp %d pp %d dp %d shard %d level %d", shape.tp, shape.pp, shape.dp, shape.shard,
                         level));
            ZeroSettings settings = {.level = level, .keep_master = !exact};
            Mesh mesh(test_world(), shape, test_stream());
            ParameterLayout layout = cut_layout(shape, mesh.position);
            Arena memory;
            ZeroState state(memory, layout, mesh, settings, test_stream());
            set_normal(state);
            CHECK(not_normal(state) == 0);
            CHECK((collected_bytes(state) == collected_bytes(alone)));
        }
    }
}

// A single rank provides each gradient, so the sums are the same to the bit.
TEST_CASE("given the same gradients, steps are the same whatever the model is cut into") {
    for (OptimizerKind kind : {adamw, lamb, muon}) {
        auto stepped = [&](const Mesh& mesh, const MeshShape& shape, int level) {
            ParameterLayout layout = cut_layout(shape, mesh.position);
            ZeroSettings settings = for_optimizer(kind, {.level = level, .keep_master = !exact});
            Arena memory;
            ZeroState state(memory, layout, mesh, settings, test_stream());
            set_normal(state);
            for (int step = 0; step < 2; step++) {
                Buffer<StepStatistics> stats(std::vector<StepStatistics>(1));
                make_gradients(state, step);
                state.update(stats, optimizer_of(kind, {0.1, 0.9, 0.95, 1e-8, 0.1, step + 1, false}, 9), 0);
                state.synchronize();
            }
            return collected(state);
        };
        std::vector<double> want = stepped({}, {}, 0);
        for (MeshShape shape : cut_shapes()) {
            int level = shape.shard > 1 ? 3 : 1;
            CAPTURE(text("%s, tp %d pp %d dp %d shard %d", name_of(kind), shape.tp, shape.pp, shape.dp,
                         shape.shard));
            double error =
                relative_error(stepped(Mesh(test_world(), shape, test_stream()), shape, level), want);
            CHECK(error <= (kind == lamb ? 1e-6 : 0));  // norms are summed over ranks in another order
        }
    }
}

TEST_CASE("a step that is not finite on one rank changes the weights of none") {
    for (int level = on_cpu ? 0 : 3; level <= 3; level++) {
        CAPTURE(level);
        Case c = {"", level, true, true, 1};
        c.optimizer = level == 1 ? lamb : level >= 2 ? muon : adamw;
        c.settings.offload = level == 2;
        Mesh mesh(test_world(), shape_of(c), test_stream());
        Gpt g(config_of(c), workload_of(sequences / mesh.shape.dp), settings_of(c), mesh, {mesh.shape});
        initialize(g.state, 5);
        std::string before = seen_parameters(g);
        auto poisoned_step = [&](auto&& poison) {
            int B = g.workload.B;
            TestBatch batch = rows_of(0, mesh.data_rank() * B, B, g.config.vocab_size);
            zero_gradients(g);
            accumulate_gradients(g, *batch, 1.0f / (sequences * T), true);
            cudaCheck(cudaStreamSynchronize(g.stream));
            if (test_world().rank() == test_world().size() - 1) poison();
            g.state.update(g.stats.data, optimizer_of(c.optimizer, {1e-2, 0.9, 0.95, 1e-8, 0.1, 1, false}, 0),
                           1);
            return read_result(g, sequences * T);
        };
        StepResult stats = poisoned_step([&] { g.stats.poison(g.stream); });
        CHECK_FALSE(stats.finite);
        CHECK((seen_parameters(g) == before));
        CHECK_FALSE(stats.stop);
        stats = poisoned_step([&] { fill(&g.stats.data->stop, 1, 1, g.stream); });
        CHECK(stats.finite);
        CHECK(stats.stop);  // one rank requested it
        CHECK_FALSE((seen_parameters(g) == before));
        initialize(g.state, 5);
        CHECK((seen_parameters(g) == before));  // no gathered parameters are left from before
    }
}

// In bf16; test_layouts.cu shows it in fp32, with every other layout.
TEST_CASE("bytes sent in a step are those of the formulas" * doctest::skip(on_cpu)) {
    for (const Case& c : cases) {
        if (!c.on_simt) continue;
        CAPTURE(std::string(c.name));
        ModelConfig config = config_of(c);
        Mesh mesh(test_world(), shape_of(c), test_stream());
        Gpt g(config, workload_of(sequences / mesh.shape.dp / c.micro_batches), settings_of(c), mesh,
              {mesh.shape});
        initialize(g.state, 5);
        step_of(g, 0, c.micro_batches, c.optimizer);  // all later steps begin like the next one
        reset_traffic();
        step_of(g, 1, c.micro_batches, c.optimizer);

        size_t N = g.layout.size(), D = mesh.shape.dp, S = mesh.shape.shard, R = D / S, M = c.micro_batches;
        size_t first = g.layout.unit_size(0), block = g.layout.unit_size(1),
               last = g.layout.unit_size(g.layout.last_unit()), L = config.layers,
               norm = g.layout.unit_size(L) - block;  // unit L is the last block with the last norm
        bool cut = S > 1;
        // reduce-scatter over the shard group, once per micro-batch if gradients are sharded, then all-reduce
        size_t passes = c.level >= 2 ? M : 1;
        size_t width = dtype_size(c.settings.reduce_dtype);
        CHECK(bytes_sent(Traffic::gradients) ==
              width * (passes * N * (S - 1) / S + 2 * (R - 1) * (N / S) / R));
        // All-gather after the update, or before each use. A block stays in its slot until another needs it:
        // the backward pass finds the last blocks of the forward pass there, and the next forward pass the
        // first ones.
        size_t kept = std::min<size_t>(L, c.settings.prefetch + 1);
        size_t blocks = L * block + norm + (2 * M - 1) * (L - kept) * block + (L > kept ? (M - 1) * norm : 0);
        size_t gathered = c.level == 0 ? 0 : c.level < 3 ? N : (c.tied ? 1 : M) * (first + last) + blocks;
        CHECK(bytes_sent(Traffic::parameters) == (cut ? gathered * (S - 1) / S * sizeof(floatX) : 0));
        size_t norms = c.optimizer == lamb ? 2 * g.layout.sections() : 0;
        CHECK(bytes_sent(Traffic::statistics) <= 2 * (summed_statistics + norms) * sizeof(float));
        CHECK((bytes_sent(Traffic::updates) > 0) == (cut && c.optimizer == muon));
        CHECK(bytes_sent(Traffic::weights) == 0);
    }
}

TEST_CASE("memory held is what the formulas say") {
    ModelConfig config = small_config();
    config.layers = 6, config.channels = 128, config.heads = 4, config.head_size = 32, config.mlp_width = 512;
    config.vocab_size = 1000;
    for (bool tied : {true, false}) {
        config.tie_embeddings = tied;
        for (int level = 0; level <= 3; level++) {
            for (bool offload : {false, true}) {
                CAPTURE(text("level %d, tied %d, offload %d", level, tied, offload));
                Case c = {"", level, true, tied, 1, false, {.offload = offload}};
                Mesh mesh(test_world(), shape_of(c), test_stream());
                ZeroSettings settings = settings_of(c);
                Gpt g(config, workload_of(1), settings, mesh, {mesh.shape});

                size_t held = 0;
                for (auto& part :
                     memory_of<ZeroArrays>(sizeof(floatX), g.layout, mesh.shape.shard, settings)) {
                    CAPTURE(part.name);
                    CHECK(bytes_of(g.memory, part.name) == part.bytes);
                    held += part.bytes;
                }

                // N parameters, S ranks; x bytes per parameter, fp32 gradients and moments, and an fp32 copy
                // of bf16 parameters
                double N = (double)parameter_count(config), S = mesh.shape.shard, x = sizeof(floatX);
                double first = ((double)config.vocab_size + config.context) * config.channels;
                double last = tied ? 0 : config.channels * (double)config.vocab_size;
                double block = (N - first - last) / config.layers;
                double outer = std::max(first, last);
                bool cut_gradients = level >= 2 && S > 1, cut_parameters = level >= 3 && S > 1;
                double parameters = x * (cut_parameters ? N / S + 2 * block + outer : N);
                double gradients = 4 * (cut_gradients ? N / S + 2 * block + outer : N);
                double optimizer = N / S * (exact ? 8 : 12) + (offload ? N / S * (4 + x) : 0);
                double formula = parameters + gradients + optimizer;
                CHECK((double)held == doctest::Approx(formula).epsilon(0.02));
            }
        }
    }
}
