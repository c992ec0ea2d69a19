/*
A table in which a step reads and changes only a few rows: these are fetched by their index, and updated by
row-wise AdaGrad (Duchi et al., "Adaptive subgradient methods", 2011; one sum per row, as in Naumov et al.,
"Deep learning recommendation model", 2019). With g = scale * grad:

    squares[r] += average over w of g[w]^2
    row[r, w]  -= learning_rate * g[w] / (sqrt(squares[r]) + eps)

If a row has had no gradient yet, its `squares` is 0 and its stored values are ignored: its values are
computed from the key, uniform between -deviation and deviation. So a table that is all zeros is a new one,
and uses no memory if the system allocates pages on the first write. Rows are stored in fp32 or in bf16,
whatever the build. In bf16, updated rows are rounded up or down at random, because most steps of AdaGrad are
less than half a unit in the last place.

The table may be on the device or on the host: the results are bit-identical, because the host adds up a row
in the same order as a warp does.
*/
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernels/bf16_bits.h"  // rounded_at_random, float_to_bf16
#include "kernels/common.cuh"
#include "kernels/random.cuh"

// An array whose format is chosen at run time.
struct NumberArray {
    void* data;
    bool in_bf16;  // otherwise fp32

    NumberArray(floatX* data) : NumberArray(data, sizeof(floatX) < sizeof(float)) {}
    NumberArray(void* data, bool in_bf16) : data(data), in_bf16(in_bf16) {}

    HOST_DEVICE size_t number_bytes() const { return in_bf16 ? sizeof(uint16_t) : sizeof(float); }
    // Copies row `from` of an array (rows, W) in the same format to row `to` of this one.
    void copy_row(size_t to, const NumberArray& there, size_t from, int W) const {
        size_t bytes = W * number_bytes();
        memcpy((char*)data + to * bytes, (const char*)there.data + from * bytes, bytes);
    }
    HOST_DEVICE bool is_floatX() const { return number_bytes() == sizeof(floatX); }
    HOST_DEVICE float get(size_t i) const {
        return in_bf16 ? bf16_to_float(((const uint16_t*)data)[i]) : ((const float*)data)[i];
    }
    HOST_DEVICE void set(size_t i, float value) const {
        if (in_bf16)
            ((uint16_t*)data)[i] = float_to_bf16(value);
        else
            ((float*)data)[i] = value;
    }
};

struct TableRows {
    NumberArray values;  // (rows, W)
    float* squares;      // (rows)
    int W;
    uint64_t key;                    // for random numbers: initial values, and rounding in steps from 1 on
    float deviation;                 // initial values are uniform between minus and plus this
    uint64_t first = 0, stride = 1;  // row r is row first + r * stride of the whole table
    // If the arrays hold only some rows of the table: 1 + the row at each place in the arrays; functions are
    // passed places instead of rows. Null: row r is at place r.
    const uint64_t* rows = nullptr;

    // Bytes of `count` rows, with their sums of squares.
    double bytes(int count) const { return (double)count * (W * values.number_bytes() + sizeof(float)); }
    // Returns the random bits for element w of a row in a step; step 0: for its initial value.
    HOST_DEVICE uint32_t random(uint64_t row, int w, int step) const {
        uint64_t element = (first + (rows ? rows[row] - 1 : row) * stride) * W + w;
        Random4 four = philox(key, element / 4, step);  // registers cannot be indexed, hence the ?:
        uint32_t even = element & 2 ? four.at[2] : four.at[0], odd = element & 2 ? four.at[3] : four.at[1];
        return element & 1 ? odd : even;
    }
    HOST_DEVICE float value(uint64_t row, int w, bool is_new) const {
        if (!is_new) return values.get(row * W + w);
        float initial = deviation * (2 * random_uniform(random(row, w, 0)) - 1);
        return values.in_bf16 ? bf16_to_float(float_to_bf16(initial)) : initial;
    }
};

