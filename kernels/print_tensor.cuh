/*
Prints an array on a device, for reading or debugging a step: a line with its size, its amax and the number of
elements that are not finite, then its corners. Even on a CPU, streams run work some time after it is
enqueued, so a printf between the calls of a block would show old contents. This function waits for the stream
first:

    print_tensor("norm1", a.norm1, d.N, d.C, g.stream);

    norm1 (4096, 768): amax 3.91042, 0 not finite
         0.10313   -0.412708     1.20816   ...     0.71209   -0.101443   -0.221543
      ...

While a graph is captured, there are no numbers yet: train with --cuda-graphs off.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/common.cuh"
#include "kernels/streams.cuh"

// Returns the text for data (rows, columns) on the device: floats, floatX or ints.
template <typename T>
std::string tensor_text(const char* name, const T* data, int rows, int columns, cudaStream_t stream) {
    std::vector<T> host((size_t)rows * columns);
    copy_async(host.data(), data, host.size(), stream);
    cudaCheck(cudaStreamSynchronize(stream));
    float amax = 0;
    size_t not_finite = 0;
    for (T value : host) {
        bool finite = std::isfinite(float(value));
        not_finite += !finite;
        if (finite) amax = std::max(amax, std::fabs(float(value)));
    }
    std::string shown =
        text("%s (%d, %d): amax %.6g, %zu not finite\n", name, rows, columns, amax, not_finite);
    auto is_left_out = [](int i, int count) { return count > 6 && i >= 3 && i < count - 3; };
    for (int r = 0; r < rows; r++) {
        if (is_left_out(r, rows)) {
            if (r == 3) shown += "  ...\n";
            continue;
        }
        for (int c = 0; c < columns; c++) {
            if (!is_left_out(c, columns))
                shown += text(" %11.6g", float(host[(size_t)r * columns + c]));
            else if (c == 3)
                shown += "   ...";
        }
        shown += "\n";
    }
    return shown;
}

// Prints tensor_text() to standard error, which every rank has, preceded by the name of the rank.
template <typename T>
void print_tensor(const char* name, const T* data, int rows, int columns, cudaStream_t stream) {
    std::string shown = tensor_text(name, data, rows, columns, stream);
    fprintf(stderr, "%s%s%s", process_place().c_str(), process_place().empty() ? "" : ": ", shown.c_str());
}
