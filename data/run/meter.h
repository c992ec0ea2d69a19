/*
The speed of a run: its model FLOPs, and the shares that it reaches of the devices' published and measured
rates.

Model FLOPs are those that the model's formulas need; recomputation to save memory is not counted. A share
refers to one device: the tokens of the whole run are divided by the number of devices.
*/
#pragma once

#include <algorithm>

#include "data/options/model_config.h"
#include "kernels/mean_keys.h"

// Returns the mean number of keys for which a layer's attention is counted, per token of a sequence of T: the
// keys that the token sees or, without `causal` and without a window, all T.
inline double mean_keys(const ModelConfig& c, int layer, int T, bool causal) {
    int window = window_of_layer(c, layer);
    return causal || (window > 0 && window < T) ? mean_causal_keys(T, window) : T;
}

// Returns the model FLOPs of training on one token: 6 for each weight of a matrix product, and 12 A, with A =
// heads * head size, for each position that is counted in attention. These are the whole sequence, by the
// published definition (Korthikanti et al. 2022), or the positions that a causal mask leaves. If the layer
// has a window, they are the positions in it, which are fewer at the start of the sequence.
inline double flops_per_token(const ModelConfig& c, int T, bool causal) {
    double C = c.channels, A = (double)c.heads * c.head_size, blocks = 0;
    for (const TensorRow& row : tensor_table(c))
        if (row.is_block_matrix()) blocks += (double)row.size() * count_of(row, c);
    double positions = 0;  // the sum over layers
    for (int layer = 0; layer < c.layers; layer++) positions += mean_keys(c, layer, T, causal);
    return 6 * (blocks + C * c.vocab_size) + 12 * A * positions;
}

// Rates and shares from the tokens per second of the whole run. peak_flops (published; 0: not known) and
// gemm_flops (measured) are FLOP/s of one device. A measurement made while other programs used the device is
// too low, so the largest of several is used; one of them is the rate that training itself reaches.
class Meter {
public:
    Meter(const ModelConfig& config, int T, double peak_flops, double gemm_flops, int devices)
        : full_(flops_per_token(config, T, false) / devices),
          causal_(flops_per_token(config, T, true) / devices),
          peak_(peak_flops),
          gemm_(gemm_flops) {}

    void add_measurement(double gemm_flops) { gemm_ = std::max(gemm_, gemm_flops); }
    void add_step(double tokens_per_second) { add_measurement(full_ * tokens_per_second); }

    double mfu(double tokens_per_second) const { return peak_ > 0 ? full_ * tokens_per_second / peak_ : 0; }
    double gemm_share(double tokens_per_second) const { return full_ * tokens_per_second / gemm_; }
    double gemm_share_causal(double tokens_per_second) const { return causal_ * tokens_per_second / gemm_; }
    bool has_peak() const { return peak_ > 0; }

private:
    double full_, causal_;  // FLOPs of one device for each token of the run
    double peak_, gemm_;
};
