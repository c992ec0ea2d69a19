// Documents in files: finding them, gzip, JSON lines, batches; and work that keeps its order.
#include "test/support/thread_time.h"
#include "test/support/file_testing.h"

#include <atomic>
#include <unistd.h>

#include "data/base/figures.h"  // seconds_now
#include "data/base/json.h"
#include "data/base/ordered_work.h"
#include "data/text/text_documents.h"
#include "kernels/random.cuh"
#include "test/data/gzip_testing.h"

// Random numbers below `bound`.
struct Draws {
    uint64_t key, at = 0;
    size_t operator()(size_t bound) { return philox(key, at++).at[0] % bound; }
};

static std::string random_text(Draws& draw, size_t size, size_t letters) {
    std::string text(size, '\0');
    for (char& c : text) c = "ab \n\xc3\xa9z."[draw(letters)];
    return text;
}

static DocumentSearch found(const std::vector<std::string>& paths) {
    DocumentSearch search;
    for (const std::string& path : paths) search.add(path);
    return search;
}

static std::string whole(const TextFile& file, size_t piece = 1000) {
    TextInput input(file);
    std::string text;
    while (input.append(text, piece)) {
    }
    CHECK(input.consumed() == file.bytes);
    return text;
}

TEST_CASE("text files: what is compressed and what is lines") {
    TemporaryFolder folder;
    struct {
        const char* name;
        std::string content;
        bool compressed, lines;
    } cases[] = {{"a.txt", "text", false, false},
                 {"b.txt.gz", gzip("text"), true, false},
                 {"c", gzip("text"), true, false},
                 {"d.jsonl", "{}", false, true},
                 {"e.jsonl.gz", gzip("{}"), true, true},
                 {"f.jsonl", gzip("{}"), true, true},
                 {"g.json", "{}", false, false},
                 {"h.gz.txt", "\x1f\x8b", false, false},
                 {"jsonl", "x", false, false}};
    for (const auto& one : cases) write_file(folder / one.name, one.content);
    DocumentSearch search = found({folder.path});
    REQUIRE(search.files.size() == std::size(cases));
    uint64_t bytes = 0;
    for (size_t i = 0; i < std::size(cases); i++) {
        CAPTURE(cases[i].name);
        CHECK(search.files[i].path == folder / cases[i].name);
        CHECK(search.files[i].compressed == cases[i].compressed);
        CHECK(search.files[i].lines == cases[i].lines);
        CHECK(search.files[i].bytes == cases[i].content.size());
        bytes += cases[i].content.size();
    }
    CHECK(search.bytes == bytes);
}

TEST_CASE("text files: what is packed in another way is refused") {
    TemporaryFolder folder;
    const struct {
        std::string beginning, kind;
    } rows[] = {
        {"\x28\xb5\x2f\xfd", "zstd"}, {std::string("\xfd\x37zXZ\0", 6), "xz"},
        {"BZh91AY&SY", "bzip2"},      {"PK\x03\x04", "zip"},
        {"PAR1", "Parquet"},
    };
    for (auto& row : rows) {
        CAPTURE(row.kind);
        std::string path = folder / row.kind;
        write_file(path, row.beginning + "more");
        check_error(error_of([&] { found({path}); }), path, "is packed with " + row.kind + "; ");
    }
    write_file(folder / "text", "BZhang wrote this.");
    DocumentSearch search(true);
    search.add(folder.path);
    CHECK(search.files.size() == 1);
    CHECK(search.skipped["packed"].count == std::size(rows));
}

