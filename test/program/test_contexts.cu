/*
Context ranks against one process: losses, and the gradients of all tensors, on every kind of layout and of
model, packed documents included. Known mistakes of other implementations are planted, to show that these
comparisons find them: mistakes in the data here, mistakes in the program by test/scripts/check_mutations.sh.
*/
// devices: cpu
// ranks: 2 4 8
// seconds: 10
#include <chrono>
#include <set>
#include <thread>

#include "test/program/collected.h"
#include "test/support/head_parts.h"

namespace {

enum class Planted {
    nothing,
    own_piece_only,     // a rank attends to its own piece, as if no group had been made
    documents_ignored,  // document boundaries are lost between ranks
    shifted_after,      // labels are shifted after the cut, so that the last token of a piece has none
    scaled_by_ranks,    // the loss is divided by the targets of one rank
    positions_restart   // positions count from the beginning of a piece
};

struct Case {
    const char* name;
    MeshShape mesh;
    const char* model = "";  // its switches, as words
    ZeroSettings settings = {};
    PipelineShape pipeline = {};  // its micro-batches are those of a step
    Recompute recompute = Recompute::none;
};

using enum PipelineSchedule;
constexpr auto block = Recompute::block, elementwise = Recompute::elementwise;

const Case cases[] = {
    {"plain", {.cp = 2}},
    {"documents, no overlap", {.cp = 2}, "documents", {.overlap = false}},
    {"all forward before any backward", {.cp = 2}, "documents rope", {}, {gpipe, 1, 3}},
    {"windows, shared heads", {.cp = 2}, "documents rope qk window shared", {.level = 2}, {gpipe, 1, 2}},
    {"local filter", {.cp = 2}, "documents rope filter", {.level = 3}, {gpipe, 1, 2}, block},
    {"parallel block", {.cp = 2}, "parallel bias", {.level = 1}, {}, elementwise},
    {"tables", {.cp = 2}, "documents tables rope"},
    {"4 ranks", {.cp = 4}, "documents rope window", {.level = 3}},
    {"4 ranks, pairs of heads", {.cp = 4}, "documents rope pairs"},
    {"4 ranks, local filter", {.cp = 4}, "documents filter"},
    {"tensor ranks", {.tp = 2, .cp = 2}, "documents rope qk shared", {}, {gpipe, 1, 2}, block},
    {"tensor ranks, local filter", {.tp = 2, .cp = 2}, "documents filter bias", {.level = 1}},
    {"stages", {.cp = 2, .pp = 2}, "documents tables", {.level = 1}, {zero_bubble, 2, 3}},
    {"stages, local filter", {.cp = 2, .pp = 2}, "documents filter rope", {.level = 2}, {one_f_one_b, 2, 3}},
    {"data ranks", {.cp = 2, .dp = 2, .shard = 2}, "documents", {.level = 3}, {gpipe, 1, 2}},
    {"replicas", {.cp = 2, .dp = 2, .shard = 1}, "rope documents", {.level = 1}},
    {"4 ranks, narrow windows", {.cp = 4}, "documents rope narrow", {.level = 1}, {gpipe, 1, 2}, block},
    {"tensor ranks, narrow windows", {.tp = 2, .cp = 4}, "rope narrow qk", {.overlap = false}},
    {"8 ranks, narrow windows", {.cp = 8}, "narrow filter"},
    {"8 ranks", {.cp = 8}, "documents rope filter", {.level = 2}},
    {"every axis",
     {.tp = 2, .cp = 2, .pp = 2},
     "documents rope tables",
     {.level = 3},
     {zero_bubble, 2, 3},
     block},
    {"tensor ranks of 4 contexts", {.tp = 2, .cp = 4}, "documents rope window shared", {.level = 2}},
};

constexpr int B = 2, T = 32, V = 53, document_end = 7;

bool has(const Case& c, const char* word) {
    return (" " + std::string(c.model) + " ").find(text(" %s ", word)) != std::string::npos;
}

ModelConfig config_of(const Case& c) {
    ModelConfig config;
    config.layers = 4, config.channels = 32, config.heads = 4,
    config.kv_heads = has(c, "shared")  ? 1
                      : has(c, "pairs") ? 2
                                        : 4;
    config.mlp_width = 48, config.vocab_size = V, config.context = T;
    config.bias = has(c, "bias"), config.qk_norm = has(c, "qk"), config.local_filter = has(c, "filter");
    config.block = has(c, "parallel") ? BlockKind::parallel : BlockKind::sequential;
    if (has(c, "rope")) config.position = PositionKind::rope;
    if (has(c, "window")) config.window = 11;
    if (has(c, "narrow")) config.window = 4, config.window_pattern = "1:1";
    if (has(c, "tables"))
        config.ngram = "2,3", config.ngram_rows = 200, config.ngram_width = 8, config.ngram_heads = 2;
    complete(config);
    return config;
}

// One micro-batch of a rank, and its rows for tables.
struct PackedBatch {
    BatchShape shape;
    std::vector<int> numbers;
    Buffer<int> memory;
    Batch batch;

