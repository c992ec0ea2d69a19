/*
Files that are read whole and files that are written whole. A MappedFile is a read-only view of a regular file
of any size. A NewFile appears under its name complete and durable, or not at all: it is written as
NAME.partial in the same folder, and renamed at the end.

Other users who can write to a folder can plant links, FIFOs and devices in it, under names that the program
is going to write. The program refuses to write through them. A folder may itself be a link, except in a run
directory.
*/
#pragma once

#include <cerrno>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <string>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "data/base/deadlines.h"
#include "data/base/error.h"
#include "data/base/strings.h"

// "PATH: cannot ACTION: REASON; REMEDY", with the reason in errno.
[[noreturn]] inline void fail_with_errno(const std::string& path, const char* action) {
    static constexpr struct {
        int reason;
        const char* remedy;
        Lack lack = Lack::none;
    } known[] = {{ENOENT, "check the path"},
                 {ENOTDIR, "check the path"},
                 {EISDIR, "check the path"},
                 {ENAMETOOLONG, "check the path"},
                 {EACCES, "check the permissions"},
                 {EPERM, "check the permissions"},
                 {EROFS, "choose another location"},
                 {ENOSPC, "free some space there or choose another location, then try again", Lack::disk},
                 {EDQUOT, "delete some files or choose another location, then try again", Lack::quota},
                 {EFBIG, "raise the size limit (ulimit -f) or choose another location, then try again",
                  Lack::file_size},
                 {EMFILE, "raise the limit on open files (ulimit -n)"}};
    const int given = errno;
    const std::string message = text("%s: cannot %s: %s; ", path.c_str(), action, strerror(given));
    for (const auto& [reason, remedy, lack] : known) {
        if (reason != given) continue;
        if (lack != Lack::none) throw DiskFull(message + remedy, lack);
        throw Error(message + remedy);
    }
    throw FailedPart(message + "check the file system, then try again");
}

// Throws like fail_with_errno().
[[noreturn]] inline void fail_with_code(std::error_code error, const std::string& path, const char* action) {
    errno = error.value();
    fail_with_errno(path, action);
}

// Owns a file descriptor.
class FileHandle {
public:
    explicit FileHandle(int descriptor = -1) : descriptor_(descriptor) {}
    FileHandle(FileHandle&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
    FileHandle& operator=(FileHandle&& other) noexcept {
        std::swap(descriptor_, other.descriptor_);
        return *this;
    }
    ~FileHandle() { close(); }

    int get() const { return descriptor_; }
    explicit operator bool() const { return descriptor_ >= 0; }

    // Returns the result of close(2); some file systems report a full disk only here.
    int close() {
        int descriptor = std::exchange(descriptor_, -1);
        return descriptor < 0 ? 0 : ::close(descriptor);
    }

private:
    int descriptor_;
};

// open(2) and rename(2), noted while they last: a hanging file system may block either.
inline FileHandle open_file(const std::string& path, int flags) {
    WorksOn work("opening " + path);
    return FileHandle(open(path.c_str(), flags | O_CLOEXEC, 0666));
}
inline int rename_file(const std::string& from, const std::string& to) {
    WorksOn work("renaming " + from);
    return rename(from.c_str(), to.c_str());
}

// Opens a regular file for writing. Refuses anything else under this name. If the file cannot be opened, the
// handle is empty and errno has the reason.
inline FileHandle open_to_write(const std::string& path, int flags) {
    FileHandle file = open_file(path, flags | O_NOFOLLOW | O_NONBLOCK);
    int reason = errno;
    struct stat status;
    bool known = file ? fstat(file.get(), &status) == 0 : lstat(path.c_str(), &status) == 0;
    if (known && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode))
        fail("%s: is %s; remove it, or choose another location", path.c_str(),
             S_ISLNK(status.st_mode) ? "a link, and output does not follow links" : "not a regular file");
    errno = reason;
    return file;
}

// Opens a regular file for reading. Refuses anything else, and does not wait for the other end of a pipe.
inline FileHandle open_regular(const std::string& path, struct stat* status) {
    FileHandle file = open_file(path, O_RDONLY | O_NONBLOCK);
    if (!file) fail_with_errno(path, "open it");
    if (fstat(file.get(), status) != 0) fail_with_errno(path, "stat it");
    if (S_ISDIR(status->st_mode)) fail("%s: is a folder; name the files in it", path.c_str());
    if (!S_ISREG(status->st_mode)) fail("%s: is not a regular file; copy it to one", path.c_str());
    return file;
}

