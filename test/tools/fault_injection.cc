/*
A library between a program and the system (LD_PRELOAD) that makes one call fail. By default it counts calls
that change a folder `checkpoints` or anything below it; other kinds are counted if requested. All other calls
pass through. The program needs no change.

    FAULT_BELOW=name   counts calls below folders of this name instead of `checkpoints`
    FAULT_AT=k         the call that is struck, counted from 1; without it, none is
    FAULT=kill         (the default) the process is killed before the call
          torn         as kill, but half of a write is done first
          power        as kill, and data written to any file and not synchronized since is lost
          ENOSPC, EIO  the call fails with this error
          stop         the process is stopped before the call (SIGSTOP)
          stall        the call takes FAULT_SECONDS longer, and then succeeds
          lose         (of a message) this call and all after it send nothing, and never complete
          flip         (of a product) a bit of its result is wrong
    FAULT_LASTING=1    later calls fail as well
    FAULT_CALLS=...    only these are counted, of: create, write, truncate, sync, rename, link, unlink, mkdir,
                       rmdir (the default is all of those); read; init (MPI_Init_thread), dup (MPI_Comm_idup),
                       product (dnnl_sgemm); touch: the first access to a page of a mapped file whose name
                       contains FAULT_MAPPED; message: MPI_Isend between the ranks of a group
    FAULT_RANK=r       only in rank r of an MPI job
    FAULT_WHEN=path    calls are counted only while a file of this name exists
    FAULT_LIST=path    appends a line with number, call and name to this file for each counted call

Killing a process leaves the system's page cache of its files intact; `power` models a machine that goes down.
Calls that libc makes internally (those of stdio) are not seen.
*/
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

std::string setting(const char* name, const char* otherwise = "") {
    const char* value = getenv(name);
    return value && *value ? value : otherwise;
}

// The function of this name that would be called without this library.
#define REAL(name) ((decltype(&::name))dlsym(RTLD_NEXT, #name))

class Faults {
public:
    // Returns true if the call must fail (errno is set), be lost or be flipped. `half` performs the first
    // half of a call that can be split.
    template <typename Half>
    bool strike(const char* call, const std::string& path, Half&& half) {
        return is_below(path) && strike_any(call, path, half);
    }
    bool strike(const char* call, const std::string& path) {
        return strike(call, path, [] {});
    }

    bool flips() const { return kind_ == "flip"; }

    bool counts(const char* call) const {
        return concerned_ && calls_.find("," + std::string(call) + ",") != calls_.npos;
    }

    // Also strikes calls on files elsewhere, and calls on no file.
    template <typename Half>
    bool strike_any(const char* call, const std::string& path, Half&& half) {
        if (!counts(call) || (!when_.empty() && access(when_.c_str(), F_OK) != 0)) return false;
        std::unique_lock lock(mutex_);
        count_++;
        list(call, path);
        if (at_ == 0 || count_ < at_ || (count_ > at_ && !lasting_)) return false;
        if (kind_ == "lose" || kind_ == "flip") return true;
        if (kind_ == "ENOSPC" || kind_ == "EIO") {
            errno = kind_ == "EIO" ? EIO : ENOSPC;
            return true;
        }
        if (kind_ == "stop" || kind_ == "stall") {
            lock.unlock();
            if (kind_ == "stop")
                kill(getpid(), SIGSTOP);
            else
                usleep((useconds_t)(1e6 * atof(setting("FAULT_SECONDS", "1").c_str())));
            return false;
        }
        if (kind_ == "torn") half();
        if (kind_ == "power") lose_unsynchronised();
        kill(getpid(), SIGKILL);
        return true;
    }

    // Called before a file is written. Holds a descriptor of it until it is synchronized, since it may be
    // renamed meanwhile.
    void writes(int file) {
        std::lock_guard lock(mutex_);
        struct stat status;
        if (kind_ != "power" || fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) return;
        auto [kept, added] = unsynchronised_.try_emplace({status.st_dev, status.st_ino});
        if (added) kept->second = {fcntl(file, F_DUPFD_CLOEXEC, 0), status.st_size};
    }
    void synchronised(int file) {
        std::lock_guard lock(mutex_);
        struct stat status;
        if (fstat(file, &status) != 0) return;
        auto kept = unsynchronised_.find({status.st_dev, status.st_ino});
        if (kept == unsynchronised_.end()) return;
        close(kept->second.file);
        unsynchronised_.erase(kept);
    }

private:
    bool is_below(const std::string& path) const {
        return path.find("/" + below_ + "/") != path.npos || path.starts_with(below_ + "/") ||
               path.ends_with("/" + below_);
    }

