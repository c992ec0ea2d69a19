/*
Arithmetic on registers: integers, floats, bits, comparisons and moves.

Each instruction is a loop over 32 lanes, which the compiler vectorizes; decoding picks the loop.
*/
#pragma once

#include "test/nocard/ptx_assembler.h"
#include "test/nocard/ptx_machine.h"
#include "test/nocard/ptx_operations.h"

namespace nocard::ptx {

// ----------------------------------------------------------------------------
// lanes of a register as numbers of type T

template <typename T>
struct Lanes {
    uint8_t* at;

    Lanes(Warp& w, uint32_t place) : at(w.file + place) {}
    T operator[](int lane) const {
        if constexpr (sizeof(T) == 8) return std::bit_cast<T>((uint64_t)((LaneWide*)at)[lane]);
        if constexpr (sizeof(T) == 4) return std::bit_cast<T>((uint32_t)((LaneWord*)at)[lane]);
        if constexpr (sizeof(T) == 2) return std::bit_cast<T>((uint16_t)((LaneWord*)at)[lane]);
    }
    void set(int lane, T value) {
        if constexpr (sizeof(T) == 8) ((LaneWide*)at)[lane] = std::bit_cast<uint64_t>(value);
        if constexpr (sizeof(T) == 4) ((LaneWord*)at)[lane] = std::bit_cast<uint32_t>(value);
        if constexpr (sizeof(T) == 2) ((LaneWord*)at)[lane] = std::bit_cast<uint16_t>(value);
    }
};

template <typename T, typename Operation>
void unary(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<T> d(w, i.d), a(w, i.a);
    each_lane(lanes, [&](int l) { d.set(l, (T)Operation()(a[l])); });
}

template <typename T, typename Operation>
void binary(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<T> d(w, i.d), a(w, i.a), b(w, i.b);
    each_lane(lanes, [&](int l) { d.set(l, (T)Operation()(a[l], b[l])); });
}

template <typename T, typename Operation>
void ternary(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<T> d(w, i.d), a(w, i.a), b(w, i.b), c(w, i.c);
    each_lane(lanes, [&](int l) { d.set(l, (T)Operation()(a[l], b[l], c[l])); });
}

// The second operand is a 32-bit count for any T.
template <typename T, typename Operation>
void shift(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<T> d(w, i.d), a(w, i.a);
    Lanes<uint32_t> b(w, i.b);
    each_lane(lanes, [&](int l) { d.set(l, Operation()(a[l], b[l])); });
}

template <typename T, typename Operation>
void compare(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<T> a(w, i.a), b(w, i.b);
    uint32_t result = 0;
    each_lane(lanes, [&](int l) { result |= (uint32_t)Operation()(a[l], b[l]) << l; });
    set_predicate(w, i.d, lanes, result);
}

template <typename Operation>
void on_predicates(Warp& w, const Instruction& i, uint32_t lanes) {
    set_predicate(w, i.d, lanes, Operation()(predicate(w, i.a), predicate(w, i.b)));
}

// ----------------------------------------------------------------------------
// decoding

// Calls use() with a number of the C++ type that corresponds to a PTX type.
template <typename Use>
void with_integer(Decoding& x, std::string_view type, Use use) {
    if (type == "s32")
        use(int32_t());
    else if (type == "u32" || type == "b32")
        use(uint32_t());
    else if (type == "s64")
        use(int64_t());
    else if (type == "u64" || type == "b64")
        use(uint64_t());
    else if (type == "s16")
        use(int16_t());
    else if (type == "u16" || type == "b16")
        use(uint16_t());
    else
        x.unknown();
}

inline void sources(Decoding& x, int count, Width width) {
    uint32_t* to[] = {&x.to.a, &x.to.b, &x.to.c};
    for (int i = 0; i < count; i++) *to[i] = x.source((size_t)i + 1, width);
    x.to.d = x.result(0);
}

// Returns the loop that applies an operation with this number of operands.
template <typename T, typename Operation, int operands>
constexpr Execute loop() {
    if constexpr (operands == 1) return unary<T, Operation>;
    if constexpr (operands == 2) return binary<T, Operation>;
    if constexpr (operands == 3) return ternary<T, Operation>;
}

template <typename Operation, int operands>
void decode_float(Decoding& x) {
    sources(x, operands, x.type() == "f64" ? Width::wide : Width::word);
    bool ftz = x.has("ftz"), sat = x.has("sat");
    if (sat && ftz)
        x.to.run = loop<float, Saturating<Flushing<Operation>>, operands>();
    else if (sat)
        x.to.run = loop<float, Saturating<Operation>, operands>();
    else if (ftz)
        x.to.run = loop<float, Flushing<Operation>, operands>();
    else
        x.to.run = loop<float, Operation, operands>();
}

inline bool is_half(std::string_view type) {
    return type == "bf16" || type == "bf16x2" || type == "f16" || type == "f16x2";
}

template <typename Operation, int operands>
void decode_halves(Decoding& x) {
    sources(x, operands, Width::word);
    bool bf16 = x.type().substr(0, 2) == "bf", relu = x.has("relu");
    if (x.has("sat")) x.unknown();
    x.to.run = bf16   ? relu ? loop<uint32_t, Halves<Operation, true, true>, operands>()
                             : loop<uint32_t, Halves<Operation, true, false>, operands>()
                 : relu ? loop<uint32_t, Halves<Operation, false, true>, operands>()
                      : loop<uint32_t, Halves<Operation, false, false>, operands>();
    // Types of one number run on the upper half of the register, too, which is 0.
}

// Decodes operations that exist for integers, floats and 16-bit floats.
template <typename Operation, int operands>
void decode_arithmetic(Decoding& x) {
    if (x.type() == "f32") return decode_float<Operation, operands>(x);
    if (is_half(x.type())) return decode_halves<Operation, operands>(x);
    if (x.type() == "f64") {
        sources(x, operands, Width::wide);
        x.to.run = loop<double, Operation, operands>();
        return;
    }
    if (x.has("cc") || x.has("sat")) x.unknown();
    sources(x, operands, width_of(x.type()));
    with_integer(x, x.type(), [&]<typename T>(T) { x.to.run = loop<T, Operation, operands>(); });
}

template <typename Operation, int operands>
void decode_integer(Decoding& x) {
    sources(x, operands, width_of(x.type()));
    with_integer(x, x.type(), [&]<typename T>(T) { x.to.run = loop<T, Operation, operands>(); });
}

// Special functions. The approximate variants get the exact value, too.
template <typename Operation>
void decode_function(Decoding& x) {
    if (is_half(x.type())) return decode_halves<Operation, 1>(x);
    if (x.type() != "f32") x.unknown();
    decode_float<Operation, 1>(x);
}

template <typename Operation, typename OrNaN>
void decode_minimum(Decoding& x) {
    if (x.type() == "f32" && x.has("NaN")) return decode_float<OrNaN, 2>(x);
    if (is_half(x.type()) && x.has("NaN")) return decode_halves<OrNaN, 2>(x);
    decode_arithmetic<Operation, 2>(x);
}

template <typename Wide, typename Narrow>
void multiply_wide(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<Wide> d(w, i.d);
    Lanes<Narrow> a(w, i.a), b(w, i.b);
    each_lane(lanes, [&](int l) { d.set(l, (Wide)a[l] * (Wide)b[l]); });
}

template <typename Wide, typename Narrow>
void multiply_add_wide(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<Wide> d(w, i.d), c(w, i.c);
    Lanes<Narrow> a(w, i.a), b(w, i.b);
    each_lane(lanes, [&](int l) { d.set(l, Add()((Wide)((Wide)a[l] * (Wide)b[l]), c[l])); });
}

inline void decode_multiply(Decoding& x) {
    if (x.has("wide")) {
        sources(x, 2, Width::word);
        if (x.type() == "s32")
            x.to.run = multiply_wide<int64_t, int32_t>;
        else if (x.type() == "u32")
            x.to.run = multiply_wide<uint64_t, uint32_t>;
        else if (x.type() == "s16")
            x.to.run = multiply_wide<int32_t, int16_t>;
        else if (x.type() == "u16")
            x.to.run = multiply_wide<uint32_t, uint16_t>;
        else
            x.unknown();
    } else if (x.has("hi")) {
        decode_integer<MultiplyHigh, 2>(x);
    } else {
        decode_arithmetic<Multiply, 2>(x);
    }
}

inline void decode_multiply_add(Decoding& x) {
    if (x.has("wide")) {
        x.to.a = x.source(1), x.to.b = x.source(2), x.to.d = x.result(0);
        bool to_64 = x.type() == "s32" || x.type() == "u32";
        x.to.c = x.source(3, to_64 ? Width::wide : Width::word);
        if (x.type() == "s32")
            x.to.run = multiply_add_wide<int64_t, int32_t>;
        else if (x.type() == "u32")
            x.to.run = multiply_add_wide<uint64_t, uint32_t>;
        else if (x.type() == "s16")
            x.to.run = multiply_add_wide<int32_t, int16_t>;
        else if (x.type() == "u16")
            x.to.run = multiply_add_wide<uint32_t, uint16_t>;
        else
            x.unknown();
    } else if (x.has("rm") && x.type() == "f32") {
        decode_float<MultiplyAddDown, 3>(x);
    } else if (x.has("hi") || x.has("rz") || x.has("rp")) {
        x.unknown();
    } else {
        decode_arithmetic<MultiplyAdd, 3>(x);
    }
}

template <typename Operation>
void decode_shift(Decoding& x) {
    x.to.d = x.result(0);
    x.to.a = x.source(1, width_of(x.type()));
    x.to.b = x.source(2);
    with_integer(x, x.type(), [&]<typename T>(T) { x.to.run = shift<T, Operation>; });
}

template <typename Operation>
void decode_bits(Decoding& x) {
    if (x.type() == "pred") {
        sources(x, 2, Width::predicate);
        x.to.run = on_predicates<Operation>;
    } else {
        decode_integer<Operation, 2>(x);
    }
}

inline void decode_not(Decoding& x) {
    if (x.type() != "pred") return decode_integer<Not, 1>(x);
    sources(x, 1, Width::predicate);
    x.to.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
        set_predicate(w, i.d, lanes, ~predicate(w, i.a));
    };
}

