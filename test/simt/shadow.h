/*
The records for every byte of shared and device memory: which thread wrote it last, and which have read or
updated it since. Records from before the running block or, for device memory, the running grid are forgotten.
*/
#pragma once

#include <bit>

#include "test/simt/memory.h"
#include "test/simt/order.h"

namespace simt {

enum class Access { read, write, atomic };

enum class Finding { none, unwritten, pending, race_with_write, race_with_use };

// How much is gained by keeping use `a` in addition to `b`, the last use: an access that races with one may
// not race with the other.
template <Scope scope>
[[gnu::always_inline]] inline int apart(Stamp a, Stamp b) {
    if (same_interval(a, b)) return !same_warp(a, b) ? 2 : (a ^ b) & thread_bits ? 1 : 0;
    return scope == Scope::grid && elsewhere(a) && !grid_order.handed_on(a, b) ? 3 : 0;
}

// Uses are reads and atomic updates. Two suffice: the last one, and another, preferably of a different block
// or warp.
template <Scope scope>
struct History {
    Stamp write = 0, use = 0, other_use = 0;

    [[gnu::always_inline]] Finding note(Access access, Stamp me) {
        if (scope == Scope::block && access != Access::write) {
            if (interval_of(write) < block_start) return Finding::unwritten;
            if (write & pending_bit) return Finding::pending;
        }
        if (unordered<scope>(write, me)) return Finding::race_with_write;
        if (races(use, access, me) || races(other_use, access, me)) return Finding::race_with_use;
        if (access == Access::write) {
            write = me;
            use = other_use = 0;  // an access that races with those also races with this one
        } else {
            int worth = apart<scope>(use, me);
            if (worth && worth >= apart<scope>(other_use, me)) other_use = use;
            use = me;
        }
        return Finding::none;
    }

    Stamp racing_use(Access access, Stamp me) const { return races(use, access, me) ? use : other_use; }

    Stamp last_change() const {
        return std::max({write, use & atomic_bit ? use : 0, other_use & atomic_bit ? other_use : 0});
    }

private:
    [[gnu::always_inline]] static bool races(Stamp use, Access access, Stamp me) {
        return (access != Access::read || use & atomic_bit) && unordered<scope>(use, me);
    }
};

// The bytes of a range of addresses, in units of 16. As long as all accesses to a unit since the start of the
// block, or of the grid, were to whole groups of 2, 4, 8 or 16 bytes, each group has a single history.
template <Scope scope>
class Shadow {
public:
    explicit Shadow(size_t bytes) : units_(reserve_array<Unit>(bytes / unit + 1)) {
        for (int grain = 0; grain < grains; grain++)
            histories_[grain] = reserve_array<History<scope>>((bytes + unit) >> grain);
    }

    // Records an access to `bytes` bytes at a multiple of `alignment`. If there is a finding, `culprit`
    // receives its history.
    [[gnu::always_inline]] Finding note(size_t at, size_t bytes, size_t alignment, Access access, Stamp me,
                                        History<scope>& culprit) {
        if (bytes == alignment) return note_in_unit(at, bytes, std::countr_zero(bytes), access, me, culprit);
        for (size_t end = at + bytes; at < end;) {
            size_t count = std::min(unit - at % unit, end - at);
            Finding finding = note_in_unit(at, count, std::countr_zero(at | count), access, me, culprit);
            if (finding != Finding::none) return finding;
            at += count;
        }
        return Finding::none;
    }

    // The last change of a byte that was recorded in the running block; `bytes` receives the number of bytes
    // from there on with the same history.
    Stamp last_change(size_t at, size_t& bytes) const {
        int grain = units_[at / unit].grain;
        bytes = (size_t(1) << grain) - at % (size_t(1) << grain);
        return histories_[grain][at >> grain].last_change();
    }

    // Releases the memory of this range's records, as far as it consists of whole pages.
    void forget(size_t at, size_t bytes) {
        discard(units_, at / unit, bytes / unit);
        for (int grain = 0; grain < grains; grain++) discard(histories_[grain], at >> grain, bytes >> grain);
    }

private:
    static constexpr size_t unit = 16;
    static constexpr int grains = 5;

    struct Unit {
        uint32_t since;  // interval of its first access
        int32_t grain;   // log2 of the number of bytes that share a history
    };

    // `at` and `count` are multiples of 2^grain.
    [[gnu::always_inline]] Finding note_in_unit(size_t at, size_t count, int grain, Access access, Stamp me,
                                                History<scope>& culprit) {
        Unit& whole = units_[at / unit];
        if (whole.since < start())
            whole = {interval_of(me), grain};
        else if (grain < whole.grain)
            split(at, grain);
        else
            grain = whole.grain;
        History<scope>* first = histories_[grain] + (at >> grain);
        for (History<scope>* one = first; one < first + (count >> grain); one++) {
            Finding finding = one->note(access, me);
            if (finding == Finding::none) continue;
            culprit = *one;
            return finding;
        }
        if (access == Access::write && count == unit && grain < grains - 1) merge(at, *first);
        return Finding::none;
    }

    static uint32_t start() { return scope == Scope::block ? block_start : grid_order.first_interval; }

    template <typename T>
    static T* reserve_array(size_t size) {
        return (T*)reserve(size * sizeof(T), PROT_READ | PROT_WRITE).begin;
    }

    template <typename T>
    static void discard(T* array, size_t first, size_t count) {
        auto begin = ((uintptr_t)(array + first) + page - 1) / page * page,
             end = (uintptr_t)(array + first + count) / page * page;
        if (begin < end) madvise((void*)begin, end - begin, MADV_DONTNEED);
    }

    [[gnu::noinline]] void split(size_t at, int grain) {
        Unit& whole = units_[at / unit];
        size_t first = at / unit * unit;
        for (size_t byte = first; byte < first + unit; byte += size_t(1) << grain)
            histories_[grain][byte >> grain] = histories_[whole.grain][byte >> whole.grain];
        whole.grain = grain;
    }

    void merge(size_t at, const History<scope>& history) {
        units_[at / unit].grain = grains - 1;
        histories_[grains - 1][at / unit] = history;
    }

    Unit* units_;
    std::array<History<scope>*, grains> histories_;
};

}  // namespace simt
