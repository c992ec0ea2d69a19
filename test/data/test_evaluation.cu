// Evaluations: which losses are added up, over which samples and choices, and how they are told.
#include "test/support/file_testing.h"

#include <cmath>

#include "data/commands/eval.h"

static Options small_options(int B, int T, int document_end) {
    Options o;
    o.vocab_size = 300;
    o.micro_batch = B;
    o.sequence_length = T;
    o.document_end = document_end;
    return o;
}

// Stands for a model: a loss that depends on the token, its target, where its document begins and its
// position. Tokens without a target have one too, which must not count.
static double fake_loss(int token, int target, int doc_start, int position) {
    return target < 0 ? 1e6 : 0.25 * token + 0.5 * target + doc_start + 3 * position;
}

static auto fake_losses(size_t N) {
    return [N](const HostBatch& batch) {
        REQUIRE(batch.targets == batch.tokens + N);
        if (batch.doc_start) REQUIRE(batch.doc_start == batch.targets + N);
        REQUIRE(batch.positions == batch.targets + 2 * N);
        std::vector<float> losses(N);
        for (size_t i = 0; i < N; i++) {
            int start = batch.doc_start ? batch.doc_start[i] : 0;
            losses[i] = (float)fake_loss(batch.tokens[i], batch.targets[i], start, batch.positions[i]);
        }
        return losses;
    };
}

TEST_CASE("evaluation: the samples of a token file, up to a limit") {
    TemporaryFolder folder;
    std::string path = folder / "a.bin";
    std::vector<uint16_t> tokens;
    for (int i = 0; i < 7 * 5 + 1; i++) tokens.push_back((uint16_t)(i % 9 == 4 ? 256 : i * 37 % 256));
    write_file(path, shard_bytes(tokens));
    Tokenizer bytes;
    for (int document_end : {-1, 256}) {
        for (int B : {1, 3, 8}) {
            for (int limit : {0, 1, 5, 7, 100}) {
                CAPTURE(document_end);
                CAPTURE(B);
                CAPTURE(limit);
                // positions are reset where they are learned only
                bool asked = B == 3, learned = limit != 5, reset = asked && learned && document_end >= 0;
                int T = 5, samples = limit == 0 || limit > 7 ? 7 : limit, texts = 0;
                double loss = 0;
                for (int i = 0; i < samples * T; i++) {
                    int start = i % T;
                    while (start > 0 && tokens[(size_t)(i / T * T + start - 1)] != document_end) start--;
                    int position = i % T - (reset ? start : 0);
                    loss += fake_loss(tokens[(size_t)i], tokens[(size_t)i + 1], start, position);
                    texts += tokens[(size_t)i + 1] < 256;
                }
                Options o = small_options(B, T, document_end);
                o.reset_positions = asked;
                o.position = learned ? PositionKind::learned : PositionKind::rope;
                if (document_end < 0) texts = samples * T;  // the end is a token as others
                DataScore score = evaluate_data(path, limit, o, nullptr, fake_losses((size_t)B * 5));
                CHECK(score.samples == (uint64_t)samples);
                CHECK(score.targets == (uint64_t)(samples * T));
                CHECK(score.bytes == 0);
                CHECK(score.mean() == doctest::Approx(loss / (samples * T)));
                if (document_end < 0) continue;
                score = evaluate_data(path, limit, o, &bytes, fake_losses((size_t)B * 5));
                CHECK(score.bytes == (uint64_t)texts);
                CHECK(score.bits_per_byte() == doctest::Approx(loss / std::log(2.0) / texts));
            }
        }
    }
}

TEST_CASE("evaluation: tokens that are not the tokenizer's, and files that are none, are refused") {
    TemporaryFolder folder;
    std::string path = folder / "a.bin";
    write_file(path, shard_bytes({1, 2, 280, 4, 5, 6}));
    Tokenizer bytes;
    Options o = small_options(2, 5, 256);
    CHECK_REFUSED(evaluate_data(path, 0, o, &bytes, fake_losses(10)), "has token 280");
    CHECK(evaluate_data(path, 0, o, nullptr, fake_losses(10)).targets == 5);
    write_file(path, shard_bytes({1, 2, 301, 4, 5, 6}));
    CHECK_REFUSED(evaluate_data(path, 0, o, nullptr, fake_losses(10)), "301");
}

TEST_CASE("evaluation: the likeliest choice of each question") {
    TemporaryFolder folder;
    std::string path = folder / "a.jsonl";
    // The fake model finds lower bytes likelier; by the sum short choices are.
    write_file(path, R"({"context": "x", "choices": [" b", " a", " c"], "answer": 1})"
                     "\n"
                     R"({"context": "xyz", "choices": [" zz", " aaaa"], "answer": 1})"
                     "\n"
                     R"({"context": "zz", "choices": [" a", " b"], "answer": 1})");
    Tokenizer bytes;
    for (int B : {1, 2, 3, 16}) {
        CAPTURE(B);
        Options o = small_options(B, 12, -1);
        auto losses = [&](const HostBatch& batch) {
            CHECK(batch.doc_start == nullptr);
            for (int i = 0; i < B * 12; i++) REQUIRE(batch.positions[i] == i % 12);
            return fake_losses((size_t)B * 12)(batch);
        };
        ChoiceScore score = evaluate_choices(path, 0, o, &bytes, losses);
        CHECK(score.examples == 3);
        CHECK(score.right_by_sum == 1);
        CHECK(score.right_by_mean == 2);
        CHECK(
            score_text(ChoiceScore{100, 50, 90}, "q") ==
            "right 50.0% +- 5.0 by the sum of log-likelihoods, 90.0% +- 3.0 by their mean per token, of 100 "
            "questions of q");
        CHECK(evaluate_choices(path, 1, o, &bytes, losses).examples == 1);
        CHECK(evaluate_choices(path, 9, o, &bytes, losses).examples == 3);
    }
}
