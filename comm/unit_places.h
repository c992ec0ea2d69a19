/*
Room for whole units where a rank keeps only parts: the units in use, and those on their way. Blocks take
turns in a few places. The embedding and the head have one place for both, unless they are used together.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "comm/parameters.h"  // ParameterLayout

class UnitPlaces {
public:
    UnitPlaces(const ParameterLayout& layout, int for_blocks) : place_(layout.units(), -1) {
        int last_unit = layout.last_unit();
        std::vector<int> blocks;
        for (int unit : layout.held()) {
            if (unit > 0 && unit < last_unit) blocks.push_back(unit);
        }
        int turns = std::min(for_blocks, (int)blocks.size());
        for (int i = 0; i < turns; i++) add(layout.unit_size(blocks[i]));
        for (size_t i = 0; i < blocks.size(); i++) place_[blocks[i]] = (int)i % turns;

        size_t first = layout.unit_size(0), last = layout.unit_size(last_unit);
        bool one_place = !layout.tied && first > 0 && last > 0;
        if (first > 0) place_[0] = add(one_place ? std::max(first, last) : first);
        if (last > 0) place_[last_unit] = one_place ? place_[0] : add(last);
    }

    int count() const { return (int)offsets_.size(); }
    size_t size() const { return size_; }
    size_t offset(int place) const { return offsets_[place]; }
    int place(int unit) const { return place_[unit]; }  // of a unit that is here

private:
    int add(size_t elements) {
        offsets_.push_back(size_);
        size_ += elements;
        return count() - 1;
    }

    std::vector<int> place_;  // of each unit; -1: it is not here
    std::vector<size_t> offsets_;
    size_t size_ = 0;
};
