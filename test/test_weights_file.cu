// The weights file: what is written is read back, nothing is left half-written, and damage of any kind is one
// line.
#include <algorithm>
#include <csignal>
#include <fstream>
#include <iterator>
#include <random>

#include <sys/resource.h>

#include "data/weights_file.h"
#include "test/file_testing.h"
#include "test/forged_weights.h"

static std::vector<StoredTensor> example_table() {
    return {{"wte", {5, 7}, Dtype::fp32}, {"norm", {3}, Dtype::bf16}, {"scale", {}, Dtype::fp32}};
}

// 140, 6 and 4 bytes.
static void write_example(const std::string& path) {
    std::vector<char> bytes(140);
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = (char)i;
    WeightsWriter writer(path, {{"options", {{"layers", 12}}}}, example_table());
    writer.write_at("wte", 0, bytes.data(), 100);  // in two pieces
    writer.write_at("wte", 100, bytes.data() + 100, 40);
    writer.write_at("norm", 0, bytes.data(), 6);
    writer.write_at("scale", 0, bytes.data(), 4);
    writer.commit();
}

static std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

static void forge(const std::string& path, const std::string& header, const std::string& data) {
    write_file(path, forged_weights(header, data));
}

TEST_CASE("what is written is read back") {
    TemporaryFolder folder;
    std::string path = folder / "weights.bin";
    write_example(path);
    CHECK(folder.files().size() == 1);
    WeightsReader reader(path);
    CHECK(reader.header().dump() == R"({"options":{"layers":12}})");
    REQUIRE(reader.tensors().size() == 3);
    CHECK(reader.tensors()[0].name == "wte");
    CHECK(reader.tensor("wte").shape == std::vector<int64_t>{5, 7});
    CHECK(reader.tensor("norm").dtype == Dtype::bf16);
    CHECK(reader.tensor("norm").offset == 192);
    char bytes[10];
    reader.read(reader.tensor("wte"), 130, bytes, 10);
    for (int i = 0; i < 10; i++) CHECK((unsigned char)bytes[i] == 130 + i);
    reader.read(reader.tensor("norm"), 0, bytes, 6);
    CHECK(bytes[5] == 5);
    CHECK_REFUSED(reader.read(reader.tensor("wte"), 131, bytes, 10), "tensor wte has 140 bytes");
    CHECK_REFUSED(reader.read(reader.tensor("wte"), UINT64_MAX, bytes, 2), "tensor wte has 140 bytes");
    CHECK_REFUSED(reader.tensor("wpe"), "tensor wpe is missing; ");
}

TEST_CASE("the bytes are those of the description") {
    TemporaryFolder folder;
    std::string path = folder / "weights.bin";
    write_example(path);
    std::string file = contents(path);
    auto number = [&](size_t at) {
        uint64_t value;
        memcpy(&value, file.data() + at, 8);
        return value;
    };
    CHECK(file.substr(0, 8) == "\x89TGPT\r\n\x1a");
    CHECK(number(8) == 1);  // version, and zero
    uint64_t header_bytes = number(16), data_bytes = number(32);
    CHECK(header_bytes % 64 == 0);
    CHECK(data_bytes == 192 + 64 + 64);
    CHECK(file.size() == 64 + header_bytes + data_bytes);
    CHECK(number(24) == XXH3_64bits(file.data() + 64, header_bytes));
    CHECK(number(40) == XXH3_64bits(file.data() + 64 + header_bytes, data_bytes));
    CHECK(file[64] == '{');
    CHECK(file[64 + header_bytes + 192 + 5] == 5);
    write_example(path + "2");
    CHECK(contents(path + "2") == file);
}

TEST_CASE("pieces in any order make the same file") {
    TemporaryFolder folder;
    write_example(folder / "in order");
    std::string want = contents(folder / "in order");
    char bytes[140];
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (char)i;
    struct Piece {
        const char* name;
        size_t from, count;
    };
    std::vector<Piece> pieces = {{"scale", 0, 1}, {"scale", 1, 3}, {"norm", 0, 6}};
    for (size_t from = 0; from < sizeof bytes; from += 20) pieces.push_back({"wte", from, 20});
    for (uint32_t round = 0; round < 100; round++) {
        CAPTURE(round);
        std::shuffle(pieces.begin(), pieces.end(), std::mt19937(round));
        std::string path = folder / "shuffled";
        {
            WeightsWriter writer(path, {{"options", {{"layers", 12}}}}, example_table());
            for (size_t i = 0; i < pieces.size(); i++) {
                Piece piece = pieces[i], again = pieces[round % (i + 1)];
                CHECK_THROWS_AS(writer.commit(), Error);
                writer.write_at(piece.name, piece.from, bytes + piece.from, piece.count);
                CHECK_REFUSED(writer.write_at(again.name, again.from + again.count - 1, bytes, 1), "twice; ");
            }
            writer.commit();
        }
        CHECK((contents(path) == want));
        CHECK_NOTHROW(WeightsReader{path});
    }
}

