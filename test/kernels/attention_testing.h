/*
For tests of attention: the textbook formula in double precision, and a layer to compare with it.
*/
#pragma once

#include <bit>
#include <deque>

#include "kernels/attention.cuh"
#include "test/support/testing.h"

#ifndef DEVICE_CPU
// A fixture that makes a test case run with these kernels.
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
    int q0 = 0, Tq = T - q0;          // the call's queries: q0 ... q0 + Tq - 1 of the T

    size_t rows() const { return (size_t)B * T; }
    size_t queries() const { return (size_t)B * Tq; }
    size_t qkv_row() const { return (size_t)(NH + 2 * NKV) * HS; }

    // Returns this case with only `count` queries, beginning at position `from`.
    Case part(int from, int count) const {
        Case c = *this;
        c.q0 = from, c.Tq = count;
        return c;
    }

    AttentionShape shape(const int* doc_start = nullptr) const {
        return attention_shape({.B = B,
                                .Tq = Tq,
                                .Tk = T,
                                .q0 = q0,
                                .NH = NH,
                                .NKV = NKV,
                                .HS = HS,
                                .window = window,
                                .doc_start = documents.empty() ? nullptr : doc_start});
    }

    // Returns whether an element of qkv belongs to a query outside the call, or to a key or value after all
    // queries of the call.
    bool unread(size_t element) const {
        int at = (int)(element / qkv_row() % T), head = (int)(element % qkv_row() / HS);
        return at >= q0 + Tq || (head < NH && at < q0);
    }
    // Returns whether the call must leave an element of dqkv unchanged.
    bool unwritten(size_t element) const { return unread(element) && (int)(element % qkv_row() / HS) < NH; }

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
        for (int x : {B, T, NH, NKV, HS, window, (int)documents.size(), q0, Tq})
            text += std::to_string(x) + " ";
        return text;
    }
};

struct Reference {
    std::vector<double> out, lse, dqkv;

