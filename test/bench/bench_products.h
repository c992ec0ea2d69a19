/*
Rows of bench_kernels whose time is spent in products: attention and the linear layers.
*/
#pragma once

#include "data/options/presets.h"
#include "kernels/attention.cuh"
#include "test/bench/bench_kernels.h"

// ----------------------------------------------------------------------------
// attention

struct AttentionCase {
    int B, T, NH, NKV, HS, window;

    // Operations of both forward products, for all pairs of a query and a key that are not masked; without a
    // window, by convention half of the T x T pairs.
    double flops() const {
        double w = window, pairs = window > 0 && window < T ? w * T - w * (w - 1) / 2 : 0.5 * T * T;
        return 4 * pairs * HS * NH * B;
    }
    std::string text() const {
        std::string heads = std::to_string(NH) + (NKV < NH ? "/" + std::to_string(NKV) : "");
        return ::text("%d x %d, %s heads of %d%s", B, T, heads.c_str(), HS,
                      window ? ::text(", window %d", window).c_str() : "");
    }
};

// Computes one query of one head in double precision.
struct AttentionReference {
    const AttentionShape shape;  // has a query at every position
    const Numbers<floatX>&qkv, &dout;

    // Offsets into qkv of the key and the value that head h reads.
    size_t key(int b, int j, int h) const {
        return (size_t)shape.NH * shape.HS + shape.key(b, j, h / shape.group());
    }
    size_t value(int b, int j, int h) const { return key(b, j, h) + (size_t)shape.NKV * shape.HS; }

    double dot(size_t a, const Numbers<floatX>& of_a, size_t b, const Numbers<floatX>& of_b) const {
        double sum = 0;
        for (int c = 0; c < shape.HS; c++) sum += of_a.at(a + c) * of_b.at(b + c);
        return sum;
    }
    double score(int b, int i, int j, int h) const {
        return shape.scale() * dot(shape.query(b, i, h), qkv, key(b, j, h), qkv);
    }
    // Returns lse, and element c of out.
    std::pair<double, double> forward(int b, int i, int h, int c) const {
        double largest = -INFINITY, total = 0, out = 0;
        std::vector<double> scores;
        int first = shape.first_key(b, i);
        for (int j = first; j <= i; j++) {
            scores.push_back(score(b, i, j, h));
            largest = std::max(largest, scores.back());
        }
        for (int j = first; j <= i; j++) {
            double p = std::exp(scores[j - first] - largest);
            total += p, out += p * qkv.at(value(b, j, h) + c);
        }
        return {largest + std::log(total), out / total};
    }
};

// Computes gradients from the results of the forward pass, which the forward row has checked.
struct AttentionGradients : AttentionReference {
    std::vector<floatX> out;
    std::vector<float> lse;

    double probability(int b, int i, int j, int h) const {
        return std::exp(score(b, i, j, h) - lse[shape.lse(b, i, h)]);
    }
    // The gradient of the score of query i and key j, before scaling.
    double dscore(int b, int i, int j, int h) const {
        size_t at = shape.output(b, i, h);
        double mean = 0, dp = dot(at, dout, value(b, j, h), qkv);
        for (int c = 0; c < shape.HS; c++) mean += dout.at(at + c) * float(out[at + c]);
        return probability(b, i, j, h) * (dp - mean);
    }

    // Element e of dqkv.
    double at(size_t e) const {
        int c = (int)(e % shape.HS), head = (int)(e / shape.HS % (shape.NH + 2 * shape.NKV));
        size_t row = e / shape.q_row;
        int t = (int)(row % shape.Tk), b = (int)(row / shape.Tk);
        double sum = 0;
        if (head < shape.NH) {
            for (int j = shape.first_key(b, t); j <= t; j++)
                sum += dscore(b, t, j, head) * qkv.at(key(b, j, head) + c);
            return sum * shape.scale();
        }
        int kv_head = (head - shape.NH) % shape.NKV;
        bool value = head >= shape.NH + shape.NKV;
        for (int h = kv_head * shape.group(); h < (kv_head + 1) * shape.group(); h++) {
            for (int i = t; i < shape.Tq && shape.first_key(b, i) <= t; i++) {
                sum += value ? probability(b, i, t, h) * dout.at(shape.output(b, i, h) + c)
                             : shape.scale() * dscore(b, i, t, h) * qkv.at(shape.query(b, i, h) + c);
            }
        }
        return sum;
    }
};

