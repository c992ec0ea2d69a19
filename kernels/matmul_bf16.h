/*
Matrix products in bf16 on a CPU: operands are rounded to bf16, sums are fp32. Some processors have a matrix
unit for them (Intel's AMX), others only dot products of pairs (AVX-512 BF16).

The matrix unit has eight registers, each a tile of 16 rows of 64 bytes. One instruction takes 16 cycles and
computes

    sums (16, 16) += left (16, 32) right (32, 16)

where row k of the right tile holds elements 2 k and 2 k + 1 of all 16 columns, side by side. That is 16 times
the arithmetic of vector instructions, so a product is as fast as operands and sums reach the registers. Each
rung of this ladder brings them closer:

    registers   2 x 2 tiles of sums stay in registers for a whole block of the inner dimension. Each loaded
                tile is used twice: four loads for four instructions.
    panels      Operands are rounded into panels of 32 rows of left or 32 columns of right, tile by tile in
                the order of the loads. So no stride is a power of two, which would map all rows of a tile to
                a few sets of the cache.
    caches      All threads round right together. Each then rounds 128 rows of left, 1,024 elements of the
                inner dimension at a time, which fit in its second-level cache, and multiplies them with one
                panel of right after another.
    prefetch    During a product, the next sums and the next panel of right are fetched.

Threads take the next rows as soon as they are free, because other programs may slow one core down. The order
of each sum depends only on the sizes, so a product is bit-identical every time.

Dot products of pairs read the same panels: one instruction multiplies a pair of 16 columns of right by the
same pair of one row of left, and adds to 16 sums.
*/
#pragma once

#if defined __x86_64__ && defined DEVICE_CPU
#define CPU_BF16_INSTRUCTIONS
#endif

#ifdef CPU_BF16_INSTRUCTIONS
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <omp.h>
#include <oneapi/dnnl/dnnl.hpp>

#include "kernels/common.cuh"     // ceil_div, even_share
#include "kernels/host_memory.h"  // KeptMemory
#endif
#include "kernels/elements.h"  // Elements

// If set, products on the CPU use operands rounded to bf16 from now on.
inline bool cpu_products_in_bf16 = false;

#ifdef CPU_BF16_INSTRUCTIONS

// ----------------------------------------------------------------------------
// instructions

#define WITH_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,prfchw,amx-tile,amx-bf16")))

// Returns whether this process may use the instructions. ONEDNN_MAX_CPU_ISA may disable them.
inline bool has_instructions(dnnl::cpu_isa wanted) {
    return ((unsigned)dnnl::get_effective_cpu_isa() & (unsigned)wanted) == (unsigned)wanted;
}

inline bool has_cpu_products_in_bf16() {
    return has_instructions(dnnl::cpu_isa::avx512_core_bf16);
}

inline bool has_matrix_unit() {
    // Linux lets a process use the unit's registers only after it has asked for them.
    constexpr int request_permission = 0x1023, tile_registers = 18;
    static const bool granted = has_instructions(dnnl::cpu_isa::avx512_core_amx) &&
                                syscall(SYS_arch_prctl, request_permission, tile_registers) == 0;
    return granted;
}

// ----------------------------------------------------------------------------
// panels

// One tile of an operand.
struct alignas(64) Bf16Tile {
    static constexpr int lines = 16, inner = 32;
    uint32_t at[lines][inner / 2];  // pairs of elements of the inner dimension
};

constexpr int panel_lines = 2 * Bf16Tile::lines;  // rows of left, or columns of right

