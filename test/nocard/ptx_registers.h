/*
Places registers in a warp's file. nvcc writes a new register for nearly every result, thousands in a large
kernel. Registers that are not live at the same time share space, so that a warp's file stays in the cache.

Liveness also finds the registers that some path reads before they are set; these start as `undefined_bits`.
*/
#pragma once

#include <algorithm>
#include <queue>

#include "test/nocard/ptx_kernel.h"

namespace nocard::ptx {

// The content of an unset register: as a float, a NaN that no arithmetic produces.
constexpr uint32_t undefined_bits = 0x7fa5dead;

class RegisterPlacement {
public:
    explicit RegisterPlacement(Kernel& kernel)
        : kernel_(kernel), words_((kernel.registers.size() + 63) / 64) {}

    void place() {
        find_blocks();
        find_liveness();
        find_intervals();
        assign();
        patch();
    }

private:
    using Bits = std::vector<uint64_t>;
    struct Block {
        size_t begin, end;
        std::vector<size_t> next;
        Bits live_in, live_out;
    };

    static bool get(const Bits& bits, uint32_t i) { return bits[i / 64] >> i % 64 & 1; }
    static void set(Bits& bits, uint32_t i) { bits[i / 64] |= 1ull << i % 64; }
    static void clear(Bits& bits, uint32_t i) { bits[i / 64] &= ~(1ull << i % 64); }

    // An instruction that only some lanes run leaves the old value in the others.
    static bool is_certain(const Instruction& i) { return i.guard == no_operand; }

    void find_blocks() {
        const auto& code = kernel_.code;
        std::vector<bool> begins(code.size() + 1);
        begins[0] = begins[code.size()] = true;
        for (size_t i = 0; i < code.size(); i++) {
            if (code[i].role == Role::branch) begins[(size_t)code[i].target] = begins[i + 1] = true;
            if (code[i].role == Role::leave) begins[i + 1] = true;
        }
        std::vector<size_t> block_of(code.size() + 1);
        for (size_t i = 0; i < code.size(); i++) {
            if (begins[i]) blocks_.push_back({i, i, {}, Bits(words_), Bits(words_)});
            block_of[i] = blocks_.size() - 1;
            blocks_.back().end = i + 1;
        }
        for (size_t b = 0; b < blocks_.size(); b++) {
            const Instruction& last = code[blocks_[b].end - 1];
            bool falls_through = last.role == Role::plain || last.role == Role::meet ||
                                 last.role == Role::aligned || !is_certain(last);
            if (falls_through && blocks_[b].end < code.size()) blocks_[b].next.push_back(b + 1);
            if (last.role == Role::branch && (size_t)last.target < code.size()) {
                blocks_[b].next.push_back(block_of[(size_t)last.target]);
            }
        }
    }

    // Steps backwards over an instruction.
    void step_back(Bits& live, const Instruction& i) const {
        if (is_certain(i)) {
            for (uint32_t r : i.sets) clear(live, r);
        }
        for (uint32_t r : i.uses) set(live, r);
    }

    void find_liveness() {
        for (bool changed = true; changed;) {
            changed = false;
            for (size_t b = blocks_.size(); b-- > 0;) {
                Block& block = blocks_[b];
                Bits live(words_);
                for (size_t next : block.next) {
                    for (size_t w = 0; w < words_; w++) live[w] |= blocks_[next].live_in[w];
                }
                block.live_out = live;
                for (size_t i = block.end; i-- > block.begin;) step_back(live, kernel_.code[i]);
                if (live != block.live_in) block.live_in = std::move(live), changed = true;
            }
        }
        for (uint32_t r = 0; r < kernel_.registers.size() && !blocks_.empty(); r++) {
            kernel_.registers[r].maybe_undefined = get(blocks_[0].live_in, r);
        }
    }

    struct Interval {
        size_t from = SIZE_MAX, to = 0;
        uint32_t number = 0;
        void cover(size_t at) { from = std::min(from, at), to = std::max(to, at); }
    };

    void find_intervals() {
        intervals_.resize(kernel_.registers.size());
        for (uint32_t r = 0; r < intervals_.size(); r++) intervals_[r].number = r;
        for (const Block& block : blocks_) {
            for (uint32_t r = 0; r < intervals_.size(); r++) {
                if (get(block.live_in, r)) intervals_[r].cover(block.begin);
                if (get(block.live_out, r)) intervals_[r].cover(block.end);
            }
            for (size_t i = block.begin; i < block.end; i++) {
                const Instruction& instruction = kernel_.code[i];
                for (uint32_t r : instruction.uses) intervals_[r].cover(i);
                for (uint32_t r : instruction.sets) intervals_[r].cover(i), intervals_[r].cover(i + 1);
                // A product in flight reads and writes its registers later than other instructions do.
                if (instruction.text.find("wgmma.mma_async") != instruction.text.npos) {
                    for (uint32_t r : instruction.uses)
                        intervals_[r].cover(0), intervals_[r].cover(SIZE_MAX / 2);
                }
            }
        }
        for (Interval& interval : intervals_) {
            const Register& r = kernel_.registers[interval.number];
            if (!r.set_by_code || r.maybe_undefined) interval.from = 0, interval.to = SIZE_MAX / 2;
        }
    }

    static size_t bytes(Width width) { return width == Width::wide ? 256 : width == Width::word ? 128 : 4; }

    void assign() {
        // Constants come first: they are set once for all blocks that a warp of the interpreter runs.
        auto take = [&](Register& r) {
            r.place = (uint32_t)kernel_.file_bytes;
            kernel_.file_bytes += r.width == Width::predicate ? 64 : bytes(r.width);
        };
        std::vector<Interval> order;
        for (const Interval& interval : intervals_) {
            if (interval.from == SIZE_MAX) continue;
            if (kernel_.registers[interval.number].set_by_code)
                order.push_back(interval);
            else
                take(kernel_.registers[interval.number]);
        }
        std::sort(order.begin(), order.end(),
                  [](const Interval& a, const Interval& b) { return a.from < b.from; });
        auto later = [](const Interval& a, const Interval& b) { return a.to > b.to; };
        std::priority_queue<Interval, std::vector<Interval>, decltype(later)> alive(later);
        std::map<Width, std::vector<uint32_t>> free;
        for (const Interval& interval : order) {
            for (; !alive.empty() && alive.top().to < interval.from; alive.pop()) {
                const Register& ended = kernel_.registers[alive.top().number];
                free[ended.width].push_back(ended.place);
            }
            Register& r = kernel_.registers[interval.number];
            auto& places = free[r.width];
            if (places.empty())
                take(r);
            else
                r.place = places.back(), places.pop_back();
            alive.push(interval);
        }
    }

    void patch() {
        auto placed = [&](uint32_t& operand) {
            if (operand != no_operand) operand = kernel_.registers[operand].place;
        };
        for (Instruction& i : kernel_.code) {
            for (uint32_t* operand : {&i.guard, &i.d, &i.a, &i.b, &i.c, &i.second, &i.members})
                placed(*operand);
            for (uint32_t& operand : i.list) placed(operand);
            for (uint32_t& operand : i.list2) placed(operand);
        }
    }

    Kernel& kernel_;
    size_t words_;
    std::vector<Block> blocks_;
    std::vector<Interval> intervals_;
};

}  // namespace nocard::ptx
