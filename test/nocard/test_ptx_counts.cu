/*
The work of a card's units, counted in kernels of a few lines.
*/
#include "test/nocard/ptx_testing.h"

using namespace nocard;
using namespace nocard::testing;

namespace {

// Runs the body in one block; "out" and "in" have 4,096 floats each.
GridCounts counts_of(const std::string& body, unsigned threads = 32) {
    Memory<float> out(4096), in(4096);
    auto module = kernel_of(body, ".shared .align 16 .b8 tile[16384];");
    GridCall call;
    call.module = module.get();
    call.kernel = "k";
    call.block = {threads, 1, 1};
    call.parameters = Parameters::of(out.data(), in.data()).bytes;
    call.resources.registers = 32;
    call.card = hopper();
    call.counts_bytes = call.counts_units = true;
    return run_grid(call);
}

// Each lane writes `words` words to shared memory, `stride` bytes after those of the lane before it.
UnitCounts shared_stores(int words, int stride) {
    std::string address = "mul.lo.u32 %r2, %r1, " + std::to_string(stride) +
                          ";\nmov.u32 %r3, tile;\n"
                          "add.u32 %r3, %r3, %r2;\n";
    const char* store = words == 1   ? "st.shared.u32 [%r3], %r1;"
                        : words == 2 ? "st.shared.v2.u32 [%r3], {%r1, %r1};"
                                     : "st.shared.v4.u32 [%r3], {%r1, %r1, %r1, %r1};";
    return counts_of(address + store).units;
}

}  // namespace

TEST_CASE("conflicts of banks") {
    struct {
        int words, stride;
        uint64_t passes, least;
    } of_stores[] = {{1, 4, 1, 1},  {1, 8, 2, 1},  {1, 128, 32, 1}, {1, 132, 1, 1},  {2, 8, 2, 2},
                     {2, 16, 4, 2}, {4, 16, 4, 4}, {4, 32, 8, 4},   {4, 128, 32, 4}, {4, 144, 4, 4}};
    for (auto [words, stride, passes, least] : of_stores) {
        CAPTURE(words);
        CAPTURE(stride);
        UnitCounts counts = shared_stores(words, stride);
        CHECK(counts.passes == passes);
        CHECK(counts.least_passes == least);
    }
    // all lanes read the same word
    UnitCounts read = counts_of("shl.b32 %r2, %r1, 2;\nmov.u32 %r3, tile;\nadd.u32 %r3, %r3, %r2;\n"
                                "st.shared.u32 [%r3], %r1;\nbar.sync 0;\nld.shared.u32 %r4, [tile];")
                          .units;
    CHECK(read.passes == 2);
}

TEST_CASE("sectors of global memory") {
    auto loads = [](int stride, const char* load, const char* store) {
        return counts_of("mul.wide.u32 %rd3, %r1, " + std::to_string(stride) +
                         ";\nadd.s64 %rd4, %rd2, %rd3;\nadd.s64 %rd5, %rd1, %rd3;\n" + load + "\n" + store);
    };
    GridCounts floats = loads(4, "ld.global.f32 %f1, [%rd4];", "st.global.f32 [%rd5], %f1;");
    CHECK(floats.units.sectors == 4 + 4);
    CHECK(floats.units.asked == 128 + 128);
    CHECK(floats.read == 128);
    CHECK(floats.written == 128);
    GridCounts apart = loads(64, "ld.global.f32 %f1, [%rd4];", "st.global.f32 [%rd5], %f1;");
    CHECK(apart.units.sectors == 32 + 32);
    CHECK(apart.units.asked == 128 + 128);
    GridCounts vectors = loads(16, "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd4];",
                               "st.global.v4.f32 [%rd5], {%f1, %f2, %f3, %f4};");
    CHECK(vectors.units.sectors == 16 + 16);
    CHECK(vectors.units.asked == 512 + 512);
    GridCounts same = loads(0, "ld.global.f32 %f1, [%rd4];", "");
    CHECK(same.units.sectors == 1);
    CHECK(same.units.asked == 4);
    GridCounts sums = loads(4, "mov.f32 %f1, 0f3F800000;", "red.global.add.f32 [%rd5], %f1;");
    CHECK(sums.units.sectors == 4);
    CHECK(sums.units.asked == 128);
}

TEST_CASE("copies from global to shared memory") {
    GridCounts counts = counts_of("mul.wide.u32 %rd3, %r1, 16;\nadd.s64 %rd4, %rd2, %rd3;\n"
                                  "mul.lo.u32 %r2, %r1, 32;\nmov.u32 %r3, tile;\nadd.u32 %r3, %r3, %r2;\n"
                                  "cp.async.cg.shared.global [%r3], [%rd4], 16;\ncp.async.wait_all;");
    CHECK(counts.units.sectors == 16);
    CHECK(counts.units.asked == 512);
    CHECK(counts.units.passes == 8);  // every second unit of 16 bytes
    CHECK(counts.units.least_passes == 4);
}

TEST_CASE("instructions by their unit, and lanes that are off") {
    const std::string begin = "mov.f32 %f1, 0f3F800000;\n";
    UnitCounts none = counts_of(begin).units;
    auto more = [&](const std::string& body) {
        UnitCounts counts = counts_of(begin + body).units;
        return std::vector<uint64_t>{counts.issued - none.issued, counts.fp32 - none.fp32,
                                     counts.integer - none.integer, counts.special - none.special,
                                     counts.lanes - none.lanes};
    };
    using Counts = std::vector<uint64_t>;
    CHECK(more("mov.f32 %f2, %f1;") == Counts{0, 0, 0, 0, 0});
    CHECK(more("fma.rn.f32 %f2, %f1, %f1, %f1;\nadd.f32 %f2, %f2, %f1;") == Counts{2, 2, 0, 0, 64});
    CHECK(more("max.f32 %f2, %f1, %f1;\nadd.u32 %r2, %r1, %r1;") == Counts{2, 0, 2, 0, 64});
    CHECK(more("ex2.approx.ftz.f32 %f2, %f1;\ncvt.rn.f32.u32 %f3, %r1;") == Counts{2, 0, 0, 2, 64});
    CHECK(more("cvt.rn.bf16x2.f32 %r2, %f1, %f1;") == Counts{1, 0, 1, 0, 32});
    // setp, and a multiplication in 12 lanes
    CHECK(more("setp.lt.u32 %p1, %r1, 12;\n@%p1 mul.f32 %f2, %f1, %f1;") == Counts{2, 1, 1, 0, 32 + 12});
    // the branch, and then 20 lanes that multiply
    CHECK(more("setp.lt.u32 %p1, %r1, 12;\n@%p1 bra done;\nmul.f32 %f2, %f1, %f1;\ndone:") ==
          Counts{3, 1, 1, 0, 32 + 12 + 20});
}

TEST_CASE("products of tensor cores, and blocks of a multiprocessor") {
    std::string zeros;
    for (int i = 10; i < 20; i++) zeros += "mov.u32 %r" + std::to_string(i) + ", 0;\n";
    for (int i = 1; i < 5; i++) zeros += "mov.f32 %f" + std::to_string(i) + ", 0f00000000;\n";
    UnitCounts counts =
        counts_of(zeros + "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, "
                          "%f4}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%f1, %f2, %f3, "
                          "%f4};")
            .units;
    CHECK(counts.multiply_adds == 16 * 8 * 16);
    CHECK(counts.by_warps);
    CHECK(counts.blocks == (228 << 10) / (16384 + 1024));          // limited by shared memory
    CHECK(counts_of("", 1024).units.blocks == 65536 / 32 / 1024);  // limited by registers
}
