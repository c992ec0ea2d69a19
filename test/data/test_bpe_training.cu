// Learning a vocabulary: the words of a text and their counts, and the merges that follow from them.
#include "test/support/file_testing.h"

#include <map>
#include <mutex>
#include <set>

#include "data/tokenizer/bpe_training.h"
#include "data/base/json.h"
#include "kernels/random.cuh"

using Words = std::map<std::string, uint64_t>;

static Words as_map(const WordCounts& counts) {
    Words words;
    for (const WordCounts::Entry& entry : counts.entries()) {
        CHECK(words.emplace(counts.text_of(entry), entry.count).second);
    }
    return words;
}

static WordCounts as_counts(const Words& words) {
    WordCounts counts;
    for (const auto& [word, count] : words) counts.add(word, count);
    return counts;
}

static TrainedBpe train(const Words& words, int vocab_size, uint64_t min_count = 1) {
    BpeTrainingOptions options;
    options.vocab_size = vocab_size;
    options.min_count = min_count;
    return train_bpe(as_counts(words), options);
}

// Random numbers below `bound`.
struct Draws {
    uint64_t key, at = 0;
    size_t operator()(size_t bound) { return philox(key, at++).at[0] % bound; }
};

// ----------------------------------------------------------------------------
// merges

// By definition: count all pairs, merge the best, repeat.
static TrainedBpe train_naively(const Words& words, int vocab_size, uint64_t min_count) {
    TrainedBpe result;
    std::map<unsigned char, int> id_of;
    for (unsigned char byte : bytes_by_id()) {
        id_of[byte] = (int)result.tokens.size();
        result.tokens.emplace_back(1, (char)byte);
    }
    std::vector<std::pair<std::vector<int>, uint64_t>> sequences;
    for (const auto& [word, count] : words) {
        auto& [ids, weight] = sequences.emplace_back();
        for (unsigned char byte : word) ids.push_back(id_of[byte]);
        weight = count;
    }
    while ((int)result.tokens.size() < vocab_size) {
        std::map<std::pair<int, int>, uint64_t> pairs;
        for (const auto& [ids, weight] : sequences) {
            for (size_t i = 0; i + 1 < ids.size(); i++) pairs[{ids[i], ids[i + 1]}] += weight;
        }
        std::pair<int, int> best;
        uint64_t most = 0;  // a map is sorted, so the first of equals has the smallest ids
        for (const auto& [pair, count] : pairs) {
            if (count > most) best = pair, most = count;
        }
        if (most < std::max<uint64_t>(1, min_count)) break;
        int made = (int)result.tokens.size();
        result.merges.push_back(best);
        result.tokens.push_back(result.tokens[(size_t)best.first] + result.tokens[(size_t)best.second]);
        for (auto& [ids, weight] : sequences) {
            std::vector<int> merged;
            for (size_t i = 0; i < ids.size(); i++) {
                bool here = i + 1 < ids.size() && ids[i] == best.first && ids[i + 1] == best.second;
                merged.push_back(here ? made : ids[i]);
                i += here;
            }
            ids = merged;
        }
    }
    return result;
}

TEST_CASE("bpe training: the same as by the definition") {
    Draws draw{random_key(1, "words")};
    size_t merges = 0;
    for (int round = 0; round < 150; round++) {
        CAPTURE(round);
        size_t letters = 1 + draw(round % 3 == 0 ? 256 : 4), longest = 1 + draw(25);
        Words words;
        for (size_t i = 0; i < 60; i++) {
            std::string word(1 + draw(longest), '\0');
            // pairs overlap in runs of one letter
            for (size_t c = 0; c < word.size(); c++)
                word[c] = c > 0 && draw(3) == 0 ? word[c - 1] : (char)('a' + draw(letters));
            words[word] += 1 + draw(5);
        }
        int vocab_size = 256 + (int)draw(200);
        uint64_t min_count = draw(4);
        TrainedBpe ours = train(words, vocab_size, min_count),
                   reference = train_naively(words, vocab_size, min_count);
        REQUIRE(ours.merges == reference.merges);
        REQUIRE(ours.tokens == reference.tokens);
        merges += ours.merges.size();
    }
    CHECK(merges > 5000);
}

