// libFuzzer: no bytes in a file of lines, compressed or plain, may do worse than an Error; what is read is
// what nlohmann's parser reads in the whole line, or what json.dumps writes and that parser refuses.
//   clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -DDEVICE_CPU -I. test/fuzz/fuzz_jsonl.cc -lz
#include <cstdlib>
#include <string>
#include <sys/mman.h>
#include <vector>

#include "data/text/text_documents.h"
#include "test/data/gzip_testing.h"

// Reads the text in a line. Returns false if the line must be refused.
static bool read_slowly(std::string_view line, std::string& text) {
    size_t times = 0, depth = 0;
    auto count = [&](int, nlohmann::json::parse_event_t event, nlohmann::json& value) {
        using Event = nlohmann::json::parse_event_t;
        if (event == Event::key && depth == 1) times += value == "t";
        depth += event == Event::object_start || event == Event::array_start;
        depth -= event == Event::object_end || event == Event::array_end;
        return true;
    };
    nlohmann::json value = nlohmann::json::parse(line, count, false);
    for (const char* beyond : {"NaN", "Infinity", "\\ud", "\\uD"}) {
        if (value.is_discarded() && line.find(beyond) != line.npos)
            return read_json_line(line, "t", text).empty() && is_utf8(text);
    }
    if (value.is_discarded() || !value.is_object() || times != 1 || !value["t"].is_string()) return false;
    text = value["t"].get<std::string>();
    return true;
}

// Two bytes of settings, then the text.
enum { compressed = 1, lines = 2, cut_in_two = 4, cut_anywhere = 8, keep_bytes = 16, damaged = 32 };

static int test_one_input(const uint8_t* data, size_t size) {
    if (size < 3) return 0;
    int settings = data[0];
    std::string content;
    for (char c : std::string_view((const char*)data + 2, size - 2)) {
        // Random bytes are rarely JSON, so some bytes stand for parts of lines.
        if (c == 1 && !(settings & keep_bytes))
            content += "{\"t\":\"";
        else if (c == 3 && !(settings & keep_bytes))
            content += "\\ud83d";
        else if (c == 4 && !(settings & keep_bytes))
            content += "\",\"n\":-Infinity,\"m\":\"";
        else if (c == 2 && !(settings & keep_bytes))
            content += "\"}\n";
        else
            content += c;
    }
    std::string stored = settings & compressed ? gzip(content) : content;
    if (settings & damaged) stored[data[1] % stored.size()] ^= (char)(1 << data[1] % 8);
    if (settings & compressed && settings & keep_bytes) stored = content;  // not a gzip file
    bool as_it_was = !(settings & compressed) || stored == gzip(content);
    if (!(settings & compressed)) content = stored;

    FileHandle file(memfd_create("lines", 0));
    if (!file || write(file.get(), stored.data(), stored.size()) != (ssize_t)stored.size()) abort();
    std::vector<TextFile> files = {{text("/proc/self/fd/%d", file.get()), stored.size(),
                                    (settings & compressed) != 0, (settings & lines) != 0,
                                    settings & cut_in_two ? 7u : 0u}};
    auto cut = [&](std::string_view text) {
        return settings & cut_anywhere ? text.size() : text.rfind('"') + 1;
    };
    std::string got;
    size_t documents = 0;
    bool failed = false;
    try {
        TextBatches batches(files, cut, 1 + data[1]);
        for (TextBatch batch; batches.next(batch);) {
            LineNotes notes = documents_of(batch, "t", [&](std::string_view part, bool last) {
                got += part;
                if (last && settings & lines) got += '\n';
                documents += last;
            });
            if (notes.bad > 0) fail("%s", notes.named.at(0).c_str());
            if (got.size() > 16 << 20) return 0;
        }
    } catch (const Error& error) {
        failed = true;
        if (std::string(error.what()).find('\n') != std::string::npos) abort();
    }
    if (!as_it_was && failed) return 0;  // damaged files are refused or read correctly
    if (settings & compressed && settings & keep_bytes) return 0;
    if (!(settings & lines)) {
        if (failed || got != content || documents < 1 || documents > 2) abort();
        return 0;
    }
    std::string wanted, document;
    std::string_view rest = content;
    bool refused = false;
    while (!rest.empty() && !refused) {
        std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(rest.size(), line.size() + 1));
        if (is_blank(line)) continue;
        refused = !read_slowly(line, document);
        if (!refused) wanted += document + '\n';
    }
    if (refused != failed || (!failed && got != wanted)) abort();
    return 0;
}
