/*
Attention on the CPU, in tiles of 64 queries by 64 keys that stay in the cache. Formula and layout:
attention.cuh.

Scores are kept transposed, (keys, queries): a vector then holds one key's scores with 16 queries. So the
maximum and the sum of a softmax need no reductions within a vector. Outputs and the gradients of queries are
summed transposed too, (columns, queries), so that probabilities and the gradients of scores are right
operands as they are. Only q, dout, and keys or values are transposed. A task visits several tiles of queries
of a head, and prepares the keys and values that these see once for all of them (PreparedKeys).
Every sum runs over tiles in ascending order for any number of threads.
*/
#pragma once

#include <algorithm>
#include <omp.h>
#include <vector>

#include "kernels/attention_shape.h"
#include "kernels/column_sums.cuh"
#include "kernels/common.cuh"
#include "kernels/fast_math.cuh"
#include "kernels/host_memory.h"  // KeptMemory
#include "kernels/tile_product.h"

// ----------------------------------------------------------------------------
// tiles

constexpr int tile_rows = 64;

// Returns the columns of a tile: the head size rounded up to whole vectors.
inline int tile_width(int HS) {
    return round_up(HS, 16);
}

// Copies `count` rows of a head as float, (64, width), with zeros after the last row and the last column.
inline void load_rows(float* to, const floatX* from, int stride, int count, int HS, float scale) {
    const int width = tile_width(HS);
    if (count < tile_rows || HS < width) std::fill_n(to, tile_rows * width, 0.0f);
    for (int i = 0; i < count; i++) {
#pragma omp simd
        for (int c = 0; c < HS; c++) to[i * width + c] = scale * float(from[(size_t)i * stride + c]);
    }
}

inline void store_rows(floatX* to, int stride, const float* from, int count, int HS) {
    for (int i = 0; i < count; i++) {
#pragma omp simd
        for (int c = 0; c < HS; c++) to[(size_t)i * stride + c] = floatX(from[i * tile_width(HS) + c]);
    }
}

// Stores a transposed tile, (width, 64).
inline void store_columns(floatX* to, int stride, const float* from, int count, int HS, const float* scale) {
    for (int i = 0; i < count; i++) {
#pragma omp simd
        for (int c = 0; c < HS; c++) to[(size_t)i * stride + c] = floatX(scale[i] * from[c * tile_rows + i]);
    }
}

// Room for 64 rows of a head, by rows or transposed, or for an operand made of them.
struct alignas(64) HeadTile {
    float at[tile_rows * max_head_size];
    void clear(int HS) { std::fill_n(at, tile_rows * tile_width(HS), 0.0f); }
};

// One value per pair of a key and a query, (keys, queries).
struct alignas(64) ScoreTile {
    float at[tile_rows * tile_rows];
    Elements elements() const { return {at, tile_rows, 1}; }
};

// ----------------------------------------------------------------------------
// keys

enum class AttentionPass { forward, backward };

// One tile of keys of a head, with their values, as operands on the left. Keys from keys_end() on, which no
// query sees, are not read.
struct KeyTile {
    int start;
    TileOperand keys, values;  // (64, HS); values: for the backward pass
    TileOperand transposed;    // (width, 64): the values in the forward pass, the keys in the backward pass

    // Products in fp32 read copies of keys and values, those in bf16 a rounded copy of each operand.
    static size_t room(int HS, AttentionPass pass) {
        const int operands = pass == AttentionPass::forward ? 2 : 3;
        return operand_room(HS) * (cpu_products_in_bf16 ? operands : 4);
    }

    KeyTile() {}
    // memory: (room(HS, pass))
    KeyTile(const AttentionShape& s, Qkv<const floatX> qkv, int b, int kv_head, int number,
            AttentionPass pass, float* memory)
        : start(number * tile_rows) {
        HeadTile copies[2];
        const size_t size = operand_room(s.HS);
        const int count = std::min(tile_rows, s.keys_end() - start), width = tile_width(s.HS);
        float* k = cpu_products_in_bf16 ? copies[0].at : memory;
        float* v = cpu_products_in_bf16 ? copies[1].at : memory + 2 * size;
        load_rows(k, qkv.keys + s.key(b, start, kv_head), s.kv_row, count, s.HS, 1.0f);
        load_rows(v, qkv.keys + s.value(b, start, kv_head), s.kv_row, count, s.HS, 1.0f);
        const bool forward = pass == AttentionPass::forward;
        auto by_rows = [&](float* rows, float* to) {
            return TileOperand(OperandSide::left, {rows, width, 1}, tile_rows, s.HS, to);
        };
        keys = by_rows(k, memory);
        transposed =
            TileOperand(OperandSide::left, {forward ? v : k, 1, width}, width, tile_rows, memory + size);
        if (!forward) values = by_rows(v, memory + 2 * size);
    }

private:
    // Returns the floats that a rounded operand takes, half of those of a copy.
    static size_t operand_room(int HS) { return (size_t)tile_rows * round_up(HS, 32) / 2; }
};

