// Tests of sequence parallelism: the rows between products. Runs under
// `mpirun -np N build/cpu-fp32/test_tensor_parallel`, for any N, and without mpirun. All ranks must make the
// same calls, so no case returns early.
// devices: cpu simt-bf16 cuda address thread
// ranks: 2 1 4
#include <chrono>
#include <thread>

#include "comm/tensor_parallel.h"
#include "test/comm/collectives_testing.h"

namespace {

using std::chrono::milliseconds;

// All ranks, as one tensor group. Never destroyed: at the end of the process the device may be gone.
const Communicator& group() {
    static auto& all = *new Communicator(Communicator::of_world(test_world(), test_stream()));
    return all;
}

// ----------------------------------------------------------------------------
// own rows, by definition

struct Rows {
    int rows, width, chunks;

    size_t size() const { return (size_t)rows * width; }
    int chunk() const { return rows / chunks; }
    // The rank's rows in the order in which its buffer holds them.
    std::vector<int> of_rank(int rank, int ranks = test_world().size()) const {
        std::vector<int> result;
        int part = chunk() / ranks;
        for (int row = 0; row < rows; row++) {
            if (row % chunk() / part == rank) result.push_back(row);
        }
        return result;
    }
    std::vector<floatX> own(const std::vector<floatX>& all, int rank) const {
        std::vector<floatX> result;
        for (int row : of_rank(rank)) {
            result.insert(result.end(), all.begin() + row * width, all.begin() + (row + 1) * width);
        }
        return result;
    }
};

// Shapes with one row per rank in a chunk, and with several.
std::vector<Rows> shapes() {
    int size = test_world().size();
    std::vector<Rows> result;
    for (int chunks : {1, 2, 3, 4, 7}) {
        int used = size == 1 ? 1 : chunks;
        result.push_back({size * chunks, 5, used});
        result.push_back({size * chunks * 3, 1, used});
        result.push_back({size * chunks * 2, 64, used});
    }
    result.push_back({size * 4 * 50, 500, size == 1 ? 1 : 4});  // several messages per chunk
    return result;
}

// Integers whose sums over a few ranks are exact in floatX.
std::vector<floatX> whole_numbers(int key, size_t count) {
    std::vector<floatX> result(count);
    for (size_t i = 0; i < count; i++) result[i] = floatX((float)input<int>(key, i));
    return result;
}

std::vector<floatX> sum_of_ranks(int key, size_t count) {
    std::vector<floatX> sum(count, floatX(0.0f));
    for (int rank = 0; rank < test_world().size(); rank++) {
        auto theirs = whole_numbers(key + rank, count);
        for (size_t i = 0; i < count; i++) sum[i] = floatX((float)sum[i] + (float)theirs[i]);
    }
    return sum;
}

// Numbers whose sums are rounded.
std::vector<floatX> fractions(int key, size_t count) {
    auto values = inputs<float>(key, 0, count);
    return {values.begin(), values.end()};
}

// ----------------------------------------------------------------------------
// work on the compute stream

void copy(floatX* to, const floatX* from, size_t count) {
    cudaCheck(cudaMemcpyAsync(to, from, count * sizeof(floatX), cudaMemcpyDeviceToDevice, test_stream()));
}

void poison(floatX* data, size_t count) {
    cudaCheck(cudaMemsetAsync(data, 0xff, count * sizeof(floatX), test_stream()));
}

// Work that takes a while, so that a missing wait for it shows.
void take_time() {
    static std::function<void()> sleep = [] { std::this_thread::sleep_for(milliseconds(5)); };
    enqueue(test_stream(), sleep);
}

// Records the calls of a work function, which must cover the chunks in order.
struct Calls {
    const Rows& shape;
    std::vector<std::pair<int, int>> made;

