/*
Building blocks of the CUDA kernels of attention: tiles of heads in shared memory, and products of tiles by a
warp, on tensor cores for bf16 and with the same layout of results for float.
*/
#pragma once

#include "kernels/attention_shape.h"
#include "kernels/common.cuh"
#include "kernels/amax.cuh"

// ----------------------------------------------------------------------------
// widths of tiles

// Calls f with the first of the given tile widths that holds HS, as std::integral_constant.
template <int width, int... wider, typename F>
void with_width(int HS, F&& f) {
    if constexpr (sizeof...(wider) > 0) {
        if (HS > width) return with_width<wider...>(HS, f);
    }
    f(std::integral_constant<int, width>{});
}

// Calls f with the smallest width that holds the head, among those that the mma.sync kernels are compiled
// for.
template <typename F>
void with_head_width(int HS, F&& f) {
    with_width<32, 64, 96, 128, 192, 256>(HS, f);
}

// Calls f with the Hopper kernels' tile width for heads of this size, as std::integral_constant.
template <typename F>
void with_hopper_width(int HS, F&& f) {
    with_width<64, 96, 128>(HS, f);
}

// The Hopper kernels support heads that are no wider than a tile and whose vectors are multiples of 16 bytes,
// which the TMA (the copy engine) requires.
inline bool hopper_attention_fits(const AttentionShape& shape) {
    return shape.HS % 8 == 0 && shape.HS <= 128;
}

#ifndef DEVICE_CPU

constexpr float log2_e = 1.44269504f;

// Shared memory that a block may have on the cards with the least, and on the A100 and its successors. A
// multiprocessor has 1 KiB more, and reserves 1 KiB for each block.
constexpr size_t least_shared_bytes = 99 * 1024, large_shared_bytes = 163 * 1024,
                 reserved_shared_bytes = 1024;

// The properties of a card that matter here.
struct AttentionCard {
    size_t shared_bytes;  // per block
    int multiprocessors;

    // Calls f with the shared memory that a block may have on all cards like this one, as
    // std::integral_constant.
    template <typename F>
    void with_shared_bytes(F&& f) const {
        if (shared_bytes >= large_shared_bytes)
            f(std::integral_constant<size_t, large_shared_bytes>());
        else
            f(std::integral_constant<size_t, least_shared_bytes>());
    }
};

inline AttentionCard attention_card() {
    const cudaDeviceProp& device = device_properties();
    return {device.sharedMemPerBlockOptin, device.multiProcessorCount};
}

__device__ inline int lane_id() {
    return threadIdx.x % warp_size;
}

// ----------------------------------------------------------------------------
// tiles in shared memory

// Rows of a matrix, swizzled: row r stores 16-byte piece c at place c ^ r, so that eight rows of one column
// lie in different banks, as do the eight pieces of a row.
template <int columns>
struct Tile {
    static constexpr int W = vec_width<floatX>, pieces = columns / W;
    static_assert(pieces % 4 == 0);

    static constexpr int group = pieces % 8 == 0 ? 8 : 4;  // pieces that are permuted among themselves

    floatX* data;

    // Returns the address of column `column` + `step`, which must have no bits in common. The step, the same
    // in all lanes, is applied last, so that the rest need not be recomputed for the next step.
    __device__ floatX* at(int row, int column, int step = 0) const {
        int twist = (group == 8 ? row & 7 : row >> 1 & 3) * W;
        return data + row * columns + step / (group * W) * (group * W) +
               (column ^ twist ^ step % (group * W));
    }

    // The tile without its rows before `row`, a multiple of 8.
    __device__ Tile from_row(int row) const { return {data + row * columns}; }
};

// Calls f(row, column) for the first column of each 16-byte piece that is this thread's part of a tile: eight
// threads share a row, or four if its number of pieces is not a multiple of eight.
template <int rows, int columns, int threads, typename F>
__device__ void each_piece(int thread, F&& f) {
    constexpr int pieces = Tile<columns>::pieces, W = Tile<columns>::W;
    constexpr int lanes = Tile<columns>::group, step = threads / lanes;
    int first_row = thread / lanes, first_piece = thread % lanes;
#pragma unroll
    for (int row = 0; row < rows; row += step)
#pragma unroll
        for (int piece = 0; piece < pieces; piece += lanes)
            if (rows % step == 0 || first_row + row < rows) f(first_row + row, (first_piece + piece) * W);
}

