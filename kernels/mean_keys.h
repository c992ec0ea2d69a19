/*
How many keys causal attention sees: a size that costs of kernels and FLOPs of models share.
*/
#pragma once

// The average over a sequence of T tokens, each of which sees itself and those before it, at most `window` of
// them (0: no limit).
inline double mean_causal_keys(int T, int window) {
    return window > 0 && window < T ? window - window * (window - 1.0) / (2.0 * T) : T / 2.0;
}
