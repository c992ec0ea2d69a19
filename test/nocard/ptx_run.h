/*
Runs a warp: which of its lanes continue, where they reconverge, and what an instruction may not do.

Lanes at the same instruction run together, those that are furthest back first, so that lanes that diverged at
a branch reconverge where their paths join. At an instruction that several lanes run as one, they wait for
each other.
*/
#pragma once

#include <cxxabi.h>

#include "test/nocard/ptx_counts.h"
#include "test/nocard/ptx_matrix.h"
#include "test/nocard/ptx_warp.h"

namespace nocard::ptx {

// ----------------------------------------------------------------------------
// reports

inline std::string readable_name(const std::string& mangled) {
    int status = 0;
    char* text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
    std::string name = status == 0 && text ? text : mangled;
    free(text);
    return name;
}

std::string source_of(const Grid& grid, const Instruction& i);  // " (kernels/norm.cuh:12)", or nothing

inline std::string describe(const Grid& grid, const Instruction& i) {
    std::string text(i.text.substr(0, 120));
    for (char& c : text) c = c == '\n' || c == '\t' ? ' ' : c;
    return format("PTX line %u, `%s`", i.line, text.c_str()) + source_of(grid, i);
}

[[noreturn, gnu::cold]] inline void report(const Warp& w, const Reason& reason) {
    const Dim3 &shape = w.grid->call->block, &block = w.block->at;
    unsigned t = 32 * w.index + (unsigned)reason.lane;
    throw Fault(format("kernel %.300s", readable_name(w.kernel->name).c_str()) +
                format(", block (%u, %u, %u), thread (%u, %u, %u): ", block.x, block.y, block.z, t % shape.x,
                       t / shape.x % shape.y, t / shape.x / shape.y) +
                describe(*w.grid, w.kernel->code[w.at]) + ": " + reason.text);
}

// ----------------------------------------------------------------------------
// registers of products

// Called before an instruction of a kernel with products: it may not touch registers of a product in flight.
inline void check_registers(Warp& w, const Instruction& i) {
    if (w.products.empty() || i.run == start_product) return;
    for (uint32_t r : i.uses) {
        if (w.busy_results[r])
            fault(0, "reads a register that a product under way writes: wgmma.wait_group is to come");
    }
    for (uint32_t r : i.sets) {
        if (w.busy_results[r])
            fault(0, "sets a register that a product under way writes: wgmma.wait_group is to come");
        if (w.busy_sources[r])
            fault(0, "sets a register that a product under way reads: wgmma.wait_group is to come");
    }
}

// Called after such an instruction.
inline void note_registers(Warp& w, const Instruction& i) {
    w.now++;
    if (i.run == start_product) return;
    for (uint32_t r : i.sets) w.set_at[r] = w.now;
}

// ----------------------------------------------------------------------------
// lanes that wait for each other

inline uint32_t lanes_at(const Warp& w, uint32_t lanes, uint32_t pc) {
    uint32_t found = 0;
    for (; lanes; lanes &= lanes - 1) {
        int l = first_lane(lanes);
        if (w.pc[(size_t)l] == pc) found |= 1u << l;
    }
    return found;
}

// Returns whether these lanes, which wait at the instruction, are all lanes that it needs.
inline bool all_have_come(Warp& w, const Instruction& i, uint32_t lanes) {
    if (i.role == Role::aligned) return lanes == w.alive;
    uint32_t wanted = words(w, i.members)[first_lane(lanes)];
    uint32_t ready = 0;
    for (uint32_t rest = lanes; rest; rest &= rest - 1) {
        int l = first_lane(rest);
        uint32_t mask = words(w, i.members)[l];
        if (!(mask >> l & 1)) fault(l, format("its mask %#x does not name the lane itself", mask));
        if (mask == wanted) ready |= 1u << l;
    }
    return ready == (wanted & w.alive) && ready == lanes;
}

inline bool is_barrier(const Instruction& i) {
    return i.run == barrier_sync || i.run == barrier_arrive;
}

inline void check_aligned(const Warp& w, const Instruction& i) {
    if (i.role != Role::aligned || is_barrier(i) || w.alive == all_lanes) return;
    fault(first_lane(w.alive),
          format("takes all 32 lanes of the warp, of which %d are there", std::popcount(w.alive)));
}

// No lane of the warp can continue, and none of the instructions has all its lanes.
[[noreturn, gnu::cold]] inline void report_parted(Warp& w) {
    int first = first_lane(w.alive);
    w.at = w.pc[(size_t)first];
    uint32_t here = lanes_at(w, w.alive, w.at), others = w.alive & ~here;
    const Instruction& i = w.kernel->code[w.at];
    if (!others) {
        fault(first, format("its mask names lanes that wait with another mask; lanes %#x are there", here));
    }
    uint32_t elsewhere = w.pc[(size_t)first_lane(others)];
    fault(first,
          format("%s, while lanes %#x wait elsewhere: ",
                 i.role == Role::aligned ? format("takes a whole warp, and is run by lanes %#x", here).c_str()
                                         : format("lanes %#x are there", here).c_str(),
                 others) +
              describe(*w.grid, w.kernel->code[elsewhere]));
}

// ----------------------------------------------------------------------------
// running

class WarpRun {
public:
    WarpRun(Warp& w, int budget) : w_(w), code_(w.kernel->code.data()), budget_(budget) {}

