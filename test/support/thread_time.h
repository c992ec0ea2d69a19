/*
CPU time of this thread, for tests of how work grows: other load on the machine does not lengthen it.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <ctime>

inline double thread_seconds() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// The least time of `times` runs of work().
template <typename Work>
double least_thread_seconds(int times, Work&& work) {
    double least = INFINITY;
    for (int i = 0; i < times; i++) {
        double start = thread_seconds();
        work();
        least = std::min(least, thread_seconds() - start);
    }
    return least;
}