    void add(int first, int count) { made.push_back({first, count}); }
    bool all_made() const {
        std::vector<std::pair<int, int>> want;
        for (int c = 0; c < shape.chunks; c++) want.push_back({c * shape.chunk(), shape.chunk()});
        return made == want;
    }
};

uint64_t sent_activations() {
    return bytes_sent(Traffic::activations);
}

// Bytes sent, of all kinds of traffic.
uint64_t sent_at_all() {
    uint64_t total = 0;
    for (size_t kind = 0; kind < traffic_names.size(); kind++) total += bytes_sent((Traffic)kind);
    return total;
}

// ----------------------------------------------------------------------------
// single calls

void try_gather(const Rows& shape, bool overlap) {
    CAPTURE(shape.rows);
    CAPTURE(shape.width);
    CAPTURE(shape.chunks);
    CAPTURE(overlap);
    int rank = test_world().rank(), size = test_world().size();
    SequenceParallel shards(group(), shape.chunks, overlap, test_stream());
    CHECK(shards.own_rows(shape.rows) == shape.rows / size);
    auto whole = fractions(7, shape.size()), mine = shape.own(whole, rank);
    REQUIRE(mine.size() == shape.size() / size);
    Guarded<floatX> own(mine.size(), 0, mine), others(shape.size()), seen(shape.size());
    Guarded<floatX>& all = size == 1 ? own : others;
    Calls calls = {shape, {}};
    synchronize();
    reset_traffic();
    shards.gather(own.data(), all.data(), shape.rows, shape.width, [&](int first, int count) {
        calls.add(first, count);
        size_t at = (size_t)first * shape.width;
        copy(seen.data() + at, all.data() + at, (size_t)count * shape.width);
    });
    CHECK(calls.all_made());
    CHECK(sent_activations() == (size - 1) * mine.size() * sizeof(floatX));
    CHECK(sent_at_all() == sent_activations());
    CHECK(same_bits(seen.host(), whole));
    CHECK(same_bits(all.host(), whole));
    CHECK(same_bits(own.host(), mine));
    for (auto* each : {&own, &others, &seen}) CHECK(each->guards_hold());
}

void try_scatter(const Rows& shape, bool overlap) {
    CAPTURE(shape.rows);
    CAPTURE(shape.width);
    CAPTURE(shape.chunks);
    CAPTURE(overlap);
    int rank = test_world().rank(), size = test_world().size();
    SequenceParallel shards(group(), shape.chunks, overlap, test_stream());
    auto mine = whole_numbers(rank, shape.size());
    Guarded<floatX> source(shape.size(), 0, mine), all(shape.size()), own(shape.size() / size);
    Guarded<floatX>& result = size == 1 ? all : own;
    Calls calls = {shape, {}};
    synchronize();
    reset_traffic();
    shards.scatter(result.data(), all.data(), shape.rows, shape.width, [&](int first, int count) {
        calls.add(first, count);
        size_t at = (size_t)first * shape.width;
        copy(all.data() + at, source.data() + at, (size_t)count * shape.width);
    });
    shards.wait();
    CHECK(calls.all_made());
    CHECK(sent_activations() == (size - 1) * (shape.size() / size) * sizeof(floatX));
    CHECK(sent_at_all() == sent_activations());
    CHECK(same_bits(result.host(), shape.own(sum_of_ranks(0, shape.size()), rank)));
    CHECK(same_bits(all.host(), mine));
    for (auto* each : {&own, &all, &source}) CHECK(each->guards_hold());
}

}  // namespace

TEST_CASE("own rows of all ranks come together") {
    for (const Rows& shape : shapes()) {
        for (bool overlap : {true, false}) try_gather(shape, overlap);
    }
}

TEST_CASE("sums over the ranks go to those whose rows they are") {
    for (const Rows& shape : shapes()) {
        for (bool overlap : {true, false}) try_scatter(shape, overlap);
    }
}

TEST_CASE("the rows of a rank, as the picture shows them") {
    Rows shape = {12, 1, 2};
    CHECK(shape.of_rank(0, 3) == std::vector<int>{0, 1, 6, 7});
    CHECK(shape.of_rank(1, 3) == std::vector<int>{2, 3, 8, 9});
    CHECK(shape.of_rank(2, 3) == std::vector<int>{4, 5, 10, 11});
}

