/*
Timing of products: candidates that differ in their last bits, the choice among them, and passing the choice
to a file, to other ranks and back. Runs on any number of ranks.
*/
// devices: simt-bf16 cuda
// ranks: 2 1
#include "test/support/file_testing.h"
#include "test/support/ranks.h"
#include "test/support/simulated.h"
#include "test/support/testing.h"

#include "comm/run_device.h"
#include "comm/settings.h"
#include "kernels/matmul.cuh"

namespace {

std::vector<std::string> proposed(const Product& product, const Operands& operands) {
    std::vector<std::string> all;
    ProductKind kind(product, operands);
    for (auto& algorithm : candidate_algorithms(kind, describe(kind, operands)))
        all.push_back(algorithm.bytes());
    return all;
}

// One product of each kind that a linear layer needs.
struct Layer {
    int N, C = 48, OC = 40;
    Buffer<floatX> inp, weight, bias, dout;
    Buffer<floatX> out{(size_t)N * OC}, act{(size_t)N * OC}, dinp{(size_t)N * C};
    Buffer<float> dweight{std::vector<float>((size_t)OC * C)}, dbias{std::vector<float>(OC)},
        sums{matmul_backward_bias_scratch(OC)};

    explicit Layer(int N)
        : N(N),
          inp(random_values<floatX>("inp", (size_t)N * C)),
          weight(random_values<floatX>("weight", (size_t)OC * C)),
          bias(random_values<floatX>("bias", OC)),
          dout(random_values<floatX>("dout", (size_t)N * OC)) {}
    ~Layer() { cudaStreamSynchronize(test_stream()); }

    void forward() { matmul_forward(out, inp, weight, bias, N, C, OC, test_stream()); }
    void gelu() { matmul_gelu_forward(Gelu::tanh, act, out, inp, weight, bias, N, C, OC, test_stream()); }
    void gelu_gradient() {
        matmul_backward_gelu(Gelu::tanh, dinp, inp, dout, weight, N, C, OC, test_stream());
    }
    void bias_gradient() { matmul_backward_weight(dweight, dout, inp, N, C, OC, test_stream(), dbias, sums); }
    void backward() {
        matmul_backward_input(dinp, dout, weight, N, C, OC, test_stream());
        matmul_backward_weight(dweight, dout, inp, N, C, OC, test_stream());
    }

    Product product() const {
        return {.m = OC, .n = N, .k = C, .transpose_a = true, .epilogue = Epilogue::bias};
    }
    Operands operands() { return {.a = weight, .b = inp, .d = out, .bias = bias}; }
    std::string kind() { return kind_text({product(), operands()}); }

    // The results of each algorithm that the library proposes.
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