inline void attention_rows(Bench& bench) {
    const std::vector<AttentionCase> of_gpus = {{32, 1024, 12, 12, 64, 0},
                                                {1, 8192, 32, 8, 64, 0},
                                                {1, 8192, 64, 8, 128, 0},
                                                {1, 8192, 64, 8, 64, 1024},
                                                {1, 8192, 32, 8, 128, 4096}},
                                     of_all = {{2, 130, 3, 3, 64, 0},
                                               {1, 200, 4, 2, 128, 0},
                                               {1, 150, 2, 1, 64, 40}};
    for (const AttentionCase& c : bench.pick(of_gpus, of_all)) {
        auto [B, T, NH, NKV, HS, window] = c;
        AttentionShape shape = self_attention_shape(B, T, NH, NKV, HS, window, nullptr);
        size_t rows = (size_t)B * T;
        Numbers<floatX> qkv(rows * shape.q_row, "qkv", bench.stream);
        Numbers<floatX> dout(rows * NH * HS, "dout", bench.stream);
        Array<floatX> out(dout.size(), bench.stream), dqkv(qkv.size(), bench.stream);
        Array<float> lse(rows * NH, bench.stream);
        Array<float> scratch(attention_backward_scratch(shape), bench.stream);
        bench.row(
            "attention forward", c.text(), {.flops = c.flops()},
            [&] { attention_forward(out, lse, qkv, shape, bench.stream); },
            [&](Check& check) {
                AttentionReference reference = {shape, qkv, dout};
                check.compare(out, rounded_limit, [&](size_t e) {
                    size_t row = e / HS / NH;
                    return reference
                        .forward((int)(row / T), (int)(row % T), (int)(e / HS % NH), (int)(e % HS))
                        .second;
                });
                check.compare(lse, 2e-5, [&](size_t e) {
                    return reference.forward((int)(e / T / NH), (int)(e % T), (int)(e / T % NH), 0).first;
                });
            });
        constexpr double of_forward = 2.5;  // five products instead of two
        bench.row(
            "attention backward", c.text(), {.flops = of_forward * c.flops()},
            [&] { attention_backward(dqkv, scratch, dout, qkv, out, lse, shape, bench.stream); },
            [&](Check& check) {
                AttentionGradients gradients = {{shape, qkv, dout}, out.host(), lse.host()};
                check.compare(dqkv, rounded_limit, [&](size_t e) { return gradients.at(e); });
            });
    }
}

// ----------------------------------------------------------------------------
// linear layers

struct LinearCase {
    std::string name;
    int N, C, OC;
    bool bias, gelu, of_gelu;  // gelu: gelu(out) is wanted too; of_gelu: inp is the output of a GELU
};

// Adds the matrices of a preset's block for `tokens` tokens, and its classifier for `logits_tokens` unless 0.
inline void add_linears(std::vector<LinearCase>& cases, const char* preset, int tokens, int logits_tokens) {
    ModelConfig c = find_preset(preset)->config;
    complete(c);
    int A = c.heads * c.head_size;
    bool gelu = c.mlp == MlpKind::gelu;
    auto add = [&](const char* matrix, int N, int inputs, int outputs, bool bias, bool makes_gelu = false,
                   bool of_gelu = false) {
        cases.push_back({text("%s %s", preset, matrix), N, inputs, outputs, bias, makes_gelu, of_gelu});
    };
    add("qkv", tokens, c.channels, qkv_width(c), has_qkv_bias(c));
    add("attproj", tokens, A, c.channels, c.bias);
    add("fc", tokens, c.channels, fc_width(c), c.bias, gelu);
    add("fcproj", tokens, c.mlp_width, c.channels, c.bias, false, gelu);
    if (logits_tokens) add("logits", logits_tokens, c.channels, ceil_div(c.vocab_size, 128) * 128, false);
}

