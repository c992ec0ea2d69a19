// Tests of kernels/host_cuda.h: streams, events and memory without a GPU behave as documented for the CUDA
// runtime.
// devices: cpu simt-bf16 address thread
#include "kernels/graph.cuh"
#include "test/support/file_testing.h"
#include "test/support/testing.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <numeric>
#include <set>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef _OPENMP
#include <dnnl.h>
#include <omp.h>
#endif

namespace {

using std::chrono::milliseconds;

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

// Holds streams until opened. Waits are bounded, so that a test of broken code fails instead of hanging.
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

TEST_CASE("a stream holds 1,024 launches: whoever gives it one more waits until one is over") {
    constexpr int most = 1024, all = most + 100;
    cudaStream_t stream = new_stream();
    Gate gate;
    std::atomic<int> given = 0;
    std::function<void()> wait = [&] { gate.wait(); }, nothing = [] {};
    std::thread giver([&] {
        enqueue(stream, wait);
        for (given = 1; given < all; given++) enqueue(stream, nothing);
    });
    while (given < most) std::this_thread::yield();
    std::this_thread::sleep_for(milliseconds(50));
    CHECK(given == most);
    gate.open();
    giver.join();
    CHECK(given == all);
    cudaCheck(cudaStreamSynchronize(stream));
    cudaCheck(cudaStreamDestroy(stream));
}

TEST_CASE("two streams are not ordered") {
    cudaStream_t first = new_stream(), second = new_stream();
    Gate gate;
    bool passed = false;
    std::function<void()> wait = [&] { passed = gate.wait(); }, open = [&] { gate.open(); };
    enqueue(first, wait);
    enqueue(second, open);  // too late if it waited for the first stream
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
    cudaCheck(cudaEventSynchronize(event));  // the later record, which nothing delays
    CHECK(cudaEventQuery(event) == cudaSuccess);
    CHECK(cudaStreamQuery(waiter) == cudaErrorNotReady);
    opened = true;
    gate.open();
    cudaCheck(cudaStreamSynchronize(waiter));
    CHECK(opened_before);

    // The reverse: a wait for a completed record does not see a later record that is pending.
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

#ifdef DEVICE_CPU
// Returns true if the whole mapping that contains an address may use huge pages: the flag hg of proc(5).
bool has_huge_pages(const void* address) {
    std::ifstream maps("/proc/self/smaps");
    std::string line;
    for (bool within = false; std::getline(maps, line);) {
        unsigned long begin, end;
        if (sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2)
            within = begin <= (uintptr_t)address && (uintptr_t)address < end;
        else if (within && line.starts_with("VmFlags:"))
            return (line + " ").find(" hg ") != std::string::npos;
    }
    return false;
}

TEST_CASE("large arrays ask for huge pages") {
    if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) SKIP("no huge pages here");
    for (size_t bytes : {(size_t)4 << 20, ((size_t)9 << 20) + 12345}) {
        char* array;
        cudaCheck(cudaMalloc((void**)&array, bytes));
        CHECK(has_huge_pages(array));
        CHECK(has_huge_pages(array + bytes - 1));
        cudaCheck(cudaFree(array));
    }
}
#endif

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

// The pattern of a communication stream beside a compute stream: each step waits for the other stream's last
// one.
TEST_CASE("two streams wait for each other in turn") {
    constexpr int steps = 300;  // fits in the streams' queues
    cudaStream_t compute = new_stream(), communication = new_stream();
    cudaEvent_t computed = new_event(), communicated = new_event();  // recorded repeatedly
    std::vector<int> order;
    std::vector<std::function<void()>> tasks(2 * steps);
    for (int i = 0; i < 2 * steps; i++) tasks[i] = [&order, i] { order.push_back(i); };
    Gate gate;
    std::function<void()> wait = [&] { gate.wait(); };
    enqueue(compute, wait);  // until everything is queued
    for (int step = 0; step < steps; step++) {
        enqueue(compute, tasks[2 * step]);
        cudaCheck(cudaEventRecord(computed, compute));
        cudaCheck(cudaStreamWaitEvent(communication, computed));
        enqueue(communication, tasks[2 * step + 1]);
        cudaCheck(cudaEventRecord(communicated, communication));
        cudaCheck(cudaStreamWaitEvent(compute, communicated));
    }
    CHECK(cudaStreamQuery(compute) == cudaErrorNotReady);
    CHECK(cudaStreamQuery(communication) == cudaErrorNotReady);
    gate.open();
    cudaCheck(cudaStreamSynchronize(compute));
    std::vector<int> want(2 * steps);
    std::iota(want.begin(), want.end(), 0);
    CHECK(order == want);
    CHECK(cudaEventQuery(communicated) == cudaSuccess);
    cudaCheck(cudaStreamSynchronize(communication));
    CHECK(cudaStreamQuery(communication) == cudaSuccess);
    for (cudaEvent_t event : {computed, communicated}) cudaCheck(cudaEventDestroy(event));
    for (cudaStream_t stream : {compute, communication}) cudaCheck(cudaStreamDestroy(stream));
}

#ifdef _OPENMP
namespace {

std::set<std::string> threads_of_this_process() {
    std::set<std::string> threads;
    for (auto& entry : std::filesystem::directory_iterator("/proc/self/task")) threads.insert(entry.path());
    return threads;
}

int openmp_threads_of_new_stream() {
    cudaStream_t stream = new_stream();
    int threads = 0;
    std::function<void()> count = [&] {
#pragma omp parallel
#pragma omp single
        threads = omp_get_num_threads();
    };
    enqueue(stream, count);
    cudaCheck(cudaStreamSynchronize(stream));
    cudaCheck(cudaStreamDestroy(stream));
    return threads;
}

// The number of threads that a oneDNN product on a new stream adds to the process. OpenMP keeps a team until
// its first thread ends, and the stream's own thread belongs to the team. Threads of earlier teams may still
// be ending.
int threads_of_product() {
    constexpr int size = 256;
    std::vector<float> a(size * size, 1.0f), b(size * size, 2.0f), c(size * size);
    std::set<std::string> before = threads_of_this_process(), during;
    cudaStream_t stream = new_stream();
    std::function<void()> multiply = [&] {
        dnnl_sgemm('N', 'N', size, size, size, 1, a.data(), size, b.data(), size, 0, c.data(), size);
        during = threads_of_this_process();
    };
    enqueue(stream, multiply);
    cudaCheck(cudaStreamSynchronize(stream));
    cudaCheck(cudaStreamDestroy(stream));
    CHECK(c[0] == 2.0f * size);
    return (int)std::ranges::count_if(during, [&](auto& thread) { return !before.contains(thread); });
}

}  // namespace

TEST_CASE("a stream has the OpenMP threads it is given, for loops and for products") {
    int before = host_device.threads;
    host_device.threads = 0;
    CHECK(openmp_threads_of_new_stream() == omp_get_max_threads());
    for (int threads : {1, 2, 3}) {
        CAPTURE(threads);
        host_device.threads = threads;
        CHECK(openmp_threads_of_new_stream() == threads);
        CHECK(threads_of_product() == threads);
    }
    host_device.threads = before;
}
#endif

// ----------------------------------------------------------------------------
// errors in work

TEST_CASE("work that throws ends all work, until its error is taken") {
    cudaStream_t stream = new_stream(), other = new_stream();
    cudaEvent_t event = new_event();
    int done = 0;
    std::function<void()> throws = [] { fail("matrix: it is torn"); }, counts = [&] { done++; };
    enqueue(stream, throws);
    enqueue(stream, counts);
    cudaCheck(cudaEventRecord(event, stream));
    cudaCheck(cudaStreamWaitEvent(other, event));
    enqueue(other, counts);
    CHECK(cudaStreamSynchronize(other) == cudaErrorLaunchFailure);
    CHECK(cudaStreamSynchronize(stream) == cudaErrorLaunchFailure);
    CHECK(cudaStreamQuery(stream) == cudaErrorLaunchFailure);
    CHECK(cudaEventSynchronize(event) == cudaErrorLaunchFailure);
    CHECK(cudaEventQuery(event) == cudaErrorLaunchFailure);
    CHECK(cudaDeviceSynchronize() == cudaErrorLaunchFailure);
    CHECK(std::string(cudaGetErrorString(cudaErrorLaunchFailure)) == "matrix: it is torn");
    CHECK(done == 0);

    CHECK(cudaGetLastError() == cudaErrorLaunchFailure);
    CHECK(cudaGetLastError() == cudaSuccess);
    enqueue(other, counts);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(done == 1);
    cudaCheck(cudaEventDestroy(event));
    for (cudaStream_t s : {stream, other}) cudaCheck(cudaStreamDestroy(s));
}

TEST_CASE("launchers throw, or note what they would throw") {
    auto launcher = [](int number) {
        NotedLaunchErrors::run([=] { fail_part("launch %d failed", number); });
    };
    NotedError error;
    CHECK_THROWS_WITH(launcher(1), "launch 1 failed");
    {
        NotedLaunchErrors noted(error);
        for (int number : {2, 3}) launcher(number);
    }
    CHECK(error.message == "launch 2 failed");
    CHECK(error.exit_code == exit_failed_part);
    CHECK_THROWS_WITH(launcher(4), "launch 4 failed");
}

// ----------------------------------------------------------------------------
// exiting with work that never ends

namespace {

constexpr int left_with = 7;  // the exit code

// The environment variable that passes the way to exit to the test below, which the test after it starts.
constexpr const char* way_variable = "TEST_HOST_CUDA_WAY_OUT";

// Reruns this program with the test below, and returns its exit code, or -1 if it did not exit normally.
int leave(const char* way) {
    std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
    std::string filter = "--test-case=leaving with streams that are stuck", no_skip = "--no-skip";
    char* arguments[] = {program.data(), filter.data(), no_skip.data(), nullptr};
    setenv(way_variable, way, 1);
    pid_t child;
    REQUIRE(posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ) == 0);
    unsetenv(way_variable);
    int status;
    for (int i = 0; i < 3000; i++) {
        if (waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        std::this_thread::sleep_for(milliseconds(10));
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return -1;
}

}  // namespace

TEST_CASE("leaving with streams that are stuck" * doctest::skip()) {
    const char* way = getenv(way_variable);
    if (!way) return;
    cudaStream_t stuck = new_stream(), waiter = new_stream(), other = new_stream();
    std::function<void()> sleep = [] {
        for (;;) std::this_thread::sleep_for(milliseconds(1000));
    };
    std::function<void()> exit_there = [] { exit(left_with); };
    cudaEvent_t event = new_event();
    enqueue(stuck, sleep);
    enqueue(nullptr, sleep);
    cudaCheck(cudaEventRecord(event, stuck));
    cudaCheck(cudaStreamWaitEvent(waiter, event));
    cudaCheck(cudaStreamWaitEvent(nullptr, event));
    cudaCheck(cudaEventDestroy(event));
    if (std::string(way) == "exit") exit(left_with);
    if (std::string(way) == "_exit") _exit(left_with);
    enqueue(other, exit_there);
    cudaCheck(cudaStreamSynchronize(waiter));
}

TEST_CASE("a process can leave its streams in the middle of work that never ends") {
    for (const char* way : {"exit", "_exit", "exit of another thread"}) {
        CAPTURE(way);
        CHECK(leave(way) == left_with);
    }
}

// ----------------------------------------------------------------------------
// graphs

namespace {

cudaGraphExec_t executable(cudaGraph_t graph) {
    cudaGraphExec_t made;
    cudaCheck(cudaGraphInstantiate(&made, graph, 0));
    cudaCheck(cudaGraphDestroy(graph));
    return made;
}

void begin_capture(cudaStream_t stream) {
    cudaCheck(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
}

}  // namespace

TEST_CASE("a captured stream runs nothing; its graph runs all of it, in order, each time") {
    cudaStream_t stream = new_stream(), other = new_stream();
    std::vector<int> order;
    std::function<void()> first = [&] { order.push_back(1); }, second = [&] { order.push_back(2); };
    begin_capture(stream);
    enqueue(stream, first);
    enqueue(stream, second);
    cudaGraph_t graph;
    cudaCheck(cudaStreamEndCapture(stream, &graph));
    cudaCheck(cudaStreamSynchronize(stream));
    CHECK(order.empty());
    cudaGraphExec_t work = executable(graph);
    cudaCheck(cudaGraphLaunch(work, stream));
    cudaCheck(cudaStreamSynchronize(stream));
    cudaCheck(cudaGraphLaunch(work, other));
    cudaCheck(cudaGraphExecDestroy(work));  // launched work still runs
    cudaCheck(cudaStreamSynchronize(other));
    CHECK(order == std::vector<int>{1, 2, 1, 2});
    enqueue(stream, second);
    cudaCheck(cudaStreamSynchronize(stream));
    CHECK(order.size() == 5);
    cudaCheck(cudaStreamDestroy(stream));
    cudaCheck(cudaStreamDestroy(other));
}

TEST_CASE("a stream that waits for a captured one is captured too, and must be waited for") {
    cudaStream_t stream = new_stream(), other = new_stream();
    cudaEvent_t forked = new_event(), joined = new_event();
    std::vector<int> order;
    std::function<void()> tasks[4];
    for (int i = 0; i < 4; i++) tasks[i] = [&order, i] { order.push_back(i); };
    cudaGraph_t graph;
    for (bool joins : {true, false}) {
        begin_capture(stream);
        enqueue(stream, tasks[0]);
        cudaCheck(cudaEventRecord(forked, stream));
        cudaCheck(cudaStreamWaitEvent(other, forked, 0));
        enqueue(other, tasks[1]);
        cudaCheck(cudaEventRecord(joined, other));
        if (!joins) enqueue(other, tasks[2]);  // after the event that is waited for
        cudaCheck(cudaStreamWaitEvent(stream, joined, 0));
        enqueue(stream, tasks[3]);
        cudaError_t ended = cudaStreamEndCapture(stream, &graph);
        if (!joins) {
            CHECK(ended == cudaErrorStreamCaptureUnjoined);
            CHECK(graph == nullptr);
            continue;
        }
        cudaCheck(ended);
        cudaGraphExec_t work = executable(graph);
        cudaCheck(cudaGraphLaunch(work, stream));
        cudaCheck(cudaStreamSynchronize(stream));
        cudaCheck(cudaGraphExecDestroy(work));
        CHECK(order == std::vector<int>{0, 1, 3});
        // outside the capture, its events cannot be waited for
        CHECK(cudaStreamWaitEvent(other, joined, 0) == cudaErrorCapturedEvent);
        CHECK(cudaEventSynchronize(joined) == cudaErrorCapturedEvent);
    }
    order.clear();
    enqueue(other, tasks[2]);  // no longer captured
    cudaCheck(cudaStreamSynchronize(other));
    CHECK(order == std::vector<int>{2});
    for (cudaEvent_t event : {forked, joined}) cudaCheck(cudaEventDestroy(event));
    for (cudaStream_t s : {stream, other}) cudaCheck(cudaStreamDestroy(s));
}

TEST_CASE("a stream runs again after work that throws while it is captured") {
    cudaStream_t stream = new_stream();
    Graphs graphs;
    graphs.on = true;
    int done = 0;
    std::function<void()> counts = [&] { done++; };
    auto run = [&](bool throws) {
        graphs.run([] { return graph_key(1); }, stream,
                   [&] {
                       enqueue(stream, counts);
                       if (throws) fail("the second launch failed");
                   });
    };
    run(false);
    CHECK_THROWS_WITH(run(true), "the second launch failed");
    enqueue(stream, counts);
    cudaCheck(cudaStreamSynchronize(stream));
    CHECK(done == 2);
    run(false);  // captured again
    cudaCheck(cudaStreamSynchronize(stream));
    CHECK(done == 3);
    CHECK(graphs.launched() == 1);
    cudaCheck(cudaStreamDestroy(stream));
}

TEST_CASE("what cannot be captured is refused, and the capture is lost") {
    cudaStream_t stream = new_stream(), other = new_stream();
    cudaEvent_t outside = new_event();
    cudaCheck(cudaEventRecord(outside, other));
    void* memory = nullptr;
    const struct {
        cudaError_t error;
        std::function<cudaError_t()> call;
    } refused[] = {
        {cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamSynchronize(stream); }},
        {cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamQuery(stream); }},
        {cudaErrorStreamCaptureIsolation, [&] { return cudaStreamWaitEvent(stream, outside, 0); }},
    };
    for (auto& [error, call] : refused) {
        begin_capture(stream);
        CHECK(call() == error);
        cudaGraph_t graph;
        CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated);
        CHECK(graph == nullptr);
        CHECK(call() == cudaSuccess);
    }
    begin_capture(stream);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaErrorIllegalState);
    CHECK(cudaMalloc(&memory, 16) == cudaErrorStreamCaptureUnsupported);
    CHECK(cudaFree(nullptr) == cudaErrorStreamCaptureUnsupported);
    std::thread([&] { CHECK(cudaMalloc(&memory, 16) == cudaSuccess); }).join();  // other threads may
    cudaGraph_t graph;
    cudaCheck(cudaStreamEndCapture(stream, &graph));
    cudaCheck(cudaGraphDestroy(graph));
    cudaCheck(cudaFree(memory));
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorIllegalState);
    CHECK(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeThreadLocal) ==
          cudaErrorStreamCaptureUnsupported);
    cudaCheck(cudaEventDestroy(outside));
    for (cudaStream_t s : {stream, other}) cudaCheck(cudaStreamDestroy(s));
}

