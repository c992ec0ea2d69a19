// Attention against the textbook formula in double precision; on GPUs, with the kernels that every card can
// run.
// seconds: 15
#include <omp.h>

#include "test/kernels/attention_testing.h"
#include "test/kernels/bf16_products.h"
#include "test/support/simulated.h"

namespace {

// Selects the kernels that every card can run, even on a card that has faster ones.
#ifdef DEVICE_CPU
struct EveryCard {};
#else
struct EveryCard : UseKernels<AttentionKernels::mma> {};
#endif

// For cases that do not depend on the tile size: the simulated device, which is slow, normally runs them in
// bf16 only.
const auto shown_in_bf16 = doctest::test_suite(simulated && sizeof(floatX) == 4 ? "long" : "");

}  // namespace

TEST_CASE_FIXTURE(EveryCard, "lengths around the tiles") {
    for (int T : {1, 7, 64, 65, 129, 200}) check({2, T, 2, 2, 64});
}

TEST_CASE_FIXTURE(EveryCard, "head sizes, also those that are no multiple of a vector") {
    for (int HS : {1, 8, 20, 32, 40, 80, 96, 128}) check({1, 70, 2, 1, HS});
    for (int HS : {130, 192, 256}) check({1, 70, 1, 1, HS});
}

TEST_CASE_FIXTURE(EveryCard, "several tiles of queries and of keys") {
    int factor = sizeof(floatX) == 2 ? 2 : 1;  // tiles of float are smaller
    check({2, 140 * factor, 2, 1, 64});
    check({1, 155 * factor, 1, 1, 128});
    check({1, 75 * factor, 2, 1, 96});
    check({1, 75 * factor, 2, 2, 256});
}

TEST_CASE_FIXTURE(EveryCard, "several query heads share a key/value head" * shown_in_bf16) {
    check({2, 67, 6, 2, 20});
    check({1, 67, 3, 1, 64});
}

TEST_CASE_FIXTURE(EveryCard, "sliding window" * shown_in_bf16) {
    for (int window : {1, 5, 64, 100, 1000}) check({1, 200, 1, 1, 32, window});
}

TEST_CASE_FIXTURE(EveryCard, "windows that end within tiles" * shown_in_bf16) {
    check({1, 400, 1, 1, 32, 129});
    check({1, 300, 2, 1, 64, 100});
    check({1, 200, 1, 1, 128, 65});
    check({1, 140, 1, 1, 256, 33});
}

TEST_CASE_FIXTURE(EveryCard, "documents" * shown_in_bf16) {
    check({2, 200, 1, 1, 32, 0, {3, 4, 40, 64, 130, 190}});
    check({2, 65, 1, 1, 8, 0, {60}});
}

TEST_CASE_FIXTURE(EveryCard, "shared heads, window and documents together" * shown_in_bf16) {
    check({2, 200, 4, 2, 20, 70, {10, 100}});
    check({2, 150, 2, 1, 64, 30, {1, 63, 64, 100}});
    check({1, 100, 2, 1, 160, 30, {20, 50}});
}

TEST_CASE_FIXTURE(EveryCard, "queries of some of the positions" * shown_in_bf16) {
    check_parts(32);
    check(Case{1, 90, 2, 1, 20}.part(50, 40));
    check(Case{1, 150, 2, 1, 128, 50}.part(66, 37));
}

TEST_CASE_FIXTURE(EveryCard, "calls for parts of the queries make what one call for all makes") {
    check_cut({2, 100, 2, 1, 20, 90, {10, 60}}, {37});
    check_cut({1, 150, 1, 1, 64}, {1, 64, 149});
    check_cut({1, 70, 1, 1, 256}, {33});
}

TEST_CASE_FIXTURE(EveryCard, "large scores do not overflow") {
    // Scores of several hundred: softmax almost selects a single key, and exp of a score itself would be Inf.
    // Rounding such a score to float already changes its probability by 3e-5.
    check({1, 100, 2, 2, 32}, 16, 5 * tolerance<floatX>);
}

