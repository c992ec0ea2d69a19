// libFuzzer: whatever a safetensors file holds, it is refused in one line, or its tensors lie side by side
// and can be read. The first byte chooses what the rest is: the whole file; a header, with the number of data
// bytes that the second byte says; or damage to the table of a good file.
#include <cstdlib>
#include <sys/mman.h>

#include "data/exchange/safetensors.h"
#include "test/fuzz/fuzz_json.h"

static std::string with_length(const std::string& header, size_t data_bytes) {
    uint64_t length = header.size();
    return std::string((const char*)&length, sizeof length) + header + std::string(data_bytes, 'd');
}

static std::string file_from(uint8_t choice, const std::string& rest) {
    if (choice % 3 == 0 || rest.empty()) return rest;
    if (choice % 3 == 1) return with_length(rest.substr(1), (uint8_t)rest[0]);
    auto header = nlohmann::json::parse(R"({"__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "b": {"dtype": "BF16", "shape": [16, 2, 2], "data_offsets": [32, 160]},
        "c": {"dtype": "F16", "shape": [], "data_offsets": [160, 162]},
        "d": {"dtype": "F64", "shape": [0, 3], "data_offsets": [162, 162]},
        "e": {"dtype": "F4", "shape": [4], "data_offsets": [162, 164]}})");
    damage_json(header, rest);
    return with_length(header.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace), 164);
}

static int test_one_input(const uint8_t* input, size_t size) {
    if (size == 0) return 0;
    std::string file = file_from(input[0], std::string((const char*)input + 1, size - 1));
    FileHandle memory(memfd_create("safetensors", MFD_CLOEXEC));
    if (!memory || write(memory.get(), file.data(), file.size()) != (ssize_t)file.size()) abort();
    auto check_message = [](const Error& error) {
        for (const char* c = error.what(); *c; c++) {
            if ((unsigned char)*c < 0x20) abort();
        }
    };
    try {
        SafetensorsReader reader(text("/proc/self/fd/%d", memory.get()));
        uint64_t end = 0;
        for (const SafeTensor& tensor : reader.tensors()) {
            if (tensor.begin != end || tensor.end < end || tensor.end > file.size()) abort();
            end = tensor.end;
            if (reader.find(tensor.name) != &tensor) abort();
            std::vector<float> values(
                std::min<uint64_t>(tensor.size(), file.size() * 2));  // F4: two to a byte
            try {
                reader.read_floats(tensor, 0, values.size(), values.data());
            } catch (const Error& error) {
                check_message(error);
            }
        }
    } catch (const Error& error) {
        check_message(error);
    }
    return 0;
}
