// Token shards: reading, writing, and every way in which a file can be wrong.
#include "test/support/file_testing.h"

#include "data/tokens/token_loader.h"
#include "data/tokens/token_source.h"
#include "data/tokens/token_shards.h"
#include "data/tokens/validation_set.h"
#include "kernels/random.cuh"

TEST_CASE("shards: what is written is read, in both widths") {
    TemporaryFolder folder;
    for (int vocab : {257, 65536, 65537, 128256}) {
        CAPTURE(vocab);
        std::vector<int> tokens(50000);
        for (size_t i = 0; i < tokens.size(); i++) tokens[i] = (int)(philox(1, i).at[0] % (uint32_t)vocab);
        tokens[7] = vocab - 1;
        std::string path = folder / text("%d.bin", vocab);
        {
            ShardWriter writer(path, vocab);
            writer.write(tokens.data(), 1);
            writer.write(tokens.data() + 1, tokens.size() - 1);
            CHECK(!fs::exists(path));
            writer.close();
        }
        CHECK(fs::file_size(path) == 1024 + tokens.size() * (vocab <= 65536 ? 2 : 4));
        CHECK(all_tokens(path, vocab) == tokens);
    }
    CHECK(folder.files().size() == 4);  // and nothing else
}

TEST_CASE("shards: the bytes are those of llm.c") {
    TemporaryFolder folder;
    std::vector<int> tokens = {5, 65535, 0};
    ShardWriter narrow(folder / "narrow.bin", 65536), wide(folder / "wide.bin", 70000);
    narrow.write(tokens.data(), 3), narrow.close();
    wide.write(tokens.data(), 3), wide.close();
    CHECK(contents(folder / "narrow.bin") == shard_bytes<uint16_t>(20240520, 1, 3, {5, 65535, 0}));
    CHECK(contents(folder / "wide.bin") == shard_bytes<uint32_t>(20240801, 7, 3, {5, 65535, 0}));
}

TEST_CASE("shards: every fault of a file is one clear line") {
    TemporaryFolder folder;
    std::vector<uint16_t> ten(10, 3);
    std::string good = shard_bytes(ten);
    struct Fault {
        const char* what;
        std::string content, reason;
    };
    Fault faults[] = {
        {"empty", "", "is empty"},
        {"a few bytes", "hello", "has 5 bytes, too few"},
        {"part of the header", good.substr(0, 1023), "too few for the header"},
        {"header only", good.substr(0, 1024), "truncated"},
        {"one byte short", good.substr(0, good.size() - 1), "is truncated: 1043 bytes"},
        {"one byte more", good + "x", "is too long: 1045 bytes"},
        {"text", std::string(5000, 'a'), "is not a token shard"},
        {"weights of llm.c", shard_bytes(20240326, 3, 10, ten),
         "is not a token shard (it begins with 20240326"},
        {"big-endian", shard_bytes((int32_t)__builtin_bswap32(20240520), 1 << 24, 10 << 24, ten),
         "big-endian"},
        {"big-endian", shard_bytes((int32_t)__builtin_bswap32(20240801), 7 << 24, 10 << 24, ten),
         "big-endian"},
        {"version", shard_bytes(20240520, 2, 10, ten), "has version 2"},
        {"version of the other magic", shard_bytes(20240520, 7, 10, ten), "has version 7"},
        {"version of the other magic", shard_bytes(20240801, 1, 10, ten), "has version 1"},
        {"no tokens", shard_bytes<uint16_t>(20240520, 1, 0, {}), "has 0 tokens according to its header"},
        {"negative count", shard_bytes(20240520, 1, -10, ten), "has -10 tokens according to its header"},
        {"largest count", shard_bytes(20240520, 1, INT32_MAX, ten), "truncated"},
        {"smallest count", shard_bytes(20240520, 1, INT32_MIN, ten),
         "has -2147483648 tokens according to its header"},
        {"wrong width", shard_bytes(20240801, 7, 10, ten), "truncated"},
    };
    std::string path = folder / "bad.bin";
    for (const Fault& fault : faults) {
        CAPTURE(fault.what);
        write_file(path, fault.content);
        check_error(error_of([&] { TokenShard shard(path); }), path, fault.reason);
    }
    write_file(path, good);
    CHECK(error_of([&] { TokenShard shard(path); }) == "no error");
}

