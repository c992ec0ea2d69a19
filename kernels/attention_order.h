/*
The order in which blocks of the attention kernels take their tiles.

Blocks draw tickets, one for each tile, and a ticket's number alone says which tile it is. So a multiprocessor
that is free takes the next tile, however many of them there are: others may be held by communication.
Tickets go to a section of heads at a time, and within it to those tiles of all its heads first that take
longest, which leaves short ones for the end.

    forward     a tile of queries. The last ones see most keys, and go first. A section's keys and values stay
                in the L2 cache.
    backward    a tile of keys. The first ones are seen by most queries, and go first. The blocks of one head
                that run at the same time go over the queries from the last down, side by side: what one of
                them brings to the L2 cache serves the others.

In the backward pass, dq is summed over blocks, yet in a fixed order: the blocks of a tile of queries take
turns in adding to it, in the order of their keys. A block waits only for earlier tickets, whose blocks are
running or done: whatever order blocks start in, none waits for ever.
*/
#pragma once

#include <algorithm>

#include "kernels/attention_shape.h"

// Tile number `tile` of head number `head`.
struct TicketTile {
    int head, tile;
};

// Ticket `n` where `heads` heads have `tiles` tiles each: tiles 0 of all heads of a section come first, then
// tiles 1 of all of them, and so on to the last; then those of the next section.
HOST_DEVICE inline TicketTile ticket_tile(int n, int tiles, int heads, int section) {
    int first_head = n / (tiles * section) * section, left = heads - first_head;
    int here = left < section ? left : section;
    n -= first_head * tiles;
    return {first_head + n % here, n / here};
}

// A tile of queries from `start` on sees no key behind this tile of keys.
HOST_DEVICE inline int last_key_tile(const AttentionShape& s, int start, int queries, int keys) {
    int end = start + queries < s.Tq ? start + queries : s.Tq;
    return s.position(end - 1) / keys;
}

// ----------------------------------------------------------------------------
// forward

// Heads whose keys and values, of bf16, are in the L2 cache at the same time.
inline int forward_section(const AttentionShape& s) {
    constexpr size_t cached_bytes = size_t(16) << 20;  // leaves room for the rest
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

// Key/value heads at a time. Where three blocks of a head run side by side, at T = 1024 too, memory is read
// a third as often as by blocks alone, and turns are seldom waited for.
inline int backward_section(const AttentionShape& s, int multiprocessors) {
    constexpr int side_by_side = 3;
    return even_share(s.B * s.NKV, ceil_div(multiprocessors, side_by_side));
}

// The tiles of queries that see some of a tile of keys: first ... last, or none.
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

// The work of a ticket: a tile of keys of a key/value head, and in their order the tiles of queries that see
// some of them, each of all query heads of the group.
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

    // This block's turn at adding to dq of these queries. After the last turn the sum is whole.
    HOST_DEVICE int turn(const AttentionShape& s, const Step& step) const {
        return number - s.first_key(b, step.row()) / keys;
    }
    HOST_DEVICE bool has_last_turn(const AttentionShape& s, const Step& step) const {
        return number == last_key_tile(s, step.row(), queries, keys);
    }
};
