// Rows of tables: fetched, put and updated by row-wise AdaGrad; and sums of rows that belong to the same
// table row.
#include "test/support/testing.h"

#include <set>

#include "kernels/embedding.cuh"  // sum_rows
#include "kernels/table_rows.cuh"

using Rows = std::vector<uint64_t>;

constexpr float deviation = 0x1p-6f;

// A new table on the device, and the same one in host memory. Every operation is done on both and must give
// the same bits. Values begin as NaN: those of a new row must not be read.
struct Table {
    bool in_bf16;
    uint64_t rows;
    int W;
    uint64_t key = 77, first = 0, stride = 1;
    Buffer<char> values{bytes_of(rows)};
    Buffer<float> squares{std::vector<float>(rows)};
    std::vector<char> host_values = values.host();
    std::vector<float> host_squares = squares.host();

    size_t bytes_of(uint64_t count) const { return count * W * (in_bf16 ? 2 : 4); }
    TableRows on_device() { return {{values, in_bf16}, squares, W, key, deviation, first, stride}; }
    TableRows on_host() {
        return {{host_values.data(), in_bf16}, host_squares.data(), W, key, deviation, first, stride};
    }

    // In the table's format, and as the model gets them.
    std::vector<float> fetch(const Rows& list) {
        std::vector<char> want(bytes_of(list.size()));
        std::vector<floatX> want_there(list.size() * W);
        Buffer<char> got(want.size());
        Buffer<floatX> got_there(want_there.size());
        Buffer<uint64_t> list_(list);
        const int count = (int)list.size();
        fetch_rows({got, in_bf16}, on_device(), list_, count, test_stream());
        fetch_rows((floatX*)got_there, on_device(), list_, count, test_stream());
        fetch_rows_cpu({want.data(), in_bf16}, on_host(), list.data(), count);
        fetch_rows_cpu(want_there.data(), on_host(), list.data(), count);
        CHECK(same_bits(got.host(), want));
        CHECK(same_bits(got_there.host(), want_there));
        std::vector<float> values;
        NumberArray numbers(want.data(), in_bf16);
        for (size_t i = 0; i < want_there.size(); i++) {
            values.push_back(numbers.get(i));
            REQUIRE(float(want_there[i]) == float(floatX(values[i])));
        }
        return values;
    }

    std::vector<float> fetch_all() {
        Rows list;
        for (uint64_t row = 0; row < rows; row++) list.push_back(row);
        return fetch(list);
    }

    void step(const Rows& list, const std::vector<float>& grads, float scale, const AdaGrad& adagrad) {
        Buffer<uint64_t> list_(list);
        Buffer<float> grads_(grads), scale_(std::vector<float>{scale});
        step_rows(on_device(), list_, grads_, (int)list.size(), scale_, adagrad, test_stream());
        step_rows_cpu(on_host(), list.data(), grads.data(), (int)list.size(), &scale, adagrad);
        check_same();
    }

    void put(const Rows& list, const std::vector<float>& to, const std::vector<float>& to_squares) {
        std::vector<char> bytes(bytes_of(list.size()));
        for (size_t i = 0; i < to.size(); i++) NumberArray(bytes.data(), in_bf16).set(i, to[i]);
        Buffer<uint64_t> list_(list);
        Buffer<char> to_(bytes);
        Buffer<float> to_squares_(to_squares);
        put_rows(on_device(), list_, {to_, in_bf16}, to_squares_, (int)list.size(), test_stream());
        put_rows_cpu(on_host(), list.data(), {bytes.data(), in_bf16}, to_squares.data(), (int)list.size());
        check_same();
    }

    void check_same() {
        CHECK(same_bits(values.host(), host_values));
        CHECK(same_bits(squares.host(), host_squares));
    }
};

static std::vector<std::pair<int, bool>> widths_and_formats(const std::vector<int>& widths) {
    std::vector<std::pair<int, bool>> both;
    for (int W : widths)
        for (bool in_bf16 : {true, false}) both.push_back({W, in_bf16});
    return both;
}

// Distinct rows of a table, in random order.
static Rows some_rows(const char* name, uint64_t count, int size) {
    Rows list;
    std::set<int> seen;
    for (int row : random_rows(name, count * 20, size))
        if (list.size() < count && seen.insert(row).second) list.push_back((uint64_t)row);
    REQUIRE(list.size() == count);
    return list;
}

