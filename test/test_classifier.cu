#include "kernels/classifier.cuh"
#include "test/testing.h"

struct Case {
    int N, V, Vp;
};

static std::vector<int> some_targets(int N, int V) {
    std::vector<int> targets(N);
    for (int n = 0; n < N; n++) targets[n] = n % 3 == 1 ? -1 : (int)(philox(3, n).at[0] % V);
    if (N > 3) targets[0] = 0, targets[2] = V - 1;
    return targets;
}

// Softmax and its gradient, as they are defined.
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
            for (int n = 0; n < shape.N; n++) {  // what padding columns hold must not matter
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
    CHECK(std::isfinite(loss_with(7, -INFINITY)));  // a word ruled out
    CHECK(loss_with(7, -INFINITY) == doctest::Approx(loss_with(-1, 0)).epsilon(1e-2));

    std::vector<float> ruled_out(V, -INFINITY);  // whole chunks of them
    ruled_out[2] = 1;
    Buffer<floatX> logits(ruled_out);
    Buffer<float> losses(1);
    Buffer<int> targets(std::vector<int>{2});
    classifier(logits, losses, targets, 1.0f, 1, V, V, true, test_stream());
    CHECK(losses.host()[0] == 0);
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
