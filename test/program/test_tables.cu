/*
The tables of a model with n-gram memory: the memory that is planned is what is taken, and what is no training
leaves no trace in them.
*/
// devices: cpu cuda
// seconds: 3
#include "test/program/model_testing.h"

namespace {

constexpr int B = 2, T = 12;

ModelConfig with_tables() {
    ModelConfig c = small_config();
    c.ngram = "1,2", c.ngram_rows = 50, c.ngram_width = 8, c.ngram_heads = 2, c.ngram_layers = "0,1";
    complete(c);
    return c;
}

Workload workload(bool training) {
    return {.B = B, .T = T, .training = training, .recompute = Recompute::none, .loss_chunk = 8};
}

std::vector<int> tokens_of(int number) {
    std::vector<int> tokens(B * T);
    for (int i = 0; i < B * T; i++) tokens[i] = (int)(philox(number, i).at[0] % 37);
    return tokens;
}

Lookups lookups_of(const TestBatch& batch, uint64_t first) {
    return {first, 1, [&batch](int) { return batch.rows(); }};
}

// The bits of all tables, of rows that gradients have come to.
std::vector<float> bits_of(Gpt& g) {
    g.tables.synchronize();
    std::vector<float> bits;
    const TableSizes& sizes = g.tables.sizes();
    for (int layer : sizes.layers) {
        auto squares = from_device(g.tables.own(layer).squares, sizes.own_rows());
        auto values = from_device(g.tables.own(layer).values, sizes.own_rows() * sizes.W);
        for (size_t row = 0; row < squares.size(); row++) {
            bits.push_back(squares[row]);
            for (int w = 0; w < sizes.W && squares[row] != 0; w++) bits.push_back(values[row * sizes.W + w]);
        }
    }
    return bits;
}

// Makes a step; ahead: other tokens are expected before these. It is left out if its norm exceeds a limit.
StepResult make_step(Gpt& g, int number, bool ahead = false, float most_norm = FLT_MAX) {
    std::vector<int> tokens = tokens_of(number), others = tokens_of(99);
    TestBatch batch(B, T, tokens, tokens), other(B, T, others, others);
    if (ahead) g.tables.look_ahead(lookups_of(other, 7));
    zero_gradients(g);
    g.tables.look_up(lookups_of(batch, (uint64_t)number));
    accumulate_gradients(g, *batch, 1.0f / batch.valid(), true);
    g.tables.sum_gradients();
    ClipLimits limits = 1.0f;
    limits.most_norm = most_norm;
    g.state.update(g.stats.data, adamw_optimizer({1e-2, 0.9, 0.95, 1e-8, 0.1, number, false}, 0), limits);
    g.tables.update({0.05f, 1e-8f, number}, &g.stats.data->scale);
    return read_result(g, batch.valid());
}
void train_step(Gpt& g, int number, bool ahead = false) {
    CHECK(make_step(g, number, ahead).finite);
}

ZeroSettings on(TablePlace place, ZeroSettings settings = with_master) {
    settings.table_place = place;
    return settings;
}

TEST_CASE("tables take the memory that is planned") {
    ModelConfig config = with_tables();
    for (TablePlace place : {TablePlace::device, TablePlace::host}) {
        for (bool training : {true, false}) {
            ZeroSettings settings = on(place, training ? with_master : inference);
            settings.staging = training;
            Gpt g(config, workload(training), settings);
            auto planned = memory_classes(config, workload(training), settings);
            size_t tables = rows_of_table(config) * (8 * sizeof(floatX) + sizeof(float)) * 2;
            CHECK(bytes_of(g.memory, place == TablePlace::host ? "n-gram tables in host memory"
                                                               : "n-gram tables") == tables);
            for (const MemoryClass& one : planned) {
                INFO(one.name);
                bool saved_elsewhere = std::string_view(one.name) == "staging for checkpoints";
                size_t staged = staging_bytes(g.layout, {}, settings, sizeof(floatX));
                CHECK(bytes_of(g.memory, one.name) + (saved_elsewhere ? staged : 0) == one.bytes);
            }
        }
    }
}

TEST_CASE("a table has the same bits on the device and on the host, whatever was looked up ahead") {
    std::vector<float> bits[3];
    for (int i = 0; i < 3; i++) {
        Gpt g(with_tables(), workload(true), on(i == 1 ? TablePlace::host : TablePlace::device));
        initialize(g.state, 5);
        begin_tables(g, 5);
        for (int step = 1; step <= 3; step++) train_step(g, step, i == 2);
        bits[i] = bits_of(g);
    }
    CHECK(same_bits(bits[0], bits[1]));
    CHECK(same_bits(bits[0], bits[2]));
    CHECK(std::ranges::count(bits[0], 0.0f) > 0);  // rows that nothing has come to
}

TEST_CASE("lookups that are not trained on leave no trace") {
    Gpt g(with_tables(), workload(true), with_master);
    initialize(g.state, 5);
    begin_tables(g, 5);
    train_step(g, 1);
    auto before = bits_of(g);
    std::vector<int> tokens = tokens_of(2);
    TestBatch batch(B, T, tokens, tokens);
    GptPasses passes(g);
    passes.look_up(1, lookups_of(batch, 0).tokens);
    passes.losses(
        1, [&](int, int) { return *batch; }, [](int, const std::vector<float>&) {});
    CHECK(same_bits(bits_of(g), before));
    train_step(g, 2);
    CHECK_FALSE(same_bits(bits_of(g), before));
}

TEST_CASE("a step that is left out leaves no trace in the tables") {
    Gpt g(with_tables(), workload(true), with_master);
    initialize(g.state, 5);
    begin_tables(g, 5);
    train_step(g, 1);
    auto before = bits_of(g);
    CHECK_FALSE(make_step(g, 2, false, 1e-9f).stepped);
    CHECK(same_bits(bits_of(g), before));
}

}  // namespace
