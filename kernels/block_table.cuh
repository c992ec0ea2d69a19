/*
One launch for several parts of an array. Each block of the grid belongs to one part, which it looks up in a
table. The table is a kernel parameter, so it needs no memory and is read as fast as any constant.

    each_block_table<Table>(parts, blocks_of,
                            [&](const Table& table) { launch(kernel, table.blocks(), ..., table); });

A table has room for the parts of a unit. More parts need more tables, and a launch for each.
*/
#pragma once

#include "kernels/common.cuh"

#ifndef DEVICE_CPU

// The parameters of a kernel may have 4 KiB, which limits `most`, a power of two.
template <typename Part, int most>
struct BlockTable {
    int count = 0;
    unsigned end[most];  // end of each part's blocks, which follow those of the part before
    Part part[most];

    unsigned blocks() const { return count > 0 ? end[count - 1] : 0; }
    bool is_full() const { return count == most; }

    void add(const Part& next, unsigned its_blocks) {
        end[count] = blocks() + its_blocks;
        part[count] = next;
        count++;
        for (int k = count; k < most; k++) end[k] = ~0u;
    }

    // Returns the part that a block belongs to.
    __device__ int find(unsigned block) const {
        int found = 0;
        for (int step = most / 2; step > 0; step /= 2) {
            if (block >= end[found + step - 1]) found += step;
        }
        return found;
    }

    // Returns the index of a block among those of its part.
    __device__ unsigned place(unsigned block, int part) const {
        return part > 0 ? block - end[part - 1] : block;
    }
};

// Calls launch_table(table) for tables that together hold all parts, except those without blocks.
template <typename Table, typename Parts, typename Blocks, typename Launch>
void each_block_table(const Parts& parts, Blocks&& blocks_of, Launch&& launch_table) {
    Table table;
    for (const auto& part : parts) {
        unsigned blocks = blocks_of(part);
        if (blocks > 0) table.add(part, blocks);
        if (!table.is_full()) continue;
        launch_table(table);
        table = {};
    }
    if (table.count > 0) launch_table(table);
}

#endif
