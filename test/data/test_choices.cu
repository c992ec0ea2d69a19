// Multiple-choice questions: both kinds of files, every way in which they can be wrong, the rows of a batch,
// and the score.
#include "test/support/file_testing.h"

#include "data/commands/multiple_choice.h"

using Choices = std::vector<std::vector<int>>;

static std::vector<int> bytes_of(std::string_view text) {
    return {(const uint8_t*)text.data(), (const uint8_t*)text.data() + text.size()};
}

// ----------------------------------------------------------------------------
// JSON lines

TEST_CASE("choices: JSON lines") {
    TemporaryFolder folder;
    std::string path = folder / "a.jsonl";
    write_file(path,
               R"({"context": "The sky is", "choices": ["blue.", " red.", "\n", "　x"], "answer": 2})"
               "\r\n\n   \n"
               R"({"answer": 1, "id": [1, {}], "choices": ["a", "b"], "context": "\u00e9\u0000 "})"
               "\n"
               // the form of HellaSwag
               R"({"ind": 24, "ctx_a": "A man", "ctx": "A man is", "endings": ["up.", "a b"], "label": 0})"
               "\n"
               R"({"ctx": "A man is", "endings": ["up.", "a b"], "label": "1"})");
    Tokenizer bytes;
    std::vector<ChoiceExample> examples = read_choices(path, &bytes, 257);
    REQUIRE(examples.size() == 4);
    CHECK(examples[3].answer == 1);
    CHECK(examples[0].context == bytes_of("The sky is"));
    CHECK(examples[0].choices ==
          Choices{bytes_of(" blue."), bytes_of(" red."), bytes_of("\n"), bytes_of("\u3000x")});
    CHECK(examples[0].answer == 2);
    CHECK(examples[0].place == path + ":1");
    CHECK(examples[1].context == bytes_of(std::string_view("\u00e9\0 ", 4)));
    CHECK(examples[1].choices == Choices{bytes_of(" a"), bytes_of(" b")});
    CHECK(examples[1].answer == 1);
    CHECK(examples[1].place == path + ":4");
    CHECK(examples[2].context == bytes_of("A man is"));
    CHECK(examples[2].choices == Choices{bytes_of(" up."), bytes_of(" a b")});
    CHECK(examples[2].answer == 0);
}

TEST_CASE("choices: with a vocabulary, and without a token that ends a text") {
    TemporaryFolder folder;
    std::string path = folder / "a.jsonl";
    write_file(path, R"({"context": "", "choices": ["the end", " of"], "answer": 0})");
    Tokenizer bytes, gpt2 = Tokenizer::load("test/golden/tokenizers/gpt2.json");
    CHECK(read_choices(path, &bytes, 257)[0].context == std::vector<int>{256});
    ChoiceExample example = read_choices(path, &gpt2, gpt2.vocab_size())[0];
    CHECK(example.context == std::vector<int>{gpt2.end_of_text()});
    CHECK(example.choices == Choices{gpt2.encode(" the end"), gpt2.encode(" of")});
    CHECK(gpt2.encode(" the end") != gpt2.encode("the end"));

    // A tokenizer that adds the space itself gets no second one.
    Tokenizer llama2 = Tokenizer::load("test/golden/tokenizers/llama2.json");
    REQUIRE(llama2.dropped_spaces() > 0);
    example = read_choices(path, &llama2, llama2.vocab_size())[0];
    CHECK(example.choices == Choices{llama2.encode("the end"), llama2.encode("of")});
    CHECK(llama2.encode(" of") != llama2.encode("of"));

    // The encoder decides, not the decoder, which strips a space here, too.
    nlohmann::json never = nlohmann::json::parse(contents("test/golden/tokenizers/metaspace.json"));
    never["pre_tokenizer"]["prepend_scheme"] = "never";
    never["pre_tokenizer"].erase("add_prefix_space");
    write_file(folder / "never.json", never.dump());
    Tokenizer metaspace = Tokenizer::load("test/golden/tokenizers/metaspace.json"),
              spaceless = Tokenizer::load(folder / "never.json");
    REQUIRE(spaceless.dropped_spaces() > 0);
    CHECK(metaspace.adds_space());
    CHECK(!spaceless.adds_space());
    example = read_choices(path, &spaceless, spaceless.vocab_size())[0];
    CHECK(example.choices == Choices{spaceless.encode(" the end"), spaceless.encode(" of")});
    CHECK(spaceless.encode(" of") != spaceless.encode("of"));

    std::ifstream file("test/golden/tokenizers/gpt2.json");
    nlohmann::json parts = nlohmann::json::parse(file);
    parts["added_tokens"] = nlohmann::json::array();
    parts["post_processor"] = nullptr;
    write_file(folder / "tokenizer.json", parts.dump());
    Tokenizer endless = Tokenizer::load(folder.path);
    REQUIRE(endless.end_of_text() == -1);
    CHECK_REFUSED(read_choices(path, &endless, 10000), path + ":1: the context is empty");

    check_error(error_of([&] { read_choices(path, &bytes, 256); }), path + ":1",
                "token 256 is outside the vocabulary of 256");
    check_error(error_of([&] { read_choices(path, &bytes, 116); }), path + ":1", "outside the vocabulary");
    check_error(error_of([&] { read_choices(path, nullptr, 257); }), path, "need a tokenizer");
}

