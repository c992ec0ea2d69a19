// Tests of data/run/meter.h and data/run/time_limit.h. The expected values follow from the published formula:
// a GPT with an MLP of 4 h costs 72 B s l h^2 (1 + s / (6 h) + V / (12 l h)) FLOPs a step (Korthikanti et al.
// 2022).
#include <doctest/doctest.h>

#include "data/base/figures.h"
#include "data/run/meter.h"
#include "data/run/time_limit.h"

namespace {

ModelConfig completed(ModelConfig config) {
    complete(config);
    return config;
}

double published_flops_per_token(const ModelConfig& c, double s) {
    double l = c.layers, h = c.channels, V = c.vocab_size;
    return 72 * l * h * h * (1 + s / (6 * h) + V / (12 * l * h));
}

}  // namespace

TEST_CASE("FLOPs of GPT-2 124M") {
    // 6 (12 layers of 7077888 weights, and 768 * 50257), and 12 * 12 layers * 768 for each of 1024 positions
    ModelConfig gpt2 = completed({});
    CHECK(qkv_width(gpt2) == 2304);
    CHECK(fc_width(gpt2) == 3072);
    double products = 6.0 * (84934656 + 38597376), attention = 113246208;
    CHECK(products == 741192192);
    CHECK(flops_per_token(gpt2, 1024, false) == products + attention);
    CHECK(flops_per_token(gpt2, 1024, true) == products + attention / 2);
    CHECK(flops_per_token(gpt2, 1024, false) ==
          doctest::Approx(published_flops_per_token(gpt2, 1024)).epsilon(1e-12));
}

TEST_CASE("FLOPs of GPT-3 175B are those of the paper's formula") {
    ModelConfig gpt3 = completed({.layers = 96, .channels = 12288, .heads = 96, .vocab_size = 51200});
    CHECK(flops_per_token(gpt3, 2048, false) ==
          doctest::Approx(published_flops_per_token(gpt3, 2048)).epsilon(1e-12));
}

TEST_CASE("FLOPs with fewer key heads, wide heads and SwiGLU") {
    ModelConfig config = completed({.layers = 2,
                                    .channels = 8,
                                    .heads = 4,
                                    .kv_heads = 2,
                                    .head_size = 6,
                                    .mlp_width = 10,
                                    .vocab_size = 100,
                                    .mlp = MlpKind::swiglu});
    // queries 24 and keys and values 12 each from 8, back from 24 to 8, two MLP inputs of 10 and one output
    CHECK(qkv_width(config) == 48);
    CHECK(fc_width(config) == 20);
    double weights = 2 * (8 * 48 + 24 * 8 + 8 * 20 + 10 * 8) + 8 * 100;
    CHECK(flops_per_token(config, 16, false) == 6 * weights + 12 * 2 * 24 * 16);
}

TEST_CASE("a window counts the positions it holds") {
    ModelConfig config = completed({.layers = 1, .channels = 8, .heads = 1, .vocab_size = 1, .window = 3});
    double products = 6 * (12 * 8 * 8 + 8.0);
    // positions 0 .. 4 see 1, 2, 3, 3, 3
    CHECK(flops_per_token(config, 5, true) == doctest::Approx(products + 12 * 8 * (12 / 5.0)));
    CHECK(flops_per_token(config, 5, false) == flops_per_token(config, 5, true));
    config.window = 5;  // a window as long as the sequence is no window
    CHECK(flops_per_token(config, 5, false) == products + 12 * 8 * 5);
    // layers 0, 1, 3 and 4 of five have a window; layer 2 counts half of the 5 positions
    config = completed({.layers = 5, .channels = 8, .heads = 1, .vocab_size = 1, .window = 3});
    config.window_pattern = "2:1";
    products = 6 * (5 * 12 * 8 * 8 + 8.0);
    CHECK(flops_per_token(config, 5, true) == doctest::Approx(products + 12 * 8 * (4 * 12 / 5.0 + 5 / 2.0)));
}

