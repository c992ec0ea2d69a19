/*
Keeps in memory the rows of a table on disk (data/tables/page_file.h) that the current step uses or that steps
use often. A row is a record of several fields; in memory, each field has a separate array. A page on disk
holds many records. A missing row costs a read of its page; a changed row costs another read, and a write,
when it leaves the cache. Rows that leave together are written together, in the order of the file.

                   hold(): reads what is missing            make_room(): unused rows leave
    file of pages ---------------------------------> slots ---------------------------------> file of pages
                                                      ^ |
                                                      | v  the caller, by slot

A variant of CLOCK selects the rows that leave: a hand moves around the slots and decrements each use count;
a row whose count is already 0 leaves. Rows used in this turn or the previous one stay.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/tables/page_file.h"

// An array with an entry of `bytes` bytes for each slot.
struct RowField {
    char* data;
    size_t bytes;
};

// Copies the fields of a slot to a record.
inline void copy_record(const std::vector<RowField>& fields, size_t slot, char* record) {
    for (const RowField& field : fields) {
        memcpy(record, field.data + slot * field.bytes, field.bytes);
        record += field.bytes;
    }
}

// A cache's notes about its slots; initially all zeros.
struct SlotNotes {
    uint64_t* rows;   // (slots) 1 + the row that it holds; 0: none
    uint32_t* turns;  // (slots) the last turn that used it
    uint8_t* uses;    // (slots) use count, at most 3
    bool* changed;    // (slots) the row is newer here than in the file
    uint32_t* index;  // (indices) hash table of rows: 1 + slot; 0: empty
    size_t slots, indices;

    static size_t indices_for(size_t slots) {
        size_t indices = 2;
        while (indices < 2 * slots) indices *= 2;
        return indices;
    }
    static constexpr size_t bytes_of_slot = sizeof(uint64_t) + sizeof(uint32_t) + 2 + 4 * sizeof(uint32_t);
};

class RowCache {
public:
    RowCache(PageFile& file, std::vector<RowField> fields, const SlotNotes& notes)
        : file_(file), fields_(std::move(fields)), notes_(notes) {
        for (const RowField& field : fields_) record_bytes_ += field.bytes;
        rows_of_page_ = PageFile::payload(file.page_bytes()) / record_bytes_;
        forget();
    }

    // The layout of records of this size in pages.
    static size_t page_bytes_for(size_t record_bytes) {
        size_t least = record_bytes + sizeof(uint64_t);
        return (least + PageBuffer::alignment - 1) / PageBuffer::alignment * PageBuffer::alignment;
    }
    static uint64_t pages_for(uint64_t rows, size_t record_bytes) {
        uint64_t of_page = PageFile::payload(page_bytes_for(record_bytes)) / record_bytes;
        return (rows + of_page - 1) / of_page;
    }

    // Brings rows into memory, and returns their slots. Rows stay until the end of the next turn.
    void hold(const uint64_t* rows, size_t count, uint64_t* slots, uint32_t turn) {
        turn_ = turn;
        std::vector<uint64_t> missing;
        for (size_t i = 0; i < count; i++) {
            slots[i] = slot_of(rows[i]);
            if (slots[i] == none)
                missing.push_back(rows[i]);
            else
                use(slots[i]);
        }
        std::ranges::sort(missing);
        missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
        missed_ += missing.size();
        for (size_t begin = 0; begin < missing.size(); begin += most_at_once)
            read_missing(&missing[begin], std::min(most_at_once, missing.size() - begin));
        for (size_t i = 0; i < count; i++)
            if (slots[i] == none) slots[i] = slot_of(rows[i]);
    }
    // Finds the slots of rows that are held, and marks them as changed. Call before they change.
    void change(const uint64_t* rows, size_t count, uint64_t* slots) {
        for (size_t i = 0; i < count; i++) {
            slots[i] = slot_of(rows[i]);
            notes_.changed[slots[i]] = true;
        }
    }

    // Copies the records of rows (ascending) from memory or from disk.
    void copy(const std::vector<uint64_t>& rows, const std::vector<char*>& records) const {
        std::vector<uint64_t> missing;
        std::vector<char*> of_missing;
        for (size_t i = 0; i < rows.size(); i++) {
            if (size_t slot = slot_of(rows[i]); slot != none)
                copy_record(fields_, slot, records[i]);
            else
                missing.push_back(rows[i]), of_missing.push_back(records[i]);
        }
        for (size_t begin = 0, end; begin < missing.size(); begin = end) {
            end = std::min(begin + most_at_once, missing.size());
            Pages pages(*this, &missing[begin], end - begin);
            for (size_t i = begin; i < end; i++)
                memcpy(of_missing[i], pages.record(missing[i]), record_bytes_);
        }
    }

    // Calls use(row) for each row that is newer in memory than in the file.
    template <typename Use>
    void each_changed(Use&& use) const {
        for (size_t slot = 0; slot < notes_.slots; slot++)
            if (notes_.changed[slot]) use(notes_.rows[slot] - 1);
    }
    // Writes all changed rows to the file.
    void flush() {
        std::vector<size_t> slots;
        for (size_t slot = 0; slot < notes_.slots; slot++)
            if (notes_.changed[slot]) slots.push_back(slot);
        write(slots);
    }
    // Empties all slots without writing anything.
    void forget() {
        std::fill_n(notes_.rows, notes_.slots, 0);
        std::fill_n(notes_.changed, notes_.slots, false);
        std::fill_n(notes_.index, notes_.indices, 0);
        free_.clear();
        for (size_t slot = notes_.slots; slot-- > 0;) free_.push_back((uint32_t)slot);
    }

    uint64_t missed() const { return missed_; }  // rows that were not in memory when they were needed

private:
    static constexpr size_t none = SIZE_MAX;
    static constexpr size_t most_at_once = 1024;  // rows read or written; limits the buffers
    static constexpr uint8_t most_uses = 3;

    // The pages of some rows, in ascending order.
    struct Pages {
        Pages(const RowCache& cache, const uint64_t* rows, size_t count)
            : cache(cache), numbers(numbers_of(cache, rows, count)), buffer(numbers.size() * page_bytes()) {
            cache.file_.read(numbers, buffer.data());
        }
        static std::vector<uint64_t> numbers_of(const RowCache& cache, const uint64_t* rows, size_t count) {
            std::vector<uint64_t> numbers;
            for (size_t i = 0; i < count; i++) {
                uint64_t page = rows[i] / cache.rows_of_page_;
                if (numbers.empty() || numbers.back() != page) numbers.push_back(page);
            }
            return numbers;
        }
        size_t page_bytes() const { return cache.file_.page_bytes(); }
        char* record(uint64_t row) const {
            auto page = std::ranges::lower_bound(numbers, row / cache.rows_of_page_) - numbers.begin();
            return buffer.data() + (size_t)page * page_bytes() +
                   row % cache.rows_of_page_ * cache.record_bytes_;
        }

        const RowCache& cache;
        const std::vector<uint64_t> numbers;
        const PageBuffer buffer;
    };

    void use(size_t slot) {
        notes_.turns[slot] = turn_;
        notes_.uses[slot] += notes_.uses[slot] < most_uses;
    }

    void read_missing(const uint64_t* rows, size_t count) {
        if (free_.size() < count) make_room(count);
        Pages pages(*this, rows, count);
        for (size_t i = 0; i < count; i++) {
            size_t slot = free_.back();
            free_.pop_back();
            const char* record = pages.record(rows[i]);
            for (const RowField& field : fields_) {
                memcpy(field.data + slot * field.bytes, record, field.bytes);
                record += field.bytes;
            }
            notes_.rows[slot] = rows[i] + 1, notes_.uses[slot] = 0;
            notes_.index[index_of(rows[i])] = (uint32_t)slot + 1;
            use(slot);
        }
    }

    // Frees slots for `count` rows, and often more, so that many rows are written together.
    void make_room(size_t count) {
        const size_t wanted = std::max(count, notes_.slots / 64);
        std::vector<size_t> leave;
        for (size_t looked = 0; leave.size() < wanted && looked < (most_uses + 2) * notes_.slots; looked++) {
            const size_t slot = std::exchange(hand_, (hand_ + 1) % notes_.slots);
            if (notes_.rows[slot] == 0 || notes_.turns[slot] + 1 >= turn_) continue;
            if (notes_.uses[slot] > 0)
                notes_.uses[slot]--;
            else
                leave.push_back(slot), notes_.turns[slot] = turn_;  // so that it is selected only once
        }
        for (size_t slot : leave) notes_.turns[slot] = 0;
        if (free_.size() + leave.size() < count)
            fail("--ngram-cache: two steps need more rows than the %zu that it holds; raise it",
                 notes_.slots);
        std::vector<size_t> changed;
        for (size_t slot : leave)
            if (notes_.changed[slot]) changed.push_back(slot);
        write(changed);
        for (size_t slot : leave) {
            remove_index(notes_.rows[slot] - 1);
            notes_.rows[slot] = 0;
            free_.push_back((uint32_t)slot);
        }
    }

    // Writes the rows in these slots to the file.
    void write(std::vector<size_t>& slots) {
        std::ranges::sort(slots, {}, [&](size_t slot) { return notes_.rows[slot]; });
        std::vector<uint64_t> rows;
        for (size_t begin = 0, end; begin < slots.size(); begin = end) {
            end = std::min(begin + most_at_once, slots.size());
            rows.clear();
            for (size_t i = begin; i < end; i++) rows.push_back(notes_.rows[slots[i]] - 1);
            Pages pages(*this, rows.data(), rows.size());
            file_.log_pages(pages.numbers, pages.buffer.data());
            for (size_t i = begin; i < end; i++)
                copy_record(fields_, slots[i], pages.record(rows[i - begin]));
            file_.write(pages.numbers, pages.buffer.data());
            for (size_t i = begin; i < end; i++) notes_.changed[slots[i]] = false;
        }
    }

    // ---- the index: open addressing; a later entry that may move there fills the place of a removed one

    size_t home_of(uint64_t row) const { return (row * 0x9e3779b97f4a7c15 >> 20) & (notes_.indices - 1); }
    // Finds a row's entry, or the empty one where it belongs.
    size_t index_of(uint64_t row) const {
        size_t at = home_of(row);
        while (notes_.index[at] && notes_.rows[notes_.index[at] - 1] != row + 1)
            at = (at + 1) & (notes_.indices - 1);
        return at;
    }
    size_t slot_of(uint64_t row) const {
        uint32_t found = notes_.index[index_of(row)];
        return found ? found - 1 : none;
    }
    void remove_index(uint64_t row) {
        const size_t mask = notes_.indices - 1;
        size_t hole = index_of(row);
        for (size_t at = (hole + 1) & mask; notes_.index[at]; at = (at + 1) & mask) {
            size_t home = home_of(notes_.rows[notes_.index[at] - 1] - 1);
            if (((at - home) & mask) < ((at - hole) & mask)) continue;  // the hole lies before its home
            notes_.index[hole] = notes_.index[at];
            hole = at;
        }
        notes_.index[hole] = 0;
    }

    PageFile& file_;
    const std::vector<RowField> fields_;
    const SlotNotes notes_;
    size_t record_bytes_ = 0, rows_of_page_ = 0;
    std::vector<uint32_t> free_;
    size_t hand_ = 0;
    uint32_t turn_ = 0;
    uint64_t missed_ = 0;
};
