#include "kernels/classifier.cuh"
#include "test/support/testing.h"

struct Case {
    int N, V, Vp;
};

static std::vector<int> some_targets(int N, int V) {
    std::vector<int> targets(N);
    for (int n = 0; n < N; n++) targets[n] = n % 3 == 1 ? -1 : (int)(philox(3, n).at[0] % V);
    if (N > 3) targets[0] = 0, targets[2] = V - 1;
    return targets;
}

// Softmax and its gradient by definition.
static void reference(std::vector<double>& losses, std::vector<double>& dlogits,
                      const std::vector<floatX>& logits, const std::vector<int>& targets, double dloss,
                      Case shape) {
    losses.assign(shape.N, 0);
    dlogits.assign(logits.size(), 0);
    for (int n = 0; n < shape.N; n++) {
        if (targets[n] < 0) continue;
        size_t row = (size_t)n * shape.Vp;
        double max = -INFINITY, sum = 0;
        for (int v = 0; v < shape.V; v++) max = std::max(max, (double)float(logits[row + v]));
        for (int v = 0; v < shape.V; v++) sum += std::exp(float(logits[row + v]) - max);
        losses[n] = max + std::log(sum) - float(logits[row + targets[n]]);
        for (int v = 0; v < shape.V; v++) {
            dlogits[row + v] = (std::exp(float(logits[row + v]) - max) / sum - (v == targets[n])) * dloss;
        }
    }
}

TEST_CASE("losses and gradients") {
    for (Case shape : std::vector<Case>{{1, 1, 1},
                                        {4, 2, 8},
                                        {5, 7, 7},
                                        {3, 257, 384},
                                        {4, 1000, 1024},
                                        {3, 2049, 2051},
                                        {4, 9000, 9088}}) {
        for (float spread : {1.0f, 30.0f}) {
            CAPTURE(shape.V);
            CAPTURE(spread);
            size_t size = (size_t)shape.N * shape.Vp;
            auto logits = random_values<floatX>("logits", size, spread);
            for (int n = 0; n < shape.N; n++) {  // contents of padding columns must not matter
                for (int v = shape.V; v < shape.Vp; v++)
                    logits[(size_t)n * shape.Vp + v] = floatX(v % 2 ? NAN : 1e30f);
            }
            auto targets = some_targets(shape.N, shape.V);
            const float dloss = 0.125f;
            std::vector<double> losses, dlogits;
            reference(losses, dlogits, logits, targets, dloss, shape);

            Buffer<int> device_targets(targets);
            Buffer<floatX> dlogits_got(logits), again(logits), untouched(logits);
            Buffer<float> losses_got(shape.N), losses_again(shape.N), losses_only(shape.N);
            classifier(dlogits_got, losses_got, device_targets, dloss, shape.N, shape.V, shape.Vp, true,
                       test_stream());
            classifier(again, losses_again, device_targets, dloss, shape.N, shape.V, shape.Vp, true,
                       test_stream());
            classifier(untouched, losses_only, device_targets, dloss, shape.N, shape.V, shape.Vp, false,
                       test_stream());
            auto got = losses_got.doubles();
            for (int n = 0; n < shape.N; n++) CHECK(got[n] == doctest::Approx(losses[n]).epsilon(1e-5));
            CHECK_CLOSE(dlogits_got, dlogits, tolerance<floatX>);
            CHECK(dlogits_got.doubles() == again.doubles());
            CHECK(losses_only.host() == losses_got.host());
            auto before = to_doubles(logits), after = untouched.doubles();
            bool unchanged = true;
            for (size_t i = 0; i < size; i++) unchanged &= after[i] == before[i] || std::isnan(before[i]);
            CHECK(unchanged);
        }
    }
}

TEST_CASE("the right word with all the probability has no loss and no gradient") {
    const int V = 100;
    std::vector<float> logits(V, -200.0f);
    logits[37] = 200;
    Buffer<floatX> dlogits(logits);
    Buffer<float> losses(1);
    Buffer<int> targets(std::vector<int>{37});
    classifier(dlogits, losses, targets, 1.0f, 1, V, V, true, test_stream());
    CHECK(losses.host()[0] == 0);
    for (double d : dlogits.doubles()) CHECK(d == 0);
}

