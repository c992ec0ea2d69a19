// Micro-batches: their content, reading ahead, and how errors are reported.
#include "test/support/file_testing.h"

#include <chrono>
#include <map>
#include <thread>

#include "data/tokens/batch_reader.h"

static std::vector<uint16_t> random_tokens(size_t count, uint32_t vocab) {
    std::vector<uint16_t> tokens(count);
    uint64_t key = random_key(1, "tokens");
    for (size_t i = 0; i < count; i++) tokens[i] = (uint16_t)(philox(key, i).at[0] % vocab);
    return tokens;
}

// Compares a batch with its expected content, computed from the definition. On a context rank, token t is
// token position(t) of the whole row.
static void check_batch(const HostBatch& batch, const TokenLoader& loader, const BatchShape& shape,
                        uint64_t first, int count) {
    auto [B, T, document_end, reset_positions, contexts, context] = shape;
    const int own = T / contexts, piece = own / 2;
    size_t all = (size_t)B * (size_t)T, N = all / (size_t)contexts;
    REQUIRE(batch.targets == batch.tokens + N);
    REQUIRE(batch.doc_start == (document_end < 0 ? nullptr : batch.targets + N));
    REQUIRE(batch.positions == batch.targets + N + all);
    REQUIRE(batch.by_token == batch.positions + N);
    REQUIRE(batch.by_position == batch.by_token + N);
    REQUIRE(batch.all_tokens == (contexts == 1 ? batch.tokens : batch.by_position + N));
    CHECK((size_t)(batch.by_position + N - batch.tokens) + (contexts > 1 ? all : 0) == shape.ints());
    std::map<int, std::vector<int>> of_tokens, of_positions;
    int wrong = 0;
    for (int row = 0; row < B; row++) {
        std::vector<int> inputs((size_t)T, 0), targets((size_t)T, -1);
        if (row < count) loader.load(first + (uint64_t)row, inputs.data(), targets.data());
        auto start_of = [&](int t) {
            while (t > 0 && inputs[(size_t)t - 1] != document_end) t--;
            return t;
        };
        for (int t = 0; t < T; t++) {
            size_t at = (size_t)(row * T + t);
            wrong += batch.all_tokens[at] != inputs[(size_t)t];
            wrong += (batch.doc_start ? batch.doc_start[at] : 0) != start_of(t);
        }
        for (int i = 0; i < own; i++) {
            int n = row * own + i, t = i;
            if (contexts > 1) t = i < piece ? context * piece + i : (2 * contexts - 2 - context) * piece + i;
            wrong += batch.tokens[n] != inputs[(size_t)t] || batch.targets[n] != targets[(size_t)t];
            int position = reset_positions ? t - start_of(t) : t;
            wrong += batch.positions[n] != position;
            of_tokens[inputs[(size_t)t]].push_back(n);
            of_positions[position].push_back(n);
        }
    }
    CHECK(wrong == 0);
    auto check_order = [&](const int* order, const std::map<int, std::vector<int>>& places_of) {
        std::vector<int> want;
        for (const auto& [key, places] : places_of) want.insert(want.end(), places.begin(), places.end());
        CHECK(std::vector<int>(order, order + N) == want);
    };
    check_order(batch.by_token, of_tokens);
    check_order(batch.by_position, of_positions);
}

TEST_CASE("batches: any request, guessed or not") {
    TemporaryFolder folder;
    write_file(folder / "a.bin", shard_bytes(random_tokens(5000, 40)));
    for (BatchShape shape : {BatchShape{1, 1, -1, false},
                             {3, 7, 5, true},
                             {3, 7, 5, false},
                             {4, 33, 0, true},
                             {2, 64, -1, false},
                             {2, 64, -1, true},
                             {5, 16, 39, false},
                             {3, 16, 5, true, 2, 0},
                             {2, 24, 5, false, 2, 1},
                             {2, 32, -1, false, 4, 2}}) {
        TokenLoader loader(folder / "a.bin", 40, shape.T, SampleOrder::shuffled, 3);
        for (uint64_t stride : {(uint64_t)shape.B, 4 * (uint64_t)shape.B, uint64_t(0)}) {
            CAPTURE(shape.B);
            CAPTURE(stride);
            BatchReader reader(loader, shape, stride);
            auto check = [&](uint64_t first, int count) {
                CAPTURE(first);
                CAPTURE(count);
                check_batch(reader.load(first, count), loader, shape, first, count);
            };
            for (uint64_t i = 0; i < 20; i++) check(7 + i * stride, shape.B);
            check(1ull << 40, shape.B);  // elsewhere
            check((1ull << 40) + stride, shape.B);
            check((1ull << 40) + 2 * stride, shape.B - 1);  // in order, but not whole
            check((1ull << 40) + 3 * stride, 0);
            check((1ull << 40) + 3 * stride, shape.B);  // now whole
            check(0, shape.B);
        }
    }
}

