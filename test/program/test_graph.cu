// CUDA graphs: a captured pass reruns as it was, and training has the same bits as without graphs.
// devices: simt-bf16 cuda
// seconds: 12
#include "test/program/model_testing.h"

namespace {

constexpr int B = 2, T = 40, V = 37, steps = 2;  // more tokens than the embedding sums in one launch

struct Ending {
    std::vector<floatX> weights;
    std::vector<float> losses;
    size_t launched;
};

// Trains a few steps of three micro-batches, alternating between two buffers, with new tokens in each step.
Ending train_steps(const ModelConfig& config, Recompute recompute, bool fp8, bool graphs, bool documents) {
    constexpr int micro_batches = 3;
    Gpt g(config, {.B = B, .T = T, .training = true, .recompute = recompute, .loss_chunk = 32, .fp8 = fp8},
          with_master);
    g.graphs.on = graphs;
    initialize(g.state, 7);
    const size_t size = batch_ints(B, T);
    DeviceArray<int> memory(2 * size);
    Ending ending;
    for (int step = 0; step < steps; step++) {
        zero_gradients(g);
        auto load = [&](int micro_batch, int) {
            std::vector<int> values(size);
            BatchArrays<int> rows = batch_at(values.data(), B, T);
            for (int i = 0; i < B * T; i++) {
                Random4 random = philox(step * micro_batches + micro_batch, i);
                // some micro-batches have only a few distinct tokens, or a single one
                rows.tokens[i] = (int)(random.at[0] % (micro_batch < 2 ? 1 + 2 * micro_batch : V));
                rows.targets[i] = (int)(random.at[1] % V);
                rows.doc_start[i] = i % T >= 5 ? 5 : 0;
                rows.positions[i] = i % T - (documents ? rows.doc_start[i] : 0);
            }
            sort_by_token(rows.by_token, rows.tokens, B * T);
            sort_by_position(rows.by_position, rows.positions, B * T);
            int* device = memory.data + (micro_batch % 2) * size;
            copy_to_device(device, values.data(), size, g.stream);
            Batch batch = {batch_at<const int>(device, B, T), B, T};
            if (!documents) batch.doc_start = nullptr;
            return batch;
        };
        accumulate_gradients(g, micro_batches, load, 1.0f / (micro_batches * B * T));
        g.state.update(g.stats.data, adamw_optimizer({1e-2, 0.9, 0.95, 1e-8, 0.1, step + 1, false}, 1), 1.0f);
        g.products.weights_changed(graphs);
        ending.losses.push_back(read_result(g, micro_batches * B * T).loss);
    }
    ending.weights = from_device(g.state.params(0), g.layout.size());
    ending.launched = g.graphs.launched();
    return ending;
}

ModelConfig gpt2_config() {
    ModelConfig c = small_config();
    c.context = T;
    return c;
}

ModelConfig llama_config() {
    ModelConfig c = small_config();
    c.head_size = 0, c.mlp_width = 32, c.kv_heads = 2, c.channels = 32;
    c.norm = NormKind::rmsnorm, c.position = PositionKind::rope, c.mlp = MlpKind::swiglu, c.bias = false,
    c.tie_embeddings = false;
    c.qk_norm = c.local_filter = true;
    complete(c);
    return c;
}

}  // namespace

static void check_same_bits(const ModelConfig& config, Recompute recompute, bool documents, bool fp8) {
    CAPTURE(config.norm);
    CAPTURE((int)recompute);
    fp8 = fp8 && has_products_in_bf16 && multiplies_fp8(capability_of(device_properties()));
    Ending without = train_steps(config, recompute, fp8, false, documents);
    Ending with = train_steps(config, recompute, fp8, true, documents);
    CHECK(without.launched == 0);
    // three forward and three backward passes, all launched from a graph after the first step; in the first
    // step only the third forward pass is, because it repeats the first one on the same memory
    CHECK(with.launched == 6 * (steps - 1) + 1);
    CHECK(with.losses == without.losses);
    CHECK(with.losses.back() != with.losses.front());
    CHECK(memcmp(with.weights.data(), without.weights.data(), with.weights.size() * sizeof(floatX)) == 0);
}

TEST_CASE("training has the same bits with and without graphs") {
    check_same_bits(gpt2_config(), Recompute::mlp, true, false);
    check_same_bits(llama_config(), Recompute::block, true, true);
}

TEST_CASE("training has the same bits with and without graphs where all is kept" *
          doctest::test_suite("long")) {
    check_same_bits(gpt2_config(), Recompute::none, false, false);
    check_same_bits(llama_config(), Recompute::none, false, true);
}

TEST_CASE("a graph runs what was captured, each time on what is in memory then") {
    cudaStream_t stream = new_stream();
    Graphs graphs;
    graphs.on = true;
    DeviceArray<float> total(4), step(4);
    std::vector<float> one = {1, 2, 3, 4}, zero(4);
    copy_to_device(total.data, zero.data(), 4, stream);
    for (int i = 1; i <= 5; i++) {
        std::vector<float> values;
        for (float x : one) values.push_back(x * i);
        copy_to_device(step.data, values.data(), 4, stream);
        graphs.run([&] { return graph_key(total.data); }, stream,
                   [&] { accumulate(total.data, step.data, 4, stream); });
    }
    cudaCheck(cudaStreamSynchronize(stream));
    CHECK(from_device(total.data, 4) == std::vector<float>{15, 30, 45, 60});
    CHECK(graphs.launched() == 4);
    CHECK(graphs.count() == 1);
    graphs.on = false;
    auto no_key = []() -> std::string {
        FAIL("nobody asks for it");
        return "";
    };
    bool worked = false;
    graphs.run(no_key, stream, [&] { worked = true; });
    CHECK(worked);
    cudaCheck(cudaStreamDestroy(stream));
}

TEST_CASE("keys tell numbers, pointers and lists apart") {
    int a, b;
    std::vector<int*> list = {&a}, other = {&b};
    CHECK(graph_key(1, &a, list) == graph_key(1, &a, list));
    CHECK(graph_key(1, &a, list) != graph_key(1, &a, other));
    CHECK(graph_key(1, &a) != graph_key(2, &a));
    CHECK(graph_key(1.0f, &a) != graph_key(1.0f, &b));
}
