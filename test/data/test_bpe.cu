// Byte-pair encoding of words, compared with the simplest algorithm: find the lowest merge, join, repeat.
#include "test/support/file_testing.h"

#include <map>
#include <thread>

#include "data/tokenizer/bpe.h"
#include "kernels/random.cuh"

// A vocabulary of all bytes and random merges of existing tokens, in a shuffled order.
struct RandomVocabulary {
    std::vector<std::string> tokens;
    std::vector<Merge> merges;

    RandomVocabulary(uint64_t seed, int count, std::string_view letters, bool characters) {
        uint64_t drawn = 0;
        auto draw = [&](size_t below) { return (size_t)(philox(seed, drawn++).at[0] % below); };
        std::map<std::string, int> ids;
        auto add = [&](const std::string& token) {
            auto [found, added] = ids.emplace(token, (int)tokens.size());
            if (added) tokens.push_back(token);
            return found->second;
        };
        for (int byte = 255; byte >= 0; byte--)
            add(characters ? text("<0x%02X>", byte) : std::string(1, (char)byte));
        std::vector<int> parts;
        const char *at = letters.data(), *end = at + letters.size();
        while (at < end) {
            const char* begin = at;
            characters ? (void)next_code_point(at, end) : (void)at++;
            parts.push_back(add(std::string(begin, at)));
        }
        if (characters) parts.insert(parts.end(), {ids["<0xE4>"], ids["<0xB8>"], ids["<0xFF>"]});
        std::map<std::pair<int, int>, bool> used;
        while ((int)merges.size() < count) {
            int left = parts[draw(parts.size())], right = parts[draw(parts.size())];
            if (!used.emplace(std::pair(left, right), true).second) continue;
            int result = add(tokens[(size_t)left] + tokens[(size_t)right]);
            merges.push_back({left, right, result});
            parts.push_back(result);
        }
    }

    std::vector<int> encode(std::string_view word, BpeOptions options) const {
        auto find = [&](const std::string& token) {
            auto found = std::find(tokens.begin(), tokens.end(), token);
            return found == tokens.end() ? -1 : (int)(found - tokens.begin());
        };
        if (options.ignore_merges && find(std::string(word)) >= 0) return {find(std::string(word))};
        std::vector<int> out;
        const char *at = word.data(), *end = at + word.size();
        while (at < end) {
            const char* begin = at;
            if (options.byte_fallback)
                next_code_point(at, end);
            else
                at++;
            int token = find(std::string(begin, at));
            if (token >= 0)
                out.push_back(token);
            else
                for (; begin < at; begin++) out.push_back(find(text("<0x%02X>", (uint8_t)*begin)));
        }
        for (;;) {
            size_t best = merges.size(), place = 0;
            for (size_t i = 0; i + 1 < out.size(); i++) {
                for (size_t rank = 0; rank < best; rank++) {
                    if (merges[rank].left == out[i] && merges[rank].right == out[i + 1])
                        best = rank, place = i;
                }
            }
            if (best == merges.size()) return out;
            out[place] = merges[best].result;
            out.erase(out.begin() + (ptrdiff_t)place + 1);
        }
    }
};

static void compare(uint64_t seed, std::string_view letters, BpeOptions options) {
    RandomVocabulary vocabulary(seed, 60, letters, options.byte_fallback);
    Bpe bpe(vocabulary.tokens, vocabulary.merges, options, "here");
    uint64_t drawn = 0;
    auto draw = [&](size_t below) { return (size_t)(philox(seed + 1, drawn++).at[0] % below); };
    std::vector<std::string> pieces = {"\xff", "\xe4\xb8", "~", "\xf0\x9f\x98\x80", " "};
    for (const char *at = letters.data(), *end = at + letters.size(); at < end;) {
        const char* begin = at;
        next_code_point(at, end);
        pieces.emplace_back(begin, at);
    }
    size_t strange = 5;
    for (int round = 0; round < 250; round++) {
        std::string word;
        size_t length = 1 + draw(round % 10 == 0 ? 200 : 30);
        bool plain = round % 3 != 0;
        while (word.size() < length)
            word += plain ? pieces[strange + draw(pieces.size() - strange)] : pieces[draw(pieces.size())];
        if (round % 7 == 0) word = vocabulary.tokens[draw(vocabulary.tokens.size())];
        CAPTURE(word);
        std::vector<int> tokens = {-7};
        for (int time = 0; time < 2; time++) bpe.encode_word(word, tokens);  // computed, then cached
        std::vector<int> expected = vocabulary.encode(word, options), twice = {-7};
        for (int time = 0; time < 2; time++) twice.insert(twice.end(), expected.begin(), expected.end());
        REQUIRE(tokens == twice);
    }
}

