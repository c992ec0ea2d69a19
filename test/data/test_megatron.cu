// Data sets of Megatron-LM: reading them, and every way in which the two files can be wrong.
#include "test/support/file_testing.h"

#include "data/tokens/megatron_shards.h"
#include "kernels/random.cuh"

// An index as bytes. Pointers follow from the lengths unless given.
struct IndexFile {
    std::string magic = std::string("MMIDIDX\0\0", 9);
    uint64_t version = 1;
    uint8_t type = 8;
    std::vector<int32_t> lengths;
    std::vector<int64_t> documents = {};
    std::vector<int64_t> pointers = {};
    uint64_t sequence_count = UINT64_MAX, document_count = UINT64_MAX;  // by default, the real counts
    std::string tail = "";

    std::string bytes() const {
        std::string result = magic;
        auto append = [&](const void* data, size_t size) { result.append((const char*)data, size); };
        auto append_all = [&](const auto& numbers) {
            append(numbers.data(), numbers.size() * sizeof numbers[0]);
        };
        uint64_t counts[2] = {sequence_count == UINT64_MAX ? lengths.size() : sequence_count,
                              document_count == UINT64_MAX ? documents.size() : document_count};
        append(&version, 8), append(&type, 1), append(counts, 16);
        append_all(lengths);
        std::vector<int64_t> followed;
        int64_t at = 0;
        for (int32_t length : lengths) followed.push_back(at), at += (int64_t)length * (type == 8 ? 2 : 4);
        append_all(pointers.empty() ? followed : pointers);
        append_all(documents);
        return result + tail;
    }
};

template <typename Stored>
static std::string token_bytes(const std::vector<Stored>& tokens) {
    return {(const char*)tokens.data(), tokens.size() * sizeof(Stored)};
}

static std::vector<int> all_tokens(const MegatronData& data, int vocab) {
    std::vector<int> tokens((size_t)data.count(), -1);
    data.copy(0, data.count(), vocab, tokens.data());
    return tokens;
}

TEST_CASE("megatron: the bytes are those of Megatron-LM") {
    // the example of its indexed_dataset.py: two sequences, three document boundaries, uint16
    const unsigned char header[] = {0x4d, 0x4d, 0x49, 0x44, 0x49, 0x44, 0x58, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
                                    8,    2,    0,    0,    0,    0,    0,    0, 0, 3, 0, 0, 0, 0, 0, 0, 0};
    IndexFile index = {.lengths = {3, 2}, .documents = {0, 1, 2}};
    CHECK(index.bytes().substr(0, 34) == std::string((const char*)header, 34));
    CHECK(index.bytes().size() == 34 + 2 * 12 + 3 * 8);
}

TEST_CASE("megatron: tokens and documents, in both widths") {
    TemporaryFolder folder;
    for (bool wide : {false, true}) {
        CAPTURE(wide);
        // documents of two sequences, of none, of an empty one, of one
        IndexFile index = {
            .type = (uint8_t)(wide ? 4 : 8), .lengths = {3, 2, 0, 5}, .documents = {0, 2, 2, 3, 4}};
        std::vector<int> tokens = {1, 2, 3, 65535, 5, 6, 7, 8, 9, 10};
        if (wide) tokens[3] = 1 << 30;
        write_file(folder / "a.idx", index.bytes());
        write_file(folder / "a.bin", wide ? token_bytes(tokens)
                                          : token_bytes(std::vector<uint16_t>(tokens.begin(), tokens.end())));
        MegatronData data(folder / "a.idx");
        CHECK(data.path() == folder / "a.bin");
        CHECK(data.index_path() == folder / "a.idx");
        CHECK(data.count() == 10);
        CHECK(data.width() == (wide ? 4 : 2));
        CHECK(data.sequences() == 4);
        REQUIRE(data.documents() == 4);
        CHECK(all_tokens(data, INT32_MAX) == tokens);
        std::vector<std::pair<int64_t, int64_t>> spans;
        for (int64_t i = 0; i < 4; i++) spans.push_back({data.document(i).start, data.document(i).count});
        CHECK(spans == std::vector<std::pair<int64_t, int64_t>>{{0, 5}, {5, 0}, {5, 0}, {5, 5}});
        int three[3];
        data.copy(7, 3, 100, three);
        CHECK((three[0] == 8 && three[1] == 9 && three[2] == 10));
        check_error(error_of([&] { data.copy(2, 3, 65535, three); }), folder / "a.bin",
                    text("token 3 is %d, outside the vocabulary of 65535", tokens[3]));
    }
}