// Reads bytes [offset, offset + bytes) of a file. Returns false if the file ends before that.
inline bool read_at(const FileHandle& file, const std::string& path, uint64_t offset, void* to,
                    size_t bytes) {
    WorksOn work("reading " + path);
    for (size_t done = 0; done < bytes;) {
        ssize_t got = pread(file.get(), (char*)to + done, bytes - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) fail_with_errno(path, "read it");
        if (got == 0) return false;
        done += (size_t)got;
    }
    return true;
}

inline void refuse_lfs_pointer(const FileHandle& file, const std::string& path) {
    char begin[64] = {};
    if (pread(file.get(), begin, sizeof begin, 0) > 0) refuse_lfs_pointer({begin, sizeof begin}, path);
}

// Returns the folder for temporary files.
inline std::string temporary_folder() {
    const char* folder = getenv("TMPDIR");
    return folder && *folder ? folder : "/tmp";
}

// Returns the content of a small file. Refuses one of more than `most` bytes, with the message `refusal`.
inline std::string read_whole(const std::string& path, uint64_t most, const char* refusal) {
    struct stat status;
    FileHandle file = open_regular(path, &status);
    if ((uint64_t)status.st_size > most)
        fail("%s: %lld bytes; %s", path.c_str(), (long long)status.st_size, refusal);
    std::string bytes((size_t)status.st_size, '\0');
    if (!read_at(file, path, 0, bytes.data(), bytes.size()))
        fail("%s: was truncated while being read; try again when nothing is writing it", path.c_str());
    return bytes;
}

// Writes bytes [offset, offset + bytes) of a file.
inline void write_at(const FileHandle& file, const std::string& path, uint64_t offset, const void* data,
                     size_t bytes) {
    WorksOn work("writing " + path);
    for (size_t done = 0; done < bytes;) {
        ssize_t written = pwrite(file.get(), (const char*)data + done, bytes - done, (off_t)(offset + done));
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) fail_with_errno(path, "write it");
        done += (size_t)written;
    }
}

// Writes a small file in place, over an existing one if there is one; several processes may write the same
// content.
inline void write_over(const std::string& path, std::string_view content) {
    FileHandle file = open_to_write(path, O_WRONLY | O_CREAT | O_TRUNC);
    if (!file) fail_with_errno(path, "create it");
    write_at(file, path, 0, content.data(), content.size());
}

