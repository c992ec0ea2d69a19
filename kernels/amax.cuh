/*
The amax of an array, the largest absolute value of its elements, which determines the array's scale in fp8
(fp8.cuh). The kernel that writes the array computes the amax along the way; otherwise a separate pass does.

The bits of absolute values are ordered like the floats themselves, with NaN above all others. So the amax is
an atomic maximum of bits, and the order of updates changes nothing. Most warps find that the stored maximum
is already large enough: they only read it.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/common.cuh"
#include "kernels/streams.cuh"

// ----------------------------------------------------------------------------
// CPU

// Returns NaN if any element is NaN.
inline float amax_cpu(const floatX* inp, size_t n) {
    float amax = 0;
    for (size_t i = 0; i < n; i++) {
        float size = std::fabs(float(inp[i]));
        if (!(size <= amax)) amax = std::isnan(amax) ? amax : size;
    }
    return amax;
}

// Stores the amax of out (n) in *amax, unless amax is null. Called by functions that write `out`.
inline void keep_amax_cpu(float* amax, const floatX* out, size_t n) {
    if (amax) *amax = amax_cpu(out, n);
}

// ----------------------------------------------------------------------------
// CUDA kernels

#ifndef DEVICE_CPU

// The largest absolute value that a thread has seen, as bits. In bf16 there are two, of elements at even and
// at odd places, packed in one register, which needs no conversions. An object may see either vectors or
// single elements, not both.
class Amax {
public:
    template <int W>
    __device__ void see(const Vec<floatX, W>& x) {
        if constexpr (sizeof(floatX) == 2 && W % 2 == 0) {
            for (int i = 0; i < W; i += 2) {
                unsigned pair;
                memcpy(&pair, &x[i], sizeof pair);
                see_pair(pair);
            }
        } else {
            // not fabsf, which on a GPU may turn a NaN into any other NaN
            for (int i = 0; i < W; i++) bits_ = max(bits_, __float_as_uint(float(x[i])) & 0x7fffffff);
        }
    }

    // Sees two neighboring bf16 elements, packed.
    __device__ void see_pair(unsigned pair) {
        bits_ = max(bits_ & 0xffff, pair & 0x7fff) | max(bits_ & 0xffff0000, pair & 0x7fff0000);
    }

    // Raises *amax to at least what the threads of a warp saw, unless amax is null. All threads of the warp
    // call it together.
    __device__ void keep(float* amax) const {
        if (!amax) return;
        unsigned bits = sizeof(floatX) == 2 ? max(bits_ << 16, bits_ & 0xffff0000) : bits_;
        unsigned* known = reinterpret_cast<unsigned*>(amax);
        bits = __reduce_max_sync(~0u, bits);
        if (threadIdx.x % warp_size == 0 && bits > counter_now(known)) atomicMax(known, bits);
    }

private:
    unsigned bits_ = 0;
};

// Clears *amax before a kernel that calls Amax::keep.
inline void begin_amax(float* amax, cudaStream_t stream) {
    if (amax) zero_async(amax, 1, stream);
}

constexpr unsigned amax_block = 256;

template <int W>
__global__ void amax_kernel(float* amax, const floatX* inp, size_t n) {
    Amax element;
    size_t step = (size_t)gridDim.x * blockDim.x * W;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W; i < n; i += step) {
        element.see(load<W>(inp + i));
    }
    element.keep(amax);
}

inline void launch_amax(float* amax, const floatX* inp, size_t n, cudaStream_t stream) {
    begin_amax(amax, stream);
    with_vec_width<floatX>(n, [&](auto W) {
        unsigned blocks = (unsigned)std::min<size_t>(ceil_div(n, amax_block * 4 * W), 1024);
        launch(amax_kernel<W>, blocks, amax_block, 0, stream, amax, inp, n);
    });
}

#endif

// ----------------------------------------------------------------------------
// launchers

inline void find_amax(float* amax /* (1) */, const floatX* inp /* (n) */, size_t n, cudaStream_t stream) {
    ON_DEVICE(stream, (LaunchCost{.read = array_bytes(inp, n)}), keep_amax_cpu(amax, inp, n),
              launch_amax(amax, inp, n, stream));
}
