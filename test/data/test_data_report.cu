// The data subcommand: histograms, untrusted text on a terminal, counts, and damaged files among good ones.
#include "test/support/file_testing.h"

#include "data/commands/data_report.h"
#include "kernels/random.cuh"

using Lines = std::vector<std::string>;

// ----------------------------------------------------------------------------
// parts

TEST_CASE("data report: numbers and histograms") {
    CHECK(with_commas(0) == "0");
    CHECK(with_commas(999) == "999");
    CHECK(with_commas(1000) == "1,000");
    CHECK(with_commas(-1234567) == "-1,234,567");
    CHECK(with_commas(-123) == "-123");
    CHECK(with_commas(INT64_MAX) == "9,223,372,036,854,775,807");

    LengthHistogram histogram;
    CHECK(histogram.lines().empty());
    CHECK((histogram.smallest() == 0 && histogram.largest() == 0 && histogram.mean() == 0));
    histogram.add(700);
    CHECK(histogram.lines(4) == Lines{"512 .. 1,023  1  ####"});
    for (int64_t length : {0, 1, 2, 3, 3, 8}) histogram.add(length);
    for (int i = 0; i < 1200; i++) histogram.add(1024 + i % 1024);
    CHECK(histogram.lines(12) ==
          Lines{"             0      1  #", "             1      1  #", "        2 .. 3      3  #",
                "        4 .. 7      0", "       8 .. 15      1  #", "      16 .. 31      0",
                "      32 .. 63      0", "     64 .. 127      0", "    128 .. 255      0",
                "    256 .. 511      0", "  512 .. 1,023      1  #", "1,024 .. 2,047  1,200  ############"});
    CHECK((histogram.count() == 1207 && histogram.smallest() == 0 && histogram.largest() == 2047));

    LengthHistogram longer, sum;
    longer.add(INT64_MAX);
    CHECK(longer.lines(1) == Lines{"4,611,686,018,427,387,904 .. 9,223,372,036,854,775,807  1  #"});
    sum.add(LengthHistogram());
    CHECK(sum.smallest() == 0);
    LengthHistogram other;
    other.add(5);
    sum.add(other);
    other.add(6), other.add(20);
    sum.add(other);
    CHECK((sum.count() == 4 && sum.sum() == 36 && sum.smallest() == 5 && sum.largest() == 20));
    CHECK(sum.mean() == 9);
    CHECK(sum.lines(2) == Lines{"  4 .. 7  3  ##", " 8 .. 15  0", "16 .. 31  1  #"});
}

TEST_CASE("data report: text that is safe to show") {
    CHECK(visible_text("a\\b c\u00e9\u4e2d\U0001f600") == "a\\b c\u00e9\u4e2d\U0001f600");
    CHECK(visible_text(std::string_view("\0\x1b[2J\x7f\t\r\n", 9)) == "\\x00\\x1b[2J\\x7f\\t\\r\\n");
    CHECK(visible_text("\x80\xff\xc3(\xe4\xb8") == "\\x80\\xff\\xc3(\\xe4\\xb8");
    CHECK(visible_text("\u009b\u202e\u2066\ufeff\u200b\u2028\U000e0041") ==
          "\\u{9b}\\u{202e}\\u{2066}\\u{feff}\\u{200b}\\u{2028}\\u{e0041}");

    CHECK(visible_lines("", 3, 4) == Lines{});
    CHECK(visible_lines("\n", 3, 4) == Lines{""});
    CHECK(visible_lines("one\n\ntwo", 3, 4) == Lines{"one", "", "two"});
    CHECK(visible_lines("one\n\ntwo\n", 3, 4) == Lines{"one", "", "two"});
    CHECK(visible_lines("1\n2\n3\n4", 3, 4) == Lines{"1", "2", "3", "..."});
    CHECK(visible_lines("1234\n12345\n", 3, 4) == Lines{"1234", "1234..."});
    CHECK(visible_lines("\u4e2d\u4e2d\t\u4e2d\u4e2d", 3, 4) == Lines{"\u4e2d\u4e2d\\t\u4e2d..."});
}

