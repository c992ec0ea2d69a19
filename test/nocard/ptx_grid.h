/*
Runs a grid: which blocks are resident at a time, whose turn it is, what happens in between, and when no warp
can continue. The seed draws all that a card leaves open.
*/
#pragma once

#include <cstdlib>

#include "test/nocard/ptx_run.h"

namespace nocard::ptx {

constexpr unsigned most_resident_blocks = 8;  // a card may hold fewer than fit
constexpr int rounds_without_progress = 200;

class GridRun {
public:
    GridRun(const GridCall& call, const Kernel& kernel, uint64_t seed) : kernel_(kernel) {
        grid_.call = &call;
        grid_.kernel = &kernel;
        grid_.random.seed(seed);
        const char* checks = getenv("NOCARD_CHECKS");
        grid_.checks = !checks || std::string_view(checks) != "off";
        grid_.global = std::make_unique<GlobalShadow>();
        grid_.allocations.resize(kernel.code.size());
        if (call.counts_units) grid_.counted.resize(kernel.code.size());
        for (size_t n = 0; n < grid_.counted.size(); n++)
            grid_.counted[n].accesses = moves_memory(kernel.code[n]);
        grid_.parameters.assign(kernel.parameter_bytes + 128, 0);
        auto address = (uintptr_t)grid_.parameters.data();
        grid_.parameter_bytes = grid_.parameters.data() + (128 - address % 128) % 128;
        if (call.parameters.size() < kernel.parameter_bytes) {
            refuse(format("%zu bytes of parameters, of %zu", call.parameters.size(), kernel.parameter_bytes));
        }
        if (kernel.parameter_bytes)
            memcpy(grid_.parameter_bytes, call.parameters.data(), kernel.parameter_bytes);
        const Dim3 &g = call.grid, &b = call.block;
        total_ = (uint64_t)g.x * g.y * g.z;
        threads_ = b.x * b.y * b.z;
        shared_ = kernel.dynamic_shared - shared_begin + call.dynamic_shared;
        check_launch();
        choose_residents();
    }

    void run() {
        int still = 0;
        while (started_ < total_ || !resident_.empty()) {
            while (resident_.size() < residents_ && started_ < total_) start_block();
            uint64_t progress = grid_.progress;
            bool had_its_turn = false;  // a warp could have continued, had its turn been longer
            std::shuffle(resident_.begin(), resident_.end(), grid_.random);
            for (Block* block : resident_) had_its_turn |= run_block(*block);
            end_blocks();
            still = grid_.progress != progress || had_its_turn ? 0 : still + 1;
            if (still < rounds_without_progress) continue;
            // Perhaps the others wait for a block that has not begun, and the card has room for it.
            if (started_ < total_ && residents_ < capacity_)
                residents_++, still = 0;
            else
                report_deadlock();
        }
    }

    GridCounts counts() const {
        GridCounts counts = {grid_.touched.count(false), grid_.touched.count(true)};
        for (size_t n = 0; n < grid_.counted.size(); n++)
            add_to_units(counts.units, kernel_.code[n], grid_.counted[n]);
        counts.units.blocks = (int)(capacity_ / (uint64_t)std::max(grid_.call->card.multiprocessors, 1));
        return counts;
    }

private:
    // ------------------------------------------------------------------------
    // launches that a card refuses

    [[noreturn]] void refuse(const std::string& why) const {
        throw Fault("kernel " + readable_name(kernel_.name) + ": launched with " + why);
    }

    void check_launch() const {
        const GridCall& call = *grid_.call;
        const CardLimits& card = call.card;
        const Dim3 &g = call.grid, &b = call.block;
        if (!total_ || g.y > 65535 || g.z > 65535)
            refuse(format("a grid of %u x %u x %u blocks", g.x, g.y, g.z));
        if (!threads_ || threads_ > 1024 || b.z > 64)
            refuse(format("blocks of %u x %u x %u threads", b.x, b.y, b.z));
        if (kernel_.max_threads && threads_ > (unsigned)kernel_.max_threads) {
            refuse(
                format("%u threads a block; it was compiled for at most %d", threads_, kernel_.max_threads));
        }
        const auto& required = kernel_.required_threads;
        if (required[0] &&
            (b.x != (unsigned)required[0] || b.y != (unsigned)required[1] || b.z != (unsigned)required[2])) {
            refuse(format("blocks of %u x %u x %u threads; it was compiled for %d x %d x %d", b.x, b.y, b.z,
                          required[0], required[1], required[2]));
        }
        if (card.shared_optin && shared_ > card.shared_optin) {
            refuse(
                format("%zu bytes of shared memory a block; the card has %zu", shared_, card.shared_optin));
        }
        uint64_t registers = registers_of_block();
        if (card.registers_per_multiprocessor && registers > (uint64_t)card.registers_per_multiprocessor) {
            refuse(format("%d registers a thread and %u threads a block; the card has %d",
                          call.resources.registers, threads_, card.registers_per_multiprocessor));
        }
    }

