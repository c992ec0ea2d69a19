// Tests of the PTX interpreter: kernels with one planted defect each, and the fault that names it.
#include "test/nocard/ptx_testing.h"

using namespace nocard;
using namespace nocard::testing;

namespace {

// Runs a kernel of this body, with 4 KiB to read and 4 KiB to write, and returns the fault that ends it.
std::string fault_in(const std::string& body, Launch launch = {}, const char* limits = "") {
    Memory<uint32_t> inp(1024), out(1024);
    auto module = kernel_of(body, "", limits);
    return fault_of_any_seed(*module, Parameters::of(out.data(), inp.data()), launch);
}

Launch with_shared(size_t bytes, unsigned threads = 32, unsigned blocks = 1) {
    Launch launch{{blocks, 1, 1}, {threads, 1, 1}};
    launch.shared = bytes;
    return launch;
}

// Returns the body with one passage replaced.
std::string changed(std::string body, const std::string& from, const std::string& to) {
    size_t at = body.find(from);
    REQUIRE(at != std::string::npos);
    return body.replace(at, from.size(), to);
}

}  // namespace

// ----------------------------------------------------------------------------
// memory

TEST_CASE("Accesses outside of live memory, of the wrong kind and misaligned ones") {
    CHECK_FAULT(fault_in("ld.global.u32 %r2, [%rd2+4096];"), "access to 0x");
    CHECK_FAULT(fault_in("ld.global.v2.u32 {%r2, %r3}, [%rd2+4];"), "is not a multiple of 8");
    CHECK_FAULT(fault_in("mov.u64 %rd2, 0; ld.global.u32 %r2, [%rd2];"), "where no device memory is alive");
    CHECK_FAULT(fault_in("ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd2+4088];"), "is not a multiple of 16");
    CHECK_FAULT(fault_in("mov.u32 %r2, dynamic; st.shared.u32 [%r2+64], 1;", with_shared(64)),
                "of which the block has 64 bytes");
    CHECK_FAULT(fault_in("mov.u32 %r2, 0; st.shared.u32 [%r2], 1;", with_shared(64)),
                "shared memory at -1024");
    CHECK_FAULT(fault_in("mov.u32 %r2, dynamic; st.shared.u64 [%r2+4], 1;", with_shared(64)),
                "is not a multiple of 8");
    CHECK_FAULT(fault_in("ld.param.u64 %rd3, [k_in+8];"), "parameters");
    // Kernels may load and store host memory, and no more.
    Memory<uint32_t> inp(1024), out(1024);
    allocations().back().device = false;
    auto stores = kernel_of("st.global.u32 [%rd1], 1;");
    auto copies = kernel_of("mov.u32 %r2, dynamic; cp.async.cg.shared.global [%r2], [%rd1], 16;");
    CHECK(fault_of(*stores, Parameters::of(out.data(), inp.data())) == "none");
    CHECK_FAULT(fault_of(*copies, Parameters::of(out.data(), inp.data()), with_shared(64)),
                "memory of the host");
}

TEST_CASE("Reads of what nobody wrote") {
    Memory<uint32_t> inp(32, false), out(32);
    auto reads = kernel_of("ld.global.u32 %r2, [%rd2+8];");
    CHECK_FAULT(fault_of(*reads, Parameters::of(out.data(), inp.data())), "which nobody wrote");
    CHECK_FAULT(fault_of(*kernel_of("red.global.add.u32 [%rd2], 1;"), Parameters::of(out.data(), inp.data())),
                "updates 4 bytes of global memory");
    auto partly =
        kernel_of("setp.ne.u32 %p1, %r1, 0; @%p1 ret; st.global.u16 [%rd2], 7; ld.global.u32 %r2, [%rd2];");
    CHECK_FAULT(fault_of(*partly, Parameters::of(out.data(), inp.data())), "which nobody wrote");
    CHECK_FAULT(fault_in("mov.u32 %r2, dynamic; ld.shared.u32 %r3, [%r2];", with_shared(64)),
                "which no thread of the block wrote");
    CHECK_FAULT(
        fault_in("setp.ne.u32 %p1, %r1, 7; @%p1 bra over; mov.u32 %r20, 5; over: mul.wide.u32 %rd3, %r1, 4;"
                 "add.s64 %rd3, %rd3, %rd1; st.global.u32 [%rd3], %r20;"),
        "a register that nobody set");
}