    // Runs until the warp waits, has left, or has had its turn.
    void run() {
        while (budget_ > 0 && w_.alive && w_.barrier < 0 && !w_.yielded) {
            uint32_t ready = w_.alive & ~w_.waiting;
            if (!ready) report_parted(w_);
            choose_group(ready);
            run_group();
        }
    }

private:
    // Chooses the lanes that run together. join_ is the nearest instruction ahead where others wait to run.
    void choose_group(uint32_t ready) {
        uint32_t least = UINT32_MAX, most = 0;
        for (uint32_t rest = ready; rest; rest &= rest - 1) {
            uint32_t pc = w_.pc[(size_t)first_lane(rest)];
            least = std::min(least, pc), most = std::max(most, pc);
        }
        pc_ = least;
        // A warp that polled in vain lets other lanes go first: they may bring what it waits for.
        if (w_.spins && least != most) {
            uint32_t rest = ready;
            for (uint64_t n = w_.grid->draw((uint64_t)std::popcount(ready)); n > 0; n--) rest &= rest - 1;
            pc_ = w_.pc[(size_t)first_lane(rest)];
        }
        w_.spins = false;
        lanes_ = lanes_at(w_, ready, pc_);
        parted_ = lanes_ != w_.alive;
        join_ = UINT32_MAX;
        for (uint32_t rest = ready & ~lanes_; rest; rest &= rest - 1) {
            uint32_t pc = w_.pc[(size_t)first_lane(rest)];
            if (pc > pc_) join_ = std::min(join_, pc);
        }
    }

    void stop_at(uint32_t lanes, uint32_t pc) {
        for (; lanes; lanes &= lanes - 1) w_.pc[(size_t)first_lane(lanes)] = pc;
    }

    void run_group() {
        bool products = w_.kernel->has_products && w_.grid->checks;
        while (budget_-- > 0) {
            const Instruction& i = code_[pc_];
            w_.at = pc_;
            w_.grid->instructions++;
            uint32_t on = lanes_;
            if (i.guard != no_operand)
                on &= i.guard_negated ? ~predicate(w_, i.guard) : predicate(w_, i.guard);
            if (i.role == Role::plain) {
                count_instruction(w_, i, on);
                if (on) {
                    if (products) check_registers(w_, i);
                    i.run(w_, i, on);
                    if (products) note_registers(w_, i);
                }
                pc_++;
                if (w_.yielded || pc_ == join_) break;
            } else if (i.role == Role::branch) {
                count_instruction(w_, i, on);
                uint32_t off = lanes_ & ~on;
                if (on && off) {
                    stop_at(on, (uint32_t)i.target);
                    stop_at(off, pc_ + 1);
                    return;
                }
                pc_ = on ? (uint32_t)i.target : pc_ + 1;
                if (parted_) break;
            } else if (i.role == Role::leave) {
                stop_at(lanes_ & ~on, pc_ + 1);
                leave(on);
                return;
            } else {
                if (!run_together(i, on)) return;
                if (w_.yielded || w_.barrier >= 0 || pc_ == join_) break;
            }
        }
        stop_at(lanes_, pc_);
    }

    // Runs an instruction for several lanes. Returns false if the lanes had to stop; they resume later.
    bool run_together(const Instruction& i, uint32_t on) {
        if (!on) {
            pc_++;
            return true;
        }
        if (on != lanes_ || parted_) {
            stop_at(lanes_ & ~on, pc_ + 1);
            stop_at(on, pc_);
            w_.waiting |= on;
            release(pc_);
            return false;
        }
        if (!all_have_come(w_, i, on)) {
            stop_at(on, pc_);
            w_.waiting |= on;
            return false;
        }
        execute(i, on);
        if (w_.retry) {
            w_.retry = false;
        } else {
            pc_++;
        }
        return true;
    }

    void execute(const Instruction& i, uint32_t lanes) {
        check_aligned(w_, i);
        count_instruction(w_, i, lanes);
        bool products = w_.kernel->has_products && w_.grid->checks;
        if (products) check_registers(w_, i);
        i.run(w_, i, lanes);
        if (products) note_registers(w_, i);
    }

    // Runs the instruction for the lanes that wait there, if all have arrived.
    void release(uint32_t pc) {
        const Instruction& i = code_[pc];
        uint32_t here = lanes_at(w_, w_.waiting, pc);
        if (i.role == Role::meet) {
            // Only those that wait with the same mask.
            uint32_t mask = words(w_, i.members)[first_lane(here)];
            for (uint32_t rest = here; rest; rest &= rest - 1) {
                int l = first_lane(rest);
                if (words(w_, i.members)[l] != mask) here &= ~(1u << l);
            }
        }
        w_.at = pc;
        if (!all_have_come(w_, i, here)) return;
        execute(i, here);
        w_.waiting &= ~here;
        if (w_.retry)
            w_.retry = false;
        else
            stop_at(here, pc + 1);
    }

    void leave(uint32_t lanes) {
        w_.alive &= ~lanes;
        w_.grid->progress++;
        if (!w_.alive) {
            check_barriers_after_leaving(w_);
            return;
        }
        // Other lanes may have waited for these.
        for (uint32_t rest = w_.waiting & w_.alive; rest;) {
            uint32_t pc = w_.pc[(size_t)first_lane(rest)];
            rest &= ~lanes_at(w_, rest, pc);
            release(pc);
        }
    }

    Warp& w_;
    const Instruction* code_;
    int budget_;
    uint32_t pc_ = 0, lanes_ = 0, join_ = 0;
    bool parted_ = false;
};

}  // namespace nocard::ptx
