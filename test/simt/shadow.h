/*
What is remembered about every byte of shared memory: who wrote it last and who read it since the last
barrier.

An access is stamped with the interval between barriers (of all blocks, counted up for ever), the number of
warp operations its warp had done, and its thread. Two accesses are ordered if their intervals differ, or if
they come from one warp and there was a warp operation between them, or if the warp of the later one has seen
the earlier: barriers of a part of the block (mbarriers, named barriers) hand on what their warps did before.
All of that is kept by warp, so what one lane waited for counts as waited for by the others, and an arrival
orders the lanes of its warp as a warp operation does.
*/
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace simt {

enum class Access { read, write, atomic };

// interval (32 bits) | warp operations (19) | by the copy engine (1) | copy under way (1) | atomic (1) |
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

inline int warp_of(Stamp stamp) {
    return int(stamp & warp_bits) / 32;
}
inline uint32_t epoch_of(Stamp stamp) {
    return uint32_t(stamp & epoch_bits) >> epoch_shift;
}

// For each warp of the block, how many of its epochs are known to lie before.
using Clock = std::array<uint32_t, 32>;

inline void join(Clock& clock, const Clock& other) {
    for (size_t w = 0; w < clock.size(); w++) clock[w] = std::max(clock[w], other[w]);
}

inline std::array<Clock, 32> seen_by;  // warp of the running block

// a came first
inline bool unordered(Stamp a, Stamp b) {
    Stamp difference = a ^ b;
    if (difference >> interval_shift || !(difference & thread_bits)) return false;
    if (!(difference & warp_bits) && (difference & epoch_bits)) return false;
    if (difference & warp_bits && epoch_of(a) < seen_by[warp_of(b)][warp_of(a)]) return false;
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

    // What was read before is forgotten: whoever races with it races with this write, too.
    [[gnu::always_inline]] Finding note_write(Stamp me) {
        if (unordered(write, me)) return Finding::race_with_write;
        if (unordered(read, me) || unordered(other_read, me)) return Finding::race_with_read;
        write = me;
        if (!(me & atomic_bit)) read = other_read = 0;
        return Finding::none;
    }

    [[gnu::always_inline]] Finding note(Access access, Stamp me, uint32_t oldest) {
        Finding finding = access == Access::write ? Finding::none : note_read(me, oldest);
        return finding == Finding::none && access != Access::read ? note_write(me) : finding;
    }

    Stamp racing_read(Stamp me) const { return unordered(read, me) ? read : other_read; }
};

// The bytes of a range of addresses. While the bytes of a word have the same past, the first of them stands
// for all.
class Shadow {
public:
    explicit Shadow(size_t bytes) : bytes_(bytes + word), split_(bytes / word + 1) {}

    // Notes an access to `bytes` bytes. `culprit` becomes the byte of a finding.
    [[gnu::always_inline]] Finding note(size_t at, size_t bytes, Access access, Stamp me, uint32_t oldest,
                                        Byte& culprit) {
        for (size_t end = at + bytes; at < end;) {
            size_t count = std::min(word - at % word, end - at);
            Finding finding = count == word && !split_[at / word]
                                  ? note_bytes(at, 1, access, me, oldest, culprit)
                                  : note_part(at, count, access, me, oldest, culprit);
            if (finding != Finding::none) return finding;
            at += count;
        }
        return Finding::none;
    }

    Stamp last_write(size_t at) const { return bytes_[split_[at / word] ? at : at / word * word].write; }

private:
    static constexpr size_t word = 4;

    [[gnu::always_inline]] Finding note_bytes(size_t at, size_t count, Access access, Stamp me,
                                              uint32_t oldest, Byte& culprit) {
        for (size_t i = at; i < at + count; i++) {
            Finding finding = bytes_[i].note(access, me, oldest);
            if (finding != Finding::none) {
                culprit = bytes_[i];
                return finding;
            }
        }
        return Finding::none;
    }

    [[gnu::noinline]] Finding note_part(size_t at, size_t count, Access access, Stamp me, uint32_t oldest,
                                        Byte& culprit) {
        char& split = split_[at / word];
        Byte* first = &bytes_[at / word * word];
        if (!split) std::fill_n(first + 1, word - 1, *first);
        split = !(access == Access::write && count == word);  // after which its bytes are the same again
        return note_bytes(at, count, access, me, oldest, culprit);
    }

    std::vector<Byte> bytes_;
    std::vector<char> split_;  // by word
};

}  // namespace simt
