/*
The sizes of an attention layer, where its heads lie in memory, and which keys a query sees: common to all
devices.
*/
#pragma once

#include <cmath>

#include "kernels/common.cuh"
#include "kernels/mean_keys.h"

constexpr int max_head_size = 256;

// A call has Tq queries of each sequence, and Tk keys and values. Query i is at position q0 + i among these.
// Queries are indexed from the first of the call, keys and values by their positions. attention_shape() sets
// the members after doc_start.
struct AttentionShape {
    int B, Tq, Tk, q0, NH, NKV, HS;
    int window = 0;                  // the most keys that a query sees, its own included; 0: no limit
    const int* doc_start = nullptr;  // (B, Tk) first position of each position's document, or null
    // Where heads lie in memory: query i of a sequence is in row q_first + i of its q_rows rows of queries,
    // and row out_first + i of its out_rows rows of outputs. Keys begin at offset keys_at.
    int q_rows = 0, q_first = 0, q_row = 0, kv_row = 0, out_rows = 0, out_first = 0;
    size_t keys_at = 0;

    HOST_DEVICE int group() const { return NH / NKV; }  // query heads that share a key/value head
    HOST_DEVICE float scale() const { return 1 / sqrtf((float)HS); }

    HOST_DEVICE int position(int i) const { return q0 + i; }   // query i is at this position
    HOST_DEVICE int keys_end() const { return position(Tq); }  // no query sees a key from here on

    // Vectors of a query, and of the key and the value at a position: offsets into qkv, in rows `q_row` and
    // `kv_row` apart. All are in one array (B, Tk, NH + 2*NKV, HS), or queries (B, q_rows, NH, HS) come
    // before keys and values (B, Tk, 2*NKV, HS).
    HOST_DEVICE size_t query(int b, int i, int h) const {
        return ((size_t)b * q_rows + q_first + i) * q_row + (size_t)h * HS;
    }
    HOST_DEVICE size_t key(int b, int at, int h) const {
        return keys_at + ((size_t)b * Tk + at) * kv_row + (size_t)h * HS;
    }
    HOST_DEVICE size_t value(int b, int at, int h) const { return key(b, at, NKV + h); }

    // A head's output for a query: offset into out (B, out_rows, NH, HS), rows `out_row` apart; and its
    // offset into lse (B, NH, out_rows).
    HOST_DEVICE int out_row() const { return NH * HS; }
    HOST_DEVICE size_t output(int b, int i, int h) const {
        return ((size_t)b * out_rows + out_first + i) * out_row() + (size_t)h * HS;
    }
    HOST_DEVICE size_t lse(int b, int i, int h) const {
        return ((size_t)b * NH + h) * out_rows + out_first + i;
    }

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

// Returns the shape with all heads in one array (B, Tk, NH + 2*NKV, HS), where query i is in row q0 + i; out
// is (B, Tq, NH, HS). Throws Error if the shape is not supported.
inline AttentionShape attention_shape(AttentionShape s) {
    if (s.HS > max_head_size || s.NH % s.NKV != 0) {
        fail("attention: %d query heads on %d key/value heads of size %d are not supported; the size must be "
             "at most %d, and the first number a multiple of the second",
             s.NH, s.NKV, s.HS, max_head_size);
    }
    if (s.q0 < 0 || s.Tq < 1 || s.Tq > s.Tk - s.q0) {
        fail("attention: %d queries from position %d of %d on do not fit; each needs one of the positions",
             s.Tq, s.q0, s.Tk);
    }
    s.q_rows = s.Tk, s.q_first = s.q0, s.out_rows = s.Tq;
    s.q_row = s.kv_row = (s.NH + 2 * s.NKV) * s.HS;
    s.keys_at = (size_t)s.NH * s.HS;
    return s;
}

// Returns the shape with queries in an array (B, rows, NH, HS) before all keys and values: query i is in row
// first + i, and its output in that row of out (B, rows, NH, HS).
inline AttentionShape attention_shape_apart(AttentionShape s, int rows, int first) {
    s = attention_shape(s);
    if (first < 0 || s.Tq > rows - first)
        fail("attention: %d queries do not fit into %d rows from row %d on; raise the rows", s.Tq, rows,
             first);
    s.q_rows = s.out_rows = rows, s.q_first = s.out_first = first;
    s.q_row = s.NH * s.HS, s.kv_row = 2 * s.NKV * s.HS;
    s.keys_at = (size_t)s.B * rows * s.q_row;
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
