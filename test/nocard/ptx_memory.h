/*
Loads, stores, atomic operations and fences.
*/
#pragma once

#include "test/nocard/ptx_alu.h"
#include "test/nocard/ptx_checks.h"

namespace nocard::ptx {

// ----------------------------------------------------------------------------
// addresses

// A lane's address, resolved: its space, also for generic addresses, and its place on the host.
struct Place {
    Space space;
    char* at;
    uint64_t address;
};

inline Place find_place(Warp& w, const Instruction& i, int lane, uint64_t bytes) {
    uint64_t address = address_in(w, i.a, i.wide_address, lane) + (uint64_t)i.offset;
    Space space = i.space;
    if (space == Space::generic) {
        space = address & shared_window      ? Space::shared
                : address & parameter_window ? Space::parameter
                                             : Space::global;
        if (space != Space::global) address &= shared_window - 1;
    } else if (space == Space::shared && i.wide_address) {
        address = (uint32_t)address;
    }
    if (address % bytes) {
        const char* of = space == Space::shared ? "shared " : space == Space::global ? "" : "parameter ";
        fault(lane, format("%saddress %#lx is not a multiple of %lu", of, address, bytes));
    }
    if (space == Space::shared) return {space, shared_place(w, lane, address, bytes), address};
    if (space == Space::global) return {space, global_place(w, lane, address, bytes), address};
    if (address + bytes > w.kernel->parameter_bytes) {
        fault(lane, format("access to parameters at %lu + %lu, which end at %zu", address, bytes,
                           w.kernel->parameter_bytes));
    }
    return {space, (char*)w.grid->parameter_bytes + address, address};
}

inline void note_access(Warp& w, const Instruction& i, int lane, const Place& place, uint32_t bytes,
                        Access access, bool same_value = false) {
    Toucher who = Toucher::warp_itself(w, lane);
    who.strong = i.strong;
    who.same_value = same_value;
    if (place.space == Space::shared) note_shared(who, (uint32_t)place.address, bytes, access);
    if (place.space == Space::global) note_global(who, place.address, bytes, access);
}

// ----------------------------------------------------------------------------
// loads and stores

// T is the type in memory; registers hold its value extended to their width.
template <typename T>
void load(Warp& w, const Instruction& i, uint32_t lanes) {
    unsigned count = i.vector;
    each_lane(
        lanes, [&](int l) __attribute__((always_inline)) {
            Place place = find_place(w, i, l, sizeof(T) * count);
            note_access(w, i, l, place, (uint32_t)sizeof(T) * count, Access::read);
            if (i.strong && place.space == Space::global) receive(w, place.address, i.acquires);
            for (unsigned k = 0; k < count; k++) {
                T value;
                memcpy(&value, place.at + k * sizeof(T), sizeof(T));
                if (i.widths[k] == Width::wide) {
                    wides(w, i.list[k])[l] = (uint64_t)(int64_t)value;
                } else {
                    words(w, i.list[k])[l] = (uint32_t)(int64_t)value;
                }
            }
        });
    if (i.strong) w.yielded = w.spins = true;
}

// A number that was never computed must not be stored.
inline void check_defined(int lane, uint32_t value) {
    if (value == undefined_bits) fault(lane, "stores a register that nobody set");
}

template <typename T>
void store(Warp& w, const Instruction& i, uint32_t lanes) {
    unsigned count = i.vector;
    each_lane(
        lanes, [&](int l) __attribute__((always_inline)) {
            Place place = find_place(w, i, l, sizeof(T) * count);
            if (place.space == Space::parameter) fault(l, "stores to a parameter");
            std::array<T, 8> values;
            for (unsigned k = 0; k < count; k++) {
                uint64_t bits = i.widths[k] == Width::wide ? (uint64_t)wides(w, i.list[k])[l]
                                                           : (uint64_t)words(w, i.list[k])[l];
                if constexpr (sizeof(T) == 4) check_defined(l, (uint32_t)bits);
                values[k] = (T)bits;
            }
            bool same = memcmp(place.at, values.data(), sizeof(T) * count) == 0;
            note_access(w, i, l, place, (uint32_t)sizeof(T) * count, Access::write, same);
            memcpy(place.at, values.data(), sizeof(T) * count);
            if (i.strong && place.space == Space::global) publish(w, place.address, i.releases);
        });
    w.grid->progress++;
}

// Returns whether a word of the opcode only advises caches, states what holds here anyway, or is decoded
// elsewhere.
inline bool is_advice(std::string_view word) {
    for (const char* known : {"ca",
                              "cg",
                              "cs",
                              "lu",
                              "cv",
                              "wb",
                              "wt",
                              "nc",
                              "global",
                              "shared",
                              "shared::cta",
                              "param",
                              "weak",
                              "L1::no_allocate",
                              "L1::evict_first",
                              "L1::evict_last",
                              "L1::evict_normal",
                              "L1::evict_unchanged",
                              "L2::128B",
                              "L2::256B",
                              "L2::64B",
                              "L2::cache_hint",
                              "L2::evict_first",
                              "L2::evict_last",
                              "noftz",
                              "gpu",
                              "sys",
                              "cta",
                              "cluster",
                              "relaxed",
                              "acquire",
                              "release",
                              "acq_rel",
                              "volatile",
                              "v2",
                              "v4",
                              "v8",
                              "param::entry"}) {
        if (word == known) return true;
    }
    return false;
}

inline Space space_of(const Decoding& x) {
    if (x.has("shared") || x.has("shared::cta")) return Space::shared;
    if (x.has("global")) return Space::global;
    if (x.has("param") || x.has("param::entry")) return Space::parameter;
    for (const char* other : {"local", "const", "shared::cluster"}) {
        if (x.has(other)) x.unknown();
    }
    return Space::generic;
}

inline void decode_order(Decoding& x) {
    bool cta = x.has("cta");
    x.to.strong =
        x.has("relaxed") || x.has("acquire") || x.has("release") || x.has("acq_rel") || x.has("volatile");
    x.to.acquires = (x.has("acquire") || x.has("acq_rel")) && !cta;
    x.to.releases = (x.has("release") || x.has("acq_rel")) && !cta;
}

inline int bytes_of(std::string_view type) {
    size_t digit = type.find_first_of("0123456789");
    return digit == type.npos ? 0 : (int)number(type.substr(digit)) / 8;
}

inline void decode_load_store(Decoding& x, bool loads) {
    Instruction& i = x.to;
    for (size_t k = 1; k + 1 < x.words.size(); k++) {
        if (!is_advice(x.words[k])) x.unknown();
    }
    decode_order(x);
    x.address(x.operand(loads ? 1 : 0), space_of(x));
    i.access_bytes = (uint8_t)bytes_of(x.type());
    for (std::string_view member : members(x.operand(loads ? 0 : 1))) {
        uint32_t found;
        if (loads) {
            found = x.result(member);
        } else {
            found = x.assembler.operand(member, width_of(x.type()));
            if (x.assembler.kernel().registers[found].set_by_code) i.uses.push_back(found);
        }
        i.list.push_back(found);
        i.widths.push_back(x.width(found));
    }
    i.vector = (uint8_t)i.list.size();
    unsigned said = x.has("v2") ? 2 : x.has("v4") ? 4 : x.has("v8") ? 8 : 1;
    if (said != i.vector) x.unknown();
    bool is_signed = x.type()[0] == 's';
    switch (i.access_bytes) {
    case 1:
        i.run = !loads ? store<uint8_t> : is_signed ? load<int8_t> : load<uint8_t>;
        break;
    case 2:
        i.run = !loads ? store<uint16_t> : is_signed ? load<int16_t> : load<uint16_t>;
        break;
    case 4:
        i.run = !loads ? store<uint32_t> : is_signed ? load<int32_t> : load<uint32_t>;
        break;
    case 8:
        i.run = !loads ? store<uint64_t> : load<uint64_t>;
        break;
    default:
        x.unknown();
    }
}

inline void decode_ld(Decoding& x) {
    decode_load_store(x, true);
}
inline void decode_st(Decoding& x) {
    decode_load_store(x, false);
}

// ----------------------------------------------------------------------------
// atomic operations

struct Exchange {
    template <typename T>
    T operator()(T, T b) const {
        return b;
    }
};
// Counts up to b, then wraps to 0.
struct Increment {
    uint32_t operator()(uint32_t a, uint32_t b) const { return a >= b ? 0 : a + 1; }
};
struct Decrement {
    uint32_t operator()(uint32_t a, uint32_t b) const { return a == 0 || a > b ? b : a - 1; }
};
struct AddHalves {
    uint32_t operator()(uint32_t a, uint32_t b) const { return Halves<Add, false, false>()(a, b); }
};
struct AddBf16s {
    uint32_t operator()(uint32_t a, uint32_t b) const { return Halves<Add, true, false>()(a, b); }
};

// PTX does not fix the order of lanes; here the seed draws forwards or backwards.
template <typename T, typename Update>
void update_memory(Warp& w, const Instruction& i, uint32_t lanes, Update update) {
    bool backwards = w.grid->random() & 1;
    while (lanes) {
        int l = backwards ? 31 - __builtin_clz(lanes) : __builtin_ctz(lanes);
        lanes &= ~(1u << l);
        Place place = find_place(w, i, l, sizeof(T));
        if (place.space == Space::parameter) fault(l, "updates a parameter");
        note_access(w, i, l, place, sizeof(T), Access::atomic);
        if (place.space == Space::global) receive(w, place.address, i.acquires);
        T old;
        memcpy(&old, place.at, sizeof(T));
        T updated = update(old, l);
        memcpy(place.at, &updated, sizeof(T));
        if (i.d != no_operand) Lanes<T>(w, i.d).set(l, old);
        if (place.space == Space::global) publish(w, place.address, i.releases);
    }
    w.grid->progress++;
    w.yielded = true;
}

template <typename T, typename Operation>
void atomic(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<T> b(w, i.b);
    update_memory<T>(w, i, lanes, [&](T old, int l) { return (T)Operation()(old, b[l]); });
}

// red.global.add.v4.f32: each number by itself.
inline void add_vector(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        uint32_t bytes = 4 * (uint32_t)i.list.size();
        Place place = find_place(w, i, l, bytes);
        note_access(w, i, l, place, bytes, Access::atomic);
        for (size_t k = 0; k < i.list.size(); k++) {
            float sum;
            memcpy(&sum, place.at + 4 * k, 4);
            sum += std::bit_cast<float>((uint32_t)words(w, i.list[k])[l]);
            memcpy(place.at + 4 * k, &sum, 4);
        }
    });
    w.grid->progress++;
}