TEST_CASE("text files: what is skipped or strange is told by kind") {
    TemporaryFolder folder;
    auto utf16 = [](const std::string& text, bool marked, bool big) {
        std::string bytes = !marked ? "" : big ? "\xfe\xff" : "\xff\xfe";
        for (char c : text) bytes += big ? std::string{0, c} : std::string{c, 0};
        return bytes;
    };
    const struct {
        const char* name;
        std::string content;
        std::string skipped, strange;
    } rows[] = {
        {"a.txt", "plain text \xc3\xa9", "", ""},
        {"b.txt", "in Latin-1, caf\xe9", "", "neither UTF-8 nor UTF-16"},
        {"b1.txt", std::string(8191, 'x') + "\xc3\xa9", "",
         ""},  // a character that is cut at the end of the part that is checked
        {"b2.txt", std::string(8190, 'x') + "\xe9 ", "", "neither UTF-8 nor UTF-16"},
        {"b3.txt.gz", gzip("caf\xe9 au lait"), "", "neither UTF-8 nor UTF-16"},
        {"b4.txt.gz", gzip("\xc3\xa9"), "", ""},
        {"c.txt", "", "empty", ""},
        {".d", "hidden", "hidden", ""},
        {"e.bin", shard_bytes(std::vector<uint16_t>{1, 2}), "tokens or tokenizer", ""},
        {"f_tokenizer.json", "{}", "tokens or tokenizer", ""},
        {"g.json", std::string(token_record_beginning) + "1}", "tokens or tokenizer", ""},
        {"h.png", std::string("\x89PNG\r\n\x1a\n\0\0\0\rIHDR", 16), "", "binary"},
        {"i.dat", std::string(100, '\0'), "", "binary"},
        {"j.txt", utf16("text", true, false), "", "UTF-16"},
        {"k.txt", utf16("text", true, true), "", "UTF-16"},
        {"l.txt", utf16("ab", false, false), "", "UTF-16"},
        {"m.txt", utf16("a longer text", false, true), "", "UTF-16"},
        {"n.gz", gzip(std::string(100, '\0')), "", "binary"},
    };
    std::map<std::string, size_t> skipped, strange;
    size_t taken = 0, text = 0;
    for (auto& row : rows) {
        write_file(folder / row.name, row.content);
        if (!row.skipped.empty()) skipped[row.skipped]++;
        if (!row.strange.empty()) strange[row.strange]++;
        taken += row.skipped.empty();
        text += row.skipped.empty() && row.strange.empty();
    }
    auto counts = [](const std::map<std::string, NamedFiles>& files) {
        std::map<std::string, size_t> result;
        for (const auto& [kind, named] : files) result[kind] = named.count;
        return result;
    };
    DocumentSearch search = found({folder.path});
    CHECK(search.files.size() == taken);
    CHECK(counts(search.skipped) == skipped);
    CHECK(counts(search.strange) == strange);
    CHECK(search.strange["UTF-16"].text() ==
          "4 (" + folder / "j.txt" + ", " + folder / "k.txt" + ", " + folder / "l.txt" + ", ...)");
    CHECK(search.strange["binary"].text() ==
          "3 (" + folder / "h.png" + ", " + folder / "i.dat" + ", " + folder / "n.gz" + ")");

    DocumentSearch picky(true);
    picky.add(folder.path);
    CHECK(picky.files.size() == text);
    CHECK(picky.strange.empty());
    skipped.insert(strange.begin(), strange.end());
    CHECK(counts(picky.skipped) == skipped);
}

// ----------------------------------------------------------------------------
// gzip

TEST_CASE("gzip: the text comes back, however it was compressed and is asked for") {
    TemporaryFolder folder;
    Draws draw{random_key(1, "gzip")};
    for (int round = 0; round < 40; round++) {
        CAPTURE(round);
        std::string text, compressed;
        for (size_t member = 0; member <= draw(4); member++) {
            std::string part = random_text(draw, draw(3) == 0 ? 0 : draw(70000), 1 + draw(8));
            text += part;
            compressed += gzip(part, (int)draw(10));
        }
        if (compressed.empty()) continue;
        write_file(folder / "x.gz", compressed);
        DocumentSearch search = found({folder / "x.gz"});
        CHECK(whole(search.files[0], 1 + draw(5000)) == text);
    }
    std::string zeros(50 << 20, '\0');  // much text from few bytes
    write_file(folder / "zeros.gz", gzip(zeros));
    CHECK((whole(found({folder / "zeros.gz"}).files[0], 1 << 20) == zeros));
}

