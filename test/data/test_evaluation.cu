// Evaluations: which losses are added up, over which samples and choices, and how they are reported.
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

// Stands in for a model: the loss depends on the token, its target, the beginning of its document and its
// position. Tokens without a target have a loss, too, which must not count.
static double fake_loss(int token, int target, int doc_start, int position) {
    return target < 0 ? 1e6 : 0.25 * token + 0.5 * target + doc_start + 3 * position;
}

// Takes the batches of one of several data ranks; the test itself adds up the results of all ranks.
class FakeLosses : public LossSource {
public:
    FakeLosses(int B, int T, int ranks = 1, int rank = 0)
        : N_((size_t)B * (size_t)T), T_(T), ranks_(ranks), rank_(rank) {}

    bool documents = true;  // batches contain the beginnings of documents

    int ranks() const override { return ranks_; }
    void each(uint64_t count, const Load& load, const Take& take) override {
        for (uint64_t first = 0; first < count; first += (uint64_t)ranks_) {
            uint64_t number = first + (uint64_t)rank_;
            HostBatch batch = load(number);
            take(number, {batch.targets, batch.targets + N_}, losses(batch));
        }
    }
    void add_up(std::vector<double>&) override {}

private:
    std::vector<float> losses(const HostBatch& batch) const {
        REQUIRE(batch.targets == batch.tokens + N_);
        if (batch.doc_start) REQUIRE(batch.doc_start == batch.targets + N_);
        CHECK((documents || batch.doc_start == nullptr));
        REQUIRE(batch.positions == batch.targets + 2 * N_);
        std::vector<float> losses(N_);
        for (size_t i = 0; i < N_; i++) {
            int start = batch.doc_start ? batch.doc_start[i] : 0;
            if (!documents) REQUIRE(batch.positions[i] == (int)i % T_);
            losses[i] = (float)fake_loss(batch.tokens[i], batch.targets[i], start, batch.positions[i]);
        }
        return losses;
    }

    const size_t N_;
    const int T_, ranks_, rank_;
};

static DataScore evaluate(const std::string& path, int limit, const Options& o, const Tokenizer* tokenizer,
                          int ranks = 1) {
    TokenLoader files(path, o.vocab_size, o.sequence_length, SampleOrder::sequential);
    DataScore all;
    for (int rank = 0; rank < ranks; rank++) {
        FakeLosses model(o.micro_batch, o.sequence_length, ranks, rank);
        DataScore score = evaluate_data(files, path, limit, o, tokenizer, model);
        all.loss += score.loss, all.targets += score.targets, all.bytes += score.bytes;
        all.samples = score.samples;
    }
    return all;
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
                // positions are reset only where they are learned
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
                DataScore score = evaluate(path, limit, o, nullptr, 1 + limit % 4);
                CHECK(score.samples == (uint64_t)samples);
                CHECK(score.targets == (uint64_t)(samples * T));
                CHECK(score.bytes == 0);
                CHECK(score.mean() == doctest::Approx(loss / (samples * T)));
                score = evaluate(path, limit, o, &bytes);  // the end token is no text
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
    CHECK_REFUSED(evaluate(path, 0, o, &bytes), "token 280 is not in the tokenizer");
    CHECK(evaluate(path, 0, o, nullptr).targets == 5);
    write_file(path, shard_bytes({1, 2, 301, 4, 5, 6}));
    CHECK_REFUSED(evaluate(path, 0, o, nullptr), "301");
}

TEST_CASE("evaluation: the likeliest choice of each question") {
    TemporaryFolder folder;
    std::string path = folder / "a.jsonl";
    // The fake model prefers lower bytes; by the sum, it prefers short choices.
    write_file(path, R"({"context": "x", "choices": [" b", " a", " c"], "answer": 1})"
                     "\n"
                     R"({"context": "xyz", "choices": [" zz", " aaaa"], "answer": 1})"
                     "\n"
                     R"({"context": "zz", "choices": [" a", " b"], "answer": 1})");
    Tokenizer bytes;
    for (int B : {1, 2, 3, 16}) {
        CAPTURE(B);
        Options o = small_options(B, 12, -1);
        FakeLosses model(B, 12);
        model.documents = false;
        std::vector<ChoiceExample> questions = read_choices(path, &bytes, o.vocab_size);
        ChoiceScore score = evaluate_choices(questions, o, model, true);
        CHECK(score.examples == 3);
        CHECK(score.right_by_sum == 1);
        CHECK(score.right_by_mean == 2);
        CHECK(score_text(ChoiceScore{100, 50, 90}, "q") ==
              "right 50.0% +- 5.0 by the sum of log-likelihoods, 90.0% +- 3.0 by their mean per token  (100 "
              "questions of q)");
    }
}