static std::string from_hexadecimal(const std::string& digits) {
    std::string bytes;
    for (size_t i = 0; i < digits.size(); i += 2) bytes += (char)std::stoi(digits.substr(i, 2), nullptr, 16);
    return bytes;
}

// Made by test/golden/make_bpe_training.py.
TEST_CASE("bpe training: the same as the BpeTrainer of Hugging Face tokenizers") {
    std::ifstream file("test/golden/bpe_training.json", std::ios::binary);
    std::string source(std::istreambuf_iterator<char>(file), {});
    REQUIRE(!source.empty());
    int cases = 0;
    nlohmann::json all = parse_json(source, "bpe_training.json");
    for (const auto& [name, golden] : all.items()) {
        CAPTURE(name);
        Words words;
        for (const auto& word : golden["words"]) words[from_hexadecimal(word[0])] = word[1];
        TrainedBpe ours = train(words, golden["vocab_size"], golden["min_frequency"]);
        std::vector<std::string> tokens;
        for (const auto& token : golden["tokens"]) tokens.push_back(from_hexadecimal(token));
        CHECK(ours.tokens == tokens);
        CHECK(ours.merges == golden["merges"].get<std::vector<std::pair<int, int>>>());
        cases++;
    }
    CHECK(cases == 5);
}

TEST_CASE("bpe training: tokens are what the merges make, each once") {
    Words words = {{"banana", 10}, {"bandana", 7}, {"\xff\xfe\0\xff\xfe\0", 3}, {"a", 1000}};
    TrainedBpe trained = train(words, 100000);
    REQUIRE(trained.tokens.size() == 256 + trained.merges.size());
    for (size_t i = 0; i < trained.merges.size(); i++) {
        auto [left, right] = trained.merges[i];
        REQUIRE((left >= 0 && left < 256 + (int)i && right >= 0 && right < 256 + (int)i));
        CHECK(trained.tokens[256 + i] == trained.tokens[(size_t)left] + trained.tokens[(size_t)right]);
    }
    CHECK(std::set<std::string>(trained.tokens.begin(), trained.tokens.end()).size() ==
          trained.tokens.size());
    CHECK(std::count(trained.tokens.begin(), trained.tokens.end(), "bandana") == 1);
    // the ids of GPT-2
    CHECK(trained.tokens[0] == "!");
    CHECK(trained.tokens[93] == "~");
    CHECK(trained.tokens[94] == "\xa1");
    CHECK(trained.tokens[187] == "\xff");
    CHECK(trained.tokens[188] == std::string(1, '\0'));
    CHECK(trained.tokens[220] == " ");
    CHECK(trained.tokens[255] == "\xad");
}

TEST_CASE("bpe training: sizes") {
    Words words = {{"abc", 2}, {"xy", 1}};
    CHECK(train(words, 256).merges.empty());
    CHECK(train(words, 257).tokens.size() == 257);
    CHECK(train(words, 1000).tokens.size() == 259);
    CHECK(train(words, 1000, 2).tokens.size() == 258);
    CHECK(train({}, 1000).tokens.size() == 256);
    CHECK_REFUSED(train(words, 255), "vocabulary of 255");
    CHECK_REFUSED(train(words, -1), "vocabulary of -1");
    BpeTrainingOptions options;
    std::vector<int> sizes;
    options.progress = [&](int tokens) { sizes.push_back(tokens); };
    train_bpe(as_counts(words), options);
    CHECK(sizes == std::vector<int>{257, 258});
    // counts beyond 32 bits
    TrainedBpe large = train({{"ab", 1ull << 40}, {"cd", (1ull << 40) + 1}, {"ef", 7}}, 258);
    CHECK(large.tokens[256] == "cd");
    CHECK(large.tokens[257] == "ab");
}

