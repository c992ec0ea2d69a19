/*
Rows of bench_kernels: the kernels before the first block and after the last, and those of the update.
*/
#pragma once

#include <set>

#include "kernels/accumulate.cuh"
#include "kernels/adamw.cuh"
#include "kernels/classifier.cuh"
#include "kernels/embedding.cuh"
#include "kernels/global_norm.cuh"
#include "test/bench/bench_kernels.h"

// ----------------------------------------------------------------------------
// the ends of the model

// Tokens with the word frequencies of text, and their order by token.
struct Tokens {
    std::vector<int> values;
    int different;
    Array<int> tokens, by_token;

    Tokens(int N, int V, cudaStream_t stream) : values(N), tokens(N, stream), by_token(N, stream) {
        // word r occurs about 1 / (r + 1) times as often as word 0, which is 1 token in 16
        for (int i = 0; i < N; i++)
            values[i] = std::min((int)std::pow(V + 1.0, random_uniform(philox(7, i).at[0])), V) - 1;
        std::vector<int> sorted(N);
        sort_by_token(sorted.data(), values.data(), N);
        different = (int)std::set(values.begin(), values.end()).size();
        copy_to_device(tokens.data, values.data(), N, stream);
        copy_to_device(by_token.data, sorted.data(), N, stream);
    }
};

inline void classifier_rows(Bench& bench) {
    struct Case {
        int N, V;
    };
    const std::vector<Case> of_gpus = {{2048, 50257}, {1024, 128256}}, of_all = {{9, 300}};
    constexpr float dloss = 1 / 64.0f;
    for (auto [N, V] : bench.pick(of_gpus, of_all)) {
        int rows = N, words = V, Vp = ceil_div(V, 128) * 128;
        Tokens targets(N, V, bench.stream);
        Array<float> losses(N, bench.stream);
        for (bool want_gradient : {false, true}) {
            Numbers<floatX> logits((size_t)N * Vp, "logits", bench.stream);
            bench.row(
                want_gradient ? "classifier with gradient" : "classifier", text("%d x %d", N, Vp),
                {.bytes = (want_gradient ? 2 : 1) * (double)N * Vp * element},
                [&] {
                    classifier(logits, losses, targets.tokens, dloss, rows, words, Vp, want_gradient,
                               bench.stream);
                },
                [&](Check& check) {
                    std::vector<double> lse(rows);
#pragma omp parallel for
                    for (int n = 0; n < rows; n++) {
                        double sum = 0;
                        for (int v = 0; v < words; v++) sum += std::exp(logits.at((size_t)n * Vp + v));
                        lse[n] = std::log(sum);
                    }
                    check.compare(losses, 2e-5,
                                  [&](size_t n) { return lse[n] - logits.at(n * Vp + targets.values[n]); });
                    if (!want_gradient) return;
                    check.compare(logits, rounded_limit, [&](size_t e) {
                        size_t n = e / Vp;
                        int v = (int)(e % Vp);
                        if (v >= words) return 0.0;
                        return (std::exp(logits.at(e) - lse[n]) - (v == targets.values[n])) * dloss;
                    });
                    // a sample of all elements would hit few targets
                    std::vector<floatX> all = logits.host(), at_targets;
                    for (size_t n = 0; n < (size_t)rows; n++)
                        at_targets.push_back(all[n * Vp + targets.values[n]]);
                    check.compare(at_targets, rounded_limit, [&](size_t n) {
                        return (std::exp(logits.at(n * Vp + targets.values[n]) - lse[n]) - 1) * dloss;
                    });
                });
        }
    }
}

inline void embedding_rows(Bench& bench) {
    struct Case {
        int B, T, C, V;
    };
    const std::vector<Case> of_gpus = {{32, 1024, 768, 50257}, {1, 8192, 4096, 128256}},
                            of_all = {{2, 33, 96, 50}};
    for (auto [batch, length, width, words] : bench.pick(of_gpus, of_all)) {
        int B = batch, T = length, C = width, V = words;
        size_t size = (size_t)B * T * C;
        Tokens tokens(B * T, V, bench.stream);
        Positions places(B, T, bench.stream);
        Numbers<floatX> wte((size_t)V * C, "wte", bench.stream), wpe((size_t)T * C, "wpe", bench.stream);
        Numbers<floatX> dout(size, "dout", bench.stream);
        Numbers<float> dwte(wte.size(), "dwte", bench.stream), dwpe(wpe.size(), "dwpe", bench.stream);
        Array<floatX> out(size, bench.stream);
        double table_rows = (double)tokens.different * C, positions = (double)T * C;
        Array<float> scratch(embedding_backward_scratch(B * T, C), bench.stream);
        std::string shape = text("%d x %d x %d, %d words", B, T, C, V);
        auto word = [&](size_t row, size_t c) { return (size_t)tokens.values[row] * C + c; };
        bench.row(
            "embedding forward", shape, {.bytes = (size + table_rows + positions) * element},
            [&] {
                embedding_forward(out, tokens.tokens, wte, wpe, places.positions, B * T, C, bench.stream);
            },
            [&](Check& check) {
                check.compare(out, rounded_limit, [&](size_t e) {
                    return wte.at(word(e / C, e % C)) + wpe.at(e / C % T * C + e % C);
                });
            });
        bench.row(
            "embedding backward", shape, {.bytes = size * element + 2 * (table_rows + positions) * number},
            [&] {
                embedding_backward(dwte, dwpe, scratch, dout, tokens.tokens, tokens.by_token,
                                   places.positions, places.by_position, B * T, C, bench.stream);
            },
            [&](Check& check) {
                check.compare(dwte, summed_limit, [&](size_t e) {
                    double sum = dwte.at(e);
                    for (int i = 0; i < B * T; i++)
                        if (tokens.values[i] == (int)(e / C)) sum += dout.at((size_t)i * C + e % C);
                    return sum;
                });
                check.compare(dwpe, summed_limit, [&](size_t e) {
                    double sum = dwpe.at(e);
                    for (int b = 0; b < B; b++) sum += dout.at((size_t)b * T * C + e);
                    return sum;
                });
            });
    }
}

