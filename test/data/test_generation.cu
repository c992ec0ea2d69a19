// Text from a model: how much of a text it is shown, how texts continue and end, and what ranks exchange.
#include <doctest/doctest.h>

#include <cmath>
#include <set>

#include "data/commands/generation.h"
#include "data/commands/session.h"
#include "test/support/file_testing.h"

constexpr int vocab = 11;
using Texts = std::vector<std::vector<int>>;

// Stands in for a model whose logits depend on everything that it sees.
class FakeGenerator : public TextGenerator {
public:
    // cache_length 0: no cache, and the model sees `without_cache` tokens at once.
    FakeGenerator(const Texts& prompts, int cache_length, int without_cache, DataRanks ranks = {1, 0, false})
        : TextGenerator(prompts, cache_length ? cache_length : without_cache, cache_length > 0, 1, ranks),
          cache_(prompts.size()) {}
    FakeGenerator(const std::vector<int>& prompt, int texts, int cache_length, int without_cache)
        : FakeGenerator(Texts((size_t)texts, prompt), cache_length, without_cache) {}

    std::vector<std::vector<int>> seen;     // the tokens that each row of logits follows, in order
    std::vector<size_t> lengths_read;       // lengths of everything read from the beginning
    std::vector<std::vector<int>> decided;  // the tokens that were to be shared
    int passes = 0;
    bool damaged = false;
    bool chooses = true;
    std::vector<int> from_elsewhere;  // tokens that another rank chose

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

    Rows logits(const std::vector<int>& tokens, int T, const std::vector<int>& pasts, int row,
                int last) override {
        passes++;
        if (row == no_row) return {};
        if (pasts.empty()) {
            REQUIRE(T == (int)tokens.size());
            lengths_read.push_back(tokens.size());
            cache_[(size_t)row] = std::vector<int>(tokens.begin(), tokens.begin() + last + 1);
            return logits_after({cache_[(size_t)row]});
        }
        REQUIRE((T == 1 && row == 0 && last == 0));
        REQUIRE(tokens.size() == pasts.size());
        std::vector<std::vector<int>> contexts;
        for (size_t i = 0; i < pasts.size(); i++) {
            if (pasts[i] < 0) {
                cache_[i].clear();  // such a pass may write anything there
                contexts.push_back({-1});
                continue;
            }
            REQUIRE((int)cache_[i].size() == pasts[i]);
            cache_[i].push_back(tokens[i]);
            contexts.push_back(cache_[i]);
        }
        return logits_after(contexts);
    }