TEST_CASE("Races between threads of a block") {
    std::string body = R"(
        shl.b32 %r2, %r1, 2;
        mov.u32 %r3, dynamic;
        add.s32 %r4, %r3, %r2;
        st.shared.u32 [%r4], %r1;
        bar.sync 0;
        xor.b32 %r5, %r2, 252;
        add.s32 %r5, %r3, %r5;
        ld.shared.u32 %r6, [%r5];
        bar.sync 0;
        st.shared.u32 [%r4], %r6;
    )";
    CHECK(fault_in(body, with_shared(256, 64)) == "none");
    std::string no_first = changed(body, "bar.sync 0;", "");
    CHECK_FAULT(fault_in(no_first, with_shared(256, 64)), "shared memory");
    std::string no_second = body;
    no_second.replace(no_second.rfind("bar.sync 0;"), 11, "");
    CHECK_FAULT(fault_in(no_second, with_shared(256, 64)), "with no barrier between");
    CHECK_FAULT(fault_in("mov.u32 %r3, dynamic; st.shared.u32 [%r3], %r1;", with_shared(256, 32)), "race");
    // Lanes of one warp have to synchronize, too.
    std::string in_warp = changed(changed(body, "bar.sync 0;", "bar.warp.sync -1;"), "252", "124");
    CHECK(fault_in(in_warp, with_shared(128, 32)) == "none");
    CHECK_FAULT(fault_in(changed(in_warp, "bar.warp.sync -1;", ""), with_shared(128, 32)),
                "race: reads shared memory");
    // Different halves of a word do not conflict.
    CHECK(fault_in("shl.b32 %r2, %r1, 1; mov.u32 %r3, dynamic; add.s32 %r4, %r3, %r2; st.shared.u16 [%r4], 7;"
                   "ld.shared.u16 %r5, [%r4]; st.shared.u16 [%r4], 8;",
                   with_shared(128, 64)) == "none");
}

TEST_CASE("Races between blocks") {
    CHECK_FAULT(
        fault_in("setp.ne.u32 %p1, %r1, 0; @%p1 ret; st.global.u32 [%rd1], 1;", with_shared(0, 32, 4)),
        "with nothing that orders the two");
    CHECK(fault_in("red.global.add.u32 [%rd1], 1;", with_shared(0, 32, 4)) == "none");
    CHECK_FAULT(fault_in("red.global.add.u32 [%rd1], 1; ld.global.u32 %r2, [%rd1];", with_shared(0, 32, 4)),
                "race");
    // The last block that arrives adds up what all have written.
    std::string body = R"(
        setp.ne.u32 %p1, %r1, 0;
        mov.u32 %r2, %ctaid.x;
        mul.wide.u32 %rd3, %r2, 4;
        add.s64 %rd4, %rd1, %rd3;
        st.global.u32 [%rd4+16], %r2;
        fence.acq_rel.gpu;
        bar.sync 0;
        @%p1 ret;
        atom.global.add.u32 %r3, [%rd1], 1;
        and.b32 %r3, %r3, 3;
        setp.ne.u32 %p2, %r3, 3;
        @%p2 ret;
        fence.acq_rel.gpu;  // behind
        ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd1+16];
    )";
    body = changed(body, "st.global.u32 [%rd4+16], %r2;", "@!%p1 st.global.u32 [%rd4+16], %r2;");
    CHECK(fault_in(body, with_shared(0, 64, 4)) == "none");
    CHECK_FAULT(fault_in(changed(body, "fence.acq_rel.gpu;", ""), with_shared(0, 64, 4)),
                "race: reads global memory");
    CHECK_FAULT(fault_in(changed(body, "fence.acq_rel.gpu;  // behind", ""), with_shared(0, 64, 4)), "race");
    // The thread that announces must know of the others' writes.
    std::string other_thread = changed(body, "@!%p1 st.global.u32", "@%p3 st.global.u32");
    other_thread = changed(other_thread, "mov.u32 %r2", "setp.eq.u32 %p3, %r1, 40;\nmov.u32 %r2");
    CHECK(fault_in(other_thread, with_shared(0, 64, 4)) == "none");
    CHECK_FAULT(fault_in(changed(other_thread, "bar.sync 0;", ""), with_shared(0, 64, 4)), "race");
}

