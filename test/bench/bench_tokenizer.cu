/*
Measures how fast a tokenizer.json encodes a text: bench_tokenizer TOKENIZER TEXT [THREADS]. The text is cut
at line breaks into documents of about 100 KB, the same that test/bench/bench_tokenizer.py passes to the
library; that script prints the ratio.
*/
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "data/tokenizer/tokenizer_json.h"

int main(int argc, char** argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: bench_tokenizer TOKENIZER TEXT [THREADS]\n");
        return 1;
    }
    try {
        using Clock = std::chrono::steady_clock;
        auto seconds_since = [](Clock::time_point begin) {
            return std::chrono::duration<double>(Clock::now() - begin).count();
        };
        int threads = argc > 3 ? atoi(argv[3]) : 1;
        Clock::time_point begin = Clock::now();
        HfTokenizer tokenizer = HfTokenizer::read(argv[1]);
        double load = seconds_since(begin);
        MappedFile file(argv[2]);
        std::string_view text(file.data(), file.size());
        std::vector<std::string_view> documents;
        while (!text.empty()) {
            size_t end = text.size() > 100000 ? text.find('\n', 100000) : text.npos;
            end = end == text.npos ? text.size() : end + 1;
            documents.push_back(text.substr(0, end));
            text.remove_prefix(end);
        }
        double best = 1e9;
        std::atomic<size_t> tokens;
        for (int round = 0; round < 3; round++) {
            std::atomic<size_t> next = 0;
            tokens = 0;
            begin = Clock::now();
            std::vector<std::jthread> workers;
            for (int i = 0; i < threads; i++) {
                workers.emplace_back([&] {
                    std::vector<int> ids;
                    for (size_t d; (d = next++) < documents.size();) {
                        tokenizer.encode(documents[d], ids, SpecialTokens::recognized);
                        tokens += ids.size();
                    }
                });
            }
            workers.clear();
            best = std::min(best, seconds_since(begin));
        }
        printf("%.1f MB/s, %.1f Mtokens/s, %zu tokens, %d threads, loaded in %.2f s\n",
               (double)file.size() / best / 1e6, (double)tokens / best / 1e6, tokens.load(), threads, load);
        return 0;
    } catch (const Error& error) {
        fprintf(stderr, "bench_tokenizer: %s\n", error.what());
        return 1;
    }
}
