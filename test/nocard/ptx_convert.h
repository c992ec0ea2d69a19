/*
cvt: converts between types of numbers.
*/
#pragma once

#include "test/nocard/ptx_alu.h"

namespace nocard::ptx {

// ----------------------------------------------------------------------------
// integers

// The number may be only the low 8 or 16 bits of a 32-bit register.
template <typename T>
T low_part(uint64_t bits) {
    return (T)bits;
}

template <typename To, typename From>
void convert_integer(Warp& w, const Instruction& i, uint32_t lanes) {
    bool wide_source = i.wide_address;
    using Register = std::conditional_t<sizeof(To) == 8, uint64_t, uint32_t>;
    each_lane(lanes, [&](int l) {
        From from = low_part<From>(address_in(w, i.a, wide_source, l));
        To to = (To)from;
        if (i.value) {  // sat
            constexpr __int128 least = std::numeric_limits<To>::min(), most = std::numeric_limits<To>::max();
            to = (To)std::clamp<__int128>(from, least, most);
        }
        // A wider register receives the sign-extended number, but a 16-bit register only 16 bits of it.
        Register bits = (Register)(std::conditional_t<std::is_signed_v<To>, int64_t, uint64_t>)to;
        if constexpr (sizeof(To) == 8)
            wides(w, i.d)[l] = bits;
        else
            words(w, i.d)[l] = i.vector == 2 ? (uint16_t)bits : bits;
    });
}

template <typename Use>
void with_any_integer(Decoding& x, std::string_view type, Use use) {
    if (type == "s8")
        use(int8_t());
    else if (type == "u8" || type == "b8")
        use(uint8_t());
    else
        with_integer(x, type, use);
}

// ----------------------------------------------------------------------------
// floats and integers

enum class Rounding { nearest, zero, down, up };

template <Rounding rounding, typename T>
T round_integral(T value) {
    if constexpr (rounding == Rounding::nearest) return std::nearbyint(value);
    if constexpr (rounding == Rounding::zero) return std::trunc(value);
    if constexpr (rounding == Rounding::down) return std::floor(value);
    if constexpr (rounding == Rounding::up) return std::ceil(value);
}

// A number that does not fit becomes the nearest that does; NaN becomes 0.
template <typename To, typename From, Rounding rounding>
void float_to_integer(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<To> d(w, i.d);
    Lanes<From> a(w, i.a);
    each_lane(lanes, [&](int l) {
        double value = round_integral<rounding>((double)a[l]);
        constexpr double least = (double)std::numeric_limits<To>::min();
        constexpr double beyond = (double)std::numeric_limits<To>::max() + (sizeof(To) < 8 ? 1.0 : 0.0);
        To to = value != value    ? (To)0
                : value <= least  ? std::numeric_limits<To>::min()
                : value >= beyond ? std::numeric_limits<To>::max()
                                  : (To)value;
        d.set(l, to);
    });
}

template <typename To, typename From>
void integer_to_float(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<To> d(w, i.d);
    Lanes<From> a(w, i.a);
    each_lane(lanes, [&](int l) { d.set(l, (To)a[l]); });
}

template <typename To, typename From>
void convert_float(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<To> d(w, i.d);
    Lanes<From> a(w, i.a);
    each_lane(lanes, [&](int l) { d.set(l, (To)a[l]); });
}

template <typename Use>
void with_rounding(const Decoding& x, Use use) {
    if (x.has("rzi"))
        use(std::integral_constant<Rounding, Rounding::zero>());
    else if (x.has("rmi"))
        use(std::integral_constant<Rounding, Rounding::down>());
    else if (x.has("rpi"))
        use(std::integral_constant<Rounding, Rounding::up>());
    else
        use(std::integral_constant<Rounding, Rounding::nearest>());
}

template <Rounding rounding>
struct RoundIntegral {
    float operator()(float a) const { return round_integral<rounding>(a); }
};

// ----------------------------------------------------------------------------
// small floats

inline uint32_t float_to_half(float value, bool bf16, bool toward_zero) {
    if (!toward_zero) return bf16 ? to_bf16(value) : to_fp16(value);
    if (bf16) return value != value ? 0x7fff : std::bit_cast<uint32_t>(value) >> 16;
    uint32_t bits = to_fp16(value);
    return std::fabs(from_fp16((uint16_t)bits)) > std::fabs(value) ? bits - 1 : bits;
}

// value: bit 0 bf16, bit 1 toward zero, bit 2 relu, bit 3 largest instead of infinity
inline uint32_t float_to_half_of(const Instruction& i, float value) {
    if ((i.value & 4) && !(value > 0)) value = value != value ? value : 0;
    uint32_t bits = float_to_half(value, i.value & 1, i.value & 2);
    uint32_t infinity = i.value & 1 ? 0x7f80 : 0x7c00;
    return (i.value & 8) && (bits & 0x7fff) == infinity ? bits - 1 : bits;
}

inline void one_half(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<uint32_t> d(w, i.d);
    Lanes<float> a(w, i.a);
    each_lane(lanes, [&](int l) { d.set(l, float_to_half_of(i, a[l])); });
}

inline void bf16_to_nearest(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<uint32_t> d(w, i.d);
    Lanes<float> a(w, i.a);
    each_lane(lanes, [&](int l) { d.set(l, to_bf16(a[l])); });
}

// The first operand goes to the upper half.
inline void two_halves(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<uint32_t> d(w, i.d);
    Lanes<float> a(w, i.a), b(w, i.b);
    each_lane(lanes, [&](int l) { d.set(l, float_to_half_of(i, a[l]) << 16 | float_to_half_of(i, b[l])); });
}

template <const SmallFormat& format>
void two_fp8(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<uint32_t> d(w, i.d);
    Lanes<float> a(w, i.a), b(w, i.b);
    each_lane(lanes, [&](int l) { d.set(l, format.encode(a[l], true) << 8 | format.encode(b[l], true)); });
}

template <const SmallFormat& format>
void two_fp8_of_fp16(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<uint32_t> d(w, i.d), a(w, i.a);
    each_lane(lanes, [&](int l) {
        uint32_t high = format.encode(from_fp16((uint16_t)(a[l] >> 16)), true);
        d.set(l, high << 8 | format.encode(from_fp16((uint16_t)a[l]), true));
    });
}

template <const SmallFormat& format>
void two_fp16_of_fp8(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<uint32_t> d(w, i.d), a(w, i.a);
    each_lane(lanes, [&](int l) {
        uint32_t high = to_fp16(from_small<format>(a[l] >> 8 & 255));
        d.set(l, high << 16 | to_fp16(from_small<format>(a[l] & 255)));
    });
}

template <bool bf16>
void half_to_float(Warp& w, const Instruction& i, uint32_t lanes) {
    Lanes<float> d(w, i.d);
    Lanes<uint32_t> a(w, i.a);
    each_lane(lanes, [&](int l) { d.set(l, bf16 ? from_bf16((uint16_t)a[l]) : from_fp16((uint16_t)a[l])); });
}

// ----------------------------------------------------------------------------
// decoding

inline bool is_integer(std::string_view type) {
    return type[0] == 's' || type[0] == 'u' || (type[0] == 'b' && type[1] != 'f');
}

// Decodes conversions from or to small floats; returns false for all others.
inline bool decode_small_float(Decoding& x, std::string_view to, std::string_view from) {
    Instruction& i = x.to;
    bool fp8 = to == "e4m3x2" || to == "e5m2x2";
    bool half = to == "bf16" || to == "f16" || to == "bf16x2" || to == "f16x2";
    if ((half || fp8) && from == "f32") {
        bool two = to.ends_with("x2");
        i.a = x.source(1), i.b = two ? x.source(2) : no_operand, i.d = x.result(0);
        i.value = to.starts_with("bf16") | x.has("rz") << 1 | x.has("relu") << 2 | x.has("satfinite") << 3;
        if (fp8) {
            if (!x.has("satfinite") || x.has("relu")) x.unknown();
            i.run = to == "e4m3x2" ? two_fp8<e4m3> : two_fp8<e5m2>;
        } else {
            i.run = two ? two_halves : i.value == 1 ? bf16_to_nearest : one_half;
        }
    } else if (fp8 && from == "f16x2") {
        sources(x, 1, Width::word);
        i.run = to == "e4m3x2" ? two_fp8_of_fp16<e4m3> : two_fp8_of_fp16<e5m2>;
    } else if (to == "f16x2" && (from == "e4m3x2" || from == "e5m2x2")) {
        if (x.has("relu")) x.unknown();
        sources(x, 1, Width::word);
        i.run = from == "e4m3x2" ? two_fp16_of_fp8<e4m3> : two_fp16_of_fp8<e5m2>;
    } else if (to == "f32" && (from == "bf16" || from == "f16")) {
        sources(x, 1, Width::word);
        i.run = from == "bf16" ? half_to_float<true> : half_to_float<false>;
    } else {
        return false;
    }
    return true;
}

inline void decode_cvt(Decoding& x) {
    if (x.words.size() < 3) x.unknown();
    std::string_view to = x.words[x.words.size() - 2], from = x.words.back();
    if (decode_small_float(x, to, from)) return;
    Instruction& i = x.to;
    if (is_integer(to) && is_integer(from)) {
        i.a = x.assembler.operand(x.operand(1), width_of(from));
        if (x.assembler.kernel().registers[i.a].set_by_code) i.uses.push_back(i.a);
        i.wide_address = x.width(i.a) == Width::wide;
        i.d = x.result(0);
        i.value = x.has("sat");
        if ((x.width(i.d) == Width::wide) != (width_of(to) == Width::wide)) x.unknown();
        // 16-bit registers hold at most 16 bits of a sign extension.
        if (to.ends_with("16")) i.vector = 2;
        with_any_integer(x, to, [&]<typename To>(To) {
            with_any_integer(x, from, [&]<typename From>(From) { i.run = convert_integer<To, From>; });
        });
        return;
    }
    sources(x, 1, width_of(from));
    if (x.has("sat") && !(to == "f32" && from == "f32")) x.unknown();
    if (from == "f32" && is_integer(to)) {
        with_integer(x, to, [&]<typename To>(To) {
            with_rounding(x, [&]<Rounding r>(std::integral_constant<Rounding, r>) {
                i.run = float_to_integer<To, float, r>;
            });
        });
    } else if (to == "f32" && is_integer(from)) {
        if (!x.has("rn")) x.unknown();
        with_integer(x, from, [&]<typename From>(From) { i.run = integer_to_float<float, From>; });
    } else if (to == "f64" && is_integer(from)) {
        with_integer(x, from, [&]<typename From>(From) { i.run = integer_to_float<double, From>; });
    } else if (to == "f32" && from == "f32") {
        bool integral = x.has("rzi") || x.has("rmi") || x.has("rpi") || x.has("rni");
        i.run = x.has("sat") ? unary<float, Saturating<Same>> : unary<float, Same>;
        if (integral) {
            with_rounding(x, [&]<Rounding r>(std::integral_constant<Rounding, r>) {
                i.run = unary<float, RoundIntegral<r>>;
            });
        }
    } else if (to == "f64" && from == "f32") {
        i.run = convert_float<double, float>;
    } else if (to == "f32" && from == "f64") {
        i.run = convert_float<float, double>;
    } else {
        x.unknown();
    }
}

}  // namespace nocard::ptx
