/*
The machine: a grid's blocks, their warps, registers, shared memory and barriers, and work in flight.
*/
#pragma once

#include <bitset>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <unordered_map>

#include "test/nocard/ptx_kernel.h"
#include "test/nocard/ptx_order.h"
#include "test/nocard/ptx_registers.h"

namespace nocard::ptx {

struct Block;
struct Grid;

// Why a lane cannot run an instruction.
struct Reason {
    int lane;
    std::string text;
};

[[noreturn, gnu::cold]] inline void fault(int lane, std::string text) {
    throw Reason{lane, std::move(text)};
}

// ----------------------------------------------------------------------------
// copies, stores and products in flight

// A cp.async from global to shared memory. It is kept until it is waited for, even after it has happened.
struct Copy {
    uint32_t shared;
    const char* global;
    uint32_t bytes, from_global;  // the rest is zeros
    int lane;
    uint64_t group;  // number of its commit, counted per lane
    uint32_t epoch;
    bool done = false;
};

// A store or sum by the copy engine from shared to global memory: pieces that are consecutive in both.
struct BulkStore {
    struct Piece {
        uint32_t shared;
        char* global;
        uint32_t bytes;
    };
    std::vector<Piece> pieces;
    bool adds;
    int lane;
    uint64_t group;
    uint32_t epoch;
    std::vector<uint8_t> taken;  // bytes that it has read
    bool has_read = false, done = false, read_waited = false;
};

// A wgmma.
struct Product {
    const Instruction* instruction;
    uint64_t a, b;  // descriptors
    bool keep;
    uint32_t epoch;                         // its group's
    std::array<uint32_t, 4 * 32> fragment;  // the registers of A when it was issued
    bool done = false;
};

// A copy to shared memory that an mbarrier counts.
struct Load {
    uint32_t barrier;
    int64_t bytes;
    std::function<void()> bring;
};

// ----------------------------------------------------------------------------
// warps

struct Warp {
    Block* block = nullptr;
    Grid* grid = nullptr;
    const Kernel* kernel = nullptr;
    uint8_t* file = nullptr;
    unsigned index = 0;

    // Each lane has its own program counter. `waiting` lanes wait for others at an instruction that is run
    // together.
    std::array<uint32_t, 32> pc{};
    uint32_t lanes = 0, alive = 0, waiting = 0;
    uint32_t at = 0;       // the current instruction
    bool yielded = false;  // others should go first: it polled something that has not happened
    bool retry = false;    // the instruction has to be rerun, after others made progress
    int barrier = -1;      // the barrier that it waits in, or -1
    bool spins = false;    // it polled in vain, and has done nothing else since
    int registers = 0;     // per thread, as setmaxnreg counts them

    // Groups of copies are counted per lane.
    std::deque<Copy> copies;
    std::deque<BulkStore> stores;
    std::deque<Product> products;
    std::array<uint64_t, 32> copy_groups{}, store_groups{};

    // For each register: how many products in flight use it as D or A, and when another instruction set it.
    std::vector<uint8_t> busy_results, busy_sources;
    std::vector<uint32_t> set_at;
    uint32_t now = 1, fenced_at = 0;
    uint32_t spun_at = 0;  // the address of the mbarrier that it polled last

    unsigned agent = 0;
    uint32_t epoch = 1;
    uint32_t copy_epoch = 0, product_epoch = 0, store_epoch = 0;
    Knowledge knowledge;

