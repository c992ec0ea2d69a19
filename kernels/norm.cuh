/*
LayerNorm and RMSNorm of the rows of inp (N, C), and both fused with the residual addition before them.

    layernorm:  out = (inp - mean) * rstd * weight + bias
                mean = average of the row, rstd = 1 / sqrt(variance + eps)
    rmsnorm:    out = inp * rstd * weight
                rstd = 1 / sqrt(average of the squares + eps)

Ba, Kiros and Hinton, "Layer Normalization" (2016); Zhang and Sennrich, "Root Mean Square Layer Normalization"
(2019). RMSNorm is LayerNorm with the mean taken as 0, and one set of functions computes both.

Saved for the backward pass: inp, rstd (N), and for layernorm mean (N). With xhat = (inp - mean) * rstd and
dxhat = dout * weight, the backward pass is

    dinp    += rstd * (dxhat - average(dxhat) - xhat * average(dxhat * xhat))
    dweight += sum over rows of dout * xhat
    dbias   += sum over rows of dout

where rmsnorm omits average(dxhat) and dbias. dinp accumulates because it is the gradient of the residual
stream, to which the skip connection also contributes. dinp is also the gradient of the output of the
preceding layer, which was added to the stream: the sums of its columns are the gradient of that layer's bias.
The backward pass computes them from registers, which saves reading dinp again.

The variance is computed from the centered row, in a second pass: E[x^2] - E[x]^2 would cancel when the mean
is large. On a GPU each row is read from memory once: the forward pass keeps it in shared memory, the backward
pass in registers, or in the first-level cache if it is too long for them. The sums over rows are computed in
two stages, partial sums of fixed sets of rows and then their sum, so they do not depend on the number of
threads or multiprocessors.
*/
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/column_sums.cuh"
#include "kernels/common.cuh"
#include "kernels/amax.cuh"

enum class Norm { layernorm, rmsnorm };

HOST_DEVICE inline bool subtracts_mean(Norm norm) {
    switch (norm) {
    case Norm::layernorm:
        return true;
    case Norm::rmsnorm:
        return false;
    }
    __builtin_unreachable();
}

// The number of blocks that an H100 runs at once: each of its 132 multiprocessors has registers for two, so
// that one loads while the other adds up, or for only one if rows are long.
inline int norm_blocks_of_turn(int C) {
    return C <= 4096 ? 264 : 132;
}

// The maximum number of blocks, each of which computes the partial sum of a set of rows. Other cards run 216
// to 340 blocks at once, and all cards run fewer while communication kernels run, so exactly one wave of
// blocks on one card would be two waves on another, the second nearly empty. The maximum allows several
// waves, so that the last one matters little. If rows are long, the partial sums dominate: their total size
// is limited to 32 MiB, but there is at least one wave.
inline int norm_partials(int C) {
    constexpr size_t most = 1056, bytes = (size_t)32 << 20;
    return (int)std::clamp(bytes / (3 * sizeof(float) * C), (size_t)norm_blocks_of_turn(C), most);
}

constexpr int norm_threads = 1024;  // maximum per block

// How the backward pass distributes N rows of `vectors` vectors to `count` blocks, each with a partial sum. A
// block handles `rows` rows at a time, with `threads` threads each. Adding up partial sums of fewer than
// eight rows would take as long as summing the rows, so if there are few rows, they are distributed to only
// one wave of an H100's blocks.
struct NormBackwardBlocks {
    int threads, rows, count;

    NormBackwardBlocks(int N, int C, int vectors)
        : threads(row_threads(vectors, norm_threads)),
          rows(std::max(norm_threads / 2 / threads, 1)),
          count(even_share(ceil_div(N, rows), std::clamp(N / 8, norm_blocks_of_turn(C), norm_partials(C)))) {}
};

// Returns the floats of scratch that norm_backward needs for any N.
inline size_t norm_backward_scratch(int C) {
    return (size_t)norm_partials(C) * 3 * C;
}

// ----------------------------------------------------------------------------
// CPU

inline float row_mean_cpu(const floatX* x, int C) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int c = 0; c < C; c++) sum += float(x[c]);
    return sum / C;
}

inline float row_variance_cpu(const floatX* x, float mean, int C) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int c = 0; c < C; c++) sum += (float(x[c]) - mean) * (float(x[c]) - mean);
    return sum / C;
}

