/*
Building blocks of the Hopper attention kernels: tiles of heads that the TMA (the copy engine) loads into
shared memory and wgmma reads there, rings of such tiles, and stores of results.

A block has three warpgroups. The first loads, and gives up registers to the other two, which compute.
*/
#pragma once

#include "kernels/attention_shape.h"
#include "kernels/attention_tiles.cuh"
#include "kernels/common.cuh"
#include "kernels/ptx_hopper.cuh"
#include "kernels/tensor_map.cuh"

constexpr int warpgroup_size = 128, warpgroup_rows = 64;
constexpr int computing_groups = 2, computing_threads = computing_groups * warpgroup_size;
constexpr int computing_warps = computing_threads / warp_size;
constexpr int hopper_threads = computing_threads + warpgroup_size;
// Registers per thread. The average over the three warpgroups is what the block starts with: 168.
constexpr int loading_registers = 40, computing_registers = 232;

// A tile of `rows` rows of a head: consecutive panels, each as wide as the swizzle.
template <int rows, int HSP>
struct SwizzledTile {
    static constexpr int columns = HSP % 64 == 0 ? 64 : 32, width = columns * sizeof(floatX);
    static constexpr int panel = rows * width, bytes = rows * HSP * (int)sizeof(floatX);
    static constexpr Swizzle swizzle = columns == 64 ? Swizzle::bytes_128 : Swizzle::bytes_64;

    // Called by one thread. The bytes that arrive are counted at `barrier`.
    __device__ static void load(char* to, const CUtensorMap& map, int head, int row, int b,
                                Mbarrier* barrier) {
        for (int i = 0; i < HSP / columns; i++)
            copy_box(to + i * panel, map, i * columns, head, row, b, barrier);
    }

    // Descriptors for a product that sums over the columns of the head: the matrix from a row on, and the
    // part of it that begins `k` columns further right.
    __device__ static uint64_t rows_from(const char* tile, int row) {
        return matrix_descriptor(tile + row * width, swizzle, panel, 8 * width);
    }
    __device__ static uint64_t right(uint64_t rows_from, int k) {
        return advance(rows_from, k / columns * panel + k % columns * (int)sizeof(floatX));
    }

    // Descriptors for a product that sums over the rows: the matrix from a column on (the first of a panel),
    // and the part of it that begins `k` rows further down.
    __device__ static uint64_t columns_from(const char* tile, int column) {
        return matrix_descriptor(tile + column / columns * panel, swizzle, panel, 8 * width);
    }
    __device__ static uint64_t down(uint64_t columns_from, int k) { return advance(columns_from, k * width); }

    // Stores two neighboring elements of a row where a product will look for them: columns `column` (0, 2, 4
    // or 6) + `right` (a multiple of eight) and the next. Only for tiles whose panels are as wide as a
    // swizzle atom.
    __device__ static void store(char* tile, int row, int column, int right, uint32_t pair) {
        static_assert(width == 128);
        int first = row * width + (row % 8 * 16 + column * (int)sizeof(floatX));
        *reinterpret_cast<uint32_t*>(tile + right / columns * panel + (first ^ right % columns / 8 * 16)) =
            pair;
    }

    // Returns a map that loads panels of a tensor (B, rows_of_sequence, heads, HS), whose rows are `row`
    // elements apart, with zeros from column HS and row `count` on.
    static CUtensorMap map(const floatX* from, const AttentionShape& s, int heads, size_t row, int count,
                           int rows_of_sequence) {
        return tensor_map(
            from,
            {{s.HS, heads, count, s.B}, {(size_t)s.HS, row, rows_of_sequence * row}, {columns, 1, rows, 1}});
    }
    // Tensor maps of the call's queries, and of all keys and values that these may see.
    static CUtensorMap query_map(Qkv<const floatX> qkv, const AttentionShape& s) {
        return map(qkv.queries, s, s.NH, s.q_row, s.Tq, s.q_rows);
    }
    static CUtensorMap key_map(Qkv<const floatX> qkv, const AttentionShape& s) {
        return map(qkv.keys, s, 2 * s.NKV, s.kv_row, s.keys_end(), s.Tk);
    }
    static CUtensorMap output_map(const floatX* out, const AttentionShape& s) {
        return map(out, s, s.NH, s.out_row(), s.Tq, s.out_rows);
    }
};

// The next buffer of a ring, and the parity of the number of rounds completed.
template <int buffers>
struct Ring {
    int at = 0, phase = 0;
    __device__ void next() {
        if (++at == buffers) at = 0, phase ^= 1;
    }
};

// The barriers of a buffer that one thread fills and the computing warps use.
struct Handover {
    Mbarrier full, empty;

