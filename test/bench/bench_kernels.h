/*
Shared by the rows of bench_kernels: arrays whose values host and device both know, a check of a sample of a
kernel's results, and a kernel's time and its rate relative to the best that the device reaches.
*/
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "comm/memory.h"
#include "data/base/error.h"
#include "data/base/figures.h"
#include "data/run/meter.h"
#include "kernels/global_norm.cuh"
#include "kernels/matmul.cuh"
#include "kernels/random.cuh"
#include "kernels/row_order.h"
#include "test/bench/bench_times.h"

// ----------------------------------------------------------------------------
// data

// A device array. It starts as NaN bit patterns, so that elements that a kernel failed to write show up.
template <typename T>
class Array : public DeviceArray<T> {
public:
    Array(size_t size, cudaStream_t stream) : DeviceArray<T>(size), size_(size), stream_(stream) {
        cudaCheck(cudaMemsetAsync(this->data, 0xff, size * sizeof(T), stream));
    }

    operator T*() { return this->data; }
    size_t size() const { return size_; }

    std::vector<T> host() const {
        std::vector<T> values(size_);
        cudaCheck(
            cudaMemcpyAsync(values.data(), this->data, size_ * sizeof(T), cudaMemcpyDeviceToHost, stream_));
        cudaCheck(cudaStreamSynchronize(stream_));
        return values;
    }

protected:
    size_t size_;
    cudaStream_t stream_;
};

// Normally distributed numbers that repeat after a prime number of elements: neighbors differ along every
// dimension of an array, and the host need not keep or copy gigabytes.
template <typename T>
class Numbers : public Array<T> {
public:
    Numbers(size_t size, const char* name, cudaStream_t stream, float scale = 1, float shift = 0)
        : Array<T>(size, stream), values_(std::min(size, period)) {
        uint64_t key = random_key(1234, name);
        std::vector<T> rounded(values_.size());
#pragma omp parallel for
        for (size_t i = 0; i < rounded.size(); i++) {
            rounded[i] = T(random_normal(key, i) * scale + shift);
            values_[i] = float(rounded[i]);
        }
        copy_to_device(this->data, rounded.data(), rounded.size(), stream);
        for (size_t at = rounded.size(); at < size; at *= 2) {
            cudaCheck(cudaMemcpyAsync(this->data + at, this->data, std::min(at, size - at) * sizeof(T),
                                      cudaMemcpyDeviceToDevice, stream));
        }
    }

    // The initial value of element i.
    double at(size_t i) const {
        return values_[i % period];
    }

private:
    static constexpr size_t period = 1048573;
    std::vector<float> values_;
};

// Positions within each of B rows of T tokens, and their order by position.
struct Positions {
    Array<int> positions, by_position;

    Positions(int B, int T, cudaStream_t stream)
        : positions((size_t)B * T, stream), by_position((size_t)B * T, stream) {
        int N = B * T;
        std::vector<int> values(N), sorted(N);
        for (int n = 0; n < N; n++) values[n] = n % T;
        sort_by_position(sorted.data(), values.data(), N);
        copy_to_device(positions.data, values.data(), N, stream);
        copy_to_device(by_position.data, sorted.data(), N, stream);
    }
};

// ----------------------------------------------------------------------------
// checks

// Measures how far results are from a double-precision reference, by the norm of the difference.
class Check {
public:
    // Compares a sample of an array's elements with want(i) for element i. No element of the array may be
    // NaN.
    template <typename T, typename Want>
    void compare(const Array<T>& array, double limit, Want&& want) {
        std::vector<T> values = array.host();
        compare(values, limit, want);
    }

    template <typename T, typename Want>
    void compare(const std::vector<T>& values, double limit, Want&& want) {
        constexpr int count = 64;
        size_t bad = 0;
#pragma omp parallel for reduction(+ : bad)
        for (size_t i = 0; i < values.size(); i++) bad += std::isnan(float(values[i]));
        double differences[count], norms[count];
#pragma omp parallel for schedule(dynamic)
        for (int n = 0; n < count; n++) {
            Random4 random = philox(99, n);
            size_t any = ((size_t)random.at[0] << 32 | random.at[1]) % values.size();
            size_t i = n == 0 ? 0 : n == 1 ? values.size() - 1 : any;
            double wanted = want(i), difference = float(values[i]) - wanted;
            differences[n] = difference * difference, norms[n] = wanted * wanted;
        }
        double difference = 0, norm = 0;
        for (int n = 0; n < count; n++) difference += differences[n], norm += norms[n];
        double error = bad ? INFINITY : std::sqrt(difference / std::max(norm, 1e-60));
        if (!(error / limit <= worst_)) worst_ = error / limit, error_ = error;
    }

