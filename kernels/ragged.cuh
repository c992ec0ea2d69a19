/*
Element-wise kernels on any part of an array. A part that ranks cut out of a tensor may begin and end in the
middle of a vector. If it does so at the same offset in all arrays, the vectors in between are still moved
whole, and only the first and the last thread work element by element; otherwise every thread handles one
element.
*/
#pragma once

#include "kernels/common.cuh"

#ifndef DEVICE_CPU

// The layout of a kernel over n elements: thread t handles the `width` elements from t * width - skip on.
struct RaggedVectors {
    int width;  // a power of two
    int skip;   // elements of the first vector that lie before the arrays

    size_t threads(size_t n) const { return ceil_div(n + skip, (size_t)width); }
    // Returns the layout for the arrays' elements from `at` on.
    HOST_DEVICE RaggedVectors from(size_t at) const { return {width, (int)((skip + at) & (width - 1))}; }
};

constexpr int ragged_width = vec_width<float>;

template <typename T>
int elements_into_vector(const T* pointer) {
    return (int)((uintptr_t)pointer / sizeof(T) % ragged_width);
}

// Returns the layout for element-wise work on all these arrays.
template <typename T, typename... Others>
RaggedVectors ragged_vectors(const T* array, const Others*... others) {
    int skip = elements_into_vector(array);
    bool alike = ((elements_into_vector(others) == skip) && ...);
    return alike ? RaggedVectors{ragged_width, skip} : RaggedVectors{1, 0};
}

// Calls f with the width as std::integral_constant.
template <typename F>
void with_ragged_width(RaggedVectors vectors, F&& f) {
    if (vectors.width == ragged_width)
        f(std::integral_constant<int, ragged_width>{});
    else
        f(std::integral_constant<int, 1>{});
}

// In a kernel: calls f(width, i) for the elements i .. i + W - 1 of a thread, at once with width W if they
// all exist, else one by one with width 1.
template <int W, typename F>
__device__ void each_ragged_vector(size_t thread, size_t n, int skip, F&& f) {
    ptrdiff_t first = (ptrdiff_t)thread * W - skip;
    if (first >= 0 && first + W <= (ptrdiff_t)n) {
        f(std::integral_constant<int, W>{}, (size_t)first);
    } else {
        for (int k = 0; k < W; k++) {
            ptrdiff_t i = first + k;
            if (i >= 0 && i < (ptrdiff_t)n) f(std::integral_constant<int, 1>{}, (size_t)i);
        }
    }
}

#endif
