/*
A set of rows of a large table, with a bit for each row. Memory pages without a set bit are never written, so
a small set occupies few of them.
*/
#pragma once

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "data/base/file.h"

class RowSet {
public:
    RowSet() = default;
    // words (words_of(rows)): zeros; must outlive the set
    RowSet(uint64_t* words, uint64_t rows) : words_(words), rows_(rows) {}
    static size_t words_of(uint64_t rows) { return (size_t)((rows + 63) / 64); }

    uint64_t rows() const { return rows_; }  // of the table
    uint64_t size() const { return size_; }
    bool has(uint64_t row) const { return words_[row / 64] >> row % 64 & 1; }

    void insert(uint64_t row) {
        size_ += !has(row);
        words_[row / 64] |= (uint64_t)1 << row % 64;
    }
    void insert(const RowSet& others) {
        for (size_t i = 0; i < words_of(rows_); i++)
            if (uint64_t added = others.words_[i] & ~words_[i])
                words_[i] |= added, size_ += (uint64_t)std::popcount(added);
    }
    void clear() {
        for (size_t i = 0; i < words_of(rows_) && size_ > 0; i++)
            if (words_[i]) size_ -= (uint64_t)std::popcount(words_[i]), words_[i] = 0;
    }

    // Returns the first row of the set that is not below this one; rows() if there is none.
    uint64_t next(uint64_t row) const {
        for (size_t i = (size_t)(row / 64); i < words_of(rows_); i++) {
            uint64_t word = words_[i];
            if (i == row / 64) word &= ~(uint64_t)0 << row % 64;
            if (word) return i * 64 + (uint64_t)std::countr_zero(word);
        }
        return rows_;
    }

    // Writes the set to a file, in which blocks without rows occupy no space. Returns a checksum.
    uint64_t write_to(const FileHandle& file, const std::string& path, uint64_t at) const {
        uint64_t hash = rows_;
        for (size_t i = 0; i < words_of(rows_); i += block) {
            if (std::all_of(words_ + i, words_ + i + in_block(i), [](uint64_t word) { return word == 0; }))
                continue;
            write_at(file, path, at + i * sizeof *words_, words_ + i, in_block(i) * sizeof *words_);
            hash ^= hash_of(i);
        }
        return hash;
    }
    // Reads the set back. Returns the checksum; 0 if the file is too short.
    uint64_t read_from(const FileHandle& file, const std::string& path, uint64_t at) {
        uint64_t hash = rows_, words[block];
        clear();
        for (size_t i = 0; i < words_of(rows_); i += block) {
            if (!read_at(file, path, at + i * sizeof *words_, words, in_block(i) * sizeof *words_)) return 0;
            const uint64_t before = size_;
            for (size_t j = 0; j < in_block(i); j++)
                if (words[j]) words_[i + j] = words[j], size_ += (uint64_t)std::popcount(words[j]);
            if (size_ > before) hash ^= hash_of(i);
        }
        return hash;
    }

private:
    static constexpr size_t block = 512;  // words
    size_t in_block(size_t first) const { return std::min(block, words_of(rows_) - first); }
    uint64_t hash_of(size_t first) const {
        return XXH3_64bits_withSeed(words_ + first, in_block(first) * sizeof *words_, first);
    }

    uint64_t* words_ = nullptr;
    uint64_t rows_ = 0, size_ = 0;
};

// Writes sets to a file, which is complete and on disk when this returns.
inline void write_sets(const std::string& path, const std::vector<const RowSet*>& sets) {
    FileHandle file = open_to_write(path, O_WRONLY | O_CREAT | O_TRUNC);
    if (!file) fail_with_errno(path, "create it");
    std::vector<uint64_t> hashes;
    uint64_t at = sets.size() * sizeof hashes[0];
    for (const RowSet* set : sets) {
        hashes.push_back(set->write_to(file, path, at));
        at += RowSet::words_of(set->rows()) * sizeof hashes[0];
    }
    WorksOn work("sizing " + path);
    if (ftruncate(file.get(), (off_t)at) != 0) fail_with_errno(path, "size it");
    write_at(file, path, 0, hashes.data(), hashes.size() * sizeof hashes[0]);
    sync_file(file, path);
}

// Reads them back. Returns false if the file is missing or damaged.
inline bool read_sets(const std::string& path, const std::vector<RowSet*>& sets) {
    FileHandle file = open_file(path, O_RDONLY);
    std::vector<uint64_t> hashes(sets.size());
    uint64_t at = hashes.size() * sizeof hashes[0];
    if (!file || !read_at(file, path, 0, hashes.data(), at)) return false;
    for (size_t i = 0; i < sets.size(); i++) {
        if (sets[i]->read_from(file, path, at) != hashes[i]) return false;
        at += RowSet::words_of(sets[i]->rows()) * sizeof hashes[0];
    }
    return true;
}