// popc, clz and brev, of 32 bits only.
template <typename Operation>
void decode_count(Decoding& x) {
    if (x.type() != "b32") x.unknown();
    decode_integer<Operation, 1>(x);
}

template <typename Operation>
void decode_comparison_of(Decoding& x, bool or_unordered) {
    if (x.type() == "f32") {
        x.to.run = or_unordered ? (Execute)compare<float, OrUnordered<Operation>> : compare<float, Operation>;
    } else if (x.type() == "f64") {
        x.to.run = compare<double, Operation>;
    } else {
        with_integer(x, x.type(), [&]<typename T>(T) { x.to.run = compare<T, Operation>; });
    }
}

// setp.CmpOp[.BoolOp].type p[|q], a, b[, c]
inline void decode_setp(Decoding& x) {
    size_t bar = x.operand(0).find('|');
    if (bar != std::string_view::npos) x.unknown();
    std::string_view comparison = x.word(1), combine = x.word(2);
    bool combines = combine == "and" || combine == "or" || combine == "xor";
    if (x.has("ftz")) x.unknown();
    x.to.a = x.source(1, width_of(x.type()));
    x.to.b = x.source(2, width_of(x.type()));
    if (combines) x.unknown();
    x.to.d = x.result(0);
    if (comparison == "num")
        x.to.run = compare<float, BothNumbers>;
    else if (comparison == "nan")
        x.to.run = compare<float, AnyNaN>;
    else if (comparison == "eq")
        decode_comparison_of<Equal>(x, false);
    else if (comparison == "ne")
        decode_comparison_of<NotEqual>(x, false);
    else if (comparison == "lt" || comparison == "lo")
        decode_comparison_of<Less>(x, false);
    else if (comparison == "le" || comparison == "ls")
        decode_comparison_of<LessEqual>(x, false);
    else if (comparison == "gt" || comparison == "hi")
        decode_comparison_of<Greater>(x, false);
    else if (comparison == "ge" || comparison == "hs")
        decode_comparison_of<GreaterEqual>(x, false);
    else if (comparison == "equ")
        decode_comparison_of<Equal>(x, true);
    else if (comparison == "neu")
        decode_comparison_of<NotEqual>(x, true);
    else if (comparison == "ltu")
        decode_comparison_of<Less>(x, true);
    else if (comparison == "leu")
        decode_comparison_of<LessEqual>(x, true);
    else if (comparison == "gtu")
        decode_comparison_of<Greater>(x, true);
    else if (comparison == "geu")
        decode_comparison_of<GreaterEqual>(x, true);
    else
        x.unknown();
}