TEST_CASE("bpe training: a word as long as a file") {
    std::string run(3 << 20, 'a'), alternating, random;
    Draws draw{random_key(1, "long word")};
    for (int i = 0; i < 1 << 20; i++) alternating += i % 2 ? 'b' : 'a';
    for (int i = 0; i < 1 << 20; i++) random += (char)draw(256);
    TrainedBpe trained = train({{run, 1}, {alternating, 1}, {random, 1}}, 2000);
    CHECK(trained.tokens.size() == 2000);
    CHECK(trained.tokens[256] == "aa");
    CHECK(trained.tokens[257] == "aaaa");
}

// ----------------------------------------------------------------------------
// words

TEST_CASE("words: a table of counts") {
    WordCounts counts;
    Words reference;
    Draws draw{random_key(1, "table")};
    for (int i = 0; i < 100000; i++) {
        std::string word(draw(5), '\0');
        for (char& c : word) c = (char)draw(10);
        uint64_t count = 1 + draw(3);
        counts.add(word, count);
        if (!word.empty()) reference[word] += count;
    }
    CHECK(reference.size() > 8000);
    CHECK(as_map(counts) == reference);
    // among this many words, some have the same 32-bit hash
    WordCounts numbers;
    for (int i = 0; i < 400000; i++) numbers.add(std::to_string(i));
    CHECK(numbers.size() == 400000);

    WordCounts sum = as_counts({{"x", 5}, {std::string(1, '\0'), 1}});
    sum.add(counts);
    reference["x"] += 5, reference[std::string(1, '\0')] += 1;
    CHECK(as_map(sum) == reference);
}

// The patterns of GPT-2 and GPT-4o, without their finer points, as a small state machine. Cuts are hard
// because white space leaves its last character to what follows, and because in GPT-4o letters take one
// character before them, punctuation takes line feeds and slashes after it, and white space extends to its
// last line feed.
template <bool gpt2>
static void split_like(std::string_view text, const std::function<void(std::string_view)>& word) {
    struct Character {
        char kind;
        const char* begin;
    };
    std::vector<Character> at;
    const char *next = text.data(), *stop = next + text.size();
    while (next < stop) {
        const char* begin = next;
        int32_t code = next_code_point(next, stop);
        char kind = '.';
        if (code == '\n' || code == '\r')
            kind = 'n';
        else if (code != invalid_byte && is_white_space(code))
            kind = ' ';
        else if (code >= '0' && code <= '9')
            kind = '0';
        else if (is_letter_or_number(code))
            kind = 'a';
        at.push_back({kind, begin});
    }
    at.push_back({'$', stop});
    auto is_space = [&](size_t i) { return at[i].kind == 'n' || at[i].kind == ' '; };
    for (size_t i = 0, end = 0; at[i].kind != '$'; i = end) {
        bool one_space = *at[i].begin == ' ';
        bool may_lead = one_space || (!gpt2 && (at[i].kind == ' ' || at[i].kind == '.'));
        if (at[i].kind == 'a' || (may_lead && at[i + 1].kind == 'a')) {
            for (end++; at[end].kind == 'a';) end++;
        } else if (at[i].kind == '0') {
            while (end < i + 3 && at[end].kind == '0') end++;
        } else if (at[i].kind == '.' || (one_space && at[i + 1].kind == '.')) {
            for (end++; at[end].kind == '.';) end++;
            while (!gpt2 && (at[end].kind == 'n' || (at[end].kind == '.' && *at[end].begin == '/'))) end++;
        } else {
            while (is_space(end)) end++;
            size_t feed = end;
            while (feed > i && (gpt2 || at[feed - 1].kind != 'n')) feed--;
            if (feed > i)
                end = feed;
            else if (at[end].kind != '$' && end > i + 1)
                end--;
        }
        word({at[i].begin, (size_t)(at[end].begin - at[i].begin)});
    }
}

static std::string hard_text(size_t characters, uint64_t seed) {
    const char* parts[] = {"a",    "bc", " ", " ",        "\n",     "\n",  "\r\n",   "\t",
                           ".",    ";",  "/", "'",        "7",      "é",   "\u3000", "\u00a0",
                           "你好", "。", "Ж", "\xf0\x9f", "\u0301", "\xff"};
    std::string text;
    Draws draw{random_key(seed, "text")};
    for (size_t i = 0; i < characters; i++) text += parts[draw(std::size(parts))];
    return text;
}

