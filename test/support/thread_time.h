/*
Time for tests of how work grows: that of this thread's processor, which others at work do not lengthen.
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

// The least of some times that work() takes.
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
