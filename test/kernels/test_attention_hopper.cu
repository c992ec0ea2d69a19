// The attention kernels for Hopper against the textbook formula in double precision. They exist in bf16 only.
// devices: simt-bf16 cuda-bf16 nocard
// seconds: 6
#include "test/kernels/attention_testing.h"

#ifdef PRECISION_BF16

namespace {

using Hopper = UseKernels<AttentionKernels::wgmma>;

// On other cards the program uses other kernels.
bool on_hopper() {
    return device_properties().major == 9;
}

}  // namespace

TEST_CASE_FIXTURE(Hopper, "lengths around the tiles") {
    for (int T : {1, 7, 64, 65, 129, 300}) check({2, T, 2, 2, 64});
}

TEST_CASE_FIXTURE(Hopper, "head sizes") {
    for (int HS : {8, 40, 64, 72, 96, 104, 128}) check({1, 140, 2, 1, HS});
}

TEST_CASE_FIXTURE(Hopper, "several query heads share a key/value head") {
    check({2, 140, 6, 2, 24});
    check({1, 260, 3, 1, 128});
}

TEST_CASE_FIXTURE(Hopper, "sliding window and documents") {
    for (int window : {1, 5, 100, 1000}) check({1, 300, 1, 1, 32, window});
    check({2, 300, 2, 1, 64, 0, {3, 4, 40, 64, 130, 290}});
    check({2, 200, 4, 2, 128, 70, {10, 100}});
    check({1, 700, 2, 1, 80, 300, {150, 151, 400}});
}

TEST_CASE_FIXTURE(Hopper, "queries of some of the positions") {
    check_parts(64);
    check(Case{1, 400, 1, 1, 128}.part(130, 200));
    check(Case{1, 200, 2, 1, 80, 50}.part(101, 33));
}

TEST_CASE_FIXTURE(Hopper, "calls for parts of the queries make what one call for all makes") {
    check_cut({1, 200, 2, 1, 64, 140, {10, 100}}, {77});
    check_cut({1, 200, 1, 1, 128}, {1, 128, 199});
}

TEST_CASE_FIXTURE(Hopper, "heads in sections of any size, on any number of blocks") {
    if (!on_hopper()) SKIP("no card of Hopper's kind here");
    Case c{2, 300, 3, 1, 64};
    std::vector<floatX> qkv = make_qkv(c), dout = make_dout(c);
    Run whole(c, qkv, dout);
    AttentionShape shape = c.shape();
    using Shared = HopperForwardShared<64>;
    Qkv<const floatX> heads = in_rows<const floatX>(whole.qkv, shape);
    CUtensorMap query_map = Shared::Tile::query_map(heads, shape);
    CUtensorMap key_map = Shared::Tile::key_map(heads, shape);
    int tiles = HopperQueries::tickets(shape);
    for (auto [section, blocks] : {std::pair{1, 3}, {4, 1}, {5, tiles}}) {
        CAPTURE(section);
        Buffer<floatX> out(whole.out.size());
        Buffer<float> lse(whole.lse.size());
        launch(attention_hopper_forward_kernel<64>, blocks, hopper_threads, sizeof(Shared), test_stream(),
               (floatX*)out, (float*)lse, nullptr, query_map, key_map, shape,
               Tickets{tiles, section, ticket_counter(test_stream())});
        CHECK(out.doubles() == whole.out.doubles());
        CHECK(lse.host() == whole.lse.host());
    }
}

TEST_CASE_FIXTURE(Hopper, "what the kernels leave to others") {
    if (!on_hopper()) SKIP("no card of Hopper's kind here");
    auto fits = [](int HS) { return hopper_attention_fits(Case{1, 5, 4, 2, HS}.shape()); };
    CHECK(fits(8));
    CHECK(fits(128));
    CHECK(!fits(20));   // rows of heads that are not a multiple of 16 bytes
    CHECK(!fits(136));  // wider than a tile
    CHECK(has_wgmma_attention(Case{1, 5, 4, 2, 128}.shape()));
    // code that the driver compiled from PTX for an older architecture
    CHECK(!has_wgmma_attention(Case{1, 5, 4, 2, 128}.shape(), 80));
}

TEST_CASE_FIXTURE(Hopper, "large scores do not overflow") {
    check({1, 150, 2, 2, 32}, 16, 5 * tolerance<floatX>);
}

TEST_CASE_FIXTURE(Hopper, "the same bits on every run") {
    Case c{2, 300, 4, 2, 40, 200, {10, 77}};
    std::vector<floatX> qkv = make_qkv(c), dout = make_dout(c);
    CHECK(Run(c, qkv, dout).bits() == Run(c, qkv, dout).bits());
}

TEST_CASE_FIXTURE(Hopper, "a NaN is not hidden") {
    check_nan_shows(140);
}

#endif
