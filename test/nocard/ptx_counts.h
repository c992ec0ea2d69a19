/*
The work of a grid by unit of a card's multiprocessors, counted as its warps run, as a profiler counts it on a
card: instructions by unit, active lanes, passes of shared memory, and sectors of global memory.

PTX is not machine code: ptxas drops moves, and merges and splits other instructions. The counts are an
estimate on the high side.
*/
#pragma once

#include "test/nocard/ptx_async.h"
#include "test/nocard/ptx_matrix.h"

namespace nocard::ptx {

// ----------------------------------------------------------------------------
// memory

constexpr uint32_t banks = 32, bank_bytes = 4, sector_bytes = 32;

// Lanes access shared memory in turns of 128 bytes. A turn takes one pass for each distinct word in its
// busiest bank.
class SharedTurns {
public:
    explicit SharedTurns(InstructionCount& count) : count_(count) {}

    void add(int lane, uint64_t address, uint32_t bytes) {
        int turn = lane * (int)std::max(bytes, bank_bytes) / (int)(banks * bank_bytes);
        if (turn != turn_) end();
        turn_ = turn;
        for (uint64_t word = address / bank_bytes; word * bank_bytes < address + bytes; word++)
            words_.push_back(word);
    }
    void end() {
        if (words_.empty()) return;
        std::array<uint8_t, banks> wanted{};
        std::sort(words_.begin(), words_.end());
        words_.erase(std::unique(words_.begin(), words_.end()), words_.end());
        for (uint64_t word : words_) wanted[word % banks]++;
        count_.passes += *std::max_element(wanted.begin(), wanted.end());
        count_.least_passes++;
        words_.clear();
    }

private:
    InstructionCount& count_;
    int turn_ = 0;
    std::vector<uint64_t> words_;
};

class GlobalSectors {
public:
    explicit GlobalSectors(InstructionCount& count) : count_(count) {}