// Without inp2 this is the norm of inp1, and residual is not used.
inline void norm_forward_cpu(Norm norm, floatX* residual, floatX* out, float* mean, float* rstd,
                             const floatX* inp1, const floatX* inp2, const floatX* weight, const floatX* bias,
                             int N, int C, float eps) {
#pragma omp parallel for
    for (int row = 0; row < N; row++) {
        size_t start = (size_t)row * C;
        const floatX* x = inp1 + start;
        if (inp2) {
            const floatX* y = inp2 + start;
            floatX* sum = residual + start;
#pragma omp simd
            for (int c = 0; c < C; c++) sum[c] = floatX(float(x[c]) + float(y[c]));
            x = sum;
        }
        float m = subtracts_mean(norm) ? row_mean_cpu(x, C) : 0.0f;
        float r = 1.0f / sqrtf(row_variance_cpu(x, m, C) + eps);
        if (subtracts_mean(norm)) mean[row] = m;
        rstd[row] = r;
        floatX* o = out + start;
#pragma omp simd
        for (int c = 0; c < C; c++) {
            o[c] = floatX((float(x[c]) - m) * r * float(weight[c]) + (bias ? float(bias[c]) : 0.0f));
        }
    }
}

// The number of rows per partial sum on the CPU: at least 16, so that adding up the partial sums is cheap,
// and enough that there are at most 128.
inline int rows_per_partial_cpu(int N) {
    return std::max(16, ceil_div(N, 128));
}

inline void norm_backward_cpu(Norm norm, floatX* dinp, float* dweight, float* dbias, float* scratch,
                              const floatX* dout, const floatX* inp, const floatX* weight, const float* mean,
                              const float* rstd, int N, int C, float* dinp_column_sums) {
    int rows = rows_per_partial_cpu(N), count = ceil_div(N, rows), planes = dinp_column_sums ? 3 : 2;
#pragma omp parallel for
    for (int k = 0; k < count; k++) {
        float* dw = scratch + (size_t)k * planes * C;
        float *db = dw + C, *dx_sums = db + C;
        std::fill_n(dw, planes * C, 0.0f);
        for (int row = k * rows; row < std::min(N, (k + 1) * rows); row++) {
            const floatX *dy = dout + (size_t)row * C, *x = inp + (size_t)row * C;
            floatX* dx = dinp + (size_t)row * C;
            float m = subtracts_mean(norm) ? mean[row] : 0.0f, r = rstd[row];

            float sum = 0, sum_xhat = 0;
#pragma omp simd reduction(+ : sum, sum_xhat)
            for (int c = 0; c < C; c++) {
                float dxhat = float(dy[c]) * float(weight[c]);
                sum += dxhat;
                sum_xhat += dxhat * ((float(x[c]) - m) * r);
            }
            float average = subtracts_mean(norm) ? sum / C : 0.0f, average_xhat = sum_xhat / C;
#pragma omp simd
            for (int c = 0; c < C; c++) {
                float xhat = (float(x[c]) - m) * r, dxhat = float(dy[c]) * float(weight[c]);
                dw[c] += float(dy[c]) * xhat;
                db[c] += float(dy[c]);
                dx[c] = floatX(float(dx[c]) + r * (dxhat - average - xhat * average_xhat));
            }
            if (!dinp_column_sums) continue;
#pragma omp simd
            for (int c = 0; c < C; c++) dx_sums[c] += float(dx[c]);
        }
    }
    add_partials_cpu(dweight, dbias, scratch, count, C, planes, dinp_column_sums);
}

// ----------------------------------------------------------------------------
// CUDA kernels
#ifndef DEVICE_CPU

// Returns the sum over the blockDim.x threads of a row, which are a warp or else all threads of the block.
__device__ inline float row_sum(float value) {
    return blockDim.x == warp_size ? warp_sum(value) : block_sum(value);
}

