// libFuzzer: whatever a tokenizer file holds, it is refused in one line, or its tokenizer decodes each text
// to itself. The first byte chooses what the rest is: a tokenizer.json as text, damage to a sound one, a
// pattern with a text to cut, a rank file, or a text for sound tokenizers.
#include <cstdlib>

#include "data/tokenizer/tiktoken.h"
#include "test/fuzz/fuzz_json.h"

static nlohmann::json vocabulary_of(bool byte_level) {
    nlohmann::json vocabulary;
    for (int byte = 0; byte < 256; byte++)
        vocabulary[byte_level ? to_byte_alphabet(std::string(1, (char)byte)) : text("<0x%02X>", byte)] = byte;
    int next = 256;
    std::vector<std::string> more = {"th", "the", "aa", "aaaa", "ab", "abc"};
    if (!byte_level) more.insert(more.begin(), {"t", "h", "e", "a", "b", "c", "\u2581", "\u2581th"});
    for (const std::string& token : more) vocabulary[token] = next++;
    return vocabulary;
}

static nlohmann::json sound(int kind) {
    nlohmann::json file = nlohmann::json::parse(R"({"version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 262, "content": "<s>", "special": true, "lstrip": false,
            "normalized": false}],
        "normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
        "post_processor": null, "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "merges": ["t h", ["th", "e"], ["a", "a"], ["aa", "aa"], ["a", "b"],
            ["ab", "c"]]}})");
    file["model"]["vocab"] = vocabulary_of(kind < 2);
    if (kind == 1) {
        file["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFKC"}}}}};
        file["pre_tokenizer"] = nlohmann::json::parse(R"({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "(?i:'s)|[^\\r\\n\\p{L}]?\\p{L}+|\\s+(?!\\S)|\\s+"},
                "behavior": "Removed",
             "invert": true}, {"type": "Digits", "individual_digits": false},
            {"type": "Split", "pattern": {"String": "ab"}, "behavior": "MergedWithNext"},
            {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})");
        file["post_processor"] =
            nlohmann::json::parse(R"({"type": "Sequence", "processors": [{"type": "ByteLevel"},
            {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}},
                {"Sequence": {"id": "A"}}],
             "special_tokens": {"<s>": {"id": "<s>", "ids": [262]}}}]})");
        file["model"]["ignore_merges"] = true;
        file["added_tokens"][0]["lstrip"] = true;
    }
    if (kind == 2) {
        file["pre_tokenizer"] = {
            {"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "first"}};
        file["normalizer"] = {{"type", "Prepend"}, {"prepend", "\u2581"}};
        file["decoder"] = nlohmann::json::parse(R"({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})");
        file["model"]["byte_fallback"] = true;
        file["added_tokens"][0]["id"] = 270;
    }
    return file;
}

static void check(const HfTokenizer& tokenizer, std::string_view text) {
    for (SpecialTokens special : {SpecialTokens::as_text, SpecialTokens::recognized}) {
        std::vector<int> tokens = tokenizer.encode(text, special);
        std::string decoded = tokenizer.decode(tokens);
        if (!tokenizer.changes_text() && decoded != text) abort();
    }
}

static void run(uint8_t choice, std::string_view input) {
    static const nlohmann::json files[] = {sound(0), sound(1), sound(2)};
    static const HfTokenizer tokenizers[] = {parse_tokenizer_json(files[0].dump(), "0"),
                                             parse_tokenizer_json(files[1].dump(), "1"),
                                             parse_tokenizer_json(files[2].dump(), "2")};
    constexpr std::string_view text = "the abc  aaaa's \xff\xe4\xb8\xad 12<s> e\xcc\x81\n";
    size_t middle = std::min<size_t>(input.size(), 40);
    switch (choice % 7) {
    case 0:
        return check(parse_tokenizer_json(input, "tokenizer.json"), text);
    case 1:
    case 2:
    case 3: {
        nlohmann::json file = files[choice % 7 - 1];
        damage_json(file, input);
        std::string source = file.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
        HfTokenizer tokenizer = parse_tokenizer_json(source, "tokenizer.json");
        check(tokenizer, text);
        check(parse_tokenizer_json(tokenizer_json(tokenizer.parts()), "again"), text);
        return;
    }
    case 4: {
        size_t done = 0;
        std::string_view subject = input.substr(middle).substr(0, 64);
        Pattern(input.substr(0, middle), "pattern").split(subject, [&](size_t begin, size_t end, bool) {
            if (begin != done || end <= begin) abort();
            done = end;
        });
        if (done != subject.size()) abort();
        return;
    }
    case 5: {
        std::string ranks;
        for (int byte = 0; byte < 256; byte++) {
            const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
            ranks +=
                std::string{digits[byte >> 2], digits[byte << 4 & 63]} + "== " + std::to_string(byte) + "\n";
        }
        return check(parse_tiktoken(ranks + std::string(input), tiktoken_encoding("cl100k_base"), "ranks"),
                     text);
    }
    default:
        for (const HfTokenizer& tokenizer : tokenizers) check(tokenizer, input);
    }
}

static int test_one_input(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    try {
        run(data[0], std::string_view((const char*)data + 1, size - 1));
    } catch (const Error& error) {
        for (const char* c = error.what(); *c; c++) {
            if ((unsigned char)*c < 0x20) abort();
        }
    }
    return 0;
}