template <typename T>
void select(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<T> d(w, i.d), a(w, i.a), b(w, i.b);
    uint32_t which = predicate(w, i.c);
    each_lane(lanes, [&](int l) { d.set(l, which >> l & 1 ? a[l] : b[l]); });
}

inline void decode_selp(Decoding& x) {
    Width width = width_of(x.type());
    x.to.a = x.source(1, width), x.to.b = x.source(2, width);
    x.to.c = x.source(3, Width::predicate), x.to.d = x.result(0);
    x.to.run = width == Width::wide ? (Execute)select<uint64_t> : select<uint32_t>;
}

// prmt: byte i of the result is the byte of {b, a} that nibble i of the selector names or, if the nibble's
// top bit is set, eight copies of that byte's sign.
inline void permute_bytes(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<uint32_t> d(w, i.d), a(w, i.a), b(w, i.b), c(w, i.c);
    each_lane(lanes, [&](int l) {
        uint64_t bytes = a[l] | (uint64_t)b[l] << 32;
        uint32_t selector = c[l], result = 0;
        for (int k = 0; k < 4; k++) {
            uint32_t nibble = selector >> 4 * k & 15;
            uint32_t byte = bytes >> 8 * (nibble & 7) & 255;
            if (nibble & 8) byte = byte & 128 ? 255 : 0;
            result |= byte << 8 * k;
        }
        d.set(l, result);
    });
}

