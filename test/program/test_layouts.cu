/*
Layouts of a run (tensor, pipeline and data parallelism, and ZeRO) against formulas: the bytes that each rank
sends in a step for each purpose, exactly, and the memory that it needs. The formulas are derived here a
second time, from the papers and from how tensors are partitioned, and share nothing with the program but the
sizes.

    t tensor ranks, p stages, S ranks of a shard group, R replicas, m micro-batches of N tokens, e bytes of a
    floatX. A ring sends (n - 1)/n of a buffer from each of n ranks in one pass.
*/
// devices: cpu cuda
// ranks: 2 4 6
#include <map>
#include <numeric>
#include <optional>
#include <sstream>

#include "test/program/model_testing.h"
#include "test/support/ranks.h"

namespace {

struct Case {
    const char* name;
    MeshShape mesh;
    int micro_batches = 2;
    struct {
        bool parallel = false, tied = true, llama = false;
        int kv_heads = 4;
        bool filter = false;
    } model = {};
    Recompute recompute = Recompute::none;
    struct {
        PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
        int chunks = 1;
        std::vector<int> split = {};  // empty: even
    } pipeline = {};
    int row_chunks = 1;
    ZeroSettings settings = {};
    bool among_few = false;  // also runs on the simulated GPU, which is slow, and in the comparison of bits
};

using enum PipelineSchedule;
constexpr auto elementwise = Recompute::elementwise, mlp = Recompute::mlp, block = Recompute::block;
constexpr bool parallel_block = true, untied = false, llama = true, filtered = true;

const Case cases[] = {
    // 2 ranks
    {"tensor", {.tp = 2}, 2, {}, {}, {}, 1, {}, true},
    {"tensor, in chunks", {.tp = 2}, 1, {}, {}, {}, 4},
    {"tensor, parallel block", {.tp = 2}, 2, {parallel_block}},
    {"tensor, parallel block, other switches", {.tp = 2}, 3, {parallel_block, untied, llama, 2}},
    {"tensor, recompute elementwise", {.tp = 2}, 2, {false, untied}, elementwise},
    {"tensor, recompute mlp", {.tp = 2}, 2, {false, untied}, mlp},
    {"tensor, recompute block", {.tp = 2}, 2, {}, block, {}, 2},
    {"tensor, parallel block, recompute elementwise", {.tp = 2}, 2, {parallel_block}, elementwise},
    {"tensor, parallel block, recompute block", {.tp = 2}, 2, {parallel_block}, block},
    {"tensor, shared heads", {.tp = 2}, 2, {false, true, false, 1}},
    {"tensor, shared heads, other switches", {.tp = 2}, 1, {false, untied, llama, 1}},
    {"tensor, local filter", {.tp = 2}, 2, {false, true, llama, 4, filtered}, mlp, {}, 2},
    {"tensor, local filter, parallel block", {.tp = 2}, 2, {parallel_block, true, false, 4, filtered}, block},
    {"zero-bubble, local filter",
     {.pp = 2},
     3,
     {false, true, llama, 4, filtered},
     elementwise,
     {zero_bubble}},
    {"1f1b", {.pp = 2}, 3},
    {"1f1b, untied, recompute", {.pp = 2}, 3, {false, untied}, block},
    {"1f1b, uneven", {.pp = 2}, 4, {}, {}, {one_f_one_b, 1, {3, 1}}},
    {"gpipe", {.pp = 2}, 3, {}, mlp, {gpipe}},
    {"interleaved", {.pp = 2}, 4, {}, {}, {interleaved, 2}},
    {"interleaved, untied", {.pp = 2}, 6, {false, untied}, {}, {interleaved, 2}},
    {"zero-bubble", {.pp = 2}, 3, {}, {}, {zero_bubble}, 1, {}, true},
    {"zero-bubble, parallel block", {.pp = 2}, 4, {parallel_block, untied, llama}, block, {zero_bubble}},
    {"data", {.dp = 2, .shard = 1}},
    {"zero-bubble in one stage, ZeRO 2", {.dp = 2, .shard = 2}, 2, {}, {}, {zero_bubble}, 1, {.level = 2}},
    {"ZeRO 1", {.dp = 2, .shard = 2}, 2, {}, {}, {}, 1, {.level = 1}},
    {"ZeRO 2, no overlap",
     {.dp = 2, .shard = 2},
     3,
     {false, untied},
     {},
     {},
     1,
     {.level = 2, .overlap = false}},
    {"ZeRO 3, recompute", {.dp = 2, .shard = 2}, 2, {false, untied}, block, {}, 1, {.level = 3}},
    {"ZeRO 3, one micro-batch", {.dp = 2, .shard = 2}, 1, {}, {}, {}, 1, {.level = 3}},
    {"ZeRO 3, nothing ahead",
     {.dp = 2, .shard = 2},
     2,
     {false, untied},
     {},
     {},
     1,
     {.level = 3, .prefetch = 0}},
    {"ZeRO 3, far ahead", {.dp = 2, .shard = 2}, 2, {}, {}, {}, 1, {.level = 3, .prefetch = 9}},
    // 4 ranks
    {"4 tensor", {.tp = 4}, 2},
    {"4 tensor, in chunks, recompute", {.tp = 4}, 1, {}, block, {}, 2},
    {"4 tensor, 2 heads", {.tp = 4}, 2, {false, true, false, 2}},
    {"4 tensor, 2 heads, other switches", {.tp = 4}, 1, {parallel_block, untied, llama, 2}},
    {"4 tensor, 1 head", {.tp = 4}, 1, {false, untied, false, 1}, mlp},
    {"4 stages", {.pp = 4}, 5},
    {"4 stages, untied, few micro-batches", {.pp = 4}, 2, {parallel_block, untied, llama}},
    {"4 stages, gpipe, uneven", {.pp = 4}, 5, {}, {}, {gpipe, 1, {1, 2, 3, 2}}},
    {"4 stages, interleaved", {.pp = 4}, 8, {}, {}, {interleaved, 2}},
    {"4 stages, zero-bubble", {.pp = 4}, 6, {}, {}, {zero_bubble}},
    {"tensor and stages", {.tp = 2, .pp = 2}, 3},
    {"tensor and stages, gpipe", {.tp = 2, .pp = 2}, 2, {parallel_block, untied, llama, 1}, mlp, {gpipe}},
    {"tensor and stages, interleaved", {.tp = 2, .pp = 2}, 4, {}, block, {interleaved, 2}, 2, {}, true},
    {"tensor and stages, zero-bubble",
     {.tp = 2, .pp = 2},
     3,
     {false, true, true, 1},
     block,
     {zero_bubble},
     1,
     {},
     true},
    {"tensor and stages, zero-bubble, local filter",
     {.tp = 2, .pp = 2},
     3,
     {false, true, llama, 4, filtered},
     block,
     {zero_bubble},
     1,
     {},
     true},
    {"tensor and data", {.tp = 2, .dp = 2}, 2},
    {"tensor and ZeRO 1", {.tp = 2, .dp = 2, .shard = 2}, 2, {}, {}, {}, 2, {.level = 1}},
    {"tensor and ZeRO 2, shared heads",
     {.tp = 2, .dp = 2, .shard = 2},
     2,
     {false, true, false, 1},
     {},
     {},
     1,
     {.level = 2}},
    {"tensor and ZeRO 3", {.tp = 2, .dp = 2, .shard = 2}, 2, {false, untied}, {}, {}, 1, {.level = 3}},
    {"stages and data", {.pp = 2, .dp = 2}, 3},
    {"stages and ZeRO 1", {.pp = 2, .dp = 2, .shard = 2}, 3, {}, {}, {}, 1, {.level = 1}},
    {"stages and ZeRO 2", {.pp = 2, .dp = 2, .shard = 2}, 4, {}, {}, {interleaved, 2}, 1, {.level = 2}},
    {"stages and ZeRO 2, zero-bubble",
     {.pp = 2, .dp = 2, .shard = 2},
     3,
     {false, untied},
     {},
     {zero_bubble},
     1,
     {.level = 2}},
    {"stages and ZeRO 3", {.pp = 2, .dp = 2, .shard = 2}, 3, {}, block, {}, 1, {.level = 3}},
    {"stages and ZeRO 3, nothing ahead",
     {.pp = 2, .dp = 2, .shard = 2},
     4,
     {false, untied},
     {},
     {interleaved, 2},
     1,
     {.level = 3, .prefetch = 0}},
    {"stages and ZeRO 3, uneven",
     {.pp = 2, .dp = 2, .shard = 2},
     4,
     {},
     {},
     {gpipe, 1, {5, 3}},
     1,
     {.level = 3, .prefetch = 2}},
    {"ZeRO 1, hybrid", {.dp = 4, .shard = 2}, 2, {}, {}, {}, 1, {.level = 1}},
    {"ZeRO 2, hybrid", {.dp = 4, .shard = 2}, 2, {}, {}, {}, 1, {.level = 2}},
    {"ZeRO 3, hybrid", {.dp = 4, .shard = 2}, 2, {parallel_block}, mlp, {}, 1, {.level = 3}},
    // 6 ranks
    {"3 replicas of stages", {.pp = 2, .dp = 3, .shard = 3}, 2, {}, {}, {}, 1, {.level = 2}, true},
};

bool runs(const Case& c) {
    return c.mesh.ranks() == test_world().size() && (on_cpu || c.among_few);
}

// large: so that padding is negligible.
ModelConfig config_of(const Case& c, bool large = false) {
    ModelConfig config;
    config.channels = large ? 128 : 32, config.heads = 4, config.kv_heads = c.model.kv_heads;
    config.mlp_width = large ? 448 : 48, config.vocab_size = large ? 1024 : 53, config.context = 128;
    config.layers = !c.pipeline.split.empty()
                        ? std::accumulate(c.pipeline.split.begin(), c.pipeline.split.end(), 0)
                        : std::max(3, c.mesh.pp * c.pipeline.chunks);
    if (c.mesh.pp > 1 && c.pipeline.split.empty()) config.layers = 2 * c.mesh.pp * c.pipeline.chunks;
    config.block = c.model.parallel ? BlockKind::parallel : BlockKind::sequential;
    config.tie_embeddings = c.model.tied, config.local_filter = c.model.filter;
    if (c.model.llama) {
        config.norm = NormKind::rmsnorm, config.position = PositionKind::rope, config.mlp = MlpKind::swiglu;
        config.bias = false, config.qkv_bias = config.qk_norm = true;
    }
    complete(config);
    return config;
}

// ----------------------------------------------------------------------------
// the model's part of a rank

size_t round_up(size_t size, size_t to) {
    return (size + to - 1) / to * to;
}

// Elements of consecutive tensors, each beginning at a multiple of 64.
size_t laid_out(const std::vector<size_t>& tensors) {
    size_t end = 0;
    for (size_t size : tensors) end = round_up(end, 64) + size;
    return end;
}

// Sizes of one tensor rank's tensors of the embedding, a block or the head; the last norm belongs to the last
// block. `copies` are replicated: their gradients are summed over all tensor ranks.
struct UnitSizes {
    std::vector<size_t> copies, others;
    size_t parameters() const {
        size_t sum = 0;
        for (auto* tensors : {&copies, &others}) sum = std::accumulate(tensors->begin(), tensors->end(), sum);
        return sum;
    }
    // In memory: `shards` ranks have equal parts, in multiples of 8 elements.
    size_t padded(int shards) const {
        std::vector<size_t> all = copies;
        all.insert(all.end(), others.begin(), others.end());
        return round_up(laid_out(all), std::lcm<size_t>(64, 8 * shards));
    }
};

struct Sizes {
    size_t C, HS, A, KV, H, F, F1;  // per tensor rank
    size_t vocab;                   // rows of the token table: a multiple of 128
    UnitSizes embedding, block, last_block, head;
    size_t shared_heads;  // parameters of key and value heads, without their biases
    size_t shared_bias;

