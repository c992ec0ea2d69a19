/*
The memory of the machine that a program runs on.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>

// Returns the number after `key` in a file, or the one at the beginning of the file if `key` is empty;
// SIZE_MAX if there is none.
inline size_t number_in_file(const std::string& path, const std::string& key = "") {
    std::ifstream file(path);
    std::string word;
    while (!key.empty() && word != key && file >> word) {
    }
    size_t number;
    return file >> number ? number : SIZE_MAX;
}

// The files of the memory controller in versions 1 and 2 of control groups, see cgroups(7).
struct GroupFiles {
    const char *folder, *limit, *used, *unused_pages;
};

// Returns the bytes that each of `processes` processes on this host can still allocate: an equal share of
// MemAvailable, or of what remains of the limit of an enclosing control group, but at most what remains of
// its own address space (ulimit -v). Unused page cache counts as free, because the kernel drops it before a
// group runs out of memory. root: a prefix of all paths, for tests.
inline size_t host_available_memory(int processes = 1, const std::string& root = "") {
    constexpr GroupFiles versions[] = {
        {"memory/", "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file"},
        {"", "/memory.max", "/memory.current", "inactive_file"}};
    constexpr size_t unlimited = (size_t)1 << 62;  // version 1 reports a larger number if there is no limit
    size_t available = number_in_file(root + "/proc/meminfo", "MemAvailable:");
    if (available != SIZE_MAX) available *= 1024;
    auto limit_to = [&](size_t limit, size_t used, size_t unused_pages) {
        if (used == SIZE_MAX) return;
        used -= unused_pages == SIZE_MAX ? 0 : std::min(used, unused_pages);
        available = std::min(available, limit - std::min(limit, used));
    };
    // Each line has a hierarchy's number, its controllers, and the path of the process's group in it. A
    // container may see its own group as the root, but with the path that it has outside: groups that are not
    // found count as unlimited.
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        bool is_v2 = line.starts_with("0::");
        if (!is_v2 && line.find(":memory") == line.npos && line.find(",memory") == line.npos) continue;
        const GroupFiles& files = versions[is_v2];
        for (std::string group = line.substr(line.find(":/") + 1);; group.erase(group.rfind('/'))) {
            const std::string folder = root + "/sys/fs/cgroup/" + files.folder + group;
            if (size_t limit = number_in_file(folder + files.limit); limit < unlimited)
                limit_to(limit, number_in_file(folder + files.used),
                         number_in_file(folder + "/memory.stat", files.unused_pages));
            if (group.find('/') == group.npos) break;
        }
    }
    available /= processes;
    rlimit space;
    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
        size_t used = number_in_file(root + "/proc/self/status", "VmSize:");  // kB
        if (used != SIZE_MAX) limit_to(space.rlim_cur, used * 1024, 0);
    }
    return available;
}

// Returns memory to be released with free(), or null. Large arrays ask for 2 MiB pages: a TLB has a few
// thousand entries, which cover some 10 MiB in pages of the usual size, so a walk down the columns of a
// larger matrix misses on nearly every access. If Linux grants no huge pages
// (/sys/kernel/mm/transparent_hugepage/enabled), the array is only slower.
inline void* allocate_host_memory(size_t bytes) {
    constexpr size_t alignment = 256, huge_page = (size_t)2 << 20;
    bool large = bytes >= 2 * huge_page;
    void* pointer;
    if (posix_memalign(&pointer, large ? huge_page : alignment, bytes) != 0) return nullptr;
    if (large) madvise(pointer, bytes, MADV_HUGEPAGE);
    return pointer;
}

// Memory that is kept for the next use. of() returns room for `count`, uninitialized and aligned to 256
// bytes, and invalidates what it returned before.
template <typename T>
class KeptMemory {
public:
    T* of(size_t count) {
        if (count > capacity_) {
            memory_.reset();
            capacity_ = 0;
            memory_.reset((T*)allocate_host_memory(count * sizeof(T)));
            if (!memory_) throw std::bad_alloc();
            capacity_ = count;
        }
        return memory_.get();
    }

private:
    struct Free {
        void operator()(T* memory) const { free(memory); }
    };
    std::unique_ptr<T, Free> memory_;
    size_t capacity_ = 0;
};