inline void decode_prmt(Decoding& x) {
    if (x.words.size() != 2) x.unknown();
    sources(x, 3, Width::word);
    x.to.run = permute_bytes;
}

// lop3: each bit of the result is bit (a, b, c) of the table.
inline void logic_of_three(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<uint32_t> d(w, i.d), a(w, i.a), b(w, i.b), c(w, i.c);
    uint32_t table = (uint32_t)i.value;
    each_lane(lanes, [&](int l) {
        uint32_t result = 0, x = a[l], y = b[l], z = c[l];
        for (uint32_t k = 0; k < 8; k++) {
            uint32_t in = table >> k & 1 ? ~0u : 0;
            result |= in & (k & 4 ? x : ~x) & (k & 2 ? y : ~y) & (k & 1 ? z : ~z);
        }
        d.set(l, result);
    });
}

inline void decode_lop3(Decoding& x) {
    sources(x, 3, Width::word);
    x.to.value = (int64_t)number(x.operand(4));
    x.to.run = logic_of_three;
}

// bfe: `length` bits from bit `begin` on. Signed types extend the field's sign, or that of the register if
// the field crosses its end.
template <typename T>
void extract_bits(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<T> d(w, i.d), a(w, i.a);
    Lanes<uint32_t> b(w, i.b), c(w, i.c);
    constexpr uint32_t bits = 8 * sizeof(T);
    each_lane(lanes, [&](int l) {
        uint32_t begin = b[l] & 255, length = c[l] & 255;
        T value = ShiftRight()(a[l], begin);
        if (length == 0)
            value = 0;
        else if (length < bits) {
            uint32_t up = bits - length;
            value = ShiftRight()(ShiftLeft()(value, up), up);
        }
        d.set(l, value);
    });
}

inline void decode_bfe(Decoding& x) {
    x.to.a = x.source(1, width_of(x.type()));
    x.to.b = x.source(2), x.to.c = x.source(3), x.to.d = x.result(0);
    if (x.type() == "u32")
        x.to.run = extract_bits<uint32_t>;
    else if (x.type() == "s32")
        x.to.run = extract_bits<int32_t>;
    else if (x.type() == "u64")
        x.to.run = extract_bits<uint64_t>;
    else if (x.type() == "s64")
        x.to.run = extract_bits<int64_t>;
    else
        x.unknown();
}

// bfi d, a, b, c, length: inserts the low bits of a into b from bit c on.
inline void insert_bits(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<uint32_t> d(w, i.d), a(w, i.a), b(w, i.b), c(w, i.c), n(w, i.list[0]);
    each_lane(lanes, [&](int l) {
        uint32_t begin = c[l] & 255, length = n[l] & 255;
        uint32_t ones = length >= 32 ? ~0u : (1u << length) - 1;
        uint32_t mask = ShiftLeft()(ones, begin);
        d.set(l, (b[l] & ~mask) | (ShiftLeft()(a[l], begin) & mask));
    });
}

inline void decode_bfi(Decoding& x) {
    if (x.type() != "b32") x.unknown();
    sources(x, 3, Width::word);
    x.to.list = {x.source(4)};
    x.to.run = insert_bits;
}

