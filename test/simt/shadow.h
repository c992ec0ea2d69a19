/*
What is remembered about every byte of shared memory: who wrote it last and who read it since the last barrier.

An access is stamped with the interval between barriers (of all blocks, counted up for ever), the number of warp
operations its warp had done, and its thread. Two accesses are ordered if their intervals differ, or if they
come from one warp and there was a warp operation between them.
*/
#pragma once

#include <cstdint>

namespace simt {

enum class Access { read, write, atomic };

// interval (32 bits) | warp operations (20) | copy under way (1) | atomic (1) | thread (10)
using Stamp = uint64_t;
constexpr int interval_shift = 32, epoch_shift = 12;
constexpr Stamp thread_bits = 1023, warp_bits = thread_bits & ~Stamp(31), atomic_bit = 1 << 10,
                pending_bit = 1 << 11, epoch_bits = ((Stamp(1) << interval_shift) - 1) & (~Stamp(0) << epoch_shift);

inline Stamp make_stamp(uint32_t interval, uint32_t warp_epoch, unsigned thread) {
    return (Stamp)interval << interval_shift | ((Stamp)warp_epoch << epoch_shift & epoch_bits) | thread;
}

inline bool same_interval(Stamp a, Stamp b) { return ((a ^ b) >> interval_shift) == 0; }
inline bool same_warp(Stamp a, Stamp b) { return ((a ^ b) & warp_bits) == 0; }

inline bool unordered(Stamp a, Stamp b) {
    Stamp difference = a ^ b;
    if (difference >> interval_shift || !(difference & thread_bits)) return false;
    if (!(difference & warp_bits) && (difference & epoch_bits)) return false;
    return !(a & b & atomic_bit);
}

enum class Finding { none, unwritten, pending, race_with_write, race_with_read };

// Two readers are enough: the last one, and another, if possible of another warp than the last.
struct Byte {
    Stamp write = 0, read = 0, other_read = 0;

    // `oldest` is the first interval of the running block.
    Finding note_read(Stamp me, uint32_t oldest) {
        if (write >> interval_shift < oldest) return Finding::unwritten;
        if (write & pending_bit) return Finding::pending;
        if (unordered(write, me)) return Finding::race_with_write;
        if (!((read ^ me) & ~epoch_bits)) {
            read = me;
        } else {
            bool keep_other = same_interval(other_read, me) && !same_warp(other_read, me);
            if (same_interval(read, me) && (!same_warp(read, me) || !keep_other)) other_read = read;
            read = me;
        }
        return Finding::none;
    }

    Finding note_write(Stamp me) {
        if (unordered(write, me)) return Finding::race_with_write;
        if (unordered(read, me) || unordered(other_read, me)) return Finding::race_with_read;
        write = me;
        return Finding::none;
    }

    Stamp racing_read(Stamp me) const { return unordered(read, me) ? read : other_read; }
};

}  // namespace simt
