/*
Products that are timed: candidates that differ in their last bits, what is chosen among them, and the choice
on its way to a file, to other ranks and back. Runs on any number of ranks.
*/
#include "test/file_testing.h"
#include "test/ranks.h"
#include "test/simulated.h"
#include "test/testing.h"

#include "comm/product_choices.h"
#include "kernels/matmul.cuh"

namespace {

// One product of each sort that a linear layer makes.
struct Layer {
    int N, C = 48, OC = 40;
    Buffer<floatX> inp, weight, bias, dout;
    Buffer<floatX> out{(size_t)N * OC}, act{(size_t)N * OC}, dinp{(size_t)N * C};
    Buffer<float> dweight{std::vector<float>((size_t)OC * C)};

    explicit Layer(int N)
        : N(N),
          inp(random_values<floatX>("inp", (size_t)N * C)),
          weight(random_values<floatX>("weight", (size_t)OC * C)),
          bias(random_values<floatX>("bias", OC)),
          dout(random_values<floatX>("dout", (size_t)N * OC)) {}
    ~Layer() { cudaStreamSynchronize(test_stream()); }

    void forward() { matmul_forward(out, inp, weight, bias, N, C, OC, test_stream()); }
    void gelu() { matmul_gelu_forward(Gelu::tanh, act, out, inp, weight, bias, N, C, OC, test_stream()); }
    void backward() {
        matmul_backward_input(dinp, dout, weight, N, C, OC, test_stream());
        matmul_backward_weight(dweight, dout, inp, N, C, OC, test_stream());
    }

    Product product() const { return {.m = OC, .n = N, .k = C, .transpose_a = true}; }
    Operands operands() { return {.a = weight, .b = inp, .d = out, .bias = bias}; }
    Operands with_gelu() { return {.a = weight, .b = inp, .d = act, .bias = bias, .pre_gelu = out}; }
    std::string kind() { return kind_text({product(), operands()}); }
    std::string gelu_kind() { return kind_text({product(), with_gelu()}); }

    // By each of the algorithms that the library proposes.
    std::vector<std::vector<double>> outs() {
        std::vector<std::vector<double>> results;
        for (const std::string& bytes : algorithms()) {
            choose_algorithms({{kind(), bytes}});
            forward();
            results.push_back(out.doubles());
        }
        choose_algorithms({});
        return results;
    }

    std::vector<std::string> algorithms() {
        std::vector<std::string> all;
        ProductKind kind(product(), operands());
        for (auto& algorithm : proposed_algorithms(kind, describe(kind, operands()), most_candidates))
            all.push_back(algorithm.bytes());
        return all;
    }
};

bool is_chosen(const Product& product, const Operands& operands) {
    return find_plan(product, operands).chosen;
}

// What the products of the layer take from now on is unknown again.
struct Forgetful {
    Forgetful() { cublas().plans.clear(), choose_algorithms({}); }
    ~Forgetful() { cublas().plans.clear(), choose_algorithms({}); }
};

}  // namespace

TEST_CASE("the algorithm that is chosen makes the product") {
    Forgetful forgetful;
    Layer layer(35);
    auto outs = layer.outs();
    REQUIRE(outs.size() > 1);
    bool differ = false;
    for (auto& out : outs) {
        CHECK(relative_error(out, outs[0]) < tolerance<floatX>);
        differ = differ || out != outs[0];
    }
    if (simulated && sizeof(floatX) == sizeof(float)) CHECK(differ);  // elsewhere rounding may hide it
    for (size_t i : {outs.size() - 1, size_t(1)}) {
        choose_algorithms({{layer.kind(), layer.algorithms()[i]}});
        layer.forward();
        CHECK(layer.out.doubles() == outs[i]);
        CHECK(is_chosen(layer.product(), layer.operands()));
    }
}

TEST_CASE("what the library refuses is not taken") {
    Forgetful forgetful;
    Layer layer(36), other(37);
    layer.forward();
    auto usual = layer.out.doubles();
    std::vector<std::string> wrong = {std::string(3, 'x'), ""};
    if (simulated) {  // the library need not see what is wrong with these
        wrong.push_back(other.algorithms()[1]);
        wrong.push_back(std::string(64, '\xff'));
    }
    for (const std::string& bytes : wrong) {
        cublas().plans.clear();
        choose_algorithms({{layer.kind(), bytes}});
        layer.forward();
        CHECK_FALSE(is_chosen(layer.product(), layer.operands()));
        CHECK(layer.out.doubles() == usual);
    }
}

TEST_CASE("every kind of product is noted and timed") {
    Forgetful forgetful;
    Layer layer(64);
    auto step = [&] { layer.forward(), layer.backward(), layer.forward(); };
    NotedProducts noted = note_products(step);
    REQUIRE(noted.size() == 3);
    layer.gelu();  // is noted no more
    CHECK(noted.size() == 3);
    auto want = layer.out.doubles();
    auto tuned = tune_products(noted, test_stream());
    REQUIRE(tuned.size() == 3);
    for (const TunedProduct& product : tuned) {
        CHECK(product.algorithm.size() == sizeof(Algorithm));
        CHECK(product.seconds <= product.seconds_once);
        CHECK((product.changed || product.seconds == product.seconds_once));
    }
    step();
    CHECK(relative_error(layer.out.doubles(), want) < tolerance<floatX>);
    CHECK(tune_products(note_products(step), test_stream()).empty());
}

