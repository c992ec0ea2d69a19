// The table rows that the n-grams of a text look up, and the options of n-gram memory.
#include "test/support/file_testing.h"

#include <cmath>
#include <set>

#include "data/tokens/ngrams.h"

using Tokens = std::vector<int>;
using Looked = std::vector<uint64_t>;  // rows (count, heads)

constexpr uint64_t seed = 5;
constexpr int vocab = 300;

// 2-grams and 3-grams with two heads each, and enough rows that none is shared by chance.
static ModelConfig model_with_ngrams(long long rows = 1'000'000'000) {
    ModelConfig c;
    c.vocab_size = vocab;
    c.ngram = "2,3";
    c.ngram_heads = 2;
    c.ngram_rows = rows;
    complete(c);
    return c;
}
constexpr int all_heads = 4;

static NgramHash unfolded(const ModelConfig& c) {
    return NgramHash(c, seed, folded_tokens(nullptr, vocab));
}

static Tokens random_text(const char* name, size_t size) {
    Tokens tokens(size);
    for (size_t i = 0; i < size; i++) tokens[i] = (int)(philox(random_key(seed, name), i).at[0] % vocab);
    return tokens;
}

static Looked look_up(const NgramHash& hash, const NgramTokens& text, int first = 0, int heads = all_heads) {
    Looked rows((size_t)(text.count * heads), ~uint64_t(0));
    hash.look_up(rows.data(), text, first, heads);
    return rows;
}
static Looked look_up(const NgramHash& hash, const Tokens& tokens) {
    return look_up(hash, {tokens.data(), (int)tokens.size()});
}

// The rows of tokens begin .. end - 1.
static Looked part(const Looked& rows, int begin, int end) {
    return {rows.begin() + begin * all_heads, rows.begin() + end * all_heads};
}

TEST_CASE("ngrams: a row depends on the last n tokens, and on each of them") {
    ModelConfig c = model_with_ngrams();
    NgramHash hash = unfolded(c);
    std::vector<NgramHead> heads = ngram_heads(c);
    Tokens text = random_text("text", 40);
    Looked rows = look_up(hash, text);
    for (int changed = 0; changed < 40; changed++) {
        Tokens other = text;
        other[(size_t)changed] = (other[(size_t)changed] + 1) % vocab;
        Looked others = look_up(hash, other);
        for (int t = 0; t < 40; t++) {
            for (int head = 0; head < all_heads; head++) {
                size_t i = (size_t)(t * all_heads + head);
                bool sees = changed <= t && t - changed < heads[(size_t)head].tokens;
                CHECK((rows[i] != others[i]) == sees);
            }
        }
    }
    // tokens in another order are another n-gram
    CHECK(look_up(hash, Tokens{1, 2})[all_heads] != look_up(hash, Tokens{2, 1})[all_heads]);
}

TEST_CASE("ngrams: documents do not see each other, and a text sees the tokens before it") {
    NgramHash hash = unfolded(model_with_ngrams());
    Tokens text = random_text("text", 30), one(text.begin(), text.begin() + 12),
           two(text.begin() + 12, text.begin() + 13), three(text.begin() + 13, text.end());
    Looked whole = look_up(hash, text), want = look_up(hash, one);
    for (const Tokens& document : {two, three})
        for (uint64_t row : look_up(hash, document)) want.push_back(row);
    std::vector<int> starts(30, 13);
    std::fill_n(starts.begin(), 13, 0);
    starts[12] = 12;
    CHECK(look_up(hash, {text.data(), 30, 0, starts.data()}) == want);
    CHECK(want != whole);

    for (int first : {1, 2, 5}) {
        const int* at = text.data() + first;
        int count = 30 - first;
        CHECK(look_up(hash, {at, count, first}) == part(whole, first, 30));
        CHECK(look_up(hash, {at, count}) == look_up(hash, Tokens(text.begin() + first, text.end())));
        // looks at no more preceding tokens than the call allows
        Looked one_before = look_up(hash, {at, count, 1});
        CHECK(one_before == part(look_up(hash, {at - 1, count + 1}), 1, count + 1));

        // a document that began one token before the text
        std::vector<int> began((size_t)count, -1);
        CHECK(look_up(hash, {at, count, first, began.data()}) == one_before);
    }
}