TEST_CASE("shards: what is not a regular file is refused") {
    TemporaryFolder folder;
    auto error = [](const std::string& path) { return error_of([&] { TokenShard shard(path); }); };
    check_error(error(folder.path), folder.path, "is a folder");
    check_error(error(folder / "none.bin"), folder / "none.bin", "No such file");
    check_error(error("/dev/null"), "/dev/null", "not a regular file");
    REQUIRE(mkfifo((folder / "pipe").c_str(), 0600) == 0);
    check_error(error(folder / "pipe"), folder / "pipe",
                "not a regular file");  // and does not wait for a writer
    REQUIRE(symlink("loop", (folder / "loop").c_str()) == 0);
    check_error(error(folder / "loop"), folder / "loop", "symbolic links");
    if (geteuid() != 0) {
        write_file(folder / "secret", "x");
        fs::permissions(folder / "secret", fs::perms::none);
        check_error(error(folder / "secret"), folder / "secret", "Permission denied");
    }
}

TEST_CASE("shards: tokens outside the vocabulary are found when read") {
    TemporaryFolder folder;
    std::string narrow = folder / "narrow.bin", wide = folder / "wide.bin";
    write_file(narrow, shard_bytes({1, 2, 256, 257, 300}));
    write_file(wide, shard_bytes<uint32_t>(20240801, 7, 3, {1, 2, 0xfffffff0u}));
    TokenShard shard(narrow), wide_shard(wide);
    int out[5];
    CHECK(error_of([&] { shard.copy(0, 3, 257, out); }) == "no error");
    check_error(error_of([&] { shard.copy(1, 4, 257, out); }), narrow,
                "token 3 is 257, outside the vocabulary of 257");
    check_error(error_of([&] { wide_shard.copy(0, 3, INT32_MAX, out); }), wide, "token 2 is 4294967280");
}

TEST_CASE("shards: larger than 2 GiB") {
    TemporaryFolder folder;
    std::string path = folder / "large.bin";
    int64_t count = 1'600'000'000;  // 3.2 GB, only the ends of which exist on disk
    write_file(path, shard_bytes<uint16_t>(20240520, 1, (int32_t)count, {11}));
    if (truncate(path.c_str(), 1024 + 2 * count) != 0) {
        SKIP("this file system does not make a sparse file of 3.2 GB");
    }
    {
        std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
        uint16_t last[2] = {22, 33};
        file.seekp(1024 + 2 * (count - 2));
        file.write((const char*)last, sizeof last);
    }
    TokenSource source(path, 257);
    int out[3];
    source.copy(0, 0, 2, out);
    CHECK((out[0] == 11 && out[1] == 0));
    source.copy(0, count - 3, 3, out);
    CHECK((out[0] == 0 && out[1] == 22 && out[2] == 33));
    TokenLoader loader(path, 257, 1, SampleOrder::sequential);
    int input, target;
    loader.load((uint64_t)count - 2, &input, &target);
    CHECK((input == 22 && target == 33));
}

TEST_CASE("shards: lists and patterns") {
    TemporaryFolder folder;
    for (const char* name : {"b.bin", "a.bin", "c.bin", "odd[1].bin"})
        write_file(folder / name, shard_bytes({1, 2, 3}));
    CHECK(files_named(folder / "*.bin").size() == 4);
    std::vector<std::string> two = {folder / "a.bin", folder / "b.bin"};
    CHECK(files_named((folder / "b.bin") + "," + (folder / "a.bin")) == two);
    CHECK(files_named((folder / "[ab].bin") + "," + (folder / "a.bin") + ",") == two);
    CHECK(files_named(folder / "odd[1].bin") == std::vector<std::string>{folder / "odd[1].bin"});
    CHECK(TokenSource(folder / "*.bin", 257).total_tokens() == 12);

    std::string none = folder / "none*.bin";
    check_error(error_of([&] { TokenSource(none + "," + (folder / "a.bin"), 257); }), none, "no such file");
    check_error(error_of([] { TokenSource(",", 257); }), "','", "names no token files");
    write_file(folder / "wide.bin", shard_bytes<uint32_t>(20240801, 7, 3, {1, 2, 3}));
    check_error(error_of([&] { TokenSource(folder / "*.bin", 257); }), folder / "wide.bin",
                "tokenizers differ");
    write_file(folder / "wide.bin", "x");
    check_error(error_of([&] { TokenSource(folder / "*.bin", 257); }), folder / "wide.bin", "too few");
}