    void copy_row(int from, int to, int length) override {
        REQUIRE((int)cache_[(size_t)from].size() == length);
        cache_[(size_t)to] = cache_[(size_t)from];
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
                std::vector<int> shown = text;  // computed from the definition
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

// Returns the new tokens of each text.
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
    CHECK(damaged.decided[0] == std::vector<int>{-1, -1});

    FakeGenerator hears({1}, 2, 9, 9);
    hears.chooses = false;
    hears.from_elsewhere = {-1, 0};
    CHECK(error_of([&] { write(hears); }) == "sample: no token can be chosen");
}

TEST_CASE("generation: texts of several lengths are those that each would be alone") {
    const Texts prompts = {{1, 2, 3}, {4}, {1, 2, 3}, {5, 6, 7, 8, 9, 1, 2}, {4}, {4}};
    const std::vector<uint64_t> keys = {11, 12, 13, 14, 15, 12};
    auto write = [&](FakeGenerator& generator, const std::vector<uint64_t>& keys) {
        Texts texts(keys.size());
        generate_texts(generator, 25, {3}, {}, keys, [&](int i, int token) {
            texts[(size_t)i].push_back(token);
            return true;
        });
        return texts;
    };
    for (bool cached : {false, true}) {
        Texts alone;
        for (size_t i = 0; i < prompts.size(); i++) {
            FakeGenerator one({prompts[i]}, cached ? 6 : 0, 6);
            alone.push_back(write(one, {keys[i]})[0]);
        }
        FakeGenerator together(prompts, cached ? 6 : 0, 6);
        CHECK(write(together, keys) == alone);
    }
}

// The test plays all ranks in turn: each has logits for its own texts, and all receive all chosen tokens.
TEST_CASE("generation: data ranks share texts, and all make the same number of passes") {
    const Texts prompts = {{1, 2, 3}, {4}, {5, 6, 7, 8, 9}, {1, 2}, {4}};
    for (bool cached : {false, true}) {
        for (int count : {2, 3, 7}) {
            FakeGenerator alone(prompts, cached ? 6 : 0, 6);
            std::vector<std::unique_ptr<FakeGenerator>> ranks;
            for (int rank = 0; rank < count; rank++)
                ranks.push_back(std::make_unique<FakeGenerator>(prompts, cached ? 6 : 0, 6,
                                                                TextGenerator::DataRanks{count, rank, true}));
            for (int step = 0; step < 12; step++) {
                auto all = alone.next();
                for (auto& rank : ranks) {
                    auto own = rank->next();
                    for (size_t row = 0; row < own.size(); row++)
                        CHECK(own[row] == all[(size_t)rank->number((int)row)]);
                    CHECK(rank->passes == ranks[0]->passes);
                }
                std::vector<int> tokens;
                for (int i = 0; i < (int)prompts.size(); i++) tokens.push_back((step * 7 + 3 * i) % vocab);
                alone.add(tokens);
                for (auto& rank : ranks) rank->add(tokens);
            }
            CHECK(ranks[0]->passes < alone.passes + (cached ? 12 : 0));
        }
    }
}

TEST_CASE("generation: prompts of a file") {
    TemporaryFolder folder;
    std::string text = folder / "some.txt", lines = folder / "some.jsonl";
    write_file(text, "two\nlines\n");
    CHECK(read_prompts(text) == std::vector<std::string>{"two\nlines\n"});
    write_file(lines, "{\"prompt\": \"a\\nb\"}\n\n{\"id\": 3, \"prompt\": \"\"}\n");
    CHECK(read_prompts(lines) == std::vector<std::string>{"a\nb", ""});
    write_file(lines, "{\"prompt\": \"a\"}\n[1]\n");
    check_error(error_of([&] { read_prompts(lines); }), lines + ":2",
                "is an array; each line must be an object");
    write_file(lines, "{\"text\": \"a\"}\n");
    CHECK_REFUSED(read_prompts(lines), lines + ":1");
    write_file(lines, "\n");
    CHECK_REFUSED(read_prompts(lines), "has no prompts");
}

TEST_CASE("generation: what a text starts from") {
    Tokenizer bytes;
    Options o;
    o.document_end = 256;
    CHECK(prompt_tokens(o, &bytes, "") == std::vector<int>{256});
    CHECK(prompt_tokens(o, &bytes, "ab") == std::vector<int>{97, 98});
    o.document_end = -1;
    CHECK(prompt_tokens(o, nullptr, "") == std::vector<int>{0});
    Tokenizer llama3 = Tokenizer::load("test/golden/tokenizers/llama3.json");
    std::vector<int> tokens = llama3.encode("ab");
    CHECK(prompt_tokens(o, &llama3, "ab") == tokens);
    llama3.begin_prompts();
    CHECK(llama3.encode("ab") == tokens);
    std::vector<int> first = prompt_tokens(o, &llama3, "");
    REQUIRE(first.size() == 1);
    CHECK(llama3.token_bytes(first[0]) == "<s>");
    tokens.insert(tokens.begin(), first[0]);
    CHECK(prompt_tokens(o, &llama3, "ab") == tokens);
}

TEST_CASE("generation: the end of a document is hidden from all tokens of the next but the first") {
    for (bool cached : {false, true}) {
        FakeGenerator generator(Texts{{3}, {4}, {3, 5}}, cached ? 8 : 0, 8);
        generator.hide_first(3);
        for (std::vector<int> tokens : Texts{{1, 1, 1}, {2, 2, 2}}) {
            generator.next();
            generator.add(tokens);
        }
        generator.next();
        std::vector<std::vector<int>> last(generator.seen.end() - 3, generator.seen.end());
        for (const std::vector<int>& seen : Texts{{1, 2}, {4, 1, 2}, {3, 5, 1, 2}})
            CHECK(std::ranges::count(last, seen) == 1);
    }
}

TEST_CASE("generation: commands between prompts") {
    SampleOptions options;
    int number = 3;
    auto say = [&](const char* line) { return obey_command(line, options, number); };
    CHECK(say("/temperature  0.7 ") == "temperature 0.7\n");
    CHECK(say("/repetition-penalty 1.1") == "repetition-penalty 1.1\n");
    CHECK(say("/temperature") == "temperature 0.7\n");
    CHECK((options.temperature == 0.7f && options.repetition_penalty == 1.1f && number == 3));
    say("/seed 5");
    CHECK((options.seed == 5 && number == 0));
    CHECK_REFUSED(say("/top-p 2"), "--top-p 2: out of range; give a number from 0 to 1");
    CHECK_REFUSED(say("/tokens 5 6"), "--tokens 5 6: not a number");
    CHECK((options.top_p == 1 && options.tokens == 256));
    CHECK_REFUSED(say("/topk 3"), "/topk: no such command, the nearest is /top-k; ");
    for (const char* other : {"/samples 2", "/sample-tokens 2", "/tp 2", "/stop a", "/"})
        CHECK_REFUSED(say(other), "no such command");
    std::string help = say("/help");
    for (const char* words : {"\n  /min-p N ", "\n  /tokens N ", "  /seed N ", "Ctrl-C"})
        CHECK(help.find(words) != help.npos);
    CHECK(help.find("samples") == help.npos);

    for (auto [line, prompt] : {std::pair("//top-k", "/top-k"), {"a /b", "a /b"}, {"//", "/"}}) {
        std::string typed = line;
        CHECK(!obey(typed, options, number, true));
        CHECK(typed == prompt);
    }
    std::string wrong = "/top-k few", right = "/top-k 8";
    CHECK(obey(wrong, options, number, false));
    CHECK(obey(right, options, number, false));
    CHECK(options.top_k == 8);
}