    __device__ void init() {
        mbarrier_init(&full, 1);
        mbarrier_init(&empty, computing_warps);
    }
    // Called by the filling thread: waits until the buffer is free; fill() also announces the bytes to come.
    __device__ void wait_empty(int phase) { mbarrier_wait(&empty, phase ^ 1); }
    __device__ Mbarrier* fill(int phase, int bytes) {
        wait_empty(phase);
        mbarrier_arrive_expect(&full, bytes);
        return &full;
    }
    __device__ void wait(int phase) { mbarrier_wait(&full, phase); }
    __device__ void done() {
        if (threadIdx.x % warp_size == 0) mbarrier_arrive(&empty);
    }
};

// Returns this thread's warpgroup. The shuffle shows the compiler that it is the same throughout the warp.
__device__ inline int warpgroup_number() {
    return __shfl_sync(~0u, (int)threadIdx.x / warpgroup_size, 0);
}

// Result n of a product in this thread is in row result_row(n) of its warpgroup's 64 and in column
// result_column(n). Its distances down and right from the thread's result 0 are the same in all threads.
__device__ constexpr int further_down(int n) {
    return n / 2 % 2 * 8;
}
__device__ constexpr int further_right(int n) {
    return n / 4 * 8 + n % 2;
}
__device__ inline int result_row(int n) {
    return threadIdx.x % warpgroup_size / warp_size * 16 + threadIdx.x % warp_size / 4 + further_down(n);
}
__device__ inline int result_column(int n) {
    return threadIdx.x % 4 * 2 + further_right(n);
}

// Packs results as the left operand of another product: 16 columns per four registers.
template <int count>
__device__ void pack_results(uint32_t (&to)[count / 8][4], const float (&from)[count]) {
#pragma unroll
    for (int n = 0; n < count / 2; n++) to[n / 4][n % 4] = bf16_pair(from[2 * n], from[2 * n + 1]);
}

// Returns packed result n.
template <int pieces>
__device__ float packed_result(const uint32_t (&from)[pieces][4], int n) {
    uint32_t pair = from[n / 8][n / 2 % 4];
    return __uint_as_float(n % 2 ? pair & 0xffff0000u : pair << 16);
}

// Transposes four words per lane within each quad: lane i receives word i of all four lanes, in lane order.
__device__ inline void transpose_quad(uint32_t (&words)[4]) {
    bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        uint32_t got = __shfl_xor_sync(~0u, odd ? words[i] : words[i + 1], 1);
        (odd ? words[i] : words[i + 1]) = got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t got = __shfl_xor_sync(~0u, upper ? words[i] : words[i + 2], 2);
        (upper ? words[i] : words[i + 2]) = got;
    }
}

// Writes a warpgroup's results in rows below `rows` and columns below HS (a multiple of 8). `to` is the
// address of row 0, column 0. Results in row result_row(2 i) are multiplied by scale[i]. Returns the amax of
// what the thread writes.
template <int count>
__device__ Amax store_results(floatX* to, size_t stride, const float (&results)[count],
                              const float (&scale)[2], int rows, int HS) {
    Amax element;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int n = 2 * i; n < count; n += 16) {
            uint32_t words[4];  // one per group of eight columns
#pragma unroll
            for (int w = 0; w < 4; w++)
                words[w] = bf16_pair(results[n + w * 4] * scale[i], results[n + w * 4 + 1] * scale[i]);
            transpose_quad(words);
            int row = result_row(2 * i), column = n / 16 * 32 + threadIdx.x % 4 * 8;
            if (row >= rows || column >= HS) continue;
            store_global(to + row * stride + column, make_uint4(words[0], words[1], words[2], words[3]));
            for (uint32_t word : words) element.see_pair(word);
        }
    return element;
}

// Writes the column sums of a warpgroup's results over the 16 rows of each warp, times scale, for columns
// below HS. The sums of warp w are at to + w * stride; a warp whose rows begin at `rows` or beyond writes
// none.
template <int count>
__device__ void store_column_sums(float* to, size_t stride, const float (&results)[count], float scale,
                                  int rows, int HS) {
    int warp = pinned(threadIdx.x) % warpgroup_size / warp_size;
    if (warp * 16 >= rows) return;
    to += warp * stride;
#pragma unroll
    for (int n = 0; n < count; n += 4) {
        Vec<float, 2> sums = {(results[n] + results[n + 2]) * scale,
                              (results[n + 1] + results[n + 3]) * scale};
#pragma unroll
        for (int lanes = 4; lanes < warp_size; lanes *= 2)
            for (int i = 0; i < 2; i++) sums[i] += __shfl_xor_sync(~0u, sums[i], lanes);
        int column = result_column(n);
        if (threadIdx.x % warp_size < 4 && column < HS) store(to + column, sums);
    }
}
