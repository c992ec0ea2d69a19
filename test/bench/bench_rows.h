/*
Rows of bench_kernels: the kernels of a block between its products, which are memory-bound. Bytes count every
input and output once; sums that fit in a cache are not counted.
*/
#pragma once

#include "kernels/gelu.cuh"
#include "kernels/norm.cuh"
#include "kernels/qk_norm.cuh"
#include "kernels/elementwise.cuh"
#include "kernels/rope.cuh"
#include "kernels/swiglu.cuh"
#include "kernels/causal_conv.cuh"
#include "test/bench/bench_kernels.h"

// ----------------------------------------------------------------------------
// norms

struct NormCase {
    Norm norm;
    int N, C;
};

// Mean (0 for rmsnorm) and 1/deviation of each row of the elements at(element).
template <typename At>
std::vector<std::pair<double, double>> row_statistics(Norm norm, int N, int C, double eps, At&& at) {
    std::vector<std::pair<double, double>> rows(N);
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        double mean = 0, variance = 0;
        for (int c = 0; c < C; c++) mean += at((size_t)n * C + c) / C;
        if (norm == Norm::rmsnorm) mean = 0;
        for (int c = 0; c < C; c++) variance += std::pow(at((size_t)n * C + c) - mean, 2) / C;
        rows[n] = {mean, 1 / std::sqrt(variance + eps)};
    }
    return rows;
}

inline void norm_rows(Bench& bench) {
    const std::vector<NormCase> of_gpus = {{Norm::layernorm, 32768, 768},
                                           {Norm::layernorm, 16384, 1600},
                                           {Norm::rmsnorm, 8192, 4096}},
                                of_all = {{Norm::layernorm, 50, 96}, {Norm::rmsnorm, 33, 160}};
    constexpr float eps = 1e-5f;
    for (auto [norm, N, C] : bench.pick(of_gpus, of_all)) {
        bool layernorm = norm == Norm::layernorm;
        size_t size = (size_t)N * C;
        std::string shape = text("%s %d x %d", layernorm ? "layernorm" : "rmsnorm", N, C);
        Numbers<floatX> inp(size, "inp", bench.stream), added(size, "added", bench.stream);
        Numbers<floatX> dout(size, "dout", bench.stream), dinp(size, "dinp", bench.stream);
        Numbers<floatX> weight(C, "weight", bench.stream, 0.1f, 1), bias(C, "bias", bench.stream);
        Numbers<float> dweight(C, "dweight", bench.stream), dbias(C, "dbias", bench.stream);
        Array<floatX> residual(size, bench.stream), out(size, bench.stream);
        Array<float> means(N, bench.stream), rstd(N, bench.stream);
        Array<float> scratch(norm_backward_scratch(C), bench.stream);
        float *mean = layernorm ? means.data : nullptr, *of_dbias = layernorm ? dbias.data : nullptr;
        const floatX* of_bias = layernorm ? bias.data : nullptr;

        auto sum = [&](size_t i) { return float(floatX(float(inp.at(i) + added.at(i)))); };
        auto check_forward = [&](Check& check, auto&& input) {
            auto rows = row_statistics(norm, N, C, eps, input);
            check.compare(out, rounded_limit, [&](size_t i) {
                auto [mean, rstd] = rows[i / C];
                return (input(i) - mean) * rstd * weight.at(i % C) + (layernorm ? bias.at(i % C) : 0);
            });
        };
        bench.row(
            "residual + norm", shape, {.bytes = 4 * size * element},
            [&] {
                residual_norm_forward(norm, residual, out, mean, rstd, inp, added, weight, of_bias, N, C, eps,
                                      bench.stream);
            },
            [&](Check& check) {
                check.compare(residual, rounded_limit, sum);
                check_forward(check, sum);
            });
        bench.row(
            "norm forward", shape, {.bytes = 2 * size * element},
            [&] { norm_forward(norm, out, mean, rstd, inp, weight, of_bias, N, C, eps, bench.stream); },
            [&](Check& check) { check_forward(check, [&](size_t i) { return inp.at(i); }); });
        bench.row(
            "norm backward", shape, {.bytes = 4 * size * element},
            [&] {
                norm_backward(norm, dinp, dweight, of_dbias, scratch, dout, inp, weight, mean, rstd, N, C,
                              bench.stream);
            },
            [&](Check& check) {
                auto rows = row_statistics(norm, N, C, eps, [&](size_t i) { return inp.at(i); });
                auto normed = [&](size_t i) { return (inp.at(i) - rows[i / C].first) * rows[i / C].second; };
                auto gradient = [&](size_t i) { return dout.at(i) * weight.at(i % C); };
                check.compare(dinp, rounded_limit, [&](size_t i) {
                    double mean = 0, product = 0;
                    for (size_t j = i / C * C; j < (i / C + 1) * C; j++) {
                        if (layernorm) mean += gradient(j) / C;
                        product += gradient(j) * normed(j) / C;
                    }
                    return dinp.at(i) + rows[i / C].second * (gradient(i) - mean - normed(i) * product);
                });
                auto column = [&](size_t c, auto&& value) {
                    double sum = 0;
                    for (size_t i = c; i < size; i += C) sum += value(i);
                    return sum;
                };
                check.compare(dweight, summed_limit, [&](size_t c) {
                    return dweight.at(c) + column(c, [&](size_t i) { return dout.at(i) * normed(i); });
                });
                if (!layernorm) return;
                check.compare(dbias, summed_limit, [&](size_t c) {
                    return dbias.at(c) + column(c, [&](size_t i) { return dout.at(i); });
                });
            });
    }
}