TEST_CASE("gzip: cut short anywhere, or damaged, it is refused") {
    TemporaryFolder folder;
    Draws draw{random_key(2, "gzip")};
    std::string text = random_text(draw, 300, 8), good = gzip(text), path = folder / "x.gz";
    auto error = [&](const std::string& content) {
        write_file(path, content);
        std::string read = text;
        std::string message = error_of([&] { read = whole(found({path}).files[0]); });
        CHECK(read == text);
        return message;
    };
    CHECK(error(good) == "no error");
    for (size_t size = 1; size < good.size(); size++)
        check_error(error(good.substr(0, size)), path, "cut short");
    check_error(error(good + good.substr(0, 20)), path, "cut short");
    check_error(error(good + "more"), path, "damaged");
    check_error(error("no gzip at all, but named so"), path, "damaged");
    size_t refused = 0;
    for (size_t at = 0; at < good.size(); at++) {
        std::string damaged = good;
        damaged[at] = (char)(damaged[at] ^ 0x10);
        std::string message = error(damaged);  // text that is not refused must be right
        refused += message != "no error";
        if (message != "no error") check_error(message, path, "; ");
    }
    CHECK(refused >= good.size() - 10);  // the time and system in its header are not checked
    write_file(path, "");
    CHECK(found({path}).files.empty());
}

// ----------------------------------------------------------------------------
// JSON

TEST_CASE("JSON: nested within bounds, and brackets in texts do not count") {
    auto nested = [](size_t depth, const std::string& inside) {
        return std::string(depth, '[') + inside + std::string(depth, ']');
    };
    CHECK(parse_json(nested(32, R"("\"[[{{\\", "]")"), "x").dump() == nested(32, R"("\"[[{{\\","]")"));
    for (const std::string& deep : {nested(33, ""), nested(31, "{\"a\": {}}"), std::string(1 << 20, '{')})
        check_error(error_of([&] { parse_json(deep, "x"); }), "x", "nested more than 32 deep");
    for (const std::string& bad : {nested(3, "\"[[[["), std::string("]]]]"), std::string("\"\\")})
        check_error(error_of([&] { parse_json(bad, "x"); }), "x", "not valid JSON at byte");
}

TEST_CASE("JSON: the time grows as the text does, however many objects stand beside each other") {
    auto seconds = [](size_t objects) {
        std::string list = "[";
        for (size_t i = 0; i < objects; i++) list += "{},";
        return least_thread_seconds(3, [&] { CHECK(parse_json(list + "0]", "x").size() == objects + 1); });
    };
    CHECK(seconds(16 << 11) < 100 * seconds(1 << 11));  // 256 times if each searched those before it
}

// ----------------------------------------------------------------------------
// JSON lines

TEST_CASE("JSON lines: the text of the field") {
    struct {
        std::string line, document;
    } cases[] = {
        {R"({"text": "plain"})", "plain"},
        {R"(  { "text":"" , "n":1}  )", ""},
        {R"({"id": 7, "meta": {"text": "in", "list": [{"text": 1}]}, "text": "outer", "z": null})", "outer"},
        {R"({"text": "a\n\t\"\\\/\u0041\u00e9\ud83d\ude00\u0000b"})",
         std::string("a\n\t\"\\/A\xc3\xa9\xf0\x9f\x98\x80\0b", 15)},
        {R"({"te\u0078t": "escaped name"})", "escaped name"},
        {R"({"Text": "other", "text ": "other", "text": "mine", "n": -1.5e10, "b": [true, false]})", "mine"},
        {"{\"text\": \"\xc3\xa9\xf0\x9f\x98\x80 \x7f\"}", "\xc3\xa9\xf0\x9f\x98\x80 \x7f"},
        {"\xef\xbb\xbf{\"text\": \"behind a byte order mark\"}", "behind a byte order mark"},
        {R"({"text": "<|endoftext|>"})", "<|endoftext|>"},
    };
    for (const auto& one : cases) {
        CAPTURE(one.line);
        std::string document = "left from before";
        CHECK(read_json_line(one.line, "text", document) == "");
        CHECK(document == one.document);
    }
    std::string document;
    CHECK(read_json_line(R"({"text": "no", "": "empty name"})", "", document) == "");
    CHECK(document == "empty name");
    std::string deep =
        "{\"a\": " + std::string(100000, '[') + std::string(100000, ']') + ", \"text\": \"x\"}";
    CHECK(read_json_line(deep, "text", document) == "");
    CHECK(document == "x");
}