TEST_CASE("an unfinished file is not there, and the one before stays") {
    TemporaryFolder folder;
    std::string path = folder / "weights.bin";
    { WeightsWriter writer(path, {{"options", 1}}, example_table()); }
    CHECK(folder.files().size() == 0);
    write_example(path);
    std::string before = contents(path);
    char bytes[140] = {};
    {
        WeightsWriter writer(path, {}, example_table());
        CHECK(folder.files().size() == 2);
        CHECK_REFUSED(WeightsWriter(path, {}, example_table()), "another process is writing it; ");
        CHECK_REFUSED(writer.write_at("other", 0, bytes, 6), "tensor other is not in the table, or ");
        CHECK_REFUSED(writer.write_at("wte", 0, bytes, 141),
                      "tensor wte is not in the table, or written bey");
        CHECK_REFUSED(writer.write_at("wte", 100, bytes, 41), "written beyond its end; ");
        CHECK_REFUSED(writer.write_at("wte", UINT64_MAX, bytes, 2), "written beyond its end; ");
        writer.write_at("wte", 0, bytes, 140);
        CHECK_REFUSED(writer.write_at("wte", 139, bytes, 1), "tensor wte: bytes from 139 on written twice; ");
        CHECK_REFUSED(writer.commit(), "tensor norm was not written, or not all of it; ");
    }
    CHECK(folder.files().size() == 1);
    CHECK(contents(path) == before);
}

TEST_CASE("places that cannot be written") {
    TemporaryFolder folder;
    CHECK_REFUSED(write_example(folder / "none/w.bin"), "/none/w.bin: cannot create it: No such file");
    fs::create_directory(folder / "w.bin");
    CHECK_REFUSED(write_example(folder / "w.bin"), "/w.bin: cannot ");
    CHECK(folder.files().size() == 1);
    std::vector<StoredTensor> vast = {{"vast", {1 << 30, 1 << 20}, Dtype::fp32}};
    CHECK_REFUSED(WeightsWriter(folder / "v.bin", {}, vast), "/v.bin: needs 4503599627.4 MB, and ");
    vast[0].shape = {1 << 30, 1 << 30, 1 << 30};
    CHECK_REFUSED(WeightsWriter(folder / "v.bin", {}, vast), "tensor vast has no size that can be stored; ");
    vast[0].shape = {4, 0};
    CHECK_REFUSED(WeightsWriter(folder / "v.bin", {}, vast), "tensor vast has no size that can be stored; ");
    CHECK(folder.files().size() == 1);

    // A limit on the size of files stands in for a disk that fills up while writing.
    rlimit old_limit, small_limit;
    getrlimit(RLIMIT_FSIZE, &old_limit);
    auto* old_handler = signal(SIGXFSZ, SIG_IGN);
    small_limit = old_limit;
    small_limit.rlim_cur = 500;
    setrlimit(RLIMIT_FSIZE, &small_limit);
    std::string message = error_of([&] { write_example(folder / "full.bin"); });
    setrlimit(RLIMIT_FSIZE, &old_limit);
    signal(SIGXFSZ, old_handler);
    INFO(message);
    CHECK(message.find("/full.bin: cannot write it: File too large; ") != std::string::npos);
    CHECK(folder.files().size() == 1);
}

TEST_CASE("full disk") {
    SmallDisk disk("256k");
    if (!disk.mounted) return;
    std::vector<StoredTensor> table = {{"wte", {32 * 1024}, Dtype::fp32}};
    std::vector<char> bytes(128 * 1024);
    CHECK_REFUSED(WeightsWriter(disk.folder / "w.bin", {}, {{"wte", {128 * 1024}, Dtype::fp32}}),
                  "w.bin: needs 0.5 MB");
    CHECK(disk.folder.files().empty());
    {
        WeightsWriter writer(disk.folder / "w.bin", {}, table);
        write_file(disk.folder / "other", std::string(160 * 1024, 'x'));  // fills up after the check
        CHECK_REFUSED(writer.write_at("wte", 0, bytes.data(), bytes.size()),
                      "w.bin: cannot write it: No space left");
    }
    CHECK(disk.folder.files() == std::vector<std::string>{"other"});
}

TEST_CASE("any flipped, missing or added byte is noticed") {
    TemporaryFolder folder;
    std::string path = folder / "weights.bin", damaged = folder / "damaged.bin";
    write_example(path);
    std::string file = contents(path);
    auto check = [&](const std::string& bytes) {
        write_file(damaged, bytes);
        std::string message = error_of([&] { WeightsReader reader(damaged); });
        INFO(message);
        CHECK(message.starts_with(damaged + ": "));
    };
    for (size_t at = 0; at < file.size(); at++) {
        std::string copy = file;
        copy[at] = (char)(copy[at] ^ 0x10);
        check(copy);
    }
    for (size_t size = 0; size < file.size(); size++) check(file.substr(0, size));
    check(file + '\0');
    check(file + file);
}