    void list(const char* call, const std::string& path) {
        if (list_.empty()) return;
        std::string name = path.substr(std::min(path.find(below_), path.size()));
        std::string line = std::to_string(count_) + " " + call + " " + name + "\n";
        int file = REAL(open)(list_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        if (file < 0 || REAL(write)(file, line.data(), line.size()) != (ssize_t)line.size()) abort();
        close(file);
    }

    void lose_unsynchronised() {
        for (auto& [unused, kept] : unsynchronised_) {
            struct stat status;
            if (fstat(kept.file, &status) != 0) abort();
            if (kept.safe < status.st_size && REAL(ftruncate)(kept.file, kept.safe) != 0) abort();
        }
    }

    std::mutex mutex_;
    bool concerned_ =
        setting("FAULT_RANK").empty() || setting("FAULT_RANK") == setting("OMPI_COMM_WORLD_RANK");
    std::string calls_ =
        "," + setting("FAULT_CALLS", "create,write,truncate,sync,rename,link,unlink,mkdir,rmdir") + ",";
    std::string kind_ = setting("FAULT", "kill"), list_ = setting("FAULT_LIST"),
                when_ = setting("FAULT_WHEN"), below_ = setting("FAULT_BELOW", "checkpoints");
    long at_ = atol(setting("FAULT_AT", "0").c_str()), count_ = 0;
    bool lasting_ = setting("FAULT_LASTING") == "1" || kind_ == "lose";
    struct Unsynchronised {
        int file;
        off_t safe;  // bytes that are on disk
    };
    std::map<std::pair<dev_t, ino_t>, Unsynchronised> unsynchronised_;
};

// Never destroyed: files are written until the process has exited.
Faults& faults() {
    static auto* all = new Faults;
    return *all;
}

// Returns the path of an open file, or of a name in an open folder.
std::string path_of(int file) {
    char path[PATH_MAX];
    ssize_t length = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof path);
    return std::string(path, length > 0 ? (size_t)length : 0);
}
std::string path_at(int folder, const char* name) {
    return folder == AT_FDCWD || *name == '/' ? name : path_of(folder) + "/" + name;
}

template <typename Real>
int open_at(Real&& real, int folder, const char* name, int flags) {
    if ((flags & O_CREAT) && faults().strike("create", path_at(folder, name))) return -1;
    return real();
}

// `write_first(n)` writes the first n bytes.
template <typename WriteFirst>
ssize_t write_some(int file, size_t bytes, WriteFirst&& write_first) {
    if (faults().strike("write", path_of(file), [&] { (void)!write_first(bytes / 2); })) return -1;
    faults().writes(file);
    return write_first(bytes);
}

template <typename Real>
int truncate_file(int file, Real&& real) {
    if (faults().strike("truncate", path_of(file))) return -1;
    faults().writes(file);
    return real();
}

template <typename Real>
int synchronise(int file, Real&& real) {
    if (faults().strike("sync", path_of(file))) return -1;
    int result = real();
    if (result == 0) faults().synchronised(file);
    return result;
}

// Mapped files whose pages stay unreadable until they are touched.
class UntouchedPages {
public:
    static UntouchedPages& all() {
        static auto* pages = new UntouchedPages;
        return *pages;
    }

    void add(void* address, size_t bytes) {
        std::lock_guard lock(mutex_);
        if (maps_.empty()) {
            struct sigaction action = {};
            action.sa_flags = SA_SIGINFO | SA_NODEFER;
            action.sa_sigaction = touched;
            sigaction(SIGSEGV, &action, nullptr);
        }
        maps_.push_back({(char*)address, bytes});
        mprotect(address, bytes, PROT_NONE);
    }

private:
    static void touched(int, siginfo_t* info, void*) {
        UntouchedPages& pages = all();
        auto* at = (char*)info->si_addr;
        {
            std::lock_guard lock(pages.mutex_);
            auto holds = [&](auto& map) { return map.first <= at && at < map.first + map.second; };
            if (std::none_of(pages.maps_.begin(), pages.maps_.end(), holds)) {
                signal(SIGSEGV, SIG_DFL);  // a fault elsewhere, which recurs when this returns
                return;
            }
        }
        faults().strike_any("touch", "", [] {});
        auto size = (uintptr_t)sysconf(_SC_PAGESIZE);
        mprotect((void*)((uintptr_t)at / size * size), size, PROT_READ);
    }

    std::mutex mutex_;
    std::vector<std::pair<char*, size_t>> maps_;
};

mode_t mode_of(int flags, va_list arguments) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

// ----------------------------------------------------------------------------
// replacements for libc's functions

