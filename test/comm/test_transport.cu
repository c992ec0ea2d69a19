// Tests of the transport of collectives: streams, groups of calls and of ranks, the bytes sent, a slow link,
// and failures. Runs under `mpirun -np N build/cpu-fp32/test_transport`, for any N, and without mpirun. All
// ranks must make the same calls, so no case returns early.
// devices: cpu simt-bf16 cuda address thread
// ranks: 3 1 2 4
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "test/comm/collectives_testing.h"
#include "test/support/file_testing.h"

using std::chrono::milliseconds;

// ----------------------------------------------------------------------------
// streams

TEST_CASE("many collectives back to back on two streams") {
    int rank = test_world().rank(), size = test_world().size();
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
        CHECK(close(sums[call]->host(), reduced<float>(all_members(), count, 0)));
        std::vector<int> want;
        for (int r = 0; r < size; r++) {
            auto theirs = inputs<int>(r, call, call + part);
            want.insert(want.end(), theirs.begin(), theirs.end());
        }
        CHECK(same_bits(gathered[call]->host(), want));
    }
}

TEST_CASE("a group of collectives on two streams") {
    int rank = test_world().rank(), size = test_world().size();
    constexpr size_t count = 20'001;
    Guarded<float> sum(count, 0, inputs<float>(rank, 0, count));
    Guarded<int> whole_sum(count, 0, inputs<int>(rank, 0, count));
    Guarded<int> gather(count * (size_t)size, count * (size_t)rank, inputs<int>(rank, 0, count));
    ncclCheck(ncclGroupStart());
    ncclCheck(ncclAllReduce(sum.data(), sum.data(), count, ncclFloat, ncclSum, everyone(), test_stream()));
    ncclCheck(ncclGroupStart());
    ncclCheck(ncclAllGather(gather.data() + count * (size_t)rank, gather.data(), count, ncclInt32, everyone(),
                            second_stream()));
    ncclCheck(ncclGroupEnd());
    ncclCheck(ncclAllReduce(whole_sum.data(), whole_sum.data(), count, ncclInt32, ncclSum, everyone(),
                            test_stream()));
    ncclCheck(ncclGroupEnd());
    CHECK(close(sum.host(), reduced<float>(all_members(), count, 0)));
    CHECK(close(whole_sum.host(), reduced<int>(all_members(), count, 0)));
    std::vector<int> want;
    for (int r = 0; r < size; r++) {
        auto theirs = inputs<int>(r, 0, count);
        want.insert(want.end(), theirs.begin(), theirs.end());
    }
    CHECK(same_bits(gather.host(), want));
}

TEST_CASE("a call returns at once, and its work takes its turn in the stream") {
    int rank = test_world().rank();
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
        if (rank == 0) std::this_thread::sleep_for(milliseconds(100));  // the others arrive first
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
    auto want = reduced<float>(all_members(), count, 0);
    CHECK(close(std::vector<float>(pinned, pinned + count), want));
    cudaCheck(cudaFreeHost(pinned));
}

TEST_CASE("an event orders a collective behind another stream's work") {
    int rank = test_world().rank();
    constexpr size_t count = 5000;
    Guarded<float> data(count, 0, inputs<float>(rank, 0, count));
    cudaEvent_t event;
    cudaCheck(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    auto want = reduced<float>(all_members(), count, 0);
    auto sum_on = [&](cudaStream_t stream, cudaStream_t next) {
        ncclCheck(ncclAllReduce(data.data(), data.data(), count, ncclFloat, ncclSum, everyone(), stream));
        cudaCheck(cudaEventRecord(event, stream));
        cudaCheck(cudaStreamWaitEvent(next, event));
    };
    sum_on(test_stream(), second_stream());
    for (int round = 0; round < 8; round++) {
        sum_on(second_stream(), test_stream());
        sum_on(test_stream(), second_stream());
        // each of the two sums adds values that are the same on all ranks
        for (double& sum : want) sum *= test_world().size() * test_world().size();
    }
    CHECK(close(data.host(), want));
    cudaCheck(cudaEventDestroy(event));
}

// ----------------------------------------------------------------------------
// groups of ranks

TEST_CASE("split communicators") {
    int rank = test_world().rank(), size = test_world().size();
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

        // concurrent with a call of all ranks on another stream
        Guarded<float> part(count, 0, inputs<float>(rank, 0, count)),
            all(count, 0, inputs<float>(rank, 0, count));
        auto of_all = [&] {
            ncclCheck(ncclAllReduce(all.data(), all.data(), count, ncclFloat, ncclSum, everyone(),
                                    second_stream()));
        };
        if (rank % 2) of_all();  // calls of different groups need no common order
        ncclCheck(ncclAllReduce(part.data(), part.data(), count, ncclFloat, ncclSum, half, test_stream()));
        if (rank % 2 == 0) of_all();
        CHECK(close(part.host(), reduced<float>(members, count, 0)));
        CHECK(close(all.host(), reduced<float>(all_members(), count, 0)));
        ncclCheck(ncclCommDestroy(half));
    }
}