// Loads rows [0, count) of a head into a tile, with zeros after the last row and column. Copies with
// cp.async, which the caller commits and waits for.
template <int rows, int threads, int HSP>
__device__ void load_tile(Tile<HSP> to, const floatX* from, int stride, int count, int HS,
                          int thread = threadIdx.x) {
    if (HS % Tile<HSP>::W == 0) {
        each_piece<rows, HSP, threads>(thread, [&](int row, int column) {
            bool valid = row < count && column < HS;
            cp_async_16(to.at(row, column), from + (size_t)row * stride + column, valid);
        });
    } else {
#pragma unroll 1
        for (int i = thread; i < rows * HSP; i += threads) {
            int row = i / HSP, column = i % HSP;
            *to.at(row, column) =
                row < count && column < HS ? from[(size_t)row * stride + column] : floatX(0.0f);
        }
    }
}

// Stores the first `count` of the `rows` rows that begin at row `first` of a tile. Called by `threads`
// threads, each with its index `thread`. Returns the amax of what the thread writes.
template <int rows, int threads, int HSP>
__device__ Amax store_tile(floatX* to, Tile<HSP> from, int first, int thread, int stride, int count, int HS) {
    Amax element;
    constexpr int W = Tile<HSP>::W;
    if (HS % W == 0) {
        each_piece<rows, HSP, threads>(thread, [&](int row, int column) {
            if (row >= count || column >= HS) return;
            auto piece = load<W>(from.at(first + row, column));
            store(to + (size_t)row * stride + column, piece);
            element.see(piece);
        });
    } else {
#pragma unroll 1
        for (int i = thread; i < rows * HSP; i += threads) {
            int row = i / HSP, column = i % HSP;
            if (row >= count || column >= HS) continue;
            auto one = load<1>(from.at(first + row, column));
            store(to + (size_t)row * stride + column, one);
            element.see(one);
        }
    }
    return element;
}

// ----------------------------------------------------------------------------
// products

// Rows of a matrix in the registers of a warp, as mma.sync leaves them: of each 16 x 8 block, lane 4 g + t
// holds columns 2 t and 2 t + 1 of row g, then of row g + 8.
template <int rows_, int columns_>
struct Fragment {
    static constexpr int rows = rows_, columns = columns_;
    float at[rows / 16][columns / 8][4];

    __device__ static int row(int m, int i) { return m * 16 + lane_id() / 4 + i / 2 * 8; }
    __device__ static int column(int n, int i) { return n * 8 + lane_id() % 4 * 2 + i % 2; }

    // Calls f(element, m, n, i) for each element of this thread.
    template <typename F>
    __device__ void each(F&& f) {
#pragma unroll
        for (int m = 0; m < rows / 16; m++)
#pragma unroll
            for (int n = 0; n < columns / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) f(at[m][n][i], m, n, i);
    }

    // Calls f(m, i) for each of the two rows row(m, 2 * i) that this thread has in every 16.
    template <typename F>
    __device__ static void each_row(F&& f) {
#pragma unroll
        for (int m = 0; m < rows / 16; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) f(m, i);
    }

    __device__ Fragment() {
        each([](float& element, int, int, int) { element = 0; });
    }

    // Writes the rows as floatX to a tile, from (first_row, first_column) on.
    template <int width>
    __device__ void store(Tile<width> to, int first_row, int first_column) const {
#pragma unroll
        for (int m = 0; m < rows / 16; m++)
#pragma unroll
            for (int n = 0; n < columns / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    store_shared(to.at(first_row + row(m, i), first_column + column(n, i)),
                                 Vec<floatX, 2>{floatX(at[m][n][i]), floatX(at[m][n][i + 1])});
                }
    }
};

// The left operand of one step of a product: 16 rows by `depth` columns, loaded from a tile at (row, k) or
// from the transpose of a tile. In bf16 it can also be taken from a Fragment at (16 m, k), whose elements are
// already in the right lanes; in float they must go through shared memory.
template <typename T>
struct LeftOf;
using Left = LeftOf<floatX>;
constexpr bool tensor_cores = std::is_same_v<floatX, __nv_bfloat16>;

template <>
struct LeftOf<__nv_bfloat16> {
    static constexpr int depth = 16;
    uint32_t at[4];  // in the layout that mma.sync expects

    template <int width>
    __device__ void load(Tile<width> tile, int row, int k) {
        ldmatrix_x4(at, tile.at(row + lane_id() % 16, lane_id() / 16 * 8, k));
    }

    template <int width>
    __device__ void load_transposed(Tile<width> tile, int row, int k) {
        ldmatrix_x4_trans(at, tile.at(k + lane_id() % 8 + lane_id() / 16 * 8, row + lane_id() / 8 % 2 * 8));
    }

    template <typename Fragment>
    __device__ void take(const Fragment& from, int m, int k) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* pair = &from.at[m][k / 8 + i / 2][i % 2 * 2];
            at[i] = bf16_pair(pair[0], pair[1]);
        }
    }
};