// Transposes 16 rows of 16 pairs. (The forms with masks have no uninitialized operand for GCC to warn of.)
WITH_BF16 inline void transpose_pairs(__m512i (&row)[16]) {
    constexpr __mmask16 all = 0xffff;
    constexpr __mmask8 both = 0xff;
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_maskz_unpacklo_epi32(all, row[i], row[i + 1]);
        t[i + 1] = _mm512_maskz_unpackhi_epi32(all, row[i], row[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int half = 0; half < 2; half++) {
            row[i + 2 * half] = _mm512_maskz_unpacklo_epi64(both, t[i + half], t[i + 2 + half]);
            row[i + 2 * half + 1] = _mm512_maskz_unpackhi_epi64(both, t[i + half], t[i + 2 + half]);
        }
    // now each 128-bit lane of a row holds four lines of one pair
    for (int i = 0; i < 4; i++)
        for (int half = 0; half < 16; half += 8) {
            __m512i upper = row[i + half], lower = row[i + half + 4];
            t[i + half] = _mm512_maskz_shuffle_i32x4(all, upper, lower, 0x88);
            t[i + half + 4] = _mm512_maskz_shuffle_i32x4(all, upper, lower, 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        row[i] = _mm512_maskz_shuffle_i32x4(all, t[i], t[i + 8], 0x88);
        row[i + 8] = _mm512_maskz_shuffle_i32x4(all, t[i], t[i + 8], 0xdd);
    }
}

// Masks the first `count` elements of a vector; count may be negative, or more than 16.
WITH_BF16 inline __mmask16 first_elements(int count) {
    return _cvtu32_mask16((1u << std::clamp(count, 0, 16)) - 1);
}

// Rounds `lines` lines of `inner` elements, where neighbors in memory are successive elements of a line, and
// fills the rest of the tile with zeros. in_pairs: for the right operand, the tile is (pairs, lines).
WITH_BF16 inline void round_along(Bf16Tile& tile, const float* from, size_t stride, int lines, int inner,
                                  bool in_pairs) {
    __m512i rows[16];
    __mmask16 low = first_elements(inner), high = first_elements(inner - 16);
    for (int i = 0; i < 16; i++) {
        __mmask16 any = i < lines ? 0xffff : 0;
        const float* line = from + i * stride;
        _mm_prefetch(line + Bf16Tile::inner, _MM_HINT_T0);
        _mm_prefetch(line + Bf16Tile::inner + 16, _MM_HINT_T0);
        rows[i] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high & any, line + 16),
                                               _mm512_maskz_loadu_ps(low & any, line));
    }
    if (in_pairs) transpose_pairs(rows);
    for (int i = 0; i < 16; i++) _mm512_store_si512(tile.at[i], rows[i]);
}

