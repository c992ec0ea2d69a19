/*
The operations of instructions on one lane: function objects that ptx_alu.h puts into its loops.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "test/nocard/ptx_numbers.h"

namespace nocard::ptx {

// ----------------------------------------------------------------------------
// numbers

struct Add {
    template <typename T>
    T operator()(T a, T b) const {
        if constexpr (std::is_integral_v<T>)
            return (T)((uint64_t)a + (uint64_t)b);
        else
            return a + b;
    }
};
struct Subtract {
    template <typename T>
    T operator()(T a, T b) const {
        if constexpr (std::is_integral_v<T>)
            return (T)((uint64_t)a - (uint64_t)b);
        else
            return a - b;
    }
};
struct Multiply {
    template <typename T>
    T operator()(T a, T b) const {
        if constexpr (std::is_integral_v<T>)
            return (T)((uint64_t)a * (uint64_t)b);
        else
            return a * b;
    }
};
struct MultiplyHigh {
    template <typename T>
    T operator()(T a, T b) const {
        if constexpr (sizeof(T) == 8) {
            using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
            return (T)((Wide)a * b >> 64);
        } else {
            return (T)((std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>)a * b >> 8 * sizeof(T));
        }
    }
};
struct MultiplyAdd {
    template <typename T>
    T operator()(T a, T b, T c) const {
        if constexpr (std::is_integral_v<T>)
            return (T)((uint64_t)a * (uint64_t)b + (uint64_t)c);
        else
            return std::fma(a, b, c);
    }
};
struct MultiplyAddDown {
    float operator()(float a, float b, float c) const {
        double exact = std::fma((double)a, (double)b, (double)c);
        float rounded = (float)exact;
        return rounded > exact ? std::nextafter(rounded, -INFINITY) : rounded;
    }
};
// A card divides by zero without a trap: the quotient has all bits set, and the remainder is the dividend.
struct Divide {
    template <typename T>
    T operator()(T a, T b) const {
        if constexpr (std::is_integral_v<T>) {
            if (b == 0) return (T)-1;
            if (std::is_signed_v<T> && b == (T)-1) return (T)(0 - (uint64_t)a);
        }
        return (T)(a / b);
    }
};
struct Remainder {
    template <typename T>
    T operator()(T a, T b) const {
        return b == 0 ? a : std::is_signed_v<T> && b == (T)-1 ? 0 : (T)(a % b);
    }
};
// Minimum and Maximum return the number if one operand is NaN.
struct Minimum {
    template <typename T>
    T operator()(T a, T b) const {
        if constexpr (std::is_integral_v<T>)
            return a < b ? a : b;
        else
            return a != a ? b : b != b ? a : a < b || (a == b && std::signbit(a)) ? a : b;
    }
};
struct Maximum {
    template <typename T>
    T operator()(T a, T b) const {
        if constexpr (std::is_integral_v<T>)
            return a > b ? a : b;
        else
            return a != a ? b : b != b ? a : a > b || (a == b && std::signbit(b)) ? a : b;
    }
};
// These return NaN if either operand is NaN.
struct MinimumOrNaN {
    float operator()(float a, float b) const { return a != a || b != b ? NAN : Minimum()(a, b); }
};
struct MaximumOrNaN {
    float operator()(float a, float b) const { return a != a || b != b ? NAN : Maximum()(a, b); }
};
struct Negate {
    template <typename T>
    T operator()(T a) const {
        if constexpr (std::is_integral_v<T>)
            return (T)(0 - (uint64_t)a);
        else
            return -a;
    }
};
struct Magnitude {
    template <typename T>
    T operator()(T a) const {
        if constexpr (std::is_integral_v<T>)
            return a < 0 ? (T)(0 - (uint64_t)a) : a;
        else
            return std::fabs(a);
    }
};
// ----------------------------------------------------------------------------
// bits

struct And {
    template <typename T>
    T operator()(T a, T b) const {
        return (T)(a & b);
    }
};
struct Or {
    template <typename T>
    T operator()(T a, T b) const {
        return (T)(a | b);
    }
};
struct Xor {
    template <typename T>
    T operator()(T a, T b) const {
        return (T)(a ^ b);
    }
};
struct Not {
    template <typename T>
    T operator()(T a) const {
        return (T)~a;
    }
};
struct ShiftLeft {
    template <typename T>
    T operator()(T a, uint32_t n) const {
        return n >= 8 * sizeof(T) ? (T)0 : (T)(a << n);
    }
};
struct ShiftRight {
    template <typename T>
    T operator()(T a, uint32_t n) const {
        uint32_t most = 8 * sizeof(T) - 1;
        if constexpr (std::is_signed_v<T>)
            return (T)(a >> std::min(n, most));
        else
            return n > most ? (T)0 : (T)(a >> n);
    }
};
struct Population {
    template <typename T>
    T operator()(T a) const {
        return (T)std::popcount((std::make_unsigned_t<T>)a);
    }
};
struct LeadingZeros {
    template <typename T>
    T operator()(T a) const {
        return (T)std::countl_zero((std::make_unsigned_t<T>)a);
    }
};
struct ReverseBits {
    uint32_t operator()(uint32_t a) const {
        uint32_t r = 0;
        for (int i = 0; i < 32; i++) r |= (a >> i & 1) << (31 - i);
        return r;
    }
};
// ----------------------------------------------------------------------------
// comparisons

struct Equal {
    template <typename T>
    bool operator()(T a, T b) const {
        return a == b;
    }
};
struct NotEqual {
    template <typename T>
    bool operator()(T a, T b) const {
        return a != b && a == a && b == b;
    }
};
struct Less {
    template <typename T>
    bool operator()(T a, T b) const {
        return a < b;
    }
};
struct LessEqual {
    template <typename T>
    bool operator()(T a, T b) const {
        return a <= b;
    }
};
struct Greater {
    template <typename T>
    bool operator()(T a, T b) const {
        return a > b;
    }
};
struct GreaterEqual {
    template <typename T>
    bool operator()(T a, T b) const {
        return a >= b;
    }
};
// Comparisons that also hold if an operand is NaN.
template <typename Comparison>
struct OrUnordered {
    bool operator()(float a, float b) const { return a != a || b != b || Comparison()(a, b); }
};
struct BothNumbers {
    bool operator()(float a, float b) const { return a == a && b == b; }
};
struct AnyNaN {
    bool operator()(float a, float b) const { return a != a || b != b; }
};

// ----------------------------------------------------------------------------
// functions, and variants of operations on floats

struct Exp2 {
    float operator()(float a) const { return std::exp2(a); }
};
struct Log2 {
    float operator()(float a) const { return std::log2(a); }
};
struct Reciprocal {
    float operator()(float a) const { return 1.f / a; }
};
struct SquareRoot {
    float operator()(float a) const { return std::sqrt(a); }
};
struct InverseRoot {
    float operator()(float a) const { return 1.f / std::sqrt(a); }
};
struct Sine {
    float operator()(float a) const { return std::sin(a); }
};
struct Cosine {
    float operator()(float a) const { return std::cos(a); }
};
struct Tanh {
    float operator()(float a) const { return std::tanh(a); }
};

// .ftz: flushes denormal operands and results to 0.
template <typename Operation>
struct Flushing {
    template <typename... Floats>
    float operator()(Floats... operands) const {
        return flushed(Operation()(flushed(operands)...));
    }
};
// .sat: clamps to [0, 1]; NaN becomes 0.
template <typename Operation>
struct Saturating {
    template <typename... Floats>
    float operator()(Floats... operands) const {
        float result = Operation()(operands...);
        return result != result ? 0.f : std::clamp(result, 0.f, 1.f);
    }
};

// Arithmetic on 16-bit floats is done in double and rounded once. (A multiply-add of bf16 or fp16 is exact in
// double unless its terms are more than 53 bits apart.)
template <typename Operation, bool is_bf16, bool relu>
struct Halves {
    static double up(uint32_t bits) {
        return is_bf16 ? from_bf16((uint16_t)bits) : from_fp16((uint16_t)bits);
    }
    static uint32_t down(double value) {
        float once = (float)value;
        // Rounding to odd first makes rounding twice equal to rounding once.
        if (once != value && value == value && std::fabs(value) < 1e38) {
            uint32_t bits = std::bit_cast<uint32_t>(once);
            if (std::fabs((double)once) > std::fabs(value)) bits--;
            once = std::bit_cast<float>(bits | 1);
        }
        if (relu && once < 0) once = 0;
        return is_bf16 ? to_bf16(once) : to_fp16(once);
    }
    template <typename... Words>
    uint32_t operator()(Words... operands) const {
        uint32_t low = down(Operation()(up(operands & 0xffff)...));
        return low | down(Operation()(up(operands >> 16)...)) << 16;
    }
};

}  // namespace nocard::ptx
