/*
Work that happens later than it is issued: cp.async, the copy engine's loads, stores and sums, and mbarriers,
which count arrivals and bytes.

The seed draws when a copy happens: at once, when it is waited for, or whenever the scheduler picks it. Its
accesses are checked when it is issued, and recorded as those of a separate agent, whose work counts as done
only for those that waited for it.
*/
#pragma once

#include "test/nocard/ptx_memory.h"

namespace nocard::ptx {

inline bool happens_at_once(Warp& w) {
    return w.grid->draw(3) == 0;
}

// ----------------------------------------------------------------------------
// cp.async

inline void perform(Warp& w, Copy& copy) {
    char* to = w.block->shared_at(copy.shared);
    if (copy.from_global) memcpy(to, copy.global, copy.from_global);
    memset(to + copy.from_global, 0, copy.bytes - copy.from_global);
    copy.done = true;
    w.grid->progress++;
}

inline void copy_async(Warp& w, const Instruction& i, uint32_t lanes) {
    uint32_t bytes = (uint32_t)i.value;
    each_lane(lanes, [&](int l) {
        uint32_t to = (uint32_t)(address_in(w, i.d, i.widths[0] == Width::wide, l) + (uint64_t)i.target);
        uint64_t from = wides(w, i.a)[l] + (uint64_t)i.offset;
        uint32_t taken = i.b == no_operand ? bytes : words(w, i.b)[l];
        if (taken > bytes) fault(l, format("copies %u bytes of %u", taken, bytes));
        if (to % bytes) fault(l, format("shared address %#x is not a multiple of %u", to, bytes));
        if (from % bytes && taken) fault(l, format("address %#lx is not a multiple of %u", from, bytes));
        shared_place(w, l, to, bytes);
        Toucher who{w, l, w.block->agents.copies_of(w.index), w.copy_epoch + 1};
        if (taken) {
            global_place(w, l, from, taken, true);
            note_global(who, from, taken, Access::read);
        }
        note_shared(who, to, bytes, Access::write);
        w.copies.push_back(
            {to, (const char*)from, bytes, taken, l, w.copy_groups[(size_t)l], w.copy_epoch + 1});
        if (happens_at_once(w)) perform(w, w.copies.back());
    });
}

inline void commit_copies(Warp& w, const Instruction&, uint32_t lanes) {
    each_lane(lanes, [&](int l) { w.copy_groups[(size_t)l]++; });
    w.copy_epoch++;
}

// value: how many groups may still be in flight; -1: wait_all, which needs no commit
inline void wait_for_copies(Warp& w, const Instruction& i, uint32_t lanes) {
    uint32_t pending_epoch = w.copy_epoch + (i.value < 0 ? 2 : 1);
    auto waited = [&](Copy& copy) {
        bool covered = lanes >> copy.lane & 1 &&
                       (i.value < 0 || copy.group + (uint64_t)i.value < w.copy_groups[(size_t)copy.lane]);
        if (!covered) {
            pending_epoch = std::min(pending_epoch, copy.epoch);
        } else if (!copy.done) {
            perform(w, copy);
        }
        return covered;
    };
    w.copies.erase(std::remove_if(w.copies.begin(), w.copies.end(), waited), w.copies.end());
    if (i.value < 0) w.copy_epoch++;
    uint32_t& seen = w.knowledge.seen.clock[w.block->agents.copies_of(w.index)];
    seen = std::max(seen, pending_epoch - 1);
}

// ----------------------------------------------------------------------------
// mbarriers

inline Mbarrier& mbarrier_at(Warp& w, int lane, uint32_t address) {
    if (address % 8) fault(lane, format("mbarrier address %#x is not a multiple of 8", address));
    shared_place(w, lane, address, 8);
    auto found = w.block->mbarriers.find(address);
    if (found == w.block->mbarriers.end()) {
        fault(lane, format("there is no mbarrier at %u of shared memory: nobody initialised it",
                           address - shared_begin));
    }
    return found->second;
}

// An access to an mbarrier must be ordered after its initialization.
inline void note_mbarrier(Warp& w, int lane, uint32_t address) {
    if (!w.grid->checks) return;
    Toucher who = Toucher::warp_itself(w, lane);
    who.strong = true;
    Check check(who, Access::read, "mbarrier in shared");
    each_word(address - shared_begin, 8,
              [&](uint64_t i, unsigned mask) { check.word(w.block->shared_history[i], mask, i * 4); });
}

inline void settle(Warp& w, int lane, Mbarrier& barrier) {
    if (barrier.pending < 0) fault(lane, "more arrivals at an mbarrier than its phase expects");
    if (std::abs(barrier.bytes) >= 1 << 20) fault(lane, "an mbarrier cannot count so many bytes");
    if (barrier.pending > 0 || barrier.bytes != 0) return;
    barrier.phase++;
    barrier.pending = barrier.expected;
    barrier.completed = barrier.arrived;
    w.grid->progress++;
}

inline uint32_t mbarrier_address(Warp& w, const Instruction& i, int lane) {
    return (uint32_t)(address_in(w, i.a, i.wide_address, lane) + (uint64_t)i.offset);
}

inline void mbarrier_init(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        uint32_t address = mbarrier_address(w, i, l);
        if (address % 8) fault(l, format("mbarrier address %#x is not a multiple of 8", address));
        shared_place(w, l, address, 8);
        note_shared(Toucher::warp_itself(w, l), address, 8, Access::write);
        int count = (int)words(w, i.b)[l];
        if (count < 1 || count >= 1 << 20) fault(l, format("an mbarrier of %d arrivals", count));
        Mbarrier& barrier = w.block->mbarriers[address];
        barrier.number = w.block->mbarriers_made++;
        barrier.expected = barrier.pending = count;
    });
}