// ----------------------------------------------------------------------------
// launches, warps and barriers

TEST_CASE("Launches that a card refuses") {
    CHECK_FAULT(fault_in("", with_shared(228 << 10)), "bytes of shared memory a block; the card has 232448");
    CHECK_FAULT(fault_in("", with_shared(0, 1056)), "blocks of 1056 x 1 x 1 threads");
    CHECK_FAULT(fault_in("", with_shared(0, 256), ".maxntid 128, 1, 1"), "compiled for at most 128");
    CHECK_FAULT(fault_in("", with_shared(0, 256), ".reqntid 128, 1, 1"), "compiled for 128 x 1 x 1");
    Launch launch = with_shared(0, 512);
    launch.registers = 255;
    CHECK_FAULT(fault_in("", launch), "255 registers a thread and 512 threads a block");
    launch.grid = {0, 1, 1};
    CHECK_FAULT(fault_in("", launch), "a grid of 0 x 1 x 1");
}

TEST_CASE("Instructions for all lanes by a part of them") {
    std::string part = "setp.lt.u32 %p1, %r1, 16; @%p1 bra over; ";
    CHECK_FAULT(fault_in(part + "bar.sync 0; over: bar.sync 1;"), "takes a whole warp, and is run by lanes");
    CHECK_FAULT(
        fault_in(part + "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2]; over: ret;", with_shared(64)),
        "takes all 32 lanes of the warp, of which 16 are there");
    CHECK_FAULT(fault_in("wgmma.fence.sync.aligned;", with_shared(0, 16)), "of which 16 are there");
    CHECK_FAULT(fault_in(part + "shfl.sync.idx.b32 %r2, %r1, 0, 31, -1; over: bar.sync 0;"),
                "wait elsewhere");
    CHECK_FAULT(fault_in(part + "shfl.sync.idx.b32 %r2, %r1, 0, 31, 0xffff0000; over: ret;"),
                "takes no part");
    CHECK_FAULT(fault_in("shfl.sync.idx.b32 %r2, %r1, 0, 31, 0xffff;"), "does not name the lane itself");
}

TEST_CASE("Barriers with too many, with too few, and with threads that have left") {
    CHECK_FAULT(fault_in("bar.sync 1, 64;"), "of which the block has 32");
    CHECK_FAULT(fault_in("bar.sync 1, 48;", with_shared(0, 64)), "no multiple of 32");
    CHECK_FAULT(fault_in("setp.lt.u32 %p1, %r1, 32; @%p1 bra low; bar.sync 1, 64; low: bar.sync 2, 64;",
                         with_shared(0, 64)),
                "in barrier");
    CHECK_FAULT(fault_in("setp.lt.u32 %p1, %r1, 32; @%p1 bra low; bar.sync 1, 64; ret; low: bar.sync 1, 96;",
                         with_shared(0, 96)),
                "where others wait for");
    CHECK_FAULT(fault_in("setp.lt.u32 %p1, %r1, 32; @%p1 ret; bar.sync 0;", with_shared(0, 64)),
                "the kernel");
    CHECK_FAULT(fault_in("setp.lt.u32 %p1, %r1, 32; @%p1 ret; bar.sync 1, 64;", with_shared(0, 64)),
                "32 of 64 threads have arrived");
    CHECK_FAULT(fault_in("bar.arrive 1, 64; bar.arrive 1, 64;", with_shared(0, 64)), "arrives twice");
    CHECK_FAULT(fault_in("bar.sync 16;"), "there is no barrier 16");
}