template <typename T>
void compare_and_swap(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<T> b(w, i.b), c(w, i.c);
    update_memory<T>(w, i, lanes, [&](T old, int l) { return old == b[l] ? c[l] : old; });
}

inline void decode_atomic(Decoding& x, bool has_result) {
    Instruction& i = x.to;
    decode_order(x);
    i.strong = true;
    size_t at = has_result ? 1 : 0;
    x.address(x.operand(at), space_of(x));
    std::string_view type = x.type(), operation;
    i.access_bytes = (uint8_t)bytes_of(type);
    for (size_t k = 1; k + 1 < x.words.size(); k++) {
        if (!is_advice(x.words[k])) operation = x.words[k];
    }
    if (x.operand(at + 1)[0] == '{') {
        if (has_result || operation != "add" || type != "f32") x.unknown();
        for (std::string_view member : members(x.operand(at + 1)))
            i.list.push_back(x.source(member, Width::word));
        i.vector = (uint8_t)i.list.size();
        i.run = add_vector;
        return;
    }
    i.b = x.source(at + 1, width_of(type));
    if (has_result) i.d = x.result(0);
    bool f32 = type == "f32";
    auto integer = [&]<typename Operation>(Operation) {
        with_integer(x, type, [&]<typename T>(T) { i.run = atomic<T, Operation>; });
    };
    if (operation == "add" && f32)
        i.run = atomic<float, Add>;
    else if (operation == "add" && type == "f64")
        i.run = atomic<double, Add>;
    else if (operation == "add" && type == "f16x2")
        i.run = atomic<uint32_t, AddHalves>;
    else if (operation == "add" && type == "bf16x2")
        i.run = atomic<uint32_t, AddBf16s>;
    else if (operation == "add" && !is_half(type))
        integer(Add());
    else if (operation == "exch")
        integer(Exchange());
    else if (operation == "min" && !f32)
        integer(Minimum());
    else if (operation == "max" && !f32)
        integer(Maximum());
    else if (operation == "and")
        integer(And());
    else if (operation == "or")
        integer(Or());
    else if (operation == "xor")
        integer(Xor());
    else if (operation == "inc" && type == "u32")
        i.run = atomic<uint32_t, Increment>;
    else if (operation == "dec" && type == "u32")
        i.run = atomic<uint32_t, Decrement>;
    else if (operation == "cas") {
        i.c = x.source(at + 2, width_of(type));
        i.run =
            width_of(type) == Width::wide ? (Execute)compare_and_swap<uint64_t> : compare_and_swap<uint32_t>;
    } else {
        x.unknown();
    }
}

