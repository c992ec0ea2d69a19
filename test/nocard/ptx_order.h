/*
What happened before what. Everything that touches memory does so as an agent of its block: a warp, the copies
that it started, its products, its stores by the copy engine, or the copies that a certain mbarrier counts. An
agent has an epoch, which goes on whenever others may learn of what it did: at barriers, arrivals, fences. A
view says up to which epoch of each agent things are known to have happened; whoever waits for a barrier joins
the views of those that arrived there.

A stamp is one access of an agent. It races with another that conflicts with it unless it is in the other's
view.
*/
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace nocard::ptx {

constexpr unsigned mbarrier_agents = 32;

// In the place of a lane: more than one of them did the same, or each did some of it.
constexpr unsigned several_lanes = 63, unknown_lanes = 62;

// The agents of a block of so many warps.
struct Agents {
    unsigned warps;
    unsigned count() const { return 5 * warps + mbarrier_agents; }
    unsigned copies_of(unsigned warp) const { return warps + warp; }        // cp.async
    unsigned products_of(unsigned warp) const { return 2 * warps + warp; }  // wgmma
    // Bulk stores and sums: what they read of shared memory, and what they write to global memory.
    unsigned store_reads_of(unsigned warp) const { return 3 * warps + warp; }
    unsigned store_writes_of(unsigned warp) const { return 4 * warps + warp; }
    unsigned of_mbarrier(unsigned number) const { return 5 * warps + number % mbarrier_agents; }
};

// 64 bits: 0 is no access.
struct Stamp {
    uint64_t epoch : 20 = 0;
    uint64_t agent : 8 = 0;
    uint64_t lane : 6 = 0;
    uint64_t bytes : 4 = 0;   // a bit for each byte of the word
    uint64_t strong : 1 = 0;  // atomic or volatile: two of them do not race
    uint64_t block : 25 = 0;  // counted from 1 within the grid
};
static_assert(sizeof(Stamp) == 8);

// Up to which epoch each agent of a block is known.
using Clock = std::vector<uint32_t>;

inline void join(Clock& to, const Clock& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
}

// This is known of other blocks.
using Foreign = std::map<uint32_t, Clock>;

struct View {
    Clock clock;
    std::shared_ptr<const Foreign> foreign;

    void join(const View& other) {
        ptx::join(clock, other.clock);
        join_foreign(other.foreign);
    }

    void join_foreign(const std::shared_ptr<const Foreign>& other) {
        if (!other || other == foreign) return;
        if (!foreign) {
            foreign = other;
            return;
        }
        auto both = std::make_shared<Foreign>(*foreign);
        for (const auto& [block, clock_of] : *other) ptx::join((*both)[block], clock_of);
        foreign = both;
    }

    // Another block learns this of this one.
    View as_foreign(uint32_t block) const {
        auto known = foreign ? std::make_shared<Foreign>(*foreign) : std::make_shared<Foreign>();
        ptx::join((*known)[block], clock);
        return {{}, known};
    }

    bool has(uint32_t own_block, Stamp stamp) const {
        if (stamp.block == own_block) return stamp.agent < clock.size() && stamp.epoch <= clock[stamp.agent];
        if (!foreign) return false;
        auto found = foreign->find(stamp.block);
        return found != foreign->end() && stamp.agent < found->second.size() &&
               stamp.epoch <= found->second[stamp.agent];
    }
};

// A warp knows this; barriers hand all of it on.
struct Knowledge {
    View seen;          // it happened before
    Clock async_proxy;  // a fence.proxy.async made so much of it, in this block, known to copies and products
    View across;        // a fence.proxy.async made it known between those and ordinary access, in all memory
    View published;     // a fence made it known to readers of what this warp writes from now on
    View unfenced;      // this warp would know it after a fence, from relaxed loads

    void join(const Knowledge& other) {
        seen.join(other.seen);
        ptx::join(async_proxy, other.async_proxy);
        across.join(other.across);
        published.join(other.published);
        unfenced.join_foreign(other.unfenced.foreign);
    }
};

}  // namespace nocard::ptx