TEST_CASE("Who waits for ever is named, and what for") {
    std::string fault = fault_in(R"(
        setp.ne.u32 %p1, %r1, 0;
        @%p1 ret;
        wait:
        ld.relaxed.gpu.global.u32 %r2, [%rd1];
        setp.ne.u32 %p2, %r2, 12345;
        @%p2 bra wait;
    )");
    CHECK_FAULT(fault, "nobody can go on; block (0, 0, 0) warp 0 waits at PTX line");
}

// ----------------------------------------------------------------------------
// mbarriers and copies

namespace {

// Thread 0 loads 512 bytes; all threads wait, read and write; thread 0 stores them.
const char* pipeline = R"(
    mov.u32 %r3, dynamic;
    add.s32 %r4, %r3, 1024;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra ready;
    mbarrier.init.shared::cta.b64 [%r4], 1;
    fence.mbarrier_init.release.cluster;
    ready:
    bar.sync 0;  // ready
    @%p1 bra wait;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd2], 512, [%r4];
    wait:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0;
    @!%p2 bra wait;
    shl.b32 %r5, %r1, 2;
    add.s32 %r5, %r5, %r3;
    ld.shared.u32 %r6, [%r5];
    add.u32 %r6, %r6, 1;
    st.shared.u32 [%r5], %r6;
    fence.proxy.async.shared::cta;
    bar.sync 0;  // written
    @%p1 ret;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    st.shared.u32 [%r3], 1;
    cp.async.bulk.wait_group 0;
    ld.global.u32 %r7, [%rd1];
)";

std::string pipeline_fault(const std::string& from, const std::string& to) {
    return fault_in(changed(pipeline, from, to), with_shared(1088, 128));
}

}  // namespace

TEST_CASE("The copy engine's copies: what is not waited for, fenced or counted") {
    CHECK(fault_in(pipeline, with_shared(1088, 128)) == "none");
    CHECK_FAULT(pipeline_fault("mbarrier.init.shared::cta.b64 [%r4], 1;", ""), "nobody initialised it");
    CHECK_FAULT(pipeline_fault("bar.sync 0;  // ready", ""), "mbarrier");
    CHECK_FAULT(pipeline_fault("@!%p2 bra wait;", ""), "while a copy by the copy engine is under way");
    CHECK_FAULT(pipeline_fault("%p2, [%r4], 0;", "%p2, [%r4], 1;"), "reads shared memory");
    CHECK_FAULT(pipeline_fault("_, [%r4], 512;", "_, [%r4], 528;"), "waits for 0 arrivals and 16 bytes");
    CHECK_FAULT(pipeline_fault("[%r4], 1;", "[%r4], 2;"), "waits for 1 arrivals and 0 bytes");
    CHECK_FAULT(pipeline_fault("_, [%r4], 512;", "_, [%r4], 512; mbarrier.arrive.shared::cta.b64 _, [%r4];"),
                "more arrivals at an mbarrier than its phase expects");
    CHECK_FAULT(pipeline_fault("fence.proxy.async.shared::cta;", ""), "with no fence.proxy.async since");
    CHECK_FAULT(pipeline_fault("bar.sync 0;  // written", ""), "shared memory");
    CHECK_FAULT(pipeline_fault("cp.async.bulk.wait_group.read 0;", ""),
                "while a bulk store of warp 0 is under way");
    CHECK_FAULT(pipeline_fault("cp.async.bulk.wait_group 0;", ""), "reads global memory");
    CHECK_FAULT(pipeline_fault("cp.async.bulk.wait_group.read 0;\n    st.shared.u32 [%r3], 1;\n    "
                               "cp.async.bulk.wait_group 0;\n    ld.global.u32 %r7, [%rd1];",
                               ""),
                "the thread ends while a bulk store may still read shared memory");
    CHECK_FAULT(pipeline_fault("[%rd2], 512, [%r4];", "[%rd2], 500, [%r4];"), "no multiple of 16");
    CHECK_FAULT(pipeline_fault("[%rd2], 512, [%r4];", "[%rd2+4000], 512, [%r4];"),
                "allocation of 4096 bytes");
    CHECK_FAULT(pipeline_fault("st.shared.u32 [%r5], %r6;", "st.shared.u32 [%r4], %r6;"),
                "where an mbarrier is");
}