TEST_CASE("GELU as an epilogue or apart, whichever was chosen") {
    if (sizeof(floatX) != 2) return;  // always apart
    Forgetful forgetful;
    Layer layer(48);
    auto run = [&](const AlgorithmChoices& choices) {
        cublas().plans.clear();
        choose_algorithms(choices);
        layer.gelu();
        return layer.act.doubles();
    };
    auto apart = run({{layer.gelu_kind(), ""}});
    layer.forward();
    gelu_forward(Gelu::tanh, layer.act, layer.out, layer.out.size(), test_stream());
    CHECK(apart == layer.act.doubles());

    cublas().plans.clear();
    choose_algorithms({});
    auto tuned = tune_products(note_products([&] { layer.gelu(); }), test_stream());
    REQUIRE(tuned.size() == 2);  // without GELU first, for the other to be compared with
    CHECK(tuned[0].kind == layer.kind());
    CHECK(tuned[1].kind == layer.gelu_kind());
    auto chosen = run({{tuned[0].kind, tuned[0].algorithm}, {tuned[1].kind, tuned[1].algorithm}});
    CHECK(relative_error(chosen, apart) < tolerance<floatX>);
    CHECK(is_chosen(layer.product(), layer.with_gelu()));
}

TEST_CASE("a file of algorithms reads as it was written, or is refused") {
    TemporaryFolder folder;
    std::string path = folder / "algorithms.json";
    CHECK(read_algorithms(path).empty());
    AlgorithmTable table = {{"a card", {{"a kind", std::string("\0\xff\x10", 3)}, {"GELU", ""}}},
                            {"another", {{"a kind", "xyz"}}}};
    write_algorithms(path, table);
    CHECK(read_algorithms(path) == table);
    std::string whole = read_text(path);
    auto changed = [&](const std::string& from, const std::string& to) {
        std::string content = whole;
        return content.replace(content.find(from), from.size(), to);
    };
    for (const std::string& content :
         {whole.substr(0, whole.size() / 2), std::string(), std::string("[]"), std::string("{}"),
          changed("00ff", "00fe"), changed("a kind", "a kond"), changed("checksum", "chocksum"),
          std::string(R"({"algorithms": 3, "checksum": "x"})")}) {
        write_file(path, content);
        CHECK_THROWS_WITH_AS(read_algorithms(path), doctest::Contains("delete it to have the products"),
                             Error);
    }
    nlohmann::json strange = {{"a card", {{"a kind", 7}}}};
    write_file(path,
               nlohmann::json{{"algorithms", strange}, {"checksum", algorithm_checksum(strange)}}.dump());
    CHECK_THROWS_WITH_AS(read_algorithms(path), doctest::Contains("delete it to have the products"), Error);
}

TEST_CASE("all ranks choose alike, and again what is in the file") {
    Forgetful forgetful;
    const World& world = test_world();
    TemporaryFolder folder;  // of rank 0 it counts
    std::string file = folder / "algorithms.json";
    Layer common(50), own(60 + world.rank());  // as the stages of a pipeline
    auto step = [&] { common.forward(), common.backward(), own.forward(); };
    auto choose = [&](const std::string& origin) {
        cublas().plans.clear();
        return choose_products(world, file, origin, true, test_stream(), step);
    };
    auto chosen_by_all = [&] {
        std::vector<std::string> of_each = world.gather(choices_to_json(cublas().choices).dump());
        for (const std::string& of_rank : of_each) CHECK(of_rank == of_each[0]);
        return of_each[0];
    };
    auto notes = choose("");
    CHECK(notes.size() == 1);
    std::string chosen = chosen_by_all();
    CHECK(cublas().choices.size() == 3 + (size_t)world.size());
    if (world.is_root()) CHECK(read_algorithms(file)[cublas_setup()] == cublas().choices);

    choose_algorithms({});
    CHECK(choose("").empty());  // nothing is left to be timed
    CHECK(chosen_by_all() == chosen);

    std::string origin = file;
    file = folder / "of_a_run_that_goes_on.json";
    CHECK(choose(origin).empty());
    CHECK(chosen_by_all() == chosen);

    // an algorithm that is none is timed again, and what another card has chosen stays
    AlgorithmTable table = {{"another card", {{"a kind", "bytes"}}}, {cublas_setup(), cublas().choices}};
    table[cublas_setup()][common.kind()] = std::string(3, '\x01');
    if (world.is_root()) write_algorithms(file, table);
    CHECK(choose("").size() == 1);
    CHECK(is_chosen(common.product(), common.operands()));
    chosen_by_all();
    if (world.is_root()) {
        AlgorithmTable after = read_algorithms(file);
        CHECK(after["another card"] == table["another card"]);
        CHECK(after[cublas_setup()].size() == 3 + (size_t)world.size());
        CHECK(after[cublas_setup()][common.kind()] != std::string(3, '\x01'));
        write_file(file, "damaged");
    }
    CHECK_THROWS_AS(choose(""), CommonError);
    world.go_on();
}
