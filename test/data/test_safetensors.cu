// safetensors: files of the reference packages are read and written byte for byte, and everything that the
// format forbids is refused with its reason.
#include <cmath>
#include <iterator>
#include <limits>

#include "data/exchange/safetensors.h"
#include "data/exchange/safetensors_writer.h"
#include "test/support/file_testing.h"

static const std::string golden = "test/golden/safetensors/";

// The values that make_safetensors.py gives a tensor.
static std::vector<float> ramp(int n) {
    std::vector<float> values((size_t)n);
    for (int i = 0; i < n; i++) values[(size_t)i] = (float)(i - n / 2) / 8;
    return values;
}

static std::vector<float> floats(SafetensorsReader& reader, const std::string& name) {
    const SafeTensor* tensor = reader.find(name);
    REQUIRE(tensor);
    std::vector<float> values(tensor->size());
    reader.read_floats(*tensor, 0, values.size(), values.data());
    return values;
}

static std::vector<float> floats(SafetensorsFolder& folder, const std::string& name) {
    REQUIRE(folder.find(name));
    std::vector<float> values(folder.find(name)->size());
    folder.read_floats(name, 0, values.size(), values.data());
    return values;
}

// A file with this header and `data_bytes` bytes after it.
static std::string file_of(const std::string& header, size_t data_bytes) {
    uint64_t length = header.size();
    return std::string((const char*)&length, sizeof length) + header + std::string(data_bytes, 'd');
}

static std::string row(const std::string& name, const std::string& dtype, const std::string& shape,
                       const std::string& offsets) {
    return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
           ",\"data_offsets\":" + offsets + "}";
}

TEST_CASE("a file of the safetensors package is read") {
    SafetensorsReader reader(golden + "mixed.safetensors");
    CHECK(reader.tensors().size() == 8);
    CHECK(floats(reader, "single") == ramp(6));
    CHECK(floats(reader, "double") == ramp(5));
    CHECK(floats(reader, "half") == ramp(9));
    CHECK(floats(reader, "brain") == ramp(7));
    CHECK(floats(reader, "scalar") == std::vector<float>{2.5f});
    CHECK(floats(reader, "nothing").empty());
    CHECK(reader.find("nothing")->shape == std::vector<uint64_t>{0, 4});
    CHECK(reader.find("scalar")->shape.empty());
    CHECK(reader.find("absent") == nullptr);
    CHECK(reader.find("mask")->dtype == "BOOL");
    CHECK_REFUSED(floats(reader, "positions"), "tensor positions has dtype I64; ");
    CHECK_REFUSED(floats(reader, "mask"), "tensor mask has dtype BOOL; ");
    float values[3];
    reader.read_floats(*reader.find("half"), 4, 3, values);
    CHECK(values[2] == ramp(9)[6]);
    CHECK_REFUSED(reader.read_floats(*reader.find("half"), 7, 3, values),
                  "tensor half has 9 elements, but more ");
    CHECK_REFUSED(reader.read_floats(*reader.find("half"), UINT64_MAX, 2, values),
                  "half has 9 elements, but more ");
    reader.close();  // the next read reopens it
    CHECK(floats(reader, "brain") == ramp(7));
}

TEST_CASE("half precision, every value") {
    for (uint32_t bits = 0; bits < 65536; bits++) {
        int exponent = (int)(bits >> 10 & 31);
        double fraction = bits & 1023, sign = bits & 0x8000 ? -1 : 1;
        float value = half_to_float((uint16_t)bits);
        if (exponent == 31 && fraction > 0) {
            CHECK(std::isnan(value));
            continue;
        }
        double want = exponent == 31  ? std::numeric_limits<double>::infinity()
                      : exponent == 0 ? std::ldexp(fraction, -24)
                                      : std::ldexp(1024 + fraction, exponent - 25);
        CHECK(value == (float)(sign * want));
        CHECK(std::signbit(value) == (sign < 0));
    }
}

