#include "test/nocard/device_memory.h"

#include <algorithm>
#include <cstring>
#include <cuda_runtime.h>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <sys/mman.h>
#include <unistd.h>

#include "test/nocard/cards.h"
#include "test/nocard/errors.h"
#include "test/nocard/fault.h"
#include "test/nocard/report.h"
#include "test/nocard/streams.h"

namespace nocard {
namespace {

constexpr size_t page = 4096, large_page = 2 << 20;

size_t rounded(size_t bytes, size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

char* map_pages(size_t bytes) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* pages = mmap(nullptr, rounded(bytes, page), PROT_READ | PROT_WRITE, flags, -1, 0);
    return pages == MAP_FAILED ? nullptr : (char*)pages;
}

// Fills memory with the bits of NaNs. Large allocations are private mappings of the same pages, which use
// host memory only once they are written: a program may allocate all memory of a card and use little of it.
void fill_with_nans(char* begin, size_t bytes) {
    constexpr size_t piece = 16 << 20;
    static const int nans = [] {
        int file = memfd_create("nans", 0);
        std::string content(piece, '\xff');
        if (file < 0 || write(file, content.data(), piece) != (ssize_t)piece)
            fault("cudaMalloc", "no memory of the host");
        return file;
    }();
    size_t at = 0;
    for (; at + piece <= bytes; at += piece) {
        void* place = begin + at;
        if (mmap(place, piece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, nans, 0) !=
            place)
            fault("cudaMalloc", "no memory of the host");
    }
    memset(begin + at, 0xff, bytes - at);
}

struct Numbered : Allocation {
    uint64_t number = 0;
};

class Allocations {
public:
    // Returns null if out of memory.
    char* make(size_t bytes, bool device) {
        std::unique_lock lock(mutex_);
        if (device && taken_with(bytes) > card().memory) return nullptr;
        Numbered made;
        made.begin = map_pages(bytes);
        made.bytes = bytes;
        made.device = device;
        made.written = (uint8_t*)map_pages((bytes + 3) / 4);
        if (!made.begin || !made.written) return nullptr;
        if (device) {
            fill_with_nans(made.begin, bytes);
            (bytes < small ? small_bytes_ : large_bytes_) +=
                bytes < small ? rounded(bytes, 512) : rounded(bytes, large_page);
        } else {
            memset(made.begin, 0xff, bytes);
            made.written = nullptr;  // the host also writes to it, untracked
        }
        made.number = ++made_;
        live_[made.begin] = made;
        return made.begin;
    }

    void release(const Allocation& allocation) {
        std::unique_lock lock(mutex_);
        size_t bytes = allocation.bytes;
        if (allocation.device) {
            (bytes < small ? small_bytes_ : large_bytes_) -=
                bytes < small ? rounded(bytes, 512) : rounded(bytes, large_page);
        }
        munmap(allocation.begin, rounded(bytes, page));
        if (allocation.written) munmap(allocation.written, rounded((bytes + 3) / 4, page));
        live_.erase(allocation.begin);
    }

    const Numbered* find(const void* address) {
        std::shared_lock lock(mutex_);
        auto after = live_.upper_bound((char*)address);
        if (after == live_.begin()) return nullptr;
        const Numbered& allocation = std::prev(after)->second;
        return (char*)address < allocation.begin + allocation.bytes ? &allocation : nullptr;
    }

    // Describes the nearest allocation that begins before the address, for messages.
    std::string place(const void* address) {
        std::shared_lock lock(mutex_);
        auto after = live_.upper_bound((char*)address);
        if (after == live_.begin()) return "";
        const Allocation& allocation = std::prev(after)->second;
        return text(", %zu bytes into an allocation of %zu bytes",
                    (size_t)((char*)address - allocation.begin), allocation.bytes);
    }

    size_t free_bytes() {
        std::shared_lock lock(mutex_);
        size_t taken = taken_with(0);
        return card().memory - std::min(taken, card().memory);
    }

    void take(size_t bytes) {
        std::unique_lock lock(mutex_);
        library_bytes_ += bytes;
    }
    void give_back(size_t bytes) {
        std::unique_lock lock(mutex_);
        library_bytes_ -= bytes;
    }

    Leaks left() {
        std::shared_lock lock(mutex_);
        Leaks leaks;
        for (auto& [begin, allocation] : live_) {
            if (!allocation.device) leaks.pinned++;
            if (allocation.device) leaks.device++, leaks.device_bytes += allocation.bytes;
        }
        return leaks;
    }

private:
    // Like drivers: small allocations share pages of 2 MiB, and others begin their own.
    static constexpr size_t small = 1 << 20;
    static constexpr size_t of_context = size_t(520) << 20;

    size_t taken_with(size_t bytes) const {
        return of_context + library_bytes_ + large_bytes_ + rounded(small_bytes_, large_page) + bytes;
    }

