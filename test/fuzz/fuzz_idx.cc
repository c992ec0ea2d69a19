// libFuzzer: no bytes in the two files of a Megatron data set may do worse than an Error.
#include <cstdlib>
#include <string>
#include <sys/mman.h>
#include <vector>

#include "data/tokens/megatron_shards.h"

static FileHandle file_of(const std::string& content) {
    FileHandle file(memfd_create("megatron", 0));
    if (!file || write(file.get(), content.data(), content.size()) != (ssize_t)content.size()) abort();
    return file;
}

static int test_one_input(const uint8_t* data, size_t size) {
    if (size < 2) return 0;
    // A byte of settings, one for the size of the token file, then the index: as it is, or as its type,
    // lengths and document boundaries in one byte each, which are put into a valid frame.
    bool framed = data[0] & 1, break_pointer = (data[0] & 6) == 6;
    std::string index((const char*)data + 2, size - 2), tokens(data[1], 'x');
    if (framed && index.size() >= 3) {
        uint64_t sequences = (index.size() - 1) / 2, documents = index.size() - 1 - sequences, version = 1;
        std::string built("MMIDIDX\0\0", 9);
        auto append = [&](auto number) { built.append((const char*)&number, sizeof number); };
        append(version), append((uint8_t)(index[0] & 1 ? 4 : 8)), append(sequences), append(documents);
        int64_t width = index[0] & 1 ? 4 : 2, at = 0;
        for (uint64_t i = 0; i < sequences; i++) append((int32_t)index[1 + i]);
        for (uint64_t i = 0; i < sequences; i++) append(at), at += width * index[1 + i];
        for (uint64_t i = 0; i < documents; i++) append((int64_t)index[1 + sequences + i]);
        if (break_pointer) built[34 + 4 * sequences + data[1] % (8 * sequences)] ^= (char)data[0];
        index = built;
        if (at >= 0 && at < 1 << 20 && !(data[0] & 8)) tokens.resize((size_t)at, 'x');
    }

    FileHandle index_file = file_of(index), token_file = file_of(tokens);
    try {
        MegatronData megatron(text("/proc/self/fd/%d", index_file.get()),
                              text("/proc/self/fd/%d", token_file.get()));
        int64_t next = 0;
        for (int64_t i = 0; i < megatron.documents(); i++) {
            auto [start, count] = megatron.document(i);
            if (start != next || count < 0) abort();
            next += count;
        }
        if (next != megatron.count()) abort();
        std::vector<int> out((size_t)megatron.count());
        megatron.copy(0, megatron.count(), 50257, out.data());
        for (int token : out) {
            if (token < 0 || token >= 50257) abort();
        }
    } catch (const Error& error) {
        if (std::string(error.what()).find('\n') != std::string::npos) abort();
    }
    return 0;
}