TEST_CASE("shards of huggingface_hub are read") {
    SafetensorsFolder folder(golden + "sharded");
    CHECK(folder.names() ==
          std::vector<std::string>{"h.0.bias", "h.0.norm", "h.1.fc", "h.1.norm", "wte.weight"});
    for (int round = 0; round < 2; round++) {  // back and forth between the files
        CHECK(floats(folder, "wte.weight") == ramp(20));
        CHECK(floats(folder, "h.1.fc") == ramp(16));
        CHECK(floats(folder, "h.0.bias") == ramp(3));
    }
    CHECK(folder.find("h.2.fc") == nullptr);
    float value;
    CHECK_REFUSED(folder.read_floats("h.2.fc", 0, 1, &value), "tensor h.2.fc is missing; ");
    SafetensorsFolder single(golden + "bf16");
    CHECK(floats(single, "wte.weight") == ramp(20));
}

// Writes a tensor in pieces.
static void append(SafetensorsWriter& writer, const std::string& name, int size, int piece = 3) {
    std::vector<float> values = ramp(size);
    for (int first = 0; first < size; first += piece) {
        int count = std::min(piece, size - first);
        writer.append(name, (uint64_t)first, (uint64_t)count, values.data() + first);
    }
}

TEST_CASE("what is written is what the reference packages write") {
    TemporaryFolder folder;
    std::vector<NamedShape> tensors = {{"wte.weight", {5, 4}}, {"h.0.norm", {4}}, {"h.0.bias", {3}}};
    for (Dtype dtype : {Dtype::fp32, Dtype::bf16}) {
        std::string name = dtype_name(dtype);
        SafetensorsWriter writer(folder / name, tensors, dtype);
        append(writer, "h.0.bias", 3);
        append(writer, "wte.weight", 20);
        append(writer, "h.0.norm", 4);
        writer.commit();
        CHECK((contents(folder / name + "/model.safetensors") ==
               contents(golden + name + "/model.safetensors")));
    }
    tensors.push_back({"h.1.norm", {4}});
    tensors.push_back({"h.1.fc", {4, 4}});
    {
        SafetensorsWriter writer(folder / "sharded", tensors, Dtype::fp32, 64);
        append(writer, "h.1.fc", 16);
        append(writer, "h.1.norm", 4, 4);
        append(writer, "wte.weight", 20, 7);
        append(writer, "h.0.norm", 4, 1);
        append(writer, "h.0.bias", 3);
        writer.commit();
    }
    int files = 0;
    for (const auto& entry : fs::directory_iterator(golden + "sharded")) {
        std::string name = entry.path().filename(), ours = contents(folder / "sharded/" + name);
        CAPTURE(name);
        if (name.ends_with(".json"))
            CHECK(nlohmann::json::parse(ours) == nlohmann::json::parse(contents(entry.path())));
        else
            CHECK((ours == contents(entry.path())));
        files++;
    }
    CHECK(files == 4);
    CHECK(std::distance(fs::directory_iterator(folder / "sharded"), {}) == files);
}

