/*
The tables of a model with n-gram memory: memory use is as planned, and passes that do not train leave no
trace in them.
*/
// devices: cpu cuda
// seconds: 3
#include <set>

#include "test/program/model_testing.h"
#include "test/support/file_testing.h"

namespace {

constexpr int B = 2, T = 12;

ModelConfig with_tables(int rows = 50) {
    ModelConfig c = small_config();
    c.ngram = "1,2", c.ngram_rows = rows, c.ngram_width = 8, c.ngram_heads = 2, c.ngram_layers = "0,1";
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

// The values of all rows of a table on the device or in host memory.
std::vector<float> values_of(Gpt& g, int layer) {
    const TableSizes& sizes = g.tables.sizes();
    const NumberArray there = g.tables.own().by_place(g.tables.table_of(layer)).values;
    std::vector<char> bytes = from_device((char*)there.data, sizes.own_rows() * sizes.row_bytes());
    std::vector<float> values(sizes.own_rows() * sizes.W);
    to_floats(sizes.dtype, bytes.data(), values.size(), values.data());
    return values;
}

// The bits of all tables; values only of rows that have received gradients.
std::vector<float> bits_of(Gpt& g) {
    g.tables.synchronize();
    std::vector<float> bits;
    const TableSizes& sizes = g.tables.sizes();
    if (g.tables.own().cache()) {  // a record has, for each table, the values and the sum of squares
        const size_t of_table = sizes.table_bytes();
        std::vector<uint64_t> rows(sizes.own_rows());
        std::iota(rows.begin(), rows.end(), 0);
        std::vector<char> records(rows.size() * sizes.record_bytes());
        std::vector<char*> to;
        for (uint64_t row : rows) to.push_back(&records[row * sizes.record_bytes()]);
        g.tables.own().copy(rows, to);
        for (size_t table = 0; table < sizes.tables(); table++) {
            for (uint64_t row : rows) {
                std::vector<float> values(sizes.W);
                float squares;
                to_floats(sizes.dtype, to[row] + table * of_table, sizes.W, values.data());
                memcpy(&squares, to[row] + table * of_table + sizes.row_bytes(), sizeof squares);
                bits.push_back(squares);
                if (squares != 0) bits.insert(bits.end(), values.begin(), values.end());
            }
        }
        return bits;
    }
    for (int layer : sizes.layers) {
        auto squares =
            from_device(g.tables.own().by_place(g.tables.table_of(layer)).squares, sizes.own_rows());
        std::vector<float> values = values_of(g, layer);
        for (size_t row = 0; row < squares.size(); row++) {
            bits.push_back(squares[row]);
            for (int w = 0; w < sizes.W && squares[row] != 0; w++) bits.push_back(values[row * sizes.W + w]);
        }
    }
    return bits;
}

// The batch that a step announces as next: none, the actual next one, or another.
enum class Ahead { nothing, next, another };

// Runs a step. Its update is skipped if the norm exceeds a limit.
StepResult make_step(Gpt& g, int number, Ahead ahead = Ahead::nothing, float most_norm = FLT_MAX) {
    int expected = ahead == Ahead::next ? number + 1 : 99;
    std::vector<int> tokens = tokens_of(number), others = tokens_of(expected);
    TestBatch batch(B, T, tokens, tokens), other(B, T, others, others);
    zero_gradients(g);
    g.tables.look_up(lookups_of(batch, (uint64_t)number));
    g.stats.count_rows(g.tables.sent(), g.tables.waited_for(), g.stream);
    accumulate_gradients(g, *batch, 1.0f / batch.valid(), true);
    g.tables.sum_gradients();
    ClipLimits limits = 1.0f;
    limits.most_norm = most_norm;
    g.state.update(g.stats.data, adamw_optimizer({1e-2, 0.9, 0.95, 1e-8, 0.1, number, false}, 0), limits);
    if (ahead != Ahead::nothing) g.tables.look_ahead(lookups_of(other, (uint64_t)expected));
    g.tables.update({0.05f, 1e-8f, number}, &g.stats.data->scale);
    return read_result(g, batch.valid());
}
void train_step(Gpt& g, int number, Ahead ahead = Ahead::nothing) {
    CHECK(make_step(g, number, ahead).finite);
}

// The rows that a batch looks up.
std::set<uint64_t> rows_of_batch(Gpt& g, int number) {
    std::vector<int> tokens = tokens_of(number);
    TestBatch batch(B, T, tokens, tokens);
    std::set<uint64_t> rows;
    for (const NgramTokens& text : batch.rows()) {
        std::vector<uint64_t> found((size_t)(text.count * g.tables.sizes().heads));
        g.tables.hash().look_up(found.data(), text, 0, g.tables.sizes().heads);
        rows.insert(found.begin(), found.end());
    }
    return rows;
}

// The format of rows that is not the build's.
constexpr RowDtype other_dtype = sizeof(floatX) == sizeof(float) ? RowDtype::bf16 : RowDtype::fp32;

// Tables on disk have their files in a temporary folder, and memory for the rows of two steps.
ZeroSettings on(TablePlace place, RowDtype dtype = RowDtype::automatic, ZeroSettings settings = with_master) {
    static const TemporaryFolder folder;
    settings.table_place = place, settings.table_dtype = dtype;
    settings.table_dir = folder.path;
    const size_t record = 2 * (8 * dtype_size(settings.rows_dtype()) + sizeof(float));
    settings.table_cache = 200 * (record + SlotNotes::bytes_of_slot);
    return settings;
}

TEST_CASE("tables take the memory that is planned") {
    ModelConfig config = with_tables();
    for (TablePlace place : {TablePlace::device, TablePlace::host}) {
        for (bool training : {true, false}) {
            ZeroSettings settings =
                on(place, training ? RowDtype::bf16 : RowDtype::fp32, training ? with_master : inference);
            settings.staging = training;
            Gpt g(config, workload(training), settings);
            auto planned = memory_classes(config, workload(training), settings);
            size_t tables = rows_of_table(config) * (8 * (training ? 2 : 4) + sizeof(float)) * 2;
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

TEST_CASE("a table has the same bits on the device, on the host and on disk, whatever was looked up ahead") {
    std::map<RowDtype, std::vector<float>> firsts;
    for (TablePlace place : {TablePlace::device, TablePlace::host, TablePlace::disk}) {
        for (Ahead ahead : {Ahead::nothing, Ahead::next, Ahead::another}) {
            for (auto [prefetch, dtype] :
                 {std::pair{1, RowDtype::automatic}, {0, RowDtype::automatic}, {0, other_dtype}}) {
                ZeroSettings settings = on(place, dtype);
                settings.table_prefetch = prefetch;
                Gpt g(with_tables(400), workload(true), settings);
                initialize(g.state, 5);
                begin_tables(g, 5);
                for (int step = 1; step <= 6; step++) train_step(g, step, ahead);
                std::vector<float> bits = bits_of(g), &first = firsts[dtype];
                if (first.empty()) first = bits;
                CHECK(same_bits(bits, first));
                if (g.tables.own().cache())
                    CHECK(g.tables.own().file()->bytes_written() > 0);  // rows have left memory
            }
        }
    }
    for (auto& [dtype, first] : firsts)
        CHECK(std::ranges::count(first, 0.0f) > 0);  // rows without a gradient
    CHECK_FALSE(same_bits(firsts[RowDtype::automatic], firsts[other_dtype]));
}

TEST_CASE("a step waits for the rows that the one before changed, and for no others") {
    for (int staleness : {0, 1}) {
        ZeroSettings settings = on(TablePlace::host);
        settings.table_staleness = staleness;
        Gpt g(with_tables(), workload(true), settings);
        initialize(g.state, 5);
        begin_tables(g, 5);
        train_step(g, 1, Ahead::next);
        float late = make_step(g, 2, Ahead::next).late_rows;
        std::set<uint64_t> before = rows_of_batch(g, 1), now = rows_of_batch(g, 2);
        auto shared = (float)std::ranges::count_if(now, [&](uint64_t row) { return before.contains(row); });
        CHECK(shared > 0);
        CHECK(shared < (float)now.size());
        CHECK(late == (staleness ? 0.0f : shared / (float)now.size()));
    }
}

TEST_CASE("stale rows are those of before the last update, and what is saved is not") {
    ZeroSettings settings = on(TablePlace::host);
    settings.table_staleness = 1;
    Gpt g(with_tables(), workload(true), settings);
    initialize(g.state, 5);
    begin_tables(g, 5);
    train_step(g, 1);
    std::vector<int> tokens = tokens_of(2);
    TestBatch batch(B, T, tokens, tokens);
    auto looked_up = [&] {
        g.tables.look_up(lookups_of(batch, 2));
        synchronize(g.stream);
        return from_device(g.tables.rows(0), rows_of_batch(g, 2).size() * 8);
    };
    std::vector<floatX> old = looked_up();
    train_step(g, 3);
    CHECK_FALSE(same_bits(looked_up(), old));
    old = looked_up();
    train_step(g, 1, Ahead::next);
    CHECK(same_bits(looked_up(), old));
    CHECK_FALSE(same_bits(looked_up(), old));
    old = looked_up();
    train_step(g, 1, Ahead::next);
    g.tables.forget_stale();
    CHECK_FALSE(same_bits(looked_up(), old));
}

// Sums by lists are those of the embedding's gradient, and rows that are not looked up stay as they are.
TEST_CASE("a table is a dense embedding with the same optimizer, to the bit") {
    constexpr int W = 8, micro_batches = 3;
    ModelConfig config = with_tables();
    config.ngram_layers = "1";
    const int rows = (int)rows_of_table(config), N = B * T * ngram_head_count(config);
    for (auto [place, dtype] : {std::pair{TablePlace::device, RowDtype::automatic},
                                {TablePlace::host, RowDtype::automatic},
                                {TablePlace::device, other_dtype},
                                {TablePlace::host, other_dtype}}) {
        Layout layout;
        layout.pipeline.micro_batches = micro_batches;
        Gpt g(config, workload(true), on(place, dtype), one_process(), layout);
        begin_tables(g, 5);
        Buffer<float> dense_grads(rows * W), scratch(embedding_backward_scratch(N, W)), scale(1);
        cudaCheck(cudaMemsetAsync(scratch, 0, scratch.size() * sizeof(float), g.stream));
        fill(scale, 0.5f, 1, g.stream);
        const Dtype stored = g.tables.sizes().dtype;
        std::vector<char> values(rows * W * dtype_size(stored));
        std::vector<float> squares(rows);
        TableRows dense = g.tables.own().by_number(0);
        dense.values.data = values.data(), dense.squares = squares.data();
        std::vector<uint64_t> all(rows);
        std::iota(all.begin(), all.end(), 0);
        fetch_rows_cpu(dense.values, dense, all.data(), rows);
        for (int step = 1; step <= 4; step++) {
            std::vector<std::unique_ptr<TestBatch>> batches;
            for (int micro = 0; micro < micro_batches; micro++) {
                std::vector<int> tokens = tokens_of(step * 10 + micro);
                batches.push_back(std::make_unique<TestBatch>(B, T, tokens, tokens));
            }
            g.tables.look_up({0, micro_batches, [&](int micro) { return batches[micro]->rows(); }});
            synchronize(g.stream);
            cudaCheck(cudaMemsetAsync(dense_grads, 0, dense_grads.size() * sizeof(float), g.stream));
            for (int micro = 0; micro < micro_batches; micro++) {
                std::vector<uint64_t> found;
                for (const NgramTokens& text : batches[micro]->rows()) {
                    std::vector<uint64_t> of_row((size_t)text.count * g.tables.sizes().heads);
                    g.tables.hash().look_up(of_row.data(), text, 0, g.tables.sizes().heads);
                    found.insert(found.end(), of_row.begin(), of_row.end());
                }
                std::vector<int> tokens(found.begin(), found.end()), order(N);
                sort_by_token(order.data(), tokens.data(), N);
                std::vector<float> random(N * W);
                for (int i = 0; i < N * W; i++) random[i] = random_uniform(philox(step, i).at[micro]) - 0.5f;
                Buffer<floatX> dout(random);
                Buffer<int> tokens_there(tokens), order_there(order);
                embedding_backward(dense_grads, nullptr, scratch, dout, tokens_there, order_there, nullptr,
                                   nullptr, N, W, g.stream);
                PlacesOfRows places = g.tables.places(micro, 0);
                Buffer<floatX> looked_up(N * W);
                embedding_forward(looked_up, places.of_lookups, g.tables.rows(1), nullptr, nullptr, N, W,
                                  g.stream);
                sum_rows(g.tables.grads(1), scratch, (const floatX*)dout, places.of_lookups, places.in_order,
                         N, W, g.stream);
                synchronize(g.stream);
                std::vector<floatX> expected;
                for (int row : tokens)
                    for (int w = 0; w < W; w++) expected.push_back(floatX(dense.values.get(row * W + w)));
                CHECK(same_bits(looked_up.host(), expected));
            }
            g.tables.sum_gradients();
            AdaGrad adagrad = {0.05f, 1e-8f, step};
            g.tables.update(adagrad, scale);
            g.tables.synchronize();
            float half = 0.5f;
            step_rows_cpu(dense, all.data(), dense_grads.host().data(), rows, &half, adagrad);
        }
        CHECK(same_bits(from_device(g.tables.own().by_place(0).squares, rows), squares));
        std::vector<float> own = values_of(g, 1), expected(rows * W);
        to_floats(stored, values.data(), expected.size(), expected.data());
        for (int i = 0; i < rows * W; i++)
            if (squares[i / W] == 0) own[i] = expected[i];  // such rows have no values yet
        CHECK(same_bits(own, expected));
    }
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
    CHECK_FALSE(make_step(g, 2, Ahead::nothing, 1e-9f).stepped);
    CHECK(same_bits(bits_of(g), before));
}

}  // namespace