TEST_CASE("bpe: as merging one at a time") {
    for (uint64_t seed = 0; seed < 12; seed++) {
        CAPTURE(seed);
        compare(seed, "ab", {});
        compare(seed, "abcdefgh", {});
        compare(seed, "abcde", {.ignore_merges = true});
        compare(seed, "aéb中\u2581<>", {.byte_fallback = true});
        compare(seed, "ab\u2581", {.ignore_merges = true, .byte_fallback = true});
    }
}

TEST_CASE("bpe: two vocabularies take turns on one thread") {
    RandomVocabulary a(1, 40, "ab", false), b(2, 40, "ab", false);
    Bpe first(a.tokens, a.merges, {}, "a"), second(b.tokens, b.merges, {}, "b");
    bool differ = false;
    for (int i = 0; i < 64; i++) {
        std::string word;
        for (int bit = 0; bit < 6; bit++) word += i >> bit & 1 ? 'a' : 'b';
        std::vector<int> one, two;
        first.encode_word(word, one);
        second.encode_word(word, two);
        CHECK(one == a.encode(word, {}));
        CHECK(two == b.encode(word, {}));
        differ |= one != two;
    }
    CHECK(differ);
}

TEST_CASE("bpe: many threads share one") {
    RandomVocabulary vocabulary(3, 60, "abcd", false);
    Bpe bpe(vocabulary.tokens, vocabulary.merges, {}, "here");
    std::vector<std::string> words;
    std::vector<std::vector<int>> expected;
    for (uint64_t i = 0; i < 200; i++) {
        std::string word;
        for (uint64_t j = 0; j < 12; j++) word += (char)('a' + philox(i, j).at[0] % 4);
        words.push_back(word);
        expected.push_back(vocabulary.encode(word, {}));
    }
    std::vector<int> wrong(4, -1);
    std::vector<std::jthread> threads;
    for (size_t t = 0; t < 4; t++) {
        threads.emplace_back([&, t] {
            wrong[t] = 0;
            for (size_t i = 0; i < 20 * words.size(); i++) {
                std::vector<int> tokens;
                bpe.encode_word(words[(i * (t + 1)) % words.size()], tokens);
                wrong[t] += tokens != expected[(i * (t + 1)) % words.size()];
            }
        });
    }
    threads.clear();
    CHECK(wrong == std::vector<int>(4, 0));
}

TEST_CASE("bpe: a word of millions of letters") {
    // aa, aaaa, ...: each merge joins two of the previous token
    std::vector<std::string> tokens;
    std::vector<Merge> merges;
    for (int byte = 0; byte < 256; byte++) tokens.push_back(std::string(1, (char)byte));
    int last = 'a';
    for (int i = 0; i < 6; i++) {
        tokens.push_back(tokens[(size_t)last] + tokens[(size_t)last]);
        merges.push_back({last, last, (int)tokens.size() - 1});
        last = (int)tokens.size() - 1;
    }
    Bpe bpe(tokens, merges, {}, "here");
    std::vector<int> out;
    bpe.encode_word(std::string(3'000'000, 'a') + "b", out);
    std::vector<int> expected(3'000'000 / 64, last);  // none is left over
    expected.push_back('b');
    CHECK(out == expected);
}

TEST_CASE("bpe: a vocabulary without a byte") {
    std::vector<std::string> tokens;
    for (int byte = 0; byte < 255; byte++) tokens.push_back(std::string(1, (char)byte));
    check_error(error_of([&] { Bpe(tokens, {}, {}, "there"); }), "there", "no token for byte 0xFF");
    check_error(error_of([&] { Bpe(tokens, {}, {.byte_fallback = true}, "there"); }), "there",
                "no token for byte 0x00");
}
