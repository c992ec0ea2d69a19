// Tests of the PTX interpreter: kernels that Triton compiled, which run on cards, compared with plain sums.
// test/golden/make_triton_ptx.py makes them.
#include "test/nocard/ptx_testing.h"

#include <zlib.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>

using namespace nocard;
using namespace nocard::testing;

namespace {

struct TritonKernel {
    std::shared_ptr<PtxModule> module;
    unsigned warps = 0, shared = 0;
};

TritonKernel triton_kernel(const std::string& name) {
    std::string path = "test/golden/triton/" + name + ".ptx.gz", text;
    gzFile file = gzopen(path.c_str(), "rb");
    REQUIRE_MESSAGE(file, path);
    char buffer[65536];
    for (int n; (n = gzread(file, buffer, sizeof buffer)) > 0;) text.append(buffer, (size_t)n);
    gzclose(file);
    TritonKernel kernel;
    REQUIRE(sscanf(text.c_str(), "// warps %u shared %u", &kernel.warps, &kernel.shared) == 2);
    kernel.module = load_ptx(text, name);
    return kernel;
}

void run_triton(const TritonKernel& kernel, const std::string& name, Dim3 grid, Parameters parameters,
                uint64_t seed) {
    parameters.add<void*>(nullptr).add<void*>(nullptr);  // scratch memory, which these kernels do not use
    Launch launch{grid, {32 * kernel.warps, 1, 1}};
    launch.shared = kernel.shared;
    launch.seed = seed;
    launch.registers = 128;
    run(*kernel.module, name, parameters, launch);
}

// Small random numbers: in memory as T, and as floats.
template <typename T>
struct Numbers {
    Memory<T> memory;
    std::vector<float> values;
    Numbers(size_t size, unsigned seed, T (*to)(float), float (*from)(T)) : memory(size), values(size) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < size; i++) {
            memory[i] = to(normal(random));
            values[i] = from(memory[i]);
        }
    }
};

using Bf16s = Numbers<uint16_t>;
Bf16s bf16s(size_t size, unsigned seed) {
    return Bf16s(size, seed, ptx::to_bf16, ptx::from_bf16);
}

uint8_t to_e4m3(float x) {
    return (uint8_t)ptx::e4m3.encode(x, true);
}
float from_e4m3(uint8_t x) {
    return ptx::e4m3.decode(x);
}
uint8_t to_e5m2(float x) {
    return (uint8_t)ptx::e5m2.encode(x, true);
}
float from_e5m2(uint8_t x) {
    return ptx::e5m2.decode(x);
}

// Returns the largest difference from plain sums of products, whose operands have these strides.
double largest_difference(int M, int N, int K, const std::vector<float>& a, int sam, int sak,
                          const std::vector<float>& b, int sbk, int sbn, const std::function<float(int)>& c) {
    double largest = 0;
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < N; n++) {
            double sum = 0;
            for (int k = 0; k < K; k++)
                sum += (double)a[(size_t)(m * sam + k * sak)] * b[(size_t)(k * sbk + n * sbn)];
            double difference = std::fabs(sum - c(m * N + n));
            largest = difference <= largest ? largest : std::isnan(difference) ? INFINITY : difference;
        }
    }
    return largest;
}

constexpr int M = 128, N = 128, K = 192;

// The map of a bf16 matrix (rows, columns), as the driver encodes it.
struct alignas(64) MapBytes {
    char bytes[128] = {};
};
MapBytes map_of(uint16_t* matrix, unsigned rows, unsigned columns, unsigned box_rows, unsigned box_columns) {
    TensorMap map;
    map.address = (char*)matrix;
    map.rank = 2, map.element_bytes = 2;
    map.size[0] = columns, map.size[1] = rows;
    map.stride[0] = columns * 2;
    map.box[0] = (uint16_t)std::min(box_columns, 64u), map.box[1] = (uint16_t)box_rows;
    map.swizzle = map.box[0] == 64 ? 3 : map.box[0] == 32 ? 2 : 1;
    MapBytes made;
    memcpy(made.bytes, &map, sizeof map);
    return made;
}

}  // namespace