inline void mbarrier_invalidate(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        uint32_t address = mbarrier_address(w, i, l);
        mbarrier_at(w, l, address);
        w.block->mbarriers.erase(address);
        for (const Load& load : w.block->loads) {
            if (load.barrier == address) fault(l, "ends an mbarrier that copies under way will count at");
        }
    });
}

// value: bit 0: announces bytes; bit 1: arrives. b: the bytes; c: the count of arrivals
inline void mbarrier_arrive(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        uint32_t address = mbarrier_address(w, i, l);
        Mbarrier& barrier = mbarrier_at(w, l, address);
        note_mbarrier(w, l, address);
        if (i.d != no_operand) wides(w, i.d)[l] = barrier.phase;
        if (i.value & 1) barrier.bytes += (int32_t)words(w, i.b)[l];
        if (i.value & 2) {
            barrier.arrived.join(w.knowledge);
            barrier.pending -= i.c == no_operand ? 1 : (int)words(w, i.c)[l];
        }
        settle(w, l, barrier);
    });
    w.next_epoch();
    w.grid->progress++;
}

// Performs one of the copies that this mbarrier waits for.
inline void bring_one(Block& block, uint32_t barrier) {
    for (size_t k = 0; k < block.loads.size(); k++) {
        if (block.loads[k].barrier != barrier) continue;
        Load load = std::move(block.loads[k]);
        block.loads.erase(block.loads.begin() + (ptrdiff_t)k);
        load.bring();
        return;
    }
}

// value: 1 if the phase is given by its parity, 0 if by the result of an arrival
inline void mbarrier_test(Warp& w, const Instruction& i, uint32_t lanes) {
    uint32_t ended = 0;
    each_lane(lanes, [&](int l) {
        uint32_t address = mbarrier_address(w, i, l);
        Mbarrier& barrier = mbarrier_at(w, l, address);
        note_mbarrier(w, l, address);
        auto has_ended = [&] {
            return i.value ? (barrier.phase & 1) != (words(w, i.b)[l] & 1) : barrier.phase > wides(w, i.b)[l];
        };
        // Polling an mbarrier makes its late copies happen, sooner or later.
        if (!has_ended() && w.grid->draw(3) == 0) bring_one(*w.block, address);
        if (has_ended()) {
            ended |= 1u << l;
            w.knowledge.join(barrier.completed);
            uint32_t& seen = w.knowledge.seen.clock[w.block->agents.of_mbarrier(barrier.number)];
            seen = std::max(seen, (uint32_t)barrier.phase);
        }
        w.spun_at = address;
    });
    w.next_epoch();
    set_predicate(w, i.d, lanes, ended);
    if (ended != lanes) w.yielded = w.spins = true;
}

