/*
Determines which accesses of a kernel are ordered before others, independently of the order in which they
happen to run here.

An access is stamped with the interval between barriers (counted over all blocks), the number of warp
operations that its warp has done, and its thread. Two accesses of a block are ordered if their intervals
differ, if they come from one warp with a warp operation between them, or if the warp of the later one has
seen the earlier one: barriers of a part of the block (mbarriers, named barriers) pass on what their warps
have done. All of this is kept per warp: a wait by one lane counts for the others, and an arrival orders the
lanes of its warp like a warp operation.

An access of one block is ordered before an access of another block only through memory: a thread leaves its
past at an address (counter_set, or an atomic operation after __threadfence), and a thread that takes it there
has it from then on, as do the threads of its block that are ordered after it. A past that is left includes
those that were taken before.

Approximations err on the side of missing races: a thread leaves the past of all lanes of its warp; any atomic
operation of a thread that has called __threadfence both leaves and takes; and atomic sums in an undetermined
order are not a race. Fences between ordinary and asynchronous accesses (fence_async_global) are not required
between blocks.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <vector>

namespace simt {

// ----------------------------------------------------------------------------
// stamps

// interval (32 bits) | warp operations (19) | by the copy engine (1) | copy in flight (1) | atomic (1) |
// thread (10)
using Stamp = uint64_t;
constexpr int interval_shift = 32, epoch_shift = 13;
constexpr Stamp thread_bits = 1023, warp_bits = thread_bits & ~Stamp(31), atomic_bit = 1 << 10,
                pending_bit = 1 << 11, engine_bit = 1 << 12,
                epoch_bits = ((Stamp(1) << interval_shift) - 1) & (~Stamp(0) << epoch_shift);

inline Stamp make_stamp(uint32_t interval, uint32_t warp_epoch, unsigned thread) {
    return (Stamp)interval << interval_shift | ((Stamp)warp_epoch << epoch_shift & epoch_bits) | thread;
}

inline bool same_interval(Stamp a, Stamp b) {
    return ((a ^ b) >> interval_shift) == 0;
}
inline bool same_warp(Stamp a, Stamp b) {
    return ((a ^ b) & warp_bits) == 0;
}

inline uint32_t interval_of(Stamp stamp) {
    return uint32_t(stamp >> interval_shift);
}
inline int warp_of(Stamp stamp) {
    return int(stamp & warp_bits) / 32;
}
inline uint32_t epoch_of(Stamp stamp) {
    return uint32_t(stamp & epoch_bits) >> epoch_shift;
}

// ----------------------------------------------------------------------------
// in a block

// For each warp of the block, the number of its epochs that are known to be in the past.
using Clock = std::array<uint32_t, 32>;

inline void join(Clock& clock, const Clock& other) {
    for (size_t w = 0; w < clock.size(); w++) clock[w] = std::max(clock[w], other[w]);
}

inline std::array<Clock, 32> seen_by;  // by warp of the running block

// a came first, in the same interval
inline bool ordered_in_interval(Stamp a, Stamp b) {
    Stamp difference = a ^ b;
    if (!(difference & warp_bits)) return !(difference & thread_bits) || difference & epoch_bits;
    return epoch_of(a) < seen_by[warp_of(b)][warp_of(a)];
}

// ----------------------------------------------------------------------------
// between blocks

// The past of an event: for each warp of the grid, the work with stamps below `before` and, if the flag below
// is set, the work of that stamp's thread with an equal stamp.
class Past {
public:
    void add(size_t warp, Stamp before) {
        if (warp >= warps_.size()) warps_.resize(warp + 1);
        warps_[warp].before = std::max(warps_[warp].before, before);
    }

    void join(const Past& other) {
        for (size_t w = 0; w < other.warps_.size(); w++) add(w, other.warps_[w].before);
    }

    bool has(size_t warp, Stamp access) const {
        if (warp >= warps_.size()) return false;
        Stamp before = warps_[warp].before, difference = before ^ access;
        if (difference >> epoch_shift) return access < before;
        return before & with_thread && !(difference & thread_bits);
    }

    static constexpr Stamp with_thread = atomic_bit;

private:
    struct Warp {  // a type of our own: see fail() in simt.cc
        Stamp before = 0;
    };
    std::vector<Warp> warps_;
};

class GridOrder {
public:
    uint32_t first_interval;

    void start(size_t warps) {
        warps_per_block = warps;
        blocks.clear();
        left.clear();
    }

    void start_block(uint32_t interval, uint32_t number) {
        if (blocks.empty()) first_interval = interval;
        blocks.push_back({interval, number});
        taken.clear();
    }

    // The number of the block that an interval belongs to.
    uint32_t number(uint32_t interval) const { return blocks[place(interval)].number; }

    // Returns whether a, of another block, is ordered before b, of the running one.
    [[gnu::noinline]] bool handed_on(Stamp a, Stamp b) const {
        size_t warp = taken.empty() ? 0 : place(interval_of(a)) * warps_per_block + warp_of(a);
        for (const Taken& from : taken) {
            bool has_it = !same_interval(from.at, b) || ordered_in_interval(from.at, b);
            if (has_it && from.past.has(warp, a)) return true;
        }
        return false;
    }

    // take() gives the past left at an address to the thread of `me` and those ordered after it; leave()
    // leaves the past of `me` there.
    void take(uintptr_t at, Stamp me) {
        if (auto found = left.find(at); found != left.end()) taken.push_back({me, found->second});
    }

    void leave(uintptr_t at, Stamp me, bool beside_others) {
        Past mine = past(me);
        if (beside_others) mine.join(left[at]);
        left[at] = std::move(mine);
    }

private:
    // The past of `me`, as of now.
    Past past(Stamp me) const {
        Past result;
        for (const Taken& from : taken) {
            if (!same_interval(from.at, me) || ordered_in_interval(from.at, me)) result.join(from.past);
        }
        size_t first = (blocks.size() - 1) * warps_per_block;
        for (size_t w = 0; w < warps_per_block; w++)
            result.add(first + w, make_stamp(interval_of(me), seen_by[warp_of(me)][w], 0));
        result.add(first + warp_of(me), me | Past::with_thread);
        return result;
    }

    struct Block {
        uint32_t first_interval;
        uint32_t number;  // counts with x fastest, then y, then z
    };
    struct Taken {
        Stamp at;
        Past past;
    };
    size_t place(uint32_t interval) const {
        auto later =
            std::upper_bound(blocks.begin(), blocks.end(), interval,
                             [](uint32_t i, const Block& block) { return i < block.first_interval; });
        return size_t(later - blocks.begin()) - 1;
    }

    size_t warps_per_block;
    std::vector<Block> blocks;       // those that have run and the running one, in that order
    std::map<uintptr_t, Past> left;  // by address in device memory
    std::vector<Taken> taken;        // by threads of the running block
};

inline GridOrder grid_order;
inline uint32_t block_start;  // first interval of the running block

enum class Scope { block, grid };  // which threads share the memory

// Returns whether a is of another block of this grid.
inline bool elsewhere(Stamp a) {
    return interval_of(a) - grid_order.first_interval < block_start - grid_order.first_interval;
}

// a came first
template <Scope scope>
[[gnu::always_inline]] inline bool unordered(Stamp a, Stamp b) {
    if (a & b & atomic_bit) return false;
    if (same_interval(a, b)) return !ordered_in_interval(a, b);
    return scope == Scope::grid && elsewhere(a) && !grid_order.handed_on(a, b);
}

}  // namespace simt
