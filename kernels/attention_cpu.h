/*
Attention on the CPU, in tiles of 64 queries by 64 keys that stay in the cache. Formula and layout:
attention.cuh.

Scores are kept transposed, (keys, queries): a vector then holds one key's scores with 16 queries. So the
maximum and the sum of a softmax need no reductions within a vector, and the products need transposed copies
only of q and dout. What serves all products of a tile of queries or of keys is prepared once (TileOperand).
Every sum runs over tiles in ascending order for any number of threads.
*/
#pragma once

#include <algorithm>
#include <omp.h>

#include "kernels/attention_shape.h"
#include "kernels/column_sums.cuh"
#include "kernels/common.cuh"
#include "kernels/fast_math.cuh"
#include "kernels/tile_product.h"

// ----------------------------------------------------------------------------
// tiles

inline void store_rows(floatX* to, int stride, const float* from, int width, int count, int HS, float scale) {
    for (int i = 0; i < count; i++) {
#pragma omp simd
        for (int c = 0; c < HS; c++) to[(size_t)i * stride + c] = floatX(scale * from[i * width + c]);
    }
}

// 64 rows of a head as float, with zeros after the last row and the last column.
struct alignas(64) HeadTile {
    static constexpr int rows = 64;
    float at[rows * max_head_size];
    int width;  // columns: the head size rounded up to whole vectors

    explicit HeadTile(int HS) : width(ceil_div(HS, 16) * 16) {}
    HeadTile(int HS, const floatX* from, int stride, int count, float scale = 1.0f) : HeadTile(HS) {
        load(from, stride, count, HS, scale);
    }
    Elements elements() const { return {at, width, 1}; }
    void clear() { std::fill_n(at, rows * width, 0.0f); }

    void load(const floatX* from, int stride, int count, int HS, float scale = 1.0f) {
        if (count < rows || HS < width) clear();
        for (int i = 0; i < count; i++) {
#pragma omp simd
            for (int c = 0; c < HS; c++) at[i * width + c] = scale * float(from[(size_t)i * stride + c]);
        }
    }

    void store(floatX* to, int stride, int count, int HS, float scale = 1.0f) const {
        store_rows(to, stride, at, width, count, HS, scale);
    }
};

constexpr int tile_rows = HeadTile::rows;

// One value per pair of a key and a query, (keys, queries).
struct alignas(64) ScoreTile {
    float at[tile_rows * tile_rows];
    Elements keys() const { return {at, tile_rows, 1}; }
    Elements queries() const { return keys().transposed(); }
};

// One tile of keys or values of a head. Products in bf16 make their own copies, so they read whole tiles in
// place. Keys from keys_end() on, which no query sees, are not read.
struct KeyRows {
    HeadTile copy;
    Elements elements;

    KeyRows(const AttentionShape& s, const floatX* from, int start) : copy(s.HS), elements(copy.elements()) {
        int count = std::min(tile_rows, s.keys_end() - start);
        bool whole = count == tile_rows && copy.width == s.HS;
        if (whole && cpu_products_in_bf16 && sizeof(floatX) == sizeof(float))
            elements = {(const float*)from, s.kv_row, 1};
        else
            copy.load(from, s.kv_row, count, s.HS);
    }
};

// One tile of keys of a head, with their values.
struct KeyTile {
    int start;
    KeyRows k, v;
    TileOperand keys;  // on the left

    KeyTile(const AttentionShape& s, Qkv<const floatX> qkv, int b, int kv_head, int number)
        : start(number * tile_rows),
          k(s, qkv.keys + s.key(b, start, kv_head), start),
          v(s, qkv.keys + s.value(b, start, kv_head), start),
          keys(OperandSide::left, k.elements, tile_rows, s.HS) {}
};

struct ForwardKeys : KeyTile {
    TileOperand values;  // on the right

    ForwardKeys(const AttentionShape& s, Qkv<const floatX> qkv, int b, int kv_head, int number)
        : KeyTile(s, qkv, b, kv_head, number),
          values(OperandSide::right, v.elements, tile_rows, v.copy.width) {}
};

struct BackwardKeys : KeyTile {
    TileOperand values, right_keys;  // values: on the left

    BackwardKeys(const AttentionShape& s, Qkv<const floatX> qkv, int b, int kv_head, int number)
        : KeyTile(s, qkv, b, kv_head, number),
          values(OperandSide::left, v.elements, tile_rows, s.HS),
          right_keys(OperandSide::right, k.elements, tile_rows, k.copy.width) {}
};

