/*
Records accesses to memory, to detect races and reads of unwritten bytes: a history of each 4 bytes of shared
memory, and of the global memory that the running grid touched.

A history has the last write and two reads. A word may have more than two readers that a write could overtake;
which two are kept differs from word to word, so that over a tile each reader is recorded somewhere.
*/
#pragma once

#include "test/nocard/ptx_machine.h"

namespace nocard::ptx {

enum class Access : uint8_t { read, write, atomic };

// The origin of an access: a warp itself, or something that it started.
struct Toucher {
    Warp& warp;
    int lane;
    unsigned agent;
    uint32_t epoch;
    bool by_async_proxy = false;  // products and the copy engine
    bool strong = false;
    bool same_value = false;  // writes the value already in memory, which lanes of a warp may do together

    static Toucher warp_itself(Warp& w, int lane) { return {w, lane, w.agent, w.epoch}; }
    bool is_warp() const { return agent == warp.agent; }
};

inline std::string describe_agent(const Agents& agents, unsigned agent) {
    unsigned warp = agent % agents.warps;
    if (agent >= 5 * agents.warps) return "a copy by the copy engine";
    if (agent >= 3 * agents.warps) return format("a bulk store of warp %u", warp);
    if (agent >= 2 * agents.warps) return format("a product of warp %u", warp);
    if (agent >= agents.warps) return format("a cp.async of warp %u", warp);
    return format("warp %u", warp);
}

inline const char* verb(Access access) {
    return access == Access::read ? "reads" : access == Access::write ? "writes" : "updates";
}

// ----------------------------------------------------------------------------
// histories

class Check {
public:
    Check(const Toucher& who, Access access, const char* memory)
        : who_(who), access_(access), memory_(memory) {
        me_.agent = who.agent;
        me_.epoch = who.epoch;
        me_.lane = (uint64_t)who.lane;
        me_.strong = who.strong || access == Access::atomic;
        me_.block = who.warp.block->serial;
    }

    // `bytes`: one bit for each byte of the word that is touched.
    void word(History& history, unsigned bytes, uint64_t address) {
        Stamp me = me_;
        me.bytes = bytes;
        bool harmless = who_.same_value && history.write.agent == me.agent && history.write.block == me.block;
        if (!harmless && conflicts(history.write, me)) report(history.write, true, address);
        if (access_ == Access::read) {
            remember(history, me, address);
            return;
        }
        for (const Stamp& read : history.read) {
            if (conflicts(read, me)) report(read, false, address);
        }
        bool adds_bytes = same(history.write, me) && !(history.write.bytes & bytes);
        if (adds_bytes) {
            history.write.bytes |= bytes;
            if (history.write.lane != me.lane) history.write.lane = unknown_lanes;
        } else {
            history.write = me;
        }
    }

private:
    static bool same(Stamp a, Stamp b) {
        return a.agent == b.agent && a.epoch == b.epoch && a.block == b.block;
    }

    bool conflicts(Stamp before, Stamp me) const {
        if (!before.block || !(before.bytes & me.bytes) || (before.strong && me.strong)) return false;
        const Warp& w = who_.warp;
        const View& seen = w.knowledge.seen;
        if (before.block == me.block && before.agent == w.agent) {
            // The warp itself: another lane, with no bar.warp.sync or barrier since.
            return who_.is_warp() && before.epoch == w.epoch && before.lane != me.lane &&
                   before.lane != unknown_lanes;
        }
        return !seen.has((uint32_t)me.block, before) || missing_fence(before) || missing_global_fence(before);
    }

    // The copy engine may not know yet what other blocks did to global memory.
    bool missing_global_fence(Stamp before) const {
        const Warp& w = who_.warp;
        return who_.by_async_proxy && before.block != w.block->serial &&
               !w.knowledge.across.has(w.block->serial, before);
    }

    // An ordinary write that products and the copy engine may not see yet.
    bool missing_fence(Stamp before) const {
        const Warp& w = who_.warp;
        if (!who_.by_async_proxy || access_ != Access::read || before.block != w.block->serial) return false;
        return before.agent < 2 * w.block->agents.warps &&
               before.epoch > w.knowledge.async_proxy[before.agent];
    }

    void remember(History& history, Stamp me, uint64_t address) {
        if (who_.by_async_proxy && history.write.block && missing_fence(history.write)) {
            report_missing_fence(history.write, address);
        }
        for (Stamp& read : history.read) {
            if (!read.block || read.agent != me.agent || read.block != me.block || read.strong != me.strong)
                continue;
            if (read.epoch != me.epoch) {
                read = me;
                return;
            }
            if (read.lane == me.lane) {
                read.bytes |= me.bytes;
                return;
            }
            // A lane may write what only it reads, and nothing that two lanes read.
            if (read.bytes & me.bytes) {
                read.bytes &= me.bytes;
                read.lane = several_lanes;
                return;
            }
        }
        for (Stamp& read : history.read) {
            if (!read.block || who_.warp.knowledge.seen.has((uint32_t)me.block, read)) {
                read = me;
                return;
            }
        }
        // Three unordered reads: this word forgets one of them.
        auto worth = [&](Stamp s) {
            return (s.agent + s.block * 7 + 1) * 0x9e3779b97f4a7c15 * (address / 4 | 1) >> 40;
        };
        Stamp& least = worth(history.read[0]) < worth(history.read[1]) ? history.read[0] : history.read[1];
        if (worth(me) > worth(least)) least = me;
    }

