// The tokenizers behind one interface: how they are named, long texts cut without changing their tokens,
// tokens that become text one by one, and texts that end a sample.
#include <fstream>

#include <nlohmann/json.hpp>

#include "data/commands/generation.h"
#include "data/tokenizer/tokenizer.h"
#include "kernels/random.cuh"
#include "test/support/file_testing.h"

static const std::string golden = "test/golden/tokenizers/";
static const std::vector<std::string> names = {"gpt2",     "llama3", "qwen",   "claude",
                                               "deepseek", "gpt4o",  "llama2", "metaspace"};

static std::vector<std::string> sample_texts() {
    std::ifstream file(golden + "ids.json", std::ios::binary);
    const nlohmann::json ids = nlohmann::json::parse(file);
    std::vector<std::string> texts;
    for (const auto& [title, text] : ids["texts"].items()) texts.push_back(text);
    std::string bytes(3000, '\0');
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = (char)philox(9, i).at[0];
    texts.push_back(bytes);
    std::string words;
    for (int i = 0; i < 2000; i++) {
        Random4 random = philox(10, (uint64_t)i);
        constexpr const char* pieces[] = {"the", " ", " a", "'s",     "  ",      "\n",
                                          "42",  ".", " x", "\u00e9", " \u00e9", "Zz"};
        words += pieces[random.at[0] % std::size(pieces)];
    }
    texts.push_back(words);
    return texts;
}

TEST_CASE("tokenizer: bytes") {
    Tokenizer tokenizer = Tokenizer::load("bytes");
    std::string bytes;
    for (int i = 0; i < 256; i++) bytes += (char)i;
    std::vector<int> tokens = tokenizer.encode(bytes);
    CHECK(tokens.size() == 256);
    CHECK(tokens[0xc3] == 0xc3);
    CHECK(tokenizer.decode(tokens) == bytes);
    CHECK(tokenizer.decode({72, 105, 256}) == "Hi<|endoftext|>");
    CHECK(tokenizer.encode("<|endoftext|>").size() == 13);  // text cannot end a document
    CHECK(tokenizer.vocab_size() == 257);
    CHECK(tokenizer.end_of_text() == 256);
    CHECK(tokenizer.has(256));
    CHECK_FALSE(tokenizer.has(257));
    CHECK_FALSE(tokenizer.has(-1));
    CHECK(tokenizer.cut_place("any bytes") == 9);
    CHECK(tokenizer.file().empty());
    check_error(error_of([&] { tokenizer.token_bytes(257); }), "token 257", "not in the vocabulary");
    check_error(error_of([&] { tokenizer.token_bytes(-1); }), "token -1", "not in the vocabulary");
}

TEST_CASE("tokenizer: files by name, folder or encoding; others are refused") {
    TemporaryFolder folder;
    fs::copy(golden + "llama3.json", folder / "tokenizer.json");
    Tokenizer by_folder = Tokenizer::load(folder.path), by_name = Tokenizer::load(folder / "tokenizer.json");
    CHECK(by_folder.encode("some text") == by_name.encode("some text"));
    CHECK(by_name.decode({by_name.end_of_text()}) == "<|endoftext|>");
    CHECK(Tokenizer::load(golden + "llama2.json")
              .decode({Tokenizer::load(golden + "llama2.json").end_of_text()}) == "</s>");
    CHECK(Tokenizer::load(golden + "gpt4o.json").end_of_text() == -1);

    // ranks of the 256 bytes, and one merge
    std::string ranks;
    constexpr const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (int byte = 0; byte < 256; byte++)
        ranks +=
            std::string() + digits[byte >> 2] + digits[(byte & 3) << 4] + "== " + std::to_string(byte) + "\n";
    ranks += "YWI= 256\n";  // "ab"
    write_file(folder / "gpt2.tiktoken", ranks);
    write_file(folder / "other", ranks);
    CHECK(Tokenizer::load(folder / "gpt2.tiktoken").encode("abc") == std::vector<int>{256, 'c'});
    Tokenizer other = Tokenizer::load("cl100k_base:" + (folder / "other"));
    CHECK(other.encode("abc") == std::vector<int>{256, 'c'});
    CHECK(other.end_of_text() == 100257);
    CHECK_FALSE(other.has(300));
    CHECK(other.file() == folder / "other");

    // a loaded tokenizer can be written as a tokenizer.json
    other.write(folder / "again.json");
    CHECK(Tokenizer::load(folder / "again.json").encode("abcab x") == other.encode("abcab x"));

    check_error(error_of([&] { Tokenizer::load(folder / "other"); }), "--tokenizer " + (folder / "other"),
                "not a tokenizer");
    check_error(error_of([&] { Tokenizer::load("cl100k_base"); }), "--tokenizer cl100k_base",
                "cl100k_base:FILE");
    check_error(error_of([&] { Tokenizer::load("byte"); }), "--tokenizer byte", "not a tokenizer");
    check_error(error_of([&] { Tokenizer::load(folder / "none.json"); }), folder / "none.json",
                "cannot open it");
    check_error(error_of([&] { Tokenizer::load("gpt2:" + (folder / "none")); }), folder / "none",
                "cannot open it");
}