// For each thread, the tiles of keys that it used last: a task that visits all queries of a head prepares
// each tile once, unless there are more than `most` of them. All memory is allocated before threads start,
// because a thread of OpenMP must not throw. A stream's thread has one of these at a time.
class PreparedKeys {
public:
    PreparedKeys(const AttentionShape& s, Qkv<const floatX> qkv, AttentionPass pass)
        : s_(s),
          qkv_(qkv),
          pass_(pass),
          places_(std::min(ceil_div(s.keys_end(), tile_rows), most)),
          room_(KeyTile::room(s.HS, pass)),
          held_((size_t)(omp_get_max_threads() * places_)) {
        thread_local KeptMemory<float> kept;
        memory_ = kept.of(held_.size() * room_);
    }
    PreparedKeys(const PreparedKeys&) = delete;

    const KeyTile& tile(int b, int kv_head, int number) {
        const int place = omp_get_thread_num() * places_ + number % places_;
        Held& held = held_[place];
        if (held.number != number || held.b != b || held.kv_head != kv_head)
            held = {b, kv_head, number, {s_, qkv_, b, kv_head, number, pass_, memory_ + place * room_}};
        return held.tile;
    }

private:
    static constexpr int most = 64;
    struct Held {
        int b = 0, kv_head = 0, number = -1;
        KeyTile tile;
    };

    const AttentionShape& s_;
    const Qkv<const floatX> qkv_;
    const AttentionPass pass_;
    const int places_;
    const size_t room_;
    std::vector<Held> held_;
    float* memory_;
};

// ----------------------------------------------------------------------------
// queries

// Rows of a head, and the right operands made of them.
struct QueryRows {
    HeadTile rows;  // (64, width)
    Elements elements;
    HeadTile memory[2];

    QueryRows(int HS, const floatX* from, int stride, int count, float scale)
        : elements{rows.at, tile_width(HS), 1} {
        load_rows(rows.at, from, stride, count, HS, scale);
    }
    QueryRows(const QueryRows&) = delete;  // operands refer to it

    // Return the rows as an operand (64, width), or transposed, (HS, 64).
    TileOperand by_rows() { return {OperandSide::right, elements, tile_rows, elements.row, memory[0].at}; }
    TileOperand by_columns(int HS) {
        return {OperandSide::right, elements.transposed(), HS, tile_rows, memory[1].at};
    }
};

// One tile of queries of a head, and the keys that each sees.
struct QueryTile {
    int start, count;
    int position;                       // the first query's
    int first_key_tile, last_key_tile;  // these queries see no others
    int first_key[tile_rows];
    QueryRows q;  // multiplied by the scale of the scores
    TileOperand qT;

    QueryTile(const AttentionShape& s, Qkv<const floatX> qkv, int b, int h, int number)
        : start(number * tile_rows),
          count(std::min(tile_rows, s.Tq - start)),
          position(s.position(start)),
          q(s.HS, qkv.queries + s.query(b, start, h), s.q_row, count, s.scale()),
          qT(q.by_columns(s.HS)) {
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
            const int key = keys.start + j;
#pragma omp simd
            for (int i = 0; i < tile_rows; i++) {
                float score = p.at[j * tile_rows + i];
                bool seen = (first_key[i] <= key) & (key <= position + i);
                p.at[j * tile_rows + i] = seen ? score : -INFINITY;
            }
        }
    }
};

// ----------------------------------------------------------------------------
// forward

// Computes the output and lse of one tile of queries of head h.
inline void attention_forward_tile_cpu(floatX* out, float* lse, Qkv<const floatX> qkv,
                                       const AttentionShape& s, int b, int h, int query_tile,
                                       PreparedKeys& prepared) {
    const int width = tile_width(s.HS);
    QueryTile queries(s, qkv, b, h, query_tile);
    ScoreTile p, rounded;
    HeadTile sum;  // (width, queries)
    sum.clear(s.HS);
    alignas(64) float maximum[tile_rows], total[tile_rows], shrink[tile_rows];
    std::fill_n(maximum, tile_rows, -1e30f);  // finite: a query may see nothing of its first tile of keys
    std::fill_n(total, tile_rows, 0.0f);

    for (int i = queries.first_key_tile; i <= queries.last_key_tile; i++) {
        const KeyTile& keys = prepared.tile(b, h / s.group(), i);
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
        for (int c = 0; c < width; c++) {
#pragma omp simd
            for (int i = 0; i < tile_rows; i++) sum.at[c * tile_rows + i] *= shrink[i];
        }
        TileOperand probabilities(OperandSide::right, p.elements(), tile_rows, tile_rows, rounded.at);
        tile_product(sum.at, tile_rows, keys.transposed, probabilities, width, tile_rows, tile_rows, true);
    }

    for (int i = 0; i < queries.count; i++) {
        lse[s.lse(b, queries.start + i, h)] = maximum[i] + logf(total[i]);
        total[i] = 1 / total[i];
    }
    store_columns(out + s.output(b, queries.start, h), s.out_row(), sum.at, queries.count, s.HS, total);
}