struct AdaGrad {
    float learning_rate, eps;
    int step;  // counts from 1
};

// The step of a row.
struct RowStep {
    float squares;  // the new value
    float size;     // factor of g; 0: nothing changes

    // sum: g^2 summed over the row
    HOST_DEVICE RowStep(float before, float sum, int W, const AdaGrad& a)
        : squares(before + sum / W), size(0) {
        if (sum > 0 && squares > 0) size = a.learning_rate / (sqrtf(squares) + a.eps);
    }
    HOST_DEVICE static void apply(const TableRows& table, uint64_t row, int w, bool is_new, float g,
                                  float size, int step) {
        float value = fmaf(-size, g, table.value(row, w, is_new));
        bool finite = fabsf(value) <= FLT_MAX;
        if (table.values.in_bf16 && finite) value = rounded_at_random(value, table.random(row, w, step));
        table.values.set(row * table.W + w, value);
    }
};

// ----------------------------------------------------------------------------
// CPU

inline void fetch_rows_cpu(NumberArray out, const TableRows& table, const uint64_t* rows, int count) {
#pragma omp parallel for
    for (int i = 0; i < count; i++) {
        bool is_new = table.squares[rows[i]] == 0;
        if (!is_new && out.in_bf16 == table.values.in_bf16)
            out.copy_row(i, table.values, rows[i], table.W);
        else
            for (int w = 0; w < table.W; w++)
                out.set((size_t)i * table.W + w, table.value(rows[i], w, is_new));
    }
}

inline void put_rows_cpu(const TableRows& table, const uint64_t* rows, NumberArray values,
                         const float* squares, int count) {
    for (int i = 0; i < count; i++) {
        table.values.copy_row(rows[i], values, i, table.W);
        table.squares[rows[i]] = squares[i];
    }
}

