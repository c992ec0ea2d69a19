/*
Numbers and times in human-readable form, and the clocks that times are read from.
*/
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

#include "data/base/error.h"

// The value at index `at` of the sorted values.
inline double value_at(std::vector<double> values, size_t at) {
    std::ranges::nth_element(values, values.begin() + (std::ptrdiff_t)at);
    return values[at];
}

// The mean of the middle two if the count is even; 0 if there are no values.
inline double median_of(const std::vector<double>& values) {
    size_t n = values.size();
    return n == 0 ? 0 : (value_at(values, n / 2) + value_at(values, (n - 1) / 2)) / 2;
}

// "1 line", "2 lines", "2 batches".
inline std::string counted(uint64_t count, const std::string& what) {
    return std::to_string(count) + " " + what + (count == 1 ? "" : what.ends_with("ch") ? "es" : "s");
}

// 59s, 12m05s, 30h02m.
inline std::string duration(double seconds) {
    long s = std::lround(seconds);
    if (s < 60) return text("%lds", s);
    if (s < 3600) return text("%ldm%02lds", s / 60, s % 60);
    return text("%ldh%02ldm", s / 3600, s / 60 % 60);
}

// 45 s, 12 min, 3 h 05 min, 2 d 3 h.
inline std::string rough_duration(double seconds) {
    if (seconds < 89.5) return text("%.0f s", seconds);
    long minutes = std::lround(seconds / 60), hours = minutes / 60;
    if (minutes < 90) return text("%ld min", minutes);
    if (hours < 48) return text("%ld h %02ld min", hours, minutes % 60);
    return text("%ld d %ld h", hours / 24, hours % 24);
}

// Time since the beginning of 1970.
inline int64_t unix_nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
}
inline double unix_seconds() {
    return (double)unix_nanoseconds() / 1e9;
}

// The current time, as 2026-01-31T23:59:59.123Z.
inline std::string utc_time() {
    const int64_t milliseconds = unix_nanoseconds() / 1'000'000;
    const time_t seconds = milliseconds / 1000;
    struct tm parts;
    gmtime_r(&seconds, &parts);
    char date[32];
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", &parts);
    return text("%s.%03dZ", date, (int)(milliseconds % 1000));
}

// 1234567 as "1.23M".
inline std::string human(double value) {
    const char* suffix[] = {"", "k", "M", "G", "T", "P"};
    int i = 0;
    for (; value >= 999.5 && i < 5; i++) value /= 1000;
    return text(value < 10 && i ? "%.2f%s" : value < 100 && i ? "%.1f%s" : "%.0f%s", value, suffix[i]);
}

// Seconds on a monotonic clock.
inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Replaces any NaN by one without a sign: the sign has no meaning, and would be printed.
inline float plain_nan(float value) {
    return std::isnan(value) ? NAN : value;
}
