/*
LAMB (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020): AdamW's
update, scaled so that the step of each matrix is proportional to its own norm.

    u = m_hat / (sqrt(v_hat) + eps) + weight_decay w           m_hat and v_hat as in AdamW
    w = w - learning_rate ratio u,   ratio = |w| / |u|

The norms are over a section: queries, keys and values count as separate matrices here, and so do the gates
and the values of SwiGLU. The ratio is 1 for biases and norms, which never decay, and where |w| or |u| is 0.

A step has two passes: the first writes u over the gradient, so it needs no more memory than AdamW; between
them the squares of w and u are summed over all ranks.
*/
#pragma once

#include <cmath>

#include "kernels/adamw.cuh"
#include "kernels/optimizer_pass.cuh"

HOST_DEVICE inline float trust_ratio(float weight_squares, float update_squares) {
    return weight_squares > 0 && update_squares > 0 ? sqrtf(weight_squares) / sqrtf(update_squares) : 1.0f;
}

// Computes u from the gradient.
struct LambUpdate {
    static constexpr int slots = 2;
    static constexpr bool steps = false;
    static constexpr bool reads_weight = true;

    Moments moments;
    float weight_decay;

    LambUpdate() = default;
    explicit LambUpdate(const AdamW& a) : moments(a, 1), weight_decay((float)a.weight_decay) {}

    HOST_DEVICE LambUpdate at_work() const { return *this; }
    HOST_DEVICE float operator()(float w, float grad, float scale, float& m, float& v) const {
        return fmaf(weight_decay, w, moments.update(grad, scale, m, v));
    }
};

// Subtracts u times the learning rate and the ratio.
struct LambStep {
    static constexpr int slots = 0;
    static constexpr bool steps = true;
    static constexpr bool reads_weight = true;

    float rate;
    const float *weight_squares, *update_squares;  // the section's; null: its ratio is 1

    LambStep() = default;
    LambStep(const AdamW& a, const OptimizerPart& part, const OptimizerArrays& arrays)
        : rate((float)a.learning_rate),
          weight_squares(part.decays ? arrays.weight_squares + part.section : nullptr),
          update_squares(arrays.update_squares + part.section) {}

    HOST_DEVICE LambStep at_work() const {
        LambStep with_ratio = *this;
        if (weight_squares) with_ratio.rate *= trust_ratio(*weight_squares, *update_squares);
        return with_ratio;
    }
    HOST_DEVICE float operator()(float w, float update, float) const { return fmaf(-rate, update, w); }
};

// Returns a step of LAMB, with AdamW's settings and slots.
inline Optimizer lamb_optimizer(const AdamW& hyper, uint64_t seed) {
    Rounding rounding = {hyper.stochastic_rounding, hyper.step, seed};
    auto update = [=](const OptimizerPart& part, const OptimizerArrays&) {
        return LambUpdate(of_part(hyper, part));
    };
    auto step = [=](const OptimizerPart& part, const OptimizerArrays& arrays) {
        return LambStep(of_part(hyper, part), part, arrays);
    };
    return {.learning_rate = hyper.learning_rate,
            .prepare = make_pass(update, rounding),
            .takes_norms = true,
            .step = make_pass(step, rounding)};
}
