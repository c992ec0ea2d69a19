// Tests of the PTX interpreter: single instructions do what the PTX manual says.
#include "test/nocard/ptx_testing.h"

#include <cmath>
#include <cstring>
#include <numeric>

using namespace nocard;
using namespace nocard::testing;

namespace {

// Runs `body` on a warp with in[thread] in %r2, and returns its %r3.
std::vector<uint32_t> results_of(const std::string& body, const std::vector<uint32_t>& in) {
    std::vector<uint32_t> padded = in;
    padded.resize(32);
    Memory<uint32_t> inp(padded), out(32, false);
    auto module =
        kernel_of("mul.wide.u32 %rd3, %r1, 4;\nadd.s64 %rd4, %rd2, %rd3;\nadd.s64 %rd5, %rd1, %rd3;\n"
                  "ld.global.u32 %r2, [%rd4];\nmov.b32 %f2, %r2;\n" +
                  body + "\nst.global.u32 [%rd5], %r3;");
    run(*module, "k", Parameters::of(out.data(), inp.data()), {});
    return {out.data(), out.data() + 32};
}

uint32_t result_of(const std::string& body, uint32_t in) {
    return results_of(body, std::vector<uint32_t>(32, in))[5];
}

uint32_t bits(float x) {
    return std::bit_cast<uint32_t>(x);
}
float number(uint32_t x) {
    return std::bit_cast<float>(x);
}

}  // namespace

TEST_CASE("Bits are permuted, extracted, inserted and combined by a table") {
    CHECK(result_of("prmt.b32 %r3, %r2, 0xaabbccdd, 0x7610;", 0x11223344) == 0xaabb3344);
    CHECK(result_of("prmt.b32 %r3, %r2, 0, 0x8;", 0x00000080) == 0x808080ff);
    CHECK(result_of("bfe.u32 %r3, %r2, 8, 12;", 0xabcdef12) == 0xdef);
    CHECK(result_of("bfe.s32 %r3, %r2, 8, 12;", 0xabcdef12) == 0xfffffdef);
    CHECK(result_of("bfe.s32 %r3, %r2, 28, 12;", 0xabcdef12) == 0xfffffffa);
    CHECK(result_of("bfe.u32 %r3, %r2, 40, 3;", ~0u) == 0);
    CHECK(result_of("bfi.b32 %r3, %r2, 0xffffffff, 8, 8;", 0x1234) == 0xffff34ff);
    CHECK(result_of("lop3.b32 %r3, %r2, 0xff00ff00, 0x0000ffff, 0xea;", 0x12345678) ==
          ((0x12345678 & 0xff00ff00) | 0x0000ffff));
    CHECK(result_of("shf.l.wrap.b32 %r3, %r2, 0x1, 36;", 0xf0000000) == 0x1f);
    CHECK(result_of("shf.r.clamp.b32 %r3, %r2, 0x5, 40;", 0xf0000000) == 0x5);
    CHECK(result_of("shl.b32 %r3, %r2, 32;", 1) == 0);
    CHECK(result_of("shr.s32 %r3, %r2, 40;", 0x80000000) == ~0u);
    CHECK(result_of("popc.b32 %r3, %r2;", 0xf0f) == 8);
    CHECK(result_of("clz.b32 %r3, %r2;", 1) == 31);
    CHECK(result_of("brev.b32 %r3, %r2;", 1) == 0x80000000);
    CHECK(result_of("mul.hi.s32 %r3, %r2, -2;", 0x80000000) == 1);
    CHECK(result_of("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %r2; mov.b32 %r3, {hi, lo}; }", 0x12345678) ==
          0x56781234);
    CHECK(result_of("rem.s32 %r3, %r2, 5;", (uint32_t)-7) == (uint32_t)-2);
    CHECK(result_of("div.s32 %r3, %r2, 0;", 7) == ~0u);
}

