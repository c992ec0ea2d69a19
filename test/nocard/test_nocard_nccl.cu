// The stand-in for NCCL (test/nocard/): sums and copies between ranks, groups and their splits, timing left
// open by NCCL, and calls that differ between ranks.
// ranks: 2 1 4
#include <nccl.h>

#include <cstdio>
#include <map>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "test/nocard/number_types.h"
#include "test/nocard/runtime_testing.h"
#include "test/support/ranks.h"

namespace {

int rank() {
    return test_world().rank();
}
int ranks() {
    return test_world().size();
}

ncclResult_t when_over_here(ncclResult_t result, ncclComm_t comm) {
    while (result == ncclInProgress) REQUIRE(ncclCommGetAsyncError(comm, &result) == ncclSuccess);
    return result;
}

ncclComm_t make_group(bool blocking = true) {
    ncclUniqueId id;
    if (rank() == 0) ncclGetUniqueId(&id);
    test_world().broadcast(&id, sizeof id, 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking;
    ncclComm_t made;
    ncclResult_t result = ncclCommInitRankConfig(&made, ranks(), id, rank(), &config);
    CHECK((result == ncclInProgress) == !blocking);
    REQUIRE(when_over_here(result, made) == ncclSuccess);
    return made;
}

ncclComm_t all_ranks() {
    static const ncclComm_t group = make_group();
    return group;
}

void require_nccl(ncclResult_t result) {
    REQUIRE_MESSAGE(result == ncclSuccess, ncclGetErrorString(result));
}

// Whole numbers, whose sums are exact in each type.
int number_of(int of_rank, size_t i) {
    return (int)(i * 7 + (size_t)of_rank * 3) % 13;
}

template <typename T>
struct TypeOf;
template <>
struct TypeOf<float> {
    static constexpr ncclDataType_t type = ncclFloat;
    static float make(int x) { return (float)x; }
};
template <>
struct TypeOf<uint16_t> {
    static constexpr ncclDataType_t type = ncclBfloat16;
    static uint16_t make(int x) { return nocard::to_bf16((float)x); }
};
template <>
struct TypeOf<int64_t> {
    static constexpr ncclDataType_t type = ncclInt64;
    static int64_t make(int x) { return x; }
};

template <typename T>
std::vector<T> numbers_of(int of_rank, size_t count) {
    std::vector<T> numbers(count);
    for (size_t i = 0; i < count; i++) numbers[i] = TypeOf<T>::make(number_of(of_rank, i));
    return numbers;
}

template <typename T>
std::vector<T> sums_of(size_t count) {
    std::vector<T> sums(count);
    for (size_t i = 0; i < count; i++) {
        int sum = 0;
        for (int r = 0; r < ranks(); r++) sum += number_of(r, i);
        sums[i] = TypeOf<T>::make(sum);
    }
    return sums;
}

template <typename T>
std::vector<T> on_host(const T* card, size_t count) {
    std::vector<T> values(count);
    require(cudaMemcpy(values.data(), card, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
}

}  // namespace

TEST_CASE_TEMPLATE("collectives are plain sums and copies, in place and elsewhere", T, float, uint16_t,
                   int64_t) {
    const ncclDataType_t type = TypeOf<T>::type;
    TestStream stream;
    for (size_t part : {size_t(1), size_t(3), size_t(1001)}) {
        CAPTURE(part);
        size_t count = part * (size_t)ranks(), own = part * (size_t)rank();
        auto mine = numbers_of<T>(rank(), count), sums = sums_of<T>(count);
        std::vector<T> own_sums(sums.begin() + (long)own, sums.begin() + (long)(own + part)), gathered;
        for (int r = 0; r < ranks(); r++) {
            auto theirs = numbers_of<T>(r, count);
            gathered.insert(gathered.end(), theirs.begin(), theirs.begin() + (long)part);
        }
        TestMemory<T> data(mine), other(count), small(part);
        require_nccl(ncclAllReduce(data, other, count, type, ncclSum, all_ranks(), stream));
        require_nccl(ncclReduceScatter(data, small, part, type, ncclSum, all_ranks(), stream));
        stream.wait();
        CHECK(on_host<T>(other, count) == sums);
        CHECK(on_host<T>(small, part) == own_sums);
        require_nccl(ncclAllGather(data, other, part, type, all_ranks(), stream));
        stream.wait();
        CHECK(on_host<T>(other, count) == gathered);
        int root = ranks() - 1;
        require_nccl(ncclBroadcast(data, other, count, type, root, all_ranks(), stream));
        stream.wait();
        CHECK(on_host<T>(other, count) == numbers_of<T>(root, count));
        // in place: this rank's part of the larger buffer, or all of it
        require_nccl(ncclReduceScatter(data, data + own, part, type, ncclSum, all_ranks(), stream));
        stream.wait();
        CHECK(on_host<T>(data + own, part) == own_sums);
        require_nccl(ncclAllGather(data + own, data, part, type, all_ranks(), stream));
        stream.wait();
        CHECK(on_host<T>(data, count) == sums);
        require_nccl(ncclAllReduce(data, data, count, type, ncclMax, all_ranks(), stream));
        stream.wait();
        CHECK(on_host<T>(data, count) == sums);
    }
}

TEST_CASE("messages of a group of calls wait for each other in no order") {
    if (ranks() == 1) SKIP("one rank has nobody to send to");
    TestStream stream;
    constexpr size_t count = 100000;
    int next = (rank() + 1) % ranks(), before = (rank() + ranks() - 1) % ranks();
    TestMemory<float> sent(numbers_of<float>(rank(), count)), received(count);
    for (bool receives_first : {false, true}) {
        require_nccl(ncclGroupStart());
        if (receives_first) require_nccl(ncclRecv(received, count, ncclFloat, before, all_ranks(), stream));
        require_nccl(ncclSend(sent, count, ncclFloat, next, all_ranks(), stream));
        if (!receives_first) require_nccl(ncclRecv(received, count, ncclFloat, before, all_ranks(), stream));
        require_nccl(ncclGroupEnd());
        stream.wait();
        CHECK(on_host<float>(received, count) == numbers_of<float>(before, count));
    }
}

TEST_CASE("a group is split by colors and keys, and its parts talk beside each "
          "other") {
    TestStream stream, other;
    TestMemory<float> one(std::vector<float>{1}), two(std::vector<float>{1});
    ncclComm_t part, reversed, none = all_ranks();
    require_nccl(ncclCommSplit(all_ranks(), rank() % 2, rank(), &part, nullptr));
    require_nccl(ncclCommSplit(all_ranks(), 0, -rank() + ranks(), &reversed, nullptr));
    require_nccl(ncclCommSplit(all_ranks(), NCCL_SPLIT_NOCOLOR, 0, &none, nullptr));
    CHECK(none == nullptr);
    int size, number;
    require_nccl(ncclCommCount(part, &size));
    CHECK(size == (ranks() + 1 - rank() % 2) / 2);
    require_nccl(ncclCommUserRank(part, &number));
    CHECK(number == rank() / 2);
    require_nccl(ncclCommUserRank(reversed, &number));
    CHECK(number == ranks() - 1 - rank());
    // ranks start them in different orders, on separate streams
    auto start = [&](bool first) {
        ncclComm_t group = first ? part : reversed;
        float* data = first ? one : two;
        require_nccl(ncclAllReduce(data, data, 1, ncclFloat, ncclSum, group, first ? stream : other));
    };
    start(rank() % 2);
    start(!(rank() % 2));
    stream.wait();
    other.wait();
    CHECK(on_host<float>(one, 1)[0] == (float)size);
    CHECK(on_host<float>(two, 1)[0] == (float)ranks());
    require_nccl(ncclCommDestroy(part));
    require_nccl(ncclCommDestroy(reversed));
}

TEST_CASE("a group that is not blocking is made, split, used and ended while "
          "it is asked for") {
    TestStream stream;
    TestMemory<float> one(std::vector<float>{1});
    ncclComm_t group = make_group(false), part;
    require_nccl(when_over_here(ncclCommSplit(group, 0, rank(), &part, nullptr), group));
    require_nccl(ncclAllReduce(one, one, 1, ncclFloat, ncclSum, part, stream));
    require_nccl(when_over_here(ncclAllReduce(one, one, 1, ncclFloat, ncclSum, group, stream), group));
    stream.wait();
    CHECK(on_host<float>(one, 1)[0] == (float)(ranks() * ranks()));
    require_nccl(when_over_here(ncclCommFinalize(group), group));
    require_nccl(ncclCommDestroy(group));
    require_nccl(ncclCommDestroy(part));
}

TEST_CASE("a stream that does not wait for a collective may see what was there "
          "before") {
    TestStream stream, reader;
    TestEvent done;
    TestMemory<float> from(std::vector<float>{1}), to(std::vector<float>{-1}), host(1, true);
    for (bool waits : {false, true}) {
        int right = right_under_seeds([&] {
            require(cudaMemsetAsync(to, 0, 4, reader));
            reader.wait();
            test_world().barrier();
            require_nccl(ncclAllReduce(from, to, 1, ncclFloat, ncclSum, all_ranks(), stream));
            require(cudaEventRecord(done, stream));
            if (waits) require(cudaStreamWaitEvent(reader, done, 0));
            require(cudaMemcpyAsync(host, to, 4, cudaMemcpyDeviceToHost, reader));
            reader.wait();
            stream.wait();
            return *host.data == (float)ranks();
        });
        CHECK((right == seeds) == waits);
    }
}

TEST_CASE("a graph talks anew each time") {
    TestStream stream;
    TestMemory<float> data(std::vector<float>{1});
    cudaGraphExec_t graph = captured(stream, [&] {
        require_nccl(ncclAllReduce(data, data, 1, ncclFloat, ncclSum, all_ranks(), stream));
        require_nccl(ncclAllReduce(data, data, 1, ncclFloat, ncclSum, all_ranks(), stream));
    });
    for (int i = 0; i < 2; i++) require(cudaGraphLaunch(graph, stream));
    stream.wait();
    float want = (float)(ranks() * ranks() * ranks() * ranks());
    CHECK(on_host<float>(data, 1)[0] == want);
    require(cudaGraphExecDestroy(graph));
}

TEST_CASE("groups take memory of the card, by their channels") {
    auto free_memory = [] {
        size_t free_bytes, total;
        require(cudaMemGetInfo(&free_bytes, &total));
        return free_bytes;
    };
    size_t before = free_memory();
    ncclComm_t few, many;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.maxCTAs = 4;
    require_nccl(ncclCommSplit(all_ranks(), 0, rank(), &few, &config));
    size_t of_few = before - free_memory();
    require_nccl(ncclCommSplit(all_ranks(), 0, rank(), &many, nullptr));
    size_t of_many = before - of_few - free_memory();
    CHECK((of_few > 0) == (ranks() > 1));
    CHECK(of_many == 4 * of_few);
    require_nccl(ncclCommDestroy(few));
    require_nccl(ncclCommDestroy(many));
    CHECK(free_memory() == before);
}

TEST_CASE("an abort ends what waits for others") {
    if (ranks() == 1) SKIP("one rank waits for nobody");
    TestStream stream;
    TestMemory<float> data(1);
    ncclComm_t group = make_group();
    if (rank() == 0) require_nccl(ncclRecv(data, 1, ncclFloat, 1, group, stream));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (rank() == 0) CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    require_nccl(ncclCommAbort(group));
    stream.wait();
    CHECK(cudaStreamQuery(stream) == cudaSuccess);
}

TEST_CASE("calls that NCCL refuses") {
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    ncclComm_t made;
    CHECK(ncclCommInitRank(&made, ranks(), id, ranks()) == ncclInvalidArgument);
    CHECK(ncclCommInitRank(&made, ranks() + 1, id, rank()) == ncclInvalidUsage);
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    CHECK(ncclBroadcast(nullptr, nullptr, 0, ncclFloat, ranks(), all_ranks(), nullptr) ==
          ncclInvalidArgument);
}

// ----------------------------------------------------------------------------
// planted defects, in jobs of two ranks

namespace {

struct Planted {
    const char* says;
    std::function<void(float* card)> defect;  // (8) numbers
};

const std::map<std::string, Planted>& planted() {
    static const std::map<std::string, Planted> all = {
        {"other counts",
         {"ranks",
          [](float* card) {
              ncclAllReduce(card, card, 1 + (size_t)rank(), ncclFloat, ncclSum, all_ranks(), nullptr);
          }}},
        {"other types",
         {"make different calls",
          [](float* card) {
              ncclAllReduce(card, card, 2, rank() ? ncclFloat : ncclInt32, ncclSum, all_ranks(), nullptr);
          }}},
        {"other operations",
         {"make different calls",
          [](float* card) {
              ncclAllReduce(card, card, 2, ncclFloat, rank() ? ncclSum : ncclMax, all_ranks(), nullptr);
          }}},
        {"another order",
         {"ncclAllGather of",
          [](float* card) {
              for (bool gathers : {rank() == 0, rank() == 1}) {
                  if (gathers)
                      ncclAllGather(card, card + 4, 2, ncclFloat, all_ranks(), nullptr);
                  else
                      ncclAllReduce(card, card, 2, ncclFloat, ncclSum, all_ranks(), nullptr);
              }
          }}},
        {"another root",
         {"make different calls",
          [](float* card) {
              ncclBroadcast(card, card, 2, ncclFloat, rank() ? 0 : 1, all_ranks(), nullptr);
              ncclAllReduce(card, card, 2, ncclFloat, ncclSum, all_ranks(), nullptr);
          }}},
        {"a message of another length",
         {"make different calls",
          [](float* card) {
              if (rank())
                  ncclSend(card, 2, ncclFloat, 0, all_ranks(), nullptr);
              else
                  ncclRecv(card, 3, ncclFloat, 1, all_ranks(), nullptr);
          }}},
        {"results beyond an allocation",
         {"ncclAllGather: what it writes",
          [](float* card) { ncclAllGather(card, card + 1, 4, ncclFloat, all_ranks(), nullptr); }}},
        {"results over the input",
         {"overlaps",
          [](float* card) { ncclAllReduce(card, card + 1, 4, ncclFloat, ncclSum, all_ranks(), nullptr); }}},
        {"memory of the host",
         {"is not live memory of the card",
          [](float*) {
              static float host;
              ncclAllReduce(&host, &host, 1, ncclFloat, ncclSum, all_ranks(), nullptr);
          }}},
        {"a read of what nobody wrote",
         {"reads bytes that nobody wrote",
          [](float* card) {
              float* none;
              cudaMalloc((void**)&none, 4);
              ncclAllReduce(none, card, 1, ncclFloat, ncclSum, all_ranks(), nullptr);
          }}},
        {"memory that is freed while it is used",
         {"ncclAllReduce is not done, and uses",
          [](float* card) {
              ncclAllReduce(card, card, 1, ncclFloat, ncclSum, all_ranks(), nullptr);
              cudaFree(card);
          }}},
        {"a group that was ended",
         {"is no communicator",
          [](float* card) {
              ncclComm_t part;
              ncclCommSplit(all_ranks(), 0, rank(), &part, nullptr);
              ncclCommDestroy(part);
              ncclAllReduce(card, card, 1, ncclFloat, ncclSum, part, nullptr);
          }}},
    };
    return all;
}

// Reruns this program as a job of two ranks with the defect. Returns its output.
std::string run_planted(const std::string& name, int& code) {
    char self[4096] = {};
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) return "";
    // Without the environment that MPI set for this process.
    std::string command = std::string("env -i PATH=\"$PATH\" HOME=/tmp TMPDIR=/tmp PLANTED='") + name +
                          "' mpirun --allow-run-as-root --oversubscribe -n 2 '" + self +
                          "' --test-case='the planted defect' 2>&1 </dev/null",
                output;
    FILE* pipe = popen(command.c_str(), "r");
    char part[4096];
    while (size_t bytes = fread(part, 1, sizeof part, pipe)) output.append(part, bytes);
    code = WEXITSTATUS(pclose(pipe));
    return output;
}

}  // namespace

TEST_CASE("the planted defect") {
    const char* name = getenv("PLANTED");
    if (!name) SKIP("for the case behind it");
    TestMemory<float> card(std::vector<float>(8, 1));
    planted().at(name).defect(card);
    cudaDeviceSynchronize();
    CHECK_MESSAGE(false, "nobody has seen it");
}

TEST_CASE("each check ends a job with a line that names the call") {
    if (ranks() > 1) SKIP("it starts jobs of its own");
    for (auto& [name, defect] : planted()) {
        CAPTURE(name);
        int code = 0;
        std::string output = run_planted(name, code);
        CAPTURE(output);
        CHECK(code != 0);
        CHECK(output.find("nocard: ") != std::string::npos);
        CHECK(output.find(defect.says) != std::string::npos);
    }
}