// A task is some of a head's tiles of queries, or all of them if that leaves eight tasks for each thread.
// Late tiles see more keys, so they go first, and no thread is left with a long task at the end.
inline void attention_forward_cpu(floatX* out, float* lse, Qkv<const floatX> qkv, const AttentionShape& s) {
    const int tiles = ceil_div(s.Tq, tile_rows);
    const int part = ceil_div(tiles, ceil_div(8 * omp_get_max_threads(), s.B * s.NH));
    PreparedKeys prepared(s, qkv, AttentionPass::forward);
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (int number = ceil_div(tiles, part) - 1; number >= 0; number--)
        for (int b = 0; b < s.B; b++)
            for (int h = 0; h < s.NH; h++) {
                TileRegisters registers;
                for (int i = number * part; i < std::min((number + 1) * part, tiles); i++)
                    attention_forward_tile_cpu(out, lse, qkv, s, b, h, i, prepared);
            }
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
    QueryRows dout;
    TileOperand right_q, right_dout, doutT;
    alignas(64) float lse[tile_rows], dot[tile_rows];  // dot: dout . out of each query

    BackwardQueries(const AttentionBackward& a, int b, int h, int number)
        : QueryTile(a.shape, a.qkv, b, h, number),
          dout(a.shape.HS, a.dout + a.shape.output(b, start, h), a.shape.out_row(), count, 1.0f),
          right_q(q.by_rows()),
          right_dout(dout.by_rows()),
          doutT(dout.by_columns(a.shape.HS)) {
        const AttentionShape& s = a.shape;
        std::fill_n(lse, tile_rows, INFINITY);  // rows past the last query get probability 0
        std::fill_n(dot, tile_rows, 0.0f);
        for (int i = 0; i < count; i++) {
            lse[i] = a.lse[s.lse(b, start + i, h)];
            const floatX* o = a.out + s.output(b, start + i, h);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int c = 0; c < s.HS; c++) sum += dout.rows.at[i * tile_width(s.HS) + c] * float(o[c]);
            dot[i] = sum;
        }
    }

    // Computes the probabilities, and the gradients of the scores, with a tile of keys.
    void dscores(ScoreTile& p, ScoreTile& ds, const KeyTile& keys, int HS) const {
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
    void add_dkv(float* dk, float* dv, const ScoreTile& p, const ScoreTile& ds, int HS) const {
        const int width = tile_width(HS);
        ScoreTile rounded;
        TileOperand left_ds(OperandSide::left, ds.elements(), tile_rows, tile_rows, rounded.at);
        tile_product(dk, width, left_ds, right_q, tile_rows, width, tile_rows, true);
        TileOperand left_p(OperandSide::left, p.elements(), tile_rows, tile_rows, rounded.at);
        tile_product(dv, width, left_p, right_dout, tile_rows, width, tile_rows, true);
    }
};

// For a tile of queries and all keys that it sees: writes dq and, unless dkv (tiles of keys, 2, 64, width) is
// null, adds the tile's contribution to dkv.
inline void attention_backward_queries_cpu(const AttentionBackward& a, float* dkv, int b, int h,
                                           int query_tile, PreparedKeys& prepared) {
    const AttentionShape& s = a.shape;
    const int width = tile_width(s.HS);
    BackwardQueries queries(a, b, h, query_tile);
    ScoreTile p, ds, rounded;
    HeadTile dq;  // (width, queries)
    dq.clear(s.HS);
    for (int i = queries.first_key_tile; i <= queries.last_key_tile; i++) {
        const KeyTile& keys = prepared.tile(b, h / s.group(), i);
        queries.dscores(p, ds, keys, s.HS);
        TileOperand right_ds(OperandSide::right, ds.elements(), tile_rows, tile_rows, rounded.at);
        tile_product(dq.at, tile_rows, keys.transposed, right_ds, width, tile_rows, tile_rows, true);
        if (dkv) {
            float* dk = dkv + (size_t)i * 2 * tile_rows * width;
            queries.add_dkv(dk, dk + tile_rows * width, p, ds, s.HS);
        }
    }
    alignas(64) float scale[tile_rows];
    std::fill_n(scale, tile_rows, s.scale());
    store_columns(a.dqkv.queries + s.query(b, queries.start, h), s.q_row, dq.at, queries.count, s.HS, scale);
}