static Words count_words(const SplitIntoWords& split, const std::string& text, unsigned threads, size_t chunk,
                         size_t longest_piece) {
    WordCounter counter(split, threads, chunk);
    Draws draw{random_key(text.size(), "pieces")};
    for (size_t at = 0; at < text.size();) {
        size_t size = 1 + draw(longest_piece);
        counter.add(std::string_view(text).substr(at, size));
        at += size;
    }
    return as_map(counter.finish());
}

TEST_CASE("words: the same for any number of threads and any cutting of the text") {
    for (uint64_t seed = 0; seed < 8; seed++) {
        std::string text = hard_text(20000, seed);
        SplitIntoWords split = seed % 2 ? split_like<true> : split_like<false>;
        Words reference;
        uint64_t bytes = 0;
        split(text, [&](std::string_view word) {
            reference[std::string(word)]++;
            bytes += word.size();
        });
        REQUIRE(bytes == text.size());
        REQUIRE(reference.size() > 500);
        for (unsigned threads : {1, 2, 5}) {
            for (size_t chunk : {8, 100, 5000}) {
                for (size_t piece : {1, 30, 100000}) {
                    CAPTURE(threads);
                    CAPTURE(chunk);
                    CAPTURE(piece);
                    CHECK(count_words(split, text, threads, chunk, piece) == reference);
                }
            }
        }
    }
}

TEST_CASE("words: chunks are small where the text allows it") {
    struct Chunks {
        size_t largest, count;
    };
    auto chunks_of = [](const std::string& text) {
        std::mutex mutex;
        Chunks chunks = {0, 0};
        auto split = [&](std::string_view chunk, const std::function<void(std::string_view)>&) {
            std::lock_guard lock(mutex);
            chunks = {std::max(chunks.largest, chunk.size()), chunks.count + 1};
        };
        WordCounter counter(split, 2, 1000);
        for (size_t at = 0; at < text.size(); at += 100) counter.add(text.substr(at, 100));
        counter.finish();
        return chunks;
    };
    auto repeated = [](const std::string& line) {
        std::string text;
        while (text.size() < 100000) text += line;
        return text;
    };
    for (const char* line : {"plain words, on one line ", "道可道。\n", "كان هناك ملك ", "line;\nother;\n",
                             "Windows line\r\n\r\n"}) {
        CAPTURE(line);
        Chunks chunks = chunks_of(repeated(line));
        CHECK(chunks.largest < 2000);
        CHECK(chunks.count < 150);
    }
    std::string spaces(100000, ' ');  // there is nowhere to cut
    CHECK(chunks_of(spaces).largest == 100000);
    CHECK(chunks_of(spaces.substr(0, 5000) + repeated("word ")).largest < 12000);
    spaces[999] = '1';  // the only place is at the end of the first part that is searched
    CHECK(chunks_of(spaces).largest == 99000);
}

TEST_CASE("words: documents are apart") {
    WordCounter counter([](std::string_view text, auto&& word) { word(text); }, 3);
    for (const char* document : {"one", "two", "", "one"}) {
        counter.add(document);
        counter.end_document();
    }
    counter.add("on"), counter.add("e");
    CHECK(as_map(counter.finish()) == Words{{"one", 3}, {"two", 1}});
}

TEST_CASE("words: what a thread throws is thrown to the caller") {
    auto split = [](std::string_view text, const std::function<void(std::string_view)>&) {
        if (text.find('!') != std::string_view::npos) fail("the text: has a '!'; take it out");
    };
    for (unsigned threads : {1, 4}) {
        CHECK_REFUSED(
            {
                WordCounter counter(split, threads, 10);
                counter.add("one two three!");
                counter.finish();
            },
            "has a '!'");
        CHECK_REFUSED(
            {
                WordCounter counter(split, threads, 10);
                for (;;) counter.add("and another! ");
            },
            "has a '!'");
        WordCounter counter(split, threads, 10);  // not finished
        for (int i = 0; i < 1000; i++) counter.add("more text ");
    }
}
