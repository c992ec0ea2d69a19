// Token shards, the order of samples, the tokenizer and the tokenize subcommand.
#include "test/testing.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sys/mount.h>
#include <thread>

#include "data/sample_order.h"
#include "data/token_shards.h"
#include "data/tokenize.h"
#include "data/tokenizer.h"

namespace fs = std::filesystem;

// A folder of its own for a test, gone at the end.
struct TemporaryFolder {
    std::string path;
    TemporaryFolder() {
        std::string name = (fs::temp_directory_path() / "test_data.XXXXXX").string();
        REQUIRE(mkdtemp(name.data()));
        path = name;
    }
    ~TemporaryFolder() { fs::remove_all(path); }
    std::string operator/(const std::string& name) const { return path + "/" + name; }
    std::vector<std::string> files() const {
        std::vector<std::string> names;
        for (const auto& entry : fs::directory_iterator(path)) names.push_back(entry.path().filename());
        std::sort(names.begin(), names.end());
        return names;
    }
};

static void write_file(const std::string& path, const std::string& content) {
    std::ofstream file(path, std::ios::binary);
    file << content;
    file.close();
    REQUIRE(file.good());
}

// A token shard as bytes, made here independently of ShardWriter.
template <typename Stored>
static std::string shard_bytes(int32_t magic, int32_t version, int32_t count,
                               const std::vector<Stored>& tokens) {
    std::vector<int32_t> header(256);
    header[0] = magic, header[1] = version, header[2] = count;
    return std::string((const char*)header.data(), 1024) +
           std::string((const char*)tokens.data(), tokens.size() * sizeof(Stored));
}

static std::string shard_bytes(const std::vector<uint16_t>& tokens) {
    return shard_bytes(20240520, 1, (int32_t)tokens.size(), tokens);
}

template <typename F>
static std::string error_of(F&& f) {
    try {
        f();
    } catch (const Error& error) {
        return error.what();
    }
    return "no error";
}

// One line that begins with the thing, holds the reason and gives a remedy.
static void check_error(const std::string& error, const std::string& thing, const std::string& reason) {
    CAPTURE(error);
    CHECK(error.starts_with(thing + ":"));
    CHECK(error.find(reason) != std::string::npos);
    CHECK(error.find("; ") != std::string::npos);
    CHECK(error.find('\n') == std::string::npos);
}

static std::vector<int> all_tokens(const std::string& path, int vocab) {
    TokenShard shard(path);
    std::vector<int> tokens((size_t)shard.count());
    shard.copy(0, shard.count(), vocab, tokens.data());
    return tokens;
}

// Mounts a file system that holds little; false where that is not allowed.
struct SmallDisk {
    TemporaryFolder folder;
    bool mounted;
    explicit SmallDisk(const char* size) {
        mounted = mount("tmpfs", folder.path.c_str(), "tmpfs", 0, (std::string("size=") + size).c_str()) == 0;
        if (!mounted) MESSAGE("skipped: mounting a small tmpfs is not allowed here");
    }
    ~SmallDisk() {
        if (mounted) umount2(folder.path.c_str(), MNT_DETACH);
    }
};

// ----------------------------------------------------------------------------
// shards

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
    CHECK(folder.files().size() == 4);  // and nothing beside them
}