TEST_CASE("megatron: many documents") {
    TemporaryFolder folder;
    IndexFile index;
    std::vector<uint16_t> tokens;
    std::vector<int64_t> document_of;
    index.documents = {0};
    for (uint64_t document = 0; document < 500; document++) {
        for (uint32_t sequence = 0; sequence < philox(1, document).at[0] % 4; sequence++) {
            index.lengths.push_back((int32_t)(philox(2, document, sequence).at[0] % 5));
            for (int i = 0; i < index.lengths.back(); i++) {
                tokens.push_back((uint16_t)tokens.size());
                document_of.push_back((int64_t)document);
            }
        }
        index.documents.push_back((int64_t)index.lengths.size());
    }
    write_file(folder / "a.idx", index.bytes());
    write_file(folder / "a.bin", token_bytes(tokens));
    MegatronData data(folder / "a.idx");
    REQUIRE(data.documents() == 500);
    REQUIRE(data.count() == (int64_t)tokens.size());
    for (int64_t i = 0, next = 0; i < 500; i++) {
        auto [start, count] = data.document(i);
        REQUIRE(start == next);
        for (next += count; start < next; start++) REQUIRE(document_of.at((size_t)start) == i);
    }
    int64_t next = 0;
    for (int64_t i = 0; i < 500; i++) {
        CHECK(data.document(i).start == next);
        next += data.document(i).count;
    }
    CHECK(next == data.count());
}

TEST_CASE("megatron: negative tokens are outside every vocabulary") {
    TemporaryFolder folder;
    write_file(folder / "a.idx", IndexFile{.type = 4, .lengths = {2}, .documents = {0, 1}}.bytes());
    write_file(folder / "a.bin", token_bytes(std::vector<int>{1, -2}));
    MegatronData data(folder / "a.idx");
    check_error(error_of([&] { all_tokens(data, INT32_MAX); }), folder / "a.bin", "token 1 is -2, outside");
}

TEST_CASE("megatron: every fault of the index is one clear line") {
    TemporaryFolder folder;
    const IndexFile good = {.lengths = {3, 2}, .documents = {0, 1, 2}};
    const int64_t high = INT64_MIN;
    auto with = [&](auto&& change) {
        IndexFile index = good;
        change(index);
        return index.bytes();
    };
    auto of_type = [&](int code) { return with([&](IndexFile& i) { i.type = (uint8_t)code; }); };
    auto of_counts = [&](uint64_t sequences, uint64_t documents) {
        return with([&](IndexFile& i) { i.sequence_count = sequences, i.document_count = documents; });
    };
    auto of_pointers = [&](int64_t a, int64_t b) { return with([&](IndexFile& i) { i.pointers = {a, b}; }); };
    auto of_lengths = [&](std::vector<int32_t> l) { return with([&](IndexFile& i) { i.lengths = l; }); };
    auto of_documents = [&](std::vector<int64_t> d) { return with([&](IndexFile& i) { i.documents = d; }); };
    struct Fault {
        const char* what;
        std::string content, reason;
    };
    std::vector<Fault> faults = {
        {"empty", "", "is empty"},
        {"beginning of the magic", "MMID", "is truncated: 4 bytes, too few for its header"},
        {"part of the header", good.bytes().substr(0, 33), "is truncated: 33 bytes"},
        {"header only", good.bytes().substr(0, 34),
         "is truncated: 34 bytes, too few for the 2 sequences and 3"},
        {"one byte short", good.bytes().substr(0, good.bytes().size() - 1), "is truncated"},
        {"one byte more", good.bytes() + "x", "is too long: 1 bytes follow"},
        {"modes", good.bytes() + "xx", "multimodal"},
        {"text", std::string(5000, 'a'), "is not a Megatron-LM index"},
        {"shard of llm.c", shard_bytes({1, 2, 3}), "is not a Megatron-LM index"},
        {"last byte of the magic", with([](IndexFile& i) { i.magic[8] = 1; }), "is not a Megatron-LM index"},
        {"older format", std::string("TNTIDX\0\0", 8) + std::string(100, '\0'), "older format TNTIDX"},
        {"version 2", with([](IndexFile& i) { i.version = 2; }), "has version 2"},
        {"version 2^32+1", with([](IndexFile& i) { i.version = (1ull << 32) + 1; }),
         "has version 4294967297"},
        {"type 0", of_type(0), "unknown type 0"},
        {"type 9", of_type(9), "unknown type 9"},
        {"type 255", of_type(255), "unknown type 255"},
        {"uint8", of_type(1), "type uint8, but only uint16 and int32"},
        {"int8", of_type(2), "type int8"},
        {"int16", of_type(3), "type int16"},
        {"int64", of_type(5), "type int64"},
        {"float64", of_type(6), "type float64"},
        {"float32", of_type(7), "type float32"},
        {"more sequences", of_counts(3, 3), "is truncated"},
        {"more documents", of_counts(2, 4), "is truncated"},
        {"fewer sequences", of_counts(1, 3), "is too long: 12 bytes"},
        {"fewer documents", of_counts(2, 2), "is too long: 8 bytes"},
        {"12 * count overflows", of_counts((1ull << 62) + 2, 3), "is truncated"},
        {"8 * count overflows", of_counts(2, (1ull << 61) + 3), "is truncated"},
        {"largest counts", of_counts(UINT64_MAX - 1, UINT64_MAX - 1), "is truncated"},
        {"counts that cancel out", of_counts((1ull << 63) + 2, (1ull << 62) + 3), "is truncated"},
        {"no sequences", IndexFile{.lengths = {}, .documents = {0}}.bytes(), "has no sequences"},
        {"no documents", of_documents({}), "has no documents"},
        {"one border", of_documents({0}), "has no documents"},
        {"negative length", of_lengths({3, -1}), "sequence 1 has -1 tokens"},
        {"smallest length", of_lengths({INT32_MIN, 3}), "sequence 0 has -2147483648 tokens"},
        {"first pointer", of_pointers(2, 6), "sequence 0 begins at byte 2, but should begin at 0"},
        {"a gap", of_pointers(0, 8), "sequence 1 begins at byte 8, but should begin at 6"},
        {"overlap", of_pointers(0, 4), "sequence 1 begins at byte 4"},
        {"pointers in tokens", of_pointers(0, 3), "sequence 1 begins at byte 3"},
        {"negative pointer", of_pointers(0, -6), "sequence 1 begins at byte -6"},
        {"smallest pointer", of_pointers(high, 6), "sequence 0 begins at byte -9223372036854775808"},
        {"no tokens", of_lengths({0, 0}), "has no tokens"},
        {"first document", of_documents({1, 1, 2}), "document boundary 0 is 1"},
        {"last document", of_documents({0, 1, 1}), "document boundary 2 is 1"},
        {"last document", of_documents({0, 1, 3}), "document boundary 2 is 3"},
        {"backwards", of_documents({0, 2, 1, 2}), "document boundary 2 is 1, but the previous one is 2"},
        {"beyond the end", of_documents({0, 3, 2}), "document boundary 1 is 3"},
        {"negative", of_documents({0, -1, 2}), "document boundary 1 is -1"},
    };
    std::string path = folder / "bad.idx";
    write_file(folder / "bad.bin", token_bytes(std::vector<uint16_t>(5, 3)));
    for (const Fault& fault : faults) {
        CAPTURE(fault.what);
        write_file(path, fault.content);
        check_error(error_of([&] { MegatronData data(path); }), path, fault.reason);
    }
    write_file(path, good.bytes());
    CHECK(error_of([&] { MegatronData data(path); }) == "no error");
}

