// Tests of comm/collectives.h and, where ranks have no NCCL, of comm/host_nccl.h: on every rank of
// `mpirun -np N build/cpu-fp32/test_collectives`, for any N, and alone. Ranks must make the same calls, so nothing here
// leaves a case early.
#include "comm/collectives.h"
#include "comm/mpi_calls.h"
#include "test/testing.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <tuple>

namespace {

using std::chrono::milliseconds;

// ----------------------------------------------------------------------------
// the ranks

struct Ranks {
    int rank_ = 0, size_ = 1;

    Ranks() {
#ifndef WITHOUT_MPI
        int joined;
        MPI_Initialized(&joined);
        if (!joined) return;
        MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
        MPI_Comm_size(MPI_COMM_WORLD, &size_);
#endif
    }

    int rank() const {
        return rank_;
    }
    int size() const {
        return size_;
    }
    void broadcast([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes,
                   [[maybe_unused]] int root) const {
#ifndef WITHOUT_MPI
        if (size_ > 1) MPI_Bcast(data, (int)bytes, MPI_BYTE, root, MPI_COMM_WORLD);
#endif
    }
};

const Ranks& ranks() {
    static Ranks instance;
    return instance;
}

// All ranks, through the calls of NCCL themselves.
ncclComm_t everyone() {
    static ncclComm_t comm = [] {
        ncclUniqueId id = {};
        if (ranks().rank() == 0) ncclCheck(ncclGetUniqueId(&id));
        ranks().broadcast(&id, sizeof id, 0);
        ncclComm_t made = nullptr;
        ncclCheck(ncclCommInitRank(&made, ranks().size(), id, ranks().rank()));
        return made;
    }();
    return comm;
}

int rank_of(ncclComm_t comm) {
    int rank = -1;
    ncclCheck(ncclCommUserRank(comm, &rank));
    return rank;
}

int size_of(ncclComm_t comm) {
    int size = -1;
    ncclCheck(ncclCommCount(comm, &size));
    return size;
}

cudaStream_t second_stream() {
    static cudaStream_t stream = [] {
        cudaStream_t created;
        cudaCheck(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking));
        return created;
    }();
    return stream;
}

void synchronize() {
    cudaCheck(cudaStreamSynchronize(test_stream()));
    cudaCheck(cudaStreamSynchronize(second_stream()));
}

// Runs `task` on the stream. The task must outlive its run.
void enqueue(cudaStream_t stream, std::function<void()>& task) {
    cudaCheck(cudaLaunchHostFunc(
        stream, [](void* data) { (*static_cast<std::function<void()>*>(data))(); }, &task));
}

// ----------------------------------------------------------------------------
// data

struct Bf16 {
    uint16_t bits;

    Bf16() = default;
    explicit Bf16(float value) {  // round to nearest even, in double so that it shares nothing with the code
        float low = std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0xffff0000u);
        float high = std::bit_cast<float>((std::bit_cast<uint32_t>(value) & 0xffff0000u) + 0x10000u);
        double to_low = std::fabs((double)value - low), to_high = std::fabs((double)high - value);
        bool even = (std::bit_cast<uint32_t>(low) >> 16 & 1) == 0;
        float nearest = to_low < to_high || (to_low == to_high && even) ? low : high;
        bits = (uint16_t)(std::bit_cast<uint32_t>(nearest) >> 16);
    }
    explicit operator double() const { return std::bit_cast<float>((uint32_t)bits << 16); }
    bool operator==(const Bf16&) const = default;
};

template <typename T>
constexpr ncclDataType_t type_of() {
    if constexpr (std::is_same_v<T, Bf16>)
        return ncclBfloat16;
    else
        return nccl_type<T>();
}

// Element i of what a rank puts in: small integers, or numbers in [-1, 1) with 24 bits. (The finalizer of SplitMix64,
// which is quicker than philox.)
template <typename T>
T input(int rank, size_t i) {
    uint64_t bits = (i + ((uint64_t)rank << 40) + 1) * 0x9e3779b97f4a7c15u;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    if constexpr (std::is_integral_v<T>)
        return (T)((bits >> 40) % 40);
    else
        return T((float)((int64_t)(bits >> 40) - (1 << 23)) * 0x1p-23f);
}

