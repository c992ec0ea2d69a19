// libFuzzer: whatever a weights file holds, it is read in full or refused in one line. The first byte chooses
// what the rest is: the whole file; header and data, behind a right preamble; or damage to the table of a
// good file, with right checksums again. Without those the fuzzer would not get past the hashes.
#include <cstdlib>
#include <sys/mman.h>

#include "data/weights_file.h"
#include "test/forged_weights.h"
#include "test/fuzz_json.h"

static std::string with_preamble(const std::string& header, std::string data) {
    data.resize(weights_format::aligned(data.size()), '\0');
    return forged_weights(header, data);
}

static std::string file_from(uint8_t choice, const std::string& rest) {
    if (choice % 3 == 0) return rest;
    if (choice % 3 == 1) {
        size_t end = std::min(rest.find('\0'), rest.size());
        return with_preamble(rest.substr(0, end), rest.substr(end));
    }
    auto header = nlohmann::json::parse(R"({"options": {"layers": 1}, "tensors": [
        {"name": "a", "dtype": "fp32", "shape": [2, 4], "offset": 0, "bytes": 32},
        {"name": "b", "dtype": "bf16", "shape": [16, 2, 2], "offset": 64, "bytes": 128},
        {"name": "c", "dtype": "bf16", "shape": [], "offset": 192, "bytes": 2}]})");
    damage_json(header, rest);
    return with_preamble(header.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace),
                         std::string(256, 'd'));
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
    if (size == 0) return 0;
    std::string file = file_from(input[0], std::string((const char*)input + 1, size - 1));
    FileHandle memory(memfd_create("weights", MFD_CLOEXEC));
    if (!memory || write(memory.get(), file.data(), file.size()) != (ssize_t)file.size()) abort();
    try {
        WeightsReader reader(text("/proc/self/fd/%d", memory.get()));
        for (const StoredTensor& tensor : reader.tensors()) {
            if (tensor.bytes > file.size()) abort();
            std::string bytes(tensor.bytes, '\0');
            reader.read(tensor, 0, bytes.data(), bytes.size());
        }
    } catch (const Error& error) {
        for (const char* c = error.what(); *c; c++) {
            if ((unsigned char)*c < 0x20) abort();
        }
    }
    return 0;
}