    unsigned warps() const { return (threads_ + 31) / 32; }

    // Registers are allocated per warp, in units of 256.
    uint64_t registers_of_block() const {
        uint64_t of_warp = (uint64_t)grid_.call->resources.registers * 32;
        return (of_warp + 255) / 256 * 256 * warps();
    }

    void choose_residents() {
        const CardLimits& card = grid_.call->card;
        uint64_t each = UINT64_MAX;
        auto limit = [&](uint64_t has, uint64_t takes) {
            if (has && takes) each = std::min(each, has / takes);
        };
        limit(card.shared_per_multiprocessor, shared_ + 1024);
        limit((uint64_t)card.threads_per_multiprocessor, 32 * warps());
        limit((uint64_t)card.registers_per_multiprocessor, registers_of_block());
        limit((uint64_t)card.blocks_per_multiprocessor, 1);
        if (each == UINT64_MAX) each = 1;
        each = std::max<uint64_t>(each, 1);
        capacity_ = each * (uint64_t)std::max(card.multiprocessors, 1);
        residents_ = std::min<uint64_t>(capacity_, 1 + grid_.draw(most_resident_blocks));
        in_order_ = grid_.draw(2) == 0;
    }

    // ------------------------------------------------------------------------
    // blocks

    // Blocks begin roughly in the order of their numbers.
    uint64_t next_block() {
        constexpr size_t window = 16;
        if (in_order_) return started_;
        for (; next_ < total_ && waiting_.size() < window; next_++) waiting_.push_back(next_);
        std::swap(waiting_[grid_.draw(waiting_.size())], waiting_.back());
        uint64_t chosen = waiting_.back();
        waiting_.pop_back();
        return chosen;
    }

    void start_block() {
        if (spare_.empty()) {
            blocks_.push_back(std::make_unique<Block>());
            prepare(*blocks_.back());
            spare_.push_back(blocks_.back().get());
        }
        Block& block = *spare_.back();
        spare_.pop_back();
        uint64_t n = next_block();
        started_++;
        const Dim3& g = grid_.call->grid;
        block.at = {(unsigned)(n % g.x), (unsigned)(n / g.x % g.y), (unsigned)(n / g.x / g.y)};
        block.serial = (uint32_t)n + 1;
        block.mbarriers.clear();
        block.mbarriers_made = 0;
        block.named = {};
        block.loads.clear();
        block.free_registers = 0;
        memset(block.shared.data(), 0xff, block.shared.size());
        if (grid_.checks) {
            std::fill(block.shared_history.begin(), block.shared_history.end(), History{});
            std::fill(block.shared_written.begin(), block.shared_written.end(), 0);
        }
        for (Warp& w : block.warps) begin(w);
        resident_.push_back(&block);
        grid_.progress++;
    }

    // Allocates a block, and sets what is the same for all blocks that run in it.
    void prepare(Block& block) {
        block.threads = threads_;
        block.agents = {warps()};
        block.shared.resize(shared_);
        if (grid_.checks) {
            block.shared_history.resize(shared_ / 4 + 1);
            block.shared_written.resize(shared_ / 4 + 1);
        }
        size_t file = (kernel_.file_bytes + 63) / 64 * 64;
        block.files.resize(file * warps() + 64);
        uint8_t* files = block.files.data() + (64 - (uintptr_t)block.files.data() % 64) % 64;
        block.warps.resize(warps());
        for (unsigned n = 0; n < warps(); n++) {
            Warp& w = block.warps[n];
            w.block = &block;
            w.grid = &grid_;
            w.kernel = &kernel_;
            w.file = files + n * file;
            w.index = w.agent = n;
            unsigned here = std::min(32u, threads_ - 32 * n);
            w.lanes = here == 32 ? all_lanes : (1u << here) - 1;
            for (const auto& [number, value] : kernel_.constants) fill(w, number, value);
        }
    }