TEST_CASE("JSON lines: as Python's json.dumps writes them") {
    struct {
        std::string line, document;
        uint64_t lone;
    } cases[] = {
        {R"({"n": NaN, "text": "a", "list": [Infinity,-Infinity,NaN], "z":-Infinity})", "a", 0},
        {R"({"text": "NaN, \"Infinity\" \\", "n": NaN})", "NaN, \"Infinity\" \\", 0},
        {R"({"text": "\ud800"})", "\xef\xbf\xbd", 1},
        {R"({"text": "\udc00\uD800"})", "\xef\xbf\xbd\xef\xbf\xbd", 2},
        {R"({"text": "\ud83d\ude00\ud83dx\ude00"})", "\xf0\x9f\x98\x80\xef\xbf\xbdx\xef\xbf\xbd", 2},
        {R"({"text": "\ud83d\ud83d\uDE00\\ud800\\\ud800\u0041"})",
         "\xef\xbf\xbd\xf0\x9f\x98\x80\\ud800\\\xef\xbf\xbd"
         "A",
         2},
        {R"({"text": "\ufffd", "n": NaN})", "\xef\xbf\xbd", 0},
        {R"({"\udfff": NaN, "text": "\ue000\ud7ff"})", "\xee\x80\x80\xed\x9f\xbf", 1},
    };
    for (const auto& one : cases) {
        CAPTURE(one.line);
        std::string document;
        uint64_t lone = 7;
        CHECK(read_json_line(one.line, "text", document, &lone) == "");
        CHECK(document == one.document);
        CHECK(lone == 7 + one.lone);
    }
}

TEST_CASE("JSON lines: damaged lines are refused with a reason and a remedy") {
    struct {
        std::string line, reason;
    } cases[] = {
        {R"({"text": "half)", "not valid JSON at byte 15"},
        {R"({"text": "a"} {"text": "b"})", "not valid JSON at byte 15"},
        {R"({"text": "a"}x)", "not valid JSON"},
        {R"({"text": "a",})", "not valid JSON"},
        {R"({text: "a"})", "not valid JSON at byte 3"},
        {R"({'text': 'a'})", "not valid JSON"},
        {"{\"text\": \"\xff\"}", "not valid JSON"},
        {"{\"text\": \"\xed\xa0\x80\"}", "not valid JSON"},
        {R"({"text": "a", "n": nan})", "not valid JSON at byte 21"},
        {R"({"text": "a", "n": 1NaN})", "not valid JSON at byte 22"},
        {R"({"text": "a", "n": -NaN})", "not valid JSON"},
        {R"({"text": "a", "n": NaN5})", "not valid JSON"},
        {R"({"text": "a", "n": NaN.5})", "not valid JSON"},
        {R"({"text": "a", "n": [NaNNaN]})", "not valid JSON"},
        {R"({"text": "a", "n": --Infinity})", "not valid JSON"},
        {R"({"text": "a", NaN: 1})", "not valid JSON"},
        {R"({"text": "\ud800\ud8"})", "not valid JSON"},
        {R"({"text": "\ud800)", "not valid JSON"},
        {R"({"text": NaN})", "is not a string"},
        {"Infinity", "not a JSON object"},
        {std::string("{\"text\": \"\0\"}", 13), "not valid JSON"},
        {"{\"text\": \"a\tb\"}", "not valid JSON"},
        {R"({"text": "a", "n": 1e999})", "not valid JSON"},
        {"plain text", "not valid JSON"},
        {R"("text")", "not a JSON object"},
        {R"(["text"])", "not a JSON object"},
        {R"([{"text": "a"}])", "not a JSON object"},
        {"null", "not a JSON object"},
        {"{}", "no field \"text\""},
        {R"({"content": "a"})", "no field \"text\""},
        {R"({"meta": {"text": "a"}})", "no field \"text\""},
        {R"({"text": null})", "is not a string"},
        {R"({"text": 1})", "is not a string"},
        {R"({"text": true})", "is not a string"},
        {R"({"text": -1})", "is not a string"},
        {R"({"text": 1.5})", "is not a string"},
        {R"({"text": ["a"]})", "is not a string"},
        {R"({"text": {"text": "a"}})", "is not a string"},
        {R"({"text": "a", "text": "b"})", "twice"},
        {R"({"text": [], "text": "b"})", "twice"},
    };
    for (const auto& one : cases) {
        CAPTURE(one.line);
        std::string document, wrong = read_json_line(one.line, "text", document);
        CAPTURE(wrong);
        CHECK(wrong.find(one.reason) != std::string::npos);
        CHECK(wrong.find("; ") != std::string::npos);
        CHECK(wrong.find('\n') == std::string::npos);
    }
    std::string document, wrong = read_json_line("{}", "a\nb", document);
    CHECK(wrong.find("\"a\\u000ab\"") != std::string::npos);
}