TEST_CASE("many elements, odd shapes and any name come back") {
    TemporaryFolder folder;
    std::vector<float> values(700'000);  // more than one read or write covers
    for (size_t i = 0; i < values.size(); i++) values[i] = (float)(i % 251) / 4;
    const std::string odd = "quote \" slash \\ \n and \xc3\xa9";
    std::vector<NamedShape> tensors = {{"long", {7, 100'000}}, {odd, {2}}, {"scalar", {}}, {"none", {3, 0}}};
    for (Dtype dtype : {Dtype::fp32, Dtype::bf16}) {
        std::string place = folder / dtype_name(dtype);
        SafetensorsWriter writer(place, tensors, dtype);
        writer.append("long", 0, values.size(), values.data());
        writer.append(odd, 0, 2, values.data() + 5);
        writer.append("scalar", 0, 1, values.data() + 9);
        writer.commit();
        SafetensorsFolder reader(place);
        CHECK((floats(reader, "long") == values));
        CHECK(floats(reader, odd) == std::vector<float>{1.25f, 1.5f});
        CHECK(floats(reader, "scalar") == std::vector<float>{2.25f});
        CHECK(floats(reader, "none").empty());
        std::string bytes = contents(place + "/model.safetensors");
        uint64_t header;
        memcpy(&header, bytes.data(), sizeof header);
        CHECK(header % 8 == 0);
        CHECK(bytes[8] == '{');
    }
    SafetensorsWriter empty(folder / "empty", {}, Dtype::fp32);
    empty.commit();
    CHECK(SafetensorsFolder(folder / "empty").names().empty());
}

TEST_CASE("nothing is left of what was not finished") {
    TemporaryFolder folder;
    std::vector<NamedShape> tensors = {{"a", {4}}, {"b", {4}}};
    float values[4] = {1, 2, 3, 4};
    {
        SafetensorsWriter writer(folder / "model", tensors, Dtype::fp32, 16);
        writer.append("a", 0, 4, values);
        writer.append("b", 0, 3, values);
        CHECK_REFUSED(writer.append("c", 0, 1, values), "tensor c is not in the table; ");
        CHECK_REFUSED(writer.append("b", 2, 2, values),
                      "tensor b: elements from 2 on are beyond its end or out of order; ");
        CHECK_REFUSED(writer.append("b", 3, 2, values),
                      "tensor b: elements from 3 on are beyond its end or out of order; ");
        CHECK_REFUSED(writer.append("b", UINT64_MAX, 2, values), "are beyond its end or out of order; ");
        CHECK_REFUSED(writer.commit(), "model-00002-of-00002.safetensors: 1 elements were not written; ");
        CHECK(!fs::exists(folder / "model/model-00001-of-00002.safetensors"));
    }
    CHECK(folder.files().empty());
    for (const char* there :
         {"model.safetensors", "model-00001-of-00009.safetensors", "model.safetensors.index.json"}) {
        fs::create_directory(folder / "model");
        write_file(folder / "model/" + there, "theirs");
        CHECK_REFUSED(SafetensorsWriter(folder / "model", tensors, Dtype::fp32),
                      std::string(there) + ": already exists; ");
        CHECK(contents(folder / "model/" + there) == "theirs");
        fs::remove_all(folder / "model");
    }
    write_file(folder / "file", "");
    CHECK_REFUSED(SafetensorsWriter(folder / "file", tensors, Dtype::fp32), "cannot make the folder: ");
    auto refuse = [&](std::vector<NamedShape> table, const char* words) {
        CHECK_REFUSED(SafetensorsWriter(folder / "model", table, Dtype::fp32), words);
    };
    refuse({{"a", {4}}, {"a", {4}}}, "tensor a: its name is already taken; ");
    refuse({{"__metadata__", {4}}}, "tensor __metadata__: its name is already taken; ");
    refuse({{"a", {1ull << 32, 1ull << 31}}}, "tensor a is too large to be stored; ");
    refuse({{"a", {1ull << 60}}, {"b", {1ull << 60}}}, "tensor b is too large to be stored; ");
    refuse({{"a", {1ull << 48}}}, "needs 1125899906.8 MB");
    CHECK(folder.files() == std::vector<std::string>{"file"});
}

TEST_CASE("full disk") {
    SmallDisk disk("64k");
    if (!disk.mounted) SKIP("a small tmpfs cannot be mounted here");
    std::vector<float> values(8 * 1024);
    CHECK_REFUSED(SafetensorsWriter(disk.folder / "m", {{"a", {1 << 16}}}, Dtype::fp32), "needs 0.3 MB");
    {
        SafetensorsWriter writer(disk.folder / "m", {{"a", {values.size()}}}, Dtype::fp32);
        write_file(disk.folder / "other", std::string(48 * 1024, 'x'));  // fills the disk after the check
        CHECK_REFUSED(writer.append("a", 0, values.size(), values.data()), "cannot write it: No space left");
    }
    CHECK(disk.folder.files() == std::vector<std::string>{"other"});
}

// ----------------------------------------------------------------------------
// refusals of a reader

struct Refusals {
    TemporaryFolder folder;
    std::string path = folder / "m.safetensors";

    void check(const std::string& bytes, const std::string& reason) {
        write_file(path, bytes);
        CAPTURE(bytes.substr(0, 200));
        check_error(error_of([&] { SafetensorsReader reader(path); }), path, reason);
    }
    void check_header(const std::string& header, size_t data_bytes, const std::string& reason) {
        check(file_of(header, data_bytes), reason);
    }
    size_t tensors(const std::string& header, size_t data_bytes) {
        write_file(path, file_of(header, data_bytes));
        return SafetensorsReader(path).tensors().size();
    }
};

TEST_CASE_FIXTURE(Refusals, "the size of the header") {
    check("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
          "only a git-lfs pointer to the file; get the file itself with `git lfs pull`");
    for (size_t size : {0, 1, 7}) check(std::string(size, '\0'), "too short for a safetensors file; ");
    check(std::string(8, '\0'), "header is not a JSON object; ");
    auto with_length = [&](uint64_t length, const std::string& rest) {
        return std::string((const char*)&length, sizeof length) + rest;
    };
    check(with_length(100'000'001, "{}"), "a header of 100000001 bytes, but at most 100000000 are allowed; ");
    check(with_length(UINT64_MAX, "{}"), "a header of 18446744073709551615 bytes, but at most ");
    check(with_length(100'000'000, "{}"), "a header of 100000000 bytes does not fit into the file; ");
    check(with_length(3, "{}"), "a header of 3 bytes does not fit into the file; ");
    CHECK(tensors("{}", 0) == 0);
}

TEST_CASE_FIXTURE(Refusals, "white space around the header") {
    std::string a = "{" + row("a", "I32", "[2,2]", "[0,16]") + "}";
    CHECK(tensors(a, 16) == 1);
    CHECK(tensors(a + "\r \t\n", 16) == 1);
    CHECK(tensors("\t\n " + a, 16) == 1);
    CHECK(tensors("{}\r \t\n", 0) == 0);
    check_header("    ", 0, "header is not a JSON object; ");
    check_header(a + std::string(2, '\0'), 16,
                 "header is not a JSON object; ");                          // padded with the wrong byte
    check_header("\xef\xbb\xbf" + a, 16, "header is not a JSON object; ");  // a byte order mark
    check_header(a + "x", 16, "header is not valid JSON at byte ");
    check_header(a + a, 16, "header is not valid JSON at byte ");
}

TEST_CASE_FIXTURE(Refusals, "what is not the JSON of a header") {
    std::string good = row("a", "F32", "[2]", "[0,8]");
    check_header("[]", 0, "header is not a JSON object; ");
    check_header("7", 0, "header is not a JSON object; ");
    check_header("{" + good, 8, "header is not valid JSON at byte ");
    check_header("{" + good + ",}", 8, "header is not valid JSON at byte ");
    check_header("{" + row("a\xff", "F32", "[2]", "[0,8]") + "}", 8, "header is not valid JSON at byte ");
    check_header("{" + row("a\xc0\xaf", "F32", "[2]", "[0,8]") + "}", 8, "header is not valid JSON at byte ");
    check_header("{" + row("a\n", "F32", "[2]", "[0,8]") + "}", 8, "header is not valid JSON at byte ");
    const struct {
        const char* header;
        size_t data_bytes;
        const char* reason;
    } rows[] = {
        {R"({"a":7})", 0, "\"a\" is a number in the header; "},
        {R"({"a":null})", 0, "\"a\" is null in the header; "},
        {R"({"a":[]})", 0, "\"a\" is an array in the header; "},
        {R"({"a":"F32"})", 0, "\"a\" is a string in the header; "},
        {R"({"a":{}})", 0, "\"a\" lacks one of dtype, shape and data_offsets in the header; "},
        {R"({"a":{"dtype":"F32","shape":[2]}})", 8, "\"a\" lacks one of dtype, "},
        {R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", 8, "\"a\" lacks one of dtype, "},
        {R"({"a":{"shape":[2],"data_offsets":[0,8]}})", 8, "\"a\" lacks one of dtype, "},
        {R"({"a":{"dtype":7,"shape":[2],"data_offsets":[0,8]}})", 8, "\"a\": dtype is a number in the "},
        {R"({"a":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}})", 8, "\"a\": dtype is an array in "},
        {R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", 8, "\"a\": shape is a number in the "},
        {R"({"a":{"dtype":"F32","shape":{},"data_offsets":[0,8]}})", 8, "\"a\": shape is an object in "},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":"0"}})", 8, "\"a\": data_offsets is a string in"},
        {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", 8,
         "\"a\" has a field that is not dtype, shape or data_offsets in the header; "},
    };
    for (auto& bad : rows) check_header(bad.header, bad.data_bytes, bad.reason);
    for (const char* two : {"[]", "[0]", "[0,8,8]"})
        check_header("{" + row("a", "F32", "[2]", two) + "}", 8,
                     "\"a\" has data_offsets that are not two numbers");
    for (const char* dtype : {"F31", "f32", "float32", "", "F32 "})
        check_header("{" + row("a", dtype, "[2]", "[0,8]") + "}", 8,
                     std::string("dtype ") + dtype + " is not known; ");
}

TEST_CASE_FIXTURE(Refusals, "numbers that are no sizes") {
    auto shape = [&](const char* number, const char* reason) {
        check_header("{" + row("a", "F32", std::string("[") + number + "]", "[0,8]") + "}", 8, reason);
    };
    shape("-2", "\"a\": shape is a negative number in the header; ");
    shape("-0", "\"a\": shape is a negative number in the header; ");
    shape("2.0", "\"a\": shape is a number that is too large or not whole in the header; ");
    shape("2e0", "\"a\": shape is a number that is too large or not whole in the header; ");
    shape("18446744073709551616", "\"a\": shape is a number that is too large or not whole in the header; ");
    shape("1e999", "header is not valid JSON (");
    shape("\"2\"", "\"a\": shape is a string in the header; ");
    shape("true", "\"a\": shape is true or false in the header; ");
    shape("null", "\"a\": shape is null in the header; ");
    shape("[2]", "\"a\": shape is an array in the header; ");
    shape("{}", "\"a\": shape is an object in the header; ");
    shape("02", "header is not valid JSON at byte ");
    check_header("{" + row("a", "F32", "[2]", "[-1,7]") + "}", 8,
                 "\"a\": data_offsets is a negative number in ");
    check_header("{" + row("a", "F32", "[2]", "[0.5,8]") + "}", 8,
                 "\"a\": data_offsets is a number that is too large or not whole ");
}

TEST_CASE_FIXTURE(Refusals, "keys that are there twice") {
    std::string a = row("a", "F32", "[2]", "[0,8]");
    check_header("{" + a + "," + row("a", "F32", "[2]", "[8,16]") + "}", 16,
                 "\"a\" is in the header twice; ");
    check_header("{" + a + "," + row("\\u0061", "F32", "[2]", "[8,16]") + "}", 16,
                 "\"a\" is in the header twice; ");
    check_header(R"({"__metadata__":{},"__metadata__":{}})", 0, "\"__metadata__\" is in the header twice; ");
    check_header(R"({"__metadata__":{"k":"1","k":"2"}})", 0,
                 "\"__metadata__\" has a field twice in the header; ");
    for (const char* again : {R"("dtype":"F32")", R"("shape":[2])", R"("data_offsets":[0,8])"}) {
        check_header("{" + a.substr(0, a.size() - 1) + "," + again + "}}", 8,
                     "\"a\" has a field twice in the header; ");
    }
}

TEST_CASE_FIXTURE(Refusals, "metadata that is not text") {
    for (const char* value : {"7", "-7", "0.5", "true", "null", "[]", "{}", "[\"a\"]"}) {
        check_header(std::string(R"({"__metadata__":{"k":)") + value + "}}", 0, "__metadata__: \"k\" is ");
    }
    check_header(R"({"__metadata__":"text"})", 0, "\"__metadata__\" is a string in the header; ");
    check_header(R"({"__metadata__":[]})", 0, "\"__metadata__\" is an array in the header; ");
    CHECK(tensors(R"({"__metadata__":{"k":"v","dtype":""}})", 0) == 0);
}

TEST_CASE_FIXTURE(Refusals, "nesting") {
    for (const char* open : {"[", "{\"a\":", "{\"a\":{\"shape\":["}) {
        std::string deep;
        while (deep.size() < 10'000'000) deep += open;
        check_header(deep, 0, "header");
        check_header("{\"a\":" + deep, 0, "in the header; ");
    }
    // a million of these would take the parser minutes
    std::string objects = "{}";
    for (int i = 0; i < 20; i++) objects += ",{}";
    check_header("{\"a\":{\"shape\":[" + objects + "]}}", 0,
                 "\"a\" is too deep or has too many values in the header; ");
}

TEST_CASE_FIXTURE(Refusals, "holes, overlaps and runs backwards") {
    auto two = [&](const char* first, const char* second, size_t data_bytes, const char* name) {
        check_header("{" + row("a", "F32", "[2]", first) + "," + row("b", "F32", "[2]", second) + "}",
                     data_bytes, std::string("tensor ") + name + ": data_offsets ");
    };
    CHECK(tensors("{" + row("a", "F32", "[2]", "[8,16]") + "," + row("b", "F32", "[2]", "[0,8]") + "}", 16) ==
          2);
    two("[4,12]", "[12,20]", 20, "a");  // does not begin at 0
    two("[0,8]", "[12,20]", 20, "b");   // a hole
    two("[0,8]", "[4,12]", 12, "b");    // an overlap
    two("[0,8]", "[0,8]", 8, "b");      // both have the same bytes
    two("[0,8]", "[0,8]", 16, "b");     // and with the right size
    two("[0,8]", "[8,0]", 16, "b");     // backwards
    two("[0,8]", "[8,18446744073709551608]", 16, "b");
    two("[0,8]", "[18446744073709551608,18446744073709551615]", 16, "b");
    check_header("{" + row("a", "F32", "[2]", "[8,0]") + "}", 8,
                 "tensor a: data_offsets [8, 0] leave a hole, ");
}

TEST_CASE_FIXTURE(Refusals, "sizes that do not agree") {
    auto one = [&](const char* dtype, const char* shape, const char* offsets, size_t data_bytes,
                   const char* reason) {
        check_header("{" + row("a", dtype, shape, offsets) + "}", data_bytes,
                     std::string("tensor a: ") + reason);
    };
    one("F32", "[2,18446744073709551614]", "[0,16]", 16, "shape overflows 64 bits; ");
    one("F32", "[4294967296,4294967296,0]", "[0,0]", 0, "shape overflows 64 bits; ");
    one("F64", "[288230376151711744]", "[0,16]", 16, "shape overflows 64 bits; ");  // 2^58 * 64 bits
    one("F32", "[3]", "[0,8]", 8, "data_offsets [0, 8] hold 8 bytes, but its shape needs 12; ");
    one("F16", "[2]", "[0,8]", 8, "data_offsets [0, 8] hold 8 bytes, but its shape needs 4; ");
    one("F32", "[0]", "[0,8]", 8, "data_offsets [0, 8] hold 8 bytes, but its shape needs 0; ");
    one("F32", "[]", "[0,0]", 0, "data_offsets [0, 0] hold 0 bytes, but its shape needs 4; ");
    one("F4", "[3]", "[0,1]", 1, "12 bits of F4 are not a whole number of bytes; ");
    one("F6_E2M3", "[2]", "[0,2]", 2, "12 bits of F6_E2M3 are not a whole number of bytes; ");
    for (auto [dtype, bits] : std::vector<std::pair<const char*, size_t>>{
             {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
             {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
             {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
             {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
             {"I64", 64},        {"U64", 64}}) {
        CAPTURE(dtype);
        std::string offsets = "[0," + std::to_string(bits) + "]";
        CHECK(tensors("{" + row("a", dtype, "[4,2]", offsets) + "}", bits) == 1);
        one(dtype, "[8,2]", offsets.c_str(), bits, "data_offsets ");
    }
}

TEST_CASE_FIXTURE(Refusals, "files cut short, and more behind the tensors") {
    std::string a = "{" + row("a", "I32", "[2,2]", "[0,16]") + "}";
    check_header(a, 14, "14 bytes after the header, but the tensors have 16: it is cut short; ");
    check_header(a, 0, "0 bytes after the header, but the tensors have 16: it is cut short; ");
    check(file_of(a, 16) + "extra_bogus_data_for_polyglot_file",
          "the tensors have 16: something else follows them; ");
    check_header("{}", 1, "1 bytes after the header, but the tensors have 0: something else follows them; ");
    std::string good = file_of(a, 16);
    for (size_t size = 0; size < good.size(); size++) check(good.substr(0, size), "");
}

TEST_CASE_FIXTURE(Refusals, "files that are none, or change") {
    check_error(error_of([&] { SafetensorsReader reader(folder / "none"); }), folder / "none",
                "cannot open it: ");
    check_error(error_of([&] { SafetensorsReader reader(folder.path); }), folder.path, "is a folder");
    std::string a = "{" + row("a", "F32", "[2]", "[0,8]") + "}";
    write_file(path, file_of(a, 8));
    SafetensorsReader reader(path);
    fs::resize_file(path, fs::file_size(path) - 1);
    CHECK_REFUSED(floats(reader, "a"), "was truncated while being read; ");
    reader.close();
    CHECK_REFUSED(floats(reader, "a"), "changed while being read; ");
}

// ----------------------------------------------------------------------------
// the index of a model in shards

struct Shards {
    TemporaryFolder folder;
    std::string path = folder / "model.safetensors.index.json";

    Shards() {
        write_file(folder / "x.safetensors", file_of("{" + row("a", "F32", "[2]", "[0,8]") + "," +
                                                         row("b", "F32", "[1]", "[8,12]") + "}",
                                                     12));
        write_file(folder / "y.safetensors", file_of("{" + row("c", "F32", "[2]", "[0,8]") + "}", 8));
    }
    void check(const std::string& index, const std::string& reason) {
        write_file(path, index);
        CAPTURE(index);
        check_error(error_of([&] { SafetensorsFolder model(folder.path); }), path, reason);
    }
    void check_map(const std::string& map, const std::string& reason) {
        check("{\"weight_map\":{" + map + "}}", reason);
    }
};

TEST_CASE_FIXTURE(Shards, "an index and its shards agree") {
    const std::string map = R"("a":"x.safetensors","b":"x.safetensors","c":"y.safetensors")";
    auto names = [&](const std::string& index) {
        write_file(path, index);
        return SafetensorsFolder(folder.path).names();
    };
    std::vector<std::string> all = {"a", "b", "c"};
    CHECK(names("{\"weight_map\":{" + map + "}}") == all);
    CHECK(names("{\"metadata\":{},\"weight_map\":{" + map + "}}") == all);
    CHECK(names("{\"metadata\":{\"total_size\":20,\"total_parameters\":5},\"weight_map\":{" + map + "}}") ==
          all);
    // a wrong total, as some tools leave it when they convert a model
    for (const char* total : {"21", "\"20\"", "0.5"}) {
        CHECK(names("{\"metadata\":{\"total_size\":" + std::string(total) + "},\"weight_map\":{" + map +
                    "}}") == all);
    }
}

TEST_CASE_FIXTURE(Shards, "an index and its shards differ") {
    const std::string a = R"("a":"x.safetensors",)", b = R"("b":"x.safetensors",)",
                      c = R"("c":"y.safetensors")";
    check_map(a + c, "tensor b of " + folder.path + "/x.safetensors is not in the weight_map; ");
    check_map(a + b + R"("d":"x.safetensors",)" + c, "tensor d is not in x.safetensors; ");
    check_map(a + b + R"("c":"x.safetensors")", "tensor c is not in x.safetensors; ");
    check_map(a + R"("b":"y.safetensors",)" + c, "tensor b is not in y.safetensors; ");
}

TEST_CASE_FIXTURE(Shards, "shards that are missing, damaged or hold the same tensor") {
    write_file(path, R"({"weight_map":{"a":"z.safetensors"}})");
    CHECK_REFUSED(SafetensorsFolder{folder.path}, "/z.safetensors: cannot open it: No such file");
    write_file(folder / "z.safetensors", file_of("{" + row("a", "F32", "[2]", "[0,8]") + "}", 7));
    CHECK_REFUSED(SafetensorsFolder{folder.path}, "/z.safetensors: 7 bytes after the header, ");
    write_file(folder / "z.safetensors", file_of("{" + row("a", "F32", "[2]", "[0,8]") + "}", 8));
    write_file(path, R"({"weight_map":{"a":"x.safetensors","b":"x.safetensors","d":"z.safetensors"}})");
    CHECK_REFUSED(SafetensorsFolder{folder.path},
                  "/z.safetensors: tensor a is in another file of the model too; ");
}

TEST_CASE_FIXTURE(Shards, "names that leave the folder, and what is no index") {
    for (const char* name :
         {"\"../x.safetensors\"", "\"/etc/x.safetensors\"", "\"sub/x.safetensors\"", "\"x.bin\"", "\"\"",
          "\"..\"", "\"x\\u0000.safetensors\"", "7", "null", "[\"x.safetensors\"]"}) {
        check_map(std::string("\"a\":") + name, "weight_map: a is in ");
    }
    check("[]", "has no weight_map object; ");
    check("{}", "has no weight_map object; ");
    check(R"({"weight_map":[]})", "has no weight_map object; ");
    check(R"({"weight_map":)", "not valid JSON at byte ");
    check(std::string(100'000, '['), "nested more than 32 deep; ");
    write_file(path, "");
    fs::resize_file(path, 33 << 20);
    CHECK_REFUSED(SafetensorsFolder{folder.path}, " bytes; not the index of a model");
    fs::remove(path);
    CHECK_REFUSED(SafetensorsFolder{folder.path},
                  "neither model.safetensors nor model.safetensors.index.json; ");
    CHECK_REFUSED(SafetensorsFolder{folder / "none"}, "neither model.safetensors nor ");
}
