/*
The earlier content of pages that are about to be overwritten (data/tables/page_file.h), as it was when a
checkpoint was saved. A page is overwritten only after its earlier content is on disk here.

    at  bytes
     0      8  magic: 89 54 47 55 4e 0d 0a 1a ("\x89TGUN\r\n\x1a")
     8      8  number of this log; later logs have higher numbers
    16      8  save id of the checkpoint (data/checkpoint/files.h)
    24      8  identity of the page file: a log of another page file is not used
    32      8  bytes of a page
    40     16  zero
    56      8  checksum of the 56 bytes before
    64         batches: a header of 24 bytes (number of pages, checksum of the rest of the batch, checksum
               of the 16 bytes before); the pages' numbers; the pages

All numbers are little-endian, all checksums XXH3-64.
*/
#pragma once

#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/file.h"

class UndoLog {
public:
    struct Preamble {
        unsigned char magic[8] = {0x89, 'T', 'G', 'U', 'N', '\r', '\n', 0x1a};
        uint64_t number, save_id, identity, page_bytes;
        uint64_t zeros[2] = {};
        uint64_t hash = 0;

        uint64_t right_hash() const { return XXH3_64bits(this, offsetof(Preamble, hash)); }
    };
    static_assert(sizeof(Preamble) == 64);

    // Creates a log, which is on disk when this returns.
    UndoLog(std::string path, Preamble preamble)
        : path_(std::move(path)),
          page_bytes_(preamble.page_bytes),
          file_(open_to_write(path_, O_WRONLY | O_CREAT | O_TRUNC)) {
        if (!file_) fail_with_errno(path_, "create it");
        preamble.hash = preamble.right_hash();
        try {
            write_at(file_, path_, 0, &preamble, sizeof preamble);
            sync_file(file_, path_);
        } catch (...) {
            unlink(path_.c_str());  // so that it is not taken for a damaged log
            throw;
        }
    }

    // Appends pages, which are on disk when this returns. If it throws, the log is unchanged.
    void append(const std::vector<uint64_t>& numbers, const std::vector<const char*>& pages) {
        std::string batch(sizeof(BatchHead), '\0');
        batch.append((const char*)numbers.data(), numbers.size() * sizeof(uint64_t));
        for (const char* page : pages) batch.append(page, page_bytes_);
        const char* rest = batch.data() + sizeof(BatchHead);
        BatchHead head = {numbers.size(), XXH3_64bits(rest, batch.size() - sizeof head), 0};
        head.hash = head.right_hash();
        memcpy(batch.data(), &head, sizeof head);
        try {
            write_at(file_, path_, end_, batch.data(), batch.size());
            sync_file(file_, path_);
        } catch (...) {
            (void)!ftruncate(file_.get(), (off_t)end_);
            throw;
        }
        end_ += batch.size();
    }

    // Returns the preamble of a log, or nothing if the file does not exist or the preamble is damaged.
    static std::optional<Preamble> preamble_of(const std::string& path) {
        FileHandle file = open_file(path, O_RDONLY | O_NONBLOCK);
        Preamble found, right = {};
        if (!file || !read_at(file, path, 0, &found, sizeof found)) return std::nullopt;
        bool good =
            memcmp(found.magic, right.magic, sizeof right.magic) == 0 && found.hash == found.right_hash();
        return good ? std::optional(found) : std::nullopt;
    }

    // Calls use(numbers, pages) for each batch, with its pages contiguous. Returns false if the log is
    // damaged, or ends within a batch because the program was killed while writing it.
    template <typename Use>
    static bool each_batch(const std::string& path, size_t page_bytes, Use&& use) {
        struct stat status;
        FileHandle file = open_regular(path, &status);
        const auto size = (uint64_t)status.st_size;
        std::string batch;
        for (uint64_t at = sizeof(Preamble); at < size; at += sizeof(BatchHead) + batch.size()) {
            BatchHead head;
            if (!read_at(file, path, at, &head, sizeof head) || head.hash != head.right_hash()) return false;
            batch.resize(head.pages * (sizeof(uint64_t) + page_bytes));
            if (!read_at(file, path, at + sizeof head, batch.data(), batch.size())) return false;
            if (XXH3_64bits(batch.data(), batch.size()) != head.hash_of_rest) return false;
            std::vector<uint64_t> numbers(head.pages);
            memcpy(numbers.data(), batch.data(), numbers.size() * sizeof numbers[0]);
            use(numbers, &batch[numbers.size() * sizeof numbers[0]]);
        }
        return true;
    }

private:
    struct BatchHead {
        uint64_t pages, hash_of_rest, hash;
        uint64_t right_hash() const { return XXH3_64bits(this, offsetof(BatchHead, hash)); }
    };

    std::string path_;
    size_t page_bytes_;
    FileHandle file_;
    uint64_t end_ = sizeof(Preamble);
};
