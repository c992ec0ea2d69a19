// The key/value cache against the textbook formula in double precision, and against attention over the whole
// text.
#include "kernels/kv_cache.cuh"

#include "kernels/attention.cuh"
#include "kernels/rope.cuh"
#include "test/support/testing.h"

struct Case {
    int B, T, limit, past, NH, NKV, HS;
    int window = 0;

    int length() const { return past + T; }
    size_t qkv_row() const { return (size_t)(NH + 2 * NKV) * HS; }
    size_t cache_row() const { return (size_t)2 * NKV * HS; }

    std::string name() const {
        std::string text;
        for (int x : {B, T, limit, past, NH, NKV, HS, window}) text += std::to_string(x) + " ";
        return text;
    }
};

static Case random_case(int number) {
    auto draw = [&, at = 0](int bound) mutable {
        return (int)(philox(random_key(7, "cases"), number, at++).at[0] % bound);
    };
    Case c;
    c.B = 1 + draw(3);
    c.T = 1 + draw(2) * draw(9);
    c.past = draw(2) * draw(150);
    c.limit = c.length() + draw(5);
    c.NKV = 1 + draw(3);
    c.NH = c.NKV * (1 + draw(3));
    c.HS = draw(2) ? 8 * (1 + draw(9)) : 1 + draw(70);
    c.window = draw(2) * draw(70);
    return c;
}

// Rows `from` .. `to` - 1 of every sequence of (B, T, row).
template <typename T>
static std::vector<T> rows(const std::vector<T>& values, int B, size_t row, int from, int to) {
    std::vector<T> result;
    size_t sequence = values.size() / B;
    for (int b = 0; b < B; b++) {
        auto start = values.begin() + b * sequence;
        result.insert(result.end(), start + from * row, start + to * row);
    }
    return result;
}

// The whole text's queries, keys and values; the last T positions are the queries under test.
static std::vector<floatX> make_qkv(const Case& c, float scale = 1) {
    return random_values<floatX>("qkv", c.B * c.length() * c.qkv_row(), scale);
}

// A cache filled as TextGenerator fills it: the prompt in one piece, then the tokens that follow.
struct Cache {
    Case c;
    Buffer<floatX> cache;

    explicit Cache(const Case& c) : c(c), cache(c.B * c.limit * c.cache_row()) {}

    // The shape of a call for positions `from` .. `to` - 1.
    KvCacheShape shape(int from, int to) const {
        return kv_cache_shape(c.B, to - from, c.limit, from, c.NH, c.NKV, c.HS, c.window);
    }

    void append(const std::vector<floatX>& qkv, int from, int to) {
        Buffer<floatX> part(rows(qkv, c.B, c.qkv_row(), from, to));
        kv_cache_append(cache, part, shape(from, to), test_stream());
        cudaCheck(cudaStreamSynchronize(test_stream()));
    }

    // Returns (B, to - from, NH, HS). Keys and values in qkv are set to NaN: the cache provides them.
    std::vector<floatX> attend(const std::vector<floatX>& qkv, int from, int to) {
        std::vector<floatX> part = rows(qkv, c.B, c.qkv_row(), from, to);
        for (size_t i = 0; i < part.size(); i++) {
            if (i % c.qkv_row() >= (size_t)c.NH * c.HS) part[i] = floatX(NAN);
        }
        Buffer<floatX> queries(part), att((size_t)c.B * (to - from) * c.NH * c.HS);
        kv_cache_attention(att, queries, cache, shape(from, to), test_stream());
        return att.host();
    }

    std::vector<floatX> attend(const std::vector<floatX>& qkv) { return attend(qkv, c.past, c.length()); }
};

static std::vector<double> reference(const Case& c, const std::vector<double>& qkv) {
    std::vector<double> att;
    for (int b = 0; b < c.B; b++)
        for (int i = c.past; i < c.length(); i++)
            for (int h = 0; h < c.NH; h++) {
                auto vector_of = [&](int position, int head) {
                    return &qkv[((size_t)b * c.length() + position) * c.qkv_row() + head * c.HS];
                };
                int key_head = c.NH + h / (c.NH / c.NKV), value_head = key_head + c.NKV;
                int first = c.window ? std::max(0, i - c.window + 1) : 0;
                std::vector<double> p(i + 1), out(c.HS);
                double largest = -INFINITY, total = 0;
                for (int j = first; j <= i; j++) {
                    for (int x = 0; x < c.HS; x++) p[j] += vector_of(i, h)[x] * vector_of(j, key_head)[x];
                    p[j] /= std::sqrt((double)c.HS);
                    largest = std::max(largest, p[j]);
                }
                for (int j = first; j <= i; j++) total += p[j] = std::exp(p[j] - largest);
                for (int j = first; j <= i; j++)
                    for (int x = 0; x < c.HS; x++) out[x] += p[j] / total * vector_of(j, value_head)[x];
                att.insert(att.end(), out.begin(), out.end());
            }
    return att;
}

