/*
An optimizer as those see it who keep its state: ZeRO, offload, checkpoints and the memory plan. Each
optimizer has a file of its own with the formula, its kernels, and a function that makes an Optimizer of its
settings for one step (adamw.cuh).

The own part of a unit is stepped at once. It is made of parts of tensors, any of which may be cut anywhere
by the ranks; so what an element becomes depends on nothing but the element, its number in the tensor, and the
settings.
*/
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/common.cuh"

// A run of elements of one tensor.
struct OptimizerPart {
    size_t at;      // where it begins in the arrays
    size_t count;   // elements
    size_t first;   // where it begins in the tensor
    uint64_t name;  // hash of the tensor's name: each has random numbers of its own
    bool decays;    // by weight decay
};

constexpr int most_optimizer_slots = 4;

// A step reads and writes these arrays, all of them in memory of the device or all in memory of the host.
struct OptimizerArrays {
    floatX* params;
    float* master;                       // fp32 copy of params; null: params are the only copy
    float* slots[most_optimizer_slots];  // what the optimizer keeps, in its own order
    const float* grads;
    const float* scale;  // (1) by which gradients are multiplied; NaN: nothing is stepped
};

struct Optimizer {
    double learning_rate;  // of this step

    // Steps the parts, as work of the stream.
    std::function<void(const OptimizerArrays&, const std::vector<OptimizerPart>&, cudaStream_t)> step;
    // Steps them at once, on this thread and OpenMP's, with arrays of the host; to the same bits. It makes no
    // call of CUDA, so that cudaLaunchHostFunc can run it.
    std::function<void(const OptimizerArrays&, const std::vector<OptimizerPart>&)> step_on_host;
};
