/*
The part of the program that a device runs: machine code for its architecture, or code that its driver
compiles from PTX, which the program contains for cards newer than all architectures of the build. PTX of an
older architecture lacks the instructions that only Hopper has, even on a Hopper card.
*/
#pragma once

#include "kernels/fill.cuh"

#ifndef DEVICE_CPU

// Returns the architecture that the kernels were compiled for, such as 90, which may be older than the
// device; 0: the device cannot run them, for the reason in `error`.
inline int kernel_architecture(cudaError_t& error) {
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, (const void*)fill_kernel);  // all kernels are compiled alike
    return error == cudaSuccess ? attributes.ptxVersion : 0;
}

// Returns the architecture for this process's device, which is known to run the kernels.
inline int kernel_architecture() {
    static const int architecture = [] {
        cudaError_t error;
        int found = kernel_architecture(error);
        cudaCheck(error);
        return found;
    }();
    return architecture;
}

#endif
