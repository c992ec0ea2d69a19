/*
An optimizer as those see it who keep its state: ZeRO, offload, checkpoints and the memory plan. Each
optimizer has a file of its own with the formula, and a function that makes an Optimizer of its settings for
one step (adamw.cuh, lamb.cuh, muon.cuh).

The own part of a unit is stepped at once. It is made of parts of tensors, any of which may be cut anywhere
by the ranks; so what an element becomes depends on nothing but the element, its number in the tensor, and the
settings. Where that is not enough, a step has two passes, and the second sees what came of all ranks' first:

    prepare      each element's gradient becomes an update
    norms        the squares of weights and updates are summed for each section, over all ranks
    transform    the updates of a matrix come together on one rank, which makes others of them
    step         new weights, from updates and norms
*/
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/common.cuh"

// A run of elements of one section: of a matrix or vector that an optimizer takes as a whole. A tensor is
// one, or holds several, such as queries, keys and values.
struct OptimizerPart {
    size_t at;               // its place in the arrays
    size_t count;            // elements
    size_t first;            // its place in the tensor
    uint64_t name;           // hash of the tensor's name: each has random numbers of its own
    bool decays;             // by weight decay
    int section = 0;         // its number among all of the model
    int rows = 0, cols = 0;  // the section's, if it is a matrix of a block
    double learning_rate = 1, weight_decay = 1;  // by which those of the optimizer are multiplied

    bool of_block_matrix() const { return rows > 0; }
};

constexpr int most_optimizer_slots = 4;

// Elements of scratch, of element_bytes each, in which Optimizer::transform works on a matrix, rows <= cols.
using TransformScratch = size_t (*)(size_t rows, size_t cols, size_t element_bytes);

// A step reads and writes these arrays, all of them in memory of the device or all in memory of the host.
struct OptimizerArrays {
    floatX* params;
    float* master;                       // fp32 copy of params; null: params are the only copy
    float* slots[most_optimizer_slots];  // arrays that the optimizer keeps, in its own order
    float* grads;                        // once prepared: updates
    const float* scale;                  // (1) by which gradients are multiplied; NaN: nothing is stepped
    // (sections each) sums of squares, where the optimizer takes norms
    const float *weight_squares = nullptr, *update_squares = nullptr;
};

// Work on all elements of some parts.
struct OptimizerPass {
    using Parts = std::vector<OptimizerPart>;

    // Puts the work on the stream.
    std::function<void(const OptimizerArrays&, const Parts&, cudaStream_t)> on_device = {};
    // Does it at once, on this thread and OpenMP's, with arrays of the host; to the same bits. It makes no
    // call of CUDA, so that cudaLaunchHostFunc can run it.
    std::function<void(const OptimizerArrays&, const Parts&)> on_host = {};

    explicit operator bool() const { return (bool)on_device; }
};

struct Optimizer {
    double learning_rate;        // this step's
    OptimizerPass prepare = {};  // nothing, or makes updates of gradients, in place
    bool takes_norms = false;    // it needs norms of weights and updates between the passes
    // Nothing, or replaces the update of a whole matrix of a block, as work of the stream. The matrix lies
    // such that rows <= cols, and scratch is of the size that ZeroSettings::transform_scratch gives.
    std::function<void(floatX* matrix, int rows, int cols, floatX* scratch, cudaStream_t)> transform = {};
    OptimizerPass step = {};  // makes new weights
};