TEST_CASE("shards: the bytes are those of llm.c") {
    TemporaryFolder folder;
    std::vector<int> tokens = {5, 65535, 0};
    ShardWriter narrow(folder / "narrow.bin", 65536), wide(folder / "wide.bin", 70000);
    narrow.write(tokens.data(), 3), narrow.close();
    wide.write(tokens.data(), 3), wide.close();
    auto content = [](const std::string& path) {
        std::ifstream file(path, std::ios::binary);
        return std::string(std::istreambuf_iterator<char>(file), {});
    };
    CHECK(content(folder / "narrow.bin") == shard_bytes<uint16_t>(20240520, 1, 3, {5, 65535, 0}));
    CHECK(content(folder / "wide.bin") == shard_bytes<uint32_t>(20240801, 7, 3, {5, 65535, 0}));
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
        {"no tokens", shard_bytes<uint16_t>(20240520, 1, 0, {}), "counts 0 tokens"},
        {"negative count", shard_bytes(20240520, 1, -10, ten), "counts -10 tokens"},
        {"largest count", shard_bytes(20240520, 1, INT32_MAX, ten), "truncated"},
        {"smallest count", shard_bytes(20240520, 1, INT32_MIN, ten), "counts -2147483648 tokens"},
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
    int64_t count = 1'600'000'000;  // 3.2 GB, of which only the ends exist on disk
    write_file(path, shard_bytes<uint16_t>(20240520, 1, (int32_t)count, {11}));
    if (truncate(path.c_str(), 1024 + 2 * count) != 0) {
        MESSAGE("skipped: this file system does not make a sparse file of 3.2 GB");
        return;
    }
    {
        std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
        uint16_t last[2] = {22, 33};
        file.seekp(1024 + 2 * (count - 2));
        file.write((const char*)last, sizeof last);
    }
    TokenShards shards(path, 257);
    int out[3];
    shards.copy(0, 0, 2, out);
    CHECK((out[0] == 11 && out[1] == 0));
    shards.copy(0, count - 3, 3, out);
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
    CHECK(TokenShards(folder / "*.bin", 257).total_tokens() == 12);

    std::string none = folder / "none*.bin";
    check_error(error_of([&] { TokenShards(none + "," + (folder / "a.bin"), 257); }), none, "no such file");
    check_error(error_of([] { TokenShards(",", 257); }), "','", "names no token shards");
    write_file(folder / "wide.bin", shard_bytes<uint32_t>(20240801, 7, 3, {1, 2, 3}));
    check_error(error_of([&] { TokenShards(folder / "*.bin", 257); }), folder / "wide.bin",
                "tokenizers differ");
    write_file(folder / "wide.bin", "x");
    check_error(error_of([&] { TokenShards(folder / "*.bin", 257); }), folder / "wide.bin", "too few");
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

    // What a killed run left is written over.
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
    if (!disk.mounted) return;
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

// ----------------------------------------------------------------------------
// the order of samples

// Shards of the given lengths whose tokens count up through all of them.
static std::string counting_shards(const TemporaryFolder& folder, const std::vector<int>& lengths) {
    uint16_t next = 0;
    for (size_t i = 0; i < lengths.size(); i++) {
        std::vector<uint16_t> tokens((size_t)lengths[i]);
        for (uint16_t& token : tokens) token = next++;
        write_file(folder / text("shard%03zu.bin", i), shard_bytes(tokens));
    }
    return folder / "shard*.bin";
}

TEST_CASE("order: a permutation for every size") {
    for (uint64_t n : {1, 2, 3, 5, 8, 100, 255, 256, 257, 1000, 4097}) {
        for (uint64_t key : {1, 2, 3}) {
            Permutation permutation(n, key);
            std::vector<bool> seen(n);
            for (uint64_t i = 0; i < n; i++) {
                uint64_t image = permutation(i);
                REQUIRE(image < n);
                REQUIRE(!seen[image]);
                seen[image] = true;
            }
        }
    }
    for (uint64_t n : {(1ull << 33) + 5, 1ull << 40, (1ull << 52) - 1}) {
        Permutation permutation(n, 1);
        uint64_t upper_half = 0;
        std::set<uint64_t> images;
        for (uint64_t i = 0; i < 1000; i++) {
            images.insert(permutation(i));
            upper_half += permutation(i) >= n / 2;
        }
        CHECK(images.size() == 1000);
        CHECK(*images.rbegin() < n);
        CHECK((upper_half > 400 && upper_half < 600));
    }
}

// chi-square / degrees of freedom is 1 +- sqrt(2 / degrees) for uniform counts.
TEST_CASE("order: permutations are uniform") {
    std::map<std::vector<uint64_t>, int> counts;
    const int expected = 100, possible = 120;
    for (uint64_t key = 0; key < expected * possible; key++) {
        Permutation permutation(5, key);
        std::vector<uint64_t> images;
        for (uint64_t i = 0; i < 5; i++) images.push_back(permutation(i));
        counts[images]++;
    }
    CHECK(counts.size() == possible);
    double chi_square = 0;
    for (const auto& [images, count] : counts) chi_square += std::pow(count - expected, 2) / expected;
    CHECK(chi_square / (possible - 1) == doctest::Approx(1).epsilon(0.5));

    // Each element goes to each place equally often, and its successor does not follow it.
    const size_t n = 100;
    std::vector<int> places(n * n);
    int followed = 0;
    const int keys = 3000;
    for (int key = 0; key < keys; key++) {
        Permutation permutation(n, (uint64_t)key);
        for (size_t i = 0; i < n; i++) {
            places[i * n + permutation(i)]++;
            followed += permutation((i + 1) % n) == (permutation(i) + 1) % n;
        }
    }
    chi_square = 0;
    for (int count : places) chi_square += std::pow(count - keys / (double)n, 2) / (keys / (double)n);
    CHECK(chi_square / ((n - 1) * (n - 1)) == doctest::Approx(1).epsilon(0.06));
    CHECK(followed / (keys * n / (n - 1.0)) == doctest::Approx(1).epsilon(0.1));
}

TEST_CASE("order: each sample exactly once per epoch, in a new order each time") {
    struct Case {
        std::vector<int> lengths;
        int T;
    };
    for (const Case& c : {Case{{100}, 1}, Case{{101}, 10}, Case{{9, 50, 3, 64, 65, 66, 8}, 8},
                          Case{{400, 17, 1000}, 16}, Case{{5, 5}, 4}}) {
        TemporaryFolder folder;
        std::string list = counting_shards(folder, c.lengths);
        std::set<int> expected;  // first tokens of samples
        int shard_begin = 0;
        for (int length : c.lengths) {
            for (int at = 0; at + c.T + 1 <= length; at += c.T) expected.insert(shard_begin + at);
            shard_begin += length;
        }
        for (uint64_t seed : {0, 1, 99}) {
            CAPTURE(seed);
            TokenLoader loader(list, 65536, c.T, SampleOrder::shuffled, seed);
            uint64_t S = loader.samples_per_epoch();
            REQUIRE(S == expected.size());
            std::vector<std::vector<int>> orders;
            for (uint64_t epoch = 0; epoch < 3; epoch++) {
                std::vector<int> order, inputs((size_t)c.T), targets((size_t)c.T);
                for (uint64_t sample = epoch * S; sample < (epoch + 1) * S; sample++) {
                    CHECK(loader.epoch(sample) == epoch);
                    loader.load(sample, inputs.data(), targets.data());
                    order.push_back(inputs[0]);
                    for (int t = 0; t < c.T; t++) {
                        REQUIRE(inputs[(size_t)t] == inputs[0] + t);
                        REQUIRE(targets[(size_t)t] == inputs[0] + t + 1);
                    }
                }
                CHECK(std::set<int>(order.begin(), order.end()) == expected);
                orders.push_back(order);
            }
            if (S > 10) {
                CHECK(orders[0] != orders[1]);
                CHECK(orders[1] != orders[2]);
                CHECK(orders[0] != std::vector<int>(expected.begin(), expected.end()));
            }
        }
    }
}

TEST_CASE("order: depends on the seed and the sample index alone") {
    TemporaryFolder folder;
    const int T = 8;
    std::string list = counting_shards(folder, {900, 700});
    auto first_tokens = [&](uint64_t seed, SampleOrder order, auto&& indices) {
        TokenLoader loader(list, 65536, T, order, seed);
        std::map<uint64_t, int> firsts;
        int inputs[T], targets[T];
        for (uint64_t i : indices) loader.load(i, inputs, targets), firsts[i] = inputs[0];
        return firsts;
    };
    std::vector<uint64_t> forwards, backwards, by_rank;
    for (uint64_t i = 0; i < 240; i++) forwards.push_back(i), backwards.push_back(239 - i);
    for (uint64_t rank = 0; rank < 4; rank++) {
        for (uint64_t i = rank; i < 240; i += 4) by_rank.push_back(i);
    }
    auto reference = first_tokens(5, SampleOrder::shuffled, forwards);
    CHECK(first_tokens(5, SampleOrder::shuffled, backwards) == reference);
    CHECK(first_tokens(5, SampleOrder::shuffled, by_rank) == reference);
    CHECK(first_tokens(6, SampleOrder::shuffled, forwards) != reference);

    // Sequential order ignores the seed and starts again with each epoch.
    auto sequential = first_tokens(5, SampleOrder::sequential, forwards);
    CHECK(first_tokens(6, SampleOrder::sequential, forwards) == sequential);
    uint64_t S = TokenLoader(list, 65536, T, SampleOrder::sequential).samples_per_epoch();
    REQUIRE(S == 112 + 87);
    CHECK(sequential[0] == 0);
    CHECK(sequential[1] == T);
    CHECK(sequential[112] == 900);  // a sample does not cross the border of shards
    CHECK(sequential[S] == 0);
}

// The order is part of what a seed means, so it must not change by accident.
TEST_CASE("order: the first samples of a known run") {
    std::vector<uint64_t> images;
    for (uint64_t i = 0; i < 6; i++) images.push_back(Permutation(1000, 42)(i));
    CHECK(images == std::vector<uint64_t>{208, 5, 12, 997, 891, 536});
}

TEST_CASE("order: threads read the same samples") {
    TemporaryFolder folder;
    const int T = 16;
    TokenLoader loader(counting_shards(folder, {3000, 3000}), 65536, T, SampleOrder::shuffled, 3);
    auto sum = [&loader] {
        uint64_t hash = 0;
        int inputs[T], targets[T];
        for (uint64_t i = 0; i < 1000; i++)
            loader.load(i, inputs, targets), hash = hash * 31 + (uint64_t)targets[T - 1];
        return hash;
    };
    uint64_t sums[4];
    std::vector<std::thread> threads;
    for (uint64_t& result : sums) threads.emplace_back([&] { result = sum(); });
    for (std::thread& thread : threads) thread.join();
    for (uint64_t result : sums) CHECK(result == sum());
}

TEST_CASE("order: shards too short for a sample") {
    TemporaryFolder folder;
    std::string list = counting_shards(folder, {4, 5, 1});
    TokenLoader loader(list, 65536, 4, SampleOrder::shuffled);
    CHECK(loader.samples_per_epoch() == 1);
    CHECK(loader.too_short() == std::vector<std::string>{folder / "shard000.bin", folder / "shard002.bin"});
    check_error(error_of([&] { TokenLoader(list, 65536, 5, SampleOrder::shuffled); }),
                folder / "shard001.bin", "has 5 tokens");
    int inputs[4], targets[4];
    TokenLoader small(list, 8, 4, SampleOrder::shuffled);
    check_error(error_of([&] { small.load(0, inputs, targets); }), folder / "shard001.bin", "token 4 is 8");
}

// ----------------------------------------------------------------------------
// the tokenizer and the tokenize subcommand

TEST_CASE("tokenizer: any bytes come back") {
    std::string bytes(10000, '\0');
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = (char)philox(2, i).at[0];
    std::vector<int> tokens = ByteTokenizer::encode(bytes);
    CHECK(tokens.size() == bytes.size());
    CHECK(*std::min_element(tokens.begin(), tokens.end()) == 0);
    CHECK(*std::max_element(tokens.begin(), tokens.end()) == 255);
    CHECK(ByteTokenizer::decode(tokens) == bytes);
    CHECK(ByteTokenizer::encode("Aé") == std::vector<int>{65, 0xc3, 0xa9});
    CHECK(ByteTokenizer::decode({72, 105, 256}) == "Hi<|endoftext|>");
    CHECK(ByteTokenizer::encode("<|endoftext|>").size() == 13);  // text cannot end a document
    check_error(error_of([] { ByteTokenizer::decode(257); }), "token 257", "outside the vocabulary");
    check_error(error_of([] { ByteTokenizer::decode(-1); }), "token -1", "outside the vocabulary");
}

// The documents of all shards of a split, and a check of how the shards are filled.
static std::vector<std::string> documents_of(const std::string& pattern, int64_t shard_tokens) {
    std::vector<int> tokens;
    std::vector<std::string> files = files_named(pattern), documents(1);
    for (size_t i = 0; i < files.size(); i++) {
        std::vector<int> shard = all_tokens(files[i], 257);
        if (i + 1 < files.size()) CHECK((int64_t)shard.size() == shard_tokens);
        CHECK((int64_t)shard.size() <= shard_tokens);
        tokens.insert(tokens.end(), shard.begin(), shard.end());
    }
    REQUIRE(tokens.back() == 256);
    tokens.pop_back();
    for (int token : tokens) {
        if (token == 256)
            documents.emplace_back();
        else
            documents.back() += (char)token;
    }
    return documents;
}

TEST_CASE("tokenize: files and folders, split by document") {
    TemporaryFolder folder;
    fs::create_directories(folder / "in/b/deep");
    std::set<std::string> all;
    auto add = [&](const std::string& name, const std::string& content) {
        write_file(folder / name, content);
        all.insert(content);
    };
    for (int i = 0; i < 40; i++)
        add(text("in/b/deep/%02d.txt", i), text("document %d", i) + std::string((size_t)i, '.'));
    add("in/a.txt", "first");
    add("in/z.bin", std::string("\0\xff\x80", 3));
    add("in/large", std::string((3 << 20) + 17, 'q'));  // several pieces
    add("alone.txt", "named by itself");
    write_file(folder / "in/empty", "");
    fs::create_directory_symlink(folder / "in", folder / "in/b/loop");  // a cycle
    fs::create_symlink(folder / "in/a.txt", folder / "in/b/again");     // the same file a second time
    fs::create_symlink("nowhere", folder / "in/b/broken");
    REQUIRE(mkfifo((folder / "in/pipe").c_str(), 0600) == 0);
    TokenizeOptions options;
    options.inputs = {folder / "in", folder / "alone.txt", folder / "in/a.txt"};
    options.output = folder / "out";
    options.val_fraction = 0.2;
    options.shard_tokens = 1 << 20;
    tokenize(options);

    std::vector<std::string> train = documents_of(folder / "out_train_*.bin", options.shard_tokens);
    std::vector<std::string> val = documents_of(folder / "out_val_*.bin", options.shard_tokens);
    CHECK((val.size() >= 3 && val.size() <= 18));
    std::set<std::string> both(train.begin(), train.end());
    both.insert(val.begin(), val.end());
    CHECK(both == all);
    CHECK(train.size() + val.size() == all.size());
    CHECK(std::find(train.begin(), train.end(), "document 7.......") <
          std::find(train.begin(), train.end(), "document 9........."));
    for (const std::string& name : folder.files()) CHECK(name.find("partial") == std::string::npos);

    // Nothing is overwritten unasked; asked, the result is the same, and a longer older series does not
    // survive.
    check_error(error_of([&] { tokenize(options); }), folder / "out_train_000000.bin", "exists already");
    write_file(folder / "out_train_000099.bin", "left from before");
    write_file(folder / "out_val_000001.bin.partial", "left from before");
    write_file(folder / "out_train_mine.bin", "of another kind");
    options.overwrite = true;
    options.inputs.push_back(folder / "out_train_000000.bin");  // its own output is no input
    tokenize(options);
    CHECK(documents_of(folder / "out_train_0*.bin", options.shard_tokens) == train);
    CHECK(documents_of(folder / "out_val_*.bin", options.shard_tokens) == val);
    CHECK(!fs::exists(folder / "out_train_000099.bin"));
    CHECK(!fs::exists(folder / "out_val_000001.bin.partial"));
    CHECK(fs::exists(folder / "out_train_mine.bin"));

    options.inputs.pop_back();
    options.seed++;
    options.output = folder / "other";
    tokenize(options);
    CHECK(documents_of(folder / "other_val_*.bin", options.shard_tokens) != val);
}

TEST_CASE("tokenize: the split") {
    auto chosen = [](size_t documents, double fraction, uint64_t seed) {
        std::vector<bool> choice = choose_validation(documents, fraction, seed);
        return std::count(choice.begin(), choice.end(), true);
    };
    for (uint64_t seed = 0; seed < 20; seed++) {
        CHECK(chosen(10, 0, seed) == 0);
        for (double fraction : {1e-9, 0.5, 0.999999}) {
            for (size_t documents : {2, 3, 10}) {
                CHECK(chosen(documents, fraction, seed) >= 1);
                CHECK(chosen(documents, fraction, seed) < (long)documents);
            }
        }
        CHECK(std::abs(chosen(20000, 0.1, seed) - 2000) < 250);
    }
    // More documents leave the earlier choices as they are.
    std::vector<bool> few = choose_validation(500, 0.1, 3), many = choose_validation(1000, 0.1, 3);
    CHECK(std::equal(few.begin(), few.end(), many.begin()));
}

TEST_CASE("tokenize: a single document is cut") {
    TemporaryFolder folder;
    write_file(folder / "text", "0123456789");
    TokenizeOptions options;
    options.inputs = {folder / "text"};
    options.output = folder / "out";
    options.val_fraction = 0.3;
    tokenize(options);
    CHECK(documents_of(folder / "out_train_*.bin", 100) == std::vector<std::string>{"0123456"});
    CHECK(documents_of(folder / "out_val_*.bin", 100) == std::vector<std::string>{"789"});

    options.overwrite = true;
    options.val_fraction = 1e-6;
    tokenize(options);
    CHECK(documents_of(folder / "out_val_*.bin", 100) == std::vector<std::string>{"9"});

    options.val_fraction = 0;
    tokenize(options);
    CHECK(documents_of(folder / "out_train_*.bin", 100) == std::vector<std::string>{"0123456789"});
    CHECK(!fs::exists(folder / "out_val_000000.bin"));  // not left from before

    options.val_fraction = 0.5;
    write_file(folder / "text", "0");
    check_error(error_of([&] { tokenize(options); }), folder / "text", "too short to split");
}

TEST_CASE("tokenize: bad inputs are one line and leave nothing") {
    TemporaryFolder folder;
    fs::create_directory(folder / "in");
    fs::create_directory(folder / "out");
    write_file(folder / "empty", "");
    write_file(folder / "text", "some text");
    TokenizeOptions options;
    options.output = folder / "out/x";
    auto error = [&](std::vector<std::string> inputs) {
        options.inputs = std::move(inputs);
        return error_of([&] { tokenize(options); });
    };
    check_error(error({}), "the list of inputs", "has no text");
    check_error(error({folder / "in"}), folder / "in", "has no text");
    check_error(error({folder / "empty"}), folder / "empty", "has no text");
    check_error(error({folder / "text", folder / "none"}), folder / "none", "No such file");
    check_error(error({"/dev/null"}), "/dev/null", "neither a file nor a folder");
    fs::create_symlink("nowhere", folder / "broken");
    check_error(error({folder / "broken"}), folder / "broken", "No such file");
    check_error(error({"/proc/self/mem"}), "/proc/self/mem", "has no text");

    options.output = folder / "no/such/x";
    check_error(error({folder / "text"}), folder / "no/such/", "No such file or directory");
    options.output = folder / "out/x";
    for (double fraction : {-0.1, 1.0, (double)NAN}) {
        options.val_fraction = fraction;
        CHECK(error({folder / "text"}).starts_with("--val-fraction"));
    }
    options.val_fraction = 0.1;
    for (int64_t size : {int64_t(0), int64_t(-1), int64_t(1) << 31}) {
        options.shard_tokens = size;
        CHECK(error({folder / "text"}).starts_with("--shard-tokens"));
    }
    options.shard_tokens = 4;
    if (geteuid() != 0) {
        write_file(folder / "secret", "x");
        fs::permissions(folder / "secret", fs::perms::none);
        check_error(error({folder / "text", folder / "secret"}), folder / "secret", "Permission denied");
        fs::create_directory(folder / "closed");
        fs::permissions(folder / "closed", fs::perms::none);
        check_error(error({folder / "text", folder / "closed"}), folder / "closed", "Permission denied");
    }
    CHECK(fs::is_empty(folder / "out"));
}

TEST_CASE("tokenize: a full disk leaves nothing") {
    SmallDisk disk("256k");
    if (!disk.mounted) return;
    TemporaryFolder folder;
    for (int i = 0; i < 20; i++) write_file(folder / text("%d.txt", i), std::string(20000, 'x'));
    TokenizeOptions options;
    options.inputs = {folder.path};
    options.output = disk.folder / "out";
    options.shard_tokens = 10000;
    std::string error = error_of([&] { tokenize(options); });
    CHECK(error.starts_with(disk.folder / "out_"));
    CHECK(error.find("No space left") != std::string::npos);
    CHECK(error.find('\n') == std::string::npos);
    CHECK(disk.folder.files().empty());
}
