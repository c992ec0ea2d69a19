// The stand-in's streams, events, memory and graphs (test/nocard/) leave open exactly what CUDA leaves open.
#include <atomic>
#include <cmath>
#include <thread>

#include "test/nocard/runtime_testing.h"

// ----------------------------------------------------------------------------
// streams and events

TEST_CASE("a wait that is missing shows under some seeds, and one that is there under none") {
    TestStream writer, reader;
    TestEvent written;
    TestMemory<int> card(1), host(1, true);
    for (bool waits : {false, true}) {
        for (int work_before : {0, 20}) {
            CAPTURE(waits);
            CAPTURE(work_before);
            int right = right_under_seeds([&] {
                require(cudaMemsetAsync(card, 0, sizeof(int), writer));
                writer.wait();
                for (int i = 0; i < work_before; i++) require(cudaMemsetAsync(card, 0, sizeof(int), writer));
                require(cudaMemsetAsync(card, 1, sizeof(int), writer));
                require(cudaEventRecord(written, writer));
                if (waits) require(cudaStreamWaitEvent(reader, written, 0));
                require(cudaMemcpyAsync(host, card, sizeof(int), cudaMemcpyDeviceToHost, reader));
                reader.wait();
                return *host.data == 0x01010101;
            });
            CHECK(right == (waits ? seeds : right));
            if (!waits) CHECK(right < seeds);
            if (!waits) CHECK(right > 0);
        }
    }
}

TEST_CASE("the host sees results only after it has waited") {
    TestStream stream;
    TestMemory<int> card(1), host(1, true);
    require(cudaMemsetAsync(card, 1, sizeof(int), stream));
    *host.data = 0;
    require(cudaMemcpyAsync(host, card, sizeof(int), cudaMemcpyDeviceToHost, stream));
    CHECK(*(volatile int*)host.data == 0);
    stream.wait();
    CHECK(*host.data == 0x01010101);
}

TEST_CASE("work goes on when nobody asks for it") {
    TestStream stream;
    TestMemory<int> card(1);
    static std::atomic<bool> done = false;
    require(cudaMemsetAsync(card, 1, sizeof(int), stream));
    require(cudaLaunchHostFunc(
        stream, [](void*) { done = true; }, nullptr));
    while (!done) std::this_thread::yield();
    CHECK(done);
}

TEST_CASE("host memory that is not pinned may be read at the call or later, pinned memory later") {
    TestStream stream;
    TestMemory<int> card(1);
    auto old_seen = [&](int* source) {
        return right_under_seeds([&] {
            *source = 1;
            require(cudaMemcpyAsync(card, source, sizeof(int), cudaMemcpyHostToDevice, stream));
            *source = 2;
            stream.wait();
            int got = 0;
            require(cudaMemcpy(&got, card, sizeof(int), cudaMemcpyDeviceToHost));
            return got == 1;
        });
    };
    int pageable = 0;
    int early = old_seen(&pageable);
    CHECK(early > seeds / 2);
    CHECK(early < seeds);
    TestMemory<int> pinned(1, true);
    CHECK(old_seen(pinned) == 0);
}

TEST_CASE("cudaMemcpy to the card may return before the bytes are there") {
    TestStream other;
    TestMemory<int> card(1), host(1, true);
    int right = right_under_seeds([&] {
        int zero = 0, one = 1;
        require(cudaMemcpy(card, &zero, sizeof zero, cudaMemcpyHostToDevice));
        require(cudaDeviceSynchronize());
        require(cudaMemcpy(card, &one, sizeof one, cudaMemcpyHostToDevice));
        require(cudaMemcpyAsync(host, card, sizeof(int), cudaMemcpyDeviceToHost, other));
        other.wait();
        return *host.data == 1;
    });
    CHECK(right < seeds);
    CHECK(right > 0);
}

TEST_CASE("streams that block wait for the legacy stream, and it for them; others do not") {
    TestMemory<int> card(1), host(1, true);
    for (bool blocks : {true, false}) {
        CAPTURE(blocks);
        TestStream stream(blocks ? cudaStreamDefault : cudaStreamNonBlocking);
        for (bool legacy_first : {true, false}) {
            CAPTURE(legacy_first);
            cudaStream_t first = legacy_first ? nullptr : stream.stream,
                         second = legacy_first ? stream.stream : nullptr;
            int right = right_under_seeds([&] {
                require(cudaMemsetAsync(card, 0, sizeof(int), first));
                require(cudaDeviceSynchronize());
                require(cudaMemsetAsync(card, 1, sizeof(int), first));
                require(cudaMemcpyAsync(host, card, sizeof(int), cudaMemcpyDeviceToHost, second));
                require(cudaStreamSynchronize(second));
                return *host.data == 0x01010101;
            });
            CHECK((right == seeds) == blocks);
        }
    }
}