TEST_CASE("Numbers are rounded and limited as the conversion says") {
    CHECK(result_of("cvt.rni.s32.f32 %r3, %f2;", bits(2.5f)) == 2);
    CHECK(result_of("cvt.rzi.s32.f32 %r3, %f2;", bits(-2.7f)) == (uint32_t)-2);
    CHECK(result_of("cvt.rmi.s32.f32 %r3, %f2;", bits(-2.2f)) == (uint32_t)-3);
    CHECK(result_of("cvt.rzi.s32.f32 %r3, %f2;", bits(1e20f)) == 0x7fffffff);
    CHECK(result_of("cvt.rzi.u32.f32 %r3, %f2;", bits(-3)) == 0);
    CHECK(result_of("cvt.rzi.s32.f32 %r3, %f2;", bits(NAN)) == 0);
    CHECK(result_of("cvt.s32.s8 %r3, %r2;", 0x180) == 0xffffff80);
    CHECK(result_of("cvt.rn.f32.u32 %f3, %r2; mov.b32 %r3, %f3;", 0x80000000) == bits(2147483648.f));
    CHECK(result_of("cvt.sat.f32.f32 %f3, %f2; mov.b32 %r3, %f3;", bits(NAN)) == 0);
    CHECK(result_of("cvt.rn.bf16x2.f32 %r3, %f2, 0f3F808000;", bits(-2)) == 0xc0003f80);  // a tie, to even
    CHECK(result_of("cvt.rn.bf16x2.f32 %r3, %f2, 0f3F818000;", bits(-2)) == 0xc0003f82);
    CHECK(result_of("{ .reg .b16 h; cvt.rn.f16.f32 h, %f2; cvt.u32.u16 %r3, h; }", bits(65520)) == 0x7c00);
    CHECK(result_of("{ .reg .b16 h; cvt.rn.f16.f32 h, %f2; cvt.u32.u16 %r3, h; }", bits(6e-8f)) == 1);
    CHECK(result_of("{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %f2, 0f43E80000; cvt.u32.u16 %r3, h; }",
                    bits(1000)) == 0x7e7e);
    CHECK(result_of("{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %f2, 0f3F980000; cvt.u32.u16 %r3, h; }",
                    bits(-0.0f)) == 0x803a);  // 1.1875, a tie, is 1.25
    CHECK(result_of("{ .reg .b16 h; cvt.rn.satfinite.e5m2x2.f32 h, %f2, 0f3F900000; cvt.u32.u16 %r3, h; }",
                    bits(1e-9f)) == 0x003c);  // 1.125, a tie, is 1
    CHECK(result_of("{ .reg .b16 h; cvt.u16.u32 h, %r2; cvt.rn.f16x2.e4m3x2 %r3, h; }", 0x387e) ==
          0x3c005f00);
}

TEST_CASE("Arithmetic on floats: fused, two at a time, with NaNs") {
    float x = 1 + std::ldexp(1.f, -12);
    CHECK(result_of("fma.rn.f32 %f3, %f2, %f2, 0fBF800000; mov.b32 %r3, %f3;", bits(x)) ==
          bits(std::fma(x, x, -1.f)));
    CHECK(result_of("fma.rm.f32 %f3, %f2, 0f3F800000, 0f33000000; mov.b32 %r3, %f3;", bits(1)) == bits(1));
    CHECK(result_of("min.f32 %f3, %f2, 0f3F800000; mov.b32 %r3, %f3;", bits(NAN)) == bits(1));
    CHECK(std::isnan(number(result_of("min.NaN.f32 %f3, %f2, 0f3F800000; mov.b32 %r3, %f3;", bits(NAN)))));
    CHECK(result_of("fma.rn.bf16x2 %r3, %r2, %r2, %r2;", 0x40003f80) == 0x40c04000);  // 2 * 2 + 2, 1 * 1 + 1
    CHECK(result_of("add.f16x2 %r3, %r2, %r2;", 0x3c004000) == 0x40004400);
    CHECK(number(result_of("ex2.approx.ftz.f32 %f3, %f2; mov.b32 %r3, %f3;", bits(3.5f))) ==
          doctest::Approx(std::exp2(3.5)));
    CHECK(result_of("ex2.approx.ftz.f32 %f3, %f2; mov.b32 %r3, %f3;", bits(-130)) == 0);
    CHECK(number(result_of("lg2.approx.f32 %f3, %f2; mov.b32 %r3, %f3;", bits(10))) ==
          doctest::Approx(std::log2(10.0)));
    CHECK(result_of("rcp.approx.ftz.f32 %f3, %f2; mov.b32 %r3, %f3;", bits(4)) == bits(0.25f));
    CHECK(result_of("setp.gtu.f32 %p1, %f2, 0f3F800000; selp.u32 %r3, 1, 0, %p1;", bits(NAN)) == 1);
    CHECK(result_of("setp.gt.f32 %p1, %f2, 0f3F800000; selp.u32 %r3, 1, 0, %p1;", bits(NAN)) == 0);
    CHECK(result_of("setp.ne.f32 %p1, %f2, %f2; selp.u32 %r3, 1, 0, %p1;", bits(NAN)) == 0);
    CHECK(result_of("setp.neu.f32 %p1, %f2, %f2; selp.u32 %r3, 1, 0, %p1;", bits(NAN)) == 1);
}

