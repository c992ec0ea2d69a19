/*
The memory of the machine that a program runs on.
*/
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>

// The number after a key in a file of Linux, or the one at its beginning. SIZE_MAX: there is none.
inline size_t number_in_file(const std::string& path, const std::string& key = "") {
    std::ifstream file(path);
    std::string word;
    while (!key.empty() && word != key && file >> word) {
    }
    size_t number;
    return file >> number ? number : SIZE_MAX;
}

// The files of memory's control groups in both of their versions, see cgroups(7).
struct GroupFiles {
    const char *folder, *limit, *used, *unused_pages;
};

// Bytes that this process could still take: what the kernel calls available, or what is left of a limit, be
// it that of a control group around this process or that of its address space (ulimit -v). The kernel drops
// cached pages of files that are not in use before a group is out of memory, so they are free. root is put
// before all paths, for tests.
inline size_t host_available_memory(const std::string& root = "") {
    constexpr GroupFiles versions[] = {
        {"memory/", "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file"},
        {"", "/memory.max", "/memory.current", "inactive_file"}};
    constexpr size_t unlimited = (size_t)1 << 62;  // version 1 says so with a number above
    size_t available = number_in_file(root + "/proc/meminfo", "MemAvailable:");
    if (available != SIZE_MAX) available *= 1024;
    auto limit_to = [&](size_t limit, size_t used, size_t unused_pages) {
        if (used == SIZE_MAX) return;
        used -= unused_pages == SIZE_MAX ? 0 : std::min(used, unused_pages);
        available = std::min(available, limit - std::min(limit, used));
    };
    // A line has the number of a hierarchy, its controllers, and the path of the process's group in it. A
    // container may see its own group as the root, and its path from outside: groups not found have no limit.
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
    rlimit space;
    if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
        size_t used = number_in_file(root + "/proc/self/status", "VmSize:");  // kB
        if (used != SIZE_MAX) limit_to(space.rlim_cur, used * 1024, 0);
    }
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