TEST_CASE("NaN and Inf") {
    const int V = 5000;
    auto loss_with = [&](int at, float value) {
        auto logits = random_values<float>("logits", V);
        if (at >= 0) logits[at] = value;
        Buffer<floatX> device_logits(logits);
        Buffer<float> losses(1);
        Buffer<int> targets(std::vector<int>{2});
        classifier(device_logits, losses, targets, 1.0f, 1, V, V, true, test_stream());
        return losses.host()[0];
    };
    for (int at : {0, 2, 3000, V - 1}) {
        CAPTURE(at);
        CHECK(std::isnan(loss_with(at, NAN)));
        CHECK(!std::isfinite(loss_with(at, INFINITY)));
    }
    CHECK(std::isfinite(loss_with(7, -INFINITY)));  // an excluded word
    CHECK(loss_with(7, -INFINITY) == doctest::Approx(loss_with(-1, 0)).epsilon(1e-2));

    std::vector<float> ruled_out(V, -INFINITY);  // including whole chunks
    ruled_out[2] = 1;
    Buffer<floatX> logits(ruled_out);
    Buffer<float> losses(1);
    Buffer<int> targets(std::vector<int>{2});
    classifier(logits, losses, targets, 1.0f, 1, V, V, true, test_stream());
    CHECK(losses.host()[0] == 0);
}

// A rank's part of a partitioned vocabulary. Padding columns make the shares of all ranks equal.
struct VocabPart {
    int first, V, Vp;
};

static VocabPart words_of_rank(int V, int rank, int ranks, int pad_to) {
    int first = (int)((int64_t)V * rank / ranks), end = (int)((int64_t)V * (rank + 1) / ranks);
    return {first, end - first, ceil_div(ceil_div(V, ranks), pad_to) * pad_to};
}

// The columns of a rank; the contents of padding columns must not matter.
static std::vector<floatX> logits_of_rank(const std::vector<floatX>& logits, int N, int V, VocabPart words) {
    std::vector<floatX> own;
    for (int n = 0; n < N; n++) {
        for (int v = 0; v < words.Vp; v++) {
            floatX padding = floatX(v % 2 ? NAN : 1e30f);
            own.push_back(v < words.V ? logits[(size_t)n * V + words.first + v] : padding);
        }
    }
    return own;
}

static void check_cut_vocabulary(int V, int ranks, int pad_to, float spread) {
    CAPTURE(V);
    CAPTURE(ranks);
    CAPTURE(pad_to);
    CAPTURE(spread);
    auto targets = some_targets(4, V);
    for (int r = 0; r < ranks; r++) {  // words on either side of every cut
        int first = words_of_rank(V, r, ranks, pad_to).first;
        targets.push_back(std::min(first, V - 1));
        targets.push_back(std::max(first - 1, 0));
    }
    const int N = (int)targets.size();
    const float dloss = 0.125f;
    auto logits = random_values<floatX>("logits", (size_t)N * V, spread);
    std::vector<double> losses, dlogits;
    reference(losses, dlogits, logits, targets, dloss, {N, V, V});

    Buffer<int> device_targets(targets);
    Buffer<float> parts((size_t)ranks * N * 3);
    for (int r = 0; r < ranks; r++) {
        VocabPart words = words_of_rank(V, r, ranks, pad_to);
        Buffer<floatX> own(logits_of_rank(logits, N, V, words));
        classifier_part(parts + (size_t)r * N * 3, own, device_targets, words.first, N, words.V, words.Vp,
                        test_stream());
        auto got = parts.doubles();
        for (int n = 0; n < N; n++) {
            const double* part = &got[((size_t)r * N + n) * 3];
            double max = -FLT_MAX, sum = 0, target_logit = 0;
            for (int v = words.first; targets[n] >= 0 && v < words.first + words.V; v++) {
                max = std::max(max, (double)float(logits[(size_t)n * V + v]));
                if (v == targets[n]) target_logit = float(logits[(size_t)n * V + v]);
            }
            for (int v = words.first; targets[n] >= 0 && v < words.first + words.V; v++)
                sum += std::exp(float(logits[(size_t)n * V + v]) - max);
            CHECK(part[0] == max);
            CHECK(part[1] == doctest::Approx(sum).epsilon(1e-5));
            CHECK(part[2] == target_logit);
        }
    }

    VocabPart all = words_of_rank(V, 0, 1, pad_to);
    Buffer<floatX> device_uncut(logits_of_rank(logits, N, V, all));
    Buffer<float> uncut_losses(N);
    classifier(device_uncut, uncut_losses, device_targets, dloss, N, V, all.Vp, true, test_stream());
    std::vector<double> uncut, rows = device_uncut.doubles();
    for (int n = 0; n < N; n++) {
        auto row = rows.begin() + (ptrdiff_t)n * all.Vp;
        uncut.insert(uncut.end(), row, row + V);
    }

    std::vector<double> together((size_t)N * V, NAN);
    std::vector<float> first_losses;
    for (int r = 0; r < ranks; r++) {
        CAPTURE(r);
        VocabPart words = words_of_rank(V, r, ranks, pad_to);
        auto before = logits_of_rank(logits, N, V, words);
        Buffer<floatX> own(before), untouched(before);
        Buffer<float> own_losses(N), losses_only(N);
        VocabParts vocab = {parts, ranks, words.first};
        classifier(own, own_losses, device_targets, dloss, N, words.V, words.Vp, true, test_stream(), vocab);
        classifier(untouched, losses_only, device_targets, dloss, N, words.V, words.Vp, false, test_stream(),
                   vocab);
        if (r == 0) first_losses = own_losses.host();
        CHECK(own_losses.host() == first_losses);  // all ranks get the same bits
        CHECK(losses_only.host() == first_losses);

        auto got = own.doubles(), after = untouched.doubles(), same = to_doubles(before);
        bool padding_is_zero = true, unchanged = true;
        for (int n = 0; n < N; n++) {
            for (int v = 0; v < words.Vp; v++) {
                size_t i = (size_t)n * words.Vp + v;
                if (v < words.V)
                    together[(size_t)n * V + words.first + v] = got[i];
                else
                    padding_is_zero &= got[i] == 0;
                unchanged &= after[i] == same[i] || (v >= words.V && std::isnan(after[i]));
            }
        }
        CHECK(padding_is_zero);
        CHECK(unchanged);

        auto got_losses = own_losses.doubles(), whole_losses = uncut_losses.doubles();
        for (int n = 0; n < N; n++) {
            CHECK(got_losses[n] == doctest::Approx(losses[n]).epsilon(1e-5));
            CHECK(got_losses[n] == doctest::Approx(whole_losses[n]).epsilon(1e-5));
            if (ranks == 1) CHECK(got_losses[n] == whole_losses[n]);
        }
    }
    CHECK(relative_error(together, dlogits) < tolerance<floatX>);
    CHECK(relative_error(together, uncut) < tolerance<floatX>);
    if (ranks == 1) CHECK(together == uncut);
    for (int n = 0; n < N; n++) {
        if (targets[n] >= 0) continue;
        for (int v = 0; v < V; v++) CHECK(together[(size_t)n * V + v] == 0);
    }
}