TEST_CASE("a rank without a color is in no group") {
    int rank = test_world().rank(), size = test_world().size();
    ncclComm_t rest = nullptr;
    ncclCheck(ncclCommSplit(everyone(), rank == 0 ? NCCL_SPLIT_NOCOLOR : 3, 0, &rest, nullptr));
    CHECK((rest == nullptr) == (rank == 0));
    if (!rest) return;
    CHECK(size_of(rest) == size - 1);
    CHECK(rank_of(rest) == rank - 1);
    ncclCheck(ncclCommDestroy(rest));
}

// Waits for completion with the library's own call.
static ncclResult_t ended(ncclComm_t comm, ncclResult_t result) {
    while (result == ncclInProgress) ncclCheck(ncclCommGetAsyncError(comm, &result));
    return result;
}

TEST_CASE("of a group that is not blocking, each call is over when the library says so") {
    int rank = test_world().rank(), size = test_world().size();
    constexpr size_t count = 1000;
    ncclUniqueId id = {};
    if (rank == 0) ncclCheck(ncclGetUniqueId(&id));
    test_world().broadcast(&id, sizeof id, 0);
    int under_way = 0;  // calls that had not completed when they returned
    auto seen = [&](ncclResult_t result) {
        under_way += result == ncclInProgress;
        return result;
    };
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t all = nullptr, half = nullptr;
    ncclResult_t made = seen(ncclCommInitRankConfig(&all, size, id, rank, &config));
    REQUIRE(ended(all, made) == ncclSuccess);
    CHECK(size_of(all) == size);
    CHECK(rank_of(all) == rank);
    config.blocking = 1;
    REQUIRE(ended(all, seen(ncclCommSplit(all, rank % 2, rank, &half, &config))) == ncclSuccess);
    CHECK(size_of(half) == (size + (rank % 2 == 0)) / 2);
    Guarded<float> one(count, 0, inputs<float>(rank, 0, count)), two(count, 0, inputs<float>(rank, 0, count)),
        part(count, 0, inputs<float>(rank, 0, count));
    auto sum = [&](Guarded<float>& data, ncclComm_t comm) {
        return ncclAllReduce(data.data(), data.data(), count, ncclFloat, ncclSum, comm, test_stream());
    };
    CHECK(ended(all, seen(sum(one, all))) == ncclSuccess);
    ncclCheck(ncclGroupStart());
    CHECK(sum(two, all) == ncclSuccess);
    CHECK(ended(all, seen(ncclGroupEnd())) == ncclSuccess);
    CHECK(sum(part, half) == ncclSuccess);  // this one is blocking
    std::vector<int> members;
    for (int r = rank % 2; r < size; r += 2) members.push_back(r);
    for (Guarded<float>* each : {&one, &two})
        CHECK(close(each->host(), reduced<float>(all_members(), count, 0)));
    CHECK(close(part.host(), reduced<float>(members, count, 0)));
    ncclCheck(ncclCommDestroy(half));
#ifndef RANKS_USE_NCCL  // NCCL may be quick
    ncclResult_t begun = ncclCommSplit(all, 0, rank, &half, nullptr);
    if (size > 1) {
        CHECK(begun == ncclInProgress);
        CHECK(half == nullptr);
        CHECK(sum(one, all) == ncclInvalidArgument);
        CHECK(ncclCommSplit(all, 0, rank, &half, nullptr) == ncclInvalidArgument);
    }
    REQUIRE(ended(all, begun) == ncclSuccess);
    ncclCheck(ncclCommDestroy(half));
    CHECK(under_way == (size > 1 ? 4 : 2));
#endif
    REQUIRE(ended(all, ncclCommFinalize(all)) == ncclSuccess);
    ncclCheck(ncclCommDestroy(all));
}