TEST_CASE("shards: a writer that does not end well leaves nothing") {
    TemporaryFolder folder;
    std::string path = folder / "shard.bin";
    int token = 3, bad[] = {4, 257}, negative = -1;
    { ShardWriter(path, 257).write(&token, 1); }
    check_error(error_of([&] { ShardWriter(path, 257).close(); }), path, "no tokens");
    check_error(error_of([&] { ShardWriter(path, 257).write(bad, 2); }), path, "token 257");
    check_error(error_of([&] { ShardWriter(path, 257).write(&negative, 1); }), path, "token -1");
    CHECK(folder.files().empty());

    ShardWriter first(path, 257);
    check_error(error_of([&] { ShardWriter second(path, 257); }), path, "another process is writing it");
    first.write(&token, 1);
    first.close();
    CHECK(all_tokens(path, 257) == std::vector<int>{3});

    // Leftover files of a killed run are overwritten.
    write_file(folder / "next.bin.partial", std::string(5000, 'x'));
    ShardWriter next(folder / "next.bin", 257);
    next.write(&token, 1);
    next.close();
    CHECK(all_tokens(folder / "next.bin", 257) == std::vector<int>{3});

    std::string nowhere = folder / "no/such/folder.bin";
    check_error(error_of([&] { ShardWriter writer(nowhere, 257); }), nowhere, "No such file or directory");
}

TEST_CASE("shards: a full disk is one line and leaves nothing") {
    SmallDisk disk("64k");
    if (!disk.mounted) SKIP("a small tmpfs cannot be mounted here");
    std::string path = disk.folder / "shard.bin";
    std::vector<int> tokens(100000, 5);
    check_error(error_of([&] {
                    ShardWriter writer(path, 257);
                    writer.write(tokens.data(), tokens.size());
                    writer.close();
                }),
                path, "No space left");
    CHECK(disk.folder.files().empty());
}

TEST_CASE("a validation set is the first samples, known by their content whatever the files are") {
    TemporaryFolder folder;
    auto write = [&](const char* name, int tokens, int changed) {
        ShardWriter writer(folder / name, 257);
        for (int i = 0; i < tokens; i++) {
            int token = i == changed ? 7 : i % 250;
            writer.write(&token, 1);
        }
        writer.close();
    };
    write("a.bin", 1001, -1);
    write("b.bin", 901, -1);
    write("c.bin", 1001, 500);
    auto set = [&](const char* name, int T, long long tokens) {
        TokenLoader files(folder / name, 257, T, SampleOrder::sequential);
        ValidationSet set = validation_set(files, T, tokens);
        set.content = hash_of_samples(set, files);
        return set;
    };
    CHECK(set("a.bin", 10, 640).samples == 64);
    CHECK(set("a.bin", 10, 649).tokens == 640);
    CHECK(set("a.bin", 10, 1).samples == 1);
    CHECK(set("a.bin", 10, 0).samples == 100);
    CHECK(set("a.bin", 10, 1 << 30).samples == 100);
    CHECK(set("a.bin", 10, 640).content == set("b.bin", 10, 640).content);
    CHECK(set("a.bin", 10, 640).content != set("c.bin", 10, 640).content);
    CHECK(set("a.bin", 10, 400).content == set("c.bin", 10, 400).content);
    CHECK(set("a.bin", 10, 640).content != set("a.bin", 20, 640).content);
}