template <typename T>
std::vector<T> inputs(int rank, size_t begin, size_t end) {
    std::vector<T> values(end - begin);
    for (size_t i = begin; i < end; i++) values[i - begin] = input<T>(rank, i);
    return values;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Device memory between two guards, which starts as poison.
template <typename T>
class Guarded {
public:
    explicit Guarded(size_t size) : size_(size), memory_(size + 2 * guard) {}
    Guarded(size_t size, size_t at, const std::vector<T>& values) : Guarded(size) {
        if (values.size()) copy_to_device(data() + at, values.data(), values.size(), test_stream());
    }

    T* data() { return memory_ + guard; }
    std::vector<T> host() {
        synchronize();
        auto all = memory_.host();
        return {all.begin() + guard, all.end() - guard};
    }
    bool guards_hold() {
        auto all = memory_.host();
        std::vector<T> guards(all.begin(), all.begin() + guard), poison(2 * guard);
        guards.insert(guards.end(), all.end() - guard, all.end());
        memset((void*)poison.data(), 0xff, 2 * guard * sizeof(T));
        return same_bits(guards, poison);
    }

private:
    static constexpr size_t guard = 16;
    size_t size_;
    Buffer<T> memory_;
};

// The sum or maximum of what all ranks put in, in double precision or exactly. For bf16 the additions are rounded, so
// they are made in the order of the ring: chunk c begins with rank `first + c`.
template <typename T>
std::vector<double> reduced(const std::vector<int>& members, size_t count, ncclRedOp_t op, int first) {
    int n = (int)members.size();
    std::vector<double> result(count);
    for (int c = 0; c < n; c++) {
        size_t rest = count % (size_t)n, whole = count / (size_t)n;
        size_t begin = whole * (size_t)c + std::min((size_t)c, rest),
               end = begin + whole + ((size_t)c < rest);
        for (size_t i = begin; i < end; i++) {
            double sum = (double)input<T>(members[(size_t)((c + first) % n)], i);
            for (int k = 1; k < n; k++) {
                double next = (double)input<T>(members[(size_t)((c + first + k) % n)], i);
                sum = op == ncclMax ? std::max(sum, next) : sum + next;
                if (std::is_same_v<T, Bf16>) sum = (double)Bf16((float)sum);
            }
            result[i] = sum;
        }
    }
    return result;
}

template <typename T>
bool close(const std::vector<T>& got, const std::vector<double>& want) {
    std::vector<double> values;
    for (T value : got) values.push_back((double)value);
    // of bf16 the order is known, and of integers it does not matter
    if (!std::is_same_v<T, float>) return values == want;
    return relative_error(values, want) < 1e-6;
}

std::vector<int> all_members() {
    std::vector<int> members;
    for (int r = 0; r < ranks().size(); r++) members.push_back(r);
    return members;
}

// Whether all ranks hold the same bits as rank 0.
template <typename T>
bool same_everywhere(const std::vector<T>& mine) {
    Guarded<uint8_t> bytes(mine.size() * sizeof(T));
    if (mine.size()) copy_to_device((T*)bytes.data(), mine.data(), mine.size(), test_stream());
    ncclCheck(ncclBroadcast(bytes.data(), bytes.data(), mine.size() * sizeof(T), ncclUint8, 0, everyone(),
                            test_stream()));
    auto of_root = bytes.host();
    return mine.empty() || memcmp(of_root.data(), mine.data(), of_root.size()) == 0;
}

// Counts that are nothing, less than the ranks, uneven, and even.
std::vector<size_t> counts() {
    auto n = (size_t)ranks().size();
    return {0, 1, 2, 3, n - 1, n, n + 1, 7 * n + 1, 30'011};
}
constexpr size_t large = 6'000'011;  // several blocks of pieces, and pieces of uneven size

// ----------------------------------------------------------------------------
// one call each, in place and not

template <typename T>
void try_all_reduce(size_t count, ncclRedOp_t op, bool in_place) {
    CAPTURE(count);
    CAPTURE(in_place);
    int rank = ranks().rank();
    auto mine = inputs<T>(rank, 0, count);
    Guarded<T> from(count, 0, mine), other(count);
    Guarded<T>& to = in_place ? from : other;
    ncclCheck(ncclAllReduce(from.data(), to.data(), count, type_of<T>(), op, everyone(), test_stream()));
    auto got = to.host();
    CHECK(close(got, reduced<T>(all_members(), count, op, 0)));
    CHECK(same_everywhere(got));
    CHECK(to.guards_hold());
    if (!in_place) CHECK(same_bits(from.host(), mine));
}

template <typename T>
void try_reduce_scatter(size_t part, ncclRedOp_t op, bool in_place) {
    CAPTURE(part);
    CAPTURE(in_place);
    int rank = ranks().rank(), size = ranks().size();
    size_t count = part * (size_t)size, begin = part * (size_t)rank;
    auto mine = inputs<T>(rank, 0, count);
    Guarded<T> from(count, 0, mine), other(part);
    T* to = in_place ? from.data() + begin : other.data();
    ncclCheck(ncclReduceScatter(from.data(), to, part, type_of<T>(), op, everyone(), test_stream()));
    auto after = from.host(),
         got = in_place ? std::vector<T>(after.begin() + begin, after.begin() + begin + part) : other.host();
    auto want = reduced<T>(all_members(), count, op, 1);
    CHECK(close(got, {want.begin() + begin, want.begin() + begin + part}));
    CHECK(from.guards_hold());
    CHECK(other.guards_hold());
    // what is not the result is as it was
    if (in_place) std::copy(mine.begin() + begin, mine.begin() + begin + part, after.begin() + begin);
    CHECK(same_bits(after, mine));
}

template <typename T>
void try_all_gather(size_t part, bool in_place) {
    CAPTURE(part);
    CAPTURE(in_place);
    int rank = ranks().rank(), size = ranks().size();
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
    bool is_root = ranks().rank() == root;
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
        for (bool in_place : {true, false}) {
            try_all_reduce<T>(count, ncclSum, in_place);
            try_all_reduce<T>(count, ncclMax, in_place);
        }
    }
}

TEST_CASE_TEMPLATE("reduce-scatter", T, float, Bf16, int32_t, int64_t, uint8_t) {
    for (size_t count : counts()) {
        for (bool in_place : {true, false}) {
            try_reduce_scatter<T>(count, ncclSum, in_place);
            try_reduce_scatter<T>(count, ncclMax, in_place);
        }
    }
}

TEST_CASE_TEMPLATE("all-gather", T, float, Bf16, int32_t, int64_t, uint8_t) {
    for (size_t count : counts()) {
        for (bool in_place : {true, false}) try_all_gather<T>(count, in_place);
    }
}

TEST_CASE_TEMPLATE("broadcast", T, float, Bf16, int64_t, uint8_t) {
    for (int root = 0; root < ranks().size(); root++) {
        for (size_t count : counts()) {
            for (bool in_place : {true, false}) try_broadcast<T>(count, root, in_place);
        }
    }
}

TEST_CASE("large buffers") {
    for (bool in_place : {true, false}) {
        try_all_reduce<float>(large, ncclSum, in_place);
        try_reduce_scatter<float>(large / (size_t)ranks().size(), ncclSum, in_place);
        try_all_gather<float>(large / (size_t)ranks().size(), in_place);
        try_broadcast<float>(large, ranks().size() - 1, in_place);
    }
    try_all_reduce<Bf16>(large, ncclSum, true);
    try_all_reduce<uint8_t>(large, ncclSum, false);
    // whatever the number of ranks, numbers of pieces that blocks do not divide
    for (size_t count : {size_t(1'300'003), size_t(2'345'679), size_t(3'100'001)}) {
        try_all_reduce<float>(count, ncclSum, false);
        try_reduce_scatter<float>(count / (size_t)ranks().size(), ncclSum, true);
    }
}

TEST_CASE("a maximum ignores NaN") {
    Buffer<float> data(std::vector<float>{(float)ranks().rank(), NAN});
    if (ranks().rank() != 0)
        copy_to_device((float*)data + 1, std::vector<float>{3.0f}.data(), 1, test_stream());
    ncclCheck(ncclAllReduce(data, data, 2, ncclFloat, ncclMax, everyone(), test_stream()));
    auto got = data.host();
    CHECK(got[0] == (float)(ranks().size() - 1));
    if (ranks().size() > 1) CHECK(got[1] == 3.0f);
}

TEST_CASE("a sum with NaN or infinity is not finite") {
    for (float value : {(float)NAN, INFINITY}) {
        std::vector<float> mine(5, 1.0f);
        std::vector<Bf16> short_mine(5, Bf16(1.0f));
        if (ranks().rank() == ranks().size() - 1) {
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
// messages between two ranks

TEST_CASE("each rank sends to the next and receives from the one before") {
    int rank = ranks().rank(), size = ranks().size();
    if (size == 1) return;
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
    int rank = ranks().rank(), size = ranks().size();
    if (size == 1) return;
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
    int rank = ranks().rank(), size = ranks().size();
    if (size == 1) return;
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

// ----------------------------------------------------------------------------
// streams

TEST_CASE("many collectives back to back on two streams") {
    int rank = ranks().rank(), size = ranks().size();
    constexpr size_t calls = 120;
    std::vector<std::unique_ptr<Guarded<float>>> sums;
    std::vector<std::unique_ptr<Guarded<int>>> gathered;
    auto count_of = [](size_t call) { return call * 997 % 5003; };
    for (size_t call = 0; call < calls; call++) {
        size_t count = count_of(call), part = count / (size_t)size;
        sums.push_back(std::make_unique<Guarded<float>>(count, 0, inputs<float>(rank, 0, count)));
        gathered.push_back(std::make_unique<Guarded<int>>(part * (size_t)size, part * (size_t)rank,
                                                          inputs<int>(rank, call, call + part)));
    }
    for (size_t call = 0; call < calls; call++) {
        size_t count = count_of(call), part = count / (size_t)size;
        cudaStream_t first = call % 3 ? test_stream() : second_stream();
        cudaStream_t second = call % 3 ? second_stream() : test_stream();
        float* sum = sums[call]->data();
        int* gather = gathered[call]->data();
        ncclCheck(ncclAllReduce(sum, sum, count, ncclFloat, ncclSum, everyone(), first));
        ncclCheck(ncclAllGather(gather + part * (size_t)rank, gather, part, ncclInt32, everyone(), second));
    }
    for (size_t call = 0; call < calls; call++) {
        CAPTURE(call);
        size_t count = count_of(call), part = count / (size_t)size;
        CHECK(close(sums[call]->host(), reduced<float>(all_members(), count, ncclSum, 0)));
        std::vector<int> want;
        for (int r = 0; r < size; r++) {
            auto theirs = inputs<int>(r, call, call + part);
            want.insert(want.end(), theirs.begin(), theirs.end());
        }
        CHECK(same_bits(gathered[call]->host(), want));
    }
}

TEST_CASE("a group of collectives on two streams") {
    int rank = ranks().rank(), size = ranks().size();
    constexpr size_t count = 20'001;
    Guarded<float> sum(count, 0, inputs<float>(rank, 0, count)),
        maximum(count, 0, inputs<float>(rank, 0, count));
    Guarded<int> gather(count * (size_t)size, count * (size_t)rank, inputs<int>(rank, 0, count));
    ncclCheck(ncclGroupStart());
    ncclCheck(ncclAllReduce(sum.data(), sum.data(), count, ncclFloat, ncclSum, everyone(), test_stream()));
    ncclCheck(ncclGroupStart());
    ncclCheck(ncclAllGather(gather.data() + count * (size_t)rank, gather.data(), count, ncclInt32, everyone(),
                            second_stream()));
    ncclCheck(ncclGroupEnd());
    ncclCheck(
        ncclAllReduce(maximum.data(), maximum.data(), count, ncclFloat, ncclMax, everyone(), test_stream()));
    ncclCheck(ncclGroupEnd());
    CHECK(close(sum.host(), reduced<float>(all_members(), count, ncclSum, 0)));
    CHECK(close(maximum.host(), reduced<float>(all_members(), count, ncclMax, 0)));
    std::vector<int> want;
    for (int r = 0; r < size; r++) {
        auto theirs = inputs<int>(r, 0, count);
        want.insert(want.end(), theirs.begin(), theirs.end());
    }
    CHECK(same_bits(gather.host(), want));
}

TEST_CASE("a call returns at once, and its work takes its turn in the stream") {
    int rank = ranks().rank();
    constexpr size_t count = 1000;
    std::vector<float> zeros(count, 0.0f);
    Guarded<float> data(count, 0, zeros);
    auto mine = inputs<float>(rank, 0, count);
    float* pinned;
    cudaCheck(cudaMallocHost((void**)&pinned, count * sizeof(float)));
    memcpy(pinned, mine.data(), count * sizeof(float));
    std::atomic<bool> open = false;
    std::function<void()> hold = [&] {
        for (int i = 0; i < 20'000 && !open; i++) std::this_thread::sleep_for(milliseconds(1));
        if (rank == 0) std::this_thread::sleep_for(milliseconds(100));  // the others come first
    };
    enqueue(test_stream(), hold);
    cudaCheck(
        cudaMemcpyAsync(data.data(), pinned, count * sizeof(float), cudaMemcpyHostToDevice, test_stream()));
    ncclCheck(ncclAllReduce(data.data(), data.data(), count, ncclFloat, ncclSum, everyone(), test_stream()));
    cudaCheck(
        cudaMemcpyAsync(pinned, data.data(), count * sizeof(float), cudaMemcpyDeviceToHost, test_stream()));
    CHECK(cudaStreamQuery(test_stream()) == cudaErrorNotReady);
    open = true;
    cudaCheck(cudaStreamSynchronize(test_stream()));
    auto want = reduced<float>(all_members(), count, ncclSum, 0);
    CHECK(close(std::vector<float>(pinned, pinned + count), want));
    cudaCheck(cudaFreeHost(pinned));
}

TEST_CASE("an event orders a collective behind another stream's work") {
    int rank = ranks().rank();
    constexpr size_t count = 5000;
    Guarded<float> data(count, 0, inputs<float>(rank, 0, count));
    cudaEvent_t event;
    cudaCheck(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (int round = 0; round < 10; round++) {
        ncclCheck(
            ncclAllReduce(data.data(), data.data(), count, ncclFloat, ncclMax, everyone(), test_stream()));
        cudaCheck(cudaEventRecord(event, test_stream()));
        cudaCheck(cudaStreamWaitEvent(second_stream(), event));
        ncclCheck(
            ncclAllReduce(data.data(), data.data(), count, ncclFloat, ncclMax, everyone(), second_stream()));
        cudaCheck(cudaEventRecord(event, second_stream()));
        cudaCheck(cudaStreamWaitEvent(test_stream(), event));
    }
    CHECK(close(data.host(), reduced<float>(all_members(), count, ncclMax, 0)));
    cudaCheck(cudaEventDestroy(event));
}

// ----------------------------------------------------------------------------
// groups of ranks

TEST_CASE("split communicators") {
    int rank = ranks().rank(), size = ranks().size();
    constexpr size_t count = 3001;
    for (bool reversed : {false, true}) {
        CAPTURE(reversed);
        ncclComm_t half = nullptr;
        ncclCheck(ncclCommSplit(everyone(), rank % 2, reversed ? -rank : rank, &half, nullptr));
        std::vector<int> members;
        for (int r = rank % 2; r < size; r += 2) members.push_back(r);
        if (reversed) std::reverse(members.begin(), members.end());
        int place = (int)(std::find(members.begin(), members.end(), rank) - members.begin());
        CHECK(size_of(half) == (int)members.size());
        CHECK(rank_of(half) == place);

        // at the same time as everyone's, on another stream
        Guarded<float> part(count, 0, inputs<float>(rank, 0, count)),
            all(count, 0, inputs<float>(rank, 0, count));
        auto of_all = [&] {
            ncclCheck(ncclAllReduce(all.data(), all.data(), count, ncclFloat, ncclSum, everyone(),
                                    second_stream()));
        };
        if (rank % 2) of_all();  // groups have no order between them
        ncclCheck(ncclAllReduce(part.data(), part.data(), count, ncclFloat, ncclSum, half, test_stream()));
        if (rank % 2 == 0) of_all();
        CHECK(close(part.host(), reduced<float>(members, count, ncclSum, 0)));
        CHECK(close(all.host(), reduced<float>(all_members(), count, ncclSum, 0)));
        ncclCheck(ncclCommDestroy(half));
    }
}

TEST_CASE("a rank without a color is in no group") {
    int rank = ranks().rank(), size = ranks().size();
    ncclComm_t rest = nullptr;
    ncclCheck(ncclCommSplit(everyone(), rank == 0 ? NCCL_SPLIT_NOCOLOR : 3, 0, &rest, nullptr));
    CHECK((rest == nullptr) == (rank == 0));
    if (!rest) return;
    CHECK(size_of(rest) == size - 1);
    CHECK(rank_of(rest) == rank - 1);
    ncclCheck(ncclCommDestroy(rest));
}

TEST_CASE("what NCCL refuses is an Error with its place and reason") {
    Buffer<float> data(4);
    int size = ranks().size();
    CHECK(ncclBroadcast(data, data, 4, ncclFloat, size, everyone(), test_stream()) == ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    CHECK_THROWS_WITH_AS(
        ncclCheck(ncclBroadcast(data, data, 4, ncclFloat, -1, everyone(), test_stream())),
        doctest::Contains("ncclBroadcast(data, data, 4, ncclFloat, -1, everyone(), test_stream()) failed: "
                          "invalid argument"),
        Error);
    CHECK_THROWS_WITH_AS(ncclCheck(ncclInvalidUsage), doctest::Contains("test/test_collectives.cu:"), Error);
    ncclResult_t error = ncclInternalError;
    ncclCheck(ncclCommGetAsyncError(everyone(), &error));
    CHECK(error == ncclSuccess);
}

// ----------------------------------------------------------------------------
// Communicator

TEST_CASE("a group of one does nothing") {
    Communicator alone;
    CHECK(alone.rank() == 0);
    CHECK(alone.size() == 1);
    Buffer<float> data(std::vector<float>{1, 2, 3});
    reset_traffic();
    alone.all_reduce((float*)data, 3, Traffic::gradients, test_stream());
    alone.reduce_scatter((float*)data, 3, Traffic::gradients, test_stream());
    alone.all_gather((float*)data, 3, Traffic::parameters, test_stream());
    alone.broadcast((float*)data, 3, 0, Traffic::weights, test_stream());
    alone.check();
    CHECK(alone.split(0, 0).size() == 1);
    CHECK(data.host() == std::vector<float>{1, 2, 3});
    for (Traffic kind : {Traffic::gradients, Traffic::parameters, Traffic::statistics, Traffic::weights})
        CHECK(bytes_sent(kind) == 0);
    CHECK_THROWS_AS(alone.send((float*)data, 3, 0, Traffic::weights, test_stream()), Error);
    CHECK_THROWS_AS(alone.receive((float*)data, 3, 0, test_stream()), Error);
}

TEST_CASE("the calls of a Communicator, and the bytes they send") {
    Communicator all = Communicator::of_world(ranks(), test_stream());
    int rank = ranks().rank(), size = ranks().size();
    CHECK(all.rank() == rank);
    CHECK(all.size() == size);
    if (size == 1) return;
    auto n = (size_t)size;
    for (size_t count : {size_t(0), size_t(1), n + 1, 7 * n, size_t(10'007), large}) {
        CAPTURE(count);
        size_t part = count / n;
        auto mine = inputs<float>(rank, 0, count);
        Guarded<float> sum(count, 0, mine), scattered(part * n, 0, {mine.begin(), mine.begin() + part * n});
        Guarded<float> copied(count, 0, rank == size - 1 ? mine : std::vector<float>());
        Guarded<float> received(count);
        synchronize();
        reset_traffic();
        [[maybe_unused]] uint64_t before = 0;
#if !defined(__CUDACC__) || defined(COMM_MPI)
        before = host_bytes_sent();
#endif
        all.all_reduce(sum.data(), count, Traffic::gradients, test_stream());
        all.reduce_scatter(scattered.data(), part, Traffic::statistics, test_stream());
        all.all_gather(scattered.data(), part, Traffic::parameters, test_stream());
        all.broadcast(copied.data(), count, size - 1, Traffic::weights, test_stream());
        uint64_t gradients = bytes_sent(Traffic::gradients), weights = bytes_sent(Traffic::weights);
        uint64_t kept = 0;
        for (int c : {rank + 1, rank + 2}) kept += count / n + ((size_t)(c % size) < count % n);
        CHECK(gradients == 4 * (2 * count - kept));
        if (count % n == 0) CHECK(gradients == 4 * 2 * count / n * (n - 1));
        CHECK(bytes_sent(Traffic::statistics) == 4 * part * (n - 1));
        CHECK(bytes_sent(Traffic::parameters) == 4 * part * (n - 1));
        CHECK(weights == (rank == size - 2 ? 0 : 4 * count));
        ncclCheck(ncclGroupStart());
        all.send((const float*)copied.data(), count, (rank + 1) % size, Traffic::weights, test_stream());
        all.receive(received.data(), count, (rank + size - 1) % size, test_stream());
        ncclCheck(ncclGroupEnd());
        CHECK(bytes_sent(Traffic::weights) == weights + 4 * count);
        synchronize();
#if !defined(__CUDACC__) || defined(COMM_MPI)
        uint64_t total = 0;
        for (size_t kind = 0; kind < traffic_names.size(); kind++) total += bytes_sent((Traffic)kind);
        CHECK(host_bytes_sent() - before == total);
#endif
        CHECK(close(sum.host(), reduced<float>(all_members(), count, ncclSum, 0)));
        CHECK(close(scattered.host(), reduced<float>(all_members(), part * n, ncclSum, 1)));
        CHECK(same_bits(copied.host(), inputs<float>(size - 1, 0, count)));
        CHECK(same_bits(received.host(), copied.host()));
        all.check();
    }
}

TEST_CASE("a group split from a Communicator") {
    Communicator all = Communicator::of_world(ranks(), test_stream());
    int rank = ranks().rank(), size = ranks().size();
    Communicator half = all.split(rank % 2, -rank);
    int members = (size + (rank % 2 == 0)) / 2;
    CHECK(half.size() == members);
    CHECK(half.rank() == members - 1 - rank / 2);
    Communicator same = half;
    CHECK(same.same_group(half));
    if (size > 1) CHECK(!half.same_group(all));
    Guarded<int> data(1, 0, {1 + rank});
    same.all_reduce(data.data(), 1, Traffic::statistics, test_stream());
    int want = 0;
    for (int r = rank % 2; r < size; r += 2) want += 1 + r;
    CHECK(data.host()[0] == want);
    Communicator none = all.split(rank == 0 ? -1 : 0, rank);
    CHECK(none.size() == (rank == 0 ? 1 : std::max(size - 1, 1)));
}

#if !defined(__CUDACC__) || defined(COMM_MPI)

// ----------------------------------------------------------------------------
// what only the host transport has

TEST_CASE("a slow link takes the time it must") {
    int size = ranks().size();
    constexpr size_t count = 500'000;
    Guarded<float> data(count, 0, std::vector<float>(count, 1.0f)),
        other(count, 0, std::vector<float>(count, 1.0f));
    synchronize();
    uint64_t before = host_bytes_sent();
    host_link_speed(0.02);
    auto start = std::chrono::steady_clock::now();
    // both streams share the link
    ncclCheck(ncclAllReduce(data.data(), data.data(), count, ncclFloat, ncclSum, everyone(), test_stream()));
    ncclCheck(
        ncclAllReduce(other.data(), other.data(), count, ncclFloat, ncclSum, everyone(), second_stream()));
    synchronize();
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    host_link_speed(0);
    auto bytes = (double)(host_bytes_sent() - before);
    if (size > 1) CHECK(bytes > 2e6);
    CHECK(seconds >= bytes / 0.02e9);
    for (auto* each : {&data, &other}) CHECK(each->host() == std::vector<float>(count, (float)size));
}

TEST_CASE("a communicator can be destroyed before its work is done") {
    int rank = ranks().rank();
    constexpr size_t count = 100'000;
    ncclComm_t copy = nullptr;
    ncclCheck(ncclCommSplit(everyone(), 0, rank, &copy, nullptr));
    Guarded<float> data(count, 0, inputs<float>(rank, 0, count));
    std::function<void()> sleep = [] { std::this_thread::sleep_for(milliseconds(50)); };
    enqueue(test_stream(), sleep);
    ncclCheck(ncclAllReduce(data.data(), data.data(), count, ncclFloat, ncclSum, copy, test_stream()));
    ncclCheck(ncclCommDestroy(copy));
    CHECK(close(data.host(), reduced<float>(all_members(), count, ncclSum, 0)));
}

TEST_CASE("an aborted communicator ends what waits") {
    int rank = ranks().rank(), size = ranks().size();
    if (size == 1) return;
    Communicator all = Communicator::of_world(ranks(), test_stream());
    Communicator pair = all.split(rank / 2, rank);
    if (pair.size() == 2) {
        Guarded<float> data(1000);
        pair.receive(data.data(), 1000, 1 - pair.rank(), test_stream());  // nobody sends
        pair.all_reduce(data.data(), 1000, Traffic::gradients, test_stream());
        std::this_thread::sleep_for(milliseconds(20));
        CHECK(cudaStreamQuery(test_stream()) == cudaErrorNotReady);
        pair.check();
        pair.abort();
        synchronize();
        CHECK_THROWS_AS(pair.check(), Error);
    }
    // the others are not touched
    Guarded<int> data(1, 0, {1});
    all.all_reduce(data.data(), 1, Traffic::statistics, test_stream());
    CHECK(data.host()[0] == size);
    all.check();
}

TEST_CASE("a failure of MPI is kept, and later calls are refused") {
    int rank = ranks().rank(), size = ranks().size();
    if (size == 1) return;
    ncclComm_t copy = nullptr;
    ncclCheck(ncclCommSplit(everyone(), 0, rank, &copy, nullptr));
    // A message longer than what the receiver expects is an error there.
    Guarded<float> data(1000);
    if (rank == 0) ncclCheck(ncclSend(data.data(), 1000, ncclFloat, 1, copy, test_stream()));
    if (rank == 1) ncclCheck(ncclRecv(data.data(), 10, ncclFloat, 0, copy, test_stream()));
    synchronize();
    ncclResult_t error = ncclSuccess;
    ncclCheck(ncclCommGetAsyncError(copy, &error));
    CHECK((error == ncclRemoteError) == (rank == 1));
    if (rank == 1) {
        CHECK(std::string(ncclGetLastError(copy)).find("MPI") != std::string::npos);
        CHECK(ncclSend(data.data(), 1, ncclFloat, 0, copy, test_stream()) == ncclRemoteError);
    }
    ncclCheck(ncclCommDestroy(copy));
}

TEST_CASE("the world is all ranks, and one id") {
    int rank = ranks().rank(), size = ranks().size();
    ncclComm_t made = nullptr;
    ncclUniqueId id = {};
    CHECK(ncclCommInitRank(&made, size, id, size) == ncclInvalidArgument);
    CHECK(made == nullptr);
    if (size == 1) {
        CHECK(ncclCommInitRank(&made, 2, id, 0) == ncclInvalidUsage);
        return;
    }
    CHECK(ncclCommInitRank(&made, size + 1, id, rank) == ncclInvalidUsage);
    id.internal[77] = (char)(rank == 1);
    CHECK(ncclCommInitRank(&made, size, id, rank) == ncclInvalidArgument);
    CHECK(made == nullptr);
}

#endif