// ----------------------------------------------------------------------------
// batches

using Documents = std::vector<std::string>;

static Documents documents_in(const std::vector<TextFile>& files, size_t size,
                              const std::function<size_t(std::string_view)>& cut, size_t* largest = nullptr,
                              const std::string& field = "text") {
    TextBatches batches(files, cut, size);
    Documents documents;
    bool inside = false;
    uint64_t bytes = 0, input_bytes = 0;
    for (TextBatch batch; batches.next(batch);) {
        input_bytes += batch.input_bytes;
        if (largest) *largest = std::max(*largest, batch.text.size());
        LineNotes notes = documents_of(batch, field, [&](std::string_view text, bool last) {
            if (!inside) documents.emplace_back();
            documents.back() += text;
            inside = !last;
        });
        if (notes.bad > 0) fail("%s", notes.named.at(0).c_str());
    }
    CHECK(!inside);
    for (const TextFile& file : files) bytes += file.bytes;
    CHECK(input_bytes <= bytes);
    if (input_bytes + 64 < bytes) CHECK(input_bytes == bytes);  // an empty file may follow the last batch
    return documents;
}

static size_t cut_anywhere(std::string_view text) {
    return text.size();
}
static size_t cut_nowhere(std::string_view) {
    return 0;
}
static size_t cut_behind_z(std::string_view text) {
    return text.rfind('z') + 1;
}  // 0 if there is none

TEST_CASE("batches: all documents in order, for any size, place to cut and compression") {
    Draws draw{random_key(3, "batches")};
    for (int round = 0; round < 60; round++) {
        CAPTURE(round);
        TemporaryFolder in;
        Documents wanted;
        for (size_t i = 0, files = 1 + draw(12); i < files; i++) {
            bool lines = draw(3) == 0, compressed = draw(3) == 0;
            std::string content;
            if (lines) {
                for (size_t n = draw(30); n > 0; n--) {
                    if (draw(4) == 0) {
                        content += draw(2) ? "\n" : " \t\r\n";
                        continue;
                    }
                    std::string document = draw(4) == 0 ? "" : random_text(draw, draw(300), 4);
                    wanted.push_back(document);
                    content += nlohmann::json({{"n", i}, {"text", document}}).dump();
                    content += n == 1 && draw(2) ? "" : draw(2) ? "\n" : "\r\n";
                }
                if (content.empty()) content = "\n";
            } else {
                content = random_text(draw, 1 + draw(draw(4) == 0 ? 5000 : 200), 8);
                wanted.push_back(content);
            }
            write_file(in / text("%02zu%s%s", i, lines ? ".jsonl" : ".txt", compressed ? ".gz" : ""),
                       compressed ? gzip(content) : content);
        }
        DocumentSearch search = found({in.path});
        for (size_t size : {(size_t)1, 2 + draw(100), 100 + draw(3000), (size_t)1 << 20}) {
            CAPTURE(size);
            for (auto cut : {cut_anywhere, cut_nowhere, cut_behind_z})
                REQUIRE((documents_in(search.files, size, cut) == wanted));
        }
    }
}