TEST_CASE("what NCCL refuses is an Error with its place and reason") {
    Buffer<float> data(4);
    int size = test_world().size();
    CHECK(ncclBroadcast(data, data, 4, ncclFloat, size, everyone(), test_stream()) == ncclInvalidArgument);
    CHECK(ncclGroupEnd() == ncclInvalidUsage);
    CHECK_THROWS_WITH_AS(
        ncclCheck(ncclBroadcast(data, data, 4, ncclFloat, -1, everyone(), test_stream())),
        doctest::Contains("ncclBroadcast(data, data, 4, ncclFloat, -1, everyone(), test_stream()) failed: "
                          "invalid argument"),
        Error);
    CHECK_THROWS_WITH_AS(ncclCheck(ncclInvalidUsage), doctest::Contains("test/comm/test_transport.cu:"),
                         Error);
    // the message also names the process and its device, as for a CUDA error
    std::string who = process_place() + ": ";
    CHECK(who.starts_with(test_world().name()));
    CHECK(error_of([] { ncclCheck(ncclInvalidUsage); }).starts_with(who + "ncclInvalidUsage failed: "));
    CHECK(error_of([] {
              cudaCheck(cudaErrorInvalidValue);
          }).starts_with(who + "cudaErrorInvalidValue failed: "));
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
    for (size_t kind = 0; kind < traffic_names.size(); kind++) CHECK(bytes_sent((Traffic)kind) == 0);
    CHECK_THROWS_AS(alone.send((float*)data, 3, 0, Traffic::weights, test_stream()), Error);
    CHECK_THROWS_AS(alone.receive((float*)data, 3, 0, test_stream()), Error);
}