TEST_CASE("table rows: a new row is what its key and its number in the whole table say") {
    for (auto [W, in_bf16] : widths_and_formats({8, 24, 200})) {
        CAPTURE(W);
        Table whole{in_bf16, 300, W}, other_key{in_bf16, 300, W, 78},
            far{in_bf16, 300, W, 77, uint64_t(1) << 40};
        auto all = whole.fetch_all();
        Table part{in_bf16, 40, W, 77, 3, 5};
        for (uint64_t row : {0, 1, 39}) {
            auto begin = all.begin() + (long)((3 + row * 5) * W);
            CHECK(same_bits(part.fetch({row}), std::vector(begin, begin + W)));
        }
        CHECK(!same_bits(other_key.fetch_all(), all));
        CHECK(!same_bits(far.fetch_all(), all));

        double n = (double)all.size(), sum = 0, squares = 0;
        std::set<std::vector<double>> different;
        for (uint64_t row = 0; row < whole.rows; row++) {
            auto begin = all.begin() + (long)(row * W);
            auto values = to_doubles(std::vector(begin, begin + W));
            for (double& value : values) {
                value /= deviation;
                REQUIRE(std::fabs(value) <= 1);
                sum += value, squares += value * value;
            }
            different.insert(values);
        }
        CHECK(different.size() == whole.rows);
        CHECK(std::fabs(sum / n) < 4 * std::sqrt(1 / (3 * n)));  // a uniform number's variance is 1/3
        CHECK(std::fabs(squares / n - 1 / 3.0) < 4 * std::sqrt((1 / 5.0 - 1 / 9.0) / n));
    }
}

TEST_CASE("table rows: what is put is fetched, and without squares a row is new again") {
    for (auto [W, in_bf16] : widths_and_formats({8, 24, 64})) {
        Table table{in_bf16, 30, W, 77, 1, 3};
        auto fresh = table.fetch({4});
        Rows list = {7, 4, 29, 0};
        auto values = random_values<float>("values", list.size() * W);
        for (float& value : values)
            if (in_bf16) value = bf16_to_float(float_to_bf16(value));
        table.put(list, values, {1, 2, 3, 4});
        CHECK(same_bits(table.fetch(list), values));
        Rows again = {0, 0, 7};  // a row may be requested twice
        auto got = table.fetch(again);
        CHECK(std::equal(got.begin(), got.begin() + W, got.begin() + W));
        table.put({4}, std::vector<float>(W), {0});
        CHECK(same_bits(table.fetch({4}), fresh));
    }
}

// The distance between adjacent numbers of a format at this value.
static double digit(double value, bool in_bf16) {
    return std::exp2(std::ilogb(value) - (in_bf16 ? 7 : 23));
}

// Against the formula in double, from the stored values: a stored number is one of the two nearest to the
// result.
TEST_CASE("table rows: steps of AdaGrad") {
    const int rows = 50, count = 13;
    const float scale = 0.7f;
    const AdaGrad at = {.learning_rate = 0.02f, .eps = 1e-8f, .step = 0};
    for (auto [W, in_bf16] : widths_and_formats({8, 24, 64, 200})) {
        CAPTURE(W);
        Table table{in_bf16, rows, W, 77, 2, 4};
        std::vector<double> squares(rows);
        for (int step = 1; step <= 6; step++) {
            std::string name = "step" + std::to_string(step);
            Rows list = some_rows(name.c_str(), count, rows);
            auto grads = random_values<float>(name.c_str(), (size_t)count * W, 0.01f * (float)step);
            std::fill_n(grads.begin() + 5 * W, W, 0.0f);  // leaves its row unchanged
            std::vector<int> place(rows, -1);
            for (int i = 0; i < count; i++)
                if (i != 5) place[list[i]] = i;

            auto before = table.fetch_all();
            auto raw_before = table.host_values;
            AdaGrad now = at;
            now.step = step;
            table.step(list, grads, scale, now);
            auto after = table.fetch_all();
            int wrong = 0;
            for (int row = 0; row < rows; row++) {
                size_t begin = (size_t)row * W;
                if (place[row] < 0) {
                    size_t at = table.bytes_of(row);
                    wrong += memcmp(&table.host_values[at], &raw_before[at], table.bytes_of(1)) != 0;
                    continue;
                }
                const float* grad = &grads[(size_t)place[row] * W];
                for (int w = 0; w < W; w++) squares[row] += std::pow((double)grad[w] * scale, 2) / W;
                double size = at.learning_rate / (std::sqrt(squares[row]) + at.eps);
                for (int w = 0; w < W; w++) {
                    double old = before[begin + w], got = after[begin + w],
                           want = old - size * grad[w] * scale;
                    double rounding =
                        1e-6 * std::fabs(want - old) + digit(std::max({old, got, -old, -got}), in_bf16);
                    wrong += !(std::fabs(got - want) <= 1.001 * rounding);
                }
            }
            CHECK(wrong == 0);
            CHECK_CLOSE(table.squares, squares, 1e-6);
        }
    }
}