TEST_CASE("rounded sums are the same bits with and without overlap") {
    int rank = test_world().rank(), size = test_world().size();
    for (int chunks : {1, 3}) {
        CAPTURE(chunks);
        Rows shape = {size * chunks * 4, 100, size == 1 ? 1 : chunks};
        std::vector<std::vector<floatX>> results;
        for (bool overlap : {true, false, true}) {
            SequenceParallel shards(group(), chunks, overlap, test_stream());
            Guarded<floatX> all(shape.size(), 0, fractions(rank, shape.size())), own(shape.size() / size);
            Guarded<floatX>& result = size == 1 ? all : own;
            shards.scatter(result.data(), all.data(), shape.rows, shape.width, [](int, int) {});
            shards.wait();
            results.push_back(result.host());
        }
        CHECK(same_bits(results[0], results[1]));
        CHECK(same_bits(results[0], results[2]));
        std::vector<double> sum(shape.size());
        for (int r = 0; r < size; r++) {
            auto theirs = to_doubles(fractions(r, shape.size()));
            for (size_t i = 0; i < sum.size(); i++) sum[i] += theirs[i];
        }
        std::vector<double> want;
        for (int row : shape.of_rank(rank)) {
            want.insert(want.end(), sum.begin() + row * shape.width, sum.begin() + (row + 1) * shape.width);
        }
        CHECK(relative_error(to_doubles(results[0]), want) < tolerance<floatX>);
    }
}

// ----------------------------------------------------------------------------
// order: the host does not wait in these tests, and some rank is always slow

// Rounds like those of layers: own rows are computed, gathered, used, and scattered, in the same buffers.
TEST_CASE("buffers are used again right behind") {
    int rank = test_world().rank(), size = test_world().size();
    constexpr int rounds = 6;
    Rows shape = {size * 3 * 4, 33, size == 1 ? 1 : 3};
    for (bool overlap : {true, false}) {
        CAPTURE(overlap);
        SequenceParallel shards(group(), 3, overlap, test_stream());
        size_t whole = shape.size(), part = whole / size;
        Guarded<floatX> own_rows(part), all_rows(whole);
        floatX* all = all_rows.data();
        floatX* own = size == 1 ? all : own_rows.data();
        std::vector<std::unique_ptr<Guarded<floatX>>> made, seen, contributed, sums;
        for (int round = 0; round < rounds; round++) {
            made.push_back(std::make_unique<Guarded<floatX>>(
                part, 0, shape.own(whole_numbers(100 * round + 50, whole), rank)));
            contributed.push_back(
                std::make_unique<Guarded<floatX>>(whole, 0, whole_numbers(100 * round + rank, whole)));
            seen.push_back(std::make_unique<Guarded<floatX>>(whole));
            sums.push_back(std::make_unique<Guarded<floatX>>(part));
        }
        synchronize();
        for (int round = 0; round < rounds; round++) {
            bool slow = (round + rank) % size == 0;
            if (slow) take_time();
            copy(own, made[round]->data(), part);
            shards.gather(own, all, shape.rows, shape.width, [&](int first, int count) {
                if (slow) take_time();
                size_t at = (size_t)first * shape.width, n = (size_t)count * shape.width;
                copy(seen[round]->data() + at, all + at, n);
            });
            poison(own, part);
            poison(all, whole);
            shards.scatter(own, all, shape.rows, shape.width, [&](int first, int count) {
                if (slow) take_time();
                size_t at = (size_t)first * shape.width, n = (size_t)count * shape.width;
                copy(all + at, contributed[round]->data() + at, n);
            });
            shards.wait();
            copy(sums[round]->data(), own, part);
            poison(own, part);
            poison(all, whole);
        }
        for (int round = 0; round < rounds; round++) {
            CAPTURE(round);
            CHECK(same_bits(seen[round]->host(), whole_numbers(100 * round + 50, whole)));
            CHECK(same_bits(sums[round]->host(), shape.own(sum_of_ranks(100 * round, whole), rank)));
        }
    }
}

// The test does not wait in between: the calls themselves ensure the order.
TEST_CASE("a scatter or a gather comes after the scatter before") {
    int rank = test_world().rank(), size = test_world().size();
    if (size == 1) SKIP("one rank has no other");
    Rows shape = {size * 2 * 5, 40, 2};
    size_t whole = shape.size(), part = whole / size;
    for (int slow_rank = 0; slow_rank < size; slow_rank++) {
        CAPTURE(slow_rank);
        SequenceParallel shards(group(), 2, true, test_stream());
        Guarded<floatX> first(whole, 0, whole_numbers(rank, whole)),
            second(whole, 0, whole_numbers(200 + rank, whole));
        Guarded<floatX> all(whole), gathered(whole), own(part), other(part);
        synchronize();
        if (rank == slow_rank) take_time();
        for (auto [source, to] : {std::pair(&first, &own), std::pair(&second, &other)}) {
            shards.scatter(to->data(), all.data(), shape.rows, shape.width, [&](int row, int count) {
                size_t at = (size_t)row * shape.width;
                copy(all.data() + at, source->data() + at, (size_t)count * shape.width);
            });
        }
        // results of the second scatter are re-gathered
        shards.gather(other.data(), gathered.data(), shape.rows, shape.width, [](int, int) {});
        poison(all.data(), whole);
        CHECK(same_bits(gathered.host(), sum_of_ranks(200, whole)));
        CHECK(same_bits(own.host(), shape.own(sum_of_ranks(0, whole), rank)));
    }
}