// One tile of queries of a head, and the keys that each sees.
struct QueryTile {
    int start, count;
    int position;                       // the first query's
    int first_key_tile, last_key_tile;  // these queries see no others
    int first_key[tile_rows];
    const HeadTile q;  // multiplied by the scale of the scores
    TileOperand qT;    // on the right

    QueryTile(const AttentionShape& s, Qkv<const floatX> qkv, int b, int h, int number)
        : start(number * tile_rows),
          count(std::min(tile_rows, s.Tq - start)),
          position(s.position(start)),
          q(s.HS, qkv.queries + s.query(b, start, h), s.q_row, count, s.scale()),
          qT(OperandSide::right, q.elements().transposed(), s.HS, tile_rows) {
        for (int i = 0; i < tile_rows; i++) first_key[i] = s.first_key(b, start + std::min(i, count - 1));
        first_key_tile = first_key[0] / tile_rows;
        last_key_tile = (position + count - 1) / tile_rows;
    }

    // Computes the scores of these queries with a tile of keys, -inf where a query does not see the key.
    void scores(ScoreTile& p, const KeyTile& keys, int HS) const {
        tile_product(p.at, tile_rows, keys.keys, qT, tile_rows, tile_rows, HS, false);
        int end = keys.start + tile_rows - 1;
        if (first_key[tile_rows - 1] <= keys.start && end <= position) return;
        for (int j = 0; j < tile_rows; j++) {
#pragma omp simd
            for (int i = 0; i < tile_rows; i++) {
                bool seen = first_key[i] <= keys.start + j && keys.start + j <= position + i;
                p.at[j * tile_rows + i] = seen ? p.at[j * tile_rows + i] : -INFINITY;
            }
        }
    }
};

// ----------------------------------------------------------------------------
// forward

// Computes the output and lse of one tile of queries of head h.
inline void attention_forward_tile_cpu(floatX* out, float* lse, Qkv<const floatX> qkv,
                                       const AttentionShape& s, int b, int h, int query_tile) {
    QueryTile queries(s, qkv, b, h, query_tile);
    ScoreTile p;
    HeadTile sum(s.HS);
    sum.clear();
    alignas(64) float maximum[tile_rows], total[tile_rows], shrink[tile_rows];
    std::fill_n(maximum, tile_rows, -1e30f);  // finite: a query may see nothing of its first tile of keys
    std::fill_n(total, tile_rows, 0.0f);

    for (int key_tile = queries.first_key_tile; key_tile <= queries.last_key_tile; key_tile++) {
        ForwardKeys keys(s, qkv, b, h / s.group(), key_tile);
        queries.scores(p, keys, s.HS);

        std::copy_n(maximum, tile_rows, shrink);
        for (int j = 0; j < tile_rows; j++) {
#pragma omp simd
            for (int i = 0; i < tile_rows; i++) {
                float score = p.at[j * tile_rows + i];
                maximum[i] = score > maximum[i] ? score : maximum[i];
            }
        }
#pragma omp simd
        for (int i = 0; i < tile_rows; i++) {
            shrink[i] = fast_exp(shrink[i] - maximum[i]);
            total[i] *= shrink[i];
        }
        for (int j = 0; j < tile_rows; j++) {
#pragma omp simd
            for (int i = 0; i < tile_rows; i++) {
                float e = fast_exp(p.at[j * tile_rows + i] - maximum[i]);
                p.at[j * tile_rows + i] = e;
                total[i] += e;
            }
        }
        for (int i = 0; i < tile_rows; i++) {
#pragma omp simd
            for (int c = 0; c < sum.width; c++) sum.at[i * sum.width + c] *= shrink[i];
        }
        TileOperand probabilities(OperandSide::left, p.queries(), tile_rows, tile_rows);
        tile_product(sum.at, sum.width, probabilities, keys.values, tile_rows, sum.width, tile_rows, true);
    }

    for (int i = 0; i < queries.count; i++) {
        int query = queries.start + i;
        store_rows(out + s.output(b, query, h), 0, sum.at + i * sum.width, 0, 1, s.HS, 1 / total[i]);
        lse[s.lse(b, query, h)] = maximum[i] + logf(total[i]);
    }
}

// Late tiles see more keys: they go first, so that no thread is left with a long one at the end.
inline void attention_forward_cpu(floatX* out, float* lse, Qkv<const floatX> qkv, const AttentionShape& s) {
    int tiles = ceil_div(s.Tq, tile_rows);
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (int i = 0; i < tiles; i++)
        for (int b = 0; b < s.B; b++)
            for (int h = 0; h < s.NH; h++) attention_forward_tile_cpu(out, lse, qkv, s, b, h, tiles - 1 - i);
}

