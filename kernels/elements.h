/*
A matrix that a product on the CPU reads.
*/
#pragma once

#include <cstddef>

// A matrix read one element at a time: (i, j) is at data[i * row + j * column], so a transpose costs nothing.
struct Elements {
    const float* data;
    int row, column;
    Elements transposed() const { return {data, column, row}; }
    Elements from(int i, int j) const { return {data + (size_t)i * row + (size_t)j * column, row, column}; }
};