TEST_CASE("a host function holds back its own stream alone") {
    TestStream slow, other;
    TestMemory<int> card(1);
    static std::atomic<bool> may_end;
    may_end = false;
    require(cudaLaunchHostFunc(
        slow,
        [](void*) {
            while (!may_end) std::this_thread::yield();
        },
        nullptr));
    require(cudaMemsetAsync(card, 1, sizeof(int), slow));
    require(cudaMemsetAsync(card, 2, sizeof(int), other));
    other.wait();
    CHECK(cudaStreamQuery(slow) == cudaErrorNotReady);
    may_end = true;
    slow.wait();
    int got = 0;
    require(cudaMemcpy(&got, card, sizeof got, cudaMemcpyDeviceToHost));
    CHECK(got == 0x01010101);
}

TEST_CASE("events have times, which grow along a stream") {
    TestStream stream;
    TestEvent start, end;
    TestMemory<char> card(1 << 20);
    float milliseconds = 0;
    CHECK(cudaEventQuery(start) == cudaSuccess);
    CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorInvalidResourceHandle);
    require(cudaEventRecord(start, stream));
    require(cudaMemsetAsync(card, 1, 1 << 20, stream));
    require(cudaEventRecord(end, stream));
    require(cudaEventSynchronize(end));
    require(cudaEventElapsedTime(&milliseconds, start, end));
    CHECK(milliseconds > 0);
    CHECK(milliseconds < 1000);
    require(cudaEventElapsedTime(&milliseconds, end, start));
    CHECK(milliseconds < 0);
    require(cudaEventRecord(start, stream));
    while (cudaEventQuery(start) == cudaErrorNotReady) {
    }
    CHECK(cudaEventQuery(start) == cudaSuccess);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
    CHECK(cudaGetLastError() == cudaSuccess);
}

// ----------------------------------------------------------------------------
// memory

TEST_CASE("memory of the card begins as NaNs, is as much as the card has, and is counted") {
    cudaDeviceProp card;
    require(cudaGetDeviceProperties(&card, 0));
    size_t before, after, total;
    require(cudaMemGetInfo(&before, &total));
    CHECK(total == card.totalGlobalMem);
    constexpr size_t much = size_t(3) << 30;
    {
        TestMemory<char> large(much);
        require(cudaMemGetInfo(&after, &total));
        CHECK(before - after == much);
        CHECK(std::isnan(((float*)large.data)[much / sizeof(float) - 1]));
        large[much / 2] = 1;
        CHECK(large[much / 2 - 1] == (char)0xff);
        CHECK(large[much / 2 + (16 << 20)] == (char)0xff);
    }
    require(cudaMemGetInfo(&after, &total));
    CHECK(before == after);
    void* none = &before;
    CHECK(cudaMalloc(&none, before + 1) == cudaErrorMemoryAllocation);
    CHECK(none == nullptr);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
}

TEST_CASE("cards of a machine are told apart") {
    int count;
    require(cudaGetDeviceCount(&count));
    REQUIRE(count > 1);
    cudaDeviceProp first, second;
    require(cudaGetDeviceProperties(&first, 0));
    require(cudaGetDeviceProperties(&second, 1));
    CHECK(memcmp(&first.uuid, &second.uuid, sizeof first.uuid) != 0);
    CHECK(cudaSetDevice(count) == cudaErrorInvalidDevice);
    CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
}

// ----------------------------------------------------------------------------
// graphs

TEST_CASE("a graph does what was captured, each time, on what its memory then has") {
    TestStream stream;
    TestMemory<int> from(std::vector<int>{1}), to(std::vector<int>{0}), host(1, true);
    cudaGraphExec_t graph = captured(stream, [&] {
        require(cudaMemcpyAsync(to, from, sizeof(int), cudaMemcpyDeviceToDevice, stream));
        require(cudaMemcpyAsync(host, to, sizeof(int), cudaMemcpyDeviceToHost, stream));
    });
    *host.data = -1;
    stream.wait();
    CHECK(*host.data == -1);
    for (int value : {5, 6}) {
        require(cudaMemsetAsync(from, value, sizeof(int), stream));
        require(cudaGraphLaunch(graph, stream));
        stream.wait();
        CHECK(*host.data == value * 0x01010101);
    }
    require(cudaGraphLaunch(graph, stream));
    require(cudaGraphExecDestroy(graph));  // launched work is still done
    stream.wait();
}

