/*
Reads the documents of files, in order, in batches of about a megabyte that can be encoded independently. A
batch is several small documents, several lines, or a part of a large document. So the files may be larger
than memory, and so may a document if the tokenizer finds places to cut it.

Lines are kept whole and unparsed; documents_of() parses them, and may run for many batches in parallel.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/json_lines.h"
#include "data/text/text_files.h"
#include "data/base/utf8.h"

struct TextBatch {
    struct Piece {
        size_t size;
        bool last;  // the piece ends its document
    };
    std::string text;
    std::vector<Piece> pieces;  // pieces of the text; empty if it consists of lines
    std::string path;           // the file that lines are from
    uint64_t first_line = 0;    // counted from 1
    uint64_t input_bytes = 0;   // bytes of files that were read for this batch
};

// Notes on the lines of a batch.
struct LineNotes {
    static constexpr size_t most_named = 100;
    uint64_t lone_surrogates = 0;    // in lines with a document; replaced by U+FFFD
    uint64_t bad = 0;                // lines without a document
    std::vector<std::string> named;  // the first bad lines: "FILE:LINE: REASON; REMEDY"
};

class TextBatches {
public:
    static constexpr size_t default_size = 1 << 20;
    // The longest line, or text without a place to cut, in bytes. It is in memory twice, and a .gz
    // file a thousandth of its size can contain it.
    static constexpr size_t default_longest = (size_t)1 << 30;

    // cut: returns the last position where a text may be cut, 0 if there is none (Tokenizer::cut_place). The
    // files must outlive this object.
    TextBatches(const std::vector<TextFile>& files, std::function<size_t(std::string_view)> cut,
                size_t size = default_size, size_t longest = default_longest)
        : files_(files), cut_(std::move(cut)), size_(size), longest_(longest) {}

    // Reads the next batch. Returns false at the end of the files.
    bool next(TextBatch& batch) {
        batch = {};
        while (batch.text.size() < size_ && (input_ || next_file_ < files_.size())) {
            if (!input_) {
                if (files_[next_file_].lines && !batch.text.empty()) break;
                open();
            }
            if (file().lines) {
                read_lines(batch);
                if (!batch.text.empty()) break;
            } else {
                read_document(batch);
                if (!batch.pieces.back().last) break;
            }
        }
        return !batch.text.empty() || !batch.pieces.empty();
    }

private:
    const TextFile& file() const { return files_[next_file_ - 1]; }

    void open() {
        input_ = std::make_unique<TextInput>(files_[next_file_++]);
        rest_.clear();
        line_ = 1, at_ = counted_ = 0, cut_done_ = false;
    }

    // Returns how many of `bytes` bytes to read: at most one more than is allowed, which is enough to detect
    // that there are too many.
    size_t room_for(size_t bytes) const { return std::min(bytes, longest_ + 1 - rest_.size()); }

    void count(TextBatch& batch) {
        batch.input_bytes += input_->consumed() - counted_;
        counted_ = input_->consumed();
    }

    // Reads enough whole lines for a batch, at least one.
    void read_lines(TextBatch& batch) {
        size_t searched = rest_.size(), end = 0;  // rest_, left over from before, has no line end
        bool more = true;
        while (more && end == 0) {
            more = input_->append(rest_, room_for(std::max(size_, rest_.size())));
            void* newline = memrchr(rest_.data() + searched, '\n', rest_.size() - searched);
            end = newline ? (size_t)((char*)newline - rest_.data()) + 1 : 0;
            searched = rest_.size();
            if (end == 0 && searched > longest_) {
                fail("%s:%llu: the line is longer than %zu MiB; put each document on its own line",
                     file().path.c_str(), (unsigned long long)line_, longest_ >> 20);
            }
        }
        if (!more) end = rest_.size();
        std::string tail = rest_.substr(end);
        rest_.resize(end);
        batch.text = std::exchange(rest_, std::move(tail));
        batch.path = file().path;
        batch.first_line = line_;
        line_ += (uint64_t)std::count(batch.text.begin(), batch.text.end(), '\n');
        count(batch);
        if (!more) input_.reset();
    }

    // Reads a whole document, or a part of it that ends at a place to cut.
    void read_document(TextBatch& batch) {
        size_t wanted = size_ - batch.text.size();
        for (;;) {
            uint64_t end = file().cut > 0 && !cut_done_ ? file().cut : UINT64_MAX;
            size_t before = rest_.size(), room = room_for(wanted > before ? wanted - before : size_);
            bool more = input_->append(rest_, (size_t)std::min<uint64_t>(room, end - at_));
            at_ += rest_.size() - before;
            if (!more || at_ == end) {
                size_t size = more ? whole_characters(rest_) : rest_.size();
                if (size == 0) size = rest_.size();  // nothing else is left
                batch.pieces.push_back({size, true});
                batch.text.append(rest_, 0, size);
                rest_.erase(0, size);
                count(batch);
                if (!more) input_.reset();
                cut_done_ = true;
                return;
            }
            if (size_t cut = cut_(rest_)) {
                batch.pieces.push_back({cut, false});
                batch.text.append(rest_, 0, cut);
                rest_.erase(0, cut);
                count(batch);
                return;
            }
            if (rest_.size() > longest_) {
                fail("%s: has %zu MiB of text that this tokenizer cannot split; split the file",
                     file().path.c_str(), longest_ >> 20);
            }
            wanted = std::max(size_, 2 * rest_.size());
        }
    }

    const std::vector<TextFile>& files_;
    std::function<size_t(std::string_view)> cut_;
    size_t size_, longest_;
    size_t next_file_ = 0;
    std::unique_ptr<TextInput> input_;  // the file before next_file_; null between files
    std::string rest_;                  // text that was read but is not in a batch yet
    uint64_t line_ = 1;                 // the line that rest_ begins in
    uint64_t at_ = 0;                   // bytes of text read
    bool cut_done_ = false;
    uint64_t counted_ = 0;  // bytes of the file that batches account for
};

// Calls piece(text, last) for the pieces of documents in a batch, in order. `last` ends a document. Bad lines
// are skipped and noted.
template <typename F>
LineNotes documents_of(const TextBatch& batch, const std::string& text_field, F&& piece) {
    std::string_view rest = batch.text;
    for (auto [size, last] : batch.pieces) {
        piece(rest.substr(0, size), last);
        rest.remove_prefix(size);
    }
    LineNotes notes;
    std::string document;
    for (uint64_t line = batch.first_line; !rest.empty(); line++) {
        std::string_view one = next_line(rest);
        if (is_blank(one)) continue;
        std::string wrong = read_json_line(one, text_field, document, &notes.lone_surrogates);
        if (wrong.empty())
            piece(document, true);
        else if (notes.bad++ < LineNotes::most_named)
            notes.named.push_back(
                text("%s:%llu: %s", batch.path.c_str(), (unsigned long long)line, wrong.c_str()));
    }
    return notes;
}
