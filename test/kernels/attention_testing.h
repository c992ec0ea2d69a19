/*
For tests of attention: the textbook formula in double precision, and a layer to compare with it.
*/
#pragma once

#include "kernels/attention.cuh"
#include "test/support/testing.h"

#ifndef DEVICE_CPU
// A fixture for cases that run with these kernels.
template <AttentionKernels kernels>
struct UseKernels {
    AttentionKernels before = std::exchange(attention_kernels, kernels);
    ~UseKernels() { attention_kernels = before; }
};
#endif

struct Case {
    int B, T, NH, NKV, HS;
    int window = 0;
    std::vector<int> documents = {};  // first positions of the documents of every sequence

    size_t rows() const { return (size_t)B * T; }
    size_t qkv_row() const { return (size_t)(NH + 2 * NKV) * HS; }

    // (B, T). The documents of sequence b start b positions later than listed.
    std::vector<int> doc_start() const {
        std::vector<int> starts;
        for (int b = 0; b < B; b++)
            for (int t = 0; t < T; t++) {
                int start = 0;
                for (int document : documents) {
                    if (document + b <= t) start = document + b;
                }
                starts.push_back(start);
            }
        return starts;
    }

    std::string name() const {
        std::string text;
        for (int x : {B, T, NH, NKV, HS, window, (int)documents.size()}) text += std::to_string(x) + " ";
        return text;
    }
};

struct Reference {
    std::vector<double> out, lse, dqkv;

    Reference(const Case& c, const std::vector<double>& qkv, const std::vector<double>& dout)
        : out(c.rows() * c.NH * c.HS), lse(c.rows() * c.NH), dqkv(qkv.size()) {
        std::vector<int> doc_start = c.doc_start();
        double scale = 1 / std::sqrt((double)c.HS);
        for (int b = 0; b < c.B; b++)
            for (int h = 0; h < c.NH; h++)
                for (int i = 0; i < c.T; i++) {
                    auto vector_of = [&](int t, int head) {
                        return ((size_t)b * c.T + t) * c.qkv_row() + head * c.HS;
                    };
                    int key_head = c.NH + h / (c.NH / c.NKV), value_head = key_head + c.NKV;
                    size_t q = vector_of(i, h), o = (((size_t)b * c.T + i) * c.NH + h) * c.HS;
                    int first = doc_start[b * c.T + i];
                    if (c.window) first = std::max(first, i - c.window + 1);

                    std::vector<double> p(c.T), dp(c.T);
                    double maximum = -INFINITY, total = 0, mean_dp = 0;
                    for (int j = first; j <= i; j++) {
                        for (int x = 0; x < c.HS; x++)
                            p[j] += scale * qkv[q + x] * qkv[vector_of(j, key_head) + x];
                        maximum = std::max(maximum, p[j]);
                    }
                    for (int j = first; j <= i; j++) total += p[j] = std::exp(p[j] - maximum);
                    lse[((size_t)b * c.NH + h) * c.T + i] = maximum + std::log(total);
                    for (int j = first; j <= i; j++) {
                        p[j] /= total;
                        for (int x = 0; x < c.HS; x++) {
                            out[o + x] += p[j] * qkv[vector_of(j, value_head) + x];
                            dp[j] += dout[o + x] * qkv[vector_of(j, value_head) + x];
                            dqkv[vector_of(j, value_head) + x] += p[j] * dout[o + x];
                        }
                        mean_dp += p[j] * dp[j];
                    }
                    for (int j = first; j <= i; j++) {
                        double dscore = p[j] * (dp[j] - mean_dp) * scale;
                        for (int x = 0; x < c.HS; x++) {
                            dqkv[q + x] += dscore * qkv[vector_of(j, key_head) + x];
                            dqkv[vector_of(j, key_head) + x] += dscore * qkv[q + x];
                        }
                    }
                }
    }
};

// One layer's buffers on the device, run forward and backward.
struct Run {
    Buffer<floatX> qkv, dout, out, dqkv;
    Buffer<float> lse, scratch;
    Buffer<int> doc_start;

    Run(const Case& c, const std::vector<floatX>& qkv_values, const std::vector<floatX>& dout_values)
        : qkv(qkv_values),
          dout(dout_values),
          out(c.rows() * c.NH * c.HS),
          dqkv(qkv.size()),
          lse(c.rows() * c.NH),
          scratch(attention_backward_scratch(c.B, c.T, c.NH, c.NKV, c.HS)),
          doc_start(c.doc_start()) {
        const int* documents = c.documents.empty() ? nullptr : (const int*)doc_start;
        attention_forward(out, lse, qkv, documents, c.B, c.T, c.NH, c.NKV, c.HS, c.window, test_stream());
        attention_backward(dqkv, scratch, dout, qkv, out, lse, documents, c.B, c.T, c.NH, c.NKV, c.HS,
                           c.window, test_stream());
    }

    // Everything computed, bit by bit.
    std::vector<float> bits() {
        std::vector<float> all = lse.host();
        for (floatX value : out.host()) all.push_back(float(value));
        for (floatX value : dqkv.host()) all.push_back(float(value));
        return all;
    }
};

inline std::vector<floatX> make_qkv(const Case& c, float scale = 1) {
    return random_values<floatX>("qkv", c.rows() * c.qkv_row(), scale);
}

inline std::vector<floatX> make_dout(const Case& c) {
    return random_values<floatX>("dout", c.rows() * c.NH * c.HS);
}

inline void check(const Case& c, float scale = 1, double backward_tolerance = tolerance<floatX>) {
    CAPTURE(c.name());
    std::vector<floatX> qkv = make_qkv(c, scale), dout = make_dout(c);
    Run run(c, qkv, dout);
    Reference reference(c, to_doubles(qkv), to_doubles(dout));
    CHECK_CLOSE(run.out, reference.out, tolerance<floatX>);
    CHECK_CLOSE(run.lse, reference.lse, 2e-5);
    CHECK_CLOSE(run.dqkv, reference.dqkv, backward_tolerance);
}

// Of T positions, those that see key 5.
inline void check_nan_shows(int T) {
    Case c{1, T, 1, 1, 16};
    std::vector<floatX> qkv = make_qkv(c), dout = make_dout(c);
    qkv[5 * c.qkv_row() + 16] = floatX(NAN);  // key 5
    Run run(c, qkv, dout);
    std::vector<double> out = run.out.doubles();
    CHECK(!std::isnan(out[4 * c.HS]));
    for (int t : {5, 63, T - 1}) CHECK(std::isnan(out[t * c.HS]));
    CHECK(std::isnan(run.dqkv.doubles()[(T - 1) * c.qkv_row()]));
}
