#pragma once

// A simulated device has no meaningful speed, and reports errors that a real one need not notice.
#if defined(DEVICE_CPU) || defined(__CUDACC__)
constexpr bool simulated = false;
#else
constexpr bool simulated = true;
#endif