    [[noreturn, gnu::cold]] void report(Stamp other, bool wrote, uint64_t address) const {
        const Warp& w = who_.warp;
        if (wrote && w.knowledge.seen.has((uint32_t)me_.block, other) && missing_fence(other)) {
            report_missing_fence(other, address);
        }
        std::string whose = describe_agent(w.block->agents, (unsigned)other.agent);
        const char* did = wrote ? "wrote" : "read";
        std::string me = who_.is_warp() ? "" : describe_agent(w.block->agents, who_.agent) + ": ";
        if (w.knowledge.seen.has((uint32_t)me_.block, other) && missing_global_fence(other)) {
            fault(who_.lane, me + format("%s %s memory at %#lx that another block %s, with no "
                                         "fence.proxy.async.global since",
                                         verb(access_), memory_, address, did));
        }
        if (other.block != w.block->serial) {
            const Dim3& grid = w.grid->call->grid;
            unsigned n = (unsigned)other.block - 1;
            fault(who_.lane,
                  me + format("race: %s %s memory at %#lx that block (%u, %u, %u), %s %s, with nothing "
                              "that orders the two",
                              verb(access_), memory_, address, n % grid.x, n / grid.x % grid.y,
                              n / grid.x / grid.y, whose.c_str(), did));
        }
        bool under_way = other.agent >= w.block->agents.warps;
        if (under_way) {
            fault(who_.lane,
                  me + format("%s %s memory at %#lx while %s is under way, which %s it", verb(access_),
                              memory_, address, whose.c_str(), wrote ? "writes" : "reads"));
        }
        if (other.agent == w.agent)
            whose = other.lane == several_lanes ? "other lanes of the warp"
                                                : format("lane %u", (unsigned)other.lane);
        fault(who_.lane, me + format("race: %s %s memory at %#lx that %s %s, with no barrier between",
                                     verb(access_), memory_, address, whose.c_str(), did));
    }

    [[noreturn, gnu::cold]] void report_missing_fence(Stamp other, uint64_t address) const {
        const Agents& agents = who_.warp.block->agents;
        fault(who_.lane,
              format("%s reads shared memory at %#lx that %s wrote, with no fence.proxy.async since",
                     describe_agent(agents, who_.agent).c_str(), address,
                     describe_agent(agents, (unsigned)other.agent).c_str()));
    }

    const Toucher& who_;
    Access access_;
    const char* memory_;
    Stamp me_;
};

// Calls word(index, mask) for the words of 4 bytes that [address, address + bytes) touches.
template <typename Word>
[[gnu::always_inline]] inline void each_word(uint64_t address, uint64_t bytes, Word word) {
    if (address % 4 == 0 && bytes % 4 == 0) {
        for (uint64_t at = address; at < address + bytes; at += 4) word(at / 4, 15u);
        return;
    }
    for (uint64_t at = address / 4 * 4; at < address + bytes; at += 4) {
        uint64_t from = std::max(address, at) - at, to = std::min(address + bytes, at + 4) - at;
        word(at / 4, (1u << to) - (1u << from));
    }
}

// ----------------------------------------------------------------------------
// shared memory

// Returns the host address of these bytes; they must be in the block's shared memory.
inline char* shared_place(Warp& w, int lane, uint64_t address, uint64_t bytes,
                          const char* what = "access to") {
    Block& block = *w.block;
    if (address < shared_begin || address - shared_begin + bytes > block.shared.size()) {
        fault(lane, format("%s %lu bytes of shared memory at %ld, of which the block has %zu bytes", what,
                           bytes, (long)(address - shared_begin), block.shared.size()));
    }
    return block.shared_at((uint32_t)address);
}

inline void note_shared(const Toucher& who, uint32_t address, uint32_t bytes, Access access) {
    Warp& w = who.warp;
    Block& block = *w.block;
    uint32_t offset = address - shared_begin;
    // Only their own instructions may access mbarriers.
    if (!block.mbarriers.empty()) {
        auto next = block.mbarriers.lower_bound(address > 7 ? address - 7 : 0);
        if (next != block.mbarriers.end() && next->first < address + bytes) {
            fault(who.lane, format("%s shared memory at %u, where an mbarrier is", verb(access), offset));
        }
    }
    if (!w.grid->checks) return;
    Check check(who, access, "shared");
    each_word(offset, bytes, [&](uint64_t i, unsigned mask) {
        if (access == Access::write) {
            check.word(block.shared_history[i], mask, i * 4);
            block.shared_written[i] |= (uint8_t)mask;
            return;
        }
        if ((block.shared_written[i] & mask) != mask) {
            std::string me = who.is_warp() ? "" : describe_agent(block.agents, who.agent) + ": ";
            fault(who.lane, me + format("%s shared memory at %#lx, which no thread of the block wrote",
                                        verb(access), i * 4));
        }
        check.word(block.shared_history[i], mask, i * 4);
    });
}

// ----------------------------------------------------------------------------
// global memory

// The histories of a grid, in pages of 4 KiB of memory.
struct GlobalShadow {
    struct Page {
        std::array<History, 1024> words;
    };
    using Pages = std::vector<std::unique_ptr<Page>>;

