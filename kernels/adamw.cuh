/*
AdamW (Loshchilov & Hutter, "Decoupled weight decay regularization", 2019), as torch.optim.AdamW computes it:

    g = grad * scale
    m = m + (1 - beta1) (g - m)              v = beta2 v + (1 - beta2) g^2
    m_hat = m / (1 - beta1^step)             v_hat = v / (1 - beta2^step)
    w = w (1 - learning_rate weight_decay) - learning_rate m_hat / (sqrt(v_hat) + eps)

Every array is (n), and float but for the parameters, which are floatX. In bf16, w is too coarse to be stepped
in place: most updates are less than half its last digit. So it is either kept in float beside the parameters
(master), or rounded up or down at random so that its mean is exact (stochastic rounding). A NaN scale changes
nothing at all.

A unit of many tensors is stepped in one launch. Its parts may be any parts of tensors, and may lie on the
device or on the host: the result is the same bit for bit. So random numbers are counted from the start of a
tensor, and it is written out which products and sums are rounded once, as fmaf: compilers fuse what they are
left to fuse, each in its own way.
*/
#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <vector>

#include "kernels/block_table.cuh"
#include "kernels/common.cuh"
#include "kernels/optimizer.h"
#include "kernels/ragged.cuh"
#include "kernels/random.cuh"

// Double because 1 - beta is taken in double, as in PyTorch: 1 - 0.999f is off by 1e-5.
struct AdamW {
    double learning_rate, beta1, beta2, eps, weight_decay;
    int step;  // from 1
    bool stochastic_rounding;
};

// The state that AdamW keeps of each element, by the names that checkpoints have.
inline const std::vector<const char*> adamw_slots = {"m", "v"};

// The same settings in the terms of the inner loop.
struct AdamWFactors {
    float decay, beta2, new1, new2, step_size, root_correction, eps;
    int step;
    bool stochastic_rounding;

    explicit AdamWFactors(const AdamW& a)
        : decay((float)(1 - a.learning_rate * a.weight_decay)),
          beta2((float)a.beta2),
          new1((float)(1 - a.beta1)),
          new2((float)(1 - a.beta2)),
          step_size((float)(a.learning_rate / (1 - std::pow(a.beta1, a.step)))),
          root_correction((float)(1 / std::sqrt(1 - std::pow(a.beta2, a.step)))),
          eps((float)a.eps),
          step(a.step),
          stochastic_rounding(a.stochastic_rounding) {}

    HOST_DEVICE AdamWFactors of(const OptimizerPart& part) const {
        AdamWFactors factors = *this;
        if (!part.decays) factors.decay = 1;
        return factors;
    }
};

// Updates m and v, and returns the new w. No sum stands outside of an fmaf, so compilers find nothing to
// fuse.
HOST_DEVICE inline float adamw_element(float w, float& m, float& v, float grad, float scale,
                                       const AdamWFactors& a) {
    float g = grad * scale;
    m = fmaf(a.new1, fmaf(grad, scale, -m), m);
    v = fmaf(a.new2 * g, g, a.beta2 * v);
    float change = a.step_size * m / fmaf(sqrtf(v), a.root_correction, a.eps);
    return fmaf(w, a.decay, -change);
}

// The random numbers of elements i .. i + 3 of a tensor in this step. philox gives all four at once if i
// is a multiple of 4; else they are the end of one four and the beginning of the next. They are moved into
// place by steps of 2 and 1, because a GPU has no registers that can be indexed.
HOST_DEVICE inline Random4 adamw_random(uint64_t key, size_t i, int step) {
    Random4 low = philox(key, i / 4, step);
    if (i % 4 == 0) return low;
    Random4 high = philox(key, i / 4 + 1, step);
    if (i & 2) {
        low = {{low.at[2], low.at[3], high.at[0], high.at[1]}};
        high.at[0] = high.at[2];
    }
    if (i & 1) low = {{low.at[1], low.at[2], low.at[3], high.at[0]}};
    return low;
}

// w as a parameter. Stochastic rounding takes one of the two neighbours in bf16, the nearer one more
// often: the 16 bits that bf16 drops are a fraction, and adding a random fraction carries with just that
// probability.
HOST_DEVICE inline floatX adamw_round(float w, [[maybe_unused]] bool stochastic,
                                      [[maybe_unused]] uint32_t random) {
    if constexpr (std::is_same_v<floatX, float>) {
        return w;
    } else {
        bool finite = fabsf(w) <= FLT_MAX;  // the low bits of NaN are no fraction
        if (!stochastic || !finite) return floatX(w);
        return floatX(std::bit_cast<float>((std::bit_cast<uint32_t>(w) + (random >> 16)) & 0xffff0000u));
    }
}

// ----------------------------------------------------------------------------
// CPU

template <bool has_master, bool stochastic>
void adamw_update_cpu(floatX* params, float* master, float* m, float* v, const float* grads, float scale,
                      size_t first, size_t n, AdamWFactors a, uint64_t key) {
    constexpr size_t piece = 4096;  // of which the random numbers are drawn at once
#pragma omp parallel for if (n > 4 * piece)
    for (size_t start = 0; start < n; start += piece) {
        size_t end = std::min(n, start + piece);
        size_t fours = (first + start) / 4, phase = (first + start) % 4;
        [[maybe_unused]] uint32_t random[stochastic ? piece + 4 : 1];
        if constexpr (stochastic) {
            for (size_t i = 0; i < phase + end - start; i += 4) {
                std::copy_n(philox(key, fours + i / 4, a.step).at, 4, random + i);
            }
        }
#pragma omp simd
        for (size_t i = start; i < end; i++) {
            float w = has_master ? master[i] : float(params[i]);
            w = adamw_element(w, m[i], v[i], grads[i], scale, a);
            if constexpr (has_master) master[i] = w;
            params[i] = adamw_round(w, stochastic, stochastic ? random[phase + i - start] : 0);
        }
    }
}