    Sizes(const ModelConfig& c, size_t t) {
        C = c.channels, HS = c.head_size, A = c.heads / t * HS;
        KV = std::max<size_t>(c.kv_heads, t) / t * HS;
        H = c.local_filter ? C / 2 / t : 0;
        F = c.mlp_width / t, F1 = c.mlp == MlpKind::swiglu ? 2 * F : F;
        vocab = round_up((c.vocab_size + t - 1) / t, 128);
        bool layernorm = c.norm == NormKind::layernorm;
        auto norm = [&](UnitSizes& unit) { unit.copies.insert(unit.copies.end(), layernorm ? 2 : 1, C); };
        embedding.others = {vocab * C};
        if (c.position == PositionKind::learned) embedding.copies = {c.context * C};
        norm(block);
        if (c.local_filter) block.copies.insert(block.copies.end(), 2, C);  // a bias, and a norm
        if (c.qk_norm) block.copies.insert(block.copies.end(), 2, HS);
        if (c.bias) block.copies.push_back(C);
        if (c.block == BlockKind::sequential) norm(block);
        if (c.bias) block.copies.push_back(C);
        block.others = {(A + 2 * KV) * C, A * C, F1 * C, F * C};
        if (c.bias || c.qkv_bias) block.others.push_back(A + 2 * KV);
        if (c.bias) block.others.push_back(F1);
        if (c.local_filter) block.others.insert(block.others.end(), {H, 2 * H * C, 2 * C * H});
        norm(last_block);
        if (!c.tie_embeddings) head.others = {vocab * C};
        last_block.copies.insert(last_block.copies.end(), block.copies.begin(), block.copies.end());
        last_block.others = block.others;
        shared_heads = 2 * KV * C;
        shared_bias = c.bias || c.qkv_bias ? 2 * KV : 0;
    }
};

// A rank's place, and the units that its stage holds.
struct Place {
    const Case& c;
    ModelConfig config;
    Sizes sizes;
    MeshPosition at;
    size_t t, p, S, R, v, m;
    bool first, last;                      // true for the first and the last stage
    std::vector<std::vector<int>> layers;  // layers of each chunk