#ifndef DEVICE_CPU
// Both passes as on a card of another kind: the card determines tiles and the order of blocks.
static void check_on_card(const Case& c, const AttentionCard& card) {
    CAPTURE(c.name());
    CAPTURE(card.shared_bytes);
    std::vector<floatX> qkv = make_qkv(c), dout = make_dout(c);
    Run run(c, qkv, dout);
    Buffer<floatX> out(run.out.size()), dqkv(qkv.size());
    Buffer<float> lse(run.lse.size()), scratch(run.scratch.size());
    AttentionShape shape = c.shape(run.doc_start);
    Qkv<const floatX> heads = in_rows<const floatX>(run.qkv, shape);
    attention_mma_forward(out, lse, nullptr, heads, shape, test_stream(), card);
    attention_mma_backward(in_rows<floatX>(dqkv, shape), scratch, run.dout, heads, out, lse, shape,
                           test_stream(), card);
    Reference want(c, to_doubles(qkv), to_doubles(dout));
    CHECK_CLOSE(out, want.out, tolerance<floatX>);
    CHECK_CLOSE(lse, want.lse, tolerance<float>);
    CHECK_CLOSE(dqkv, want.dqkv, tolerance<floatX>);
}

TEST_CASE_FIXTURE(EveryCard, "cards with little shared memory") {
    for (int HS : {32, 64, 96, 128, 160, 256}) check_on_card({1, 150, 2, 1, HS, 100, {20}}, {99 * 1024, 46});
}

TEST_CASE_FIXTURE(EveryCard, "more heads than go side by side" * shown_in_bf16) {
    for (int multiprocessors : {1, 6}) check_on_card({3, 140, 2, 1, 16}, {163 * 1024, multiprocessors});
}
#endif

TEST_CASE_FIXTURE(EveryCard, "a NaN is not hidden") {
    check_nan_shows(70);
}

TEST_CASE_FIXTURE(EveryCard, "the same bits on every run") {
    Case c{2, 150, 4, 2, 40, 100, {10, 77}};
    std::vector<floatX> qkv = make_qkv(c), dout = make_dout(c);
    CHECK(Run(c, qkv, dout).bits() == Run(c, qkv, dout).bits());
}

#if !defined(DEVICE_CPU) && !defined(__CUDACC__)
TEST_CASE_FIXTURE(EveryCard, "the same bits in any order of blocks and threads" * shown_in_bf16) {
    Case whole{2, 200, 2, 1, 32, 150, {10, 77}};
    for (Case c : {whole, whole.part(70, 90)}) {
        std::vector<floatX> qkv = make_qkv(c), dout = make_dout(c);
        auto bits = [&](uint64_t seed) {
            simt::set_seed(seed);
            return Run(c, qkv, dout).bits();
        };
        std::vector<uint32_t> first = bits(1);
        for (uint64_t seed : {2, 3}) CHECK(bits(seed) == first);
    }
    simt::set_seed(1);
}
#endif

#ifdef DEVICE_CPU
namespace {
void use_threads(int number) {
    host_stream(test_stream()).enqueue([=] { omp_set_num_threads(number); });
}
}  // namespace

TEST_CASE_FIXTURE(EveryCard, "the same bits with any number of threads") {
    for (Case c : {Case{2, 300, 4, 2, 40, 200, {10, 77}}, Case{1, 200, 3, 3, 64},
                   Case{2, 200, 2, 1, 32}.part(70, 90)}) {
        std::vector<floatX> qkv = make_qkv(c), dout = make_dout(c);
        use_threads(1);
        std::vector<uint32_t> one = Run(c, qkv, dout).bits();
        for (int threads : {2, 3, 4, 16}) {
            CAPTURE(threads);
            use_threads(threads);
            CHECK(Run(c, qkv, dout).bits() == one);
        }
    }
    use_threads(omp_get_max_threads());
}

TEST_CASE("in bf16 attention is as exact as its operands, and the same with other threads") {
    if (!has_cpu_products_in_bf16()) SKIP("no products in bf16 on this processor");
    ProductsInBf16 mode;
    for (Case c : {Case{2, 130, 4, 2, 33, 100, {10, 77}}, Case{1, 200, 3, 3, 64}, Case{1, 70, 1, 1, 256},
                   Case{2, 200, 2, 1, 32}.part(70, 90)}) {
        CAPTURE(c.name());
        std::vector<floatX> qkv = make_qkv(c), dout = make_dout(c);
        Reference reference(c, to_doubles(qkv), to_doubles(dout));
        Run run(c, qkv, dout);
        use_threads(3);
        Run again(c, qkv, dout);
        use_threads(omp_get_max_threads());
        CHECK_CLOSE(run.out, reference.out, tolerance_of_bf16);
        CHECK_CLOSE(run.lse, reference.lse, tolerance_of_bf16);
        std::vector<floatX> dqkv = run.dqkv.host();
        for (size_t i = 0; i < dqkv.size(); i++)
            if (c.unwritten(i)) dqkv[i] = 0;
        CHECK(relative_error(to_doubles(dqkv), reference.dqkv) < tolerance_of_bf16);
        CHECK(run.bits() == again.bits());
    }
}
#endif
