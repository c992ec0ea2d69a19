/*
TokenScan gathers the statistics of a stream of tokens: their number, the largest, the lengths of documents,
and whether one token fills a long stretch. It keeps up with a disk because it examines blocks of tokens in a
loop that compiles to vector instructions, and single tokens only in blocks where a document ends.
*/
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "data/base/error.h"

// Formats 1234567 as "1,234,567".
inline std::string with_commas(int64_t number) {
    std::string digits = std::to_string(number);
    size_t first = digits[0] == '-' ? 1 : 0;
    for (size_t at = digits.size(); at > first + 3;) digits.insert(at -= 3, ",");
    return digits;
}

// The lengths of documents: counts by powers of two, drawn as text. Lengths span many orders of magnitude, so
// rows of equal width would put nearly all of them in one.
class LengthHistogram {
public:
    void add(int64_t length /* not negative */) {
        rows_[(size_t)std::bit_width((uint64_t)length)]++;
        count_++;
        sum_ += length;
        smallest_ = std::min(smallest_, length);
        largest_ = std::max(largest_, length);
    }

    void add(const LengthHistogram& other) {
        for (size_t i = 0; i < rows_.size(); i++) rows_[i] += other.rows_[i];
        count_ += other.count_;
        sum_ += other.sum_;
        smallest_ = std::min(smallest_, other.smallest_);
        largest_ = std::max(largest_, other.largest_);
    }

    int64_t count() const { return count_; }
    int64_t sum() const { return sum_; }
    // All three are 0 if there are no lengths.
    int64_t smallest() const { return count_ ? smallest_ : 0; }
    int64_t largest() const { return largest_; }
    double mean() const { return count_ ? (double)sum_ / (double)count_ : 0; }

    // Returns lines such as "4 .. 7   1,234  ####", one for each power of two from the smallest to the
    // largest length. The longest bar has `width` marks, and every count above 0 has at least one.
    std::vector<std::string> lines(int width = 40) const {
        std::vector<std::string> lines;
        if (count_ == 0) return lines;
        size_t first = (size_t)std::bit_width((uint64_t)smallest_);
        size_t last = (size_t)std::bit_width((uint64_t)largest_);
        int64_t most = *std::max_element(rows_.begin(), rows_.end());
        int label_width = 0, count_width = (int)with_commas(most).size();
        for (size_t i = first; i <= last; i++) label_width = std::max(label_width, (int)label(i).size());
        for (size_t i = first; i <= last; i++) {
            double share = (double)rows_[i] / (double)most;
            int marks = rows_[i] == 0 ? 0 : std::max(1, (int)(share * width + 0.5));
            std::string line =
                text("%*s  %*s", label_width, label(i).c_str(), count_width, with_commas(rows_[i]).c_str());
            if (marks > 0) line += "  " + std::string((size_t)marks, '#');
            lines.push_back(line);
        }
        return lines;
    }

private:
    // Row i counts the lengths that have i binary digits.
    static std::string label(size_t i) {
        if (i <= 1) return std::to_string(i);
        int64_t low = int64_t(1) << (i - 1);
        return with_commas(low) + " .. " + with_commas(low + (low - 1));
    }

    std::array<int64_t, 64> rows_ = {};
    int64_t count_ = 0, sum_ = 0, smallest_ = INT64_MAX, largest_ = 0;
};

class TokenScan {
public:
    // `document_end`: -1 for none.
    explicit TokenScan(int document_end) : document_end_(document_end) {}

    void add(const int* tokens, int64_t n) {
        constexpr int64_t block = 256;
        for (int64_t i = 0; i < n; i += block) add_block(tokens + i, std::min(block, n - i));
    }

    // To be called after the last piece.
    void finish() {
        if (length_ > 0) lengths.add(std::exchange(length_, 0));
        end_run();
    }

    int64_t count = 0;
    int64_t document_ends = 0;
    int largest = -1;
    LengthHistogram lengths;  // of documents; an end token at the very start is not counted as one

    // The longest stretch of a repeated token, in whole blocks.
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
    int64_t length_ = 0;  // tokens of the unfinished document so far
    Run run_;
};