TEST_CASE("ngrams: some heads look up what they do among all") {
    NgramHash hash = unfolded(model_with_ngrams());
    Tokens text = random_text("text", 50);
    Looked whole = look_up(hash, text);
    for (auto [first, heads] : {std::pair{0, 1}, {1, 1}, {3, 1}, {0, 2}, {1, 2}, {2, 2}, {1, 3}}) {
        Looked some = look_up(hash, {text.data(), 50}, first, heads);
        for (int t = 0; t < 50; t++)
            for (int head = 0; head < heads; head++)
                CHECK(some[(size_t)(t * heads + head)] == whole[(size_t)(t * all_heads + first + head)]);
    }
}

TEST_CASE("ngrams: rows are uniform, and what two share in one head they do not in another") {
    ModelConfig c = model_with_ngrams(200);
    std::vector<NgramHead> heads = ngram_heads(c);
    const size_t n = 20'000;
    Looked rows = look_up(unfolded(c), random_text("text", n));
    std::vector<std::vector<double>> counts;
    for (const NgramHead& head : heads) counts.emplace_back(head.rows);
    for (size_t i = 0; i < rows.size(); i++) {
        size_t head = i % all_heads;
        REQUIRE(rows[i] >= heads[head].first);
        REQUIRE(rows[i] < heads[head].first + heads[head].rows);
        counts[head][rows[i] - heads[head].first]++;
    }
    // chi-square / degrees of freedom is 1 +- sqrt(2 / degrees) for uniform counts
    for (const auto& of_head : counts) {
        double expected = n / (double)of_head.size(), chi_square = 0;
        for (double count : of_head) chi_square += std::pow(count - expected, 2) / expected;
        CHECK(chi_square / (double)(of_head.size() - 1) == doctest::Approx(1).epsilon(0.6));
    }
    for (size_t head = 0; head < all_heads; head += 2) {  // this head and the next look up the same n-grams
        double shared = 0, both = 0;
        for (size_t s = 0; s < 1000; s++) {
            for (size_t t = 0; t < s; t++) {
                const uint64_t *a = &rows[s * all_heads + head], *b = &rows[t * all_heads + head];
                shared += a[0] == b[0];
                both += a[0] == b[0] && a[1] == b[1];
            }
        }
        CHECK(shared > 1000);
        CHECK(both / shared < 2.0 / (double)heads[head + 1].rows);
    }
}

// The formula is at the top of ngrams.h.
TEST_CASE("ngrams: the numbers of rows are those of the formula") {
    ModelConfig c = model_with_ngrams(5000);
    std::vector<NgramHead> heads = ngram_heads(c);
    Tokens tokens = random_text("text", 60);
    std::vector<uint64_t> folded(vocab);
    for (size_t i = 0; i < vocab; i++) folded[i] = i / 2;
    Looked rows = look_up(NgramHash(c, 1234, folded), tokens);
    for (int t = 0; t < 60; t++) {
        for (size_t head = 0; head < all_heads; head++) {
            uint64_t hash = 0;
            for (int back = 0; back < heads[head].tokens && back <= t; back++) {
                uint64_t factor = random_key(1234, text("n-gram head %zu token %d", head, back)) | 1;
                hash ^= factor * (uint64_t)(tokens[(size_t)(t - back)] / 2 + 1);
            }
            hash ^= hash >> 33;
            hash *= 0xff51afd7ed558ccd;
            hash ^= hash >> 33;
            CHECK(rows[(size_t)t * all_heads + head] == heads[head].first + hash % heads[head].rows);
        }
    }
}

TEST_CASE("ngrams: heads have different prime numbers of rows, one after another") {
    struct Shape {
        const char* ngram;
        long long rows;
        int heads;
        std::vector<int> tokens;
    };
    for (const Shape& shape : std::vector<Shape>{{"2,3", 1 << 20, 4, {2, 2, 2, 2, 3, 3, 3, 3}},
                                                 {"1", 100, 1, {1}},
                                                 {"1,2,8", 100, 2, {1, 1, 2, 2, 8, 8}},
                                                 {"2", 10, 2, {2, 2}}}) {
        CAPTURE(shape.ngram);
        ModelConfig c;
        c.ngram = shape.ngram, c.ngram_rows = shape.rows, c.ngram_heads = shape.heads;
        uint64_t end = 0, most = (uint64_t)shape.rows / (uint64_t)shape.heads;
        std::set<uint64_t> sizes;
        std::vector<int> tokens;
        for (const NgramHead& head : ngram_heads(c)) {
            CHECK(head.first == end);
            REQUIRE(head.rows > 1);
            CHECK(head.rows <= most);
            uint64_t divisor = 2;
            while (head.rows % divisor != 0) divisor++;
            CHECK(divisor == head.rows);  // prime
            end += head.rows;
            sizes.insert(head.rows);
            tokens.push_back(head.tokens);
        }
        CHECK(sizes.size() == tokens.size());
        CHECK(tokens == shape.tokens);
        CHECK(ngram_head_count(c) == (int)tokens.size());
        CHECK(rows_of_table(c) == end);
    }
}

