/*
The memory of the machine that a program runs on.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

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