TEST_CASE("data report: a scan counts as a plain loop does") {
    for (uint64_t seed = 0; seed < 200; seed++) {
        CAPTURE(seed);
        auto draw = [&](uint64_t i, uint64_t which) { return philox(seed, i, which).at[0]; };
        size_t count = draw(0, 1) % 3000;
        int end = seed % 5 == 4 ? -1 : 7;
        uint32_t rare = seed % 3 == 0 ? 3 : seed % 3 == 1 ? 100 : 1000;
        std::vector<int> tokens(count);
        for (size_t i = 0; i < count; i++)
            tokens[i] = draw(i, 2) % rare == 0 ? 7 : (int)(draw(i, 3) % 5000 + 8);

        std::vector<int64_t> lengths;
        int64_t length = 0, ends = 0;
        for (size_t i = 0; i < count && end >= 0; i++) {
            if (tokens[i] != end) {
                length++;
                continue;
            }
            if (i > 0) lengths.push_back(length);
            length = 0, ends++;
        }
        if (length > 0) lengths.push_back(length);
        LengthHistogram expected;
        for (int64_t each : lengths) expected.add(each);

        TokenScan scan(end);
        for (size_t at = 0; at < count;) {
            size_t n = std::min<size_t>(count - at, draw(at, 4) % 700 + 1);
            scan.add(tokens.data() + at, (int64_t)n);
            at += n;
        }
        scan.finish();
        CHECK(scan.count == (int64_t)count);
        CHECK(scan.largest == (count ? *std::max_element(tokens.begin(), tokens.end()) : -1));
        CHECK(scan.document_ends == ends);
        CHECK(scan.lengths.count() == expected.count());
        CHECK(scan.lengths.sum() == expected.sum());
        CHECK(scan.lengths.lines() == expected.lines());
    }
}

TEST_CASE("data report: a token that fills a stretch") {
    std::vector<int> tokens(20000);
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = (int)i;
    std::fill(tokens.begin() + 1000, tokens.begin() + 3000, 5);   // blocks 4 .. 10
    std::fill(tokens.begin() + 5120, tokens.begin() + 10240, 0);  // 20 blocks
    std::fill(tokens.begin() + 10240, tokens.begin() + 14336, 9);
    TokenScan scan(0);
    scan.add(tokens.data(), 7680);
    scan.add(tokens.data() + 7680, 20000 - 7680);
    scan.finish();
    CHECK(scan.longest_run.token == 0);
    CHECK(scan.longest_run.start == 5120);
    CHECK(scan.longest_run.length == 5120);

    // A run of tokens that lasts to the end of the file.
    TokenScan last(-1);
    std::fill(tokens.begin() + 14336, tokens.end(), 9);
    last.add(tokens.data(), 20000);
    last.finish();
    CHECK((last.longest_run.token == 9 && last.longest_run.length == 20000 - 10240));
}

// ----------------------------------------------------------------------------
// files

static std::string index_bytes(uint8_t type, const std::vector<int32_t>& lengths,
                               const std::vector<int64_t>& documents) {
    std::string bytes("MMIDIDX\0\0", 9);
    auto append = [&](auto number) { bytes.append((const char*)&number, sizeof number); };
    append(uint64_t(1)), append(type), append((uint64_t)lengths.size()), append((uint64_t)documents.size());
    int64_t at = 0;
    for (int32_t length : lengths) append(length);
    for (int32_t length : lengths) append(at), at += (int64_t)length * (type == 8 ? 2 : 4);
    for (int64_t document : documents) append(document);
    return bytes;
}

static std::vector<uint16_t> stored(std::string_view text) {
    std::vector<uint16_t> tokens;
    for (char c : text) tokens.push_back(c == '|' ? 256 : (uint8_t)c);
    return tokens;
}