namespace {

// Block 0 stores 128 bytes by the copy engine and raises a flag; block 1 waits for the flag, reads them, and
// adds to them by the copy engine.
const char* handed_on = R"(
    setp.ne.u32 %p1, %r1, 0;
    mov.u32 %r3, dynamic;
    shl.b32 %r5, %r1, 2;
    add.s32 %r5, %r5, %r3;
    st.shared.f32 [%r5], 0f3F800000;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 ret;
    mov.u32 %r2, %ctaid.x;
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra second;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    fence.proxy.async.global;  // before the flag
    red.release.gpu.global.add.u32 [%rd1+256], 1;
    ret;
    second:
    ld.acquire.gpu.global.u32 %r4, [%rd1+256];
    and.b32 %r4, %r4, 1;
    setp.eq.u32 %p3, %r4, 0;
    @%p3 bra second;
    ld.global.f32 %f1, [%rd1];
    fence.proxy.async.global;  // after it
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r3], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    red.release.gpu.global.add.u32 [%rd1+256], 1;
)";

std::string handed_on_fault(const std::string& from, const std::string& to) {
    return fault_in(changed(handed_on, from, to), with_shared(128, 32, 2));
}

}  // namespace

TEST_CASE("The copy engine's stores, for others and for its own sums") {
    CHECK(handed_on_fault("ret;", "ret;") == "none");
    CHECK_FAULT(handed_on_fault("fence.proxy.async.global;  // before the flag", ""), "race");
    CHECK_FAULT(handed_on_fault("fence.proxy.async.global;  // after it", ""),
                "that another block wrote, with no fence.proxy.async.global since");
    CHECK(handed_on_fault("fence.proxy.async.global;  // after it", "fence.proxy.async;") == "none");
    CHECK_FAULT(handed_on_fault("cp.async.bulk.wait_group 0;\n    fence.proxy",
                                "cp.async.bulk.wait_group.read 0;\n    fence.proxy"),
                "race");
    CHECK_FAULT(handed_on_fault("red.release.gpu", "red.relaxed.gpu"), "race");
}

TEST_CASE("cp.async: what is not waited for, or by others") {
    std::string body = R"(
        shl.b32 %r2, %r1, 4;
        mov.u32 %r3, dynamic;
        add.s32 %r3, %r3, %r2;
        cvt.u64.u32 %rd3, %r2;
        add.s64 %rd3, %rd2, %rd3;
        cp.async.cg.shared.global [%r3], [%rd3], 16;
        cp.async.commit_group;
        cp.async.cg.shared.global [%r3+1024], [%rd3], 16;
        cp.async.commit_group;
        cp.async.wait_group 1;
        bar.sync 0;
        xor.b32 %r2, %r2, 1008;
        mov.u32 %r3, dynamic;
        add.s32 %r3, %r3, %r2;
        ld.shared.u32 %r4, [%r3];
    )";
    CHECK(fault_in(body, with_shared(2048, 64)) == "none");
    CHECK_FAULT(fault_in(changed(body, "wait_group 1", "wait_group 2"), with_shared(2048, 64)),
                "while a cp.async of warp");
    CHECK_FAULT(fault_in(changed(body, "bar.sync 0;", ""), with_shared(2048, 64)), "shared memory");
    CHECK_FAULT(fault_in(changed(body, "[%rd3], 16", "[%rd3+4], 16"), with_shared(2048, 64)),
                "not a multiple of 16");
}

// ----------------------------------------------------------------------------
// products