TEST_CASE("table rows: a NaN scale changes nothing, nor do zero gradients and lists of no rows") {
    Table table{true, 20, 24};
    const AdaGrad adagrad = {0.02f, 1e-8f, 1};
    Rows list = {3, 0, 11};
    auto grads = random_values<float>("grads", list.size() * 24);
    table.step(list, grads, 1.0f, adagrad);
    auto values = table.host_values;
    auto squares = table.host_squares;
    table.step({3, 5}, random_values<float>("grads", 2 * 24), NAN, adagrad);
    table.step({3, 5}, std::vector<float>(2 * 24, NAN), NAN, adagrad);
    table.step({3, 5}, std::vector<float>(2 * 24), 1.0f, adagrad);
    table.step({3, 5}, random_values<float>("grads", 2 * 24), 0.0f, adagrad);
    table.step({}, {}, 1.0f, adagrad);
    table.put({}, {}, {});
    CHECK(table.fetch({}).empty());
    CHECK(same_bits(table.host_values, values));
    CHECK(same_bits(table.host_squares, squares));
    CHECK(squares[3] > 0);
    CHECK(squares[5] == 0);
}

// A step far below half of the last digit changes a number just often enough to be right on average, and
// different numbers in each step and in each row.
TEST_CASE("table rows: stochastic rounding is exact in the mean") {
    const int rows = 2500, W = 16, n = rows * W;
    const double digit = 0x1p-7, move = 3e-4, p = move / digit;  // how far, and how often
    Rows list;
    for (uint64_t row = 0; row < rows; row++) list.push_back(row);
    auto moved = [&](uint64_t first, int step) {
        Table table{true, rows, W, 77, first};
        table.put(list, std::vector<float>(n, 1.5f), std::vector<float>(rows, 3.0f));
        AdaGrad adagrad = {2 * (float)move, 0, step};  // squares become 4
        table.step(list, std::vector<float>(n, 1.0f), 1.0f, adagrad);
        std::vector<bool> moves;
        for (float value : table.fetch(list)) {
            REQUIRE((value == 1.5f || value == 1.5f - (float)digit));
            moves.push_back(value != 1.5f);
        }
        return moves;
    };
    auto one = moved(0, 1);
    CHECK(std::fabs((double)std::count(one.begin(), one.end(), true) - n * p) < 4 * std::sqrt(n * p));
    CHECK(moved(0, 1) == one);
    for (auto other : {moved(0, 2), moved(100'000, 1)}) {
        int both = 0;
        for (int i = 0; i < n; i++) both += one[i] && other[i];
        CHECK(std::fabs(both - n * p * p) < 4 * std::sqrt(n * p * p));
    }
}

// Checks that sums are added to existing rows, and that other rows keep their bits.
template <typename T>
void check_sums(const std::vector<int>& rows, int count, int C) {
    int N = (int)rows.size();
    CAPTURE(N);
    CAPTURE(C);
    auto inp = random_values<T>("inp", (size_t)N * C);
    auto before = random_values<float>("before", (size_t)count * C);
    std::vector<double> want = to_doubles(before);
    std::vector<bool> listed(count);
    for (int n = 0; n < N; n++) {
        listed[rows[n]] = true;
        for (int c = 0; c < C; c++) want[(size_t)rows[n] * C + c] += float(inp[(size_t)n * C + c]);
    }
    std::vector<int> order(N);
    sort_by(order.data(), N, [&](int n) { return rows[n]; });
    Buffer<float> table(before), scratch(embedding_backward_scratch(N, C));
    Buffer<T> inp_(inp);
    Buffer<int> rows_(rows), order_(order);
    sum_rows(table, scratch, (const T*)inp_, rows_, order_, N, C, test_stream());
    CHECK_CLOSE(table, want, tolerance<float>);
    auto got = table.host();
    int changed = 0;
    for (size_t i = 0; i < got.size(); i++) changed += !listed[i / C] && got[i] != before[i];
    CHECK(changed == 0);
}

TEST_CASE("sum_rows: rows for the same row of a table, added to what it has") {
    for (int C : {1, 7, 8, 24, 300}) {
        for (auto [N, count] : {std::pair{0, 3}, {1, 1}, {5, 3}, {100, 200}, {700, 9}}) {
            auto rows = random_rows("rows", N, count);
            check_sums<float>(rows, count, C);
            check_sums<floatX>(rows, count, C);
        }
    }
    for (int N : {64, 65, 4160}) {
        check_sums<float>(std::vector<int>(N, 2), 5, 4);
        check_sums<floatX>(std::vector<int>(N, 2), 5, 3);
    }
}
