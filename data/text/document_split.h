/*
Divides documents between training and validation. A document is used for validation if a hash of (seed, its
number) is below the requested fraction, so no text is divided between the two, and later documents do not
change the choice. With two or more documents, both get at least one, unless the fraction is 0 or 1.

The number of documents is unknown until all lines are read, so the first documents are held back until the
hash has chosen one for training and one for validation. If they need too much memory or the text ends before
that, the smallest of them is used for validation if it has none, or the largest for training if it has none;
a single document is cut.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/tokens/shard_series.h"
#include "kernels/random.cuh"

// Uniform in [0, 1).
inline double validation_draw(uint64_t seed, uint64_t document) {
    Random4 random = philox(random_key(seed, "validation"), document);
    return (double)(((uint64_t)random.at[0] << 32 | random.at[1]) >> 11) * 0x1p-53;
}

// Returns which documents are for validation: about `fraction` of them. If need_val and the hash chooses
// none, the smallest is used; if need_train and all are chosen, the largest is left for training. sizes: by
// document, the first of which has the number `first`.
inline std::vector<bool> choose_validation(const std::vector<uint64_t>& sizes, double fraction, uint64_t seed,
                                           uint64_t first = 0, bool need_train = true, bool need_val = true) {
    size_t documents = sizes.size();
    std::vector<bool> chosen(documents);
    if (fraction >= 1) chosen.flip();
    if (fraction <= 0 || fraction >= 1 || documents == 0) return chosen;
    auto rank = [&](size_t i) { return std::pair(sizes[i], validation_draw(seed, first + i)); };
    size_t smallest = 0, largest = 0, count = 0;
    for (size_t i = 0; i < documents; i++) {
        chosen[i] = validation_draw(seed, first + i) < fraction;
        count += chosen[i];
        if (rank(i) < rank(smallest)) smallest = i;
        if (rank(i) >= rank(largest)) largest = i;
    }
    if (need_val && count == 0) chosen[smallest] = true, count = 1;
    if (need_train && count == documents) chosen[largest] = false;
    return chosen;
}

struct SplitOptions {
    std::string output;  // the series are OUTPUT_train and OUTPUT_val
    int vocab_size, end_of_text;
    int64_t shard_tokens;
    double val_fraction;
    uint64_t seed;
    std::optional<std::vector<bool>> validation;  // the choice, if it is known beforehand
    size_t most_held = 64 << 20;                  // limit on the tokens held back
};

// Writes the tokens of documents, each followed by the end-of-text token, to the two series.
class DocumentSplitter {
public:
    explicit DocumentSplitter(SplitOptions options)
        : train_(options.output + "_train", options.vocab_size, options.shard_tokens),
          val_(options.output + "_val", options.vocab_size, options.shard_tokens),
          options_(std::move(options)),
          holding_(!options_.validation && options_.val_fraction > 0 && options_.val_fraction < 1) {}

    // Adds the next tokens of a document; `last` ends it. A document without tokens is only counted as empty.
    void add(const int* tokens, size_t n, bool last) {
        if (n == 0 && !inside_) {
            empty_ += last;
            return;
        }
        if (!inside_) {
            inside_ = true;
            series_ = holding_ ? nullptr : &series_of(documents_);
        }
        write(tokens, n);
        if (last) {
            write(&options_.end_of_text, 1);
            if (!series_) {
                ends_.push_back(held_.size());
                any_[&series_of(documents_) == &val_] = true;
            }
            documents_++;
            inside_ = false;
        }
        if (!holding_) return;
        bool both = (any_[0] || train_.total() > 0) && (any_[1] || val_.total() > 0);
        if (both || held_.size() > options_.most_held) release();
    }

    // Completes all files, still under temporary names. `what` names the text in messages.
    void finish(const std::string& what) {
        if (holding_ && documents_ == 1)
            cut_the_only_one(what);
        else if (holding_)
            release();
        train_.finish();
        val_.finish();
    }

    void commit(const std::vector<std::string>& older) {
        train_.commit(older);
        val_.commit(older);
    }

    uint64_t documents() const { return documents_; }
    uint64_t empty() const { return empty_; }
    uint64_t train_tokens() const { return train_.total(); }
    uint64_t val_tokens() const { return val_.total(); }

    std::string summary() const {
        std::string list;
        for (const ShardSeries* series : {&train_, &val_}) {
            if (series->total() > 0) append_item(list, series->summary());
        }
        return list;
    }

private:
    ShardSeries& series_of(uint64_t document) {
        bool val = options_.validation && document < options_.validation->size()
                       ? (*options_.validation)[document]
                       : validation_draw(options_.seed, document) < options_.val_fraction;
        return val ? val_ : train_;
    }

    void write(const int* tokens, size_t n) {
        if (series_)
            series_->write(tokens, n);
        else
            held_.insert(held_.end(), tokens, tokens + n);
    }

    // Writes the held documents. The rest of an unfinished document will be written to the same series as its
    // beginning.
    void release() {
        if (inside_ && !series_) ends_.push_back(held_.size());
        uint64_t known = documents_ + inside_;
        std::vector<bool> chosen(ends_.size());  // a single document is for training: it cannot be both
        if (known > 1) {
            std::vector<uint64_t> sizes(ends_.begin(), ends_.end());
            for (size_t i = sizes.size() - 1; i > 0; i--) sizes[i] -= sizes[i - 1];
            chosen = choose_validation(sizes, options_.val_fraction, options_.seed, known - ends_.size(),
                                       train_.total() == 0, val_.total() == 0);
        }
        size_t begin = 0;
        for (size_t i = 0; i < ends_.size(); i++) {
            series_ = chosen[i] ? &val_ : &train_;
            write(held_.data() + begin, ends_[i] - begin);
            begin = ends_[i];
        }
        held_ = {}, ends_ = {};
        any_[0] = any_[1] = false;
        holding_ = train_.total() == 0 || val_.total() == 0;
    }

    // Cuts the document: its end is for validation, and neither part is empty.
    void cut_the_only_one(const std::string& what) {
        size_t tokens = held_.empty() ? 0 : held_.size() - 1;
        if (held_.empty()) {
            fail("%s: is a single document of more than %zu tokens, which cannot be split; give "
                 "--val-fraction 0, or save its text as a plain file",
                 what.c_str(), options_.most_held);
        }
        if (tokens < 2) fail("%s: is too short to split; give more text, or --val-fraction 0", what.c_str());
        size_t cut =
            std::clamp<size_t>((size_t)((double)tokens * (1 - options_.val_fraction)), 1, tokens - 1);
        train_.write(held_.data(), cut);
        train_.write(&options_.end_of_text, 1);
        val_.write(held_.data() + cut, held_.size() - cut);
        print("tokenize: %s has a single document, so its last %zu tokens are for validation\n", what.c_str(),
              tokens - cut);
    }

    ShardSeries train_, val_;
    SplitOptions options_;
    bool holding_;                   // new documents are held back
    bool inside_ = false;            // a document is unfinished
    ShardSeries* series_ = nullptr;  // the series of that document; null: it is held
    std::vector<int> held_;
    std::vector<size_t> ends_;  // ends of the documents in held_
    bool any_[2] = {};          // {training, validation}: the hash chose some of these documents for it
    uint64_t documents_ = 0, empty_ = 0;
};