TEST_CASE("megatron: tokens that do not fit the index") {
    TemporaryFolder folder;
    std::string index = folder / "a.idx", tokens = folder / "a.bin";
    write_file(index, IndexFile{.lengths = {3, 2}, .documents = {0, 1, 2}}.bytes());
    auto error = [](const std::string& path) { return error_of([&] { MegatronData data(path); }); };
    check_error(error(index), tokens, "No such file");
    write_file(tokens, "");
    check_error(error(index), tokens, "is truncated: 0 bytes, but " + index + " lists 5 tokens of 2 bytes");
    write_file(tokens, std::string(9, 'x'));
    check_error(error(index), tokens, "is truncated: 9 bytes");
    write_file(tokens, std::string(11, 'x'));
    check_error(error(index), tokens, "is too long: 11 bytes");
    write_file(tokens, std::string(10, 'x'));
    CHECK(error(index) == "no error");
    check_error(error(tokens), tokens, "is not the name of an index");
    check_error(error(folder / "none.idx"), folder / "none.idx", "No such file");
    fs::create_directory(folder / "folder.idx");
    check_error(error(folder / "folder.idx"), folder / "folder.idx", "is a folder");
    CHECK(error_of([&] { MegatronData data(index, folder / "none"); }).starts_with(folder / "none:"));
}

TEST_CASE("megatron: larger than 2 GiB") {
    TemporaryFolder folder;
    // three sequences, more than 2^31 tokens
    int32_t length = 800 << 20;
    int64_t count = 3ll * length;
    IndexFile index = {.lengths = {length, length, length}, .documents = {0, 1, 3}};
    write_file(folder / "a.idx", index.bytes());
    write_file(folder / "a.bin", "");
    if (truncate((folder / "a.bin").c_str(), 2 * count) != 0) {
        SKIP("this file system does not make a sparse file of 5 GB");
    }
    {
        std::fstream file(folder / "a.bin", std::ios::binary | std::ios::in | std::ios::out);
        uint16_t last[2] = {22, 33};
        file.seekp(2 * (count - 2));
        file.write((const char*)last, sizeof last);
    }
    MegatronData data(folder / "a.idx");
    CHECK(data.count() == count);
    CHECK(data.document(1).start == length);
    CHECK(data.document(1).count == 2ll * length);
    int out[3];
    data.copy(count - 3, 3, 100, out);
    CHECK((out[0] == 0 && out[1] == 22 && out[2] == 33));
    CHECK(data.document(0).count == length);
}