// Locks a file without waiting. Returns false if another process has locked it, and true if the file system
// does not support locks.
inline bool try_lock(const FileHandle& file) {
    return flock(file.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

// Creates a lock file, whose lock says that this process has exclusive use of something, and locks it. If
// another process holds the lock, fails with the message `refusal`.
inline FileHandle take_lock(const std::string& path, const std::string& refusal) {
    FileHandle file = open_to_write(path, O_RDWR | O_CREAT);
    if (!file) fail_with_errno(path, "create it");
    if (!try_lock(file)) fail("%s", refusal.c_str());
    return file;
}

// Returns whether another process, on any machine, has locked a file. It locks the file itself for a moment,
// during which no other process can lock it.
inline bool is_locked(const std::string& path) {
    FileHandle file = open_file(path, O_RDWR);
    return file && !try_lock(file);
}

// Flushes writes to the file, or the names in the folder, to disk.
inline void sync_file(const FileHandle& file, const std::string& path) {
    WorksOn work("flushing " + path);
    while (fsync(file.get()) != 0) {
        if (errno == EINVAL) return;  // some file systems cannot sync a folder, and need not
        if (errno != EINTR) fail_with_errno(path, "write it");
    }
}

inline void sync_folder(const std::string& folder) {
    FileHandle handle = open_file(folder, O_RDONLY | O_DIRECTORY);
    if (!handle) fail_with_errno(folder, "open it");
    sync_file(handle, folder);
}

// ----------------------------------------------------------------------------
// standard streams

// Opens closed standard streams on /dev/null, so that no file of ours gets their descriptors. Ignores
// SIGXFSZ, so that write() returns an error when a file reaches its size limit (ulimit -f), and no signal
// ends the program.
inline void open_standard_streams() {
    std::signal(SIGXFSZ, SIG_IGN);
    int descriptor;
    do descriptor = open("/dev/null", O_RDWR);
    while (descriptor >= 0 && descriptor <= STDERR_FILENO);
    close(descriptor);
}

// Throws if text on standard output could not be written.
inline void check_standard_output() {
    if (fflush(stdout) != 0 || ferror(stdout))
        fail("standard output: could not be written in full; check the disk or the program that reads it");
}

// ----------------------------------------------------------------------------
// reading

// A read of a mapped page that is lost (the file was truncated, or its disk failed) cannot return an error,
// but raises SIGBUS: the handler jumps out of read_mapped(), or ends the program.
inline thread_local sigjmp_buf* mapped_reader = nullptr;

inline void leave_lost_page(int) {
    if (mapped_reader) siglongjmp(*mapped_reader, 1);
    constexpr char message[] = "train_gpt: a file was truncated or became unreadable while in use; "
                               "restore it and start again\n";
    [[maybe_unused]] ssize_t written = write(STDERR_FILENO, message, sizeof message - 1);
    _exit(exit_failed_part);
}

// Runs read(), which reads from a mapped file and must not own anything meanwhile: no destructor runs if the
// signal handler jumps out of it. Throws FailedPart if a page of the file is lost, because the file may come
// back.
template <typename Read>
void read_mapped(const std::string& path, Read&& read) {
    struct Restored {
        sigjmp_buf* outer;
        ~Restored() { mapped_reader = outer; }
    } restored{mapped_reader};
    sigjmp_buf here;
    if (sigsetjmp(here, 1) != 0)
        fail_part("%s: was truncated or became unreadable while in use; restore it", path.c_str());
    mapped_reader = &here;
    read();
}

class MappedFile {
public:
    explicit MappedFile(const std::string& path) {
        struct stat status;
        FileHandle file = open_regular(path, &status);
        size_ = (size_t)status.st_size;
        if (size_ == 0) return;  // nothing to map
        void* address = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.get(), 0);
        if (address == MAP_FAILED) fail_with_errno(path, "map it into memory");
        std::signal(SIGBUS, leave_lost_page);
        data_ = (const char*)address;
    }

    MappedFile(MappedFile&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    MappedFile& operator=(MappedFile&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~MappedFile() {
        if (data_) munmap((void*)data_, size_);
    }

    const char* data() const { return data_; }
    size_t size() const { return size_; }

private:
    const char* data_ = nullptr;
    size_t size_ = 0;
};

// ----------------------------------------------------------------------------
// writing

// Bytes free in the folder of a file; UINT64_MAX if unknown, because writing will find out.
inline uint64_t free_space(const std::string& path) {
    WorksOn work("checking the free space at " + path);
    std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
    struct statvfs status;
    while (statvfs(folder.c_str(), &status) != 0) {
        if (errno != ENOENT || !folder.has_relative_path()) return UINT64_MAX;
        folder = folder.parent_path();  // the folder may still have to be created
    }
    return (uint64_t)status.f_bavail * status.f_frsize;
}

// Refuses a file that is larger than the free space in its folder: better before hours of work than after.
inline void check_space(const std::string& path, uint64_t needed) {
    uint64_t free_bytes = free_space(path);
    if (free_bytes >= needed) return;
    constexpr double MB = 1e6;
    throw DiskFull(
        text("%s: needs %.1f MB, but only %.1f MB are free; free some space there or choose another location",
             path.c_str(), (double)needed / MB, (double)free_bytes / MB));
}

class NewFile {
public:
    // Fails if another process is still writing the file. Otherwise removes what an interrupted run left, and
    // creates a new file, which no other process has open.
    explicit NewFile(std::string path) : path_(std::move(path)), partial_(path_ + ".partial") {
        FileHandle left = open_to_write(partial_, O_WRONLY);
        if (left) {
            take(left);
            if (unlink(partial_.c_str()) != 0) fail_with_errno(partial_, "remove it");
        }
        file_ = open_to_write(partial_, O_WRONLY | O_CREAT | O_EXCL);
        if (!file_ && errno == EEXIST) fail_as_busy();
        if (!file_) fail_with_errno(path_, "create it");
        take(file_);
        exists_ = true;
    }

    NewFile(const NewFile&) = delete;
    NewFile& operator=(const NewFile&) = delete;
    ~NewFile() {
        WorksOn work("removing " + partial_);
        if (exists_) unlink(partial_.c_str());
    }

    // Appends.
    void write(const void* data, size_t bytes) {
        write_at(size_, data, bytes);
        size_ += bytes;
    }

    // Overwrites bytes at an offset, without moving the position of write().
    void write_at(uint64_t offset, const void* data, size_t bytes) {
        ::write_at(file_, path_, offset, data, bytes);
    }

    // Sets the size; bytes that are not written are zero.
    void resize(uint64_t bytes) {
        WorksOn work("writing " + path_);
        if (ftruncate(file_.get(), (off_t)bytes) != 0) fail_with_errno(path_, "write it");
    }

    // Flushes everything to disk; nothing more can be written after that.
    void finish() {
        if (!file_) return;
        sync_file(file_, path_);
        if (file_.close() != 0) fail_with_errno(path_, "write it");
    }

    // Renames the file to its final name, durably.
    void commit() {
        finish();
        if (rename_file(partial_, path_) != 0) fail_with_errno(path_, "give the new file this name");
        exists_ = false;
        std::filesystem::path folder = std::filesystem::path(path_).parent_path();
        sync_folder(folder.empty() ? "." : folder.string());
    }

    bool finished() const { return !file_; }
    const std::string& path() const { return path_; }

private:
    // Locks the file. Between open() and flock() another process may have removed it or given it its final
    // name.
    void take(const FileHandle& file) const {
        struct stat opened, named;
        bool locked = try_lock(file);
        bool same = fstat(file.get(), &opened) == 0 && lstat(partial_.c_str(), &named) == 0 &&
                    opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
        if (!locked || !same) fail_as_busy();
    }
    [[noreturn]] void fail_as_busy() const {
        fail("%s: another process is writing it; wait until it ends or choose another name", path_.c_str());
    }

    std::string path_, partial_;
    FileHandle file_;
    uint64_t size_ = 0;
    bool exists_ = false;
};

inline void write_whole(const std::string& path, std::string_view content) {
    NewFile file(path);
    file.write(content.data(), content.size());
    file.commit();
}

// Returns the text of a file; "-" is standard input.
inline std::string read_text(const std::string& path) {
    if (path == "-") return std::string(std::istreambuf_iterator<char>(std::cin), {});
    MappedFile file(path);
    return std::string(file.data(), file.size());
}

// Refuses a folder that another user owns, because that user could have left anything in it. A missing folder
// passes.
inline void check_own_folder(const std::string& path) {
    struct stat status;
    if (lstat(path.c_str(), &status) != 0) return;
    if (!S_ISDIR(status.st_mode) || status.st_uid != geteuid())
        fail("%s: is not a folder that you own; choose another location", path.c_str());
}

// Creates a folder and its missing parents. Returns whether it is new.
inline bool make_folder(const std::string& path, const std::string& remedy = "check the path") {
    WorksOn work("making " + path);
    std::error_code error;
    bool made = std::filesystem::create_directories(path, error);
    if (error)
        fail("%s: cannot make the folder: %s; %s", path.c_str(), error.message().c_str(), remedy.c_str());
    return made;
}

// Refuses anything but a folder at a path where a run directory has a folder. Refuses even a link to a
// folder, because files in it are written and removed. A missing folder passes.
inline void check_folder_of_run(const std::string& path) {
    struct stat status;
    if (lstat(path.c_str(), &status) == 0 && !S_ISDIR(status.st_mode))
        fail("%s: is %s; move it away, or choose another run directory", path.c_str(),
             S_ISLNK(status.st_mode) ? "a link (a run directory may be one, but not the folders in it)"
                                     : "not a folder");
}

inline bool is_same_folder(const std::string& a, const std::string& b) {
    std::error_code not_there;
    return a == b || std::filesystem::equivalent(a, b, not_there);
}