inline void decode_mbarrier(Decoding& x) {
    Instruction& i = x.to;
    if (x.has("shared::cluster") || x.has("noComplete")) x.unknown();
    if (x.has("init") || x.has("inval")) {
        x.address(x.operand(0), Space::shared);
        if (x.has("init")) i.b = x.source(1);
        i.run = x.has("init") ? mbarrier_init : mbarrier_invalidate;
    } else if (x.has("test_wait") || x.has("try_wait")) {
        i.value = x.has("parity");
        i.d = x.result(0);
        x.address(x.operand(1), Space::shared);
        i.b = x.source(2, i.value ? Width::word : Width::wide);
        i.run = mbarrier_test;
    } else if (x.has("arrive") || x.word(1) == "expect_tx") {
        bool arrives = x.has("arrive"), announces = x.has("expect_tx");
        size_t at = arrives ? 1 : 0;
        if (arrives && x.operand(0) != "_") i.d = x.result(0);
        x.address(x.operand(at), Space::shared);
        if (announces)
            i.b = x.source(at + 1);
        else if (x.operands.size() > at + 1)
            i.c = x.source(at + 1);
        i.value = announces | arrives << 1;
        i.run = mbarrier_arrive;
    } else {
        x.unknown();
    }
}

// ----------------------------------------------------------------------------
// the copy engine: from global to shared memory

// The copies count for the phase that is now open.
inline Toucher copy_engine(Warp& w, int lane, const Mbarrier& barrier) {
    return {w, lane, w.block->agents.of_mbarrier(barrier.number), (uint32_t)barrier.phase + 1, true};
}

inline void start_load(Warp& w, int lane, uint32_t barrier, int64_t bytes, std::function<void()> move) {
    Block* block = w.block;
    Warp* warp = &w;
    auto bring = [=] {
        move();
        auto found = block->mbarriers.find(barrier);
        if (found == block->mbarriers.end()) fault(lane, "a copy ends whose mbarrier is no more");
        found->second.bytes -= bytes;
        warp->grid->progress++;
        settle(*warp, lane, found->second);
    };
    if (happens_at_once(w))
        bring();
    else
        block->loads.push_back({barrier, bytes, bring});
}

inline void check_bulk(int lane, uint32_t shared, uint64_t global, uint32_t bytes) {
    if (shared % 16) fault(lane, format("shared address %#x is not a multiple of 16", shared));
    if (global % 16) fault(lane, format("address %#lx is not a multiple of 16", global));
    if (bytes % 16) fault(lane, format("copies %u bytes, which is no multiple of 16", bytes));
}

inline void bulk_load(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        uint32_t to = words(w, i.d)[l] + (uint32_t)i.target, bytes = words(w, i.b)[l];
        uint64_t from = wides(w, i.a)[l] + (uint64_t)i.offset;
        uint32_t barrier = words(w, i.c)[l] + (uint32_t)i.value;
        check_bulk(l, to, from, bytes);
        char* place = shared_place(w, l, to, bytes);
        const char* source = global_place(w, l, from, bytes, true);
        Toucher who = copy_engine(w, l, mbarrier_at(w, l, barrier));
        note_mbarrier(w, l, barrier);
        note_global(who, from, bytes, Access::read);
        note_shared(who, to, bytes, Access::write);
        start_load(w, l, barrier, bytes, [=] { memcpy(place, source, bytes); });
    });
}

// Visits a box of a tensor by rows of consecutive elements: calls row(offset in the box, address, from, to);
// elements [from, to) of the row are inside the tensor.
template <typename Row>
void each_row_of_box(const TensorMap& map, const std::array<int, 5>& corner, Row row) {
    std::array<int, 5> box{1, 1, 1, 1, 1};
    for (unsigned k = 0; k < map.rank; k++) box[k] = map.box[k];
    uint32_t offset = 0;
    std::array<int, 5> at{};
    for (at[4] = 0; at[4] < box[4]; at[4]++)
        for (at[3] = 0; at[3] < box[3]; at[3]++)
            for (at[2] = 0; at[2] < box[2]; at[2]++)
                for (at[1] = 0; at[1] < box[1]; at[1]++) {
                    bool inside = true;
                    int64_t address = (int64_t)map.address;
                    for (unsigned k = 1; k < map.rank; k++) {
                        int64_t x = (int64_t)corner[k] + at[k];
                        inside &= x >= 0 && x < (int64_t)map.size[k];
                        address += x * (int64_t)map.stride[k - 1];
                    }
                    int64_t from = std::clamp<int64_t>(-(int64_t)corner[0], 0, box[0]);
                    int64_t to = std::clamp<int64_t>((int64_t)map.size[0] - corner[0], from, box[0]);
                    if (!inside) to = from;
                    row(offset, address + (int64_t)corner[0] * map.element_bytes, (uint32_t)from,
                        (uint32_t)to);
                    offset += (uint32_t)box[0] * map.element_bytes;
                }
}

