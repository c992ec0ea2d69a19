/*
Ranges of a host thread's time, as profilers show them: here, names for what is launched in them (simt.h).
*/
#pragma once

#include "test/simt/simt.h"

inline int nvtxRangePushA(const char* name) {
    return simt::push_range(name);
}

inline int nvtxRangePop() {
    return simt::pop_range();
}
