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
    UnitPlaces(const ParameterLayout& layout, int for_blocks)
        : last_unit_(layout.last_unit()), blocks_(std::min(for_blocks, layout.layers)), tied_(layout.tied) {
        size_t block = layout.unit_size(1), first = layout.unit_size(0), last = layout.unit_size(last_unit_);
        for (int i = 0; i < blocks_; i++) add(block);
        add(tied_ ? first : std::max(first, last));
        if (tied_) add(last);
    }

    int count() const { return (int)offsets_.size(); }
    size_t size() const { return size_; }
    size_t offset(int place) const { return offsets_[place]; }

    int place(int unit) const {
        if (unit == 0) return blocks_;
        if (unit == last_unit_) return blocks_ + (tied_ ? 1 : 0);
        return (unit - 1) % blocks_;
    }

private:
    void add(size_t elements) {
        offsets_.push_back(size_);
        size_ += elements;
    }

    int last_unit_, blocks_;
    bool tied_;
    std::vector<size_t> offsets_;
    size_t size_ = 0;
};