// ----------------------------------------------------------------------------
// queries and keys

struct HeadsCase {
    int B, T, NH, NKV, HS;

    int row() const { return (NH + 2 * NKV) * HS; }
    std::string text() const { return ::text("%d x %d, %d/%d heads of %d", B, T, NH, NKV, HS); }
};

inline const std::vector<HeadsCase>& heads_cases(const Bench& bench) {
    static const std::vector<HeadsCase> of_gpus = {{1, 8192, 32, 8, 128}, {4, 8192, 32, 8, 64}},
                                        of_all = {{2, 31, 4, 2, 32}};
    return bench.pick(of_gpus, of_all);
}

inline void rope_rows(Bench& bench) {
    for (const HeadsCase& c : heads_cases(bench)) {
        auto [B, T, NH, NKV, HS] = c;
        std::vector<float> angles((size_t)T * HS);
        rope_table(angles.data(), T, HS, 500000, {});
        Array<float> table(angles.size(), bench.stream);
        Positions places(B, T, bench.stream);
        copy_to_device(table.data, angles.data(), angles.size(), bench.stream);
        double bytes = 2.0 * B * T * (NH + NKV) * HS * element;
        for (bool forward : {true, false}) {
            Numbers<floatX> qkv((size_t)B * T * c.row(), "qkv", bench.stream);
            bench.row(
                forward ? "rope forward" : "rope backward", c.text(), {.bytes = bytes},
                [&] {
                    Rotation rotation = {table, places.positions, HS};
                    QkvRows rows = {B * T, NH, NKV, HS};
                    forward ? rope_forward(qkv, rotation, rows, bench.stream)
                            : rope_backward(qkv, rotation, rows, bench.stream);
                },
                [&](Check& check) {
                    check.compare(qkv, rounded_limit, [&](size_t e) {
                        int head = (int)(e / HS % (NH + 2 * NKV)), i = (int)(e % HS), half = HS / 2;
                        if (head >= NH + NKV) return qkv.at(e);
                        double t = (double)(e / c.row() % T), turn = forward ? 1 : -1;
                        double angle = turn * t * std::pow(500000.0, -2.0 * (i % half) / HS);
                        double other = i < half ? -qkv.at(e + half) : qkv.at(e - half);
                        return qkv.at(e) * std::cos(angle) + other * std::sin(angle);
                    });
                });
        }
    }
}