TEST_CASE("choices: JSON lines that are refused") {
    TemporaryFolder folder;
    std::string path = folder / "a.jsonl", good = R"({"context": "c", "choices": ["a", "b"], "answer": 0})";
    Tokenizer bytes;
    std::pair<std::string, std::string> cases[] = {
        {"{", "not valid JSON at byte"},
        {"\xff", "not valid JSON at byte"},
        {good + good, "not valid JSON at byte"},
        {R"({"context": "\ud800", "choices": ["a", "b"], "answer": 0})", "not valid JSON at byte"},
        {"[]", "is an array; each line must be an object"},
        {std::string(100, '['), "nested more than"},
        {R"({"choices": ["a", "b"], "answer": 0})", "context is missing"},
        {R"({"context": 3, "choices": ["a", "b"], "answer": 0})", "context is 3; it must be a string"},
        {R"({"context": "c", "answer": 0})", "choices is missing"},
        {R"({"context": "c", "choices": "ab", "answer": 0})", "choices is \"ab\"; it must be an array"},
        {R"({"context": "c", "choices": [], "answer": 0})", "choices has length 0"},
        {R"({"context": "c", "choices": ["a"], "answer": 0})", "choices has length 1"},
        {R"({"context": "c", "choices": ["a", 7], "answer": 0})", "choices[1] is 7; it must be a string"},
        {R"({"context": "c", "choices": ["a", ""], "answer": 0})", "choices[1] is empty"},
        {R"({"context": "c", "choices": ["a", "b"]})", "answer is missing"},
        {R"({"context": "c", "choices": ["a", "b"], "answer": 2})", "whole number from 0 to 1"},
        {R"({"context": "c", "choices": ["a", "b"], "answer": -1})", "whole number from 0 to 1"},
        {R"({"context": "c", "choices": ["a", "b"], "answer": 0.5})", "whole number from 0 to 1"},
        {R"({"context": "c", "choices": ["a", "b"], "answer": 18446744073709551616})", "whole number"},
        {R"({"context": "c", "choices": ["a", "b"], "answer": "a"})", "whole number from 0 to 1"},
        {R"({"ctx": "c", "endings": ["a", "b"], "label": ""})", "label is \"\""},
        {R"({"ctx": "c", "endings": ["a", "b"], "label": "2"})",
         "label is 2; it must be a whole number from 0 to 1"},
        {R"({"ctx": "c", "endings": ["a", "b"], "label": "1.0"})", "label is \"1.0\"; it must be a whole"},
        {R"({"ctx": "c", "choices": ["a", "b"], "answer": 0})", "endings is missing"},
    };
    for (const auto& [line, reason] : cases) {
        CAPTURE(line);
        write_file(path, good + "\n\n" + line + "\n" + good);
        check_error(error_of([&] { read_choices(path, &bytes, 257); }), path + ":3", reason);
    }
    // A file that ends within a line.
    write_file(path, good + "\n" + good.substr(0, 30));
    check_error(error_of([&] { read_choices(path, &bytes, 257); }), path + ":2", "cut short");
    for (const char* empty : {"", "\n \r\n\t\n"}) {
        write_file(path, empty);
        check_error(error_of([&] { read_choices(path, &bytes, 257); }), path, "has no examples");
    }
    check_error(error_of([&] { read_choices(folder.path, &bytes, 257); }), folder.path, "is a folder");
}

// ----------------------------------------------------------------------------
// llm.c

// A file as llm.c writes it; fields that are not given follow from the rest.
struct ChoiceFile {
    int32_t magic = 20240522, version = 1, count = -1, longest = -1;
    std::vector<std::vector<uint16_t>> examples;
    std::string tail = "";

    std::string bytes() const {
        std::vector<int32_t> header(256);
        size_t most = 0;
        std::string stream;
        for (const auto& example : examples) {
            most = std::max(most, 2 * example.size());
            stream.append((const char*)example.data(), 2 * example.size());
        }
        header[0] = magic, header[1] = version;
        header[2] = count == -1 ? (int32_t)examples.size() : count;
        header[3] = longest == -1 ? (int32_t)most : longest;
        return std::string((const char*)header.data(), 1024) + stream + tail;
    }
};