// As adamw_update, but at once, on this thread and OpenMP's, with memory of the host. It makes no call of
// CUDA, so that cudaLaunchHostFunc can run it.
inline void adamw_update_on_host(floatX* params, float* master, float* m, float* v, const float* grads,
                                 const float* scale, const std::vector<OptimizerPart>& parts,
                                 const AdamW& hyper, uint64_t seed) {
    AdamWFactors all(hyper);
    if (std::isnan(*scale)) return;
    bool stochastic = all.stochastic_rounding && !std::is_same_v<floatX, float>;
    auto run = master ? (stochastic ? adamw_update_cpu<true, true> : adamw_update_cpu<true, false>)
                      : (stochastic ? adamw_update_cpu<false, true> : adamw_update_cpu<false, false>);
    for (const OptimizerPart& part : parts) {
        size_t at = part.at;
        run(params + at, master ? master + at : nullptr, m + at, v + at, grads + at, *scale, part.first,
            part.count, all.of(part), random_key(seed, part.name));
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned adamw_block = 256;  // threads, of W elements each

struct AdamWWork {
    OptimizerPart part;
    uint64_t key;  // of its random numbers
};
using AdamWTable = BlockTable<AdamWWork, 32>;

template <bool has_master, int W>
__global__ void adamw_update_kernel(floatX* params, float* master, float* m, float* v, const float* grads,
                                    const float* scale, AdamWFactors all, RaggedVectors vectors,
                                    const __grid_constant__ AdamWTable table) {
    int number = table.find(blockIdx.x);
    const auto& [part, key] = table.part[number];
    AdamWFactors a = all.of(part);
    size_t thread = (size_t)table.place(blockIdx.x, number) * blockDim.x + threadIdx.x;
    float s = *scale;
    each_ragged_vector<W>(thread, part.count, vectors.from(part.at).skip, [&](auto width, size_t i) {
        size_t at = part.at + i;
        auto ms = load<width>(m + at), vs = load<width>(v + at), gs = load<width>(grads + at);
        auto ps = load<width>(params + at);
        Vec<float, width> ws;
        if constexpr (has_master) ws = load<width>(master + at);
        Random4 random = {};
        if (a.stochastic_rounding && !std::is_same_v<floatX, float>) {
            random = adamw_random(key, part.first + i, a.step);
        }
        if (std::isnan(s)) return;  // seen when the loads are under way
        for (int k = 0; k < width; k++) {
            if constexpr (!has_master) ws[k] = float(ps[k]);
            ws[k] = adamw_element(ws[k], ms[k], vs[k], gs[k], s, a);
            ps[k] = adamw_round(ws[k], a.stochastic_rounding, random.at[k]);
        }
        store(m + at, ms);
        store(v + at, vs);
        store(params + at, ps);
        if constexpr (has_master) store(master + at, ws);
    });
}

inline void launch_adamw(floatX* params, float* master, float* m, float* v, const float* grads,
                         const float* scale, const std::vector<OptimizerPart>& parts, const AdamW& hyper,
                         uint64_t seed, cudaStream_t stream) {
    std::vector<AdamWWork> works;
    for (const OptimizerPart& part : parts) works.push_back({part, random_key(seed, part.name)});
    RaggedVectors vectors = ragged_vectors(params, master ? master : m, m, v, grads);
    auto blocks = [=](const AdamWWork& work) {
        size_t threads = work.part.count ? vectors.from(work.part.at).threads(work.part.count) : 0;
        return (unsigned)ceil_div(threads, adamw_block);
    };
    with_ragged_width(vectors, [&](auto width) {
        auto kernel = master ? adamw_update_kernel<true, width> : adamw_update_kernel<false, width>;
        each_block_table<AdamWTable>(works, blocks, [&](const AdamWTable& table) {
            launch(kernel, table.blocks(), adamw_block, 0, stream, params, master, m, v, grads, scale,
                   AdamWFactors(hyper), vectors, table);
        });
    });
}

#endif

// ----------------------------------------------------------------------------
// launchers

// The arrays hold the parts. Random numbers of stochastic rounding are counted from a tensor's start, so that
// it does not matter how a tensor is cut.
inline void adamw_update(floatX* params, float* master /* or null: params are the only copy */, float* m,
                         float* v, const float* grads, const float* scale /* (1) */,
                         const std::vector<OptimizerPart>& parts, AdamW hyper, uint64_t seed,
                         cudaStream_t stream) {
    ON_DEVICE(stream, adamw_update_on_host(params, master, m, v, grads, scale, parts, hyper, seed),
              launch_adamw(params, master, m, v, grads, scale, parts, hyper, seed, stream));
}

// A step of AdamW, for those who keep its state.
inline Optimizer adamw_optimizer(const AdamW& hyper, uint64_t seed) {
    return {.learning_rate = hyper.learning_rate,
            .step =
                [=](const OptimizerArrays& a, const std::vector<OptimizerPart>& parts, cudaStream_t stream) {
                    adamw_update(a.params, a.master, a.slots[0], a.slots[1], a.grads, a.scale, parts, hyper,
                                 seed, stream);
                },
            .step_on_host =
                [=](const OptimizerArrays& a, const std::vector<OptimizerPart>& parts) {
                    adamw_update_on_host(a.params, a.master, a.slots[0], a.slots[1], a.grads, a.scale, parts,
                                         hyper, seed);
                }};
}
