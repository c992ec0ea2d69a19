#include "kernels/embedding.cuh"
#include "test/testing.h"

static std::vector<int> random_tokens(int N, int V) {
    std::vector<int> tokens(N);
    for (int n = 0; n < N; n++) tokens[n] = (int)(philox(random_key(5, "tokens"), n).at[0] % V);
    return tokens;
}

TEST_CASE("tokens are sorted into buckets") {
    for (auto [N, V] :
         {std::pair{0, 1}, {1, 1}, {5, 1}, {100, 7}, {1000, 300}, {777, 200000}, {50, INT32_MAX}}) {
        CAPTURE(N);
        CAPTURE(V);
        auto tokens = random_tokens(N, V);
        std::vector<int> order(N, -1), starts(N + 1, -1);
        int buckets = bucket_tokens(order.data(), starts.data(), tokens.data(), N);

        std::vector<int> want(N);
        for (int n = 0; n < N; n++) want[n] = n;
        std::stable_sort(want.begin(), want.end(), [&](int a, int b) { return tokens[a] < tokens[b]; });
        CHECK(order == want);

        std::vector<int> want_starts;
        for (int i = 0; i < N; i++) {
            if (i == 0 || tokens[want[i]] != tokens[want[i - 1]]) want_starts.push_back(i);
        }
        CHECK(buckets == (int)want_starts.size());
        want_starts.push_back(N);
        starts.resize(buckets + 1);
        CHECK(starts == want_starts);
    }
}

// Where the document of each token begins: documents of 1 to `longest` tokens.
static std::vector<int> random_documents(int B, int T, int longest) {
    std::vector<int> doc_start;
    for (int b = 0; b < B; b++) {
        for (int t = 0, start = 0, end = 0; t < T; t++) {
            if (t == end) {
                start = t;
                end += 1 + (int)(philox(random_key(6, "documents"), b * T + t).at[0] % longest);
            }
            doc_start.push_back(start);
        }
    }
    return doc_start;
}

TEST_CASE("embedding forward and backward") {
    struct Shape {
        int B, T, C, V;
    };
    enum { no_positions = -1, rows = 0 };  // or documents of so many tokens at most
    for (auto [B, T, C, V] : std::vector<Shape>{{1, 1, 1, 1},
                                                {1, 5, 7, 3},
                                                {2, 9, 8, 50},
                                                {3, 40, 24, 5},
                                                {4, 17, 300, 30},
                                                {2, 3, 2056, 10},
                                                {7, 301, 8, 20}}) {
        for (int positions : {(int)no_positions, (int)rows, 1, 2, 12, 90, 100000}) {
            CAPTURE(B);
            CAPTURE(T);
            CAPTURE(C);
            CAPTURE(positions);
            int N = B * T;
            auto tokens = random_tokens(N, V);
            auto doc_start = random_documents(B, T, std::max(positions, 1));
            auto wte = random_values<floatX>("wte", (size_t)V * C),
                 wpe = random_values<floatX>("wpe", (size_t)T * C);
            auto d = random_values<floatX>("d", (size_t)N * C);
            auto dwte_before = random_values<float>("dwte", (size_t)V * C);
            auto dwpe_before = random_values<float>("dwpe", (size_t)T * C);

            std::vector<double> want((size_t)N * C), want_dwte = to_doubles(dwte_before),
                                                     want_dwpe = to_doubles(dwpe_before);
            for (int n = 0; n < N; n++) {
                int place = positions == rows ? n % T : n % T - doc_start[n];
                for (int c = 0; c < C; c++) {
                    size_t i = (size_t)n * C + c, token = (size_t)tokens[n] * C + c,
                           position = (size_t)place * C + c;
                    want[i] = (double)float(wte[token]);
                    want_dwte[token] += float(d[i]);
                    if (positions == no_positions) continue;
                    want[i] += float(wpe[position]);
                    want_dwpe[position] += float(d[i]);
                }
            }

            std::vector<int> order(N), starts(N + 1);
            int buckets = bucket_tokens(order.data(), starts.data(), tokens.data(), N);
            Buffer<int> device_tokens(tokens), device_order(order), device_starts(starts),
                device_doc_start(doc_start);
            Buffer<floatX> out((size_t)N * C), device_wte(wte), device_wpe(wpe), dout(d);
            int* documents = positions == rows ? nullptr : (int*)device_doc_start;
            embedding_forward(out, device_tokens, device_wte,
                              positions == no_positions ? nullptr : (floatX*)device_wpe, documents, B, T, C,
                              test_stream());
            CHECK_CLOSE(out, want, tolerance<floatX>);

            std::vector<float> first_dwte, first_dwpe;
            for (int run = 0; run < 2; run++) {
                Buffer<float> dwte(dwte_before), dwpe(dwpe_before);
                embedding_backward(dwte, positions == no_positions ? nullptr : (float*)dwpe, dout,
                                   device_tokens, device_order, device_starts, buckets, documents, B, T, C,
                                   test_stream());
                CHECK_CLOSE(dwte, want_dwte, tolerance<float>);
                CHECK_CLOSE(dwpe, want_dwpe, tolerance<float>);
                if (run == 0) {
                    first_dwte = dwte.host();
                    first_dwpe = dwpe.host();
                } else {
                    CHECK(dwte.host() == first_dwte);
                    CHECK(dwpe.host() == first_dwpe);
                }
            }
        }
    }
}

