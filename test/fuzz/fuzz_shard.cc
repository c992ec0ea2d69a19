// libFuzzer: whatever bytes a file holds, the data subcommand reports on it, in text that is safe to show.
#include <cstdlib>
#include <string>
#include <sys/mman.h>

#include "data/commands/data_report.h"

static int test_one_input(const uint8_t* data, size_t size) {
    if (size < 4) return 0;
    // A byte of settings and one that is the end token; then tokens, which get a valid header, or the first
    // numbers of a header and what follows it.
    std::string content((const char*)data + 2, size - 2);
    bool framed = data[0] & 1, wide = data[0] & 2;
    size_t width = wide ? 4 : 2;
    if (framed) {
        content.resize(std::max(width, content.size() / width * width));
        int32_t header[3] = {wide ? 20240801 : 20240520, wide ? 7 : 1, (int32_t)(content.size() / width)};
        content.insert(0, std::string((const char*)header, sizeof header) + std::string(1012, '\0'));
    } else if (content.size() >= 12) {
        content.insert(12, 1012, '\0');
    }
    FileHandle file(memfd_create("shard", 0));
    if (!file || write(file.get(), content.data(), content.size()) != (ssize_t)content.size()) abort();
    std::string path = text("/proc/self/fd/%d", file.get());

    static const Tokenizer bytes;
    DataReport report(data[0] & 4 ? &bytes : nullptr, data[0] & 8 ? data[1] : -1);
    std::string lines = report.file(path) + report.total();
    for (const char *at = lines.data(), *end = at + lines.size(); at < end;) {
        int32_t code = next_code_point(at, end);
        if (code == invalid_byte || (is_invisible(code) && code != '\n')) abort();
    }
    if (lines.size() > 20000) abort();
    // Any two bytes are a token of some vocabulary.
    bool sound = framed && !wide && !(data[0] & 4);
    if (report.files() + report.damaged().size() != 1 || (sound && report.files() == 0)) abort();
    return 0;
}
