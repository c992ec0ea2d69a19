// Which tokens a context rank has, and rows moved between the orders by rank and by position.
#include <set>

#include "kernels/context_rows.cuh"
#include "test/support/testing.h"

TEST_CASE("each token has one owner, all ranks have as many, and their queries see as many keys") {
    for (int ranks : {1, 2, 3, 4, 8}) {
        CAPTURE(ranks);
        const int T = ranks == 1 ? 7 : 2 * ranks * 5;
        std::set<int> positions;
        std::set<long> seen;
        for (int rank = 0; rank < ranks; rank++) {
            ContextCut cut = {ranks, rank, T};
            CHECK(cut.own() * ranks == T);
            long keys = 0;
            for (int t = 0; t < cut.own(); t++) {
                int at = cut.position(t);
                CHECK(positions.insert(at).second);
                if (ranks > 1) CHECK(cut.owner(at) == rank);
                if (ranks > 1) CHECK(cut.index(at) == t);
                if (t > 0) CHECK(at > cut.position(t - 1));
                keys += at + 1;
            }
            seen.insert(keys);
        }
        CHECK((int)positions.size() == T);
        CHECK(*positions.rbegin() == T - 1);
        CHECK(seen.size() == 1);
    }
}

// Calls check(rows, offsets): row n in the order by position begins at offsets[n] in the order by rank.
template <typename Check>
static void over_shapes(Check&& check) {
    for (auto [ranks, piece, B, W] : {std::array{2, 1, 1, 8}, {2, 3, 2, 5}, {3, 4, 1, 24}, {4, 70, 3, 16}}) {
        CAPTURE(ranks);
        CAPTURE(W);
        ContextRows rows = {{ranks, 0, 2 * ranks * piece}, B, W};
        std::vector<size_t> offsets(rows.rows());
        size_t offset = 0;
        for (int rank = 0; rank < ranks; rank++)
            for (int b = 0; b < B; b++)
                for (int number : {rank, 2 * ranks - 1 - rank})
                    for (int t = 0; t < piece; t++, offset += (size_t)W)
                        offsets[(size_t)(b * rows.cut.T + number * piece + t)] = offset;
        check(rows, offsets);
    }
}

TEST_CASE("rows in the order of positions") {
    over_shapes([](const ContextRows& rows, const std::vector<size_t>& offsets) {
        std::vector<floatX> inp = random_values<floatX>("inp", rows.rows() * rows.W), want;
        for (size_t offset : offsets) want.insert(want.end(), &inp[offset], &inp[offset] + rows.W);
        Buffer<floatX> from(inp), out(inp.size());
        order_by_position(out, from, rows, test_stream());
        CHECK(same_bits(out.host(), want));
    });
}

TEST_CASE("gradients added in the order of ranks, up to a position") {
    over_shapes([](const ContextRows& rows, const std::vector<size_t>& offsets) {
        std::vector<floatX> inp = random_values<floatX>("inp", rows.rows() * rows.W);
        for (int end : {rows.cut.T, rows.cut.T / 2, 1}) {
            for (bool overwrite : {true, false}) {
                std::vector<float> want = random_values<float>("sums", inp.size());
                Buffer<float> sums(want);
                Buffer<floatX> from(inp);
                for (size_t row = 0; row < offsets.size(); row++)
                    for (int w = 0; w < rows.W; w++) {
                        float& sum = want[offsets[row] + (size_t)w];
                        bool has = (int)row % rows.cut.T < end;
                        sum =
                            (overwrite ? 0 : sum) + (has ? float(inp[row * (size_t)rows.W + (size_t)w]) : 0);
                    }
                add_by_rank(sums, from, rows, end, overwrite, test_stream());
                CHECK(same_bits(sums.host(), want));
            }
        }
    });
}