TEST_CASE("a document looks the same wherever it was packed") {
    int T = 64, C = 24, V = 20, length = 23, at = 2 * T + 30;  // in row 2, after another document
    auto tokens = random_tokens(3 * T, V), doc_start = random_documents(3, T, 10);
    for (int t = 0; t < length; t++) doc_start[at + t] = 30;
    for (int n = at + length; n < 3 * T; n++) doc_start[n] = 30 + length;
    std::vector<int> alone(tokens.begin() + at, tokens.begin() + at + length);

    Buffer<int> device_tokens(tokens), device_doc_start(doc_start), device_alone(alone);
    Buffer<floatX> wte(random_values<floatX>("wte", V * C)), wpe(random_values<floatX>("wpe", T * C));
    Buffer<floatX> out(3 * T * C), out_alone(length * C);
    embedding_forward(out, device_tokens, wte, wpe, device_doc_start, 3, T, C, test_stream());
    embedding_forward(out_alone, device_alone, wte, wpe, nullptr, 1, length, C, test_stream());
    auto packed = out.doubles();
    CHECK(std::vector(packed.begin() + at * C, packed.begin() + (at + length) * C) == out_alone.doubles());
}

// Ranges of words, one after another, of which some can be empty.
static std::vector<WordRange> cut_words(int V, int ranks) {
    std::vector<WordRange> words;
    for (int r = 0; r < ranks; r++) words.push_back({V * r / ranks, V * (r + 1) / ranks - V * r / ranks});
    return words;
}

TEST_CASE("a token table cut by words") {
    struct Shape {
        int B, T, C, V;
    };
    for (auto [B, T, C, V] :
         std::vector<Shape>{{1, 1, 1, 1}, {1, 5, 7, 3}, {2, 9, 8, 50}, {3, 40, 24, 5}, {4, 17, 300, 31}}) {
        for (int ranks : {1, 2, 3, 6}) {
            for (bool positions : {false, true}) {
                CAPTURE(V);
                CAPTURE(C);
                CAPTURE(ranks);
                CAPTURE(positions);
                int N = B * T;
                size_t size = (size_t)N * C;
                auto tokens = random_tokens(N, V);
                auto wte = random_values<floatX>("wte", (size_t)V * C),
                     wpe = random_values<floatX>("wpe", (size_t)T * C), d = random_values<floatX>("d", size);
                auto dwte = random_values<float>("dwte", (size_t)V * C),
                     dwpe = random_values<float>("dwpe", (size_t)T * C);
                std::vector<int> order(N), starts(N + 1);
                int buckets = bucket_tokens(order.data(), starts.data(), tokens.data(), N);
                Buffer<int> device_tokens(tokens), device_order(order), device_starts(starts);
                Buffer<floatX> dout(d), device_wpe(wpe), whole_wte(wte), whole(size);
                Buffer<float> whole_dwte(dwte), whole_dwpe(dwpe);
                floatX* added = positions ? (floatX*)device_wpe : nullptr;
                embedding_forward(whole, device_tokens, whole_wte, added, nullptr, B, T, C, test_stream());
                embedding_backward(whole_dwte, whole_dwpe, dout, device_tokens, device_order, device_starts,
                                   buckets, nullptr, B, T, C, test_stream());
                auto whole_rows = whole.doubles();

                std::vector<float> all_dwte;
                for (WordRange words : cut_words(V, ranks)) {
                    // memory of exactly these words: others must not be touched
                    auto begin = (ptrdiff_t)words.first * C, end = begin + (ptrdiff_t)words.count * C;
                    Buffer<floatX> own_wte(std::vector(wte.begin() + begin, wte.begin() + end)), out(size);
                    Buffer<float> own_dwte(std::vector(dwte.begin() + begin, dwte.begin() + end)),
                        own_dwpe(dwpe);
                    embedding_forward(out, device_tokens, own_wte, added, nullptr, B, T, C, test_stream(),
                                      words);
                    auto got = out.doubles();
                    std::vector<double> want(size);
                    for (size_t i = 0; i < size; i++) {
                        int token = tokens[i / C];
                        bool here = token >= words.first && token < words.first + words.count;
                        double position = positions ? (double)float(wpe[i / C % T * C + i % C]) : 0.0;
                        want[i] = here ? whole_rows[i] : position;
                    }
                    CHECK(got == want);

                    embedding_backward(own_dwte, positions ? (float*)own_dwpe : nullptr, dout, device_tokens,
                                       device_order, device_starts, buckets, nullptr, B, T, C, test_stream(),
                                       words);
                    for (float gradient : own_dwte.host()) all_dwte.push_back(gradient);
                    CHECK(own_dwpe.host() == (positions ? whole_dwpe.host() : dwpe));
                }
                CHECK(all_dwte == whole_dwte.host());

                // the sum over all, one of them with the positions
                std::vector<float> sum(size, 0.0f);
                bool first = true;
                for (WordRange words : cut_words(V, ranks)) {
                    auto begin = (ptrdiff_t)words.first * C, end = begin + (ptrdiff_t)words.count * C;
                    Buffer<floatX> own_wte(std::vector(wte.begin() + begin, wte.begin() + end)), out(size);
                    embedding_forward(out, device_tokens, own_wte, first ? added : nullptr, nullptr, B, T, C,
                                      test_stream(), words);
                    auto rows = out.doubles();
                    for (size_t i = 0; i < size; i++) sum[i] = float(floatX(sum[i] + (float)rows[i]));
                    first = false;
                }
                CHECK(to_doubles(sum) == whole_rows);
            }
        }
    }
}
