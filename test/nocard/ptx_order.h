/*
Which accesses happened before which others. An access is made by an agent of a block: a warp, the copies that
it started, its products, its stores by the copy engine, or the copies that a certain mbarrier counts. An
agent has an epoch, which advances whenever others may learn what it did: at barriers, arrivals and fences. A
view gives, for each agent, the epoch up to which its accesses are known to have happened; a warp that waits
for a barrier joins the views of those that arrived there.

A stamp is one access of an agent. It races with a conflicting access unless it is in that access's view.
*/
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace nocard::ptx {

constexpr unsigned mbarrier_agents = 32;

// In place of a lane number: several lanes made the same access, or each made a part of it.
constexpr unsigned several_lanes = 63, unknown_lanes = 62;

// The agents of a block with this number of warps.
struct Agents {
    unsigned warps;
    unsigned count() const { return 5 * warps + mbarrier_agents; }
    unsigned copies_of(unsigned warp) const { return warps + warp; }        // cp.async
    unsigned products_of(unsigned warp) const { return 2 * warps + warp; }  // wgmma
    // Bulk stores and sums: their reads of shared memory, and their writes to global memory.
    unsigned store_reads_of(unsigned warp) const { return 3 * warps + warp; }
    unsigned store_writes_of(unsigned warp) const { return 4 * warps + warp; }
    unsigned of_mbarrier(unsigned number) const { return 5 * warps + number % mbarrier_agents; }
};

// 64 bits: 0 is no access.
struct Stamp {
    uint64_t epoch : 20 = 0;
    uint64_t agent : 8 = 0;
    uint64_t lane : 6 = 0;
    uint64_t bytes : 4 = 0;   // one bit for each byte of the word
    uint64_t strong : 1 = 0;  // atomic or volatile: two of them do not race
    uint64_t block : 25 = 0;  // counted from 1 within the grid
};
static_assert(sizeof(Stamp) == 8);

// The epoch up to which each agent of a block is known.
using Clock = std::vector<uint32_t>;

inline void join(Clock& to, const Clock& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
}

// The known epochs of other blocks' agents.
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

    // Returns what another block learns from this one.
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

// The knowledge of a warp, which barriers pass on in full.
struct Knowledge {
    View seen;          // accesses that happened before
    Clock async_proxy;  // known to this block's copies and products by a fence.proxy.async
    View across;        // known between those and ordinary accesses to global memory by a fence.proxy.async
    View published;     // known by a fence to readers of this warp's later writes
    View unfenced;      // seen by relaxed loads, and known after a fence

    void join(const Knowledge& other) {
        seen.join(other.seen);
        ptx::join(async_proxy, other.async_proxy);
        across.join(other.across);
        published.join(other.published);
        unfenced.join_foreign(other.unfenced.foreign);
    }
};

}  // namespace nocard::ptx
