/*
The rows of a table as they were when a save began, while training continues to change them. The save reads
rows in ascending order. A row that is about to change before the save has read it is copied first, to memory
that holds a limited number of rows; if that is full, the change waits until the save has read some of them.

    training          begin()  before_change()  before_change() ...
    save                           next()  next() ...                  end()
*/
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "data/base/figures.h"  // seconds_now
#include "data/tables/row_set.h"

class RowSnapshot {
public:
    // copies (most, record_bytes): room for copies of rows that are about to change
    RowSnapshot(char* copies, size_t most, size_t record_bytes)
        : copies_(copies), most_(most), record_bytes_(record_bytes) {}

    // Held while rows are read or moved: next() locks it, and so must code that moves rows.
    std::mutex& mutex() { return mutex_; }
    double stalled() const { return stalled_; }  // seconds that changes have waited

    bool is_active() {
        std::lock_guard lock(mutex_);
        return rows_;
    }

    // rows: those to save; the set must not change before end()
    void begin(const RowSet& rows) {
        std::lock_guard lock(mutex_);
        rows_ = &rows, cursor_ = 0, stalled_ = 0;
        free_.clear();
        for (size_t i = 0; i < most_; i++) free_.push_back(i);
    }

    // Call before these rows change. copy(i, to) copies rows[i] in its current state.
    template <typename Copy>
    void before_change(const uint64_t* rows, size_t count, Copy&& copy) {
        std::unique_lock lock(mutex_);
        for (size_t i = 0; rows_ && i < count; i++) {
            auto wanted = [&] { return rows_ && rows[i] >= cursor_ && rows_->has(rows[i]); };
            if (!wanted() || copied_.contains(rows[i])) continue;
            double start = free_.empty() ? seconds_now() : 0;
            room_.wait(lock, [&] { return !free_.empty() || !wanted(); });
            if (start) stalled_ += seconds_now() - start;
            if (!wanted()) continue;
            copy(i, copies_ + free_.back() * record_bytes_);
            copied_[rows[i]] = free_.back();
            free_.pop_back();
        }
    }

    // Fills rows and records with the next rows to save, at most `most`, and returns their number, or 0 if
    // none are left. read(rows, records) reads rows that have not changed.
    template <typename Read>
    size_t next(size_t most, std::vector<uint64_t>& rows, char* records, Read&& read) {
        std::lock_guard lock(mutex_);
        rows.clear();
        std::vector<uint64_t> unchanged;
        std::vector<char*> to;
        for (uint64_t row = rows_->next(cursor_); rows.size() < most && row < rows_->rows();
             row = rows_->next(row + 1)) {
            char* record = records + rows.size() * record_bytes_;
            rows.push_back(row);
            if (auto found = copied_.find(row); found != copied_.end()) {
                memcpy(record, copies_ + found->second * record_bytes_, record_bytes_);
                free_.push_back(found->second);
                copied_.erase(found);
            } else {
                unchanged.push_back(row), to.push_back(record);
            }
        }
        read(std::as_const(unchanged), to);
        if (!rows.empty()) cursor_ = rows.back() + 1;
        room_.notify_all();
        return rows.size();
    }

    // Call when the save stops reading rows, even if some are left.
    void end() {
        std::lock_guard lock(mutex_);
        rows_ = nullptr;
        copied_.clear();
        room_.notify_all();
    }

private:
    char* const copies_;
    const size_t most_, record_bytes_;
    std::mutex mutex_;  // guards the members that follow
    std::condition_variable room_;
    const RowSet* rows_ = nullptr;  // null: no save is reading
    uint64_t cursor_ = 0;           // rows below it have been read
    std::unordered_map<uint64_t, size_t> copied_;
    std::vector<size_t> free_;  // places for copies
    double stalled_ = 0;
};