inline void decode_atom(Decoding& x) {
    decode_atomic(x, true);
}
inline void decode_red(Decoding& x) {
    if (x.has("async")) x.unknown();
    decode_atomic(x, false);
}

// ----------------------------------------------------------------------------
// fences and prefetches

inline void do_nothing(Warp&, const Instruction&, uint32_t) {}

inline void decode_fence(Decoding& x) {
    Instruction& i = x.to;
    if (x.has("async") || x.word(2).starts_with("async")) {
        // Products and copies may now read all writes that the warp knows of, and others may read all that
        // copies wrote.
        bool in_shared = !x.has("global"), in_global = !x.has("shared::cta");
        constexpr int shared = 1, global = 2;
        i.value = in_shared * shared + in_global * global;
        i.run = [](Warp& w, const Instruction& i, uint32_t) {
            if (i.value & global) w.knowledge.across.join(w.knowledge.seen);
            if (!(i.value & shared)) return;
            join(w.knowledge.async_proxy, w.knowledge.seen.clock);
            w.next_epoch();
        };
        return;
    }
    bool gpu = x.has("gpu") || x.has("gl") || x.has("sys") || x.has("cluster");
    bool known = x.has("acq_rel") || x.has("sc") || x.words[0] == "membar" || x.has("mbarrier_init");
    if (!known) x.unknown();
    i.run = do_nothing;
    if (gpu && !x.has("mbarrier_init"))
        i.run = [](Warp& w, const Instruction&, uint32_t) { fence_memory(w); };
}

inline void decode_prefetch(Decoding& x) {
    x.address(x.operand(0), space_of(x));
    x.to.run = do_nothing;
}

inline void decode_nothing(Decoding& x) {
    x.to.run = do_nothing;
}

inline void decode_trap(Decoding& x) {
    x.to.run = [](Warp&, const Instruction&, uint32_t lanes) { fault(first_lane(lanes), "trap"); };
}

}  // namespace nocard::ptx
