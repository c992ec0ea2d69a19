// The order of samples: permutations, epochs, blends of sources, and what a sample consists of.
#include "test/support/file_testing.h"

#include <cmath>
#include <map>
#include <set>
#include <thread>

#include "data/tokens/data_notes.h"
#include "data/tokens/token_loader.h"

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

    // Each element goes to each place equally often, and its successor follows it only by chance.
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
                    CHECK(loader.place(sample).epoch == epoch);
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

    // Sequential order ignores the seed and restarts with each epoch.
    auto sequential = first_tokens(5, SampleOrder::sequential, forwards);
    CHECK(first_tokens(6, SampleOrder::sequential, forwards) == sequential);
    uint64_t S = TokenLoader(list, 65536, T, SampleOrder::sequential).samples_per_epoch();
    REQUIRE(S == 112 + 87);
    CHECK(sequential[0] == 0);
    CHECK(sequential[1] == T);
    CHECK(sequential[112] == 900);  // samples do not cross from one shard to the next
    CHECK(sequential[S] == 0);
}

// The order is part of what a seed means, so it must not change by accident.
TEST_CASE("order: the first samples of a known run") {
    std::vector<uint64_t> images;
    for (uint64_t i = 0; i < 6; i++) images.push_back(Permutation(1000, 42)(i));
    CHECK(images == std::vector<uint64_t>{208, 5, 12, 997, 891, 536});

    TemporaryFolder folder;
    std::string list = counting_shards(folder, {300, 20, 500});
    const uint64_t samples[] = {0, 1, 2, 3, 100, 101, 102, 103, 1000};
    using Places = std::vector<std::pair<size_t, int64_t>>;
    auto places = [&](uint64_t seed) {
        TokenLoader loader(list, 65536, 8, SampleOrder::shuffled, seed);
        Places result;
        for (uint64_t sample : samples) {
            TokenLoader::Place at = loader.place(sample);
            result.push_back({at.file, at.token});
        }
        return result;
    };
    CHECK(places(5) ==
          Places{{2, 296}, {2, 32}, {0, 56}, {0, 240}, {0, 208}, {2, 16}, {0, 192}, {0, 136}, {2, 240}});
    CHECK(places(123456789) ==
          Places{{2, 264}, {2, 256}, {2, 392}, {2, 320}, {2, 120}, {2, 136}, {2, 96}, {0, 256}, {0, 160}});
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
// sources

// The index of a Megatron data set of `count` tokens, in sequences of 7 by default.
static std::string megatron_index(const std::string& prefix, size_t width, uint64_t count,
                                  uint64_t sequence = 7) {
    std::string bytes("MMIDIDX\0\0\1\0\0\0\0\0\0\0", 17);
    auto append = [&](auto number) { bytes.append((const char*)&number, sizeof number); };
    uint64_t sequences = (count + sequence - 1) / sequence;
    append((uint8_t)(width == 2 ? 8 : 4)), append(sequences), append(uint64_t(2));
    for (uint64_t i = 0; i < sequences; i++) append((int32_t)std::min(sequence, count - i * sequence));
    for (uint64_t i = 0; i < sequences; i++) append((int64_t)(i * sequence * width));
    append(int64_t(0)), append((int64_t)sequences);
    write_file(prefix + ".idx", bytes);
    return prefix + ".idx";
}

template <typename Stored>
static std::string megatron_files(const std::string& prefix, const std::vector<Stored>& tokens) {
    write_file(prefix + ".bin", std::string((const char*)tokens.data(), tokens.size() * sizeof(Stored)));
    return megatron_index(prefix, sizeof(Stored), tokens.size());
}

template <typename Stored>
static std::vector<Stored> counting(int first, int count) {
    std::vector<Stored> tokens((size_t)count);
    for (int i = 0; i < count; i++) tokens[(size_t)i] = (Stored)(first + i);
    return tokens;
}

TEST_CASE("sources: shards and Megatron data sets, in the order of their names") {
    TemporaryFolder folder;
    write_file(folder / "b.bin", shard_bytes(counting<uint16_t>(100, 50)));
    megatron_files(folder / "a", counting<uint16_t>(0, 30));
    megatron_files(folder / "c", counting<uint16_t>(200, 40));
    TokenSource source((folder / "*.idx") + "," + (folder / "b.bin"), 65536);
    REQUIRE(source.size() == 3);
    CHECK(source[0].path() == folder / "a.idx");
    CHECK(source[1].path() == folder / "b.bin");
    CHECK(source.total_tokens() == 120);
    CHECK(source.width() == 2);
    int out[3];
    source.copy(0, 27, 3, out);
    CHECK((out[0] == 27 && out[2] == 29));
    source.copy(1, 0, 3, out);
    CHECK(out[0] == 100);
    source.copy(2, 37, 3, out);
    CHECK(out[2] == 239);

    // Samples do not cross from one file to the next, but do from one sequence to the next.
    TokenLoader loader(source.list(), 65536, 16, SampleOrder::sequential);
    CHECK(loader.samples_per_epoch() == 1 + 3 + 2);
    CHECK(loader.total_tokens() == 120);
    CHECK(loader.summary().empty());
    std::vector<int> firsts, inputs(16), targets(16);
    for (uint64_t i = 0; i < 7; i++) {
        loader.load(i, inputs.data(), targets.data());
        firsts.push_back(inputs[0]);
        CHECK(targets[15] == inputs[0] + 16);
    }
    CHECK(firsts == std::vector<int>{0, 100, 116, 132, 200, 216, 0});

    check_error(error_of([&] { TokenSource(folder / "*.bin", 65536); }), folder / "a.bin",
                "name its index " + (folder / "a.idx") + " instead");
    check_error(error_of([] { TokenSource(",", 257); }), "','", "names no token files");
    megatron_files(folder / "wide", counting<int32_t>(0, 30));
    check_error(error_of([&] { TokenSource(folder / "*.idx", 65536); }), folder / "wide.idx",
                "has 4-byte tokens but " + (folder / "a.idx") + " has 2-byte ones");
    // other kinds of damage get their own messages
    write_file(folder / "bad.bin", shard_bytes<uint16_t>(20240520, 1, 5, {1, 2}));
    check_error(error_of([&] { TokenSource(folder / "bad.bin", 257); }), folder / "bad.bin", "is truncated");
    TokenSource small(folder / "c.idx", 239);
    check_error(error_of([&] { small.copy(0, 37, 3, out); }), folder / "c.bin", "token 39 is 239");
}

TEST_CASE("sources: in a blend, each gives each of its samples once per epoch of its own") {
    TemporaryFolder folder;
    const int T = 8;
    fs::create_directory(folder / "a");
    write_file(folder / "a/1.bin", shard_bytes(counting<uint16_t>(0, 100)));     // 12 samples
    write_file(folder / "a/2.bin", shard_bytes(counting<uint16_t>(1000, 205)));  // 25
    write_file(folder / "a/3.bin", shard_bytes(counting<uint16_t>(2000, 8)));    // none
    megatron_files(folder / "b", counting<int32_t>(3000, 170));                  // 21
    write_file(folder / "c.bin", shard_bytes<uint32_t>(20240801, 7, 41, counting<uint32_t>(4000, 41)));  // 5
    std::string list =
        "0.5:" + (folder / "a/*.bin") + ",0.3:" + (folder / "b.idx") + ",0.2:" + (folder / "c.bin");
    std::vector<std::set<int>> expected(3);
    for (int i = 0; i < 12; i++) expected[0].insert(T * i);
    for (int i = 0; i < 25; i++) expected[0].insert(1000 + T * i);
    for (int i = 0; i < 21; i++) expected[1].insert(3000 + T * i);
    for (int i = 0; i < 5; i++) expected[2].insert(4000 + T * i);

    TokenLoader loader(list, 65536, T, SampleOrder::shuffled, 7);
    REQUIRE(loader.sources() == 3);
    CHECK(loader.samples_per_epoch() == 37 + 21 + 5);
    CHECK(loader.total_tokens() == 100 + 205 + 8 + 170 + 41);
    CHECK(loader.too_short() == std::vector<std::string>{folder / "a/3.bin"});
    std::vector<std::vector<int>> given(3);
    std::vector<int> inputs(T), targets(T);
    const uint64_t draws = 370 * 2;
    for (uint64_t sample = 0; sample < draws; sample++) {
        loader.load(sample, inputs.data(), targets.data());
        size_t source = inputs[0] < 3000 ? 0 : inputs[0] < 4000 ? 1 : 2;
        TokenLoader::Place at = loader.place(sample);
        CHECK(at.source == source);
        CHECK(at.epoch == given[source].size() / expected[source].size());
        given[source].push_back(inputs[0]);
        for (int t = 0; t < T; t++) {
            REQUIRE(inputs[(size_t)t] == inputs[0] + t);
            REQUIRE(targets[(size_t)t] == inputs[0] + t + 1);
        }
    }
    CHECK((given[0].size() == draws / 2 && given[1].size() == draws * 3 / 10));
    for (size_t source = 0; source < 3; source++) {
        size_t size = expected[source].size(), epochs = given[source].size() / size;
        CHECK(epochs >= 10);
        std::set<std::vector<int>> orders;
        for (size_t epoch = 0; epoch < epochs; epoch++) {
            auto begin = given[source].begin() + (long)(epoch * size);
            std::vector<int> order(begin, begin + (long)size);
            CHECK(std::set<int>(order.begin(), order.end()) == expected[source]);
            orders.insert(order);
        }
        CHECK(orders.size() > epochs / 2);  // five samples have only 120 orders
    }

    std::vector<std::string> lines = loader.summary();
    REQUIRE(lines.size() == 3);
    CAPTURE(lines[0]);
    CHECK(lines[0].starts_with("     50%  " + (folder / "a/*.bin") + ": 3 files, 313 tokens of 2 bytes"));
    CHECK(lines[0].ends_with(", 37 samples"));
    CHECK(lines[1].ends_with(": 1 file, 170 tokens of 4 bytes, 21 samples"));

    // A single source gives the same samples with and without a weight.
    TokenLoader weighted("0.3:" + (folder / "a/*.bin"), 65536, T, SampleOrder::shuffled, 7);
    TokenLoader alone(folder / "a/*.bin", 65536, T, SampleOrder::shuffled, 7);
    for (uint64_t i = 0; i < 100; i++) {
        CHECK(weighted.place(i).token == alone.place(i).token);
        CHECK(weighted.place(i).file == alone.place(i).file);
    }
}

TEST_CASE("sources: a blend is the same for any number of ranks, and can be entered anywhere") {
    TemporaryFolder folder;
    const int T = 4, B = 3, steps = 5;
    write_file(folder / "a.bin", shard_bytes(counting<uint16_t>(0, 401)));
    megatron_files(folder / "b", counting<uint16_t>(1000, 51));
    std::string list = "0.65:" + (folder / "a.bin") + ",0.35:" + (folder / "b.idx");
    const uint64_t per_step = 24;  // samples
    auto run = [&](uint64_t ranks, uint64_t first_step) {
        std::map<uint64_t, std::vector<int>> of_sample;
        uint64_t micro_batches = per_step / (ranks * B);
        for (uint64_t rank = 0; rank < ranks; rank++) {
            TokenLoader loader(list, 65536, T, SampleOrder::shuffled, 11);
            for (uint64_t step = first_step; step < steps; step++) {
                for (uint64_t micro = 0; micro < micro_batches; micro++) {
                    for (uint64_t row = 0; row < B; row++) {
                        uint64_t sample = step * per_step + (micro * ranks + rank) * B + row;
                        std::vector<int> tokens(2 * T);
                        loader.load(sample, tokens.data(), tokens.data() + T);
                        CHECK(of_sample.insert({sample, tokens}).second);
                    }
                }
            }
        }
        return of_sample;
    };
    auto reference = run(1, 0);
    CHECK(reference.size() == steps * per_step);
    for (uint64_t ranks : {2, 4, 8}) CHECK(run(ranks, 0) == reference);
    auto resumed = run(4, 3);
    CHECK(resumed.size() == 2 * per_step);
    for (const auto& [sample, tokens] : resumed) CHECK(tokens == reference[sample]);
}

TEST_CASE("sources: what is wrong with one of a blend is named") {
    TemporaryFolder folder;
    write_file(folder / "a.bin", shard_bytes(counting<uint16_t>(0, 100)));
    write_file(folder / "b.bin", shard_bytes(counting<uint16_t>(0, 8)));
    std::string a = "0.5:" + (folder / "a.bin"), b = "0.5:" + (folder / "b.bin");
    auto error = [](const std::string& list) {
        return error_of([&] { TokenLoader(list, 50, 8, SampleOrder::shuffled); });
    };
    check_error(error(a + "," + b), folder / "b.bin", "has 8 tokens, but a sample needs 9");
    check_error(error(a + ",1:" + (folder / "none*.bin")), folder / "none*.bin", "no such file");
    check_error(error(a + "," + (folder / "b.bin")), "'" + (folder / "b.bin") + "'", "has no weight");
    CHECK(error(a) == "no error");
}

// Checks the place of every sample of an epoch, and reads some; both ends of the file are marked.
static void check_large(const std::string& list, const std::vector<uint64_t>& counts, int T) {
    TokenLoader loader(list, 65536, T, SampleOrder::shuffled, 3);
    std::vector<uint64_t> begin = {0};
    for (uint64_t count : counts) begin.push_back(begin.back() + (count - 1) / (uint64_t)T);
    uint64_t S = loader.samples_per_epoch();
    REQUIRE(S == begin.back());
    std::vector<bool> seen(S);
    uint64_t last_sample = 0, wrong = 0;
    for (uint64_t i = S; i < 2 * S; i++) {
        TokenLoader::Place at = loader.place(i);
        uint64_t sample = begin[at.file] + (uint64_t)at.token / (uint64_t)T;
        bool fits = at.token >= 0 && at.token % T == 0 && (uint64_t)(at.token + T) < counts[at.file];
        wrong += !fits || at.epoch != 1 || seen[sample];
        seen[sample] = true;
        if (sample == S - 1) last_sample = i;
    }
    CHECK(wrong == 0);
    CHECK(std::count(seen.begin(), seen.end(), true) == (long)S);
    std::vector<int> inputs((size_t)T), targets((size_t)T);
    for (uint64_t i : {uint64_t(0), uint64_t(1), S - 1}) loader.load(i, inputs.data(), targets.data());
    loader.load(last_sample, inputs.data(), targets.data());
    CHECK(targets[(size_t)T - 1] == 4321);
}

// Writes a token at this place of a file of `bytes` bytes; returns false if the file system refuses.
template <typename Stored>
static bool make_sparse(const std::string& path, uint64_t bytes, uint64_t at, Stored token) {
    if (truncate(path.c_str(), (off_t)bytes) != 0) return false;
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp((std::streamoff)at);
    file.write((const char*)&token, sizeof token);
    file.close();
    return file.good();
}

TEST_CASE("sources: larger than 3 GiB, every sample exactly once") {
    TemporaryFolder folder;
    const int T = 4096;
    const uint64_t narrow = 1'700'000'123, wide = 860'000'321, pieces = 2'200'000'000;
    auto last = [](uint64_t count) { return (count - 1) / T * T; };  // the last target
    std::string a = folder / "a.bin", b = folder / "b.bin", c = folder / "c";
    write_file(a, shard_bytes<uint16_t>(20240520, 1, (int32_t)narrow, {}));
    write_file(b, shard_bytes<uint32_t>(20240801, 7, (int32_t)wide, {}));
    write_file(c + ".bin", "");
    megatron_index(c, 2, pieces, 1'000'000'000);  // three sequences, and more than 2^31 tokens
    if (!make_sparse(a, 1024 + 2 * narrow, 1024 + 2 * last(narrow), (uint16_t)4321) ||
        !make_sparse(b, 1024 + 4 * wide, 1024 + 4 * last(wide), (uint32_t)4321) ||
        !make_sparse(c + ".bin", 2 * pieces, 2 * last(pieces), (uint16_t)4321)) {
        SKIP("this file system does not make sparse files of 3 GiB");
    }
    check_large(a, {narrow}, T);
    check_large(b, {wide}, T);
    check_large(c + ".idx", {pieces}, T);
    check_large(a + "," + c + ".idx", {narrow, pieces}, T);
}

TEST_CASE("validation on what is trained on is noticed") {
    TemporaryFolder folder;
    auto shard = [&](const std::string& name, int first, int count) {
        std::vector<uint16_t> tokens((size_t)count);
        for (int i = 0; i < count; i++) tokens[(size_t)i] = (uint16_t)(first + i);
        write_file(folder / name, shard_bytes(tokens));
        return folder / name;
    };
    std::string a = shard("a.bin", 0, 3000), b = shard("b.bin", 5000, 3000);
    auto warnings = [&](const std::string& train, const std::string& val) {
        return overlap_warnings(TokenLoader(train, 65536, 8, SampleOrder::shuffled),
                                TokenLoader(val, 65536, 8, SampleOrder::sequential));
    };
    CHECK(warnings(a, b).empty());
    fs::create_symlink(a, folder / "link.bin");
    for (const std::string& same : {a, folder / "link.bin"}) {
        REQUIRE(warnings(a + "," + b, same).size() == 1);
        CHECK(warnings(a, same)[0].starts_with("warning: " + same + " is also in --train-data, "));
    }
    CHECK(warnings(folder / "*.bin", b).size() == 1);
    CHECK(warnings("0.5:" + a + ",0.5:" + b, a + "," + b).size() == 2);
    std::string part = shard("part.bin", 0, 1024), copy = shard("copy.bin", 5000, 3000);
    REQUIRE(warnings(a + "," + b, part + "," + copy).size() == 2);
    CHECK(warnings(a, part)[0].starts_with("warning: " + part + " begins like " + a + " of --train-data, "));
    CHECK(warnings(shard("few.bin", 0, 20), shard("same.bin", 0, 20)).empty());  // may be by chance
}
