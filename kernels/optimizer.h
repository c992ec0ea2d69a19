/*
The interface of optimizers for the code that keeps their state: ZeRO, offload, checkpoints and the memory
plan. Each optimizer has its own file, with its formula and a function that makes an Optimizer from its
settings for one step (adamw.cuh, lamb.cuh, muon.cuh).

A rank updates its own part of a unit in one pass. This part consists of parts of tensors, which may be cut
anywhere, so an element's new value depends only on the element, its index in the tensor, and the settings. If
an optimizer needs more than that, a step has two passes, and the second uses the results of the first on all
ranks:

    prepare      turns each element's gradient into an update
    norms        sums the squares of weights and updates for each section, over all ranks
    transform    gathers the updates of a matrix on one rank, which computes new ones from them
    step         computes new weights, from updates and norms
*/
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/common.cuh"

// A run of elements of one section: of a matrix or vector that an optimizer treats as a whole. A tensor is
// one section, or consists of several, such as queries, keys and values.
struct OptimizerPart {
    size_t at;                                   // offset in the arrays
    size_t count;                                // number of elements
    size_t first;                                // offset in the tensor
    uint64_t name;                               // hash of the tensor's name, for its own random numbers
    bool decays;                                 // has weight decay
    int section = 0;                             // index among all sections of the model
    int rows = 0, cols = 0;                      // the section's, if it is a matrix of a block
    double learning_rate = 1, weight_decay = 1;  // multiply the optimizer's

    bool of_block_matrix() const { return rows > 0; }
};

constexpr int most_optimizer_slots = 4;

// Returns the scratch, in elements of element_bytes each, that Optimizer::transform needs for a matrix with
// rows <= cols.
using TransformScratch = size_t (*)(size_t rows, size_t cols, size_t element_bytes);

// The arrays that a step reads and writes, either all in device memory or all in host memory.
struct OptimizerArrays {
    floatX* params;
    float* master;                       // fp32 copy of params; null: params are the only copy
    float* slots[most_optimizer_slots];  // arrays that the optimizer keeps, in its own order
    float* grads;                        // updates, once prepared
    const float* scale;                  // (1) multiplies gradients; NaN: nothing is updated
    // (sections each) sums of squares, if the optimizer uses norms
    const float *weight_squares = nullptr, *update_squares = nullptr;
};

// Work on all elements of some parts.
struct OptimizerPass {
    using Parts = std::vector<OptimizerPart>;

    // Puts the work on the stream.
    std::function<void(const OptimizerArrays&, const Parts&, cudaStream_t)> on_device = {};
    // Does the work at once, on this thread and OpenMP's, with arrays of the host; the results are
    // bit-identical. It makes no CUDA calls, so that cudaLaunchHostFunc can run it.
    std::function<void(const OptimizerArrays&, const Parts&)> on_host = {};

    explicit operator bool() const { return (bool)on_device; }
};

struct Optimizer {
    double learning_rate;        // this step's
    OptimizerPass prepare = {};  // null, or turns gradients into updates, in place
    bool takes_norms = false;    // needs norms of weights and updates between the passes
    // Null, or replaces the update of a whole matrix of a block, as work on the stream. The matrix is laid
    // out so that rows <= cols, and scratch has the size that ZeroSettings::transform_scratch returns.
    std::function<void(floatX* matrix, int rows, int cols, floatX* scratch, cudaStream_t)> transform = {};
    OptimizerPass step = {};  // computes new weights
};