TEST_CASE("batches: hold a bounded part of a text that can be cut") {
    TemporaryFolder folder;
    std::string large(10 << 20, 'q');
    for (size_t i = 0; i < large.size(); i += 1000) large[i] = 'z';
    write_file(folder / "large", large);
    write_file(folder / "large.gz", gzip(large));
    DocumentSearch search = found({folder / "large", folder / "large.gz"});
    size_t largest = 0;
    CHECK((documents_in(search.files, 1 << 16, cut_behind_z, &largest) == Documents{large, large}));
    CHECK(largest <= 1 << 16);
    largest = 0;
    CHECK((documents_in(search.files, 1 << 16, cut_nowhere, &largest) == Documents{large, large}));
    CHECK(largest == large.size());
}

TEST_CASE("batches: small documents and lines share one, lines of 100 MB have their own") {
    TemporaryFolder folder;
    for (int i = 0; i < 500; i++) write_file(folder / text("%03d.txt", i), std::string(100, 'x'));
    std::string lines;
    for (int i = 0; i < 5000; i++) lines += "{\"text\": \"" + std::string(87, 'x') + "\"}\n";
    write_file(folder / "a.jsonl", lines);
    DocumentSearch search = found({folder.path});
    TextBatches batches(search.files, cut_anywhere, 10000);
    size_t count = 0;
    for (TextBatch batch; batches.next(batch); count++) CHECK(batch.text.size() <= 10100);
    CHECK(count <= 5 + 50 + 2);

    std::string document(100 << 20, 'y'),
        content = "{\"text\": \"first\"}\n{\"text\": \"" + document + "\"}\n";
    write_file(folder / "long.jsonl", content + "{\"text\": \"last\"}");
    Documents documents = documents_in(found({folder / "long.jsonl"}).files, 1 << 20, cut_anywhere);
    REQUIRE(documents.size() == 3);
    CHECK(documents[0] == "first");
    CHECK((documents[1] == document));
    CHECK(documents[2] == "last");
}

TEST_CASE("batches: a long line of a small file is refused before it is in memory") {
    TemporaryFolder folder;
    write_file(folder / "a.jsonl.gz", gzip("{\"text\": \"\"}\n{\"text\": \"" + std::string(5 << 20, ' ')));
    write_file(folder / "a.txt.gz", gzip(std::string(5 << 20, ' ')));
    auto refused = [&](const std::string& path) {
        DocumentSearch search = found({path});
        TextBatches batches(search.files, cut_nowhere, 1 << 10, 4 << 20);
        TextBatch batch;
        return error_of([&] {
            while (batches.next(batch)) CHECK(batch.text.size() <= 4 << 20);
        });
    };
    check_error(refused(folder / "a.jsonl.gz"), folder / "a.jsonl.gz:2", "the line is longer than 4 MiB");
    check_error(refused(folder / "a.txt.gz"), folder / "a.txt.gz", "has 4 MiB of text that this tokenizer");
}