    std::vector<std::string> algorithms() { return proposed(product(), operands()); }
};

bool is_chosen(const Product& product, const Operands& operands) {
    return find_plan(product, operands).chosen;
}

// Forgets all plans and chosen algorithms, before and after a test.
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
    if (simulated) {  // the real library need not detect what is wrong with these
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
    layer.bias_gradient();  // no longer noted
    CHECK(noted.size() == 3);
    auto want = layer.out.doubles();
    auto tuned = time_products(noted, test_stream());
    REQUIRE(tuned.size() == 3);
    for (const TunedProduct& product : tuned) {
        CHECK(product.algorithm.size() == sizeof(cublasLtMatmulAlgo_t));
        CHECK(product.seconds <= product.seconds_once);
        CHECK((product.changed || product.seconds == product.seconds_once));
    }
    step();
    CHECK(relative_error(layer.out.doubles(), want) < tolerance<floatX>);
    CHECK(time_products(note_products(step), test_stream()).empty());
}

TEST_CASE("an epilogue fused or not, whichever was chosen") {
    Forgetful forgetful;
    Layer layer(48);
    struct Case {
        Product product;
        Operands operands;
        std::function<void()> run, unfused;  // the current choices; no fused epilogues
        std::function<std::vector<double>()> result;
    };
    std::vector<Case> cases;
    auto weight_products = [&](auto&& product) {
        return [&layer, product] {
            cudaCheck(cudaMemsetAsync(layer.dweight, 0, layer.dweight.size() * sizeof(float), test_stream()));
            cudaCheck(cudaMemsetAsync(layer.dbias, 0, layer.dbias.size() * sizeof(float), test_stream()));
            product();
        };
    };
    cases.push_back(
        {{.m = layer.C,
          .n = layer.OC,
          .k = layer.N,
          .transpose_b = true,
          .accumulate = true,
          .epilogue = Epilogue::bias_gradient,
          .d_type = CUDA_R_32F},
         {.a = layer.inp, .b = layer.dout, .d = layer.dweight, .dbias = layer.dbias, .sums = layer.sums},
         weight_products([&] { layer.bias_gradient(); }),
         weight_products([&] {
             layer.backward();
             matmul_backward_bias(layer.dbias, layer.sums, layer.dout, layer.N, layer.OC, test_stream());
         }),
         [&] {
             auto both = layer.dweight.doubles(), dbias = layer.dbias.doubles();
             both.insert(both.end(), dbias.begin(), dbias.end());
             return both;
         }});
    if (sizeof(floatX) == 2) {  // otherwise GELU is always unfused
        cases.push_back(
            {{.m = layer.OC,
              .n = layer.N,
              .k = layer.C,
              .transpose_a = true,
              .epilogue = Epilogue::bias_gelu},
             {.a = layer.weight, .b = layer.inp, .d = layer.act, .bias = layer.bias, .pre_gelu = layer.out},
             [&] { layer.gelu(); },
             [&] {
                 layer.forward();
                 gelu_forward(Gelu::tanh, layer.act, layer.out, layer.out.size(), test_stream());
             },
             [&] { return layer.act.doubles(); }});
        cases.push_back({{.m = layer.C, .n = layer.N, .k = layer.OC, .epilogue = Epilogue::gelu_gradient},
                         {.a = layer.weight, .b = layer.dout, .d = layer.dinp, .pre_gelu = layer.inp},
                         [&] { layer.gelu_gradient(); },
                         [&] {
                             layer.backward();
                             gelu_backward(Gelu::tanh, layer.dinp, layer.dinp, layer.inp, layer.dinp.size(),
                                           test_stream());
                         },
                         [&] { return layer.dinp.doubles(); }});
    }
    for (Case& c : cases) {
        std::string kind = kind_text({c.product, c.operands});
        CAPTURE(kind);
        auto without = product_in_front(c.product, c.operands);
        std::string in_front = kind_text({without.first, without.second});
        auto result = [&](const AlgorithmChoices& choices) {
            cublas().plans.clear();
            choose_algorithms(choices);
            c.run();
            return c.result();
        };
        auto is_unfused = [&] { return find_plan(c.product, c.operands).unfused; };
        auto unfused = result({{kind, ""}});
        CHECK(is_unfused());
        CHECK(is_chosen(c.product, c.operands));
        c.unfused();
        CHECK(unfused == c.result());

        auto candidates = proposed(c.product, c.operands);
        if (simulated) CHECK(candidates.size() > 1);
        bool differ = false;
        for (const std::string& bytes : candidates) {
            auto fused = result({{kind, bytes}});
            CHECK_FALSE(is_unfused());
            CHECK(relative_error(fused, unfused) < tolerance<floatX>);
            differ = differ || fused != unfused;
        }
        if (simulated) CHECK(differ);  // epilogues see unrounded values, or sum in another order

        result({});
        bool usual = device_properties().major == 9 && c.product.epilogue != Epilogue::bias_gradient;
        CHECK(is_unfused() == (!usual || candidates.empty()));
        auto tuned = time_products(note_products(c.run), test_stream());
        REQUIRE(tuned.size() == 2);  // first the product without epilogue, to compare with
        CHECK(tuned[0].kind == in_front);
        CHECK(tuned[0].algorithm != "");
        CHECK(tuned[1].kind == kind);
        CHECK((tuned[1].algorithm == "") == is_unfused());
        c.run();
        auto once = c.result();
        CHECK(relative_error(once, unfused) < tolerance<floatX>);
        CHECK(result({{tuned[0].kind, tuned[0].algorithm}, {tuned[1].kind, tuned[1].algorithm}}) == once);
        CHECK(is_chosen(c.product, c.operands));
    }
}

TEST_CASE("cards offer what is little of their memory") {
    auto limits = [](int major, size_t memory) {
        cudaDeviceProp device = {};
        device.major = major;
        device.totalGlobalMem = memory;
        return workspace_limits(device);
    };
    constexpr size_t MiB = 1 << 20, GiB = 1 << 30;
    CHECK(limits(8, 24 * GiB) == std::vector{4 * MiB});
    CHECK(limits(8, 40 * GiB) == std::vector{4 * MiB, 128 * MiB});
    CHECK(limits(8, 79 * GiB) == std::vector{4 * MiB, 128 * MiB, 256 * MiB});
    CHECK(limits(9, 140 * GiB) == std::vector{32 * MiB, 128 * MiB, 256 * MiB});
    CHECK(limits(12, 24 * GiB) == std::vector{32 * MiB});
}

TEST_CASE("algorithms that need more memory are candidates where they may have it") {
    if (!simulated) SKIP("only the simulated library says what its algorithms need");
    Forgetful forgetful;
    struct Limits {
        std::vector<size_t> before;
        explicit Limits(std::vector<size_t> limits)
            : before(std::exchange(cublas().workspaces.limits, std::move(limits))) {}
        ~Limits() { cublas().workspaces.limits = before; }
    };
    constexpr size_t little = 1 << 17, much = 1 << 20;
    Layer layer(39);
    std::vector<std::string> all, few;
    {
        Limits limits({little});
        few = layer.algorithms();
        CHECK(few.size() == 2);
    }
    Limits limits({little, much / 2, much});
    all = layer.algorithms();
    REQUIRE(all.size() == 3);  // each once
    CHECK(std::vector(all.begin(), all.begin() + 2) == few);
    auto outs = layer.outs();
    CHECK(relative_error(outs[2], outs[0]) < tolerance<floatX>);
    // memory is allocated when it is needed, and existing memory is kept
    void* before = cublas().workspaces.of_stream(test_stream(), little);
    choose_algorithms({{layer.kind(), all[2]}});
    layer.forward();
    CHECK(is_chosen(layer.product(), layer.operands()));
    CHECK(layer.out.doubles() == outs[2]);
    CHECK(cublas().workspaces.of_stream(test_stream(), little) == before);
    CHECK(time_products(note_products([&] { layer.backward(); }), test_stream()).size() == 2);

    // a card with less memory does not use it
    cublas().plans.clear();
    cublas().workspaces.limits = {little};
    layer.forward();
    CHECK_FALSE(is_chosen(layer.product(), layer.operands()));
    CHECK(layer.out.doubles() == outs[0]);
}

TEST_CASE("products beside communication are kinds of their own") {
    Forgetful forgetful;
    Layer layer(41);
    auto multiprocessors = [&] {
        Product product = layer.product();
        cublasLtMatmulDesc_t operation = describe({product, layer.operands()}, layer.operands()).operation;
        int32_t target = -1;
        cublasCheck(cublasLtMatmulDescGetAttribute(operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &target,
                                                   sizeof target, nullptr));
        return target;
    };
    const int all = device_properties().multiProcessorCount;
    std::string alone = layer.kind();
    CHECK(multiprocessors() == 0);  // the library's default
    layer.forward();
    auto want = layer.out.doubles();
    NotedProducts noted;
    {
        SparedMultiprocessors spared(1);
        CHECK(layer.kind() == alone + ", 1 multiprocessors spared");
        CHECK(multiprocessors() == std::max(all - 1, 1));
        noted = note_products([&] { layer.forward(); });
        CHECK(relative_error(layer.out.doubles(), want) < tolerance<floatX>);
        gemm_rate(64, test_stream());  // nothing runs beside it
        int measured = 0;
        for (auto& [kind, plan] : cublas().plans) {
            if (kind.product.m != 64) continue;
            CHECK(kind.product.spared == 0);
            measured++;
        }
        CHECK(measured == 1);
        CHECK(spared_multiprocessors == 1);
    }
    CHECK(layer.kind() == alone);
    // both are timed, and the choices for both are kept
    auto tuned = time_products(noted, test_stream());
    REQUIRE(tuned.size() == 1);
    CHECK(tuned[0].kind == alone + ", 1 multiprocessors spared");
    CHECK_FALSE(is_chosen(layer.product(), layer.operands()));
    CHECK(time_products(note_products([&] { layer.forward(); }), test_stream())[0].kind == alone);
}

TEST_CASE("a device has no more multiprocessors to give than it has") {
    if (!simulated) SKIP("the library need not see it");
    Layer layer(42);
    ProductKind kind(layer.product(), layer.operands());
    ProductPlan plan = describe(kind, layer.operands());
    size_t workspace = cublas().workspaces.limits.front();
    CHECK(proposed_algorithms(kind, plan, 1, workspace).size() == 1);
    for (int32_t wrong : {-1, device_properties().multiProcessorCount + 1}) {
        set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, wrong);
        CHECK_THROWS_WITH_AS(proposed_algorithms(kind, plan, 1, workspace),
                             doctest::Contains("has no algorithm"), Error);
    }
    int64_t wide = 1;
    CHECK(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &wide,
                                         sizeof wide) == CUBLAS_STATUS_INVALID_VALUE);
}

