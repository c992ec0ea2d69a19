/*
The order in which blocks of the attention kernels process their tiles (except attention_mma_forward.cuh,
which follows its grid).

Blocks draw tickets, one for each tile, and a ticket's number determines the tile. So a multiprocessor that is
free gets the next tile, however many are free: communication may hold some. Tickets cover one section of
heads at a time and, within it, the longest tiles of all its heads first, which leaves short ones for the end.

    forward     a tile of queries. The last ones see the most keys and go first. The keys and values of a
                section stay in the L2 cache.
    backward    a tile of keys. The first ones are seen by the most queries and go first. The blocks of one
                head that run at the same time visit the queries side by side, from the last down: data that
                one of them loads into the L2 cache serves the others.

In the backward pass, dq is summed across blocks, yet in a fixed order: the blocks that contribute to a tile
of queries take turns in adding to it, in the order of their keys. A block waits only for earlier tickets,
whose blocks are running or done, so no order of starting blocks can deadlock.
*/
#pragma once

#include <algorithm>

#include "kernels/attention_shape.h"

// Tile number `tile` of head number `head`.
struct TicketTile {
    int head, tile;
};

// Returns the tile of ticket `n` if `heads` heads have `tiles` tiles each: tile 0 of every head of a section
// comes first, then tile 1 of every head, and so on to the last; then the next section follows.
HOST_DEVICE inline TicketTile ticket_tile(int n, int tiles, int heads, int section) {
    int first_head = n / (tiles * section) * section, left = heads - first_head;
    int here = left < section ? left : section;
    n -= first_head * tiles;
    return {first_head + n % here, n / here};
}

// Returns the last tile of keys that a tile of queries beginning at `start` sees.
HOST_DEVICE inline int last_key_tile(const AttentionShape& s, int start, int queries, int keys) {
    int end = start + queries < s.Tq ? start + queries : s.Tq;
    return s.position(end - 1) / keys;
}

// ----------------------------------------------------------------------------
// forward

// Returns the number of query heads in a section: those whose keys and values fit in the L2 cache together.
inline int forward_section(const AttentionShape& s) {
    constexpr size_t cached_bytes = size_t(16) << 20;  // leaves room in the cache for other data
    size_t head_bytes = (size_t)2 * s.Tk * s.HS * sizeof(floatX);
    return (int)std::min<size_t>(s.B * s.NH, std::max<size_t>(1, cached_bytes / head_bytes) * s.group());
}

// The work of a ticket: a tile of queries of a head, and the tiles of keys that they see.
template <int queries, int keys>
struct QueryTileWork {
    int b, h, start, first_keys, last_keys;

    HOST_DEVICE static int tickets(const AttentionShape& s) { return ceil_div(s.Tq, queries) * s.B * s.NH; }

    HOST_DEVICE static QueryTileWork of(const AttentionShape& s, int section, int ticket) {
        int tiles = ceil_div(s.Tq, queries);
        TicketTile at = ticket_tile(ticket, tiles, s.B * s.NH, section);
        int b = at.head / s.NH, start = (tiles - 1 - at.tile) * queries;
        return {b, at.head % s.NH, start, s.first_key(b, start) / keys,
                last_key_tile(s, start, queries, keys)};
    }
};

// ----------------------------------------------------------------------------
// backward

// Returns the number of key/value heads in a section. With three blocks of a head side by side, memory is
// read a third as often as with one, and blocks seldom wait for their turns, even at T = 1024.
inline int backward_section(const AttentionShape& s, int multiprocessors) {
    constexpr int side_by_side = 3;
    return even_share(s.B * s.NKV, ceil_div(multiprocessors, side_by_side));
}

// The tiles of queries that see any key of a tile of keys: first ... last, or none.
struct SeeingTiles {
    int first, last;
    HOST_DEVICE bool none() const { return last < first; }
};

// Finds the tiles of `queries` queries each that see a key of `start` ... `end` - 1.
HOST_DEVICE inline SeeingTiles seeing_tiles(const AttentionShape& s, int b, int queries, int start, int end) {
    if (start >= s.keys_end()) return {0, -1};
    SeeingTiles tiles = {(start > s.q0 ? start - s.q0 : 0) / queries, (s.Tq - 1) / queries};
    int seen = tiles.first - 1;  // the last tile that is known to see a key before `end`, if any
    while (seen < tiles.last) {
        int middle = (seen + tiles.last + 1) / 2;
        if (s.first_key(b, middle * queries) < end)
            seen = middle;
        else
            tiles.last = middle - 1;
    }
    return tiles;
}

// The work of a ticket: a tile of keys of a key/value head. Its steps are the tiles of queries that see any
// of these keys, from last to first, each for all query heads of the group.
template <int keys, int queries>
struct KeyTileWork {
    int b, kv_head, number;
    SeeingTiles seeing;

    HOST_DEVICE static int tickets(const AttentionShape& s) { return ceil_div(s.Tk, keys) * s.B * s.NKV; }

    HOST_DEVICE static KeyTileWork of(const AttentionShape& s, int section, int ticket) {
        TicketTile at = ticket_tile(ticket, ceil_div(s.Tk, keys), s.B * s.NKV, section);
        int b = at.head / s.NKV, start = at.tile * keys;
        return {b, at.head % s.NKV, at.tile, seeing_tiles(s, b, queries, start, start + keys)};
    }

    HOST_DEVICE int start() const { return number * keys; }

    struct Step {
        int h, tile;  // a query head, and a tile of its queries
        HOST_DEVICE int row() const { return tile * queries; }
    };

    HOST_DEVICE Step first_step(const AttentionShape& s) const { return {kv_head * s.group(), seeing.last}; }
    HOST_DEVICE bool has(const Step& step) const { return step.tile >= seeing.first; }
    HOST_DEVICE void advance(const AttentionShape& s, Step& step) const {
        if (++step.h < (kv_head + 1) * s.group()) return;
        step.h = kv_head * s.group();
        step.tile--;
    }

    // Returns this block's turn in adding to dq of these queries. After the last turn the sum is complete.
    HOST_DEVICE int turn(const AttentionShape& s, const Step& step) const {
        return number - s.first_key(b, step.row()) / keys;
    }
    HOST_DEVICE bool has_last_turn(const AttentionShape& s, const Step& step) const {
        return number == last_key_tile(s, step.row(), queries, keys);
    }
};
