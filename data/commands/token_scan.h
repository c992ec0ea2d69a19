/*
What there is to know of a stream of tokens that comes in pieces: how many, the largest, where documents end,
and whether one token fills a long stretch. It keeps up with a disk because it looks at blocks of tokens in a
loop that compiles to vector instructions, and at single tokens only in blocks where a document ends.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "data/commands/length_histogram.h"

class TokenScan {
public:
    // `document_end`: -1 for none.
    explicit TokenScan(int document_end) : document_end_(document_end) {}

    void add(const int* tokens, int64_t n) {
        constexpr int64_t block = 256;
        for (int64_t i = 0; i < n; i += block) add_block(tokens + i, std::min(block, n - i));
    }

    // After the last piece.
    void finish() {
        if (length_ > 0) lengths.add(std::exchange(length_, 0));
        end_run();
    }

    int64_t count = 0;
    int64_t document_ends = 0;
    int largest = -1;
    LengthHistogram lengths;  // of documents; an end with nothing before it begins the first one

    // The longest stretch of one token over and over, in whole blocks.
    struct Run {
        int token = -1;
        int64_t start = 0, length = 0;
    } longest_run;

private:
    void add_block(const int* tokens, int64_t n) {
        int top = 0, first = tokens[0], ends = 0, same = 0;
        for (int64_t i = 0; i < n; i++) {
            top = std::max(top, tokens[i]);
            ends += tokens[i] == document_end_;
            same += tokens[i] == first;
        }
        largest = std::max(largest, top);
        if (document_end_ >= 0) add_documents(tokens, n, ends);
        if (same != n || first != run_.token) end_run();
        if (same == n) {
            if (run_.length == 0) run_ = {first, count, 0};
            run_.length += n;
        }
        count += n;
    }

    void add_documents(const int* tokens, int64_t n, int ends) {
        document_ends += ends;
        int64_t from = 0;
        for (int64_t i = 0; ends > 0; i++) {
            if (tokens[i] != document_end_) continue;
            length_ += i - from;
            if (count + i > 0) lengths.add(length_);
            length_ = 0;
            from = i + 1;
            ends--;
        }
        length_ += n - from;
    }

    void end_run() {
        if (run_.length > longest_run.length) longest_run = run_;
        run_ = {};
    }

    int document_end_;
    int64_t length_ = 0;  // so far, of the document that is not ended yet
    Run run_;
};
