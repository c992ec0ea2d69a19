/*
Device and pinned memory. It is taken at the start, from an Arena. The same code asks an Arena that only
counts first, so that a MemoryPlan (comm/memory_plan.h) can say by classes what will be taken and whether it
fits.
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

// Bytes that a class of memory takes on this rank.
struct MemoryClass {
    const char* name;
    size_t bytes;
    bool on_host = false;  // host memory, most of it pinned
};

// Adds up what is on a device, which has memory of its own or the host's.
inline size_t memory_total(const std::vector<MemoryClass>& classes, bool own_memory = has_own_memory) {
    size_t total = 0;
    for (const MemoryClass& part : classes) total += part.on_host && own_memory ? 0 : part.bytes;
    return total;
}

// Adds up what is on the host.
inline size_t pinned_total(const std::vector<MemoryClass>& classes) {
    size_t total = 0;
    for (const MemoryClass& part : classes) total += part.on_host ? part.bytes : 0;
    return total;
}

inline std::string size_text(size_t bytes) {
    return bytes < (size_t)1 << 30 ? text("%.1f MiB", bytes / 0x1p20) : text("%.2f GiB", bytes / 0x1p30);
}

constexpr size_t library_code_memory = (size_t)256 << 20;

// Bytes kept back for the code of the libraries, and for what products use while they run.
inline size_t library_memory() {
    return library_code_memory + matmul_workspace();
}

// Bytes that a rank may take when `ranks` of them share the device: its part of the free memory, less a
// reserve for the libraries.
inline size_t available_memory(int ranks = 1) {
    size_t available, total;
    cudaCheck(cudaMemGetInfo(&available, &total));
    available /= ranks;
    return available - std::min(available, library_memory());
}

// Bytes of its host's memory that a rank may pin when `ranks` of them share the host. A reserve stays for
// the program, the libraries, and files that are being read.
inline size_t available_host_memory(int ranks) {
    constexpr size_t kept = (size_t)1 << 30;
    size_t available = host_available_memory() / ranks;
    return available - std::min(available, kept);
}

template <typename T>
void allocate(T*& pointer, size_t count, bool on_host = false, bool is_floatX = false) {
    size_t bytes = count * sizeof(T);
    if (ledger) {
        // in this build or on the card, elements are larger
        pointer =
            ledger->imagine<T*>(std::max(bytes, count * ledger->card.element_bytes), is_floatX, on_host);
        return;
    }
    cudaError_t error =
        on_host ? cudaMallocHost((void**)&pointer, bytes) : cudaMalloc((void**)&pointer, bytes);
    if (error == cudaErrorMemoryAllocation) {
        fail("cannot allocate %s of %s memory; free some, or %s", size_text(bytes).c_str(),
             on_host ? "host" : "device",
             on_host ? "do without --async-save and --offload" : "choose a smaller --micro-batch or --model");
    }
    cudaCheck(error);
}

inline void release(void* pointer, bool on_host) {
    if (!is_imagined(pointer)) on_host ? cudaFreeHost(pointer) : cudaFree(pointer);
}

// Memory for as long as this lives.
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

// Memory by class, for as long as the arena lives. Each array is an allocation of its own, so that tools that
// watch memory see an access beyond its end.
class Arena {
public:
    // An arena that only counts has null for all arrays. It may count for a program of other numbers than
    // this one's: element_bytes is the size that these have there.
    enum Mode { takes, counts };
    explicit Arena(Mode mode = takes, size_t element_bytes = ::element_bytes())
        : mode_(mode), element_bytes_(element_bytes) {
        if (mode == takes && !ledger && element_bytes != sizeof(floatX))
            fail("memory: numbers of %zu bytes can only be counted here; take those of this build",
                 element_bytes);
    }
    ~Arena() {
        for (auto [pointer, on_host] : taken_) ::release(pointer, on_host);
        for (void* pointer : pages_) free(pointer);
    }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Makes the class of all that is taken from now on.
    Arena& of(const char* name, bool on_host = false) {
        auto is_it = [&](const MemoryClass& one) { return std::string_view(one.name) == name; };
        current_ = std::find_if(classes_.begin(), classes_.end(), is_it) - classes_.begin();
        if (current_ == classes_.size()) classes_.push_back({name, 0, on_host});
        return *this;
    }

    // (count) elements of no particular value. An array of none is null.
    template <typename T>
    T* take(size_t count) {
        return take<T>(count, false);
    }

    // (count) numbers as parameters and activations are made of, likewise.
    floatX* take_elements(size_t count) { return take<floatX>(count, true); }

    // (count) zeros, once the stream has come so far.
    template <typename T>
    T* take_zeros(size_t count, cudaStream_t stream) {
        return zeroed(take<T>(count), count, stream);
    }
    floatX* take_zero_numbers(size_t count, cudaStream_t stream) {
        return zeroed(take_elements(count), count, stream);
    }

    // (count) zeros in memory of the host that is not pinned: the system gives it out page by page, where it
    // is written to.
    template <typename T>
    T* take_pages(size_t count) {
        return pages((T*)nullptr, count, false);
    }
    floatX* take_pages_of_elements(size_t count) { return pages((floatX*)nullptr, count, true); }

    bool only_counts() const { return mode_ == counts; }
    size_t element_bytes() const { return element_bytes_; }

    // Lists the classes in the order in which they were first named, without those that have nothing.
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

    // Adds an array to the current class; false: it is only counted.
    template <typename T>
    bool counts_in(size_t count, bool is_floatX) {
        classes_.at(current_).bytes += count * (is_floatX ? element_bytes_ : sizeof(T));
        return count > 0 && mode_ == takes;
    }

    template <typename T>
    T* pages(T* pointer, size_t count, bool is_floatX) {
        if (!counts_in<T>(count, is_floatX)) return nullptr;
        if (ledger) {
            allocate(pointer, count, true, is_floatX);
            return pointer;
        }
        pointer = (T*)calloc(count, sizeof(T));
        if (!pointer)
            fail("cannot allocate %s of host memory; free some, or ask for less",
                 size_text(count * sizeof(T)).c_str());
        pages_.push_back(pointer);
        return pointer;
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
    std::vector<std::pair<void*, bool>> taken_;  // and whether it is on the host
    std::vector<void*> pages_;
};

// The classes of what Arrays(arena, args...) takes.
template <typename Arrays, typename... Args>
std::vector<MemoryClass> memory_of(const Args&... args) {
    Arena counted(Arena::counts);
    Arrays(counted, args...);
    return counted.classes();
}

// The stream that computes; it ends when its work does.
struct ComputeStream {
    cudaStream_t stream;
    ComputeStream() : stream(new_stream()) {}
    ~ComputeStream() { end_stream(stream); }
    ComputeStream(const ComputeStream&) = delete;
    ComputeStream& operator=(const ComputeStream&) = delete;
};