TEST_CASE("data report: a token shard") {
    TemporaryFolder folder;
    std::string path = folder / "a.bin";
    write_file(path, shard_bytes(stored("one\x1b\n|\n|threefour|||the last")));
    Tokenizer bytes;
    DataReport report(&bytes, -1);
    CHECK(report.file(path) ==
          path + "\n"
                 "  kind        token shard of llm.c, 2 bytes a token\n"
                 "  tokens      28\n"
                 "  largest     token 256: fits a vocabulary of 257\n"
                 "  documents   6 of 0 .. 9 tokens, 3.8 on average, separated by token 256\n"
                 "            0  2  ########################################\n"
                 "            1  1  ####################\n"
                 "       2 .. 3  0\n"
                 "       4 .. 7  1  ####################\n"
                 "      8 .. 15  2  ########################################\n"
                 "  begins\n"
                 "      | one\\x1b\n"
                 "      | <|endoftext|>\n"
                 "      | <|endoftext|>threefour<|endoftext|><|endoftext|><|endoftext|>"
                 "the last\n");
    CHECK(report.damaged().empty());

    // Wider tokens, no tokenizer.
    std::vector<uint32_t> wide = {128000, 1, 2, 3, 128000};
    for (uint32_t i = 0; i < 100; i++) wide.push_back(i);
    write_file(path, shard_bytes(20240801, 7, (int32_t)wide.size(), wide));
    CHECK(DataReport(nullptr, -1).file(path) ==
          path + "\n"
                 "  kind        token shard of llm.c, 4 bytes a token\n"
                 "  tokens      105\n"
                 "  largest     token 128000: fits a vocabulary of 128,001\n"
                 "  documents   cannot be separated; name the tokenizer\n"
                 "  begins\n"
                 "      | 128000 1 2 3 128000 0 1 2 3 4 5 6 7 8 9 10 ...\n");
    // The end token in front, as llm.c's own scripts write it.
    std::string lines = DataReport(nullptr, 128000).file(path);
    CHECK(lines.find("documents   2 of 3 .. 100 tokens, 51.5 on average, separated by token 128000\n") !=
          std::string::npos);
    lines = DataReport(nullptr, 127999).file(path);
    CHECK(lines.find("documents   1 or part of one: token 127999, which ends documents, does not occur\n") !=
          std::string::npos);
}

TEST_CASE("data report: text that begins in the middle of a character, and what is not in the vocabulary") {
    TemporaryFolder folder;
    Tokenizer bytes;
    std::string path = folder / "a.bin";
    std::string text = "\xb8\xad";  // the rest of a character
    for (int i = 0; i < 300; i++) text += "\u4e2d";
    write_file(path, shard_bytes(stored(text)));
    DataReport report(&bytes, -1);
    std::string lines = report.file(path), shown = "      | \\xb8\\xad";
    for (int i = 0; i < 98; i++) shown += "\u4e2d";
    CHECK(lines.ends_with(shown + "...\n      | ...\n"));

    write_file(path, shard_bytes({'a', 300, 'b'}));
    lines = report.file(path);
    CHECK(lines.find("      | a<|300|>b\n") != std::string::npos);
    CHECK(lines.find("  DAMAGED     " + path +
                     ": has token 300, outside the 257 tokens of the tokenizer bytes; ") !=
          std::string::npos);
    CHECK(report.damaged() == Lines{path});
}