TEST_CASE("Products in bf16: cp.async, ldmatrix and mma for 8.0, wgmma with all majors for 9.0") {
    auto a = bf16s(M * K, 1), b = bf16s(K * N, 2);
    struct Layout {
        const char* name;
        int sam, sak, sbk, sbn, first_stride, second_stride;
    };
    for (Layout layout :
         {Layout{"nn", K, 1, N, 1, K, N}, Layout{"nt", K, 1, 1, K, K, K}, Layout{"tn", 1, M, N, 1, M, N}}) {
        for (const char* capability : {"_80", "_90"}) {
            auto kernel = triton_kernel(std::string("product_") + layout.name + capability);
            for (uint64_t seed = 1; seed < 4; seed++) {
                Memory<float> c(M * N, false);
                run_triton(kernel, "product", {M / 64, N / 64, 1},
                           Parameters::of(a.memory.data(), b.memory.data(), c.data(), K, layout.first_stride,
                                          layout.second_stride, N),
                           seed);
                CHECK(largest_difference(M, N, K, a.values, layout.sam, layout.sak, b.values, layout.sbk,
                                         layout.sbn, [&](int i) { return c[(size_t)i]; }) < 1e-4);
            }
        }
    }
}

TEST_CASE("Products in fp8, by wgmma for 9.0 and by way of fp16 for 8.0") {
    auto check = [](const char* name, auto& a, auto& b) {
        auto kernel = triton_kernel(name);
        Memory<float> c(M * N, false);
        run_triton(kernel, "product", {M / 64, N / 64, 1},
                   Parameters::of(a.memory.data(), b.memory.data(), c.data(), K, K, K, N), 3);
        CHECK(largest_difference(M, N, K, a.values, K, 1, b.values, 1, K,
                                 [&](int i) { return c[(size_t)i]; }) < 1e-4);
    };
    Numbers<uint8_t> a4(M * K, 3, to_e4m3, from_e4m3), b4(K * N, 4, to_e4m3, from_e4m3);
    Numbers<uint8_t> a5(M * K, 5, to_e5m2, from_e5m2), b5(K * N, 6, to_e5m2, from_e5m2);
    check("product_fp8e4nv_90", a4, b4);
    check("product_fp8e5_90", a5, b5);
    check("product_fp8e5_80", a5, b5);
}

TEST_CASE("Products of boxes that the copy engine brings and takes, with two swizzles") {
    auto a = bf16s(M * K, 7), b = bf16s(N * K, 8);
    for (bool narrow : {false, true}) {
        unsigned bn = narrow ? 32 : 128, bk = narrow ? 32 : 64;
        auto kernel = triton_kernel(narrow ? "product_narrow_boxes_90" : "product_boxes_90");
        for (uint64_t seed = 1; seed < 4; seed++) {
            Memory<uint16_t> c(M * N, false);
            Parameters parameters;
            auto add_box = [&](uint16_t* matrix, unsigned rows, unsigned columns, unsigned box_rows,
                               unsigned box_columns) {
                parameters.add(map_of(matrix, rows, columns, box_rows, box_columns), 64);
                parameters.add((int)rows).add((int)columns).add((int64_t)columns).add((int64_t)1);
            };
            add_box(a.memory.data(), M, K, 64, bk);
            add_box(b.memory.data(), N, K, bn, bk);
            add_box(c.data(), M, N, 64, bn);
            parameters.add(K);
            run_triton(kernel, "product_of_boxes", {M / 64, N / bn, 1}, parameters, seed);
            CHECK(largest_difference(M, N, K, a.values, K, 1, b.values, 1, K,
                                     [&](int i) { return ptx::from_bf16(c[(size_t)i]); }) < 0.2);
        }
    }
}

namespace {

constexpr int T = 128, D = 64, heads = 2;

// Attention of one head in double precision, and its gradients.
struct PlainAttention {
    std::vector<double> out, dq, dk, dv, logs, delta;

