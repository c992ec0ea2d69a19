/*
The number of keys that causal attention sees on average, shared by the costs of kernels and the FLOPs of
models.
*/
#pragma once

// Returns the average over a sequence of T tokens, each of which sees itself and those before it, at most
// `window` of them. 0: no limit; the result is then T / 2, the usual approximation of (T + 1) / 2.
inline double mean_causal_keys(int T, int window) {
    return window > 0 && window < T ? window - window * (window - 1.0) / (2.0 * T) : T / 2.0;
}