inline void qk_norm_rows(Bench& bench) {
    constexpr float eps = 1e-6f;
    for (const HeadsCase& c : heads_cases(bench)) {
        auto [B, T, NH, NKV, HS] = c;
        int N = B * T, heads = NH + 2 * NKV;
        size_t size = (size_t)N * c.row();
        Numbers<floatX> inp(size, "inp", bench.stream), dout(size, "dout", bench.stream);
        Numbers<floatX> qweight(HS, "qweight", bench.stream, 0.1f, 1),
            kweight(HS, "kweight", bench.stream, 0.1f, 1);
        Numbers<float> dqweight(HS, "dqweight", bench.stream), dkweight(HS, "dkweight", bench.stream);
        Array<floatX> out(size, bench.stream), dinp(size, bench.stream);
        Array<float> rstd((size_t)N * (NH + NKV), bench.stream);
        Array<float> scratch(qk_norm_backward_scratch(HS), bench.stream);
        auto head_of = [&](size_t e) { return (int)(e / HS % heads); };
        auto weight_of = [&](size_t e) { return (head_of(e) < NH ? qweight : kweight).at(e % HS); };
        auto rstd_of = [&](size_t e) {
            double squares = 0;
            for (size_t i = e / HS * HS; i < (e / HS + 1) * HS; i++) squares += inp.at(i) * inp.at(i);
            return 1 / std::sqrt(squares / HS + eps);
        };
        bench.row(
            "qk norm forward", c.text(), {.bytes = 2 * size * element},
            [&] {
                qk_norm_forward(out, rstd, inp, qweight, kweight, {}, {N, NH, NKV, HS}, eps, bench.stream);
            },
            [&](Check& check) {
                check.compare(out, rounded_limit, [&](size_t e) {
                    return inp.at(e) * (head_of(e) < NH + NKV ? rstd_of(e) * weight_of(e) : 1);
                });
            });
        bench.row(
            "qk norm backward", c.text(), {.bytes = 3 * size * element},
            [&] {
                qk_norm_backward(dinp, dqweight, dkweight, scratch, dout, inp, rstd, qweight, kweight, {},
                                 {N, NH, NKV, HS}, bench.stream);
            },
            [&](Check& check) {
                check.compare(dinp, rounded_limit, [&](size_t e) {
                    if (head_of(e) >= NH + NKV) return dout.at(e);
                    double rstd = rstd_of(e), mean = 0;
                    for (size_t i = e / HS * HS; i < (e / HS + 1) * HS; i++)
                        mean += dout.at(i) * weight_of(i) * inp.at(i) * rstd / HS;
                    return rstd * (dout.at(e) * weight_of(e) - inp.at(e) * rstd * mean);
                });
                std::vector<double> sums(HS);
#pragma omp parallel for
                for (int i = 0; i < HS; i++) {
                    for (size_t e = i; e < size; e += HS)
                        if (head_of(e) < NH) sums[i] += dout.at(e) * inp.at(e) * rstd_of(e);
                }
                check.compare(dqweight, summed_limit, [&](size_t i) { return dqweight.at(i) + sums[i]; });
            });
    }
}

// ----------------------------------------------------------------------------
// local filter: sums over taps of one sequence, and copies of columns

inline void causal_conv_rows(Bench& bench) {
    const std::vector<std::pair<int, int>> of_gpus = {{8192, 2048}, {4096, 8192}}, of_all = {{21, 96}};
    for (auto [N, C] : bench.pick(of_gpus, of_all)) {
        size_t size = (size_t)N * C, width = C;
        std::string shape = text("%d x %d", N, C);
        Numbers<floatX> inp(2 * size, "inp", bench.stream), dout(size, "dout", bench.stream);
        Numbers<floatX> bias(C, "bias", bench.stream);
        Array<floatX> out(size, bench.stream), dinp(2 * size, bench.stream);
        ConvRows rows = {.N = N, .T = N};
        bench.row(
            "tap sum forward", shape, {.bytes = 3 * size * element},
            [&, N = N, C = C] { causal_conv_forward(out, inp, bias, rows, 0, N, C, bench.stream); },
            [&](Check& check) {
                check.compare(out, rounded_limit, [&](size_t e) {
                    size_t n = e / width, c = e % width;
                    double before = n > 0 ? inp.at((n - 1) * 2 * width + c) : 0;
                    return before + inp.at((n * 2 + 1) * width + c) + bias.at(c);
                });
            });
        bench.row(
            "tap sum backward", shape, {.bytes = 3 * size * element},
            [&, N = N, C = C] { causal_conv_backward(dinp, dout, rows, 0, N, C, bench.stream); },
            [&](Check& check) {
                check.compare(dinp, rounded_limit, [&](size_t e) {
                    size_t from = e / width / 2 + (e / width + 1) % 2, c = e % width;
                    return from * width < size ? dout.at(from * width + c) : 0;
                });
            });
        bench.row(
            "columns", shape, {.bytes = 2 * size * element},
            [&, N = N] { copy_columns<floatX>(out, width, inp + width, 2 * width, width, N, bench.stream); },
            [&](Check& check) {
                check.compare(out, rounded_limit,
                              [&](size_t e) { return inp.at((e / width * 2 + 1) * width + e % width); });
            });
    }
}

// ----------------------------------------------------------------------------
// activations of the MLP, sums