    Place(const Case& c_, const ModelConfig& config_, const MeshPosition& at_)
        : c(c_), config(config_), sizes(config, c.mesh.tp), at(at_) {
        t = c.mesh.tp, p = c.mesh.pp, S = c.mesh.shard, R = c.mesh.dp / S;
        v = c.pipeline.chunks, m = c.micro_batches;
        first = at[Axis::pipeline] == 0, last = at[Axis::pipeline] + 1 == c.mesh.pp;
        layers.resize(v);
        int layer = 0;
        for (size_t part = 0; part < p * v; part++) {
            for (int i = 0; i < split()[part]; i++, layer++) {
                if ((int)(part % p) == at[Axis::pipeline]) layers[part / p].push_back(layer);
            }
        }
    }
    std::vector<int> split() const {
        return c.pipeline.split.empty() ? std::vector<int>(p * v, config.layers / (int)(p * v))
                                        : c.pipeline.split;
    }
    size_t layer_count() const {
        size_t count = 0;
        for (auto& of_chunk : layers) count += of_chunk.size();
        return count;
    }
    // Tied embeddings are on both the first and the last stage.
    bool has_table() const { return first || (last && config.tie_embeddings); }
    size_t table() const { return has_table() ? sizes.embedding.padded(c.mesh.shard) : 0; }
    const UnitSizes& block(int layer) const {
        return layer == config.layers - 1 ? sizes.last_block : sizes.block;
    }
    size_t head() const { return last ? sizes.head.padded(c.mesh.shard) : 0; }
    size_t all() const {
        size_t size = table() + head();
        for (auto& of_chunk : layers) {
            for (int layer : of_chunk) size += block(layer).padded(c.mesh.shard);
        }
        return size;
    }
    bool cut_gradients() const { return c.settings.level >= 2 && S > 1; }
    bool cut_parameters() const { return c.settings.level >= 3 && S > 1; }

    PipelineShape shape() const { return {c.pipeline.schedule, (int)p, (int)m, (int)v}; }
    Layout layout() const { return {c.mesh, c.row_chunks, shape(), split()}; }
};

// ----------------------------------------------------------------------------
// bytes

constexpr size_t e = sizeof(floatX);
constexpr int T = 8, B = 1, N = B * T, exchanged = 3;  // numbers per row of logits

// Elements that one rank of a ring of n sends in an all-reduce of `count` elements: all but one of n parts in
// each of two passes. Parts are as even as possible.
size_t all_reduced(size_t count, size_t n, size_t rank) {
    if (n == 1) return 0;
    auto part = [&](size_t i) { return count / n + (i % n < count % n); };
    return 2 * count - part(rank + 1) - part(rank + 2);
}

// All-gathers and reduce-scatters of N*C in one micro-batch: 4 of each per layer, half of that for a parallel
// block; a local filter adds one of each per pass; the embedding and the classifier have one of each. The
// outputs of norms are gathered once more, for weight gradients or recomputation.
size_t formula_activations(const Place& a) {
    bool parallel = a.c.model.parallel, filter = a.c.model.filter;
    size_t layer = (parallel ? 5 : 10) + (filter ? 5 : 0);
    // to recompute a whole block, the outputs of attention and of the filter are summed once more
    if (a.c.recompute == Recompute::block) layer += (parallel ? 0 : 1) + (filter ? 1 : 0);
    size_t passes = a.layer_count() * layer + (a.first ? 2 : 0) + (a.last ? 2 : 0);
    return a.m * passes * (a.t - 1) * (N / a.t) * a.sizes.C * e;
}

// N*C/t forward over each boundary between parts, and the same backward.
size_t formula_pipeline(const Place& a) {
    if (a.p == 1) return 0;
    size_t forward = a.v - (a.last ? 1 : 0), backward = a.v - (a.first ? 1 : 0);
    return a.m * (forward + backward) * (N / a.t) * a.sizes.C * e;
}

// In fp32. Sharded gradients are reduced for each micro-batch; those of blocks after each half of a split
// backward pass.
size_t formula_gradients(const Place& a) {
    auto unit = [&](const UnitSizes& sizes, bool is_block) {
        size_t passes = a.cut_gradients() ? a.m : 1, U = sizes.padded(a.c.mesh.shard), own = U / a.S;
        if (is_block && a.cut_gradients() && a.c.pipeline.schedule == zero_bubble) passes *= 2;
        // each rank sums its own part of the copies over tensor ranks, once per step
        size_t own_begin = a.at[Axis::shard] * own;
        auto summed = [&](size_t begin, size_t count, size_t ranks, size_t rank) {
            size_t from = std::max(begin, own_begin), to = std::min(begin + count, own_begin + own);
            return from < to ? all_reduced(to - from, ranks, rank) : 0;
        };
        size_t sums = summed(0, laid_out(sizes.copies), a.t, a.at[Axis::tensor]);
        if (size_t heads = a.config.kv_heads; is_block && heads < a.t) {
            size_t sharing = a.t / heads, rank = a.at[Axis::tensor] % sharing,
                   at = round_up(laid_out(sizes.copies), 64);
            const Sizes& z = a.sizes;
            sums += summed(at + z.A * z.C, z.shared_heads, sharing, rank);
            at += round_up((z.A + 2 * z.KV) * z.C, 64);
            sums += summed(at + z.A, z.shared_bias, sharing, rank);
        }
        return passes * (a.S - 1) * own + sums + all_reduced(own, a.R, a.at[Axis::replica]);
    };
    size_t count = 0;
    for (auto& of_chunk : a.layers) {
        for (int layer : of_chunk) count += unit(a.block(layer), true);
    }
    if (a.has_table()) count += unit(a.sizes.embedding, false);
    if (a.last) count += unit(a.sizes.head, false);
    // the first and the last stage add up the parts that they own of the tied embeddings' gradient
    if (a.p > 1 && a.config.tie_embeddings && a.has_table()) count += a.table() / a.S;
    return count * sizeof(float);
}

// Level 3: elements of the units that a stage gathers. A unit is gathered when it is used and is not in its
// slot. Blocks share a few slots in turn. The embedding and the head share one if they are on the same stage;
// a head that uses the embedding has none. The last norm belongs to the last block.
size_t gathered(const Place& a) {
    constexpr int table = -1, head = -2;
    std::map<int, size_t> place;  // each unit's slot
    for (auto& of_chunk : a.layers) {
        for (int layer : of_chunk)
            place[layer] = place.size() % std::min<size_t>(a.c.settings.prefetch + 1, a.layer_count());
    }
    place[table] = place[head] = SIZE_MAX;
    std::map<size_t, int> lies;  // the unit in each slot
    size_t elements = 0;
    auto use = [&](int unit) {
        auto [entry, is_new] = lies.insert({place[unit], unit});
        if (is_new || entry->second != unit)
            elements += unit == table  ? a.table()
                        : unit == head ? a.head()
                                       : a.block(unit).padded(a.c.mesh.shard);
        entry->second = unit;
    };
    for (auto [work, micro_batch, chunk] : pipeline_actions(a.shape(), a.at[Axis::pipeline])) {
        auto layers = a.layers[chunk];
        bool first_part = a.first && chunk == 0, last_part = a.last && chunk + 1 == (int)a.v;
        if (work == PipelineWork::forward) {
            if (first_part) use(table);
            for (int layer : layers) use(layer);
            if (last_part) use(layers.back());
        } else if (work != PipelineWork::weight_gradient) {
            if (last_part) use(a.config.tie_embeddings ? table : head);
            for (auto layer = layers.rbegin(); layer != layers.rend(); layer++) use(*layer);
        }
    }
    return elements;
}

size_t formula_parameters(const Place& a) {
    return (a.S - 1) * ((a.cut_parameters() ? gathered(a) : a.all()) / a.S) * e;
}

// The loss, the norm, and requests to stop or save; for the classifier also each tensor rank's numbers of
// each row.
size_t formula_statistics(const Place& a) {
    // loss, squared norm; ranks that ask to stop, have saved, save next; rows from hosts, and late rows
    constexpr size_t numbers = 7;
    size_t step = all_reduced(numbers, a.c.mesh.ranks(), test_world().rank());
    return (step + (a.last ? a.m * (a.t - 1) * exchanged * N : 0)) * sizeof(float);
}

// ----------------------------------------------------------------------------
// runs

MeshShape mesh_of(const Case& c) {
    MeshShape mesh = c.mesh;
    mesh.ring = c.pipeline.chunks > 1;
    mesh.copies = std::max(1, mesh.tp / config_of(c).kv_heads);
    mesh.stage_group = true;  // for Muon
    return mesh;
}

ZeroSettings settings_of(const Case& c) {
    ZeroSettings settings = c.settings;
    settings.keep_master = !exact;
    return settings;
}

Workload workload_of(const Case& c, int B, int T) {
    return {B, T, true, c.recompute, B * T / 2};
}

StepResult step_of(Gpt& g, const Case& c, int step, OptimizerKind kind = OptimizerKind::adamw) {
    int ranks = g.mesh.shape.dp, rank = g.mesh.data_rank(), count = c.micro_batches;
    std::vector<std::unique_ptr<TestBatch>> batches;
    for (int micro = 0; micro < count; micro++) {
        std::vector<int> tokens(N), targets(N);
        for (int i = 0; i < N; i++) {
            uint64_t key = random_key(7, text("step %d", step));
            Random4 random = philox(key, (micro * ranks + rank) * N + i);
            tokens[i] = random.at[0] % g.config.vocab_size;
            targets[i] = random.at[1] % g.config.vocab_size;
        }
        batches.push_back(std::make_unique<TestBatch>(B, T, tokens, targets));
    }
    double targets = (double)count * ranks * N;
    zero_gradients(g);
    accumulate_gradients(
        g, count, [&](int micro, int) { return **batches[micro]; }, (float)(1 / targets));
    g.state.update(g.stats.data, optimizer_of(kind, {1e-2, 0.9, 0.95, 1e-8, 0.1, step + 1, false}, 0), 0.5f);
    StepResult stats = read_result(g, targets);
    g.state.synchronize();
    test_world().largest(0);  // all have received what was sent to them
    return stats;
}

}  // namespace