    void fill(Warp& w, uint32_t number, uint64_t value) const {
        const Register& r = kernel_.registers[number];
        if (r.place == no_operand) return;
        if (r.width == Width::predicate) predicate(w, r.place) = value ? all_lanes : 0;
        for (int l = 0; l < 32; l++) {
            if (r.width == Width::word) words(w, r.place)[l] = (uint32_t)value;
            if (r.width == Width::wide) wides(w, r.place)[l] = value;
        }
    }

    void begin(Warp& w) const {
        w.pc = {};
        w.alive = w.lanes;
        w.waiting = 0;
        w.yielded = w.retry = w.spins = false;
        w.barrier = -1;
        w.registers = (grid_.call->resources.registers + 7) / 8 * 8;
        w.copies.clear(), w.stores.clear(), w.products.clear();
        w.copy_groups = {}, w.store_groups = {};
        w.epoch = 1;
        w.copy_epoch = w.product_epoch = w.store_epoch = 0;
        w.knowledge = {};
        w.knowledge.seen.clock.assign(w.block->agents.count(), 0);
        w.knowledge.async_proxy = w.knowledge.seen.clock;
        w.knowledge.seen.clock[w.agent] = w.epoch;
        if (kernel_.has_products) {
            w.busy_results.assign(kernel_.registers.size(), 0);
            w.busy_sources.assign(kernel_.registers.size(), 0);
            w.set_at.assign(kernel_.registers.size(), 1);
            w.now = 1, w.fenced_at = 0;
        }
        uint64_t undefined = undefined_bits | (uint64_t)undefined_bits << 32;
        for (uint32_t n = 0; n < kernel_.registers.size(); n++) {
            const Register& r = kernel_.registers[n];
            if (r.maybe_undefined && r.set_by_code) fill(w, n, r.width == Width::predicate ? 0 : undefined);
        }
        for (const auto& [number, name] : kernel_.specials) {
            const Register& r = kernel_.registers[number];
            if (r.place == no_operand) continue;
            for (int l = 0; l < 32; l++) words(w, r.place)[l] = special(w, name, (unsigned)l);
        }
    }

    uint32_t special(const Warp& w, const std::string& name, unsigned lane) const {
        const Dim3 &shape = grid_.call->block, &grid = grid_.call->grid, &at = w.block->at;
        unsigned t = 32 * w.index + lane;
        Dim3 thread{t % shape.x, t / shape.x % shape.y, t / shape.x / shape.y};
        auto part = [&](const Dim3& three) {
            return name.back() == 'x' ? three.x : name.back() == 'y' ? three.y : three.z;
        };
        if (name.starts_with("%tid.")) return part(thread);
        if (name.starts_with("%ntid.")) return part(shape);
        if (name.starts_with("%ctaid.")) return part(at);
        if (name.starts_with("%nctaid.")) return part(grid);
        if (name == "%laneid") return lane;
        if (name == "%warpid") return w.index;
        if (name == "%smid") return w.block->serial % (unsigned)std::max(1, grid_.call->card.multiprocessors);
        if (name == "%lanemask_lt") return (1u << lane) - 1;
        if (name == "%dynamic_smem_size") return (uint32_t)grid_.call->dynamic_shared;
        throw Fault("kernel " + readable_name(kernel_.name) + ": nobody taught the interpreter " + name);
    }

    void end_blocks() {
        for (size_t n = resident_.size(); n-- > 0;) {
            Block& block = *resident_[n];
            bool lives = false;
            for (const Warp& w : block.warps) lives |= w.alive != 0;
            if (lives) continue;
            for (Warp& w : block.warps) end_warp(w);
            if (!block.loads.empty()) {
                guarded(block.warps[0],
                        [&] { fault(0, "the block ends while copies to its shared memory are under way"); });
            }
            spare_.push_back(&block);
            resident_.erase(resident_.begin() + (ptrdiff_t)n);
            grid_.progress++;
        }
    }