inline void store_dkv(const AttentionBackward& a, int b, int kv_head, int key_tile, const float* dk,
                      const float* dv) {
    const AttentionShape& s = a.shape;
    const int start = key_tile * tile_rows, count = std::min(tile_rows, s.Tk - start);
    store_rows(a.dqkv.keys + s.key(b, start, kv_head), s.kv_row, dk, count, s.HS);
    store_rows(a.dqkv.keys + s.value(b, start, kv_head), s.kv_row, dv, count, s.HS);
}

// For a tile of keys and all queries that see it: writes dk and dv.
inline void attention_backward_keys_cpu(const AttentionBackward& a, int b, int kv_head, int key_tile,
                                        PreparedKeys& prepared) {
    const AttentionShape& s = a.shape;
    const KeyTile& keys = prepared.tile(b, kv_head, key_tile);
    TileRegisters registers;
    ScoreTile p, ds;
    HeadTile dk, dv;
    dk.clear(s.HS);
    dv.clear(s.HS);
    int first_tile = std::max(keys.start - s.q0, 0) / tile_rows;
    int query_tiles = keys.start < s.keys_end() ? ceil_div(s.Tq, tile_rows) : 0;
    for (int h = kv_head * s.group(); h < (kv_head + 1) * s.group(); h++) {
        for (int i = first_tile; i < query_tiles; i++) {
            if (s.first_key(b, i * tile_rows) >= keys.start + tile_rows) break;
            BackwardQueries queries(a, b, h, i);
            queries.dscores(p, ds, keys, s.HS);
            queries.add_dkv(dk.at, dv.at, p, ds, s.HS);
        }
    }
    store_dkv(a, b, kv_head, key_tile, dk.at, dv.at);
}

// Computes all gradients of one key/value head and its query heads. Scratch: dkv (tiles of keys, 2, 64,
// width)
inline void attention_backward_head_cpu(const AttentionBackward& a, float* dkv, PreparedKeys& prepared, int b,
                                        int kv_head) {
    const AttentionShape& s = a.shape;
    int query_tiles = ceil_div(s.Tq, tile_rows), key_tiles = ceil_div(s.Tk, tile_rows);
    int width = tile_width(s.HS);
    std::fill_n(dkv, (size_t)key_tiles * 2 * tile_rows * width, 0.0f);
    TileRegisters registers;
    for (int h = kv_head * s.group(); h < (kv_head + 1) * s.group(); h++)
        for (int i = 0; i < query_tiles; i++) attention_backward_queries_cpu(a, dkv, b, h, i, prepared);
    for (int i = 0; i < key_tiles; i++, dkv += 2 * tile_rows * width)
        store_dkv(a, b, kv_head, i, dkv, dkv + tile_rows * width);
}

// Return the number of floats of scratch: for the dkv of one head, and of all heads.
inline size_t attention_backward_head_scratch_cpu(const AttentionShape& s) {
    return (size_t)ceil_div(s.Tk, tile_rows) * 2 * tile_rows * tile_width(s.HS);
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
    PreparedKeys prepared(s, a.qkv, AttentionPass::backward);
    if (7 * heads >= 5 * ceil_div(heads, threads) * threads) {
        size_t head_scratch = attention_backward_head_scratch_cpu(s);
#pragma omp parallel for schedule(dynamic)
        for (int head = 0; head < heads; head++) {
            attention_backward_head_cpu(a, scratch + head * head_scratch, prepared, head / s.NKV,
                                        head % s.NKV);
        }
        return;
    }
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (int i = 0; i < query_tiles; i++)
        for (int b = 0; b < s.B; b++)
            for (int h = 0; h < s.NH; h++) {
                TileRegisters registers;
                attention_backward_queries_cpu(a, nullptr, b, h, query_tiles - 1 - i, prepared);
            }
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (int i = 0; i < key_tiles; i++)
        for (int b = 0; b < s.B; b++)
            for (int h = 0; h < s.NKV; h++) attention_backward_keys_cpu(a, b, h, i, prepared);
}

inline void attention_backward_cpu(const AttentionBackward& a, float* scratch, float* dbias) {
    attention_backward_products_cpu(a, scratch);
    if (dbias)
        matmul_backward_bias_cpu(dbias, scratch, a.dqkv.queries, a.shape.B * a.shape.Tk, a.shape.q_row);
}