// Bytes that this rank sends in a step for each purpose, by its ledger.
static std::map<Traffic, double> bytes_by_ledger(const Gpt& g, const Place& a) {
    Ledger book({sizeof(floatX)}, g.workload.T);
    Layout layout = a.layout();
    layout.mesh = g.mesh.shape;
    record_steps(g.config, g.workload, g.state.settings(), make_optimizer(Options(), 0), layout,
                 g.mesh.position, {layout.pipeline.micro_batches});
    std::map<Traffic, double> bytes;
    int steps = 0;
    book.each([&](const LedgerEntry& entry) {
        steps += entry.kind == LedgerEntry::step;
        if (steps == 1 && entry.kind == LedgerEntry::call)
            bytes[(Traffic)entry.call_of.purpose] += bytes_of_rank(entry.call_of);
    });
    return bytes;
}

static std::map<std::string, size_t> class_bytes(const std::vector<MemoryClass>& classes) {
    std::map<std::string, size_t> bytes;
    for (const MemoryClass& one : classes) bytes[one.name] += one.bytes;
    return bytes;
}

TEST_CASE("bytes sent in a step are those of the formulas and of the ledger, as are those that are taken") {
    for (const Case& c : cases) {
        if (!runs(c)) continue;
        CAPTURE(std::string(c.name));
        ModelConfig config = config_of(c);
        Mesh mesh(test_world(), mesh_of(c), test_stream());
        Place a(c, config, mesh.position);
        Gpt g(config, workload_of(c, B, T), settings_of(c), mesh, a.layout());
        initialize(g.state, 5);
        {
            Ledger book({sizeof(floatX)}, T);
            Mesh there(g.mesh.shape, g.mesh.position);
            Gpt imagined(config, g.workload, g.state.settings(), there, a.layout());
            CHECK(class_bytes(imagined.memory.classes()) == class_bytes(g.memory.classes()));
        }
        CHECK(step_of(g, c, 0).finite);  // all later steps begin like the next one
        reset_traffic();
        [[maybe_unused]] uint64_t before = 0;
#ifndef RANKS_USE_NCCL
        before = host_link.bytes_sent;
#endif
        test_world().largest(0);
        CHECK(step_of(g, c, 1).finite);
        CHECK(bytes_sent(Traffic::activations) == formula_activations(a));
        std::map<Traffic, double> by_ledger = bytes_by_ledger(g, a);
        for (Traffic purpose : {Traffic::activations, Traffic::pipeline, Traffic::parameters})
            CHECK((double)bytes_sent(purpose) == by_ledger[purpose]);
        // approximate, because the chunks of an all-reduce differ in size between ranks
        CHECK((double)bytes_sent(Traffic::gradients) ==
              doctest::Approx(by_ledger[Traffic::gradients]).epsilon(1e-3));
        CHECK(bytes_sent(Traffic::pipeline) == formula_pipeline(a));
        CHECK(bytes_sent(Traffic::gradients) == formula_gradients(a));
        CHECK(bytes_sent(Traffic::parameters) == formula_parameters(a));
        CHECK(bytes_sent(Traffic::statistics) == formula_statistics(a));
        CHECK(bytes_sent(Traffic::weights) == 0);
#ifndef RANKS_USE_NCCL
        uint64_t counted = 0;
        for (size_t kind = 0; kind < traffic_names.size(); kind++) counted += bytes_sent((Traffic)kind);
        CHECK(host_link.bytes_sent - before == counted);
#endif
    }
}

