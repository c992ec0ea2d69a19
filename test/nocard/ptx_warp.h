/*
Instructions that the lanes of a warp run together, and barriers of a block.
*/
#pragma once

#include "test/nocard/ptx_checks.h"
#include "test/nocard/ptx_alu.h"
#include "test/nocard/ptx_memory.h"

namespace nocard::ptx {

// ----------------------------------------------------------------------------
// shuffles and votes

enum ShuffleMode { butterfly, index, up, down };

// c: bits 0 to 4 clamp the source lane within its segment; bits 8 to 12 mark the bits of a lane's number that
// select its segment
template <ShuffleMode mode>
void shuffle(Warp& w, const Instruction& i, uint32_t lanes) {
    std::array<uint32_t, 32> from, to;
    memcpy(from.data(), words(w, i.a), 128);
    uint32_t within = 0;
    each_lane(lanes, [&](int l) {
        int n = (int)(words(w, i.b)[l] & 31), clamp = (int)(words(w, i.c)[l] & 31);
        int segment = (int)(words(w, i.c)[l] >> 8 & 31);
        int least = l & segment, most = least | (clamp & ~segment), j = 0;
        if (mode == butterfly) j = l ^ n;
        if (mode == index) j = least | (n & ~segment);
        if (mode == up) j = l - n;
        if (mode == down) j = l + n;
        bool valid = mode == up ? j >= most : j <= most;
        if (!valid) j = l;
        within |= (uint32_t)valid << l;
        if (!(lanes >> j & 1)) fault(l, format("shuffles from lane %d, which takes no part", j));
        to[(size_t)l] = from[(size_t)j];
    });
    each_lane(lanes, [&](int l) { words(w, i.d)[l] = to[(size_t)l]; });
    if (i.second != no_operand) set_predicate(w, i.second, lanes, within);
}

// "d|p": both are results.
inline void decode_results(Decoding& x) {
    std::string_view text = x.operand(0);
    size_t bar = text.find('|');
    std::string_view first = trimmed(text.substr(0, bar));
    if (first != "_") x.to.d = x.result(first);
    if (bar != text.npos) x.to.second = x.result(trimmed(text.substr(bar + 1)));
}

inline void decode_shfl(Decoding& x) {
    if (!x.has("sync")) x.unknown();
    Instruction& i = x.to;
    decode_results(x);
    i.a = x.source(1), i.b = x.source(2), i.c = x.source(3), i.members = x.source(4);
    i.role = Role::meet;
    i.run = x.has("bfly")  ? shuffle<butterfly>
            : x.has("idx") ? shuffle<index>
            : x.has("up")  ? shuffle<up>
                           : shuffle<down>;
}

inline void ballot(Warp& w, const Instruction& i, uint32_t lanes) {
    uint32_t votes = (i.value ? ~predicate(w, i.a) : predicate(w, i.a)) & lanes;
    each_lane(lanes, [&](int l) { words(w, i.d)[l] = votes; });
}

enum VoteMode { all, any, uniform };

template <VoteMode mode>
void vote(Warp& w, const Instruction& i, uint32_t lanes) {
    uint32_t votes = (i.value ? ~predicate(w, i.a) : predicate(w, i.a)) & lanes;
    bool result = mode == all ? votes == lanes : mode == any ? votes != 0 : votes == 0 || votes == lanes;
    set_predicate(w, i.d, lanes, result ? all_lanes : 0);
}

inline void decode_vote(Decoding& x) {
    Instruction& i = x.to;
    if (!x.has("sync")) x.unknown();
    std::string_view voter = x.operand(1);
    i.value = voter[0] == '!';
    i.a = x.source(i.value ? voter.substr(1) : voter, Width::predicate);
    i.d = x.result(0), i.members = x.source(2);
    i.role = Role::meet;
    i.run = x.has("ballot") ? ballot : x.has("all") ? vote<all> : x.has("any") ? vote<any> : vote<uniform>;
}

template <typename T, typename Operation>
void reduce(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<T> a(w, i.a), d(w, i.d);
    T result = a[first_lane(lanes)];
    each_lane(lanes & (lanes - 1), [&](int l) { result = (T)Operation()(result, a[l]); });
    each_lane(lanes, [&](int l) { d.set(l, result); });
}

inline void decode_redux(Decoding& x) {
    Instruction& i = x.to;
    i.a = x.source(1), i.members = x.source(2), i.d = x.result(0);
    i.role = Role::meet;
    if (is_half(x.type()) || x.type() == "f32") x.unknown();
    with_integer(x, x.type(), [&]<typename T>(T) {
        if constexpr (sizeof(T) == 4) {
            i.run = x.has("add")   ? reduce<T, Add>
                    : x.has("min") ? reduce<T, Minimum>
                    : x.has("max") ? reduce<T, Maximum>
                    : x.has("and") ? reduce<T, And>
                    : x.has("or")  ? reduce<T, Or>
                    : x.has("xor") ? reduce<T, Xor>
                                   : nullptr;
        }
    });
}

// PTX leaves open which lane is chosen.
inline void elect(Warp& w, const Instruction& i, uint32_t lanes) {
    uint32_t chosen = (uint32_t)first_lane(lanes);
    if (i.d != no_operand) each_lane(lanes, [&](int l) { words(w, i.d)[l] = chosen; });
    if (i.second != no_operand) set_predicate(w, i.second, lanes, 1u << chosen);
}

inline void decode_elect(Decoding& x) {
    decode_results(x);
    x.to.members = x.source(1);
    x.to.role = Role::meet;
    x.to.run = elect;
}

inline void decode_activemask(Decoding& x) {
    x.to.d = x.result(0);
    x.to.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
        each_lane(lanes, [&](int l) { words(w, i.d)[l] = lanes; });
    };
}