    PackedBatch(const Case& c, const Mesh& mesh, int sample, Planted planted)
        : shape{B,
                T,
                has(c, "documents") ? document_end : -1,
                false,
                mesh.shape.cp,
                mesh.position[Axis::context]},
          numbers(shape.ints()),
          memory(numbers.size()) {
        write_batch(shape, {0, B, shape.context}, numbers.data(), [&](int row, int* tokens, int* targets) {
            for (int t = 0; t <= T; t++) {
                int token =
                    (int)(philox(random_key(7, "tokens"), (uint64_t)((sample * B + row) * (T + 1) + t))
                              .at[0] %
                          V);
                if (token % 6 == 0) token = document_end;
                if (t < T) tokens[t] = token;
                if (t > 0) targets[t - 1] = token;
            }
        });
        plant(planted);
        copy_to_device<int>(memory, numbers.data(), numbers.size(), test_stream());
        batch = batch_on_device(memory, host(), B, T, shape.contexts);
    }
    HostBatch host() const { return host_batch(numbers.data(), shape); }

    void plant(Planted planted) {
        const ContextCut cut = shape.cut(shape.context);
        BatchArrays<int> arrays = batch_at(numbers.data(), B, T, shape.contexts);
        for (int row = 0; row < B && cut.ranks > 1; row++) {
            for (int t = 0; t < cut.own(); t++) {
                int at = cut.position(t), begin = at / cut.piece() * cut.piece(), own = row * cut.own() + t;
                int& start = arrays.doc_start[row * T + at];
                if (planted == Planted::own_piece_only) start = std::max(start, begin);
                if (planted == Planted::documents_ignored && start > begin - cut.piece()) start = 0;
                if (planted == Planted::shifted_after && at == begin + cut.piece() - 1)
                    arrays.targets[own] = -1;
                if (planted == Planted::positions_restart) arrays.positions[own] = at - begin;
            }
        }
    }
};

struct Result {
    double loss, norm;
    std::map<std::string, std::string> gradients;