// Permutes the 16-byte units of each 128 bytes: XORs 1, 2 or 3 bits of the unit's index, by swizzle, with
// higher address bits.
inline uint32_t swizzled(uint32_t address, unsigned swizzle) {
    uint32_t bits = swizzle == 3 ? 7 : swizzle == 2 ? 3 : swizzle == 1 ? 1 : 0;
    return address ^ (address >> 7 & bits) << 4;
}

// Calls piece(shared address, offset in the row, bytes) for each part that swizzling leaves contiguous.
template <typename Piece>
void each_unit(uint32_t address, uint32_t from, uint32_t to, unsigned swizzle, Piece piece) {
    while (from < to) {
        uint32_t bytes = std::min(to - from, 16 - (address + from) % 16);
        piece(swizzled(address + from, swizzle), from, bytes);
        from += bytes;
    }
}

// A tensor map, the corner of the box in it, and the bytes that are moved, all checked.
struct Box {
    TensorMap map;
    std::array<int, 5> corner{};
    uint32_t shared, bytes;
};

inline Box find_box(Warp& w, const Instruction& i, int lane, uint32_t shared) {
    Box box;
    uint64_t address = wides(w, i.a)[lane];
    if (address % 64) fault(lane, format("the tensor map's address %#lx is not a multiple of 64", address));
    const char* at = (const char*)address;
    if (address & parameter_window) {
        address -= parameter_window;
        if (address + 128 > w.kernel->parameter_bytes) fault(lane, "the tensor map is beyond the parameters");
        at = (const char*)w.grid->parameter_bytes + address;
    } else {
        global_place(w, lane, address, 128);
    }
    memcpy(&box.map, at, sizeof box.map);
    const TensorMap& map = box.map;
    if (map.magic != TensorMap::magic_number) fault(lane, "this is no tensor map that the driver made");
    if (map.rank != i.list.size()) {
        fault(lane, format("the tensor map has %d dimensions, the copy %zu", map.rank, i.list.size()));
    }
    if (map.interleave || map.swizzle > 3) fault(lane, "nobody taught the interpreter this tensor map");
    box.bytes = map.element_bytes;
    for (unsigned k = 0; k < map.rank; k++) {
        box.corner[k] = (int)words(w, i.list[k])[lane];
        box.bytes *= map.box[k];
        if (map.element_stride[k] != 1) fault(lane, "nobody taught the interpreter strides of elements");
    }
    uint32_t width = 16u << map.swizzle;
    if (map.swizzle && map.box[0] * map.element_bytes > width) {
        fault(lane, format("the box's rows of %d bytes are wider than the swizzle",
                           map.box[0] * map.element_bytes));
    }
    if (shared % 128) fault(lane, format("shared address %#x is not a multiple of 128", shared));
    box.shared = shared;
    shared_place(w, lane, shared, box.bytes);
    return box;
}

inline void tensor_load(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        Box box = find_box(w, i, l, words(w, i.d)[l] + (uint32_t)i.target);
        uint32_t barrier = words(w, i.b)[l] + (uint32_t)i.value;
        Toucher who = copy_engine(w, l, mbarrier_at(w, l, barrier));
        note_mbarrier(w, l, barrier);
        uint32_t element = box.map.element_bytes;
        each_row_of_box(box.map, box.corner, [&](uint32_t, int64_t address, uint32_t from, uint32_t to) {
            if (from == to) return;
            uint64_t begin = (uint64_t)address + from * element;
            global_place(w, l, begin, (to - from) * element, true);
            note_global(who, begin, (to - from) * element, Access::read);
        });
        note_shared(who, box.shared, box.bytes, Access::write);
        Block* block = w.block;
        start_load(w, l, barrier, box.bytes, [=] {
            uint32_t width = box.map.box[0] * element;
            each_row_of_box(box.map, box.corner,
                            [&](uint32_t offset, int64_t address, uint32_t from, uint32_t to) {
                                std::array<char, 256 * 8> row;
                                memset(row.data(), box.map.fill ? 0xff : 0, width);
                                if (from < to)
                                    memcpy(&row[from * element], (const char*)address + from * element,
                                           (to - from) * element);
                                each_unit(box.shared + offset, 0, width, box.map.swizzle,
                                          [&](uint32_t at, uint32_t k, uint32_t n) {
                                              memcpy(block->shared_at(at), &row[k], n);
                                          });
                            });
        });
    });
}

