/*
The address space of the simulated device: where device memory, stacks and shared memory lie, and which parts
are alive.
*/
#pragma once

#include <cstdint>
#include <link.h>
#include <new>
#include <sys/mman.h>

namespace simt {

constexpr size_t page = 4096;

struct Region {
    uintptr_t begin = 0;
    size_t size = 0;

    bool holds(uintptr_t at) const { return at - begin < size; }
};

// Reserves address space without memory. After mprotect, each page gets memory when it is first touched.
inline Region reserve(size_t size, int protection = PROT_NONE) {
    void* at = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    return {(uintptr_t)at, size};
}

// ----------------------------------------------------------------------------
// device memory

// Allocations begin on a page boundary and end before a page without access, and addresses are never reused,
// so almost every stray access faults. Counting the valid bytes of each page makes the check exact.
class DeviceMemory {
public:
    DeviceMemory()
        : region_(reserve(size_t(1) << 40)),
          valid_((uint16_t*)reserve(region_.size / page * sizeof(uint16_t), PROT_READ | PROT_WRITE).begin),
          next_(region_.begin) {}

    bool holds(uintptr_t at) const { return region_.holds(at); }

    // Callers ensure that one thread at a time allocates or frees.
    void* allocate(size_t bytes) {
        size_t pages = (bytes + page - 1) / page;
        if (taken(pages) > (region_.begin + region_.size - next_) / page) return nullptr;
        if (mprotect((void*)next_, pages * page, PROT_READ | PROT_WRITE) != 0) return nullptr;
        uint16_t* valid = &valid_[(next_ - region_.begin) / page];
        for (size_t i = 0; i < pages; i++)
            valid[i] = (uint16_t)(bytes - i * page < page ? bytes - i * page : page);
        void* result = (void*)next_;
        next_ += taken(pages) * page;
        return result;
    }

    // Returns the number of bytes, from `pointer` on, that will never be in use again.
    size_t release(void* pointer) {
        uint16_t* valid = &valid_[((uintptr_t)pointer - region_.begin) / page];
        size_t pages = 0;
        while (valid[pages]) valid[pages++] = 0;
        mmap(pointer, pages * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0);
        return taken(pages) * page;
    }

    // Offsets of an address in the region, and in its allocation.
    size_t place(uintptr_t at) const { return at - region_.begin; }
    size_t offset(uintptr_t at) const {
        size_t first = place(at) / page;
        while (first > 0 && valid_[first - 1]) first--;
        return place(at) - first * page;
    }
    size_t size() const { return region_.size; }

    bool alive(uintptr_t at, size_t bytes) const {
        size_t first = at - region_.begin, last = first + bytes - 1;
        if (last >= region_.size || last % page >= valid_[last / page]) return false;
        for (size_t p = first / page; p < last / page; p++) {
            if (valid_[p] < page) return false;
        }
        return true;
    }

private:
    // The pages of an allocation including the one without access, rounded up to an even number: the metadata
    // of two pages fills whole pages.
    static size_t taken(size_t pages) { return (pages + 2) / 2 * 2; }

    Region region_;
    uint16_t* valid_;  // (pages) valid bytes of each, from its start
    uintptr_t next_;
};

// ----------------------------------------------------------------------------
// stacks

// Room for kernel parameters, then one stack per thread, each above a page without access.
// Code runs as part of a kernel exactly if its stack pointer lies here.
class Stacks {
public:
    static constexpr size_t room = 64 * 1024, stack_size = room - 2 * page, max_threads = 1024;

    Stacks() : begin_(reserve(size).begin) { mprotect((void*)begin_, room, PROT_READ | PROT_WRITE); }

    bool holds(uintptr_t at) const { return at - begin_ < size; }
    void* parameters() const { return (void*)begin_; }

    // The tops of stacks differ in their low address bits; otherwise all threads would compete for the same
    // cache lines.
    void* top(size_t thread) {
        for (; ready_ <= thread; ready_++) {
            mprotect((void*)(begin_ + (ready_ + 1) * room + page), room - page, PROT_READ | PROT_WRITE);
        }
        return (void*)(begin_ + (thread + 2) * room - thread * 3 % 64 * 64);
    }

private:
    static constexpr size_t size = (max_threads + 1) * room;

    uintptr_t begin_;
    size_t ready_ = 0;
};

// ----------------------------------------------------------------------------
// the program: its variables, and its thread-local block, which holds the static shared memory of all kernels

struct Program {
    Region image;
    Region thread_locals;  // the calling thread's

    Program() {
        dl_iterate_phdr(
            [](dl_phdr_info* info, size_t, void* data) {
                Program& program = *static_cast<Program*>(data);
                uintptr_t end = 0;
                program.image.begin = UINTPTR_MAX;
                for (int i = 0; i < info->dlpi_phnum; i++) {
                    const auto& header = info->dlpi_phdr[i];
                    uintptr_t begin = info->dlpi_addr + header.p_vaddr;
                    if (header.p_type == PT_LOAD) {
                        program.image.begin = std::min(program.image.begin, begin);
                        end = std::max<uintptr_t>(end, begin + header.p_memsz);
                    }
                    if (header.p_type == PT_TLS && info->dlpi_tls_data) {
                        program.thread_locals = {(uintptr_t)info->dlpi_tls_data, header.p_memsz};
                    }
                }
                program.image.size = end - program.image.begin;
                program.base = info->dlpi_addr;
                return 1;  // the first object is the program
            },
            this);
    }

    uintptr_t base = 0;  // an address minus this is its offset in the file
};

}  // namespace simt