inline void swiglu_rows(Bench& bench) {
    const std::vector<std::pair<int, int>> of_gpus = {{8192, 14336}, {16384, 8192}}, of_all = {{21, 96}};
    for (auto [N, F] : bench.pick(of_gpus, of_all)) {
        size_t size = (size_t)N * F, width = F;
        std::string shape = text("%d x %d", N, F);
        Numbers<floatX> inp(2 * size, "inp", bench.stream), dout(size, "dout", bench.stream);
        Array<floatX> out(size, bench.stream), dinp(2 * size, bench.stream);
        auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
        bench.row(
            "swiglu forward", shape, {.bytes = 3 * size * element},
            [&, N = N, F = F] { swiglu_forward(out, inp, N, F, bench.stream); },
            [&](Check& check) {
                check.compare(out, rounded_limit, [&](size_t e) {
                    size_t gate = e / width * 2 * width + e % width;
                    return inp.at(gate) * sigmoid(inp.at(gate)) * inp.at(gate + width);
                });
            });
        bench.row(
            "swiglu backward", shape, {.bytes = 5 * size * element},
            [&, N = N, F = F] { swiglu_backward(dinp, dout, inp, N, F, bench.stream); },
            [&](Check& check) {
                check.compare(dinp, rounded_limit, [&](size_t e) {
                    size_t n = e / (2 * width), f = e % width;
                    double gate = inp.at(n * 2 * width + f), up = inp.at(n * 2 * width + width + f);
                    double s = sigmoid(gate), slope = s * (1 + gate * (1 - s));
                    return dout.at(n * width + f) * (e % (2 * width) < width ? up * slope : gate * s);
                });
            });
    }
}

inline void gelu_rows(Bench& bench) {
    const std::vector<size_t> of_gpus = {(size_t)32768 * 3072}, of_all = {1000};
    for (size_t n : bench.pick(of_gpus, of_all)) {
        Numbers<floatX> inp(n, "inp", bench.stream), dout(n, "dout", bench.stream);
        Array<floatX> out(n, bench.stream), dinp(n, bench.stream);
        bench.row(
            "gelu forward", text("%zu", n), {.bytes = 2 * n * element},
            [&] { gelu_forward(Gelu::tanh, out, inp, n, bench.stream); },
            [&](Check& check) {
                check.compare(out, rounded_limit, [&](size_t i) { return gelu_exactly(inp.at(i)); });
            });
        bench.row(
            "gelu backward", text("%zu", n), {.bytes = 3 * n * element},
            [&] { gelu_backward(Gelu::tanh, dinp, dout, inp, n, bench.stream); },
            [&](Check& check) {
                check.compare(dinp, rounded_limit,
                              [&](size_t i) { return dout.at(i) * gelu_slope_exactly(inp.at(i)); });
            });
    }
}

inline void sum_rows(Bench& bench) {
    const std::vector<std::pair<int, int>> of_gpus = {{32768, 3072}, {16384, 1600}}, of_all = {{70, 96}};
    for (auto [N, OC] : bench.pick(of_gpus, of_all)) {
        size_t size = (size_t)N * OC, width = OC;
        Numbers<floatX> dout(size, "dout", bench.stream), other(size, "other", bench.stream);
        Numbers<float> dbias(OC, "dbias", bench.stream);
        Array<float> scratch(matmul_backward_bias_scratch(OC), bench.stream);
        Array<floatX> out(size, bench.stream);
        std::string shape = text("%d x %d", N, OC);
        bench.row(
            "bias backward", shape, {.bytes = size * element},
            [&, N = N, OC = OC] { matmul_backward_bias(dbias, scratch, dout, N, OC, bench.stream); },
            [&](Check& check) {
                check.compare(dbias, summed_limit, [&](size_t c) {
                    double sum = dbias.at(c);
                    for (size_t i = c; i < size; i += width) sum += dout.at(i);
                    return sum;
                });
            });
        bench.row(
            "residual", shape, {.bytes = 3 * size * element},
            [&] { residual_forward(out, dout, other, size, bench.stream); },
            [&](Check& check) {
                check.compare(out, rounded_limit, [&](size_t i) { return dout.at(i) + other.at(i); });
            });
        bench.row(
            "copy", shape, {.bytes = 2 * size * element},
            [&] {
                cudaCheck(cudaMemcpyAsync(out, dout, size * sizeof(floatX), cudaMemcpyDeviceToDevice,
                                          bench.stream));
            },
            [&](Check& check) { check.compare(out, rounded_limit, [&](size_t i) { return dout.at(i); }); });
    }
}