TEST_CASE("Shuffles, votes and sums over lanes") {
    std::vector<uint32_t> in(32);
    std::iota(in.begin(), in.end(), 100);
    auto swapped = results_of("shfl.sync.bfly.b32 %r3|%p1, %r2, 1, 31, -1;", in);
    CHECK(swapped[6] == 107);
    auto down = results_of("shfl.sync.down.b32 %r3|%p1, %r2, 3, 0x1807, -1; selp.b32 %r3, %r3, 7, %p1;", in);
    CHECK(down[4] == 107);
    CHECK(down[5] == 7);  // beyond its segment of eight
    auto up = results_of("shfl.sync.up.b32 %r3, %r2, 2, 0, -1;", in);
    CHECK(up[1] == 101);
    CHECK(up[9] == 107);
    auto first = results_of("shfl.sync.idx.b32 %r3, %r2, 0, 0x1c1f, -1;", in);
    CHECK(first[13] == 112);
    auto odd =
        results_of("and.b32 %r4, %r1, 1; setp.eq.s32 %p1, %r4, 1; vote.sync.ballot.b32 %r3, %p1, -1;", in);
    CHECK(odd[0] == 0xaaaaaaaa);
    CHECK(results_of("redux.sync.max.u32 %r3, %r2, -1;", in)[3] == 131);
    CHECK(results_of("redux.sync.add.s32 %r3, %r2, -1;", in)[3] == 100 * 32 + 31 * 16);
}

TEST_CASE("Lanes that a branch parted meet again, and loops end for each lane by itself") {
    std::vector<uint32_t> in(32);
    std::iota(in.begin(), in.end(), 0);
    auto counts = results_of(R"(
        mov.u32 %r3, 0;
        again:
        setp.ge.u32 %p1, %r3, %r2;
        @%p1 bra done;
        add.u32 %r3, %r3, 1;
        bra again;
        done:
        shfl.sync.bfly.b32 %r3, %r3, 31, 31, -1;
    )",
                             in);
    for (uint32_t lane = 0; lane < 32; lane++) CHECK(counts[lane] == 31 - lane);
    // A part of the warp, with a mask that names it.
    auto halves = results_of(R"(
        mov.u32 %r3, 9;
        setp.lt.u32 %p1, %r1, 16;
        @%p1 bra low;
        shfl.sync.idx.b32 %r3, %r2, 20, 31, 0xffff0000;
        bra join;
        low:
        shfl.sync.idx.b32 %r3, %r2, 5, 31, 0x0000ffff;
        join:
        bar.warp.sync -1;
    )",
                             in);
    CHECK(halves[3] == 5);
    CHECK(halves[30] == 20);
    // One lane waits for what another writes: they take turns.
    auto waited = results_of(R"(
        mov.u32 %r3, 0;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra others;
        spin:
        ld.volatile.global.u32 %r3, [%rd2+124];
        setp.ne.u32 %p2, %r3, 77;
        @%p2 bra spin;
        bra end;
        others:
        setp.ne.u32 %p3, %r1, 31;
        mov.u32 %r3, 1;
        @%p3 bra end;
        st.volatile.global.u32 [%rd2+124], 77;
        mov.u32 %r3, 77;
        end:
    )",
                             in);
    CHECK(waited[0] == 77);
}

