/*
Which parts of something have been done, where the parts come in any order.
*/
#pragma once

#include <cstdint>
#include <iterator>
#include <map>

class Ranges {
public:
    // [begin, end). False if part of it is there already.
    bool add(uint64_t begin, uint64_t end) {
        if (begin == end) return true;
        auto next = end_of_.lower_bound(begin);
        if (next != end_of_.end() && next->first < end) return false;
        auto before = next == end_of_.begin() ? end_of_.end() : std::prev(next);
        if (before != end_of_.end() && before->second > begin) return false;
        if (next != end_of_.end() && next->first == end) {
            end = next->second;
            end_of_.erase(next);
        }
        if (before != end_of_.end() && before->second == begin)
            before->second = end;
        else
            end_of_[begin] = end;
        return true;
    }

private:
    std::map<uint64_t, uint64_t> end_of_;  // each that has a gap before and behind it, by its begin
};