// mark, bytes, index, answer, number of choices; context; choices
static const std::vector<uint16_t> first = {65535, 30, 0, 1, 2, 3, 10, 11, 12, 1, 20, 3, 30, 31, 32};
static const std::vector<uint16_t> second = {65535, 32, 1, 2, 3, 1, 50256, 2, 65534, 0, 1, 21, 3, 0, 0, 0};

TEST_CASE("choices: evaluation files of llm.c") {
    TemporaryFolder folder;
    std::string path = folder / "a.bin";
    ChoiceFile file = {.examples = {first, second}};
    write_file(path, file.bytes());
    Tokenizer bytes;
    for (const Tokenizer* tokenizer : {(const Tokenizer*)nullptr, (const Tokenizer*)&bytes}) {
        std::vector<ChoiceExample> examples = read_choices(path, tokenizer, 65536);
        REQUIRE(examples.size() == 2);
        CHECK(examples[0].context == std::vector<int>{10, 11, 12});
        CHECK(examples[0].choices == Choices{{20}, {30, 31, 32}});
        CHECK(examples[0].answer == 1);
        CHECK(examples[1].context == std::vector<int>{50256});
        CHECK(examples[1].choices == Choices{{65534, 0}, {21}, {0, 0, 0}});
        CHECK(examples[1].answer == 2);
        CHECK(examples[1].place == path + ": example 1");
    }
    CHECK_REFUSED(read_choices(path, nullptr, 65534), path + ": example 1: token 65534 is outside");
}

TEST_CASE("choices: evaluation files that are refused") {
    TemporaryFolder folder;
    std::string path = folder / "a.bin", damaged = "the file is damaged";
    auto check = [&](const ChoiceFile& file, const std::string& reason) {
        CAPTURE(reason);
        write_file(path, file.bytes());
        check_error(error_of([&] { read_choices(path, nullptr, 65536); }), path, reason);
    };
    // The header.
    check({.version = 2, .examples = {first}}, "has version 2");
    check({.count = 0, .examples = {first}}, "counts 0 examples");
    check({.count = -5, .examples = {first}}, "counts -5 examples");
    check({.count = 65537, .examples = {first}}, "counts 65537 examples");
    check({.count = INT32_MIN, .examples = {first}}, "counts -2147483648 examples");
    check({.longest = 0, .examples = {first}}, "longest example has 0 bytes");
    check({.longest = -2, .examples = {first}}, "longest example has -2 bytes");
    check({.longest = 65536, .examples = {first}}, "longest example has 65536 bytes");
    check({.longest = 34, .examples = {first, second}}, "has 34 bytes, but the longest has 32");
    check({.longest = 30, .examples = {first, second}}, "example 1 has 32 bytes, more than the longest");
    check({.count = 3, .examples = {first, second}}, "example 2 ends too early");
    check({.count = 1, .longest = 30, .examples = {first, second}}, "is too long: 32 bytes follow");
    check({.examples = {first, second}, .tail = "x"}, "is too long: 1 bytes follow the 2 examples");
    check({.magic = (int32_t)__builtin_bswap32(20240522), .examples = {first}}, "is not an evaluation file");

    // Each field of an example.
    auto broken = [&](size_t field, uint16_t value, const std::string& reason) {
        CAPTURE(field);
        ChoiceFile file = {.examples = {first, second}};
        file.examples[1][field] = value;
        check(file, "example 1 " + reason);
        CHECK(error_of([&] { read_choices(path, nullptr, 65536); }).find(damaged) != std::string::npos);
    };
    broken(0, 65534, "begins with 65534, not with 65535");
    for (uint16_t size : {31, 33, 34, 65535}) broken(1, size, text("has %d bytes by its own count", size));
    broken(1, 0, "ends too early");
    broken(1, 8, "ends too early");
    broken(1, 30, "claims 3 tokens in choice 2, but ends before that");
    broken(2, 0, "is numbered 0");
    broken(2, 2, "is numbered 2");
    broken(3, 3, "has answer 3, but its choices are numbered 0 to 2");
    broken(3, 65535, "has answer 65535");
    broken(4, 0, "has 0 choices");
    broken(4, 1, "has 1 choices");
    broken(4, 4, "ends too early");
    broken(5, 0, "has no tokens in the context");
    broken(5, 65535, "claims 65535 tokens in the context");
    broken(6, 65535, "has the mark 65535 among the tokens of the context");
    broken(7, 0, "has no tokens in choice 0");
    broken(7, 3, "claims 21 tokens in choice 1");
    broken(10, 0, "has no tokens in choice 1");
    broken(12, 2, "has 2 bytes after its last choice");
    broken(12, 4, "claims 4 tokens in choice 2");
    broken(15, 65535, "has the mark 65535 among the tokens of choice 2");

    // A file that is cut short anywhere is refused.
    std::string whole = ChoiceFile{.examples = {first, second}}.bytes();
    Tokenizer bytes;
    for (size_t size = 0; size < whole.size(); size++) {
        if (size > 40 && size < 1000) continue;
        CAPTURE(size);
        write_file(path, whole.substr(0, size));
        std::string error = error_of([&] { read_choices(path, &bytes, 65536); });
        CHECK(error.starts_with(path));
        CHECK(error.find("; ") != std::string::npos);
    }
}

