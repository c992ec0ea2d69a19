/*
AdamW (Loshchilov & Hutter, "Decoupled weight decay regularization", 2019), as torch.optim.AdamW computes it:

    g = grad * scale
    m = m + (1 - beta1) (g - m)              v = beta2 v + (1 - beta2) g^2
    m_hat = m / (1 - beta1^step)             v_hat = v / (1 - beta2^step)
    w = w (1 - learning_rate weight_decay) - learning_rate m_hat / (sqrt(v_hat) + eps)

The moments m and v, and what divides them, are those of other optimizers too.
*/
#pragma once

#include <cmath>
#include <vector>

#include "kernels/optimizer_pass.cuh"

// Double because 1 - beta is taken in double, as in PyTorch: 1 - 0.999f is off by 1e-5.
struct AdamW {
    double learning_rate, beta1, beta2, eps, weight_decay;
    int step;  // counts from 1
    bool stochastic_rounding;
};

// The settings for a part: its own learning rate, and the decay of its weights.
inline AdamW of_part(AdamW a, const OptimizerPart& part) {
    a.learning_rate *= part.learning_rate;
    a.weight_decay *= part.decays ? part.weight_decay : 0;
    return a;
}

// The moments of a gradient, in the terms of the inner loop.
struct Moments {
    float beta2, new1, new2, size, root_correction, eps;

    Moments() = default;
    // size: what the corrected mean is multiplied by
    Moments(const AdamW& a, double size)
        : beta2((float)a.beta2),
          new1((float)(1 - a.beta1)),
          new2((float)(1 - a.beta2)),
          size((float)(size / (1 - std::pow(a.beta1, a.step)))),
          root_correction((float)(1 / std::sqrt(1 - std::pow(a.beta2, a.step)))),
          eps((float)a.eps) {}

    // Updates m and v, and returns size m_hat / (sqrt(v_hat) + eps). No sum stands outside of an fmaf, so
    // compilers find nothing to fuse.
    HOST_DEVICE float update(float grad, float scale, float& m, float& v) const {
        float g = grad * scale;
        m = fmaf(new1, fmaf(grad, scale, -m), m);
        v = fmaf(new2 * g, g, beta2 * v);
        return size * m / fmaf(sqrtf(v), root_correction, eps);
    }
};

struct AdamWFormula {
    static constexpr int slots = 2;
    static constexpr bool steps = true;
    static constexpr bool reads_weight = true;

    Moments moments;
    float decay;  // the part of a weight that is left

    AdamWFormula() = default;
    explicit AdamWFormula(const AdamW& a)
        : moments(a, a.learning_rate), decay((float)(1 - a.learning_rate * a.weight_decay)) {}

    HOST_DEVICE AdamWFormula at_work() const { return *this; }
    HOST_DEVICE float operator()(float w, float grad, float scale, float& m, float& v) const {
        return fmaf(w, decay, -moments.update(grad, scale, m, v));
    }
};

// A step of AdamW, for those who keep its state.
inline Optimizer adamw_optimizer(const AdamW& hyper, uint64_t seed) {
    auto formula = [=](const OptimizerPart& part, const OptimizerArrays&) {
        return AdamWFormula(of_part(hyper, part));
    };
    return {.learning_rate = hyper.learning_rate,
            .step = make_pass(formula, {hyper.stochastic_rounding, hyper.step, seed})};
}