// ----------------------------------------------------------------------------
// the step

inline void adamw_rows(Bench& bench) {
    const std::vector<size_t> of_gpus = {124475904}, of_all = {5003};
    // so high that a step changes the weights by a large fraction of their size
    AdamW hyper = {0.1, 0.9, 0.95, 1e-8, 0.1, 3, false};
    for (size_t n : bench.pick(of_gpus, of_all)) {
        for (bool with_master : {true, false}) {
            if (with_master && sizeof(floatX) == sizeof(float)) continue;
            Numbers<floatX> params(n, "weights", bench.stream);
            Numbers<float> master(n, "weights", bench.stream), m(n, "m", bench.stream);
            Numbers<float> v(n, "v", bench.stream, 0.1f, 1), grads(n, "grads", bench.stream);
            Array<float> scale(1, bench.stream);
            const float half = 0.5f;
            copy_to_device(scale.data, &half, 1, bench.stream);
            hyper.stochastic_rounding = !with_master && sizeof(floatX) < sizeof(float);
            Optimizer optimizer = adamw_optimizer(hyper, 1);
            double bytes = (with_master ? 1 : 2) * element + (with_master ? 7 : 5) * number;
            bench.row(
                hyper.stochastic_rounding ? "adamw, rounding at random" : "adamw", text("%zu", n),
                {.bytes = n * bytes},
                [&] {
                    optimizer.step.on_device(
                        {params, with_master ? master.data : nullptr, {m, v}, grads, scale},
                        {{.at = 0, .count = n, .first = 0, .name = 1, .decays = true}}, bench.stream);
                },
                [&](Check& check) {
                    auto new_m = [&](size_t i) { return m.at(i) + 0.1 * (grads.at(i) / 2 - m.at(i)); };
                    auto new_v = [&](size_t i) {
                        return 0.95 * v.at(i) + 0.05 * std::pow(grads.at(i) / 2, 2);
                    };
                    auto new_weight = [&](size_t i) {
                        double before = with_master ? master.at(i) : params.at(i);
                        double m_hat = new_m(i) / (1 - std::pow(0.9, 3)),
                               v_hat = new_v(i) / (1 - std::pow(0.95, 3));
                        return before * (1 - 0.1 * 0.1) - 0.1 * m_hat / (std::sqrt(v_hat) + 1e-8);
                    };
                    check.compare(m, 2e-5, new_m);
                    check.compare(v, 2e-5, new_v);
                    check.compare(params, rounded_limit, new_weight);
                    if (with_master) check.compare(master, 2e-5, new_weight);
                });
        }
    }
}

inline void global_norm_rows(Bench& bench) {
    const std::vector<size_t> of_gpus = {124475904}, of_all = {50001};
    for (size_t n : bench.pick(of_gpus, of_all)) {
        Numbers<float> grads(n, "grads", bench.stream), others(n, "others", bench.stream);
        Array<float> total(1, bench.stream), scratch(sum_squares_scratch(n), bench.stream);
        bench.row(
            "sum of squares", text("%zu", n), {.bytes = n * number},
            [&] {
                sum_squares(total, scratch, grads, {{0, n}}, bench.stream);
            },
            [&](Check& check) {
                double sum = 0;
#pragma omp parallel for reduction(+ : sum)
                for (size_t i = 0; i < n; i++) sum += grads.at(i) * grads.at(i);
                check.compare(total, 2e-5, [&](size_t) { return sum; });
            });
        bench.row(
            "accumulate", text("%zu", n), {.bytes = 3 * n * number},
            [&] { accumulate(grads, others, n, bench.stream); },
            [&](Check& check) {
                check.compare(grads, 2e-5, [&](size_t i) { return grads.at(i) + others.at(i); });
            });
    }
}
