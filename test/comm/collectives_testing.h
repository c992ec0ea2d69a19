/*
Shared by the tests of collectives: all ranks as a group, guarded buffers filled with numbers that every rank
can compute for every other, and the expected sums.
*/
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <type_traits>

#include "comm/collectives.h"      // ncclCheck, nccl_type
#include "test/support/ranks.h"    // test_world
#include "test/support/testing.h"  // Buffer, test_stream

// ----------------------------------------------------------------------------
// ranks and streams

// Returns a communicator of all ranks, made by calling NCCL directly.
inline ncclComm_t everyone() {
    static ncclComm_t comm = [] {
        ncclUniqueId id = {};
        if (test_world().rank() == 0) ncclCheck(ncclGetUniqueId(&id));
        test_world().broadcast(&id, sizeof id, 0);
        ncclComm_t made = nullptr;
        ncclCheck(ncclCommInitRankConfig(&made, test_world().size(), id, test_world().rank(), nullptr));
        return made;
    }();
    return comm;
}

inline int rank_of(ncclComm_t comm) {
    int rank = -1;
    ncclCheck(ncclCommUserRank(comm, &rank));
    return rank;
}

inline int size_of(ncclComm_t comm) {
    int size = -1;
    ncclCheck(ncclCommCount(comm, &size));
    return size;
}

inline cudaStream_t second_stream() {
    static cudaStream_t stream = [] {
        cudaStream_t created;
        cudaCheck(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking));
        return created;
    }();
    return stream;
}

inline void synchronize() {
    cudaCheck(cudaStreamSynchronize(test_stream()));
    cudaCheck(cudaStreamSynchronize(second_stream()));
}

// Runs `task` on the stream. The task must outlive its run.
inline void enqueue(cudaStream_t stream, std::function<void()>& task) {
    cudaCheck(cudaLaunchHostFunc(
        stream, [](void* data) { (*static_cast<std::function<void()>*>(data))(); }, &task));
}

// ----------------------------------------------------------------------------
// data

struct Bf16 {
    uint16_t bits;

    Bf16() = default;
    explicit Bf16(float value) {  // rounds to nearest even in double, unlike the tested code
        float low = std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0xffff0000u);
        float high = std::bit_cast<float>((std::bit_cast<uint32_t>(value) & 0xffff0000u) + 0x10000u);
        double to_low = std::fabs((double)value - low), to_high = std::fabs((double)high - value);
        bool even = (std::bit_cast<uint32_t>(low) >> 16 & 1) == 0;
        float nearest = to_low < to_high || (to_low == to_high && even) ? low : high;
        bits = (uint16_t)(std::bit_cast<uint32_t>(nearest) >> 16);
    }
    explicit operator double() const { return std::bit_cast<float>((uint32_t)bits << 16); }
    bool operator==(const Bf16&) const = default;
};

template <typename T>
constexpr ncclDataType_t type_of() {
    if constexpr (std::is_same_v<T, Bf16>)
        return ncclBfloat16;
    else
        return nccl_type<T>();
}

// Element i of a rank's input: small integers, or numbers in [-1, 1) with 24 bits. (Uses the finalizer
// of SplitMix64, which is faster than philox.)
template <typename T>
T input(int rank, size_t i) {
    uint64_t bits = (i + ((uint64_t)rank << 40) + 1) * 0x9e3779b97f4a7c15u;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    if constexpr (std::is_integral_v<T>)
        return (T)((bits >> 40) % 40);
    else
        return T((float)((int64_t)(bits >> 40) - (1 << 23)) * 0x1p-23f);
}

template <typename T>
std::vector<T> inputs(int rank, size_t begin, size_t end) {
    std::vector<T> values(end - begin);
    for (size_t i = begin; i < end; i++) values[i - begin] = input<T>(rank, i);
    return values;
}

// Device memory between two guards, initially poisoned.
template <typename T>
class Guarded {
public:
    explicit Guarded(size_t size) : size_(size), memory_(size + 2 * guard) {}
    Guarded(size_t size, size_t at, const std::vector<T>& values) : Guarded(size) {
        if (values.size()) copy_to_device(data() + at, values.data(), values.size(), test_stream());
    }

    T* data() { return memory_ + guard; }
    std::vector<T> host() {
        synchronize();
        auto all = memory_.host();
        return {all.begin() + guard, all.end() - guard};
    }
    bool guards_hold() {
        auto all = memory_.host();
        std::vector<T> guards(all.begin(), all.begin() + guard), poison(2 * guard);
        guards.insert(guards.end(), all.end() - guard, all.end());
        memset((void*)poison.data(), 0xff, 2 * guard * sizeof(T));
        return same_bits(guards, poison);
    }

private:
    static constexpr size_t guard = 16;
    size_t size_;
    Buffer<T> memory_;
};

// The sum of all ranks' inputs, in double precision or exactly. For bf16 every addition is rounded, so inputs
// are added in the order of the ring: chunk c begins with rank `first + c`.
template <typename T>
std::vector<double> reduced(const std::vector<int>& members, size_t count, int first) {
    int n = (int)members.size();
    std::vector<double> result(count);
    for (int c = 0; c < n; c++) {
        size_t rest = count % (size_t)n, whole = count / (size_t)n;
        size_t begin = whole * (size_t)c + std::min((size_t)c, rest),
               end = begin + whole + ((size_t)c < rest);
        for (size_t i = begin; i < end; i++) {
            double sum = (double)input<T>(members[(size_t)((c + first) % n)], i);
            for (int k = 1; k < n; k++) {
                double next = (double)input<T>(members[(size_t)((c + first + k) % n)], i);
                sum += next;
                if (std::is_same_v<T, Bf16>) sum = (double)Bf16((float)sum);
            }
            result[i] = sum;
        }
    }
    return result;
}

template <typename T>
bool close(const std::vector<T>& got, const std::vector<double>& want) {
    std::vector<double> values;
    for (T value : got) values.push_back((double)value);
    // bf16 sums are computed in a known order, and integer sums do not depend on it
    if (!std::is_same_v<T, float>) return values == want;
    return relative_error(values, want) < 1e-6;
}

inline std::vector<int> all_members() {
    std::vector<int> members;
    for (int r = 0; r < test_world().size(); r++) members.push_back(r);
    return members;
}

// Returns whether all ranks hold the same bits as rank 0.
template <typename T>
bool same_everywhere(const std::vector<T>& mine) {
    Guarded<uint8_t> bytes(mine.size() * sizeof(T));
    if (mine.size()) copy_to_device((T*)bytes.data(), mine.data(), mine.size(), test_stream());
    ncclCheck(ncclBroadcast(bytes.data(), bytes.data(), mine.size() * sizeof(T), ncclUint8, 0, everyone(),
                            test_stream()));
    auto of_root = bytes.host();
    return mine.empty() || memcmp(of_root.data(), mine.data(), of_root.size()) == 0;
}
