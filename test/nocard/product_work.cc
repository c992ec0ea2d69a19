#include "test/nocard/product_work.h"

#include <cstdlib>
#include <cstring>

#include "test/nocard/cards.h"
#include "test/nocard/device_memory.h"
#include "test/nocard/fault.h"
#include "test/nocard/number_types.h"
#include "test/nocard/product_problem.h"

namespace nocard {
namespace {

double most_product() {
    static const double most = getenv("NOCARD_MOST_PRODUCT") ? atof(getenv("NOCARD_MOST_PRODUCT")) : 2e9;
    return most;
}

constexpr const char* call = "cublasLtMatmul";

// Reads and writes of a matrix, column by column.
void require_written(const char* what, const Matrix& matrix) {
    for (size_t column = 0; column < matrix.columns; column++) {
        size_t bytes = bytes_of(matrix.type);
        nocard::require_written(call, what, (const char*)matrix.data + column * matrix.stride * bytes,
                                matrix.rows * bytes);
    }
}

void note_written(const Matrix& matrix) {
    for (size_t column = 0; column < matrix.columns; column++) {
        size_t bytes = bytes_of(matrix.type);
        nocard::note_written((const char*)matrix.data + column * matrix.stride * bytes, matrix.rows * bytes);
    }
}

void fill_with_nans(const Matrix& matrix) {
    for (size_t column = 0; column < matrix.columns; column++) {
        size_t bytes = bytes_of(matrix.type);
        memset((char*)matrix.data + column * matrix.stride * bytes, 0xff, matrix.rows * bytes);
    }
}

Matrix aux_of(const HostProduct& p) {
    return {p.aux, p.d.type, p.m, p.n, p.aux_stride, false};
}

size_t bytes_of_bias(const HostProduct& p) {
    return (p.epilogue == CUBLASLT_EPILOGUE_BGRADB ? p.n : p.m) * bytes_of(p.bias_type);
}

void check_reads(const HostProduct& p) {
    require_written("A", p.a);
    require_written("B", p.b);
    if (p.beta != 0) require_written("C", p.c);
    if (reads_bias(p.epilogue)) nocard::require_written(call, "the bias", p.bias, bytes_of_bias(p));
    if (has_aux(p.epilogue) && !writes_aux(p.epilogue)) require_written("the auxiliary matrix", aux_of(p));
    if (p.a_scale) nocard::require_written(call, "the scale of A", p.a_scale, sizeof(float));
    if (p.b_scale) nocard::require_written(call, "the scale of B", p.b_scale, sizeof(float));
}

void note_writes(const HostProduct& p) {
    note_written(p.d);
    if (writes_bias(p.epilogue)) nocard::note_written(p.bias, bytes_of_bias(p));
    if (writes_aux(p.epilogue)) note_written(aux_of(p));
}

void leave_out(const HostProduct& p) {
    static bool said = false;
    if (!said && getenv("NOCARD_REPORT"))
        fprintf(stderr,
                "nocard: %s: a product of %zu x %zu x %zu is not made, and has NaNs (NOCARD_MOST_PRODUCT)\n",
                call, p.m, p.n, p.k);
    said = true;
    fill_with_nans(p.d);
    if (writes_aux(p.epilogue)) fill_with_nans(aux_of(p));
    if (writes_bias(p.epilogue)) memset(p.bias, 0xff, bytes_of_bias(p));
    note_writes(p);
}

// Runs in two parts if sums are split; other streams work in between.
Advance advance_of(const HostProduct& product) {
    return [p = product, begun = false, pauses = draw(4)]() mutable {
        if ((double)p.m * (double)p.n * (double)p.k > most_product()) return leave_out(p), true;
        if (!begun) {
            check_reads(p);
            std::vector<float> sums = partial_sums(p);
            if (!p.workspace) return finish_product(p, sums.data()), note_writes(p), true;
            memcpy(p.workspace, sums.data(), sums.size() * sizeof(float));
            begun = true;
            return false;
        }
        if (pauses-- > 0) return false;
        finish_product(p, p.workspace);
        memset(p.workspace, 0xff, p.splits * p.m * p.n * sizeof(float));
        note_writes(p);
        return true;
    };
}

bool overlap(const Matrix& x, const Matrix& y) {
    auto *a = (const char*)x.data, *b = (const char*)y.data;
    return a < b + y.elements() * bytes_of(y.type) && b < a + x.elements() * bytes_of(x.type);
}

void require_matrix(const char* what, const Matrix& matrix, std::vector<Touched>& touched) {
    size_t bytes = matrix.elements() * bytes_of(matrix.type);
    require_device(call, what, matrix.data, bytes);
    touched.push_back({matrix.data, bytes});
}

// Ends the process if a card would read or write outside of live memory.
std::vector<Touched> check_memory(const HostProduct& p) {
    std::vector<Touched> touched;
    require_matrix("A", p.a, touched);
    require_matrix("B", p.b, touched);
    if (p.beta != 0) require_matrix("C", p.c, touched);
    require_matrix("D", p.d, touched);
    if (has_aux(p.epilogue)) require_matrix("the auxiliary matrix", aux_of(p), touched);
    auto require = [&](const char* what, const void* address, size_t bytes) {
        require_device(call, what, address, bytes);
        touched.push_back({address, bytes});
    };
    if (reads_bias(p.epilogue) || writes_bias(p.epilogue)) require("the bias", p.bias, bytes_of_bias(p));
    if (p.a_scale) require("the scale of A", p.a_scale, sizeof(float));
    if (p.b_scale) require("the scale of B", p.b_scale, sizeof(float));
    if (p.workspace) require("the workspace", p.workspace, p.splits * p.m * p.n * sizeof(float));
    if (overlap(p.d, p.a) || overlap(p.d, p.b)) fault(call, "D overlaps A or B");
    return touched;
}

}  // namespace

Operation product_operation(const HostProduct& product, double share) {
    constexpr double launch_seconds = 4e-6, share_of_fp32 = 0.05;
    double of_type = is_fp8(product.a.type) ? 2 : product.a.type == CUDA_R_32F ? share_of_fp32 : 1;
    double rate = card().bf16_flops * share * of_type;
    Operation operation;
    operation.call = call;
    operation.touched = check_memory(product);
    operation.seconds =
        launch_seconds + 2.0 * (double)product.m * (double)product.n * (double)product.k / rate;
    operation.begin = [product] { return advance_of(product); };
    return operation;
}

}  // namespace nocard
