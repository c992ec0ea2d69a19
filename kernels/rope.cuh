/*
Rotary position embedding: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).

In each query and key head, elements i and i + R/2 of the first R are a pair (the "rotate half" convention of
Hugging Face models; the paper pairs 2i and 2i + 1). At position p they are rotated by p * theta^(-2i/R):

    out[i]       = inp[i] * cos - inp[i + R/2] * sin
    out[i + R/2] = inp[i] * sin + inp[i + R/2] * cos

A row of qkv is [NH query heads | NKV key heads | NKV value heads], each HS wide; value heads, and elements
from R on, are not changed. The opposite rotation undoes a rotation, so it runs in place, saves nothing, and
its backward pass is the same function with the angles negated. The angles are read from a table, because
large ones need double precision; row n uses those of positions[n].
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/common.cuh"
#include "kernels/amax.cuh"

// The frequency scaling of Llama 3.1, with which a model trained on original_context tokens reads longer
// texts ("llama3" in Hugging Face configs): waves longer than original_context / low_frequency are slowed
// down by `factor`, those shorter than original_context / high_frequency are kept, and those between are
// interpolated. Factor 1: no scaling. An original context of 1, which is shorter than all waves, gives linear
// scaling.
struct RopeScaling {
    float factor = 1, low_frequency = 1, high_frequency = 4;
    int original_context = 8192;
};

// Returns the angle per position of pair i, in radians.
inline double rope_frequency(int i, int R, double theta, const RopeScaling& scaling) {
    double frequency = std::pow(theta, -2.0 * i / R);
    double waves = scaling.original_context * frequency / 6.283185307179586;  // in the original context
    double kept = (waves - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency);
    kept = std::clamp(kept, 0.0, 1.0);
    return frequency * (kept + (1 - kept) / scaling.factor);
}

// Computes cosine and sine of every angle, in double precision.
inline void rope_table(float* table,  // host (T, R/2, 2)
                       int T, int R, float theta, RopeScaling scaling) {
#pragma omp parallel for
    for (int i = 0; i < R / 2; i++) {
        double frequency = rope_frequency(i, R, theta, scaling);
        for (int t = 0; t < T; t++) {
            float* entry = table + ((size_t)t * (R / 2) + i) * 2;
            entry[0] = (float)std::cos(t * frequency);
            entry[1] = (float)std::sin(t * frequency);
        }
    }
}

// Rows of qkv.
struct QkvRows {
    int N, NH, NKV, HS;

    HOST_DEVICE int heads() const { return NH + 2 * NKV; }
    HOST_DEVICE int qk_heads() const { return NH + NKV; }
    HOST_DEVICE size_t offset(size_t row, int h) const { return (row * heads() + h) * HS; }
};

// The angles by which heads are rotated. R = 0: no rotation.
struct Rotation {
    const float* table = nullptr;    // (T, R/2, 2) from rope_table
    const int* positions = nullptr;  // (N) below T
    int R = 0;

    HOST_DEVICE const float* angles(size_t row) const { return table + (size_t)positions[row] * R; }
};

// ----------------------------------------------------------------------------
// CPU

// direction is 1, or -1 for the opposite rotation.
inline void rope_cpu(floatX* qkv, Rotation rotation, float direction, QkvRows rows) {
    int R = rotation.R;
#pragma omp parallel for
    for (int row = 0; row < rows.N; row++) {
        const float* angles = rotation.angles(row);
        for (int h = 0; h < rows.qk_heads(); h++) {
            floatX* x = qkv + rows.offset(row, h);
            floatX* y = x + R / 2;
#pragma omp simd
            for (int i = 0; i < R / 2; i++) {
                float cosine = angles[2 * i], sine = direction * angles[2 * i + 1];
                float xi = float(x[i]), yi = float(y[i]);
                x[i] = floatX(xi * cosine - yi * sine);
                y[i] = floatX(xi * sine + yi * cosine);
            }
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels
#ifndef DEVICE_CPU

// Returns elements c .. c + W - 1 of a head, rotated, for c below R. element(c) returns those of the original
// head; W divides R / 2. direction: as above.
template <int W, typename F>
__device__ Vec<floatX, W> turned(int c, int R, const float* angles, float direction, F&& element) {
    bool second = c >= R / 2;
    int partner = second ? c - R / 2 : c + R / 2;
    Vec<floatX, W> x = element(c), y = element(partner);
    Vec<float, 2 * W> angle = load<2 * W>(angles + 2 * min(c, partner));
    if (!second) direction = -direction;
    for (int k = 0; k < W; k++) {
        x[k] = floatX(float(x[k]) * angle[2 * k] + float(y[k]) * (direction * angle[2 * k + 1]));
    }
    return x;
}

// One block per row, so that its heads share the angles. A thread rotates W adjacent pairs at a time.
template <int W>
__global__ void rope_kernel(floatX* qkv, float* amax, Rotation rotation, float direction, QkvRows rows) {
    int R = rotation.R;
    Amax element;
    const float* angles = rotation.angles(blockIdx.x);
    floatX* row = qkv + rows.offset(blockIdx.x, 0);
    int vectors = R / 2 / W;  // in half a head
    for (int item = threadIdx.x; item < rows.qk_heads() * vectors; item += blockDim.x) {
        int i = item % vectors * W;
        floatX* x = row + item / vectors * rows.HS + i;
        floatX* y = x + R / 2;
        Vec<floatX, W> xs = load<W>(x), ys = load<W>(y);
        Vec<float, 2 * W> angle = load<2 * W>(angles + 2 * i);
        for (int k = 0; k < W; k++) {
            float cosine = angle[2 * k], sine = direction * angle[2 * k + 1];
            float xk = float(xs[k]), yk = float(ys[k]);
            xs[k] = floatX(xk * cosine - yk * sine);
            ys[k] = floatX(xk * sine + yk * cosine);
        }
        store(x, xs);
        store(y, ys);
        element.see(xs), element.see(ys);
    }
    if (!amax) return;
    for (int i = threadIdx.x * W; i < rows.heads() * rows.HS; i += blockDim.x * W) {
        bool was_turned = i < rows.qk_heads() * rows.HS && i % rows.HS < R;
        if (!was_turned) element.see(load<W>(row + i));
    }
    element.keep(amax);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// Returns the bytes read for N rows: the table of angles, once, and the positions.
inline double rotation_bytes(const Rotation& rotation, int N) {
    return array_bytes(rotation.table, ledger->T, rotation.R) + array_bytes(rotation.positions, N);
}

inline void rope(floatX* qkv, Rotation rotation, float direction, QkvRows rows, cudaStream_t stream,
                 float* amax = nullptr) {
    auto cost = [&]() -> LaunchCost {
        double turned = array_bytes(qkv, rows.N, rows.qk_heads(), rotation.R);
        double read = amax ? array_bytes(qkv, rows.N, rows.heads(), rows.HS) : turned;
        return {.read = read + rotation_bytes(rotation, rows.N), .written = turned};
    };
    ON_DEVICE(stream, cost(),
              (rope_cpu(qkv, rotation, direction, rows), keep_amax_cpu(amax, qkv, rows.offset(rows.N, 0))), {
                  begin_amax(amax, stream);
                  with_vec_width<floatX>(std::gcd(rotation.R / 2, rows.HS), [&](auto width) {
                      int threads = row_threads(rows.qk_heads() * (rotation.R / 2 / width()), 256);
                      launch(rope_kernel<width()>, rows.N, threads, 0, stream, qkv, amax, rotation, direction,
                             rows);
                  });
              });
}

// In place.
inline void rope_forward(floatX* qkv /* (N, (NH + 2 NKV) * HS) */, Rotation rotation, QkvRows rows,
                         cudaStream_t stream) {
    rope(qkv, rotation, 1.0f, rows, stream);
}

// In place: replaces the gradient of the rotated heads by that of the heads before rotation.
inline void rope_backward(floatX* dqkv /* (N, (NH + 2 NKV) * HS) */, Rotation rotation, QkvRows rows,
                          cudaStream_t stream, float* amax = nullptr /* (1) of all dqkv, rotated or not */) {
    rope(dqkv, rotation, -1.0f, rows, stream, amax);
}