    std::shared_mutex mutex_;
    std::map<char*, Numbered> live_;  // pointers to its nodes stay valid
    uint64_t made_ = 0;
    size_t small_bytes_ = 0, large_bytes_ = 0, library_bytes_ = 0;
};

Allocations& allocations() {
    static Allocations& all = *new Allocations;
    return all;
}

std::string bytes_at(const char* what, const void* address, size_t bytes) {
    return text("%s, %zu bytes at %p", what, bytes, address);
}

// Returns the result of a call that frees memory, or ends the process.
cudaError_t release(const char* call, void* pointer, bool device) {
    if (in_host_function()) fault(call, "called by a host function, which may not call CUDA");
    if (cudaError_t forbidden = refused_by_capture()) return noted(forbidden);
    if (!pointer) return cudaSuccess;
    const Allocation* allocation = allocations().find(pointer);
    const char* kind = device ? "memory of the card" : "pinned memory";
    if (!allocation || allocation->begin != pointer || allocation->device != device)
        fault(call, text("%p is no %s that was allocated and not freed%s", pointer, kind,
                         allocations().place(pointer).c_str()));
    if (std::string user = user_of(allocation->begin, allocation->bytes); !user.empty())
        fault(call,
              text("%s is not done, and uses the %zu bytes at %p", user.c_str(), allocation->bytes, pointer));
    allocations().release(*allocation);
    return cudaSuccess;
}

cudaError_t allocate(const char* call, void** pointer, size_t bytes, bool device) {
    if (in_host_function()) fault(call, "called by a host function, which may not call CUDA");
    *pointer = nullptr;
    if (cudaError_t forbidden = refused_by_capture()) return noted(forbidden);
    if (bytes == 0) return cudaSuccess;
    *pointer = allocations().make(bytes, device);
    report_allocation(device);
    return noted(*pointer ? cudaSuccess : cudaErrorMemoryAllocation);
}

}  // namespace

const Allocation* find_allocation(const void* address) {
    return allocations().find(address);
}

uint64_t allocation_number(const void* address) {
    const Numbered* allocation = allocations().find(address);
    return allocation ? allocation->number : 0;
}

Memory memory_of(const void* address) {
    const Allocation* allocation = find_allocation(address);
    return !allocation ? Memory::pageable : allocation->device ? Memory::device : Memory::pinned;
}

void require_device(const std::string& call, const char* what, const void* address, size_t bytes) {
    if (bytes == 0) return;
    const Allocation* allocation = find_allocation(address);
    if (!allocation || !allocation->device)
        fault(call, bytes_at(what, address, bytes) + ": is not live memory of the card" +
                        allocations().place(address));
    if ((const char*)address + bytes > allocation->begin + allocation->bytes)
        fault(call,
              bytes_at(what, address, bytes) + ": goes beyond its allocation" + allocations().place(address));
}

void require_reachable(const std::string& call, const char* what, const void* address, size_t bytes) {
    const Allocation* allocation = find_allocation(address);
    if (!allocation || allocation->device) return require_device(call, what, address, bytes);
    if ((const char*)address + bytes > allocation->begin + allocation->bytes)
        fault(call, bytes_at(what, address, bytes) + ": goes beyond its pinned memory" +
                        allocations().place(address));
}

// Returns whether all of this memory is mapped into the process.
static bool is_mapped(const void* address, size_t bytes) {
    auto begin = (uintptr_t)address / page * page, end = rounded((uintptr_t)address + bytes, page);
    std::vector<unsigned char> pages((end - begin) / page);
    return mincore((void*)begin, end - begin, pages.data()) == 0;
}

void require_host(const std::string& call, const char* what, const void* address, size_t bytes) {
    if (bytes == 0) return;
    const Allocation* allocation = find_allocation(address);
    const Allocation* last = find_allocation((const char*)address + bytes - 1);
    if ((allocation && allocation->device) || (last && last->device))
        fault(call, bytes_at(what, address, bytes) + ": is memory of the card, not of the host");
    if (allocation != last)
        fault(call, bytes_at(what, address, bytes) + ": goes beyond its pinned memory" +
                        allocations().place(address));
    if (!allocation && !is_mapped(address, bytes))
        fault(call, bytes_at(what, address, bytes) +
                        ": is memory of nobody, as that of the card is once it is freed" +
                        allocations().place(address));
}

void note_written(const void* address, size_t bytes) {
    if (bytes == 0) return;
    if (const Allocation* allocation = find_allocation(address))
        mark_written(*allocation, (size_t)((const char*)address - allocation->begin), bytes);
}

void require_written(const std::string& call, const char* what, const void* address, size_t bytes) {
    if (bytes == 0) return;
    const Allocation* allocation = find_allocation(address);
    if (allocation && !is_written(*allocation, (size_t)((const char*)address - allocation->begin), bytes))
        fault(call, bytes_at(what, address, bytes) + ": reads bytes that nobody wrote" +
                        allocations().place(address));
}

void copy_written(const void* to, const void* from, size_t bytes) {
    const Allocation* source = find_allocation(from);
    const Allocation* destination = find_allocation(to);
    if (bytes == 0 || !destination || !destination->written) return;
    size_t begin = (size_t)((const char*)to - destination->begin);
    if (!source || !source->written) return mark_written(*destination, begin, bytes);
    size_t other = (size_t)((const char*)from - source->begin);
    if (is_written(*source, other, bytes)) return mark_written(*destination, begin, bytes);
    for (size_t i = 0; i < bytes; i++) {
        uint8_t bit = uint8_t(1 << (begin + i) % 4);
        uint8_t& shadow = destination->written[(begin + i) / 4];
        shadow = is_written(*source, other + i, 1) ? shadow | bit : shadow & (uint8_t)~bit;
    }
}

void take_library_memory(size_t bytes) {
    allocations().take(bytes);
}

void return_library_memory(size_t bytes) {
    allocations().give_back(bytes);
}

Leaks leaks() {
    return allocations().left();
}

}  // namespace nocard

using namespace nocard;

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    return allocate("cudaMalloc", pointer, bytes, true);
}

cudaError_t cudaFree(void* pointer) {
    return release("cudaFree", pointer, true);
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
    return allocate("cudaMallocHost", pointer, bytes, false);
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
    return allocate("cudaHostAlloc", pointer, bytes, false);
}

cudaError_t cudaFreeHost(void* pointer) {
    return release("cudaFreeHost", pointer, false);
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
    *free_bytes = allocations().free_bytes();
    *total = card().memory;
    return cudaSuccess;
}
}