TEST_CASE("ngrams: tokens that differ in case are one, and are themselves without a tokenizer") {
    Tokenizer bytes;
    std::vector<uint64_t> folded = folded_tokens(&bytes, vocab), own = folded_tokens(nullptr, vocab);
    REQUIRE(folded.size() == vocab);
    for (size_t token = 0; token < vocab; token++) {
        CHECK(own[token] == token);
        CHECK(folded[token] == (token >= 'a' && token <= 'z' ? token - 'a' + 'A' : token));
    }
    ModelConfig c = model_with_ngrams();
    NgramHash hash(c, seed, folded);
    CHECK(look_up(hash, bytes.encode("The Cat")) == look_up(hash, bytes.encode("tHE cAT")));
    CHECK(look_up(hash, bytes.encode("The Cat")) != look_up(hash, bytes.encode("The Cot")));
    CHECK(look_up(hash, bytes.encode("a a")) != look_up(hash, bytes.encode("a_a")));
}

TEST_CASE("ngrams: tokens that differ by a space before them are one") {
    Tokenizer tokenizer = Tokenizer::load("test/golden/tokenizers/gpt2.json");
    int size = tokenizer.vocab_size(), padded = size + 5;
    std::vector<uint64_t> folded = folded_tokens(&tokenizer, padded);
    auto of = [&](const char* word) {
        Tokens tokens = tokenizer.encode(word);
        REQUIRE(tokens.size() == 1);
        return folded[(size_t)tokens[0]];
    };
    CHECK(of("The") == of(" the"));
    CHECK(of("A") == of(" a"));
    CHECK(of("A") != of("b"));
    CHECK(of(" ") != of(" a"));
    for (int token = 0; token < padded; token++) {  // the first of its kind, which stands for itself
        uint64_t first = folded[(size_t)token];
        CHECK((first <= (uint64_t)token && folded[first] == first));
        if (token >= size) CHECK(first == (uint64_t)token);
    }
}

TEST_CASE("ngrams: what is no n-gram memory is refused") {
    struct Row {
        const char *ngram, *layers;
        int width;
        long long rows;
        const char *thing, *reason;
    };
    const Row table[] = {
        {"3,2", "", 64, 1000, "--ngram 3,2", "not ascending numbers from 1 to 8"},
        {"2,2", "", 64, 1000, "--ngram 2,2", "not ascending numbers from 1 to 8"},
        {"9", "", 64, 1000, "--ngram 9", "not ascending numbers from 1 to 8"},
        {"0", "", 64, 1000, "--ngram 0", "not ascending numbers from 1 to 8"},
        {"2,,3", "", 64, 1000, "--ngram 2,,3", "not ascending numbers from 1 to 8"},
        {"2,", "", 64, 1000, "--ngram 2,", "not ascending numbers from 1 to 8"},
        {"2, 3", "", 64, 1000, "--ngram 2, 3", "not ascending numbers from 1 to 8"},
        {"a\nb", "", 64, 1000, "--ngram a\\u000ab", "not ascending numbers from 1 to 8"},
        {"", "1", 64, 1000, "--ngram-layers 1", "there are no n-grams to look up there"},
        {"2,3", "1,12", 64, 1000, "--ngram-layers 1,12", "not ascending numbers from 0 to 11"},
        {"2,3", "-1", 64, 1000, "--ngram-layers -1", "not ascending numbers from 0 to 11"},
        {"2,3", "1", 12, 1000, "--ngram-width 12", "not a multiple of 8; give 16"},
        {"2,3", "1", 64, 30, "--ngram-rows 30", "too few for 8 heads, each with a prime number of rows"},
        {"2,3", "1", 64, 1, "--ngram-rows 1", "too few for 8 heads, each with a prime number of rows"},
    };
    for (const Row& row : table) {
        ModelConfig c;
        c.ngram = row.ngram, c.ngram_layers = row.layers, c.ngram_width = row.width, c.ngram_rows = row.rows;
        check_error(error_of([&] { complete(c); }), row.thing, row.reason);
    }
    ModelConfig c = model_with_ngrams();  // the second layer has a table if no layer is named
    CHECK(c.ngram_layers == "1");
    CHECK((!has_table(c, 0) && has_table(c, 1) && !has_table(c, 2)));
    ModelConfig one;
    one.layers = 1, one.ngram = "2";
    complete(one);
    CHECK(has_table(one, 0));
}