TEST_CASE("batches: one is valid until the next call") {
    TemporaryFolder folder;
    write_file(folder / "a.bin", shard_bytes(random_tokens(20000, 1000)));
    const int B = 4, T = 32;
    TokenLoader loader(folder / "a.bin", 1000, T, SampleOrder::shuffled, 3);
    BatchReader reader(loader, {B, T, -1, false}, B);
    for (uint64_t first = 0; first < 20 * B; first += B) {
        const HostBatch& batch = reader.load(first, B);
        std::vector<int> now(batch.tokens, batch.tokens + batch_ints(B, T));
        std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the next one is being read
        CHECK(std::equal(now.begin(), now.end(), batch.tokens));
    }
}

// The test changes the tokens of a file that is in use: a batch that was read ahead has the old ones.
TEST_CASE("batches: the next one is read before it is asked for, and no other") {
    TemporaryFolder folder;
    std::string path = folder / "a.bin";
    const int B = 2, T = 16, samples = 8;
    write_file(path, shard_bytes(std::vector<uint16_t>(samples * T + 1, 1)));
    TokenLoader loader(path, 1000, T, SampleOrder::sequential);
    auto fill = [&](uint16_t token) {
        std::vector<uint16_t> tokens(samples * T + 1, token);
        std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
        file.seekp(shard_header_bytes);
        file.write((const char*)tokens.data(), (long)(2 * tokens.size()));
    };
    bool ahead = false;
    for (int attempt = 0; attempt < 12 && !ahead; attempt++) {
        fill(1);
        BatchReader reader(loader, {B, T, -1, false}, 2 * B);
        CHECK(reader.load(0, B).tokens[0] == 1);
        std::this_thread::sleep_for(std::chrono::milliseconds(1 << attempt));
        fill(2);
        ahead = reader.load(2 * B, B).tokens[0] == 1;
    }
    CHECK(ahead);
    ahead = false;
    for (int attempt = 0; attempt < 12 && !ahead; attempt++) {  // the next batch is named: not at the stride
        fill(1);
        BatchReader reader(loader, {B, T, -1, false}, 2 * B);
        CHECK(reader.load(0, B, 3 * B).tokens[0] == 1);
        std::this_thread::sleep_for(std::chrono::milliseconds(1 << attempt));
        fill(2);
        ahead = reader.load(3 * B, B).tokens[0] == 1;
    }
    CHECK(ahead);
    for (auto [first, count] : {std::pair(B, B), {2 * B, B - 1}, {0, B}}) {
        fill(1);
        BatchReader reader(loader, {B, T, -1, false}, 2 * B);
        CHECK(reader.load(0, B).tokens[0] == 1);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        fill(2);
        CHECK(reader.load((uint64_t)first, count).tokens[0] == 2);
    }
}

TEST_CASE("batches: what cannot be read is said when it is asked for, and the next can be read") {
    TemporaryFolder folder;
    std::string path = folder / "a.bin";
    const int B = 2, T = 8;
    std::vector<uint16_t> tokens(40 * T + 1, 3);
    tokens[9 * T + 2] = 77;  // in sample 9, of batch 4
    write_file(path, shard_bytes(tokens));
    TokenLoader loader(path, 50, T, SampleOrder::sequential);
    auto check_failure = [&](BatchReader& reader) {
        check_error(error_of([&] { reader.load(8, B); }), path,
                    "token 74 is 77, outside the vocabulary of 50");
    };
    {
        BatchReader reader(loader, {B, T, -1, false}, B);
        for (uint64_t first : {4, 6}) check_batch(reader.load(first, B), loader, {B, T, -1, false}, first, B);
        check_failure(reader);
        check_batch(reader.load(10, B), loader, {B, T, -1, false}, 10, B);
        check_batch(reader.load(12, B), loader, {B, T, -1, false}, 12, B);
        check_failure(reader);
        check_failure(reader);
        check_batch(reader.load(8, 0), loader, {B, T, -1, false}, 8, 0);
        check_batch(reader.load(8, 1), loader, {B, T, -1, false}, 8, 1);
        check_batch(reader.load(10, B), loader, {B, T, -1, false}, 10, B);
    }
    {
        BatchReader reader(loader, {B, T, -1, false}, B);  // fails at its first batch
        check_failure(reader);
        check_batch(reader.load(10, B), loader, {B, T, -1, false}, 10, B);
    }
    {
        BatchReader reader(loader, {B, T, -1, false}, B);  // the bad batch is read ahead, and never asked for
        reader.load(6, B);
        check_batch(reader.load(20, B), loader, {B, T, -1, false}, 20, B);
    }
    {
        BatchReader reader(loader, {B, T, -1, false}, B);
        reader.load(6, B);
    }
    BatchReader never_asked(loader, {B, T, -1, false}, B);
}
