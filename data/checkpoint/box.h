/*
BoxRun specifies which elements of a tensor a piece of a checkpoint contains, or a rank holds. Both use the
same representation, so their intersection is computed in one place.

A box is a range of columns of a tensor, over all rows, and a run is a range of elements of a box, in
row-major order. For example, a run of 5 elements from element 2 on, in the box of columns 2 to 4 of a 3 x 6
tensor:

    . . o o X .        column 2, columns 3, begin 2, count 5
    . . X X X .
    . . X o o .        elements 4, 8, 9, 10 and 14 of the whole tensor

A tensor that is whole, or cut by rows, is a box of all columns; a vector of n elements is n rows of one
column.
*/
#pragma once

#include <algorithm>
#include <cstdint>

struct BoxRun {
    uint64_t column, columns;  // first column of the box, and number of its columns
    uint64_t begin, count;     // elements of the box

    // Calls visit(first, n, at) for stretches that are contiguous in the tensor, in ascending order: elements
    // [first, first + n) of the whole tensor, which has `width` columns, are elements [at, at + n) of the
    // run.
    template <typename Visit>
    void each_run(uint64_t width, Visit&& visit) const {
        uint64_t line = line_of(width);
        for (uint64_t at = 0, n; at < count; at += n) {
            uint64_t row = (begin + at) / line, in_row = (begin + at) % line;
            n = std::min(line - in_row, count - at);
            visit(row * width + column + in_row, n, at);
        }
    }

    // Calls visit(at, there, n) for the intersection with a run of another box of the same tensor: elements
    // [at, at + n) of this run are elements [there, there + n) of the other one.
    template <typename Visit>
    void each_common(const BoxRun& other, uint64_t width, Visit&& visit) const {
        uint64_t line = other.line_of(width), stride = line == all ? all : width;
        each_run(width, [&](uint64_t first, uint64_t n, uint64_t at) {
            for (uint64_t row = first / stride; row * stride < first + n; row++) {
                uint64_t start = row * stride + other.column;  // start of the other box in this row
                uint64_t from = std::max(first, start);
                uint64_t to = std::min(first + n, line == all ? all : start + line);
                if (from >= to) continue;
                // in elements of the other box
                uint64_t box_from = row * line + from - start, box_to = box_from + to - from;
                uint64_t begins = std::max(box_from, other.begin);
                uint64_t ends = std::min(box_to, other.begin + other.count);
                if (begins < ends)
                    visit(at + from - first + begins - box_from, begins - other.begin, ends - begins);
            }
        });
    }

    struct Extent {
        uint64_t begin = 0, end = 0;
        bool empty() const { return begin >= end; }
    };

    // Returns a range of elements of `other`, a run of another box of the same tensor, that includes the
    // whole intersection with this run; if this box is narrower, it includes other elements too.
    Extent extent_in(const BoxRun& other) const {
        uint64_t left = std::max(column, other.column);
        uint64_t right = std::min(column + columns, other.column + other.columns);
        if (left >= right) return {};
        // The range goes from (row, from) up to (last_row, to), exclusive, clipped to the columns that both
        // boxes share.
        uint64_t row = begin / columns, from = column + begin % columns;
        uint64_t last = begin + count - 1, last_row = last / columns, to = column + last % columns + 1;
        if (from >= right) row++, from = left;
        if (to <= left) {
            if (last_row == 0) return {};
            last_row--, to = right;
        }
        from = std::max(from, left), to = std::min(to, right);
        uint64_t first = row * other.columns + from - other.column;
        uint64_t end = last_row * other.columns + to - other.column;
        first = std::max(first, other.begin), end = std::min(end, other.begin + other.count);
        return first < end ? Extent{first - other.begin, end - other.begin} : Extent{};
    }

private:
    static constexpr uint64_t all = UINT64_MAX;

    // Elements in a row of the box. If the box has all columns, its rows form one contiguous row.
    uint64_t line_of(uint64_t width) const { return columns == width ? all : columns; }
};