template <>
struct LeftOf<float> {
    static constexpr int depth = 4;
    float at[2][depth];  // all columns of rows g and g + 8, the same in four lanes

    template <int width>
    __device__ void load(Tile<width> tile, int row, int k) {
        for (int i = 0; i < 2 * depth; i++)
            at[i / depth][i % depth] = *tile.at(row + lane_id() / 4 + i / depth * 8, k + i % depth);
    }

    template <int width>
    __device__ void load_transposed(Tile<width> tile, int row, int k) {
        for (int i = 0; i < 2 * depth; i++)
            at[i / depth][i % depth] = *tile.at(k + i % depth, row + lane_id() / 4 + i / depth * 8);
    }
};

// How the right operand of a product is stored in its tile.
enum class Right { rows, columns };  // (K, N), or its transpose (N, K)

// sum += left b for one step k of the product. b is the N columns from `first` on of the matrix in the tile.
template <Right right, int rows, int N, int width>
__device__ void product_step(Fragment<rows, N>& sum, const LeftOf<__nv_bfloat16> (&left)[rows / 16],
                             Tile<width> b, int first, int k) {
    static_assert(N == 8 || N % 16 == 0);
    int lane = lane_id();
    if constexpr (N == 8) {
        uint32_t one[2];
        if constexpr (right == Right::columns)
            ldmatrix_x2(one, b.at(first + lane % 8, lane / 8 % 2 * 8, k));
        else
            ldmatrix_x2_trans(one, b.at(k + lane % 16, first));
        for (int m = 0; m < rows / 16; m++) mma_m16n8k16(sum.at[m][0], left[m].at, one);
    } else {
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            uint32_t two[4];
            if constexpr (right == Right::columns)
                ldmatrix_x4(two, b.at(first + n + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8, k));
            else
                ldmatrix_x4_trans(two, b.at(k + lane % 16, first + n + lane / 16 * 8));
#pragma unroll
            for (int m = 0; m < rows / 16; m++) {
                mma_m16n8k16(sum.at[m][n / 8], left[m].at, {two[0], two[1]});
                mma_m16n8k16(sum.at[m][n / 8 + 1], left[m].at, {two[2], two[3]});
            }
        }
    }
}

template <Right right, int rows, int N, int width>
__device__ void product_step(Fragment<rows, N>& sum, const LeftOf<float> (&left)[rows / 16], Tile<width> b,
                             int first, int k) {
    first = pinned(first);  // the sums of wide heads leave no registers for the addresses of all steps
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        for (int i = 0; i < LeftOf<float>::depth; i++) {
            int column = first + sum.column(n, 0);
            Vec<float, 2> pair = right == Right::columns
                                     ? Vec<float, 2>{*b.at(column, k + i), *b.at(column + 1, k + i)}
                                     : load<2>(b.at(k + i, column));
#pragma unroll
            for (int m = 0; m < rows / 16; m++) {
                sum.at[m][n][0] += left[m].at[0][i] * pair[0];
                sum.at[m][n][1] += left[m].at[0][i] * pair[1];
                sum.at[m][n][2] += left[m].at[1][i] * pair[0];
                sum.at[m][n][3] += left[m].at[1][i] * pair[1];
            }
        }
    }
}

// sum (rows, N) += left (rows, K) b (K, N) by one warp. left_at(left, m, k) makes the left operand of one
// step; with Right::rows it may come from registers, so the compiler has to know k, and the loop is unrolled
// completely. Otherwise four steps at a time (in float, one) are enough to hide the loads, and leave
// registers for the sums.
template <Right right, int K, int rows, int N, int width, typename LeftAt>
__device__ void warp_product(Fragment<rows, N>& sum, LeftAt&& left_at, Tile<width> b, int first = 0) {
    static_assert(K % Left::depth == 0);
#pragma unroll(!tensor_cores ? 1 : right == Right::columns ? 4 : K / Left::depth)
    for (int k = 0; k < K; k += Left::depth) {
        Left left[rows / 16];
#pragma unroll
        for (int m = 0; m < rows / 16; m++) left_at(left[m], m, k);
        product_step<right>(sum, left, b, first, k);
    }
}

// Maximum and sum over the four lanes that share the rows of a fragment.
__device__ inline float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float quad_sum(float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}

// ----------------------------------------------------------------------------
// shapes

// Returns whether all queries of a tile see all keys in [k, k + keys). The tile begins at query q, and its
// last query sees no key before last_first.
__device__ inline bool all_seen(int q, int last_first, int k, int keys) {
    return k + keys - 1 <= q && last_first <= k;
}

#endif