extern "C" {

#define OPEN(name)                                                                                           \
    int name(const char* path, int flags, ...) {                                                             \
        va_list arguments;                                                                                   \
        va_start(arguments, flags);                                                                          \
        mode_t mode = mode_of(flags, arguments);                                                             \
        va_end(arguments);                                                                                   \
        return open_at([&] { return REAL(name)(path, flags, mode); }, AT_FDCWD, path, flags);                \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                         \
    int name(int folder, const char* path, int flags, ...) {                                                 \
        va_list arguments;                                                                                   \
        va_start(arguments, flags);                                                                          \
        mode_t mode = mode_of(flags, arguments);                                                             \
        va_end(arguments);                                                                                   \
        return open_at([&] { return REAL(name)(folder, path, flags, mode); }, folder, path, flags);          \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void* data, size_t bytes) {
    return write_some(file, bytes, [&](size_t n) { return REAL(write)(file, data, n); });
}
ssize_t pwrite(int file, const void* data, size_t bytes, off_t offset) {
    return write_some(file, bytes, [&](size_t n) { return REAL(pwrite)(file, data, n, offset); });
}
ssize_t pwrite64(int file, const void* data, size_t bytes, off64_t offset) {
    return write_some(file, bytes, [&](size_t n) { return REAL(pwrite64)(file, data, n, offset); });
}

ssize_t read(int file, void* data, size_t bytes) {
    return faults().strike("read", path_of(file)) ? -1 : REAL(read)(file, data, bytes);
}
ssize_t pread(int file, void* data, size_t bytes, off_t offset) {
    return faults().strike("read", path_of(file)) ? -1 : REAL(pread)(file, data, bytes, offset);
}
ssize_t pread64(int file, void* data, size_t bytes, off64_t offset) {
    return faults().strike("read", path_of(file)) ? -1 : REAL(pread64)(file, data, bytes, offset);
}

int ftruncate(int file, off_t bytes) noexcept {
    return truncate_file(file, [&] { return REAL(ftruncate)(file, bytes); });
}
int ftruncate64(int file, off64_t bytes) noexcept {
    return truncate_file(file, [&] { return REAL(ftruncate64)(file, bytes); });
}
int fallocate(int file, int mode, off_t offset, off_t bytes) {
    return truncate_file(file, [&] { return REAL(fallocate)(file, mode, offset, bytes); });
}

int fsync(int file) {
    return synchronise(file, [&] { return REAL(fsync)(file); });
}
int fdatasync(int file) {
    return synchronise(file, [&] { return REAL(fdatasync)(file); });
}

// Reported under the new name.
int rename(const char* from, const char* to) noexcept {
    return faults().strike("rename", to) ? -1 : REAL(rename)(from, to);
}
int link(const char* from, const char* to) noexcept {
    return faults().strike("link", to) ? -1 : REAL(link)(from, to);
}
int unlink(const char* path) noexcept {
    return faults().strike("unlink", path) ? -1 : REAL(unlink)(path);
}
int unlinkat(int folder, const char* path, int flags) noexcept {
    const char* call = flags & AT_REMOVEDIR ? "rmdir" : "unlink";
    return faults().strike(call, path_at(folder, path)) ? -1 : REAL(unlinkat)(folder, path, flags);
}
int remove(const char* path) noexcept {
    return faults().strike("unlink", path) ? -1 : REAL(remove)(path);
}
int mkdir(const char* path, mode_t mode) noexcept {
    return faults().strike("mkdir", path) ? -1 : REAL(mkdir)(path, mode);
}
int rmdir(const char* path) noexcept {
    return faults().strike("rmdir", path) ? -1 : REAL(rmdir)(path);
}

// Declared here because this library is not linked with MPI or oneDNN.
int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
    faults().strike_any("init", "", [] {});
    return REAL(MPI_Init_thread)(argc, argv, required, provided);
}
int dnnl_sgemm(char a, char b, long m, long n, long k, float alpha, const float* A, long lda, const float* B,
               long ldb, float beta, float* C, long ldc) {
    constexpr int out_of_memory = 1;
    bool struck = faults().strike_any("product", "", [] {});
    if (struck && !faults().flips()) return out_of_memory;
    int status = REAL(dnnl_sgemm)(a, b, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc);
    if (struck) ((unsigned char*)C)[m / 2 * ldc * (long)sizeof *C + 2] ^= 16;
    return status;
}
// The first duplicate is the communicator of the watchdogs, the second that of the control plane, the third
// that of the groups.
static void* communicator_of_groups = nullptr;
int MPI_Comm_idup(void* comm, void** dup, void** request) {
    static int made = 0;
    faults().strike_any("dup", "", [] {});
    int result = REAL(MPI_Comm_idup)(comm, dup, request);
    if (++made == 3) communicator_of_groups = *dup;
    return result;
}
// A lost message is replaced by a receive that nothing ever matches, so its request never completes.
int MPI_Irecv(void* data, int count, void* type, int from, int tag, void* comm, void** request);
int MPI_Isend(const void* data, int count, void* type, int to, int tag, void* comm, void** request) {
    if (comm != communicator_of_groups || !faults().strike_any("message", "", [] {}))
        return REAL(MPI_Isend)(data, count, type, to, tag, comm, request);
    constexpr int nobodys = 0x7ffffff0;  // tag
    static char nowhere;
    return REAL(MPI_Irecv)(&nowhere, 1, type, to, nobodys, comm, request);
}

void* mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
    void* mapped = REAL(mmap)(address, bytes, protection, flags, file, offset);
    std::string name = setting("FAULT_MAPPED");
    if (mapped != MAP_FAILED && file >= 0 && !name.empty() && faults().counts("touch") &&
        path_of(file).find(name) != std::string::npos)
        UntouchedPages::all().add(mapped, bytes);
    return mapped;
}

}  // extern "C"
