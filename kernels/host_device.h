/*
HOST_DEVICE marks a function that the host and the kernels of a GPU both call.
*/
#pragma once

#ifdef DEVICE_CPU
#define HOST_DEVICE
#else
#include <cuda_runtime.h>
#define HOST_DEVICE __host__ __device__
#endif
