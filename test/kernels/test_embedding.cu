#include <array>

#include "kernels/embedding.cuh"
#include "test/support/testing.h"

static std::vector<int> random_tokens(int N, int V) {
    std::vector<int> tokens(N);
    for (int n = 0; n < N; n++) tokens[n] = (int)(philox(random_key(5, "tokens"), n).at[0] % V);
    return tokens;
}

TEST_CASE("places are sorted by token") {
    for (auto [N, V] :
         {std::pair{0, 1}, {1, 1}, {5, 1}, {100, 7}, {1000, 300}, {777, 200000}, {50, INT32_MAX}}) {
        CAPTURE(N);
        CAPTURE(V);
        auto tokens = random_tokens(N, V);
        std::vector<int> order(N, -1), want(N);
        sort_by_token(order.data(), tokens.data(), N);
        for (int n = 0; n < N; n++) want[n] = n;
        std::stable_sort(want.begin(), want.end(), [&](int a, int b) { return tokens[a] < tokens[b]; });
        CHECK(order == want);
    }
}

// Positions of a test's tokens: none, anywhere in the table, or counted from the beginning of each row; a
// positive kind counts from the beginning of documents of at most `kind` tokens.
enum { no_positions = -2, anywhere = -1, rows = 0 };

// Positions of B rows of T tokens.
static std::vector<int> make_positions(int B, int T, int kind) {
    if (kind == anywhere) return random_rows("positions", B * T, T);
    std::vector<int> positions;
    for (int n = 0, start = 0, length = 0; n < B * T; n++) {
        if (n % T == 0 || n == start + length) {
            start = n;
            length = kind > 0 ? 1 + (int)(philox(random_key(6, "documents"), n).at[0] % kind) : T;
        }
        positions.push_back(n - start);
    }
    return positions;
}

TEST_CASE("places are sorted by position") {
    for (auto [B, T, kind] : {std::array{1, 1, 1},
                              {2, 9, 1},
                              {3, 50, 12},
                              {2, 700, 300},
                              {1, 5, 100},
                              {4, 90, (int)rows},
                              {3, 400, (int)anywhere}}) {
        CAPTURE(T);
        auto positions = make_positions(B, T, kind);
        std::vector<int> order(B * T, -1), want(B * T);
        sort_by_position(order.data(), positions.data(), B * T);
        for (int n = 0; n < B * T; n++) want[n] = n;
        std::stable_sort(want.begin(), want.end(), [&](int a, int b) { return positions[a] < positions[b]; });
        CHECK(order == want);
    }
}

TEST_CASE("embedding: no tokens") {
    Buffer<floatX> out(1), wte(64);
    Buffer<int> tokens(1);
    // without blocks, a launch would fail
    CHECK_NOTHROW(embedding_forward(out, tokens, wte, nullptr, nullptr, 0, 64, test_stream()));
}

// Checks the backward pass of these tokens against sums in double precision, and that a second run has the
// same bits.
static void check_backward(const std::vector<int>& tokens, int B, int T, int C, int V, int kind) {
    int N = B * T;
    auto positions = make_positions(B, T, kind);
    auto d = random_values<floatX>("d", (size_t)N * C);
    auto dwte_before = random_values<float>("dwte", (size_t)V * C),
         dwpe_before = random_values<float>("dwpe", (size_t)T * C);
    std::vector<double> want_dwte = to_doubles(dwte_before), want_dwpe = to_doubles(dwpe_before);
    for (int n = 0; n < N; n++) {
        for (int c = 0; c < C; c++) {
            double value = float(d[(size_t)n * C + c]);
            want_dwte[(size_t)tokens[n] * C + c] += value;
            if (kind != no_positions) want_dwpe[(size_t)positions[n] * C + c] += value;
        }
    }

    std::vector<int> by_token(N), by_position(N);
    sort_by_token(by_token.data(), tokens.data(), N);
    sort_by_position(by_position.data(), positions.data(), N);
    Buffer<int> device_tokens(tokens), order(by_token), device_positions(positions),
        position_order(by_position);
    Buffer<floatX> dout(d);
    std::vector<float> first_dwte, first_dwpe;
    for (int run = 0; run < 2; run++) {
        Buffer<float> dwte(dwte_before), dwpe(dwpe_before), scratch(embedding_backward_scratch(N, C));
        if (kind == no_positions) {
            embedding_backward(dwte, nullptr, scratch, dout, device_tokens, order, nullptr, nullptr, N, C,
                               test_stream());
        } else {
            embedding_backward(dwte, dwpe, scratch, dout, device_tokens, order, device_positions,
                               position_order, N, C, test_stream());
        }
        CHECK_CLOSE(dwte, want_dwte, tolerance<float>);
        CHECK_CLOSE(dwpe, want_dwpe, tolerance<float>);
        if (run == 0) first_dwte = dwte.host(), first_dwpe = dwpe.host();
        CHECK(dwte.host() == first_dwte);
        CHECK(dwpe.host() == first_dwpe);
    }
}

