/*
Ranges of a host thread's time, as profilers show them; here they name the launches within them (simt.h).
*/
#pragma once

#include "test/simt/simt.h"

inline int nvtxRangePushA(const char* name) {
    return simt::push_range(name);
}

inline int nvtxRangePop() {
    return simt::pop_range();
}
