#pragma once

// A simulated device has no speed, and knows of mistakes that a real one need not notice.
#if defined(DEVICE_CPU) || defined(__CUDACC__)
constexpr bool simulated = false;
#else
constexpr bool simulated = true;
#endif
