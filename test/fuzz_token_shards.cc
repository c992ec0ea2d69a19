// libFuzzer: no bytes in a token shard may do worse than an Error.
//   clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -DDEVICE_CPU -I. test/fuzz_token_shards.cc
#include <cstdlib>
#include <string>
#include <sys/mman.h>
#include <vector>

#include "data/sample_order.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 14) return 0;
    // Two bytes of settings, then the file: as it is, or with the zeros of a header put in after its three
    // numbers.
    int T = 1 + data[0] % 64;
    bool short_header = data[1] & 1;
    SampleOrder order = data[1] & 2 ? SampleOrder::shuffled : SampleOrder::sequential;
    std::string content((const char*)data + 2, size - 2);
    if (short_header) content.insert(12, 1012, '\0');

    FileHandle file(memfd_create("shard", 0));
    if (!file || write(file.get(), content.data(), content.size()) != (ssize_t)content.size()) abort();
    try {
        TokenLoader loader(text("/proc/self/fd/%d", file.get()), 50257, T, order, data[0]);
        std::vector<int> inputs((size_t)T), targets((size_t)T);
        for (uint64_t sample = 0; sample < 2 * loader.samples_per_epoch(); sample++) {
            loader.load(sample, inputs.data(), targets.data());
            for (int token : targets) {
                if (token < 0 || token >= 50257) abort();
            }
        }
    } catch (const Error& error) {
        if (std::string(error.what()).find('\n') != std::string::npos) abort();
    }
    return 0;
}