// ----------------------------------------------------------------------------
// memory

namespace {

// Memory of parameters, gradients and the optimizer: parameters in floatX, gradients in fp32, and two moments
// and a master copy (fp32 parameters are their own).
double formula_state(const Place& a) {
    double block = (double)a.sizes.block.parameters(), layers = (double)a.layer_count(), S = (double)a.S;
    double table = a.has_table() ? (double)a.sizes.embedding.parameters() : 0;
    double head = a.last ? (double)a.sizes.head.parameters() : 0, all = table + layers * block + head;
    double ends = std::max(table, head);
    auto held = [&](bool cut, double units) {
        return cut ? all / S + std::min(units, layers) * block + ends : all;
    };
    return e * held(a.cut_parameters(), a.c.settings.prefetch + 1) + 4 * held(a.cut_gradients(), 2) +
           (exact ? 8 : 12) * all / S;
}

// Micro-batches that a stage holds between forward and backward pass; for an interleaved schedule, summed
// over its chunks.
size_t held_micro_batches(const Place& a) {
    size_t behind = a.p - 1 - a.at[Axis::pipeline];
    switch (a.c.pipeline.schedule) {
    case gpipe:
        return a.m;
    case interleaved:  // on the first stage, p * (1 + (p - 1)/(p * v)) for all its layers
        return std::min(a.v * a.m, (a.v - 1) * a.p + 2 * behind + 1);
    case zero_bubble:
        return std::min(a.p, a.m);
    default:
        return std::min(behind + 1, a.m);
    }
}

// Everything is divided by t: rows between products (n = N/t of them), and heads and columns within attention
// and the MLP. Inputs of products that read the residual stream are whole while the products run.
double formula_activations_held(const Place& a, int B, int T) {
    auto& z = a.sizes;
    auto& config = a.config;
    bool parallel = a.c.model.parallel, cut = a.t > 1, splits = a.c.pipeline.schedule == zero_bubble;
    double N = B * T, n = N / (double)a.t, C = (double)z.C, QKV = (double)(z.A + 2 * z.KV), A = (double)z.A;
    double H = (double)z.H, F = (double)z.F, F1 = (double)z.F1, heads = A / (double)z.HS,
           kv_heads = (double)(z.KV / z.HS);
    double norm = n * (config.norm == NormKind::layernorm ? 8 : 4);  // bytes of a norm's row statistics
    double layers = (double)a.layer_count(), slots = (double)held_micro_batches(a);
    double passes = layers * slots / (double)a.v;  // a layer's passes over micro-batches that are held
    double inner = (layers / (double)a.v - 1) * slots;
    // (layer, micro-batch) pairs with pending weight gradients, and one more that the forward pass writes to
    double pending = splits ? layers * (double)std::min<size_t>(a.at[Axis::pipeline] + 1, a.m) + 1 : 1;
    // bytes kept: attention unless blocks are recomputed, hidden unless the MLP is, elementwise if nothing is
    bool remakes_act =
        config.mlp != MlpKind::gelu || e == 4 || (size_t)F % 8 != 0 || !config.bias;  // otherwise it is fused
    double residual = e * n * C, attention = e * N * QKV + 4 * N * heads, attention_inputs = e * N * A;
    double hidden = e * N * F1, hidden_inputs = remakes_act ? 0 : e * N * F;
    double elementwise = norm * (parallel ? 1 : 2);
    double elementwise_inputs = e * N * (remakes_act ? F : 0);
    if (config.qk_norm) elementwise += e * N * QKV, attention += 4 * N * (heads + kv_heads);
    if (!parallel) attention += e * n * C;
    if (config.local_filter) {
        attention += e * n * C, attention_inputs += e * N * H;
        elementwise += 4 * n;
    }
    double bytes = inner * residual;
    auto add = [&](bool kept, double own, double inputs) {
        bytes += (kept ? passes : 1) * own + (kept ? passes : pending) * inputs;
    };
    add(a.c.recompute < Recompute::block, attention, attention_inputs);
    add(a.c.recompute < Recompute::mlp, hidden, hidden_inputs);
    add(a.c.recompute == Recompute::none, elementwise, elementwise_inputs);
    // outputs of a norm: own rows, unless all rows were gathered for a product that is recomputed
    auto add_norm = [&](bool gathered_before, bool has_room = true) {
        add(a.c.recompute == Recompute::none, 0, cut && gathered_before ? 0 : e * n * C);
        if (cut && gathered_before) bytes += e * n * C + pending * e * N * C;
        if (cut && !gathered_before && has_room) bytes += e * N * C;
    };
    add_norm(a.c.recompute == Recompute::block || (parallel && a.c.recompute == Recompute::mlp));
    if (!parallel) add_norm(a.c.recompute >= Recompute::mlp, false);  // both use the first norm's buffer
    if (config.local_filter) add_norm(a.c.recompute == Recompute::block);
    if (a.last) {
        double kept = splits || a.c.pipeline.schedule == gpipe ? slots : 1;
        bytes += kept * (e * 2 * n * C + norm) + e * (N / 2) * (double)z.vocab + 4 * N;
        if (cut) bytes += 4 * (double)a.t * (N / 2) * exchanged;
    }
    // once per stage: the output that a block adds to the residual stream, and gradients
    double dact = config.mlp == MlpKind::swiglu ? F : 0;
    bytes += 2 * residual + e * N * (dact + A) + pending * e * N * (F1 + QKV);
    if (cut) bytes += e * N * C;
    if (config.local_filter) {
        bytes += e * N * (2 * C + H + 2 * QKV) + residual + (cut ? e * N * C : 0);
        bytes += pending * e * N * (2 * C + 2 * H);
    }
    if (cut || splits) bytes += pending * e * N * C;
    if (splits && !parallel) bytes += pending * e * N * C;
    size_t scratch =
        std::max({attention_backward_scratch(self_attention_shape(B, T, (int)heads, (int)kv_heads,
                                                                  config.head_size, config.window, nullptr),
                                             config.bias && config.position == PositionKind::learned),
                  norm_backward_scratch((int)z.C), matmul_backward_bias_scratch((int)std::max(F1, QKV)),
                  embedding_backward_scratch(B * T, (int)z.C)});
    bytes += 4 * (double)scratch;
    if (config.bias) bytes += 4 * C;  // column sums of the residual stream's gradient
    if (config.position == PositionKind::rope) bytes += 4.0 * T * config.rope_dims;
    // the pipeline: inputs, plus one for each chunk that receives some; gradients; outputs. The chunks of a
    // stage have separate input buffers, and do not all reach their maximum at the same time.
    double apart = a.m > a.p ? (double)a.v - 1 : 0;
    double buffers = slots + apart + (double)a.v - (a.first ? 1 : 0) + (a.p > 1 ? 3 : 1);
    if (a.p > 1 && (!a.last || a.v > 1)) buffers += 2;
    return bytes + buffers * residual;
}

#ifndef __CUDACC__
std::atomic<size_t> taken;
#endif

// Counts the device bytes that are allocated during its life.
class TakenMemory {
public:
#ifdef __CUDACC__
    bool known() const {
        return false;
    }
    size_t bytes() const {
        return 0;
    }
#else
    TakenMemory() {
        taken = 0;
        allocate_ = host_device.allocate;
        host_device.allocate = [](size_t bytes) {
            taken += bytes;
            return allocate_(bytes);
        };
    }
    ~TakenMemory() {
        host_device.allocate = allocate_;
    }
    bool known() const {
        return true;
    }
    size_t bytes() const {
        return taken;
    }

private:
    static inline void* (*allocate_)(size_t);
#endif
};

// The planner's bytes for the same layout, from options only.
size_t planned_bytes(const Place& a, const Workload& w) {
    const Case& c = a.c;
    Options o;
    static_cast<ModelConfig&>(o) = a.config;
    o.sequence_length = w.T, o.micro_batch = w.B, o.loss_chunk = w.loss_chunk;
    o.global_batch = (long long)w.T * w.B * c.micro_batches * c.mesh.dp;
    o.prefetch = c.settings.prefetch, o.overlap = c.settings.overlap.data, o.async_save = false;
    o.pp_layers = "";
    for (int layers : a.split()) o.pp_layers += (o.pp_layers.empty() ? "" : ",") + std::to_string(layers);
    PlanTask task = {.options = o, .machine = find_machine("cpu"), .devices = c.mesh.ranks()};
    Planner planner(task);
    o.tp = c.mesh.tp, o.pp = c.mesh.pp, o.dp = c.mesh.dp, o.shard_group = c.mesh.shard;
    o.pp_schedule = c.pipeline.schedule, o.pp_chunks = c.pipeline.chunks, o.tp_overlap = c.row_chunks;
    o.zero = c.settings.level, o.recompute = c.recompute;
    return planner.total(planner.planned(o).memory);
}

}  // namespace