TEST_CASE("multiprocessors that communication holds") {
    // for no messages of data ranks, messages of parameters, and messages of gradients
    auto held = [](MeshShape mesh, int row_chunks) {
        std::vector<int> held;
        for (DataMessages data : {DataMessages(), {.parameters = true}, {.gradients = true}})
            held.push_back(held_multiprocessors(mesh, row_chunks, data));
        return held;
    };
    using Held = std::vector<int>;
    constexpr int group = blocks_of_groups, links = 2 * blocks_of_links;
    CHECK(held({}, 1) == Held{0, 0, 0});
    CHECK(held({.tp = 8}, 1) == Held{0, 0, 0});
    CHECK(held({.tp = 8}, 4) == Held{group, group, group});
    CHECK(held({.pp = 4}, 1) == Held{links, links, links});
    CHECK(held({.dp = 8}, 1) == Held{0, 0, group});
    CHECK(held({.dp = 8, .shard = 8}, 1) == Held{0, group, group});
    CHECK(held({.tp = 2, .pp = 2, .dp = 2, .shard = 2}, 2) == Held(3, links + group));
}

TEST_CASE("messages of data ranks beside the passes of a step") {
    // p: messages of parameters, g: of gradients; neither sharded, only gradients sharded, and both
    auto beside = [](const PassOfStep& pass) {
        std::string text;
        for (auto [cut_params, cut_grads] : {std::pair{false, false}, {false, true}, {true, true}}) {
            DataMessages data = messages_beside(pass, cut_params, cut_grads);
            text += data.parameters ? "p" : "-";
            text += data.gradients ? "g " : "- ";
        }
        return text;
    };
    CHECK(beside({.forward = true, .first = true}) == "p- p- p- ");
    CHECK(beside({.forward = true}) == "-- -- p- ");
    CHECK(beside({.forward = true, .last = true}) == "-- -- p- ");
    CHECK(beside({.forward = false, .first = true}) == "-- -g pg ");
    CHECK(beside({.forward = false, .last = true}) == "-g -g pg ");
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
    TemporaryFolder folder;  // only that of rank 0 is used
    std::string file = folder / "algorithms.json";
    Layer common(50), own(60 + world.rank());  // ranks differ like the stages of a pipeline
    auto step = [&] {
        common.forward(), common.backward(), own.forward();
        common.gelu(), common.gelu_gradient(), common.bias_gradient();
    };
    // in fp32 GELU is always unfused
    const size_t kinds = (sizeof(floatX) == 2 ? 6 : 4) + (size_t)world.size();
    auto choose = [&](const std::string& origin) {
        cublas().plans.clear();
        return choose_products(world, file, origin, true, test_stream(), step);
    };
    auto chosen_by_all = [&] {
        std::vector<std::string> of_each = world.all_gather(choices_to_json(cublas().choices).dump());
        for (const std::string& of_rank : of_each) CHECK(of_rank == of_each[0]);
        return of_each[0];
    };
    auto notes = choose("");
    CHECK(notes.size() == 1);
    std::string chosen = chosen_by_all();
    CHECK(cublas().choices.size() == kinds);
    if (world.is_root()) CHECK(read_algorithms(file)[cublas_setup()] == cublas().choices);

    choose_algorithms({});
    CHECK(choose("").empty());  // nothing is left to time
    CHECK(chosen_by_all() == chosen);

    std::string origin = file;
    file = folder / "of_a_run_that_goes_on.json";
    CHECK(choose(origin).empty());
    CHECK(chosen_by_all() == chosen);

    // a product whose stored algorithm is invalid is timed again, and another card's choices are kept
    AlgorithmTable table = {{"another card", {{"a kind", "bytes"}}}, {cublas_setup(), cublas().choices}};
    table[cublas_setup()][common.kind()] = std::string(3, '\x01');
    if (world.is_root()) write_algorithms(file, table);
    CHECK(choose("").size() == 1);
    CHECK(is_chosen(common.product(), common.operands()));
    chosen_by_all();
    if (world.is_root()) {
        AlgorithmTable after = read_algorithms(file);
        CHECK(after["another card"] == table["another card"]);
        CHECK(after[cublas_setup()].size() == kinds);
        CHECK(after[cublas_setup()][common.kind()] != std::string(3, '\x01'));
        write_file(file, "damaged");
    }
    CHECK_THROWS_AS(choose(""), CommonError);
    world.recover();
}
