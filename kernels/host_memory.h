/*
The memory of the machine that a program runs on.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

// Bytes this process could still take: what the kernel calls available, or what is left of a control group's
// limit.
inline size_t host_available_memory() {
    auto first_number = [](const char* path, const char* key) -> size_t {
        FILE* file = fopen(path, "r");
        if (!file) return SIZE_MAX;
        char line[256];
        unsigned long long value = 0;
        bool found = false;
        while (!found && fgets(line, sizeof line, file)) {
            if (strncmp(line, key, strlen(key)) == 0) found = sscanf(line + strlen(key), "%llu", &value) == 1;
        }
        fclose(file);
        return found ? (size_t)value : SIZE_MAX;
    };
    size_t available = first_number("/proc/meminfo", "MemAvailable:");
    if (available != SIZE_MAX) available *= 1024;
    size_t limit = first_number("/sys/fs/cgroup/memory.max", "");
    size_t used = first_number("/sys/fs/cgroup/memory.current", "");
    if (limit != SIZE_MAX && used != SIZE_MAX) available = std::min(available, limit - std::min(limit, used));
    return available;
}

// Memory for free() to take back, or null. A large array asks for pages of 2 MiB: a core remembers where some
// thousands of pages are, which is 10 MiB or so in pages of the usual size, and whoever goes down the columns
// of a larger matrix looks up nearly every one of them again. Where Linux gives none
// (/sys/kernel/mm/transparent_hugepage/enabled) the array is only slower.
inline void* allocate_host_memory(size_t bytes) {
    constexpr size_t alignment = 256, huge_page = (size_t)2 << 20;
    bool large = bytes >= 2 * huge_page;
    void* pointer;
    if (posix_memalign(&pointer, large ? huge_page : alignment, bytes) != 0) return nullptr;
    if (large) madvise(pointer, bytes, MADV_HUGEPAGE);
    return pointer;
}