    // The largest difference of a gradient, relative to the largest element of its tensor.
    double difference(const Result& other) const {
        double most = 0;
        for (auto& [name, bytes] : gradients) {
            auto *a = (const float*)bytes.data(), *b = (const float*)other.gradients.at(name).data();
            double largest = 0, apart = 0;
            for (size_t i = 0; i < bytes.size() / sizeof(float); i++) {
                largest = std::max(largest, (double)std::abs(b[i]));
                apart = std::max(apart, (double)std::abs(a[i] - b[i]));
            }
            // Key biases cancel in the softmax: their gradients are only rounding errors.
            if (largest > 1e-6) most = std::max(most, apart / largest);
        }
        return most;
    }
};

// Bytes that a context rank of a case without tensor ranks sends in a step: for each layer and micro-batch,
// keys and values forward and backward, their gradients in fp32, and rows next to pieces for convolutions.
size_t formula_bytes(const Case& c, const ModelConfig& config, int rank) {
    const size_t others = (size_t)c.mesh.cp - 1, N = (size_t)B * T / c.mesh.cp, e = sizeof(floatX),
                 width = 2 * (size_t)config.kv_heads * config.head_size, C = config.channels,
                 ends = config.local_filter ? 2 * (size_t)B * (C / 2 + C) * e : 0;
    const size_t passes = c.recompute == Recompute::block ? 3 : 2;  // each gathers keys
    // rows of keys that the rank sends, and rows of gradients
    auto rows = [&](bool sliding) {
        std::pair all = {others * N, others * N};
        const int pieces = 2 * c.mesh.cp, P = T / pieces;
        if (!sliding || config.window == 0 || (config.window - 2) / P + 1 > others / 2.0) return all;
        std::pair some = {(size_t)0, (size_t)0};
        auto rank_of = [&](int piece) { return piece < c.mesh.cp ? piece : pieces - 1 - piece; };
        for (int piece = 0; piece < pieces; piece++) {
            std::set<int> readers;
            for (int by = piece; by < pieces; by++)
                if ((by * P - (config.window - 1)) < (piece + 1) * P) readers.insert(rank_of(by));
            readers.erase(rank_of(piece));
            if (rank_of(piece) == rank) some.first += readers.size() * B * P;
            some.second += readers.contains(rank) * B * P;
        }
        return some;
    };
    size_t bytes = 0;
    for (int layer = 0; layer < config.layers / c.mesh.pp; layer++) {
        auto [keys, gradients] = rows(layer_kind(config, layer).window > 0);
        bytes += passes * keys * width * e + gradients * width * sizeof(float) + others * passes * ends;
    }
    return bytes * std::max(c.pipeline.micro_batches, 1);
}

Result result_of(const Case& c, const Mesh& mesh, Planted planted = Planted::nothing, bool delayed = false) {
    ModelConfig config = config_of(c);
    const int all = std::max(c.pipeline.micro_batches, 1) * c.mesh.dp, own = all / mesh.shape.dp;
    PipelineShape pipeline = mesh.shape.ranks() > 1 ? c.pipeline : PipelineShape{one_f_one_b, 1, own, 1};
    pipeline.stages = mesh.shape.pp, pipeline.chunks = 1, pipeline.micro_batches = own;
    Layout layout = {mesh.shape, 1, pipeline,
                     std::vector<int>((size_t)mesh.shape.pp, config.layers / mesh.shape.pp)};
    Workload workload = {B, T / mesh.shape.cp, true, c.recompute, 40};
    workload.contexts = mesh.shape.cp;
    ZeroSettings settings = c.settings;
    if (mesh.shape.ranks() == 1) settings.level = 0;
    Gpt g(config, workload, settings, mesh, layout);
    initialize(g.state, 5);
    if (g.tables.any()) begin_tables(g, 5);
    std::vector<std::unique_ptr<PackedBatch>> batches;
    for (int micro = 0; micro < own; micro++)
        batches.push_back(
            std::make_unique<PackedBatch>(c, mesh, micro * mesh.shape.dp + mesh.data_rank(), planted));
    const double targets = (double)all * B * T;
    auto rows = [&](int micro) {
        return rows_of(batches[micro]->host(), B, batches[micro]->shape.cut(mesh.position[Axis::context]));
    };
    zero_gradients(g);
    g.tables.look_up({0, own, rows});
    float of_token = (float)((planted == Planted::scaled_by_ranks ? mesh.shape.cp : 1) / targets);
    reset_traffic();
    // Ranks are delayed at random, so that one issues its messages long before another.
    auto load = [&](int micro, int) {
        uint64_t key = random_key(9, "delays"),
                 number = (uint64_t)(mesh.shape.ranks() * micro + test_world().rank());
        if (delayed) std::this_thread::sleep_for(std::chrono::milliseconds(philox(key, number).at[0] % 20));
        return batches[micro]->batch;
    };
    accumulate_gradients(g, own, load, of_token);
    if (mesh.shape.cp > 1 && mesh.shape.tp == 1) {
        g.state.synchronize();
        CHECK(bytes_sent(Traffic::activations) == formula_bytes(c, config, mesh.position[Axis::context]));
    }
    g.tables.sum_gradients();
    g.state.update(g.stats.data, adamw_optimizer({0, 0.9, 0.95, 1e-8, 0, 1, false}, 0), 0);
    StepResult step = read_result(g, targets);
    return {step.loss, step.gradient_norm, collected_gradients(g.state)};
}

MeshShape mesh_of(const Case& c) {
    MeshShape mesh = c.mesh;
    mesh.copies = std::max(1, mesh.tp / config_of(c).kv_heads);
    mesh.tables = mesh.stage_group = has(c, "tables");
    return mesh;
}

}  // namespace