// The threads of a row (blockDim.x) handle the same columns in every pass, so each finds in shared memory
// what it left there itself.
template <int W>
__global__ void norm_forward_kernel(Norm norm, floatX* residual, floatX* out, float* mean, float* rstd,
                                    const floatX* inp1, const floatX* inp2, const floatX* weight,
                                    const floatX* bias, float* amax, int N, int C, float eps) {
    int row = blockIdx.x * blockDim.y + threadIdx.y, first = threadIdx.x * W, step = blockDim.x * W;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    floatX* x = dynamic_shared<floatX>() + threadIdx.y * C;  // (C)
    float sum = 0;
    for (int c = first; c < C; c += step) {
        Vec<floatX, W> xc = load<W>(inp1 + start + c);
        if (inp2) {
            Vec<floatX, W> y = load<W>(inp2 + start + c);
            for (int i = 0; i < W; i++) xc[i] = floatX(float(xc[i]) + float(y[i]));
            store(residual + start + c, xc);
        }
        for (int i = 0; i < W; i++) sum += float(xc[i]);
        store_shared(x + c, xc);
    }
    float m = subtracts_mean(norm) ? row_sum(sum) / C : 0.0f;
    float squares = 0;
    for (int c = first; c < C; c += step) {
        Vec<floatX, W> xc = load<W>(x + c);
        for (int i = 0; i < W; i++) squares += (float(xc[i]) - m) * (float(xc[i]) - m);
    }
    float r = 1.0f / sqrtf(row_sum(squares) / C + eps);
    if (threadIdx.x == 0) {
        if (subtracts_mean(norm)) mean[row] = m;
        rstd[row] = r;
    }
    Amax element;
    for (int c = first; c < C; c += step) {
        Vec<floatX, W> y = load<W>(x + c), w = load<W>(weight + c), b = {};
        if (bias) b = load<W>(bias + c);
        for (int i = 0; i < W; i++) y[i] = floatX((float(y[i]) - m) * r * float(w[i]) + float(b[i]));
        element.see(y);
        store(out + start + c, y);
    }
    element.keep(amax);
}

// Returns two sums over the blockDim.x threads of a row. All threads of the block take part, and `turn`
// alternates between 0 and 1, so that one barrier per call is enough.
struct TwoSums {
    float first, second;
};
__device__ inline TwoSums row_sums(TwoSums sums, int turn) {
    __shared__ TwoSums per_warp[2][warp_size];
    int warps = blockDim.x / warp_size, warp = threadIdx.y * warps + threadIdx.x / warp_size;
    sums = {warp_sum(sums.first), warp_sum(sums.second)};
    if (threadIdx.x % warp_size == 0) per_warp[turn][warp] = sums;
    __syncthreads();
    sums = {0, 0};
    for (int w = 0; w < warps; w++) {
        TwoSums other = per_warp[turn][threadIdx.y * warps + w];
        sums.first += other.first;
        sums.second += other.second;
    }
    return sums;
}

constexpr int norm_sums_gap = 4;  // padding after each group, in threads, see vector_plane

