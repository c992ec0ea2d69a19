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
*/
#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>

#include "kernels/common.cuh"
#include "kernels/random.cuh"

// Double because 1 - beta is taken in double, as in PyTorch: 1 - 0.999f is off by 1e-5.
struct AdamW {
    double learning_rate, beta1, beta2, eps, weight_decay;
    int step;  // from 1
    bool stochastic_rounding;
};

// The same in the terms of the inner loop.
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
};

// Updates m and v, and returns the new w.
HOST_DEVICE inline float adamw_element(float w, float& m, float& v, float g, const AdamWFactors& a) {
    m = m + a.new1 * (g - m);
    v = a.beta2 * v + a.new2 * g * g;
    return w * a.decay - a.step_size * m / (sqrtf(v) * a.root_correction + a.eps);
}

// w as the i-th parameter. Stochastic rounding takes one of the two neighbours in bf16, the nearer one more
// often: the 16 bits that bf16 drops are a fraction, and adding a random fraction carries with just that
// probability.
HOST_DEVICE inline floatX adamw_round(float w, [[maybe_unused]] const AdamWFactors& a,
                                      [[maybe_unused]] uint64_t key, [[maybe_unused]] size_t i) {
    if constexpr (std::is_same_v<floatX, float>) {
        return w;
    } else {
        bool finite = fabsf(w) <= FLT_MAX;  // the low bits of NaN are no fraction
        if (!a.stochastic_rounding || !finite) return floatX(w);
        uint32_t random = philox(key, i / 4, a.step).at[i % 4];
        return floatX(std::bit_cast<float>((std::bit_cast<uint32_t>(w) + (random >> 16)) & 0xffff0000u));
    }
}

// ----------------------------------------------------------------------------
// CPU

template <bool has_master>
void adamw_update_cpu(floatX* params, float* master, float* m, float* v, const float* grads,
                      const float* scale, size_t n, AdamWFactors a, uint64_t key) {
    float s = *scale;
    if (std::isnan(s)) return;
    constexpr size_t piece = 65536;  // fixed, and of whole vectors: the number of threads changes no bit
#pragma omp parallel for
    for (size_t start = 0; start < n; start += piece) {
        size_t end = std::min(n, start + piece);
#pragma omp simd
        for (size_t i = start; i < end; i++) {
            float w = has_master ? master[i] : float(params[i]);
            w = adamw_element(w, m[i], v[i], grads[i] * s, a);
            if constexpr (has_master) master[i] = w;
            params[i] = adamw_round(w, a, key, i);
        }
    }
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

constexpr unsigned adamw_block = 256;  // threads, of W elements each

template <bool has_master, int W>
__global__ void adamw_update_kernel(floatX* params, float* master, float* m, float* v, const float* grads,
                                    const float* scale, size_t n, AdamWFactors a, uint64_t key) {
    size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    float s = *scale;
    if (i >= n || std::isnan(s)) return;
    auto ms = load<W>(m + i), vs = load<W>(v + i), gs = load<W>(grads + i);
    auto ps = load<W>(params + i);
    Vec<float, W> ws;
    if constexpr (has_master) ws = load<W>(master + i);
    for (int k = 0; k < W; k++) {
        if constexpr (!has_master) ws[k] = float(ps[k]);
        ws[k] = adamw_element(ws[k], ms[k], vs[k], gs[k] * s, a);
        ps[k] = adamw_round(ws[k], a, key, i + k);
    }
    store(m + i, ms);
    store(v + i, vs);
    store(params + i, ps);
    if constexpr (has_master) store(master + i, ws);
}

#endif

// ----------------------------------------------------------------------------
// launchers

// key: of the random numbers of stochastic rounding, different for each tensor.
inline void adamw_update(floatX* params /* (n) */, float* master /* (n), or null: params are the only copy */,
                         float* m /* (n) */, float* v /* (n) */, const float* grads /* (n) */,
                         const float* scale /* (1) */, size_t n, AdamW hyper, uint64_t key,
                         cudaStream_t stream) {
    AdamWFactors a(hyper);
    if (n == 0) return;
    ON_DEVICE(stream,
              (master ? adamw_update_cpu<true> : adamw_update_cpu<false>)(params, master, m, v, grads, scale,
                                                                          n, a, key),
              with_vec_width<float>(n, [=](auto width) {
                  constexpr int W = width;
                  auto kernel = master ? adamw_update_kernel<true, W> : adamw_update_kernel<false, W>;
                  launch(kernel, ceil_div(n, adamw_block * W), adamw_block, 0, stream, params, master, m, v,
                         grads, scale, n, a, key);
              }));
}
