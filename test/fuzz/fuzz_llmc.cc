// libFuzzer: whatever a model of llm.c and the state beside it hold, they are read in full or refused in one
// line. The first byte says whether the run shuffled; after it, every three bytes change one of three
// otherwise good files: a number of its header, a byte after the header, or its length.
#include <cstdlib>
#include <sys/mman.h>

#include "data/exchange/llmc_import.h"

static FileHandle file_of(const std::string& content) {
    FileHandle file(memfd_create("llmc", MFD_CLOEXEC));
    if (!file || write(file.get(), content.data(), content.size()) != (ssize_t)content.size()) abort();
    return file;
}

static std::string path_of(const FileHandle& file) {
    return text("/proc/self/fd/%d", file.get());
}

static std::string with_header(std::initializer_list<int32_t> numbers, size_t bytes) {
    llmc::Header header = {};
    std::copy(numbers.begin(), numbers.end(), header.begin());
    std::string file((const char*)header.data(), sizeof header);
    file.resize(sizeof header + bytes, '\1');
    return file;
}

// One layer, 2 channels, vocabulary of 1 padded to 2, and 2 ranks with half of the state each.
constexpr size_t parameters = 2 * 2 + 2 + 12 * 4 + 13 * 2 + 4;

static const int32_t values[] = {0,         1,        2, 3, 4, 5, 7, 8, -1, 255, 256, 1 << 24, (1 << 24) + 1,
                                 INT32_MAX, INT32_MIN};

static int test_one_input(const uint8_t* input, size_t size) {
    if (size < 4) return 0;
    std::string files[3];
    files[0] = with_header({llmc::model_magic, 5, 1, 1, 1, 1, 2, 2}, parameters * 2);
    for (int32_t rank : {0, 1}) {
        bool shuffles = input[0] & 1;
        files[1 + rank] = with_header({llmc::state_magic, 1, 2, rank, 1, shuffles, 0, 0, 0, 0, 700},
                                      parameters / 2 * 3 * 4 + (shuffles ? 16 + 2520 : 0));
        size_t tail = 1024 + parameters / 2 * 3 * 4;
        if (shuffles) memset(files[1 + rank].data() + tail, 0, 16);
    }
    for (size_t i = 1; i + 2 < size; i += 3) {
        std::string& file = files[input[i] % 3];
        if (input[i] & 0x80) {  // a byte after the header, or another length
            if (input[i] & 0x40)
                file.resize((file.size() + input[i + 1] * 8 + 4000 - 1024) % 4000 + 512, (char)input[i + 2]);
            else if (file.size() > 1024)
                file[1024 + (input[i + 1] * 256u + input[i + 2]) % (file.size() - 1024)] ^=
                    (char)input[i + 2];
        } else if (file.size() >= 1024) {
            memcpy(file.data() + 4 * input[i + 1], &values[input[i + 2] % std::size(values)], 4);
        }
    }
    FileHandle model_file = file_of(files[0]), zero = file_of(files[1]), one = file_of(files[2]);
    try {
        LlmcModel model(path_of(model_file));
        std::vector<float> all(llmc::parameters(model.tensors()));
        model.read_floats(0, all.size(), all.data());
        LlmcState state({{0, path_of(zero)}, {1, path_of(one)}}, 700, model.tensors());
        uint64_t used = 0, taken = 0;
        for (const LlmcTensor& tensor : model.tensors()) used += tensor.used;
        for (Slot slot : {Slot::m, Slot::v}) {
            state.each_part(slot, [&](size_t tensor, uint64_t first, const std::vector<float>& part) {
                if (first + part.size() > model.tensors()[tensor].used) abort();
                taken += part.size();
            });
        }
        if (taken != 2 * used) abort();
        if (state.has_master()) llmc::check_master(model, state);
    } catch (const Error& error) {
        for (const char* c = error.what(); *c; c++) {
            if ((unsigned char)*c < 0x20) abort();
        }
    }
    return 0;
}