TEST_CASE("memory is what the machine and each limit around the process leave") {
    const std::string v1 = "9:name=systemd:/other\n4:hugetlb,memory:/docker/a\n0::/other\n";
    const std::string v1_group = "sys/fs/cgroup/memory/docker/a/memory.", unlimited = "9223372036854771712\n";
    using Files = std::vector<std::pair<std::string, std::string>>;
    const struct {
        const char* what;
        Files files;
        size_t available;
    } machines[] = {
        {"no limits", {{"proc/self/cgroup", "0::/\n"}}, 8000 << 10},
        {"version 2, limited in the middle of three groups, with pages of files",
         {{"proc/self/cgroup", "0::/job/step/task\n"},
          {"sys/fs/cgroup/job/memory.max", "max\n"},
          {"sys/fs/cgroup/job/memory.current", "7000000\n"},
          {"sys/fs/cgroup/job/step/memory.max", "3000000\n"},
          {"sys/fs/cgroup/job/step/memory.current", "2900000\n"},
          {"sys/fs/cgroup/job/step/memory.stat", "anon 400000\nactive_file 500000\ninactive_file 2000000\n"},
          {"sys/fs/cgroup/job/step/task/memory.max", "5000000\n"},
          {"sys/fs/cgroup/job/step/task/memory.current", "0\n"}},
         2100000},
        {"a container of version 2, which sees its group as the root",
         {{"proc/self/cgroup", "0::/docker/a\n"},
          {"sys/fs/cgroup/memory.max", "3000000\n"},
          {"sys/fs/cgroup/memory.current", "1000000\n"}},
         2000000},
        {"version 1, limited further out",
         {{"proc/self/cgroup", v1},
          {v1_group + "limit_in_bytes", unlimited},
          {v1_group + "usage_in_bytes", "100\n"},
          {"sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000\n"},
          {"sys/fs/cgroup/memory/memory.usage_in_bytes", "3000000\n"},
          {"sys/fs/cgroup/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 500000\n"}},
         1500000},
        {"more is used than the limit",
         {{"proc/self/cgroup", v1},
          {v1_group + "limit_in_bytes", "10\n"},
          {v1_group + "usage_in_bytes", "20\n"}},
         0},
    };
    for (const auto& machine : machines) {
        CAPTURE(machine.what);
        TemporaryFolder root;
        Files files = machine.files;
        files.push_back({"proc/meminfo", "MemTotal: 9000 kB\nMemFree: 20 kB\nMemAvailable:    8000 kB\n"});
        for (auto& [name, content] : files) {
            fs::create_directories(fs::path(root / name).parent_path());
            write_file(root / name, content);
        }
        CHECK(host_available_memory(1, root.path) == machine.available);
        CHECK(host_available_memory(3, root.path) == machine.available / 3);
    }
    const size_t here = host_available_memory(), used = number_in_file("/proc/self/status", "VmSize:") * 1024;
    CHECK(here > 0);
    rlimit before, lowered;
    REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
    lowered = before, lowered.rlim_cur = used + (10 << 20);
    REQUIRE(setrlimit(RLIMIT_AS, &lowered) == 0);
    const size_t limited = host_available_memory(), of_each = host_available_memory(2);
    REQUIRE(setrlimit(RLIMIT_AS, &before) == 0);
    CHECK(limited <= 10 << 20);
    CHECK(limited > 5 << 20);
    CHECK(of_each > 5 << 20);  // processes do not share an address space
}