TEST_CASE("memory held is what the formulas say, and what is printed before") {
    constexpr int large_B = 4, large_T = 128;
    for (const Case& c : cases) {
        if (!runs(c)) continue;
        CAPTURE(std::string(c.name));
        ModelConfig config = config_of(c, true);
        Mesh mesh(test_world(), mesh_of(c), test_stream());
        Place a(c, config, mesh.position);
        Workload workload = workload_of(c, large_B, large_T);
        ZeroSettings settings = settings_of(c);
        TakenMemory memory;
        Gpt g(config, workload, settings, mesh, a.layout());
        size_t held = g.memory.bytes(), activations = bytes_of(g.memory, "activations");
        constexpr size_t stats = 2 * sizeof(StepStatistics);  // on the device, and the host's copy
        if (memory.known()) CHECK(memory.bytes() == held + stats);
        CHECK((double)(held - activations) == doctest::Approx(formula_state(a)).epsilon(0.02));
        double formula = formula_activations_held(a, large_B, large_T);
        CHECK((double)activations == doctest::Approx(formula).epsilon(0.02));

        size_t most = 0;
        for (const std::string& of_rank : test_world().all_gather(std::to_string(held)))
            most = std::max<size_t>(most, std::stoull(of_rank));
        CHECK(memory_total(memory_classes(config, workload, settings, a.layout())) == most);
        if (exact) CHECK((double)planned_bytes(a, workload) == doctest::Approx((double)most).epsilon(0.02));
    }
}

TEST_CASE("chunks share the memory of their layers, and no two layers have the same at the same time") {
    using enum PipelineWork;
    const std::vector<int> layers[] = {{2}, {1}, {2, 2}, {1, 3}, {3, 0, 2}};
    for (auto schedule : {gpipe, one_f_one_b, interleaved, zero_bubble}) {
        for (int p : {1, 2, 3, 4}) {
            for (auto& of_chunk : layers) {
                PipelineShape shape = {schedule, p, 4 * p, (int)of_chunk.size()};
                if (shape.chunks > 1 && schedule != interleaved) continue;
                for (int stage = 0; stage < p; stage++) {
                    CAPTURE(text("schedule %d, stage %d of %d, %d chunks", (int)schedule, stage, p,
                                 shape.chunks));
                    auto list = pipeline_actions(shape, stage);
                    ActivationSlots held(of_chunk);
                    held.begin_run(true);
                    std::map<std::pair<int, int>, std::vector<int>>
                        places;  // for each micro-batch in a chunk
                    size_t most = 0;
                    for (const PipelineAction& action : list) {
                        auto& mine = places[{action.chunk, action.micro_batch}];
                        std::vector<int> now = held.enter(action);
                        CHECK((int)now.size() == of_chunk[action.chunk]);
                        if (action.work == forward) mine = now;
                        CHECK(mine == now);
                        std::vector<int> in_use;
                        for (auto& [key, used] : places)
                            in_use.insert(in_use.end(), used.begin(), used.end());
                        most = std::max(most, in_use.size());
                        std::sort(in_use.begin(), in_use.end());
                        CHECK(std::adjacent_find(in_use.begin(), in_use.end()) == in_use.end());
                        if (action.work == backward || action.work == weight_gradient) mine.clear();
                    }
                    CHECK(ActivationSlots::most(of_chunk, list, true) == most);
                }
            }
        }
    }
    // without a backward pass each layer has a slot of its own
    ActivationSlots held({2, 1});
    held.begin_run(false);
    for (int micro_batch : {0, 1}) {
        CHECK(held.enter({forward, micro_batch, 0}) == std::vector<int>{0, 1});
        CHECK(held.enter({forward, micro_batch, 1}) == std::vector<int>{2});
    }
    CHECK(ActivationSlots::most({2, 1}, forward_actions({interleaved, 2, 4, 2}), false) == 3);
}

// ----------------------------------------------------------------------------
// bits

namespace {

// The bits of all parameters as this rank sees them.
std::string parameter_bits(Gpt& g) {
    std::string bits;
    for (int unit : g.layout.held()) {
        g.state.acquire(unit, 0);
        g.state.synchronize();
        auto values = from_device(g.state.params(unit), g.layout.unit_size(unit));
        g.state.release(unit);
        bits.append((const char*)values.data(), values.size() * sizeof values[0]);
    }
    return bits;
}

// The statistics of two steps and all parameters after them, as bits.
std::string trained(const Case& c, const Mesh& mesh, bool overlap) {
    ModelConfig config = config_of(c);
    ZeroSettings settings = settings_of(c);
    settings.overlap = overlap;
    Gpt g(config, workload_of(c, B, T), settings, mesh, Place(c, config, mesh.position).layout());
    initialize(g.state, 5);
    std::string bits;
    for (int step = 0; step < 2; step++) {
        StepResult stats = step_of(g, c, step);
        CHECK(stats.finite);
        CHECK(stats.loss > 0);
        for (float value : {stats.loss, stats.gradient_norm}) bits.append((const char*)&value, sizeof value);
    }
    return bits + parameter_bits(g);
}

}  // namespace