TEST_CASE("files of another kind") {
    TemporaryFolder folder;
    std::string path = folder / "w.bin";
    CHECK_REFUSED(WeightsReader{path}, "w.bin: cannot open it: No such file or directory; check the path");
    CHECK_REFUSED(WeightsReader{folder.path}, "is a folder; ");
    write_file(path, "short");
    CHECK_REFUSED(WeightsReader{path}, "too short for a weights file; ");
    write_file(path, std::string(1000, 'x'));
    CHECK_REFUSED(WeightsReader{path}, "not a weights file (wrong magic); ");
    write_example(path);
    std::string file = contents(path);
    file[8] = 2;
    write_file(path, file);
    CHECK_REFUSED(WeightsReader{path}, "weights format 2, and this program reads format 1; ");
}

TEST_CASE("hostile headers with right checksums") {
    TemporaryFolder folder;
    std::string path = folder / "w.bin";
    auto check = [&](const std::string& header, const char* words) {
        forge(path, header, std::string(128, 'd'));
        CHECK_REFUSED(WeightsReader{path}, words);
    };
    auto accept = [&](const std::string& header, size_t data_bytes) {
        forge(path, header, std::string(data_bytes, 'd'));
        CHECK_NOTHROW(WeightsReader{path});
    };
    auto table = [](const std::string& rows) { return "{\"tensors\": [" + rows + "]}"; };
    const std::string a = R"({"name":"a","dtype":"fp32","shape":[2,4],"offset":0,"bytes":32})";
    auto b = [](const char* name, const char* shape, const char* offset, const char* bytes) {
        return text(R"(,{"name":"%s","dtype":"bf16","shape":%s,"offset":%s,"bytes":%s})", name, shape, offset,
                    bytes);
    };
    const char* damaged = "overlaps another, leaves a hole, ends beyond the data or is there twice; ";
    accept(table(a + b("b", "[4]", "64", "8")), 128);
    check(table(a + b("a", "[4]", "64", "8")), damaged);    // twice
    check(table(a + b("b", "[4]", "0", "8")), damaged);     // overlap
    check(table(a + b("b", "[4]", "32", "8")), damaged);    // not aligned
    check(table(a + b("b", "[4]", "128", "8")), damaged);   // hole
    check(table(a + b("b", "[40]", "64", "80")), damaged);  // beyond the end
    check(table(a + b("b", "[33]", "64", "66")), damaged);  // just beyond the end
    check(table(a), "data beyond the last tensor; ");       // trailing
    check(table(""), "data beyond the last tensor; ");
    accept(table(""), 0);
    check(table(a + b("b", "[4]", "64", "16")), "do not agree with its shape; ");
    check(table(a + b("b", "[4,-1]", "64", "8")), "shape is -1; it must be a whole number from 1 to");
    check(table(a + b("b", "[4,0]", "64", "8")), "shape is 0; ");
    check(table(a + b("b", "[4.5]", "64", "8")), "shape is 4.5; ");
    check(table(a + b("b", "[4294967296,4294967296,4]", "64", "8")),
          "do not agree with its shape; ");  // overflow
    check(table(a + b("b", "[9223372036854775807,2]", "64", "8")), "do not agree with its shape; ");
    check(table(a + b("b", "4", "64", "8")), "shape is missing or of the wrong type; ");
    check(table(a + b("b", "[4]", "-64", "8")), "offset is -64; ");
    check(table(a + b("b", "[4]", "18446744073709551615", "8")), "offset is 18446744073709551615; ");
    check(table(a + b("b", "[4]", "\"64\"", "8")), "offset is \"64\"; ");
    check(table(a + b("b", "[4]", "64", "1e1")), "bytes is 10.0; ");
    check(table(a + b("b\\n\\u001b[2J", "[4]", "0", "8")), "tensor b??[2J ");
    check(table(a + R"(,{"name":"b","dtype":"fp8","shape":[4],"offset":64,"bytes":8})"), "dtype fp8; ");
    check(table(a + R"(,{"name":"b","shape":[4],"offset":64,"bytes":8})"), "dtype is missing");
    check(table(a + R"(,{"name":7,"dtype":"bf16","shape":[4],"offset":64,"bytes":8})"),
          "tensor 1 of the table: name ");
    check(table("7"), "tensor 0 of the table: not a JSON object; ");
    check("[]", "header has no table of tensors; ");
    check("{\"tensors\": {}}", "header has no table of tensors; ");
    check("", "not valid JSON at byte ");
    check("{\"tensors\": [", "not valid JSON at byte ");
    check(std::string(100000, '['), "nested more than 32 deep; ");
    check(std::string(100, '\0'), "not valid JSON at byte ");
}