    // Those that already learned this warp's view do not know what it does from here on.
    void next_epoch() { knowledge.seen.clock[agent] = ++epoch; }
};

// Numbers in registers. The lanes of a register are an array; 16-bit ones take 32 bits each.
using LaneWord = uint32_t __attribute__((may_alias));
using LaneWide = uint64_t __attribute__((may_alias));

inline LaneWord* words(Warp& w, uint32_t place) {
    return reinterpret_cast<LaneWord*>(w.file + place);
}
inline LaneWide* wides(Warp& w, uint32_t place) {
    return reinterpret_cast<LaneWide*>(w.file + place);
}
inline LaneWord& predicate(Warp& w, uint32_t place) {
    return *reinterpret_cast<LaneWord*>(w.file + place);
}
inline void set_predicate(Warp& w, uint32_t place, uint32_t lanes, uint32_t value) {
    LaneWord& p = predicate(w, place);
    p = (p & ~lanes) | (value & lanes);
}

template <typename Function>
[[gnu::always_inline]] inline void each_lane(uint32_t lanes, Function function) {
    if (lanes == all_lanes) {
#pragma GCC ivdep
        for (int lane = 0; lane < 32; lane++) function(lane);
    } else {
        for (; lanes; lanes &= lanes - 1) function(__builtin_ctz(lanes));
    }
}

inline int first_lane(uint32_t lanes) {
    return __builtin_ctz(lanes);
}

// Returns the address that a lane gives, without the instruction's offset.
inline uint64_t address_in(Warp& w, uint32_t place, bool wide, int lane) {
    return wide ? wides(w, place)[lane] : words(w, place)[lane];
}

// ----------------------------------------------------------------------------
// blocks

struct Mbarrier {
    unsigned number = 0;  // in the order of initialization, for the agent
    int expected = 0, pending = 0;
    int64_t bytes = 0;
    uint64_t phase = 0;
    uint32_t epoch = 0;  // its agent's
    Knowledge arrived, completed;
};

struct NamedBarrier {
    int arrived = 0, expected = 0;
    uint32_t warps = 0, arrived_only = 0;  // mask of the warps that have arrived
    bool counted = false;                  // the instruction gives the number of threads
    Knowledge knowledge;
};

// The history of 4 bytes of memory: the last write, and two of the reads since.
struct History {
    Stamp write, read[2];
};

struct Block {
    Dim3 at;
    uint32_t serial = 0;
    Agents agents{};
    std::vector<uint8_t> shared;
    std::vector<History> shared_history;
    std::vector<uint8_t> shared_written;  // see Allocation::written
    std::vector<Warp> warps;
    std::vector<uint8_t> files;
    std::map<uint32_t, Mbarrier> mbarriers;
    unsigned mbarriers_made = 0;
    std::array<NamedBarrier, 16> named;
    std::deque<Load> loads;
    int free_registers = 0;
    unsigned threads = 0;

    char* shared_at(uint32_t address) { return (char*)shared.data() + (address - shared_begin); }
};

// ----------------------------------------------------------------------------
// grids

struct GlobalShadow;

// The bytes of global memory that were touched, as bits.
class TouchedMemory {
public:
    void note(uint64_t address, uint32_t bytes, bool writes) {
        for (uint64_t at = address, end = address + bytes; at < end;) {
            std::bitset<page>& bits = pages_[{at / page, writes}];
            for (uint64_t stop = std::min(end, (at / page + 1) * page); at < stop; at++) bits.set(at % page);
        }
    }
    size_t count(bool writes) const {
        size_t count = 0;
        for (auto& [key, bits] : pages_) count += key.second == writes ? bits.count() : 0;
        return count;
    }

private:
    static constexpr size_t page = 4096;
    std::map<std::pair<uint64_t, bool>, std::bitset<page>> pages_;
};

// How often warps ran an instruction, and with how many lanes; if it moves memory, also its traffic.
struct InstructionCount {
    uint64_t warps = 0, lanes = 0, passes = 0, least_passes = 0, sectors = 0, asked = 0;
    bool accesses = false;
};

struct Grid {
    const GridCall* call = nullptr;
    const Kernel* kernel = nullptr;
    bool checks = true;
    std::vector<uint8_t> parameters;  // aligned as on a card
    uint8_t* parameter_bytes = nullptr;
    std::mt19937_64 random;
    uint64_t progress = 0;  // counts everything that others may wait for
    uint64_t instructions = 0;
    std::vector<Allocation> allocations;  // the last one that each instruction touched
    std::map<uint64_t, View> published;   // by strong writes to global memory
    std::unique_ptr<GlobalShadow> global;
    TouchedMemory touched;                  // if the call counts bytes
    std::vector<InstructionCount> counted;  // if it counts units, for each instruction

    uint64_t draw(uint64_t below) { return random() % below; }
};

inline const char* plural(int64_t count) {
    return count == 1 ? "" : "s";
}

template <typename... Arguments>
std::string format(const char* text, Arguments... arguments) {
    char buffer[600];
    snprintf(buffer, sizeof buffer, text, arguments...);
    return buffer;
}

}  // namespace nocard::ptx