namespace {

// A warpgroup's product of two tiles of 64 x 16, rows of 128 bytes, into 32 registers.
std::string product_body() {
    std::string d;
    for (int k = 0; k < 32; k++) d += (k ? ", %f" : "%f") + std::to_string(100 + k);
    std::string zeros;
    for (int k = 0; k < 32; k++) zeros += "mov.f32 %f" + std::to_string(100 + k) + ", 0f00000000;\n";
    return R"(
        mov.u32 %r3, dynamic;
        shl.b32 %r4, %r1, 7;
        add.s32 %r4, %r4, %r3;
        mov.u32 %r5, 0;
        fill:
        st.shared.u32 [%r4], %r5;
        add.s32 %r4, %r4, 4;
        add.s32 %r5, %r5, 1;
        setp.lt.u32 %p1, %r5, 32;
        @%p1 bra fill;
        fence.proxy.async.shared::cta;
        bar.sync 0;  // filled
        cvt.u64.u32 %rd3, %r3;
        shr.u64 %rd3, %rd3, 4;
        or.b64 %rd3, %rd3, 0x4000004000000000;
        add.s64 %rd4, %rd3, 512;
        setp.eq.u32 %p2, %r1, %r1;
    )" + zeros +
           R"(
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {)" +
           d + R"(}, %rd3, %rd4, %p2, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        bar.sync 0;  // read
        st.shared.f32 [%r3+16384], %f100;
        mov.f32 %f1, %f100;
    )";
}

std::string product_fault(const std::string& from, const std::string& to) {
    std::string body = changed(product_body(), "st.shared.f32 [%r3+16384], %f100;",
                               "shl.b32 %r6, %r1, 2;\nadd.s32 %r6, %r6, %r3;\nst.shared.f32 [%r6], %f100;");
    return fault_in(from.empty() ? body : changed(body, from, to), with_shared(16384, 128));
}

}  // namespace

TEST_CASE("Products: registers and shared memory touched while they are under way, and fences") {
    CHECK(product_fault("", "") == "none");
    CHECK_FAULT(product_fault("wgmma.wait_group.sync.aligned 0;", ""), "a product under way writes");
    CHECK_FAULT(product_fault("wait_group.sync.aligned 0;", "wait_group.sync.aligned 1;"),
                "a product under way writes");
    CHECK_FAULT(product_fault("wgmma.wait_group.sync.aligned 0;", "mov.f32 %f100, 0f00000000;"),
                "sets a register that a product under way writes");
    CHECK_FAULT(product_fault("wgmma.fence.sync.aligned;", ""), "with no wgmma.fence since");
    CHECK_FAULT(product_fault("fence.proxy.async.shared::cta;", ""), "with no fence.proxy.async since");
    CHECK_FAULT(product_fault("bar.sync 0;  // filled", ""), "shared memory");
    CHECK_FAULT(product_fault("bar.sync 0;  // read", ""), "shared memory");
    // One lane overwrites the tile before the product has read it.
    CHECK_FAULT(product_fault("wgmma.wait_group.sync.aligned 0;",
                              "st.shared.u32 [%r3], 0; wgmma.wait_group.sync.aligned 0;"),
                "shared memory");
    CHECK_FAULT(product_fault("mov.f32 %f117, 0f00000000;", ""), "which nobody set");
    CHECK_FAULT(product_fault("setp.eq.u32 %p2, %r1, %r1;", "setp.eq.u32 %p2, %r1, 3;"), "scale-d differs");
    CHECK_FAULT(product_fault("add.s64 %rd4, %rd3, 512;", "add.s64 %rd4, %rd3, 1024;"),
                "of which the block has");
    CHECK_FAULT(product_fault("shr.u64 %rd3, %rd3, 4;",
                              "cvt.u64.u32 %rd5, %r1; shr.u64 %rd5, %rd5, 4; shr.u64 "
                              "%rd3, %rd3, 4; add.s64 %rd3, %rd3, %rd5;"),
                "descriptor differs");
}