TEST_CASE("overlap, and another run of the same layout, do not change a bit") {
    for (const Case& c : cases) {
        if (!runs(c) || !c.among_few) continue;
        CAPTURE(std::string(c.name));
        Mesh mesh(test_world(), mesh_of(c), test_stream());
        std::string want = trained(c, mesh, false);
        CHECK((trained(c, mesh, true) == want));
        if (on_cpu) CHECK((trained(c, mesh, true) == want));
    }
}

// ----------------------------------------------------------------------------
// any number of data ranks

namespace {

// Batches whose tokens depend only on the sample numbers.
class RandomBatches final : public BatchSource {
public:
    RandomBatches(int vocab, int& reads) : BatchSource({B, T, -1, false}, 1), vocab_(vocab), reads_(reads) {}

protected:
    const int* block(int number) const override { return blocks_[number].data(); }
    void start(int block, BatchRequest request) override {
        reads_++;
        write_batch(shape_, request, blocks_[block].data(), [&](int row, int* tokens, int* targets) {
            for (int t = 0; t < T; t++) {
                Random4 random = philox(random_key(7, "samples"), (request.first + row) * T + t);
                tokens[t] = random.at[0] % vocab_;
                targets[t] = random.at[1] % vocab_;
            }
        });
    }
    void finish() override {}

private:
    int vocab_;
    int& reads_;  // batches that were read
    std::vector<int> blocks_[2] = {std::vector<int>(batch_ints(B, T)), std::vector<int>(batch_ints(B, T))};
};

}  // namespace

TEST_CASE("the host's memory for batches is what is planned for them") {
    Mesh alone;
    TakenMemory memory;
    if (!memory.known()) SKIP("what is taken of a card is not known here");
    NotedError error;
    int reads = 0;
    constexpr size_t slots = 3, batch = 6 * sizeof(int) * N;
    DeviceBatches batches(std::make_unique<RandomBatches>(50, reads), test_stream(), alone, error,
                          (int)slots);
    constexpr size_t read_into = 2 * batch;  // the source reads into its own memory
    CHECK(DeviceBatches::host_bytes(B, T) == memory.bytes() - slots * batch + read_into);
}

namespace {

// The losses and gradient norms of a few steps of `micro_batches` micro-batches over all data ranks, and the
// final loss of a few samples.
std::vector<float> course_of(Gpt& g, int micro_batches) {
    constexpr int steps = 3, samples = 5;
    NotedError error;
    int reads = 0;
    DeviceBatches batches(std::make_unique<RandomBatches>(g.config.vocab_size, reads), g.stream, g.mesh,
                          error, g.stage.capacity.micro_batches);
    initialize(g.state, 5);
    std::vector<float> course;
    for (int step = 0; step < steps; step++) {
        step_gradients(g, batches, (uint64_t)step * micro_batches * B, micro_batches);
        g.state.update(g.stats.data, adamw_optimizer({1e-2, 0.9, 0.95, 1e-8, 0.1, step + 1, false}, 0), 0.5f);
        StepResult result = read_result(g, (double)micro_batches * B * T);
        CHECK(result.finite);
        course.insert(course.end(), {result.loss, result.gradient_norm});
    }
    int own = micro_batches / g.mesh.shape.dp + (g.mesh.data_rank() < micro_batches % g.mesh.shape.dp);
    CHECK(reads == steps * own + 1);  // each once, and one ahead, because the next request was known
    course.push_back(GptPasses(g).mean_loss(batches, samples, error));
    CHECK(error.empty());
    return course;
}

}  // namespace

TEST_CASE("any number of data ranks trains the same batch, also where it does not divide evenly") {
    const struct {
        MeshShape mesh;
        int micro_batches;
    } splits[] = {{{.pp = 2}, 5},
                  {{.dp = 4, .shard = 2}, 5},
                  {{.dp = 4, .shard = 2}, 7},
                  {{.pp = 2, .dp = 3, .shard = 3}, 8}};
    for (auto& split : splits) {
        if (split.mesh.ranks() != test_world().size()) continue;
        for (auto schedule : {one_f_one_b, interleaved, zero_bubble}) {
            if (schedule != one_f_one_b && split.mesh.pp == 1) continue;
            Case c = {"", split.mesh, ceil_div(split.micro_batches, split.mesh.dp)};
            c.pipeline.schedule = schedule;
            c.pipeline.chunks = schedule == interleaved && split.mesh.pp > 1 ? 2 : 1;
            ModelConfig config = config_of(c);
            Gpt alone(config, workload_of(c, B, T), with_master);
            std::vector<float> want = course_of(alone, split.micro_batches);
            for (int level = 0; level <= (split.mesh.dp > 1 ? 3 : 0); level++) {
                CAPTURE(text("%d stages, %d replicas, %s, ZeRO %d, %d micro-batches", split.mesh.pp,
                             split.mesh.dp, name_of(schedule), level, split.micro_batches));
                c.settings.level = level;
                c.mesh.shard = level == 0 ? 1 : split.mesh.shard;
                Mesh mesh(test_world(), mesh_of(c), test_stream());
                Gpt g(config, workload_of(c, B, T), settings_of(c), mesh,
                      Place(c, config, mesh.position).layout());
                std::vector<float> course = course_of(g, split.micro_batches);
                for (size_t i = 0; i < want.size(); i++)
                    CHECK(course[i] == doctest::Approx(want[i]).epsilon(exact ? 1e-5 : 2e-2));
            }
        }
    }
}

