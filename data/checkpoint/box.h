/*
BoxRun says which elements of a tensor something holds: a piece of a checkpoint, or a rank. Both say it in the
same way, so what they have in common is found in one place.

A box is some columns of all rows of a tensor, and a run is elements of a box that follow one another row by
row. A run of 5 elements from element 2 on, in the box of columns 2 to 4 of a tensor of 3 x 6:

    . . o o X .        column 2, columns 3, begin 2, count 5
    . . X X X .
    . . X o o .        elements 4, 8, 9, 10 and 14 of the whole tensor

A tensor that is whole, or cut by rows, is a box of all columns; a vector of n is n rows of one column.
*/
#pragma once

#include <algorithm>
#include <cstdint>

struct BoxRun {
    uint64_t column, columns;  // the box's first column, and how many it has
    uint64_t begin, count;     // elements of the box

    // Calls visit(first, n, at) for neighbours in the tensor, ascending: elements [first, first + n) of the
    // whole tensor, which has `width` columns, are elements [at, at + n) of the run.
    template <typename Visit>
    void each_run(uint64_t width, Visit&& visit) const {
        uint64_t line = line_of(width);
        for (uint64_t at = 0, n; at < count; at += n) {
            uint64_t row = (begin + at) / line, in_row = (begin + at) % line;
            n = std::min(line - in_row, count - at);
            visit(row * width + column + in_row, n, at);
        }
    }

    // Calls visit(at, there, n) for what a run of another box of the same tensor has as well: elements
    // [at, at + n) of this run are elements [there, there + n) of the other one.
    template <typename Visit>
    void each_common(const BoxRun& other, uint64_t width, Visit&& visit) const {
        uint64_t line = other.line_of(width), stride = line == all ? all : width;
        each_run(width, [&](uint64_t first, uint64_t n, uint64_t at) {
            for (uint64_t row = first / stride; row * stride < first + n; row++) {
                uint64_t start = row * stride + other.column;  // the other box's place in this row
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

    // Elements [begin, end) of a run of another box of the same tensor have in them all that this run has of
    // it; where this one's box is narrower, others too.
    Extent extent_in(const BoxRun& other) const {
        uint64_t left = std::max(column, other.column);
        uint64_t right = std::min(column + columns, other.column + other.columns);
        if (left >= right) return {};
        // The walk goes from (row, from) to before (last_row, to), by the columns that both share in a row.
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

    // Elements of a row of the box. Rows of all columns follow one another like a single one.
    uint64_t line_of(uint64_t width) const { return columns == width ? all : columns; }
};
