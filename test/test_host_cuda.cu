// Tests of kernels/host_cuda.h: streams, events and memory without a GPU behave as the CUDA runtime
// documents.
#include "test/testing.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <numeric>

namespace {

using std::chrono::milliseconds;

cudaStream_t new_stream() {
    cudaStream_t stream;
    cudaCheck(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

cudaEvent_t new_event() {
    cudaEvent_t event;
    cudaCheck(cudaEventCreate(&event));
    return event;
}

// Runs `task` on the stream. The task must outlive its run.
void enqueue(cudaStream_t stream, std::function<void()>& task) {
    cudaCheck(cudaLaunchHostFunc(
        stream, [](void* data) { (*static_cast<std::function<void()>*>(data))(); }, &task));
}

// Streams can be held here. Nobody waits for ever: a test of something broken fails instead.
class Gate {
public:
    void open() {
        std::lock_guard lock(mutex_);
        is_open_ = true;
        changed_.notify_all();
    }

    bool wait() {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, milliseconds(20'000), [this] { return is_open_; });
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_open_ = false;
};

}  // namespace

TEST_CASE("a stream runs its work in order") {
    cudaStream_t stream = new_stream();
    std::vector<int> order;
    std::vector<std::function<void()>> tasks(1000);
    for (int i = 0; i < 1000; i++) {
        tasks[i] = [&order, i] { order.push_back(i); };
        enqueue(stream, tasks[i]);
    }
    cudaCheck(cudaStreamSynchronize(stream));
    std::vector<int> want(1000);
    std::iota(want.begin(), want.end(), 0);
    CHECK(order == want);
    cudaCheck(cudaStreamDestroy(stream));
}

TEST_CASE("work is asynchronous: the caller goes on at once") {
    cudaStream_t stream = new_stream();
    Gate gate;
    std::atomic<bool> done = false;
    std::function<void()> wait = [&] { gate.wait(); }, finish = [&] { done = true; };
    enqueue(stream, wait);
    enqueue(stream, finish);
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    CHECK(!done);
    gate.open();
    cudaCheck(cudaStreamSynchronize(stream));
    CHECK(done);
    CHECK(cudaStreamQuery(stream) == cudaSuccess);
    cudaCheck(cudaStreamDestroy(stream));
}

TEST_CASE("two streams are not ordered") {
    cudaStream_t first = new_stream(), second = new_stream();
    Gate gate;
    bool passed = false;
    std::function<void()> wait = [&] { passed = gate.wait(); }, open = [&] { gate.open(); };
    enqueue(first, wait);
    enqueue(second, open);  // would come too late if it waited for the first stream
    cudaCheck(cudaStreamSynchronize(first));
    CHECK(passed);
    cudaCheck(cudaStreamDestroy(first));
    cudaCheck(cudaStreamDestroy(second));
}

TEST_CASE("streams do not wait for the default stream") {
    cudaStream_t stream = new_stream();
    Gate gate;
    bool passed = false;
    std::function<void()> wait = [&] { passed = gate.wait(); }, open = [&] { gate.open(); };
    enqueue(nullptr, wait);
    enqueue(stream, open);
    cudaCheck(cudaStreamSynchronize(nullptr));
    CHECK(passed);
    cudaCheck(cudaStreamDestroy(stream));
}

TEST_CASE("an event orders two streams") {
    cudaStream_t first = new_stream(), second = new_stream();
    cudaEvent_t event = new_event();
    Gate gate;
    std::atomic<int> value = 0, seen = -1;
    std::function<void()> set = [&] { gate.wait(), value = 1; }, look = [&] { seen = value.load(); };
    enqueue(first, set);
    cudaCheck(cudaEventRecord(event, first));
    cudaCheck(cudaStreamWaitEvent(second, event));
    enqueue(second, look);
    CHECK(cudaEventQuery(event) == cudaErrorNotReady);
    CHECK(cudaStreamQuery(second) == cudaErrorNotReady);
    CHECK(seen == -1);
    gate.open();
    cudaCheck(cudaStreamSynchronize(second));
    CHECK(seen == 1);
    CHECK(cudaEventQuery(event) == cudaSuccess);
    cudaCheck(cudaEventDestroy(event));
    cudaCheck(cudaStreamDestroy(first));
    cudaCheck(cudaStreamDestroy(second));
}

TEST_CASE("a stream waits for what an event had recorded, not for what it records later") {
    cudaStream_t held = new_stream(), free = new_stream(), waiter = new_stream();
    cudaEvent_t event = new_event();
    Gate gate;
    std::atomic<bool> opened = false, opened_before = false;
    std::function<void()> wait = [&] { gate.wait(); }, look = [&] { opened_before = opened.load(); };

    enqueue(held, wait);
    cudaCheck(cudaEventRecord(event, held));
    cudaCheck(cudaStreamWaitEvent(waiter, event));
    enqueue(waiter, look);
    cudaCheck(cudaEventRecord(event, free));
    cudaCheck(cudaEventSynchronize(event));  // the later record, which nothing holds
    CHECK(cudaEventQuery(event) == cudaSuccess);
    CHECK(cudaStreamQuery(waiter) == cudaErrorNotReady);
    opened = true;
    gate.open();
    cudaCheck(cudaStreamSynchronize(waiter));
    CHECK(opened_before);

    // The other way round: a wait for a record that is done does not see a later one that is not.
    Gate second_gate;
    std::function<void()> wait_again = [&] { second_gate.wait(); };
    cudaCheck(cudaStreamWaitEvent(waiter, event));
    enqueue(held, wait_again);
    cudaCheck(cudaEventRecord(event, held));
    cudaCheck(cudaStreamSynchronize(waiter));
    CHECK(cudaEventQuery(event) == cudaErrorNotReady);
    second_gate.open();
    cudaCheck(cudaEventSynchronize(event));

    cudaCheck(cudaEventDestroy(event));
    for (cudaStream_t stream : {held, free, waiter}) cudaCheck(cudaStreamDestroy(stream));
}

TEST_CASE("an event can be destroyed while streams still use it") {
    cudaStream_t first = new_stream(), second = new_stream();
    cudaEvent_t event = new_event();
    Gate gate;
    std::function<void()> wait = [&] { gate.wait(); };
    enqueue(first, wait);
    cudaCheck(cudaEventRecord(event, first));
    cudaCheck(cudaStreamWaitEvent(second, event));
    cudaCheck(cudaEventDestroy(event));
    CHECK(cudaStreamQuery(second) == cudaErrorNotReady);
    gate.open();
    cudaCheck(cudaStreamSynchronize(second));
    cudaCheck(cudaStreamDestroy(first));
    cudaCheck(cudaStreamDestroy(second));
}

TEST_CASE("an event that was never recorded counts as complete") {
    cudaEvent_t event = new_event(), other = new_event();
    CHECK(cudaEventQuery(event) == cudaSuccess);
    CHECK(cudaEventSynchronize(event) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(test_stream(), event) == cudaSuccess);
    CHECK(cudaStreamSynchronize(test_stream()) == cudaSuccess);
    float elapsed;
    CHECK(cudaEventElapsedTime(&elapsed, event, other) != cudaSuccess);
    cudaCheck(cudaEventDestroy(event));
    cudaCheck(cudaEventDestroy(other));
}

TEST_CASE("the time between two events") {
    cudaEvent_t start = new_event(), end = new_event();
    std::function<void()> sleep = [] { std::this_thread::sleep_for(milliseconds(30)); };
    cudaCheck(cudaEventRecord(start, test_stream()));
    enqueue(test_stream(), sleep);
    cudaCheck(cudaEventRecord(end, test_stream()));
    cudaCheck(cudaEventSynchronize(end));
    float elapsed, reversed;
    cudaCheck(cudaEventElapsedTime(&elapsed, start, end));
    cudaCheck(cudaEventElapsedTime(&reversed, end, start));
    CHECK(elapsed >= 30);
    CHECK(elapsed < 5000);
    CHECK(reversed == -elapsed);
    cudaCheck(cudaEventDestroy(start));
    cudaCheck(cudaEventDestroy(end));
}

TEST_CASE("copies and fills take their turn in the stream") {
    constexpr size_t size = 3'000'001;  // more than one piece of a fill
    auto* host = (unsigned char*)nullptr;
    cudaCheck(cudaMallocHost((void**)&host, 2 * size));
    Buffer<unsigned char> first(size), second(size);
    for (size_t i = 0; i < size; i++) host[i] = (unsigned char)(i * 7);
    Gate gate;
    std::function<void()> wait = [&] { gate.wait(); };
    enqueue(test_stream(), wait);
    cudaCheck(cudaMemcpyAsync(first, host, size, cudaMemcpyHostToDevice, test_stream()));
    cudaCheck(cudaMemsetAsync(first + 10, 5, size - 20, test_stream()));
    cudaCheck(cudaMemcpyAsync(second, first, size, cudaMemcpyDeviceToDevice, test_stream()));
    cudaCheck(cudaMemcpyAsync(host + size, second, size, cudaMemcpyDeviceToHost, test_stream()));
    host[3] = 200;  // before the copy reads it
    gate.open();
    cudaCheck(cudaStreamSynchronize(test_stream()));
    host[3] = 200;
    size_t wrong = 0;
    for (size_t i = 0; i < size; i++) wrong += host[size + i] != (i < 10 || i >= size - 10 ? host[i] : 5);
    CHECK(wrong == 0);
    cudaCheck(cudaFreeHost(host));
}

TEST_CASE("memory") {
    size_t free_bytes, total_bytes;
    cudaCheck(cudaMemGetInfo(&free_bytes, &total_bytes));
    CHECK(free_bytes > 0);
    CHECK(free_bytes <= total_bytes);

    void* pointer = &free_bytes;
    CHECK(cudaMalloc(&pointer, size_t(1) << 60) == cudaErrorMemoryAllocation);
    CHECK(pointer == nullptr);
    CHECK(cudaMalloc(&pointer, 2 * total_bytes) == cudaErrorMemoryAllocation);
    CHECK(cudaMalloc(&pointer, 0) == cudaSuccess);
    CHECK(cudaFree(nullptr) == cudaSuccess);
    for (size_t bytes : {1, 255, 4097}) {
        cudaCheck(cudaMalloc(&pointer, bytes));
        CHECK((uintptr_t)pointer % 256 == 0);
        cudaCheck(cudaFree(pointer));
    }
    CHECK(std::string(cudaGetErrorString(cudaErrorMemoryAllocation)) == "out of memory");
}

TEST_CASE("the device describes itself") {
    int count = 0, device = -1;
    cudaCheck(cudaGetDeviceCount(&count));
    CHECK(count == 1);
    cudaCheck(cudaSetDevice(0));
    cudaCheck(cudaGetDevice(&device));
    CHECK(device == 0);
    cudaDeviceProp properties;
    cudaCheck(cudaGetDeviceProperties(&properties, 0));
    CHECK(properties.name[0] != 0);
    CHECK(properties.multiProcessorCount > 0);
    CHECK(properties.totalGlobalMem > 0);
}

TEST_CASE("work that is left when a stream is destroyed is done") {
    cudaStream_t stream = new_stream();
    std::atomic<int> count = 0;
    std::function<void()> add = [&] { count++; };
    for (int i = 0; i < 100; i++) enqueue(stream, add);
    cudaCheck(cudaStreamDestroy(stream));
    CHECK(count == 100);
}