// ----------------------------------------------------------------------------
// backward

struct AttentionBackward {
    Qkv<floatX> dqkv;
    const floatX *dout, *out;
    Qkv<const floatX> qkv;
    const float* lse;
    AttentionShape shape;
};

// The backward pass's view of one tile of queries.
struct BackwardQueries : QueryTile {
    const HeadTile dout;
    TileOperand right_q, right_dout, doutT;            // on the right
    alignas(64) float lse[tile_rows], dot[tile_rows];  // dot: dout . out of each query

    BackwardQueries(const AttentionBackward& a, int b, int h, int number)
        : QueryTile(a.shape, a.qkv, b, h, number),
          dout(a.shape.HS, a.dout + a.shape.output(b, start, h), a.shape.out_row(), count),
          right_q(OperandSide::right, q.elements(), tile_rows, q.width),
          right_dout(OperandSide::right, dout.elements(), tile_rows, dout.width),
          doutT(OperandSide::right, dout.elements().transposed(), a.shape.HS, tile_rows) {
        const AttentionShape& s = a.shape;
        std::fill_n(lse, tile_rows, INFINITY);  // rows past the last query get probability 0
        std::fill_n(dot, tile_rows, 0.0f);
        for (int i = 0; i < count; i++) {
            lse[i] = a.lse[s.lse(b, start + i, h)];
            const floatX* o = a.out + s.output(b, start + i, h);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int c = 0; c < s.HS; c++) sum += dout.at[i * dout.width + c] * float(o[c]);
            dot[i] = sum;
        }
    }

    // Computes the probabilities, and the gradients of the scores, with a tile of keys.
    void dscores(ScoreTile& p, ScoreTile& ds, const BackwardKeys& keys, int HS) const {
        scores(p, keys, HS);
        tile_product(ds.at, tile_rows, keys.values, doutT, tile_rows, tile_rows, HS, false);
        for (int j = 0; j < tile_rows; j++) {
#pragma omp simd
            for (int i = 0; i < tile_rows; i++) {
                float probability = fast_exp(p.at[j * tile_rows + i] - lse[i]);
                p.at[j * tile_rows + i] = probability;
                ds.at[j * tile_rows + i] = probability * (ds.at[j * tile_rows + i] - dot[i]);
            }
        }
    }

    // Adds these queries' contribution to the gradients of a tile of keys and values, both (64, width).
    void add_dkv(float* dk, float* dv, const ScoreTile& p, const ScoreTile& ds) const {
        TileOperand left_ds(OperandSide::left, ds.keys(), tile_rows, tile_rows);
        TileOperand left_p(OperandSide::left, p.keys(), tile_rows, tile_rows);
        tile_product(dk, q.width, left_ds, right_q, tile_rows, q.width, tile_rows, true);
        tile_product(dv, q.width, left_p, right_dout, tile_rows, q.width, tile_rows, true);
    }
};

// For a tile of queries and all keys that it sees: writes dq and, unless dkv (tiles of keys, 2, 64, width) is
// null, adds the tile's contribution to dkv.
inline void attention_backward_queries_cpu(const AttentionBackward& a, float* dkv, int b, int h,
                                           int query_tile) {
    const AttentionShape& s = a.shape;
    BackwardQueries queries(a, b, h, query_tile);
    ScoreTile p, ds;
    HeadTile dq(s.HS);
    dq.clear();
    for (int key_tile = queries.first_key_tile; key_tile <= queries.last_key_tile; key_tile++) {
        BackwardKeys keys(s, a.qkv, b, h / s.group(), key_tile);
        queries.dscores(p, ds, keys, s.HS);
        TileOperand left_ds(OperandSide::left, ds.queries(), tile_rows, tile_rows);
        tile_product(dq.at, dq.width, left_ds, keys.right_keys, tile_rows, dq.width, tile_rows, true);
        if (dkv) {
            float* dk = dkv + (size_t)key_tile * 2 * tile_rows * dq.width;
            queries.add_dkv(dk, dk + tile_rows * dq.width, p, ds);
        }
    }
    dq.store(a.dqkv.queries + s.query(b, queries.start, h), s.q_row, queries.count, s.HS, s.scale());
}