    std::unordered_map<uint64_t, std::unique_ptr<Page>> pages;
    uint64_t last_number = ~0ull;
    Page* last = nullptr;

    // Pages of finished grids are kept for later ones.
    static Pages& spare() {
        static thread_local Pages pages;
        return pages;
    }
    ~GlobalShadow() {
        constexpr size_t most = 4096;
        for (auto& [number, page] : pages) {
            if (spare().size() < most) spare().push_back(std::move(page));
        }
    }

    Page& page(uint64_t number) {
        if (number == last_number) return *last;
        auto& found = pages[number];
        if (!found && !spare().empty()) {
            found = std::move(spare().back());
            spare().pop_back();
            *found = {};
        } else if (!found) {
            found = std::make_unique<Page>();
        }
        last_number = number;
        return *(last = found.get());
    }
};

// Returns the host address of these bytes; they must be live, and of the right kind.
inline char* global_place(Warp& w, int lane, uint64_t address, uint64_t bytes, bool device_only = false) {
    Allocation& known = w.grid->allocations[w.at];
    char* at = reinterpret_cast<char*>(address);
    if (!(at >= known.begin && at + bytes <= known.begin + known.bytes)) {
        const Allocation* found = find_allocation(at);
        if (!found) fault(lane, format("access to %#lx, where no device memory is alive", address));
        known = *found;
        if (at + bytes > known.begin + known.bytes) {
            fault(lane, format("access to %lu bytes at %#lx, %zu bytes into an allocation of %zu bytes",
                               bytes, address, (size_t)(at - known.begin), known.bytes));
        }
    }
    if (device_only && !known.device) {
        fault(lane,
              format("access to %#lx, which is memory of the host; this takes that of the device", address));
    }
    return at;
}

// Called after global_place(), which has found the allocation.
inline void note_global(const Toucher& who, uint64_t address, uint32_t bytes, Access access) {
    Warp& w = who.warp;
    const Allocation& known = w.grid->allocations[w.at];
    uint64_t offset = address - (uint64_t)known.begin;
    if (access == Access::write) {
        mark_written(known, offset, bytes);
    } else if (!is_written(known, offset, bytes)) {
        std::string me = who.is_warp() ? "" : describe_agent(w.block->agents, who.agent) + ": ";
        fault(who.lane,
              me + format("%s %u bytes of global memory at %#lx, %lu bytes into an allocation of %zu, which "
                          "nobody wrote",
                          verb(access), bytes, address, offset, known.bytes));
    }
    if (w.grid->call->counts_bytes) {
        if (access != Access::write) w.grid->touched.note(address, bytes, false);
        if (access != Access::read) w.grid->touched.note(address, bytes, true);
    }
    if (!w.grid->checks) return;
    Check check(who, access, "global");
    GlobalShadow& shadow = *w.grid->global;
    each_word(address, bytes, [&](uint64_t i, unsigned mask) {
        check.word(shadow.page(i / 1024).words[i % 1024], mask, i * 4);
    });
}

// ----------------------------------------------------------------------------
// order over global memory

// A strong write publishes what the warp's last fence covers or, with release, all that the warp knows.
inline void publish(Warp& w, uint64_t address, bool releases) {
    Knowledge& k = w.knowledge;
    View handed_on = releases ? k.seen : k.published;
    const Agents& agents = w.block->agents;
    // Ordinary accesses elsewhere may see what this block's bulk stores wrote only after a fence.
    for (size_t a = agents.store_writes_of(0); a < agents.of_mbarrier(0) && a < handed_on.clock.size(); a++)
        handed_on.clock[a] = std::min(handed_on.clock[a], a < k.across.clock.size() ? k.across.clock[a] : 0);
    if (handed_on.clock.empty() && !handed_on.foreign) return;
    w.grid->published[address].join(handed_on.as_foreign(w.block->serial));
    if (releases) w.next_epoch();
}

inline void learn(Warp& w, View& to, const std::shared_ptr<const Foreign>& foreign) {
    if (!foreign) return;
    to.join_foreign(foreign);
    auto own = foreign->find(w.block->serial);
    if (own != foreign->end()) join(to.clock, own->second);
}

// A strong read learns what was published: at once with acquire, otherwise at the next fence.
inline void receive(Warp& w, uint64_t address, bool acquires) {
    auto found = w.grid->published.find(address);
    if (found == w.grid->published.end()) return;
    w.knowledge.unfenced.join_foreign(found->second.foreign);
    if (acquires) learn(w, w.knowledge.seen, found->second.foreign);
}

inline void fence_memory(Warp& w) {
    Knowledge& k = w.knowledge;
    learn(w, k.seen, k.unfenced.foreign);
    k.published = k.seen;
    w.next_epoch();
}

}  // namespace nocard::ptx