    Reference(const Case& c, const std::vector<double>& qkv, const std::vector<double>& dout)
        : out(c.queries() * c.NH * c.HS), lse(c.queries() * c.NH), dqkv(qkv.size()) {
        std::vector<int> doc_start = c.doc_start();
        double scale = 1 / std::sqrt((double)c.HS);
        for (int b = 0; b < c.B; b++)
            for (int h = 0; h < c.NH; h++)
                for (int i = c.q0; i < c.q0 + c.Tq; i++) {
                    auto vector_of = [&](int t, int head) {
                        return ((size_t)b * c.T + t) * c.qkv_row() + head * c.HS;
                    };
                    int key_head = c.NH + h / (c.NH / c.NKV), value_head = key_head + c.NKV;
                    size_t q = vector_of(i, h), o = (((size_t)b * c.Tq + i - c.q0) * c.NH + h) * c.HS;
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
                    lse[((size_t)b * c.NH + h) * c.Tq + i - c.q0] = maximum + std::log(total);
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

// One layer's buffers on the device. The constructor runs both passes.
struct Run {
    Buffer<floatX> qkv, dout, out, dqkv;
    Buffer<float> lse, scratch, amax{1}, dbias;
    Buffer<int> doc_start;

    Run(const Case& c, const std::vector<floatX>& qkv_values, const std::vector<floatX>& dout_values)
        : qkv(qkv_values),
          dout(dout_values),
          out(c.queries() * c.NH * c.HS),
          dqkv(qkv.size()),
          lse(c.queries() * c.NH),
          scratch(attention_backward_scratch(c.shape(), c.Tq == c.T)),
          dbias(first_dbias(c)),
          doc_start(c.doc_start()) {
        AttentionShape shape = c.shape(doc_start);
        attention_forward(out, lse, qkv, shape, test_stream(), amax);
        attention_backward(dqkv, scratch, dout, qkv, out, lse, shape, test_stream(),
                           c.Tq == c.T ? (float*)dbias : nullptr);
    }

    static std::vector<float> first_dbias(const Case& c) {
        return random_values<float>("dbias", c.qkv_row());
    }

    // Returns the bits of all results.
    std::vector<uint32_t> bits() {
        std::vector<uint32_t> all;
        for (float value : lse.host()) all.push_back(std::bit_cast<uint32_t>(value));
        for (floatX value : out.host()) all.push_back(std::bit_cast<uint32_t>(float(value)));
        for (floatX value : dqkv.host()) all.push_back(std::bit_cast<uint32_t>(float(value)));
        for (float value : dbias.host()) all.push_back(std::bit_cast<uint32_t>(value));
        return all;
    }
};

inline std::vector<floatX> make_qkv(const Case& c, float scale = 1) {
    return random_values<floatX>("qkv", c.rows() * c.qkv_row(), scale);
}

inline std::vector<floatX> make_dout(const Case& c) {
    return random_values<floatX>("dout", c.queries() * c.NH * c.HS);
}

// Checks both passes against the reference. Elements that must not be read are NaN.
inline void check(const Case& c, float scale = 1, double backward_tolerance = tolerance<floatX>) {
    CAPTURE(c.name());
    std::vector<floatX> qkv = make_qkv(c, scale), dout = make_dout(c);
    Reference reference(c, to_doubles(qkv), to_doubles(dout));
    for (size_t i = 0; i < qkv.size(); i++)
        if (c.unread(i)) qkv[i] = floatX(NAN);
    Run run(c, qkv, dout);
    CHECK_CLOSE(run.out, reference.out, tolerance<floatX>);
    std::vector<floatX> out = run.out.host();
    CHECK(run.amax.host()[0] == amax_cpu(out.data(), out.size()));
    CHECK_CLOSE(run.lse, reference.lse, 2e-5);
    std::vector<floatX> dqkv = run.dqkv.host(), before = Buffer<floatX>(dqkv.size()).host(), after = before;
    for (size_t i = 0; i < dqkv.size(); i++)
        if (c.unwritten(i)) after[i] = std::exchange(dqkv[i], floatX(0.0f));
    CHECK(same_bits(after, before));
    CHECK(relative_error(to_doubles(dqkv), reference.dqkv) < backward_tolerance);
    std::vector<double> sums = to_doubles(Run::first_dbias(c));
    for (size_t i = 0; i < dqkv.size() && c.Tq == c.T; i++) sums[i % sums.size()] += float(dqkv[i]);
    CHECK_CLOSE(run.dbias, sums, tolerance<floatX>);
}

// Checks calls with the queries of only some positions, including or excluding the last, that begin and end
// within tiles. None of these queries attends to some of the key tiles.
inline void check_parts(int HS) {
    check(Case{2, 150, 2, 1, HS}.part(63, 1));
    check(Case{1, 150, 1, 1, HS}.part(149, 1));
    check(Case{1, 270, 1, 1, HS}.part(0, 70));
    check(Case{1, 270, 2, 1, HS}.part(77, 150));
    check(Case{1, 300, 1, 1, HS, 60}.part(203, 67));
    check(Case{2, 200, 2, 2, HS, 0, {3, 100, 130, 140}}.part(69, 100));
    check(Case{1, 200, 2, 1, HS, 45, {1, 63, 110, 111}}.part(101, 31));
}

// Checks attention in pieces: the queries cut at these positions, one key/value head at a time, with queries
// apart from keys and values. Forward, the pieces must give the same bits as a single call; backward, their
// gradients must add up to those of that call.
inline void check_cut(const Case& c, std::vector<int> cuts) {
    CAPTURE(c.name());
    std::vector<floatX> qkv = make_qkv(c), dout = make_dout(c), queries;
    std::vector<std::vector<floatX>> keys((size_t)c.NKV);  // one array (B, T, 2, HS) per head
    std::deque<Buffer<floatX>> kv;
    Run whole(c, qkv, dout);
    const size_t row = c.qkv_row(), of_queries = (size_t)c.NH * c.HS, of_head = c.HS,
                 of_values = c.NKV * of_head, group = c.NH / c.NKV * of_head;
    for (auto at = qkv.begin(); at != qkv.end(); at += row) {
        queries.insert(queries.end(), at, at + of_queries);
        for (size_t head = 0; head < keys.size(); head++) {
            auto key = at + of_queries + head * of_head;
            keys[head].insert(keys[head].end(), key, key + of_head);
            keys[head].insert(keys[head].end(), key + of_values, key + of_values + of_head);
        }
    }
    for (const std::vector<floatX>& head : keys) kv.emplace_back(head);
    Buffer<floatX> q(queries), out(whole.out.size()), dq(queries.size()), dkv(keys[0].size());
    Buffer<float> lse(whole.lse.size());
    std::vector<double> want = whole.dqkv.doubles(), got(want.size());
    cuts.insert(cuts.begin(), 0);
    // visit(shape, keys and values, offset of its queries, offset of its lse, number of the key/value head)
    auto each_call = [&](auto&& visit) {
        for (size_t head = 0; head < keys.size(); head++) {
            for (size_t i = 0; i < cuts.size(); i++) {
                int from = cuts[i], to = i + 1 < cuts.size() ? cuts[i + 1] : c.T;
                Case of_head = c.part(from, to - from);
                of_head.NH /= c.NKV, of_head.NKV = 1;
                AttentionShape piece = attention_shape_apart(of_head.shape(whole.doc_start), c.T, c.NH);
                visit(piece, kv[head], from * of_queries + head * group,
                      from + head * (size_t)piece.NH * (size_t)c.T, head);
            }
        }
    };
    each_call([&](const AttentionShape& piece, const floatX* keys, size_t first, size_t first_lse, size_t) {
        attention_forward(out + first, lse + first_lse, {q + first, keys}, piece, test_stream());
    });
    CHECK(same_bits(out.host(), whole.out.host()));
    CHECK(same_bits(lse.host(), whole.lse.host()));
    each_call(
        [&](const AttentionShape& piece, const floatX* keys, size_t first, size_t first_lse, size_t head) {
            Buffer<float> scratch(attention_backward_scratch(piece));
            attention_backward({dq + first, dkv}, scratch, whole.dout + first, {q + first, keys}, out + first,
                               lse + first_lse, piece, test_stream());
            std::vector<double> made = dkv.doubles();
            for (size_t i = 0; i < made.size(); i++) {
                size_t of_row = i % (2 * of_head);
                got[i / (2 * of_head) * row + of_queries + head * of_head + of_row % of_head +
                    (of_row < of_head ? 0 : of_values)] += made[i];
            }
        });
    std::vector<double> of_queries_made = dq.doubles();
    for (size_t i = 0; i < got.size(); i++)
        if (i % row < of_queries) got[i] = of_queries_made[i / row * of_queries + i % row];
    CHECK(relative_error(got, want) < tolerance<floatX>);
}

// Checks for T positions that a NaN in key 5 shows in the results of those that attend to it.
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
