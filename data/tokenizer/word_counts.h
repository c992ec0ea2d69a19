/*
Counts how often each word of a text occurs, which is all that BPE training needs to know about it. The text
arrives in pieces of any size and is counted on all cores; memory holds the distinct words and a few chunks,
so the text may be larger than memory.

Chunks are cut only where every known pre-tokenizer ends a word in any context (is_word_boundary), so the
counts are those of the whole text, no matter how it arrives and how many threads count.
*/
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <xxhash.h>

#include "data/base/error.h"
#include "data/tokenizer/pattern.h"
#include "data/base/utf8.h"

// A hash table from words, which are any bytes, to counts. All words are concatenated in one string.
class WordCounts {
public:
    struct Entry {
        uint64_t offset, count;
        uint32_t length, hash;
    };

    void add(std::string_view word, uint64_t count = 1) {
        if (word.empty()) return;
        if (word.size() > UINT32_MAX) fail("the text: has a word of 4 GiB or more; is it text?");
        if (slots_.size() < 2 * (entries_.size() + 1)) grow();
        uint32_t hash = (uint32_t)XXH3_64bits(word.data(), word.size());
        for (size_t at = hash;; at++) {
            uint32_t& slot = slots_[at & (slots_.size() - 1)];
            if (slot == empty) {
                if (entries_.size() == empty)
                    fail("the text: has 2^32 or more distinct words; use less text");
                slot = (uint32_t)entries_.size();
                entries_.push_back({bytes_.size(), count, (uint32_t)word.size(), hash});
                bytes_ += word;
                return;
            }
            Entry& entry = entries_[slot];
            if (entry.hash == hash && text_of(entry) == word) {
                entry.count += count;
                return;
            }
        }
    }

    void add(const WordCounts& other) {
        for (const Entry& entry : other.entries_) add(other.text_of(entry), entry.count);
    }

    // Entries in the order in which words were first added.
    const std::vector<Entry>& entries() const { return entries_; }
    std::string_view text_of(const Entry& entry) const {
        return std::string_view(bytes_).substr(entry.offset, entry.length);
    }
    size_t size() const { return entries_.size(); }

private:
    static constexpr uint32_t empty = UINT32_MAX;

    void grow() {
        slots_.assign(std::max<size_t>(1024, 2 * slots_.size()), empty);
        for (size_t i = 0; i < entries_.size(); i++) {
            size_t at = entries_[i].hash;
            while (slots_[at & (slots_.size() - 1)] != empty) at++;
            slots_[at & (slots_.size() - 1)] = (uint32_t)i;
        }
    }

    std::vector<uint32_t> slots_;  // indices of entries_; the size is a power of two
    std::vector<Entry> entries_;
    std::string bytes_;
};

// ----------------------------------------------------------------------------
// places where text may be cut

// Returns the character that ends before text[end]; invalid_byte if the bytes there are not valid UTF-8.
inline int32_t code_point_before(std::string_view text, size_t end) {
    for (size_t size = 1; size <= std::min<size_t>(4, end); size++) {
        const char* at = text.data() + end - size;
        if (((unsigned char)*at & 0xc0) == 0x80) continue;
        int32_t code = next_code_point(at, text.data() + end);
        return at == text.data() + end ? code : invalid_byte;
    }
    return invalid_byte;
}

inline bool is_letter_or_number(int32_t code) {
    static const std::vector<bool> letters = characters_of("[\\p{L}\\p{N}]+");
    return code >= 0 && letters[(size_t)code];
}

// Returns whether the patterns of GPT-2, GPT-4, Llama 3 and Qwen all end a word before text[at], even if the
// text on either side is missing. How they divide white space depends on what follows it. So the safe places
// are before white space that follows a letter or number, and after a line feed between two characters that
// are not white space, unless the next is '/', which can belong to the word before.
inline bool is_word_boundary(std::string_view text, size_t at) {
    if (at == 0 || at >= text.size()) return false;
    char next = text[at];
    if (next == ' ' || next == '\n' || next == '\r' || next == '\t')
        return is_letter_or_number(code_point_before(text, at));
    if (text[at - 1] != '\n' || next == '/') return false;
    const char* from = text.data() + at;
    int32_t before = code_point_before(text, at - 1),
            after = next_code_point(from, text.data() + text.size());
    return before != invalid_byte && !is_white_space(before) && after != invalid_byte &&
           !is_white_space(after);
}