namespace {

// How data ranks get the micro-batches of a step: dealt by the run; by hand; or by hand with an empty one
// added, as on ranks that have one fewer than others.
enum class Dealt { by_run, by_hand, with_an_empty_one };

// The statistics of two steps of `own` micro-batches per data rank, and the final parameters.
std::string bits_of_even_steps(Gpt& g, int own, Dealt dealt) {
    NotedError error;
    int reads = 0, ranks = g.mesh.shape.dp, all = own * ranks;
    DeviceBatches batches(std::make_unique<RandomBatches>(g.config.vocab_size, reads), g.stream, g.mesh,
                          error, g.stage.capacity.micro_batches);
    initialize(g.state, 5);
    std::string bits;
    for (int step = 0; step < 2; step++) {
        std::vector<std::unique_ptr<TestBatch>> made;
        for (int micro = 0; micro < own + (dealt == Dealt::with_an_empty_one); micro++) {
            std::vector<int> tokens(N, 0), targets(N, -1);
            int sample = step * all + micro * ranks + g.mesh.data_rank();
            for (int t = 0; t < T && micro < own; t++) {
                Random4 random = philox(random_key(7, "samples"), sample * T + t);
                tokens[t] = random.at[0] % g.config.vocab_size,
                targets[t] = random.at[1] % g.config.vocab_size;
            }
            made.push_back(std::make_unique<TestBatch>(B, T, tokens, targets));
        }
        if (dealt == Dealt::by_run) {
            step_gradients(g, batches, (uint64_t)(step * all), all);
        } else {
            zero_gradients(g);
            accumulate_gradients(
                g, (int)made.size(), [&](int micro, int) { return **made[micro]; }, 1.0f / (float)(all * T));
        }
        g.state.update(g.stats.data, adamw_optimizer({1e-2, 0.9, 0.95, 1e-8, 0.1, step + 1, false}, 0), 0.5f);
        StepResult result = read_result(g, all * T);
        CHECK(result.finite);
        for (float value : {result.loss, result.gradient_norm})
            bits.append((const char*)&value, sizeof value);
    }
    return bits + parameter_bits(g);
}

}  // namespace

TEST_CASE("an even split trains to the bits of one by hand, also with empty micro-batches behind it") {
    const MeshShape meshes[] = {{.dp = 2, .shard = 2}, {.dp = 4, .shard = 2}, {.pp = 2, .dp = 3, .shard = 3}};
    constexpr int own = 3;
    for (const MeshShape& shape : meshes) {
        if (shape.ranks() != test_world().size()) continue;
        for (auto schedule : {one_f_one_b, interleaved, zero_bubble}) {
            if (schedule != one_f_one_b && shape.pp == 1) continue;
            for (int level = 0; level <= 3; level++) {
                CAPTURE(text("%d stages, %d replicas, %s, ZeRO %d", shape.pp, shape.dp, name_of(schedule),
                             level));
                Case c = {"", shape, own + 1};
                c.pipeline.schedule = schedule;
                c.pipeline.chunks = schedule == interleaved ? 2 : 1;
                c.settings.level = level;
                if (level == 0) c.mesh.shard = 1;
                ModelConfig config = config_of(c);
                Mesh mesh(test_world(), mesh_of(c), test_stream());
                auto bits = [&](Dealt dealt) {
                    Gpt g(config, workload_of(c, B, T), settings_of(c), mesh,
                          Place(c, config, mesh.position).layout());
                    return bits_of_even_steps(g, own, dealt);
                };
                std::string want = bits(Dealt::by_hand);
                CHECK((bits(Dealt::by_run) == want));
                CHECK((bits(Dealt::with_an_empty_one) == want));
            }
        }
    }
}

// ----------------------------------------------------------------------------
// norms, and copies of tensors

namespace {

// The bits of each tensor part. Its name and place in the tensor are the key, which only ranks with a copy of
// the part share.
std::map<std::string, std::string> bits_of_tensors(Gpt& g) {
    std::map<std::string, std::string> bits;
    for (int unit : g.layout.held()) {
        g.state.acquire(unit, 0);
        g.state.synchronize();
        auto values = from_device(g.state.params(unit), g.layout.unit_size(unit));
        g.state.release(unit);
        for (const TensorPart& part : g.layout.parts(unit, 0, values.size())) {
            std::string name = text("%s %zu %zu", part.name.c_str(), (size_t)part.column, (size_t)part.begin);
            bits[name].assign((const char*)&values[part.at], part.count * sizeof values[0]);
        }
    }
    return bits;
}

// Muon: the owner of a matrix has 1/t of it, receives the rest from its replica, and sends every other rank
// that rank's 1/t of the transformed matrix. Empty if ranks of a shard group have different parts, or if
// heads are copied to several tensor ranks.
std::optional<size_t> formula_updates(const Place& a) {
    if (a.S > 1 || (size_t)a.config.kv_heads < a.t) return {};
    ModelConfig c = a.config;
    size_t C = c.channels, A = (size_t)c.heads * c.head_size, KV = (size_t)c.kv_heads * c.head_size,
           F = c.mlp_width, hidden = c.mlp == MlpKind::swiglu ? 3 * F : 2 * F,
           filter = c.local_filter ? C + C : 0,  // two taps, C/2 x C and C x C/2
        elements = c.layers * C * (2 * A + 2 * KV + hidden + filter);
    return e * elements / a.t * ((a.t - 1) + (a.t * a.R - 1));
}

}  // namespace

TEST_CASE("LAMB's norms are those of one rank, and copies of tensors stay equal to the bit") {
    for (const Case& c : cases) {
        if (!runs(c)) continue;
        for (OptimizerKind kind : {OptimizerKind::lamb, OptimizerKind::muon}) {
            CAPTURE(std::string(c.name));
            CAPTURE(name_of(kind));
            ModelConfig config = config_of(c);
            Mesh mesh(test_world(), mesh_of(c), test_stream());
            Place place(c, config, mesh.position);
            Gpt g(config, workload_of(c, B, T), for_optimizer(kind, settings_of(c)), mesh, place.layout());
            initialize(g.state, 5);
            reset_traffic();
            test_world().largest(0);
            CHECK(step_of(g, c, 0, kind).finite);
            if (auto updates = formula_updates(place); updates && kind == OptimizerKind::muon) {
                size_t sent = 0;
                for (auto& of_rank : test_world().all_gather(std::to_string(bytes_sent(Traffic::updates))))
                    sent += std::stoull(of_rank);
                CHECK(sent == *updates);
            }
            std::map<std::string, std::string> bits = bits_of_tensors(g);
            std::string mine;
            for (auto& [name, values] : bits)
                mine += text("%s: %016llx\n", name.c_str(), (unsigned long long)name_hash(values));
            std::map<std::string, std::string> all;
            for (const std::string& theirs : test_world().all_gather(mine)) {
                std::istringstream lines(theirs);
                for (std::string line; std::getline(lines, line);) {
                    size_t colon = line.rfind(':');
                    auto known = all.emplace(line.substr(0, colon), line.substr(colon)).first;
                    CHECK(known->second == line.substr(colon));
                }
            }
            if (kind != OptimizerKind::lamb) continue;
            auto norms = trust_ratios(g.state);
            Case alone_case = c;
            alone_case.micro_batches = c.micro_batches * mesh.shape.dp;
            Gpt alone(config, workload_of(c, B, T), for_optimizer(kind, with_master));
            initialize(alone.state, 5);
            CHECK(step_of(alone, alone_case, 0, kind).finite);
            auto want = trust_ratios(alone.state);
            REQUIRE(norms.size() == want.size());
            for (size_t i = 0; i < want.size(); i++) {
                CAPTURE(want[i].first);
                CHECK(norms[i].first == want[i].first);
                CHECK(norms[i].second == doctest::Approx(want[i].second).epsilon(exact ? 1e-6 : 2e-2));
            }
        }
    }
}