// A layer's backward pass does this: it re-gathers rows while an earlier product's sums are being scattered.
TEST_CASE("rows come together while sums are scattered") {
    int rank = test_world().rank(), size = test_world().size();
    if (size == 1) SKIP("one rank has no other");
    constexpr int rounds = 4;
    Rows shape = {size * 3 * 4, 33, 3};
    size_t whole = shape.size(), part = whole / size;
    for (bool overlap : {true, false}) {
        CAPTURE(overlap);
        SequenceParallel shards(group(), 3, overlap, test_stream());
        Guarded<floatX> own(part), all(whole), partial(whole), own_sum(part);
        std::vector<std::unique_ptr<Guarded<floatX>>> made, seen, contributed, sums;
        for (int round = 0; round < rounds; round++) {
            made.push_back(std::make_unique<Guarded<floatX>>(
                part, 0, shape.own(whole_numbers(100 * round + 50, whole), rank)));
            contributed.push_back(
                std::make_unique<Guarded<floatX>>(whole, 0, whole_numbers(100 * round + rank, whole)));
            seen.push_back(std::make_unique<Guarded<floatX>>(whole));
            sums.push_back(std::make_unique<Guarded<floatX>>(part));
        }
        synchronize();
        reset_traffic();
        for (int round = 0; round < rounds; round++) {
            if ((round + rank) % size == 0) take_time();
            copy(own.data(), made[round]->data(), part);
            shards.start_gather(own.data(), all.data(), shape.rows, shape.width);
            shards.scatter(own_sum.data(), partial.data(), shape.rows, shape.width, [&](int row, int count) {
                size_t at = (size_t)row * shape.width;
                copy(partial.data() + at, contributed[round]->data() + at, (size_t)count * shape.width);
            });
            shards.wait_for_gathered();
            poison(own.data(), part);
            copy(seen[round]->data(), all.data(), whole);
            poison(all.data(), whole);
            shards.wait();
            copy(sums[round]->data(), own_sum.data(), part);
        }
        CHECK(sent_activations() == 2 * rounds * (size - 1) * part * sizeof(floatX));
        for (int round = 0; round < rounds; round++) {
            CAPTURE(round);
            CHECK(same_bits(seen[round]->host(), whole_numbers(100 * round + 50, whole)));
            CHECK(same_bits(sums[round]->host(), shape.own(sum_of_ranks(100 * round, whole), rank)));
        }
    }
}

// ----------------------------------------------------------------------------
// overlap: a stream of rank 0 is blocked until the last rank has continued

namespace {

// Work of rank 0 that waits for a message from the last rank.
class Hold {
public:
    Hold() : pair_(group().split(0, test_world().rank())), message_(1, 0, {5}), received_(1) {}

