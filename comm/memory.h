/*
Device and pinned memory, allocated once at the start, from an Arena. The same code first runs with an Arena
that only counts, so that a MemoryPlan (comm/memory_plan.h) can report, by class, what will be taken and
whether it fits.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/base/error.h"      // fail, text
#include "kernels/common.cuh"     // the CUDA runtime, cudaCheck, has_own_memory
#include "kernels/host_memory.h"  // host_available_memory
#include "kernels/matmul.cuh"     // matmul_workspace
#include "kernels/streams.cuh"    // copy_async, zero_async, Event

// Bytes that a class of memory occupies on this rank.
struct MemoryClass {
    const char* name;
    size_t bytes;
    bool on_host = false;  // host memory, most of it pinned
};

// Total on the device. A device without memory of its own uses the host's, so everything counts.
inline size_t memory_total(const std::vector<MemoryClass>& classes, bool own_memory = has_own_memory) {
    size_t total = 0;
    for (const MemoryClass& part : classes) total += part.on_host && own_memory ? 0 : part.bytes;
    return total;
}

// Total in host memory.
inline size_t pinned_total(const std::vector<MemoryClass>& classes) {
    size_t total = 0;
    for (const MemoryClass& part : classes) total += part.on_host ? part.bytes : 0;
    return total;
}

inline std::string size_text(size_t bytes) {
    return bytes < (size_t)1 << 30 ? text("%.1f MiB", bytes / 0x1p20) : text("%.2f GiB", bytes / 0x1p30);
}

constexpr size_t library_code_memory = (size_t)256 << 20;

// Bytes reserved for the code of the libraries and for the workspace of matrix products.
inline size_t library_memory() {
    return library_code_memory + matmul_workspace();
}

// Bytes that a rank may use when `ranks` of them share the device: its share of the free memory, less a
// reserve for the libraries.
inline size_t available_memory(int ranks = 1) {
    size_t available, total;
    if (has_own_memory)
        cudaCheck(cudaMemGetInfo(&available, &total)), available /= ranks;
    else
        available = host_available_memory(ranks);
    return available - std::min(available, library_memory());
}

// Bytes that a rank may pin when `ranks` of them share the host. Keeps a reserve for the program, the
// libraries, and files that are being read.
inline size_t available_host_memory(int ranks) {
    constexpr size_t kept = (size_t)1 << 30;
    size_t available = host_available_memory(ranks);
    return available - std::min(available, kept);
}

template <typename T>
void allocate(T*& pointer, size_t count, bool on_host = false, bool is_floatX = false) {
    size_t bytes = count * sizeof(T);
    if (ledger) {
        // the larger of an element's sizes in this build and on the ledger's card
        pointer =
            ledger->imagine<T*>(std::max(bytes, count * ledger->card.element_bytes), is_floatX, on_host);
        return;
    }
    cudaError_t error =
        on_host ? cudaMallocHost((void**)&pointer, bytes) : cudaMalloc((void**)&pointer, bytes);
    if (error == cudaErrorMemoryAllocation) {
        fail("cannot allocate %s of %s memory; free some, or %s", size_text(bytes).c_str(),
             on_host ? "host" : "device",
             on_host ? "turn off --async-save and --offload" : "choose a smaller --micro-batch or --model");
    }
    cudaCheck(error);
}

inline void release(void* pointer, bool on_host) {
    if (!is_imagined(pointer)) on_host ? cudaFreeHost(pointer) : cudaFree(pointer);
}

// Memory for the lifetime of this object.
template <typename T, bool on_host>
struct OwnedArray {
    T* data;

    explicit OwnedArray(size_t count) { allocate(data, count, on_host); }
    ~OwnedArray() { release(data, on_host); }
    OwnedArray(const OwnedArray&) = delete;
    OwnedArray& operator=(const OwnedArray&) = delete;
};
template <typename T>
using DeviceArray = OwnedArray<T, false>;
template <typename T>
using HostArray = OwnedArray<T, true>;  // pinned

// Memory by class, freed with the arena. Each array is a separate allocation, so that memory checkers see an
// access beyond its end.
class Arena {
public:
    // A counting arena returns null for all arrays. It may count for a build other than this one:
    // element_bytes is the size of a floatX there.
    enum Mode { takes, counts };
    explicit Arena(Mode mode = takes, size_t element_bytes = ::element_bytes())
        : mode_(mode), element_bytes_(element_bytes) {
        if (mode == takes && !ledger && element_bytes != sizeof(floatX))
            fail("memory: elements of %zu bytes can only be counted; allocate elements of this build",
                 element_bytes);
    }
    ~Arena() {
        for (auto [pointer, on_host] : taken_) ::release(pointer, on_host);
        for (void* pointer : pages_) free(pointer);
    }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Sets the class of everything taken from now on.
    Arena& of(const char* name, bool on_host = false) {
        auto is_it = [&](const MemoryClass& one) { return std::string_view(one.name) == name; };
        current_ = std::find_if(classes_.begin(), classes_.end(), is_it) - classes_.begin();
        if (current_ == classes_.size()) classes_.push_back({name, 0, on_host});
        return *this;
    }

    // (count) uninitialized elements. Null if count is 0.
    template <typename T>
    T* take(size_t count) {
        return take<T>(count, false);
    }

    // (count) uninitialized floatX, each counted as element_bytes.
    floatX* take_elements(size_t count) { return take<floatX>(count, true); }

    // (count) zeros, once the stream reaches this point.
    template <typename T>
    T* take_zeros(size_t count, cudaStream_t stream) {
        return zeroed(take<T>(count), count, stream);
    }
    floatX* take_zero_numbers(size_t count, cudaStream_t stream) {
        return zeroed(take_elements(count), count, stream);
    }

    // (count) zeros in unpinned host memory: the system provides each page when it is first written.
    template <typename T>
    T* take_pages(size_t count) {
        T* pointer = nullptr;
        if (!counts_in<T>(count, false)) return nullptr;
        if (ledger) {
            allocate(pointer, count, true);
            return pointer;
        }
        pointer = (T*)calloc(count, sizeof(T));
        if (!pointer)
            fail("cannot allocate %s of host memory; free some, or ask for less",
                 size_text(count * sizeof(T)).c_str());
        pages_.push_back(pointer);
        return pointer;
    }

    bool only_counts() const { return mode_ == counts; }
    size_t element_bytes() const { return element_bytes_; }

    // Lists the classes in the order in which they were first named, without empty ones.
    std::vector<MemoryClass> classes() const {
        std::vector<MemoryClass> result = classes_;
        std::erase_if(result, [](const MemoryClass& one) { return one.bytes == 0; });
        return result;
    }

    // Adds up all classes, on the device and on the host.
    size_t bytes() const {
        size_t bytes = 0;
        for (const MemoryClass& one : classes_) bytes += one.bytes;
        return bytes;
    }

private:
    template <typename T>
    static T* zeroed(T* pointer, size_t count, cudaStream_t stream) {
        if (pointer) zero_async(pointer, count, stream);
        return pointer;
    }

    // Adds an array to the current class. Returns whether to allocate it: not if it is empty or only counted.
    template <typename T>
    bool counts_in(size_t count, bool is_floatX) {
        classes_.at(current_).bytes += count * (is_floatX ? element_bytes_ : sizeof(T));
        return count > 0 && mode_ == takes;
    }

    template <typename T>
    T* take(size_t count, bool is_floatX) {
        MemoryClass& its_class = classes_.at(current_);
        if (!counts_in<T>(count, is_floatX)) return nullptr;
        T* pointer;
        allocate(pointer, count, its_class.on_host, is_floatX);
        taken_.push_back({pointer, its_class.on_host});
        return pointer;
    }

    const Mode mode_;
    const size_t element_bytes_;
    std::vector<MemoryClass> classes_;
    size_t current_ = 0;
    std::vector<std::pair<void*, bool>> taken_;  // (pointer, on host)
    std::vector<void*> pages_;
};

// The memory of Arrays(arena, args...), by class. element_bytes: of a floatX
template <typename Arrays, typename... Args>
std::vector<MemoryClass> memory_of(size_t element_bytes, const Args&... args) {
    Arena counted(Arena::counts, element_bytes);
    Arrays(counted, args...);
    return counted.classes();
}

// The compute stream. The destructor waits for its work.
struct ComputeStream {
    cudaStream_t stream;
    ComputeStream() : stream(new_stream()) {}
    ~ComputeStream() { end_stream(stream); }
    ComputeStream(const ComputeStream&) = delete;
    ComputeStream& operator=(const ComputeStream&) = delete;
};
