/*
The sizes of an attention layer, where its heads lie in memory, and which keys a query sees: common to all
devices.
*/
#pragma once

#include <cmath>

#include "kernels/common.cuh"

constexpr int max_head_size = 256;

struct AttentionShape {
    int B, T, NH, NKV, HS;
    int window;            // keys a query sees at most, itself included; 0: no limit
    const int* doc_start;  // (B, T) first position of each position's document, or null

    HOST_DEVICE int group() const { return NH / NKV; }  // query heads that share a key/value head
    HOST_DEVICE float scale() const { return 1 / sqrtf((float)HS); }

    // Query, key and value vectors of a position: offsets into qkv (B, T, NH + 2*NKV, HS), rows `qkv_row`
    // apart.
    HOST_DEVICE int qkv_row() const { return (NH + 2 * NKV) * HS; }
    HOST_DEVICE size_t query(int b, int t, int h) const {
        return position(b, t) * qkv_row() + (size_t)h * HS;
    }
    HOST_DEVICE size_t key(int b, int t, int h) const { return query(b, t, NH + h); }
    HOST_DEVICE size_t value(int b, int t, int h) const { return query(b, t, NH + NKV + h); }

    // A head's output: offset into out (B, T, NH, HS), rows `out_row` apart; and its offset into lse (B, NH,
    // T).
    HOST_DEVICE int out_row() const { return NH * HS; }
    HOST_DEVICE size_t output(int b, int t, int h) const {
        return position(b, t) * out_row() + (size_t)h * HS;
    }
    HOST_DEVICE size_t lse(int b, int t, int h) const { return ((size_t)b * NH + h) * T + t; }

    // Query t sees the keys first_key(b, t) ... t. Neither end ever moves back, so a tile of queries sees no
    // key before the first key of its first query.
    HOST_DEVICE int first_key(int b, int t) const {
        int first = window && t >= window ? t - window + 1 : 0;
        int document = doc_start ? doc_start[position(b, t)] : 0;
        return first > document ? first : document;
    }

private:
    HOST_DEVICE size_t position(int b, int t) const { return (size_t)b * T + t; }
};

inline AttentionShape attention_shape(int B, int T, int NH, int NKV, int HS, int window,
                                      const int* doc_start) {
    if (HS > max_head_size || NH % NKV != 0) {
        fprintf(stderr, "train_gpt: no attention for %d query heads on %d key/value heads of size %d: ", NH,
                NKV, HS);
        fprintf(stderr, "the size must be at most %d, the numbers divisible\n", max_head_size);
        exit(1);
    }
    return {B, T, NH, NKV, HS, window, doc_start};
}