// ----------------------------------------------------------------------------
// rows and scores

TEST_CASE("choices: the rows of a batch") {
    ChoiceExample example = {{1, 2, 3}, {{4, 5}, {6}}, 0, "a.jsonl:7"};
    auto rows = [&](size_t number, int T) {
        Choices result(2, std::vector<int>((size_t)T, -7));
        choice_row(example, number, T, result[0].data(), result[1].data());
        return result;
    };
    CHECK(rows(0, 6) == Choices{{1, 2, 3, 4, 5, 0}, {-1, -1, 4, 5, -1, -1}});
    CHECK(rows(1, 6) == Choices{{1, 2, 3, 6, 0, 0}, {-1, -1, 6, -1, -1, -1}});
    CHECK(rows(0, 5) == Choices{{1, 2, 3, 4, 5}, {-1, -1, 4, 5, -1}});
    // The last token is not needed as an input.
    CHECK(rows(0, 4) == Choices{{1, 2, 3, 4}, {-1, -1, 4, 5}});
    // The context loses its beginning, down to one token.
    CHECK(rows(0, 3) == Choices{{2, 3, 4}, {-1, 4, 5}});
    CHECK(rows(0, 2) == Choices{{3, 4}, {4, 5}});
    CHECK(rows(1, 1) == Choices{{3}, {6}});
    check_error(error_of([&] { rows(0, 1); }), "a.jsonl:7", "choice 0 has 2 tokens, but the model sees 1");
}

TEST_CASE("choices: the score") {
    ChoiceScore score;
    CHECK(score.accuracy() == 0);
    CHECK(score.accuracy_by_mean() == 0);
    CHECK(score.standard_error(0) == 0);
    // The sum favors the short choice, the mean the long one.
    ChoiceExample example = {{1}, {{1}, {1, 2}, {1, 2, 3, 4}}, 0, "a.jsonl:7"};
    score.add(example, {-2, -3.5, -4});
    CHECK((score.examples == 1 && score.right_by_sum == 1 && score.right_by_mean == 0));
    example.answer = 2;
    score.add(example, {-2, -3.5, -4});
    CHECK((score.examples == 2 && score.right_by_sum == 1 && score.right_by_mean == 1));
    // Neither favors the middle one.
    example.answer = 1;
    score.add(example, {-2, -3.5, -4});
    CHECK((score.examples == 3 && score.right_by_sum == 1 && score.right_by_mean == 1));
    CHECK(score.accuracy() == doctest::Approx(1.0 / 3));
    CHECK(score.accuracy_by_mean() == doctest::Approx(1.0 / 3));
    CHECK(score.standard_error(0.5) == doctest::Approx(std::sqrt(0.25 / 2)));

    // Among equals the first is chosen, by the sum and by the mean; choices of probability 0 do no harm.
    score = {};
    example.answer = 1;
    score.add(example, {-8, -6, -6});
    CHECK((score.right_by_sum == 1 && score.right_by_mean == 0));
    score.add(example, {-8, -4, -8});
    CHECK((score.right_by_sum == 2 && score.right_by_mean == 1));
    example.answer = 0;
    score.add(example, {-INFINITY, -INFINITY, -INFINITY});
    CHECK((score.right_by_sum == 3 && score.right_by_mean == 2));
    example.answer = 2;
    score.add(example, {-INFINITY, -INFINITY, -1e300});
    CHECK((score.right_by_sum == 4 && score.right_by_mean == 3));

    check_error(error_of([&] {
                    score.add(example, {-1, NAN, -1});
                }),
                "a.jsonl:7", "likelihood of choice 1 is not a number");
    check_error(error_of([&] { score.add(example, {-1, -1}); }), "a.jsonl:7", "3 choices and 2 scores");
    CHECK(score.examples == 4);
}