static void check(const Case& c, float scale = 1, double limit = tolerance<floatX>) {
    CAPTURE(c.name());
    std::vector<floatX> qkv = make_qkv(c, scale);
    Cache cache(c);
    cache.append(qkv, 0, c.length());
    CHECK(relative_error(to_doubles(cache.attend(qkv)), reference(c, to_doubles(qkv))) < limit);
}

TEST_CASE("append: rows of keys and values, and nothing else") {
    for (Case c : {Case{1, 1, 4, 2, 2, 2, 16}, Case{2, 5, 9, 3, 4, 2, 20}, Case{3, 2, 2, 0, 3, 1, 33},
                   Case{2, 3, 10, 7, 2, 1, 256}, Case{1, 40, 50, 5, 6, 3, 64}}) {
        CAPTURE(c.name());
        std::vector<floatX> qkv = make_qkv(c);
        Cache cache(c);
        cache.append(qkv, c.past, c.length());
        std::vector<double> got = to_doubles(cache.cache.host()), sent = to_doubles(qkv);
        size_t wrong = 0;
        for (size_t i = 0; i < got.size(); i++) {
            size_t at = i / c.cache_row() % c.limit, b = i / c.cache_row() / c.limit,
                   element = i % c.cache_row();
            if ((int)at < c.past || (int)at >= c.length())
                wrong += !std::isnan(got[i]);
            else
                wrong += got[i] != sent[(b * c.length() + at) * c.qkv_row() + c.NH * c.HS + element];
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("attention: one query after texts of any length") {
    for (int past : {0, 1, 3, 31, 32, 63, 64, 65, 127, 128, 200, 1100})
        check({1, 1, past + 3, past, 2, 1, 64});
}

TEST_CASE("attention: several queries") {
    for (int T : {2, 5, 17, 70}) {
        check({2, T, T, 0, 2, 2, 32});
        check({2, T, T + 40, 37, 2, 1, 32});
    }
}

TEST_CASE("attention: head sizes, also those that are no multiple of a vector") {
    for (int HS : {1, 2, 7, 8, 9, 20, 33, 40, 65, 80, 96, 128, 130, 192, 250, 255, 256})
        check({2, 1, 80, 70, 2, 1, HS});
}

TEST_CASE("attention: several query heads share a key/value head") {
    check({2, 3, 67, 64, 6, 2, 20});
    check({1, 1, 101, 100, 12, 3, 64});
    check({2, 2, 90, 80, 10, 2, 16});
    check({1, 1, 71, 70, 9, 1, 40});
}

TEST_CASE("attention: random shapes") {
    for (int number = 0; number < 60; number++) check(random_case(number));
}

TEST_CASE("attention: large scores do not overflow, and the largest may stand anywhere") {
    check({1, 3, 300, 290, 2, 2, 32}, 16, 5 * tolerance<floatX>);
    for (int strongest : {0, 1, 63, 64, 130, 199}) {
        CAPTURE(strongest);
        Case c{1, 1, 200, 199, 1, 1, 32};
        std::vector<floatX> qkv = make_qkv(c);
        for (int x = 0; x < c.HS; x++) {
            floatX& key = qkv[strongest * c.qkv_row() + c.HS + x];
            key = floatX(4 * float(qkv[c.past * c.qkv_row() + x]));
        }
        Cache cache(c);
        cache.append(qkv, 0, c.length());
        CHECK(relative_error(to_doubles(cache.attend(qkv)), reference(c, to_doubles(qkv))) <
              tolerance<floatX>);
    }
}

TEST_CASE("attention: reads no position outside of the window") {
    for (int window : {1, 2, 5, 64, 70, 100}) {
        CAPTURE(window);
        Case c{2, 3, 120, 100, 4, 2, 24, window};
        std::vector<floatX> qkv = make_qkv(c);
        Cache cache(c);  // holds NaN where nothing is appended
        cache.append(qkv, std::max(0, c.past - window + 1), c.length());
        CHECK(relative_error(to_doubles(cache.attend(qkv)), reference(c, to_doubles(qkv))) <
              tolerance<floatX>);
    }
}

TEST_CASE("attention: a NaN is not hidden") {
    for (int element : {16, 32}) {  // the first belongs to a key, the second to a value
        Case c{1, 3, 73, 68, 1, 1, 16};
        std::vector<floatX> qkv = make_qkv(c);
        qkv[69 * c.qkv_row() + element] = floatX(NAN);
        Cache cache(c);
        cache.append(qkv, 0, c.length());
        std::vector<floatX> att = cache.attend(qkv);
        CHECK(!std::isnan(float(att[0])));
        CHECK(std::isnan(float(att[c.HS])));
        CHECK(std::isnan(float(att[2 * c.HS])));
    }
}

// Each token is rotated at its own position, as in a model: the prompt in one piece, then token by token.
TEST_CASE("a text written with the cache is the text computed as a whole") {
    for (Case c :
         {Case{2, 9, 45, 33, 4, 2, 32}, Case{1, 20, 20, 0, 3, 1, 20, 7}, Case{1, 6, 90, 80, 2, 2, 64, 30}}) {
        CAPTURE(c.name());
        int length = c.length(), R = c.HS;
        std::vector<float> angles((size_t)length * R);
        rope_table(angles.data(), length, R, 10000.0f, {});
        Buffer<float> table(angles);
        std::vector<floatX> plain = make_qkv(c);

        Buffer<floatX> whole(plain), out((size_t)c.B * length * c.NH * c.HS);
        Buffer<float> lse((size_t)c.B * length * c.NH);
        // rotates one piece of the texts
        auto rotate = [&](floatX* qkv, int from, int to) {
            std::vector<int> positions;
            for (int n = 0; n < c.B * (to - from); n++) positions.push_back(from + n % (to - from));
            Buffer<int> of_rows(positions);
            rope_forward(qkv, {table, of_rows, R}, {c.B * (to - from), c.NH, c.NKV, c.HS}, test_stream());
            cudaCheck(cudaStreamSynchronize(test_stream()));  // the positions are freed here
        };
        rotate(whole, 0, length);
        attention_forward(out, lse, whole,
                          self_attention_shape(c.B, length, c.NH, c.NKV, c.HS, c.window, nullptr),
                          test_stream());
        std::vector<floatX> want = out.host();

        Cache cache(c);
        auto step = [&](int from, int to) {
            Buffer<floatX> part(rows(plain, c.B, c.qkv_row(), from, to));
            rotate(part, from, to);
            Buffer<floatX> att((size_t)c.B * (to - from) * c.NH * c.HS);
            kv_cache_append(cache.cache, part, cache.shape(from, to), test_stream());
            kv_cache_attention(att, part, cache.cache, cache.shape(from, to), test_stream());
            std::vector<floatX> here = rows(want, c.B, (size_t)c.NH * c.HS, from, to);
            CHECK(relative_error(att.doubles(), to_doubles(here)) < tolerance<floatX>);
        };
        if (c.past) step(0, c.past);
        for (int position = c.past; position < length; position++) step(position, position + 1);
    }
}

TEST_CASE("texts of several lengths: each as if it were alone, and nothing of one that is left out") {
    constexpr int T = 2, limit = 80;
    const std::vector<int> pasts = {5, -1, 0, 78, 1, 64};
    for (int window : {0, 7}) {
        const Case all{(int)pasts.size(), T, limit, limit - T, 4, 2, 32, window},
            one{1, T, limit, limit - T, 4, 2, 32, window};
        std::vector<floatX> before = make_qkv(all);
        std::vector<floatX> newest = random_values<floatX>("newest", all.B * T * all.qkv_row());
        auto of_text = [](const std::vector<floatX>& values, int b) {
            size_t part = values.size() / 6;
            return std::vector<floatX>(values.begin() + b * part, values.begin() + (b + 1) * part);
        };
        auto attend = [&](Cache& cache, const std::vector<floatX>& qkv, KvCacheShape shape) {
            Buffer<floatX> rows(qkv), att(qkv.size() / all.qkv_row() * all.NH * all.HS);
            kv_cache_append(cache.cache, rows, shape, test_stream());
            kv_cache_attention(att, rows, cache.cache, shape, test_stream());
            return att.host();
        };
        Cache cache(all);
        cache.append(before, 0, limit);  // no query may see keys after its text's past
        Buffer<int> on_device(pasts);
        std::vector<floatX> att = attend(
            cache, newest, kv_cache_shape(all.B, T, limit, 0, all.NH, all.NKV, all.HS, window, on_device));
        std::vector<floatX> is = cache.cache.host();
        for (int b = 0; b < all.B; b++) {
            CAPTURE(pasts[b]);
            Cache alone(one);
            alone.append(of_text(before, b), 0, limit);
            std::vector<floatX> want((size_t)T * all.NH * all.HS, floatX(0));
            if (pasts[b] >= 0)
                want = attend(alone, of_text(newest, b),
                              kv_cache_shape(1, T, limit, pasts[b], all.NH, all.NKV, all.HS, window));
            CHECK(same_bits(of_text(att, b), want));
            CHECK(same_bits(of_text(is, b), alone.cache.host()));
        }
    }
}

TEST_CASE("attention: the same bits whatever else is in the batch, and on every run") {
    Case c{3, 4, 120, 110, 4, 2, 40, 100};
    std::vector<floatX> qkv = make_qkv(c);
    auto attend = [&](const Case& some, const std::vector<floatX>& its_qkv, int from) {
        Cache cache(some);
        cache.append(its_qkv, 0, some.length());
        return to_doubles(cache.attend(its_qkv, from, some.length()));
    };
    std::vector<double> all = attend(c, qkv, c.past);
    CHECK(all == attend(c, qkv, c.past));
    // the second text by itself in a longer cache, and only its last query
    Case one = c;
    one.B = 1, one.limit = 150;
    size_t text = c.length() * c.qkv_row(), queries = (size_t)c.T * c.NH * c.HS, query = (size_t)c.NH * c.HS;
    std::vector<floatX> second(qkv.begin() + text, qkv.begin() + 2 * text);
    std::vector<double> of_second(all.begin() + queries, all.begin() + 2 * queries);
    CHECK(attend(one, second, c.past) == of_second);
    CHECK(attend(one, second, c.length() - 1) ==
          std::vector<double>(of_second.end() - query, of_second.end()));
}
