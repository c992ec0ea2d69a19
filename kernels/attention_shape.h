/*
The sizes of an attention layer, where its heads lie in memory, and which keys a query sees: common to all
devices.
*/
#pragma once

#include <cmath>

#include "kernels/common.cuh"
#include "kernels/mean_keys.h"

constexpr int max_head_size = 256;

// Pointers to the first query of a call and to the first key, or to their gradients.
template <typename T>
struct Qkv {
    T *queries, *keys;  // the values of a position follow its keys
};

// A call has Tq queries of each sequence, and Tk keys and values. Query i is at position q0 + i among these.
// Queries are indexed from the first of the call, keys and values by their positions. attention_shape() sets
// the members after doc_start.
struct AttentionShape {
    int B, Tq, Tk, q0, NH, NKV, HS;
    int window = 0;                  // the most keys that a query sees, its own included; 0: no limit
    const int* doc_start = nullptr;  // (B, Tk) first position of each position's document, or null
    // Strides: from sequence to sequence in rows, of queries (q_rows) and of outputs (out_rows); from row to
    // row in elements, of queries (q_row) and of keys and values (kv_row). Outputs and lse have room for
    // out_heads heads.
    int q_rows = 0, out_rows = 0, q_row = 0, kv_row = 0, out_heads = 0;

    HOST_DEVICE int group() const { return NH / NKV; }  // query heads that share a key/value head
    HOST_DEVICE int A() const { return NH * HS; }       // elements of a row's queries
    HOST_DEVICE float scale() const { return 1 / sqrtf((float)HS); }

    HOST_DEVICE int position(int i) const { return q0 + i; }   // query i is at this position
    HOST_DEVICE int keys_end() const { return position(Tq); }  // no query sees a key from here on

    // Offset of a query from Qkv::queries, and of the key and the value at a position from Qkv::keys.
    HOST_DEVICE size_t query(int b, int i, int h) const {
        return ((size_t)b * q_rows + i) * q_row + (size_t)h * HS;
    }
    HOST_DEVICE size_t key(int b, int at, int h) const {
        return ((size_t)b * Tk + at) * kv_row + (size_t)h * HS;
    }
    HOST_DEVICE size_t value(int b, int at, int h) const { return key(b, at, NKV + h); }

    // Offset of a head's output for a query from the output of the first head and query, in rows that are
    // out_row() elements apart; lse(): the same offset in lse (B, out_heads, out_rows).
    HOST_DEVICE int out_row() const { return out_heads * HS; }
    HOST_DEVICE size_t output(int b, int i, int h) const {
        return ((size_t)b * out_rows + i) * out_row() + (size_t)h * HS;
    }
    HOST_DEVICE size_t lse(int b, int i, int h) const { return ((size_t)b * out_heads + h) * out_rows + i; }

    // Mean number of keys that a query sees, if a sequence is one document.
    double mean_keys() const {
        auto seen = [&](int T) { return T > 0 ? T * mean_causal_keys(T, window) : 0; };  // by the first T
        return (seen(keys_end()) - seen(q0)) / Tq;
    }

    // Query i sees the keys first_key(b, i) ... position(i). Neither end ever moves back, so a tile of
    // queries sees no key before the first key of its first query, and none after the position of its last.
    HOST_DEVICE int first_key(int b, int i) const {
        int at = position(i), first = window && at >= window ? at - window + 1 : 0;
        int document = doc_start ? doc_start[(size_t)b * Tk + at] : 0;
        return first > document ? first : document;
    }
};

// Returns the shape with all heads in one array (B, Tk, NH + 2*NKV, HS), see in_rows(), and outputs (B, Tq,
// NH, HS). Throws Error if the shape is not supported.
inline AttentionShape attention_shape(AttentionShape s) {
    if (s.HS > max_head_size || s.NH % s.NKV != 0) {
        fail("attention: %d query heads on %d key/value heads of size %d are not supported; the size must be "
             "at most %d, and the first number a multiple of the second",
             s.NH, s.NKV, s.HS, max_head_size);
    }
    if (s.q0 < 0 || s.Tq < 1 || s.Tq > s.Tk - s.q0) {
        fail("attention: %d queries from position %d on do not fit in %d positions; each needs one of these",
             s.Tq, s.q0, s.Tk);
    }
    s.q_rows = s.Tk, s.out_rows = s.Tq, s.out_heads = s.NH;
    s.q_row = s.kv_row = (s.NH + 2 * s.NKV) * s.HS;
    return s;
}

// Returns pointers to the heads in one array of such a shape. Query i is in the row of its position.
template <typename T>
HOST_DEVICE Qkv<T> in_rows(T* qkv, const AttentionShape& s) {
    return {qkv + (size_t)s.q0 * s.q_row, qkv + (size_t)s.NH * s.HS};
}

// Returns the shape with queries and outputs in consecutive rows of arrays (B, rows, heads, HS), where the
// call covers NH consecutive heads, and with the keys and values of these heads in another array (B, Tk,
// 2*NKV, HS).
inline AttentionShape attention_shape_apart(AttentionShape s, int rows, int heads) {
    s = attention_shape(s);
    if (s.Tq > rows || s.NH > heads)
        fail("attention: %d queries of %d heads do not fit in %d rows of %d heads", s.Tq, s.NH, rows, heads);
    s.q_rows = s.out_rows = rows, s.out_heads = heads;
    s.q_row = heads * s.HS, s.kv_row = 2 * s.NKV * s.HS;
    return s;
}

// Returns the shape of a call with a query at each of T positions.
inline AttentionShape self_attention_shape(int B, int T, int NH, int NKV, int HS, int window,
                                           const int* doc_start) {
    return attention_shape({.B = B,
                            .Tq = T,
                            .Tk = T,
                            .q0 = 0,
                            .NH = NH,
                            .NKV = NKV,
                            .HS = HS,
                            .window = window,
                            .doc_start = doc_start});
}