    // Stores that were not waited for still happen, unless they need shared memory that is gone.
    void end_warp(Warp& w) {
        guarded(w, [&] {
            for (BulkStore& store : w.stores) {
                if (!store.read_waited) {
                    fault(store.lane, "the thread ends while a bulk store may still read shared memory: "
                                      "cp.async.bulk.wait_group is missing");
                }
                perform(w, store);
            }
        });
    }

    template <typename Action>
    static void guarded(Warp& w, Action action) {
        try {
            action();
        } catch (const Reason& reason) {
            report(w, reason);
        }
    }

    // ------------------------------------------------------------------------
    // turns

    // Gives each warp a turn. Returns whether any of them ran without having to wait.
    bool run_block(Block& block) {
        bool had_its_turn = false;
        size_t first = grid_.draw(block.warps.size());
        for (size_t n = 0; n < block.warps.size(); n++) {
            Warp& w = block.warps[(first + n) % block.warps.size()];
            if (grid_.draw(4) == 0) let_something_happen(w);
            if (!w.alive || w.barrier >= 0) continue;
            int turn = 1 << (4 + grid_.draw(8));
            guarded(w, [&] { WarpRun(w, turn).run(); });
            bool waits = w.yielded || w.barrier >= 0;
            had_its_turn |= !waits;
            w.yielded = false;
        }
        return had_its_turn;
    }

    // Performs one of the copies and products in flight.
    void let_something_happen(Warp& w) {
        guarded(w, [&] {
            switch (grid_.draw(4)) {
            case 0:
                if (!w.block->loads.empty()) {
                    size_t n = grid_.draw(w.block->loads.size());
                    bring_one(*w.block, w.block->loads[n].barrier);
                }
                break;
            case 1:
                if (!w.copies.empty()) {
                    Copy& copy = w.copies[grid_.draw(w.copies.size())];
                    if (!copy.done) perform(w, copy);
                }
                break;
            case 2:
                for (Product& product : w.products) {
                    if (product.done) continue;
                    perform(w, product);
                    break;
                }
                break;
            default:
                if (!w.stores.empty()) perform(w, w.stores[grid_.draw(w.stores.size())]);
            }
        });
    }

    // ------------------------------------------------------------------------
    // deadlocks

    std::string what_it_waits_for(const Warp& w) const {
        const Block& block = *w.block;
        if (w.barrier >= 0) {
            const NamedBarrier& barrier = block.named[(size_t)w.barrier];
            return format("in barrier %d, where %d of %d threads have arrived", w.barrier, barrier.arrived,
                          barrier.expected);
        }
        const Instruction& i = kernel_.code[w.at];
        auto found = block.mbarriers.find(w.spun_at);
        std::string mbarrier;
        if (w.spins && found != block.mbarriers.end()) {
            mbarrier = format(
                "; the mbarrier at %u of shared memory, in phase %lu, waits for %d arrivals and %ld bytes",
                w.spun_at - shared_begin, found->second.phase, found->second.pending, found->second.bytes);
        }
        return "at " + describe(grid_, i) + mbarrier;
    }

    [[noreturn]] void report_deadlock() const {
        std::string text = "kernel " + readable_name(kernel_.name) + ": nobody can go on";
        int named = 0;
        std::string last;
        for (const Block* block : resident_) {
            for (const Warp& w : block->warps) {
                if (!w.alive) continue;
                std::string where = what_it_waits_for(w);
                if (where == last || ++named > 6) continue;
                last = where;
                text += format("; block (%u, %u, %u) warp %u waits ", block->at.x, block->at.y, block->at.z,
                               w.index) +
                        where;
            }
        }
        throw Fault(text);
    }

    Grid grid_;
    const Kernel& kernel_;
    uint64_t total_ = 0, started_ = 0, next_ = 0, capacity_ = 1, residents_ = 1;
    unsigned threads_ = 0;
    size_t shared_ = 0;
    bool in_order_ = true;
    std::vector<uint64_t> waiting_;
    std::vector<std::unique_ptr<Block>> blocks_;
    std::vector<Block*> resident_, spare_;
};

}  // namespace nocard::ptx