    void add(uint64_t address, uint32_t bytes) {
        ranges_.push_back({address, bytes});
        for (uint64_t at = address / sector_bytes; at * sector_bytes < address + bytes; at++)
            sectors_.push_back(at);
    }
    void end() {
        auto distinct = [](auto& all) {
            std::sort(all.begin(), all.end());
            all.erase(std::unique(all.begin(), all.end()), all.end());
        };
        distinct(sectors_), distinct(ranges_);
        count_.sectors += sectors_.size();
        for (auto [address, bytes] : ranges_) count_.asked += bytes;
    }

private:
    InstructionCount& count_;
    std::vector<uint64_t> sectors_;
    std::vector<std::pair<uint64_t, uint32_t>> ranges_;
};

inline std::string_view opcode_of(const Instruction& i) {
    std::string_view text = i.text;
    if (text.starts_with('@')) text = text.substr(text.find_first_of(" \t") + 1);
    text = text.substr(std::min(text.find_first_not_of(" \t\n"), text.size()));
    return text.substr(0, text.find_first_of(" \t\n;"));
}

inline bool is_one_of(std::string_view word, std::initializer_list<std::string_view> words) {
    return std::find(words.begin(), words.end(), word) != words.end();
}

// Returns whether the instruction moves memory at addresses that its lanes give.
inline bool moves_memory(const Instruction& i) {
    std::string_view opcode = opcode_of(i), base = opcode.substr(0, opcode.find('.'));
    bool by_lanes = is_one_of(base, {"ld", "st", "red", "atom"}) && i.space != Space::parameter;
    return by_lanes || i.run == copy_async || i.run == move_matrices<true> || i.run == move_matrices<false>;
}

inline void count_access(Warp& w, const Instruction& i, uint32_t lanes, InstructionCount& count) {
    SharedTurns shared(count);
    GlobalSectors global(count);
    const bool copies = i.run == copy_async,
               matrices = i.run == move_matrices<true> || i.run == move_matrices<false>;
    if (matrices)
        lanes = i.list.size() == 4 ? all_lanes : (1u << 8 * i.list.size()) - 1;  // those that give addresses
    const uint32_t bytes = copies ? (uint32_t)i.value : matrices ? 16 : (uint32_t)i.access_bytes * i.vector;
    for (; lanes; lanes &= lanes - 1) {
        int l = first_lane(lanes);
        uint64_t address = address_in(w, i.a, i.wide_address || copies, l) + (uint64_t)i.offset;
        if (copies) {
            uint32_t taken = i.b == no_operand ? bytes : words(w, i.b)[l];
            if (taken) global.add(address, taken);
            shared.add(l, address_in(w, i.d, i.widths[0] == Width::wide, l) + (uint64_t)i.target, bytes);
            continue;
        }
        bool is_shared = i.space == Space::shared || (i.space == Space::generic && address & shared_window);
        if (is_shared)
            shared.add(l, address & (shared_window - 1), bytes);
        else if (i.space == Space::global || !(address & parameter_window))
            global.add(address, bytes);
    }
    shared.end(), global.end();
}

// Called before these lanes of a warp run an instruction.
inline void count_instruction(Warp& w, const Instruction& i, uint32_t lanes) {
    if (w.grid->counted.empty()) return;
    InstructionCount& count = w.grid->counted[w.at];
    count.warps++, count.lanes += (uint64_t)std::popcount(lanes);
    if (lanes && count.accesses) count_access(w, i, lanes, count);
}

// ----------------------------------------------------------------------------
// units

// Returns the multiply-adds of shapes such as m64n128k16 and m16n8k16, or 0.
inline double multiply_adds(std::string_view opcode) {
    size_t at = opcode.find(".m");
    int m = 0, n = 0, k = 0;
    while (at != opcode.npos && sscanf(std::string(opcode.substr(at)).c_str(), ".m%dn%dk%d", &m, &n, &k) != 3)
        at = opcode.find(".m", at + 1);
    return at == opcode.npos ? 0 : (double)m * n * k;
}

// Adds the counts of an instruction to those of its units.
inline void add_to_units(UnitCounts& units, const Instruction& i, const InstructionCount& count) {
    std::string_view opcode = opcode_of(i), base = opcode.substr(0, opcode.find('.'));
    std::string_view type = opcode.substr(std::min(opcode.rfind('.'), opcode.size() - 1) + 1);
    bool of_parameters = base == "ld" && opcode.starts_with("ld.param");
    if (is_one_of(base, {"mov", "cvta"}) || of_parameters) return;  // not in machine code
    units.issued += count.warps, units.lanes += count.lanes;
    bool is_float = is_one_of(type, {"f32", "f32x2", "bf16", "bf16x2", "f16x2"});
    if (is_one_of(base, {"ex2", "rcp", "sqrt", "rsqrt", "lg2", "tanh", "div"})) {
        units.special += count.warps;
    } else if (base == "cvt") {
        bool of_integer = opcode.find("f32.s") != opcode.npos || opcode.find("f32.u") != opcode.npos ||
                          is_one_of(type, {"f32", "f64"});
        bool to_half = opcode.find("bf16") != opcode.npos || opcode.find("e4m3") != opcode.npos ||
                       opcode.find("e5m2") != opcode.npos;
        (of_integer && !to_half ? units.special : units.integer) += count.warps;
    } else if (base == "wgmma" && opcode.find("mma_async") != opcode.npos) {
        units.multiply_adds += (double)count.warps * multiply_adds(opcode) / 4;  // by one of four warps
    } else if (base == "mma") {
        units.multiply_adds += (double)count.warps * multiply_adds(opcode);
        units.by_warps = true;
    } else if (is_float && is_one_of(base, {"add", "sub", "mul", "fma", "neg", "abs"})) {
        units.fp32 += count.warps;
    } else if (is_one_of(base, {"shfl", "redux"})) {
        units.passes += count.warps, units.least_passes += count.warps;  // on the path to shared memory
    } else if (!is_one_of(
                   base,
                   {"ld",         "st",       "ldmatrix",       "stmatrix",  "cp",     "red", "atom", "bar",
                    "bra",        "barrier",  "mbarrier",       "fence",     "membar", "ret", "exit", "wgmma",
                    "setmaxnreg", "prefetch", "griddepcontrol", "nanosleep", "elect"})) {
        units.integer += count.warps;
    }
    units.passes += count.passes, units.least_passes += count.least_passes;
    units.sectors += count.sectors, units.asked += count.asked;
}

}  // namespace nocard::ptx
