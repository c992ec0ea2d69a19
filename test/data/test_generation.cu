// Text from a model: what it is shown of the texts, how they go on and end, and what ranks tell each other.
#include <doctest/doctest.h>

#include <cmath>
#include <set>

#include "data/commands/generation.h"
#include "test/support/file_testing.h"

constexpr int vocab = 11;
using Texts = std::vector<std::vector<int>>;

// Stands for a model whose logits depend on all that it sees.
class FakeGenerator : public TextGenerator {
public:
    FakeGenerator(const std::vector<int>& prompt, int texts, int cache_length, int without_cache)
        : TextGenerator(prompt, texts, cache_length, without_cache), cache_((size_t)texts) {}

    std::vector<std::vector<int>> seen;     // by each row of logits, in this order
    std::vector<size_t> lengths_read;       // lengths of everything read from the beginning
    std::vector<std::vector<int>> decided;  // the tokens that were to be shared
    bool damaged = false;
    bool chooses = true;
    std::vector<int> from_elsewhere;  // tokens another rank chose

private:
    Rows logits_after(const std::vector<std::vector<int>>& contexts) {
        std::vector<std::vector<float>> rows;
        for (const auto& context : contexts) {
            seen.push_back(context);
            uint64_t key = 7;
            for (int token : context) key = random_key(key, std::to_string(token));
            std::vector<float> row(vocab);
            for (int i = 0; i < vocab; i++) row[(size_t)i] = damaged ? NAN : random_normal(key, (uint64_t)i);
            rows.push_back(row);
        }
        if (!chooses) rows.clear();
        return rows;
    }

    Rows logits(const std::vector<int>& tokens, int T, int past, int row, int last) override {
        if (past == 0) {
            REQUIRE(T == (int)tokens.size());
            lengths_read.push_back(tokens.size());
            cache_[(size_t)row] = std::vector<int>(tokens.begin(), tokens.begin() + last + 1);
            return logits_after({cache_[(size_t)row]});
        }
        REQUIRE((T == 1 && row == 0 && last == 0));
        REQUIRE(tokens.size() == cache_.size());
        for (size_t i = 0; i < cache_.size(); i++) {
            REQUIRE((int)cache_[i].size() == past);
            cache_[i].push_back(tokens[i]);
        }
        return logits_after(cache_);
    }

    void copy_first_row(int length, int texts) override {
        REQUIRE(texts == (int)cache_.size());
        for (auto& row : cache_) row = std::vector<int>(cache_[0].begin(), cache_[0].begin() + length);
    }

    void agree_on(std::vector<int>& tokens) override {
        decided.push_back(tokens);
        if (!from_elsewhere.empty()) tokens = from_elsewhere;
    }

    std::vector<std::vector<int>> cache_;
};

TEST_CASE("generation: the older half is left out when the model sees no more") {
    for (bool cached : {false, true}) {
        for (int limit : {1, 2, 5, 6}) {
            for (int prompt_length : {1, 4, 6, 13}) {
                CAPTURE(cached);
                CAPTURE(limit);
                CAPTURE(prompt_length);
                std::vector<int> text;
                for (int i = 0; i < prompt_length; i++) text.push_back(i % vocab);
                FakeGenerator generator(text, 1, cached ? limit : 0, cached ? 99 : limit);
                std::vector<int> shown = text;  // worked out from the definition
                for (int i = 0; i < 20; i++) {
                    if ((int)shown.size() > limit)
                        shown.erase(shown.begin(), shown.end() - std::max(limit / 2, 1));
                    REQUIRE(generator.next().size() == 1);
                    CHECK(generator.seen.back() == shown);
                    std::vector<int> token = {(3 * i + 1) % vocab};
                    generator.add(token);
                    text.push_back(token[0]);
                    shown.push_back(token[0]);
                    CHECK(generator.text(0) == text);
                }
            }
        }
    }
}

TEST_CASE("generation: what is read has few lengths") {
    FakeGenerator generator({1}, 1, 0, 100);
    for (int i = 0; i < 150; i++) {
        generator.next();
        std::vector<int> token = {i % vocab};
        generator.add(token);
    }
    std::set<size_t> lengths(generator.lengths_read.begin(), generator.lengths_read.end());
    CHECK(lengths == std::set<size_t>{64, 100});
}

