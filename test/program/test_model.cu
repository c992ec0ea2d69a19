/*
The whole model: against golden runs of PyTorch (test/golden/), against finite differences for every switch,
and its guarantees about recomputation, repeated runs, accumulation and non-finite steps.
*/
// seconds: 15
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "test/program/model_testing.h"
#include "test/support/golden.h"

namespace {

// One rank owns everything, and its units lie one after another.
void set_tensor(Gpt& g, size_t offset, const float* values, size_t count) {
    std::vector<floatX> rounded(values, values + count);
    copy_to_device(g.state.params(0) + offset, rounded.data(), count, g.stream);
    if (float* master = g.state.owned_master(0)) copy_to_device(master + offset, values, count, g.stream);
}

void forward_backward(Gpt& g, const TestBatch& batch) {
    zero_gradients(g);
    accumulate_gradients(g, looked_up(g, batch), 1.0f / batch.valid(), true);
    g.tables.sum_gradients();
}

// Updates the weights, and the rows of tables.
void update(Gpt& g, const Optimizer& optimizer, float gradient_clip, const AdaGrad& adagrad) {
    g.state.update(g.stats.data, optimizer, gradient_clip);
    g.tables.update(adagrad, &g.stats.data->scale);
}

// ----------------------------------------------------------------------------
// rows of tables; one rank owns all of them

std::vector<int> layers_with_table(const Gpt& g) {
    return g.tables.sizes().layers;
}

// Fetches the rows with these numbers, as lookups do.
std::vector<floatX> fetch(Gpt& g, int layer, const std::vector<uint64_t>& rows) {
    Buffer<uint64_t> numbers(rows);
    Buffer<floatX> values(rows.size() * (size_t)g.config.ngram_width);
    fetch_rows((floatX*)values, g.tables.own().by_number(g.tables.table_of(layer)), numbers, (int)rows.size(),
               g.stream);
    cudaCheck(cudaStreamSynchronize(g.stream));
    return values.host();
}

void put(Gpt& g, int layer, const std::vector<uint64_t>& rows, const std::vector<float>& values,
         float squares) {
    Buffer<uint64_t> numbers(rows);
    Buffer<floatX> rounded(values);
    Buffer<float> of_rows(std::vector<float>(rows.size(), squares));
    put_rows(g.tables.own().by_number(g.tables.table_of(layer)), numbers, (floatX*)rounded, of_rows,
             (int)rows.size(), g.stream);
    cudaCheck(cudaStreamSynchronize(g.stream));
}

std::vector<uint64_t> all_rows(const Gpt& g) {
    std::vector<uint64_t> rows(g.tables.sizes().rows);
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
}

std::vector<float> squares_of_rows(Gpt& g, int layer) {
    cudaCheck(cudaStreamSynchronize(g.stream));
    return from_device(g.tables.own().by_place(g.tables.table_of(layer)).squares, g.tables.sizes().rows);
}

// The row numbers that the batch looks up: token by token, for each token all heads.
std::vector<uint64_t> lookups_of(const Gpt& g, const TestBatch& batch) {
    std::vector<uint64_t> rows;
    int heads = g.tables.sizes().heads;
    for (const NgramTokens& tokens : batch.rows()) {
        size_t at = rows.size();
        rows.resize(at + (size_t)tokens.count * (size_t)heads);
        g.tables.hash().look_up(&rows[at], tokens, 0, heads);
    }
    return rows;
}

// The gradient of all rows of a table after a pass over the batch, whose lookups must have been the last. The
// device keeps gradients of the distinct rows only, in the order of first occurrence.
std::vector<double> gradient_of_rows(const Gpt& g, int layer, const TestBatch& batch) {
    cudaCheck(cudaStreamSynchronize(g.stream));
    const size_t W = (size_t)g.config.ngram_width;
    std::vector<double> gradient(g.tables.sizes().rows * W);
    std::vector<uint64_t> distinct;
    for (uint64_t row : lookups_of(g, batch))
        if (std::ranges::count(distinct, row) == 0) distinct.push_back(row);
    std::vector<float> grads = from_device(g.tables.grads(layer), distinct.size() * W);
    for (size_t i = 0; i < distinct.size(); i++) std::copy_n(&grads[i * W], W, &gradient[distinct[i] * W]);
    return gradient;
}

// ----------------------------------------------------------------------------
// golden runs

ModelConfig config_of(const Golden& golden) {
    Options c;
    for (auto& [field, value] : golden.header["config"].items()) {
        for (const OptionRow& row : option_table())
            if (row.field == field) set_value(row, c, text_of_json(row, value));
    }
    complete(c);
    return c;
}

// A key bias shifts all scores of a query equally, so its gradient is zero except for rounding, which AdamW
// scales up to a full step. Those rows say nothing about the final weights.
void drop_key_bias(const ModelConfig& c, const std::string& name, std::vector<double>& values) {
    if (!name.ends_with("qkv.bias") || c.position != PositionKind::learned) return;
    auto keys = values.begin() + c.heads * c.head_size;
    values.erase(keys, keys + c.kv_heads * c.head_size);
}

// Computes the logits from the last norm's output, without the padding of the vocabulary.
std::vector<double> logits_of(Gpt& g, int N) {
    int V = g.config.vocab_size, Vp = padded_vocab(g.config);
    Buffer<floatX> logits((size_t)N * Vp);
    matmul_forward(logits, g.acts[0].normf, g.weights(g.classifier_unit())[g.classifier_weight()], nullptr, N,
                   g.config.channels, Vp, g.stream);
    cudaCheck(cudaStreamSynchronize(g.stream));
    auto padded = logits.doubles();
    std::vector<double> result;
    for (int i = 0; i < N; i++) result.insert(result.end(), &padded[i * Vp], &padded[i * Vp] + V);
    return result;
}

void check_golden(const char* name) {
    INFO(name);
    Golden golden(name);
    ModelConfig config = config_of(golden);
    int B = golden.header["batch"], T = golden.header["time"], steps = golden.header["steps"], N = B * T;
    auto& o = golden.header["optimizer"];
    OptimizerKind kind = o.value("kind", "adamw") == "muon" ? OptimizerKind::muon : OptimizerKind::adamw;
    Gpt g(config, {B, T, true, Recompute::none, 7}, for_optimizer(kind, with_master));
    g.layout.each([&](const TensorRow& row, const std::string& tensor, size_t offset) {
        auto values = golden.tensor<float>("weight", tensor);
        REQUIRE(values.size() == row.size());
        set_tensor(g, offset, values.data(), values.size());
    });
    auto tokens = golden.tensor<int>("tokens", "tokens"), targets = golden.tensor<int>("targets", "targets");
    auto documents =
        golden.has("doc_start") ? golden.tensor<int>("doc_start", "doc_start") : std::vector<int>();
    std::vector<int> lookups, rows_that_occur;
    if (g.tables.any()) {
        begin_tables(g, o["seed"]);
        lookups = golden.tensor<int>("lookups", "lookups");
        rows_that_occur = golden.tensor<int>("rows", "rows");
    }
    // selects the rows that occur in the golden run from all rows of a table
    auto occurring = [&](const auto& all, size_t width) {
        std::vector<double> some;
        for (int row : rows_that_occur) some.insert(some.end(), &all[row * width], &all[row * width] + width);
        return some;
    };
    const size_t W = (size_t)config.ngram_width;
    auto of_rows = [&](const char* kind, int layer) {
        return to_doubles(golden.tensor<float>(kind, text("layers.%d.ngram", layer)));
    };
    auto check_logits = [&](const char* kind) {
        auto want = to_doubles(golden.tensor<float>(kind, "logits"));
        CHECK(relative_error(logits_of(g, N), want) < (exact ? 1e-5 : 2e-2));
    };
    for (int step = 0; step < steps; step++) {
        auto of_step = [&](const std::vector<int>& all) {
            size_t count = all.size() / (size_t)steps;
            return std::vector(all.begin() + (long)(step * count), all.begin() + (long)((step + 1) * count));
        };
        TestBatch batch(B, T, of_step(tokens), of_step(targets), {}, of_step(documents));
        if (step == 0 && !documents.empty()) {
            TestBatch whole(B, T, of_step(tokens), of_step(targets));
            forward(g, looked_up(g, whole));
            check_logits("whole_logits");
        }
        if (g.tables.any()) REQUIRE(std::ranges::equal(lookups_of(g, batch), of_step(lookups)));
        forward_backward(g, batch);
        if (step == 0) {
            check_logits("logits");
            for (int layer : layers_with_table(g)) {
                INFO(layer);
                CHECK(relative_error(occurring(gradient_of_rows(g, layer, batch), W),
                                     of_rows("row_gradient", layer)) < (exact ? 2e-5 : 6e-2));
            }
            g.layout.each([&](const TensorRow& row, const std::string& tensor, size_t offset) {
                INFO(tensor);
                auto want = to_doubles(golden.tensor<float>("gradient", tensor)),
                     got = gradient_of(g, offset, row.size());
                drop_key_bias(config, tensor, want);
                drop_key_bias(config, tensor, got);
                CHECK(relative_error(got, want) < (exact ? 2e-5 : 6e-2));
            });
        }
        AdamW settings = {o["learning_rate"], o["beta1"], o["beta2"], o["eps"],
                          o["weight_decay"],  step + 1,   false};
        AdaGrad adagrad = {o.value("ngram_lr", 0.0f), o["eps"], step + 1};
        update(g, optimizer_of(kind, settings, 0), o["gradient_clip"].get<float>(), adagrad);
        StepResult stats = read_result(g, batch.valid());
        CHECK(stats.finite);
        CHECK(stats.loss ==
              doctest::Approx((double)golden.header["losses"][step]).epsilon(exact ? 2e-6 : 2e-2));
        CHECK(stats.gradient_norm ==
              doctest::Approx((double)golden.header["gradient_norms"][step]).epsilon(exact ? 2e-5 : 5e-2));
    }
    g.layout.each([&](const TensorRow& row, const std::string& tensor, size_t offset) {
        INFO(tensor);
        auto got = to_doubles(from_device(
            (exact ? (float*)(void*)g.state.params(0) : g.state.owned_master(0)) + offset, row.size()));
        auto want = to_doubles(golden.tensor<float>("final", tensor));
        drop_key_bias(config, tensor, got);
        drop_key_bias(config, tensor, want);
        CHECK(relative_error(got, want) < (exact ? 2e-5 : 3e-2));
        auto padding = from_device(g.state.params(0) + offset + row.size(),
                                   g.layout.here(row.id).padded_size() - row.size());
        CHECK(std::all_of(padding.begin(), padding.end(), [](floatX value) { return (float)value == 0; }));
    });
    for (int layer : layers_with_table(g)) {
        INFO(layer);
        auto squares = to_doubles(squares_of_rows(g, layer));
        auto values = to_doubles(fetch(g, layer, all_rows(g)));
        CHECK(relative_error(occurring(values, W), of_rows("row_values", layer)) < (exact ? 2e-5 : 6e-2));
        CHECK(relative_error(occurring(squares, 1), of_rows("row_squares", layer)) < (exact ? 4e-5 : 6e-2));
        CHECK(std::ranges::count_if(squares, [](double sum) { return sum > 0; }) ==
              (long)rows_that_occur.size());
    }
}

TEST_CASE("golden: GPT-2") {
    check_golden("gpt2");
}
TEST_CASE("golden: LLaMA, grouped heads") {
    check_golden("llama");
}
TEST_CASE("golden: LLaMA with scaled RoPE and masked targets") {
    check_golden("llama3");
}
TEST_CASE("golden: Qwen2, biases of queries, keys and values") {
    check_golden("qwen2");
}
TEST_CASE("golden: Qwen, QK-norm") {
    check_golden("qwen");
}
TEST_CASE("golden: parallel block, sliding window, partial RoPE") {
    check_golden("parallel");
}
TEST_CASE("golden: a small LLaMA, trained with Muon") {
    check_golden("muon");
}
TEST_CASE("golden: Yuan, local filter, rows of several documents") {
    check_golden("yuan");
}
TEST_CASE("golden: a small LLaMA with n-gram memory, rows of several documents") {
    check_golden("ngram");
}

// ----------------------------------------------------------------------------
// models of every kind

struct Variant {
    const char* name;
    void (*change)(ModelConfig&);
};

// Gives both layers a table.
void with_tables(ModelConfig& c) {
    c.ngram = "2,3", c.ngram_rows = 97, c.ngram_width = 8, c.ngram_heads = 2, c.ngram_layers = "0,1";
}

const Variant variants[] = {
    {"plain", [](ModelConfig&) {}},
    {"rmsnorm", [](ModelConfig& c) { c.norm = NormKind::rmsnorm; }},
    {"rope", [](ModelConfig& c) { c.position = PositionKind::rope, c.rope_dims = 6; }},
    {"partial rope", [](ModelConfig& c) { c.position = PositionKind::rope, c.rope_dims = 4; }},
    {"gelu-exact", [](ModelConfig& c) { c.mlp = MlpKind::gelu_exact; }},
    {"swiglu", [](ModelConfig& c) { c.mlp = MlpKind::swiglu; }},
    {"no bias", [](ModelConfig& c) { c.bias = false; }},
    {"qkv bias", [](ModelConfig& c) { c.bias = false, c.qkv_bias = true; }},
    {"kv-heads", [](ModelConfig& c) { c.kv_heads = 2; }},
    {"window", [](ModelConfig& c) { c.window = 3; }},
    {"window pattern", [](ModelConfig& c) { c.window = 3, c.window_pattern = "1:1"; }},
    {"parallel", [](ModelConfig& c) { c.block = BlockKind::parallel; }},
    {"untied", [](ModelConfig& c) { c.tie_embeddings = false; }},
    {"qk-norm", [](ModelConfig& c) { c.qk_norm = true; }},
    {"local filter", [](ModelConfig& c) { c.local_filter = true, c.kv_heads = 2; }},
    {"n-gram memory", with_tables},
    {"n-gram memory without a gate", [](ModelConfig& c) { with_tables(c), c.ngram_gate = false; }},
    {"all together",
     [](ModelConfig& c) {
         with_tables(c);
         c.norm = NormKind::rmsnorm, c.position = PositionKind::rope, c.rope_dims = 6,
         c.mlp = MlpKind::swiglu, c.bias = false, c.qkv_bias = true, c.kv_heads = 1, c.local_filter = true;
         c.window = 4, c.block = BlockKind::parallel, c.tie_embeddings = false, c.qk_norm = true;
     }},
};

constexpr int test_B = 2, test_T = 11;

TestBatch random_batch(const char* name, int vocab, int B = test_B, int T = test_T) {
    std::vector<int> tokens(B * T), targets(B * T);
    for (int i = 0; i < B * T; i++) {
        Random4 random = philox(random_key(7, name), i);
        tokens[i] = random.at[0] % vocab;
        targets[i] = random.at[1] % vocab;
    }
    return TestBatch(B, T, tokens, targets);
}

// Values are larger than the usual initial weights, so that nothing is nearly linear.
void randomize(Gpt& g) {
    g.layout.each([&](const TensorRow& row, const std::string& name, size_t offset) {
        auto values = random_values<float>(name.c_str(), row.size(), 0.3f, row.mean);
        set_tensor(g, offset, values.data(), values.size());
    });
    begin_tables(g, 7);
    for (int layer : layers_with_table(g)) {
        auto values = random_values<float>(text("rows of layer %d", layer).c_str(),
                                           all_rows(g).size() * (size_t)g.config.ngram_width, 0.3f);
        put(g, layer, all_rows(g), values, 1);
    }
}

double loss_of(Gpt& g, const TestBatch& batch) {
    Batch on_device = looked_up(g, batch);
    forward(g, on_device);
    classify(g, on_device, 0, false);
    cudaCheck(cudaStreamSynchronize(g.stream));
    double total = 0;
    for (float loss : from_device(g.acts[0].losses, (size_t)(*batch).B * (*batch).T)) total += loss;
    return total / batch.valid();
}

TEST_CASE("gradients agree with finite differences for every switch" * doctest::skip(!on_cpu)) {
    for (const Variant& variant : variants) {
        INFO(variant.name);
        ModelConfig config = small_config();
        variant.change(config);
        Gpt g(config, {test_B, test_T, true, Recompute::none, 8}, {});
        randomize(g);
        TestBatch batch = random_batch("differences", config.vocab_size);
        forward_backward(g, batch);
        // set() replaces the model's values of this tensor
        auto check = [&](const std::string& name, const std::vector<float>& start,
                         const std::vector<double>& gradient,
                         const std::function<void(const std::vector<float>&)>& set) {
            INFO(name);
            const size_t size = start.size();
            auto direction = random_values<float>(("direction " + name).c_str(), size);
            double slope = 0, norm = 0;
            for (size_t i = 0; i < size; i++)
                slope += gradient[i] * direction[i], norm += direction[i] * direction[i];
            double step = 1e-2 / std::sqrt(norm), loss[2];
            for (int side = 0; side < 2; side++) {
                auto moved = start;
                for (size_t i = 0; i < size; i++) moved[i] += (float)((side ? step : -step) * direction[i]);
                set(moved);
                loss[side] = loss_of(g, batch);
            }
            set(start);
            double gradient_norm = 0;
            for (double value : gradient) gradient_norm += value * value;
            double measured = (loss[1] - loss[0]) / (2 * step);
            // the limits allow for rounding of the loss, then of the slope itself
            CHECK(std::abs(measured - slope) < 2e-6 / step + 2e-3 * std::sqrt(gradient_norm * norm / size));
        };
        std::map<int, std::vector<double>> of_rows;  // before lookups clear them
        for (int layer : layers_with_table(g)) of_rows[layer] = gradient_of_rows(g, layer, batch);
        for (auto& [layer, gradient] : of_rows) {
            auto start = fetch(g, layer, all_rows(g));
            check(text("rows of layer %d", layer), {start.begin(), start.end()}, gradient,
                  [&](auto& values) { put(g, layer, all_rows(g), values, 1); });
        }
        g.layout.each([&](const TensorRow& row, const std::string& name, size_t offset) {
            auto start = from_device((float*)(void*)g.state.params(0) + offset, row.size());
            check(name, start, gradient_of(g, offset, row.size()),
                  [&](auto& values) { set_tensor(g, offset, values.data(), values.size()); });
        });
    }
}

// If a layer's attention output is projected to zero, its window does not matter.
TEST_CASE("with a pattern of windows each layer has its own") {
    auto loss = [](int window, const char* pattern, const char* without_attention) {
        ModelConfig config = small_config();
        config.window = window, config.window_pattern = pattern;
        Gpt g(config, {test_B, test_T, false, Recompute::none, 8}, inference);
        randomize(g);
        g.layout.each([&](const TensorRow& row, const std::string& name, size_t offset) {
            std::vector<float> zeros(row.size());
            if (name.starts_with(without_attention)) set_tensor(g, offset, zeros.data(), zeros.size());
        });
        return loss_of(g, random_batch("windows", config.vocab_size));
    };
    CHECK(loss(3, "1:1", "layers.1.attproj.") == loss(3, "", "layers.1.attproj."));
    CHECK(loss(3, "1:1", "layers.1.attproj.") != loss(0, "", "layers.1.attproj."));
    CHECK(loss(3, "1:1", "layers.0.attproj.") == loss(0, "", "layers.0.attproj."));
    CHECK(loss(3, "1:1", "layers.0.attproj.") != loss(3, "", "layers.0.attproj."));
}

// The bits of parameters, and of rows of tables, after two steps.
std::vector<floatX> trained(const ModelConfig& config, Recompute recompute, int T = test_T,
                            bool fp8 = false) {
    Gpt g(config,
          {.B = test_B, .T = T, .training = true, .recompute = recompute, .loss_chunk = 8, .fp8 = fp8},
          with_master);
    initialize(g.state, 5);
    begin_tables(g, 5);
    for (int step = 0; step < 2; step++) {
        TestBatch batch = random_batch(step ? "second" : "first", config.vocab_size, test_B, T);
        forward_backward(g, batch);
        update(g, adamw_optimizer({1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, step + 1, false}, 0), 1.0f,
               {1e-2f, 1e-8f, step + 1});
        g.products.weights_changed(false);
        CHECK(read_result(g, batch.valid()).finite);
    }
    auto bits = from_device(g.state.params(0), g.layout.size());
    for (int layer : layers_with_table(g)) {
        auto rows = fetch(g, layer, all_rows(g));
        bits.insert(bits.end(), rows.begin(), rows.end());
    }
    return bits;
}

TEST_CASE("recomputation and repetition do not change a bit") {
    for (const Variant& variant : variants) {
        if (!on_cpu && &variant != std::begin(variants) && &variant != std::end(variants) - 1)
            continue;  // slow on other devices
        INFO(variant.name);
        ModelConfig config = small_config();
        variant.change(config);
        auto plain = trained(config, Recompute::none);
        CHECK(same_bits(trained(config, Recompute::none), plain));
        CHECK(same_bits(trained(config, Recompute::elementwise), plain));
        CHECK(same_bits(trained(config, Recompute::mlp), plain));
        CHECK(same_bits(trained(config, Recompute::block), plain));
    }
}

TEST_CASE("recomputation does not change a bit in fp8, which differs from bf16 by a little") {
    if (!has_products_in_bf16 || !multiplies_fp8(capability_of(device_properties())))
        SKIP("fp8 is refused here, by precision or card");
    constexpr int T = 16;
    ModelConfig gpt = small_config();
    gpt.channels = 32, gpt.heads = 2, gpt.kv_heads = 0, gpt.head_size = 0, gpt.mlp_width = 48,
    gpt.context = T;
    ModelConfig llama = gpt, yuan = gpt;
    llama.norm = NormKind::rmsnorm, llama.position = PositionKind::rope, llama.mlp = MlpKind::swiglu;
    llama.bias = false, llama.qk_norm = true, llama.block = BlockKind::parallel;
    yuan.mlp = MlpKind::swiglu, yuan.local_filter = true;
    for (ModelConfig* config : {&gpt, &llama, &yuan}) {
        complete(*config);
        auto plain = trained(*config, Recompute::none, T, true), bf16 = trained(*config, Recompute::none, T);
        for (Recompute kind : {Recompute::elementwise, Recompute::mlp, Recompute::block}) {
            CAPTURE((int)kind);
            CHECK(same_bits(trained(*config, kind, T, true), plain));
        }
        CHECK_FALSE(same_bits(plain, bf16));
        std::vector<double> a(plain.begin(), plain.end()), b(bf16.begin(), bf16.end());
        CHECK(relative_error(b, a) < 0.1);
    }
}

TEST_CASE("recomputation keeps less") {
    ModelConfig config = small_config();
    auto bytes = [&](bool training, Recompute recompute) {
        Stage stage(config, {}, {}, training);
        auto table = activation_table(config, {8, 16, training, recompute, 8}, stage);
        return memory_total(memory_of<ActivationArrays>(sizeof(floatX), table, stage));
    };
    CHECK(bytes(true, Recompute::elementwise) < bytes(true, Recompute::none));
    CHECK(bytes(true, Recompute::mlp) < bytes(true, Recompute::elementwise));
    CHECK(bytes(true, Recompute::block) < bytes(true, Recompute::mlp));
    CHECK(bytes(false, Recompute::none) < bytes(true, Recompute::block));
}

TEST_CASE("the least that fits is recomputed") {
    ModelConfig config = small_config();
    auto bytes = [&](Recompute kind) {
        return memory_total(memory_classes(config, {8, 16, true, kind, 8}, {}));
    };
    auto chosen = [&](size_t available) {
        return least_recomputation([&](Recompute kind) { return bytes(kind) <= available; });
    };
    Recompute kinds[] = {Recompute::none, Recompute::elementwise, Recompute::mlp, Recompute::block};
    for (int i = 0; i < 4; i++) {
        CHECK(chosen(bytes(kinds[i])) == kinds[i]);
        CHECK(chosen(bytes(kinds[i]) - 1) == kinds[std::min(i + 1, 3)]);  // block even if it does not fit
    }
}

TEST_CASE("accumulated micro-batches are one batch") {
    ModelConfig config = small_config();
    TestBatch whole = random_batch("whole", config.vocab_size, 2, test_T);
    Gpt g(config, {2, test_T, true, Recompute::none, 64}, with_master);
    randomize(g);
    forward_backward(g, whole);
    auto want = gradient_of(g, 0, g.layout.size());
    float loss = read_result(g, whole.valid()).loss;
    auto tokens = from_device((*whole).tokens, 2 * test_T),
         targets = from_device((*whole).targets, 2 * test_T);
    std::unique_ptr<TestBatch> part;
    auto load = [&](int row, int) {
        cudaCheck(cudaStreamSynchronize(g.stream));  // the previous batch is freed here
        part = std::make_unique<TestBatch>(
            1, test_T, std::vector(tokens.begin() + row * test_T, tokens.begin() + (row + 1) * test_T),
            std::vector(targets.begin() + row * test_T, targets.begin() + (row + 1) * test_T));
        return **part;
    };
    // gradients of matrices need no clearing before a step
    for (int unit : g.layout.held()) {
        size_t before = g.layout.before_matrices(unit);
        for (const TensorPart& part : g.layout.parts(unit, before, g.layout.unit_size(unit))) {
            std::vector<float> poison(part.count, NAN);
            copy_to_device(g.state.grads(unit) + part.at, poison.data(), part.count, g.stream);
        }
    }
    zero_gradients(g);
    accumulate_gradients(g, 2, load, 1.0f / whole.valid());
    CHECK(relative_error(gradient_of(g, 0, g.layout.size()), want) < tolerance<floatX>);
    CHECK(read_result(g, whole.valid()).loss == doctest::Approx(loss).epsilon(1e-6));
}

TEST_CASE("a step that is not finite leaves the weights as they were") {
    ModelConfig config = small_config();
    Gpt g(config, {test_B, test_T, true, Recompute::none, 8}, with_master);
    initialize(g.state, 5);
    TestBatch batch = random_batch("first", config.vocab_size);
    forward_backward(g, batch);
    cudaCheck(cudaStreamSynchronize(g.stream));
    float infinity = INFINITY;
    copy_to_device(g.gradients(1)[qkvw] + 3, &infinity, 1, g.stream);
    auto before = from_device(g.state.params(0), g.layout.size());
    auto moment = from_device(g.state.owned_slot(Slot::m, 0), g.layout.size());
    g.state.update(g.stats.data, adamw_optimizer({1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, false}, 0), 1.0f);
    CHECK_FALSE(read_result(g, batch.valid()).finite);
    CHECK(same_bits(from_device(g.state.params(0), g.layout.size()), before));
    CHECK(same_bits(from_device(g.state.owned_slot(Slot::m, 0), g.layout.size()), moment));
    CHECK(first_bad_gradient(g.state) == "layers.0.qkv.weight[3] = inf");
}

TEST_CASE("a step whose loss is not finite leaves every row of a table as it was") {
    ModelConfig config = small_config();
    with_tables(config);
    Gpt g(config, {test_B, test_T, true, Recompute::none, 8}, with_master);
    initialize(g.state, 5);
    begin_tables(g, 5);
    auto step = [&](int number, bool fails) {
        TestBatch batch = random_batch(fails ? "second" : "first", config.vocab_size);
        forward_backward(g, batch);
        if (fails) g.stats.poison(g.stream);  // although the gradients are finite
        update(g, adamw_optimizer({1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, number, false}, 0), 1.0f,
               {1e-2f, 1e-8f, number});
        CHECK(read_result(g, batch.valid()).finite != fails);
    };
    auto tables = [&] {
        std::vector<std::pair<std::vector<floatX>, std::vector<float>>> all;
        for (int layer : layers_with_table(g))
            all.push_back({fetch(g, layer, all_rows(g)), squares_of_rows(g, layer)});
        return all;
    };
    auto fresh = tables();
    step(1, false);
    auto before = tables();
    step(2, true);
    auto after = tables();
    for (size_t i = 0; i < before.size(); i++) {
        CHECK_FALSE(same_bits(before[i].first, fresh[i].first));
        CHECK_FALSE(same_bits(before[i].second, fresh[i].second));
        CHECK(same_bits(after[i].first, before[i].first));
        CHECK(same_bits(after[i].second, before[i].second));
    }
}

TEST_CASE("the statistics of a step are sent before its weights change") {
    ModelConfig config = small_config();
    Gpt g(config, {test_B, test_T, true, Recompute::none, 8}, with_master);
    initialize(g.state, 5);
    TestBatch batch = random_batch("first", config.vocab_size);
    forward_backward(g, batch);
    cudaCheck(cudaStreamSynchronize(g.stream));
    size_t size = g.layout.size();
    auto before = from_device(g.state.params(0), size);
    Buffer<floatX> when_sent(size);
    g.state.update(g.stats.data, adamw_optimizer({1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, false}, 0), 1.0f, [&] {
        g.stats.send(g.stream);
        cudaCheck(cudaMemcpyAsync(when_sent, g.state.params(0), size * sizeof(floatX),
                                  cudaMemcpyDeviceToDevice, g.stream));
    });
    StepResult sent = g.stats.result(batch.valid(), g.mesh), stats = read_result(g, batch.valid());
    CHECK(sent.finite);
    CHECK(sent.loss == stats.loss);
    CHECK(sent.gradient_norm == stats.gradient_norm);
    CHECK(sent.gradient_norm > 0);
    CHECK(same_bits(from_device((floatX*)when_sent, size), before));
    CHECK_FALSE(same_bits(from_device(g.state.params(0), size), before));
}

TEST_CASE("initial weights depend on the seed and the tensor's name only") {
    ModelConfig shallow = small_config(), deep = small_config();
    deep.layers = 3;
    Gpt a(shallow, {1, 4, false, Recompute::none, 4}, inference),
        b(deep, {1, 4, false, Recompute::none, 4}, inference);
    initialize(a.state, 5);
    initialize(b.state, 5);
    size_t count = (size_t)qkv_width(shallow) * shallow.channels;
    CHECK(same_bits(from_device(a.weights(2)[qkvw], count), from_device(b.weights(2)[qkvw], count)));
    CHECK_FALSE(same_bits(from_device(a.weights(1)[qkvw], count), from_device(a.weights(2)[qkvw], count)));
    initialize(b.state, 6);
    CHECK_FALSE(same_bits(from_device(a.weights(2)[qkvw], count), from_device(b.weights(2)[qkvw], count)));
    double squares = 0;
    for (double value : to_doubles(from_device(a.weights(1)[qkvw], count))) squares += value * value;
    CHECK(std::sqrt(squares / count) == doctest::Approx(0.02).epsilon(0.05));
}

// Models in which tokens affect each other through more than plain attention.
const Variant by_position[] = {
    {"rope", [](ModelConfig& c) { c.position = PositionKind::rope, c.rope_dims = 6; }},
    {"learned", [](ModelConfig&) {}},
    {"local filter",
     [](ModelConfig& c) { c.position = PositionKind::rope, c.rope_dims = 6, c.local_filter = true; }},
    {"n-gram memory",
     [](ModelConfig& c) { c.position = PositionKind::rope, c.rope_dims = 6, with_tables(c); }},
};

// The output of the last norm in rows [first, first + count), and the gradients of all parameters and rows of
// tables.
std::pair<std::vector<floatX>, std::vector<float>> outputs_and_gradients(Gpt& g, const TestBatch& batch,
                                                                         int first, int count, float dloss) {
    zero_gradients(g);
    accumulate_gradients(g, looked_up(g, batch), dloss, true);
    cudaCheck(cudaStreamSynchronize(g.stream));
    size_t C = g.config.channels;
    auto gradients = from_device(g.state.grads(0), g.layout.size());
    for (int layer : layers_with_table(g)) {
        auto of_rows = gradient_of_rows(g, layer, batch);
        gradients.insert(gradients.end(), of_rows.begin(), of_rows.end());
    }
    return {from_device(g.acts[0].normf + first * C, count * C), gradients};
}

// A document after another one in a row, and by itself. Only its own tokens are predicted.
TEST_CASE("documents do not see each other, and send each other no gradients") {
    for (const Variant& variant : by_position) {
        INFO(variant.name);
        ModelConfig config = small_config();
        variant.change(config);
        bool learned = config.position == PositionKind::learned;  // rotary embeddings encode distances only
        Gpt g(config, {1, 12, true, Recompute::none, 12}, with_master);
        randomize(g);
        std::vector<int> both = {3, 9, 4, 4, 7, 1, 20, 21, 22, 23, 24, 25}, targets(6, -1),
                         alone(both.begin() + 6, both.end());
        targets.insert(targets.end(), alone.begin(), alone.end());
        std::vector<int> starts = {0, 0, 0, 0, 0, 0, 6, 6, 6, 6, 6, 6};
        std::vector<int> positions;
        for (int t = 0; t < 12; t++) positions.push_back(learned ? t - starts[t] : t);
        TestBatch joined(1, 12, both, targets, positions, starts), single(1, 6, alone, alone);
        auto [behind, its_gradients] = outputs_and_gradients(g, joined, 6, 6, 1.0f / 6);
        auto [first, gradients] = outputs_and_gradients(g, single, 0, 6, 1.0f / 6);
        CHECK(relative_error(to_doubles(behind), to_doubles(first)) < (exact ? 1e-6 : 3e-2));
        CHECK(relative_error(to_doubles(its_gradients), to_doubles(gradients)) < (exact ? 1e-6 : 3e-2));
    }
}

TEST_CASE("other documents' tokens change no bit of a document's outputs and gradients") {
    for (const Variant& variant : by_position) {
        INFO(variant.name);
        ModelConfig config = small_config();
        variant.change(config);
        Gpt g(config, {2, 12, true, Recompute::none, 24}, with_master);
        randomize(g);
        // the document of 5 tokens in the middle of the second row
        const int first = 16, count = 5;
        std::vector<int> starts = {0, 0, 0, 3, 3, 5, 5, 5, 5, 9, 9, 9, 0, 0, 0, 0, 4, 4, 4, 4, 4, 9, 9, 9};
        auto among = [&](const char* others) {
            std::vector<int> tokens = random_rows(others, 24, config.vocab_size), targets(24, -1);
            for (int n = first; n < first + count; n++) tokens[n] = n, targets[n] = n + 1;
            TestBatch packed(2, 12, tokens, targets, {}, starts);
            return outputs_and_gradients(g, packed, first, count, 1.0f / count);
        };
        auto [out, gradients] = among("some");
        auto [again, its_gradients] = among("others");
        CHECK(same_bits(out, again));
        CHECK(std::ranges::equal(gradients, its_gradients));  // -0 equals 0
    }
}

// Sampling is done on the host for every device.
TEST_CASE("a sample depends on its key only, and top-k 1 is greedy" *
          doctest::test_suite(on_cpu ? "" : "long")) {
    ModelConfig config = small_config();
    Gpt g(config, {1, 16, false, Recompute::none, 16}, inference);
    randomize(g);
    auto sample = [&](Sampling sampling, uint64_t key, int end = -1, size_t most = 24) {
        std::vector<int> tokens;
        GptPasses passes(g);
        Generator writer(passes, {{1, 2, 3}});
        generate_texts(writer, 24, {end}, sampling, {key}, [&](int, int token) {
            tokens.push_back(token);
            return tokens.size() < most;
        });
        return tokens;
    };
    auto first = sample({}, 11);
    CHECK(first.size() == 24);
    CHECK(sample({}, 11) == first);
    CHECK(sample({}, 12) != first);
    CHECK(sample({.top_k = 1}, 11) == sample({.temperature = 0}, 12));
    auto end = std::find(first.begin(), first.end(), first[9]);
    CHECK(sample({}, 11, first[9]) == std::vector<int>(first.begin(), end));
    CHECK(sample({}, 11, -1, 5) == std::vector<int>(first.begin(), first.begin() + 5));
}

TEST_CASE("with a key/value cache texts go on as without, beyond the context too") {
    constexpr int count = 3, steps = on_cpu ? 40 : 12;
    for (const Variant& variant : variants) {
        std::string name = variant.name;
        if (!on_cpu && name != "plain" && name != "window" && name != "all together") continue;
        for (int prompt_tokens : on_cpu ? std::vector<int>{1, 5, 16, 37} : std::vector<int>{20}) {
            INFO(variant.name);
            INFO(prompt_tokens);
            ModelConfig config = small_config();
            variant.change(config);
            complete(config);
            Gpt without(config, {1, 16, false, Recompute::none, 1}, inference);
            Gpt with(config,
                     {.B = 1,
                      .T = 16,
                      .training = false,
                      .loss_chunk = count,
                      .cache_rows = count,
                      .cache_length = 16},
                     inference);
            randomize(without);
            randomize(with);
            // two equal prompts, and a shorter one
            std::vector<int> prompt;
            for (int i = 0; i < prompt_tokens; i++) prompt.push_back((i * 7 + 3) % config.vocab_size);
            std::vector<std::vector<int>> prompts = {
                prompt, prompt, {prompt.begin(), prompt.begin() + (prompt_tokens + 1) / 2}};
            GptPasses passes_with(with), passes_without(without);
            Generator cached(passes_with, prompts), computed(passes_without, prompts);
            double worst = 0;
            for (int step = 0; step < steps; step++) {
                auto got = cached.next(), want = computed.next();
                std::vector<int> tokens;
                for (int i = 0; i < count; i++) {
                    std::vector<double> a(got[i].begin(), got[i].end()), b(want[i].begin(), want[i].end());
                    worst = std::max(worst, relative_error(a, b));
                    tokens.push_back((step * step + 11 * i + 1) % config.vocab_size);
                }
                std::vector<int> same = tokens;
                cached.add(tokens);
                computed.add(same);
            }
            CHECK(worst < (exact ? 1e-5 : 5e-2));
        }
    }
}

TEST_CASE("the schedules reach their ends") {
    Options o;
    o.steps = 100, o.warmup_steps = 10, o.final_learning_rate = 0.1f, o.decay_fraction = 0.2f;
    for (auto way : {LearningRateSchedule::cosine, LearningRateSchedule::linear, LearningRateSchedule::wsd}) {
        o.schedule = way;
        CHECK(schedule(o, 0) == doctest::Approx(0.1));
        CHECK(schedule(o, 9) == doctest::Approx(1));
        CHECK(schedule(o, 99) == doctest::Approx(0.1));
        for (int step = 10; step < 100; step++) CHECK(schedule(o, step) <= schedule(o, step - 1));
    }
    o.schedule = LearningRateSchedule::wsd;
    CHECK(schedule(o, 79) == 1);
    o.schedule = LearningRateSchedule::constant;
    CHECK(schedule(o, 99) == 1);
    // a decay longer than the steps after warm-up still starts from the peak
    o.schedule = LearningRateSchedule::wsd, o.warmup_steps = 50, o.decay_fraction = 1;
    CHECK(schedule(o, 50) > 0.97f);
}

TEST_CASE("the table of tensors has as many parameters as the options promise") {
    for (const Preset& preset : preset_table()) {
        INFO(preset.name);
        ModelConfig config = preset.config;
        complete(config);
        CHECK(parameter_layout(config).parameter_count() == (size_t)parameter_count(config));
    }
    for (const Variant& variant : variants) {
        INFO(variant.name);
        ModelConfig config = small_config();
        variant.change(config);
        CHECK(parameter_layout(config).parameter_count() == (size_t)parameter_count(config));
    }
}

TEST_CASE("FLOPs follow the published formula") {
    // 72 B s l h^2 (1 + s/(6h) + V/(12 l h)) for a GPT with an MLP of 4h (Korthikanti et al. 2022)
    ModelConfig c;
    c.layers = 96, c.channels = 12288, c.heads = 96, c.vocab_size = 51200;
    complete(c);
    double l = 96, h = 12288, s = 2048, V = 51200;
    CHECK(flops_per_token(c, 2048, false) ==
          doctest::Approx(72 * l * h * h * (1 + s / (6 * h) + V / (12 * l * h))));
    CHECK(flops_per_token(c, 2048, true) < flops_per_token(c, 2048, false));
}

}  // namespace