TEST_CASE("embedding forward and backward") {
    struct Shape {
        int B, T, C, V;
    };
    for (auto [B, T, C, V] : std::vector<Shape>{{1, 1, 1, 1},
                                                {1, 5, 7, 3},
                                                {2, 9, 8, 50},
                                                {3, 40, 24, 5},
                                                {4, 17, 300, 30},
                                                {2, 3, 2056, 10},
                                                {7, 301, 8, 20}}) {
        for (int kind : {(int)no_positions, (int)anywhere, (int)rows, 1, 2, 12, 90, 100000}) {
            CAPTURE(B);
            CAPTURE(T);
            CAPTURE(C);
            CAPTURE(kind);
            int N = B * T;
            auto tokens = random_tokens(N, V);
            auto positions = make_positions(B, T, kind);
            auto wte = random_values<floatX>("wte", (size_t)V * C),
                 wpe = random_values<floatX>("wpe", (size_t)T * C);
            std::vector<double> want((size_t)N * C);
            for (int n = 0; n < N; n++) {
                for (int c = 0; c < C; c++) {
                    size_t i = (size_t)n * C + c;
                    want[i] = (double)float(wte[(size_t)tokens[n] * C + c]);
                    if (kind != no_positions) want[i] += float(wpe[(size_t)positions[n] * C + c]);
                }
            }
            Buffer<int> device_tokens(tokens), device_positions(positions);
            Buffer<floatX> out((size_t)N * C), device_wte(wte), device_wpe(wpe);
            if (kind == no_positions) {
                embedding_forward(out, device_tokens, device_wte, nullptr, nullptr, N, C, test_stream());
            } else {
                embedding_forward(out, device_tokens, device_wte, device_wpe, device_positions, N, C,
                                  test_stream());
            }
            CHECK_CLOSE(out, want, tolerance<floatX>);
            check_backward(tokens, B, T, C, V, kind);
        }
    }
}

TEST_CASE("embedding backward: tokens that are rare, frequent, and all of the batch") {
    auto repeated = [](int N, int times) {
        std::vector<int> tokens(N);
        for (int n = 0; n < N; n++) tokens[n] = (int)((int64_t)n * 7919 % N / times);  // 7919 is a prime
        return tokens;
    };
    // Around multiples of the length of a piece, 64; the longest leave carries whose list is cut as well.
    for (int times : {1, 2, 63, 64, 65, 127, 128, 129, 300, 5000}) {
        CAPTURE(times);
        int B = 5, T = 1000, N = B * T;
        check_backward(repeated(N, times), B, T, 4, N, rows);
    }
    for (auto [B, T] : {std::pair{64, 3}, {65, 2}, {128, 2}, {130, 33}, {1, 64}, {1, 65}, {1, 4160}}) {
        CAPTURE(B);
        check_backward(std::vector<int>(B * T, 2), B, T, 3, 5, rows);
        check_backward(random_tokens(B * T, 3), B, T, 4, 3, 40);
        check_backward(random_tokens(B * T, 3), B, T, 4, 3, anywhere);
    }
    // a third of the batch is one token; the others are rare
    auto tokens = random_tokens(6000, 4000);
    for (size_t n = 0; n < tokens.size(); n += 3) tokens[n] = 1234;
    check_backward(tokens, 6, 1000, 8, 4000, 300);
}

TEST_CASE("tokens look the same whatever is beside them") {
    int N = 192, T = 64, C = 24, V = 20, length = 23, at = 158;
    auto tokens = random_tokens(N, V), positions = make_positions(3, T, anywhere);
    std::vector<int> some(tokens.begin() + at, tokens.begin() + at + length),
        their_positions(positions.begin() + at, positions.begin() + at + length);

    Buffer<int> device_tokens(tokens), device_positions(positions), device_some(some),
        device_theirs(their_positions);
    Buffer<floatX> wte(random_values<floatX>("wte", V * C)), wpe(random_values<floatX>("wpe", T * C));
    Buffer<floatX> out(N * C), out_alone(length * C);
    embedding_forward(out, device_tokens, wte, wpe, device_positions, N, C, test_stream());
    embedding_forward(out_alone, device_some, wte, wpe, device_theirs, length, C, test_stream());
    auto packed = out.doubles();
    CHECK(std::vector(packed.begin() + at * C, packed.begin() + (at + length) * C) == out_alone.doubles());
}