// ----------------------------------------------------------------------------
// the copy engine: from shared to global memory

inline void read_source(Warp& w, BulkStore& store) {
    if (store.has_read) return;
    for (const auto& piece : store.pieces) {
        const char* from = w.block->shared_at(piece.shared);
        store.taken.insert(store.taken.end(), from, from + piece.bytes);
    }
    store.has_read = true;
}

inline void perform(Warp& w, BulkStore& store) {
    if (store.done) return;
    read_source(w, store);
    const uint8_t* from = store.taken.data();
    for (const auto& piece : store.pieces) {
        if (!store.adds) {
            memcpy(piece.global, from, piece.bytes);
        } else {
            for (uint32_t k = 0; k < piece.bytes; k += 4) {
                float sum, term;
                memcpy(&sum, piece.global + k, 4), memcpy(&term, from + k, 4);
                sum += term;
                memcpy(piece.global + k, &sum, 4);
            }
        }
        from += piece.bytes;
    }
    store.done = true;
    w.grid->progress++;
}

inline void start_store(Warp& w, int lane, std::vector<BulkStore::Piece> pieces, bool adds) {
    const Agents& agents = w.block->agents;
    uint32_t epoch = w.store_epoch + 1;
    for (const auto& piece : pieces) {
        global_place(w, lane, (uint64_t)piece.global, piece.bytes, true);
        note_shared({w, lane, agents.store_reads_of(w.index), epoch, true}, piece.shared, piece.bytes,
                    Access::read);
        note_global({w, lane, agents.store_writes_of(w.index), epoch, true, adds}, (uint64_t)piece.global,
                    piece.bytes, adds ? Access::atomic : Access::write);
    }
    w.stores.push_back({std::move(pieces), adds, lane, w.store_groups[(size_t)lane], epoch, {}});
    if (happens_at_once(w))
        perform(w, w.stores.back());
    else if (happens_at_once(w))
        read_source(w, w.stores.back());
}

inline void bulk_store(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        uint64_t to = wides(w, i.d)[l] + (uint64_t)i.target;
        uint32_t from = words(w, i.a)[l] + (uint32_t)i.offset, bytes = words(w, i.b)[l];
        check_bulk(l, from, to, bytes);
        shared_place(w, l, from, bytes);
        start_store(w, l, {{from, (char*)to, bytes}}, i.value);
    });
}

inline void tensor_store(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        Box box = find_box(w, i, l, words(w, i.d)[l] + (uint32_t)i.target);
        std::vector<BulkStore::Piece> pieces;
        uint32_t element = box.map.element_bytes;
        each_row_of_box(box.map, box.corner,
                        [&](uint32_t offset, int64_t address, uint32_t from, uint32_t to) {
                            each_unit(box.shared + offset, from * element, to * element, box.map.swizzle,
                                      [&](uint32_t at, uint32_t k, uint32_t n) {
                                          pieces.push_back({at, (char*)address + k, n});
                                      });
                        });
        start_store(w, l, std::move(pieces), i.value);
    });
}

inline void commit_stores(Warp& w, const Instruction&, uint32_t lanes) {
    each_lane(lanes, [&](int l) { w.store_groups[(size_t)l]++; });
    w.store_epoch++;
}

