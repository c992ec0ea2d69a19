/*
Determines which tokens of a sequence a context rank has. A sequence is cut into 2 * ranks equal pieces. Rank
r has piece r from the beginning and piece r from the end, so that with causal attention the queries of all
ranks see the same number of keys:

      piece     0   1   2   3   4   5   6   7        rank 1 of 4 has pieces 1 and 6,
      rank      0   1   2   3   3   2   1   0        one after the other

(as in Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2)
*/
#pragma once

#include "kernels/common.cuh"

struct ContextCut {
    int ranks = 1, rank = 0;
    int T = 0;  // tokens of the whole sequence: a multiple of 2 * ranks, or any number if ranks is 1

    HOST_DEVICE int own() const { return T / ranks; }       // tokens of a rank
    HOST_DEVICE int piece() const { return T / pieces(); }  // tokens of a piece
    HOST_DEVICE int pieces() const { return 2 * ranks; }
    // The number of a rank's first or second piece; and owner_of(): the rank that has a piece.
    HOST_DEVICE int number(int of_rank, bool second) const {
        return second ? pieces() - 1 - of_rank : of_rank;
    }
    HOST_DEVICE int owner_of(int number) const { return number < ranks ? number : pieces() - 1 - number; }
    // The position in the sequence of token t of a rank.
    HOST_DEVICE int position(int of_rank, int t) const {
        bool second = t >= piece();
        return number(of_rank, second) * piece() + (second ? t - piece() : t);
    }
    HOST_DEVICE int position(int t) const { return position(rank, t); }
    // The rank that has the token at a position, and the token's index on that rank.
    HOST_DEVICE int owner(int at) const { return owner_of(at / piece()); }
    HOST_DEVICE int index(int at) const { return at % piece() + (at / piece() < ranks ? 0 : piece()); }
};
