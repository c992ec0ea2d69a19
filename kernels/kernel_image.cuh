/*
The part of the program that a device runs: machine code that was compiled for its architecture, or what its
driver compiles from PTX, which is there for cards newer than all architectures of the build. PTX of an older
architecture lacks the instructions that only Hopper has, also where a Hopper card runs it.
*/
#pragma once

#include "kernels/fill.cuh"

#ifndef DEVICE_CPU

// The architecture that the kernels were compiled for, such as 90, whatever the device is; 0: the device
// cannot run them, for the reason that `error` tells.
inline int kernel_architecture(cudaError_t& error) {
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, (const void*)fill_kernel);  // all kernels are compiled alike
    return error == cudaSuccess ? attributes.ptxVersion : 0;
}

// Asks for the device that this process uses, which has been found to run them.
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