// Consecutive ranges of the vocabulary; some may be empty.
static std::vector<VocabRange> cut_vocab(int V, int ranks) {
    std::vector<VocabRange> vocab;
    for (int r = 0; r < ranks; r++) vocab.push_back({V * r / ranks, V * (r + 1) / ranks - V * r / ranks});
    return vocab;
}

TEST_CASE("a token table cut by tokens") {
    struct Shape {
        int B, T, C, V;
    };
    for (auto [B, T, C, V] :
         std::vector<Shape>{{1, 1, 1, 1}, {1, 5, 7, 3}, {2, 9, 8, 50}, {3, 40, 24, 5}, {4, 17, 300, 31}}) {
        for (int ranks : {1, 2, 3, 6}) {
            for (bool with_positions : {false, true}) {
                CAPTURE(V);
                CAPTURE(C);
                CAPTURE(ranks);
                CAPTURE(with_positions);
                int N = B * T;
                size_t size = (size_t)N * C;
                auto tokens = random_tokens(N, V), positions = make_positions(B, T, anywhere);
                auto wte = random_values<floatX>("wte", (size_t)V * C),
                     wpe = random_values<floatX>("wpe", (size_t)T * C), d = random_values<floatX>("d", size);
                auto dwte = random_values<float>("dwte", (size_t)V * C),
                     dwpe = random_values<float>("dwpe", (size_t)T * C);
                std::vector<int> order(N), by_position(N);
                sort_by_token(order.data(), tokens.data(), N);
                sort_by_position(by_position.data(), positions.data(), N);
                Buffer<int> device_tokens(tokens), device_order(order), device_positions(positions),
                    position_order(by_position);
                Buffer<float> scratch(embedding_backward_scratch(N, C));
                Buffer<floatX> dout(d), device_wpe(wpe), whole_wte(wte), whole(size);
                Buffer<float> whole_dwte(dwte), whole_dwpe(dwpe);
                floatX* added = with_positions ? (floatX*)device_wpe : nullptr;
                embedding_forward(whole, device_tokens, whole_wte, added, device_positions, N, C,
                                  test_stream());
                embedding_backward(whole_dwte, whole_dwpe, scratch, dout, device_tokens, device_order,
                                   device_positions, position_order, N, C, test_stream());
                auto whole_rows = whole.doubles();

                std::vector<float> all_dwte;
                for (VocabRange vocab : cut_vocab(V, ranks)) {
                    // memory of exactly this range: nothing else may be touched
                    auto begin = (ptrdiff_t)vocab.first * C, end = begin + (ptrdiff_t)vocab.count * C;
                    Buffer<floatX> own_wte(std::vector(wte.begin() + begin, wte.begin() + end)), out(size);
                    Buffer<float> own_dwte(std::vector(dwte.begin() + begin, dwte.begin() + end)),
                        own_dwpe(dwpe);
                    embedding_forward(out, device_tokens, own_wte, added, device_positions, N, C,
                                      test_stream(), vocab);
                    auto got = out.doubles();
                    std::vector<double> want(size);
                    for (size_t i = 0; i < size; i++) {
                        int token = tokens[i / C];
                        bool here = token >= vocab.first && token < vocab.first + vocab.count;
                        double position =
                            with_positions ? (double)float(wpe[positions[i / C] * C + i % C]) : 0.0;
                        want[i] = here ? whole_rows[i] : position;
                    }
                    CHECK(got == want);

                    embedding_backward(own_dwte, with_positions ? (float*)own_dwpe : nullptr, scratch, dout,
                                       device_tokens, device_order, device_positions, position_order, N, C,
                                       test_stream(), vocab);
                    for (float gradient : own_dwte.host()) all_dwte.push_back(gradient);
                    CHECK(own_dwpe.host() == (with_positions ? whole_dwpe.host() : dwpe));
                }
                CHECK(all_dwte == whole_dwte.host());

                // the sum over all ranges, with positions added in one of them
                std::vector<float> sum(size, 0.0f);
                bool first = true;
                for (VocabRange vocab : cut_vocab(V, ranks)) {
                    auto begin = (ptrdiff_t)vocab.first * C, end = begin + (ptrdiff_t)vocab.count * C;
                    Buffer<floatX> own_wte(std::vector(wte.begin() + begin, wte.begin() + end)), out(size);
                    embedding_forward(out, device_tokens, own_wte, first ? added : nullptr, device_positions,
                                      N, C, test_stream(), vocab);
                    auto rows = out.doubles();
                    for (size_t i = 0; i < size; i++) sum[i] = float(floatX(sum[i] + (float)rows[i]));
                    first = false;
                }
                CHECK(to_doubles(sum) == whole_rows);
            }
        }
    }
}
