// libFuzzer: no bytes in a file of multiple-choice questions, of either kind, may do worse than an Error, and
// what is read can be scored.
#include <cstdlib>
#include <string>
#include <sys/mman.h>

#include "data/commands/multiple_choice.h"
#include "test/fuzz/fuzz_json.h"

// Well-formed lines with some damage.
static std::string damaged_lines(std::string_view bytes) {
    nlohmann::json document = nlohmann::json::parse(R"([
        {"context": "The sky is", "choices": ["blue.", " red.", "\u3000\u00e9"], "answer": 2},
        {"ctx": "A man", "endings": ["is", "was"], "label": 0}])");
    damage_json(document, bytes);
    std::string lines;
    for (const auto& line : document) lines += line.dump() + "\n";
    return lines;
}

// An evaluation file of one example with right counts, made from one byte per token; then perhaps a number of
// the example, and one of the header, is changed.
static std::string framed_example(std::string_view bytes) {
    auto byte = [&](size_t i) { return (uint16_t)(uint8_t)bytes[i % bytes.size()]; };
    std::vector<uint16_t> stream = {65535, 0, 0, (uint16_t)(byte(0) % 3), 3};
    for (size_t part = 0, at = 1; part < 4; part++) {
        uint16_t count = 1 + byte(at++) % 5;
        stream.push_back(count);
        for (uint16_t i = 0; i < count; i++) stream.push_back(byte(at++));
    }
    stream[1] = (uint16_t)(2 * stream.size());
    int32_t header[4] = {20240522, 1, 1, stream[1]};
    if (byte(0) & 64) stream[byte(1) % stream.size()] ^= byte(2);
    if (byte(0) & 128) header[byte(3) % 4] ^= byte(4);
    return std::string((const char*)header, sizeof header) + std::string(1008, '\0') +
           std::string((const char*)stream.data(), 2 * stream.size());
}

static void score_all(const std::vector<ChoiceExample>& examples, int T) {
    std::vector<int> inputs((size_t)T), targets((size_t)T);
    ChoiceScore score;
    for (const ChoiceExample& example : examples) {
        if (example.context.empty() || example.choices.size() < 2) abort();
        if (example.answer < 0 || (size_t)example.answer >= example.choices.size()) abort();
        for (size_t i = 0; i < example.choices.size(); i++) {
            size_t scored = 0;
            if ((int64_t)example.choices[i].size() > T) continue;
            choice_row(example, i, T, inputs.data(), targets.data());
            for (size_t t = 0; t < (size_t)T; t++) {
                if (inputs[t] < 0 || inputs[t] >= 257 || targets[t] < -1 || targets[t] >= 257) abort();
                scored += targets[t] >= 0;
            }
            if (scored == 0 || scored != example.choices[i].size()) abort();
        }
        score.add(example, std::vector<double>(example.choices.size(), -1));
    }
    if (score.examples != (int64_t)examples.size() || examples.empty()) abort();
}

static int test_one_input(const uint8_t* data, size_t size) {
    if (size < 8) return 0;
    std::string_view bytes((const char*)data + 1, size - 1);
    std::string content(bytes);
    bool sound = false;
    switch (data[0] % 4) {
    case 1:
        content = damaged_lines(bytes);
        break;
    case 2:
        content = framed_example(bytes);
        sound = !(bytes[0] & 192);
        break;
    case 3:  // inserts the zeros of a header after its numbers
        if (content.size() >= 16) content.insert(16, 1008, '\0');
        break;
    }
    FileHandle file(memfd_create("choices", 0));
    if (!file || write(file.get(), content.data(), content.size()) != (ssize_t)content.size()) abort();
    static const Tokenizer tokenizer;
    try {
        score_all(read_choices(text("/proc/self/fd/%d", file.get()), &tokenizer, 257), 1 + data[1] % 16);
    } catch (const Error& error) {
        if (std::string(error.what()).find('\n') != std::string::npos || sound) abort();
    }
    return 0;
}
