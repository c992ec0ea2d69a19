// Tests of the results of collectives. Runs under `mpirun -np N build/cpu-fp32/test_collectives`, for any N,
// and without mpirun. All ranks must make the same calls, so no case returns early.
// devices: cpu simt-bf16 cuda address thread
// ranks: 3 1 2 4
#include <cmath>
#include <memory>

#include "test/comm/collectives_testing.h"

namespace {

// Counts that are zero, less than the number of ranks, uneven, and even.
std::vector<size_t> counts() {
    auto n = (size_t)test_world().size();
    return {0, 1, 2, 3, n - 1, n, n + 1, 7 * n + 1, 30'011};
}
constexpr size_t large = 2'345'679;  // several blocks of pieces, and pieces of uneven size

// ----------------------------------------------------------------------------
// single calls, in place and not

template <typename T>
void try_all_reduce(size_t count, bool in_place) {
    CAPTURE(count);
    CAPTURE(in_place);
    int rank = test_world().rank();
    auto mine = inputs<T>(rank, 0, count);
    Guarded<T> from(count, 0, mine), other(count);
    Guarded<T>& to = in_place ? from : other;
    ncclCheck(ncclAllReduce(from.data(), to.data(), count, type_of<T>(), ncclSum, everyone(), test_stream()));
    auto got = to.host();
    CHECK(close(got, reduced<T>(all_members(), count, 0)));
    CHECK(same_everywhere(got));
    CHECK(to.guards_hold());
    if (!in_place) CHECK(same_bits(from.host(), mine));
}

template <typename T>
void try_reduce_scatter(size_t part, bool in_place) {
    CAPTURE(part);
    CAPTURE(in_place);
    int rank = test_world().rank(), size = test_world().size();
    size_t count = part * (size_t)size, begin = part * (size_t)rank;
    auto mine = inputs<T>(rank, 0, count);
    Guarded<T> from(count, 0, mine), other(part);
    T* to = in_place ? from.data() + begin : other.data();
    ncclCheck(ncclReduceScatter(from.data(), to, part, type_of<T>(), ncclSum, everyone(), test_stream()));
    auto after = from.host(),
         got = in_place ? std::vector<T>(after.begin() + begin, after.begin() + begin + part) : other.host();
    auto want = reduced<T>(all_members(), count, 1);
    CHECK(close(got, {want.begin() + begin, want.begin() + begin + part}));
    CHECK(from.guards_hold());
    CHECK(other.guards_hold());
    // everything except the result is unchanged
    if (in_place) std::copy(mine.begin() + begin, mine.begin() + begin + part, after.begin() + begin);
    CHECK(same_bits(after, mine));
}

template <typename T>
void try_all_gather(size_t part, bool in_place) {
    CAPTURE(part);
    CAPTURE(in_place);
    int rank = test_world().rank(), size = test_world().size();
    size_t count = part * (size_t)size, begin = part * (size_t)rank;
    auto mine = inputs<T>(rank, begin, begin + part);
    Guarded<T> to(count, in_place ? begin : 0, in_place ? mine : std::vector<T>()), other(part, 0, mine);
    const T* from = in_place ? to.data() + begin : other.data();
    ncclCheck(ncclAllGather(from, to.data(), part, type_of<T>(), everyone(), test_stream()));
    std::vector<T> want;
    for (int r = 0; r < size; r++) {
        auto theirs = inputs<T>(r, part * (size_t)r, part * (size_t)(r + 1));
        want.insert(want.end(), theirs.begin(), theirs.end());
    }
    CHECK(same_bits(to.host(), want));
    CHECK(same_bits(other.host(), mine));
    CHECK(to.guards_hold());
}

template <typename T>
void try_broadcast(size_t count, int root, bool in_place) {
    CAPTURE(count);
    CAPTURE(root);
    CAPTURE(in_place);
    bool is_root = test_world().rank() == root;
    auto want = inputs<T>(root, 0, count);
    Guarded<T> from(count, 0, is_root ? want : std::vector<T>()), other(count);
    Guarded<T>& to = in_place ? from : other;
    ncclCheck(ncclBroadcast(from.data(), to.data(), count, type_of<T>(), root, everyone(), test_stream()));
    CHECK(same_bits(to.host(), want));
    CHECK(to.guards_hold());
}

}  // namespace

TEST_CASE_TEMPLATE("all-reduce", T, float, Bf16, int32_t, int64_t, uint8_t) {
    for (size_t count : counts()) {
        for (bool in_place : {true, false}) try_all_reduce<T>(count, in_place);
    }
}

TEST_CASE_TEMPLATE("reduce-scatter", T, float, Bf16, int32_t, int64_t, uint8_t) {
    for (size_t count : counts()) {
        for (bool in_place : {true, false}) try_reduce_scatter<T>(count, in_place);
    }
}

TEST_CASE_TEMPLATE("all-gather", T, float, Bf16, int32_t, int64_t, uint8_t) {
    for (size_t count : counts()) {
        for (bool in_place : {true, false}) try_all_gather<T>(count, in_place);
    }
}

TEST_CASE_TEMPLATE("broadcast", T, float, Bf16, int64_t, uint8_t) {
    for (int root = 0; root < test_world().size(); root++) {
        for (size_t count : counts()) {
            for (bool in_place : {true, false}) try_broadcast<T>(count, root, in_place);
        }
    }
}

TEST_CASE("large buffers") {
    for (bool in_place : {true, false}) {
        try_all_reduce<float>(large, in_place);
        try_reduce_scatter<float>(large / (size_t)test_world().size(), in_place);
        try_all_gather<float>(large / (size_t)test_world().size(), in_place);
        try_broadcast<float>(large, test_world().size() - 1, in_place);
    }
    try_all_reduce<Bf16>(large, true);
    try_all_reduce<uint8_t>(large, false);
    // chunks smaller than a block of pieces, for any number of ranks
    try_all_reduce<float>(600'007, false);
    try_reduce_scatter<float>(300'007, true);
}

TEST_CASE("a sum with NaN or infinity is not finite") {
    for (float value : {(float)NAN, INFINITY}) {
        std::vector<float> mine(5, 1.0f);
        std::vector<Bf16> short_mine(5, Bf16(1.0f));
        if (test_world().rank() == test_world().size() - 1) {
            mine[3] = value;
            short_mine[3].bits = (uint16_t)(std::bit_cast<uint32_t>(value) >> 16);
        }
        Buffer<float> data(mine);
        Guarded<Bf16> short_data(5, 0, short_mine);
        ncclCheck(ncclAllReduce(data, data, 5, ncclFloat, ncclSum, everyone(), test_stream()));
        ncclCheck(ncclAllReduce(short_data.data(), short_data.data(), 5, ncclBfloat16, ncclSum, everyone(),
                                test_stream()));
        auto got = data.host();
        auto short_got = short_data.host();
        for (size_t i = 0; i < 5; i++) {
            CHECK(std::isfinite(got[i]) == (i != 3));
            CHECK(std::isfinite((double)short_got[i]) == (i != 3));
        }
    }
}

// ----------------------------------------------------------------------------
// calls of a Communicator that are not in place

TEST_CASE_TEMPLATE("a Communicator gathers from elsewhere and scatters to elsewhere", T, float, int64_t) {
    Communicator all = Communicator::of_world(test_world(), test_stream());
    int rank = test_world().rank(), size = test_world().size();
    for (size_t part : {size_t(0), size_t(1), size_t(1001)}) {
        CAPTURE(part);
        size_t count = part * (size_t)size, begin = part * (size_t)rank;
        auto mine = inputs<T>(rank, 0, count);
        std::vector<T> mine_own(mine.begin() + begin, mine.begin() + begin + part), want;
        for (int r = 0; r < size; r++) {
            auto theirs = inputs<T>(r, part * (size_t)r, part * (size_t)(r + 1));
            want.insert(want.end(), theirs.begin(), theirs.end());
        }
        auto sums = reduced<T>(all_members(), count, 1);

        Guarded<T> own(part, 0, mine_own), gathered(count), data(count, 0, mine), sum(part);
        uint64_t before = bytes_sent(Traffic::activations), pipeline = bytes_sent(Traffic::pipeline);
        all.all_gather((const T*)own.data(), gathered.data(), part, Traffic::activations, test_stream());
        all.reduce_scatter((const T*)data.data(), sum.data(), part, Traffic::activations, test_stream());
        CHECK(bytes_sent(Traffic::activations) - before == 2 * (count - part) * sizeof(T));
        CHECK(bytes_sent(Traffic::pipeline) == pipeline);
        CHECK(same_bits(gathered.host(), want));
        CHECK(same_bits(own.host(), mine_own));
        CHECK(close(sum.host(), {sums.begin() + begin, sums.begin() + begin + part}));
        CHECK(same_bits(data.host(), mine));
        for (Guarded<T>* each : {&own, &gathered, &data, &sum}) CHECK(each->guards_hold());
    }
}

// ----------------------------------------------------------------------------
// messages between two ranks

TEST_CASE("each rank sends to the next and receives from the one before") {
    int rank = test_world().rank(), size = test_world().size();
    if (size == 1) SKIP("one rank has no other");
    int next = (rank + 1) % size, before = (rank + size - 1) % size;
    for (size_t count : {size_t(0), size_t(1), size_t(1001), large}) {
        CAPTURE(count);
        auto mine = inputs<float>(rank, 0, count);
        Guarded<float> from(count, 0, mine), to(count);
        ncclCheck(ncclGroupStart());
        ncclCheck(ncclSend(from.data(), count, ncclFloat, next, everyone(), test_stream()));
        ncclCheck(ncclRecv(to.data(), count, ncclFloat, before, everyone(), test_stream()));
        ncclCheck(ncclGroupEnd());
        CHECK(same_bits(to.host(), inputs<float>(before, 0, count)));
        CHECK(to.guards_hold());
    }
}

TEST_CASE("all send to all, in opposite orders") {
    int rank = test_world().rank(), size = test_world().size();
    if (size == 1) SKIP("one rank has no other");
    constexpr size_t count = 300'007;
    auto mine = inputs<int>(rank, 0, count * (size_t)size);
    Guarded<int> from(count * (size_t)size, 0, mine), to(count * (size_t)size);
    ncclCheck(ncclGroupStart());
    for (int k = 0; k < size; k++) {
        int to_rank = rank % 2 ? k : size - 1 - k, from_rank = rank % 2 ? k : (k + 1) % size;
        ncclCheck(ncclSend(from.data() + count * (size_t)to_rank, count, ncclInt32, to_rank, everyone(),
                           test_stream()));
        ncclCheck(ncclRecv(to.data() + count * (size_t)from_rank, count, ncclInt32, from_rank, everyone(),
                           test_stream()));
    }
    ncclCheck(ncclGroupEnd());
    auto got = to.host();
    for (int r = 0; r < size; r++) {
        std::vector<int> part(got.begin() + (long)count * r, got.begin() + (long)count * (r + 1));
        CHECK(same_bits(part, inputs<int>(r, count * (size_t)rank, count * (size_t)(rank + 1))));
    }
}

TEST_CASE("a row of messages arrives in order") {
    int rank = test_world().rank(), size = test_world().size();
    if (size == 1) SKIP("one rank has no other");
    constexpr size_t messages = 50;
    std::vector<std::vector<int>> sent;
    std::vector<std::unique_ptr<Guarded<int>>> buffers;
    for (size_t m = 0; m < messages; m++) {
        size_t count = m * m * 37;
        sent.push_back(inputs<int>((int)m, 0, count));
        buffers.push_back(rank == 0 ? std::make_unique<Guarded<int>>(count, 0, sent[m])
                                    : std::make_unique<Guarded<int>>(count));
    }
    for (size_t m = 0; m < messages; m++) {
        size_t count = sent[m].size();
        if (rank == 0)
            ncclCheck(ncclSend(buffers[m]->data(), count, ncclInt32, size - 1, everyone(), test_stream()));
        if (rank == size - 1)
            ncclCheck(ncclRecv(buffers[m]->data(), count, ncclInt32, 0, everyone(), test_stream()));
    }
    synchronize();
    if (rank != size - 1) return;
    for (size_t m = 0; m < messages; m++) CHECK(same_bits(buffers[m]->host(), sent[m]));
}