    PlainAttention(const float* q, const float* k, const float* v, const float* dout, double scale)
        : out(T * D), dq(T * D), dk(T * D), dv(T * D), logs(T), delta(T) {
        auto dot = [](const auto* x, const auto* y) {
            double sum = 0;
            for (int d = 0; d < D; d++) sum += (double)x[d] * y[d];
            return sum;
        };
        for (int i = 0; i < T; i++) {
            std::vector<double> p((size_t)i + 1);
            double total = 0;
            for (int j = 0; j <= i; j++) total += p[(size_t)j] = std::exp(scale * dot(q + i * D, k + j * D));
            for (double& x : p) x /= total;
            logs[(size_t)i] = std::log2(total);
            for (int j = 0; j <= i; j++) {
                for (int d = 0; d < D; d++) out[(size_t)(i * D + d)] += p[(size_t)j] * v[j * D + d];
            }
            for (int d = 0; d < D; d++) delta[(size_t)i] += out[(size_t)(i * D + d)] * dout[i * D + d];
            for (int j = 0; j <= i; j++) {
                double ds = p[(size_t)j] * (dot(dout + i * D, v + j * D) - delta[(size_t)i]) * scale;
                for (int d = 0; d < D; d++) {
                    dv[(size_t)(j * D + d)] += p[(size_t)j] * dout[i * D + d];
                    dq[(size_t)(i * D + d)] += ds * k[j * D + d];
                    dk[(size_t)(j * D + d)] += ds * q[i * D + d];
                }
            }
        }
    }
};

template <typename Value>
double relative_error(const std::vector<double>& want, Value value) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < want.size(); i++) {
        difference += (value(i) - want[i]) * (value(i) - want[i]);
        norm += want[i] * want[i];
    }
    double error = std::sqrt(difference / norm);
    return std::isnan(error) ? INFINITY : error;
}

}  // namespace

TEST_CASE("Attention, forward and backward, for 8.0 and 9.0") {
    constexpr size_t size = heads * T * D;
    auto q = bf16s(size, 11), k = bf16s(size, 12), v = bf16s(size, 13), dout = bf16s(size, 14);
    double scale = 1 / std::sqrt((double)D);
    float log_scale = (float)(scale * std::log2(std::exp(1.0)));
    std::vector<PlainAttention> want;
    for (int h = 0; h < heads; h++) {
        want.emplace_back(&q.values[(size_t)(h * T * D)], &k.values[(size_t)(h * T * D)],
                          &v.values[(size_t)(h * T * D)], &dout.values[(size_t)(h * T * D)], scale);
    }
    for (const char* capability : {"_80", "_90"}) {
        auto forward = triton_kernel(std::string("attention_forward") + capability);
        auto backward = triton_kernel(std::string("attention_backward") + capability);
        for (uint64_t seed = 1; seed < 3; seed++) {
            Memory<uint16_t> out(size, false), dk(size, false), dv(size, false);
            Memory<float> logs(heads * T, false), delta(heads * T), dq(std::vector<float>(size, 0.f));
            run_triton(forward, "attention_forward", {T / 64, heads, 1},
                       Parameters::of(q.memory.data(), k.memory.data(), v.memory.data(), out.data(),
                                      logs.data(), T, log_scale),
                       seed);
            for (int h = 0; h < heads; h++) {
                for (int i = 0; i < T; i++)
                    delta[(size_t)(h * T + i)] = (float)want[(size_t)h].delta[(size_t)i];
            }
            run_triton(backward, "attention_backward", {T / 64, heads, 1},
                       Parameters::of(q.memory.data(), k.memory.data(), v.memory.data(), dout.memory.data(),
                                      logs.data(), delta.data(), dq.data(), dk.data(), dv.data(), T,
                                      (float)scale, log_scale),
                       seed);
            for (size_t h = 0; h < heads; h++) {
                size_t at = h * T * D;
                auto bf16_at = [at](Memory<uint16_t>& x) {
                    return [at, &x](size_t i) { return (double)ptx::from_bf16(x[at + i]); };
                };
                CHECK(relative_error(want[h].logs, [&](size_t i) { return (double)logs[h * T + i]; }) < 1e-5);
                CHECK(relative_error(want[h].out, bf16_at(out)) < 5e-3);
                CHECK(relative_error(want[h].dv, bf16_at(dv)) < 5e-3);
                CHECK(relative_error(want[h].dk, bf16_at(dk)) < 8e-3);
                CHECK(relative_error(want[h].dq, [&](size_t i) { return (double)dq[at + i]; }) < 8e-3);
            }
        }
    }
}