// For a tile of keys and all queries that see it: writes dk and dv.
inline void attention_backward_keys_cpu(const AttentionBackward& a, int b, int kv_head, int key_tile) {
    const AttentionShape& s = a.shape;
    BackwardKeys keys(s, a.qkv, b, kv_head, key_tile);
    ScoreTile p, ds;
    HeadTile dk(s.HS), dv(s.HS);
    dk.clear();
    dv.clear();
    int first_tile = std::max(keys.start - s.q0, 0) / tile_rows;
    int tiles = keys.start < s.keys_end() ? ceil_div(s.Tq, tile_rows) : 0;  // tiles of queries
    for (int h = kv_head * s.group(); h < (kv_head + 1) * s.group(); h++) {
        for (int i = first_tile; i < tiles; i++) {
            if (s.first_key(b, i * tile_rows) >= keys.start + tile_rows) break;
            BackwardQueries queries(a, b, h, i);
            queries.dscores(p, ds, keys, s.HS);
            queries.add_dkv(dk.at, dv.at, p, ds);
        }
    }
    int count = std::min(tile_rows, s.Tk - keys.start);
    dk.store(a.dqkv.keys + s.key(b, keys.start, kv_head), s.kv_row, count, s.HS);
    dv.store(a.dqkv.keys + s.value(b, keys.start, kv_head), s.kv_row, count, s.HS);
}

// Computes all gradients of one key/value head and its query heads. Scratch: dkv (tiles of keys, 2, 64,
// width)
inline void attention_backward_head_cpu(const AttentionBackward& a, float* dkv, int b, int kv_head) {
    const AttentionShape& s = a.shape;
    int query_tiles = ceil_div(s.Tq, tile_rows), key_tiles = ceil_div(s.Tk, tile_rows);
    int width = HeadTile(s.HS).width;
    std::fill_n(dkv, (size_t)key_tiles * 2 * tile_rows * width, 0.0f);
    for (int h = kv_head * s.group(); h < (kv_head + 1) * s.group(); h++)
        for (int i = 0; i < query_tiles; i++) attention_backward_queries_cpu(a, dkv, b, h, i);
    for (int i = 0; i < key_tiles; i++) {
        int start = i * tile_rows, count = std::min(tile_rows, s.Tk - start);
        float* dk = dkv + (size_t)i * 2 * tile_rows * width;
        store_rows(a.dqkv.keys + s.key(b, start, kv_head), s.kv_row, dk, width, count, s.HS, 1.0f);
        store_rows(a.dqkv.keys + s.value(b, start, kv_head), s.kv_row, dk + tile_rows * width, width, count,
                   s.HS, 1.0f);
    }
}

// Return the number of floats of scratch: for the dkv of one head, and of all heads.
inline size_t attention_backward_head_scratch_cpu(const AttentionShape& s) {
    return (size_t)ceil_div(s.Tk, tile_rows) * 2 * tile_rows * HeadTile(s.HS).width;
}
inline size_t attention_backward_scratch_cpu(const AttentionShape& s) {
    return (size_t)s.B * s.NKV * attention_backward_head_scratch_cpu(s);
}

// Head by head, each pair of tiles is visited once and costs five products. With too few heads to occupy the
// threads, the gradients of queries and of keys are computed separately, tile by tile, at seven products per
// pair. Both ways add the same products in the same order, so the results are identical.
inline void attention_backward_products_cpu(const AttentionBackward& a, float* scratch) {
    const AttentionShape& s = a.shape;
    int query_tiles = ceil_div(s.Tq, tile_rows), key_tiles = ceil_div(s.Tk, tile_rows);
    int heads = s.B * s.NKV, threads = omp_get_max_threads();
    if (7 * heads >= 5 * ceil_div(heads, threads) * threads) {
        size_t head_scratch = attention_backward_head_scratch_cpu(s);
#pragma omp parallel for schedule(dynamic)
        for (int head = 0; head < heads; head++) {
            attention_backward_head_cpu(a, scratch + head * head_scratch, head / s.NKV, head % s.NKV);
        }
        return;
    }
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (int i = 0; i < query_tiles; i++)
        for (int b = 0; b < s.B; b++)
            for (int h = 0; h < s.NH; h++)
                attention_backward_queries_cpu(a, nullptr, b, h, query_tiles - 1 - i);
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (int i = 0; i < key_tiles; i++)
        for (int b = 0; b < s.B; b++)
            for (int h = 0; h < s.NKV; h++) attention_backward_keys_cpu(a, b, h, i);
}

inline void attention_backward_cpu(const AttentionBackward& a, float* scratch, float* dbias) {
    attention_backward_products_cpu(a, scratch);
    if (dbias)
        matmul_backward_bias_cpu(dbias, scratch, a.dqkv.queries, a.shape.B * a.shape.Tk, a.shape.q_row);
}
