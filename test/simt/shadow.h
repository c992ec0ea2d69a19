/*
What is remembered about every byte of shared memory: who wrote it last and who read it since the last
barrier.

An access is stamped with the interval between barriers (of all blocks, counted up for ever), the number of
warp operations its warp had done, and its thread. Two accesses are ordered if their intervals differ, or if
they come from one warp and there was a warp operation between them.
*/
#pragma once

#include <cstdint>
#include <vector>

namespace simt {

enum class Access { read, write, atomic };

// interval (32 bits) | warp operations (20) | copy under way (1) | atomic (1) | thread (10)
using Stamp = uint64_t;
constexpr int interval_shift = 32, epoch_shift = 12;
constexpr Stamp thread_bits = 1023, warp_bits = thread_bits & ~Stamp(31), atomic_bit = 1 << 10,
                pending_bit = 1 << 11,
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
    [[gnu::always_inline]] Finding note_read(Stamp me, uint32_t oldest) {
        if (write >> interval_shift < oldest) return Finding::unwritten;
        if (write & pending_bit) return Finding::pending;
        if (unordered(write, me)) return Finding::race_with_write;
        bool keep_other = same_interval(other_read, me) && !same_warp(other_read, me);
        bool another = same_interval(read, me) && (read ^ me) & thread_bits;
        if (another && (!same_warp(read, me) || !keep_other)) other_read = read;
        read = me;
        return Finding::none;
    }

    [[gnu::always_inline]] Finding note_write(Stamp me) {
        if (unordered(write, me)) return Finding::race_with_write;
        if (unordered(read, me) || unordered(other_read, me)) return Finding::race_with_read;
        write = me;
        return Finding::none;
    }

    [[gnu::always_inline]] Finding note(Access access, Stamp me, uint32_t oldest) {
        Finding finding = access == Access::write ? Finding::none : note_read(me, oldest);
        return finding == Finding::none && access != Access::read ? note_write(me) : finding;
    }

    Stamp racing_read(Stamp me) const { return unordered(read, me) ? read : other_read; }
};

// The bytes of a range of addresses. Three arrays, so that the bytes of a word, which mostly have the same past, are
// compared and updated as vectors.
class Shadow {
public:
    explicit Shadow(size_t bytes) : write_(bytes), read_(bytes), other_read_(bytes) {}

    // Notes an access to `bytes` bytes. `culprit` becomes the byte of a finding.
    [[gnu::always_inline]] Finding note(size_t at, size_t bytes, Access access, Stamp me, uint32_t oldest,
                                        Byte& culprit) {
        if (bytes % 4 == 0) return note_words<4>(at, bytes, access, me, oldest, culprit);
        if (bytes == 2) return note_words<2>(at, bytes, access, me, oldest, culprit);
        return note_words<1>(at, bytes, access, me, oldest, culprit);
    }

private:
    template <size_t word>
    [[gnu::always_inline]] Finding note_words(size_t at, size_t bytes, Access access, Stamp me, uint32_t oldest,
                                              Byte& culprit) {
        for (size_t end = at + bytes; at < end; at += word) {
            Stamp *write = &write_[at], *read = &read_[at], *other_read = &other_read_[at], difference = 0;
#pragma GCC unroll 4
            for (size_t i = 1; i < word; i++) {
                difference |= (write[i] ^ write[0]) | (read[i] ^ read[0]) | (other_read[i] ^ other_read[0]);
            }
            size_t step = difference ? 1 : word;  // bytes treated as one
            for (size_t i = 0; i < word; i += step) {
                culprit = {write[i], read[i], other_read[i]};
                Finding finding = culprit.note(access, me, oldest);
                if (finding != Finding::none) return finding;
#pragma GCC unroll 4
                for (size_t j = 0; j < word; j++) {
                    if (j < step) write[i + j] = culprit.write, read[i + j] = culprit.read, other_read[i + j] = culprit.other_read;
                }
            }
        }
        return Finding::none;
    }

    std::vector<Stamp> write_, read_, other_read_;
};

}  // namespace simt