// shf: the upper (.l) or lower (.r) word of {b, a} shifted.
template <bool left, bool clamps>
void funnel_shift(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<uint32_t> d(w, i.d), a(w, i.a), b(w, i.b), c(w, i.c);
    each_lane(lanes, [&](int l) {
        uint64_t both = (uint64_t)b[l] << 32 | a[l];
        uint32_t n = clamps ? std::min(c[l], 32u) : c[l] & 31;
        d.set(l, left ? (uint32_t)(both << n >> 32) : (uint32_t)(both >> n));
    });
}

inline void decode_shf(Decoding& x) {
    sources(x, 3, Width::word);
    bool clamps = x.has("clamp");
    x.to.run = x.has("l") ? clamps ? funnel_shift<true, true> : funnel_shift<true, false>
               : clamps ? funnel_shift<false, true>
                          : funnel_shift<false, false>;
}

// ----------------------------------------------------------------------------
// moves

// mov.b64 {a, b}, c
inline void unpack(Warp& w, const Instruction& i, uint32_t lanes) {
    unsigned bits = (unsigned)i.value;
    each_lane(lanes, [&](int l) {
        uint64_t from = i.wide_address ? wides(w, i.a)[l] : words(w, i.a)[l];
        for (size_t k = 0; k < i.list.size(); k++, from >>= bits) {
            if (i.list[k] != no_operand) words(w, i.list[k])[l] = (uint32_t)(from & (~0ull >> (64 - bits)));
        }
    });
}

// mov.b64 c, {a, b}
inline void pack(Warp& w, const Instruction& i, uint32_t lanes) {
    unsigned bits = (unsigned)i.value;
    each_lane(lanes, [&](int l) {
        uint64_t to = 0;
        for (size_t k = i.list.size(); k-- > 0;) {
            to = to << bits | (words(w, i.list[k])[l] & (~0ull >> (64 - bits)));
        }
        if (i.wide_address)
            wides(w, i.d)[l] = to;
        else
            words(w, i.d)[l] = (uint32_t)to;
    });
}

struct Same {
    template <typename T>
    T operator()(T a) const {
        return a;
    }
};

inline void decode_mov(Decoding& x) {
    Width width = width_of(x.type());
    x.to.wide_address = width == Width::wide;
    bool unpacks = x.operand(0)[0] == '{', packs = x.operand(1)[0] == '{';
    if (unpacks || packs) {
        auto parts = members(x.operand(unpacks ? 0 : 1));
        x.to.value = (width == Width::wide ? 64 : 32) / (int64_t)parts.size();
        if (x.to.value > 32 || x.to.value < 8) x.unknown();
        if (unpacks) x.to.a = x.source(1, width);
        for (std::string_view part : parts) {
            x.to.list.push_back(part == "_" ? no_operand
                                : unpacks   ? x.result(part)
                                            : x.source(part, Width::word));
        }
        if (packs) x.to.d = x.result(0);
        x.to.run = unpacks ? unpack : pack;
        return;
    }
    sources(x, 1, width);
    x.to.run = width == Width::wide ? (Execute)unary<uint64_t, Same> : unary<uint32_t, Same>;
    if (width == Width::predicate) {
        x.to.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
            set_predicate(w, i.d, lanes, predicate(w, i.a));
        };
    }
}

// Generic addresses of shared memory and of parameters are offsets in separate windows.
template <uint64_t window, bool to_generic>
void convert_address(Warp& w, const Instruction& i, uint32_t lanes) {
    bool wide_source = i.wide_address;
    each_lane(lanes, [&](int l) {
        uint64_t address = address_in(w, i.a, wide_source, l);
        wides(w, i.d)[l] = to_generic ? address + window : address - window;
    });
}

inline void decode_cvta(Decoding& x) {
    sources(x, 1, Width::wide);
    x.to.wide_address = true;
    bool to = x.has("to");
    if (x.has("global") || x.has("const"))
        x.to.run = unary<uint64_t, Same>;
    else if (x.has("shared"))
        x.to.run = to ? convert_address<shared_window, false> : convert_address<shared_window, true>;
    else if (x.has("param"))
        x.to.run = to ? convert_address<parameter_window, false> : convert_address<parameter_window, true>;
    else
        x.unknown();
}

}  // namespace nocard::ptx
