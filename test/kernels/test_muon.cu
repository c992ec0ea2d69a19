#include "kernels/matrix_part.cuh"
#include "kernels/muon.cuh"
#include "test/support/testing.h"

namespace {

constexpr double limit = sizeof(floatX) == 2 ? 3e-2 : 1e-5;

// Row-major, in double.
struct Matrix {
    int rows, cols;
    std::vector<double> at;

    Matrix(int rows, int cols) : rows(rows), cols(cols), at((size_t)rows * cols) {}
    double& operator()(int r, int c) { return at[(size_t)r * cols + c]; }
    double operator()(int r, int c) const { return at[(size_t)r * cols + c]; }

    double norm() const {
        double sum = 0;
        for (double x : at) sum += x * x;
        return std::sqrt(sum);
    }
    Matrix times(double factor) const {
        Matrix result = *this;
        for (double& x : result.at) x *= factor;
        return result;
    }
};

Matrix gram(const Matrix& x) {
    Matrix result(x.rows, x.rows);
    for (int i = 0; i < x.rows; i++)
        for (int j = 0; j < x.rows; j++)
            for (int k = 0; k < x.cols; k++) result(i, j) += x(i, k) * x(j, k);
    return result;
}

Matrix product(const Matrix& a, const Matrix& b) {
    Matrix result(a.rows, b.cols);
    for (int i = 0; i < a.rows; i++)
        for (int k = 0; k < a.cols; k++)
            for (int j = 0; j < b.cols; j++) result(i, j) += a(i, k) * b(k, j);
    return result;
}

// Iterates x <- a x + (b A + c A^2) x, with A = x x^T.
Matrix newton_schulz(Matrix x, int steps, double a, double b, double c) {
    for (int step = 0; step < steps; step++) {
        Matrix A = gram(x), square = product(A, A), polynomial(x.rows, x.rows);
        for (size_t i = 0; i < A.at.size(); i++) polynomial.at[i] = b * A.at[i] + c * square.at[i];
        Matrix more = product(polynomial, x);
        for (size_t i = 0; i < x.at.size(); i++) x.at[i] = a * x.at[i] + more.at[i];
    }
    return x;
}

Matrix random_matrix(int rows, int cols) {
    Matrix result(rows, cols);
    auto values = random_values<floatX>(text("matrix %d %d", rows, cols).c_str(), result.at.size());
    result.at = to_doubles(values);
    return result;
}

Matrix orthogonalised(const Matrix& matrix) {
    std::vector<float> values(matrix.at.begin(), matrix.at.end());
    Buffer<floatX> buffer(values), scratch(orthogonalise_scratch(matrix.rows, matrix.cols, sizeof(floatX)));
    orthogonalise(buffer, matrix.rows, matrix.cols, scratch, test_stream());
    Matrix result = matrix;
    result.at = buffer.doubles();
    return result;
}

double difference(const Matrix& got, const Matrix& want) {
    return relative_error(got.at, want.at);
}

}  // namespace

TEST_CASE("Newton-Schulz steps are those of the formula") {
    for (auto [rows, cols] : {std::pair{1, 1}, {1, 9}, {3, 7}, {16, 16}, {17, 64}, {40, 41}}) {
        CAPTURE(rows);
        CAPTURE(cols);
        Matrix matrix = random_matrix(rows, cols);
        Matrix want = newton_schulz(matrix.times(1 / (matrix.norm() + 1e-7)), 5, 3.4445, -4.7750, 2.0315);
        CHECK(difference(orthogonalised(matrix), want) < limit * 3);
    }
}

// The reference is the nearest matrix with orthonormal rows, found by many steps of the cubic iteration,
// which converges to it: the result must have its directions, and singular values of about 1.
TEST_CASE("a matrix becomes nearly the nearest one with orthonormal rows") {
    for (auto [rows, cols] : {std::pair{1, 5}, {8, 24}, {24, 60}}) {
        Matrix matrix = random_matrix(rows, cols), unit = matrix.times(1 / matrix.norm());
        Matrix nearest = newton_schulz(unit, 60, 1.5, -0.5, 0);
        Matrix identity = gram(nearest);
        for (int i = 0; i < rows; i++) CHECK(identity(i, i) == doctest::Approx(1).epsilon(1e-9));
        Matrix got = orthogonalised(matrix);
        double along = 0;
        for (size_t i = 0; i < got.at.size(); i++) along += got.at[i] * nearest.at[i];
        CHECK(along / (got.norm() * nearest.norm()) > 0.97);
        CHECK(along / rows > 0.65);  // the mean of the singular values
        CHECK(along / rows < 1.2);
    }
}

TEST_CASE("a matrix of zeros stays one") {
    Matrix zero(4, 6);
    CHECK(orthogonalised(zero).at == zero.at);
}