inline void matmul_rows(Bench& bench) {
    std::vector<LinearCase> cases;
    if (bench.small) {
        add_linears(cases, "tiny", 96, 40);
        cases.push_back({"gelu", 33, 64, 96, true, true, true});
    } else {
        add_linears(cases, "gpt2-124M", 32 * 1024, 2048);
        add_linears(cases, "gpt2-1558M", 16 * 1024, 2048);
        add_linears(cases, "llama3-8B", 8192, 1024);
    }
    for (const LinearCase& linear : cases) {
        auto [name, N, C, OC, has_bias, gelu, of_gelu] = linear;
        std::string shape = text("%s %dx%dx%d", name.c_str(), N, C, OC);
        Work work = {.flops = 2.0 * N * C * OC};
        Numbers<floatX> inp((size_t)N * C, "inp", bench.stream),
            weight((size_t)OC * C, "weight", bench.stream, 0.02f);
        Numbers<floatX> dout((size_t)N * OC, "dout", bench.stream), bias(OC, "bias", bench.stream);
        Numbers<float> dweight((size_t)OC * C, "dweight", bench.stream);
        Array<floatX> out((size_t)N * OC, bench.stream), dinp((size_t)N * C, bench.stream);
        auto product = [&](size_t e) {
            size_t n = e / OC, o = e % OC;
            double sum = has_bias ? bias.at(o) : 0;
            for (int c = 0; c < C; c++) sum += inp.at(n * C + c) * weight.at(o * C + c);
            return sum;
        };
        const floatX* of_bias = has_bias ? bias.data : nullptr;
        if (gelu) {
            Array<floatX> act((size_t)N * OC, bench.stream);
            bench.row(
                "matmul with gelu", shape, work,
                [&] {
                    matmul_gelu_forward(Gelu::tanh, act, out, inp, weight, of_bias, N, C, OC, bench.stream);
                },
                [&](Check& check) {
                    check.compare(out, rounded_limit, product);
                    check.compare(act, rounded_limit, [&](size_t e) { return gelu_exactly(product(e)); });
                });
        } else {
            bench.row(
                "matmul forward", shape, work,
                [&] { matmul_forward(out, inp, weight, of_bias, N, C, OC, bench.stream); },
                [&](Check& check) { check.compare(out, rounded_limit, product); });
        }
        auto input_gradient = [&](size_t e) {
            size_t n = e / C, c = e % C;
            double sum = 0;
            for (int o = 0; o < OC; o++) sum += dout.at(n * OC + o) * weight.at((size_t)o * C + c);
            return sum;
        };
        if (of_gelu) {
            Numbers<floatX> pre((size_t)N * C, "pre", bench.stream);
            bench.row(
                "matmul backward gelu", shape, work,
                [&] { matmul_backward_gelu(Gelu::tanh, dinp, pre, dout, weight, N, C, OC, bench.stream); },
                [&](Check& check) {
                    check.compare(dinp, rounded_limit, [&](size_t e) {
                        return input_gradient(e) * gelu_slope_exactly(pre.at(e));
                    });
                });
        } else {
            bench.row(
                "matmul backward input", shape, work,
                [&] { matmul_backward_input(dinp, dout, weight, N, C, OC, bench.stream); },
                [&](Check& check) { check.compare(dinp, rounded_limit, input_gradient); });
        }
        Numbers<float> dbias(OC, "dbias", bench.stream);
        Array<float> sums(matmul_backward_bias_scratch(OC), bench.stream);
        bench.row(
            has_bias ? "matmul backward w, bias" : "matmul backward weight", shape, work,
            [&] {
                matmul_backward_weight(dweight, dout, inp, N, C, OC, bench.stream,
                                       has_bias ? dbias.data : nullptr, sums);
            },
            [&](Check& check) {
                if (has_bias) {
                    check.compare(dbias, summed_limit, [&](size_t o) {
                        double sum = dbias.at(o);
                        for (int n = 0; n < N; n++) sum += dout.at((size_t)n * OC + o);
                        return sum;
                    });
                }
                check.compare(dweight, summed_limit, [&](size_t e) {
                    size_t o = e / C, c = e % C;
                    double sum = dweight.at(e);
                    for (int n = 0; n < N; n++)
                        sum += dout.at((size_t)n * OC + o) * inp.at((size_t)n * C + c);
                    return sum;
                });
            });
    }
}