TEST_CASE("shares are of one device") {
    // 1024 A100 that do 138 TFLOP/s each, of 312 published and 276 measured
    ModelConfig gpt2 = completed({});
    double full = flops_per_token(gpt2, 1024, false), causal = flops_per_token(gpt2, 1024, true);
    double rate = 138e12 * 1024 / full;
    Meter meter(gpt2, 1024, 312e12, 276e12, 1024);
    CHECK(meter.has_peak());
    CHECK(meter.mfu(rate) == doctest::Approx(138 / 312.0).epsilon(1e-12));
    CHECK(meter.gemm_share(rate) == doctest::Approx(0.5).epsilon(1e-12));
    meter.add_measurement(1);  // a lower measurement comes from a device that others used
    CHECK(meter.gemm_share(rate) == doctest::Approx(0.5).epsilon(1e-12));
    CHECK(meter.gemm_share_causal(rate) == doctest::Approx(0.5 * causal / full).epsilon(1e-12));

    Meter alone(gpt2, 1024, 312e12, 276e12, 1);
    CHECK(alone.mfu(rate / 1024) == doctest::Approx(meter.mfu(rate)).epsilon(1e-12));

    Meter unknown(gpt2, 1024, 0, 276e12, 8);
    CHECK(!unknown.has_peak());
    CHECK(unknown.mfu(rate) == 0);
}

TEST_CASE("durations") {
    CHECK(duration(0) == "0s");
    CHECK(duration(59.4) == "59s");
    CHECK(duration(59.6) == "1m00s");
    CHECK(duration(725) == "12m05s");
    CHECK(duration(3599) == "59m59s");
    CHECK(duration(3600) == "1h00m");
    CHECK(duration(30 * 3600 + 2 * 60 + 59) == "30h02m");
}

TEST_CASE("numbers") {
    CHECK(human(0) == "0");
    CHECK(human(7) == "7");
    CHECK(human(999) == "999");
    CHECK(human(999.6) == "1.00k");
    CHECK(human(1234) == "1.23k");
    CHECK(human(12345) == "12.3k");
    CHECK(human(123456) == "123k");
    CHECK(human(999499) == "999k");
    CHECK(human(999500) == "1.00M");
    CHECK(human(1234567) == "1.23M");
    CHECK(human(124e6) == "124M");
    CHECK(human(175e9) == "175G");
    CHECK(human(312e12) == "312T");
    CHECK(human(1.5e15) == "1.50P");
    CHECK(human(2e19) == "20000P");
}

TEST_CASE("the clock goes forward") {
    double before = seconds_now();
    CHECK(seconds_now() >= before);
}

TEST_CASE("no share is above one") {
    ModelConfig gpt2 = completed({});
    Meter meter(gpt2, 1024, 0, 1e12, 1);
    double rate = 2.5e12 / flops_per_token(gpt2, 1024, false);
    meter.add_step(rate);  // faster than the products, which were measured while others used the device
    CHECK(meter.gemm_share(rate) == doctest::Approx(1).epsilon(1e-12));
    CHECK(meter.gemm_share(rate / 2) == doctest::Approx(0.5).epsilon(1e-12));
    meter.add_measurement(5e12);
    CHECK(meter.gemm_share(rate) == doctest::Approx(0.5).epsilon(1e-12));
}

TEST_CASE("a run ends before its time is over, by the times that things have taken") {
    const double begun = 1000;
    TimeLimit limit(100, begun), none(0, begun);
    CHECK(!limit.is_over(10, begun + 89));
    CHECK(limit.is_over(10, begun + 89.5));
    CHECK(limit.is_over(0, begun + 101));
    CHECK(!none.is_over(1e9, begun + 1e9));
    // The longest save counts, but an old one counts less and less.
    CHECK(limit.save.seconds(3) == 3);
    limit.save.add(2);
    CHECK(limit.save.seconds(3) == 2);
    limit.save.add(12);
    CHECK(limit.save.seconds() == 12);
    limit.save.add(2);
    CHECK(limit.save.seconds() == doctest::Approx(11));
    for (int i = 0; i < 100; i++) limit.save.add(2);
    CHECK(limit.save.seconds() == doctest::Approx(2).epsilon(0.01));
    CHECK(process_begun <= seconds_now());
}