TEST_CASE("a vocabulary cut over ranks has the losses and gradients of the whole") {
    for (int V : {1, 2, 7, 100, 257, 1000}) {
        for (int ranks : {1, 2, 3, 8}) {  // also more ranks than words
            for (int pad_to : {1, 8}) {
                for (float spread : {1.0f, 30.0f}) check_cut_vocabulary(V, ranks, pad_to, spread);
            }
        }
    }
    check_cut_vocabulary(9001, 1, 128, 3.0f);
    check_cut_vocabulary(9001, 2, 128, 3.0f);
    check_cut_vocabulary(9001, 4, 1, 3.0f);
}

TEST_CASE("NaN and Inf reach the losses of all ranks, words ruled out do not") {
    const int V = 40, ranks = 4;
    auto losses_with = [&](int from, int to, float value) {
        auto logits = random_values<floatX>("logits", V);
        for (int v = from; v < to; v++) logits[v] = floatX(value);
        Buffer<int> targets(std::vector<int>{2});
        Buffer<float> parts(ranks * 3), losses(1);
        for (int r = 0; r < ranks; r++) {
            VocabPart words = words_of_rank(V, r, ranks, 8);
            Buffer<floatX> own(logits_of_rank(logits, 1, V, words));
            classifier_part(parts + r * 3, own, targets, words.first, 1, words.V, words.Vp, test_stream());
            cudaCheck(cudaStreamSynchronize(test_stream()));  // before `own` is freed
        }
        std::vector<float> all;
        for (int r = 0; r < ranks; r++) {
            VocabPart words = words_of_rank(V, r, ranks, 8);
            Buffer<floatX> own(logits_of_rank(logits, 1, V, words));
            classifier(own, losses, targets, 1.0f, 1, words.V, words.Vp, true, test_stream(),
                       {parts, ranks, words.first});
            all.push_back(losses.host()[0]);
        }
        return all;
    };
    for (int at : {0, 2, 17, V - 1}) {
        CAPTURE(at);
        for (float loss : losses_with(at, at + 1, NAN)) CHECK(std::isnan(loss));
        for (float loss : losses_with(at, at + 1, INFINITY)) CHECK(!std::isfinite(loss));
    }
    for (float loss : losses_with(10, V, -INFINITY)) CHECK(std::isfinite(loss));  // all words of three ranks
    for (float loss : losses_with(3, V, -INFINITY)) CHECK(loss < losses_with(0, 0, 0)[0]);
}

TEST_CASE("sum of losses") {
    for (int N : {1, 31, 1000, 5000}) {
        auto losses = random_values<float>("losses", N, 1.0f, 5.0f);
        double want = 3;
        for (float loss : losses) want += loss;
        Buffer<float> total(std::vector<float>{3}), device_losses(losses);
        sum_losses(total, device_losses, N, test_stream());
        CHECK(total.host()[0] == doctest::Approx(want).epsilon(1e-6));
    }
}