    bool passed() const {
        return worst_ < 1;
    }
    // The error that is largest relative to its limit.
    double error() const {
        return error_;
    }

private:
    double worst_ = 0, error_ = 0;
};

// By the tanh formula.
inline double gelu_exactly(double x) {
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

inline double gelu_slope_exactly(double x) {
    constexpr double h = 1e-5;
    return (gelu_exactly(x + h) - gelu_exactly(x - h)) / (2 * h);
}

// Limits for results that are stored as floatX, and for fp32 sums.
constexpr double rounded_limit = sizeof(floatX) == 2 ? 8e-3 : 2e-5,
                 summed_limit = sizeof(floatX) == 2 ? 3e-4 : 1e-4;

// ----------------------------------------------------------------------------
// times

constexpr double element = sizeof(floatX), number = sizeof(float);  // bytes

// The least work of a kernel: operations, or bytes, each read or written once.
struct Work {
    double flops = 0, bytes = 0;
};

// Prints one line for each kernel and shape.
class Bench {
public:
    const cudaStream_t stream;
    const bool small;  // shapes that need no GPU

    Bench(cudaStream_t stream, bool small)
        : stream(stream),
          small(small),
          flush_(simulated ? 1 : flush_floats, stream),
          sums_(1 + sum_squares_scratch(flush_.size()), stream),
          events_{new_event(), new_event()} {
        if (simulated) {
            printf("%-26s %-38s %9s\n", "kernel", "shape", "error");
            return;
        }
        gemm_ = measured_gemm_rate(available_memory(), stream);
        copy_ = copy_rate();
        printf("largest product %sFLOP/s, copy %sB/s (read and written)\n", human(gemm_).c_str(),
               human(copy_).c_str());
        printf("%-26s %-38s %9s %10s %13s %9s\n", "kernel", "shape", "error", "us", "rate", "of most");
    }

    ~Bench() {
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
    }

    template <typename Shape>
    const std::vector<Shape>& pick(const std::vector<Shape>& of_gpus,
                                   const std::vector<Shape>& of_all) const {
        return small ? of_all : of_gpus;
    }

    // run() launches the kernel; look(Check&) checks the results of its first run.
    template <typename Run, typename Look>
    void row(const char* kernel, const std::string& shape, const Work& work, Run&& run, Look&& look) {
        run();
        cudaCheck(cudaStreamSynchronize(stream));
        Check check;
        look(check);
        if (!check.passed()) failed_++;
        printf("%-26s %-38s %9.1e", kernel, shape.c_str(), check.error());
        if (!simulated) {
            double seconds = median_seconds(run), rate = (work.flops > 0 ? work.flops : work.bytes) / seconds;
            printf(" %10.1f %7s%-6s %8.1f%%", seconds * 1e6, human(rate).c_str(),
                   work.flops > 0 ? "FLOP/s" : "B/s", 100 * rate / (work.flops > 0 ? gemm_ : copy_));
        }
        puts(check.passed() ? "" : "  WRONG");
        fflush(stdout);
    }

    int failed() const { return failed_; }

private:
    // Larger than any cache. It is only read: dirty lines would have to be written back while the next kernel
    // is timed.
    static constexpr size_t flush_floats = (size_t)(has_own_memory ? 64 : 16) << 20;

    static cudaEvent_t new_event() {
        cudaEvent_t event;
        cudaCheck(cudaEventCreate(&event));
        return event;
    }

    template <typename Run>
    double seconds(Run&& run) {
        sum_squares(sums_, sums_ + 1, flush_, {{0, flush_.size()}}, stream);
        cudaCheck(cudaEventRecord(events_[0], stream));
        run();
        cudaCheck(cudaEventRecord(events_[1], stream));
        cudaCheck(cudaEventSynchronize(events_[1]));
        float milliseconds = 0;
        cudaCheck(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]));
        return milliseconds / 1e3;
    }

    template <typename Run>
    double median_seconds(Run&& run) {
        constexpr double long_enough = 0.1;
        std::vector<double> times((size_t)std::clamp(long_enough / seconds(run), 5.0, 50.0));
        for (double& time : times) time = seconds(run);
        return median(times);
    }

    double copy_rate() {
        size_t bytes = (size_t)(has_own_memory ? 1024 : 64) << 20;
        Array<char> from(bytes, stream), to(bytes, stream);
        double time = median_seconds(
            [&] { cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream)); });
        return 2.0 * bytes / time;
    }

    Array<float> flush_, sums_;
    cudaEvent_t events_[2];
    double gemm_ = 0, copy_ = 0;
    int failed_ = 0;
};