TEST_CASE("data report: a data set of Megatron-LM") {
    TemporaryFolder folder;
    std::string path = folder / "a.idx";
    std::vector<uint16_t> tokens = stored("ab|cdefgh|");
    write_file(folder / "a.bin", {(const char*)tokens.data(), 2 * tokens.size()});
    write_file(path, index_bytes(8, {3, 0, 5, 2}, {0, 1, 2, 4}));
    Tokenizer bytes;
    DataReport report(&bytes, -1);
    CHECK(report.file(path) ==
          path +
              "\n"
              "  kind        data set of Megatron-LM, 2 bytes a token, 4 sequences\n"
              "  tokens      10\n"
              "  largest     token 256: fits a vocabulary of 257\n"
              "  documents   3 of 0 .. 7 tokens, 3.3 on average, with 2 of token 256, which ends documents\n"
              "           0  1  ########################################\n"
              "           1  0\n"
              "      2 .. 3  1  ########################################\n"
              "      4 .. 7  1  ########################################\n"
              "  begins\n"
              "      | ab<|endoftext|>cdefgh<|endoftext|>\n");
    CHECK(DataReport(nullptr, -1).file(path).find("documents   3 of 0 .. 7 tokens, 3.3 on average\n") !=
          std::string::npos);

    // The token file's name finds the index if it has no shard header; a real shard beside an index is a
    // shard.
    CHECK(index_or_shard(folder / "a.bin") == path);
    CHECK(index_or_shard(path) == path);
    CHECK(index_or_shard(folder / "b.bin") == folder / "b.bin");
    write_file(folder / "a.bin", shard_bytes({1, 2}));
    CHECK(index_or_shard(folder / "a.bin") == folder / "a.bin");
    write_file(folder / "a.bin", "");
    CHECK(index_or_shard(folder / "a.bin") == path);

    // The scan finds negative tokens, and what is known before that is still reported.
    std::vector<int32_t> wide = {1, 2, -3, 4};
    write_file(folder / "a.bin", {(const char*)wide.data(), 16});
    write_file(path, index_bytes(4, {4}, {0, 1}));
    std::string lines = report.file(path);
    CHECK(lines.find("4 bytes a token, 1 sequences\n  DAMAGED     " + (folder / "a.bin") +
                     ": token 2 is -3") != std::string::npos);
}

TEST_CASE("data report: multiple-choice questions") {
    TemporaryFolder folder;
    std::string path = folder / "a.bin";
    std::vector<int32_t> header(256);
    header[0] = 20240522, header[1] = 1, header[2] = 1, header[3] = 34;
    std::vector<uint16_t> example = {65535, 34, 0,   1,   2, 4,   'W', 'h', 'y',
                                     '?',   2,  ' ', 'a', 3, ' ', 'b', '\t'};
    write_file(path, std::string((const char*)header.data(), 1024) +
                         std::string((const char*)example.data(), 2 * example.size()));
    Tokenizer bytes;
    CHECK(DataReport(&bytes, -1).file(path) ==
          path + "\n"
                 "  kind        multiple-choice questions of llm.c, 2 bytes a token\n"
                 "  tokens      9\n"
                 "  largest     token 121: fits a vocabulary of 122\n"
                 "  questions   1 of 4 .. 4 tokens, 4.0 on average\n"
                 "      4 .. 7  1  ########################################\n"
                 "  choices     2 of 2 .. 3 tokens, 2.5 on average\n"
                 "      2 .. 3  2  ########################################\n"
                 "  the first\n"
                 "      | Why?\n"
                 "      wrong:\n"
                 "      |  a\n"
                 "      right:\n"
                 "      |  b\\t\n");
    header[0] = (int32_t)__builtin_bswap32(20240522);
    write_file(path, {(const char*)header.data(), 1024});
    CHECK(DataReport(&bytes, -1).file(path).find("DAMAGED     " + path + ": is not an evaluation file") !=
          std::string::npos);
}

