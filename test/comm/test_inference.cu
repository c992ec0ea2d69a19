// Partitioning a model for inference: over the fewest ranks that it fits on, or as requested.
// devices: cpu
// ranks: 8 1
#include "comm/inference.h"
#include "test/support/file_testing.h"
#include "test/support/ranks.h"
#include "test/support/testing.h"

namespace {

Options a_model() {
    Options o;
    o.layers = 8, o.channels = 64, o.heads = 8, o.vocab_size = 512, o.context = 32;
    complete(static_cast<ModelConfig&>(o));
    return o;
}

Workload shape(Options& o) {
    o.micro_batch = 2, o.sequence_length = 32;
    return {2, 32, false, Recompute::none, 64};
}

// The cut as "tp pp dp zero".
std::string cut_of(const InferencePlan& plan) {
    return text("%d %d %d %d", plan.options.tp, plan.options.pp, plan.options.dp, plan.options.zero);
}

std::string cut(const InferenceCut& asked, size_t free, const Options& model = a_model()) {
    return cut_of(plan_inference(model, asked, test_world(), shape, {free}));
}

// Bytes that a rank needs for the model with this cut.
size_t needs(const InferenceCut& cut) {
    return plan_inference(a_model(), cut, test_world(), shape, {SIZE_MAX}).memory.needs();
}

}  // namespace

TEST_CASE("inference: the fewest ranks that the model fits on, tensor ranks before stages") {
    if (test_world().size() == 1) {
        CHECK(cut({}, SIZE_MAX) == "1 1 1 0");
        return;
    }
    CHECK(cut({}, SIZE_MAX) == "1 1 8 0");
    CHECK(cut({}, needs({1, 1})) == "1 1 8 0");
    CHECK(cut({}, needs({1, 1}) - 1) == "2 1 4 0");
    CHECK(cut({}, needs({2, 1}) - 1) == (needs({1, 2}) < needs({2, 1}) ? "1 2 4 0" : "4 1 2 0"));
    CHECK(cut({.pp = 2}, SIZE_MAX) == "1 2 4 0");
    CHECK(cut({.pp = 2}, needs({1, 2}) - 1) == "2 2 2 0");
    CHECK(cut({.tp = 2}, needs({2, 1}) - 1) == "2 2 2 0");
    CHECK(cut({.tp = 4, .pp = 2}, SIZE_MAX) == "4 2 1 0");
    CHECK(cut({.zero = 3}, needs({1, 1, 3})) == "1 1 8 3");
    CHECK((double)needs({1, 1, 3}) < 0.6 * (double)needs({1, 1}));
    CHECK(needs({4, 2}) < needs({1, 1}) / 3);
    Options odd = a_model();
    odd.heads = odd.kv_heads = 1;  // not divisible over tensor ranks
    CHECK(cut({}, needs({1, 1}) / 2, odd) == "1 4 2 0");
}

TEST_CASE("inference: tables are in a file if they do not fit into memory") {
    Options model = a_model();
    model.ngram = "2", model.ngram_rows = 1 << 20;
    complete(static_cast<ModelConfig&>(model));
    auto place = [&](size_t free) {
        return plan_inference(model, {1, 1}, test_world(), shape, {free}).settings.table_place;
    };
    const size_t table = ((size_t)1 << 20) * 64 * sizeof(floatX) / (size_t)test_world().size();
    CHECK(place(SIZE_MAX) == TablePlace::device);
    CHECK(place(table) == TablePlace::disk);
    model.ngram_place = TablePlace::disk;
    CHECK(place(SIZE_MAX) == TablePlace::host);
    CHECK(place(table) == TablePlace::disk);
}

TEST_CASE("inference: a cut that does not divide the model or the ranks, and a model that is too large") {
    int ranks = test_world().size();
    auto refusal = [&](InferenceCut asked, size_t free = SIZE_MAX) {
        std::string message = error_of([&] { cut(asked, free); });
        test_world().recover();
        return message;
    };
    CHECK(refusal({.tp = 3}).starts_with("--tp 3: does not divide --heads 8; give "));
    CHECK(refusal({.pp = 9}).starts_with("--pp 9: more stages than --layers 8; give "));
    CHECK(refusal({.pp = 3}).starts_with(
        text("--pp 3: a multiple of 3 processes is needed and this run has %d", ranks)));
    CHECK(refusal({}, 1000).ends_with(
        "ask for less at once, or cut the model over more processes (mpirun -np)"));
    if (ranks == 1)
        CHECK(
            refusal({.tp = 2}).starts_with("--tp 2: a multiple of 2 processes is needed and this run has 1"));
}
