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

struct EmbeddingShape {
    int B, T, C, V;
};

TEST_CASE("embedding forward and backward") {
    for (auto [B, T, C, V] : std::vector<EmbeddingShape>{
             {1, 1, 1, 1}, {1, 5, 7, 3}, {2, 9, 8, 50}, {3, 40, 24, 5}, {4, 17, 300, 30}, {2, 3, 2056, 10}}) {
        for (bool with_positions : {true, false}) {
            CAPTURE(B);
            CAPTURE(T);
            CAPTURE(C);
            CAPTURE(with_positions);
            int N = B * T;
            auto tokens = random_tokens(N, V);
            auto wte = random_values<floatX>("wte", (size_t)V * C),
                 wpe = random_values<floatX>("wpe", (size_t)T * C);
            auto d = random_values<floatX>("d", (size_t)N * C);
            auto dwte_before = random_values<float>("dwte", (size_t)V * C);
            auto dwpe_before = random_values<float>("dwpe", (size_t)T * C);

            std::vector<double> want((size_t)N * C), want_dwte = to_doubles(dwte_before),
                                                     want_dwpe = to_doubles(dwpe_before);
            for (int n = 0; n < N; n++) {
                for (int c = 0; c < C; c++) {
                    size_t i = (size_t)n * C + c, token = (size_t)tokens[n] * C + c,
                           position = (size_t)(n % T) * C + c;
                    want[i] = (double)float(wte[token]) + (with_positions ? float(wpe[position]) : 0.0f);
                    want_dwte[token] += float(d[i]);
                    want_dwpe[position] += float(d[i]);
                }
            }

            std::vector<int> order(N), starts(N + 1);
            int buckets = bucket_tokens(order.data(), starts.data(), tokens.data(), N);
            Buffer<int> device_tokens(tokens), device_order(order), device_starts(starts);
            Buffer<floatX> out((size_t)N * C), device_wte(wte), device_wpe(wpe), dout(d);
            floatX* positions = with_positions ? (floatX*)device_wpe : nullptr;
            embedding_forward(out, device_tokens, device_wte, positions, B, T, C, test_stream());
            CHECK_CLOSE(out, want, tolerance<floatX>);

            std::vector<float> first_dwte, first_dwpe;
            for (int run = 0; run < 2; run++) {
                Buffer<float> dwte(dwte_before), dwpe(dwpe_before);
                float* dpositions = with_positions ? (float*)dwpe : nullptr;
                embedding_backward(dwte, dpositions, dout, device_tokens, device_order, device_starts,
                                   buckets, B, T, C, test_stream());
                CHECK_CLOSE(dwte, want_dwte, tolerance<float>);
                if (with_positions) CHECK_CLOSE(dwpe, want_dwpe, tolerance<float>);
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