TEST_CASE("data report: a damaged file does not hide the others") {
    TemporaryFolder folder;
    std::string good = folder / "good.bin", more = folder / "more.bin", cut = folder / "cut.bin";
    write_file(good, shard_bytes(stored("abc|def|")));
    write_file(more, shard_bytes(stored("ghijkl|")));
    write_file(cut, shard_bytes(stored("abc|")).substr(0, 1030));
    write_file(folder / "other.bin", std::string(2000, 'x'));
    Tokenizer bytes;

    // All is well: every file once, in order, and then all together.
    auto [out, error] = printed_by([&] {
        report_data({"2:" + good + ",0.5:" + (folder / "mor*.bin"), good}, &bytes, -1);
    });
    CHECK(error == "no error");
    CHECK(out.find(good) < out.find(more));
    CHECK(out.find(good, out.find(good) + 1) == std::string::npos);
    CHECK(out.find("total of 2 files\n"
                   "  tokens      15\n"
                   "  largest     token 256: fits a vocabulary of 257\n"
                   "  documents   3 of 3 .. 6 tokens, 4.0 on average\n"
                   "      2 .. 3  2  ########################################\n") != std::string::npos);
    CHECK(out.find("DAMAGED") == std::string::npos);
    std::tie(out, error) = printed_by([&] { report_data({good}, &bytes, -1); });
    CHECK(out.find("together") == std::string::npos);

    // One file is damaged, and its message comes last.
    std::tie(out, error) = printed_by([&] { report_data({cut, good, more}, &bytes, -1); });
    check_error(error, cut, "is truncated: 1030 bytes");
    CHECK(out.find("  DAMAGED     " + error + "\n") != std::string::npos);
    CHECK(out.find("total of 2 files\n  tokens      15\n") != std::string::npos);

    // Several are damaged; one of them is missing, and one is a folder.
    std::tie(out, error) = printed_by([&] {
        report_data({"," + (folder / "*.bin") + "," + (folder / "no*thing") + "," + folder.path}, &bytes, -1);
    });
    check_error(error, "data",
                "4 of 6 files are damaged (" + cut + ", " + (folder / "other.bin") + ", " +
                    (folder / "no*thing") + ", " + folder.path + ")");
    CHECK(out.find("total of 2 files") != std::string::npos);
    CHECK(out.find("no such file") != std::string::npos);
    CHECK(out.find("is a folder") != std::string::npos);
    CHECK(out.find("is not a token shard") != std::string::npos);
    CHECK_REFUSED(report_data({}, &bytes, -1), "no files are named");
    CHECK_REFUSED(report_data({","}, &bytes, -1), "no files are named");
    std::tie(out, error) = printed_by([&] {
        report_data({"0.5:" + good + ",0.5:" + cut, "0:a.bin"}, &bytes, -1);
    });
    check_error(error, "data", "2 of 3 files are damaged (" + cut + ", 0:a.bin)");

    // A name that would break the line.
    std::string odd = folder / "a\n\x1b.bin";
    write_file(odd, "x");
    std::tie(out, error) = printed_by([&] { report_data({odd, cut}, &bytes, -1); });
    CHECK(out.find('\x1b') == std::string::npos);
    CHECK(error.find('\n') == std::string::npos);
}

TEST_CASE("data report: a shard of 3 GiB" * doctest::test_suite("long")) {
    TemporaryFolder folder;
    std::string path = folder / "a.bin";
    constexpr int64_t count = 805306368;
    std::vector<int32_t> header = {20240801, 7, (int32_t)count};
    write_file(path, {(const char*)header.data(), 12});
    if (truncate(path.c_str(), 1024 + 4 * count) != 0) {
        SKIP("this file system does not make a sparse file of 3 GiB");
    }
    {
        std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
        uint32_t last[3] = {70000, 7, 60000};
        file.seekp(1024 + 4 * (count - 3));
        file.write((const char*)last, sizeof last);
    }
    std::string lines = DataReport(nullptr, 70000).file(path);
    CAPTURE(lines);
    CHECK(lines.find("tokens      805,306,368\n") != std::string::npos);
    CHECK(lines.find("largest     token 70000: fits") != std::string::npos);
    CHECK(lines.find("documents   2 of 2 .. 805,306,365 tokens") != std::string::npos);
    CHECK(lines.find("suspicious  token 0 is repeated 805,306,112 times, starting at token 0") !=
          std::string::npos);
}