TEST_CASE("losses and gradients are those of one process") {
    HeadParts parts(1);
    for (const Case& c : cases) {
        if (c.mesh.ranks() != test_world().size()) continue;
        CAPTURE(std::string(c.name));
        Result want = result_of(c, one_process()),
               got = result_of(c, Mesh(test_world(), mesh_of(c), test_stream()));
        CHECK(got.loss == doctest::Approx(want.loss).epsilon(1e-6));
        CHECK(got.norm == doctest::Approx(want.norm).epsilon(1e-6));
        CHECK(got.difference(want) < 2e-6);
    }
}

TEST_CASE("heads that are sent in parts make the same bits") {
    for (const Case& c : cases) {
        if (c.mesh.ranks() != test_world().size() || c.mesh.cp < c.mesh.ranks()) continue;
        CAPTURE(std::string(c.name));
        Mesh mesh(test_world(), mesh_of(c), test_stream());
        Result want = result_of(c, mesh);
        HeadParts parts(1);
        Result got = result_of(c, mesh);
        CHECK(got.loss == want.loss);
        CHECK((got.gradients == want.gradients));
    }
}

TEST_CASE("the order of messages is the same on ranks of any speed") {
    HeadParts parts(1);
    for (const Case& c : cases) {
        // only cases with a pipeline, except on 2 ranks, where there are none
        if (c.mesh.ranks() != test_world().size() || (c.mesh.pp == 1 && c.mesh.ranks() > 2)) continue;
        CAPTURE(std::string(c.name));
        Mesh mesh(test_world(), mesh_of(c), test_stream());
        Result want = result_of(c, mesh), got = result_of(c, mesh, Planted::nothing, true);
        CHECK(got.loss == want.loss);
        CHECK((got.gradients == want.gradients));
    }
}

TEST_CASE("activations of a context rank are its part of those of one rank") {
    ModelConfig config = config_of({"", {}, "rope"});
    auto bytes_of = [&](int contexts, bool kept) {
        Workload workload = {1, 4096 / contexts, true, Recompute::none, 64};
        workload.contexts = contexts;
        Layout layout = {.mesh = {.cp = contexts}};
        auto table = activation_table(config, workload, Stage(config, layout, {}, true));
        if (kept) return layer_bytes(table);
        size_t all = 0;
        for (const ActivationRow& row : table) all += row.stride();
        return all;
    };
    for (int contexts : {2, 4, 8}) {
        CAPTURE(contexts);
        CHECK((double)bytes_of(contexts, true) * contexts ==
              doctest::Approx(bytes_of(1, true)).epsilon(0.02));
        // One layer also holds the keys and values of all ranks, and their gradients, in both orders.
        size_t keys = 4096 * 64, beside = keys * (3 * sizeof(floatX) + sizeof(float)),
               scratch = attention_backward_scratch(self_attention_shape(1, 4096, 4, 4, 8, 0, nullptr));
        CHECK((double)(bytes_of(contexts, false) - beside) <
              1.02 * (double)bytes_of(1, false) / contexts + (double)(scratch * sizeof(float)));
    }
}

TEST_CASE("mistakes that others made would be found") {
    const Case c = {"", {.cp = test_world().size()}, "documents"};
    const Mesh mesh(test_world(), mesh_of(c), test_stream());
    Result want = result_of(c, one_process());
    for (Planted planted : {Planted::own_piece_only, Planted::documents_ignored, Planted::shifted_after,
                            Planted::scaled_by_ranks, Planted::positions_restart}) {
        CAPTURE((int)planted);
        CHECK(result_of(c, mesh, planted).difference(want) > 1e-3);
    }
}