// A block processes blockDim.y rows at a time and writes one partial sum (planes, C) of all its rows. A
// thread owns the same columns of all its rows. If these are one vector (`once`), they and their sums stay in
// registers. Longer rows, which a block processes one at a time, are read a second time for the gradient,
// from the first-level cache, and their sums are in shared memory, laid out by vector_plane.
//
// dinp_column_sums: the kernel also sums the columns of dinp. No registers are left for these sums, so they
// are in shared memory after the others, in groups of four elements for each thread. If rows are too long for
// that, they are in the memory to which the block writes its partial sum at the end.
template <int W, bool once, bool dinp_column_sums>
__global__ void __launch_bounds__(norm_threads)
    norm_backward_kernel(Norm norm, floatX* dinp, float* partials, float* amax, const floatX* dout,
                         const floatX* inp, const floatX* weight, const float* mean, const float* rstd, int N,
                         int C) {
    constexpr int planes = dinp_column_sums ? 3 : 2, part = W < 4 ? W : 4, gap = norm_sums_gap;
    // Registers are scarce, so the addresses of sums are recomputed where they are used.
    float* sums = dynamic_shared<float>();  // (blockDim.y, 2, W, plane)
    auto plane_of = [&] { return vector_plane<W>(pinned(C) / W); };
    auto own_of = [&](int plane) { return sums + pinned(threadIdx.y) * 2 * W * plane; };
    float* thread_sums =
        sums + blockDim.y * 2 * W * vector_plane<W>(C / W);  // (W / part, blockDim.y, blockDim.x, part)
    partials += (size_t)blockIdx.x * planes * C;
    int first = threadIdx.x * W, step = blockDim.x * W, turn = 0;
    Vec<floatX, W> dyc, xc, w, dxc;
    float dweight[W] = {}, dbias[W] = {};
    Amax element;

    auto each_vector = [&](int columns, auto&& f) {
        for (int c = first; c < columns; c += step) {
            f(c);
            if (once) break;
        }
    };
    auto keep_sums = [&](int c) {
        int plane = plane_of();
        float* own = own_of(plane);
        for (int i = 0; i < W; i++) {
            own[i * plane + c / W] = dweight[i];
            own[(W + i) * plane + c / W] = dbias[i];
        }
    };
    // Adds to the sums of dinp, or with `begin` zeroes them. The thread's index is recomputed each time, to
    // save a register.
    auto sum_dinp = [&](int c, bool begin) {
        for (int i = 0; i < W; i += part) {
            int thread = pinned(threadIdx.y) * blockDim.x + threadIdx.x, all = blockDim.y * blockDim.x;
            float* at = once ? thread_sums + i * (all + gap) + thread * part : partials + 2 * C + c + i;
            Vec<float, part> sum = {};
            if (!begin) sum = load<part>(at);
            for (int k = 0; k < part && !begin; k++) sum[k] += float(dxc[i + k]);
            once ? store_shared(at, sum) : store(at, sum);
        }
    };
    if (once && first < C) w = load<W>(weight + first);
    if (!once) each_vector(C, keep_sums);
    if (dinp_column_sums) each_vector(C, [&](int c) { sum_dinp(c, true); });

    for (int begin = blockIdx.x * blockDim.y; begin < N; begin += gridDim.x * blockDim.y, turn ^= 1) {
        int row = begin + threadIdx.y, columns = row < N ? C : 0;
        const floatX *dy = dout + (size_t)row * C, *x = inp + (size_t)row * C;
        floatX* dx = dinp + (size_t)row * C;
        float m = 0, r = 0;
        if (row < N) m = subtracts_mean(norm) ? mean[row] : 0.0f, r = rstd[row];

        TwoSums sum = {0, 0};
        each_vector(columns, [&](int c) {
            dyc = load<W>(dy + c), xc = load<W>(x + c);
            if (once)
                dxc = load<W>(dx + c);
            else
                w = load<W>(weight + c), prefetch_to_l2(dx + c);
            for (int i = 0; i < W; i++) {
                float dxhat = float(dyc[i]) * float(w[i]);
                sum.first += dxhat;
                sum.second += dxhat * ((float(xc[i]) - m) * r);
            }
        });
        sum = row_sums(sum, turn);
        float average = subtracts_mean(norm) ? sum.first / C : 0.0f, average_xhat = sum.second / C;
        each_vector(columns, [&](int c) {
            if (!once) {
                dyc = load<W>(dy + c), xc = load<W>(x + c), w = load<W>(weight + c), dxc = load<W>(dx + c);
                int plane = plane_of();
                const float* own = own_of(plane);
                for (int i = 0; i < W; i++) {
                    dweight[i] = own[i * plane + c / W];
                    dbias[i] = own[(W + i) * plane + c / W];
                }
            }
            for (int i = 0; i < W; i++) {
                float xhat = (float(xc[i]) - m) * r, dxhat = float(dyc[i]) * float(w[i]);
                dweight[i] += float(dyc[i]) * xhat;
                dbias[i] += float(dyc[i]);
                dxc[i] = floatX(float(dxc[i]) + r * (dxhat - average - xhat * average_xhat));
            }
            store(dx + c, dxc);
            element.see(dxc);
            if (!once) keep_sums(c);
            if (once && dinp_column_sums) sum_dinp(c, false);
        });
        if (once || !dinp_column_sums) continue;
        each_vector(columns, [&](int c) {
            dxc = load<W>(dx + c);
            sum_dinp(c, false);
        });
    }
    element.keep(amax);
    if (once) each_vector(C, keep_sums);
    __syncthreads();
    const int plane = plane_of();
    for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < C; c += blockDim.x * blockDim.y) {
        const float* at = sums + c % W * plane + c / W;
        float sum_weight = 0, sum_bias = 0;
        for (int y = 0; y < (int)blockDim.y; y++, at += 2 * W * plane)
            sum_weight += at[0], sum_bias += at[W * plane];
        partials[c] = sum_weight;
        partials[C + c] = sum_bias;
        if (!once || !dinp_column_sums) continue;
        int all = blockDim.y * blockDim.x;
        float sum_dinp = 0;
        for (int y = 0; y < (int)blockDim.y; y++)
            sum_dinp +=
                thread_sums[c % W / part * part * (all + gap) + (y * blockDim.x + c / W) * part + c % part];
        partials[2 * C + c] = sum_dinp;
    }
}

#endif

// ----------------------------------------------------------------------------
// launchers