// ----------------------------------------------------------------------------
// barriers

// Releases the warps that wait in a barrier, if all have arrived.
inline void open_if_full(Block& block, unsigned number) {
    NamedBarrier& barrier = block.named[number];
    if (barrier.arrived < barrier.expected) return;
    for (Warp& waiting : block.warps) {
        if (waiting.barrier != (int)number) continue;
        waiting.barrier = -1;
        waiting.knowledge.join(barrier.knowledge);
        waiting.next_epoch();
    }
    barrier = {};
}

inline void arrive(Warp& w, const Instruction& i, int lane, bool waits) {
    Block& block = *w.block;
    unsigned number = words(w, i.a)[lane];
    if (number >= block.named.size()) fault(lane, format("there is no barrier %u", number));
    NamedBarrier& barrier = block.named[number];
    bool counted = i.b != no_operand;
    int expected = counted ? (int)words(w, i.b)[lane] : 32 * (int)block.warps.size();
    if (expected % 32 || expected <= 0) {
        fault(lane, format("barrier %u of %d threads, which is no multiple of 32", number, expected));
    }
    if (expected > 32 * (int)block.warps.size()) {
        fault(lane,
              format("barrier %u of %d threads, of which the block has %u", number, expected, block.threads));
    }
    if (barrier.warps && (barrier.expected != expected)) {
        fault(lane, format("barrier %u of %d threads, where others wait for %d", number, expected,
                           barrier.expected));
    }
    if (barrier.warps >> w.index & 1) {
        fault(lane, format("barrier %u: the warp arrives twice, before the others have arrived", number));
    }
    if (!counted) {
        for (const Warp& other : block.warps) {
            if (other.alive == 0) {
                fault(lane, format("barrier %u of all threads: those of warp %u have left the kernel", number,
                                   other.index));
            }
        }
    }
    barrier.counted = counted;
    barrier.expected = expected;
    barrier.arrived += 32;
    barrier.warps |= 1u << w.index;
    barrier.knowledge.join(w.knowledge);
    w.next_epoch();
    w.grid->progress++;
    if (waits) w.barrier = (int)number;
    open_if_full(block, number);
}

inline void barrier_sync(Warp& w, const Instruction& i, uint32_t lanes) {
    arrive(w, i, first_lane(lanes), true);
}
inline void barrier_arrive(Warp& w, const Instruction& i, uint32_t lanes) {
    arrive(w, i, first_lane(lanes), false);
}

// Called when a warp has left: no barrier of all threads may wait for it.
inline void check_barriers_after_leaving(Warp& w) {
    for (unsigned number = 0; number < w.block->named.size(); number++) {
        const NamedBarrier& barrier = w.block->named[number];
        if (!barrier.warps || barrier.counted) continue;
        fault(0, format("leaves the kernel while others wait for all threads in barrier %u", number));
    }
}

inline void decode_bar(Decoding& x) {
    Instruction& i = x.to;
    if (x.has("warp")) {
        i.members = x.source(0);
        i.role = Role::meet;
        i.run = [](Warp& w, const Instruction&, uint32_t) { w.next_epoch(); };
        return;
    }
    if (x.has("red")) x.unknown();
    i.role = Role::aligned;
    i.a = x.source(0);
    if (x.operands.size() > 1) i.b = x.source(1);
    i.run = x.has("arrive") ? barrier_arrive : barrier_sync;
}

// ----------------------------------------------------------------------------
// registers

// Each warp of a warpgroup releases registers, or waits for them, by itself.
inline void set_registers(Warp& w, const Instruction& i, uint32_t) {
    int wanted = (int)i.value;
    bool increases = i.target == 1;
    if (wanted % 8 || wanted < 24 || wanted > 256) fault(0, format("%d registers cannot be had", wanted));
    if (!w.registers) return;  // the warp's number of registers is unknown
    if (increases ? wanted < w.registers : wanted > w.registers) {
        fault(0, format("%s to %d registers a thread, of %d", increases ? "increases" : "decreases", wanted,
                        w.registers));
    }
    if (increases && wanted - w.registers > w.block->free_registers) {
        w.retry = w.yielded = true;
        return;
    }
    w.block->free_registers -= wanted - w.registers;
    w.registers = wanted;
    w.grid->progress++;
}

inline void decode_setmaxnreg(Decoding& x) {
    x.to.role = Role::aligned;
    x.to.value = (int64_t)number(x.operand(0));
    x.to.target = x.has("inc");
    x.to.run = set_registers;
}

}  // namespace nocard::ptx