TEST_CASE("tokenizer: a file without normalizer and pre-tokenizer") {
    TemporaryFolder folder;
    std::ifstream file(golden + "llama2.json", std::ios::binary);
    nlohmann::json parts = nlohmann::json::parse(file);
    parts["normalizer"] = parts["pre_tokenizer"] = nullptr;
    write_file(folder / "plain.json", parts.dump());
    Tokenizer tokenizer = Tokenizer::load(folder / "plain.json");
    CHECK(tokenizer.cut_place("some words, and more of them") == 0);
    CHECK(tokenizer.decode(tokenizer.encode("some words")) == "some words");
}

TEST_CASE("tokenizer: cutting a long text changes no token") {
    int cuts = 0;
    for (const std::string& name : names) {
        CAPTURE(name);
        Tokenizer tokenizer = Tokenizer::load(golden + name + ".json");
        for (const std::string& text : sample_texts()) {
            std::vector<int> whole = tokenizer.encode(text);
            for (size_t part = 5; part < text.size(); part += 1 + part / 9) {
                size_t cut = tokenizer.cut_place(std::string_view(text).substr(0, part));
                REQUIRE(cut <= part);
                if (cut == 0) continue;
                std::vector<int> tokens = tokenizer.encode(text.substr(0, cut)),
                                 rest = tokenizer.encode(text.substr(cut));
                tokens.insert(tokens.end(), rest.begin(), rest.end());
                CHECK(tokens == whole);
                cuts++;
            }
        }
    }
    CHECK(cuts > 200);
    for (const char* name : {"gpt2", "llama3", "gpt4o"}) {
        CAPTURE(name);
        Tokenizer tokenizer = Tokenizer::load(golden + name + ".json");
        CHECK(tokenizer.cut_place("a word, and  more") == 11);
        CHECK(tokenizer.cut_place("a word") == 1);
        CHECK(tokenizer.cut_place("word . ,") == 4);
        CHECK(tokenizer.cut_place("") == 0);
    }
    // To this tokenizer, the whole text is one word.
    CHECK(Tokenizer::load(golden + "llama2.json").cut_place("a word and more") == 0);
}

TEST_CASE("tokens one by one are the text, and no character is shown in halves") {
    std::vector<std::string> all = names;
    all.push_back("");
    for (const std::string& name : all) {
        CAPTURE(name);
        Tokenizer tokenizer = name.empty() ? Tokenizer() : Tokenizer::load(golden + name + ".json");
        for (const std::string& text : sample_texts()) {
            std::vector<int> tokens = tokenizer.encode(text);
            TextDecoder decoder(&tokenizer, true);
            std::string shown;
            for (int token : tokens) {
                std::string piece = decoder.add(token);
                if (is_utf8(text)) CHECK(is_utf8(piece));
                shown += piece;
            }
            shown += decoder.finish();
            CHECK(shown == tokenizer.decode(tokens));
            CHECK(decoder.finish().empty());
        }
    }
    Tokenizer bytes;
    TextDecoder decoder(&bytes, true);
    CHECK(decoder.add(0xe2) == "");
    CHECK(decoder.add(0x82) == "");
    CHECK(decoder.add(0xac) == "\u20ac");
    CHECK(decoder.add(0xf0) == "");
    CHECK(decoder.add('a') == "\xf0"
                              "a");  // 0xf0 did not begin a character
    CHECK(decoder.add(0x80) == "\x80");
    CHECK(decoder.add(0xc3) == "");
    CHECK(decoder.finish() == "\xc3");
    CHECK(decoder.add(300) == "<|300|>");  // a model may have more tokens than the tokenizer
    TextDecoder numbers(nullptr, true);
    CHECK(numbers.add(7) + numbers.add(1234) == "7 1234 ");
    // A continuation keeps the leading space that a whole text would lose.
    Tokenizer llama2 = Tokenizer::load(golden + "llama2.json");
    int first = llama2.encode("the")[0];
    CHECK(TextDecoder(&llama2, true).add(first) == "the");
    CHECK(TextDecoder(&llama2, false).add(first) == " the");
}

TEST_CASE("a text ends where a stop text begins, however it arrives") {
    auto shown = [](const std::string& text, std::vector<std::string> stops, size_t piece,
                    bool* stopped = nullptr) {
        StopText stop(stops);
        std::string result;
        for (size_t at = 0; at < text.size(); at += piece) {
            result += stop.add(text.substr(at, piece));
            if (stop.stopped()) break;
        }
        result += stop.finish();
        if (stopped) *stopped = stop.stopped();
        return result;
    };
    for (size_t piece : {1, 2, 3, 50}) {
        CAPTURE(piece);
        bool stopped;
        CHECK(shown("one two END three", {"END"}, piece, &stopped) == "one two ");
        CHECK(stopped);
        CHECK(shown("one two EN", {"END"}, piece, &stopped) == "one two EN");
        CHECK_FALSE(stopped);
        CHECK(shown("aaab", {"aab"}, piece) == "a");
        CHECK(shown("aaab", {"ab", "aa"}, piece) == "");
        CHECK(shown("text", {}, piece) == "text");
        CHECK(shown("\n\nx\n\n\ny", {"\n\n\n"}, piece) == "\n\nx");
    }
    StopText stop({"END"});
    CHECK(stop.add("xE") == "x");  // nothing of a stop text is shown before it is ruled out
    CHECK(stop.add("N") == "");
    CHECK(stop.add("e") == "ENe");
}