// Computes residual = inp1 + inp2, rounded to floatX, and out = norm(residual). Bit-identical to an addition
// followed by norm_forward, so that either can replace the other when activations are recomputed.
inline void residual_norm_forward(Norm norm,
                                  floatX* residual,      // (N, C), may be inp1
                                  floatX* out,           // (N, C), may be inp1 or inp2
                                  float* mean,           // (N), null for rmsnorm
                                  float* rstd,           // (N)
                                  const floatX* inp1,    // (N, C)
                                  const floatX* inp2,    // (N, C)
                                  const floatX* weight,  // (C)
                                  const floatX* bias,    // (C), may be null
                                  int N, int C, float eps, cudaStream_t stream,
                                  float* amax = nullptr) {  // (1) of out
    auto cost = [&]() -> LaunchCost {
        double streams = array_bytes(inp1, N, C) + array_bytes(inp2, N, C);
        return {.read = streams + array_bytes(weight, C) + array_bytes(bias, C),
                .written = streams + array_bytes(mean, N) + array_bytes(rstd, N)};
    };
    ON_DEVICE(stream, cost(),
              (norm_forward_cpu(norm, residual, out, mean, rstd, inp1, inp2, weight, bias, N, C, eps),
               keep_amax_cpu(amax, out, (size_t)N * C)),
              {
                  begin_amax(amax, stream);
                  with_vec_width<floatX>(C, [&](auto width) {
                      int threads = row_threads(ceil_div(C / width(), 4), norm_threads);
                      int rows = threads == warp_size ? 4 : 1;
                      launch(norm_forward_kernel<width()>, ceil_div(N, rows), dim3(threads, rows),
                             (size_t)rows * C * sizeof(floatX), stream, norm, residual, out, mean, rstd, inp1,
                             inp2, weight, bias, amax, N, C, eps);
                  });
              });
}

inline void norm_forward(Norm norm,
                         floatX* out,           // (N, C)
                         float* mean,           // (N), null for rmsnorm
                         float* rstd,           // (N)
                         const floatX* inp,     // (N, C)
                         const floatX* weight,  // (C)
                         const floatX* bias,    // (C), may be null
                         int N, int C, float eps, cudaStream_t stream,
                         float* amax = nullptr) {  // (1) of out
    residual_norm_forward(norm, nullptr, out, mean, rstd, inp, nullptr, weight, bias, N, C, eps, stream,
                          amax);
}

inline void norm_backward(Norm norm,
                          floatX* dinp,          // (N, C), accumulates
                          float* dweight,        // (C), accumulates
                          float* dbias,          // (C), accumulates, may be null
                          float* scratch,        // (norm_backward_scratch(C))
                          const floatX* dout,    // (N, C)
                          const floatX* inp,     // (N, C)
                          const floatX* weight,  // (C)
                          const float* mean,     // (N), null for rmsnorm
                          const float* rstd,     // (N)
                          int N, int C, cudaStream_t stream,
                          float* amax = nullptr,                // (1) of dinp
                          float* dinp_column_sums = nullptr) {  // (C) receives the column sums of dinp
    auto cost = [&]() -> LaunchCost {
        int vectors = C % (16 / (int)element_bytes()) ? C : C * (int)element_bytes() / 16;
        double partial = array_bytes(scratch, NormBackwardBlocks(N, C, vectors).count, C),
               stream = array_bytes(inp, N, C), gradients = array_bytes(dweight, C) + array_bytes(dbias, C),
               sums = array_bytes(dinp_column_sums, C);
        return {.read = 3 * stream + array_bytes(weight, C) + array_bytes(mean, N) + array_bytes(rstd, N) +
                        (1 + (dbias ? 1 : 0) + (sums > 0)) * partial + gradients,
                .written = stream + (2 + (sums > 0)) * partial + gradients + sums,
                .launches = 2};
    };
    ON_DEVICE(
        stream, cost(),
        (norm_backward_cpu(norm, dinp, dweight, dbias, scratch, dout, inp, weight, mean, rstd, N, C,
                           dinp_column_sums),
         keep_amax_cpu(amax, dinp, (size_t)N * C)),
        {
            begin_amax(amax, stream);
            with_vec_width<floatX>(C, [&](auto width) {
                int vectors = C / width(), planes = dinp_column_sums ? 3 : 2;
                bool once = vectors <= norm_threads;
                NormBackwardBlocks blocks(N, C, vectors);
                size_t floats = (size_t)blocks.rows * 2 * width() * vector_plane<width()>(vectors);
                if (once && dinp_column_sums)
                    floats += ((size_t)blocks.rows * blocks.threads + norm_sums_gap) * width();
                auto start = [&](auto* kernel) {
                    launch(kernel, blocks.count, dim3(blocks.threads, blocks.rows), floats * sizeof(float),
                           stream, norm, dinp, scratch, amax, dout, inp, weight, mean, rstd, N, C);
                };
                if (dinp_column_sums)
                    start(once ? norm_backward_kernel<width(), true, true>
                               : norm_backward_kernel<width(), false, true>);
                else
                    start(once ? norm_backward_kernel<width(), true, false>
                               : norm_backward_kernel<width(), false, false>);
                add_partials(dweight, dbias, scratch, blocks.count, C, stream, planes, dinp_column_sums);
            });
        });
}