TEST_CASE("the calls of a Communicator, and the bytes they send") {
    Communicator all = Communicator::of_world(test_world(), test_stream());
    int rank = test_world().rank(), size = test_world().size();
    CHECK(all.rank() == rank);
    CHECK(all.size() == size);
    if (size == 1) return;
    auto n = (size_t)size;
    for (size_t count : {size_t(0), size_t(1), n + 1, 7 * n, size_t(10'007), size_t(1'000'003)}) {
        CAPTURE(count);
        size_t part = count / n;
        auto mine = inputs<float>(rank, 0, count);
        Guarded<float> sum(count, 0, mine), scattered(part * n, 0, {mine.begin(), mine.begin() + part * n});
        Guarded<float> copied(count, 0, rank == size - 1 ? mine : std::vector<float>());
        Guarded<float> received(count);
        synchronize();
        reset_traffic();
        [[maybe_unused]] uint64_t before = 0;
#ifndef RANKS_USE_NCCL
        before = host_link.bytes_sent;
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
        grouped({all}, [&] {
            all.send((const float*)copied.data(), count, (rank + 1) % size, Traffic::weights, test_stream());
            all.receive(received.data(), count, (rank + size - 1) % size, test_stream());
        });
        CHECK(bytes_sent(Traffic::weights) == weights + 4 * count);
        synchronize();
#ifndef RANKS_USE_NCCL
        uint64_t total = 0;
        for (size_t kind = 0; kind < traffic_names.size(); kind++) total += bytes_sent((Traffic)kind);
        CHECK(host_link.bytes_sent - before == total);
#endif
        CHECK(close(sum.host(), reduced<float>(all_members(), count, 0)));
        CHECK(close(scattered.host(), reduced<float>(all_members(), part * n, 1)));
        CHECK(same_bits(copied.host(), inputs<float>(size - 1, 0, count)));
        CHECK(same_bits(received.host(), copied.host()));
        all.check();
    }
}

TEST_CASE("a group split from a Communicator") {
    Communicator all = Communicator::of_world(test_world(), test_stream());
    int rank = test_world().rank(), size = test_world().size();
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

#ifndef RANKS_USE_NCCL

// ----------------------------------------------------------------------------
// only the host transport

TEST_CASE("a slow link takes the time it must") {
    int size = test_world().size();
    constexpr size_t count = 500'000;
    Guarded<float> data(count, 0, std::vector<float>(count, 1.0f)),
        other(count, 0, std::vector<float>(count, 1.0f));
    synchronize();
    uint64_t before = host_link.bytes_sent;
    host_link_speed(0.02);
    auto start = std::chrono::steady_clock::now();
    // both streams share the link
    ncclCheck(ncclAllReduce(data.data(), data.data(), count, ncclFloat, ncclSum, everyone(), test_stream()));
    ncclCheck(
        ncclAllReduce(other.data(), other.data(), count, ncclFloat, ncclSum, everyone(), second_stream()));
    synchronize();
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    host_link_speed(0);
    auto bytes = (double)(host_link.bytes_sent - before);
    if (size > 1) CHECK(bytes > 2e6);
    CHECK(seconds >= bytes / 0.02e9);
    for (auto* each : {&data, &other}) CHECK(each->host() == std::vector<float>(count, (float)size));
}

TEST_CASE("a communicator can be destroyed before its work is done") {
    int rank = test_world().rank();
    constexpr size_t count = 100'000;
    ncclComm_t copy = nullptr;
    ncclCheck(ncclCommSplit(everyone(), 0, rank, &copy, nullptr));
    Guarded<float> data(count, 0, inputs<float>(rank, 0, count));
    std::function<void()> sleep = [] { std::this_thread::sleep_for(milliseconds(50)); };
    enqueue(test_stream(), sleep);
    ncclCheck(ncclAllReduce(data.data(), data.data(), count, ncclFloat, ncclSum, copy, test_stream()));
    ncclCheck(ncclCommDestroy(copy));
    CHECK(close(data.host(), reduced<float>(all_members(), count, 0)));
}

TEST_CASE("an aborted communicator ends what waits") {
    int rank = test_world().rank(), size = test_world().size();
    if (size == 1) SKIP("one rank has no other");
    Communicator all = Communicator::of_world(test_world(), test_stream());
    Communicator pair = all.split(rank / 2, rank);
    if (pair.size() == 2) {
        Guarded<float> data(1000);
        pair.receive(data.data(), 1000, 1 - pair.rank(), test_stream());  // never sent
        pair.all_reduce(data.data(), 1000, Traffic::gradients, test_stream());
        std::this_thread::sleep_for(milliseconds(20));
        CHECK(cudaStreamQuery(test_stream()) == cudaErrorNotReady);
        pair.check();
        pair.abort();
        synchronize();
        CHECK_THROWS_AS(pair.check(), Error);
    }
    // the others are not affected
    Guarded<int> data(1, 0, {1});
    all.all_reduce(data.data(), 1, Traffic::statistics, test_stream());
    CHECK(data.host()[0] == size);
    all.check();
}

TEST_CASE("a failure of MPI is kept, and later calls are refused") {
    int rank = test_world().rank(), size = test_world().size();
    if (size == 1) SKIP("one rank has no other");
    ncclComm_t copy = nullptr;
    ncclCheck(ncclCommSplit(everyone(), 0, rank, &copy, nullptr));
    // A message longer than the receiver expects is an error at the receiver.
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
    int rank = test_world().rank(), size = test_world().size();
    ncclComm_t made = nullptr;
    ncclUniqueId id = {};
    CHECK(ncclCommInitRankConfig(&made, size, id, size, nullptr) == ncclInvalidArgument);
    CHECK(made == nullptr);
    if (size == 1) {
        CHECK(ncclCommInitRankConfig(&made, 2, id, 0, nullptr) == ncclInvalidUsage);
        return;
    }
    CHECK(ncclCommInitRankConfig(&made, size + 1, id, rank, nullptr) == ncclInvalidUsage);
}

#endif
