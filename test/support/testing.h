/*
Shared by the tests: device buffers that start poisoned, reproducible random data, and comparison with a
double-precision reference.
*/
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/common.cuh"
#include "kernels/random.cuh"
#include "kernels/streams.cuh"
#include "test/support/cases.h"

constexpr bool on_cpu = std::string_view(device_name) == "cpu";

// Everything under test runs on this stream.
inline cudaStream_t test_stream() {
    static cudaStream_t stream = [] {
        cudaStream_t created;
        cudaCheck(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking));
        return created;
    }();
    return stream;
}

// Device memory of exactly `size` elements. It starts as NaN bit patterns (0xff bytes), so an element that a
// kernel failed to write, or read and should not have, shows in the result.
template <typename T>
class Buffer {
public:
    explicit Buffer(size_t size) : size_(size) {
        cudaCheck(cudaMalloc((void**)&data_, std::max<size_t>(size, 1) * sizeof(T)));
        cudaCheck(cudaMemsetAsync(data_, 0xff, size * sizeof(T), test_stream()));
        cudaCheck(cudaStreamSynchronize(test_stream()));
    }

    explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
        copy_to_device(data_, values.data(), size_, test_stream());
    }

    // Converts, so that a Buffer<floatX> is made from float data.
    template <typename U>
    requires(!std::is_same_v<T, U>) explicit Buffer(const std::vector<U>& values)
        : Buffer(std::vector<T>(values.begin(), values.end())) {}

    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { cudaFree(data_); }

    operator T*() { return data_; }
    size_t size() const { return size_; }

    // Waits for the test stream.
    std::vector<T> host() const {
        cudaCheck(cudaStreamSynchronize(test_stream()));
        std::vector<T> values(size_);
        cudaCheck(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }

    std::vector<double> doubles() const {
        std::vector<double> values;
        for (T value : host()) values.push_back((double)(float)value);
        return values;
    }

private:
    T* data_ = nullptr;
    size_t size_;
};

// Normal numbers, rounded to T, so that the reference sees what the kernel sees.
template <typename T>
std::vector<T> random_values(const char* name, size_t size, float scale = 1.0f, float shift = 0.0f) {
    std::vector<T> values(size);
    uint64_t key = random_key(1234, name);
    for (size_t i = 0; i < size; i++) values[i] = T(random_normal(key, i) * scale + shift);
    return values;
}

// Random row numbers of a table with `count` rows.
inline std::vector<int> random_rows(const char* name, size_t size, int count) {
    std::vector<int> rows(size);
    uint64_t key = random_key(1234, name);
    for (size_t i = 0; i < size; i++) rows[i] = (int)(philox(key, i).at[0] % (uint32_t)count);
    return rows;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <typename T>
std::vector<double> to_doubles(const std::vector<T>& values) {
    std::vector<double> result;
    for (T value : values) result.push_back((double)(float)value);
    return result;
}

// ||got - want|| / ||want||; NaN anywhere gives infinity.
inline double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
    REQUIRE(got.size() == want.size());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < got.size(); i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    double error = std::sqrt(difference / std::max(norm, 1e-60));
    return std::isnan(error) ? INFINITY : error;
}

// Only for rounding to T: results stored as floatX in bf16 are right to 2^-9, fp32 sums to about 1e-6.
constexpr double tolerance_of_bf16 = 8e-3;
template <typename T>
constexpr double tolerance = std::is_same_v<T, float> ? 2e-5 : tolerance_of_bf16;

#define CHECK_CLOSE(buffer, reference, limit) CHECK(relative_error((buffer).doubles(), reference) < (limit))