TEST_CASE("generation: a prompt is read once for all texts") {
    for (bool cached : {false, true}) {
        FakeGenerator generator({1, 2, 3}, 4, cached ? 9 : 0, 9);
        auto logits = generator.next();
        CHECK(generator.seen.size() == 1);
        REQUIRE(logits.size() == 4);
        CHECK(logits[3] == logits[0]);
        std::vector<int> tokens = {4, 5, 4, 6};
        generator.add(tokens);
        logits = generator.next();
        CHECK(generator.seen.size() == 5);
        CHECK(generator.seen.back() == std::vector<int>{1, 2, 3, 6});
        CHECK(logits[2] == logits[0]);
        CHECK(logits[1] != logits[0]);
        CHECK(generator.lengths_read.size() == (cached ? 1 : 5));
    }
}

// The new tokens of each text.
static std::vector<std::vector<int>> write(const std::vector<uint64_t>& keys, bool cached = true,
                                           std::vector<int> ends = {}, size_t most = 99) {
    FakeGenerator generator({1, 2, 3}, (int)keys.size(), cached ? 9 : 0, 9);
    std::vector<std::vector<int>> texts(keys.size());
    generate_texts(generator, 30, ends, {}, keys, [&](int i, int token) {
        texts[(size_t)i].push_back(token);
        return texts[(size_t)i].size() < most;
    });
    return texts;
}

TEST_CASE("generation: a text depends on its key only, and ends by itself") {
    auto texts = write({11, 12, 11});
    CHECK(texts[0].size() == 30);
    CHECK(texts[0] != texts[1]);
    CHECK(texts[0] == texts[2]);
    CHECK(write({12}) == Texts{texts[1]});
    CHECK(write({11, 12, 11}, false) == texts);

    CHECK(write({11, 12}, true, {}, 5) == Texts{std::vector<int>(texts[0].begin(), texts[0].begin() + 5),
                                                std::vector<int>(texts[1].begin(), texts[1].begin() + 5)});
    // any of the tokens that end a text
    for (const std::vector<int>& ends : {std::vector<int>{texts[0][4]}, {texts[0][4], texts[1][2]}, {-1}}) {
        auto until = [&](const std::vector<int>& all) {
            return std::vector<int>(all.begin(),
                                    std::find_first_of(all.begin(), all.end(), ends.begin(), ends.end()));
        };
        auto ended = write({11, 12}, true, ends);
        CHECK(ended == Texts{until(texts[0]), until(texts[1])});
        CHECK((ended[0].size() == 30) == (ends[0] == -1));
    }
}

TEST_CASE("generation: all ranks take the tokens of the one that chooses, and hear of its trouble") {
    auto write = [](FakeGenerator& generator) {
        std::vector<int> shown;
        generate_texts(generator, 3, {}, {}, {5, 6},
                       [&](int, int token) { return shown.push_back(token), true; });
        return shown;
    };
    FakeGenerator listens({1}, 2, 9, 9);
    listens.chooses = false;
    listens.from_elsewhere = {8, 9};
    CHECK(write(listens) == std::vector<int>{8, 9, 8, 9, 8, 9});
    CHECK(listens.text(1) == std::vector<int>{1, 9, 9, 9});

    FakeGenerator damaged({1}, 2, 9, 9);
    damaged.damaged = true;
    CHECK_REFUSED(write(damaged), "the weights are damaged");
    REQUIRE(damaged.decided.size() == 1);
    CHECK(damaged.decided[0][0] == -1);

    FakeGenerator hears({1}, 2, 9, 9);
    hears.chooses = false;
    hears.from_elsewhere = {-1, 0};
    CHECK(error_of([&] { write(hears); }) == "sample: no token can be chosen");
}

TEST_CASE("generation: what a text starts from") {
    Tokenizer bytes;
    Options o;
    o.document_end = 256;
    CHECK(prompt_tokens(o, &bytes, "") == std::vector<int>{256});
    CHECK(prompt_tokens(o, &bytes, "ab") == std::vector<int>{97, 98});
    o.document_end = -1;
    CHECK(prompt_tokens(o, nullptr, "") == std::vector<int>{0});
}