// chosen (count): indices of the rows to step; null: the first ones.
inline void step_rows_cpu(const TableRows& table, const uint64_t* rows, const float* grads, int count,
                          const float* scale, const AdaGrad& a, const int* chosen = nullptr) {
    constexpr int lanes = 32;
    if (std::isnan(*scale)) return;
#pragma omp parallel for
    for (int turn = 0; turn < count; turn++) {
        size_t i = (size_t)(chosen ? chosen[turn] : turn);
        const float* grad = grads + i * table.W;
        float sums[lanes] = {};
        for (int w = 0; w < table.W; w++) {
            float g = grad[w] * *scale;
            sums[w % lanes] = fmaf(g, g, sums[w % lanes]);
        }
        for (int half = lanes / 2; half > 0; half /= 2)
            for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
        float& squares = table.squares[rows[i]];
        RowStep step(squares, sums[0], table.W, a);
        if (step.size == 0) continue;
        for (int w = 0; w < table.W; w++)
            RowStep::apply(table, rows[i], w, squares == 0, grad[w] * *scale, step.size, a.step);
        squares = step.squares;
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr int table_block = 256;

// Returns the shape of a block: x threads along a row, y rows.
inline dim3 threads_of_rows(int vectors) {
    int threads = std::min(vectors, table_block);
    return dim3(threads, table_block / threads);
}

// A thread handles W neighbors in a row at a time.
template <int W>
__global__ void fetch_rows_kernel(NumberArray out, TableRows table, const uint64_t* rows, int count) {
    int i = (int)(blockIdx.x * blockDim.y + threadIdx.y);
    if (i >= count) return;
    uint64_t row = rows[i];
    bool is_new = table.squares[row] == 0, same_format = out.is_floatX() && table.values.is_floatX();
    for (int w = threadIdx.x * W; w < table.W; w += blockDim.x * W) {
        size_t to = (size_t)i * table.W + w;
        if (!is_new && same_format)
            store((floatX*)out.data + to, load<W>((const floatX*)table.values.data + row * table.W + w));
        else
            for (int k = 0; k < W; k++) out.set(to + k, table.value(row, w + k, is_new));
    }
}

__global__ void put_rows_kernel(TableRows table, const uint64_t* rows, NumberArray values,
                                const float* squares, int count) {
    int i = (int)(blockIdx.x * blockDim.y + threadIdx.y);
    if (i >= count) return;
    for (int w = threadIdx.x; w < table.W; w += blockDim.x)
        table.values.set(rows[i] * table.W + w, values.get((size_t)i * table.W + w));
    if (threadIdx.x == 0) table.squares[rows[i]] = squares[i];
}

// One warp per row; no two rows are the same.
__global__ void step_rows_kernel(TableRows table, const uint64_t* rows, const float* grads, int count,
                                 const float* scale_at, AdaGrad a) {
    int i = (int)(blockIdx.x * (blockDim.x / warp_size) + threadIdx.x / warp_size),
        lane = threadIdx.x % warp_size;
    float scale = *scale_at;
    if (i >= count || scale != scale) return;
    const float* grad = grads + (size_t)i * table.W;
    uint64_t row = rows[i];
    float before = table.squares[row], sum = 0;
    for (int w = lane; w < table.W; w += warp_size) {
        float g = grad[w] * scale;
        sum = fmaf(g, g, sum);
    }
    RowStep step(before, warp_sum(sum), table.W, a);
    if (step.size == 0) return;
    for (int w = lane; w < table.W; w += warp_size)
        RowStep::apply(table, row, w, before == 0, grad[w] * scale, step.size, a.step);
    __syncwarp();
    if (lane == 0) table.squares[row] = step.squares;
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline void fetch_rows(NumberArray out,                               // (count, W)
                       const TableRows& table, const uint64_t* rows,  // (count) row indices
                       int count, cudaStream_t stream) {
    auto cost = [&]() -> LaunchCost {
        return {.read = table.bytes(count) + array_bytes(rows, count),
                .written = array_bytes((floatX*)out.data, count, table.W),
                .place = holder_of(table.squares)};
    };
    if (count == 0) return;
    ON_DEVICE(stream, cost(), fetch_rows_cpu(out, table, rows, count),
              with_vec_width<floatX>(table.W, [=](auto width) {
                  dim3 block = threads_of_rows(table.W / width());
                  launch(fetch_rows_kernel<width()>, ceil_div(count, (int)block.y), block, 0, stream, out,
                         table, rows, count);
              }));
}

// Changes nothing if the scale (1) is NaN.
inline void step_rows(const TableRows& table, const uint64_t* rows,  // (count) distinct indices
                      const float* grads,                            // (count, W)
                      int count, const float* scale, const AdaGrad& adagrad, cudaStream_t stream) {
    auto cost = [&]() -> LaunchCost {
        return {.read = array_bytes(grads, count, 2, table.W) + table.bytes(count) + array_bytes(rows, count),
                .written = table.bytes(count),
                .place = holder_of(table.squares)};
    };
    if (count == 0) return;
    ON_DEVICE(stream, cost(), step_rows_cpu(table, rows, grads, count, scale, adagrad),
              launch(step_rows_kernel, (unsigned)ceil_div(count, table_block / warp_size), table_block, 0,
                     stream, table, rows, grads, count, scale, adagrad));
}

// Sets rows, and their sums of squares, to these values.
inline void put_rows(const TableRows& table, const uint64_t* rows,  // (count)
                     NumberArray values,                            // (count, W), in the table's format
                     const float* squares,                          // (count)
                     int count, cudaStream_t stream) {
    auto cost = [&]() -> LaunchCost {
        return {.read = table.bytes(count) + array_bytes(rows, count), .written = table.bytes(count)};
    };
    if (count == 0) return;
    ON_DEVICE(stream, cost(), put_rows_cpu(table, rows, values, squares, count),
              dim3 block = threads_of_rows(table.W);
              launch(put_rows_kernel, ceil_div(count, (int)block.y), block, 0, stream, table, rows, values,
                     squares, count));
}