    void put() { pair_.receive(received_.data(), 1, pair_.size() - 1, test_stream()); }
    // Called by the last rank.
    void end() { pair_.send((const int*)message_.data(), 1, 0, Traffic::statistics, second_stream()); }

private:
    Communicator pair_;
    Guarded<int> message_, received_;
};

// A point in the work on the compute stream.
class Point {
public:
    Point() { cudaCheck(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
    ~Point() { cudaEventDestroy(event_); }
    Point(const Point&) = delete;
    Point& operator=(const Point&) = delete;

    void put() { cudaCheck(cudaEventRecord(event_, test_stream())); }
    bool reached() { return cudaEventQuery(event_) == cudaSuccess; }

private:
    cudaEvent_t event_;
};

template <typename Condition>
bool comes_true(Condition&& condition) {
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!condition() && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(milliseconds(1));
    }
    return condition();
}

}  // namespace

TEST_CASE("rows are worked on while those of the next chunk are on their way") {
    int rank = test_world().rank(), size = test_world().size();
    if (size == 1) SKIP("one rank has no other");
    Rows shape = {size * 3 * 50, 301, 3};
    auto want = fractions(7, shape.size()), mine = shape.own(want, rank);
    size_t part = mine.size() / 3;
    SequenceParallel shards(group(), 3, true, test_stream());
    Hold hold;
    Point worked;
    Guarded<floatX> own(mine.size(), 0, mine), all(shape.size());
    synchronize();
    if (rank == 0) {  // sends its part of the second chunk late
        for (int chunk = 0; chunk < 3; chunk++) {
            if (chunk == 1) hold.put();
            group().all_gather((const floatX*)own.data() + chunk * part, all.data() + chunk * part * size,
                               part, Traffic::activations, test_stream());
        }
    } else {
        shards.gather(own.data(), all.data(), shape.rows, shape.width, [&](int first, int) {
            if (first == 0) worked.put();
        });
    }
    if (rank == size - 1) {
        CHECK(comes_true([&] { return worked.reached(); }));
        CHECK(cudaStreamQuery(test_stream()) == cudaErrorNotReady);
        hold.end();
    }
    CHECK(same_bits(all.host(), want));
}

TEST_CASE("sums are on their way while the next chunks are computed") {
    int rank = test_world().rank(), size = test_world().size();
    if (size == 1) SKIP("one rank has no other");
    Rows shape = {size * 3 * 50, 301, 3};
    SequenceParallel shards(group(), 3, true, test_stream());
    Hold hold;
    Point computed;
    Guarded<floatX> all(shape.size(), 0, whole_numbers(rank, shape.size())), own(shape.size() / size);
    synchronize();
    shards.scatter(own.data(), all.data(), shape.rows, shape.width, [&](int first, int) {
        if (rank == 0 && first == 0) hold.put();
    });
    computed.put();
    shards.wait();
    if (rank == size - 1) {
        CHECK(comes_true([&] { return computed.reached(); }));
        CHECK(cudaStreamQuery(test_stream()) == cudaErrorNotReady);
        hold.end();
    }
    CHECK(same_bits(own.host(), shape.own(sum_of_ranks(0, shape.size()), rank)));
}

TEST_CASE("chunks go on their way while earlier ones are worked on") {
    int rank = test_world().rank(), size = test_world().size();
    if (size == 1) SKIP("one rank has no other");
    Rows shape = {size * 3 * 50, 301, 3};
    auto want = fractions(7, shape.size()), mine = shape.own(want, rank);
    SequenceParallel shards(group(), 3, true, test_stream());
    Hold hold;
    Guarded<floatX> own(mine.size(), 0, mine), all(shape.size()), seen(shape.size());
    synchronize();
    shards.gather(own.data(), all.data(), shape.rows, shape.width, [&](int first, int count) {
        if (rank == 0 && first == 0) hold.put();
        size_t at = (size_t)first * shape.width;
        copy(seen.data() + at, all.data() + at, (size_t)count * shape.width);
    });
    if (rank == size - 1) {
        CHECK(comes_true([] { return cudaStreamQuery(test_stream()) == cudaSuccess; }));
        hold.end();
    }
    CHECK(same_bits(seen.host(), want));
}

TEST_CASE("sums go on their way while other work is on the compute stream") {
    int rank = test_world().rank(), size = test_world().size();
    if (size == 1) SKIP("one rank has no other");
    Rows shape = {size * 3 * 50, 301, 3};
    SequenceParallel shards(group(), 3, true, test_stream());
    Hold hold;
    Guarded<floatX> all(shape.size(), 0, whole_numbers(rank, shape.size())), own(shape.size() / size);
    synchronize();
    shards.scatter(own.data(), all.data(), shape.rows, shape.width, [](int, int) {});
    if (rank == 0) hold.put();
    shards.wait();
    if (rank == size - 1) {
        CHECK(comes_true([] { return cudaStreamQuery(test_stream()) == cudaSuccess; }));
        hold.end();
    }
    CHECK(same_bits(own.host(), shape.own(sum_of_ranks(0, shape.size()), rank)));
}

TEST_CASE("rows come together while other work is on the compute stream") {
    int rank = test_world().rank(), size = test_world().size();
    if (size == 1) SKIP("one rank has no other");
    Rows shape = {size * 3 * 50, 301, 3};
    auto want = fractions(7, shape.size()), mine = shape.own(want, rank);
    SequenceParallel shards(group(), 3, true, test_stream());
    Hold hold;
    Guarded<floatX> own(mine.size(), 0, mine), all(shape.size());
    synchronize();
    shards.start_gather(own.data(), all.data(), shape.rows, shape.width);
    if (rank == 0) hold.put();
    shards.wait_for_gathered();
    if (rank == size - 1) {
        CHECK(comes_true([] { return cudaStreamQuery(test_stream()) == cudaSuccess; }));
        hold.end();
    }
    CHECK(same_bits(all.host(), want));
}

#ifndef RANKS_USE_NCCL
// Only the host transport counts the bytes that have actually been sent.
TEST_CASE("a chunk is sent while the next is computed") {
    int rank = test_world().rank(), size = test_world().size();
    if (size == 1) SKIP("one rank has no other");
    Rows shape = {size * 3 * 50, 301, 3};
    size_t own_chunk = shape.size() / size / shape.chunks * sizeof(floatX);
    SequenceParallel shards(group(), 3, true, test_stream());
    Hold hold;
    Guarded<floatX> all(shape.size(), 0, whole_numbers(rank, shape.size())), own(shape.size() / size);
    synchronize();
    uint64_t before = host_link.bytes_sent;
    shards.scatter(own.data(), all.data(), shape.rows, shape.width, [&](int first, int) {
        if (rank == 0 && first == shape.chunk()) hold.put();
    });
    shards.wait();
    if (rank == 0) {
        // only the first chunk
        uint64_t want = before + (size - 1) * own_chunk;
        CHECK(comes_true([&] { return host_link.bytes_sent >= want; }));
        CHECK(host_link.bytes_sent == want);
    }
    test_world().largest(0);
    if (rank == size - 1) hold.end();
    CHECK(same_bits(own.host(), shape.own(sum_of_ranks(0, shape.size()), rank)));
}
#endif

// ----------------------------------------------------------------------------
// groups of one, and refusals

TEST_CASE("in a group of one all rows are own rows") {
    Buffer<floatX> rows(std::vector<float>{1, 2, 3, 4, 5, 6});
    SequenceParallel none, alone(Communicator(), 4, true, test_stream());
    reset_traffic();
    for (SequenceParallel* shards : {&none, &alone}) {
        CHECK(shards->ranks() == 1);
        CHECK(shards->rank() == 0);
        CHECK(shards->chunks() == 1);
        CHECK(shards->own_rows(3) == 3);
        std::vector<std::pair<int, int>> calls;
        auto work = [&](int first, int count) { calls.push_back({first, count}); };
        shards->gather(rows, rows, 3, 2, work);
        shards->scatter(rows, rows, 3, 2, work);
        shards->wait();
        shards->start_gather(rows, rows, 3, 2);
        shards->wait_for_gathered();
        CHECK(calls == std::vector<std::pair<int, int>>{{0, 3}, {0, 3}});
        CHECK_THROWS_AS(shards->gather(rows, rows + 2, 2, 2, work), Error);
        CHECK_THROWS_AS(shards->scatter(rows + 2, rows, 2, 2, work), Error);
    }
    CHECK(rows.doubles() == std::vector<double>{1, 2, 3, 4, 5, 6});
    CHECK(sent_at_all() == 0);
}

TEST_CASE("what cannot be cut evenly is refused") {
    int size = test_world().size();
    CHECK_THROWS_WITH_AS(SequenceParallel(group(), 0, true, test_stream()), doctest::Contains("0 chunks"),
                         Error);
    if (size == 1) return;
    SequenceParallel shards(group(), 3, true, test_stream());
    CHECK(shards.ranks() == size);
    CHECK(shards.rank() == test_world().rank());
    CHECK(shards.chunks() == 3);
    CHECK(shards.own_rows(6 * size) == 6);
    Buffer<floatX> rows(4);
    CHECK(shards.own_rows(2 * size) == 2);  // in one chunk
    int uneven = 3 * size + 1;
    auto work = [](int, int) { FAIL("nothing is there to work on"); };
    CHECK_THROWS_WITH_AS(shards.own_rows(uneven), doctest::Contains("--sequence-length"), Error);
    CHECK_THROWS_AS(shards.gather(rows, rows, uneven, 1, work), Error);
    CHECK_THROWS_AS(shards.scatter(rows, rows, uneven, 1, work), Error);
}
