// Each check of the stand-in runtime (test/nocard/) ends a program that has the defect that it looks for.
#include <cstdio>
#include <map>
#include <sys/wait.h>
#include <unistd.h>

#include "test/nocard/product_testing.h"

namespace {

struct Planted {
    const char* says;  // in the line that ends the program
    std::function<void()> defect;
};

cudaEvent_t dead_event() {
    cudaEvent_t event;
    require(cudaEventCreate(&event));
    require(cudaEventDestroy(event));
    return event;
}

cudaStream_t dead_stream() {
    cudaStream_t stream;
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    require(cudaStreamDestroy(stream));
    return stream;
}

char* card_memory(size_t bytes) {
    void* memory;
    require(cudaMalloc(&memory, bytes));
    return (char*)memory;
}

void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    cudaDeviceSynchronize();
}

ProductTest& leaked_product(const Product& p) {
    auto& test = *new ProductTest(p);
    REQUIRE(test.find() == CUBLAS_STATUS_SUCCESS);
    return test;
}

const Product usual_product = {32, 16, 512, true, false, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_32F};

const std::map<std::string, Planted>& planted() {
    static char host[64];
    static const std::map<std::string, Planted> all = {
        {"a copy beyond an allocation",
         {"cudaMemcpyAsync: the destination, 32 bytes at",
          [] { copy(card_memory(16), host, 32, cudaMemcpyHostToDevice); }}},
        {"a copy before an allocation",
         {"is not live memory of the card",
          [] { copy(card_memory(16) - 4, host, 4, cudaMemcpyHostToDevice); }}},
        {"a copy to freed memory",
         {"is not live memory of the card",
          [] {
              char* memory = card_memory(16);
              cudaFree(memory);
              copy(memory, host, 16, cudaMemcpyHostToDevice);
          }}},
        {"host memory as the card's",
         {"the destination, 16 bytes at", [] { copy(host, host + 32, 16, cudaMemcpyHostToDevice); }}},
        {"the card's memory as the host's",
         {"is memory of the card, not of the host",
          [] { copy(card_memory(16), card_memory(16), 16, cudaMemcpyHostToDevice); }}},
        {"a copy that overlaps itself",
         {"source and destination overlap",
          [] {
              char* memory = card_memory(64);
              cudaMemsetAsync(memory, 0, 64, nullptr);
              copy(memory, memory + 8, 32, cudaMemcpyDeviceToDevice);
          }}},
        {"a read of what nobody wrote",
         {"reads bytes that nobody wrote",
          [] {
              char* memory = card_memory(16);
              cudaMemsetAsync(memory, 0, 12, nullptr);
              copy(host, memory, 16, cudaMemcpyDeviceToHost);
          }}},
        {"a memset beyond an allocation",
         {"cudaMemset2DAsync: the destination, 28 bytes",
          [] { cudaMemset2DAsync(card_memory(27), 10, 0, 8, 3, nullptr); }}},
        {"pinned memory that is too short",
         {"goes beyond its pinned memory",
          [] {
              void* pinned;
              cudaMallocHost(&pinned, 5000);
              copy(card_memory(8192), pinned, 8192, cudaMemcpyHostToDevice);
          }}},
        {"memory that is freed twice",
         {"cudaFree: ",
          [] {
              char* memory = card_memory(16);
              cudaFree(memory);
              cudaFree(memory);
          }}},
        {"a part of memory that is freed",
         {"that was allocated and not freed", [] { cudaFree(card_memory(16) + 8); }}},
        {"pinned memory that is freed as the card's",
         {"cudaFree: ",
          [] {
              void* pinned;
              cudaMallocHost(&pinned, 16);
              cudaFree(pinned);
          }}},
        {"memory that is freed while it is used",
         {"cudaMemsetAsync is not done, and uses",
          [] {
              char* memory = card_memory(16);
              cudaMemsetAsync(memory, 0, 16, nullptr);
              cudaFree(memory);
          }}},
        {"pinned memory that is freed while it is used",
         {"cudaMemcpyAsync is not done, and uses",
          [] {
              void* pinned;
              cudaMallocHost(&pinned, 16);
              cudaMemcpyAsync(card_memory(16), pinned, 16, cudaMemcpyHostToDevice, nullptr);
              cudaFreeHost(pinned);
          }}},
        {"memory that a kernel uses, freed",
         {"double_kernel",
          [] {
              auto* memory = (float*)card_memory(16);
              int count = 4;
              void* arguments[] = {&memory, &count};
              cudaLaunchKernel((const void*)double_kernel, 1, 32, arguments, 0, nullptr);
              cudaFree(memory);
          }}},
        {"a stream that is dead",
         {"cudaMemsetAsync: ", [] { cudaMemsetAsync(card_memory(4), 0, 4, dead_stream()); }}},
        {"a wait for a dead stream",
         {"cudaStreamSynchronize: ", [] { cudaStreamSynchronize(dead_stream()); }}},
        {"an event that is dead", {"cudaEventRecord: ", [] { cudaEventRecord(dead_event(), nullptr); }}},
        {"a wait for a dead event",
         {"cudaStreamWaitEvent: ", [] { cudaStreamWaitEvent(nullptr, dead_event(), 0); }}},
        {"a graph that is dead",
         {"no executable graph",
          [] {
              TestStream stream;
              cudaGraphExec_t graph = captured(stream, [] {});
              cudaGraphExecDestroy(graph);
              cudaGraphLaunch(graph, stream);
          }}},
        {"a graph whose memory was freed",
         {"cudaGraphLaunch: cudaMemsetAsync uses memory",
          [] {
              TestStream stream;
              char* memory = card_memory(16);
              cudaGraphExec_t graph = captured(stream, [&] { cudaMemsetAsync(memory, 0, 16, stream); });
              cudaFree(memory);
              card_memory(16);  // perhaps at the same address
              cudaGraphLaunch(graph, stream);
          }}},
        {"a host function that calls CUDA",
         {"called by a host function",
          [] {
              cudaLaunchHostFunc(
                  nullptr, [](void*) { cudaDeviceSynchronize(); }, nullptr);
              cudaDeviceSynchronize();
          }}},
        {"a kernel that is none",
         {"is no kernel of this program", [] { cudaLaunchKernel(host, 1, 1, nullptr, 0, nullptr); }}},
        {"a tensor map beyond its memory",
         {"cuTensorMapEncodeTiled: the tensor", [] { encode(card_memory(64 * 31 * 2), {}); }}},
        {"a product on freed memory",
         {"cublasLtMatmul: the bias",
          [] {
              Product p = usual_product;
              p.epilogue = CUBLASLT_EPILOGUE_BIAS;
              ProductTest& test = leaked_product(p);
              char* bias = card_memory(256);
              cudaFree(bias);
              test.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
              test.run(0);
          }}},
        {"a product of what nobody wrote",
         {"reads bytes that nobody wrote",
          [] {
              Product p = usual_product;
              p.epilogue = CUBLASLT_EPILOGUE_BIAS;
              ProductTest& test = leaked_product(p);
              test.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, card_memory(256));
              test.run(0);
              cudaDeviceSynchronize();
          }}},
        {"what goes into GELU less aligned than it is read",
         {"the auxiliary matrix at",
          [] {
              Product p = usual_product;
              p.d_type = CUDA_R_16BF;
              p.epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
              ProductTest& test = leaked_product(p);
              test.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, card_memory(4096) + 8);
              test.run(0);
          }}},
        {"the first launch of a kernel, in a capture",
         {"the first launch of double_kernel is in a capture",
          [] {
              float* data = (float*)card_memory(16);
              cudaStream_t stream;
              require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
              require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
              int count = 4;
              void* arguments[] = {&data, &count};
              cudaLaunchKernel((const void*)double_kernel, 1, 64, arguments, 0, stream);
          }}},
        {"a pointer less aligned than promised",
         {"is not aligned to", [] { leaked_product(usual_product).run(0, nullptr, 2); }}},
        {"a workspace that is too small",
         {"where its algorithm needs", [] { leaked_product(usual_product).run(1, nullptr, 0, 1024); }}},
    };
    return all;
}

// Reruns this program with the defect. Returns its output.
std::string run_planted(const std::string& name, int& code) {
    char self[4096] = {};
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) return "";
    setenv("PLANTED", name.c_str(), 1);
    std::string command = std::string("'") + self + "' --test-case='the planted defect' 2>&1", output;
    FILE* pipe = popen(command.c_str(), "r");
    char part[4096];
    while (size_t bytes = fread(part, 1, sizeof part, pipe)) output.append(part, bytes);
    unsetenv("PLANTED");
    code = WEXITSTATUS(pclose(pipe));
    return output;
}

}  // namespace

TEST_CASE("the planted defect") {
    const char* name = getenv("PLANTED");
    if (!name) SKIP("for the case behind it");
    planted().at(name).defect();
    CHECK_MESSAGE(false, "nobody has seen it");
}

TEST_CASE("each check ends a program with a line that names the call") {
    constexpr int code_of_fault = 86;
    for (auto& [name, defect] : planted()) {
        CAPTURE(name);
        int code = 0;
        std::string output = run_planted(name, code);
        CAPTURE(output);
        CHECK(code == code_of_fault);
        CHECK(output.find("nocard: ") != std::string::npos);
        CHECK(output.find(defect.says) != std::string::npos);
    }
}