TEST_CASE("batches: a file that is cut is two documents, and characters stay whole") {
    TemporaryFolder folder;
    std::string content = "0123\xc3\xa9\xf0\x9f\x98\x80"
                          "89abc";  // characters of two and of four bytes
    write_file(folder / "x", content);
    write_file(folder / "x.gz", gzip(content));
    for (size_t cut = 1; cut < content.size(); cut++) {
        CAPTURE(cut);
        size_t moved = cut == 5 ? 4 : cut > 6 && cut < 10 ? 6 : cut;
        for (const char* name : {"x", "x.gz"}) {
            DocumentSearch search = found({folder / name});
            search.files[0].cut = cut;
            CHECK(documents_in(search.files, 1000, cut_anywhere) ==
                  Documents{content.substr(0, moved), content.substr(moved)});
        }
    }
    write_file(folder / "short", "\xc3\xa9");  // neither part may be empty
    DocumentSearch search = found({folder / "short"});
    search.files[0].cut = 1;
    CHECK(documents_in(search.files, 1, cut_anywhere) == Documents{"\xc3", "\xa9"});
}

TEST_CASE("batches: a damaged line is named by its number") {
    TemporaryFolder folder;
    std::string path = folder / "x.jsonl", content;
    for (int i = 1; i <= 1000; i++) {
        if (i == 777)
            content += "{\"text\": \"half\n";
        else
            content += i % 10 == 0 ? "\n" : "{\"text\": \"good\"}\r\n";
    }
    write_file(path, content);
    for (size_t size : {1, 100, 1 << 20})
        check_error(error_of([&] { documents_in(found({path}).files, size, cut_anywhere); }), path + ":777",
                    "not valid JSON");
    write_file(path, "{\"text\": \"a\"}\n{\"body\": \"b\"}");
    check_error(error_of([&] { documents_in(found({path}).files, 100, cut_anywhere); }), path + ":2",
                "no field \"text\"");
    check_error(error_of([&] { documents_in(found({path}).files, 100, cut_anywhere, nullptr, "body"); }),
                path + ":1", "no field \"body\"");
}

// ----------------------------------------------------------------------------
// work in order

TEST_CASE("ordered work: results in order, and no thread far ahead") {
    for (unsigned threads : {1u, 2u, 7u}) {
        std::atomic<int> given = 0, taken = 0, farthest = 0;
        {
            OrderedWork<int, int> work(
                [&](int& thing) {
                    thing = given;
                    if (thing == 2000) return false;
                    given++;
                    farthest = std::max(farthest.load(), given - taken);
                    return true;
                },
                [](const int& thing) {
                    if (thing % 37 == 0) usleep(200);  // slow ones
                    return thing * 3;
                },
                threads);
            int result = -1;
            for (int i = 0; i < 2000; i++) {
                REQUIRE(work.take(result));
                taken = i + 1;
                REQUIRE(result == 3 * i);
            }
            CHECK(!work.take(result));
            CHECK(!work.take(result));
        }
        CHECK(farthest <= (int)(2 * threads + 3));
    }
}

TEST_CASE("ordered work: a failure comes in its place, and all threads end") {
    for (bool in_next : {false, true}) {
        for (int failing : {0, 1, 50, 99}) {
            int given = 0;
            OrderedWork<int, int> work(
                [&](int& thing) {
                    if (in_next && given == failing) fail("thing %d: bad; leave it out", given);
                    thing = given++;
                    return thing < 100;
                },
                [&](const int& thing) {
                    if (!in_next && thing >= failing && thing % 3 == failing % 3)
                        fail("thing %d: bad; leave it out", thing);
                    return thing;
                },
                4);
            int result = -1, taken = 0;
            std::string error = error_of([&] {
                while (work.take(result)) CHECK(result == taken++);
            });
            CHECK(taken == failing);
            CHECK(error == text("thing %d: bad; leave it out", failing));
        }
    }
    // Work that is abandoned waits only for the items in progress.
    int given = 0, result = -1;
    OrderedWork<int, int> work(
        [&](int& thing) {
            thing = given++;
            return true;
        },
        [](const int& thing) { return thing; }, 3);
    CHECK(work.take(result));
    CHECK(result == 0);
}
