/*
Replacements for C library functions in the whole test program, which fail when a test asks for it.
*/
#pragma once

#include <cerrno>
#include <cstdio>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

inline std::string fail_next_rename_to, fail_next_sync_of;
inline int interrupted_syncs = 0;        // how many of the next calls fail with EINTR
inline std::vector<std::string> synced;  // paths

extern "C" int rename(const char* from, const char* to) noexcept {
    if (to == fail_next_rename_to) {
        fail_next_rename_to.clear();
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_renameat, -100, from, -100, to);  // AT_FDCWD
}

extern "C" int fsync(int file) {
    if (interrupted_syncs > 0) {
        interrupted_syncs--;
        errno = EINTR;
        return -1;
    }
    char path[4096];
    ssize_t length = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof path);
    synced.emplace_back(path, length > 0 ? (size_t)length : 0);
    if (synced.back() == fail_next_sync_of) {
        fail_next_sync_of.clear();
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_fsync, file);
}