// Returns the last position where `text` may be cut, or 0 if there is none after `from`.
inline size_t last_word_boundary(std::string_view text, size_t from) {
    for (size_t at = text.size(); at-- > from + 1;) {
        if (is_word_boundary(text, at)) return at;
    }
    return 0;
}

// ----------------------------------------------------------------------------

// Calls `word` for each word of the text, in order. Several threads may call the function at the same time.
using SplitIntoWords =
    std::function<void(std::string_view text, const std::function<void(std::string_view)>& word)>;

// Counts the words of documents in several threads. One thread passes the pieces of a document in order to
// add(), and then calls end_document(). An exception that `split` throws is rethrown by later calls.
class WordCounter {
public:
    static constexpr size_t default_chunk = 1 << 20;  // bytes

    explicit WordCounter(SplitIntoWords split, unsigned threads = std::thread::hardware_concurrency(),
                         size_t chunk = default_chunk)
        : split_(std::move(split)), chunk_(chunk), next_look_(chunk), counts_(std::max(1u, threads)) {
        try {
            for (WordCounts& counts : counts_) threads_.emplace_back([this, &counts] { work(counts); });
        } catch (const std::system_error&) {
            stop(true);
            throw;  // the message of this error has a remedy
        }
    }

    WordCounter(const WordCounter&) = delete;
    WordCounter& operator=(const WordCounter&) = delete;
    ~WordCounter() { stop(true); }

    void add(std::string_view piece) {
        while (!piece.empty()) {
            size_t size = std::min(piece.size(), chunk_);
            pending_ += piece.substr(0, size);
            piece.remove_prefix(size);
            if (pending_.size() >= next_look_) cut_pending();
        }
    }

    // Ends a document; no word crosses its end.
    void end_document() {
        if (!pending_.empty()) hand_over(std::move(pending_));
        begin_with("");
    }

    WordCounts finish() {
        end_document();
        stop(false);
        if (failure_) std::rethrow_exception(failure_);
        WordCounts all = std::move(counts_[0]);
        for (size_t i = 1; i < counts_.size(); i++) {
            all.add(counts_[i]);
            counts_[i] = WordCounts();
        }
        return all;
    }

private:
    // Text without a place to cut is kept until one appears, and is searched again once its size has doubled.
    void cut_pending() {
        size_t cut = last_word_boundary(pending_, looked_);
        if (cut == 0) {
            // The last positions are searched again when the text that follows them is known.
            looked_ = pending_.size() - std::min<size_t>(pending_.size(), 8);
            next_look_ = 2 * pending_.size();
            return;
        }
        std::string rest = pending_.substr(cut);
        pending_.resize(cut);
        hand_over(std::move(pending_));
        begin_with(std::move(rest));
    }

    void begin_with(std::string text) {
        pending_ = std::move(text);
        looked_ = 0;
        next_look_ = std::max(chunk_, 2 * pending_.size());
    }

    void hand_over(std::string chunk) {
        std::unique_lock lock(mutex_);
        taken_.wait(lock, [&] { return chunks_.size() < 2 * counts_.size() || failure_; });
        if (failure_) std::rethrow_exception(failure_);
        chunks_.push_back(std::move(chunk));
        given_.notify_one();
    }

    void work(WordCounts& counts) {
        const std::function<void(std::string_view)> add = [&](std::string_view word) { counts.add(word); };
        for (;;) {
            std::string chunk;
            {
                std::unique_lock lock(mutex_);
                given_.wait(lock, [&] { return !chunks_.empty() || ended_; });
                if (chunks_.empty()) return;
                chunk = std::move(chunks_.front());
                chunks_.pop_front();
                taken_.notify_one();
            }
            try {
                split_(chunk, add);
            } catch (...) {
                std::lock_guard lock(mutex_);
                if (!failure_) failure_ = std::current_exception();
                chunks_.clear();
                taken_.notify_one();
            }
        }
    }

    void stop(bool at_once) {
        {
            std::lock_guard lock(mutex_);
            ended_ = true;
            if (at_once) chunks_.clear();
        }
        given_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

    SplitIntoWords split_;
    size_t chunk_;
    std::string pending_;  // text of the document that has not been handed over
    size_t looked_ = 0;    // no place to cut before this position
    size_t next_look_;     // size of pending_ at which it is searched again
    std::mutex mutex_;     // guards chunks_, failure_ and ended_
    std::deque<std::string> chunks_;
    std::exception_ptr failure_;
    bool ended_ = false;
    std::condition_variable given_, taken_;
    std::vector<WordCounts> counts_;  // one for each thread
    std::vector<std::thread> threads_;
};