// Against the published formulas in double, with a given matrix in place of the orthogonalized one.
TEST_CASE("steps of Muon around the orthogonal matrix") {
    const size_t n = 37 * 20, rest = 90;
    AdamW adamw = {3e-3, 0.9, 0.95, 1e-8, 0.1, 1, false};
    auto rounded = random_values<floatX>("weights", n + rest, 0.02f);
    std::vector<float> weights(rounded.begin(), rounded.end());
    Buffer<floatX> params(weights);
    Buffer<float> master(weights), m(std::vector<float>(n + rest)), v(std::vector<float>(n + rest)),
        grads(n + rest), scale(std::vector<float>{0.7f});
    const std::vector<OptimizerPart> parts = {{0, n, 0, 7, true, 0, 37, 20}, {n, rest, 0, 8, true, 1}};
    OptimizerArrays arrays = {params, master, {m, v}, grads, scale};
    std::vector<double> w(weights.begin(), weights.end()), mean(n), alone_m(rest), alone_v(rest);
    for (adamw.step = 1; adamw.step <= 4; adamw.step++) {
        Optimizer optimizer = muon_optimizer({adamw, 0.95}, 5);
        auto gradient = random_values<float>(text("grads %d", adamw.step).c_str(), n + rest, 0.01f);
        auto other = random_values<float>(text("orthogonal %d", adamw.step).c_str(), n, 0.2f);
        copy_to_device<float>(grads, gradient.data(), n + rest, test_stream());
        optimizer.prepare.on_device(arrays, parts, test_stream());
        auto update = to_doubles(grads.host());
        copy_to_device<float>(grads, other.data(), n, test_stream());
        optimizer.step.on_device(arrays, parts, test_stream());
        cudaCheck(cudaStreamSynchronize(test_stream()));
        std::vector<double> want(n);
        for (size_t i = 0; i < n; i++) {
            double g = gradient[i] * 0.7;
            mean[i] = 0.95 * mean[i] + 0.05 * g;
            want[i] = 0.05 * g + 0.95 * mean[i];
            w[i] = w[i] * (1 - 3e-3 * 0.1) - 3e-3 * 0.2 * std::sqrt(37.0) * other[i];
        }
        for (size_t i = 0; i < rest; i++) {
            double g = gradient[n + i] * 0.7;
            CHECK(update[n + i] == gradient[n + i]);  // unchanged, for AdamW
            alone_m[i] = 0.9 * alone_m[i] + 0.1 * g;
            alone_v[i] = 0.95 * alone_v[i] + 0.05 * g * g;
            double m_hat = alone_m[i] / (1 - std::pow(0.9, adamw.step)),
                   v_hat = alone_v[i] / (1 - std::pow(0.95, adamw.step));
            w[n + i] = w[n + i] * (1 - 3e-3 * 0.1) - 3e-3 * m_hat / (std::sqrt(v_hat) + 1e-8);
        }
        update.resize(n);
        CHECK(relative_error(update, want) < 1e-5);
    }
    CHECK(relative_error(to_doubles(master.host()), w) < 1e-6);
}

TEST_CASE("a NaN scale skips all of a step of Muon") {
    const size_t n = 60;
    std::vector<float> weights = random_values<float>("weights", n);
    Buffer<floatX> params(weights);
    Buffer<float> master(weights), m(weights), v(weights), grads(weights), scale(std::vector<float>{NAN});
    const std::vector<OptimizerPart> parts = {{0, 40, 0, 7, true, 0, 8, 5}, {40, 20, 0, 8, true, 1}};
    auto bits = [&] { return std::tuple(params.doubles(), master.host(), m.host(), v.host()); };
    auto before = bits();
    Optimizer optimizer = muon_optimizer({{1e-2, 0.9, 0.95, 1e-8, 0.1, 1, false}, 0.95}, 5);
    for (const OptimizerPass* pass : {&optimizer.prepare, &optimizer.step})
        pass->on_device({params, master, {m, v}, grads, scale}, parts, test_stream());
    CHECK(bits() == before);
}

TEST_CASE("parts go to their places in a matrix, and back") {
    struct {
        size_t rows, cols, column, columns, begin, count;
    } cases[] = {
        {7, 12, 0, 12, 0, 84},      {7, 12, 0, 12, 5, 50},
        {7, 12, 0, 12, 83, 1},                                    // parts that begin within a row
        {7, 12, 4, 4, 0, 28},       {7, 12, 8, 4, 3, 17},         // columns of one of three ranks
        {3, 600, 0, 600, 299, 901}, {3, 600, 200, 300, 10, 800},  // more than a block's threads
    };
    for (auto [rows, cols, column, columns, begin, count] : cases)
        for (bool transposed : {false, true}) {
            auto all = random_values<floatX>("matrix", rows * cols);
            auto place = [=](size_t row, size_t col) {
                return transposed ? col * rows + row : row * cols + col;
            };
            std::vector<floatX> want(all), part;
            for (size_t r = 0; r < rows; r++)
                for (size_t c = 0; c < cols; c++) want[place(r, c)] = all[r * cols + c];
            std::vector<floatX> holes = want;
            for (size_t e = begin; e < begin + count; e++) {
                size_t row = e / columns, col = column + e % columns;
                part.push_back(all[row * cols + col]);
                holes[place(row, col)] = floatX(0.0f);
            }
            MatrixPart at = {rows, cols, column, columns, begin, count, transposed};
            Buffer<floatX> matrix(want), got(part.size()), filled(holes);
            copy_part<PartCopy::out_of_matrix>(matrix, got, at, test_stream());
            CHECK(same_bits(got.host(), part));
            copy_part<PartCopy::into_matrix>(filled, got, at, test_stream());
            CHECK(same_bits(filled.host(), want));
        }
    auto values = random_values<float>("values", 1001);
    Buffer<float> numbers(values), back(1001);
    Buffer<floatX> narrow(1001);
    convert<floatX, float>(narrow, numbers, 1001, test_stream());
    convert<float, floatX>(back, narrow, 1001, test_stream());
    CHECK(same_bits(narrow.host(), std::vector<floatX>(values.begin(), values.end())));
    CHECK(to_doubles(back.host()) == narrow.doubles());
}
