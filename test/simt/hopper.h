/*
Part of simt.cc: Hopper's barriers and copy engine, the instructions of kernels/ptx_hopper.cuh except wgmma.

A bulk copy owns the bytes that it writes from its start on; they arrive when a thread waits for the copy's
barrier. A bulk store reads its source when it is waited for.

A bulk copy's reads of device memory are recorded when it starts, a bulk store's writes when it is waited for.
Blocks run one after another, so the turn that a block waits for has already come, or never will.
*/
#pragma once

#include "test/simt/cuda.h"

namespace simt {
namespace {

struct HopperBarrier {
    unsigned arrivals, missing;  // arrivals that a phase needs, and that the current one lacks
    int64_t bytes = 0;           // announced but not arrived
    unsigned phase = 0;
    Clock clock = {}, done = {};  // epochs seen by the arrivals so far, and by those of completed phases
    std::vector<Thread*> waiting = {};
    std::vector<BulkCopy> copies = {};
};

struct NamedBarrier {
    unsigned threads = 0, arrived = 0;
    Clock clock = {};
    std::vector<Thread*> waiting = {};
};

std::map<uintptr_t, HopperBarrier> mbarriers;
std::array<NamedBarrier, 16> named_barriers;
std::vector<Thread*> counter_waiters, register_waiters;
constexpr unsigned all_registers = 512;                        // 65,536 of a multiprocessor / 128 threads
std::array<unsigned, Stacks::max_threads / 128> registers_of;  // per thread of a warpgroup
unsigned registers_left;

void start_warpgroups();

void start_hopper() {
    start_warpgroups();
    mbarriers.clear();
    named_barriers = {};
    counter_waiters.clear();
    register_waiters.clear();
    for (Clock& clock : seen_by) clock = {};
    unsigned groups = (block.threads + 127) / 128;
    registers_of.fill(std::min(255u, all_registers / groups / 8 * 8));
    registers_left = 0;
}

void sleep(const char* name, std::vector<Thread*>& among) {
    running->waits_in = name;
    among.push_back(running);
    run_next();
}

void wake(std::vector<Thread*>& waiting) {
    for (Thread* thread : waiting) make_ready(*thread);
    waiting.clear();
}

unsigned warp_number(const Thread& thread) {
    return thread.number / warp_size;
}

// Passes on what the running warp has done and seen. Its later work is not included.
void release(Clock& clock) {
    unsigned warp = warp_number(*running);
    Clock& seen = seen_by[warp];
    seen[warp] = ++running->warp->epoch;
    join(clock, seen);
}

void acquire(const Thread& thread, const Clock& clock) {
    join(seen_by[warp_number(thread)], clock);
}

HopperBarrier& find_barrier(uint64_t* at, const char* name, const void* where) {
    need_shared(at, name, where);
    check(*running, at, 8, 8, Access::atomic, where);
    auto found = mbarriers.find((uintptr_t)at);
    if (found == mbarriers.end())
        fail(Kind::misuse, where, "%s: %s without mbarrier_init", simt::name(*running).text, name);
    return found->second;
}

void end_phase(HopperBarrier& barrier) {
    if (barrier.missing || barrier.bytes) return;
    barrier.phase++;
    barrier.missing = barrier.arrivals;
    barrier.done = barrier.clock;
    wake(barrier.waiting);
}

// Completes the copies that count at a barrier, in an order that the seed determines.
void deliver(HopperBarrier& barrier) {
    while (!barrier.copies.empty()) {
        std::swap(barrier.copies[random((uint32_t)barrier.copies.size())], barrier.copies.back());
        BulkCopy copy = std::move(barrier.copies.back());
        barrier.copies.pop_back();
        for (auto& piece : copy.pieces) {
            if (piece.global)
                memcpy(piece.shared, piece.global, piece.bytes);
            else
                memset(piece.shared, 0, piece.bytes);
            History<Scope::block> history;
            shadow->note((uintptr_t)piece.shared - dynamic_begin, piece.bytes, 16, Access::write, copy.issued,
                         history);
            barrier.bytes -= (int64_t)piece.bytes;
        }
        Clock issued = {};
        issued[warp_of(copy.issued)] = epoch_of(copy.issued) + 1;
        join(barrier.clock, issued);
    }
    end_phase(barrier);
}

void start_load(BulkCopy copy, uint64_t* at, const void* where) {
    HopperBarrier& barrier = find_barrier(at, "a bulk copy", where);
    for (auto& piece : copy.pieces) {
        if (!dynamic_space.holds((uintptr_t)piece.shared))
            fail(Kind::misuse, where, "%s: a bulk copy needs an address in dynamic shared memory",
                 name(*running).text);
        if (piece.global) check(*running, piece.global, piece.bytes, 16, Access::read, where);
        check(*running, piece.shared, piece.bytes, 16, Access::write, where, pending_bit | engine_bit);
    }
    copy.issued = stamp(*running) | engine_bit;
    copy.where = where;
    running->warp->epoch++;
    barrier.copies.push_back(std::move(copy));
    if (!barrier.waiting.empty()) deliver(barrier);
}

// Reads the sources of a group's copies, unless that has been done.
void read_sources(const Thread& thread, BulkGroup& group) {
    if (!group.read.empty()) return;
    for (BulkCopy& copy : group.copies) {
        auto& piece = copy.pieces[0];
        check_engine_read(thread, piece.shared, piece.bytes, copy.where);
        auto* units = (const BulkGroup::Unit*)piece.shared;
        group.read.emplace_back(units, units + piece.bytes / sizeof *units);
    }
}

void write_results(Thread& thread, BulkGroup& group) {
    read_sources(thread, group);
    for (size_t i = 0; i < group.copies.size(); i++) {
        auto& piece = group.copies[i].pieces[0];
        bool add = group.copies[i].add;
        check(thread, piece.global, piece.bytes, 16, add ? Access::atomic : Access::write,
              group.copies[i].where);
        if (add) {
            auto *to = (float*)piece.global, *from = (float*)group.read[i].data();
            for (size_t f = 0; f < piece.bytes / sizeof(float); f++) to[f] += from[f];
        } else {
            memcpy(piece.global, group.read[i].data(), piece.bytes);
        }
    }
}

// Runs at the end of a thread. Its stores must have read shared memory, but their results may be in flight.
void end_stores() {
    for (BulkGroup& group : running->stores) {
        if (group.read.empty() && !group.copies.empty())
            fail(Kind::misuse, group.copies[0].where, "%s ends while a bulk store of it reads shared memory",
                 name(*running).text);
        write_results(*running, group);
    }
}

// Runs at the end of a block.
void end_hopper() {
    for (auto& [at, barrier] : mbarriers) {
        if (!barrier.copies.empty())
            fail(Kind::misuse, barrier.copies[0].where,
                 "the block ends while a bulk copy writes shared memory");
    }
}

}  // namespace

// ----------------------------------------------------------------------------
// barriers

void mbarrier_init(uint64_t* at, int arrivals) {
    const void* where = __builtin_return_address(0);
    need_shared(at, "mbarrier_init", where);
    check(*running, at, 8, 8, Access::write, where);
    if (arrivals < 1)
        fail(Kind::misuse, where, "%s: mbarrier_init for %d arrivals", name(*running).text, arrivals);
    mbarriers[(uintptr_t)at] = {(unsigned)arrivals, (unsigned)arrivals};
}

void mbarrier_arrive(uint64_t* at, int bytes) {
    const void* where = __builtin_return_address(0);
    HopperBarrier& barrier = find_barrier(at, "mbarrier_arrive", where);
    if (barrier.missing == 0)
        fail(Kind::misuse, where, "%s: mbarrier_arrive more often than the phase expects",
             name(*running).text);
    release(barrier.clock);
    barrier.missing--;
    barrier.bytes += bytes;
    end_phase(barrier);
}

void mbarrier_wait(uint64_t* at, int phase) {
    HopperBarrier& barrier = find_barrier(at, "mbarrier_wait", __builtin_return_address(0));
    for (;;) {
        if ((barrier.phase & 1) != (unsigned)phase) break;
        deliver(barrier);
        if ((barrier.phase & 1) != (unsigned)phase) break;
        sleep("mbarrier_wait", barrier.waiting);
    }
    acquire(*running, barrier.done);
}

void named_barrier(int id, int count, bool wait) {
    const void* where = __builtin_return_address(0);
    if (id < 1 || id > 15 || count % (int)warp_size != 0)
        fail(Kind::misuse, where, "%s: named barrier %d of %d threads", name(*running).text, id, count);
    NamedBarrier& barrier = named_barriers[id];
    if (barrier.arrived && barrier.threads != (unsigned)count)
        fail(Kind::misuse, where, "%s: named barrier %d of %d threads, of %u to others", name(*running).text,
             id, count, barrier.threads);
    barrier.threads = (unsigned)count;
    release(barrier.clock);
    if (++barrier.arrived == barrier.threads) {
        for (Thread* thread : barrier.waiting) acquire(*thread, barrier.clock);
        if (wait) acquire(*running, barrier.clock);
        wake(barrier.waiting);
        barrier.arrived = 0;
    } else if (wait) {
        sleep("a named barrier", barrier.waiting);
    }
}

void fence_async() {
    running->warp->epoch++;
    running->fenced = stamp(*running);
}

unsigned counter_now(const unsigned* counter) {
    check(*running, counter, 4, 4, Access::atomic, __builtin_return_address(0));
    running->looked_at = counter;
    return *counter;
}

void counter_wait(const unsigned* counter, unsigned value, unsigned seen) {
    const void* where = __builtin_return_address(0);
    check(*running, counter, 4, 4, Access::atomic, where);
    // A real device trusts the caller here.
    if (seen == value && running->looked_at != counter)
        fail(Kind::misuse, where, "%s: counter_wait with what another counter said", name(*running).text);
    while (*counter != value) sleep("counter_wait", counter_waiters);
    take_past((uintptr_t)counter);
}

void counter_set(unsigned* counter, unsigned value) {
    check(*running, counter, 4, 4, Access::atomic, __builtin_return_address(0));
    *counter = value;
    leave_past((uintptr_t)counter, false);
    wake(counter_waiters);
}

// ----------------------------------------------------------------------------
// the copy engine

void copy_box(void* to, const void* map_at, std::array<int, 4> at, uint64_t* barrier) {
    const void* where = __builtin_return_address(0);
    TensorMap map;
    memcpy(&map, map_at, sizeof map);
    const char* wrong = map.is_map != TensorMap::magic ? "a tensor map that was not made"
                        : map.rank != 4                ? "a tensor map of other than four dimensions"
                        : (uintptr_t)to % 128 != 0     ? "an address that is not a multiple of 128"
                        : map.swizzle_bytes && map.box[0] * map.element != map.swizzle_bytes
                            ? "a box that is not as wide as its swizzle, which is not simulated"
                            : nullptr;
    if (wrong) fail(Kind::misuse, where, "%s: copy_box with %s", name(*running).text, wrong);
    BulkCopy copy = {};
    size_t width = map.box[0] * map.element, offset = 0;
    uintptr_t swizzle = map.swizzle_bytes ? map.swizzle_bytes / 16 - 1 : 0;
    for (int w = 0; w < map.box[3]; w++)
        for (int z = 0; z < map.box[2]; z++)
            for (int y = 0; y < map.box[1]; y++)
                for (size_t x = 0; x < width; x += 16, offset += 16) {
                    std::array<int64_t, 4> element = {at[0] + (int64_t)x / map.element, at[1] + y, at[2] + z,
                                                      at[3] + w};
                    uint8_t* from = map.address + element[0] * map.element;
                    bool inside = true;
                    for (int i = 0; i < 4; i++) {
                        inside &= element[i] >= 0 && element[i] < map.dim[i];
                        if (i) from += element[i] * (int64_t)map.stride[i - 1];
                    }
                    uintptr_t target = (uintptr_t)to + offset;
                    target ^= (target >> 7 & swizzle) << 4;
                    copy.pieces.push_back({(void*)target, inside ? from : nullptr, 16});
                }
    start_load(std::move(copy), barrier, where);
}

void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
    const void* where = __builtin_return_address(0);
    if (((uintptr_t)to | (uintptr_t)from | (unsigned)bytes) % 16 != 0)
        fail(Kind::misaligned, where, "%s: bulk_load of %d bytes from %p to %p: not multiples of 16",
             name(*running).text, bytes, from, to);
    BulkCopy copy = {};
    copy.pieces.push_back({to, (void*)from, (size_t)bytes});
    start_load(std::move(copy), barrier, where);
}

void bulk_store(void* to, const void* from, int bytes, bool add) {
    const void* where = __builtin_return_address(0);
    if (((uintptr_t)to | (uintptr_t)from | (unsigned)bytes) % 16 != 0)
        fail(Kind::misaligned, where, "%s: a bulk store of %d bytes from %p to %p: not multiples of 16",
             name(*running).text, bytes, from, to);
    if (running->stores.empty()) running->stores.emplace_back();
    running->stores.back().copies.push_back(
        {{{const_cast<void*>(from), to, (size_t)bytes}}, add, stamp(*running), where});
}

void bulk_commit() {
    if (running->stores.empty()) running->stores.emplace_back();
    running->stores.emplace_back();
}

// Waits for all but the `pending` youngest committed groups; the last group is the open one.
void bulk_wait(int pending, bool only_read) {
    auto& groups = running->stores;
    if (only_read) {
        for (int i = 0; i + pending + 1 < (int)groups.size(); i++) read_sources(*running, groups[i]);
    } else {
        while ((int)groups.size() > pending + 1) {
            write_results(*running, groups.front());
            groups.erase(groups.begin());
        }
    }
    running->warp->epoch++;
}

}  // namespace simt