TEST_CASE("branches of a graph wait for nothing but what they were made to wait for") {
    TestStream stream, other;
    TestEvent forked, joined, written;
    TestMemory<int> card(1), host(1, true);
    for (bool waits : {false, true}) {
        CAPTURE(waits);
        cudaGraphExec_t graph = captured(stream, [&] {
            require(cudaEventRecord(forked, stream));
            require(cudaStreamWaitEvent(other, forked, 0));
            require(cudaMemsetAsync(card, 1, sizeof(int), stream));
            require(cudaEventRecord(written, stream));
            if (waits) require(cudaStreamWaitEvent(other, written, 0));
            require(cudaMemcpyAsync(host, card, sizeof(int), cudaMemcpyDeviceToHost, other));
            require(cudaEventRecord(joined, other));
            require(cudaStreamWaitEvent(stream, joined, 0));
        });
        int right = right_under_seeds([&] {
            require(cudaMemsetAsync(card, 0, sizeof(int), stream));
            require(cudaGraphLaunch(graph, stream));
            stream.wait();
            return *host.data == 0x01010101;
        });
        CHECK((right == seeds) == waits);
        CHECK(right > 0);
        require(cudaGraphExecDestroy(graph));
    }
}

TEST_CASE("what cannot be captured is refused, and the capture is lost") {
    TestStream stream, other, blocking(cudaStreamDefault);
    TestEvent outside, inside;
    TestMemory<int> card(1);
    require(cudaEventRecord(outside, other));
    void* memory;
    const struct {
        const char* name;
        cudaError_t error;
        std::function<cudaError_t()> call;
    } refused[] = {
        {"wait for the stream", cudaErrorStreamCaptureUnsupported,
         [&] { return cudaStreamSynchronize(stream); }},
        {"ask the stream", cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamQuery(stream); }},
        {"wait for the card", cudaErrorStreamCaptureUnsupported, [] { return cudaDeviceSynchronize(); }},
        {"allocate", cudaErrorStreamCaptureUnsupported, [&] { return cudaMalloc(&memory, 16); }},
        {"allocate pinned", cudaErrorStreamCaptureUnsupported, [&] { return cudaMallocHost(&memory, 16); }},
        {"free", cudaErrorStreamCaptureUnsupported, [] { return cudaFree(nullptr); }},
        {"copy and wait", cudaErrorStreamCaptureUnsupported,
         [&] { return cudaMemcpy(card, card, 4, cudaMemcpyDeviceToDevice); }},
        {"an event from outside", cudaErrorStreamCaptureIsolation,
         [&] { return cudaStreamWaitEvent(stream, outside, 0); }},
        {"ask an event", cudaErrorStreamCaptureUnsupported, [&] { return cudaEventQuery(outside); }},
    };
    for (auto& [name, error, call] : refused) {
        CAPTURE(name);
        require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        CHECK(call() == error);
        cudaGraph_t graph;
        CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated);
        CHECK(graph == nullptr);
    }
    cudaGraph_t graph;
    require(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaMemsetAsync(card, 0, 4, nullptr) == cudaErrorStreamCaptureImplicit);
    CHECK(cudaStreamEndCapture(blocking, &graph) == cudaErrorStreamCaptureInvalidated);
    // work of a stream that joined, and that no stream waits for
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    require(cudaEventRecord(inside, stream));
    require(cudaStreamWaitEvent(other, inside, 0));
    require(cudaMemsetAsync(card, 0, 4, other));
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureUnjoined);
    CHECK(cudaEventSynchronize(inside) == cudaErrorCapturedEvent);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorIllegalState);
    CHECK(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeThreadLocal) ==
          cudaErrorStreamCaptureUnsupported);
    std::thread([&] {  // other threads are not affected
        require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        std::thread([&] { CHECK(cudaMalloc(&memory, 16) == cudaSuccess); }).join();
        require(cudaStreamEndCapture(stream, &graph));
    })
        .join();
    require(cudaFree(memory));
    require(cudaGraphDestroy(graph));
    cudaGetLastError();
}
