/*
AdamW (Loshchilov & Hutter, "Decoupled weight decay regularization", 2019), as torch.optim.AdamW computes it:

    g = grad * scale
    m = m + (1 - beta1) (g - m)              v = beta2 v + (1 - beta2) g^2
    m_hat = m / (1 - beta1^step)             v_hat = v / (1 - beta2^step)
    w = w (1 - learning_rate weight_decay) - learning_rate m_hat / (sqrt(v_hat) + eps)

Other optimizers also use the moments m and v, and the normalized update that they give (Moments).
*/
#pragma once

#include <cmath>
#include <vector>

#include "kernels/optimizer_pass.cuh"

// Doubles because 1 - beta is computed in double, as in PyTorch: 1 - 0.999f has a relative error of 1e-5.
struct AdamW {
    double learning_rate, beta1, beta2, eps, weight_decay;
    int step;  // counts from 1
    bool stochastic_rounding;
};

// Returns the settings for a part, with its learning rate and weight decay factors applied.
inline AdamW of_part(AdamW a, const OptimizerPart& part) {
    a.learning_rate *= part.learning_rate;
    a.weight_decay *= part.decays ? part.weight_decay : 0;
    return a;
}

// The update of the moments by a gradient, with the constants that the inner loop needs.
struct Moments {
    float beta2, new1, new2, size, root_correction, eps;

    Moments() = default;
    // size: the factor on the bias-corrected mean
    Moments(const AdamW& a, double size)
        : beta2((float)a.beta2),
          new1((float)(1 - a.beta1)),
          new2((float)(1 - a.beta2)),
          size((float)(size / (1 - std::pow(a.beta1, a.step)))),
          root_correction((float)(1 / std::sqrt(1 - std::pow(a.beta2, a.step)))),
          eps((float)a.eps) {}

    // Updates m and v, and returns size m_hat / (sqrt(v_hat) + eps). Every addition is written as an fmaf,
    // which leaves compilers nothing to fuse in their own way.
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
    float decay;  // factor that weight decay applies to a weight

    AdamWFormula() = default;
    explicit AdamWFormula(const AdamW& a)
        : moments(a, a.learning_rate), decay((float)(1 - a.learning_rate * a.weight_decay)) {}

    HOST_DEVICE AdamWFormula at_work() const { return *this; }
    HOST_DEVICE float operator()(float w, float grad, float scale, float& m, float& v) const {
        return fmaf(w, decay, -moments.update(grad, scale, m, v));
    }
};

// Returns a step of AdamW, for optimizers whose state is m and v.
inline Optimizer adamw_optimizer(const AdamW& hyper, uint64_t seed) {
    auto formula = [=](const OptimizerPart& part, const OptimizerArrays&) {
        return AdamWFormula(of_part(hyper, part));
    };
    return {.learning_rate = hyper.learning_rate,
            .step = make_pass(formula, {hyper.stochastic_rounding, hyper.step, seed})};
}