// Does the same where neighbors in memory are the same element of successive lines.
WITH_BF16 inline void round_across(Bf16Tile& tile, const float* from, size_t stride, int lines, int inner,
                                   bool in_pairs) {
    const __m512i even_and_odd = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                                  8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i rows[16];
    __mmask16 all = first_elements(lines), none = 0;
    for (int i = 0; i < 16; i++) {
        const float* pair = from + 2 * i * stride;
        _mm_prefetch(pair + Bf16Tile::inner * stride, _MM_HINT_T0);
        _mm_prefetch(pair + (Bf16Tile::inner + 1) * stride, _MM_HINT_T0);
        __m512 even = _mm512_maskz_loadu_ps(2 * i < inner ? all : none, pair);
        __m512 odd = _mm512_maskz_loadu_ps(2 * i + 1 < inner ? all : none, pair + stride);
        rows[i] = _mm512_maskz_permutexvar_epi16(~0u, even_and_odd, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
    }
    if (!in_pairs) transpose_pairs(rows);
    for (int i = 0; i < 16; i++) _mm512_store_si512(tile.at[i], rows[i]);
}

// The rounded copy of an operand (lines, inner), where lines are the rows of left or the columns of right:
// (panels, tiles of the inner dimension, 2)
class Panels {
public:
    static int count(int lines) { return ceil_div(lines, panel_lines); }
    static int tiles(int inner) { return ceil_div(inner, Bf16Tile::inner); }
    static size_t size(int lines, int inner) { return (size_t)count(lines) * tiles(inner) * 2; }

    Panels() = default;

    // memory: (size(lines, inner)). operand.row: the distance between lines. in_pairs: for the right operand
    Panels(Bf16Tile* memory, Elements operand, int lines, int inner, bool in_pairs)
        : memory_(memory), operand_(operand), lines_(lines), inner_(inner), in_pairs_(in_pairs) {}

    int count() const { return count(lines_); }
    int tiles() const { return tiles(inner_); }
    Bf16Tile* at(int panel, int tile) const { return memory_ + ((size_t)panel * tiles() + tile) * 2; }

    // Panels are filled in groups, so that long runs of neighbors in memory are read together.
    int groups() const { return ceil_div(count(), group()); }

    void round_group(int number) const {
        const int first = number * group(), last = std::min(first + group(), count());
        for (int tile = 0; tile < tiles(); tile++)
            for (int half = 2 * first; half < 2 * last; half++) {
                const int line = half * Bf16Tile::lines, k = tile * Bf16Tile::inner;
                const int lines = std::clamp(lines_ - line, 0, Bf16Tile::lines);
                const int inner = std::min(inner_ - k, Bf16Tile::inner);
                const float* from = operand_.from(line, k).data;
                Bf16Tile& to = at(half / 2, tile)[half % 2];
                if (operand_.column == 1)
                    round_along(to, from, operand_.row, lines, inner, in_pairs_);
                else
                    round_across(to, from, operand_.column, lines, inner, in_pairs_);
            }
    }

    void round() const {
        for (int i = 0; i < groups(); i++) round_group(i);
    }

private:
    int group() const { return operand_.column == 1 ? 1 : 4; }

    Bf16Tile* memory_ = nullptr;
    Elements operand_ = {};
    int lines_ = 0, inner_ = 0;
    bool in_pairs_ = false;
};

// ----------------------------------------------------------------------------
// products

struct alignas(64) TileLayout {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A constant, because GCC 12 believes that the instruction below reads only its first bytes, and would drop
// stores to the others.
inline const TileLayout tile_layout;

// The thread's tile registers, if it has any, are ready for products while this lives.
struct TileRegisters {
    WITH_BF16 TileRegisters() {
        if (used) _tile_loadconfig(&tile_layout);
    }
    WITH_BF16 ~TileRegisters() {
        if (used) _tile_release();
    }
    TileRegisters(const TileRegisters&) = delete;

private:
    const bool used = cpu_products_in_bf16 && has_matrix_unit();
};

// Operands fetched during a product: the next sums, and a part of the next panel.
struct NextOperands {
    const float* sums;
    const char* panel;
    size_t lines_per_tile;  // cache lines of the panel for each tile of the inner dimension
};

// Computes 32 x 32 sums = or += panels of left and right over some tiles of the inner dimension. Each
// register is loaded for the next step as soon as this step has used it. That makes no difference to a core
// that runs one thread; beside a second one, which takes half of the core's queues, it is a fifth faster.
// Left's tiles are read as a stream, so that right's, which the next product reads too, stay in the
// first-level cache.
WITH_BF16 inline void multiply_panels(float* sums, size_t stride, const Bf16Tile* left, const Bf16Tile* right,
                                      int tiles, bool accumulate, const NextOperands& next) {
    asm volatile("" ::: "memory");  // compilers do not know that tiles are loaded from memory
    size_t bytes = stride * sizeof(float);
    float* lower = sums + 16 * stride;
    if (accumulate) {
        _tile_loadd(0, sums, bytes);
        _tile_loadd(1, sums + 16, bytes);
        _tile_loadd(2, lower, bytes);
        _tile_loadd(3, lower + 16, bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    _tile_stream_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    _tile_loadd(7, right + 1, 64);
    _tile_stream_loadd(5, left + 1, 64);
    const char* ahead = next.panel;
    for (int k = 1, row = 0; k < tiles; k++) {
        left += 2, right += 2;
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_stream_loadd(4, left, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(6, right, 64);
        _tile_dpbf16ps(3, 5, 7);
        _tile_loadd(7, right + 1, 64);
        _tile_stream_loadd(5, left + 1, 64);
        for (int end = next.sums ? k * 32 / (tiles - 1) : 0; row < end; row++) {
            __builtin_prefetch(next.sums + row * stride, 1);
            __builtin_prefetch(next.sums + row * stride + 16, 1);
        }
        for (size_t i = 0; i < next.lines_per_tile; i++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    _tile_stored(0, sums, bytes);
    _tile_stored(1, sums + 16, bytes);
    _tile_stored(2, lower, bytes);
    _tile_stored(3, lower + 16, bytes);
}

// Does the same by dot products, 8 x 32 sums at a time.
WITH_BF16 inline void multiply_panels_by_dots(float* sums, size_t stride, const Bf16Tile* left,
                                              const Bf16Tile* right, int tiles, bool accumulate) {
    constexpr int rows = 8;
    for (int row = 0; row < panel_lines; row += rows, sums += rows * stride) {
        __m512 sum[rows][2];
        for (int i = 0; i < rows; i++)
            for (int half = 0; half < 2; half++)
                sum[i][half] =
                    accumulate ? _mm512_loadu_ps(sums + i * stride + 16 * half) : _mm512_setzero_ps();
        for (int k = 0; k < 2 * tiles; k += 2) {
            const auto* lines = left[k + row / Bf16Tile::lines].at + row % Bf16Tile::lines;
            for (int pair = 0; pair < Bf16Tile::inner / 2; pair++) {
                auto first = (__m512bh)_mm512_load_si512(right[k].at[pair]);
                auto second = (__m512bh)_mm512_load_si512(right[k + 1].at[pair]);
                for (int i = 0; i < rows; i++) {
                    auto of_left = (__m512bh)_mm512_set1_epi32((int)lines[i][pair]);
                    sum[i][0] = _mm512_dpbf16_ps(sum[i][0], of_left, first);
                    sum[i][1] = _mm512_dpbf16_ps(sum[i][1], of_left, second);
                }
            }
        }
        for (int i = 0; i < rows; i++)
            for (int half = 0; half < 2; half++)
                _mm512_storeu_ps(sums + i * stride + 16 * half, sum[i][half]);
    }
}

// The sums of products, a matrix (rows, columns), in blocks of 32 x 32. A block at the edge is computed in a
// copy.
struct SumBlocks {
    float* data;
    size_t stride;
    int rows, columns;

    float* at(int row, int column) const { return data + (size_t)row * stride + column; }

    // Computes the block that begins there, = or += the product of two panels + bias, which may be null.
    void compute(int row, int column, const Bf16Tile* left, const Bf16Tile* right, int tiles, bool accumulate,
                 const float* bias, const NextOperands& next) const {
        const int height = std::min(rows - row, panel_lines), width = std::min(columns - column, panel_lines);
        float* to = at(row, column);
        if (height == panel_lines && width == panel_lines) {
            if (bias) add_bias(to, stride, accumulate, bias);
            return multiply(to, stride, left, right, tiles, accumulate || bias, next);
        }
        alignas(64) float copy[panel_lines][panel_lines] = {};
        for (int i = 0; i < height && accumulate; i++) std::copy_n(to + i * stride, width, copy[i]);
        if (bias) add_bias(copy[0], panel_lines, accumulate, bias, width);
        multiply(copy[0], panel_lines, left, right, tiles, accumulate || bias, {});
        for (int i = 0; i < height; i++) std::copy_n(copy[i], width, to + i * stride);
    }

private:
    static void multiply(float* sums, size_t stride, const Bf16Tile* left, const Bf16Tile* right, int tiles,
                         bool accumulate, const NextOperands& next) {
        if (has_matrix_unit())
            multiply_panels(sums, stride, left, right, tiles, accumulate, next);
        else
            multiply_panels_by_dots(sums, stride, left, right, tiles, accumulate);
    }

    static void add_bias(float* to, size_t stride, bool accumulate, const float* bias,
                         int width = panel_lines) {
        for (int i = 0; i < panel_lines; i++) {
            float* row = to + i * stride;
#pragma omp simd
            for (int j = 0; j < width; j++) row[j] = (accumulate ? row[j] : 0) + bias[j];
        }
    }
};

// Computes c = or += left right for panels that stay in the cache. Needs TileRegisters.
inline void multiply_near(float* c, int ldc, const Panels& left, const Panels& right, int M, int N,
                          bool accumulate) {
    SumBlocks sums = {c, (size_t)ldc, M, N};
    for (int n = 0; n < right.count(); n++)
        for (int m = 0; m < left.count(); m++) {
            sums.compute(m * panel_lines, n * panel_lines, left.at(m, 0), right.at(n, 0), left.tiles(),
                         accumulate, nullptr, {});
        }
}

// One product: sums = or += left right + bias, which may be null.
struct PanelProduct {
    SumBlocks sums;
    Elements left;
    const Panels& right;
    int inner;
    const float* bias;
    bool accumulate;

    // The most rows and elements of the inner dimension of left that a thread rounds at a time: 256 KB.
    static constexpr int most_rows = 128, most_inner = 1024;

    int blocks() const { return ceil_div(sums.rows, most_rows); }

    // Computes a block of rows for panels [first, end) of right. Needs TileRegisters.
    void run(int block, int first, int end) const {
        Bf16Tile memory[most_rows / panel_lines * (most_inner / Bf16Tile::inner) * 2];
        const int row = block * most_rows, rows = std::min(sums.rows - row, most_rows);
        const int tiles = even_share(right.tiles(), most_inner / Bf16Tile::inner);
        for (int tile = 0; tile < right.tiles(); tile += tiles) {
            const int k = tile * Bf16Tile::inner, width = std::min(inner - k, tiles * Bf16Tile::inner);
            const Panels part(memory, left.from(row, k), rows, width, false);
            part.round();
            const size_t lines = ceil_div(panel_lines, part.count());
            for (int n = first; n < end; n++)
                for (int m = 0; m < part.count(); m++) {
                    const int after = std::min(n + 1, end - 1);
                    const char* panel = (const char*)right.at(after, tile);
                    NextOperands next = {m + 1 < part.count()
                                             ? sums.at(row + (m + 1) * panel_lines, n * panel_lines)
                                             : sums.at(row, after * panel_lines),
                                         panel + m * part.tiles() * lines * 64, lines};
                    sums.compute(row + m * panel_lines, n * panel_lines, part.at(m, 0), right.at(n, tile),
                                 part.tiles(), accumulate || k > 0,
                                 k == 0 && bias ? bias + n * panel_lines : nullptr, next);
                }
        }
    }
};

// Computes out (M, N) = or += left (M, K) right (K, N) + bias (N), which may be null. out has stride N.
inline void multiply_in_bf16(float* out, Elements left, Elements right, const float* bias, int M, int N,
                             int K, bool accumulate) {
    if (M == 0) return;
    constexpr int most_columns = 4096, most_inner = 4096;  // the part of right in panels
    thread_local KeptMemory<Bf16Tile> memory;
    for (int n = 0; n < N; n += most_columns)
        for (int k = 0; k < K; k += most_inner) {
            const int columns = std::min(N - n, most_columns), inner = std::min(K - k, most_inner);
            const Panels panels(memory.of(Panels::size(columns, inner)), right.from(k, n).transposed(),
                                columns, inner, true);
            const PanelProduct product = {
                {out + n, (size_t)N, M, columns},    left.from(0, k),    panels, inner,
                k == 0 && bias ? bias + n : nullptr, accumulate || k > 0};
            // About four tasks for each thread. Tasks that share rows of left round them once each.
            const int wanted = 4 * omp_get_max_threads() / product.blocks();
            const int column_parts = std::clamp(wanted, 1, panels.count() / 8 + 1);
            const int part = ceil_div(panels.count(), column_parts);
#pragma omp parallel
            {
#pragma omp for schedule(dynamic)
                for (int group = 0; group < panels.groups(); group++) panels.round_group(group);
                TileRegisters registers;
#pragma omp for collapse(2) schedule(dynamic)
                for (int block = 0; block < product.blocks(); block++)
                    for (int first = 0; first < panels.count(); first += part)
                        product.run(block, first, std::min(first + part, panels.count()));
            }
        }
}
#else
struct TileRegisters {
    TileRegisters() {}
};
inline void multiply_in_bf16(float*, Elements, Elements, const float*, int, int, int, bool) {
    __builtin_unreachable();
}
inline bool has_cpu_products_in_bf16() {
    return false;
}
inline bool has_matrix_unit() {
    return false;
}
#endif