// value: how many groups may still be in flight. target: 1 if it is enough that the sources have been read
inline void wait_for_stores(Warp& w, const Instruction& i, uint32_t lanes) {
    bool reads_only = i.target == 1;
    uint32_t unread = w.store_epoch + 1, unwritten = w.store_epoch + 1;
    auto waited = [&](BulkStore& store) {
        bool covered =
            lanes >> store.lane & 1 && store.group + (uint64_t)i.value < w.store_groups[(size_t)store.lane];
        if (covered) {
            store.read_waited = true;
            if (reads_only)
                read_source(w, store);
            else
                perform(w, store);
        }
        if (!store.read_waited) unread = std::min(unread, store.epoch);
        if (covered && !reads_only) return true;
        unwritten = std::min(unwritten, store.epoch);
        return false;
    };
    w.stores.erase(std::remove_if(w.stores.begin(), w.stores.end(), waited), w.stores.end());
    const Agents& agents = w.block->agents;
    Clock& seen = w.knowledge.seen.clock;
    uint32_t &read = seen[agents.store_reads_of(w.index)], &written = seen[agents.store_writes_of(w.index)];
    read = std::max(read, unread - 1);
    if (!reads_only) written = std::max(written, unwritten - 1);
}

// ----------------------------------------------------------------------------
// decoding

// The shared operand "[%r1+16]" is stored as a register, which may be wide, and an offset.
inline void decode_copy_async(Decoding& x) {
    Instruction& i = x.to;
    for (size_t k = 2; k < x.words.size(); k++) {
        if (!is_advice(x.words[k])) x.unknown();
    }
    auto [to, to_offset] = x.place(x.operand(0), Space::shared);
    auto [from, from_offset] = x.place(x.operand(1), Space::global);
    i.d = to, i.target = (int)to_offset, i.a = from, i.offset = from_offset;
    i.widths = {x.width(to)};
    i.value = (int64_t)number(x.operand(2));
    if (x.operands.size() > 3) i.b = x.source(3);
    i.run = copy_async;
}

inline void decode_bulk(Decoding& x) {
    Instruction& i = x.to;
    for (std::string_view word : x.words) {
        if (word.starts_with("multicast") || word.starts_with("im2col") || word == "L2::cache_hint")
            x.unknown();
    }
    bool tensor = x.has("tensor"), reduces = x.words[1] == "reduce";
    bool load = x.words[reduces ? 4 : tensor ? 5 : 3].starts_with("shared");
    if (reduces && (x.type() != "f32" || x.words[x.words.size() - 2] != "add")) x.unknown();
    if (tensor) {
        // The operands are [map, {coordinates}], [shared] and, for a load, [mbarrier].
        auto parts = split_operands(bracketed(x.operand(load ? 1 : 0)));
        if (parts.size() != 2 || reduces) x.unknown();
        i.a = x.source(parts[0], Width::wide);
        for (std::string_view coordinate : members(parts[1]))
            i.list.push_back(x.source(coordinate, Width::word));
        auto [shared, offset] = x.place(x.operand(load ? 0 : 1), Space::shared);
        i.d = shared, i.target = (int)offset;
        if (load) std::tie(i.b, i.value) = x.place(x.operand(2), Space::shared);
        i.run = load ? tensor_load : tensor_store;
        return;
    }
    auto [to, to_offset] = x.place(x.operand(0), load ? Space::shared : Space::global);
    auto [from, from_offset] = x.place(x.operand(1), load ? Space::global : Space::shared);
    i.d = to, i.target = (int)to_offset, i.a = from, i.offset = from_offset;
    i.b = x.source(2);
    if (load)
        std::tie(i.c, i.value) = x.place(x.operand(3), Space::shared);
    else
        i.value = reduces;
    i.run = load ? bulk_load : bulk_store;
}

inline void decode_cp(Decoding& x) {
    Instruction& i = x.to;
    bool bulk = x.has("bulk");
    if (x.has("commit_group")) {
        i.run = bulk ? commit_stores : commit_copies;
    } else if (x.has("wait_group")) {
        i.value = (int64_t)number(x.operand(0));
        i.target = x.has("read");
        i.run = bulk ? wait_for_stores : wait_for_copies;
    } else if (x.has("wait_all")) {
        i.value = -1;
        i.run = wait_for_copies;
    } else if (bulk) {
        if (x.has("prefetch")) x.unknown();
        decode_bulk(x);
    } else if (x.has("mbarrier")) {
        x.unknown();
    } else {
        decode_copy_async(x);
    }
}

}  // namespace nocard::ptx
