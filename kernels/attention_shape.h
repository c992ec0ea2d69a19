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
// Queries are indexed from the first of the call, keys and values by their positions.
struct AttentionShape {
    int B, Tq, Tk, q0, NH, NKV, HS;
    int window = 0;                  // the most keys that a query sees, its own included; 0: no limit
    const int* doc_start = nullptr;  // (B, Tk) first position of each position's document, or null

    HOST_DEVICE int group() const { return NH / NKV; }  // query heads that share a key/value head
    HOST_DEVICE float scale() const { return 1 / sqrtf((float)HS); }

    HOST_DEVICE int position(int i) const { return q0 + i; }   // query i is at this position
    HOST_DEVICE int keys_end() const { return position(Tq); }  // no query sees a key from here on

    // Vectors of a query, and of the key and the value at a position: offsets into qkv (B, Tk, NH + 2*NKV,
    // HS), rows `qkv_row` apart.
    HOST_DEVICE int qkv_row() const { return (NH + 2 * NKV) * HS; }
    HOST_DEVICE size_t query(int b, int i, int h) const { return vector(b, position(i), h); }
    HOST_DEVICE size_t key(int b, int at, int h) const { return vector(b, at, NH + h); }
    HOST_DEVICE size_t value(int b, int at, int h) const { return vector(b, at, NH + NKV + h); }

    // A head's output for a query: offset into out (B, Tq, NH, HS), rows `out_row` apart; and its offset into
    // lse (B, NH, Tq).
    HOST_DEVICE int out_row() const { return NH * HS; }
    HOST_DEVICE size_t output(int b, int i, int h) const {
        return ((size_t)b * Tq + i) * out_row() + (size_t)h * HS;
    }
    HOST_DEVICE size_t lse(int b, int i, int h) const { return ((size_t)b * NH + h) * Tq + i; }

    // Mean number of keys that a query sees, if the call has all positions and a sequence is one document.
    double mean_keys() const { return mean_causal_keys(Tq, window); }

    // Query i sees the keys first_key(b, i) ... position(i). Neither end ever moves back, so a tile of
    // queries sees no key before the first key of its first query, and none after the position of its last.
    HOST_DEVICE int first_key(int b, int i) const {
        int at = position(i), first = window && at >= window ? at - window + 1 : 0;
        int document = doc_start ? doc_start[(size_t)b * Tk + at] : 0;
        return first > document ? first : document;
    }

private:
    HOST_DEVICE size_t vector(int b, int at, int head) const {
        return ((size_t)b * Tk + at) * qkv_row() + (size_t)head * HS;
    }
};

// Returns the shape; throws Error if it is not supported.
inline AttentionShape attention_shape(const AttentionShape& s) {
    if (s.HS > max_head_size || s.NH % s.NKV != 0) {
        fail("attention: %d query heads on %d key/value heads of size %d are not supported; the size must be "
             "at most %d, and the first number a multiple of the second",
             s.NH, s.NKV, s.HS, max_head_size);
    }
    if (s.q0 < 0 || s.Tq < 1 || s.Tq > s.Tk - s.q0) {
        fail("attention: %d queries from position %d of %d on do not fit; each needs one of the positions",
             s.Tq, s.q0, s.Tk);
    }
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