TEST_CASE("Loads and stores of vectors and of parts of words") {
    Memory<uint32_t> inp(std::vector<uint32_t>{1, 2, 3, 0xfff08180, 5, 6, 7, 8}), out(12, false);
    auto module = kernel_of(R"(
        setp.ne.u32 %p1, %r1, 0;
        @%p1 ret;
        ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd2+16];
        st.global.v2.b32 [%rd1], {%r4, %r5};
        ld.global.s8 %r6, [%rd2+12];
        ld.global.u8 %r7, [%rd2+13];
        ld.global.s16 %r8, [%rd2+14];
        st.global.u32 [%rd1+8], %r6;
        st.global.u32 [%rd1+12], %r7;
        st.global.u32 [%rd1+16], %r8;
        st.global.v4.u16 [%rd1+24], {%rs1, 2, 3, 4};
        ld.global.u64 %rd3, [%rd2];
        mov.b64 {%r9, %r10}, %rd3;
        st.global.u32 [%rd1+20], %r10;
        st.global.u8 [%rd1+32], 255;
    )",
                            "mov.u16 %rs1, 1;");
    run(*module, "k", Parameters::of(out.data(), inp.data()), {});
    CHECK(out[0] == 7);
    CHECK(out[1] == 8);
    CHECK(out[2] == 0xffffff80);
    CHECK(out[3] == 0x81);
    CHECK(out[4] == 0xfffffff0);
    CHECK(out[5] == 2);
    CHECK(out[6] == 0x00020001);
    CHECK(out[7] == 0x00040003);
    const Allocation* shadow = find_allocation(out.data());
    CHECK(is_written(*shadow, 0, 33));
    CHECK(!is_written(*shadow, 33, 1));
}

TEST_CASE("Atomic operations return what was there, and blocks add up") {
    Memory<uint32_t> inp(std::vector<uint32_t>(32, 0)), out(std::vector<uint32_t>(64, 0));
    auto module = kernel_of(R"(
        mul.wide.u32 %rd3, %r1, 4;
        add.s64 %rd3, %rd1, %rd3;
        atom.global.add.u32 %r2, [%rd1], 1;
        red.relaxed.gpu.global.add.f32 [%rd1+4], 0f3F000000;
        atom.global.max.u32 %r3, [%rd1+8], %r1;
        atom.global.inc.u32 %r4, [%rd1+12], 6;
        atom.global.cas.b32 %r5, [%rd1+16], 0, 5;
        atom.global.or.b32 %r6, [%rd1+20], %r1;
        atom.global.exch.b32 %r7, [%rd1+24], 3;
    )");
    run(*module, "k", Parameters::of(out.data(), inp.data()), {{3, 1, 1}});
    CHECK(out[0] == 96);
    CHECK(number(out[1]) == 48);
    CHECK(out[2] == 31);
    CHECK(out[3] == 96 % 7);
    CHECK(out[4] == 5);
    CHECK(out[5] == 31);
    CHECK(out[6] == 3);
}

TEST_CASE("Blocks wait for each other by counters, whatever the order in which they begin") {
    // Each block draws a ticket and, in the order of tickets, appends it to the sum as a digit in base 3.
    auto module = kernel_of(R"(
        setp.ne.u32 %p1, %r1, 0;
        @%p1 ret;
        atom.global.add.u32 %r2, [%rd1], 1;
        wait:
        ld.relaxed.gpu.global.u32 %r3, [%rd1+4];
        setp.ne.u32 %p2, %r3, %r2;
        @%p2 bra wait;
        fence.acq_rel.gpu;
        ld.global.u32 %r4, [%rd1+8];
        mad.lo.s32 %r4, %r4, 3, %r2;
        st.global.u32 [%rd1+8], %r4;
        add.u32 %r5, %r2, 1;
        st.release.gpu.global.u32 [%rd1+4], %r5;
    )");
    for (uint64_t seed = 1; seed < 6; seed++) {
        Memory<uint32_t> inp(32), out(std::vector<uint32_t>(3, 0));
        Launch launch{{40, 1, 1}};
        launch.seed = seed;
        run(*module, "k", Parameters::of(out.data(), inp.data()), launch);
        uint32_t want = 0;
        for (uint32_t k = 0; k < 40; k++) want = want * 3 + k;
        CHECK(out[2] == want);
    }
}

TEST_CASE("Copies to shared memory and back, by cp.async and by the copy engine") {
    std::vector<uint32_t> values(256);
    std::iota(values.begin(), values.end(), 1);
    auto copies = kernel_of(R"(
        shl.b32 %r2, %r1, 4;
        mov.u32 %r3, dynamic;
        add.s32 %r3, %r3, %r2;
        cvt.u64.u32 %rd3, %r2;
        add.s64 %rd4, %rd2, %rd3;
        add.s64 %rd5, %rd1, %rd3;
        and.b32 %r4, %r1, 1;
        shl.b32 %r4, %r4, 3;
        cp.async.cg.shared.global [%r3], [%rd4], 16;
        cp.async.commit_group;
        cp.async.ca.shared.global [%r3+512], [%rd4+512], 16, %r4;
        cp.async.commit_group;
        cp.async.wait_group 1;
        ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r3];
        cp.async.wait_all;
        ld.shared.v4.u32 {%r14, %r15, %r16, %r17}, [%r3+512];
        st.global.v4.u32 [%rd5], {%r10, %r11, %r12, %r13};
        st.global.v4.u32 [%rd5+512], {%r14, %r15, %r16, %r17};
    )");
    auto engine = kernel_of(R"(
        mov.u32 %r3, dynamic;
        add.s32 %r4, %r3, 2048;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra ready;
        mbarrier.init.shared::cta.b64 [%r4], 1;
        fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 1024;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd2], 512, [%r4];
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3+512], [%rd2+512], 512, [%r4];
        ready:
        bar.sync 0;
        wait:
        mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0;
        @!%p2 bra wait;
        shl.b32 %r5, %r1, 5;
        add.s32 %r5, %r5, %r3;
        ld.shared.f32 %f1, [%r5];
        st.shared.f32 [%r5], 0f40000000;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @%p1 ret;
        cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 1024;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r3], 64;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
    )");
    for (uint64_t seed = 1; seed < 12; seed++) {
        Memory<uint32_t> inp(values), out(256, false);
        Launch launch;
        launch.shared = 4096, launch.seed = seed;
        run(*copies, "k", Parameters::of(out.data(), inp.data()), launch);
        CHECK(out[5] == 6);
        CHECK(out[128] == 0);  // none of an even lane's bytes
        CHECK(out[133] == 134);
        CHECK(out[134] == 0);  // eight of an odd lane's sixteen
        Memory<uint32_t> copied(256, false);
        run(*engine, "k", Parameters::of(copied.data(), inp.data()), launch);
        CHECK(copied[255] == 256);
        CHECK(number(copied[0]) == 4);
        CHECK(number(copied[16]) == 2);
        CHECK(copied[1] == 4);  // these are denormal floats
    }
}

TEST_CASE("Warps hand registers over") {
    auto module = kernel_of(R"(
        shr.u32 %r2, %r1, 7;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra producer;
        setmaxnreg.inc.sync.aligned.u32 232;
        bra end;
        producer:
        setmaxnreg.dec.sync.aligned.u32 40;
        end:
        bar.sync 0;
    )");
    Memory<uint32_t> memory(4);
    Launch launch{{1, 1, 1}, {384, 1, 1}};
    launch.registers = 168;
    CHECK(fault_of(*module, Parameters::of(memory.data(), memory.data()), launch) == "none");
    launch.registers = 128;  // the producers do not release enough
    CHECK_FAULT(fault_of(*module, Parameters::of(memory.data(), memory.data()), launch), "nobody can go on");
}

TEST_CASE("An instruction that nobody taught the interpreter is an error when the module is loaded") {
    auto error_of = [](const char* body) {
        try {
            kernel_of(body);
        } catch (const std::runtime_error& error) {
            return std::string(error.what());
        }
        return std::string("none");
    };
    CHECK_FAULT(error_of("vadd.u32.u32.u32 %r1, %r2, %r3;"),
                "`vadd.u32.u32.u32 %r1, %r2, %r3;`: nobody taught");
    CHECK_FAULT(error_of("add.sat.s32 %r1, %r2, %r3;"), "line 23");
    CHECK_FAULT(error_of("bra nowhere;"), "there is no label nowhere");
    CHECK_FAULT(error_of("mov.u32 %r1, %r9999;"), "no");
}
